//! The log layout, a file system layer: several hosts can write the same file, because each host appends its writes to
//! a log of its own. The layer is a backing (the trait for file systems that Firn can use) on top of another backing.
//!
//! Terms
//! * A *chosen* file is one that the layout logs, by its name. All other files, names and attributes go to the backing
//!   below unchanged.
//! * The *plain* file is the ordinary file in the backing below. A *container* of it is a directory with the logs and
//!   indexes of all hosts. A log has bytes, and its index says where they belong.
//! * A file is *flat* when all its bytes are in the plain file and it has no container.
//!
//! Once a file has a container, every host reads it through its containers until it is flat, even a host that does not
//! choose the file.
//!
//! How other hosts' changes become visible
//! * A *listing* names the files that have containers. It is made again when it is older than [`Setup::view_age_max`].
//! * After a new listing, the first use of a file refreshes that file's containers: it reads what was added to their
//!   indexes.
//! * An open, and the first use after a sync, refresh them at once.
//!
//! How the last name of a file is removed: its containers are marked before the removal and again after it. The marks
//! let a host finish a removal that a crash has interrupted (`crate::orphans`).

mod calls;
mod settle;

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use firn_backing::lock::Mutex;
use firn_backing::{Access, Attr, Backing, Errno, Kind, Result, SetTime, Time};
use firn_hosts::OwnError;
use firn_hosts::own::{self, STUBS, TOP};

pub use self::settle::{LoggedTotals, UnflattenedFiles};

use self::settle::{DeadHosts, SettleQueue};
use crate::container::Memory;
use crate::file::{LayoutContext, LoggedFile};
use crate::file_dir;
use crate::file_id::FileId;
use crate::orphans::{self, CleanUpContext, DEAD, DYING};
use crate::tag::{self, ContainersDirId};
use crate::turn;

/// Name of the directory of all containers, in `.firn/`.
pub const CONTAINERS: &str = own::LOGS;

/// Opens the directory of all containers, and makes it if it is missing.
pub fn make_dir<B: Backing>(backing: &B) -> std::result::Result<B::Inode, OwnError> {
    let firn = own::make_dir(backing, &backing.root(), TOP)?;
    own::make_dir(backing, &firn, CONTAINERS).map_err(|error| error.below(TOP))
}

/// Returns the identities of those open files that have lost their last name.
fn read_ids_without_name<B: Backing>(
    backing: &B,
    open_files: Vec<OwnedFd>,
) -> Result<HashSet<FileId>> {
    let mut ids = HashSet::new();
    for descriptor in open_files {
        let adopted = backing.adopt(descriptor)?;
        if adopted.attr.nlink == 0 {
            ids.extend(FileId::read(backing, &adopted.inode, &adopted.attr)?);
        }
    }
    Ok(ids)
}

/// Bound on table blocks in memory, of all files. One reader may take half of it, which holds one block of each index
/// even for a file that many hosts wrote.
const INDEX_BYTES_MAX: u64 = 32 << 20;
/// Shortest time between two updates of a plain file's modification time. Each update is a call to the server.
const MTIME_UPDATE_INTERVAL: Duration = Duration::from_secs(1);

/// Returns whether a new file with this name is logged.
pub type Chooser = Box<dyn Fn(&OsStr) -> bool + Send + Sync>;
/// Returns whether a host is alive.
pub type Liveness = Box<dyn Fn(&str) -> Result<bool> + Send + Sync>;

/// Minimum time for which a list of where bytes lie must be valid. Otherwise the list is not made, because a list costs
/// as much as some reads.
const LOCATED_FOR_MIN: Duration = Duration::from_millis(20);

/// What happens to the logs of a file after the last host has closed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenClosed {
    /// The last close returns when the logs are flattened.
    Flatten,
    /// The last close returns when the logs are published. [`LogBacking::settle`] flattens them later.
    FlattenBehind,
    /// The logs stay as they are.
    Keep,
}

