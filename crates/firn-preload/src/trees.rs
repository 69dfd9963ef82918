//! Which stub trees there are: what firnds wrote down in the runtime directory.
//!
//! A process reads it at its start, and again when it meets a tmpfs that it does not know and the directory
//! has changed since. Children of fork(2) read it anew. Anybody may make a directory of that name in /dev/shm: only
//! one that is this user's own is read.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use firn_format::data_socket::{DATA_SOCKET_VERSION, STUB_MAGIC, StubTree, Token};
use firn_trust::{RawError, open_dir_raw, open_file_raw};
use rustix::io::Errno;
use zerocopy::{FromZeros, IntoBytes};

use crate::lock::Lock;
use crate::report::{self, Distrust};
use crate::sys::{self, syscall};
use crate::table::{self, TABLE};

/// Trees that one process knows.
const TREES: usize = 4;
/// With the zero byte at the end.
const DIR_BYTES: usize = DIR_BYTES_MAX + 1;
/// As long as `firn` takes it: 107 bytes of a socket's path (unix(7)) without `/` and `KEY.sock`.
const DIR_BYTES_MAX: usize = 107 - 22;
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// The runtime directory, ended by a zero byte: set once, at the start.
static DIR: [AtomicU8; DIR_BYTES] = [const { AtomicU8::new(0) }; DIR_BYTES];

/// Whether this process or the one that it was forked from met a tree: children find [`Trees`] wiped.
static KNOWN: AtomicBool = AtomicBool::new(false);

/// The trees.
pub(crate) struct Trees {
    lock: Lock,
    /// Devices of the trees, plus one; 0: none.
    devices: [AtomicU64; TREES],
    whole: [AtomicU32; TREES],
    /// When the directory had last changed as it was read.
    seen: AtomicU64,
    slots: UnsafeCell<[StubTree; TREES]>,
}

impl Trees {
    pub(crate) const fn new() -> Self {
        const EMPTY: StubTree = StubTree {
            magic: 0,
            device_major: 0,
            device_minor: 0,
            whole_device: 0,
            pid: 0,
            arena: [0; 16],
            socket: [0; 112],
            prefix: [0; firn_format::data_socket::PATH_BYTES],
            backing: [0; firn_format::data_socket::PATH_BYTES],
        };
        Self {
            lock: Lock::new(),
            devices: [const { AtomicU64::new(0) }; TREES],
            whole: [const { AtomicU32::new(0) }; TREES],
            seen: AtomicU64::new(0),
            slots: UnsafeCell::new([EMPTY; TREES]),
        }
    }

    /// Whether stubs lie on a device.
    #[inline(always)]
    pub(crate) fn has(&self, device: u64) -> bool {
        if !self.any() {
            return false;
        }
        let key = device.wrapping_add(1);
        self.devices
            .iter()
            .take_while(|known| known.load(Ordering::Relaxed) != 0)
            .any(|known| known.load(Ordering::Acquire) == key)
    }

    /// Whether there is any tree: two loads where there is none.
    #[inline(always)]
    pub(crate) fn any(&self) -> bool {
        self.devices
            .first()
            .is_some_and(|first| first.load(Ordering::Relaxed) != 0)
            || (KNOWN.load(Ordering::Relaxed) && self.read_in_child())
    }

    #[cold]
    fn read_in_child(&self) -> bool {
        if !table::in_vfork_child() {
            self.read();
        }
        self.devices
            .first()
            .is_some_and(|first| first.load(Ordering::Relaxed) != 0)
    }

    /// Whether there is any tree, or a new one may be there.
    pub(crate) fn any_or_new(&self) -> bool {
        self.any() || self.has_changed()
    }

    /// Whether an open file is a stub, of a device that may have a tree this process has not heard of.
    pub(crate) fn is_stub(&self, fd: c_int, device: u64) -> bool {
        if !self.has(device) {
            // fstatfs(2) last: on a FUSE mount it is a trip to the server.
            if !self.has_changed() || !is_tmpfs(fd) {
                return false;
            }
            self.read();
        }
        let key = device.wrapping_add(1);
        let index = self
            .devices
            .iter()
            .position(|known| known.load(Ordering::Acquire) == key);
        index.is_some_and(|index| {
            self.whole
                .get(index)
                .is_some_and(|whole| whole.load(Ordering::Acquire) != 0)
                || self.is_below(fd, index)
        })
    }

