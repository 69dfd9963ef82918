//! Finds the *stub trees* of this host: directories of empty files (*stubs*), with their bytes in a daemon, firnd. Each
//! firnd describes its tree in a file of the runtime directory.
//!
//! A process reads the directory at its start. It reads the directory again when it finds an unknown file system that
//! may be a tmpfs, unless the directory is unchanged. Children of fork(2) read it anew.
//!
//! Any user may create a directory with that name in /dev/shm. So the directory and its files are read only if this
//! user owns them and no other user may change them.

use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use firn_direct::syscall::Descriptor;
use firn_format::data_socket::{DATA_SOCKET_VERSION, PATH_BYTES, STUB_MAGIC, StubTree, Token};
use firn_trust::{RawError, open_dir_raw, open_file_raw};
use rustix::fs::{CWD, RawDir};
use rustix::io::Errno;
use zerocopy::{FromZeros, IntoBytes};

use crate::lock::Locked;
use crate::report::{self, Distrust};
use crate::sys;
use crate::vfork::is_vfork_child;
use crate::wiped::Wiped;

/// Maximum number of trees that one process knows.
const TREES_COUNT: usize = 4;
/// Bytes of the longest path that `firn` accepts: the 107 bytes of a socket's path (unix(7)) without `/` and
/// `KEY.sock`.
const DIR_BYTES_MAX: usize = 107 - "/0123456789abcdef.sock".len();
/// Bytes of the longest path of the runtime directory, with the zero byte at its end.
const DIR_BYTES: usize = DIR_BYTES_MAX + 1;
/// Bytes of a buffer for a short prefix, a number and a zero byte.
const NUMBERED_TEXT_BYTES: usize = 32;
/// A description without a tree.
const EMPTY: StubTree = StubTree {
    magic: 0,
    device_major: 0,
    device_minor: 0,
    whole_device: 0,
    pid: 0,
    refuses_locks: 0,
    unused: 0,
    arena: [0; 16],
    socket: [0; 112],
    prefix: [0; PATH_BYTES],
    backing: [0; PATH_BYTES],
};

/// Path of the runtime directory, ended by a zero byte. It is set once, at the start.
static DIR: [AtomicU8; DIR_BYTES] = [const { AtomicU8::new(0) }; DIR_BYTES];

/// Whether this process or the one that it was forked from has met a tree. It is not wiped, so a child knows that it
/// must read the directory.
static HAS_MET_TREE: AtomicBool = AtomicBool::new(false);

/// The known trees. Each has the same index in all arrays.
struct Trees {
    /// Device number of the tree, plus one ([`device_key`]); 0 if there is no tree of this index.
    devices: [AtomicU64; TREES_COUNT],
    /// Not 0 if all files of the device are stubs.
    whole: [AtomicU32; TREES_COUNT],
    /// Not 0 if locks of stubs are refused.
    refuses_locks: [AtomicU32; TREES_COUNT],
    /// Time of the directory's last change when it was read.
    read_at: AtomicU64,
    /// The descriptions of the trees.
    slots: Locked<[StubTree; TREES_COUNT]>,
}

// SAFETY: the value consists of words, a lock and records of words, for which zero bytes are valid: there is no tree.
static TREES: Wiped<Trees> = unsafe {
    Wiped::new(Trees {
        devices: [const { AtomicU64::new(0) }; TREES_COUNT],
        whole: [const { AtomicU32::new(0) }; TREES_COUNT],
        refuses_locks: [const { AtomicU32::new(0) }; TREES_COUNT],
        read_at: AtomicU64::new(0),
        slots: Locked::new([EMPTY; TREES_COUNT]),
    })
};

/// Makes children of fork(2) find no tree. Returns false if the kernel does not support that.
pub(crate) fn wipe_on_fork() -> bool {
    TREES.wipe_on_fork()
}

