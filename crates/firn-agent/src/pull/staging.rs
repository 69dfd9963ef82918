//! The staging directory `.firn-pull-NAME`, in which a *pull* builds the copy of another host's tree until the copy is
//! complete and becomes NAME. The *plan* is the list of files that the copy gets.
//!
//! ```text
//!   .firn-pull-NAME/     mode 0700; its owner and mode are checked before anything in it is used
//!       lock             locked by the pull that uses the directory
//!       tree             becomes NAME by one rename
//! ```
//!
//! Promises
//! * NAME appears complete, and never replaces an existing file or directory.
//! * Files of an earlier pull are reused or removed. Their bytes are trusted only after a comparison of checksums.
//! * Everything is created, changed and removed below the checked directory. Each path is resolved from its descriptor,
//!   and through no symbolic link ([`firn_trust::open_beneath`]). In the parent directory, no other user may be able to
//!   replace names.
//! * If a name of the copy already exists with another kind, the pull fails. Such a file system treats two names as one
//!   (it may ignore case). One file of the source could then overwrite another, or a link could lead out of the copy.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use firn_protocol::path::BytePath;
use firn_trust::{list_names, open_beneath, open_dir_beneath, open_parent_beneath, remove_beneath};
use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags, Timespec, Timestamps,
};
use rustix::fs::{fchmod, futimens, mkdirat, readlinkat, renameat, renameat_with};
use rustix::fs::{statat, symlinkat, utimensat};
use rustix::io::Errno;

use crate::error::PullError;
use crate::message::{Entry, EntryKind};
use crate::pull::plan::Plan;

const LOCK: &str = "lock";
const TREE: &str = "tree";
/// Permission bits that are copied. Set-id bits are not, because the copy may belong to another user.
const MODE_BITS: u32 = 0o777;
/// All permission bits of the owner.
const OWNER_ALL: u32 = 0o700;
const NANOSECONDS_MAX: u32 = 999_999_999;

/// The staging directory of one pull; see the head of this file.
pub(crate) struct Staging {
    /// Path of the complete copy.
    target: PathBuf,
    parent: TargetParent,
    /// Path of the staging directory, for messages only.
    path: PathBuf,
    /// Descriptor of the staging directory.
    dir: OwnedFd,
    /// Whether files and names are made durable. On a firn mount they are not, because a user copies there to have them
    /// in memory.
    is_synced: bool,
    _lock: File,
}

/// The directory of the copy, and the names there of the copy and of its staging directory.
struct TargetParent {
    dir: OwnedFd,
    target_name: OsString,
    staging_name: OsString,
}

impl TargetParent {
    /// Opens the directory in which the copy `target` will get its name. Fails if another user may replace names in it,
    /// because the copy could then be replaced while it is built.
    fn open(target: &Path) -> Result<Self, PullError> {
        let (Some(path), Some(target_name)) = (target.parent(), target.file_name()) else {
            // The root directory and a path that ends in `..` exist already.
            return Err(PullError::Exists {
                path: target.into(),
            });
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|errno| local_error(path)(errno.into()))?;
        firn_trust::check_shared_parent(&dir, path)?;
        let mut staging_name = OsString::from(".firn-pull-");
        staging_name.push(target_name);
        Ok(Self {
            dir,
            target_name: target_name.to_owned(),
            staging_name,
        })
    }

    fn has_target(&self) -> bool {
        file_type_at(&self.dir, &self.target_name).is_some()
    }

    /// Removes the staging directory if it has no tree. A pull that was killed after its rename leaves such a
    /// directory.
    fn remove_staging_if_empty(&self, staging_dir: &OwnedFd) {
        let Ok(names) = list_names(staging_dir) else {
            return;
        };
        let is_empty = names.iter().all(|name| name == LOCK);
        if is_empty {
            // Errors are ignored: the directory then only remains until the next pull with this target.
            let _ = rustix::fs::unlinkat(staging_dir, LOCK, AtFlags::empty());
            let _ = rustix::fs::unlinkat(&self.dir, &self.staging_name, AtFlags::REMOVEDIR);
        }
    }

