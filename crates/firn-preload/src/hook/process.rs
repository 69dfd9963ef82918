//! Hooks of calls that start processes or programs, which get copies of all descriptors.
//!
//! fork(2) is seen by `pthread_atfork`, which covers `daemon` and `forkpty` too.

use std::ffi::{c_char, c_int, c_void};

use libc::{FILE, pid_t};

use super::{export, forward};
use crate::real::{
    CLONE, EXECL, EXECLE, EXECLP, EXECV, EXECVE, EXECVEAT, EXECVP, EXECVPE, FEXECVE, FORK_ONLY,
    PIDFD_SPAWN, PIDFD_SPAWNP, POPEN, POSIX_SPAWN, POSIX_SPAWNP, SYSTEM, WORDEXP,
};
use crate::{lock, share};

type Strings = *const *const c_char;

/// Defines hooks of calls that copy all descriptors to another process or program. All descriptors are prepared to be
/// shared before the call: their offsets go back to the kernel. After it, offsets may become private (kept by this
/// process) again.
macro_rules! export_sharing {
    ($($name:ident = $real:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) -> $ret {
            share::begin_sharing();
            // SAFETY: the program has passed these arguments to the hook of this function.
            let result = unsafe { $real.get()($($arg),*) };
            share::end_sharing();
            result
        }
    )*};
}

export_sharing! {
    execve = EXECVE(path: *const c_char, argv: Strings, envp: Strings) -> c_int;
    execv = EXECV(path: *const c_char, argv: Strings) -> c_int;
    execvp = EXECVP(path: *const c_char, argv: Strings) -> c_int;
    execvpe = EXECVPE(path: *const c_char, argv: Strings, envp: Strings) -> c_int;
    fexecve = FEXECVE(fd: c_int, argv: Strings, envp: Strings) -> c_int;
    execveat = EXECVEAT(
        dir: c_int,
        path: *const c_char,
        argv: Strings,
        envp: Strings,
        flags: c_int,
    ) -> c_int;
    posix_spawn = POSIX_SPAWN(
        pid: *mut pid_t,
        path: *const c_char,
        actions: *const c_void,
        attr: *const c_void,
        argv: Strings,
        envp: Strings,
    ) -> c_int;
    posix_spawnp = POSIX_SPAWNP(
        pid: *mut pid_t,
        path: *const c_char,
        actions: *const c_void,
        attr: *const c_void,
        argv: Strings,
        envp: Strings,
    ) -> c_int;
    pidfd_spawn = PIDFD_SPAWN(
        pidfd: *mut c_int,
        path: *const c_char,
        actions: *const c_void,
        attr: *const c_void,
        argv: Strings,
        envp: Strings,
    ) -> c_int;
    pidfd_spawnp = PIDFD_SPAWNP(
        pidfd: *mut c_int,
        path: *const c_char,
        actions: *const c_void,
        attr: *const c_void,
        argv: Strings,
        envp: Strings,
    ) -> c_int;
    wordexp = WORDEXP(words: *const c_char, to: *mut c_void, flags: c_int) -> c_int;
    system = SYSTEM(command: *const c_char) -> c_int;
    popen = POPEN(command: *const c_char, mode: *const c_char) -> *mut FILE;
}

export! {
    _Fork = do_fork_only() -> pid_t;
}

unsafe fn do_fork_only() -> pid_t {
    share::before_fork();
    let pid = forward!(FORK_ONLY());
    if pid == 0 {
        share::after_fork_in_child();
    } else {
        share::after_fork();
    }
    pid
}

/// Prepares all descriptors to be shared before execl(3) or clone(2).
extern "C" fn share_all() {
    // clone(2) may start a thread that the C library does not count.
    lock::assume_many_threads();
    share::prepare_for_exec();
}

/// Defines hooks of variadic functions. A hook calls [`share_all`], and then jumps to the real function with the
/// arguments as they are.
macro_rules! export_variadic {
    ($($name:ident = $real:ident;)*) => {$(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() -> c_int {
            #[cfg(target_arch = "x86_64")]
            std::arch::naked_asm!(
                "push rax", "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9",
                "call {before}",
                "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi", "pop rax",
                "jmp qword ptr [rip + {real}]",
                before = sym share_all, real = sym $real,
            );
            #[cfg(target_arch = "aarch64")]
            std::arch::naked_asm!(
                "stp x29, x30, [sp, #-80]!",
                "stp x0, x1, [sp, #16]", "stp x2, x3, [sp, #32]", "stp x4, x5, [sp, #48]",
                "stp x6, x7, [sp, #64]",
                "bl {before}",
                "ldp x6, x7, [sp, #64]", "ldp x4, x5, [sp, #48]", "ldp x2, x3, [sp, #32]",
                "ldp x0, x1, [sp, #16]",
                "ldp x29, x30, [sp], #80",
                "adrp x16, {real}", "ldr x16, [x16, :lo12:{real}]", "br x16",
                before = sym share_all, real = sym $real,
            );
        }
    )*};
}

export_variadic! {
    execl = EXECL;
    execlp = EXECLP;
    execle = EXECLE;
    clone = CLONE;
}

/// Defines vfork(2). It returns twice on one stack, so it must not have a stack frame: the child would overwrite the
/// return address. As in the C library, the return address is in a register meanwhile, of which the child has a copy.
macro_rules! export_vfork {
    ($($name:ident)+) => {$(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub(super) unsafe extern "C" fn $name() -> pid_t {
            #[cfg(target_arch = "x86_64")]
            std::arch::naked_asm!(
                "sub rsp, 8",
                "call {before}",
                "add rsp, 8",
                "pop rdi",
                "mov eax, {number}",
                "syscall",
                "push rdi",
                "test eax, eax",
                "je 2f",
                "mov rdi, rax",
                "jmp {after}",
                "2:",
                "ret",
                before = sym share::before_vfork, after = sym vforked, number = const libc::SYS_vfork,
            );
            #[cfg(target_arch = "aarch64")]
            std::arch::naked_asm!(
                "stp x29, x30, [sp, #-16]!",
                "bl {before}",
                "ldp x29, x30, [sp], #16",
                "mov x0, {flags}",
                "mov x1, xzr",
                "mov x8, {number}",
                "svc 0",
                "cbz x0, 2f",
                "b {after}",
                "2:",
                "ret",
                before = sym share::before_vfork, after = sym vforked, number = const libc::SYS_clone,
                flags = const libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
            );
        }
    )+};
}

export_vfork! { vfork __vfork }

/// Ends vfork(2) in the parent.
extern "C" fn vforked(result: isize) -> pid_t {
    share::after_vfork();
    crate::sys::with_errno(result) as pid_t
}