/// Sets the runtime directory at the start of the process, and reads it. `variable` is the value of FIRN_RUNTIME_DIR.
pub(crate) fn set_runtime_dir(variable: Option<&[u8]>) {
    let mut buffer = [0u8; NUMBERED_TEXT_BYTES];
    let default_dir = write_number(&mut buffer, b"/dev/shm/firn-", sys::euid());
    let dir = match variable.filter(|dir| !dir.is_empty()) {
        None => default_dir,
        Some(dir) if dir.starts_with(b"/") && dir.len() <= DIR_BYTES_MAX => dir,
        // firn and firnd refuse such a path too.
        Some(_) => return report::count_distrusted(Distrust::Relative),
    };
    for (stored_byte, byte) in DIR.iter().zip(dir) {
        stored_byte.store(*byte, Ordering::Relaxed);
    }
    read_trees();
}

// ---- questions -------------------------------------------------------------------------------------

/// Whether there is any tree. It takes two loads if there is none.
#[inline(always)]
pub(crate) fn has_trees() -> bool {
    has_read_trees() || (HAS_MET_TREE.load(Ordering::Relaxed) && read_in_child())
}

#[inline(always)]
fn has_read_trees() -> bool {
    let first = TREES.devices.first();
    first.is_some_and(|first| first.load(Ordering::Relaxed) != 0)
}

#[cold]
fn read_in_child() -> bool {
    if !is_vfork_child() {
        read_trees();
    }
    has_read_trees()
}

/// Whether there is any tree, or the directory has changed and may have one.
pub(crate) fn may_have_trees() -> bool {
    has_trees() || has_changed()
}

/// Whether a device has stubs.
#[inline(always)]
pub(crate) fn has_stubs(device: u64) -> bool {
    has_trees() && tree_on(device).is_some()
}

/// Whether locks of stubs on a device are refused. The kernel would keep them on this host only, and other hosts use
/// the files too.
pub(crate) fn refuses_locks(device: u64) -> bool {
    let tree = tree_on(device).and_then(|index| TREES.refuses_locks.get(index));
    tree.is_some_and(|refuses| refuses.load(Ordering::Acquire) != 0)
}

/// Returns the word that stores a device number in [`Trees::devices`]. It is not 0.
fn device_key(device: u64) -> u64 {
    device.wrapping_add(1)
}

/// Returns the index of the tree on a device.
fn tree_on(device: u64) -> Option<usize> {
    let key = device_key(device);
    TREES
        .devices
        .iter()
        .take_while(|known| known.load(Ordering::Relaxed) != 0)
        .position(|known| known.load(Ordering::Acquire) == key)
}

/// Asks the kernel whether a descriptor is a stub.
pub(crate) fn is_stub(fd: c_int) -> bool {
    sys::identity(fd).is_some_and(|(identity, mode)| {
        mode & libc::S_IFMT == libc::S_IFREG && is_stub_on(fd, identity.device)
    })
}

/// Whether an open regular file is a stub, an empty file in a stub tree. firnd has its bytes. For an unknown device the
/// runtime directory, which lists the trees, is read again if it has changed.
pub(crate) fn is_stub_on(fd: c_int, device: u64) -> bool {
    if !has_stubs(device) {
        // fstatfs(2) would return the type of the file system, but on a FUSE mount it costs a trip to the server.
        if has_block_device(device) || !has_changed() {
            return false;
        }
        read_trees();
    }
    let Some(index) = tree_on(device) else {
        return false;
    };
    // If the tree has its file system for itself, no look at the path is needed.
    let is_whole_device = match TREES.whole.get(index) {
        Some(whole) => whole.load(Ordering::Acquire) != 0,
        None => false,
    };
    is_whole_device || has_path_in_tree(fd, index)
}

/// Whether the file system of a device number is on a block device, and so is no tmpfs.
fn has_block_device(device: u64) -> bool {
    device >> 32 != 0
}

