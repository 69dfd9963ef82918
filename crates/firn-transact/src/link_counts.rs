//! [`LinkCounts`]: link counts without *hidden links*, which are names below `.firn/` that Firn gives to objects.
//!
//! `.firn/` is Firn's own directory in the top of the backing, the directory below the mount. Programs must not see
//! hidden links in `st_nlink`. They are:
//! * an *anchor*, by which an object is found after a crash;
//! * a name in `kept/`, the directory of objects that a transaction removed at once and an abort restores;
//! * `.firn/` itself, which is one more subdirectory of the top.
//!
//! Promise: [`LinkCounts::attr_without_hidden_links`] subtracts a link if and only if the backing has counted it.
//!
//! Race: attributes may be read while a hidden link is created or removed. So a link is inserted into the table before
//! it is created, and its entry is removed after the link. While it is not known whether a link exists, a reader looks
//! it up before and after it reads the attributes. If the two answers differ, the reader starts again.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Attr, Backing, Errno, Kind, Result};

use crate::hidden_links::{HiddenLink, LinkPresence};
use crate::lower_backing::LowerBacking;
use crate::object::{MAY_HAVE_HIDDEN_LINKS, Object, ObjectKey};
use crate::own::OwnError;
use crate::scope::Scope;
use crate::staging;
use crate::tree::Tree;

/// Serial number for links that belong to no transaction. No transaction has this number.
const NO_SERIAL: u64 = 0;

/// Returns the attributes of an object with `hidden_count` links subtracted from the link count.
fn subtract_links(kind: Kind, attr: Attr, hidden_count: u32) -> Attr {
    // A link count of 1 means that the file system does not count subdirectories.
    let counts_hidden_links = kind != Kind::Dir || attr.nlink > 1;
    let nlink = if counts_hidden_links {
        attr.nlink.saturating_sub(hidden_count)
    } else {
        attr.nlink
    };
    Attr { nlink, ..attr }
}

/// Subtracts hidden links from the link counts that programs see.
pub(crate) struct LinkCounts<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) tree: Arc<Tree<B>>,
}

impl<B: Backing> LinkCounts<B> {
    pub(crate) fn new(lower: &Arc<LowerBacking<B>>, tree: &Arc<Tree<B>>) -> Self {
        Self {
            lower: Arc::clone(lower),
            tree: Arc::clone(tree),
        }
    }

    /// Returns the backing's attributes of an object, with hidden links subtracted from the link count. These are links
    /// below `.firn/` that Firn itself made and programs do not see.
    ///
    /// No lock is held during the calls of the backing. If `hidden_links_version` shows that the links changed
    /// meanwhile, everything is read again, as with a sequence lock.
    pub(crate) fn attr_without_hidden_links(
        &self,
        object: &Object<B>,
        inode: &B::Inode,
    ) -> Result<Attr> {
        loop {
            let version = object.hidden_links_version.load(Ordering::Acquire);
            let may_have_links = version & MAY_HAVE_HIDDEN_LINKS != 0;
            // Most objects have no hidden link, so nothing is looked up for them.
            if !may_have_links {
                let attr = self.lower.base.attr(inode)?;
                if object.hidden_links_version.load(Ordering::Acquire) == version {
                    return Ok(attr);
                }
                continue;
            }
            let links = self.hidden_links_of(object);
            let links_exist = self.which_links_exist(&links)?;
            let attr = self.lower.base.attr(inode)?;
            // The attributes count a link only if it exists, so each link is looked up before and after their read.
            let links_are_stable = self.which_links_exist(&links)? == links_exist;
            if !links_are_stable || object.hidden_links_version.load(Ordering::Acquire) != version {
                continue;
            }
            self.remove_deleted_links(object, &links, &links_exist);
            let hidden_count = links_exist.iter().filter(|exists| **exists).count() as u32;
            return Ok(subtract_links(object.kind, attr, hidden_count));
        }
    }

    /// Returns a copy of the table's entries for an object.
    fn hidden_links_of(&self, object: &Object<B>) -> Vec<HiddenLink<B>> {
        let links_by_object = self.tree.hidden_links.by_object.lock();
        links_by_object
            .get(&object.key)
            .cloned()
            .unwrap_or_default()
    }

    /// Returns, for each link, whether it exists in the backing.
    fn which_links_exist(&self, links: &[HiddenLink<B>]) -> Result<Vec<bool>> {
        let exists = |link: &HiddenLink<B>| match link.presence {
            LinkPresence::Exists => Ok(true),
            LinkPresence::AboutToBeMade | LinkPresence::AboutToBeRemoved => {
                match staging::find(&self.lower.base, &link.dir, OsStr::new(&link.name)) {
                    Ok(found) => Ok(found.is_some()),
                    // The directory of the link was removed, and the link with it.
                    Err(Errno::STALE) => Ok(false),
                    Err(errno) => Err(errno),
                }
            }
        };
        links.iter().map(exists).collect()
    }

