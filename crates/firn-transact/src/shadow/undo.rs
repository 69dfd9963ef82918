//! Undo of a transaction in shadow mode, from the state that was saved before each change.
//!
//! A directory is *touched* if its names were saved, which is so if the transaction may have changed them.
//!
//! 1. Find the touched directories where they are now: by their paths, or in other touched directories. A directory can
//!    only have moved from one touched directory to another.
//! 2. Make a change log. It removes new names from touched directories, gives missing names back, and gives each saved
//!    object its old bytes and attributes. Objects between two names wait in `kept/`.
//! 3. Apply the log backward ([`crate::apply`]).
//!
//! Promise: an undo can be repeated after a crash or an error, because each attempt makes the log anew from what
//! exists.

use std::collections::btree_map::Entry as MapEntry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use firn_backing::{Attr, Backing, Errno, Kind, Result, SyncScope};

use super::{KEPT, SAVED, Shadow};
use crate::apply::Apply;
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
    part: EntrySide,
    /// Old names in a directory, with their inode numbers.
    names: BTreeMap<Vec<u8>, u64>,
}

/// Result of an undo, from which objects in use are updated. All numbers are inode numbers.
#[derive(Debug, Default)]
pub(crate) struct UndoResult {
    /// Objects that were removed.
    removed: Vec<u64>,
    /// Objects that have a name in `kept/`, perhaps besides other names, until the transaction ends.
    kept: Vec<u64>,
    /// Objects that got an old name back.
    placed: Vec<PlacedObject>,
}

/// An object that got an old name back.
#[derive(Debug)]
struct PlacedObject {
    ino: u64,
    /// Inode number of the directory.
    dir: u64,
    name: Vec<u8>,
}

/// One undo in progress. Numbers of objects are inode numbers.
pub(crate) struct UndoPass<'a, B: Backing> {
    base: &'a B,
    shadow: &'a Shadow<B>,
    /// The top of the backing, whose name `.firn/` is skipped.
    top: u64,
    /// The top of the scope.
    root: B::Inode,
    root_ino: u64,
    /// The saved states.
    saves: BTreeMap<u64, SavedObject>,
    /// Objects that were in touched directories before the transaction.
    old: HashSet<u64>,
    /// Directories on the paths to saved objects.
    wanted: HashSet<u64>,
    /// Directories that were found.
    dirs: HashMap<u64, B::Inode>,
    /// Objects in `kept/`.
    kept: HashSet<u64>,
    /// Entries of the log that is being made.
    entries: BTreeMap<u64, Entry>,
    undone: UndoResult,
    /// Undo of a change of the top's name.
    top_undo: Option<TopUndo<B>>,
}

impl<'a, B: Backing> UndoPass<'a, B> {
    /// Reads the saved state. `root` is the top of the scope; `place` names the transaction's directory in messages.
    pub(crate) fn new(
        base: &'a B,
        shadow: &'a Shadow<B>,
        root: B::Inode,
        top_undo: Option<TopUndo<B>>,
        place: &str,
    ) -> std::result::Result<Self, StoreError> {
        let mut saves = load_saved(base, shadow, place)?;
        let root_ino = base.attr(&root)?.ino;
        let existing = objects_before(&saves, root_ino);
        saves.retain(|ino, _| existing.contains(ino));
        let mut old: HashSet<u64> = saves
            .values()
            .flat_map(|save| save.names.values().copied())
            .collect();
        old.extend(top_undo.iter().filter_map(TopUndo::old_ino));
        let dirs = saves.values().flat_map(|save| {
            let above = save.path.len().saturating_sub(usize::from(!save.is_dir));
            save.path[..above].iter().map(|(_, ino)| *ino)
        });
        let wanted = dirs.collect();
        let top = base.attr(&base.root())?.ino;
        Ok(Self {
            base,
            shadow,
            top,
            root,
            root_ino,
            saves,
            old,
            wanted,
            dirs: HashMap::new(),
            kept: HashSet::new(),
            entries: BTreeMap::new(),
            undone: UndoResult::default(),
            top_undo,
        })
    }

