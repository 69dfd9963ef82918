//! A file with containers: its generations, one above the other.
//!
//! A generation is a container. A new one is made when the last one is ending and writes continue. The lowest lies over
//! the plain file; when it is flat, the next one does.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::behind::{Behind, is_gone, read_whole};
use crate::container::{ChangeError, Changed, Container, Memory, Walk, next_change};
use crate::file_dir::{self, Listed};
use crate::file_id::FileId;
use crate::frame::Change;
use crate::head::{self, HEAD, Head};
use crate::locate::{Holder, Locating, Room};
use crate::orphans::{DEAD, DYING, Found, unmark};
use crate::resolve::{Segment, Source};
use crate::run::Piece;
use crate::salvage::{Report, Teller};
use crate::seal::{Ending, Flat, WRITING};
use crate::tag::{self, Home};
use firn_backing::lock::Mutex;
use firn_backing::{Access, Attr, Backing, DataPart, Errno, LocateLimits, Result, Seek, Time};
use firn_hosts::{OwnError, VoteDir, own};
use parking_lot::Condvar;
use xxhash_rust::xxh3::xxh3_64;

/// A file that is flattened while it is read is looked at anew; no more often than this.
const LOOKS_MAX: usize = 100;

/// A file that has containers, or is to get one.
pub(crate) struct LoggedFile<B: Backing> {
    pub(crate) id: FileId,
    /// The lowest first.
    generations: Mutex<Vec<Arc<Generation<B>>>>,
    /// The last [`next_change`] with which other generations were found; 0 before there were any.
    pub(crate) changes: AtomicU64,
    looks: Mutex<Looks>,
    looked: Condvar,
    /// Descriptors of this host that may write to it.
    pub(crate) writers: AtomicU64,
    /// All descriptors of this host.
    pub(crate) opens: AtomicU64,
    /// This host has written to it since it said that it had done so.
    pub(crate) is_written: AtomicBool,
    /// It has containers without bytes that count: unfinished or half-removed containers of a dead host.
    has_remains: AtomicBool,
    /// When this host last updated the plain file's modification time; None after its times were set here.
    pub(crate) modified: Mutex<Option<Instant>>,
    /// This host is about to remove its last name, or has done so.
    pub(crate) is_dying: AtomicBool,
    /// This host has removed its last name.
    pub(crate) is_removed: AtomicBool,
    /// Once it was opened here.
    pub(crate) inode: OnceLock<B::Inode>,
    /// Another host has removed it, with bytes that were in logs.
    is_lost: AtomicBool,
    /// Why its containers could not be read when this host looked last.
    trouble: Mutex<Option<Errno>>,
    behind: Behind,
}

/// Looks at the containers that there are.
#[derive(Default)]
struct Looks {
    is_under_way: bool,
    /// When this host synced the file last, until it has looked what others had synced by then: before it uses the file.
    synced: Option<Instant>,
    /// Begin of the last look.
    last: Option<Instant>,
    /// The same, also if the look failed.
    last_tried: Option<Instant>,
}

/// Tells how many bytes the plain file has.
pub(crate) type PlainBytes<'a> = dyn Fn() -> Result<u64> + 'a;

/// Says of a host whether it lives.
pub(crate) type IsAlive<'a> = dyn Fn(&str) -> Result<bool> + 'a;

/// How far a file is on its way into the plain file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flattened {
    /// It is the plain file.
    Flat,
    /// Other hosts have parts of it to write.
    UnderWay,
    /// The file is being written.
    Written,
}

/// Where the losses of a file are told, and what it is called there.
pub(crate) struct ToldOf<'a> {
    pub(crate) path: &'a Path,
    pub(crate) report: &'a mut dyn Report,
}

struct Generation<B: Backing> {
    id: FileId,
    number: u32,
    /// Inode number of its directory, which is held open: a later container may have the same name.
    dir: u64,
    name: String,
    has_own_base: bool,
    container: Container<B>,
    /// This host has said that it writes.
    is_joined: AtomicBool,
    /// This host knows that its bytes are in the plain file.
    was_flat: AtomicBool,
    /// This host has synced the directory that it is in.
    is_name_durable: AtomicBool,
    /// This host has tagged the plain file.
    is_tagged: AtomicBool,
}

/// Where containers are, and the identity of this host.
pub(crate) struct ContainerSite<'a, B: Backing> {
    pub(crate) base: &'a B,
    pub(crate) top: &'a B::Inode,
    /// What tags of plain files call `top`.
    pub(crate) home: Home,
    pub(crate) host: &'a str,
    /// Turn of this host ([`crate::turn`]).
    pub(crate) turn: u64,
    pub(crate) memory: &'a Arc<Memory>,
    /// How old this host's view of other hosts' changes may be.
    pub(crate) lag_max: Duration,
    pub(crate) is_alive: &'a IsAlive<'a>,
}

impl<'a, B: Backing> ContainerSite<'a, B> {
    /// That of what this host writes to a file.
    pub(crate) fn turn_of(&self, id: FileId) -> u64 {
        self.turn.wrapping_add(xxh3_64(&id.ino.to_le_bytes()))
    }

    /// The end of a container, which has this name; None if it is gone.
    fn ending<'c>(
        &self,
        id: FileId,
        container: &'c Container<B>,
        name: &str,
    ) -> Result<Option<Ending<'c, B>>>
    where
        'a: 'c,
    {
        match file_dir::find(self.base, self.top, id)? {
            Some(dir) => Ending::of(self.base, container, &dir, name),
            None => Ok(None),
        }
    }
}

