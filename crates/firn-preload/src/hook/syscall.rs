//! Hook of syscall(3), which makes system calls by number. A call for which there is a hook goes to that hook.
//!
//! libuv (Node, Julia, CMake, Neovim) asks for sizes, copies and closes by syscall(3). Other programs use it for calls
//! that their C library does not have. System calls by a program's own instruction are not seen.

use std::ffi::{c_char, c_int, c_long, c_uint, c_void};

use libc::iovec;

use super::file::finish_open;
use super::forward;
use super::number::register_received_fd;
use crate::real::SYSCALL;
use crate::sharing::SharingSnapshot;
use crate::sys::fail;
use crate::{lock, share, trees};

/// The six arguments of a system call. Arguments that the program has not passed have any value.
type Arguments = [usize; 6];

/// Returns the function that makes a system call: that of the C library, or [`make_call`]. The hook jumps to it with
/// the arguments in place. A call of the function would fail: some system calls that start a process return on another
/// stack.
extern "C" fn select_syscall_function(number: c_long) -> *const c_void {
    match number {
        #[cfg(target_arch = "x86_64")]
        libc::SYS_vfork => return super::process::vfork as *const c_void,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_fork => share_with_process(),
        libc::SYS_clone | libc::SYS_clone3 => share_with_process(),
        libc::SYS_execve | libc::SYS_execveat => share::prepare_for_exec(),
        _ if is_hooked(number) => return make_call as *const c_void,
        _ => {}
    }
    SYSCALL.get() as *const c_void
}

/// Prepares all descriptors to be shared with a new process.
fn share_with_process() {
    // The call may start a thread instead, which the C library does not count.
    lock::assume_many_threads();
    share::prepare_for_exec();
}

/// syscall(3), which is variadic in C. It keeps the arguments in their registers, selects a function by the number of
/// the system call, and jumps to it.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn syscall() -> c_long {
    #[cfg(target_arch = "x86_64")]
    std::arch::naked_asm!(
        "push rax", "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9",
        "call {select}",
        "mov r11, rax",
        "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi", "pop rax",
        "jmp r11",
        select = sym select_syscall_function,
    );
    #[cfg(target_arch = "aarch64")]
    std::arch::naked_asm!(
        "stp x29, x30, [sp, #-80]!",
        "stp x0, x1, [sp, #16]", "stp x2, x3, [sp, #32]", "stp x4, x5, [sp, #48]",
        "stp x6, x7, [sp, #64]",
        "bl {select}",
        "mov x16, x0",
        "ldp x6, x7, [sp, #64]", "ldp x4, x5, [sp, #48]", "ldp x2, x3, [sp, #32]",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #80",
        "br x16",
        select = sym select_syscall_function,
    );
}

/// Makes a system call by its hook.
///
/// # Safety
/// The program has passed number and arguments to syscall(3).
unsafe extern "C" fn make_call(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    let arguments = [a, b, c, d, e, f];
    // SAFETY: the program has passed these arguments for a call with this number.
    let hooked = unsafe { call_hook(number, arguments) };
    hooked.unwrap_or_else(|| forward!(SYSCALL(number, a, b, c, d, e, f)))
}

