//! A process of another user that changes a file in one way, and tells at once what the file may still do.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;

use rustix::fs::{AtFlags, CWD, FallocateFlags, Gid, StatxFlags, Uid, XattrFlags};
use rustix::io::Errno;
use rustix::mm::MapFlags;

use crate::fsops::{Mapping, errno};

/// What lets a program have rights of its own.
pub const CAPABILITY: &str = "security.capability";
/// CAP_DAC_OVERRIDE, permitted and effective (`struct vfs_cap_data`, version 2).
pub const CAP_DAC_OVERRIDE: [u8; 20] = [1, 0, 0, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// The name of the file that `copy` and `sendfile` take bytes from, in the directory of the other.
pub const SOURCE: &str = "source";

/// The user that changes it.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// How a failure calls it.
    pub name: &'static str,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// The only supplementary group.
    pub group: u32,
    /// Keeps CAP_FSETID, if it is root.
    pub may_set_id: bool,
}

/// Ways to change a file.
pub const CALLS: [&str; 24] = [
    "write",
    "write-nothing",
    "append",
    "sendfile",
    "open-trunc",
    "create-trunc",
    "truncate",
    "truncate-same",
    "ftruncate",
    "ftruncate-longer",
    "fallocate",
    "punch",
    "copy",
    "mmap",
    "chown-none",
    "chown-same",
    "chgrp",
    "chgrp-fd",
    "chmod",
    "chmod-no-execute",
    "setfacl",
    "write-chmod",
    "write-setcap",
    "read",
];

/// The answer of one change: the errno or 0, and what is left right after the call, with the file still open.
pub fn change(
    helper: &Path,
    who: &Caller,
    call: &str,
    path: &Path,
    prepare: impl FnOnce(&mut Command),
) -> String {
    let mut command = Command::new(helper);
    let ids = [who.uid, who.gid, who.group, u32::from(who.may_set_id)].map(|id| id.to_string());
    command.arg("change").args(ids).arg(call).arg(path);
    prepare(&mut command);
    let output = command.output().expect("start the helper");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{} {call} {path:?}: {errors}",
        who.name
    );
    String::from_utf8(output.stdout)
        .expect("text")
        .trim()
        .to_owned()
}

/// Mode and capability as the kernel shows them. Only the mode is asked for: what the kernel has cached of it may be
/// valid although it knows that size and times are not.
pub fn left(path: &Path) -> String {
    let statx = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::MODE).expect("statx");
    let mut value = [0; 64];
    let capable = match rustix::fs::getxattr(path, CAPABILITY, &mut value) {
        Ok(_) => "capable",
        Err(Errno::NODATA) => "plain",
        Err(error) => panic!("{error}"),
    };
    format!("{:04o} {capable}", statx.stx_mode & 0o7777)
}

/// The process's side.
pub fn serve(uid: u32, gid: u32, group: u32, may_set_id: bool, call: &str, path: &Path) {
    become_user(uid, gid, group, may_set_id);
    let mut open = None;
    let done = perform(call, path, group, &mut open);
    let done = done.map_or_else(Errno::raw_os_error, |()| 0);
    println!("errno {done} {}", left(path));
}

fn become_user(uid: u32, gid: u32, group: u32, may_set_id: bool) {
    if !may_set_id && uid == 0 {
        let sets = rustix::thread::capabilities(None).expect("capget");
        let without = |set| set & !rustix::thread::CapabilitySet::FSETID;
        let sets = rustix::thread::CapabilitySets {
            effective: without(sets.effective),
            permitted: without(sets.permitted),
            inheritable: without(sets.inheritable),
        };
        rustix::thread::set_capabilities(None, sets).expect("capset");
    }
    rustix::thread::set_thread_groups(&[Gid::from_raw(group)]).expect("setgroups");
    let uid = Uid::from_raw(uid);
    let gid = Gid::from_raw(gid);
    rustix::thread::set_thread_res_gid(gid, gid, gid).expect("setresgid");
    rustix::thread::set_thread_res_uid(uid, uid, uid).expect("setresuid");
}

