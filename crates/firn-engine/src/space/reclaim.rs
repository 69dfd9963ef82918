//! Making room in the arena, and telling the writers that wait for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use firn_arena::Lease;
use firn_backing::{Backing, Errno};
use firn_format::slab::Class;

use crate::counters::Decision;
use crate::file::File;
use crate::options::DrainPolicy;
use crate::space::{Room, Slot};
use crate::tables::Handle;
use crate::{Done, Result};

impl<B: Backing> Room<B> {
    /// A slab for the next bytes of a handle: small ones first, so that many small files fit, whole
    /// chunks for those that prove large.
    ///
    /// The slot is not locked while files are dropped to make room: with the last of what is known of one, its
    /// descriptor is closed, for which a server may be asked.
    pub(crate) fn lease_for(
        &self,
        handle: &Handle<B>,
        slot: &mut Slot<'_>,
        len: u64,
    ) -> Option<Lease> {
        let expected = handle.written.load(Ordering::Relaxed) + len;
        let class = self.base.class_for(expected);
        if class == Class::Small {
            let parked = self.space.parked.take_near(&self.base.arena);
            if parked.is_some() {
                return parked;
            }
        }
        let lease = self.base.arena.lease_slab(class).or_else(|| {
            slot.unlocked(|| self.evict_for(class));
            self.base.arena.lease_slab(class)
        });
        if lease.is_none() {
            slot.unlocked(|| self.reclaim());
        }
        lease
    }

    /// Calls `f` once there may be room in the arena (`Ok`: write again) or nothing can drain (`Err`:
    /// fail the write with it). The next
    /// [`Drainer::pick`](crate::Drainer::pick) calls back, not this call.
    pub fn on_space(&self, f: Done) {
        self.space.waiters.add(f);
        self.reclaim();
        // What was freed between the caller's failed write and now was not told to this waiter.
        self.space.note_room(&self.base.arena);
        self.drain.wake_all();
    }

    /// Waits until there may be room in the arena; the error with which a write fails where nothing can drain. To be called
    /// by a thread on which no drain depends, with no lock held.
    pub fn wait_for_room(&self) -> Result<()> {
        let (tell, told) = std::sync::mpsc::channel();
        self.on_space(Box::new(move |result| {
            let _ = tell.send(result);
        }));
        told.recv().unwrap_or(Err(Errno::IO))
    }

    /// Tells waiting writers of room that became free. Called with no lock held.
    pub(crate) fn wake_writers(&self) {
        loop {
            if self.space.waiters.take_freed() {
                for waiter in self.space.waiters.take_all() {
                    waiter(Ok(()));
                }
                return;
            }
            if self.space.waiters.is_empty() {
                return;
            }
            self.reclaim();
            // It may have found room itself, in unused slabs.
            if !self.space.waiters.has_freed() {
                return;
            }
        }
    }

    /// Fails all waiting writers, unless a move to the spill file will make room.
    pub(crate) fn refuse_space(&self, errno: Errno) {
        if self.spill_makes_room() {
            return;
        }
        // In this order: the last move may have ended since the caller found no room.
        if self.space.note_room(&self.base.arena) {
            return self.drain.wake_all();
        }
        let waiters = self.space.waiters.take_all();
        if !waiters.is_empty() {
            self.base.counters.drain_decisions.count(Decision::GivenUp);
            tracing::debug!(%errno, writers = waiters.len(), "drain: given up, there is no room for more writes");
        }
        for waiter in waiters {
            waiter(Err(errno));
        }
    }

    /// Makes room: gives back slabs that hold nothing; if no drain is under way, drains the file that
    /// holds most. Tells waiting writers when nothing can be drained.
    pub(crate) fn reclaim(&self) {
        if self.drain.is_busy() {
            return;
        }
        self.intake.revoke_all_grants();
        if self.base.options.drain == DrainPolicy::Demand {
            return self.reclaim_on_demand();
        }
        let files = self.open_files.files.all();
        let now = Instant::now();
        let mut best: Option<(u64, Arc<File<B>>)> = None;
        let mut errno = None;
        for file in files {
            let state = file.lock();
            if state.pending.is_empty() {
                continue;
            }
            match state.drain.failure() {
                Some(failure) if failure.retry_at > now => errno = Some(failure.errno),
                _ if best
                    .as_ref()
                    .is_none_or(|(most, _)| state.pending.bytes() > *most) =>
                {
                    let pending = state.pending.bytes();
                    drop(state);
                    best = Some((pending, file));
                }
                _ => {}
            }
        }
        self.give_back_leases(best.as_ref().map(|(_, file)| file));
        if let Some((_, file)) = best {
            let mut state = file.lock();
            self.drain.force(&file, &mut state);
        } else if !self.space.waiters.has_freed() && !self.space.note_room(&self.base.arena) {
            // Everything that is held waits for a backing that refuses it.
            self.refuse_space(errno.unwrap_or(Errno::NOSPC));
        }
    }

    /// Seals the leases that hold nothing, and those of `file`.
    fn give_back_leases(&self, file: Option<&Arc<File<B>>>) {
        self.space.parked.seal_all(&self.base.arena);
        self.open_files
            .handles
            .seal_leases(&self.base.arena, |handle, lease| {
                self.base.arena.is_idle(lease)
                    || file.is_some_and(|file| Arc::ptr_eq(file, &handle.file))
            });
    }

    /// Makes room where nothing drains unasked: drained bytes are dropped. What is not drained stays, and waiting
    /// writers are told that the arena is full.
    fn reclaim_on_demand(&self) {
        self.give_back_leases(None);
        self.evict_for(Class::Small);
        if !self.space.waiters.has_freed() && !self.space.note_room(&self.base.arena) {
            self.refuse_space(Errno::NOSPC);
        }
    }
}
