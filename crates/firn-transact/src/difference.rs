//! [`Differences`]: makes the change log of a transaction from the tables of its changes in memory.
//!
//! The log is the difference between the tree in the backing (the directory below the mount) and the tree that programs
//! see. It has an *entry* for each object with a change, and for each directory that is needed to find one of these
//! objects. The *scope* of a transaction is the part of the tree that it covers; the *top* is its uppermost directory.
//!
//! Steps ([`LogBuilder`])
//! 1. Each changed object gets an entry with its new bytes and attributes.
//! 2. Each changed name is added to the entries of the objects that it leads to before and after the transaction.
//! 3. The name of the scope's top in its parent is added, if it changes or the top has an entry.
//! 4. Each object of the backing gets a name by which the application of the log can find it.
//! 5. Entries of new objects without a name are dropped.
//!
//! Relies on the caller, which has quiesced the scope: no change is in progress, and none begins meanwhile.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use firn_backing::{Backing, Errno, Kind, SetTime};

use crate::change_log::{
    BACKING_TOP_NUMBER, BytesSource, ChangeLog, DataChange, Entry, EntryName, Identity, StagedPath,
    TopChange, WrittenRange,
};
use crate::history::ANCHOR;
use crate::inline_changes::InlineChanges;
use crate::link_counts::LinkCounts;
use crate::lower_backing::LowerBacking;
use crate::object::{Change, Object, ObjectKey};
use crate::scope::Scope;
use crate::staging;
use crate::tree::Tree;

/// An object that a transaction changes.
struct ChangedObject<B: Backing> {
    /// The object in the backing; `None` if it is new.
    base: Option<B::Inode>,
    /// The change, without the names in it if the object is a directory.
    change: Change<B>,
}

/// Returns the change of an object; `None` if it has none.
fn changed_object<B: Backing>(object: &Object<B>) -> Option<ChangedObject<B>> {
    let claimed = object.state.acquire_shared();
    let state = claimed.read();
    let change = state.change.as_deref()?;
    Some(ChangedObject {
        base: state.base.clone(),
        change: change.clone_without_names(),
    })
}

/// A directory in which a transaction changes names.
struct ChangedDir<B: Backing> {
    /// The directory in the backing; `None` if it is new.
    base: Option<B::Inode>,
    /// The changed names, and the objects that they lead to; `None` if a name leads to nothing any more.
    names: Vec<(OsString, Option<Arc<Object<B>>>)>,
}

/// Returns the names in `dir` that the transaction `scope` changes; `None` if the directory has no change.
fn changed_dir<B: Backing>(scope: &Scope<B>, dir: &Object<B>) -> Option<ChangedDir<B>> {
    let claimed = dir.state.acquire_shared();
    let state = claimed.read();
    let change = state.change.as_deref()?;
    let names = change
        .names
        .iter()
        // Several transactions may cover some names of the directory each, and share its change.
        .filter(|(_, name_change)| name_change.serial == scope.serial)
        .map(|(name, name_change)| (name.clone(), name_change.object.clone()))
        .collect();
    Some(ChangedDir {
        base: state.base.clone(),
        names,
    })
}

/// Makes the change logs of transactions.
pub(crate) struct Differences<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) tree: Arc<Tree<B>>,
    pub(crate) link_counts: Arc<LinkCounts<B>>,
}

impl<B: Backing> Differences<B> {
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

