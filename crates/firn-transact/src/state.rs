//! [`NameState`]: what became of a name of a file since a transaction began: unlinked, renamed, truncated and so on.
//!
//! The states and their names, such as `Dead` and `Reborn`, are those of the paper on CprFS; [`NameState`] explains
//! each one. The paper (table 1, figure 5, table 2) follows every call from state to
//! state, and so do the tests (`tests/oracle`). Here the states are derived from the tables of the transaction when the
//! status needs them; nothing is recorded while programs change names. A commit does not use the states: it uses the
//! objects and their names before and after ([`crate::change_log`]), which also covers directories, links and special
//! files.
//!
//! Invariants
//! * A state depends only on the names in the backing and the names that programs see, not on the calls between the
//!   two.
//! * A thread that derives states holds one lock at a time and waits for no call of the backing.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use firn_backing::{Backing, Kind};

use crate::object::{Object, ObjectKey};
use crate::scope::Scope;
use crate::scopes::Scopes;

/// What has happened to a name of a file since the transaction began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NameState {
    /// The file is new or was changed, and was not truncated.
    Normal,
    /// Bytes of the file were cut off by `O_TRUNC` or truncate(2).
    Truncated,
    /// The name was unlinked.
    Deleted,
    /// The name was the source of a rename.
    Dead,
    /// The name was deleted, and a new file was created there.
    Reborn,
    /// The name was the target of a rename.
    Renamed,
    /// The name was the source of a rename, and a new file was created there.
    DeadReborn,
    /// The name was the source of a rename, and then the target of another one.
    DeadRenamed,
    /// As [`DeadRenamed`], and the file was truncated.
    DeadRenamedTruncated,
    /// The name was the target of a rename, and the file was truncated.
    RenamedTruncated,
}

use NameState::*;

impl NameState {
    /// All states, in the order of the paper's table 1.
    pub const ALL: [Self; 10] = [
        Normal,
        Truncated,
        Deleted,
        Dead,
        Reborn,
        Renamed,
        DeadReborn,
        DeadRenamed,
        DeadRenamedTruncated,
        RenamedTruncated,
    ];

    /// Returns whether the name leads to a file.
    pub fn exists(self) -> bool {
        !matches!(self, Deleted | Dead)
    }
}

impl std::fmt::Display for NameState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Normal => "normal",
            Truncated => "truncated",
            Deleted => "deleted",
            Dead => "dead",
            Reborn => "reborn",
            Renamed => "renamed",
            DeadReborn => "dead, reborn",
            DeadRenamed => "dead, renamed",
            DeadRenamedTruncated => "dead, renamed, truncated",
            RenamedTruncated => "renamed, truncated",
        })
    }
}

/// A directory and a name in it.
type Name = (ObjectKey, OsString);

impl<B: Backing> Scopes<B> {
    /// Returns the state of a name in its transaction; `None` if the transaction has not changed the name or its file.
    pub fn state_of(&self, parent: &Arc<Object<B>>, name: &OsStr) -> Option<NameState> {
        let states = self.scope_of(parent)?.derive_states();
        states.get(&(parent.key, name.to_owned())).copied()
    }
}

impl<B: Backing> Scope<B> {
    /// Returns the number of names of files in each state. A change that is under way may be counted in part.
    pub(crate) fn count_states(&self) -> BTreeMap<NameState, u64> {
        let mut counts = BTreeMap::new();
        for state in self.derive_states().into_values() {
            *counts.entry(state).or_insert(0) += 1;
        }
        counts
    }

    /// Returns what the transaction did to each name of a file: unlinked it, renamed it, made a new file there and so
    /// on. The result has only names that it changed, and names of files that it changed.
    ///
    /// It is derived from the changes in memory. A file's *origin* is its name before the transaction.
    fn derive_states(&self) -> HashMap<Name, NameState> {
        let changed: Vec<_> = self.changed.lock().values().cloned().collect();
        let mut tables = ChangeTables::default();
        for object in &changed {
            tables.add_object(object);
        }
        let mut states = HashMap::new();
        for file in tables.files.values() {
            if let Some(origin) = &file.origin {
                states.insert(origin.clone(), file.state_in_place());
            }
        }
        // Changed names are added second and replace the states of files in place, because a file may have lost its
        // origin name.
        for changed_name in &tables.names {
            if let Some(state) = tables.state_of(changed_name) {
                states.insert(changed_name.name.clone(), state);
            }
        }
        states
    }
}

