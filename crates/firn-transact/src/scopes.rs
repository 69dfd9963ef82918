//! [`Scopes`]: the list of a backing's transactions that are not over, and look-ups in it.
//!
//! The *scope* of a transaction is what it covers: a directory and all below it, or some names in a directory. The
//! uppermost directory is its *top*. A transaction may begin while an earlier commit of its scope is decided but not
//! applied to the backing yet. It *follows* that commit: the commit refers to it, and it takes the commit's place in
//! the list when the commit ends.
//!
//! Invariants, asserted in debug builds after each change of the list
//! * Scopes in the list do not overlap. Scopes of names in one directory have no name in common.
//! * The list has no transaction that follows a commit.
//! * No two transactions have the same serial number, and none has a serial number that is not assigned yet.
//! * `count` is the length of the list, except while the list is locked for a change.

use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use firn_backing::Backing;
use firn_backing::lock::{Mutex, RwLock};

use crate::object::Object;
use crate::scope::{Scope, Stage, is_at_names};

/// The transactions of a backing that are not over.
pub struct Scopes<B: Backing> {
    list: RwLock<Vec<Arc<Scope<B>>>>,
    /// Length of the list. Read without the lock, so that calls outside of transactions do not wait.
    count: AtomicUsize,
    /// Number of scopes with a top that has another name in its parent than in the backing, or hides a name there.
    changed_tops: AtomicUsize,
    /// The serial number that was assigned last.
    last_serial: AtomicU64,
    /// Directories of ended transactions that could not be removed yet. They have no records.
    leftovers: Mutex<Vec<Leftover<B>>>,
}

/// The directory of an ended transaction that could not be removed.
pub(crate) struct Leftover<B: Backing> {
    /// Serial number of the transaction.
    pub(crate) serial: u64,
    pub(crate) dir: B::Inode,
}

impl<B: Backing> Drop for Scopes<B> {
    fn drop(&mut self) {
        // Names refer to objects, and objects to their directory. This cycle of references is broken here, because the
        // objects would otherwise never be freed.
        let scopes = std::mem::take(&mut *self.list.write());
        for scope in scopes {
            scope.drop_names_in_root();
            let changed = std::mem::take(&mut *scope.changed.lock());
            for object in changed.into_values() {
                drop(object.state.acquire_exclusive().edit().change.take());
            }
        }
    }
}

impl<B: Backing> Default for Scopes<B> {
    fn default() -> Self {
        Self {
            list: RwLock::default(),
            count: AtomicUsize::new(0),
            changed_tops: AtomicUsize::new(0),
            last_serial: AtomicU64::new(0),
            leftovers: Mutex::default(),
        }
    }
}

