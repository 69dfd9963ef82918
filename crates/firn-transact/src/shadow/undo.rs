//! Undo of a transaction in shadow mode, from the state that was saved before each change.
//!
//! Terms
//! * In *shadow mode* changes go to the backing (the directory below the mount) at once. The *scope* is the directory
//!   that the transaction covers; its uppermost directory is the *top*.
//! * A directory is *touched* if its names were saved. They are saved before the transaction changes any of them.
//! * An object is *preexisting* if it existed before the transaction. All others are *new*.
//! * `kept/` is the directory to which a preexisting object moves when it loses a name. The object's name there is its
//!   inode number, so that an undo can restore the old name.
//!
//! Steps
//! 1. Find the touched directories at their present paths: by their saved paths, or in other touched directories. A
//!    directory can only have moved from one touched directory to another.
//! 2. Make a change log. It removes new names from touched directories, restores missing names, and restores the old
//!    bytes and attributes of each saved object.
//! 3. Apply the log backward ([`crate::apply`]). An object between two names waits in `kept/`.
//!
//! Guarantee: an undo can be repeated after a crash or an error, because each attempt makes the log anew from the
//! present tree.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use firn_backing::{Attr, Backing, Errno, Kind, Result, SyncScope};

use super::{KEPT, SAVED, SaveState, Shadow};
use crate::apply::{Apply, StagingDirs};
use crate::change_log::{ChangeLog, Direction, Entry, EntryName, EntrySide, Identity, Link};
use crate::error::StoreError;
use crate::link_counts::LinkCounts;
use crate::lower_backing::LowerBacking;
use crate::object::Object;
use crate::scope::Scope;
use crate::staging;
use crate::transaction::top::TopUndo;
use crate::tree::Tree;

/// The saved state of one object.
struct SavedObject {
    /// Names and inode numbers from the scope's top, which is not included, down to the object.
    path: Vec<Link>,
    /// Whether the object is a directory.
    is_dir: bool,
    /// Old attributes and old bytes.
    undo_side: EntrySide,
    /// Names in the directory before the transaction, with their inode numbers. Empty for other objects.
    names: BTreeMap<Vec<u8>, u64>,
}

impl SavedObject {
    /// Returns the saved state in the entry of an object's first log.
    fn from_entry(mut entry: Entry) -> Self {
        let names = entry.undo.names.take().unwrap_or_default();
        Self {
            path: entry.path,
            is_dir: entry.is_dir,
            undo_side: entry.undo,
            names: names.into_iter().collect(),
        }
    }

    /// Returns the directories on the saved path, including the object itself if it is a directory.
    fn dirs_on_path(&self) -> impl Iterator<Item = u64> {
        let dir_count = if self.is_dir {
            self.path.len()
        } else {
            self.path.len().saturating_sub(1)
        };
        self.path[..dir_count].iter().map(|(_, ino)| *ino)
    }
}

/// Result of an undo, which updates the objects in memory. All numbers are inode numbers.
#[derive(Debug, Default)]
pub(crate) struct UndoResult {
    /// Objects that were removed.
    removed: Vec<u64>,
    /// Objects that have a name in `kept/`, perhaps besides other names, until the transaction ends.
    moved_to_kept: Vec<u64>,
    /// Old names that objects got back.
    restored_names: Vec<RestoredName>,
}

/// An old name that an object got back.
#[derive(Debug)]
struct RestoredName {
    /// Inode number of the object.
    ino: u64,
    /// Inode number of the directory that has the name.
    dir_ino: u64,
    name: Vec<u8>,
}

/// A directory that was found.
struct FoundDir<B: Backing> {
    /// Inode number.
    ino: u64,
    inode: B::Inode,
}

/// Stands for the inode number of `kept/`, which no saved object has.
const KEPT_DIR_INO: u64 = 0;

