//! Lists the checkpoints of a directory. For each one, the list says whether it can be used and how safe its data is.
//!
//! A checkpoint is one of the following, directly below the directory: a directory that the user owns, or a file that
//! the user owns with a training step in its name, as `step_100` ([`step_of`]). Symbolic links and names that begin
//! with a dot are no checkpoints. Checkpoints of other users are listed separately, and their files inside a checkpoint
//! are ignored.
//!
//! Terms
//! * *firnd*: the process that serves a mount.
//! * *cut*: the file is incomplete, because its writer, or firnd, was killed before the file was closed.
//! * *transaction*: changes at and below a directory that a program commits or aborts together.
//! * *whole*: the checkpoint is complete. It has files, and each of them was closed by its writer. No transaction that
//!   is still open may have changed the checkpoint.
//! * *level*: the durability of a file's bytes, from `held` (in memory only) to `durable` (synced to storage).
//!
//! Promises
//! * If the directory is not on a mount, there is no firnd to ask. The state is then unknown, never whole.
//! * The level of a checkpoint is the lowest level of its files.
//! * The newest checkpoint is the one that contains the most recent modification.
//! * Objects that vanish during the listing are left out.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, SystemTime};

use firn_format::durability::DurabilityLevel;
use firn_format::quote::quoted_path;
use firn_format::record::Ending;
use firn_format::step::step_of;
use firn_protocol::Status;
use firn_trust::{ObjectId, list_names, visit_own};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, statat};
use rustix::io::Errno;

use crate::connect::Connection;
use crate::error::ClientError;
use crate::find::{self, Mount, MountLocation};
use crate::levels::Levels;

/// Maximum difference between two clocks: the one that stamps changes in the backing (the directory that the mount
/// serves), and the one of firnd, which knows when a transaction began.
const CLOCK_DIFFERENCE_MAX: Duration = Duration::from_secs(60);

/// Error of listing checkpoints.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// firnd refused the request, or firnd cannot be reached.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A system call on a path failed.
    #[error("{}: {}", quoted_path(path), error_text(*errno))]
    System {
        /// The path.
        path: PathBuf,
        /// The error. ESTALE means that another object is in the place of the expected one.
        errno: Errno,
    },
}

impl CheckpointError {
    /// Returns the positive errno value that fits the error best.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Client(error) => error.errno(),
            Self::System { errno, .. } => errno.raw_os_error(),
        }
    }

    /// Returns the exit code for this error (docs/OPERATIONS.md).
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Client(error) => error.exit_code(),
            Self::System { .. } => 1,
        }
    }
}

/// Returns the text of an error of [`CheckpointError::System`].
fn error_text(errno: Errno) -> String {
    match errno {
        Errno::STALE => "another object was put in its place meanwhile".to_owned(),
        errno => std::io::Error::from(errno).to_string(),
    }
}

/// Whether a checkpoint can be used, as far as Firn knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointState {
    /// The checkpoint has files, and no other state applies.
    Whole,
    /// A program has a file of it open for writing.
    Written,
    /// The writer of a file, or firnd, was killed before the file was closed.
    Cut,
    /// An open transaction may have changed it.
    InTransaction,
    /// The checkpoint has no files.
    Empty,
    /// The directory is not on a mount, so there is no firnd to ask.
    Unknown,
}

impl CheckpointState {
    /// Returns the state as one word, for tables and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Written => "written",
            Self::Cut => "cut",
            Self::InTransaction => "in-transaction",
            Self::Empty => "empty",
            Self::Unknown => "unknown",
        }
    }
}

