//! Unsynced changes: a list of changed objects, for file systems that syncfs(2) does not make durable.
//!
//! Linux sends syncfs(2) to no FUSE server except virtiofs, and on a few more file systems it has little effect. There,
//! each changed file and directory must be synced separately. This module records which ones.
//!
//! Terms
//! * An *entry* records a changed object that is not synced yet, with the paths under which it was changed.
//! * A *walk* syncs every file and directory of a tree. It is needed when the list does not have all changes:
//!   `lost_track` is set once a change could not be listed, and `inherited` while an earlier process may have left
//!   changes.
//!
//! Invariants
//! * Every object that was changed through this backing and not synced since has an `Entry`, or `lost_track` is set.
//! * `inherited` is set until everything was synced once after the backing was opened. An earlier process may have been
//!   killed before it synced its changes.
//! * The object of an entry is at one of the entry's paths, unless a rename is under way or another process has moved
//!   the object. A sync that does not find it sets `lost_track`. A path is only a hint: device and inode number decide
//!   whether the object at the path is the entry's object.
//! * `names` and the `paths` of the entries are the same relation, in both directions.
//!
//! Entries have paths and not descriptors, because a process may change more files than it can hold open. No lock is
//! held across a call of the backing.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

use crate::{Access, Attr, Backing, Errno, Kind, Result, join_path};

/// Identity of an object: device and inode number.
pub type Key = (u64, u64);

/// Maximum number of entries, of some 200 bytes each. If more are needed, the list is dropped and the next sync walks
/// the tree.
const ENTRIES_MAX: usize = 1 << 18;

/// Number of names in one task of a walk: enough that the handover of tasks costs little compared with the syncs.
const WALK_NAMES: usize = 64;

/// Number of objects to sync for each thread: with fewer, the start of another thread costs more than it saves.
const OBJECTS_PER_THREAD: usize = 4;

/// What is known of the path of an object in the backing.
pub enum ObjectPath {
    /// One path of the object from the top of the backing, and the number of the object's names.
    Known(Vec<u8>, u64),
    /// The object has no name any more, so it is deleted at its last close and needs no sync.
    Gone,
    /// The object has a name, but the name is not known.
    Unknown,
}

/// A backing with a list of unsynced changes.
pub trait Tracked: Backing {
    /// Returns the list.
    fn unsynced(&self) -> &Unsynced;
    /// Returns how many files to sync at a time, because each sync waits for a server.
    fn threads(&self) -> usize;
    /// Returns the object at a path from the top of the backing.
    fn find(&self, path: &[u8]) -> Result<(Self::Inode, Attr)>;
    /// Does the same as [`Names::open_dir`](crate::Names::open_dir), even if the mode denies it to the directory's
    /// owner.
    fn open_dir_to_sync(&self, inode: &Self::Inode) -> Result<Self::Dir>;
}

/// The list of unsynced changes of a backing. See the head of the file.
#[derive(Debug, Default)]
pub struct Unsynced {
    state: Mutex<ListState>,
    rename_over: Condvar,
}

#[derive(Debug)]
struct ListState {
    objects: HashMap<Key, Entry>,
    names: BTreeMap<Vec<u8>, Key>,
    /// Number of changes so far. Each entry and each sync has the version at its time.
    version: u64,
    /// Whether objects from before this process may be unsynced.
    inherited: bool,
    /// Version of the last change that no entry records. `None` means that the entries record all changes.
    lost_track: Option<u64>,
    /// Tickets of renames that have begun and not returned.
    renames: BTreeSet<u64>,
    /// Walks under way, by ticket. The paths are the targets of renames since the walk began: the walk may have passed
    /// these paths before the rename.
    walks: HashMap<u64, Vec<Vec<u8>>>,
    last_ticket: u64,
}

#[derive(Debug)]
struct Entry {
    /// Version of the object's last change.
    version: u64,
    paths: Vec<Vec<u8>>,
    /// Whether the object has names that are not among `paths`.
    has_more_names: bool,
}

impl Default for ListState {
    fn default() -> Self {
        Self {
            objects: HashMap::new(),
            names: BTreeMap::new(),
            version: 0,
            inherited: true,
            lost_track: None,
            renames: BTreeSet::new(),
            walks: HashMap::new(),
            last_ticket: 0,
        }
    }
}

