//! Where the bytes of a file lie, for processes that read logs themselves.
//!
//! Promises
//! * What is listed are bytes that a read would give: those of other hosts' logs only after their checksums were
//!   compared, and none that were given up.
//! * The work for one list has a bound, however many pieces the file has: maximum counts of parts, descriptors and
//!   blocks whose checksums have to be compared.
//!
//! A reader of one host's pieces shall not wait for the checksums of all hosts. Checksums are compared only for the
//! host whose bytes the list begins with; other hosts' bytes are marked as "to be asked for".

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::os::fd::OwnedFd;

use firn_backing::{Backing, DescriptorUse, LocateLimits, LocatedPart};

use crate::resolve::WriterId;

/// Blocks of 1 MiB that are read for one list, to compare their checksums: it ends before the next one.
const BLOCKS_MAX: usize = 16;

/// A file that has bytes of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Holder {
    /// The plain file.
    Plain,
    /// A log: the container as this process has numbered it, its writer, and the index among the writer's logs.
    Log(u64, WriterId, u32),
}

/// Whether the checksum of a block is compared for a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// It is.
    Now,
    /// A reader that wants these bytes has to ask for them.
    Later,
    /// There were enough: the list ends here.
    Enough,
}

/// Whether there is room for more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// There is.
    Left,
    /// The list ends here.
    Full,
}

/// A list that is being made, in the order of the file.
pub(crate) struct Locating {
    pub(crate) parts: Vec<LocatedPart>,
    pub(crate) files: Vec<OwnedFd>,
    /// Up to here the file was gone through.
    pub(crate) end: u64,
    from: u64,
    limits: LocateLimits,
    /// Writer whose blocks are compared with their checksums.
    checked: Option<WriterId>,
    /// By holder of the bytes: what [`Locating::index_of`] answered.
    known: HashMap<Holder, Option<usize>>,
    blocks: usize,
}

impl Locating {
    /// From an offset on.
    pub(crate) fn new(from: u64, limits: LocateLimits) -> Self {
        Self {
            parts: Vec::new(),
            files: Vec::new(),
            end: from,
            from,
            limits,
            checked: None,
            known: HashMap::new(),
            blocks: 0,
        }
    }

    /// Takes `range`, which comes next, and which lies from `position` on in the file with this index.
    pub(crate) fn add(&mut self, range: Range<u64>, index: usize, position: u64) -> Room {
        self.add_part(range, Some(index), position)
    }

    /// Takes `range`, which comes next and has to be asked for.
    pub(crate) fn add_unchecked(&mut self, range: Range<u64>) -> Room {
        let position = range.start;
        self.add_part(range, None, position)
    }

    /// Adds the next part of the list, joined with the part before where both are one range of one file.
    fn add_part(&mut self, range: Range<u64>, file: Option<usize>, position: u64) -> Room {
        debug_assert!(range.start >= self.end, "parts are told in order");
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

    /// Skips `range`, which comes next and which the reader does not read itself.
    pub(crate) fn skip(&mut self, range: Range<u64>) -> Room {
        self.end = range.end;
        Room::Left
    }

    /// A block of a log, whose bytes come next, would have to be read to see whether it is as it was written.
    pub(crate) fn take_block(&mut self, writer: WriterId) -> Check {
        if self.end == self.from && self.parts.is_empty() {
            self.checked = Some(writer);
        }
        if self.checked != Some(writer) {
            return Check::Later;
        }
        if self.blocks >= BLOCKS_MAX {
            return Check::Enough;
        }
        self.blocks += 1;
        Check::Now
    }

    /// The index of a file among those of the list; `None`: it has no descriptor, or there are too many.
    pub(crate) fn index_of<B: Backing>(
        &mut self,
        base: &B,
        holder: Holder,
        file: &B::File,
    ) -> Option<usize> {
        match self.known.entry(holder) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(new) => {
                let has_room = self.files.len() < self.limits.files_max;
                let fd = has_room
                    .then(|| base.descriptor(file, DescriptorUse::Reading))
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
