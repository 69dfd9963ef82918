//! The log layout as a backing over a backing: files of which some have their bytes in containers.
//!
//! Names, attributes and everything that is no chosen file go to the backing below. A file that was written through
//! containers once is read through them by every host, whatever it chooses, until it is flat.

use std::collections::{BTreeSet, HashMap};
use std::ffi::OsStr;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use firn_backing::lock::Mutex;
use firn_backing::{
    Access, Attr, Backing, Caller, DataPart, DirEntry, Errno, KernelReads, Kind, LaneIndex,
    LockMode, RenameFlags, Result, Seek, SetTime, StatFs, SyncWay, copy_through_memory,
};
use firn_rendezvous::OwnError;
use firn_rendezvous::own::{self, TOP};
use parking_lot::Condvar;

use crate::container::Memory;
use crate::file::{FileId, Flattened, Listed, LoggedFile, Place, ToldOf};
use crate::frame::{PIECES_MAX, SPAN_BYTES_MAX};
use crate::orphans::{self, DEAD, DYING, Orphans};
use crate::run::{FILE_BYTES_MAX, Piece};
use crate::salvage::{Report, may_be_damage};
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
/// How long a close waits before it looks again whether other hosts have flattened their parts.
const REST_FIRST: Duration = Duration::from_millis(1);
const REST_LAST: Duration = Duration::from_millis(100);
/// The plain file shows when it was modified as if it were written to so often: each time costs its server a call.
const MODIFIED_EVERY: Duration = Duration::from_secs(1);

/// Says of a name whether a new file with it is logged.
pub type Chooser = Box<dyn Fn(&OsStr) -> bool + Send + Sync>;
/// Says of a host whether it lives.
pub type Liveness = Box<dyn Fn(&str) -> Result<bool> + Send + Sync>;

/// What a mount with the log layout is told.
pub struct Setup {
    /// This host.
    pub host: String,
    /// Which files are logged.
    pub chooses: Chooser,
    /// Which hosts live.
    pub is_alive: Liveness,
    /// How old this host's knowledge of containers may be.
    pub patience: Duration,
    /// Bytes of a file that one host flattens at a time.
    pub unit_bytes: u64,
    /// Files are flattened when nobody writes to them any more.
    pub flattens_closed: bool,
    /// The same, when they are opened for reading.
    pub flattens_read: bool,
}

/// See the module.
pub struct LogBacking<B: Backing> {
    below: B,
    top: B::Inode,
    memory: Arc<Memory>,
    /// That of this host's logs among the lanes below; 0 where there are none.
    turn: u64,
    setup: Setup,
    files: Mutex<Files<B>>,
    ended: Arc<Ended<B>>,
    /// How many files were flat or gone.
    forgotten: AtomicU64,
}

/// Files with something left to do.
struct Ended<B: Backing> {
    state: Mutex<EndedState<B>>,
    came: Condvar,
}

struct EndedState<B: Backing> {
    files: HashMap<FileId, EndedFile<B>>,
    /// A file came, or somebody wants to be noticed, since they were looked at.
    has_news: bool,
}

/// A file that nobody here has open for writing any more, or that is to be flattened.
struct EndedFile<B: Backing> {
    file: Arc<LoggedFile<B>>,
    inode: B::Inode,
}

impl<B: Backing> Ended<B> {
    fn add(&self, file: &Arc<LoggedFile<B>>, inode: &B::Inode) {
        let ended = EndedFile {
            file: Arc::clone(file),
            inode: inode.clone(),
        };
        let old = {
            let mut state = self.state.lock();
            state.has_news = true;
            state.files.insert(file.id, ended)
        };
        drop(old);
        self.came.notify_all();
    }
}

struct Files<B: Backing> {
    /// Those that have containers, and those that this host has open for writing.
    known: HashMap<FileId, Arc<LoggedFile<B>>>,
    listed: Option<Instant>,
}

/// Files that are not flat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Other hosts have parts of them to write.
    pub under_way: usize,
    /// Somebody writes to them.
    pub written: usize,
    /// They are not found.
    pub lost: usize,
    /// Something failed.
    pub failed: usize,
    /// The first failure.
    pub error: Option<Errno>,
}

