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

/// The device through which FUSE file systems are mounted.
const DEVICE: &str = "/dev/fuse";
/// The program that mounts for users without CAP_SYS_ADMIN.
const HELPER: &str = "fusermount3";
/// Configuration file of fuse3, which says whether mounts may use `allow_other`.
const CONFIGURATION: &str = "/etc/fuse.conf";
/// Major and minor number of the FUSE device (Documentation/admin-guide/devices.txt of Linux).
const MISC_MAJOR: u32 = 10;
const FUSE_MINOR: u32 = 229;
/// The bits of a file's mode that chmod(2) sets.
const PERMISSION_BITS: u32 = 0o7777;
/// The set-user-ID bit of a file's mode (S_ISUID).
const SET_USER_ID: u32 = 0o4000;
/// Advice for hosts where FUSE is not available.
const WITHOUT_FUSE: &str = "without FUSE: `firn run`, or `firn mount --frontend=preload`";

/// Returns why the FUSE device cannot be used, in words. Returns `None` if it can be used.
pub fn device_fault() -> Option<String> {
    try_open_device().err().map(|fault| fault.text)
}

/// Why the FUSE device cannot be used, and what the user should do.
struct DeviceFault {
    /// Why the device cannot be used.
    text: String,
    /// What the user should do.
    advice: String,
}

/// Opens the FUSE device as a mount would, and closes it again. The error says why this fails, with advice.
fn try_open_device() -> Result<(), DeviceFault> {
    let fault = |text: String, advice: &str| DeviceFault {
        text,
        advice: format!("{advice}; {WITHOUT_FUSE}"),
    };
    let load_advice =
        "as root: `modprobe fuse`; in a container: `--device /dev/fuse --cap-add SYS_ADMIN`";
    let metadata = match std::fs::metadata(DEVICE) {
        Ok(metadata) => metadata,
        Err(error) => return Err(fault(format!("{DEVICE}: {error}"), load_advice)),
    };
    let device_number = rustix::fs::makedev(MISC_MAJOR, FUSE_MINOR);
    if !metadata.file_type().is_char_device() || metadata.rdev() != device_number {
        return Err(fault(
            format!("{DEVICE} is not the FUSE device"),
            load_advice,
        ));
    }
    let opened = std::fs::File::options().read(true).write(true).open(DEVICE);
    let Err(error) = opened else {
        return Ok(());
    };
    let owner = metadata.uid();
    let mode = metadata.mode() & PERMISSION_BITS;
    let text = format!(
        "user {} cannot open {DEVICE}: {error} (owner {owner}, mode {mode:04o})",
        user_id()
    );
    if error.raw_os_error() == Some(Errno::ACCESS.raw_os_error()) {
        Err(fault(text, "as root: `chmod 666 /dev/fuse`"))
    } else {
        Err(fault(text, load_advice))
    }
}

/// Reports whether this user can open the FUSE device.
pub(crate) fn check_device(_: &CheckSubject<'_>) -> Vec<Finding> {
    vec![match try_open_device() {
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
    let helper = std::env::split_paths(&path)
        .map(|dir| dir.join(HELPER))
        .find(|program| program.exists());
    vec![match helper {
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
    let Ok(metadata) = program.metadata() else {
        return Finding::note(
            format!("{name} cannot be examined"),
            "as root: reinstall the package fuse3",
        );
    };
    if accessat(CWD, program, Access::EXEC_OK, AtFlags::EACCESS).is_err() {
        let text = format!("user {} may not execute {name}", user_id());
        let advice = format!(
            "as root: `chmod o+x {name}`, or `usermod -aG {} USER`",
            metadata.gid()
        );
        return Finding::wrong(text, advice);
    }
    let is_set_user_id_root = metadata.mode() & SET_USER_ID != 0 && metadata.uid() == 0;
    let is_bit_honoured = rustix::fs::statvfs(program)
        .is_ok_and(|stat| !stat.f_flag.contains(StatVfsMountFlags::NOSUID));
    if !is_set_user_id_root {
        let advice = format!("as root: `chown root {name} && chmod u+s {name}`; {WITHOUT_FUSE}");
        return Finding::wrong(format!("{name} is not set-user-ID root"), advice);
    }
    if !is_bit_honoured {
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
    vec![if is_allowed {
        Finding::ok("users may give other users access (allow-other)")
    } else if subject.options.allow_other {
        Finding::wrong(
            format!("{CONFIGURATION} does not allow allow-other: mounts with it are refused"),
            format!("as root: `echo user_allow_other >> {CONFIGURATION}`"),
        )
    } else {
        Finding::ok("allow-other is not allowed, and the mount does not use it")
    }]
}

/// Returns the path of the first program `name` in PATH that this user may execute, or `None` if there is none.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|dir| dir.join(name))
        .find(|program| accessat(CWD, program, Access::EXEC_OK, AtFlags::EACCESS).is_ok())
}
