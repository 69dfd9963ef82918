//! System calls without the C library: no hook, no errno, no cancellation.
//!
//! A negative result is `-errno`. Pointers of the program are handed to the kernel, which checks them.

use std::arch::asm;
use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU64;
#[cfg(not(target_arch = "x86_64"))]
use std::sync::atomic::Ordering;

use firn_direct::syscall::Descriptor;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::Resource;

pub(crate) use firn_direct::syscall;

/// A descriptor of the program, which says that it is open; `None` where no descriptor has that number.
pub(crate) fn borrow(fd: c_int) -> Option<BorrowedFd<'static>> {
    // SAFETY: not -1. Should the program close it meanwhile, the system call that it is borrowed for says so, or is
    // about the descriptor that has the number then, as without the library.
    (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
}

/// The CPU on which this thread runs plus one; 0 where the kernel does not say.
pub(crate) fn current_cpu() -> u32 {
    let mut cpu = 0u32;
    let none = std::ptr::null_mut::<c_void>();
    // SAFETY: the kernel writes one word, ours.
    let result = unsafe { syscall!(libc::SYS_getcpu, &raw mut cpu, none, none) };
    if result == 0 { cpu.wrapping_add(1) } else { 0 }
}

/// The running thread, as a number that no other thread of the process has. Even; a child of vfork(2) has
/// that of the thread that waits for it.
#[inline(always)]
pub(crate) fn thread_pointer() -> u64 {
    let pointer: u64;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the first word of the thread's control block is its own address (x86-64 psABI).
    unsafe {
        asm!("mov {}, fs:0", out(reg) pointer, options(nostack, preserves_flags, readonly, pure));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: reads a register that every program may read, and changes nothing.
    unsafe {
        asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, preserves_flags, nomem, pure));
    }
    pointer
}

/// Adds to a word that only this thread and its signal handlers touch, in one instruction; what it was before.
/// Without the lock that other threads would need it is 4 ns faster.
#[inline(always)]
pub(crate) fn add_to_word(word: &AtomicU64, more: u64) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        let mut before = more;
        // SAFETY: adds to the word and to nothing else.
        unsafe {
            asm!("xadd qword ptr [{word}], {before}", word = in(reg) word.as_ptr(),
                before = inout(reg) before, options(nostack));
        }
        before
    }
    #[cfg(not(target_arch = "x86_64"))]
    word.fetch_add(more, Ordering::Relaxed)
}

/// Sets errno where `result` is an error: what the C library's function would return.
pub(crate) fn with_errno(result: isize) -> isize {
    if result >= 0 {
        return result;
    }
    // SAFETY: the address of this thread's errno is always valid.
    unsafe { *libc::__errno_location() = result.wrapping_neg() as c_int };
    -1
}

/// getpid(2).
pub(crate) fn pid() -> u32 {
    rustix::process::getpid().as_raw_pid() as u32
}

/// geteuid(2).
pub(crate) fn euid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// close(2).
pub(crate) fn close(fd: c_int) {
    // SAFETY: callers close what they opened themselves, or what the program closes.
    unsafe { syscall!(libc::SYS_close, fd) };
}

/// lseek(2).
pub(crate) fn lseek(fd: c_int, offset: i64, whence: c_int) -> isize {
    // SAFETY: three numbers: the kernel moves an offset, and touches no memory of this process.
    unsafe { syscall!(libc::SYS_lseek, fd, offset, whence) }
}

/// pwrite(2).
pub(crate) fn pwrite(fd: c_int, data: *const c_void, len: usize, offset: u64) -> isize {
    // SAFETY: the kernel reads the data and answers EFAULT where it cannot.
    unsafe { syscall!(libc::SYS_pwrite64, fd, data, len, offset) }
}

/// pread(2).
///
/// # Safety
/// `data` is the program's own, for `len` bytes.
pub(crate) unsafe fn pread(fd: c_int, data: *mut c_void, len: usize, offset: u64) -> isize {
    // SAFETY: the kernel writes `len` bytes at `data`, which are the program's to be written, or answers EFAULT.
    unsafe { syscall!(libc::SYS_pread64, fd, data, len, offset) }
}

/// fcntl(2) with a number.
pub(crate) fn fcntl(fd: c_int, command: c_int, arg: usize) -> isize {
    // SAFETY: the commands that callers use take a number and no address.
    unsafe { syscall!(libc::SYS_fcntl, fd, command, arg) }
}

/// What tells one open file's inode from another's: device, inode, mode.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

/// A device in one word.
pub(crate) fn device_number(major: u32, minor: u32) -> u64 {
    u64::from(major) << 32 | u64::from(minor)
}

/// Identity and mode of a descriptor, without asking the server of the file system.
pub(crate) fn identity(fd: c_int) -> Option<(Identity, u32)> {
    let (mask, sync) = (libc::STATX_TYPE | libc::STATX_INO, libc::AT_STATX_DONT_SYNC);
    with_statx(fd, c"", mask, libc::AT_EMPTY_PATH | sync, |stat| {
        let device = device_number(stat.stx_dev_major, stat.stx_dev_minor);
        let inode = stat.stx_ino;
        (Identity { device, inode }, u32::from(stat.stx_mode))
    })
}

