//! Changes made through a backing and not synced since, for file systems that syncfs(2) does not reach.
//!
//! Linux passes syncfs(2) on to no FUSE server but virtiofs, and it means little on a few more file systems: there
//! every file and directory is synced by itself. Which ones that takes is what this module knows.
//!
//! Invariants
//! * Every object that was changed through this backing since it was opened, and not synced since, has
//!   an `Entry`, or `lost_track` is set.
//! * What was there when the backing was opened is in doubt (`inherited`) until all of it was synced once: the
//!   process that changed it may have been killed.
//! * An entry is found under one of its paths, or a rename is under way, or it is not found: then everything is
//!   walked. A path is a hint, device and inode number say whether it is the object that is meant.
//! * `names` and the paths of the entries are the same relation, read from both sides.
//!
//! Paths, not descriptors, because a process may change more files than it may hold open. No lock is held across
//! a call of the backing.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

use crate::{Access, Attr, Backing, Errno, Kind, Result};

/// Device and inode number.
pub type Key = (u64, u64);

/// More changed objects than this are not told apart: the next sync walks the tree. Some 200 bytes each.
const ENTRIES_MAX: usize = 1 << 18;

/// Names that one task of a walk looks at: enough that handing them over costs nothing beside the syncs.
const WALK_NAMES: usize = 64;

/// Where an object is.
pub enum Place {
    /// A path from the top of the backing, and the number of names that the object has.
    At(Vec<u8>, u64),
    /// It has no name any more, so nothing of it outlives its last close.
    Gone,
    /// It has a name, which is not known.
    Unknown,
}

/// A backing that keeps such an account.
pub trait Tracked: Backing {
    /// The account.
    fn unsynced(&self) -> &Unsynced;
    /// Files that are synced at once: each waits for a server.
    fn threads(&self) -> usize;
    /// The object at a path from the top.
    fn find(&self, path: &[u8]) -> Result<(Self::Inode, Attr)>;
    /// As [`Names::open_dir`](crate::Names::open_dir), also where the mode denies it to its owner.
    fn open_dir_to_sync(&self, inode: &Self::Inode) -> Result<Self::Dir>;
}

/// What was changed and is not synced yet, where each file and directory is synced by itself.
#[derive(Debug, Default)]
pub struct Unsynced {
    state: Mutex<AccountState>,
    rename_over: Condvar,
}

#[derive(Debug)]
struct AccountState {
    objects: HashMap<Key, Entry>,
    names: BTreeMap<Vec<u8>, Key>,
    /// Counts changes.
    version: u64,
    /// What was there before may not be synced.
    inherited: bool,
    /// Version at which a change was made that no entry tells of.
    lost_track: Option<u64>,
    /// Renames that were begun and have not returned.
    renames: BTreeSet<u64>,
    /// Walks that are under way, and where things were moved to meanwhile, behind their backs perhaps.
    walks: HashMap<u64, Vec<Vec<u8>>>,
    last_ticket: u64,
}

#[derive(Debug)]
struct Entry {
    /// Version of the last change.
    version: u64,
    paths: Vec<Vec<u8>>,
    /// It has names that are not known.
    has_more_names: bool,
}

impl Default for AccountState {
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

/// A path from the path of a directory and a name in it.
pub fn join(dir: &[u8], name: &OsStr) -> Vec<u8> {
    let mut path = dir.to_vec();
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend(name.as_bytes());
    path
}

impl AccountState {
    fn ticket(&mut self) -> u64 {
        self.last_ticket += 1;
        self.last_ticket
    }

    fn lose_track(&mut self) {
        self.lost_track = Some(self.version);
    }

