//! Mounts and unmounts: with mount(2) if this process may, else with the program fusermount3.
//!
//! Invariant: nothing here unmounts a path after the kernel has ended the mount, because another file system may be
//! mounted there by then.

use std::ffi::CString;
use std::fs::OpenOptions;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use firn_format::mountinfo;
use firn_process::{ExcessOutput, Limits, RunError};
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, FdFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, UnmountFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::session::{SessionError, SessionOptions};

const DEVICE: &str = "/dev/fuse";
const HELPER: &str = "fusermount3";
/// Timeout of fusermount3. To mount, it waits for the kernel only. To unmount without `lazy`, it waits until the kernel
/// has written back its pages.
const HELPER_LIMIT: Duration = Duration::from_secs(60);
const HELPER_OUTPUT_BYTES_MAX: usize = 4096;
/// Readahead of the kernel, for reads and for page faults of mappings. It is four requests of the largest size, so that
/// one is copied while the others are answered.
const READAHEAD_KIB: u32 = 4096;

/// Mounts at `mount_point`, a canonical path, and returns the open `/dev/fuse` of the connection. Uses mount(2), or the
/// program fusermount3 if this process may not mount.
pub(crate) fn mount(mount_point: &Path, options: &SessionOptions) -> Result<OwnedFd, SessionError> {
    if !Path::new(DEVICE).exists() {
        return Err(SessionError::NoDevice);
    }
    match mount_direct(mount_point, options) {
        Ok(device) => Ok(device),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES)) => {
            mount_by_helper(mount_point, options)
        }
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Err(SessionError::NoDevice),
        Err(source) => Err(SessionError::Mount {
            mount_point: mount_point.into(),
            source,
        }),
    }
}

/// Mounts with mount(2), and returns the open `/dev/fuse`.
fn mount_direct(mount_point: &Path, options: &SessionOptions) -> io::Result<OwnedFd> {
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_CLOEXEC)
        .open(DEVICE)?;
    let rootmode = std::fs::metadata(mount_point)?.mode();
    let uid = rustix::process::getuid().as_raw();
    let gid = rustix::process::getgid().as_raw();
    let mut data = format!(
        "fd={},rootmode={rootmode:o},user_id={uid},group_id={gid}",
        device.as_raw_fd()
    );
    for option in kernel_options(options) {
        data.push(',');
        data.push_str(option);
    }
    let source = CString::new(options.source.as_os_str().as_bytes())?;
    rustix::mount::mount(
        source.as_c_str(),
        mount_point,
        c"fuse",
        mount_flags(options),
        Some(CString::new(data)?.as_c_str()),
    )?;
    Ok(device.into())
}

/// Flags of mount(2) for these options.
fn mount_flags(options: &SessionOptions) -> MountFlags {
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    flags.set(MountFlags::RDONLY, options.read_only);
    for option_name in &options.kernel_flags {
        let (flag, is_set) = match *option_name {
            "nosuid" => (MountFlags::NOSUID, true),
            "suid" => (MountFlags::NOSUID, false),
            "nodev" => (MountFlags::NODEV, true),
            "dev" => (MountFlags::NODEV, false),
            "noexec" => (MountFlags::NOEXEC, true),
            "exec" => (MountFlags::NOEXEC, false),
            "noatime" => (MountFlags::NOATIME, true),
            "atime" => (MountFlags::NOATIME, false),
            "sync" => (MountFlags::SYNCHRONOUS, true),
            "async" => (MountFlags::SYNCHRONOUS, false),
            "dirsync" => (MountFlags::DIRSYNC, true),
            _ => continue,
        };
        flags.set(flag, is_set);
    }
    flags
}

/// Options of the kernel's FUSE file system, except those that only mount(2) needs.
fn kernel_options(options: &SessionOptions) -> impl Iterator<Item = &'static str> {
    let allow_other = options.allow_other.then_some("allow_other");
    ["subtype=firn", "default_permissions"]
        .into_iter()
        .chain(allow_other)
}

