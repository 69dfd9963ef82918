//! Name synchronization: brings the names and attributes of the stub tree to the backing.
//!
//! The map has the path of each stub in the backing, the tree has its present path. The steps of [`Tree::reconcile`]:
//!
//! 1. Objects are moved or made from the top down, so a directory is in its place before its contents are synced.
//! 2. If another object is at the path, that object moves to a private path first. This also resolves exchanges, and a
//!    directory that changed places with one of its children.
//! 3. Names whose stub is gone are removed last.
//! 4. Directories get their attributes, the deepest first.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use firn_backing::{Backing, Errno, Kind, RenameFlags, SetTime, Time};
use firn_engine::{Result, SetAttr, Written};
use firn_format::quote::quoted;
use rustix::fs::{
    AtFlags, Dir, Mode, OFlags, SeekFrom, Timespec, Timestamps, fstat, openat, readlinkat, statat,
    utimensat,
};

use crate::StubId;
use crate::map::{LoggedChange, Map, MappedStub};
use crate::path::{RelPath, is_private, join, private_path};
use crate::tree::{Stub, Tree, WalkedDir, to_errno};

/// Two ticks of the clock with which the kernel sets change times (10 ms each at most). A change that is at least this
/// old has already changed these times.
const QUIET: Duration = Duration::from_millis(20);
/// Most walks of one call that wait for a quiet tree. Removals need a quiet walk.
const QUIET_TRIES: u32 = 50;
/// Most bytes of one read from a stub to which the kernel wrote.
const COPY_BYTES: usize = 1 << 20;
const NS_PER_S: i128 = 1_000_000_000;

/// Result of one walk through the tree.
pub(crate) struct Walk {
    /// The stubs; a directory comes before its contents.
    pub stubs: Vec<Stub>,
    /// Whether no rename happened during the walk. If so, a stub that is not in `stubs` has no name.
    pub is_quiet: bool,
    /// The directories, with their times.
    pub dirs: Vec<WalkedDir>,
}

/// A way to reach a stub.
enum StubAccess {
    /// An open descriptor of the stub.
    Descriptor(OwnedFd),
    /// A path of the stub below the root of the tree.
    Path(RelPath),
}

impl<B: Backing> Tree<B> {
    /// Brings the names and attributes of the tree to the backing.
    ///
    /// Continues after an error and returns the first one; the next call tries the failed names again.
    ///
    /// A stub that the walk did not find was removed, or a program was renaming it meanwhile. Names are therefore
    /// removed only after a walk without renames. The call waits up to a second for such a walk.
    pub fn reconcile(&self) -> Result<()> {
        self.sync_names(QUIET_TRIES)
    }

    /// Does what [`Tree::reconcile`] does, but does not wait: removals may be left for the next call.
    pub fn reconcile_soon(&self) -> Result<()> {
        self.sync_names(0)
    }

    /// Syncs the names. If the tree is not quiet, walks it up to `quiet_tries` more times.
    fn sync_names(&self, quiet_tries: u32) -> Result<()> {
        let mut map = self.map.lock();
        let mut walk = self.walk().map_err(|error| to_errno(&error))?;
        let mut first_error = None;
        for stub in &walk.stubs {
            if let Err(error) = self.sync_stub(&mut map, stub) {
                tracing::warn!(
                    path = %quoted(&stub.path), %error,
                    "a name of the stub tree could not be synced to the backing; the next sync tries again"
                );
                first_error.get_or_insert(error);
            }
        }
        if self.has_stale_names(&map, &walk) {
            for _ in 0..quiet_tries {
                if walk.is_quiet || self.can_open_by_handle() {
                    break;
                }
                std::thread::sleep(QUIET);
                walk = self.walk().map_err(|error| to_errno(&error))?;
            }
            if let Err(error) = self.remove_stale_names(&mut map, &walk) {
                first_error.get_or_insert(error);
            }
        }
        // Attributes of directories come last, the deepest directory first, because each change in a directory changes
        // its times.
        for stub in walk
            .stubs
            .iter()
            .rev()
            .filter(|stub| stub.kind == Kind::Dir)
        {
            if map.id_at(&stub.path) == Some(stub.id)
                && let Err(error) = self.sync_attributes(&mut map, stub, true)
            {
                first_error.get_or_insert(error);
            }
        }
        if let Err(error) = map.shorten_log(&self.head) {
            tracing::warn!(%error, "the log of the stub tree could not be shortened and continues to grow");
        }
        first_error.map_or(Ok(()), Err)
    }

