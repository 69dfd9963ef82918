//! Creation and renames of the directory that a transaction covers.
//!
//! What a transaction covers is its *scope*; the uppermost directory is its *top*. For example, a transaction covers
//! `runs/7` and all below it: `runs/7` is the top. Its name `7` is an entry of the parent `runs`, which the transaction
//! does not cover. A transaction may create its top ([`TransactionalBacking::begin_created`]), and programs may rename
//! the top in its parent while the transaction is open.
//!
//! * In buffer mode the backing (the directory below the mount) has neither the new top nor the new name before the
//!   commit. [`crate::top_overlay`] shows the name to programs, and the change log has it as an entry of the parent.
//! * In shadow mode creation and renames are done in the backing at once, and an abort undoes them.
//!
//! Invariants
//! * The top stays in its parent, and the parent stays in its place; other renames fail with EBUSY.
//! * While the transaction is open, no other object gets a name that the top has or had.
//! * Each name of the top is durable in `tx-N/names` before the top takes it. A recovery therefore finds the top. After
//!   an abort, an arena (memory with data that is not in the backing yet) drops data below any of these names.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;

use firn_backing::{Backing, Caller, Errno, Kind, RenameFlags, Time};

use super::begin::{NOT_RECOVERED, NewTransaction};
use super::handle::Open;
use crate::change_log::{ChangeLog, Entry, EntryName, Identity, StagedPath};
use crate::error::{BeginError, ScopeError, StoreError};
use crate::lower_backing::LowerBacking;
use crate::namespace::{NameAt, Namespace};
use crate::object::{Change, Object, ObjectKey, ObjectState};
use crate::paths::{join, last_name, names_in, parent_of};
use crate::recovery::StoredScopes;
use crate::scope::{Scope, ScopeTop, Stage, TopNames};
use crate::staging;
use crate::top_overlay::TopName;
use crate::transaction::apply_commit::DecidedCommits;
use crate::transactional::TransactionalBacking;
use crate::uses::Area;

/// Number of a new top's change in its transaction, which is also its name in the staging directory.
const NEW_TOP_NUMBER: u64 = 1;

/// Object number of the top's parent in the file `tx-N/names`.
const PARENT_NUMBER: u64 = 0;

/// Bits of a mode that mkdir(2) uses: permissions and the sticky bit.
const MKDIR_MODE_BITS: u32 = 0o1777;

/// What an undo in shadow mode needs to restore the old name of a top, or to remove a top that the transaction created.
pub(crate) struct TopUndo<B: Backing> {
    /// The parent directory.
    pub(crate) parent: B::Inode,
    /// Inode number of the parent.
    pub(crate) parent_ino: u64,
    /// The top, if it still exists.
    pub(crate) root: Option<B::Inode>,
    /// Inode number of the top.
    pub(crate) ino: u64,
    /// Name of the top before the transaction; `None` if the transaction created it.
    pub(crate) before: Option<Vec<u8>>,
    /// Names that the top may have now.
    pub(crate) names: Vec<Vec<u8>>,
}

/// Owner and mode of a top that a transaction creates.
#[derive(Clone, Copy, Debug)]
pub struct TopMaker<'a> {
    /// The client that becomes the owner.
    pub caller: &'a Caller,
    /// Permission bits, after the umask was applied.
    pub mode: u32,
}

/// A top that a transaction creates.
#[derive(Clone, Copy)]
struct NewTop<'a, B: Backing> {
    /// The directory that gets the top.
    parent: &'a Arc<Object<B>>,
    /// Name of the top in that directory.
    name: &'a OsStr,
    /// Path of the top, relative to the backing.
    path: &'a [u8],
    maker: TopMaker<'a>,
}

impl<B: Backing> TopUndo<B> {
    /// Returns the inode number of the top if it existed before the transaction.
    pub(crate) fn old_ino(&self) -> Option<u64> {
        self.before.is_some().then_some(self.ino)
    }
}

impl<B: Backing> LowerBacking<B> {
    /// Renames an object in the backing, from a name in one directory to a name in another; fails with EEXIST if the
    /// new name exists.
    fn rename_without_replacing(
        &self,
        (old_dir, old_name): (&B::Inode, &OsStr),
        (new_dir, new_name): (&B::Inode, &OsStr),
    ) -> Result<(), Errno> {
        let rename = |flags| {
            self.base
                .rename(old_dir, old_name, new_dir, new_name, flags)
        };
        match rename(RenameFlags::NOREPLACE) {
            // Some file systems lack RENAME_NOREPLACE, so the target is looked up first. A file that another program
            // creates between the look-up and the rename is replaced.
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => {
                if staging::find(&self.base, new_dir, new_name)?.is_some() {
                    return Err(Errno::EXIST);
                }
                rename(RenameFlags::empty())
            }
            renamed => renamed,
        }
    }