/// Mounts with the program fusermount3, which sends the open `/dev/fuse` over the socket that `_FUSE_COMMFD` names.
fn mount_by_helper(mount_point: &Path, options: &SessionOptions) -> Result<OwnedFd, SessionError> {
    let mount_error = |source| SessionError::Mount {
        mount_point: mount_point.into(),
        source,
    };
    let (our_socket, helper_socket) = UnixStream::pair().map_err(mount_error)?;
    // The helper inherits its socket.
    rustix::io::fcntl_setfd(&helper_socket, FdFlags::empty())
        .map_err(|error| mount_error(error.into()))?;
    let mut helper = Command::new(HELPER);
    helper
        .arg("-o")
        .arg(std::ffi::OsStr::from_bytes(&helper_options(options)))
        .arg("--")
        .arg(mount_point)
        .env("_FUSE_COMMFD", helper_socket.as_raw_fd().to_string());
    let (device, helper_result) = std::thread::scope(|scope| {
        let helper_thread = scope.spawn(move || {
            // Dropped when the helper has ended. Then no process has this end of the socket any more, and
            // `receive_device` returns.
            let _helper_socket = helper_socket;
            firn_process::run(helper, limits())
        });
        (receive_device(&our_socket), helper_thread.join())
    });
    if let Some(device) = device.map_err(mount_error)? {
        return Ok(device);
    }
    let helper_result = helper_result
        .map_err(|_| mount_error(io::Error::other("the thread of fusermount3 panicked")))?;
    match helper_result {
        Ok(helper_result) => Err(SessionError::Helper {
            text: helper_result.text(),
        }),
        Err(RunError::Start(error)) if error.kind() == io::ErrorKind::NotFound => {
            Err(SessionError::NoHelper)
        }
        Err(error) => Err(mount_error(io::Error::other(format!("{HELPER}: {error}")))),
    }
}

/// Returns the options of a mount as fusermount3 takes them, with commas between them.
fn helper_options(options: &SessionOptions) -> Vec<u8> {
    let source = escaped(options.source.as_os_str().as_bytes());
    let mut words: Vec<Vec<u8>> = kernel_options(options)
        .map(|option| option.into())
        .collect();
    words.push([b"fsname=", source.as_slice()].concat());
    if options.read_only {
        words.push(b"ro".to_vec());
    }
    words.extend(options.kernel_flags.iter().map(|flag| (*flag).into()));
    words.join(&b","[..])
}

/// Limits of a run of fusermount3.
fn limits() -> Limits<'static> {
    Limits {
        input: b"",
        output_bytes_max: HELPER_OUTPUT_BYTES_MAX,
        excess: ExcessOutput::Discard,
        deadline: Instant::now() + HELPER_LIMIT,
    }
}

/// Receives the open `/dev/fuse` from the program fusermount3. Returns `None` if fusermount3 ends without sending it.
fn receive_device(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut control_data = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut messages = RecvAncillaryBuffer::new(&mut control_data);
    let mut byte = [0u8];
    rustix::io::retry_on_intr(|| {
        let mut data = [IoSliceMut::new(&mut byte)];
        recvmsg(socket, &mut data, &mut messages, RecvFlags::CMSG_CLOEXEC)
    })?;
    for message in messages.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message
            && let Some(device) = fds.next()
        {
            return Ok(Some(device));
        }
    }
    Ok(None)
}

/// Escapes a value for fusermount3, which splits its options at commas and takes the byte after a backslash literally.
fn escaped(bytes: &[u8]) -> Vec<u8> {
    let mut escaped = Vec::with_capacity(bytes.len());
    for &byte in bytes {
        if matches!(byte, b',' | b'\\') {
            escaped.push(b'\\');
        }
        escaped.push(byte);
    }
    escaped
}

/// Unmounts `mount_point`. With `lazy`, takes the mount out of the tree even while files are open. Without it, open
/// files cause `EBUSY`.
pub fn detach(mount_point: &Path, lazy: bool) -> io::Result<()> {
    let mut flags = UnmountFlags::NOFOLLOW;
    flags.set(UnmountFlags::DETACH, lazy);
    match rustix::mount::unmount(mount_point, flags) {
        Err(Errno::PERM) => detach_by_helper(mount_point, lazy),
        result => Ok(result?),
    }
}

