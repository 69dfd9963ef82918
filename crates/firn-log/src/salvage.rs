//! Salvage: gives up the damaged parts of a container, so that the rest can be flattened.
//!
//! A *container* is a directory with the logs and indexes of all hosts, for one file. To *flatten* it is to copy the
//! bytes of the logs to the plain file. The *seal* says how many bytes of each index count.
//!
//! `firn flatten --accept-loss` asks for this if damage persists.
//!
//! Promises
//! * Each loss is reported, and the report is durable, before anything is given up.
//! * The seal lists what was given up. So all hosts flatten the same bytes, whichever host dies meanwhile.
//! * What can be read stays as it is. Damaged bytes of a log become zeros, unless a newer change covers them. Damaged
//!   parts of an index are left out, and their changes are lost.
//! * A damaged `head` is made again from the container's name and the length of the plain file.
//! * A container is not touched while a live host may write to it. A failing backing is an error, not a loss.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::ops::Range;
use std::path::{Path, PathBuf};

use firn_backing::{Access, Backing, Errno, Result};
use firn_hosts::own;

use crate::container::{Container, UnreadableRange, Walk};
use crate::frame::Frame;
use crate::head::{self, HEAD, Head, HeadError, HeadState};
use crate::index_reader::{find_frame, has_synced_frame_after, read_index};
use crate::names::Writer;
use crate::resolve::WriterId;
use crate::seal::{DONE_ALL, Lifecycle, SEAL_NAME, Seal, done_name, is_done_part};

/// One part that is given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Path of the file, relative to the directory that was searched.
    pub path: PathBuf,
    /// Name of the file's container in `.firn/log/`.
    pub container: String,
    /// The lost part.
    pub lost: LostPart,
}

/// What part of a container is lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LostPart {
    /// Bytes of the file. They become zeros.
    Bytes {
        /// Their range in the file.
        range: Range<u64>,
        /// The host that wrote them.
        host: String,
        /// The log in which the bytes are damaged.
        log: String,
    },
    /// Changes whose frames cannot be read. The file keeps the older bytes in their place.
    Changes {
        /// The host that made them.
        host: String,
        /// The index in which the frames are damaged.
        index: String,
        /// The damaged range of the index.
        range: Range<u64>,
    },
    /// The seal. All that is in the container counts instead.
    Seal,
    /// The head. It is made again from the container's name.
    Head {
        /// How many bytes of the plain file count below the logs: all of them. `None` for a generation that does not
        /// lie over the plain file.
        base: Option<u64>,
    },
}

/// Receives the losses.
pub trait Report {
    /// Adds one loss to the report.
    fn add(&mut self, loss: Loss) -> Result<()>;
    /// Makes the report durable.
    fn sync(&mut self) -> Result<()>;
}

/// Reports the losses of one container.
pub(crate) struct LossReporter<'a> {
    pub(crate) path: &'a Path,
    pub(crate) container: &'a str,
    pub(crate) report: &'a mut dyn Report,
}

impl LossReporter<'_> {
    /// Adds one loss to the report.
    fn add(&mut self, lost: LostPart) -> Result<()> {
        self.report.add(Loss {
            path: self.path.to_owned(),
            container: self.container.to_owned(),
            lost,
        })
    }
}

/// How much of an index can be read.
struct ReadableIndex {
    /// How many bytes of the index count.
    end: u64,
    /// The parts that contain no frames.
    lost: Vec<Range<u64>>,
}

impl ReadableIndex {
    /// Returns what can be read of an index without a file: nothing. `limit` is how much counts, if that is known.
    fn missing(limit: Option<u64>) -> Self {
        match limit {
            Some(limit) => Self {
                end: limit,
                lost: std::iter::once(0..limit).collect(),
            },
            None => Self {
                end: 0,
                lost: Vec::new(),
            },
        }
    }
}

