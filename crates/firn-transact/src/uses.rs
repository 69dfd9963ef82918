//! [`UseTable`]: shared and exclusive use of areas of the tree, for threads that call the file system below the mount.
//!
//! A call of that file system (the *backing*) may hang, so no thread holds an ordinary lock across it. This table takes
//! the place of such a lock.
//!
//! * A *use* is shared access: a thread that looks up or changes objects enters a use of them ([`UseTable::enter`]).
//! * A *quiet area* is exclusive access: a thread that begins, prepares or ends a transaction quiesces the
//!   transaction's scope ([`UseTable::quiesce`]). It waits until no use is in the scope, and later uses of the scope
//!   wait. Other uses continue.
//!
//! Invariants
//! * Quiet areas never overlap. Once [`UseTable::quiesce`] has returned, no use is in its areas.
//! * A thread that waits here has no use and no quiet area in the same table, so there is no deadlock.
//! * A directory that is being moved or removed ([`UseGuard::announce_move`]) has no quiet area at or below it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::sync::Arc;

use firn_backing::lock::{Mutex, assert_none_held};
use firn_backing::{Backing, Errno};
use parking_lot::Condvar;

use crate::object::Object;
use crate::scope::is_at_names;

/// The table of uses and quiet areas of one kind: of names, or of data.
pub(crate) struct UseTable<B: Backing> {
    state: Mutex<UseTableState<B>>,
    /// Signals that a use has ended or an area is no longer quiet.
    changed: Condvar,
}

/// The state that the lock of a [`UseTable`] protects.
struct UseTableState<B: Backing> {
    /// The number that was given out last, for a use or for quiet areas.
    last_number: u64,
    /// The uses, by their numbers.
    uses: BTreeMap<u64, UsedObjects<B>>,
    /// The quiet areas of each thread, by number. A thread that still waits for uses to end is included.
    quiet_areas: BTreeMap<u64, Vec<Area<B>>>,
}

/// The objects of one use.
struct UsedObjects<B: Backing> {
    objects: Vec<Arc<Object<B>>>,
    /// Directories that the caller moves or removes.
    moved_dirs: Vec<Arc<Object<B>>>,
}

/// A part of the tree that one caller can quiesce.
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
            || used
                .moved_dirs
                .iter()
                .any(|moved_dir| self.root().is_below(moved_dir))
    }
}

impl<B: Backing> Default for UseTable<B> {
    fn default() -> Self {
        Self {
            state: Mutex::new(UseTableState {
                last_number: 0,
                uses: BTreeMap::new(),
                quiet_areas: BTreeMap::new(),
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

    /// Returns whether an object of this use is in a quiet area.
    fn is_in_quiet_area(&self, used: &UsedObjects<B>) -> bool {
        let mut quiet_areas = self.quiet_areas.values().flatten();
        quiet_areas.any(|area| area.is_used_by(used))
    }

    /// Returns whether one of these areas overlaps a quiet area.
    fn overlaps_quiet_area(&self, areas: &[Area<B>]) -> bool {
        let mut quiet_areas = self.quiet_areas.values().flatten();
        quiet_areas.any(|quiet_area| areas.iter().any(|area| area.overlaps(quiet_area)))
    }

    /// Returns whether a use has an object in one of these areas.
    fn has_use_in(&self, areas: &[Area<B>]) -> bool {
        let mut uses = self.uses.values();
        uses.any(|used| areas.iter().any(|area| area.is_used_by(used)))
    }
}

impl<B: Backing> UseTable<B> {
    /// Acquires shared use of some objects. Waits until no thread has exclusive use of an area with one of them (a
    /// *quiet area*), to begin or end a transaction. Until the returned guard is dropped, a thread that wants such
    /// exclusive use waits.
    ///
    /// The caller holds no lock.
    #[track_caller]
    pub(crate) fn enter(&self, objects: &[&Arc<Object<B>>]) -> UseGuard<'_, B> {
        assert_none_held("a use, which waits for a call");
        let used = UsedObjects {
            objects: objects.iter().copied().cloned().collect(),
            moved_dirs: Vec::new(),
        };
        let mut state = self.state.lock();
        while state.is_in_quiet_area(&used) {
            state.wait(&self.changed);
        }
        let number = state.next_number();
        state.uses.insert(number, used);
        UseGuard {
            table: self,
            number,
        }
    }

    /// Waits until no other thread uses objects in `areas` or has a part of them for itself. Returns a guard, which
    /// keeps the areas quiet until it is dropped: threads that want to use objects there wait.
    ///
    /// The caller holds no lock, and no use in this table.
    #[track_caller]
    pub(crate) fn quiesce(&self, areas: Vec<Area<B>>) -> QuietAreas<'_, B> {
        assert_none_held("a use, which waits for a call");
        let mut state = self.state.lock();
        while state.overlaps_quiet_area(&areas) {
            state.wait(&self.changed);
        }
        let number = state.next_number();
        // From here on, new uses of these areas wait, so the number of uses in them decreases.
        state.quiet_areas.insert(number, areas.clone());
        while state.has_use_in(&areas) {
            state.wait(&self.changed);
        }
        QuietAreas {
            table: self,
            number,
        }
    }

    /// Removes a use that has ended, and wakes the waiting threads so that they check again.
    fn remove_use(&self, number: u64) {
        let mut state = self.state.lock();
        state.uses.remove(&number);
        // A thread waits only while an area is quiet, for that thread itself or for another one. If no area is quiet,
        // no thread needs to wake.
        if !state.quiet_areas.is_empty() {
            self.changed.notify_all();
        }
    }
}

/// Guard: its caller uses some objects until it is dropped.
pub(crate) struct UseGuard<'a, B: Backing> {
    table: &'a UseTable<B>,
    /// Number of the use.
    number: u64,
}

impl<B: Backing> UseGuard<'_, B> {
    /// Records that the caller is about to move or remove the directory `dir`. Until the guard `self` is dropped, no
    /// transaction can begin or end at or below `dir`.
    ///
    /// Fails with EBUSY if an area at or below `dir` is quiet, because a transaction begins or ends there.
    pub(crate) fn announce_move(&self, dir: &Arc<Object<B>>) -> Result<(), Errno> {
        let mut state = self.table.state.lock();
        let has_quiet_area = state
            .quiet_areas
            .values()
            .flatten()
            .any(|area| area.root().is_below(dir));
        if has_quiet_area {
            return Err(Errno::BUSY);
        }
        let used = state
            .uses
            .get_mut(&self.number)
            .expect("a use is in the table until its guard is dropped");
        used.moved_dirs.push(Arc::clone(dir));
        Ok(())
    }
}

impl<B: Backing> Drop for UseGuard<'_, B> {
    fn drop(&mut self) {
        self.table.remove_use(self.number);
    }
}

/// Guard: some areas are quiet for its caller until it is dropped.
pub(crate) struct QuietAreas<'a, B: Backing> {
    table: &'a UseTable<B>,
    /// Number of the entry in the table.
    number: u64,
}

impl<B: Backing> Drop for QuietAreas<'_, B> {
    fn drop(&mut self) {
        let mut state = self.table.state.lock();
        state.quiet_areas.remove(&self.number);
        drop(state);
        self.table.changed.notify_all();
    }
}
