//! The objects that the kernel knows, and the names that lead to them.
//!
//! Invariants
//! * An object of the backing has one [`Inode`], however many names (hard links) it has.
//! * A name has a reference to its parent directory. So an inode with pending data has a path, also when the kernel has
//!   forgotten the directories above.
//! * An inode has the number that the object has in the backing, where that is possible.
//! * The kernel may know more inodes than a process may have descriptors. The objects of the inodes that were used last are
//!   open ([`Objects`]); the others are looked up again by a name. An object is opened for good before it loses its last
//!   known name.
//! * The tables by key and by name have at most twice as many entries as there are objects, or 1024.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZero;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use firn_arena::live::LiveTable;
use firn_backing::lock::Mutex;
use firn_backing::{Attr, Backing, Errno, Kind, Time, Volume};
use quick_cache::sync::Cache;
use smallvec::SmallVec;

use crate::claims::PathClaims;
use crate::{FileIdentity, InodeId, ROOT, Result};

/// Identity of an object in the backing: device and inode.
pub(crate) type Key = (u64, u64);

/// A name in a directory, shared by the object and the table of children.
pub(crate) type Name = Arc<OsStr>;

/// A directory and a name in it.
type Link<B> = (Arc<Inode<B>>, Name);

/// First inode number of objects whose own number cannot be used: above every number seen in practice.
const SYNTHETIC: u64 = 1 << 62;

/// Counts changes of names. The first one stands for all changes by earlier firnds.
static NAME_CHANGES: AtomicU64 = AtomicU64::new(NAMES_OF_EARLIER_FIRND);
const NAMES_OF_EARLIER_FIRND: u64 = 1;

/// The number of the last change of a name.
pub(crate) fn last_name_change() -> u64 {
    NAME_CHANGES.load(Ordering::Acquire)
}

/// The tables are swept of objects that are gone once they have this many entries.
const SWEEP_AT_LEAST: usize = 1024;

/// Files that are remembered after the kernel has forgotten them, because they were synced or cut: about 6 MiB.
const REMEMBERED_MAX: usize = 16_384;

/// The objects of the inodes used last, by [`Inode::serial`].
type Objects<B> = Cache<u64, <B as Volume>::Inode>;

/// One object.
pub(crate) struct Inode<B: Backing> {
    pub id: InodeId,
    /// Never used again, unlike the numbers of inodes.
    serial: u64,
    pub key: Key,
    pub kind: Kind,
    pub btime: Option<firn_backing::Time>,
    /// The object, where it must not be let go.
    held: Mutex<Option<B::Inode>>,
    objects: Arc<Objects<B>>,
    /// Known names.
    names: Mutex<SmallVec<[Link<B>; 1]>>,
    /// A name was made or changed and not synced since by a sync of this object.
    pub name_unsynced: AtomicBool,
    /// Which of all changes of names the last one of its own was.
    names_changed: AtomicU64,
    /// Of a directory: the last change of names before its last sync began.
    entries_synced: AtomicU64,
    /// Data was drained and not synced since.
    pub data_unsynced: AtomicBool,
    /// How the backing showed the data when it was synced, if it was and nothing was written since; what was drained
    /// meanwhile is in [`Inode::data_unsynced`].
    pub synced: Synced,
    /// A writer was killed, or firnd died while one had it open, and it was not emptied since.
    pub is_cut: AtomicBool,
    /// How the backing's file was when the kernel last began to cache it. Few files are read that way.
    pub cached: Mutex<Option<Box<Stamp>>>,
    /// Bytes came by direct access: the kernel may take the file for shorter than it is.
    pub is_size_stale_in_kernel: AtomicBool,
}

/// There is one for each object that the kernel knows or that is held.
const _: () = assert!(size_of::<Inode<firn_backing::DirBacking>>() <= 168);

/// Size and modification time of a file in the backing, in one word. A change beside the mount changes it, unless the
/// time is set back afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fingerprint(NonZero<u64>);

