//! A scope of names: some names in a directory and all below them, while the directory itself is in no transaction.
//!
//! Several of them may be in one directory at a time, each with its own names. What names of the directory lead to is noted in one
//! change of the directory, which belongs to none of the transactions: each entry says whose it is ([`Named::serial`]). So
//! look-ups and listings need not know how many transactions there are.
//!
//! Invariants
//! * No name is in two scopes.
//! * Before a name belongs to a scope, `tx-N/names` has it, durably, but for the first, which `tx-N/open` has: so an arena
//!   drops what was written there.
//! * The directory changes neither its place nor its attributes by a transaction of names in it.
//!
//! [`Named::serial`]: crate::object::Named::serial

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::Backing;
use firn_backing::lock::Mutex;

use super::Scope;
use crate::object::{Change, Inner, Object};
use crate::uses::Area;

/// Names in the directory of a scope; more may come while the transaction is open.
#[derive(Default)]
pub(crate) struct NameSet(Mutex<Arc<BTreeSet<OsString>>>);

impl NameSet {
    pub(crate) fn of(names: &[OsString]) -> Self {
        let names = names.iter().cloned().collect();
        Self(Mutex::new(Arc::new(names)))
    }

    pub(crate) fn all(&self) -> Arc<BTreeSet<OsString>> {
        Arc::clone(&self.0.lock())
    }

    pub(crate) fn has(&self, name: &OsStr) -> bool {
        self.0.lock().contains(name)
    }

    pub(crate) fn add(&self, names: &[OsString]) {
        let mut known = self.0.lock();
        Arc::make_mut(&mut *known).extend(names.iter().cloned());
    }
}

/// Whether an object is one of these names in a directory, or below one of them.
pub(crate) fn is_at_names<B: Backing>(
    object: &Arc<Object<B>>,
    dir: &Arc<Object<B>>,
    is_one: impl Fn(&OsStr) -> bool,
) -> bool {
    let mut at = object.location.lock().clone();
    while let Some((parent, name)) = at {
        if Arc::ptr_eq(&parent, dir) && is_one(&name) {
            return true;
        }
        at = parent.location.lock().clone();
    }
    false
}

impl<B: Backing> Scope<B> {
    /// Whether it is made of names in `dir`.
    pub(crate) fn has_names_in(&self, dir: &Object<B>) -> bool {
        self.names_in_root.is_some() && std::ptr::eq(Arc::as_ptr(&self.root), dir)
    }

    /// Whether a name in a directory is a part of it, and the directory is not.
    pub(crate) fn has_name(&self, dir: &Object<B>, name: &OsStr) -> bool {
        let names = self.names_in_root.as_ref();
        self.has_names_in(dir) && names.is_some_and(|names| names.has(name))
    }

    /// The area of the scope.
    pub(crate) fn area(&self) -> Area<B> {
        let root = Arc::clone(&self.root);
        match &self.names_in_root {
            None => Area::Tree(root),
            Some(names) => Area::Names(root, names.all()),
        }
    }

    /// Whether an object is in it.
    pub(crate) fn covers(&self, object: &Arc<Object<B>>) -> bool {
        match &self.names_in_root {
            None => object.is_below(&self.root),
            Some(names) => is_at_names(object, &self.root, |name| names.has(name)),
        }
    }

    /// The change of the directory, which scopes of names in it share.
    pub(super) fn shared_change<'a>(&self, inner: &'a mut Inner<B>) -> &'a mut Change<B> {
        inner
            .change
            .get_or_insert_with(|| Box::new(Change::new(0, None)))
    }

    /// It is over: names of its directory lead where they do in the backing.
    pub(crate) fn drop_names_in_root(&self) {
        if self.names_in_root.is_none() {
            return;
        }
        let owned = self.root.inner.own();
        let mut inner = owned.edit();
        let Some(change) = inner.change.as_mut() else {
            return;
        };
        change.names.retain(|_, named| named.serial != self.serial);
        change.links -= self.subdirectories_in_root.swap(0, Ordering::AcqRel);
        if change.names.is_empty() {
            inner.change = None;
        }
    }
}