    fn enter(&mut self, key: Key, path: Vec<u8>, links: u64) {
        if self.objects.len() >= ENTRIES_MAX {
            self.objects.clear();
            self.names.clear();
            self.lose_track();
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

    fn add_name(&mut self, key: Key, path: Vec<u8>) {
        self.drop_name(&path);
        if let Some(entry) = self.objects.get_mut(&key) {
            entry.paths.push(path.clone());
            self.names.insert(path, key);
        }
    }

    /// The path does not lead to what it led to any more.
    fn drop_name(&mut self, path: &[u8]) {
        let Some(key) = self.names.remove(path) else {
            return;
        };
        let Some(entry) = self.objects.get_mut(&key) else {
            return;
        };
        entry.paths.retain(|known| known != path);
        if entry.paths.is_empty() {
            let is_elsewhere = entry.has_more_names;
            self.objects.remove(&key);
            if is_elsewhere {
                self.lose_track();
            }
        }
    }

    fn forget(&mut self, key: Key) {
        if let Some(entry) = self.objects.remove(&key) {
            for path in entry.paths {
                self.names.remove(&path);
            }
        }
    }

    /// Takes out what is at or below a path: what of the path follows `top`, and which object.
    fn take_below(&mut self, top: &[u8]) -> Vec<(Vec<u8>, Key)> {
        let mut below = top.to_vec();
        below.push(b'/');
        let mut end = top.to_vec();
        // The byte after the slash.
        end.push(b'/' + 1);
        let mut taken: Vec<(Vec<u8>, Key)> = self
            .names
            .range(below..end)
            .map(|(path, key)| (path[top.len()..].to_vec(), *key))
            .collect();
        taken.extend(self.names.get(top).map(|key| (Vec::new(), *key)));
        for (rest, key) in &taken {
            let path = [top, rest].concat();
            self.names.remove(&path);
            if let Some(entry) = self.objects.get_mut(key) {
                entry.paths.retain(|known| *known != path);
            }
        }
        taken
    }

    fn put_below(&mut self, top: &[u8], taken: Vec<(Vec<u8>, Key)>) {
        for (rest, key) in taken {
            self.add_name(key, [top, &rest].concat());
        }
    }
}

impl Unsynced {
    /// An object was changed. To be called after the change and before it is reported.
    pub fn changed(&self, key: Key, place: impl FnOnce() -> Place) {
        {
            let mut state = self.state.lock();
            state.version += 1;
            let version = state.version;
            if let Some(entry) = state.objects.get_mut(&key) {
                entry.version = version;
                return;
            }
        }
        let place = place();
        let mut state = self.state.lock();
        match place {
            Place::At(path, links) => state.enter(key, path, links),
            Place::Gone => {}
            Place::Unknown => state.lose_track(),
        }
    }

    /// A changed object has got one more name.
    pub fn linked(&self, key: Key, path: Vec<u8>, links: u64) {
        let mut state = self.state.lock();
        state.add_name(key, path);
        if let Some(entry) = state.objects.get_mut(&key) {
            entry.has_more_names = links > entry.paths.len() as u64;
        }
    }

    /// A name was removed.
    pub fn removed(&self, path: &[u8]) {
        self.state.lock().drop_name(path);
    }

    /// A rename is going to be made; [`Unsynced::end_rename`] must follow.
    pub fn begin_rename(&self) -> u64 {
        let mut state = self.state.lock();
        let ticket = state.ticket();
        state.renames.insert(ticket);
        ticket
    }

    /// It was made from the one path to the other, or not at all.
    pub fn end_rename(&self, ticket: u64, moved: Option<(&[u8], &[u8])>, is_exchange: bool) {
        let mut state = self.state.lock();
        // Two names of one object stay as they are.
        let is_same = |(from, to): &(&[u8], &[u8])| {
            from == to
                || state
                    .names
                    .get(*from)
                    .is_some_and(|key| state.names.get(*to) == Some(key))
        };
        if let Some((from, to)) = moved.filter(|paths| !is_same(paths)) {
            let taken = state.take_below(from);
            if is_exchange {
                let other = state.take_below(to);
                state.put_below(from, other);
            } else {
                // It is replaced: a file, or an empty directory.
                state.drop_name(to);
            }
            state.put_below(to, taken);
            for missed in state.walks.values_mut() {
                missed.push(to.to_vec());
                if is_exchange {
                    missed.push(from.to_vec());
                }
            }
        }
        state.renames.remove(&ticket);
        self.rename_over.notify_all();
    }

    /// A rename was made whose paths are not known.
    pub fn end_unknown_rename(&self, ticket: u64) {
        let mut state = self.state.lock();
        state.version += 1;
        state.lose_track();
        state.renames.remove(&ticket);
        self.rename_over.notify_all();
    }

    /// To be called before an object is synced; the answer is for [`Unsynced::synced`].
    pub fn begin_sync(&self) -> u64 {
        self.state.lock().version
    }

    /// The object was synced. Changes that were made meanwhile may not be covered.
    pub fn synced(&self, key: Key, version: u64) {
        let mut state = self.state.lock();
        if state
            .objects
            .get(&key)
            .is_some_and(|entry| entry.version <= version)
        {
            state.forget(key);
        }
    }

    /// Whether what was there before this process must be taken for not synced.
    pub fn inherits(&self) -> bool {
        self.state.lock().inherited
    }

    /// Whether there were changes that no entry tells of.
    pub fn has_lost_track(&self) -> bool {
        self.state.lock().lost_track.is_some()
    }

    /// Everything that was there at `version` was synced.
    pub fn all_synced(&self, version: u64) {
        let mut state = self.state.lock();
        state.inherited = false;
        if state.lost_track.is_some_and(|lost| lost <= version) {
            state.lost_track = None;
        }
    }

    /// Forgets everything, as after the end of a process.
    pub fn reset(&self) {
        *self.state.lock() = AccountState::default();
    }

    fn wait_for_renames(&self) {
        let mut state = self.state.lock();
        let last = state.last_ticket;
        while state.renames.first().is_some_and(|first| *first <= last) {
            self.rename_over.wait(&mut state);
        }
    }

    fn paths_of(&self, key: Key) -> Vec<Vec<u8>> {
        self.state
            .lock()
            .objects
            .get(&key)
            .map(|entry| entry.paths.clone())
            .unwrap_or_default()
    }
}

/// Syncs every object that has an entry. What is not found is left to a walk: `lost_track` is set.
pub fn sync_entries<B: Tracked>(base: &B) -> Result<()> {
    let keys: Vec<Key> = base
        .unsynced()
        .state
        .lock()
        .objects
        .keys()
        .copied()
        .collect();
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(None);
    in_threads(base.threads().min(keys.len().div_ceil(4)), || {
        while let Some(key) = keys.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(errno) = sync_entry(base, *key) {
                // The others are synced all the same.
                failed.lock().get_or_insert(errno);
            }
        }
    });
    failed.into_inner().map_or(Ok(()), Err)
}

fn sync_entry<B: Tracked>(base: &B, key: Key) -> Result<()> {
    let unsynced = base.unsynced();
    let mut paths = unsynced.paths_of(key);
    loop {
        if paths.is_empty() {
            // Removed, or synced by another thread.
            return Ok(());
        }
        for path in &paths {
            match base.find(path) {
                Ok((inode, attr)) if (attr.dev, attr.ino) == key => {
                    return sync_object(base, &inode, &attr, path);
                }
                Ok(_) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG) => {}
                Err(errno) => return Err(errno),
            }
        }
        // It is being moved, or was moved by another process.
        unsynced.wait_for_renames();
        let now = unsynced.paths_of(key);
        if now == paths {
            let mut state = unsynced.state.lock();
            state.forget(key);
            state.lose_track();
            return Ok(());
        }
        paths = now;
    }
}

fn sync_object<B: Tracked>(base: &B, inode: &B::Inode, attr: &Attr, path: &[u8]) -> Result<()> {
    match attr.kind {
        Kind::File => sync_file(base, inode),
        Kind::Dir => sync_dir(base, inode),
        // No call syncs a symbolic link or a device by itself: it goes with the directory that it is in.
        _ => {
            let version = base.unsynced().begin_sync();
            let end = path.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
            sync_dir(base, &base.find(&path[..end])?.0)?;
            base.unsynced().synced((attr.dev, attr.ino), version);
            Ok(())
        }
    }
}

fn sync_file<B: Tracked>(base: &B, inode: &B::Inode) -> Result<()> {
    let opened = match base.open(inode, Access::Read) {
        Err(Errno::ACCESS) => base.open(inode, Access::Write),
        opened => opened,
    };
    base.sync(&opened?, false)
}

fn sync_dir<B: Tracked>(base: &B, inode: &B::Inode) -> Result<()> {
    match base.sync_dir(inode) {
        // This file system knows no fsync of a directory.
        Err(Errno::INVAL) => Ok(()),
        synced => synced,
    }
}

/// Names in a directory that are to be synced, and what is below them.
struct Task<B: Backing> {
    dir: B::Inode,
    names: Vec<OsString>,
}

struct Walk<'a, B: Tracked> {
    base: &'a B,
    dev: u64,
    /// Last in, first out: so no more directories are held than the tree is deep, for each thread.
    tasks: Mutex<Tasks<B>>,
    more: Condvar,
}

