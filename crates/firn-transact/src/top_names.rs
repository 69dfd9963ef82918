//! [`Tops`]: names of scopes' tops as programs see them in the parent directories.
//!
//! The top of a scope is the directory that a transaction covers. In buffer mode the backing does not have a new or
//! renamed top before the commit; look-ups and listings of the parent add its name from here.

use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use firn_backing::{Attr, Backing, Errno, Time};

use crate::hidden::OwnLinks;
use crate::lower_backing::LowerBacking;
use crate::object::Object;
use crate::scope::Scope;
use crate::scopes::Scopes;
use crate::staging;
use crate::transactional::TransactionalBacking;

/// What a name in a directory has to do with the top of a scope.
pub(crate) enum TopName<B: Backing> {
    /// Nothing.
    Unrelated,
    /// It leads to the top, and the backing does not have it.
    Shown(Arc<Object<B>>),
    /// The name is invisible, and nothing may be made there.
    Reserved,
}

/// A name in a directory that a transaction adds or hides.
pub(crate) struct ListedTop<B: Backing> {
    pub(crate) name: OsString,
    /// What it leads to.
    pub(crate) shown: Option<Arc<Object<B>>>,
}

/// Tops that a directory shows and the backing does not have.
struct ShownTops<B: Backing> {
    /// Scopes whose transactions made their tops.
    new: Vec<Arc<Scope<B>>>,
    /// When tops got their names.
    touched: Vec<Time>,
}

/// Names of tops of scopes in the directories above.
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

    /// Relation of a name to a scope's top. The caller holds the names.
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

    /// Names in a directory that are other ones than in the backing.
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

    /// Whether a directory shows other names than in the backing.
    pub(crate) fn has_tops_in(&self, dir: &Object<B>) -> bool {
        !self.scopes.with_top_in(dir).is_empty()
    }

    /// The attributes of a directory in which tops are that the backing does not have.
    pub(crate) fn attr_with_tops(&self, dir: &Object<B>, inode: &B::Inode) -> Result<Attr, Errno> {
        loop {
            let tops = self.shown_tops(dir);
            let there = self.which_tops_are_there(inode, &tops.new)?;
            let mut attr = self.own_links.attr_below(dir, inode)?;
            // A commit that is being applied moves them there.
            if self.which_tops_are_there(inode, &tops.new)? != there {
                continue;
            }
            if attr.nlink > 1 {
                attr.nlink += there.iter().filter(|is_there| !**is_there).count() as u32;
            }
            for time in tops.touched {
                (attr.mtime, attr.ctime) = (attr.mtime.max(time), attr.ctime.max(time));
            }
            return Ok(attr);
        }
    }

    /// The tops that a directory shows and the backing does not have.
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

    fn which_tops_are_there(
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

    /// For callers that make a name: EEXIST where it leads to the top of a scope, EBUSY where it is reserved for one.
    pub(crate) fn must_not_be_a_top(
        &self,
        dir: &Arc<Object<B>>,
        name: &OsStr,
    ) -> Result<(), Errno> {
        match self.find_top_name(dir, name) {
            TopName::Unrelated => Ok(()),
            TopName::Shown(_) => Err(Errno::EXIST),
            TopName::Reserved => Err(Errno::BUSY),
        }
    }

    /// For a rename of something else: a reserved name is not there, and nothing comes there.
    pub(crate) fn may_move_beside_tops(
        &self,
        (from, name): (&Arc<Object<B>>, &OsStr),
        (to, new_name): (&Arc<Object<B>>, &OsStr),
    ) -> Result<(), Errno> {
        if matches!(self.find_top_name(from, name), TopName::Reserved) {
            return Err(Errno::NOENT);
        }
        match self.find_top_name(to, new_name) {
            TopName::Unrelated => Ok(()),
            TopName::Shown(_) | TopName::Reserved => Err(Errno::BUSY),
        }
    }

    /// The top of the transaction that is known by `path`, also where programs do not see it yet.
    pub fn top_known_as(&self, path: &[u8]) -> Option<Arc<Object<B>>> {
        let found = self.scopes.at_path(path)?;
        Some(Arc::clone(&found.root))
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// The path at the begin of the transaction that programs change things in and that is known by `path`; without
    /// one, `path`.
    pub fn path_at_begin(&self, path: &[u8]) -> Vec<u8> {
        let current = self.current_transaction(path);
        current.map_or_else(|| path.to_vec(), |one| one.scope().to_vec())
    }
}
