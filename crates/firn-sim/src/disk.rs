//! The simulated disk: inodes and names as programs see them, and the part of them that is durable (that a power
//! failure leaves).
//!
//! Invariants (checked by [`Disk::fsck`])
//! * Every entry leads to an inode; every directory but the root has one entry.
//! * `nlink` is the number of entries, and for directories 2 plus the number of subdirectories.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::sync::Arc;
use std::time::Duration;

use super::data::Data;
use super::power::NameChange;
use firn_backing::{Attr, Errno, Kind, Result, Time};

/// Inode number of the top directory.
pub(super) const ROOT: u64 = 1;

/// Counts the users of an inode. A copy of an inode belongs to another disk, so it begins without users.
#[derive(Default)]
pub(super) struct UserCount(Arc<()>);

impl Clone for UserCount {
    fn clone(&self) -> Self {
        Self::default()
    }
}

/// One object.
#[derive(Clone)]
pub(super) struct Inode {
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) rdev: u64,
    pub(super) nlink: u32,
    pub(super) times: [Time; 4],
    pub(super) xattrs: BTreeMap<OsString, Vec<u8>>,
    pub(super) data: Data,
    pub(super) target: Vec<u8>,
    /// Each name with its inode number and cookie. Cookies grow, so a stream of entries never skips an old entry.
    pub(super) entries: BTreeMap<OsString, (u64, i64)>,
    pub(super) parent: u64,
    users: UserCount,
}

/// Indexes of the times of an inode: access, modification, change and birth.
pub(super) const ATIME: usize = 0;
pub(super) const MTIME: usize = 1;
pub(super) const CTIME: usize = 2;
const BTIME: usize = 3;

impl Inode {
    /// Makes an empty object without names. `mode` has its type and permissions.
    pub(super) fn new(mode: u32, now: Time) -> Self {
        Self {
            mode,
            uid: 0,
            gid: 0,
            rdev: 0,
            nlink: 0,
            times: [now; 4],
            xattrs: BTreeMap::new(),
            data: Data::default(),
            target: Vec::new(),
            entries: BTreeMap::new(),
            parent: 0,
            users: UserCount::default(),
        }
    }

    pub(super) fn kind(&self) -> Kind {
        Kind::from_mode(self.mode).expect("inodes are made with a type")
    }

    pub(super) fn is_dir(&self) -> bool {
        self.kind() == Kind::Dir
    }

    pub(super) fn hold(&self) -> Arc<()> {
        self.users.0.clone()
    }

    /// Returns the attributes of the object, as stat(2) does.
    pub(super) fn attr(&self, ino: u64, device: u64) -> Attr {
        Attr {
            dev: device,
            ino,
            kind: self.kind(),
            mode: self.mode,
            nlink: self.nlink,
            uid: self.uid,
            gid: self.gid,
            rdev: self.rdev,
            size: if self.kind() == Kind::Symlink {
                self.target.len() as u64
            } else {
                self.data.size
            },
            blocks: self.data.page_count() * (super::data::PAGE_BYTES / 512),
            blksize: super::data::PAGE_BYTES as u32,
            atime: self.times[ATIME],
            mtime: self.times[MTIME],
            ctime: self.times[CTIME],
            btime: Some(self.times[BTIME]),
        }
    }
}

/// A name that gets an object or is removed.
#[derive(Clone, Copy)]
pub(super) struct NewName<'a> {
    /// Inode number of the directory.
    pub(super) dir: u64,
    pub(super) name: &'a OsStr,
    /// Inode number of the object. `None` removes the name.
    pub(super) ino: Option<u64>,
}

/// All objects, by their inode number.
pub(super) type Inodes = BTreeMap<u64, Inode>;

/// A disk with its cache. A clone is an independent disk.
#[derive(Clone)]
pub struct Disk {
    pub(super) inodes: Inodes,
    /// The objects as they are after a power loss, if no unsynced change survives.
    pub(super) stable: Inodes,
    /// Name changes since they were last made durable, in order.
    pub(super) log: Vec<NameChange>,
    next_ino: u64,
    next_cookie: i64,
    /// Time of the last change.
    clock: Duration,
    /// Time between two consecutive changes.
    pub(super) tick: Duration,
    pub(super) capacity_bytes: Option<u64>,
    pub(super) device: u64,
    pub(super) read_only: bool,
}

