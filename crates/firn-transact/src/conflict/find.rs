//! Finds conflicts between hosts that changed one tree in a common transaction.
//!
//! The input is an *access list* of each host: the ranges of files, the names and the attributes that its programs read
//! or changed.
//! * Two ranges of a file *conflict* if they overlap, processes of two hosts accessed them, and one of the accesses was
//!   a write.
//! * Two hosts conflict over a name if both changed it, or if one changed it and the other used it.
//! * Two hosts conflict over an object if both changed its owner, mode or extended attributes.
//!
//! For each file that several hosts used, the search visits all ranges in the order of their starts. A range overlaps
//! an earlier range of another host exactly if the furthest end of the other hosts' ranges lies behind the range's
//! start. So the search keeps the furthest end so far with its host, and the furthest end of all other hosts
//! ([`FurthestEnds`]). Each range takes constant time. The processes are compared one by one only if there is a
//! conflict.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use firn_protocol::path::BytePath;

use serde::{Deserialize, Serialize};

use super::list::{AccessList, ListedFile, NameInDir};
use super::log::Access;

/// Process id that stands for a process that is not known.
const UNKNOWN_PID: u32 = 0;

/// One side of a conflict: a process of a host, or the host if the process is not known.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ConflictSide {
    /// The host.
    pub host: String,
    /// Process id; 0 if it is not known.
    pub pid: u32,
    /// Whether this side wrote the bytes or changed the name or attributes. Otherwise it only read or used them.
    pub writes: bool,
}

impl fmt::Display for ConflictSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let action = if self.writes { "written" } else { "read" };
        match self.pid {
            UNKNOWN_PID => write!(f, "{action} on {}", self.host),
            pid => write!(f, "{action} on {} by process {pid}", self.host),
        }
    }
}

/// The object of a conflict.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ConflictKind {
    /// A range of a file: the offset of its first byte, and the offset behind its last byte.
    Bytes(u64, u64),
    /// The name at the conflict's path.
    Name,
    /// Owner, mode or extended attributes of the object.
    Attributes,
}

/// One conflict between two hosts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Conflict {
    /// Path of the file or name, relative to the backing.
    pub path: BytePath,
    /// The bytes, name or attributes that the conflict is over.
    pub what: ConflictKind,
    /// The two sides of the conflict; without processes if the conflict is over a name or attributes. Stored under the
    /// name `parties`.
    #[serde(rename = "parties")]
    pub sides: [ConflictSide; 2],
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            path,
            what,
            sides: [first, second],
        } = self;
        let (first_host, second_host) = (&first.host, &second.host);
        match what {
            ConflictKind::Bytes(start, u64::MAX) => {
                write!(f, "{path}, from byte {start} on: {first}, {second}")
            }
            ConflictKind::Bytes(start, end) => {
                let last = end - 1;
                write!(f, "{path}, bytes {start} to {last}: {first}, {second}")
            }
            ConflictKind::Name if second.writes => {
                write!(
                    f,
                    "{path}: the name was changed on {first_host} and on {second_host}"
                )
            }
            ConflictKind::Name => {
                write!(
                    f,
                    "{path}: the name was changed on {first_host}, used on {second_host}"
                )
            }
            ConflictKind::Attributes => write!(
                f,
                "{path}: owner, mode or attributes changed on {first_host} and on {second_host}"
            ),
        }
    }
}

/// The conflicts that a search found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConflictReport {
    /// At most [`Self::LISTED_MAX`] of the conflicts, ordered by path and then by range.
    pub conflicts: Vec<Conflict>,
    /// Number of all conflicts, including those that are not listed.
    pub total: u64,
}

impl ConflictReport {
    /// Largest number of conflicts in [`Self::conflicts`].
    pub const LISTED_MAX: usize = 1000;

    /// Counts a conflict, and lists it if there is room.
    fn add(&mut self, conflict: impl FnOnce() -> Conflict) {
        self.total += 1;
        if self.conflicts.len() < Self::LISTED_MAX {
            self.conflicts.push(conflict());
        }
    }
}