    /// Removes from the table of hidden links (Firn's own links to objects) those that were about to be removed and no
    /// longer exist. `links` is a copy of the object's entries, and `links_exist` says for each of them whether it
    /// exists.
    fn remove_deleted_links(
        &self,
        object: &Object<B>,
        links: &[HiddenLink<B>],
        links_exist: &[bool],
    ) {
        // Serial number and name identify a link.
        let deleted: BTreeSet<(u64, &str)> = links
            .iter()
            .zip(links_exist)
            .filter(|&(link, &exists)| link.presence == LinkPresence::AboutToBeRemoved && !exists)
            .map(|(link, _)| (link.serial, link.name.as_str()))
            .collect();
        if deleted.is_empty() {
            return;
        }
        let mut links_by_object = self.tree.hidden_links.by_object.lock();
        let Some(listed_links) = links_by_object.get_mut(&object.key) else {
            return;
        };
        listed_links.retain(|link| {
            // Race: another thread may have created the link again since the copy was made. It then has another
            // presence and remains.
            let is_unchanged = link.presence == LinkPresence::AboutToBeRemoved;
            let is_deleted = deleted.contains(&(link.serial, link.name.as_str()));
            !(is_unchanged && is_deleted)
        });
        let has_links = !listed_links.is_empty();
        if !has_links {
            links_by_object.remove(&object.key);
        }
        object.mark_hidden_links(has_links);
    }

    /// Records a hidden link, `name` in `dir`, that the caller is about to create.
    pub(crate) fn record_link_before_creation(
        &self,
        scope: &Scope<B>,
        object: &Object<B>,
        dir: &B::Inode,
        name: &str,
    ) {
        self.insert_link(scope.serial, object, dir, name, LinkPresence::AboutToBeMade);
    }

    /// Records that a link exists which [`Self::record_link_before_creation`] has announced.
    pub(crate) fn record_link_created(
        &self,
        scope: &Scope<B>,
        object: &Object<B>,
        dir: &B::Inode,
        name: &str,
    ) {
        self.insert_link(scope.serial, object, dir, name, LinkPresence::Exists);
    }

    /// Records that it is not known whether an object still has its link in `kept/`, the directory of removed objects.
    /// The caller is about to move the object back from there, which may fail.
    ///
    /// The entry of a directory is removed from the table at once. A directory has one name only, so after the move it
    /// has no link in `kept/`.
    pub(crate) fn record_links_uncertain(&self, scope: &Scope<B>, object: &Object<B>) {
        let mut links_by_object = self.tree.hidden_links.by_object.lock();
        let Some(links) = links_by_object.get_mut(&object.key) else {
            return;
        };
        links.retain_mut(|link| {
            if link.serial != scope.serial {
                return true;
            }
            // This presence is used for any link that may or may not exist: each reader of attributes looks it up.
            link.presence = LinkPresence::AboutToBeMade;
            !link.is_dir
        });
        let has_links = !links.is_empty();
        if !has_links {
            links_by_object.remove(&object.key);
        }
        object.mark_hidden_links(has_links);
    }

    /// Inserts a link into the table of hidden links, which Firn itself made and programs do not see. If the table has
    /// the link already, only a `presence` of `Exists` is recorded.
    ///
    /// `serial` is the number of the link's transaction, and `name` the link's name in `dir`.
    fn insert_link(
        &self,
        serial: u64,
        object: &Object<B>,
        dir: &B::Inode,
        name: &str,
        presence: LinkPresence,
    ) {
        let mut links_by_object = self.tree.hidden_links.by_object.lock();
        let links = links_by_object.entry(object.key).or_default();
        let listed_link = links
            .iter_mut()
            .find(|link| link.serial == serial && link.name == name);
        match listed_link {
            Some(link) if presence == LinkPresence::Exists => link.presence = presence,
            // A caller that repeats a failed call announces the same link again.
            Some(_) => {}
            None => {
                // The link with `NO_SERIAL` is `.firn`. It is a subdirectory of `object`, the top of the backing, and
                // not a further name of a removed directory.
                let is_dir = object.kind == Kind::Dir && serial != NO_SERIAL;
                links.push(HiddenLink {
                    serial,
                    dir: dir.clone(),
                    name: name.to_owned(),
                    presence,
                    is_dir,
                });
            }
        }
        object.mark_hidden_links(true);
    }

