//! Errors for C: an errno value, its meaning, and the message of the last error of each thread.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;

use firn_client::MountError;
use firn_client::checkpoints::CheckpointError;
use firn_format::quote::{quoted, quoted_path};
use rustix::io::Errno;

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// Error of a call.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The operation on the mount failed.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The checkpoints cannot be listed.
    #[error(transparent)]
    Checkpoints(#[from] CheckpointError),
    /// The arena (the memory of a mount) of an earlier mount still has data that the backing, the served directory,
    /// lacks.
    #[error(
        "{} is not mounted, and {} holds data that an earlier mount left in memory: mount it again, or run `firn recover`",
        quoted(path),
        quoted_path(arena)
    )]
    NotMounted {
        /// The directory whose checkpoints were to be listed.
        path: Vec<u8>,
        /// The arena.
        arena: PathBuf,
    },
    /// An argument is invalid.
    #[error("{0}")]
    Argument(&'static str),
    /// The library panicked.
    #[error("a fault in libfirn: {0}")]
    Fault(String),
}

impl Error {
    pub(crate) fn errno(&self) -> c_int {
        match self {
            Self::Mount(error) => error.errno(),
            Self::Checkpoints(error) => error.errno(),
            Self::NotMounted { .. } => Errno::NOTCONN.raw_os_error(),
            Self::Argument(_) => Errno::INVAL.raw_os_error(),
            Self::Fault(_) => Errno::NOTRECOVERABLE.raw_os_error(),
        }
    }
}

/// Stores the message that [`last_message`] returns.
pub(crate) fn store_message(error: &Error) {
    let text = error.to_string().replace('\0', "?");
    let new_message = CString::new(text).unwrap_or_default();
    // The variable may be destroyed already, if a destructor at the end of the thread calls this.
    let _ = MESSAGE.try_with(|message| message.replace(new_message));
}

/// Returns the message of the last error of this thread.
pub(crate) fn last_message() -> *const c_char {
    MESSAGE
        .try_with(|message| message.borrow().as_ptr())
        .unwrap_or(c"".as_ptr())
}

/// Returns the meaning that an errno value has if a function of this library returned it. The text is for users.
pub(crate) fn meaning(error: c_int) -> &'static CStr {
    const UNKNOWN: &CStr = c"an error of the system: firn_error_message() has the details";
    match error {
        0 => return c"done",
        // The kernel's range of errno values. Other values cannot be an `Errno`.
        1..4096 => {}
        _ => return UNKNOWN,
    }
    // Some values have several causes, and their texts name all of them.
    match Errno::from_raw_os_error(error) {
        Errno::NODEV => c"the path is not on a Firn mount: `firn status` lists the mounts",
        Errno::NOTCONN => c"the mount is dead, because firnd was killed: mount again, then call firn_open() again",
        Errno::TIMEDOUT => {
            c"firnd does not answer, or a wait has reached its time limit: `firn status` shows whether firnd answers"
        }
        Errno::ACCESS | Errno::PERM => {
            c"the mount, or the directory in which to make a directory, belongs to another user: run this as that user"
        }
        Errno::EXIST => c"the directory exists already: call firn_begin() for it",
        Errno::PROTO => c"firnd and this library have different versions: use the same version of both",
        Errno::AGAIN => {
            c"all connections to this firnd are in use: end some requests or lists, or try again"
        }
        Errno::STALE => c"the list or the mapping is no longer valid: make a new one",
        Errno::NOENT => c"no such file or directory in this mount, or no transaction is open there",
        Errno::NOTDIR => c"not a directory: a transaction covers one and all below it",
        Errno::BUSY => c"another transaction is open at, above or below the path: commit or abort it first",
        Errno::OPNOTSUPP => c"the mount has no transactions: mount it with drain=commit",
        Errno::NOSPC | Errno::DQUOT => {
            c"no room in the backing or the arena: make room, then try again"
        }
        Errno::ISDIR => c"a directory: name a file in it",
        Errno::XDEV => c"the path is on another mount than the handle: open a handle for that mount",
        Errno::INVAL => {
            c"a null pointer, a range outside the piece, not a regular file, or not the number of the transaction"
        }
        Errno::NODATA => {
            c"the bytes are in the backing only: read them through the mount. Or the path has no file"
        }
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
    use firn_client::ClientError;

    use super::*;

    #[test]
    fn the_words_for_the_last_error_are_the_threads_own() {
        store_message(&Error::Argument("one"));
        std::thread::spawn(|| store_message(&Error::Argument("two")))
            .join()
            .unwrap();
        // SAFETY: a string of this thread.
        assert_eq!(unsafe { CStr::from_ptr(last_message()) }, c"one");
    }

    #[test]
    fn every_error_of_this_library_has_a_meaning_of_its_own() {
        let unknown = meaning(Errno::XFULL.raw_os_error());
        for other in [-1, -12_345, 4096, c_int::MIN, c_int::MAX] {
            assert_eq!(meaning(other), unknown, "{other}");
        }
        let errors = [
            Error::Mount(MountError::Closed),
            Error::Mount(MountError::ListEnded(String::new())),
            Error::Argument(""),
            Error::NotMounted {
                path: Vec::new(),
                arena: PathBuf::new(),
            },
            Error::Mount(MountError::NoFile {
                path: PathBuf::new(),
            }),
            Error::Mount(MountError::OtherMount {
                path: PathBuf::new(),
                found: PathBuf::new(),
                expected: PathBuf::new(),
            }),
            Error::Mount(MountError::InBacking),
            Error::Mount(MountError::NotMapped),
            Error::Mount(MountError::Client(ClientError::NoMount {
                path: "/x".into(),
                arena: None,
            })),
            Error::Mount(MountError::Client(ClientError::Refused {
                errno: Errno::BUSY.raw_os_error(),
                message: String::new(),
            })),
            Error::Fault(String::new()),
        ];
        for error in errors {
            assert_ne!(meaning(error.errno()), unknown, "{error:?}");
        }
        assert_eq!(meaning(0), c"done");
    }
}