impl ListState {
    /// Returns whether two paths are known to lead to one object. A rename(2) between such paths changes nothing.
    fn are_names_of_one_object(&self, a: &[u8], b: &[u8]) -> bool {
        if a == b {
            return true;
        }
        match self.names.get(a) {
            Some(key) => self.names.get(b) == Some(key),
            None => false,
        }
    }

    /// Records in the list of unsynced changes that the object at `from`, with all names below it, was renamed to
    /// `to`. With `is_exchange`, the two objects have exchanged their names.
    fn move_subtree(&mut self, from: &[u8], to: &[u8], is_exchange: bool) {
        let moved = self.remove_subtree(from);
        if is_exchange {
            let exchanged = self.remove_subtree(to);
            self.insert_subtree(from, exchanged);
        } else {
            // The target, a file or an empty directory, is replaced.
            self.drop_name(to);
        }
        self.insert_subtree(to, moved);
        // A sync that walks the tree now may miss the objects that were moved, and syncs them afterwards.
        for missed_paths in self.walks.values_mut() {
            missed_paths.push(to.to_vec());
            if is_exchange {
                missed_paths.push(from.to_vec());
            }
        }
    }

    /// Returns a new ticket. Tickets ascend.
    fn ticket(&mut self) -> u64 {
        self.last_ticket += 1;
        self.last_ticket
    }

    /// Records that the entries do not cover all changes, so that the next sync must walk the tree.
    fn mark_incomplete(&mut self) {
        self.lost_track = Some(self.version);
    }

    /// Adds an entry (an object that is changed and not synced) for the object at `path`, which has `links` names.
    /// Another thread may have added it meanwhile, with the same path or another one; then both changes are one entry.
    fn insert(&mut self, key: Key, path: Vec<u8>, links: u64) {
        if let Some(entry) = self.objects.get_mut(&key) {
            entry.version = self.version;
            if self.names.get(&path) != Some(&key) {
                self.add_name(key, path);
            }
            return;
        }
        if self.objects.len() >= ENTRIES_MAX {
            // The list is dropped, and the next sync walks the whole tree.
            self.objects.clear();
            self.names.clear();
            self.mark_incomplete();
            return;
        }
        let entry = Entry {
            version: self.version,
            paths: Vec::new(),
            has_more_names: links > 1,
        };
        self.objects.insert(key, entry);
        self.add_name(key, path);
    }

    /// Records that `path` now leads to the object, if it has an entry.
    fn add_name(&mut self, key: Key, path: Vec<u8>) {
        self.drop_name(&path);
        if let Some(entry) = self.objects.get_mut(&key) {
            entry.paths.push(path.clone());
            self.names.insert(path, key);
        }
    }

    /// Records that `path` does not lead to its object any more. If that was the last known path, the entry of the
    /// object is removed: it needs no sync, unless it has a name that is not known. Then the next sync walks the whole
    /// tree.
    fn drop_name(&mut self, path: &[u8]) {
        let Some(key) = self.names.remove(path) else {
            return;
        };
        let Some(entry) = self.objects.get_mut(&key) else {
            return;
        };
        entry.paths.retain(|entry_path| entry_path != path);
        if entry.paths.is_empty() {
            let has_unknown_name = entry.has_more_names;
            self.objects.remove(&key);
            if has_unknown_name {
                self.mark_incomplete();
            }
        }
    }

    /// Removes the entry of an object that was synced.
    fn forget(&mut self, key: Key) {
        if let Some(entry) = self.objects.remove(&key) {
            for path in entry.paths {
                self.names.remove(&path);
            }
        }
    }

    /// Removes all names at or below the path `top` from the list of unsynced changes, and returns them. The entries
    /// of their objects remain, so the caller must add the names again under their new paths, or remove the entries.
    fn remove_subtree(&mut self, top: &[u8]) -> Vec<SubtreeName> {
        let mut range_start = top.to_vec();
        range_start.push(b'/');
        let mut range_end = top.to_vec();
        // The byte after the slash: all paths below `top` sort before this.
        range_end.push(b'/' + 1);
        let mut removed: Vec<SubtreeName> = self
            .names
            .range(range_start..range_end)
            .map(|(path, key)| SubtreeName {
                suffix: path[top.len()..].to_vec(),
                key: *key,
            })
            .collect();
        if let Some(key) = self.names.get(top) {
            removed.push(SubtreeName {
                suffix: Vec::new(),
                key: *key,
            });
        }
        for SubtreeName { suffix, key } in &removed {
            let path = [top, suffix].concat();
            self.names.remove(&path);
            if let Some(entry) = self.objects.get_mut(key) {
                entry.paths.retain(|entry_path| *entry_path != path);
            }
        }
        removed
    }

