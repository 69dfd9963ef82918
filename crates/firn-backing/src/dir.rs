//! A directory of a real file system as the backing, which is where the files of a mount end up.
//!
//! Promises
//! * Every call uses descriptors. If the directory is renamed, or hidden below a mount, the calls still reach the same
//!   objects.
//! * An inode is an `O_PATH` descriptor. It needs no permission on the object, opens no device, and keeps the object
//!   after its last name was removed.
//! * If this process is root, a new object belongs to the caller (`owner`).
//!
//! Relies on
//! * `/proc` being mounted (`proc`).
//! * umask 0, which firnd sets at its start. The modes in calls are final: only a default ACL of the parent directory
//!   may remove bits.

use std::ffi::OsStr;
use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{
    self, Advice, AtFlags, CWD, FallocateFlags, FileType, Gid, Mode, OFlags, SeekFrom, Uid,
};

use crate::unsynced::{self, Key, ObjectPath, Tracked, Unsynced, path_of_entry};
use crate::{
    Access, Adopted, AdoptedBy, Attr, AttrChange, Attributes, Backing, Caller, Created, DataPart,
    DescriptorUse, DirEntry, DurabilityLevel, Errno, Facts, Features, FileUse, Files, Freshness,
    KernelReads, Kind, LaneIndex, LocateLimits, Located, LockRequest, Names, NewKind, PageAdvice,
    Placement, PlacementHint, Remove, RenameFlags, Resize, Result, Seek, SetTime, Sharing, StatFs,
    SyncScope, Target, TargetOf, Volume, resize_by_set_len, write_parts_singly,
};

mod attr;
mod devices;
mod lock;
mod make;
mod owner;
mod proc;
mod reopen;
mod stamps;
pub mod steering;
mod stream;
mod times;
mod xattr;

use devices::Devices;
use lock::RangeOwner;
use owner::MODE_BITS;
use proc::FdPath;
use steering::{NewFile, Steering};
pub use stream::DirStream;

/// Number of files that are synced at a time if each file is synced separately: enough to hide the latency of a server.
const SYNC_THREADS: usize = 8;
/// Maximum number of slices of one pwritev(2) (`UIO_MAXIOV`).
const SLICES_MAX: usize = 1024;

/// A backing in a directory of this host, on any file system.
#[derive(Debug)]
pub struct DirBacking {
    path: PathBuf,
    root: Arc<DirInode>,
    /// File systems that were seen in the directory, and how each is synced.
    devices: Devices,
    unsynced: Unsynced,
    /// Decides on which server new files go, if the mount asks for that.
    steering: Option<Arc<dyn Steering>>,
}

/// An object: an `O_PATH` descriptor, and properties that never change.
#[derive(Debug)]
pub struct DirInode {
    fd: OwnedFd,
    key: Key,
    kind: Kind,
    lane: LaneIndex,
}

impl DirInode {
    fn new(fd: OwnedFd, attr: &Attr) -> Arc<Self> {
        Self::in_lane(LaneIndex::FIRST, fd, attr)
    }

    fn in_lane(lane: LaneIndex, fd: OwnedFd, attr: &Attr) -> Arc<Self> {
        Arc::new(Self {
            fd,
            key: (attr.dev, attr.ino),
            kind: attr.kind,
            lane,
        })
    }

    /// Returns the device number of the object's file system.
    fn dev(&self) -> u64 {
        self.key.0
    }
}

impl AsFd for DirInode {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// An open regular file.
#[derive(Debug)]
pub struct DirFile {
    fd: OwnedFd,
    access: Access,
    key: Key,
    lane: LaneIndex,
}

impl DirFile {
    /// Returns the access mode with which the file was opened.
    pub fn access(&self) -> Access {
        self.access
    }
}

impl DirBacking {
    /// Opens a backing in the directory `path`, which must be readable. ENOTDIR if it is not a directory.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref().canonicalize()?;
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = fs::open(&path, flags | OFlags::PATH, Mode::empty())?;
        Self::from_root(root, path)
    }

