//! The redo record: all that a commit does, as the difference between two trees.
//!
//! Objects are numbered; 0 is the root of the backing. Each names the places that it leaves and those
//! that it comes to, its staged twin, and what of its data and attributes to take from there. Nothing in
//! it depends on how far an earlier attempt came.
//!
//! It is sealed ([`firn_format::sealed`]) with the magic "FIRNREDO", as postcard writes it.

use serde::{Deserialize, Serialize};

use firn_backing::Attr;
use firn_format::sealed::Seal;

use crate::own::is_path;

pub use firn_format::sealed::SealError as RecordError;

/// The header of its file.
pub const SEAL: Seal = Seal {
    magic: *b"FIRNREDO",
    version: 4,
};

/// A name in a directory: the number of the directory's object, and the name's bytes.
pub type Place = (u64, Vec<u8>);

/// What an object is in the backing.
///
/// A record outlives a mount of the file system and is read on other hosts. Device numbers do neither: a server, a
/// pool or a disk that comes back may have another one. Nor is the time of birth compared: overlayfs makes a file
/// anew when it is first written to, also by an attempt to carry a record out, and only its inode number stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Identity {
    /// Inode.
    pub ino: u64,
    /// It is on another file system than the top of the backing.
    pub elsewhere: bool,
}

impl Identity {
    /// Of nothing yet.
    pub(crate) const NONE: Self = Self {
        ino: 0,
        elsewhere: false,
    };

    /// `device` is that of the top.
    pub(crate) fn of(attr: &Attr, device: u64) -> Self {
        Self {
            ino: attr.ino,
            elsewhere: attr.dev != device,
        }
    }
}

/// What becomes of the bytes of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Data {
    /// Bytes of the old content that stay, where nothing was written.
    pub cut: u64,
    /// Its size.
    pub size: u64,
    /// What was written: from, to. The bytes are in the staged twin, or in [`Item::small`].
    pub written: Vec<(u64, u64)>,
    /// Nothing of the old content was cut off. Where several hosts commit, it may have grown by another's part.
    pub grows: bool,
}

/// Bytes of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Where they go.
    pub at: u64,
    /// What they are.
    #[serde(with = "serde_bytes")]
    pub bytes: Vec<u8>,
}

/// One object that takes part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Item {
    /// Number in this record.
    pub number: u64,
    /// The object that has its names in the end.
    pub identity: Identity,
    /// Whether it is a directory.
    pub is_dir: bool,
    /// Staged name of the object itself, where it is new.
    pub new_at: Option<Staged>,
    /// One more name, staged, of an object of the backing of which no other name is known.
    pub anchor_at: Option<Staged>,
    /// Staged name of the twin that has its new attributes, and the data of [`Item::data`].
    pub twin_at: Option<Staged>,
    /// Names that it leaves.
    pub leaves: Vec<Place>,
    /// Names that it comes to.
    pub comes: Vec<Place>,
    /// Where it goes, among what undoes this record, instead of being removed.
    pub kept_at: Option<Staged>,
    /// One name that stays as it is, for who looks for it.
    pub stays: Option<Place>,
    /// What of the twin's data counts.
    pub data: Option<Data>,
    /// All that was written, where that is little. There is no twin then.
    pub small: Vec<Piece>,
    /// Then: the time of the last change, in seconds and nanoseconds.
    pub mtime: Option<(i64, u32)>,
    /// Its owner, mode or extended attributes were changed, and not just its times.
    pub attributes: bool,
    /// Its last change when the transaction changed it first, in seconds and nanoseconds.
    pub mtime_before: Option<(i64, u32)>,
    /// Of a directory that is new or whose names changed: last access and change, in seconds and nanoseconds, for
    /// after its names have come.
    pub times: Option<[(i64, u32); 2]>,
}

impl Item {
    /// An object of the backing that nothing was done to.
    pub fn new(number: u64, identity: Identity, is_dir: bool) -> Self {
        Self {
            number,
            identity,
            is_dir,
            new_at: None,
            anchor_at: None,
            twin_at: None,
            leaves: Vec::new(),
            comes: Vec::new(),
            kept_at: None,
            stays: None,
            data: None,
            small: Vec::new(),
            mtime: None,
            attributes: false,
            mtime_before: None,
            times: None,
        }
    }

    /// Whether data or attributes of an object of the backing change.
    pub(crate) fn changes_in_place(&self) -> bool {
        self.twin_at.is_some() || !self.small.is_empty()
    }
}

/// Where something is staged: a directory below `new/`, and a name in it.
pub type Staged = (String, String);

