//! Lists where the bytes of a file lie, for programs that read the files of the backing themselves.
//!
//! Terms
//! * The *plain file* is the ordinary file with the name and the attributes.
//! * A *log* has the newer bytes that one host wrote.
//! * A *block* is a part of a log that has one checksum.
//! * firnd is the process that serves the mount.
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
use std::ops::Range;
use std::os::fd::OwnedFd;

use firn_backing::{Backing, DescriptorUse, LocateLimits, LocatedPart};

use crate::resolve::WriterId;

/// Bound on the blocks of 1 MiB that are read for one list to compare their checksums. The list ends before the next
/// one.
const CHECKED_BLOCKS_MAX: usize = 16;

/// The file in which listed bytes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DataFile {
    /// The plain file.
    Plain,
    /// A log.
    Log(LogId),
}

/// Identifies a log among those of all containers that this process has opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LogId {
    /// Number of the container in this process.
    pub(crate) container: u64,
    pub(crate) writer: WriterId,
    /// Number of the log among the writer's logs.
    pub(crate) log: u32,
}

/// What to do with a block whose checksum was not compared yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockCheck {
    /// Compare the checksum now.
    CheckNow,
    /// Mark the bytes: the program asks firnd for them.
    AskFirnd,
    /// End the list before the block, because enough blocks were checked.
    EndList,
}

/// Whether more parts fit in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListStatus {
    /// More parts fit.
    Open,
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
    /// Results of [`LocatedList::find_or_add_file`].
    file_indexes: HashMap<DataFile, Option<usize>>,
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
            file_indexes: HashMap::new(),
            checked_blocks: 0,
        }
    }

    /// Adds `range`, which lies from `position` on in the listed file with this index.
    pub(crate) fn add(&mut self, range: Range<u64>, index: usize, position: u64) -> ListStatus {
        self.add_part(range, Some(index), position)
    }

    /// Adds `range` as bytes that a program must ask firnd for.
    pub(crate) fn add_unchecked(&mut self, range: Range<u64>) -> ListStatus {
        // A part without a file has the position of its bytes in the logged file.
        let position = range.start;
        self.add_part(range, None, position)
    }

    /// Adds the next part. It is joined with the last part if both are one range of one file. Returns `Full`, and adds
    /// nothing, if the list has no room.
    fn add_part(&mut self, range: Range<u64>, file: Option<usize>, position: u64) -> ListStatus {
        debug_assert!(range.start >= self.end, "parts are added in order");
        debug_assert!(range.start <= range.end);
        let len = range.end - range.start;
        if let Some(last_part) = self.parts.last_mut()
            && last_part.file == file
            && last_part.offset + last_part.len == range.start
            && last_part.position + last_part.len == position
        {
            last_part.len += len;
        } else if self.parts.len() >= self.limits.parts_max {
            return ListStatus::Full;
        } else {
            self.parts.push(LocatedPart {
                offset: range.start,
                len,
                file,
                position,
            });
        }
        self.end = range.end;
        ListStatus::Open
    }

    /// Skips `range`, which the program does not read itself.
    pub(crate) fn skip(&mut self, range: Range<u64>) -> ListStatus {
        self.end = range.end;
        ListStatus::Open
    }

    /// Decides whether to check a block of `writer` whose bytes come next.
    pub(crate) fn decide_check(&mut self, writer: WriterId) -> BlockCheck {
        let is_list_begin = self.end == self.start && self.parts.is_empty();
        if is_list_begin {
            self.checked_writer = Some(writer);
        }
        if self.checked_writer != Some(writer) {
            return BlockCheck::AskFirnd;
        }
        if self.checked_blocks >= CHECKED_BLOCKS_MAX {
            return BlockCheck::EndList;
        }
        self.checked_blocks += 1;
        BlockCheck::CheckNow
    }

    /// Returns the index of a file in the list, and adds the file if it is new. Returns `None` if the file has no
    /// descriptor, or the list has too many.
    pub(crate) fn find_or_add_file<B: Backing>(
        &mut self,
        backing: &B,
        id: DataFile,
        file: &B::File,
    ) -> Option<usize> {
        if let Some(known_index) = self.file_indexes.get(&id) {
            return *known_index;
        }
        let index = self.add_file(backing, file);
        self.file_indexes.insert(id, index);
        index
    }

    /// Adds the descriptor of a file to the list, and returns its index.
    fn add_file<B: Backing>(&mut self, backing: &B, file: &B::File) -> Option<usize> {
        if self.files.len() >= self.limits.files_max {
            return None;
        }
        let fd = backing.descriptor(file, DescriptorUse::Reading)?;
        self.files.push(fd);
        Some(self.files.len() - 1)
    }
}
