//! The states of CprFS: what became of a name of a file since the transaction began.
//!
//! The paper (table 1, figure 5, table 2) follows every call from state to state; so do the tests (`tests/oracle`).
//! Here the states are derived from the tables of the transaction when the status asks for them, and nothing is noted
//! while programs change names. A commit does not use them: it works on the objects and their names before and after
//! ([`crate::change_log`]), which covers directories, links and special files, too.
//!
//! Invariants
//! * A state depends on what the backing has and on what programs see, not on the calls between the two.
//! * A thread that derives states holds one lock at a time and waits for no call of the backing.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use firn_backing::{Backing, Kind};

use crate::object::{Key, Object};
use crate::scope::Scope;
use crate::scopes::Scopes;

/// What became of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NameState {
    /// New, created or opened for writing.
    Normal,
    /// Cut by `O_TRUNC` or truncate.
    Truncated,
    /// Unlinked.
    Deleted,
    /// It was the source of a rename.
    Dead,
    /// Created again after deletion.
    Reborn,
    /// It was the target of a rename.
    Renamed,
    /// Created again after being renamed away.
    DeadReborn,
    /// Renamed away, then the target of another rename.
    DeadRenamed,
    /// Renamed away, then the target of another rename, then truncated.
    DeadRenamedTruncated,
    /// Target of a rename, then truncated.
    RenamedTruncated,
}

use NameState::*;

impl NameState {
    /// All of them, in the order of the paper's table 1.
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

    /// Whether the name leads to a file.
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
type Name = (Key, OsString);

impl<B: Backing> Scopes<B> {
    /// State of a name of a file in the open transaction; `None` if unchanged.
    pub fn state_of(&self, parent: &Arc<Object<B>>, name: &OsStr) -> Option<NameState> {
        let states = self.scope_of(parent)?.derive_states();
        states.get(&(parent.key, name.to_owned())).copied()
    }
}

impl<B: Backing> Scope<B> {
    /// How many names of files are in each state. Changes that are under way may be seen in part.
    pub(crate) fn count_states(&self) -> BTreeMap<NameState, u64> {
        let mut counts = BTreeMap::new();
        for state in self.derive_states().into_values() {
            *counts.entry(state).or_insert(0) += 1;
        }
        counts
    }

    fn derive_states(&self) -> HashMap<Name, NameState> {
        let changed: Vec<_> = self.changed.lock().values().cloned().collect();
        let mut tables = Tables::default();
        for object in &changed {
            tables.add(object);
        }
        let in_place = tables.files.values().filter_map(|file| {
            let origin = file.origin.clone()?;
            Some((origin, file.state_in_place()))
        });
        let mut states: HashMap<Name, NameState> = in_place.collect();
        // Changed names come second: a file may have lost the name that it was known by.
        for changed in &tables.names {
            states.extend(
                tables
                    .state(changed)
                    .map(|state| (changed.name.clone(), state)),
            );
        }
        states
    }
}

/// What a transaction's tables say of names and files.
#[derive(Default)]
struct Tables {
    names: Vec<ChangedName>,
    files: HashMap<Key, ChangedFile>,
    /// Files that changed names lead to.
    named: HashSet<Key>,
    /// Names of the backing, and what they lead to there, as far as the transaction changes it.
    origins: HashMap<Name, (Kind, Key)>,
}

struct ChangedName {
    name: Name,
    /// The file that it leads to, if it leads to one.
    file: Option<Key>,
    /// The backing has the name, too.
    hides_old: bool,
}

struct ChangedFile {
    /// A name that it has in the backing.
    origin: Option<Name>,
    /// The transaction made it.
    is_new: bool,
    /// Bytes that it has in the backing were cut off.
    is_cut: bool,
}

impl ChangedFile {
    /// State under the name that it has in the backing and still has.
    fn state_in_place(&self) -> NameState {
        if self.is_cut { Truncated } else { Normal }
    }
}

/// What became of the file that the backing has under a name.
enum OldFile {
    /// There is none.
    Missing,
    /// It is gone.
    Removed,
    /// It has another name now.
    Moved,
}

impl Tables {
    /// Adds what is noted of an object. A change of it may be under way, which is not waited for.
    fn add<B: Backing>(&mut self, object: &Object<B>) {
        let inner = object.inner.peek();
        let Some(change) = &inner.change else {
            return;
        };
        let is_new = inner.base.is_none();
        let origin = change.origin.as_ref().filter(|_| !is_new);
        let origin = origin.map(|(dir, name)| (dir.key, name.clone()));
        if let Some(name) = &origin {
            self.origins.insert(name.clone(), (object.kind, object.key));
        }
        for (name, to) in &change.names {
            let file = to.object.as_ref().filter(|to| to.kind == Kind::File);
            let file = file.map(|file| file.key);
            self.named.extend(file);
            self.names.push(ChangedName {
                name: (object.key, name.clone()),
                file,
                hides_old: to.hides_old,
            });
        }
        if object.kind == Kind::File {
            let file = ChangedFile {
                origin,
                is_new,
                is_cut: change.before.is_some_and(|(size, _)| change.cut < size),
            };
            self.files.insert(object.key, file);
        }
    }

    fn old_file(&self, changed: &ChangedName) -> OldFile {
        match self.origins.get(&changed.name) {
            Some((Kind::File, key)) if self.named.contains(key) => OldFile::Moved,
            Some((Kind::File, _)) => OldFile::Removed,
            Some(_) => OldFile::Missing,
            // A file with several names is known by another one.
            None if changed.hides_old => OldFile::Removed,
            None => OldFile::Missing,
        }
    }

    /// `None` where there is no file and was none.
    fn state(&self, changed: &ChangedName) -> Option<NameState> {
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
        Some(match (old, file.is_new, file.is_cut) {
            (OldFile::Missing, true, _) => Normal,
            (OldFile::Removed, true, _) => Reborn,
            (OldFile::Moved, true, _) => DeadReborn,
            (OldFile::Missing | OldFile::Removed, false, false) => Renamed,
            (OldFile::Missing | OldFile::Removed, false, true) => RenamedTruncated,
            (OldFile::Moved, false, false) => DeadRenamed,
            (OldFile::Moved, false, true) => DeadRenamedTruncated,
        })
    }
}
