//! The C library that a process has. A job's environment reaches programs of another one, too, those of an Alpine container
//! say: the library must load there and do nothing.
//!
//! So it needs no shared library but the C library. What the standard library would take of libgcc and of the loader is
//! here, and what only the GNU C library has is looked up by name.

use std::ffi::{CStr, c_int, c_void};

/// What the loader has under a name.
fn look_up(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name is a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Whether it is the GNU C library.
pub(crate) fn is_gnu() -> bool {
    look_up(c"gnu_get_libc_version").is_some()
}

type Handler = extern "C" fn();
/// pthread_atfork(3) is no function of the shared library, but calls this one; the last argument names the caller's library,
/// at whose end its handlers are forgotten.
type RegisterAtFork =
    unsafe extern "C" fn(Option<Handler>, Option<Handler>, Option<Handler>, *mut c_void) -> c_int;

/// Has functions called before and after each fork(2), for as long as the process lives. Whether that is possible.
pub(crate) fn register_at_fork(before: Handler, parent: Handler, child: Handler) -> bool {
    let Some(found) = look_up(c"__register_atfork") else {
        return false;
    };
    // SAFETY: the function of that name, which has these arguments in every version of the GNU C library.
    let register = unsafe { std::mem::transmute::<*mut c_void, RegisterAtFork>(found) };
    // SAFETY: the functions stay loaded as long as the process lives.
    unsafe {
        register(
            Some(before),
            Some(parent),
            Some(child),
            std::ptr::null_mut(),
        ) == 0
    }
}

/// Defines functions under names that other libraries have too, for this library alone: none of them is exported.
macro_rules! own {
    ($($name:literal = $to:ident;)*) => {$(
        #[cfg(target_arch = "x86_64")]
        std::arch::global_asm!(
            concat!(".globl ", $name), concat!(".hidden ", $name),
            concat!(".type ", $name, ", @function"), concat!($name, ":"),
            "jmp {to}", to = sym $to,
        );
        #[cfg(target_arch = "aarch64")]
        std::arch::global_asm!(
            concat!(".globl ", $name), concat!(".hidden ", $name),
            concat!(".type ", $name, ", %function"), concat!($name, ":"),
            "b {to}", to = sym $to,
        );
    )*};
}

// What the standard library has of libgcc_s.so.1. Nothing unwinds here: a panic ends the process.
own! {
    "_Unwind_RaiseException" = refuse_to_unwind;
    "_Unwind_Backtrace" = end_backtrace;
    "_Unwind_Resume" = stop;
    "_Unwind_DeleteException" = stop;
    "_Unwind_GetCFA" = stop;
    "_Unwind_GetDataRelBase" = stop;
    "_Unwind_GetIP" = stop;
    "_Unwind_GetIPInfo" = stop;
    "_Unwind_GetLanguageSpecificData" = stop;
    "_Unwind_GetRegionStart" = stop;
    "_Unwind_GetTextRelBase" = stop;
    "_Unwind_SetGR" = stop;
    "_Unwind_SetIP" = stop;
    "_Unwind_FindEnclosingFunction" = stop;
}

/// `_URC_FATAL_PHASE1_ERROR` (unwind.h): the standard library says so and aborts.
extern "C" fn refuse_to_unwind() -> c_int {
    3
}

/// `_URC_END_OF_STACK` (unwind.h).
extern "C" fn end_backtrace() -> c_int {
    5
}

extern "C" fn stop() -> ! {
    std::process::abort()
}

// The loader's function for memory of a thread. To take it from the loader would need that as a shared library, by the name
// that it has with the GNU C library.
#[cfg(target_arch = "x86_64")]
own! { "__tls_get_addr" = find_thread_memory; }

#[cfg(target_arch = "x86_64")]
extern "C" fn find_thread_memory(index: *mut c_void) -> *mut c_void {
    type Find = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
    let Some(found) = look_up(c"__tls_get_addr") else {
        stop();
    };
    // SAFETY: the function of that name, which the psABI defines.
    let find = unsafe { std::mem::transmute::<*mut c_void, Find>(found) };
    // SAFETY: what the compiler made for this function.
    unsafe { find(index) }
}
