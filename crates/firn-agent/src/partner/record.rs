//! The record of a partner copy: the files that it has, and the state of the source in which they were copied.
//!
//! A record shows whether the copy is current: the source must have the same firnd, and each file the same number of
//! changes.

use std::collections::BTreeMap;

use firn_protocol::path::BytePath;
use serde::{Deserialize, Serialize};

use crate::message::{Entry, EntryKind};

/// The record of one copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Name of the copied unit in the source's mount.
    pub(crate) unit: BytePath,
    /// Identity of the arena that held the files.
    pub(crate) arena: String,
    /// Incarnation of the firnd that counted the changes.
    pub(crate) incarnation: String,
    /// Entries of the unit as they were listed, the unit itself first.
    pub(crate) entries: Vec<Entry>,
}

impl Record {
    /// Size of the files together.
    pub(crate) fn bytes(&self) -> u64 {
        let sizes = self.entries.iter().map(|entry| match entry.kind {
            EntryKind::File { bytes, .. } => bytes,
            _ => 0,
        });
        sizes.fold(0, u64::saturating_add)
    }

    fn by_path(&self) -> BTreeMap<&BytePath, &Entry> {
        by_path(&self.entries)
    }

    /// Whether the copy has each held file of `entries` with the same length and the same number of changes, as counted
    /// by the firnd `incarnation`. Entries that are not held are ignored.
    pub(crate) fn covers(&self, incarnation: &str, entries: &[Entry]) -> bool {
        if self.incarnation != incarnation {
            return false;
        }
        let copied = self.by_path();
        let is_covered = |entry: &Entry| match (&entry.kind, copied.get(&entry.path)) {
            _ if entry.held.is_none() => true,
            (EntryKind::File { bytes, .. }, Some(copy)) => {
                let has_same_length = matches!(copy.kind, EntryKind::File { bytes: copied_bytes, .. } if copied_bytes == *bytes);
                has_same_length && copy.changes().is_some() && copy.changes() == entry.changes()
            }
            (EntryKind::File { .. }, None) => false,
            _ => true,
        };
        entries.iter().all(is_covered)
    }

    /// Whether the copy has an entry with the same path, kind and length for each of `entries`. If so, their bytes may
    /// be equal too.
    pub(crate) fn has_same_shape(&self, entries: &[Entry]) -> bool {
        let copied = self.by_path();
        let is_alike = |entry: &Entry| {
            let copy = copied.get(&entry.path);
            copy.is_some_and(|copy| match (&copy.kind, &entry.kind) {
                (
                    EntryKind::File {
                        bytes: copied_bytes,
                        ..
                    },
                    EntryKind::File { bytes, .. },
                ) => copied_bytes == bytes,
                (copied_kind, kind) => copied_kind == kind,
            })
        };
        entries.iter().all(is_alike)
    }

    /// Returns the record of the same copy under another firnd, which holds `entries`. Files that this firnd does not
    /// hold lose their numbers of changes.
    pub(crate) fn renewed(&self, incarnation: &str, entries: &[Entry]) -> Self {
        let held = by_path(entries);
        let renew = |copied: &Entry| match held.get(&copied.path) {
            Some(entry) => (*entry).clone(),
            None => Entry {
                held: None,
                ..copied.clone()
            },
        };
        Self {
            incarnation: incarnation.to_owned(),
            entries: self.entries.iter().map(renew).collect(),
            ..self.clone()
        }
    }

    /// Returns the paths of copied files that are not among `entries`.
    pub(crate) fn files_not_in(&self, entries: &[Entry]) -> Vec<BytePath> {
        let held = by_path(entries);
        let others = self.files().filter(|file| !held.contains_key(&file.path));
        others.map(|file| file.path.clone()).collect()
    }

    /// Returns the entries of regular files.
    pub(super) fn files(&self) -> impl Iterator<Item = &Entry> {
        let is_file = |entry: &&Entry| matches!(entry.kind, EntryKind::File { .. });
        self.entries.iter().filter(is_file)
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