impl Fingerprint {
    pub(crate) fn of(attr: &Attr) -> Self {
        let mut hasher = DefaultHasher::new();
        (attr.size, attr.mtime.sec, attr.mtime.nsec).hash(&mut hasher);
        Self(NonZero::new(hasher.finish()).unwrap_or(NonZero::<u64>::MIN))
    }
}

/// The fingerprint that a sync covered, or none.
#[derive(Default)]
pub(crate) struct Synced(AtomicU64);

impl Synced {
    pub(crate) fn get(&self) -> Option<Fingerprint> {
        NonZero::new(self.0.load(Ordering::Acquire)).map(Fingerprint)
    }

    pub(crate) fn set(&self, covered: Fingerprint) {
        self.0.store(covered.0.get(), Ordering::Release);
    }

    /// The file was changed.
    pub(crate) fn clear(&self) {
        self.0.store(0, Ordering::Release);
    }

    /// The time of the file was changed and nothing else; not if it was changed or synced meanwhile.
    pub(crate) fn replace(&self, before: Fingerprint, after: Fingerprint) {
        let _ = self.0.compare_exchange(
            before.0.get(),
            after.0.get(),
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
    }
}

/// Tells one state of a file's content from a later one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub size: u64,
    pub mtime: Time,
    pub ctime: Time,
    /// A later change shows in the times.
    pub is_settled: bool,
    /// [`Facts::changes_by_others`](firn_backing::Facts::changes_by_others), the last that is known.
    pub changes_by_others: u64,
    /// The kernel has no page from before this one of them.
    pub pages_after: u64,
    /// The contents ([`FileState::changes`](crate::file::FileState)) that it last kept pages of while they were in a memory
    /// file.
    pub held_changes: Option<u64>,
}

impl Stamp {
    pub(crate) fn has_stale_pages(&self) -> bool {
        self.pages_after < self.changes_by_others
    }
}

impl<B: Backing> Inode<B> {
    /// The kernel is about to keep pages of these contents, which are in a memory file; whether those that it may have
    /// are of them.
    pub(crate) fn keep_pages_of(&self, changes: u64) -> bool {
        let mut cached = self.cached.lock();
        let Some(stamp) = cached.as_mut() else {
            return false;
        };
        stamp.held_changes.replace(changes) == Some(changes)
    }
}

impl<B: Backing> FileIdentity for Inode<B> {
    fn number(&self) -> u64 {
        self.key.1
    }

    fn path(&self) -> Vec<u8> {
        self.paths().into_iter().next().unwrap_or_default()
    }
}

impl<B: Backing> Inode<B> {
    /// Whether this is what `attr` tells of. An inode number alone is not enough: it is used again once
    /// the object is gone.
    pub(crate) fn is(&self, attr: &Attr) -> bool {
        let same_birth = self
            .btime
            .zip(attr.btime)
            .is_none_or(|(ours, theirs)| ours == theirs);
        self.key == (attr.dev, attr.ino) && self.kind == attr.kind && same_birth
    }

    fn object_at_hand(&self) -> Option<B::Inode> {
        self.held
            .lock()
            .clone()
            .or_else(|| self.objects.get(&self.serial))
    }

    /// Whether it is a name more than those that were known.
    fn add_name(&self, parent: &Arc<Self>, name: &Name) -> bool {
        let mut names = self.names.lock();
        let is_known = |(p, n): &Link<B>| p.id == parent.id && n == name;
        if names.iter().any(is_known) {
            return false;
        }
        if self.kind == Kind::Dir {
            names.clear();
        }
        names.push((Arc::clone(parent), Arc::clone(name)));
        names.len() > 1
    }

    pub(crate) fn remove_name(&self, parent: InodeId, name: &OsStr) {
        self.names
            .lock()
            .retain(|(p, n)| p.id != parent || **n != *name);
    }

