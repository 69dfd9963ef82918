//! The way out of a container that is damaged for good: what cannot be read of it is told, and given up.
//!
//! Promises
//! * Nothing is given up before it was told, and the report of it is durable.
//! * What is given up is written into the seal, so that all hosts flatten the same bytes, whichever host dies. What can
//!   be read stays as it is. Bytes of a log that are damaged become zeros, where no newer change has covered them. A
//!   part of an index that is no frame is left out, and its changes are unknown.
//! * A damaged `head` is made anew with what it had, by the container's name and the length of the plain file.
//! * What a host may still write to is not touched, and a backing that fails to read is no loss.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::ops::Range;
use std::path::{Path, PathBuf};

use firn_backing::{Access, Attr, Backing, Errno, Result};
use firn_hosts::own;

use crate::container::{Container, Unreadable, Walk};
use crate::file_id::FileId;
use crate::head::{self, HEAD, Head, HeadError};
use crate::index_reader::{find_frame, has_synced_frame_after, read_index};
use crate::names::Writer;
use crate::resolve::WriterId;
use crate::seal::{DONE_ALL, Ending, SEAL_NAME, Seal, done_name, is_done_part};

/// Something that is given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// The file, relative to where it was looked for.
    pub path: PathBuf,
    /// Its container in `.firn/log/`.
    pub container: String,
    /// What it is.
    pub lost: LostPart,
}

/// What may be lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LostPart {
    /// Bytes of the file, which become zeros.
    Bytes {
        /// Where in the file.
        range: Range<u64>,
        /// The host that wrote them.
        host: String,
        /// The log that does not have them.
        log: String,
    },
    /// Changes of the file of which is not known what they were: older bytes are in their place.
    Changes {
        /// The host that made them.
        host: String,
        /// The index that does not have them.
        index: String,
        /// Where in the index.
        range: Range<u64>,
    },
    /// What counted: whatever is there counts.
    Seal,
    /// What the container is of: it is what its name says.
    Head {
        /// How much of the plain file counts below the logs, if they lie over that: all of it.
        base: Option<u64>,
    },
}

/// Where losses are told.
pub trait Report {
    /// Tells one.
    fn add(&mut self, loss: Loss) -> Result<()>;
    /// Makes what was told durable.
    fn sync(&mut self) -> Result<()>;
}

/// Tells the losses of one container.
pub(crate) struct LossReporter<'a> {
    pub(crate) path: &'a Path,
    pub(crate) container: &'a str,
    pub(crate) report: &'a mut dyn Report,
}

impl LossReporter<'_> {
    fn tell(&mut self, lost: LostPart) -> Result<()> {
        self.report.add(Loss {
            path: self.path.to_owned(),
            container: self.container.to_owned(),
            lost,
        })
    }
}

/// An index as far as it can be read.
struct Salvaged {
    /// Bytes of it that count.
    end: u64,
    /// Parts that are no frames.
    lost: Vec<Range<u64>>,
}

