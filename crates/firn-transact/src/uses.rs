//! Shared and exclusive use of parts of the tree, across calls of the backing.
//!
//! A call of the backing may hang, so no thread holds a lock across it. This table takes the place of such a lock.
//!
//! * A *use* is shared: a thread that looks up or changes objects enters a use of them ([`UseTable::enter`]).
//! * An area is *kept* by one thread: a thread that begins, prepares or ends a transaction keeps the transaction's
//!   scope ([`UseTable::keep`]). It waits until no use is in the scope, and later uses of the scope wait. Other uses
//!   continue.
//!
//! Invariants
//! * Kept areas never overlap. Once [`UseTable::keep`] has returned, no use is in its area.
//! * A thread that waits here has no use and no kept area in the same table, so no threads can wait for each other in a
//!   circle.
//! * A directory that is being moved or removed ([`UseGuard::moving`]) has no kept area at or below it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::sync::Arc;

use firn_backing::lock::{Mutex, MutexGuard, assert_none_held};
use firn_backing::{Backing, Errno};
use parking_lot::Condvar;

use crate::object::Object;
use crate::scope::is_at_names;

/// The table of uses and kept areas of one kind: of names, or of data.
pub(crate) struct UseTable<B: Backing> {
    state: Mutex<UseTableState<B>>,
    /// Signals that a use has ended or an area is no longer kept.
    changed: Condvar,
}

/// The state that the lock of a [`UseTable`] protects.
struct UseTableState<B: Backing> {
    /// The number that was given out last, for a use or for kept areas.
    last_number: u64,
    /// The uses, by their numbers.
    under_way: BTreeMap<u64, UsedObjects<B>>,
    /// The areas of each thread that keeps some or waits for uses in them to end, by number.
    kept: BTreeMap<u64, Vec<Area<B>>>,
}

/// The objects of one use.
struct UsedObjects<B: Backing> {
    objects: Vec<Arc<Object<B>>>,
    /// Directories that the caller moves or removes.
    moving: Vec<Arc<Object<B>>>,
}

/// A part of the tree that one caller can keep.
pub(crate) enum Area<B: Backing> {
    /// A directory and all below it.
    Tree(Arc<Object<B>>),
    /// A directory itself: its names, and nothing below them.
    Dir(Arc<Object<B>>),
    /// A directory itself, and all at and below the given names in it.
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
    /// Returns the directory that the area begins at.
    fn root(&self) -> &Arc<Object<B>> {
        match self {
            Self::Tree(root) | Self::Dir(root) | Self::Names(root, _) => root,
        }
    }

    /// Returns whether an object is in the area.
    fn contains(&self, object: &Arc<Object<B>>) -> bool {
        match self {
            Self::Tree(root) => object.is_below(root),
            Self::Dir(dir) => Arc::ptr_eq(dir, object),
            Self::Names(dir, names) => {
                Arc::ptr_eq(dir, object) || is_at_names(object, dir, |name| names.contains(name))
            }
        }
    }

    /// Returns whether the two areas have an object in common.
    fn overlaps(&self, other: &Self) -> bool {
        self.contains(other.root()) || other.contains(self.root())
    }

    /// Returns whether the use has an object in the area, or moves a directory that the area is below.
    fn is_used_by(&self, used: &UsedObjects<B>) -> bool {
        used.objects.iter().any(|object| self.contains(object))
            || used.moving.iter().any(|moved| self.root().is_below(moved))
    }
}

impl<B: Backing> Default for UseTable<B> {
    fn default() -> Self {
        Self {
            state: Mutex::new(UseTableState {
                last_number: 0,
                under_way: BTreeMap::new(),
                kept: BTreeMap::new(),
            }),
            changed: Condvar::new(),
        }
    }
}

impl<B: Backing> UseTableState<B> {
    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Returns whether an object of this use is in a kept area.
    fn is_kept(&self, used: &UsedObjects<B>) -> bool {
        let mut parts = self.kept.values().flatten();
        parts.any(|part| part.is_used_by(used))
    }

