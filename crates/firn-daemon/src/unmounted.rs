//! Opens a backing (the directory that a mount serves) while it is not mounted on this host, for commands such as a
//! repair. Also the report about files that nothing refers to.

use std::path::{Path, PathBuf};

use firn_backing::DirBacking;
use firn_config::Options;
use serde::Serialize;

use crate::error::AttachError;
use crate::lock::{LockSharing, Locks};
use crate::preflight;
use crate::runtime_files::find_runtime_files;

/// A file, link or log that nothing refers to.
#[derive(Clone, Debug, Serialize)]
pub struct FoundOrphan {
    /// What was found:
    /// * `logs`: the logs of a file that is missing in the backing;
    /// * `removed-logs`: the same, but a host had begun to remove them;
    /// * `file`: a file in a lane without a name in the backing;
    /// * `link`: an unfinished link in `.firn/placing`;
    /// * `dangling`: a link in the backing to a file that is missing in its lane.
    pub kind: &'static str,
    /// Path of the file, the link or the logs.
    #[serde(with = "firn_protocol::path::exact")]
    pub path: PathBuf,
    /// Length in bytes of a file; 0 otherwise.
    pub bytes: u64,
    /// This call has removed it.
    pub is_removed: bool,
}

/// A backing that is not mounted on this host, and the locks that keep it unmounted.
pub(crate) struct UnmountedBacking {
    /// Canonical path of the backing.
    pub(crate) path: PathBuf,
    pub(crate) directory: DirBacking,
    pub(crate) locks: Locks,
}

/// Locks and opens a backing, the directory that a mount would serve, and returns it with its locks. It stays unmounted
/// on this host as long as these locks exist. Fails if it is mounted or being recovered.
pub(crate) fn open_unmounted(
    backing: &Path,
    options: &Options,
) -> Result<UnmountedBacking, AttachError> {
    let read_only = false;
    let backing = preflight::check_backing(backing, read_only)?;
    let files = find_runtime_files(&backing, options)?;
    let locks = Locks::acquire_unmounted(&backing, &files, LockSharing::Exclusive)?;
    let directory = DirBacking::open(&backing).map_err(|source| AttachError::BackingUnusable {
        path: backing.clone(),
        source,
    })?;
    Ok(UnmountedBacking {
        path: backing,
        directory,
        locks,
    })
}