/// The parameters of a log layout.
pub struct Setup {
    /// Name of this host.
    pub host: String,
    /// Chooses the files that are logged.
    pub chooses: Chooser,
    /// Returns whether a host is alive.
    pub is_alive: Liveness,
    /// Longest age of the listing of files with containers.
    pub view_age_max: Duration,
    /// Maximum time for which the backing hides changes of other hosts. An operation that fails is repeated for this
    /// long.
    pub lag_max: Duration,
    /// How many bytes of a file one host flattens at a time.
    pub unit_bytes: u64,
    /// What happens to the logs of a file after the last host has closed it.
    pub when_closed: WhenClosed,
    /// Whether an open for reading flattens the logs too.
    pub flattens_read: bool,
}

/// A backing whose chosen files lie in logs.
pub struct LogBacking<B: Backing> {
    /// The backing with the plain files and the containers.
    below: B,
    /// The directory of all containers.
    containers_dir: B::Inode,
    containers_dir_id: ContainersDirId,
    /// Memory for table blocks of all files.
    memory: Arc<Memory>,
    /// This host's turn, which selects the lane of its logs; 0 without lanes.
    turn: u64,
    setup: Setup,
    files: Mutex<KnownFiles<B>>,
    /// The queue of files to flatten or remove.
    settle_queue: Arc<SettleQueue<B>>,
    /// Number of files that were dropped from `files`. A look-up compares it to notice that a file became flat.
    forget_count: AtomicU64,
    /// Containers of files that this host was removing when it last ran, and has not begun to remove again.
    marked: Mutex<HashSet<String>>,
    /// The dead hosts whose removals were finished; `None` before the first search.
    dead_hosts: Mutex<Option<DeadHosts>>,
}

/// The files that this host knows, and the last listing.
struct KnownFiles<B: Backing> {
    /// Files with containers, and files that this host has open for writing.
    by_id: HashMap<FileId, Arc<LoggedFile<B>>>,
    /// Files whose last name this host is removing. A container that is made for such a file gets a mark.
    losing_last_name: HashSet<FileId>,
    /// When the last listing began, or the present one if a thread is making one.
    last_listing_began: Option<Instant>,
    listing: Arc<Listing>,
}

impl<B: Backing> KnownFiles<B> {
    /// Returns the file with this id. Adds it if it is not known.
    fn find_or_add(&mut self, id: FileId) -> &Arc<LoggedFile<B>> {
        self.by_id
            .entry(id)
            .or_insert_with(|| Arc::new(LoggedFile::new(id)))
    }
}

/// The ids of all files that had containers at one moment. Containers are read only at the first use of their file, so
/// the cost depends on the files in use.
#[derive(Default)]
struct Listing {
    began: Option<Instant>,
    files: HashSet<FileId>,
}

/// An inode of a [`LogBacking`].
pub struct LogInode<B: Backing> {
    below: B::Inode,
    /// Identity of a file; `None` for other objects, and for files that cannot have one.
    id: Option<FileId>,
    is_chosen: bool,
    /// Region of a directory.
    region: Region,
}

/// A file whose last name is being removed.
struct FileLosingName<B: Backing> {
    inode: B::Inode,
    id: FileId,
}

/// The part of the backing in which an object lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Region {
    /// The top directory.
    Top,
    /// `.firn`.
    Firn,
    /// Below `.firn`, where no file is chosen.
    Own,
    /// The directories and files of programs.
    Files,
}

impl Region {
    /// Returns the region of the object `name` in a directory of this region.
    fn child_region(self, name: &OsStr) -> Self {
        match self {
            Self::Top if name == TOP => Self::Firn,
            // New files of programs lie here before they get their names.
            Self::Firn if name == STUBS => Self::Files,
            Self::Firn | Self::Own => Self::Own,
            Self::Top | Self::Files => Self::Files,
        }
    }
}

impl<B: Backing> Clone for LogInode<B> {
    fn clone(&self) -> Self {
        Self {
            below: self.below.clone(),
            ..*self
        }
    }
}

/// An open file of a [`LogBacking`]: the open plain file, and the logged file if there is one.
pub struct LogFile<B: Backing> {
    below: B::File,
    logged: Option<LoggedDescriptor<B>>,
}

/// An open descriptor of a file that may be logged. When this host closes its last writing descriptor, it ends its
/// writing.
struct LoggedDescriptor<B: Backing> {
    file: Arc<LoggedFile<B>>,
    inode: B::Inode,
    access: Access,
    settle_queue: Arc<SettleQueue<B>>,
}

