//! Name synchronization: brings the names and attributes of the stub tree to the *backing*, the directory that the
//! mount serves.
//!
//! The *tree* is a directory on tmpfs with a *stub* for each object of the backing. Programs change its names, and the
//! kernel reports no such change to firnd. The *map* has the path of each stub in the backing, the tree has its present
//! path. The steps of [`Tree::reconcile`]:
//!
//! 1. Objects are moved or made from the top down, so a directory is in its place before its contents are synced.
//! 2. If another object is at the path, that object moves to a *private path* first: a path that is only for firnd.
//!    This also resolves exchanges, and a directory that changed places with one of its children.
//! 3. Names whose stub is gone are removed last.
//! 4. Directories get their attributes, the deepest first.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use firn_backing::{Attr, Backing, Errno, Kind, RenameFlags, SetTime, Time};
use firn_engine::{HandleId, InodeId, Result, SetAttr, Written};
use firn_format::quote::quoted;
use rustix::fs::{
    AtFlags, Dir, Mode, OFlags, SeekFrom, Timespec, Timestamps, fstat, openat, readlinkat, statat,
    utimensat,
};

use crate::StubId;
use crate::map::{IngestedState, LoggedChange, Map, MappedStub};
use crate::path::{RelPath, is_private, join, private_path};
use crate::tree::{ParentDir, Stub, Tree, WalkedDir, to_errno};

/// Two ticks of the clock with which the kernel sets change times (10 ms each at most). A change that is at least this
/// old has already changed these times.
const QUIET_TIME: Duration = Duration::from_millis(20);
/// Most walks of one call that wait for a quiet tree. Removals need a quiet walk.
const QUIET_TRIES: u32 = 50;
/// Most bytes of one read from a stub to which the kernel wrote.
const COPY_BYTES: usize = 1 << 20;
const NS_PER_S: i128 = 1_000_000_000;
/// Permission bits, with the set-id and sticky bits.
const MODE_BITS: u32 = 0o7777;
/// Set-user-id and set-group-id bit.
const SET_ID_BITS: u32 = libc::S_ISUID | libc::S_ISGID;
/// A change of attributes that changes none.
const NO_CHANGE: SetAttr = SetAttr {
    mode: None,
    uid: None,
    gid: None,
    size: None,
    atime: SetTime::Keep,
    mtime: SetTime::Keep,
};

/// Result of one walk through the tree.
pub(crate) struct Walk {
    /// The stubs; a directory comes before its contents.
    pub stubs: Vec<Stub>,
    /// Whether no rename happened during the walk. If so, a stub that is not in `stubs` has no name.
    pub is_quiet: bool,
    /// The directories, with their times.
    pub dirs: Vec<WalkedDir>,
}

/// A name in the backing at whose path the tree has another stub, or none.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct StaleName {
    path: RelPath,
    /// The stub whose file has this name.
    id: StubId,
}

