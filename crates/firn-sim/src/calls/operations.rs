//! Operations that a parameter of a call selects. Each operation is a step with its own name.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering;

use firn_backing::{Attr, Caller, DataPart, Errno, Kind, LockMode, LockRange, Result, SetTime};

use super::{SIZE_MAX, SimFile, SimInode, check_xattr};
use crate::SimBacking;
use crate::data::PAGE_BYTES;
use crate::disk::{ATIME, Inode, MTIME};

impl SimBacking {
    /// mkdir(2).
    pub(super) fn make_dir(
        &self,
        caller: &Caller,
        parent: &SimInode,
        name: &OsStr,
        mode: u32,
    ) -> Result<(SimInode, Attr)> {
        let disk = &mut self.enter("mkdir")?.disk;
        let ino = disk.add(
            caller,
            parent.ino,
            name,
            libc::S_IFDIR | mode & 0o1777,
            |_| (),
        )?;
        self.made(disk, parent.ino, ino);
        disk.refer(ino)
    }

    /// mknod(2).
    pub(super) fn make_node(
        &self,
        caller: &Caller,
        parent: &SimInode,
        name: &OsStr,
        mode: u32,
        rdev: u64,
    ) -> Result<(SimInode, Attr)> {
        let disk = &mut self.enter("mknod")?.disk;
        let typed = if mode & libc::S_IFMT == 0 {
            mode | libc::S_IFREG
        } else {
            mode
        };
        let rdev = match Kind::from_mode(typed) {
            None | Some(Kind::Symlink) => return Err(Errno::INVAL),
            Some(Kind::Dir) => return Err(Errno::PERM),
            Some(Kind::CharDevice | Kind::BlockDevice) => rdev,
            Some(_) => 0,
        };
        let mode = typed & (libc::S_IFMT | 0o7777);
        let ino = disk.add(caller, parent.ino, name, mode, |inode| inode.rdev = rdev)?;
        self.made(disk, parent.ino, ino);
        disk.refer(ino)
    }