impl<B: Backing> Scopes<B> {
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Returns a serial number that no transaction has had.
    pub(crate) fn next_serial(&self) -> u64 {
        self.last_serial.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Records that the backing has a transaction or history entry with this serial number, so that it is not assigned
    /// again.
    pub(crate) fn skip_serial(&self, serial: u64) {
        self.last_serial.fetch_max(serial, Ordering::Relaxed);
    }

    /// Adds a transaction. From then on the objects in its scope are in the transaction.
    pub(crate) fn add(&self, scope: Arc<Scope<B>>) {
        let mut list = self.list.write();
        list.push(scope);
        self.count.store(list.len(), Ordering::Release);
        self.store_changed_tops(&list);
        self.check_invariants(&list);
    }

    /// Removes a transaction that is over. The transaction that follows it, if any, takes its place.
    pub(crate) fn replace_by_next(&self, scope: &Arc<Scope<B>>) {
        let mut list = self.list.write();
        list.retain(|listed| !Arc::ptr_eq(listed, scope));
        list.extend(scope.apply_state.take_next_scope());
        self.count.store(list.len(), Ordering::Release);
        self.store_changed_tops(&list);
        self.check_invariants(&list);
    }

    /// Counts the changed tops again, after the top of a scope got another name.
    pub(crate) fn count_changed_tops(&self) {
        self.store_changed_tops(&self.list.read());
    }

    /// Counts the scopes of `list` whose tops change names in their parents.
    fn store_changed_tops(&self, list: &[Arc<Scope<B>>]) {
        let changed = list.iter().filter(|scope| scope.top.changes_parent());
        self.changed_tops.store(changed.count(), Ordering::Release);
    }

    pub(crate) fn have_changed_tops(&self) -> bool {
        self.changed_tops.load(Ordering::Acquire) > 0
    }

    /// Returns the scopes whose tops are in a directory. Empty if no top of any scope has a changed name.
    pub(crate) fn with_top_in(&self, dir: &Object<B>) -> Vec<Arc<Scope<B>>> {
        if !self.have_changed_tops() {
            return Vec::new();
        }
        let list = self.list.read();
        list.iter()
            .filter(|scope| scope.top.is_in(dir))
            .cloned()
            .collect()
    }

    /// Returns the transactions of the list, without those that follow a commit.
    pub(crate) fn all(&self) -> Vec<Arc<Scope<B>>> {
        self.list.read().clone()
    }

    /// Returns all transactions that are not over, with their stages. A commit comes before the one that follows it.
    pub(crate) fn in_order(&self) -> Vec<(Arc<Scope<B>>, Stage)> {
        self.transactions_where(|_| true)
    }

    /// Like [`Self::in_order`], but returns only the transactions of the scope that is, was or will be at `path`.
    pub(crate) fn in_order_at(&self, path: &[u8]) -> Vec<(Arc<Scope<B>>, Stage)> {
        self.transactions_where(|first| first.has_path(path))
    }

    /// Returns the transactions of the list for which `select` returns true, with their stages. After a decided commit
    /// comes the transaction that programs have begun since, if there is one. Transactions that are over are left out.
    fn transactions_where(
        &self,
        select: impl Fn(&Scope<B>) -> bool,
    ) -> Vec<(Arc<Scope<B>>, Stage)> {
        let mut found = Vec::new();
        // Stages are read under the lock. When a commit ends, the transaction that follows it moves into the list. A
        // copy of the list from before that moment, with stages from after it, would miss that transaction.
        let list = self.list.read();
        for scope in list.iter().filter(|scope| select(scope)) {
            let next_scope = scope.apply_state.next_scope();
            for transaction in [Some(Arc::clone(scope)), next_scope].into_iter().flatten() {
                let stage = transaction.stage();
                if stage != Stage::Ended {
                    found.push((transaction, stage));
                }
            }
        }
        found
    }

    /// Returns the first transaction of the list for which `select` returns true.
    pub(crate) fn find(&self, select: impl Fn(&Scope<B>) -> bool) -> Option<Arc<Scope<B>>> {
        let list = self.list.read();
        list.iter().find(|scope| select(scope)).cloned()
    }

    /// Returns the transaction of the scope that is, was or will be at `path`. If a transaction follows a commit there,
    /// the commit is returned.
    pub(crate) fn at_path(&self, path: &[u8]) -> Option<Arc<Scope<B>>> {
        self.find(|scope| scope.has_path(path))
    }

    /// Returns the undecided transaction of the scope that is, was or will be at `path`, or else the commit that is
    /// being applied.
    pub(crate) fn current_at_path(&self, path: &[u8]) -> Option<Arc<Scope<B>>> {
        // Both look-ups are under the lock, because the transaction that follows a commit moves into the list at its
        // end.
        let list = self.list.read();
        let first = list.iter().find(|scope| scope.has_path(path))?;
        let next_scope = first.apply_state.next_scope();
        Some(next_scope.unwrap_or_else(|| Arc::clone(first)))
    }

    /// Returns the commit that a transaction follows, if any.
    pub(crate) fn commit_before(&self, scope: &Arc<Scope<B>>) -> Option<Arc<Scope<B>>> {
        self.find(|commit| {
            let next_scope = commit.apply_state.next_scope();
            next_scope.is_some_and(|next_scope| Arc::ptr_eq(&next_scope, scope))
        })
    }

    /// Returns the transaction whose scope is the directory `root` and all below it.
    pub(crate) fn with_root(&self, root: &Arc<Object<B>>) -> Option<Arc<Scope<B>>> {
        self.scope_of(root)
            .filter(|scope| scope.names_in_root.is_none() && Arc::ptr_eq(&scope.root, root))
    }

    /// Returns the transaction that covers an object; `None` if there is none. A transaction covers a directory and all
    /// below it, or some names in a directory and all below them.
    pub(crate) fn scope_of(&self, object: &Arc<Object<B>>) -> Option<Arc<Scope<B>>> {
        if self.is_empty() {
            return None;
        }
        let list = self.list.read();
        // The search goes up from the object to the top of the backing.
        let mut ancestor = Arc::clone(object);
        loop {
            let is_root = |scope: &&Arc<Scope<B>>| {
                scope.names_in_root.is_none() && Arc::ptr_eq(&scope.root, &ancestor)
            };
            if let Some(scope) = list.iter().find(is_root) {
                return Some(Arc::clone(scope));
            }
            let (parent, name) = ancestor.location.lock().clone()?;
            if let Some(scope) = list.iter().find(|scope| scope.has_name(&parent, &name)) {
                return Some(Arc::clone(scope));
            }
            ancestor = parent;
        }
    }

    /// Returns the transaction whose scope contains a name in a directory. The name need not exist.
    pub(crate) fn scope_at(&self, dir: &Arc<Object<B>>, name: &OsStr) -> Option<Arc<Scope<B>>> {
        if self.is_empty() {
            return None;
        }
        self.find(|scope| scope.has_name(dir, name))
            .or_else(|| self.scope_of(dir))
    }

    /// Returns the scopes of names in a directory.
    pub(crate) fn with_names_in(&self, dir: &Object<B>) -> Vec<Arc<Scope<B>>> {
        if self.is_empty() {
            return Vec::new();
        }
        let list = self.list.read();
        list.iter()
            .filter(|scope| scope.has_names_in(dir))
            .cloned()
            .collect()
    }

    /// Returns a transaction with which a scope of names in `dir` would overlap. `is_selected` says which names the
    /// scope would have.
    pub(crate) fn find_overlapping(
        &self,
        dir: &Arc<Object<B>>,
        is_selected: impl Fn(&OsStr) -> bool,
    ) -> Option<Arc<Scope<B>>> {
        let overlaps_names = |scope: &Scope<B>| match &scope.names_in_root {
            Some(names) if Arc::ptr_eq(&scope.root, dir) => {
                names.snapshot().iter().any(|name| is_selected(name))
            }
            _ => is_at_names(&scope.root, dir, &is_selected),
        };
        self.scope_of(dir).or_else(|| self.find(overlaps_names))
    }

    /// Returns whether the top of a scope is at or below an object.
    pub(crate) fn are_below(&self, object: &Arc<Object<B>>) -> bool {
        self.find(|scope| scope.root.is_below(object)).is_some()
    }

    /// Returns the paths at the begin of the scopes for which `select` returns true.
    pub(crate) fn paths_where(&self, select: impl Fn(&Scope<B>) -> bool) -> Vec<Vec<u8>> {
        let list = self.list.read();
        let selected = list.iter().filter(|scope| select(scope));
        selected.map(|scope| scope.path.clone()).collect()
    }

    /// Records the directory of an ended transaction that could not be removed. The next begin tries again.
    pub(crate) fn add_leftover(&self, serial: u64, dir: &B::Inode) {
        self.leftovers.lock().push(Leftover {
            serial,
            dir: dir.clone(),
        });
    }

    /// Removes and returns the directories that [`Self::add_leftover`] has recorded.
    pub(crate) fn take_leftovers(&self) -> Vec<Leftover<B>> {
        std::mem::take(&mut self.leftovers.lock())
    }

    /// Asserts, in debug builds, that the transactions in `list` do not overlap and have different serial numbers.
    fn check_invariants(&self, list: &[Arc<Scope<B>>]) {
        if !cfg!(debug_assertions) {
            return;
        }
        let last_serial = self.last_serial.load(Ordering::Relaxed);
        for (index, scope) in list.iter().enumerate() {
            assert!(
                scope.serial <= last_serial,
                "a serial number is given out once"
            );
            for other in &list[..index] {
                assert_ne!(
                    scope.serial, other.serial,
                    "a serial number is given out once"
                );
                assert!(
                    !scope.covers(&other.root) && !other.covers(&scope.root),
                    "scopes do not overlap"
                );
                let names = [scope, other].map(|scope| scope.names_in_root.as_ref());
                if let [Some(names), Some(others)] = names
                    && Arc::ptr_eq(&scope.root, &other.root)
                {
                    assert!(
                        names.snapshot().is_disjoint(&others.snapshot()),
                        "no name is in two scopes"
                    );
                }
            }
        }
    }
}