    /// Returns whether one of these areas overlaps a kept area.
    fn overlaps_kept(&self, parts: &[Area<B>]) -> bool {
        let mut kept = self.kept.values().flatten();
        kept.any(|kept_area| parts.iter().any(|part| part.overlaps(kept_area)))
    }

    /// Returns whether a use has an object in one of these areas.
    fn is_used(&self, parts: &[Area<B>]) -> bool {
        let mut under_way = self.under_way.values();
        under_way.any(|used| parts.iter().any(|part| part.is_used_by(used)))
    }
}

impl<B: Backing> UseTable<B> {
    /// Waits until none of the objects is in a kept area. Returns a guard, which uses them until it is dropped.
    #[track_caller]
    pub(crate) fn enter(&self, objects: &[&Arc<Object<B>>]) -> UseGuard<'_, B> {
        assert_none_held("a use, which waits for a call");
        let used = UsedObjects {
            objects: objects.iter().copied().cloned().collect(),
            moving: Vec::new(),
        };
        let mut state = self.state.lock();
        while state.is_kept(&used) {
            state.wait(&self.changed);
        }
        let number = state.next_number();
        state.under_way.insert(number, used);
        UseGuard { uses: self, number }
    }

    /// Waits until no other thread keeps or uses anything in `parts`. Returns a guard, which keeps them until it is
    /// dropped.
    #[track_caller]
    pub(crate) fn keep(&self, parts: Vec<Area<B>>) -> KeptAreas<'_, B> {
        assert_none_held("a use, which waits for a call");
        let mut state = self.state.lock();
        while state.overlaps_kept(&parts) {
            state.wait(&self.changed);
        }
        let number = state.next_number();
        // From here on, new uses of these parts wait, so the number of uses in them decreases.
        state.kept.insert(number, parts.clone());
        while state.is_used(&parts) {
            state.wait(&self.changed);
        }
        KeptAreas { uses: self, number }
    }

    /// Changes the uses with `change`, and wakes the waiting threads so that they check again.
    fn change(&self, change: impl FnOnce(&mut MutexGuard<'_, UseTableState<B>>)) {
        let mut state = self.state.lock();
        change(&mut state);
        // A thread waits only while an area is kept, by that thread itself or by another one. If no area is kept, no
        // thread needs to wake.
        if !state.kept.is_empty() {
            self.changed.notify_all();
        }
    }
}

/// Guard: its caller uses some objects until it is dropped.
pub(crate) struct UseGuard<'a, B: Backing> {
    uses: &'a UseTable<B>,
    number: u64,
}

impl<B: Backing> UseGuard<'_, B> {
    /// Notes that the caller is about to move or remove the directory `dir`.
    ///
    /// Fails with EBUSY if an area at or below `dir` is kept, because a transaction begins or ends there.
    pub(crate) fn moving(&self, dir: &Arc<Object<B>>) -> Result<(), Errno> {
        let mut state = self.uses.state.lock();
        let mut kept = state.kept.values().flatten();
        if kept.any(|part| part.root().is_below(dir)) {
            return Err(Errno::BUSY);
        }
        drop(kept);
        let used = state.under_way.get_mut(&self.number);
        used.expect("it is under way").moving.push(Arc::clone(dir));
        Ok(())
    }
}

impl<B: Backing> Drop for UseGuard<'_, B> {
    fn drop(&mut self) {
        self.uses.change(|state| {
            state.under_way.remove(&self.number);
        });
    }
}

/// Guard: its caller keeps some areas until it is dropped.
pub(crate) struct KeptAreas<'a, B: Backing> {
    uses: &'a UseTable<B>,
    number: u64,
}

impl<B: Backing> Drop for KeptAreas<'_, B> {
    fn drop(&mut self) {
        let mut state = self.uses.state.lock();
        state.kept.remove(&self.number);
        drop(state);
        self.uses.changed.notify_all();
    }
}
