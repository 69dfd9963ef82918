//! Checks of the settings of this host that decide how long a mount lives and what it can do.
//!
//! * `logout`: logind may remove a user's files in /dev/shm at the end of the last session. Arenas, the files with data
//!   that mounts have in memory, are usually there.
//! * `limits`: firnd, the daemon of a mount, inherits the resource limits of the process that mounts.
//! * `mount-helpers`: mount(8) and umount(8) call helper programs, which must be installed.

use std::path::{Path, PathBuf};

use firn_format::quantity;
use firn_format::quote::quoted_path;
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::process::{Resource, getrlimit};

use crate::doctor::{CheckSubject, Finding, settings_in, user_id};

/// Lowest user id of a person. logind spares the files of users below it (`SYSTEM_UID_MAX` of systemd).
const FIRST_USER: u32 = 1000;
/// Number of file descriptors that suffices. firnd uses a quarter of its descriptors for files that programs have open.
const DESCRIPTORS_ENOUGH: u64 = 4096;
/// The helper programs that mount(8) and umount(8) call, and the directory in which they look.
const HELPERS: [&str; 2] = ["mount.firn", "umount.fuse.firn"];
const HELPER_DIR: &str = "/sbin";

/// Reports whether the user's files in /dev/shm outlive the user's sessions. Arenas, the files with data that mounts
/// have in memory, are among them.
pub(crate) fn check_logout(_: &CheckSubject<'_>) -> Vec<Finding> {
    let runtime = firn_client::paths::runtime_dir().unwrap_or_default();
    vec![if !runtime.starts_with("/dev/shm") {
        Finding::ok("arenas are not in /dev/shm, the only directory that logind empties at logout")
    } else if user_id() < FIRST_USER {
        Finding::ok(
            "files in /dev/shm remain after logout (logind spares those of root and system users)",
        )
    } else if !Path::new("/run/systemd/users").exists() {
        Finding::ok("no logind runs here that would remove files in /dev/shm at logout")
    } else if user_lingers() {
        Finding::ok("files in /dev/shm remain after logout (this user lingers)")
    } else if !logind_removes_ipc() {
        Finding::ok("files in /dev/shm remain after logout (RemoveIPC=no)")
    } else {
        Finding::note(
            "logind removes a user's arenas in /dev/shm, with the data in them, at the end of the user's last session",
            format!(
                "`loginctl enable-linger {}`, or RemoveIPC=no in /etc/systemd/logind.conf",
                user_id()
            ),
        )
    }]
}

/// Returns whether this user "lingers": logind then keeps the user's processes and files after the last session. logind
/// records this as a file with the user's name.
fn user_lingers() -> bool {
    let Some(name) = user_name().or_else(|| std::env::var("USER").ok()) else {
        return false;
    };
    Path::new("/var/lib/systemd/linger").join(name).exists()
}

/// Returns this user's name from /etc/passwd, or `None` if it has no line for this user id.
fn user_name() -> Option<String> {
    let lines = settings_in(Path::new("/etc/passwd"));
    let own_uid = user_id().to_string();
    for line in &lines {
        let mut fields = line.split(':');
        let (name, _password, uid) = (fields.next()?, fields.next(), fields.next());
        if uid == Some(own_uid.as_str()) {
            return Some(name.to_owned());
        }
    }
    None
}

/// Returns whether logind removes the user's shared memory at logout, which is its default.
///
/// logind reads logind.conf first, and then the files of logind.conf.d in the order of their names. The last setting
/// that it reads counts.
fn logind_removes_ipc() -> bool {
    let dirs = ["/usr/lib/systemd", "/run/systemd", "/etc/systemd"].map(Path::new);
    let mut drop_ins: Vec<PathBuf> = Vec::new();
    for dir in dirs {
        let Ok(entries) = dir.join("logind.conf.d").read_dir() else {
            continue;
        };
        drop_ins.extend(entries.flatten().map(|entry| entry.path()));
    }
    drop_ins.sort_by_key(|path| path.file_name().map(ToOwned::to_owned));
    let mut files: Vec<PathBuf> = dirs.map(|dir| dir.join("logind.conf")).to_vec();
    files.extend(drop_ins);
    let settings = files.iter().flat_map(|file| settings_in(file));
    last_boolean(settings, "RemoveIPC").unwrap_or(true)
}

/// Returns the last value of a yes-or-no setting, or `None` if no line sets it.
fn last_boolean(settings: impl Iterator<Item = String>, name: &str) -> Option<bool> {
    let mut last_value = None;
    for setting in settings {
        if let Some((key, value)) = setting.split_once('=')
            && key.trim() == name
        {
            let word = value.trim().to_lowercase();
            last_value = Some(["yes", "true", "on", "1"].contains(&word.as_str()));
        }
    }
    last_value
}

/// Reports resource limits of this process that are too low for firnd, the daemon of a mount, which would inherit them.
pub(crate) fn check_limits(_: &CheckSubject<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(limit) = getrlimit(Resource::Fsize).maximum {
        findings.push(Finding::note(
            format!("files larger than {}, the hard limit on file sizes, cannot be drained", quantity::bytes(limit)),
            "mount from a shell with `ulimit -f unlimited`, or raise `fsize` in /etc/security/limits.conf",
        ));
    }
    if let Some(limit) = getrlimit(Resource::Nofile).maximum
        && limit < DESCRIPTORS_ENOUGH
    {
        findings.push(Finding::note(
            format!("firnd may have {limit} descriptors: programs get ENFILE with many open files"),
            "raise `nofile` in /etc/security/limits.conf, or LimitNOFILE= of the service",
        ));
    }
    if findings.is_empty() {
        findings.push(Finding::ok(
            "no limit on file sizes, and enough descriptors",
        ));
    }
    findings
}

/// Reports whether mount(8) and umount(8) find Firn's helpers.
pub(crate) fn check_mount_helpers(_: &CheckSubject<'_>) -> Vec<Finding> {
    let is_installed = |name: &str| {
        let path = Path::new(HELPER_DIR).join(name);
        accessat(CWD, &path, Access::EXEC_OK, AtFlags::EACCESS).is_ok()
    };
    let missing: Vec<&str> = HELPERS
        .into_iter()
        .filter(|name| !is_installed(name))
        .collect();
    if missing.is_empty() {
        return vec![Finding::ok(
            "mount(8), umount(8) and fstab find Firn in /sbin",
        )];
    }
    let program = std::env::current_exe().unwrap_or_else(|_| "/usr/local/bin/firn".into());
    let link_target = quoted_path(&program);
    let link_commands: Vec<String> = missing
        .iter()
        .map(|name| format!("ln -sf {link_target} {HELPER_DIR}/{name}"))
        .collect();
    vec![Finding::note(
        format!(
            "{} missing in {HELPER_DIR}: fstab cannot mount (mount.firn), umount(8) returns before the drain ends (umount.fuse.firn)",
            missing.join(" and ")
        ),
        format!(
            "as root: `{}`; `firn mount` and `firn umount` need neither",
            link_commands.join(" && ")
        ),
    )]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_setting_of_logind_counts() {
        let set = |lines: &[&str]| {
            let lines = lines.iter().map(|line| (*line).to_owned());
            last_boolean(lines, "RemoveIPC")
        };
        assert_eq!(set(&["[Login]"]), None);
        assert_eq!(set(&["RemoveIPC=no"]), Some(false));
        assert_eq!(
            set(&["RemoveIPC=no", "KillUserProcesses=no", "RemoveIPC = yes"]),
            Some(true)
        );
    }
}
