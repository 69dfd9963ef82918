//! Counts calls by direct access to the shared memory, and other calls, for the report of `FIRN_PRELOAD_REPORT=1`.
//!
//! The shared memory of a mount is its *arena*. firnd, which serves the mount, grants direct access. A *lease* is the
//! right to write into a range of the arena.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::wiped::Wiped;

/// Whether calls are counted. It is set once, at the start.
static WANTED: AtomicBool = AtomicBool::new(false);

/// Defines an enum whose variants are indexes of counters, the texts of the variants in the report, and their number.
macro_rules! counted {
    (
        $(#[$doc:meta])*
        enum $name:ident, texts $texts:ident, count $count:ident {
            $($variant:ident = $text:literal,)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) enum $name { $($variant),* }
        const $texts: &[&str] = &[$($text),*];
        const $count: usize = $texts.len();
    };
}

counted! {
    /// A call on a descriptor that the library serves.
    enum Call, texts CALL_TEXTS, count CALL_COUNT {
        Write = "write",
        Writev = "writev",
        Pwrite = "pwrite",
        Pwritev = "pwritev",
        Read = "read",
        Readv = "readv",
        Pread = "pread",
        Preadv = "preadv",
        Lseek = "lseek",
        Transfer = "sendfile, splice, copy_file_range",
    }
}

counted! {
    /// Why a descriptor is left to the kernel.
    enum Reason, texts REASON_TEXTS, count REASON_COUNT {
        Flags = "opened with O_APPEND, O_SYNC, O_DIRECT or a file size limit",
        Stdio = "opened by stdio",
        NoConnection = "no connection to firnd",
        Refused = "firnd refused direct access for now",
        NoRoom = "no room in the arena",
        Revoked = "firnd revoked the lease",
        Read = "read while open for writing",
        Shared = "shared by dup, fork, exec, mmap or SCM_RIGHTS",
        NoExtents = "no bytes of the file in the arena",
        Changed = "the file changed while it was read",
    }
}

counted! {
    /// A file, directory or process under a name of Firn that belongs to another user or that others may change.
    enum Distrust, texts DISTRUST_TEXTS, count DISTRUST_COUNT {
        Directory = "the runtime directory is not a directory that belongs to you and is closed to others",
        File = "a file in the runtime directory is not one that only you may change",
        Peer = "another user's process listens on the socket of firnd",
        Relative = "FIRN_RUNTIME_DIR is not an absolute path of at most 85 bytes",
    }
}

/// Counters of the process.
struct Counters {
    /// Calls by direct access.
    direct: [AtomicU64; CALL_COUNT],
    /// Bytes of these calls.
    bytes: [AtomicU64; CALL_COUNT],
    /// Calls served by the kernel, or by firnd over the data socket.
    kernel: [AtomicU64; CALL_COUNT],
    /// Bytes of direct reads that came from files of the backing.
    backing_bytes: AtomicU64,
    /// Descriptors left to the kernel.
    left: [AtomicU64; REASON_COUNT],
    distrusted: [AtomicU64; DISTRUST_COUNT],
}

// SAFETY: zeros are valid counters.
static COUNTERS: Wiped<Counters> = unsafe {
    Wiped::new(Counters {
        direct: [const { AtomicU64::new(0) }; CALL_COUNT],
        bytes: [const { AtomicU64::new(0) }; CALL_COUNT],
        kernel: [const { AtomicU64::new(0) }; CALL_COUNT],
        backing_bytes: AtomicU64::new(0),
        left: [const { AtomicU64::new(0) }; REASON_COUNT],
        distrusted: [const { AtomicU64::new(0) }; DISTRUST_COUNT],
    })
};

/// Makes children of fork(2) count from 0. Returns false if the kernel does not support that.
pub(crate) fn wipe_on_fork() -> bool {
    COUNTERS.wipe_on_fork()
}

/// Begins to count calls, so that the report is printed at exit.
pub(crate) fn count_calls() {
    WANTED.store(true, Ordering::Relaxed);
}

/// Counts a call by direct access.
#[inline(always)]
pub(crate) fn count_direct(call: Call, bytes: usize) {
    if WANTED.load(Ordering::Relaxed) {
        add(&COUNTERS.direct, call as usize, 1);
        add(&COUNTERS.bytes, call as usize, bytes as u64);
    }
}

/// Counts bytes that a direct read got from a file of the backing.
#[inline(always)]
pub(crate) fn count_backing(bytes: usize) {
    if WANTED.load(Ordering::Relaxed) {
        COUNTERS
            .backing_bytes
            .fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Counts a call that went to the kernel, or to firnd over the data socket.
#[inline(always)]
pub(crate) fn count_kernel(call: Call) {
    if WANTED.load(Ordering::Relaxed) {
        add(&COUNTERS.kernel, call as usize, 1);
    }
}

/// Counts a descriptor that was left to the kernel.
pub(crate) fn count_left(reason: Reason) {
    if WANTED.load(Ordering::Relaxed) {
        add(&COUNTERS.left, reason as usize, 1);
    }
}

/// Counts a file, directory or process that is not trusted.
pub(crate) fn count_distrusted(reason: Distrust) {
    if WANTED.load(Ordering::Relaxed) {
        add(&COUNTERS.distrusted, reason as usize, 1);
    }
}

fn add(counters: &[AtomicU64], index: usize, more: u64) {
    if let Some(counter) = counters.get(index) {
        counter.fetch_add(more, Ordering::Relaxed);
    }
}

/// Passes the lines of the report to `print_line`, if a report is wanted and was not printed yet.
pub(crate) fn print_report_once(print_line: impl Fn(std::fmt::Arguments<'_>)) {
    if !WANTED.swap(false, Ordering::Relaxed) {
        return;
    }
    for (index, call_name) in CALL_TEXTS.iter().enumerate() {
        let direct = load_counter(&COUNTERS.direct, index);
        let kernel = load_counter(&COUNTERS.kernel, index);
        let bytes = load_counter(&COUNTERS.bytes, index);
        if direct + kernel > 0 {
            print_line(format_args!(
                "{call_name}: {direct} by direct access ({bytes} bytes), {kernel} otherwise"
            ));
        }
    }
    let backing_bytes = COUNTERS.backing_bytes.load(Ordering::Relaxed);
    if backing_bytes > 0 {
        print_line(format_args!(
            "{backing_bytes} bytes were read from files of the backing"
        ));
    }
    for (index, reason) in REASON_TEXTS.iter().enumerate() {
        let count = load_counter(&COUNTERS.left, index);
        if count > 0 {
            print_line(format_args!(
                "left a descriptor to the kernel {count} times: {reason}"
            ));
        }
    }
    for (index, reason) in DISTRUST_TEXTS.iter().enumerate() {
        let count = load_counter(&COUNTERS.distrusted, index);
        if count > 0 {
            print_line(format_args!("not trusted {count} times: {reason}"));
        }
    }
}

fn load_counter(counters: &[AtomicU64], index: usize) -> u64 {
    let counter = counters.get(index);
    counter.map_or(0, |counter| counter.load(Ordering::Relaxed))
}
