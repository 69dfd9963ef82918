//! The logs of all hosts for one file: a directory that each host appends to in files of its own.
//!
//! Promises
//! * What a host wrote is seen by its own reads when the write has returned, and by other hosts after they looked
//!   ([`Container::refresh`]).
//! * Whatever the order in which hosts look, they come to the same bytes ([`crate::resolve`]).
//! * Bytes that are not what was written (a log that lost its end with the power) are an error to whoever reads them,
//!   and never shown.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_backing::lock::Mutex;
use firn_backing::{Access, Backing, DataPart, Errno, Result};
use firn_rendezvous::own;
use parking_lot::Condvar;

use crate::frame::{CHECKED_BYTES, Change, Frame, Next, Written};
use crate::names::Writer;
use crate::resolve::{Key, Resolver, Segment, Source, WriterId};
use crate::run::Piece;
use crate::seal::{CLOSING, SEAL_NAME, Seal};
use crate::writer::{Appended, OwnLog};

/// Bytes of an index that are read at once; larger than any frame.
const INDEX_READ_BYTES: usize = 4 << 20;

/// See the module.
pub struct Container<B: Backing> {
    pub(crate) dir: B::Inode,
    pub(crate) host: String,
    view: Mutex<View<B>>,
    own: Mutex<OwnState<B>>,
    own_made: Condvar,
    /// That of what this host writes.
    epoch: AtomicU64,
}

enum OwnState<B: Backing> {
    /// This host has written nothing.
    None,
    /// A thread is making its index.
    Making,
    Made(Arc<OwnLog<B>>),
}

/// What was read of the indexes.
struct View<B: Backing> {
    resolver: Resolver,
    tails: BTreeMap<WriterId, Tail<B>>,
    /// Blocks of [`CHECKED_BYTES`] of a change whose checksum was right.
    checked: HashSet<(Key, u64)>,
    /// What counts of each index, once that is decided.
    seal: Option<Arc<Seal>>,
}

impl<B: Backing> View<B> {
    fn new(base_bytes: u64) -> Self {
        Self {
            resolver: Resolver::new(base_bytes),
            tails: BTreeMap::new(),
            checked: HashSet::new(),
            seal: None,
        }
    }

    /// Bytes of an index that count.
    fn limit_of(&self, writer: &Writer) -> u64 {
        self.seal
            .as_ref()
            .map_or(u64::MAX, |seal| seal.limit_of(writer))
    }
}

/// An index, and how far it was read.
struct Tail<B: Backing> {
    writer: Writer,
    /// None for this host's own, which is known without reading.
    index: Option<Arc<B::File>>,
    offset: u64,
    logs: HashMap<u32, Arc<B::File>>,
}

/// Frames of one index that were not known.
struct News {
    writer: WriterId,
    from: u64,
    to: u64,
    /// With where they begin.
    frames: Vec<(u64, Frame)>,
}

impl<B: Backing> Container<B> {
    /// The container in the directory `dir`, seen by `host`. The plain file has `base_bytes` that count.
    pub fn open(base: &B, dir: B::Inode, host: &str, base_bytes: u64) -> Result<Self> {
        let container = Self {
            dir,
            host: host.to_owned(),
            view: Mutex::new(View::new(base_bytes)),
            own: Mutex::new(OwnState::None),
            own_made: Condvar::new(),
            epoch: AtomicU64::new(0),
        };
        container.take_epoch(base)?;
        Ok(container)
    }

    /// The file below has so many bytes now.
    pub(crate) fn set_base(&self, bytes: u64) {
        self.view.lock().resolver.set_base(bytes);
    }

