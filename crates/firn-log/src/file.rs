//! A file with containers: its generations, one above the other.
//!
//! A generation is a container. New ones come where the last one is ending while somebody writes on. The lowest lies over
//! the plain file; when it is flat, the next one does.

use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use firn_backing::lock::Mutex;
use firn_backing::{Access, Backing, DataPart, Errno, RenameFlags, Result, Seek};
use firn_rendezvous::own;
use serde::{Deserialize, Serialize};

use crate::container::{Container, Memory, Walk};
use crate::resolve::{Segment, Source};
use crate::run::Piece;
use crate::seal::{Ending, Flat};

const HEAD: &str = "head";
/// A file that is flattened while it is read is looked at anew; no more often than this.
const LOOKS_MAX: usize = 100;

/// Which file a container is of: an inode number, and what tells it from a later file with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct FileId {
    pub(crate) ino: u64,
    pub(crate) birth: u64,
}

impl FileId {
    fn container_name(self, generation: u32) -> String {
        format!("{:016x}-{:016x}-{generation:08x}", self.ino, self.birth)
    }

    /// The file and the generation that a container's name is of.
    pub(crate) fn of_container(name: &[u8]) -> Option<(Self, u32)> {
        let name = std::str::from_utf8(name).ok()?;
        let mut fields = name.split('-');
        let mut number = |digits: usize| {
            let field = fields.next().filter(|field| field.len() == digits)?;
            u64::from_str_radix(field, 16).ok()
        };
        let id = Self {
            ino: number(16)?,
            birth: number(16)?,
        };
        let generation = u32::try_from(number(8)?).ok()?;
        (id.container_name(generation) == name).then_some((id, generation))
    }
}

/// The first file of a container, whole before the container has its name.
#[derive(Serialize, Deserialize)]
struct Head {
    version: u32,
    /// Bytes of the plain file when the first generation was made; later ones lie over the one before.
    base_bytes: Option<u64>,
}

const HEAD_VERSION: u32 = 1;

/// A file that has containers, or is to get one.
pub(crate) struct LoggedFile<B: Backing> {
    pub(crate) id: FileId,
    /// The lowest first.
    generations: Mutex<Vec<Arc<Generation<B>>>>,
    /// Descriptors of this host that may write to it.
    pub(crate) writers: AtomicU64,
    /// All descriptors of this host.
    pub(crate) opens: AtomicU64,
    /// It has no name any more.
    pub(crate) is_removed: AtomicBool,
}

struct Generation<B: Backing> {
    number: u32,
    /// Inode number of its directory, which is held open: a later container may have the same name.
    dir: u64,
    name: String,
    has_own_base: bool,
    container: Container<B>,
    /// This host has said that it writes.
    is_joined: AtomicBool,
}

/// A container that a listing has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Listed {
    pub(crate) number: u32,
    /// Inode number of its directory.
    pub(crate) dir: u64,
}

/// Where containers are, and who this host is.
pub(crate) struct Place<'a, B: Backing> {
    pub(crate) base: &'a B,
    pub(crate) top: &'a B::Inode,
    pub(crate) host: &'a str,
    pub(crate) memory: &'a Arc<Memory>,
}

impl<B: Backing> LoggedFile<B> {
    pub(crate) fn new(id: FileId) -> Self {
        Self {
            id,
            generations: Mutex::default(),
            writers: AtomicU64::new(0),
            opens: AtomicU64::new(0),
            is_removed: AtomicBool::new(false),
        }
    }

    fn all(&self) -> Vec<Arc<Generation<B>>> {
        self.generations.lock().clone()
    }

    /// Whether bytes of it are in logs, as far as this host has looked.
    pub(crate) fn is_logged(&self) -> bool {
        !self.generations.lock().is_empty()
    }

