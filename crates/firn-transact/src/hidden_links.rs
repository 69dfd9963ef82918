//! [`HiddenLinks`]: the table of Firn's own links, which are names below `.firn/` of objects of the backing.
//!
//! Programs do not see these links, so they must not be counted in `st_nlink`.
//!
//! Invariant: if the table has a link to an object that is in use, [`Object::may_hide_links`] is true for it.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use firn_backing::Backing;
use firn_backing::lock::Mutex;

use crate::object::{HAS_LINKS, Key, Object};

/// Whether a link exists in the backing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinkPresence {
    /// The link is about to be made, and may exist.
    AboutToBeMade,
    /// The link exists.
    Exists,
    /// The link is about to be removed or moved to a visible name, perhaps by another host, and may exist.
    AboutToBeRemoved,
}

/// One link of Firn's own.
pub(crate) struct HiddenLink<B: Backing> {
    /// Serial number of the transaction that the link belongs to.
    pub(crate) serial: u64,
    /// The directory of the link.
    pub(crate) dir: B::Inode,
    /// The name in that directory.
    pub(crate) name: String,
    /// Whether the link exists.
    pub(crate) presence: LinkPresence,
    /// Whether the link is the only name of a directory that was removed.
    pub(crate) is_dir: bool,
}

impl<B: Backing> Clone for HiddenLink<B> {
    fn clone(&self) -> Self {
        Self {
            dir: self.dir.clone(),
            name: self.name.clone(),
            ..*self
        }
    }
}

/// All links of Firn's own, by the objects that they lead to.
pub(crate) struct HiddenLinks<B: Backing>(pub(crate) Mutex<HashMap<Key, Vec<HiddenLink<B>>>>);

impl<B: Backing> Default for HiddenLinks<B> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<B: Backing> HiddenLinks<B> {
    /// Marks an object that is now in use if the table has links to it.
    pub(crate) fn note_known(&self, object: &Object<B>) {
        let table = self.0.lock();
        if table.contains_key(&object.key) {
            object.note_hidden_links(true);
        }
    }
}

impl<B: Backing> Object<B> {
    /// Notes whether the object has hidden links, and counts the change. The caller has locked the table.
    pub(crate) fn note_hidden_links(&self, has_links: bool) {
        let next = (self.hides.load(Ordering::Acquire) | HAS_LINKS) + 1;
        self.hides.store(
            next | if has_links { HAS_LINKS } else { 0 },
            Ordering::Release,
        );
    }
}