    /// Removes the names in the backing whose stub is gone. Their pending data is dropped, which makes room for a writer.
    pub fn sweep(&self) -> Result<()> {
        let mut map = self.map.lock();
        let walk = self.walk().map_err(|error| to_errno(&error))?;
        let swept = self.remove_stale_names(&mut map, &walk);
        let is_whole = walk.is_quiet && swept.is_ok() && !self.has_stale_names(&map, &walk);
        *self.swept.lock() = is_whole.then_some(walk.dirs);
        swept
    }

    /// Does what [`Tree::sweep`] does, unless no directory has changed since the last complete sweep.
    pub fn sweep_soon(&self) -> Result<()> {
        let is_swept = self
            .swept
            .lock()
            .as_ref()
            .is_some_and(|dirs| dirs.iter().all(|dir| self.is_unchanged(dir)));
        if is_swept { Ok(()) } else { self.sweep() }
    }

    /// Syncs the name of the stub at `path`, and the names of the directories above it.
    pub(crate) fn sync_path(&self, map: &mut Map, path: &[u8]) -> Result<()> {
        self.sync_directories(map, path)?;
        let stub = self.stub(path).map_err(|error| to_errno(&error))?;
        self.sync_stub(map, &stub)
    }

    /// Syncs the names of the directories above a path.
    pub(crate) fn sync_directories(&self, map: &mut Map, path: &[u8]) -> Result<()> {
        for (index, byte) in path.iter().enumerate() {
            if *byte == b'/' {
                let above = path.get(..index).unwrap_or_default();
                let stub = self.stub(above).map_err(|error| to_errno(&error))?;
                self.sync_stub(map, &stub)?;
            }
        }
        Ok(())
    }

    // ---- walks -------------------------------------------------------------------------------

    /// Lists all stubs of the tree, and determines whether a rename may have made the list incomplete.
    fn walk(&self) -> std::io::Result<Walk> {
        let began = Time::now();
        let mut walk = Walk {
            stubs: Vec::new(),
            is_quiet: true,
            dirs: Vec::new(),
        };
        let mut dirs = vec![self.stub(b"")?];
        while let Some(dir) = dirs.pop() {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let path: &[u8] = if dir.path.is_empty() { b"." } else { &dir.path };
            let Ok(open) = openat(&self.root, path, flags, Mode::empty()) else {
                walk.is_quiet = false;
                continue;
            };
            for entry in Dir::read_from(&open)? {
                let entry = entry?;
                let name = entry.file_name().to_bytes();
                if matches!(name, b"." | b"..") {
                    continue;
                }
                match self.stub(&join(&dir.path, name)) {
                    Ok(stub) => {
                        if stub.kind == Kind::Dir {
                            dirs.push(stub.clone());
                        }
                        walk.stubs.push(stub);
                    }
                    Err(_) => walk.is_quiet = false,
                }
            }
            walk.dirs.push(WalkedDir {
                path: dir.path,
                id: dir.id,
                ctime: dir.ctime,
            });
        }
        // A rename changes the change times of both directories. No rename happened during the walk if each directory
        // still has the time that the walk saw, and that time is at least `QUIET` before the start of the walk.
        walk.is_quiet = walk.is_quiet
            && walk
                .dirs
                .iter()
                .all(|dir| self.is_unchanged(dir) && is_older(dir.ctime, began, QUIET));
        Ok(walk)
    }

    /// Whether a directory of a walk is still at its path, with no name added or removed.
    fn is_unchanged(&self, dir: &WalkedDir) -> bool {
        self.stub(&dir.path)
            .is_ok_and(|now| now.id == dir.id && now.ctime == dir.ctime)
    }

