//! The record of a primary's lanes: all directories that have ever been its lanes. With the record, a mount finds the
//! files in all of them. The *primary* is the directory with all names. A *lane* is another directory, with the data of
//! some files.
//!
//! ```text
//! .firn/lanes/primary      the id of this primary, for the marks of its files: a random number
//! .firn/lanes/lane-HASH    a lane: its path
//! LANE/.firn-ID            the directory is a lane of the primary ID
//! ```
//!
//! Invariants
//! * Every file of the record is put once: the first host creates it, and none changes it. Hosts that mount the same
//!   primary with different lanes therefore need no lock.
//! * A lane gets its marker file before the lane is recorded, and the lane is recorded before the first file is placed
//!   there.
//! * A lane is removed from the record only if it has no files.
//!
//! Relies on `.firn/` being closed to all other users (`firn_hosts::own`). If it is not, nothing in the record is
//! trusted.

use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use firn_backing::{Backing, Errno};
use firn_format::quote::quoted;
use firn_hosts::own::{self, TOP};
use firn_hosts::{OwnError, VoteDir};

use crate::mark::{self, Mark};

/// Name of the record's directory in `.firn/`.
const DIR: &str = "lanes";
/// Name of the directory with one staging directory for each host. A staging directory holds links of files that are
/// being created or removed.
const STAGING: &str = "placing";
/// Name of the file with the id of the primary.
const PRIMARY_ID_FILE: &str = "primary";
const LANE: &str = "lane-";
/// Prefix of the marker file in a lane; the id of the primary follows.
const MARKER: &str = ".firn-";

const MAGIC: [u8; 8] = *b"FIRNLANE";
/// Version of the record.
pub const VERSION: u32 = 1;
/// Bytes of a file of the record: the magic, the version and the checksum of the content.
const MAGIC_FIELD: Range<usize> = 0..8;
const VERSION_FIELD: Range<usize> = 8..12;
const CHECKSUM_FIELD: Range<usize> = 12..16;
/// Size in bytes of these fields, which the content follows.
const HEAD_BYTES: usize = CHECKSUM_FIELD.end;

/// The record of a primary's lanes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Id of this primary.
    pub id: u128,
    /// Absolute paths of the lanes, sorted.
    pub lanes: Vec<OsString>,
}

/// Error of the record: it cannot be trusted, read or written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Firn does not own an object of the record, or a call of the primary failed.
    #[error(transparent)]
    Own(#[from] OwnError),
    /// A file of the record is damaged.
    #[error("{TOP}/{DIR}/{name} {why}")]
    Damaged {
        /// Name of the damaged file.
        name: String,
        /// The damage, and what to do.
        why: &'static str,
    },
}

impl From<Errno> for RecordError {
    fn from(errno: Errno) -> Self {
        Self::Own(errno.into())
    }
}

impl Record {
    /// Reads the record of a primary. Returns `None` if there is no record, because no file was ever placed.
    pub fn find<B: Backing>(primary: &B) -> Result<Option<Self>, RecordError> {
        let Some((top, _)) = own::find_dir(primary, &primary.root(), TOP)? else {
            return Ok(None);
        };
        let below_top = |error: OwnError| error.below(TOP);
        match VoteDir::find(primary, &top, DIR, "").map_err(below_top)? {
            None => Ok(None),
            Some(dir) => Self::read(&dir),
        }
    }

    /// Returns the record of a primary, and creates it if it does not exist. `host` is the name of this host.
    pub fn make<B: Backing>(primary: &B, host: &str) -> Result<Self, RecordError> {
        let dir = open_record_dir(primary, host)?;
        if let Some(record) = Self::read(&dir)? {
            return Ok(record);
        }
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(|_| Errno::IO)?;
        dir.put_once(PRIMARY_ID_FILE, &encode_file(&id))?;
        // Another host may have created the record first.
        Ok(Self::read(&dir)?.ok_or(Errno::NOENT)?)
    }

    /// Adds a lane to the record, durably.
    pub fn add<B: Backing>(
        &mut self,
        primary: &B,
        host: &str,
        lane: &OsStr,
    ) -> Result<(), RecordError> {
        if !self.lanes.iter().any(|known| known == lane) {
            open_record_dir(primary, host)?
                .put_once(&lane_file_name(lane), &encode_file(lane.as_bytes()))?;
            self.lanes.push(lane.to_owned());
            self.lanes.sort_unstable();
        }
        Ok(())
    }

    /// Removes a lane from the record. The lane must have no file of this primary.
    pub fn forget<B: Backing>(&mut self, primary: &B, lane: &OsStr) -> Result<(), RecordError> {
        let dir = open_record_dir(primary, "")?;
        dir.remove_files([lane_file_name(lane).as_str()])?;
        self.lanes.retain(|known| known != lane);
        Ok(())
    }

