//! [`Apply`]: applies a change log to the backing (the directory below the mount), forward (redo) or backward (undo).
//!
//! The log has an *entry* for each object that a transaction changes. All changes of transactions are applied here:
//! * commits (redo), and restores of earlier commits (undo);
//! * aborts in *shadow mode*, in which the backing has the changes at once (undo of a log that [`crate::shadow`] makes
//!   from the saved state).
//!
//! Terms
//! * A name is *removed* or *added* by the application if the object has it only before or only after it.
//! * The *side* of an entry ([`EntrySide`]) is its data and attributes after the application.
//! * An object is *staged* at a path below the transaction's directory while it has no name in the tree.
//! * `away/` is the directory of objects that lost an old name and have not got their new one yet.
//!
//! Steps
//! 1. In an undo, truncate the files that become shorter, because later writes may need the space.
//! 2. Change the data of existing files: truncate them, then write the ranges.
//! 3. Remove names. An object that gets another name waits in `away/`. An object that an undo may need moves to its
//!    staged path.
//! 4. Add names. A directory gets its name before the names in it are added.
//! 5. Set attributes, those of directories last, because the steps before change their times.
//! 6. Remove directories that have no name left.
//!
//! A file that only gets small writes does not depend on the other steps. Most commits consist of such files, so
//! step 2 writes several of them at a time and sets their times.
//!
//! Guarantee: an application can be repeated after a crash at any point, with the same result. Each step checks whether
//! its change is made already. A name is moved only while it leads to the object in the log. An object is looked up
//! under its names in the order in which it gets them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use firn_backing::parallel::try_map;
use firn_backing::{Access, Backing, Errno, RenameFlags, Result, SetTime, Time};

use crate::change_log::{
    BACKING_TOP_NUMBER, BytesSource, ChangeLog, DataChange, Direction, Entry, EntryName, EntrySide,
    Identity, StagedPath, StoredTime, WrittenRange,
};
use crate::copy::copy_with_holes;
use crate::staging::{self, daemon_caller, find, write_all};

/// Number of threads that write files at the same time.
const WRITE_THREADS: usize = 4;
/// Below this number of files no threads are started, because starting them costs more than they save.
const PARALLEL_FILES_MIN: usize = 64;

/// An entry, viewed in the direction in which its log is applied.
#[derive(Clone, Copy)]
struct EntryChange<'a> {
    entry: &'a Entry,
    /// Data and attributes after the application.
    side: &'a EntrySide,
    /// Names that the object has only before the application.
    removed_names: &'a [EntryName],
    /// Names that the object has only after the application.
    added_names: &'a [EntryName],
    /// Staged path of an object that has no name in the tree before the application.
    staged_at: Option<&'a StagedPath>,
    /// Staged path to which the object moves, instead of a removal, when it loses its last name.
    kept_at: Option<&'a StagedPath>,
}

impl<'a> EntryChange<'a> {
    /// Returns what the application of an entry does to its object: which names it removes and adds, and which data and
    /// attributes it sets. The entry is the part of a change log about one object.
    ///
    /// A commit applies the log forward (redo). A restore of the old tree applies it backward (undo), so old and new
    /// change places.
    fn new(entry: &'a Entry, direction: Direction) -> Self {
        match direction {
            Direction::Redo => Self {
                entry,
                side: &entry.redo,
                removed_names: &entry.before,
                added_names: &entry.after,
                staged_at: entry.new_at.as_ref(),
                kept_at: entry.kept_at.as_ref(),
            },
            // No redo follows an undo, so the objects that the commit made are removed and not kept.
            Direction::Undo => Self {
                entry,
                side: &entry.undo,
                removed_names: &entry.after,
                added_names: &entry.before,
                staged_at: entry.kept_at.as_ref(),
                kept_at: None,
            },
        }
    }

    /// Returns whether the entry only writes bytes from the log into a file that keeps its names, size and attributes.
    fn only_writes_inline(&self) -> bool {
        let keeps_names = self.removed_names.is_empty() && self.added_names.is_empty();
        let is_staged = self.staged_at.is_some() || self.kept_at.is_some();
        let has_attributes = self.side.copy_at.is_some() || self.side.attributes.is_some();
        let writes_inline = self.side.data.as_ref().is_some_and(|data| {
            let mut sources = data.written.iter().map(|range| &range.source);
            data.cut >= data.size && sources.all(|source| matches!(source, BytesSource::Inline(_)))
        });
        keeps_names && writes_inline && !is_staged && !has_attributes && !self.entry.is_dir
    }