    /// Whether an open file stands below the root of a tree that shares its file system with others.
    fn is_below(&self, fd: c_int, index: usize) -> bool {
        let mut path = [0u8; 1024];
        let mut link = [0u8; 32];
        let _ = write_number(&mut link, b"/proc/self/fd/", fd as u32);
        // SAFETY: both buffers are ours.
        let len = unsafe {
            syscall!(
                libc::SYS_readlinkat,
                libc::AT_FDCWD,
                link.as_ptr(),
                path.as_mut_ptr(),
                path.len()
            )
        };
        let path = path
            .get(..usize::try_from(len).unwrap_or(0))
            .unwrap_or_default();
        if !self.lock.take() {
            return false;
        }
        // SAFETY: the lock is held.
        let slots = unsafe { &*self.slots.get() };
        let below = slots.get(index).is_some_and(|tree| {
            let prefix = until_zero(&tree.prefix);
            path.strip_prefix(prefix)
                .is_some_and(|rest| rest.first() == Some(&b'/'))
        });
        self.lock.give();
        below
    }

    /// The data socket of the tree on a device; `token` is 0.
    pub(crate) fn data_socket(&self, device: u64) -> Option<Token> {
        if !self.any() {
            return None;
        }
        let key = device.wrapping_add(1);
        let index = self
            .devices
            .iter()
            .position(|known| known.load(Ordering::Acquire) == key)?;
        if !self.lock.take() {
            return None;
        }
        // SAFETY: the lock is held.
        let tree = unsafe { &*self.slots.get() }.get(index);
        let socket = tree.map(|tree| Token {
            token: 0,
            version: DATA_SOCKET_VERSION,
            pid: tree.pid,
            arena: tree.arena,
            socket: tree.socket,
        });
        self.lock.give();
        socket
    }

    fn has_changed(&self) -> bool {
        changed_at().is_some_and(|now| self.seen.load(Ordering::Acquire) != now)
    }

    /// Reads what is written down.
    pub(crate) fn read(&self) {
        if !self.lock.take() {
            return;
        }
        self.seen
            .store(changed_at().unwrap_or(0), Ordering::Release);
        match runtime_dir(&mut [0; DIR_BYTES]).map(|path| open_dir_raw(path, sys::euid())) {
            Some(Ok(dir)) => {
                let dir = dir.into_raw_fd();
                self.read_from(dir);
                sys::close(dir);
            }
            Some(Err(RawError::Distrusted(_, dir))) => {
                sys::close(dir.into_raw_fd());
                self.refuse(Distrust::Directory);
            }
            // What O_NOFOLLOW and O_DIRECTORY say of a link and of a file.
            Some(Err(RawError::Io(Errno::NOTDIR | Errno::LOOP))) => {
                self.refuse(Distrust::Directory)
            }
            Some(Err(RawError::Io(_))) | None => {}
        }
        self.lock.give();
    }

    /// The directory is not this user's own: there are no trees, whatever it says.
    fn refuse(&self, why: Distrust) {
        report::distrusted(why);
        self.forget_from(0);
    }

    /// With the lock held.
    fn forget_from(&self, found: usize) {
        KNOWN.store(found > 0, Ordering::Relaxed);
        for gone in self.devices.iter().skip(found) {
            gone.store(0, Ordering::Release);
        }
    }

    /// Reads the files of a directory, with the lock held.
    fn read_from(&self, dir: c_int) {
        let mut buffer = [MaybeUninit::<u64>::uninit(); 128];
        let mut found = 0;
        loop {
            let start = buffer.as_mut_ptr();
            let room = size_of_val(&buffer);
            // SAFETY: the kernel writes at most so many bytes.
            let len = unsafe { syscall!(libc::SYS_getdents64, dir, start, room) };
            if len <= 0 {
                break;
            }
            let mut at = 0usize;
            while at < len as usize {
                // SAFETY: an entry that the kernel wrote: number, offset, its length, a type, its name.
                let (size, name) = unsafe {
                    let entry = start.cast::<u8>().wrapping_add(at);
                    let size = entry.wrapping_add(16).cast::<u16>().read_unaligned() as usize;
                    (
                        size,
                        std::ffi::CStr::from_ptr(entry.wrapping_add(19).cast()),
                    )
                };
                if name.to_bytes().ends_with(b".stub")
                    && found < TREES
                    && self.read_one(dir, name, found)
                {
                    found += 1;
                }
                at += size.max(1);
            }
        }
        self.forget_from(found);
    }

