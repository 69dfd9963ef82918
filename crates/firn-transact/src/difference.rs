//! [`Differences`]: makes the change log of a transaction from its tables.
//!
//! The log is the difference between the tree in the backing and the tree that programs see. It has an *entry* for each
//! object with a change, and for each directory that is needed to find one of these objects.
//!
//! Steps ([`LogBuilder`])
//! 1. Each changed object gets an entry with its new bytes and attributes.
//! 2. Each changed name is added to the entries of the objects that it leads to before and after the transaction.
//! 3. The name of the scope's top in its parent is added, if it changes or the top has an entry.
//! 4. Each object of the backing gets a name by which the application of the log can find it.
//! 5. Entries of new objects without a name are dropped.
//!
//! Relies on the caller, which keeps names and data of the scope, so that neither tree changes meanwhile.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use firn_backing::{Backing, Errno, Kind, SetTime};

use crate::change_log::{
    BytesSource, ChangeLog, DataChange, Entry, EntryName, Identity, StagedPath, TopChange,
    WrittenRange,
};
use crate::hidden::OwnLinks;
use crate::history::ANCHOR;
use crate::lower_backing::LowerBacking;
use crate::object::{Change, Key, Object};
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
fn change_of<B: Backing>(object: &Object<B>) -> Option<ChangedObject<B>> {
    let shared = object.inner.share();
    let inner = shared.read();
    let change = inner.change.as_deref().map(Change::clone_without_names)?;
    Some(ChangedObject {
        base: inner.base.clone(),
        change,
    })
}

/// A directory in which a transaction changes names.
struct ChangedDir<B: Backing> {
    /// The directory in the backing; `None` if it is new.
    base: Option<B::Inode>,
    /// The changed names, and the objects that they lead to; `None` if a name leads to nothing any more.
    names: Vec<(OsString, Option<Arc<Object<B>>>)>,
}

/// Returns the names in a directory that the transaction changes; `None` if the directory has no change.
fn changed_names<B: Backing>(scope: &Scope<B>, dir: &Object<B>) -> Option<ChangedDir<B>> {
    let shared = dir.inner.share();
    let inner = shared.read();
    let names = inner.change.as_deref()?.names.iter();
    // Scopes of names share the change of their directory.
    let names = names.filter(|(_, named)| named.serial == scope.serial);
    let names = names.map(|(name, named)| (name.clone(), named.object.clone()));
    Some(ChangedDir {
        base: inner.base.clone(),
        names: names.collect(),
    })
}

/// Makes the change logs of transactions.
pub(crate) struct Differences<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) tree: Arc<Tree<B>>,
    pub(crate) own_links: Arc<OwnLinks<B>>,
}

impl<B: Backing> Differences<B> {
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

    /// Makes the change log of a transaction from its tables. `id` is the number of the commit.
    ///
    /// Fails with the errno of the backing if the present state of an object cannot be read.
    pub(crate) fn make_record(&self, scope: &Scope<B>, id: u64) -> Result<ChangeLog, Errno> {
        let changed: Vec<_> = scope.changed.lock().values().cloned().collect();
        let mut builder = LogBuilder::new(self, scope);
        for object in &changed {
            builder.add_contents(object)?;
        }
        // Scopes of names share one change of their directory, which is in no table of changed objects.
        let shared_dir = scope.names_in_root.as_ref().map(|_| &scope.root);
        for object in changed.iter().chain(shared_dir) {
            if object.kind == Kind::Dir {
                builder.add_names_in(object)?;
            }
        }
        let top = builder.add_top_name();
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

/// Number of the entry of the backing's top, which no transaction moves.
const BACKING_TOP_NUMBER: u64 = 0;

/// A change log that is being made.
struct LogBuilder<'a, B: Backing> {
    lower: &'a LowerBacking<B>,
    tree: &'a Tree<B>,
    own_links: &'a OwnLinks<B>,
    scope: &'a Scope<B>,
    /// Number of the entry of each object in the log. An entry has the number of the object's change, or a new number
    /// if the object has no change.
    numbers: HashMap<Key, u64>,
    /// The entries by their numbers.
    entries: BTreeMap<u64, Entry>,
}

impl<'a, B: Backing> LogBuilder<'a, B> {
    fn new(differences: &'a Differences<B>, scope: &'a Scope<B>) -> Self {
        let backing_top = differences.tree.top().key;
        Self {
            lower: &differences.lower,
            tree: &differences.tree,
            own_links: &differences.own_links,
            scope,
            numbers: HashMap::from([(backing_top, BACKING_TOP_NUMBER)]),
            entries: BTreeMap::new(),
        }
    }