    /// Adds names that [`Self::remove_subtree`] removed, below another top.
    fn insert_subtree(&mut self, top: &[u8], names: Vec<SubtreeName>) {
        for SubtreeName { suffix, key } in names {
            self.add_name(key, [top, &suffix].concat());
        }
    }
}

/// A name in a subtree that is being renamed.
struct SubtreeName {
    /// Path from the top of the subtree; empty for the top itself.
    suffix: Vec<u8>,
    /// The object to which the name leads.
    key: Key,
}

impl Unsynced {
    /// Records a change of an object, so that the next sync includes the object. Called after the change was made and
    /// before its caller gets the result.
    ///
    /// `find_path` is called only if the object has no entry, and without the lock, because it calls the kernel.
    pub fn record_change(&self, key: Key, find_path: impl FnOnce() -> ObjectPath) {
        {
            let mut state = self.state.lock();
            state.version += 1;
            let version = state.version;
            if let Some(entry) = state.objects.get_mut(&key) {
                entry.version = version;
                return;
            }
        }
        let object_path = find_path();
        let mut state = self.state.lock();
        match object_path {
            ObjectPath::Known(path, links) => state.insert(key, path, links),
            ObjectPath::Gone => {}
            ObjectPath::Unknown => state.mark_incomplete(),
        }
    }

    /// Records that an object got another name. It then has `links` names.
    pub fn record_link(&self, key: Key, path: Vec<u8>, links: u64) {
        let mut state = self.state.lock();
        state.add_name(key, path);
        if let Some(entry) = state.objects.get_mut(&key) {
            entry.has_more_names = links > entry.paths.len() as u64;
        }
    }

    /// Records that a name was removed.
    pub fn record_removal(&self, path: &[u8]) {
        self.state.lock().drop_name(path);
    }

    /// Records that a rename begins, and returns its ticket. [`Unsynced::end_rename`] or
    /// [`Unsynced::end_unknown_rename`] must follow.
    pub fn begin_rename(&self) -> u64 {
        let mut state = self.state.lock();
        let ticket = state.ticket();
        state.renames.insert(ticket);
        ticket
    }

    /// Records the end of a rename. `moved`: the old and the new path; `None` if it failed.
    pub fn end_rename(&self, ticket: u64, moved: Option<(&[u8], &[u8])>, is_exchange: bool) {
        let mut state = self.state.lock();
        if let Some((from, to)) = moved
            && !state.are_names_of_one_object(from, to)
        {
            state.move_subtree(from, to, is_exchange);
        }
        state.renames.remove(&ticket);
        self.rename_over.notify_all();
    }

    /// Records the end of a rename whose paths are not known.
    pub fn end_unknown_rename(&self, ticket: u64) {
        let mut state = self.state.lock();
        state.version += 1;
        state.mark_incomplete();
        state.renames.remove(&ticket);
        self.rename_over.notify_all();
    }

    /// Returns the present version, for [`Unsynced::synced`]. Called before a sync begins.
    pub fn begin_sync(&self) -> u64 {
        self.state.lock().version
    }

    /// Records that an object was synced. `version`: result of [`Unsynced::begin_sync`] before the sync. If the object
    /// was changed later, its entry remains, because the sync may not cover that change.
    pub fn synced(&self, key: Key, version: u64) {
        let mut state = self.state.lock();
        let entry = state.objects.get(&key);
        if entry.is_some_and(|entry| entry.version <= version) {
            state.forget(key);
        }
    }

    /// Returns whether objects from before this process may be unsynced.
    pub fn inherits(&self) -> bool {
        self.state.lock().inherited
    }

    /// Returns whether there are changes that no entry records.
    pub fn has_lost_track(&self) -> bool {
        self.state.lock().lost_track.is_some()
    }

    /// Records that everything up to `version` was synced.
    pub fn all_synced(&self, version: u64) {
        let mut state = self.state.lock();
        state.inherited = false;
        if state.lost_track.is_some_and(|lost| lost <= version) {
            state.lost_track = None;
        }
    }

