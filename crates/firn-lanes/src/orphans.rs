//! What a crash may leave: files in lanes without a link, links in the staging directory, and links to files that a
//! power loss took.

use std::collections::HashSet;
use std::path::PathBuf;

use super::*;

/// A file without a link, or a link without a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Orphan {
    /// A file in a lane whose link has no name in the primary: a crash cut off its creation or removal.
    File {
        /// Index of the lane.
        lane: usize,
        /// Its name there.
        entry: OsString,
        /// Its length in bytes.
        bytes: u64,
    },
    /// A link in the staging directory.
    Link {
        /// Its name there.
        entry: OsString,
    },
    /// A link to a file that its lane does not have; programs see a dangling link. Either the file was not synced, or
    /// the lane is another directory than before: a person should look before the link is removed.
    Dangling {
        /// Where the link is, relative to the top of the primary.
        path: PathBuf,
    },
}

/// The symbolic links of a primary.
#[derive(Default)]
struct Links {
    /// Inode numbers.
    inos: HashSet<u64>,
    /// Links of Firn's form that lead nowhere.
    dangling: Vec<PathBuf>,
}

/// Why orphans could not be found.
#[derive(Debug, thiserror::Error)]
pub enum OrphanError {
    /// The primary.
    #[error("cannot read the primary backing: {0}")]
    Primary(Errno),
    /// A lane.
    #[error("cannot read lane {lane}: {error}")]
    Lane {
        /// Its number, from 0.
        lane: usize,
        /// Why.
        error: Errno,
    },
}

impl<B: Backing> Lanes<B> {
    /// Walks the primary and the lanes, which must not change meanwhile: a file that is just being made looks like an
    /// orphan. Files of other primaries, and files that carry no mark, are not reported.
    pub fn find_orphans(&self) -> std::result::Result<Vec<Orphan>, OrphanError> {
        let links = self.find_links().map_err(OrphanError::Primary)?;
        let staged = match &self.setup.staging {
            Some(staging) => names_in(&self.primary, staging).map_err(OrphanError::Primary)?,
            None => Vec::new(),
        };
        let mut found: Vec<Orphan> = Vec::new();
        for (lane, one) in self.setup.lanes.iter().enumerate() {
            let files = self.unnamed_files(one, &links.inos);
            let files = files.map_err(|error| OrphanError::Lane { lane, error })?;
            found.extend(files.into_iter().map(|(entry, bytes)| Orphan::File {
                lane,
                entry,
                bytes,
            }));
        }
        found.extend(staged.into_iter().map(|entry| Orphan::Link { entry }));
        let dangling = links.dangling.into_iter();
        found.extend(dangling.map(|path| Orphan::Dangling { path }));
        Ok(found)
    }

    /// Removes what [`Lanes::find_orphans`] found.
    pub fn remove_orphan(&self, orphan: &Orphan) -> Result<()> {
        match orphan {
            Orphan::File { lane, entry, .. } => {
                let lane = &self.setup.lanes[*lane];
                lane.note_change();
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

    /// All symbolic links in the primary outside of the staging directory.
    fn find_links(&self) -> Result<Links> {
        let staging = match &self.setup.staging {
            Some(staging) => Some(self.primary.attr(staging)?.ino),
            None => None,
        };
        let mut links = Links::default();
        let mut dirs = vec![(PathBuf::new(), self.primary.root())];
        while let Some((path, dir)) = dirs.pop() {
            for name in names_in(&self.primary, &dir)? {
                let (inode, attr) = self.primary.lookup(&dir, &name)?;
                match attr.kind {
                    Kind::Dir if Some(attr.ino) != staging => dirs.push((path.join(name), inode)),
                    Kind::Symlink => {
                        links.inos.insert(attr.ino);
                        if self.is_dangling(&inode)? {
                            links.dangling.push(path.join(name));
                        }
                    }
                    _ => {}
                }
            }
        }
        Ok(links)
    }

    /// Whether a link names a file that its lane does not have, or has as an empty file without a mark.
    fn is_dangling(&self, link: &B::Inode) -> Result<bool> {
        let target = self.primary.readlink(link)?;
        let Some((_, lane, entry)) = self.lane_of_target(&target) else {
            return Ok(false);
        };
        match lane.backing.lookup(&lane.backing.root(), entry) {
            Ok((file, attr)) => is_unmarked(&lane.backing, &file, &attr, entry),
            Err(Errno::NOENT) => Ok(create::is_entry(entry)),
            Err(error) => Err(error),
        }
    }

    /// Names and lengths of this primary's files in a lane that none of `links` leads to.
    ///
    /// An empty file without a mark counts too: a crash cut its creation off before the mark.
    fn unnamed_files(&self, lane: &Lane<B>, links: &HashSet<u64>) -> Result<Vec<(OsString, u64)>> {
        let root = lane.backing.root();
        let mut unnamed = Vec::new();
        for entry in names_in(&lane.backing, &root)? {
            let (file, attr) = lane.backing.lookup(&root, &entry)?;
            if attr.kind != Kind::File {
                continue;
            }
            let is_orphan = match mark::read(&lane.backing, &file)? {
                Some(mark) => mark.primary == self.setup.id && !links.contains(&mark.link),
                None => is_unmarked(&lane.backing, &file, &attr, &entry)?,
            };
            if is_orphan {
                unnamed.push((entry, attr.size));
            }
        }
        Ok(unnamed)
    }
}

/// How many files in a lane belong to the primary with this id.
pub fn count_files<B: Backing>(lane: &B, id: u128) -> Result<usize> {
    let root = lane.root();
    let mut count = 0;
    for entry in names_in(lane, &root)? {
        let (file, attr) = lane.lookup(&root, &entry)?;
        let is_placed = attr.kind == Kind::File
            && mark::read(lane, &file)?.is_some_and(|mark| mark.primary == id);
        count += usize::from(is_placed);
    }
    Ok(count)
}

/// Whether a crash cut off the creation of this file: it is empty and has no mark.
fn is_unmarked<B: Backing>(lane: &B, file: &B::Inode, attr: &Attr, entry: &OsStr) -> Result<bool> {
    Ok(attr.size == 0 && create::is_entry(entry) && mark::read(lane, file)?.is_none())
}
