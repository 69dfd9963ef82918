//! The table of objects in use, by inode, and the tables of threads that use their names and data.
//!
//! Invariants
//! * An inode that is in use has exactly one object, even if it has several names.
//! * A thread that looks up or changes names is in [`Tree::names`]; a thread that changes data is in [`Tree::data`]. A
//!   begin, prepare, commit or abort keeps its scope in both tables, names first ([`UseTable`]).
//! * In a transaction, one thread at a time changes names, and no other thread looks names up meanwhile
//!   ([`Scope::names`]).
//!
//! [`Scope::names`]: crate::scope::Scope::names

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, Weak};

use firn_backing::lock::Mutex;
use firn_backing::{Attr, Backing, Errno, Kind};
use smallvec::SmallVec;

use crate::claim::{Claim, Owned, Shared};
use crate::hidden_links::HiddenLinks;
use crate::object::{Inner, Key, Object};
use crate::uses::{Area, KeptAreas, UseGuard, UseTable};

/// Guard: its caller may change names.
pub(crate) struct NameChangeGuard<'a, B: Backing> {
    used: UseGuard<'a, B>,
    /// The claim of the transaction whose names change; `None` outside of transactions.
    owned: Option<Owned<Arc<Claim>>>,
}

impl<'a, B: Backing> NameChangeGuard<'a, B> {
    pub(crate) fn new(used: UseGuard<'a, B>, owned: Option<Owned<Arc<Claim>>>) -> Self {
        Self { used, owned }
    }

    /// Notes that the caller is about to move or remove `object`.
    ///
    /// Fails with EBUSY if `object` is a directory outside of transactions and a transaction begins or ends in it.
    pub(crate) fn moving(&self, object: &Arc<Object<B>>) -> Result<(), Errno> {
        if self.owned.is_some() || object.kind != Kind::Dir {
            return Ok(());
        }
        self.used.moving(object)
    }
}

/// Guard: names that the caller looks up do not change.
pub(crate) struct StableNamesGuard<'a, B: Backing> {
    _used: UseGuard<'a, B>,
    /// Shares of the claims of the transactions whose names are looked up.
    _shared: SmallVec<[Shared<Arc<Claim>>; 1]>,
}

impl<'a, B: Backing> StableNamesGuard<'a, B> {
    pub(crate) fn new(used: UseGuard<'a, B>, shared: SmallVec<[Shared<Arc<Claim>>; 1]>) -> Self {
        Self {
            _used: used,
            _shared: shared,
        }
    }
}

/// Guard: only its caller uses names and data of a scope. The fields are dropped in this order, which is the reverse of
/// the order in which they were acquired.
pub(crate) struct QuietGuard<'a, B: Backing> {
    _data: KeptAreas<'a, B>,
    _names: KeptAreas<'a, B>,
}

/// The objects of a backing that are in use, and the tables of threads that use them.
pub(crate) struct Tree<B: Backing> {
    top: Arc<Object<B>>,
    objects: Mutex<HashMap<Key, Weak<Object<B>>>>,
    /// Links of Firn's own below `.firn/`, which programs do not see.
    pub(crate) hidden: HiddenLinks<B>,
    /// Threads that look up or change names.
    pub(crate) names: UseTable<B>,
    /// Threads that change data or attributes.
    pub(crate) data: UseTable<B>,
}

impl<B: Backing> Tree<B> {
    pub(crate) fn new(top: &Arc<Object<B>>) -> Self {
        Self {
            top: Arc::clone(top),
            objects: Mutex::new(HashMap::from([(top.key, Arc::downgrade(top))])),
            hidden: HiddenLinks::default(),
            names: UseTable::default(),
            data: UseTable::default(),
        }
    }