    /// Directories and names.
    pub(crate) fn known_names(&self) -> Vec<(Arc<Self>, Name)> {
        self.names.lock().to_vec()
    }

    pub(crate) fn parents(&self) -> Vec<Arc<Self>> {
        self.names
            .lock()
            .iter()
            .map(|(p, _)| Arc::clone(p))
            .collect()
    }

    /// How its data was in the backing when a sync covered all of it, and every name that leads to it from the top.
    pub(crate) fn synced(&self) -> Option<Fingerprint> {
        let is_covered = !self.data_unsynced.load(Ordering::Acquire) && self.are_names_synced();
        self.synced.get().filter(|_| is_covered)
    }

    /// By a sync of the object, or of the directories that have the names.
    pub(crate) fn are_names_synced(&self) -> bool {
        let is_synced = !self.name_unsynced.load(Ordering::Acquire);
        let changed = self.names_changed.load(Ordering::Acquire);
        self.parents().iter().all(|parent| {
            (is_synced || parent.entries_synced.load(Ordering::Acquire) >= changed)
                && parent.are_names_synced()
        })
    }

    /// A name was made or changed in the backing.
    pub(crate) fn note_name_change(&self) {
        let change = NAME_CHANGES.fetch_add(1, Ordering::AcqRel) + 1;
        self.names_changed.store(change, Ordering::Release);
        self.name_unsynced.store(true, Ordering::Release);
    }

    /// A sync of this directory covered the changes of names up to `change`, which was the last one before it began.
    pub(crate) fn note_entries_synced(&self, change: u64) {
        self.entries_synced.fetch_max(change, Ordering::AcqRel);
    }

    /// Notes whether its file was cut, for when firnd knows no more of the file than the inode. To be called with the
    /// file's lock: of two closes at once, the later one counts.
    pub(crate) fn note_cut(&self, is_cut: bool) {
        self.is_cut.store(is_cut, Ordering::Release);
    }

    /// Whether firnd knows more of it than the backing can tell.
    pub(crate) fn is_remembered(&self) -> bool {
        self.synced.get().is_some() || self.is_cut.load(Ordering::Acquire)
    }

    pub(crate) fn has_names(&self) -> bool {
        !self.names.lock().is_empty()
    }

    /// Every known path, relative to the root.
    pub(crate) fn paths(&self) -> Vec<Vec<u8>> {
        if self.id == ROOT {
            return vec![Vec::new()];
        }
        let names = self.names.lock().clone();
        names
            .iter()
            .filter_map(|(parent, name)| parent.path_of(name))
            .collect()
    }

    /// The path of a name in this directory, if one of the directory is known.
    pub(crate) fn path_of(&self, name: &OsStr) -> Option<Vec<u8>> {
        let mut path = self.paths().into_iter().next()?;
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name.as_bytes());
        Some(path)
    }
}

impl<B: Backing> Drop for Inode<B> {
    fn drop(&mut self) {
        self.objects.remove(&self.serial);
    }
}

struct Known<B: Backing> {
    inode: Arc<Inode<B>>,
    lookups: u64,
}

struct Tables<B: Backing> {
    by_id: HashMap<InodeId, Known<B>>,
    by_key: HashMap<Key, Weak<Inode<B>>>,
    children: HashMap<(InodeId, Name), Weak<Inode<B>>>,
    /// Number of objects at which the tables are swept for those that are gone.
    sweep_at: usize,
    next_synthetic: u64,
    last_serial: u64,
}

impl<B: Backing> Tables<B> {
    /// Drops what is known of objects that are gone: not all of them go by [`Names::forget`]. A file with data
    /// outlives what the kernel knows, and others are only looked up by a path.
    fn sweep(&mut self) {
        if self.by_key.len() < self.sweep_at {
            return;
        }
        self.by_key.retain(|_, inode| inode.strong_count() > 0);
        self.children.retain(|_, inode| inode.strong_count() > 0);
        self.sweep_at = SWEEP_AT_LEAST.max(2 * self.by_key.len());
    }
}