    // ---- recorded names ----------------------------------------------------------------------

    /// Adds a name to `tx-N/names` durably: a new name of the top (the directory that the transaction covers), or one
    /// more name that the transaction covers. Does nothing if the file already has the name.
    pub(super) fn record_name(&self, scope: &Scope<B>, name: &OsStr) -> Result<(), Errno> {
        let dir_name = format!("tx-{}", scope.serial);
        // The caller makes a rename or a similar call, which can only report an errno.
        let log = self
            .load_record(&scope.dir, &dir_name, staging::NAMES)
            .map_err(|_| Errno::IO)?;
        // The file is a change log with one entry. Its names `after` are the names that were added so far.
        let entry = log.as_ref().and_then(|log| log.entries.first());
        let mut names: Vec<OsString> = entry
            .into_iter()
            .flat_map(|entry| &entry.after)
            .map(|entry_name| OsString::from_vec(entry_name.name.clone()))
            .collect();
        if names.iter().any(|recorded| recorded == name) {
            return Ok(());
        }
        names.push(name.to_owned());
        self.write_names(scope, scope.root.key, &names)?;
        // In shadow mode a recovery must find the old name or the new one, so earlier renames are synced as well.
        if let Some(parent) = scope.top.parent()
            && scope.shadow.is_some()
        {
            self.base.sync_dir(&parent.inode(&self.base)?)?;
        }
        self.base.sync_dir(&scope.dir)
    }

    /// Stores names of a transaction in the file `tx-N/names`, as a change log of one entry. They are the names that
    /// its uppermost directory `top` has or had, or further names in `top` that it covers. Does not sync the directory.
    pub(super) fn write_names(
        &self,
        scope: &Scope<B>,
        top: ObjectKey,
        names: &[OsString],
    ) -> Result<(), Errno> {
        let identity = Identity {
            ino: top.ino,
            elsewhere: top.dev != self.device,
        };
        let entry_name = |name: &OsString| EntryName::new(PARENT_NUMBER, name.as_bytes());
        let before = scope.top.names().before;
        let entry = Entry {
            before: before.iter().map(entry_name).collect(),
            after: names.iter().map(entry_name).collect(),
            ..Entry::new(top.ino, identity, true)
        };
        let log = ChangeLog {
            scope: scope.path.clone(),
            entries: vec![entry],
            ..ChangeLog::default()
        };
        staging::replace_file_unsynced(&self.base, &scope.dir, staging::NAMES, &log.encode())
    }

    /// Returns the paths that the scope of a stored transaction may have had, besides its path at the begin.
    pub(crate) fn stored_names(
        &self,
        dir: &B::Inode,
        dir_name: &str,
    ) -> Result<Vec<Vec<u8>>, StoreError> {
        let Some(log) = self.load_record(dir, dir_name, staging::NAMES)? else {
            return Ok(Vec::new());
        };
        Ok(log
            .entries
            .iter()
            .flat_map(|entry| &entry.after)
            .map(|entry_name| join(parent_of(&log.scope), &entry_name.name))
            .collect())
    }

    /// Returns what an undo of the transaction stored in `transaction_dir` does to its top, the directory that it
    /// covers. Returns `None` if the transaction neither created nor renamed the top.
    ///
    /// The transaction is in shadow mode: its changes are made at once. `kept_dir` is its directory of removed objects.
    pub(crate) fn find_top_undo(
        &self,
        transaction_dir: &B::Inode,
        dir_name: &str,
        kept_dir: &B::Inode,
    ) -> Result<Option<TopUndo<B>>, StoreError> {
        let Some(log) = self.load_record(transaction_dir, dir_name, staging::NAMES)? else {
            return Ok(None);
        };
        let Some(entry) = log.entries.first() else {
            return Ok(None);
        };
        let parent = self.directory_at(parent_of(&log.scope))?;
        // The entry has the old name of the top as `before`, and each later name as `after`.
        let name_of = |entry_name: &EntryName| entry_name.name.clone();
        let names: Vec<Vec<u8>> = entry.after.iter().map(name_of).collect();
        let before = entry.before.first().map(name_of);
        let ino = entry.identity.ino;
        // An interrupted undo may have moved the top to `kept/`, where it has its inode number as its name.
        let kept_name = ino.to_string().into_bytes();
        let names_in_parent = names.iter().chain(&before).map(|name| (&parent, name));
        let places = names_in_parent.chain([(kept_dir, &kept_name)]);
        // The first of these places that leads to the top counts.
        let mut root = None;
        for (dir, name) in places {
            if let Some((inode, attr)) = staging::find(&self.base, dir, OsStr::from_bytes(name))?
                && attr.ino == ino
            {
                root = root.or(Some(inode));
            }
        }
        Ok(Some(TopUndo {
            parent_ino: self.base.attr(&parent)?.ino,
            parent,
            root,
            ino,
            before,
            names,
        }))
    }

