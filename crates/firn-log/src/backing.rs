//! The log layout as a backing over a backing: the bytes of chosen files lie in containers.
//!
//! Names, attributes and files that are not chosen go to the backing below. Once a file has a container, every host
//! reads it through containers until it is flat, also a host that does not choose it.

mod calls;
mod settle;

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use firn_backing::lock::Mutex;
use firn_backing::{Access, Attr, Backing, Errno, Kind, Result, SetTime, Time};
use firn_hosts::OwnError;
use firn_hosts::own::{self, STUBS, TOP};

pub use self::settle::{Left, Logged};

use self::settle::{Ended, HostsGone};
use crate::container::Memory;
use crate::file::{ContainerSite, LoggedFile};
use crate::file_dir;
use crate::file_id::FileId;
use crate::orphans::{self, DEAD, DYING};
use crate::tag::{self, TopId};
use crate::turn;

/// Name of the directory of all containers, in `.firn/`.
pub const CONTAINERS: &str = own::LOGS;

/// Opens the directory of all containers; makes it if it is missing.
pub fn make_dir<B: Backing>(base: &B) -> std::result::Result<B::Inode, OwnError> {
    let firn = own::dir(base, &base.root(), TOP)?;
    own::dir(base, &firn, CONTAINERS).map_err(|error| error.below(TOP))
}

/// Bytes of sorted indexes in memory, of all files: half of what a reader may take, and a block of each index of a file
/// that many hosts wrote.
const INDEX_BYTES_MAX: u64 = 32 << 20;
/// Shortest time between two updates of a plain file's modification time; each update costs its server a call.
const MODIFIED_EVERY: Duration = Duration::from_secs(1);

/// Returns whether a new file with this name is logged.
pub type Chooser = Box<dyn Fn(&OsStr) -> bool + Send + Sync>;
/// Returns whether a host is alive.
pub type Liveness = Box<dyn Fn(&str) -> Result<bool> + Send + Sync>;

/// Shortest validity of a list of places of bytes: a new list costs as much as some reads.
const LOCATED_FOR_MIN: Duration = Duration::from_millis(20);

/// What happens to the logs of a file after the last host has closed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenClosed {
    /// The last close returns when they are flattened.
    Flatten,
    /// The last close returns when they are published; [`LogBacking::settle`] flattens them.
    FlattenBehind,
    /// Logs stay as they are.
    Keep,
}

/// Parameters of a mount with the log layout.
pub struct Setup {
    /// Name of this host.
    pub host: String,
    /// Chooses the files that are logged.
    pub chooses: Chooser,
    /// Tells which hosts are alive.
    pub is_alive: Liveness,
    /// Longest age of this host's view of the containers.
    pub patience: Duration,
    /// Longest delay until the backing shows changes of other hosts. An unexpected state is read again for this long.
    pub lag_max: Duration,
    /// Bytes of a file that one host flattens at a time.
    pub unit_bytes: u64,
    /// What happens to the logs of a file after the last host has closed it.
    pub when_closed: WhenClosed,
    /// Whether an open for reading flattens the logs too.
    pub flattens_read: bool,
}

/// See the module.
pub struct LogBacking<B: Backing> {
    below: B,
    top: B::Inode,
    top_id: TopId,
    memory: Arc<Memory>,
    /// Turn of this host's logs among the lanes below; 0 without lanes.
    turn: u64,
    setup: Setup,
    files: Mutex<Files<B>>,
    ended: Arc<Ended<B>>,
    /// Number of files that were forgotten, because they were flat or gone.
    forgotten: AtomicU64,
    /// Containers of files that this host was removing when it ran last.
    marked: Mutex<HashSet<String>>,
    /// Dead hosts whose removals were finished; None before the first search.
    hosts_gone: Mutex<Option<HostsGone>>,
}

struct Files<B: Backing> {
    /// Files with containers, and files that this host has open for writing.
    known: HashMap<FileId, Arc<LoggedFile<B>>>,
    /// Files whose last name this host is removing: an open of one makes no container without a mark.
    dying: HashSet<FileId>,
    /// When the files with containers were listed last, or are being listed.
    listed: Option<Instant>,
    listing: Arc<Listing>,
}

