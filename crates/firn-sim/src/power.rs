//! The state of the disk after a power failure.
//!
//! The rules are as weak as those of real file systems. A name change is atomic. Of the unsynced name changes, any
//! subset may survive in which each change has all changes on which it builds. Of unsynced file data, any subset of
//! sectors may survive. Everything that sync, sync_dir and sync_all covered survives.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};

use rand::{RngExt, SeedableRng};

use super::disk::{Disk, Inode, Inodes, ROOT};
use firn_backing::Kind;

/// An item that a change of names modifies or relies on.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Name(u64, OsString),
    Object(u64),
    /// The set of names in a directory. Before the directory is removed, the set must be empty.
    Contents(u64),
}

/// One atomic change of names.
#[derive(Clone)]
pub(super) struct NameChange {
    names: Vec<(u64, OsString, Option<u64>)>,
    /// The objects at the time of the change, without data. A disk on which they are not durable gets these.
    objects: Vec<(u64, Inode)>,
    touches: BTreeSet<Key>,
    needs: BTreeSet<Key>,
}

impl NameChange {
    pub(super) fn new(
        inodes: &Inodes,
        names: &[(u64, &OsStr, Option<u64>)],
        replaced: impl Iterator<Item = u64>,
    ) -> Self {
        let mut touches = BTreeSet::new();
        let mut needs = BTreeSet::new();
        let mut objects = Vec::new();
        for &(dir, name, ino) in names {
            touches.insert(Key::Name(dir, name.to_owned()));
            touches.insert(Key::Contents(dir));
            needs.insert(Key::Object(dir));
            if let Some(ino) = ino {
                touches.insert(Key::Object(ino));
                objects.extend(inodes.get(&ino).map(|inode| (ino, blank(inode))));
            }
        }
        for ino in replaced {
            touches.insert(Key::Object(ino));
            needs.insert(Key::Contents(ino));
        }
        Self {
            names: names
                .iter()
                .map(|&(d, n, i)| (d, n.to_owned(), i))
                .collect(),
            objects,
            touches,
            needs,
        }
    }

    /// Whether the change builds on a change that touched `keys`. Two changes in one directory are independent of each
    /// other, so the change builds on `Contents` only if it needs this key.
    fn builds_on(&self, keys: &BTreeSet<Key>) -> bool {
        let touched = self
            .touches
            .iter()
            .filter(|k| !matches!(k, Key::Contents(_)));
        touched.chain(&self.needs).any(|k| keys.contains(k))
    }

    fn apply(&self, inodes: &mut Inodes) {
        for (ino, object) in &self.objects {
            inodes.entry(*ino).or_insert_with(|| object.clone());
        }
        for (dir, name, ino) in &self.names {
            let Some(dir) = inodes.get_mut(dir) else {
                continue;
            };
            match ino {
                Some(ino) => drop(dir.entries.insert(name.clone(), (*ino, 0))),
                None => drop(dir.entries.remove(name)),
            }
        }
    }
}

fn blank(inode: &Inode) -> Inode {
    let mut blank = inode.clone();
    blank.data = Default::default();
    blank.entries.clear();
    blank
}

impl Disk {
    /// Makes the data and attributes of one file durable, but not its name.
    pub(super) fn sync_file(&mut self, ino: u64) {
        if let Some(inode) = self.inodes.get(&ino) {
            self.stable.insert(ino, inode.clone());
        }
    }

    /// Makes the names in a directory durable, and all earlier changes on which these names build.
    pub(super) fn sync_names(&mut self, dir: u64) {
        let mut wanted = BTreeSet::from([Key::Contents(dir), Key::Object(dir)]);
        let mut kept = Vec::new();
        let mut durable = Vec::new();
        for change in std::mem::take(&mut self.log).into_iter().rev() {
            if change.touches.iter().any(|k| wanted.contains(k)) {
                wanted.extend(
                    change
                        .touches
                        .iter()
                        .filter(|k| !matches!(k, Key::Contents(_)))
                        .cloned(),
                );
                wanted.extend(change.needs.iter().cloned());
                durable.push(change);
            } else {
                kept.push(change);
            }
        }
        kept.reverse();
        self.log = kept;
        for change in durable.iter().rev() {
            change.apply(&mut self.stable);
        }
    }

    /// Makes the attributes of a directory durable, and those of its entries that cannot be synced themselves, such as
    /// links.
    pub(super) fn sync_attributes(&mut self, dir: u64) {
        let Some(live) = self.inodes.get(&dir) else {
            return;
        };
        let others = live.entries.values().map(|entry| entry.0).filter(|ino| {
            let kind = self.inodes.get(ino).map(Inode::kind);
            kind.is_some_and(|kind| !matches!(kind, Kind::File | Kind::Dir))
        });
        for ino in others.chain([dir]).collect::<Vec<_>>() {
            if let (Some(live), Some(stable)) = (self.inodes.get(&ino), self.stable.get_mut(&ino)) {
                let entries = std::mem::take(&mut stable.entries);
                *stable = live.clone();
                stable.entries = entries;
            }
        }
    }

    /// Makes everything durable.
    pub(super) fn sync_all(&mut self) {
        self.stable = self.inodes.clone();
        self.log.clear();
    }

    /// Simulates a power failure: the disk gets one of its possible states, chosen by `seed`.
    pub fn power_loss(&mut self, seed: u64) {
        let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
        let mut after = self.stable.clone();
        let mut lost = BTreeSet::new();
        for change in std::mem::take(&mut self.log) {
            if change.builds_on(&lost) || rng.random() {
                lost.extend(change.touches.iter().cloned());
            } else {
                change.apply(&mut after);
            }
        }
        for (ino, inode) in &mut after {
            if let Some(live) = self.inodes.get(ino) {
                inode.data = live.data.torn(&inode.data, &mut rng);
            }
        }
        settle(&mut after);
        self.stable = after.clone();
        self.inodes = after;
    }
}

/// Makes the rest of the inodes consistent with the names: link counts, parents and cookies. Removes the objects
/// without a name.
fn settle(inodes: &mut Inodes) {
    let links = count_links(inodes).expect("changes are applied with the objects they name");
    inodes.retain(|ino, _| links.contains_key(ino));
    let mut cookie = 3;
    let mut parents = Vec::new();
    for (ino, inode) in inodes.iter_mut() {
        inode.nlink = links[ino];
        for (child, place) in inode.entries.values_mut() {
            (*place, cookie) = (cookie, cookie + 1);
            parents.push((*child, *ino));
        }
    }
    for (child, parent) in parents {
        if let Some(inode) = inodes.get_mut(&child) {
            inode.parent = parent;
        }
    }
}

/// Returns the link counts of all objects that can be reached from the root.
pub(super) fn count_links(inodes: &Inodes) -> Result<BTreeMap<u64, u32>, String> {
    let mut links = BTreeMap::from([(ROOT, 2)]);
    let mut todo = vec![ROOT];
    while let Some(dir) = todo.pop() {
        for (name, (ino, _)) in &inodes[&dir].entries {
            let Some(child) = inodes.get(ino) else {
                return Err(format!(
                    "directory {dir}: {name:?} leads to no inode ({ino})"
                ));
            };
            let first = !links.contains_key(ino);
            if child.is_dir() {
                if !first {
                    return Err(format!(
                        "directory {ino} has two names, one in {dir}: {name:?}"
                    ));
                }
                links.insert(*ino, 2);
                *links.get_mut(&dir).expect("it was reached") += 1;
                todo.push(*ino);
            } else {
                *links.entry(*ino).or_insert(0) += 1;
            }
        }
    }
    Ok(links)
}
