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
//! | no mark and no file, no `head` and no index | its maker died before the first write | the container goes |
//! | no mark and no file | removed past Firn, or while a directory was damaged | it is kept, and named |
//!
//! A mark of a host that lives says that the host is at it, and all others leave the container alone.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;

use firn_backing::{Backing, Errno, Kind, Result, Time};
use firn_hosts::own::{self, STUBS, TOP};
use firn_hosts::{OwnError, VoteDir};

use crate::backing::{CONTAINERS, Liveness};
use crate::file_dir::{self, Listed};
use crate::file_id::FileId;
use crate::head::HEAD;
use crate::lag::is_gone;
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
    /// Looks for the container of this name. The name of a file's directory stands for all that may be in it, where that
    /// is not to be believed.
    pub(crate) fn find(base: &'a B, top: &B::Inode, name: &str, host: &'a str) -> Result<Self> {
        match find_in_file_dir(base, top, name, host) {
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

fn find_in_file_dir<'a, B: Backing>(
    base: &'a B,
    top: &B::Inode,
    name: &str,
    host: &'a str,
) -> std::result::Result<Option<VoteDir<'a, B>>, OwnError> {
    let container = FileId::of_container(name.as_bytes()).map(|(id, _)| id);
    let Some(id) = container.or_else(|| FileId::of_dir(name.as_bytes())) else {
        return Ok(None);
    };
    match file_dir::find(base, top, id)? {
        Some(dir) if container.is_some() => VoteDir::find(base, &dir, name, host),
        _ => Ok(None),
    }
}

/// Takes the marks from a container.
pub(crate) fn unmark<B: Backing>(base: &B, container: &VoteDir<'_, B>) -> Result<()> {
    for mark in [DYING, DEAD] {
        remove_mark(base, container, mark)?;
    }
    base.sync_dir(container.dir())
}

fn remove_mark<B: Backing>(base: &B, container: &VoteDir<'_, B>, mark: &str) -> Result<()> {
    match base.unlink(container.dir(), OsStr::new(mark)) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Takes back what this host said when it ran last: that it writes to containers. Removes what is left of containers whose
/// removal some host began, and containers of files that this host, or another one that died, has removed. Returns the
/// containers that are left of files that this host was removing.
pub(crate) fn end_last_life<B: Backing>(
    base: &B,
    top: &B::Inode,
    host: &str,
    is_alive: &Liveness,
) -> std::result::Result<HashSet<String>, OwnError> {
    let is_over = |by: &str| -> Result<bool> { Ok(by == host || !is_alive(by)?) };
    put_off(remove_remains(base, top))?;
    let mut marked = HashSet::new();
    for (_, name) in list_containers(base, top)? {
        // One that is not as it must be is not read either, and is named where its file is opened.
        let Ok(Some(container)) = find_in_file_dir(base, top, &name, host) else {
            continue;
        };
        container.withdraw_hint(WRITING)?;
        let Some(mark) = Mark::of(&container)? else {
            continue;
        };
        let is_removed = mark.is_dead
            && is_over(&mark.by)?
            && put_off(remove_unused(base, top, &container, is_alive))?.unwrap_or(false);
        if !is_removed && mark.by == host {
            marked.insert(name);
        }
    }
    Ok(marked)
}

/// What a host says of a file that loses its last name.
struct Mark {
    by: String,
    /// The name is gone.
    is_dead: bool,
}

impl Mark {
    fn of<B: Backing>(container: &VoteDir<'_, B>) -> Result<Option<Self>> {
        for (mark, is_dead) in [(DEAD, true), (DYING, false)] {
            if let Some(by) = container.read(mark)? {
                let by = String::from_utf8_lossy(&by).into_owned();
                return Ok(Some(Self { by, is_dead }));
            }
        }
        Ok(None)
    }
}

/// A lane that cannot be reached keeps no mount from being made: the logs in it are removed at a later one.
fn put_off<T>(removed: Result<T>) -> Result<Option<T>> {
    match removed {
        Err(Errno::IO) => {
            tracing::warn!("logs of removed files stay for now: what they lie in cannot be read");
            Ok(None)
        }
        done => done.map(Some),
    }
}

/// Removes a container whose file has no users, unless another host that lives writes to it.
fn remove_unused<B: Backing>(
    base: &B,
    top: &B::Inode,
    container: &VoteDir<'_, B>,
    is_alive: &Liveness,
) -> Result<bool> {
    for writer in container.hosts(WRITING)? {
        if writer != container.host() && is_alive(&writer)? {
            return Ok(false);
        }
    }
    match container.retire() {
        Ok(()) => {}
        // Another host came first, if the name does not lead to it any more.
        Err(error) if is_gone(error) && !container.is_current()? => {}
        Err(error) => return Err(error),
    }
    if let Some((id, _)) = FileId::of_container(container.name().as_bytes()) {
        file_dir::remove_empty(base, top, id)?;
    }
    Ok(true)
}

/// Result of the search for containers without files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Orphans {
    /// Removed: their files were.
    pub removed: Vec<String>,
    /// Kept: no host marked their files for removal.
    pub lost: Vec<String>,
    /// Kept for now: a host that lives writes to them, or directories changed all the time.
    pub waiting: Vec<String>,
}