/// Whether the path of an open file is below the root of a stub tree (a directory of empty files; firnd has their
/// bytes) that shares its file system with other files. False if the path cannot be read.
#[inline(never)]
fn has_path_in_tree(fd: c_int, tree_index: usize) -> bool {
    let mut link_buffer = [0u8; NUMBERED_TEXT_BYTES];
    let link_bytes = write_number(&mut link_buffer, b"/proc/self/fd/", fd as u32).len();
    // The slice includes the zero byte behind the text.
    let link_with_zero = link_buffer.get(..=link_bytes).unwrap_or_default();
    let Ok(link) = CStr::from_bytes_with_nul(link_with_zero) else {
        return false;
    };
    let mut path_buffer = [0u8; 1024];
    let Ok(path_bytes) = rustix::fs::readlinkat_raw(CWD, link, &mut path_buffer) else {
        return false;
    };
    let path = path_buffer.get(..path_bytes).unwrap_or_default();
    let Some(slots) = TREES.slots.lock_unless_held_by_thread() else {
        return false;
    };
    let Some(tree) = slots.get(tree_index) else {
        return false;
    };
    match path.strip_prefix(text_before_zero(&tree.prefix)) {
        Some(path_in_tree) => path_in_tree.starts_with(b"/"),
        None => false,
    }
}

/// Returns the data socket of the tree on a device, as a token with the number 0.
pub(crate) fn data_socket_on(device: u64) -> Option<Token> {
    if !has_trees() {
        return None;
    }
    let index = tree_on(device)?;
    let slots = TREES.slots.lock_unless_held_by_thread()?;
    let tree = slots.get(index)?;
    Some(Token {
        token: 0,
        version: DATA_SOCKET_VERSION,
        pid: tree.pid,
        arena: tree.arena,
        socket: tree.socket,
    })
}

/// Whether the runtime directory has changed since it was read.
fn has_changed() -> bool {
    changed_at().is_some_and(|now| TREES.read_at.load(Ordering::Acquire) != now)
}

// ---- the runtime directory -------------------------------------------------------------------------

/// Reads the runtime directory, in which each firnd (serving process) describes its stub tree (a directory of empty
/// files; firnd has their bytes), and replaces the known trees. Does nothing in a signal handler that has interrupted
/// it.
pub(crate) fn read_trees() {
    let Some(mut slots) = TREES.slots.lock_unless_held_by_thread() else {
        return;
    };
    // The time is read first. So a change during the read is noticed later.
    let changed_at = changed_at().unwrap_or(0);
    TREES.read_at.store(changed_at, Ordering::Release);
    let mut buffer = [0; DIR_BYTES];
    let Some(path) = runtime_dir(&mut buffer) else {
        return;
    };
    match open_dir_raw(path, sys::euid()) {
        Ok(dir) => {
            let count = read_files(&Descriptor::from(dir), &mut slots);
            forget_trees_from(count);
        }
        Err(RawError::Distrusted(_, dir)) => {
            // Closes the directory, which another user could change.
            drop(Descriptor::from(dir));
            refuse_dir();
        }
        // These errors mean that the path is a symbolic link or no directory.
        Err(RawError::Io(Errno::NOTDIR | Errno::LOOP)) => refuse_dir(),
        // The directory does not exist or cannot be read, so the known trees stay.
        Err(RawError::Io(_)) => {}
    }
}

/// Counts a runtime directory that is not trusted, and forgets all trees.
fn refuse_dir() {
    report::count_distrusted(Distrust::Directory);
    forget_trees_from(0);
}

/// Forgets all trees but the first `count`. The caller holds the lock of the slots.
fn forget_trees_from(count: usize) {
    HAS_MET_TREE.store(count > 0, Ordering::Relaxed);
    for device in TREES.devices.iter().skip(count) {
        device.store(0, Ordering::Release);
    }
}

/// Reads the files of the runtime directory, each of which describes a stub tree (a directory of empty files; firnd has
/// their bytes). Returns the number of trees. Files beyond [`TREES_COUNT`] trees are not read.
#[inline(never)]
fn read_files(dir: &Descriptor, slots: &mut [StubTree; TREES_COUNT]) -> usize {
    // Large enough for an entry with the longest name.
    let mut buffer = [MaybeUninit::uninit(); 512];
    let mut entries = RawDir::new(dir, &mut buffer);
    let mut count = 0;
    while let Some(Ok(entry)) = entries.next() {
        let Some(slot) = slots.get_mut(count) else {
            break;
        };
        let name = entry.file_name();
        if name.to_bytes().ends_with(b".stub") && read_file(dir, name, slot) {
            publish_tree(count, slot);
            count += 1;
        }
    }
    count
}

