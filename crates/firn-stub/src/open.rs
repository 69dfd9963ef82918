//! Adopted stubs: open files of programs for which firnd, the process that serves the mount, has a handle.
//!
//! A *stub* is an empty file on tmpfs that stands for a file of the mount. A program opens a stub in the kernel. The
//! preload library in the program, the *client*, sends the descriptor to firnd over the data socket. firnd *adopts* it:
//! it opens the file of the stub in the engine, which stores the bytes, and returns a handle. Reads and writes of the
//! program then go to that handle.
//!
//! Promises
//! * Only stubs of this tree are adopted; other descriptors are refused (EXDEV).
//! * firnd retains no open file of the client, only an `O_PATH` descriptor. The client's locks therefore end with the
//!   client.
//! * A file remains open in the engine as long as a client has its stub open, even if the stub has no name any more.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use firn_backing::SetTime;
use firn_backing::{Backing, Errno, Kind};
use firn_engine::{ClientId, HandleId, InodeId, OpenMode, Result, SetAttr};
use rustix::fs::{CWD, Mode, OFlags, fstat, open, readlinkat};

use crate::StubId;
use crate::map::{Changes, Map};
use crate::path::{RelPath, private_path};
use crate::sync_names::has_no_name;
use crate::tree::{ParentDir, Stub, Tree, stub_from_stat, to_errno};

/// An adopted descriptor.
#[derive(Debug)]
pub(crate) struct AdoptedStub {
    pub id: StubId,
    pub client: ClientId,
    pub inode: InodeId,
    /// An `O_PATH` descriptor of the stub: it does not extend the life of the client's open file and its locks.
    pub fd: OwnedFd,
    pub changes: Arc<Changes>,
}

/// The handle of an adopted descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// Handle for calls of the engine and requests over the data socket.
    pub handle: HandleId,
    /// Length of the file.
    pub size: u64,
}

/// Attributes of a stub's file that the kernel does not know, because the bytes are not in the stub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StubAttr {
    /// Length of the file.
    pub size: u64,
    /// Number of 512-byte blocks.
    pub blocks: u64,
    /// Whether this call set the stub's times. If so, the client must read its attributes from the kernel again.
    pub is_time_changed: bool,
}