/// A checkpoint.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Its name in the directory.
    pub name: OsString,
    /// The file system object that was examined.
    pub object: ObjectId,
    /// Whether it is a directory.
    pub is_dir: bool,
    /// The step number in its name.
    pub step: Option<u64>,
    /// Newest modification time of all objects of the user in the checkpoint: seconds and nanoseconds.
    pub modified: (i64, i64),
    /// Bytes of the user's files in it.
    pub bytes: u64,
    /// Bytes of these files that are not in the backing yet.
    pub held_bytes: u64,
    /// Bytes of these files that a sync made durable.
    pub durable_bytes: u64,
    /// Number of these files.
    pub files: u64,
    /// Whether the checkpoint can be used.
    pub wholeness: CheckpointState,
    /// Whether a program has one of its files open, for reading or writing.
    pub is_open: bool,
    /// The lowest durability level of its files. `None` if it has no files.
    pub level: Option<DurabilityLevel>,
    /// Whether a symbolic link in the same directory leads to it or into it, perhaps through other links.
    pub is_linked: bool,
}

/// Returns the user's regular files at or below `path`, as paths relative to `path`. If `path` is a file, its
/// relative path is empty. Symbolic links are not followed.
pub(crate) fn own_files(path: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let status = rustix::fs::lstat(path).map_err(failed(path))?;
    if FileType::from_raw_mode(status.st_mode) == FileType::RegularFile {
        return Ok(vec![PathBuf::new()]);
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let dir = rustix::fs::open(path, flags, Mode::empty()).map_err(failed(path))?;
    let uid = rustix::process::geteuid().as_raw();
    let mut files = Vec::new();
    for name in list_names(&dir).map_err(failed(path))? {
        visit_own(&dir, &name, uid, &mut |relative_path, stat| {
            if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
                files.push(relative_path.to_owned());
            }
        })
        .map_err(failed(&path.join(&name)))?;
    }
    Ok(files)
}

/// The checkpoints of a directory, and the other directories in it.
#[derive(Default)]
pub struct CheckpointList {
    /// The user's checkpoints, newest first.
    pub checkpoints: Vec<Checkpoint>,
    /// Directories of other users.
    pub foreign: Vec<(OsString, ObjectId)>,
    /// Checkpoints that could not be examined, with the error.
    pub failed: Vec<(OsString, ObjectId, CheckpointError)>,
}

/// A directory of checkpoints.
#[derive(Debug)]
pub struct Directory {
    /// The mount that serves the directory. `None` if the directory is in a backing that is not mounted.
    mount: Option<Mount>,
    /// Path of the directory.
    path: PathBuf,
    /// Descriptor of the directory.
    dir: OwnedFd,
    /// The user whose checkpoints are listed.
    uid: u32,
}

/// A checkpoint as the file system shows it, before firnd is asked about it.
struct ExaminedCheckpoint {
    /// Name of the checkpoint in its directory.
    name: OsString,
    /// Attributes of the directory or file that is the checkpoint.
    stat: Stat,
    /// The user's regular files in it.
    files: Vec<ExaminedFile>,
    /// Newest modification time of all objects of the user in it: seconds and nanoseconds.
    modified: (i64, i64),
    /// Newest change time (ctime) of all objects in it, in seconds. No program can set this time.
    changed_s: i64,
}

/// A regular file of a checkpoint.
struct ExaminedFile {
    /// Path relative to the directory of checkpoints.
    path: PathBuf,
    /// Size of the file in bytes, as stat(2) shows it.
    bytes: u64,
}

impl Directory {
    /// Opens the directory at a place of a mount.
    pub fn open(place: MountLocation) -> Result<Self, CheckpointError> {
        let path = place.mount.mount_point.join(&place.relative);
        Self::open_at(path, Some(place.mount))
    }

