//! The transactions of a backing that are not over, and which of them an object is in.
//!
//! Invariants, asserted in debug builds after each change of the list
//! * No scope is, or is below, the scope of another transaction in the list; scopes of names in one directory have no name in
//!   common.
//! * A transaction that follows a decided commit of its scope is not in the list but hangs on that commit, and takes
//!   its place when the commit ends.
//! * No two transactions have the same serial number, and none has one that is to be given out.
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
    /// Read without the lock, so that what is in no transaction waits for none.
    count: AtomicUsize,
    /// How many of them have a top that its parent shows under another name than the backing, or hides.
    changed_tops: AtomicUsize,
    last_serial: AtomicU64,
    /// Serial numbers and directories of transactions that are over and could not be removed: they mean nothing.
    leftovers: Mutex<Vec<(u64, B::Inode)>>,
}

impl<B: Backing> Drop for Scopes<B> {
    fn drop(&mut self) {
        // Names of a transaction that is still open lead to objects that lead to their directory.
        let scopes = std::mem::take(&mut *self.list.write());
        for scope in scopes {
            scope.drop_names_in_root();
            let changed = std::mem::take(&mut *scope.changed.lock());
            for object in changed.into_values() {
                drop(object.inner.own().edit().change.take());
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

    /// A serial number that no transaction had.
    pub(crate) fn next_serial(&self) -> u64 {
        self.last_serial.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The backing has something with that serial number.
    pub(crate) fn skip_serial(&self, serial: u64) {
        self.last_serial.fetch_max(serial, Ordering::Relaxed);
    }

    /// From here on what is in the scope is in its transaction.
    pub(crate) fn add(&self, scope: Arc<Scope<B>>) {
        let mut list = self.list.write();
        list.push(scope);
        self.count.store(list.len(), Ordering::Release);
        self.store_changed_tops(&list);
        self.check(&list);
    }

    /// A transaction is over; the one that follows it takes its place.
    pub(crate) fn replace_by_next(&self, scope: &Arc<Scope<B>>) {
        let mut list = self.list.write();
        list.retain(|other| !Arc::ptr_eq(other, scope));
        list.extend(scope.application.take_next());
        self.count.store(list.len(), Ordering::Release);
        self.store_changed_tops(&list);
        self.check(&list);
    }

    /// The top of a scope got another name.
    pub(crate) fn count_changed_tops(&self) {
        self.store_changed_tops(&self.list.read());
    }

    fn store_changed_tops(&self, list: &[Arc<Scope<B>>]) {
        let changed = list.iter().filter(|scope| scope.top.changes_parent());
        self.changed_tops.store(changed.count(), Ordering::Release);
    }

    pub(crate) fn have_changed_tops(&self) -> bool {
        self.changed_tops.load(Ordering::Acquire) > 0
    }

    /// Scopes whose tops are in a directory; empty where every top is as in the backing.
    pub(crate) fn with_top_in(&self, dir: &Object<B>) -> Vec<Arc<Scope<B>>> {
        if !self.have_changed_tops() {
            return Vec::new();
        }
        let list = self.list.read();
        let of_dir = list.iter().filter(|scope| scope.top.is_in(dir));
        of_dir.cloned().collect()
    }

    /// All but those that follow a commit.
    pub(crate) fn all(&self) -> Vec<Arc<Scope<B>>> {
        self.list.read().clone()
    }

    /// All that are not over, with their stages; a commit comes before the transaction that follows it.
    pub(crate) fn in_order(&self) -> Vec<(Arc<Scope<B>>, Stage)> {
        self.staged_where(|_| true)
    }

    /// The transactions of a scope that is, was or will be at `path`, with their stages, in order.
    pub(crate) fn in_order_at(&self, path: &[u8]) -> Vec<(Arc<Scope<B>>, Stage)> {
        self.staged_where(|first| first.is_at(path))
    }

    fn staged_where(&self, select: impl Fn(&Scope<B>) -> bool) -> Vec<(Arc<Scope<B>>, Stage)> {
        let with_next = |scope: &Arc<Scope<B>>| [Some(Arc::clone(scope)), scope.application.next()];
        // Under the lock: at the end of a commit the follower goes from it to the list. A stage that is read later may
        // be the end of a scope whose follower is not in the copy.
        let list = self.list.read();
        let selected = list.iter().filter(|scope| select(scope));
        let staged = selected.flat_map(with_next).flatten().map(|scope| {
            let stage = scope.stage();
            (scope, stage)
        });
        staged.filter(|(_, stage)| *stage != Stage::Ended).collect()
    }

    /// The first of those for which `select` is true, but for those that follow a commit.
    pub(crate) fn find(&self, select: impl Fn(&Scope<B>) -> bool) -> Option<Arc<Scope<B>>> {
        let list = self.list.read();
        list.iter().find(|scope| select(scope)).cloned()
    }

    /// The transaction of the scope that is, was or comes to be at `path`; the commit, where one is decided and followed
    /// by another transaction.
    pub(crate) fn at_path(&self, path: &[u8]) -> Option<Arc<Scope<B>>> {
        self.find(|scope| scope.is_at(path))
    }

    /// The transaction of that scope that programs change things in, or else the commit that is being applied.
    pub(crate) fn current_at_path(&self, path: &[u8]) -> Option<Arc<Scope<B>>> {
        // Under the lock: at the end of a commit the one that follows goes from it to the list.
        let list = self.list.read();
        let first = list.iter().find(|scope| scope.is_at(path))?;
        let next = first.application.next();
        Some(next.unwrap_or_else(|| Arc::clone(first)))
    }

    /// The commit that a transaction follows.
    pub(crate) fn commit_before(&self, scope: &Arc<Scope<B>>) -> Option<Arc<Scope<B>>> {
        self.find(|one| {
            let next = one.application.next();
            next.is_some_and(|next| Arc::ptr_eq(&next, scope))
        })
    }

    /// The transaction whose scope begins at `root`.
    pub(crate) fn with_root(&self, root: &Arc<Object<B>>) -> Option<Arc<Scope<B>>> {
        self.scope_of(root)
            .filter(|scope| scope.names_in_root.is_none() && Arc::ptr_eq(&scope.root, root))
    }

    /// The transaction that an object is in.
    pub(crate) fn scope_of(&self, object: &Arc<Object<B>>) -> Option<Arc<Scope<B>>> {
        if self.is_empty() {
            return None;
        }
        let list = self.list.read();
        let mut at = Some(Arc::clone(object));
        while let Some(object) = at {
            let is_root = |scope: &&Arc<Scope<B>>| {
                scope.names_in_root.is_none() && Arc::ptr_eq(&scope.root, &object)
            };
            if let Some(scope) = list.iter().find(is_root) {
                return Some(Arc::clone(scope));
            }
            let location = object.location.lock().clone();
            if let Some((parent, name)) = &location
                && let Some(scope) = list.iter().find(|scope| scope.has_name(parent, name))
            {
                return Some(Arc::clone(scope));
            }
            at = location.map(|(parent, _)| parent);
        }
        None
    }

    /// The transaction that a name in a directory is in, whether it leads to something or not.
    pub(crate) fn scope_at(&self, dir: &Arc<Object<B>>, name: &OsStr) -> Option<Arc<Scope<B>>> {
        if self.is_empty() {
            return None;
        }
        self.find(|scope| scope.has_name(dir, name))
            .or_else(|| self.scope_of(dir))
    }

    /// Those that are made of names in a directory.
    pub(crate) fn with_names_in(&self, dir: &Object<B>) -> Vec<Arc<Scope<B>>> {
        if self.is_empty() {
            return Vec::new();
        }
        let list = self.list.read();
        let in_dir = list.iter().filter(|scope| scope.has_names_in(dir));
        in_dir.cloned().collect()
    }

    /// A transaction that names in a directory would be in twice.
    pub(crate) fn overlapping(
        &self,
        dir: &Arc<Object<B>>,
        is_one: impl Fn(&OsStr) -> bool,
    ) -> Option<Arc<Scope<B>>> {
        let of_dir = self.scope_of(dir);
        of_dir.or_else(|| {
            self.find(|scope| match &scope.names_in_root {
                Some(names) if Arc::ptr_eq(&scope.root, dir) => {
                    names.all().iter().any(|name| is_one(name))
                }
                _ => is_at_names(&scope.root, dir, &is_one),
            })
        })
    }

    /// Whether an object is, or is above, the top of a transaction's scope.
    pub(crate) fn are_below(&self, object: &Arc<Object<B>>) -> bool {
        self.find(|scope| scope.root.is_below(object)).is_some()
    }

    /// Paths of the scopes for which `select` is true.
    pub(crate) fn paths_where(&self, select: impl Fn(&Scope<B>) -> bool) -> Vec<Vec<u8>> {
        let list = self.list.read();
        let selected = list.iter().filter(|scope| select(scope));
        selected.map(|scope| scope.path.clone()).collect()
    }

    /// The directory of a transaction that is over stays until the next one begins.
    pub(crate) fn add_leftover(&self, serial: u64, dir: &B::Inode) {
        self.leftovers.lock().push((serial, dir.clone()));
    }

    pub(crate) fn take_leftovers(&self) -> Vec<(u64, B::Inode)> {
        std::mem::take(&mut self.leftovers.lock())
    }

    fn check(&self, list: &[Arc<Scope<B>>]) {
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
                        names.all().is_disjoint(&others.all()),
                        "no name is in two scopes"
                    );
                }
            }
        }
    }
}
