//! Test of several hosts' accesses for conflicts.
//!
//! For each file that several hosts use, the test visits all ranges in the order of their starts. A range conflicts
//! with an earlier one of another host if that one ends after the range's start and one of the two was written. The
//! test remembers the two furthest ends so far, of different hosts, so each range takes constant time. Only after a
//! conflict the processes are compared one by one.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use firn_protocol::path::BytePath;

use serde::{Deserialize, Serialize};

use super::list::{File, Name, Published};
use super::log::Access;

/// A process of a host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Party {
    /// The host.
    pub host: String,
    /// Process id; 0: unknown.
    pub pid: u32,
    /// Whether it wrote.
    pub writes: bool,
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let did = if self.writes { "written" } else { "read" };
        match self.pid {
            0 => write!(f, "{did} on {}", self.host),
            pid => write!(f, "{did} on {} by process {pid}", self.host),
        }
    }
}

/// Kind of a conflict between two hosts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum What {
    /// A part of a file: from, to.
    Bytes(u64, u64),
    /// A name.
    Name,
    /// Owner, mode or extended attributes.
    Attributes,
}

/// One conflict.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Conflict {
    /// Path relative to the backing.
    pub path: BytePath,
    /// What of it.
    pub what: What,
    /// The two parties of the conflict; without processes if the conflict is over a name or attributes.
    pub parties: [Party; 2],
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            path,
            what,
            parties: [one, other],
        } = self;
        match what {
            What::Bytes(start, u64::MAX) => {
                write!(f, "{path}, from byte {start} on: {one}, {other}")
            }
            What::Bytes(start, end) => {
                write!(f, "{path}, bytes {start} to {}: {one}, {other}", end - 1)
            }
            What::Name if other.writes => {
                write!(
                    f,
                    "{path}: the name was changed on {} and on {}",
                    one.host, other.host
                )
            }
            What::Name => write!(
                f,
                "{path}: the name was changed on {}, used on {}",
                one.host, other.host
            ),
            What::Attributes => {
                write!(
                    f,
                    "{path}: owner, mode or attributes changed on {} and on {}",
                    one.host, other.host
                )
            }
        }
    }
}

/// The result of a test.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The first conflicts, by path and place.
    pub conflicts: Vec<Conflict>,
    /// Their number, also of those that are not listed.
    pub total: u64,
}

impl Report {
    /// Conflicts that are listed at most.
    pub const LISTED_MAX: usize = 1000;

    fn add(&mut self, conflict: impl FnOnce() -> Conflict) {
        self.total += 1;
        if self.conflicts.len() < Self::LISTED_MAX {
            self.conflicts.push(conflict());
        }
    }
}

/// Tests the lists of all hosts, which are different ones.
pub fn test(lists: &[Published]) -> Report {
    let mut report = Report::default();
    let mut files: BTreeMap<u64, Vec<(usize, &File)>> = BTreeMap::new();
    for (host, list) in lists.iter().enumerate() {
        for file in &list.files {
            files.entry(file.ino).or_default().push((host, file));
        }
    }
    for users in files.values() {
        if users.iter().any(|(host, _)| *host != users[0].0) {
            test_file(lists, users, &mut report);
        }
    }
    test_names(lists, &mut report);
    test_made(lists, &mut report);
    test_attributes(lists, &mut report);
    report.conflicts.sort();
    report
}

struct Item {
    start: u64,
    end: u64,
    /// Index of the process, and whether it writes.
    process: u32,
    access: Access,
}

/// The furthest end so far, and the furthest of another host.
#[derive(Clone, Copy, Default)]
struct Furthest {
    first: (u64, usize),
    second: (u64, usize),
}

impl Furthest {
    fn add(&mut self, end: u64, host: usize) {
        if host == self.first.1 {
            self.first.0 = self.first.0.max(end);
        } else if end > self.first.0 {
            (self.first, self.second) = ((end, host), self.first);
        } else if end > self.second.0 {
            self.second = (end, host);
        }
    }

    fn of_others(&self, host: usize) -> u64 {
        if self.first.1 == host {
            self.second.0
        } else {
            self.first.0
        }
    }
}