    fn from_root(root: OwnedFd, path: PathBuf) -> io::Result<Self> {
        let attr = attr::attr(&root)?;
        let root = DirInode::new(root, &attr);
        let devices = Devices::new(root.dev(), reopen::open_dir(&root)?)?;
        Ok(Self {
            path,
            root,
            devices,
            unsynced: Unsynced::default(),
            steering: None,
        })
    }

    /// Lets `steering` decide on which server new files go.
    pub fn with_steering(mut self, steering: Arc<dyn Steering>) -> Self {
        self.steering = Some(steering);
        self
    }

    /// Records a change of an object, if the object must be synced separately.
    fn record_change(&self, key: Key, fd: BorrowedFd<'_>) {
        if self.devices.is_synced_one_by_one(key.0, fd) {
            self.unsynced.record_change(key, || self.path_of(fd));
        }
    }

    fn record_change_of(&self, inode: &DirInode) {
        self.record_change(inode.key, inode.as_fd());
    }

    /// Records that an object was made in `parent`.
    fn record_creation(&self, parent: &DirInode, inode: &DirInode) {
        self.record_change_of(inode);
        self.record_change_of(parent);
    }

    /// Records that a name was removed from `parent`.
    fn record_removal(&self, parent: &DirInode, name: &OsStr) {
        self.record_change_of(parent);
        if self
            .devices
            .is_synced_one_by_one(parent.dev(), parent.as_fd())
            && let Some(path) = path_of_entry(self.path_of(parent.as_fd()), name)
        {
            self.unsynced.record_removal(&path);
        }
    }

    /// Returns the present path of an open object, relative to the top of the backing. The kernel reports it for the
    /// object's descriptor. The path is unknown if the object is not below the top, or if the name by which it was
    /// opened was removed and others remain.
    fn path_of(&self, fd: BorrowedFd<'_>) -> ObjectPath {
        let Ok(links) = attr::links(fd) else {
            return ObjectPath::Unknown;
        };
        if links == 0 {
            return ObjectPath::Gone;
        }
        let (Ok(path), Ok(root_path)) = (absolute_path(fd), absolute_path(self.root.as_fd()))
        else {
            return ObjectPath::Unknown;
        };
        // The kernel appends this to a name that was removed; the object has other names. A name that really ends so is
        // treated in the same way, which only costs a walk of the tree.
        if path.ends_with(b" (deleted)") {
            return ObjectPath::Unknown;
        }
        let root_prefix: &[u8] = if root_path == b"/" { b"" } else { &root_path };
        match path.strip_prefix(root_prefix) {
            Some(b"") => ObjectPath::Known(Vec::new(), links),
            Some([b'/', relative_path @ ..]) => ObjectPath::Known(relative_path.to_vec(), links),
            _ => ObjectPath::Unknown,
        }
    }

    /// Syncs the changed objects that must be synced separately. If not all of them are known, syncs every object.
    fn sync_tracked(&self) -> Result<()> {
        unsynced::sync_entries(self)?;
        let version = self.unsynced.begin_sync();
        if !self.unsynced.has_lost_track() {
            return Ok(());
        }
        self.sync_file_systems(&self.root, &mut |top| unsynced::sync_below(self, top))?;
        self.unsynced.all_synced(version);
        Ok(())
    }

    /// Calls syncfs(2) on the file systems at and below `top`. For each that syncfs(2) does not make durable, calls
    /// `sync_one_by_one` with its top directory, which must sync each file.
    fn sync_file_systems(
        &self,
        top: &Arc<DirInode>,
        sync_one_by_one: &mut dyn FnMut(&Arc<DirInode>) -> Result<()>,
    ) -> Result<()> {
        let mut synced_devices = vec![top.dev()];
        self.sync_file_system(top, sync_one_by_one)?;
        let top_path = absolute_path(top.as_fd())?;
        let root_path = absolute_path(self.root.as_fd())?;
        for mount_path in devices::mounts_below(&top_path, &root_path) {
            // The file system may have been unmounted meanwhile.
            let Ok((inode, _)) = self.find(&mount_path) else {
                continue;
            };
            if inode.kind == Kind::Dir && !synced_devices.contains(&inode.dev()) {
                synced_devices.push(inode.dev());
                self.sync_file_system(&inode, sync_one_by_one)?;
            }
        }
        Ok(())
    }

