//! When firnd is asked for direct access: not before an open file has moved some bytes, and later again after firnd
//! refused, took a grant back or had no room.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that an open file moves through the kernel before firnd is asked for the first time, unless
/// `FIRN_PRELOAD_DIRECT_AFTER` says otherwise: a grant and its end cost as much as this many bytes do there.
const DIRECT_AFTER_BYTES: u64 = 64 << 10;
/// A call counts as at least this many bytes: it is a trip to firnd, whatever it carries.
pub(crate) const CALL_BYTES_MIN: u64 = 8 << 10;
/// Bytes of a process without a connection that count as one. A connection takes as long as a grant does for 448 KiB
/// more: 95 µs, while a write of 64 KiB through the kernel takes 9 to 12 µs longer than a direct one.
const UNCONNECTED_DIVISOR: u64 = 8;
static DIRECT_AFTER: AtomicU64 = AtomicU64::new(DIRECT_AFTER_BYTES);

/// Sets after how many bytes firnd is asked, once, at the start of a program.
pub(crate) fn set_direct_after(bytes: Option<&[u8]>) {
    let number = bytes.and_then(|text| std::str::from_utf8(text).ok()?.parse::<u64>().ok());
    if let Some(number) = number {
        DIRECT_AFTER.store(number, Ordering::Relaxed);
    }
}

/// Bytes by the fallback before firnd is asked again after a grant that ended early: at first …
const HESITATE_BYTES_MIN: u64 = 128 << 10;
/// … and at last, which is also what a grant must have brought to count as worth it.
pub(crate) const HESITATE_BYTES_MAX: u64 = 8 << 20;
/// The same where the arena had no room: a drain's step.
const FULL_BYTES: u64 = 1 << 20;

/// When firnd is asked again. All zeros: now.
pub(crate) struct Patience {
    /// Bytes through the kernel before firnd is asked for the first time.
    small_bytes: u64,
    /// Bytes that count as one of `small_bytes`; 0: the same as 1.
    small_divisor: u64,
    /// Bytes by the fallback before firnd is asked again.
    wait_bytes: u64,
    /// Bytes in leases or by lists since the last grant.
    fast_bytes: u64,
    /// How often firnd refused or took back.
    refusals: u32,
}

impl Patience {
    pub(crate) const fn new() -> Self {
        Self {
            small_bytes: 0,
            small_divisor: 0,
            wait_bytes: 0,
            fast_bytes: 0,
            refusals: 0,
        }
    }

    /// The file was just opened: it may be so small that direct access never pays, later so if it needs a connection.
    pub(crate) fn begin_small(&mut self, is_connected: bool) {
        self.small_bytes = DIRECT_AFTER.load(Ordering::Relaxed);
        self.small_divisor = if is_connected { 1 } else { UNCONNECTED_DIVISOR };
    }

    /// Whether calls may still go through the kernel because little was moved so far.
    pub(crate) fn may_be_small(&self) -> bool {
        self.small_bytes > 0
    }

    /// Whether a call of `bytes` belongs to the first ones, which go through the kernel.
    pub(crate) fn is_small(&mut self, bytes: u64) -> bool {
        let counted = (bytes / self.small_divisor.max(1)).max(CALL_BYTES_MIN);
        self.small_bytes = self.small_bytes.saturating_sub(counted);
        self.small_bytes > 0
    }

    pub(crate) fn fast_bytes(&self) -> u64 {
        self.fast_bytes
    }

    pub(crate) fn refusals(&self) -> u32 {
        self.refusals
    }

    #[inline(always)]
    pub(crate) fn count_fast(&mut self, bytes: usize) {
        self.fast_bytes = self.fast_bytes.wrapping_add(bytes as u64);
    }

    /// Whether it is time to ask; if not, `total` more bytes go by the fallback.
    pub(crate) fn may_ask(&mut self, total: usize) -> bool {
        if self.wait_bytes == 0 {
            return true;
        }
        self.wait_bytes = self.wait_bytes.saturating_sub(total as u64);
        false
    }

    /// firnd agreed.
    pub(crate) fn note_grant(&mut self) {
        self.fast_bytes = 0;
    }

    /// Asks again after `bytes` more bytes.
    pub(crate) fn wait_for(&mut self, bytes: u64) {
        self.wait_bytes = bytes;
    }

    /// The arena has no room.
    pub(crate) fn wait_for_room(&mut self) {
        self.wait_bytes = FULL_BYTES;
    }

    pub(crate) fn count_refusal(&mut self) {
        self.refusals = self.refusals.saturating_add(1);
    }

    /// What was refused or taken back before does not count any more.
    pub(crate) fn forget_refusals(&mut self) {
        self.refusals = 0;
    }

    /// A grant ended: after one that brought little firnd is asked later each time.
    pub(crate) fn wait_longer(&mut self) {
        if self.fast_bytes < HESITATE_BYTES_MAX {
            let wait = HESITATE_BYTES_MIN << self.refusals.min(6);
            self.wait_bytes = wait.min(HESITATE_BYTES_MAX);
            self.count_refusal();
        } else {
            self.refusals = 0;
        }
        self.fast_bytes = 0;
    }
}
