//! The table of links of Firn's own: names of objects of the backing that are below `.firn/` and are not shown.
//!
//! Invariant: while the table has a link to an object that is referred to, [`Object::may_hide_links`] is true.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use firn_backing::Backing;
use firn_backing::lock::Mutex;

use crate::object::{HAS_LINKS, Key, Object};

/// State of a link.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presence {
    /// It is about to be made.
    Comes,
    /// It is there.
    There,
    /// It is about to be removed, or to become a name that is shown; perhaps by another host.
    Goes,
}

/// A name that is not shown.
pub(crate) struct Link<B: Backing> {
    /// The transaction that it is of.
    pub(crate) serial: u64,
    pub(crate) dir: B::Inode,
    pub(crate) name: String,
    pub(crate) presence: Presence,
    /// It is the one name of a directory that was removed.
    pub(crate) is_dir: bool,
}

impl<B: Backing> Clone for Link<B> {
    fn clone(&self) -> Self {
        Self {
            dir: self.dir.clone(),
            name: self.name.clone(),
            ..*self
        }
    }
}

/// All of them, by the objects that they lead to.
pub(crate) struct HiddenLinks<B: Backing>(pub(crate) Mutex<HashMap<Key, Vec<Link<B>>>>);

impl<B: Backing> Default for HiddenLinks<B> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<B: Backing> HiddenLinks<B> {
    /// Called for an object that gets known.
    pub(crate) fn note_known(&self, object: &Object<B>) {
        let table = self.0.lock();
        if table.contains_key(&object.key) {
            object.note_links(true);
        }
    }
}

impl<B: Backing> Object<B> {
    /// Called with the table locked.
    pub(crate) fn note_links(&self, has: bool) {
        let next = (self.hides.load(Ordering::Acquire) | HAS_LINKS) + 1;
        self.hides
            .store(next | if has { HAS_LINKS } else { 0 }, Ordering::Release);
    }
}