    /// Records a hidden link, which programs do not see, that an earlier firnd (server of this mount) has created.
    ///
    /// `serial` is the number of the link's transaction. The object `key` need not be in use.
    pub(crate) fn record_found_link(
        &self,
        serial: u64,
        key: ObjectKey,
        dir: &B::Inode,
        name: String,
        is_dir: bool,
    ) {
        let link = HiddenLink {
            serial,
            dir: dir.clone(),
            name,
            presence: LinkPresence::Exists,
            is_dir,
        };
        self.tree
            .hidden_links
            .by_object
            .lock()
            .entry(key)
            .or_default()
            .push(link);
        self.update_hidden_links_mark(key);
    }

    /// Records a hidden link, which programs do not see, that exists until its transaction `serial` ends. Does nothing
    /// if the table has the link.
    ///
    /// Another thread or host may remove the link at any time, so its presence is `AboutToBeRemoved`: each reader of
    /// attributes looks the link up.
    pub(crate) fn record_link_until_end(
        &self,
        serial: u64,
        key: ObjectKey,
        dir: &B::Inode,
        name: String,
    ) {
        let mut links_by_object = self.tree.hidden_links.by_object.lock();
        let links = links_by_object.entry(key).or_default();
        let is_listed = links
            .iter()
            .any(|link| link.serial == serial && link.name == name);
        if !is_listed {
            links.push(HiddenLink {
                serial,
                dir: dir.clone(),
                name,
                presence: LinkPresence::AboutToBeRemoved,
                is_dir: false,
            });
        }
        // The next call takes this lock itself.
        drop(links_by_object);
        self.update_hidden_links_mark(key);
    }

    /// Records that the top has the subdirectory `.firn/`, which programs do not see.
    pub(crate) fn record_firn_dir_link(&self) {
        self.insert_firn_dir_link(LinkPresence::Exists);
    }

    /// Makes the directory of this mount's transactions, if it does not exist, and returns it.
    ///
    /// `.firn/` is recorded before it exists, so that programs never see it in the link count of the top.
    pub(crate) fn make_hidden_transactions_dir(&self) -> std::result::Result<B::Inode, OwnError> {
        self.insert_firn_dir_link(LinkPresence::AboutToBeMade);
        let transactions_dir = self.lower.make_transactions_dir()?;
        self.insert_firn_dir_link(LinkPresence::Exists);
        Ok(transactions_dir)
    }

    /// Inserts the link `.firn` in the top of the backing.
    fn insert_firn_dir_link(&self, presence: LinkPresence) {
        let dir = self.lower.base.root();
        self.insert_link(
            NO_SERIAL,
            self.tree.top(),
            &dir,
            staging::FIRN_DIR,
            presence,
        );
    }

    /// Records that the links of a transaction are about to be removed.
    pub(crate) fn mark_links_ending(&self, scope: &Scope<B>) {
        self.change_links(scope.serial, |link| {
            link.presence = LinkPresence::AboutToBeRemoved;
            true
        });
    }

    /// Removes the entries of directories that an abort has moved back to their places.
    pub(crate) fn remove_links_of_dirs(&self, scope: &Scope<B>) {
        self.change_links(scope.serial, |link| !link.is_dir);
    }

    /// Removes all entries of a transaction, after its directory was removed.
    pub(crate) fn remove_links(&self, scope: &Scope<B>) {
        self.change_links(scope.serial, |_| false);
    }

    /// Calls `change` for each hidden link (made by Firn, not seen by programs) of the transaction `serial`. An entry
    /// for which `change` returns false is removed from the table; the link itself is not.
    fn change_links(&self, serial: u64, mut change: impl FnMut(&mut HiddenLink<B>) -> bool) {
        let keys_of_transaction: Vec<ObjectKey> = {
            let links_by_object = self.tree.hidden_links.by_object.lock();
            links_by_object
                .iter()
                .filter(|(_, links)| links.iter().any(|link| link.serial == serial))
                .map(|(key, _)| *key)
                .collect()
        };
        for key in keys_of_transaction {
            // The lock is taken anew for each object, because `update_hidden_links_mark` takes it itself.
            let mut links_by_object = self.tree.hidden_links.by_object.lock();
            let Some(links) = links_by_object.get_mut(&key) else {
                continue;
            };
            links.retain_mut(|link| link.serial != serial || change(link));
            if links.is_empty() {
                links_by_object.remove(&key);
            }
            drop(links_by_object);
            self.update_hidden_links_mark(key);
        }
    }

    /// Updates the mark of an object whose entry changed, if the object is in use.
    fn update_hidden_links_mark(&self, key: ObjectKey) {
        if let Some(object) = self.tree.find_object(key) {
            let links_by_object = self.tree.hidden_links.by_object.lock();
            object.mark_hidden_links(links_by_object.contains_key(&key));
        }
    }
}
