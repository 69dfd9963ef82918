//! Undo of a transaction in shadow mode, from the state that was saved before each change.
//!
//! Terms
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

use std::collections::btree_map::Entry as MapEntry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use firn_backing::{Attr, Backing, Errno, Kind, Result, SyncScope};

use super::{KEPT, SAVED, Shadow};
use crate::apply::{Apply, StagingDirs};
use crate::change_log::{ChangeLog, Direction, Entry, EntryName, EntrySide, Identity, Link};
use crate::error::StoreError;
use crate::hidden::OwnLinks;
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

/// A directory that was found, with its inode number.
struct DirRef<'d, B: Backing> {
    ino: u64,
    inode: &'d B::Inode,
}

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
    dirs: HashMap<u64, B::Inode>,
    /// Objects in `kept/`.
    inos_in_kept: HashSet<u64>,
    /// Entries of the log that is being made. The log is applied backward: `after` has names that the undo removes, and
    /// `before` has names that the undo restores.
    entries: BTreeMap<u64, Entry>,
    result: UndoResult,
    /// How to undo a change of the top's name; `None` if the name did not change.
    top_undo: Option<TopUndo<B>>,
}

impl<'a, B: Backing> UndoPass<'a, B> {
    /// Reads the saved state. `root` is the top of the scope; `transaction_dir` names the transaction's
    /// directory in messages.
    pub(crate) fn new(
        base: &'a B,
        shadow: &'a Shadow<B>,
        root: B::Inode,
        top_undo: Option<TopUndo<B>>,
        transaction_dir: &str,
    ) -> std::result::Result<Self, StoreError> {
        let mut saves = load_saved(base, shadow, transaction_dir)?;
        let root_ino = base.attr(&root)?.ino;
        let existing = preexisting_objects(&saves, root_ino);
        saves.retain(|ino, _| existing.contains(ino));
        let mut preexisting: HashSet<u64> = saves
            .values()
            .flat_map(|save| save.names.values().copied())
            .collect();
        preexisting.extend(top_undo.iter().filter_map(TopUndo::old_ino));
        let dirs = saves.values().flat_map(|save| {
            let dir_count = save.path.len().saturating_sub(usize::from(!save.is_dir));
            save.path[..dir_count].iter().map(|(_, ino)| *ino)
        });
        let ancestor_dirs = dirs.collect();
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
            dirs: HashMap::new(),
            inos_in_kept: HashSet::new(),
            entries: BTreeMap::new(),
            result: UndoResult::default(),
            top_undo,
        })
    }

    /// Undoes the changes durably, and returns what happened to the objects. After an error, the caller can
    /// repeat the undo from the start.
    pub(crate) fn run(mut self) -> Result<UndoResult> {
        self.find_dirs()?;
        let log = self.make_log()?;
        let Shadow {
            saved, kept, dev, ..
        } = self.shadow;
        let dirs = StagingDirs {
            new: saved,
            away: kept,
        };
        let mut apply = Apply::new(self.base, *dev, &log, Direction::Undo, &dirs);
        apply.set_staging_dir(SAVED, saved.clone());
        apply.set_staging_dir(KEPT, kept.clone());
        for (ino, inode) in self.dirs {
            apply.set_object(ino, inode);
        }
        apply.run()?;
        // A killed process may have undone a part without a sync. So everything is synced, not only the steps of this
        // attempt.
        if let Some(top) = &self.top_undo {
            self.base.sync_dir(&top.parent)?;
        }
        if self
            .top_undo
            .as_ref()
            .is_none_or(|top| top.before.is_some())
        {
            self.base.sync_scope(SyncScope::Tree(&self.root))?;
        }
        Ok(self.result)
    }

    /// Returns the names in a directory, without `.firn` in the top of the backing.
    fn list_names(&self, ino: u64, inode: &B::Inode) -> Result<Vec<Link>> {
        let listed = staging::list(self.base, inode)?
            .into_iter()
            .map(|(name, ino, _)| (name, ino));
        let is_backing_top = ino == self.backing_top_ino;
        Ok(listed
            .filter(|(name, _)| !(is_backing_top && name == staging::TOP.as_bytes()))
            .collect())
    }

    // ---- search for directories --------------------------------------------------------------

    /// Finds the touched directories and those on the saved paths of saved objects, at their present paths.
    ///
    /// Two searches alternate until neither finds more. One searches each touched or new directory for directories that
    /// moved there. The other follows the saved paths from directories that were found. A touched directory that is not
    /// found is logged as an error, and its changes are not undone.
    fn find_dirs(&mut self) -> Result<()> {
        let mut dirs_to_search = VecDeque::from([(self.shadow.kept.clone(), 0)]);
        self.add_found_dir(self.root_ino, self.root.clone(), &mut dirs_to_search);
        loop {
            while let Some((inode, ino)) = dirs_to_search.pop_front() {
                self.search_dir(&inode, ino, &mut dirs_to_search)?;
            }
            let Some((ino, inode)) = self.find_dir_by_saved_name()? else {
                break;
            };
            self.add_found_dir(ino, inode, &mut dirs_to_search);
        }
        for (ino, save) in &self.saves {
            if save.is_dir && !self.dirs.contains_key(ino) {
                tracing::error!(ino, path = %path_text(&save.path), "cannot find a directory: its changes are not undone");
            }
        }
        Ok(())
    }

    /// Adds a directory that was found. A touched directory is queued for a search, because other directories may have
    /// moved there.
    fn add_found_dir(
        &mut self,
        ino: u64,
        inode: B::Inode,
        dirs_to_search: &mut VecDeque<(B::Inode, u64)>,
    ) {
        if self.dirs.insert(ino, inode.clone()).is_none() && self.saves.contains_key(&ino) {
            dirs_to_search.push_back((inode, ino));
        }
    }

    /// Searches a touched or new directory for directories that are not found yet. New directories in it are queued.
    fn search_dir(
        &mut self,
        inode: &B::Inode,
        ino: u64,
        dirs_to_search: &mut VecDeque<(B::Inode, u64)>,
    ) -> Result<()> {
        self.give_owner_access(inode)?;
        for (name, child) in self.list_names(ino, inode)? {
            let is_new = !self.preexisting.contains(&child);
            let is_missing_ancestor =
                self.ancestor_dirs.contains(&child) && !self.dirs.contains_key(&child);
            if !is_new && !is_missing_ancestor {
                continue;
            }
            let Some((child_inode, attr)) =
                staging::find(self.base, inode, OsStr::from_bytes(&name))?
            else {
                continue;
            };
            if attr.kind != Kind::Dir {
                continue;
            }
            if is_missing_ancestor {
                self.add_found_dir(child, child_inode.clone(), dirs_to_search);
            }
            if is_new && !self.saves.contains_key(&child) {
                dirs_to_search.push_back((child_inode, child));
            }
        }
        Ok(())
    }

    /// Grants the owner all permissions on a directory, because a user other than root needs them to change it. The end
    /// of the undo restores the old mode.
    fn give_owner_access(&self, inode: &B::Inode) -> Result<()> {
        let mode = self.base.attr(inode)?.mode & 0o7777;
        if mode & 0o700 != 0o700 {
            self.base.set_mode(inode, mode | 0o700)?;
        }
        Ok(())
    }

    /// Follows the saved paths, and returns the first directory that was not found before but is still under its saved
    /// name. Returns `None` if the saved paths lead to no further directory.
    fn find_dir_by_saved_name(&self) -> Result<Option<(u64, B::Inode)>> {
        for save in self.saves.values() {
            let mut parent = Some(&self.root);
            for (name, ino) in &save.path {
                if let Some(inode) = self.dirs.get(ino) {
                    parent = Some(inode);
                } else if self.ancestor_dirs.contains(ino) {
                    let found = parent
                        .map(|parent| self.find_at(parent, name, *ino))
                        .transpose()?
                        .flatten();
                    if let Some((inode, _)) = found {
                        return Ok(Some((*ino, inode)));
                    }
                    // The directory has moved, so its saved children cannot be looked up along this path.
                    parent = None;
                }
            }
        }
        Ok(None)
    }

    /// Returns the object with this inode number if the name leads to it.
    fn find_at(&self, dir: &B::Inode, name: &[u8], ino: u64) -> Result<Option<(B::Inode, Attr)>> {
        Ok(staging::find(self.base, dir, OsStr::from_bytes(name))?
            .filter(|(_, attr)| attr.ino == ino))
    }

    // ---- the log -----------------------------------------------------------------------------

    /// Makes the log whose backward application leads from the present tree to the saved one.
    fn make_log(&mut self) -> Result<ChangeLog> {
        self.plan_top()?;
        self.plan_names()?;
        self.note_unchanged_names();
        self.plan_kept_and_missing()?;
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

    /// Plans that the scope's top gets its old name back. If the transaction created the top, plans its removal with
    /// all contents.
    fn plan_top(&mut self) -> Result<()> {
        let Some(top) = &self.top_undo else {
            return Ok(());
        };
        let mut entry = new_entry(top.ino);
        entry.is_dir = true;
        let parent_ino = top.parent_ino;
        for name in &top.names {
            let leads_to_top = self.find_at(&top.parent, name, top.ino)?.is_some();
            if leads_to_top && top.before.as_ref() != Some(name) {
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
        let is_new = top.before.is_none();
        self.dirs.insert(parent_ino, top.parent.clone());
        self.entries.insert(ino, entry);
        if is_new {
            self.result.removed.push(ino);
            self.plan_removal_of_dir(ino, self.root.clone())?;
        }
        Ok(())
    }

    /// Plans the names of touched directories: new names are removed, and missing old names are restored.
    fn plan_names(&mut self) -> Result<()> {
        let touched: Vec<u64> = self
            .saves
            .keys()
            .copied()
            .filter(|ino| self.dirs.contains_key(ino))
            .collect();
        for dir in touched {
            let inode = self.dirs[&dir].clone();
            let mut unchanged_names = BTreeSet::new();
            for (name, child) in self.list_names(dir, &inode)? {
                if self.saves[&dir].names.get(&name) == Some(&child) {
                    unchanged_names.insert(name);
                } else {
                    let dir_ref = DirRef {
                        ino: dir,
                        inode: &inode,
                    };
                    self.plan_removal(&dir_ref, name, child)?;
                }
            }
            let missing_names: Vec<Link> = self.saves[&dir]
                .names
                .iter()
                .filter(|(name, _)| !unchanged_names.contains(*name))
                .map(|(name, child)| (name.clone(), *child))
                .collect();
            for (name, child) in missing_names {
                self.planned_entry(child)
                    .before
                    .push(EntryName::new(dir, name));
            }
        }
        Ok(())
    }

    /// Sets one unchanged name of each object that the log changes, so that the application can find the object.
    ///
    /// Objects without a change get no entry, because a directory may have very many of them.
    fn note_unchanged_names(&mut self) {
        let Self {
            saves,
            entries,
            dirs,
            ..
        } = self;
        for (dir, save) in saves.iter().filter(|(dir, _)| dirs.contains_key(dir)) {
            for (name, child) in &save.names {
                let is_saved = saves.contains_key(child);
                let entry_name = EntryName::new(*dir, name.clone());
                match entries.entry(*child) {
                    MapEntry::Vacant(vacant) if is_saved => {
                        let mut entry = new_entry(*child);
                        entry.unchanged_name = Some(entry_name);
                        vacant.insert(entry);
                    }
                    MapEntry::Occupied(mut occupied)
                        if !occupied.get().before.contains(&entry_name) =>
                    {
                        occupied.get_mut().unchanged_name = Some(entry_name);
                    }
                    _ => {}
                }
            }
        }
    }

    /// Plans the removal of a name that the transaction added. If the name leads to a new directory, its contents are
    /// removed too. A preexisting object loses the name and moves to `kept/`.
    ///
    /// Does nothing if the name no longer leads to `child`: it was changed after the directory was listed.
    fn plan_removal(&mut self, dir: &DirRef<'_, B>, name: Vec<u8>, child: u64) -> Result<()> {
        let found = self.find_at(dir.inode, &name, child)?;
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
            self.plan_removal_of_dir(child, child_inode)?;
        }
        Ok(())
    }

    /// Plans the removal of all names in a directory that is removed itself.
    fn plan_removal_of_dir(&mut self, ino: u64, inode: B::Inode) -> Result<()> {
        self.planned_entry(ino).is_dir = true;
        let dir = DirRef { ino, inode: &inode };
        for (name, child) in self.list_names(ino, &inode)? {
            self.plan_removal(&dir, name, child)?;
        }
        self.dirs.insert(ino, inode);
        Ok(())
    }

    /// Plans the removal of new directories that an earlier attempt moved to `kept/`, and collects the names that are
    /// restored.
    ///
    /// The old names of a preexisting object that no longer exists cannot be restored. They are dropped from the log,
    /// and each one is logged as an error.
    fn plan_kept_and_missing(&mut self) -> Result<()> {
        let mut inos_in_kept = HashSet::new();
        for (name, ino, kind) in staging::list(self.base, &self.shadow.kept)? {
            inos_in_kept.insert(ino);
            if self.preexisting.contains(&ino) || kind.is_some_and(|kind| kind != Kind::Dir) {
                continue;
            }
            let found = staging::find(self.base, &self.shadow.kept, OsStr::from_bytes(&name))?;
            if let Some((inode, attr)) = found
                && attr.kind == Kind::Dir
            {
                self.result.removed.push(ino);
                self.plan_removal_of_dir(ino, inode)?;
            }
        }
        for (ino, entry) in &mut self.entries {
            let exists = entry.unchanged_name.is_some()
                || !entry.after.is_empty()
                || inos_in_kept.contains(ino);
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
        self.inos_in_kept = inos_in_kept;
        Ok(())
    }

    /// Plans the old attributes and bytes of a saved object. Logs an error if a file cannot be found.
    fn plan_contents(&mut self, ino: u64) -> Result<()> {
        let save = &self.saves[&ino];
        let is_dir = save.is_dir;
        let undo_side = save.undo_side.clone();
        let saved_name = self.saved_name(save);
        let is_found = self.dirs.contains_key(&ino) || self.inos_in_kept.contains(&ino);
        let entry = self.planned_entry(ino);
        entry.is_dir = is_dir;
        entry.undo = undo_side;
        if entry.unchanged_name.is_none() && entry.before.is_empty() && entry.after.is_empty() {
            entry.unchanged_name = saved_name;
        }
        if is_dir || is_found || !entry.before.is_empty() || !entry.after.is_empty() {
            return Ok(());
        }
        let found = match entry.unchanged_name.clone() {
            Some(EntryName { dir, name }) => match self.dirs.get(&dir) {
                Some(dir) => self.find_at(dir, &name, ino)?,
                None => None,
            },
            None => None,
        };
        if found.is_none() {
            let path = path_text(&self.saves[&ino].path);
            tracing::error!(ino, %path, "cannot find a file: its changes are not undone");
        }
        Ok(())
    }

    /// Returns the saved name of an object, by which it is found if its directory was not touched. Returns `None` if
    /// that directory was not found.
    fn saved_name(&self, save: &SavedObject) -> Option<EntryName> {
        let (name, _) = save.path.last()?;
        let dir = match save.path.len() {
            1 => self.root_ino,
            len => save.path[len - 2].1,
        };
        self.dirs
            .contains_key(&dir)
            .then(|| EntryName::new(dir, name.clone()))
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

/// Reads the saved state of all objects, from the files `saved/INO.INDEX`.
fn load_saved<B: Backing>(
    base: &B,
    shadow: &Shadow<B>,
    transaction_dir: &str,
) -> std::result::Result<BTreeMap<u64, SavedObject>, StoreError> {
    let mut logs: BTreeMap<(u64, u32), ChangeLog> = BTreeMap::new();
    for (name, ..) in staging::list(base, &shadow.saved)? {
        let Ok(text) = String::from_utf8(name) else {
            continue;
        };
        let number = text
            .split_once('.')
            .and_then(|(ino, index)| Some((ino.parse().ok()?, index.parse().ok()?)));
        let Some(number) = number else { continue };
        let bytes = staging::read_file(base, &shadow.saved, &text)?.unwrap_or_default();
        let path = || format!("{}/{transaction_dir}/{SAVED}/{text}", staging::TOP);
        let log = ChangeLog::decode(&bytes).map_err(|source| StoreError::Record {
            path: path(),
            source,
        })?;
        logs.insert(number, log);
    }
    let mut saves: BTreeMap<u64, SavedObject> = BTreeMap::new();
    for ((ino, log_index), log) in logs {
        for mut entry in log.entries {
            if log_index == FIRST_LOG_INDEX {
                let names = entry.undo.names.take().unwrap_or_default();
                let save = SavedObject {
                    path: entry.path,
                    is_dir: entry.is_dir,
                    undo_side: entry.undo,
                    names: names.into_iter().collect(),
                };
                saves.insert(ino, save);
            } else if let Some(save) = saves.get_mut(&ino)
                && let (Some(data), Some(more)) = (&mut save.undo_side.data, entry.undo.data)
            {
                data.written.extend(more.written);
            }
        }
    }
    Ok(saves)
}

/// Returns the objects that existed before the transaction.
///
/// A saved object may still be new: one host made it, and another host saved it before its own change. In that case the
/// saved names of its directory do not include it. So existence is derived from the top of the scope down:
/// * All saved names in an existing touched directory exist.
/// * An object on a saved path exists if the object before it on the path exists and was not touched.
fn preexisting_objects(saves: &BTreeMap<u64, SavedObject>, root: u64) -> HashSet<u64> {
    let mut existing = HashSet::from([root]);
    // Each round goes down by at least one level, until a round adds nothing.
    loop {
        let mut added: HashSet<u64> = HashSet::new();
        for (ino, save) in saves {
            if existing.contains(ino) {
                added.extend(save.names.values());
            }
            let mut parent = root;
            for (_, ino) in &save.path {
                if existing.contains(&parent) && !saves.contains_key(&parent) {
                    added.insert(*ino);
                }
                parent = *ino;
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
    pub(crate) own_links: Arc<OwnLinks<B>>,
}

impl<B: Backing> ShadowUndo<B> {
    pub(crate) fn new(
        lower: &Arc<LowerBacking<B>>,
        tree: &Arc<Tree<B>>,
        own_links: &Arc<OwnLinks<B>>,
    ) -> Self {
        Self {
            lower: Arc::clone(lower),
            tree: Arc::clone(tree),
            own_links: Arc::clone(own_links),
        }
    }

    /// Undoes the changes of a transaction in the backing, and updates the objects in memory.
    pub(crate) fn undo_shadow(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
    ) -> std::result::Result<(), StoreError> {
        shadow.begin_undo();
        let root = scope.root.inode(&self.lower.base)?;
        let transaction_dir = format!("tx-{}", scope.serial);
        let top = self
            .lower
            .find_top_undo(&scope.dir, &transaction_dir, &shadow.kept)?;
        let undone = UndoPass::new(&self.lower.base, shadow, root, top, &transaction_dir)?.run()?;
        let dirs = std::mem::take(&mut *shadow.dirs.lock());
        let object = |ino: u64| self.tree.known((shadow.dev, ino));
        for ino in undone.moved_to_kept {
            self.own_links.note_link_until_end(
                scope.serial,
                (shadow.dev, ino),
                &shadow.kept,
                ino.to_string(),
            );
        }
        for ino in undone.removed {
            if let Some(object) = object(ino) {
                self.forget_object(&object);
            }
        }
        for RestoredName { ino, dir_ino, name } in undone.restored_names {
            if let (Some(object), Some(dir)) = (
                object(ino),
                dirs.get(&dir_ino).cloned().or_else(|| object(dir_ino)),
            ) {
                object.move_to(&dir, OsStr::from_bytes(&name));
            }
        }
        self.forget_new(shadow);
        Ok(())
    }

    /// Updates the objects in memory after another host has undone the transaction.
    pub(crate) fn update_after_remote_undo(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
    ) -> std::result::Result<(), StoreError> {
        let mut saves = load_saved(&self.lower.base, shadow, &format!("tx-{}", scope.serial))?;
        let existing = preexisting_objects(&saves, scope.root.key.1);
        saves.retain(|ino, _| existing.contains(ino));
        let object = |ino: u64| self.tree.known((shadow.dev, ino));
        for (dir, save) in saves {
            let Some(dir) = object(dir) else { continue };
            for (name, ino) in save.names {
                if let Some(object) = object(ino) {
                    object.move_to(&dir, OsStr::from_bytes(&name));
                }
            }
        }
        shadow.dirs.lock().clear();
        self.forget_new(shadow);
        Ok(())
    }

    /// Forgets the new objects of a transaction. This includes objects without a name, which the undo does not find.
    fn forget_new(&self, shadow: &Shadow<B>) {
        let known = std::mem::take(&mut *shadow.save_states.lock());
        for (ino, known) in known {
            let object = self.tree.known((shadow.dev, ino));
            if let (super::SaveState::New, Some(object)) = (known, object) {
                self.forget_object(&object);
            }
        }
    }

    /// Marks an object in memory as gone from the backing.
    fn forget_object(&self, object: &Object<B>) {
        self.tree.forget(object.key);
        let owned = object.inner.own();
        owned.edit().base = None;
        object.close_lower_files();
    }

    /// Undoes a transaction after a crash, from its stored state alone. Does nothing for a transaction in buffer mode.
    pub(crate) fn undo_stored(
        &self,
        dir: &B::Inode,
        transaction_dir: &str,
        scope: &[u8],
    ) -> std::result::Result<(), StoreError> {
        let Some(shadow) = Shadow::find(&self.lower.base, dir)? else {
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
