//! The checks of `firn doctor` test whether a mount would work on this host and this backing (the directory that is to
//! be mounted). For each problem they report what the user should type.
//!
//! * A [`Check`] has a name, a group, and a function that returns [`Finding`]s. [`CHECKS`] lists all checks.
//! * [`examine()`] runs each check in a child process, which prints its findings as JSON.
//! * A mount makes some of the same tests. Both then call the same function, such as `firn_daemon::check_backing`.
//!
//! Promises
//! * [`examine()`] returns even if a file server does not answer. A check that exceeds its timeout is killed. If it
//!   hangs in the kernel and does not end, it is abandoned.
//! * Checks change nothing outside a directory that they create in the backing ([`probe`]) and remove.

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
    /// The backing's file system, which the checks test with their own files. They run only if the backing can be used
    /// and written to.
    Storage,
}

/// The input of every check: the backing and the options of the mount.
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
    Check::new(CheckGroup::Host, "fuse", fuse::check_device),
    Check::new(CheckGroup::Host, "fusermount3", fuse::check_helper),
    Check::new(CheckGroup::Host, "allow-other", fuse::check_allow_other),
    Check::new(CheckGroup::Host, "kernel", kernel::check_kernel),
    Check::new(CheckGroup::Host, "memory", memory::check_arena_memory),
    Check::new(CheckGroup::Host, "locked-memory", memory::check_locked),
    Check::new(CheckGroup::Host, "logout", host::check_logout),
    Check::new(CheckGroup::Host, "limits", host::check_limits),
    Check::new(CheckGroup::Host, "mount-helpers", host::check_mount_helpers),
    Check::new(CheckGroup::Host, "settings", settings::check_settings),
    Check::new(CheckGroup::Host, "mounts", mounts::check_mounts),
    Check::new(CheckGroup::Host, "arenas", mounts::check_arenas),
    Check::new(CheckGroup::Host, "mpi", mpi::check_mpi),
    Check::new(CheckGroup::Backing, "backing", backing::check_file_system),
    Check::new(CheckGroup::Backing, "writable", backing::check_writable),
    Check::new(CheckGroup::Storage, "room", storage::check_room),
    Check::new(CheckGroup::Storage, "sync", storage::check_sync),
    Check::new(CheckGroup::Storage, "names", storage::check_names),
    Check::new(CheckGroup::Storage, "locks", storage::check_locks),
    Check::new(CheckGroup::Storage, "files", storage::check_files),
    Check::new(CheckGroup::Storage, "clock", storage::check_clock),
];

impl Check {
    const fn new(
        group: CheckGroup,
        name: &'static str,
        find_problems: fn(&CheckSubject<'_>) -> Vec<Finding>,
    ) -> Self {
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