/// One undo in progress. Numbers of objects are inode numbers.
pub(crate) struct UndoPass<'a, B: Backing> {
    base: &'a B,
    shadow: &'a Shadow<B>,
    /// Inode number of the backing's top. A list of the names in the top leaves out `.firn`.
    backing_top_ino: u64,
    /// The top of the scope.
    root: B::Inode,
    root_ino: u64,
    /// The saved states, by inode number.
    saves: BTreeMap<u64, SavedObject>,
    /// Objects that were in touched directories before the transaction.
    preexisting: HashSet<u64>,
    /// Directories on the saved paths of saved objects.
    ancestor_dirs: HashSet<u64>,
    /// Directories that were found at their present paths.
    found_dirs: HashMap<u64, B::Inode>,
    /// Objects in `kept/`.
    inos_in_kept: HashSet<u64>,
    /// Entries of the log that is being made. The log is applied backward: `after` has names that the undo removes,
    /// and `before` has names that the undo restores.
    entries: BTreeMap<u64, Entry>,
    result: UndoResult,
    /// How to undo a change of the top's name; `None` if the name did not change.
    top_undo: Option<TopUndo<B>>,
}

impl<'a, B: Backing> UndoPass<'a, B> {
    /// Starts an undo: reads the old state that a transaction in shadow mode (its changes are made at once) saved
    /// before its changes. Nothing is changed before [`Self::run`].
    ///
    /// `shadow` has the directories with the saved state, and `root` is the directory that the transaction covers.
    /// `top_undo` says how to restore the name of `root`; `None` if the name did not change. `transaction_dir` names
    /// the transaction's directory in messages.
    pub(crate) fn new(
        base: &'a B,
        shadow: &'a Shadow<B>,
        root: B::Inode,
        top_undo: Option<TopUndo<B>>,
        transaction_dir: &str,
    ) -> std::result::Result<Self, StoreError> {
        let mut saves = load_saved(base, shadow, transaction_dir)?;
        let root_ino = base.attr(&root)?.ino;
        // An object that did not exist before the transaction is removed, so its saved state is not needed.
        let preexisting_saved = preexisting_objects(&saves, root_ino);
        saves.retain(|ino, _| preexisting_saved.contains(ino));
        // Any object with a saved name existed before the transaction, even if nothing else was saved of it.
        let mut preexisting: HashSet<u64> = saves
            .values()
            .flat_map(|save| save.names.values().copied())
            .collect();
        preexisting.extend(top_undo.iter().filter_map(TopUndo::old_ino));
        let ancestor_dirs = saves.values().flat_map(SavedObject::dirs_on_path).collect();
        let backing_top_ino = base.attr(&base.root())?.ino;
        Ok(Self {
            base,
            shadow,
            backing_top_ino,
            root,
            root_ino,
            saves,
            preexisting,
            ancestor_dirs,
            found_dirs: HashMap::new(),
            inos_in_kept: HashSet::new(),
            entries: BTreeMap::new(),
            result: UndoResult::default(),
            top_undo,
        })
    }

    /// Undoes the changes of the transaction durably, and returns what happened to the objects. After an error, the
    /// caller can repeat the undo from the start, with a new [`UndoPass`].
    pub(crate) fn run(mut self) -> Result<UndoResult> {
        self.find_dirs()?;
        let log = self.make_log()?;
        // `saved` is the directory with the old bytes, `kept` the one with removed objects, `dev` their device number.
        let Shadow {
            saved, kept, dev, ..
        } = self.shadow;
        let staging_dirs = StagingDirs {
            new: saved,
            away: kept,
        };
        let mut apply = Apply::new(self.base, *dev, &log, Direction::Undo, &staging_dirs);
        apply.set_staging_dir(SAVED, saved.clone());
        apply.set_staging_dir(KEPT, kept.clone());
        for (ino, inode) in self.found_dirs {
            apply.set_object(ino, inode);
        }
        apply.run()?;
        // A killed process may have undone a part without a sync. So everything is synced, not only the steps of this
        // attempt.
        let is_root_removed = match &self.top_undo {
            Some(top) => {
                self.base.sync_dir(&top.parent)?;
                top.before.is_none()
            }
            None => false,
        };
        if !is_root_removed {
            self.base.sync_scope(SyncScope::Tree(&self.root))?;
        }
        Ok(self.result)
    }

    /// Returns the names in a directory, without `.firn` in the top of the backing.
    fn list_names(&self, ino: u64, inode: &B::Inode) -> Result<Vec<Link>> {
        let is_backing_top = ino == self.backing_top_ino;
        let mut names = Vec::new();
        for (name, child, _) in staging::list(self.base, inode)? {
            let is_private_dir = is_backing_top && name == staging::FIRN_DIR.as_bytes();
            if !is_private_dir {
                names.push((name, child));
            }
        }
        Ok(names)
    }

    // ---- search for directories --------------------------------------------------------------