    /// Opens the directory at a path, whether or not it is on a mount.
    pub fn find(path: &Path) -> Result<Self, CheckpointError> {
        match find::find(path) {
            Ok(place) => Self::open(place),
            Err(ClientError::NoMount { .. }) => {
                let canonical = path.canonicalize().map_err(|error| {
                    failed(path)(Errno::from_io_error(&error).unwrap_or(Errno::IO))
                })?;
                Self::open_at(canonical, None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Opens the directory at a resolved path. `mount` is the mount that serves it, if there is one.
    fn open_at(path: PathBuf, mount: Option<Mount>) -> Result<Self, CheckpointError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(&path, flags, Mode::empty()).map_err(failed(&path))?;
        Ok(Self {
            mount,
            path,
            dir,
            uid: rustix::process::geteuid().as_raw(),
        })
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the file descriptor of the directory.
    pub fn dir(&self) -> &OwnedFd {
        &self.dir
    }

    /// Returns the user whose checkpoints are listed.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Returns whether the directory is on a mount, so that a firnd can be asked.
    pub fn is_mounted(&self) -> bool {
        self.mount.is_some()
    }

    /// Returns the arena that an earlier mount left in memory, for a directory in a backing that is not mounted.
    pub fn find_left_arena(&self) -> Option<PathBuf> {
        for dir in self.path.ancestors() {
            if let Err(ClientError::NoMount {
                arena: Some(arena), ..
            }) = find::find(dir)
            {
                return Some(arena);
            }
        }
        None
    }

    /// Returns the host whose memory holds the data that is not in the backing yet. Returns `None` if the directory
    /// is not on a mount.
    pub fn host(&self) -> Result<Option<String>, CheckpointError> {
        let Some(mount) = &self.mount else {
            return Ok(None);
        };
        let status = Connection::open(mount)?.status()?;
        for option in &status.options {
            if let Some(host) = option.strip_prefix("host=") {
                return Ok(Some(host.to_owned()));
            }
        }
        let system = rustix::system::uname();
        Ok(Some(system.nodename().to_string_lossy().into_owned()))
    }

    /// Lists the checkpoints that are directly in the directory, the newest first.
    ///
    /// A checkpoint of another user is listed as foreign, and one that cannot be examined as failed. The function fails
    /// if the directory cannot be read, or if firnd, the process that serves the mount, does not answer.
    pub fn list_checkpoints(&self) -> Result<CheckpointList, CheckpointError> {
        let mut listing = CheckpointList::default();
        let mut examined_checkpoints = Vec::new();
        let mut linked_names = HashSet::new();
        for name in list_names(&self.dir).map_err(failed(&self.path))? {
            // A name that has vanished since the listing is left out.
            let Some(stat) = self.stat_name(&name)? else {
                continue;
            };
            let path = self.path.join(&name);
            if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
                linked_names.extend(self.linked_checkpoint(&path));
            }
            if !is_checkpoint(&name, &stat) {
                continue;
            }
            if stat.st_uid != self.uid {
                listing.foreign.push((name, ObjectId::from_stat(&stat)));
                continue;
            }
            match self.examine(&name, stat) {
                Ok(checkpoint) => examined_checkpoints.push(checkpoint),
                Err(errno) => {
                    let error = failed(&path)(errno);
                    listing
                        .failed
                        .push((name, ObjectId::from_stat(&stat), error));
                }
            }
        }
        // Ask firnd after the listing. By then firnd knows each name that was found, and a checkpoint with a file that
        // was opened since then counts as incomplete.
        let firnd_state = self.ask_firnd()?;
        for examined in examined_checkpoints {
            let is_linked = linked_names.contains(&examined.name);
            let checkpoint = firnd_state.assess(examined, is_linked);
            listing.checkpoints.push(checkpoint);
        }
        sort_newest_first(&mut listing.checkpoints);
        Ok(listing)
    }

    /// Returns the attributes of a name in the directory. Returns `None` if the name does not exist.
    pub fn stat_name(&self, name: &OsStr) -> Result<Option<Stat>, CheckpointError> {
        match statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(failed(&self.path.join(name))(errno)),
        }
    }

    /// Returns whether a program has a file at or below a name open.
    pub fn is_open(&self, name: &OsStr) -> Result<bool, CheckpointError> {
        let Some(mount) = &self.mount else {
            return Ok(false);
        };
        let path = below_mount_point(mount, &self.path.join(name));
        let files = Connection::open(mount)?.files(&path.into())?;
        Ok(files.iter().any(|file| file.open))
    }

    /// Collects the user's files in the checkpoint `name` of the listed directory, and the newest modification and
    /// change time of the user's objects in it. `stat` is the status of the checkpoint itself.
    ///
    /// Fails if an object in the checkpoint cannot be examined.
    fn examine(&self, name: &OsStr, stat: Stat) -> Result<ExaminedCheckpoint, Errno> {
        let mut checkpoint = ExaminedCheckpoint {
            name: name.to_owned(),
            stat,
            files: Vec::new(),
            modified: (i64::MIN, 0),
            changed_s: i64::MIN,
        };
        visit_own(&self.dir, name, self.uid, &mut |path, stat| {
            // The width of these fields differs between architectures.
            #[allow(clippy::unnecessary_cast)]
            let modified = (stat.st_mtime as i64, stat.st_mtime_nsec as i64);
            #[allow(clippy::unnecessary_cast)]
            let changed_s = stat.st_ctime as i64;
            checkpoint.modified = checkpoint.modified.max(modified);
            checkpoint.changed_s = checkpoint.changed_s.max(changed_s);
            if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
                checkpoint.files.push(ExaminedFile {
                    path: path.to_owned(),
                    bytes: stat.st_size as u64,
                });
            }
        })?;
        Ok(checkpoint)
    }

    /// Returns what firnd, the process that serves the mount, reports about the files in the directory and about open
    /// transactions (changes that a program has neither committed nor aborted yet).
    ///
    /// If the directory is not on a mount, there is no firnd to ask. Then `transactions` is `None`, and no file is in
    /// use.
    fn ask_firnd(&self) -> Result<FirndState, CheckpointError> {
        let Some(mount) = &self.mount else {
            return Ok(FirndState {
                transactions: None,
                levels: Levels::for_unmounted_backing(),
                file_use_by_checkpoint: HashMap::new(),
                directory: self.path.clone(),
            });
        };
        let directory = below_mount_point(mount, &self.path);
        let place = MountLocation {
            mount: mount.clone(),
            relative: directory.as_path().into(),
        };
        let mut connection = Connection::open(mount)?;
        let status = connection.status()?;
        let levels = Levels::request(&mut connection, &place, &status)?;
        Ok(FirndState {
            transactions: Some(open_transactions(&status)),
            file_use_by_checkpoint: find_file_use(&levels, &directory),
            levels,
            directory,
        })
    }

    /// Returns the checkpoint to which, or into which, a symbolic link of this directory leads.
    fn linked_checkpoint(&self, link: &Path) -> Option<OsString> {
        let target = link.canonicalize().ok()?;
        let directory = self.path.canonicalize().ok()?;
        first_name(target.strip_prefix(directory).ok()?)
    }
}

/// Whether a name in a directory of checkpoints is a checkpoint, whatever user it belongs to.
fn is_checkpoint(name: &OsStr, stat: &Stat) -> bool {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => !name.as_bytes().starts_with(b"."),
        FileType::RegularFile => step_of(name).is_some(),
        _ => false,
    }
}

