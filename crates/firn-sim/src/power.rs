//! The state of the disk after a power failure.
//!
//! The rules are as weak as those of real file systems. A name change is atomic. Of the unsynced name changes, any
//! subset may survive in which each change has all changes on which it builds. Of unsynced file data, any subset of
//! sectors may survive. Everything that sync, sync_dir and sync_all covered survives.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;

use rand::{RngExt, SeedableRng};

use super::disk::{Disk, Inode, Inodes, NewName, ROOT};
use firn_backing::Kind;

/// A part of the tree that a change of names modifies or relies on.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum NameItem {
    /// A name in a directory, which has this inode number.
    Name(u64, OsString),
    /// The object with this inode number.
    Object(u64),
    /// The set of names in a directory. Before the directory is removed, the set must be empty.
    Contents(u64),
}

/// One atomic change of names.
#[derive(Clone)]
pub(super) struct NameChange {
    names: Vec<ChangedName>,
    /// The objects at the time of the change, without data. A disk on which they are not durable gets these.
    objects: Vec<(u64, Inode)>,
    /// The items that the change modifies.
    modifies: BTreeSet<NameItem>,
    /// The items on which the change relies.
    requires: BTreeSet<NameItem>,
}

/// A name that got an object or was removed.
#[derive(Clone)]
struct ChangedName {
    /// Inode number of the directory.
    dir: u64,
    name: OsString,
    /// Inode number of the object. `None` if the name was removed.
    ino: Option<u64>,
}

