//! Inodes: the objects of the backing (the directory that the mount serves) that the kernel or firnd uses, and the
//! names that lead to them.
//!
//! Terms
//! * A *lookup* is a reference that the kernel has to an inode; the kernel gives references back with FORGET.
//! * An inode's *object* is the backing's own handle of it, for example a descriptor.
//! * The *live table* is a mapped file. It records the inodes and handles that the kernel has, so that the next firnd
//!   (the process that serves the mount) can resume the mount if this one dies.
//! * A *synthetic* number is an inode number that the engine assigns to an object whose own number cannot be used.
//!
//! Invariants
//! * An object of the backing has one [`Inode`], whatever its number of names (hard links).
//! * A name has a reference to its parent directory. So an inode with pending data has a path even after the kernel has
//!   forgotten the directories above it.
//! * An inode has the object's number in the backing, if that number is free and usable.
//! * Before an object loses its last known name, it is opened permanently.
//! * Entries of dropped inodes are removed when the table by key has 1024 entries. Later they are removed when it has
//!   twice as many entries as after the last time, and at least 1024.
//!
//! The kernel may know more inodes than a process may have descriptors. So only the objects of recently used inodes are
//! open ([`Objects`]). Any other object is looked up by a name at its next use.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZero;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use firn_arena::live::LiveTable;
use firn_backing::lock::Mutex;
use firn_backing::{Attr, Backing, Errno, Kind, Time, Volume, join_path};
use quick_cache::sync::Cache;
use smallvec::SmallVec;

use crate::claims::PathClaims;
use crate::{FileIdentity, InodeId, ROOT, Result};

/// Device and inode number of an object in the backing. A removed object and a later one may have the same key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ObjectKey {
    pub dev: u64,
    pub ino: u64,
}

impl ObjectKey {
    pub(crate) fn from_attr(attr: &Attr) -> Self {
        Self {
            dev: attr.dev,
            ino: attr.ino,
        }
    }
}

/// A name in a directory, shared by the object and the table of children.
pub(crate) type Name = Arc<OsStr>;

/// A directory and a name in it.
type Link<B> = (Arc<Inode<B>>, Name);

/// Lowest number of an object that an inode may have. Number 0 is none, and 1 is the root, as in FUSE.
const FIRST_USABLE_NUMBER: u64 = 2;
/// Synthetic numbers are above this number, which no inode number of a real file system reaches.
const FIRST_SYNTHETIC_NUMBER: u64 = 1 << 62;

/// Number of the last change of a name in this process.
static NAME_CHANGES: AtomicU64 = AtomicU64::new(BEFORE_THIS_FIRND);
/// Number of the changes that earlier firnds made, as one change.
const BEFORE_THIS_FIRND: u64 = 1;

/// Returns the number of the last change of a name.
pub(crate) fn last_name_change() -> u64 {
    NAME_CHANGES.load(Ordering::Acquire)
}

/// Number of objects at which entries of objects that no longer exist are first removed from the tables.
const SWEEP_OBJECTS_MIN: usize = 1024;

/// Maximum number of files that are remembered after the kernel forgot them, because they were synced or cut. These
/// take about 6 MiB of memory.
const REMEMBERED_FILES_MAX: usize = 16_384;

/// The objects of recently used inodes, by [`Inode::serial`].
type Objects<B> = Cache<u64, <B as Volume>::Inode>;

/// One object of the backing.
pub(crate) struct Inode<B: Backing> {
    pub id: InodeId,
    /// Number of this inode in this process. It is never used again, unlike an inode id.
    pub serial: u64,
    pub key: ObjectKey,
    pub kind: Kind,
    pub btime: Option<firn_backing::Time>,
    /// The object, if it must remain open: the object of the root, or an object to which no name may lead any more.
    kept_open_object: Mutex<Option<B::Inode>>,
    /// Cache of the objects of recently used inodes, shared by all inodes.
    objects: Arc<Objects<B>>,
    /// Each known name with its directory. If this inode is a directory, it has at most one name.
    names: Mutex<SmallVec<[Link<B>; 1]>>,
    /// Whether a name was made or changed since the last sync of this object.
    pub name_unsynced: AtomicBool,
    /// Number ([`last_name_change`]) of the last change of a name of this inode.
    names_changed_at: AtomicU64,
    /// For a directory: number ([`last_name_change`]) of the last change of any name before its last sync began.
    entries_synced_at: AtomicU64,
    /// Whether data was drained since the last sync.
    pub data_unsynced: AtomicBool,
    /// Fingerprint of the data at its last sync. Empty if the data was never synced or was written since. Data that was
    /// drained since is recorded in [`Inode::data_unsynced`].
    pub synced: Synced,
    /// Whether the file is incomplete: its writer was killed, or firnd died while a writer had it open. A truncation to
    /// 0 bytes clears this.
    pub is_cut: AtomicBool,
    /// State of the backing's file when the kernel last began to cache its pages. It is boxed because the kernel caches
    /// pages of few files.
    pub page_cache_stamp: Mutex<Option<Box<PageCacheStamp>>>,
    /// Whether a client wrote bytes directly, so that the kernel may have recorded a length that is too small.
    pub is_size_stale_in_kernel: AtomicBool,
}

