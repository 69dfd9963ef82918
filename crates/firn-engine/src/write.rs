//! Writes: into a leased slab, published, drained later.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use firn_arena::Lease;
use firn_backing::lock::MutexGuard;
use firn_backing::{Backing, Errno, Resize};
use firn_format::geometry::{SLAB_MEDIUM, SLAB_SMALL};
use firn_format::slab::Class;

use crate::engine::Engine;
use crate::extents::Extent;
use crate::file::{File, FileId, FileState};
use crate::options::DrainPolicy;
use crate::tables::Handle;
use crate::{HandleId, Principal, Result, Written};

/// Ends of files beyond this ask the backing at once whether it can hold such a file, so that EFBIG
/// comes from write(2) and not from a drain that can never succeed. Below it every file system that
/// Firn is used with agrees.
const SIZE_ASKED_ABOVE: u64 = 1 << 40;

/// How far a write came before anything was appended.
enum Begun {
    /// So many bytes are written already.
    Done(usize),
    /// All of it is to be appended, for this file id as long as it holds.
    Append(Option<FileId>),
}

/// The lease of a handle.
type Slot<'a> = MutexGuard<'a, Option<Lease>>;

impl<B: Backing> Engine<B> {
    /// Takes bytes from a program. When this returns, they survive the death of every process.
    /// `by`: whose write(2) it is, which takes privileges of the file away; none: a store to a mapping, which does not.
    pub fn write(
        &self,
        handle: HandleId,
        offset: u64,
        data: &[u8],
        by: Option<&dyn Principal>,
    ) -> Result<Written> {
        let handle = self.handle(handle)?;
        let file = &handle.file;
        if !handle.writable {
            return Err(Errno::BADF);
        }
        let end = offset
            .checked_add(data.len() as u64)
            .filter(|&end| end <= i64::MAX as u64);
        end.ok_or(Errno::FBIG)?;
        if data.is_empty() {
            return Ok(Written::Bytes(0));
        }
        self.end_grant(file);
        let file_id = match self.begin_write(file, offset, data, by)? {
            Begun::Done(n) => {
                self.counters.count_ingest(n as u64);
                return Ok(Written::Bytes(n));
            }
            Begun::Append(file_id) => file_id,
        };
        let mut done = 0;
        let mut slot = handle.lease.lock();
        while done < data.len() {
            let rest = &data[done..];
            let n = self.append(&handle, &mut slot, file_id, offset + done as u64, rest);
            if n == 0 {
                break;
            }
            done += n;
        }
        drop(slot);
        self.wake_writers();
        if done == 0 {
            return Ok(Written::Full);
        }
        self.counters.count_ingest(done as u64);
        Ok(Written::Bytes(done))
    }

    /// What comes before the bytes are appended: the error of a drain, the loss of privileges, a write that needs no
    /// room. The usual append, to a file without privileges that has a file id, takes the file's lock once here.
    fn begin_write(
        &self,
        file: &Arc<File<B>>,
        offset: u64,
        data: &[u8],
        by: Option<&dyn Principal>,
    ) -> Result<Begun> {
        let end = offset + data.len() as u64;
        {
            let mut state = file.lock();
            if let Some(errno) = state.drain.take_unreported_failure() {
                return Err(errno);
            }
            let is_plain = by.is_none() || state.plain_in == self.privileges.epoch();
            let file_id = state.pending.file_id();
            if is_plain && file_id.is_some() && end <= SIZE_ASKED_ABOVE {
                return Ok(self.overwrite_or_append(file, &mut state, offset, data));
            }
        }
        if let Some(by) = by {
            self.drop_privileges_of(file, by)?;
        }
        if end > SIZE_ASKED_ABOVE {
            self.ask_size(file, end)?;
        }
        let is_nameless = self.is_nameless(file)?;
        // The backing was asked, which may have hung: bytes of a process that was killed meanwhile must not come after
        // those that another one wrote since.
        if by.is_some_and(Principal::has_left) {
            return Err(Errno::INTR);
        }
        if is_nameless {
            return self.write_through(file, offset, data).map(Begun::Done);
        }
        Ok(self.overwrite_or_append(file, &mut file.lock(), offset, data))
    }

    fn overwrite_or_append(
        &self,
        file: &File<B>,
        state: &mut FileState<B>,
        offset: u64,
        data: &[u8],
    ) -> Begun {
        if self.overwrite(file, state, offset, data) {
            Begun::Done(data.len())
        } else {
            Begun::Append(state.pending.file_id())
        }
    }

