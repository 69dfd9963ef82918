//! Open stubs: what processes told of over the data socket.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use firn_backing::SetTime;
use firn_backing::{Backing, Errno, Kind};
use firn_engine::{ClientId, HandleId, InodeId, OpenMode, Result, SetAttr};
use rustix::fs::{CWD, Mode, OFlags, fstat, open, readlinkat};

use crate::StubId;
use crate::map::{Changes, Map};
use crate::path::{Rel, private_path};
use crate::tree::{Ref, Tree, errno, stub_of};

/// A descriptor that a client told of.
#[derive(Debug)]
pub(crate) struct Open {
    pub id: StubId,
    pub client: ClientId,
    pub inode: InodeId,
    /// Names the stub without keeping its locks or its open file.
    pub fd: OwnedFd,
    pub changes: Arc<Changes>,
}

/// How a client's descriptor is called from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// For the engine and the data socket's requests.
    pub handle: HandleId,
    /// Bytes of the file.
    pub size: u64,
}

/// What the kernel does not know of a stub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StubAttr {
    /// Bytes of the file.
    pub size: u64,
    /// 512-byte blocks.
    pub blocks: u64,
    /// The stub's time of change was just set: look again.
    pub told: bool,
}

impl<B: Backing> Tree<B> {
    /// Takes a descriptor of a stub, opened with `flags` of open(2), of which `O_TRUNC` is done here.
    /// `again`: the client knew it before; a stub that is not known then has lost its data (ESTALE). EXDEV:
    /// it is no stub of this tree.
    pub fn adopt(
        &self,
        client: ClientId,
        given: OwnedFd,
        flags: i32,
        again: bool,
    ) -> Result<Adopted> {
        // The program's own open file must not live on here: it may hold locks.
        let path = format!("/proc/self/fd/{}", given.as_raw_fd());
        let fd = open(path.as_str(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        drop(given);
        let stat = fstat(&fd)?;
        let id = StubId::of(fd.as_fd()).map_err(|_| Errno::XDEV)?;
        if stat.st_dev != self.device || stat.st_ino != id.inode {
            return Err(Errno::XDEV);
        }
        let stub = stub_of(Rel::new(), id, &stat).map_err(|_| Errno::XDEV)?;
        if stub.kind != Kind::File {
            return Err(Errno::XDEV);
        }
        if self.is_closed() {
            return Err(Errno::SHUTDOWN);
        }
        // O_TRUNC waits for an append that is under way. What it cuts is looked up anew below.
        let changes = self
            .changes_of_item(id)
            .filter(|_| flags & libc::O_TRUNC != 0);
        let _together = changes.as_ref().map(|changes| changes.together());
        let mut map = self.map.lock();
        if map.item(id).is_none() {
            if again && stub.nlink == 0 {
                return Err(Errno::STALE);
            }
            if !self.is_ours(&fd, stub.nlink) {
                return Err(Errno::XDEV);
            }
            self.make_file(&mut map, id, self.path_of(&fd).as_deref())?;
        }
        if stub.size > 0
            && flags & libc::O_TRUNC == 0
            && let Some(path) = self.path_of(&fd)
        {
            let _ = self.absorb(&mut map, &crate::tree::Stub { path, ..stub });
        }
        let inode = self.inode_of(&mut map, id)?;
        let opened = self.engine.open(inode, flags)?;
        debug_assert!(opened.mode != OpenMode::Passthrough);
        let size = self
            .engine
            .namespace
            .attr(inode, Some(opened.handle))
            .map(|attr| attr.size);
        let changes = map.item_mut(id).map(|item| {
            item.opens += 1;
            Arc::clone(&item.changes)
        });
        let changes = changes.unwrap_or_default();
        changes.note_size(size.ok());
        self.opens.lock().insert(
            opened.handle,
            Open {
                id,
                client,
                inode,
                fd,
                changes,
            },
        );
        if map.item(id).is_some_and(|item| item.told_mtime.is_none())
            && let Err(error) = self.tell_time(&mut map, id)
        {
            tracing::debug!(%error, "a stub does not show when it was written");
        }
        Ok(Adopted {
            handle: opened.handle,
            size: size.unwrap_or(0),
        })
    }

    fn changes_of_item(&self, id: StubId) -> Option<Arc<Changes>> {
        let map = self.map.lock();
        map.item(id).map(|item| Arc::clone(&item.changes))
    }

    /// What orders the changes of an open stub.
    pub fn changes(&self, handle: HandleId) -> Result<Arc<Changes>> {
        let opens = self.opens.lock();
        let open = opens.get(&handle).ok_or(Errno::BADF)?;
        Ok(Arc::clone(&open.changes))
    }

    /// Where the tree shares its file system with others, only what stands below the root is a stub.
    fn is_ours(&self, fd: &OwnedFd, nlink: u64) -> bool {
        self.is_whole_device() || nlink == 0 || self.path_of(fd).is_some()
    }

    /// Path of a descriptor's stub, below the root.
    fn path_of(&self, fd: &OwnedFd) -> Option<Rel> {
        let link = |fd: &OwnedFd| {
            let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
            readlinkat(CWD, path.as_str(), Vec::new())
                .ok()
                .map(|path| path.into_bytes())
        };
        let path = link(fd)?;
        let root = link(&self.root)?;
        let below = path.strip_prefix(&*root)?.strip_prefix(b"/")?.to_vec();
        let id = StubId::of(fd.as_fd()).ok()?;
        self.stands(&below, id).then_some(below)
    }

    /// Makes the file of a stub that no client told of so far. It has a private name until the tree is reconciled. The
    /// backing places its data by the name that its stub has now.
    fn make_file(&self, map: &mut Map, id: StubId, stands_at: Option<&[u8]>) -> Result<()> {
        self.make_private_dir()?;
        let later = stands_at
            .filter(|_| self.options.places_by_name)
            .and_then(|path| self.directory_above(map, path));
        let path = private_path(id);
        let (dir, name) = self.parent(&path)?;
        map.add(id, Kind::File, &path)
            .map_err(|error| errno(&error))?;
        let caller = self.caller();
        let flags = libc::O_RDWR;
        let made = match &later {
            Some((later_dir, later_name)) => self.engine.create_placed(
                &caller,
                (dir.inode, name),
                0o600,
                flags,
                (later_dir.inode, later_name),
            ),
            None => self.engine.create(&caller, dir.inode, name, 0o600, flags),
        };
        match made {
            Ok((entry, opened)) => {
                self.engine.release(opened.handle);
                if let Some(item) = map.item_mut(id) {
                    item.inode = Some(entry.inode);
                    item.told_mtime = Some(entry.attr.mtime);
                }
                Ok(())
            }
            Err(error) => {
                map.remove(&path).map_err(|error| errno(&error))?;
                Err(error)
            }
        }
    }

    /// The directory of a path in the backing, where the directories above are carried over first, and the name there.
    /// `None` where one of them has just got another name: the file is then placed as one without a name.
    fn directory_above<'p>(
        &self,
        map: &mut Map,
        path: &'p [u8],
    ) -> Option<(Ref<'_, B>, &'p OsStr)> {
        self.bring_directories(map, path).ok()?;
        self.parent(path).ok()
    }

    /// Whether a client told of this descriptor.
    pub fn is_open(&self, handle: HandleId, client: ClientId) -> bool {
        self.opens
            .lock()
            .get(&handle)
            .is_some_and(|open| open.client == client)
    }

    /// The inode of an open stub.
    pub fn inode(&self, handle: HandleId) -> Result<InodeId> {
        self.opens
            .lock()
            .get(&handle)
            .map(|open| open.inode)
            .ok_or(Errno::BADF)
    }

    /// What the kernel does not know of a stub; `None` for a stub without writes.
    pub fn attr(&self, id: StubId) -> Result<Option<StubAttr>> {
        let mut map = self.map.lock();
        if map.item(id).is_none_or(|item| item.kind != Kind::File) {
            return Ok(None);
        }
        let inode = self.inode_of(&mut map, id)?;
        let told = self.tell_time(&mut map, id)?;
        let attr = self.engine.namespace.attr(inode, None)?;
        Ok(Some(StubAttr {
            size: attr.size,
            blocks: attr.blocks,
            told,
        }))
    }

    /// As [`Tree::attr`], for an open stub.
    pub fn attr_of(&self, handle: HandleId) -> Result<StubAttr> {
        let id = self
            .opens
            .lock()
            .get(&handle)
            .map(|open| open.id)
            .ok_or(Errno::BADF)?;
        self.attr(id)?.ok_or(Errno::BADF)
    }

    /// ftruncate(2).
    pub fn truncate(&self, handle: HandleId, size: u64) -> Result<()> {
        let inode = self.inode(handle)?;
        let atime = SetTime::Keep;
        let mtime = SetTime::Keep;
        let set = SetAttr {
            mode: None,
            uid: None,
            gid: None,
            size: Some(size),
            atime,
            mtime,
        };
        self.engine.namespace.set_attr(inode, set, None).map(drop)
    }

    /// Carries the name of an open stub over, and those of the directories above it.
    pub fn bring_open(&self, handle: HandleId) -> Result<()> {
        let path = {
            let opens = self.opens.lock();
            let open = opens.get(&handle).ok_or(Errno::BADF)?;
            self.path_of(&open.fd)
        };
        // It has no name any more, or changes it at this instant.
        let Some(path) = path else { return Ok(()) };
        let mut map = self.map.lock();
        if self.bring_path(&mut map, &path).is_ok() {
            return Ok(());
        }
        drop(map);
        self.reconcile()
    }

    /// The descriptor was closed. What no name leads to is dropped with the last one.
    pub fn release(&self, handle: HandleId) {
        let mut map = self.map.lock();
        let Some(id) = self.opens.lock().get(&handle).map(|open| open.id) else {
            return;
        };
        if let Err(error) = self.tell_time(&mut map, id) {
            tracing::debug!(%error, "a stub does not show when it was written");
        }
        let Some(open) = self.opens.lock().remove(&handle) else {
            return;
        };
        self.engine.release(handle);
        let Some(item) = map.item_mut(id) else { return };
        item.opens = item.opens.saturating_sub(1);
        if item.opens == 0 && fstat(&open.fd).is_ok_and(|stat| stat.st_nlink == 0) {
            for path in item.paths.clone() {
                if let Err(error) = self.unlink(&mut map, &path) {
                    tracing::warn!(%error, "the file of a removed stub stays for now");
                }
            }
        }
    }

    /// A client is gone: all that it had open is closed.
    pub fn client_gone(&self, client: ClientId) {
        let of = |open: &Open| open.client == client;
        let handles: Vec<HandleId> = self
            .opens
            .lock()
            .iter()
            .filter(|(_, open)| of(open))
            .map(|(handle, _)| *handle)
            .collect();
        for handle in handles {
            self.release(handle);
        }
    }

    /// Open stubs.
    pub fn open_count(&self) -> usize {
        self.opens.lock().len()
    }
}
