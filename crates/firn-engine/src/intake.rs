//! What comes in: bytes that were published, by the engine or by a client with direct access, become pending.
//!
//! Promises
//! * An answer about a file covers every byte whose write returned: what a client published is ingested before an
//!   answer ([`Intake::ingest_published`]).
//! * An open, read, write or cut of a file that a client has the grant of revokes the grant first
//!   ([`Intake::revoke_grant`]).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use firn_arena::{AcceptedBytes, ClientLease};
use firn_backing::Backing;

use crate::Result;
use crate::base::Base;
use crate::drain::Drain;
use crate::extents::Extent;
use crate::file::{File, FileState, Grant};
use crate::grants::Grants;
use crate::options::DrainPolicy;
use crate::tree::NameTree;

/// Takes published bytes into the files that they are of.
pub(crate) struct Intake<B: Backing> {
    pub(crate) base: Arc<Base<B>>,
    pub(crate) tree: Arc<NameTree<B>>,
    pub(crate) drain: Arc<Drain<B>>,
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

    /// To be called when this host may have learnt of changes by others: what readers were told of the backing before
    /// does not hold any more.
    pub(crate) fn end_lists_before_changes(&self, file: &File<B>, object: &B::Inode) {
        if !self.grants.has_lists() {
            return;
        }
        let changes = self.base.backing.facts(object).changes_by_others;
        let mut state = file.lock();
        if state.direct.is_listed_before(changes) {
            state.direct.invalidate_list(&self.base.arena);
        }
    }

    pub(crate) fn files_with_grant(&self) -> Vec<Arc<File<B>>> {
        self.grants.files()
    }

    /// Takes in what clients published, of all files.
    pub(crate) fn ingest_all_published(&self) {
        for file in self.files_with_grant() {
            self.ingest_published(&file, &mut file.lock());
        }
    }

    /// Takes in what a client published of this file.
    pub(crate) fn ingest_published(&self, file: &Arc<File<B>>, state: &mut FileState<B>) {
        self.ingest_from_client(file, state, |arena, lease, sink| {
            arena.take_client(lease, sink)
        });
    }

    /// Takes in what a client published, and lets none of it grow: the drain may have it.
    pub(crate) fn freeze_published(&self, file: &Arc<File<B>>, state: &mut FileState<B>) {
        self.ingest_from_client(file, state, |arena, lease, sink| {
            arena.freeze_client(lease, sink)
        });
    }

    fn ingest_from_client(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
        take: impl Fn(
            &firn_arena::Arena,
            &mut ClientLease,
            &mut dyn FnMut(AcceptedBytes),
        ) -> std::result::Result<(), firn_arena::InvalidRecord>,
    ) {
        // A client that fills a later lease is done with the first, whose last bytes come before.
        let next = |grant: &Grant| {
            let mut later = grant.leases.iter().skip(1);
            later.any(|lease| self.base.arena.client_has_begun(lease))
        };
        while state.direct.grant().is_some_and(next) {
            self.end_first_lease(file, state);
        }
        let Some(mut grant) = state.direct.take_grant() else {
            return;
        };
        let mut taken = Vec::new();
        let lease = grant.leases.first_mut();
        let pid = lease.as_ref().map_or(0, |lease| lease.pid());
        let wrong = lease
            .and_then(|lease| take(&self.base.arena, lease, &mut |bytes| taken.push(bytes)).err());
        grant.bytes += self.enter(file, state, pid, &taken);
        state.direct.put_back(grant);
        if let Some(wrong) = wrong {
            tracing::warn!(%wrong, "it writes through the kernel from now on");
            self.grants.count_error();
            self.revoke_grant(file, state);
        }
    }

    fn enter(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
        pid: u32,
        taken: &[AcceptedBytes],
    ) -> u64 {
        let mut bytes = 0;
        for &AcceptedBytes {
            piece,
            offset,
            position,
            len,
            sequence,
            modified,
        } in taken
        {
            if let Some(observe) = self.grants.observer() {
                observe(&*file.inode, pid, offset..offset + u64::from(len));
            }
            if !state.pending.touch_at(modified) {
                self.base
                    .arena
                    .set_modified(piece, state.pending.recorded_ns());
            }
            self.ingest(
                file,
                state,
                offset,
                Extent {
                    len: len.into(),
                    piece,
                    position,
                    sequence,
                },
            );
            bytes += u64::from(len);
            self.base.counters.count_ingest(len.into());
        }
        if bytes > 0 {
            file.inode
                .is_size_stale_in_kernel
                .store(true, Ordering::Release);
            // Only what the engine itself published may be extended by it.
            state.pending.end_tail();
        }
        bytes
    }

    /// Ends the grant to a file, if there is one: all that the client published is taken in, and it can
    /// publish nothing more.
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

    /// Ends the older lease of a grant.
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
        let mut taken = Vec::new();
        let result = self
            .base
            .arena
            .revoke_client(&mut lease, &mut |bytes| taken.push(bytes));
        let bytes = self.enter(file, state, lease.pid(), &taken);
        if let Some(grant) = state.direct.grant_mut() {
            grant.bytes += bytes;
        }
        self.base.arena.end_client(lease);
        if let Err(wrong) = result {
            tracing::warn!(%wrong, "what follows it is not taken");
            self.grants.count_error();
        }
    }

    /// As [`Intake::revoke_grant`], for callers without the lock.
    pub(crate) fn end_grant(&self, file: &Arc<File<B>>) {
        if !self.grants.is_empty() {
            self.revoke_grant(file, &mut file.lock());
        }
    }

    /// Ends all grants: their slabs are wanted.
    pub(crate) fn revoke_all_grants(&self) {
        for file in self.files_with_grant() {
            self.revoke_grant(&file, &mut file.lock());
        }
    }

    /// For an opener of a file whose bytes came by direct access: how long it is.
    pub(crate) fn size_for_kernel(&self, file: &File<B>) -> Option<u64> {
        if !file.inode.is_size_stale_in_kernel.load(Ordering::Acquire) {
            return None;
        }
        let end = file.lock().pending.end();
        Some(self.tree.size_beside(&file.inode, end).unwrap_or(end))
    }

    /// Length of a file with pending data counted in.
    pub(crate) fn size_of(&self, file: &Arc<File<B>>) -> Result<u64> {
        let pending_end = {
            let mut state = file.lock();
            self.ingest_published(file, &mut state);
            state.pending.end()
        };
        self.tree.size_beside(&file.inode, pending_end)
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
        let cancelled = state.insert(&self.base.arena, offset, extent);
        self.base
            .counters
            .cancelled_bytes
            .fetch_add(cancelled, Ordering::Relaxed);
        self.drain.count_held(file, before, state.pending.bytes());
        file.inode.synced.clear();
        if before == 0 {
            let now = Instant::now();
            self.drain.set_oldest(file, state, Some(now));
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
