//! The log layout as a backing over a backing: files of which some have their bytes in containers.
//!
//! Names, attributes and everything that is no chosen file go to the backing below. A file that was written through
//! containers once is read through them by every host, whatever it chooses, until it is flat.

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
use crate::file::{Listed, LoggedFile, Place};
use crate::file_id::FileId;
use crate::orphans::{self, DEAD, DYING};
use crate::tag::{self, Home};
use crate::turn;

/// In `.firn/`.
pub const CONTAINERS: &str = own::LOGS;

/// Opens the directory of all containers, made if it is not there.
pub fn make_dir<B: Backing>(base: &B) -> std::result::Result<B::Inode, OwnError> {
    let firn = own::dir(base, &base.root(), TOP)?;
    own::dir(base, &firn, CONTAINERS).map_err(|error| error.below(TOP))
}

/// Bytes of sorted indexes in memory, of all files: half of what a reader may take, and a block of each index of a file
/// that many hosts wrote.
const INDEX_BYTES_MAX: u64 = 32 << 20;
/// The plain file shows when it was modified as if it were written to this often: each time costs its server a call.
const MODIFIED_EVERY: Duration = Duration::from_secs(1);

/// Says of a name whether a new file with it is logged.
pub type Chooser = Box<dyn Fn(&OsStr) -> bool + Send + Sync>;
/// Says of a host whether it lives.
pub type Liveness = Box<dyn Fn(&str) -> Result<bool> + Send + Sync>;

/// Where bytes lie is told only if that is right for this long: to be told it again costs as much as some reads.
const LOCATED_FOR_MIN: Duration = Duration::from_millis(20);

/// What becomes of the logs of a file that no host has open for writing any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenClosed {
    /// The close that ends the writing returns when they are flattened.
    Flatten,
    /// The close returns when they are published; [`LogBacking::settle`] flattens them.
    FlattenBehind,
    /// Logs stay as they are.
    Keep,
}

/// What a mount with the log layout is told.
pub struct Setup {
    /// This host.
    pub host: String,
    /// Chooses the files that are logged.
    pub chooses: Chooser,
    /// Tells which hosts live.
    pub is_alive: Liveness,
    /// How old this host's knowledge of containers may be.
    pub patience: Duration,
    /// How long the backing may be behind what other hosts did: what is not as it must be is waited for this long.
    pub lag_max: Duration,
    /// Bytes of a file that one host flattens at a time.
    pub unit_bytes: u64,
    /// What becomes of the logs of a file that no host has open for writing any more.
    pub when_closed: WhenClosed,
    /// The same, when they are opened for reading.
    pub flattens_read: bool,
}

/// See the module.
pub struct LogBacking<B: Backing> {
    below: B,
    top: B::Inode,
    home: Home,
    memory: Arc<Memory>,
    /// That of this host's logs among the lanes below; 0 where there are none.
    turn: u64,
    setup: Setup,
    files: Mutex<Files<B>>,
    ended: Arc<Ended<B>>,
    /// How many files were flat or gone.
    forgotten: AtomicU64,
    /// Containers of files that this host was removing when it ran last.
    marked: Mutex<HashSet<String>>,
    /// Hosts that were found to be gone, and whose removals were ended; None before the first search.
    hosts_gone: Mutex<Option<HostsGone>>,
}

struct Files<B: Backing> {
    /// Those that have containers, and those that this host has open for writing.
    known: HashMap<FileId, Arc<LoggedFile<B>>>,
    /// Files whose last name this host is removing: an open of one makes no container without a mark.
    dying: HashSet<FileId>,
    /// When the containers were listed last, or are being listed.
    listed: Option<Instant>,
    listing: Arc<Listing>,
}

/// The containers of all files at one moment. Each file is looked at when it is used: to read the containers of all of them
/// would cost as much as there are files, however few are used.
#[derive(Default)]
struct Listing {
    began: Option<Instant>,
    containers: HashMap<FileId, Vec<Listed>>,
}

/// An object of a [`LogBacking`].
pub struct LogInode<B: Backing> {
    below: B::Inode,
    /// Id, of a file only.
    id: Option<FileId>,
    is_chosen: bool,
    /// Region, of a directory only.
    region: Region,
}

