//! An oracle for the states of names: it follows the transitions of the CprFS paper call by call.
//!
//! A state that begins with *dead* means that the name's own file moved to another name. When that other name is
//! replaced, the name loses its *dead* (the paper's `former source loses its dead`).
//!
//! Invariant: a name whose file came from another name by a rename has a *renamed* state.

use std::collections::HashMap;

use firn_transact::state::NameState::{self, *};

/// The states after a rename.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renaming {
    /// State of the old name.
    pub source: NameState,
    /// State of the new name.
    pub target: NameState,
    /// Whether a name that was renamed to the same target before loses its *dead*.
    pub former_source_is_freed: bool,
}

/// The transitions of the paper for the state of one name.
pub trait Transitions: Copy {
    fn leads_with_dead(self) -> bool;
    fn is_renamed(self) -> bool;
    fn create(self) -> Self;
    fn truncate(self) -> Self;
    fn unlink(self) -> Self;
    fn freed(self) -> Self;
    fn rename(source: Self, target: Self) -> Option<Renaming>;
}

impl Transitions for NameState {
    /// Returns whether the name's own file moved to another name.
    fn leads_with_dead(self) -> bool {
        matches!(self, Dead | DeadReborn | DeadRenamed | DeadRenamedTruncated)
    }

    /// Returns whether the name's file came from another name.
    fn is_renamed(self) -> bool {
        matches!(
            self,
            Renamed | RenamedTruncated | DeadRenamed | DeadRenamedTruncated
        )
    }

    /// Figure 5: returns the state after a file is created under the name.
    fn create(self) -> Self {
        match self {
            Deleted => Reborn,
            Dead => DeadReborn,
            other => other,
        }
    }

    /// Figure 5: returns the state after the file is truncated.
    fn truncate(self) -> Self {
        match self {
            Normal => Truncated,
            Renamed => RenamedTruncated,
            DeadRenamed => DeadRenamedTruncated,
            other => other,
        }
    }

    /// Figure 5: returns the state after the name is unlinked.
    fn unlink(self) -> Self {
        if self.leads_with_dead() {
            Dead
        } else {
            Deleted
        }
    }

    /// Returns the state after the name loses its *dead*, because the name that its file moved to is replaced.
    fn freed(self) -> Self {
        match self {
            Dead => Deleted,
            DeadReborn => Reborn,
            DeadRenamed => Renamed,
            DeadRenamedTruncated => RenamedTruncated,
            other => other,
        }
    }

    /// Table 2: returns the states after a rename; `None` if the source does not exist.
    fn rename(source: Self, target: Self) -> Option<Renaming> {
        if !source.exists() {
            return None;
        }
        let after = match source {
            Normal | Truncated => Dead,
            other => other.unlink(),
        };
        let was_renamed = target.is_renamed();
        let kind = match source {
            // The source file is new in the transaction, and the target had lost its own file before. A new file there
            // makes the target *reborn*.
            Reborn | DeadReborn if was_renamed => Reborn,
            RenamedTruncated | DeadRenamedTruncated => RenamedTruncated,
            _ => Renamed,
        };
        let target = match (target.leads_with_dead(), kind) {
            (true, Reborn) => DeadReborn,
            (true, RenamedTruncated) => DeadRenamedTruncated,
            (true, _) => DeadRenamed,
            (false, kind) => kind,
        };
        Some(Renaming {
            source: after,
            target,
            former_source_is_freed: was_renamed,
        })
    }
}

/// The states of the names in one directory.
#[derive(Debug, Default)]
pub struct Book {
    states: HashMap<String, NameState>,
    /// For each renamed name, the name that its file came from.
    sources: HashMap<String, String>,
}

impl Book {
    /// Returns the state of a name; `None` if no call has changed it.
    pub fn get(&self, name: &str) -> Option<NameState> {
        self.states.get(name).copied()
    }

    fn state(&self, name: &str) -> NameState {
        self.get(name).unwrap_or(Normal)
    }

    pub fn create(&mut self, name: &str) {
        let state = self.state(name).create();
        self.states.insert(name.to_owned(), state);
    }

    pub fn truncate(&mut self, name: &str) {
        let state = self.state(name).truncate();
        self.states.insert(name.to_owned(), state);
    }

    pub fn unlink(&mut self, name: &str) {
        let state = self.state(name).unlink();
        self.sources.remove(name);
        self.states.insert(name.to_owned(), state);
    }

    pub fn rename(&mut self, from: &str, to: &str) {
        let Some(renaming) = NameState::rename(self.state(from), self.state(to)) else {
            return;
        };
        if renaming.former_source_is_freed
            && let Some(former) = self.sources.remove(to)
            && let Some(state) = self.states.get_mut(&former)
        {
            *state = state.freed();
        }
        // A file that was renamed twice counts as coming from its first name.
        let origin = self.sources.remove(from).unwrap_or_else(|| from.to_owned());
        if renaming.target.is_renamed() {
            self.sources.insert(to.to_owned(), origin);
        }
        self.states.insert(from.to_owned(), renaming.source);
        self.states.insert(to.to_owned(), renaming.target);
    }

