//! Finds and removes orphans of a backing with lanes (directories for the data of files), which a crash or a power loss
//! may leave.
//!
//! The *primary* is the directory with all names. A file in a lane has a symbolic link there. The *staging directory*
//! has the links of files that are being created or removed. Orphans are files in lanes without a link, links in the
//! staging directory, and links to missing files.

use std::collections::HashSet;
use std::path::PathBuf;

use super::*;

/// A file without a link, or a link without a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Orphan {
    /// A file in a lane whose link has no name in the primary. A crash interrupted its creation or removal.
    File {
        /// Index of the lane.
        lane: usize,
        /// Name of the file in the lane.
        entry: OsString,
        /// Length of the file in bytes.
        bytes: u64,
    },
    /// A link in the staging directory.
    Link {
        /// Name of the link in the staging directory.
        entry: OsString,
    },
    /// A link to a file that is missing in its lane. Programs see a dangling link. Either the file was not synced
    /// before a power loss, or the lane's path now leads to another directory. A person should check which one before
    /// the link is removed.
    Dangling {
        /// Path of the link, relative to the root of the primary.
        path: PathBuf,
    },
}

/// The symbolic links of a primary.
#[derive(Default)]
struct Links {
    /// Inode numbers of the links.
    inos: HashSet<u64>,
    /// Links with the path of a lane's file that lead to no file.
    dangling: Vec<PathBuf>,
}

/// Error of the search for orphans.
#[derive(Debug, thiserror::Error)]
pub enum OrphanError {
    /// The primary cannot be read.
    #[error("cannot read the primary backing: {0}")]
    Primary(Errno),
    /// A lane cannot be read.
    #[error("cannot read lane {lane}: {error}")]
    Lane {
        /// Index of the lane.
        lane: usize,
        /// The error.
        error: Errno,
    },
}

impl<B: Backing> Lanes<B> {
    /// Finds all orphans (files without a link, and links without a file) in the primary, which has all names, and the
    /// lanes.
    ///
    /// The primary and the lanes must not change during the call, because a file that is being created looks like an
    /// orphan. Files of other primaries are not reported. A file without a mark is reported only if it is empty and its
    /// name has the form of Firn's entries.
    pub fn find_orphans(&self) -> std::result::Result<Vec<Orphan>, OrphanError> {
        let links = self.find_all_links().map_err(OrphanError::Primary)?;
        let staged = match &self.setup.staging {
            Some(staging) => names_in(&self.primary, staging).map_err(OrphanError::Primary)?,
            None => Vec::new(),
        };
        let mut orphans: Vec<Orphan> = Vec::new();
        for lane in 0..self.setup.lanes.len() {
            let files = self
                .find_files_without_link(lane, &links.inos)
                .map_err(|error| OrphanError::Lane { lane, error })?;
            orphans.extend(files);
        }
        for entry in staged {
            orphans.push(Orphan::Link { entry });
        }
        for path in links.dangling {
            orphans.push(Orphan::Dangling { path });
        }
        Ok(orphans)
    }

    /// Removes an orphan (a file without a link, or a link without a file) that [`Lanes::find_orphans`] found.
    pub fn remove_orphan(&self, orphan: &Orphan) -> Result<()> {
        match orphan {
            Orphan::File { lane, entry, .. } => {
                let lane = &self.setup.lanes[*lane];
                lane.record_change();
                lane.backing.unlink(&lane.backing.root(), entry)
            }
            Orphan::Link { entry } => self.primary.unlink(self.staging()?, entry),
            Orphan::Dangling { path } => {
                let mut dir = self.primary.root();
                for name in path.parent().into_iter().flatten() {
                    dir = self.primary.lookup(&dir, name)?.0;
                }
                let name = path.file_name().ok_or(Errno::INVAL)?;
                self.primary.unlink(&dir, name)
            }
        }
    }

    /// Returns all symbolic links in the primary outside the staging directory. The links in the staging directory
    /// belong to unfinished creations and removals.
    fn find_all_links(&self) -> Result<Links> {
        let staging_ino = match &self.setup.staging {
            Some(staging) => Some(self.primary.attr(staging)?.ino),
            None => None,
        };
        let mut links = Links::default();
        let mut dirs = vec![(PathBuf::new(), self.primary.root())];
        while let Some((path, dir)) = dirs.pop() {
            for name in names_in(&self.primary, &dir)? {
                let (inode, attr) = self.primary.lookup(&dir, &name)?;
                if attr.kind == Kind::Dir && Some(attr.ino) != staging_ino {
                    dirs.push((path.join(name), inode));
                } else if attr.kind == Kind::Symlink {
                    links.inos.insert(attr.ino);
                    if self.is_dangling(&inode)? {
                        links.dangling.push(path.join(name));
                    }
                }
            }
        }
        Ok(links)
    }

    /// Returns whether a link leads to a lane where its file is missing or is an empty file without a mark.
    fn is_dangling(&self, link: &B::Inode) -> Result<bool> {
        let target = self.primary.readlink(link)?;
        let Some(LinkTarget { lane, entry, .. }) = self.parse_target(&target) else {
            return Ok(false);
        };
        match lane.backing.lookup(&lane.backing.root(), entry) {
            Ok((file, attr)) => is_unfinished_creation(&lane.backing, &file, &attr, entry),
            Err(Errno::NOENT) => Ok(create::is_entry(entry)),
            Err(error) => Err(error),
        }
    }

    /// Returns the files in a lane (a directory for data) to which no link leads. `lane` is the index of the lane, and
    /// `links` has the inode numbers of all links. Files that belong to another directory of names are left out.
    ///
    /// An empty file without a mark, the attribute that names its link, is included. A crash interrupted its creation
    /// before the mark was written.
    fn find_files_without_link(&self, lane: usize, links: &HashSet<u64>) -> Result<Vec<Orphan>> {
        let backing = &self.setup.lanes[lane].backing;
        let root = backing.root();
        let mut orphans = Vec::new();
        for entry in names_in(backing, &root)? {
            let (file, attr) = backing.lookup(&root, &entry)?;
            if attr.kind != Kind::File {
                continue;
            }
            let is_orphan = match mark::read_mark(backing, &file)? {
                Some(mark) => mark.primary == self.setup.id && !links.contains(&mark.link),
                None => is_unfinished_creation(backing, &file, &attr, &entry)?,
            };
            if is_orphan {
                orphans.push(Orphan::File {
                    lane,
                    entry,
                    bytes: attr.size,
                });
            }
        }
        Ok(orphans)
    }
}

/// Returns the number of files in a lane that belong to the primary with this id.
pub fn count_files<B: Backing>(lane: &B, id: u128) -> Result<usize> {
    let root = lane.root();
    let mut count = 0;
    for entry in names_in(lane, &root)? {
        let (file, attr) = lane.lookup(&root, &entry)?;
        if attr.kind != Kind::File {
            continue;
        }
        if mark::read_mark(lane, &file)?.is_some_and(|mark| mark.primary == id) {
            count += 1;
        }
    }
    Ok(count)
}

/// Returns whether a crash interrupted the creation of this file. Such a file is empty, its name has the form of Firn's
/// entries, and it has no mark.
fn is_unfinished_creation<B: Backing>(
    lane: &B,
    file: &B::Inode,
    attr: &Attr,
    entry: &OsStr,
) -> Result<bool> {
    Ok(attr.size == 0 && create::is_entry(entry) && mark::read_mark(lane, file)?.is_none())
}