    /// Finds the directories that the undo needs, wherever they are now. These are the *touched* ones, in which the
    /// transaction changed names, and those on the saved paths of other saved objects.
    ///
    /// Two searches alternate until neither finds more:
    /// * one searches each touched or new directory for directories that moved there, first in `kept/`, the directory
    ///   of removed objects;
    /// * the other follows the saved paths from directories that were found.
    ///
    /// A touched directory that is not found is logged as an error, and its changes are not undone.
    fn find_dirs(&mut self) -> Result<()> {
        let kept_dir = FoundDir {
            ino: KEPT_DIR_INO,
            inode: self.shadow.kept.clone(),
        };
        let root = FoundDir {
            ino: self.root_ino,
            inode: self.root.clone(),
        };
        let mut dirs_to_search = VecDeque::from([kept_dir]);
        self.add_found_dir(root, &mut dirs_to_search);
        loop {
            while let Some(dir) = dirs_to_search.pop_front() {
                self.search_dir(&dir, &mut dirs_to_search)?;
            }
            let Some(dir) = self.find_dir_by_saved_name()? else {
                break;
            };
            self.add_found_dir(dir, &mut dirs_to_search);
        }
        for (ino, save) in &self.saves {
            if save.is_dir && !self.found_dirs.contains_key(ino) {
                tracing::error!(ino, path = %path_text(&save.path), "cannot find a directory: its changes are not undone");
            }
        }
        Ok(())
    }

    /// Adds a directory that was found. A touched directory is queued for a search, because other directories may have
    /// moved there.
    fn add_found_dir(&mut self, dir: FoundDir<B>, dirs_to_search: &mut VecDeque<FoundDir<B>>) {
        let is_first = self.found_dirs.insert(dir.ino, dir.inode.clone()).is_none();
        let is_touched = self.saves.contains_key(&dir.ino);
        if is_first && is_touched {
            dirs_to_search.push_back(dir);
        }
    }

    /// Searches the names in `dir` for directories to which an old directory may have moved, or which the undo needs.
    ///
    /// * A directory on a saved path (`ancestor_dirs`) that was not found yet is added to the found ones.
    /// * A directory that the transaction made is queued in `dirs_to_search`, because old ones may be in it.
    ///
    /// `dir` becomes writable for its owner; the end of the undo restores its mode.
    fn search_dir(
        &mut self,
        dir: &FoundDir<B>,
        dirs_to_search: &mut VecDeque<FoundDir<B>>,
    ) -> Result<()> {
        self.grant_owner_access(&dir.inode)?;
        for (name, ino) in self.list_names(dir.ino, &dir.inode)? {
            let is_new = !self.preexisting.contains(&ino);
            let is_missing_ancestor =
                self.ancestor_dirs.contains(&ino) && !self.found_dirs.contains_key(&ino);
            let is_wanted = is_new || is_missing_ancestor;
            if !is_wanted {
                continue;
            }
            let found = staging::find(self.base, &dir.inode, OsStr::from_bytes(&name))?;
            // `None`: the name was removed after the directory was listed.
            let Some((inode, attr)) = found else {
                continue;
            };
            if attr.kind != Kind::Dir {
                continue;
            }
            if is_missing_ancestor {
                let inode = inode.clone();
                self.add_found_dir(FoundDir { ino, inode }, dirs_to_search);
            }
            if is_new && !self.saves.contains_key(&ino) {
                dirs_to_search.push_back(FoundDir { ino, inode });
            }
        }
        Ok(())
    }

    /// Grants the owner all permissions on a directory, because a user other than root needs them to change it. The end
    /// of the undo restores the old mode.
    fn grant_owner_access(&self, inode: &B::Inode) -> Result<()> {
        let mode = self.base.attr(inode)?.mode & 0o7777;
        if mode & libc::S_IRWXU != libc::S_IRWXU {
            self.base.set_mode(inode, mode | libc::S_IRWXU)?;
        }
        Ok(())
    }

    /// Finds one more directory by the saved paths, which objects had before their first change. Returns the first
    /// directory that was not found before and is still under its saved name; `None` if there is no further one.
    ///
    /// The caller adds the result to `found_dirs` and calls again, because more names can then be followed.
    fn find_dir_by_saved_name(&self) -> Result<Option<FoundDir<B>>> {
        for save in self.saves.values() {
            if let Some(dir) = self.find_dir_on_path(save)? {
                return Ok(Some(dir));
            }
        }
        Ok(None)
    }

