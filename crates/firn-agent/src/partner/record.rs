//! The record of a *partner copy* (files copied from the memory of another host, the *source*): which files it has, and
//! in which state of the source they were copied.
//!
//! A record shows whether the copy is current. The source must have the same *firnd*, the process that serves its mount
//! and counts the changes of each file. Each file must have the same number of changes.

use std::collections::BTreeMap;

use firn_protocol::path::BytePath;
use serde::{Deserialize, Serialize};

use crate::message::{Entry, EntryKind};

/// The record of one copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CopyRecord {
    /// Name of the copied unit in the source's mount.
    pub(crate) unit: BytePath,
    /// Identity of the arena that held the files.
    pub(crate) arena: String,
    /// Incarnation of the firnd that counted the changes.
    pub(crate) incarnation: String,
    /// Entries of the unit as they were listed, the unit itself first.
    pub(crate) entries: Vec<Entry>,
}

impl CopyRecord {
    /// Size of the files together.
    pub(crate) fn bytes(&self) -> u64 {
        let sizes = self.files().filter_map(file_bytes);
        sizes.fold(0, u64::saturating_add)
    }

    /// Whether the copy is current: it has each file of `entries` that the other host holds in memory, with the same
    /// length and the same number of changes. Other entries are ignored.
    ///
    /// firnd, the server of the host's mount, counts the changes, and begins anew when it restarts. The copy's counts
    /// are therefore valid only if they are from the firnd that `incarnation` identifies.
    pub(crate) fn is_current(&self, incarnation: &str, entries: &[Entry]) -> bool {
        if self.incarnation != incarnation {
            return false;
        }
        let copied_entries = by_path(&self.entries);
        for entry in entries {
            let Some(bytes) = file_bytes(entry) else {
                continue;
            };
            let is_held = entry.held.is_some();
            if !is_held {
                continue;
            }
            let Some(copied) = copied_entries.get(&entry.path) else {
                return false;
            };
            let has_same_bytes = file_bytes(copied) == Some(bytes);
            let has_same_changes =
                copied.changes().is_some() && copied.changes() == entry.changes();
            if !has_same_bytes || !has_same_changes {
                return false;
            }
        }
        true
    }

    /// Whether the copy has an entry with the same path, kind and length for each of `entries`. If so, their bytes may
    /// be equal too.
    pub(crate) fn has_same_shape(&self, entries: &[Entry]) -> bool {
        let copied_entries = by_path(&self.entries);
        entries.iter().all(|entry| {
            let Some(copied) = copied_entries.get(&entry.path) else {
                return false;
            };
            match (file_bytes(copied), file_bytes(entry)) {
                (Some(copied_bytes), Some(bytes)) => copied_bytes == bytes,
                _ => copied.kind == entry.kind,
            }
        })
    }

    /// Returns the record of the same copy under another firnd, which holds `entries`. Files that this firnd does not
    /// hold lose their numbers of changes.
    pub(crate) fn with_firnd(&self, incarnation: &str, entries: &[Entry]) -> Self {
        let held_entries = by_path(entries);
        let new_entry = |copied: &Entry| match held_entries.get(&copied.path) {
            Some(held_entry) => (*held_entry).clone(),
            None => Entry {
                held: None,
                ..copied.clone()
            },
        };
        Self {
            incarnation: incarnation.to_owned(),
            entries: self.entries.iter().map(new_entry).collect(),
            ..self.clone()
        }
    }

    /// Returns the paths of copied files that are not among `entries`.
    pub(crate) fn files_not_in(&self, entries: &[Entry]) -> Vec<BytePath> {
        let entries_by_path = by_path(entries);
        self.files()
            .filter(|file| !entries_by_path.contains_key(&file.path))
            .map(|file| file.path.clone())
            .collect()
    }

    /// Returns the entries of regular files.
    pub(super) fn files(&self) -> impl Iterator<Item = &Entry> {
        let is_file = |entry: &&Entry| file_bytes(entry).is_some();
        self.entries.iter().filter(is_file)
    }
}

/// Returns the size of a regular file. Returns `None` for any other entry.
fn file_bytes(entry: &Entry) -> Option<u64> {
    match entry.kind {
        EntryKind::File { bytes, .. } => Some(bytes),
        _ => None,
    }
}

fn by_path(entries: &[Entry]) -> BTreeMap<&BytePath, &Entry> {
    entries.iter().map(|entry| (&entry.path, entry)).collect()
}

/// Returns the bytes of memory that a copy of these entries occupies.
pub(crate) fn stored_bytes(entries: &[Entry]) -> u64 {
    let sizes = entries.iter().map(Entry::stored_bytes);
    sizes.fold(0, u64::saturating_add)
}