    // ---- bytes and attributes ----------------------------------------------------------------

    /// Adds the entry of a changed object, with its new bytes and attributes. Names are added later.
    fn add_contents(&mut self, object: &Arc<Object<B>>) -> Result<(), Errno> {
        let Some(ChangedObject { base, change }) = change_of(object) else {
            return Ok(());
        };
        let number = *self.numbers.entry(object.key).or_insert(change.number);
        let mut entry = Entry::new(number, self.identity(object), object.kind == Kind::Dir);
        self.set_copy_mtime(&change)?;
        match &base {
            None => self.describe_new_object(&mut entry, &change)?,
            // A program that has a file without a name open can still use what was written to it.
            Some(inode)
                if self.link_count(object, inode, &change)? > 0
                    || number == BACKING_TOP_NUMBER
                    || object.is_open() =>
            {
                self.describe_changed_object(&mut entry, object, inode, &change)?;
            }
            Some(_) => {}
        }
        self.entries.insert(number, entry);
        Ok(())
    }

    /// Gives the staged copy of a directory the time of the last change of names, unless its time is later.
    fn set_copy_mtime(&self, change: &Change<B>) -> Result<(), Errno> {
        let (Some(copy), Some(names_changed_at)) = (&change.copy, change.names_changed_at) else {
            return Ok(());
        };
        let base = &self.lower.base;
        let inode = copy.inode(base)?;
        let mtime = base.attr(&inode)?.mtime.max(names_changed_at);
        base.set_times(&inode, SetTime::Keep, SetTime::At(mtime))
    }

    /// Describes an object that the transaction made: where it is staged, and the times of a directory.
    fn describe_new_object(&self, entry: &mut Entry, change: &Change<B>) -> Result<(), Errno> {
        entry.new_at = change.copy.as_ref().map(|copy| copy.at.clone());
        if let Some(copy) = &change.copy
            && entry.is_dir
            && !change.removed
        {
            let attr = self.lower.base.attr(&copy.inode(&self.lower.base)?)?;
            entry.redo.atime = Some(attr.atime.into());
            entry.redo.mtime = Some(attr.mtime.into());
        }
        Ok(())
    }

    /// Describes the changed bytes, attributes and times of an object that the backing has as `inode`.
    fn describe_changed_object(
        &self,
        entry: &mut Entry,
        object: &Object<B>,
        inode: &B::Inode,
        change: &Change<B>,
    ) -> Result<(), Errno> {
        // If a directory has no staged copy, only names in it have changed, and with them its times. With several hosts
        // the log does not set these times, because other hosts may have changed more names there.
        let changes_only_names = entry.is_dir && change.copy.is_none();
        if let Some(names_changed_at) = change.names_changed_at
            && changes_only_names
            && self.lower.members.is_none()
        {
            let attr = self.lower.base.attr(inode)?;
            entry.redo.atime = Some(attr.atime.into());
            entry.redo.mtime = Some(attr.mtime.max(names_changed_at).into());
        }
        entry.redo.copy_at = change.copy.as_ref().map(|copy| copy.at.clone());
        if let Some(inline) = &change.inline {
            let written = inline.overwrites().map(|(start, piece)| WrittenRange {
                start,
                end: start + piece.len() as u64,
                source: BytesSource::Inline(piece.to_vec()),
            });
            entry.redo.mtime = Some(inline.mtime.into());
            entry.redo.data = Some(DataChange {
                cut: inline.size(),
                size: inline.size(),
                written: written.collect(),
                grows: false,
            });
        }
        entry.redo.changes_attributes = change.attributes;
        entry.redo.mtime_before = change.before.map(|(_, mtime)| mtime.into());
        if let Some(copy) = &change.copy
            && object.kind == Kind::File
        {
            let size = self.lower.base.attr(&copy.inode(&self.lower.base)?)?.size;
            let written = change.written.iter();
            let written = written.map(|range| WrittenRange::of_copy(range.start, range.end));
            let grows = change
                .before
                .is_some_and(|(size_before, _)| change.cut >= size_before);
            entry.redo.data = Some(DataChange {
                cut: change.cut,
                size,
                written: written.collect(),
                grows,
            });
        }
        Ok(())
    }