    /// Reads the record of a primary, the directory with all names: its id, and all lanes (directories for data) that
    /// it has ever had. Returns `None` if there is no id yet, for example because a crash came before it was written.
    fn read<B: Backing>(dir: &VoteDir<'_, B>) -> Result<Option<Self>, RecordError> {
        let Some(id_bytes) = read_file(dir, PRIMARY_ID_FILE)? else {
            return Ok(None);
        };
        let damaged_error = |name: &str, why| RecordError::Damaged {
            name: name.into(),
            why,
        };
        let id = id_bytes
            .try_into()
            .map_err(|_| damaged_error(PRIMARY_ID_FILE, "is damaged: restore it from a backup"))?;
        let mut lanes = Vec::new();
        for name in dir.names()? {
            if !name.starts_with(LANE) {
                continue;
            }
            // Another host may have removed the file since the directory was listed.
            let Some(path_bytes) = read_file(dir, &name)? else {
                continue;
            };
            let path = OsString::from_vec(path_bytes);
            if lane_file_name(&path) != name || !is_lane_path(&path) {
                return Err(damaged_error(
                    &name,
                    "does not record the lane of its name: inspect it",
                ));
            }
            lanes.push(path);
        }
        lanes.sort_unstable();
        Ok(Some(Self {
            id: u128::from_le_bytes(id),
            lanes,
        }))
    }
}

/// Opens the staging directory of `host`, which holds links of files that are being created or removed.
pub fn open_staging<B: Backing>(primary: &B, host: &str) -> Result<B::Inode, OwnError> {
    open_dir_of_host(primary, STAGING, host)
}

/// Opens the directory of `host` in the directory `name` of `.firn/`, which has one directory for each host.
pub(crate) fn open_dir_of_host<B: Backing>(
    primary: &B,
    name: &str,
    host: &str,
) -> Result<B::Inode, OwnError> {
    let top = own::make_dir(primary, &primary.root(), TOP)?;
    let all = own::make_dir(primary, &top, name).map_err(|error| error.below(TOP))?;
    own::make_dir(primary, &all, host).map_err(|error| error.below(name).below(TOP))
}

/// Returns whether a directory has the marker file of the primary with this id.
pub fn is_marked<B: Backing>(lane: &B, id: u128) -> Result<bool, OwnError> {
    Ok(own::find_file(lane, &lane.root(), &marker_name(id))?.is_some())
}

/// Puts the marker file of the primary with this id into a directory, durably. If the file system has no extended
/// attributes, the directory cannot be a lane (EOPNOTSUPP).
pub fn put_mark<B: Backing>(lane: &B, id: u128) -> Result<(), OwnError> {
    let name = marker_name(id);
    drop(own::open_or_create(lane, &lane.root(), &name)?);
    let marker_file = own::find_file(lane, &lane.root(), &name)?.ok_or(Errno::NOENT)?;
    // Shows that the file system stores marks. This one belongs to no link.
    let mark_of_no_link = Mark {
        primary: 0,
        link: 0,
    };
    mark::write_mark(lane, &marker_file, mark_of_no_link)?;
    lane.sync_dir(&lane.root())?;
    Ok(())
}

/// Removes the marker file of the primary with this id from a directory.
pub fn remove_mark<B: Backing>(lane: &B, id: u128) -> Result<(), Errno> {
    match lane.unlink(&lane.root(), OsStr::new(&marker_name(id))) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Returns the name of the marker file of the primary with this id.
fn marker_name(id: u128) -> String {
    format!("{MARKER}{id:032x}")
}

/// Opens the directory of the record for writing, and creates it if it does not exist.
fn open_record_dir<'a, B: Backing>(
    primary: &'a B,
    host: &'a str,
) -> Result<VoteDir<'a, B>, RecordError> {
    let top = own::make_dir(primary, &primary.root(), TOP)?;
    Ok(VoteDir::make(primary, &top, DIR, host).map_err(|error| error.below(TOP))?)
}

/// Returns the name of the file that records a lane.
fn lane_file_name(lane: &OsStr) -> String {
    format!("{LANE}{:016x}", xxhash_rust::xxh3::xxh3_64(lane.as_bytes()))
}

/// Returns whether a path has the form of a lane's path in links. It must be absolute, with single slashes, and
/// without the components `.` and `..`.
pub fn is_lane_path(path: &OsStr) -> bool {
    match path.as_bytes().strip_prefix(b"/") {
        Some(below_root) => !below_root.is_empty() && own::is_path(below_root),
        None => false,
    }
}

