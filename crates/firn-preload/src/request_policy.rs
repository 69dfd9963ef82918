//! The policy that decides when firnd (the process that serves the mount) is asked for direct access to an open file.
//!
//! Direct access costs a request when it begins and one when it ends, so it pays off only for many bytes. firnd is
//! asked first after the open file has moved some bytes through the kernel. It is asked again after further bytes if it
//! has refused, revoked a *grant* (the right of direct access to the file) or had no room. The number of these bytes
//! grows with each grant that served few bytes.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that an open file moves through the kernel before firnd is asked for the first time, unless
/// `FIRN_PRELOAD_DIRECT_AFTER` says otherwise. A grant and its end cost as much time as this many bytes through the
/// kernel.
const DIRECT_AFTER_BYTES: u64 = 64 << 10;
/// A call counts as at least this many bytes, because each call through the kernel costs a trip to firnd.
pub(crate) const CALL_BYTES_MIN: u64 = 8 << 10;
/// In a process without a connection to firnd, this many bytes of a call count as one byte. Making a connection takes
/// 95 µs. A write of 64 KiB through the kernel takes 9 to 12 µs longer than a direct write, so eight such writes cost
/// as much.
const UNCONNECTED_DIVISOR: u64 = 8;
/// The bytes before the first request that are in effect: [`DIRECT_AFTER_BYTES`], unless an environment variable sets
/// another number.
static DIRECT_AFTER: AtomicU64 = AtomicU64::new(DIRECT_AFTER_BYTES);

/// Sets the bytes that are moved before the first request to firnd, from the text of an environment variable. It is
/// called once, at the start.
pub(crate) fn set_direct_after(bytes: Option<&[u8]>) {
    let number = bytes.and_then(|text| std::str::from_utf8(text).ok()?.parse::<u64>().ok());
    if let Some(number) = number {
        DIRECT_AFTER.store(number, Ordering::Relaxed);
    }
}

/// Bytes that the fallback (the kernel, or firnd by requests) moves before firnd is asked again, after the first grant
/// that ended early. Each further such grant doubles this number.
const RETRY_BYTES_MIN: u64 = 128 << 10;
/// Maximum of the bytes before a repeated request ([`RETRY_BYTES_MIN`]). A grant that moves as many bytes has paid off.
pub(crate) const RETRY_BYTES_MAX: u64 = 8 << 20;
/// Maximum number of times that [`RETRY_BYTES_MIN`] doubles.
const DOUBLINGS_MAX: u32 = 6;
/// Bytes that the fallback moves before firnd is asked again if the arena (the shared memory) had no room. The write of
/// bytes from there to the disk frees about as many.
const FULL_BYTES: u64 = 1 << 20;

/// State of the policy for one open file. All zeros mean that firnd may be asked now.
pub(crate) struct RequestPolicy {
    /// Bytes left to move through the kernel before firnd is asked for the first time.
    bytes_until_first_request: u64,
    /// Whether the process had no connection to firnd at the open, so that the first request has to make one.
    needs_connection: bool,
    /// Bytes left to move by the fallback before firnd is asked again.
    bytes_until_request: u64,
    /// Bytes moved by direct access since the last grant.
    direct_bytes: u64,
    /// Number of refusals and of grants that served few bytes.
    refusals: u32,
}

impl RequestPolicy {
    pub(crate) const fn new() -> Self {
        Self {
            bytes_until_first_request: 0,
            needs_connection: false,
            bytes_until_request: 0,
            direct_bytes: 0,
            refusals: 0,
        }
    }

    /// Begins for a file that was just opened and may be too small for direct access. If the process is not connected
    /// to firnd yet, more bytes are needed to pay off the connection.
    pub(crate) fn begin_for_new_file(&mut self, is_connected: bool) {
        self.bytes_until_first_request = DIRECT_AFTER.load(Ordering::Relaxed);
        self.needs_connection = !is_connected;
    }

    /// Whether few bytes were moved so far, so that calls still go through the kernel.
    pub(crate) fn may_be_small(&self) -> bool {
        self.bytes_until_first_request > 0
    }

    /// Counts a call of `bytes`, and returns whether it belongs to the first calls, which go through the kernel.
    pub(crate) fn count_as_small(&mut self, bytes: u64) -> bool {
        let counted_bytes = if self.needs_connection {
            bytes / UNCONNECTED_DIVISOR
        } else {
            bytes
        };
        self.bytes_until_first_request = self
            .bytes_until_first_request
            .saturating_sub(counted_bytes.max(CALL_BYTES_MIN));
        self.bytes_until_first_request > 0
    }

    /// Bytes moved by direct access since the last grant.
    pub(crate) fn direct_bytes(&self) -> u64 {
        self.direct_bytes
    }

    /// Number of refusals and of grants that served few bytes.
    pub(crate) fn refusals(&self) -> u32 {
        self.refusals
    }

    /// Counts bytes that were moved by direct access.
    #[inline(always)]
    pub(crate) fn count_direct_bytes(&mut self, bytes: usize) {
        self.direct_bytes = self.direct_bytes.wrapping_add(bytes as u64);
    }

    /// Whether firnd may be asked now. If not, the `total` bytes of this call count as moved by the fallback.
    pub(crate) fn may_request(&mut self, total: usize) -> bool {
        if self.bytes_until_request == 0 {
            return true;
        }
        self.bytes_until_request = self.bytes_until_request.saturating_sub(total as u64);
        false
    }

    /// Records a grant.
    pub(crate) fn begin_grant(&mut self) {
        self.direct_bytes = 0;
    }

    /// Postpones the next request to firnd until the fallback has moved `bytes` bytes.
    pub(crate) fn postpone_by(&mut self, bytes: u64) {
        self.bytes_until_request = bytes;
    }

    /// Postpones the next request to firnd because the arena has no room.
    pub(crate) fn postpone_until_room(&mut self) {
        self.bytes_until_request = FULL_BYTES;
    }

    /// Records a refusal.
    pub(crate) fn count_refusal(&mut self) {
        self.refusals = self.refusals.saturating_add(1);
    }

    /// Forgets earlier refusals, because direct access has paid off.
    pub(crate) fn forget_refusals(&mut self) {
        self.refusals = 0;
    }

    /// Records the end of a grant. If the grant served few bytes, the next request is postponed, each time for longer.
    pub(crate) fn postpone_if_unprofitable(&mut self) {
        if self.direct_bytes < RETRY_BYTES_MAX {
            let bytes = RETRY_BYTES_MIN << self.refusals.min(DOUBLINGS_MAX);
            self.bytes_until_request = bytes.min(RETRY_BYTES_MAX);
            self.count_refusal();
        } else {
            self.refusals = 0;
        }
        self.direct_bytes = 0;
    }
}
