//! The top of a scope as a name in its parent, a directory that the transaction does not cover.
//!
//! A transaction may make its top ([`TransactionalBacking::begin_created`]), and the top may be renamed in its parent while the
//! transaction is open. In buffer mode neither is in the backing before the commit: [`TransactionalBacking::find_top_name`] has
//! programs see it, and the log has the name as an entry of the parent. In shadow mode both are done in the backing at
//! once, and undone by an abort.
//!
//! | state | the name that programs see | reserved, seen by nobody |
//! |---|---|---|
//! | made in buffer mode | from here | |
//! | renamed in buffer mode | the new one, from here | that at the begin |
//! | renamed in shadow mode | the new one, in the backing | that at the begin |
//! | prepared by an earlier firnd, buffer mode | that at the begin, in the backing, if it was there | that after the commit |
//! | commit that is being undone | that of the commit, in the backing | that before the commit |
//!
//! Invariants
//! * The top stays in its parent, and the parent stays where it is: EBUSY.
//! * While the transaction is open, no other object takes a name of its top.
//! * Before the top takes another name, `tx-N/names` has that name, durably. So a recovery finds the top, and an arena
//!   drops what was written below any of its names.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;

use firn_backing::{Attr, Backing, Caller, Errno, Kind, RenameFlags, Time};
use parking_lot::Mutex;

use super::{Open, Scope, Stage};
use crate::change_log::{ChangeLog, Entry, Identity, parent_of};
use crate::error::{BeginError, ScopeError, StoreError};
use crate::object::{Change, Inner, Key, Object, StagedCopy};
use crate::staging;
use crate::transactional::TransactionalBacking;

/// The top of a scope, seen from its parent.
pub(crate) struct Top<B: Backing> {
    /// `None`: it is the top of the backing.
    parent: Option<Arc<Object<B>>>,
    names: Mutex<TopNames>,
}

/// Number of a new top in its transaction, and so its staged name.
const NEW_TOP: u64 = 1;

/// What the top is called.
#[derive(Clone, Debug, Default)]
pub(crate) struct TopNames {
    /// When the transaction began.
    pub(crate) first: Option<OsString>,
    /// In the backing before the transaction.
    pub(crate) before: Option<OsString>,
    /// As programs see it.
    pub(crate) now: Option<OsString>,
    /// Once the log of an earlier firnd is applied.
    after: Option<OsString>,
    /// The backing does not have a changed name: programs see it from here.
    is_held: bool,
    /// When it got its name.
    touched: Option<Time>,
}

/// What a name in a directory has to do with the top of a scope.
pub(crate) enum TopName<B: Backing> {
    /// Nothing.
    Unrelated,
    /// It leads to the top, and the backing does not have it.
    Shown(Arc<Object<B>>),
    /// Nobody sees it, and nothing may be made there.
    Reserved,
}

/// A name in a directory that a transaction adds or hides.
pub(crate) struct ListedTop<B: Backing> {
    pub(crate) name: OsString,
    /// What it leads to.
    pub(crate) shown: Option<Arc<Object<B>>>,
}

/// What brings a top back to the name that it had, in shadow mode.
pub(crate) struct TopUndo<B: Backing> {
    pub(crate) parent: B::Inode,
    pub(crate) parent_ino: u64,
    /// The top, if it is still there.
    pub(crate) root: Option<B::Inode>,
    pub(crate) ino: u64,
    /// `None`: the transaction made it.
    pub(crate) before: Option<Vec<u8>>,
    /// Names that it may have.
    pub(crate) names: Vec<Vec<u8>>,
}

/// Who makes the top of a scope, and with which mode.
#[derive(Clone, Copy, Debug)]
pub struct TopMaker<'a> {
    /// Its owner.
    pub caller: &'a Caller,
    /// Permission bits, without those of the umask.
    pub mode: u32,
}

impl<B: Backing> TopUndo<B> {
    /// The inode number of a top that was there before.
    pub(crate) fn old_ino(&self) -> Option<u64> {
        self.before.is_some().then_some(self.ino)
    }
}

impl TopNames {
    /// The name at the begin, and the one that a recovered log gives.
    fn reserved(&self) -> impl Iterator<Item = &OsString> {
        let all = [&self.first, &self.after].into_iter().flatten();
        all.filter(|name| self.now.as_ref() != Some(*name))
    }

