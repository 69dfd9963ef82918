//! Putting back what was saved.
//!
//! 1. The directories that were touched are found, wherever they are now: by the way to them, or in what is in
//!    the others. A directory comes from one place to another only through such directories.
//! 2. In each of them every name that it did not have goes: an object that was there before to `kept/`,
//!    one that is new for good.
//! 3. Every name that is missing is given back, from `kept/`.
//! 4. Bytes and attributes come back, of directories last.
//!
//! Nothing of it depends on how far an earlier attempt came.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use firn_backing::{Access, Attr, Backing, Errno, Kind, RenameFlags, Result, SetTime, Time};

use super::saved::{Entry, Original, Saved, Segment};
use super::{SAVED, Shadow};
use crate::apply::Apply;
use crate::object::Object;
use crate::scope::{Held, HeldError, Scope};
use crate::staging;

/// All that is saved of an object.
struct Save {
    path: Vec<Entry>,
    original: Original,
    names: BTreeMap<Vec<u8>, u64>,
    segments: Vec<Segment>,
}

/// What an undo did to objects that somebody may refer to.
#[derive(Debug, Default)]
pub(crate) struct Undone {
    /// Inodes that are no more.
    removed: Vec<u64>,
    /// Inodes that have a name in `kept/`, perhaps beside others, until that goes with the transaction.
    kept: Vec<u64>,
    /// Inodes that came back to a directory, and to which name.
    placed: Vec<(u64, u64, Vec<u8>)>,
}

pub(crate) struct Undo<'a, B: Backing> {
    base: &'a B,
    shadow: &'a Shadow<B>,
    /// Inode of the top of the backing, where `.firn/` is.
    top: u64,
    /// The scope's.
    root: B::Inode,
    saves: BTreeMap<u64, Save>,
    /// Inodes that were in the directories that were touched.
    old: HashSet<u64>,
    /// Directories on the way to something that is saved.
    wanted: HashSet<u64>,
    dirs: HashMap<u64, B::Inode>,
    undone: Undone,
}

impl<'a, B: Backing> Undo<'a, B> {
    /// Reads what is saved. `root` is the scope's, `place` where its transaction is, for people.
    pub(crate) fn new(
        base: &'a B,
        shadow: &'a Shadow<B>,
        root: B::Inode,
        place: &str,
    ) -> std::result::Result<Self, HeldError> {
        let mut saves = load(base, shadow, place)?;
        let there = there_before(&saves, base.attr(&root)?.ino);
        saves.retain(|ino, _| there.contains(ino));
        let old = saves
            .values()
            .flat_map(|save| save.names.values().copied())
            .collect();
        let dirs = saves.values().flat_map(|save| {
            let is_dir = Kind::from_mode(save.original.mode) == Some(Kind::Dir);
            let above = save.path.len().saturating_sub(usize::from(!is_dir));
            save.path[..above].iter().map(|(_, ino)| *ino)
        });
        let wanted = dirs.collect();
        let top = base.attr(&base.root())?.ino;
        Ok(Self {
            base,
            shadow,
            top,
            root,
            saves,
            old,
            wanted,
            dirs: HashMap::new(),
            undone: Undone::default(),
        })
    }

    pub(crate) fn run(mut self) -> Result<Undone> {
        self.find_dirs()?;
        let missing = self.vacate()?;
        self.place(missing)?;
        self.give_back()?;
        // An earlier process may have undone a part, and did not live to sync it.
        self.base.sync_tree(&self.root)?;
        Ok(self.undone)
    }

    fn names(&self, ino: u64, inode: &B::Inode) -> Result<Vec<Entry>> {
        let listed = staging::list(self.base, inode)?
            .into_iter()
            .map(|(name, ino, _)| (name, ino));
        let is_top = ino == self.top;
        Ok(listed
            .filter(|(name, _)| !(is_top && name == staging::TOP.as_bytes()))
            .collect())
    }

