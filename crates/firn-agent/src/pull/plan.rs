//! The plan of a pull: the agent's list of entries, checked before anything is created from it.
//!
//! A list comes from another host, so its paths could lead out of the copy. [`Plan::check`] refuses such a list as a
//! whole. Everything that a pull creates comes from a checked plan.
//!
//! Invariants
//! * The first entry is the pulled file or directory itself, with the empty path.
//! * The parent of each other entry is a directory that precedes the entry, and each part of its path is one valid
//!   name. Therefore no entry leaves the copy, not even through a symbolic link of the plan.
//! * Each path is unique.

use std::collections::BTreeMap;

use firn_format::record::Ending;
use firn_protocol::path::BytePath;

use crate::message::{Entry, EntryKind};

/// Size of the largest file that Linux allows.
const FILE_BYTES_MAX: u64 = i64::MAX as u64;

/// A checked list of entries; see the head of this file.
#[derive(Debug)]
pub(crate) struct Plan {
    entries: Vec<Entry>,
    /// Index in `entries` by path.
    by_path: BTreeMap<BytePath, usize>,
    /// Number of entries directly in each directory, without pipes, sockets and devices.
    counts: BTreeMap<BytePath, usize>,
}

impl Plan {
    /// Makes a plan from an agent's list. The error names the first entry that no correct agent would send.
    pub(crate) fn check(entries: Vec<Entry>) -> Result<Self, String> {
        let mut by_path = BTreeMap::new();
        let mut counts = BTreeMap::new();
        for (index, entry) in entries.iter().enumerate() {
            check_path(&entries, &by_path, index, entry)?;
            if let EntryKind::File { bytes, .. } = entry.kind
                && bytes > FILE_BYTES_MAX
            {
                return Err(format!("{} has {bytes} bytes", entry.path));
            }
            if by_path.insert(entry.path.clone(), index).is_some() {
                return Err(format!("{} twice", entry.path));
            }
            if index > 0 && entry.kind != EntryKind::Other {
                *counts.entry(parent_of(&entry.path)).or_default() += 1;
            }
        }
        if entries.is_empty() {
            return Err("nothing".into());
        }
        Ok(Self {
            entries,
            by_path,
            counts,
        })
    }

    /// Returns all entries, parents first.
    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Consumes the plan and returns all entries, parents first.
    pub(crate) fn into_entries(self) -> Vec<Entry> {
        self.entries
    }

    /// Returns the entry at a path, if the plan has one.
    pub(crate) fn find(&self, path: &BytePath) -> Option<&Entry> {
        self.by_path.get(path).map(|index| &self.entries[*index])
    }

    /// Returns how many files, directories and links the plan has directly in a directory.
    pub(crate) fn count_in(&self, dir: &BytePath) -> usize {
        self.counts.get(dir).copied().unwrap_or(0)
    }

    /// Returns the regular files, the listed size of each, and whether its writers have closed it.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&Entry, u64, Ending)> {
        self.entries.iter().filter_map(|entry| match entry.kind {
            EntryKind::File { bytes, ending } => Some((entry, bytes, ending)),
            _ => None,
        })
    }

    /// Returns the paths of pipes, sockets and devices, which are not pulled.
    pub(crate) fn left_out(&self) -> Vec<BytePath> {
        let others = self.entries.iter();
        others
            .filter(|entry| entry.kind == EntryKind::Other)
            .map(|entry| entry.path.clone())
            .collect()
    }
}

/// Checks the path of the entry at `index`: its form, and that its parent is a directory that precedes it.
fn check_path(
    entries: &[Entry],
    by_path: &BTreeMap<BytePath, usize>,
    index: usize,
    entry: &Entry,
) -> Result<(), String> {
    if index == 0 {
        return if entry.path.is_empty() {
            Ok(())
        } else {
            Err(format!("{} before its parent", entry.path))
        };
    }
    let bytes = entry.path.as_bytes();
    if !bytes
        .split(|byte| *byte == b'/')
        .all(firn_trust::is_component)
    {
        return Err(format!("the path {}", entry.path));
    }
    match by_path.get(&parent_of(&entry.path)) {
        Some(parent) if entries[*parent].kind == EntryKind::Directory => Ok(()),
        _ => Err(format!("{}, which is in no directory", entry.path)),
    }
}

/// Returns the path of the directory that has an entry; the empty path for entries directly in the top directory.
fn parent_of(path: &BytePath) -> BytePath {
    let parent = path.as_path().parent();
    parent.map_or_else(BytePath::default, BytePath::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &str, kind: EntryKind) -> Entry {
        Entry {
            path: path.into(),
            kind,
            mode: 0o644,
            mtime_s: 0,
            mtime_ns: 0,
            held: None,
        }
    }

    fn file(path: &str) -> Entry {
        let kind = EntryKind::File {
            bytes: 1,
            ending: Ending::Closed,
        };
        entry(path, kind)
    }

    fn dir(path: &str) -> Entry {
        entry(path, EntryKind::Directory)
    }

    fn link(path: &str) -> Entry {
        let target = "/etc".into();
        entry(path, EntryKind::Link { target })
    }

    /// Proves S-agent-7.
    #[test]
    fn no_entry_of_a_plan_leaves_the_copy() {
        let refused = [
            vec![],
            vec![file("a")],
            vec![dir(""), dir("")],
            vec![dir(""), file("..")],
            vec![dir(""), file("/etc/passwd")],
            vec![dir(""), file("a/b")],
            vec![dir(""), dir("a"), file("a/../../b")],
            vec![dir(""), dir("a"), file("a//b")],
            vec![dir(""), link("a"), file("a/passwd")],
            vec![dir(""), file("a"), file("a/b")],
            vec![dir(""), file("a"), link("a")],
            vec![file(""), file("a")],
        ];
        for entries in refused {
            let shown = format!("{entries:?}");
            assert!(Plan::check(entries).is_err(), "{shown}");
        }
        let accepted = vec![
            dir(""),
            link("l"),
            dir("a"),
            file("a/b"),
            file("a/c"),
            file("d"),
        ];
        let plan = Plan::check(accepted).unwrap();
        assert_eq!(plan.files().count(), 3);
        assert!(plan.find(&"a/b".into()).is_some());
        assert!(Plan::check(vec![file("")]).is_ok());
    }
}
