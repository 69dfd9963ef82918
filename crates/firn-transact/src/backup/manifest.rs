//! The manifest of a backup: a redo record that depends neither on inode numbers nor on what is staged.
//!
//! It is laid out like a redo record ([`crate::record`]), with the magic `FIRNBKUP`.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use firn_format::sealed::Seal;
use firn_trust::is_component;

use crate::own::is_path;
use crate::record::{Record, RecordError, Staged};

/// The header of its file.
pub const SEAL: Seal = Seal {
    magic: *b"FIRNBKUP",
    version: 3,
};
/// Its name in the directory of the transaction.
pub const MANIFEST: &str = "manifest";

/// An object that was there before the transaction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// Number in the record.
    pub number: u64,
    /// Its type, as in `st_mode`.
    pub kind: u32,
    /// Bytes of a file whose content changes: what is written counts from there.
    pub size: Option<u64>,
    /// Names that it had then, from the top of the backing.
    pub paths: Vec<Vec<u8>>,
}

/// Bytes of a staged file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    /// The file that has them, each at its offset.
    pub file: String,
    /// Size of the file.
    pub size: u64,
    /// Where there are any: from, to. The rest are holes.
    pub ranges: Vec<(u64, u64)>,
    /// CRC32C of the bytes in the ranges.
    pub crc: u32,
}

/// A staged object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stored {
    /// Where it is staged.
    pub at: Staged,
    /// `st_mode`: type and permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Of a device file.
    pub rdev: u64,
    /// Last access and change, in seconds and nanoseconds.
    pub times: [(i64, u32); 2],
    /// Names and values of its extended attributes.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Of a symbolic link.
    pub target: Vec<u8>,
    /// Of a file.
    pub content: Option<Content>,
}

/// A transaction that is prepared, for a backing that is as it was before it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// What is to be done; its identities mean nothing.
    pub record: Record,
    /// Number of the commit of the scope before this one.
    pub before: Option<u64>,
    /// The objects of the record that were there.
    pub known: Vec<Known>,
    /// What is staged.
    pub stored: Vec<Stored>,
}

impl Manifest {
    /// The bytes that are stored.
    pub fn encode(&self) -> Vec<u8> {
        SEAL.seal(&postcard::to_stdvec(self).expect("plain data"))
    }

    /// From the bytes that were stored.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let payload = SEAL.unseal(bytes)?;
        let manifest: Self = postcard::from_bytes(payload).map_err(|_| RecordError::Damaged)?;
        if manifest.is_whole() {
            Ok(manifest)
        } else {
            Err(RecordError::Damaged)
        }
    }

    /// Whether each thing that it names is in it, and no name leads elsewhere.
    fn is_whole(&self) -> bool {
        let numbers: BTreeSet<u64> = self.record.items.iter().map(|item| item.number).collect();
        let known: BTreeSet<u64> = self.known.iter().map(|one| one.number).collect();
        let stored: BTreeSet<&Staged> = self.stored.iter().map(|one| &one.at).collect();
        let items = self.record.items.iter().all(|item| {
            let places = item.leaves.iter().chain(&item.comes).chain(&item.stays);
            let is_there =
                item.number == 0 || (item.new_at.is_some() != known.contains(&item.number));
            is_there
                && item.kept_at.is_none()
                && item
                    .new_at
                    .iter()
                    .chain(&item.twin_at)
                    .all(|at| stored.contains(at))
                && item
                    .anchor_at
                    .iter()
                    .all(|at| is_word(&at.0) && is_word(&at.1))
                && places
                    .into_iter()
                    .all(|(dir, name)| is_component(name) && (*dir == 0 || numbers.contains(dir)))
        });
        let known = self.known.iter().all(|one| {
            numbers.contains(&one.number)
                && !one.paths.is_empty()
                && one
                    .paths
                    .iter()
                    .all(|path| !path.is_empty() && is_path(path))
        });
        let stored = self.stored.iter().all(|one| {
            let content = one.content.as_ref();
            is_word(&one.at.0)
                && is_word(&one.at.1)
                && content.is_none_or(|content| {
                    let mut end = 0;
                    is_word(&content.file)
                        && content.ranges.iter().all(|&(from, to)| {
                            let follows = end <= from && from < to && to <= content.size;
                            end = to;
                            follows
                        })
                })
        });
        let scope = &self.record.scope;
        numbers.len() == self.record.items.len() && is_path(scope) && items && known && stored
    }
}