    /// Undoes the changes durably, and returns what became of the objects. After an error it can be repeated from the
    /// start.
    pub(crate) fn run(mut self) -> Result<UndoResult> {
        self.find_dirs()?;
        let log = self.make_log()?;
        let Shadow {
            saved, kept, dev, ..
        } = self.shadow;
        let below = (self.base, *dev);
        let mut apply = Apply::new(below, (&log, Direction::Undo), saved, kept);
        apply.set_staging_dir(SAVED, saved.clone());
        apply.set_staging_dir(KEPT, kept.clone());
        for (ino, inode) in self.dirs {
            apply.set_object(ino, inode);
        }
        apply.run()?;
        // A killed process may have undone a part without a sync, so everything is synced and not only this attempt's
        // steps.
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
        Ok(self.undone)
    }

    /// Returns the names in a directory, without `.firn` in the top of the backing.
    fn list_names(&self, ino: u64, inode: &B::Inode) -> Result<Vec<Link>> {
        let listed = staging::list(self.base, inode)?
            .into_iter()
            .map(|(name, ino, _)| (name, ino));
        let is_top = ino == self.top;
        Ok(listed
            .filter(|(name, _)| !(is_top && name == staging::TOP.as_bytes()))
            .collect())
    }

    // ---- finding -----------------------------------------------------------------------------

    /// Finds the touched directories and those on the paths to saved objects. Logs an error for each one that is
    /// missing; its changes are not undone.
    fn find_dirs(&mut self) -> Result<()> {
        let mut todo = VecDeque::from([(self.shadow.kept.clone(), 0)]);
        self.note_found_dir(self.root_ino, self.root.clone(), &mut todo);
        loop {
            while let Some((inode, ino)) = todo.pop_front() {
                self.search_dir(&inode, ino, &mut todo)?;
            }
            let Some((ino, inode)) = self.find_next_dir()? else {
                break;
            };
            self.note_found_dir(ino, inode, &mut todo);
        }
        for (ino, save) in &self.saves {
            if save.is_dir && !self.dirs.contains_key(ino) {
                tracing::error!(ino, path = %shown(&save.path), "a directory is not found and not undone");
            }
        }
        Ok(())
    }

    /// Notes a directory that was found. A touched one is searched next, because other directories may have moved
    /// there.
    fn note_found_dir(&mut self, ino: u64, inode: B::Inode, todo: &mut VecDeque<(B::Inode, u64)>) {
        if self.dirs.insert(ino, inode.clone()).is_none() && self.saves.contains_key(&ino) {
            todo.push_back((inode, ino));
        }
    }

    /// Searches a touched or new directory for the directories that are still missing.
    fn search_dir(
        &mut self,
        inode: &B::Inode,
        ino: u64,
        todo: &mut VecDeque<(B::Inode, u64)>,
    ) -> Result<()> {
        self.give_owner_access(inode)?;
        for (name, child) in self.list_names(ino, inode)? {
            let is_new = !self.old.contains(&child);
            let is_wanted = self.wanted.contains(&child) && !self.dirs.contains_key(&child);
            if !is_new && !is_wanted {
                continue;
            }
            let Some((found, attr)) = staging::find(self.base, inode, OsStr::from_bytes(&name))?
            else {
                continue;
            };
            if attr.kind != Kind::Dir {
                continue;
            }
            if is_wanted {
                self.note_found_dir(child, found.clone(), todo);
            }
            if is_new && !self.saves.contains_key(&child) {
                todo.push_back((found, child));
            }
        }
        Ok(())
    }

    /// Gives the owner all permissions on a directory, which a user other than root needs to change it. The undo sets
    /// the old mode at its end.
    fn give_owner_access(&self, inode: &B::Inode) -> Result<()> {
        let mode = self.base.attr(inode)?.mode & 0o7777;
        if mode & 0o700 != 0o700 {
            self.base.set_mode(inode, mode | 0o700)?;
        }
        Ok(())
    }