struct Tasks<B: Backing> {
    waiting: Vec<Task<B>>,
    /// Tasks that threads are at work on.
    running: usize,
    failed: Option<Errno>,
}

/// Syncs every file and directory at or below `top`, on the file system that it is on.
pub fn sync_below<B: Tracked>(base: &B, top: &B::Inode) -> Result<()> {
    let unsynced = base.unsynced();
    let ticket = {
        let mut state = unsynced.state.lock();
        let ticket = state.ticket();
        state.walks.insert(ticket, Vec::new());
        ticket
    };
    let mut result = walk(base, top);
    loop {
        let missed = unsynced
            .state
            .lock()
            .walks
            .get_mut(&ticket)
            .map(std::mem::take)
            .unwrap_or_default();
        if missed.is_empty() || result.is_err() {
            break;
        }
        result = missed.iter().try_for_each(|path| match base.find(path) {
            Ok((inode, attr)) if attr.kind == Kind::Dir => walk(base, &inode),
            Ok((inode, attr)) => may_be_gone(sync_object(base, &inode, &attr, path)),
            Err(errno) => may_be_gone(Err(errno)),
        });
    }
    unsynced.state.lock().walks.remove(&ticket);
    result
}

/// An object that is removed while it is looked for needs no sync.
fn may_be_gone(result: Result<()>) -> Result<()> {
    match result {
        Err(Errno::NOENT | Errno::STALE | Errno::NOTDIR | Errno::LOOP) => Ok(()),
        result => result,
    }
}

