//! Writes of files: copies the bytes of a write to the *arena* (shared memory). A *drain* writes them later to the
//! *backing*, the directory that the mount serves.
//!
//! A write has two steps:
//! 1. [`Writes::begin_write`] does the work that may need the backing, such as the removal of set-id bits.
//! 2. `append` copies the bytes to a *slab*, a part of the arena, and then *publishes* a record of them, the
//!    *piece*. One store publishes the piece, so after a crash it counts completely or not at all.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_arena::{Lease, NewPiece};
use firn_backing::{Backing, Errno, Resize};
use firn_format::append::Room as Reserved;

use crate::base::Base;
use crate::drainer::Drainer;
use crate::exclusive::Exclusive;
use crate::extents::Extent;
use crate::file::{File, FileId, FileState};
use crate::intake::Intake;
use crate::open_files::OpenFiles;
use crate::privilege_rules::PrivilegeRules;
use crate::privileges::Privileges;
use crate::space::{LeaseSlot, Room};
use crate::tables::Handle;
use crate::tree::NameTree;
use crate::{HandleId, Principal, Result};

/// File length above which a write first checks whether the backing supports such a length. EFBIG then comes from
/// write(2), and not from a drain that can never succeed. Every supported file system allows shorter files.
const SIZE_CHECKED_ABOVE: u64 = 1 << 40;

/// Result of the steps before the append.
pub(crate) enum WriteStart {
    /// This number of bytes is written, and nothing is left to append.
    Done(usize),
    /// All bytes must be appended, under this file id (the file's number in the arena) if it is still valid at the
    /// append.
    Append(Option<FileId>),
}

/// Accepts bytes of programs.
pub struct Writes<B: Backing> {
    /// Data that all parts share: the backing, the arena, options and counters.
    pub(crate) base: Arc<Base<B>>,
    /// Inodes and their names.
    pub(crate) tree: Arc<NameTree<B>>,
    /// Knows whether files may have set-id bits or capabilities.
    pub(crate) privileges: Arc<Privileges>,
    /// Accepts bytes that client processes write to the arena (shared memory) themselves.
    pub(crate) intake: Arc<Intake<B>>,
    /// Open files and handles.
    pub(crate) open_files: Arc<OpenFiles<B>>,
    /// Makes space in the arena.
    pub(crate) room: Arc<Room<B>>,
    /// Writes pending bytes to the backing.
    pub(crate) drainer: Arc<Drainer<B>>,
    /// Changes files while no drain writes to them.
    pub(crate) exclusive: Arc<Exclusive<B>>,
    /// Removes set-id bits and capabilities before changes.
    pub(crate) privilege_rules: Arc<PrivilegeRules<B>>,
}

impl<B: Backing> Writes<B> {
    pub(crate) fn new(privilege_rules: &Arc<PrivilegeRules<B>>) -> Self {
        Self {
            base: Arc::clone(&privilege_rules.base),
            tree: Arc::clone(&privilege_rules.tree),
            privileges: Arc::clone(&privilege_rules.privileges),
            intake: Arc::clone(&privilege_rules.intake),
            open_files: Arc::clone(&privilege_rules.open_files),
            room: Arc::clone(&privilege_rules.drainer.room),
            drainer: Arc::clone(&privilege_rules.drainer),
            exclusive: Arc::clone(&privilege_rules.exclusive),
            privilege_rules: Arc::clone(privilege_rules),
        }
    }