impl Left {
    fn count(&mut self, flattened: Result<Flattened>) {
        match flattened {
            Ok(Flattened::Flat) => {}
            Ok(Flattened::UnderWay) => self.under_way += 1,
            Ok(Flattened::Written) => self.written += 1,
            Err(error) => {
                self.failed += 1;
                self.error = self.error.or(Some(error));
            }
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A file that has containers.
struct Found<'a, B: Backing> {
    id: FileId,
    inode: &'a B::Inode,
    /// From where it was looked for.
    path: PathBuf,
}

/// An object of a [`LogBacking`].
pub struct LogInode<B: Backing> {
    below: B::Inode,
    /// Of a file.
    id: Option<FileId>,
    is_chosen: bool,
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

    /// Where its bytes are, if some are in logs.
    fn logged(&self) -> Option<&Arc<LoggedFile<B>>> {
        let opened = self.logged.as_ref()?;
        opened.file.is_logged().then_some(&opened.file)
    }
}

impl<B: Backing> LogBacking<B> {
    /// Over `below`, in which it has a directory of its own.
    pub fn open(below: B, setup: Setup) -> std::result::Result<Self, OwnError> {
        let top = make_dir(&below)?;
        orphans::end_last_life(&below, &top, &setup.host, &setup.is_alive)?;
        let turn = match below.lane_of_turn(0) {
            Some(_) => turn::take(&below, &top, &setup.host, &setup.is_alive),
            None => 0,
        };
        Ok(Self {
            below,
            top,
            turn,
            memory: Memory::new(INDEX_BYTES_MAX),
            setup,
            files: Mutex::new(Files {
                known: HashMap::new(),
                listed: None,
            }),
            forgotten: AtomicU64::new(0),
            ended: Arc::new(Ended {
                state: Mutex::new(EndedState {
                    files: HashMap::new(),
                    has_news: false,
                }),
                came: Condvar::new(),
            }),
        })
    }

    /// The backing below.
    pub fn below(&self) -> &B {
        &self.below
    }

    /// The same, with at most so many bytes of sorted indexes in memory.
    #[must_use]
    pub fn with_memory(self, bytes: u64) -> Self {
        let memory = Memory::new(bytes);
        Self { memory, ..self }
    }

    /// Ends and flattens files that nobody writes to any more, as far as other hosts let it.
    pub fn settle(&self) -> Left {
        let ended = {
            let mut state = self.ended.state.lock();
            state.has_news = false;
            std::mem::take(&mut state.files)
        };
        let mut left = Left::default();
        for ended in ended.into_values() {
            let settled = self.settle_one(&ended.file, &ended.inode);
            left.count(settled);
            if settled != Ok(Flattened::Flat) {
                let mut state = self.ended.state.lock();
                state.files.entry(ended.file.id).or_insert(ended);
            }
        }
        left
    }

    /// Waits until files have ended, or so long.
    pub fn wait_for_ended(&self, time: Duration) {
        let mut state = self.ended.state.lock();
        if !state.has_news {
            state.wait_for(&self.ended.came, time);
        }
    }

    /// Ends the wait of another thread, or its next one.
    pub fn wake(&self) {
        self.ended.state.lock().has_news = true;
        self.ended.came.notify_all();
    }

    /// Flattens the files at or below `top` that nobody writes to, whether this host has ever opened them or not.
    pub fn flatten_below(&self, top: &LogInode<B>) -> Result<Left> {
        let mut left = Left::default();
        let lost = self.visit_logged(top, &mut |found| {
            left.count(self.flatten_found(found.id, found.inode));
        })?;
        left.lost = lost;
        Ok(left)
    }

    /// The same; what cannot be read of logs is told, and given up.
    pub fn flatten_with_loss(&self, top: &LogInode<B>, report: &mut dyn Report) -> Result<Left> {
        let mut left = Left::default();
        let lost = self.visit_logged(top, &mut |found| {
            left.count(self.flatten_damaged(&found, report));
        })?;
        left.lost = lost;
        Ok(left)
    }

    fn flatten_damaged(&self, found: &Found<'_, B>, report: &mut dyn Report) -> Result<Flattened> {
        match self.flatten_found(found.id, found.inode) {
            Err(error) if may_be_damage(error) => {}
            flattened => return flattened,
        }
        let plain = self.below.attr(found.inode)?;
        let mut told = ToldOf {
            path: &found.path,
            report,
        };
        let file = self.find_or_add(found.id)?;
        let place = self.place();
        let unit_bytes = self.setup.unit_bytes;
        let is_alive = &self.setup.is_alive;
        match file.give_up(&place, &plain, unit_bytes, is_alive, &mut told)? {
            true => self.flatten_found(found.id, found.inode),
            false => Ok(Flattened::Written),
        }
    }

    /// How many files at or below `top` have containers.
    pub fn count_logged_below(&self, top: &LogInode<B>) -> Result<usize> {
        let mut count = 0;
        self.visit_logged(top, &mut |_| count += 1)?;
        Ok(count)
    }

    /// Goes through the files at or below `top` that have containers. Those of which no file is found are counted, where
    /// `top` is all of the backing.
    fn visit_logged(
        &self,
        top: &LogInode<B>,
        visit: &mut dyn FnMut(Found<'_, B>),
    ) -> Result<usize> {
        let mut wanted = self.list_containers()?;
        if let Some(id) = top.id {
            if wanted.contains(&id) {
                visit(Found {
                    id,
                    inode: &top.below,
                    path: PathBuf::new(),
                });
            }
            return Ok(0);
        }
        let root = self.below.attr(&self.below.root())?.ino;
        let is_whole = self.below.attr(&top.below)?.ino == root;
        let mut dirs = vec![(top.below.clone(), PathBuf::new())];
        while let Some((dir, path)) = dirs.pop().filter(|_| !wanted.is_empty()) {
            let is_root = self.below.attr(&dir)?.ino == root;
            for (name, ino, kind) in own::list(&self.below, &dir)? {
                let name = OsStr::from_bytes(&name);
                let may_be_dir = kind.is_none_or(|kind| kind == Kind::Dir);
                if (is_root && name == TOP) || !(may_be_dir || has_number(&wanted, ino)) {
                    continue;
                }
                let (inode, attr) = match self.below.lookup(&dir, name) {
                    Err(Errno::NOENT) => continue,
                    found => found?,
                };
                let id = self.inode(inode.clone(), &attr, None)?.id;
                match id.filter(|id| wanted.remove(id)) {
                    Some(id) => visit(Found {
                        id,
                        inode: &inode,
                        path: path.join(name),
                    }),
                    None if attr.kind == Kind::Dir => dirs.push((inode, path.join(name))),
                    None => {}
                }
            }
        }
        Ok(if is_whole { wanted.len() } else { 0 })
    }

    /// Files with bytes in logs, as far as this host knows; asks nobody.
    pub fn count_logged(&self) -> usize {
        let files = self.files.lock();
        files.known.values().filter(|file| file.is_logged()).count()
    }

    /// Goes through all files for those that containers are of: removes containers of files that were removed, and names
    /// those of files that are gone and nobody has removed.
    pub fn find_orphans(&self) -> Result<Orphans> {
        orphans::find_orphans(
            &self.below,
            &self.top,
            &self.setup.host,
            &self.setup.is_alive,
        )
    }

    /// The files that have containers. Of two with one inode number the older one was removed.
    fn list_containers(&self) -> Result<BTreeSet<FileId>> {
        let names = own::list(&self.below, &self.top)?;
        let ids = names
            .iter()
            .filter_map(|(name, ..)| FileId::of_container(name));
        Ok(ids.map(|(id, _)| id).collect())
    }

    fn flatten_found(&self, id: FileId, inode: &B::Inode) -> Result<Flattened> {
        let file = self.find_or_add(id)?;
        if !file.is_written.load(Ordering::Acquire) {
            file.end_writing(&self.place())?;
        }
        self.flatten_one(&file, inode)
    }

    /// What is left to do for a file that this host has written; [`Flattened::Flat`] too if that comes later, when
    /// somebody closes it or asks for it.
    fn settle_one(&self, file: &Arc<LoggedFile<B>>, inode: &B::Inode) -> Result<Flattened> {
        let place = self.place();
        if file.is_written.load(Ordering::Acquire) {
            return Ok(Flattened::Flat);
        }
        file.end_writing(&place)?;
        if file.is_removed.load(Ordering::Acquire) {
            if file.opens.load(Ordering::Acquire) > 0 {
                return Ok(Flattened::Flat);
            }
            if file.has_writers(&place, &self.setup.is_alive)? {
                return Ok(Flattened::Written);
            }
            file.remove(&place)?;
            let known = self.files.lock().known.remove(&file.id);
            drop(known);
            return Ok(Flattened::Flat);
        }
        match self.setup.flattens_closed {
            true => self.flatten_one(file, inode),
            false => Ok(Flattened::Flat),
        }
    }

    /// The plain file takes over what is in logs, as far as nobody writes to it.
    fn flatten_one(&self, file: &Arc<LoggedFile<B>>, inode: &B::Inode) -> Result<Flattened> {
        let unit_bytes = self.setup.unit_bytes;
        let flattened = file.flatten(&self.place(), inode, unit_bytes, &self.setup.is_alive)?;
        if flattened == Flattened::Flat {
            self.forget(file);
        }
        Ok(flattened)
    }

    /// Forgets a file that is flat, unless somebody has it open or it is among those with something left to do: of one
    /// file there would be two then, of which one does not know that the other is written to.
    fn forget(&self, file: &Arc<LoggedFile<B>>) {
        /// The caller's, and that of `known`.
        const UNUSED_REFERENCES: usize = 2;
        let known = {
            let mut files = self.files.lock();
            let is_unused = file.opens.load(Ordering::Acquire) == 0
                && Arc::strong_count(file) <= UNUSED_REFERENCES
                && !file.is_logged();
            if is_unused {
                self.forgotten.fetch_add(1, Ordering::AcqRel);
            }
            is_unused.then(|| files.known.remove(&file.id))
        };
        drop(known);
    }

    fn place(&self) -> Place<'_, B> {
        Place {
            base: &self.below,
            top: &self.top,
            host: &self.setup.host,
            turn: self.turn,
            memory: &self.memory,
        }
    }

    fn inode(&self, below: B::Inode, attr: &Attr, name: Option<&OsStr>) -> Result<LogInode<B>> {
        let is_chosen =
            attr.kind == Kind::File && name.is_some_and(|name| (self.setup.chooses)(name));
        let id = match is_chosen {
            // One that cannot be told apart stays plain.
            true => FileId::assign(&self.below, &below, attr).unwrap_or(None),
            false => FileId::of(&self.below, &below, attr)?,
        };
        Ok(LogInode {
            below,
            id,
            is_chosen,
        })
    }

    /// The file of an inode, if it has containers as far as this host knows, or is open for writing here.
    fn find(&self, id: Option<FileId>) -> Result<Option<Arc<LoggedFile<B>>>> {
        let Some(id) = id else {
            return Ok(None);
        };
        self.look_around()?;
        Ok(self.files.lock().known.get(&id).cloned())
    }

    /// Whether what this host writes to a file goes to a log. Makes no call.
    fn is_written_to_logs(&self, inode: &LogInode<B>, id: FileId) -> bool {
        inode.is_chosen || self.files.lock().known.contains_key(&id)
    }

    /// Looks which files have containers, where that was long ago.
    fn look_around(&self) -> Result<()> {
        {
            let mut files = self.files.lock();
            let is_due = |listed: Instant| listed.elapsed() >= self.setup.patience;
            if !files.listed.is_none_or(is_due) {
                return Ok(());
            }
            files.listed = Some(Instant::now());
        }
        let began = Instant::now();
        let mut found: HashMap<FileId, Vec<Listed>> = HashMap::new();
        for (name, dir, _) in own::list(&self.below, &self.top)? {
            if let Some((id, number)) = FileId::of_container(&name) {
                let listed = Listed { number, dir };
                found.entry(id).or_default().push(listed);
            }
        }
        let known: Vec<_> = {
            let mut files = self.files.lock();
            for &id in found.keys() {
                let new = || Arc::new(LoggedFile::new(id));
                files.known.entry(id).or_insert_with(new);
            }
            files.known.values().map(Arc::clone).collect()
        };
        for file in known {
            let listed = found.remove(&file.id).unwrap_or_default();
            if !listed.is_empty() || file.is_logged() {
                // Whoever opens it is told.
                if let Err(error) = file.look(&self.place(), began, listed) {
                    tracing::debug!(ino = file.id.ino, %error, "containers cannot be read");
                }
            }
            self.forget(&file);
        }
        Ok(())
    }

    /// The file of an inode that is opened.
    fn find_or_add(&self, id: FileId) -> Result<Arc<LoggedFile<B>>> {
        self.look_around()?;
        let mut files = self.files.lock();
        let new = || Arc::new(LoggedFile::new(id));
        Ok(Arc::clone(files.known.entry(id).or_insert_with(new)))
    }

    /// Attributes as programs see them: the length is that of all bytes. What is below is asked for after it was looked
    /// where the bytes are, and again where that has changed meanwhile.
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
            if file.changes.load(Ordering::Acquire) == seen {
                return Ok(Attr { size, ..attr });
            }
        }
    }

