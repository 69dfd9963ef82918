//! The directory of one logged file in `.firn/log`. It holds the containers of the file: directories with its logs, one
//! for each generation G.
//!
//! ```text
//! .firn/log/INO-BIRTH/INO-BIRTH-G/
//! ```
//!
//! Each file has its own directory, so that listing the containers of a file costs the same however many files are
//! logged.
//!
//! The directory is made before the first container and removed after the last one.
//!
//! Race: one host makes a container while another host removes the directory. The file system removes only an empty
//! directory, and makes nothing in a removed one. So either the removal fails, or the making host gets ENOENT or ESTALE
//! and begins again.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use firn_backing::{Attr, Backing, DirBacking, Errno, Result};
use firn_hosts::VoteDir;
use firn_hosts::own::{self, OwnError, TOP};

use crate::backing::CONTAINERS;
use crate::file_id::FileId;
use crate::lag::is_gone;

/// A container in a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ListedContainer {
    /// Generation of the file.
    pub(crate) number: u32,
    /// Inode number of the container's directory.
    pub(crate) dir: u64,
}

/// Returns the path of a container from the top of the backing. `container` may also be the name of a half-removed
/// container, or of a file's directory.
pub fn container_path(container: &str) -> PathBuf {
    let mut path = Path::new(TOP).join(CONTAINERS);
    let name = VoteDir::<DirBacking>::name_before_retired(container).unwrap_or(container);
    if let Some((id, _)) = FileId::parse_container_name(name.as_bytes()) {
        path.push(id.dir_name());
    }
    path.join(container)
}

/// Opens the directory of a file. Returns `None` if the file has none.
pub(crate) fn find<B: Backing>(
    backing: &B,
    containers_dir: &B::Inode,
    id: FileId,
) -> std::result::Result<Option<B::Inode>, OwnError> {
    Ok(own::find_dir(backing, containers_dir, &id.dir_name())?.map(|(dir, _)| dir))
}

/// Opens the directory of a container. Returns `None` if nothing has its name.
pub(crate) fn find_container<B: Backing>(
    backing: &B,
    containers_dir: &B::Inode,
    id: FileId,
    generation: u32,
) -> std::result::Result<Option<(B::Inode, Attr)>, OwnError> {
    match find(backing, containers_dir, id)? {
        Some(dir) => own::find_dir(backing, &dir, &id.container_name(generation)),
        None => Ok(None),
    }
}

/// Opens the directory of a container, and makes it if it does not exist. Fails with ENOENT or ESTALE if another host
/// removes the file's directory meanwhile.
pub(crate) fn create_container<B: Backing>(
    backing: &B,
    containers_dir: &B::Inode,
    id: FileId,
    generation: u32,
) -> std::result::Result<B::Inode, OwnError> {
    let dir = own::make_dir(backing, containers_dir, &id.dir_name())?;
    own::make_dir(backing, &dir, &id.container_name(generation))
}

/// Removes the directory of a file if it is empty.
pub(crate) fn remove_empty<B: Backing>(
    backing: &B,
    containers_dir: &B::Inode,
    id: FileId,
) -> Result<()> {
    match backing.rmdir(containers_dir, OsStr::new(&id.dir_name())) {
        Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(()),
        Err(error) if is_gone(error) => Ok(()),
        removed => removed,
    }
}

/// Makes the names of a file's containers durable, and the name of their directory.
pub(crate) fn sync<B: Backing>(backing: &B, containers_dir: &B::Inode, id: FileId) -> Result<()> {
    if let Some(dir) = find(backing, containers_dir, id)? {
        backing.sync_dir(&dir)?;
    }
    backing.sync_dir(containers_dir)
}

/// Lists the containers of a file, the directories with its logs. The list is empty if the file has none.
pub(crate) fn list<B: Backing>(
    backing: &B,
    containers_dir: &B::Inode,
    id: FileId,
) -> std::result::Result<Vec<ListedContainer>, OwnError> {
    let Some(dir) = find(backing, containers_dir, id)? else {
        return Ok(Vec::new());
    };
    let names = match own::list(backing, &dir) {
        Ok(names) => names,
        // Another host has removed the directory since it was found.
        Err(error) if is_gone(error) => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let mut containers = Vec::new();
    for (name, ino, _) in names {
        if let Some((file, number)) = FileId::parse_container_name(&name)
            && file == id
        {
            containers.push(ListedContainer { number, dir: ino });
        }
    }
    Ok(containers)
}

/// Lists the files that have a directory in `.firn/log`, which holds the containers with their logs.
///
/// Fails if a container lies directly in `.firn/log`, as up to version 4. Its file would be read without the
/// container's bytes.
pub(crate) fn list_files<B: Backing>(
    backing: &B,
    containers_dir: &B::Inode,
) -> std::result::Result<Vec<FileId>, OwnError> {
    let names = own::list(backing, containers_dir).map_err(OwnError::Backing)?;
    let mut files = Vec::new();
    for (name, ..) in &names {
        if FileId::parse_container_name(name).is_some() {
            let name = String::from_utf8_lossy(name).into_owned();
            return Err(OwnError::EarlierVersion { name }
                .below(CONTAINERS)
                .below(TOP));
        }
        files.extend(FileId::parse_dir_name(name));
    }
    Ok(files)
}