/// The files with containers at one moment. Containers are listed and read at the first use of their file, so the cost
/// follows the files in use.
#[derive(Default)]
struct Listing {
    began: Option<Instant>,
    files: HashSet<FileId>,
}

/// An object of a [`LogBacking`].
pub struct LogInode<B: Backing> {
    below: B::Inode,
    /// Id of a file; None for other objects.
    id: Option<FileId>,
    is_chosen: bool,
    /// Region of a directory.
    region: Region,
}

/// Where something lies in the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Region {
    /// The top directory.
    Top,
    /// `.firn`.
    Firn,
    /// Below `.firn`, where no file is chosen.
    Own,
    /// The directories of programs.
    Files,
}

impl Region {
    /// Region of the object `name` in a directory of this region.
    fn of_child(self, name: &OsStr) -> Self {
        match self {
            Self::Top if name == TOP => Self::Firn,
            // Files of programs, before they get their names.
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

/// An open file of a [`LogBacking`].
pub struct LogFile<B: Backing> {
    below: B::File,
    logged: Option<Opened<B>>,
}

/// A descriptor of a file that may be logged. The close of the last one for writing ends the writing of this host.
struct Opened<B: Backing> {
    file: Arc<LoggedFile<B>>,
    inode: B::Inode,
    access: Access,
    ended: Arc<Ended<B>>,
}

impl<B: Backing> Drop for Opened<B> {
    fn drop(&mut self) {
        let file = &self.file;
        let was_last = file.opens.fetch_sub(1, Ordering::AcqRel) == 1;
        let may_write = self.access != Access::Read;
        let wrote_last = may_write && file.writers.fetch_sub(1, Ordering::AcqRel) == 1;
        let is_removed = file.is_removed.load(Ordering::Acquire);
        if wrote_last {
            file.is_written.store(false, Ordering::Release);
        }
        if (wrote_last && file.has_containers()) || (was_last && is_removed) {
            self.ended.add(file, &self.inode);
        }
    }
}

impl<B: Backing> LogFile<B> {
    /// The file, if it may be logged; `otherwise` if the descriptor cannot write.
    fn writable(&self, otherwise: Errno) -> Result<Option<&Arc<LoggedFile<B>>>> {
        match &self.logged {
            Some(opened) if opened.access == Access::Read => Err(otherwise),
            opened => Ok(opened.as_ref().map(|opened| &opened.file)),
        }
    }

    /// The logged file, if it has containers.
    fn logged(&self) -> Option<&Arc<LoggedFile<B>>> {
        let opened = self.logged.as_ref()?;
        opened.file.is_logged().then_some(&opened.file)
    }
}

impl<B: Backing> LogBacking<B> {
    /// Opens the log layout over `below`; its directory there is `.firn/log`.
    pub fn open(below: B, setup: Setup) -> std::result::Result<Self, OwnError> {
        let top = make_dir(&below)?;
        let top_id = TopId::of(&below.attr(&top)?);
        // Before anything is changed: logs of an earlier version are refused.
        file_dir::list_files(&below, &top)?;
        let marked = orphans::end_last_life(&below, &top, &setup.host, &setup.is_alive)?;
        let turn = match below.lane_of_turn(0) {
            Some(_) => turn::take(&below, &top, &setup.host, &setup.is_alive),
            None => 0,
        };
        Ok(Self {
            below,
            top,
            top_id,
            turn,
            memory: Memory::new(INDEX_BYTES_MAX),
            setup,
            files: Mutex::new(Files {
                known: HashMap::new(),
                dying: HashSet::new(),
                listed: None,
                listing: Arc::default(),
            }),
            forgotten: AtomicU64::new(0),
            marked: Mutex::new(marked),
            hosts_gone: Mutex::default(),
            ended: Arc::new(Ended::new()),
        })
    }

    /// The backing below.
    pub fn below(&self) -> &B {
        &self.below
    }

    /// Limits the sorted indexes in memory to `bytes` bytes.
    #[must_use]
    pub fn with_memory(self, bytes: u64) -> Self {
        let memory = Memory::new(bytes);
        Self { memory, ..self }
    }

    fn place(&self) -> ContainerSite<'_, B> {
        ContainerSite {
            base: &self.below,
            top: &self.top,
            top_id: self.top_id,
            host: &self.setup.host,
            turn: self.turn,
            memory: &self.memory,
            lag_max: self.setup.lag_max,
            is_alive: &self.setup.is_alive,
        }
    }

    /// Makes the inode of the object `name` in a directory.
    fn child(
        &self,
        parent: &LogInode<B>,
        name: &OsStr,
        below: B::Inode,
        attr: &Attr,
    ) -> Result<LogInode<B>> {
        let region = parent.region.of_child(name);
        let is_chosen =
            attr.kind == Kind::File && region != Region::Own && (self.setup.chooses)(name);
        self.inode(below, attr, region, is_chosen)
    }

    fn inode(
        &self,
        below: B::Inode,
        attr: &Attr,
        region: Region,
        is_chosen: bool,
    ) -> Result<LogInode<B>> {
        let id = if is_chosen {
            // A file without an identity stays plain.
            FileId::assign(&self.below, &below, attr).unwrap_or(None)
        } else {
            FileId::of(&self.below, &below, attr)?
        };
        Ok(LogInode {
            below,
            id,
            is_chosen,
            region,
        })
    }

    /// The file with this id, if this host knows containers of it or has it open for writing.
    fn find(&self, id: Option<FileId>) -> Result<Option<Arc<LoggedFile<B>>>> {
        let Some(id) = id else {
            return Ok(None);
        };
        self.look_around()?;
        let Some(file) = self.files.lock().known.get(&id).cloned() else {
            return Ok(None);
        };
        self.look_at(&file);
        // The file may be flat by now.
        self.forget(&file);
        Ok(self.files.lock().known.get(&id).cloned())
    }

    /// [`Self::find`] with a new look at the containers: another host may have made one, or flatten the file already.
    fn find_ending(&self, id: Option<FileId>) -> Result<Option<Arc<LoggedFile<B>>>> {
        let Some(id) = id else {
            return Ok(None);
        };
        let file = match self.find(Some(id))? {
            Some(file) => file,
            None if file_dir::find(&self.below, &self.top, id)?.is_none() => return Ok(None),
            None => self.find_or_add(id)?,
        };
        // A file whose containers cannot be read still has a time.
        if let Err(error) = file.refresh(&self.place()) {
            tracing::debug!(ino = id.ino, %error, "containers cannot be read");
        }
        Ok(Some(file))
    }

    /// Lists the files with containers again, if the last list is older than [`Setup::patience`].
    fn look_around(&self) -> Result<()> {
        self.look_around_after(self.setup.patience)
    }

    /// The same, if the last list is older than `patience`.
    fn look_around_after(&self, patience: Duration) -> Result<()> {
        {
            let mut files = self.files.lock();
            let is_due = |listed: Instant| listed.elapsed() >= patience;
            // Until a first list is complete, each caller makes one.
            if files.listing.began.is_some() && !files.listed.is_none_or(is_due) {
                return Ok(());
            }
            files.listed = Some(Instant::now());
        }
        let began = Instant::now();
        let logged: HashSet<FileId> = file_dir::list_files(&self.below, &self.top)?
            .into_iter()
            .collect();
        let without_containers: Vec<_> = {
            let mut files = self.files.lock();
            for &id in &logged {
                let new = || Arc::new(LoggedFile::new(id));
                files.known.entry(id).or_insert_with(new);
            }
            let has_none = |file: &&Arc<LoggedFile<B>>| !logged.contains(&file.id);
            let without = files.known.values().filter(has_none);
            let without = without.map(Arc::clone).collect();
            if files.listing.began < Some(began) {
                files.listing = Arc::new(Listing {
                    began: Some(began),
                    files: logged,
                });
            }
            without
        };
        for file in without_containers {
            self.look_at(&file);
            self.forget(&file);
        }
        Ok(())
    }

    /// Reads the containers of a file that the last list has, unless they were read since.
    fn look_at(&self, file: &LoggedFile<B>) {
        let listing = Arc::clone(&self.files.lock().listing);
        let Some(began) = listing.began else {
            return;
        };
        let is_listed = listing.files.contains(&file.id);
        // The next open of the file returns the error.
        let place = self.place();
        let looked = file.refresh_after_listing(&place, began, is_listed);
        if let Err(error) = looked.and_then(|()| file.refresh_after_sync(&place)) {
            tracing::debug!(ino = file.id.ino, %error, "containers cannot be read");
        }
    }

    /// The file with this id; adds it if it is unknown.
    fn find_or_add(&self, id: FileId) -> Result<Arc<LoggedFile<B>>> {
        self.look_around()?;
        let mut files = self.files.lock();
        let new = || Arc::new(LoggedFile::new(id));
        Ok(Arc::clone(files.known.entry(id).or_insert_with(new)))
    }

    /// Attributes as programs see them: the length covers all bytes, the time is that of the last change.
    ///
    /// The containers are read first, then the attributes of the plain file; both again if the containers changed
    /// in between.
    fn shown(
        &self,
        logged: Option<&Arc<LoggedFile<B>>>,
        read: &dyn Fn() -> Result<Attr>,
    ) -> Result<Attr> {
        let Some(file) = logged else {
            return read();
        };
        loop {
            file.check_exists()?;
            let seen = file.changes.load(Ordering::Acquire);
            let attr = read()?;
            let size = file.len(attr.size);
            let mtime = file.modified_time().unwrap_or(attr.mtime);
            if file.changes.load(Ordering::Acquire) == seen {
                return Ok(Attr {
                    size,
                    mtime,
                    ..attr
                });
            }
        }
    }

    fn open_logged(&self, inode: &LogInode<B>, access: Access) -> Result<Option<Opened<B>>> {
        let Some(id) = inode.id else {
            return Ok(None);
        };
        let writes = access != Access::Read;
        self.look_around()?;
        // Another host may have made a container just now. A chosen file is looked at below.
        if !inode.is_chosen && !self.files.lock().known.contains_key(&id) {
            self.look_around_after(Duration::ZERO)?;
        }
        let file = {
            let mut files = self.files.lock();
            let file = match files.known.get(&id) {
                Some(file) => Arc::clone(file),
                None if inode.is_chosen => {
                    let new = Arc::new(LoggedFile::new(id));
                    files.known.insert(id, Arc::clone(&new));
                    new
                }
                None => {
                    drop(files);
                    tag::check(&self.below, &inode.below, id, self.top_id)?;
                    return Ok(None);
                }
            };
            if files.dying.contains(&id) {
                file.is_dying.store(true, Ordering::Release);
            }
            // Counted under the lock, so that an open file is not forgotten.
            file.opens.fetch_add(1, Ordering::AcqRel);
            if writes {
                file.writers.fetch_add(1, Ordering::AcqRel);
            }
            file
        };
        let opened = Opened {
            file,
            inode: inode.below.clone(),
            access,
            ended: Arc::clone(&self.ended),
        };
        opened.file.inode.get_or_init(|| inode.below.clone());
        self.see_others(&opened)?;
        if !writes && self.setup.flattens_read && opened.file.is_logged() {
            self.ended.add(&opened.file, &opened.inode);
        }
        Ok(Some(opened))
    }

    /// Close-to-open: makes changes that other hosts have closed visible, and orders them before this host's next writes.
    fn see_others(&self, opened: &Opened<B>) -> Result<()> {
        let place = self.place();
        let file = &opened.file;
        file.wait_for(&place, &mut || file.refresh(&place))?;
        if opened.access != Access::Read {
            file.raise_epoch();
        }
        if !file.is_logged() {
            // Another host may have written the plain file.
            self.below.attr_now(&opened.inode)?;
            tag::check(&self.below, &opened.inode, file.id, self.top_id)?;
        }
        Ok(())
    }

    /// Announces to other hosts that this one writes the file, so that none of them flattens it.
    fn begin_writing(&self, file: &LogFile<B>, opened: &Opened<B>) -> Result<()> {
        let plain = || self.plain_len(file);
        let place = self.place();
        let logged = &opened.file;
        logged.wait_for(&place, &mut || logged.begin_writing(&place, &plain))
    }

    /// Sets the modification time of the plain file after a change by this host.
    fn note_modified(&self, file: &LogFile<B>) {
        let Some(opened) = &file.logged else {
            return;
        };
        {
            let mut modified = opened.file.modified.lock();
            if modified.is_some_and(|noted| noted.elapsed() < MODIFIED_EVERY) {
                return;
            }
            *modified = Some(Instant::now());
        }
        let now = || {
            self.below
                .set_times(&opened.inode, SetTime::Keep, SetTime::Now)
        };
        let noted = opened.file.set_modified(&self.place(), Time::now(), &now);
        if let Err(error) = noted {
            tracing::debug!(ino = opened.file.id.ino, %error, "cannot set the time of a logged file");
        }
    }

    /// Makes what this host wrote to logs durable.
    fn sync_logs(&self) -> Result<()> {
        let files: Vec<_> = self.files.lock().known.values().map(Arc::clone).collect();
        for file in files {
            let place = self.place();
            file.wait_for(&place, &mut || file.sync(&place))?;
        }
        Ok(())
    }

    /// The file that loses this name, if the name may be its last.
    fn doomed(&self, parent: &B::Inode, name: &OsStr) -> Result<Option<(B::Inode, FileId)>> {
        let (inode, attr) = match self.below.lookup(parent, name) {
            Ok(found) => found,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error),
        };
        let id = FileId::of(&self.below, &inode, &attr)?;
        Ok(id.filter(|_| attr.nlink == 1).map(|id| (inode, id)))
    }

    fn mark(&self, file: &LoggedFile<B>, mark: &str) -> Result<()> {
        let place = self.place();
        file.wait_for(&place, &mut || file.mark(&place, mark))
    }

    /// Marks a file whose last name is to go. Each container gets the mark before that: existing ones now, new ones
    /// when they are made.
    fn begin_to_end_names(&self, doomed: Option<&(B::Inode, FileId)>) -> Result<()> {
        let Some((_, id)) = doomed else {
            return Ok(());
        };
        self.look_around()?;
        let file = {
            let mut files = self.files.lock();
            files.dying.insert(*id);
            files.known.get(id).cloned()
        };
        let Some(file) = file else {
            return Ok(());
        };
        file.is_dying.store(true, Ordering::Release);
        self.mark(&file, DYING)
            .inspect_err(|_| self.keep_name(&file))
    }

    /// Takes the mark away: the last name stays, as far as this host knows.
    fn keep_name(&self, file: &LoggedFile<B>) {
        file.is_dying.store(false, Ordering::Release);
        self.files.lock().dying.remove(&file.id);
    }

    /// Ends the removal of a last name: the name is gone, unless `outcome` is an error.
    fn end_names(&self, doomed: Option<(B::Inode, FileId)>, outcome: Result<()>) -> Result<()> {
        let Some((inode, id)) = doomed else {
            return outcome;
        };
        let looked = self.look_around();
        let file = {
            let mut files = self.files.lock();
            let file = files.known.get(&id).cloned();
            if file.is_none() {
                files.dying.remove(&id);
            }
            file
        };
        let Some(file) = file else {
            return looked.and(outcome);
        };
        if outcome.is_err() {
            self.keep_name(&file);
            file.wait_for(&self.place(), &mut || file.unmark(&self.place()))?;
            return outcome;
        }
        let marked = self.mark(&file, DEAD);
        file.is_removed.store(marked.is_ok(), Ordering::Release);
        self.files.lock().dying.remove(&id);
        marked?;
        if file.opens.load(Ordering::Acquire) == 0 {
            self.ended.add(&file, &inode);
        }
        Ok(())
    }
}
