//! The *real* functions: those of the C library, which the hooks replace for the program and call themselves.
//!
//! A program may call a hook before [`crate::start`] has run: a replacement of malloc may open and read files in its
//! own constructor. So each real function is at first a *fallback* that makes the system call itself. A function that
//! is more than a system call is looked up if it is called so early.

use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{FILE, iovec, mode_t, msghdr, off64_t, pid_t, size_t, ssize_t};

use crate::sys::{syscall, with_errno};

/// A function of the C library, or of a library that is preloaded after this one.
#[repr(C)]
pub(crate) struct Real<F> {
    /// Address of the function. It is the first field, because hooks of variadic functions jump to the address that
    /// they read there.
    address: AtomicPtr<c_void>,
    name: &'static CStr,
    kind: PhantomData<F>,
}

impl<F: Copy> Real<F> {
    const fn new(name: &'static CStr, fallback: *const ()) -> Self {
        Self {
            address: AtomicPtr::new(fallback.cast_mut().cast()),
            name,
            kind: PhantomData,
        }
    }

    /// Returns the function.
    #[inline(always)]
    pub(crate) fn get(&self) -> F {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let address = self.address.load(Ordering::Relaxed);
        // SAFETY: `reals!` makes each `Real` with a function pointer type and with addresses of functions of that type.
        unsafe { std::mem::transmute_copy(&address) }
    }

    /// Looks the function up. Returns whether it exists; if not, the fallback stays.
    fn resolve(&self) -> bool {
        // SAFETY: the name is a C string.
        let mut address = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        if address.is_null()
            && let Some(plain_name) = without_64(self.name, &mut [0; NAME_BYTES])
        {
            // SAFETY: the name is a C string.
            address = unsafe { libc::dlsym(libc::RTLD_NEXT, plain_name.as_ptr()) };
        }
        let exists = !address.is_null();
        if exists {
            self.address.store(address, Ordering::Relaxed);
        }
        exists
    }
}

/// Bytes of a buffer for the longest name, with its zero byte.
const NAME_BYTES: usize = 32;

/// Returns a name without `64`, as musl has it, whose offsets always have 64 bits. Returns `None` for a name without
/// `64`.
fn without_64<'a>(name: &CStr, buffer: &'a mut [u8; NAME_BYTES]) -> Option<&'a CStr> {
    let name = name.to_bytes();
    let digits = b"64";
    let start = name.windows(digits.len()).position(|part| part == digits)?;
    let removed = start..start + digits.len();
    let letters = name
        .iter()
        .enumerate()
        .filter(|(index, _)| !removed.contains(index));
    for (buffer_byte, (_, letter)) in buffer.iter_mut().zip(letters) {
        *buffer_byte = *letter;
    }
    CStr::from_bytes_until_nul(buffer).ok()
}

macro_rules! reals {
    ($($name:ident = $symbol:literal ($($arg:ident: $ty:ty),*) -> $ret:ty, $fallback:expr;)*) => {
        $(pub(crate) static $name: Real<unsafe extern "C" fn($($ty),*) -> $ret> = {
            unsafe extern "C" fn fallback($($arg: $ty),*) -> $ret {
                // SAFETY: these are the program's arguments for this function or system call.
                unsafe { $fallback }
            }
            Real::new($symbol, fallback as *const ())
        };)*

        /// Looks up all real functions.
        pub(crate) fn resolve() {
            $($name.resolve();)*
        }
    };
}

/// Looks up a function now and calls it. If it does not exist, errno is set to ENOSYS.
macro_rules! late {
    ($name:ident($($arg:ident),*), $none:expr) => {
        if $name.resolve() {
            $name.get()($($arg),*)
        } else {
            with_errno(-(libc::ENOSYS as isize));
            $none
        }
    };
}

const SYS_FSTATAT: libc::c_long = libc::SYS_newfstatat;

type Spawn = *const c_void;
type Strings = *const *const c_char;

