//! [`Namespace`]: look-ups of names, and creates, renames, links and removals, with the changes of open transactions.
//!
//! Terms
//! * The *backing* is the directory below the mount. A *transaction* covers a directory in it, its *scope*.
//! * In *buffer mode* a change of names is recorded in tables in memory until the commit. The errors are those that the
//!   backing would return.
//! * In *shadow mode* the change goes to the backing at once, after the old state was saved. Outside of transactions it
//!   goes to the backing, too.
//! * A caller is *admitted to the names* of a directory if it has a guard of [`crate::waiting`] for the directory. No
//!   other thread changes these names meanwhile.

use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Attr, Backing, Errno, Kind, PlacementHint, Remove, RenameFlags, Result, Time};

use crate::attributes::Objects;
use crate::claim::ExclusiveValue;
use crate::link_counts::LinkCounts;
use crate::listing::DirListings;
use crate::lower_backing::LowerBacking;
use crate::object::{Change, NameChange, Object, ObjectKey, ObjectState, StagedCopy};
use crate::scope::Scope;
use crate::scopes::Scopes;
use crate::shadow::save::Originals;
use crate::shadow::{NO_BYTES, Shadow};
use crate::staging;
use crate::top_overlay::{TopName, TopOverlay};
use crate::tree::{NameChangeGuard, Tree};
use crate::waiting::Admission;

/// Where in the backing an object is made.
pub(crate) struct NewObjectLocation<'a, B: Backing> {
    /// The directory of the new name, or the staging directory of a transaction.
    pub(crate) dir: &'a B::Inode,
    /// Name of the object in that directory.
    pub(crate) name: &'a OsStr,
    /// Lane (I/O server) for the data of a file.
    pub(crate) placing: PlacementHint<'a, B::Inode>,
}

/// Looks up and changes names in directories.
pub(crate) struct Namespace<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) tree: Arc<Tree<B>>,
    pub(crate) scopes: Arc<Scopes<B>>,
    pub(crate) originals: Arc<Originals<B>>,
    pub(crate) link_counts: Arc<LinkCounts<B>>,
    pub(crate) top_overlay: Arc<TopOverlay<B>>,
    pub(crate) admission: Arc<Admission<B>>,
    pub(crate) objects: Arc<Objects<B>>,
    pub(crate) dir_listings: Arc<DirListings<B>>,
}

impl<B: Backing> Namespace<B> {
    pub(crate) fn new(objects: &Arc<Objects<B>>, dir_listings: &Arc<DirListings<B>>) -> Self {
        Self {
            lower: Arc::clone(&objects.lower),
            tree: Arc::clone(&objects.admission.tree),
            scopes: Arc::clone(&objects.admission.scopes),
            originals: Arc::clone(&objects.originals),
            link_counts: Arc::clone(&objects.link_counts),
            top_overlay: Arc::clone(&objects.top_overlay),
            admission: Arc::clone(&objects.admission),
            objects: Arc::clone(objects),
            dir_listings: Arc::clone(dir_listings),
        }
    }

    /// Returns whether a name is that of Firn's own directory, which programs do not see.
    pub(crate) fn is_hidden(&self, parent: &Arc<Object<B>>, name: &OsStr) -> bool {
        parent.parent().is_none() && name == staging::FIRN_DIR
    }

    /// Returns the object of a name and its attributes as programs see them, with the changes of an open transaction.
    /// Fails with NOENT if there is none.
    pub(crate) fn look_up(
        &self,
        parent: &Arc<Object<B>>,
        name: &OsStr,
    ) -> Result<(Arc<Object<B>>, Attr)> {
        // Until this guard is dropped, no thread changes the names.
        let _names = self.admission.share_names(parent);
        let Some(FoundName { object, attr }) = self.find_entry(parent, name)? else {
            return Err(Errno::NOENT);
        };
        // The attributes that the look-up returned are used unless a transaction or a hidden link changes them.
        let attr_of_backing = attr.filter(|_| self.shows_attr_of_backing(&object));
        let attr = match attr_of_backing {
            Some(attr) => attr,
            None => self.objects.read_attr(&object)?,
        };
        Ok((object, attr))
    }

