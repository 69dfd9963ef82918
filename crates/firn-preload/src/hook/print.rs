//! Hooks of functions that write text to a descriptor by calls that no hook sees: dprintf(3) and
//! backtrace_symbols_fd(3).
//!
//! For a descriptor of a mount, the offset that this process kept is given back to the kernel before. For a stub (an
//! empty file with its bytes in firnd) the text is written to a memory file, and from there to the stub.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsFd, AsRawFd};

use super::{export, forward};
use crate::kernel;
use crate::real::{BACKTRACE_SYMBOLS_FD, VDPRINTF, VDPRINTF_CHK};
use crate::report::Call;
use crate::stub;
use crate::sys::fail;
use crate::table::{descriptor_tag, tag};

/// A `va_list`, which both supported machines pass by its address.
type Arguments = *mut c_void;

export! {
    vdprintf = do_vdprintf(fd: c_int, format: *const c_char, arguments: Arguments) -> c_int;
    __vdprintf_chk = do_vdprintf_chk(
        fd: c_int,
        flag: c_int,
        format: *const c_char,
        arguments: Arguments,
    ) -> c_int;
    backtrace_symbols_fd = do_backtrace_symbols_fd(
        addresses: *const *mut c_void,
        count: c_int,
        fd: c_int,
    ) -> ();
}

/// Lets a function of the C library print to a descriptor. Returns the function's result, which is negative for an
/// error.
fn print_to(fd: c_int, print: impl FnOnce(c_int) -> c_int) -> c_int {
    match descriptor_tag(fd) {
        tag::ORDINARY => print(fd),
        tag::STUB => print_to_stub(fd, print),
        _ => kernel::prepare_kernel_call(fd, Call::Write).run(|| print(fd)),
    }
}

/// Lets a function print to a memory file, and writes that file to a stub.
fn print_to_stub(fd: c_int, print: impl FnOnce(c_int) -> c_int) -> c_int {
    let Some(text_file) = stub::new_memory_file() else {
        return fail(libc::EMFILE);
    };
    let result = print(text_file.as_fd().as_raw_fd());
    if result < 0 {
        return result;
    }
    match stub::write_memory_file(fd, &text_file) {
        Ok(()) => result,
        Err(errno) => fail(errno),
    }
}

unsafe extern "C" fn do_vdprintf(fd: c_int, format: *const c_char, arguments: Arguments) -> c_int {
    print_to(fd, |output_fd| {
        forward!(VDPRINTF(output_fd, format, arguments))
    })
}

unsafe extern "C" fn do_vdprintf_chk(
    fd: c_int,
    flag: c_int,
    format: *const c_char,
    arguments: Arguments,
) -> c_int {
    print_to(fd, |output_fd| {
        forward!(VDPRINTF_CHK(output_fd, flag, format, arguments))
    })
}

unsafe fn do_backtrace_symbols_fd(addresses: *const *mut c_void, count: c_int, fd: c_int) {
    print_to(fd, |output_fd| {
        forward!(BACKTRACE_SYMBOLS_FD(addresses, count, output_fd));
        0
    });
}

/// Defines a variadic function that makes a `va_list` of its unnamed arguments and passes it on as the last argument.
///
/// For x86-64 it takes the number of named arguments, for AArch64 the number of registers with unnamed ones. Both also
/// take the register of the last argument.
macro_rules! export_variadic {
    (
        $name:ident = $function:ident,
        x86_64: $named_x86:literal $last_x86:literal,
        aarch64: $unnamed_arm:literal $last_arm:literal
    ) => {
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() -> c_int {
            // The registers are stored as in "Register Save Area" of the x86-64 psABI (3.5.7), and the list behind
            // them.
            #[cfg(target_arch = "x86_64")]
            std::arch::naked_asm!(
                "sub rsp, 216",
                "mov [rsp + 16], rdx", "mov [rsp + 24], rcx", "mov [rsp + 32], r8", "mov [rsp + 40], r9",
                "test al, al",
                "je 2f",
                "movaps [rsp + 48], xmm0", "movaps [rsp + 64], xmm1",
                "movaps [rsp + 80], xmm2", "movaps [rsp + 96], xmm3",
                "movaps [rsp + 112], xmm4", "movaps [rsp + 128], xmm5",
                "movaps [rsp + 144], xmm6", "movaps [rsp + 160], xmm7",
                "2:",
                "mov dword ptr [rsp + 176], {named}",
                "mov dword ptr [rsp + 180], 48",
                "lea rax, [rsp + 224]",
                "mov [rsp + 184], rax",
                "mov [rsp + 192], rsp",
                concat!("lea ", $last_x86, ", [rsp + 176]"),
                "call {function}",
                "add rsp, 216",
                "ret",
                named = const $named_x86 * 8, function = sym $function,
            );
            // The list is made as in "Variable argument lists" of the AArch64 procedure call standard.
            #[cfg(target_arch = "aarch64")]
            std::arch::naked_asm!(
                "stp x29, x30, [sp, #-256]!",
                "mov x29, sp",
                "stp x2, x3, [sp, #64]", "stp x4, x5, [sp, #80]", "stp x6, x7, [sp, #96]",
                "stp q0, q1, [sp, #112]", "stp q2, q3, [sp, #144]",
                "stp q4, q5, [sp, #176]", "stp q6, q7, [sp, #208]",
                "add x9, sp, #256", "str x9, [sp, #16]",
                "add x9, sp, #112", "str x9, [sp, #24]",
                "add x9, sp, #240", "str x9, [sp, #32]",
                "mov w9, #-{unnamed}", "str w9, [sp, #40]",
                "mov w9, #-128", "str w9, [sp, #44]",
                concat!("add ", $last_arm, ", sp, #16"),
                "bl {function}",
                "ldp x29, x30, [sp], #256",
                "ret",
                unnamed = const $unnamed_arm * 8, function = sym $function,
            );
        }
    };
}

export_variadic! {
    dprintf = do_vdprintf,
    x86_64: 2 "rdx",
    aarch64: 6 "x2"
}
export_variadic! {
    __dprintf_chk = do_vdprintf_chk,
    x86_64: 3 "rcx",
    aarch64: 5 "x3"
}