impl<B: Backing> Lifecycle<'_, B> {
    /// Replaces the head, the link that makes a container valid, by `new_head` if it is missing or damaged. Returns
    /// true if the container needs no further change for that. Returns false if a writer is registered that `is_alive`
    /// reports as alive, or if another host holds the container's exclusive lock.
    ///
    /// The lost head said how many bytes of the plain file count. The new one counts all bytes that the plain file has
    /// now. That is right: since the container was made, only its own flattening has changed the plain file. Bytes
    /// beyond the old length are therefore copies of bytes in the logs, or holes.
    pub(crate) fn renew_head(
        &self,
        new_head: Head,
        is_alive: &dyn Fn(&str) -> Result<bool>,
        reporter: &mut LossReporter<'_>,
    ) -> Result<bool> {
        let dir = self.container_dir();
        match head::load(self.backing, dir, new_head.file, new_head.generation)? {
            HeadState::Unusable(HeadError::Missing | HeadError::Damaged) => {}
            // A head of another version or of another file is not damaged.
            HeadState::Valid(_)
            | HeadState::BeingMade
            | HeadState::Unusable(HeadError::Version(_) | HeadError::Foreign) => return Ok(true),
        }
        if !self.close(is_alive)? {
            return Ok(false);
        }
        self.run_exclusively(&mut || {
            reporter.add(LostPart::Head {
                base: new_head.plain_bytes,
            })?;
            // The report is durable before anything is given up.
            reporter.report.sync()?;
            match self.backing.unlink(dir, OsStr::new(HEAD)) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
            new_head.publish(self.backing, dir)?;
            self.backing.sync_dir(dir)
        })
    }

    /// Gives up what cannot be read. Returns false if a writer is registered that `is_alive` reports as alive, or if
    /// another host holds the container's exclusive lock.
    pub(crate) fn salvage(
        &self,
        unit_bytes: u64,
        is_alive: &dyn Fn(&str) -> Result<bool>,
        reporter: &mut LossReporter<'_>,
    ) -> Result<bool> {
        if !self.close(is_alive)? {
            return Ok(false);
        }
        self.run_exclusively(&mut || self.salvage_exclusively(unit_bytes, reporter))
    }

    /// Gives up the damaged parts of a container, a directory with the logs and indexes of all hosts. The rest can then
    /// be copied to the plain file. The caller holds the container's exclusive lock.
    ///
    /// First builds a new seal, which says how much of each index counts and which blocks of logs are lost. Then
    /// reports all losses, makes the report durable, and puts the new seal. Does nothing if nothing is damaged.
    fn salvage_exclusively(&self, unit_bytes: u64, reporter: &mut LossReporter<'_>) -> Result<()> {
        let names = self.vote_dir().names()?;
        // All bytes are in the plain file, so damage in the container means nothing.
        if names.contains(DONE_ALL) {
            return Ok(());
        }
        let stored_seal = own::read_file(self.backing, self.container_dir(), SEAL_NAME)?;
        let old_seal = stored_seal.as_deref().and_then(Seal::decode);
        let is_seal_damaged = stored_seal.is_some() && old_seal.is_none();
        let indexes = self
            .container
            .salvage_indexes(self.backing, old_seal.as_ref())?;
        let mut seal = build_seal(old_seal.as_ref(), &indexes, unit_bytes);
        // From here on this host reads the container by the new seal.
        self.container.apply_seal(self.backing, seal.clone())?;
        if old_seal.is_none() {
            seal.len = self.container.len();
        }
        // Parts that are in the plain file are not lost. If the old seal is damaged, nothing is known of the parts, so
        // none counts as flat.
        let is_flat = |part: u64| !is_seal_damaged && names.contains(&done_name(part));
        self.add_lost_blocks(&mut seal, &is_flat)?;
        if is_seal_damaged {
            reporter.add(LostPart::Seal)?;
        }
        self.report_losses(&indexes, &mut seal, &is_flat, reporter)?;
        // The stored seal already has all losses, or nothing is damaged and the container is not sealed.
        let is_same_seal = old_seal.is_some_and(|old_seal| old_seal == seal);
        let is_undamaged = stored_seal.is_none() && seal.lost.is_empty();
        if is_same_seal || is_undamaged {
            return Ok(());
        }
        // The report is durable before anything is given up.
        reporter.report.sync()?;
        if is_seal_damaged {
            // The old seal may have had parts of another length, so their marks mean nothing.
            let part_marks = names.iter().filter(|name| is_done_part(name));
            self.vote_dir()
                .remove_files(part_marks.map(String::as_str))?;
        }
        let encoded = seal.encode()?;
        own::replace_file(self.backing, self.container_dir(), SEAL_NAME, &encoded)?;
        self.container.apply_seal(self.backing, seal)
    }

    /// Reports the lost parts of the indexes, and then the damaged bytes of the logs. Adds the blocks of these bytes to
    /// the seal, by which all hosts know what was given up.
    fn report_losses(
        &self,
        indexes: &BTreeMap<Writer, ReadableIndex>,
        seal: &mut Seal,
        is_flat: &dyn Fn(u64) -> bool,
        reporter: &mut LossReporter<'_>,
    ) -> Result<()> {
        for (writer, index) in indexes {
            self.report_lost_frames(writer, &index.lost, reporter)?;
        }
        self.record_lost_bytes(seal, is_flat, &mut |unreadable| {
            reporter.add(LostPart::Bytes {
                range: unreadable.file,
                host: unreadable.host,
                log: unreadable.log,
            })
        })
    }

    /// Finds the damaged blocks of the logs, and adds them to the seal.
    ///
    /// A table may turn out to be damaged meanwhile. The index is then read in its place and may give other bytes, so
    /// the search is repeated.
    fn add_lost_blocks(&self, seal: &mut Seal, is_flat: &dyn Fn(u64) -> bool) -> Result<()> {
        loop {
            let rejected_tables = self.container.rejected_table_count();
            let outcome = self.record_lost_bytes(seal, is_flat, &mut |_| Ok(()));
            if self.container.rejected_table_count() == rejected_tables {
                return outcome;
            }
        }
    }

    /// Reports the lost parts of an index, except those that are also in tables, its sorted copies.
    fn report_lost_frames(
        &self,
        writer: &Writer,
        lost: &[Range<u64>],
        reporter: &mut LossReporter<'_>,
    ) -> Result<()> {
        let sorted_end = self.container.sorted_end(writer);
        for range in lost.iter().filter(|range| range.end > sorted_end) {
            reporter.add(LostPart::Changes {
                host: writer.host().to_owned(),
                index: writer.index_name(),
                range: range.clone(),
            })?;
        }
        Ok(())
    }

    /// Finds the damaged bytes of the file, and records the blocks of logs with these bytes in the seal as lost. So all
    /// hosts give up the same ones. Calls `visit` with each damaged range. Leaves out parts that are flat, that is, in
    /// the plain file already.
    fn record_lost_bytes(
        &self,
        seal: &mut Seal,
        is_flat: &dyn Fn(u64) -> bool,
        visit: &mut dyn FnMut(UnreadableRange) -> Result<()>,
    ) -> Result<()> {
        let mut walk = Walk::new(0..seal.len);
        loop {
            let segments = self.container.next_segments(self.backing, &mut walk)?;
            if segments.is_empty() {
                return Ok(());
            }
            let pieces = segments
                .into_iter()
                .flat_map(|segment| seal.split(segment))
                .filter(|(part, _)| !is_flat(*part));
            let segments_to_check: Vec<_> = pieces.map(|(_, segment)| segment).collect();
            // The segments were collected above, because this loop changes the seal.
            for segment in segments_to_check {
                let lost = &mut seal.lost;
                let unreadable = self
                    .container
                    .find_unreadable(self.backing, &segment, lost)?;
                for range in unreadable {
                    let lost_blocks = lost.logs.entry(range.log.clone()).or_default();
                    lost_blocks.insert(range.block);
                    visit(range)?;
                }
            }
        }
    }
}

