//! The objects in use, by their inodes, and the locks of names and data.
//!
//! Invariants
//! * One object for each inode, whatever its number of names, while anybody refers to it.
//! * Who changes names or data of an object in a transaction does so while that is open, and holds the lock that
//!   a begin, prepare, commit or abort takes for writing. Names are locked before data.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, Weak};

use firn_backing::{Attr, Backing};
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::hidden_links::HiddenLinks;
use crate::object::{Inner, Key, Object};

/// The lock of the names: proof that they stay, or may be changed.
pub(crate) enum Names<'a> {
    Shared(#[allow(dead_code)] RwLockReadGuard<'a, ()>),
    Changing(#[allow(dead_code)] RwLockWriteGuard<'a, ()>),
}

/// The objects of a backing, and the locks of their names and data.
pub(crate) struct Tree<B: Backing> {
    top: Arc<Object<B>>,
    objects: Mutex<HashMap<Key, Weak<Object<B>>>>,
    /// Names of objects that are not shown.
    pub(crate) hidden: HiddenLinks<B>,
    /// Held for reading while names are looked up, for writing while a transaction changes them.
    pub(crate) names: RwLock<()>,
    /// Held for reading while data is changed, for writing while a transaction begins, is prepared or ends.
    pub(crate) data: RwLock<()>,
}

impl<B: Backing> Tree<B> {
    pub(crate) fn new(top: &Arc<Object<B>>) -> Self {
        Self {
            top: Arc::clone(top),
            objects: Mutex::new(HashMap::from([(top.key, Arc::downgrade(top))])),
            hidden: HiddenLinks::default(),
            names: RwLock::new(()),
            data: RwLock::new(()),
        }
    }

    pub(crate) fn top(&self) -> &Arc<Object<B>> {
        &self.top
    }

    /// The object of an inode that was found as `name` in `parent`.
    pub(crate) fn intern(
        &self,
        base: &B,
        inode: B::Inode,
        attr: &Attr,
        parent: &Arc<Object<B>>,
        name: &OsStr,
    ) -> Arc<Object<B>> {
        let key = (attr.dev, attr.ino);
        let mut objects = self.objects.lock();
        if let Some(object) = objects.get(&key).and_then(Weak::upgrade) {
            if object.parent().is_some() {
                object.move_to(parent, name);
            }
            return object;
        }
        let lane = base.lane_of(&inode);
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

    /// Takes up a new object of a transaction.
    pub(crate) fn adopt(&self, object: &Arc<Object<B>>) {
        insert(&mut self.objects.lock(), object);
    }

    /// The object of an inode, if anybody refers to it.
    pub(crate) fn known(&self, key: Key) -> Option<Arc<Object<B>>> {
        self.objects.lock().get(&key).and_then(Weak::upgrade)
    }

    /// The inode is gone; whoever refers to its object goes on with that.
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

fn insert<B: Backing>(objects: &mut HashMap<Key, Weak<Object<B>>>, object: &Arc<Object<B>>) {
    // Those that nobody refers to any more go when the table would grow.
    if objects.len() == objects.capacity() {
        objects.retain(|_, weak| weak.strong_count() > 0);
    }
    objects.insert(object.key, Arc::downgrade(object));
}

/// The path of an object, relative to the backing.
pub(crate) fn path_of<B: Backing>(object: &Object<B>) -> Vec<u8> {
    let mut names = Vec::new();
    let mut at = object.location.lock().clone();
    while let Some((parent, name)) = at {
        names.push(name);
        at = parent.location.lock().clone();
    }
    names.reverse();
    let names: Vec<&[u8]> = names.iter().map(|name| name.as_bytes()).collect();
    names.join(&b'/')
}
