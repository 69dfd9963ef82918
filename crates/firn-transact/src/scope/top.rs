//! [`ScopeTop`]: the names of a transaction's uppermost directory in its parent, which the transaction does not cover.
//!
//! Terms
//! * The *scope* of a transaction is what it covers; the *top* is its uppermost directory.
//! * In *buffer mode* changes are kept back until the commit. In *shadow mode* the backing, the directory below the
//!   mount, has them at once.
//! * An *overlay* name is seen from this table, because the backing does not have it.
//! * A *reserved* name is invisible to programs, and no object may get it.
//! * An earlier *firnd* is the process that served the mount before.
//!
//! | state | name that programs see | reserved name |
//! |---|---|---|
//! | created in buffer mode | the new one (overlay) | |
//! | renamed in buffer mode | the new one (overlay) | the one at the begin |
//! | renamed in shadow mode | the new one, in the backing | the one at the begin |
//! | prepared by an earlier firnd, buffer mode | the one at the begin, if it existed | the one after the commit |
//! | commit that is being undone | the one of the commit | the one before the commit |

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
pub(crate) struct ScopeTop<B: Backing> {
    /// The parent; `None` for the top of the backing and for scopes of names.
    parent: Option<Arc<Object<B>>>,
    pub(crate) names: Mutex<TopNames>,
}

/// The names of a top at different times. `None` stands for no name.
#[derive(Clone, Debug, Default)]
pub(crate) struct TopNames {
    /// Name at the begin of the transaction.
    pub(crate) at_begin: Option<OsString>,
    /// Name in the backing before the transaction; `None` if the transaction creates the top.
    pub(crate) before: Option<OsString>,
    /// Name that programs see.
    pub(crate) now: Option<OsString>,
    /// Name after the log of an earlier firnd is applied.
    pub(crate) after: Option<OsString>,
    /// Whether the backing lacks a changed name, so that programs see it from this table.
    is_overlay: bool,
    /// Time at which the top got its present name.
    pub(crate) changed_at: Option<Time>,
}

impl TopNames {
    /// Returns the reserved names: the one at the begin and, for a recovered transaction, the one after its commit. The
    /// name that programs see now is not one of them.
    pub(crate) fn reserved_names(&self) -> impl Iterator<Item = &OsString> {
        [&self.at_begin, &self.after]
            .into_iter()
            .flatten()
            .filter(|name| self.now.as_ref() != Some(*name))
    }

    /// Returns the name that programs see and the backing does not have, if there is one.
    pub(crate) fn overlay_name(&self) -> Option<&OsString> {
        if self.is_overlay && self.before != self.now {
            self.now.as_ref()
        } else {
            None
        }
    }

    fn changes_parent(&self) -> bool {
        self.overlay_name().is_some() || self.reserved_names().next().is_some()
    }
}

impl<B: Backing> ScopeTop<B> {
    /// Returns the names that a transaction's uppermost directory `root` (its top) has in its parent before, during and
    /// after the transaction. `path` is its path at the begin.
    ///
    /// `recovered` is the change log if an earlier firnd (server of the mount) prepared the transaction. `is_shadow`
    /// says that changes are made in the backing at once, and not at the commit.
    pub(crate) fn new(
        root: &Arc<Object<B>>,
        path: &[u8],
        recovered: Option<&ChangeLog>,
        is_shadow: bool,
    ) -> Self {
        let (parent, name) = root.location.lock().clone().unzip();
        let at_begin = last_name(path);
        let recovered_change = recovered.and_then(|log| log.top.as_ref());
        let is_new = recovered_change.is_some_and(|change| change.is_new);
        let existed_before = !is_new;
        // Without `is_shadow`, programs see a new top of a recovered transaction only after the commit.
        let is_visible = existed_before || is_shadow;
        let names = TopNames {
            before: at_begin.clone().filter(|_| existed_before),
            at_begin,
            now: name.filter(|_| is_visible),
            after: recovered_change.and_then(|change| last_name(&change.path_after)),
            // A new name is shown from memory if the backing does not have it. Of a recovered transaction programs see
            // the old tree, so no name is shown.
            is_overlay: !is_shadow && recovered.is_none(),
            changed_at: None,
        };
        Self {
            parent,
            names: Mutex::new(names),
        }
    }

    /// Makes the empty names of a scope of names, which has no top.
    pub(crate) fn without_names() -> Self {
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

    /// Returns whether the parent shows a name that the backing does not have, or hides a name.
    pub(crate) fn changes_parent(&self) -> bool {
        self.names.lock().changes_parent()
    }

    pub(crate) fn is_in(&self, dir: &Object<B>) -> bool {
        self.parent
            .as_ref()
            .is_some_and(|parent| std::ptr::eq(&raw const **parent, dir))
    }

    /// Sets the name that the top has after the log of a commit is undone: the last name of `path`.
    pub(crate) fn set_name_after(&self, path: &[u8]) {
        self.names.lock().after = last_name(path);
    }
}

impl<B: Backing> Scope<B> {
    /// Returns the areas that are quiesced for the end of the transaction: the scope and, if its end changes a name in
    /// the parent, the parent directory.
    pub(crate) fn areas_to_quiesce(&self) -> Vec<Area<B>> {
        let mut areas = vec![self.area()];
        if let Some(parent) = self.top.parent()
            && self.top.changes_parent()
        {
            areas.push(Area::Dir(Arc::clone(parent)));
        }
        areas
    }

    /// Returns the path under which programs see the scope, relative to the backing.
    pub(crate) fn path_now(&self) -> Vec<u8> {
        match self.top.names().now {
            Some(name) => join(parent_of(&self.path), name.as_bytes()),
            None => self.path.clone(),
        }
    }

    /// Returns the path of the scope after its commit.
    pub(crate) fn path_after(&self) -> Vec<u8> {
        match self.top.names().after {
            Some(name) => join(parent_of(&self.path), name.as_bytes()),
            None => self.path_now(),
        }
    }

    /// Returns whether `path` is a path of the scope: at the begin, now, or after the commit.
    pub(crate) fn has_path(&self, path: &[u8]) -> bool {
        if path == self.path {
            return true;
        }
        let Some(name) = last_name(path) else {
            return false;
        };
        let names = self.top.names();
        let is_name_of_top =
            names.now.as_ref() == Some(&name) || names.after.as_ref() == Some(&name);
        is_name_of_top && parent_of(path) == parent_of(&self.path)
    }
}
