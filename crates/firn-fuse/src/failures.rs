//! Requests of the kernel that fail, counted and logged in one place.
//!
//! The first failure that can only come from a backing in trouble is a warning, for each operation and errno. The
//! others, and what programs expect (no such name, a name that is taken), are logged with `log-level=debug`.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;

use firn_backing::Errno;
use firn_engine::InodeId;
use firn_format::tally::Tally;
use parking_lot::Mutex;

use crate::reply::Subject;
use crate::request::{OPERATION_NAMES, OperationKind};

/// The path of an inode, or of a name in it, as a person reads it.
type PathOf = dyn Fn(InodeId, Option<&OsStr>) -> String + Send + Sync;

/// Failed requests of a mount.
pub struct Failures {
    counts: Tally<{ OPERATION_NAMES.len() }>,
    /// What was warned of already.
    warned: Mutex<HashSet<(OperationKind, i32)>>,
    path_of: Box<PathOf>,
}

impl Default for Failures {
    /// Of a mount to which no requests come.
    fn default() -> Self {
        Self::new(|inode, _| format!("(inode {})", inode.0))
    }
}

impl Failures {
    pub(crate) fn new(
        path_of: impl Fn(InodeId, Option<&OsStr>) -> String + Send + Sync + 'static,
    ) -> Self {
        Self {
            counts: Tally::new(OPERATION_NAMES),
            warned: Mutex::default(),
            path_of: Box::new(path_of),
        }
    }

    /// How many failed, by operation; those of which none did are left out.
    pub fn figures(&self) -> BTreeMap<String, u64> {
        self.counts.figures()
    }

    pub(crate) fn path_of(&self, subject: &Subject) -> String {
        (self.path_of)(subject.inode, subject.name.as_deref())
    }

    /// Counts and logs one.
    pub(crate) fn record(&self, subject: &Subject, errno: Errno) {
        self.counts.count(subject.operation as usize);
        let operation = subject.operation.name();
        if self.is_news(subject.operation, errno) {
            let path = self.path_of(subject);
            tracing::warn!(operation, %path, %errno, "a request failed; more of the kind are counted");
        } else {
            tracing::debug!(operation, path = %self.path_of(subject), %errno, "a request failed");
        }
    }

    fn is_news(&self, operation: OperationKind, errno: Errno) -> bool {
        is_backing_trouble(errno) && self.warned.lock().insert((operation, errno.raw_os_error()))
    }
}

/// Whether programs that do nothing unusual never see it from a backing that works. ESTALE is none of them: it says that
/// another host has removed or replaced the file, and the kernel asks for the name again.
fn is_backing_trouble(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::IO
            | Errno::NOSPC
            | Errno::DQUOT
            | Errno::ROFS
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
            Errno::STALE,
        ] {
            assert!(!is_backing_trouble(errno), "{errno:?}");
        }
        for errno in [Errno::IO, Errno::NOSPC, Errno::NODEV] {
            assert!(is_backing_trouble(errno), "{errno:?}");
        }
    }
}
