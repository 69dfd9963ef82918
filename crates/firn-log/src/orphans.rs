//! Removes the logs of files that have lost their last name, and marks those of files that are losing it.
//!
//! A *container* is a directory with the logs of all hosts for one file. It has a `head`, which makes the container
//! valid, and an index for each host, which lists the bytes in that host's logs.
//!
//! A host that removes a last name puts marks into the file's containers. Each mark names the host:
//!
//! ```text
//! dying    the host is about to remove the last name
//! dead     the host has removed it; the container is removed once that host has closed the file or is dead
//! ```
//!
//! A mark of a live host means that this host is at work, so other hosts leave the container alone. If the host of the
//! mark is dead, or there is no mark:
//!
//! | state | cause | action |
//! |---|---|---|
//! | no mark, the file exists | in use | none |
//! | `dying`, the file exists | the host died before it removed the name | the mark is removed |
//! | `dying` and no file, or `dead` | the host died after it removed the name | the container is removed |
//! | no mark, no file, no `head`, no index | its maker died before the first write | the container is removed |
//! | no mark, no file | the file was removed without Firn, or a directory was damaged | it is kept and reported |

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;

use firn_backing::lock::Mutex;
use firn_backing::{Attr, Backing, Errno, Kind, Result, Time};
use firn_hosts::own::{self, STUBS, TOP};
use firn_hosts::{OwnError, VoteDir};

use crate::backing::{CONTAINERS, Liveness};
use crate::file_dir;
use crate::file_id::FileId;
use crate::head::HEAD;
use crate::lag::is_gone;
use crate::names::Writer;
use crate::seal::WRITING;

/// Mark: a host is about to remove the last name.
pub(crate) const DYING: &str = "dying";
/// Mark: a host has removed the last name.
pub(crate) const DEAD: &str = "dead";

/// Result of a search for a container by its name.
pub(crate) enum ContainerLookup<'a, B: Backing> {
    /// The container exists and is this user's.
    Trusted(VoteDir<'a, B>),
    /// Another user owns it or may change it. Nothing in it is read or changed.
    Distrusted,
    /// There is no such container.
    Gone,
}

impl<'a, B: Backing> ContainerLookup<'a, B> {
    /// Finds the container `name`, a directory with logs of one file, and checks that no other user may have changed
    /// it.
    ///
    /// A file's directory that is not trusted cannot be listed. [`NamedContainer::name`] then is the name of that
    /// directory, and the result for it is `Distrusted`.
    pub(crate) fn find(
        backing: &'a B,
        containers_dir: &B::Inode,
        name: &str,
        host: &'a str,
    ) -> Result<Self> {
        match find_trusted(backing, containers_dir, name, host) {
            Ok(Some(container)) => Ok(Self::Trusted(container)),
            Ok(None) => Ok(Self::Gone),
            Err(OwnError::Backing(error)) => Err(error),
            Err(error) => {
                tracing::warn!("logs of a file are left as they are: {error}");
                Ok(Self::Distrusted)
            }
        }
    }
}

/// Finds a container by its name. Fails if the container or the directory of the file is not trusted, because another
/// user may have changed it. Returns `None` if the container does not exist, or if `name` is that of a file's
/// directory.
fn find_trusted<'a, B: Backing>(
    backing: &'a B,
    containers_dir: &B::Inode,
    name: &str,
    host: &'a str,
) -> std::result::Result<Option<VoteDir<'a, B>>, OwnError> {
    let id_of_container = FileId::parse_container_name(name.as_bytes()).map(|(id, _)| id);
    let is_container = id_of_container.is_some();
    let Some(id) = id_of_container.or_else(|| FileId::parse_dir_name(name.as_bytes())) else {
        return Ok(None);
    };
    // Fails if the file's directory is not trusted. If `name` is that of the directory, only this check matters.
    let Some(dir) = file_dir::find(backing, containers_dir, id)? else {
        return Ok(None);
    };
    if is_container {
        VoteDir::find(backing, &dir, name, host)
    } else {
        Ok(None)
    }
}

