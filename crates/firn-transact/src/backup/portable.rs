//! Portable change logs for backups: objects are identified by path, because inode numbers are not valid in another
//! tree.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use firn_backing::Backing;

use crate::change_log::{ChangeLog, Entry as LogEntry, EntryName, Identity, PortableIdentity};
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
    /// Namespace of the record by the numbers of their objects.
    entries: HashMap<u64, &'a LogEntry>,
    /// Directories that were found, by their numbers.
    found: HashMap<u64, FoundObject<B>>,
}

impl<'a, B: Backing> PortableLogMaker<'a, B> {
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
            found: HashMap::from([(0, top)]),
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

    /// Returns the portable form of an entry.
    ///
    /// Returns `None` if no name of the object is found and the log does not change the object. Fails with `NoPath` if
    /// no name is found but the log changes the object.
    fn portable_entry(&mut self, entry: &'a LogEntry) -> Result<Option<LogEntry>, BackupError> {
        let mut portable = LogEntry {
            identity: Identity::NONE,
            kept_at: None,
            undo: crate::change_log::EntrySide::default(),
            ..entry.clone()
        };
        if entry.new_at.is_some() {
            portable.unchanged_name = None;
            return Ok(Some(portable));
        }
        if entry.number == 0 {
            return Ok(Some(portable));
        }
        let mut paths = Vec::new();
        let mut found = None;
        for entry_name in entry.names_before() {
            match self.find_at(entry, entry_name, &mut vec![entry.number])? {
                Some(object) => {
                    paths.push(object.path);
                    found = Some(object.inode);
                }
                // The object has this name only after the transaction.
                None => portable.unchanged_name = None,
            }
        }
        paths.sort();
        paths.dedup();
        let Some(inode) = found else {
            let is_unchanged =
                !entry.is_dir && entry.after.is_empty() && !entry.redo.changes_in_place();
            let number = entry.number;
            return if is_unchanged {
                Ok(None)
            } else {
                Err(BackupError::NoPath { number })
            };
        };
        let attr = self.base.attr(&inode)?;
        portable.portable = Some(PortableIdentity {
            kind: attr.mode & libc::S_IFMT,
            size: entry.redo.data.as_ref().map(|_| attr.size),
            paths,
        });
        Ok(Some(portable))
    }

    /// Returns the object of an entry if it is at this name in the backing.
    ///
    /// `above` has the directories whose searches led here. The search ends if they form a circle.
    fn find_at(
        &mut self,
        entry: &LogEntry,
        EntryName { dir, name }: &'a EntryName,
        above: &mut Vec<u64>,
    ) -> Result<Option<FoundObject<B>>, BackupError> {
        let Some(dir) = self.find_dir(*dir, above)? else {
            return Ok(None);
        };
        let Some((inode, attr)) = staging::find(self.base, &dir.inode, OsStr::from_bytes(name))?
        else {
            return Ok(None);
        };
        let is_object = Identity::from_attr(&attr, self.device) == entry.identity;
        Ok(is_object.then(|| FoundObject {
            path: join(&dir.path, name),
            inode,
        }))
    }

    /// Returns the directory with a number in the record; `None` if it is new or no name of it is found.
    fn find_dir(
        &mut self,
        number: u64,
        above: &mut Vec<u64>,
    ) -> Result<Option<FoundObject<B>>, BackupError> {
        if let Some(found) = self.found.get(&number) {
            return Ok(Some(found.clone()));
        }
        let entry = self.entries.get(&number).copied();
        let Some(entry) = entry.filter(|entry| entry.new_at.is_none()) else {
            return Ok(None);
        };
        if above.contains(&number) {
            return Ok(None);
        }
        above.push(number);
        let mut found = None;
        for place in entry.names_before() {
            found = self.find_at(entry, place, above)?;
            if found.is_some() {
                break;
            }
        }
        above.pop();
        if let Some(found) = &found {
            self.found.insert(number, found.clone());
        }
        Ok(found)
    }
}