    /// Returns the inode at a path of the backing.
    pub(crate) fn directory_at(&self, path: &[u8]) -> Result<B::Inode, Errno> {
        let mut inode = self.base.root();
        for name in names_in(path) {
            (inode, _) = self.base.lookup(&inode, name)?;
        }
        Ok(inode)
    }
}

impl<B: Backing> Namespace<B> {
    // ---- renaming the top --------------------------------------------------------------------

    /// Renames the top of a transaction, the uppermost directory that it covers, in its parent. Returns the result of
    /// rename(2).
    ///
    /// Returns `None` if this is no such rename, because `old` is not the name of a top or `new` is in another
    /// directory. The caller then treats the call as an ordinary rename.
    pub(crate) fn rename_top(
        &self,
        old: NameAt<'_, B>,
        new: NameAt<'_, B>,
        flags: RenameFlags,
    ) -> Option<Result<(), Errno>> {
        let parent = old.dir;
        if self.scopes.is_empty() || !Arc::ptr_eq(parent, new.dir) {
            return None;
        }
        let names_guard = self.admission.share_names(parent);
        let scope = self.scope_with_top(old)?;
        // The quiesce waits for all uses of these names, so this one ends first.
        drop(names_guard);
        let _quiet = self.tree.quiesce(vec![
            Area::Tree(Arc::clone(&scope.root)),
            Area::Dir(Arc::clone(parent)),
        ]);
        // Another thread may have changed the names before the areas were quiet, so the top is looked up once more.
        let present_scope = self.scope_with_top(old)?;
        if !Arc::ptr_eq(&present_scope, &scope) {
            return Some(Err(Errno::BUSY));
        }
        Some(self.rename_top_of(&scope, parent, new.name, flags))
    }

    /// Returns the scope whose top has this name. Returns `None` if there is no such scope, or if the look-up fails.
    fn scope_with_top(&self, NameAt { dir, name }: NameAt<'_, B>) -> Option<Arc<Scope<B>>> {
        let object = self.find_name(dir, name).ok().flatten()?;
        self.scopes
            .find(|scope| scope.names_in_root.is_none() && Arc::ptr_eq(&scope.root, &object))
    }

