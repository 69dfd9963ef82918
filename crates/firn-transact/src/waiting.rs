//! [`Admission`]: lets a change of a file or name wait while a transaction that covers it is prepared or committed.
//!
//! A transaction covers a part of the tree, its *scope*.
//!
//! Promises
//! * An admitted thread is in the table of uses ([`crate::uses`]) until its change is made. A begin, prepare, commit or
//!   abort of the scope waits for that.
//! * A thread that waits for a transaction is not in the table, so the transaction's end does not wait for it.

use std::sync::Arc;

use firn_backing::{Backing, Errno};
use smallvec::SmallVec;

use crate::claim::Claim;
use crate::namespace::NameAt;
use crate::object::Object;
use crate::scope::Scope;
use crate::scopes::Scopes;
use crate::tree::{NameChangeGuard, StableNamesGuard, Tree};
use crate::uses::UseGuard;

/// A guard that admits a change, and the transaction of the changed object, if there is one.
pub(crate) type Admitted<G, B> = (G, Option<Arc<Scope<B>>>);

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

    /// Waits until names in these directories may be changed. Returns a guard, which keeps other threads from these
    /// names until it is dropped, and the transaction that covers them, if there is one.
    ///
    /// The names must all be in the same transaction, or all in none. Fails with ECANCELED if the transaction is about
    /// to be aborted, and with EBUSY if its decision may never come.
    pub(crate) fn enter_name_change(
        &self,
        names: &[NameAt<'_, B>],
    ) -> Result<Admitted<NameChangeGuard<'_, B>, B>, Errno> {
        let dirs: SmallVec<[&Arc<Object<B>>; 2]> =
            names.iter().map(|name_at| name_at.dir).collect();
        // The transaction of one name is that of all.
        let NameAt { dir, name } = names[0];
        loop {
            let dirs_use = self.tree.names.enter(&dirs);
            let Some(scope) = self.scopes.scope_at(dir, name) else {
                return Ok((NameChangeGuard::new(dirs_use, None), None));
            };
            if scope.is_open() {
                let names_claim = Claim::acquire_exclusive(Arc::clone(&scope.names_claim));
                let guard = NameChangeGuard::new(dirs_use, Some(names_claim));
                return Ok((guard, Some(scope)));
            }
            // The use ends before the wait, because the end of the transaction waits for all uses.
            drop(dirs_use);
            scope.wait_until_open()?;
        }
    }

    /// Waits until names in a directory may be looked up, and returns the guard. Look-ups do not wait for an outcome.
    pub(crate) fn share_names(&self, dir: &Arc<Object<B>>) -> StableNamesGuard<'_, B> {
        let dirs_use = self.tree.names.enter(&[dir]);
        let names_claims = self
            .scopes
            .scope_of(dir)
            .into_iter()
            .chain(self.scopes.with_names_in(dir))
            .map(|scope| Claim::acquire_shared(Arc::clone(&scope.names_claim)))
            .collect();
        StableNamesGuard::new(dirs_use, names_claims)
    }

    /// Waits until data or attributes of an object may be changed. Returns a guard and the transaction that covers the
    /// object, if there is one. Until the guard is dropped, no transaction of the object begins or ends. Fails as
    /// [`Self::enter_name_change`] does.
    pub(crate) fn enter_data_change(
        &self,
        object: &Arc<Object<B>>,
    ) -> Result<Admitted<UseGuard<'_, B>, B>, Errno> {
        loop {
            let data_use = self.tree.data.enter(&[object]);
            // A nameless object is part of no commit, so a change of it waits for none.
            if object.is_nameless() {
                return Ok((data_use, None));
            }
            let Some(scope) = self.scopes.scope_of(object) else {
                return Ok((data_use, None));
            };
            if scope.is_open() {
                return Ok((data_use, Some(scope)));
            }
            // The use ends before the wait, because the end of the transaction waits for all uses.
            drop(data_use);
            scope.wait_until_open()?;
        }
    }

    /// Returns whether changes wait in any transaction.
    pub fn changes_wait(&self) -> bool {
        !self.scopes.is_empty() && self.scopes.find(|scope| !scope.is_open()).is_some()
    }

    /// Returns whether the contents of an object may be changed now.
    pub fn may_change(&self, object: &Arc<Object<B>>) -> bool {
        object.is_nameless()
            || self
                .scopes
                .scope_of(object)
                .is_none_or(|scope| scope.is_open())
    }

    /// Waits until the contents of an object may be changed. Fails with ECANCELED or EBUSY if that may never happen.
    pub fn await_change(&self, object: &Arc<Object<B>>) -> Result<(), Errno> {
        self.enter_data_change(object).map(drop)
    }
}