    /// Bytes of the file, as far as this host has looked.
    pub fn len(&self) -> u64 {
        self.view.lock().resolver.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What this host writes from now on is newer than all that others published until now. To be called when the file
    /// is opened for writing, and after it was synced.
    pub fn take_epoch(&self, base: &B) -> Result<()> {
        self.refresh(base)?;
        let last = self.view.lock().resolver.last_epoch();
        let next = last.map_or(0, |last| last + 1);
        self.epoch.fetch_max(next, Ordering::AcqRel);
        Ok(())
    }

    /// Writes bytes that do not overlap and are not empty, with one frame. After an error none of them counts.
    pub fn write(&self, base: &B, parts: &[DataPart<'_>]) -> Result<()> {
        let own = self.own_log(base)?;
        let appended = own.write(base, self.epoch.load(Ordering::Acquire), parts)?;
        self.add_own(base, &own, appended)
    }

    /// Cuts the file, or makes it longer.
    pub fn set_len(&self, base: &B, len: u64) -> Result<()> {
        let own = self.own_log(base)?;
        self.take_epoch(base)?;
        let appended = own.note(base, self.epoch.load(Ordering::Acquire), Change::Cut(len))?;
        self.add_own(base, &own, appended)?;
        // What this host writes next is newer than the cut, whatever others do at the same time.
        self.epoch.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Makes bytes zero, as far as the file has them.
    pub fn zero(&self, base: &B, piece: Piece) -> Result<()> {
        let own = self.own_log(base)?;
        let change = Change::Zeroed(piece);
        let appended = own.note(base, self.epoch.load(Ordering::Acquire), change)?;
        self.add_own(base, &own, appended)
    }

    /// Makes what this host wrote durable and known to others.
    pub fn sync(&self, base: &B) -> Result<()> {
        let own = match &*self.own.lock() {
            OwnState::Made(own) => Some(Arc::clone(own)),
            OwnState::None | OwnState::Making => None,
        };
        if let Some(own) = own {
            own.sync(base)?;
        }
        self.take_epoch(base)
    }

    /// Reads until `buf` is full or the file ends. `below` reads the file as it was when the container was made, into
    /// a buffer from an offset, and says how many bytes it has there.
    pub fn read(
        &self,
        base: &B,
        below: &dyn Fn(&mut [u8], u64) -> Result<usize>,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<usize> {
        let range = offset..offset.saturating_add(buf.len() as u64);
        let segments = self.view.lock().resolver.find(range);
        let mut done = 0;
        for segment in segments {
            let len = (segment.file.end - segment.file.start) as usize;
            let part = &mut buf[done..done + len];
            match segment.source {
                Source::Hole | Source::Zeros => part.fill(0),
                Source::Plain => {
                    let count = below(part, segment.file.start)?;
                    // Cut by somebody who does not know of the container.
                    part[count..].fill(0);
                }
                Source::Log { position, key, .. } => self.read_log(base, key, position, part)?,
            }
            done += len;
        }
        Ok(done)
    }

    /// Reads bytes of a segment that is in a log, from the file's offset `start` on.
    pub(crate) fn read_segment(
        &self,
        base: &B,
        segment: &Segment,
        start: u64,
        buf: &mut [u8],
    ) -> Result<()> {
        let Source::Log { position, key, .. } = segment.source else {
            return Err(Errno::INVAL);
        };
        self.read_log(base, key, position + (start - segment.file.start), buf)
    }

    /// Bytes of the file below that count.
    pub(crate) fn base_end(&self) -> u64 {
        self.view.lock().resolver.base_end()
    }

    /// Where the bytes of a range are.
    pub fn find(&self, range: Range<u64>) -> Vec<Segment> {
        self.view.lock().resolver.find(range)
    }

    /// Reads what the other hosts have appended since the last time.
    pub fn refresh(&self, base: &B) -> Result<()> {
        let names = own::list(base, &self.dir)?;
        if self.view.lock().seal.is_none()
            && names.iter().any(|(name, ..)| name == SEAL_NAME.as_bytes())
        {
            self.take_seal(Seal::load(base, &self.dir)?);
        }
        for (name, ..) in names {
            let Some(writer) = Writer::of_index(&name) else {
                continue;
            };
            let (index, offset) = match self.find_tail(&writer) {
                Some((None, _)) => continue,
                Some((Some(index), offset)) => (index, offset),
                None => match self.open_index(base, writer.clone())? {
                    Some(index) => (index, 0),
                    None => continue,
                },
            };
            let limit = self.view.lock().limit_of(&writer);
            let news = read_index(base, &index, writer.id(), offset..limit)?;
            self.add_news(news);
        }
        Ok(())
    }

    fn find_tail(&self, writer: &Writer) -> Option<(Option<Arc<B::File>>, u64)> {
        let view = self.view.lock();
        let tail = view.tails.get(&writer.id())?;
        Some((tail.index.clone(), tail.offset))
    }

    /// From now on only that counts which the seal has. What was read beyond, of a host that was taken for dead, is
    /// forgotten with all else, and read again.
    pub(crate) fn take_seal(&self, seal: Seal) {
        let mut old = None;
        let mut view = self.view.lock();
        let is_beyond =
            |tail: &Tail<B>| tail.index.is_none() || tail.offset > seal.limit_of(&tail.writer);
        if view.tails.values().any(is_beyond) {
            let base_bytes = view.resolver.base_bytes();
            old = Some(std::mem::replace(&mut *view, View::new(base_bytes)));
        }
        view.seal = Some(Arc::new(seal));
        drop(view);
        // Its files are closed after the lock is free.
        drop(old);
    }

    /// What counts of each index, as far as this host has looked.
    pub fn seal(&self) -> Option<Arc<Seal>> {
        self.view.lock().seal.clone()
    }

    /// How many bytes of each index are whole frames, durably.
    pub(crate) fn index_lengths(&self, base: &B) -> Result<Vec<(Writer, u64)>> {
        let mut lengths = Vec::new();
        for (name, ..) in own::list(base, &self.dir)? {
            let Some(writer) = Writer::of_index(&name) else {
                continue;
            };
            let Some(inode) = own::find_file(base, &self.dir, &name_of(&name))? else {
                continue;
            };
            let index = base.open(&inode, Access::Read)?;
            // What is decided to count is durable before that decision.
            base.sync(&index, true)?;
            let news = read_index(base, &index, writer.id(), 0..u64::MAX)?;
            lengths.push((writer, news.to));
        }
        Ok(lengths)
    }

    /// Opens the index of another host; none if it is gone by now.
    fn open_index(&self, base: &B, writer: Writer) -> Result<Option<Arc<B::File>>> {
        let Some(inode) = own::find_file(base, &self.dir, &writer.index_name())? else {
            return Ok(None);
        };
        let index = Arc::new(base.open(&inode, Access::Read)?);
        let mut view = self.view.lock();
        let tail = view.tails.entry(writer.id()).or_insert_with(|| Tail {
            writer,
            index: Some(Arc::clone(&index)),
            offset: 0,
            logs: HashMap::new(),
        });
        Ok(tail.index.clone())
    }

    fn add_news(&self, news: News) {
        let mut view = self.view.lock();
        let view = &mut *view;
        let Some(tail) = view.tails.get_mut(&news.writer) else {
            return;
        };
        // Another thread may have read them too.
        if tail.offset != news.from {
            return;
        }
        tail.offset = news.to;
        for (offset, frame) in news.frames {
            view.resolver.add(news.writer, offset, frame);
        }
    }

    /// This host's own logs, made if it has none.
    fn own_log(&self, base: &B) -> Result<Arc<OwnLog<B>>> {
        if self.view.lock().seal.is_some() {
            return Err(Errno::STALE);
        }
        let mut own = self.own.lock();
        loop {
            match &*own {
                OwnState::Made(log) => return Ok(Arc::clone(log)),
                OwnState::Making => own.wait(&self.own_made),
                OwnState::None => {
                    *own = OwnState::Making;
                    let made = own.unlocked(|| self.make_own(base));
                    *own = match &made {
                        Ok(log) => OwnState::Made(Arc::clone(log)),
                        Err(_) => OwnState::None,
                    };
                    self.own_made.notify_all();
                    return made;
                }
            }
        }
    }

    /// Begins a life of this host in the container.
    fn make_own(&self, base: &B) -> Result<Arc<OwnLog<B>>> {
        let names = own::list(base, &self.dir)?;
        let lives = names.iter().filter_map(|(name, ..)| Writer::of_index(name));
        let own_lives = lives.filter(|writer| writer.host() == self.host);
        let last = own_lives.map(|writer| writer.id().life).max().unwrap_or(0);
        let writer = Writer::new(&self.host, last + 1);
        let made = Arc::new(OwnLog::create(base, &self.dir, writer.clone())?);
        let tail = Tail {
            writer: writer.clone(),
            index: None,
            offset: 0,
            logs: HashMap::new(),
        };
        self.view.lock().tails.insert(writer.id(), tail);
        Ok(made)
    }

    /// ESTALE if what counts may have been decided without this frame: who decides it puts `closing` before he looks
    /// how long indexes are, so a frame that is there before `closing` counts, whatever he believes of this host.
    fn add_own(&self, base: &B, own: &OwnLog<B>, appended: Appended) -> Result<()> {
        if own::find(base, &self.dir, OsStr::new(CLOSING))?.is_some() {
            return Err(Errno::STALE);
        }
        let mut view = self.view.lock();
        if view.seal.is_some() {
            return Err(Errno::STALE);
        }
        let Appended { frame, offset } = appended;
        view.resolver.add(own.writer.id(), offset, frame);
        Ok(())
    }

    /// Reads bytes of a change, which must be as they were written.
    fn read_log(&self, base: &B, key: Key, position: u64, buf: &mut [u8]) -> Result<()> {
        let written = self.written(key)?;
        let file = self.open_log(base, key.writer, written.log)?;
        let start = position - written.position;
        let end = start + buf.len() as u64;
        let is_own = self.is_own(key.writer);
        for block in start / CHECKED_BYTES..end.div_ceil(CHECKED_BYTES) {
            let at = block * CHECKED_BYTES;
            let (from, to) = (at.max(start), (at + CHECKED_BYTES).min(end));
            let part = &mut buf[(from - start) as usize..(to - start) as usize];
            if is_own || self.view.lock().checked.contains(&(key, block)) {
                read_exact(base, &file, part, written.position + from)?;
                continue;
            }
            let mut whole = vec![0; CHECKED_BYTES.min(written.bytes() - at) as usize];
            read_exact(base, &file, &mut whole, written.position + at)?;
            if crc32c::crc32c(&whole) != written.checksums[block as usize] {
                tracing::error!(writer = ?key.writer, log = written.log, position = written.position + at,
                    "a log does not have the bytes that its index says");
                return Err(Errno::IO);
            }
            part.copy_from_slice(&whole[(from - at) as usize..(to - at) as usize]);
            self.view.lock().checked.insert((key, block));
        }
        Ok(())
    }

    fn written(&self, key: Key) -> Result<Arc<Written>> {
        let view = self.view.lock();
        view.resolver.written(key).ok_or(Errno::STALE)
    }

    fn is_own(&self, writer: WriterId) -> bool {
        let view = self.view.lock();
        let tail = view.tails.get(&writer);
        tail.is_some_and(|tail| tail.index.is_none())
    }

    fn open_log(&self, base: &B, writer: WriterId, log: u32) -> Result<Arc<B::File>> {
        let name = {
            let view = self.view.lock();
            let tail = view.tails.get(&writer).ok_or(Errno::STALE)?;
            if let Some(file) = tail.logs.get(&log) {
                return Ok(Arc::clone(file));
            }
            tail.writer.log_name(log)
        };
        let inode = own::find_file(base, &self.dir, &name)?.ok_or(Errno::IO)?;
        let file = Arc::new(base.open(&inode, Access::Read)?);
        if let Some(tail) = self.view.lock().tails.get_mut(&writer) {
            tail.logs.insert(log, Arc::clone(&file));
        }
        Ok(file)
    }
}

/// An index's name is text ([`Writer::of_index`]).
fn name_of(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

/// The frames of an index in a range, as far as they are whole.
fn read_index<B: Backing>(
    base: &B,
    index: &B::File,
    writer: WriterId,
    range: Range<u64>,
) -> Result<News> {
    let mut news = News {
        writer,
        from: range.start,
        to: range.start,
        frames: Vec::new(),
    };
    let mut buf = vec![0; INDEX_READ_BYTES];
    loop {
        let count = base.read_at(index, &mut buf, news.to)?;
        let mut rest = &buf[..count];
        let before = news.to;
        while let Next::Frame(frame, bytes) = Frame::decode(rest) {
            if news.to + bytes as u64 > range.end {
                return Ok(news);
            }
            news.frames.push((news.to, frame));
            news.to += bytes as u64;
            rest = &rest[bytes..];
        }
        if news.to == before {
            return Ok(news);
        }
    }
}

fn read_exact<B: Backing>(base: &B, file: &B::File, buf: &mut [u8], offset: u64) -> Result<()> {
    match base.read_at(file, buf, offset)? {
        count if count == buf.len() => Ok(()),
        // The end of the log went with the power.
        _ => Err(Errno::IO),
    }
}