/// Returns the bytes of a file of the record: magic, version and checksum, and then `content`.
fn encode_file(content: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::from(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(crc32c::crc32c(content).to_le_bytes());
    bytes.extend(content);
    bytes
}

/// Reads the content of a file of the record. Returns `None` if there is no such file.
fn read_file<B: Backing>(dir: &VoteDir<'_, B>, name: &str) -> Result<Option<Vec<u8>>, RecordError> {
    let below = |error: OwnError| error.below(DIR).below(TOP);
    let Some(bytes) = dir.read(name).map_err(below)? else {
        return Ok(None);
    };
    let content = decode_file(&bytes).map_err(|why| RecordError::Damaged {
        name: quoted(name.as_bytes()),
        why,
    })?;
    Ok(Some(content.to_vec()))
}

/// Checks the bytes of a file of the record, and returns its content. The error says what is wrong and what to do.
fn decode_file(bytes: &[u8]) -> Result<&[u8], &'static str> {
    const DAMAGED: &str = "is damaged: restore it from a backup";
    let (head, content) = bytes.split_at_checked(HEAD_BYTES).ok_or(DAMAGED)?;
    if head[MAGIC_FIELD] != MAGIC {
        return Err("is not a record of lanes: inspect it and move it away");
    }
    if head[VERSION_FIELD] != VERSION.to_le_bytes() {
        return Err("was written by another version of Firn: mount with that version");
    }
    if head[CHECKSUM_FIELD] != crc32c::crc32c(content).to_le_bytes() {
        return Err(DAMAGED);
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_backing::{Access, Files, Names, Volume};
    use firn_sim::{SimBacking, suite};
    use std::io::IoSlice;

    fn lane(path: &str) -> OsString {
        path.into()
    }

    #[test]
    fn what_hosts_add_is_read_by_all_and_an_id_is_put_once() {
        let primary = SimBacking::new();
        assert_eq!(Record::find(&primary), Ok(None));
        let mut one = Record::make(&primary, "a").expect("make");
        let mut other = Record::make(&primary, "b").expect("make");
        assert_eq!(one.id, other.id);
        one.add(&primary, "a", &lane("/srv1/x")).expect("add");
        other.add(&primary, "b", &lane("/srv0/x")).expect("add");
        other.add(&primary, "b", &lane("/srv1/x")).expect("add");
        let both = vec![lane("/srv0/x"), lane("/srv1/x")];
        let read = Record::find(&primary).expect("find").expect("a record");
        assert_eq!(read.lanes, both);
        assert_eq!(read, other);
        other.forget(&primary, &lane("/srv0/x")).expect("forget");
        let read = Record::find(&primary).expect("find").expect("a record");
        assert_eq!(read.lanes, [lane("/srv1/x")]);
    }

    #[test]
    fn a_changed_byte_anywhere_is_found() {
        let bytes = encode_file(b"/srv0/x");
        assert_eq!(decode_file(&bytes), Ok(&b"/srv0/x"[..]));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 4;
            assert!(decode_file(&damaged).is_err(), "byte {at}");
            assert!(decode_file(&bytes[..at]).is_err(), "{at} bytes");
        }
    }

    #[test]
    fn a_record_that_others_could_have_written_is_not_believed() {
        let primary = SimBacking::new();
        Record::make(&primary, "a").expect("make");
        let (top, _) = primary
            .lookup(&primary.root(), OsStr::new(TOP))
            .expect("lookup");
        let (dir, _) = primary.lookup(&top, OsStr::new(DIR)).expect("lookup");
        let (file, _) = primary
            .lookup(&dir, OsStr::new(PRIMARY_ID_FILE))
            .expect("lookup");
        primary.set_mode(&file, 0o644).expect("set_mode");
        let error = Record::find(&primary).expect_err("refused").to_string();
        assert!(error.starts_with(".firn/lanes/primary has mode"), "{error}");
        primary.set_mode(&file, 0o600).expect("set_mode");
        let opened = primary.open(&file, Access::Write).expect("open");
        primary
            .write_at(&opened, &[IoSlice::new(b"X")], 3)
            .expect("write");
        let error = Record::find(&primary).expect_err("refused").to_string();
        assert!(error.contains("is not a record of lanes"), "{error}");
        primary.set_mode(&dir, 0o755).expect("set_mode");
        let error = Record::find(&primary).expect_err("refused").to_string();
        assert!(error.starts_with(".firn/lanes has mode"), "{error}");
    }

    #[test]
    fn a_directory_is_known_as_a_lane_of_its_primary_only() {
        let lane = SimBacking::new();
        assert_eq!(is_marked(&lane, 7), Ok(false));
        put_mark(&lane, 7).expect("mark");
        put_mark(&lane, 7).expect("again");
        assert_eq!(is_marked(&lane, 7), Ok(true));
        assert_eq!(is_marked(&lane, 8), Ok(false));
        let name = marker_name(8);
        let caller = suite::own_caller();
        lane.symlink(&caller, &lane.root(), OsStr::new(&name), OsStr::new("x"))
            .expect("symlink");
        assert!(is_marked(&lane, 8).is_err());
    }

    #[test]
    fn paths_of_lanes_are_as_links_have_them() {
        for good in ["/a", "/srv0/x", "/a b/..c"] {
            assert!(is_lane_path(OsStr::new(good)), "{good}");
        }
        for bad in ["", "/", "a", "/a/", "//a", "/a/../b", "/a/./b"] {
            assert!(!is_lane_path(OsStr::new(bad)), "{bad}");
        }
    }
}