/// Bounds the memory of an inode: there is one for each object that the kernel knows or that has pending data.
const _: () = assert!(size_of::<Inode<firn_backing::DirBacking>>() <= 168);

/// A name in a directory, which need not exist.
pub(crate) struct DirName<'a, B: Backing> {
    pub dir: &'a Arc<Inode<B>>,
    pub name: &'a OsStr,
}

impl<B: Backing> Clone for DirName<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backing> Copy for DirName<'_, B> {}

impl<B: Backing> DirName<'_, B> {
    /// Returns the path of the name; `None` if the directory has no known path.
    pub(crate) fn path(&self) -> Option<Vec<u8>> {
        self.dir.path_of(self.name)
    }
}

/// Hash of size and modification time of a file in the backing. It reveals a change by a program that does not use the
/// mount, unless the time was set back afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fingerprint(NonZero<u64>);

impl Fingerprint {
    pub(crate) fn from_attr(attr: &Attr) -> Self {
        let mut hasher = DefaultHasher::new();
        (attr.size, attr.mtime.sec, attr.mtime.nsec).hash(&mut hasher);
        Self(NonZero::new(hasher.finish()).unwrap_or(NonZero::<u64>::MIN))
    }
}

/// The fingerprint that a sync covered; 0 stands for none.
#[derive(Default)]
pub(crate) struct Synced(AtomicU64);

impl Synced {
    /// Returns the fingerprint that a sync covered, if the file was not changed since.
    pub(crate) fn get(&self) -> Option<Fingerprint> {
        NonZero::new(self.0.load(Ordering::Acquire)).map(Fingerprint)
    }

    /// Records that a sync covered the file in this state.
    pub(crate) fn set(&self, covered: Fingerprint) {
        self.0.store(covered.0.get(), Ordering::Release);
    }

    /// Forgets the fingerprint, because the file was changed.
    pub(crate) fn clear(&self) {
        self.0.store(0, Ordering::Release);
    }

    /// Replaces the fingerprint after a change of the file's time alone. Does nothing if the file was changed or
    /// synced meanwhile.
    pub(crate) fn replace(&self, old: Fingerprint, new: Fingerprint) {
        let _ = self.0.compare_exchange(
            old.0.get(),
            new.0.get(),
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
    }
}

/// State of a file in the backing when the kernel last began to cache its pages. A later open compares it with the
/// present state: if both are equal, pages may remain in the kernel's cache.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageCacheStamp {
    pub size: u64,
    pub mtime: Time,
    pub ctime: Time,
    /// Whether any later change is certain to change the times, because the clock has advanced since they were set.
    pub are_times_old: bool,
    /// Last known value of [`Facts::changes_by_others`](firn_backing::Facts::changes_by_others).
    pub changes_by_others: u64,
    /// Number of changes by other hosts ([`Facts::changes_by_others`](firn_backing::Facts)) that every page in the
    /// kernel's cache contains. The number grows when the kernel drops its pages.
    ///
    /// It is 0 after a drain of a file that other hosts also write, because bytes of another host may have replaced
    /// bytes of this host that are in the pages.
    pub changes_in_pages: u64,
    /// Value of [`FileState::changes`](crate::file::FileState) of the contents that the kernel last cached from a
    /// memory file.
    pub memory_file_changes: Option<u64>,
}

impl PageCacheStamp {
    /// Returns the stamp of pages of unknown age: the kernel must drop them.
    pub(crate) fn stale() -> Self {
        Self {
            size: 0,
            mtime: Time::default(),
            ctime: Time::default(),
            are_times_old: false,
            changes_by_others: 1,
            changes_in_pages: 0,
            memory_file_changes: None,
        }
    }

    /// Returns whether the kernel may have pages from before the last change by another host.
    pub(crate) fn has_stale_pages(&self) -> bool {
        self.changes_in_pages < self.changes_by_others
    }
}

impl<B: Backing> Inode<B> {
    /// Records that the kernel is about to cache pages of a memory file with the contents of version `changes`
    /// ([`FileState::changes`](crate::file::FileState)). Returns whether the pages in its cache are of these contents.
    pub(crate) fn record_memory_file_pages(&self, changes: u64) -> bool {
        let mut page_cache_stamp = self.page_cache_stamp.lock();
        let Some(stamp) = page_cache_stamp.as_mut() else {
            return false;
        };
        stamp.memory_file_changes.replace(changes) == Some(changes)
    }
}

impl<B: Backing> FileIdentity for Inode<B> {
    fn number(&self) -> u64 {
        self.key.ino
    }

    fn path(&self) -> Vec<u8> {
        self.paths().into_iter().next().unwrap_or_default()
    }
}

