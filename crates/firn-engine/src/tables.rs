//! Tables of files that are open or have bytes in the arena (the shared memory for written data), by inode, and of
//! handles, by number.
//!
//! Invariants
//! * There is one [`File`] for each object of the backing, whatever its number of names and handles.
//! * A file that is in use ([`FileState::is_in_use`]) is in the table.
//! * Numbers of handles are never used again.
//!
//! The table's lock is taken before a file's lock, never after it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use firn_arena::{Arena, Lease};
use firn_backing::lock::{Mutex, RwLock};
use firn_backing::{Backing, Errno};

use crate::file::{File, FileState, Route};
use crate::names::Inode;
use crate::{HandleId, OpenMode, Result};

/// Files that are open or have bytes in the arena.
///
/// The key is [`Inode::serial`], because the backing may assign the number of a removed object again while a handle of
/// that object is still open.
pub(crate) struct FileTable<B: Backing> {
    files: Mutex<HashMap<u64, Arc<File<B>>>>,
}

impl<B: Backing> Default for FileTable<B> {
    fn default() -> Self {
        Self {
            files: Mutex::new(HashMap::new()),
        }
    }
}

impl<B: Backing> FileTable<B> {
    /// Returns the file of an inode, if it is in the table.
    pub(crate) fn get(&self, inode: &Inode<B>) -> Option<Arc<File<B>>> {
        self.files.lock().get(&inode.serial).cloned()
    }

    /// Returns the file of an inode; makes it if it is not in the table. Applies `change` before another thread can
    /// remove the file.
    pub(crate) fn get_or_insert(
        &self,
        inode: &Arc<Inode<B>>,
        route: Route,
        change: impl FnOnce(&mut FileState<B>),
    ) -> Arc<File<B>> {
        let mut files = self.files.lock();
        let file = files
            .entry(inode.serial)
            .or_insert_with(|| Arc::new(File::new(Arc::clone(inode), route)));
        change(&mut file.lock());
        Arc::clone(file)
    }

    /// Removes a file that is not in use.
    pub(crate) fn remove_if_unused(&self, file: &Arc<File<B>>) {
        let mut files = self.files.lock();
        if file.lock().is_in_use() {
            return;
        }
        let serial = file.inode.serial;
        // The table may have a later file of the same inode.
        let is_in_table = files
            .get(&serial)
            .is_some_and(|known| Arc::ptr_eq(known, file));
        if is_in_table {
            files.remove(&serial);
        }
    }

    /// Returns all files of the table.
    pub(crate) fn all(&self) -> Vec<Arc<File<B>>> {
        self.files.lock().values().cloned().collect()
    }

    /// Returns the files whose lock is free and whose state `select` accepts.
    pub(crate) fn idle(&self, select: impl Fn(&FileState<B>) -> bool) -> Vec<Arc<File<B>>> {
        let files = self.files.lock();
        let is_selected =
            |file: &&Arc<File<B>>| file.try_lock().is_some_and(|state| select(&state));
        files.values().filter(is_selected).cloned().collect()
    }
}

/// An open file.
pub(crate) struct Handle<B: Backing> {
    pub id: HandleId,
    pub file: Arc<File<B>>,
    pub readable: bool,
    pub writable: bool,
    /// The slab that the handle's writes fill, if it has one.
    pub lease: Mutex<Option<Lease>>,
    /// How the frontend serves the handle.
    pub mode: Mutex<OpenMode>,
    /// Number of bytes written through the handle, which decides the size class of its next slab.
    pub written_bytes: AtomicU64,
    /// Whether the last close of a descriptor of the handle was caused by a signal that killed a process.
    pub was_closed_by_kill: AtomicBool,
    /// Whether a descriptor of the handle was closed ([`Engine::finishes_file`](crate::Engine::finishes_file)).
    pub has_closed_descriptor: AtomicBool,
    /// Thread that opened the file, on backings that finish files; 0 if it is not known.
    pub opener: AtomicU32,
    /// Whether the process that has the handle maps the file's memory file. It is changed under the file's lock.
    pub is_mapped: AtomicBool,
}