/// Returns the conflicts between hosts. Each of `lists` has the bytes, names and attributes that the programs of one
/// host used or changed.
pub fn find_conflicts(lists: &[AccessList]) -> ConflictReport {
    let mut report = ConflictReport::default();
    let mut lists_by_file: BTreeMap<u64, Vec<FileOfHost<'_>>> = BTreeMap::new();
    for (host, list) in lists.iter().enumerate() {
        for file in &list.files {
            lists_by_file
                .entry(file.ino)
                .or_default()
                .push(FileOfHost { host, file });
        }
    }
    for lists_of_file in lists_by_file.values() {
        let first_host = lists_of_file[0].host;
        let has_several_hosts = lists_of_file.iter().any(|list| list.host != first_host);
        if has_several_hosts {
            find_conflicts_of_file(lists, lists_of_file, &mut report);
        }
    }
    find_name_conflicts(lists, &mut report);
    find_conflicts_of_new_names(lists, &mut report);
    find_attribute_conflicts(lists, &mut report);
    report.conflicts.sort();
    report
}

/// What one host lists of a file.
struct FileOfHost<'a> {
    /// Index of the host in the lists of all hosts.
    host: usize,
    file: &'a ListedFile,
}

/// One access of one process to a contiguous range of a file.
struct RangeAccess {
    start: u64,
    end: u64,
    /// Index of the process in the list of all processes that used the file.
    process: usize,
    access: Access,
}

/// The end of a range, and the index of the host that accessed the range.
#[derive(Clone, Copy, Default)]
struct RangeEnd {
    offset: u64,
    host: usize,
}

/// The furthest end of the ranges seen so far, and the furthest end among the ranges of the other hosts.
#[derive(Clone, Copy, Default)]
struct FurthestEnds {
    first: RangeEnd,
    second: RangeEnd,
}

impl FurthestEnds {
    /// Adds the end of a further range.
    fn add(&mut self, range: RangeEnd) {
        if range.host == self.first.host {
            self.first.offset = self.first.offset.max(range.offset);
        } else if range.offset > self.first.offset {
            self.second = self.first;
            self.first = range;
        } else if range.offset > self.second.offset {
            self.second = range;
        }
    }

    /// Returns the furthest end among the ranges of all hosts but `host`; 0 if there is none.
    fn of_other_hosts(&self, host: usize) -> u64 {
        if self.first.host == host {
            self.second.offset
        } else {
            self.first.offset
        }
    }
}

/// An access of a process before the current range, with which the range conflicts.
struct EarlierAccess {
    end: u64,
    access: Access,
}

/// The furthest ends of the reads and of the writes of a process, among the ranges seen so far.
#[derive(Clone, Copy, Default)]
struct ProcessEnds {
    read: u64,
    written: u64,
}

impl ProcessEnds {
    /// Tests an access that begins at `start` against the earlier ranges of this process. Returns the end and kind of
    /// an earlier access that conflicts with it; `None` if there is none.
    ///
    /// The ranges of a file are visited in the order of their starts. So an earlier range overlaps the present one
    /// exactly if it ends behind `start`, and only the furthest ends so far (`read`, `written`) are needed.
    fn find_conflict(&self, start: u64, access: Access) -> Option<EarlierAccess> {
        // A write conflicts with reads and writes, a read with writes only.
        let end = match access {
            Access::Write => self.read.max(self.written),
            Access::Read => self.written,
        };
        if end <= start {
            return None;
        }
        // If both kinds overlap, the write is reported.
        let access = if self.written > start {
            Access::Write
        } else {
            Access::Read
        };
        Some(EarlierAccess { end, access })
    }

    /// Adds an access that ends at `end`.
    fn add(&mut self, end: u64, access: Access) {
        match access {
            Access::Write => self.written = end.max(self.written),
            Access::Read => self.read = end.max(self.read),
        }
    }
}

/// A process that used a file: the index of its host, and its process id, which is 0 if it is not known.
#[derive(Clone, Copy)]
struct FileUser {
    host: usize,
    pid: u32,
}

/// The accesses of all hosts to one file.
struct FileAccesses {
    processes: Vec<FileUser>,
    /// The accessed ranges, in the order of their starts.
    ranges: Vec<RangeAccess>,
}