    /// Follows the saved path of an object, from the top of the scope. Returns the first directory on it that was not
    /// found before and is still under its saved name; `None` if there is none.
    fn find_dir_on_path(&self, save: &SavedObject) -> Result<Option<FoundDir<B>>> {
        // The directory of the next name; `None` if it was not found.
        let mut parent = Some(&self.root);
        for (name, ino) in &save.path {
            if let Some(inode) = self.found_dirs.get(ino) {
                parent = Some(inode);
                continue;
            }
            // The last name of a path may lead to an object that is not a directory.
            if !self.ancestor_dirs.contains(ino) {
                continue;
            }
            if let Some(parent) = parent
                && let Some((inode, _)) = self.find_at(parent, name, *ino)?
            {
                return Ok(Some(FoundDir { ino: *ino, inode }));
            }
            // This directory is not under its saved name. A directory further down may have been found elsewhere.
            parent = None;
        }
        Ok(None)
    }

    /// Returns the object with this inode number if the name leads to it.
    fn find_at(&self, dir: &B::Inode, name: &[u8], ino: u64) -> Result<Option<(B::Inode, Attr)>> {
        Ok(staging::find(self.base, dir, OsStr::from_bytes(name))?
            .filter(|(_, attr)| attr.ino == ino))
    }

    // ---- the log -----------------------------------------------------------------------------

    /// Makes a change log that leads from the present tree to the saved one if it is applied backward. The caller has
    /// found the directories ([`Self::find_dirs`]).
    ///
    /// The plans come in this order because each one uses what those before it found.
    fn make_log(&mut self) -> Result<ChangeLog> {
        self.plan_top()?;
        self.plan_names()?;
        self.record_unchanged_names();
        self.scan_kept()?;
        self.collect_restored_names();
        let saved: Vec<u64> = self.saves.keys().copied().collect();
        for ino in saved {
            self.plan_contents(ino)?;
        }
        Ok(ChangeLog {
            can_be_undone: true,
            entries: std::mem::take(&mut self.entries).into_values().collect(),
            ..ChangeLog::default()
        })
    }

    /// Returns the entry of an object in the log, which is added if it is missing.
    fn planned_entry(&mut self, ino: u64) -> &mut Entry {
        self.entries.entry(ino).or_insert_with(|| new_entry(ino))
    }

    /// Plans that the top, the directory that the transaction covers, gets its old name back. If the transaction
    /// created the top, plans its removal with all contents. Does nothing if the top kept its name (`top_undo`).
    ///
    /// A plan is an entry of the log, which is applied backward: the undo removes the names in `entry.after`, and
    /// restores the names in `entry.before`.
    fn plan_top(&mut self) -> Result<()> {
        let Some(top) = &self.top_undo else {
            return Ok(());
        };
        let mut entry = new_entry(top.ino);
        entry.is_dir = true;
        let parent_ino = top.parent_ino;
        // The top may have any of `names` now, so each one is looked up.
        for name in &top.names {
            let leads_to_top = self.find_at(&top.parent, name, top.ino)?.is_some();
            let is_old_name = top.before.as_ref() == Some(name);
            if leads_to_top && !is_old_name {
                entry.after.push(EntryName::new(parent_ino, name.clone()));
            }
        }
        if let Some(name) = &top.before {
            let entry_name = EntryName::new(parent_ino, name.clone());
            match self.find_at(&top.parent, name, top.ino)? {
                Some(_) => entry.unchanged_name = Some(entry_name),
                None => entry.before.push(entry_name),
            }
        }
        let ino = top.ino;
        let was_created = top.before.is_none();
        // The application of the log needs the parent, which is above the scope and not found by a search.
        self.found_dirs.insert(parent_ino, top.parent.clone());
        self.entries.insert(ino, entry);
        if was_created {
            self.result.removed.push(ino);
            let inode = self.root.clone();
            self.plan_removal_of_dir(FoundDir { ino, inode })?;
        }
        Ok(())
    }

    /// Plans the names of touched directories: new names are removed, and missing old names are restored.
    fn plan_names(&mut self) -> Result<()> {
        let touched_dirs: Vec<u64> = self
            .saves
            .keys()
            .copied()
            .filter(|ino| self.found_dirs.contains_key(ino))
            .collect();
        for ino in touched_dirs {
            let inode = self.found_dirs[&ino].clone();
            self.plan_names_in(&FoundDir { ino, inode })?;
        }
        Ok(())
    }