    /// Calls syncfs(2) on the file system of `top`, or `sync_one_by_one` if syncfs(2) does not reach it.
    fn sync_file_system(
        &self,
        top: &Arc<DirInode>,
        sync_one_by_one: &mut dyn FnMut(&Arc<DirInode>) -> Result<()>,
    ) -> Result<()> {
        match self.devices.syncfs(top.dev(), top.as_fd()) {
            Some(result) => result,
            None => sync_one_by_one(top),
        }
    }

    /// Opens a backing in the directory `dir`. `path` is used in messages and keys only.
    pub fn from_dir(dir: OwnedFd, path: impl Into<PathBuf>) -> io::Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::PATH;
        let root = fs::openat(&dir, c".", flags, Mode::empty())?;
        Self::from_root(root, path.into())
    }

    /// Returns the canonical path of the directory, for messages and keys. No call uses it.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Returns the errno of the system call that just failed.
fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Returns the absolute path of an open object, as the kernel reports it.
fn absolute_path(fd: BorrowedFd<'_>) -> Result<Vec<u8>> {
    let path = fs::readlink(FdPath::from_fd(fd).as_c_str(), Vec::new())?;
    Ok(path.into_bytes())
}

/// Opens the object of `name` as `O_PATH`, without following a symbolic link.
fn object_at(parent: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    fs::openat(parent, name, flags, Mode::empty())
}

impl DirBacking {
    /// Makes the inode of a name in a directory, with the lane that `steering` assigns to it.
    fn child(&self, parent: &DirInode, name: &OsStr, inode: OwnedFd, attr: &Attr) -> Arc<DirInode> {
        let Some(steering) = &self.steering else {
            return DirInode::new(inode, attr);
        };
        let lane = match attr.kind {
            Kind::Dir => steering.lane_of_dir(parent.lane, name),
            _ => steering.lane_of(parent.lane, name),
        };
        DirInode::in_lane(lane, inode, attr)
    }

    /// Syncs all file systems. Where syncfs(2) does not reach, syncs the changed objects, or every object if some
    /// changes are not known.
    fn sync_everything(&self) -> Result<()> {
        let version = self.unsynced.begin_sync();
        let may_miss_changes = self.unsynced.inherits() || self.unsynced.has_lost_track();
        self.sync_tree(&self.root, may_miss_changes)?;
        if may_miss_changes {
            self.unsynced.all_synced(version);
        }
        self.sync_tracked()
    }

    /// Syncs the file systems below a directory. Where syncfs(2) does not reach, syncs every object if the table of
    /// changes may miss some, and nothing otherwise: the caller syncs the changes of the table.
    fn sync_tree(&self, dir: &Arc<DirInode>, may_miss_changes: bool) -> Result<()> {
        self.sync_file_systems(dir, &mut |top| {
            if may_miss_changes {
                unsynced::sync_below(self, top)
            } else {
                Ok(())
            }
        })
    }

    /// Syncs one directory (fsync(2)).
    fn sync_one_dir(&self, inode: &DirInode) -> Result<()> {
        let version = self.unsynced.begin_sync();
        match reopen::open_dir(inode) {
            Ok(dir) => fs::fsync(dir)?,
            // This process may write to the directory but not open it for reading. A sync of its whole file system
            // includes it.
            Err(Errno::ACCESS) => match self.devices.syncfs(inode.dev(), inode.as_fd()) {
                Some(result) => result?,
                None => fs::fsync(reopen::open_dir_to_sync(inode)?)?,
            },
            Err(errno) => return Err(errno),
        }
        self.unsynced.synced(inode.key, version);
        Ok(())
    }
}

/// Adds the type of a regular file to a mode without type bits, as mknod(2) does.
fn mode_with_type(mode: u32) -> u32 {
    if mode & libc::S_IFMT == 0 {
        mode | libc::S_IFREG
    } else {
        mode
    }
}