/// Sorts checkpoints, the newest first. Equal times come from the same clock tick. Then the step and the name decide,
/// so that the order is the same in each run.
fn sort_newest_first(checkpoints: &mut [Checkpoint]) {
    checkpoints.sort_by(|a, b| {
        b.modified
            .cmp(&a.modified)
            .then_with(|| b.step.cmp(&a.step))
            .then_with(|| b.name.cmp(&a.name))
    });
}

/// The state of a directory of checkpoints that firnd reports.
struct FirndState {
    /// The open transactions of the mount. `None` if the directory is not mounted, so that there is no firnd to ask.
    transactions: Option<Vec<OpenTransaction>>,
    /// The durability levels of the files in the directory.
    levels: Levels,
    /// How programs use or used the files of each checkpoint, including files that appeared after the listing.
    file_use_by_checkpoint: HashMap<OsString, FileUse>,
    /// Path of the directory in the form in which paths in `levels` begin.
    directory: PathBuf,
}

/// How programs use or used the files of a checkpoint.
#[derive(Clone, Copy, Default)]
struct FileUse {
    /// A program has a file open.
    is_open: bool,
    /// A program has a file open for writing.
    is_written: bool,
    /// The writer of a file ended before it closed the file.
    is_cut: bool,
}

/// An open transaction.
struct OpenTransaction {
    /// Path, below the mount point, of the directory that the transaction may change.
    scope: PathBuf,
    /// Start time in seconds since 1970; the transaction changed nothing before that. `None` if it is unknown.
    begun_s: Option<i64>,
}

