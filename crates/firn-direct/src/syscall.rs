//! System calls without the C library. They do not set `errno`, are no cancellation points, and do not call the
//! functions that the preload library replaces.
//!
//! A negative result is `-errno`. A bad address is harmless: the call fails with EFAULT.

use std::arch::asm;
use std::ffi::{c_int, c_long};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

/// Makes the system call with this number and these arguments. Returns its result, or `-errno`.
///
/// # Safety
/// The caller must allow all effects of the system call. It may write to memory at its arguments, and close or replace
/// the objects that they name.
#[inline]
pub unsafe fn call(number: c_long, arg: [usize; 6]) -> isize {
    let result: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller allows the effects of the call. The instruction changes only the named registers (x86-64
    // psABI, A.2.1) and no stack.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => result, in("rdi") arg[0], in("rsi") arg[1],
            in("rdx") arg[2], in("r10") arg[3], in("r8") arg[4], in("r9") arg[5],
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the caller allows the effects of the call. The instruction changes only x0 and no stack.
    unsafe {
        asm!("svc 0", in("x8") number as isize, inlateout("x0") arg[0] as isize => result, in("x1") arg[1],
            in("x2") arg[2], in("x3") arg[3], in("x4") arg[4], in("x5") arg[5], options(nostack));
    }
    result
}

/// Makes a system call like [`call`](fn@call). Takes arguments of any integer or pointer type; missing ones are 0.
#[macro_export]
macro_rules! syscall {
    ($number:expr $(, $arg:expr)* $(,)?) => {{
        let arguments: &[usize] = &[$($arg as usize),*];
        let mut registers = [0usize; 6];
        let mut index = 0;
        while index < arguments.len() && index < registers.len() {
            registers[index] = arguments[index];
            index += 1;
        }
        $crate::syscall::call($number, registers)
    }};
}

/// An open descriptor. It is closed by the system call, because the preload library replaces close(3).
#[derive(Debug)]
pub struct Descriptor(c_int);

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open and its number is not -1 while this value lives (`from_raw_fd`).
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
        // SAFETY: this value owns the descriptor (`from_raw_fd`), so no other code uses or closes it.
        unsafe { syscall!(libc::SYS_close, self.0) };
    }
}
