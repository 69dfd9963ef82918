//! New files on a file system that lets it be said which of its servers a file goes to.
//!
//! Promise: whatever becomes of the wish, a file is made whole and as its caller would have made it, or not at all.

use std::ffi::OsStr;
use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, openat};

use crate::{Caller, LaneIndex, Result};

/// Tells a file system, at the creation of a file, which of its servers the file goes to.
pub trait Steering: Debug + Send + Sync {
    /// How many lanes there are: servers, or groups of them.
    fn lanes(&self) -> u16;
    /// The lane that a file of this name in a directory with the lane `parent` is in, as far as names tell: for a file that
    /// was there before.
    fn lane_of(&self, parent: LaneIndex, name: &OsStr) -> LaneIndex;
    /// The lane of a directory in one with the lane `parent`: from it those of its files are counted.
    fn lane_of_dir(&self, parent: LaneIndex, name: &OsStr) -> LaneIndex;
    /// The lane of a turn: turns go round the lanes.
    fn lane_of_turn(&self, turn: u64) -> LaneIndex;
    /// `bytes` bytes were written to a file of a lane.
    fn count_bytes(&self, lane: LaneIndex, bytes: u64);
    /// Creates a file that did not exist (EEXIST otherwise) and opens it for reading and writing. That the file system
    /// does not take the wish is no error: the file lies where it puts it then.
    fn create(&self, new: &NewFile<'_>) -> Result<(OwnedFd, LaneIndex)>;
}

/// A file that is to be made.
#[derive(Clone, Copy, Debug)]
pub struct NewFile<'a> {
    /// Its directory: an `O_PATH` descriptor.
    pub parent: BorrowedFd<'a>,
    /// The directory's lane.
    pub parent_lane: LaneIndex,
    /// Its name there.
    pub name: &'a OsStr,
    /// Its mode; no umask is applied.
    pub mode: u32,
    /// Its turn, if that says the lane, and not the name.
    pub turn: Option<u64>,
    /// The user for which the file is made, if the thread has the caller's file system ids. If not, it has those of the
    /// process, and the file is given to its owner after it was made.
    pub caller: Option<&'a Caller>,
}

impl NewFile<'_> {
    /// Creates the file as any file system does, with further `flags`: EEXIST where the name is taken.
    pub fn open(&self, flags: OFlags) -> Result<OwnedFd> {
        open_new(self.parent, self.name, self.mode, flags)
    }
}

/// Creates a regular file that did not exist and opens it for reading and writing.
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