    /// Returns the object of a name; `None` if there is none. The caller is admitted to the names.
    pub(crate) fn find_name(
        &self,
        parent: &Arc<Object<B>>,
        name: &OsStr,
    ) -> Result<Option<Arc<Object<B>>>> {
        let found = self.find_entry(parent, name)?;
        Ok(found.map(|found| found.object))
    }

    /// Returns the object of a name, or `None` if programs see no such name. The result has the object's attributes if
    /// the name was looked up in the backing, and not in a transaction's tables.
    ///
    /// The caller is admitted to the names of `parent`: no thread changes them meanwhile.
    fn find_entry(&self, parent: &Arc<Object<B>>, name: &OsStr) -> Result<Option<FoundName<B>>> {
        // A transaction may have created or renamed its uppermost directory, which the backing does not show yet.
        match self.top_overlay.find_top_name(parent, name) {
            TopName::Unrelated => {}
            TopName::Shown(root) => return Ok(Some(FoundName::without_attr(root))),
            TopName::Reserved => return Ok(None),
        }
        // Names that an open transaction has changed come first.
        let parent_state = parent.state.acquire_shared();
        if let Some(change) = &parent_state.read().change
            && let Some(name_change) = change.names.get(name)
        {
            return Ok(name_change.object.clone().map(FoundName::without_attr));
        }
        if self.is_hidden(parent, name) {
            return Ok(None);
        }
        let dir = match parent_state.base() {
            Some(dir) => dir,
            // The staged copy of a new directory is empty, but a look-up there returns the right error for an invalid
            // name.
            None => parent_state.inode(&self.lower.base)?,
        };
        let Some((inode, attr)) = staging::find(&self.lower.base, &dir, name)? else {
            return Ok(None);
        };
        let object = self
            .tree
            .intern(&self.lower.base, inode, &attr, parent, name);
        Ok(Some(FoundName {
            object,
            attr: Some(attr),
        }))
    }

    /// Returns whether the attributes that the backing just returned for an object are those that programs see.
    fn shows_attr_of_backing(&self, object: &Object<B>) -> bool {
        let is_changed = object.state.acquire_shared().read().change.is_some();
        !is_changed
            && !object.may_hide_links()
            && !object.is_gone()
            && !self.top_overlay.has_tops_in(object)
    }