    /// Returns whether the entry makes a new directory with one name.
    fn is_new_dir(&self) -> bool {
        self.entry.is_dir && self.entry.new_at.is_some() && self.added_names.len() == 1
    }

    /// Returns the name of the object in `away/`.
    fn away_name(&self) -> String {
        self.entry.number.to_string()
    }
}

/// Directories of a transaction, in which objects wait for their names.
pub(crate) struct StagingDirs<'a, B: Backing> {
    /// The directory `new/` with the staged objects.
    pub(crate) new: &'a B::Inode,
    /// The directory `away/` with objects between an old and a new name.
    pub(crate) away: &'a B::Inode,
}

/// A new directory that other hosts may make as well.
pub(crate) struct MadeDir<B: Backing> {
    /// Object number.
    pub(crate) number: u64,
    pub(crate) inode: B::Inode,
}

/// Returns the modification time of an object that several hosts may have changed in one transaction.
///
/// `copied` is the time that this host's programs gave the object, and `in_backing` the one that it has now. If that is
/// still the time `at_first_change` of this host, no other host changed the object, so `copied` counts even if it is
/// older. Otherwise the latest time counts.
fn merged_mtime(copied: Time, in_backing: Time, at_first_change: Option<Time>) -> Time {
    if at_first_change == Some(in_backing) {
        copied
    } else {
        copied.max(in_backing)
    }
}

/// One application of a change log.
pub(crate) struct Apply<'a, B: Backing> {
    base: &'a B,
    /// Device number of the top of the backing.
    device: u64,
    direction: Direction,
    /// All entries by object number.
    changes: BTreeMap<u64, EntryChange<'a>>,
    new_dir: &'a B::Inode,
    away_dir: &'a B::Inode,
    /// Inodes of the objects that were found, by object number.
    inodes: HashMap<u64, B::Inode>,
    /// Inodes of the directories of staged objects, by name.
    staging_dirs: HashMap<String, B::Inode>,
    /// Entries whose new names were added, or are being added in a caller on the stack.
    entries_with_new_names: BTreeSet<u64>,
    /// Entries that [`Apply::write_inline_changes`] has completed.
    completed_entries: HashSet<u64>,
    /// Whether other hosts apply logs of the same transaction ([`ChangeLog::shared`]). An undo is never shared.
    is_shared: bool,
    /// Object numbers of new directories that other hosts may make as well. They are made under their final names,
    /// because two hosts cannot both move a directory there.
    made_dirs: BTreeSet<u64>,
    /// For a shared log: modification times that the objects had in the backing when the application began.
    mtimes_in_backing: HashMap<u64, Time>,
}

impl<'a, B: Backing> Apply<'a, B> {
    /// Prepares the application of a change log, forward or backward, to the backing `base`. Nothing is changed before
    /// [`Self::run`].
    ///
    /// `device` is the device number of the backing's top. `dirs` are directories of the transaction: `new/` has new
    /// objects and bytes, `away/` gets objects that have lost one name and not got the next.
    pub(crate) fn new(
        base: &'a B,
        device: u64,
        log: &'a ChangeLog,
        direction: Direction,
        dirs: &StagingDirs<'a, B>,
    ) -> Self {
        let changes = log
            .entries
            .iter()
            .map(|entry| (entry.number, EntryChange::new(entry, direction)))
            .collect();
        Self {
            base,
            device,
            direction,
            changes,
            new_dir: dirs.new,
            away_dir: dirs.away,
            inodes: HashMap::from([(BACKING_TOP_NUMBER, base.root())]),
            staging_dirs: HashMap::new(),
            entries_with_new_names: BTreeSet::new(),
            completed_entries: HashSet::new(),
            is_shared: log.shared && direction == Direction::Redo,
            made_dirs: BTreeSet::new(),
            mtimes_in_backing: HashMap::new(),
        }
    }

