//! The part of a descriptor's entry that only stubs have.

use std::ffi::c_int;

/// All zeros: firnd was not told of the descriptor.
pub(crate) struct StubState {
    /// firnd knows the descriptor by `Inner::token`.
    pub(crate) adopted: bool,
    /// It did once.
    pub(crate) known: bool,
    /// A lease may be asked for or filled.
    pub(crate) granted: bool,
    /// Bytes were written since the last release.
    pub(crate) wrote: bool,
    /// Status flags, and `O_TRUNC` until firnd was told of it.
    pub(crate) flags: c_int,
}

impl StubState {
    pub(crate) const fn new() -> Self {
        Self {
            adopted: false,
            known: false,
            granted: false,
            wrote: false,
            flags: 0,
        }
    }
}