fn walk<B: Tracked>(base: &B, top: &B::Inode) -> Result<()> {
    let tasks = Tasks {
        waiting: Vec::new(),
        running: 0,
        failed: None,
    };
    let dev = base.attr(top)?.dev;
    let walk = Walk {
        base,
        dev,
        tasks: Mutex::new(tasks),
        more: Condvar::new(),
    };
    walk.dir(top)?;
    in_threads(base.threads(), || walk.work());
    walk.tasks.into_inner().failed.map_or(Ok(()), Err)
}

impl<B: Tracked> Walk<'_, B> {
    fn work(&self) {
        let mut tasks = self.tasks.lock();
        loop {
            let Some(task) = tasks.waiting.pop() else {
                if tasks.running == 0 {
                    self.more.notify_all();
                    return;
                }
                self.more.wait(&mut tasks);
                continue;
            };
            tasks.running += 1;
            drop(tasks);
            let mut failed = None;
            for name in &task.names {
                if let Err(errno) = may_be_gone(self.name(&task.dir, name)) {
                    failed.get_or_insert(errno);
                }
            }
            tasks = self.tasks.lock();
            tasks.running -= 1;
            tasks.failed = tasks.failed.or(failed);
            self.more.notify_all();
        }
    }

    fn name(&self, dir: &B::Inode, name: &OsStr) -> Result<()> {
        let (inode, attr) = self.base.lookup(dir, name)?;
        let synced = match attr.kind {
            // On overlayfs a file may tell another device than its directory.
            Kind::File => sync_file(self.base, &inode),
            // Another file system that is mounted there is looked at by itself.
            Kind::Dir if attr.dev == self.dev => self.dir(&inode),
            _ => Ok(()),
        };
        match synced {
            // A caller that may neither read nor write it, and does not own it, has changed nothing in it.
            Err(Errno::ACCESS) => Ok(()),
            synced => synced,
        }
    }

    fn dir(&self, dir: &B::Inode) -> Result<()> {
        let stream = self.base.open_dir_to_sync(dir)?;
        let mut all = Vec::new();
        self.base.read_dir(&stream, 0, &mut |entry| {
            let is_below = entry.name != "." && entry.name != "..";
            if is_below
                && !matches!(entry.kind, Some(kind) if kind != Kind::File && kind != Kind::Dir)
            {
                all.push(entry.name.to_owned());
            }
            true
        })?;
        drop(stream);
        let mut tasks = self.tasks.lock();
        for names in all.chunks(WALK_NAMES) {
            tasks.waiting.push(Task {
                dir: dir.clone(),
                names: names.to_vec(),
            });
        }
        drop(tasks);
        self.more.notify_all();
        sync_dir(self.base, dir)
    }
}

/// Runs `work` in as many threads, one of which is the caller's.
fn in_threads(count: usize, work: impl Fn() + Sync) {
    std::thread::scope(|scope| {
        for _ in 1..count {
            // If the system gives no more threads, fewer do it.
            let _ = std::thread::Builder::new()
                .name("sync".into())
                .spawn_scoped(scope, &work);
        }
        work();
    });
}

/// The path of what is at `name` below a directory that is at `dir`.
pub fn path_of_entry(dir: Place, name: &OsStr) -> Option<Vec<u8>> {
    match dir {
        Place::At(path, _) => Some(join(&path, name)),
        Place::Gone | Place::Unknown => None,
    }
}

/// The names on a path.
pub fn components(path: &[u8]) -> impl Iterator<Item = &OsStr> {
    path.split(|byte| *byte == b'/')
        .filter(|name| !name.is_empty())
        .map(OsStr::from_bytes)
}

/// A path as the kernel takes it; the top is `.`.
pub fn relative(path: &[u8]) -> OsString {
    if path.is_empty() {
        OsString::from(".")
    } else {
        OsString::from_vec(path.to_vec())
    }
}