impl<B: Backing> LoggedFile<B> {
    pub(crate) fn new(id: FileId) -> Self {
        Self {
            id,
            generations: Mutex::default(),
            changes: AtomicU64::new(0),
            modified: Mutex::default(),
            looks: Mutex::default(),
            looked: Condvar::new(),
            writers: AtomicU64::new(0),
            opens: AtomicU64::new(0),
            is_written: AtomicBool::new(false),
            has_remains: AtomicBool::new(false),
            is_dying: AtomicBool::new(false),
            is_removed: AtomicBool::new(false),
            inode: OnceLock::new(),
            is_lost: AtomicBool::new(false),
            trouble: Mutex::default(),
            behind: Behind::default(),
        }
    }

    /// Does something with the file until it is done, or fails for another reason than that the backing is a moment behind
    /// what other hosts did ([`crate::behind`]).
    pub(crate) fn wait_for<T>(
        &self,
        place: &ContainerSite<'_, B>,
        work: &mut dyn FnMut() -> Result<T>,
    ) -> Result<T> {
        let mut look = || {
            // What is wrong is found by the next try, too.
            if let Err(error) = self.look_again(place) {
                tracing::debug!(ino = self.id.ino, %error, "containers cannot be read yet");
            }
        };
        let mut try_once = || {
            let done = work();
            if done.is_err() {
                let all = self.all();
                let faults = all.iter().filter_map(|one| one.container.take_fault());
                faults.for_each(|fault| self.behind.note_fault(fault));
            }
            match self.check_lost() {
                // The file is gone, and nothing of it comes any more.
                Err(_) if done.is_err() => Ok(done),
                _ => done.map(Ok),
            }
        };
        self.behind
            .wait_for(place.lag_max, &mut look, &mut try_once)?
    }

    fn all(&self) -> Vec<Arc<Generation<B>>> {
        self.generations.lock().clone()
    }

    /// Whether bytes of it are in logs, as far as this host has looked.
    pub(crate) fn is_logged(&self) -> bool {
        !self.generations.lock().is_empty() || self.trouble().is_err()
    }

    /// Bytes of it that this host has written to logs and that are there still.
    pub(crate) fn own_bytes(&self) -> u64 {
        let generations = self.generations.lock();
        let bytes = generations.iter().map(|one| one.container.own_bytes());
        bytes.sum()
    }

    /// Whether something of it is left to be flattened or removed.
    pub(crate) fn has_containers(&self) -> bool {
        self.is_logged() || self.has_remains.load(Ordering::Acquire)
    }

    /// ESTALE if its bytes are gone, because another host has removed it.
    pub(crate) fn check_lost(&self) -> Result<()> {
        if self.is_lost.load(Ordering::Acquire) {
            Err(Errno::STALE)
        } else {
            Ok(())
        }
    }

    /// Grows each time this host learns that others have changed the file.
    pub(crate) fn changes_by_others(&self) -> u64 {
        let generations = self.generations.lock();
        let last = generations.iter().map(|one| one.container.news()).max();
        self.changes.load(Ordering::Acquire).max(last.unwrap_or(0))
    }

    /// The error, if its containers cannot be read.
    fn trouble(&self) -> Result<()> {
        self.trouble.lock().map_or(Ok(()), Err)
    }

    /// Whether this host has looked at its containers since it knows of them.
    pub(crate) fn was_looked_at(&self) -> bool {
        self.looks.lock().last_tried.is_some()
    }

    /// Looks for the generations that there are. A look that began later makes this one void. Where a generation cannot be
    /// read, the file is not read before a later look.
    pub(crate) fn look_again(&self, place: &ContainerSite<'_, B>) -> Result<()> {
        let began = Instant::now();
        let is_seen = |looks: &Looks| looks.last.is_some_and(|last| last > began);
        self.look_unless(&is_seen, place, began)
    }

    /// Looks for the generations that there are, unless that was done since this host synced the file. A writer that syncs
    /// and closes the file never reads what others wrote.
    pub(crate) fn look_after_sync(&self, place: &ContainerSite<'_, B>) -> Result<()> {
        let (synced, last) = {
            let looks = self.looks.lock();
            (looks.synced, looks.last)
        };
        if synced.is_none() {
            return Ok(());
        }
        if last < synced {
            self.look_again(place)?;
        }
        self.raise_epoch();
        let mut looks = self.looks.lock();
        // Another sync may have ended meanwhile.
        if looks.synced == synced {
            looks.synced = None;
        }
        Ok(())
    }

    /// What this host writes from now on is newer than all that it has seen.
    pub(crate) fn raise_epoch(&self) {
        if let Some(top) = self.all().last() {
            top.container.raise_epoch();
        }
    }

    /// The bytes that others synced until now are seen by the next use of the file ([`LoggedFile::look_after_sync`]).
    /// What readers have of it ends here: which of that is old is known only then.
    fn note_synced(&self) {
        self.looks.lock().synced = Some(Instant::now());
        if self.is_logged() {
            self.changes.fetch_max(next_change(), Ordering::AcqRel);
        }
    }

    /// The same after a listing of all files that several threads use: the first one looks, the others wait for it.
    /// `began` is when the listing began, `is_listed` whether it has the file.
    pub(crate) fn look_after_listing(
        &self,
        place: &ContainerSite<'_, B>,
        began: Instant,
        is_listed: bool,
    ) -> Result<()> {
        if !is_listed && !self.has_containers() {
            return Ok(());
        }
        let is_seen = |looks: &Looks| looks.last_tried.is_some_and(|last| last >= began);
        self.look_unless(&is_seen, place, began)
    }