fn test_file(lists: &[Published], users: &[(usize, &File)], report: &mut Report) {
    let processes: Vec<(usize, u32)> = users
        .iter()
        .flat_map(|(host, file)| file.processes.iter().map(|p| (*host, p.pid)))
        .collect();
    let mut items = Vec::new();
    let all = users.iter().flat_map(|(_, file)| &file.processes);
    for (index, process) in all.enumerate() {
        let item = |access| {
            move |(start, end)| Item {
                start,
                end,
                process: index as u32,
                access,
            }
        };
        items.extend(process.read().map(item(Access::Read)));
        items.extend(process.written().map(item(Access::Write)));
    }
    items.sort_unstable_by_key(|item| item.start);
    let mut any = Furthest::default();
    let mut writes = Furthest::default();
    // Ends of the last read and the last write of each process.
    let mut ends = vec![(0u64, 0u64); processes.len()];
    let path = || users[0].1.path.as_slice().into();
    let party = |index: usize, access| {
        let (host, pid) = processes[index];
        Party {
            host: lists[host].host.clone(),
            pid,
            writes: access == Access::Write,
        }
    };
    for Item {
        start,
        end,
        process,
        access,
    } in items
    {
        let process = process as usize;
        let host = processes[process].0;
        let before = if access == Access::Write {
            &any
        } else {
            &writes
        };
        if before.of_others(host) > start {
            for (other, &(read, written)) in ends.iter().enumerate() {
                if processes[other].0 == host {
                    continue;
                }
                let until = if access == Access::Write {
                    read.max(written)
                } else {
                    written
                };
                if until <= start {
                    continue;
                }
                let how = if written > start {
                    Access::Write
                } else {
                    Access::Read
                };
                report.add(|| Conflict {
                    path: path(),
                    what: What::Bytes(start, end.min(until)),
                    parties: [party(other, how), party(process, access)],
                });
            }
        }
        any.add(end, host);
        let (read, written) = &mut ends[process];
        match access {
            Access::Read => *read = end.max(*read),
            Access::Write => {
                writes.add(end, host);
                *written = end.max(*written);
            }
        }
    }
}

fn without_process(host: &str, writes: bool) -> Party {
    Party {
        host: host.into(),
        pid: 0,
        writes,
    }
}

fn test_names(lists: &[Published], report: &mut Report) {
    let mut changed: HashMap<&Name, (usize, &[u8])> = HashMap::new();
    for (host, list) in lists.iter().enumerate() {
        for (name, path) in &list.changed {
            let first = *changed.entry(name).or_insert((host, path));
            if first.0 != host {
                report.add(|| Conflict {
                    path: path.as_slice().into(),
                    what: What::Name,
                    parties: [
                        without_process(&lists[first.0].host, true),
                        without_process(&list.host, true),
                    ],
                });
            }
        }
    }
    for (host, list) in lists.iter().enumerate() {
        for name in &list.used {
            if let Some(&(by, path)) = changed.get(name).filter(|(by, _)| *by != host) {
                report.add(|| Conflict {
                    path: path.into(),
                    what: What::Name,
                    parties: [
                        without_process(&lists[by].host, true),
                        without_process(&list.host, false),
                    ],
                });
            }
        }
    }
}

/// What several hosts make in directories that all of them make.
fn test_made(lists: &[Published], report: &mut Report) {
    let mut made: HashMap<&[u8], (usize, bool)> = HashMap::new();
    for (host, list) in lists.iter().enumerate() {
        for (path, is_dir) in &list.made {
            let first = *made.entry(path).or_insert((host, *is_dir));
            if first.0 != host && !(first.1 && *is_dir) {
                report.add(|| Conflict {
                    path: path.as_slice().into(),
                    what: What::Name,
                    parties: [
                        without_process(&lists[first.0].host, true),
                        without_process(&list.host, true),
                    ],
                });
            }
        }
    }
}