    fn open_logged(&self, inode: &LogInode<B>, access: Access) -> Result<Option<Opened<B>>> {
        let Some(id) = inode.id else {
            return Ok(None);
        };
        let writes = access != Access::Read;
        self.look_around()?;
        let file = {
            let mut files = self.files.lock();
            let file = match files.known.get(&id) {
                Some(file) => Arc::clone(file),
                None if inode.is_chosen => {
                    let new = Arc::new(LoggedFile::new(id));
                    files.known.insert(id, Arc::clone(&new));
                    new
                }
                None => return Ok(None),
            };
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
        opened.file.look_again(&self.place())?;
        if opened.access != Access::Read {
            opened.file.take_epoch(&self.place())?;
        }
        Ok(())
    }

    /// Other hosts see that this one writes to the file: nobody flattens it meanwhile.
    fn begin_writing(&self, file: &LogFile<B>, opened: &Opened<B>) -> Result<()> {
        let plain = || Ok(self.below.attr_of_file(&file.below)?.size);
        opened.file.begin_writing(&self.place(), &plain)
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
        let noted = self
            .below
            .set_times(&opened.inode, SetTime::Keep, SetTime::Now);
        if let Err(error) = noted {
            tracing::debug!(ino = opened.file.id.ino, %error, "cannot set the time of a logged file");
        }
    }

    /// Makes what this host wrote to logs durable.
    fn sync_logs(&self) -> Result<()> {
        let files: Vec<_> = self.files.lock().known.values().map(Arc::clone).collect();
        for file in files {
            file.sync(&self.place())?;
        }
        Ok(())
    }

    /// What loses a name, if that may be its last.
    fn doomed(&self, parent: &B::Inode, name: &OsStr) -> Result<Option<(B::Inode, FileId)>> {
        let (inode, attr) = match self.below.lookup(parent, name) {
            Ok(found) => found,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error),
        };
        let id = FileId::of(&self.below, &inode, &attr)?;
        Ok(id.filter(|_| attr.nlink == 1).map(|id| (inode, id)))
    }