    /// Removes an empty staging directory, unless a pull has locked it. `staging_path` is its path for messages.
    fn remove_unused_staging(&self, staging_path: &Path) {
        let name = Path::new(&self.staging_name);
        let Ok(staging_dir) = firn_trust::open_private_dir(&self.dir, name) else {
            return;
        };
        if let Ok(_lock) = lock_staging(&staging_dir, staging_path, staging_path) {
            self.remove_staging_if_empty(&staging_dir);
        }
    }
}

impl Staging {
    /// Opens or creates the staging directory for a copy at `target`, and locks it. The copy is built there until it is
    /// complete. What an earlier interrupted pull has left in it is used again.
    ///
    /// Fails if `target` exists, if another pull has the lock, or if another user could change the directory.
    pub(crate) fn open(target: &Path) -> Result<Self, PullError> {
        let target = std::path::absolute(target).map_err(local_error(target))?;
        let parent = TargetParent::open(&target)?;
        let path = target.with_file_name(&parent.staging_name);
        if parent.has_target() {
            // A pull that was killed after its rename leaves an empty staging directory.
            parent.remove_unused_staging(&path);
            return Err(PullError::Exists { path: target });
        }
        let staging_dir =
            firn_trust::create_private_dir(&parent.dir, Path::new(&parent.staging_name))
                .map_err(|error| error.at(&path))?;
        let lock = lock_staging(&staging_dir, &path, &target)?;
        let is_synced = target.parent().is_none_or(|dir| !is_on_firn_mount(dir));
        Ok(Self {
            target,
            parent,
            path,
            dir: staging_dir,
            is_synced,
            _lock: lock,
        })
    }

    /// Whether files and names of this copy are made durable.
    pub(crate) fn is_synced(&self) -> bool {
        self.is_synced
    }

    /// Returns the path of an entry in the staging directory, for messages only.
    pub(crate) fn locate(&self, path: &BytePath) -> PathBuf {
        self.path.join(path_in_staging(path))
    }

