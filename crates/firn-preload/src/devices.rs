//! Which devices are Firn mounts.
//!
//! Asked once of each device: a token of the first regular file that is opened there. No fstatfs(2): on a mount that is
//! a trip to firnd of its own.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use firn_format::data_socket::{DATA_SOCKET_VERSION, Token};

use crate::lock::Locked;
use crate::sys;
use crate::wiped::Wiped;

/// Verdicts that are kept; a process rarely writes to more file systems.
const DEVICES: usize = 16;

/// Verdicts on devices: `(device + 1) << 1 | is_mount`.
struct Devices {
    known: [AtomicU64; DEVICES],
    next: AtomicU32,
    /// The token that was asked for last to find out about a device.
    first: Locked<Token>,
}

// SAFETY: words, a lock and a token, of which zeros are values: no device is known.
static KNOWN: Wiped<Devices> = unsafe {
    Wiped::new(Devices {
        known: [const { AtomicU64::new(0) }; DEVICES],
        next: AtomicU32::new(0),
        first: Locked::new(Token {
            token: 0,
            version: 0,
            pid: 0,
            arena: [0; 16],
            socket: [0; 112],
        }),
    })
};

/// Makes children of fork(2) know no device. `false`: the kernel cannot.
pub(crate) fn wipe_on_fork() -> bool {
    KNOWN.wipe_on_fork()
}

/// Whether a device is known as that of a Firn mount.
pub(crate) fn is_known_mount(device: u64) -> bool {
    let verdict = device.wrapping_add(1) << 1 | 1;
    KNOWN
        .known
        .iter()
        .any(|known| known.load(Ordering::Relaxed) == verdict)
}

/// Whether the descriptor's device is a Firn mount; then its token, or 0 where it was not asked for.
pub(crate) fn token_on_mount(fd: c_int, device: u64) -> Option<u64> {
    let key = device.wrapping_add(1) << 1;
    for known in &KNOWN.known {
        let word = known.load(Ordering::Relaxed);
        if word & !1 == key {
            return (word & 1 != 0).then_some(0);
        }
    }
    // Mounts have no block device, and file systems without one answer ENOTTY at once.
    let token = if device >> 32 == 0 {
        token_of(fd)
    } else {
        None
    };
    let index = KNOWN.next.fetch_add(1, Ordering::Relaxed) as usize % DEVICES;
    if let Some(known) = KNOWN.known.get(index) {
        known.store(key | u64::from(token.is_some()), Ordering::Relaxed);
    }
    let token = token?;
    if let Some(mut first) = KNOWN.first.take_lock() {
        *first = token;
    }
    Some(token.token)
}

/// The token of that number, if it was the last one that a device was asked for.
pub(crate) fn first_token(number: u64) -> Option<Token> {
    let first = *KNOWN.first.take_lock()?;
    (number != 0 && first.token == number).then_some(first)
}

/// The token of an open file; `None` where no firnd serves it or does not serve this process.
pub(crate) fn token_of(fd: c_int) -> Option<Token> {
    let token = firn_direct::connection::token_of(sys::borrow(fd)?)?;
    (token.version == DATA_SOCKET_VERSION).then_some(token)
}