/// A file that was synced or cut.
struct Remembered<B: Backing> {
    inode: Arc<Inode<B>>,
    /// Bytes that it had when it was synced.
    bytes: u64,
}

/// All inodes.
pub(crate) struct Names<B: Backing> {
    root: Arc<Inode<B>>,
    tables: Mutex<Tables<B>>,
    /// An earlier firnd may have made names and not synced them: the first sync of each file syncs its names too.
    names_unsynced: bool,
    objects: Arc<Objects<B>>,
    /// Files that were synced or cut, by [`Inode::serial`].
    remembered: Mutex<BTreeMap<u64, Remembered<B>>>,
    /// How often names changed in the backing without a request for it.
    changes_below: AtomicU64,
    /// Paths that change while a rename is done below and noted here, and stay while an object is looked up
    /// again by its name.
    moving: PathClaims,
    /// What the kernel knows, for the next firnd.
    live: OnceLock<Arc<LiveTable>>,
}

/// What tells an object from others.
#[derive(Clone, Copy)]
pub(crate) struct KnownObject {
    pub key: Key,
    pub kind: Kind,
    pub btime: Option<Time>,
}

impl KnownObject {
    fn of(attr: &Attr) -> Self {
        Self {
            key: (attr.dev, attr.ino),
            kind: attr.kind,
            btime: attr.btime,
        }
    }
}

/// Numbers that this firnd gives are above this one.
#[derive(Clone, Copy)]
pub(crate) struct NumberBase(pub u64);

/// Whether the kernel's number of an object leads to it only by the table: a name that is looked up again gives a file its
/// inode number, and a process may be in a directory.
fn is_noted<B: Backing>(inode: &Inode<B>) -> bool {
    inode.id != ROOT && (inode.kind == Kind::Dir || inode.id.0 >= SYNTHETIC)
}

impl<B: Backing> Names<B> {
    /// From now on `table` has what the kernel knows.
    pub(crate) fn note_live(&self, table: Arc<LiveTable>) {
        let _ = self.live.set(table);
    }

    pub(crate) fn live(&self) -> Option<&Arc<LiveTable>> {
        self.live.get()
    }

    /// Numbers that an earlier firnd gave are not given again.
    pub(crate) fn begin_numbers(&self, base: NumberBase) {
        let mut tables = self.tables.lock();
        tables.next_synthetic = tables.next_synthetic.max(SYNTHETIC + base.0);
    }

    /// Goes on with an object that the kernel knows from an earlier firnd. It is looked up when it is used.
    pub(crate) fn restore(
        &self,
        id: InodeId,
        object: KnownObject,
        name: Option<(&Arc<Inode<B>>, &OsStr)>,
        lookups: u64,
    ) -> Arc<Inode<B>> {
        let mut tables = self.tables.lock();
        tables.last_serial += 1;
        let serial = tables.last_serial;
        let inode = Arc::new(new_inode(
            id,
            serial,
            &self.objects,
            object,
            self.names_unsynced,
        ));
        if let Some((parent, name)) = name {
            let name = Name::from(name);
            inode.add_name(parent, &name);
            tables
                .children
                .insert((parent.id, name), Arc::downgrade(&inode));
        }
        tables.by_key.insert(object.key, Arc::downgrade(&inode));
        // The kernel forgets a file after its last close, and tells how many look-ups it had.
        let lookups = lookups.max(1);
        let known = Known {
            inode: Arc::clone(&inode),
            lookups,
        };
        tables.by_id.insert(id, known);
        inode
    }

    /// The names of an object changed: the table has one of them.
    fn note_name(&self, inode: &Inode<B>) {
        if let Some(live) = self.live.get() {
            let node = inode.as_node(0);
            live.end_move(node.id, node.parent, &node.name);
        }
    }