    /// Opens the generations that there are, and forgets those that are gone or flat.
    fn look_unless(
        &self,
        is_seen: &dyn Fn(&Looks) -> bool,
        place: &ContainerSite<'_, B>,
        began: Instant,
    ) -> Result<()> {
        {
            let mut looks = self.looks.lock();
            while looks.is_under_way {
                looks.wait(&self.looked);
            }
            if is_seen(&looks) {
                return Ok(());
            }
            looks.is_under_way = true;
            looks.last_tried = looks.last_tried.max(Some(began));
        }
        let seen = self.look_alone(place);
        *self.trouble.lock() = seen.err();
        let mut looks = self.looks.lock();
        looks.is_under_way = false;
        if seen.is_ok() {
            looks.last = Some(began);
        }
        self.looked.notify_all();
        seen
    }

    /// One look at a time: of two that find the same container both would open it, and what this host knows of its own
    /// logs would be lost with one of them.
    fn look_alone(&self, place: &ContainerSite<'_, B>) -> Result<()> {
        let mut listed = self.list(place)?;
        listed.sort_unstable();
        let known = self.all();
        let mut found = Vec::new();
        let count = listed.len();
        let is_gone = |known: &Arc<Generation<B>>| {
            let is_it = |listed: &Listed| (listed.number, listed.dir) == (known.number, known.dir);
            !known.was_flat.load(Ordering::Acquire) && !listed.iter().any(is_it)
        };
        // One that is gone is flat, or was removed with its file.
        if known.iter().any(is_gone) && self.is_nameless(place)? {
            self.is_lost.store(true, Ordering::Release);
        }
        for listed in listed {
            let is_it = |generation: &&Arc<Generation<B>>| {
                (generation.number, generation.dir) == (listed.number, listed.dir)
            };
            let old = known.iter().find(is_it);
            let generation = match old {
                Some(old) => Some(Arc::clone(old)),
                None => self.open_generation(place, listed.number)?,
            };
            let Some(generation) = generation else {
                continue;
            };
            match generation.container.refresh(place.base) {
                _ if generation.container.was_seen_flat() => continue,
                // Another host was faster, and is removing it.
                Err(_) if generation.is_flat(place)? => continue,
                refreshed => refreshed?,
            }
            found.push(generation);
        }
        self.has_remains
            .store(found.len() < count, Ordering::Release);
        let is_same =
            known.len() == found.len() && known.iter().zip(&found).all(|(a, b)| Arc::ptr_eq(a, b));
        // First: a reader that took the plain file's length before it was flat sees that it has to read it again.
        if !is_same {
            self.changes.fetch_max(next_change(), Ordering::AcqRel);
        }
        // Files are closed after the lock is free.
        let old = std::mem::replace(&mut *self.generations.lock(), found);
        drop(old);
        Ok(())
    }