/// Removes all marks from a container, durably.
pub(crate) fn unmark<B: Backing>(backing: &B, container: &VoteDir<'_, B>) -> Result<()> {
    for mark in [DYING, DEAD] {
        remove_mark(backing, container, mark)?;
    }
    backing.sync_dir(container.dir())
}

/// Removes one mark from a container.
fn remove_mark<B: Backing>(backing: &B, container: &VoteDir<'_, B>, mark: &str) -> Result<()> {
    match backing.unlink(container.dir(), OsStr::new(mark)) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

/// What a clean-up at a mount needs to know.
pub(crate) struct CleanUpContext<'a> {
    /// Name of this host.
    pub(crate) host: &'a str,
    pub(crate) is_alive: &'a Liveness,
    /// Files that programs of this host still have open, and that have lost their last name.
    pub(crate) open_files: &'a HashSet<FileId>,
}

/// Cleans up, at a mount, what this host's previous run left. (A *run* lasts from a mount to its end or crash.)
///
/// * Removes this host's registrations as a writer.
/// * Removes half-removed containers of all hosts.
/// * Removes containers of files that this host, or a host that is dead now, has removed. Containers of open files
///   remain.
///
/// Returns the containers (directories with logs) that still exist and have a mark of this host: it was removing their
/// file.
pub(crate) fn clean_up_previous_run<B: Backing>(
    backing: &B,
    containers_dir: &B::Inode,
    clean_up: &CleanUpContext<'_>,
) -> std::result::Result<HashSet<String>, OwnError> {
    ignore_missing_lane(remove_half_removed(backing, containers_dir))?;
    let mut removing = HashSet::new();
    for NamedContainer { name, .. } in list_containers(backing, containers_dir)? {
        // A container that is not trusted is skipped. The open of its file reports it.
        let Ok(Some(container)) = find_trusted(backing, containers_dir, &name, clean_up.host)
        else {
            continue;
        };
        // This host has not written yet, so a registration of it as a writer is from its previous run.
        container.withdraw_hint(WRITING)?;
        if clean_up.has_open_file(&name) {
            continue;
        }
        let Some(mark) = Mark::read(&container)? else {
            continue;
        };
        let mut is_removed = false;
        if mark.is_name_removed && clean_up.has_host_ended(&mark.host)? {
            let removal = remove_unused(backing, containers_dir, &container, clean_up.is_alive);
            is_removed = ignore_missing_lane(removal)?.unwrap_or(false);
        }
        if !is_removed && mark.host == clean_up.host {
            removing.insert(name);
        }
    }
    Ok(removing)
}

impl CleanUpContext<'_> {
    /// Returns whether a program has the file of a container open.
    fn has_open_file(&self, container: &str) -> bool {
        match FileId::parse_container_name(container.as_bytes()) {
            Some((id, _)) => self.open_files.contains(&id),
            None => false,
        }
    }

    /// Returns whether the host that put a mark has ended its work for the mark: it is dead, or it is this host, and its
    /// marks are from its previous run.
    fn has_host_ended(&self, host: &str) -> Result<bool> {
        Ok(host == self.host || !(self.is_alive)(host)?)
    }
}

/// A mark in a container.
struct Mark {
    /// The host that put the mark.
    host: String,
    /// Whether the mark is `dead`: the name is removed. Otherwise it is `dying`.
    is_name_removed: bool,
}

impl Mark {
    /// Reads the mark of a container. `dead` takes precedence over `dying`.
    fn read<B: Backing>(container: &VoteDir<'_, B>) -> Result<Option<Self>> {
        for (mark, is_name_removed) in [(DEAD, true), (DYING, false)] {
            if let Some(host) = container.read(mark)? {
                let host = String::from_utf8_lossy(&host).into_owned();
                return Ok(Some(Self {
                    host,
                    is_name_removed,
                }));
            }
        }
        Ok(None)
    }
}