fn test_attributes(lists: &[Published], report: &mut Report) {
    let mut changed: HashMap<u64, usize> = HashMap::new();
    for (host, list) in lists.iter().enumerate() {
        for (ino, path) in &list.attributes {
            let first = *changed.entry(*ino).or_insert(host);
            if first != host {
                report.add(|| Conflict {
                    path: path.as_slice().into(),
                    what: What::Attributes,
                    parties: [
                        without_process(&lists[first].host, true),
                        without_process(&list.host, true),
                    ],
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::list::Process;
    use super::super::ranges::Ranges;
    use super::*;
    use proptest::prelude::*;

    type Op = (u64, u64, bool);

    fn ranges(ops: &[Op], writes: bool) -> Ranges {
        let mut ranges = Ranges::default();
        ops.iter()
            .filter(|op| op.2 == writes)
            .for_each(|(at, len, _)| ranges.insert(*at..at + len));
        ranges
    }

    fn host(index: usize, processes: &[Vec<Op>]) -> Published {
        let process = |(pid, ops): (usize, &Vec<Op>)| {
            Process::new(pid as u32 + 1, &ranges(ops, false), &ranges(ops, true))
        };
        let processes = processes.iter().enumerate().map(process).collect();
        let files = vec![File {
            ino: 1,
            path: b"file".to_vec(),
            processes,
        }];
        Published {
            host: format!("n{index}"),
            files,
            ..Published::default()
        }
    }

    proptest! {
        /// Every byte that two hosts use, one of them for writing, is in a conflict, and no other byte is.
        #[test]
        fn conflicts_are_those_of_bytes_one_by_one(
            hosts in prop::collection::vec(
                prop::collection::vec(prop::collection::vec((0u64..60, 0u64..12, any::<bool>()), 0..6), 1..3), 1..4)
        ) {
            let lists: Vec<_> = hosts.iter().enumerate().map(|(at, processes)| host(at, processes)).collect();
            let report = test(&lists);
            prop_assert_eq!(report.total, report.conflicts.len() as u64);
            for byte in 0..80u64 {
                let touches = |ops: &Vec<Op>, writes: bool| {
                    ops.iter().any(|(at, len, w)| *w == writes && (*at..at + len).contains(&byte))
                };
                let mut expected = Vec::new();
                for (a, one) in hosts.iter().enumerate() {
                    for (b, other) in hosts.iter().enumerate().skip(a + 1) {
                        for (p, ops) in one.iter().enumerate() {
                            for (q, others) in other.iter().enumerate() {
                                let reads = touches(ops, false);
                                let writes = touches(ops, true);
                                let read = touches(others, false);
                                let written = touches(others, true);
                                if writes && (read || written) || reads && written {
                                    expected.push(((a, p), (b, q)));
                                }
                            }
                        }
                    }
                }
                let mut found: Vec<_> = report.conflicts.iter()
                    .filter(|c| matches!(c.what, What::Bytes(start, end) if (start..end).contains(&byte)))
                    .map(|c| {
                        let place = |party: &Party| {
                            (party.host[1..].parse::<usize>().unwrap(), party.pid as usize - 1)
                        };
                        let [one, other] = [place(&c.parties[0]), place(&c.parties[1])];
                        (one.min(other), one.max(other))
                    })
                    .collect();
                found.sort_unstable();
                found.dedup();
                expected.sort_unstable();
                prop_assert_eq!(found, expected, "byte {}", byte);
            }
        }
    }

    #[test]
    fn names_and_attributes_conflict_only_between_hosts() {
        let name = |name: &str| Name {
            dir: 2,
            name: name.into(),
        };
        let changed = |names: &[&str]| {
            names
                .iter()
                .map(|n| (name(n), n.as_bytes().to_vec()))
                .collect()
        };
        let mut lists = [
            Published {
                host: "a".into(),
                changed: changed(&["x", "y", "y"]),
                ..Published::default()
            },
            Published {
                host: "b".into(),
                changed: changed(&["z"]),
                ..Published::default()
            },
        ];
        lists[0].used = vec![name("x"), name("y")];
        lists[0].attributes = vec![(7, b"f".to_vec()), (7, b"f".to_vec())];
        assert_eq!(test(&lists), Report::default());
        lists[1].used = vec![name("x")];
        lists[1].changed = changed(&["z", "y"]);
        lists[1].attributes = vec![(7, b"f".to_vec())];
        let found: Vec<_> = test(&lists)
            .conflicts
            .iter()
            .map(ToString::to_string)
            .collect();
        let expected = [
            "f: owner, mode or attributes changed on a and on b",
            "x: the name was changed on a, used on b",
            "y: the name was changed on a and on b",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn more_conflicts_than_are_listed_are_counted() {
        let every = |from: u64| {
            (0..5000)
                .map(|at| (at * 10 + from, 1, true))
                .collect::<Vec<_>>()
        };
        let report = test(&[host(0, &[every(0)]), host(1, &[every(0)])]);
        assert_eq!(
            (report.total, report.conflicts.len()),
            (5000, Report::LISTED_MAX)
        );
        assert_eq!(
            test(&[host(0, &[every(0)]), host(1, &[every(5)])]),
            Report::default()
        );
    }
}
