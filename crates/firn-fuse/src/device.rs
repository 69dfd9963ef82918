//! Mounting and unmounting: mount(2) where this process may, fusermount3 where not.
//!
//! After the kernel let go of a mount nothing here unmounts: something else may be mounted at that path by then.

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
use firn_process::{Excess, Limits, RunError};
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, FdFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, UnmountFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::session::{SessionError, SessionOptions};

const DEVICE: &str = "/dev/fuse";
const HELPER: &str = "fusermount3";
/// A mount waits for nothing but the kernel; an unmount that is not lazy, for what the kernel writes back first.
const HELPER_LIMIT: Duration = Duration::from_secs(60);
const HELPER_OUTPUT_BYTES_MAX: usize = 4096;
/// What the kernel reads ahead of a program, and around the first touch of a mapping: four requests of the largest size,
/// so that one is copied while another one is answered (docs/PERFORMANCE.md, "Restart through the kernel's cache").
const READAHEAD_KIB: u32 = 4096;

/// Mounts at `mount_point` (canonical) and returns the device.
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
        flags(options),
        Some(CString::new(data)?.as_c_str()),
    )?;
    Ok(device.into())
}

fn flags(options: &SessionOptions) -> MountFlags {
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    flags.set(MountFlags::RDONLY, options.read_only);
    for word in &options.kernel_flags {
        let (flag, on) = match *word {
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
        flags.set(flag, on);
    }
    flags
}

fn kernel_options(options: &SessionOptions) -> impl Iterator<Item = &'static str> {
    let allow_other = options.allow_other.then_some("allow_other");
    ["subtype=firn", "default_permissions"]
        .into_iter()
        .chain(allow_other)
}

/// fusermount3 mounts, then sends the device over the socket that `_FUSE_COMMFD` names.
fn mount_by_helper(mount_point: &Path, options: &SessionOptions) -> Result<OwnedFd, SessionError> {
    let failed = |source| SessionError::Mount {
        mount_point: mount_point.into(),
        source,
    };
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    rustix::io::fcntl_setfd(&theirs, FdFlags::empty()).map_err(|e| failed(e.into()))?;
    let mut list: Vec<Vec<u8>> = kernel_options(options)
        .map(|option| option.into())
        .collect();
    list.push(
        [
            b"fsname=",
            escaped(options.source.as_os_str().as_bytes()).as_slice(),
        ]
        .concat(),
    );
    if options.read_only {
        list.push(b"ro".to_vec());
    }
    list.extend(options.kernel_flags.iter().map(|word| (*word).into()));
    let list = list.join(&b","[..]);
    let mut helper = Command::new(HELPER);
    helper
        .arg("-o")
        .arg(std::ffi::OsStr::from_bytes(&list))
        .arg("--")
        .arg(mount_point)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string());
    let (device, ended) = std::thread::scope(|scope| {
        let running = scope.spawn(move || {
            // Without this descriptor and without the helper, no process can send any more.
            let _theirs = theirs;
            firn_process::run(helper, limits())
        });
        (receive(&ours), running.join())
    });
    if let Some(device) = device.map_err(failed)? {
        return Ok(device);
    }
    let ended =
        ended.map_err(|_| failed(io::Error::other("the thread of fusermount3 panicked")))?;
    match ended {
        Ok(ended) => Err(SessionError::Helper { text: ended.text() }),
        Err(RunError::Start(error)) if error.kind() == io::ErrorKind::NotFound => {
            Err(SessionError::NoHelper)
        }
        Err(error) => Err(failed(io::Error::other(format!("{HELPER}: {error}")))),
    }
}

fn limits() -> Limits<'static> {
    Limits {
        input: b"",
        output_bytes_max: HELPER_OUTPUT_BYTES_MAX,
        excess: Excess::Discard,
        deadline: Instant::now() + HELPER_LIMIT,
    }
}

/// The device that fusermount3 sends; `None` if it ended without.
fn receive(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut messages = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0u8];
    let flags = RecvFlags::CMSG_CLOEXEC;
    rustix::io::retry_on_intr(|| {
        recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut byte)],
            &mut messages,
            flags,
        )
    })?;
    Ok(messages.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    }))
}