impl<B: Backing> Tree<B> {
    /// Adopts a descriptor of a stub (empty stand-in on tmpfs) that a client opened with `flags` of open(2): opens the
    /// stub's file in the engine, which stores its bytes, and returns a handle. Carries out `O_TRUNC`.
    ///
    /// `is_repeated`: an earlier firnd had adopted the stub for this client. Fails with ESTALE if such a stub has no
    /// name and is not in the map (the record of stubs): its data is lost. Fails with EXDEV if the descriptor is not of
    /// a stub of this tree.
    pub fn adopt(
        &self,
        client: ClientId,
        client_fd: OwnedFd,
        flags: i32,
        is_repeated: bool,
    ) -> Result<Adopted> {
        // The client's open file must not remain open in firnd, because it may hold locks.
        let path = format!("/proc/self/fd/{}", client_fd.as_raw_fd());
        let fd = open(path.as_str(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        // `fd`, which was opened with O_PATH, keeps no locks.
        drop(client_fd);
        let stub = self.stub_of_descriptor(&fd)?;
        if self.is_closed() {
            return Err(Errno::SHUTDOWN);
        }
        let truncates = flags & libc::O_TRUNC != 0;
        // O_TRUNC must not happen during an append. Appends take this lock exclusively; all other changes share it.
        let append_lock = self.changes_of_stub(stub.id).filter(|_| truncates);
        let _append_guard = append_lock.as_ref().map(|changes| changes.lock_shared());
        let mut map = self.map.lock();
        if map.get(stub.id).is_none() {
            if is_repeated && stub.nlink == 0 {
                return Err(Errno::STALE);
            }
            if !self.is_of_this_tree(&fd, stub.nlink) {
                return Err(Errno::XDEV);
            }
            self.create_file(&mut map, stub.id, self.path_of(&fd).as_deref())?;
        }
        if stub.size > 0
            && !truncates
            && let Some(path) = self.path_of(&fd)
        {
            // A failure is ignored: the next sync of the name ingests the bytes.
            let _ = self.ingest_kernel_writes(&mut map, &Stub { path, ..stub });
        }
        self.open_file(&mut map, client, fd, stub.id, flags)
    }

    /// Opens the file of a stub in the engine, which stores its bytes, and records the client's descriptor `fd` of the
    /// stub under the new handle. The stub must be in the map. The caller holds the lock of the map.
    fn open_file(
        &self,
        map: &mut Map,
        client: ClientId,
        fd: OwnedFd,
        id: StubId,
        flags: i32,
    ) -> Result<Adopted> {
        let inode = self.inode_of(map, id)?;
        let opened = self.engine.open(inode, flags)?;
        debug_assert!(opened.mode != OpenMode::Passthrough);
        let attr = self.engine.namespace.attr(inode, Some(opened.handle));
        let size = attr.ok().map(|attr| attr.size);
        let changes = match map.get_mut(id) {
            Some(mapped) => {
                mapped.adopted_count += 1;
                Arc::clone(&mapped.changes)
            }
            // Not reached, because the stub is in the map.
            None => Arc::default(),
        };
        changes.record_first_size(size);
        let adopted_stub = AdoptedStub {
            id,
            client,
            inode,
            fd,
            changes,
        };
        self.adopted_stubs
            .lock()
            .insert(opened.handle, adopted_stub);
        let is_time_unknown = map
            .get(id)
            .is_some_and(|mapped| mapped.shown_mtime.is_none());
        if is_time_unknown {
            self.try_to_update_stub_time(map, id);
        }
        Ok(Adopted {
            handle: opened.handle,
            size: size.unwrap_or(0),
        })
    }

    /// Sets the modification time of a stub as [`Tree::update_stub_time`] does. Logs an error, because a wrong time
    /// harms no data.
    fn try_to_update_stub_time(&self, map: &mut Map, id: StubId) {
        if let Err(error) = self.update_stub_time(map, id) {
            tracing::debug!(%error, "the modification time of a stub could not be set to the time of its last write");
        }
    }

    /// Returns the stub of a descriptor, with an empty path. Fails with EXDEV if the descriptor is not of a regular
    /// file on the file system of this tree.
    fn stub_of_descriptor(&self, fd: &OwnedFd) -> Result<Stub> {
        let stat = fstat(fd)?;
        let id = StubId::from_fd(fd.as_fd()).map_err(|_| Errno::XDEV)?;
        if stat.st_dev != self.device || stat.st_ino != id.inode {
            return Err(Errno::XDEV);
        }
        let stub = stub_from_stat(RelPath::new(), id, &stat).map_err(|_| Errno::XDEV)?;
        if stub.kind != Kind::File {
            return Err(Errno::XDEV);
        }
        Ok(stub)
    }

    /// Returns the lock of a stub's file, if the stub is in the map.
    fn changes_of_stub(&self, id: StubId) -> Option<Arc<Changes>> {
        let map = self.map.lock();
        map.get(id).map(|mapped| Arc::clone(&mapped.changes))
    }

    /// Returns the lock that orders the changes of an adopted stub's file.
    pub fn changes(&self, handle: HandleId) -> Result<Arc<Changes>> {
        let adopted_stubs = self.adopted_stubs.lock();
        let open = adopted_stubs.get(&handle).ok_or(Errno::BADF)?;
        Ok(Arc::clone(&open.changes))
    }

    /// Whether a descriptor is of a stub of this tree. If the tree shares its file system with other files, only
    /// objects below the tree's root are stubs.
    fn is_of_this_tree(&self, fd: &OwnedFd, nlink: u64) -> bool {
        self.is_whole_device() || nlink == 0 || self.path_of(fd).is_some()
    }

    /// Returns the present path of a descriptor's stub. Returns `None` if the stub is not in the tree, or is being
    /// renamed.
    fn path_of(&self, fd: &OwnedFd) -> Option<RelPath> {
        let path = descriptor_path(fd)?;
        let root = descriptor_path(&self.root)?;
        let relative_path = path.strip_prefix(&*root)?.strip_prefix(b"/")?;
        let id = StubId::from_fd(fd.as_fd()).ok()?;
        // A removed or renamed stub is not at the path that the kernel returned.
        if !self.is_at(relative_path, id) {
            return None;
        }
        Some(relative_path.to_vec())
    }

    /// Creates the file of a stub that is not in the map, and adds the stub to it. The file is in the backing, the
    /// directory that the mount serves. It has a private path there until the name of the stub is synced.
    ///
    /// `current_path` is the present path of the stub, if it is known. A backing with several places for data (lanes)
    /// chooses one by that path. If the file cannot be created, the map is as before.
    fn create_file(&self, map: &mut Map, id: StubId, current_path: Option<&[u8]>) -> Result<()> {
        self.create_private_dir()?;
        let placement = match current_path {
            Some(path) if self.options.places_by_name => self.synced_parent(map, path),
            _ => None,
        };
        let path = private_path(id);
        let ParentDir { dir, name } = self.find_parent(&path)?;
        map.insert(id, Kind::File, &path)
            .map_err(|error| to_errno(&error))?;
        let caller = self.caller();
        let mode = 0o600;
        let flags = libc::O_RDWR;
        let created = match &placement {
            Some(named_place) => self.engine.create_placed(
                &caller,
                (dir.inode, name),
                mode,
                flags,
                (named_place.dir.inode, named_place.name),
            ),
            None => self.engine.create(&caller, dir.inode, name, mode, flags),
        };
        match created {
            Ok((entry, opened)) => {
                self.engine.release(opened.handle);
                if let Some(mapped) = map.get_mut(id) {
                    mapped.inode = Some(entry.inode);
                    mapped.shown_mtime = Some(entry.attr.mtime);
                }
                Ok(())
            }
            Err(error) => {
                map.remove(&path).map_err(|error| to_errno(&error))?;
                Err(error)
            }
        }
    }

    /// Returns the directory of a path in the backing, after a sync of the directories above the path. Returns `None`
    /// if one of them cannot be synced, such as during a rename; the file is then placed by its private path.
    fn synced_parent<'p>(&self, map: &mut Map, path: &'p [u8]) -> Option<ParentDir<'_, 'p, B>> {
        self.sync_directories(map, path).ok()?;
        self.find_parent(path).ok()
    }

    /// Whether the client has this handle.
    pub fn is_open(&self, handle: HandleId, client: ClientId) -> bool {
        self.adopted_stubs
            .lock()
            .get(&handle)
            .is_some_and(|open| open.client == client)
    }

    /// Returns the inode of an adopted stub's file.
    pub fn inode(&self, handle: HandleId) -> Result<InodeId> {
        self.adopted_stubs
            .lock()
            .get(&handle)
            .map(|open| open.inode)
            .ok_or(Errno::BADF)
    }

    /// Returns the attributes of a stub's file that the kernel does not know. Returns `None` if the stub has no file in
    /// the engine.
    pub fn attr(&self, id: StubId) -> Result<Option<StubAttr>> {
        let mut map = self.map.lock();
        if map.get(id).is_none_or(|mapped| mapped.kind != Kind::File) {
            return Ok(None);
        }
        let inode = self.inode_of(&mut map, id)?;
        let is_time_changed = self.update_stub_time(&mut map, id)?;
        let attr = self.engine.namespace.attr(inode, None)?;
        Ok(Some(StubAttr {
            size: attr.size,
            blocks: attr.blocks,
            is_time_changed,
        }))
    }

    /// Returns the attributes as [`Tree::attr`] does, for an adopted stub.
    pub fn attr_of(&self, handle: HandleId) -> Result<StubAttr> {
        let id = self
            .adopted_stubs
            .lock()
            .get(&handle)
            .map(|open| open.id)
            .ok_or(Errno::BADF)?;
        self.attr(id)?.ok_or(Errno::BADF)
    }

    /// Sets the length of an adopted stub's file (ftruncate(2)).
    pub fn truncate(&self, handle: HandleId, size: u64) -> Result<()> {
        let inode = self.inode(handle)?;
        let new_size = SetAttr {
            mode: None,
            uid: None,
            gid: None,
            size: Some(size),
            atime: SetTime::Keep,
            mtime: SetTime::Keep,
        };
        self.engine.namespace.set_attr(inode, new_size, None)?;
        Ok(())
    }

    /// Brings the name of an adopted stub (one that a client has open), and the names of the directories above it, to
    /// the backing, the directory that the mount serves.
    ///
    /// Returns `Ok` without a sync if the stub has no name now. If its name alone cannot be synced, syncs all names.
    pub fn sync_open_name(&self, handle: HandleId) -> Result<()> {
        let path = {
            let adopted_stubs = self.adopted_stubs.lock();
            let adopted = adopted_stubs.get(&handle).ok_or(Errno::BADF)?;
            self.path_of(&adopted.fd)
        };
        let Some(path) = path else {
            // The stub has no name any more, or is being renamed.
            return Ok(());
        };
        let mut map = self.map.lock();
        if self.sync_path(&mut map, &path).is_ok() {
            return Ok(());
        }
        // `reconcile` locks the map itself.
        drop(map);
        self.reconcile()
    }

    /// Releases a handle by which a client used the file of a stub. Does nothing for an unknown handle.
    ///
    /// If it was the last handle of a stub that has no name any more, the file is removed from the backing, the
    /// directory that the mount serves.
    pub fn release(&self, handle: HandleId) {
        let mut map = self.map.lock();
        let adopted_id = self
            .adopted_stubs
            .lock()
            .get(&handle)
            .map(|adopted| adopted.id);
        let Some(id) = adopted_id else {
            return;
        };
        // The descriptor in `adopted_stubs` may be the only way to the stub, so its time is set before the removal.
        self.try_to_update_stub_time(&mut map, id);
        let removed = self.adopted_stubs.lock().remove(&handle);
        let Some(adopted) = removed else {
            return;
        };
        self.engine.release(handle);
        let Some(mapped) = map.get_mut(id) else {
            return;
        };
        mapped.adopted_count = mapped.adopted_count.saturating_sub(1);
        if mapped.adopted_count > 0 || !has_no_name(&adopted.fd) {
            return;
        }
        for path in mapped.paths.clone() {
            if let Err(error) = self.unlink(&mut map, &path) {
                tracing::warn!(
                    %error,
                    "a file that was removed in the stub tree could not be removed from the backing; the next sync \
                     tries again"
                );
            }
        }
    }

    /// Releases all handles of a client that is gone.
    pub fn release_client(&self, client: ClientId) {
        let handles: Vec<HandleId> = self
            .adopted_stubs
            .lock()
            .iter()
            .filter(|(_, adopted)| adopted.client == client)
            .map(|(handle, _)| *handle)
            .collect();
        for handle in handles {
            self.release(handle);
        }
    }

    /// Returns the number of adopted descriptors.
    pub fn open_count(&self) -> usize {
        self.adopted_stubs.lock().len()
    }
}

/// Returns the path that the kernel reports for an open descriptor.
fn descriptor_path(fd: &OwnedFd) -> Option<Vec<u8>> {
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let path = readlinkat(CWD, link.as_str(), Vec::new()).ok()?;
    Some(path.into_bytes())
}
