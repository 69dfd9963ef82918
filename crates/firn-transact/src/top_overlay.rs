//! [`TopOverlay`]: shows the uppermost directory of a transaction in its parent, under the name that programs gave it.
//!
//! Terms
//! * The *scope* of a transaction is the part of the tree that it covers, and the *top* is its uppermost directory. The
//!   parent of the top is not in the scope.
//! * In *buffer mode* changes are kept back until the commit. The backing (the directory below the mount) then does not
//!   have the name of a new or renamed top. Look-ups and listings of the parent add that name from here.
//! * A *reserved* name is hidden from programs, and no object may get it.

use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use firn_backing::{Attr, Backing, Errno, Time};

use crate::link_counts::LinkCounts;
use crate::lower_backing::LowerBacking;
use crate::namespace::NameAt;
use crate::object::{Object, ObjectKey};
use crate::scope::Scope;
use crate::scopes::Scopes;
use crate::staging;
use crate::transactional::TransactionalBacking;

/// How a name in a directory relates to the top of a scope.
pub(crate) enum TopName<B: Backing> {
    /// The name is not the name of a top.
    Unrelated,
    /// The name leads to the top. The backing does not have the name.
    Shown(Arc<Object<B>>),
    /// The name is invisible, and no object may be made there.
    Reserved,
}

/// A name in a directory that a transaction adds to the names of the backing, or hides.
pub(crate) struct ListedTop<B: Backing> {
    pub(crate) name: OsString,
    /// The top that the name leads to; `None` if the name is hidden.
    pub(crate) shown: Option<Arc<Object<B>>>,
}

/// Tops that a directory shows and the backing has under other names, or not at all.
struct ShownTops<B: Backing> {
    /// Scopes whose transactions made their tops.
    scopes_with_new_tops: Vec<Arc<Scope<B>>>,
    /// Times at which the tops got their names.
    change_times: Vec<Time>,
}

/// Shows or hides the names of tops in their parent directories.
pub struct TopOverlay<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) scopes: Arc<Scopes<B>>,
    pub(crate) link_counts: Arc<LinkCounts<B>>,
}

impl<B: Backing> TopOverlay<B> {
    pub(crate) fn new(
        lower: &Arc<LowerBacking<B>>,
        scopes: &Arc<Scopes<B>>,
        link_counts: &Arc<LinkCounts<B>>,
    ) -> Self {
        Self {
            lower: Arc::clone(lower),
            scopes: Arc::clone(scopes),
            link_counts: Arc::clone(link_counts),
        }
    }

    /// Returns how a name relates to the top of a scope. The caller is admitted to the names of the directory.
    pub(crate) fn find_top_name(&self, dir: &Arc<Object<B>>, name: &OsStr) -> TopName<B> {
        for scope in self.scopes.with_top_in(dir) {
            let names = scope.top.names();
            if names.overlay_name().is_some_and(|overlay| overlay == name) {
                return TopName::Shown(Arc::clone(&scope.root));
            }
            if names.reserved_names().any(|reserved| reserved == name) {
                return TopName::Reserved;
            }
        }
        TopName::Unrelated
    }

    /// Returns the names in a directory that transactions add to the names of the backing or hide.
    pub(crate) fn listed_tops_in(&self, dir: &Arc<Object<B>>) -> Vec<ListedTop<B>> {
        let mut listed_tops = Vec::new();
        for scope in self.scopes.with_top_in(dir) {
            let names = scope.top.names();
            listed_tops.extend(names.overlay_name().map(|name| ListedTop {
                name: name.clone(),
                shown: Some(Arc::clone(&scope.root)),
            }));
            listed_tops.extend(names.reserved_names().map(|name| ListedTop {
                name: name.clone(),
                shown: None,
            }));
        }
        listed_tops
    }

    /// Returns whether a transaction adds or hides names in a directory.
    pub(crate) fn has_tops_in(&self, dir: &Object<B>) -> bool {
        !self.scopes.with_top_in(dir).is_empty()
    }

