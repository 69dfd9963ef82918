//! The two directories of `firn run` on a host: the mount point, and the backing in which files end up.
//!
//! A run without `--backing` has its files in memory only. Its backing is then a directory with the files' names, but
//! without their data.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::failure::{FAILED, Failure, USAGE};
use crate::text;

/// Suffix of the backing of a run whose files are in memory only. That directory has the files' names, but no data.
pub(in crate::verb) const NAMES_SUFFIX: &str = "names";

/// The two directories of a run.
pub(super) struct RunDirs {
    /// Mount point, where programs see the files.
    pub(super) prefix: PathBuf,
    /// Directory where drained files end up.
    pub(super) backing: PathBuf,
    /// Whether the backing was created for the names of this run only, so that nothing is drained to it.
    pub(super) is_memory_only: bool,
    /// Whether the mount point is the default one, which Firn created.
    is_default: bool,
}

impl RunDirs {
    /// Creates the mount point (prefix) and the backing, in which files end up, if they are missing, with mode 0700.
    /// Returns both.
    ///
    /// Without a `chosen_prefix`, the mount point is `default_prefix` in the runtime directory. Without a
    /// `chosen_backing`, a directory in the runtime directory is created for the names of the files. Fails if a
    /// directory cannot be created.
    pub(super) fn create(
        chosen_prefix: Option<PathBuf>,
        default_prefix: &str,
        chosen_backing: Option<PathBuf>,
    ) -> Result<Self, Failure> {
        let is_default = chosen_prefix.is_none();
        let is_memory_only = chosen_backing.is_none();
        let prefix = match chosen_prefix {
            Some(prefix) => {
                create_private_dirs(&prefix)?;
                prefix
            }
            None => create_default_prefix(default_prefix)?,
        };
        let backing = match chosen_backing {
            Some(backing) => backing,
            None => create_names_dir(&prefix)?,
        };
        create_private_dirs(&backing)?;
        Ok(Self {
            prefix,
            backing: canonical_path(&backing)?,
            is_memory_only,
            is_default,
        })
    }

    /// Removes the default mount point after the unmount. A stub tree that is not empty remains.
    pub(super) fn remove_default_prefix(&self) {
        if self.is_default {
            let _ = std::fs::remove_dir(&self.prefix);
        }
    }
}

/// Creates the default mount point in the runtime directory, where no other user can put a symbolic link in its place.
fn create_default_prefix(name: &str) -> Result<PathBuf, Failure> {
    let prefix = firn_client::paths::create_runtime_dir()?.join(name);
    match firn_trust::create_private_dir(rustix::fs::CWD, &prefix) {
        Ok(_) => Ok(prefix),
        Err(error) => Err(Failure::new(
            FAILED,
            format!("cannot use the default of --prefix: {error}"),
        )),
    }
}

/// Creates the backing for a run without one: a directory in the runtime directory for the names of the files. Its name
/// depends only on the mount point, so a restart with the same mount point finds its files.
fn create_names_dir(prefix: &Path) -> Result<PathBuf, Failure> {
    let runtime_dir = firn_client::paths::create_runtime_dir()?;
    let key = firn_client::Key::from_backing(&canonical_path(prefix)?);
    let names_dir = runtime_dir.join(format!("{:016x}.{NAMES_SUFFIX}", key.0));
    match firn_trust::create_private_dir(rustix::fs::CWD, &names_dir) {
        Ok(_) => Ok(names_dir),
        Err(error) => Err(Failure::new(FAILED, error.to_string())),
    }
}

/// Creates a directory and its missing ancestors, with mode 0700. An existing directory is not changed.
fn create_private_dirs(dir: &Path) -> Result<(), Failure> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|error| {
            Failure::new(
                USAGE,
                format!("cannot make the directory {}: {error}", text::path(dir)),
            )
        })
}

fn canonical_path(path: &Path) -> Result<PathBuf, Failure> {
    path.canonicalize()
        .map_err(|error| Failure::new(USAGE, format!("cannot find {}: {error}", text::path(path))))
}