    /// Makes a new object: calls `make` with the location in the backing where `make` must create the object. Returns
    /// the object and its attributes.
    ///
    /// If a transaction keeps its changes back until the commit (buffer mode), the object is made in the transaction's
    /// own directory, and only the tables in memory have its name. Otherwise it is made under its name. The order of
    /// the checks decides which error a program gets if several apply.
    pub(crate) fn make_object(
        &self,
        parent: &Arc<Object<B>>,
        name: &OsStr,
        make: impl FnOnce(&NewObjectLocation<'_, B>) -> Result<(B::Inode, Attr)>,
    ) -> Result<(Arc<Object<B>>, Attr)> {
        if self.is_hidden(parent, name) {
            return Err(Errno::PERM);
        }
        let (_names, scope) = self
            .admission
            .enter_name_change(&[NameAt { dir: parent, name }])?;
        if parent.is_gone() {
            return Err(Errno::NOENT);
        }
        self.top_overlay.must_not_be_top(parent, name)?;
        // In shadow mode (changes are made at once) this saves the old names of `parent`, and returns `None`.
        let Some(buffering_scope) =
            self.originals
                .save_unless_buffering(scope.clone(), parent, NO_BYTES)?
        else {
            return self.make_in_backing(parent, name, shadow_of(&scope), make);
        };
        if parent.kind != Kind::Dir {
            return Err(Errno::NOTDIR);
        }
        let existing = self.find_name(parent, name)?;
        let dir = parent.inode(&self.lower.base)?;
        if existing.is_some() {
            return Err(Errno::EXIST);
        }
        self.must_exist(parent)?;
        self.make_staged(&buffering_scope, parent, &dir, name, make)
    }

    /// Makes a new object under its name in the backing, with `make`.
    ///
    /// `shadow` is the saved old state of a transaction in shadow mode (changes are made at once), if the object
    /// belongs to one. The object is recorded there as new, so nothing is saved of it.
    fn make_in_backing(
        &self,
        parent: &Arc<Object<B>>,
        name: &OsStr,
        shadow: Option<&Shadow<B>>,
        make: impl FnOnce(&NewObjectLocation<'_, B>) -> Result<(B::Inode, Attr)>,
    ) -> Result<(Arc<Object<B>>, Attr)> {
        let dir = parent.inode(&self.lower.base)?;
        let (inode, attr) = make(&NewObjectLocation {
            dir: &dir,
            name,
            placing: PlacementHint::Named { parent: &dir, name },
        })?;
        if let Some(shadow) = shadow {
            shadow.add_new(attr.ino);
        }
        let object = self
            .tree
            .intern(&self.lower.base, inode, &attr, parent, name);
        Ok((object, attr))
    }

    /// Makes a new object in the directory of the transaction `scope`, and inserts it with its name into the tables in
    /// memory. The commit moves it to its name.
    ///
    /// `dir` is the inode of `parent`. The caller has checked that the name is free.
    fn make_staged(
        &self,
        scope: &Arc<Scope<B>>,
        parent: &Arc<Object<B>>,
        dir: &B::Inode,
        name: &OsStr,
        make: impl FnOnce(&NewObjectLocation<'_, B>) -> Result<(B::Inode, Attr)>,
    ) -> Result<(Arc<Object<B>>, Attr)> {
        let staging_dir = scope.staging_dir_for(&self.lower.base, dir)?;
        let number = scope.next_number();
        let staged_name = number.to_string();
        let (inode, attr) = make(&NewObjectLocation {
            dir: &staging_dir.inode,
            name: OsStr::new(&staged_name),
            placing: PlacementHint::Named { parent: dir, name },
        })?;
        let is_dir = attr.kind == Kind::Dir;
        let staged_copy = staging_dir.into_copy(staged_name);
        let state = ObjectState {
            base: None,
            change: Some(Box::new(Change {
                staged_copy: Some(staged_copy),
                // The name of a new file adds a link to it. Links of a directory are counted as its subdirectories.
                link_delta: i64::from(!is_dir),
                ..Change::new(number, None)
            })),
        };
        let location = Some((Arc::clone(parent), name.to_owned()));
        let lane = self.lower.base.facts(&inode).lane;
        let key = ObjectKey::from_attr(&attr);
        let object = Arc::new(Object::new(key, attr.kind, state, location).in_lane(lane));
        scope.changed.lock().insert(number, Arc::clone(&object));
        self.tree.insert(&object);
        self.record_name_change(
            scope,
            NameAt { dir: parent, name },
            OldName::Missing,
            Some(&object),
            subdirectory_count(&object),
        );
        scope.check_names(&[parent, &object]);
        // No further call of the backing is made, because it could fail although the object has its name already.
        let nlink = if is_dir { attr.nlink } else { 1 };
        Ok((object, Attr { nlink, ..attr }))
    }

    /// Fails with NOENT or STALE if a directory no longer exists.
    fn must_exist(&self, dir: &Arc<Object<B>>) -> Result<()> {
        let claimed = dir.state.acquire_shared();
        let state = claimed.read();
        match &state.change {
            Some(change) if change.is_removed => Err(Errno::NOENT),
            None if state.base.is_none() => Err(Errno::STALE),
            None if dir.is_gone() => Err(Errno::NOENT),
            _ => Ok(()),
        }
    }

    /// Records in a transaction's tables in memory that a name now leads to `object`, or to nothing if `object` is
    /// `None`. The backing gets the name at the commit. `scope` is the transaction.
    ///
    /// `old_name` says whether the name led to an object before. `added_subdirectories` is 1 if the directory got a
    /// subdirectory, -1 if it lost one, and otherwise 0.
    fn record_name_change(
        &self,
        scope: &Scope<B>,
        NameAt { dir, name }: NameAt<'_, B>,
        old_name: OldName,
        object: Option<&Arc<Object<B>>>,
        added_subdirectories: i64,
    ) {
        // No other thread changes the directory's state until `claimed` is dropped.
        let claimed = dir.state.acquire_exclusive();
        let mut state = claimed.edit();
        let is_dir_in_backing = state.base.is_some();
        let change = scope.get_or_create_change(dir, &mut state);
        let is_in_backing = match change.names.get(name) {
            Some(name_change) => name_change.is_in_backing,
            // The transaction has not changed the name before. If programs saw the name, it is in the backing.
            None => is_dir_in_backing && old_name == OldName::Exists,
        };
        if object.is_some() || is_in_backing {
            let name_change = NameChange {
                object: object.cloned(),
                is_in_backing,
                serial: scope.serial,
            };
            change.names.insert(name.to_owned(), name_change);
        } else {
            // A removed name that the backing does not have needs no entry.
            change.names.remove(name);
        }
        // The link count of a directory counts its subdirectories.
        change.link_delta += added_subdirectories;
        // If the transaction covers only some names of `dir`, several transactions share the directory's change. Each
        // one counts its own subdirectories.
        if scope.has_names_in(dir) {
            scope
                .subdirectories_in_root
                .fetch_add(added_subdirectories, Ordering::AcqRel);
        }
        change.entries_changed_at = Some(Time::now());
        if let Some(object) = object {
            object.move_to(dir, name);
        }
    }

    /// Records that `added_links` names of an object were added (removed if negative), or that one was renamed.
    fn record_link_change(&self, scope: &Scope<B>, object: &Arc<Object<B>>, added_links: i64) {
        let claimed = object.state.acquire_exclusive();
        let mut state = claimed.edit();
        let change = scope.get_or_create_change(object, &mut state);
        change.link_delta += added_links;
        change.links_changed_at = Some(Time::now());
    }

    /// Records that an object lost a name in the transaction `scope`, which keeps its changes back until the commit.
    ///
    /// If the object is new and has lost its last name, its staged copy in the transaction's directory is removed at
    /// once: it takes space, and the commit does not need it.
    fn record_lost_name(&self, scope: &Scope<B>, object: &Arc<Object<B>>) {
        // No other thread changes the object's state until `claimed` is dropped.
        let claimed = object.state.acquire_exclusive();
        let Some((number, staged_copy)) = note_lost_name(scope, object, &claimed) else {
            return;
        };
        match self.unstage(object.kind, &staged_copy) {
            Ok(inode) => {
                scope.changed.lock().remove(&number);
                object.become_nameless(&mut claimed.edit(), inode);
            }
            Err(errno) => {
                tracing::warn!(%errno, "cannot remove an object that a transaction made and removed; the end of the \
                    transaction removes it");
            }
        }
    }

    /// Removes the name of a staged object, and returns its inode, which exists until the last reference is dropped.
    fn unstage(&self, kind: Kind, copy: &StagedCopy<B>) -> Result<B::Inode> {
        let inode = copy.inode(&self.lower.base)?;
        let name = OsStr::new(&copy.path.name);
        if kind == Kind::Dir {
            self.lower.base.rmdir(&copy.staging_dir, name)?;
        } else {
            self.lower.base.unlink(&copy.staging_dir, name)?;
        }
        Ok(inode)
    }

    /// Fails with EBUSY if a scope is at or below the object, because its transaction depends on the scope's path.
    fn must_not_contain_scope(&self, object: Option<&Arc<Object<B>>>) -> Result<()> {
        match object {
            Some(object) if self.scopes.are_below(object) => Err(Errno::BUSY),
            _ => Ok(()),
        }
    }

    /// Removes a name, with the errors of unlink(2) or rmdir(2), as `what` says.
    ///
    /// A transaction that keeps its changes back until the commit only records the removal in memory. In any other case
    /// the backing, which is the directory below the mount, loses the name at once.
    pub(crate) fn remove_name(
        &self,
        parent: &Arc<Object<B>>,
        name: &OsStr,
        what: Remove,
    ) -> Result<()> {
        let name_at = NameAt { dir: parent, name };
        // Waits while a transaction of the name is prepared or being committed. The guard then keeps other threads from
        // the name.
        let (names, scope) = self.admission.enter_name_change(&[name_at])?;
        let Some(scope) = scope else {
            return self.remove_in_backing(&names, name_at, what);
        };
        if parent.kind != Kind::Dir {
            return Err(Errno::NOTDIR);
        }
        let object = self.find_name(parent, name)?.ok_or(Errno::NOENT)?;
        match (what == Remove::Dir, object.kind == Kind::Dir) {
            (true, false) => return Err(Errno::NOTDIR),
            (false, true) => return Err(Errno::ISDIR),
            (true, true) if !self.dir_listings.list_entries(&object)?.is_empty() => {
                return Err(Errno::NOTEMPTY);
            }
            _ => {}
        }
        if let Some(shadow) = &scope.shadow {
            return self.remove_name_in_shadow(&scope, shadow, name_at, &object);
        }
        self.record_name_change(
            &scope,
            name_at,
            OldName::Exists,
            None,
            -subdirectory_count(&object),
        );
        self.record_lost_name(&scope, &object);
        scope.check_names(&[parent, &object]);
        Ok(())
    }

    /// Removes a name in the backing that no transaction covers. Fails with EBUSY if a transaction is in the directory
    /// that would be removed, or begins or ends there. `names` is the guard that keeps other threads from these names.
    fn remove_in_backing(
        &self,
        names: &NameChangeGuard<'_, B>,
        NameAt { dir: parent, name }: NameAt<'_, B>,
        what: Remove,
    ) -> Result<()> {
        if what == Remove::Dir
            && let Some(object) = self.find_name(parent, name)?
        {
            names.announce_move(&object)?;
            self.must_not_contain_scope(Some(&object))?;
        }
        if self.is_hidden(parent, name) {
            return Err(Errno::NOENT);
        }
        // The name may be that of a transaction's uppermost directory, shown or hidden before its commit.
        match self.top_overlay.find_top_name(parent, name) {
            TopName::Unrelated => {}
            TopName::Shown(_) => return Err(Errno::ISDIR),
            TopName::Reserved => return Err(Errno::NOENT),
        }
        let dir = parent.inode(&self.lower.base)?;
        self.lower.base.remove(&dir, name, what)
    }

    /// Adds a further name to an object, with the errors of link(2), and returns its attributes. Fails with EXDEV if
    /// the object and the name are not in the same transaction.
    pub(crate) fn add_link(
        &self,
        object: &Arc<Object<B>>,
        parent: &Arc<Object<B>>,
        name: &OsStr,
    ) -> Result<Attr> {
        if self.is_hidden(parent, name) {
            return Err(Errno::PERM);
        }
        let (_names, scope) = self
            .admission
            .enter_name_change(&[NameAt { dir: parent, name }])?;
        if !is_same(&self.scopes.scope_of(object), &scope) {
            return Err(Errno::XDEV);
        }
        self.top_overlay.must_not_be_top(parent, name)?;
        // In shadow mode the next step saves the old state of `parent`. Both objects must have a name, which buffer
        // mode checks below, after the errors that come first there.
        if shadow_of(&scope).is_some()
            && (parent.is_gone() || self.objects.read_attr(object)?.nlink == 0)
        {
            return Err(Errno::NOENT);
        }
        // Only a transaction that keeps its changes back until the commit (buffer mode) records the link in tables.
        let Some(scope) = self
            .originals
            .save_unless_buffering(scope, parent, NO_BYTES)?
        else {
            return self.add_link_in_backing(object, parent, name);
        };
        if parent.kind != Kind::Dir {
            return Err(Errno::NOTDIR);
        }
        if self.find_name(parent, name)?.is_some() {
            return Err(Errno::EXIST);
        }
        self.must_exist(parent)?;
        if object.kind == Kind::Dir {
            return Err(Errno::PERM);
        }
        if self.objects.read_attr(object)?.nlink == 0 {
            return Err(Errno::NOENT);
        }
        self.record_link_change(&scope, object, ONE_LINK);
        self.record_name_change(
            &scope,
            NameAt { dir: parent, name },
            OldName::Missing,
            Some(object),
            NO_SUBDIRECTORIES,
        );
        scope.check_names(&[parent, object]);
        self.objects.read_attr(object)
    }

    /// Adds a link in the backing, and returns the attributes of the object as programs see them.
    fn add_link_in_backing(
        &self,
        object: &Arc<Object<B>>,
        parent: &Arc<Object<B>>,
        name: &OsStr,
    ) -> Result<Attr> {
        let inode = object.inode(&self.lower.base)?;
        let dir = parent.inode(&self.lower.base)?;
        let attr = self.lower.base.link(&inode, &dir, name)?;
        if object.may_hide_links() {
            self.objects.read_attr(object)
        } else {
            Ok(attr)
        }
    }

    /// Renames `old` to `new`, with the errors of rename(2).
    ///
    /// Fails with EXDEV if one of the names is in a transaction and the other is not in the same one.
    pub(crate) fn rename_name(
        &self,
        old: NameAt<'_, B>,
        new: NameAt<'_, B>,
        flags: RenameFlags,
    ) -> Result<()> {
        if self.is_hidden(old.dir, old.name) {
            return Err(Errno::NOENT);
        }
        if self.is_hidden(new.dir, new.name) {
            return Err(Errno::PERM);
        }
        self.must_be_in_one_scope(old, new)?;
        // The uppermost directory of a transaction is renamed in its parent, which the transaction does not cover.
        if let Some(result) = self.rename_top(old, new, flags) {
            return result;
        }
        let (names, scope) = self.admission.enter_name_change(&[old, new])?;
        // A transaction may have begun or ended since the first check. From here on none can.
        if !is_same(&self.scopes.scope_at(new.dir, new.name), &scope) {
            return Err(Errno::XDEV);
        }
        let Some(scope) = scope else {
            return self.rename_in_backing(&names, old, new, flags);
        };
        let Some(objects) = self.check_rename(old, new, flags)? else {
            return Ok(());
        };
        let rename = RequestedRename { old, new, flags };
        // In shadow mode the backing changes at once. Otherwise tables in memory have the new names until the commit.
        match &scope.shadow {
            Some(shadow) => self.rename_in_shadow(&names, &scope, shadow, &objects, rename),
            None => {
                self.rename_in_tables(&scope, &objects, rename);
                Ok(())
            }
        }
    }

    /// Fails with EXDEV unless both names are in the same transaction, or both in none.
    ///
    /// A rename calls this before it waits for the outcome of a transaction. The kernel holds the locks of both
    /// directories then. The thread that ends the other transaction must make the kernel drop names in its directory,
    /// and would wait for these locks.
    fn must_be_in_one_scope(&self, old: NameAt<'_, B>, new: NameAt<'_, B>) -> Result<()> {
        let _names = self.tree.names.enter(&[old.dir, new.dir]);
        let old_scope = self.scopes.scope_at(old.dir, old.name);
        let new_scope = self.scopes.scope_at(new.dir, new.name);
        if is_same(&new_scope, &old_scope) {
            Ok(())
        } else {
            Err(Errno::XDEV)
        }
    }

    /// Records a rename in the tables of a transaction that keeps its changes back until the commit. The caller has
    /// checked the rename ([`Self::check_rename`]).
    fn rename_in_tables(
        &self,
        scope: &Arc<Scope<B>>,
        objects: &RenamedObjects<B>,
        rename: RequestedRename<'_, B>,
    ) {
        let RenamedObjects { source, target } = objects;
        let RequestedRename { old, new, flags } = rename;
        if let Some(target) = target
            && flags.contains(RenameFlags::EXCHANGE)
        {
            self.exchange_in_tables(scope, (old, source), (new, target));
            return;
        }
        if let Some(target) = target {
            self.record_lost_name(scope, target);
        }
        // Only for the change time of the object.
        self.record_link_change(scope, source, NO_LINKS);
        // The old parent loses the source as a subdirectory. The new one gets it, and loses a replaced directory.
        let source_count = subdirectory_count(source);
        let target_count = target
            .as_deref()
            .map_or(NO_SUBDIRECTORIES, subdirectory_count);
        let old_target_name = if target.is_some() {
            OldName::Exists
        } else {
            OldName::Missing
        };
        self.record_name_change(scope, old, OldName::Exists, None, -source_count);
        self.record_name_change(
            scope,
            new,
            old_target_name,
            Some(source),
            source_count - target_count,
        );
        scope.check_names(&[old.dir, new.dir, source]);
    }

    /// Records in the tables of a transaction that two objects exchange their names. The backing follows at the commit.
    fn exchange_in_tables(
        &self,
        scope: &Arc<Scope<B>>,
        (old, source): (NameAt<'_, B>, &Arc<Object<B>>),
        (new, target): (NameAt<'_, B>, &Arc<Object<B>>),
    ) {
        // The entries in the tables are made before the move, because an entry stores the object's old location.
        for object in [source, target] {
            self.record_link_change(scope, object, 0);
        }
        let moved_subdirectories = subdirectory_count(source) - subdirectory_count(target);
        self.record_name_change(
            scope,
            old,
            OldName::Exists,
            Some(target),
            -moved_subdirectories,
        );
        self.record_name_change(
            scope,
            new,
            OldName::Exists,
            Some(source),
            moved_subdirectories,
        );
        scope.check_names(&[old.dir, new.dir, source, target]);
    }

    /// Checks a rename in a transaction, with the errors of rename(2). Returns the object that moves and the one at the
    /// new name, if there is one. Returns `None` if both names lead to the same object: the rename then does nothing.
    fn check_rename(
        &self,
        old: NameAt<'_, B>,
        new: NameAt<'_, B>,
        flags: RenameFlags,
    ) -> Result<Option<RenamedObjects<B>>> {
        let exchanges = flags.contains(RenameFlags::EXCHANGE);
        let supported_flags = RenameFlags::EXCHANGE | RenameFlags::NOREPLACE;
        // The two flags exclude each other.
        if flags == supported_flags || !supported_flags.contains(flags) {
            return Err(Errno::INVAL);
        }
        if old.dir.kind != Kind::Dir || new.dir.kind != Kind::Dir {
            return Err(Errno::NOTDIR);
        }
        let source = self.find_name(old.dir, old.name)?.ok_or(Errno::NOENT)?;
        let target = self.find_name(new.dir, new.name)?;
        if target.is_some() && flags.contains(RenameFlags::NOREPLACE) {
            return Err(Errno::EXIST);
        }
        if target.is_none() && exchanges {
            return Err(Errno::NOENT);
        }
        // A directory cannot move below itself.
        if source.kind == Kind::Dir && new.dir.is_below(&source) {
            return Err(Errno::INVAL);
        }
        if let Some(target) = &target {
            if target.kind == Kind::Dir && old.dir.is_below(target) {
                return Err(if exchanges {
                    Errno::INVAL
                } else {
                    Errno::NOTEMPTY
                });
            }
            if Arc::ptr_eq(&source, target) {
                return Ok(None);
            }
        }
        self.must_exist(new.dir)?;
        if let Some(target) = &target
            && !exchanges
        {
            self.must_be_replaceable(target, &source)?;
        }
        Ok(Some(RenamedObjects { source, target }))
    }

    /// Fails unless a rename may replace `target` by `source`: both or none is a directory, and a directory is empty.
    fn must_be_replaceable(&self, target: &Arc<Object<B>>, source: &Object<B>) -> Result<()> {
        match (source.kind == Kind::Dir, target.kind == Kind::Dir) {
            (true, false) => Err(Errno::NOTDIR),
            (false, true) => Err(Errno::ISDIR),
            (true, true) if !self.dir_listings.list_entries(target)?.is_empty() => {
                Err(Errno::NOTEMPTY)
            }
            _ => Ok(()),
        }
    }

    /// Renames an object in the backing, and records the new locations of the objects in memory. Fails with EBUSY if
    /// the object that moves, or the one that is replaced, contains a transaction. `names` is the guard that keeps
    /// other threads from both names.
    pub(crate) fn rename_in_backing(
        &self,
        names: &NameChangeGuard<'_, B>,
        old: NameAt<'_, B>,
        new: NameAt<'_, B>,
        flags: RenameFlags,
    ) -> Result<()> {
        // An error of the look-up is ignored here, because the rename in the backing will return it.
        let find_object =
            |name_at: NameAt<'_, B>| self.find_name(name_at.dir, name_at.name).ok().flatten();
        let source = find_object(old);
        let target = find_object(new);
        for object in [&source, &target].into_iter().flatten() {
            names.announce_move(object)?;
        }
        if !self.scopes.is_empty() {
            self.top_overlay.check_rename_beside_tops(old, new)?;
            self.must_not_contain_scope(source.as_ref())?;
            self.must_not_contain_scope(target.as_ref())?;
        }
        let old_dir = old.dir.inode(&self.lower.base)?;
        let new_dir = new.dir.inode(&self.lower.base)?;
        self.lower
            .base
            .rename(&old_dir, old.name, &new_dir, new.name, flags)?;
        if let Some(source) = source {
            source.move_to(new.dir, new.name);
        }
        if flags.contains(RenameFlags::EXCHANGE)
            && let Some(target) = target
        {
            target.move_to(old.dir, old.name);
        }
        Ok(())
    }
}

/// A rename that a program requests.
pub(crate) struct RequestedRename<'a, B: Backing> {
    pub(crate) old: NameAt<'a, B>,
    pub(crate) new: NameAt<'a, B>,
    pub(crate) flags: RenameFlags,
}

/// A name in a directory, as programs see it. The name need not exist.
pub(crate) struct NameAt<'a, B: Backing> {
    pub(crate) dir: &'a Arc<Object<B>>,
    pub(crate) name: &'a OsStr,
}

impl<B: Backing> Clone for NameAt<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backing> Copy for NameAt<'_, B> {}

/// Whether a name led to an object before it was changed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OldName {
    Exists,
    Missing,
}

/// Updates the change of an object that lost a name in the transaction `scope`. `claimed` is the exclusive use of the
/// object's state.
///
/// Returns the number of the change and the staged copy if the object is new and has lost its last name. Returns `None`
/// if the object stays part of the commit: the commit removes the name of an object of the backing, and a new object
/// may have another name.
fn note_lost_name<B: Backing>(
    scope: &Scope<B>,
    object: &Arc<Object<B>>,
    claimed: &ExclusiveValue<'_, ObjectState<B>>,
) -> Option<(u64, StagedCopy<B>)> {
    let mut state = claimed.edit();
    let is_new = state.base.is_none();
    let change = scope.get_or_create_change(object, &mut state);
    change.links_changed_at = Some(Time::now());
    if object.kind == Kind::Dir {
        change.is_removed = true;
    } else {
        change.link_delta -= 1;
    }
    // `link_delta` is the difference from the link count in the backing, which is 0 for a new file.
    let has_names = !change.is_removed && change.link_delta != 0;
    if !is_new || has_names {
        return None;
    }
    let staged_copy = change.staged_copy.as_ref()?;
    Some((change.number, staged_copy.clone()))
}

/// Number of links that a new name adds to its object.
const ONE_LINK: i64 = 1;
/// Number of links that a rename adds to the renamed object.
const NO_LINKS: i64 = 0;

/// Change of a directory's number of subdirectories when a name of a file in it changes.
const NO_SUBDIRECTORIES: i64 = 0;

/// Returns how many subdirectories an object adds to the directory that it is in: 1 for a directory, otherwise 0.
fn subdirectory_count<B: Backing>(object: &Object<B>) -> i64 {
    i64::from(object.kind == Kind::Dir)
}

/// The object that a name leads to.
struct FoundName<B: Backing> {
    object: Arc<Object<B>>,
    /// The attributes that the backing returned, if it was asked.
    attr: Option<Attr>,
}

impl<B: Backing> FoundName<B> {
    fn without_attr(object: Arc<Object<B>>) -> Self {
        Self { object, attr: None }
    }
}

/// The objects of a rename.
pub(crate) struct RenamedObjects<B: Backing> {
    /// The object that gets the new name.
    pub(crate) source: Arc<Object<B>>,
    /// The object that has the new name before; the rename replaces it or exchanges the names.
    pub(crate) target: Option<Arc<Object<B>>>,
}

/// Returns the saved state of the transaction if it is in shadow mode.
fn shadow_of<B: Backing>(scope: &Option<Arc<Scope<B>>>) -> Option<&Shadow<B>> {
    scope.as_ref().and_then(|scope| scope.shadow.as_ref())
}

/// Returns whether both are none, or both are the same object.
fn is_same<T>(a: &Option<Arc<T>>, b: &Option<Arc<T>>) -> bool {
    match (a, b) {
        (None, None) => true,
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        _ => false,
    }
}