/// The containers that are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Those of files that a host was removing when it died.
    Removals,
    /// All.
    All,
}

/// The search for containers without files.
pub(crate) struct Search<'a, B: Backing> {
    pub(crate) base: &'a B,
    pub(crate) top: &'a B::Inode,
    pub(crate) host: &'a str,
    pub(crate) is_alive: &'a Liveness,
    /// Containers of files that this host was removing when it ran last.
    pub(crate) marked: &'a HashSet<String>,
}

impl<B: Backing> Search<'_, B> {
    /// Removes containers of files that were removed, and what is left of containers whose removal a host began. Names
    /// the containers whose file is gone without a removal. What a living host is working on is left to it.
    ///
    /// Files are searched for in all of the backing, and only where a container gives reason to.
    pub(crate) fn run(&self, scope: Scope) -> Result<Orphans> {
        put_off(remove_remains(self.base, self.top))?;
        let mut orphans = Orphans::default();
        let mut wanted = Vec::new();
        for (id, name) in list_containers(self.base, self.top)? {
            match Found::find(self.base, self.top, &name, self.host)? {
                Found::Container(container) => match Mark::of(&container)? {
                    Some(mark) if !self.is_over(&mark, &name)? => {}
                    Some(mark) if mark.is_dead => self.remove(&container, name, &mut orphans)?,
                    Some(_) => wanted.push((id, name)),
                    None if scope == Scope::All => wanted.push((id, name)),
                    None => {}
                },
                Found::Distrusted if scope == Scope::All => wanted.push((id, name)),
                Found::Distrusted | Found::Gone => {}
            }
        }
        let Searched {
            found,
            missing,
            unknown,
        } = search_files(self.base, wanted)?;
        orphans.waiting.extend(unknown);
        for name in found {
            if let Found::Container(container) = self.find(&name)?
                && let Some(mark) = Mark::of(&container)?
                && self.is_over(&mark, &name)?
            {
                remove_mark(self.base, &container, DYING)?;
                self.base.sync_dir(container.dir())?;
            }
        }
        for name in missing {
            match self.find(&name)? {
                Found::Container(container) if is_lost(&container)? => orphans.lost.push(name),
                Found::Container(container) => self.remove(&container, name, &mut orphans)?,
                Found::Distrusted => orphans.lost.push(name),
                Found::Gone => {}
            }
        }
        Ok(orphans)
    }

    fn find(&self, name: &str) -> Result<Found<'_, B>> {
        Found::find(self.base, self.top, name, self.host)
    }

    /// Whether the host that put a mark died in the removal.
    fn is_over(&self, mark: &Mark, name: &str) -> Result<bool> {
        if mark.by == self.host {
            Ok(self.marked.contains(name))
        } else {
            Ok(!(self.is_alive)(&mark.by)?)
        }
    }

    fn remove(
        &self,
        container: &VoteDir<'_, B>,
        name: String,
        orphans: &mut Orphans,
    ) -> Result<()> {
        if remove_unused(self.base, self.top, container, self.is_alive)? {
            orphans.removed.push(name)
        } else {
            orphans.waiting.push(name)
        }
        Ok(())
    }
}

