//! What a host publishes before a vote: the bytes and names that its programs used and that its record changes.
//!
//! Objects are known by their inode numbers, which all hosts see. No other host sees what this one has made in its
//! transaction, so that cannot conflict.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;

use crate::conflict::{Accesses, File, Name, Process, Published, Ranges, Used};
use crate::vote::Votes;
use firn_backing::{Backing, Errno};
use firn_hosts::Members;

use crate::change_log::{ChangeLog, Entry, Place};
use crate::staging;

impl<B: Backing> Votes<B> {
    /// The list that a record and the accesses of programs give.
    pub(crate) fn list_accesses(
        &self,
        members: &Members,
        record: &ChangeLog,
        used: &[Used],
    ) -> Result<Published, Errno> {
        let mut list = Published {
            host: members.host.clone(),
            ..Published::default()
        };
        let items: BTreeMap<u64, &Entry> = record
            .entries
            .iter()
            .map(|item| (item.number, item))
            .collect();
        let top_ino = self.tree.top().key.1;
        let ino = |number: u64| match number {
            0 => Some(top_ino),
            number => items
                .get(&number)
                .filter(|item| item.new_at.is_none())
                .map(|item| item.identity.ino),
        };
        let name = |place: &Place| {
            ino(place.0).map(|dir| Name {
                dir,
                name: place.1.clone(),
            })
        };
        let mut names: BTreeSet<Name> = BTreeSet::new();
        let mut files: BTreeMap<u64, (Vec<u8>, BTreeMap<u32, Accesses>)> = BTreeMap::new();
        let is_new: BTreeSet<u64> = items
            .values()
            .filter(|item| item.new_at.is_some())
            .map(|item| item.identity.ino)
            .collect();
        let mut directories = Directories {
            base: &self.home.base,
            known: HashMap::new(),
        };
        for file in used.iter().filter(|file| !is_new.contains(&file.ino)) {
            directories.names_of(&file.path, top_ino, &mut names)?;
            let known = files
                .entry(file.ino)
                .or_insert_with(|| (file.path.clone(), BTreeMap::new()));
            for (pid, accesses) in &file.processes {
                let entry = known.1.entry(*pid).or_default();
                entry.read.extend(&accesses.read);
                entry.written.extend(&accesses.written);
            }
        }
        let is_left = |place: &Place| {
            let mut entries = record.entries.iter();
            entries.any(|entry| entry.before.contains(place))
        };
        for item in &record.entries {
            let path = path_of(item.number, &items);
            for place in &item.after {
                let is_new_dir = item.is_dir && item.new_at.is_some() && !is_left(place);
                match name(place) {
                    // Each host makes it, or finds it.
                    Some(name) if is_new_dir => drop(names.insert(name)),
                    Some(_) => continue,
                    None => {}
                }
                let path = join(&path_of(place.0, &items), &place.1);
                list.made.push((path, is_new_dir));
            }
            let is_merged =
                |place: &&Place| item.is_dir && item.new_at.is_some() && !is_left(place);
            let after = item.after.iter().filter(|place| !is_merged(place));
            for place in item.before.iter().chain(after) {
                list.changed.extend(
                    name(place).map(|name| (name, join(&path_of(place.0, &items), &place.1))),
                );
            }
            if item.new_at.is_some() {
                continue;
            }
            names.extend(item.names_before().filter_map(name));
            if item.redo.changes_attributes {
                list.attributes.push((item.identity.ino, path.clone()));
            }
            if let Some(data) = &item.redo.data {
                let known = files
                    .entry(item.identity.ino)
                    .or_insert_with(|| (path, BTreeMap::new()));
                let mut seen = Ranges::default();
                known
                    .1
                    .values()
                    .for_each(|accesses| seen.extend(&accesses.written));
                // Bytes count also if the process that wrote them is not known, and so do bytes that were cut off.
                let cut = (!data.grows).then_some((data.cut, u64::MAX));
                let written = data.written.iter().map(|range| (range.start, range.end));
                for (start, end) in written.chain(cut) {
                    let (until, inside) = seen.stretch(start);
                    if !inside || until < end {
                        known.1.entry(0).or_default().written.insert(start..end);
                    }
                }
            }
        }
        list.used = names.into_iter().collect();
        let process = |(pid, accesses): (&u32, &Accesses)| {
            Process::new(*pid, &accesses.read, &accesses.written)
        };
        let file = |(ino, (path, processes)): (u64, (Vec<u8>, BTreeMap<u32, Accesses>))| {
            let processes = processes.iter().map(process).collect();
            File {
                ino,
                path,
                processes,
            }
        };
        list.files = files.into_iter().map(file).collect();
        Ok(list)
    }
}

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    if dir.is_empty() {
        name.to_vec()
    } else {
        [dir, b"/", name].concat()
    }
}

/// A path of an object of a record, relative to the backing.
fn path_of(number: u64, items: &BTreeMap<u64, &Entry>) -> Vec<u8> {
    fn below(number: u64, items: &BTreeMap<u64, &Entry>, depth: usize) -> Vec<u8> {
        let item = items.get(&number).filter(|_| number != 0 && depth < 1000);
        let place = item.and_then(|item| {
            item.stays
                .iter()
                .chain(&item.before)
                .chain(&item.after)
                .next()
        });
        place.map_or_else(Vec::new, |(dir, name)| {
            join(&below(*dir, items, depth + 1), name)
        })
    }
    below(number, items, 0)
}

/// Directories of the backing on the way to files that were used.
struct Directories<'a, B: Backing> {
    base: &'a B,
    /// The directory and its inode; `None`: it is not there, so this host has changed its name.
    known: HashMap<Vec<u8>, Option<(B::Inode, u64)>>,
}

impl<B: Backing> Directories<'_, B> {
    fn find(
        &mut self,
        path: &[u8],
        top: u64,
        names: &mut BTreeSet<Name>,
    ) -> Result<Option<(B::Inode, u64)>, Errno> {
        if let Some(found) = self.known.get(path) {
            return Ok(found.clone());
        }
        let found = if path.is_empty() {
            Some((self.base.root(), top))
        } else {
            let (above, name) = split(path);
            match self.find(above, top, names)? {
                None => None,
                Some((dir, ino)) => {
                    names.insert(Name {
                        dir: ino,
                        name: name.to_vec(),
                    });
                    let name = <OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(name);
                    match staging::find(self.base, &dir, name) {
                        Ok(found) => found.map(|(inode, attr)| (inode, attr.ino)),
                        Err(Errno::NOTDIR) => None,
                        Err(errno) => return Err(errno),
                    }
                }
            }
        };
        self.known.insert(path.to_vec(), found.clone());
        Ok(found)
    }

    /// The names that lead to a file.
    fn names_of(&mut self, path: &[u8], top: u64, names: &mut BTreeSet<Name>) -> Result<(), Errno> {
        let (above, name) = split(path);
        if let Some((_, dir)) = self.find(above, top, names)? {
            names.insert(Name {
                dir,
                name: name.to_vec(),
            });
        }
        Ok(())
    }
}

fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b"", path),
    }
}