    /// Its last name is to go.
    fn begin_to_end_names(&self, doomed: Option<&(B::Inode, FileId)>) -> Result<()> {
        match doomed {
            Some((_, id)) => match self.find(Some(*id))? {
                Some(file) => file.mark(&self.place(), DYING),
                None => Ok(()),
            },
            None => Ok(()),
        }
    }

    /// Its last name is gone, if `outcome` is not an error.
    fn end_names(&self, doomed: Option<(B::Inode, FileId)>, outcome: Result<()>) -> Result<()> {
        let Some((inode, id)) = doomed else {
            return outcome;
        };
        let Some(file) = self.find(Some(id))? else {
            return outcome;
        };
        if outcome.is_err() {
            file.unmark(&self.place())?;
            return outcome;
        }
        file.mark(&self.place(), DEAD)?;
        file.is_removed.store(true, Ordering::Release);
        if file.opens.load(Ordering::Acquire) == 0 {
            self.ended.add(&file, &inode);
        }
        Ok(())
    }
}

/// Whether a file with this inode number is among these.
fn has_number(files: &BTreeSet<FileId>, ino: u64) -> bool {
    let of = |birth| FileId { ino, birth };
    files.range(of(0)..=of(u64::MAX)).next().is_some()
}

/// The first parts, as far as one frame speaks of so much.
fn first_of_a_frame<'a, 'd>(parts: &'a [DataPart<'d>]) -> Result<&'a [DataPart<'d>]> {
    let mut bytes = 0;
    let mut fits = |part: &DataPart<'_>| {
        bytes += part.len();
        bytes <= SPAN_BYTES_MAX
    };
    let count = parts
        .iter()
        .take(PIECES_MAX)
        .take_while(|part| fits(part))
        .count();
    match count {
        0 => Err(Errno::INVAL),
        count => Ok(&parts[..count]),
    }
}