/// Removes what is left of containers whose removal some host began.
pub fn remove_retired<B: Backing>(base: &B) -> std::result::Result<(), OwnError> {
    if let Some(top) = find_top(base)? {
        put_off(remove_remains(base, &top))?;
    }
    Ok(())
}

fn find_top<B: Backing>(base: &B) -> std::result::Result<Option<B::Inode>, OwnError> {
    let Some((firn, _)) = own::find_dir(base, &base.root(), TOP)? else {
        return Ok(None);
    };
    let top = own::find_dir(base, &firn, CONTAINERS);
    Ok(top.map_err(|error| error.below(TOP))?.map(|(top, _)| top))
}

/// Containers that have no file, by whether a host was removing them; changes nothing.
pub fn find_unowned<B: Backing>(base: &B) -> Result<Unowned> {
    let mut unowned = Unowned::default();
    let Some(top) = find_top(base)? else {
        return Ok(unowned);
    };
    for id in file_dir::list_files(base, &top)? {
        if let Some(dir) = file_dir::find(base, &top, id).ok().flatten() {
            unowned
                .unfinished
                .extend(VoteDir::find_retired(base, &dir)?);
        }
    }
    let containers = list_containers(base, &top)?;
    for name in search_files(base, containers)?.missing {
        match Found::find(base, &top, &name, "")? {
            Found::Container(container) if !is_lost(&container)? => unowned.unfinished.push(name),
            Found::Container(_) | Found::Distrusted => unowned.lost.push(name),
            Found::Gone => {}
        }
    }
    Ok(unowned)
}

/// Containers that have no file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unowned {
    /// A host was removing them, and may have died in that.
    pub unfinished: Vec<String>,
    /// Kept: no host marked their files for removal.
    pub lost: Vec<String>,
}

/// Containers, by whether their files are found.
pub(crate) struct Searched {
    pub(crate) found: Vec<String>,
    pub(crate) missing: Vec<String>,
    /// Directories changed all the time.
    pub(crate) unknown: Vec<String>,
}

/// Walks are repeated until no directory changes during one, but no more often than this.
const WALKS_MAX: usize = 5;

/// Looks for the files of containers. One counts as missing if it was in no directory at one moment: in two walks, between
/// which no directory has changed.
pub(crate) fn search_files<B: Backing>(
    base: &B,
    mut wanted: Vec<(FileId, String)>,
) -> Result<Searched> {
    let mut found = Vec::new();
    let mut last = None;
    for _ in 0..WALKS_MAX {
        if wanted.is_empty() {
            break;
        }
        let ids = wanted.iter().map(|(id, _)| *id).collect();
        let walk = Walk::through(base, &ids)?;
        let is_found = |(id, _): &mut (FileId, String)| walk.found.contains(id);
        found.extend(wanted.extract_if(.., is_found).map(|(_, name)| name));
        if last.is_some_and(|last| last == walk.dirs) {
            return Ok(Searched {
                found,
                missing: wanted.into_iter().map(|(_, name)| name).collect(),
                unknown: Vec::new(),
            });
        }
        last = Some(walk.dirs);
    }
    Ok(Searched {
        found,
        missing: Vec::new(),
        unknown: wanted.into_iter().map(|(_, name)| name).collect(),
    })
}

