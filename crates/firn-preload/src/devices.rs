//! Finds out which devices are mounts of Firn, and remembers the result.
//!
//! Each device is asked once, by an ioctl(2) for the token (firnd's number) of the first regular file that is opened
//! there. Only a mount of Firn answers. fstatfs(2) is not used, because on a mount it costs one more trip to firnd, the
//! process that serves the mount.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use firn_format::data_socket::{DATA_SOCKET_VERSION, Token};

use crate::lock::Locked;
use crate::sys;
use crate::wiped::Wiped;

/// Maximum number of known devices. A process rarely uses more file systems.
const DEVICES_MAX: usize = 16;
/// Bit of a device's word: the device is a Firn mount.
const IS_MOUNT: u64 = 1;
/// Number of no token. The token of a file on a known mount is fetched later, when it is needed.
pub(crate) const NO_TOKEN: u64 = 0;

/// The known devices.
struct Devices {
    /// Each word is the [`device_key`] of a device, and [`IS_MOUNT`] if it is a mount; 0 in free slots.
    devices: [AtomicU64; DEVICES_MAX],
    /// Index of the next slot to fill, modulo [`DEVICES_MAX`].
    next_slot: AtomicU32,
    /// The last token that was fetched to find out about a device.
    last_token: Locked<Token>,
}

/// The devices that this process has met.
// SAFETY: the value consists of words, a lock and a token, for which zero bytes are valid: no device is known.
static KNOWN: Wiped<Devices> = unsafe {
    Wiped::new(Devices {
        devices: [const { AtomicU64::new(0) }; DEVICES_MAX],
        next_slot: AtomicU32::new(0),
        last_token: Locked::new(Token {
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
    let mount_word = device_key(device) | IS_MOUNT;
    KNOWN
        .devices
        .iter()
        .any(|slot| slot.load(Ordering::Relaxed) == mount_word)
}

/// Finds out whether an open file is on a Firn mount. Returns `None` if not.
///
/// For an unknown device, it makes a request for the file's *token*, firnd's number of the open file. Only
/// firnd (the process that serves a mount) answers it. Returns the token then. Returns [`NO_TOKEN`], without a request,
/// if the device is known as a mount already.
pub(crate) fn token_on_mount(fd: c_int, device: u64) -> Option<u64> {
    let key = device_key(device);
    for slot in &KNOWN.devices {
        let word = slot.load(Ordering::Relaxed);
        if word & !IS_MOUNT == key {
            return (word & IS_MOUNT != 0).then_some(NO_TOKEN);
        }
    }
    let has_block_device = device >> 32 != 0;
    let token = if has_block_device {
        // A mount has no block device.
        None
    } else {
        // Other file systems without a block device refuse the request for a token at once, with ENOTTY.
        fetch_token(fd)
    };
    let index = KNOWN.next_slot.fetch_add(1, Ordering::Relaxed) as usize % DEVICES_MAX;
    if let Some(slot) = KNOWN.devices.get(index) {
        let mount_bit = if token.is_some() { IS_MOUNT } else { 0 };
        slot.store(key | mount_bit, Ordering::Relaxed);
    }
    let token = token?;
    if let Some(mut last_token) = KNOWN.last_token.lock_unless_held_by_thread() {
        *last_token = token;
    }
    Some(token.token)
}

/// Returns the word of a device that is no mount. It is not 0, and its bit [`IS_MOUNT`] is clear.
fn device_key(device: u64) -> u64 {
    device.wrapping_add(1) << 1
}

/// Returns the token with a number, if it was the last one fetched by [`token_on_mount`].
pub(crate) fn first_token(number: u64) -> Option<Token> {
    let last_token = *KNOWN.last_token.lock_unless_held_by_thread()?;
    (number != NO_TOKEN && last_token.token == number).then_some(last_token)
}

/// Fetches the token of an open file. Returns `None` if firnd does not serve the file, or if firnd does not serve this
/// process.
pub(crate) fn fetch_token(fd: c_int) -> Option<Token> {
    let token = firn_direct::connection::request_token(sys::borrow(fd)?)?;
    (token.version == DATA_SOCKET_VERSION).then_some(token)
}