/// Returns kind and mode of a new object.
fn kind_and_mode(new: NewKind<'_>) -> Result<(Kind, u32)> {
    match new {
        NewKind::Dir { mode } => Ok((Kind::Dir, mode)),
        NewKind::Node { mode, .. } => {
            let kind = Kind::from_mode(mode_with_type(mode)).ok_or(Errno::INVAL)?;
            Ok((kind, mode))
        }
        NewKind::Symlink { .. } => Ok((Kind::Symlink, 0)),
    }
}

impl Tracked for DirBacking {
    fn unsynced(&self) -> &Unsynced {
        &self.unsynced
    }

    fn threads(&self) -> usize {
        SYNC_THREADS
    }

    fn find(&self, path: &[u8]) -> Result<(Self::Inode, Attr)> {
        let inode = object_at(self.root.as_fd(), &unsynced::relative(path))?;
        let attr = attr::attr(&inode)?;
        Ok((DirInode::new(inode, &attr), attr))
    }

    fn open_dir_to_sync(&self, inode: &Self::Inode) -> Result<Self::Dir> {
        Ok(DirStream::new(reopen::open_dir_to_sync(inode)?))
    }
}

impl Volume for DirBacking {
    type Inode = Arc<DirInode>;
    type File = DirFile;
    type Dir = DirStream;

    fn root(&self) -> Self::Inode {
        self.root.clone()
    }

    fn features(&self) -> Features {
        let steering = self.steering.as_ref();
        Features {
            lane_count: steering.map_or(1, |steering| steering.lanes()),
            finishes_files: false,
            shares_range_locks: self.devices.range_owner == RangeOwner::OpenFile,
        }
    }

    fn statfs(&self) -> Result<StatFs> {
        let stat = fs::fstatvfs(&self.root)?;
        Ok(StatFs {
            block_size: stat.f_frsize,
            blocks: stat.f_blocks,
            blocks_free: stat.f_bfree,
            blocks_available: stat.f_bavail,
            files: stat.f_files,
            files_free: stat.f_ffree,
            name_max: stat.f_namemax.try_into().unwrap_or(u32::MAX),
        })
    }

    /// Makes everything in `scope` durable: by syncfs(2) where that call is enough, and file by file on all other file
    /// systems. For these, `self.unsynced` lists the objects that this process has changed and not synced.
    fn sync_scope(&self, scope: SyncScope<'_, Self::Inode>) -> Result<()> {
        match scope {
            SyncScope::All => self.sync_everything(),
            SyncScope::Changes => {
                // Where syncfs(2) is not enough, nothing is done yet: the changed files there are in the list of
                // unsynced changes, which is synced next.
                let skip = &mut |_: &Arc<DirInode>| Ok(());
                self.sync_file_systems(&self.root, skip)?;
                self.sync_tracked()
            }
            SyncScope::Tree(inode) if inode.key == self.root.key => self.sync_everything(),
            SyncScope::Tree(inode) => {
                // Changes of an earlier process are not in the list of unsynced changes.
                let may_miss_changes = self.unsynced.inherits();
                self.sync_tree(inode, may_miss_changes)?;
                self.sync_tracked()
            }
            SyncScope::Dir(inode) => self.sync_one_dir(inode),
        }
    }
}

impl Names for DirBacking {
    fn lookup(&self, parent: &Self::Inode, name: &OsStr) -> Result<(Self::Inode, Attr)> {
        let inode = object_at(parent.as_fd(), name)?;
        let attr = attr::attr(&inode)?;
        Ok((self.child(parent, name, inode, &attr), attr))
    }