impl<B: Backing> Inode<B> {
    /// Returns whether this inode belongs to the object that `attr` describes. The inode number alone is not enough,
    /// because the backing may use it again after the object is removed. So the birth times are compared, if both are
    /// known.
    pub(crate) fn is_object(&self, attr: &Attr) -> bool {
        let births = self.btime.zip(attr.btime);
        let has_same_birth = births.is_none_or(|(own_birth, birth)| own_birth == birth);
        self.key == ObjectKey::from_attr(attr) && self.kind == attr.kind && has_same_birth
    }

    /// Returns whether the object was created after that of `other`, which has the same number in the backing. Without
    /// birth times, the order of the inode numbers decides: synthetic numbers are larger than others, and ascend.
    fn is_newer_than(&self, other: &Self) -> bool {
        match self.btime.zip(other.btime) {
            Some((birth, other_birth)) if birth != other_birth => birth > other_birth,
            _ => self.id.0 > other.id.0,
        }
    }

    /// Returns the object if it is open, without a call of the backing.
    fn cached_object(&self) -> Option<B::Inode> {
        self.kept_open_object
            .lock()
            .clone()
            .or_else(|| self.objects.get(&self.serial))
    }

    /// Adds a name, unless it is known. Returns whether the inode now has several names.
    fn add_name(&self, parent: &Arc<Self>, name: &Name) -> bool {
        let mut names = self.names.lock();
        let is_same = |(known_parent, known_name): &Link<B>| {
            known_parent.id == parent.id && known_name == name
        };
        if names.iter().any(is_same) {
            return false;
        }
        // A directory has one name, so a new one means that it was moved.
        if self.kind == Kind::Dir {
            names.clear();
        }
        names.push((Arc::clone(parent), Arc::clone(name)));
        names.len() > 1
    }

    /// Forgets a name.
    pub(crate) fn remove_name(&self, parent: InodeId, name: &OsStr) {
        self.names.lock().retain(|(known_parent, known_name)| {
            known_parent.id != parent || **known_name != *name
        });
    }

    /// Returns each known name with its directory.
    pub(crate) fn names_with_parents(&self) -> Vec<(Arc<Self>, Name)> {
        self.names.lock().to_vec()
    }

    /// Returns the directories that have a name of this inode.
    pub(crate) fn parents(&self) -> Vec<Arc<Self>> {
        self.names
            .lock()
            .iter()
            .map(|(parent, _)| Arc::clone(parent))
            .collect()
    }

    /// Returns the fingerprint of the data at its last sync, if that sync covered all data and each name from the
    /// root on.
    pub(crate) fn synced(&self) -> Option<Fingerprint> {
        if self.data_unsynced.load(Ordering::Acquire) || !self.are_names_synced() {
            return None;
        }
        self.synced.get()
    }

    /// Returns whether each name up to the root is synced: by a sync of the object, or by a sync of the directory that
    /// contains the name.
    pub(crate) fn are_names_synced(&self) -> bool {
        let is_synced_by_object = !self.name_unsynced.load(Ordering::Acquire);
        let last_change = self.names_changed_at.load(Ordering::Acquire);
        let is_synced_by =
            |parent: &Arc<Self>| parent.entries_synced_at.load(Ordering::Acquire) >= last_change;
        let parents = self.parents();
        parents.iter().all(|parent| {
            (is_synced_by_object || is_synced_by(parent)) && parent.are_names_synced()
        })
    }

    /// Records that a name of this inode was made or changed in the backing.
    pub(crate) fn record_name_change(&self) {
        let change = NAME_CHANGES.fetch_add(1, Ordering::AcqRel) + 1;
        self.names_changed_at.store(change, Ordering::Release);
        self.name_unsynced.store(true, Ordering::Release);
    }

    /// Records that a sync of this directory covered all changes of names up to `change`. The caller reads that
    /// number before the sync begins.
    pub(crate) fn record_entries_synced(&self, change: u64) {
        self.entries_synced_at.fetch_max(change, Ordering::AcqRel);
    }

    /// Records in the inode whether the file was cut, because the inode outlives the file's state. The caller must hold
    /// the file's lock, so that the later one of two concurrent closes counts.
    pub(crate) fn record_cut(&self, is_cut: bool) {
        self.is_cut.store(is_cut, Ordering::Release);
    }

    /// Returns whether the inode has facts that are not in the backing: that the file was synced, or that it was cut.
    pub(crate) fn is_remembered(&self) -> bool {
        self.synced.get().is_some() || self.is_cut.load(Ordering::Acquire)
    }

    /// Returns whether a name of this inode is known.
    pub(crate) fn has_names(&self) -> bool {
        !self.names.lock().is_empty()
    }

    /// Returns every known path, relative to the root. The root has the empty path.
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

    /// Returns the path of a name in this directory, or `None` if the directory has no known path.
    pub(crate) fn path_of(&self, name: &OsStr) -> Option<Vec<u8>> {
        Some(join_path(&self.paths().into_iter().next()?, name))
    }
}

