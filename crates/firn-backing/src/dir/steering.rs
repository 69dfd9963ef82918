//! Creation of files on a file system on which Firn can choose the server of a new file.
//!
//! Promise: a file is made complete, with the owner and mode that its caller asked for, or not at all. This holds even
//! if the file system puts the file elsewhere.

use std::ffi::OsStr;
use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, openat};

use crate::{Caller, LaneIndex, Result};

/// Tells a file system, when a file is created, on which server to put it.
pub trait Steering: Debug + Send + Sync {
    /// Returns the number of lanes: servers, or groups of servers.
    fn lanes(&self) -> u16;
    /// Returns the lane of an existing file, as far as its name and directory determine it. `parent`: lane of its
    /// directory.
    fn lane_of(&self, parent: LaneIndex, name: &OsStr) -> LaneIndex;
    /// Returns the lane of a directory, from which the lanes of its files are computed. `parent`: lane of its parent.
    fn lane_of_dir(&self, parent: LaneIndex, name: &OsStr) -> LaneIndex;
    /// Returns the lane of new file number `turn`: files go to the lanes in rotation.
    fn lane_of_turn(&self, turn: u64) -> LaneIndex;
    /// Counts bytes that were written to a file of a lane.
    fn count_bytes(&self, lane: LaneIndex, bytes: u64);
    /// Creates a file (EEXIST if the name exists) and opens it for reading and writing. Returns its actual lane. It is
    /// no error if the file system chooses another server.
    fn create(&self, new: &NewFile<'_>) -> Result<(OwnedFd, LaneIndex)>;
}

/// Arguments for the creation of a file.
#[derive(Clone, Copy, Debug)]
pub struct NewFile<'a> {
    /// Directory of the file, as an `O_PATH` descriptor.
    pub parent: BorrowedFd<'a>,
    /// Lane of the directory.
    pub parent_lane: LaneIndex,
    /// Name of the file.
    pub name: &'a OsStr,
    /// Mode of the file; no umask is applied.
    pub mode: u32,
    /// Number of the file among new files, if this number and not the name decides the lane.
    pub turn: Option<u64>,
    /// The caller, if this thread has the caller's file system ids. `None`: the thread has the ids of the process, and
    /// the owner of the file is set later.
    pub caller: Option<&'a Caller>,
}

impl NewFile<'_> {
    /// Creates the file without a choice of the server, with additional `flags`. EEXIST if the name exists.
    pub fn open(&self, flags: OFlags) -> Result<OwnedFd> {
        open_new(self.parent, self.name, self.mode, flags)
    }
}

/// Creates a regular file and opens it for reading and writing. EEXIST if the name exists.
pub(super) fn open_new(
    parent: BorrowedFd<'_>,
    name: &OsStr,
    mode: u32,
    flags: OFlags,
) -> Result<OwnedFd> {
    let flags = flags | OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
    let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY;
    openat(parent, name, flags, Mode::from_raw_mode(mode))
}