    /// Creates a regular file for `caller` and opens it. If the file system lets Firn choose the lane (the I/O server)
    /// of a new file, `placing` decides it: by a number that grows with each file, or by the name.
    fn create_placed(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        mode: u32,
        placing: PlacementHint<'_, Self::Inode>,
    ) -> Result<Created<Self>> {
        let turn = match placing {
            // The file is one of Firn's own logs. No program sees its times, so they need not be in order.
            PlacementHint::Turn(turn) => Some(turn),
            PlacementHint::ByName | PlacementHint::Named { .. } | PlacementHint::Beside(_) => {
                // The kernel sets times of the new file, which must not be earlier than times that Firn has set.
                stamps::catch_up();
                // Without a turn, the name decides the lane. Names in a staging directory contain numbers, which spread
                // files over the lanes.
                None
            }
        };
        let new_file = NewFile {
            parent: parent.as_fd(),
            parent_lane: parent.lane,
            name,
            mode,
            turn,
            // Set by `make::create_file` if the thread has the caller's ids.
            caller: None,
        };
        let created = make::create_file(caller, &new_file, self.steering.as_deref())?;
        let inode = DirInode::in_lane(created.lane, created.inode, &created.attr);
        self.record_creation(parent, &inode);
        Ok((inode, created.file, created.attr))
    }

    /// Makes a directory, a symbolic link, or the object of mknod(2), so that it belongs to `caller`.
    fn make(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        new: NewKind<'_>,
    ) -> Result<(Self::Inode, Attr)> {
        // The kernel sets times of the new object, which must not be earlier than times that Firn has set.
        stamps::catch_up();
        let (kind, mode) = kind_and_mode(new)?;
        // The system call. Its permission bits may differ from those of `new`: set-id bits are sometimes added later.
        let call = |permission_bits| {
            let permissions = Mode::from_raw_mode(permission_bits & MODE_BITS);
            match new {
                NewKind::Dir { .. } => fs::mkdirat(parent, name, permissions),
                NewKind::Node {
                    mode: node_mode,
                    rdev,
                } => {
                    let file_type = FileType::from_raw_mode(mode_with_type(node_mode));
                    fs::mknodat(parent, name, file_type, permissions, rdev)
                }
                NewKind::Symlink { target } => fs::symlinkat(target, parent, name),
            }
        };
        let (fd, attr) = make::create_object(caller, parent.as_fd(), name, kind, mode, &call)?;
        let inode = match kind {
            Kind::Dir => self.child(parent, name, fd, &attr),
            _ => DirInode::new(fd, &attr),
        };
        self.record_creation(parent, &inode);
        Ok((inode, attr))
    }

    /// Gives an object a further name (linkat(2)), and returns its new attributes. On a file system where each file is
    /// synced separately, the new path is recorded, so that the next sync finds the object by it.
    fn link(&self, inode: &Self::Inode, parent: &Self::Inode, name: &OsStr) -> Result<Attr> {
        // The kernel sets times, which must not be earlier than times that Firn has set.
        stamps::catch_up();
        match fs::linkat(inode, c"", parent, name, AtFlags::EMPTY_PATH) {
            // Before Linux 6.10 `AT_EMPTY_PATH` needs CAP_DAC_READ_SEARCH. Following the link in /proc needs no
            // capability, but takes several times as long.
            Err(Errno::NOENT) => {
                let path = FdPath::from_fd(inode);
                fs::linkat(CWD, path.as_c_str(), parent, name, AtFlags::SYMLINK_FOLLOW)?;
            }
            result => result?,
        }
        self.record_creation(parent, inode);
        let attr = attr::attr(inode)?;
        if self
            .devices
            .is_synced_one_by_one(inode.dev(), inode.as_fd())
            && let Some(path) = path_of_entry(self.path_of(parent.as_fd()), name)
        {
            self.unsynced
                .record_link(inode.key, path, u64::from(attr.nlink));
        }
        Ok(attr)
    }

    fn remove(&self, parent: &Self::Inode, name: &OsStr, what: Remove) -> Result<()> {
        let flags = match what {
            Remove::NonDir => AtFlags::empty(),
            Remove::Dir => AtFlags::REMOVEDIR,
        };
        stamps::catch_up();
        fs::unlinkat(parent, name, flags)?;
        self.record_removal(parent, name);
        Ok(())
    }