    /// Does the steps of a write before the append: removes set-id bits and capabilities of the file, and overwrites
    /// bytes in place or writes to the backing if that is possible. Returns whether the bytes must still be appended.
    ///
    /// Fails with the error of an earlier drain if no program has got that error yet. Fails with EINTR, without a
    /// write, if the process was killed during a call of the backing.
    pub(crate) fn begin_write(
        &self,
        file: &Arc<File<B>>,
        offset: u64,
        data: &[u8],
        principal: Option<&dyn Principal>,
    ) -> Result<WriteStart> {
        if let Some(start) = self.try_begin_without_backing(file, offset, data, principal)? {
            return Ok(start);
        }
        let end = offset + data.len() as u64;
        if let Some(principal) = principal {
            self.privilege_rules.drop_privileges_of(file, principal)?;
        }
        // The backing may not support so long a file. Then this write fails, and not a later drain of its bytes.
        if end > SIZE_CHECKED_ABOVE {
            self.ensure_size_in_backing(file, end)?;
        }
        let has_no_known_name = self.tree.has_no_known_name(file)?;
        // The calls of the backing may have taken long. If the process was killed meanwhile, its bytes must not
        // overwrite bytes that another process has written since.
        if principal.is_some_and(Principal::has_left) {
            return Err(Errno::INTR);
        }
        // Recovery could not find this file again, so its bytes go to the backing at once.
        if has_no_known_name {
            return self
                .write_to_backing(file, offset, data)
                .map(WriteStart::Done);
        }
        Ok(self.overwrite_or_append(file, &mut file.lock(), offset, data))
    }

    /// Begins a write in the usual case, in which the file's lock is taken only once: the file has a file id (its
    /// number in the arena), and no privileges that this write must remove. Returns `None` in any other case.
    ///
    /// Fails with the error of an earlier drain if no program has got that error yet.
    fn try_begin_without_backing(
        &self,
        file: &Arc<File<B>>,
        offset: u64,
        data: &[u8],
        principal: Option<&dyn Principal>,
    ) -> Result<Option<WriteStart>> {
        let end = offset + data.len() as u64;
        let mut state = file.lock();
        if let Some(errno) = state.drain.take_unreported_failure() {
            return Err(errno);
        }
        let needs_no_privilege_check =
            principal.is_none() || state.unprivileged_epoch == self.privileges.epoch();
        let has_file_id = state.pending.file_id().is_some();
        if !needs_no_privilege_check || !has_file_id || end > SIZE_CHECKED_ABOVE {
            return Ok(None);
        }
        Ok(Some(
            self.overwrite_or_append(file, &mut state, offset, data),
        ))
    }

    /// Overwrites pending bytes in place if that is possible. Otherwise all bytes must be appended.
    fn overwrite_or_append(
        &self,
        file: &File<B>,
        state: &mut FileState<B>,
        offset: u64,
        data: &[u8],
    ) -> WriteStart {
        if self.try_overwrite_in_place(file, state, offset, data) {
            WriteStart::Done(data.len())
        } else {
            WriteStart::Append(state.pending.file_id())
        }
    }

    /// Returns whether a write up to offset `end` may block for long: it calls the backing, or waits for another
    /// thread, before its bytes are accepted.
    pub fn can_write_wait(
        &self,
        handle_id: HandleId,
        end: u64,
        principal: Option<&dyn Principal>,
    ) -> bool {
        // The backing is asked whether it supports so long a file.
        if end > SIZE_CHECKED_ABOVE {
            return true;
        }
        let Ok(handle) = self.open_files.handle(handle_id) else {
            return false;
        };
        let state = handle.file.lock();
        let needs_file_id = state.pending.file_id().is_none() && !state.unlinked;
        // The epoch grows when any file may get privileges. A file was seen without privileges in one epoch, and may
        // have some in each later one.
        let may_have_privileges = state.unprivileged_epoch != self.privileges.epoch();
        drop(state);
        if principal.is_some() && may_have_privileges {
            return true;
        }
        // A file without a file id (its number in the arena) gets one, which is recorded with a path of the file. The
        // write waits while any path changes, and calls the backing if no path is known.
        needs_file_id && (self.tree.claims.has_changes() || !handle.file.inode.has_names())
    }

    /// Returns whether a write up to `end` changes the backing before its bytes are in the arena: it removes
    /// privileges, makes the file longer there, or goes to the backing directly. Calls the backing to find out.
    ///
    /// Called only after [`Writes::can_write_wait`] returned true.
    pub fn write_changes_backing(
        &self,
        handle_id: HandleId,
        end: u64,
        principal: Option<&dyn Principal>,
    ) -> Result<bool> {
        let handle = self.open_files.handle(handle_id)?;
        let file = &handle.file;
        let may_have_privileges = file.lock().unprivileged_epoch != self.privileges.epoch();
        if may_have_privileges
            && let Some(principal) = principal
            && self
                .privilege_rules
                .would_lose_privileges(file, principal)?
        {
            return Ok(true);
        }
        let is_made_longer = end > SIZE_CHECKED_ABOVE && end > self.intake.size_of(file)?;
        Ok(is_made_longer || self.tree.has_no_known_name(file)?)
    }