    /// symlink(2).
    pub(super) fn make_symlink(
        &self,
        caller: &Caller,
        parent: &SimInode,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<(SimInode, Attr)> {
        let disk = &mut self.enter("symlink")?.disk;
        match target.len() {
            0 => return Err(Errno::NOENT),
            // PATH_MAX includes the terminating zero; file systems store the target in one block.
            len if len >= PAGE_BYTES as usize => return Err(Errno::NAMETOOLONG),
            _ => {}
        }
        let fill = |inode: &mut Inode| inode.target = target.as_bytes().to_vec();
        let ino = disk.add(caller, parent.ino, name, libc::S_IFLNK | 0o777, fill)?;
        self.made(disk, parent.ino, ino);
        disk.refer(ino)
    }

    /// unlinkat(2) of anything but a directory.
    pub(super) fn remove_non_dir(&self, parent: &SimInode, name: &OsStr) -> Result<()> {
        let disk = &mut self.enter("unlink")?.disk;
        let ino = disk.find(parent.ino, name)?.ok_or(Errno::NOENT)?;
        disk.writable()?;
        if disk.inode(ino)?.is_dir() {
            return Err(Errno::ISDIR);
        }
        disk.change(&[(parent.ino, name, None)]);
        self.removed(disk, parent.ino, name);
        Ok(())
    }

    /// unlinkat(2) of a directory.
    pub(super) fn remove_dir(&self, parent: &SimInode, name: &OsStr) -> Result<()> {
        let disk = &mut self.enter("rmdir")?.disk;
        let ino = disk.find(parent.ino, name)?;
        match name.as_bytes() {
            b"." => return Err(Errno::INVAL),
            b".." => return Err(Errno::NOTEMPTY),
            _ => disk.writable()?,
        }
        let inode = disk.inode(ino.ok_or(Errno::NOENT)?)?;
        if !inode.is_dir() {
            return Err(Errno::NOTDIR);
        }
        if !inode.entries.is_empty() {
            return Err(Errno::NOTEMPTY);
        }
        disk.change(&[(parent.ino, name, None)]);
        self.removed(disk, parent.ino, name);
        Ok(())
    }

    /// fchmod(2).
    pub(super) fn change_mode(&self, object: &SimInode, mode: u32) -> Result<()> {
        let disk = &mut self.enter("set_mode")?.disk;
        if disk.inode(object.ino)?.kind() == Kind::Symlink {
            return Err(Errno::OPNOTSUPP);
        }
        disk.touch(object.ino, |i| {
            i.mode = i.mode & libc::S_IFMT | mode & 0o7777
        })?;
        self.changed(disk, object.ino);
        Ok(())
    }

    /// fchownat(2).
    pub(super) fn change_owner(
        &self,
        object: &SimInode,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> Result<()> {
        let disk = &mut self.enter("set_owner")?.disk;
        disk.touch(object.ino, |i| {
            i.uid = uid.unwrap_or(i.uid);
            i.gid = gid.unwrap_or(i.gid);
            if !i.is_dir() {
                i.mode &= !libc::S_ISUID;
                if i.mode & libc::S_IXGRP != 0 {
                    i.mode &= !libc::S_ISGID;
                }
            }
        })?;
        self.changed(disk, object.ino);
        Ok(())
    }

    /// utimensat(2).
    pub(super) fn change_times(
        &self,
        object: &SimInode,
        atime: SetTime,
        mtime: SetTime,
    ) -> Result<()> {
        let disk = &mut self.enter("set_times")?.disk;
        let now = disk.now();
        disk.touch(object.ino, |i| {
            for (which, set) in [(ATIME, atime), (MTIME, mtime)] {
                match set {
                    SetTime::Keep => {}
                    SetTime::Now => i.times[which] = now,
                    SetTime::At(time) => i.times[which] = time,
                }
            }
        })?;
        self.changed(disk, object.ino);
        Ok(())
    }

    /// setxattr(2).
    pub(super) fn put_xattr(
        &self,
        object: &SimInode,
        name: &OsStr,
        value: &[u8],
        flags: i32,
    ) -> Result<()> {
        let disk = &mut self.enter("set_xattr")?.disk;
        let inode = disk.inode(object.ino)?;
        check_xattr(inode, name, Errno::PERM)?;
        let exists = inode.xattrs.contains_key(name);
        match (flags, exists) {
            (libc::XATTR_CREATE, true) => Err(Errno::EXIST),
            (libc::XATTR_REPLACE, false) => Err(Errno::NODATA),
            (0 | libc::XATTR_CREATE | libc::XATTR_REPLACE, _) => {
                disk.touch(object.ino, |i| {
                    drop(i.xattrs.insert(name.to_owned(), value.to_vec()))
                })?;
                self.changed(disk, object.ino);
                Ok(())
            }
            _ => Err(Errno::INVAL),
        }
    }

    /// removexattr(2).
    pub(super) fn take_xattr(&self, object: &SimInode, name: &OsStr) -> Result<()> {
        let disk = &mut self.enter("remove_xattr")?.disk;
        let inode = disk.inode(object.ino)?;
        check_xattr(inode, name, Errno::PERM)?;
        if !inode.xattrs.contains_key(name) {
            return Err(Errno::NODATA);
        }
        disk.touch(object.ino, |i| drop(i.xattrs.remove(name)))?;
        self.changed(disk, object.ino);
        Ok(())
    }

    /// pwritev(2), called once: may write fewer bytes than requested.
    pub(super) fn write_part(&self, file: &SimFile, part: &DataPart<'_>) -> Result<usize> {
        let (mut state, most) = self.enter_to_write("write_at")?;
        file.writes()?;
        // Fails like the client of an NFS server that has released the client's locks.
        if file.is_locked.load(Ordering::Relaxed) && !state.locks.has(file.number) {
            return Err(Errno::IO);
        }
        let offset = part.offset;
        let mut bytes: Vec<u8> = part
            .data
            .iter()
            .flat_map(|slice| slice.iter().copied())
            .collect();
        bytes.truncate(most);
        if offset > SIZE_MAX {
            return Err(Errno::INVAL);
        }
        if offset + bytes.len() as u64 > SIZE_MAX {
            return Err(Errno::FBIG);
        }
        let ino = file.object.ino;
        if self.lane_fails(ino) {
            return Err(Errno::IO);
        }
        let room = state.disk.room(ino, offset, bytes.len() as u64)?;
        bytes.truncate(room as usize);
        if !bytes.is_empty() {
            state.disk.modify(ino, |i| i.data.write(&bytes, offset))?;
            self.changed(&state.disk, ino);
        }
        Ok(bytes.len())
    }

    /// ftruncate(2).
    pub(super) fn truncate(&self, file: &SimFile, len: u64) -> Result<()> {
        let disk = &mut self.enter("set_len")?.disk;
        // ftruncate(2) fails with EINVAL for a descriptor that is not open for writing.
        if file.writes().is_err() || len > SIZE_MAX {
            return Err(Errno::INVAL);
        }
        disk.modify(file.object.ino, |i| i.data.set_len(len))?;
        self.changed(disk, file.object.ino);
        Ok(())
    }

    /// flock(2).
    pub(super) fn lock_file(&self, file: &SimFile, mode: LockMode) -> Result<bool> {
        let mut state = self.enter("try_lock")?;
        // Over NFS a whole-file lock is a byte-range lock, so an exclusive one needs a descriptor that is open for
        // writing.
        if mode == LockMode::Exclusive {
            file.writes()?;
        }
        let ino = file.object.ino;
        let is_taken = state.locks.take(ino, self.process, file.number, mode)?;
        if is_taken {
            file.is_locked.store(true, Ordering::Relaxed);
        }
        Ok(is_taken)
    }

    /// flock(2) with `LOCK_UN`.
    pub(super) fn unlock_file(&self, file: &SimFile) -> Result<bool> {
        self.enter("unlock_file")?.locks.end_of(file.number);
        Ok(true)
    }

    /// fcntl(2) with `F_SETLK`.
    pub(super) fn set_range(
        &self,
        file: &SimFile,
        range: LockRange,
        mode: Option<LockMode>,
    ) -> Result<bool> {
        let mut state = self.enter("lock_range")?;
        match mode {
            Some(LockMode::Exclusive) => file.writes()?,
            Some(LockMode::Shared) => file.reads()?,
            None => {}
        }
        let ino = file.object.ino;
        state.locks.take_range(ino, self.process, range, mode)
    }

    /// fcntl(2) with `F_GETLK`.
    pub(super) fn is_range_free(
        &self,
        file: &SimFile,
        range: LockRange,
        mode: LockMode,
    ) -> Result<bool> {
        let state = self.enter("is_range_locked")?;
        let ino = file.object.ino;
        Ok(!state
            .locks
            .is_range_locked(ino, self.process, range, mode)?)
    }

    /// fsync(2) of a directory.
    pub(super) fn sync_one_dir(&self, object: &SimInode) -> Result<()> {
        let disk = &mut self.enter("sync_dir")?.disk;
        disk.dir(object.ino)?;
        disk.sync_names(object.ino);
        disk.sync_attributes(object.ino);
        self.unsynced
            .synced((disk.device, object.ino), self.unsynced.begin_sync());
        Ok(())
    }

    /// syncfs(2), or fsync(2) of each object.
    pub(super) fn sync_everything(&self) -> Result<()> {
        if self.is_synced_one_by_one() {
            return self.sync_each(self.unsynced.inherits());
        }
        self.enter("sync_all")?.disk.sync_all();
        Ok(())
    }
}