    /// Opens the generations that are there, and forgets those that are gone or flat.
    pub(crate) fn look(&self, place: &Place<'_, B>, mut listed: Vec<Listed>) -> Result<()> {
        listed.sort_unstable();
        let known = self.all();
        let mut found = Vec::new();
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
            if generation.is_flat(place)? {
                continue;
            }
            generation.container.refresh(place.base)?;
            found.push(generation);
        }
        // Files are closed after the lock is free.
        let old = std::mem::replace(&mut *self.generations.lock(), found);
        drop(old);
        Ok(())
    }

    fn open_generation(
        &self,
        place: &Place<'_, B>,
        number: u32,
    ) -> Result<Option<Arc<Generation<B>>>> {
        let name = self.id.container_name(number);
        let Some((dir, attr)) = own::find_dir(place.base, place.top, &name)? else {
            return Ok(None);
        };
        let Some(head) = own::load(place.base, &dir, HEAD)? else {
            return Ok(None);
        };
        let head: Head = serde_json::from_slice(&head).map_err(|_| Errno::IO)?;
        if head.version != HEAD_VERSION {
            return Err(Errno::IO);
        }
        let base_bytes = head.base_bytes.unwrap_or(0);
        Ok(Some(Arc::new(Generation {
            number,
            dir: attr.ino,
            name,
            has_own_base: head.base_bytes.is_some(),
            container: Container::open(place.base, dir, place.host, base_bytes, place.memory)?,
            is_joined: AtomicBool::new(false),
        })))
    }

    /// Bytes of the file; `plain_bytes` are those of the plain file.
    pub(crate) fn len(&self, plain_bytes: u64) -> u64 {
        let generations = self.all();
        Self::set_bases(&generations, plain_bytes);
        let top = generations.last();
        top.map_or(plain_bytes, |top| top.container.len())
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
        place: &Place<'_, B>,
        plain: &B::File,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<usize> {
        for _ in 0..LOOKS_MAX {
            let generations = self.all();
            let plain_bytes = place.base.attr_of_file(plain)?.size;
            Self::set_bases(&generations, plain_bytes);
            match read_stack(place.base, &generations, plain, buf, offset) {
                // It was flattened meanwhile, and its logs are gone.
                Err(Errno::IO | Errno::NOENT | Errno::STALE)
                    if generations
                        .iter()
                        .any(|one| one.is_flat(place).unwrap_or(false)) =>
                {
                    self.look_again(place)?;
                }
                outcome => return outcome,
            }
        }
        Err(Errno::IO)
    }

    /// lseek(2): every byte that is in a log or in the plain file is data.
    pub(crate) fn seek(
        &self,
        place: &Place<'_, B>,
        plain_bytes: u64,
        offset: u64,
        what: Seek,
    ) -> Result<u64> {
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

    /// Looks for the generations that there are.
    pub(crate) fn look_again(&self, place: &Place<'_, B>) -> Result<()> {
        let names = own::list(place.base, place.top)?;
        let listed = names.iter().filter_map(|(name, dir, _)| {
            let (id, number) = FileId::of_container(name)?;
            (id == self.id).then_some(Listed { number, dir: *dir })
        });
        self.look(place, listed.collect())
    }

    /// What this host writes from now on is newer than what others have published.
    pub(crate) fn take_epoch(&self, place: &Place<'_, B>) -> Result<()> {
        match self.all().last() {
            Some(top) => top.container.take_epoch(place.base),
            None => Ok(()),
        }
    }

    /// Writes bytes that do not overlap.
    pub(crate) fn write(
        &self,
        place: &Place<'_, B>,
        plain_bytes: u64,
        parts: &[DataPart<'_>],
    ) -> Result<()> {
        self.change(place, plain_bytes, &|container| {
            container.write(place.base, parts)
        })
    }

    /// Cuts the file, or makes it longer.
    pub(crate) fn set_len(&self, place: &Place<'_, B>, plain_bytes: u64, len: u64) -> Result<()> {
        self.change(place, plain_bytes, &|container| {
            container.set_len(place.base, len)
        })
    }

    /// Makes bytes zero; the length stays.
    pub(crate) fn zero(&self, place: &Place<'_, B>, plain_bytes: u64, piece: Piece) -> Result<()> {
        self.change(place, plain_bytes, &|container| {
            container.zero(place.base, piece)
        })
    }

    fn change(
        &self,
        place: &Place<'_, B>,
        plain_bytes: u64,
        make: &dyn Fn(&Container<B>) -> Result<()>,
    ) -> Result<()> {
        for _ in 0..LOOKS_MAX {
            let top = self.join(place, plain_bytes)?;
            match make(&top.container) {
                // What counts is being decided, maybe without it: it goes to the next generation too.
                Err(Errno::STALE) => top.end_writing(place)?,
                outcome => return outcome,
            }
        }
        Err(Errno::IO)
    }

    /// The generation that this host writes to.
    fn join(&self, place: &Place<'_, B>, plain_bytes: u64) -> Result<Arc<Generation<B>>> {
        for _ in 0..LOOKS_MAX {
            if let Some(top) = self.all().last() {
                if top.is_joined.load(Ordering::Acquire) && top.container.seal().is_none() {
                    return Ok(Arc::clone(top));
                }
                if let Some(ending) = top.ending(place)?
                    && ending.begin_writing()?
                {
                    top.container.take_epoch(place.base)?;
                    top.is_joined.store(true, Ordering::Release);
                    return Ok(Arc::clone(top));
                }
            }
            self.make_generation(place, plain_bytes)?;
            self.look_again(place)?;
        }
        Err(Errno::IO)
    }

    /// Makes the next generation, if another host does not.
    fn make_generation(&self, place: &Place<'_, B>, plain_bytes: u64) -> Result<()> {
        self.look_again(place)?;
        let last = self.all().last().map(|top| top.number);
        if let Some(top) = self.all().last()
            && let Some(ending) = top.ending(place)?
            && !ending.is_closing()?
        {
            return Ok(());
        }
        let name = self.id.container_name(last.map_or(0, |last| last + 1));
        let random = getrandom::u64().map_err(|_| Errno::IO)?;
        let new = format!("new-{}-{random:016x}", place.host);
        let dir = own::dir(place.base, place.top, &new)?;
        let head = Head {
            version: HEAD_VERSION,
            base_bytes: last.is_none().then_some(plain_bytes),
        };
        let head = serde_json::to_vec(&head).map_err(|_| Errno::IO)?;
        own::store(place.base, &dir, HEAD, &head)?;
        let flags = RenameFlags::NOREPLACE;
        let (from, to) = (OsStr::new(&new), OsStr::new(&name));
        match place.base.rename(place.top, from, place.top, to, flags) {
            Ok(()) => place.base.sync_dir(place.top),
            Err(error) => {
                own::clear(place.base, &dir)?;
                place.base.rmdir(place.top, from)?;
                match error {
                    Errno::EXIST | Errno::NOTEMPTY => Ok(()),
                    error => Err(error),
                }
            }
        }
    }

    /// Makes what this host wrote durable and known.
    pub(crate) fn sync(&self, place: &Place<'_, B>) -> Result<()> {
        for generation in self.all() {
            if generation.is_joined.load(Ordering::Acquire) {
                generation.container.sync(place.base)?;
            }
        }
        Ok(())
    }

    /// This host writes to it no more.
    pub(crate) fn end_writing(&self, place: &Place<'_, B>) -> Result<()> {
        for generation in self.all() {
            generation.end_writing(place)?;
        }
        Ok(())
    }

    /// Seals and flattens what it can, the lowest generation first. True: the plain file is the file.
    pub(crate) fn flatten(
        &self,
        place: &Place<'_, B>,
        inode: &B::Inode,
        unit_bytes: u64,
        is_alive: &dyn Fn(&str) -> Result<bool>,
    ) -> Result<bool> {
        for _ in 0..LOOKS_MAX {
            self.look_again(place)?;
            let generations = self.all();
            let Some(lowest) = generations.first() else {
                return Ok(true);
            };
            let Some(ending) = lowest.ending(place)? else {
                continue;
            };
            let attr = place.base.attr(inode)?;
            Self::set_bases(&generations, attr.size);
            if !ending.seal(&attr, unit_bytes, is_alive)? {
                return Ok(false);
            }
            let plain = place.base.open(inode, Access::ReadWrite)?;
            if ending.flatten(inode, &plain)? == Flat::Waits {
                return Ok(false);
            }
            ending.remove()?;
        }
        Err(Errno::IO)
    }

    /// Removes all of its containers: it has no name, and nobody has it open.
    pub(crate) fn remove(&self, place: &Place<'_, B>) -> Result<()> {
        self.look_again(place)?;
        for generation in self.all() {
            if let Some(ending) = generation.ending(place)? {
                ending.remove()?;
            }
        }
        let old = std::mem::take(&mut *self.generations.lock());
        drop(old);
        Ok(())
    }
}

impl<B: Backing> Generation<B> {
    fn ending<'a>(&'a self, place: &Place<'a, B>) -> Result<Option<Ending<'a, B>>> {
        Ending::of(place.base, &self.container, place.top, &self.name)
    }

    /// This host writes to it no more.
    fn end_writing(&self, place: &Place<'_, B>) -> Result<()> {
        if self.is_joined.swap(false, Ordering::AcqRel)
            && let Some(ending) = self.ending(place)?
        {
            self.container.sort_own(place.base)?;
            ending.end_writing()?;
        }
        Ok(())
    }

    /// Whether its bytes are in the plain file, or it is gone, which comes after that.
    fn is_flat(&self, place: &Place<'_, B>) -> Result<bool> {
        match self.ending(place)? {
            Some(ending) => ending.is_flat(),
            None => Ok(true),
        }
    }
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
        None => base.read_at(plain, buf, offset),
        Some((top, rest)) => {
            let below = |buf: &mut [u8], offset| read_stack(base, rest, plain, buf, offset);
            top.container.read(base, &below, buf, offset)
        }
    }
}
