//! Portable change logs for backups: objects are identified by path, because inode numbers are not valid in another
//! tree.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use firn_backing::{Backing, Volume};

use crate::change_log::{ChangeLog, Entry as LogEntry, EntryName, Identity, PortableIdentity};
use crate::error::BackupError;
use crate::staging;

/// Path from the top of the backing, and the object.
type Found<B> = (Vec<u8>, <B as Volume>::Inode);

/// Finds the names that the objects of a record have in the backing, which is as it was before it.
pub(super) struct Paths<'a, B: Backing> {
    base: &'a B,
    /// Device of the top.
    device: u64,
    log: &'a ChangeLog,
    entries: HashMap<u64, &'a LogEntry>,
    found: HashMap<u64, (Vec<u8>, B::Inode)>,
}

impl<'a, B: Backing> Paths<'a, B> {
    pub(super) fn new(base: &'a B, device: u64, log: &'a ChangeLog) -> Self {
        let entries = log
            .entries
            .iter()
            .map(|entry| (entry.number, entry))
            .collect();
        Self {
            base,
            device,
            log,
            entries,
            found: HashMap::from([(0, (Vec::new(), base.root()))]),
        }
    }

    /// The log for any copy of the tree: objects are found by their names, and nothing is kept to undo it.
    pub(super) fn portable_log(mut self) -> Result<ChangeLog, BackupError> {
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

    /// `None` for an object that comes back to where it was.
    fn portable_entry(&mut self, entry: &'a LogEntry) -> Result<Option<LogEntry>, BackupError> {
        let mut portable = LogEntry {
            identity: Identity::NONE,
            kept_at: None,
            undo: crate::change_log::EntrySide::default(),
            ..entry.clone()
        };
        if entry.new_at.is_some() {
            portable.stays = None;
            return Ok(Some(portable));
        }
        if entry.number == 0 {
            return Ok(Some(portable));
        }
        let mut paths = Vec::new();
        let mut found = None;
        for place in entry.names_before() {
            match self.find_at(entry, place, &mut vec![entry.number])? {
                Some((path, inode)) => {
                    paths.push(path);
                    found = Some(inode);
                }
                // A name that it has only after the transaction.
                None => portable.stays = None,
            }
        }
        paths.sort();
        paths.dedup();
        let Some(inode) = found else {
            let is_idle = !entry.is_dir && entry.after.is_empty() && !entry.redo.changes_in_place();
            let number = entry.number;
            return if is_idle {
                Ok(None)
            } else {
                Err(BackupError::NoPath { number })
            };
        };
        let attr = self.base.attr(&inode)?;
        portable.known = Some(PortableIdentity {
            kind: attr.mode & libc::S_IFMT,
            size: entry.redo.data.as_ref().map(|_| attr.size),
            paths,
        });
        Ok(Some(portable))
    }

    fn find_at(
        &mut self,
        entry: &LogEntry,
        (dir, name): &'a EntryName,
        above: &mut Vec<u64>,
    ) -> Result<Option<Found<B>>, BackupError> {
        let Some((path, dir)) = self.find_dir(*dir, above)? else {
            return Ok(None);
        };
        let Some((inode, attr)) = staging::find(self.base, &dir, OsStr::from_bytes(name))? else {
            return Ok(None);
        };
        let slash: &[u8] = if path.is_empty() { b"" } else { b"/" };
        let is_it = Identity::of(&attr, self.device) == entry.identity;
        Ok(is_it.then(|| ([&path, slash, name].concat(), inode)))
    }

    fn find_dir(
        &mut self,
        number: u64,
        above: &mut Vec<u64>,
    ) -> Result<Option<Found<B>>, BackupError> {
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