    /// Opens a file of the copy for reading and writing, and creates it if it does not exist. `path` is relative to the
    /// copied tree, which is built in the staging directory.
    ///
    /// Fails with a collision if the file system treats two names of the copy as one. [`Staging::prepare`] must have
    /// made the directories.
    pub(crate) fn open_file(&self, path: &BytePath) -> Result<File, PullError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NONBLOCK;
        let staging_path = path_in_staging(path);
        let open = || open_beneath(&self.dir, &staging_path, flags, Mode::RUSR | Mode::WUSR);
        let opened = match open() {
            // An earlier pull has finished this file with a mode that denies writing. The file is removed and created
            // again.
            Err(Errno::ACCESS) => self.remove_file(&staging_path).and_then(|()| open()),
            opened => opened,
        };
        let file = match opened {
            Ok(fd) => File::from(fd),
            // `prepare` has removed everything that differs from the plan. This object therefore belongs to another
            // entry of the plan, whose name the file system treats as equal to this name.
            Err(Errno::LOOP | Errno::ISDIR | Errno::NXIO) => {
                return Err(self.collision_error(path));
            }
            Err(errno) => return Err(self.error_at(path)(errno)),
        };
        let metadata = file.metadata().map_err(local_error(&self.locate(path)))?;
        if !metadata.is_file() {
            return Err(self.collision_error(path));
        }
        Ok(file)
    }

    fn remove_file(&self, staging_path: &Path) -> Result<(), Errno> {
        let dir = open_parent_beneath(&self.dir, staging_path)?;
        remove_beneath(dir, last_component(staging_path))
    }

    /// Removes everything that the plan does not have, and then creates directories and symbolic links.
    pub(crate) fn prepare(&self, plan: &Plan) -> Result<(), PullError> {
        self.remove_unplanned(plan, &self.dir, TREE.as_ref(), &BytePath::default())?;
        for entry in plan.entries() {
            match &entry.kind {
                EntryKind::Directory => self.create_dir(&entry.path)?,
                EntryKind::Link { target } => self.create_link(&entry.path, target)?,
                EntryKind::File { .. } | EntryKind::Other => {}
            }
        }
        Ok(())
    }

    /// Creates a directory of the copy, unless it exists already.
    fn create_dir(&self, path: &BytePath) -> Result<(), PullError> {
        let EntryLocation { dir, name } = self.locate_entry(path)?;
        match mkdirat(&dir, &name, Mode::RWXU) {
            Ok(()) => {
                // The umask may have removed bits from the mode of mkdirat(2).
                let new_dir =
                    open_dir_beneath(&dir, Path::new(&name)).map_err(self.error_at(path))?;
                fchmod(new_dir, Mode::RWXU).map_err(self.error_at(path))
            }
            Err(Errno::EXIST) if file_type_at(&dir, &name) == Some(FileType::Directory) => Ok(()),
            Err(Errno::EXIST) => Err(self.collision_error(path)),
            Err(errno) => Err(self.error_at(path)(errno)),
        }
    }

    /// Creates a symbolic link of the copy, unless the same link exists already.
    fn create_link(&self, path: &BytePath, target: &BytePath) -> Result<(), PullError> {
        let EntryLocation { dir, name } = self.locate_entry(path)?;
        match symlinkat(target.as_path(), &dir, &name) {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) if is_link_to(&dir, &name, target) => Ok(()),
            Err(Errno::EXIST) => Err(self.collision_error(path)),
            Err(errno) => Err(self.error_at(path)(errno)),
        }
    }

    /// Opens the directory that holds an entry.
    fn locate_entry(&self, path: &BytePath) -> Result<EntryLocation, PullError> {
        let staging_path = path_in_staging(path);
        match open_parent_beneath(&self.dir, &staging_path) {
            Ok(dir) => Ok(EntryLocation {
                dir,
                name: last_component(&staging_path).to_owned(),
            }),
            Err(Errno::LOOP | Errno::NOTDIR) => Err(self.collision_error(path)),
            Err(errno) => Err(self.error_at(path)(errno)),
        }
    }

    /// Removes the files at and below `name` in `dir` that are not in the plan (the list of files to copy), or are of
    /// another kind there. An earlier pull has left them. `path` is the path of `name` in the plan.
    ///
    /// Planned files keep their bytes, which are compared later.
    fn remove_unplanned(
        &self,
        plan: &Plan,
        dir: &OwnedFd,
        name: &OsStr,
        path: &BytePath,
    ) -> Result<(), PullError> {
        let Some(file_type) = file_type_at(dir, name) else {
            return Ok(());
        };
        let is_planned = match plan.find(path).map(|entry| &entry.kind) {
            Some(EntryKind::Directory) => file_type == FileType::Directory,
            Some(EntryKind::File { .. }) => file_type == FileType::RegularFile,
            Some(EntryKind::Link { target }) => is_link_to(dir, name, target),
            Some(EntryKind::Other) | None => false,
        };
        if !is_planned {
            return remove_beneath(dir, name).map_err(self.error_at(path));
        }
        if file_type != FileType::Directory {
            return Ok(());
        }
        let planned_dir = open_dir_beneath(dir, Path::new(name)).map_err(self.error_at(path))?;
        // An earlier pull may have finished this directory with a mode that denies its owner access.
        fchmod(&planned_dir, Mode::RWXU).map_err(self.error_at(path))?;
        let child_names = list_names(&planned_dir).map_err(self.error_at(path))?;
        for child_name in child_names {
            let child_path = path.as_path().join(&child_name).into();
            self.remove_unplanned(plan, &planned_dir, &child_name, &child_path)?;
        }
        Ok(())
    }

    /// Completes the copy: sets modes and times of directories and links, syncs them, and renames the tree to its name.
    ///
    /// The threads that write files must have finished all files of the plan, which lists them, parents first.
    pub(crate) fn finish(&self, plan: &Plan) -> Result<(), PullError> {
        let mut top_dir = None;
        // Entries come before their directory, because each change of an entry changes the time of the directory.
        for entry in plan.entries().iter().rev() {
            match entry.kind {
                EntryKind::Directory => top_dir = Some(self.finish_dir(plan, entry)?),
                EntryKind::Link { .. } => self.finish_link(entry)?,
                EntryKind::File { .. } | EntryKind::Other => {}
            }
        }
        self.rename_to_target()?;
        // `finish_dir` has left all permissions on the top directory to its owner, because the rename needs them.
        let top_entry = &plan.entries()[0];
        if let Some(top_dir) = top_dir
            && top_entry.mode & OWNER_ALL != OWNER_ALL
        {
            fchmod(&top_dir, mode_of(top_entry))
                .map_err(io::Error::from)
                .and_then(|()| self.sync(&top_dir))
                .map_err(local_error(&self.target))?;
        }
        self.sync(&self.parent.dir)
            .map_err(local_error(&self.target))
    }

    /// Gives the complete tree its final name, which must not exist yet.
    fn rename_to_target(&self) -> Result<(), PullError> {
        let TargetParent {
            dir, target_name, ..
        } = &self.parent;
        match rename_to_new_name(&self.dir, TREE.as_ref(), dir, target_name) {
            Ok(()) => Ok(()),
            Err(Errno::EXIST | Errno::NOTEMPTY) => Err(PullError::Exists {
                path: self.target.clone(),
            }),
            Err(errno) => Err(local_error(&self.target)(errno.into())),
        }
    }

    fn sync(&self, dir: &impl AsFd) -> io::Result<()> {
        if self.is_synced {
            sync_dir(dir)
        } else {
            Ok(())
        }
    }

    /// Sets mode and time of a directory of the copy and syncs it, after all its entries are complete. Returns its
    /// descriptor.
    ///
    /// Fails if the directory has fewer names than the plan, the list of files to copy. The file system has then
    /// treated two names as one.
    fn finish_dir(&self, plan: &Plan, entry: &Entry) -> Result<OwnedFd, PullError> {
        let path = &entry.path;
        let dir =
            open_dir_beneath(&self.dir, &path_in_staging(path)).map_err(self.error_at(path))?;
        let names = list_names(&dir).map_err(self.error_at(path))?;
        if names.len() < plan.count_in(path) {
            return Err(self.collision_error(path));
        }
        // The top directory will be renamed, and its owner needs write permission for that.
        let kept_permissions = if path.is_empty() { OWNER_ALL } else { 0 };
        let mode = mode_of(entry) | Mode::from_raw_mode(kept_permissions);
        futimens(&dir, &timestamps(entry)).map_err(self.error_at(path))?;
        fchmod(&dir, mode).map_err(self.error_at(path))?;
        self.sync(&dir).map_err(local_error(&self.locate(path)))?;
        Ok(dir)
    }

    fn finish_link(&self, entry: &Entry) -> Result<(), PullError> {
        let EntryLocation { dir, name } = self.locate_entry(&entry.path)?;
        let times = timestamps(entry);
        utimensat(&dir, &name, &times, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(self.error_at(&entry.path))
    }

    /// Returns a function that makes the error of a system call on an entry.
    fn error_at(&self, path: &BytePath) -> impl Fn(Errno) -> PullError {
        let shown_path = self.locate(path);
        move |errno| local_error(&shown_path)(errno.into())
    }

    fn collision_error(&self, path: &BytePath) -> PullError {
        PullError::Collision {
            path: self.locate(path),
        }
    }
}