impl<B: Backing> Handle<B> {
    /// Makes a handle without a lease, through which nothing was written yet.
    pub(crate) fn new(
        id: HandleId,
        file: Arc<File<B>>,
        readable: bool,
        writable: bool,
        mode: OpenMode,
    ) -> Self {
        Self {
            id,
            file,
            readable,
            writable,
            lease: Mutex::new(None),
            written_bytes: AtomicU64::new(0),
            was_closed_by_kill: AtomicBool::new(false),
            has_closed_descriptor: AtomicBool::new(false),
            opener: AtomicU32::new(0),
            is_mapped: AtomicBool::new(false),
            mode: Mutex::new(mode),
        }
    }

    /// Records that the process maps the view of the file. Returns false if that was already recorded.
    pub(crate) fn record_mapping(&self, state: &mut FileState<B>) -> bool {
        let is_first = !self.is_mapped.swap(true, Ordering::AcqRel);
        if is_first {
            state.opens.add_mapping();
        }
        is_first
    }

    /// Records that the handle is released, which ends the mappings of its process.
    pub(crate) fn remove_mapping(&self, state: &mut FileState<B>) {
        if self.is_mapped.swap(false, Ordering::AcqRel) {
            state.opens.remove_mapping();
        }
    }
}

/// Open files and directories, by the numbers of their handles.
pub(crate) struct HandleTable<B: Backing> {
    files: RwLock<HashMap<HandleId, Arc<Handle<B>>>>,
    dirs: RwLock<HashMap<HandleId, Arc<B::Dir>>>,
    last_id: AtomicU64,
}

impl<B: Backing> Default for HandleTable<B> {
    fn default() -> Self {
        Self {
            files: RwLock::new(HashMap::new()),
            dirs: RwLock::new(HashMap::new()),
            last_id: AtomicU64::new(0),
        }
    }
}