/// Reads the description of a stub tree (a directory of empty files; firnd has their bytes) from a file of the runtime
/// directory. Returns false if it describes no tree, or is not trusted because another user could change it.
fn read_file(dir: &Descriptor, name: &CStr, slot: &mut StubTree) -> bool {
    let file = match open_file_raw(dir, name, sys::euid()) {
        Ok(file) => Descriptor::from(file),
        Err(RawError::Distrusted(_, file)) => {
            // Closes the file.
            drop(Descriptor::from(file));
            report::count_distrusted(Distrust::File);
            return false;
        }
        Err(RawError::Io(errno)) => {
            // The file is a symbolic link.
            if errno == Errno::LOOP {
                report::count_distrusted(Distrust::File);
            }
            return false;
        }
    };
    let read_bytes = rustix::io::read(file.as_fd(), slot.as_mut_bytes());
    let is_tree = read_bytes == Ok(size_of::<StubTree>()) && slot.magic == STUB_MAGIC;
    if !is_tree {
        slot.zero();
    }
    is_tree
}

/// Makes the tree in the slot `index` visible to hooks. The device is stored last, because hooks look at it first.
fn publish_tree(index: usize, tree: &StubTree) {
    let (Some(whole), Some(refuses_locks), Some(device)) = (
        TREES.whole.get(index),
        TREES.refuses_locks.get(index),
        TREES.devices.get(index),
    ) else {
        return;
    };
    whole.store(tree.whole_device, Ordering::Release);
    refuses_locks.store(tree.refuses_locks, Ordering::Release);
    let number = sys::device_number(tree.device_major, tree.device_minor);
    device.store(device_key(number), Ordering::Release);
}

/// Returns the path of the runtime directory, copied to `buffer`; `None` if it was not set.
fn runtime_dir(buffer: &mut [u8; DIR_BYTES]) -> Option<&CStr> {
    for (byte, stored_byte) in buffer.iter_mut().zip(&DIR) {
        *byte = stored_byte.load(Ordering::Relaxed);
    }
    let path = CStr::from_bytes_until_nul(buffer).ok()?;
    (!path.is_empty()).then_some(path)
}

/// Returns when the runtime directory last changed, in nanoseconds since the epoch.
fn changed_at() -> Option<u64> {
    let mut buffer = [0; DIR_BYTES];
    let path = runtime_dir(&mut buffer)?;
    let (mask, flags) = (libc::STATX_CTIME, libc::AT_SYMLINK_NOFOLLOW);
    sys::with_statx(libc::AT_FDCWD, path, mask, flags, |stat| {
        let seconds = stat.stx_ctime.tv_sec as u64;
        let nanoseconds = u64::from(stat.stx_ctime.tv_nsec);
        seconds
            .wrapping_mul(1_000_000_000)
            .wrapping_add(nanoseconds)
    })
}

// ---- text without allocation -----------------------------------------------------------------------

/// Writes a prefix and a number to a zeroed buffer, so that a zero byte follows. Returns both without that byte.
fn write_number<'a>(
    buffer: &'a mut [u8; NUMBERED_TEXT_BYTES],
    prefix: &[u8],
    number: u32,
) -> &'a [u8] {
    use std::io::Write;
    let text_bytes_max = buffer.len() - 1;
    let mut unwritten: &mut [u8] = buffer.get_mut(..text_bytes_max).unwrap_or_default();
    // A text that is too long is cut: the last byte stays zero.
    let _ = unwritten.write_all(prefix);
    let _ = write!(unwritten, "{number}");
    let text_bytes = text_bytes_max - unwritten.len();
    buffer.get(..text_bytes).unwrap_or_default()
}

fn text_before_zero(bytes: &[u8]) -> &[u8] {
    let end = bytes
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(bytes.len());
    bytes.get(..end).unwrap_or_default()
}