    fn read_one(&self, dir: c_int, name: &std::ffi::CStr, index: usize) -> bool {
        // SAFETY: the lock is held.
        let slots = unsafe { &mut *self.slots.get() };
        let (Some(slot), Some(device)) = (slots.get_mut(index), self.devices.get(index)) else {
            return false;
        };
        let tree = slot.as_mut_bytes();
        let whole = tree.len() as isize;
        // SAFETY: the directory is open as long as it is read.
        let dir = unsafe { BorrowedFd::borrow_raw(dir) };
        let file = match open_file_raw(dir, name, sys::euid()) {
            Ok(file) => file.into_raw_fd(),
            Err(RawError::Distrusted(_, file)) => {
                sys::close(file.into_raw_fd());
                report::distrusted(Distrust::File);
                return false;
            }
            Err(RawError::Io(errno)) => {
                if errno == Errno::LOOP {
                    report::distrusted(Distrust::File);
                }
                return false;
            }
        };
        // SAFETY: the kernel writes into the slot.
        let got = unsafe {
            syscall!(
                libc::SYS_read,
                file,
                (&raw mut *tree).cast::<u8>(),
                tree.len()
            )
        };
        sys::close(file);
        if got != whole || slot.magic != STUB_MAGIC {
            slot.zero();
            return false;
        }
        let key =
            (u64::from(slot.device_major) << 32 | u64::from(slot.device_minor)).wrapping_add(1);
        if let Some(whole) = self.whole.get(index) {
            whole.store(slot.whole_device, Ordering::Release);
        }
        device.store(key, Ordering::Release);
        true
    }
}

/// At the start of the process: where firnds write down their trees. `variable` is the environment's word.
pub(crate) fn begin(variable: Option<&[u8]>) {
    let mut default = [0u8; 32];
    let default = write_number(&mut default, b"/dev/shm/firn-", sys::euid());
    let dir = match variable.filter(|dir| !dir.is_empty()) {
        None => default,
        Some(dir) if dir.starts_with(b"/") && dir.len() <= DIR_BYTES_MAX => dir,
        // As firn and firnd do, who refuse it.
        Some(_) => return report::distrusted(Distrust::Relative),
    };
    for (to, from) in DIR.iter().zip(dir) {
        to.store(*from, Ordering::Relaxed);
    }
    TABLE.trees.read();
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

/// When the runtime directory last changed, in nanoseconds.
fn changed_at() -> Option<u64> {
    let mut room = [0; DIR_BYTES];
    let path = runtime_dir(&mut room)?;
    let mut stat = MaybeUninit::<libc::statx>::zeroed();
    let mask = libc::STATX_CTIME;
    let flags = libc::AT_SYMLINK_NOFOLLOW;
    // SAFETY: path and structure are ours.
    let result = unsafe {
        syscall!(
            libc::SYS_statx,
            libc::AT_FDCWD,
            path.as_ptr(),
            flags,
            mask,
            stat.as_mut_ptr()
        )
    };
    // SAFETY: a structure of numbers.
    let stat = unsafe { stat.assume_init() };
    let time = (stat.stx_ctime.tv_sec as u64).wrapping_mul(1_000_000_000);
    (result >= 0).then(|| time.wrapping_add(u64::from(stat.stx_ctime.tv_nsec)))
}

fn is_tmpfs(fd: c_int) -> bool {
    let mut stat = MaybeUninit::<libc::statfs64>::zeroed();
    // SAFETY: the structure is ours, and of the kernel's layout on 64-bit machines.
    let result = unsafe { syscall!(libc::SYS_fstatfs, fd, stat.as_mut_ptr()) };
    // SAFETY: a structure of numbers.
    result == 0 && unsafe { stat.assume_init() }.f_type == TMPFS_MAGIC
}