/// A name that Firn makes.
fn is_word(name: &str) -> bool {
    !name.is_empty()
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::record::{Data, Identity, Item};

    fn manifest(id: u64, name: Vec<u8>, size: u64, value: Vec<u8>, crc: u32) -> Manifest {
        let identity = Identity::NONE;
        let mut changed = Item::new(3, identity, false);
        changed.twin_at = Some(("d0".into(), "3".into()));
        changed.leaves = vec![(0, name.clone())];
        changed.comes = vec![(4, b"there".to_vec())];
        changed.data = Some(Data {
            cut: 1,
            size,
            written: vec![(0, size)],
            grows: false,
        });
        let mut made = Item::new(4, identity, true);
        made.new_at = Some(("d0".into(), "4".into()));
        made.comes = vec![(0, b"dir".to_vec())];
        let record = Record {
            id,
            scope: name.clone(),
            shared: false,
            items: vec![changed, made],
        };
        let content = Content {
            file: "d0-3".into(),
            size,
            ranges: vec![(0, size)],
            crc,
        };
        let one = |number: &str, content| Stored {
            at: ("d0".into(), number.into()),
            mode: 0o100_640,
            uid: 1,
            gid: 2,
            rdev: 0,
            times: [(1, 2), (-3, 4)],
            xattrs: vec![(b"user.x".to_vec(), value.clone())],
            target: value.clone(),
            content,
        };
        let stored = vec![one("3", Some(content)), one("4", None)];
        let known = vec![Known {
            number: 3,
            kind: 0o100_000,
            size: Some(7),
            paths: vec![name],
        }];
        Manifest {
            record,
            before: Some(id / 2),
            known,
            stored,
        }
    }

    proptest! {
        #[test]
        fn a_manifest_comes_back(
            id: u64,
            name in proptest::collection::vec(1u8..47, 3..20),
            size in 1u64..,
            value: Vec<u8>,
            crc: u32,
        ) {
            prop_assume!(!name.is_empty() && is_path(&name));
            let manifest = manifest(id, name, size, value, crc);
            prop_assert_eq!(Manifest::decode(&manifest.encode()), Ok(manifest));
        }
    }

    #[test]
    fn a_manifest_that_is_cut_or_changed_is_none() {
        let bytes = manifest(7, b"a".to_vec(), 9, b"v".to_vec(), 1).encode();
        for len in 0..bytes.len() {
            assert!(Manifest::decode(&bytes[..len]).is_err(), "{len} bytes");
        }
        for at in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[at / 8] ^= 1 << (at % 8);
            assert!(Manifest::decode(&bad).is_err(), "bit {at}");
        }
    }

    #[test]
    fn a_manifest_that_names_what_is_not_in_it_is_none() {
        let whole = manifest(7, b"a".to_vec(), 9, b"v".to_vec(), 1);
        let refused = |change: fn(&mut Manifest)| {
            let mut bad = whole.clone();
            change(&mut bad);
            assert_eq!(Manifest::decode(&bad.encode()), Err(RecordError::Damaged));
        };
        refused(|bad| bad.known[0].paths[0] = b"../a".to_vec());
        refused(|bad| bad.known.clear());
        refused(|bad| drop(bad.stored.pop()));
        refused(|bad| bad.record.items[0].comes[0].0 = 9);
        refused(|bad| bad.stored[0].content.as_mut().expect("a file").file = "../x".into());
        refused(|bad| bad.stored[0].content.as_mut().expect("a file").ranges = vec![(5, 10)]);
    }
}