/// The changes of a transaction, in the form from which states are derived.
#[derive(Default)]
struct ChangeTables {
    /// Names that the transaction made, changed or removed.
    names: Vec<ChangedName>,
    files: HashMap<ObjectKey, ChangedFile>,
    /// Files that changed names lead to.
    named_files: HashSet<ObjectKey>,
    /// Kind and key of each changed object that the backing has, by its name in the backing.
    origins: HashMap<Name, (Kind, ObjectKey)>,
}

/// A name that the transaction made, changed or removed.
struct ChangedName {
    name: Name,
    /// The file that the name leads to now; `None` if there is no file.
    file: Option<ObjectKey>,
    /// Whether the backing has the name, too.
    is_in_backing: bool,
}

/// A file that the transaction made or changed.
struct ChangedFile {
    /// A name of the file in the backing; `None` if the file is new or no name is known.
    origin: Option<Name>,
    /// Whether the transaction made the file.
    is_new: bool,
    /// Whether bytes that the file has in the backing were cut off.
    is_cut: bool,
}

impl ChangedFile {
    /// Returns the state of the name that the file has in the backing, if it still has that name.
    fn state_in_place(&self) -> NameState {
        if self.is_cut { Truncated } else { Normal }
    }
}

/// What has happened to the file that the backing has under a name.
enum OldFile {
    /// The backing has no file under the name.
    Missing,
    /// The transaction removed the name of the file.
    Removed,
    /// The file has another name now.
    Moved,
}

impl ChangeTables {
    /// Adds what a transaction changed in an object to these tables. Does not wait for a change that is under way. Does
    /// nothing if the object has no change.
    fn add_object<B: Backing>(&mut self, object: &Object<B>) {
        let state = object.state.read_unclaimed();
        let Some(change) = &state.change else {
            return;
        };
        let is_new = state.base.is_none();
        let origin = match &change.origin {
            Some((dir, name)) if !is_new => Some((dir.key, name.clone())),
            _ => None,
        };
        if let Some(name) = &origin {
            self.origins.insert(name.clone(), (object.kind, object.key));
        }
        for (name, name_change) in &change.names {
            let file_key = match &name_change.object {
                Some(named_object) if named_object.kind == Kind::File => Some(named_object.key),
                _ => None,
            };
            self.named_files.extend(file_key);
            self.names.push(ChangedName {
                name: (object.key, name.clone()),
                file: file_key,
                is_in_backing: name_change.is_in_backing,
            });
        }
        if object.kind == Kind::File {
            let changed_file = ChangedFile {
                origin,
                is_new,
                is_cut: change
                    .original
                    .is_some_and(|original| change.cut < original.size),
            };
            self.files.insert(object.key, changed_file);
        }
    }

    /// Returns what has happened to the file that the backing has under a changed name.
    fn old_file(&self, changed: &ChangedName) -> OldFile {
        match self.origins.get(&changed.name) {
            Some((Kind::File, key)) if self.named_files.contains(key) => OldFile::Moved,
            Some((Kind::File, _)) => OldFile::Removed,
            Some(_) => OldFile::Missing,
            // The object of a file with several names may be known by another name.
            None if changed.is_in_backing => OldFile::Removed,
            None => OldFile::Missing,
        }
    }

    /// Returns what a transaction did to a name, from the file that the name had before (`old`) and the one that it has
    /// now. Returns `None` if neither programs nor the backing have a file there. "In place" means under the old name.
    fn state_of(&self, changed: &ChangedName) -> Option<NameState> {
        let old = self.old_file(changed);
        let Some(key) = changed.file else {
            return match old {
                OldFile::Missing => None,
                OldFile::Removed => Some(Deleted),
                OldFile::Moved => Some(Dead),
            };
        };
        let file = self.files.get(&key)?;
        if file.origin.as_ref() == Some(&changed.name) {
            return Some(file.state_in_place());
        }
        // The variants of `NameState` say what each state means to a user.
        Some(match (old, file.is_new, file.is_cut) {
            // A new file has the name, which was free, or was freed by an unlink or by a rename.
            (OldFile::Missing, true, _) => Normal,
            (OldFile::Removed, true, _) => Reborn,
            (OldFile::Moved, true, _) => DeadReborn,
            // An old file was renamed to the name, which was free or freed by an unlink.
            (OldFile::Missing | OldFile::Removed, false, false) => Renamed,
            (OldFile::Missing | OldFile::Removed, false, true) => RenamedTruncated,
            // An old file was renamed to the name after a rename of the file that had it before.
            (OldFile::Moved, false, false) => DeadRenamed,
            (OldFile::Moved, false, true) => DeadRenamedTruncated,
        })
    }
}
