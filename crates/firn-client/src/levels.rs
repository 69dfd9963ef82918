//! Finds the durability level of each file at or below a path: whether its bytes are in memory only, in the backing, or
//! synced there. All commands that show levels use this module.
//!
//! Terms
//! * *firnd*: the process that serves a mount.
//! * *backing*: the directory that the mount serves.
//! * *arena*: the shared memory with the bytes that are not in the backing yet.
//! * *drained*: all bytes of the file are in the backing. *Logged*: some of them are in logs there, not in the file.
//! * *idle*: firnd does not list the file. It lists files that are open, have bytes in the arena, or were synced. It
//!   also lists *cut* files: their writer was killed before it closed them.
//!
//! Each idle file is drained or logged. An attribute of the file says which. If the attribute cannot be read, the file
//! counts as drained.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use firn_format::durability::DurabilityLevel;
use firn_format::record::Ending;
use firn_protocol::{FileStatus, Status};
use rustix::fs::lgetxattr;

use crate::connect::Connection;
use crate::error::ClientError;
use crate::find::MountLocation;

/// Extended attribute through which a file of a mount reports its level.
const LEVEL_ATTRIBUTE: &str = "user.firn.state";
/// Bytes of the buffer for the name of a level. All names are shorter.
const LEVEL_BYTES_MAX: usize = 16;
/// Extended attribute of a file in the backing. The file has it as long as some of its bytes are in logs.
const LOGGED_ATTRIBUTE: &str = "user.firn.logged";

/// Finds the levels of the files at and below one place on a mount, or in a backing that is not mounted.
pub struct Levels {
    /// The files that firnd lists, by their path below the mount point.
    known: HashMap<PathBuf, FileStatus>,
    /// How the level of any other file is found.
    idle: IdleFiles,
    /// The backing, if the mount is a stub tree; otherwise `None`. The files of a stub tree, the stubs, are always
    /// empty, so only the backing shows the sizes of drained files.
    stub_backing: Option<PathBuf>,
}

/// How to find the level of an idle file: a file that firnd does not list.
enum IdleFiles {
    /// All idle files are drained, because no file of this mount has bytes in logs. No attribute is read.
    Drained,
    /// Read [`LEVEL_ATTRIBUTE`] of the file below this mount point.
    InMount(PathBuf),
    /// Read [`LOGGED_ATTRIBUTE`] of the file in this backing.
    InBacking(PathBuf),
}

impl Levels {
    /// Returns what is needed to look up the durability level of any file at or below `place`: the files that firnd
    /// (the process that serves the mount) lists, and how the levels of all other files, the *idle* ones, are found.
    ///
    /// `connection` and `status` are of the mount of `place`. The caller must list the files before it reads `status`.
    /// Otherwise `status` may miss logs (bytes outside their file) of a listed file.
    pub fn request(
        connection: &mut Connection,
        place: &MountLocation,
        status: &Status,
    ) -> Result<Self, ClientError> {
        let files = connection.known_files(&place.relative)?;
        let mut known = HashMap::<PathBuf, FileStatus>::new();
        for file in files {
            let path = file.path.as_path().to_owned();
            // If a file was replaced in the backing (the served directory) without the mount, firnd lists both files
            // under one name. The lower level counts.
            if let Some(other_file) = known.get(&path)
                && other_file.state < file.state
            {
                continue;
            }
            known.insert(path, file);
        }
        let mount = &place.mount;
        // With this option, data is written to logs. A file may then get its first log after the status was read.
        let is_log_layout = status.options.iter().any(|option| option == "layout=log");
        let has_logs = status.logged_files > 0 || is_log_layout;
        let idle = if !has_logs {
            IdleFiles::Drained
        } else if mount.is_tree {
            // The files of a stub tree (a mount without FUSE) are empty stand-ins, so the backing is examined.
            IdleFiles::InBacking(mount.backing.clone())
        } else {
            IdleFiles::InMount(mount.mount_point.clone())
        };
        Ok(Self {
            known,
            idle,
            stub_backing: mount.is_tree.then(|| mount.backing.clone()),
        })
    }

    /// Returns the levels of the files in a backing that is not mounted. There is no mount point, so callers pass
    /// absolute paths to [`Levels::level`] and the other functions.
    pub fn for_unmounted_backing() -> Self {
        Self {
            known: HashMap::new(),
            // A path joined to the empty path stays as it is.
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
        match self.known(relative) {
            Some(file) => file.state,
            None => self.level_of_idle(relative),
        }
    }

    /// Returns the size in bytes of the file at a path below the mount point; `shown_bytes` is the size that stat(2)
    /// shows.
    ///
    /// A stub is always empty. Its data is in the backing, and the held part of it is in the arena.
    pub fn size(&self, relative: &Path, shown_bytes: u64) -> u64 {
        let backing_bytes = match &self.stub_backing {
            Some(backing) => backing
                .join(relative)
                .symlink_metadata()
                .map_or(0, |metadata| metadata.len()),
            None => 0,
        };
        let held_end = self.known(relative).map_or(0, |file| file.held_end);
        shown_bytes.max(backing_bytes).max(held_end)
    }

    /// Returns whether the writers closed the file. The default is `Closed` for files that firnd does not list.
    pub fn ending(&self, relative: &Path) -> Ending {
        self.known(relative)
            .map_or(Ending::Closed, |file| file.ending)
    }

    /// Returns the level of a file that firnd does not list: all of its bytes are in the backing (`Drained`), or some
    /// are in logs there (`Logged`). Returns `Drained` if the attribute that says which cannot be read.
    fn level_of_idle(&self, relative: &Path) -> DurabilityLevel {
        match &self.idle {
            IdleFiles::Drained => DurabilityLevel::Drained,
            IdleFiles::InMount(mount_point) => {
                let level = read_level_attribute(&mount_point.join(relative));
                level.unwrap_or(DurabilityLevel::Drained)
            }
            IdleFiles::InBacking(backing) => {
                let path = backing.join(relative);
                // Only the existence of the attribute counts, so its value is not read.
                match lgetxattr(path, LOGGED_ATTRIBUTE, &mut [0; 0]) {
                    Ok(_) => DurabilityLevel::Logged,
                    Err(_) => DurabilityLevel::Drained,
                }
            }
        }
    }
}

/// Reads the level that a file of a mount reports. Returns `None` if the attribute cannot be read, or has no valid
/// value.
fn read_level_attribute(path: &Path) -> Option<DurabilityLevel> {
    let mut value = [0; LEVEL_BYTES_MAX];
    let len = lgetxattr(path, LEVEL_ATTRIBUTE, &mut value).ok()?;
    DurabilityLevel::parse(&value[..len])
}