    /// Whether a write up to `end` has to ask the backing or wait for somebody before its bytes are taken. What
    /// [`Engine::write`] waits for otherwise is short.
    pub fn write_may_wait(&self, handle: HandleId, end: u64, by: Option<&dyn Principal>) -> bool {
        if end > SIZE_ASKED_ABOVE {
            return true;
        }
        let Ok(handle) = self.handle(handle) else {
            return false;
        };
        let (is_bound, is_plain) = {
            let state = handle.file.lock();
            (
                state.pending.file_id().is_some() || state.unlinked,
                state.plain_in == self.privileges.epoch(),
            )
        };
        if by.is_some() && !is_plain {
            return true;
        }
        !is_bound && (self.paths.has_changes() || !handle.file.inode.has_names())
    }

    /// Whether such a write changes the backing before its bytes are taken: the file loses privileges, is made longer
    /// there, or takes the bytes only there. Asks the backing; only of a write of which
    /// [`Engine::write_may_wait`] says so can it be.
    pub fn write_changes_backing(
        &self,
        handle: HandleId,
        end: u64,
        by: Option<&dyn Principal>,
    ) -> Result<bool> {
        let handle = self.handle(handle)?;
        let file = &handle.file;
        let is_plain = file.lock().plain_in == self.privileges.epoch();
        if let Some(by) = by.filter(|_| !is_plain)
            && self.would_strip(file, by)?
        {
            return Ok(true);
        }
        let is_made_longer = end > SIZE_ASKED_ABOVE && end > self.size_of(file)?;
        Ok(is_made_longer || self.is_nameless(file)?)
    }

    /// Whether recovery could not find the file again: it has names, and none that is known here.
    pub(crate) fn is_nameless(&self, file: &File<B>) -> Result<bool> {
        let unbound = {
            let state = file.lock();
            state.pending.file_id().is_none() && !state.unlinked
        };
        Ok(unbound
            && file.inode.paths().is_empty()
            && self.backing.attr(&self.object(&file.inode)?)?.nlink > 0)
    }

    fn write_through(&self, file: &Arc<File<B>>, offset: u64, data: &[u8]) -> Result<usize> {
        self.drain_and_wait(file)?;
        self.with_exclusive_file(file, |target| {
            self.backing
                .write_at(target, &[std::io::IoSlice::new(data)], offset)
        })
    }

    /// Overwrites pending bytes where they lie, if one extent holds all of them and nobody else reads it there.
    /// Bytes that are rewritten again and again then take no new room.
    fn overwrite(
        &self,
        file: &File<B>,
        state: &mut FileState<B>,
        offset: u64,
        data: &[u8],
    ) -> bool {
        let range = offset..offset + data.len() as u64;
        if state.drain.is_exclusive()
            || state.direct.has_grant()
            || state.direct.has_chunk_lists()
            || state.drain.is_in_flight(&range)
        {
            return false;
        }
        let Some(extent) = state.pending.extents().covering(range) else {
            return false;
        };
        state.note_change(&self.arena);
        let changed = self
            .arena
            .overwrite_bytes(extent.piece.slab, extent.position, data);
        if changed {
            state.pending.touch();
            self.arena
                .set_modified(extent.piece, state.pending.recorded_ns());
            file.inode.durable.store(false, Ordering::Relaxed);
        }
        changed
    }