/// Size of a file, as stat(2) gives it: the kernel asks where what it knows is too old.
pub(crate) fn file_size(fd: c_int) -> Option<u64> {
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_SYNC_AS_STAT;
    with_statx(fd, c"", libc::STATX_SIZE, flags, |stat| stat.stx_size)
}

/// Makes the kernel ask how long the file is: O_APPEND, sendfile(2), splice(2) and mappings go by what it
/// knows, and it has not seen writes by direct access.
pub(crate) fn refresh_size(fd: c_int) {
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_FORCE_SYNC;
    with_statx(fd, c"", libc::STATX_SIZE, flags, |_| ());
}

/// statx(2); what `then` takes of the answer is all that is copied of it.
#[inline(never)]
pub(crate) fn with_statx<T>(
    dir: c_int,
    path: &CStr,
    mask: u32,
    flags: c_int,
    then: impl FnOnce(&libc::statx) -> T,
) -> Option<T> {
    let mut stat = MaybeUninit::<libc::statx>::uninit();
    let path = path.as_ptr();
    // SAFETY: the kernel reads the path and fills one structure, ours.
    let result = unsafe { syscall!(libc::SYS_statx, dir, path, flags, mask, stat.as_mut_ptr()) };
    // SAFETY: statx(2) succeeded, so the kernel filled the structure.
    (result == 0).then(|| then(unsafe { stat.assume_init_ref() }))
}

/// Identity of a descriptor of the library's own, which is no file of a mount; `None` where no descriptor has that number.
pub(crate) fn own_identity(fd: c_int) -> Option<Identity> {
    identity(fd).map(|(identity, _)| identity)
}

/// Whether a resource has no limit.
pub(crate) fn is_unlimited(resource: Resource) -> bool {
    limit_of(resource).is_none()
}

/// The limit of a resource; `None`: it has none.
pub(crate) fn limit_of(resource: Resource) -> Option<u64> {
    rustix::process::getrlimit(resource).current
}

/// Whether this process can have `count` more descriptors now; EMFILE or ENFILE where it cannot.
pub(crate) fn check_descriptors_left(count: usize) -> Result<(), c_int> {
    if count == 0 {
        return Ok(());
    }
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let opened = rustix::fs::openat(CWD, c"/", flags, Mode::empty()).map(Descriptor::from);
    match opened {
        Err(errno @ (Errno::MFILE | Errno::NFILE)) => Err(errno.raw_os_error()),
        _ => check_descriptors_left(count - 1),
    }
}

/// Sends this thread a signal.
pub(crate) fn raise_signal(signal: c_int) {
    let process = pid();
    let thread = rustix::thread::gettid().as_raw_pid();
    // SAFETY: three numbers; the signal goes to this thread, whose program asked for it by its limit.
    unsafe { syscall!(libc::SYS_tgkill, process, thread, signal) };
}

/// CLOCK_MONOTONIC_COARSE in nanoseconds, without a trip to the kernel: late by its tick, [`COARSE_TICK_NS`] at most.
pub(crate) fn coarse_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: fills one structure, ours. The C library asks the vDSO; errno is set only for a clock that is none.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) };
    (time.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(time.tv_nsec as u64)
}

/// The longest tick of the kernel (CONFIG_HZ=100).
pub(crate) const COARSE_TICK_NS: u64 = 10_000_000;

/// Sleeps, or a signal ends it earlier.
pub(crate) fn sleep_ms(ms: u32) {
    let time = rustix::thread::Timespec {
        tv_sec: i64::from(ms / 1000),
        tv_nsec: i64::from(ms % 1000) * 1_000_000,
    };
    let _ = rustix::thread::nanosleep(&time);
}

/// Waits until the word differs from `expected`, or another thread wakes it.
pub(crate) fn futex_wait(word: *const u32, expected: u32) {
    let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the kernel only reads the word, which lies in a lock that is never freed.
    unsafe { syscall!(libc::SYS_futex, word, op, expected, 0usize) };
}

/// Wakes one waiting thread.
pub(crate) fn futex_wake(word: *const u32) {
    let op = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the address is a key to the kernel here, which neither reads nor writes the word.
    unsafe { syscall!(libc::SYS_futex, word, op, 1usize) };
}

/// write(2) to standard error.
pub(crate) fn write_stderr(text: &[u8]) {
    // SAFETY: the kernel reads as many bytes as the slice has.
    unsafe { syscall!(libc::SYS_write, 2usize, text.as_ptr(), text.len()) };
}

/// Does something while this thread takes no signals.
pub(crate) fn without_signals(then: impl FnOnce()) {
    let all = u64::MAX;
    let mut before = 0u64;
    let how = libc::SIG_BLOCK;
    // SAFETY: both sets are ours, of the kernel's size.
    unsafe {
        syscall!(
            libc::SYS_rt_sigprocmask,
            how,
            &raw const all,
            &raw mut before,
            8usize
        )
    };
    then();
    let how = libc::SIG_SETMASK;
    // SAFETY: the set that was there before, of the kernel's size.
    unsafe {
        syscall!(
            libc::SYS_rt_sigprocmask,
            how,
            &raw const before,
            0usize,
            8usize
        )
    };
}