impl<B: Backing> Drop for LoggedDescriptor<B> {
    fn drop(&mut self) {
        let file = &self.file;
        let is_last_close = file.opens.fetch_sub(1, Ordering::AcqRel) == 1;
        let may_write = self.access != Access::Read;
        let is_last_writer = may_write && file.writers.fetch_sub(1, Ordering::AcqRel) == 1;
        let is_removed = file.is_removed.load(Ordering::Acquire);
        if is_last_writer {
            file.clear_local_writer();
        }
        if (is_last_writer && file.has_containers()) || (is_last_close && is_removed) {
            self.settle_queue.add(file, &self.inode);
        }
    }
}

impl<B: Backing> LogFile<B> {
    /// Returns the logged file to write to, or `None` for a plain one. Fails with `errno` if the descriptor is of a
    /// logged file and cannot write.
    fn file_to_write(&self, errno: Errno) -> Result<Option<&Arc<LoggedFile<B>>>> {
        match &self.logged {
            None => Ok(None),
            Some(descriptor) if descriptor.access == Access::Read => Err(errno),
            Some(descriptor) => Ok(Some(&descriptor.file)),
        }
    }

    /// Returns the logged file if it has bytes in logs.
    fn file_in_logs(&self) -> Option<&Arc<LoggedFile<B>>> {
        let descriptor = self.logged.as_ref()?;
        descriptor.file.is_logged().then_some(&descriptor.file)
    }
}

impl<B: Backing> LogBacking<B> {
    /// Opens the log layout over `below`. Its directory there is `.firn/log`. Finishes this host's own interrupted
    /// removals.
    pub fn open(below: B, setup: Setup) -> std::result::Result<Self, OwnError> {
        Self::resume(below, setup, Vec::new())
    }

    /// Opens the log layout as [`LogBacking::open`] does, to continue the mount of an earlier process of this host.
    ///
    /// `open_unlinked_files` are files that programs have open, and that may have no name any more. The containers of
    /// such files (the directories with their logs) are not removed.
    pub fn resume(
        below: B,
        setup: Setup,
        open_unlinked_files: Vec<OwnedFd>,
    ) -> std::result::Result<Self, OwnError> {
        let open_files = read_ids_without_name(&below, open_unlinked_files)?;
        let containers_dir = make_dir(&below)?;
        let containers_dir_id = ContainersDirId::from_attr(&below.attr(&containers_dir)?);
        // Fails if there are logs of an earlier version. This check comes before any change.
        file_dir::list_files(&below, &containers_dir)?;
        let clean_up = CleanUpContext {
            host: &setup.host,
            is_alive: &setup.is_alive,
            open_files: &open_files,
        };
        let marked = orphans::clean_up_previous_run(&below, &containers_dir, &clean_up)?;
        // A turn selects the lane (server) for logs. A backing without lanes needs none.
        let turn = match below.lane_of_turn(0) {
            Some(_) => turn::acquire_turn(&below, &containers_dir, &setup.host, &setup.is_alive),
            None => 0,
        };
        Ok(Self {
            below,
            containers_dir,
            containers_dir_id,
            turn,
            memory: Memory::new(INDEX_BYTES_MAX),
            setup,
            files: Mutex::new(KnownFiles {
                by_id: HashMap::new(),
                losing_last_name: HashSet::new(),
                last_listing_began: None,
                listing: Arc::default(),
            }),
            forget_count: AtomicU64::new(0),
            marked: Mutex::new(marked),
            dead_hosts: Mutex::default(),
            settle_queue: Arc::new(SettleQueue::new()),
        })
    }

    /// Returns the backing below.
    pub fn below(&self) -> &B {
        &self.below
    }

    /// Sets the bound on table blocks in memory to `bytes` bytes.
    #[must_use]
    pub fn with_memory(self, bytes: u64) -> Self {
        let memory = Memory::new(bytes);
        Self { memory, ..self }
    }

