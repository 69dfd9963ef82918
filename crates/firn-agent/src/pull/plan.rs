//! The plan of a *pull*, which copies a tree from another host: the list of files and directories that the *agent* on
//! that host has sent, checked before anything is created from it.
//!
//! A list comes from another host, so its paths could lead out of the copy. [`Plan::from_entries`] refuses such a list
//! as a whole. Everything that a pull creates comes from a checked plan.
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
    index_by_path: BTreeMap<BytePath, usize>,
    /// Number of entries directly in each directory, without pipes, sockets and devices.
    count_by_dir: BTreeMap<BytePath, usize>,
}

/// A regular file of a plan.
pub(crate) struct PlannedFile<'a> {
    pub(crate) entry: &'a Entry,
    /// Size of the file when it was listed.
    pub(crate) bytes: u64,
    /// Whether the writers of the file have closed it.
    pub(crate) ending: Ending,
}

impl Plan {
    /// Makes a plan from the list of files that the agent on another host has sent. Nothing is created from an
    /// unchecked list, because its paths could lead out of the copy.
    ///
    /// The error names the first entry that no correct agent would send, such as one before its parent directory. It
    /// completes the sentence of [`PullError::Implausible`](crate::error::PullError::Implausible).
    pub(crate) fn from_entries(entries: Vec<Entry>) -> Result<Self, String> {
        let Some(top) = entries.first() else {
            return Err("nothing".into());
        };
        if !top.path.is_empty() {
            return Err(format!("{} before its parent", top.path));
        }
        let mut index_by_path = BTreeMap::new();
        let mut count_by_dir = BTreeMap::new();
        for (index, entry) in entries.iter().enumerate() {
            let is_top = index == 0;
            if !is_top {
                check_path(entry, &entries, &index_by_path)?;
            }
            if let EntryKind::File { bytes, .. } = entry.kind
                && bytes > FILE_BYTES_MAX
            {
                return Err(format!("{} has {bytes} bytes", entry.path));
            }
            if index_by_path.insert(entry.path.clone(), index).is_some() {
                return Err(format!("{} twice", entry.path));
            }
            // The entries of each directory are counted, because the finished copy must have as many names there.
            // Pipes, sockets and devices (`Other`) are not copied, so they do not count.
            if !is_top && entry.kind != EntryKind::Other {
                *count_by_dir.entry(parent_of(&entry.path)).or_default() += 1;
            }
        }
        Ok(Self {
            entries,
            index_by_path,
            count_by_dir,
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
        let index = self.index_by_path.get(path)?;
        Some(&self.entries[*index])
    }

    /// Returns how many files, directories and links the plan has directly in a directory.
    pub(crate) fn count_in(&self, dir: &BytePath) -> usize {
        self.count_by_dir.get(dir).copied().unwrap_or(0)
    }

    /// Returns the regular files.
    pub(crate) fn files(&self) -> impl Iterator<Item = PlannedFile<'_>> {
        self.entries.iter().filter_map(|entry| match entry.kind {
            EntryKind::File { bytes, ending } => Some(PlannedFile {
                entry,
                bytes,
                ending,
            }),
            _ => None,
        })
    }

    /// Returns the paths of pipes, sockets and devices, which are not pulled.
    pub(crate) fn left_out(&self) -> Vec<BytePath> {
        self.entries
            .iter()
            .filter(|entry| entry.kind == EntryKind::Other)
            .map(|entry| entry.path.clone())
            .collect()
    }
}

/// Checks the path of an entry: its form, and that its parent is a directory that precedes it. `index_by_path` has the
/// entries that precede it.
fn check_path(
    entry: &Entry,
    entries: &[Entry],
    index_by_path: &BTreeMap<BytePath, usize>,
) -> Result<(), String> {
    let mut components = entry.path.as_bytes().split(|byte| *byte == b'/');
    if !components.all(firn_trust::is_component) {
        return Err(format!("the path {}", entry.path));
    }
    match index_by_path.get(&parent_of(&entry.path)) {
        Some(parent_index) if entries[*parent_index].kind == EntryKind::Directory => Ok(()),
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
            assert!(Plan::from_entries(entries).is_err(), "{shown}");
        }
        let accepted = vec![
            dir(""),
            link("l"),
            dir("a"),
            file("a/b"),
            file("a/c"),
            file("d"),
        ];
        let plan = Plan::from_entries(accepted).unwrap();
        assert_eq!(plan.files().count(), 3);
        assert!(plan.find(&"a/b".into()).is_some());
        assert!(Plan::from_entries(vec![file("")]).is_ok());
    }
}
