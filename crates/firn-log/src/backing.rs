//! The log layout as a backing over a backing: files of which some have their bytes in containers.
//!
//! Names, attributes and everything that is no chosen file go to the backing below. A file that was written through
//! containers once is read through them by every host, whatever it chooses, until it is flat.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use firn_backing::lock::Mutex;
use firn_backing::{
    Access, Attr, Backing, Caller, DataPart, DirEntry, Errno, Kind, LaneIndex, LockMode,
    RenameFlags, Result, Seek, SetTime, StatFs, SyncWay, copy_through_memory,
};
use firn_rendezvous::OwnError;
use firn_rendezvous::own::{self, TOP};

use crate::container::Memory;
use crate::file::{FileId, Listed, LoggedFile, Place};
use crate::frame::{PIECES_MAX, SPAN_BYTES_MAX};
use crate::orphans::{self, DEAD, DYING, Orphans};
use crate::run::{FILE_BYTES_MAX, Piece};

/// In `.firn/`.
pub(crate) const CONTAINERS: &str = "log";
/// Bytes of sorted indexes in memory, of all files: half of what a reader may take, and a block of each index of a file
/// that many hosts wrote.
const INDEX_BYTES_MAX: u64 = 32 << 20;

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
}

/// See the module.
pub struct LogBacking<B: Backing> {
    below: B,
    top: B::Inode,
    memory: Arc<Memory>,
    setup: Setup,
    files: Mutex<Files<B>>,
    ended: Arc<Ended<B>>,
}

/// Files that this host wrote to and that nobody here has open for writing any more, with their inodes.
type Ended<B> = Mutex<Vec<(Arc<LoggedFile<B>>, <B as Backing>::Inode)>>;

struct Files<B: Backing> {
    /// Those that have containers, and those that this host has open for writing.
    known: HashMap<FileId, Arc<LoggedFile<B>>>,
    listed: Option<Instant>,
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
        if (wrote_last && file.is_logged()) || (was_last && is_removed) {
            let ended = (Arc::clone(file), self.inode.clone());
            self.ended.lock().push(ended);
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
        let firn = own::dir(&below, &below.root(), TOP)?;
        let top = own::dir(&below, &firn, CONTAINERS).map_err(|error| error.below(TOP))?;
        orphans::end_last_life(&below, &top, &setup.host, &setup.is_alive)?;
        Ok(Self {
            below,
            top,
            memory: Memory::new(INDEX_BYTES_MAX),
            setup,
            files: Mutex::new(Files {
                known: HashMap::new(),
                listed: None,
            }),
            ended: Arc::default(),
        })
    }

    /// The same, with at most so many bytes of sorted indexes in memory.
    #[must_use]
    pub fn with_memory(self, bytes: u64) -> Self {
        let memory = Memory::new(bytes);
        Self { memory, ..self }
    }

