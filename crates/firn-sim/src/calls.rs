//! The calls of a file system on the simulated disk, by the trait of backings (the file systems that Firn can use).
//! Each call is a *step* of its process: a test may make a step fail or hang.

mod operations;

use std::ffi::OsStr;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};

use super::data::PAGE_BYTES;
use super::disk::{CTIME, Disk, Inode, MTIME, NewName, ROOT};
use super::lag::{Entry, Listing};
use super::rename::{DirEntryName, rename};
use super::{DiskState, SimBacking};
use firn_backing::unsynced::{self, ObjectPath, Tracked, Unsynced, path_of_entry};
use firn_backing::{
    Access, AdoptedBy, Attr, AttrChange, Attributes, Backing, Caller, Created, DataPart,
    DescriptorUse, DirEntry, DurabilityLevel, Errno, Facts, Features, FileUse, Files, Freshness,
    KernelReads, Kind, LaneIndex, LocateLimits, Located, LockRequest, Names, NewKind, PageAdvice,
    Placement, PlacementHint, Remove, RenameFlags, Resize, Result, Seek, Sharing, StatFs,
    SyncScope, Target, TargetOf, Volume, resize_by_set_len, write_parts_singly,
};

/// A reference to a simulated object.
#[derive(Clone, Debug)]
pub struct SimInode {
    ino: u64,
    /// Keeps the object's inode after the last name is removed.
    _held: Arc<()>,
}

/// An open simulated file.
pub struct SimFile {
    object: SimInode,
    access: Access,
    /// Index of the process that opened the file.
    process: usize,
    /// Unique number of this open file.
    number: u64,
    /// Whether this open file was ever locked as a whole.
    is_locked: AtomicBool,
    state: Arc<Mutex<DiskState>>,
    /// Number of files that the backing has open.
    open: Arc<AtomicUsize>,
}

impl std::fmt::Debug for SimFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimFile")
            .field("object", &self.object)
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}

impl Drop for SimFile {
    fn drop(&mut self) {
        // close(2) of a file on a server may wait for the server.
        firn_backing::lock::assert_none_held("close");
        self.open.fetch_sub(1, Ordering::Relaxed);
        let locks = &mut self.state.lock().locks;
        locks.end_range_locks(self.object.ino, self.process);
        if self.is_locked.load(Ordering::Relaxed) {
            locks.end_file_lock(self.number);
        }
    }
}

/// An open simulated directory.
#[derive(Debug)]
pub struct SimDir(SimInode);

impl SimFile {
    fn check_readable(&self) -> Result<()> {
        if self.access == Access::Write {
            Err(Errno::BADF)
        } else {
            Ok(())
        }
    }

    fn check_writable(&self) -> Result<()> {
        if self.access == Access::Read {
            Err(Errno::BADF)
        } else {
            Ok(())
        }
    }
}

/// Maximum length of a file: the maximum of `off_t`.
const SIZE_MAX: u64 = i64::MAX as u64;

/// A call that has begun.
struct WriteStep<'a> {
    state: MutexGuard<'a, DiskState>,
    /// Maximum number of bytes that a write may write.
    bytes_max: usize,
}

impl SimBacking {
    fn open_file(&self, object: SimInode, access: Access) -> SimFile {
        static FILES: AtomicU64 = AtomicU64::new(0);
        self.open.fetch_add(1, Ordering::Relaxed);
        SimFile {
            object,
            access,
            process: self.process,
            number: FILES.fetch_add(1, Ordering::Relaxed),
            is_locked: AtomicBool::new(false),
            state: Arc::clone(&self.state),
            open: Arc::clone(&self.open),
        }
    }