reals! {
    OPENAT = c"openat64" (dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int,
        with_errno(syscall!(libc::SYS_openat, dir, path, flags, mode)) as c_int;
    OPEN = c"open64" (path: *const c_char, flags: c_int, mode: mode_t) -> c_int,
        with_errno(syscall!(libc::SYS_openat, libc::AT_FDCWD, path, flags, mode)) as c_int;
    OPEN_2 = c"__open64_2" (path: *const c_char, flags: c_int) -> c_int,
        with_errno(syscall!(libc::SYS_openat, libc::AT_FDCWD, path, flags, 0usize)) as c_int;
    OPENAT_2 = c"__openat64_2" (dir: c_int, path: *const c_char, flags: c_int) -> c_int,
        with_errno(syscall!(libc::SYS_openat, dir, path, flags, 0usize)) as c_int;
    CREAT = c"creat64" (path: *const c_char, mode: mode_t) -> c_int,
        with_errno(syscall!(libc::SYS_openat, libc::AT_FDCWD, path, libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC, mode))
            as c_int;
    MKOSTEMPS = c"mkostemps64" (template: *mut c_char, suffix: c_int, flags: c_int) -> c_int,
        late!(MKOSTEMPS(template, suffix, flags), -1);

    READ = c"read" (fd: c_int, data: *mut c_void, len: size_t) -> ssize_t,
        with_errno(syscall!(libc::SYS_read, fd, data, len));
    READV = c"readv" (fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t,
        with_errno(syscall!(libc::SYS_readv, fd, vectors, count));
    PREAD = c"pread64" (fd: c_int, data: *mut c_void, len: size_t, offset: off64_t) -> ssize_t,
        with_errno(syscall!(libc::SYS_pread64, fd, data, len, offset));
    PREADV = c"preadv64" (fd: c_int, vectors: *const iovec, count: c_int, offset: off64_t) -> ssize_t,
        with_errno(syscall!(libc::SYS_preadv, fd, vectors, count, offset, 0usize));
    PREADV2 = c"preadv64v2" (fd: c_int, vectors: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t,
        with_errno(syscall!(libc::SYS_preadv2, fd, vectors, count, offset, 0usize, flags));
    READ_CHK = c"__read_chk" (fd: c_int, data: *mut c_void, len: size_t, size: size_t) -> ssize_t,
        late!(READ_CHK(fd, data, len, size), -1);
    PREAD_CHK = c"__pread64_chk"
        (fd: c_int, data: *mut c_void, len: size_t, offset: off64_t, size: size_t) -> ssize_t,
        late!(PREAD_CHK(fd, data, len, offset, size), -1);
    WRITE = c"write" (fd: c_int, data: *const c_void, len: size_t) -> ssize_t,
        with_errno(syscall!(libc::SYS_write, fd, data, len));
    WRITEV = c"writev" (fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t,
        with_errno(syscall!(libc::SYS_writev, fd, vectors, count));
    PWRITE = c"pwrite64" (fd: c_int, data: *const c_void, len: size_t, offset: off64_t) -> ssize_t,
        with_errno(syscall!(libc::SYS_pwrite64, fd, data, len, offset));
    PWRITEV = c"pwritev64" (fd: c_int, vectors: *const iovec, count: c_int, offset: off64_t) -> ssize_t,
        with_errno(syscall!(libc::SYS_pwritev, fd, vectors, count, offset, 0usize));
    PWRITEV2 = c"pwritev64v2"
        (fd: c_int, vectors: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t,
        with_errno(syscall!(libc::SYS_pwritev2, fd, vectors, count, offset, 0usize, flags));
    LSEEK = c"lseek64" (fd: c_int, offset: off64_t, whence: c_int) -> off64_t,
        with_errno(syscall!(libc::SYS_lseek, fd, offset, whence)) as off64_t;
    SENDFILE = c"sendfile64" (to: c_int, from: c_int, offset: *mut off64_t, len: size_t) -> ssize_t,
        with_errno(syscall!(libc::SYS_sendfile, to, from, offset, len));
    COPY_FILE_RANGE = c"copy_file_range"
        (from: c_int, from_at: *mut off64_t, to: c_int, to_at: *mut off64_t, len: size_t, flags: c_uint) -> ssize_t,
        with_errno(syscall!(libc::SYS_copy_file_range, from, from_at, to, to_at, len, flags));
    SPLICE = c"splice"
        (from: c_int, from_at: *mut off64_t, to: c_int, to_at: *mut off64_t, len: size_t, flags: c_uint) -> ssize_t,
        with_errno(syscall!(libc::SYS_splice, from, from_at, to, to_at, len, flags));
    MMAP = c"mmap64"
        (address: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, offset: off64_t) -> *mut c_void,
        with_errno(syscall!(libc::SYS_mmap, address, len, prot, flags, fd, offset)) as *mut c_void;
    MUNMAP = c"munmap" (address: *mut c_void, len: size_t) -> c_int,
        with_errno(syscall!(libc::SYS_munmap, address, len)) as c_int;
    MPROTECT = c"mprotect" (address: *mut c_void, len: size_t, prot: c_int) -> c_int,
        with_errno(syscall!(libc::SYS_mprotect, address, len, prot)) as c_int;
    MREMAP = c"mremap"
        (address: *mut c_void, len: size_t, to_len: size_t, flags: c_int, to: *mut c_void) -> *mut c_void,
        with_errno(syscall!(libc::SYS_mremap, address, len, to_len, flags, to)) as *mut c_void;

    CLOSE = c"close" (fd: c_int) -> c_int, with_errno(syscall!(libc::SYS_close, fd)) as c_int;
    DUP = c"dup" (fd: c_int) -> c_int, with_errno(syscall!(libc::SYS_dup, fd)) as c_int;
    DUP2 = c"dup2" (from: c_int, to: c_int) -> c_int, with_errno(raw_dup2(from, to)) as c_int;
    DUP3 = c"dup3" (from: c_int, to: c_int, flags: c_int) -> c_int,
        with_errno(syscall!(libc::SYS_dup3, from, to, flags)) as c_int;
    FCNTL = c"fcntl64" (fd: c_int, command: c_int, arg: usize) -> c_int,
        with_errno(syscall!(libc::SYS_fcntl, fd, command, arg)) as c_int;
    FLOCK = c"flock" (fd: c_int, operation: c_int) -> c_int,
        with_errno(syscall!(libc::SYS_flock, fd, operation)) as c_int;
    LOCKF = c"lockf64" (fd: c_int, command: c_int, len: off64_t) -> c_int, late!(LOCKF(fd, command, len), -1);
    IOCTL = c"ioctl" (fd: c_int, request: c_ulong, arg: usize) -> c_int,
        with_errno(syscall!(libc::SYS_ioctl, fd, request, arg)) as c_int;
    CLOSE_RANGE = c"close_range" (first: c_uint, last: c_uint, flags: c_int) -> c_int,
        with_errno(syscall!(libc::SYS_close_range, first, last, flags)) as c_int;
    CLOSEFROM = c"closefrom" (first: c_int) -> (),
        { syscall!(libc::SYS_close_range, first.max(0), c_uint::MAX, 0usize); };
    SENDMSG = c"sendmsg" (socket: c_int, message: *const msghdr, flags: c_int) -> ssize_t,
        with_errno(syscall!(libc::SYS_sendmsg, socket, message, flags));
    SENDMMSG = c"sendmmsg" (socket: c_int, messages: *mut libc::mmsghdr, count: c_uint, flags: c_int) -> c_int,
        with_errno(syscall!(libc::SYS_sendmmsg, socket, messages, count, flags)) as c_int;

    SYSCALL = c"syscall"
        (number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long,
        with_errno(firn_direct::syscall::call(number, [a, b, c, d, e, f])) as c_long;

    STAT = c"stat64" (path: *const c_char, to: *mut libc::stat64) -> c_int,
        with_errno(syscall!(SYS_FSTATAT, libc::AT_FDCWD, path, to, 0usize)) as c_int;
    LSTAT = c"lstat64" (path: *const c_char, to: *mut libc::stat64) -> c_int,
        with_errno(syscall!(SYS_FSTATAT, libc::AT_FDCWD, path, to, libc::AT_SYMLINK_NOFOLLOW)) as c_int;
    FSTAT = c"fstat64" (fd: c_int, to: *mut libc::stat64) -> c_int,
        with_errno(syscall!(libc::SYS_fstat, fd, to)) as c_int;
    FSTATAT = c"fstatat64" (dir: c_int, path: *const c_char, to: *mut libc::stat64, flags: c_int) -> c_int,
        with_errno(syscall!(SYS_FSTATAT, dir, path, to, flags)) as c_int;
    // Functions of the C library before 2.33. Their first argument is always the version of the kernel's structure.
    XSTAT = c"__xstat64" (_version: c_int, path: *const c_char, to: *mut libc::stat64) -> c_int,
        with_errno(syscall!(SYS_FSTATAT, libc::AT_FDCWD, path, to, 0usize)) as c_int;
    LXSTAT = c"__lxstat64" (_version: c_int, path: *const c_char, to: *mut libc::stat64) -> c_int,
        with_errno(syscall!(SYS_FSTATAT, libc::AT_FDCWD, path, to, libc::AT_SYMLINK_NOFOLLOW)) as c_int;
    FXSTAT = c"__fxstat64" (_version: c_int, fd: c_int, to: *mut libc::stat64) -> c_int,
        with_errno(syscall!(libc::SYS_fstat, fd, to)) as c_int;
    FXSTATAT = c"__fxstatat64"
        (_version: c_int, dir: c_int, path: *const c_char, to: *mut libc::stat64, flags: c_int) -> c_int,
        with_errno(syscall!(SYS_FSTATAT, dir, path, to, flags)) as c_int;
    STATX = c"statx" (dir: c_int, path: *const c_char, flags: c_int, mask: u32, to: *mut libc::statx) -> c_int,
        with_errno(syscall!(libc::SYS_statx, dir, path, flags, mask, to)) as c_int;

    FTRUNCATE = c"ftruncate64" (fd: c_int, size: off64_t) -> c_int,
        with_errno(syscall!(libc::SYS_ftruncate, fd, size)) as c_int;
    TRUNCATE = c"truncate64" (path: *const c_char, size: off64_t) -> c_int,
        with_errno(syscall!(libc::SYS_truncate, path, size)) as c_int;
    FALLOCATE = c"fallocate64" (fd: c_int, mode: c_int, offset: off64_t, len: off64_t) -> c_int,
        with_errno(syscall!(libc::SYS_fallocate, fd, mode, offset, len)) as c_int;
    POSIX_FALLOCATE = c"posix_fallocate64" (fd: c_int, offset: off64_t, len: off64_t) -> c_int,
        late!(POSIX_FALLOCATE(fd, offset, len), libc::ENOSYS);
    FSYNC = c"fsync" (fd: c_int) -> c_int, with_errno(syscall!(libc::SYS_fsync, fd)) as c_int;
    FDATASYNC = c"fdatasync" (fd: c_int) -> c_int, with_errno(syscall!(libc::SYS_fdatasync, fd)) as c_int;
    SYNC_FILE_RANGE = c"sync_file_range" (fd: c_int, offset: off64_t, len: off64_t, flags: c_uint) -> c_int,
        with_errno(syscall!(libc::SYS_sync_file_range, fd, offset, len, flags)) as c_int;
    FUTIMENS = c"futimens" (fd: c_int, times: *const libc::timespec) -> c_int,
        with_errno(syscall!(libc::SYS_utimensat, fd, 0usize, times, 0usize)) as c_int;
    UTIMENSAT = c"utimensat"
        (dir: c_int, path: *const c_char, times: *const libc::timespec, flags: c_int) -> c_int,
        with_errno(syscall!(libc::SYS_utimensat, dir, path, times, flags)) as c_int;
    FUTIMES = c"futimes" (fd: c_int, times: *const libc::timeval) -> c_int, late!(FUTIMES(fd, times), -1);
    FUTIMESAT = c"futimesat" (dir: c_int, path: *const c_char, times: *const libc::timeval) -> c_int,
        late!(FUTIMESAT(dir, path, times), -1);
    UTIMES = c"utimes" (path: *const c_char, times: *const libc::timeval) -> c_int,
        late!(UTIMES(path, times), -1);
    LUTIMES = c"lutimes" (path: *const c_char, times: *const libc::timeval) -> c_int,
        late!(LUTIMES(path, times), -1);
    UTIME = c"utime" (path: *const c_char, times: *const libc::utimbuf) -> c_int,
        late!(UTIME(path, times), -1);

    AIO_READ = c"aio_read64" (control: *mut libc::aiocb) -> c_int, late!(AIO_READ(control), -1);
    AIO_WRITE = c"aio_write64" (control: *mut libc::aiocb) -> c_int, late!(AIO_WRITE(control), -1);
    AIO_FSYNC = c"aio_fsync64" (op: c_int, control: *mut libc::aiocb) -> c_int,
        late!(AIO_FSYNC(op, control), -1);
    LIO_LISTIO = c"lio_listio64"
        (mode: c_int, list: *const *mut libc::aiocb, count: c_int, event: *mut libc::sigevent) -> c_int,
        late!(LIO_LISTIO(mode, list, count, event), -1);

    FOPEN = c"fopen64" (path: *const c_char, mode: *const c_char) -> *mut FILE,
        late!(FOPEN(path, mode), std::ptr::null_mut());
    FREOPEN = c"freopen64" (path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE,
        late!(FREOPEN(path, mode, file), std::ptr::null_mut());
    FDOPEN = c"fdopen" (fd: c_int, mode: *const c_char) -> *mut FILE,
        late!(FDOPEN(fd, mode), std::ptr::null_mut());
    VDPRINTF = c"vdprintf" (fd: c_int, format: *const c_char, arguments: *mut c_void) -> c_int,
        late!(VDPRINTF(fd, format, arguments), -1);
    VDPRINTF_CHK = c"__vdprintf_chk"
        (fd: c_int, flag: c_int, format: *const c_char, arguments: *mut c_void) -> c_int,
        late!(VDPRINTF_CHK(fd, flag, format, arguments), -1);
    BACKTRACE_SYMBOLS_FD = c"backtrace_symbols_fd" (addresses: *const *mut c_void, count: c_int, fd: c_int) -> (),
        late!(BACKTRACE_SYMBOLS_FD(addresses, count, fd), ());
    FCLOSE = c"fclose" (file: *mut FILE) -> c_int, late!(FCLOSE(file), libc::EOF);

    FORK_ONLY = c"_Fork" () -> pid_t, late!(FORK_ONLY(), -1);
    EXECVE = c"execve" (path: *const c_char, argv: Strings, envp: Strings) -> c_int,
        with_errno(syscall!(libc::SYS_execve, path, argv, envp)) as c_int;
    EXECV = c"execv" (path: *const c_char, argv: Strings) -> c_int, late!(EXECV(path, argv), -1);
    EXECVP = c"execvp" (path: *const c_char, argv: Strings) -> c_int, late!(EXECVP(path, argv), -1);
    EXECVPE = c"execvpe" (path: *const c_char, argv: Strings, envp: Strings) -> c_int,
        late!(EXECVPE(path, argv, envp), -1);
    FEXECVE = c"fexecve" (fd: c_int, argv: Strings, envp: Strings) -> c_int,
        late!(FEXECVE(fd, argv, envp), -1);
    EXECVEAT = c"execveat"
        (dir: c_int, path: *const c_char, argv: Strings, envp: Strings, flags: c_int) -> c_int,
        with_errno(syscall!(libc::SYS_execveat, dir, path, argv, envp, flags)) as c_int;
    POSIX_SPAWN = c"posix_spawn"
        (pid: *mut pid_t, path: *const c_char, actions: Spawn, attr: Spawn, argv: Strings, envp: Strings) -> c_int,
        late!(POSIX_SPAWN(pid, path, actions, attr, argv, envp), libc::ENOSYS);
    POSIX_SPAWNP = c"posix_spawnp"
        (pid: *mut pid_t, path: *const c_char, actions: Spawn, attr: Spawn, argv: Strings, envp: Strings) -> c_int,
        late!(POSIX_SPAWNP(pid, path, actions, attr, argv, envp), libc::ENOSYS);
    // Functions of the C library since 2.39.
    PIDFD_SPAWN = c"pidfd_spawn"
        (pidfd: *mut c_int, path: *const c_char, actions: Spawn, attr: Spawn, argv: Strings, envp: Strings) -> c_int,
        late!(PIDFD_SPAWN(pidfd, path, actions, attr, argv, envp), libc::ENOSYS);
    PIDFD_SPAWNP = c"pidfd_spawnp"
        (pidfd: *mut c_int, path: *const c_char, actions: Spawn, attr: Spawn, argv: Strings, envp: Strings) -> c_int,
        late!(PIDFD_SPAWNP(pidfd, path, actions, attr, argv, envp), libc::ENOSYS);
    WORDEXP = c"wordexp" (words: *const c_char, to: *mut c_void, flags: c_int) -> c_int,
        late!(WORDEXP(words, to, flags), libc::ENOSYS);
    SYSTEM = c"system" (command: *const c_char) -> c_int, late!(SYSTEM(command), -1);
    POPEN = c"popen" (command: *const c_char, mode: *const c_char) -> *mut FILE,
        late!(POPEN(command, mode), std::ptr::null_mut());
    // Variadic functions. Hooks jump to them with the program's arguments.
    EXECL = c"execl" () -> c_int, no_such_function();
    EXECLP = c"execlp" () -> c_int, no_such_function();
    EXECLE = c"execle" () -> c_int, no_such_function();
    CLONE = c"clone" () -> c_int, no_such_function();
}

/// Fails as a function that does not exist.
///
/// # Safety
/// It is always safe. It is unsafe only to have the type of other fallbacks.
unsafe fn no_such_function() -> c_int {
    with_errno(-(libc::ENOSYS as isize)) as c_int
}

/// dup2(2) by dup3(2), because AArch64 does not have the former.
///
/// # Safety
/// It is always safe. It is unsafe only to have the type of other fallbacks.
unsafe fn raw_dup2(from: c_int, to: c_int) -> isize {
    // SAFETY: the arguments are numbers. The program wants dup2(2) to close the descriptor `to`.
    unsafe {
        if from == to {
            let flags = syscall!(libc::SYS_fcntl, from, libc::F_GETFD);
            return if flags < 0 { flags } else { to as isize };
        }
        syscall!(libc::SYS_dup3, from, to, 0usize)
    }
}
