//! A backing that is not mounted on this host, and what is found there that leads to nothing.

use std::path::{Path, PathBuf};

use firn_backing::DirBacking;
use firn_config::Options;
use serde::Serialize;

use crate::error::AttachError;
use crate::lock::{Locks, Sharing};
use crate::preflight;
use crate::runtime_files::find_runtime_files;

/// Something that leads to nothing.
#[derive(Clone, Debug, Serialize)]
pub struct FoundOrphan {
    /// `logs`: of a file that is not in the backing. `removed-logs`: the same, and a host was removing them. `file`: in a lane, without a name in the backing. `link`: in `.firn/placing`. `dangling`: in the backing, to a
    /// file that is not in its lane.
    pub kind: &'static str,
    /// Where it is.
    #[serde(with = "firn_protocol::path::exact")]
    pub path: PathBuf,
    /// Its length, if it is a file.
    pub bytes: u64,
    /// It was removed.
    pub is_removed: bool,
}

/// A backing that is not mounted on this host, as long as the locks are held.
pub(crate) fn open_unmounted(
    backing: &Path,
    options: &Options,
) -> Result<(PathBuf, DirBacking, Locks), AttachError> {
    let backing = preflight::check_backing(backing, false)?;
    let files = find_runtime_files(&backing, options)?;
    let locks = Locks::take(&backing, &files, None, Sharing::Alone)?;
    let directory = DirBacking::open(&backing).map_err(|source| AttachError::BackingUnusable {
        path: backing.clone(),
        source,
    })?;
    Ok((backing, directory, locks))
}