/// Turns EIO of a removal into `None`. A lane that cannot be reached must not prevent a mount; a later mount removes
/// the logs in it.
fn ignore_missing_lane<T>(removed: Result<T>) -> Result<Option<T>> {
    match removed {
        Ok(value) => Ok(Some(value)),
        Err(Errno::IO) => {
            tracing::warn!(
                "logs of removed files are not removed yet: their lane or directory cannot be read"
            );
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Removes a container (directory with logs) whose file was removed. Returns false if another live host is registered
/// as a writer.
fn remove_unused<B: Backing>(
    backing: &B,
    containers_dir: &B::Inode,
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
        // Another host removed it first, if the name does not lead to it any more.
        Err(error) if is_gone(error) && !container.is_current()? => {}
        Err(error) => return Err(error),
    }
    if let Some((id, _)) = FileId::parse_container_name(container.name().as_bytes()) {
        file_dir::remove_empty(backing, containers_dir, id)?;
    }
    Ok(true)
}

/// A container and its file.
pub(crate) struct NamedContainer {
    pub(crate) file: FileId,
    /// Name of the container, or of the file's directory if that is not trusted.
    pub(crate) name: String,
}

/// Result of a search for containers without files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Orphans {
    /// Names of removed containers, whose files were removed.
    pub removed: Vec<String>,
    /// Names of kept containers: their files are gone, but no host marked them for removal.
    pub lost: Vec<String>,
    /// Names of containers that are kept for now: a live host writes to them, or directories changed during all walks.
    pub waiting: Vec<String>,
}

/// Which containers a search examines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SearchScope {
    /// Containers of files that a dead host was removing.
    Removals,
    /// All containers.
    All,
}

/// A search for containers without files.
pub(crate) struct OrphanSearch<'a, B: Backing> {
    pub(crate) backing: &'a B,
    pub(crate) containers_dir: &'a B::Inode,
    pub(crate) host: &'a str,
    pub(crate) is_alive: &'a Liveness,
    /// Containers of files that this host was removing when it last ran, and has not begun to remove again.
    pub(crate) marked: &'a Mutex<HashSet<String>>,
}