impl Drop for Staging {
    /// Removes the staging directory if it has no tree, because a later pull could not use it.
    fn drop(&mut self) {
        self.parent.remove_staging_if_empty(&self.dir);
    }
}

/// The directory that holds an entry, and the name of the entry there.
struct EntryLocation {
    dir: OwnedFd,
    name: OsString,
}

/// Returns the path of an entry relative to the staging directory.
fn path_in_staging(path: &BytePath) -> PathBuf {
    if path.is_empty() {
        PathBuf::from(TREE)
    } else {
        Path::new(TREE).join(path)
    }
}

fn last_component(path: &Path) -> &OsStr {
    path.file_name().unwrap_or_default()
}

/// Returns the type of the file `name` in `dir`, if it exists.
fn file_type_at(dir: &OwnedFd, name: &OsStr) -> Option<FileType> {
    let status = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    Some(FileType::from_raw_mode(status.st_mode))
}

/// Whether `name` in `dir` is a symbolic link with exactly this text.
fn is_link_to(dir: &OwnedFd, name: &OsStr, target: &BytePath) -> bool {
    match readlinkat(dir, name, Vec::new()) {
        Ok(text) => text.as_bytes() == target.as_bytes(),
        Err(_) => false,
    }
}

/// Returns a function that makes errors of the file system on which the copy is made.
pub(crate) fn local_error(path: &Path) -> impl Fn(io::Error) -> PullError {
    let path = path.to_owned();
    move |error| PullError::Local {
        path: path.clone(),
        error,
    }
}