    /// Renames the top of the transaction `scope`, the directory that it covers, to `new_name` in `parent`, with the
    /// errors of rename(2). The caller has quiesced names and data: no program changes them meanwhile.
    fn rename_top_of(
        &self,
        scope: &Arc<Scope<B>>,
        parent: &Arc<Object<B>>,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<(), Errno> {
        let old_names = scope.top.names();
        let changes_name = self.check_top_rename(scope, &old_names, parent, new_name, flags)?;
        if !changes_name {
            return Ok(());
        }
        // The name is stored first, so that a recovery finds the top under it.
        self.lower.record_name(scope, new_name)?;
        // In shadow mode the backing is changed at once; otherwise the commit renames the directory.
        if scope.shadow.is_some() {
            let parent_inode = parent.inode(&self.lower.base)?;
            let old_name = old_names.now.as_deref().ok_or(Errno::STALE)?;
            self.lower
                .rename_without_replacing((&parent_inode, old_name), (&parent_inode, new_name))?;
        }
        {
            let mut names = scope.top.names.lock();
            names.now = Some(new_name.to_owned());
            names.changed_at = Some(Time::now());
        }
        scope.root.move_to(parent, new_name);
        self.scopes.count_changed_tops();
        scope.check_names(&[&scope.root]);
        Ok(())
    }

    /// Checks a rename of the top of `scope` to `new_name` in `parent`, and fails with the errno of rename(2) if it is
    /// not possible. `old_names` are the names of the top. Returns false if the top has the new name already.
    fn check_top_rename(
        &self,
        scope: &Scope<B>,
        old_names: &TopNames,
        parent: &Arc<Object<B>>,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<bool, Errno> {
        let supported_flags = RenameFlags::EXCHANGE | RenameFlags::NOREPLACE;
        // The two flags exclude each other.
        if flags == supported_flags || !supported_flags.contains(flags) {
            return Err(Errno::INVAL);
        }
        if old_names.now.as_deref() == Some(new_name) {
            return if flags.contains(RenameFlags::NOREPLACE) {
                Err(Errno::EXIST)
            } else {
                Ok(false)
            };
        }
        // The name at the begin remains free for the top. So it can be taken back, and there is nothing to exchange.
        let is_name_at_begin = old_names.at_begin.as_deref() == Some(new_name);
        if !is_name_at_begin {
            self.must_be_free_for_a_top(parent, new_name, flags)?;
        } else if flags.contains(RenameFlags::EXCHANGE) {
            return Err(Errno::NOENT);
        }
        // Several hosts identify the transaction by its path, and changes wait once it is prepared.
        if self.lower.members.is_some() || !scope.is_open() || scope.stage() != Stage::Open {
            return Err(Errno::BUSY);
        }
        Ok(true)
    }

    /// Checks that a transaction's uppermost directory (its top) may take `name` in `parent`, and returns the errno of
    /// rename(2) if not.
    ///
    /// A target that rename(2) would replace gives EBUSY: the target is not part of the transaction, so an abort could
    /// not restore it.
    fn must_be_free_for_a_top(
        &self,
        parent: &Arc<Object<B>>,
        name: &OsStr,
        flags: RenameFlags,
    ) -> Result<(), Errno> {
        // A reserved name is hidden until a transaction ends, because the transaction may need it.
        if matches!(
            self.top_overlay.find_top_name(parent, name),
            TopName::Reserved
        ) {
            return Err(Errno::BUSY);
        }
        let target = self.find_name(parent, name)?;
        match target {
            None if flags.contains(RenameFlags::EXCHANGE) => Err(Errno::NOENT),
            None => Ok(()),
            Some(_) if flags.contains(RenameFlags::NOREPLACE) => Err(Errno::EXIST),
            Some(_) if flags.contains(RenameFlags::EXCHANGE) => Err(Errno::BUSY),
            Some(target) if target.kind != Kind::Dir => Err(Errno::NOTDIR),
            Some(target) if !self.dir_listings.list_entries(&target)?.is_empty() => {
                Err(Errno::NOTEMPTY)
            }
            Some(_) => Err(Errno::BUSY),
        }
    }
}

impl<B: Backing> StoredScopes<B> {
    // ---- recovered transactions --------------------------------------------------------------

    /// Returns the directory that a recovered transaction covers (its top). An earlier firnd, the server of the mount
    /// before, prepared the transaction.
    ///
    /// `dir` is the transaction's own directory, and `log` its change log. If the transaction creates the top, and not
    /// in shadow mode (changes are made at once), the top is still in `dir`.
    pub(crate) fn recovered_root(
        &self,
        dir: &B::Inode,
        log: &ChangeLog,
    ) -> Result<Arc<Object<B>>, StoreError> {
        let top_change = log.top.as_ref();
        // A changed name without an entry is one of shadow mode: the backing has it already.
        let path = match top_change {
            Some(top_change) if top_change.entry.is_none() => &top_change.path_after,
            _ => &log.scope,
        };
        // A new top with an entry is one of buffer mode: it is staged, at the path in the entry.
        let new_top_number = match top_change {
            Some(top_change) if top_change.is_new => top_change.entry,
            _ => None,
        };
        let new_top_entry = new_top_number
            .and_then(|number| log.entries.iter().find(|entry| entry.number == number));
        match new_top_entry.and_then(|entry| entry.new_at.as_ref()) {
            Some(staged_path) => self.staged_root(dir, path, staged_path),
            None => Ok(self.intern_path(path)?),
        }
    }

    /// Returns the directory that the commit of the transaction in `dir` is still to create at `path`. Until then it is
    /// in the transaction's directory, at `staged_path`.
    fn staged_root(
        &self,
        dir: &B::Inode,
        path: &[u8],
        staged_path: &StagedPath,
    ) -> Result<Arc<Object<B>>, StoreError> {
        let parent = self.intern_path(parent_of(path))?;
        let new = staging::must_find_dir(&self.lower.base, dir, staging::NEW)?;
        let staging_dir = staging::must_find_dir(&self.lower.base, &new, &staged_path.dir)?;
        let (inode, attr) = self
            .lower
            .base
            .lookup(&staging_dir, OsStr::new(&staged_path.name))?;
        let state = ObjectState {
            base: Some(inode),
            change: None,
        };
        let location = last_name(path).map(|name| (parent, name));
        let key = ObjectKey::from_attr(&attr);
        // Programs cannot look the object up before the commit, so it is not inserted into the table.
        Ok(Arc::new(Object::new(key, Kind::Dir, state, location)))
    }
}

impl<B: Backing> DecidedCommits<B> {
    /// After the log of an earlier firnd is applied, moves the top's object to the name that the log specifies.
    pub(crate) fn move_top_to_name_after_commit(&self, scope: &Scope<B>) {
        let names = scope.top.names();
        if let (Some(parent), Some(name)) = (scope.top.parent(), &names.after) {
            scope.root.move_to(parent, name);
        }
    }
}

impl<B: Backing> StoredScopes<B> {
    /// Moves the directory that a new transaction creates from the transaction's own directory to its place in the
    /// backing. The transaction must be stored already.
    ///
    /// Does nothing if the directory existed before. Does nothing either in buffer mode, in which the commit moves the
    /// directory; in shadow mode changes are made at once.
    pub(crate) fn place_new_top(&self, scope: &Scope<B>) -> Result<(), Errno> {
        let names = scope.top.names();
        let (Some(parent), Some(name)) = (scope.top.parent(), &names.now) else {
            return Ok(());
        };
        if scope.shadow.is_none() || names.before.is_some() {
            return Ok(());
        }
        let parent_inode = parent.inode(&self.lower.base)?;
        let staging_dir = scope
            .staging_dir_for(&self.lower.base, &parent_inode)?
            .inode;
        // The parent's names are quiet, so only a change that bypasses Firn can have taken the name.
        let staged_name = NEW_TOP_NUMBER.to_string();
        self.lower.rename_without_replacing(
            (&staging_dir, OsStr::new(&staged_name)),
            (&parent_inode, name),
        )
    }

    /// Inserts a top that its transaction created into the table of objects.
    pub(crate) fn insert_new_top(&self, scope: &Scope<B>) {
        if scope.top.parent().is_some() && scope.top.names().before.is_none() {
            self.tree.insert(&scope.root);
        }
    }
}

impl<B: Backing> TransactionalBacking<B> {
    // ---- making the top ----------------------------------------------------------------------

    /// Begins a transaction that creates its own directory `path` in `parent`, and returns its handle.
    ///
    /// Fails if `path` exists, if `parent` is in a transaction or is not a directory, or with several hosts.
    pub fn begin_created(
        &self,
        parent: &Arc<Object<B>>,
        path: &[u8],
        maker: TopMaker<'_>,
    ) -> Result<Open<'_, B>, BeginError> {
        self.apply_commits_above(parent)?;
        // From here on no program changes the names in the parent.
        let _quiet = self.tree.quiesce(vec![Area::Dir(Arc::clone(parent))]);
        let name = self.name_of_new_top(parent, path)?;
        // A removed directory of this path may have left a history of commits, which must not apply to the new
        // directory.
        self.history.remove_scope_history(path)?;
        // The top is the directory that the transaction covers.
        let new_top = NewTop {
            parent,
            name: &name,
            path,
            maker,
        };
        self.open_scope(path, None, |new| {
            // In shadow mode (changes are made at once), this makes directories for the saved old state.
            self.make_shadow(&new, path)?;
            self.make_scope_with_new_top(&new, new_top)
        })
    }

    /// Returns the error with which [`TransactionalBacking::begin_created`] would fail now for every caller, or `Ok`.
    pub fn can_begin_created(
        &self,
        parent: &Arc<Object<B>>,
        path: &[u8],
    ) -> Result<(), BeginError> {
        self.apply_commits_above(parent)?;
        let _names = self.admission.share_names(parent);
        self.name_of_new_top(parent, path).map(drop)
    }

    /// Returns the name of the directory at `path` if a transaction can create it in `parent`, or the reason that it
    /// cannot. The caller is admitted to the names of `parent`: no other thread changes them meanwhile.
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
        if self.lower.members.is_some() {
            return Err(BeginError::NotAmongHosts);
        }
        if parent.is_gone() {
            return Err(ScopeError::Missing.into());
        }
        let overlapping_scope = self
            .scopes
            .scope_of(parent)
            .or_else(|| self.scopes.at_path(path));
        if let Some(scope) = overlapping_scope {
            return Err(BeginError::Overlaps {
                scope: scope.path_now().as_slice().into(),
            });
        }
        if self.namespace.is_hidden(parent, &name)
            || self.namespace.find_name(parent, &name)?.is_some()
        {
            return Err(BeginError::Exists);
        }
        Ok(name)
    }

