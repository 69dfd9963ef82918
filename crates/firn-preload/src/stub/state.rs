//! The part of a descriptor's entry that only stubs (empty files; firnd has their bytes) use.

use std::ffi::c_int;

/// State of a stub. All zeros mean that firnd does not know the descriptor yet.
pub(crate) struct StubState {
    /// Whether the running firnd knows the descriptor, by `EntryState::token`.
    pub(crate) is_adopted: bool,
    /// Whether firnd has known the descriptor at any time, also before a restart.
    pub(crate) was_adopted: bool,
    /// Whether firnd has granted direct access, so that leases may be requested and filled.
    pub(crate) has_grant: bool,
    /// Whether bytes were written since the last release.
    pub(crate) has_unreleased_writes: bool,
    /// Status flags of the descriptor, and `O_TRUNC` until firnd was informed of it.
    pub(crate) flags: c_int,
}

impl StubState {
    pub(crate) const fn new() -> Self {
        Self {
            is_adopted: false,
            was_adopted: false,
            has_grant: false,
            has_unreleased_writes: false,
            flags: 0,
        }
    }
}