impl<B: Backing> Drop for Inode<B> {
    fn drop(&mut self) {
        self.objects.remove(&self.serial);
    }
}

/// An inode that the kernel has references to.
struct KernelInode<B: Backing> {
    inode: Arc<Inode<B>>,
    /// References that the kernel has.
    lookups: u64,
}

/// The tables by which inodes are found.
struct InodeTables<B: Backing> {
    /// Inodes that the kernel knows, by number.
    by_id: HashMap<InodeId, KernelInode<B>>,
    /// All inodes, by the object's identity in the backing.
    by_key: HashMap<ObjectKey, Weak<Inode<B>>>,
    /// All inodes, by directory and name.
    children: HashMap<(InodeId, Name), Weak<Inode<B>>>,
    /// Number of objects at which the tables are swept next.
    sweep_at: usize,
    /// Last synthetic number that was assigned.
    last_synthetic: u64,
    last_serial: u64,
}

impl<B: Backing> InodeTables<B> {
    /// Removes the entries of an inode by key and by name.
    fn remove_entries_of(&mut self, inode: &Inode<B>) {
        // The entry by key may belong to another inode that got the same key.
        let entry = self.by_key.get(&inode.key);
        if entry.is_some_and(|entry| std::ptr::eq(entry.as_ptr(), inode)) {
            self.by_key.remove(&inode.key);
        }
        for (parent, name) in inode.names.lock().iter() {
            self.children.remove(&(parent.id, name.clone()));
        }
    }

    /// Removes a name, and returns the inode to which it led, if that still exists.
    fn remove_child(&mut self, key: &(InodeId, Name)) -> Option<Arc<Inode<B>>> {
        self.children.remove(key)?.upgrade()
    }

    /// Removes the entries of dropped inodes, if there are enough entries. [`Names::forget`] does not remove all such
    /// entries: a file with data outlives its lookups, and some inodes never had a lookup.
    fn sweep(&mut self) {
        if self.by_key.len() < self.sweep_at {
            return;
        }
        self.by_key.retain(|_, inode| inode.strong_count() > 0);
        self.children.retain(|_, inode| inode.strong_count() > 0);
        self.sweep_at = SWEEP_OBJECTS_MIN.max(2 * self.by_key.len());
    }
}

/// A file that was synced or cut, remembered after the kernel forgot it.
struct RememberedFile<B: Backing> {
    inode: Arc<Inode<B>>,
    /// Length of the file in bytes at its last sync.
    bytes: u64,
}

/// Files that are known to be synced and unchanged since.
pub(crate) struct SyncedTotals {
    /// Number of the files.
    pub files: u64,
    /// Sum of their lengths at the sync.
    pub bytes: u64,
}

/// All inodes of a mount, and how to find them.
pub(crate) struct Names<B: Backing> {
    root: Arc<Inode<B>>,
    tables: Mutex<InodeTables<B>>,
    /// Whether names may come from an earlier firnd that did not sync them. The first sync of each file then also syncs
    /// its names.
    names_unsynced: bool,
    objects: Arc<Objects<B>>,
    /// Files that were synced or cut, by [`Inode::serial`].
    remembered: Mutex<BTreeMap<u64, RememberedFile<B>>>,
    /// Number of times that names changed in the backing without a request, as when a transaction is aborted.
    backing_name_changes: AtomicU64,
    /// Claims on paths. A rename claims to change its two paths until it is recorded here. A thread that looks an
    /// object up by its name claims that the path does not change.
    path_claims: PathClaims,
    /// The live table, for the next firnd. It is set once, if the mount can be taken over.
    live: OnceLock<Arc<LiveTable>>,
}

/// Identity of an object: device and inode number, kind and birth time.
#[derive(Clone, Copy)]
pub(crate) struct KnownObject {
    pub key: ObjectKey,
    pub kind: Kind,
    pub btime: Option<Time>,
}

impl KnownObject {
    fn from_attr(attr: &Attr) -> Self {
        Self {
            key: ObjectKey::from_attr(attr),
            kind: attr.kind,
            btime: attr.btime,
        }
    }
}

/// Upper bound of the numbers that earlier firnds assigned. Numbers of this firnd are above it.
#[derive(Clone, Copy)]
pub(crate) struct NumberBase(pub u64);

/// Returns whether the live table must have this inode, because a later firnd could not find it again otherwise.
///
/// A file needs no record: a lookup of its name returns the same inode number again. This does not hold for a synthetic
/// number, nor for a directory that is the current directory of a process.
fn must_be_in_live_table<B: Backing>(inode: &Inode<B>) -> bool {
    inode.id != ROOT && (inode.kind == Kind::Dir || inode.id.0 >= FIRST_SYNTHETIC_NUMBER)
}

impl<B: Backing> Names<B> {
    /// Records in `table`, from now on, the inodes that the kernel has.
    pub(crate) fn set_live_table(&self, table: Arc<LiveTable>) {
        let _ = self.live.set(table);
    }

