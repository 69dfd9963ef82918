//! Name synchronization: gives the backing the names and attributes of the stub tree.
//!
//! The map has the old path of each stub, the tree its present one.
//!
//! 1. Stubs are moved or made top down, so a directory is in its place before its contents are looked at.
//! 2. An object in the place of another one first moves to a private name. This also resolves exchanges, and a
//!    directory that changed places with one of its children.
//! 3. Objects without a name are removed last.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::fd::AsFd;
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
use crate::map::{Last, Map};
use crate::path::{Rel, is_private, join, private_path};
use crate::tree::{Stub, Tree, WalkedDir, errno};

/// Two ticks of the kernel's clock for times of change (10 ms at most): a change that is older has its final time.
const QUIET: Duration = Duration::from_millis(20);
/// Most walks until one finds the tree quiet; removals need such a walk.
const QUIET_TRIES: u32 = 50;
/// Bytes of one copy from a stub that the kernel wrote to.
const COPY_BYTES: usize = 1 << 20;

/// What one walk found in the tree.
pub(crate) struct Walk {
    /// Stubs that were found; a directory comes before its contents.
    pub stubs: Vec<Stub>,
    /// No rename happened during the walk, so a stub that is not in it has no name.
    pub quiet: bool,
    /// The directories.
    pub dirs: Vec<WalkedDir>,
}

impl<B: Backing> Tree<B> {
    /// Gives the backing the names and attributes of the tree.
    ///
    /// Continues after an error and returns the first; the next call tries the rest again. While programs change the
    /// tree, removals look like renames: the call then waits up to a second for a quiet tree.
    pub fn reconcile(&self) -> Result<()> {
        self.carry_over(QUIET_TRIES)
    }

    /// [`Self::reconcile`] for a caller that repeats it: does not wait, and may leave removals for the next call.
    pub fn reconcile_soon(&self) -> Result<()> {
        self.carry_over(0)
    }

    fn carry_over(&self, quiet_tries: u32) -> Result<()> {
        let mut map = self.map.lock();
        let mut walk = self.walk().map_err(|error| errno(&error))?;
        let mut failed = None;
        for stub in &walk.stubs {
            if let Err(error) = self.bring(&mut map, stub) {
                tracing::warn!(path = %quoted(&stub.path), %error, "a name of the stub tree was not synced");
                failed.get_or_insert(error);
            }
        }
        if self.has_candidates(&map, &walk) {
            for _ in 0..quiet_tries {
                if walk.quiet || self.can_open_by_handle() {
                    break;
                }
                std::thread::sleep(QUIET);
                walk = self.walk().map_err(|error| errno(&error))?;
            }
            if let Err(error) = self.remove_gone(&mut map, &walk) {
                failed.get_or_insert(error);
            }
        }
        // Directories get their times last, the deepest first: each change in a directory changes its times.
        for stub in walk
            .stubs
            .iter()
            .rev()
            .filter(|stub| stub.kind == Kind::Dir)
        {
            if map.at(&stub.path) == Some(stub.id)
                && let Err(error) = self.carry_attributes(&mut map, stub, true)
            {
                failed.get_or_insert(error);
            }
        }
        if let Err(error) = map.trim(&self.head) {
            tracing::warn!(%error, "the log of the stub tree grows");
        }
        failed.map_or(Ok(()), Err)
    }

    /// Drops the data of removed stubs only, to make room for a writer.
    pub fn sweep(&self) -> Result<()> {
        let mut map = self.map.lock();
        let walk = self.walk().map_err(|error| errno(&error))?;
        let swept = self.remove_gone(&mut map, &walk);
        let is_whole = walk.quiet && swept.is_ok() && !self.has_candidates(&map, &walk);
        *self.swept.lock() = is_whole.then_some(walk.dirs);
        swept
    }

    /// [`Self::sweep`] for a caller that repeats it: looks at directories only if nothing was removed or moved since the
    /// last call.
    pub fn sweep_soon(&self) -> Result<()> {
        let is_swept = self
            .swept
            .lock()
            .as_ref()
            .is_some_and(|dirs| dirs.iter().all(|dir| self.is_unchanged(dir)));
        if is_swept { Ok(()) } else { self.sweep() }
    }

