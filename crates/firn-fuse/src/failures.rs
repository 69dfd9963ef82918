//! Requests of the kernel that fail: answered, counted and logged in one place.
//!
//! An [`Answer`] is fuser's reply with what the request is about. Whatever its operation, the first failure that can
//! only come from a backing in trouble is a warning for each operation and errno; the others, and what programs
//! expect (no such name, a name that is taken), are told with `log-level=debug`.

use std::collections::{BTreeMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use firn_backing::{Backing, Errno};
use firn_engine::{Engine, InodeId};
use firn_format::tally::Tally;
use parking_lot::Mutex;

use crate::convert;

macro_rules! operations {
    ($($operation:ident = $name:literal),* $(,)?) => {
        /// What the kernel asks for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(crate) enum Operation { $($operation),* }

        const NAMES: [&str; [$($name),*].len()] = [$($name),*];
    };
}

operations! {
    Lookup = "lookup", Getattr = "getattr", Setattr = "setattr", Readlink = "readlink", Mknod = "mknod",
    Mkdir = "mkdir", Unlink = "unlink", Rmdir = "rmdir", Symlink = "symlink", Rename = "rename", Link = "link",
    Open = "open", Read = "read", Write = "write", Flush = "flush", Fsync = "fsync", Opendir = "opendir",
    Readdir = "readdir", Fsyncdir = "fsyncdir", Statfs = "statfs", Setxattr = "setxattr", Getxattr = "getxattr",
    Listxattr = "listxattr", Removexattr = "removexattr", Create = "create", Fallocate = "fallocate",
    Lseek = "lseek", Copy = "copy_file_range",
}

/// Failed requests of a mount.
pub struct Failures {
    counts: Tally<{ NAMES.len() }>,
    /// What was warned of already.
    warned: Mutex<HashSet<(Operation, i32)>>,
}

impl Default for Failures {
    fn default() -> Self {
        Self {
            counts: Tally::new(NAMES),
            warned: Mutex::default(),
        }
    }
}

impl Failures {
    /// How many failed, by operation; those of which none did are left out.
    pub fn figures(&self) -> BTreeMap<String, u64> {
        self.counts.figures()
    }

    fn tell<B: Backing>(&self, about: &About<B>, errno: Errno) {
        self.counts.count(about.operation as usize);
        let is_news = is_trouble(errno)
            && self
                .warned
                .lock()
                .insert((about.operation, errno.raw_os_error()));
        if is_news {
            let path = about.path();
            tracing::warn!(operation = about.name(), %path, %errno, "a request failed; more of the kind are counted");
        } else {
            tracing::debug!(operation = about.name(), path = %about.path(), %errno, "a request failed");
        }
    }
}

/// Whether programs that do nothing unusual never see it from a backing that works.
fn is_trouble(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::IO
            | Errno::NOSPC
            | Errno::DQUOT
            | Errno::ROFS
            | Errno::STALE
            | Errno::NODEV
            | Errno::TIMEDOUT
            | Errno::HOSTDOWN
            | Errno::HOSTUNREACH
            | Errno::NOTCONN
            | Errno::CONNABORTED
            | Errno::CONNREFUSED
            | Errno::MFILE
            | Errno::NFILE
            | Errno::NOMEM
            | Errno::UCLEAN
            | Errno::FBIG
    )
}

/// What a request is about.
struct About<B: Backing> {
    engine: Arc<Engine<B>>,
    failures: Arc<Failures>,
    operation: Operation,
    inode: InodeId,
    /// In that directory.
    name: Option<OsString>,
}

impl<B: Backing> About<B> {
    fn name(&self) -> &'static str {
        self.failures.counts.name(self.operation as usize)
    }

    fn path(&self) -> String {
        self.engine.shown_path(self.inode, self.name.as_deref())
    }
}

/// A reply of fuser's with what its request is about. Success is answered through it as through the reply itself.
pub(crate) struct Answer<B: Backing, R> {
    reply: R,
    about: About<B>,
}

impl<B: Backing, R> Answer<B, R> {
    pub(crate) fn new(
        engine: &Arc<Engine<B>>,
        failures: &Arc<Failures>,
        operation: Operation,
        (inode, name): (InodeId, Option<&OsStr>),
        reply: R,
    ) -> Self {
        let engine = Arc::clone(engine);
        let failures = Arc::clone(failures);
        let name = name.map(OsStr::to_owned);
        Self {
            reply,
            about: About {
                engine,
                failures,
                operation,
                inode,
                name,
            },
        }
    }

    /// The reply, to be answered with success.
    pub(crate) fn success(self) -> R {
        self.reply
    }
}

impl<B: Backing, R: Refuse> Answer<B, R> {
    /// Answers with an error.
    pub(crate) fn error(self, error: Errno) {
        self.about.failures.tell(&self.about, error);
        self.reply.refuse(convert::errno(error));
    }
}

impl<B: Backing, R> Deref for Answer<B, R> {
    type Target = R;

    fn deref(&self) -> &R {
        &self.reply
    }
}

impl<B: Backing, R> DerefMut for Answer<B, R> {
    fn deref_mut(&mut self) -> &mut R {
        &mut self.reply
    }
}

/// A reply that can be an error: all of fuser's.
pub(crate) trait Refuse {
    /// Sends it.
    fn refuse(self, errno: fuser::Errno);
}

macro_rules! refuse {
    ($($reply:ident)*) => {$(
        impl Refuse for fuser::$reply {
            fn refuse(self, errno: fuser::Errno) {
                self.error(errno);
            }
        }
    )*};
}

refuse! {
    ReplyAttr ReplyCreate ReplyData ReplyDirectory ReplyDirectoryPlus ReplyEmpty ReplyEntry ReplyLseek ReplyOpen
    ReplyStatfs ReplyWrite ReplyXattr
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_programs_expect_is_no_trouble_of_the_backing() {
        for errno in [
            Errno::NOENT,
            Errno::EXIST,
            Errno::NOTEMPTY,
            Errno::NODATA,
            Errno::ACCESS,
            Errno::NXIO,
        ] {
            assert!(!is_trouble(errno), "{errno:?}");
        }
        for errno in [Errno::IO, Errno::NOSPC, Errno::STALE] {
            assert!(is_trouble(errno), "{errno:?}");
        }
    }

    #[test]
    fn each_operation_has_its_name() {
        let counts = Tally::new(NAMES);
        assert_eq!(counts.name(Operation::Lookup as usize), "lookup");
        assert_eq!(counts.name(Operation::Copy as usize), "copy_file_range");
    }
}
