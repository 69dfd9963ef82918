//! A backing whose directories can be in a transaction.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Weak};

use firn_backing::Backing;
use firn_rendezvous::Members;
use parking_lot::{Mutex, RwLock};

use crate::backup::Mirror;
use crate::hidden::HiddenLinks;
use crate::object::{Key, Object};
use crate::scope::{ArenaId, Scope};
use crate::shadow::Mode;

/// A backing whose directories can be in a transaction.
pub struct Held<B: Backing> {
    pub(crate) base: B,
    top: Arc<Object<B>>,
    pub(crate) objects: Mutex<HashMap<Key, Weak<Object<B>>>>,
    /// Commits of a scope that can be undone.
    pub(crate) history: u32,
    /// Where several hosts commit together.
    pub(crate) members: Option<Members>,
    /// [`Opening::arena`].
    pub(crate) arena: Option<ArenaId>,
    /// Of transactions that begin.
    pub(crate) mode: Mode,
    /// The host that aborted the last transaction of a scope, where that was another one.
    pub(crate) stopped_by: Mutex<BTreeMap<Vec<u8>, String>>,
    /// Held by whoever leaves a vote, and by whoever says something in one without the lock of the names: made
    /// anew for that after the last host has left, it would stay for ever. Nothing else is locked meanwhile.
    pub(crate) leaving: Mutex<()>,
    /// Names of objects that are not shown.
    pub(crate) hidden: HiddenLinks<B>,
    pub(crate) scopes: RwLock<Vec<Arc<Scope<B>>>>,
    /// The second place for what is prepared.
    pub(crate) mirror: Option<Mirror<B>>,
    /// Directories of transactions that are over and could not be removed: they mean nothing.
    pub(crate) leftovers: Mutex<Vec<(u64, B::Inode)>>,
    /// Held by who changes the list of committed numbers.
    pub(crate) finishing: Mutex<()>,
    pub(crate) scope_count: AtomicUsize,
    pub(crate) last_serial: AtomicU64,
    /// Held for reading while names are looked up, for writing while a transaction changes them.
    pub(crate) tree: RwLock<()>,
    /// Held for reading while data is changed, for writing while a transaction begins, is prepared or ends.
    pub(crate) data: RwLock<()>,
}

impl<B: Backing> Drop for Held<B> {
    fn drop(&mut self) {
        // Names of a transaction that is still open lead to objects that lead to their directory.
        for scope in self.scopes.get_mut().drain(..) {
            for object in std::mem::take(&mut *scope.changed.lock()).into_values() {
                object.inner.write().change = None;
            }
        }
    }
}

impl<B: Backing> Held<B> {
    pub(crate) fn assemble(base: B, top: Arc<Object<B>>) -> Self {
        Self {
            base,
            top,
            objects: Mutex::default(),
            history: 0,
            members: None,
            arena: None,
            mode: Mode::Buffer,
            stopped_by: Mutex::default(),
            leaving: Mutex::default(),
            hidden: HiddenLinks::default(),
            scopes: RwLock::default(),
            mirror: None,
            leftovers: Mutex::default(),
            finishing: Mutex::new(()),
            scope_count: AtomicUsize::new(0),
            last_serial: AtomicU64::new(0),
            tree: RwLock::new(()),
            data: RwLock::new(()),
        }
    }

    /// What becomes of changes of transactions that begin.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The same, with transactions that begin in this mode.
    #[must_use]
    pub fn in_mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// The backing below.
    pub fn base(&self) -> &B {
        &self.base
    }

    pub(crate) fn top(&self) -> &Arc<Object<B>> {
        &self.top
    }

    /// The device that the top is on.
    pub(crate) fn device(&self) -> u64 {
        self.top.key.0
    }
}