    /// The name that programs see and the backing does not have.
    fn shown(&self) -> Option<&OsString> {
        let is_changed = self.before != self.now;
        self.now.as_ref().filter(|_| self.is_held && is_changed)
    }

    fn changes_parent(&self) -> bool {
        self.shown().is_some() || self.reserved().next().is_some()
    }
}

fn last_name(path: &[u8]) -> Option<OsString> {
    let name = path.rsplit(|&byte| byte == b'/').next()?;
    (!name.is_empty()).then(|| OsStr::from_bytes(name).to_owned())
}

fn join(parent: &[u8], name: &[u8]) -> Vec<u8> {
    let slash: &[u8] = if parent.is_empty() { b"" } else { b"/" };
    [parent, slash, name].concat()
}

impl<B: Backing> Top<B> {
    /// Of the scope with this top, `path` at the begin. `recovered` is the log of an earlier firnd.
    pub(crate) fn new(
        root: &Arc<Object<B>>,
        path: &[u8],
        recovered: Option<&ChangeLog>,
        is_shadow: bool,
    ) -> Self {
        let (parent, name) = root.location.lock().clone().unzip();
        let first = last_name(path);
        let change = recovered.and_then(|log| log.top.as_ref());
        let is_new = change.is_some_and(|top| top.is_new);
        let names = TopNames {
            before: first.clone().filter(|_| !is_new),
            first,
            now: name.filter(|_| !is_new || is_shadow),
            after: change.and_then(|top| last_name(&top.path_after)),
            is_held: !is_shadow && recovered.is_none(),
            touched: None,
        };
        Self {
            parent,
            names: Mutex::new(names),
        }
    }

    pub(crate) fn parent(&self) -> Option<&Arc<Object<B>>> {
        self.parent.as_ref()
    }

    pub(crate) fn names(&self) -> TopNames {
        self.names.lock().clone()
    }

    /// Whether the parent shows another name than the backing, or hides one.
    pub(crate) fn changes_parent(&self) -> bool {
        self.names.lock().changes_parent()
    }

    pub(crate) fn is_in(&self, dir: &Object<B>) -> bool {
        self.parent
            .as_ref()
            .is_some_and(|parent| std::ptr::eq(&raw const **parent, dir))
    }

    /// The log of an earlier firnd is undone and not applied: then the top is called this.
    pub(crate) fn goes_back_to(&self, path: &[u8]) {
        self.names.lock().after = last_name(path);
    }
}

impl<B: Backing> Scope<B> {
    /// Path under which programs see it, relative to the backing.
    pub(crate) fn path_now(&self) -> Vec<u8> {
        match self.top.names().now {
            Some(name) => join(parent_of(&self.path), name.as_bytes()),
            None => self.path.clone(),
        }
    }

    /// Path that it has after its commit.
    fn path_after(&self) -> Vec<u8> {
        match self.top.names().after {
            Some(name) => join(parent_of(&self.path), name.as_bytes()),
            None => self.path_now(),
        }
    }

    /// Whether this is its path: that at the begin, the present one, or the one after the commit.
    pub(crate) fn is_at(&self, path: &[u8]) -> bool {
        let names = self.top.names();
        let is_one_of = |name: &OsString| last_name(path).as_ref() == Some(name);
        let mut all = [&names.now, &names.after].into_iter().flatten();
        path == self.path
            || (parent_of(path) == parent_of(&self.path) && all.any(is_one_of) && !path.is_empty())
    }
}

impl<B: Backing> TransactionalBacking<B> {
    // ---- what programs see -------------------------------------------------------------------

    /// What a name has to do with a scope's top. The caller holds the names.
    pub(crate) fn find_top_name(&self, dir: &Arc<Object<B>>, name: &OsStr) -> TopName<B> {
        for scope in self.scopes.with_top_in(dir) {
            let names = scope.top.names();
            if names.shown().is_some_and(|shown| shown == name) {
                return TopName::Shown(Arc::clone(&scope.root));
            }
            if names.reserved().any(|reserved| reserved == name) {
                return TopName::Reserved;
            }
        }
        TopName::Unrelated
    }

    /// Names in a directory that are other ones than in the backing.
    pub(crate) fn top_names_in(&self, dir: &Arc<Object<B>>) -> Vec<ListedTop<B>> {
        let mut found = Vec::new();
        for scope in self.scopes.with_top_in(dir) {
            let names = scope.top.names();
            found.extend(names.shown().map(|name| ListedTop {
                name: name.clone(),
                shown: Some(Arc::clone(&scope.root)),
            }));
            found.extend(names.reserved().map(|name| ListedTop {
                name: name.clone(),
                shown: None,
            }));
        }
        found
    }

