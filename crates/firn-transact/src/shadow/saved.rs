//! What is saved of an object before it changes: `saved/INO.K` in the directory of a transaction.
//!
//! Record 0 tells what the object was. Each further one tells of more bytes of a file: it begins where the one
//! before begins, or at the old end, and goes down from there. The bytes lie in a file of their own, at
//! their offsets in the original.
//!
//! ```text
//! 0   8 bytes   magic "FIRNSAVE"
//! 8   u32       version
//! 12  u32       CRC32C of the payload
//! 16  u64       length of the payload
//! 24            payload: the record, as postcard writes it
//! ```

use serde::{Deserialize, Serialize};

use firn_format::sealed::Seal;

use crate::record::{RecordError, check_name};

/// The header of its file.
pub const SEAL: Seal = Seal {
    magic: *b"FIRNSAVE",
    version: 1,
};

/// A name and the inode that it led to.
pub type Entry = (Vec<u8>, u64);

/// What an object was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Original {
    /// `st_mode`: type and permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes.
    pub size: u64,
    /// Last access and last change, in seconds and nanoseconds.
    pub times: [(i64, u32); 2],
    /// Extended attributes.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Of a directory: what was in it.
    pub names: Vec<Entry>,
}

/// Bytes of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// Offset of the first.
    pub from: u64,
    /// Offset behind the last.
    pub to: u64,
    /// The file in `saved/` that has them.
    pub at: String,
}

/// One record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    /// The object's inode.
    pub ino: u64,
    /// The way to it when it was saved: from the scope's top, which is not in it, down to its own name.
    pub path: Vec<Entry>,
    /// In record 0 only.
    pub original: Option<Original>,
    /// Old bytes of a file.
    pub segment: Option<Segment>,
}

impl Saved {
    /// The bytes that are stored.
    pub fn encode(&self) -> Vec<u8> {
        SEAL.seal(&postcard::to_stdvec(self).expect("plain data"))
    }

    /// From the bytes that were stored. Every name in what comes back is a single component.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let saved: Self =
            postcard::from_bytes(SEAL.unseal(bytes)?).map_err(|_| RecordError::Damaged)?;
        let names = saved.original.iter().flat_map(|original| &original.names);
        for (name, _) in saved.path.iter().chain(names) {
            check_name(name)?;
        }
        if let Some(segment) = &saved.segment {
            check_name(segment.at.as_bytes())?;
        }
        Ok(saved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved() -> Saved {
        let original = Original {
            mode: 0o100_640,
            uid: 1,
            gid: 2,
            size: 5000,
            times: [(1, 2), (-3, 4)],
            xattrs: vec![(b"user.a".to_vec(), b"\0".to_vec())],
            names: vec![(b"\xff\n".to_vec(), 9)],
        };
        let segment = Segment {
            from: 4096,
            to: 5000,
            at: "data-3".into(),
        };
        let path = vec![(b"dir".to_vec(), 7), (b"file".to_vec(), 77)];
        Saved {
            ino: 77,
            path,
            original: Some(original),
            segment: Some(segment),
        }
    }

    #[test]
    fn a_record_comes_back() {
        assert_eq!(Saved::decode(&saved().encode()), Ok(saved()));
    }

    #[test]
    fn regression_a_record_whose_names_lead_elsewhere_is_none() {
        for name in ["", ".", "..", "../../etc", "/etc", "a/b", "a\0"] {
            let mut bad = [saved(), saved(), saved()];
            bad[0].path[0].0 = name.into();
            bad[1].original.as_mut().expect("it has one").names[0].0 = name.into();
            bad[2].segment.as_mut().expect("it has one").at = name.into();
            for bad in bad {
                assert_eq!(
                    Saved::decode(&bad.encode()),
                    Err(RecordError::Damaged),
                    "{name:?}"
                );
            }
        }
    }

    #[test]
    fn a_record_that_is_cut_or_changed_is_none() {
        let bytes = saved().encode();
        for len in 0..bytes.len() {
            assert!(Saved::decode(&bytes[..len]).is_err(), "{len} bytes");
        }
        for at in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[at / 8] ^= 1 << (at % 8);
            assert!(Saved::decode(&bad).is_err(), "bit {at}");
        }
    }
}
