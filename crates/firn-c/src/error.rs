//! Errors as C sees them: an errno, its meaning, and the words for the last one.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;

use firn_client::ClientError;
use firn_format::quote::quoted_path;
use firn_protocol::path::BytePath;
use rustix::io::Errno;

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// firnd said so, or cannot be asked.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The handle met an error before, or is closed.
    #[error("this handle has no connection any more: close it and open another")]
    Closed,
    /// A list whose connection is gone.
    #[error("the list does not hold any more: {0}")]
    Stale(String),
    /// An argument that cannot be.
    #[error("{0}")]
    Argument(&'static str),
    /// A path on another mount.
    #[error(
        "{} is on the mount at {}, the handle is of {}",
        quoted_path(path),
        quoted_path(found),
        quoted_path(expected)
    )]
    OtherMount {
        /// As asked for.
        path: PathBuf,
        /// Its mount point.
        found: PathBuf,
        /// That of the handle.
        expected: PathBuf,
    },
    /// Nothing to copy from.
    #[error("these bytes are in the backing only: read them through the mount")]
    InBacking,
    /// A file of the mount that is not what firnd said.
    #[error("{path} is not the file of this mount: {why}")]
    Foreign {
        /// Which.
        path: BytePath,
        /// What is wrong.
        why: String,
    },
    /// The system refused something.
    #[error("cannot {what} {path}: {errno}")]
    System {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: BytePath,
        /// Why not.
        errno: Errno,
    },
    /// A panic.
    #[error("a fault in libfirn: {0}")]
    Fault(String),
}

impl Error {
    pub(crate) fn errno(&self) -> c_int {
        let errno = match self {
            Self::Client(error) => return error.errno(),
            Self::Closed => Errno::NOTCONN,
            Self::Stale(_) | Self::Foreign { .. } => Errno::STALE,
            Self::Argument(_) => Errno::INVAL,
            Self::OtherMount { .. } => Errno::XDEV,
            Self::InBacking => Errno::NODATA,
            Self::System { errno, .. } => *errno,
            Self::Fault(_) => Errno::NOTRECOVERABLE,
        };
        errno.raw_os_error()
    }
}

/// Keeps the words for [`last`].
pub(crate) fn tell(error: &Error) {
    let text = CString::new(error.to_string().replace('\0', "?")).unwrap_or_default();
    // During the end of the thread there is nobody left to ask.
    let _ = MESSAGE.try_with(|message| message.replace(text));
}

/// The words for the last error of this thread.
pub(crate) fn last() -> *const c_char {
    MESSAGE
        .try_with(|message| message.borrow().as_ptr())
        .unwrap_or(c"".as_ptr())
}

/// What an errno of this library means.
pub(crate) fn meaning(error: c_int) -> &'static CStr {
    const UNKNOWN: &CStr = c"an error of the system: firn_error_message() says more";
    match error {
        0 => return c"done",
        // What the kernel knows; others cannot be an `Errno`.
        1..4096 => {}
        _ => return UNKNOWN,
    }
    match Errno::from_raw_os_error(error) {
        Errno::NODEV => c"the path is on no Firn mount: `firn status` lists the mounts",
        Errno::NOTCONN => c"the mount is dead, firnd was killed: mount again, then open again",
        Errno::TIMEDOUT => {
            c"firnd does not answer: it may be stopped or its machine overloaded, see its log"
        }
        Errno::ACCESS | Errno::PERM => c"the mount belongs to another user: run this as that user",
        Errno::PROTO => c"firnd and this library are of different versions: use those of one",
        Errno::AGAIN => {
            c"all connections to this firnd are in use: end some requests or lists, or try again"
        }
        Errno::STALE => c"the list or the mapping does not hold any more: make another one",
        Errno::NOENT => c"no such file or directory in this mount, or no transaction is open there",
        Errno::NOTDIR => c"not a directory: a transaction covers one and all below it",
        Errno::BUSY => c"another transaction is in the way: commit or abort it first",
        Errno::OPNOTSUPP => c"the mount has no transactions: mount it with drain=commit",
        Errno::NOSPC | Errno::DQUOT => {
            c"no room in the backing or the arena: make some, then try again"
        }
        Errno::ISDIR => c"a directory: name a file in it",
        Errno::XDEV => c"the path is on another mount than the handle: open that one",
        Errno::INVAL => {
            c"a null pointer, a range outside the piece, not a regular file, or another number"
        }
        Errno::NODATA => c"the bytes are in the backing only: read them through the mount",
        Errno::IO => c"the spill file or the backing fails: `firn status` has the details",
        Errno::MFILE => c"too many lists or open files: free some",
        Errno::NOMEM => c"no address space is left for the region",
        Errno::BADF => c"firnd does not know the list",
        Errno::NOTRECOVERABLE => c"a fault in libfirn: please report it",
        _ => UNKNOWN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_for_the_last_error_are_the_threads_own() {
        tell(&Error::Argument("one"));
        std::thread::spawn(|| tell(&Error::Argument("two")))
            .join()
            .unwrap();
        // SAFETY: a string of this thread.
        assert_eq!(unsafe { CStr::from_ptr(last()) }, c"one");
    }

    #[test]
    fn every_error_of_this_library_has_a_meaning_of_its_own() {
        let unknown = meaning(Errno::XFULL.raw_os_error());
        for other in [-1, -12_345, 4096, c_int::MIN, c_int::MAX] {
            assert_eq!(meaning(other), unknown, "{other}");
        }
        let errors = [
            Error::Closed,
            Error::Stale(String::new()),
            Error::Argument(""),
            Error::OtherMount {
                path: PathBuf::new(),
                found: PathBuf::new(),
                expected: PathBuf::new(),
            },
            Error::InBacking,
            Error::Client(ClientError::NoMount {
                path: "/x".into(),
                arena: None,
            }),
            Error::Client(ClientError::Refused {
                errno: Errno::BUSY.raw_os_error(),
                message: String::new(),
            }),
            Error::Fault(String::new()),
        ];
        for error in errors {
            assert_ne!(meaning(error.errno()), unknown, "{error:?}");
        }
        assert_eq!(meaning(0), c"done");
    }
}
