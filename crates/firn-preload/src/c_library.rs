//! Lets this library load in a process with any C library, and finds out whether that is glibc, the GNU C library.
//!
//! The environment of a job also reaches programs with another C library than glibc, such as those of an Alpine
//! container. In these programs this library must load and do nothing. So the C library is the only shared library that
//! it may need:
//!
//! * Functions that Rust's standard library would take from libgcc or from the loader are defined here.
//! * Functions that only glibc has are looked up by name.

use std::ffi::{CStr, c_int, c_void};

/// Returns the address of a symbol, if any loaded library has it.
fn look_up(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name is a C string.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

/// Whether the C library of this process is glibc.
pub(crate) fn is_glibc() -> bool {
    look_up(c"gnu_get_libc_version").is_some()
}

type Handler = extern "C" fn();
/// Type of `__register_atfork`, which pthread_atfork(3) calls. The last argument names the caller's library, whose
/// unloading removes the handlers.
type RegisterAtFork =
    unsafe extern "C" fn(Option<Handler>, Option<Handler>, Option<Handler>, *mut c_void) -> c_int;

/// Registers functions that are called before and after each fork(2) as long as the process lives. Returns whether that
/// is possible.
pub(crate) fn register_at_fork(before: Handler, in_parent: Handler, in_child: Handler) -> bool {
    let Some(address) = look_up(c"__register_atfork") else {
        return false;
    };
    // SAFETY: the function of this name has this type in every version of the GNU C library.
    let register = unsafe { std::mem::transmute::<*mut c_void, RegisterAtFork>(address) };
    // A null handle means that the functions belong to no library that could be unloaded.
    let library = std::ptr::null_mut();
    // SAFETY: the functions stay loaded as long as the process lives.
    unsafe { register(Some(before), Some(in_parent), Some(in_child), library) == 0 }
}

/// Defines functions under names that other libraries have too. They are hidden, so only this library uses them.
macro_rules! define_hidden {
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

// Functions that the standard library would take from libgcc_s.so.1. Nothing unwinds here, because a panic ends the
// process.
define_hidden! {
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

/// `_URC_FATAL_PHASE1_ERROR` of unwind.h.
const URC_FATAL_PHASE1_ERROR: c_int = 3;
/// `_URC_END_OF_STACK` of unwind.h.
const URC_END_OF_STACK: c_int = 5;

/// Refuses to unwind. The standard library reports that and aborts.
extern "C" fn refuse_to_unwind() -> c_int {
    URC_FATAL_PHASE1_ERROR
}

/// Ends a backtrace at once.
extern "C" fn end_backtrace() -> c_int {
    URC_END_OF_STACK
}

/// Ends the process, for functions that are called only while a stack is unwound.
extern "C" fn stop() -> ! {
    std::process::abort()
}

// The loader's function that finds thread-local memory. A direct reference would make this library need the loader
// under the name that it has with the GNU C library.
#[cfg(target_arch = "x86_64")]
define_hidden! { "__tls_get_addr" = find_thread_memory; }

/// Looks up the loader's function and calls it.
#[cfg(target_arch = "x86_64")]
extern "C" fn find_thread_memory(index: *mut c_void) -> *mut c_void {
    type Find = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
    let Some(address) = look_up(c"__tls_get_addr") else {
        stop();
    };
    // SAFETY: the psABI defines the type of the function of this name.
    let find = unsafe { std::mem::transmute::<*mut c_void, Find>(address) };
    // SAFETY: the compiler has made the argument for this function.
    unsafe { find(index) }
}
