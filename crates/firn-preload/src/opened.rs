//! Descriptors that were just opened: which of them are ours.
//!
//! Ours are regular files of a Firn mount. Nothing is asked of firnd yet, but the token of the first file of each
//! device. No fstatfs(2): on a mount that is a trip to firnd of its own.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use firn_format::data_socket::{DATA_SOCKET_VERSION, Token};

use crate::hook::stream;
use crate::lock::Lock;
use crate::report::{self, Reason};
use crate::stub;
use crate::sys::{self, Identity};
use crate::table::{self, ACTIVE, Inner, TABLE, tag};

/// Offsets that every write moves or blocks go to the disk: not what the arena is for.
const UNUSUAL: c_int = libc::O_APPEND | libc::O_SYNC | libc::O_DSYNC | libc::O_DIRECT;
/// Verdicts that are kept; a process rarely writes to more file systems.
const DEVICES: usize = 16;

/// Verdicts on devices: `(device + 1) << 1 | is_ours`.
pub(crate) struct Devices {
    known: [AtomicU64; DEVICES],
    next: AtomicU32,
    lock: Lock,
    /// The token that was asked for last to find out about a device.
    first: UnsafeCell<Token>,
}

impl Devices {
    pub(crate) const fn new() -> Self {
        let first = Token {
            token: 0,
            version: 0,
            pid: 0,
            arena: [0; 16],
            socket: [0; 112],
        };
        Self {
            known: [const { AtomicU64::new(0) }; DEVICES],
            next: AtomicU32::new(0),
            lock: Lock::new(),
            first: UnsafeCell::new(first),
        }
    }

    /// Whether a device is known as that of a Firn mount.
    pub(crate) fn has(&self, device: u64) -> bool {
        let ours = device.wrapping_add(1) << 1 | 1;
        self.known
            .iter()
            .any(|known| known.load(Ordering::Relaxed) == ours)
    }

    /// Whether the descriptor's device is a Firn mount; then its token, or 0 where it was not asked for.
    fn is_ours(&self, fd: c_int, device: u64) -> Option<u64> {
        let key = device.wrapping_add(1) << 1;
        for known in &self.known {
            let word = known.load(Ordering::Relaxed);
            if word & !1 == key {
                return (word & 1 != 0).then_some(0);
            }
        }
        // Mounts have no block device, and file systems without one answer ENOTTY at once.
        let token = if device >> 32 == 0 { token(fd) } else { None };
        let ours = token.is_some();
        let index = self.next.fetch_add(1, Ordering::Relaxed) as usize % DEVICES;
        if let Some(known) = self.known.get(index) {
            known.store(key | u64::from(ours), Ordering::Relaxed);
        }
        let token = token?;
        if self.lock.take() {
            // SAFETY: the lock is held.
            unsafe { *self.first.get() = token };
            self.lock.give();
        }
        Some(token.token)
    }

    /// The token of that number, if it was the last one that a device was asked for.
    pub(crate) fn first_token(&self, number: u64) -> Option<Token> {
        if number == 0 || !self.lock.take() {
            return None;
        }
        // SAFETY: the lock is held.
        let first = unsafe { *self.first.get() };
        self.lock.give();
        (first.token == number).then_some(first)
    }
}

/// How firnd calls this open file; `None` where no firnd serves it or does not serve this process.
pub(crate) fn token(fd: c_int) -> Option<Token> {
    let token = firn_direct::connection::token_of(sys::borrow(fd)?)?;
    (token.version == DATA_SOCKET_VERSION).then_some(token)
}

/// What a caller takes before it opens: whether somebody got copies of descriptors meanwhile.
pub(crate) struct Before {
    shared: u64,
}

impl Before {
    /// Takes the count.
    #[inline(always)]
    pub(crate) fn now() -> Self {
        Self {
            shared: TABLE.shared.load(Ordering::SeqCst),
        }
    }

    fn still(&self) -> bool {
        TABLE.sharing.load(Ordering::SeqCst) == 0
            && TABLE.shared.load(Ordering::SeqCst) == self.shared
    }
}

/// How a descriptor came to be.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// A call that leaves its use to the program.
    Program,
    /// stdio, for libstdc++: it reads and writes the descriptor itself.
    StreamBuffer,
    /// stdio: its own calls are not seen.
    Stdio,
}

/// A call of the program gave the descriptor `fd`, opened with `flags`: what it returns, which is -1 and
/// errno where `fd` is a stub that cannot be used. Else keeps errno.
pub(crate) fn noted(fd: c_int, flags: c_int, before: &Before) -> c_int {
    match note(fd, flags, before, By::Program) {
        Noted::Unusable(errno) => {
            sys::close(fd);
            sys::told(-(errno as isize)) as c_int
        }
        Noted::Stub => {
            stream::stub_at(fd);
            fd
        }
        Noted::Else => fd,
    }
}

/// What a new descriptor is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Noted {
    /// A stub.
    Stub,
    /// A stub that cannot be used, and why.
    Unusable(c_int),
    /// Anything else.
    Else,
}

/// A call gave the descriptor `fd`, opened with `flags`. Keeps errno.
pub(crate) fn note(fd: c_int, flags: c_int, before: &Before, by: By) -> Noted {
    if fd < 0 || ACTIVE.load(Ordering::Relaxed) == 0 {
        return Noted::Else;
    }
    if table::tag_of(fd) != tag::NONE {
        forget_stale(fd);
    }
    let path_only = flags & libc::O_PATH != 0
        || flags & libc::O_DIRECTORY != 0 && flags & libc::O_TMPFILE != libc::O_TMPFILE;
    let Some((identity, mode)) = sys::identity(fd).filter(|_| !path_only) else {
        return Noted::Else;
    };
    if mode & libc::S_IFMT == libc::S_IFREG {
        match stub::opened(fd, identity.device, flags) {
            Ok(true) => return Noted::Stub,
            Err(errno) => return Noted::Unusable(errno),
            Ok(false) => {}
        }
    }
    note_on_mount(fd, flags, (identity, mode), before, by);
    Noted::Else
}

fn note_on_mount(
    fd: c_int,
    flags: c_int,
    (identity, mode): (Identity, u32),
    before: &Before,
    by: By,
) {
    if mode & libc::S_IFMT != libc::S_IFREG {
        return;
    }
    let Some(token) = TABLE.devices.is_ours(fd, identity.device) else {
        return;
    };
    if flags & UNUSUAL != 0 {
        return report::left(Reason::Flags);
    }
    if by == By::Stdio {
        return report::left(Reason::Stdio);
    }
    let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
    let Some(mut held) = table::enter_new(fd) else {
        return;
    };
    *held = Inner::new();
    held.identity = identity;
    held.token = token;
    held.entry.in_kernel.store(0, Ordering::Relaxed);
    held.set_tag(if writes { tag::WRITER } else { tag::READER });
    if !before.still() {
        held.set_tag(tag::NONE);
        report::left(Reason::Shared);
    }
}

/// The number was closed unseen and is another descriptor now.
pub(crate) fn forget_stale(fd: c_int) {
    if table::tag_of(fd) == tag::STUB {
        stub::close(fd);
        return;
    }
    if let table::Entered::Held(mut held) = table::enter(fd)
        && table::is_owner()
        && held.tag != tag::INTERNAL
    {
        held.list.unmap();
        held.private = false;
        held.set_tag(tag::NONE);
    }
}