impl NameChange {
    /// Makes the record of a change of names, which also removes the names of `replaced_objects`. A power failure may
    /// undo the change, unless it is synced.
    ///
    /// The record says what the change modifies, and what must be durable before it: for example, the directory of a
    /// new name must exist.
    pub(super) fn new(
        inodes: &Inodes,
        new_names: &[NewName<'_>],
        replaced_objects: impl Iterator<Item = u64>,
    ) -> Self {
        let mut change = Self {
            names: Vec::new(),
            objects: Vec::new(),
            modifies: BTreeSet::new(),
            requires: BTreeSet::new(),
        };
        for &NewName { dir, name, ino } in new_names {
            let name = name.to_owned();
            change.modifies.insert(NameItem::Name(dir, name.clone()));
            change.modifies.insert(NameItem::Contents(dir));
            // The directory of the name must exist.
            change.requires.insert(NameItem::Object(dir));
            change.names.push(ChangedName { dir, name, ino });
            if let Some(ino) = ino {
                change.modifies.insert(NameItem::Object(ino));
                let object = inodes.get(&ino).map(without_contents);
                change.objects.extend(object.map(|object| (ino, object)));
            }
        }
        for ino in replaced_objects {
            change.modifies.insert(NameItem::Object(ino));
            // A directory must be empty before it is removed.
            change.requires.insert(NameItem::Contents(ino));
        }
        change
    }

    /// Returns the modified items on which later changes of them depend. Two changes in one directory are independent
    /// of each other, so `Contents` is left out.
    fn ordered_items(&self) -> impl Iterator<Item = &NameItem> {
        self.modifies
            .iter()
            .filter(|item| !matches!(item, NameItem::Contents(_)))
    }

    /// Returns whether the change depends on a change that modified `items`.
    fn depends_on(&self, items: &BTreeSet<NameItem>) -> bool {
        self.ordered_items()
            .chain(&self.requires)
            .any(|item| items.contains(item))
    }

    /// Applies the change to the objects of a disk.
    fn apply(&self, inodes: &mut Inodes) {
        for (ino, object) in &self.objects {
            inodes.entry(*ino).or_insert_with(|| object.clone());
        }
        for ChangedName { dir, name, ino } in &self.names {
            let Some(dir) = inodes.get_mut(dir) else {
                continue;
            };
            match ino {
                // The cookie is set after all changes.
                Some(ino) => drop(dir.entries.insert(name.clone(), (*ino, 0))),
                None => drop(dir.entries.remove(name)),
            }
        }
    }
}

/// Returns a copy of an object without its data and its entries.
fn without_contents(inode: &Inode) -> Inode {
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

    /// Makes the names in a directory durable, and all earlier changes on which these names build. The other changes
    /// stay in the log of unsynced ones.
    pub(super) fn sync_names(&mut self, dir: u64) {
        let mut wanted_items = BTreeSet::from([NameItem::Contents(dir), NameItem::Object(dir)]);
        let mut unsynced_changes = Vec::new();
        let mut durable_changes = Vec::new();
        // From the last change to the first, because a change depends only on earlier ones.
        for change in std::mem::take(&mut self.log).into_iter().rev() {
            if change.modifies.is_disjoint(&wanted_items) {
                unsynced_changes.push(change);
                continue;
            }
            // Earlier changes of the same name or object become durable too, such as the creation before a rename.
            wanted_items.extend(change.ordered_items().cloned());
            wanted_items.extend(change.requires.iter().cloned());
            durable_changes.push(change);
        }
        unsynced_changes.reverse();
        self.log = unsynced_changes;
        for change in durable_changes.iter().rev() {
            change.apply(&mut self.stable);
        }
    }

    /// Makes the attributes of a directory durable, and those of its entries that no fsync(2) reaches: symbolic links
    /// and special files.
    pub(super) fn sync_attributes(&mut self, dir: u64) {
        let Some(dir_inode) = self.inodes.get(&dir) else {
            return;
        };
        let mut synced_objects = vec![dir];
        for (ino, _) in dir_inode.entries.values() {
            let kind = self.inodes.get(ino).map(Inode::kind);
            // `None`: the object does not exist, so nothing is left to sync.
            let has_own_fsync = matches!(kind, None | Some(Kind::File | Kind::Dir));
            if !has_own_fsync {
                synced_objects.push(*ino);
            }
        }
        for ino in synced_objects {
            if let (Some(live), Some(stable)) = (self.inodes.get(&ino), self.stable.get_mut(&ino)) {
                let stable_entries = std::mem::take(&mut stable.entries);
                *stable = live.clone();
                stable.entries = stable_entries;
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
        let mut inodes = self.stable.clone();
        let mut lost_items = BTreeSet::new();
        // An unsynced change of names is lost by chance, or because one on which it builds is lost.
        for change in std::mem::take(&mut self.log) {
            if change.depends_on(&lost_items) || rng.random() {
                lost_items.extend(change.modifies.iter().cloned());
            } else {
                change.apply(&mut inodes);
            }
        }
        // Of unsynced bytes, each sector is lost by chance.
        for (ino, inode) in &mut inodes {
            if let Some(live) = self.inodes.get(ino) {
                inode.data = live.data.torn(&inode.data, &mut rng);
            }
        }
        make_consistent(&mut inodes);
        self.stable = inodes.clone();
        self.inodes = inodes;
    }
}

/// Repairs the inodes after a power failure, when names were lost. Removes each object that has no name any more, and
/// sets the link counts, parents and cookies of the others by the names that survived.
fn make_consistent(inodes: &mut Inodes) {
    let links = count_links(inodes).expect("changes are applied with the objects they name");
    inodes.retain(|ino, _| links.contains_key(ino));
    // Cookies 1 and 2 belong to `.` and `..`.
    let mut cookie = 3;
    let mut parents = Vec::new();
    for (ino, inode) in inodes.iter_mut() {
        inode.nlink = links[ino];
        for (child, entry_cookie) in inode.entries.values_mut() {
            *entry_cookie = cookie;
            cookie += 1;
            parents.push((*child, *ino));
        }
    }
    for (child, parent) in parents {
        if let Some(inode) = inodes.get_mut(&child) {
            inode.parent = parent;
        }
    }
}

/// Returns the link counts of all objects that can be reached from the root. Fails if a name leads to no object, or two
/// names lead to one directory.
pub(super) fn count_links(inodes: &Inodes) -> Result<BTreeMap<u64, u32>, String> {
    let mut links = BTreeMap::from([(ROOT, 2)]);
    let mut unread_dirs = vec![ROOT];
    while let Some(dir) = unread_dirs.pop() {
        for (name, (ino, _)) in &inodes[&dir].entries {
            let Some(child) = inodes.get(ino) else {
                return Err(format!(
                    "directory {dir}: {name:?} leads to no inode ({ino})"
                ));
            };
            if !child.is_dir() {
                *links.entry(*ino).or_insert(0) += 1;
                continue;
            }
            if links.contains_key(ino) {
                return Err(format!(
                    "directory {ino} has two names, one in {dir}: {name:?}"
                ));
            }
            // Its name and its `.`; its `..` is a link of the directory above.
            links.insert(*ino, 2);
            *links.get_mut(&dir).expect("it was reached") += 1;
            unread_dirs.push(*ino);
        }
    }
    Ok(links)
}
