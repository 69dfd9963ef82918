//! [`OwnLinks`]: link counts without Firn's own links.
//!
//! Objects of the backing may have one more name below `.firn/`, which programs must not see in `st_nlink`:
//! * an *anchor*, by which an object is found after a crash;
//! * a name in `kept/`, which a removed object has in shadow mode;
//! * `.firn/` itself, which is one more subdirectory of the top.
//!
//! Promise: [`OwnLinks::attr_without_own_links`] subtracts a link if and only if the backing has counted it.
//!
//! Race: attributes may be read while such a link is made or removed. A link is entered in the table before it is made,
//! and its entry is removed after the link. While a link may be either there or not, a reader looks it up before and
//! after it reads the attributes, and repeats all three if the answers differ.

use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Attr, Backing, Errno, Kind, Result};

use crate::hidden_links::{HiddenLink, LinkPresence};
use crate::lower_backing::LowerBacking;
use crate::object::{HAS_LINKS, Key, Object};
use crate::own::OwnError;
use crate::scope::Scope;
use crate::staging;
use crate::tree::Tree;

/// Serial number for links that belong to no transaction. No transaction has this number.
const NO_SERIAL: u64 = 0;

/// Subtracts Firn's own links from the link counts that programs see.
pub(crate) struct OwnLinks<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) tree: Arc<Tree<B>>,
}

impl<B: Backing> OwnLinks<B> {
    pub(crate) fn new(lower: &Arc<LowerBacking<B>>, tree: &Arc<Tree<B>>) -> Self {
        Self {
            lower: Arc::clone(lower),
            tree: Arc::clone(tree),
        }
    }

