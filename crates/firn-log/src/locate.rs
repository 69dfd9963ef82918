//! Lists where the bytes of a file lie, for programs that read the plain file and the logs themselves.
//!
//! Promises
//! * A listed byte is the byte that a read returns. Bytes of another host's log are listed only after the checksum of
//!   their block was compared. Bytes that were given up are not listed.
//! * The work for one list is bounded: by a number of parts, of descriptors, and of blocks to check.
//!
//! Checks take time. A reader that wants one host's bytes should not wait for checks of all hosts' bytes. So blocks are
//! checked only for the host whose bytes begin the list. Other hosts' unchecked bytes are marked: the program asks
//! firnd for them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::os::fd::OwnedFd;

use firn_backing::{Backing, DescriptorUse, LocateLimits, LocatedPart};

use crate::resolve::WriterId;

/// Bound on the blocks of 1 MiB that are read for one list to compare their checksums. The list ends before the next
/// one.
const BLOCKS_MAX: usize = 16;

/// The file in which listed bytes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DataFile {
    /// The plain file.
    Plain,
    /// A log: the number of its container in this process, its writer, and its number among the writer's logs.
    Log(u64, WriterId, u32),
}

/// What to do with a block whose checksum was not compared yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// Compare the checksum now.
    Now,
    /// Mark the bytes: the program asks firnd for them.
    Later,
    /// End the list before the block, because enough blocks were checked.
    Enough,
}

/// Whether more parts fit in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// More parts fit.
    Left,
    /// The list ends before this part.
    Full,
}

/// A list in the making. Parts are added in the order of the file.
pub(crate) struct LocatedList {
    pub(crate) parts: Vec<LocatedPart>,
    pub(crate) files: Vec<OwnedFd>,
    /// End of the last range that was added or skipped.
    pub(crate) end: u64,
    start: u64,
    limits: LocateLimits,
    /// The writer whose blocks are checked: the first one in the list.
    checked_writer: Option<WriterId>,
    /// Results of [`LocatedList::index_of`].
    index_by_holder: HashMap<DataFile, Option<usize>>,
    /// Number of blocks that were checked.
    checked_blocks: usize,
}

impl LocatedList {
    /// Makes an empty list that begins at `start`.
    pub(crate) fn new(start: u64, limits: LocateLimits) -> Self {
        Self {
            parts: Vec::new(),
            files: Vec::new(),
            end: start,
            start,
            limits,
            checked_writer: None,
            index_by_holder: HashMap::new(),
            checked_blocks: 0,
        }
    }

    /// Adds `range`, which lies from `position` on in the listed file with this index.
    pub(crate) fn add(&mut self, range: Range<u64>, index: usize, position: u64) -> Room {
        self.add_part(range, Some(index), position)
    }

    /// Adds `range` as bytes that a program must ask firnd for.
    pub(crate) fn add_unchecked(&mut self, range: Range<u64>) -> Room {
        let position = range.start;
        self.add_part(range, None, position)
    }

    /// Adds the next part. It is joined with the last part if both are one range of one file.
    fn add_part(&mut self, range: Range<u64>, file: Option<usize>, position: u64) -> Room {
        debug_assert!(range.start >= self.end, "parts are added in order");
        debug_assert!(range.start <= range.end);
        if let Some(last) = self.parts.last_mut()
            && last.file == file
            && last.offset + last.len == range.start
            && last.position + last.len == position
        {
            last.len += range.end - range.start;
        } else if self.parts.len() >= self.limits.parts_max {
            return Room::Full;
        } else {
            self.parts.push(LocatedPart {
                offset: range.start,
                len: range.end - range.start,
                file,
                position,
            });
        }
        self.skip(range)
    }

    /// Skips `range`, which the program does not read itself.
    pub(crate) fn skip(&mut self, range: Range<u64>) -> Room {
        self.end = range.end;
        Room::Left
    }

    /// Decides whether to check a block of `writer` whose bytes come next.
    pub(crate) fn check_block(&mut self, writer: WriterId) -> Check {
        if self.end == self.start && self.parts.is_empty() {
            self.checked_writer = Some(writer);
        }
        if self.checked_writer != Some(writer) {
            return Check::Later;
        }
        if self.checked_blocks >= BLOCKS_MAX {
            return Check::Enough;
        }
        self.checked_blocks += 1;
        Check::Now
    }

    /// Returns the index of a file in the list, and adds the file if it is new. Returns `None` if the file has no
    /// descriptor, or the list has too many.
    pub(crate) fn index_of<B: Backing>(
        &mut self,
        backing: &B,
        holder: DataFile,
        file: &B::File,
    ) -> Option<usize> {
        match self.index_by_holder.entry(holder) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(new) => {
                let has_room = self.files.len() < self.limits.files_max;
                let fd = has_room
                    .then(|| backing.descriptor(file, DescriptorUse::Reading))
                    .flatten();
                let index = fd.map(|fd| {
                    self.files.push(fd);
                    self.files.len() - 1
                });
                *new.insert(index)
            }
        }
    }
}