    /// Plans that a directory gets exactly its old names, which `self.saves` has with their inode numbers. Names that
    /// the transaction added are removed, and missing names are restored.
    ///
    /// To plan a restored name is to add it to the names `before` of the object's entry in the log.
    fn plan_names_in(&mut self, dir: &FoundDir<B>) -> Result<()> {
        let mut unchanged_names = BTreeSet::new();
        for (name, child) in self.list_names(dir.ino, &dir.inode)? {
            if self.saves[&dir.ino].names.get(&name) == Some(&child) {
                unchanged_names.insert(name);
            } else {
                self.plan_removal(dir, name, child)?;
            }
        }
        let missing_names: Vec<Link> = self.saves[&dir.ino]
            .names
            .iter()
            .filter(|(name, _)| !unchanged_names.contains(*name))
            .map(|(name, child)| (name.clone(), *child))
            .collect();
        for (name, child) in missing_names {
            self.planned_entry(child)
                .before
                .push(EntryName::new(dir.ino, name));
        }
        Ok(())
    }

    /// Records one unchanged name of each object in the change log, by which the application of the log finds the
    /// object. The names are those that were saved of directories (`self.saves`).
    ///
    /// Objects without a saved state or planned change get no entry, because a directory may have very many of them.
    fn record_unchanged_names(&mut self) {
        for (dir, save) in &self.saves {
            // In a directory that was not found, no object can be found either.
            if !self.found_dirs.contains_key(dir) {
                continue;
            }
            for (name, child) in &save.names {
                let needs_entry =
                    self.saves.contains_key(child) || self.entries.contains_key(child);
                if !needs_entry {
                    continue;
                }
                let entry = self
                    .entries
                    .entry(*child)
                    .or_insert_with(|| new_entry(*child));
                let entry_name = EntryName::new(*dir, name.clone());
                // A name that the undo restores does not lead to the object yet.
                let is_restored = entry.before.contains(&entry_name);
                if !is_restored {
                    entry.unchanged_name = Some(entry_name);
                }
            }
        }
    }

    /// Plans the removal of a name that the transaction added. If the name leads to a new directory, its contents are
    /// removed too. An object from before the transaction loses the name and moves to `kept/`, the directory of removed
    /// objects, until it gets its old name.
    ///
    /// `child` is the inode number that `name` had in the listing of `dir`. Does nothing if the name no longer leads
    /// there.
    fn plan_removal(&mut self, dir: &FoundDir<B>, name: Vec<u8>, child: u64) -> Result<()> {
        let found = self.find_at(&dir.inode, &name, child)?;
        let Some((child_inode, attr)) = found else {
            return Ok(());
        };
        self.planned_entry(child)
            .after
            .push(EntryName::new(dir.ino, name));
        if self.preexisting.contains(&child) {
            self.result.moved_to_kept.push(child);
            return Ok(());
        }
        self.result.removed.push(child);
        if attr.kind == Kind::Dir {
            self.plan_removal_of_dir(FoundDir {
                ino: child,
                inode: child_inode,
            })?;
        }
        Ok(())
    }

    /// Plans the removal of all names in a directory that is removed itself.
    fn plan_removal_of_dir(&mut self, dir: FoundDir<B>) -> Result<()> {
        self.planned_entry(dir.ino).is_dir = true;
        for (name, child) in self.list_names(dir.ino, &dir.inode)? {
            self.plan_removal(&dir, name, child)?;
        }
        self.found_dirs.insert(dir.ino, dir.inode);
        Ok(())
    }

    /// Reads `kept/`, the directory of removed objects. Collects the inode numbers of all objects there in
    /// `inos_in_kept`. Plans the removal of new directories, which an earlier attempt of the undo moved there.
    fn scan_kept(&mut self) -> Result<()> {
        for (name, ino, kind) in staging::list(self.base, &self.shadow.kept)? {
            self.inos_in_kept.insert(ino);
            if self.preexisting.contains(&ino) || kind.is_some_and(|kind| kind != Kind::Dir) {
                continue;
            }
            let found = staging::find(self.base, &self.shadow.kept, OsStr::from_bytes(&name))?;
            if let Some((inode, attr)) = found
                && attr.kind == Kind::Dir
            {
                self.result.removed.push(ino);
                self.plan_removal_of_dir(FoundDir { ino, inode })?;
            }
        }
        Ok(())
    }

