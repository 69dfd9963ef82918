//! The directory of one file in `.firn/log`, which has the containers of the file.
//!
//! ```text
//! .firn/log/INO-BIRTH/INO-BIRTH-G/
//! ```
//!
//! A look at a file lists the directory of that file, so it costs the same however many files are logged.
//!
//! The directory is made before the first container and removed after the last one. The file system removes it only if it
//! is empty, and makes nothing in a removed one. A host that makes a container while another host removes the directory
//! therefore keeps the directory, or is told that it is gone and begins again.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use firn_backing::{Attr, Backing, DirBacking, Errno, Result};
use firn_hosts::VoteDir;
use firn_hosts::own::{self, OwnError, TOP};

use crate::backing::CONTAINERS;
use crate::file_id::FileId;
use crate::lag::is_gone;

/// A container that a listing has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Listed {
    pub(crate) number: u32,
    /// Inode number of its directory.
    pub(crate) dir: u64,
}

/// Path of a container, or of what is left of one, from the top of the backing. The name of a file's directory is its own path.
pub fn container_path(container: &str) -> PathBuf {
    let mut path = Path::new(TOP).join(CONTAINERS);
    let name = VoteDir::<DirBacking>::name_before_retired(container).unwrap_or(container);
    if let Some((id, _)) = FileId::of_container(name.as_bytes()) {
        path.push(id.dir_name());
    }
    path.join(container)
}

/// Opens the directory of a file; `None` if the file has none.
pub(crate) fn find<B: Backing>(
    base: &B,
    top: &B::Inode,
    id: FileId,
) -> std::result::Result<Option<B::Inode>, OwnError> {
    Ok(own::find_dir(base, top, &id.dir_name())?.map(|(dir, _)| dir))
}

/// Opens the directory of a container; `None` if nothing has its name.
pub(crate) fn find_container<B: Backing>(
    base: &B,
    top: &B::Inode,
    id: FileId,
    generation: u32,
) -> std::result::Result<Option<(B::Inode, Attr)>, OwnError> {
    match find(base, top, id)? {
        Some(dir) => own::find_dir(base, &dir, &id.container_name(generation)),
        None => Ok(None),
    }
}

/// Opens the directory of a container, made if nothing has its name. ENOENT or ESTALE if another host removes the
/// directory of the file meanwhile.
pub(crate) fn make_container<B: Backing>(
    base: &B,
    top: &B::Inode,
    id: FileId,
    generation: u32,
) -> std::result::Result<B::Inode, OwnError> {
    let dir = own::dir(base, top, &id.dir_name())?;
    own::dir(base, &dir, &id.container_name(generation))
}

/// Removes the directory of a file if it has nothing.
pub(crate) fn remove_empty<B: Backing>(base: &B, top: &B::Inode, id: FileId) -> Result<()> {
    match base.rmdir(top, OsStr::new(&id.dir_name())) {
        Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(()),
        Err(error) if is_gone(error) => Ok(()),
        removed => removed,
    }
}

/// Makes the names of a file's containers durable.
pub(crate) fn sync<B: Backing>(base: &B, top: &B::Inode, id: FileId) -> Result<()> {
    if let Some(dir) = find(base, top, id)? {
        base.sync_dir(&dir)?;
    }
    base.sync_dir(top)
}

/// The containers of a file.
pub(crate) fn list<B: Backing>(
    base: &B,
    top: &B::Inode,
    id: FileId,
) -> std::result::Result<Vec<Listed>, OwnError> {
    let Some(dir) = find(base, top, id)? else {
        return Ok(Vec::new());
    };
    let names = match own::list(base, &dir) {
        // It was removed since it was found.
        Err(error) if is_gone(error) => Vec::new(),
        listed => listed?,
    };
    let listed = names.iter().filter_map(|(name, dir, _)| {
        let (of, number) = FileId::of_container(name)?;
        (of == id).then_some(Listed { number, dir: *dir })
    });
    Ok(listed.collect())
}

/// The files that have a directory. An error where a container lies beside them, as up to version 4: its bytes would be
/// missing in its file.
pub(crate) fn list_files<B: Backing>(
    base: &B,
    top: &B::Inode,
) -> std::result::Result<Vec<FileId>, OwnError> {
    let names = own::list(base, top).map_err(OwnError::Backing)?;
    let is_container = |name: &[u8]| FileId::of_container(name).is_some();
    if let Some((name, ..)) = names.iter().find(|(name, ..)| is_container(name)) {
        let name = String::from_utf8_lossy(name).into_owned();
        return Err(OwnError::EarlierVersion { name }
            .below(CONTAINERS)
            .below(TOP));
    }
    let ids = names.iter().filter_map(|(name, ..)| FileId::of_dir(name));
    Ok(ids.collect())
}
