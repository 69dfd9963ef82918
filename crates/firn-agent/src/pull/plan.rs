//! What is to be pulled: the agent's list, looked at before anything is made of it.
//!
//! Invariants
//! * The first entry is what was asked for. Every other one is below a directory that came before it, by names of one
//!   component each. So nothing that a plan makes leaves its top, not even through a link of the plan.
//! * No path comes twice.

use std::collections::BTreeMap;

use firn_format::record::Ending;
use firn_protocol::path::BytePath;

use crate::message::{Entry, EntryKind};

/// Bytes of the largest file that any file system takes.
const FILE_BYTES_MAX: u64 = i64::MAX as u64;

/// A checked list.
#[derive(Debug)]
pub(crate) struct Plan {
    entries: Vec<Entry>,
    by_path: BTreeMap<BytePath, usize>,
    /// Entries directly in each directory, without what cannot be pulled.
    counts: BTreeMap<BytePath, usize>,
}

impl Plan {
    /// Of what an agent sent; an error says what cannot be.
    pub(crate) fn check(entries: Vec<Entry>) -> Result<Self, String> {
        let mut by_path = BTreeMap::new();
        let mut counts = BTreeMap::new();
        for (index, entry) in entries.iter().enumerate() {
            check_place(&entries, &by_path, index, entry)?;
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

    /// All of it, parents first.
    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// All entries, parents first, by value.
    pub(crate) fn into_entries(self) -> Vec<Entry> {
        self.entries
    }

    /// The entry at a path.
    pub(crate) fn find(&self, path: &BytePath) -> Option<&Entry> {
        self.by_path.get(path).map(|index| &self.entries[*index])
    }

    /// How many files, directories and links are directly in a directory of it.
    pub(crate) fn count_in(&self, dir: &BytePath) -> usize {
        self.counts.get(dir).copied().unwrap_or(0)
    }

    /// Its regular files and the bytes that each is said to have.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&Entry, u64, Ending)> {
        self.entries.iter().filter_map(|entry| match entry.kind {
            EntryKind::File { bytes, ending } => Some((entry, bytes, ending)),
            _ => None,
        })
    }

    /// What cannot be pulled: pipes, sockets and devices.
    pub(crate) fn left_out(&self) -> Vec<BytePath> {
        let others = self.entries.iter();
        others
            .filter(|entry| entry.kind == EntryKind::Other)
            .map(|entry| entry.path.clone())
            .collect()
    }
}

fn check_place(
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
    fn nothing_of_a_plan_leaves_its_top() {
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
        let taken = vec![
            dir(""),
            link("l"),
            dir("a"),
            file("a/b"),
            file("a/c"),
            file("d"),
        ];
        let plan = Plan::check(taken).unwrap();
        assert_eq!(plan.files().count(), 3);
        assert!(plan.find(&"a/b".into()).is_some());
        assert!(Plan::check(vec![file("")]).is_ok());
    }
}