    /// Collects the names that the undo restores, which are the names `before` in the entries of its change log.
    ///
    /// If an object from before the transaction no longer exists, its names cannot be restored. They are dropped from
    /// the log, and each one is reported as an error. An object in `kept/` was removed by the transaction and exists.
    fn collect_restored_names(&mut self) {
        for (ino, entry) in &mut self.entries {
            let exists = entry.unchanged_name.is_some()
                || !entry.after.is_empty()
                || self.inos_in_kept.contains(ino);
            if !exists {
                for entry_name in entry.before.drain(..) {
                    let name = String::from_utf8_lossy(&entry_name.name);
                    tracing::error!(ino, %name, "an object no longer exists: its name is not restored");
                }
            }
            for EntryName { dir, name } in &entry.before {
                self.result.restored_names.push(RestoredName {
                    ino: *ino,
                    dir_ino: *dir,
                    name: name.clone(),
                });
            }
        }
    }

    /// Adds to the change log that a saved object gets its old attributes and bytes back. `ino` is the inode number of
    /// an object in `self.saves`. The caller has planned the names of all objects.
    ///
    /// The application of the log finds an object by a name. A file without any name that leads to it cannot be
    /// restored; an error is then logged, and the undo continues.
    fn plan_contents(&mut self, ino: u64) -> Result<()> {
        let save = &self.saves[&ino];
        let is_dir = save.is_dir;
        let undo_side = save.undo_side.clone();
        let saved_name = self.saved_name(save);
        let is_found = self.found_dirs.contains_key(&ino) || self.inos_in_kept.contains(&ino);
        let entry = self.planned_entry(ino);
        entry.is_dir = is_dir;
        entry.undo = undo_side;
        let changes_names = !entry.before.is_empty() || !entry.after.is_empty();
        if entry.unchanged_name.is_none() && !changes_names {
            entry.unchanged_name = saved_name;
        }
        // The undo removes or restores a name of the object, so the application finds the object by that name.
        let is_findable = is_found || changes_names;
        // `find_dirs` has reported missing directories.
        if is_dir || is_findable {
            return Ok(());
        }
        // Only the unchanged name is left to find the file by.
        let unchanged_name = entry.unchanged_name.clone();
        if !self.is_at_name(unchanged_name.as_ref(), ino)? {
            let path = path_text(&self.saves[&ino].path);
            tracing::error!(ino, %path, "cannot find a file: its changes are not undone");
        }
        Ok(())
    }

    /// Returns whether the name leads to the object with this inode number.
    fn is_at_name(&self, entry_name: Option<&EntryName>, ino: u64) -> Result<bool> {
        let Some(EntryName { dir, name }) = entry_name else {
            return Ok(false);
        };
        let Some(dir_inode) = self.found_dirs.get(dir) else {
            return Ok(false);
        };
        Ok(self.find_at(dir_inode, name, ino)?.is_some())
    }

    /// Returns the saved name of an object, by which it is found if its directory was not touched. Returns `None` if
    /// that directory was not found.
    fn saved_name(&self, save: &SavedObject) -> Option<EntryName> {
        let ((name, _), path_of_dir) = save.path.split_last()?;
        let dir = path_of_dir.last().map_or(self.root_ino, |(_, ino)| *ino);
        if !self.found_dirs.contains_key(&dir) {
            return None;
        }
        Some(EntryName::new(dir, name.clone()))
    }
}

/// Returns an entry without changes. Its object number is the inode number, because `kept/` names objects so.
fn new_entry(ino: u64) -> Entry {
    let identity = Identity {
        ino,
        elsewhere: false,
    };
    Entry::new(ino, identity, false)
}

/// Index of the log of an object that has its attributes, its size and the names in it. The logs after it add bytes.
const FIRST_LOG_INDEX: u32 = 0;

