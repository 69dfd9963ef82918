//! Checks the tables that a transaction has in memory: which objects and names it changed. Debug builds only.
//!
//! The invariants are stated at the heads of the files that own the tables (`object`, `scope`, `shadow`). When each
//! check runs:
//!
//! | after or before | check |
//! |---|---|
//! | a change of names | all tables of a small transaction; in a large one, only the named objects |
//! | a change of one object's data or attributes | this object |
//! | a prepare, a commit, an abort | all tables, and the tree of objects |
//!
//! No check calls the backing. A failed check panics.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Backing, Kind};

use crate::object::{Change, Object, ObjectState};
use crate::scope::Scope;
use crate::shadow::Shadow;
use crate::tree::Tree;

/// A change of names checks all tables of transactions with at most this many objects. In larger transactions a check
/// of all tables after each change would take quadratic time, so only the named objects are checked.
const FULL_CHECK_OBJECTS_MAX: u64 = 64;

impl<B: Backing> Scope<B> {
    /// Checks the invariants after a change of names. `renamed` are the objects whose names changed. The caller is
    /// still admitted to the names.
    pub(crate) fn check_names(&self, renamed: &[&Arc<Object<B>>]) {
        if !cfg!(debug_assertions) {
            return;
        }
        let changed_count = self.changed.lock().len() as u64;
        let saved_count = self.shadow.as_ref().map_or(0, Shadow::saved_count);
        if changed_count.max(saved_count) <= FULL_CHECK_OBJECTS_MAX {
            check_tables(self);
            return;
        }
        for object in renamed {
            check_object(self, object, &object.state.read_unclaimed());
        }
    }

    /// Checks the invariants after a change of one object's data or attributes.
    pub(crate) fn check_changed(&self, object: &Arc<Object<B>>) {
        if cfg!(debug_assertions) {
            check_object(self, object, &object.state.read_unclaimed());
        }
    }
}

impl<B: Backing> Tree<B> {
    /// Checks the tables of a transaction and of all objects in use; panics if they do not agree. Does nothing in
    /// release builds. The caller has quiesced names and data: no program changes them meanwhile.
    pub(crate) fn check_all(&self, scope: &Scope<B>) {
        if !cfg!(debug_assertions) {
            return;
        }
        check_tables(scope);
        let changed = scope.changed.lock().clone();
        let inline_total: u64 = changed
            .values()
            .map(|object| inline_bytes(&object.state.read_unclaimed()))
            .sum();
        let counted = scope.inline_bytes.load(Ordering::Acquire);
        assert_eq!(
            counted, inline_total,
            "the bytes of inline changes are counted"
        );
        self.check_invariants();
    }
}

/// Returns how many bytes of an object are in its inline changes.
fn inline_bytes<B: Backing>(state: &ObjectState<B>) -> u64 {
    state.inline().map_or(0, |inline| {
        inline
            .overwrites()
            .map(|(_, bytes)| bytes.len() as u64)
            .sum()
    })
}

/// Number of names that lead to each object, by the object's address.
type NameCounts<B> = HashMap<*const Object<B>, i64>;

/// Checks the tables of a transaction; panics if they do not agree.
/// * Each changed object is valid by itself, and no object is listed twice.
/// * The number of names that lead to a new object is its link count.
///
/// In shadow mode the backing has all changes, so the tables must be empty.
fn check_tables<B: Backing>(scope: &Scope<B>) {
    let changed = scope.changed.lock().clone();
    if let Some(shadow) = &scope.shadow {
        assert!(changed.is_empty(), "in shadow mode nothing is held");
        shadow.check_invariants();
        return;
    }
    let mut numbers_by_key = HashMap::new();
    let mut name_counts = NameCounts::new();
    // A transaction may cover only some names of its uppermost directory, which is then not in `changed`.
    count_names_in_root(scope, &mut name_counts);
    // Check each object, and count the names in changed directories.
    for (number, object) in &changed {
        let state = object.state.read_unclaimed();
        check_object(scope, object, &state);
        assert!(
            numbers_by_key.insert(object.key, number).is_none(),
            "one object for each inode: {:?}",
            object.key
        );
        if let Some(change) = &state.change {
            for named_object in change
                .names
                .values()
                .filter_map(|name| name.object.as_ref())
            {
                *name_counts.entry(Arc::as_ptr(named_object)).or_default() += 1;
            }
        }
    }
    // Compare the counts with the link counts of new objects.
    for object in changed.values() {
        let state = object.state.read_unclaimed();
        if let Some(change) = &state.change
            && state.base.is_none()
        {
            let count = name_counts.remove(&Arc::as_ptr(object)).unwrap_or(0);
            check_name_count(scope, object, change, count);
        }
    }
}