    /// Holds the objects of `objects_max` inodes beside those that it must.
    pub(crate) fn new(
        object: B::Inode,
        attr: &Attr,
        names_unsynced: bool,
        objects_max: usize,
    ) -> Self {
        let objects = Arc::new(Cache::new(objects_max));
        let root = Arc::new(new_inode(ROOT, 0, &objects, KnownObject::of(attr), false));
        *root.held.lock() = Some(object);
        let mut by_id = HashMap::new();
        by_id.insert(
            ROOT,
            Known {
                inode: Arc::clone(&root),
                lookups: 1,
            },
        );
        let by_key = HashMap::from([(root.key, Arc::downgrade(&root))]);
        let tables = Tables {
            by_id,
            by_key,
            children: HashMap::new(),
            sweep_at: SWEEP_AT_LEAST,
            next_synthetic: SYNTHETIC,
            last_serial: 0,
        };
        Self {
            root,
            tables: Mutex::new(tables),
            names_unsynced,
            objects,
            remembered: Mutex::new(BTreeMap::new()),
            changes_below: AtomicU64::new(0),
            moving: PathClaims::default(),
            live: OnceLock::new(),
        }
    }

    /// How often names changed in the backing without a request for it. A thread that enters a name compares this
    /// before and after.
    pub(crate) fn changes(&self) -> u64 {
        self.changes_below.load(Ordering::Acquire)
    }

    /// Names change in the backing without a request for it.
    pub(crate) fn note_changes_below(&self) {
        self.changes_below.fetch_add(1, Ordering::AcqRel);
    }

    /// The object of an inode, looked up again where it was let go; ESTALE where no known name leads to it
    /// any more.
    pub(crate) fn object(&self, backing: &B, inode: &Inode<B>) -> Result<B::Inode> {
        if let Some(object) = inode.object_at_hand() {
            return Ok(object);
        }
        let _names_stay = self.moving.stay(|| inode.paths());
        self.look_up_again(backing, inode)
    }

    fn look_up_again(&self, backing: &B, inode: &Inode<B>) -> Result<B::Inode> {
        if let Some(object) = inode.object_at_hand() {
            return Ok(object);
        }
        let names = inode.names.lock().clone();
        let mut errno = Errno::STALE;
        for (parent, name) in &names {
            let found = self
                .look_up_again(backing, parent)
                .and_then(|parent| backing.lookup(&parent, name));
            match found {
                Ok((object, attr)) if inode.is(&attr) => {
                    self.objects.insert(inode.serial, object.clone());
                    return Ok(object);
                }
                Ok(_) | Err(Errno::NOENT | Errno::NOTDIR) => {}
                Err(other) => errno = other,
            }
        }
        Err(errno)
    }

    /// Called before a name goes: if no other is known, the object is held from here on. Fails where there is no
    /// descriptor left for that.
    pub(crate) fn hold_last(&self, backing: &B, parent: InodeId, name: &OsStr) -> Result<()> {
        match self.child(parent, name) {
            Some(inode) => self.hold_if_last(backing, &inode, parent, name),
            None => Ok(()),
        }
    }

    /// [`Names::hold_last`] for an inode that has, or had, this name.
    pub(crate) fn hold_if_last(
        &self,
        backing: &B,
        inode: &Inode<B>,
        parent: InodeId,
        name: &OsStr,
    ) -> Result<()> {
        let another = inode
            .names
            .lock()
            .iter()
            .any(|(p, n)| p.id != parent || **n != *name);
        if another {
            return Ok(());
        }
        match self.object(backing, inode) {
            Ok(object) => *inode.held.lock() = Some(object),
            Err(errno @ (Errno::MFILE | Errno::NFILE)) => return Err(errno),
            // An object that the backing no longer has cannot be held; its next use returns ESTALE.
            Err(_) => {}
        }
        Ok(())
    }

    /// Lets go of the objects that need not be held.
    pub(crate) fn drop_objects(&self) {
        self.objects.clear();
    }