/// Whether the container's file is gone without a removal: the container has no mark, and has writes.
fn is_lost<B: Backing>(container: &VoteDir<'_, B>) -> Result<bool> {
    let names = container.names()?;
    let is_index = |name: &String| Writer::of_index(name.as_bytes()).is_some();
    let is_marked = names.contains(DYING) || names.contains(DEAD);
    let is_written = names.contains(HEAD) || names.iter().any(is_index);
    Ok(is_written && !is_marked)
}

/// All containers. Where the directory of a file is not to be believed, its name stands for them.
fn list_containers<B: Backing>(base: &B, top: &B::Inode) -> Result<Vec<(FileId, String)>> {
    let mut containers = Vec::new();
    for id in file_dir::list_files(base, top)? {
        match file_dir::list(base, top, id) {
            Ok(listed) => {
                let named = |listed: &Listed| (id, id.container_name(listed.number));
                containers.extend(listed.iter().map(named));
            }
            Err(OwnError::Backing(error)) => return Err(error),
            Err(_) => containers.push((id, id.dir_name())),
        }
    }
    Ok(containers)
}

/// Removes what is left of containers whose removal a host began, and directories of files that have no container.
fn remove_remains<B: Backing>(base: &B, top: &B::Inode) -> Result<()> {
    for id in file_dir::list_files(base, top)? {
        match file_dir::find(base, top, id) {
            Ok(Some(dir)) => VoteDir::remove_retired(base, &dir)?,
            Ok(None) => continue,
            Err(OwnError::Backing(error)) => return Err(error),
            // It is left as it is, and named where its file is opened.
            Err(_) => continue,
        }
        file_dir::remove_empty(base, top, id)?;
    }
    Ok(())
}

/// Whether a directory in `.firn` has files that are to get names: those of transactions and stub trees. A file whose
/// last name was removed may wait in another one for its end.
pub(crate) fn has_files_of_programs(name: &[u8]) -> bool {
    let of_transactions = [&b"tx-"[..], b"undo-", b"host-"];
    name == STUBS.as_bytes()
        || of_transactions
            .iter()
            .any(|prefix| name.starts_with(prefix))
}

/// One walk through all directories but those in `.firn` without files of programs.
struct Walk {
    /// Those of the files that have a name.
    found: HashSet<FileId>,
    /// When each directory outside of `.firn`, which changes all the time, was changed last, before it was read.
    dirs: HashMap<u64, (Time, Time)>,
}

/// A directory on a walk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Within {
    Top,
    Firn,
    /// Below `.firn`.
    Own,
    Files,
}

impl Walk {
    fn through<B: Backing>(base: &B, ids: &HashSet<FileId>) -> Result<Self> {
        let mut walk = Self {
            found: HashSet::new(),
            dirs: HashMap::new(),
        };
        let root = base.root();
        let attr = base.attr(&root)?;
        walk.dirs.insert(attr.ino, (attr.mtime, attr.ctime));
        let mut dirs = vec![(root, Within::Top)];
        while let Some((dir, within)) = dirs.pop() {
            for (name, ino, kind) in own::list(base, &dir)? {
                let is_near = ids.iter().any(|id| id.ino == ino);
                let may_be = matches!(kind, None | Some(Kind::Dir)) || is_near;
                if !may_be || (within == Within::Firn && !has_files_of_programs(&name)) {
                    continue;
                }
                let below = match within {
                    Within::Top if name == TOP.as_bytes() => Within::Firn,
                    Within::Top | Within::Files => Within::Files,
                    Within::Firn | Within::Own => Within::Own,
                };
                match base.lookup(&dir, &OsString::from_vec(name)) {
                    Ok((inode, attr)) if attr.kind == Kind::Dir => {
                        if below == Within::Files {
                            walk.dirs.insert(attr.ino, (attr.mtime, attr.ctime));
                        }
                        dirs.push((inode, below));
                    }
                    Ok((inode, attr)) => {
                        let id = FileId::of(base, &inode, &attr)?;
                        walk.found.extend(id.filter(|id| ids.contains(id)));
                    }
                    Err(Errno::NOENT) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(walk)
    }
}