impl<B: Backing> HandleTable<B> {
    /// Returns a number that no handle has had yet.
    pub(crate) fn new_id(&self) -> HandleId {
        HandleId(self.last_id.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Returns the open file of a handle. Fails with EBADF if there is none.
    pub(crate) fn get(&self, id: HandleId) -> Result<Arc<Handle<B>>> {
        self.files.read().get(&id).cloned().ok_or(Errno::BADF)
    }

    pub(crate) fn insert(&self, handle: Handle<B>) {
        self.files.write().insert(handle.id, Arc::new(handle));
    }

    pub(crate) fn remove(&self, id: HandleId) -> Option<Arc<Handle<B>>> {
        self.files.write().remove(&id)
    }

    pub(crate) fn all(&self) -> Vec<Arc<Handle<B>>> {
        self.files.read().values().cloned().collect()
    }

    /// Seals the leases that no thread uses at this moment and that `select` accepts. Their slabs can then be freed or
    /// moved.
    pub(crate) fn seal_leases(&self, arena: &Arena, select: impl Fn(&Handle<B>, &Lease) -> bool) {
        for handle in self.all() {
            let Some(mut slot) = handle.lease.try_lock() else {
                continue;
            };
            if let Some(lease) = slot.take_if(|lease| select(&handle, lease)) {
                arena.seal_slab(lease);
            }
        }
    }

    /// Returns the number of open files.
    pub(crate) fn len(&self) -> usize {
        self.files.read().len()
    }

    /// Ensures that no new handle gets a number that an earlier firnd assigned.
    pub(crate) fn start_numbers_at(&self, base: u64) {
        self.last_id.fetch_max(base, Ordering::Relaxed);
    }

    /// Inserts a directory under the number that an earlier firnd assigned to it.
    pub(crate) fn insert_dir_as(&self, id: HandleId, dir: B::Dir) {
        self.dirs.write().insert(id, Arc::new(dir));
    }

    pub(crate) fn insert_dir(&self, dir: B::Dir) -> HandleId {
        let id = self.new_id();
        self.dirs.write().insert(id, Arc::new(dir));
        id
    }

    /// Returns the open directory of a handle. Fails with EBADF if there is none.
    pub(crate) fn dir(&self, id: HandleId) -> Result<Arc<B::Dir>> {
        self.dirs.read().get(&id).cloned().ok_or(Errno::BADF)
    }

    /// Closes a directory. The lock is released first, because the close calls the backing.
    pub(crate) fn remove_dir(&self, id: HandleId) {
        let closed = self.dirs.write().remove(&id);
        drop(closed);
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use firn_backing::{Attr, Caller, Time, Volume};
    use firn_sim::SimBacking;

    use super::*;
    use crate::names::Names;

    const CALLER: Caller = Caller {
        uid: 0,
        gid: 0,
        pid: 1,
    };

    /// A file that was just created in a backing.
    struct NewFile {
        names: Names<SimBacking>,
        object: <SimBacking as Volume>::Inode,
        attr: Attr,
    }

    impl NewFile {
        const NAME: &str = "file";

        fn create() -> Self {
            let backing = SimBacking::new();
            let root = backing.root();
            let root_attr = backing.attr(&root).expect("root");
            let names = Names::new(root.clone(), &root_attr, false, 16);
            let created = backing.create(&CALLER, &root, OsStr::new(Self::NAME), 0o644);
            let (object, _, attr) = created.expect("create");
            Self {
                names,
                object,
                attr,
            }
        }

        /// Registers an object with these attributes under the file's name.
        fn register_with(&self, attr: &Attr) -> Arc<Inode<SimBacking>> {
            let name = OsStr::new(Self::NAME);
            let object = self.object.clone();
            self.names
                .register(object, attr, self.names.root(), name, 0)
        }

        fn register(&self) -> Arc<Inode<SimBacking>> {
            self.register_with(&self.attr)
        }
    }

    #[test]
    fn a_file_is_there_as_long_as_it_is_in_use() {
        let inode = NewFile::create().register();
        let files = FileTable::default();
        let file = files.get_or_insert(&inode, Route::default(), |state| {
            state.direct.add_chunk_list();
        });
        let again = files.get_or_insert(&inode, Route::default(), |_| {});
        assert!(Arc::ptr_eq(&file, &again));
        files.remove_if_unused(&file);
        assert_eq!(files.all().len(), 1);
        file.lock().direct.remove_chunk_list();
        files.remove_if_unused(&file);
        assert!(files.get(&inode).is_none());
        let another = files.get_or_insert(&inode, Route::default(), |_| {});
        files.remove_if_unused(&file);
        assert!(
            files
                .get(&inode)
                .is_some_and(|known| Arc::ptr_eq(&known, &another))
        );
    }

    /// A write to the new file failed with ESTALE.
    #[test]
    fn regression_a_removed_file_and_a_new_one_with_its_number_are_two_files() {
        let created = NewFile::create();
        let removed_inode = created.register();
        let files = FileTable::default();
        let removed = files.get_or_insert(&removed_inode, Route::default(), |state| {
            state.direct.add_chunk_list();
        });
        let birth = created.attr.btime.expect("a birth time");
        let new_attr = Attr {
            btime: Some(Time {
                sec: birth.sec + 1,
                ..birth
            }),
            ..created.attr
        };
        let new_inode = created.register_with(&new_attr);
        assert!(files.get(&new_inode).is_none());
        let new = files.get_or_insert(&new_inode, Route::default(), |_| {});
        assert!(Arc::ptr_eq(&new.inode, &new_inode) && !Arc::ptr_eq(&new, &removed));
        files.remove_if_unused(&new);
        assert!(files.get(&removed_inode).is_some());
    }

    #[test]
    fn numbers_of_handles_are_not_used_again() {
        let handles = HandleTable::<SimBacking>::default();
        assert_ne!(handles.new_id(), handles.new_id());
        assert!(handles.get(HandleId(1)).is_err());
        assert_eq!(handles.len(), 0);
    }
}