/// Checks that as many names lead to a new object as its change in the transaction `scope` says. `count` is the number
/// of names in the directories of the transaction.
fn check_name_count<B: Backing>(
    scope: &Scope<B>,
    object: &Arc<Object<B>>,
    change: &Change<B>,
    count: i64,
) {
    // The parent of the scope's top is not in the transaction, so the name there is not in `count`.
    let is_top = scope.names_in_root.is_none() && Arc::ptr_eq(object, &scope.root);
    let expected = match object.kind {
        Kind::Dir => i64::from(!change.is_removed),
        _ => change.link_delta,
    };
    assert_eq!(
        count + i64::from(is_top),
        expected,
        "names lead to a new {:?} as often as it has links",
        object.kind
    );
}

/// Counts the names that a transaction changes in its uppermost directory, if it covers only some names there. Adds the
/// counts to `name_counts`, by the objects that the names lead to.
fn count_names_in_root<B: Backing>(scope: &Scope<B>, name_counts: &mut NameCounts<B>) {
    let Some(names_of_scope) = &scope.names_in_root else {
        return;
    };
    let state = scope.root.state.read_unclaimed();
    let changed = state.change.iter().flat_map(|change| &change.names);
    for (name, named) in changed.filter(|(_, named)| named.serial == scope.serial) {
        assert!(
            names_of_scope.contains(name),
            "{name:?} is a name of its scope"
        );
        if let Some(object) = &named.object {
            *name_counts.entry(Arc::as_ptr(object)).or_default() += 1;
        }
    }
}

/// Checks an object that the transaction has changed, or has made and then left without a name.
fn check_object<B: Backing>(scope: &Scope<B>, object: &Arc<Object<B>>, state: &ObjectState<B>) {
    if scope.has_names_in(object) {
        return;
    }
    if object.is_nameless() {
        assert!(
            state.base.is_some() && state.change.is_none(),
            "a nameless object is in no transaction"
        );
        return;
    }
    let Some(change) = &state.change else {
        assert!(
            state.base.is_some(),
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
        state.base.is_some() || change.staged_copy.is_some(),
        "a new object is staged"
    );
    assert!(
        change.staged_copy.is_none() || change.inline.is_none(),
        "a change has a staged copy or inline bytes"
    );
    assert!(change.inline.is_none() || (state.base.is_some() && object.kind == Kind::File));
    assert!(object.kind == Kind::Dir || (change.names.is_empty() && !change.is_removed));
    assert!(
        object.kind == Kind::File || change.written.is_empty(),
        "bytes are written to files"
    );
    assert!(
        change.written.is_empty() || change.staged_copy.is_some(),
        "written ranges are in the staged copy"
    );
    check_written(change);
    for (name, named) in &change.names {
        assert!(
            named.object.is_some() || named.is_in_backing,
            "{name:?} leads nowhere and hides nothing"
        );
        assert!(
            !named.is_in_backing || state.base.is_some(),
            "{name:?} hides a name of a new directory"
        );
        if let Some(named_object) = &named.object {
            assert!(
                !named_object.is_nameless(),
                "{name:?} leads to what has no name"
            );
        }
    }
    assert!(!change.is_removed || change.names.values().all(|named| named.object.is_none()));
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
