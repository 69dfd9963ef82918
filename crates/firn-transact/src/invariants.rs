//! Checks of the tables of a transaction, as assertions in debug builds.
//!
//! The invariants are stated at the heads of the files that own the tables (`object`, `scope`, `shadow`). When each
//! check runs:
//!
//! | after or before | check |
//! |---|---|
//! | a change of names | all tables of the transaction, while it has few objects; otherwise the objects that were named |
//! | a change of one object's data or attributes | this object |
//! | a prepare, a commit, an abort | all tables, and the tree of objects |
//!
//! No check calls the backing. A failed check panics.

use std::collections::HashMap;
use std::sync::Arc;

use firn_backing::{Backing, Kind};

use crate::object::{Change, Inner, Object};
use crate::scope::Scope;
use crate::tree::Tree;

/// A change of names checks all tables of transactions with at most this many objects. In larger transactions a check
/// of all tables after each change would take quadratic time, so only the named objects are checked.
const FULL_CHECK_OBJECTS_MAX: usize = 64;

impl<B: Backing> Scope<B> {
    /// Checks the invariants after a change of names. `touched` are the objects whose names changed. The caller still
    /// keeps the names.
    pub(crate) fn check_names(&self, touched: &[&Arc<Object<B>>]) {
        if !cfg!(debug_assertions) {
            return;
        }
        let shadow_count = self
            .shadow
            .as_ref()
            .map_or(0, |shadow| shadow.saved_count());
        if self.changed.lock().len() <= FULL_CHECK_OBJECTS_MAX
            && shadow_count <= FULL_CHECK_OBJECTS_MAX as u64
        {
            check_tables(self);
        } else {
            touched
                .iter()
                .for_each(|object| check_object(self, object, &object.inner.peek()));
        }
    }

    /// Checks the invariants after a change of one object's data or attributes.
    pub(crate) fn check_changed(&self, object: &Arc<Object<B>>) {
        if cfg!(debug_assertions) {
            check_object(self, object, &object.inner.peek());
        }
    }
}

impl<B: Backing> Tree<B> {
    /// Checks all invariants of a scope and of the tree. The caller keeps names and data.
    pub(crate) fn check_all(&self, scope: &Scope<B>) {
        if !cfg!(debug_assertions) {
            return;
        }
        check_tables(scope);
        let changed = scope.changed.lock().clone();
        let inline: u64 = changed
            .values()
            .map(|object| inline_bytes(&object.inner.peek()))
            .sum();
        let counted = scope
            .inline_bytes
            .load(std::sync::atomic::Ordering::Acquire);
        assert_eq!(counted, inline, "the bytes of inline changes are counted");
        self.check();
    }
}

/// Returns how many bytes of an object are in its inline changes.
fn inline_bytes<B: Backing>(inner: &Inner<B>) -> u64 {
    inner.inline().map_or(0, |inline| {
        inline
            .overwrites()
            .map(|(_, piece)| piece.len() as u64)
            .sum()
    })
}

/// Checks all objects of a transaction, and that names lead to each new object as often as its link count says.
fn check_tables<B: Backing>(scope: &Scope<B>) {
    let changed = scope.changed.lock().clone();
    if let Some(shadow) = &scope.shadow {
        assert!(changed.is_empty(), "in shadow mode nothing is held");
        shadow.check_invariants();
        return;
    }
    let mut keys = HashMap::new();
    let mut names: HashMap<*const Object<B>, i64> = HashMap::new();
    count_names_in_root(scope, &mut names);
    for (number, object) in &changed {
        let inner = object.inner.peek();
        check_object(scope, object, &inner);
        assert!(
            keys.insert(object.key, number).is_none(),
            "one object for each inode: {:?}",
            object.key
        );
        let Some(change) = &inner.change else {
            continue;
        };
        for named in change
            .names
            .values()
            .filter_map(|named| named.object.as_ref())
        {
            *names.entry(Arc::as_ptr(named)).or_default() += 1;
        }
    }
    for object in changed.values() {
        let inner = object.inner.peek();
        let Some(change) = inner.change.as_ref().filter(|_| inner.base.is_none()) else {
            continue;
        };
        let names = names.remove(&Arc::as_ptr(object)).unwrap_or(0);
        // The parent of the scope's top is not in the transaction, so the name there is not counted above.
        let is_top = scope.names_in_root.is_none() && Arc::ptr_eq(object, &scope.root);
        let names = names + i64::from(is_top);
        let expected = match object.kind {
            Kind::Dir => i64::from(!change.removed),
            _ => change.links,
        };
        assert_eq!(
            names, expected,
            "names lead to a new {:?} as often as it has links",
            object.kind
        );
    }
}

/// Adds the names that a scope of names changes in its directory to `names`, which counts the names of each object.
fn count_names_in_root<B: Backing>(scope: &Scope<B>, names: &mut HashMap<*const Object<B>, i64>) {
    let Some(own) = &scope.names_in_root else {
        return;
    };
    let inner = scope.root.inner.peek();
    let changed = inner.change.iter().flat_map(|change| &change.names);
    for (name, named) in changed.filter(|(_, named)| named.serial == scope.serial) {
        assert!(own.has(name), "{name:?} is a name of its scope");
        if let Some(object) = &named.object {
            *names.entry(Arc::as_ptr(object)).or_default() += 1;
        }
    }
}

/// Checks an object that the transaction has changed, or has made and then left without a name.
fn check_object<B: Backing>(scope: &Scope<B>, object: &Arc<Object<B>>, inner: &Inner<B>) {
    if scope.has_names_in(object) {
        return;
    }
    if object.is_nameless() {
        assert!(
            inner.base.is_some() && inner.change.is_none(),
            "a nameless object is in no transaction"
        );
        return;
    }
    let Some(change) = &inner.change else {
        assert!(
            inner.base.is_some(),
            "an object is in the backing or in a transaction"
        );
        return;
    };
    let listed = scope.changed.lock().get(&change.number).cloned();
    assert!(
        listed.is_some_and(|listed| Arc::ptr_eq(&listed, object)),
        "a change is listed by its number"
    );
    assert!(
        inner.base.is_some() || change.copy.is_some(),
        "a new object is staged"
    );
    assert!(
        change.copy.is_none() || change.inline.is_none(),
        "a change has a staged copy or inline bytes"
    );
    assert!(change.inline.is_none() || (inner.base.is_some() && object.kind == Kind::File));
    assert!(object.kind == Kind::Dir || (change.names.is_empty() && !change.removed));
    assert!(
        object.kind == Kind::File || change.written.is_empty(),
        "bytes are written to files"
    );
    assert!(
        change.written.is_empty() || change.copy.is_some(),
        "written ranges are in the staged copy"
    );
    check_written(change);
    for (name, named) in &change.names {
        assert!(
            named.object.is_some() || named.hides_old,
            "{name:?} leads nowhere and hides nothing"
        );
        assert!(
            !named.hides_old || inner.base.is_some(),
            "{name:?} hides a name of a new directory"
        );
        if let Some(named) = &named.object {
            assert!(!named.is_nameless(), "{name:?} leads to what has no name");
        }
    }
    assert!(!change.removed || change.names.values().all(|named| named.object.is_none()));
}

/// Checks that the written ranges of a change are in order and do not touch each other.
fn check_written<B: Backing>(change: &Change<B>) {
    let mut end = None;
    for range in change.written.iter() {
        assert!(
            range.start < range.end && end.is_none_or(|end| end < range.start),
            "ranges are apart"
        );
        end = Some(range.end);
    }
}