    /// Whether the backing has names whose stub is not at that path.
    fn has_stale_names(&self, map: &Map, walk: &Walk) -> bool {
        !self.stale_names(map, walk).is_empty()
    }

    /// Returns the paths in the backing at which the tree has no such stub any more, each with its stub. A directory
    /// comes after its contents.
    fn stale_names(&self, map: &Map, walk: &Walk) -> Vec<(RelPath, StubId)> {
        let present: HashSet<(&[u8], StubId)> = walk
            .stubs
            .iter()
            .map(|stub| (&*stub.path, stub.id))
            .collect();
        let ids_in_tree: HashSet<StubId> = walk.stubs.iter().map(|stub| stub.id).collect();
        let mut stale: Vec<(RelPath, StubId)> = Vec::new();
        for (id, mapped) in map.iter() {
            // A private path is not stale if it is the only path of a stub that the walk found: the stub's name is not
            // synced yet.
            let has_right_path = mapped
                .paths
                .iter()
                .any(|path| present.contains(&(&**path, id)));
            for path in &mapped.paths {
                let is_waiting = is_private(path) && ids_in_tree.contains(&id) && !has_right_path;
                if !is_waiting && !present.contains(&(&**path, id)) {
                    stale.push((path.clone(), id));
                }
            }
        }
        // In descending order, so the contents of a directory come before the directory.
        stale.sort_unstable_by(|first, second| second.cmp(first));
        stale
    }