impl<B: Backing> OrphanSearch<'_, B> {
    /// Searches for containers (directories with logs) that have no file. Removes those of files that a host has
    /// removed through Firn, and half-removed ones. The result also lists the containers that are kept although their
    /// file is gone, because it was not removed through Firn.
    ///
    /// Leaves alone what a live host is working on. Walks through the backing only if the marks of a container do not
    /// show whether its file still exists.
    pub(crate) fn run(&self, scope: SearchScope) -> Result<Orphans> {
        ignore_missing_lane(remove_half_removed(self.backing, self.containers_dir))?;
        let mut orphans = Orphans::default();
        let undecided = self.sort_out_by_mark(scope, &mut orphans)?;
        let SearchResult {
            found,
            missing,
            unknown,
        } = search_files(self.backing, undecided)?;
        // A later search decides on these.
        orphans.waiting.extend(unknown);
        for name in found {
            self.clear_stale_mark(&name)?;
        }
        for name in missing {
            self.remove_or_report(name, &mut orphans)?;
        }
        Ok(orphans)
    }

    /// Decides about each container (directory with logs) by its *mark*, the file by which a host announces that it
    /// removes the container's file. Removes the containers of files that have lost their last name. Returns the
    /// containers that must be kept or removed depending on whether their file exists.
    fn sort_out_by_mark(
        &self,
        scope: SearchScope,
        orphans: &mut Orphans,
    ) -> Result<Vec<NamedContainer>> {
        let includes_unmarked = scope == SearchScope::All;
        let mut undecided = Vec::new();
        for named in list_containers(self.backing, self.containers_dir)? {
            let container = match self.find(&named.name)? {
                ContainerLookup::Trusted(container) => container,
                ContainerLookup::Distrusted if includes_unmarked => {
                    undecided.push(named);
                    continue;
                }
                ContainerLookup::Distrusted | ContainerLookup::Gone => continue,
            };
            match Mark::read(&container)? {
                // The host of the mark is still removing the file: leave the container to it.
                Some(mark) if !self.has_host_ended(&mark, &named.name)? => {}
                Some(mark) if mark.is_name_removed => {
                    self.remove(&container, named.name, orphans)?
                }
                Some(_) => undecided.push(named),
                None if includes_unmarked => undecided.push(named),
                None => {}
            }
        }
        Ok(undecided)
    }

    /// Removes the mark `dying` from a container if its file was found to exist. Does nothing if the host of the mark is
    /// still removing the file, or if the container has no mark.
    fn clear_stale_mark(&self, name: &str) -> Result<()> {
        if let ContainerLookup::Trusted(container) = self.find(name)?
            && let Some(mark) = Mark::read(&container)?
            && self.has_host_ended(&mark, name)?
        {
            remove_mark(self.backing, &container, DYING)?;
            self.backing.sync_dir(container.dir())?;
        }
        Ok(())
    }

    /// Removes a container, a directory with logs, after its file was found missing. Adds its name to `orphans`.
    ///
    /// If it may have writes and no host marked it for removal, it is kept and reported as lost. If the host of its
    /// mark is still removing the file, it is left alone.
    fn remove_or_report(&self, name: String, orphans: &mut Orphans) -> Result<()> {
        let container = match self.find(&name)? {
            ContainerLookup::Trusted(container) => container,
            ContainerLookup::Distrusted => {
                orphans.lost.push(name);
                return Ok(());
            }
            ContainerLookup::Gone => return Ok(()),
        };
        if is_lost(&container)? {
            orphans.lost.push(name);
            return Ok(());
        }
        // A program may have removed the file during the walks, and may still have it open.
        if let Some(mark) = Mark::read(&container)?
            && !self.has_host_ended(&mark, &name)?
        {
            return Ok(());
        }
        self.remove(&container, name, orphans)
    }

    /// Finds a container by its name.
    fn find(&self, name: &str) -> Result<ContainerLookup<'_, B>> {
        ContainerLookup::find(self.backing, self.containers_dir, name, self.host)
    }

    /// Returns whether the host that put a mark is dead, or is this host and put it in its previous run.
    fn has_host_ended(&self, mark: &Mark, name: &str) -> Result<bool> {
        if mark.host == self.host {
            Ok(self.marked.lock().contains(name))
        } else {
            Ok(!(self.is_alive)(&mark.host)?)
        }
    }

    /// Removes a container of a removed file, or notes that it waits for a live writer.
    fn remove(
        &self,
        container: &VoteDir<'_, B>,
        name: String,
        orphans: &mut Orphans,
    ) -> Result<()> {
        if remove_unused(self.backing, self.containers_dir, container, self.is_alive)? {
            orphans.removed.push(name)
        } else {
            orphans.waiting.push(name)
        }
        Ok(())
    }
}

/// Removes half-removed containers, and empty directories of files.
pub fn remove_half_removed_containers<B: Backing>(
    backing: &B,
) -> std::result::Result<(), OwnError> {
    if let Some(containers_dir) = find_containers_dir(backing)? {
        ignore_missing_lane(remove_half_removed(backing, &containers_dir))?;
    }
    Ok(())
}

/// Opens `.firn/log`. Returns `None` if it does not exist.
fn find_containers_dir<B: Backing>(backing: &B) -> std::result::Result<Option<B::Inode>, OwnError> {
    let Some((firn, _)) = own::find_dir(backing, &backing.root(), TOP)? else {
        return Ok(None);
    };
    let containers_dir = own::find_dir(backing, &firn, CONTAINERS);
    Ok(containers_dir
        .map_err(|error| error.below(TOP))?
        .map(|(containers_dir, _)| containers_dir))
}