    /// Returns the live table, if the mount has one.
    pub(crate) fn live(&self) -> Option<&Arc<LiveTable>> {
        self.live.get()
    }

    /// Ensures that no number of an earlier firnd is assigned again.
    pub(crate) fn start_numbers_at(&self, base: NumberBase) {
        let mut tables = self.tables.lock();
        tables.last_synthetic = tables.last_synthetic.max(FIRST_SYNTHETIC_NUMBER + base.0);
    }

    /// Adds an inode that the kernel knows from an earlier firnd, without a call of the backing. Its object (the
    /// backing's handle of it) is looked up at the first use. `name` is `None` if no name leads to it.
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
            let shared_name = Name::from(name);
            inode.add_name(parent, &shared_name);
            tables
                .children
                .insert((parent.id, shared_name), Arc::downgrade(&inode));
        }
        // The kernel may know a removed object whose number the backing has assigned again. A key leads to the newest
        // object.
        let same_key = tables.by_key.get(&object.key).and_then(Weak::upgrade);
        if same_key.is_none_or(|known| inode.is_newer_than(&known)) {
            tables.by_key.insert(object.key, Arc::downgrade(&inode));
        }
        let kernel_inode = KernelInode {
            inode: Arc::clone(&inode),
            // A record without lookups still belongs to an inode that the kernel has. The kernel reports the real
            // number when it forgets the inode.
            lookups: lookups.max(1),
        };
        tables.by_id.insert(id, kernel_inode);
        inode
    }

    /// Updates the live table (the file from which a next firnd learns the inodes that the kernel has) after the names
    /// of an inode changed. The table has one name of each inode, the first known one. Does nothing for an inode that
    /// is not in the table, or without a table.
    fn update_live_name(&self, inode: &Inode<B>) {
        if let Some(live) = self.live.get() {
            let node = inode.live_node();
            live.end_rename(node.id, node.parent, &node.name);
        }
    }

    /// Makes the tables of inodes with the root only; `root_object` is its object in the backing. `objects_max` bounds
    /// the number of open objects, not counting those that must remain open. `names_unsynced` says that an earlier
    /// firnd may have made names without a sync.
    pub(crate) fn new(
        root_object: B::Inode,
        attr: &Attr,
        names_unsynced: bool,
        objects_max: usize,
    ) -> Self {
        let objects = Arc::new(Cache::new(objects_max));
        let root_serial = 0;
        // The root has no name that could be unsynced.
        let name_unsynced = false;
        let root = Arc::new(new_inode(
            ROOT,
            root_serial,
            &objects,
            KnownObject::from_attr(attr),
            name_unsynced,
        ));
        *root.kept_open_object.lock() = Some(root_object);
        let kernel_root = KernelInode {
            inode: Arc::clone(&root),
            lookups: 1,
        };
        let tables = InodeTables {
            by_id: HashMap::from([(ROOT, kernel_root)]),
            by_key: HashMap::from([(root.key, Arc::downgrade(&root))]),
            children: HashMap::new(),
            sweep_at: SWEEP_OBJECTS_MIN,
            last_synthetic: FIRST_SYNTHETIC_NUMBER,
            last_serial: 0,
        };
        Self {
            root,
            tables: Mutex::new(tables),
            names_unsynced,
            objects,
            remembered: Mutex::new(BTreeMap::new()),
            backing_name_changes: AtomicU64::new(0),
            path_claims: PathClaims::default(),
            live: OnceLock::new(),
        }
    }

    /// Returns the number of times that names changed in the backing without a request. A thread that adds a name to
    /// the tables compares this number before and after its lookup.
    pub(crate) fn backing_name_changes(&self) -> u64 {
        self.backing_name_changes.load(Ordering::Acquire)
    }

    /// Counts a change of names in the backing without a request.
    pub(crate) fn record_backing_name_change(&self) {
        self.backing_name_changes.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns the object of an inode. A closed object is looked up again by its names.
    ///
    /// Fails with ESTALE if no known name leads to the object any more.
    pub(crate) fn find_object(&self, backing: &B, inode: &Inode<B>) -> Result<B::Inode> {
        if let Some(object) = inode.cached_object() {
            return Ok(object);
        }
        let _path_claim = self.path_claims.claim_unchanged(|| inode.paths());
        self.look_up_again(backing, inode)
    }

    /// Looks the object of an inode up in the backing under each known name until one leads to it. The caller claims
    /// that the paths do not change, so that no rename comes between the steps.
    ///
    /// Fails with ESTALE if no name leads to it. If a lookup failed for another reason, that error is returned instead,
    /// because the name may still lead to the object.
    fn look_up_again(&self, backing: &B, inode: &Inode<B>) -> Result<B::Inode> {
        if let Some(object) = inode.cached_object() {
            return Ok(object);
        }
        let names = inode.names.lock().clone();
        let mut error = Errno::STALE;
        for (parent, name) in &names {
            let result = self
                .look_up_again(backing, parent)
                .and_then(|parent_object| backing.lookup(&parent_object, name));
            match result {
                Ok((object, attr)) if inode.is_object(&attr) => {
                    self.objects.insert(inode.serial, object.clone());
                    return Ok(object);
                }
                // This name leads to another object, or to none.
                Ok(_) | Err(Errno::NOENT | Errno::NOTDIR) => {}
                Err(errno) => error = errno,
            }
        }
        Err(error)
    }

    /// Opens the object of a name permanently if the name is its last known one. Called before the name is removed.
    ///
    /// Fails with EMFILE or ENFILE if no descriptor is free. The caller must then not remove the name.
    pub(crate) fn keep_open_before_removal(
        &self,
        backing: &B,
        parent: InodeId,
        name: &OsStr,
    ) -> Result<()> {
        match self.child(parent, name) {
            Some(inode) => self.keep_open_if_last_name(backing, &inode, parent, name),
            None => Ok(()),
        }
    }

    /// Opens the object of an inode permanently if it has no known name except `name` in `parent`. The caller removes
    /// this name afterwards. From then on no name leads to the object, so it could not be opened again.
    ///
    /// Fails with EMFILE or ENFILE if no descriptor is free. The caller must then not remove the name.
    pub(crate) fn keep_open_if_last_name(
        &self,
        backing: &B,
        inode: &Inode<B>,
        parent: InodeId,
        name: &OsStr,
    ) -> Result<()> {
        let is_other = |(known_parent, known_name): &Link<B>| {
            known_parent.id != parent || **known_name != *name
        };
        let has_other_name = inode.names.lock().iter().any(is_other);
        if has_other_name {
            return Ok(());
        }
        match self.find_object(backing, inode) {
            Ok(object) => *inode.kept_open_object.lock() = Some(object),
            Err(errno @ (Errno::MFILE | Errno::NFILE)) => return Err(errno),
            // An object that the backing no longer has cannot be kept open; its next use returns ESTALE.
            Err(_) => {}
        }
        Ok(())
    }

    /// Closes all objects that need not remain open.
    pub(crate) fn close_cached_objects(&self) {
        self.objects.clear();
    }

    /// Renames an object in the backing with `rename_in_backing`, and then in the tables of inodes. A thread that looks
    /// an object up by its name sees both changes or neither.
    ///
    /// If `rename_in_backing` fails, its error is returned and the tables are unchanged.
    pub(crate) fn rename(
        &self,
        from: DirName<'_, B>,
        to: DirName<'_, B>,
        is_exchange: bool,
        rename_in_backing: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let paths = || [from, to].iter().filter_map(DirName::path).collect();
        let _path_claim = self.path_claims.claim_change(paths);
        let moved = self.child(from.dir.id, from.name);
        let exchanged = self.child(to.dir.id, to.name).filter(|_| is_exchange);
        // The live table, which a next firnd reads, gets the new name before the rename: if firnd dies in between, the
        // next firnd tries both names.
        if let Some(live) = self.live.get() {
            for (inode, new_name) in [(&moved, to), (&exchanged, from)] {
                if let Some(inode) = inode {
                    live.begin_rename(inode.id.0, new_name.dir.id.0, new_name.name.as_bytes());
                }
            }
        }
        if let Err(errno) = rename_in_backing() {
            // The live table gets the old names again.
            for inode in moved.iter().chain(&exchanged) {
                self.update_live_name(inode);
            }
            return Err(errno);
        }
        self.record_rename(from, to, is_exchange);
        Ok(())
    }

    /// Returns the inode of the object with this identity, if it is known.
    pub(crate) fn by_key(&self, key: ObjectKey) -> Option<Arc<Inode<B>>> {
        self.tables.lock().by_key.get(&key).and_then(Weak::upgrade)
    }

    /// Keeps an object open permanently, because no name leads to it.
    pub(crate) fn keep_object_open(&self, inode: &Inode<B>, object: B::Inode) {
        *inode.kept_open_object.lock() = Some(object);
    }

    /// Returns the inode of the root.
    pub(crate) fn root(&self) -> &Arc<Inode<B>> {
        &self.root
    }

    /// Returns an inode that the kernel knows.
    pub(crate) fn get(&self, id: InodeId) -> Option<Arc<Inode<B>>> {
        self.tables
            .lock()
            .by_id
            .get(&id)
            .map(|kernel_inode| Arc::clone(&kernel_inode.inode))
    }

    /// Returns all known inodes. An inode whose number now belongs to another object is included.
    pub(crate) fn all_inodes(&self) -> Vec<Arc<Inode<B>>> {
        let tables = self.tables.lock();
        let kernel_inodes = tables.by_id.values();
        let mut inodes: Vec<_> = kernel_inodes
            .map(|kernel_inode| Arc::clone(&kernel_inode.inode))
            .collect();
        let is_unknown_to_kernel = |inode: &Arc<Inode<B>>| match tables.by_id.get(&inode.id) {
            Some(kernel_inode) => !Arc::ptr_eq(&kernel_inode.inode, inode),
            None => true,
        };
        let existing_inodes = tables.by_key.values().filter_map(Weak::upgrade);
        inodes.extend(existing_inodes.filter(is_unknown_to_kernel));
        inodes
    }

    /// Keeps an inode after the kernel forgets it, because its file was synced (with this number of bytes) or cut (left
    /// incomplete by its writer). These facts are only in the inode. If there are too many such files, forgets the
    /// oldest. A file without a name is not kept.
    pub(crate) fn remember(&self, inode: &Arc<Inode<B>>, bytes: u64) {
        if !inode.has_names() {
            return;
        }
        let mut remembered = self.remembered.lock();
        let file = RememberedFile {
            inode: Arc::clone(inode),
            bytes,
        };
        remembered.insert(inode.serial, file);
        let oldest = if remembered.len() > REMEMBERED_FILES_MAX {
            remembered.pop_first()
        } else {
            None
        };
        // The lock is released first, because a drop of the last reference may close a descriptor.
        drop(remembered);
        drop(oldest);
    }

    /// Returns the number of files known to be synced and unchanged since, and the sum of their bytes at the sync.
    /// Beyond [`REMEMBERED_FILES_MAX`] files the oldest are not counted.
    pub(crate) fn count_synced(&self) -> SyncedTotals {
        let mut totals = SyncedTotals { files: 0, bytes: 0 };
        for file in self.remembered.lock().values() {
            if file.inode.synced().is_some() {
                totals.files += 1;
                totals.bytes += file.bytes;
            }
        }
        totals
    }

    /// Drops the reference that [`Names::remember`] keeps, if the inode has no name any more. Such an inode may keep an
    /// object of the backing open, and thus a descriptor. Called after each removal of a name.
    fn forget_nameless(&self, inode: &Inode<B>) {
        if !inode.has_names() {
            let dropped = self.remembered.lock().remove(&inode.serial);
            // The lock was released in the line above. A drop of the last reference may close a descriptor, which may
            // wait.
            drop(dropped);
        }
    }

    /// Returns the inode that a known name leads to, without a call of the backing.
    pub(crate) fn child(&self, parent: InodeId, name: &OsStr) -> Option<Arc<Inode<B>>> {
        self.tables
            .lock()
            .children
            .get(&(parent, name.into()))?
            .upgrade()
    }

    /// Returns the inode of an object that the backing has under `name` in `parent`. The inode is made if the object is
    /// new. The kernel gets `lookups` more references to it; 0 if the kernel does not learn of the inode.
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
        let key = ObjectKey::from_attr(attr);
        let inode = match tables.by_key.get(&key).and_then(Weak::upgrade) {
            // The key of a removed object may belong to a new one, so the birth time is compared too.
            Some(inode) if inode.is_object(attr) => inode,
            _ => self.add_inode(tables, attr),
        };
        if inode.id != ROOT {
            self.objects.insert(inode.serial, object);
            let shared_name = Name::from(name);
            let has_several_names = inode.add_name(parent, &shared_name);
            if has_several_names && self.names_unsynced {
                // An earlier firnd may have made this name without a sync.
                inode.record_name_change();
            }
            tables
                .children
                .insert((parent.id, shared_name), Arc::downgrade(&inode));
        }
        if lookups > 0 {
            self.add_lookups(tables, &inode, lookups);
        }
        inode
    }

    /// Counts `lookups` more references of the kernel to an inode, also in the live table if the inode must be there.
    fn add_lookups(&self, tables: &mut InodeTables<B>, inode: &Arc<Inode<B>>, lookups: u64) {
        let kernel_inode = tables.by_id.entry(inode.id).or_insert_with(|| KernelInode {
            inode: Arc::clone(inode),
            lookups: 0,
        });
        kernel_inode.lookups += lookups;
        if let Some(live) = self.live.get()
            && must_be_in_live_table(inode)
        {
            let node = inode.live_node_with_lookups(kernel_inode.lookups);
            live.record_node(&node);
            live.record_lookup_name(node.id, node.parent, &node.name);
        }
    }

    /// Makes the inode of an object that is new to the tables, and adds it to the table by key (device and inode
    /// number).
    ///
    /// The inode gets the object's own number, if the object is on the root's device and the number is neither reserved
    /// nor taken by an older object. Otherwise it gets a synthetic number, which is above the numbers of real file
    /// systems.
    fn add_inode(&self, tables: &mut InodeTables<B>, attr: &Attr) -> Arc<Inode<B>> {
        let own_number = InodeId(attr.ino);
        let is_usable = attr.dev == self.root.key.dev
            && (FIRST_USABLE_NUMBER..FIRST_SYNTHETIC_NUMBER).contains(&attr.ino);
        let id = if is_usable && !tables.by_id.contains_key(&own_number) {
            own_number
        } else {
            tables.last_synthetic += 1;
            InodeId(tables.last_synthetic)
        };
        tables.last_serial += 1;
        let inode = Arc::new(new_inode(
            id,
            tables.last_serial,
            &self.objects,
            KnownObject::from_attr(attr),
            self.names_unsynced,
        ));
        // If the tables have many entries, those of dropped inodes are removed before one is added.
        tables.sweep();
        let key = ObjectKey::from_attr(attr);
        tables.by_key.insert(key, Arc::downgrade(&inode));
        inode
    }

    /// Takes back `count` references of the kernel to an inode (FORGET). After the last one, another object may get the
    /// number. Does nothing if the kernel does not have the inode. The root is never forgotten.
    pub(crate) fn forget(&self, id: InodeId, count: u64) {
        let mut tables = self.tables.lock();
        let Some(kernel_inode) = tables.by_id.get_mut(&id) else {
            return;
        };
        kernel_inode.lookups = kernel_inode.lookups.saturating_sub(count);
        if kernel_inode.lookups > 0 || id == ROOT {
            return;
        }
        if let Some(live) = self.live.get() {
            // The next firnd need not know the inode.
            live.forget_node(id.0);
        }
        let inode = tables.by_id.remove(&id).expect("just seen").inode;
        // A file with pending data has a reference to the inode. Otherwise this reference is the last.
        let is_last_reference = Arc::strong_count(&inode) == 1;
        if is_last_reference {
            tables.remove_entries_of(&inode);
        }
        // The lock is released before the inode is dropped, because the drop may close a descriptor.
        drop(tables);
    }

    /// Updates the tables after a name was removed from the backing.
    pub(crate) fn record_unlink(&self, parent: InodeId, name: &OsStr) {
        let removed = self.tables.lock().children.remove(&(parent, name.into()));
        if let Some(inode) = removed.and_then(|weak| weak.upgrade()) {
            // The name is removed from the inode first: the next two calls look at the names that remain.
            inode.remove_name(parent, name);
            self.update_live_name(&inode);
            self.forget_nameless(&inode);
        }
    }

    /// Updates the tables after a name was found not to lead to `inode` any more. If the table has the name for another
    /// inode, that entry remains.
    pub(crate) fn drop_name(&self, parent: InodeId, name: &OsStr, inode: &Inode<B>) {
        let mut tables = self.tables.lock();
        let key = (parent, Name::from(name));
        let entry = tables.children.get(&key);
        if entry.is_some_and(|entry| std::ptr::eq(entry.as_ptr(), inode)) {
            tables.children.remove(&key);
        }
        // The lock is released first, because `forget_nameless` may close a descriptor.
        drop(tables);
        inode.remove_name(parent, name);
        self.update_live_name(inode);
        self.forget_nameless(inode);
    }

    /// Updates the tables of inodes after a rename in the backing. If `is_exchange`, the two names were exchanged;
    /// otherwise the first name replaced the second.
    pub(crate) fn record_rename(
        &self,
        from: DirName<'_, B>,
        to: DirName<'_, B>,
        is_exchange: bool,
    ) {
        let mut tables = self.tables.lock();
        let from_key = (from.dir.id, Name::from(from.name));
        let to_key = (to.dir.id, Name::from(to.name));
        // Both names are removed before one is added, because an exchange adds both again.
        let moved = tables.remove_child(&from_key);
        let replaced = tables.remove_child(&to_key);
        if let Some(inode) = &replaced {
            inode.remove_name(to.dir.id, to.name);
        }
        if let Some(inode) = &moved {
            inode.remove_name(from.dir.id, from.name);
            inode.add_name(to.dir, &to_key.1);
            inode.record_name_change();
            tables.children.insert(to_key, Arc::downgrade(inode));
        }
        if is_exchange && let Some(inode) = &replaced {
            inode.add_name(from.dir, &from_key.1);
            inode.record_name_change();
            tables.children.insert(from_key, Arc::downgrade(inode));
        }
        // The lock is released first, because `forget_nameless` may close a descriptor.
        drop(tables);
        for inode in moved.iter().chain(&replaced) {
            self.update_live_name(inode);
        }
        if let Some(inode) = &replaced {
            self.forget_nameless(inode);
        }
    }
}

/// Makes an inode without names. `serial` is its key in `objects`, the cache of open objects. `name_unsynced` says
/// whether a sync of it must sync its names too.
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
        kept_open_object: Mutex::new(None),
        objects: Arc::clone(objects),
        names: Mutex::new(SmallVec::new()),
        name_unsynced: AtomicBool::new(name_unsynced),
        names_changed_at: AtomicU64::new(BEFORE_THIS_FIRND),
        entries_synced_at: AtomicU64::new(0),
        data_unsynced: AtomicBool::new(false),
        synced: Synced::default(),
        is_cut: AtomicBool::new(false),
        page_cache_stamp: Mutex::new(None),
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
        for n in 0..10 * SWEEP_OBJECTS_MIN {
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
        assert!(tables.by_key.len().max(tables.children.len()) <= SWEEP_OBJECTS_MIN);
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