    /// Makes the change log of the transaction `scope` from what is recorded of it in memory. `id` is the number of its
    /// commit. The caller ensures that no program changes anything in the transaction meanwhile.
    ///
    /// Fails with the errno of the backing if the present state of an object cannot be read.
    pub(crate) fn build_change_log(&self, scope: &Scope<B>, id: u64) -> Result<ChangeLog, Errno> {
        let changed: Vec<_> = scope.changed.lock().values().cloned().collect();
        let mut builder = LogBuilder::new(self, scope);
        // First the new data and attributes of all objects.
        for object in &changed {
            builder.add_contents(object)?;
        }
        // Then all changed names. A transaction that covers only some names of a directory records their changes in
        // the directory itself, which `changed` does not contain.
        let shared_dir = scope.names_in_root.as_ref().map(|_| &scope.root);
        for object in changed.iter().chain(shared_dir) {
            if object.kind == Kind::Dir {
                builder.add_names_in(object)?;
            }
        }
        let top = builder.add_top_name();
        // Now that all names are known, each object gets one by which the application of the log finds it.
        for object in &changed {
            if !Arc::ptr_eq(object, &scope.root) {
                builder.make_findable(object)?;
            }
        }
        Ok(ChangeLog {
            id,
            scope: scope.path.clone(),
            top,
            shared: self.lower.members.is_some(),
            entries: builder.into_entries(),
            ..ChangeLog::default()
        })
    }
}

/// Number of names of a directory: its name in its parent, and `.` in itself.
const DIR_LINK_COUNT: i64 = 2;

/// A change log that is being made.
struct LogBuilder<'a, B: Backing> {
    lower: &'a LowerBacking<B>,
    tree: &'a Tree<B>,
    link_counts: &'a LinkCounts<B>,
    scope: &'a Scope<B>,
    /// Number of the entry of each object in the log. An entry has the number of the object's change, or a new number
    /// if the object has no change.
    numbers: HashMap<ObjectKey, u64>,
    /// The entries by their numbers.
    entries: BTreeMap<u64, Entry>,
}

impl<'a, B: Backing> LogBuilder<'a, B> {
    fn new(differences: &'a Differences<B>, scope: &'a Scope<B>) -> Self {
        let backing_top = differences.tree.top().key;
        Self {
            lower: &differences.lower,
            tree: &differences.tree,
            link_counts: &differences.link_counts,
            scope,
            numbers: HashMap::from([(backing_top, BACKING_TOP_NUMBER)]),
            entries: BTreeMap::new(),
        }
    }

    // ---- bytes and attributes ----------------------------------------------------------------

    /// Adds the entry of a changed object to the change log, with its new bytes and attributes. Names are added later.
    /// Does nothing if the object has no change.
    fn add_contents(&mut self, object: &Arc<Object<B>>) -> Result<(), Errno> {
        let Some(ChangedObject { base, change }) = changed_object(object) else {
            return Ok(());
        };
        let number = *self.numbers.entry(object.key).or_insert(change.number);
        let mut entry = Entry::new(number, self.identity_of(object), object.kind == Kind::Dir);
        // If names in a directory changed, its copy in the transaction's directory gets the time of that change.
        self.set_copy_mtime(&change)?;
        match &base {
            None => self.describe_new_object(&mut entry, &change)?,
            Some(inode) => {
                // A program that has a file without a name open can still use what was written to it.
                let is_needed = self.link_count(object, inode, &change)? > 0
                    || number == BACKING_TOP_NUMBER
                    || object.is_open();
                if is_needed {
                    self.describe_changed_object(&mut entry, object, inode, &change)?;
                }
            }
        }
        self.entries.insert(number, entry);
        Ok(())
    }

    /// Gives the staged copy of a directory the time of the last change of names, unless its time is later.
    fn set_copy_mtime(&self, change: &Change<B>) -> Result<(), Errno> {
        let (Some(copy), Some(entries_changed_at)) =
            (&change.staged_copy, change.entries_changed_at)
        else {
            return Ok(());
        };
        let base = &self.lower.base;
        let inode = copy.inode(base)?;
        let mtime = base.attr(&inode)?.mtime.max(entries_changed_at);
        base.set_times(&inode, SetTime::Keep, SetTime::At(mtime))
    }

