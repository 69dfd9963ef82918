//! [`Apply`]: applies a change log to the backing, forward (redo) or backward (undo).
//!
//! All changes of transactions are applied here: commits (redo), restores of earlier commits (undo), and aborts in
//! shadow mode (undo of a log that [`crate::shadow`] makes from the saved state).
//!
//! Steps
//! 1. In an undo, cut files that become shorter, because later writes may need the space.
//! 2. Change the data of existing files: cut them, then write the ranges.
//! 3. Remove names. An object that gets another name waits in `away/`; an object that an undo may need is kept.
//! 4. Add names, of directories before the names in them.
//! 5. Set attributes, those of directories last.
//! 6. Remove directories without a name.
//!
//! Files whose names do not change and that only get a few bytes depend on no other step. Step 2 writes several of them
//! at a time and sets their times, because most commits consist of such files.
//!
//! Promise: an application can be repeated after a crash at any point, with the same result. Each step checks whether
//! it is done already: a name is moved only while it leads to the object in the log, and an object is looked up under
//! its names in the order in which it gets them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use firn_backing::parallel::try_map;
use firn_backing::{Access, Backing, Errno, RenameFlags, Result, SetTime, Time};

use crate::change_log::{
    BytesSource, ChangeLog, DataChange, Direction, Entry, EntryName, EntrySide, Identity, Staged,
    StoredTime, WrittenRange,
};
use crate::copy::copy_with_holes;
use crate::staging::{self, find, own, write_all};

/// Number of threads that write files at the same time.
const THREADS: usize = 4;
/// The calling thread writes fewer files than this alone, because starting threads would cost more.
const PARALLEL_MIN: usize = 64;

/// What an entry requires in the direction in which its log is applied.
#[derive(Clone, Copy)]
struct Step<'a> {
    entry: &'a Entry,
    part: &'a EntrySide,
    leaves: &'a [EntryName],
    comes: &'a [EntryName],
    /// Staged name of an object that has no name in the tree yet.
    staged_at: Option<&'a Staged>,
    /// Staged name that the object gets instead of a removal when it loses its last name.
    kept_at: Option<&'a Staged>,
}

impl<'a> Step<'a> {
    fn new(entry: &'a Entry, direction: Direction) -> Self {
        match direction {
            Direction::Redo => Self {
                entry,
                part: &entry.redo,
                leaves: &entry.before,
                comes: &entry.after,
                staged_at: entry.new_at.as_ref(),
                kept_at: entry.kept_at.as_ref(),
            },
            // An undo removes what the commit made: there is no redo after it.
            Direction::Undo => Self {
                entry,
                part: &entry.undo,
                leaves: &entry.after,
                comes: &entry.before,
                staged_at: entry.kept_at.as_ref(),
                kept_at: None,
            },
        }
    }

    /// Returns whether the entry only writes bytes from the log into a file that keeps its names, size and attributes.
    fn only_writes_inline(&self) -> bool {
        let keeps_names = self.leaves.is_empty() && self.comes.is_empty();
        let is_staged = self.staged_at.is_some() || self.kept_at.is_some();
        let has_attributes = self.part.copy_at.is_some() || self.part.attributes.is_some();
        let writes_inline = self.part.data.as_ref().is_some_and(|data| {
            let mut sources = data.written.iter().map(|range| &range.source);
            data.cut >= data.size && sources.all(|source| matches!(source, BytesSource::Inline(_)))
        });
        keeps_names && writes_inline && !is_staged && !has_attributes && !self.entry.is_dir
    }

    /// Returns whether the entry makes a new directory with one name.
    fn is_new_dir(&self) -> bool {
        self.entry.is_dir && self.entry.new_at.is_some() && self.comes.len() == 1
    }

    fn away_name(&self) -> String {
        self.entry.number.to_string()
    }
}

