//! System calls without the C library: no `errno`, no cancellation point, and none of the functions that the
//! preload library puts itself before.
//!
//! A negative result is `-errno`. Addresses are handed to the kernel, which answers EFAULT where they are bad.

use std::arch::asm;
use std::ffi::{c_int, c_long};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

/// Makes a system call.
///
/// # Safety
/// The caller allows all effects of the call: it may write where its arguments point, and close or replace what they
/// name.
#[inline]
pub unsafe fn call(number: c_long, arg: [usize; 6]) -> isize {
    let result: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller allows what the kernel does; of the registers the instruction changes those that are named
    // (x86-64 psABI, A.2.1), and it leaves the stack alone.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => result, in("rdi") arg[0], in("rsi") arg[1],
            in("rdx") arg[2], in("r10") arg[3], in("r8") arg[4], in("r9") arg[5],
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the caller allows what the kernel does, which changes no register but x0 and leaves the stack alone.
    unsafe {
        asm!("svc 0", in("x8") number as isize, inlateout("x0") arg[0] as isize => result, in("x1") arg[1],
            in("x2") arg[2], in("x3") arg[3], in("x4") arg[4], in("x5") arg[5], options(nostack));
    }
    result
}

/// As [`call`](fn@call), with the arguments as they come; those that are not given are 0.
#[macro_export]
macro_rules! syscall {
    ($number:expr $(, $arg:expr)* $(,)?) => {{
        let given: &[usize] = &[$($arg as usize),*];
        let mut all = [0usize; 6];
        let mut at = 0;
        while at < given.len() && at < 6 {
            all[at] = given[at];
            at += 1;
        }
        $crate::syscall::call($number, all)
    }};
}

/// An open descriptor that is closed by the system call: close(3) is one of the preload library's hooks.
#[derive(Debug)]
pub struct Descriptor(c_int);

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open and its number not -1 for as long as this value lives (`from_raw_fd`).
        unsafe { BorrowedFd::borrow_raw(self.0) }
    }
}

impl FromRawFd for Descriptor {
    unsafe fn from_raw_fd(fd: RawFd) -> Self {
        Self(fd)
    }
}

impl IntoRawFd for Descriptor {
    fn into_raw_fd(self) -> RawFd {
        ManuallyDrop::new(self).0
    }
}

impl From<OwnedFd> for Descriptor {
    fn from(fd: OwnedFd) -> Self {
        Self(fd.into_raw_fd())
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the maker of this value gave the descriptor away (`from_raw_fd`): nothing else uses or closes it.
        unsafe { syscall!(libc::SYS_close, self.0) };
    }
}
