//! Checks whether this user can make a FUSE mount.
//!
//! A mount needs three things: the device `/dev/fuse`, the permission to mount, and, for the option `allow-other`, a
//! line in `/etc/fuse.conf`. A user without CAP_SYS_ADMIN gets the permission from fuse3's helper `fusermount3`, which
//! is set-user-ID root.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use firn_format::quote::quoted_path;
use rustix::fs::{Access, AtFlags, CWD, StatVfsMountFlags, accessat};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities};

use crate::doctor::{CheckSubject, Finding, settings_in, user_id};

const DEVICE: &str = "/dev/fuse";
const HELPER: &str = "fusermount3";
/// Configuration file of fuse3, which says whether mounts may use `allow_other`.
const CONFIGURATION: &str = "/etc/fuse.conf";
/// The set-user-ID bit of a file's mode (S_ISUID).
const SET_USER_ID: u32 = 0o4000;
/// Advice for hosts where FUSE is not available.
const WITHOUT_FUSE: &str = "without FUSE: `firn run`, or `firn mount --frontend=preload`";

/// Returns why the FUSE device cannot be used, in words. Returns `None` if it can be used.
pub fn device_fault() -> Option<String> {
    open_device().err().map(|fault| fault.text)
}

/// Why the FUSE device cannot be used, and what the user should do.
struct DeviceFault {
    text: String,
    advice: String,
}

/// Opens the FUSE device as a mount would, and closes it again. The error says why this fails, with advice.
fn open_device() -> Result<(), DeviceFault> {
    let fault = |text: String, advice: &str| DeviceFault {
        text,
        advice: format!("{advice}; {WITHOUT_FUSE}"),
    };
    let load_advice =
        "as root: `modprobe fuse`; in a container: `--device /dev/fuse --cap-add SYS_ADMIN`";
    // Major and minor number of the FUSE device: 10 is misc, 229 is fuse (Documentation/admin-guide/devices.txt).
    let number = rustix::fs::makedev(10, 229);
    let found = std::fs::metadata(DEVICE)
        .map_err(|error| fault(format!("{DEVICE}: {error}"), load_advice))?;
    if !found.file_type().is_char_device() || found.rdev() != number {
        return Err(fault(
            format!("{DEVICE} is not the FUSE device"),
            load_advice,
        ));
    }
    let opened = std::fs::File::options().read(true).write(true).open(DEVICE);
    opened.map(drop).map_err(|error| {
        let advice = match error.raw_os_error() {
            Some(errno) if errno == Errno::ACCESS.raw_os_error() => {
                "as root: `chmod 666 /dev/fuse`"
            }
            _ => load_advice,
        };
        let mode = found.mode() & 0o7777;
        let owner = found.uid();
        let text = format!(
            "user {} cannot open {DEVICE}: {error} (owner {owner}, mode {mode:04o})",
            user_id()
        );
        fault(text, advice)
    })
}

/// Reports whether this user can open the FUSE device.
pub(crate) fn check_device(_: &CheckSubject<'_>) -> Vec<Finding> {
    vec![match open_device() {
        Ok(()) => Finding::ok(format!("{DEVICE} can be opened")),
        Err(DeviceFault { text, advice }) => Finding::wrong(text, advice),
    }]
}

/// Returns whether this process has the capability to mount without a helper.
fn has_mount_capability() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
}

/// Reports whether this user can mount, either directly or through fuse3's helper.
pub(crate) fn check_helper(_: &CheckSubject<'_>) -> Vec<Finding> {
    if has_mount_capability() {
        return vec![Finding::ok("not needed: this user may mount")];
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut programs = std::env::split_paths(&path).map(|dir| dir.join(HELPER));
    let found = programs.find(|program| program.exists());
    vec![match found {
        None => Finding::wrong(
            format!("{HELPER} is not in the PATH, and mounting without root needs it"),
            format!("as root: install the package fuse3; {WITHOUT_FUSE}"),
        ),
        Some(_) if user_id() == 0 => Finding::wrong(
            "root may not mount here (no CAP_SYS_ADMIN)",
            format!("in a container: `--cap-add SYS_ADMIN`, or mount on the host; {WITHOUT_FUSE}"),
        ),
        Some(program) => judge_helper(&program),
    }]
}

/// Judges fuse3's helper. This user must be able to execute it, and it must run as root.
fn judge_helper(program: &Path) -> Finding {
    let name = quoted_path(program);
    let Ok(found) = program.metadata() else {
        return Finding::note(
            format!("{name} cannot be examined"),
            "as root: reinstall the package fuse3",
        );
    };
    if accessat(CWD, program, Access::EXEC_OK, AtFlags::EACCESS).is_err() {
        let text = format!("user {} may not execute {name}", user_id());
        let advice = format!(
            "as root: `chmod o+x {name}`, or `usermod -aG {} USER`",
            found.gid()
        );
        return Finding::wrong(text, advice);
    }
    let is_set_id = found.mode() & SET_USER_ID != 0 && found.uid() == 0;
    let is_honoured = rustix::fs::statvfs(program)
        .is_ok_and(|stat| !stat.f_flag.contains(StatVfsMountFlags::NOSUID));
    if !is_set_id {
        let advice = format!("as root: `chown root {name} && chmod u+s {name}`; {WITHOUT_FUSE}");
        return Finding::wrong(format!("{name} is not set-user-ID root"), advice);
    }
    if !is_honoured {
        let text = format!("{name} is on a file system that is mounted nosuid");
        return Finding::wrong(
            text,
            format!("as root: remount it with suid; {WITHOUT_FUSE}"),
        );
    }
    Finding::ok(format!("{name} mounts for this user"))
}

/// Reports whether a mount can give other users access (`allow_other`).
pub(crate) fn check_allow_other(subject: &CheckSubject<'_>) -> Vec<Finding> {
    if has_mount_capability() {
        return vec![Finding::ok(
            "this user may give other users access (allow-other)",
        )];
    }
    let is_allowed = settings_in(Path::new(CONFIGURATION))
        .iter()
        .any(|setting| setting == "user_allow_other");
    let text = format!("{CONFIGURATION} does not allow allow-other: mounts with it are refused");
    let advice = format!("as root: `echo user_allow_other >> {CONFIGURATION}`");
    vec![match (is_allowed, subject.options.allow_other) {
        (true, _) => Finding::ok("users may give other users access (allow-other)"),
        (false, true) => Finding::wrong(text, advice),
        // A mount that asks for `allow_other` reports the refusal itself.
        (false, false) => Finding::ok("allow-other is not allowed, and the mount does not use it"),
    }]
}

/// Returns the path of the first program `name` in PATH that this user may execute, or `None` if there is none.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_program =
        |program: &PathBuf| accessat(CWD, program, Access::EXEC_OK, AtFlags::EACCESS).is_ok();
    let mut programs = std::env::split_paths(&path).map(|dir| dir.join(name));
    programs.find(is_program)
}
