//! Finds the durability level of each file at or below a path. All commands that show levels use this module.
//!
//! firnd lists the files about which it knows more than the backing shows. These files are open, have bytes in the
//! arena, were synced, or were cut. Every other file is drained or logged. If the attribute of such a file cannot be
//! read, the file counts as drained.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use firn_format::durability::DurabilityLevel;
use firn_format::record::Ending;
use firn_protocol::{FileStatus, Status};
use rustix::fs::lgetxattr;

use crate::connect::Connection;
use crate::error::ClientError;
use crate::find::Place;

/// Extended attribute through which a file of a mount reports its level.
const LEVEL_ATTRIBUTE: &str = "user.firn.state";
/// Extended attribute of a file in the backing. The file has it as long as some of its bytes are in logs.
const LOGGED_ATTRIBUTE: &str = "user.firn.logged";

/// Levels of the files of a place.
pub struct Levels {
    /// The files that firnd lists, by their path below the mount point.
    known: HashMap<PathBuf, FileStatus>,
    /// How the level of any other file is found.
    idle: IdleFiles,
    /// Backing of the files for which the stubs stand. `None` if the mount is not a stub tree.
    stub_backing: Option<PathBuf>,
}

/// How to find the level of an idle file: a file that firnd does not list.
enum IdleFiles {
    /// No file of this mount is in logs, so every idle file is drained.
    Drained,
    /// Read [`LEVEL_ATTRIBUTE`] of the file below this mount point.
    InMount(PathBuf),
    /// Read [`LOGGED_ATTRIBUTE`] of the file in this backing.
    InBacking(PathBuf),
}

impl Levels {
    /// Asks firnd for the levels of all files at or below a place. The caller must have read `status` after it found
    /// the place.
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
            // A file that was replaced outside the mount may still be listed under its old name. The lower level
            // counts.
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
                (true, true) => IdleFiles::InBacking(place.mount.backing.clone()),
                (true, false) => IdleFiles::InMount(place.mount.mount_point.clone()),
            },
            stub_backing: place.mount.is_tree.then(|| place.mount.backing.clone()),
        })
    }

    /// Returns the levels of the files in a backing that is not mounted.
    pub fn of_backing() -> Self {
        Self {
            known: HashMap::new(),
            idle: IdleFiles::InBacking(PathBuf::new()),
            stub_backing: None,
        }
    }

    /// Returns what firnd reports about the file at a path below the mount point.
    pub fn known(&self, relative: &Path) -> Option<&FileStatus> {
        self.known.get(relative)
    }

    /// Returns all files that firnd listed.
    pub fn all_known(&self) -> impl Iterator<Item = &FileStatus> {
        self.known.values()
    }

    /// Returns the durability level that all bytes of the file have. The path is relative to the mount point.
    pub fn level(&self, relative: &Path) -> DurabilityLevel {
        let level = self.known(relative).map(|file| file.state);
        level.unwrap_or_else(|| self.level_of_idle(relative))
    }

    /// Returns the size in bytes of the file at a path below the mount point; `shown_bytes` is the size that stat(2)
    /// shows.
    ///
    /// A stub is always empty. Its data is in the backing, and the held part of it is in the arena.
    pub fn size(&self, relative: &Path, shown_bytes: u64) -> u64 {
        let backing = self.stub_backing.as_ref();
        let in_backing = backing
            .and_then(|backing| backing.join(relative).symlink_metadata().ok())
            .map_or(0, |found| found.len());
        let held = self.known(relative).map_or(0, |known| known.held_end);
        shown_bytes.max(in_backing).max(held)
    }

    /// Returns whether the writers closed the file. The default is `Closed` for files that firnd does not list.
    pub fn ending(&self, relative: &Path) -> Ending {
        self.known(relative)
            .map_or(Ending::Closed, |file| file.ending)
    }

    /// Returns the level of a file that firnd does not list. Returns `Drained` if the attribute cannot be read.
    fn level_of_idle(&self, relative: &Path) -> DurabilityLevel {
        match &self.idle {
            IdleFiles::Drained => DurabilityLevel::Drained,
            IdleFiles::InMount(mount_point) => {
                let mut level = [0; 16];
                lgetxattr(mount_point.join(relative), LEVEL_ATTRIBUTE, &mut level)
                    .ok()
                    .and_then(|len| DurabilityLevel::parse(&level[..len]))
                    .unwrap_or(DurabilityLevel::Drained)
            }
            IdleFiles::InBacking(backing) => {
                match lgetxattr(backing.join(relative), LOGGED_ATTRIBUTE, &mut [0; 0]) {
                    Ok(_) => DurabilityLevel::Logged,
                    Err(_) => DurabilityLevel::Drained,
                }
            }
        }
    }
}
