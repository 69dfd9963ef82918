//! The operations behind the calls in `calls`. Some calls have one for each kind of object, such as mkdir(2) for a new
//! directory. Each operation is a *step* with its own name, at which a test may inject a fault.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering;

use firn_backing::{Attr, Caller, DataPart, Errno, Kind, LockMode, LockRange, Result, SetTime};

use super::{SIZE_MAX, SimFile, SimInode, WriteStep, check_xattr};
use crate::SimBacking;
use crate::data::PAGE_BYTES;
use crate::disk::{ATIME, Inode, MTIME, NewName};

impl SimBacking {
    /// Makes a directory, as mkdir(2) does. It is the step `mkdir`, at which a test may inject a fault.
    pub(super) fn make_dir(
        &self,
        caller: &Caller,
        parent: &SimInode,
        name: &OsStr,
        mode: u32,
    ) -> Result<(SimInode, Attr)> {
        let disk = &mut self.begin_step("mkdir")?.disk;
        let ino = disk.add(
            caller,
            parent.ino,
            name,
            libc::S_IFDIR | mode & 0o1777,
            |_| (),
        )?;
        self.record_creation(disk, parent.ino, ino);
        disk.reference(ino)
    }

    /// Makes a special file or a regular file, as mknod(2) does.
    pub(super) fn make_node(
        &self,
        caller: &Caller,
        parent: &SimInode,
        name: &OsStr,
        mode: u32,
        rdev: u64,
    ) -> Result<(SimInode, Attr)> {
        let disk = &mut self.begin_step("mknod")?.disk;
        // A mode without a type stands for a regular file.
        let mode_with_type = if mode & libc::S_IFMT == 0 {
            mode | libc::S_IFREG
        } else {
            mode
        };
        let rdev = match Kind::from_mode(mode_with_type) {
            None | Some(Kind::Symlink) => return Err(Errno::INVAL),
            Some(Kind::Dir) => return Err(Errno::PERM),
            Some(Kind::CharDevice | Kind::BlockDevice) => rdev,
            Some(_) => 0,
        };
        let mode = mode_with_type & (libc::S_IFMT | 0o7777);
        let ino = disk.add(caller, parent.ino, name, mode, |inode| inode.rdev = rdev)?;
        self.record_creation(disk, parent.ino, ino);
        disk.reference(ino)
    }