pub(crate) struct Apply<'a, B: Backing> {
    base: &'a B,
    /// The device of the top of the backing.
    device: u64,
    direction: Direction,
    steps: BTreeMap<u64, Step<'a>>,
    new: &'a B::Inode,
    away: &'a B::Inode,
    known: HashMap<u64, B::Inode>,
    staging_dirs: HashMap<String, B::Inode>,
    placed: BTreeSet<u64>,
    /// Entries that [`Apply::write_inline_changes`] has completed.
    written: HashSet<u64>,
    /// See [`ChangeLog::shared`].
    shared: bool,
    /// New directories that other hosts may make as well. They are made in place and not moved there.
    made: BTreeSet<u64>,
    /// For a shared log: modification times of the objects before the application began.
    mtimes: HashMap<u64, Time>,
}

impl<'a, B: Backing> Apply<'a, B> {
    /// `device` is that of the top of the backing.
    pub(crate) fn new(
        (base, device): (&'a B, u64),
        (log, direction): (&'a ChangeLog, Direction),
        new: &'a B::Inode,
        away: &'a B::Inode,
    ) -> Self {
        let steps = log
            .entries
            .iter()
            .map(|entry| (entry.number, Step::new(entry, direction)))
            .collect();
        Self {
            base,
            device,
            direction,
            steps,
            new,
            away,
            known: HashMap::from([(0, base.root())]),
            staging_dirs: HashMap::new(),
            placed: BTreeSet::new(),
            written: HashSet::new(),
            shared: log.shared && direction == Direction::Redo,
            made: BTreeSet::new(),
            mtimes: HashMap::new(),
        }
    }

    /// Sets the inode of an object number, so that it is not looked up.
    pub(crate) fn set_object(&mut self, number: u64, inode: B::Inode) {
        if number != 0 {
            self.known.insert(number, inode);
        }
    }

    /// Sets the inode of the staging directory `name`, which is not below `new/`.
    pub(crate) fn set_staging_dir(&mut self, name: &str, inode: B::Inode) {
        self.staging_dirs.insert(name.to_owned(), inode);
    }

    pub(crate) fn run(&mut self) -> Result<()> {
        let steps: Vec<Step<'a>> = self.steps.values().copied().collect();
        self.make_shared_dirs()?;
        // All directories are looked up before any of them moves; their inodes stay valid after a move.
        for step in steps.iter().filter(|step| step.entry.is_dir) {
            self.locate(step.entry.number, &mut Vec::new())?;
        }
        if self.shared {
            self.note_mtimes(&steps)?;
        }
        if self.direction == Direction::Undo {
            for step in &steps {
                self.cut(step)?;
            }
        }
        self.write_inline_changes(&steps)?;
        for step in &steps {
            self.write(step)?;
        }
        for step in &steps {
            self.leave(step)?;
        }
        for step in &steps {
            self.place(*step)?;
        }
        let (dirs, others): (Vec<_>, Vec<_>) =
            steps.into_iter().partition(|step| step.entry.is_dir);
        for step in others.iter().chain(&dirs) {
            self.set_attributes(step)?;
        }
        for step in &dirs {
            self.remove_dir(step)?;
        }
        Ok(())
    }

    /// For a shared log, makes or finds the new directories that other hosts may make as well. Returns their numbers
    /// and inodes.
    pub(crate) fn make_shared_dirs(&mut self) -> Result<Vec<(u64, B::Inode)>> {
        if !self.shared {
            return Ok(Vec::new());
        }
        let steps: Vec<Step<'a>> = self.steps.values().copied().collect();
        let new_dirs = steps.iter().filter(|step| step.is_new_dir());
        let leaves: HashSet<&EntryName> = steps.iter().flat_map(|step| step.leaves).collect();
        let mut left: Vec<Step<'a>> = new_dirs.copied().collect();
        left.retain(|step| !leaves.contains(&step.comes[0]));
        let numbers: BTreeSet<u64> = left.iter().map(|step| step.entry.number).collect();
        let mut made = Vec::new();
        // Parents come first: each round makes the directories whose parents exist by now.
        while !left.is_empty() {
            let count = left.len();
            for step in std::mem::take(&mut left) {
                let (above, name) = &step.comes[0];
                if numbers.contains(above) && !self.made.contains(above) {
                    left.push(step);
                    continue;
                }
                let Some(dir) = self.locate(*above, &mut Vec::new())? else {
                    continue;
                };
                let inode = self.make_dir(&step, &dir, OsStr::from_bytes(name))?;
                self.known.insert(step.entry.number, inode.clone());
                self.made.insert(step.entry.number);
                made.push((step.entry.number, inode));
            }
            if left.len() == count {
                return Err(Errno::STALE);
            }
        }
        Ok(made)
    }

    fn make_dir(&mut self, step: &Step<'a>, dir: &B::Inode, name: &OsStr) -> Result<B::Inode> {
        let inode = match self.base.mkdir(&own(), dir, name, 0o700) {
            Ok((inode, _)) => inode,
            Err(Errno::EXIST) => self.base.lookup(dir, name)?.0,
            Err(errno) => return Err(errno),
        };
        // Attributes are also set if another host made the directory, because that host may have died before it set
        // them.
        if let Some((staging_dir, staged)) = step.staged_at {
            let staging_dir = self.staging_dir(staging_dir)?;
            if let Some((from, _)) = find(self.base, &staging_dir, OsStr::new(staged))? {
                staging::copy_attributes(self.base, &from, &inode)?;
            }
        }
        Ok(inode)
    }

    fn note_mtimes(&mut self, steps: &[Step<'a>]) -> Result<()> {
        for step in steps.iter().filter(|step| step.part.copy_at.is_some()) {
            let number = step.entry.number;
            if let Some(inode) = self.locate(number, &mut Vec::new())? {
                self.mtimes.insert(number, self.base.attr(&inode)?.mtime);
            }
        }
        Ok(())
    }

    // ---- finding -----------------------------------------------------------------------------

    /// Returns the inode of an object, at any place where an earlier attempt may have left it; `None` if it is gone.
    fn locate(&mut self, number: u64, above: &mut Vec<u64>) -> Result<Option<B::Inode>> {
        if let Some(inode) = self.known.get(&number) {
            return Ok(Some(inode.clone()));
        }
        let Some(&step) = self.steps.get(&number) else {
            return Ok(None);
        };
        // Two directories that are exchanged each have a name below the other, so the search must not go round in a
        // circle.
        if above.contains(&number) {
            return Ok(None);
        }
        above.push(number);
        let found = self.search(&step, above);
        above.pop();
        let found = found?;
        // Only directories are cached, because there may be more files than a process may have descriptors.
        if let Some(inode) = found.as_ref().filter(|_| step.entry.is_dir) {
            self.known.insert(number, inode.clone());
        }
        Ok(found)
    }

    fn search(&mut self, step: &Step<'a>, above: &mut Vec<u64>) -> Result<Option<B::Inode>> {
        let entry = step.entry;
        let places = entry
            .unchanged_name
            .iter()
            .chain(step.comes)
            .chain(step.leaves);
        for (dir, name) in places {
            if let Some(dir) = self.locate(*dir, above)?
                && let Some(inode) = self.find_at(entry, &dir, name)?
            {
                return Ok(Some(inode));
            }
        }
        if let Some(inode) = self.find_at(entry, self.away, step.away_name().as_bytes())? {
            return Ok(Some(inode));
        }
        let staged = [step.kept_at, step.staged_at, entry.anchor_at.as_ref()];
        for (dir, name) in staged.into_iter().flatten() {
            let dir = self.staging_dir(dir)?;
            if let Some(inode) = self.find_at(entry, &dir, name.as_bytes())? {
                return Ok(Some(inode));
            }
        }
        Ok(None)
    }

    /// Returns the object if the name leads to it.
    fn find_at(&self, entry: &Entry, dir: &B::Inode, name: &[u8]) -> Result<Option<B::Inode>> {
        match find(self.base, dir, OsStr::from_bytes(name)) {
            Ok(found) => Ok(found
                .filter(|(_, attr)| Identity::of(attr, self.device) == entry.identity)
                .map(|(inode, _)| inode)),
            Err(Errno::NOTDIR) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    fn staging_dir(&mut self, name: &str) -> Result<B::Inode> {
        if let Some(inode) = self.staging_dirs.get(name) {
            return Ok(inode.clone());
        }
        let inode = staging::must_find_dir(self.base, self.new, name)?;
        self.staging_dirs.insert(name.to_owned(), inode.clone());
        Ok(inode)
    }

    fn find_staged(&mut self, (dir, name): &Staged) -> Result<B::Inode> {
        let dir = self.staging_dir(dir)?;
        Ok(self.base.lookup(&dir, OsStr::new(name))?.0)
    }

    fn find_dir(&mut self, place: &EntryName) -> Result<Option<B::Inode>> {
        self.locate(place.0, &mut Vec::new())
    }

    // ---- steps -------------------------------------------------------------------------------

    fn cut(&mut self, step: &Step<'a>) -> Result<()> {
        let Some(data) = &step.part.data else {
            return Ok(());
        };
        let Some(inode) = self.locate(step.entry.number, &mut Vec::new())? else {
            return Ok(());
        };
        if self.base.attr(&inode)?.size > data.size {
            let file = self.base.open(&inode, Access::ReadWrite)?;
            self.base.set_len(&file, data.size)?;
        }
        Ok(())
    }

    /// Writes the files for which [`Step::only_writes_inline`] is true, several at a time, and sets their times.
    ///
    /// Files that are not found under their unchanged names are left to the later steps.
    fn write_inline_changes(&mut self, steps: &[Step<'a>]) -> Result<()> {
        let inline: Vec<_> = steps
            .iter()
            .filter(|step| step.only_writes_inline())
            .collect();
        if inline.len() < PARALLEL_MIN || self.shared {
            return Ok(());
        }
        let this = &*self;
        let write = |step: &&Step<'a>| -> Result<_> {
            let is_written = this.write_in_place(step)?;
            Ok(is_written.then_some(step.entry.number))
        };
        let written = try_map("firn-apply", THREADS, &inline, &write)?;
        self.written.extend(written.into_iter().flatten());
        Ok(())
    }

    /// Writes one such file. Returns whether it was found and has the expected size; otherwise nothing was written.
    fn write_in_place(&self, step: &Step<'a>) -> Result<bool> {
        let (Some(data), Some(inode)) = (&step.part.data, self.find_in_place(step)?) else {
            return Ok(false);
        };
        if self.base.attr(&inode)?.size != data.size {
            return Ok(false);
        }
        let to = self.base.open(&inode, Access::ReadWrite)?;
        for range in &data.written {
            if let BytesSource::Inline(bytes) = &range.source {
                write_all(self.base, &to, bytes, range.start)?;
            }
        }
        self.set_times(&inode, step.part)?;
        Ok(true)
    }

    /// Returns the object if it is cached, or is found under its unchanged name in a cached directory.
    fn find_in_place(&self, step: &Step<'a>) -> Result<Option<B::Inode>> {
        if let Some(inode) = self.known.get(&step.entry.number) {
            return Ok(Some(inode.clone()));
        }
        let Some((dir, name)) = &step.entry.unchanged_name else {
            return Ok(None);
        };
        match self.known.get(dir) {
            Some(dir) => self.find_at(step.entry, dir, name),
            None => Ok(None),
        }
    }

    fn write(&mut self, step: &Step<'a>) -> Result<()> {
        if self.written.contains(&step.entry.number) {
            return Ok(());
        }
        let Some(data) = &step.part.data else {
            return Ok(());
        };
        let Some(inode) = self.locate(step.entry.number, &mut Vec::new())? else {
            return Ok(());
        };
        let unchanged = data.written.is_empty() && data.cut >= data.size;
        let size = self.base.attr(&inode)?.size;
        let may_grow = self.shared && data.grows;
        if unchanged && (size == data.size || (may_grow && size > data.size)) {
            return Ok(());
        }
        let to = self.base.open(&inode, Access::ReadWrite)?;
        if may_grow {
            // Another host's part may have made the file longer. The ranges of this host have no bytes of other hosts.
            if data.size > size {
                self.base.set_len(&to, data.size)?;
            }
        } else {
            self.set_size(data, size, &to)?;
        }
        let mut copy = None;
        for range in &data.written {
            if copy.is_none() && range.source == BytesSource::Copy {
                let at = step.part.copy_at.as_ref().ok_or(Errno::STALE)?;
                copy = Some(self.base.open(&self.find_staged(at)?, Access::Read)?);
            }
            self.write_range(range, copy.as_ref(), &to, data.size)?;
        }
        Ok(())
    }

    /// Cuts the file and then sets its new size, so that a hole lies between.
    ///
    /// A repeated attempt cuts off bytes that an earlier one wrote, and writes them again.
    fn set_size(&self, data: &DataChange, size: u64, to: &B::File) -> Result<()> {
        if data.cut < size {
            self.base.set_len(to, data.cut)?;
        }
        if data.cut.min(size) != data.size {
            self.base.set_len(to, data.size)?;
        }
        Ok(())
    }

    fn write_range(
        &mut self,
        range: &WrittenRange,
        copy: Option<&B::File>,
        to: &B::File,
        size: u64,
    ) -> Result<()> {
        let end = range.end.min(size);
        match (&range.source, copy) {
            (BytesSource::Inline(bytes), _) => write_all(self.base, to, bytes, range.start),
            (BytesSource::Copy, Some(from)) => {
                copy_with_holes(self.base, from, to, range.start..end)
            }
            (BytesSource::Copy, None) => Err(Errno::STALE),
            (BytesSource::File((dir, name)), _) => {
                let dir = self.staging_dir(dir)?;
                // Without the staged file the saved entry was never durable, so the object was not changed after it.
                let Some((from, _)) = find(self.base, &dir, OsStr::new(name))? else {
                    return Ok(());
                };
                let from = self.base.open(&from, Access::Read)?;
                copy_with_holes(self.base, &from, to, range.start..end)
            }
        }
    }

    fn leave(&mut self, step: &Step<'a>) -> Result<()> {
        let away_name = step.away_name();
        let away_name = OsStr::new(&away_name);
        for place in step.leaves {
            let Some(dir) = self.find_dir(place)? else {
                continue;
            };
            if self.find_at(step.entry, &dir, &place.1)?.is_none() {
                continue;
            }
            let name = OsStr::from_bytes(&place.1);
            let no_flags = RenameFlags::empty();
            if let Some((kept_dir, kept_name)) = step.kept_at {
                let kept_dir = self.staging_dir(kept_dir)?;
                let kept_name = OsStr::new(kept_name);
                if find(self.base, &kept_dir, kept_name)?.is_none() {
                    self.base
                        .rename(&dir, name, &kept_dir, kept_name, no_flags)?;
                    continue;
                }
            }
            let goes_away = step.entry.is_dir
                || (!step.comes.is_empty() && find(self.base, self.away, away_name)?.is_none());
            if goes_away {
                self.base
                    .rename(&dir, name, self.away, away_name, no_flags)?;
            } else {
                self.base.unlink(&dir, name)?;
            }
        }
        Ok(())
    }

    fn place(&mut self, step: Step<'a>) -> Result<()> {
        if step.comes.is_empty() || !self.placed.insert(step.entry.number) {
            return Ok(());
        }
        if self.made.contains(&step.entry.number) {
            return Ok(());
        }
        for place in step.comes {
            if let Some(&above) = self.steps.get(&place.0) {
                self.place(above)?;
            }
            let dir = self.find_dir(place)?.ok_or(Errno::STALE)?;
            if self.find_at(step.entry, &dir, &place.1)?.is_some() {
                continue;
            }
            self.give_name(&step, &dir, OsStr::from_bytes(&place.1))?;
        }
        Ok(())
    }

    fn give_name(&mut self, step: &Step<'a>, dir: &B::Inode, name: &OsStr) -> Result<()> {
        let no_flags = RenameFlags::empty();
        let away_name = step.away_name();
        if self
            .find_at(step.entry, self.away, away_name.as_bytes())?
            .is_some()
        {
            return self
                .base
                .rename(self.away, OsStr::new(&away_name), dir, name, no_flags);
        }
        if let Some((staging_dir, staged)) = step.staged_at.or(step.entry.anchor_at.as_ref()) {
            let staging_dir = self.staging_dir(staging_dir)?;
            if self
                .find_at(step.entry, &staging_dir, staged.as_bytes())?
                .is_some()
            {
                return self
                    .base
                    .rename(&staging_dir, OsStr::new(staged), dir, name, no_flags);
            }
        }
        // It has a name already.
        let inode = self
            .locate(step.entry.number, &mut Vec::new())?
            .ok_or(Errno::STALE)?;
        self.base.link(&inode, dir, name).map(drop)
    }

    fn set_attributes(&mut self, step: &Step<'a>) -> Result<()> {
        let part = step.part;
        let sets_times = part.atime.is_some() || part.mtime.is_some();
        // The staged object is the object itself.
        let copy_at = part.copy_at.as_ref();
        let is_done = self.written.contains(&step.entry.number);
        if is_done || (copy_at.is_none() && part.attributes.is_none() && !sets_times) {
            return Ok(());
        }
        let Some(inode) = self.locate(step.entry.number, &mut Vec::new())? else {
            return Ok(());
        };
        self.set_times(&inode, part)?;
        if let Some(wanted) = &part.attributes {
            staging::set_attributes(self.base, &inode, wanted)?;
        }
        match copy_at {
            Some(at) => self.copy_attributes(step, &inode, at),
            None => Ok(()),
        }
    }

    fn set_times(&self, inode: &B::Inode, part: &EntrySide) -> Result<()> {
        if part.atime.is_none() && part.mtime.is_none() {
            return Ok(());
        }
        let set =
            |time: Option<StoredTime>| time.map_or(SetTime::Keep, |time| SetTime::At(time.into()));
        self.base.set_times(inode, set(part.atime), set(part.mtime))
    }

    fn copy_attributes(
        &mut self,
        step: &Step<'a>,
        inode: &B::Inode,
        copy_at: &Staged,
    ) -> Result<()> {
        let copy = self.find_staged(copy_at)?;
        if !self.shared || step.part.changes_attributes {
            return staging::copy_attributes(self.base, &copy, inode);
        }
        // An object that only this host changed gets this host's times, even older ones. Otherwise the latest time
        // counts.
        let wanted = self.base.attr(&copy)?.mtime;
        let now = self.mtimes.get(&step.entry.number).copied();
        let now = now.unwrap_or(wanted);
        let is_unchanged = step
            .part
            .mtime_before
            .is_some_and(|before| now == Time::from(before));
        let mtime = if is_unchanged {
            wanted
        } else {
            wanted.max(now)
        };
        self.base
            .set_times(inode, SetTime::Keep, SetTime::At(mtime))
    }

    fn remove_dir(&mut self, step: &Step<'a>) -> Result<()> {
        let may_be_away = !step.leaves.is_empty() || step.entry.unchanged_name.is_none();
        if !step.comes.is_empty() || step.kept_at.is_some() || !may_be_away {
            return Ok(());
        }
        let name = step.away_name();
        let name = OsStr::new(&name);
        if find(self.base, self.away, name)?.is_some() {
            self.base.rmdir(self.away, name)?;
        }
        Ok(())
    }
}