impl<B: Backing> Backing for LogBacking<B> {
    type Inode = LogInode<B>;
    type File = LogFile<B>;
    type Dir = B::Dir;

    fn root(&self) -> LogInode<B> {
        LogInode {
            below: self.below.root(),
            id: None,
            is_chosen: false,
        }
    }

    fn lookup(&self, parent: &LogInode<B>, name: &OsStr) -> Result<(LogInode<B>, Attr)> {
        let forgotten = self.forgotten.load(Ordering::Acquire);
        let (inode, attr) = self.below.lookup(&parent.below, name)?;
        let inode = self.inode(inode, &attr, Some(name))?;
        let logged = self.find(inode.id)?;
        let attr = match logged {
            Some(_) => self.shown(logged.as_ref(), &|| self.below.attr(&inode.below))?,
            // It was flattened between the two.
            None if self.forgotten.load(Ordering::Acquire) != forgotten => {
                self.below.attr(&inode.below)?
            }
            None => attr,
        };
        Ok((inode, attr))
    }

    fn create(
        &self,
        caller: &Caller,
        parent: &LogInode<B>,
        name: &OsStr,
        mode: u32,
    ) -> Result<(LogInode<B>, LogFile<B>, Attr)> {
        let (inode, below, attr) = self.below.create(caller, &parent.below, name, mode)?;
        let inode = self.inode(inode, &attr, Some(name))?;
        let logged = self.open_logged(&inode, Access::ReadWrite)?;
        let file = LogFile { below, logged };
        Ok((inode, file, attr))
    }

    fn mkdir(
        &self,
        caller: &Caller,
        parent: &LogInode<B>,
        name: &OsStr,
        mode: u32,
    ) -> Result<(LogInode<B>, Attr)> {
        let (inode, attr) = self.below.mkdir(caller, &parent.below, name, mode)?;
        Ok((self.inode(inode, &attr, None)?, attr))
    }