    /// Applies the decided commits of scopes that contain `dir`, because a new scope must not overlap them.
    fn apply_commits_above(&self, dir: &Arc<Object<B>>) -> Result<(), StoreError> {
        for scope in self.scopes.all() {
            if dir.is_below(&scope.root) && scope.decided_id().is_some() {
                self.commits.apply_commit(&scope)?;
            }
        }
        Ok(())
    }

    /// Returns a [`Scope`] for a transaction that creates its own directory (the top). Creates the top in `tx-N`, the
    /// directory of the transaction's files, and stores the mark `open` there, by which a recovery finds the
    /// transaction.
    fn make_scope_with_new_top(
        &self,
        new: &NewTransaction<'_, B>,
        new_top: NewTop<'_, B>,
    ) -> Result<Scope<B>, BeginError> {
        let NewTop {
            parent, name, path, ..
        } = new_top;
        // The top is made in a staging directory of the scope, so the scope comes first. Until the top exists, the
        // parent takes its place in `root`.
        let mut scope = self.stored_scopes.new_scope(
            new.serial,
            Arc::clone(parent),
            path.to_vec(),
            new.dir.clone(),
            NOT_RECOVERED,
        )?;
        let number = scope.next_number();
        assert_eq!(number, NEW_TOP_NUMBER, "the top is made first");
        let root = self.make_staged_top(&scope, new_top)?;
        scope.top = ScopeTop::new(&root, path, None, scope.shadow.is_some());
        {
            let mut names = scope.top.names.lock();
            // The backing does not have the top.
            names.before = None;
            names.changed_at = Some(Time::now());
        }
        match &scope.shadow {
            // In buffer mode the commit moves the directory to its name, as any new object.
            None => drop(scope.changed.lock().insert(number, Arc::clone(&root))),
            // In shadow mode it moves there now, so an undo must find its name.
            Some(shadow) => {
                shadow.add_new(root.key.ino);
                self.lower
                    .write_names(&scope, root.key, &[name.to_owned()])?;
            }
        }
        scope.root = root;
        // After an abort, this note says which arena (memory with data that is not in the backing yet) must drop data.
        self.arena_notes.record_arena(new.dir)?;
        staging::replace_file_unsynced(&self.lower.base, new.dir, staging::OPEN, path)?;
        Ok(scope)
    }