/// Reads the old state of all objects that a transaction in shadow mode saved, by inode number.
///
/// Each file `saved/INO.INDEX` is a change log with one entry. Log 0 of an object has its attributes and names; further
/// logs have more bytes of a file. Other files in `saved/` are skipped.
fn load_saved<B: Backing>(
    base: &B,
    shadow: &Shadow<B>,
    transaction_dir: &str,
) -> std::result::Result<BTreeMap<u64, SavedObject>, StoreError> {
    let mut logs: BTreeMap<(u64, u32), ChangeLog> = BTreeMap::new();
    for (name, ..) in staging::list(base, &shadow.saved)? {
        let Ok(name) = String::from_utf8(name) else {
            continue;
        };
        let Some(ino_and_index) = parse_log_name(&name) else {
            continue;
        };
        let bytes = staging::read_file(base, &shadow.saved, &name)?.unwrap_or_default();
        let log = ChangeLog::decode(&bytes).map_err(|source| StoreError::Record {
            path: format!("{}/{transaction_dir}/{SAVED}/{name}", staging::FIRN_DIR),
            source,
        })?;
        logs.insert(ino_and_index, log);
    }
    let mut saves: BTreeMap<u64, SavedObject> = BTreeMap::new();
    for ((ino, log_index), log) in logs {
        for entry in log.entries {
            if log_index == FIRST_LOG_INDEX {
                saves.insert(ino, SavedObject::from_entry(entry));
            } else if let Some(save) = saves.get_mut(&ino)
                && let (Some(data), Some(more_data)) = (&mut save.undo_side.data, entry.undo.data)
            {
                data.written.extend(more_data.written);
            }
        }
    }
    Ok(saves)
}

/// Returns the inode number and the index in the name of a log, `INO.INDEX`; `None` for the name of any other file.
fn parse_log_name(name: &str) -> Option<(u64, u32)> {
    let (ino, index) = name.split_once('.')?;
    Some((ino.parse().ok()?, index.parse().ok()?))
}

/// Returns the inode numbers of the objects that existed before the transaction, out of those that `saves` mentions.
/// `root_ino` is the top of the scope, the directory that the transaction covers. A directory is *touched* if its names
/// were saved.
///
/// A saved object may still be new: one host made it, and another host saved it before its own change. In that case the
/// saved names of its directory do not include it. So existence is derived from the top of the scope down:
/// * All saved names in an existing touched directory exist.
/// * An object on a saved path exists if the object before it on the path exists and was not touched.
fn preexisting_objects(saves: &BTreeMap<u64, SavedObject>, root_ino: u64) -> HashSet<u64> {
    let mut existing = HashSet::from([root_ino]);
    // Each round goes down by at least one level, until a round adds nothing.
    loop {
        let mut added: HashSet<u64> = HashSet::new();
        for (ino, save) in saves {
            if existing.contains(ino) {
                added.extend(save.names.values());
            }
            let mut parent_ino = root_ino;
            for (_, ino) in &save.path {
                let is_parent_touched = saves.contains_key(&parent_ino);
                if existing.contains(&parent_ino) && !is_parent_touched {
                    added.insert(*ino);
                }
                parent_ino = *ino;
            }
        }
        let count_before = existing.len();
        existing.extend(added);
        if existing.len() == count_before {
            return existing;
        }
    }
}

/// Returns a path for a message.
fn path_text(path: &[Link]) -> String {
    let names: Vec<_> = path
        .iter()
        .map(|(name, _)| String::from_utf8_lossy(name))
        .collect();
    names.join("/")
}

/// Undoes transactions in shadow mode.
pub(crate) struct ShadowUndo<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) tree: Arc<Tree<B>>,
    pub(crate) link_counts: Arc<LinkCounts<B>>,
}

impl<B: Backing> ShadowUndo<B> {
    pub(crate) fn new(
        lower: &Arc<LowerBacking<B>>,
        tree: &Arc<Tree<B>>,
        link_counts: &Arc<LinkCounts<B>>,
    ) -> Self {
        Self {
            lower: Arc::clone(lower),
            tree: Arc::clone(tree),
            link_counts: Arc::clone(link_counts),
        }
    }

    /// Restores in the backing the tree from before a transaction that made its changes there at once (shadow mode).
    /// Then updates the objects in memory.
    ///
    /// `shadow` is the saved old state. The caller ensures that no program changes anything in the transaction
    /// meanwhile.
    pub(crate) fn undo_shadow(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
    ) -> std::result::Result<(), StoreError> {
        // From here on the transaction can only be aborted, even if this undo fails.
        shadow.begin_undo();
        let root = scope.root.inode(&self.lower.base)?;
        let transaction_dir = format!("tx-{}", scope.serial);
        let top = self
            .lower
            .find_top_undo(&scope.dir, &transaction_dir, &shadow.kept)?;
        let result = UndoPass::new(&self.lower.base, shadow, root, top, &transaction_dir)?.run()?;
        self.update_objects(scope, shadow, result);
        Ok(())
    }