impl<B: Backing> Ending<'_, B> {
    /// Makes `head` anew where it is missing or damaged; false if a host writes that `is_alive` says to live.
    ///
    /// Once the head is put, the plain file changes only by the flattening of this container. That cuts off what counts
    /// no more, and then writes bytes that are in logs. A plain file that became longer by that has there what the logs
    /// have, or holes. So its present length serves instead of the earlier one.
    pub(crate) fn renew_head(
        &self,
        (file, generation): (FileId, u32),
        plain: &Attr,
        is_alive: &dyn Fn(&str) -> Result<bool>,
        reporter: &mut LossReporter<'_>,
    ) -> Result<bool> {
        let dir = self.votes().dir();
        match head::load(self.base, dir, file, generation)? {
            Err(HeadError::Missing | HeadError::Damaged) => {}
            // One of another version or file is not damaged.
            Ok(_) | Err(HeadError::Version(_) | HeadError::Foreign) => return Ok(true),
        }
        if !self.close(is_alive)? {
            return Ok(false);
        }
        let head = Head::new(file, generation, plain.size);
        self.alone(&mut || {
            reporter.tell(LostPart::Head { base: head.base })?;
            reporter.report.sync()?;
            match self.base.unlink(dir, OsStr::new(HEAD)) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
            head.put(self.base, dir)?;
            self.base.sync_dir(dir)
        })
    }

    /// Gives up what cannot be read; false if a host writes that `is_alive` says to live.
    pub(crate) fn give_up(
        &self,
        unit_bytes: u64,
        is_alive: &dyn Fn(&str) -> Result<bool>,
        reporter: &mut LossReporter<'_>,
    ) -> Result<bool> {
        if !self.close(is_alive)? {
            return Ok(false);
        }
        self.alone(&mut || self.give_up_alone(unit_bytes, reporter))
    }

    fn give_up_alone(&self, unit_bytes: u64, reporter: &mut LossReporter<'_>) -> Result<()> {
        let names = self.votes().names()?;
        if names.contains(DONE_ALL) {
            return Ok(());
        }
        let stored = own::load(self.base, self.votes().dir(), SEAL_NAME)?;
        let old = stored.as_deref().and_then(Seal::decode);
        let is_damaged = stored.is_some() && old.is_none();
        let salvaged = self.container.salvage_indexes(self.base, old.as_ref())?;
        let mut seal = old.clone().unwrap_or_else(|| {
            let ends = salvaged
                .iter()
                .map(|(writer, index)| (writer.index_name(), index.end));
            Seal::new(ends.collect(), unit_bytes)
        });
        for (writer, index) in &salvaged {
            if !index.lost.is_empty() {
                let parts = seal.lost.indexes.entry(writer.index_name()).or_default();
                parts.clone_from(&index.lost);
            }
        }
        // From here on only this seal's reader reads the container.
        self.container.apply_seal(self.base, seal.clone())?;
        if old.is_none() {
            seal.len = self.container.len();
        }
        // What is in the plain file already is not lost, unless it is not known what counted when it was written.
        let is_flat = |unit: u64| !is_damaged && names.contains(&done_name(unit));
        // Where a sorted index is found to be damaged, the bytes are those that the index itself gives.
        loop {
            let rejected = self.container.rejected_table_count();
            let visited = self.visit_lost_bytes(&mut seal, &is_flat, &mut |_| Ok(()));
            if self.container.rejected_table_count() == rejected {
                visited?;
                break;
            }
        }
        if is_damaged {
            reporter.tell(LostPart::Seal)?;
        }
        for (writer, index) in &salvaged {
            self.tell_changes(writer, &index.lost, reporter)?;
        }
        self.visit_lost_bytes(&mut seal, &is_flat, &mut |part| {
            reporter.tell(LostPart::Bytes {
                range: part.file,
                host: part.host,
                log: part.log,
            })
        })?;
        if old.is_some_and(|old| old == seal) || (stored.is_none() && seal.lost.is_empty()) {
            return Ok(());
        }
        reporter.report.sync()?;
        if is_damaged {
            // With the old seal the file may have been divided into other parts.
            let done = names.iter().filter(|name| is_done_part(name));
            self.votes().remove_files(done.map(String::as_str))?;
        }
        own::store(self.base, self.votes().dir(), SEAL_NAME, &seal.encode()?)?;
        self.container.apply_seal(self.base, seal)
    }

    /// Tells parts of an index that are lost, but what sorted indexes have of it.
    fn tell_changes(
        &self,
        writer: &Writer,
        lost: &[Range<u64>],
        reporter: &mut LossReporter<'_>,
    ) -> Result<()> {
        let covered = self.container.covered(writer);
        for range in lost.iter().filter(|range| range.end > covered) {
            reporter.tell(LostPart::Changes {
                host: writer.host().to_owned(),
                index: writer.index_name(),
                range: range.clone(),
            })?;
        }
        Ok(())
    }

    /// Goes through the bytes of the file that are in logs and cannot be read, but those in units that are flat.
    fn visit_lost_bytes(
        &self,
        seal: &mut Seal,
        is_flat: &dyn Fn(u64) -> bool,
        visit: &mut dyn FnMut(Unreadable) -> Result<()>,
    ) -> Result<()> {
        let mut walk = Walk::new(0..seal.len);
        loop {
            let segments = self.container.find_next(self.base, &mut walk)?;
            if segments.is_empty() {
                return Ok(());
            }
            let parts = segments.into_iter().flat_map(|segment| seal.split(segment));
            let parts: Vec<_> = parts.filter(|(unit, _)| !is_flat(*unit)).collect();
            for (_, segment) in parts {
                let lost = &mut seal.lost;
                let found = self.container.find_unreadable(self.base, &segment, lost)?;
                for part in found {
                    let blocks = lost.logs.entry(part.log.clone()).or_default();
                    blocks.insert(part.block);
                    visit(part)?;
                }
            }
        }
    }
}

impl<B: Backing> Container<B> {
    /// What can be read of each index, durably; `seal` says what counts, if it is known.
    fn salvage_indexes(&self, base: &B, seal: Option<&Seal>) -> Result<BTreeMap<Writer, Salvaged>> {
        let names = own::list(base, &self.dir)?;
        let listed = names.iter().filter_map(|(name, ..)| Writer::of_index(name));
        let counting = seal.map_or_else(Vec::new, Seal::writers);
        let mut salvaged = BTreeMap::new();
        for writer in listed.chain(counting) {
            let limit = seal.map(|seal| seal.limit_of(&writer));
            let index = match own::find_file(base, &self.dir, &writer.index_name())? {
                Some(inode) => {
                    let index = base.open(&inode, Access::Read)?;
                    base.sync(&index, true)?;
                    salvage_index(base, &index, writer.id(), limit)?
                }
                None => Salvaged {
                    end: limit.unwrap_or(0),
                    lost: limit.map(|limit| 0..limit).into_iter().collect(),
                },
            };
            salvaged.insert(writer, index);
        }
        Ok(salvaged)
    }
}

/// Goes through an index up to `limit`; if that is not known, up to the last part that was synced.
fn salvage_index<B: Backing>(
    base: &B,
    index: &B::File,
    writer: WriterId,
    limit: Option<u64>,
) -> Result<Salvaged> {
    let mut salvaged = Salvaged {
        end: 0,
        lost: Vec::new(),
    };
    let end_max = limit.unwrap_or(u64::MAX);
    while salvaged.end < end_max {
        let from = salvaged.end;
        salvaged.end = read_index(base, index, writer, from..end_max)?.to;
        if salvaged.end > from {
            continue;
        }
        let may_go_on = limit.is_some() || has_synced_frame_after(base, index, from)?;
        let next = if may_go_on {
            find_frame(base, index, from + 1, &|_| true)?
        } else {
            None
        };
        let Some(next) = next.or(limit) else {
            break;
        };
        salvaged.end = next.min(end_max);
        salvaged.lost.push(from..salvaged.end);
    }
    Ok(salvaged)
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

/// Whether an error may be one of damaged logs.
pub(crate) fn may_be_damage(error: Errno) -> bool {
    error == Errno::IO
}