impl Default for Disk {
    /// Makes a disk with an empty root directory and without a limit of space.
    fn default() -> Self {
        let mut root = Inode::new(libc::S_IFDIR | 0o755, Time::default());
        (root.nlink, root.parent) = (2, ROOT);
        let inodes = Inodes::from([(ROOT, root)]);
        Self {
            stable: inodes.clone(),
            inodes,
            log: Vec::new(),
            next_ino: ROOT + 1,
            // Cookies 1 and 2 belong to `.` and `..`.
            next_cookie: 3,
            clock: Duration::ZERO,
            tick: Duration::from_secs(1),
            capacity_bytes: None,
            device: 1,
            read_only: false,
        }
    }
}

impl Disk {
    /// Advances the clock by one tick, and returns the time.
    pub(super) fn now(&mut self) -> Time {
        self.pass(self.tick);
        Time {
            sec: self.clock.as_secs() as i64,
            nsec: self.clock.subsec_nanos(),
        }
    }

    /// Advances the clock.
    pub(super) fn pass(&mut self, time: Duration) {
        self.clock += time;
    }

    pub(super) fn inode(&self, ino: u64) -> Result<&Inode> {
        self.inodes.get(&ino).ok_or(Errno::STALE)
    }

    pub(super) fn inode_mut(&mut self, ino: u64) -> Result<&mut Inode> {
        self.inodes.get_mut(&ino).ok_or(Errno::STALE)
    }

    pub(super) fn dir(&self, ino: u64) -> Result<&Inode> {
        let inode = self.inode(ino)?;
        if inode.is_dir() {
            Ok(inode)
        } else {
            Err(Errno::NOTDIR)
        }
    }

    pub(super) fn check_not_read_only(&self) -> Result<()> {
        if self.read_only {
            Err(Errno::ROFS)
        } else {
            Ok(())
        }
    }

    /// Returns the inode number of `name`, if the name exists.
    pub(super) fn find(&self, parent: u64, name: &OsStr) -> Result<Option<u64>> {
        let dir = self.dir(parent)?;
        match name.as_encoded_bytes() {
            b"" => return Err(Errno::NOENT),
            b"." => return Ok(Some(parent)),
            b".." => return Ok(Some(dir.parent)),
            long if long.len() > 255 => return Err(Errno::NAMETOOLONG),
            _ => {}
        }
        Ok(dir.entries.get(name).map(|entry| entry.0))
    }

    /// Checks that the name is free and that a name may be added to the directory.
    pub(super) fn check_name_free(&self, parent: u64, name: &OsStr) -> Result<()> {
        if self.find(parent, name)?.is_some() {
            return Err(Errno::EXIST);
        }
        self.check_not_read_only()?;
        // A removed directory accepts no new names.
        if self.dir(parent)?.nlink == 0 {
            Err(Errno::NOENT)
        } else {
            Ok(())
        }
    }

    /// Creates an inode, and gives it a name in the directory `parent`. `fill` sets what depends on the kind of object.
    /// Returns the inode number.
    pub(super) fn add(
        &mut self,
        caller: &firn_backing::Caller,
        parent: u64,
        name: &OsStr,
        mode: u32,
        fill: impl FnOnce(&mut Inode),
    ) -> Result<u64> {
        self.check_name_free(parent, name)?;
        let now = self.now();
        let mut inode = Inode::new(mode, now);
        let dir = self.dir(parent)?;
        (inode.uid, inode.gid) = (caller.uid, caller.gid);
        if dir.mode & libc::S_ISGID != 0 {
            inode.gid = dir.gid;
            if inode.is_dir() {
                inode.mode |= libc::S_ISGID;
            }
        }
        fill(&mut inode);
        let ino = self.next_ino;
        self.next_ino += 1;
        self.inodes.insert(ino, inode);
        self.apply_name_changes(&[NewName {
            dir: parent,
            name,
            ino: Some(ino),
        }]);
        Ok(ino)
    }

