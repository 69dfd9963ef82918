//! [`Differences`]: makes the change log of a transaction from its tables.
//!
//! The log is the difference between the tree in the backing and the tree that programs see. The caller keeps names and
//! data of the scope, so neither tree changes meanwhile.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use firn_backing::{Backing, Errno, Kind, SetTime};

use crate::change_log::{
    BytesSource, ChangeLog, DataChange, Entry, Identity, TopChange, WrittenRange,
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
    let inner = shared.look();
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
    let inner = shared.look();
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

    /// Makes the change log of a transaction from its tables.
    pub(crate) fn make_record(&self, scope: &Scope<B>, id: u64) -> Result<ChangeLog, Errno> {
        let mut items: BTreeMap<u64, Entry> = BTreeMap::new();
        let changed: Vec<_> = scope.changed.lock().values().cloned().collect();
        // Numbers of the directories from the scope up to the root of the backing, which do not change.
        let mut numbers: HashMap<Key, u64> = HashMap::from([(self.tree.top().key, 0)]);
        for object in &changed {
            let Some(ChangedObject { base, change }) = change_of(object) else {
                continue;
            };
            let number = *numbers.entry(object.key).or_insert(change.number);
            let is_root = number == 0;
            let mut item = Entry::new(number, self.identity(object), object.kind == Kind::Dir);
            let at = change.copy.as_ref().map(|copy| copy.at.clone());
            if let (Some(copy), Some(touched)) = (&change.copy, change.names_changed_at) {
                let inode = copy.inode(&self.lower.base)?;
                let mtime = self.lower.base.attr(&inode)?.mtime.max(touched);
                self.lower
                    .base
                    .set_times(&inode, SetTime::Keep, SetTime::At(mtime))?;
            }
            if base.is_none() {
                item.new_at = at;
                if let Some(copy) = change
                    .copy
                    .as_ref()
                    .filter(|_| item.is_dir && !change.removed)
                {
                    let attr = self.lower.base.attr(&copy.inode(&self.lower.base)?)?;
                    item.redo.atime = Some(attr.atime.into());
                    item.redo.mtime = Some(attr.mtime.into());
                }
            } else if self.links_of(object, base.as_ref(), &change)? > 0
                || is_root
                // A program that has a file without a name open keeps what was written to it.
                || object.is_open()
            {
                // Names that came and went changed only the times. Other hosts may have changed more there.
                if let (Some(touched), None, None, Some(inode)) = (
                    change.names_changed_at.filter(|_| item.is_dir),
                    &at,
                    &self.lower.members,
                    &base,
                ) {
                    let attr = self.lower.base.attr(inode)?;
                    item.redo.atime = Some(attr.atime.into());
                    item.redo.mtime = Some(attr.mtime.max(touched).into());
                }
                item.redo.copy_at = at;
                if let Some(inline) = &change.inline {
                    let written = inline.overwrites().map(|(start, piece)| WrittenRange {
                        start,
                        end: start + piece.len() as u64,
                        source: BytesSource::Inline(piece.to_vec()),
                    });
                    item.redo.mtime = Some(inline.mtime.into());
                    item.redo.data = Some(DataChange {
                        cut: inline.size(),
                        size: inline.size(),
                        written: written.collect(),
                        grows: false,
                    });
                }
                item.redo.changes_attributes = change.attributes;
                item.redo.mtime_before = change.before.map(|(_, mtime)| mtime.into());
                if let Some(copy) = change.copy.as_ref().filter(|_| object.kind == Kind::File) {
                    let size = self.lower.base.attr(&copy.inode(&self.lower.base)?)?.size;
                    let written = change.written.iter();
                    let written =
                        written.map(|range| WrittenRange::of_copy(range.start, range.end));
                    let grows = change
                        .before
                        .is_some_and(|(before, _)| change.cut >= before);
                    item.redo.data = Some(DataChange {
                        cut: change.cut,
                        size,
                        written: written.collect(),
                        grows,
                    });
                }
            }
            items.insert(number, item);
        }
        let shared_dir = scope.names_in_root.as_ref().map(|_| &scope.root);
        for object in changed.iter().chain(shared_dir) {
            if object.kind != Kind::Dir {
                continue;
            }
            let Some(ChangedDir { base, names }) = changed_names(scope, object) else {
                continue;
            };
            let dir = self.number_of(scope, object, &mut numbers, &mut items);
            for (name, now) in &names {
                let old = match &base {
                    Some(inode) => staging::find(&self.lower.base, inode, name)?,
                    None => None,
                };
                let old_key = old.map(|(_, attr)| (attr.dev, attr.ino));
                let now_key = now.as_ref().map(|object| object.key);
                if old_key == now_key {
                    continue;
                }
                let place = (dir, name.as_bytes().to_vec());
                if let Some(old) = old_key.and_then(|key| self.tree.known(key)) {
                    let number = self.number_of(scope, &old, &mut numbers, &mut items);
                    items
                        .get_mut(&number)
                        .expect("just added")
                        .before
                        .push(place.clone());
                }
                if let Some(now) = now {
                    let number = self.number_of(scope, now, &mut numbers, &mut items);
                    items
                        .get_mut(&number)
                        .expect("just added")
                        .after
                        .push(place);
                }
            }
        }
        let top = self.record_top(scope, &mut numbers, &mut items);
        for object in &changed {
            if Arc::ptr_eq(object, &scope.root) {
                continue;
            }
            let number = self.number_of(scope, object, &mut numbers, &mut items);
            self.complete_entry(scope, object, number, &mut numbers, &mut items)?;
        }
        let is_needed = |item: &Entry| {
            let moves = !item.before.is_empty() || !item.after.is_empty();
            moves || item.new_at.is_none()
        };
        items.retain(|_, item| is_needed(item));
        let scope = scope.path.clone();
        let shared = self.lower.members.is_some();
        Ok(ChangeLog {
            id,
            scope,
            top,
            shared,
            entries: items.into_values().collect(),
            ..ChangeLog::default()
        })
    }

    /// The name of the scope's top: it stays, or the transaction gives it another one, or its first.
    fn record_top(
        &self,
        scope: &Scope<B>,
        numbers: &mut HashMap<Key, u64>,
        items: &mut BTreeMap<u64, Entry>,
    ) -> Option<TopChange> {
        let names = scope.top.names();
        let change = |entry| TopChange {
            path_after: scope.path_now(),
            is_new: names.before.is_none(),
            entry,
        };
        let is_changed = names.before != names.now;
        if scope.shadow.is_some() {
            return is_changed.then(|| change(None));
        }
        let parent = scope.top.parent()?;
        if !is_changed && !numbers.contains_key(&scope.root.key) {
            return None;
        }
        let number = self.number_of(scope, &scope.root, numbers, items);
        let dir = self.number_of(scope, parent, numbers, items);
        let place = |name: OsString| (dir, name.into_encoded_bytes());
        let entry = items.get_mut(&number).expect("just added");
        if is_changed {
            entry.unchanged_name = None;
            entry.before = names.before.clone().map(place).into_iter().collect();
            entry.after = names.now.clone().map(place).into_iter().collect();
        } else {
            entry.unchanged_name = names.now.clone().map(place);
        }
        is_changed.then(|| change(Some(number)))
    }

    /// Number of names that an object has; 2 for a directory that exists.
    fn links_of(
        &self,
        object: &Object<B>,
        base: Option<&B::Inode>,
        change: &Change<B>,
    ) -> Result<i64, Errno> {
        if change.removed {
            return Ok(0);
        }
        let Some(inode) = base else {
            return Ok(change.links);
        };
        let attr = self.own_links.attr_below(object, inode)?;
        Ok(if attr.kind == Kind::Dir {
            2
        } else {
            i64::from(attr.nlink) + change.links
        })
    }

    fn identity(&self, object: &Object<B>) -> Identity {
        let (device, ino) = object.key;
        Identity {
            ino,
            elsewhere: device != self.lower.device,
        }
    }

    /// The number of an object in a record, to which it and the directories above it are added.
    fn number_of(
        &self,
        scope: &Scope<B>,
        object: &Arc<Object<B>>,
        numbers: &mut HashMap<Key, u64>,
        items: &mut BTreeMap<u64, Entry>,
    ) -> u64 {
        if let Some(&number) = numbers.get(&object.key) {
            return number;
        }
        let number = scope.next_number();
        numbers.insert(object.key, number);
        items.insert(
            number,
            Entry::new(number, self.identity(object), object.kind == Kind::Dir),
        );
        let location = object.location.lock().clone();
        if let Some((parent, name)) = location {
            let parent = self.number_of(scope, &parent, numbers, items);
            items.get_mut(&number).expect("just added").unchanged_name =
                Some((parent, name.as_bytes().to_vec()));
        }
        number
    }

    /// Makes sure that an object of the backing can be found by a name that it keeps, or while it moves to another.
    fn complete_entry(
        &self,
        scope: &Scope<B>,
        object: &Arc<Object<B>>,
        number: u64,
        numbers: &mut HashMap<Key, u64>,
        items: &mut BTreeMap<u64, Entry>,
    ) -> Result<(), Errno> {
        let Some(item) = items.get(&number) else {
            return Ok(());
        };
        let leaves = !item.before.is_empty();
        let comes = !item.after.is_empty();
        let is_sought = item.is_dir || item.redo.changes_in_place() || comes;
        // One that moves is found while it moves.
        if number == 0 || item.new_at.is_some() || !is_sought || (leaves && comes) {
            return Ok(());
        }
        let Some(ChangedObject { base, change }) = change_of(object) else {
            return Ok(());
        };
        let origin = change.origin;
        if let Some((parent, name)) = origin.filter(|_| !leaves) {
            let found = parent
                .base()
                .map(|dir| staging::find(&self.lower.base, &dir, &name))
                .transpose()?
                .flatten();
            if found.is_some_and(|(_, attr)| (attr.dev, attr.ino) == object.key) {
                let parent = self.number_of(scope, &parent, numbers, items);
                let item = items.get_mut(&number).expect("seen above");
                item.unchanged_name = Some((parent, name.as_bytes().to_vec()));
                return Ok(());
            }
        }
        // The name that it was found by is gone, and others are not known. It gets one more.
        let Some(inode) = base.as_ref().filter(|_| object.kind != Kind::Dir) else {
            return Ok(());
        };
        let (staging_name, staging_dir) = scope.plain_staging_dir(&self.lower.base)?;
        let text = format!("{ANCHOR}{number}");
        self.own_links.hide_link(scope, object, &staging_dir, &text);
        match self.lower.base.link(inode, &staging_dir, OsStr::new(&text)) {
            Ok(_) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
        self.own_links
            .link_is_hidden(scope, object, &staging_dir, &text);
        items.get_mut(&number).expect("seen above").anchor_at = Some((staging_name, text));
        Ok(())
    }
}
