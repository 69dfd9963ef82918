//! The devices that are Firn mounts.
//!
//! Each device is asked once, for the token of the first regular file that is opened there. fstatfs(2) is not used,
//! because on a mount it costs a trip to firnd of its own.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use firn_format::data_socket::{DATA_SOCKET_VERSION, Token};

use crate::lock::Locked;
use crate::sys;
use crate::wiped::Wiped;

/// Maximum number of known devices. A process rarely uses more file systems.
const DEVICES: usize = 16;

/// The known devices.
struct Devices {
    /// Each word is `(device + 1) << 1 | is_mount`; 0 in free slots.
    known: [AtomicU64; DEVICES],
    /// Index of the next slot to fill, modulo [`DEVICES`].
    next: AtomicU32,
    /// The last token that was fetched to find out about a device.
    first: Locked<Token>,
}

// SAFETY: the value consists of words, a lock and a token, for which zero bytes are valid: no device is known.
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

/// Makes children of fork(2) know no device. Returns false if the kernel does not support that.
pub(crate) fn wipe_on_fork() -> bool {
    KNOWN.wipe_on_fork()
}

/// Whether a device is known to be a Firn mount. Returns false for an unknown device.
pub(crate) fn is_known_mount(device: u64) -> bool {
    let verdict = device.wrapping_add(1) << 1 | 1;
    KNOWN
        .known
        .iter()
        .any(|known| known.load(Ordering::Relaxed) == verdict)
}

/// Finds out whether the device of a descriptor is a Firn mount. Returns `None` if not. If the device was unknown, the
/// token of the open file is returned; for a known mount 0 is returned instead.
pub(crate) fn token_on_mount(fd: c_int, device: u64) -> Option<u64> {
    let key = device.wrapping_add(1) << 1;
    for known in &KNOWN.known {
        let word = known.load(Ordering::Relaxed);
        if word & !1 == key {
            return (word & 1 != 0).then_some(0);
        }
    }
    // A mount has no block device. Other file systems without one refuse the request for a token at once, with ENOTTY.
    let token = if device >> 32 == 0 {
        fetch_token(fd)
    } else {
        None
    };
    let index = KNOWN.next.fetch_add(1, Ordering::Relaxed) as usize % DEVICES;
    if let Some(known) = KNOWN.known.get(index) {
        known.store(key | u64::from(token.is_some()), Ordering::Relaxed);
    }
    let token = token?;
    if let Some(mut first) = KNOWN.first.lock_unless_own() {
        *first = token;
    }
    Some(token.token)
}

/// Returns the token with a number, if it was the last one fetched by [`token_on_mount`].
pub(crate) fn first_token(number: u64) -> Option<Token> {
    let first = *KNOWN.first.lock_unless_own()?;
    (number != 0 && first.token == number).then_some(first)
}

/// Fetches the token of an open file. Returns `None` if no firnd serves the file, or if firnd does not serve this
/// process.
pub(crate) fn fetch_token(fd: c_int) -> Option<Token> {
    let token = firn_direct::connection::token_of(sys::borrow(fd)?)?;
    (token.version == DATA_SOCKET_VERSION).then_some(token)
}
