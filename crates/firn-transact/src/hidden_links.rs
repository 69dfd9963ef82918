//! [`HiddenLinks`]: the table of links that Firn itself made, below `.firn/`, to objects of the mount.
//!
//! `.firn/` is Firn's own directory in the backing, the directory below the mount. Programs do not see these links, so
//! `st_nlink` must not count them.
//!
//! Invariant: if the table has a link to an object that is in use, [`Object::may_hide_links`] is true for it.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use firn_backing::Backing;
use firn_backing::lock::Mutex;

use crate::object::{MAY_HAVE_HIDDEN_LINKS, Object, ObjectKey};

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

/// One hidden link.
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

/// All hidden links, by the objects that they lead to.
pub(crate) struct HiddenLinks<B: Backing> {
    pub(crate) by_object: Mutex<HashMap<ObjectKey, Vec<HiddenLink<B>>>>,
}

impl<B: Backing> Default for HiddenLinks<B> {
    fn default() -> Self {
        Self {
            by_object: Mutex::default(),
        }
    }
}

impl<B: Backing> HiddenLinks<B> {
    /// Marks an object that is now in use if the table has links to it.
    pub(crate) fn mark_if_listed(&self, object: &Object<B>) {
        let links_by_object = self.by_object.lock();
        if links_by_object.contains_key(&object.key) {
            object.mark_hidden_links(true);
        }
    }
}

impl<B: Backing> Object<B> {
    /// Records whether the object has hidden links, and counts the change. The caller has locked the table.
    pub(crate) fn mark_hidden_links(&self, has_links: bool) {
        // With the lowest bit set, the addition clears that bit and adds one to the count in the other bits.
        let old_version = self.hidden_links_version.load(Ordering::Acquire);
        let unmarked = (old_version | MAY_HAVE_HIDDEN_LINKS) + 1;
        let mark = if has_links { MAY_HAVE_HIDDEN_LINKS } else { 0 };
        self.hidden_links_version
            .store(unmarked | mark, Ordering::Release);
    }
}
