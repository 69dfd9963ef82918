//! Creation of files on a file system on which Firn can choose the server of a new file.
//!
//! The servers are numbered as *lanes*, so choosing a server means choosing a lane.
//!
//! Promise: a file is made complete, with the owner and mode that its caller asked for, or not at all. This holds even
//! if the file system puts the file on another server than the chosen one.

use std::ffi::OsStr;
use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, openat};

use crate::{Caller, LaneIndex, Result};

/// Chooses the lane of each new file, and creates the file there. A *lane* is an I/O server, or a group of servers.
pub trait Steering: Debug + Send + Sync {
    /// Returns the number of lanes.
    fn lanes(&self) -> u16;
    /// Returns the lane of an existing file, computed from its name and from `parent`, the lane of its directory. If
    /// these do not determine the lane, the result is a guess.
    fn lane_of(&self, parent: LaneIndex, name: &OsStr) -> LaneIndex;
    /// Returns the lane of a directory, from which the lanes of its files are computed. `parent` is the lane of its
    /// parent directory.
    fn lane_of_dir(&self, parent: LaneIndex, name: &OsStr) -> LaneIndex;
    /// Returns the lane of the new file with the number `turn`: such files go to the lanes in rotation.
    fn lane_of_turn(&self, turn: u64) -> LaneIndex;
    /// Creates a file and opens it for reading and writing. Returns its actual lane. It is no error if the file system
    /// chooses another server than the chosen one. Fails with EEXIST if the name exists.
    fn create(&self, new: &NewFile<'_>) -> Result<(OwnedFd, LaneIndex)>;
    /// Counts bytes that were written to a file of a lane, for the figures of the lanes.
    fn count_bytes(&self, lane: LaneIndex, bytes: u64);
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
    /// Creates the file without a choice of the server, with additional `flags`. Fails with EEXIST if the name exists.
    pub fn open(&self, flags: OFlags) -> Result<OwnedFd> {
        open_new(self.parent, self.name, self.mode, flags)
    }
}

/// Creates a regular file and opens it for reading and writing. Fails with EEXIST if the name exists.
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