    /// Exchanges the files of two names, as three renames with an unused name in between.
    pub fn exchange(&mut self, a: &str, b: &str) {
        const BETWEEN: &str = "/";
        self.states.insert(BETWEEN.to_owned(), Deleted);
        self.rename(a, BETWEEN);
        self.rename(b, a);
        self.rename(BETWEEN, b);
        self.states.remove(BETWEEN);
    }

    /// Asserts the invariant in the head of this file.
    pub fn check(&self) {
        for name in self.sources.keys() {
            let state = self.state(name);
            assert!(
                state.is_renamed(),
                "{name} came from another name and is {state}"
            );
        }
    }
}

mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn figure_5() {
        let after = |f: fn(NameState) -> NameState| NameState::ALL.map(f);
        assert_eq!(
            after(<NameState as Transitions>::create),
            [
                Normal,
                Truncated,
                Reborn,
                DeadReborn,
                Reborn,
                Renamed,
                DeadReborn,
                DeadRenamed,
                DeadRenamedTruncated,
                RenamedTruncated
            ]
        );
        assert_eq!(
            after(<NameState as Transitions>::truncate),
            [
                Truncated,
                Truncated,
                Deleted,
                Dead,
                Reborn,
                RenamedTruncated,
                DeadReborn,
                DeadRenamedTruncated,
                DeadRenamedTruncated,
                RenamedTruncated
            ]
        );
        assert_eq!(
            after(<NameState as Transitions>::unlink),
            [
                Deleted, Deleted, Deleted, Dead, Deleted, Deleted, Dead, Dead, Dead, Deleted
            ]
        );
    }

    /// Each row of table 2: source states, target states, state of the target afterwards, and whether the row has a
    /// star.
    #[test]
    fn table_2() {
        let plain = [Normal, Truncated];
        let renamed = [Renamed, RenamedTruncated, DeadRenamed, DeadRenamedTruncated];
        let free = [Normal, Truncated, Deleted, Reborn];
        let rows: [(&[NameState], &[NameState], NameState, bool); 12] = [
            (&plain, &free, Renamed, false),
            (
                &plain,
                &[DeadRenamed, DeadRenamedTruncated],
                DeadRenamed,
                true,
            ),
            (&plain, &[Renamed, RenamedTruncated], Renamed, true),
            (&plain, &[Dead, DeadReborn], DeadRenamed, false),
            (&[Reborn], &free, Renamed, false),
            (&[Reborn], &[Dead, DeadReborn], DeadRenamed, false),
            (
                &[Reborn, DeadReborn],
                &[Renamed, RenamedTruncated],
                Reborn,
                true,
            ),
            (
                &[Reborn, DeadReborn],
                &[DeadRenamed, DeadRenamedTruncated],
                DeadReborn,
                true,
            ),
            (&renamed, &free, Renamed, false),
            (&renamed, &[Dead, DeadReborn], DeadRenamed, false),
            (&renamed, &[Renamed, RenamedTruncated], Renamed, true),
            (
                &renamed,
                &[DeadRenamed, DeadRenamedTruncated],
                DeadRenamed,
                true,
            ),
        ];
        for (sources, targets, expected, star) in rows {
            for &source in sources {
                for &target in targets {
                    let found = NameState::rename(source, target).expect("it exists");
                    // A truncated file is still truncated after a rename.
                    let kept = matches!(source, RenamedTruncated | DeadRenamedTruncated);
                    let expected = if kept { expected.truncate() } else { expected };
                    assert_eq!(found.target, expected, "{source} over {target}");
                    assert_eq!(found.former_source_is_freed, star, "{source} over {target}");
                    let after = match source {
                        Normal | Truncated => Dead,
                        _ if source.leads_with_dead() => Dead,
                        _ => Deleted,
                    };
                    assert_eq!(found.source, after, "{source} over {target}");
                }
            }
        }
        for target in NameState::ALL {
            assert_eq!(
                (
                    NameState::rename(Dead, target),
                    NameState::rename(Deleted, target)
                ),
                (None, None)
            );
        }
    }

    #[test]
    fn the_example_of_the_paper() {
        let first = NameState::rename(Normal, Normal).expect("rename(a, b)");
        assert_eq!(
            (first.source, first.target, first.former_source_is_freed),
            (Dead, Renamed, false)
        );
        let second = NameState::rename(Normal, first.target).expect("rename(c, b)");
        assert_eq!((second.source, second.target), (Dead, Renamed));
        assert!(second.former_source_is_freed);
        assert_eq!(first.source.freed(), Deleted);
    }

    #[test]
    fn every_state_is_reached_from_normal_names() {
        let mut reached = BTreeSet::from([Normal]);
        loop {
            let mut more = reached.clone();
            for &a in &reached {
                more.extend([a.create(), a.unlink(), a.freed()]);
                more.extend(a.exists().then(|| a.truncate()));
                for &b in &reached {
                    more.extend(
                        NameState::rename(a, b)
                            .into_iter()
                            .flat_map(|r| [r.source, r.target]),
                    );
                }
            }
            if more == reached {
                break;
            }
            reached = more;
        }
        assert_eq!(reached, BTreeSet::from(NameState::ALL));
    }
}