    /// Creates the directory that a new transaction creates and covers (its *top*), first in the transaction's own
    /// directory. `scope` is the transaction.
    ///
    /// In shadow mode (changes are made at once) the top counts as an object of the backing, otherwise as a change of
    /// the transaction.
    fn make_staged_top(
        &self,
        scope: &Scope<B>,
        new_top: NewTop<'_, B>,
    ) -> Result<Arc<Object<B>>, Errno> {
        let NewTop {
            parent,
            name,
            maker,
            ..
        } = new_top;
        let parent_inode = parent.inode(&self.lower.base)?;
        let staging_dir = scope.staging_dir_for(&self.lower.base, &parent_inode)?;
        let staged_name = NEW_TOP_NUMBER.to_string();
        let (inode, attr) = self.lower.base.mkdir(
            maker.caller,
            &staging_dir.inode,
            OsStr::new(&staged_name),
            maker.mode & MKDIR_MODE_BITS,
        )?;
        let state = if scope.shadow.is_some() {
            ObjectState {
                base: Some(inode),
                change: None,
            }
        } else {
            let staged_copy = staging_dir.into_copy(staged_name);
            ObjectState {
                base: None,
                change: Some(Box::new(Change {
                    staged_copy: Some(staged_copy),
                    ..Change::new(NEW_TOP_NUMBER, None)
                })),
            }
        };
        let key = ObjectKey::from_attr(&attr);
        let location = Some((Arc::clone(parent), name.to_owned()));
        Ok(Arc::new(Object::new(key, Kind::Dir, state, location)))
    }
}

impl<B: Backing> Scope<B> {
    /// After an abort, moves the top's object back to its name before the transaction.
    pub(crate) fn move_top_back(&self) {
        let names = self.top.names();
        if let (Some(parent), Some(name)) = (self.top.parent(), &names.before) {
            self.root.move_to(parent, name);
        }
    }
}
