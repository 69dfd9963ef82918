//! Makes the access list of a host: the bytes and names that its programs read or changed in a transaction.
//!
//! Each host publishes its list before the hosts vote on the commit; two hosts must not have changed the same bytes.
//! The changes are those of the change log, which a prepare has made durable.
//!
//! Objects are identified by their inode numbers in the backing, which all hosts see. No other host sees what this host
//! has made in its transaction, so new objects are listed only by the names that they take.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use crate::conflict::{
    AccessList, AccessedFile, ListedFile, ListedProcess, NameInDir, ProcessAccesses, RangeSet,
};
use crate::vote::Votes;
use firn_backing::{Backing, Errno};
use firn_hosts::Members;

use crate::change_log::{BACKING_TOP_NUMBER, ChangeLog, DataChange, Entry, EntryName};
use crate::paths::{join, last_name_bytes, parent_of};
use crate::staging;

impl<B: Backing> Votes<B> {
    /// Returns the list that this host publishes before a vote: the accesses `used` of its programs, and the changes
    /// that `record` makes, the change log of the prepared transaction. Reads directories of the backing.
    pub(crate) fn list_accesses(
        &self,
        members: &Members,
        record: &ChangeLog,
        used: &[AccessedFile],
    ) -> Result<AccessList, Errno> {
        let mut builder = ListBuilder::new(record, self.tree.top().key.ino);
        let new_inodes: BTreeSet<u64> = record
            .entries
            .iter()
            .filter(|entry| entry.new_at.is_some())
            .map(|entry| entry.identity.ino)
            .collect();
        let mut used_dirs = UsedDirs {
            base: &self.lower.base,
            top_ino: builder.top_ino,
            dirs_by_path: HashMap::new(),
        };
        // Other hosts do not see new files, so accesses to them are not published.
        for file in used.iter().filter(|file| !new_inodes.contains(&file.ino)) {
            used_dirs.add_names_on_path(&file.path, &mut builder.used_names)?;
            builder.add_used_file(file);
        }
        for entry in &record.entries {
            builder.add_entry(entry);
        }
        Ok(builder.finish(&members.host))
    }
}

/// Stands for all processes whose id is not known.
const UNKNOWN_PID: u32 = 0;
/// Maximum number of directories on a path of the change log; see [`ListBuilder::path_at_depth`].
const PATH_DEPTH_MAX: usize = 1000;

/// Accesses to one file of the backing, while the list is made.
struct FileAccesses {
    path: Vec<u8>,
    /// Accesses by process id, or [`UNKNOWN_PID`].
    processes: BTreeMap<u32, ProcessAccesses>,
}

impl FileAccesses {
    fn new(path: Vec<u8>) -> Self {
        Self {
            path,
            processes: BTreeMap::new(),
        }
    }

    /// Adds the ranges of a file that a transaction writes although no process is known to have written them. They
    /// count as written by [`UNKNOWN_PID`]. A cut (the file became shorter) counts as a write of all bytes behind it.
    fn add_change(&mut self, data: &DataChange) {
        let mut written_by_processes = RangeSet::default();
        for accesses in self.processes.values() {
            written_by_processes.extend(&accesses.written);
        }
        let cut_range = (!data.grows).then_some(data.cut..u64::MAX);
        let written_ranges = data.written.iter().map(|range| range.start..range.end);
        for range in written_ranges.chain(cut_range) {
            let part = written_by_processes.part_at(range.start);
            let is_known = part.is_inside && part.end >= range.end;
            if !is_known {
                let accesses = self.processes.entry(UNKNOWN_PID).or_default();
                accesses.written.insert(range);
            }
        }
    }

    /// Returns the accesses as they are published. `ino` is the inode number of the file.
    fn into_listed(self, ino: u64) -> ListedFile {
        let processes = self
            .processes
            .iter()
            .map(|(pid, accesses)| ListedProcess::new(*pid, &accesses.read, &accesses.written));
        ListedFile {
            ino,
            processes: processes.collect(),
            path: self.path,
        }
    }
}

/// Collects the access list of a prepared transaction.
struct ListBuilder<'a> {
    record: &'a ChangeLog,
    /// Entries of the record by the numbers of their objects.
    entries: BTreeMap<u64, &'a Entry>,
    /// Inode number of the backing's top.
    top_ino: u64,
    used_names: BTreeSet<NameInDir>,
    files: BTreeMap<u64, FileAccesses>,
    list: AccessList,
}