    /// Renames in the backing and here, as one step for a thread that looks an object up again.
    pub(crate) fn rename(
        &self,
        from: (&Arc<Inode<B>>, &OsStr),
        to: (&Arc<Inode<B>>, &OsStr),
        exchange: bool,
        below: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let paths = || {
            [from, to]
                .iter()
                .filter_map(|(dir, name)| dir.path_of(name))
                .collect()
        };
        let _names_move = self.moving.change(paths);
        let moved = self.child(from.0.id, from.1);
        let exchanged = self.child(to.0.id, to.1).filter(|_| exchange);
        if let Some(live) = self.live.get() {
            for (inode, (dir, name)) in [(&moved, to), (&exchanged, from)] {
                if let Some(inode) = inode {
                    live.begin_move(inode.id.0, dir.id.0, name.as_bytes());
                }
            }
        }
        if let Err(errno) = below() {
            for inode in moved.iter().chain(&exchanged) {
                self.note_name(inode);
            }
            return Err(errno);
        }
        self.renamed(from, to, exchange);
        Ok(())
    }

    /// A rename was done by an earlier firnd.
    pub(crate) fn note_renamed(
        &self,
        from: (&Arc<Inode<B>>, &OsStr),
        to: (&Arc<Inode<B>>, &OsStr),
        exchange: bool,
    ) {
        self.renamed(from, to, exchange);
    }

    /// The object with this identity, if one is known.
    pub(crate) fn by_key(&self, key: Key) -> Option<Arc<Inode<B>>> {
        self.tables.lock().by_key.get(&key).and_then(Weak::upgrade)
    }

    /// Holds an object from here on that no name leads to.
    pub(crate) fn hold(&self, inode: &Inode<B>, object: B::Inode) {
        *inode.held.lock() = Some(object);
    }

    pub(crate) fn root(&self) -> &Arc<Inode<B>> {
        &self.root
    }

    pub(crate) fn get(&self, id: InodeId) -> Option<Arc<Inode<B>>> {
        self.tables
            .lock()
            .by_id
            .get(&id)
            .map(|known| Arc::clone(&known.inode))
    }

    /// All that is known, also objects whose inode number another one has by now.
    pub(crate) fn all(&self) -> Vec<Arc<Inode<B>>> {
        let tables = self.tables.lock();
        let mut all: Vec<_> = tables
            .by_id
            .values()
            .map(|known| Arc::clone(&known.inode))
            .collect();
        let unknown_to_kernel = |inode: &Arc<Inode<B>>| {
            !tables
                .by_id
                .get(&inode.id)
                .is_some_and(|known| Arc::ptr_eq(&known.inode, inode))
        };
        all.extend(
            tables
                .by_key
                .values()
                .filter_map(Weak::upgrade)
                .filter(unknown_to_kernel),
        );
        all
    }

    /// The file was synced with this many bytes, or cut: it stays known, also when the kernel forgets it.
    pub(crate) fn remember(&self, inode: &Arc<Inode<B>>, bytes: u64) {
        if !inode.has_names() {
            return;
        }
        let dropped = {
            let mut remembered = self.remembered.lock();
            let inode = Arc::clone(inode);
            remembered.insert(inode.serial, Remembered { inode, bytes });
            let is_full = remembered.len() > REMEMBERED_MAX;
            is_full.then(|| remembered.pop_first())
        };
        // Without the lock: the last reference may close a descriptor.
        drop(dropped);
    }

    /// Files that this engine knows to be synced and not changed since, and their bytes when they were. Of more than
    /// [`REMEMBERED_MAX`] the oldest are not counted.
    pub(crate) fn count_synced(&self) -> (u64, u64) {
        let remembered = self.remembered.lock();
        let synced = remembered
            .values()
            .filter(|file| file.inode.synced().is_some());
        synced.fold((0, 0), |(files, bytes), file| {
            (files + 1, bytes + file.bytes)
        })
    }

