//! The functions that programs call instead of the C library's.
//!
//! A hook looks at the tag of its descriptor and, mostly, jumps on. Pairs like `open` and `open64` are one
//! function where `off_t` has 64 bits, as on all machines that Firn runs on.

mod asynchronous;
mod change;
mod file;
mod number;
mod process;
mod read;
mod stat;
pub(crate) mod stream;
mod write;

const _: () = assert!(size_of::<libc::off_t>() == 8);

/// Exports a function under several names.
macro_rules! export {
    ($name:ident $($more:ident)* = $to:ident($($arg:ident: $ty:ty),*) -> $ret:ty) => {
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) -> $ret {
            // SAFETY: the caller's promise, as for the function of the C library.
            unsafe { $to($($arg),*) }
        }
        $crate::hook::export! { $($more)* = $to($($arg: $ty),*) -> $ret }
    };
    (= $to:ident($($arg:ident: $ty:ty),*) -> $ret:ty) => {};
}
use export;

/// Vectors as a slice, where the kernel would take them: neither their number nor their place is bad.
///
/// # Safety
/// `parts` points to `count` vectors if that is a number the kernel takes.
unsafe fn parts_of<'a>(parts: *const libc::iovec, count: libc::c_int) -> Option<&'a [libc::iovec]> {
    if parts.is_null() || !(1..=crate::writer::PARTS_MAX).contains(&count) {
        return None;
    }
    if !crate::probe::is_readable(parts.cast(), count as usize * size_of::<libc::iovec>()) {
        return None;
    }
    // SAFETY: the caller's promise.
    Some(unsafe { std::slice::from_raw_parts(parts, count as usize) })
}
