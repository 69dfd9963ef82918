//! System calls that bypass the C library, so that they reach no hook of this library, set no errno and are no
//! cancellation points.
//!
//! A negative result is `-errno`. Pointers of the program are passed to the kernel, which checks them.

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

/// Borrows a descriptor of the program. Returns `None` for a negative number.
pub(crate) fn borrow(fd: c_int) -> Option<BorrowedFd<'static>> {
    // SAFETY: the number is not -1. If the program closes the descriptor meanwhile, a system call fails or uses the
    // file that has the number then, as it does without the library.
    (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Returns the number of the CPU on which this thread runs, plus one; 0 if the kernel does not report it.
pub(crate) fn current_cpu() -> u32 {
    let mut cpu = 0u32;
    let none = std::ptr::null_mut::<c_void>();
    // SAFETY: the kernel writes one word, which is a local variable.
    let result = unsafe { syscall!(libc::SYS_getcpu, &raw mut cpu, none, none) };
    if result == 0 { cpu.wrapping_add(1) } else { 0 }
}

/// Returns an even number that identifies this thread within the process. A child of vfork(2) has the number of the
/// thread that waits for it.
#[inline(always)]
pub(crate) fn thread_pointer() -> u64 {
    let pointer: u64;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the first word of the thread's control block is its own address (x86-64 psABI).
    unsafe {
        asm!("mov {}, fs:0", out(reg) pointer, options(nostack, preserves_flags, readonly, pure));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the instruction reads a register that each program may read, and changes nothing else.
    unsafe {
        asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, preserves_flags, nomem, pure));
    }
    pointer
}

/// Adds to a word that only this thread and its signal handlers change. Returns the value before.
///
/// It is one instruction, so a handler does not interrupt it. Without the lock prefix, which other threads would need,
/// it is 4 ns faster.
#[inline(always)]
pub(crate) fn add_to_word(word: &AtomicU64, more: u64) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        let mut before = more;
        // SAFETY: the instruction changes only the word.
        unsafe {
            asm!("xadd qword ptr [{word}], {before}", word = in(reg) word.as_ptr(),
                before = inout(reg) before, options(nostack));
        }
        before
    }
    #[cfg(not(target_arch = "x86_64"))]
    word.fetch_add(more, Ordering::Relaxed)
}

/// Sets errno, and returns the -1 by which a function of the C library reports an error.
pub(crate) fn fail<T: From<i8>>(errno: c_int) -> T {
    with_errno(-(errno as isize));
    T::from(-1)
}

/// Turns the result of a system call into that of the C library's function: an error sets errno and returns -1.
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
    // SAFETY: a caller closes a descriptor that it has opened itself, or that the program closes.
    unsafe { syscall!(libc::SYS_close, fd) };
}

/// lseek(2).
pub(crate) fn lseek(fd: c_int, offset: i64, whence: c_int) -> isize {
    // SAFETY: the arguments are numbers, so no memory of this process is touched.
    unsafe { syscall!(libc::SYS_lseek, fd, offset, whence) }
}

/// pwrite(2).
pub(crate) fn pwrite(fd: c_int, data: *const c_void, len: usize, offset: u64) -> isize {
    // SAFETY: the kernel reads the data, and returns EFAULT if it cannot.
    unsafe { syscall!(libc::SYS_pwrite64, fd, data, len, offset) }
}

/// pread(2).
///
/// # Safety
/// The program has passed `len` bytes at `data` to be written.
pub(crate) unsafe fn pread(fd: c_int, data: *mut c_void, len: usize, offset: u64) -> isize {
    // SAFETY: the kernel writes at most `len` bytes at `data`, as the program wants, or returns EFAULT.
    unsafe { syscall!(libc::SYS_pread64, fd, data, len, offset) }
}

/// fcntl(2) with a number.
pub(crate) fn fcntl(fd: c_int, command: c_int, arg: usize) -> isize {
    // SAFETY: callers use only commands that take a number and no address.
    unsafe { syscall!(libc::SYS_fcntl, fd, command, arg) }
}

/// Device and inode number, which identify the file of a descriptor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

/// Packs the two numbers of a device into one word.
pub(crate) fn device_number(major: u32, minor: u32) -> u64 {
    u64::from(major) << 32 | u64::from(minor)
}

/// Returns identity and mode of a descriptor, as the kernel knows them. The server of the file system is not asked.
pub(crate) fn identity(fd: c_int) -> Option<(Identity, u32)> {
    let (mask, sync) = (libc::STATX_TYPE | libc::STATX_INO, libc::AT_STATX_DONT_SYNC);
    with_statx(fd, c"", mask, libc::AT_EMPTY_PATH | sync, |stat| {
        let device = device_number(stat.stx_dev_major, stat.stx_dev_minor);
        let inode = stat.stx_ino;
        (Identity { device, inode }, u32::from(stat.stx_mode))
    })
}

