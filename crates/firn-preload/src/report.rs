//! What went past the kernel and what did not, by call: `FIRN_PRELOAD_REPORT=1`.

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::memory::Run;
use crate::stub;
use crate::sys;
use crate::table::{self, TABLE, tag};

/// Whether anything is counted: set once, at the start.
static WANTED: AtomicBool = AtomicBool::new(false);

macro_rules! named {
    ($(#[$doc:meta])* $name:ident, $count:ident, $names:ident: $($item:ident = $text:literal,)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) enum $name { $($item),* }
        const $names: &[&str] = &[$($text),*];
        const $count: usize = $names.len();
    };
}

named! {
    /// A call on a descriptor of a mount.
    Call, CALLS, CALL_NAMES:
    Write = "write", Writev = "writev", Pwrite = "pwrite", Pwritev = "pwritev",
    Read = "read", Readv = "readv", Pread = "pread", Preadv = "preadv",
    Lseek = "lseek", Transfer = "sendfile, splice, copy_file_range",
}

named! {
    /// Why a descriptor is left to the kernel.
    Reason, REASONS, REASON_NAMES:
    Flags = "opened with O_APPEND, O_SYNC, O_DIRECT or a file size limit",
    Stdio = "opened by stdio",
    NoConnection = "no connection to firnd",
    Refused = "firnd did not allow it now",
    NoRoom = "no room in the arena",
    Revoked = "firnd took the lease back",
    Read = "read while open for writing",
    Shared = "dup, fork, exec, mmap or SCM_RIGHTS",
    Nothing = "nothing of the file in the arena",
    Changed = "changed while it was read",
}

named! {
    /// What was found under a name of Firn's and is another user's, or open to others.
    Distrust, DISTRUSTS, DISTRUST_NAMES:
    Directory = "the runtime directory is not a directory that only you may enter",
    File = "a file in the runtime directory is not one that only you may change",
    Peer = "another user's process listens where firnd should",
    Relative = "FIRN_RUNTIME_DIR is not an absolute path of at most 85 bytes",
}

/// Counters of the process.
pub(crate) struct Counters {
    fast: [AtomicU64; CALLS],
    bytes: [AtomicU64; CALLS],
    kernel: [AtomicU64; CALLS],
    left: [AtomicU64; REASONS],
    distrusted: [AtomicU64; DISTRUSTS],
}

impl Counters {
    pub(crate) const fn new() -> Self {
        Self {
            fast: [const { AtomicU64::new(0) }; CALLS],
            bytes: [const { AtomicU64::new(0) }; CALLS],
            kernel: [const { AtomicU64::new(0) }; CALLS],
            left: [const { AtomicU64::new(0) }; REASONS],
            distrusted: [const { AtomicU64::new(0) }; DISTRUSTS],
        }
    }
}

/// From now on it is counted and printed at exit.
pub(crate) fn want() {
    WANTED.store(true, Ordering::Relaxed);
}

/// A call went past the kernel.
#[inline(always)]
pub(crate) fn fast(call: Call, bytes: usize) {
    if WANTED.load(Ordering::Relaxed) {
        add(&TABLE.counters.fast, call as usize, 1);
        add(&TABLE.counters.bytes, call as usize, bytes as u64);
    }
}

/// A call on a descriptor of a mount went to the kernel.
#[inline(always)]
pub(crate) fn kernel(call: Call) {
    if WANTED.load(Ordering::Relaxed) {
        add(&TABLE.counters.kernel, call as usize, 1);
    }
}

/// A descriptor was left to the kernel.
pub(crate) fn left(reason: Reason) {
    if WANTED.load(Ordering::Relaxed) {
        add(&TABLE.counters.left, reason as usize, 1);
    }
}

/// Something was not believed.
pub(crate) fn distrusted(what: Distrust) {
    if WANTED.load(Ordering::Relaxed) {
        add(&TABLE.counters.distrusted, what as usize, 1);
    }
}

fn add(counters: &[AtomicU64], index: usize, more: u64) {
    if let Some(counter) = counters.get(index) {
        counter.fetch_add(more, Ordering::Relaxed);
    }
}

/// A line on the stack; what does not fit is cut.
struct Line {
    bytes: [u8; 200],
    len: usize,
}

impl Write for Line {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        for (to, from) in self.bytes.iter_mut().skip(self.len).zip(text) {
            *to = *from;
            self.len += 1;
        }
        Ok(text.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// To standard error, also where that is a stub.
fn tell(text: &[u8]) {
    if table::tag_of(libc::STDERR_FILENO) == tag::STUB {
        Run::of_bytes(text)
            .as_memory(|source| stub::write(libc::STDERR_FILENO, source, None, false, Call::Write));
    } else {
        sys::say(text);
    }
}

/// Prints the report if it is wanted, once: at exit, or when the program closes standard error before.
pub(crate) fn print() {
    if !WANTED.swap(false, Ordering::Relaxed) {
        return;
    }
    let pid = sys::pid();
    let value = |counters: &[AtomicU64], index: usize| {
        counters
            .get(index)
            .map_or(0, |counter| counter.load(Ordering::Relaxed))
    };
    let say = |text: std::fmt::Arguments<'_>| {
        let mut line = Line {
            bytes: [0; 200],
            len: 0,
        };
        if writeln!(line, "firn-preload[{pid}]: {text}").is_ok() {
            tell(line.bytes.get(..line.len).unwrap_or_default());
        }
    };
    let counters = &TABLE.counters;
    for (index, name) in CALL_NAMES.iter().enumerate() {
        let fast = value(&counters.fast, index);
        let kernel = value(&counters.kernel, index);
        if fast + kernel > 0 {
            let bytes = value(&counters.bytes, index);
            say(format_args!(
                "{name}: {fast} past the kernel ({bytes} bytes), {kernel} through it"
            ));
        }
    }
    for (index, name) in REASON_NAMES.iter().enumerate() {
        let count = value(&counters.left, index);
        if count > 0 {
            say(format_args!("left to the kernel {count} times: {name}"));
        }
    }
    for (index, name) in DISTRUST_NAMES.iter().enumerate() {
        let count = value(&counters.distrusted, index);
        if count > 0 {
            say(format_args!("not believed {count} times: {name}"));
        }
    }
}