    /// Returns a directory on the path to a saved object that was not found before, by its saved name; `None` if there
    /// is no further one.
    fn find_next_dir(&self) -> Result<Option<(u64, B::Inode)>> {
        for save in self.saves.values() {
            let mut above = Some(&self.root);
            for (name, ino) in &save.path {
                if let Some(inode) = self.dirs.get(ino) {
                    above = Some(inode);
                } else if self.wanted.contains(ino) {
                    let found = above
                        .map(|dir| self.find_at(dir, name, *ino))
                        .transpose()?
                        .flatten();
                    if let Some((inode, _)) = found {
                        return Ok(Some((*ino, inode)));
                    }
                    above = None;
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

    /// Makes the log that leads from the present tree back to the saved one.
    fn make_log(&mut self) -> Result<ChangeLog> {
        self.plan_top()?;
        self.plan_names()?;
        self.plan_names_that_stay();
        self.plan_missing()?;
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

    fn entry(&mut self, ino: u64) -> &mut Entry {
        self.entries.entry(ino).or_insert_with(|| new_entry(ino))
    }

    /// Plans that the scope's top gets its old name back. A top that the transaction created is removed with its
    /// contents.
    fn plan_top(&mut self) -> Result<()> {
        let Some(top) = &self.top_undo else {
            return Ok(());
        };
        let mut entry = new_entry(top.ino);
        entry.is_dir = true;
        let dir = top.parent_ino;
        for name in &top.names {
            let is_there = self.find_at(&top.parent, name, top.ino)?.is_some();
            if is_there && top.before.as_ref() != Some(name) {
                entry.after.push((dir, name.clone()));
            }
        }
        if let Some(name) = &top.before {
            match self.find_at(&top.parent, name, top.ino)? {
                Some(_) => entry.unchanged_name = Some((dir, name.clone())),
                None => entry.before.push((dir, name.clone())),
            }
        }
        let ino = top.ino;
        let is_new = top.before.is_none();
        self.dirs.insert(dir, top.parent.clone());
        self.entries.insert(ino, entry);
        if is_new {
            self.undone.removed.push(ino);
            self.plan_removal_of_dir(ino, self.root.clone())?;
        }
        Ok(())
    }

    /// Plans the names of touched directories: new names are removed, and missing old names are given back.
    fn plan_names(&mut self) -> Result<()> {
        let touched: Vec<u64> = self
            .saves
            .keys()
            .copied()
            .filter(|ino| self.dirs.contains_key(ino))
            .collect();
        for dir in touched {
            let inode = self.dirs[&dir].clone();
            let mut right = BTreeSet::new();
            for (name, child) in self.list_names(dir, &inode)? {
                if self.saves[&dir].names.get(&name) == Some(&child) {
                    right.insert(name);
                } else {
                    self.plan_removal((dir, &inode), name, child)?;
                }
            }
            let wrong: Vec<Link> = self.saves[&dir]
                .names
                .iter()
                .filter(|(name, _)| !right.contains(*name))
                .map(|(name, child)| (name.clone(), *child))
                .collect();
            for (name, child) in wrong {
                self.entry(child).before.push((dir, name));
            }
        }
        Ok(())
    }

    /// Notes one unchanged name of each object that the log changes, by which the object is found. Other objects get no
    /// entry, because there may be many.
    fn plan_names_that_stay(&mut self) {
        let Self {
            saves,
            entries,
            dirs,
            ..
        } = self;
        for (dir, save) in saves.iter().filter(|(dir, _)| dirs.contains_key(dir)) {
            for (name, child) in &save.names {
                let is_saved = saves.contains_key(child);
                let place = (*dir, name.clone());
                match entries.entry(*child) {
                    MapEntry::Vacant(vacant) if is_saved => {
                        let mut entry = new_entry(*child);
                        entry.unchanged_name = Some(place);
                        vacant.insert(entry);
                    }
                    MapEntry::Occupied(mut occupied) if !occupied.get().before.contains(&place) => {
                        occupied.get_mut().unchanged_name = Some(place);
                    }
                    _ => {}
                }
            }
        }
    }

    /// Plans the removal of a name. The contents of a new directory are removed too; an old object goes to `kept/`.
    fn plan_removal(
        &mut self,
        (dir, inode): (u64, &B::Inode),
        name: Vec<u8>,
        child: u64,
    ) -> Result<()> {
        let found = staging::find(self.base, inode, OsStr::from_bytes(&name))?;
        let Some((found, attr)) = found.filter(|(_, attr)| attr.ino == child) else {
            return Ok(());
        };
        self.entry(child).after.push((dir, name));
        if self.old.contains(&child) {
            self.undone.kept.push(child);
            return Ok(());
        }
        self.undone.removed.push(child);
        if attr.kind == Kind::Dir {
            self.plan_removal_of_dir(child, found)?;
        }
        Ok(())
    }

    fn plan_removal_of_dir(&mut self, ino: u64, inode: B::Inode) -> Result<()> {
        self.entry(ino).is_dir = true;
        for (name, child) in self.list_names(ino, &inode)? {
            self.plan_removal((ino, &inode), name, child)?;
        }
        self.dirs.insert(ino, inode);
        Ok(())
    }

    /// Plans the removal of new directories that an earlier attempt moved to `kept/`.
    ///
    /// Logs an error for an old object that exists nowhere any more: it cannot be given back.
    fn plan_missing(&mut self) -> Result<()> {
        let mut kept = HashSet::new();
        for (name, ino, kind) in staging::list(self.base, &self.shadow.kept)? {
            kept.insert(ino);
            if self.old.contains(&ino) || kind.is_some_and(|kind| kind != Kind::Dir) {
                continue;
            }
            let found = staging::find(self.base, &self.shadow.kept, OsStr::from_bytes(&name))?;
            if let Some((inode, attr)) = found
                && attr.kind == Kind::Dir
            {
                self.undone.removed.push(ino);
                self.plan_removal_of_dir(ino, inode)?;
            }
        }
        for (ino, entry) in &mut self.entries {
            let is_somewhere =
                entry.unchanged_name.is_some() || !entry.after.is_empty() || kept.contains(ino);
            if !is_somewhere {
                for (_, name) in entry.before.drain(..) {
                    let name = String::from_utf8_lossy(&name);
                    tracing::error!(ino, %name, "an object is gone and not brought back");
                }
            }
            for (dir, name) in &entry.before {
                let (ino, dir) = (*ino, *dir);
                let name = name.clone();
                self.undone.placed.push(PlacedObject { ino, dir, name });
            }
        }
        self.kept = kept;
        Ok(())
    }

    /// Plans the old attributes and bytes of a saved object. Logs an error if a file cannot be found.
    fn plan_contents(&mut self, ino: u64) -> Result<()> {
        let save = &self.saves[&ino];
        let is_dir = save.is_dir;
        let part = save.part.clone();
        let saved_name = self.place(save);
        let is_known = self.dirs.contains_key(&ino) || self.kept.contains(&ino);
        let entry = self.entry(ino);
        entry.is_dir = is_dir;
        entry.undo = part;
        if entry.unchanged_name.is_none() && entry.before.is_empty() && entry.after.is_empty() {
            entry.unchanged_name = saved_name;
        }
        if is_dir || is_known || !entry.before.is_empty() || !entry.after.is_empty() {
            return Ok(());
        }
        let place = entry.unchanged_name.clone();
        let found = match place.as_ref().and_then(|(dir, _)| self.dirs.get(dir)) {
            Some(dir) => self.find_at(dir, &place.as_ref().expect("it has a directory").1, ino)?,
            None => None,
        };
        if found.is_none() {
            let path = shown(&self.saves[&ino].path);
            tracing::error!(ino, %path, "a file is not found and not undone");
        }
        Ok(())
    }

    /// Returns directory and name of a saved object whose directory was not touched.
    fn place(&self, save: &SavedObject) -> Option<EntryName> {
        let (name, _) = save.path.last()?;
        let dir = match save.path.len() {
            1 => self.root_ino,
            len => save.path[len - 2].1,
        };
        self.dirs.contains_key(&dir).then(|| (dir, name.clone()))
    }
}

/// An object in the log: its number is that of its inode, as in `kept/`.
fn new_entry(ino: u64) -> Entry {
    let identity = Identity {
        ino,
        elsewhere: false,
    };
    Entry::new(ino, identity, false)
}

fn load_saved<B: Backing>(
    base: &B,
    shadow: &Shadow<B>,
    place: &str,
) -> std::result::Result<BTreeMap<u64, SavedObject>, StoreError> {
    let mut logs: BTreeMap<(u64, u32), ChangeLog> = BTreeMap::new();
    for (name, ..) in staging::list(base, &shadow.saved)? {
        let Ok(text) = String::from_utf8(name) else {
            continue;
        };
        let number = text
            .split_once('.')
            .and_then(|(ino, k)| Some((ino.parse().ok()?, k.parse().ok()?)));
        let Some(number) = number else { continue };
        let bytes = staging::read_file(base, &shadow.saved, &text)?.unwrap_or_default();
        let path = || format!("{}/{place}/{SAVED}/{text}", staging::TOP);
        let log = ChangeLog::decode(&bytes).map_err(|source| StoreError::Record {
            path: path(),
            source,
        })?;
        logs.insert(number, log);
    }
    let mut saves: BTreeMap<u64, SavedObject> = BTreeMap::new();
    for ((ino, count), log) in logs {
        for mut entry in log.entries {
            if count == 0 {
                let names = entry.undo.names.take().unwrap_or_default();
                let save = SavedObject {
                    path: entry.path,
                    is_dir: entry.is_dir,
                    part: entry.undo,
                    names: names.into_iter().collect(),
                };
                saves.insert(ino, save);
            } else if let Some(save) = saves.get_mut(&ino)
                && let (Some(data), Some(more)) = (&mut save.part.data, entry.undo.data)
            {
                data.written.extend(more.written);
            }
        }
    }
    Ok(saves)
}

/// Objects that were there before the transaction. An object that one host made may have been saved by another host
/// that changed it; it is not in the saved names of the directory that it was found in.
fn objects_before(saves: &BTreeMap<u64, SavedObject>, root: u64) -> HashSet<u64> {
    let mut there = HashSet::from([root]);
    loop {
        let mut more: HashSet<u64> = HashSet::new();
        for (ino, save) in saves {
            if there.contains(ino) {
                more.extend(save.names.values());
            }
            let mut above = root;
            for (_, ino) in &save.path {
                if there.contains(&above) && !saves.contains_key(&above) {
                    more.insert(*ino);
                }
                above = *ino;
            }
        }
        let count = there.len();
        there.extend(more);
        if there.len() == count {
            return there;
        }
    }
}

fn shown(path: &[Link]) -> String {
    let names: Vec<_> = path
        .iter()
        .map(|(name, _)| String::from_utf8_lossy(name))
        .collect();
    names.join("/")
}

/// Puts back what transactions in shadow mode changed.
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

    /// Puts back what a transaction changed in the backing, and updates the objects that are referred to.
    pub(crate) fn undo_shadow(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
    ) -> std::result::Result<(), StoreError> {
        shadow.begin_undo();
        let root = scope.root.inode(&self.lower.base)?;
        let place = format!("tx-{}", scope.serial);
        let top = self.lower.find_top_undo(&scope.dir, &place, &shadow.kept)?;
        let undone = UndoPass::new(&self.lower.base, shadow, root, top, &place)?.run()?;
        let dirs = std::mem::take(&mut *shadow.dirs.lock());
        let object = |ino: u64| self.tree.known((shadow.dev, ino));
        for ino in undone.kept {
            self.own_links.link_goes(
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
        for PlacedObject { ino, dir, name } in undone.placed {
            if let (Some(object), Some(dir)) =
                (object(ino), dirs.get(&dir).cloned().or_else(|| object(dir)))
            {
                object.move_to(&dir, OsStr::from_bytes(&name));
            }
        }
        self.forget_new(shadow);
        Ok(())
    }

    /// Another host has undone the transaction: updates the objects that this one knows.
    pub(crate) fn see_undone(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
    ) -> std::result::Result<(), StoreError> {
        let mut saves = load_saved(&self.lower.base, shadow, &format!("tx-{}", scope.serial))?;
        let existing = objects_before(&saves, scope.root.key.1);
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

    /// Forgets new objects without a name, which the undo found nowhere.
    fn forget_new(&self, shadow: &Shadow<B>) {
        let known = std::mem::take(&mut *shadow.known.lock());
        for (ino, known) in known {
            let object = self.tree.known((shadow.dev, ino));
            if let (super::Known::New, Some(object)) = (known, object) {
                self.forget_object(&object);
            }
        }
    }

    /// The object is gone from the backing.
    fn forget_object(&self, object: &Object<B>) {
        self.tree.forget(object.key);
        let owned = object.inner.own();
        owned.edit().base = None;
        object.close_lower_files();
    }

    /// After a crash: the same for a transaction of which only the stored part is left.
    pub(crate) fn undo_stored(
        &self,
        dir: &B::Inode,
        place: &str,
        scope: &[u8],
    ) -> std::result::Result<(), StoreError> {
        let Some(shadow) = Shadow::find(&self.lower.base, dir)? else {
            return Ok(());
        };
        let top = self.lower.find_top_undo(dir, place, &shadow.kept)?;
        let root = match &top {
            None => self.lower.directory_at(scope)?,
            Some(top) => match &top.root {
                Some(root) => root.clone(),
                // It was never put in its place, or was removed already.
                None if top.before.is_none() => return Ok(()),
                None => return Err(Errno::STALE.into()),
            },
        };
        UndoPass::new(&self.lower.base, &shadow, root, top, place)?.run()?;
        Ok(())
    }
}