impl<B: Backing> Container<B> {
    /// Finds how much of each index, the list of a host's changes, can be read, and makes that durable. `seal` says how
    /// much counts, if it is known.
    fn salvage_indexes(
        &self,
        backing: &B,
        seal: Option<&Seal>,
    ) -> Result<BTreeMap<Writer, ReadableIndex>> {
        let names = own::list(backing, &self.dir)?;
        let listed = names
            .iter()
            .filter_map(|(name, ..)| Writer::from_index_name(name));
        let sealed = seal.map_or_else(Vec::new, Seal::writers);
        let mut indexes = BTreeMap::new();
        for writer in listed.chain(sealed) {
            let limit = seal.map(|seal| seal.limit_of(&writer));
            let index = match own::find_file(backing, &self.dir, &writer.index_name())? {
                Some(inode) => {
                    let file = backing.open(&inode, Access::Read)?;
                    let is_data_only = true;
                    backing.sync(&file, is_data_only)?;
                    salvage_index(backing, &file, writer.id(), limit)?
                }
                None => ReadableIndex::missing(limit),
            };
            indexes.insert(writer, index);
        }
        Ok(indexes)
    }
}

/// Copies the old seal (how many bytes of each index count), or builds one that counts all that can be read if there is
/// none. Then records the unreadable parts of indexes in it as lost.
fn build_seal(
    old_seal: Option<&Seal>,
    indexes: &BTreeMap<Writer, ReadableIndex>,
    unit_bytes: u64,
) -> Seal {
    let mut seal = match old_seal {
        Some(old_seal) => old_seal.clone(),
        None => {
            let ends = indexes
                .iter()
                .map(|(writer, index)| (writer.index_name(), index.end));
            Seal::new(ends.collect(), unit_bytes)
        }
    };
    for (writer, index) in indexes {
        if !index.lost.is_empty() {
            let lost_parts = seal.lost.indexes.entry(writer.index_name()).or_default();
            lost_parts.clone_from(&index.lost);
        }
    }
    seal
}

/// Reads an index up to `limit`, and skips parts that contain no frames (entries), as lost parts. Without a limit,
/// reads up to the last synced frame.
fn salvage_index<B: Backing>(
    backing: &B,
    index: &B::File,
    writer: WriterId,
    limit: Option<u64>,
) -> Result<ReadableIndex> {
    let mut readable = ReadableIndex {
        end: 0,
        lost: Vec::new(),
    };
    let end_max = limit.unwrap_or(u64::MAX);
    while readable.end < end_max {
        let start = readable.end;
        readable.end = read_index(backing, index, writer, start..end_max)?.end;
        if readable.end > start {
            continue;
        }
        // No frame begins here. The index goes on at the next frame, or at the limit.
        let has_more = limit.is_some() || has_synced_frame_after(backing, index, start)?;
        let next_frame = if has_more {
            let is_any = |_: &Frame| true;
            find_frame(backing, index, start + 1, &is_any)?
        } else {
            None
        };
        let Some(lost_end) = next_frame.or(limit) else {
            break;
        };
        readable.end = lost_end.min(end_max);
        readable.lost.push(start..readable.end);
    }
    Ok(readable)
}

impl Report for Vec<Loss> {
    fn add(&mut self, loss: Loss) -> Result<()> {
        self.push(loss);
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Returns whether damage in a log may be the cause of an error.
pub(crate) fn may_be_damage(error: Errno) -> bool {
    error == Errno::IO
}