    /// Sets the inode of an object number, so that it is not looked up.
    pub(crate) fn set_object(&mut self, number: u64, inode: B::Inode) {
        if number != BACKING_TOP_NUMBER {
            self.inodes.insert(number, inode);
        }
    }

    /// Sets the inode of the staging directory `name`, which is not below `new/`.
    pub(crate) fn set_staging_dir(&mut self, name: &str, inode: B::Inode) {
        self.staging_dirs.insert(name.to_owned(), inode);
    }

    /// Applies the change log to the backing. After an error or a crash the application can be repeated from the start,
    /// because each step skips what is done already.
    ///
    /// The order of the steps: data, removed names, added names, attributes. Attributes of directories come after all
    /// changes of names, which set times.
    pub(crate) fn run(&mut self) -> Result<()> {
        let changes: Vec<EntryChange<'a>> = self.changes.values().copied().collect();
        self.make_shared_dirs()?;
        // All directories are looked up before any of them moves; their inodes stay valid after a move.
        for change in changes.iter().filter(|change| change.entry.is_dir) {
            self.find_object(change.entry.number)?;
        }
        // Several hosts apply their logs. The old times show later whether another host changed an object.
        if self.is_shared {
            self.store_mtimes(&changes)?;
        }
        // Files that become shorter free the space that later writes may need.
        if self.direction == Direction::Undo {
            for change in &changes {
                self.shorten_file(change)?;
            }
        }
        self.write_inline_changes(&changes)?;
        for change in &changes {
            self.write_data(change)?;
        }
        for change in &changes {
            self.remove_old_names(change)?;
        }
        for change in &changes {
            self.add_new_names(*change)?;
        }
        let (dirs, other_objects): (Vec<_>, Vec<_>) =
            changes.into_iter().partition(|change| change.entry.is_dir);
        for change in other_objects.iter().chain(&dirs) {
            self.set_attributes(change)?;
        }
        for change in &dirs {
            self.remove_dir(change)?;
        }
        Ok(())
    }

    /// Makes the new directories that a shared log has in common with the logs of other hosts, or finds those that
    /// another host has made. Returns all of them.
    ///
    /// Does nothing unless the log is *shared*: several hosts commit one transaction, each with its own log. Fails with
    /// ESTALE if the parents of such directories form a cycle, or if the parent of a parent is missing.
    pub(crate) fn make_shared_dirs(&mut self) -> Result<Vec<MadeDir<B>>> {
        let mut waiting_changes = self.shared_dir_changes();
        let numbers: BTreeSet<u64> = waiting_changes
            .iter()
            .map(|change| change.entry.number)
            .collect();
        let mut made_dirs = Vec::new();
        // Each round makes the directories that have a parent by now.
        while !waiting_changes.is_empty() {
            let count_at_start = waiting_changes.len();
            for change in std::mem::take(&mut waiting_changes) {
                let EntryName { dir: parent, name } = &change.added_names[0];
                let must_wait = numbers.contains(parent) && !self.made_dirs.contains(parent);
                if must_wait {
                    waiting_changes.push(change);
                    continue;
                }
                // The parent is missing. The directory is skipped here, and `add_new_names` then fails with ESTALE.
                let Some(parent_inode) = self.find_object(*parent)? else {
                    continue;
                };
                let inode =
                    self.find_or_make_dir(&change, &parent_inode, OsStr::from_bytes(name))?;
                let number = change.entry.number;
                self.inodes.insert(number, inode.clone());
                self.made_dirs.insert(number);
                made_dirs.push(MadeDir { number, inode });
            }
            // All directories had to wait for a parent, so no further round can help.
            if waiting_changes.len() == count_at_start {
                return Err(Errno::STALE);
            }
        }
        Ok(made_dirs)
    }