    /// Writes to the backing itself, after a drain of all pending bytes. Returns the number of bytes written.
    fn write_to_backing(&self, file: &Arc<File<B>>, offset: u64, data: &[u8]) -> Result<usize> {
        self.drainer.drain_and_wait(file)?;
        self.exclusive.with_exclusive_file(file, |target| {
            self.base
                .backing
                .write_at(target, &[std::io::IoSlice::new(data)], offset)
        })
    }

    /// Overwrites pending bytes (not in the backing yet) in place in the arena, if they lie in one extent and no reader
    /// or drain uses them. So frequent rewrites of the same bytes need no new space. Returns whether the bytes were
    /// overwritten.
    fn try_overwrite_in_place(
        &self,
        file: &File<B>,
        state: &mut FileState<B>,
        offset: u64,
        data: &[u8],
    ) -> bool {
        let range = offset..offset + data.len() as u64;
        let must_not_change_in_place = state.drain.is_exclusive()
            || state.direct.has_grant()
            || state.direct.has_chunk_lists()
            || state.drain.is_in_flight(&range);
        if must_not_change_in_place {
            return false;
        }
        let Some(extent) = state.pending.extents().covering(range) else {
            return false;
        };
        if state.reserve_view(offset, data.len() as u64).is_err() {
            return false;
        }
        state.record_change(&self.base.arena);
        let was_overwritten =
            self.base
                .arena
                .overwrite_bytes(extent.piece.slab, extent.position, data);
        if was_overwritten {
            state.store_in_view(offset, data);
            state.pending.record_write();
            self.base
                .arena
                .set_modified(extent.piece, state.pending.recorded_ns());
            file.inode.synced.clear();
        }
        was_overwritten
    }

    /// Appends the first part of `data`, as much as fits, to the handle's slab (the part of the arena that it fills).
    /// Returns the length of the part, or 0 if the arena or the journal has no space. Fails with ENOSPC if there is no
    /// memory to store the bytes in the file's view (a memory file that the kernel or a mapping reads) too.
    ///
    /// `known_id`: file id (number of the file in the arena) that the caller has read earlier. It may have ended since.
    /// `lease_slot`: the locked lease of the handle, which is the right to fill the slab. It may be empty.
    pub(crate) fn append(
        &self,
        handle: &Handle<B>,
        lease_slot: &mut LeaseSlot<'_>,
        mut known_id: Option<FileId>,
        offset: u64,
        data: &[u8],
    ) -> Result<usize> {
        loop {
            let attempt = self.try_append(handle, lease_slot, &mut known_id, offset, data)?;
            if let Some(appended_bytes) = attempt {
                return Ok(appended_bytes);
            }
        }
    }