/// Sets mode and modification time of an open file to those of its original.
pub(crate) fn set_mode_and_time(file: &File, entry: &Entry) -> io::Result<()> {
    fchmod(file, mode_of(entry))?;
    Ok(futimens(file, &timestamps(entry))?)
}

/// Locks the staging directory `dir`, in which a copy is built, against other pulls. Returns the lock file, which holds
/// the lock until it is closed. Fails with `Busy` if another pull has the lock.
///
/// `staging_path` and `target` are the paths for messages.
fn lock_staging(dir: &OwnedFd, staging_path: &Path, target: &Path) -> Result<File, PullError> {
    let name = Path::new(LOCK);
    let opened = match firn_trust::create_private_file(dir, name, OFlags::RDWR) {
        // An earlier pull has made the file. It is opened only if it belongs to this user.
        Err(firn_trust::TrustError::Io { error, .. })
            if error.kind() == io::ErrorKind::AlreadyExists =>
        {
            firn_trust::open_private_file(dir, name, OFlags::RDWR)
        }
        created => created,
    };
    let lock_file = opened.map_err(|error| error.at(&staging_path.join(LOCK)))?;
    match rustix::fs::flock(&lock_file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(lock_file.into()),
        Err(Errno::WOULDBLOCK) => Err(PullError::Busy {
            path: target.into(),
        }),
        Err(errno) => Err(local_error(staging_path)(errno.into())),
    }
}

/// Renames `from` to `name`, which must not exist.
///
/// Some file systems, such as NFS, do not support `RENAME_NOREPLACE`. There, the name is looked up first. If another
/// process then creates a directory with this name, it is replaced only if it is empty.
pub(crate) fn rename_to_new_name(
    from_dir: &OwnedFd,
    from: &OsStr,
    dir: &OwnedFd,
    name: &OsStr,
) -> Result<(), Errno> {
    match renameat_with(from_dir, from, dir, name, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS) if file_type_at(dir, name).is_some() => Err(Errno::EXIST),
        Err(Errno::INVAL | Errno::NOSYS) => renameat(from_dir, from, dir, name),
        renamed => renamed,
    }
}

/// Whether a directory is on a firn mount.
pub(crate) fn is_on_firn_mount(dir: &Path) -> bool {
    let Ok(dir) = dir.canonicalize() else {
        return false;
    };
    match firn_client::find(&dir) {
        Ok(location) => dir.starts_with(&location.mount.mount_point),
        Err(_) => false,
    }
}

fn mode_of(entry: &Entry) -> Mode {
    Mode::from_raw_mode(entry.mode & MODE_BITS)
}

/// Returns the modification time of an entry, as both times of a file.
fn timestamps(entry: &Entry) -> Timestamps {
    // The entry comes from another host, and the kernel refuses more nanoseconds than a second has.
    let nanoseconds = entry.mtime_ns.min(NANOSECONDS_MAX);
    let mtime = Timespec {
        tv_sec: entry.mtime_s,
        tv_nsec: i64::from(nanoseconds),
    };
    Timestamps {
        last_access: mtime,
        last_modification: mtime,
    }
}

