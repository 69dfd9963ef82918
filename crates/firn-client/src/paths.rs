//! Paths of the files that a running or interrupted mount has in the runtime directory.
//!
//! The runtime directory is `/dev/shm/firn-UID`, or `FIRN_RUNTIME_DIR`. For each mount it has `KEY.arena` (memory with
//! the bytes that are not in the backing yet), `KEY.sock` (the control socket) and `KEY.log`. `KEY` is made from the
//! path of the backing, the directory that the mount serves.
//!
//! It belongs to the user and has mode 0700. Any user may create names in /dev/shm. Firn therefore refuses a directory
//! that belongs to another user or that other users may enter, and never repairs it silently. [`open_runtime_dir`]
//! makes this check; every reader opens the directory with this function.

use std::ffi::OsString;
use std::fmt;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use firn_format::quote::quoted_path;
use firn_trust::{TrustError, check_place_of, create_private_dir, open_private_dir_of};
use rustix::fs::CWD;
use rustix::io::Errno;

/// Environment variable that sets the runtime directory.
pub const RUNTIME_DIR_ENV: &str = "FIRN_RUNTIME_DIR";
/// Maximum length of the runtime directory's path. The path of a socket is limited to 107 bytes (unix(7)), and `/`
/// with `KEY.sock` takes 22 of them.
const RUNTIME_DIR_BYTES_MAX: usize = 107 - 22;

/// Error of the runtime directory.
#[derive(Debug, thiserror::Error)]
pub enum PathsError {
    /// The directory cannot be created or opened, or it fails the checks of owner and mode.
    #[error(
        "the runtime directory {0}; to use another one, set FIRN_RUNTIME_DIR to a directory that belongs to you and has mode 0700"
    )]
    Refused(TrustError),
    /// The path is relative. firnd and the programs of a job have different current directories.
    #[error(
        "FIRN_RUNTIME_DIR is {}, which is not an absolute path: set it to one that begins with /",
        quoted_path(dir)
    )]
    Relative {
        /// The value of the variable.
        dir: PathBuf,
    },
    /// The path is too long for the sockets in the directory.
    #[error(
        "the path of the runtime directory {} is longer than {RUNTIME_DIR_BYTES_MAX} bytes, too long for a socket; set FIRN_RUNTIME_DIR to a shorter one",
        quoted_path(dir)
    )]
    TooLong {
        /// The directory.
        dir: PathBuf,
    },
}

impl PathsError {
    /// Returns the errno value that fits the error best.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Refused(error) => error.errno(),
            Self::Relative { .. } => Errno::INVAL,
            Self::TooLong { .. } => Errno::NAMETOOLONG,
        }
    }
}

/// The location of runtime directories, according to the environment of this process.
#[derive(Clone, Debug)]
pub struct RuntimeDirs {
    /// The value of [`RUNTIME_DIR_ENV`].
    chosen: Option<PathBuf>,
}

impl RuntimeDirs {
    /// Reads the location from the environment of this process.
    pub fn from_environment() -> Result<Self, PathsError> {
        Self::from_variable(std::env::var_os(RUNTIME_DIR_ENV))
    }

    /// Returns the location for a value of [`RUNTIME_DIR_ENV`]. An empty value counts as unset.
    fn from_variable(value: Option<OsString>) -> Result<Self, PathsError> {
        let dir = match value {
            Some(value) if !value.is_empty() => PathBuf::from(value),
            _ => return Ok(Self { chosen: None }),
        };
        if !dir.is_absolute() {
            return Err(PathsError::Relative { dir });
        }
        if dir.as_os_str().len() > RUNTIME_DIR_BYTES_MAX {
            return Err(PathsError::TooLong { dir });
        }
        Ok(Self { chosen: Some(dir) })
    }

    /// Returns the path of the runtime directory of user `uid`. The directory need not exist.
    pub fn dir_of_user(&self, uid: u32) -> PathBuf {
        match &self.chosen {
            Some(dir) => dir.clone(),
            None => PathBuf::from(format!("/dev/shm/firn-{uid}")),
        }
    }
}

/// Returns the path of the runtime directory of this user. The directory need not exist.
pub fn runtime_dir() -> Result<PathBuf, PathsError> {
    Ok(RuntimeDirs::from_environment()?.dir_of_user(rustix::process::geteuid().as_raw()))
}

/// Creates the runtime directory if it does not exist, and checks that it is private to this user.
pub fn create_runtime_dir() -> Result<PathBuf, PathsError> {
    let dir = runtime_dir()?;
    check_parent_dirs(&dir, rustix::process::geteuid().as_raw())?;
    create_private_dir(CWD, &dir).map_err(PathsError::Refused)?;
    Ok(dir)
}

/// Opens the runtime directory of user `uid`. Returns `None` if it does not exist.
///
/// Fails if the directory does not belong to that user or is not private. In that case no file in it can be trusted.
pub fn open_runtime_dir(dir: &Path, uid: u32) -> Result<Option<OwnedFd>, PathsError> {
    let opened_dir = match open_private_dir_of(CWD, dir, uid) {
        Ok(opened_dir) => opened_dir,
        Err(error) if error.is_missing() => return Ok(None),
        Err(error) => return Err(PathsError::Refused(error)),
    };
    check_parent_dirs(dir, uid)?;
    Ok(Some(opened_dir))
}