    /// Describes an object that the transaction made: where it is staged, and the times of a directory.
    fn describe_new_object(&self, entry: &mut Entry, change: &Change<B>) -> Result<(), Errno> {
        entry.new_at = change.staged_copy.as_ref().map(|copy| copy.path.clone());
        if let Some(copy) = &change.staged_copy
            && entry.is_dir
            && !change.is_removed
        {
            let attr = self.lower.base.attr(&copy.inode(&self.lower.base)?)?;
            entry.redo.atime = Some(attr.atime.into());
            entry.redo.mtime = Some(attr.mtime.into());
        }
        Ok(())
    }

    /// Adds the changed bytes, attributes and times of an object to its entry in the change log. The backing has the
    /// object as `inode`. New bytes are in memory (inline) or in the staged copy, a file in the transaction's
    /// directory.
    fn describe_changed_object(
        &self,
        entry: &mut Entry,
        object: &Object<B>,
        inode: &B::Inode,
        change: &Change<B>,
    ) -> Result<(), Errno> {
        entry.redo.copy_at = change.staged_copy.as_ref().map(|copy| copy.path.clone());
        entry.redo.changes_attributes = change.changes_attributes;
        entry.redo.mtime_before = change.original.map(|original| original.mtime.into());
        if entry.is_dir {
            return self.describe_dir_times(entry, inode, change);
        }
        if let Some(inline) = &change.inline {
            describe_inline_changes(entry, inline);
        }
        if let Some(copy) = &change.staged_copy
            && object.kind == Kind::File
        {
            let size = self.lower.base.attr(&copy.inode(&self.lower.base)?)?.size;
            let written = change.written.iter();
            entry.redo.data = Some(DataChange {
                cut: change.cut,
                size,
                written: written
                    .map(|range| WrittenRange::of_copy(range.start, range.end))
                    .collect(),
                // The file was never shorter than before the transaction.
                grows: change
                    .original
                    .is_some_and(|original| change.cut >= original.size),
            });
        }
        Ok(())
    }

    /// Adds the times of a directory in which names have changed to its entry in the change log.
    ///
    /// Does nothing if the directory has a staged copy, which has its changed attributes: it gets the copy's times.
    /// With several hosts the log sets no times, because other hosts may have changed more names there.
    fn describe_dir_times(
        &self,
        entry: &mut Entry,
        inode: &B::Inode,
        change: &Change<B>,
    ) -> Result<(), Errno> {
        if let Some(entries_changed_at) = change.entries_changed_at
            && change.staged_copy.is_none()
            && self.lower.members.is_none()
        {
            let attr = self.lower.base.attr(inode)?;
            entry.redo.atime = Some(attr.atime.into());
            entry.redo.mtime = Some(attr.mtime.max(entries_changed_at).into());
        }
        Ok(())
    }

    /// Returns how many names an object of the backing has after the transaction; 2 for a directory that is not
    /// removed.
    fn link_count(
        &self,
        object: &Object<B>,
        inode: &B::Inode,
        change: &Change<B>,
    ) -> Result<i64, Errno> {
        if change.is_removed {
            return Ok(0);
        }
        let attr = self.link_counts.attr_without_hidden_links(object, inode)?;
        if attr.kind == Kind::Dir {
            return Ok(DIR_LINK_COUNT);
        }
        Ok(i64::from(attr.nlink) + change.link_delta)
    }

    // ---- names -------------------------------------------------------------------------------

    /// Adds each changed name in a directory to the change log: to the entries of the objects that the name leads to
    /// before and after the transaction. A name that leads to the same object again is no change.
    fn add_names_in(&mut self, dir: &Arc<Object<B>>) -> Result<(), Errno> {
        let Some(ChangedDir { base, names }) = changed_dir(self.scope, dir) else {
            return Ok(());
        };
        let dir_number = self.ensure_entry(dir);
        for (name, object_after) in &names {
            // The object that has the name in the backing, which is still as before the transaction.
            let found_before = match &base {
                Some(inode) => staging::find(&self.lower.base, inode, name)?,
                None => None,
            };
            let key_before = found_before.map(|(_, attr)| ObjectKey::from_attr(&attr));
            let key_after = object_after.as_ref().map(|object| object.key);
            if key_before == key_after {
                continue;
            }
            let entry_name = EntryName::new(dir_number, name.as_bytes());
            if let Some(key_before) = key_before
                && let Some(object_before) = self.tree.find_object(key_before)
            {
                self.entry_of(&object_before)
                    .before
                    .push(entry_name.clone());
            }
            if let Some(object_after) = object_after {
                self.entry_of(object_after).after.push(entry_name);
            }
        }
        Ok(())
    }