impl<'a> ListBuilder<'a> {
    fn new(record: &'a ChangeLog, top_ino: u64) -> Self {
        let numbered = record.entries.iter().map(|entry| (entry.number, entry));
        Self {
            record,
            entries: numbered.collect(),
            top_ino,
            used_names: BTreeSet::new(),
            files: BTreeMap::new(),
            list: AccessList::default(),
        }
    }

    /// Adds the accesses that the gate recorded for one file.
    fn add_used_file(&mut self, used: &AccessedFile) {
        let file = self
            .files
            .entry(used.ino)
            .or_insert_with(|| FileAccesses::new(used.path.clone()));
        for (pid, accesses) in &used.processes {
            let listed = file.processes.entry(*pid).or_default();
            listed.read.extend(&accesses.read);
            listed.written.extend(&accesses.written);
        }
    }

    /// Adds what the transaction changes in one object. `entry` is the object's part of the change log, with the names
    /// that the object has only `before` and only `after` the transaction.
    fn add_entry(&mut self, entry: &Entry) {
        for new_name in &entry.after {
            self.add_new_name(entry, new_name);
        }
        for old_name in &entry.before {
            self.add_changed_name(old_name);
        }
        for new_name in &entry.after {
            // A new directory does not conflict with the same directory made by another host, so its names do not count
            // as changed.
            if !self.is_shareable_dir(entry, new_name) {
                self.add_changed_name(new_name);
            }
        }
        // Other hosts do not see a new object, so only its names are listed.
        if entry.new_at.is_some() {
            return;
        }
        for old_name in entry.names_before() {
            let name = self.name_in_backing(old_name);
            self.used_names.extend(name);
        }
        let ino = entry.identity.ino;
        let path = self.path_of(entry.number);
        if entry.redo.changes_attributes {
            self.list.attributes.push((ino, path.clone()));
        }
        if let Some(data) = &entry.redo.data {
            self.files
                .entry(ino)
                .or_insert_with(|| FileAccesses::new(path))
                .add_change(data);
        }
    }

    /// Adds a name that the record changes. Does nothing if the name is in a new directory.
    fn add_changed_name(&mut self, changed_name: &EntryName) {
        if let Some(name) = self.name_in_backing(changed_name) {
            let path = self.path_of_name(changed_name);
            self.list.changed.push((name, path));
        }
    }

    /// Adds a name that an object takes, if another host may take it as well.
    fn add_new_name(&mut self, entry: &Entry, new_name: &EntryName) {
        let is_shareable_dir = self.is_shareable_dir(entry, new_name);
        match self.name_in_backing(new_name) {
            // Another host may use the directory that this host makes, so the name counts as used, not as changed.
            Some(name) if is_shareable_dir => {
                self.used_names.insert(name);
            }
            // The name is listed as changed already.
            Some(_) => return,
            None => {}
        }
        let path = self.path_of_name(new_name);
        self.list.made.push((path, is_shareable_dir));
    }

    /// Returns whether an object is a new directory under a name that no other object of the record had before. Each
    /// host makes such a directory, or uses the one that another host made.
    fn is_shareable_dir(&self, entry: &Entry, new_name: &EntryName) -> bool {
        let is_new_dir = entry.is_dir && entry.new_at.is_some();
        let was_taken = || {
            let mut entries = self.record.entries.iter();
            entries.any(|entry| entry.before.contains(new_name))
        };
        is_new_dir && !was_taken()
    }

    /// Returns a name of the record as other hosts know it. Returns `None` if its directory is new.
    fn name_in_backing(&self, EntryName { dir, name }: &EntryName) -> Option<NameInDir> {
        let dir_ino = if *dir == BACKING_TOP_NUMBER {
            self.top_ino
        } else {
            let dir_entry = self.entries.get(dir)?;
            if dir_entry.new_at.is_some() {
                return None;
            }
            dir_entry.identity.ino
        };
        Some(NameInDir {
            dir: dir_ino,
            name: name.clone(),
        })
    }

    /// Returns the path of a name of the record, relative to the backing.
    fn path_of_name(&self, EntryName { dir, name }: &EntryName) -> Vec<u8> {
        join(&self.path_of(*dir), name)
    }

