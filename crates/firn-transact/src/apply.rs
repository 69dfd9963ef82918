//! Carrying out a redo record, as often as it takes.
//!
//! 1. Data of files that were there: cut, then the ranges that were written, from the twin or the record.
//! 2. Every name that its object leaves: the object goes away, to `away/` where it comes back under
//!    another name.
//! 3. Every name that an object comes to, directories before what is in them.
//! 4. Attributes, from the twins.
//! 5. Directories that came to no name go.
//!
//! Each step looks first whether it is done: a name is moved only while it leads to the object that
//! the record means. An object is found under its names in the order in which it comes to them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use firn_backing::{Access, Backing, Errno, RenameFlags, Result, Seek, SetTime, Time};

use crate::record::{Data, Identity, Item, Place, Record, Staged};
use crate::scope::Held;
use crate::staging::{self, find, write_all};

/// Bytes that are copied at once where the backing does not copy by itself.
const BLOCK: usize = 1 << 20;

pub(crate) struct Apply<'a, B: Backing> {
    base: &'a B,
    /// Of the top.
    device: u64,
    items: BTreeMap<u64, &'a Item>,
    new: &'a B::Inode,
    away: &'a B::Inode,
    known: HashMap<u64, B::Inode>,
    nests: HashMap<&'a str, B::Inode>,
    /// The directory for what is kept to be brought back.
    kept: Option<B::Inode>,
    placed: BTreeSet<u64>,
    /// See [`Record::shared`].
    shared: bool,
    /// Then: when the objects were last changed before this began.
    mtimes: HashMap<u64, Time>,
}

impl<'a, B: Backing> Apply<'a, B> {
    pub(crate) fn new(
        held: &'a Held<B>,
        record: &'a Record,
        new: &'a B::Inode,
        away: &'a B::Inode,
    ) -> Self {
        let base = &held.base;
        let device = held.device();
        let items = record
            .items
            .iter()
            .map(|item| (item.number, item))
            .collect();
        let known = HashMap::from([(0, base.root())]);
        let nests = HashMap::new();
        let mtimes = HashMap::new();
        let placed = BTreeSet::new();
        Self {
            base,
            device,
            items,
            new,
            away,
            known,
            nests,
            kept: None,
            placed,
            shared: record.shared,
            mtimes,
        }
    }

    /// What would be removed goes there, if there is a place for it.
    pub(crate) fn keeping(mut self, kept: Option<B::Inode>) -> Self {
        self.kept = kept;
        self
    }

    /// The object is at hand and need not be looked for.
    pub(crate) fn know(&mut self, number: u64, inode: B::Inode) {
        if number != 0 {
            self.known.insert(number, inode);
        }
    }

    pub(crate) fn run(&mut self) -> Result<()> {
        let items: Vec<&'a Item> = self.items.values().copied().collect();
        // All directories are found before any of them moves: an object stays the same wherever it goes.
        for item in items.iter().filter(|item| item.is_dir) {
            self.locate(item.number, &mut Vec::new())?;
        }
        if self.shared {
            for item in items.iter().filter(|item| item.twin_at.is_some()) {
                if let Some(inode) = self.locate(item.number, &mut Vec::new())? {
                    self.mtimes
                        .insert(item.number, self.base.attr(&inode)?.mtime);
                }
            }
        }
        for item in &items {
            if let (Some(data), Some(at)) = (&item.data, &item.twin_at) {
                self.write(item, data, at)?;
            } else if !item.small.is_empty() {
                self.write_small(item)?;
            }
        }
        for item in &items {
            self.leave(item)?;
        }
        for item in &items {
            self.place(item)?;
        }
        for item in &items {
            self.attributes(item)?;
        }
        for item in items
            .iter()
            .filter(|item| item.is_dir && item.comes.is_empty())
        {
            let name = item.number.to_string();
            if !item.leaves.is_empty() && find(self.base, self.away, OsStr::new(&name))?.is_some() {
                self.base.rmdir(self.away, OsStr::new(&name))?;
            }
        }
        Ok(())
    }

    // ---- finding -----------------------------------------------------------------------------

    /// The object, wherever an earlier attempt left it; `None` if it is gone.
    fn locate(&mut self, number: u64, above: &mut Vec<u64>) -> Result<Option<B::Inode>> {
        if let Some(inode) = self.known.get(&number) {
            return Ok(Some(inode.clone()));
        }
        let Some(&item) = self.items.get(&number) else {
            return Ok(None);
        };
        // Two directories that changed places are each below the other in one of their places.
        if above.contains(&number) {
            return Ok(None);
        }
        above.push(number);
        let found = self.search(item, above);
        above.pop();
        let found = found?;
        // Of directories only: there may be more files than a process may hold descriptors.
        if let Some(inode) = found.as_ref().filter(|_| item.is_dir) {
            self.known.insert(number, inode.clone());
        }
        Ok(found)
    }

