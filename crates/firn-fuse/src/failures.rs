//! Counts and logs failed requests, in one place.
//!
//! An errno means *trouble of the backing* (the directory that the mount serves) if programs never get it from a
//! backing that works, such as EIO. For each operation and each such errno, the first failure is logged as a warning.
//! All other failures are logged at level debug: later ones of the same kind, and errors that programs expect, such as
//! ENOENT.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;

use firn_backing::Errno;
use firn_engine::InodeId;
use firn_format::tally::Tally;
use parking_lot::Mutex;

use crate::reply::RequestDescription;
use crate::request::{OPERATION_NAMES, OperationKind};

/// Returns the path of an inode, or of a name in it, for a message.
type PathOf = dyn Fn(InodeId, Option<&OsStr>) -> String + Send + Sync;

/// Counters of the failed requests of a mount.
pub struct Failures {
    counts: Tally<{ OPERATION_NAMES.len() }>,
    /// Operations and errnos of which a warning was logged.
    warned: Mutex<HashSet<(OperationKind, i32)>>,
    path_of: Box<PathOf>,
}

impl Default for Failures {
    /// Counters of a mount without requests. They show inode numbers instead of paths.
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

    /// Returns the number of failed requests by operation, without operations that never failed.
    pub fn figures(&self) -> BTreeMap<String, u64> {
        self.counts.figures()
    }

    /// Returns the path of the object of a request, for a message.
    pub(crate) fn path_of(&self, description: &RequestDescription) -> String {
        (self.path_of)(description.inode, description.name.as_deref())
    }

    /// Counts and logs a failed request.
    pub(crate) fn record(&self, description: &RequestDescription, errno: Errno) {
        self.counts.count(description.operation as usize);
        let operation = description.operation.name();
        if self.deserves_warning(description.operation, errno) {
            let path = self.path_of(description);
            tracing::warn!(operation, %path, %errno, "a request failed; later failures of this kind are logged at level debug only");
        } else {
            tracing::debug!(operation, path = %self.path_of(description), %errno, "a request failed");
        }
    }

    /// Whether this failure deserves a warning: trouble of the backing that was not warned of before.
    fn deserves_warning(&self, operation: OperationKind, errno: Errno) -> bool {
        is_backing_trouble(errno) && self.warned.lock().insert((operation, errno.raw_os_error()))
    }
}

/// Whether the errno means trouble of the backing (the directory below the mount): ordinary programs never get it from
/// a backing that works.
///
/// ESTALE is no such errno: it says that another host has removed or replaced the file, and the kernel then looks the
/// name up again.
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