    /// Returns a path of an object of the record, relative to the backing.
    fn path_of(&self, number: u64) -> Vec<u8> {
        self.path_at_depth(number, 0)
    }

    /// Returns a path of the object that has `number` in the change log. The path is empty if the object has no name in
    /// the log, or is the top of the backing.
    ///
    /// `depth` is the number of directories that this recursive search has passed on the way up. It ends at
    /// [`PATH_DEPTH_MAX`], because other users may be able to change the stored log so that directories form a cycle.
    fn path_at_depth(&self, number: u64, depth: usize) -> Vec<u8> {
        if number == BACKING_TOP_NUMBER || depth >= PATH_DEPTH_MAX {
            return Vec::new();
        }
        let Some(entry) = self.entries.get(&number) else {
            return Vec::new();
        };
        let mut names = entry
            .unchanged_name
            .iter()
            .chain(&entry.before)
            .chain(&entry.after);
        match names.next() {
            Some(EntryName { dir, name }) => join(&self.path_at_depth(*dir, depth + 1), name),
            None => Vec::new(),
        }
    }

    /// Returns the finished list, as that of `host`.
    fn finish(self, host: &str) -> AccessList {
        let files = self
            .files
            .into_iter()
            .map(|(ino, file)| file.into_listed(ino))
            .collect();
        AccessList {
            host: host.to_owned(),
            used: self.used_names.into_iter().collect(),
            files,
            ..self.list
        }
    }
}

/// A directory of the backing, and its inode number.
struct FoundDir<B: Backing> {
    inode: B::Inode,
    ino: u64,
}

impl<B: Backing> Clone for FoundDir<B> {
    fn clone(&self) -> Self {
        Self {
            inode: self.inode.clone(),
            ino: self.ino,
        }
    }
}

/// Finds the directories of the backing on the way to used files, each once.
struct UsedDirs<'a, B: Backing> {
    base: &'a B,
    top_ino: u64,
    /// Directories by path. `None` if the backing no longer has the path, because this host has changed a name in it.
    dirs_by_path: HashMap<Vec<u8>, Option<FoundDir<B>>>,
}

impl<B: Backing> UsedDirs<'_, B> {
    /// Adds all names on the way to the file at `path`.
    fn add_names_on_path(
        &mut self,
        path: &[u8],
        names: &mut BTreeSet<NameInDir>,
    ) -> Result<(), Errno> {
        if let Some(dir) = self.find_dir(parent_of(path), names)? {
            names.insert(NameInDir {
                dir: dir.ino,
                name: last_name_bytes(path).to_vec(),
            });
        }
        Ok(())
    }

    /// Returns the directory of the backing at `path`, and adds the names on the way to it to `names`, because this
    /// host uses them. Returns `None` if the directory does not exist.
    fn find_dir(
        &mut self,
        path: &[u8],
        names: &mut BTreeSet<NameInDir>,
    ) -> Result<Option<FoundDir<B>>, Errno> {
        if let Some(dir) = self.dirs_by_path.get(path) {
            return Ok(dir.clone());
        }
        let dir = if path.is_empty() {
            Some(FoundDir {
                inode: self.base.root(),
                ino: self.top_ino,
            })
        } else {
            match self.find_dir(parent_of(path), names)? {
                None => None,
                Some(parent) => self.find_in(&parent, last_name_bytes(path), names)?,
            }
        };
        self.dirs_by_path.insert(path.to_vec(), dir.clone());
        Ok(dir)
    }

    /// Looks up a directory in its parent, and adds the name to `names`, because this host uses it. Returns `None` if
    /// the name does not exist.
    fn find_in(
        &self,
        parent: &FoundDir<B>,
        name: &[u8],
        names: &mut BTreeSet<NameInDir>,
    ) -> Result<Option<FoundDir<B>>, Errno> {
        names.insert(NameInDir {
            dir: parent.ino,
            name: name.to_vec(),
        });
        match staging::find(self.base, &parent.inode, OsStr::from_bytes(name)) {
            Ok(found) => Ok(found.map(|(inode, attr)| FoundDir {
                inode,
                ino: attr.ino,
            })),
            Err(Errno::NOTDIR) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}