    /// Brings the stub at `path`, and the directories above it, to the backing.
    pub(crate) fn bring_path(&self, map: &mut Map, path: &[u8]) -> Result<()> {
        self.bring_directories(map, path)?;
        let stub = self.stub(path).map_err(|error| errno(&error))?;
        self.bring(map, &stub)
    }

    /// Brings the directories above a path to the backing.
    pub(crate) fn bring_directories(&self, map: &mut Map, path: &[u8]) -> Result<()> {
        for (at, byte) in path.iter().enumerate() {
            if *byte == b'/' {
                let above = path.get(..at).unwrap_or_default();
                let stub = self.stub(above).map_err(|error| errno(&error))?;
                self.bring(map, &stub)?;
            }
        }
        Ok(())
    }

    // ---- looking -----------------------------------------------------------------------------

    fn walk(&self) -> std::io::Result<Walk> {
        let began = Time::now();
        let mut walk = Walk {
            stubs: Vec::new(),
            quiet: true,
            dirs: Vec::new(),
        };
        let mut dirs = vec![self.stub(b"")?];
        while let Some(dir) = dirs.pop() {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let path: &[u8] = if dir.path.is_empty() { b"." } else { &dir.path };
            let Ok(open) = openat(&self.root, path, flags, Mode::empty()) else {
                walk.quiet = false;
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
                    Err(_) => walk.quiet = false,
                }
            }
            walk.dirs.push(WalkedDir {
                path: dir.path,
                id: dir.id,
                ctime: dir.ctime,
            });
        }
        // A rename changes the times of both its directories.
        walk.quiet = walk.quiet
            && walk
                .dirs
                .iter()
                .all(|dir| self.is_unchanged(dir) && is_older(dir.ctime, began, QUIET));
        Ok(walk)
    }

    /// Whether a directory of a walk has its place, and none of its names were added or removed.
    fn is_unchanged(&self, dir: &WalkedDir) -> bool {
        self.stub(&dir.path)
            .is_ok_and(|now| now.id == dir.id && now.ctime == dir.ctime)
    }

    fn has_candidates(&self, map: &Map, walk: &Walk) -> bool {
        !self.candidates(map, walk).is_empty()
    }

    /// Paths of the backing whose stub is no longer there, with the stub.
    fn candidates(&self, map: &Map, walk: &Walk) -> Vec<(Rel, StubId)> {
        let right: HashSet<(&[u8], StubId)> = walk
            .stubs
            .iter()
            .map(|stub| (&*stub.path, stub.id))
            .collect();
        let seen: HashSet<StubId> = walk.stubs.iter().map(|stub| stub.id).collect();
        let mut found: Vec<(Rel, StubId)> = Vec::new();
        for (id, item) in map.items() {
            // A private name may be the only one of a stub that is not in its place yet.
            let stands = item.paths.iter().any(|path| right.contains(&(&**path, id)));
            for path in &item.paths {
                let waits = is_private(path) && seen.contains(&id) && !stands;
                if !waits && !right.contains(&(&**path, id)) {
                    found.push((path.clone(), id));
                }
            }
        }
        // The contents of a directory before the directory.
        found.sort_unstable_by(|a, b| b.cmp(a));
        found
    }

    fn remove_gone(&self, map: &mut Map, walk: &Walk) -> Result<()> {
        let mut stands: HashMap<StubId, Vec<&[u8]>> = HashMap::new();
        for stub in &walk.stubs {
            stands.entry(stub.id).or_default().push(&stub.path);
        }
        let mut failed = None;
        for (path, id) in self.candidates(map, walk) {
            let Some(item) = map.item(id) else { continue };
            let result = match stands.get(&id) {
                // The stub has a correct name in the backing, so the old one goes. Without a correct name, bringing the
                // stub failed, and the old name stays.
                Some(right) if item.paths.iter().any(|path| right.contains(&&**path)) => {
                    self.unlink(map, &path)
                }
                Some(_) => Ok(()),
                None if !self.is_gone(id, walk.quiet) => Ok(()),
                None if item.opens > 0 && is_private(&path) => Ok(()),
                None if item.opens > 0 && item.paths.len() == 1 => self.make_way(map, &path, id),
                None => self.unlink(map, &path),
            };
            if let Err(error) = result {
                tracing::warn!(path = %quoted(&path), %error, "a removal in the stub tree was not synced");
                failed.get_or_insert(error);
            }
        }
        failed.map_or(Ok(()), Err)
    }

    fn can_open_by_handle(&self) -> bool {
        self.head.root.open(self.root_fd()).is_ok()
    }

    /// Whether a stub that the walk did not find has neither name nor descriptor.
    fn is_gone(&self, id: StubId, quiet: bool) -> bool {
        match id.open(self.root_fd()) {
            // The stub has a name after all, or is open.
            Ok(fd) => {
                let by_us = self
                    .opens
                    .lock()
                    .values()
                    .filter(|open| open.id == id)
                    .count()
                    > 0;
                by_us && fstat(&fd).is_ok_and(|stat| stat.st_nlink == 0)
            }
            Err(error) if error.raw_os_error() == Some(libc::ESTALE) => true,
            Err(_) => match self.opens.lock().values().find(|open| open.id == id) {
                Some(open) => fstat(&open.fd).is_ok_and(|stat| stat.st_nlink == 0),
                None => quiet,
            },
        }
    }

    // ---- doing -------------------------------------------------------------------------------

    /// Gives a stub its present path in the backing. Its directory is in place already.
    fn bring(&self, map: &mut Map, stub: &Stub) -> Result<()> {
        // `.firn` at the top of the backing is Firn's own.
        if stub.path == b".firn" {
            return Err(Errno::PERM);
        }
        if map.at(&stub.path) != Some(stub.id) {
            if let Some(other) = map.at(&stub.path) {
                self.make_way(map, &stub.path, other)?;
            }
            let known = map
                .item(stub.id)
                .map(|item| (item.kind, item.paths.clone()));
            match known {
                Some((kind, paths)) if kind == stub.kind => {
                    let right = |path: &&Rel| kind != Kind::Dir && self.stands(path, stub.id);
                    if paths.iter().any(|path| right(&path)) {
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
            self.absorb(map, stub)?;
        }
        // Directories are done last: their times change with what is done in them.
        if stub.kind != Kind::Dir {
            self.carry_attributes(map, stub, false)
        } else {
            Ok(())
        }
    }

    /// Moves the object at a path of the backing to a private name, so that another can take the path.
    fn make_way(&self, map: &mut Map, path: &[u8], id: StubId) -> Result<()> {
        let has_others = map.item(id).is_some_and(|item| item.paths.len() > 1);
        if has_others {
            return self.unlink(map, path);
        }
        self.make_private_dir()?;
        self.rename(map, path, &private_path(id))
    }

    fn rename(&self, map: &mut Map, from: &[u8], to: &[u8]) -> Result<()> {
        map.shift(from, to).map_err(|error| errno(&error))?;
        let done = (|| {
            let ((dir, name), (new_dir, new_name)) = (self.parent(from)?, self.parent(to)?);
            self.engine.namespace.rename(
                dir.inode,
                name,
                new_dir.inode,
                new_name,
                RenameFlags::empty(),
            )
        })();
        if done.is_err() {
            map.shift(to, from).map_err(|error| errno(&error))?;
        }
        done
    }

    fn link(&self, map: &mut Map, stub: &Stub) -> Result<()> {
        let inode = self.inode_of(map, stub.id)?;
        let (dir, name) = self.parent(&stub.path)?;
        map.add(stub.id, stub.kind, &stub.path)
            .map_err(|error| errno(&error))?;
        match self.engine.namespace.link(inode, dir.inode, name) {
            Ok(entry) => {
                drop(self.reference(entry.inode));
                Ok(())
            }
            Err(error) => {
                map.remove(&stub.path).map_err(|error| errno(&error))?;
                Err(error)
            }
        }
    }

    /// Removes a name in the backing.
    pub(crate) fn unlink(&self, map: &mut Map, path: &[u8]) -> Result<()> {
        let is_dir = map
            .at(path)
            .and_then(|id| map.item(id))
            .is_some_and(|item| item.kind == Kind::Dir);
        let done = self.parent(path).and_then(|(dir, name)| {
            if is_dir {
                self.engine.namespace.rmdir(dir.inode, name)
            } else {
                self.engine.namespace.unlink(dir.inode, name)
            }
        });
        match done {
            // A program made files there without the mount: they stay, and so does the directory.
            Err(Errno::NOTEMPTY | Errno::EXIST) if is_dir => Ok(()),
            Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => {
                let gone = map.remove(path).map_err(|error| errno(&error))?;
                self.let_go(gone);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Makes an object of the tree that the map does not have. Such a stub has no writes, else the map had it.
    fn make(&self, map: &mut Map, stub: &Stub) -> Result<()> {
        let (dir, name) = self.parent(&stub.path)?;
        map.add(stub.id, stub.kind, &stub.path)
            .map_err(|error| errno(&error))?;
        let caller = self.caller();
        let made = match stub.kind {
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
        match made {
            Ok(entry) => {
                drop(self.reference(entry.inode));
                // Without writes the stub's own time counts.
                if let Some(item) = map.item_mut(stub.id) {
                    item.told_mtime = Some(entry.attr.mtime);
                }
                Ok(())
            }
            // The object was made before a crash, or without the mount: taking it as it is loses nothing.
            Err(Errno::EXIST) if matches!(stub.kind, Kind::Dir | Kind::File) => Ok(()),
            Err(error) => {
                map.remove(&stub.path).map_err(|error| errno(&error))?;
                Err(error)
            }
        }
    }

    /// Brings mode, owner and time of change to the backing. `always`: also of a stub that did not change.
    fn carry_attributes(&self, map: &mut Map, stub: &Stub, always: bool) -> Result<()> {
        let mut now = stub.clone();
        if stub.kind == Kind::File && self.tell_time(map, stub.id)? {
            now = self.stub(&stub.path).map_err(|error| errno(&error))?;
            if now.id != stub.id {
                return Ok(());
            }
        }
        if !always
            && map
                .item(now.id)
                .is_some_and(|item| item.carried == Some(now.ctime))
        {
            return Ok(());
        }
        let (found, attr) = self.find(&now.path)?;
        let Some(attr) = attr.filter(|attr| attr.kind == now.kind) else {
            return Ok(());
        };
        let mode =
            (now.kind != Kind::Symlink && attr.mode & 0o7777 != now.mode).then_some(now.mode);
        let uid = (attr.uid != now.uid).then_some(now.uid);
        let gid = (attr.gid != now.gid).then_some(now.gid);
        let mtime = if attr.mtime == now.mtime {
            SetTime::Keep
        } else {
            SetTime::At(now.mtime)
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
                // Without the right to give files away the owner stays, as on a FUSE mount without root.
                let _ = self.engine.namespace.set_attr(found.inode, owner, None);
            }
            // After the owner, whose change takes set-id bits away.
            self.engine.namespace.set_attr(
                found.inode,
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
            self.engine.namespace.set_attr(found.inode, times, None)?;
        }
        let told = (now.kind == Kind::File)
            .then(|| self.engine.namespace.attr(found.inode, None))
            .transpose()?;
        if let Some(item) = map.item_mut(now.id) {
            item.carried = Some(now.ctime);
            if let Some(attr) = told {
                item.told_mtime = Some(attr.mtime);
            }
        }
        Ok(())
    }

    /// Sets a stub's time of its last write, which the kernel did not see. Returns whether the time changed.
    pub(crate) fn tell_time(&self, map: &mut Map, id: StubId) -> Result<bool> {
        let inode = self.inode_of(map, id)?;
        let mtime = self.engine.namespace.attr(inode, None)?.mtime;
        let Some(item) = map.item_mut(id) else {
            return Ok(false);
        };
        if item.told_mtime == Some(mtime) {
            return Ok(false);
        }
        let open = self
            .opens
            .lock()
            .values()
            .find(|open| open.id == id)
            .map(|open| open.fd.try_clone());
        let open = match open {
            Some(fd) => Some(fd.map_err(|error| errno(&error))?),
            // Root finds it also where no name of it is known yet.
            None if !item.paths.iter().any(|path| self.stands(path, id)) => {
                id.open(self.root_fd()).ok()
            }
            None => None,
        };
        let (dir, path, flags) = match &open {
            Some(fd) => {
                let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(fd));
                (rustix::fs::CWD, path.into_bytes(), AtFlags::empty())
            }
            None => match item.paths.iter().find(|path| self.stands(path, id)) {
                Some(path) => (self.root_fd(), path.clone(), AtFlags::SYMLINK_NOFOLLOW),
                // The time is set when the name is synced.
                None => return Ok(false),
            },
        };
        // After a restart the stub's time is right: an earlier firnd or a program set it after the last write.
        if item.told_mtime.is_none() {
            let stat = statat(dir, &*path, flags)?;
            if (Time {
                sec: stat.st_ctime,
                nsec: stat.st_ctime_nsec as u32,
            }) > mtime
            {
                item.told_mtime = Some(mtime);
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
        item.told_mtime = Some(mtime);
        if let Some((_, time)) = &mut item.absorbed {
            *time = mtime;
        }
        Ok(true)
    }

    /// Takes in bytes that a program without the library wrote to the stub itself.
    pub(crate) fn absorb(&self, map: &mut Map, stub: &Stub) -> Result<()> {
        let known = map.item(stub.id).and_then(|item| item.absorbed);
        if known == Some((stub.size, stub.mtime)) {
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let source = openat(&self.root, &*stub.path, flags, Mode::empty())?;
        if StubId::of(source.as_fd()).map_err(|error| errno(&error))? != stub.id {
            return Err(Errno::AGAIN);
        }
        tracing::info!(path = %quoted(&stub.path), bytes = stub.size, "a program without the preload library wrote to a stub: its bytes are ingested");
        let inode = self.inode_of(map, stub.id)?;
        let opened = self.engine.open(inode, libc::O_WRONLY)?;
        let size = self.engine.namespace.attr(inode, None)?.size;
        let done = self.copy_in(&source, opened.handle, size);
        self.engine.release(opened.handle);
        done?;
        if let Some(item) = map.item_mut(stub.id) {
            item.absorbed = Some((stub.size, stub.mtime));
        }
        Ok(())
    }

    /// Copies the written parts of a stub. Holes were not written. Zeros beside a hole were most likely not written
    /// either, because the kernel keeps whole pages; below `size` the file keeps its own bytes there.
    fn copy_in(
        &self,
        source: &rustix::fd::OwnedFd,
        handle: firn_engine::HandleId,
        size: u64,
    ) -> Result<()> {
        let mut buffer = vec![0u8; COPY_BYTES];
        let mut at = 0u64;
        while let Ok(data) = rustix::fs::seek(source, SeekFrom::Data(at)) {
            let hole = rustix::fs::seek(source, SeekFrom::Hole(data))?;
            let want = usize::try_from(hole - data)
                .unwrap_or(COPY_BYTES)
                .min(COPY_BYTES);
            let n = rustix::io::pread(source, buffer.get_mut(..want).unwrap_or_default(), data)?;
            if n == 0 {
                break;
            }
            let bytes = buffer.get(..n).unwrap_or_default();
            let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
            let skip = if data == at && at > 0 {
                0
            } else {
                zeros.min(size.saturating_sub(data) as usize)
            };
            self.write_all(
                handle,
                data + skip as u64,
                bytes.get(skip..).unwrap_or_default(),
            )?;
            at = data + n as u64;
        }
        Ok(())
    }

    fn write_all(&self, handle: firn_engine::HandleId, at: u64, bytes: &[u8]) -> Result<usize> {
        let mut done = 0;
        while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
            match self.engine.write(handle, at + done as u64, rest, None)? {
                Written::Bytes(n) => done += n,
                Written::Full => self.engine.room.wait_for_room()?,
            }
        }
        Ok(done)
    }

    /// After a crash: the last change that was logged may not have been made.
    pub(crate) fn mend(&self, last: Last) -> std::io::Result<()> {
        let mut map = self.map.lock();
        let missing = |path: &[u8]| {
            self.find(path)
                .is_err_and(|error| matches!(error, Errno::NOENT | Errno::NOTDIR))
        };
        match last {
            Last::Added(path) if missing(&path) => {
                let gone = map.remove(&path)?;
                self.let_go(gone);
            }
            Last::Moved(from, to) if missing(&to) && !missing(&from) => map.shift(&to, &from)?,
            _ => {}
        }
        Ok(())
    }
}

fn is_older(time: Time, than: Time, by: Duration) -> bool {
    let nanoseconds = |time: Time| i128::from(time.sec) * 1_000_000_000 + i128::from(time.nsec);
    nanoseconds(time) + (by.as_nanos() as i128) < nanoseconds(than)
}

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
