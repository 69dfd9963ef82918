//! The hooks: exported functions that a program calls in place of those of the C library.
//!
//! A hook reads the *tag* of its descriptor: a word that says whether the library serves the descriptor. For most
//! descriptors it does not, and the hook calls the *real* function, that of the C library, with the same arguments.
//! Pairs such as `open` and `open64` are one function, because `off_t` has 64 bits on all machines that Firn runs on.

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

use crate::memory::{ProgramMemory, VECTORS_MAX};

// `open` and `open64`, for example, may be one function only if their offsets have the same size.
const _: () = assert!(size_of::<libc::off_t>() == 8);

/// Exports functions, each under one or several names: `stat stat64 = do_stat(..) -> c_int;` defines the C functions
/// `stat` and `stat64`, which call `do_stat`.
macro_rules! export {
    ($($($name:ident)+ = $function:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty;)*) => {
        $($crate::hook::export_names! { $($name)+ = $function($($arg: $ty),*) -> $ret })*
    };
}
use export;

/// Exports a function under several names.
macro_rules! export_names {
    ($name:ident $($more:ident)* = $function:ident($($arg:ident: $ty:ty),*) -> $ret:ty) => {
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) -> $ret {
            // SAFETY: the program calls this function as that of the C library, whose conditions it fulfils.
            unsafe { $function($($arg),*) }
        }
        $crate::hook::export_names! { $($more)* = $function($($arg: $ty),*) -> $ret }
    };
    (= $function:ident($($arg:ident: $ty:ty),*) -> $ret:ty) => {};
}
use export_names;

/// Calls the real function with the arguments that the program has passed to its hook.
macro_rules! forward {
    ($real:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: the program has passed these arguments to the hook of this function, or others that permit these.
        unsafe { $real.get()($($arg),*) }
    }};
}
use forward;

/// Makes the memory of a call from an array of vectors. Returns `None` if the kernel would refuse the array: its length
/// is invalid, or it cannot be read.
///
/// # Safety
/// If `vectors` points to `count` vectors, the same as for [`ProgramMemory::new`].
unsafe fn program_memory<'a, Access>(
    vectors: *const libc::iovec,
    count: libc::c_int,
) -> Option<ProgramMemory<'a, Access>> {
    if vectors.is_null() || !(1..=VECTORS_MAX).contains(&count) {
        return None;
    }
    if !crate::probe::is_readable(vectors.cast(), count as usize * size_of::<libc::iovec>()) {
        return None;
    }
    // SAFETY: the program has passed `count` vectors to a call that uses them as `Access` says, and the array was just
    // found readable.
    Some(unsafe { ProgramMemory::new(std::slice::from_raw_parts(vectors, count as usize)) })
}
