//! The top of a scope, and what it is called in its parent, a directory that the transaction does not cover.
//!
//! | state | the name that programs see | reserved, invisible |
//! |---|---|---|
//! | made in buffer mode | from here | |
//! | renamed in buffer mode | the new one, from here | that at the begin |
//! | renamed in shadow mode | the new one, in the backing | that at the begin |
//! | prepared by an earlier firnd, buffer mode | that at the begin, in the backing, if it was there | that after the commit |
//! | commit that is being undone | that of the commit, in the backing | that before the commit |

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use firn_backing::lock::Mutex;
use firn_backing::{Backing, Time};

use super::Scope;
use crate::change_log::ChangeLog;
use crate::object::Object;
use crate::paths::{join, last_name, parent_of};
use crate::uses::Area;

/// The top of a scope, seen from its parent.
pub(crate) struct Top<B: Backing> {
    /// `None`: it is the top of the backing.
    parent: Option<Arc<Object<B>>>,
    pub(crate) names: Mutex<TopNames>,
}

/// What the top is called.
#[derive(Clone, Debug, Default)]
pub(crate) struct TopNames {
    /// When the transaction began.
    pub(crate) first: Option<OsString>,
    /// In the backing before the transaction.
    pub(crate) before: Option<OsString>,
    /// As programs see it.
    pub(crate) now: Option<OsString>,
    /// Once the log of an earlier firnd is applied.
    pub(crate) after: Option<OsString>,
    /// The backing does not have a changed name: programs see it from here.
    is_held: bool,
    /// When it got its name.
    pub(crate) touched: Option<Time>,
}

impl TopNames {
    /// The name at the begin, and the one that a recovered log gives.
    pub(crate) fn reserved(&self) -> impl Iterator<Item = &OsString> {
        let all = [&self.first, &self.after].into_iter().flatten();
        all.filter(|name| self.now.as_ref() != Some(*name))
    }

    /// The name that programs see and the backing does not have.
    pub(crate) fn shown(&self) -> Option<&OsString> {
        let is_changed = self.before != self.now;
        self.now.as_ref().filter(|_| self.is_held && is_changed)
    }

    fn changes_parent(&self) -> bool {
        self.shown().is_some() || self.reserved().next().is_some()
    }
}

impl<B: Backing> Top<B> {
    /// Names of the scope with this top, `path` at the begin. `recovered` is the log of an earlier firnd.
    pub(crate) fn new(
        root: &Arc<Object<B>>,
        path: &[u8],
        recovered: Option<&ChangeLog>,
        is_shadow: bool,
    ) -> Self {
        let (parent, name) = root.location.lock().clone().unzip();
        let first = last_name(path);
        let change = recovered.and_then(|log| log.top.as_ref());
        let is_new = change.is_some_and(|top| top.is_new);
        let names = TopNames {
            before: first.clone().filter(|_| !is_new),
            first,
            now: name.filter(|_| !is_new || is_shadow),
            after: change.and_then(|top| last_name(&top.path_after)),
            is_held: !is_shadow && recovered.is_none(),
            touched: None,
        };
        Self {
            parent,
            names: Mutex::new(names),
        }
    }

    /// Of a scope of names, whose directory is no part of it.
    pub(crate) fn none() -> Self {
        Self {
            parent: None,
            names: Mutex::default(),
        }
    }

    pub(crate) fn parent(&self) -> Option<&Arc<Object<B>>> {
        self.parent.as_ref()
    }

    pub(crate) fn names(&self) -> TopNames {
        self.names.lock().clone()
    }

    /// Whether the parent shows another name than the backing, or hides one.
    pub(crate) fn changes_parent(&self) -> bool {
        self.names.lock().changes_parent()
    }

    pub(crate) fn is_in(&self, dir: &Object<B>) -> bool {
        self.parent
            .as_ref()
            .is_some_and(|parent| std::ptr::eq(&raw const **parent, dir))
    }

    /// The log of an earlier firnd is undone and not applied: then the top is called this.
    pub(crate) fn set_name_after(&self, path: &[u8]) {
        self.names.lock().after = last_name(path);
    }
}

impl<B: Backing> Scope<B> {
    /// The areas that a begin or end keeps: all of the scope and, where its name differs from that in the backing, the
    /// directory that it is in.
    pub(crate) fn parts(&self) -> Vec<Area<B>> {
        let mut parts = vec![self.area()];
        let parent = self.top.parent().filter(|_| self.top.changes_parent());
        parts.extend(parent.map(|parent| Area::Dir(Arc::clone(parent))));
        parts
    }

    /// Path under which programs see it, relative to the backing.
    pub(crate) fn path_now(&self) -> Vec<u8> {
        match self.top.names().now {
            Some(name) => join(parent_of(&self.path), name.as_bytes()),
            None => self.path.clone(),
        }
    }

    /// Path that it has after its commit.
    pub(crate) fn path_after(&self) -> Vec<u8> {
        match self.top.names().after {
            Some(name) => join(parent_of(&self.path), name.as_bytes()),
            None => self.path_now(),
        }
    }

    /// Whether this is its path: that at the begin, the present one, or the one after the commit.
    pub(crate) fn is_at(&self, path: &[u8]) -> bool {
        let names = self.top.names();
        let is_one_of = |name: &OsString| last_name(path).as_ref() == Some(name);
        let mut all = [&names.now, &names.after].into_iter().flatten();
        path == self.path
            || (parent_of(path) == parent_of(&self.path) && all.any(is_one_of) && !path.is_empty())
    }
}
