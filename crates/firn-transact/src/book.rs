//! What became of each name of a file in a transaction, in the words of CprFS ([`crate::state`]).
//!
//! Invariants
//! * A name that came from another by a rename has a state that says so.
//! * Of a name that is gone and that the backing does not have nothing is noted.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};

use crate::object::Key;
use crate::state::State;

/// A directory and a name in it.
type Name = (Key, OsString);

/// The states of one transaction's names.
#[derive(Debug, Default)]
pub(crate) struct Book {
    states: HashMap<Name, State>,
    /// Name that a renamed one came from.
    sources: HashMap<Name, Name>,
}

fn name_of(dir: Key, name: &OsStr) -> Name {
    (dir, name.to_owned())
}

impl Book {
    fn state(&self, name: &Name) -> State {
        self.states.get(name).copied().unwrap_or(State::Normal)
    }

    pub(crate) fn create(&mut self, dir: Key, name: &OsStr) {
        let name = name_of(dir, name);
        let state = self.state(&name).create();
        self.states.insert(name, state);
    }

    pub(crate) fn truncate(&mut self, dir: Key, name: &OsStr) {
        let name = name_of(dir, name);
        let state = self.state(&name).truncate();
        self.states.insert(name, state);
    }

    pub(crate) fn unlink(&mut self, dir: Key, name: &OsStr) {
        let name = name_of(dir, name);
        let state = self.state(&name).unlink();
        self.sources.remove(&name);
        self.states.insert(name, state);
    }

    pub(crate) fn rename(&mut self, from: (Key, &OsStr), to: (Key, &OsStr)) {
        let from = name_of(from.0, from.1);
        let to = name_of(to.0, to.1);
        let Some(renaming) = State::rename(self.state(&from), self.state(&to)) else {
            return;
        };
        if renaming.former_source_is_freed
            && let Some(former) = self.sources.remove(&to)
            && let Some(state) = self.states.get_mut(&former)
        {
            *state = state.freed();
        }
        // A file that was renamed before is still that of the name it came from first.
        let origin = self.sources.remove(&from).unwrap_or_else(|| from.clone());
        if renaming.target.is_renamed() {
            self.sources.insert(to.clone(), origin);
        }
        self.states.insert(from, renaming.source);
        self.states.insert(to, renaming.target);
    }

    /// A name that the backing does not have is gone: nothing has become of it.
    pub(crate) fn forget(&mut self, dir: Key, name: &OsStr) {
        let name = name_of(dir, name);
        self.sources.remove(&name);
        self.states.remove(&name);
    }

    /// Two names of files changed places: three renames by a name that nobody else has.
    pub(crate) fn exchange(&mut self, a: (Key, &OsStr), b: (Key, &OsStr)) {
        let between = (a.0, OsStr::new("/"));
        self.states
            .insert(name_of(between.0, between.1), State::Deleted);
        self.rename(a, between);
        self.rename(b, a);
        self.rename(between, b);
        self.states.remove(&name_of(between.0, between.1));
    }

    /// Asserts what stands at the top of this file.
    pub(crate) fn check(&self) {
        for name in self.sources.keys() {
            assert!(
                self.state(name).is_renamed(),
                "{name:?} came from another name and is {}",
                self.state(name)
            );
        }
    }

    /// How many names are in each state.
    pub(crate) fn count(&self) -> BTreeMap<State, u64> {
        let mut counts = BTreeMap::new();
        for state in self.states.values() {
            *counts.entry(*state).or_insert(0) += 1;
        }
        counts
    }

    /// The state of a name that was changed.
    pub(crate) fn get(&self, dir: Key, name: &OsStr) -> Option<State> {
        self.states.get(&name_of(dir, name)).copied()
    }
}
