//! Scopes of names: transactions that cover some names in a directory and all below them, but not the directory itself.
//! For example, one transaction covers `step-7.1` and `step-7.2` in `out/`, and another one covers `step-8.1`.
//!
//! All transactions of names in one directory record their changed names in one list, [`Change::names`] of the
//! directory. Each entry has the serial number of its transaction ([`NameChange::serial`]). So look-ups and listings
//! do not depend on the number of transactions.
//!
//! Invariants
//! * No name is in two scopes.
//! * Before a name belongs to a scope, the name is durable: the first name in `tx-N/open`, all others in `tx-N/names`.
//!   After an abort, an arena (a mount's memory with data that is not written to the backing yet) therefore finds all
//!   paths below which it must drop data.
//! * A transaction of names changes neither the place nor the attributes of the directory.
//!
//! [`NameChange::serial`]: crate::object::NameChange::serial

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::Backing;
use firn_backing::lock::Mutex;

use super::Scope;
use crate::object::{Change, Object, ObjectState};
use crate::uses::Area;

/// Number of the change of a directory that its scopes of names share. No transaction has this change in its list of
/// changed objects, where numbers begin at 1.
const SHARED_CHANGE_NUMBER: u64 = 0;

/// The names of a scope of names. Names may be added while the transaction is open: a snapshot that was taken before
/// then remains as it was.
#[derive(Default)]
pub(crate) struct NameSet(Mutex<Arc<BTreeSet<OsString>>>);

impl NameSet {
    pub(crate) fn from_names(names: &[OsString]) -> Self {
        let names = names.iter().cloned().collect();
        Self(Mutex::new(Arc::new(names)))
    }

    pub(crate) fn snapshot(&self) -> Arc<BTreeSet<OsString>> {
        Arc::clone(&self.0.lock())
    }

    pub(crate) fn contains(&self, name: &OsStr) -> bool {
        self.0.lock().contains(name)
    }

    pub(crate) fn extend(&self, names: &[OsString]) {
        let mut set = self.0.lock();
        Arc::make_mut(&mut *set).extend(names.iter().cloned());
    }
}

/// Returns whether an object is at or below a name in `dir` for which `is_selected` returns true.
pub(crate) fn is_at_names<B: Backing>(
    object: &Arc<Object<B>>,
    dir: &Arc<Object<B>>,
    is_selected: impl Fn(&OsStr) -> bool,
) -> bool {
    let mut location = object.location.lock().clone();
    while let Some((parent, name)) = location {
        if Arc::ptr_eq(&parent, dir) && is_selected(&name) {
            return true;
        }
        location = parent.location.lock().clone();
    }
    false
}

impl<B: Backing> Scope<B> {
    /// Returns whether this is a scope of names in `dir`.
    pub(crate) fn has_names_in(&self, dir: &Object<B>) -> bool {
        self.names_in_root.is_some() && std::ptr::eq(Arc::as_ptr(&self.root), dir)
    }

    /// Returns whether this is a scope of names that has `name` in `dir`.
    pub(crate) fn has_name(&self, dir: &Object<B>, name: &OsStr) -> bool {
        let names = self.names_in_root.as_ref();
        self.has_names_in(dir) && names.is_some_and(|names| names.contains(name))
    }

    /// Returns the area of the tree that the scope covers.
    pub(crate) fn area(&self) -> Area<B> {
        let root = Arc::clone(&self.root);
        match &self.names_in_root {
            None => Area::Tree(root),
            Some(names) => Area::Names(root, names.snapshot()),
        }
    }

    /// Returns whether an object is in the scope.
    pub(crate) fn covers(&self, object: &Arc<Object<B>>) -> bool {
        match &self.names_in_root {
            None => object.is_below(&self.root),
            Some(names) => is_at_names(object, &self.root, |name| names.contains(name)),
        }
    }

    /// Returns the change of the directory that its scopes of names share.
    pub(super) fn shared_change<'a>(&self, state: &'a mut ObjectState<B>) -> &'a mut Change<B> {
        state
            .change
            .get_or_insert_with(|| Box::new(Change::new(SHARED_CHANGE_NUMBER, None)))
    }

    /// At the end of a transaction of names, drops its names from the directory's shared change. Programs then see the
    /// backing's names. Does nothing to any other scope.
    pub(crate) fn drop_names_in_root(&self) {
        if self.names_in_root.is_none() {
            return;
        }
        let claimed = self.root.state.acquire_exclusive();
        let mut state = claimed.edit();
        let Some(change) = state.change.as_mut() else {
            return;
        };
        change.names.retain(|_, named| named.serial != self.serial);
        change.link_delta -= self.subdirectories_in_root.swap(0, Ordering::AcqRel);
        if change.names.is_empty() {
            state.change = None;
        }
    }
}
