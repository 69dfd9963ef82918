//! [`Tree`]: the objects (files, directories, links) in use, by inode, and the threads that use their names and data.
//!
//! A transaction covers a part of the tree, its *scope*. To *quiesce* a scope is to let changes end and none begin. A
//! *claim* is a read-write lock that may be held during a call of the file system below.
//!
//! Invariants
//! * An inode that is in use has exactly one object, even if it has several names.
//! * A thread that looks up or changes names is in [`Tree::names`]; a thread that changes data is in [`Tree::data`]. A
//!   begin, prepare, commit or abort quiesces its scope in both tables, names first ([`UseTable`]).
//! * In a transaction, one thread at a time changes names, and no other thread looks names up meanwhile
//!   ([`Scope::names_claim`]).
//!
//! [`Scope::names_claim`]: crate::scope::Scope::names_claim

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, Weak};

use firn_backing::lock::Mutex;
use firn_backing::{Attr, Backing, Errno, Kind};
use smallvec::SmallVec;

use crate::claim::{Claim, ExclusiveClaim, SharedClaim};
use crate::hidden_links::HiddenLinks;
use crate::object::{Object, ObjectKey, ObjectState};
use crate::uses::{Area, QuietAreas, UseGuard, UseTable};

/// Guard: its caller may change names.
pub(crate) struct NameChangeGuard<'a, B: Backing> {
    dirs_use: UseGuard<'a, B>,
    /// The claim on the names of the transaction; `None` outside of transactions.
    names_claim: Option<ExclusiveClaim<Arc<Claim>>>,
}

impl<'a, B: Backing> NameChangeGuard<'a, B> {
    pub(crate) fn new(
        dirs_use: UseGuard<'a, B>,
        names_claim: Option<ExclusiveClaim<Arc<Claim>>>,
    ) -> Self {
        Self {
            dirs_use,
            names_claim,
        }
    }

    /// Records that the caller is about to move or remove `object`.
    ///
    /// Fails with EBUSY if `object` is a directory outside of transactions and a transaction begins or ends in it.
    pub(crate) fn announce_move(&self, object: &Arc<Object<B>>) -> Result<(), Errno> {
        let is_in_transaction = self.names_claim.is_some();
        if is_in_transaction || object.kind != Kind::Dir {
            return Ok(());
        }
        self.dirs_use.announce_move(object)
    }
}

/// Guard: names that the caller looks up do not change.
pub(crate) struct StableNamesGuard<'a, B: Backing> {
    _dirs_use: UseGuard<'a, B>,
    /// The shared claims of the transactions whose names are looked up.
    _names_claims: SmallVec<[SharedClaim<Arc<Claim>>; 1]>,
}

impl<'a, B: Backing> StableNamesGuard<'a, B> {
    pub(crate) fn new(
        dirs_use: UseGuard<'a, B>,
        names_claims: SmallVec<[SharedClaim<Arc<Claim>>; 1]>,
    ) -> Self {
        Self {
            _dirs_use: dirs_use,
            _names_claims: names_claims,
        }
    }
}

/// Guard: only its caller uses names and data of a scope. The fields are dropped in this order, which is the reverse of
/// the order in which they were acquired.
pub(crate) struct QuietGuard<'a, B: Backing> {
    _data: QuietAreas<'a, B>,
    _names: QuietAreas<'a, B>,
}

/// The objects of a backing that are in use, and the tables of threads that use them.
pub(crate) struct Tree<B: Backing> {
    top: Arc<Object<B>>,
    objects: Mutex<HashMap<ObjectKey, Weak<Object<B>>>>,
    /// Firn's own links below `.firn/`, which programs do not see.
    pub(crate) hidden_links: HiddenLinks<B>,
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
            hidden_links: HiddenLinks::default(),
            names: UseTable::default(),
            data: UseTable::default(),
        }
    }

    /// Waits until no thread looks up or changes anything in these areas. Returns a guard that keeps other threads out.
    pub(crate) fn quiesce(&self, areas: Vec<Area<B>>) -> QuietGuard<'_, B> {
        let names = self.names.quiesce(areas.clone());
        let data = self.data.quiesce(areas);
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

    /// Returns the object of an inode that was looked up as `name` in `parent`; makes the object if there is none. An
    /// inode in use has one object, under all of its names.
    pub(crate) fn intern(
        &self,
        base: &B,
        inode: B::Inode,
        attr: &Attr,
        parent: &Arc<Object<B>>,
        name: &OsStr,
    ) -> Arc<Object<B>> {
        let key = ObjectKey::from_attr(attr);
        let lane = base.facts(&inode).lane;
        let mut objects = self.objects.lock();
        if let Some(object) = objects.get(&key).and_then(Weak::upgrade) {
            // An object without a parent is the top or is nameless, so it must not get a place.
            if object.parent().is_some() {
                object.move_to(parent, name);
            }
            return object;
        }
        let state = ObjectState {
            base: Some(inode),
            change: None,
        };
        let location = Some((Arc::clone(parent), name.to_owned()));
        let object = Arc::new(Object::new(key, attr.kind, state, location).in_lane(lane));
        self.hidden_links.mark_if_listed(&object);
        insert_object(&mut objects, &object);
        object
    }

    /// Makes the object of a file that has lost its last name and therefore is in no transaction. Inserts the object
    /// into the table.
    pub(crate) fn insert_nameless(&self, base: &B, inode: B::Inode, attr: &Attr) -> Arc<Object<B>> {
        let state = ObjectState {
            base: Some(inode.clone()),
            change: None,
        };
        let lane = base.facts(&inode).lane;
        let nameless = Object::new(ObjectKey::from_attr(attr), attr.kind, state, None);
        let object = Arc::new(nameless.in_lane(lane));
        object.become_nameless(&mut object.state.acquire_exclusive().edit(), inode);
        self.insert(&object);
        object
    }

    /// Inserts a new object of a transaction into the table.
    pub(crate) fn insert(&self, object: &Arc<Object<B>>) {
        insert_object(&mut self.objects.lock(), object);
    }

    /// Returns the object of an inode if it is in use.
    pub(crate) fn find_object(&self, key: ObjectKey) -> Option<Arc<Object<B>>> {
        self.objects.lock().get(&key).and_then(Weak::upgrade)
    }

    /// Removes an inode that no longer exists from the table. References to its object stay valid.
    pub(crate) fn remove(&self, key: ObjectKey) {
        self.objects.lock().remove(&key);
    }

    /// Asserts the invariants, in debug builds.
    pub(crate) fn check_invariants(&self) {
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

/// Inserts an object into the table, or replaces the entry of its key.
fn insert_object<B: Backing>(
    objects: &mut HashMap<ObjectKey, Weak<Object<B>>>,
    object: &Arc<Object<B>>,
) {
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
