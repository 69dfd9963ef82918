//! Ingesting: makes bytes that were written to the arena (shared memory) part of their file, so that reads return them
//! and a drain writes them to the backing, the directory that the mount serves.
//!
//! Terms
//! * Bytes are *published* by a record in the arena that describes them. After the ingestion they are *pending*, until
//!   they are in the backing.
//! * A *piece* is such a record, with the bytes that it describes.
//! * A *grant* is the right of a client process to write one file directly. The client stores bytes to slabs (parts of
//!   the arena) that are *leased* to it.
//!
//! A client publishes bytes without a request. So the engine reads the client's slabs before it answers a request.
//!
//! Promises
//! * An answer about a file covers every byte whose write has returned: pieces that a client has published are ingested
//!   before an answer ([`Intake::ingest_published`]).
//! * An open, read, write or truncation of a file first revokes the grant that a client may have
//!   ([`Intake::revoke_grant`]).
//! * An invalid record of a client ends its grant, and the bytes of the record are ignored.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use firn_arena::{AcceptedBytes, Arena, ClientLease, InvalidRecord};
use firn_backing::Backing;

use crate::Result;
use crate::base::Base;
use crate::drain::Drain;
use crate::extents::Extent;
use crate::file::{File, FileState, Grant};
use crate::grants::Grants;
use crate::options::DrainPolicy;
use crate::tree::NameTree;

/// Result of reading the records of a client.
type AcceptResult = std::result::Result<(), InvalidRecord>;

/// Ingests published bytes into their files.
pub(crate) struct Intake<B: Backing> {
    /// Data that all parts share: the backing, the arena, options and counters.
    pub(crate) base: Arc<Base<B>>,
    /// Inodes and their names.
    pub(crate) tree: Arc<NameTree<B>>,
    /// Queues of files to drain.
    pub(crate) drain: Arc<Drain<B>>,
    /// Files that client processes may write directly.
    pub(crate) grants: Grants<B>,
}

impl<B: Backing> Intake<B> {
    pub(crate) fn new(tree: &Arc<NameTree<B>>, drain: &Arc<Drain<B>>) -> Self {
        Self {
            base: Arc::clone(&tree.base),
            tree: Arc::clone(tree),
            drain: Arc::clone(drain),
            grants: Grants::default(),
        }
    }

    /// Makes lists of readers invalid if another host has changed the file since they were made. Called when this host
    /// may have learnt of such a change.
    pub(crate) fn end_lists_before_changes(&self, file: &File<B>, object: &B::Inode) {
        if !self.grants.has_lists() {
            return;
        }
        let changes = self.base.backing.facts(object).changes_by_others;
        let mut state = file.lock();
        if state.direct.has_outdated_backing_list(changes) {
            state.direct.invalidate_lists(&self.base.arena);
        }
    }

    /// Returns the files for which a client has a grant.
    pub(crate) fn files_with_grant(&self) -> Vec<Arc<File<B>>> {
        self.grants.files()
    }

    /// Ingests the bytes that clients have published of any file.
    pub(crate) fn ingest_all_published(&self) {
        for file in self.files_with_grant() {
            self.ingest_published(&file, &mut file.lock());
        }
    }

    /// Ingests the bytes that a client has published of this file.
    pub(crate) fn ingest_published(&self, file: &Arc<File<B>>, state: &mut FileState<B>) {
        self.ingest_from_client(file, state, |arena, lease, sink| {
            arena.accept_published(lease, sink)
        });
    }

    /// Ingests the bytes that a client has published of this file, and freezes their pieces: the client cannot extend
    /// them any more, so the drain may write them.
    pub(crate) fn freeze_published(&self, file: &Arc<File<B>>, state: &mut FileState<B>) {
        self.ingest_from_client(file, state, |arena, lease, sink| {
            arena.freeze_client(lease, sink)
        });
    }