    /// Adds to the change log that the transaction created or renamed its uppermost directory, the *top*. Returns the
    /// change of the top's name; `None` if the name is the same as before.
    ///
    /// If the name is unchanged and the log has an entry of the top, the name is added too: without it the application
    /// of the log could not find the top.
    fn add_top_name(&mut self) -> Option<TopChange> {
        let names = self.scope.top.names();
        let has_new_name = names.before != names.now;
        let is_new = names.before.is_none();
        let path_after = self.scope.path_now();
        if self.scope.shadow.is_some() {
            // In shadow mode the backing has the new name already, so no entry is needed.
            return has_new_name.then_some(TopChange {
                path_after,
                is_new,
                entry: None,
            });
        }
        // The top of the backing has no parent. A transaction of some names in a directory has no top.
        let parent = self.scope.top.parent()?;
        let root = &self.scope.root;
        let has_entry = self.numbers.contains_key(&root.key);
        if !has_new_name && !has_entry {
            return None;
        }
        let number = self.ensure_entry(root);
        let parent_number = self.ensure_entry(parent);
        let entry_name = |name: OsString| EntryName::new(parent_number, name.into_encoded_bytes());
        let entry = self.entry_of(root);
        if !has_new_name {
            entry.unchanged_name = names.now.map(entry_name);
            return None;
        }
        // `ensure_entry` has set the present name as an unchanged one if it made the entry.
        entry.unchanged_name = None;
        entry.before = names.before.map(entry_name).into_iter().collect();
        entry.after = names.now.map(entry_name).into_iter().collect();
        Some(TopChange {
            path_after,
            is_new,
            entry: Some(number),
        })
    }

    /// Ensures that a changed object of the backing is found when the change log is applied: by its name at its first
    /// change, if it still has that name, or else by a further link in the transaction's directory.
    ///
    /// An object that moves is found by its old name, and needs neither. The caller has added the changed names of all
    /// objects to the log.
    fn make_findable(&mut self, object: &Arc<Object<B>>) -> Result<(), Errno> {
        let number = self.ensure_entry(object);
        let Some(entry) = self.entries.get(&number) else {
            return Ok(());
        };
        let loses_name = !entry.before.is_empty();
        let gets_name = !entry.after.is_empty();
        let must_be_found = entry.is_dir || entry.redo.changes_in_place() || gets_name;
        if !must_be_found || number == BACKING_TOP_NUMBER {
            return Ok(());
        }
        let is_new = entry.new_at.is_some();
        let moves = loses_name && gets_name;
        // A new object is found at its staged path, and a moved one by its old name.
        if is_new || moves {
            return Ok(());
        }
        let Some(ChangedObject { base, change }) = changed_object(object) else {
            return Ok(());
        };
        if let Some((parent, name)) = change.origin
            && !loses_name
            && self.leads_to(&parent, &name, object)?
        {
            let parent_number = self.ensure_entry(&parent);
            let entry = self.entry_of(object);
            entry.unchanged_name = Some(EntryName::new(parent_number, name.as_bytes()));
            return Ok(());
        }
        // No name of the object is known to remain, so the object gets a further link. A directory cannot have one.
        match base {
            Some(inode) if object.kind != Kind::Dir => self.add_anchor(object, &inode, number),
            _ => Ok(()),
        }
    }