/// Whether attributes are synced if the stub did not change since the last sync.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AttributeSync {
    Always,
    IfChanged,
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

    /// Brings the names and attributes of the stub tree (the mount point, on tmpfs) to the backing, the directory that
    /// the mount serves. Holds the lock of the map throughout.
    ///
    /// A walk of the tree is *quiet* if no rename happened meanwhile. If there are names to remove, and the walk is not
    /// quiet, walks up to `quiet_tries` more times. Continues after an error and returns the first one.
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
        // A stale name is one that the backing has and the tree does not have any more.
        if self.has_stale_names(&map, &walk) {
            walk = self.walk_until_quiet(walk, quiet_tries)?;
            if let Err(error) = self.remove_stale_names(&mut map, &walk) {
                first_error.get_or_insert(error);
            }
        }
        // Last, because each change of the names in a directory changes its times.
        if let Err(error) = self.sync_directory_attributes(&mut map, &walk) {
            first_error.get_or_insert(error);
        }
        // Not an error of the sync: a long log only takes space.
        if let Err(error) = map.shorten_log(&self.head) {
            tracing::warn!(%error, "the log of the stub tree could not be shortened and continues to grow");
        }
        first_error.map_or(Ok(()), Err)
    }

    /// Repeats a walk until it is quiet, up to `tries` times. A process that can open stubs by their identity needs no
    /// quiet walk.
    fn walk_until_quiet(&self, mut walk: Walk, tries: u32) -> Result<Walk> {
        for _ in 0..tries {
            if walk.is_quiet || self.can_open_by_handle() {
                break;
            }
            std::thread::sleep(QUIET_TIME);
            walk = self.walk().map_err(|error| to_errno(&error))?;
        }
        Ok(walk)
    }

    /// Syncs the attributes of all directories, the deepest directory first, because each change in a directory changes
    /// its times. Continues after an error and returns the first one.
    fn sync_directory_attributes(&self, map: &mut Map, walk: &Walk) -> Result<()> {
        let mut first_error = None;
        for stub in walk.stubs.iter().rev() {
            let is_synced_directory =
                stub.kind == Kind::Dir && map.id_at(&stub.path) == Some(stub.id);
            if is_synced_directory
                && let Err(error) = self.sync_attributes(map, stub, AttributeSync::Always)
            {
                first_error.get_or_insert(error);
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    /// Removes the names in the backing whose stub is gone. Their pending data is dropped, which makes room for a
    /// writer.
    pub fn sweep(&self) -> Result<()> {
        let mut map = self.map.lock();
        let walk = self.walk().map_err(|error| to_errno(&error))?;
        let removed = self.remove_stale_names(&mut map, &walk);
        let is_complete = walk.is_quiet && removed.is_ok() && !self.has_stale_names(&map, &walk);
        *self.dirs_of_last_sweep.lock() = is_complete.then_some(walk.dirs);
        removed
    }

    /// Does what [`Tree::sweep`] does, unless no directory has changed since the last complete sweep.
    pub fn sweep_soon(&self) -> Result<()> {
        let is_swept = match &*self.dirs_of_last_sweep.lock() {
            Some(dirs) => dirs.iter().all(|dir| self.is_unchanged(dir)),
            None => false,
        };
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
                let dir_path = path.get(..index).unwrap_or_default();
                let stub = self.stub(dir_path).map_err(|error| to_errno(&error))?;
                self.sync_stub(map, &stub)?;
            }
        }
        Ok(())
    }

    // ---- walks -------------------------------------------------------------------------------

    /// Lists all stubs of the tree (the mount point, on tmpfs), and determines whether a rename may have made the list
    /// incomplete. If none has, the walk is quiet: a stub that it did not find has no name.
    fn walk(&self) -> std::io::Result<Walk> {
        let began = Time::now();
        let mut walk = Walk {
            stubs: Vec::new(),
            is_quiet: true,
            dirs: Vec::new(),
        };
        let mut unread_dirs = vec![self.stub(b"")?];
        while let Some(dir) = unread_dirs.pop() {
            self.walk_dir(dir, &mut walk, &mut unread_dirs)?;
        }
        // A rename changes the change times of both directories. No rename happened during the walk if each directory
        // still has the time that the walk saw, and that time is at least `QUIET_TIME` before the start of the walk.
        walk.is_quiet = walk.is_quiet
            && walk
                .dirs
                .iter()
                .all(|dir| self.is_unchanged(dir) && is_older(dir.ctime, began, QUIET_TIME));
        Ok(walk)
    }

    /// Adds a directory of the tree and the stubs in it to a walk, and the directories in it to `unread_dirs`.
    ///
    /// If a name cannot be read, it was probably renamed or removed meanwhile. The walk is then not quiet: a stub that
    /// it did not find may still have a name.
    fn walk_dir(
        &self,
        dir: Stub,
        walk: &mut Walk,
        unread_dirs: &mut Vec<Stub>,
    ) -> std::io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open_path: &[u8] = if dir.path.is_empty() { b"." } else { &dir.path };
        let Ok(dir_fd) = openat(&self.root, open_path, flags, Mode::empty()) else {
            walk.is_quiet = false;
            return Ok(());
        };
        for entry in Dir::read_from(&dir_fd)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") {
                continue;
            }
            let Ok(stub) = self.stub(&join(&dir.path, name)) else {
                walk.is_quiet = false;
                continue;
            };
            if stub.kind == Kind::Dir {
                unread_dirs.push(stub.clone());
            }
            walk.stubs.push(stub);
        }
        walk.dirs.push(WalkedDir {
            path: dir.path,
            id: dir.id,
            ctime: dir.ctime,
        });
        Ok(())
    }

    /// Whether a directory of a walk is still at its path, with no name added or removed.
    fn is_unchanged(&self, dir: &WalkedDir) -> bool {
        match self.stub(&dir.path) {
            Ok(stub) => stub.id == dir.id && stub.ctime == dir.ctime,
            Err(_) => false,
        }
    }

    /// Whether the backing has names whose stub is not at that path.
    fn has_stale_names(&self, map: &Map, walk: &Walk) -> bool {
        !self.stale_names(map, walk).is_empty()
    }

    /// Returns the names in the backing (the directory that the mount serves) that the tree does not have any more, by
    /// the stubs that `walk` found in the tree. A directory comes after its contents.
    ///
    /// The map has the paths of each stub in the backing. A path is stale if the tree has another stub there, or none.
    fn stale_names(&self, map: &Map, walk: &Walk) -> Vec<StaleName> {
        let present_names: HashSet<(&[u8], StubId)> = walk
            .stubs
            .iter()
            .map(|stub| (&*stub.path, stub.id))
            .collect();
        let present_ids: HashSet<StubId> = walk.stubs.iter().map(|stub| stub.id).collect();
        let mut stale_names = Vec::new();
        for (id, mapped) in map.iter() {
            let is_present = |path: &RelPath| present_names.contains(&(&**path, id));
            let has_present_path = mapped.paths.iter().any(is_present);
            // A private path is not stale if it is the only path of a stub that the walk found: the stub's name is not
            // synced yet.
            let waits_for_name = present_ids.contains(&id) && !has_present_path;
            for path in &mapped.paths {
                if is_present(path) || (waits_for_name && is_private(path)) {
                    continue;
                }
                let path = path.clone();
                stale_names.push(StaleName { path, id });
            }
        }
        // In descending order, so the contents of a directory come before the directory.
        stale_names.sort_unstable_by(|a, b| b.cmp(a));
        stale_names
    }

    /// Removes stale names from the backing, the directory that the mount serves. A name is stale if the tree, in which
    /// programs change names, does not have it any more.
    ///
    /// Such a name is removed only if its stub is certainly gone, or if the backing also has the stub at its present
    /// path. Continues after an error and returns the first one.
    fn remove_stale_names(&self, map: &mut Map, walk: &Walk) -> Result<()> {
        let mut present_paths: HashMap<StubId, Vec<&[u8]>> = HashMap::new();
        for stub in &walk.stubs {
            present_paths.entry(stub.id).or_default().push(&stub.path);
        }
        let mut first_error = None;
        for stale in self.stale_names(map, walk) {
            let removed = match present_paths.get(&stale.id) {
                Some(present_paths) => self.remove_old_name(map, &stale, present_paths),
                None => self.remove_name_if_gone(map, &stale, walk.is_quiet),
            };
            if let Err(error) = removed {
                tracing::warn!(
                    path = %quoted(&stale.path), %error,
                    "a removal in the stub tree could not be synced to the backing; the next sync tries again"
                );
                first_error.get_or_insert(error);
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    /// Removes a stale name (one that the tree does not have any more) of a stub that has other paths in the tree, the
    /// `present_paths`.
    ///
    /// The name is removed only if the backing, the served directory, has one of these paths too. Otherwise the sync
    /// of that path failed, and the file retains its data at the stale path.
    fn remove_old_name(
        &self,
        map: &mut Map,
        stale: &StaleName,
        present_paths: &[&[u8]],
    ) -> Result<()> {
        let Some(mapped) = map.get(stale.id) else {
            return Ok(());
        };
        // The paths that the stub's object has in the backing.
        let mut synced_paths = mapped.paths.iter();
        if synced_paths.any(|path| present_paths.contains(&&**path)) {
            self.unlink(map, &stale.path)
        } else {
            Ok(())
        }
    }

    /// Removes a name of a stub that the walk of the tree did not find, if the stub is gone. `is_quiet`: no rename
    /// happened during the walk.
    ///
    /// If a client still has the stub open, its file is still needed. The file then keeps one name in the backing, a
    /// private path in Firn's own directory, until the client closes it.
    fn remove_name_if_gone(&self, map: &mut Map, stale: &StaleName, is_quiet: bool) -> Result<()> {
        let Some(mapped) = map.get(stale.id) else {
            return Ok(());
        };
        if !self.is_gone(stale.id, is_quiet) {
            return Ok(());
        }
        let is_open = mapped.adopted_count > 0;
        let is_last_path = mapped.paths.len() == 1;
        if is_open && is_private(&stale.path) {
            // The file has its private name already.
            Ok(())
        } else if is_open && is_last_path {
            // The last name becomes the private one.
            self.free_path(map, &stale.path, stale.id)
        } else {
            // The file is not needed, or has other names.
            self.unlink(map, &stale.path)
        }
    }

    /// Whether this process may open stubs by their identity. If so, it can find out without a quiet walk which stubs
    /// are gone.
    fn can_open_by_handle(&self) -> bool {
        self.head.root.open(self.root_fd()).is_ok()
    }

    /// Whether a stub that the walk of the tree did not find has no name any more. No program may have it open, except
    /// clients that had it *adopted*: firnd, the process that serves the mount, has a descriptor of it for them.
    ///
    /// `is_quiet`: no rename happened during the walk. It decides only if this process may not open stubs by identity,
    /// which needs CAP_DAC_READ_SEARCH.
    fn is_gone(&self, id: StubId, is_quiet: bool) -> bool {
        match id.open(self.root_fd()) {
            // The stub exists: it has a name that the walk missed, or a program has it open.
            Ok(fd) => {
                let is_adopted = self
                    .adopted_stubs
                    .lock()
                    .values()
                    .any(|adopted| adopted.id == id);
                is_adopted && has_no_name(&fd)
            }
            // The stub does not exist any more.
            Err(error) if error.raw_os_error() == Some(libc::ESTALE) => true,
            // This process may not open stubs by their identity.
            Err(_) => {
                let adopted_stubs = self.adopted_stubs.lock();
                let adopted = adopted_stubs.values().find(|adopted| adopted.id == id);
                match adopted {
                    Some(adopted) => has_no_name(&adopted.fd),
                    None => is_quiet,
                }
            }
        }
    }

    // ---- changes of the backing ----------------------------------------------------------------

    /// Makes the backing, the directory that the mount serves, show a stub's present path and attributes.
    ///
    /// The directory above must already be in place there. If another object has the path in the backing, that object
    /// moves away first. Fails with EPERM for the name of Firn's own directory.
    fn sync_stub(&self, map: &mut Map, stub: &Stub) -> Result<()> {
        // `.firn` at the top of the backing belongs to Firn.
        if stub.path == b".firn" {
            return Err(Errno::PERM);
        }
        if map.id_at(&stub.path) != Some(stub.id) {
            if let Some(other_id) = map.id_at(&stub.path) {
                self.free_path(map, &stub.path, other_id)?;
            }
            self.add_name(map, stub)?;
        }
        // Stubs of files are empty, unless a program without the preload library wrote to them.
        if stub.kind == Kind::File && stub.size > 0 {
            self.ingest_kernel_writes(map, stub)?;
        }
        if stub.kind == Kind::Dir {
            // Directories get their attributes at the end of the sync, because changes of the names in them change
            // their times.
            return Ok(());
        }
        self.sync_attributes(map, stub, AttributeSync::IfChanged)
    }

    /// Makes a stub's path lead to the stub's object in the backing. The path must be free.
    ///
    /// If the object has another path at which the stub still is, the path becomes a further name. Otherwise the object
    /// moves there. An object that does not exist yet is created.
    fn add_name(&self, map: &mut Map, stub: &Stub) -> Result<()> {
        let paths = match map.get(stub.id) {
            Some(mapped) if mapped.kind == stub.kind => mapped.paths.clone(),
            _ => return self.create_object(map, stub),
        };
        // A directory has one name only.
        let has_other_name =
            stub.kind != Kind::Dir && paths.iter().any(|path| self.is_at(path, stub.id));
        if has_other_name {
            return self.link(map, stub);
        }
        let old_path = paths.first().ok_or(Errno::NOENT)?;
        self.rename(map, old_path, &stub.path)
    }

    /// Frees a path of the backing. If the object there has other paths, removes this path, else moves the object to
    /// its private path.
    fn free_path(&self, map: &mut Map, path: &[u8], id: StubId) -> Result<()> {
        let has_other_paths = map.get(id).is_some_and(|mapped| mapped.paths.len() > 1);
        if has_other_paths {
            return self.unlink(map, path);
        }
        self.create_private_dir()?;
        self.rename(map, path, &private_path(id))
    }

    /// Renames an object in the backing. On an error the map is as before.
    fn rename(&self, map: &mut Map, from: &[u8], to: &[u8]) -> Result<()> {
        map.move_paths(from, to).map_err(|error| to_errno(&error))?;
        let renamed = self.rename_in_backing(from, to);
        if renamed.is_err() {
            map.move_paths(to, from).map_err(|error| to_errno(&error))?;
        }
        renamed
    }

    fn rename_in_backing(&self, from: &[u8], to: &[u8]) -> Result<()> {
        let old = self.find_parent(from)?;
        let new = self.find_parent(to)?;
        self.engine.namespace.rename(
            old.dir.inode,
            old.name,
            new.dir.inode,
            new.name,
            RenameFlags::empty(),
        )
    }

    /// Makes a hard link to the object of a stub, at the stub's path in the backing, the directory that the
    /// mount serves. The map, which has each stub's paths there, gets the path first. On an error it is as before.
    fn link(&self, map: &mut Map, stub: &Stub) -> Result<()> {
        let inode = self.inode_of(map, stub.id)?;
        let ParentDir { dir, name } = self.find_parent(&stub.path)?;
        map.insert(stub.id, stub.kind, &stub.path)
            .map_err(|error| to_errno(&error))?;
        match self.engine.namespace.link(inode, dir.inode, name) {
            Ok(entry) => {
                // The engine has counted a reference for the answer, which is not needed.
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
        let mapped = map.id_at(path).and_then(|id| map.get(id));
        let is_dir = mapped.is_some_and(|mapped| mapped.kind == Kind::Dir);
        match self.unlink_in_backing(path, is_dir) {
            // A program has made files in this directory directly in the backing. The files and the directory remain.
            Err(Errno::NOTEMPTY | Errno::EXIST) if is_dir => Ok(()),
            Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => {
                let removed = map.remove(path).map_err(|error| to_errno(&error))?;
                self.release_inode(removed);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn unlink_in_backing(&self, path: &[u8], is_dir: bool) -> Result<()> {
        let ParentDir { dir, name } = self.find_parent(path)?;
        if is_dir {
            self.engine.namespace.rmdir(dir.inode, name)
        } else {
            self.engine.namespace.unlink(dir.inode, name)
        }
    }

    /// Creates the object of a stub in the backing, the directory that the mount serves. The stub is not in the map,
    /// which has each stub's path there. Such a stub has no written bytes: the first write adds it to the map.
    ///
    /// The directory above must exist in the backing. If the engine cannot create the object, the map is as before.
    fn create_object(&self, map: &mut Map, stub: &Stub) -> Result<()> {
        let ParentDir { dir, name } = self.find_parent(&stub.path)?;
        // Read before the map gets the path, so that a failure leaves the map as it is.
        let link_target = match stub.kind {
            Kind::Symlink => readlinkat(&self.root, &*stub.path, Vec::new())?,
            _ => Default::default(),
        };
        map.insert(stub.id, stub.kind, &stub.path)
            .map_err(|error| to_errno(&error))?;
        let namespace = &self.engine.namespace;
        let caller = self.caller();
        let created = match stub.kind {
            Kind::Dir => namespace.mkdir(&caller, dir.inode, name, 0o700),
            Kind::Symlink => {
                let target = OsStr::from_bytes(link_target.as_bytes());
                namespace.symlink(&caller, dir.inode, name, target)
            }
            Kind::File => {
                let mode = libc::S_IFREG | 0o600;
                let no_device = 0;
                namespace.mknod(&caller, dir.inode, name, mode, no_device)
            }
            kind => {
                let mode = file_type_bits(kind) | stub.mode;
                namespace.mknod(&caller, dir.inode, name, mode, stub.rdev)
            }
        };
        match created {
            Ok(entry) => {
                // The engine has counted a reference for the answer, which is not needed.
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

    /// Brings mode, owner and modification time of a stub to its object in the backing, the directory that the mount
    /// serves. With `AttributeSync::IfChanged`, does nothing if the stub has not changed since the last sync.
    ///
    /// Before that, the stub of a file gets the time of the last write to its bytes, which the kernel did not see. Does
    /// nothing if another object is at the path of the stub.
    fn sync_attributes(&self, map: &mut Map, stub: &Stub, sync: AttributeSync) -> Result<()> {
        let mut stub = stub.clone();
        if stub.kind == Kind::File && self.update_stub_time(map, stub.id)? {
            let updated_stub = self.stub(&stub.path).map_err(|error| to_errno(&error))?;
            if updated_stub.id != stub.id {
                return Ok(());
            }
            stub = updated_stub;
        }
        let synced_ctime = map.get(stub.id).and_then(|mapped| mapped.synced_ctime);
        if sync == AttributeSync::IfChanged && synced_ctime == Some(stub.ctime) {
            return Ok(());
        }
        let object = self.find(&stub.path)?;
        let inode = object.inode.inode;
        let Some(attr) = object.attr.filter(|attr| attr.kind == stub.kind) else {
            return Ok(());
        };
        self.set_changed_attributes(inode, &stub, &attr)?;
        let new_attr = if stub.kind == Kind::File {
            Some(self.engine.namespace.attr(inode, None)?)
        } else {
            None
        };
        if let Some(mapped) = map.get_mut(stub.id) {
            mapped.synced_ctime = Some(stub.ctime);
            if let Some(new_attr) = new_attr {
                mapped.shown_mtime = Some(new_attr.mtime);
            }
        }
        Ok(())
    }

    /// Sets those attributes of a stub's object in the backing (the served directory) that differ from the stub's:
    /// owner, mode and modification time. `inode` is the object, and `attr` has its present attributes.
    fn set_changed_attributes(&self, inode: InodeId, stub: &Stub, attr: &Attr) -> Result<()> {
        let namespace = &self.engine.namespace;
        let has_other_mode = stub.kind != Kind::Symlink && attr.mode & MODE_BITS != stub.mode;
        let has_other_owner = attr.uid != stub.uid || attr.gid != stub.gid;
        let mut may_lack_set_id_bits = false;
        if has_other_owner {
            let owner = SetAttr {
                uid: (attr.uid != stub.uid).then_some(stub.uid),
                gid: (attr.gid != stub.gid).then_some(stub.gid),
                ..NO_CHANGE
            };
            // Without the right to change owners, the owner remains unchanged, as on a FUSE mount without root.
            let is_owner_changed = namespace.set_attr(inode, owner, None).is_ok();
            may_lack_set_id_bits = is_owner_changed && stub.mode & SET_ID_BITS != 0;
        }
        if has_other_mode || has_other_owner {
            // The mode is set after the owner, because a change of the owner clears set-id bits. So a mode with such
            // bits is set again even if it was the same before.
            let sets_mode = has_other_mode || may_lack_set_id_bits;
            let mode = SetAttr {
                mode: sets_mode.then_some(stub.mode),
                ..NO_CHANGE
            };
            namespace.set_attr(inode, mode, None)?;
        }
        if attr.mtime != stub.mtime {
            let times = SetAttr {
                mtime: SetTime::At(stub.mtime),
                ..NO_CHANGE
            };
            namespace.set_attr(inode, times, None)?;
        }
        Ok(())
    }

    /// Sets the modification time of a stub to that of the last write to its file. The kernel did not see that write,
    /// because the preload library sent it to firnd. Returns whether the time of the stub changed.
    ///
    /// `shown_mtime` in the map is the time that the stub shows already. It is unknown after a restart of firnd. If the
    /// stub cannot be reached now, nothing is changed; the next sync of its name sets the time.
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
            let stub_ctime = Time {
                sec: stat.st_ctime,
                nsec: stat.st_ctime_nsec as u32,
            };
            if stub_ctime > mtime {
                mapped.shown_mtime = Some(mtime);
                return Ok(false);
            }
        }
        utimensat(dir, &*path, &only_mtime(mtime), flags)?;
        mapped.shown_mtime = Some(mtime);
        if let Some(ingested) = &mut mapped.ingested {
            // This change of the time must not look like a write by the kernel.
            ingested.mtime = mtime;
        }
        Ok(true)
    }

    /// Returns a way to reach a stub on tmpfs: a descriptor that a client has sent, a path that leads to it now, or for
    /// root its file handle. They are tried in this order. Returns `None` if there is no way, such as during a rename.
    fn reach_stub(&self, mapped: &MappedStub, id: StubId) -> Result<Option<StubAccess>> {
        let duplicated_fd = self
            .adopted_stubs
            .lock()
            .values()
            .find(|adopted| adopted.id == id)
            .map(|adopted| adopted.fd.try_clone());
        if let Some(duplicated_fd) = duplicated_fd {
            let fd = duplicated_fd.map_err(|error| to_errno(&error))?;
            return Ok(Some(StubAccess::Descriptor(fd)));
        }
        if let Some(path) = mapped.paths.iter().find(|path| self.is_at(path, id)) {
            return Ok(Some(StubAccess::Path(path.clone())));
        }
        Ok(id.open(self.root_fd()).ok().map(StubAccess::Descriptor))
    }

    /// Copies bytes that a program without the preload library wrote to the stub itself, on tmpfs, into the stub's file
    /// in the engine, which stores the bytes of all files.
    ///
    /// Does nothing if the stub has the same size and modification time as at the last such copy. Fails with EAGAIN if
    /// another stub is at the path now.
    pub(crate) fn ingest_kernel_writes(&self, map: &mut Map, stub: &Stub) -> Result<()> {
        let present_state = IngestedState {
            size: stub.size,
            mtime: stub.mtime,
        };
        let last_ingested = map.get(stub.id).and_then(|mapped| mapped.ingested);
        if last_ingested == Some(present_state) {
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let source = openat(&self.root, &*stub.path, flags, Mode::empty())?;
        if StubId::from_fd(source.as_fd()).map_err(|error| to_errno(&error))? != stub.id {
            return Err(Errno::AGAIN);
        }
        tracing::info!(path = %quoted(&stub.path), bytes = stub.size, "a program without the preload library wrote to \
            a file of the stub tree: these bytes are taken into the arena");
        let inode = self.inode_of(map, stub.id)?;
        let opened = self.engine.open(inode, libc::O_WRONLY)?;
        let file_bytes = self.engine.namespace.attr(inode, None)?.size;
        let copied = self.copy_written_ranges(&source, opened.handle, file_bytes);
        self.engine.release(opened.handle);
        copied?;
        if let Some(mapped) = map.get_mut(stub.id) {
            mapped.ingested = Some(present_state);
        }
        Ok(())
    }

    /// Copies the bytes that a program wrote to a stub itself (`source`, on tmpfs) into the stub's file in the engine
    /// (`handle`). Holes of the stub are not copied.
    ///
    /// The kernel allocates whole pages, so zeros at the start of a range were most likely not written. There, the file
    /// retains its own bytes up to its length `file_bytes`.
    fn copy_written_ranges(
        &self,
        source: &OwnedFd,
        handle: HandleId,
        file_bytes: u64,
    ) -> Result<()> {
        let mut buffer = vec![0u8; COPY_BYTES];
        let mut position = 0u64;
        while let Ok(data_start) = rustix::fs::seek(source, SeekFrom::Data(position)) {
            let data_end = rustix::fs::seek(source, SeekFrom::Hole(data_start))?;
            let bytes_max = usize::try_from(data_end - data_start)
                .unwrap_or(COPY_BYTES)
                .min(COPY_BYTES);
            let chunk_buffer = buffer.get_mut(..bytes_max).unwrap_or_default();
            let read_bytes = rustix::io::pread(source, chunk_buffer, data_start)?;
            if read_bytes == 0 {
                break;
            }
            let chunk = buffer.get(..read_bytes).unwrap_or_default();
            // Only the first chunk of a range can begin with zeros that no program wrote.
            let is_later_chunk = data_start == position && position > 0;
            let skipped_bytes = if is_later_chunk {
                0
            } else {
                let leading_zeros = chunk.iter().take_while(|byte| **byte == 0).count();
                leading_zeros.min(file_bytes.saturating_sub(data_start) as usize)
            };
            let written_bytes = chunk.get(skipped_bytes..).unwrap_or_default();
            self.write_all(handle, data_start + skipped_bytes as u64, written_bytes)?;
            position = data_start + read_bytes as u64;
        }
        Ok(())
    }

    /// Writes all bytes at `offset`, and waits for room if necessary.
    fn write_all(&self, handle: HandleId, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut position = offset;
        let mut unwritten = bytes;
        while !unwritten.is_empty() {
            match self.engine.write(handle, position, unwritten, None)? {
                Written::Bytes(count) => {
                    position += count as u64;
                    unwritten = unwritten.get(count..).unwrap_or_default();
                }
                Written::Full => self.engine.room.wait_for_room()?,
            }
        }
        Ok(())
    }

    /// Runs after the death of a firnd. If the last logged change was not made in the backing, reverts that change in
    /// the map.
    pub(crate) fn revert_unmade_change(&self, last_change: LoggedChange) -> std::io::Result<()> {
        let mut map = self.map.lock();
        let is_missing = |path: &[u8]| matches!(self.find(path), Err(Errno::NOENT | Errno::NOTDIR));
        match last_change {
            LoggedChange::Added(path) if is_missing(&path) => {
                let removed = map.remove(&path)?;
                self.release_inode(removed);
            }
            LoggedChange::Moved(from, to) if is_missing(&to) && !is_missing(&from) => {
                map.move_paths(&to, &from)?
            }
            _ => {}
        }
        Ok(())
    }
}

/// Whether an open stub has no name any more.
pub(crate) fn has_no_name(fd: &OwnedFd) -> bool {
    fstat(fd).is_ok_and(|stat| stat.st_nlink == 0)
}

/// Returns the argument of utimensat(2) that sets only the modification time.
fn only_mtime(mtime: Time) -> Timestamps {
    Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: libc::UTIME_OMIT as _,
        },
        last_modification: Timespec {
            tv_sec: mtime.sec,
            tv_nsec: i64::from(mtime.nsec) as _,
        },
    }
}

/// Whether `time` is more than `margin` before `reference`.
fn is_older(time: Time, reference: Time, margin: Duration) -> bool {
    let nanoseconds = |time: Time| i128::from(time.sec) * NS_PER_S + i128::from(time.nsec);
    nanoseconds(time) + (margin.as_nanos() as i128) < nanoseconds(reference)
}

/// Type bits of a kind in a mode.
fn file_type_bits(kind: Kind) -> u32 {
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