    /// Begins a call of the backing, which is one step of this process. Waits while the call is to hang. Fails if the
    /// plan has an error for it.
    fn begin_step(&self, op: &'static str) -> Result<MutexGuard<'_, DiskState>> {
        let WriteStep { state, .. } = self.begin_write_step(op)?;
        Ok(state)
    }

    /// Begins a call as `begin_step` does, and also returns how many bytes a write may write.
    fn begin_write_step(&self, op: &'static str) -> Result<WriteStep<'_>> {
        firn_backing::lock::assert_none_held(op);
        let mut state = self.state.lock();
        if let Some(hang) = self.this_process(&mut state).remove_hang(op) {
            parking_lot::MutexGuard::unlocked(&mut state, || hang.wait());
        }
        let bytes_max = state.step(self.process, op)?;
        Ok(WriteStep { state, bytes_max })
    }

    fn is_synced_one_by_one(&self) -> bool {
        self.is_synced_one_by_one.load(Ordering::Relaxed)
    }

    /// Returns the names in a directory, as this process sees them.
    fn listing(&self, dir: u64) -> Result<Listing> {
        let disk = &self.begin_step("read_dir")?.disk;
        let mut lag = self.lag.lock();
        if disk.dir(dir)?.nlink == 0 {
            return Err(Errno::NOENT);
        }
        if let Some(old_listing) = lag.find_listing(dir) {
            return Ok(old_listing);
        }
        let listing = Arc::new(disk.listing(dir)?);
        lag.store_listing(dir, &listing);
        Ok(listing)
    }

    /// Records that an object was changed.
    fn record_change(&self, disk: &Disk, ino: u64) {
        self.lag.lock().forget_object(ino);
        if self.is_synced_one_by_one() {
            self.unsynced
                .record_change((disk.device, ino), || disk.path_of(ino));
        }
    }

    /// Records that an object was made in `parent`.
    fn record_creation(&self, disk: &Disk, parent: u64, ino: u64) {
        self.lag.lock().forget_dir(parent);
        self.record_change(disk, ino);
        self.record_change(disk, parent);
    }

    fn record_removal(&self, disk: &Disk, parent: u64, name: &OsStr) {
        self.lag.lock().forget_dir(parent);
        self.record_change(disk, parent);
        if self.is_synced_one_by_one()
            && let Some(path) = path_of_entry(disk.path_of(parent), name)
        {
            self.unsynced.record_removal(&path);
        }
    }

    /// Syncs each changed object by itself. Walks through all directories if `walks_all_dirs`, or if the changed
    /// objects are not known completely.
    fn sync_each(&self, walks_all_dirs: bool) -> Result<()> {
        let version = self.unsynced.begin_sync();
        if walks_all_dirs {
            unsynced::sync_below(self, &self.root())?;
            self.unsynced.all_synced(version);
        }
        unsynced::sync_entries(self)?;
        if self.unsynced.has_lost_track() && !walks_all_dirs {
            self.sync_each(true)
        } else {
            Ok(())
        }
    }
}

impl Tracked for SimBacking {
    fn unsynced(&self) -> &Unsynced {
        &self.unsynced
    }

    fn threads(&self) -> usize {
        // One thread, so that the order of the steps is deterministic.
        1
    }

    fn find(&self, path: &[u8]) -> Result<(SimInode, Attr)> {
        let disk = &self.begin_step("find")?.disk;
        let mut ino = ROOT;
        for name in unsynced::components(path) {
            ino = disk.find(ino, name)?.ok_or(Errno::NOENT)?;
        }
        disk.reference(ino)
    }

    fn open_dir_to_sync(&self, object: &SimInode) -> Result<SimDir> {
        self.open_dir(object)
    }
}

impl Disk {
    /// Returns one path of an inode, and the number of its names. Builds the path from the inode upward.
    fn path_of(&self, ino: u64) -> ObjectPath {
        let Ok(inode) = self.inode(ino) else {
            return ObjectPath::Gone;
        };
        if inode.nlink == 0 {
            return ObjectPath::Gone;
        }
        let name_count = if inode.is_dir() {
            1
        } else {
            u64::from(inode.nlink)
        };
        let mut names: Vec<&[u8]> = Vec::new();
        let mut current = ino;
        while current != ROOT {
            let Some((parent, name)) = self.find_name(current) else {
                return ObjectPath::Gone;
            };
            names.push(name.as_bytes());
            current = parent;
        }
        names.reverse();
        ObjectPath::Known(names.join(&b'/'), name_count)
    }

    /// Returns a directory with a name of an object, and the name.
    fn find_name(&self, ino: u64) -> Option<(u64, &OsStr)> {
        for (dir, inode) in &self.inodes {
            for (name, (child, _)) in &inode.entries {
                if *child == ino {
                    return Some((*dir, name));
                }
            }
        }
        None
    }

    /// Returns the names in a directory, in the order of their cookies (positions from which a listing continues).
    fn listing(&self, dir: u64) -> Result<Vec<Entry>> {
        let inode = self.dir(dir)?;
        let dot_entry = |cookie, name: &str, ino| Entry {
            cookie,
            name: name.into(),
            ino,
            kind: Some(Kind::Dir),
        };
        let mut entries = vec![dot_entry(1, ".", dir), dot_entry(2, "..", inode.parent)];
        for (name, &(ino, cookie)) in &inode.entries {
            entries.push(Entry {
                cookie,
                name: name.clone(),
                ino,
                kind: self.inode(ino).ok().map(Inode::kind),
            });
        }
        entries.sort_by_key(|entry| entry.cookie);
        Ok(entries)
    }

    fn reference(&self, ino: u64) -> Result<(SimInode, Attr)> {
        let inode = self.inode(ino)?;
        Ok((
            SimInode {
                ino,
                _held: inode.hold(),
            },
            inode.attr(ino, self.device),
        ))
    }

    /// Applies a change of attributes, and sets the change time.
    fn change_attributes(&mut self, ino: u64, change: impl FnOnce(&mut Inode)) -> Result<()> {
        self.check_not_read_only()?;
        let now = self.now();
        let inode = self.inode_mut(ino)?;
        change(inode);
        inode.times[CTIME] = now;
        Ok(())
    }

    /// Applies a change of contents, and sets the modification and change time.
    fn change_contents(&mut self, ino: u64, change: impl FnOnce(&mut Inode)) -> Result<()> {
        let now = self.now();
        self.change_attributes(ino, |inode| {
            change(inode);
            inode.times[MTIME] = now;
        })
    }

    /// Returns how many of `len` bytes at `offset` have space on the disk. A test may bound the disk's capacity. Fails
    /// with ENOSPC if none has.
    fn writable_bytes(&mut self, ino: u64, offset: u64, len: u64) -> Result<u64> {
        let Some(free_bytes) = self.free_bytes() else {
            // The capacity is unlimited.
            return Ok(len);
        };
        let data = &self.inode(ino)?.data;
        let has_space = |len| data.pages_missing(offset, len) * PAGE_BYTES <= free_bytes;
        if has_space(len) {
            return Ok(len);
        }
        // Adds one page after the other, as long as the disk has space for all missing pages up to its end.
        let mut writable = 0;
        let mut up_to_page_end = PAGE_BYTES - offset % PAGE_BYTES;
        while up_to_page_end < len && has_space(up_to_page_end) {
            writable = up_to_page_end;
            up_to_page_end += PAGE_BYTES;
        }
        if writable == 0 {
            return Err(Errno::NOSPC);
        }
        Ok(writable)
    }
}

impl Volume for SimBacking {
    type Inode = SimInode;
    type File = SimFile;
    type Dir = SimDir;

    fn root(&self) -> SimInode {
        self.state
            .lock()
            .disk
            .reference(ROOT)
            .expect("the root is always there")
            .0
    }

    fn features(&self) -> Features {
        Features {
            lane_count: self.lanes.further.load(Ordering::Relaxed) + 1,
            finishes_files: false,
            shares_range_locks: false,
        }
    }

    fn statfs(&self) -> Result<StatFs> {
        let disk = &mut self.begin_step("statfs")?.disk;
        let blocks = disk.capacity_bytes.unwrap_or(1 << 40) / PAGE_BYTES;
        let free = disk.free_bytes().map_or(blocks, |bytes| bytes / PAGE_BYTES);
        Ok(StatFs {
            block_size: PAGE_BYTES,
            blocks,
            blocks_free: free,
            blocks_available: free,
            files: 1 << 20,
            files_free: (1 << 20) - disk.inodes.len() as u64,
            name_max: 255,
        })
    }

    fn sync_scope(&self, scope: SyncScope<'_, SimInode>) -> Result<()> {
        let one_by_one = self.is_synced_one_by_one();
        match scope {
            SyncScope::Dir(object) => self.sync_one_dir(object),
            SyncScope::Changes if one_by_one => self.sync_each(false),
            SyncScope::Tree(object) if one_by_one && object.ino != ROOT => {
                if self.unsynced.inherits() {
                    unsynced::sync_below(self, object)?;
                }
                self.sync_each(false)
            }
            SyncScope::All | SyncScope::Changes | SyncScope::Tree(_) => self.sync_everything(),
        }
    }
}

impl Names for SimBacking {
    fn lookup(&self, parent: &SimInode, name: &OsStr) -> Result<(SimInode, Attr)> {
        let disk = &self.begin_step("lookup")?.disk;
        let mut lag = self.lag.lock();
        if let Some(old_dir) = lag.find_dir(parent.ino, name)
            && let Ok(old_entry) = disk.reference(old_dir)
        {
            return Ok(old_entry);
        }
        let ino = disk.find(parent.ino, name)?.ok_or(Errno::NOENT)?;
        let (object, attr) = disk.reference(ino)?;
        lag.store_found(parent.ino, name, &attr);
        Ok((object, attr))
    }

    /// Makes a regular file and opens it. Ignores the hint, because the inode number decides the lane.
    fn create_placed(
        &self,
        caller: &Caller,
        parent: &SimInode,
        name: &OsStr,
        mode: u32,
        _placing: PlacementHint<'_, SimInode>,
    ) -> Result<Created<Self>> {
        let disk = &mut self.begin_step("create")?.disk;
        let ino = disk.add(
            caller,
            parent.ino,
            name,
            libc::S_IFREG | mode & 0o7777,
            |_| (),
        )?;
        self.record_creation(disk, parent.ino, ino);
        let (object, attr) = disk.reference(ino)?;
        Ok((
            object.clone(),
            self.open_file(object, Access::ReadWrite),
            attr,
        ))
    }

    fn make(
        &self,
        caller: &Caller,
        parent: &SimInode,
        name: &OsStr,
        kind: NewKind<'_>,
    ) -> Result<(SimInode, Attr)> {
        match kind {
            NewKind::Dir { mode } => self.make_dir(caller, parent, name, mode),
            NewKind::Node { mode, rdev } => self.make_node(caller, parent, name, mode, rdev),
            NewKind::Symlink { target } => self.make_symlink(caller, parent, name, target),
        }
    }

    /// Gives an object another name, as link(2) does.
    fn link(&self, object: &SimInode, parent: &SimInode, name: &OsStr) -> Result<Attr> {
        let disk = &mut self.begin_step("link")?.disk;
        disk.check_name_free(parent.ino, name)?;
        let inode = disk.inode(object.ino)?;
        if inode.is_dir() {
            return Err(Errno::PERM);
        }
        if inode.nlink == 0 {
            return Err(Errno::NOENT);
        }
        disk.apply_name_changes(&[NewName {
            dir: parent.ino,
            name,
            ino: Some(object.ino),
        }]);
        self.record_creation(disk, parent.ino, object.ino);
        // Where syncfs(2) has no effect, unsynced objects are opened by a path to sync each. So the new path is
        // recorded.
        if self.is_synced_one_by_one()
            && let Some(path) = path_of_entry(disk.path_of(parent.ino), name)
        {
            let name_count = u64::from(disk.inode(object.ino)?.nlink);
            self.unsynced
                .record_link((disk.device, object.ino), path, name_count);
        }
        Ok(disk.inode(object.ino)?.attr(object.ino, disk.device))
    }

    fn remove(&self, parent: &SimInode, name: &OsStr, what: Remove) -> Result<()> {
        match what {
            Remove::NonDir => self.remove_non_dir(parent, name),
            Remove::Dir => self.remove_dir(parent, name),
        }
    }

    /// Renames an object, as renameat2(2) does.
    fn rename(
        &self,
        parent: &SimInode,
        name: &OsStr,
        new_parent: &SimInode,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()> {
        let disk = &mut self.begin_step("rename")?.disk;
        let from = DirEntryName {
            dir: parent.ino,
            name,
        };
        let to = DirEntryName {
            dir: new_parent.ino,
            name: new_name,
        };
        rename(disk, from, to, flags)?;
        // Where syncfs(2) has no effect, unsynced objects are found by their paths, which a rename changes.
        if self.is_synced_one_by_one() {
            // The record wants each rename to begin and end. This one is over already, under the lock of the disk.
            let ticket = self.unsynced.begin_rename();
            let is_exchange = flags.contains(RenameFlags::EXCHANGE);
            let from = path_of_entry(disk.path_of(parent.ino), name);
            let to = path_of_entry(disk.path_of(new_parent.ino), new_name);
            match (from, to) {
                (Some(from), Some(to)) => {
                    self.unsynced
                        .end_rename(ticket, Some((&from, &to)), is_exchange)
                }
                _ => self.unsynced.end_unknown_rename(ticket),
            }
        }
        for dir in [parent.ino, new_parent.ino] {
            self.lag.lock().forget_dir(dir);
            self.record_change(disk, dir);
        }
        Ok(())
    }

    fn moved_to(&self, object: &SimInode, _parent: &SimInode, _name: &OsStr) -> SimInode {
        object.clone()
    }

    fn readlink(&self, object: &SimInode) -> Result<Vec<u8>> {
        let disk = &self.begin_step("readlink")?.disk;
        let inode = disk.inode(object.ino)?;
        if inode.kind() == Kind::Symlink {
            Ok(inode.target.clone())
        } else {
            Err(Errno::INVAL)
        }
    }

    fn open_dir(&self, object: &SimInode) -> Result<SimDir> {
        self.begin_step("open_dir")?.disk.dir(object.ino)?;
        Ok(SimDir(object.clone()))
    }

    /// Passes the entries of a directory behind the position `cookie` to `sink`, until it returns false.
    fn read_dir(
        &self,
        dir: &SimDir,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let listing = self.listing(dir.0.ino)?;
        // Called without the lock, because the sink may call the backing.
        for entry in listing.iter().filter(|entry| entry.cookie > cookie) {
            self.entries_read.fetch_add(1, Ordering::Relaxed);
            if !sink(DirEntry {
                name: &entry.name,
                ino: entry.ino,
                kind: entry.kind,
                cookie: entry.cookie,
            }) {
                break;
            }
        }
        Ok(())
    }
}

impl Attributes for SimBacking {
    /// Returns the attributes of an object, as stat(2) does. With `Freshness::Known` they may be old, as those in
    /// the cache of a network client are.
    fn stat(&self, target: TargetOf<'_, Self>, freshness: Freshness) -> Result<Attr> {
        let ino = match target {
            Target::Inode(object) => object.ino,
            Target::File(file) => file.object.ino,
        };
        let op = match freshness {
            Freshness::Known => "attr",
            Freshness::Current => "attr_now",
        };
        let disk = &self.begin_step(op)?.disk;
        let attr = disk.inode(ino)?.attr(ino, disk.device);
        // `Lag` simulates the cache of a network client.
        let mut lag = self.lag.lock();
        Ok(match freshness {
            Freshness::Known => lag.attr(attr),
            Freshness::Current => lag.attr_now(attr),
        })
    }

    fn set_attr(&self, object: &SimInode, change: AttrChange<'_>) -> Result<()> {
        match change {
            AttrChange::Mode(mode) => self.change_mode(object, mode),
            AttrChange::Owner { uid, gid } => self.change_owner(object, uid, gid),
            AttrChange::Times { atime, mtime } => self.change_times(object, atime, mtime),
            AttrChange::SetXattr { name, value, flags } => {
                self.store_xattr(object, name, value, flags)
            }
            AttrChange::RemoveXattr { name } => self.delete_xattr(object, name),
        }
    }

    fn get_xattr(&self, object: &SimInode, name: &OsStr) -> Result<Vec<u8>> {
        let disk = &self.begin_step("get_xattr")?.disk;
        let inode = disk.inode(object.ino)?;
        check_xattr(inode, name, Errno::NODATA)?;
        inode.xattrs.get(name).cloned().ok_or(Errno::NODATA)
    }

    fn list_xattr(&self, object: &SimInode) -> Result<Vec<u8>> {
        let disk = &self.begin_step("list_xattr")?.disk;
        let names = disk.inode(object.ino)?.xattrs.keys();
        Ok(names
            .flat_map(|name| [name.as_bytes(), b"\0"].concat())
            .collect())
    }
}

impl Files for SimBacking {
    fn open(&self, object: &SimInode, access: Access) -> Result<SimFile> {
        let disk = &self.begin_step("open")?.disk;
        match disk.inode(object.ino)?.kind() {
            Kind::File => {}
            Kind::Dir => return Err(Errno::ISDIR),
            Kind::Symlink => return Err(Errno::LOOP),
            _ => return Err(Errno::NXIO),
        }
        if access != Access::Read {
            disk.check_not_read_only()?;
        }
        Ok(self.open_file(object.clone(), access))
    }

    fn read_at(&self, file: &SimFile, buf: &mut [u8], offset: u64) -> Result<usize> {
        let disk = &self.begin_step("read_at")?.disk;
        file.check_readable()?;
        if offset > SIZE_MAX {
            return Err(Errno::INVAL);
        }
        let inode = disk.inode(file.object.ino)?;
        // Reads end at the length that this process sees.
        let attr = inode.attr(file.object.ino, disk.device);
        let seen_len = self.lag.lock().attr(attr).size;
        let readable_bytes = seen_len.saturating_sub(offset).min(buf.len() as u64);
        Ok(inode.data.read(&mut buf[..readable_bytes as usize], offset))
    }

    fn write_parts(&self, file: &SimFile, parts: &[DataPart<'_>]) -> Result<u64> {
        write_parts_singly(parts, |part| self.write_part(file, part))
    }

    fn resize(&self, file: &SimFile, resize: Resize) -> Result<bool> {
        let len = || Ok(self.attr_of_file(file)?.size);
        resize_by_set_len(resize, len, |len| self.truncate(file, len))
    }

    /// Reserves, zeroes or frees a range of a file, as fallocate(2) does.
    fn allocate(&self, file: &SimFile, mode: i32, offset: u64, len: u64) -> Result<()> {
        const KEEP_SIZE: i32 = libc::FALLOC_FL_KEEP_SIZE;
        const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE;
        const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE;
        let disk = &mut self.begin_step("allocate")?.disk;
        file.check_writable()?;
        if len == 0 || len > SIZE_MAX || offset > SIZE_MAX {
            return Err(Errno::INVAL);
        }
        let end = offset + len;
        if end > SIZE_MAX {
            return Err(Errno::FBIG);
        }
        let (keeps_size, punches) = (mode & KEEP_SIZE != 0, mode & PUNCH != 0);
        let zeroes = mode & ZERO != 0;
        // Collapse, insert and unshare are not simulated. A hole punched without KEEP_SIZE is refused.
        let has_other_flags = mode & !(KEEP_SIZE | PUNCH | ZERO) != 0;
        let is_valid_punch = keeps_size && !zeroes;
        if has_other_flags || (punches && !is_valid_punch) {
            return Err(Errno::OPNOTSUPP);
        }
        let ino = file.object.ino;
        if !punches && disk.writable_bytes(ino, offset, len)? < len {
            return Err(Errno::NOSPC);
        }
        disk.change_contents(ino, |inode| {
            if punches || zeroes {
                inode.data.punch(offset, len);
            }
            if !punches {
                inode.data.allocate(offset, len);
            }
            if !keeps_size {
                inode.data.size = inode.data.size.max(end);
            }
        })?;
        self.record_change(disk, ino);
        Ok(())
    }

    fn seek(&self, file: &SimFile, offset: u64, what: Seek) -> Result<u64> {
        let disk = &self.begin_step("seek")?.disk;
        let data = &disk.inode(file.object.ino)?.data;
        data.seek(offset, what == Seek::Data).ok_or(Errno::NXIO)
    }

    /// Copies a range between two files, as copy_file_range(2) does. Returns the number of bytes.
    fn copy_range(
        &self,
        from: &SimFile,
        from_offset: u64,
        to: &SimFile,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        let disk = &mut self.begin_step("copy_range")?.disk;
        from.check_readable()?;
        to.check_writable()?;
        let source = &disk.inode(from.object.ino)?.data;
        let len = len.min(source.size.saturating_sub(from_offset));
        let is_same_file = from.object.ino == to.object.ino;
        let ranges_overlap = from_offset < to_offset.saturating_add(len)
            && to_offset < from_offset.saturating_add(len);
        if is_same_file && ranges_overlap {
            return Err(Errno::INVAL);
        }
        let mut bytes = vec![0; len as usize];
        source.read(&mut bytes, from_offset);
        let writable_bytes = disk.writable_bytes(to.object.ino, to_offset, len)?;
        bytes.truncate(writable_bytes as usize);
        if !bytes.is_empty() {
            disk.change_contents(to.object.ino, |inode| inode.data.write(&bytes, to_offset))?;
            self.record_change(disk, to.object.ino);
        }
        Ok(bytes.len() as u64)
    }

    fn sync(&self, file: &SimFile, data_only: bool) -> Result<()> {
        let disk = &mut self.begin_step("sync")?.disk;
        disk.sync_file(file.object.ino);
        if !data_only {
            self.unsynced
                .synced((disk.device, file.object.ino), self.unsynced.begin_sync());
        }
        Ok(())
    }

    /// Does nothing: no page differs from others in its cost.
    fn advise(&self, _file: &SimFile, _range: Range<u64>, _advice: PageAdvice) {}

    fn lock(&self, file: &SimFile, request: LockRequest) -> Result<bool> {
        match request {
            LockRequest::File(mode) => self.lock_file(file, mode),
            LockRequest::UnlockFile => self.unlock_file(file),
            LockRequest::Range(range, mode) => self.set_range(file, range, Some(mode)),
            LockRequest::Unlock(range) => self.set_range(file, range, None),
            LockRequest::Test(range, mode) => self.is_range_free(file, range, mode),
        }
    }

    fn descriptor(&self, _file: &SimFile, _purpose: DescriptorUse) -> Option<OwnedFd> {
        None
    }

    /// Always fails, because `descriptor` returns no descriptors.
    fn adopt(&self, _descriptor: OwnedFd) -> Result<AdoptedBy<Self>> {
        Err(Errno::BADF)
    }
}

impl Sharing for SimBacking {
    fn kernel_reads(&self, _file: &SimFile) -> KernelReads {
        KernelReads::Passthrough
    }

    fn locate(
        &self,
        _file: &SimFile,
        _range: Range<u64>,
        _limits: LocateLimits,
    ) -> Result<Option<Located>> {
        Ok(None)
    }

    fn report_use(&self, _file: &SimFile, _what: FileUse) -> Result<()> {
        Ok(())
    }

    fn level_max(&self, _object: &SimInode) -> DurabilityLevel {
        DurabilityLevel::Durable
    }
}

impl Placement for SimBacking {
    fn facts(&self, object: &SimInode) -> Facts {
        Facts {
            lane: self.lane_of_number(object.ino),
            gathers: self.gathers.load(Ordering::Relaxed),
            changes_by_others: 0,
        }
    }

    fn lane_of_turn(&self, _turn: u64) -> Option<LaneIndex> {
        None
    }
}

/// Applies the kernel's checks of attribute names: only known prefixes are allowed, and `user.*` only on files and
/// directories. `wrong_kind` is the error for any other object.
fn check_xattr(inode: &Inode, name: &OsStr, wrong_kind: Errno) -> Result<()> {
    let name = name.as_bytes();
    let known_prefixes = [b"user.".as_slice(), b"trusted.", b"security."];
    if !known_prefixes.iter().any(|prefix| name.starts_with(prefix)) {
        return Err(Errno::OPNOTSUPP);
    }
    if name.starts_with(b"user.") && !matches!(inode.kind(), Kind::File | Kind::Dir) {
        return Err(wrong_kind);
    }
    Ok(())
}