/// A transaction, decided or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The number that its user gave it.
    pub id: u64,
    /// Path of its scope, relative to the backing, for people.
    pub scope: Vec<u8>,
    /// Other hosts commit their parts at the same time: what they do to the same objects stays.
    pub shared: bool,
    /// See [`Item`].
    pub items: Vec<Item>,
}

impl Record {
    /// The bytes that are stored.
    pub fn encode(&self) -> Vec<u8> {
        SEAL.seal(&postcard::to_stdvec(self).expect("plain data"))
    }

    /// From the bytes that were stored. Every name in what comes back is a single component, and the scope is a
    /// path of such.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let record: Self =
            postcard::from_bytes(SEAL.unseal(bytes)?).map_err(|_| RecordError::Damaged)?;
        record.check_names()?;
        Ok(record)
    }

    /// Whoever opens a name of this record stays in the directory that the record means.
    pub(crate) fn check_names(&self) -> Result<(), RecordError> {
        if !is_path(&self.scope) {
            return Err(RecordError::Damaged);
        }
        for item in &self.items {
            for (_, name) in item.leaves.iter().chain(&item.comes).chain(&item.stays) {
                check_name(name)?;
            }
            let staged = [&item.new_at, &item.anchor_at, &item.twin_at, &item.kept_at];
            for (nest, name) in staged.into_iter().flatten() {
                check_name(nest.as_bytes())?;
                check_name(name.as_bytes())?;
            }
        }
        Ok(())
    }
}

/// Refuses what is not a single path component.
pub(crate) fn check_name(name: &[u8]) -> Result<(), RecordError> {
    firn_trust::check_component(name)
        .map(drop)
        .map_err(|_| RecordError::Damaged)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let identity = Identity {
            ino: 77,
            elsewhere: false,
        };
        let item = Item {
            number: 3,
            identity,
            is_dir: false,
            new_at: None,
            anchor_at: None,
            twin_at: Some(("plain".into(), "3".into())),
            leaves: vec![(0, b"a".to_vec())],
            kept_at: None,
            comes: vec![(2, b"\xff\n".to_vec())],
            stays: None,
            data: Some(Data {
                cut: 10,
                size: 4096,
                written: vec![(0, 5), (100, 4096)],
                grows: true,
            }),
            small: vec![Piece {
                at: 5,
                bytes: b"bytes".to_vec(),
            }],
            mtime: Some((7, 8)),
            attributes: true,
            mtime_before: Some((5, 6)),
            times: Some([(1, 2), (-3, 4)]),
        };
        Record {
            id: 17,
            scope: b"work".to_vec(),
            shared: false,
            items: vec![item],
        }
    }

    #[test]
    fn a_record_comes_back() {
        assert_eq!(Record::decode(&record().encode()), Ok(record()));
    }

    #[test]
    fn regression_a_record_whose_names_lead_elsewhere_is_none() {
        let refused = |change: &dyn Fn(&mut Record, &str)| {
            for name in ["", ".", "..", "../../etc", "/etc", "a/b", "a\0"] {
                let mut bad = record();
                change(&mut bad, name);
                assert_eq!(
                    Record::decode(&bad.encode()),
                    Err(RecordError::Damaged),
                    "{name:?}"
                );
            }
        };
        let staged = |nest: &str, name: &str| Some((nest.to_owned(), name.to_owned()));
        refused(&|bad, name| bad.items[0].leaves[0].1 = name.into());
        refused(&|bad, name| bad.items[0].comes[0].1 = name.into());
        refused(&|bad, name| bad.items[0].stays = Some((0, name.into())));
        refused(&|bad, name| bad.items[0].new_at = staged("d0", name));
        refused(&|bad, name| bad.items[0].new_at = staged(name, "1"));
        refused(&|bad, name| bad.items[0].anchor_at = staged("d0", name));
        refused(&|bad, name| bad.items[0].twin_at = staged("d0", name));
        refused(&|bad, name| bad.items[0].kept_at = staged("u", name));
        for scope in ["..", "a/../b", "/a", "a//b", "a/", "a\0"] {
            let bad = Record {
                scope: scope.into(),
                ..record()
            };
            assert_eq!(
                Record::decode(&bad.encode()),
                Err(RecordError::Damaged),
                "{scope:?}"
            );
        }
        let whole = Record {
            scope: b"a/b c/..d".to_vec(),
            ..record()
        };
        assert_eq!(Record::decode(&whole.encode()), Ok(whole));
    }

    #[test]
    fn a_record_that_is_cut_or_changed_is_none() {
        let bytes = record().encode();
        for len in 0..bytes.len() {
            assert!(Record::decode(&bytes[..len]).is_err(), "{len} bytes");
        }
        for at in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[at / 8] ^= 1 << (at % 8);
            assert!(Record::decode(&bad).is_err(), "bit {at}");
        }
    }
}