    /// Returns whether `name` in `dir` leads to an object in the backing.
    fn leads_to(&self, dir: &Object<B>, name: &OsStr, object: &Object<B>) -> Result<bool, Errno> {
        let Some(dir_inode) = dir.base() else {
            return Ok(false);
        };
        let found = staging::find(&self.lower.base, &dir_inode, name)?;
        Ok(found.is_some_and(|(_, attr)| ObjectKey::from_attr(&attr) == object.key))
    }

    /// Makes a further link (an anchor) to an object in the transaction's directory, by which the object is found when
    /// the change log is applied. Programs do not see the link. Succeeds if an earlier attempt has made it.
    fn add_anchor(
        &mut self,
        object: &Arc<Object<B>>,
        inode: &B::Inode,
        number: u64,
    ) -> Result<(), Errno> {
        let staging_dir = self.scope.plain_staging_dir(&self.lower.base)?;
        let link_name = format!("{ANCHOR}{number}");
        // From now on programs' view of the link count leaves this link out, whether it exists yet or not.
        self.link_counts.record_link_before_creation(
            self.scope,
            object,
            &staging_dir.inode,
            &link_name,
        );
        let linked = self
            .lower
            .base
            .link(inode, &staging_dir.inode, OsStr::new(&link_name));
        match linked {
            Ok(_) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
        self.link_counts
            .record_link_created(self.scope, object, &staging_dir.inode, &link_name);
        self.entry_of(object).anchor_at = Some(StagedPath {
            dir: staging_dir.name,
            name: link_name,
        });
        Ok(())
    }

    // ---- entries -----------------------------------------------------------------------------

    /// Returns how the log identifies an object in the backing.
    fn identity_of(&self, object: &Object<B>) -> Identity {
        Identity {
            ino: object.key.ino,
            elsewhere: object.key.dev != self.lower.device,
        }
    }

    /// Returns the number of an object's entry in the change log. An object without an entry gets one, and so do all
    /// directories above it: an entry names its parent by number, and the application looks for the parent first.
    fn ensure_entry(&mut self, object: &Arc<Object<B>>) -> u64 {
        if let Some(&number) = self.numbers.get(&object.key) {
            return number;
        }
        let number = self.scope.next_number();
        self.numbers.insert(object.key, number);
        let entry = Entry::new(number, self.identity_of(object), object.kind == Kind::Dir);
        self.entries.insert(number, entry);
        let location = object.location.lock().clone();
        if let Some((parent, name)) = location {
            let parent_number = self.ensure_entry(&parent);
            let entry_name = EntryName::new(parent_number, name.as_bytes());
            self.entry_of(object).unchanged_name = Some(entry_name);
        }
        number
    }

    /// Returns the entry of an object, which is added if it is missing.
    fn entry_of(&mut self, object: &Arc<Object<B>>) -> &mut Entry {
        let number = self.ensure_entry(object);
        self.entries
            .get_mut(&number)
            .expect("each object with a number has an entry")
    }

    /// Returns the entries, without those of new objects that have no name.
    fn into_entries(self) -> Vec<Entry> {
        let is_needed = |entry: &Entry| {
            let has_changed_name = !entry.before.is_empty() || !entry.after.is_empty();
            has_changed_name || entry.new_at.is_none()
        };
        self.entries.into_values().filter(is_needed).collect()
    }
}

/// Adds the bytes and the time of inline changes to the entry of a file.
fn describe_inline_changes(entry: &mut Entry, inline: &InlineChanges) {
    let written = inline.overwrites().map(|(start, bytes)| WrittenRange {
        start,
        end: start + bytes.len() as u64,
        source: BytesSource::Inline(bytes.to_vec()),
    });
    entry.redo.mtime = Some(inline.mtime.into());
    entry.redo.data = Some(DataChange {
        // The size of the file does not change.
        cut: inline.size(),
        size: inline.size(),
        written: written.collect(),
        grows: false,
    });
}