/// Unmounts with the program fusermount3. With `lazy` the mount leaves the tree even while programs use it; otherwise
/// that is the error EBUSY.
fn detach_by_helper(mount_point: &Path, lazy: bool) -> io::Result<()> {
    let mut helper = Command::new(HELPER);
    helper
        .arg(if lazy { "-uz" } else { "-u" })
        .arg("--")
        .arg(mount_point);
    let helper_result = firn_process::run(helper, limits()).map_err(|error| match error {
        RunError::Start(error) => error,
        error => io::Error::other(format!("{HELPER}: {error}")),
    })?;
    if helper_result.status.success() {
        return Ok(());
    }
    let text = helper_result.text();
    // fusermount3 does not translate its messages; this word occurs in its message for EBUSY.
    if text.contains("busy") {
        Err(Errno::BUSY.into())
    } else {
        Err(io::Error::other(text))
    }
}

/// Returns the major and minor number of the file system at `mount_point`. The minor number is that of the connection.
pub(crate) fn device_number(mount_point: &Path) -> Option<(u32, u32)> {
    let entries = mountinfo::parse(&std::fs::read("/proc/self/mountinfo").ok()?);
    Some(mountinfo::on_top(&entries, mount_point)?.device)
}

/// Raises the readahead of the kernel. A FUSE server cannot ask for more than the default of 128 KiB; root can set
/// more.
pub(crate) fn set_readahead((major, minor): (u32, u32)) {
    let setting = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    if let Err(error) = std::fs::write(setting, READAHEAD_KIB.to_string()) {
        tracing::debug!(%error, "cannot raise the kernel's readahead, which remains at its default of 128 KiB");
    }
}

/// Aborts the FUSE connection of a mount: with its control file (`control`) if there is one, else by a forced unmount.
/// Only root may force an unmount, and only while the mount is in the tree. `expected_device`: the mount's device
/// number.
pub(crate) fn abort(
    mount_point: &Path,
    expected_device: Option<(u32, u32)>,
    control: Option<&OwnedFd>,
) -> io::Result<()> {
    if let Some(control) = control {
        rustix::io::write(control, b"1")?;
        return Ok(());
    }
    if device_number(mount_point) != expected_device {
        // Another file system is mounted there now; a forced unmount would unmount that one.
        return Err(Errno::NOENT.into());
    }
    match rustix::mount::unmount(mount_point, UnmountFlags::NOFOLLOW | UnmountFlags::FORCE) {
        // EBUSY: the connection is aborted, but the mount remains in the tree until it is detached.
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Usual mount point of the file system fusectl.
const CONTROL: &str = "/sys/fs/fuse/connections";

/// Opens the control file (`NUMBER/abort` in fusectl) that aborts a FUSE connection; the connection's owner may do so.
///
/// After a connection has ended, the kernel gives its number to the next mount. An open descriptor of the control file
/// never refers to the next connection: after the end of its own connection, a write succeeds and does nothing.
pub fn open_control(connection: u32) -> io::Result<OwnedFd> {
    let name = format!("{connection}/abort");
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let usual_path = Path::new(CONTROL).join(&name);
    if let Ok(control) = rustix::fs::open(usual_path, flags, Mode::empty()) {
        return Ok(control);
    }
    // Root can mount fusectl for itself, outside the tree.
    let context = rustix::mount::fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_create(context.as_fd())?;
    let own_fusectl = rustix::mount::fsmount(
        context.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::empty(),
    )?;
    Ok(rustix::fs::openat(own_fusectl, name, flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_and_backslashes_survive_the_helpers_option_syntax() {
        assert_eq!(escaped(br"/a,b\c d"), br"/a\,b\\c d");
    }

    #[test]
    fn flags_of_the_kernel_are_taken_in_order_over_the_safe_defaults() {
        let mut options = SessionOptions {
            source: "/x".into(),
            threads: 0,
            allow_other: false,
            read_only: true,
            kernel_flags: vec![],
        };
        assert_eq!(
            mount_flags(&options),
            MountFlags::NOSUID | MountFlags::NODEV | MountFlags::RDONLY
        );
        options.kernel_flags = vec!["suid", "noexec", "exec", "noexec", "dev"];
        assert_eq!(
            mount_flags(&options),
            MountFlags::NOEXEC | MountFlags::RDONLY
        );
    }

    #[test]
    fn a_helper_that_ends_without_a_device_is_told() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert!(receive_device(&ours).unwrap().is_none());
    }
}