/// Collects the accesses of all hosts' processes to one file, in the order of their starts. `lists_of_file` has the
/// part of each host's list about this file.
fn collect_accesses(lists_of_file: &[FileOfHost<'_>]) -> FileAccesses {
    let mut processes: Vec<FileUser> = Vec::new();
    let mut ranges = Vec::new();
    for &FileOfHost { host, file } in lists_of_file {
        for listed in &file.processes {
            // `RangeAccess` refers to this process by its index in `processes`.
            let process = processes.len();
            let mut add_range = |(start, end), access| {
                ranges.push(RangeAccess {
                    start,
                    end,
                    process,
                    access,
                });
            };
            for range in listed.read() {
                add_range(range, Access::Read);
            }
            for range in listed.written() {
                add_range(range, Access::Write);
            }
            let pid = listed.pid;
            processes.push(FileUser { host, pid });
        }
    }
    ranges.sort_unstable_by_key(|range| range.start);
    FileAccesses { processes, ranges }
}

/// Adds to `report` the conflicts over the bytes of one file, which the hosts in `lists_of_file` used. `lists` has the
/// names of all hosts.
///
/// Two accesses conflict if they overlap, are of two hosts, and one is a write. The ranges are visited in the order of
/// their starts. So an earlier range overlaps the present one exactly if it ends behind the present start, and only the
/// furthest ends so far are kept: for each process, and for all of them.
fn find_conflicts_of_file(
    lists: &[AccessList],
    lists_of_file: &[FileOfHost<'_>],
    report: &mut ConflictReport,
) {
    let FileAccesses { processes, ranges } = collect_accesses(lists_of_file);
    let conflict_side = |process: usize, access| {
        let FileUser { host, pid } = processes[process];
        ConflictSide {
            host: lists[host].host.clone(),
            pid,
            writes: access == Access::Write,
        }
    };
    let mut all_ends = FurthestEnds::default();
    let mut write_ends = FurthestEnds::default();
    let mut ends_of_processes = vec![ProcessEnds::default(); processes.len()];
    for RangeAccess {
        start,
        end,
        process,
        access,
    } in ranges
    {
        let host = processes[process].host;
        let conflicting_ends = match access {
            Access::Write => &all_ends,
            Access::Read => &write_ends,
        };
        // The processes are compared one by one only if there is a conflict.
        if conflicting_ends.of_other_hosts(host) > start {
            for (earlier_process, ends) in ends_of_processes.iter().enumerate() {
                if processes[earlier_process].host == host {
                    continue;
                }
                let Some(earlier) = ends.find_conflict(start, access) else {
                    continue;
                };
                report.add(|| Conflict {
                    path: lists_of_file[0].file.path.as_slice().into(),
                    what: ConflictKind::Bytes(start, end.min(earlier.end)),
                    sides: [
                        conflict_side(earlier_process, earlier.access),
                        conflict_side(process, access),
                    ],
                });
            }
        }
        let range_end = RangeEnd { offset: end, host };
        all_ends.add(range_end);
        if access == Access::Write {
            write_ends.add(range_end);
        }
        ends_of_processes[process].add(end, access);
    }
}

/// Returns the conflict of two hosts that both changed something at `path`.
fn conflict_of_changes(path: &[u8], what: ConflictKind, lists: [&AccessList; 2]) -> Conflict {
    Conflict {
        path: path.into(),
        what,
        sides: lists.map(|list| ConflictSide {
            host: list.host.clone(),
            pid: UNKNOWN_PID,
            writes: true,
        }),
    }
}

/// Returns the conflict over the name `path`, which the first host changed and the second host only used.
fn conflict_of_use(path: &[u8], lists: [&AccessList; 2]) -> Conflict {
    let mut conflict = conflict_of_changes(path, ConflictKind::Name, lists);
    let [_, user] = &mut conflict.sides;
    user.writes = false;
    conflict
}

/// Adds to `report` the conflicts over names that one host changed and another host changed or used. Each of `lists` is
/// of one host.
fn find_name_conflicts(lists: &[AccessList], report: &mut ConflictReport) {
    // The first host that changed each name.
    let mut first_changes: HashMap<&NameInDir, ChangedName<'_>> = HashMap::new();
    for (host, list) in lists.iter().enumerate() {
        for (name, path) in &list.changed {
            let first = first_changes
                .entry(name)
                .or_insert(ChangedName { host, path });
            if first.host != host {
                let both_lists = [&lists[first.host], list];
                report.add(|| conflict_of_changes(path, ConflictKind::Name, both_lists));
            }
        }
    }
    for (host, list) in lists.iter().enumerate() {
        for name in &list.used {
            let Some(first) = first_changes.get(name) else {
                continue;
            };
            if first.host == host {
                continue;
            }
            report.add(|| conflict_of_use(first.path, [&lists[first.host], list]));
        }
    }
}

/// A name that a host changed.
struct ChangedName<'a> {
    /// Index of the host.
    host: usize,
    path: &'a [u8],
}

/// Adds to `report` the conflicts over names that several hosts make in new directories. Each of `lists` is of one
/// host. Several hosts may make the same directory.
fn find_conflicts_of_new_names(lists: &[AccessList], report: &mut ConflictReport) {
    // The first host that makes each name.
    let mut first_makers: HashMap<&[u8], MadeName> = HashMap::new();
    for (host, list) in lists.iter().enumerate() {
        for (path, is_dir) in &list.made {
            let made = MadeName {
                host,
                is_dir: *is_dir,
            };
            let first = *first_makers.entry(path).or_insert(made);
            let are_both_dirs = first.is_dir && made.is_dir;
            if first.host != host && !are_both_dirs {
                let both_lists = [&lists[first.host], list];
                report.add(|| conflict_of_changes(path, ConflictKind::Name, both_lists));
            }
        }
    }
}

/// A name that a host makes in a new directory.
#[derive(Clone, Copy)]
struct MadeName {
    /// Index of the host.
    host: usize,
    is_dir: bool,
}

/// Adds the conflicts over objects whose owner, mode or extended attributes several hosts changed.
fn find_attribute_conflicts(lists: &[AccessList], report: &mut ConflictReport) {
    // The first host that changed the attributes of each inode.
    let mut first_changes: HashMap<u64, usize> = HashMap::new();
    for (host, list) in lists.iter().enumerate() {
        for (ino, path) in &list.attributes {
            let first_host = *first_changes.entry(*ino).or_insert(host);
            if first_host != host {
                let both_lists = [&lists[first_host], list];
                report.add(|| conflict_of_changes(path, ConflictKind::Attributes, both_lists));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::list::ListedProcess;
    use super::super::ranges::RangeSet;
    use super::*;
    use proptest::prelude::*;

    type Op = (u64, u64, bool);

    fn ranges(ops: &[Op], writes: bool) -> RangeSet {
        let mut ranges = RangeSet::default();
        ops.iter()
            .filter(|op| op.2 == writes)
            .for_each(|(at, len, _)| ranges.insert(*at..at + len));
        ranges
    }

    fn host(index: usize, processes: &[Vec<Op>]) -> AccessList {
        let process = |(pid, ops): (usize, &Vec<Op>)| {
            ListedProcess::new(pid as u32 + 1, &ranges(ops, false), &ranges(ops, true))
        };
        let processes = processes.iter().enumerate().map(process).collect();
        let files = vec![ListedFile {
            ino: 1,
            path: b"file".to_vec(),
            processes,
        }];
        AccessList {
            host: format!("n{index}"),
            files,
            ..AccessList::default()
        }
    }

    proptest! {
        /// Each byte that two hosts use, at least one of them for writing, is in a conflict. No other byte is.
        #[test]
        fn conflicts_are_those_of_bytes_one_by_one(
            hosts in prop::collection::vec(
                prop::collection::vec(prop::collection::vec((0u64..60, 0u64..12, any::<bool>()), 0..6), 1..3), 1..4)
        ) {
            let lists: Vec<_> = hosts.iter().enumerate().map(|(at, processes)| host(at, processes)).collect();
            let report = find_conflicts(&lists);
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
                    .filter(|c| matches!(c.what, ConflictKind::Bytes(start, end) if (start..end).contains(&byte)))
                    .map(|c| {
                        let place = |party: &ConflictSide| {
                            (party.host[1..].parse::<usize>().unwrap(), party.pid as usize - 1)
                        };
                        let [one, other] = [place(&c.sides[0]), place(&c.sides[1])];
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
        let name = |name: &str| NameInDir {
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
            AccessList {
                host: "a".into(),
                changed: changed(&["x", "y", "y"]),
                ..AccessList::default()
            },
            AccessList {
                host: "b".into(),
                changed: changed(&["z"]),
                ..AccessList::default()
            },
        ];
        lists[0].used = vec![name("x"), name("y")];
        lists[0].attributes = vec![(7, b"f".to_vec()), (7, b"f".to_vec())];
        assert_eq!(find_conflicts(&lists), ConflictReport::default());
        lists[1].used = vec![name("x")];
        lists[1].changed = changed(&["z", "y"]);
        lists[1].attributes = vec![(7, b"f".to_vec())];
        let found: Vec<_> = find_conflicts(&lists)
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
        let report = find_conflicts(&[host(0, &[every(0)]), host(1, &[every(0)])]);
        assert_eq!(
            (report.total, report.conflicts.len()),
            (5000, ConflictReport::LISTED_MAX)
        );
        assert_eq!(
            find_conflicts(&[host(0, &[every(0)]), host(1, &[every(5)])]),
            ConflictReport::default()
        );
    }
}