impl FirndState {
    /// Returns a checkpoint, made from what the file system shows of it (`examined`) and what firnd (the process that
    /// serves the mount) reports about its files. `is_linked` means that a symbolic link in the directory leads to it.
    fn assess(&self, examined: ExaminedCheckpoint, is_linked: bool) -> Checkpoint {
        let totals = self.sum_files(&examined.files);
        let reported_use = self.file_use_by_checkpoint.get(&examined.name);
        let file_use = reported_use.copied().unwrap_or_default();
        let wholeness = self.state(&examined, file_use);
        Checkpoint {
            object: ObjectId::from_stat(&examined.stat),
            is_dir: FileType::from_raw_mode(examined.stat.st_mode) == FileType::Directory,
            step: step_of(&examined.name),
            modified: examined.modified,
            bytes: totals.bytes,
            held_bytes: totals.held_bytes,
            durable_bytes: totals.durable_bytes,
            files: examined.files.len() as u64,
            wholeness,
            is_open: file_use.is_open,
            level: totals.lowest_level,
            is_linked,
            name: examined.name,
        }
    }

    /// Sums up the bytes of files: all of them, those that are not in the served directory yet (held), and those that
    /// are synced there (durable). Also finds the lowest level, which says what the bytes of all the files survive.
    fn sum_files(&self, files: &[ExaminedFile]) -> FileTotals {
        let mut totals = FileTotals::default();
        for file in files {
            let path = self.directory.join(&file.path);
            let file_bytes = self.levels.size(&path, file.bytes);
            let level = self.levels.level(&path);
            let status = self.levels.known(&path);
            let held_bytes = status.map_or(0, |status| status.held_bytes);
            totals.bytes += file_bytes;
            totals.held_bytes += held_bytes.min(file_bytes);
            if level == DurabilityLevel::Durable {
                totals.durable_bytes += file_bytes;
            }
            totals.lowest_level = match totals.lowest_level {
                Some(lowest_level) => Some(lowest_level.min(level)),
                None => Some(level),
            };
        }
        totals
    }

    /// Returns whether a checkpoint can be used, or the first reason against it in the order below.
    ///
    /// `file_use` is what firnd, the process that serves the mount, reports about its files. A file is cut if its
    /// writer was killed before it closed the file. Without a mount the result is `Unknown`.
    fn state(&self, checkpoint: &ExaminedCheckpoint, file_use: FileUse) -> CheckpointState {
        let Some(transactions) = &self.transactions else {
            return CheckpointState::Unknown;
        };
        let path = self.directory.join(&checkpoint.name);
        let mut transactions = transactions.iter();
        if file_use.is_written {
            CheckpointState::Written
        } else if file_use.is_cut {
            CheckpointState::Cut
        } else if transactions.any(|open| open.may_have_changed(&path, checkpoint.changed_s)) {
            CheckpointState::InTransaction
        } else if checkpoint.files.is_empty() {
            CheckpointState::Empty
        } else {
            CheckpointState::Whole
        }
    }
}