/// fusermount3 splits its options at commas and takes what follows a backslash as it is.
fn escaped(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    for &byte in bytes {
        if matches!(byte, b',' | b'\\') {
            out.push(b'\\');
        }
        out.push(byte);
    }
    out
}

/// Unmounts `mount_point`; `lazy` takes it out of the tree although files are open. `EBUSY` if they
/// are and it is not.
pub fn detach(mount_point: &Path, lazy: bool) -> io::Result<()> {
    let mut flags = UnmountFlags::NOFOLLOW;
    flags.set(UnmountFlags::DETACH, lazy);
    match rustix::mount::unmount(mount_point, flags) {
        Err(Errno::PERM) => detach_by_helper(mount_point, lazy),
        result => Ok(result?),
    }
}

fn detach_by_helper(mount_point: &Path, lazy: bool) -> io::Result<()> {
    let mut helper = Command::new(HELPER);
    helper
        .arg(if lazy { "-uz" } else { "-u" })
        .arg("--")
        .arg(mount_point);
    let ended = firn_process::run(helper, limits()).map_err(|error| match error {
        RunError::Start(error) => error,
        error => io::Error::other(format!("{HELPER}: {error}")),
    })?;
    if ended.status.success() {
        return Ok(());
    }
    let text = ended.text();
    // Its texts are not translated; this is what it says of EBUSY.
    if text.contains("busy") {
        Err(Errno::BUSY.into())
    } else {
        Err(io::Error::other(text))
    }
}

/// Major and minor number of the file system at `mount_point`; the minor one is the number of its connection.
pub(crate) fn device_number(mount_point: &Path) -> Option<(u32, u32)> {
    let entries = mountinfo::parse(&std::fs::read("/proc/self/mountinfo").ok()?);
    Some(mountinfo::on_top(&entries, mount_point)?.device)
}

/// Has the kernel read ahead in larger steps. It lets no server ask for more than its default of 128 KiB; root may.
pub(crate) fn set_readahead((major, minor): (u32, u32)) {
    let setting = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    if let Err(error) = std::fs::write(setting, READAHEAD_KIB.to_string()) {
        tracing::debug!(%error, "the kernel reads ahead by its default of 128 KiB");
    }
}

/// Aborts a connection: by its control, or by force, which root may as long as it is in the tree.
pub(crate) fn abort(
    mount_point: &Path,
    device: Option<(u32, u32)>,
    control: Option<&OwnedFd>,
) -> io::Result<()> {
    if let Some(control) = control {
        rustix::io::write(control, b"1")?;
        return Ok(());
    }
    if device_number(mount_point) != device {
        // By force would be done to whatever is mounted there now.
        return Err(Errno::NOENT.into());
    }
    match rustix::mount::unmount(mount_point, UnmountFlags::NOFOLLOW | UnmountFlags::FORCE) {
        // The connection was aborted all the same; the mount stays until it is detached.
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Where fusectl is usually mounted.
const CONTROL: &str = "/sys/fs/fuse/connections";

/// Opens what aborts a connection that lives, which its owner may do. The kernel gives the number of a connection that has
/// ended to the next mount; a descriptor never reaches another connection, and one that has ended takes the abort as done.
pub fn open_control(connection: u32) -> io::Result<OwnedFd> {
    let name = format!("{connection}/abort");
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let usual = rustix::fs::open(Path::new(CONTROL).join(&name), flags, Mode::empty());
    if let Ok(control) = usual {
        return Ok(control);
    }
    // Root needs no place for it in the tree.
    let context = rustix::mount::fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_create(context.as_fd())?;
    let connections = rustix::mount::fsmount(
        context.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::empty(),
    )?;
    Ok(rustix::fs::openat(connections, name, flags, Mode::empty())?)
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
            flags(&options),
            MountFlags::NOSUID | MountFlags::NODEV | MountFlags::RDONLY
        );
        options.kernel_flags = vec!["suid", "noexec", "exec", "noexec", "dev"];
        assert_eq!(flags(&options), MountFlags::NOEXEC | MountFlags::RDONLY);
    }

    #[test]
    fn a_helper_that_ends_without_a_device_is_told() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert!(receive(&ours).unwrap().is_none());
    }
}