    /// A file without a name is not remembered: it may hold a descriptor.
    fn forget_nameless(&self, inode: &Inode<B>) {
        if !inode.has_names() {
            let dropped = self.remembered.lock().remove(&inode.serial);
            drop(dropped);
        }
    }

    /// The child, if the kernel or the engine knows it.
    pub(crate) fn child(&self, parent: InodeId, name: &OsStr) -> Option<Arc<Inode<B>>> {
        self.tables
            .lock()
            .children
            .get(&(parent, name.into()))?
            .upgrade()
    }

    /// The inode of an object that was found as `name` in `parent`; `lookups` more references by the
    /// kernel.
    pub(crate) fn register(
        &self,
        object: B::Inode,
        attr: &Attr,
        parent: &Arc<Inode<B>>,
        name: &OsStr,
        lookups: u64,
    ) -> Arc<Inode<B>> {
        let mut guard = self.tables.lock();
        let tables = &mut *guard;
        let key = (attr.dev, attr.ino);
        let inode = match tables.by_key.get(&key).and_then(Weak::upgrade) {
            Some(inode) if inode.is(attr) => inode,
            _ => {
                let direct = InodeId(attr.ino);
                let usable = attr.dev == self.root.key.0 && attr.ino > 1 && attr.ino < SYNTHETIC;
                let id = if usable && !tables.by_id.contains_key(&direct) {
                    direct
                } else {
                    tables.next_synthetic += 1;
                    InodeId(tables.next_synthetic)
                };
                tables.last_serial += 1;
                let inode = new_inode(
                    id,
                    tables.last_serial,
                    &self.objects,
                    KnownObject::of(attr),
                    self.names_unsynced,
                );
                let inode = Arc::new(inode);
                tables.sweep();
                tables.by_key.insert(key, Arc::downgrade(&inode));
                inode
            }
        };
        if inode.id != ROOT {
            self.objects.insert(inode.serial, object);
            let name = Name::from(name);
            if inode.add_name(parent, &name) && self.names_unsynced {
                inode.note_name_change();
            }
            tables
                .children
                .insert((parent.id, name), Arc::downgrade(&inode));
        }
        if lookups > 0 {
            let known = tables.by_id.entry(inode.id).or_insert_with(|| Known {
                inode: Arc::clone(&inode),
                lookups: 0,
            });
            known.lookups += lookups;
            if let Some(live) = self.live.get().filter(|_| is_noted(&inode)) {
                let node = inode.as_node(known.lookups);
                live.note_node(&node);
                live.note_found(node.id, node.parent, &node.name);
            }
        }
        inode
    }

    /// The kernel drops `count` references.
    pub(crate) fn forget(&self, id: InodeId, count: u64) {
        let mut tables = self.tables.lock();
        let Some(known) = tables.by_id.get_mut(&id) else {
            return;
        };
        known.lookups = known.lookups.saturating_sub(count);
        if known.lookups > 0 || id == ROOT {
            return;
        }
        if let Some(live) = self.live.get() {
            live.forget_node(id.0);
        }
        let inode = tables.by_id.remove(&id).expect("just seen").inode;
        // Files with pending data hold the inode; else this is the last reference.
        if Arc::strong_count(&inode) == 1 {
            if tables
                .by_key
                .get(&inode.key)
                .is_some_and(|known| known.as_ptr() == Arc::as_ptr(&inode))
            {
                tables.by_key.remove(&inode.key);
            }
            for (parent, name) in inode.names.lock().iter() {
                tables.children.remove(&(parent.id, name.clone()));
            }
        }
        drop(tables);
    }

    /// A name is gone.
    pub(crate) fn unlinked(&self, parent: InodeId, name: &OsStr) {
        let gone = self.tables.lock().children.remove(&(parent, name.into()));
        if let Some(inode) = gone.and_then(|weak| weak.upgrade()) {
            inode.remove_name(parent, name);
            self.note_name(&inode);
            self.forget_nameless(&inode);
        }
    }