    /// Returns how many names an object of the backing has after the transaction; 2 for a directory that is not removed.
    fn link_count(
        &self,
        object: &Object<B>,
        inode: &B::Inode,
        change: &Change<B>,
    ) -> Result<i64, Errno> {
        if change.removed {
            return Ok(0);
        }
        let attr = self.own_links.attr_without_own_links(object, inode)?;
        Ok(if attr.kind == Kind::Dir {
            2
        } else {
            i64::from(attr.nlink) + change.links
        })
    }

    // ---- names -------------------------------------------------------------------------------

    /// Adds each changed name in a directory to the entries of the objects that it leads to before and after the
    /// transaction. A name that leads to the same object again is no change.
    fn add_names_in(&mut self, dir: &Arc<Object<B>>) -> Result<(), Errno> {
        let Some(ChangedDir { base, names }) = changed_names(self.scope, dir) else {
            return Ok(());
        };
        let dir_number = self.number_of(dir);
        for (name, object_after) in &names {
            let found = match &base {
                Some(inode) => staging::find(&self.lower.base, inode, name)?,
                None => None,
            };
            let key_before = found.map(|(_, attr)| (attr.dev, attr.ino));
            let key_after = object_after.as_ref().map(|object| object.key);
            if key_before == key_after {
                continue;
            }
            let entry_name = EntryName::new(dir_number, name.as_bytes());
            if let Some(object_before) = key_before.and_then(|key| self.tree.known(key)) {
                let entry = self.entry_of(&object_before);
                entry.before.push(entry_name.clone());
            }
            if let Some(object_after) = object_after {
                self.entry_of(object_after).after.push(entry_name);
            }
        }
        Ok(())
    }

    /// Adds the name of the scope's top in its parent, and returns the change of that name if there is one.
    ///
    /// An unchanged name is added too if the top has an entry, because the application must find the top.
    fn add_top_name(&mut self) -> Option<TopChange> {
        let names = self.scope.top.names();
        let is_changed = names.before != names.now;
        let path_after = self.scope.path_now();
        let change_with = |entry| TopChange {
            path_after,
            is_new: names.before.is_none(),
            entry,
        };
        if self.scope.shadow.is_some() {
            // The backing has the new name already, so no entry is needed.
            return is_changed.then(|| change_with(None));
        }
        let parent = self.scope.top.parent()?;
        let root = &self.scope.root;
        if !is_changed && !self.numbers.contains_key(&root.key) {
            return None;
        }
        let number = self.number_of(root);
        let parent_number = self.number_of(parent);
        let entry_name = |name: OsString| EntryName::new(parent_number, name.into_encoded_bytes());
        let entry = self.entry_of(root);
        if !is_changed {
            entry.unchanged_name = names.now.map(entry_name);
            return None;
        }
        entry.unchanged_name = None;
        entry.before = names.before.clone().map(entry_name).into_iter().collect();
        entry.after = names.now.map(entry_name).into_iter().collect();
        Some(change_with(Some(number)))
    }