    fn search(&mut self, item: &'a Item, above: &mut Vec<u64>) -> Result<Option<B::Inode>> {
        let places = item.stays.iter().chain(&item.comes).chain(&item.leaves);
        for (dir, name) in places {
            if let Some(dir) = self.locate(*dir, above)?
                && let Some(inode) = self.is_at(item, &dir, name)?
            {
                return Ok(Some(inode));
            }
        }
        if let Some(inode) = self.is_at(item, self.away, item.number.to_string().as_bytes())? {
            return Ok(Some(inode));
        }
        if let (Some(kept), Some((_, name))) = (self.kept.clone(), &item.kept_at)
            && let Some(inode) = self.is_at(item, &kept, name.as_bytes())?
        {
            return Ok(Some(inode));
        }
        for (nest, name) in item.new_at.iter().chain(&item.anchor_at) {
            let nest = self.nest(nest)?;
            if let Some(inode) = self.is_at(item, &nest, name.as_bytes())? {
                return Ok(Some(inode));
            }
        }
        Ok(None)
    }

    /// The object, if the name leads to it.
    fn is_at(&self, item: &Item, dir: &B::Inode, name: &[u8]) -> Result<Option<B::Inode>> {
        match find(self.base, dir, OsStr::from_bytes(name)) {
            Ok(found) => Ok(found
                .filter(|(_, attr)| Identity::of(attr, self.device) == item.identity)
                .map(|(inode, _)| inode)),
            Err(Errno::NOTDIR) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    fn nest(&mut self, name: &'a str) -> Result<B::Inode> {
        if let Some(inode) = self.nests.get(name) {
            return Ok(inode.clone());
        }
        let inode = staging::must_find_dir(self.base, self.new, name)?;
        self.nests.insert(name, inode.clone());
        Ok(inode)
    }

    fn staged(&mut self, at: &'a Staged) -> Result<B::Inode> {
        let nest = self.nest(&at.0)?;
        Ok(self.base.lookup(&nest, OsStr::new(&at.1))?.0)
    }

    fn dir(&mut self, place: &Place) -> Result<Option<B::Inode>> {
        self.locate(place.0, &mut Vec::new())
    }

    // ---- steps -------------------------------------------------------------------------------

    fn write(&mut self, item: &'a Item, data: &Data, at: &'a Staged) -> Result<()> {
        let Some(inode) = self.locate(item.number, &mut Vec::new())? else {
            return Ok(());
        };
        let unchanged = data.written.is_empty() && data.cut >= data.size;
        let size = self.base.attr(&inode)?.size;
        if unchanged && (size == data.size || (self.shared && data.grows && size > data.size)) {
            return Ok(());
        }
        let from = self.base.open(&self.staged(at)?, Access::Read)?;
        let to = self.base.open(&inode, Access::ReadWrite)?;
        if self.shared && data.grows {
            // Another host's part may be longer. Nobody else has what lies in these ranges.
            if data.size > size {
                self.base.set_len(&to, data.size)?;
            }
            for &(start, end) in &data.written {
                Self::copy(self.base, &from, &to, start, end.min(data.size))?;
            }
            return Ok(());
        }
        // Both, so that what lies between is a hole. On a second attempt bytes that were written before are
        // cut off too, and written again.
        if data.cut < size {
            self.base.set_len(&to, data.cut)?;
        }
        if data.cut.min(size) != data.size {
            self.base.set_len(&to, data.size)?;
        }
        for &(start, end) in &data.written {
            Self::copy(self.base, &from, &to, start, end.min(data.size))?;
        }
        Ok(())
    }

    fn write_small(&mut self, item: &'a Item) -> Result<()> {
        let Some(inode) = self.locate(item.number, &mut Vec::new())? else {
            return Ok(());
        };
        let file = self.base.open(&inode, Access::ReadWrite)?;
        for piece in &item.small {
            write_all(self.base, &file, &piece.bytes, piece.at)?;
        }
        let Some((sec, nsec)) = item.mtime else {
            return Ok(());
        };
        self.base
            .set_times(&inode, SetTime::Keep, SetTime::At(Time { sec, nsec }))
    }

    /// Copies a range; what is a hole there becomes one here.
    pub(crate) fn copy(base: &B, from: &B::File, to: &B::File, start: u64, end: u64) -> Result<()> {
        let mut at = start;
        while at < end {
            let data = match base.seek(from, at, Seek::Data) {
                Ok(data) => data.clamp(at, end),
                Err(Errno::NXIO) => end,
                Err(_) => at,
            };
            if data > at {
                Self::clear(base, to, at, data - at)?;
                at = data;
                continue;
            }
            let until = base
                .seek(from, at, Seek::Hole)
                .map_or(end, |hole| hole.clamp(at + 1, end));
            match base.copy_range(from, at, to, at, until - at) {
                Ok(count) if count > 0 => at += count,
                Ok(_) | Err(Errno::XDEV | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                    at += Self::copy_block(base, from, to, at, until)?;
                }
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    fn copy_block(base: &B, from: &B::File, to: &B::File, at: u64, until: u64) -> Result<u64> {
        let mut block = vec![0; BLOCK.min((until - at) as usize)];
        let count = base.read_at(from, &mut block, at)?;
        // Behind its end a file reads as zeros here.
        let count = if count == 0 { block.len() } else { count };
        write_all(base, to, &block[..count], at)?;
        Ok(count as u64)
    }

    fn clear(base: &B, to: &B::File, at: u64, len: u64) -> Result<()> {
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        match base.allocate(to, punch, at, len) {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                let zeros = vec![0; BLOCK.min(len as usize)];
                let mut done = 0;
                while done < len {
                    let count = (len - done).min(BLOCK as u64);
                    write_all(base, to, &zeros[..count as usize], at + done)?;
                    done += count;
                }
                Ok(())
            }
            Err(errno) => Err(errno),
        }
    }

    fn leave(&mut self, item: &'a Item) -> Result<()> {
        let number = item.number.to_string();
        let away_name = OsStr::new(&number);
        for place in &item.leaves {
            let Some(dir) = self.dir(place)? else {
                continue;
            };
            if self.is_at(item, &dir, &place.1)?.is_none() {
                continue;
            }
            let name = OsStr::from_bytes(&place.1);
            if let (Some(kept), Some((_, kept_name))) = (&self.kept, &item.kept_at)
                && find(self.base, kept, OsStr::new(kept_name))?.is_none()
            {
                self.base.rename(
                    &dir,
                    name,
                    kept,
                    OsStr::new(kept_name),
                    RenameFlags::empty(),
                )?;
                continue;
            }
            let goes_away = item.is_dir
                || (!item.comes.is_empty() && find(self.base, self.away, away_name)?.is_none());
            if goes_away {
                self.base
                    .rename(&dir, name, self.away, away_name, RenameFlags::empty())?;
            } else {
                self.base.unlink(&dir, name)?;
            }
        }
        Ok(())
    }

    fn place(&mut self, item: &'a Item) -> Result<()> {
        if item.comes.is_empty() || !self.placed.insert(item.number) {
            return Ok(());
        }
        let number = item.number.to_string();
        for place in &item.comes {
            if let Some(&above) = self.items.get(&place.0) {
                self.place(above)?;
            }
            let dir = self.dir(place)?.ok_or(Errno::STALE)?;
            if self.is_at(item, &dir, &place.1)?.is_some() {
                continue;
            }
            let name = OsStr::from_bytes(&place.1);
            if self.is_at(item, self.away, number.as_bytes())?.is_some() {
                self.base.rename(
                    self.away,
                    OsStr::new(&number),
                    &dir,
                    name,
                    RenameFlags::empty(),
                )?;
                continue;
            }
            if let Some((nest, staged)) = item.new_at.as_ref().or(item.anchor_at.as_ref()) {
                let nest = self.nest(nest)?;
                if self.is_at(item, &nest, staged.as_bytes())?.is_some() {
                    self.base.rename(
                        &nest,
                        OsStr::new(staged),
                        &dir,
                        name,
                        RenameFlags::empty(),
                    )?;
                    continue;
                }
            }
            // It has a name already.
            let inode = self
                .locate(item.number, &mut Vec::new())?
                .ok_or(Errno::STALE)?;
            self.base.link(&inode, &dir, name)?;
        }
        Ok(())
    }

    fn attributes(&mut self, item: &'a Item) -> Result<()> {
        if item.twin_at.is_none() && item.times.is_none() {
            return Ok(());
        }
        let Some(inode) = self.locate(item.number, &mut Vec::new())? else {
            return Ok(());
        };
        if let Some(times) = item.times {
            let [atime, mtime] = times.map(|(sec, nsec)| SetTime::At(Time { sec, nsec }));
            self.base.set_times(&inode, atime, mtime)?;
        }
        let Some(at) = &item.twin_at else {
            return Ok(());
        };
        let twin = self.staged(at)?;
        if !self.shared || item.attributes {
            return staging::copy_attributes(self.base, &twin, &inode);
        }
        // Unchanged by others, its times are those of this host, older ones too; else the latest.
        let wanted = self.base.attr(&twin)?;
        let now = self
            .mtimes
            .get(&item.number)
            .copied()
            .unwrap_or(wanted.mtime);
        let is_ours = item
            .mtime_before
            .is_some_and(|(sec, nsec)| now == Time { sec, nsec });
        let mtime = if is_ours {
            wanted.mtime
        } else {
            wanted.mtime.max(now)
        };
        self.base
            .set_times(&inode, SetTime::Keep, SetTime::At(mtime))
    }
}