    /// Whether it is open here, and another host has removed its last name.
    fn is_nameless(&self, place: &ContainerSite<'_, B>) -> Result<bool> {
        let Some(inode) = self.inode.get() else {
            return Ok(false);
        };
        if self.is_removed.load(Ordering::Acquire) {
            return Ok(false);
        }
        match place.base.attr_now(inode) {
            Ok(attr) => Ok(attr.nlink == 0),
            Err(error) if is_gone(error) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// A generation whose indexes are read; None if it is gone, or has no writes yet.
    fn open_generation(
        &self,
        place: &ContainerSite<'_, B>,
        number: u32,
    ) -> Result<Option<Arc<Generation<B>>>> {
        let Some(generation) = self.find_generation(place, number)? else {
            return Ok(None);
        };
        match generation.container.take_epoch(place.base) {
            // It was flattened meanwhile, and removed.
            Err(_) if !generation.is_current(place)? => Ok(None),
            Err(error) => {
                let fault = generation.container.take_fault();
                fault
                    .into_iter()
                    .for_each(|fault| self.behind.note_fault(fault));
                Err(error)
            }
            Ok(()) => Ok(Some(Arc::new(generation))),
        }
    }

    /// Finds a generation without reading its indexes.
    fn find_generation(
        &self,
        place: &ContainerSite<'_, B>,
        number: u32,
    ) -> Result<Option<Generation<B>>> {
        let name = self.id.container_name(number);
        let find = || file_dir::find_container(place.base, place.top, self.id, number);
        let Some((dir, attr)) = find()? else {
            return Ok(None);
        };
        let head = match head::load(place.base, &dir, self.id, number)? {
            Ok(Some(head)) => head,
            // It is being made: it has no writes yet.
            Ok(None) => return Ok(None),
            // Removed since it was opened.
            Err(_) if find()?.is_none() => return Ok(None),
            Err(error) => {
                tracing::error!(
                    container = name,
                    file = HEAD,
                    "a container cannot be read: {error}"
                );
                return Err(Errno::IO);
            }
        };
        let base_bytes = head.base.unwrap_or(0);
        let container = Container::open_unread(dir, &name, place.host, base_bytes, place.memory)
            .in_turn(place.turn_of(self.id));
        Ok(Some(Generation {
            id: self.id,
            number,
            dir: attr.ino,
            name,
            has_own_base: head.base.is_some(),
            container,
            is_joined: AtomicBool::new(false),
            was_flat: AtomicBool::new(false),
            is_name_durable: AtomicBool::new(false),
            is_tagged: AtomicBool::new(false),
        }))
    }

    /// Bytes of the file; `plain_bytes` are those of the plain file.
    pub(crate) fn len(&self, plain_bytes: u64) -> u64 {
        let generations = self.all();
        Self::set_bases(&generations, plain_bytes);
        let top = generations.last();
        top.map_or(plain_bytes, |top| top.container.len())
    }

    /// Its modification time, where the plain file has another one because it is being flattened.
    pub(crate) fn modified_time(&self) -> Option<Time> {
        let generations = self.generations.lock();
        let is_left = |one: &&Arc<Generation<B>>| !one.was_flat.load(Ordering::Acquire);
        generations.iter().find(is_left)?.container.modified()
    }

    /// Gives the plain file a modification time by `set`, and says so where the plain file is being flattened, which would
    /// give it another one. `given` is the time.
    pub(crate) fn set_modified(
        &self,
        place: &ContainerSite<'_, B>,
        given: Time,
        set: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let known = self.all();
        set()?;
        let mut is_flattened = false;
        for generation in &known {
            // No other host ends a container that this host writes to.
            if !generation.is_joined.load(Ordering::Acquire) {
                is_flattened |= generation.add_time(place, given)?;
            }
        }
        if is_flattened {
            set()?;
            self.look_again(place)?;
        }
        Ok(())
    }

    /// Tells each generation how long the file below it is.
    fn set_bases(generations: &[Arc<Generation<B>>], plain_bytes: u64) {
        let mut below = plain_bytes;
        for generation in generations {
            if !generation.has_own_base {
                generation.container.set_base(below);
            }
            below = generation.container.len();
        }
    }

    /// Reads until `buf` is full or the file ends.
    pub(crate) fn read(
        &self,
        place: &ContainerSite<'_, B>,
        plain: &B::File,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<usize> {
        self.look_after_sync(place)?;
        for _ in 0..LOOKS_MAX {
            self.trouble()?;
            self.check_lost()?;
            let generations = self.all();
            // The length of the plain file means something where it is the base of the lowest one.
            let plain_bytes = match generations.first() {
                Some(lowest) if lowest.has_own_base => 0,
                _ => place.base.attr_of_file_now(plain)?.size,
            };
            Self::set_bases(&generations, plain_bytes);
            match read_stack(place.base, &generations, plain, buf, offset) {
                // Its logs are gone.
                Err(_) if is_any_over(place, &generations) => self.look_again(place)?,
                outcome => return outcome,
            }
        }
        Err(Errno::IO)
    }

    /// Finds where `range` lies in logs and in the plain file, as far as there is room.
    pub(crate) fn locate(
        &self,
        place: &ContainerSite<'_, B>,
        plain: &B::File,
        range: Range<u64>,
        limits: LocateLimits,
    ) -> Result<Locating> {
        self.look_after_sync(place)?;
        for _ in 0..LOOKS_MAX {
            self.trouble()?;
            self.check_lost()?;
            let plain_bytes = place.base.attr_of_file_now(plain)?.size;
            let generations = self.all();
            Self::set_bases(&generations, plain_bytes);
            let len = generations
                .last()
                .map_or(plain_bytes, |top| top.container.len());
            let mut found = Locating::new(range.start, limits);
            let whole = range.start..range.end.min(len);
            let located = if whole.is_empty() {
                Ok(Room::Left)
            } else {
                locate_in_stack(place.base, &generations, plain, whole, &mut found)
            };
            match located {
                // Its logs are gone.
                Err(_) if is_any_over(place, &generations) => self.look_again(place)?,
                outcome => {
                    if outcome? == Room::Left {
                        found.end = range.end;
                    }
                    return Ok(found);
                }
            }
        }
        Err(Errno::IO)
    }

    /// lseek(2): every byte that is in a log or in the plain file is data.
    pub(crate) fn seek(
        &self,
        place: &ContainerSite<'_, B>,
        plain_bytes: u64,
        offset: u64,
        what: Seek,
    ) -> Result<u64> {
        self.look_after_sync(place)?;
        let len = self.len(plain_bytes);
        if offset >= len {
            return Err(Errno::NXIO);
        }
        let generations = self.all();
        let top = generations.last().ok_or(Errno::NXIO)?;
        let wants_data = what == Seek::Data;
        let mut walk = Walk::new(offset..len);
        loop {
            let segments = top.container.find_next(place.base, &mut walk)?;
            let is_data =
                |segment: &Segment| !matches!(segment.source, Source::Hole | Source::Zeros);
            let found = segments
                .iter()
                .find(|segment| is_data(segment) == wants_data);
            match found {
                Some(segment) => return Ok(segment.file.start),
                None if !segments.is_empty() => {}
                None if wants_data => return Err(Errno::NXIO),
                None => return Ok(len),
            }
        }
    }

    /// The containers of the file that have a name.
    fn list(&self, place: &ContainerSite<'_, B>) -> Result<Vec<Listed>> {
        Ok(file_dir::list(place.base, place.top, self.id)?)
    }

    /// Says that it is to lose its last name, or has lost it.
    pub(crate) fn mark(&self, place: &ContainerSite<'_, B>, mark: &str) -> Result<()> {
        self.visit_containers(place, &mut |container| {
            container.put_once(mark, place.host.as_bytes()).map(drop)
        })
    }

    /// Removes the marks: the file still has a name.
    pub(crate) fn unmark(&self, place: &ContainerSite<'_, B>) -> Result<()> {
        self.visit_containers(place, &mut |container| unmark(place.base, container))
    }

    /// Does something in each container that is to be believed. One that is removed meanwhile, because the file is flat,
    /// needs it no more.
    fn visit_containers(
        &self,
        place: &ContainerSite<'_, B>,
        visit: &mut dyn FnMut(&VoteDir<'_, B>) -> Result<()>,
    ) -> Result<()> {
        let listed = match file_dir::list(place.base, place.top, self.id) {
            Err(OwnError::Backing(error)) => return Err(error),
            Err(error) => {
                tracing::warn!("the containers of a file are left as they are: {error}");
                return Ok(());
            }
            Ok(listed) => listed,
        };
        for listed in listed {
            let name = self.id.container_name(listed.number);
            let find = || Found::find(place.base, place.top, &name, place.host);
            let Found::Container(container) = find()? else {
                continue;
            };
            match visit(&container) {
                Err(Errno::NOENT) if matches!(find()?, Found::Gone) => {}
                visited => visited?,
            }
        }
        Ok(())
    }

    /// This host is going to write to it.
    pub(crate) fn begin_writing(
        &self,
        place: &ContainerSite<'_, B>,
        plain: &PlainBytes<'_>,
    ) -> Result<()> {
        self.is_written.store(true, Ordering::Release);
        self.join(place, plain).map(drop)
    }

    /// Writes bytes that do not overlap.
    pub(crate) fn write(
        &self,
        place: &ContainerSite<'_, B>,
        plain: &PlainBytes<'_>,
        parts: &[DataPart<'_>],
    ) -> Result<()> {
        self.change(place, plain, &|container| {
            container.write(place.base, parts)
        })
    }

    /// Cuts the file, or makes it longer. What this host has not seen stays.
    pub(crate) fn set_len(
        &self,
        place: &ContainerSite<'_, B>,
        plain: &PlainBytes<'_>,
        len: u64,
    ) -> Result<()> {
        self.look_again(place)?;
        if !self.is_logged() && plain()? == len {
            return Ok(());
        }
        self.change(place, plain, &|container| {
            self.len(plain()?);
            container.set_len(place.base, len)
        })
    }

    /// Makes the file at least `len` bytes long.
    pub(crate) fn grow(
        &self,
        place: &ContainerSite<'_, B>,
        plain: &PlainBytes<'_>,
        len: u64,
    ) -> Result<()> {
        self.look_again(place)?;
        if !self.is_logged() && plain()? >= len {
            return Ok(());
        }
        self.change(place, plain, &|container| {
            self.len(plain()?);
            container.grow(place.base, len)
        })
    }

    /// Whether the last thing that this host did to the file before it died was to set its length to `len`.
    pub(crate) fn was_set_to(&self, place: &ContainerSite<'_, B>, len: u64) -> Result<bool> {
        self.look_again(place)?;
        for generation in self.all().iter().rev() {
            let last = generation.container.last_change_of_own_index(place.base)?;
            match last {
                None => {}
                Some(Change::Cut(cut)) => return Ok(cut.len == len),
                Some(Change::Grown(grown)) => return Ok(grown == len),
                Some(_) => return Ok(false),
            }
        }
        Ok(false)
    }

    /// Makes bytes zero; the length stays.
    pub(crate) fn zero(
        &self,
        place: &ContainerSite<'_, B>,
        plain: &PlainBytes<'_>,
        piece: Piece,
    ) -> Result<()> {
        self.change(place, plain, &|container| container.zero(place.base, piece))
    }

    fn change(
        &self,
        place: &ContainerSite<'_, B>,
        plain: &PlainBytes<'_>,
        make: &dyn Fn(&Container<B>) -> Changed,
    ) -> Result<()> {
        self.is_written.store(true, Ordering::Release);
        self.look_after_sync(place)?;
        for _ in 0..LOOKS_MAX {
            self.trouble()?;
            let top = self.join(place, plain)?;
            match make(&top.container) {
                Ok(()) if top.is_current(place)? => return Ok(()),
                // What counts is being decided, maybe without it, or is in the plain file by now: it goes to the next
                // generation too.
                Ok(()) | Err(ChangeError::Sealed) => top.end_writing(place)?,
                Err(ChangeError::Failed(_)) if !top.is_current(place)? => top.end_writing(place)?,
                Err(ChangeError::Failed(errno)) => return Err(errno),
            }
        }
        Err(Errno::IO)
    }

    /// The generation that this host writes to.
    fn join(
        &self,
        place: &ContainerSite<'_, B>,
        plain: &PlainBytes<'_>,
    ) -> Result<Arc<Generation<B>>> {
        for _ in 0..LOOKS_MAX {
            if let Some(top) = self.all().pop() {
                match top.join(place) {
                    Ok(true) => return Ok(top),
                    Ok(false) => {}
                    // Another host has flattened it since it was looked at, and removed it.
                    Err(_) if !top.is_current(place)? => {}
                    Err(error) => return Err(error),
                }
            }
            self.make_generation(place, plain)?;
            self.look_again(place)?;
        }
        Err(Errno::IO)
    }

    /// Makes the next generation, if another host does not.
    fn make_generation(&self, place: &ContainerSite<'_, B>, plain: &PlainBytes<'_>) -> Result<()> {
        self.look_again(place)?;
        let last = self.all().last().map(|top| top.number);
        if let Some(top) = self.all().last()
            && let Some(ending) = top.ending(place)?
            && !ending.is_closing()?
        {
            return Ok(());
        }
        let number = last.map_or(0, |last| last + 1);
        let dir = match file_dir::make_container(place.base, place.top, self.id, number) {
            // Another host removes the directory of the file: it is made anew.
            Err(OwnError::Backing(error)) if is_gone(error) => return Ok(()),
            made => made?,
        };
        let find = || file_dir::find_container(place.base, place.top, self.id, number);
        // Asked after the container was made: a removal of the last name marks the containers that exist by then.
        if self.is_removed.load(Ordering::Acquire) {
            own::store(place.base, &dir, DEAD, place.host.as_bytes())?;
        } else if self.is_dying.load(Ordering::Acquire) {
            own::store(place.base, &dir, DYING, place.host.as_bytes())?;
        }
        match self.put_head(place, number, plain) {
            // It was there, and was flat and removed meanwhile.
            Err(_) if find()?.is_none() => Ok(()),
            put => put,
        }
    }

    /// Removes a container that may not get a head, unless it has one by now.
    fn remove_headless(
        &self,
        place: &ContainerSite<'_, B>,
        dir: B::Inode,
        number: u32,
        has_no_head: &dyn Fn() -> Result<bool>,
    ) -> Result<()> {
        let name = self.id.container_name(number);
        let container = Container::open_unread(dir, &name, place.host, 0, place.memory);
        let Some(ending) = place.ending(self.id, &container, &name)? else {
            return Ok(());
        };
        // They found a head that this host does not see yet.
        if ending.has_writer(place.is_alive)? {
            return Ok(());
        }
        let remove = &mut || {
            if has_no_head()? {
                ending.votes().retire()
            } else {
                Ok(())
            }
        };
        ending.alone(remove).map(drop)
    }

    /// Lets others write to a container that has its name. The head says how many bytes of the plain file count below
    /// the first generation; they stay unchanged until it is flattened. If another generation was made meanwhile over
    /// one that is flat by now, this one would lie below it. This one is removed then: it has no reads or writes yet. A
    /// container with an index that lost its head with the power is removed too: nothing in it was promised.
    fn put_head(
        &self,
        place: &ContainerSite<'_, B>,
        number: u32,
        plain: &PlainBytes<'_>,
    ) -> Result<()> {
        let numbers = self.list(place)?;
        let found = file_dir::find_container(place.base, place.top, self.id, number)?;
        let Some((dir, _)) = found else {
            return Ok(());
        };
        let has_none = || -> Result<bool> {
            let head = head::load(place.base, &dir, self.id, number)?;
            // An open of a damaged one fails with an error.
            Ok(matches!(head, Ok(None)))
        };
        if !has_none()? {
            return Ok(());
        }
        let is_below = number == 0 && numbers.iter().any(|listed| listed.number > 0);
        if is_below || head::has_index(place.base, &dir)? {
            return self.remove_headless(place, dir.clone(), number, &has_none);
        }
        let plain_bytes = match number {
            0 => plain()?,
            _ => 0,
        };
        Head::new(self.id, number, plain_bytes).put(place.base, &dir)
    }

    /// Makes what this host wrote durable and known. Its next use of the file sees what others have synced.
    pub(crate) fn sync(&self, place: &ContainerSite<'_, B>) -> Result<()> {
        self.sync_own(place)?;
        self.note_synced();
        Ok(())
    }

    /// Makes what this host wrote durable and known.
    fn sync_own(&self, place: &ContainerSite<'_, B>) -> Result<()> {
        for generation in self.all() {
            if generation.is_joined.load(Ordering::Acquire) {
                match generation.sync(place) {
                    // All that counted of it is in the plain file, durably, or has no name any more.
                    Err(_) if !generation.is_current(place)? => {}
                    Ok(()) => self.tag(place, &generation),
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// Tags the plain file with a container that has bytes of this host, once.
    fn tag(&self, place: &ContainerSite<'_, B>, generation: &Generation<B>) {
        if let Some(inode) = self.inode.get()
            && generation.container.has_own_log()
            && !self.is_removed.load(Ordering::Acquire)
            && !generation.is_tagged.swap(true, Ordering::AcqRel)
        {
            tag::set(place.base, inode, place.home, &generation.name);
        }
    }

    /// This host writes to it no more, and has published what it wrote.
    pub(crate) fn end_writing(&self, place: &ContainerSite<'_, B>) -> Result<()> {
        self.sync_own(place)?;
        for generation in self.all() {
            generation.end_writing(place)?;
        }
        Ok(())
    }

    /// Whether another host that lives says that it writes to it.
    pub(crate) fn has_other_writers(
        &self,
        place: &ContainerSite<'_, B>,
        is_alive: &IsAlive<'_>,
    ) -> Result<bool> {
        let mut has_writers = false;
        self.visit_containers(place, &mut |container| {
            for host in container.hosts(WRITING)? {
                has_writers |= host != place.host && is_alive(&host)?;
            }
            Ok(())
        })?;
        Ok(has_writers)
    }

    /// Seals and flattens what it can, the lowest generation first.
    pub(crate) fn flatten(
        &self,
        place: &ContainerSite<'_, B>,
        inode: &B::Inode,
        unit_bytes: u64,
        is_alive: &IsAlive<'_>,
    ) -> Result<Flattened> {
        for _ in 0..LOOKS_MAX {
            self.look_again(place)?;
            let generations = self.all();
            let Some(lowest) = generations.first() else {
                if !self.has_remains.load(Ordering::Acquire) {
                    file_dir::remove_empty(place.base, place.top, self.id)?;
                    return Ok(Flattened::Flat);
                }
                self.end_remains(place, &|| Ok(place.base.attr_now(inode)?.size))?;
                continue;
            };
            let attr = place.base.attr_now(inode)?;
            Self::set_bases(&generations, attr.size);
            let rejected = lowest.container.count_rejected();
            match lowest.flatten(place, inode, unit_bytes, is_alive) {
                Ok(Flattened::Flat) => {}
                Err(error) => match lowest.look_at_fate(place, rejected)? {
                    Fate::Removed | Fate::ReadAnew => {}
                    Fate::Unchanged | Fate::Flat => return Err(error),
                },
                outcome => return outcome,
            }
        }
        Err(Errno::IO)
    }

    /// Gives up what cannot be read of the file; false if a host writes to it.
    pub(crate) fn give_up(
        &self,
        place: &ContainerSite<'_, B>,
        plain: &Attr,
        unit_bytes: u64,
        is_alive: &IsAlive<'_>,
        told: &mut ToldOf<'_>,
    ) -> Result<bool> {
        let mut listed = self.list(place)?;
        listed.sort_unstable();
        let mut below = plain.size;
        for listed in listed {
            let name = self.id.container_name(listed.number);
            let mut teller = Teller {
                path: told.path,
                container: &name,
                report: told.report,
            };
            if !self.renew_head(place, listed.number, plain, is_alive, &mut teller)? {
                return Ok(false);
            }
            let Some(generation) = self.find_generation(place, listed.number)? else {
                continue;
            };
            if !generation.has_own_base {
                generation.container.set_base(below);
            }
            let Some(ending) = generation.ending(place)? else {
                continue;
            };
            let is_written_by = |host: &str| generation.is_written_by(host, place, is_alive);
            if !ending.give_up(unit_bytes, &is_written_by, &mut teller)? {
                return Ok(false);
            }
            below = generation.container.len();
        }
        Ok(true)
    }

    /// Makes the first files of a container anew, where they are damaged; false if a host writes to it.
    fn renew_head(
        &self,
        place: &ContainerSite<'_, B>,
        number: u32,
        plain: &Attr,
        is_alive: &IsAlive<'_>,
        teller: &mut Teller<'_>,
    ) -> Result<bool> {
        let name = self.id.container_name(number);
        let found = file_dir::find_container(place.base, place.top, self.id, number)?;
        let Some((dir, _)) = found else {
            return Ok(true);
        };
        let memory = place.memory;
        let container = Container::open_unread(dir, &name, place.host, plain.size, memory);
        let Some(ending) = place.ending(self.id, &container, &name)? else {
            return Ok(true);
        };
        let is_other_alive = |host: &str| Ok(host != place.host && is_alive(host)?);
        ending.renew_head((self.id, number), plain, &is_other_alive, teller)
    }

    /// Removes what a dead host left of containers that it had flattened, and completes containers that a host began to
    /// make.
    fn end_remains(&self, place: &ContainerSite<'_, B>, plain: &PlainBytes<'_>) -> Result<()> {
        for listed in self.list(place)? {
            let Some(left) = self.open_generation(place, listed.number)? else {
                self.put_head(place, listed.number, plain)?;
                continue;
            };
            if let Some(ending) = left.ending(place)?
                && ending.is_flat()?
            {
                ending.remove()?;
            }
        }
        Ok(())
    }

    /// Removes all containers of the file, which has no name and is not open.
    pub(crate) fn remove(&self, place: &ContainerSite<'_, B>) -> Result<()> {
        self.visit_containers(place, &mut |container| container.retire())?;
        file_dir::remove_empty(place.base, place.top, self.id)?;
        let old = std::mem::take(&mut *self.generations.lock());
        drop(old);
        Ok(())
    }
}

impl<B: Backing> Generation<B> {
    /// None if it is gone: a later container may have its name.
    fn ending<'a>(&'a self, place: &ContainerSite<'a, B>) -> Result<Option<Ending<'a, B>>> {
        let found = place.ending(self.id, &self.container, &self.name)?;
        Ok(found.filter(|ending| ending.votes().ino() == self.dir))
    }

    /// Registers this host as a writer; false if the container accepts no new writers.
    fn join(&self, place: &ContainerSite<'_, B>) -> Result<bool> {
        if self.is_joined.load(Ordering::Acquire) && self.container.seal().is_none() {
            return Ok(true);
        }
        let may = match self.ending(place)? {
            Some(ending) => ending.begin_writing()?,
            None => false,
        };
        if may {
            self.container.take_epoch(place.base)?;
            self.is_joined.store(true, Ordering::Release);
        }
        Ok(may)
    }

    /// Makes what this host wrote durable and known.
    fn sync(&self, place: &ContainerSite<'_, B>) -> Result<()> {
        self.container.sync_own(place.base)?;
        if self.container.has_own_log() {
            self.sync_name(place)
        } else {
            Ok(())
        }
    }

    /// Makes its name durable, once.
    fn sync_name(&self, place: &ContainerSite<'_, B>) -> Result<()> {
        if !self.is_name_durable.load(Ordering::Acquire) {
            file_dir::sync(place.base, place.top, self.id)?;
            self.is_name_durable.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Records that the file's time was set, if the container is ending, or gone by now; returns whether that is so.
    fn add_time(&self, place: &ContainerSite<'_, B>, given: Time) -> Result<bool> {
        let Some(ending) = self.ending(place)? else {
            self.container.end_time();
            return Ok(true);
        };
        if !ending.is_closing()? {
            return Ok(false);
        }
        match self.container.add_time(place.base, given) {
            // It is flat, and has been removed since.
            Err(_) if !self.is_current(place)? => {
                self.container.end_time();
                Ok(true)
            }
            added => added.map(|()| true),
        }
    }

    /// This host writes to it no more.
    fn end_writing(&self, place: &ContainerSite<'_, B>) -> Result<()> {
        if self.is_joined.swap(false, Ordering::AcqRel)
            && let Some(ending) = self.ending(place)?
        {
            self.container.sort_own(place.base);
            ending.end_writing()?;
        }
        Ok(())
    }

    /// Seals and flattens it, and removes its container, as far as other hosts let it.
    fn flatten(
        &self,
        place: &ContainerSite<'_, B>,
        inode: &B::Inode,
        unit_bytes: u64,
        is_alive: &IsAlive<'_>,
    ) -> Result<Flattened> {
        let Some(ending) = self.ending(place)? else {
            return Ok(Flattened::Flat);
        };
        let is_written_by = |host: &str| self.is_written_by(host, place, is_alive);
        // Before the plain file is changed: without the container it would be half flat after a power loss.
        self.sync_name(place)?;
        if !ending.seal(inode, unit_bytes, &is_written_by)? {
            return Ok(Flattened::Written);
        }
        let plain = place.base.open(inode, Access::ReadWrite)?;
        if ending.flatten(inode, &plain)? == Flat::Waits {
            return Ok(Flattened::UnderWay);
        }
        self.was_flat.store(true, Ordering::Release);
        ending.remove()?;
        Ok(Flattened::Flat)
    }

    /// Whether its name still leads to it.
    fn is_current(&self, place: &ContainerSite<'_, B>) -> Result<bool> {
        let found = file_dir::find_container(place.base, place.top, self.id, self.number)?;
        Ok(found.is_some_and(|(_, attr)| attr.ino == self.dir))
    }

    /// Whether a host that says so writes to it. This host may have said so in an earlier life.
    fn is_written_by(
        &self,
        host: &str,
        place: &ContainerSite<'_, B>,
        is_alive: &IsAlive<'_>,
    ) -> Result<bool> {
        if host == place.host {
            Ok(self.is_joined.load(Ordering::Acquire))
        } else {
            is_alive(host)
        }
    }

    /// Whether its bytes are in the plain file, or it is gone, which comes after that.
    fn is_flat(&self, place: &ContainerSite<'_, B>) -> Result<bool> {
        match self.ending(place)? {
            Some(ending) => ending.is_flat(),
            None => Ok(true),
        }
    }

    /// What became of it while something failed. `rejected`: its sorted indexes that were not used before that.
    fn look_at_fate(&self, place: &ContainerSite<'_, B>, rejected: usize) -> Result<Fate> {
        let Some(ending) = self.ending(place)? else {
            return Ok(Fate::Removed);
        };
        if self.container.count_rejected() > rejected {
            return Ok(Fate::ReadAnew);
        }
        Ok(if ending.is_flat()? {
            Fate::Flat
        } else {
            Fate::Unchanged
        })
    }
}

/// What became of a generation while something was done with it that failed. An errno does not tell: network file systems
/// have the same ones for reasons of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It is as it was: the failure counts.
    Unchanged,
    /// Its bytes are in the plain file.
    Flat,
    /// Another host has removed it.
    Removed,
    /// A sorted index was found to be damaged, and all was read anew.
    ReadAnew,
}

/// Whether one of these is flat or removed, as far as this host can see.
fn is_any_over<B: Backing>(
    place: &ContainerSite<'_, B>,
    generations: &[Arc<Generation<B>>],
) -> bool {
    let is_over = |one: &Arc<Generation<B>>| one.is_flat(place).unwrap_or(false);
    generations.iter().any(is_over)
}

/// Reads a stack of generations from the top down.
fn read_stack<B: Backing>(
    base: &B,
    generations: &[Arc<Generation<B>>],
    plain: &B::File,
    buf: &mut [u8],
    offset: u64,
) -> Result<usize> {
    match generations.split_last() {
        None => read_whole(base, plain, buf, offset),
        Some((top, rest)) => {
            let below = |buf: &mut [u8], offset| read_stack(base, rest, plain, buf, offset);
            top.container.read(base, &below, buf, offset)
        }
    }
}

/// Finds where bytes of a stack of generations are, from the top down.
fn locate_in_stack<B: Backing>(
    base: &B,
    generations: &[Arc<Generation<B>>],
    plain: &B::File,
    range: Range<u64>,
    found: &mut Locating,
) -> Result<Room> {
    let Some((top, rest)) = generations.split_last() else {
        let start = range.start;
        return Ok(match found.index_of(base, Holder::Plain, plain) {
            Some(index) => found.add(range, index, start),
            None => found.skip(range),
        });
    };
    let below = |range: Range<u64>, found: &mut Locating| {
        let end = range.end;
        let room = locate_in_stack(base, rest, plain, range, found)?;
        // Beyond the end of what is below there are zeros.
        Ok(match room {
            Room::Left => found.skip(found.end..end),
            Room::Full => room,
        })
    };
    top.container.locate(base, &below, range, found)
}