    /// Resets the list to that of a new process.
    pub fn reset(&self) {
        *self.state.lock() = ListState::default();
    }

    /// Waits until all renames that have begun so far have returned.
    fn wait_for_renames(&self) {
        let mut state = self.state.lock();
        let last = state.last_ticket;
        while state.renames.first().is_some_and(|first| *first <= last) {
            self.rename_over.wait(&mut state);
        }
    }

    /// Returns the known paths of an object that has an entry.
    fn paths_of(&self, key: Key) -> Vec<Vec<u8>> {
        let state = self.state.lock();
        match state.objects.get(&key) {
            Some(entry) => entry.paths.clone(),
            None => Vec::new(),
        }
    }

    /// Returns the objects that have an entry.
    fn entry_keys(&self) -> Vec<Key> {
        self.state.lock().objects.keys().copied().collect()
    }

    /// Begins a walk, and returns its ticket. From now on the targets of renames are recorded for the walk.
    fn begin_walk(&self) -> u64 {
        let mut state = self.state.lock();
        let ticket = state.ticket();
        state.walks.insert(ticket, Vec::new());
        ticket
    }

    /// Takes the targets of renames that were recorded for a walk since the last call.
    fn take_missed_paths(&self, walk_ticket: u64) -> Vec<Vec<u8>> {
        let mut state = self.state.lock();
        let missed_paths = state.walks.get_mut(&walk_ticket);
        missed_paths.map(std::mem::take).unwrap_or_default()
    }

    fn end_walk(&self, walk_ticket: u64) {
        self.state.lock().walks.remove(&walk_ticket);
    }
}

/// Syncs every object that has an entry. If an object is not found, `lost_track` is set, and a walk must follow.
pub fn sync_entries<B: Tracked>(base: &B) -> Result<()> {
    let keys = base.unsynced().entry_keys();
    let thread_count = base.threads().min(keys.len().div_ceil(OBJECTS_PER_THREAD));
    let next_index = AtomicUsize::new(0);
    let first_error = Mutex::new(None);
    run_in_threads(thread_count, || {
        while let Some(key) = keys.get(next_index.fetch_add(1, Ordering::Relaxed)) {
            if let Err(errno) = sync_entry(base, *key) {
                // The other objects are synced nevertheless.
                first_error.lock().get_or_insert(errno);
            }
        }
    });
    first_error.into_inner().map_or(Ok(()), Err)
}

/// Syncs the object of one entry (a changed object that is not synced). Does nothing if the entry is removed meanwhile.
/// If the object is at none of its paths, another process moved it: then the next sync walks the whole tree.
fn sync_entry<B: Tracked>(base: &B, key: Key) -> Result<()> {
    let unsynced = base.unsynced();
    let mut paths = unsynced.paths_of(key);
    loop {
        if paths.is_empty() {
            // The object was removed, or another thread has synced it.
            return Ok(());
        }
        for path in &paths {
            match base.find(path) {
                Ok((inode, attr)) if (attr.dev, attr.ino) == key => {
                    return sync_object(base, &inode, &attr, path);
                }
                // The path leads to another object now, or to none.
                Ok(_) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG) => {}
                Err(errno) => return Err(errno),
            }
        }
        // A rename under way may be moving the object; its new path is known when the rename has returned.
        unsynced.wait_for_renames();
        let paths_now = unsynced.paths_of(key);
        if paths_now == paths {
            let mut state = unsynced.state.lock();
            state.forget(key);
            state.mark_incomplete();
            return Ok(());
        }
        paths = paths_now;
    }
}

/// Syncs an object of any kind, which is at `path` from the top of the backing.
fn sync_object<B: Tracked>(base: &B, inode: &B::Inode, attr: &Attr, path: &[u8]) -> Result<()> {
    match attr.kind {
        Kind::File => sync_file(base, inode),
        Kind::Dir => sync_dir(base, inode),
        // No call syncs a single symbolic link or device; a sync of its directory does.
        _ => {
            let version = base.unsynced().begin_sync();
            let last_slash = path.iter().rposition(|byte| *byte == b'/');
            let parent_path = &path[..last_slash.unwrap_or(0)];
            let (parent, _) = base.find(parent_path)?;
            sync_dir(base, &parent)?;
            base.unsynced().synced((attr.dev, attr.ino), version);
            Ok(())
        }
    }
}