/// Makes the names in a directory durable, if its file system supports that.
pub(crate) fn sync_dir(dir: &impl AsFd) -> io::Result<()> {
    match rustix::fs::fsync(dir) {
        // Some file systems do not support fsync(2) of a directory.
        Err(Errno::INVAL) => Ok(()),
        synced => Ok(synced?),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use firn_format::record::Ending;

    use super::*;
    use crate::pull::plan::PlannedFile;

    fn entry(path: &str, kind: EntryKind) -> Entry {
        Entry {
            path: path.into(),
            kind,
            ..Entry::directory()
        }
    }

    fn file(path: &str) -> Entry {
        let kind = EntryKind::File {
            bytes: 3,
            ending: Ending::Closed,
        };
        entry(path, kind)
    }

    fn plan() -> Plan {
        let target = "rank_0".into();
        let entries = vec![
            Entry::directory(),
            file("rank_0"),
            entry("sub", EntryKind::Directory),
            file("sub/rank_1"),
            entry("link", EntryKind::Link { target }),
        ];
        Plan::from_entries(entries).unwrap()
    }

    fn write_all(staging: &Staging, plan: &Plan) -> Result<(), PullError> {
        use std::io::Write;
        for PlannedFile { entry, .. } in plan.files() {
            let mut file = staging.open_file(&entry.path)?;
            file.write_all(b"new").unwrap();
            set_mode_and_time(&file, entry).unwrap();
        }
        Ok(())
    }

    /// Returns the path of everything below a directory, with the content of each file and the target of each link.
    fn tree(dir: &Path) -> Vec<(PathBuf, String)> {
        let mut paths = Vec::new();
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let kind = path.symlink_metadata().unwrap().file_type();
            let content = match (kind.is_dir(), kind.is_symlink()) {
                (true, _) => String::new(),
                (_, true) => fs::read_link(&path).unwrap().to_string_lossy().into(),
                _ => fs::read_to_string(&path).unwrap(),
            };
            if kind.is_dir() {
                paths.extend(tree(&path));
            }
            paths.push((path, content));
        }
        paths.sort();
        paths
    }

    /// Number of the last step of a pull. After each step, an attacker may exchange the staging directory for a link.
    /// The link leads to a private directory of the puller's user with the same names.
    const STEPS: usize = 4;

    /// Proves S-agent-31.
    #[test]
    fn regression_a_staging_directory_that_is_exchanged_at_any_step_leads_nowhere() {
        for exchanged_after in 0..=STEPS {
            let top = tempfile::tempdir().unwrap();
            let private = top.path().join("private");
            fs::create_dir_all(private.join("tree/sub/deep")).unwrap();
            for name in [
                "lock",
                "tree/rank_0",
                "tree/sub/rank_1",
                "tree/sub/deep/file",
            ] {
                fs::write(private.join(name), "precious").unwrap();
            }
            let before = tree(&private);
            let target = top.path().join("copy");
            let staged = top.path().join(".firn-pull-copy");
            let plan = plan();
            let step = |done: usize| {
                if done == exchanged_after {
                    fs::rename(&staged, top.path().join("stolen")).unwrap();
                    symlink(&private, &staged).unwrap();
                }
            };
            let staging = Staging::open(&target).unwrap();
            step(0);
            staging.prepare(&plan).unwrap();
            step(1);
            write_all(&staging, &plan).unwrap();
            step(2);
            staging.finish(&plan).unwrap();
            step(3);
            drop(staging);
            assert_eq!(
                tree(&private),
                before,
                "exchanged after step {exchanged_after}"
            );
            assert_eq!(fs::read(target.join("sub/rank_1")).unwrap(), b"new");
            assert_eq!(fs::read(target.join("link")).unwrap(), b"new");
            // The exchanged link still exists; the next pull does not follow it.
            if exchanged_after < STEPS {
                fs::rename(&target, top.path().join("old")).unwrap();
                assert!(matches!(Staging::open(&target), Err(PullError::Trust(_))));
                assert_eq!(tree(&private), before);
            }
        }
    }

    /// Proves S-agent-31.
    #[test]
    fn regression_a_planted_link_beside_a_target_that_exists_costs_nothing() {
        let top = tempfile::tempdir().unwrap();
        let private = top.path().join("private");
        fs::create_dir(&private).unwrap();
        fs::write(private.join("lock"), "precious").unwrap();
        let target = top.path().join("copy");
        fs::create_dir(&target).unwrap();
        symlink(&private, top.path().join(".firn-pull-copy")).unwrap();
        assert!(matches!(
            Staging::open(&target),
            Err(PullError::Exists { .. })
        ));
        assert_eq!(fs::read(private.join("lock")).unwrap(), b"precious");
        // A staging directory without a tree would be removed, but this one is locked.
        fs::remove_file(top.path().join(".firn-pull-copy")).unwrap();
        fs::rename(&target, top.path().join("other")).unwrap();
        let staging = Staging::open(&target).unwrap();
        fs::rename(top.path().join("other"), &target).unwrap();
        assert!(matches!(
            Staging::open(&target),
            Err(PullError::Exists { .. })
        ));
        assert!(
            top.path().join(".firn-pull-copy/lock").exists(),
            "it is in use"
        );
        std::mem::forget(staging);
    }

    /// Proves S-agent-32.
    #[test]
    fn a_directory_in_which_others_may_replace_names_takes_no_copy() {
        let top = tempfile::tempdir().unwrap();
        let target = top.path().join("copy");
        for (mode, is_accepted) in [
            (0o2770, false),
            (0o777, false),
            (0o1777, true),
            (0o755, true),
        ] {
            fs::set_permissions(top.path(), PermissionsExt::from_mode(mode)).unwrap();
            match Staging::open(&target) {
                Err(PullError::Trust(error)) if !is_accepted => {
                    assert!(error.to_string().contains("no sticky bit"), "{error}");
                }
                opened => assert!(is_accepted && opened.is_ok(), "{mode:o}"),
            }
            assert_eq!(fs::read_dir(top.path()).unwrap().count(), 0, "{mode:o}");
        }
    }

    /// Proves S-agent-33.
    #[test]
    fn what_has_a_name_of_the_plan_and_is_something_else_ends_the_pull() {
        let top = tempfile::tempdir().unwrap();
        let target = top.path().join("copy");
        let staging = Staging::open(&target).unwrap();
        let plan = plan();
        staging.prepare(&plan).unwrap();
        let tree = top.path().join(".firn-pull-copy/tree");
        // The same state as on a file system that ignores case, with a directory RANK_0 in the plan.
        fs::create_dir(tree.join("rank_0")).unwrap();
        let refused = write_all(&staging, &plan).unwrap_err();
        assert!(matches!(&refused, PullError::Collision { path } if *path == tree.join("rank_0")));
        fs::remove_dir(tree.join("rank_0")).unwrap();
        fs::remove_dir(tree.join("sub")).unwrap();
        symlink(top.path(), tree.join("sub")).unwrap();
        let refused = write_all(&staging, &plan).unwrap_err();
        assert!(matches!(refused, PullError::Collision { .. }), "{refused}");
        assert!(!top.path().join("rank_1").exists(), "outside");
        staging.prepare(&plan).unwrap();
        write_all(&staging, &plan).unwrap();
        // The same state as if the file system had treated two names of files as one.
        fs::remove_file(tree.join("rank_0")).unwrap();
        let refused = staging.finish(&plan).unwrap_err();
        assert!(matches!(refused, PullError::Collision { .. }), "{refused}");
        assert!(!target.exists());
        staging.prepare(&plan).unwrap();
        write_all(&staging, &plan).unwrap();
        staging.finish(&plan).unwrap();
        assert!(target.join("sub/rank_1").exists());
    }
}