    /// Waits until no thread looks up or changes anything in these parts. Returns a guard that keeps other threads out.
    pub(crate) fn quiesce(&self, parts: Vec<Area<B>>) -> QuietGuard<'_, B> {
        let names = self.names.keep(parts.clone());
        let data = self.data.keep(parts);
        QuietGuard {
            _data: data,
            _names: names,
        }
    }

    /// Waits until no thread looks up or changes anything at or below a directory. Returns a guard that keeps other
    /// threads out.
    pub(crate) fn quiesce_tree(&self, root: &Arc<Object<B>>) -> QuietGuard<'_, B> {
        self.quiesce(vec![Area::Tree(Arc::clone(root))])
    }

    pub(crate) fn top(&self) -> &Arc<Object<B>> {
        &self.top
    }

    /// Returns the object of an inode that was looked up as `name` in `parent`; makes the object if there is none.
    pub(crate) fn intern(
        &self,
        base: &B,
        inode: B::Inode,
        attr: &Attr,
        parent: &Arc<Object<B>>,
        name: &OsStr,
    ) -> Arc<Object<B>> {
        let key = (attr.dev, attr.ino);
        let lane = base.facts(&inode).lane;
        let mut objects = self.objects.lock();
        if let Some(object) = objects.get(&key).and_then(Weak::upgrade) {
            // An object without a parent is the top or is nameless, so it must not get a place.
            if object.parent().is_some() {
                object.move_to(parent, name);
            }
            return object;
        }
        let inner = Inner {
            base: Some(inode),
            change: None,
        };
        let location = Some((Arc::clone(parent), name.to_owned()));
        let object = Arc::new(Object::new(key, attr.kind, inner, location).in_lane(lane));
        self.hidden.note_known(&object);
        insert(&mut objects, &object);
        object
    }

    /// Makes the object of a file that has lost its last name and therefore is in no transaction. Enters it in the
    /// table.
    pub(crate) fn adopt_nameless(&self, base: &B, inode: B::Inode, attr: &Attr) -> Arc<Object<B>> {
        let inner = Inner {
            base: Some(inode.clone()),
            change: None,
        };
        let object = Object::new((attr.dev, attr.ino), attr.kind, inner, None);
        let object = Arc::new(object.in_lane(base.facts(&inode).lane));
        object.become_nameless(&mut object.inner.own().edit(), inode);
        self.adopt(&object);
        object
    }

    /// Enters a new object of a transaction in the table.
    pub(crate) fn adopt(&self, object: &Arc<Object<B>>) {
        insert(&mut self.objects.lock(), object);
    }

    /// Returns the object of an inode if it is in use.
    pub(crate) fn known(&self, key: Key) -> Option<Arc<Object<B>>> {
        self.objects.lock().get(&key).and_then(Weak::upgrade)
    }

    /// Removes an inode that no longer exists from the table. References to its object stay valid.
    pub(crate) fn forget(&self, key: Key) {
        self.objects.lock().remove(&key);
    }

    /// Asserts the invariants, in debug builds.
    pub(crate) fn check(&self) {
        if !cfg!(debug_assertions) {
            return;
        }
        for (key, object) in self.objects.lock().iter() {
            if let Some(object) = object.upgrade() {
                assert_eq!(object.key, *key, "an object is found by its own inode");
            }
        }
    }
}

/// Enters an object in the table, or replaces the entry of its key.
fn insert<B: Backing>(objects: &mut HashMap<Key, Weak<Object<B>>>, object: &Arc<Object<B>>) {
    // Unused entries are removed when the table would grow, so that it stays in proportion to the objects in use.
    if objects.len() == objects.capacity() {
        objects.retain(|_, weak| weak.strong_count() > 0);
    }
    objects.insert(object.key, Arc::downgrade(object));
}

/// Returns the path of an object, relative to the backing.
pub(crate) fn path_of<B: Backing>(object: &Object<B>) -> Vec<u8> {
    let mut names = Vec::new();
    let mut location = object.location.lock().clone();
    while let Some((parent, name)) = location {
        names.push(name);
        location = parent.location.lock().clone();
    }
    names.reverse();
    let names: Vec<&[u8]> = names.iter().map(|name| name.as_bytes()).collect();
    names.join(&b'/')
}
