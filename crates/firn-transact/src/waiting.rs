//! Changes wait while the transaction that they would be made in is prepared, decided or being applied.
//!
//! Promise: who may change something holds the lock that lets it, so that no begin, prepare, commit or abort starts
//! before the change is made.

use std::sync::Arc;

use firn_backing::{Backing, Errno};
use parking_lot::RwLockReadGuard;

use crate::object::Object;
use crate::scope::Scope;
use crate::transactional::TransactionalBacking;
use crate::tree::Names;

/// That something may be changed, as long as the guard is held, and the transaction that it belongs to.
pub(crate) type Allowed<G, B> = (G, Option<Arc<Scope<B>>>);

impl<B: Backing> TransactionalBacking<B> {
    /// For a change of names in the directory `object`: waits until it is allowed.
    pub(crate) fn enter_name_change(
        &self,
        object: &Arc<Object<B>>,
    ) -> Result<Allowed<Names<'_>, B>, Errno> {
        loop {
            let names = self.tree.names.read();
            if self.scopes.scope_of(object).is_none() {
                return Ok((Names::Shared(names), None));
            }
            drop(names);
            let names = self.tree.names.write();
            match self.scopes.scope_of(object) {
                Some(scope) if scope.is_open() => return Ok((Names::Changing(names), Some(scope))),
                Some(scope) => {
                    drop(names);
                    scope.wait_until_open()?;
                }
                None => {}
            }
        }
    }

    /// The same for a change of data or attributes.
    pub(crate) fn enter_data_change(
        &self,
        object: &Arc<Object<B>>,
    ) -> Result<Allowed<RwLockReadGuard<'_, ()>, B>, Errno> {
        loop {
            let data = self.tree.data.read();
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