    /// Changes several names in one step: each gets an object, or is removed. Updates link counts, parents and times.
    /// The change is logged as not durable yet.
    pub(super) fn apply_name_changes(&mut self, new_names: &[NewName<'_>]) {
        let now = self.now();
        // Old names go first, so that each name has at most one object, also in an exchange.
        let mut removed_names = Vec::new();
        for new_name in new_names {
            let dir = self.inodes.get_mut(&new_name.dir);
            if let Some((ino, _)) = dir.and_then(|dir| dir.entries.remove(new_name.name)) {
                removed_names.push((new_name.dir, ino));
            }
        }
        let replaced_objects = removed_names.iter().map(|(_, ino)| *ino);
        let change = NameChange::new(&self.inodes, new_names, replaced_objects);
        self.log.push(change);
        for (dir, ino) in removed_names {
            self.remove_name(dir, ino, now);
        }
        for new_name in new_names {
            if let Some(ino) = new_name.ino {
                self.add_name(new_name.dir, new_name.name, ino, now);
            }
            if let Some(dir) = self.inodes.get_mut(&new_name.dir) {
                dir.times[MTIME] = now;
                dir.times[CTIME] = now;
            }
        }
        self.free_unused();
    }

    /// Adds a name to a directory, and counts it in both objects.
    fn add_name(&mut self, dir: u64, name: &OsStr, ino: u64, now: Time) {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let Some(child) = self.inodes.get_mut(&ino) else {
            return;
        };
        child.times[CTIME] = now;
        child.nlink += 1;
        let is_dir = child.is_dir();
        if is_dir {
            // A directory has two links: its name and its `.`.
            child.nlink = child.nlink.max(2);
            child.parent = dir;
        }
        if let Some(dir) = self.inodes.get_mut(&dir) {
            dir.nlink += u32::from(is_dir);
            dir.entries.insert(name.to_owned(), (ino, cookie));
        }
    }

    /// Updates the link counts after a name was removed from a directory.
    fn remove_name(&mut self, dir: u64, ino: u64, now: Time) {
        let Some(child) = self.inodes.get_mut(&ino) else {
            return;
        };
        child.times[CTIME] = now;
        // A directory keeps the links of its subdirectories' `..`. With its name, it loses its own two links.
        let is_dir = child.is_dir();
        child.nlink -= if is_dir && child.nlink == 2 { 2 } else { 1 };
        if is_dir && let Some(dir) = self.inodes.get_mut(&dir) {
            dir.nlink -= 1;
        }
    }

    /// Makes a whiteout, without a name: device 0,0, by which the kernel marks a removed lower file.
    pub(super) fn whiteout(&mut self) -> u64 {
        let now = self.now();
        let ino = self.next_ino;
        self.next_ino += 1;
        self.inodes.insert(ino, Inode::new(libc::S_IFCHR, now));
        ino
    }

    /// Frees the objects that have neither a name nor a user.
    pub(super) fn free_unused(&mut self) {
        self.inodes
            .retain(|_, inode| inode.nlink > 0 || Arc::strong_count(&inode.users.0) > 1);
    }

    /// Returns the number of free bytes; `None` if the capacity has no bound.
    pub(super) fn free_bytes(&mut self) -> Option<u64> {
        let capacity = self.capacity_bytes?;
        self.free_unused();
        let used: u64 = self
            .inodes
            .values()
            .map(|inode| inode.data.page_count())
            .sum();
        Some(capacity.saturating_sub(used * super::data::PAGE_BYTES))
    }

    /// Whether `ancestor` is `ino` or above it.
    pub(super) fn is_above(&self, ancestor: u64, mut ino: u64) -> bool {
        while ino != ancestor && ino != ROOT {
            ino = self.inodes.get(&ino).map_or(ROOT, |inode| inode.parent);
        }
        ino == ancestor
    }

    /// Checks the invariants of link counts and names, as fsck(8) does. The error describes the first one that is
    /// broken.
    pub fn fsck(&self) -> std::result::Result<(), String> {
        let mut named_objects = BTreeSet::new();
        for (ino, name_count) in super::power::count_links(&self.inodes)? {
            named_objects.insert(ino);
            let nlink = self.inodes[&ino].nlink;
            if nlink != name_count {
                return Err(format!(
                    "inode {ino}: nlink is {nlink}, {name_count} names lead to it"
                ));
            }
        }
        for (ino, inode) in &self.inodes {
            if inode.nlink > 0 && !named_objects.contains(ino) {
                return Err(format!(
                    "inode {ino}: nlink is {}, no name leads to it",
                    inode.nlink
                ));
            }
        }
        Ok(())
    }
}
