//! What a copy is of, and whether it is of what its source holds now.

use std::collections::BTreeMap;

use firn_protocol::path::BytePath;
use serde::{Deserialize, Serialize};

use crate::message::{Entry, EntryKind};

/// What a copy is of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Its name in the mount.
    pub(crate) unit: BytePath,
    /// The arena that held it.
    pub(crate) arena: String,
    /// The firnd that counted the changes.
    pub(crate) incarnation: String,
    /// What is in the tree, as it was listed; the first is the top.
    pub(crate) entries: Vec<Entry>,
}

impl Record {
    /// Bytes of its files.
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

    /// Whether it is of all these files, as they are.
    pub(crate) fn covers(&self, incarnation: &str, entries: &[Entry]) -> bool {
        if self.incarnation != incarnation {
            return false;
        }
        let all = self.by_path();
        let is_same = |entry: &Entry| match (&entry.kind, all.get(&entry.path)) {
            // Nothing of it is held.
            _ if entry.held.is_none() => true,
            (EntryKind::File { bytes, .. }, Some(own)) => {
                let is_as_long =
                    matches!(own.kind, EntryKind::File { bytes: known, .. } if known == *bytes);
                is_as_long && own.changes().is_some() && own.changes() == entry.changes()
            }
            (EntryKind::File { .. }, None) => false,
            _ => true,
        };
        entries.iter().all(is_same)
    }

    /// Whether there are files of the same names and lengths in it.
    pub(crate) fn may_be_of(&self, entries: &[Entry]) -> bool {
        let all = self.by_path();
        let is_like = |entry: &Entry| {
            let own = all.get(&entry.path);
            own.is_some_and(|own| match (&own.kind, &entry.kind) {
                (EntryKind::File { bytes, .. }, EntryKind::File { bytes: now, .. }) => bytes == now,
                (own, now) => own == now,
            })
        };
        entries.iter().all(is_like)
    }

    /// The record of this tree for another firnd, which holds `entries`. Files that it does not hold lose their
    /// numbers of changes.
    pub(crate) fn renewed(&self, incarnation: &str, entries: &[Entry]) -> Self {
        let now = by_path(entries);
        let renew = |own: &Entry| match now.get(&own.path) {
            Some(entry) => (*entry).clone(),
            None => Entry {
                held: None,
                ..own.clone()
            },
        };
        Self {
            incarnation: incarnation.to_owned(),
            entries: self.entries.iter().map(renew).collect(),
            ..self.clone()
        }
    }

    /// Files of it that are not among these.
    pub(crate) fn files_beside(&self, entries: &[Entry]) -> Vec<BytePath> {
        let now = by_path(entries);
        let others = self.files().filter(|own| !now.contains_key(&own.path));
        others.map(|own| own.path.clone()).collect()
    }

    /// Its files.
    pub(super) fn files(&self) -> impl Iterator<Item = &Entry> {
        let is_file = |entry: &&Entry| matches!(entry.kind, EntryKind::File { .. });
        self.entries.iter().filter(is_file)
    }
}

fn by_path(entries: &[Entry]) -> BTreeMap<&BytePath, &Entry> {
    entries.iter().map(|entry| (&entry.path, entry)).collect()
}

/// Bytes of memory that a copy of a list takes.
pub(crate) fn stored_bytes(entries: &[Entry]) -> u64 {
    let sizes = entries.iter().map(Entry::stored_bytes);
    sizes.fold(0, u64::saturating_add)
}