    /// Returns the attributes of a directory as programs see them: with the link count and times from the *tops* that
    /// it shows, which are uppermost directories of transactions. The backing does not have new tops before the commit.
    pub(crate) fn attr_with_tops(&self, dir: &Object<B>, inode: &B::Inode) -> Result<Attr, Errno> {
        loop {
            let tops = self.shown_tops(dir);
            let are_in_backing =
                self.which_tops_are_in_backing(inode, &tops.scopes_with_new_tops)?;
            let mut attr = self.link_counts.attr_without_hidden_links(dir, inode)?;
            // A commit that is applied meanwhile moves tops to the backing, and its link count then includes them. If
            // that happened between the two look-ups, the attributes are read again.
            if self.which_tops_are_in_backing(inode, &tops.scopes_with_new_tops)? != are_in_backing
            {
                continue;
            }
            // A link count of 1 means that the file system does not count subdirectories.
            if attr.nlink > 1 {
                let missing_count = are_in_backing
                    .iter()
                    .filter(|is_in_backing| !**is_in_backing)
                    .count();
                attr.nlink += missing_count as u32;
            }
            for time in tops.change_times {
                attr.mtime = attr.mtime.max(time);
                attr.ctime = attr.ctime.max(time);
            }
            return Ok(attr);
        }
    }

    /// Returns the uppermost directories of transactions (tops) that `dir` shows under names that the backing does not
    /// have, because they were created or renamed before the commit.
    fn shown_tops(&self, dir: &Object<B>) -> ShownTops<B> {
        let mut tops = ShownTops {
            scopes_with_new_tops: Vec::new(),
            change_times: Vec::new(),
        };
        for scope in self.scopes.with_top_in(dir) {
            let names = scope.top.names();
            if names.overlay_name().is_none() {
                continue;
            }
            tops.change_times.extend(names.changed_at);
            if names.before.is_none() {
                tops.scopes_with_new_tops.push(scope);
            }
        }
        tops
    }

    /// Returns for each transaction whether its uppermost directory (top) has been moved to `dir` in the backing
    /// already. The transactions create their tops; the move is a step of the commit.
    fn which_tops_are_in_backing(
        &self,
        dir: &B::Inode,
        scopes: &[Arc<Scope<B>>],
    ) -> Result<Vec<bool>, Errno> {
        let is_moved = |scope: &Arc<Scope<B>>| {
            let Some(name) = scope.top.names().now else {
                return Ok(false);
            };
            // Before the decision nothing is moved.
            if scope.decided_id().is_none() {
                return Ok(false);
            }
            let found = staging::find(&self.lower.base, dir, &name)?;
            Ok(found.is_some_and(|(_, attr)| ObjectKey::from_attr(&attr) == scope.root.key))
        };
        scopes.iter().map(is_moved).collect()
    }

    /// Checks a name that is to be made. Fails with EEXIST if it leads to the top of a scope, and with EBUSY if it is
    /// reserved for one.
    pub(crate) fn must_not_be_top(&self, dir: &Arc<Object<B>>, name: &OsStr) -> Result<(), Errno> {
        match self.find_top_name(dir, name) {
            TopName::Unrelated => Ok(()),
            TopName::Shown(_) => Err(Errno::EXIST),
            TopName::Reserved => Err(Errno::BUSY),
        }
    }

    /// Checks a rename of an object that is no top. Fails with ENOENT if the old name is reserved for a top, because
    /// programs do not see it, and with EBUSY if the new name is that of a top or reserved for one.
    pub(crate) fn check_rename_beside_tops(
        &self,
        old: NameAt<'_, B>,
        new: NameAt<'_, B>,
    ) -> Result<(), Errno> {
        if matches!(self.find_top_name(old.dir, old.name), TopName::Reserved) {
            return Err(Errno::NOENT);
        }
        match self.find_top_name(new.dir, new.name) {
            TopName::Unrelated => Ok(()),
            TopName::Shown(_) | TopName::Reserved => Err(Errno::BUSY),
        }
    }

    /// Returns the top of the transaction whose scope is, was or will be at `path`; `None` if there is no transaction.
    pub fn top_at_path(&self, path: &[u8]) -> Option<Arc<Object<B>>> {
        let scope = self.scopes.at_path(path)?;
        Some(Arc::clone(&scope.root))
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Returns the path at the begin of the transaction in which programs make changes and whose scope is, was or will
    /// be at `path`. Returns `path` if there is no transaction.
    pub fn path_at_begin(&self, path: &[u8]) -> Vec<u8> {
        match self.current_transaction(path) {
            Some(transaction) => transaction.scope().to_vec(),
            None => path.to_vec(),
        }
    }
}
