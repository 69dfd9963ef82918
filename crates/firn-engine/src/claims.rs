//! Claims on paths: a claim says that a path must not change while the claim exists, or that the path is about to
//! change.
//!
//! A claim takes the place of a lock that would be held across a call of the backing (the directory that the mount
//! serves), and concerns only the paths that it names. So a rename that hangs blocks only callers that need a path at
//! or below its two names, and an unlink that hangs blocks only renames of a directory above its name.
//!
//! Invariants
//! * While a claim to change a path exists, there is no other claim at or below that path, and no claim to change a
//!   path above it.
//! * The path of a claim to stay is valid when the claim begins: no rename changes it between the read of the path and
//!   the claim.
//!
//! A new claim to stay does not queue behind a claim to change that still waits. Otherwise a hanging call of the
//! backing, for which that change waits, would also block the new claim.

use std::sync::atomic::{AtomicUsize, Ordering};

use firn_backing::is_below;
use firn_backing::lock::{Mutex, MutexGuard};
use parking_lot::Condvar;

type Path = Vec<u8>;

/// Claims on paths of one mount.
#[derive(Default)]
pub(crate) struct PathClaims {
    /// All present claims.
    list: Mutex<ClaimList>,
    /// Signals that a claim ended.
    released: Condvar,
    /// Number of present claims of the kind [`ClaimKind::Change`].
    change_count: AtomicUsize,
}

/// Data that the lock of the claims protects.
#[derive(Default)]
struct ClaimList {
    claims: Vec<Claim>,
    last_id: u64,
}

/// Purpose of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClaimKind {
    /// The paths must not change.
    Stay,
    /// The paths, and all paths below them, are about to change.
    Change,
}

/// One claim on some paths.
struct Claim {
    id: u64,
    paths: Vec<Path>,
    kind: ClaimKind,
}

/// Ends its claim when it is dropped.
pub(crate) struct ClaimGuard<'a> {
    claims: &'a PathClaims,
    id: u64,
}

impl PathClaims {
    /// Claims that the paths returned by `paths` do not change. Waits while one of them is being changed, and calls
    /// `paths` again after each wait.
    pub(crate) fn claim_unchanged(&self, paths: impl Fn() -> Vec<Path>) -> ClaimGuard<'_> {
        self.claim(paths, ClaimKind::Stay)
    }

    /// Claims to change the paths returned by `paths`, and with them all paths below. Waits for conflicting claims.
    pub(crate) fn claim_change(&self, paths: impl Fn() -> Vec<Path>) -> ClaimGuard<'_> {
        self.claim(paths, ClaimKind::Change)
    }

    /// Waits until no claim conflicts with a new claim, and adds the new claim.
    fn claim(&self, paths: impl Fn() -> Vec<Path>, kind: ClaimKind) -> ClaimGuard<'_> {
        let (mut list, paths) = self.wait_until_no_conflict(paths, kind);
        list.last_id += 1;
        let id = list.last_id;
        self.change_count
            .fetch_add(usize::from(kind == ClaimKind::Change), Ordering::AcqRel);
        list.claims.push(Claim { id, paths, kind });
        ClaimGuard { claims: self, id }
    }

    /// Returns whether any path is being changed.
    pub(crate) fn has_changes(&self) -> bool {
        self.change_count.load(Ordering::Acquire) > 0
    }

    /// Runs `work` while the paths returned by `paths` cannot change. `work` must be short, because the lock of all
    /// claims is held meanwhile.
    pub(crate) fn with_unchanged_paths<T>(
        &self,
        paths: impl Fn() -> Vec<Path>,
        work: impl FnOnce() -> T,
    ) -> T {
        let _list = self.wait_until_no_conflict(paths, ClaimKind::Stay);
        work()
    }

    /// Waits until no present claim conflicts with a new one. (A claim says that paths stay as they are, or that they
    /// are about to change.) Returns with the lock held, under which the caller adds its claim, and the paths as they
    /// are now.
    fn wait_until_no_conflict(
        &self,
        paths: impl Fn() -> Vec<Path>,
        kind: ClaimKind,
    ) -> (MutexGuard<'_, ClaimList>, Vec<Path>) {
        let mut list = self.list.lock();
        loop {
            // The paths are read again after each wait, as the change that ended may have renamed them.
            let present_paths = paths();
            let conflicts = |claim: &Claim| claim.conflicts_with(&present_paths, kind);
            if !list.claims.iter().any(conflicts) {
                return (list, present_paths);
            }
            list.wait(&self.released);
        }
    }
}

impl Claim {
    /// Returns whether this claim conflicts with a new one of this kind on `paths`.
    fn conflicts_with(&self, paths: &[Path], kind: ClaimKind) -> bool {
        let is_any_below = |paths: &[Path], tops: &[Path]| {
            paths
                .iter()
                .any(|path| tops.iter().any(|top| is_below(path, top)))
        };
        // A change of a path also changes all paths below it.
        (self.kind == ClaimKind::Change && is_any_below(paths, &self.paths))
            || (kind == ClaimKind::Change && is_any_below(&self.paths, paths))
    }
}

impl Drop for ClaimGuard<'_> {
    fn drop(&mut self) {
        let mut list = self.claims.list.lock();
        let index = list
            .claims
            .iter()
            .position(|claim| claim.id == self.id)
            .expect("a claim stays in the list until its guard is dropped");
        let claim = list.claims.swap_remove(index);
        self.claims.change_count.fetch_sub(
            usize::from(claim.kind == ClaimKind::Change),
            Ordering::AcqRel,
        );
        drop(list);
        self.claims.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(list: &[&str]) -> Vec<Path> {
        list.iter().map(|path| path.as_bytes().to_vec()).collect()
    }

    /// A claim of a test: paths and kind.
    type TestClaim<'a> = (&'a [&'a str], ClaimKind);

    fn do_conflict(present: TestClaim<'_>, new: TestClaim<'_>) -> bool {
        let claim = Claim {
            id: 1,
            paths: paths(present.0),
            kind: present.1,
        };
        claim.conflicts_with(&paths(new.0), new.1)
    }

    #[test]
    fn a_change_conflicts_with_claims_at_and_below_its_paths_only() {
        let rename = (&["a/b", "c"][..], ClaimKind::Change);
        for below in ["a/b", "a/b/x", "c", "c/y/z"] {
            let stay = (&[below][..], ClaimKind::Stay);
            assert!(do_conflict(rename, stay), "{below}");
            assert!(do_conflict(stay, rename), "{below}");
        }
        for beside in ["a", "a/bb", "d", ""] {
            let stay = (&[beside][..], ClaimKind::Stay);
            assert!(!do_conflict(rename, stay), "{beside}");
            assert!(!do_conflict(stay, rename), "{beside}");
        }
    }

    #[test]
    fn two_changes_conflict_where_a_path_of_one_is_below_a_path_of_the_other() {
        fn change<'a>(paths: &'a [&'a str]) -> TestClaim<'a> {
            (paths, ClaimKind::Change)
        }
        assert!(do_conflict(change(&["a/b", "c"]), change(&["a", "d"])));
        assert!(do_conflict(change(&["a", "d"]), change(&["a/b", "c"])));
        assert!(!do_conflict(change(&["a/b", "c"]), change(&["a/x", "d"])));
    }

    #[test]
    fn claims_that_a_path_stays_do_not_conflict() {
        let stay = (&["a"][..], ClaimKind::Stay);
        assert!(!do_conflict(stay, stay));
    }
}