/// Where something lies in the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Region {
    /// The top directory.
    Top,
    /// `.firn`.
    Firn,
    /// What is below that: no file there is chosen for its name.
    Own,
    /// All else.
    Files,
}

impl Region {
    /// That of what has this name in a directory.
    fn of_child(self, name: &OsStr) -> Self {
        match self {
            Self::Top if name == TOP => Self::Firn,
            // Files of a program that get their names later.
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

/// A descriptor of a file that may be logged. The last one that may write ends the writing of this host.
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
    /// The file, if it may be logged; the error if the descriptor may not write.
    fn writable(&self, otherwise: Errno) -> Result<Option<&Arc<LoggedFile<B>>>> {
        match &self.logged {
            Some(opened) if opened.access == Access::Read => Err(otherwise),
            opened => Ok(opened.as_ref().map(|opened| &opened.file)),
        }
    }

    /// The logs of the file, if it has some.
    fn logged(&self) -> Option<&Arc<LoggedFile<B>>> {
        let opened = self.logged.as_ref()?;
        opened.file.is_logged().then_some(&opened.file)
    }
}

impl<B: Backing> LogBacking<B> {
    /// Over `below`, in which it has a directory of its own.
    pub fn open(below: B, setup: Setup) -> std::result::Result<Self, OwnError> {
        let top = make_dir(&below)?;
        let home = Home::of(&below.attr(&top)?);
        let marked = orphans::end_last_life(&below, &top, &setup.host, &setup.is_alive)?;
        let turn = match below.lane_of_turn(0) {
            Some(_) => turn::take(&below, &top, &setup.host, &setup.is_alive),
            None => 0,
        };
        Ok(Self {
            below,
            top,
            home,
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

    /// The same, with at most `bytes` bytes of sorted indexes in memory.
    #[must_use]
    pub fn with_memory(self, bytes: u64) -> Self {
        let memory = Memory::new(bytes);
        Self { memory, ..self }
    }

    fn place(&self) -> Place<'_, B> {
        Place {
            base: &self.below,
            top: &self.top,
            home: self.home,
            host: &self.setup.host,
            turn: self.turn,
            memory: &self.memory,
            lag_max: self.setup.lag_max,
            is_alive: &self.setup.is_alive,
        }
    }

    /// What has this name in a directory.
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
            // One that cannot be told apart stays plain.
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

    /// The file of an inode, if it has containers as far as this host knows, or is open for writing here.
    fn find(&self, id: Option<FileId>) -> Result<Option<Arc<LoggedFile<B>>>> {
        let Some(id) = id else {
            return Ok(None);
        };
        self.look_around()?;
        let Some(file) = self.files.lock().known.get(&id).cloned() else {
            return Ok(None);
        };
        self.look_at(&file);
        // It may be flat since.
        self.forget(&file);
        Ok(self.files.lock().known.get(&id).cloned())
    }

    /// The same, with what another host may have made of it since this one looked, and be flattening already.
    fn find_ending(&self, id: Option<FileId>) -> Result<Option<Arc<LoggedFile<B>>>> {
        let Some(id) = id else {
            return Ok(None);
        };
        let file = match self.find(Some(id))? {
            Some(file) => file,
            None if own::find(&self.below, &self.top, OsStr::new(&id.container_name(0)))?
                .is_none() =>
            {
                return Ok(None);
            }
            None => self.find_or_add(id)?,
        };
        // One that cannot be read has a time all the same.
        if let Err(error) = file.look_again(&self.place()) {
            tracing::debug!(ino = id.ino, %error, "containers cannot be read");
        }
        Ok(Some(file))
    }

    /// Looks which files have containers, where that was long ago.
    fn look_around(&self) -> Result<()> {
        self.look_around_after(self.setup.patience)
    }

    /// The same, if the last look is older than `patience`.
    fn look_around_after(&self, patience: Duration) -> Result<()> {
        {
            let mut files = self.files.lock();
            let is_due = |listed: Instant| listed.elapsed() >= patience;
            // Nothing is known before the first listing: each caller lists until then.
            if files.listing.began.is_some() && !files.listed.is_none_or(is_due) {
                return Ok(());
            }
            files.listed = Some(Instant::now());
        }
        let began = Instant::now();
        let mut containers: HashMap<FileId, Vec<Listed>> = HashMap::new();
        for (name, dir, _) in own::list(&self.below, &self.top)? {
            if let Some((id, number)) = FileId::of_container(&name) {
                let listed = Listed { number, dir };
                containers.entry(id).or_default().push(listed);
            }
        }
        let without_containers: Vec<_> = {
            let mut files = self.files.lock();
            for &id in containers.keys() {
                let new = || Arc::new(LoggedFile::new(id));
                files.known.entry(id).or_insert_with(new);
            }
            let has_none = |file: &&Arc<LoggedFile<B>>| !containers.contains_key(&file.id);
            let without = files.known.values().filter(has_none);
            let without = without.map(Arc::clone).collect();
            if files.listing.began < Some(began) {
                files.listing = Arc::new(Listing {
                    began: Some(began),
                    containers,
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

    /// Looks at the containers of a file that the last listing has, unless that was done.
    fn look_at(&self, file: &LoggedFile<B>) {
        let listing = Arc::clone(&self.files.lock().listing);
        let Some(began) = listing.began else {
            return;
        };
        let listed = listing.containers.get(&file.id).map(Vec::as_slice);
        // The next open of the file returns the error.
        if let Err(error) = file.look_at_shared(&self.place(), began, listed) {
            tracing::debug!(ino = file.id.ino, %error, "containers cannot be read");
        }
    }

    /// The file of an inode that is opened.
    fn find_or_add(&self, id: FileId) -> Result<Arc<LoggedFile<B>>> {
        self.look_around()?;
        let mut files = self.files.lock();
        let new = || Arc::new(LoggedFile::new(id));
        Ok(Arc::clone(files.known.entry(id).or_insert_with(new)))
    }

    /// Attributes as programs see them: the length is that of all bytes, and the time that of the last change. What is below
    /// is asked for after it was looked where the bytes are, and again where that has changed meanwhile.
    fn shown(
        &self,
        logged: Option<&Arc<LoggedFile<B>>>,
        read: &dyn Fn() -> Result<Attr>,
    ) -> Result<Attr> {
        let Some(file) = logged else {
            return read();
        };
        loop {
            file.check_lost()?;
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
        // Another host may have put it into a log just now. A file that is chosen is looked at below.
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
                    tag::check(&self.below, &inode.below, id, self.home)?;
                    return Ok(None);
                }
            };
            if files.dying.contains(&id) {
                file.is_dying.store(true, Ordering::Release);
            }
            // Counted before the lock is free: one that is open is not forgotten.
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

    /// Close-to-open: what others have closed is seen, and older than what this host writes now.
    fn see_others(&self, opened: &Opened<B>) -> Result<()> {
        let place = self.place();
        let file = &opened.file;
        file.wait_for(&place, &mut || {
            file.look_again(&place)?;
            match opened.access {
                Access::Read => Ok(()),
                Access::Write | Access::ReadWrite => file.take_epoch(&place),
            }
        })?;
        if !file.is_logged() {
            // The plain file may have got its bytes on another host.
            self.below.attr_now(&opened.inode)?;
            tag::check(&self.below, &opened.inode, file.id, self.home)?;
        }
        Ok(())
    }

    /// Shows other hosts that this one writes to the file, so that none of them flattens it.
    fn begin_writing(&self, file: &LogFile<B>, opened: &Opened<B>) -> Result<()> {
        let plain = || self.plain_len(file);
        let place = self.place();
        let logged = &opened.file;
        logged.wait_for(&place, &mut || logged.begin_writing(&place, &plain))
    }

    /// This host has changed a file: the plain file shows the time, as it would have it by itself.
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

    /// The file that is about to lose this name, if that may be its last.
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

    /// Its last name does not go, as far as this host knows.
    fn keep_name(&self, file: &LoggedFile<B>) {
        file.is_dying.store(false, Ordering::Release);
        self.files.lock().dying.remove(&file.id);
    }

    /// Its last name is gone, if `outcome` is not an error.
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
