//! When firnd is asked for direct access again after it refused, took a grant back or had no room.

/// Bytes by the fallback before firnd is asked again after a grant that ended early: at first …
const HESITATE_BYTES_MIN: u64 = 128 << 10;
/// … and at last, which is also what a grant must have brought to count as worth it.
pub(crate) const HESITATE_BYTES_MAX: u64 = 8 << 20;
/// The same where the arena had no room: a drain's step.
const FULL_BYTES: u64 = 1 << 20;

/// When firnd is asked again. All zeros: now.
pub(crate) struct Patience {
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
            wait_bytes: 0,
            fast_bytes: 0,
            refusals: 0,
        }
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

    /// Next time after so many bytes.
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
