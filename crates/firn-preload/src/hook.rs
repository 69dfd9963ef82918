//! The functions that programs call instead of the C library's.
//!
//! A hook looks at the tag of its descriptor and, mostly, jumps on. Pairs like `open` and `open64` are one
//! function where `off_t` has 64 bits, as on all machines that Firn runs on.

mod asynchronous;
mod change;
mod file;
mod locks;
mod number;
mod print;
mod process;
mod read;
mod stat;
pub(crate) mod stream;
mod syscall;
mod write;

use crate::memory::{PARTS_MAX, ProgramMemory};

const _: () = assert!(size_of::<libc::off_t>() == 8);

/// Exports a function under several names.
macro_rules! export {
    ($name:ident $($more:ident)* = $to:ident($($arg:ident: $ty:ty),*) -> $ret:ty) => {
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) -> $ret {
            // SAFETY: the program calls it as it would the function of the C library.
            unsafe { $to($($arg),*) }
        }
        $crate::hook::export! { $($more)* = $to($($arg: $ty),*) -> $ret }
    };
    (= $to:ident($($arg:ident: $ty:ty),*) -> $ret:ty) => {};
}
use export;

/// Calls the real function with arguments that the program gave to its hook.
macro_rules! forward {
    ($real:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: the program called the hook of this function with these arguments, or ones that ask for less.
        unsafe { $real.get()($($arg),*) }
    }};
}
use forward;

/// Vectors as the memory of a call, where the kernel would take them: neither their number nor their place is bad.
///
/// # Safety
/// As for [`ProgramMemory::new`] if `parts` points to `count` vectors.
unsafe fn memory_of<'a, Access>(
    parts: *const libc::iovec,
    count: libc::c_int,
) -> Option<ProgramMemory<'a, Access>> {
    if parts.is_null() || !(1..=PARTS_MAX).contains(&count) {
        return None;
    }
    if !crate::probe::is_readable(parts.cast(), count as usize * size_of::<libc::iovec>()) {
        return None;
    }
    // SAFETY: the program gave `count` vectors to a call that does with them what `Access` says, and their place was
    // just found readable.
    Some(unsafe { ProgramMemory::new(std::slice::from_raw_parts(parts, count as usize)) })
}