    /// Makes bytes *pending* (to be written to the backing) that a client process has stored in the arena without a
    /// request. Does nothing if no client has a grant, the right to write the file in this way. An invalid record
    /// revokes the grant.
    ///
    /// `accept` reads the new records of one lease (the client's right to fill one slab of the arena), and passes each
    /// to its callback.
    fn ingest_from_client(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
        accept: impl Fn(&Arena, &mut ClientLease, &mut dyn FnMut(AcceptedBytes)) -> AcceptResult,
    ) {
        // The client fills its leases one after the other. After this call, only the first one can have new records.
        self.end_complete_leases(file, state);
        // The grant is taken out of the state meanwhile, because `make_pending` changes the state.
        let Some(mut grant) = state.direct.take_grant() else {
            return;
        };
        let mut accepted = Vec::new();
        let mut pid = 0;
        let mut result = Ok(());
        if let Some(lease) = grant.leases.first_mut() {
            pid = lease.pid();
            result = accept(&self.base.arena, lease, &mut |bytes| accepted.push(bytes));
        }
        grant.bytes += self.make_pending(file, state, pid, &accepted);
        state.direct.restore_grant(grant);
        if let Err(error) = result {
            tracing::warn!(wrong = %error, "a program with direct access stored an invalid record; it writes \
                through the kernel from now on");
            self.grants.count_error();
            self.revoke_grant(file, state);
        }
    }

    /// Ends each lease after which the client has begun another one. The client writes nothing more to such a lease,
    /// and its bytes there are older than those of later leases.
    fn end_complete_leases(&self, file: &Arc<File<B>>, state: &mut FileState<B>) {
        let is_first_lease_complete = |grant: &Grant| {
            let mut later_leases = grant.leases.iter().skip(1);
            later_leases.any(|lease| self.base.arena.client_has_begun(lease))
        };
        while state.direct.grant().is_some_and(is_first_lease_complete) {
            self.end_first_lease(file, state);
        }
    }

    /// Makes bytes that a client process stored in the arena *pending*: reads return them, and they are to be written
    /// to the backing. Returns their number. `pid` is the process, and `accepted` are the checked records of the bytes.
    fn make_pending(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
        pid: u32,
        accepted: &[AcceptedBytes],
    ) -> u64 {
        let mut total_bytes = 0;
        for bytes in accepted {
            let len = u64::from(bytes.len);
            // The client made no request, so the observer learns of the write here.
            if let Some(observe) = self.grants.observer() {
                observe(&*file.inode, pid, bytes.offset..bytes.offset + len);
            }
            let keeps_time = state.pending.record_client_write(bytes.modified);
            if !keeps_time {
                // The client's time is impossible or too early, so the record gets the engine's time.
                self.base
                    .arena
                    .set_modified(bytes.piece, state.pending.recorded_ns());
            }
            let extent = Extent {
                len,
                piece: bytes.piece,
                position: bytes.position,
                sequence: bytes.sequence,
            };
            self.ingest(file, state, bytes.offset, extent);
            total_bytes += len;
            self.base.counters.count_ingest(len);
        }
        if total_bytes > 0 {
            // The kernel does not know of the write, so its length of the file may be too small.
            file.inode
                .is_size_stale_in_kernel
                .store(true, Ordering::Release);
            // The engine may extend only pieces that it published itself.
            state.pending.stop_extending_last_piece();
        }
        total_bytes
    }

    /// Ends the grant of a file, if there is one: a client process may not write the file directly any more. All pieces
    /// (recorded appends) that the client has published are ingested, and it can publish no more.
    pub(crate) fn revoke_grant(&self, file: &Arc<File<B>>, state: &mut FileState<B>) {
        if !state.direct.has_grant() {
            return;
        }
        while state
            .direct
            .grant()
            .is_some_and(|grant| !grant.leases.is_empty())
        {
            self.end_first_lease(file, state);
        }
        state.direct.take_grant();
        self.grants.remove(file);
        self.base.journal.end_file_id(state);
    }

