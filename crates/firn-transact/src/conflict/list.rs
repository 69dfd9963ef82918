//! [`AccessList`]: what the programs of one host read and changed in a transaction of several hosts.
//!
//! Each host publishes its list before the commit, and each host searches all lists for conflicts.
//!
//! A stored list is the struct in postcard form, sealed ([`firn_format::sealed`]) with the magic "FIRNACCS". A range is
//! stored as its distance from the end of the range before and its length, because postcard uses few bytes for small
//! numbers.
//!
//! Promise: the bytes come from another host, so [`AccessList::decode`] accepts no name that leads out of its
//! directory.

use firn_format::sealed::{Seal, SealError};
use firn_trust::is_component;
use serde::{Deserialize, Serialize};

use super::ranges::RangeSet;

/// The header of a stored list.
pub const SEAL: Seal = Seal {
    magic: *b"FIRNACCS",
    version: 2,
};

/// Why bytes are not an access list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessListError {
    /// The bytes do not begin with the magic number.
    #[error("not an access list (the magic number is missing)")]
    Magic,
    /// Another version of Firn wrote the list.
    #[error(
        "access list of version {found}, but this firn reads version {}: the hosts run different versions",
        SEAL.version
    )]
    Version {
        /// The version in the list.
        found: u32,
    },
    /// The bytes were cut off or changed, or a name in the list is not a single path component.
    #[error("the access list is damaged")]
    Damaged,
}

/// A name in a directory of the backing.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NameInDir {
    /// Inode number of the directory, which is the same on all hosts.
    pub dir: u64,
    /// The name in the directory, a single path component.
    pub name: Vec<u8>,
}

/// The accesses of one process to one file, packed for storage.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedProcess {
    /// Process id; 0 if it is not known.
    pub pid: u32,
    /// Gap and length of each range that was read ([`pack`]).
    read: Vec<(u64, u64)>,
    /// Gap and length of each range that was written.
    written: Vec<(u64, u64)>,
}

impl ListedProcess {
    /// Packs the ranges that a process read and wrote.
    pub fn new(pid: u32, read: &RangeSet, written: &RangeSet) -> Self {
        Self {
            pid,
            read: pack(read),
            written: pack(written),
        }
    }

    /// Returns start and end of each range that the process read, in order.
    pub fn read(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        unpack(&self.read)
    }

    /// Returns start and end of each range that the process wrote, in order.
    pub fn written(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        unpack(&self.written)
    }

    /// Returns the number of ranges, read and written.
    pub fn len(&self) -> usize {
        self.read.len() + self.written.len()
    }

    /// Returns whether the process has no ranges.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Returns for each range its distance from the end of the range before, and its length.
fn pack(ranges: &RangeSet) -> Vec<(u64, u64)> {
    let mut end = 0;
    let pack_range = |range: std::ops::Range<u64>| {
        let packed = (range.start - end, range.end - range.start);
        end = range.end;
        packed
    };
    ranges.iter().map(pack_range).collect()
}

/// Returns start and end of each packed range. Whatever the packed numbers are, the returned ranges are in order, do
/// not overlap, and are not empty.
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
pub struct ListedFile {
    /// Inode number of the file, which is the same on all hosts.
    pub ino: u64,
    /// A path of the file relative to the backing, for messages.
    pub path: Vec<u8>,
    /// Accesses of each process, in the order of the process ids.
    pub processes: Vec<ListedProcess>,
}

/// What a host publishes of its part of a transaction, so that conflicts with the other hosts can be found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccessList {
    /// Name of the host.
    pub host: String,
    /// Files of the backing that processes of the host read or wrote.
    pub files: Vec<ListedFile>,
    /// Names on the way to the files that the processes used.
    pub used: Vec<NameInDir>,
    /// Names that the host makes, changes or removes in directories of the backing, with their paths.
    pub changed: Vec<(NameInDir, Vec<u8>)>,
    /// Paths of new directories and of everything in them, and whether the object is a directory. Several hosts may
    /// make the same directory.
    pub made: Vec<(Vec<u8>, bool)>,
    /// Inode number and path of each object whose owner, mode or extended attributes the host changes.
    pub attributes: Vec<(u64, Vec<u8>)>,
}

impl AccessList {
    /// Returns the number of ranges of all files.
    pub fn range_count(&self) -> usize {
        self.files
            .iter()
            .flat_map(|file| &file.processes)
            .map(ListedProcess::len)
            .sum()
    }

    /// Returns the list as it is stored.
    pub fn encode(&self) -> Vec<u8> {
        SEAL.seal(&postcard::to_stdvec(self).expect("plain data"))
    }

    /// Decodes a stored list. Fails if the bytes are not a list, or if a name in it is not a single path component.
    pub fn decode(bytes: &[u8]) -> Result<Self, AccessListError> {
        let list: Self =
            postcard::from_bytes(SEAL.unseal(bytes)?).map_err(|_| AccessListError::Damaged)?;
        if list.components().all(is_component) {
            Ok(list)
        } else {
            Err(AccessListError::Damaged)
        }
    }

    /// Returns all parts of the list that must be single path components.
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

impl From<SealError> for AccessListError {
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

    fn list() -> AccessList {
        let mut ranges = RangeSet::default();
        for at in [0, 4096, 1 << 40] {
            ranges.insert(at..at + 100);
        }
        let processes = vec![ListedProcess::new(12, &ranges, &RangeSet::default())];
        AccessList {
            host: "n1".into(),
            files: vec![ListedFile {
                ino: 5,
                path: b"dir/\xff".to_vec(),
                processes,
            }],
            used: vec![NameInDir {
                dir: 2,
                name: b"dir".to_vec(),
            }],
            changed: vec![(
                NameInDir {
                    dir: 2,
                    name: b"x".to_vec(),
                },
                b"x".to_vec(),
            )],
            made: vec![(b"dir/new".to_vec(), true)],
            attributes: vec![(9, b"y".to_vec())],
        }
    }

    /// Found by fuzzing: a conflict over an empty range could not be reported.
    #[test]
    fn regression_ranges_without_bytes_conflict_with_no_host() {
        let strange = vec![(0, 0), (7, 0), (u64::MAX, 1), (1, u64::MAX)];
        let process = ListedProcess {
            pid: 1,
            read: strange.clone(),
            written: strange,
        };
        let host = |name: &str| AccessList {
            host: name.into(),
            files: vec![ListedFile {
                ino: 5,
                path: b"file".to_vec(),
                processes: vec![process.clone()],
            }],
            ..AccessList::default()
        };
        assert_eq!(
            super::super::find_conflicts(&[host("a"), host("b")]).conflicts,
            []
        );
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
                    AccessList::decode(&bad.encode()),
                    Err(AccessListError::Damaged),
                    "{name:?}"
                );
            }
        }
    }

    #[test]
    fn a_list_comes_back_as_it_was_and_a_changed_one_does_not() {
        let bytes = list().encode();
        assert_eq!(AccessList::decode(&bytes), Ok(list()));
        let read: Vec<_> = list().files[0].processes[0].read().collect();
        assert_eq!(read, [(0, 100), (4096, 4196), (1 << 40, (1 << 40) + 100)]);
        for at in 0..bytes.len() {
            let mut wrong = bytes.clone();
            wrong[at] ^= 0x40;
            assert!(AccessList::decode(&wrong).is_err(), "byte {at}");
            assert!(AccessList::decode(&bytes[..at]).is_err(), "cut at {at}");
        }
    }
}