    /// Updates the objects in memory after an undo with this result, so that programs see the old tree.
    fn update_objects(&self, scope: &Scope<B>, shadow: &Shadow<B>, result: UndoResult) {
        let saved_dirs = std::mem::take(&mut *shadow.saved_dirs.lock());
        let find_object = |ino: u64| self.tree.find_object(shadow.object_key(ino));
        // A name in `kept/` stays until the end of the transaction, and programs must not see it in `st_nlink`.
        for ino in result.moved_to_kept {
            self.link_counts.record_link_until_end(
                scope.serial,
                shadow.object_key(ino),
                &shadow.kept,
                ino.to_string(),
            );
        }
        for ino in result.removed {
            if let Some(object) = find_object(ino) {
                self.forget_object(&object);
            }
        }
        for RestoredName { ino, dir_ino, name } in result.restored_names {
            let dir = match saved_dirs.get(&dir_ino) {
                Some(dir) => Some(Arc::clone(dir)),
                None => find_object(dir_ino),
            };
            if let Some(dir) = dir
                && let Some(object) = find_object(ino)
            {
                object.move_to(&dir, OsStr::from_bytes(&name));
            }
        }
        self.forget_new_objects(shadow);
    }

    /// Updates the objects in memory after another host has undone a transaction that several hosts shared.
    ///
    /// `shadow` is the old state that the hosts saved. Each object gets its location from before the transaction.
    pub(crate) fn update_after_remote_undo(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
    ) -> std::result::Result<(), StoreError> {
        let mut saves = load_saved(&self.lower.base, shadow, &format!("tx-{}", scope.serial))?;
        // Objects that the transaction made were removed by the undo.
        let existed_before = preexisting_objects(&saves, scope.root.key.ino);
        saves.retain(|ino, _| existed_before.contains(ino));
        let find_object = |ino: u64| self.tree.find_object(shadow.object_key(ino));
        for (dir_ino, save) in saves {
            let Some(dir) = find_object(dir_ino) else {
                continue;
            };
            for (name, ino) in save.names {
                if let Some(object) = find_object(ino) {
                    object.move_to(&dir, OsStr::from_bytes(&name));
                }
            }
        }
        shadow.saved_dirs.lock().clear();
        self.forget_new_objects(shadow);
        Ok(())
    }

    /// Forgets the new objects of a transaction. This includes objects without a name, which the undo does not find.
    fn forget_new_objects(&self, shadow: &Shadow<B>) {
        let save_states = std::mem::take(&mut *shadow.save_states.lock());
        for (ino, save_state) in save_states {
            if matches!(save_state, SaveState::New)
                && let Some(object) = self.tree.find_object(shadow.object_key(ino))
            {
                self.forget_object(&object);
            }
        }
    }

    /// Removes an object that is gone from the backing from the table, and closes its files.
    fn forget_object(&self, object: &Object<B>) {
        self.tree.remove(object.key);
        let claimed = object.state.acquire_exclusive();
        claimed.edit().base = None;
        object.close_lower_files();
    }

    /// After a crash, gives the backing the tree from before a transaction, from the old state that is stored in the
    /// transaction's directory `dir`. Does nothing if there is no old state, because the transaction kept its changes
    /// back until the commit.
    ///
    /// `transaction_dir` is the name of `dir`, and `scope` the path of the directory that the transaction covers.
    pub(crate) fn undo_stored(
        &self,
        dir: &B::Inode,
        transaction_dir: &str,
        scope: &[u8],
    ) -> std::result::Result<(), StoreError> {
        let Some(shadow) = Shadow::find_in_dir(&self.lower.base, dir)? else {
            return Ok(());
        };
        let top = self
            .lower
            .find_top_undo(dir, transaction_dir, &shadow.kept)?;
        let root = match &top {
            None => self.lower.directory_at(scope)?,
            Some(top) => match &top.root {
                Some(root) => root.clone(),
                // The new top was never moved to its final name, or was removed already.
                None if top.before.is_none() => return Ok(()),
                None => return Err(Errno::STALE.into()),
            },
        };
        UndoPass::new(&self.lower.base, &shadow, root, top, transaction_dir)?.run()?;
        Ok(())
    }
}