/// Returns the size of a file, as stat(2) does. The server of the file system is asked if the kernel's size is too old.
pub(crate) fn file_size(fd: c_int) -> Option<u64> {
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_SYNC_AS_STAT;
    with_statx(fd, c"", libc::STATX_SIZE, flags, |stat| stat.stx_size)
}

/// Makes the kernel ask the server for the size of a file. O_APPEND, sendfile(2), splice(2) and mappings use the
/// kernel's size, and the kernel does not see writes by direct access.
pub(crate) fn refresh_size(fd: c_int) {
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_FORCE_SYNC;
    with_statx(fd, c"", libc::STATX_SIZE, flags, |_| ());
}

/// statx(2). Returns what `then` makes of the result, so that the large structure is not copied.
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
    // SAFETY: the kernel reads the path, and fills a structure that is a local variable.
    let result = unsafe { syscall!(libc::SYS_statx, dir, path, flags, mask, stat.as_mut_ptr()) };
    // SAFETY: statx(2) has succeeded, so the kernel has filled the structure.
    (result == 0).then(|| then(unsafe { stat.assume_init_ref() }))
}

/// Returns the identity of one of the library's own descriptors; `None` if the number is not open.
pub(crate) fn own_identity(fd: c_int) -> Option<Identity> {
    identity(fd).map(|(identity, _)| identity)
}

/// Whether a resource has no limit.
pub(crate) fn is_unlimited(resource: Resource) -> bool {
    limit_of(resource).is_none()
}

/// Returns the limit of a resource; `None` if it has none.
pub(crate) fn limit_of(resource: Resource) -> Option<u64> {
    rustix::process::getrlimit(resource).current
}

/// Checks whether this process can open `count` more descriptors now. The error is EMFILE or ENFILE.
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

/// Sends a signal to this thread.
pub(crate) fn raise_signal(signal: c_int) {
    let process = pid();
    let thread = rustix::thread::gettid().as_raw_pid();
    // SAFETY: the arguments are numbers. The signal goes to this thread, as its limit of file sizes demands.
    unsafe { syscall!(libc::SYS_tgkill, process, thread, signal) };
}

/// Returns CLOCK_MONOTONIC_COARSE in nanoseconds, which takes no system call. It is late by at most [`COARSE_TICK_NS`].
pub(crate) fn coarse_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call fills a local variable. The C library uses the vDSO, and sets errno only for an unknown clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) };
    (time.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(time.tv_nsec as u64)
}

/// Size of the kernel's set of signals.
const SIGNAL_SET_BYTES: usize = 8;

/// Length of the longest tick of the kernel (CONFIG_HZ=100).
pub(crate) const COARSE_TICK_NS: u64 = 10_000_000;

/// Sleeps for some milliseconds. A signal may end it earlier.
pub(crate) fn sleep_ms(ms: u32) {
    let time = rustix::thread::Timespec {
        tv_sec: i64::from(ms / 1000),
        tv_nsec: i64::from(ms % 1000) * 1_000_000,
    };
    // A signal may end the sleep early; each caller checks its condition again.
    let _ = rustix::thread::nanosleep(&time);
}

/// Waits while the word is `expected`, until another thread wakes this one.
pub(crate) fn futex_wait(word: *const u32, expected: u32) {
    let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the kernel only reads the word, which is in a lock that is never freed.
    unsafe { syscall!(libc::SYS_futex, word, op, expected, 0usize) };
}

/// Wakes one thread that waits for the word.
pub(crate) fn futex_wake(word: *const u32) {
    let op = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the kernel uses the address as a key only, and neither reads nor writes the word.
    unsafe { syscall!(libc::SYS_futex, word, op, 1usize) };
}

/// write(2) to standard error.
pub(crate) fn write_stderr(text: &[u8]) {
    // SAFETY: the kernel reads as many bytes as the slice has.
    unsafe { syscall!(libc::SYS_write, 2usize, text.as_ptr(), text.len()) };
}

/// Calls a function while all signals of this thread are blocked, so that no signal handler interrupts it.
pub(crate) fn without_signals(critical_section: impl FnOnce()) {
    let all_signals = u64::MAX;
    let mut old_mask = 0u64;
    let block = libc::SIG_BLOCK;
    // SAFETY: both sets are local variables of the kernel's size.
    unsafe {
        syscall!(
            libc::SYS_rt_sigprocmask,
            block,
            &raw const all_signals,
            &raw mut old_mask,
            SIGNAL_SET_BYTES
        )
    };
    critical_section();
    let restore = libc::SIG_SETMASK;
    // SAFETY: the set is a local variable of the kernel's size.
    unsafe {
        syscall!(
            libc::SYS_rt_sigprocmask,
            restore,
            &raw const old_mask,
            0usize,
            SIGNAL_SET_BYTES
        )
    };
}