/// Sums over the files of a checkpoint.
#[derive(Default)]
struct FileTotals {
    /// Size of the files in bytes.
    bytes: u64,
    /// Bytes that are not in the backing yet.
    held_bytes: u64,
    /// Bytes that a sync made durable.
    durable_bytes: u64,
    /// `None` if there are no files.
    lowest_level: Option<DurabilityLevel>,
}

impl OpenTransaction {
    /// Returns whether the transaction may have changed the checkpoint at a path below the mount point. `changed_s` is
    /// the newest change time of an object in the checkpoint.
    ///
    /// A transaction whose scope is inside the checkpoint may always have changed it. A transaction whose scope
    /// contains the checkpoint may have changed it if something in the checkpoint changed after the transaction
    /// began.
    fn may_have_changed(&self, checkpoint: &Path, changed_s: i64) -> bool {
        let is_scope_inside = self.scope.starts_with(checkpoint);
        if is_scope_inside {
            return true;
        }
        let is_scope_around = checkpoint.starts_with(&self.scope);
        let clock_difference_s = CLOCK_DIFFERENCE_MAX.as_secs() as i64;
        let has_changed_since = match self.begun_s {
            Some(begun_s) => changed_s >= begun_s - clock_difference_s,
            None => true,
        };
        is_scope_around && has_changed_since
    }
}

/// Returns the use of the files that firnd lists, by checkpoint: the name in `directory` that a file is at or below.
fn find_file_use(levels: &Levels, directory: &Path) -> HashMap<OsString, FileUse> {
    let mut file_use_by_checkpoint = HashMap::<OsString, FileUse>::new();
    for file in levels.all_known() {
        let path = file.path.as_path();
        let relative_path = path.strip_prefix(directory).unwrap_or(path);
        let Some(checkpoint_name) = first_name(relative_path) else {
            continue;
        };
        let file_use = file_use_by_checkpoint.entry(checkpoint_name).or_default();
        file_use.is_open |= file.open;
        file_use.is_written |= file.ending == Ending::Open;
        file_use.is_cut |= file.ending == Ending::Cut;
    }
    file_use_by_checkpoint
}

/// Returns the open transactions that firnd reports in its status.
fn open_transactions(status: &Status) -> Vec<OpenTransaction> {
    let now = SystemTime::now();
    let mut open_transactions = Vec::with_capacity(status.transactions.len());
    for transaction in &status.transactions {
        let age = transaction.age_seconds;
        open_transactions.push(OpenTransaction {
            scope: transaction.scope.as_path().to_owned(),
            begun_s: age.and_then(|age_seconds| start_time_s(now, age_seconds)),
        });
    }
    open_transactions
}

/// Returns the start time of a transaction in seconds since 1970. Returns `None` if the age makes no sense.
fn start_time_s(now: SystemTime, age_seconds: f64) -> Option<i64> {
    let age = Duration::try_from_secs_f64(age_seconds).ok()?;
    let start_time = now.checked_sub(age)?;
    let since_epoch = start_time.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    i64::try_from(since_epoch.as_secs()).ok()
}

/// Returns a path of a mount as a path below its mount point.
fn below_mount_point(mount: &Mount, path: &Path) -> PathBuf {
    path.strip_prefix(&mount.mount_point)
        .unwrap_or(path)
        .to_owned()
}

/// Returns the first name of a relative path. Returns `None` if the path is empty or begins with `..`.
fn first_name(path: &Path) -> Option<OsString> {
    match path.components().next() {
        Some(Component::Normal(name)) => Some(name.to_owned()),
        _ => None,
    }
}

/// Returns a function that makes the error of a failed call on a path.
pub fn failed(path: &Path) -> impl Fn(Errno) -> CheckpointError {
    move |errno| CheckpointError::System {
        path: path.to_owned(),
        errno,
    }
}