    /// Returns the changes that make directories which other hosts may make as well. Empty if the log is not shared,
    /// which means that no other host commits the same transaction.
    fn shared_dir_changes(&self) -> Vec<EntryChange<'a>> {
        if !self.is_shared {
            return Vec::new();
        }
        // If another object of the log must leave the name first, the directory cannot be made under that name yet. It
        // is staged and moved like any other object.
        let removed_names: HashSet<&EntryName> = self
            .changes
            .values()
            .flat_map(|change| change.removed_names)
            .collect();
        self.changes
            .values()
            .filter(|change| change.is_new_dir() && !removed_names.contains(&change.added_names[0]))
            .copied()
            .collect()
    }

    /// Makes the directory `name` in `dir`, or finds the one that another host has made. Its attributes become those of
    /// the staged directory, which a program made and which never gets the name itself.
    fn find_or_make_dir(
        &mut self,
        change: &EntryChange<'a>,
        dir: &B::Inode,
        name: &OsStr,
    ) -> Result<B::Inode> {
        let inode = match self.base.mkdir(&daemon_caller(), dir, name, 0o700) {
            Ok((inode, _)) => inode,
            Err(Errno::EXIST) => self.base.lookup(dir, name)?.0,
            Err(errno) => return Err(errno),
        };
        // Attributes are also set if another host made the directory, because that host may have died before it set
        // them.
        if let Some(staged_path) = change.staged_at {
            let parent_of_staged = self.staging_dir(&staged_path.dir)?;
            let staged = find(self.base, &parent_of_staged, OsStr::new(&staged_path.name))?;
            if let Some((staged_inode, _)) = staged {
                staging::copy_attributes(self.base, &staged_inode, &inode)?;
            }
        }
        Ok(inode)
    }

    /// Stores the modification times of objects whose attributes come from a staged copy.
    fn store_mtimes(&mut self, changes: &[EntryChange<'a>]) -> Result<()> {
        for change in changes {
            if change.side.copy_at.is_none() {
                continue;
            }
            let number = change.entry.number;
            if let Some(inode) = self.find_object(number)? {
                let mtime = self.base.attr(&inode)?.mtime;
                self.mtimes_in_backing.insert(number, mtime);
            }
        }
        Ok(())
    }

    // ---- search for objects ------------------------------------------------------------------

    /// Returns the inode of an object, wherever an earlier attempt may have left it; `None` if the object is gone.
    fn find_object(&mut self, number: u64) -> Result<Option<B::Inode>> {
        self.find_object_for(number, &mut Vec::new())
    }

    /// Finds the object that has `number` in the log, wherever it is in the tree or in the transaction's directories.
    /// Returns `None` if it is not found. `searched` has the numbers of the objects that are being searched for, which
    /// led to this search.
    ///
    /// The search for an object looks for the directories of its names first.
    fn find_object_for(
        &mut self,
        number: u64,
        searched: &mut Vec<u64>,
    ) -> Result<Option<B::Inode>> {
        if let Some(inode) = self.inodes.get(&number) {
            return Ok(Some(inode.clone()));
        }
        let Some(&change) = self.changes.get(&number) else {
            return Ok(None);
        };
        // If the log exchanges two directories, each has a name below the other. Their searches would then call each
        // other without an end.
        if searched.contains(&number) {
            return Ok(None);
        }
        searched.push(number);
        let result = self.search_names(&change, searched);
        searched.pop();
        let found_inode = result?;
        // Only directories are cached, because there may be more files than a process may have descriptors.
        if let Some(inode) = &found_inode
            && change.entry.is_dir
        {
            self.inodes.insert(number, inode.clone());
        }
        Ok(found_inode)
    }

    /// Looks for an object of the log under its names in the tree, then in `away/` (objects between two names), and
    /// then at its staged paths in the transaction's directory. Returns `None` if it is at none of them.
    ///
    /// An application that is repeated after a crash may find the object at any of these places. The new names come
    /// before the old ones, because the crash may have come after the object got its new name.
    fn search_names(
        &mut self,
        change: &EntryChange<'a>,
        searched: &mut Vec<u64>,
    ) -> Result<Option<B::Inode>> {
        let entry = change.entry;
        let names = entry
            .unchanged_name
            .iter()
            .chain(change.added_names)
            .chain(change.removed_names);
        for EntryName { dir, name } in names {
            if let Some(dir_inode) = self.find_object_for(*dir, searched)?
                && let Some(inode) = self.find_under_name(entry, &dir_inode, name)?
            {
                return Ok(Some(inode));
            }
        }
        let away_name = change.away_name();
        if let Some(inode) = self.find_under_name(entry, self.away_dir, away_name.as_bytes())? {
            return Ok(Some(inode));
        }
        let staged_paths = [
            // An object that lost its last name, kept for an undo.
            change.kept_at,
            // A new object that has no name yet.
            change.staged_at,
            // A further link to an object of the backing of which no other name is known.
            entry.anchor_at.as_ref(),
        ];
        for path in staged_paths.into_iter().flatten() {
            let staging_dir = self.staging_dir(&path.dir)?;
            if let Some(inode) = self.find_under_name(entry, &staging_dir, path.name.as_bytes())? {
                return Ok(Some(inode));
            }
        }
        Ok(None)
    }

    /// Returns the object if `name` in `dir` leads to it. Returns `None` if the name is missing or leads to another
    /// object.
    fn find_under_name(
        &self,
        entry: &Entry,
        dir: &B::Inode,
        name: &[u8],
    ) -> Result<Option<B::Inode>> {
        match find(self.base, dir, OsStr::from_bytes(name)) {
            Ok(Some((inode, attr))) => {
                let is_object = Identity::from_attr(&attr, self.device) == entry.identity;
                Ok(is_object.then_some(inode))
            }
            Ok(None) | Err(Errno::NOTDIR) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Returns whether `name` in `dir` leads to the object of an entry.
    fn leads_to_object(&self, entry: &Entry, dir: &B::Inode, name: &[u8]) -> Result<bool> {
        Ok(self.find_under_name(entry, dir, name)?.is_some())
    }

    /// Returns the directory `name` of staged objects. Fails with ESTALE or ENOENT if it is missing.
    fn staging_dir(&mut self, name: &str) -> Result<B::Inode> {
        if let Some(inode) = self.staging_dirs.get(name) {
            return Ok(inode.clone());
        }
        let inode = staging::must_find_dir(self.base, self.new_dir, name)?;
        self.staging_dirs.insert(name.to_owned(), inode.clone());
        Ok(inode)
    }

    /// Returns the staged object at `path`. Fails with ENOENT or ESTALE if it is missing.
    fn find_staged(&mut self, path: &StagedPath) -> Result<B::Inode> {
        let dir = self.staging_dir(&path.dir)?;
        Ok(self.base.lookup(&dir, OsStr::new(&path.name))?.0)
    }

    // ---- steps -------------------------------------------------------------------------------

    /// Truncates a file to its new size if it is longer.
    fn shorten_file(&mut self, change: &EntryChange<'a>) -> Result<()> {
        let Some(data) = &change.side.data else {
            return Ok(());
        };
        let Some(inode) = self.find_object(change.entry.number)? else {
            return Ok(());
        };
        if self.base.attr(&inode)?.size > data.size {
            let file = self.base.open(&inode, Access::ReadWrite)?;
            self.base.set_len(&file, data.size)?;
        }
        Ok(())
    }

    /// Writes the files that only get a few new bytes, which the log itself has (inline bytes). Writes several files at
    /// a time, and sets their times.
    ///
    /// Files that are not found under their unchanged names are left to the later steps, and so are all files if there
    /// are few of them or if several hosts commit the transaction.
    fn write_inline_changes(&mut self, changes: &[EntryChange<'a>]) -> Result<()> {
        let inline_changes: Vec<_> = changes
            .iter()
            .filter(|change| change.only_writes_inline())
            .collect();
        if inline_changes.len() < PARALLEL_FILES_MIN || self.is_shared {
            return Ok(());
        }
        let apply: &Self = self;
        // Returns the object number of a file that is complete.
        let write = |change: &&EntryChange<'a>| -> Result<Option<u64>> {
            let is_complete = apply.write_inline_change(change)?;
            Ok(is_complete.then_some(change.entry.number))
        };
        let numbers = try_map("firn-apply", WRITE_THREADS, &inline_changes, &write)?;
        self.completed_entries.extend(numbers.into_iter().flatten());
        Ok(())
    }

    /// Writes one file that gets all its new bytes from the log (inline), and sets its times. Returns false, without a
    /// write, if the file is not found or has another size than the log expects; the later steps then change it.
    fn write_inline_change(&self, change: &EntryChange<'a>) -> Result<bool> {
        let inode = self.find_by_unchanged_name(change)?;
        let (Some(data), Some(inode)) = (&change.side.data, inode) else {
            return Ok(false);
        };
        if self.base.attr(&inode)?.size != data.size {
            return Ok(false);
        }
        let file = self.base.open(&inode, Access::ReadWrite)?;
        for range in &data.written {
            if let BytesSource::Inline(bytes) = &range.source {
                write_all(self.base, &file, bytes, range.start)?;
            }
        }
        self.set_times(&inode, change.side)?;
        Ok(true)
    }

    /// Returns the object if it is cached, or is found under its unchanged name in a cached directory.
    fn find_by_unchanged_name(&self, change: &EntryChange<'a>) -> Result<Option<B::Inode>> {
        if let Some(inode) = self.inodes.get(&change.entry.number) {
            return Ok(Some(inode.clone()));
        }
        let Some(EntryName { dir, name }) = &change.entry.unchanged_name else {
            return Ok(None);
        };
        match self.inodes.get(dir) {
            Some(dir_inode) => self.find_under_name(change.entry, dir_inode, name),
            None => Ok(None),
        }
    }

    /// Changes size and bytes of a file of the log. The new bytes come from the log or from the staged copy, a file in
    /// the transaction's directory.
    ///
    /// Does nothing if the entry is complete, has no data, or belongs to an object that is not found. The same holds if
    /// only the size changes and the file has that size already.
    fn write_data(&mut self, change: &EntryChange<'a>) -> Result<()> {
        if self.completed_entries.contains(&change.entry.number) {
            return Ok(());
        }
        let Some(data) = &change.side.data else {
            return Ok(());
        };
        let Some(inode) = self.find_object(change.entry.number)? else {
            return Ok(());
        };
        let size = self.base.attr(&inode)?.size;
        // In a shared log, another host's log may make the file longer still.
        let may_be_longer = self.is_shared && data.grows;
        // Old bytes from `cut` on become zeros. If `cut` is at the new size or behind it, no old byte does.
        let changes_only_size = data.written.is_empty() && data.cut >= data.size;
        let has_size = size == data.size || (may_be_longer && size > data.size);
        if changes_only_size && has_size {
            return Ok(());
        }
        let file = self.base.open(&inode, Access::ReadWrite)?;
        if !may_be_longer {
            self.set_size(data, size, &file)?;
        } else if data.size > size {
            // If another host's log has made the file longer already, the file is not shortened. The hosts write
            // separate ranges, so this host overwrites no bytes of another one.
            self.base.set_len(&file, data.size)?;
        }
        let mut copy = None;
        for range in &data.written {
            if copy.is_none() && range.source == BytesSource::Copy {
                let path = change.side.copy_at.as_ref().ok_or(Errno::STALE)?;
                copy = Some(self.base.open(&self.find_staged(path)?, Access::Read)?);
            }
            self.write_range(range, copy.as_ref(), &file, data.size)?;
        }
        Ok(())
    }

    /// Truncates the file at the cut, and then sets its new size, so that the bytes between the two are a hole.
    /// `old_size` is its present size.
    ///
    /// A repeated attempt removes bytes that an earlier attempt wrote after the cut, and writes them again.
    fn set_size(&self, data: &DataChange, old_size: u64, file: &B::File) -> Result<()> {
        if data.cut < old_size {
            self.base.set_len(file, data.cut)?;
        }
        if data.cut.min(old_size) != data.size {
            self.base.set_len(file, data.size)?;
        }
        Ok(())
    }

    /// Writes one range of a file. The range says where its bytes are: in the log itself, in the staged copy (`copy`),
    /// or in another file of the transaction's directory.
    ///
    /// `copy` is open for reading; `None` if no range needs it. `size` is the new size of the file.
    fn write_range(
        &mut self,
        range: &WrittenRange,
        copy: Option<&B::File>,
        file: &B::File,
        size: u64,
    ) -> Result<()> {
        let copied_range = range.start..range.end.min(size);
        match (&range.source, copy) {
            (BytesSource::Inline(bytes), _) => write_all(self.base, file, bytes, range.start),
            (BytesSource::Copy, Some(copy)) => copy_with_holes(self.base, copy, file, copied_range),
            (BytesSource::Copy, None) => Err(Errno::STALE),
            (BytesSource::File(StagedPath { dir, name }), _) => {
                let staging_dir = self.staging_dir(dir)?;
                // The staged file is durable before the object changes. A missing staged file therefore means that the
                // object was not changed.
                let Some((staged_inode, _)) = find(self.base, &staging_dir, OsStr::new(name))?
                else {
                    return Ok(());
                };
                let staged_file = self.base.open(&staged_inode, Access::Read)?;
                copy_with_holes(self.base, &staged_file, file, copied_range)
            }
        }
    }

    /// Removes the old names of an object of the log, as far as they still lead to it.
    ///
    /// The first old name is moved if the object is still needed; all further names are unlinked.
    /// * An object that an undo may need moves to its staged path in the transaction's directory.
    /// * An object that gets a new name moves to `away/`, where objects wait between two names.
    /// * Any other directory moves there too, and [`Self::remove_dir`] removes it when it is empty.
    fn remove_old_names(&mut self, change: &EntryChange<'a>) -> Result<()> {
        for entry_name in change.removed_names {
            // A directory that is gone has no names. A name that leads elsewhere was removed by an earlier attempt.
            let Some(dir) = self.find_object(entry_name.dir)? else {
                continue;
            };
            if !self.leads_to_object(change.entry, &dir, &entry_name.name)? {
                continue;
            }
            let name = OsStr::from_bytes(&entry_name.name);
            if self.move_to_staged_path(change, &dir, name)? {
                continue;
            }
            let away_string = change.away_name();
            let away_name = OsStr::new(&away_string);
            let gets_name = !change.added_names.is_empty();
            // One link in `away/` is enough for a file with several old names.
            let moves_away = change.entry.is_dir
                || (gets_name && find(self.base, self.away_dir, away_name)?.is_none());
            if moves_away {
                let no_flags = RenameFlags::empty();
                self.base
                    .rename(&dir, name, self.away_dir, away_name, no_flags)?;
            } else {
                self.base.unlink(&dir, name)?;
            }
        }
        Ok(())
    }

    /// Keeps a removed object for an undo of the commit: moves it from `name` in `dir` to the path in the transaction's
    /// directory at which the undo finds it.
    ///
    /// Returns false, without a move, if no undo needs the object. Returns false too if the object is there already,
    /// moved from another of its names.
    fn move_to_staged_path(
        &mut self,
        change: &EntryChange<'a>,
        dir: &B::Inode,
        name: &OsStr,
    ) -> Result<bool> {
        let Some(kept_at) = change.kept_at else {
            return Ok(false);
        };
        let kept_dir = self.staging_dir(&kept_at.dir)?;
        let kept_name = OsStr::new(&kept_at.name);
        if find(self.base, &kept_dir, kept_name)?.is_some() {
            return Ok(false);
        }
        let no_flags = RenameFlags::empty();
        self.base
            .rename(dir, name, &kept_dir, kept_name, no_flags)?;
        Ok(true)
    }

    /// Gives an object of the log its new names, as far as they are missing. The directories of these names get their
    /// own new names first, in recursive calls. Fails with ESTALE if a directory is not found.
    fn add_new_names(&mut self, change: EntryChange<'a>) -> Result<()> {
        let number = change.entry.number;
        // A directory that several hosts may make got its name when it was made.
        let has_shared_name = self.made_dirs.contains(&number);
        if change.added_names.is_empty() || has_shared_name {
            return Ok(());
        }
        // A recursive call may have done the work already.
        let is_first_call = self.entries_with_new_names.insert(number);
        if !is_first_call {
            return Ok(());
        }
        for entry_name in change.added_names {
            if let Some(&dir_change) = self.changes.get(&entry_name.dir) {
                self.add_new_names(dir_change)?;
            }
            let dir = self.find_object(entry_name.dir)?.ok_or(Errno::STALE)?;
            if !self.leads_to_object(change.entry, &dir, &entry_name.name)? {
                self.add_name(&change, &dir, OsStr::from_bytes(&entry_name.name))?;
            }
        }
        Ok(())
    }

    /// Adds the name `name` in `dir` to an object of the log. Moves the object from `away/` (objects between two names)
    /// or from its staged path in the transaction's directory; if it is in neither, links it under one more name.
    fn add_name(&mut self, change: &EntryChange<'a>, dir: &B::Inode, name: &OsStr) -> Result<()> {
        let no_flags = RenameFlags::empty();
        let away_name = change.away_name();
        if self.leads_to_object(change.entry, self.away_dir, away_name.as_bytes())? {
            let away_name = OsStr::new(&away_name);
            return self
                .base
                .rename(self.away_dir, away_name, dir, name, no_flags);
        }
        if let Some(staged) = change.staged_at.or(change.entry.anchor_at.as_ref()) {
            let staging_dir = self.staging_dir(&staged.dir)?;
            if self.leads_to_object(change.entry, &staging_dir, staged.name.as_bytes())? {
                let staged_name = OsStr::new(&staged.name);
                return self
                    .base
                    .rename(&staging_dir, staged_name, dir, name, no_flags);
            }
        }
        // The object is neither in `away/` nor staged, so it has a name in the tree.
        let inode = self.find_object(change.entry.number)?.ok_or(Errno::STALE)?;
        self.base.link(&inode, dir, name).map(drop)
    }

    /// Sets the attributes of an object after all names and data have changed. They are in the log, or those of the
    /// staged copy, a file in the transaction's directory.
    ///
    /// Does nothing if the entry is complete or has no attributes, or if the object is not found.
    fn set_attributes(&mut self, change: &EntryChange<'a>) -> Result<()> {
        let side = change.side;
        let is_complete = self.completed_entries.contains(&change.entry.number);
        let sets_times = side.atime.is_some() || side.mtime.is_some();
        let sets_attributes = sets_times || side.copy_at.is_some() || side.attributes.is_some();
        if is_complete || !sets_attributes {
            return Ok(());
        }
        let Some(inode) = self.find_object(change.entry.number)? else {
            return Ok(());
        };
        self.set_times(&inode, side)?;
        if let Some(attributes) = &side.attributes {
            staging::set_attributes(self.base, &inode, attributes)?;
        }
        match &side.copy_at {
            Some(copy_at) => self.copy_attributes(change, &inode, copy_at),
            None => Ok(()),
        }
    }

    /// Sets the times that the side has, and keeps the others.
    fn set_times(&self, inode: &B::Inode, side: &EntrySide) -> Result<()> {
        if side.atime.is_none() && side.mtime.is_none() {
            return Ok(());
        }
        let set_or_keep =
            |time: Option<StoredTime>| time.map_or(SetTime::Keep, |time| SetTime::At(time.into()));
        self.base
            .set_times(inode, set_or_keep(side.atime), set_or_keep(side.mtime))
    }

    /// Copies the attributes of the staged copy, an object in the transaction's directory, to the object itself.
    ///
    /// In a shared log (several hosts commit one transaction) without a change of owner, mode or extended attributes,
    /// only the modification time is copied, because another host may have set the other attributes.
    fn copy_attributes(
        &mut self,
        change: &EntryChange<'a>,
        inode: &B::Inode,
        copy_at: &StagedPath,
    ) -> Result<()> {
        let copy = self.find_staged(copy_at)?;
        let copies_all = !self.is_shared || change.side.changes_attributes;
        if copies_all {
            return staging::copy_attributes(self.base, &copy, inode);
        }
        let copied_mtime = self.base.attr(&copy)?.mtime;
        let mtime = match self.mtimes_in_backing.get(&change.entry.number) {
            Some(&in_backing) => {
                let at_first_change = change.side.mtime_before.map(Time::from);
                merged_mtime(copied_mtime, in_backing, at_first_change)
            }
            // The object was not found when the application began, so there is no other time to compare with.
            None => copied_mtime,
        };
        self.base
            .set_times(inode, SetTime::Keep, SetTime::At(mtime))
    }

    /// Removes a directory that lost its last name. It is in `away/` and empty by now.
    fn remove_dir(&mut self, change: &EntryChange<'a>) -> Result<()> {
        let may_be_away = !change.removed_names.is_empty() || change.entry.unchanged_name.is_none();
        let is_needed = !change.added_names.is_empty() || change.kept_at.is_some();
        if is_needed || !may_be_away {
            return Ok(());
        }
        let away_name = change.away_name();
        let away_name = OsStr::new(&away_name);
        if find(self.base, self.away_dir, away_name)?.is_some() {
            self.base.rmdir(self.away_dir, away_name)?;
        }
        Ok(())
    }
}
