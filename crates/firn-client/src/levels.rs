//! Which level each file of a place has, for all verbs that show it.
//!
//! firnd lists the files of which it knows more than the backing shows: those that are open, have bytes in the arena,
//! were synced, or were cut. Any other file is drained, or logged; an unknown level is not claimed.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use firn_format::durability::DurabilityLevel;
use firn_format::record::Ending;
use firn_protocol::{FileStatus, Status};
use rustix::fs::lgetxattr;

use crate::connect::Connection;
use crate::error::ClientError;
use crate::find::Place;

/// The attribute in which a file of a mount says its level.
const LEVEL_ATTRIBUTE: &str = "user.firn.state";
/// The attribute that a file in the backing has as long as bytes of it are in logs.
const LOGGED_ATTRIBUTE: &str = "user.firn.logged";

/// What is known of the files of a place.
pub struct Levels {
    known: HashMap<PathBuf, FileStatus>,
    idle: IdleFiles,
    /// Where the files are that stubs stand for, if the mount is a stub tree.
    stub_backing: Option<PathBuf>,
}

/// How the level of a file is found that firnd does not list.
enum IdleFiles {
    /// No file of this mount is in logs.
    Drained,
    /// The mount says it of each file below this mount point.
    Ask(PathBuf),
    /// The file in this backing says whether it is in logs.
    LookAt(PathBuf),
}

impl Levels {
    /// Levels of all files at or below a place, by its firnd. `status` is not older than the place.
    pub fn ask(
        connection: &mut Connection,
        place: &Place,
        status: &Status,
    ) -> Result<Self, ClientError> {
        let files = connection.known_files(&place.relative)?;
        let has_logs =
            status.logged_files > 0 || status.options.iter().any(|option| option == "layout=log");
        let mut known = HashMap::<PathBuf, FileStatus>::new();
        for file in files {
            // A file that was replaced beside the mount may be listed by the name that it had: the lower answer counts.
            let path = file.path.as_path().to_owned();
            let is_higher = |other: &FileStatus| other.state < file.state;
            if !known.get(&path).is_some_and(is_higher) {
                known.insert(path, file);
            }
        }
        Ok(Self {
            known,
            idle: match (has_logs, place.mount.is_tree) {
                (false, _) => IdleFiles::Drained,
                (true, true) => IdleFiles::LookAt(place.mount.backing.clone()),
                (true, false) => IdleFiles::Ask(place.mount.mount_point.clone()),
            },
            stub_backing: place.mount.is_tree.then(|| place.mount.backing.clone()),
        })
    }

    /// Levels of the files in a backing that is not mounted.
    pub fn of_backing() -> Self {
        Self {
            known: HashMap::new(),
            idle: IdleFiles::LookAt(PathBuf::new()),
            stub_backing: None,
        }
    }

    /// What firnd says of the file at a path below the mount point.
    pub fn known(&self, relative: &Path) -> Option<&FileStatus> {
        self.known.get(relative)
    }

    /// All files that firnd says something of.
    pub fn all_known(&self) -> impl Iterator<Item = &FileStatus> {
        self.known.values()
    }

    /// Durability level of all bytes of the file at a path below the mount point.
    pub fn level(&self, relative: &Path) -> DurabilityLevel {
        let level = self.known(relative).map(|file| file.state);
        level.unwrap_or_else(|| self.level_of_idle(relative))
    }

    /// Bytes of the file at a path below the mount point, of which stat(2) shows `shown_bytes`. A stub is empty: what it
    /// stands for is in the backing, as far as it is not held.
    pub fn size(&self, relative: &Path, shown_bytes: u64) -> u64 {
        let backing = self.stub_backing.as_ref();
        let in_backing = backing
            .and_then(|backing| backing.join(relative).symlink_metadata().ok())
            .map_or(0, |found| found.len());
        let held = self.known(relative).map_or(0, |known| known.held_end);
        shown_bytes.max(in_backing).max(held)
    }

    /// Whether its writers closed it, as far as that is known.
    pub fn ending(&self, relative: &Path) -> Ending {
        self.known(relative)
            .map_or(Ending::Closed, |file| file.ending)
    }

    fn level_of_idle(&self, relative: &Path) -> DurabilityLevel {
        match &self.idle {
            IdleFiles::Drained => DurabilityLevel::Drained,
            IdleFiles::Ask(top) => {
                let mut level = [0; 16];
                lgetxattr(top.join(relative), LEVEL_ATTRIBUTE, &mut level)
                    .ok()
                    .and_then(|len| DurabilityLevel::parse(&level[..len]))
                    .unwrap_or(DurabilityLevel::Drained)
            }
            IdleFiles::LookAt(top) => {
                match lgetxattr(top.join(relative), LOGGED_ATTRIBUTE, &mut [0; 0]) {
                    Ok(_) => DurabilityLevel::Logged,
                    Err(_) => DurabilityLevel::Drained,
                }
            }
        }
    }
}