    /// Appends a first part of `data` to the handle's slab; returns its length, 0 where there is no room. `known_id`: of
    /// the file, a moment ago.
    fn append(
        &self,
        handle: &Handle<B>,
        slot: &mut Slot<'_>,
        mut known_id: Option<FileId>,
        offset: u64,
        data: &[u8],
    ) -> usize {
        let file = &handle.file;
        loop {
            let Some(lease) = slot.as_mut() else {
                match self.lease_for(handle, slot, data.len() as u64) {
                    Some(lease) if slot.is_none() => **slot = Some(lease),
                    // Another write through the handle got one while the slot was not locked.
                    Some(lease) => self.arena.seal_slab(lease),
                    None if slot.is_none() => return 0,
                    None => {}
                }
                continue;
            };
            let file_id = known_id
                .take()
                .or_else(|| file.lock().pending.file_id())
                .or_else(|| self.journal.begin_file_id_at_rest(&self.paths, file));
            let Some(file_id) = file_id else {
                slot.unlocked(|| self.reclaim());
                return 0;
            };
            let Some(reserved) = lease.reserve(file_id.get(), offset, data.len() as u64) else {
                let full = slot.take().expect("just used");
                self.arena.seal_slab(full);
                continue;
            };
            self.arena.fill_slab(
                lease.slab(),
                reserved.position,
                &data[..reserved.len as usize],
            );
            let mut state = file.lock();
            self.revoke_grant(file, &mut state);
            if state.pending.file_id() != Some(file_id) {
                // Everything was drained meanwhile and the file id ended: the reserved room is used for the next one.
                continue;
            }
            let extends = lease.continues(file_id.get(), offset, reserved)
                && lease.last().is_some()
                && lease.last().is_some_and(|last| state.pending.is_tail(last));
            state.pending.touch();
            // An extended piece keeps its sequence: no write came between, or it would not be the tail.
            let (piece, sequence) = if extends {
                self.arena
                    .extend_piece(lease, reserved.len, state.pending.recorded_ns())
            } else {
                let sequence = self.arena.next_sequence();
                (
                    self.arena.publish_piece(
                        lease,
                        reserved,
                        (file_id.get(), offset),
                        sequence,
                        state.pending.recorded_ns(),
                    ),
                    sequence,
                )
            };
            self.ingest(
                file,
                &mut state,
                offset,
                Extent {
                    len: u64::from(reserved.len),
                    piece,
                    position: reserved.position,
                    sequence,
                },
            );
            handle
                .written
                .fetch_add(u64::from(reserved.len), Ordering::Relaxed);
            return reserved.len as usize;
        }
    }

    /// Enters bytes that were just published; the file was touched.
    pub(crate) fn ingest(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
        offset: u64,
        extent: Extent,
    ) {
        let before = state.pending.bytes();
        let cancelled = state.insert(&self.arena, offset, extent);
        self.counters
            .cancelled_bytes
            .fetch_add(cancelled, Ordering::Relaxed);
        self.drain.count_held(file, before, state.pending.bytes());
        file.inode.durable.store(false, Ordering::Relaxed);
        if before == 0 {
            let now = Instant::now();
            self.drain.set_oldest(file, state, Some(now));
            if self.options.drain == DrainPolicy::Eager {
                self.drain
                    .check_age_at(file, state, now + self.options.drain_age);
            }
        }
        let is_worth_a_write = state
            .drain
            .add_fresh_bytes(extent.len, self.write_bytes_min());
        if is_worth_a_write && self.options.drain == DrainPolicy::Eager {
            self.drain.enqueue(file, state);
        }
    }

    /// A slab for the next bytes of a handle: small ones first, so that many small files fit, whole
    /// chunks for those that prove large.
    ///
    /// The slot is not locked while files are dropped to make room: with the last of what is known of one, its
    /// descriptor is closed, for which a server may be asked.
    fn lease_for(&self, handle: &Handle<B>, slot: &mut Slot<'_>, len: u64) -> Option<Lease> {
        let expected = handle.written.load(Ordering::Relaxed) + len;
        let class = self.class_for(expected);
        if class == Class::Small {
            let parked = self.space.parked.take_near(&self.arena);
            if parked.is_some() {
                return parked;
            }
        }
        let lease = self.arena.lease_slab(class).or_else(|| {
            slot.unlocked(|| self.evict_for(class));
            self.arena.lease_slab(class)
        });
        if lease.is_none() {
            slot.unlocked(|| self.reclaim());
        }
        lease
    }

    /// The class of slab for a writer that has `expected` bytes in all: small ones first, so that many small files fit,
    /// whole chunks for those that prove large, but no more than its share: writers that wait for whole chunks of others
    /// would stand still while these have room.
    pub(crate) fn class_for(&self, expected: u64) -> Class {
        let share = self.arena.share_bytes();
        if expected >= 2 * SLAB_MEDIUM && self.arena.geometry().chunk_bytes <= share {
            Class::Whole
        } else if expected > SLAB_SMALL {
            Class::Medium
        } else {
            Class::Small
        }
    }

    /// Bytes of a file that are worth a write to the backing unasked: no more than the share of a writer, or the arena
    /// would be full of what is not.
    pub(crate) fn write_bytes_min(&self) -> u64 {
        let share = self.arena.share_bytes().max(SLAB_MEDIUM);
        self.options.drain_write_bytes_min.min(share)
    }

    fn ask_size(&self, file: &Arc<File<B>>, end: u64) -> Result<()> {
        let known = self.size_of(file)?;
        if end > known {
            self.with_exclusive_file(file, |target| {
                self.backing
                    .resize(target, Resize::AtLeast(end))
                    .map(|_| ())
            })
        } else {
            Ok(())
        }
    }
}
