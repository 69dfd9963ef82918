//! Where the files of a running or interrupted mount are.
//!
//! The runtime directory (`/dev/shm/firn-UID`, or `FIRN_RUNTIME_DIR`) holds `KEY.arena`, `KEY.sock` and
//! `KEY.log`. It is the user's own and mode 0700: anybody may create names in /dev/shm, so a directory
//! that is not ours, or that others may enter, is refused and never mended silently.

use std::ffi::OsString;
use std::fmt;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The variable that moves the runtime directory.
pub const RUNTIME_DIR_ENV: &str = "FIRN_RUNTIME_DIR";
/// A socket's path is limited to 107 bytes (unix(7)); `/` and `KEY.sock` take 22 of them.
const RUNTIME_DIR_BYTES_MAX: usize = 107 - 22;

/// Why the runtime directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PathsError {
    /// It cannot be made or looked at.
    #[error("the runtime directory {} cannot be used: {error}; set FIRN_RUNTIME_DIR to a directory of yours on tmpfs", dir.display())]
    Io {
        /// Which.
        dir: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// It is there, but not as it must be.
    #[error("the runtime directory {} {what}; remove it or set FIRN_RUNTIME_DIR to another one", dir.display())]
    Unsafe {
        /// Which.
        dir: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// Sockets in it could not be reached.
    #[error("the path of the runtime directory {} is longer than {RUNTIME_DIR_BYTES_MAX} bytes, too long for a socket; set FIRN_RUNTIME_DIR to a shorter one", dir.display())]
    TooLong {
        /// Which.
        dir: PathBuf,
    },
}

/// The runtime directory of this user, whether or not it exists.
pub fn runtime_dir() -> PathBuf {
    runtime_dir_of(rustix::process::geteuid().as_raw())
}

/// The runtime directory of user `uid`, whether or not it exists.
pub fn runtime_dir_of(uid: u32) -> PathBuf {
    choose_runtime_dir(std::env::var_os(RUNTIME_DIR_ENV), uid)
}

fn choose_runtime_dir(variable: Option<OsString>, uid: u32) -> PathBuf {
    match variable {
        Some(dir) if !dir.is_empty() => PathBuf::from(dir),
        _ => PathBuf::from(format!("/dev/shm/firn-{uid}")),
    }
}

/// Makes the runtime directory if need be, and makes sure that it is private to this user.
pub fn create_runtime_dir() -> Result<PathBuf, PathsError> {
    create_private(runtime_dir())
}

fn create_private(dir: PathBuf) -> Result<PathBuf, PathsError> {
    if dir.as_os_str().len() > RUNTIME_DIR_BYTES_MAX {
        return Err(PathsError::TooLong { dir });
    }
    match DirBuilder::new().mode(0o700).create(&dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(PathsError::Io { dir, error });
        }
        _ => {}
    }
    let found = match dir.symlink_metadata() {
        Ok(found) => found,
        Err(error) => return Err(PathsError::Io { dir, error }),
    };
    let what = if !found.is_dir() {
        "is not a directory".to_owned()
    } else if found.uid() != rustix::process::geteuid().as_raw() {
        format!("belongs to user {}", found.uid())
    } else if found.mode() & 0o077 != 0 {
        format!("has mode {:04o} instead of 0700", found.mode() & 0o7777)
    } else {
        return Ok(dir);
    };
    Err(PathsError::Unsafe { dir, what })
}

/// Names a backing: FNV-1a, 64 bits, of its canonical path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(pub u64);

impl Key {
    /// The key of a backing; the path must be canonical.
    pub fn of(canonical_backing: &Path) -> Self {
        let bytes = canonical_backing.as_os_str().as_bytes();
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        Self(bytes.iter().fold(0xcbf2_9ce4_8422_2325, step))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The files of one mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeFiles {
    /// Of the backing.
    pub key: Key,
    /// The arena, in `arena-dir` or the runtime directory.
    pub arena: PathBuf,
    /// The control socket.
    pub socket: PathBuf,
    /// firnd's log.
    pub log: PathBuf,
    /// What the preload library reads of a stub tree (`firn_format::door::StubTree`).
    pub stub: PathBuf,
    /// The names of a stub tree that were carried over.
    pub names: PathBuf,
}

impl RuntimeFiles {
    /// The files for a backing of this user; the path must be canonical.
    pub fn of(canonical_backing: &Path, arena_dir: Option<&Path>) -> Self {
        Self::in_dir(&runtime_dir(), canonical_backing, arena_dir)
    }

    /// The same in the runtime directory `dir`.
    pub fn in_dir(dir: &Path, canonical_backing: &Path, arena_dir: Option<&Path>) -> Self {
        let key = Key::of(canonical_backing);
        Self {
            key,
            arena: arena_dir.unwrap_or(dir).join(format!("{key}.arena")),
            socket: dir.join(format!("{key}.sock")),
            log: dir.join(format!("{key}.log")),
            stub: dir.join(format!("{key}.stub")),
            names: dir.join(format!("{key}.tree")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_key_is_fnv_1a_of_the_path() {
        assert_eq!(Key::of(Path::new("")).to_string(), "cbf29ce484222325");
        assert_eq!(Key::of(Path::new("a")).to_string(), "af63dc4c8601ec8c");
    }

    #[test]
    fn only_the_arena_moves_with_arena_dir() {
        let files = RuntimeFiles::in_dir(Path::new("/run/x"), Path::new("a"), Some(Path::new("/huge")));
        assert_eq!(files.arena, Path::new("/huge/af63dc4c8601ec8c.arena"));
        assert_eq!(files.socket, Path::new("/run/x/af63dc4c8601ec8c.sock"));
        assert_eq!(files.log, Path::new("/run/x/af63dc4c8601ec8c.log"));
    }

    #[test]
    fn the_variable_moves_the_runtime_directory() {
        assert_eq!(choose_runtime_dir(None, 7), Path::new("/dev/shm/firn-7"));
        assert_eq!(choose_runtime_dir(Some("".into()), 7), Path::new("/dev/shm/firn-7"));
        assert_eq!(choose_runtime_dir(Some("/x".into()), 7), Path::new("/x"));
    }

    /// Proves S-priv-1.
    #[test]
    fn a_runtime_directory_that_others_may_enter_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("run");
        assert_eq!(create_private(dir.clone()).unwrap(), dir);
        std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o755)).unwrap();
        let error = create_private(dir).unwrap_err().to_string();
        assert!(error.contains("has mode 0755 instead of 0700"), "{error}");
        let link = parent.path().join("link");
        std::os::unix::fs::symlink("/tmp", &link).unwrap();
        assert!(create_private(link).unwrap_err().to_string().contains("is not a directory"));
    }

    #[test]
    fn a_runtime_directory_too_long_for_a_socket_is_refused() {
        let error = create_private(PathBuf::from(format!("/tmp/{}", "x".repeat(90)))).unwrap_err();
        assert!(error.to_string().contains("set FIRN_RUNTIME_DIR to a shorter one"), "{error}");
    }
}
