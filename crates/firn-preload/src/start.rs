//! The start and the end of the library in a process.
//!
//! At the start it finds out whether it can and should act, reads its environment variables, and sets [`ACTIVE`] last.
//! At the end it prints the report.

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::Ordering;

use crate::hook::stream;
use crate::table::{self, ACTIVE, tag};
use crate::{
    c_library, connect, devices, list, lock, real, report, request_policy, share, sharing, stub,
    summary, trees,
};

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = start;

#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

/// The constructor of the library. Only the GNU C library passes arguments and environment to constructors, so they are
/// read only after the check that it is the GNU C library.
extern "C" fn start(_argc: c_int, argv: *const *const c_char, envp: *const *const c_char) {
    real::resolve();
    if !c_library::is_glibc() {
        return;
    }
    lock::find_one_thread_byte();
    // SAFETY: the loader of the GNU C library passes arrays of C strings that end with null.
    let (off, report, is_firnd) = unsafe {
        (
            environment_value(envp, b"FIRN_PRELOAD"),
            environment_value(envp, b"FIRN_PRELOAD_REPORT"),
            is_own_program(argv),
        )
    };
    let is_switched_off = off == Some(b"off");
    if is_switched_off || is_firnd || !wipe_all_on_fork() {
        return;
    }
    if report.is_some_and(|value| !value.is_empty() && value != b"0") {
        report::count_calls();
    }
    // A private offset must go back to the kernel before a fork, so without these handlers the library stays inactive.
    let sees_forks = c_library::register_at_fork(
        share::before_fork,
        share::after_fork,
        share::after_fork_in_child,
    );
    // SAFETY: the loader of the GNU C library passes arrays of C strings that end with null.
    let (dir, wait, direct_after) = unsafe {
        (
            environment_value(envp, b"FIRN_RUNTIME_DIR"),
            environment_value(envp, b"FIRN_PRELOAD_WAIT"),
            environment_value(envp, b"FIRN_PRELOAD_DIRECT_AFTER"),
        )
    };
    trees::set_runtime_dir(dir);
    firn_direct::processor::take_from_c_library();
    stub::set_wait_limit(wait);
    request_policy::set_direct_after(direct_after);
    // Hooks serve calls from here on, so everything that they use is set before.
    ACTIVE.store(u32::from(sees_forks), Ordering::Release);
    if sees_forks {
        stub::find_inherited();
        (0..3)
            .filter(|fd| table::descriptor_tag(*fd) == tag::STUB)
            .for_each(stream::replace_stream_of_stub);
    }
}

extern "C" fn end() {
    summary::print_report();
}

/// Makes children of fork(2) find no state of their parent. Returns false if the kernel does not support that.
fn wipe_all_on_fork() -> bool {
    table::wipe_on_fork()
        && connect::wipe_on_fork()
        && list::files::wipe_on_fork()
        && trees::wipe_on_fork()
        && devices::wipe_on_fork()
        && sharing::wipe_on_fork()
        && report::wipe_on_fork()
}

/// Returns the value of an environment variable from the array `envp`; `None` if it is not set.
///
/// # Safety
/// `envp` is null, or an array of C strings that ends with null.
unsafe fn environment_value<'a>(envp: *const *const c_char, name: &[u8]) -> Option<&'a [u8]> {
    if envp.is_null() {
        return None;
    }
    let mut position = envp;
    // SAFETY: the caller passes an array of C strings that ends with null.
    unsafe {
        while !(*position).is_null() {
            let variable = CStr::from_ptr(*position).to_bytes();
            if let Some(after_name) = variable.strip_prefix(name)
                && let Some(value) = after_name.strip_prefix(b"=")
            {
                return Some(value);
            }
            position = position.add(1);
        }
    }
    None
}

/// Whether this process is a program of Firn. firnd must not wait for itself.
///
/// # Safety
/// The same as for [`environment_value`].
unsafe fn is_own_program(argv: *const *const c_char) -> bool {
    // SAFETY: the caller passes an array that begins with a C string or null.
    let name = unsafe {
        if argv.is_null() || (*argv).is_null() {
            return false;
        }
        CStr::from_ptr(*argv).to_bytes()
    };
    let base = name.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    matches!(base, b"firnd" | b"firn" | b"mount.firn")
}