    /// Makes a symbolic link, as symlink(2) does.
    pub(super) fn make_symlink(
        &self,
        caller: &Caller,
        parent: &SimInode,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<(SimInode, Attr)> {
        let disk = &mut self.begin_step("symlink")?.disk;
        if target.is_empty() {
            return Err(Errno::NOENT);
        }
        // PATH_MAX includes the terminating zero; file systems store the target in one block.
        if target.len() >= PAGE_BYTES as usize {
            return Err(Errno::NAMETOOLONG);
        }
        let set_target = |inode: &mut Inode| inode.target = target.as_bytes().to_vec();
        let mode = libc::S_IFLNK | 0o777;
        let ino = disk.add(caller, parent.ino, name, mode, set_target)?;
        self.record_creation(disk, parent.ino, ino);
        disk.reference(ino)
    }

    /// Removes a name of anything but a directory, as unlinkat(2) does.
    pub(super) fn remove_non_dir(&self, parent: &SimInode, name: &OsStr) -> Result<()> {
        let disk = &mut self.begin_step("unlink")?.disk;
        let ino = disk.find(parent.ino, name)?.ok_or(Errno::NOENT)?;
        disk.check_not_read_only()?;
        if disk.inode(ino)?.is_dir() {
            return Err(Errno::ISDIR);
        }
        disk.apply_name_changes(&[NewName {
            dir: parent.ino,
            name,
            ino: None,
        }]);
        self.record_removal(disk, parent.ino, name);
        Ok(())
    }

    /// Removes an empty directory, as unlinkat(2) does.
    pub(super) fn remove_dir(&self, parent: &SimInode, name: &OsStr) -> Result<()> {
        let disk = &mut self.begin_step("rmdir")?.disk;
        let ino = disk.find(parent.ino, name)?;
        match name.as_bytes() {
            b"." => return Err(Errno::INVAL),
            b".." => return Err(Errno::NOTEMPTY),
            _ => disk.check_not_read_only()?,
        }
        let inode = disk.inode(ino.ok_or(Errno::NOENT)?)?;
        if !inode.is_dir() {
            return Err(Errno::NOTDIR);
        }
        if !inode.entries.is_empty() {
            return Err(Errno::NOTEMPTY);
        }
        disk.apply_name_changes(&[NewName {
            dir: parent.ino,
            name,
            ino: None,
        }]);
        self.record_removal(disk, parent.ino, name);
        Ok(())
    }

    /// Sets the permission bits, as fchmod(2) does.
    pub(super) fn change_mode(&self, object: &SimInode, mode: u32) -> Result<()> {
        let disk = &mut self.begin_step("set_mode")?.disk;
        if disk.inode(object.ino)?.kind() == Kind::Symlink {
            return Err(Errno::OPNOTSUPP);
        }
        disk.change_attributes(object.ino, |inode| {
            inode.mode = inode.mode & libc::S_IFMT | mode & 0o7777
        })?;
        self.record_change(disk, object.ino);
        Ok(())
    }

    /// Sets the owner and the group, as fchownat(2) does. `None` leaves one as it is.
    pub(super) fn change_owner(
        &self,
        object: &SimInode,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> Result<()> {
        let disk = &mut self.begin_step("set_owner")?.disk;
        disk.change_attributes(object.ino, |inode| {
            inode.uid = uid.unwrap_or(inode.uid);
            inode.gid = gid.unwrap_or(inode.gid);
            if !inode.is_dir() {
                inode.mode &= !libc::S_ISUID;
                if inode.mode & libc::S_IXGRP != 0 {
                    inode.mode &= !libc::S_ISGID;
                }
            }
        })?;
        self.record_change(disk, object.ino);
        Ok(())
    }

    /// Sets the access and modification time, as utimensat(2) does.
    pub(super) fn change_times(
        &self,
        object: &SimInode,
        atime: SetTime,
        mtime: SetTime,
    ) -> Result<()> {
        let disk = &mut self.begin_step("set_times")?.disk;
        let now = disk.now();
        disk.change_attributes(object.ino, |inode| {
            for (index, new_time) in [(ATIME, atime), (MTIME, mtime)] {
                match new_time {
                    SetTime::Keep => {}
                    SetTime::Now => inode.times[index] = now,
                    SetTime::At(time) => inode.times[index] = time,
                }
            }
        })?;
        self.record_change(disk, object.ino);
        Ok(())
    }

    /// Sets an extended attribute, as setxattr(2) does.
    pub(super) fn store_xattr(
        &self,
        object: &SimInode,
        name: &OsStr,
        value: &[u8],
        flags: i32,
    ) -> Result<()> {
        let disk = &mut self.begin_step("set_xattr")?.disk;
        let inode = disk.inode(object.ino)?;
        check_xattr(inode, name, Errno::PERM)?;
        let exists = inode.xattrs.contains_key(name);
        match flags {
            libc::XATTR_CREATE if exists => return Err(Errno::EXIST),
            libc::XATTR_REPLACE if !exists => return Err(Errno::NODATA),
            0 | libc::XATTR_CREATE | libc::XATTR_REPLACE => {}
            _ => return Err(Errno::INVAL),
        }
        disk.change_attributes(object.ino, |inode| {
            inode.xattrs.insert(name.to_owned(), value.to_vec());
        })?;
        self.record_change(disk, object.ino);
        Ok(())
    }

    /// Removes an extended attribute, as removexattr(2) does.
    pub(super) fn delete_xattr(&self, object: &SimInode, name: &OsStr) -> Result<()> {
        let disk = &mut self.begin_step("remove_xattr")?.disk;
        let inode = disk.inode(object.ino)?;
        check_xattr(inode, name, Errno::PERM)?;
        if !inode.xattrs.contains_key(name) {
            return Err(Errno::NODATA);
        }
        disk.change_attributes(object.ino, |inode| drop(inode.xattrs.remove(name)))?;
        self.record_change(disk, object.ino);
        Ok(())
    }

    /// Writes one part of a file, as one call of pwritev(2) does: it writes fewer bytes than requested if the test's
    /// plan says so, or if the disk is full.
    pub(super) fn write_part(&self, file: &SimFile, part: &DataPart<'_>) -> Result<usize> {
        let WriteStep {
            mut state,
            bytes_max,
        } = self.begin_write_step("write_at")?;
        file.check_writable()?;
        // Fails like the client of an NFS server that has released the client's locks.
        if file.is_locked.load(Ordering::Relaxed) && !state.locks.has_file_lock(file.number) {
            return Err(Errno::IO);
        }
        let offset = part.offset;
        let mut bytes: Vec<u8> = part
            .data
            .iter()
            .flat_map(|slice| slice.iter().copied())
            .collect();
        bytes.truncate(bytes_max);
        if offset > SIZE_MAX {
            return Err(Errno::INVAL);
        }
        if offset + bytes.len() as u64 > SIZE_MAX {
            return Err(Errno::FBIG);
        }
        let ino = file.object.ino;
        // The test has made the lane (server) of the file fail.
        if self.lane_fails(ino) {
            return Err(Errno::IO);
        }
        let writable_bytes = state.disk.writable_bytes(ino, offset, bytes.len() as u64)?;
        bytes.truncate(writable_bytes as usize);
        if !bytes.is_empty() {
            state
                .disk
                .change_contents(ino, |inode| inode.data.write(&bytes, offset))?;
            self.record_change(&state.disk, ino);
        }
        Ok(bytes.len())
    }

    /// Sets the length of a file, as ftruncate(2) does.
    pub(super) fn truncate(&self, file: &SimFile, len: u64) -> Result<()> {
        let disk = &mut self.begin_step("set_len")?.disk;
        // ftruncate(2) fails with EINVAL for a descriptor that is not open for writing.
        if file.check_writable().is_err() || len > SIZE_MAX {
            return Err(Errno::INVAL);
        }
        disk.change_contents(file.object.ino, |inode| inode.data.set_len(len))?;
        self.record_change(disk, file.object.ino);
        Ok(())
    }

    /// Locks a whole file without waiting, as flock(2) does. Returns false if another lock prevents it.
    pub(super) fn lock_file(&self, file: &SimFile, mode: LockMode) -> Result<bool> {
        let mut state = self.begin_step("try_lock")?;
        // Over NFS a whole-file lock is a byte-range lock, so an exclusive one needs a descriptor that is open for
        // writing.
        if mode == LockMode::Exclusive {
            file.check_writable()?;
        }
        let ino = file.object.ino;
        let is_locked = state
            .locks
            .lock_file(ino, self.process, file.number, mode)?;
        if is_locked {
            file.is_locked.store(true, Ordering::Relaxed);
        }
        Ok(is_locked)
    }

    /// Unlocks a whole file, as flock(2) with `LOCK_UN` does.
    pub(super) fn unlock_file(&self, file: &SimFile) -> Result<bool> {
        self.begin_step("unlock_file")?
            .locks
            .end_file_lock(file.number);
        Ok(true)
    }

    /// Locks or unlocks a range of bytes without waiting, as fcntl(2) with `F_SETLK` does.
    pub(super) fn set_range(
        &self,
        file: &SimFile,
        range: LockRange,
        mode: Option<LockMode>,
    ) -> Result<bool> {
        let mut state = self.begin_step("lock_range")?;
        match mode {
            Some(LockMode::Exclusive) => file.check_writable()?,
            Some(LockMode::Shared) => file.check_readable()?,
            None => {}
        }
        let ino = file.object.ino;
        state.locks.lock_range(ino, self.process, range, mode)
    }

    /// Returns whether a range of bytes could be locked, as fcntl(2) with `F_GETLK` does.
    pub(super) fn is_range_free(
        &self,
        file: &SimFile,
        range: LockRange,
        mode: LockMode,
    ) -> Result<bool> {
        let state = self.begin_step("is_range_locked")?;
        let ino = file.object.ino;
        Ok(!state
            .locks
            .is_range_locked(ino, self.process, range, mode)?)
    }

    /// Makes the names in a directory durable, as fsync(2) does.
    pub(super) fn sync_one_dir(&self, object: &SimInode) -> Result<()> {
        let disk = &mut self.begin_step("sync_dir")?.disk;
        disk.dir(object.ino)?;
        disk.sync_names(object.ino);
        disk.sync_attributes(object.ino);
        self.unsynced
            .synced((disk.device, object.ino), self.unsynced.begin_sync());
        Ok(())
    }

    /// Makes everything durable, as syncfs(2) does, or fsync(2) of each object.
    pub(super) fn sync_everything(&self) -> Result<()> {
        if self.is_synced_one_by_one() {
            return self.sync_each(self.unsynced.inherits());
        }
        self.begin_step("sync_all")?.disk.sync_all();
        Ok(())
    }
}