    /// Removes a stale name from the backing if its stub is certainly gone, or if the backing also has the stub's
    /// present path.
    fn remove_stale_names(&self, map: &mut Map, walk: &Walk) -> Result<()> {
        let mut paths_of: HashMap<StubId, Vec<&[u8]>> = HashMap::new();
        for stub in &walk.stubs {
            paths_of.entry(stub.id).or_default().push(&stub.path);
        }
        let mut first_error = None;
        for (path, id) in self.stale_names(map, walk) {
            let Some(mapped) = map.get(id) else { continue };
            let result = match paths_of.get(&id) {
                // The backing also has the stub's present path, so the stale path is removed. Otherwise the sync of the
                // name failed, and the file retains its data at the stale path.
                Some(paths) if mapped.paths.iter().any(|path| paths.contains(&&**path)) => {
                    self.unlink(map, &path)
                }
                Some(_) => Ok(()),
                None if !self.is_gone(id, walk.is_quiet) => Ok(()),
                None if mapped.adopted_count > 0 && is_private(&path) => Ok(()),
                None if mapped.adopted_count > 0 && mapped.paths.len() == 1 => {
                    self.free_path(map, &path, id)
                }
                None => self.unlink(map, &path),
            };
            if let Err(error) = result {
                tracing::warn!(
                    path = %quoted(&path), %error,
                    "a removal in the stub tree could not be synced to the backing; the next sync tries again"
                );
                first_error.get_or_insert(error);
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    /// Whether this process may open stubs by their identity. If so, it can find out without a quiet walk which stubs
    /// are gone.
    fn can_open_by_handle(&self) -> bool {
        self.head.root.open(self.root_fd()).is_ok()
    }

    /// Whether a stub that the walk did not find has no name, and no program has it open except clients that had it
    /// adopted.
    fn is_gone(&self, id: StubId, is_quiet: bool) -> bool {
        match id.open(self.root_fd()) {
            // The stub exists: it has a name that the walk missed, or a program has it open.
            Ok(fd) => {
                let is_adopted = self
                    .adopted_stubs
                    .lock()
                    .values()
                    .filter(|open| open.id == id)
                    .count()
                    > 0;
                is_adopted && fstat(&fd).is_ok_and(|stat| stat.st_nlink == 0)
            }
            Err(error) if error.raw_os_error() == Some(libc::ESTALE) => true,
            Err(_) => match self
                .adopted_stubs
                .lock()
                .values()
                .find(|open| open.id == id)
            {
                Some(open) => fstat(&open.fd).is_ok_and(|stat| stat.st_nlink == 0),
                None => is_quiet,
            },
        }
    }

    // ---- doing -------------------------------------------------------------------------------

    /// Makes the backing show a stub's present path and attributes. The directory above must already be in place.
    fn sync_stub(&self, map: &mut Map, stub: &Stub) -> Result<()> {
        // `.firn` at the top of the backing belongs to Firn.
        if stub.path == b".firn" {
            return Err(Errno::PERM);
        }
        if map.id_at(&stub.path) != Some(stub.id) {
            if let Some(other) = map.id_at(&stub.path) {
                self.free_path(map, &stub.path, other)?;
            }
            let mapped = map
                .get(stub.id)
                .map(|mapped| (mapped.kind, mapped.paths.clone()));
            match mapped {
                Some((kind, paths)) if kind == stub.kind => {
                    let is_right = |path: &&RelPath| kind != Kind::Dir && self.is_at(path, stub.id);
                    if paths.iter().any(|path| is_right(&path)) {
                        self.link(map, stub)?;
                    } else {
                        let from = paths.first().ok_or(Errno::NOENT)?;
                        self.rename(map, from, &stub.path)?;
                    }
                }
                _ => self.make(map, stub)?,
            }
        }
        if stub.kind == Kind::File && stub.size > 0 {
            self.ingest_kernel_writes(map, stub)?;
        }
        // Directories get their attributes at the end of the call, because changes of the names in them change their
        // times.
        if stub.kind != Kind::Dir {
            self.sync_attributes(map, stub, false)
        } else {
            Ok(())
        }
    }

    /// Frees a path of the backing. If the object there has other paths, removes this path, else moves the object to
    /// its private path.
    fn free_path(&self, map: &mut Map, path: &[u8], id: StubId) -> Result<()> {
        let has_others = map.get(id).is_some_and(|mapped| mapped.paths.len() > 1);
        if has_others {
            return self.unlink(map, path);
        }
        self.create_private_dir()?;
        self.rename(map, path, &private_path(id))
    }

    /// Renames an object in the backing. On an error the map is as before.
    fn rename(&self, map: &mut Map, from: &[u8], to: &[u8]) -> Result<()> {
        map.move_paths(from, to).map_err(|error| to_errno(&error))?;
        let result = (|| {
            let ((dir, name), (new_dir, new_name)) = (self.parent(from)?, self.parent(to)?);
            self.engine.namespace.rename(
                dir.inode,
                name,
                new_dir.inode,
                new_name,
                RenameFlags::empty(),
            )
        })();
        if result.is_err() {
            map.move_paths(to, from).map_err(|error| to_errno(&error))?;
        }
        result
    }

    /// Gives an object another name in the backing. On an error the map is as before.
    fn link(&self, map: &mut Map, stub: &Stub) -> Result<()> {
        let inode = self.inode_of(map, stub.id)?;
        let (dir, name) = self.parent(&stub.path)?;
        map.insert(stub.id, stub.kind, &stub.path)
            .map_err(|error| to_errno(&error))?;
        match self.engine.namespace.link(inode, dir.inode, name) {
            Ok(entry) => {
                drop(self.reference(entry.inode));
                Ok(())
            }
            Err(error) => {
                map.remove(&stub.path).map_err(|error| to_errno(&error))?;
                Err(error)
            }
        }
    }

    /// Removes a name from the backing.
    pub(crate) fn unlink(&self, map: &mut Map, path: &[u8]) -> Result<()> {
        let is_dir = map
            .id_at(path)
            .and_then(|id| map.get(id))
            .is_some_and(|mapped| mapped.kind == Kind::Dir);
        let result = self.parent(path).and_then(|(dir, name)| {
            if is_dir {
                self.engine.namespace.rmdir(dir.inode, name)
            } else {
                self.engine.namespace.unlink(dir.inode, name)
            }
        });
        match result {
            // A program has made files in this directory directly in the backing. The files and the directory remain.
            Err(Errno::NOTEMPTY | Errno::EXIST) if is_dir => Ok(()),
            Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => {
                let gone = map.remove(path).map_err(|error| to_errno(&error))?;
                self.release_inode(gone);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Makes the object of a stub that is not in the map. Such a stub has no written bytes: the first write adds it to
    /// the map.
    fn make(&self, map: &mut Map, stub: &Stub) -> Result<()> {
        let (dir, name) = self.parent(&stub.path)?;
        map.insert(stub.id, stub.kind, &stub.path)
            .map_err(|error| to_errno(&error))?;
        let caller = self.caller();
        let result = match stub.kind {
            Kind::Dir => self.engine.namespace.mkdir(&caller, dir.inode, name, 0o700),
            Kind::Symlink => {
                let target = readlinkat(&self.root, &*stub.path, Vec::new())?;
                self.engine.namespace.symlink(
                    &caller,
                    dir.inode,
                    name,
                    OsStr::from_bytes(target.as_bytes()),
                )
            }
            Kind::File => {
                self.engine
                    .namespace
                    .mknod(&caller, dir.inode, name, libc::S_IFREG | 0o600, 0)
            }
            kind => self.engine.namespace.mknod(
                &caller,
                dir.inode,
                name,
                type_of(kind) | stub.mode,
                stub.rdev,
            ),
        };
        match result {
            Ok(entry) => {
                drop(self.reference(entry.inode));
                // Nothing was written, so the stub's own modification time is correct and goes to the backing.
                if let Some(mapped) = map.get_mut(stub.id) {
                    mapped.shown_mtime = Some(entry.attr.mtime);
                }
                Ok(())
            }
            // An earlier firnd made the object before it died, or another program made it. The object is used as it is.
            Err(Errno::EXIST) if matches!(stub.kind, Kind::Dir | Kind::File) => Ok(()),
            Err(error) => {
                map.remove(&stub.path).map_err(|error| to_errno(&error))?;
                Err(error)
            }
        }
    }

    /// Syncs mode, owner and modification time. Does nothing for a stub that did not change since the last sync, unless
    /// `always`.
    fn sync_attributes(&self, map: &mut Map, stub: &Stub, always: bool) -> Result<()> {
        let mut stub_now = stub.clone();
        if stub.kind == Kind::File && self.update_stub_time(map, stub.id)? {
            stub_now = self.stub(&stub.path).map_err(|error| to_errno(&error))?;
            if stub_now.id != stub.id {
                return Ok(());
            }
        }
        if !always
            && map
                .get(stub_now.id)
                .is_some_and(|mapped| mapped.synced_ctime == Some(stub_now.ctime))
        {
            return Ok(());
        }
        let (inode, attr) = self.find(&stub_now.path)?;
        let Some(attr) = attr.filter(|attr| attr.kind == stub_now.kind) else {
            return Ok(());
        };
        let mode = (stub_now.kind != Kind::Symlink && attr.mode & 0o7777 != stub_now.mode)
            .then_some(stub_now.mode);
        let uid = (attr.uid != stub_now.uid).then_some(stub_now.uid);
        let gid = (attr.gid != stub_now.gid).then_some(stub_now.gid);
        let mtime = if attr.mtime == stub_now.mtime {
            SetTime::Keep
        } else {
            SetTime::At(stub_now.mtime)
        };
        if mode.is_some() || uid.is_some() || gid.is_some() {
            let owner = SetAttr {
                mode: None,
                uid,
                gid,
                size: None,
                atime: SetTime::Keep,
                mtime: SetTime::Keep,
            };
            if uid.is_some() || gid.is_some() {
                // Without the right to change owners, the owner remains unchanged, as on a FUSE mount without root.
                let _ = self.engine.namespace.set_attr(inode.inode, owner, None);
            }
            // The mode is set after the owner, because a change of the owner clears set-id bits.
            self.engine.namespace.set_attr(
                inode.inode,
                SetAttr {
                    mode,
                    uid: None,
                    gid: None,
                    ..owner
                },
                None,
            )?;
        }
        if mtime != SetTime::Keep {
            let times = SetAttr {
                mode: None,
                uid: None,
                gid: None,
                size: None,
                atime: SetTime::Keep,
                mtime,
            };
            self.engine.namespace.set_attr(inode.inode, times, None)?;
        }
        let attr_now = (stub_now.kind == Kind::File)
            .then(|| self.engine.namespace.attr(inode.inode, None))
            .transpose()?;
        if let Some(mapped) = map.get_mut(stub_now.id) {
            mapped.synced_ctime = Some(stub_now.ctime);
            if let Some(attr) = attr_now {
                mapped.shown_mtime = Some(attr.mtime);
            }
        }
        Ok(())
    }

    /// Sets the modification time of a stub to that of the last write to its file. The kernel did not see that write,
    /// because the preload library sent it to firnd. Returns whether the time of the stub changed.
    ///
    /// `shown_mtime` in the map is the time that the stub shows already. It is unknown after a restart of firnd.
    pub(crate) fn update_stub_time(&self, map: &mut Map, id: StubId) -> Result<bool> {
        let inode = self.inode_of(map, id)?;
        let mtime = self.engine.namespace.attr(inode, None)?.mtime;
        let Some(mapped) = map.get_mut(id) else {
            return Ok(false);
        };
        if mapped.shown_mtime == Some(mtime) {
            return Ok(false);
        }
        let Some(access) = self.reach_stub(mapped, id)? else {
            // The path of the stub is not known now. The sync of its name sets the time.
            return Ok(false);
        };
        let (dir, path, flags) = match &access {
            StubAccess::Descriptor(fd) => {
                let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
                (rustix::fs::CWD, path.into_bytes(), AtFlags::empty())
            }
            StubAccess::Path(path) => (self.root_fd(), path.clone(), AtFlags::SYMLINK_NOFOLLOW),
        };
        // After a restart of firnd: if the stub changed after the last write to its file, an earlier firnd or a program
        // has set its time. The stub then retains that time.
        if mapped.shown_mtime.is_none() {
            let stat = statat(dir, &*path, flags)?;
            if (Time {
                sec: stat.st_ctime,
                nsec: stat.st_ctime_nsec as u32,
            }) > mtime
            {
                mapped.shown_mtime = Some(mtime);
                return Ok(false);
            }
        }
        let times = Timestamps {
            last_access: Timespec {
                tv_sec: 0,
                tv_nsec: libc::UTIME_OMIT as _,
            },
            last_modification: Timespec {
                tv_sec: mtime.sec,
                tv_nsec: i64::from(mtime.nsec) as _,
            },
        };
        utimensat(dir, &*path, &times, flags)?;
        mapped.shown_mtime = Some(mtime);
        if let Some((_, time)) = &mut mapped.ingested {
            *time = mtime;
        }
        Ok(true)
    }

    /// Returns a way to reach a stub: the descriptor of a client, a path, or for root the file handle. Returns `None`
    /// if there is no way.
    fn reach_stub(&self, mapped: &MappedStub, id: StubId) -> Result<Option<StubAccess>> {
        let fd = self
            .adopted_stubs
            .lock()
            .values()
            .find(|open| open.id == id)
            .map(|open| open.fd.try_clone());
        if let Some(fd) = fd {
            let fd = fd.map_err(|error| to_errno(&error))?;
            return Ok(Some(StubAccess::Descriptor(fd)));
        }
        if let Some(path) = mapped.paths.iter().find(|path| self.is_at(path, id)) {
            return Ok(Some(StubAccess::Path(path.clone())));
        }
        Ok(id.open(self.root_fd()).ok().map(StubAccess::Descriptor))
    }

    /// Copies bytes that a program without the preload library wrote to the stub itself into the stub's file.
    pub(crate) fn ingest_kernel_writes(&self, map: &mut Map, stub: &Stub) -> Result<()> {
        let last_ingested = map.get(stub.id).and_then(|mapped| mapped.ingested);
        if last_ingested == Some((stub.size, stub.mtime)) {
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let source = openat(&self.root, &*stub.path, flags, Mode::empty())?;
        if StubId::from_fd(source.as_fd()).map_err(|error| to_errno(&error))? != stub.id {
            return Err(Errno::AGAIN);
        }
        tracing::info!(path = %quoted(&stub.path), bytes = stub.size, "a program without the preload library wrote to a stub: its bytes are ingested");
        let inode = self.inode_of(map, stub.id)?;
        let opened = self.engine.open(inode, libc::O_WRONLY)?;
        let size = self.engine.namespace.attr(inode, None)?.size;
        let copied = self.copy_written_ranges(&source, opened.handle, size);
        self.engine.release(opened.handle);
        copied?;
        if let Some(mapped) = map.get_mut(stub.id) {
            mapped.ingested = Some((stub.size, stub.mtime));
        }
        Ok(())
    }

    /// Copies the ranges of a stub to which a program wrote; holes are not such ranges. The kernel allocates whole
    /// pages, so zeros at the start of a range were most likely not written. There, the file retains its own bytes up
    /// to its length `size`.
    fn copy_written_ranges(
        &self,
        source: &rustix::fd::OwnedFd,
        handle: firn_engine::HandleId,
        size: u64,
    ) -> Result<()> {
        let mut buffer = vec![0u8; COPY_BYTES];
        let mut position = 0u64;
        while let Ok(data) = rustix::fs::seek(source, SeekFrom::Data(position)) {
            let hole = rustix::fs::seek(source, SeekFrom::Hole(data))?;
            let bytes_max = usize::try_from(hole - data)
                .unwrap_or(COPY_BYTES)
                .min(COPY_BYTES);
            let read_bytes = rustix::io::pread(
                source,
                buffer.get_mut(..bytes_max).unwrap_or_default(),
                data,
            )?;
            if read_bytes == 0 {
                break;
            }
            let bytes = buffer.get(..read_bytes).unwrap_or_default();
            let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
            let skip = if data == position && position > 0 {
                0
            } else {
                zeros.min(size.saturating_sub(data) as usize)
            };
            self.write_all(
                handle,
                data + skip as u64,
                bytes.get(skip..).unwrap_or_default(),
            )?;
            position = data + read_bytes as u64;
        }
        Ok(())
    }

    /// Writes all bytes at `offset`, and waits for room if necessary.
    fn write_all(&self, handle: firn_engine::HandleId, offset: u64, bytes: &[u8]) -> Result<usize> {
        let mut written = 0;
        while let Some(rest) = bytes.get(written..).filter(|rest| !rest.is_empty()) {
            match self
                .engine
                .write(handle, offset + written as u64, rest, None)?
            {
                Written::Bytes(bytes) => written += bytes,
                Written::Full => self.engine.room.wait_for_room()?,
            }
        }
        Ok(written)
    }

    /// Runs after the death of a firnd. If the last logged change was not made in the backing, reverts that change in
    /// the map.
    pub(crate) fn revert_unmade_change(&self, last_change: LoggedChange) -> std::io::Result<()> {
        let mut map = self.map.lock();
        let missing = |path: &[u8]| {
            self.find(path)
                .is_err_and(|error| matches!(error, Errno::NOENT | Errno::NOTDIR))
        };
        match last_change {
            LoggedChange::Added(path) if missing(&path) => {
                let gone = map.remove(&path)?;
                self.release_inode(gone);
            }
            LoggedChange::Moved(from, to) if missing(&to) && !missing(&from) => {
                map.move_paths(&to, &from)?
            }
            _ => {}
        }
        Ok(())
    }
}

/// Whether `time` is more than `margin` before `reference`.
fn is_older(time: Time, reference: Time, margin: Duration) -> bool {
    let nanoseconds = |time: Time| i128::from(time.sec) * NS_PER_S + i128::from(time.nsec);
    nanoseconds(time) + (margin.as_nanos() as i128) < nanoseconds(reference)
}

/// Type bits of a kind in a mode.
fn type_of(kind: Kind) -> u32 {
    match kind {
        Kind::File => libc::S_IFREG,
        Kind::Dir => libc::S_IFDIR,
        Kind::Symlink => libc::S_IFLNK,
        Kind::Fifo => libc::S_IFIFO,
        Kind::Socket => libc::S_IFSOCK,
        Kind::CharDevice => libc::S_IFCHR,
        Kind::BlockDevice => libc::S_IFBLK,
    }
}
