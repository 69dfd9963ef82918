//! Which stub trees there are: what firnds wrote down in the runtime directory.
//!
//! A process reads it at its start, and again when it meets a file system that it does not know, that may be a tmpfs, and
//! the directory has changed since. Children of fork(2) read it anew. Any user may make a directory of that name in /dev/shm: only
//! one that is this user's own is read.

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
use crate::vfork::in_vfork_child;
use crate::wiped::Wiped;

/// Trees that one process knows.
const TREES_COUNT: usize = 4;
/// With the zero byte at the end.
const DIR_BYTES: usize = DIR_BYTES_MAX + 1;
/// As long as `firn` takes it: 107 bytes of a socket's path (unix(7)) without `/` and `KEY.sock`.
const DIR_BYTES_MAX: usize = 107 - 22;
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

/// The runtime directory, ended by a zero byte: set once, at the start.
static DIR: [AtomicU8; DIR_BYTES] = [const { AtomicU8::new(0) }; DIR_BYTES];

/// Whether this process or the one that it was forked from met a tree: children find [`TREES`] wiped.
static KNOWN: AtomicBool = AtomicBool::new(false);

/// The trees.
struct Trees {
    /// Devices of the trees, plus one; 0: none.
    devices: [AtomicU64; TREES_COUNT],
    whole: [AtomicU32; TREES_COUNT],
    refuses_locks: [AtomicU32; TREES_COUNT],
    /// Time of the directory's last change when it was read.
    read_at: AtomicU64,
    slots: Locked<[StubTree; TREES_COUNT]>,
}

// SAFETY: words, a lock and records of words, of which zeros are values: no tree.
static TREES: Wiped<Trees> = unsafe {
    Wiped::new(Trees {
        devices: [const { AtomicU64::new(0) }; TREES_COUNT],
        whole: [const { AtomicU32::new(0) }; TREES_COUNT],
        refuses_locks: [const { AtomicU32::new(0) }; TREES_COUNT],
        read_at: AtomicU64::new(0),
        slots: Locked::new([EMPTY; TREES_COUNT]),
    })
};

/// Makes children of fork(2) know no tree. `false`: the kernel cannot.
pub(crate) fn wipe_on_fork() -> bool {
    TREES.wipe_on_fork()
}

/// At the start of the process: where firnds write down their trees. `variable` is the environment's word.
pub(crate) fn begin_trees(variable: Option<&[u8]>) {
    let mut default = [0u8; 32];
    let default = write_number(&mut default, b"/dev/shm/firn-", sys::euid());
    let dir = match variable.filter(|dir| !dir.is_empty()) {
        None => default,
        Some(dir) if dir.starts_with(b"/") && dir.len() <= DIR_BYTES_MAX => dir,
        // firn and firnd refuse it too.
        Some(_) => return report::count_distrusted(Distrust::Relative),
    };
    for (to, from) in DIR.iter().zip(dir) {
        to.store(*from, Ordering::Relaxed);
    }
    read_trees();
}

// ---- questions -------------------------------------------------------------------------------------

/// Whether there is any tree: two loads where there is none.
#[inline(always)]
pub(crate) fn has_trees() -> bool {
    has_read_trees() || (KNOWN.load(Ordering::Relaxed) && read_in_child())
}

#[inline(always)]
fn has_read_trees() -> bool {
    let first = TREES.devices.first();
    first.is_some_and(|first| first.load(Ordering::Relaxed) != 0)
}

#[cold]
fn read_in_child() -> bool {
    if !in_vfork_child() {
        read_trees();
    }
    has_read_trees()
}

/// Whether there is any tree, or a new one may be there.
pub(crate) fn may_have_trees() -> bool {
    has_trees() || has_changed()
}

/// Whether stubs lie on a device.
#[inline(always)]
pub(crate) fn has_stubs(device: u64) -> bool {
    has_trees() && tree_on(device).is_some()
}

/// Whether a lock of a stub on a device is refused: the kernel would keep it on this host, and others use the file, too.
pub(crate) fn refuses_locks(device: u64) -> bool {
    let tree = tree_on(device).and_then(|index| TREES.refuses_locks.get(index));
    tree.is_some_and(|refuses| refuses.load(Ordering::Acquire) != 0)
}

/// Index of the tree on a device.
fn tree_on(device: u64) -> Option<usize> {
    let key = device.wrapping_add(1);
    TREES
        .devices
        .iter()
        .take_while(|known| known.load(Ordering::Relaxed) != 0)
        .position(|known| known.load(Ordering::Acquire) == key)
}

/// Whether a descriptor is a stub, asked of the kernel.
pub(crate) fn is_stub(fd: c_int) -> bool {
    sys::identity(fd).is_some_and(|(identity, mode)| {
        mode & libc::S_IFMT == libc::S_IFREG && is_stub_on(fd, identity.device)
    })
}

/// Whether an open regular file is a stub, of a device that may have a tree this process has not heard of.
pub(crate) fn is_stub_on(fd: c_int, device: u64) -> bool {
    if !has_stubs(device) {
        // Not asked of the file system, by fstatfs(2): on a FUSE mount that is a trip to the server.
        if has_block_device(device) || !has_changed() {
            return false;
        }
        read_trees();
    }
    tree_on(device).is_some_and(|index| {
        let whole = TREES.whole.get(index);
        whole.is_some_and(|whole| whole.load(Ordering::Acquire) != 0) || is_below(fd, index)
    })
}

/// Whether the file system with this device number lies on a block device, and so is no tmpfs.
fn has_block_device(device: u64) -> bool {
    device >> 32 != 0
}