    fn mknod(
        &self,
        caller: &Caller,
        parent: &LogInode<B>,
        name: &OsStr,
        mode: u32,
        rdev: u64,
    ) -> Result<(LogInode<B>, Attr)> {
        let made = self.below.mknod(caller, &parent.below, name, mode, rdev)?;
        Ok((self.inode(made.0, &made.1, Some(name))?, made.1))
    }

    fn symlink(
        &self,
        caller: &Caller,
        parent: &LogInode<B>,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<(LogInode<B>, Attr)> {
        let (inode, attr) = self.below.symlink(caller, &parent.below, name, target)?;
        Ok((self.inode(inode, &attr, None)?, attr))
    }

    fn link(&self, inode: &LogInode<B>, parent: &LogInode<B>, name: &OsStr) -> Result<Attr> {
        self.below.link(&inode.below, &parent.below, name)?;
        self.attr(inode)
    }

    fn unlink(&self, parent: &LogInode<B>, name: &OsStr) -> Result<()> {
        let doomed = self.doomed(&parent.below, name)?;
        self.begin_to_end_names(doomed.as_ref())?;
        let outcome = self.below.unlink(&parent.below, name);
        self.end_names(doomed, outcome)
    }

    fn rmdir(&self, parent: &LogInode<B>, name: &OsStr) -> Result<()> {
        self.below.rmdir(&parent.below, name)
    }

    fn rename(
        &self,
        parent: &LogInode<B>,
        name: &OsStr,
        new_parent: &LogInode<B>,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()> {
        let (parent, new_parent) = (&parent.below, &new_parent.below);
        let may_replace = !flags.intersects(RenameFlags::NOREPLACE | RenameFlags::EXCHANGE);
        let doomed = match may_replace {
            true => self.doomed(new_parent, new_name)?,
            false => None,
        };
        // A name that is renamed to itself loses nothing.
        let renamed = self
            .below
            .lookup(parent, name)
            .ok()
            .map(|(_, attr)| attr.ino);
        let doomed = doomed.filter(|(_, id)| Some(id.ino) != renamed);
        self.begin_to_end_names(doomed.as_ref())?;
        let outcome = self.below.rename(parent, name, new_parent, new_name, flags);
        self.end_names(doomed, outcome)
    }

    fn readlink(&self, inode: &LogInode<B>) -> Result<Vec<u8>> {
        self.below.readlink(&inode.below)
    }

    fn attr(&self, inode: &LogInode<B>) -> Result<Attr> {
        let logged = self.find(inode.id)?;
        self.shown(logged.as_ref(), &|| self.below.attr(&inode.below))
    }

    fn attr_of_file(&self, file: &LogFile<B>) -> Result<Attr> {
        self.look_around()?;
        let logged = file.logged.as_ref().map(|opened| &opened.file);
        self.shown(logged, &|| self.below.attr_of_file(&file.below))
    }

    fn set_mode(&self, inode: &LogInode<B>, mode: u32) -> Result<()> {
        self.below.set_mode(&inode.below, mode)
    }

    fn set_owner(&self, inode: &LogInode<B>, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.below.set_owner(&inode.below, uid, gid)
    }

    fn set_times(&self, inode: &LogInode<B>, atime: SetTime, mtime: SetTime) -> Result<()> {
        let logged = self.find(inode.id)?;
        self.below.set_times(&inode.below, atime, mtime)?;
        if let Some(file) = logged {
            *file.modified.lock() = None;
        }
        Ok(())
    }

    fn get_xattr(&self, inode: &LogInode<B>, name: &OsStr) -> Result<Vec<u8>> {
        self.below.get_xattr(&inode.below, name)
    }

    fn set_xattr(&self, inode: &LogInode<B>, name: &OsStr, value: &[u8], flags: i32) -> Result<()> {
        self.below.set_xattr(&inode.below, name, value, flags)
    }

    fn list_xattr(&self, inode: &LogInode<B>) -> Result<Vec<u8>> {
        self.below.list_xattr(&inode.below)
    }

    fn remove_xattr(&self, inode: &LogInode<B>, name: &OsStr) -> Result<()> {
        self.below.remove_xattr(&inode.below, name)
    }

    fn has_default_acl(&self, inode: &LogInode<B>) -> bool {
        self.below.has_default_acl(&inode.below)
    }

    fn open_dir(&self, inode: &LogInode<B>) -> Result<B::Dir> {
        self.below.open_dir(&inode.below)
    }

    fn read_dir(
        &self,
        dir: &B::Dir,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        self.below.read_dir(dir, cookie, sink)
    }

    fn sync_dir(&self, inode: &LogInode<B>) -> Result<()> {
        self.below.sync_dir(&inode.below)
    }

    fn open(&self, inode: &LogInode<B>, access: Access) -> Result<LogFile<B>> {
        // What is below a log is read too: base bytes, and what was flattened.
        let logged = self.open_logged(inode, access)?;
        let below_access = match (&logged, access) {
            (Some(_), Access::Write) => Access::ReadWrite,
            (_, access) => access,
        };
        if let Some(opened) = &logged {
            opened.file.check_lost()?;
        }
        let below = self.below.open(&inode.below, below_access)?;
        Ok(LogFile { below, logged })
    }

    fn read_at(&self, file: &LogFile<B>, buf: &mut [u8], offset: u64) -> Result<usize> {
        let opened = file.logged.as_ref();
        if opened.is_some_and(|opened| opened.access == Access::Write) {
            return Err(Errno::BADF);
        }
        if opened.is_some() {
            self.look_around()?;
        }
        match file.logged() {
            Some(logged) => logged.read(&self.place(), &file.below, buf, offset),
            None => {
                if let Some(opened) = opened {
                    opened.file.check_lost()?;
                }
                self.below.read_at(&file.below, buf, offset)
            }
        }
    }

    fn write_at(&self, file: &LogFile<B>, data: &[IoSlice<'_>], offset: u64) -> Result<usize> {
        let part = DataPart { offset, data };
        match file.writable(Errno::BADF)? {
            None => self.below.write_at(&file.below, data, offset),
            Some(_) if part.is_empty() => Ok(0),
            Some(_) => Ok(self.write_parts(file, &[part])? as usize),
        }
    }

    /// One append to the log of this host and one frame, or nothing: all of it, as far as a frame speaks of so much.
    fn write_parts(&self, file: &LogFile<B>, parts: &[DataPart<'_>]) -> Result<u64> {
        let Some(logged) = file.writable(Errno::BADF)? else {
            return self.below.write_parts(&file.below, parts);
        };
        let parts = first_of_a_frame(parts)?;
        let plain = || Ok(self.below.attr_of_file(&file.below)?.size);
        logged.write(&self.place(), &plain, parts)?;
        self.note_modified(file);
        Ok(parts.iter().map(DataPart::len).sum())
    }

    /// Bytes of a log need not be near each other in the file.
    fn gathers(&self, inode: &LogInode<B>) -> bool {
        let Some(id) = inode.id else {
            // A directory: files in it may be logged.
            return true;
        };
        self.is_written_to_logs(inode, id)
    }

    fn set_len(&self, file: &LogFile<B>, len: u64) -> Result<()> {
        let Some(logged) = file.writable(Errno::INVAL)? else {
            return self.below.set_len(&file.below, len);
        };
        let plain = || Ok(self.below.attr_of_file(&file.below)?.size);
        logged.set_len(&self.place(), &plain, len)?;
        self.note_modified(file);
        Ok(())
    }

    fn allocate(&self, file: &LogFile<B>, mode: i32, offset: u64, len: u64) -> Result<()> {
        let Some(logged) = file.writable(Errno::BADF)? else {
            return self.below.allocate(&file.below, mode, offset, len);
        };
        let place = self.place();
        if len == 0 {
            return Err(Errno::INVAL);
        }
        let end = offset.checked_add(len).ok_or(Errno::FBIG)?;
        if end > FILE_BYTES_MAX {
            return Err(Errno::FBIG);
        }
        let plain = || Ok(self.below.attr_of_file(&file.below)?.size);
        let file_bytes = self.attr_of_file(file)?.size;
        let keeps_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        match mode & !libc::FALLOC_FL_KEEP_SIZE {
            // Room in a log cannot be kept for later: only the length counts.
            0 => {}
            libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE => {
                let zeroed = end.min(file_bytes).saturating_sub(offset);
                if zeroed > 0 {
                    let piece = Piece {
                        offset,
                        len: zeroed,
                    };
                    logged.zero(&place, &plain, piece)?;
                    self.note_modified(file);
                }
            }
            _ => return Err(Errno::OPNOTSUPP),
        }
        if end > file_bytes && !keeps_size {
            logged.set_len(&place, &plain, end)?;
            self.note_modified(file);
        }
        Ok(())
    }

    fn seek(&self, file: &LogFile<B>, offset: u64, what: Seek) -> Result<u64> {
        match file.logged() {
            None => self.below.seek(&file.below, offset, what),
            Some(logged) => {
                let plain_bytes = self.below.attr_of_file(&file.below)?.size;
                logged.seek(&self.place(), plain_bytes, offset, what)
            }
        }
    }

    fn copy_range(
        &self,
        from: &LogFile<B>,
        from_offset: u64,
        to: &LogFile<B>,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        if from.logged().is_none() && to.logged.is_none() {
            let (from, to) = (&from.below, &to.below);
            return self.below.copy_range(from, from_offset, to, to_offset, len);
        }
        let id = |file: &LogFile<B>| file.logged.as_ref().map(|opened| opened.file.id);
        let distance = from_offset.abs_diff(to_offset);
        let len = len.min(self.attr_of_file(from)?.size.saturating_sub(from_offset));
        if id(from).is_some() && id(from) == id(to) && distance < len {
            return Err(Errno::INVAL);
        }
        copy_through_memory(self, from, from_offset, to, to_offset, len)
    }

    fn sync(&self, file: &LogFile<B>, data_only: bool) -> Result<()> {
        if let Some(opened) = &file.logged {
            opened.file.sync(&self.place())?;
            self.see_others(opened)?;
        }
        self.below.sync(&file.below, data_only)
    }

    fn begin_sync(&self, file: &LogFile<B>, offset: u64, len: u64) {
        if file.logged.is_none() {
            self.below.begin_sync(&file.below, offset, len);
        }
    }

    fn try_lock(&self, file: &LogFile<B>, mode: LockMode) -> Result<bool> {
        self.below.try_lock(&file.below, mode)
    }

    /// None where the kernel would miss what is in logs, now or later.
    fn fd<'a>(&self, file: &'a LogFile<B>) -> Option<BorrowedFd<'a>> {
        match file.logged {
            None => self.below.fd(&file.below),
            Some(_) => None,
        }
    }

    fn kernel_reads(&self, file: &LogFile<B>) -> KernelReads {
        match &file.logged {
            None => self.below.kernel_reads(&file.below),
            Some(opened) if opened.file.is_logged() || opened.file.check_lost().is_err() => {
                KernelReads::Never
            }
            Some(_) => KernelReads::Cached,
        }
    }

    fn note_opened(&self, file: &LogFile<B>, writes: bool) -> Result<()> {
        let Some(opened) = &file.logged else {
            return self.below.note_opened(&file.below, writes);
        };
        self.see_others(opened)?;
        if writes && let Err(error) = self.begin_writing(file, opened) {
            // Whoever writes is told, and who does not needs none.
            tracing::debug!(%error, "cannot begin a log yet");
        }
        Ok(())
    }

    fn finishes_files(&self) -> bool {
        true
    }

    fn note_written(&self, file: &LogFile<B>) {
        if let Some(opened) = &file.logged {
            opened.file.is_written.store(false, Ordering::Release);
            if opened.file.has_containers() {
                self.ended.add(&opened.file, &opened.inode);
            }
        }
    }

    fn finish_file(&self, file: &LogFile<B>) -> Result<()> {
        let Some(opened) = &file.logged else {
            return Ok(());
        };
        opened.file.is_written.store(false, Ordering::Release);
        let mut rest = REST_FIRST;
        while opened.file.has_containers() {
            match self.settle_one(&opened.file, &opened.inode)? {
                Flattened::Flat => break,
                Flattened::Written => {
                    self.ended.add(&opened.file, &opened.inode);
                    break;
                }
                Flattened::UnderWay => std::thread::sleep(rest),
            }
            rest = (2 * rest).min(REST_LAST);
        }
        Ok(())
    }

    fn is_logged(&self, inode: &LogInode<B>) -> bool {
        let file = self.find(inode.id).ok().flatten();
        file.is_some_and(|file| file.is_logged())
    }

    fn lane_count(&self) -> u16 {
        self.below.lane_count()
    }

    /// That of this host's log, for a file that is written to one.
    fn lane_of(&self, inode: &LogInode<B>) -> LaneIndex {
        let logged = inode.id.filter(|id| self.is_written_to_logs(inode, *id));
        let lane = logged.and_then(|id| self.below.lane_of_turn(self.place().turn_of(id)));
        lane.unwrap_or_else(|| self.below.lane_of(&inode.below))
    }

    fn lane_of_turn(&self, turn: u64) -> Option<LaneIndex> {
        self.below.lane_of_turn(turn)
    }

    fn statfs(&self) -> Result<StatFs> {
        self.below.statfs()
    }

    fn sync_all(&self) -> Result<()> {
        self.sync_logs()?;
        self.below.sync_all()
    }

    fn sync_changes(&self) -> Result<()> {
        self.sync_logs()?;
        self.below.sync_changes()
    }

    fn sync_tree(&self, inode: &LogInode<B>) -> Result<()> {
        self.sync_logs()?;
        self.below.sync_tree(&inode.below)
    }

    fn sync_way(&self) -> SyncWay {
        self.below.sync_way()
    }
}