    /// Ends and flattens files that nobody writes to any more, as far as other hosts let it. The number of those that
    /// are still to be flattened.
    pub fn settle(&self) -> Result<usize> {
        let ended = std::mem::take(&mut *self.ended.lock());
        let mut left = Vec::new();
        let mut failure = None;
        for (file, inode) in ended {
            match self.settle_one(&file, &inode) {
                Ok(true) => {}
                Ok(false) => left.push((file, inode)),
                Err(error) => {
                    failure = Some(error);
                    left.push((file, inode));
                }
            }
        }
        let count = left.len();
        self.ended.lock().extend(left);
        failure.map_or(Ok(count), Err)
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

    /// True if there is nothing more to do.
    fn settle_one(&self, file: &Arc<LoggedFile<B>>, inode: &B::Inode) -> Result<bool> {
        let place = self.place();
        if file.writers.load(Ordering::Acquire) > 0 {
            return Ok(true);
        }
        file.end_writing(&place)?;
        if file.is_removed.load(Ordering::Acquire) {
            if file.opens.load(Ordering::Acquire) > 0 {
                return Ok(true);
            }
            file.remove(&place)?;
            let known = self.files.lock().known.remove(&file.id);
            drop(known);
            return Ok(true);
        }
        let is_flat = file.flatten(&place, inode, self.setup.unit_bytes, &self.setup.is_alive)?;
        if is_flat {
            self.forget(file);
        }
        Ok(is_flat)
    }

    fn forget(&self, file: &LoggedFile<B>) {
        let known = {
            let mut files = self.files.lock();
            let is_unused = file.opens.load(Ordering::Acquire) == 0 && !file.is_logged();
            is_unused.then(|| files.known.remove(&file.id))
        };
        drop(known);
    }

    fn place(&self) -> Place<'_, B> {
        Place {
            base: &self.below,
            top: &self.top,
            host: &self.setup.host,
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
                if let Err(error) = file.look(&self.place(), listed) {
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

    /// Attributes as programs see them: the length is that of all bytes.
    fn shown(&self, attr: Attr, logged: Option<&Arc<LoggedFile<B>>>) -> Attr {
        match logged {
            Some(file) if file.is_logged() => Attr {
                size: file.len(attr.size),
                ..attr
            },
            _ => attr,
        }
    }

    fn open_logged(&self, inode: &LogInode<B>, access: Access) -> Result<Option<Opened<B>>> {
        let Some(id) = inode.id else {
            return Ok(None);
        };
        let writes = access != Access::Read;
        let file = match self.find(Some(id))? {
            Some(file) => file,
            None if inode.is_chosen => self.find_or_add(id)?,
            None => return Ok(None),
        };
        file.opens.fetch_add(1, Ordering::AcqRel);
        if writes {
            file.writers.fetch_add(1, Ordering::AcqRel);
        }
        let opened = Opened {
            file,
            inode: inode.below.clone(),
            access,
            ended: Arc::clone(&self.ended),
        };
        // Close-to-open: what others have closed is seen.
        opened.file.look_again(&self.place())?;
        if writes {
            opened.file.take_epoch(&self.place())?;
        }
        Ok(Some(opened))
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
            self.ended.lock().push((file, inode));
        }
        Ok(())
    }
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
        let (inode, attr) = self.below.lookup(&parent.below, name)?;
        let inode = self.inode(inode, &attr, Some(name))?;
        let logged = self.find(inode.id)?;
        Ok((inode, self.shown(attr, logged.as_ref())))
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
        let attr = self.below.link(&inode.below, &parent.below, name)?;
        let logged = self.find(inode.id)?;
        Ok(self.shown(attr, logged.as_ref()))
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
        let attr = self.below.attr(&inode.below)?;
        let logged = self.find(inode.id)?;
        Ok(self.shown(attr, logged.as_ref()))
    }

    fn attr_of_file(&self, file: &LogFile<B>) -> Result<Attr> {
        let attr = self.below.attr_of_file(&file.below)?;
        self.look_around()?;
        let logged = file.logged.as_ref().map(|opened| &opened.file);
        Ok(self.shown(attr, logged))
    }

    fn set_mode(&self, inode: &LogInode<B>, mode: u32) -> Result<()> {
        self.below.set_mode(&inode.below, mode)
    }

    fn set_owner(&self, inode: &LogInode<B>, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.below.set_owner(&inode.below, uid, gid)
    }

    fn set_times(&self, inode: &LogInode<B>, atime: SetTime, mtime: SetTime) -> Result<()> {
        self.below.set_times(&inode.below, atime, mtime)
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
        let below = self.below.open(&inode.below, below_access)?;
        Ok(LogFile { below, logged })
    }

    fn read_at(&self, file: &LogFile<B>, buf: &mut [u8], offset: u64) -> Result<usize> {
        let opened = file.logged.as_ref();
        if opened.is_some_and(|opened| opened.access == Access::Write) {
            return Err(Errno::BADF);
        }
        match file.logged() {
            Some(logged) => logged.read(&self.place(), &file.below, buf, offset),
            None => self.below.read_at(&file.below, buf, offset),
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
        let plain_bytes = self.below.attr_of_file(&file.below)?.size;
        logged.write(&self.place(), plain_bytes, parts)?;
        Ok(parts.iter().map(DataPart::len).sum())
    }

    /// Bytes of a log need not be near each other in the file.
    fn gathers(&self, inode: &LogInode<B>) -> bool {
        let Some(id) = inode.id else {
            // A directory: files in it may be logged.
            return true;
        };
        inode.is_chosen || self.files.lock().known.contains_key(&id)
    }

    fn set_len(&self, file: &LogFile<B>, len: u64) -> Result<()> {
        let Some(logged) = file.writable(Errno::INVAL)? else {
            return self.below.set_len(&file.below, len);
        };
        let plain_bytes = self.below.attr_of_file(&file.below)?.size;
        logged.set_len(&self.place(), plain_bytes, len)
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
        let plain_bytes = self.below.attr_of_file(&file.below)?.size;
        let file_bytes = logged.len(plain_bytes);
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
                    logged.zero(&place, plain_bytes, piece)?;
                }
            }
            _ => return Err(Errno::OPNOTSUPP),
        }
        if end > file_bytes && !keeps_size {
            logged.set_len(&place, plain_bytes, end)?;
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

    fn lane_count(&self) -> u16 {
        self.below.lane_count()
    }

    fn lane_of(&self, inode: &LogInode<B>) -> LaneIndex {
        self.below.lane_of(&inode.below)
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