    /// Whether a directory shows other names than in the backing.
    pub(crate) fn has_tops_in(&self, dir: &Object<B>) -> bool {
        !self.scopes.with_top_in(dir).is_empty()
    }

    /// The attributes of a directory in which tops are that the backing does not have.
    pub(crate) fn attr_with_tops(&self, dir: &Object<B>, inode: &B::Inode) -> Result<Attr, Errno> {
        loop {
            let (scopes, touched) = self.shown_tops(dir);
            let there = self.which_tops_are_there(inode, &scopes)?;
            let mut attr = self.attr_below(dir, inode)?;
            // A commit that is being applied moves them there.
            if self.which_tops_are_there(inode, &scopes)? != there {
                continue;
            }
            if attr.nlink > 1 {
                attr.nlink += there.iter().filter(|is_there| !**is_there).count() as u32;
            }
            for time in touched {
                (attr.mtime, attr.ctime) = (attr.mtime.max(time), attr.ctime.max(time));
            }
            return Ok(attr);
        }
    }

    /// New tops in a directory, and when names of tops changed in it.
    fn shown_tops(&self, dir: &Object<B>) -> (Vec<Arc<Scope<B>>>, Vec<Time>) {
        let (mut new, mut touched) = (Vec::new(), Vec::new());
        for scope in self.scopes.with_top_in(dir) {
            let names = scope.top.names();
            if names.shown().is_none() {
                continue;
            }
            touched.extend(names.touched);
            if names.before.is_none() {
                new.push(scope);
            }
        }
        (new, touched)
    }

    fn which_tops_are_there(
        &self,
        dir: &B::Inode,
        scopes: &[Arc<Scope<B>>],
    ) -> Result<Vec<bool>, Errno> {
        let is_there = |scope: &Arc<Scope<B>>| {
            let Some(name) = scope.top.names().now else {
                return Ok(false);
            };
            if scope.decided().is_none() {
                return Ok(false);
            }
            let found = staging::find(&self.base, dir, &name)?;
            Ok(found.is_some_and(|(_, attr)| (attr.dev, attr.ino) == scope.root.key))
        };
        scopes.iter().map(is_there).collect()
    }

    /// For who makes a name: EEXIST where it leads to the top of a scope, EBUSY where it is reserved for one.
    pub(crate) fn must_not_be_a_top(
        &self,
        dir: &Arc<Object<B>>,
        name: &OsStr,
    ) -> Result<(), Errno> {
        match self.find_top_name(dir, name) {
            TopName::Unrelated => Ok(()),
            TopName::Shown(_) => Err(Errno::EXIST),
            TopName::Reserved => Err(Errno::BUSY),
        }
    }

    /// For a rename of something else: a reserved name is not there, and nothing comes there.
    pub(crate) fn may_move_beside_tops(
        &self,
        (from, name): (&Arc<Object<B>>, &OsStr),
        (to, new_name): (&Arc<Object<B>>, &OsStr),
    ) -> Result<(), Errno> {
        if matches!(self.find_top_name(from, name), TopName::Reserved) {
            return Err(Errno::NOENT);
        }
        match self.find_top_name(to, new_name) {
            TopName::Unrelated => Ok(()),
            TopName::Shown(_) | TopName::Reserved => Err(Errno::BUSY),
        }
    }

    /// The path at the begin of the transaction that programs change things in and that is known by `path`; without
    /// one, `path`.
    pub fn path_at_begin(&self, path: &[u8]) -> Vec<u8> {
        let current = self.current_transaction(path);
        current.map_or_else(|| path.to_vec(), |one| one.scope().to_vec())
    }

    /// The path under which programs see the scope of the transaction that is known by `path`; without one, `path`.
    pub fn path_now(&self, path: &[u8]) -> Vec<u8> {
        let found = self.scopes.at_path(path);
        found.map_or_else(|| path.to_vec(), |scope| scope.path_now())
    }

    /// The path that the scope of the transaction which is known by `path` has after its commit; without one, `path`.
    pub fn path_after(&self, path: &[u8]) -> Vec<u8> {
        let found = self.scopes.at_path(path);
        found.map_or_else(|| path.to_vec(), |scope| scope.path_after())
    }

