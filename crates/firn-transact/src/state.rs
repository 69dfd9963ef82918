//! The states of CprFS: what became of a name of a file since the transaction began.
//!
//! The tables are the paper's (table 1, figure 5, table 2). They say in words what a name went through, for
//! `firn status` and for tests. A commit works on something coarser that holds for directories, links and
//! special files too, which the paper leaves out: for each object the names that it leaves and those that
//! it comes to (`record`). Both must agree on which names there are, and [`State::exists`] is checked
//! against it.
//!
//! A name that leads with *dead* is one whose own file went to another name. It is free again once that
//! other name was replaced (`former source loses its dead`).

/// What became of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
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
    /// The same, then truncated.
    DeadRenamedTruncated,
    /// Target of a rename, then truncated.
    RenamedTruncated,
}

/// What a rename makes of its two names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renaming {
    /// Of the name that it was.
    pub source: State,
    /// Of the name that it is now.
    pub target: State,
    /// The name that was renamed to the target before loses its leading *dead*.
    pub former_source_is_freed: bool,
}

use State::*;

impl State {
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

    /// Whether its own file went to another name.
    pub fn leads_with_dead(self) -> bool {
        matches!(self, Dead | DeadReborn | DeadRenamed | DeadRenamedTruncated)
    }

    /// Whether its file came from another name.
    pub fn is_renamed(self) -> bool {
        matches!(
            self,
            Renamed | RenamedTruncated | DeadRenamed | DeadRenamedTruncated
        )
    }

    /// Figure 5: a file is created under the name.
    pub fn create(self) -> Self {
        match self {
            Deleted => Reborn,
            Dead => DeadReborn,
            other => other,
        }
    }

    /// Figure 5: its file is cut.
    pub fn truncate(self) -> Self {
        match self {
            Normal => Truncated,
            Renamed => RenamedTruncated,
            DeadRenamed => DeadRenamedTruncated,
            other => other,
        }
    }

    /// Figure 5: it is unlinked.
    pub fn unlink(self) -> Self {
        if self.leads_with_dead() {
            Dead
        } else {
            Deleted
        }
    }

    /// The name that was renamed to another, which is now replaced, is free again.
    pub fn freed(self) -> Self {
        match self {
            Dead => Deleted,
            DeadReborn => Reborn,
            DeadRenamed => Renamed,
            DeadRenamedTruncated => RenamedTruncated,
            other => other,
        }
    }

    /// Table 2; `None` where there is nothing to rename.
    pub fn rename(source: Self, target: Self) -> Option<Renaming> {
        if !source.exists() {
            return None;
        }
        let after = match source {
            Normal | Truncated => Dead,
            other => other.unlink(),
        };
        let was_renamed = target.is_renamed();
        let kind = match source {
            // Nothing of it is in the backing, and a target that was renamed has room for it.
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

impl std::fmt::Display for State {
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn figure_5() {
        let after = |f: fn(State) -> State| State::ALL.map(f);
        assert_eq!(
            after(State::create),
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
            after(State::truncate),
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
            after(State::unlink),
            [
                Deleted, Deleted, Deleted, Dead, Deleted, Deleted, Dead, Dead, Dead, Deleted
            ]
        );
    }

    /// Each row of table 2: sources, targets, what becomes of the target, whether there is a star.
    #[test]
    fn table_2() {
        let plain = [Normal, Truncated];
        let renamed = [Renamed, RenamedTruncated, DeadRenamed, DeadRenamedTruncated];
        let free = [Normal, Truncated, Deleted, Reborn];
        let rows: [(&[State], &[State], State, bool); 12] = [
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
                    let found = State::rename(source, target).expect("it exists");
                    // Truncation goes along with the file.
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
        for target in State::ALL {
            assert_eq!(
                (State::rename(Dead, target), State::rename(Deleted, target)),
                (None, None)
            );
        }
    }

    #[test]
    fn the_example_of_the_paper() {
        let first = State::rename(Normal, Normal).expect("rename(a, b)");
        assert_eq!(
            (first.source, first.target, first.former_source_is_freed),
            (Dead, Renamed, false)
        );
        let second = State::rename(Normal, first.target).expect("rename(c, b)");
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
                        State::rename(a, b)
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
        assert_eq!(reached, BTreeSet::from(State::ALL));
    }
}
