//! The checks of `firn doctor`: they test whether a mount would work on this host and this backing. For each problem
//! they tell the user what to type.
//!
//! * A [`Check`] has a name, a group, and a function that returns [`Finding`]s. [`CHECKS`] lists all checks.
//! * [`examine()`] runs each check in a child process, which prints its findings as JSON.
//! * A mount makes some of the same tests. Both then call the same function, such as `firn_daemon::check_backing`.
//!
//! Promises
//! * [`examine()`] returns even if a file server does not answer. A check that exceeds its timeout is killed. Where the
//!   kernel does not let it die, it is abandoned.
//! * Checks change nothing outside a directory of their own in the backing ([`probe`]), which they remove.

mod backing;
mod examine;
mod finding;
mod fuse;
mod host;
mod kernel;
mod memory;
mod mounts;
mod mpi;
mod probe;
mod settings;
mod storage;

use std::path::Path;

use firn_config::Options;

pub use examine::{Examination, ExaminationRequest, examine, run_check};
pub use finding::{Finding, Verdict};
pub use fuse::{device_fault, find_program};

/// What a check examines. It decides when the check runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckGroup {
    /// This host, and this user on it.
    Host,
    /// The backing. Its checks read facts only, apart from one file that they may create.
    Backing,
    /// The backing's file system, which the checks try with files of their own. They run only if the backing can be
    /// used and written to.
    Storage,
}

/// The input of every check: what a mount would be given.
#[derive(Clone, Debug)]
pub struct CheckSubject<'a> {
    /// The backing as the user gave it. `None` means that only the host is examined.
    pub backing: Option<&'a Path>,
    /// The options that a mount would use now.
    pub options: &'a Options,
    /// Why a mount would refuse the options. `None` means that it accepts them.
    pub options_fault: Option<&'a str>,
}

/// A named test of the host or of the backing.
pub struct Check {
    /// Name of the check in lines of output, in JSON and for `--only`.
    pub name: &'static str,
    /// What the check examines.
    pub group: CheckGroup,
    /// Runs the check in this process, and returns its findings.
    pub(crate) find_problems: fn(&CheckSubject<'_>) -> Vec<Finding>,
}

/// All checks, in the order of the output.
pub static CHECKS: [Check; 21] = [
    Check::of_host("fuse", fuse::check_device),
    Check::of_host("fusermount3", fuse::check_helper),
    Check::of_host("allow-other", fuse::check_allow_other),
    Check::of_host("kernel", kernel::check_kernel),
    Check::of_host("memory", memory::check_room),
    Check::of_host("locked-memory", memory::check_locked),
    Check::of_host("logout", host::check_logout),
    Check::of_host("limits", host::check_limits),
    Check::of_host("mount-helpers", host::check_mount_helpers),
    Check::of_host("settings", settings::check_settings),
    Check::of_host("mounts", mounts::check_mounts),
    Check::of_host("arenas", mounts::check_arenas),
    Check::of_host("mpi", mpi::check_mpi),
    Check::of_backing("backing", backing::check_place),
    Check::of_backing("writable", backing::check_writable),
    Check::of_storage("room", storage::check_room),
    Check::of_storage("sync", storage::check_sync),
    Check::of_storage("names", storage::check_names),
    Check::of_storage("locks", storage::check_locks),
    Check::of_storage("files", storage::check_files),
    Check::of_storage("clock", storage::check_clock),
];

impl Check {
    const fn of_host(
        name: &'static str,
        find_problems: fn(&CheckSubject<'_>) -> Vec<Finding>,
    ) -> Self {
        let group = CheckGroup::Host;
        Self {
            name,
            group,
            find_problems,
        }
    }

    const fn of_backing(
        name: &'static str,
        find_problems: fn(&CheckSubject<'_>) -> Vec<Finding>,
    ) -> Self {
        let group = CheckGroup::Backing;
        Self {
            name,
            group,
            find_problems,
        }
    }

    const fn of_storage(
        name: &'static str,
        find_problems: fn(&CheckSubject<'_>) -> Vec<Finding>,
    ) -> Self {
        let group = CheckGroup::Storage;
        Self {
            name,
            group,
            find_problems,
        }
    }
}

/// Returns the effective user id of this process.
fn user_id() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Returns the lines of a file such as fuse.conf or logind.conf, each without its comment: the text before `#` or `;`.
fn settings_in(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let settings = text.lines().filter_map(|line| {
        let setting = line.split(['#', ';']).next().unwrap_or_default().trim();
        (!setting.is_empty()).then(|| setting.to_owned())
    });
    settings.collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_two_checks_have_the_same_name() {
        let names: BTreeSet<_> = CHECKS.iter().map(|check| check.name).collect();
        assert_eq!(names.len(), CHECKS.len());
    }

    #[test]
    fn comments_are_no_settings() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fuse.conf");
        std::fs::write(&path, "# user_allow_other\n\n mount_max = 10 # few\n").unwrap();
        assert_eq!(settings_in(&path), ["mount_max = 10"]);
        assert!(settings_in(&dir.path().join("missing")).is_empty());
    }
}
