//! Containers whose files have no name any more.
//!
//! ```text
//! dying    a host, named in it, is about to remove the last name
//! dead     it has removed it: the container goes when that host has closed the file, or died
//! ```
//!
//! | found | means | what becomes of it |
//! |---|---|---|
//! | no mark, and the file | in use | nothing |
//! | `dying`, and the file | its host died before it removed the name | the mark goes |
//! | `dying` and no file, or `dead` | its host died after it removed the name | the container goes |
//! | no mark and no file, no `head` and no index | its maker died before anybody wrote to it | the container goes |
//! | no mark and no file | removed by somebody beside Firn, or while a directory was damaged | it is kept, and named |

use std::collections::{BTreeSet, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;

use firn_backing::{Backing, Errno, Kind, Result};
use firn_rendezvous::own::{self, TOP};
use firn_rendezvous::{OwnError, VoteDir};

use crate::backing::{CONTAINERS, Liveness};
use crate::file_id::FileId;
use crate::head::HEAD;
use crate::names::Writer;
use crate::seal::WRITING;

pub(crate) const DYING: &str = "dying";
pub(crate) const DEAD: &str = "dead";

/// The directory of a container.
pub(crate) enum Found<'a, B: Backing> {
    Container(VoteDir<'a, B>),
    /// It is not this user's, or open to others: nothing in it is read or changed.
    Distrusted,
    Gone,
}

impl<'a, B: Backing> Found<'a, B> {
    /// Looks for the container of this name.
    pub(crate) fn find(base: &'a B, top: &B::Inode, name: &str, host: &'a str) -> Result<Self> {
        match VoteDir::find(base, top, name, host) {
            Ok(Some(container)) => Ok(Self::Container(container)),
            Ok(None) => Ok(Self::Gone),
            Err(OwnError::Backing(error)) => Err(error),
            Err(error) => {
                tracing::warn!("a container is left as it is: {error}");
                Ok(Self::Distrusted)
            }
        }
    }
}

/// Takes the marks from a container.
pub(crate) fn unmark<B: Backing>(base: &B, container: &VoteDir<'_, B>) -> Result<()> {
    for mark in [DYING, DEAD] {
        match base.unlink(container.dir(), OsStr::new(mark)) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
    }
    base.sync_dir(container.dir())
}

/// Takes back what this host said when it ran last: that it writes to containers. Removes what is left of containers whose
/// removal some host began, and containers of files that this host, or another one that died, has removed.
pub(crate) fn end_last_life<B: Backing>(
    base: &B,
    top: &B::Inode,
    host: &str,
    is_alive: &Liveness,
) -> std::result::Result<(), OwnError> {
    put_off(VoteDir::remove_retired(base, top))?;
    for (name, ..) in own::list(base, top)? {
        if FileId::of_container(&name).is_none() {
            continue;
        }
        let name = String::from_utf8_lossy(&name).into_owned();
        // One that is not as it must be is not read either, and is named where its file is opened.
        let Ok(Some(container)) = VoteDir::find(base, top, &name, host) else {
            continue;
        };
        container.withdraw_hint(WRITING)?;
        if let Some(by) = container.read(DEAD)? {
            let by = String::from_utf8_lossy(&by).into_owned();
            let is_closed = by == host || !is_alive(&by)?;
            put_off(remove_unused(&container, host, is_closed, is_alive).map(drop))?;
        }
    }
    Ok(())
}

/// A lane that cannot be reached keeps no mount from being made: the logs in it are removed at a later one.
fn put_off(removed: Result<()>) -> Result<()> {
    match removed {
        Err(Errno::IO) => {
            tracing::warn!("logs of removed files stay for now: what they lie in cannot be read");
            Ok(())
        }
        done => done,
    }
}

/// Removes a container that is `closed` by who removed its file, unless another host that lives writes to it.
fn remove_unused<B: Backing>(
    container: &VoteDir<'_, B>,
    host: &str,
    is_closed: bool,
    is_alive: &Liveness,
) -> Result<bool> {
    for writer in container.hosts(WRITING)? {
        if writer != host && is_alive(&writer)? {
            return Ok(false);
        }
    }
    if !is_closed {
        return Ok(false);
    }
    match container.retire() {
        // Another host came first.
        Ok(()) | Err(Errno::NOENT | Errno::STALE) => Ok(true),
        Err(error) => Err(error),
    }
}

/// What was found of containers without files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Orphans {
    /// Removed: their files were.
    pub removed: Vec<String>,
    /// Kept: nobody said that their files were to be removed.
    pub lost: Vec<String>,
}