/// Finds containers (directories with logs) that have no file, without changing anything.
pub fn find_containers_without_file<B: Backing>(backing: &B) -> Result<ContainersWithoutFile> {
    let mut unowned = ContainersWithoutFile::default();
    let Some(containers_dir) = find_containers_dir(backing)? else {
        return Ok(unowned);
    };
    for id in file_dir::list_files(backing, &containers_dir)? {
        // A directory that is not trusted is left out here. The search below reports it by its name.
        let Ok(Some(dir)) = file_dir::find(backing, &containers_dir, id) else {
            continue;
        };
        let half_removed = VoteDir::find_retired(backing, &dir)?;
        unowned.unfinished.extend(half_removed);
    }
    let containers = list_containers(backing, &containers_dir)?;
    for name in search_files(backing, containers)?.missing {
        match ContainerLookup::find(backing, &containers_dir, &name, "")? {
            ContainerLookup::Trusted(container) if !is_lost(&container)? => {
                unowned.unfinished.push(name)
            }
            ContainerLookup::Trusted(_) | ContainerLookup::Distrusted => unowned.lost.push(name),
            ContainerLookup::Gone => {}
        }
    }
    Ok(unowned)
}

/// Names of containers that have no file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainersWithoutFile {
    /// A host was removing the file or the container, and may have died since.
    pub unfinished: Vec<String>,
    /// No host marked the file for removal.
    pub lost: Vec<String>,
}

/// Names of containers, by the result of a search for their files.
pub(crate) struct SearchResult {
    /// The file was found.
    pub(crate) found: Vec<String>,
    /// The file does not exist.
    pub(crate) missing: Vec<String>,
    /// The result is unknown, because directories changed during all walks.
    pub(crate) unknown: Vec<String>,
}

/// Bound on the walks of one search. A walk is repeated while directories change.
const WALKS_MAX: usize = 5;

/// Searches the backing for the files of containers (directories with logs).
///
/// Race: a file that is renamed during a walk may be missed. So a file counts as missing only if two walks missed it
/// and no directory changed between them. The file was then in no directory at that moment. If the directories never
/// stay the same, the files that were not found are returned as unknown.
pub(crate) fn search_files<B: Backing>(
    backing: &B,
    mut sought: Vec<NamedContainer>,
) -> Result<SearchResult> {
    let mut found = Vec::new();
    let mut last_dirs = None;
    for _ in 0..WALKS_MAX {
        if sought.is_empty() {
            break;
        }
        let ids = sought.iter().map(|container| container.file).collect();
        let walk = DirectoryWalk::walk_backing(backing, &ids)?;
        let is_found = |container: &mut NamedContainer| walk.found.contains(&container.file);
        let found_now = sought.extract_if(.., is_found);
        found.extend(found_now.map(|container| container.name));
        let has_no_dir_changed = last_dirs.is_some_and(|last_dirs| last_dirs == walk.dirs);
        if has_no_dir_changed {
            return Ok(SearchResult {
                found,
                missing: names_of(sought),
                unknown: Vec::new(),
            });
        }
        last_dirs = Some(walk.dirs);
    }
    Ok(SearchResult {
        found,
        missing: Vec::new(),
        unknown: names_of(sought),
    })
}

/// Returns the names of containers.
fn names_of(containers: Vec<NamedContainer>) -> Vec<String> {
    containers
        .into_iter()
        .map(|container| container.name)
        .collect()
}

/// Returns whether a container without a file is kept: it may have writes, and no host marked the file for removal.
fn is_lost<B: Backing>(container: &VoteDir<'_, B>) -> Result<bool> {
    let names = container.names()?;
    let is_index = |name: &String| Writer::from_index_name(name.as_bytes()).is_some();
    let is_marked = names.contains(DYING) || names.contains(DEAD);
    let is_written = names.contains(HEAD) || names.iter().any(is_index);
    Ok(is_written && !is_marked)
}

/// Lists all containers, directories with the logs of one file each. The name of a file's directory that is not trusted
/// stands for its containers.
fn list_containers<B: Backing>(
    backing: &B,
    containers_dir: &B::Inode,
) -> Result<Vec<NamedContainer>> {
    let mut containers = Vec::new();
    for id in file_dir::list_files(backing, containers_dir)? {
        match file_dir::list(backing, containers_dir, id) {
            Ok(listed) => containers.extend(listed.iter().map(|container| NamedContainer {
                file: id,
                name: id.container_name(container.number),
            })),
            Err(OwnError::Backing(error)) => return Err(error),
            Err(_) => containers.push(NamedContainer {
                file: id,
                name: id.dir_name(),
            }),
        }
    }
    Ok(containers)
}