/// How the file is opened for a call, if it is.
fn flags(call: &str) -> Option<i32> {
    match call {
        "truncate" | "truncate-same" | "chown-none" | "chown-same" | "chgrp" | "chmod"
        | "chmod-no-execute" | "setfacl" => None,
        "append" => Some(libc::O_APPEND),
        "open-trunc" => Some(libc::O_TRUNC),
        "create-trunc" => Some(libc::O_TRUNC | libc::O_CREAT),
        _ => Some(0),
    }
}

fn perform(call: &str, path: &Path, group: u32, open: &mut Option<File>) -> Result<(), Errno> {
    let io = |done: std::io::Result<()>| done.map_err(|error| errno(&error));
    if let Some(flags) = flags(call) {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open(path);
        *open = Some(file.map_err(|error| errno(&error))?);
    }
    let file = || open.as_ref().expect("open for this call");
    let group = Gid::from_raw(group);
    match call {
        "open-trunc" | "create-trunc" => Ok(()),
        "read" => io(file().read_at(&mut [0; 16], 0).map(drop)),
        "write" => io(file().write_all_at(b"changed", 100)),
        "write-nothing" => io(file().write_at(b"", 0).map(drop)),
        "append" => io(file().write_all_at(b"more", 0)),
        "sendfile" => {
            let from = source(path)?;
            rustix::fs::sendfile(file(), &from, None, 100).map(drop)
        }
        "truncate" => truncate(path, 100),
        "truncate-same" => truncate(path, std::fs::metadata(path).expect("stat").len()),
        "ftruncate" => rustix::fs::ftruncate(file(), 100),
        "ftruncate-longer" => rustix::fs::ftruncate(file(), 100_000),
        "fallocate" => rustix::fs::fallocate(file(), FallocateFlags::empty(), 0, 20_000),
        "punch" => {
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(file(), how, 0, 4096)
        }
        "copy" => rustix::fs::copy_file_range(source(path)?, None, file(), None, 100).map(drop),
        "mmap" => {
            let mapping = Mapping::new(file(), 4096, MapFlags::SHARED)?;
            mapping.write(0, b"stored");
            mapping.sync()
        }
        "chown-none" => rustix::fs::chown(path, None, None),
        "chown-same" => {
            let owner = rustix::fs::stat(path)?.st_uid;
            rustix::fs::chown(path, Some(Uid::from_raw(owner)), None)
        }
        "chgrp" => rustix::fs::chown(path, None, Some(group)),
        "chgrp-fd" => rustix::fs::fchown(file(), None, Some(group)),
        "chmod" => rustix::fs::chmod(path, 0o6777.into()),
        "chmod-no-execute" => rustix::fs::chmod(path, 0o6767.into()),
        "setfacl" => rustix::fs::setxattr(
            path,
            "system.posix_acl_access",
            &open_acl(),
            XattrFlags::empty(),
        ),
        "write-chmod" => {
            io(file().write_all_at(b"changed", 100))?;
            rustix::fs::fchmod(file(), 0o6777.into())
        }
        "write-setcap" => {
            io(file().write_all_at(b"changed", 100))?;
            rustix::fs::fsetxattr(file(), CAPABILITY, &CAP_DAC_OVERRIDE, XattrFlags::empty())
        }
        _ => panic!("no call: {call}"),
    }
}

/// A file beside the one that is changed, to copy from.
fn source(path: &Path) -> Result<File, Errno> {
    File::open(path.with_file_name(SOURCE)).map_err(|error| errno(&error))
}

fn truncate(path: &Path, len: u64) -> Result<(), Errno> {
    let path = CString::new(path.as_os_str().as_bytes()).expect("a path");
    // SAFETY: the string ends, and lives for the length of the call.
    match unsafe { libc::truncate(path.as_ptr(), len as i64) } {
        0 => Ok(()),
        _ => Err(errno(&std::io::Error::last_os_error())),
    }
}

/// u::rwx, g::rwx, o::rwx (`struct posix_acl_xattr_header`, version 2, and its entries).
fn open_acl() -> Vec<u8> {
    let mut acl = 2_u32.to_le_bytes().to_vec();
    for tag in [0x01_u16, 0x04, 0x20] {
        acl.extend(tag.to_le_bytes());
        acl.extend(7_u16.to_le_bytes());
        acl.extend(u32::MAX.to_le_bytes());
    }
    acl
}