    /// Renames an object, or exchanges two objects (renameat2(2)). On a file system where each file is synced
    /// separately, the paths of changed objects that are not synced yet are moved too.
    fn rename(
        &self,
        parent: &Self::Inode,
        name: &OsStr,
        new_parent: &Self::Inode,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()> {
        // The kernel sets times, which must not be earlier than times that Firn has set.
        stamps::catch_up();
        let is_exchange = flags.contains(RenameFlags::EXCHANGE);
        let kernel_flags = fs::RenameFlags::from_bits_retain(flags.bits());
        let call = || fs::renameat_with(parent, name, new_parent, new_name, kernel_flags);
        if !self
            .devices
            .is_synced_one_by_one(parent.dev(), parent.as_fd())
        {
            return call();
        }
        // The list of unsynced changes has paths. A sync that does not find an object at its path must learn that a
        // rename is under way, and look again after it.
        let ticket = self.unsynced.begin_rename();
        let result = call();
        let path_of_name = |dir: &DirInode, name| path_of_entry(self.path_of(dir.as_fd()), name);
        let old_path = path_of_name(parent, name);
        let new_path = path_of_name(new_parent, new_name);
        match (result, old_path, new_path) {
            // Nothing was moved.
            (Err(_), ..) => self.unsynced.end_rename(ticket, None, is_exchange),
            (Ok(()), Some(from), Some(to)) => {
                self.unsynced
                    .end_rename(ticket, Some((&from, &to)), is_exchange);
            }
            (Ok(()), ..) => self.unsynced.end_unknown_rename(ticket),
        }
        self.record_change_of(parent);
        self.record_change_of(new_parent);
        result
    }

    fn moved_to(&self, inode: &Self::Inode, _parent: &Self::Inode, _name: &OsStr) -> Self::Inode {
        Arc::clone(inode)
    }

    fn readlink(&self, inode: &Self::Inode) -> Result<Vec<u8>> {
        match fs::readlinkat(inode, c"", Vec::new()) {
            Ok(target) => Ok(target.into_bytes()),
            // For an object that is no link, the empty path gives ENOENT, but readlink(2) of a name gives EINVAL.
            Err(Errno::NOENT) => Err(Errno::INVAL),
            Err(errno) => Err(errno),
        }
    }

    fn open_dir(&self, inode: &Self::Inode) -> Result<Self::Dir> {
        Ok(DirStream::new(reopen::open_dir(inode)?))
    }

    fn read_dir(
        &self,
        dir: &Self::Dir,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        dir.read(cookie, sink)
    }
}

impl Attributes for DirBacking {
    fn stat(&self, target: TargetOf<'_, Self>, freshness: Freshness) -> Result<Attr> {
        let fd = match target {
            Target::Inode(inode) => inode.as_fd(),
            Target::File(file) => file.fd.as_fd(),
        };
        match freshness {
            Freshness::Known => attr::attr(fd),
            Freshness::Current => attr::attr_now(fd),
        }
    }

    /// Changes one attribute of the object itself, even if it is a symbolic link, and records that it must be synced.
    fn set_attr(&self, inode: &Self::Inode, change: AttrChange<'_>) -> Result<()> {
        let result = match change {
            // On some file systems older kernels change the mode of a symbolic link and still return an error.
            AttrChange::Mode(_) if attr::attr(inode)?.kind == Kind::Symlink => {
                return Err(Errno::OPNOTSUPP);
            }
            AttrChange::Mode(mode) => fs::chmod(
                FdPath::from_fd(inode).as_c_str(),
                Mode::from_raw_mode(mode & MODE_BITS),
            ),
            AttrChange::Owner { uid, gid } => {
                let uid = uid.map(Uid::from_raw);
                let gid = gid.map(Gid::from_raw);
                fs::chownat(inode, c"", uid, gid, AtFlags::EMPTY_PATH)
            }
            AttrChange::Times { atime, mtime } => {
                if [atime, mtime].contains(&SetTime::Now) {
                    // The kernel sets the time, which must not be earlier than times that Firn has set.
                    stamps::catch_up();
                }
                times::set(inode, atime, mtime)
            }
            AttrChange::SetXattr { name, value, flags } => xattr::set(inode, name, value, flags),
            AttrChange::RemoveXattr { name } => xattr::remove(inode, name),
        };
        // Recorded also after an error, because a part of the change may be made.
        self.record_change_of(inode);
        result
    }

    fn get_xattr(&self, inode: &Self::Inode, name: &OsStr) -> Result<Vec<u8>> {
        xattr::get(inode, name)
    }