    /// A name does not lead to `inode`; it may lead to another one.
    pub(crate) fn drop_name(&self, parent: InodeId, name: &OsStr, inode: &Inode<B>) {
        let mut tables = self.tables.lock();
        let key = (parent, Name::from(name));
        if tables
            .children
            .get(&key)
            .is_some_and(|known| std::ptr::eq(known.as_ptr(), inode))
        {
            tables.children.remove(&key);
        }
        drop(tables);
        inode.remove_name(parent, name);
        self.note_name(inode);
        self.forget_nameless(inode);
    }

    /// A name moved over another, or the two changed places.
    fn renamed(
        &self,
        from: (&Arc<Inode<B>>, &OsStr),
        to: (&Arc<Inode<B>>, &OsStr),
        exchange: bool,
    ) {
        let mut tables = self.tables.lock();
        let from_key = (from.0.id, Name::from(from.1));
        let to_key = (to.0.id, Name::from(to.1));
        let moved = tables
            .children
            .remove(&from_key)
            .and_then(|weak| weak.upgrade());
        let replaced = tables
            .children
            .remove(&to_key)
            .and_then(|weak| weak.upgrade());
        if let Some(inode) = &replaced {
            inode.remove_name(to.0.id, to.1);
        }
        if let Some(inode) = &moved {
            inode.remove_name(from.0.id, from.1);
            inode.add_name(to.0, &to_key.1);
            inode.note_name_change();
            tables.children.insert(to_key, Arc::downgrade(inode));
        }
        if exchange && let Some(inode) = &replaced {
            inode.add_name(from.0, &from_key.1);
            inode.note_name_change();
            tables.children.insert(from_key, Arc::downgrade(inode));
        }
        drop(tables);
        for inode in moved.iter().chain(&replaced) {
            self.note_name(inode);
        }
        if let Some(inode) = &replaced {
            self.forget_nameless(inode);
        }
    }
}

fn new_inode<B: Backing>(
    id: InodeId,
    serial: u64,
    objects: &Arc<Objects<B>>,
    KnownObject { key, kind, btime }: KnownObject,
    name_unsynced: bool,
) -> Inode<B> {
    Inode {
        id,
        serial,
        key,
        kind,
        btime,
        held: Mutex::new(None),
        objects: Arc::clone(objects),
        names: Mutex::new(SmallVec::new()),
        name_unsynced: AtomicBool::new(name_unsynced),
        names_changed: AtomicU64::new(NAMES_OF_EARLIER_FIRND),
        entries_synced: AtomicU64::new(0),
        data_unsynced: AtomicBool::new(false),
        synced: Synced::default(),
        is_cut: AtomicBool::new(false),
        cached: Mutex::new(None),
        is_size_stale_in_kernel: AtomicBool::new(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_sim::SimBacking;

    #[test]
    fn inodes_that_nobody_has_are_not_kept() {
        let backing = SimBacking::new();
        let root = backing.root();
        let attr = backing.attr(&root).expect("root");
        let names = Names::<SimBacking>::new(root.clone(), &attr, false, 16);
        let mut kept = Vec::new();
        for n in 0..10 * SWEEP_AT_LEAST {
            let name = n.to_string();
            let attr = Attr {
                ino: attr.ino + 1 + n as u64,
                kind: Kind::File,
                ..attr
            };
            let inode = names.register(root.clone(), &attr, names.root(), name.as_ref(), 0);
            if n % 100 == 0 {
                kept.push((name, inode));
            }
        }
        let tables = names.tables.lock();
        assert!(tables.by_key.len().max(tables.children.len()) <= SWEEP_AT_LEAST);
        drop(tables);
        for (name, inode) in kept {
            assert!(
                names
                    .child(ROOT, name.as_ref())
                    .is_some_and(|known| Arc::ptr_eq(&known, &inode))
            );
        }
    }
}