/// Defines which system calls go to which hooks, and with which arguments.
macro_rules! hooked {
    ($($(#[$when:meta])* $number:ident => $function:ident($($index:literal as $ty:ty),*);)*) => {
        fn is_hooked(number: c_long) -> bool {
            match number {
                $($(#[$when])* libc::$number => true,)*
                libc::SYS_openat2 | libc::SYS_pidfd_getfd => true,
                // A ring of io_uring would move bytes within the kernel, which has no bytes of stubs. A program that
                // gets no ring makes ordinary calls.
                libc::SYS_io_uring_setup => trees::has_trees(),
                _ => false,
            }
        }

        /// Calls the hook of a system call; `None` if there is none.
        ///
        /// # Safety
        /// The program has passed number and arguments to syscall(3).
        unsafe fn call_hook(number: c_long, arguments: Arguments) -> Option<c_long> {
            // SAFETY: the hook takes the arguments of the system call in this order, and its conditions are the same.
            let result = unsafe {
                match number {
                    $($(#[$when])* libc::$number => {
                        libc::$function($(arguments[$index] as $ty),*) as c_long
                    })*
                    libc::SYS_openat2 => open_by_structure(arguments),
                    libc::SYS_pidfd_getfd => take_descriptor(arguments),
                    libc::SYS_io_uring_setup => fail(libc::ENOSYS),
                    _ => return None,
                }
            };
            Some(result)
        }
    };
}

hooked! {
    SYS_read => read(0 as c_int, 1 as *mut c_void, 2 as usize);
    SYS_write => write(0 as c_int, 1 as *const c_void, 2 as usize);
    SYS_readv => readv(0 as c_int, 1 as *const iovec, 2 as c_int);
    SYS_writev => writev(0 as c_int, 1 as *const iovec, 2 as c_int);
    SYS_pread64 => pread64(0 as c_int, 1 as *mut c_void, 2 as usize, 3 as i64);
    SYS_pwrite64 => pwrite64(0 as c_int, 1 as *const c_void, 2 as usize, 3 as i64);
    // The kernel takes the offset in two words. On 64-bit machines the first one has all of it.
    SYS_preadv => preadv64(0 as c_int, 1 as *const iovec, 2 as c_int, 3 as i64);
    SYS_pwritev => pwritev64(0 as c_int, 1 as *const iovec, 2 as c_int, 3 as i64);
    SYS_preadv2 => preadv64v2(0 as c_int, 1 as *const iovec, 2 as c_int, 3 as i64, 5 as c_int);
    SYS_pwritev2 => pwritev64v2(0 as c_int, 1 as *const iovec, 2 as c_int, 3 as i64, 5 as c_int);
    SYS_lseek => lseek64(0 as c_int, 1 as i64, 2 as c_int);
    SYS_sendfile => sendfile64(0 as c_int, 1 as c_int, 2 as *mut i64, 3 as usize);
    SYS_splice => splice(0 as c_int, 1 as *mut i64, 2 as c_int, 3 as *mut i64, 4 as usize, 5 as c_uint);
    SYS_copy_file_range =>
        copy_file_range(0 as c_int, 1 as *mut i64, 2 as c_int, 3 as *mut i64, 4 as usize, 5 as c_uint);
    SYS_openat => openat64(0 as c_int, 1 as *const c_char, 2 as c_int, 3 as libc::mode_t);
    SYS_close => close(0 as c_int);
    SYS_close_range => close_range(0 as c_uint, 1 as c_uint, 2 as c_int);
    SYS_dup => dup(0 as c_int);
    SYS_dup3 => dup3(0 as c_int, 1 as c_int, 2 as c_int);
    SYS_fcntl => fcntl(0 as c_int, 1 as c_int, 2 as usize);
    SYS_ioctl => ioctl(0 as c_int, 1 as libc::c_ulong, 2 as usize);
    SYS_sendmsg => sendmsg(0 as c_int, 1 as *const libc::msghdr, 2 as c_int);
    SYS_sendmmsg => sendmmsg(0 as c_int, 1 as *mut libc::mmsghdr, 2 as c_uint, 3 as c_int);
    SYS_fstat => fstat64(0 as c_int, 1 as *mut libc::stat64);
    SYS_newfstatat => fstatat64(0 as c_int, 1 as *const c_char, 2 as *mut libc::stat64, 3 as c_int);
    SYS_statx => statx(0 as c_int, 1 as *const c_char, 2 as c_int, 3 as c_uint, 4 as *mut libc::statx);
    SYS_ftruncate => ftruncate64(0 as c_int, 1 as i64);
    SYS_truncate => truncate64(0 as *const c_char, 1 as i64);
    SYS_fallocate => fallocate64(0 as c_int, 1 as c_int, 2 as i64, 3 as i64);
    SYS_fsync => fsync(0 as c_int);
    SYS_fdatasync => fdatasync(0 as c_int);
    SYS_sync_file_range => sync_file_range(0 as c_int, 1 as i64, 2 as i64, 3 as c_uint);
    SYS_utimensat => utimensat(0 as c_int, 1 as *const c_char, 2 as *const libc::timespec, 3 as c_int);
    SYS_mmap => mmap64(0 as *mut c_void, 1 as usize, 2 as c_int, 3 as c_int, 4 as c_int, 5 as i64);
    SYS_munmap => munmap(0 as *mut c_void, 1 as usize);
    SYS_mprotect => mprotect(0 as *mut c_void, 1 as usize, 2 as c_int);
    SYS_mremap => mremap(0 as *mut c_void, 1 as usize, 2 as usize, 3 as c_int, 4 as *mut c_void);
    #[cfg(target_arch = "x86_64")]
    SYS_open => open64(0 as *const c_char, 1 as c_int, 2 as libc::mode_t);
    #[cfg(target_arch = "x86_64")]
    SYS_creat => creat64(0 as *const c_char, 1 as libc::mode_t);
    #[cfg(target_arch = "x86_64")]
    SYS_dup2 => dup2(0 as c_int, 1 as c_int);
    #[cfg(target_arch = "x86_64")]
    SYS_stat => stat64(0 as *const c_char, 1 as *mut libc::stat64);
    #[cfg(target_arch = "x86_64")]
    SYS_lstat => lstat64(0 as *const c_char, 1 as *mut libc::stat64);
    #[cfg(target_arch = "x86_64")]
    SYS_utimes => utimes(0 as *const c_char, 1 as *const libc::timeval);
    #[cfg(target_arch = "x86_64")]
    SYS_utime => utime(0 as *const c_char, 1 as *const libc::utimbuf);
}

/// openat2(2), for which the C library has no function. Its arguments are directory, path, `struct open_how` and its
/// size.
///
/// # Safety
/// The same as for the system call.
unsafe fn open_by_structure([dir, path, how, size, ..]: Arguments) -> c_long {
    let sharing_before_open = SharingSnapshot::take();
    let fd = forward!(SYSCALL(libc::SYS_openat2, dir, path, how, size, 0, 0));
    if fd < 0 {
        return fd;
    }
    // SAFETY: the kernel has just read the structure, whose first word is the flags.
    let flags = unsafe { (how as *const u64).read_unaligned() };
    c_long::from(finish_open(
        fd as c_int,
        flags as c_int,
        &sharing_before_open,
    ))
}

/// pidfd_getfd(2). The table may have state for the number that it returns, of a descriptor that was closed unseen.
///
/// # Safety
/// The same as for the system call.
unsafe fn take_descriptor([process, number, flags, ..]: Arguments) -> c_long {
    let fd = forward!(SYSCALL(
        libc::SYS_pidfd_getfd,
        process,
        number,
        flags,
        0,
        0,
        0
    ));
    if fd >= 0 {
        register_received_fd(fd as c_int);
    }
    fd
}
