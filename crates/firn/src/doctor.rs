//! What a host and a backing can do, and what to type where something is not right.
//!
//! A [`Check`] is a name, a group and a function that gives [`Finding`]s; [`CHECKS`] has all of them. [`examine()`] runs each
//! in a child process of its own and takes its findings as JSON.
//!
//! Promises
//! * [`examine()`] returns, also where a file server does not answer: a check that is late is killed, and left behind where
//!   the kernel does not let it die.
//! * Nothing is changed but below a directory of the check's own in the backing ([`probe`]), which is removed.
//!
//! What a mount looks at, the checks look at by the same functions (`firn_daemon::check_backing` and others).

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

pub use examine::{Examination, Request, examine, run_check};
pub use finding::{Finding, Verdict};
pub use fuse::{device_fault, find_program};

/// What a check is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// This host, and this user on it.
    Host,
    /// The backing, looked at.
    Backing,
    /// The backing, tried with files of the check's own; only where it can be used and written to.
    Storage,
}

/// What is examined.
#[derive(Clone, Debug)]
pub struct Subject<'a> {
    /// As the user gave it; none: only the host is examined.
    pub backing: Option<&'a Path>,
    /// What a mount would use now.
    pub options: &'a Options,
    /// Why a mount would be refused for its options.
    pub options_fault: Option<&'a str>,
}

/// One look at something.
pub struct Check {
    /// In lines, JSON and `--only`.
    pub name: &'static str,
    /// What it is about.
    pub group: Group,
    pub(crate) look: fn(&Subject<'_>) -> Vec<Finding>,
}

/// All checks, in the order of the table.
pub static CHECKS: [Check; 21] = [
    Check::of_host("fuse", fuse::device),
    Check::of_host("fusermount3", fuse::helper),
    Check::of_host("allow-other", fuse::allow_other),
    Check::of_host("kernel", kernel::look),
    Check::of_host("memory", memory::room),
    Check::of_host("locked-memory", memory::locked),
    Check::of_host("logout", host::logout),
    Check::of_host("limits", host::limits),
    Check::of_host("mount-helpers", host::mount_helpers),
    Check::of_host("settings", settings::look),
    Check::of_host("mounts", mounts::mounts),
    Check::of_host("arenas", mounts::arenas),
    Check::of_host("mpi", mpi::look),
    Check::of_backing("backing", backing::place),
    Check::of_backing("writable", backing::writable),
    Check::of_storage("room", storage::room),
    Check::of_storage("sync", storage::sync),
    Check::of_storage("names", storage::names),
    Check::of_storage("locks", storage::locks),
    Check::of_storage("files", storage::files),
    Check::of_storage("clock", storage::clock),
];

impl Check {
    const fn of_host(name: &'static str, look: fn(&Subject<'_>) -> Vec<Finding>) -> Self {
        let group = Group::Host;
        Self { name, group, look }
    }

    const fn of_backing(name: &'static str, look: fn(&Subject<'_>) -> Vec<Finding>) -> Self {
        let group = Group::Backing;
        Self { name, group, look }
    }

    const fn of_storage(name: &'static str, look: fn(&Subject<'_>) -> Vec<Finding>) -> Self {
        let group = Group::Storage;
        Self { name, group, look }
    }
}

/// User id of the caller.
fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The words of a file such as fuse.conf or logind.conf: what stands before `#` or `;` in each line.
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
