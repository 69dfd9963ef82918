//! Objects that callers use, and areas that one caller keeps for itself.
//!
//! A call of the backing may take for ever, so no lock is held across it. Instead, a thread that looks up or changes
//! something enters a use ([`Uses::enter`]). A thread that begins, prepares or ends a transaction keeps its scope
//! ([`Uses::keep`]): it waits for the uses that are in the scope, and later uses wait for it. Uses elsewhere go on.
//!
//! Invariants
//! * No two that are kept overlap, and no use that is under way is in one that is kept, once [`Uses::keep`] has returned.
//! * A thread that waits here is in no use and keeps nothing of the same table, so there is no circle of waits.
//! * A directory that is moved or removed ([`Use::moving`]) has nothing below it that is kept.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::sync::Arc;

use firn_backing::lock::{Mutex, MutexGuard, assert_none_held};
use firn_backing::{Backing, Errno};
use parking_lot::Condvar;

use crate::object::Object;
use crate::scope::is_at_names;

/// The uses of one kind: of names, or of data.
pub(crate) struct Uses<B: Backing> {
    state: Mutex<UsesState<B>>,
    /// A use has ended, or something is kept no more.
    changed: Condvar,
}

struct UsesState<B: Backing> {
    last_number: u64,
    under_way: BTreeMap<u64, Busy<B>>,
    kept: BTreeMap<u64, Vec<Area<B>>>,
}

/// What one caller is busy with.
struct Busy<B: Backing> {
    objects: Vec<Arc<Object<B>>>,
    /// Directories that change their place or go.
    moving: Vec<Arc<Object<B>>>,
}

/// What is kept for one caller.
pub(crate) enum Area<B: Backing> {
    /// A directory and all below it.
    Tree(Arc<Object<B>>),
    /// The names in a directory.
    Dir(Arc<Object<B>>),
    /// The names in a directory, and all below some of them.
    Names(Arc<Object<B>>, Arc<BTreeSet<OsString>>),
}

impl<B: Backing> Clone for Area<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Tree(root) => Self::Tree(Arc::clone(root)),
            Self::Dir(dir) => Self::Dir(Arc::clone(dir)),
            Self::Names(dir, names) => Self::Names(Arc::clone(dir), Arc::clone(names)),
        }
    }
}

impl<B: Backing> Area<B> {
    fn root(&self) -> &Arc<Object<B>> {
        match self {
            Self::Tree(root) | Self::Dir(root) | Self::Names(root, _) => root,
        }
    }

    fn contains(&self, object: &Arc<Object<B>>) -> bool {
        match self {
            Self::Tree(root) => object.is_below(root),
            Self::Dir(dir) => Arc::ptr_eq(dir, object),
            Self::Names(dir, names) => {
                Arc::ptr_eq(dir, object) || is_at_names(object, dir, |name| names.contains(name))
            }
        }
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.contains(other.root()) || other.contains(self.root())
    }

    fn is_used_by(&self, busy: &Busy<B>) -> bool {
        busy.objects.iter().any(|object| self.contains(object))
            || busy.moving.iter().any(|moved| self.root().is_below(moved))
    }
}

impl<B: Backing> Default for Uses<B> {
    fn default() -> Self {
        Self {
            state: Mutex::new(UsesState {
                last_number: 0,
                under_way: BTreeMap::new(),
                kept: BTreeMap::new(),
            }),
            changed: Condvar::new(),
        }
    }
}

impl<B: Backing> UsesState<B> {
    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    fn is_kept(&self, busy: &Busy<B>) -> bool {
        let mut parts = self.kept.values().flatten();
        parts.any(|part| part.is_used_by(busy))
    }

    fn overlaps_kept(&self, parts: &[Area<B>]) -> bool {
        let mut kept = self.kept.values().flatten();
        kept.any(|one| parts.iter().any(|part| part.overlaps(one)))
    }

    fn is_used(&self, parts: &[Area<B>]) -> bool {
        let mut under_way = self.under_way.values();
        under_way.any(|busy| parts.iter().any(|part| part.is_used_by(busy)))
    }
}

impl<B: Backing> Uses<B> {
    /// Waits until none of the objects is kept, and uses them until the guard is dropped.
    #[track_caller]
    pub(crate) fn enter(&self, objects: &[&Arc<Object<B>>]) -> Use<'_, B> {
        assert_none_held("a use, which waits for a call");
        let busy = Busy {
            objects: objects.iter().copied().cloned().collect(),
            moving: Vec::new(),
        };
        let mut state = self.state.lock();
        while state.is_kept(&busy) {
            state.wait(&self.changed);
        }
        let number = state.next_number();
        state.under_way.insert(number, busy);
        Use { uses: self, number }
    }

    /// Waits until no other thread keeps or uses anything there, and keeps the parts until the guard is dropped.
    #[track_caller]
    pub(crate) fn keep(&self, parts: Vec<Area<B>>) -> Kept<'_, B> {
        assert_none_held("a use, which waits for a call");
        let mut state = self.state.lock();
        while state.overlaps_kept(&parts) {
            state.wait(&self.changed);
        }
        let number = state.next_number();
        // From here on no use enters these parts.
        state.kept.insert(number, parts.clone());
        while state.is_used(&parts) {
            state.wait(&self.changed);
        }
        Kept { uses: self, number }
    }

    fn change(&self, change: impl FnOnce(&mut MutexGuard<'_, UsesState<B>>)) {
        let mut state = self.state.lock();
        change(&mut state);
        // A waiting thread either keeps parts, or waits for a thread that does.
        if !state.kept.is_empty() {
            self.changed.notify_all();
        }
    }
}

/// That a caller is busy with some objects.
pub(crate) struct Use<'a, B: Backing> {
    uses: &'a Uses<B>,
    number: u64,
}

impl<B: Backing> Use<'_, B> {
    /// Says that a directory is moved or removed. EBUSY where something at or below it is kept: a transaction is about to
    /// begin or to end there.
    pub(crate) fn moving(&self, dir: &Arc<Object<B>>) -> Result<(), Errno> {
        let mut state = self.uses.state.lock();
        let mut kept = state.kept.values().flatten();
        if kept.any(|part| part.root().is_below(dir)) {
            return Err(Errno::BUSY);
        }
        drop(kept);
        let busy = state.under_way.get_mut(&self.number);
        busy.expect("it is under way").moving.push(Arc::clone(dir));
        Ok(())
    }
}

impl<B: Backing> Drop for Use<'_, B> {
    fn drop(&mut self) {
        self.uses.change(|state| {
            state.under_way.remove(&self.number);
        });
    }
}

/// Guard: parts are kept for a caller.
pub(crate) struct Kept<'a, B: Backing> {
    uses: &'a Uses<B>,
    number: u64,
}

impl<B: Backing> Drop for Kept<'_, B> {
    fn drop(&mut self) {
        let mut state = self.uses.state.lock();
        state.kept.remove(&self.number);
        drop(state);
        self.uses.changed.notify_all();
    }
}
