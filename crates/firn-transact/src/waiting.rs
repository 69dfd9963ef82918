//! Changes wait while the transaction that they would be made in is prepared, decided or being applied.
//!
//! Promise: a thread that may change something is in the table of uses, so that no begin, prepare, commit or abort of
//! its scope starts before the change is made. A waiting thread is not in it.

use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{Backing, Errno};
use smallvec::SmallVec;

use crate::claim::Claim;
use crate::object::Object;
use crate::scope::Scope;
use crate::scopes::Scopes;
use crate::tree::Tree;
use crate::tree::{Names, StableNames};
use crate::uses::Use;

/// Guard that allows a change, and the transaction that the changed object belongs to.
pub(crate) type Allowed<G, B> = (G, Option<Arc<Scope<B>>>);

/// Admits threads that look up names, or change names or data.
pub struct Admission<B: Backing> {
    pub(crate) tree: Arc<Tree<B>>,
    pub(crate) scopes: Arc<Scopes<B>>,
}

impl<B: Backing> Admission<B> {
    pub(crate) fn new(tree: &Arc<Tree<B>>, scopes: &Arc<Scopes<B>>) -> Self {
        Self {
            tree: Arc::clone(tree),
            scopes: Arc::clone(scopes),
        }
    }

    /// For a change of names in directories, of which all are in one transaction or none: waits until it is allowed.
    pub(crate) fn enter_name_change(
        &self,
        names: &[(&Arc<Object<B>>, &OsStr)],
    ) -> Result<Allowed<Names<'_, B>, B>, Errno> {
        let dirs: SmallVec<[&Arc<Object<B>>; 2]> = names.iter().map(|(dir, _)| *dir).collect();
        let (dir, name) = names[0];
        loop {
            let used = self.tree.names.enter(&dirs);
            match self.scopes.scope_at(dir, name) {
                None => return Ok((Names::new(used, None), None)),
                Some(scope) if scope.is_open() => {
                    let owned = Claim::own(Arc::clone(&scope.names));
                    return Ok((Names::new(used, Some(owned)), Some(scope)));
                }
                Some(scope) => {
                    drop(used);
                    scope.wait_until_open()?;
                }
            }
        }
    }

    /// For a look-up of names in a directory.
    pub(crate) fn share_names(&self, dir: &Arc<Object<B>>) -> StableNames<'_, B> {
        let used = self.tree.names.enter(&[dir]);
        let scopes = self.scopes.scope_of(dir).into_iter();
        let scopes = scopes.chain(self.scopes.with_names_in(dir));
        let shared = scopes.map(|scope| Claim::share(Arc::clone(&scope.names)));
        StableNames::new(used, shared.collect())
    }

    /// Enters a change of data or attributes.
    pub(crate) fn enter_data_change(
        &self,
        object: &Arc<Object<B>>,
    ) -> Result<Allowed<Use<'_, B>, B>, Errno> {
        loop {
            let data = self.tree.data.enter(&[object]);
            // No commit makes anything of it, so it waits for none.
            if object.is_nameless() {
                return Ok((data, None));
            }
            match self.scopes.scope_of(object) {
                None => return Ok((data, None)),
                Some(scope) if scope.is_open() => return Ok((data, Some(scope))),
                Some(scope) => {
                    drop(data);
                    scope.wait_until_open()?;
                }
            }
        }
    }

    /// Whether changes wait somewhere.
    pub fn changes_wait(&self) -> bool {
        !self.scopes.is_empty() && self.scopes.find(|scope| !scope.is_open()).is_some()
    }

    /// Whether the contents of an object may be changed now.
    pub fn may_change(&self, object: &Arc<Object<B>>) -> bool {
        object.is_nameless()
            || self
                .scopes
                .scope_of(object)
                .is_none_or(|scope| scope.is_open())
    }

    /// Waits until the contents of an object may be changed; ECANCELED or EBUSY where that does not come.
    pub fn await_change(&self, object: &Arc<Object<B>>) -> Result<(), Errno> {
        self.enter_data_change(object).map(drop)
    }
}
