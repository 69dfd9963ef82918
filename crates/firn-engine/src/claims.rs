//! Claims on paths: that a path stays as it is for a while, or that it is about to change.
//!
//! A claim stands in for a lock across a call of the backing, and concerns only the paths that it names. A rename
//! that hangs blocks callers that need a path at or below its two names. An unlink that hangs blocks renames of a
//! directory above its name.
//!
//! Invariants
//! * Beside a claim to change a path there is no other claim at or below that path, and no claim to change a path
//!   above it.
//! * A claim that a path stays has the path as it was when the claim began: no rename came in between.
//!
//! Races: a new claim to stay does not wait behind a change that is still waiting. If a call of the backing hung,
//! that change would wait without end, and the new claim with it.

use std::sync::atomic::{AtomicUsize, Ordering};

use firn_backing::is_below;
use firn_backing::lock::{Mutex, MutexGuard};
use parking_lot::Condvar;

type Path = Vec<u8>;

/// Claims on paths of one mount.
#[derive(Default)]
pub(crate) struct PathClaims {
    /// All present claims.
    standing: Mutex<Standing>,
    /// Signals that a claim ended.
    released: Condvar,
    /// Number of present claims to change paths.
    changes: AtomicUsize,
}

/// What the lock of the claims protects.
#[derive(Default)]
struct Standing {
    claims: Vec<Claim>,
    last_id: u64,
}

/// One claim on some paths.
struct Claim {
    id: u64,
    paths: Vec<Path>,
    /// Whether the paths are about to change; otherwise they must stay.
    changes: bool,
}

/// Ends its claim when it is dropped.
pub(crate) struct ClaimGuard<'a> {
    of: &'a PathClaims,
    id: u64,
}

impl PathClaims {
    /// Claims that the paths returned by `paths` stay. Waits for changes of them under way, and calls `paths` again
    /// after each wait.
    pub(crate) fn stay(&self, paths: impl Fn() -> Vec<Path>) -> ClaimGuard<'_> {
        self.claim(paths, false)
    }

    /// Claims to change the paths returned by `paths`, and with them all paths below. Waits for conflicting claims.
    pub(crate) fn change(&self, paths: impl Fn() -> Vec<Path>) -> ClaimGuard<'_> {
        self.claim(paths, true)
    }

    fn claim(&self, paths: impl Fn() -> Vec<Path>, changes: bool) -> ClaimGuard<'_> {
        let (mut standing, paths) = self.wait_for(paths, changes);
        standing.last_id += 1;
        let id = standing.last_id;
        self.changes
            .fetch_add(usize::from(changes), Ordering::AcqRel);
        standing.claims.push(Claim { id, paths, changes });
        ClaimGuard { of: self, id }
    }

    /// Whether some path is being changed.
    pub(crate) fn has_changes(&self) -> bool {
        self.changes.load(Ordering::Acquire) > 0
    }

    /// Runs `work`, which must be short, while the paths returned by `paths` stay. The lock of all claims is held
    /// meanwhile.
    pub(crate) fn while_staying<T>(
        &self,
        paths: impl Fn() -> Vec<Path>,
        work: impl FnOnce() -> T,
    ) -> T {
        let _standing = self.wait_for(paths, false);
        work()
    }

    /// Waits until no present claim conflicts. Returns with the lock held, and the paths as they are now.
    fn wait_for(
        &self,
        paths: impl Fn() -> Vec<Path>,
        changes: bool,
    ) -> (MutexGuard<'_, Standing>, Vec<Path>) {
        let mut standing = self.standing.lock();
        // The paths are read again after each wait, as the change that ended may have renamed them.
        loop {
            let paths = paths();
            if !standing
                .claims
                .iter()
                .any(|claim| claim.is_in_the_way(&paths, changes))
            {
                return (standing, paths);
            }
            standing.wait(&self.released);
        }
    }
}

impl Claim {
    /// Whether this claim conflicts with a new one on `paths`.
    fn is_in_the_way(&self, paths: &[Path], changes: bool) -> bool {
        let below = |paths: &[Path], tops: &[Path]| {
            paths
                .iter()
                .any(|path| tops.iter().any(|top| is_below(path, top)))
        };
        (self.changes && below(paths, &self.paths)) || (changes && below(&self.paths, paths))
    }
}

impl Drop for ClaimGuard<'_> {
    fn drop(&mut self) {
        let mut standing = self.of.standing.lock();
        let at = standing.claims.iter().position(|claim| claim.id == self.id);
        let ended = standing
            .claims
            .swap_remove(at.expect("a claim stands until its guard is dropped"));
        self.of
            .changes
            .fetch_sub(usize::from(ended.changes), Ordering::AcqRel);
        drop(standing);
        self.of.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(list: &[&str]) -> Vec<Path> {
        list.iter().map(|path| path.as_bytes().to_vec()).collect()
    }

    fn in_the_way(standing: (&[&str], bool), asked: (&[&str], bool)) -> bool {
        let claim = Claim {
            id: 1,
            paths: paths(standing.0),
            changes: standing.1,
        };
        claim.is_in_the_way(&paths(asked.0), asked.1)
    }

    #[test]
    fn a_change_is_in_the_way_of_what_is_below_it_and_of_nothing_else() {
        let rename = (&["a/b", "c"][..], true);
        for below in ["a/b", "a/b/x", "c", "c/y/z"] {
            assert!(in_the_way(rename, (&[below], false)), "{below}");
            assert!(in_the_way((&[below], false), rename), "{below}");
        }
        for beside in ["a", "a/bb", "d", ""] {
            assert!(!in_the_way(rename, (&[beside], false)), "{beside}");
            assert!(!in_the_way((&[beside], false), rename), "{beside}");
        }
    }

    #[test]
    fn two_changes_are_in_the_way_of_each_other_where_one_is_below_the_other() {
        assert!(in_the_way((&["a/b", "c"], true), (&["a", "d"], true)));
        assert!(in_the_way((&["a", "d"], true), (&["a/b", "c"], true)));
        assert!(!in_the_way((&["a/b", "c"], true), (&["a/x", "d"], true)));
    }

    #[test]
    fn paths_that_stay_block_only_changes_of_them() {
        assert!(!in_the_way((&["a"], false), (&["a"], false)));
    }
}
