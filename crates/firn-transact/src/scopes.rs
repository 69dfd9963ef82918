//! The scopes of the transactions that are not over, and which of them an object is in.
//!
//! Invariants
//! * No scope is, or is below, the scope of another transaction in the list.
//! * A transaction that follows a decided commit of its scope is not in the list but hangs on that commit, and takes
//!   its place when the commit ends.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::Backing;

use crate::object::Object;
use crate::scope::{Scope, Stage};
use crate::transactional::Held;

impl<B: Backing> Held<B> {
    /// From here on what is in the scope is in its transaction.
    pub(crate) fn enter(&self, scope: Scope<B>) {
        self.scopes.write().push(Arc::new(scope));
        self.scope_count.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn end(&self, scope: &Arc<Scope<B>>) {
        self.unhide(scope);
        let mut scopes = self.scopes.write();
        scopes.retain(|other| !Arc::ptr_eq(other, scope));
        match scope.carried.take_next() {
            Some(next) => scopes.push(next),
            None => drop(self.scope_count.fetch_sub(1, Ordering::Release)),
        }
        drop(scopes);
        scope.turn(Stage::Ended);
    }

    /// The transaction whose scope begins at `root`.
    pub(crate) fn scope_at(&self, root: &Arc<Object<B>>) -> Option<Arc<Scope<B>>> {
        self.scope_of(root)
            .filter(|scope| Arc::ptr_eq(&scope.root, root))
    }

    /// The transaction that an object is in.
    pub(crate) fn scope_of(&self, object: &Arc<Object<B>>) -> Option<Arc<Scope<B>>> {
        if self.scope_count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let scopes = self.scopes.read();
        let mut at = Some(Arc::clone(object));
        while let Some(object) = at {
            if let Some(scope) = scopes
                .iter()
                .find(|scope| Arc::ptr_eq(&scope.root, &object))
            {
                return Some(Arc::clone(scope));
            }
            at = object.parent();
        }
        None
    }

    /// Whether an object is, or is above, the top of a transaction's scope.
    pub(crate) fn holds_a_scope(&self, object: &Arc<Object<B>>) -> bool {
        self.scopes
            .read()
            .iter()
            .any(|scope| scope.root.is_below(object))
    }

    /// Paths of scopes.
    pub(crate) fn scopes_where(&self, which: impl Fn(&Scope<B>) -> bool) -> Vec<Vec<u8>> {
        self.scopes
            .read()
            .iter()
            .filter(|scope| which(scope))
            .map(|scope| scope.path.clone())
            .collect()
    }

    /// The transactions that are not over; a commit comes before the transaction that follows it.
    pub(crate) fn scopes_in_order(&self) -> Vec<Arc<Scope<B>>> {
        let with_next = |scope: &Arc<Scope<B>>| [Some(Arc::clone(scope)), scope.carried.next()];
        // Under the lock: at the end of a commit the one that follows goes from it to the list.
        let scopes = self.scopes.read();
        scopes.iter().flat_map(with_next).flatten().collect()
    }
}