    // ---- finding -----------------------------------------------------------------------------

    fn find_dirs(&mut self) -> Result<()> {
        let mut todo = VecDeque::from([(self.shadow.kept.clone(), 0)]);
        let root = self.base.attr(&self.root)?.ino;
        self.found(root, self.root.clone(), &mut todo);
        loop {
            while let Some((inode, ino)) = todo.pop_front() {
                self.look_in(&inode, ino, &mut todo)?;
            }
            let Some((ino, inode)) = self.follow_one()? else {
                break;
            };
            self.found(ino, inode, &mut todo);
        }
        for (ino, save) in &self.saves {
            let is_dir = Kind::from_mode(save.original.mode) == Some(Kind::Dir);
            if is_dir && !self.dirs.contains_key(ino) {
                tracing::error!(ino, path = %shown(&save.path), "a directory is not found and not undone");
            }
        }
        Ok(())
    }

    fn found(&mut self, ino: u64, inode: B::Inode, todo: &mut VecDeque<(B::Inode, u64)>) {
        if self.dirs.insert(ino, inode.clone()).is_none() && self.saves.contains_key(&ino) {
            todo.push_back((inode, ino));
        }
    }

    /// Looks for directories in one that was touched or is new.
    fn look_in(
        &mut self,
        inode: &B::Inode,
        ino: u64,
        todo: &mut VecDeque<(B::Inode, u64)>,
    ) -> Result<()> {
        self.open_up(inode)?;
        for (name, child) in self.names(ino, inode)? {
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
                self.found(child, found.clone(), todo);
            }
            if is_new && !self.saves.contains_key(&child) {
                todo.push_back((found, child));
            }
        }
        Ok(())
    }

    /// Non-root needs to be allowed what it was when the directory was changed.
    fn open_up(&self, inode: &B::Inode) -> Result<()> {
        let mode = self.base.attr(inode)?.mode & 0o7777;
        if mode & 0o700 != 0o700 {
            self.base.set_mode(inode, mode | 0o700)?;
        }
        Ok(())
    }

    /// The next directory on the way to one that is not found yet.
    fn follow_one(&self) -> Result<Option<(u64, B::Inode)>> {
        for save in self.saves.values() {
            let mut above = Some(&self.root);
            for (name, ino) in &save.path {
                if let Some(inode) = self.dirs.get(ino) {
                    above = Some(inode);
                } else if self.wanted.contains(ino) {
                    let found = above
                        .map(|dir| self.is_at(dir, name, *ino))
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

    /// The object, if the name leads to it.
    fn is_at(&self, dir: &B::Inode, name: &[u8], ino: u64) -> Result<Option<(B::Inode, Attr)>> {
        Ok(staging::find(self.base, dir, OsStr::from_bytes(name))?
            .filter(|(_, attr)| attr.ino == ino))
    }

    // ---- names -------------------------------------------------------------------------------

    /// Takes away what was not there. Returns what is missing: directory, name, inode.
    fn vacate(&mut self) -> Result<Vec<(u64, Vec<u8>, u64)>> {
        let mut missing = Vec::new();
        let touched: Vec<u64> = self
            .saves
            .keys()
            .copied()
            .filter(|ino| self.dirs.contains_key(ino))
            .collect();
        for ino in touched {
            let inode = self.dirs[&ino].clone();
            let mut right = BTreeSet::new();
            for (name, child) in self.names(ino, &inode)? {
                if self.saves[&ino].names.get(&name) == Some(&child) {
                    right.insert(name);
                } else {
                    self.take_out(&inode, &name, child)?;
                }
            }
            let wrong = self.saves[&ino]
                .names
                .iter()
                .filter(|(name, _)| !right.contains(*name));
            missing.extend(wrong.map(|(name, child)| (ino, name.clone(), *child)));
        }
        Ok(missing)
    }

    fn take_out(&mut self, dir: &B::Inode, name: &[u8], ino: u64) -> Result<()> {
        let os_name = OsStr::from_bytes(name);
        if self.old.contains(&ino) {
            self.undone.kept.push(ino);
            return self.shadow.keep(self.base, dir, os_name, ino);
        }
        let Some((inode, attr)) = staging::find(self.base, dir, os_name)? else {
            return Ok(());
        };
        self.undone.removed.push(ino);
        if attr.kind != Kind::Dir {
            return self.base.unlink(dir, os_name);
        }
        for (name, child) in self.names(ino, &inode)? {
            self.take_out(&inode, &name, child)?;
        }
        self.base.rmdir(dir, os_name)
    }

    fn place(&mut self, missing: Vec<(u64, Vec<u8>, u64)>) -> Result<()> {
        for (dir, name, ino) in missing {
            let inode = self.dirs[&dir].clone();
            let os_name = OsStr::from_bytes(&name);
            let text = ino.to_string();
            let kept = OsStr::new(&text);
            match staging::find(self.base, &self.shadow.kept, kept)? {
                Some((object, attr)) => {
                    // It goes from there at the end: a crash before does not lose it.
                    let linked = match attr.kind {
                        Kind::Dir => Err(Errno::PERM),
                        _ => self.base.link(&object, &inode, os_name).map(drop),
                    };
                    if linked.is_err() {
                        self.base.rename(
                            &self.shadow.kept,
                            kept,
                            &inode,
                            os_name,
                            RenameFlags::NOREPLACE,
                        )?;
                    }
                }
                None => match self.named(ino)? {
                    Some((object, _)) => drop(self.base.link(&object, &inode, os_name)?),
                    None => {
                        tracing::error!(ino, name = %os_name.display(), "an object is gone and not brought back")
                    }
                },
            }
            self.undone.placed.push((ino, dir, name));
        }
        Ok(())
    }

    /// An object that has a name that it had.
    fn named(&self, ino: u64) -> Result<Option<(B::Inode, Attr)>> {
        for (dir, save) in &self.saves {
            let Some(inode) = self.dirs.get(dir) else {
                continue;
            };
            for (name, _) in save.names.iter().filter(|(_, child)| **child == ino) {
                if let Some(found) = self.is_at(inode, name, ino)? {
                    return Ok(Some(found));
                }
            }
        }
        Ok(None)
    }

    // ---- bytes and attributes ----------------------------------------------------------------

    fn give_back(&self) -> Result<()> {
        let mut places: HashMap<u64, (u64, &[u8])> = HashMap::new();
        for (dir, save) in &self.saves {
            places.extend(
                save.names
                    .iter()
                    .map(|(name, ino)| (*ino, (*dir, name.as_slice()))),
            );
        }
        let is_dir = |save: &Save| Kind::from_mode(save.original.mode) == Some(Kind::Dir);
        let files = || self.saves.iter().filter(|(_, save)| !is_dir(save));
        // What was cut off elsewhere may need the room.
        for (ino, save) in
            files().filter(|(_, save)| Kind::from_mode(save.original.mode) == Some(Kind::File))
        {
            if let Some((inode, attr)) = self.file(*ino, save, &places)?
                && attr.size > save.original.size
            {
                self.base.set_len(
                    &self.base.open(&inode, Access::ReadWrite)?,
                    save.original.size,
                )?;
            }
        }
        for (ino, save) in files() {
            match self.file(*ino, save, &places)? {
                Some((inode, attr)) => self.give_back_to(&inode, &attr, save)?,
                None => {
                    tracing::error!(ino, path = %shown(&save.path), "a file is not found and not undone")
                }
            }
        }
        for (ino, save) in self.saves.iter().filter(|(_, save)| is_dir(save)) {
            if let Some(inode) = self.dirs.get(ino) {
                self.attributes(inode, &self.base.attr(inode)?, &save.original)?;
            }
        }
        Ok(())
    }

    /// A file that is saved, under one of its names.
    fn file(
        &self,
        ino: u64,
        save: &Save,
        places: &HashMap<u64, (u64, &[u8])>,
    ) -> Result<Option<(B::Inode, Attr)>> {
        let place = match (places.get(&ino), save.path.as_slice()) {
            (Some((dir, name)), _) => self.dirs.get(dir).map(|dir| (dir, *name)),
            (None, [.., (_, dir), (name, _)]) => {
                self.dirs.get(dir).map(|dir| (dir, name.as_slice()))
            }
            (None, [(name, _)]) => Some((&self.root, name.as_slice())),
            (None, []) => None,
        };
        Ok(place
            .map(|(dir, name)| self.is_at(dir, name, ino))
            .transpose()?
            .flatten())
    }

    fn give_back_to(&self, inode: &B::Inode, attr: &Attr, save: &Save) -> Result<()> {
        let size = save.original.size;
        if attr.kind == Kind::File && (attr.size != size || !save.segments.is_empty()) {
            let to = self.base.open(inode, Access::ReadWrite)?;
            if attr.size != size {
                self.base.set_len(&to, size)?;
            }
            for segment in &save.segments {
                // A record whose bytes have no name was never durable, and nothing changed after it.
                let at = OsStr::new(&segment.at);
                let Some((from, _)) = staging::find(self.base, &self.shadow.saved, at)? else {
                    continue;
                };
                let from = self.base.open(&from, Access::Read)?;
                Apply::copy(self.base, &from, &to, segment.from, segment.to)?;
            }
        }
        self.attributes(inode, &self.base.attr(inode)?, &save.original)
    }

    fn attributes(&self, inode: &B::Inode, has: &Attr, wanted: &Original) -> Result<()> {
        let mut sets_mode = (wanted.mode ^ has.mode) & 0o7777 != 0;
        if (wanted.uid, wanted.gid) != (has.uid, has.gid) {
            self.base
                .set_owner(inode, Some(wanted.uid), Some(wanted.gid))?;
            sets_mode = true;
        }
        if has.kind != Kind::Symlink {
            // An owner's change and an ACL's change the mode, too.
            sets_mode |= staging::set_xattrs(self.base, inode, &wanted.xattrs)?;
            if sets_mode {
                self.base.set_mode(inode, wanted.mode & 0o7777)?;
            }
        }
        let [atime, mtime] = wanted
            .times
            .map(|(sec, nsec)| SetTime::At(Time { sec, nsec }));
        self.base.set_times(inode, atime, mtime)
    }
}

fn load<B: Backing>(
    base: &B,
    shadow: &Shadow<B>,
    place: &str,
) -> std::result::Result<BTreeMap<u64, Save>, HeldError> {
    let mut records: BTreeMap<(u64, u32), Saved> = BTreeMap::new();
    for (name, ..) in staging::list(base, &shadow.saved)? {
        let Ok(text) = String::from_utf8(name) else {
            continue;
        };
        let number = text
            .split_once('.')
            .and_then(|(ino, k)| Some((ino.parse().ok()?, k.parse().ok()?)));
        let Some(number) = number else { continue };
        let bytes = staging::load(base, &shadow.saved, &text)?.unwrap_or_default();
        let path = || format!("{}/{place}/{SAVED}/{text}", staging::TOP);
        let saved = Saved::decode(&bytes).map_err(|source| HeldError::Record {
            path: path(),
            source,
        })?;
        records.insert(number, saved);
    }
    let mut saves = BTreeMap::new();
    for ((ino, _), saved) in records {
        if let Some(mut original) = saved.original {
            let names = std::mem::take(&mut original.names).into_iter().collect();
            saves.insert(
                ino,
                Save {
                    path: saved.path,
                    original,
                    names,
                    segments: Vec::new(),
                },
            );
        }
        if let Some(save) = saves.get_mut(&ino) {
            save.segments.extend(saved.segment);
        }
    }
    Ok(saves)
}

/// Objects that were there before the transaction. What one host made is saved by another that changes it and does
/// not know: it was found in a directory that had other names.
fn there_before(saves: &BTreeMap<u64, Save>, root: u64) -> HashSet<u64> {
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

fn shown(path: &[Entry]) -> String {
    let names: Vec<_> = path
        .iter()
        .map(|(name, _)| String::from_utf8_lossy(name))
        .collect();
    names.join("/")
}

impl<B: Backing> Held<B> {
    /// Puts back what a transaction changed in the backing, and tells the objects that somebody refers to.
    pub(crate) fn undo_shadow(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
    ) -> std::result::Result<(), HeldError> {
        shadow.begin_undo();
        let root = scope.root.inner.read().inode(&self.base)?;
        let undone = Undo::new(&self.base, shadow, root, &format!("tx-{}", scope.serial))?.run()?;
        let dirs = std::mem::take(&mut *shadow.dirs.lock());
        let object = |ino: u64| self.known((shadow.dev, ino));
        for ino in undone.kept {
            self.link_goes(
                scope.serial,
                (shadow.dev, ino),
                &shadow.kept,
                ino.to_string(),
            );
        }
        for ino in undone.removed {
            if let Some(object) = object(ino) {
                self.objects.lock().remove(&object.key);
                object.inner.write().base = None;
                object.let_go();
            }
        }
        for (ino, dir, name) in undone.placed {
            if let (Some(object), Some(dir)) =
                (object(ino), dirs.get(&dir).cloned().or_else(|| object(dir)))
            {
                object.sit(&dir, OsStr::from_bytes(&name));
            }
        }
        self.forget_new(shadow);
        Ok(())
    }

    /// Another host has undone the transaction: what this one knows of it is as it was.
    pub(crate) fn see_undone(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
    ) -> std::result::Result<(), HeldError> {
        let mut saves = load(&self.base, shadow, &format!("tx-{}", scope.serial))?;
        let there = there_before(&saves, scope.root.key.1);
        saves.retain(|ino, _| there.contains(ino));
        let object = |ino: u64| self.known((shadow.dev, ino));
        for (dir, save) in saves {
            let Some(dir) = object(dir) else { continue };
            for (name, ino) in save.names {
                if let Some(object) = object(ino) {
                    object.sit(&dir, OsStr::from_bytes(&name));
                }
            }
        }
        shadow.dirs.lock().clear();
        self.forget_new(shadow);
        Ok(())
    }

    /// New objects without a name were found nowhere.
    fn forget_new(&self, shadow: &Shadow<B>) {
        for (ino, known) in shadow.known.lock().drain() {
            let object = self.known((shadow.dev, ino));
            if let (super::Known::New, Some(object)) = (known, object) {
                self.objects.lock().remove(&object.key);
                object.inner.write().base = None;
                object.let_go();
            }
        }
    }

    /// After a crash: the same for a transaction of which nobody knows anything but what is stored.
    pub(crate) fn undo_stored(
        &self,
        dir: &B::Inode,
        place: &str,
        scope: &[u8],
    ) -> std::result::Result<(), HeldError> {
        let Some(shadow) = Shadow::find(&self.base, dir)? else {
            return Ok(());
        };
        let mut root = self.base.root();
        for name in scope.split(|&b| b == b'/').filter(|name| !name.is_empty()) {
            root = self.base.lookup(&root, OsStr::from_bytes(name))?.0;
        }
        Undo::new(&self.base, &shadow, root, place)?.run()?;
        Ok(())
    }
}

impl<B: Backing> Object<B> {
    /// An object without a name, or a directory that was removed and is kept.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_nameless()
            || self.kind == Kind::Dir && self.may_hide_links() && self.parent().is_some()
    }
}