    /// The top of the transaction that is known by `path`, also where programs do not see it yet.
    pub fn top_known_as(&self, path: &[u8]) -> Option<Arc<Object<B>>> {
        let found = self.scopes.at_path(path)?;
        Some(Arc::clone(&found.root))
    }

    // ---- making the top ----------------------------------------------------------------------

    /// Begins a transaction whose scope begins with its own name: the directory at `path`, which is not there, is made
    /// in `parent` as a part of it.
    pub fn begin_created(
        &self,
        parent: &Arc<Object<B>>,
        path: &[u8],
        maker: TopMaker<'_>,
    ) -> Result<Open<'_, B>, BeginError> {
        self.apply_commits_above(parent)?;
        let _names = self.tree.names.write();
        let _data = self.tree.data.write();
        let name = self.name_of_new_top(parent, path)?;
        // What a directory of this name left that is no more.
        self.forget_commits(path)?;
        self.open_scope(path, None, |serial, firn, dir| {
            self.start_created(serial, (parent, &name, path), maker, (firn, dir))
        })
    }

    /// Whether [`TransactionalBacking::begin_created`] would be refused now, whoever asks.
    pub fn can_begin_created(
        &self,
        parent: &Arc<Object<B>>,
        path: &[u8],
    ) -> Result<(), BeginError> {
        self.apply_commits_above(parent)?;
        let _names = self.tree.names.read();
        self.name_of_new_top(parent, path).map(drop)
    }

    /// The name of the directory at `path` if a transaction can make it in `parent`. The caller holds the names.
    fn name_of_new_top(
        &self,
        parent: &Arc<Object<B>>,
        path: &[u8],
    ) -> Result<OsString, BeginError> {
        let Some(name) = last_name(path) else {
            return Err(BeginError::Exists);
        };
        if parent.kind != Kind::Dir {
            return Err(ScopeError::NotDirectory.into());
        }
        if self.members.is_some() {
            return Err(BeginError::NotAmongHosts);
        }
        if parent.is_gone() {
            return Err(ScopeError::Missing.into());
        }
        let known_as_path = || self.scopes.at_path(path);
        if let Some(other) = self.scopes.of(parent).or_else(known_as_path) {
            return Err(BeginError::Overlaps {
                scope: other.path_now().as_slice().into(),
            });
        }
        if self.is_hidden(parent, &name) || self.find(parent, &name)?.is_some() {
            return Err(BeginError::Exists);
        }
        Ok(name)
    }

    /// What is decided at or above a directory is applied: it would be in the way.
    fn apply_commits_above(&self, dir: &Arc<Object<B>>) -> Result<(), StoreError> {
        let above = self
            .scopes
            .all()
            .into_iter()
            .filter(|scope| dir.is_below(&scope.root) && scope.decided().is_some());
        above
            .into_iter()
            .try_for_each(|scope| self.apply_commit(&scope))
    }

    fn start_created(
        &self,
        serial: u64,
        (parent, name, path): (&Arc<Object<B>>, &OsStr, &[u8]),
        maker: TopMaker<'_>,
        (firn, dir): (&B::Inode, &B::Inode),
    ) -> Result<Scope<B>, BeginError> {
        self.make_shadow(serial, path, firn, dir)?;
        // Until it is made, its parent stands for it.
        let mut scope =
            self.new_scope(serial, Arc::clone(parent), path.to_vec(), dir.clone(), None)?;
        let below = parent.inner.read().inode(&self.base)?;
        let (staging_name, staging_dir) = scope.staging_dir_for(&self.base, &below)?;
        let number = scope.next_number();
        assert_eq!(number, NEW_TOP, "the top is made first");
        let text = number.to_string();
        let (inode, attr) = self.base.mkdir(
            maker.caller,
            &staging_dir,
            OsStr::new(&text),
            maker.mode & 0o1777,
        )?;
        let key = (attr.dev, attr.ino);
        let inner = if scope.shadow.is_some() {
            Inner {
                base: Some(inode),
                change: None,
            }
        } else {
            let copy = StagedCopy {
                staging_dir: staging_dir.clone(),
                at: (staging_name, text.clone()),
                held: None,
                goes_to: None,
            };
            Inner {
                base: None,
                change: Some(Box::new(Change {
                    copy: Some(copy),
                    ..Change::new(number, None)
                })),
            }
        };
        let location = Some((Arc::clone(parent), name.to_owned()));
        let root = Arc::new(Object::new(key, Kind::Dir, inner, location));
        scope.top = Top::new(&root, path, None, scope.shadow.is_some());
        {
            let mut names = scope.top.names.lock();
            names.before = None;
            names.touched = Some(Time::now());
        }
        match &scope.shadow {
            None => drop(scope.changed.lock().insert(number, Arc::clone(&root))),
            Some(shadow) => {
                shadow.made(attr.ino);
                self.write_names(&scope, key, &[name.to_owned()])?;
            }
        }
        scope.root = root;
        self.note_arena(dir)?;
        staging::put(&self.base, dir, staging::OPEN, path)?;
        Ok(scope)
    }

    /// In shadow mode a new top is put in its place once the transaction is on record.
    pub(crate) fn place_new_top(&self, scope: &Scope<B>) -> Result<(), Errno> {
        let names = scope.top.names();
        let (Some(parent), Some(name)) = (scope.top.parent(), &names.now) else {
            return Ok(());
        };
        if scope.shadow.is_none() || names.before.is_some() {
            return Ok(());
        }
        let below = parent.inner.read().inode(&self.base)?;
        let (_, staging_dir) = scope.staging_dir_for(&self.base, &below)?;
        // A name is taken only by who changes the backing past Firn.
        let staged = NEW_TOP.to_string();
        self.rename_without_replacing((&staging_dir, OsStr::new(&staged)), (&below, name))
    }

    /// Takes up a scope's top that the transaction made.
    pub(crate) fn adopt_new_top(&self, scope: &Scope<B>) {
        if scope.top.parent().is_some() && scope.top.names().before.is_none() {
            self.tree.adopt(&scope.root);
        }
    }

    // ---- renaming the top --------------------------------------------------------------------

    /// Renames the top of a scope in its parent; `None` where the name does not lead to one, or it would leave its
    /// parent.
    pub(crate) fn rename_top(
        &self,
        (from, name): (&Arc<Object<B>>, &OsStr),
        (to, new_name): (&Arc<Object<B>>, &OsStr),
        flags: RenameFlags,
    ) -> Option<Result<(), Errno>> {
        if self.scopes.is_empty() || !Arc::ptr_eq(from, to) {
            return None;
        }
        {
            let _names = self.tree.names.read();
            self.scope_with_top(from, name)?;
        }
        let _names = self.tree.names.write();
        let _data = self.tree.data.write();
        let scope = self.scope_with_top(from, name)?;
        Some(self.rename_top_of(&scope, from, new_name, flags))
    }

    fn scope_with_top(&self, dir: &Arc<Object<B>>, name: &OsStr) -> Option<Arc<Scope<B>>> {
        let found = self.find(dir, name).ok().flatten()?;
        self.scopes.find(|one| Arc::ptr_eq(&one.root, &found))
    }

    /// The caller holds names and data.
    fn rename_top_of(
        &self,
        scope: &Arc<Scope<B>>,
        parent: &Arc<Object<B>>,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<(), Errno> {
        let names = scope.top.names();
        if !(RenameFlags::EXCHANGE | RenameFlags::NOREPLACE).contains(flags)
            || flags == (RenameFlags::EXCHANGE | RenameFlags::NOREPLACE)
        {
            return Err(Errno::INVAL);
        }
        if names.now.as_deref() == Some(new_name) {
            return if flags.contains(RenameFlags::NOREPLACE) {
                Err(Errno::EXIST)
            } else {
                Ok(())
            };
        }
        let is_first = names.first.as_deref() == Some(new_name);
        if !is_first {
            self.must_be_free_for_a_top(parent, new_name, flags)?;
        } else if flags.contains(RenameFlags::EXCHANGE) {
            return Err(Errno::NOENT);
        }
        // The hosts of a transaction know it by its path.
        if self.members.is_some() || !scope.is_open() || scope.stage() != Stage::Open {
            return Err(Errno::BUSY);
        }
        self.note_name(scope, new_name)?;
        if scope.shadow.is_some() {
            let below = parent.inner.read().inode(&self.base)?;
            let old = names.now.as_deref().ok_or(Errno::STALE)?;
            self.rename_without_replacing((&below, old), (&below, new_name))?;
        }
        {
            let mut names = scope.top.names.lock();
            names.now = Some(new_name.to_owned());
            names.touched = Some(Time::now());
        }
        scope.root.move_to(parent, new_name);
        self.scopes.count_changed_tops();
        self.check_names(scope, &[&scope.root]);
        Ok(())
    }

    /// What rename(2) says of a target. One that it would replace is no part of the transaction, and stays: EBUSY.
    fn must_be_free_for_a_top(
        &self,
        parent: &Arc<Object<B>>,
        name: &OsStr,
        flags: RenameFlags,
    ) -> Result<(), Errno> {
        if matches!(self.find_top_name(parent, name), TopName::Reserved) {
            return Err(Errno::BUSY);
        }
        let target = self.find(parent, name)?;
        match target {
            None if flags.contains(RenameFlags::EXCHANGE) => Err(Errno::NOENT),
            None => Ok(()),
            Some(_) if flags.contains(RenameFlags::NOREPLACE) => Err(Errno::EXIST),
            Some(_) if flags.contains(RenameFlags::EXCHANGE) => Err(Errno::BUSY),
            Some(target) if target.kind != Kind::Dir => Err(Errno::NOTDIR),
            Some(target) if !self.entries(&target, false)?.is_empty() => Err(Errno::NOTEMPTY),
            Some(_) => Err(Errno::BUSY),
        }
    }

    fn rename_without_replacing(
        &self,
        (from, name): (&B::Inode, &OsStr),
        (to, new_name): (&B::Inode, &OsStr),
    ) -> Result<(), Errno> {
        let flags = RenameFlags::NOREPLACE;
        match self.base.rename(from, name, to, new_name, flags) {
            // Not every file system can do without replacing.
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => {
                if staging::find(&self.base, to, new_name)?.is_some() {
                    return Err(Errno::EXIST);
                }
                let flags = RenameFlags::empty();
                self.base.rename(from, name, to, new_name, flags)
            }
            renamed => renamed,
        }
    }

    // ---- names on record ---------------------------------------------------------------------

    /// Takes down, durably, that the top may have this name, too.
    fn note_name(&self, scope: &Scope<B>, name: &OsStr) -> Result<(), Errno> {
        let place = format!("tx-{}", scope.serial);
        let log = self.load_record(&scope.dir, &place, staging::NAMES);
        let log = log.map_err(|_| Errno::IO)?;
        let noted = log.and_then(|log| log.entries.into_iter().next());
        let noted = noted.map(|entry| entry.after).unwrap_or_default();
        let mut names: Vec<OsString> = noted
            .into_iter()
            .map(|(_, name)| OsString::from_vec(name))
            .collect();
        if names.iter().any(|known| known == name) {
            return Ok(());
        }
        names.push(name.to_owned());
        self.write_names(scope, scope.root.key, &names)?;
        // In shadow mode a crash must find the old name or the new one.
        let parent = scope.top.parent().filter(|_| scope.shadow.is_some());
        let below = parent.map(|parent| parent.inner.read().inode(&self.base));
        below
            .transpose()?
            .map_or(Ok(()), |dir| self.base.sync_dir(&dir))?;
        self.base.sync_dir(&scope.dir)
    }

    /// `tx-N/names`: a log of one entry, the top, whose parent has number 0.
    fn write_names(
        &self,
        scope: &Scope<B>,
        (device, ino): Key,
        names: &[OsString],
    ) -> Result<(), Errno> {
        let identity = Identity {
            ino,
            elsewhere: device != self.device(),
        };
        let place = |name: &OsString| (0, name.as_bytes().to_vec());
        let before = scope.top.names().before;
        let entry = Entry {
            before: before.iter().map(place).collect(),
            after: names.iter().map(place).collect(),
            ..Entry::new(ino, identity, true)
        };
        let log = ChangeLog {
            scope: scope.path.clone(),
            entries: vec![entry],
            ..ChangeLog::default()
        };
        staging::put(&self.base, &scope.dir, staging::NAMES, &log.encode())
    }

    /// Paths that the scope of a stored transaction may have had beside the one at its begin.
    pub(crate) fn stored_names(
        &self,
        dir: &B::Inode,
        place: &str,
    ) -> Result<Vec<Vec<u8>>, StoreError> {
        let log = self.load_record(dir, place, staging::NAMES)?;
        let of_log = log.iter().flat_map(|log| {
            let names = log.entries.iter().flat_map(|entry| &entry.after);
            names.map(|(_, name)| join(parent_of(&log.scope), name))
        });
        Ok(of_log.collect())
    }

    /// What is to be done to the top when a transaction in shadow mode, stored in `dir`, is undone; `None`: nothing.
    pub(crate) fn find_top_undo(
        &self,
        dir: &B::Inode,
        place: &str,
        kept: &B::Inode,
    ) -> Result<Option<TopUndo<B>>, StoreError> {
        let Some(log) = self.load_record(dir, place, staging::NAMES)? else {
            return Ok(None);
        };
        let Some(entry) = log.entries.first() else {
            return Ok(None);
        };
        let parent = self.directory_at(parent_of(&log.scope))?;
        let name_of = |(_, name): &(u64, Vec<u8>)| name.clone();
        let names: Vec<Vec<u8>> = entry.after.iter().map(name_of).collect();
        let before = entry.before.first().map(name_of);
        let ino = entry.identity.ino;
        // A rename under way has taken it to where removed objects are kept.
        let kept_name = ino.to_string().into_bytes();
        let in_parent = names.iter().chain(&before).map(|name| (&parent, name));
        let mut root = None;
        for (dir, name) in in_parent.chain([(kept, &kept_name)]) {
            let found = staging::find(&self.base, dir, OsStr::from_bytes(name))?;
            root = root.or(found.filter(|(_, attr)| attr.ino == ino));
        }
        Ok(Some(TopUndo {
            parent_ino: self.base.attr(&parent)?.ino,
            parent,
            root: root.map(|(inode, _)| inode),
            ino,
            before,
            names,
        }))
    }

    /// A directory of the backing.
    pub(crate) fn directory_at(&self, path: &[u8]) -> Result<B::Inode, Errno> {
        let mut at = self.base.root();
        for name in path.split(|&b| b == b'/').filter(|name| !name.is_empty()) {
            at = self.base.lookup(&at, OsStr::from_bytes(name))?.0;
        }
        Ok(at)
    }

    // ---- recovered transactions --------------------------------------------------------------

    /// The top of a transaction that an earlier firnd prepared, in `dir`. One that is still to be made is staged.
    pub(crate) fn recovered_root(
        &self,
        dir: &B::Inode,
        log: &ChangeLog,
    ) -> Result<Arc<Object<B>>, StoreError> {
        let change = log.top.as_ref();
        // In shadow mode the backing has the name that the log gives.
        let path = match change {
            Some(change) if change.entry.is_none() => &change.path_after,
            _ => &log.scope,
        };
        let entry = change.and_then(|change| {
            let number = change.entry.filter(|_| change.is_new)?;
            log.entries.iter().find(|entry| entry.number == number)
        });
        let staged = entry.and_then(|entry| entry.new_at.as_ref());
        let above = if staged.is_some() {
            parent_of(path)
        } else {
            path
        };
        let mut root = Arc::clone(self.top());
        for name in above.split(|&b| b == b'/').filter(|name| !name.is_empty()) {
            let name = OsStr::from_bytes(name);
            let parent = root.inner.read().inode(&self.base)?;
            let (inode, attr) = self.base.lookup(&parent, name)?;
            root = self.tree.intern(inode, &attr, &root, name);
        }
        let Some((staging_dir, name)) = staged else {
            return Ok(root);
        };
        let new = staging::must_find_dir(&self.base, dir, staging::NEW)?;
        let staging_dir = staging::must_find_dir(&self.base, &new, staging_dir)?;
        let (inode, attr) = self.base.lookup(&staging_dir, OsStr::new(name))?;
        let inner = Inner {
            base: Some(inode),
            change: None,
        };
        let location = last_name(path).map(|name| (root, name));
        let key = (attr.dev, attr.ino);
        // Nobody finds it before the commit, so it is not taken up.
        Ok(Arc::new(Object::new(key, Kind::Dir, inner, location)))
    }

    /// A log of before is applied, and the top has the name that it gives.
    pub(crate) fn settle_top(&self, scope: &Scope<B>) {
        let names = scope.top.names();
        if let (Some(parent), Some(name)) = (scope.top.parent(), &names.after) {
            scope.root.move_to(parent, name);
        }
    }

    /// The transaction is aborted: the top has the name that it had.
    pub(crate) fn put_top_back(&self, scope: &Scope<B>) {
        let names = scope.top.names();
        if let (Some(parent), Some(name)) = (scope.top.parent(), &names.before) {
            scope.root.move_to(parent, name);
        }
    }
}