    /// Returns what operations on containers need to know of this backing and host.
    fn context(&self) -> LayoutContext<'_, B> {
        LayoutContext {
            backing: &self.below,
            containers_dir: &self.containers_dir,
            containers_dir_id: self.containers_dir_id,
            host: &self.setup.host,
            turn: self.turn,
            memory: &self.memory,
            lag_max: self.setup.lag_max,
            is_alive: &self.setup.is_alive,
        }
    }

    /// Makes the inode of the object `name` in the directory `parent`.
    fn make_child_inode(
        &self,
        parent: &LogInode<B>,
        name: &OsStr,
        below: B::Inode,
        attr: &Attr,
    ) -> Result<LogInode<B>> {
        let region = parent.region.child_region(name);
        let is_chosen = attr.kind == Kind::File && self.chooses_name(region, name);
        self.make_inode(below, attr, region, is_chosen)
    }

    /// Returns whether a file with this name in this region is logged.
    fn chooses_name(&self, region: Region, name: &OsStr) -> bool {
        region != Region::Own && (self.setup.chooses)(name)
    }

    /// Makes this layer's inode of an object of the backing below. A chosen file, which gets its new bytes in logs,
    /// gets an identity if it has none.
    fn make_inode(
        &self,
        below: B::Inode,
        attr: &Attr,
        region: Region,
        is_chosen: bool,
    ) -> Result<LogInode<B>> {
        let id = if is_chosen {
            // A file that cannot get an identity stays plain: no bytes of it go to logs.
            FileId::read_or_assign(&self.below, &below, attr).unwrap_or(None)
        } else {
            FileId::read(&self.below, &below, attr)?
        };
        Ok(LogInode {
            below,
            id,
            is_chosen,
            region,
        })
    }

    /// Returns the file with this id if this host knows it. First refreshes it if a newer listing makes that due.
    fn find_known(&self, id: Option<FileId>) -> Result<Option<Arc<LoggedFile<B>>>> {
        let Some(id) = id else {
            return Ok(None);
        };
        self.refresh_listing()?;
        let Some(file) = self.files.lock().by_id.get(&id).cloned() else {
            return Ok(None);
        };
        self.refresh_file(&file);
        // The refresh may have found the file flat.
        self.forget_if_unused(&file);
        Ok(self.files.lock().by_id.get(&id).cloned())
    }

    /// Returns the file with this id after a refresh, which reads what other hosts added to its logs. Returns `None` if
    /// it has no containers, the directories with its logs.
    ///
    /// Called before the file's time is set. If another host is copying the logs to the plain file, the time must also
    /// be recorded in the containers ([`LoggedFile::set_modified`]), so this host must know all of them.
    fn find_and_refresh(&self, id: Option<FileId>) -> Result<Option<Arc<LoggedFile<B>>>> {
        let Some(id) = id else {
            return Ok(None);
        };
        let known_file = self.find_known(Some(id))?;
        if known_file.is_none() && file_dir::find(&self.below, &self.containers_dir, id)?.is_none()
        {
            return Ok(None);
        }
        let file = match known_file {
            Some(file) => file,
            None => self.find_or_add(id)?,
        };
        // Ignore the error: the time can be set even if the containers cannot be read.
        if let Err(error) = file.refresh(&self.context()) {
            tracing::debug!(ino = id.ino, %error, "containers cannot be read");
        }
        Ok(Some(file))
    }

    /// Makes a new listing if the last one is older than [`Setup::view_age_max`].
    fn refresh_listing(&self) -> Result<()> {
        self.refresh_listing_older_than(self.setup.view_age_max)
    }

    /// Makes a new listing if the last one is older than `age_max`. Drops files that have no containers any more.
    ///
    /// One thread makes a listing and the others use the old one meanwhile. Before the first listing is complete, each
    /// thread makes its own.
    fn refresh_listing_older_than(&self, age_max: Duration) -> Result<()> {
        if !self.claim_due_listing(age_max) {
            return Ok(());
        }
        let began = Instant::now();
        let listed_ids: HashSet<FileId> = file_dir::list_files(&self.below, &self.containers_dir)?
            .into_iter()
            .collect();
        for file in self.store_listing(began, listed_ids) {
            self.refresh_file(&file);
            self.forget_if_unused(&file);
        }
        Ok(())
    }

    /// Returns whether this thread must make a listing: there is none yet, or the last one is older than `age_max`.
    fn claim_due_listing(&self, age_max: Duration) -> bool {
        let mut files = self.files.lock();
        // Until the first listing is complete, each thread makes one.
        let is_first = files.listing.began.is_none();
        let is_old = files
            .last_listing_began
            .is_none_or(|began| began.elapsed() >= age_max);
        if is_first || is_old {
            files.last_listing_began = Some(Instant::now());
            return true;
        }
        false
    }

    /// Adds the listed files (those with bytes in logs) to the known ones, and stores the listing unless a newer one is
    /// stored. Returns the known files that are not listed. `began` is when the listing began.
    fn store_listing(
        &self,
        began: Instant,
        listed_ids: HashSet<FileId>,
    ) -> Vec<Arc<LoggedFile<B>>> {
        let mut files = self.files.lock();
        for &id in &listed_ids {
            files.find_or_add(id);
        }
        let unlisted_files = files
            .by_id
            .values()
            .filter(|file| !listed_ids.contains(&file.id))
            .map(Arc::clone)
            .collect();
        if files.listing.began < Some(began) {
            files.listing = Arc::new(Listing {
                began: Some(began),
                files: listed_ids,
            });
        }
        unlisted_files
    }

    /// Refreshes a file unless it was refreshed since the last listing began.
    fn refresh_file(&self, file: &LoggedFile<B>) {
        let listing = Arc::clone(&self.files.lock().listing);
        let Some(began) = listing.began else {
            return;
        };
        let is_listed = listing.files.contains(&file.id);
        // An error is not returned here: the next open or read of the file returns it.
        let context = self.context();
        let refreshed = file.refresh_after_listing(&context, began, is_listed);
        if let Err(error) = refreshed.and_then(|()| file.refresh_after_sync(&context)) {
            tracing::debug!(ino = file.id.ino, %error, "containers cannot be read");
        }
    }

    /// Returns the file with this id. Adds it if this host does not know it.
    fn find_or_add(&self, id: FileId) -> Result<Arc<LoggedFile<B>>> {
        self.refresh_listing()?;
        Ok(Arc::clone(self.files.lock().find_or_add(id)))
    }

    /// Returns the attributes that programs see: the length and the modification time include what is in logs.
    /// `read_plain` reads the attributes of the plain file, the ordinary file in the backing below.
    ///
    /// Race: another host may move bytes from logs to the plain file between the two reads. Both are then read again.
    fn visible_attr(
        &self,
        logged: Option<&Arc<LoggedFile<B>>>,
        read_plain: &dyn Fn() -> Result<Attr>,
    ) -> Result<Attr> {
        let Some(file) = logged else {
            return read_plain();
        };
        loop {
            file.check_exists()?;
            // This number grows before the list of the file's containers changes.
            let changes = file.changes.load(Ordering::Acquire);
            let plain_attr = read_plain()?;
            let size = file.len(plain_attr.size);
            let mtime = file.modified_time().unwrap_or(plain_attr.mtime);
            if file.changes.load(Ordering::Acquire) == changes {
                return Ok(Attr {
                    size,
                    mtime,
                    ..plain_attr
                });
            }
        }
    }

    /// Opens the logged file of an inode: a file that has bytes in logs, or that the configuration has *chosen* to get
    /// its new bytes in logs. Returns `None` for every other file.
    fn open_logged(
        &self,
        inode: &LogInode<B>,
        access: Access,
    ) -> Result<Option<LoggedDescriptor<B>>> {
        let Some(id) = inode.id else {
            return Ok(None);
        };
        self.refresh_listing()?;
        // Another host may have made a container (a directory with the file's logs) since the listing. For a chosen
        // file, `refresh_at_open` below finds it.
        if !inode.is_chosen && !self.files.lock().by_id.contains_key(&id) {
            self.refresh_listing_older_than(Duration::ZERO)?;
        }
        let Some(file) = self.register_open(id, inode.is_chosen, access) else {
            // Fails if the file should have containers and they are missing.
            tag::check(&self.below, &inode.below, id, self.containers_dir_id)?;
            return Ok(None);
        };
        let descriptor = LoggedDescriptor {
            file,
            inode: inode.below.clone(),
            access,
            settle_queue: Arc::clone(&self.settle_queue),
        };
        descriptor.file.inode.get_or_init(|| inode.below.clone());
        self.refresh_at_open(&descriptor)?;
        // With this option, the logs of a file that is only read are copied to the plain file too.
        let flattens_at_open = access == Access::Read && self.setup.flattens_read;
        if flattens_at_open && descriptor.file.is_logged() {
            self.settle_queue.add(&descriptor.file, &descriptor.inode);
        }
        Ok(Some(descriptor))
    }

    /// Counts a new descriptor of the file with this id, and returns the file. Adds the file if it is chosen: its new
    /// bytes go to logs. Returns `None` if it is neither known (it has no logs) nor chosen.
    fn register_open(
        &self,
        id: FileId,
        is_chosen: bool,
        access: Access,
    ) -> Option<Arc<LoggedFile<B>>> {
        let mut files = self.files.lock();
        let file = if is_chosen {
            Arc::clone(files.find_or_add(id))
        } else {
            Arc::clone(files.by_id.get(&id)?)
        };
        // This host is removing the last name of the file.
        if files.losing_last_name.contains(&id) {
            file.is_dying.store(true, Ordering::Release);
        }
        // The count grows under the lock, so that another thread does not drop the file meanwhile.
        file.opens.fetch_add(1, Ordering::AcqRel);
        if access != Access::Read {
            file.writers.fetch_add(1, Ordering::AcqRel);
        }
        Some(file)
    }

    /// Refreshes a file at its open: reads what other hosts wrote before they closed the file (close-to-open
    /// consistency). Orders this host's next writes after those writes.
    ///
    /// Fails if the file should have logs and they are missing. A refresh that fails is repeated while the backing may
    /// not show the latest changes of other hosts yet.
    fn refresh_at_open(&self, descriptor: &LoggedDescriptor<B>) -> Result<()> {
        let context = self.context();
        let file = &descriptor.file;
        file.retry_while_lagging(&context, &mut || file.refresh(&context))?;
        if descriptor.access != Access::Read {
            // Later writes of this host get a larger epoch, so they count as newer.
            file.raise_epoch();
        }
        if !file.is_logged() {
            // Ask the server for the attributes, which also updates this host's cache: another host may have changed
            // the plain file. The check then sees its present tag.
            self.below.attr_now(&descriptor.inode)?;
            tag::check(
                &self.below,
                &descriptor.inode,
                file.id,
                self.containers_dir_id,
            )?;
        }
        Ok(())
    }

    /// Registers this host as a writer of the file, so that no other host flattens it.
    fn begin_writing(&self, file: &LogFile<B>, descriptor: &LoggedDescriptor<B>) -> Result<()> {
        let plain_len = || self.plain_len(file);
        let context = self.context();
        let logged = &descriptor.file;
        logged.retry_while_lagging(&context, &mut || logged.begin_writing(&context, &plain_len))
    }

    /// Sets the modification time of the plain file, the ordinary file with the name, after a write by this host to a
    /// log. Does so at most once in [`MTIME_UPDATE_INTERVAL`].
    fn update_mtime(&self, file: &LogFile<B>) {
        let Some(descriptor) = &file.logged else {
            return;
        };
        let (logged, inode) = (&descriptor.file, &descriptor.inode);
        {
            let mut last_update = logged.last_mtime_update.lock();
            if last_update.is_some_and(|updated| updated.elapsed() < MTIME_UPDATE_INTERVAL) {
                return;
            }
            *last_update = Some(Instant::now());
        }
        let set_plain_mtime = || self.below.set_times(inode, SetTime::Keep, SetTime::Now);
        let outcome = logged.set_modified(&self.context(), Time::now(), &set_plain_mtime);
        if let Err(error) = outcome {
            // The bytes are written all the same, so the write does not fail.
            tracing::debug!(ino = logged.id.ino, %error, "cannot set the time of a logged file");
        }
    }

    /// Makes this host's writes to the logs of all files durable.
    fn sync_logs(&self) -> Result<()> {
        let files: Vec<_> = self.files.lock().by_id.values().map(Arc::clone).collect();
        for file in files {
            let context = self.context();
            file.retry_while_lagging(&context, &mut || file.sync(&context))?;
        }
        Ok(())
    }

    /// Returns the file that the removal of `name` would leave without a name. Returns `None` if the file has other
    /// names, or if the object cannot be a logged file.
    fn find_file_losing_name(
        &self,
        parent: &B::Inode,
        name: &OsStr,
    ) -> Result<Option<FileLosingName<B>>> {
        let (inode, attr) = match self.below.lookup(parent, name) {
            Ok(entry) => entry,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error),
        };
        match FileId::read(&self.below, &inode, &attr)? {
            Some(id) if attr.nlink == 1 => Ok(Some(FileLosingName { inode, id })),
            _ => Ok(None),
        }
    }

    /// Marks the containers of a file. Repeats this while the backing lags behind other hosts.
    fn mark(&self, file: &LoggedFile<B>, mark: &str) -> Result<()> {
        let context = self.context();
        file.retry_while_lagging(&context, &mut || file.mark(&context, mark))
    }

    /// Begins the removal of a file's last name: marks its containers (the directories with its logs). A container that
    /// is made later gets the mark when it is made. Does nothing if no file loses its last name.
    fn begin_removal(&self, file_losing_name: Option<&FileLosingName<B>>) -> Result<()> {
        let Some(FileLosingName { id, .. }) = file_losing_name else {
            return Ok(());
        };
        self.forget_earlier_removal(*id);
        self.refresh_listing()?;
        let known_file = {
            let mut files = self.files.lock();
            files.losing_last_name.insert(*id);
            files.by_id.get(id).cloned()
        };
        let Some(file) = known_file else {
            return Ok(());
        };
        file.is_dying.store(true, Ordering::Release);
        self.mark(&file, DYING)
            .inspect_err(|_| self.cancel_removal(&file))
    }

    /// Forgets the marks that this host put into containers of the file before it last ended. The earlier removal must
    /// not be mistaken for the one that begins now.
    fn forget_earlier_removal(&self, id: FileId) {
        self.marked.lock().retain(|container| {
            let parsed_name = FileId::parse_container_name(container.as_bytes());
            parsed_name.is_none_or(|(marked_id, _)| marked_id != id)
        });
    }

    /// Marks the containers of a file whose last name this host has removed. They are removed when this host has closed
    /// the file.
    fn mark_removed(&self, file: &LoggedFile<B>) -> Result<()> {
        let marked = self.mark(file, DEAD);
        file.is_removed.store(marked.is_ok(), Ordering::Release);
        marked
    }

    /// Ends a removal that has failed: the file keeps its name.
    fn cancel_removal(&self, file: &LoggedFile<B>) {
        file.is_dying.store(false, Ordering::Release);
        self.files.lock().losing_last_name.remove(&file.id);
    }

    /// Finishes the removal of a last name, and returns `outcome`, the result of the removal itself, or an error of its
    /// own.
    ///
    /// If `outcome` is an error, the name still exists, and the marks of the file's containers (the directories with
    /// its logs) are removed. Otherwise the containers are marked for their removal after the last close.
    fn finish_removal(
        &self,
        file_losing_name: Option<FileLosingName<B>>,
        outcome: Result<()>,
    ) -> Result<()> {
        let Some(FileLosingName { inode, id }) = file_losing_name else {
            return outcome;
        };
        // Another host may have made the first container of the file during the removal. An error of this listing
        // counts only if this host knows no such file.
        let refreshed = self.refresh_listing();
        let known_file = {
            let mut files = self.files.lock();
            let known_file = files.by_id.get(&id).cloned();
            if known_file.is_none() {
                files.losing_last_name.remove(&id);
            }
            known_file
        };
        let Some(file) = known_file else {
            return refreshed.and(outcome);
        };
        if outcome.is_err() {
            self.cancel_removal(&file);
            let context = self.context();
            file.retry_while_lagging(&context, &mut || file.unmark(&context))?;
            return outcome;
        }
        let marked = self.mark_removed(&file);
        self.files.lock().losing_last_name.remove(&id);
        marked?;
        // A file that is still open keeps its containers until the last close.
        if file.opens.load(Ordering::Acquire) == 0 {
            self.settle_queue.add(&file, &inode);
        }
        Ok(())
    }
}