/// Syncs a file. Opens it for reading, or for writing if its mode denies reading.
fn sync_file<B: Tracked>(base: &B, inode: &B::Inode) -> Result<()> {
    let opened = match base.open(inode, Access::Read) {
        Err(Errno::ACCESS) => base.open(inode, Access::Write),
        opened => opened,
    };
    base.sync(&opened?, false)
}

/// Syncs a directory.
fn sync_dir<B: Tracked>(base: &B, inode: &B::Inode) -> Result<()> {
    match base.sync_dir(inode) {
        // This file system has no fsync of a directory.
        Err(Errno::INVAL) => Ok(()),
        synced => synced,
    }
}

/// Task of a walk: some names in a directory, which are to be synced with everything below them.
struct WalkTask<B: Backing> {
    dir: B::Inode,
    names: Vec<OsString>,
}

/// A walk over one file system.
struct Walk<'a, B: Tracked> {
    base: &'a B,
    dev: u64,
    tasks: Mutex<WalkTasks<B>>,
    /// Signals that a task was added or has ended.
    tasks_changed: Condvar,
}

/// The tasks of a walk.
struct WalkTasks<B: Backing> {
    /// Tasks that no thread has begun. They are a stack, so a thread holds at most one open directory for each level of
    /// the tree.
    waiting: Vec<WalkTask<B>>,
    /// Number of tasks that threads work on now.
    running: usize,
    /// Error of the first task that failed.
    first_error: Option<Errno>,
}

/// Syncs every file and directory at or below `top` that is on the same file system.
///
/// A rename during the walk may move an object from a part that the walk has not reached to a part that it has passed.
/// So the list records the targets of all renames during a walk, and they are walked afterwards.
pub fn sync_below<B: Tracked>(base: &B, top: &B::Inode) -> Result<()> {
    let walk_ticket = base.unsynced().begin_walk();
    let mut result = sync_tree_in_threads(base, top);
    loop {
        let missed_paths = base.unsynced().take_missed_paths(walk_ticket);
        if missed_paths.is_empty() || result.is_err() {
            break;
        }
        result = missed_paths
            .iter()
            .try_for_each(|path| sync_missed_path(base, path));
    }
    base.unsynced().end_walk(walk_ticket);
    result
}

/// Syncs the object at the target of a rename during a walk, and everything below it.
fn sync_missed_path<B: Tracked>(base: &B, path: &[u8]) -> Result<()> {
    match base.find(path) {
        Ok((inode, attr)) if attr.kind == Kind::Dir => sync_tree_in_threads(base, &inode),
        Ok((inode, attr)) => ignore_removed(sync_object(base, &inode, &attr, path)),
        Err(errno) => ignore_removed(Err(errno)),
    }
}

/// Ignores an error that says that the object was removed meanwhile: then it needs no sync.
fn ignore_removed(result: Result<()>) -> Result<()> {
    match result {
        Err(Errno::NOENT | Errno::STALE | Errno::NOTDIR | Errno::LOOP) => Ok(()),
        result => result,
    }
}

/// Walks the tree at `top`: syncs each of its files and directories once, in several threads. Leaves out other file
/// systems that are mounted below. Tries all of them, and then returns the first error.
fn sync_tree_in_threads<B: Tracked>(base: &B, top: &B::Inode) -> Result<()> {
    let tasks = WalkTasks {
        waiting: Vec::new(),
        running: 0,
        first_error: None,
    };
    let dev = base.attr(top)?.dev;
    let walk = Walk {
        base,
        dev,
        tasks: Mutex::new(tasks),
        tasks_changed: Condvar::new(),
    };
    walk.sync_dir_and_add_names(top)?;
    run_in_threads(base.threads(), || walk.run_tasks());
    match walk.tasks.into_inner().first_error {
        Some(errno) => Err(errno),
        None => Ok(()),
    }
}

