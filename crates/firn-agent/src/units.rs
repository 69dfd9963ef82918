//! Units: the names directly in a directory of another host, each with everything below it.
//!
//! A unit is usually one checkpoint. A *follower*, which keeps copies of the other host's files, copies and removes it
//! as a whole.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;

use firn_format::record::Ending;
use firn_protocol::path::BytePath;

use crate::message::{Entry, EntryKind};

/// A name in a directory, with everything below it.
#[derive(Clone, Debug)]
pub(crate) struct Unit {
    /// The name in the directory.
    pub(crate) name: BytePath,
    /// The file or directory of this name, and everything below it. Paths are relative to this file or directory.
    pub(crate) entries: Vec<Entry>,
}

/// Divides the list of a directory of another host into units: names in the directory, each with everything below it.
/// The newest unit comes first, because a restart needs it most. The list was checked, so its paths are relative.
pub(crate) fn group_by_name(entries: &[Entry]) -> Vec<Unit> {
    let mut by_name: BTreeMap<BytePath, Vec<Entry>> = BTreeMap::new();
    for entry in entries {
        let is_listed_directory = entry.path.is_empty();
        if is_listed_directory {
            continue;
        }
        let name = first_component(&entry.path);
        let path_in_unit = entry.path.as_path().strip_prefix(name.as_path());
        let path_in_unit = path_in_unit.expect("a path begins with its first component");
        by_name.entry(name).or_default().push(Entry {
            path: path_in_unit.into(),
            ..entry.clone()
        });
    }
    let mut units = Vec::with_capacity(by_name.len());
    for (name, entries) in by_name {
        units.push(Unit { name, entries });
    }
    units.sort_by(|a, b| (b.newest_time(), &b.name).cmp(&(a.newest_time(), &a.name)));
    units
}

/// Returns the first component of a path; empty for an empty path.
pub(crate) fn first_component(path: &BytePath) -> BytePath {
    let mut components = Path::new(path.as_path()).components();
    components.next().map_or_else(BytePath::default, |first| {
        BytePath::from(Path::new(first.as_os_str()))
    })
}

impl Unit {
    /// Newest modification time of the entries.
    fn newest_time(&self) -> Option<(i64, u32)> {
        let times = self.entries.iter();
        times.map(|entry| (entry.mtime_s, entry.mtime_ns)).max()
    }

    /// The name in its directory.
    pub(crate) fn file_name(&self) -> &OsStr {
        self.name.as_path().as_os_str()
    }

    /// Whether a file of the unit is open or was cut off.
    pub(crate) fn is_open(&self) -> bool {
        self.entries.iter().any(|entry| match entry.kind {
            EntryKind::File { ending, .. } => ending != Ending::Closed,
            _ => false,
        })
    }

    /// Whether both units have the same files in the same state. Directories are not compared, because files of other
    /// hosts change them.
    pub(crate) fn has_same_files(&self, other: &Self) -> bool {
        self.file_states().eq(other.file_states())
    }

    fn file_states(&self) -> impl Iterator<Item = FileState<'_>> {
        let is_file = |entry: &&Entry| matches!(entry.kind, EntryKind::File { .. });
        self.entries.iter().filter(is_file).map(|entry| FileState {
            path: &entry.path,
            kind: &entry.kind,
            changes: entry.changes(),
            mtime_s: entry.mtime_s,
            mtime_ns: entry.mtime_ns,
        })
    }
}

/// The properties of a file that show a change.
#[derive(PartialEq, Eq)]
struct FileState<'a> {
    path: &'a BytePath,
    kind: &'a EntryKind,
    changes: Option<u64>,
    mtime_s: i64,
    mtime_ns: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, mtime_s: i64, ending: Ending) -> Entry {
        Entry {
            path: path.into(),
            kind: EntryKind::File { bytes: 3, ending },
            mtime_s,
            ..Entry::directory()
        }
    }

    fn dir(path: &str) -> Entry {
        Entry {
            path: path.into(),
            ..Entry::directory()
        }
    }

    #[test]
    fn a_list_is_grouped_by_its_first_names_and_the_newest_comes_first() {
        let entries = [
            Entry::directory(),
            dir("old"),
            file("old/a", 5, Ending::Closed),
            file("single", 9, Ending::Open),
            dir("new"),
            dir("new/sub"),
            file("new/sub/b", 7, Ending::Closed),
        ];
        let units = group_by_name(&entries);
        let names: Vec<_> = units.iter().map(|unit| unit.name.to_string()).collect();
        assert_eq!(names, ["single", "new", "old"]);
        let below = units[1].entries.iter().map(|entry| entry.path.to_string());
        assert_eq!(below.collect::<Vec<_>>(), ["", "sub", "sub/b"]);
        assert!(units[0].is_open());
        assert!(!units[1].is_open());
    }

    #[test]
    fn files_are_the_same_whatever_their_directories_are() {
        let unit = |entries: &[Entry]| Unit {
            name: "step".into(),
            entries: entries.to_vec(),
        };
        let original = unit(&[dir(""), file("a", 5, Ending::Closed)]);
        let with_other_dir = unit(&[dir(""), dir("made"), file("a", 5, Ending::Closed)]);
        assert!(original.has_same_files(&with_other_dir));
        assert!(!original.has_same_files(&unit(&[dir(""), file("a", 6, Ending::Closed)])));
        assert!(!original.has_same_files(&unit(&[dir("")])));
    }
}