/// Goes through all files for those that containers are of. Nobody may rename meanwhile; what is missed once is looked
/// for again.
pub(crate) fn find_orphans<B: Backing>(
    base: &B,
    top: &B::Inode,
    host: &str,
    is_alive: &Liveness,
) -> Result<Orphans> {
    let Searched { found, missing } = search_files(base, top)?;
    for (_, name) in found {
        if let Found::Container(container) = Found::find(base, top, &name, host)?
            && container.names()?.contains(DYING)
        {
            unmark(base, &container)?;
        }
    }
    let mut orphans = Orphans::default();
    for (_, name) in missing {
        let container = match Found::find(base, top, &name, host)? {
            Found::Container(container) => container,
            Found::Distrusted => {
                orphans.lost.push(name);
                continue;
            }
            Found::Gone => continue,
        };
        let names = container.names()?;
        if !is_marked(&names) && !is_unused(&names) {
            orphans.lost.push(name);
        } else if remove_unused(&container, "", true, is_alive)? {
            orphans.removed.push(name);
        }
    }
    Ok(orphans)
}

/// Those of which `find_orphans` says that they are lost; changes nothing.
pub fn find_lost<B: Backing>(base: &B) -> Result<Vec<String>> {
    let Some((firn, _)) = own::find_dir(base, &base.root(), TOP)? else {
        return Ok(Vec::new());
    };
    let Some((top, _)) = own::find_dir(base, &firn, CONTAINERS)? else {
        return Ok(Vec::new());
    };
    let mut lost = Vec::new();
    for (_, name) in search_files(base, &top)?.missing {
        let is_lost = match Found::find(base, &top, &name, "")? {
            Found::Container(container) => {
                let names = container.names()?;
                !is_marked(&names) && !is_unused(&names)
            }
            Found::Distrusted => true,
            Found::Gone => false,
        };
        if is_lost {
            lost.push(name);
        }
    }
    Ok(lost)
}

/// Containers, by whether their files are found.
struct Searched {
    found: Vec<(FileId, String)>,
    missing: Vec<(FileId, String)>,
}

fn search_files<B: Backing>(base: &B, top: &B::Inode) -> Result<Searched> {
    let mut missing = list_containers(base, top)?;
    let mut found = Vec::new();
    for _ in 0..2 {
        let ids = missing.iter().map(|(id, _)| *id).collect();
        let named = find_files(base, &ids)?;
        let is_named = |(id, _): &(FileId, String)| named.contains(id);
        found.extend(missing.extract_if(.., |container| is_named(container)));
    }
    Ok(Searched { found, missing })
}

/// Whether somebody has removed its file, or was about to.
fn is_marked(names: &BTreeSet<String>) -> bool {
    names.contains(DYING) || names.contains(DEAD)
}

/// Whether nobody has written to a container: its maker died.
fn is_unused(names: &BTreeSet<String>) -> bool {
    let has_index = || {
        names
            .iter()
            .any(|name| Writer::of_index(name.as_bytes()).is_some())
    };
    !names.contains(HEAD) && !has_index()
}

fn list_containers<B: Backing>(base: &B, top: &B::Inode) -> Result<Vec<(FileId, String)>> {
    let names = own::list(base, top)?.into_iter();
    let containers = names.filter_map(|(name, ..)| {
        let (id, _) = FileId::of_container(&name)?;
        Some((id, String::from_utf8(name).ok()?))
    });
    Ok(containers.collect())
}

/// Those of the files that have a name.
fn find_files<B: Backing>(base: &B, ids: &HashSet<FileId>) -> Result<HashSet<FileId>> {
    let mut found = HashSet::new();
    let mut dirs = vec![base.root()];
    while let Some(dir) = dirs.pop() {
        for (name, ino, kind) in own::list(base, &dir)? {
            let is_near = ids.iter().any(|id| id.ino == ino);
            let may_be = matches!(kind, None | Some(Kind::Dir)) || is_near;
            if !may_be || name == TOP.as_bytes() {
                continue;
            }
            let name = OsString::from_vec(name);
            match base.lookup(&dir, &name) {
                Ok((inode, attr)) if attr.kind == Kind::Dir => dirs.push(inode),
                Ok((inode, attr)) => {
                    found.extend(FileId::of(base, &inode, &attr)?.filter(|id| ids.contains(id)));
                }
                Err(Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(found)
}