    /// Makes one attempt of [`Self::append`]. Returns `None` if the append must be tried again, after one of three
    /// events: a slab was leased, the slab was full, or the file id has ended. Takes `known_id`, which is tried once.
    fn try_append(
        &self,
        handle: &Handle<B>,
        lease_slot: &mut LeaseSlot<'_>,
        known_id: &mut Option<FileId>,
        offset: u64,
        data: &[u8],
    ) -> Result<Option<usize>> {
        let file = &handle.file;
        let Some(lease) = lease_slot.as_mut() else {
            if !self.lease_into(lease_slot, handle, data.len() as u64) {
                return Ok(Some(0));
            }
            return Ok(None);
        };
        // If the known id has ended, the next attempt reads the file's present id.
        let Some(file_id) = known_id.take().or_else(|| self.file_id_for_write(file)) else {
            lease_slot.unlocked(|| self.room.reclaim());
            return Ok(Some(0));
        };
        let Some(reserved) = lease.reserve(file_id.get(), offset, data.len() as u64) else {
            // The slab is full. The seal ends the lease, and the next attempt leases another slab.
            let full_lease = lease_slot.take().expect("the lease was just used");
            self.base.arena.seal_slab(full_lease);
            return Ok(None);
        };
        let data = &data[..reserved.len as usize];
        self.base
            .arena
            .fill_slab(lease.slab(), reserved.position, data);
        let mut state = file.lock();
        // A client process must not write the file directly during this write.
        self.intake.revoke_grant(file, &mut state);
        if state.pending.file_id() != Some(file_id) {
            // The last pending bytes were drained meanwhile, so the file id ended. The next attempt reserves space
            // under a new file id.
            return Ok(None);
        }
        if let Err(error) = state.reserve_view(offset, u64::from(reserved.len)) {
            tracing::warn!(%error, path = %file.shown(), "a write fails: there is no memory for it in the copy of \
                the file that programs read directly");
            // Room in the arena would not help, so the writer must not wait for it.
            return Err(Errno::NOSPC);
        }
        let extent = self.publish(&mut state, lease, file_id, offset, reserved);
        self.intake.ingest(file, &mut state, offset, extent);
        state.store_in_view(offset, data);
        handle
            .written_bytes
            .fetch_add(u64::from(reserved.len), Ordering::Relaxed);
        Ok(Some(data.len()))
    }

    /// Leases a slab for `len` bytes to a handle without a lease. Returns false if the arena has no room. Otherwise
    /// `lease_slot` has a lease afterwards.
    fn lease_into(&self, lease_slot: &mut LeaseSlot<'_>, handle: &Handle<B>, len: u64) -> bool {
        let new_lease = self.room.lease_for(handle, lease_slot, len);
        if lease_slot.is_none() {
            **lease_slot = new_lease;
            return lease_slot.is_some();
        }
        // Another write through the handle has got a lease while the lock was released.
        if let Some(unneeded_lease) = new_lease {
            self.base.arena.seal_slab(unneeded_lease);
        }
        true
    }

    /// Returns the file id of a file, and allocates one if the file has none. Returns `None` if the journal is full.
    fn file_id_for_write(&self, file: &Arc<File<B>>) -> Option<FileId> {
        let known_id = file.lock().pending.file_id();
        known_id.or_else(|| {
            self.base
                .journal
                .allocate_file_id_excluding_renames(&self.tree.claims, file)
        })
    }

    /// Publishes bytes that were copied to the slab (a part of the arena), as a new piece (a recorded append) or as an
    /// extension of the file's last piece. From now on they survive the death of every process. Returns their extent:
    /// length, piece and position.
    fn publish(
        &self,
        state: &mut FileState<B>,
        lease: &mut Lease,
        file_id: FileId,
        offset: u64,
        reserved: Reserved,
    ) -> Extent {
        let arena = &self.base.arena;
        let is_last_of_file = |piece_of_lease| state.pending.is_tail(piece_of_lease);
        let extends_last_piece = lease.continues(file_id.get(), offset, reserved)
            && lease.last().is_some_and(is_last_of_file);
        state.pending.record_write();
        let modified = state.pending.recorded_ns();
        // An extended piece keeps its sequence: it is the file's last piece, so no other write came in between.
        let (piece, sequence) = if extends_last_piece {
            arena.extend_piece(lease, reserved.len, modified)
        } else {
            let sequence = arena.next_sequence();
            let new_piece = NewPiece {
                file_id: file_id.get(),
                offset,
                sequence,
                modified,
            };
            let piece = arena.publish_piece(lease, reserved, new_piece);
            (piece, sequence)
        };
        Extent {
            len: u64::from(reserved.len),
            piece,
            position: reserved.position,
            sequence,
        }
    }

    /// Makes the file in the backing `end` bytes long if it is shorter. Fails with EFBIG if the backing does not
    /// support such a length.
    fn ensure_size_in_backing(&self, file: &Arc<File<B>>, end: u64) -> Result<()> {
        if end <= self.intake.size_of(file)? {
            return Ok(());
        }
        self.exclusive.with_exclusive_file(file, |backing_file| {
            self.base
                .backing
                .resize(backing_file, Resize::AtLeast(end))?;
            Ok(())
        })
    }
}
