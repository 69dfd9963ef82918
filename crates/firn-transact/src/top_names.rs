//! [`Tops`]: names of scopes' tops as programs see them in the parent directories.
//!
//! The top of a scope is the directory that a transaction covers. In buffer mode the backing does not have a new or
//! renamed top before the commit; look-ups and listings of the parent add its name from here.

use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use firn_backing::{Attr, Backing, Errno, Time};

use crate::hidden::OwnLinks;
use crate::lower_backing::LowerBacking;
use crate::names::NameAt;
use crate::object::Object;
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
    new: Vec<Arc<Scope<B>>>,
    /// Times at which the tops got their names.
    touched: Vec<Time>,
}

/// Answers which names of tops a directory shows or hides.
pub struct Tops<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) scopes: Arc<Scopes<B>>,
    pub(crate) own_links: Arc<OwnLinks<B>>,
}

impl<B: Backing> Tops<B> {
    pub(crate) fn new(
        lower: &Arc<LowerBacking<B>>,
        scopes: &Arc<Scopes<B>>,
        own_links: &Arc<OwnLinks<B>>,
    ) -> Self {
        Self {
            lower: Arc::clone(lower),
            scopes: Arc::clone(scopes),
            own_links: Arc::clone(own_links),
        }
    }

    /// Returns how a name relates to the top of a scope. The caller is admitted to the names of the directory.
    pub(crate) fn find_top_name(&self, dir: &Arc<Object<B>>, name: &OsStr) -> TopName<B> {
        for scope in self.scopes.with_top_in(dir) {
            let names = scope.top.names();
            if names.shown().is_some_and(|shown| shown == name) {
                return TopName::Shown(Arc::clone(&scope.root));
            }
            if names.reserved().any(|reserved| reserved == name) {
                return TopName::Reserved;
            }
        }
        TopName::Unrelated
    }

    /// Returns the names in a directory that transactions add to the names of the backing or hide.
    pub(crate) fn top_names_in(&self, dir: &Arc<Object<B>>) -> Vec<ListedTop<B>> {
        let mut found = Vec::new();
        for scope in self.scopes.with_top_in(dir) {
            let names = scope.top.names();
            found.extend(names.shown().map(|name| ListedTop {
                name: name.clone(),
                shown: Some(Arc::clone(&scope.root)),
            }));
            found.extend(names.reserved().map(|name| ListedTop {
                name: name.clone(),
                shown: None,
            }));
        }
        found
    }

    /// Returns whether a transaction adds or hides names in a directory.
    pub(crate) fn has_tops_in(&self, dir: &Object<B>) -> bool {
        !self.scopes.with_top_in(dir).is_empty()
    }

    /// Returns the attributes of a directory, with the link count and times that its shown tops give it.
    pub(crate) fn attr_with_tops(&self, dir: &Object<B>, inode: &B::Inode) -> Result<Attr, Errno> {
        loop {
            let tops = self.shown_tops(dir);
            let in_backing = self.which_are_in_backing(inode, &tops.new)?;
            let mut attr = self.own_links.attr_without_own_links(dir, inode)?;
            // A commit that is being applied moves tops to the backing. After such a move the attributes are read again.
            if self.which_are_in_backing(inode, &tops.new)? != in_backing {
                continue;
            }
            if attr.nlink > 1 {
                attr.nlink += in_backing.iter().filter(|is_there| !**is_there).count() as u32;
            }
            for time in tops.touched {
                (attr.mtime, attr.ctime) = (attr.mtime.max(time), attr.ctime.max(time));
            }
            return Ok(attr);
        }
    }

    /// Returns the new tops that a directory shows, and the times of all changed tops in it.
    fn shown_tops(&self, dir: &Object<B>) -> ShownTops<B> {
        let mut tops = ShownTops {
            new: Vec::new(),
            touched: Vec::new(),
        };
        for scope in self.scopes.with_top_in(dir) {
            let names = scope.top.names();
            if names.shown().is_none() {
                continue;
            }
            tops.touched.extend(names.touched);
            if names.before.is_none() {
                tops.new.push(scope);
            }
        }
        tops
    }

    /// Returns for each scope whether an application of its commit has moved the top to the backing already.
    fn which_are_in_backing(
        &self,
        dir: &B::Inode,
        scopes: &[Arc<Scope<B>>],
    ) -> Result<Vec<bool>, Errno> {
        let is_there = |scope: &Arc<Scope<B>>| {
            let Some(name) = scope.top.names().now else {
                return Ok(false);
            };
            if scope.decided().is_none() {
                return Ok(false);
            }
            let found = staging::find(&self.lower.base, dir, &name)?;
            Ok(found.is_some_and(|(_, attr)| (attr.dev, attr.ino) == scope.root.key))
        };
        scopes.iter().map(is_there).collect()
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
        let NameAt { dir: from, name } = old;
        let NameAt {
            dir: to,
            name: new_name,
        } = new;
        if matches!(self.find_top_name(from, name), TopName::Reserved) {
            return Err(Errno::NOENT);
        }
        match self.find_top_name(to, new_name) {
            TopName::Unrelated => Ok(()),
            TopName::Shown(_) | TopName::Reserved => Err(Errno::BUSY),
        }
    }

    /// Returns the top of the transaction whose scope is, was or will be at `path`; `None` if there is no transaction.
    pub fn top_at_path(&self, path: &[u8]) -> Option<Arc<Object<B>>> {
        let found = self.scopes.at_path(path)?;
        Some(Arc::clone(&found.root))
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Returns the path at the begin of the transaction in which programs make changes and whose scope is, was or will
    /// be at `path`. Returns `path` if there is no transaction.
    pub fn path_at_begin(&self, path: &[u8]) -> Vec<u8> {
        let current = self.current_transaction(path);
        current.map_or_else(|| path.to_vec(), |open| open.scope().to_vec())
    }
}