    /// Returns the backing's attributes of an object, with Firn's own links subtracted.
    pub(crate) fn attr_without_own_links(
        &self,
        object: &Object<B>,
        inode: &B::Inode,
    ) -> Result<Attr> {
        loop {
            let version = object.hides.load(Ordering::Acquire);
            if version & HAS_LINKS == 0 {
                let attr = self.lower.base.attr(inode)?;
                if object.hides.load(Ordering::Acquire) == version {
                    return Ok(attr);
                }
                continue;
            }
            let links = self
                .tree
                .hidden
                .0
                .lock()
                .get(&object.key)
                .cloned()
                .unwrap_or_default();
            let exist = self.which_links_exist(&links)?;
            let attr = self.lower.base.attr(inode)?;
            let is_same = self.which_links_exist(&links)? == exist;
            if !is_same || object.hides.load(Ordering::Acquire) != version {
                continue;
            }
            self.forget_removed_links(object, &links, &exist);
            let count = exist.iter().filter(|exists| **exists).count() as u32;
            // Some file systems do not count subdirectories and say 1.
            let hidden = if object.kind != Kind::Dir || attr.nlink > 1 {
                count
            } else {
                0
            };
            return Ok(Attr {
                nlink: attr.nlink.saturating_sub(hidden),
                ..attr
            });
        }
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

    /// Removes the entries of links that were about to be removed and no longer exist.
    fn forget_removed_links(&self, object: &Object<B>, links: &[HiddenLink<B>], exist: &[bool]) {
        let is_removed = |(link, exists): (&HiddenLink<B>, &bool)| {
            link.presence == LinkPresence::AboutToBeRemoved && !exists
        };
        if !links.iter().zip(exist).any(is_removed) {
            return;
        }
        let mut table = self.tree.hidden.0.lock();
        let Some(present_links) = table.get_mut(&object.key) else {
            return;
        };
        present_links.retain(|link| {
            link.presence != LinkPresence::AboutToBeRemoved
                || !links.iter().zip(exist).any(|(removed, exists)| {
                    is_removed((removed, exists))
                        && (removed.serial, &removed.name) == (link.serial, &link.name)
                })
        });
        let has_links = !present_links.is_empty();
        if !has_links {
            table.remove(&object.key);
        }
        object.note_hidden_links(has_links);
    }

    /// Notes a link of Firn's own, `name` in `dir`, that the caller is about to make.
    pub(crate) fn note_link_before_making(
        &self,
        scope: &Scope<B>,
        object: &Object<B>,
        dir: &B::Inode,
        name: &str,
    ) {
        self.enter_link(scope.serial, object, dir, name, LinkPresence::AboutToBeMade);
    }

    /// Records that a link exists now that [`Self::note_link_before_making`] announced.
    pub(crate) fn note_link_made(
        &self,
        scope: &Scope<B>,
        object: &Object<B>,
        dir: &B::Inode,
        name: &str,
    ) {
        self.enter_link(scope.serial, object, dir, name, LinkPresence::Exists);
    }

    /// Records that Firn's own links of an object may or may not exist, because a move to `kept/` was reverted and the
    /// revert may have failed.
    pub(crate) fn note_links_uncertain(&self, scope: &Scope<B>, object: &Object<B>) {
        let mut table = self.tree.hidden.0.lock();
        let Some(links) = table.get_mut(&object.key) else {
            return;
        };
        links.retain_mut(|link| {
            let is_of_scope = link.serial == scope.serial;
            if is_of_scope {
                link.presence = LinkPresence::AboutToBeMade;
            }
            !(is_of_scope && link.is_dir)
        });
        let has_links = !links.is_empty();
        if !has_links {
            table.remove(&object.key);
        }
        object.note_hidden_links(has_links);
    }

    /// Enters a link in the table, or changes its presence to `Exists`.
    fn enter_link(
        &self,
        serial: u64,
        object: &Object<B>,
        dir: &B::Inode,
        name: &str,
        presence: LinkPresence,
    ) {
        let mut table = self.tree.hidden.0.lock();
        let links = table.entry(object.key).or_default();
        match links
            .iter_mut()
            .find(|link| link.serial == serial && link.name == name)
        {
            // A caller that repeats a failed call announces the same link again.
            Some(link) if presence == LinkPresence::Exists => link.presence = presence,
            Some(_) => {}
            None => {
                // The top's entry stands for the name `.firn` in it, not for a name of the top itself.
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
        object.note_hidden_links(true);
    }

    /// Notes a link that an earlier firnd has made.
    pub(crate) fn note_link_found(
        &self,
        serial: u64,
        key: Key,
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
        self.tree.hidden.0.lock().entry(key).or_default().push(link);
        self.note_hidden_links_of(key);
    }

    /// Notes a link that exists until its transaction ends.
    pub(crate) fn note_link_until_end(&self, serial: u64, key: Key, dir: &B::Inode, name: String) {
        let mut table = self.tree.hidden.0.lock();
        let links = table.entry(key).or_default();
        if !links
            .iter()
            .any(|link| link.serial == serial && link.name == name)
        {
            let presence = LinkPresence::AboutToBeRemoved;
            links.push(HiddenLink {
                serial,
                dir: dir.clone(),
                name,
                presence,
                is_dir: false,
            });
        }
        drop(table);
        self.note_hidden_links_of(key);
    }

    /// Notes that the top has the subdirectory `.firn/`, which programs do not see.
    pub(crate) fn note_staging_top(&self) {
        self.enter_staging_top(LinkPresence::Exists);
    }

    /// Makes the staging directory, and notes `.firn/` before it exists, so that programs never see it in the link
    /// count of the top. Returns the staging directory.
    pub(crate) fn make_hidden_staging_dir(&self) -> std::result::Result<B::Inode, OwnError> {
        self.enter_staging_top(LinkPresence::AboutToBeMade);
        let staging_dir = self.lower.staging_dir()?;
        self.enter_staging_top(LinkPresence::Exists);
        Ok(staging_dir)
    }

    /// Enters the name `.firn` in the top of the backing.
    fn enter_staging_top(&self, presence: LinkPresence) {
        let dir = self.lower.base.root();
        self.enter_link(NO_SERIAL, self.tree.top(), &dir, staging::TOP, presence);
    }

    /// Records that the links of a transaction are about to be removed.
    pub(crate) fn note_links_ending(&self, scope: &Scope<B>) {
        self.change_links(scope.serial, |link| {
            link.presence = LinkPresence::AboutToBeRemoved;
            true
        });
    }

    /// Removes the entries of directories that an abort has moved back to their places.
    pub(crate) fn forget_links_of_dirs(&self, scope: &Scope<B>) {
        self.change_links(scope.serial, |link| !link.is_dir);
    }

    /// Removes all entries of a transaction, after its directory was removed.
    pub(crate) fn forget_links(&self, scope: &Scope<B>) {
        self.change_links(scope.serial, |_| false);
    }

    /// Changes the entries of a transaction's links. An entry for which `change` returns false is removed.
    fn change_links(&self, serial: u64, mut change: impl FnMut(&mut HiddenLink<B>) -> bool) {
        let keys_of_transaction: Vec<Key> = {
            let table = self.tree.hidden.0.lock();
            table
                .iter()
                .filter(|(_, links)| links.iter().any(|l| l.serial == serial))
                .map(|(key, _)| *key)
                .collect()
        };
        for key in keys_of_transaction {
            let mut table = self.tree.hidden.0.lock();
            let Some(links) = table.get_mut(&key) else {
                continue;
            };
            links.retain_mut(|link| link.serial != serial || change(link));
            if links.is_empty() {
                table.remove(&key);
            }
            drop(table);
            self.note_hidden_links_of(key);
        }
    }

    /// Updates the mark of an object whose entry changed, if the object is in use.
    fn note_hidden_links_of(&self, key: Key) {
        if let Some(object) = self.tree.known(key) {
            let table = self.tree.hidden.0.lock();
            object.note_hidden_links(table.contains_key(&key));
        }
    }
}