/// Whether an open file stands below the root of a tree that shares its file system with others.
#[inline(never)]
fn is_below(fd: c_int, index: usize) -> bool {
    let mut room = [0u8; 1024];
    let mut link = [0u8; 32];
    let link_bytes = write_number(&mut link, b"/proc/self/fd/", fd as u32).len();
    let link = link.get(..=link_bytes).unwrap_or_default();
    let Ok(link) = CStr::from_bytes_with_nul(link) else {
        return false;
    };
    let Ok(path_bytes) = rustix::fs::readlinkat_raw(CWD, link, &mut room) else {
        return false;
    };
    let path = room.get(..path_bytes).unwrap_or_default();
    let Some(slots) = TREES.slots.take_lock() else {
        return false;
    };
    slots.get(index).is_some_and(|tree| {
        let below = path.strip_prefix(until_zero(&tree.prefix));
        below.is_some_and(|rest| rest.first() == Some(&b'/'))
    })
}

/// The data socket of the tree on a device; `token` is 0.
pub(crate) fn data_socket_on(device: u64) -> Option<Token> {
    if !has_trees() {
        return None;
    }
    let index = tree_on(device)?;
    let slots = TREES.slots.take_lock()?;
    let tree = slots.get(index)?;
    Some(Token {
        token: 0,
        version: DATA_SOCKET_VERSION,
        pid: tree.pid,
        arena: tree.arena,
        socket: tree.socket,
    })
}

fn has_changed() -> bool {
    changed_at().is_some_and(|now| TREES.read_at.load(Ordering::Acquire) != now)
}

// ---- the runtime directory -------------------------------------------------------------------------

/// Reads what is written down.
pub(crate) fn read_trees() {
    let Some(mut slots) = TREES.slots.take_lock() else {
        return;
    };
    let now = changed_at().unwrap_or(0);
    TREES.read_at.store(now, Ordering::Release);
    match runtime_dir(&mut [0; DIR_BYTES]).map(|path| open_dir_raw(path, sys::euid())) {
        Some(Ok(dir)) => {
            let found = read_files(&Descriptor::from(dir), &mut slots);
            forget_from(found);
        }
        Some(Err(RawError::Distrusted(_, dir))) => {
            drop(Descriptor::from(dir));
            refuse_dir();
        }
        // What O_NOFOLLOW and O_DIRECTORY say of a link and of a file.
        Some(Err(RawError::Io(Errno::NOTDIR | Errno::LOOP))) => refuse_dir(),
        Some(Err(RawError::Io(_))) | None => {}
    }
}

/// The directory is not this user's own: there are no trees, whatever it says.
fn refuse_dir() {
    report::count_distrusted(Distrust::Directory);
    forget_from(0);
}

/// With the lock held: only the first `found` trees are there.
fn forget_from(found: usize) {
    KNOWN.store(found > 0, Ordering::Relaxed);
    for gone in TREES.devices.iter().skip(found) {
        gone.store(0, Ordering::Release);
    }
}

/// Reads the files of the runtime directory; how many trees they describe.
#[inline(never)]
fn read_files(dir: &Descriptor, slots: &mut [StubTree; TREES_COUNT]) -> usize {
    // An entry and the longest name.
    let mut room = [MaybeUninit::uninit(); 512];
    let mut entries = RawDir::new(dir, &mut room);
    let mut found = 0;
    while let Some(Ok(entry)) = entries.next() {
        let Some(slot) = slots.get_mut(found) else {
            break;
        };
        let name = entry.file_name();
        if name.to_bytes().ends_with(b".stub") && read_file(dir, name, slot) {
            publish_tree(found, slot);
            found += 1;
        }
    }
    found
}

/// Reads one file into a slot; `false` where it describes no tree.
fn read_file(dir: &Descriptor, name: &CStr, slot: &mut StubTree) -> bool {
    let file = match open_file_raw(dir, name, sys::euid()) {
        Ok(file) => Descriptor::from(file),
        Err(RawError::Distrusted(_, file)) => {
            drop(Descriptor::from(file));
            report::count_distrusted(Distrust::File);
            return false;
        }
        Err(RawError::Io(errno)) => {
            if errno == Errno::LOOP {
                report::count_distrusted(Distrust::File);
            }
            return false;
        }
    };
    let read = rustix::io::read(file.as_fd(), slot.as_mut_bytes());
    let is_tree = read == Ok(size_of::<StubTree>()) && slot.magic == STUB_MAGIC;
    if !is_tree {
        slot.zero();
    }
    is_tree
}

/// Tells the hooks of a tree, which lies in the slot of that index.
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
    device.store(number.wrapping_add(1), Ordering::Release);
}

/// The path of the runtime directory; `None` where there is none.
fn runtime_dir(room: &mut [u8; DIR_BYTES]) -> Option<&CStr> {
    for (to, from) in room.iter_mut().zip(&DIR) {
        *to = from.load(Ordering::Relaxed);
    }
    CStr::from_bytes_until_nul(room)
        .ok()
        .filter(|path| !path.is_empty())
}

/// When the runtime directory last changed, in nanoseconds.
fn changed_at() -> Option<u64> {
    let mut room = [0; DIR_BYTES];
    let path = runtime_dir(&mut room)?;
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

/// Writes a prefix and a number, ended by a zero byte; gives both without it.
fn write_number<'a>(to: &'a mut [u8; 32], prefix: &[u8], number: u32) -> &'a [u8] {
    use std::io::Write;
    let room = to.len() - 1;
    let mut rest: &mut [u8] = to.get_mut(..room).unwrap_or_default();
    let _ = rest.write_all(prefix);
    let _ = write!(rest, "{number}");
    let left = rest.len();
    to.get(..room - left).unwrap_or_default()
}

fn until_zero(bytes: &[u8]) -> &[u8] {
    let end = bytes
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(bytes.len());
    bytes.get(..end).unwrap_or_default()
}