    /// Ends the oldest lease of a file: its client may not fill the leased slab (a part of the arena) any more. The
    /// bytes that the client has published there become pending. Does nothing if the file has no lease.
    pub(crate) fn end_first_lease(&self, file: &Arc<File<B>>, state: &mut FileState<B>) {
        let Some(grant) = state
            .direct
            .grant_mut()
            .filter(|grant| !grant.leases.is_empty())
        else {
            return;
        };
        let mut lease = grant.leases.remove(0);
        self.grants.count_lease_end();
        let mut accepted = Vec::new();
        let result = self
            .base
            .arena
            .revoke_client(&mut lease, &mut |bytes| accepted.push(bytes));
        let accepted_bytes = self.make_pending(file, state, lease.pid(), &accepted);
        // The grant is borrowed again, because `make_pending` needs the whole state.
        if let Some(grant) = state.direct.grant_mut() {
            grant.bytes += accepted_bytes;
        }
        self.base.arena.end_client(lease);
        if let Err(error) = result {
            tracing::warn!(wrong = %error, "a program with direct access stored an invalid record; this record \
                and those after it are ignored");
            self.grants.count_error();
        }
    }

    /// Does the work of [`Intake::revoke_grant`] for a caller without the lock.
    pub(crate) fn end_grant(&self, file: &Arc<File<B>>) {
        if !self.grants.is_empty() {
            self.revoke_grant(file, &mut file.lock());
        }
    }

    /// Ends all grants, because writers need their slabs.
    pub(crate) fn revoke_all_grants(&self) {
        for file in self.files_with_grant() {
            self.revoke_grant(&file, &mut file.lock());
        }
    }

    /// Returns the length of a file that was written by direct access, which must be reported to the kernel at an open.
    /// Returns `None` if the kernel has the right length.
    pub(crate) fn size_for_kernel(&self, file: &File<B>) -> Option<u64> {
        if !file.inode.is_size_stale_in_kernel.load(Ordering::Acquire) {
            return None;
        }
        let end = file.lock().pending.end();
        Some(self.tree.size_with_pending(&file.inode, end).unwrap_or(end))
    }

    /// Returns the length of a file, with pending data counted in.
    pub(crate) fn size_of(&self, file: &Arc<File<B>>) -> Result<u64> {
        let pending_end = {
            let mut state = file.lock();
            self.ingest_published(file, &mut state);
            state.pending.end()
        };
        self.tree.size_with_pending(&file.inode, pending_end)
    }

    /// Makes an extent (bytes that were just published in the arena) pending at `offset` of its file. Queues the file
    /// to be drained when it has enough new bytes. The caller must have set the file's time before.
    pub(crate) fn ingest(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
        offset: u64,
        extent: Extent,
    ) {
        let bytes_before = state.pending.bytes();
        let replaced_bytes = state.insert(&self.base.arena, offset, extent);
        self.base
            .counters
            .cancelled_bytes
            .fetch_add(replaced_bytes, Ordering::Relaxed);
        self.drain
            .record_pending_change(file, bytes_before, state.pending.bytes());
        // The file is not durable any more.
        file.inode.synced.clear();
        // The file had no pending bytes, so these are its oldest ones.
        if bytes_before == 0 {
            let now = Instant::now();
            self.drain.set_oldest(file, state, Some(now));
            // With the other drain policy, bytes are drained only on request.
            if self.base.options.drain == DrainPolicy::Eager {
                self.drain
                    .check_age_at(file, state, now + self.base.options.drain_age);
            }
        }
        let is_worth_a_write = state
            .drain
            .add_fresh_bytes(extent.len, self.base.write_bytes_min());
        if is_worth_a_write && self.base.options.drain == DrainPolicy::Eager {
            self.drain.enqueue(file, state);
        }
    }
}
