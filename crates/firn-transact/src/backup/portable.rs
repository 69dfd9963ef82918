//! Makes portable change logs for backups: what a transaction changes, with each object identified by its path. Inode
//! numbers are not valid in another tree.
//!
//! Terms
//! * The *backing* is the directory below the mount.
//! * The *record* is the change log that a prepare stores, and that is translated here. It has one *entry* for each
//!   changed object and for the directories by which these objects are found.
//! * An object's *number* in the record links the entries: a name in an entry has the number of its directory.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use firn_backing::Backing;

use crate::change_log::{
    BACKING_TOP_NUMBER, ChangeLog, Entry, EntryName, EntrySide, Identity, PortableIdentity,
};
use crate::error::BackupError;
use crate::paths::join;
use crate::staging;

/// An object of the backing, and a path of it from the top.
struct FoundObject<B: Backing> {
    path: Vec<u8>,
    inode: B::Inode,
}

impl<B: Backing> Clone for FoundObject<B> {
    fn clone(&self) -> Self {
        Self {
            path: self.path.clone(),
            inode: self.inode.clone(),
        }
    }
}

/// Makes the portable log of a record. The backing must still have the tree from before the transaction.
pub(super) struct PortableLogMaker<'a, B: Backing> {
    base: &'a B,
    /// Device number of the top.
    device: u64,
    log: &'a ChangeLog,
    /// Entries of the record by the numbers of their objects.
    entries: HashMap<u64, &'a Entry>,
    /// Directories that were found, by their numbers.
    found_dirs: HashMap<u64, FoundObject<B>>,
}

impl<'a, B: Backing> PortableLogMaker<'a, B> {
    /// Prepares the translation of the change log `log` of a transaction into one that is valid in other trees. `base`
    /// is the backing that has the transaction, and `device` the device number of its top.
    pub(super) fn new(base: &'a B, device: u64, log: &'a ChangeLog) -> Self {
        let entries = log
            .entries
            .iter()
            .map(|entry| (entry.number, entry))
            .collect();
        let top = FoundObject {
            path: Vec::new(),
            inode: base.root(),
        };
        Self {
            base,
            device,
            log,
            entries,
            found_dirs: HashMap::from([(BACKING_TOP_NUMBER, top)]),
        }
    }

    /// Returns a log that can be applied to any copy of the tree: objects are found by their paths. It has no undo
    /// parts.
    pub(super) fn make_log(mut self) -> Result<ChangeLog, BackupError> {
        let mut entries = Vec::new();
        for entry in &self.log.entries {
            entries.extend(self.portable_entry(entry)?);
        }
        Ok(ChangeLog {
            can_be_undone: false,
            entries,
            ..self.log.clone()
        })
    }

    /// Returns a copy of an entry of the change log for other trees: it identifies the object by paths, not by inode
    /// number, and cannot be undone. The paths are those that the object has in the backing before the transaction.
    ///
    /// If it has none, the copy would be of no use: returns `None` if the log does not change the object, and otherwise
    /// fails with `NoPath`. A directory without a path always fails.
    fn portable_entry(&mut self, entry: &'a Entry) -> Result<Option<Entry>, BackupError> {
        let mut portable_entry = Entry {
            identity: Identity::NONE,
            kept_at: None,
            undo: EntrySide::default(),
            ..entry.clone()
        };
        // A new object is not in the other tree. Its bytes come with the backup, so it needs no path.
        let is_new = entry.new_at.is_some();
        if is_new {
            portable_entry.unchanged_name = None;
            return Ok(Some(portable_entry));
        }
        if entry.number == BACKING_TOP_NUMBER {
            return Ok(Some(portable_entry));
        }
        // All names that are found lead to the same object.
        let mut paths = Vec::new();
        let mut found_inode = None;
        for entry_name in entry.names_before() {
            // The search for the name's directory must not come back to this object.
            let mut searched = vec![entry.number];
            match self.find_at(entry, entry_name, &mut searched)? {
                Some(object) => {
                    paths.push(object.path);
                    found_inode = Some(object.inode);
                }
                // The backing does not have the name yet: the object gets it in the transaction.
                None => portable_entry.unchanged_name = None,
            }
        }
        let Some(inode) = found_inode else {
            let is_changed =
                entry.is_dir || !entry.after.is_empty() || entry.redo.changes_in_place();
            if is_changed {
                let number = entry.number;
                return Err(BackupError::NoPath { number });
            }
            return Ok(None);
        };
        paths.sort();
        paths.dedup();
        let attr = self.base.attr(&inode)?;
        portable_entry.portable = Some(PortableIdentity {
            kind: attr.mode & libc::S_IFMT,
            size: entry.redo.data.as_ref().map(|_| attr.size),
            paths,
        });
        Ok(Some(portable_entry))
    }

    /// Looks for the object of an entry of the change log under one of its names in the backing. Returns the object and
    /// its path; `None` if the name does not exist or leads to another object.
    ///
    /// The directory of the name is searched for first, which may lead to further searches. `searched` has the numbers
    /// of all objects that are being searched for, so that a cycle of directories ends the search.
    fn find_at(
        &mut self,
        entry: &Entry,
        EntryName { dir, name }: &'a EntryName,
        searched: &mut Vec<u64>,
    ) -> Result<Option<FoundObject<B>>, BackupError> {
        let Some(dir) = self.find_dir(*dir, searched)? else {
            return Ok(None);
        };
        let found = staging::find(self.base, &dir.inode, OsStr::from_bytes(name))?;
        let Some((inode, attr)) = found else {
            return Ok(None);
        };
        if Identity::from_attr(&attr, self.device) != entry.identity {
            return Ok(None);
        }
        Ok(Some(FoundObject {
            path: join(&dir.path, name),
            inode,
        }))
    }

    /// Returns the directory that has `number` in the change log, and its path in the backing. Returns `None` if the
    /// transaction made it, or if no name of it is found there.
    ///
    /// `searched` has the numbers of all objects that are being searched for, so that the search has an end.
    fn find_dir(
        &mut self,
        number: u64,
        searched: &mut Vec<u64>,
    ) -> Result<Option<FoundObject<B>>, BackupError> {
        if let Some(dir) = self.found_dirs.get(&number) {
            return Ok(Some(dir.clone()));
        }
        let Some(&entry) = self.entries.get(&number) else {
            return Ok(None);
        };
        let is_new = entry.new_at.is_some();
        let is_being_searched = searched.contains(&number);
        if is_new || is_being_searched {
            return Ok(None);
        }
        searched.push(number);
        let mut found_dir = None;
        for entry_name in entry.names_before() {
            found_dir = self.find_at(entry, entry_name, searched)?;
            if found_dir.is_some() {
                break;
            }
        }
        searched.pop();
        if let Some(dir) = &found_dir {
            self.found_dirs.insert(number, dir.clone());
        }
        Ok(found_dir)
    }
}