/// Removes half-removed containers, and the directories of files that have no containers.
fn remove_half_removed<B: Backing>(backing: &B, containers_dir: &B::Inode) -> Result<()> {
    for id in file_dir::list_files(backing, containers_dir)? {
        match file_dir::find(backing, containers_dir, id) {
            Ok(Some(dir)) => VoteDir::remove_retired(backing, &dir)?,
            Ok(None) => continue,
            Err(OwnError::Backing(error)) => return Err(error),
            // A directory that is not trusted is left alone. The open of its file reports it.
            Err(_) => continue,
        }
        file_dir::remove_empty(backing, containers_dir, id)?;
    }
    Ok(())
}

/// Returns whether a directory in `.firn` holds files of programs: those of transactions and of stub trees. The other
/// directories there may hold files whose last name was removed.
pub(crate) fn holds_program_files(name: &[u8]) -> bool {
    let of_transactions = [&b"tx-"[..], b"undo-", b"host-"];
    name == STUBS.as_bytes()
        || of_transactions
            .iter()
            .any(|prefix| name.starts_with(prefix))
}

/// One walk through all directories, except those in `.firn` without files of programs.
struct DirectoryWalk {
    /// The sought files that have a name.
    found: HashSet<FileId>,
    /// Times of the last change of each directory, by inode number, as of before it was read. Directories in `.firn`
    /// are left out, because they change all the time.
    dirs: HashMap<u64, (Time, Time)>,
}

/// The part of the backing in which a directory of the walk lies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WalkRegion {
    /// The top of the backing.
    Top,
    /// `.firn` itself.
    FirnDir,
    /// Below `.firn`.
    InFirnDir,
    /// The directories of programs.
    Files,
}

impl WalkRegion {
    /// Returns the region of the directory `name` in a directory of this region.
    fn child_region(self, name: &[u8]) -> Self {
        match self {
            Self::Top if name == TOP.as_bytes() => Self::FirnDir,
            Self::Top | Self::Files => Self::Files,
            Self::FirnDir | Self::InFirnDir => Self::InFirnDir,
        }
    }
}

impl DirectoryWalk {
    /// Walks through the backing and finds those of the sought files that have a name. Also records the directories, so
    /// that two walks can be compared.
    fn walk_backing<B: Backing>(backing: &B, sought: &HashSet<FileId>) -> Result<Self> {
        let mut walk = Self {
            found: HashSet::new(),
            dirs: HashMap::new(),
        };
        let root = backing.root();
        walk.record_dir(&backing.attr(&root)?);
        let mut dirs = vec![(root, WalkRegion::Top)];
        while let Some((dir, region)) = dirs.pop() {
            for (name, ino, kind) in own::list(backing, &dir)? {
                if region == WalkRegion::FirnDir && !holds_program_files(&name) {
                    continue;
                }
                // Look up only directories, and files with the inode number of a sought one.
                let may_be_dir = matches!(kind, None | Some(Kind::Dir));
                if !may_be_dir && !sought.iter().any(|id| id.ino == ino) {
                    continue;
                }
                let child_region = region.child_region(&name);
                let (inode, attr) = match backing.lookup(&dir, &OsString::from_vec(name)) {
                    Ok(entry) => entry,
                    // The object was removed since its directory was listed.
                    Err(Errno::NOENT) => continue,
                    Err(error) => return Err(error),
                };
                if attr.kind == Kind::Dir {
                    if child_region == WalkRegion::Files {
                        walk.record_dir(&attr);
                    }
                    dirs.push((inode, child_region));
                } else if let Some(id) = FileId::read(backing, &inode, &attr)?
                    && sought.contains(&id)
                {
                    walk.found.insert(id);
                }
            }
        }
        Ok(walk)
    }

    /// Records when a directory was last changed.
    fn record_dir(&mut self, attr: &Attr) {
        self.dirs.insert(attr.ino, (attr.mtime, attr.ctime));
    }
}
