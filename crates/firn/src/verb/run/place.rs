//! The two directories of a run on a host: the mount point, and the backing in which files end up.

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
    pub(super) memory_only: bool,
    /// Whether the mount point is the default one, which Firn created.
    is_default: bool,
}

impl RunDirs {
    /// Creates the directories that are missing, with mode 0700, and returns both.
    ///
    /// Without a `prefix`, the mount point is `default` in the runtime directory. Without a `backing`, a directory in the
    /// runtime directory is created for the names of the files. Fails if a directory cannot be created.
    pub(super) fn create(
        prefix: Option<PathBuf>,
        default: &str,
        backing: Option<PathBuf>,
    ) -> Result<Self, Failure> {
        let is_default = prefix.is_none();
        let prefix = match prefix {
            Some(prefix) => {
                create_private_dirs(&prefix)?;
                prefix
            }
            None => create_default_prefix(default)?,
        };
        let memory_only = backing.is_none();
        let backing = match backing {
            Some(backing) => backing,
            // The name depends only on the mount point, so a restart with the same mount point finds its files.
            None => {
                let runtime = firn_client::paths::create_runtime_dir()?;
                let key = firn_client::Key::of(&absolute(&prefix)?);
                let names = runtime.join(format!("{:016x}.{NAMES_SUFFIX}", key.0));
                let made = firn_trust::create_private_dir(rustix::fs::CWD, &names);
                made.map_err(|error| Failure::new(FAILED, error.to_string()))?;
                names
            }
        };
        create_private_dirs(&backing)?;
        Ok(Self {
            prefix,
            backing: absolute(&backing)?,
            memory_only,
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

fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    path.canonicalize()
        .map_err(|error| Failure::new(USAGE, format!("cannot find {}: {error}", text::path(path))))
}
