//! The list that a host publishes, and its bytes.
//!
//! It is sealed ([`firn_format::sealed`]) with the magic "FIRNACCS", as postcard writes it.
//!
//! A range is stored as its distance from the end of the one before and its length: few bytes each.

use firn_format::sealed::{Seal, SealError};
use firn_trust::is_component;
use serde::{Deserialize, Serialize};

use super::ranges::Ranges;

/// The header of its file.
pub const SEAL: Seal = Seal {
    magic: *b"FIRNACCS",
    version: 2,
};

/// Why the bytes of a list are none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ListError {
    /// The first bytes are others.
    #[error("not a list of accesses (the magic number is missing)")]
    Magic,
    /// Made by another version.
    #[error(
        "list of accesses version {found}, this firn reads version {}: the hosts run different versions",
        SEAL.version
    )]
    Version {
        /// In the file.
        found: u32,
    },
    /// Cut off or changed.
    #[error("the list of accesses is damaged")]
    Damaged,
}

/// A name in a directory, by the directory's inode.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Name {
    /// Inode of the directory.
    pub dir: u64,
    /// The name in it.
    pub name: Vec<u8>,
}

/// What one process did with one file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Process id; 0: unknown.
    pub pid: u32,
    read: Vec<(u64, u64)>,
    written: Vec<(u64, u64)>,
}

impl Process {
    /// From ranges.
    pub fn new(pid: u32, read: &Ranges, written: &Ranges) -> Self {
        Self {
            pid,
            read: pack(read),
            written: pack(written),
        }
    }

    /// Bytes that it read: from, to.
    pub fn read(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        unpack(&self.read)
    }

    /// Bytes that it wrote: from, to.
    pub fn written(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        unpack(&self.written)
    }

    /// Number of ranges.
    pub fn len(&self) -> usize {
        self.read.len() + self.written.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn pack(ranges: &Ranges) -> Vec<(u64, u64)> {
    let mut end = 0;
    let one = |range: std::ops::Range<u64>| {
        let packed = (range.start - end, range.end - range.start);
        end = range.end;
        packed
    };
    ranges.iter().map(one).collect()
}

/// For any numbers, the ranges come in order, do not overlap, and have bytes.
fn unpack(packed: &[(u64, u64)]) -> impl Iterator<Item = (u64, u64)> + '_ {
    let ranges = packed.iter().scan(0u64, |end, &(gap, len)| {
        let start = end.saturating_add(gap);
        *end = start.saturating_add(len);
        Some((start, *end))
    });
    ranges.filter(|(start, end)| start < end)
}

/// A file of the backing that processes of a host read or wrote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    /// Its inode, which is the same on all hosts.
    pub ino: u64,
    /// A path of it relative to the backing, for people.
    pub path: Vec<u8>,
    /// Processes, by their numbers.
    pub processes: Vec<Process>,
}

/// All that the other hosts must know of a host's transaction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    /// The host.
    pub host: String,
    /// Files that it shares with others, perhaps.
    pub files: Vec<File>,
    /// Names that lead to what it used.
    pub used: Vec<Name>,
    /// Names that it made, changed or took away, with their paths.
    pub changed: Vec<(Name, Vec<u8>)>,
    /// New directories, and what is in them, by path: whether it is a directory, which several hosts may make.
    pub made: Vec<(Vec<u8>, bool)>,
    /// Objects whose owner, mode or extended attributes it changed, with their paths.
    pub attributes: Vec<(u64, Vec<u8>)>,
}

impl Published {
    /// Number of ranges.
    pub fn ranges(&self) -> usize {
        self.files
            .iter()
            .flat_map(|file| &file.processes)
            .map(Process::len)
            .sum()
    }

    /// The bytes that are stored.
    pub fn encode(&self) -> Vec<u8> {
        SEAL.seal(&postcard::to_stdvec(self).expect("plain data"))
    }

    /// From the bytes that were stored. Every name in what comes back is a single component.
    pub fn decode(bytes: &[u8]) -> Result<Self, ListError> {
        let list: Self =
            postcard::from_bytes(SEAL.unseal(bytes)?).map_err(|_| ListError::Damaged)?;
        if list.components().all(is_component) {
            Ok(list)
        } else {
            Err(ListError::Damaged)
        }
    }

    /// Everything in it that names something in a directory.
    fn components(&self) -> impl Iterator<Item = &[u8]> {
        let names = self
            .used
            .iter()
            .chain(self.changed.iter().map(|(name, _)| name));
        names
            .map(|name| &name.name[..])
            .chain([self.host.as_bytes()])
    }
}

impl From<SealError> for ListError {
    fn from(error: SealError) -> Self {
        match error {
            SealError::Magic => Self::Magic,
            SealError::Version { found, .. } => Self::Version { found },
            SealError::Damaged => Self::Damaged,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list() -> Published {
        let mut ranges = Ranges::default();
        for at in [0, 4096, 1 << 40] {
            ranges.insert(at..at + 100);
        }
        let processes = vec![Process::new(12, &ranges, &Ranges::default())];
        Published {
            host: "n1".into(),
            files: vec![File {
                ino: 5,
                path: b"dir/\xff".to_vec(),
                processes,
            }],
            used: vec![Name {
                dir: 2,
                name: b"dir".to_vec(),
            }],
            changed: vec![(
                Name {
                    dir: 2,
                    name: b"x".to_vec(),
                },
                b"x".to_vec(),
            )],
            made: vec![(b"dir/new".to_vec(), true)],
            attributes: vec![(9, b"y".to_vec())],
        }
    }

    /// Found by fuzzing: a conflict about no bytes could not be reported.
    #[test]
    fn regression_ranges_without_bytes_conflict_with_no_host() {
        let strange = vec![(0, 0), (7, 0), (u64::MAX, 1), (1, u64::MAX)];
        let process = Process {
            pid: 1,
            read: strange.clone(),
            written: strange,
        };
        let host = |name: &str| Published {
            host: name.into(),
            files: vec![File {
                ino: 5,
                path: b"file".to_vec(),
                processes: vec![process.clone()],
            }],
            ..Published::default()
        };
        assert_eq!(super::super::test(&[host("a"), host("b")]).conflicts, []);
    }

    #[test]
    fn regression_a_list_whose_names_lead_elsewhere_is_none() {
        for name in ["", ".", "..", "../../etc", "/etc", "a/b", "a\0"] {
            let mut bad = [list(), list(), list()];
            bad[0].host = name.into();
            bad[1].used[0].name = name.into();
            bad[2].changed[0].0.name = name.into();
            for bad in bad {
                assert_eq!(
                    Published::decode(&bad.encode()),
                    Err(ListError::Damaged),
                    "{name:?}"
                );
            }
        }
    }

    #[test]
    fn a_list_comes_back_as_it_was_and_a_changed_one_does_not() {
        let bytes = list().encode();
        assert_eq!(Published::decode(&bytes), Ok(list()));
        let read: Vec<_> = list().files[0].processes[0].read().collect();
        assert_eq!(read, [(0, 100), (4096, 4196), (1 << 40, (1 << 40) + 100)]);
        for at in 0..bytes.len() {
            let mut wrong = bytes.clone();
            wrong[at] ^= 0x40;
            assert!(Published::decode(&wrong).is_err(), "byte {at}");
            assert!(Published::decode(&bytes[..at]).is_err(), "cut at {at}");
        }
    }
}