    fn list_xattr(&self, inode: &Self::Inode) -> Result<Vec<u8>> {
        xattr::list(inode)
    }
}

impl Files for DirBacking {
    fn open(&self, inode: &Self::Inode, access: Access) -> Result<Self::File> {
        Ok(DirFile {
            fd: reopen::open_file(inode, access)?,
            access,
            key: inode.key,
            lane: inode.lane,
        })
    }

    fn read_at(&self, file: &Self::File, buf: &mut [u8], offset: u64) -> Result<usize> {
        let mut read_bytes = 0;
        while read_bytes < buf.len() {
            match rustix::io::pread(&file.fd, &mut buf[read_bytes..], offset + read_bytes as u64) {
                Ok(0) => break,
                Ok(count) => read_bytes += count,
                // As in read(2): the bytes before the error count, and the next call returns the error.
                Err(_) if read_bytes > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(read_bytes)
    }

    fn write_parts(&self, file: &Self::File, parts: &[DataPart<'_>]) -> Result<u64> {
        write_parts_singly(parts, |part| {
            let slices = &part.data[..part.data.len().min(SLICES_MAX)];
            let result = rustix::io::pwritev(&file.fd, slices, part.offset);
            self.record_change(file.key, file.fd.as_fd());
            if let (Some(steering), Ok(bytes)) = (&self.steering, &result) {
                steering.count_bytes(file.lane, *bytes as u64);
            }
            result
        })
    }

    fn resize(&self, file: &Self::File, resize: Resize) -> Result<bool> {
        let len = || Ok(self.attr_of_file(file)?.size);
        resize_by_set_len(resize, len, |len| {
            stamps::catch_up();
            let result = fs::ftruncate(&file.fd, len);
            self.record_change(file.key, file.fd.as_fd());
            result
        })
    }

    fn allocate(&self, file: &Self::File, mode: i32, offset: u64, len: u64) -> Result<()> {
        stamps::catch_up();
        let mode = FallocateFlags::from_bits_retain(mode as u32);
        let result = fs::fallocate(&file.fd, mode, offset, len);
        self.record_change(file.key, file.fd.as_fd());
        result
    }

    fn seek(&self, file: &Self::File, offset: u64, what: Seek) -> Result<u64> {
        // This moves the descriptor's position, which no other code uses.
        let from = match what {
            Seek::Data => SeekFrom::Data(offset),
            Seek::Hole => SeekFrom::Hole(offset),
        };
        fs::seek(&file.fd, from)
    }

    /// Copies bytes between files with one copy_file_range(2), and returns their number, which may be less than `len`.
    fn copy_range(
        &self,
        from: &Self::File,
        from_offset: u64,
        to: &Self::File,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        let mut from_position = from_offset;
        let mut to_position = to_offset;
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let result = fs::copy_file_range(
            &from.fd,
            Some(&mut from_position),
            &to.fd,
            Some(&mut to_position),
            len,
        );
        // Recorded also after an error, because some bytes may be copied.
        self.record_change(to.key, to.fd.as_fd());
        Ok(result? as u64)
    }

    fn sync(&self, file: &Self::File, data_only: bool) -> Result<()> {
        if data_only {
            return fs::fdatasync(&file.fd);
        }
        let version = self.unsynced.begin_sync();
        fs::fsync(&file.fd)?;
        self.unsynced.synced(file.key, version);
        Ok(())
    }

    /// Tells the kernel that the cached pages of a range will be synced soon, or will not be read again.
    fn advise(&self, file: &Self::File, range: Range<u64>, advice: PageAdvice) {
        let len = range.end - range.start;
        match advice {
            // SAFETY: the call accesses no memory of this process. A failure is harmless: the write-out begins later.
            PageAdvice::WriteOut => unsafe {
                libc::sync_file_range(
                    file.fd.as_raw_fd(),
                    range.start as i64,
                    len as i64,
                    libc::SYNC_FILE_RANGE_WRITE,
                );
            },
            // A failure is harmless: the pages remain cached. A length of 0 is left out, because it would mean all
            // bytes up to the end.
            PageAdvice::Forget => {
                if let Some(len) = NonZero::new(len) {
                    let _ = fs::fadvise(&file.fd, range.start, Some(len), Advice::DontNeed);
                }
            }
        }
    }

    fn lock(&self, file: &Self::File, request: LockRequest) -> Result<bool> {
        let fd = file.fd.as_fd();
        let owner = self.devices.range_owner;
        match request {
            LockRequest::File(mode) => lock::acquire_file(fd, mode),
            LockRequest::UnlockFile => lock::release_file(fd),
            LockRequest::Range(range, mode) => lock::set_range(owner, fd, range, Some(mode)),
            LockRequest::Unlock(range) => lock::set_range(owner, fd, range, None),
            LockRequest::Test(range, mode) => lock::is_range_free(owner, fd, range, mode),
        }
    }

    /// Returns a descriptor of an open file for the kernel or another process, with no more rights than `purpose`
    /// needs. Returns `None` if the file may not be given away for this purpose, or if no descriptor can be made.
    fn descriptor(&self, file: &Self::File, purpose: DescriptorUse) -> Option<OwnedFd> {
        let fd = file.fd.as_fd();
        let (dev, _) = file.key;
        match purpose {
            // This process does not see writes that the kernel makes itself, so it could not record that the file must
            // be synced.
            DescriptorUse::Passthrough if self.devices.is_synced_one_by_one(dev, fd) => None,
            DescriptorUse::Passthrough | DescriptorUse::Keeping => fd.try_clone_to_owned().ok(),
            DescriptorUse::Reading => match file.access {
                Access::Read => fd.try_clone_to_owned().ok(),
                // This descriptor can write, so the other process gets a new one, with its own flags and position.
                Access::Write | Access::ReadWrite => reopen::open_file(fd, Access::Read).ok(),
            },
        }
    }

    /// Continues to use a regular file that an earlier process had open, by its descriptor. Fails with EBADF if the
    /// descriptor is that of another kind of object, or cannot be used for I/O.
    fn adopt(&self, descriptor: OwnedFd) -> Result<AdoptedBy<Self>> {
        let attr = attr::attr(&descriptor)?;
        let flags = fs::fcntl_getfl(&descriptor)?;
        if attr.kind != Kind::File || flags.contains(OFlags::PATH) {
            return Err(Errno::BADF);
        }
        let access = match flags & OFlags::ACCMODE {
            OFlags::RDONLY => Access::Read,
            OFlags::WRONLY => Access::Write,
            _ => Access::ReadWrite,
        };
        // The path in /proc leads to the object of the descriptor, even if the object has no name.
        let path = FdPath::from_fd(&descriptor);
        let object_flags = OFlags::PATH | OFlags::CLOEXEC;
        let object = fs::open(path.as_c_str(), object_flags, Mode::empty())?;
        let inode = DirInode::new(object, &attr);
        let file = DirFile {
            fd: descriptor,
            access,
            key: inode.key,
            lane: inode.lane,
        };
        Ok(Adopted {
            inode,
            file,
            access,
            attr,
        })
    }
}

impl Sharing for DirBacking {
    fn kernel_reads(&self, _file: &Self::File) -> KernelReads {
        KernelReads::Passthrough
    }

    /// Returns `None`, because the kernel reads the file by itself.
    fn locate(
        &self,
        _file: &Self::File,
        _range: Range<u64>,
        _limits: LocateLimits,
    ) -> Result<Option<Located>> {
        Ok(None)
    }

    fn report_use(&self, _file: &Self::File, _what: FileUse) -> Result<()> {
        Ok(())
    }

    fn level_max(&self, _inode: &Self::Inode) -> DurabilityLevel {
        DurabilityLevel::Durable
    }
}

impl Placement for DirBacking {
    fn facts(&self, inode: &Self::Inode) -> Facts {
        Facts {
            lane: inode.lane,
            gathers: false,
            changes_by_others: 0,
        }
    }

    fn lane_of_turn(&self, turn: u64) -> Option<LaneIndex> {
        let steering = self.steering.as_ref()?;
        Some(steering.lane_of_turn(turn))
    }
}