/// Checks the directories above a runtime directory. Fails if other users could replace the runtime directory by
/// another directory of the user.
fn check_parent_dirs(dir: &Path, uid: u32) -> Result<(), PathsError> {
    let parent = dir.parent().unwrap_or(Path::new("/"));
    check_place_of(parent, uid).map_err(|error| match error {
        // The error names the runtime directory instead of its parent.
        TrustError::Exposed { path, why, .. } => PathsError::Refused(TrustError::Exposed {
            place: dir.to_owned(),
            path,
            why,
        }),
        error => PathsError::Refused(error),
    })
}

/// Key of a backing: the 64-bit XXH3 hash of its canonical path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(pub u64);

impl Key {
    /// Returns the key of a backing. The path must be canonical.
    pub fn from_backing(canonical_backing: &Path) -> Self {
        Self(xxhash_rust::xxh3::xxh3_64(
            canonical_backing.as_os_str().as_bytes(),
        ))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The paths of the files of one mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeFiles {
    /// The key of the backing.
    pub key: Key,
    /// The arena, in `arena-dir` or the runtime directory.
    pub arena: PathBuf,
    /// The control socket.
    pub socket: PathBuf,
    /// firnd's log.
    pub log: PathBuf,
    /// The events of the mount, one JSON object on each line.
    pub events: PathBuf,
    /// The record of the last mount that ended.
    pub record: PathBuf,
    /// The live table: what the kernel knows of the mount, for a firnd that takes the mount over.
    pub live: PathBuf,
    /// The description of a stub tree for the preload library (`firn_format::data_socket::StubTree`).
    pub stub: PathBuf,
    /// The synced names of a stub tree.
    pub names: PathBuf,
}

impl RuntimeFiles {
    /// Returns the paths for a backing of this user. The path of the backing must be canonical.
    pub fn for_backing(
        canonical_backing: &Path,
        arena_dir: Option<&Path>,
    ) -> Result<Self, PathsError> {
        Ok(Self::in_dir(&runtime_dir()?, canonical_backing, arena_dir))
    }

    /// Returns the paths for a backing, in the runtime directory `dir`.
    pub fn in_dir(dir: &Path, canonical_backing: &Path, arena_dir: Option<&Path>) -> Self {
        let key = Key::from_backing(canonical_backing);
        Self {
            key,
            arena: arena_dir.unwrap_or(dir).join(format!("{key}.arena")),
            socket: dir.join(format!("{key}.sock")),
            log: dir.join(format!("{key}.log")),
            events: dir.join(format!("{key}.events")),
            record: dir.join(format!("{key}.record")),
            live: dir.join(format!("{key}.live")),
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
    fn the_key_is_xxh3_of_the_path() {
        assert_eq!(
            Key::from_backing(Path::new("")).to_string(),
            "2d06800538d394c2"
        );
        assert_eq!(
            Key::from_backing(Path::new("a")).to_string(),
            "e6c632b61e964e1f"
        );
    }

    #[test]
    fn only_the_arena_moves_with_arena_dir() {
        let files = RuntimeFiles::in_dir(
            Path::new("/run/x"),
            Path::new("a"),
            Some(Path::new("/huge")),
        );
        assert_eq!(files.arena, Path::new("/huge/e6c632b61e964e1f.arena"));
        assert_eq!(files.socket, Path::new("/run/x/e6c632b61e964e1f.sock"));
        assert_eq!(files.log, Path::new("/run/x/e6c632b61e964e1f.log"));
    }

    #[test]
    fn the_variable_moves_the_runtime_directory() {
        let of = |variable: Option<&str>| {
            RuntimeDirs::from_variable(variable.map(OsString::from))
                .unwrap()
                .dir_of_user(7)
        };
        assert_eq!(of(None), Path::new("/dev/shm/firn-7"));
        assert_eq!(of(Some("")), Path::new("/dev/shm/firn-7"));
        assert_eq!(of(Some("/x")), Path::new("/x"));
    }

    #[test]
    fn a_runtime_directory_that_is_relative_or_too_long_for_a_socket_is_refused() {
        let refused = |variable: String| {
            RuntimeDirs::from_variable(Some(variable.into()))
                .unwrap_err()
                .to_string()
        };
        let relative = refused("run/firn".into());
        assert!(
            relative.contains("run/firn, which is not an absolute path"),
            "{relative}"
        );
        let long = refused(format!("/tmp/{}", "x".repeat(90)));
        assert!(
            long.contains("set FIRN_RUNTIME_DIR to a shorter one"),
            "{long}"
        );
    }

    /// Proves S-priv-1.
    #[test]
    fn a_runtime_directory_that_others_may_enter_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("run");
        let uid = rustix::process::geteuid().as_raw();
        assert!(open_runtime_dir(&dir, uid).unwrap().is_none());
        create_private_dir(CWD, &dir).unwrap();
        assert!(open_runtime_dir(&dir, uid).unwrap().is_some());
        let refusal = |dir: &Path, uid| open_runtime_dir(dir, uid).unwrap_err().to_string();
        assert!(
            refusal(&dir, uid + 1).contains("belongs to user"),
            "{}",
            refusal(&dir, uid + 1)
        );
        std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o755)).unwrap();
        assert!(
            refusal(&dir, uid).contains("has mode 0755"),
            "{}",
            refusal(&dir, uid)
        );
        let link = parent.path().join("link");
        std::os::unix::fs::symlink("/tmp", &link).unwrap();
        assert!(
            refusal(&link, uid).contains("is a symbolic link"),
            "{}",
            refusal(&link, uid)
        );
    }
}