impl<B: Tracked> Walk<'_, B> {
    /// Body of one thread of a walk: carries out tasks (syncs of some names of a directory) until none is left and no
    /// thread can add one.
    fn run_tasks(&self) {
        let mut tasks = self.tasks.lock();
        loop {
            let Some(task) = tasks.waiting.pop() else {
                // A running task may still add tasks.
                if tasks.running == 0 {
                    self.tasks_changed.notify_all();
                    return;
                }
                self.tasks_changed.wait(&mut tasks);
                continue;
            };
            tasks.running += 1;
            // The lock is released during the syncs.
            drop(tasks);
            let mut first_error = None;
            for name in &task.names {
                if let Err(errno) = ignore_removed(self.sync_name(&task.dir, name)) {
                    first_error.get_or_insert(errno);
                }
            }
            tasks = self.tasks.lock();
            tasks.running -= 1;
            tasks.first_error = tasks.first_error.or(first_error);
            self.tasks_changed.notify_all();
        }
    }

    /// Syncs the object of a name. A directory is read, and its names become tasks.
    fn sync_name(&self, dir: &B::Inode, name: &OsStr) -> Result<()> {
        let (inode, attr) = self.base.lookup(dir, name)?;
        let synced = match attr.kind {
            // On overlayfs a file may have another device number than its directory, so it is not compared.
            Kind::File => sync_file(self.base, &inode),
            // The walk covers one file system: its caller finds and syncs file systems that are mounted below.
            Kind::Dir if attr.dev == self.dev => self.sync_dir_and_add_names(&inode),
            _ => Ok(()),
        };
        match synced {
            // This process may neither read nor write the object and does not own it, so it has changed nothing in it.
            Err(Errno::ACCESS) => Ok(()),
            synced => synced,
        }
    }

    /// Adds tasks that sync the names in a directory, and syncs the directory itself.
    fn sync_dir_and_add_names(&self, dir: &B::Inode) -> Result<()> {
        let stream = self.base.open_dir_to_sync(dir)?;
        let mut names = Vec::new();
        self.base.read_dir(&stream, 0, &mut |entry| {
            let is_child = entry.name != "." && entry.name != "..";
            // The sync of the directory covers objects of other kinds. Some file systems report no kind here; then the
            // lookup does.
            if is_child && matches!(entry.kind, None | Some(Kind::File | Kind::Dir)) {
                names.push(entry.name.to_owned());
            }
            true
        })?;
        // The descriptor is not needed any more, and many directories may be under way at a time.
        drop(stream);
        let mut tasks = self.tasks.lock();
        for names_of_task in names.chunks(WALK_NAMES) {
            tasks.waiting.push(WalkTask {
                dir: dir.clone(),
                names: names_of_task.to_vec(),
            });
        }
        // The lock is released before other threads are woken, which take it.
        drop(tasks);
        self.tasks_changed.notify_all();
        sync_dir(self.base, dir)
    }
}

/// Runs `work` in `count` threads, one of which is the caller's.
fn run_in_threads(count: usize, work: impl Fn() + Sync) {
    std::thread::scope(|scope| {
        for _ in 1..count {
            // If the system starts no further thread, the threads that run do all the work.
            let _ = std::thread::Builder::new()
                .name("sync".into())
                .spawn_scoped(scope, &work);
        }
        work();
    });
}

/// Returns the path of `name` in a directory; `None` if the path of the directory is not known.
pub fn path_of_entry(dir: ObjectPath, name: &OsStr) -> Option<Vec<u8>> {
    match dir {
        ObjectPath::Known(path, _) => Some(join_path(&path, name)),
        ObjectPath::Gone | ObjectPath::Unknown => None,
    }
}

/// Returns the names of which a path consists.
pub fn components(path: &[u8]) -> impl Iterator<Item = &OsStr> {
    path.split(|byte| *byte == b'/')
        .filter(|name| !name.is_empty())
        .map(OsStr::from_bytes)
}

/// Returns a path in the form that system calls take, relative to the top. The top itself is `.`.
pub fn relative(path: &[u8]) -> OsString {
    if path.is_empty() {
        OsString::from(".")
    } else {
        OsString::from_vec(path.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regression_two_first_changes_of_one_object_at_once_are_one_entry() {
        for other in [&b"dir/name"[..], b"dir/other"] {
            let unsynced = Unsynced::default();
            let key = Key::default();
            let path = || ObjectPath::Known(b"dir/name".to_vec(), 2);
            // The second thread records its change while the first one asks for the path.
            unsynced.record_change(key, || {
                unsynced.record_change(key, || ObjectPath::Known(other.to_vec(), 2));
                path()
            });
            let state = unsynced.state.lock();
            let entry = &state.objects[&key];
            assert_eq!(entry.version, state.version);
            assert!(entry.paths.contains(&b"dir/name".to_vec()), "{other:?}");
            assert!(entry.paths.contains(&other.to_vec()), "{other:?}");
        }
    }
}