    /// Ensures that the application of the log can find a changed object of the backing.
    ///
    /// An object that moves is found by its old name. Any other object is found by its name at its first change, if it
    /// still has that name, or else by a further link in the staging directory.
    fn make_findable(&mut self, object: &Arc<Object<B>>) -> Result<(), Errno> {
        let number = self.number_of(object);
        let Some(entry) = self.entries.get(&number) else {
            return Ok(());
        };
        let loses_name = !entry.before.is_empty();
        let gets_name = !entry.after.is_empty();
        let must_be_found = entry.is_dir || entry.redo.changes_in_place() || gets_name;
        let moves = loses_name && gets_name;
        let is_new = entry.new_at.is_some();
        if number == BACKING_TOP_NUMBER || is_new || !must_be_found || moves {
            return Ok(());
        }
        let Some(ChangedObject { base, change }) = change_of(object) else {
            return Ok(());
        };
        if let Some((parent, name)) = change.origin
            && !loses_name
        {
            let found = parent
                .base()
                .map(|dir| staging::find(&self.lower.base, &dir, &name))
                .transpose()?
                .flatten();
            if found.is_some_and(|(_, attr)| (attr.dev, attr.ino) == object.key) {
                let parent_number = self.number_of(&parent);
                let entry = self.entry_of(object);
                entry.unchanged_name = Some(EntryName::new(parent_number, name.as_bytes()));
                return Ok(());
            }
        }
        // No name of the object is known to remain, so the object gets a further link. A directory cannot have one.
        match base {
            Some(inode) if object.kind != Kind::Dir => self.add_anchor(object, &inode, number),
            _ => Ok(()),
        }
    }

    /// Makes a further link to an object in the staging directory, by which the application finds it. Programs do not
    /// see the link. Succeeds if an earlier attempt has made it.
    fn add_anchor(
        &mut self,
        object: &Arc<Object<B>>,
        inode: &B::Inode,
        number: u64,
    ) -> Result<(), Errno> {
        let staging_dir = self.scope.plain_staging_dir(&self.lower.base)?;
        let link_name = format!("{ANCHOR}{number}");
        self.own_links
            .note_link_before_making(self.scope, object, &staging_dir.inode, &link_name);
        match self
            .lower
            .base
            .link(inode, &staging_dir.inode, OsStr::new(&link_name))
        {
            Ok(_) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
        self.own_links
            .note_link_made(self.scope, object, &staging_dir.inode, &link_name);
        self.entry_of(object).anchor_at = Some(StagedPath {
            dir: staging_dir.name,
            name: link_name,
        });
        Ok(())
    }

    // ---- entries -----------------------------------------------------------------------------

    /// Returns how the log identifies an object in the backing.
    fn identity(&self, object: &Object<B>) -> Identity {
        let (device, ino) = object.key;
        Identity {
            ino,
            elsewhere: device != self.lower.device,
        }
    }

    /// Returns the number of an object's entry. An object without an entry gets one, and so do the directories above it.
    fn number_of(&mut self, object: &Arc<Object<B>>) -> u64 {
        if let Some(&number) = self.numbers.get(&object.key) {
            return number;
        }
        let number = self.scope.next_number();
        self.numbers.insert(object.key, number);
        let entry = Entry::new(number, self.identity(object), object.kind == Kind::Dir);
        self.entries.insert(number, entry);
        let location = object.location.lock().clone();
        if let Some((parent, name)) = location {
            let parent_number = self.number_of(&parent);
            let entry_name = EntryName::new(parent_number, name.as_bytes());
            self.entry_of(object).unchanged_name = Some(entry_name);
        }
        number
    }

    /// Returns the entry of an object, which is added if it is missing.
    fn entry_of(&mut self, object: &Arc<Object<B>>) -> &mut Entry {
        let number = self.number_of(object);
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
