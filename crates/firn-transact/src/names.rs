//! [`Entries`]: look-ups of names, and creates, renames, links and removals, with the changes of transactions.
//!
//! In buffer mode a change of names is noted in the tables of the transaction; the errors are those that the backing
//! would return. In shadow mode and outside of transactions the change goes to the backing.
//!
//! The caller *keeps the names* of a directory if it has a guard of [`crate::waiting`] for the directory. No other
//! thread changes these names meanwhile.

use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Attr, Backing, Errno, Kind, Placing, Remove, RenameFlags, Result, Time};

use crate::attributes::Objects;
use crate::change_log::StagedPath;
use crate::hidden::OwnLinks;
use crate::listing::Dirs;
use crate::lower_backing::LowerBacking;
use crate::object::{Change, Inner, Named, Object, StagedCopy};
use crate::scope::Scope;
use crate::scopes::Scopes;
use crate::shadow::save::Originals;
use crate::shadow::{NO_BYTES, Shadow};
use crate::staging;
use crate::top_names::TopName;
use crate::top_names::Tops;
use crate::tree::Tree;
use crate::waiting::Admission;

/// Place in the backing at which an object is made.
pub(crate) struct NewObject<'a, B: Backing> {
    /// The directory of the new name, or the staging directory of a transaction.
    pub(crate) dir: &'a B::Inode,
    /// Name of the object in that directory.
    pub(crate) name: &'a OsStr,
    /// Lane (I/O server) for the data of a file.
    pub(crate) placing: Placing<'a, B::Inode>,
}
use crate::tree::NameChangeGuard;

/// Looks up and changes names in directories.
pub(crate) struct Entries<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) tree: Arc<Tree<B>>,
    pub(crate) scopes: Arc<Scopes<B>>,
    pub(crate) originals: Arc<Originals<B>>,
    pub(crate) own_links: Arc<OwnLinks<B>>,
    pub(crate) tops: Arc<Tops<B>>,
    pub(crate) admission: Arc<Admission<B>>,
    pub(crate) objects: Arc<Objects<B>>,
    pub(crate) dirs: Arc<Dirs<B>>,
}

impl<B: Backing> Entries<B> {
    pub(crate) fn new(objects: &Arc<Objects<B>>, dirs: &Arc<Dirs<B>>) -> Self {
        Self {
            lower: Arc::clone(&objects.lower),
            tree: Arc::clone(&objects.admission.tree),
            scopes: Arc::clone(&objects.admission.scopes),
            originals: Arc::clone(&objects.originals),
            own_links: Arc::clone(&objects.own_links),
            tops: Arc::clone(&objects.tops),
            admission: Arc::clone(&objects.admission),
            objects: Arc::clone(objects),
            dirs: Arc::clone(dirs),
        }
    }

    /// Returns whether a name is that of Firn's own directory, which programs do not see.
    pub(crate) fn is_hidden(&self, parent: &Arc<Object<B>>, name: &OsStr) -> bool {
        parent.parent().is_none() && name == staging::TOP
    }

    /// Returns the object of a name and its attributes, as programs see them. Fails with NOENT if there is none.
    pub(crate) fn look_up(
        &self,
        parent: &Arc<Object<B>>,
        name: &OsStr,
    ) -> Result<(Arc<Object<B>>, Attr)> {
        let _names = self.admission.share_names(parent);
        let found = self.find_entry(parent, name)?.ok_or(Errno::NOENT)?;
        let object = found.object;
        let unchanged_attr = found.attr.filter(|_| self.shows_attr_below(&object));
        let attr = unchanged_attr.map_or_else(|| self.objects.read_attr(&object), Ok)?;
        Ok((object, attr))
    }

    /// Returns the object of a name; `None` if there is none. The caller keeps the names.
    pub(crate) fn find_name(
        &self,
        parent: &Arc<Object<B>>,
        name: &OsStr,
    ) -> Result<Option<Arc<Object<B>>>> {
        let found = self.find_entry(parent, name)?;
        Ok(found.map(|found| found.object))
    }

    /// Returns the object of a name, with its attributes if the backing was asked. The caller keeps the names.
    fn find_entry(&self, parent: &Arc<Object<B>>, name: &OsStr) -> Result<Option<FoundName<B>>> {
        match self.tops.find_top_name(parent, name) {
            TopName::Unrelated => {}
            TopName::Shown(root) => return Ok(Some(FoundName::without_attr(root))),
            TopName::Reserved => return Ok(None),
        }
        let inner = parent.inner.share();
        if let Some(change) = &inner.read().change
            && let Some(found) = change.names.get(name)
        {
            return Ok(found.object.clone().map(FoundName::without_attr));
        }
        if self.is_hidden(parent, name) {
            return Ok(None);
        }
        // The staged copy of a new directory is empty, but a look-up there returns the right error for an invalid name.
        let inode = inner
            .base()
            .map_or_else(|| inner.inode(&self.lower.base), Ok)?;
        let found = staging::find(&self.lower.base, &inode, name)?;
        Ok(found.map(|(inode, attr)| FoundName {
            object: self
                .tree
                .intern(&self.lower.base, inode, &attr, parent, name),
            attr: Some(attr),
        }))
    }

    /// Returns whether the attributes that the backing just returned for an object are those that programs see.
    fn shows_attr_below(&self, object: &Object<B>) -> bool {
        let is_changed = object.inner.share().read().change.is_some();
        !is_changed
            && !object.may_hide_links()
            && !object.is_gone()
            && !self.tops.has_tops_in(object)
    }

    /// Makes a new object: calls `make` with the place in the backing where `make` must create the object. Returns the
    /// object and its attributes.
    ///
    /// In a transaction in buffer mode the object is made in the staging directory, and only the tables have its name.
    pub(crate) fn make_object(
        &self,
        parent: &Arc<Object<B>>,
        name: &OsStr,
        make: impl FnOnce(&NewObject<'_, B>) -> Result<(B::Inode, Attr)>,
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
        self.tops.must_not_be_top(parent, name)?;
        let shadow_scope = scope.clone();
        let Some(scope) = self.originals.buffering_scope(scope, parent, NO_BYTES)? else {
            let shadow = shadow_of(&shadow_scope);
            return self.make_in_backing(parent, name, shadow, make);
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
        self.make_staged(&scope, parent, &dir, name, make)
    }

    /// Makes a new object under its name in the backing. `shadow` is the saved state of the transaction in shadow mode,
    /// if the object belongs to one.
    fn make_in_backing(
        &self,
        parent: &Arc<Object<B>>,
        name: &OsStr,
        shadow: Option<&Shadow<B>>,
        make: impl FnOnce(&NewObject<'_, B>) -> Result<(B::Inode, Attr)>,
    ) -> Result<(Arc<Object<B>>, Attr)> {
        let dir = parent.inode(&self.lower.base)?;
        let new = NewObject {
            dir: &dir,
            name,
            placing: Placing::Named { parent: &dir, name },
        };
        let (inode, attr) = make(&new)?;
        if let Some(shadow) = shadow {
            shadow.add_new(attr.ino);
        }
        let object = self
            .tree
            .intern(&self.lower.base, inode, &attr, parent, name);
        Ok((object, attr))
    }

    /// Makes a new object in the staging directory, and enters it with its name in the tables of the transaction. `dir`
    /// is the inode of `parent`.
    fn make_staged(
        &self,
        scope: &Arc<Scope<B>>,
        parent: &Arc<Object<B>>,
        dir: &B::Inode,
        name: &OsStr,
        make: impl FnOnce(&NewObject<'_, B>) -> Result<(B::Inode, Attr)>,
    ) -> Result<(Arc<Object<B>>, Attr)> {
        let staging_dir = scope.staging_dir_for(&self.lower.base, dir)?;
        let number = scope.next_number();
        let staged_name = number.to_string();
        let new = NewObject {
            dir: &staging_dir.inode,
            name: OsStr::new(&staged_name),
            placing: Placing::Named { parent: dir, name },
        };
        let (inode, attr) = make(&new)?;
        let is_dir = attr.kind == Kind::Dir;
        let change = Change {
            copy: Some(StagedCopy {
                staging_dir: staging_dir.inode,
                at: StagedPath {
                    dir: staging_dir.name,
                    name: staged_name,
                },
                kept_inode: None,
                final_name: None,
            }),
            links: i64::from(!is_dir),
            ..Change::new(number, None)
        };
        let inner = Inner {
            base: None,
            change: Some(Box::new(change)),
        };
        let location = Some((Arc::clone(parent), name.to_owned()));
        let object = Object::new((attr.dev, attr.ino), attr.kind, inner, location)
            .in_lane(self.lower.base.facts(&inode).lane);
        let object = Arc::new(object);
        scope.changed.lock().insert(number, Arc::clone(&object));
        self.tree.adopt(&object);
        let subdirectories = i64::from(is_dir);
        self.note_name_change(scope, parent, name, false, Some(&object), subdirectories);
        scope.check_names(&[parent, &object]);
        // No further call of the backing is made, because it could fail although the object has its name already.
        let nlink = if is_dir { attr.nlink } else { 1 };
        Ok((object, Attr { nlink, ..attr }))
    }

    /// Fails with NOENT or STALE if a directory no longer exists.
    fn must_exist(&self, dir: &Arc<Object<B>>) -> Result<()> {
        let shared = dir.inner.share();
        let inner = shared.read();
        match &inner.change {
            Some(change) if change.removed => Err(Errno::NOENT),
            None if inner.base.is_none() => Err(Errno::STALE),
            None if dir.is_gone() => Err(Errno::NOENT),
            _ => Ok(()),
        }
    }

    /// Records in the transaction that a name now leads to `object`, or to nothing if `object` is `None`.
    ///
    /// `existed` tells whether the backing may have the name. `subdirectories` is the change of the directory's number
    /// of subdirectories.
    fn note_name_change(
        &self,
        scope: &Scope<B>,
        dir: &Arc<Object<B>>,
        name: &OsStr,
        existed: bool,
        object: Option<&Arc<Object<B>>>,
        subdirectories: i64,
    ) {
        let owned = dir.inner.own();
        let mut inner = owned.edit();
        let is_old = inner.base.is_some();
        let change = scope.change(dir, &mut inner);
        // A name without an entry in the tables is unchanged, so the backing may have it.
        let hides_old = change
            .names
            .get(name)
            .map_or(is_old && existed, |named| named.hides_old);
        // A removed name that the backing does not have needs no entry.
        let is_noted = object.is_some() || hides_old;
        if !is_noted {
            change.names.remove(name);
        } else {
            change.names.insert(
                name.to_owned(),
                Named {
                    object: object.cloned(),
                    hides_old,
                    serial: scope.serial,
                },
            );
        }
        change.links += subdirectories;
        if scope.has_names_in(dir) {
            let count = &scope.subdirectories_in_root;
            count.fetch_add(subdirectories, Ordering::AcqRel);
        }
        change.names_changed_at = Some(Time::now());
        if let Some(object) = object {
            object.move_to(dir, name);
        }
    }

    /// Notes that an object got `more` names (negative for fewer), or another name.
    fn note_link_change(&self, scope: &Scope<B>, object: &Arc<Object<B>>, more: i64) {
        let owned = object.inner.own();
        let mut inner = owned.edit();
        let change = scope.change(object, &mut inner);
        change.links += more;
        change.own_names_changed_at = Some(Time::now());
    }

    /// Notes that an object lost a name in `scope`.
    ///
    /// A new object without names is unstaged at once, because it takes space and is not part of the commit.
    fn note_lost_name(&self, scope: &Scope<B>, object: &Arc<Object<B>>) {
        let owned = object.inner.own();
        let (number, copy) = {
            let mut inner = owned.edit();
            let is_new = inner.base.is_none();
            let change = scope.change(object, &mut inner);
            change.own_names_changed_at = Some(Time::now());
            if object.kind == Kind::Dir {
                change.removed = true;
            } else {
                change.links -= 1;
            }
            if !is_new || !(change.removed || change.links == 0) {
                return;
            }
            let Some(copy) = &change.copy else { return };
            (change.number, copy.clone())
        };
        match self.unstage(object.kind, &copy) {
            Ok(inode) => {
                scope.changed.lock().remove(&number);
                object.become_nameless(&mut owned.edit(), inode);
            }
            Err(errno) => {
                tracing::warn!(%errno, "cannot remove a nameless staged object; the end of the transaction removes it");
            }
        }
    }

    /// Removes the name of a staged object, and returns its inode, which exists until the last reference is dropped.
    fn unstage(&self, kind: Kind, copy: &StagedCopy<B>) -> Result<B::Inode> {
        let inode = copy.inode(&self.lower.base)?;
        let name = OsStr::new(&copy.at.name);
        if kind == Kind::Dir {
            self.lower.base.rmdir(&copy.staging_dir, name)?;
        } else {
            self.lower.base.unlink(&copy.staging_dir, name)?;
        }
        Ok(inode)
    }

    /// Fails with EBUSY if a scope is at or below the object, because its transaction depends on the place.
    fn must_not_hold_a_scope(&self, object: Option<&Arc<Object<B>>>) -> Result<()> {
        match object {
            Some(object) if self.scopes.are_below(object) => Err(Errno::BUSY),
            _ => Ok(()),
        }
    }

    /// Removes a name, with the errors of unlink(2) or rmdir(2), as `what` says.
    pub(crate) fn remove_name(
        &self,
        parent: &Arc<Object<B>>,
        name: &OsStr,
        what: Remove,
    ) -> Result<()> {
        let is_dir = what == Remove::Dir;
        let (names, scope) = self
            .admission
            .enter_name_change(&[NameAt { dir: parent, name }])?;
        let Some(scope) = scope else {
            if is_dir && let Some(object) = self.find_name(parent, name)? {
                names.moving(&object)?;
                self.must_not_hold_a_scope(Some(&object))?;
            }
            if self.is_hidden(parent, name) {
                return Err(Errno::NOENT);
            }
            match self.tops.find_top_name(parent, name) {
                TopName::Unrelated => {}
                TopName::Shown(_) => return Err(Errno::ISDIR),
                TopName::Reserved => return Err(Errno::NOENT),
            }
            let dir = parent.inode(&self.lower.base)?;
            return self.lower.base.remove(&dir, name, what);
        };
        if parent.kind != Kind::Dir {
            return Err(Errno::NOTDIR);
        }
        let object = self.find_name(parent, name)?.ok_or(Errno::NOENT)?;
        match (is_dir, object.kind == Kind::Dir) {
            (true, false) => return Err(Errno::NOTDIR),
            (false, true) => return Err(Errno::ISDIR),
            (true, true) if !self.dirs.list_entries(&object)?.is_empty() => {
                return Err(Errno::NOTEMPTY);
            }
            _ => {}
        }
        if let Some(shadow) = &scope.shadow {
            return self.remove_shadowed(&scope, shadow, NameAt { dir: parent, name }, &object);
        }
        self.note_name_change(&scope, parent, name, true, None, -i64::from(is_dir));
        self.note_lost_name(&scope, &object);
        scope.check_names(&[parent, &object]);
        Ok(())
    }

    /// Gives an object a further name, with the errors of link(2), and returns its attributes. Fails with EXDEV if the
    /// object and the name are not in the same transaction.
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
        self.tops.must_not_be_top(parent, name)?;
        if shadow_of(&scope).is_some()
            && (parent.is_gone() || self.objects.read_attr(object)?.nlink == 0)
        {
            return Err(Errno::NOENT);
        }
        let Some(scope) = self.originals.buffering_scope(scope, parent, NO_BYTES)? else {
            let inode = object.inode(&self.lower.base)?;
            let dir = parent.inode(&self.lower.base)?;
            let attr = self.lower.base.link(&inode, &dir, name)?;
            return if object.may_hide_links() {
                self.objects.read_attr(object)
            } else {
                Ok(attr)
            };
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
        self.note_link_change(&scope, object, 1);
        self.note_name_change(&scope, parent, name, false, Some(object), 0);
        scope.check_names(&[parent, object]);
        self.objects.read_attr(object)
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
        let NameAt { dir: from, name } = old;
        let NameAt {
            dir: to,
            name: new_name,
        } = new;
        if self.is_hidden(from, name) {
            return Err(Errno::NOENT);
        }
        if self.is_hidden(to, new_name) {
            return Err(Errno::PERM);
        }
        // This check comes before any wait for an outcome. The kernel holds the locks of both directories. The thread
        // that ends the other transaction must make the kernel drop names in its directory, and would wait for these
        // locks.
        let names = self.tree.names.enter(&[from, to]);
        let scope_before = self.scopes.scope_at(from, name);
        if !is_same(&self.scopes.scope_at(to, new_name), &scope_before) {
            return Err(Errno::XDEV);
        }
        drop(names);
        if let Some(result) = self.rename_top(old, new, flags) {
            return result;
        }
        let (names, scope) = self.admission.enter_name_change(&[old, new])?;
        if !is_same(&self.scopes.scope_at(to, new_name), &scope) {
            return Err(Errno::XDEV);
        }
        let Some(scope) = scope else {
            return self.rename_in_backing(&names, old, new, flags);
        };
        let Some(objects) = self.check_rename(old, new, flags)? else {
            return Ok(());
        };
        let rename = RequestedRename { old, new, flags };
        match &scope.shadow {
            Some(shadow) => self.rename_shadowed(&names, &scope, shadow, &objects, rename),
            None => {
                self.rename_in_tables(&scope, &objects, rename);
                Ok(())
            }
        }
    }

    /// Enters a rename that was checked in the tables of a transaction in buffer mode.
    fn rename_in_tables(
        &self,
        scope: &Arc<Scope<B>>,
        objects: &RenamedObjects<B>,
        rename: RequestedRename<'_, B>,
    ) {
        let RenamedObjects { source, target } = objects;
        let RequestedRename { old, new, flags } = rename;
        let subdirectories = |object: &Object<B>| i64::from(object.kind == Kind::Dir);
        let mut added_subdirectories = subdirectories(source);
        if let Some(target) = target {
            added_subdirectories -= subdirectories(target);
            if flags.contains(RenameFlags::EXCHANGE) {
                // The changes are made before the move, while the objects' present places are those in the backing.
                for object in [source, target] {
                    self.note_link_change(scope, object, 0);
                }
                let (old_dir, added) = (old.dir, added_subdirectories);
                self.note_name_change(scope, old_dir, old.name, true, Some(target), -added);
                self.note_name_change(scope, new.dir, new.name, true, Some(source), added);
                scope.check_names(&[old_dir, new.dir, source, target]);
                return;
            }
            self.note_lost_name(scope, target);
        }
        self.note_link_change(scope, source, 0);
        let removed_subdirectories = subdirectories(source);
        self.note_name_change(
            scope,
            old.dir,
            old.name,
            true,
            None,
            -removed_subdirectories,
        );
        self.note_name_change(
            scope,
            new.dir,
            new.name,
            target.is_some(),
            Some(source),
            added_subdirectories,
        );
        scope.check_names(&[old.dir, new.dir, source]);
    }

    /// Checks a rename in a transaction. Returns the objects of the rename, or `None` if it changes nothing.
    fn check_rename(
        &self,
        old: NameAt<'_, B>,
        new: NameAt<'_, B>,
        flags: RenameFlags,
    ) -> Result<Option<RenamedObjects<B>>> {
        let NameAt { dir: from, name } = old;
        let NameAt {
            dir: to,
            name: new_name,
        } = new;
        let exchange = flags.contains(RenameFlags::EXCHANGE);
        let known = RenameFlags::EXCHANGE | RenameFlags::NOREPLACE;
        if flags == known || !known.contains(flags) {
            return Err(Errno::INVAL);
        }
        if from.kind != Kind::Dir || to.kind != Kind::Dir {
            return Err(Errno::NOTDIR);
        }
        let source = self.find_name(from, name)?.ok_or(Errno::NOENT)?;
        let target = self.find_name(to, new_name)?;
        if target.is_some() && flags.contains(RenameFlags::NOREPLACE) {
            return Err(Errno::EXIST);
        }
        if target.is_none() && exchange {
            return Err(Errno::NOENT);
        }
        if source.kind == Kind::Dir && to.is_below(&source) {
            return Err(Errno::INVAL);
        }
        if let Some(target) = &target {
            if target.kind == Kind::Dir && from.is_below(target) {
                return Err(if exchange {
                    Errno::INVAL
                } else {
                    Errno::NOTEMPTY
                });
            }
            if Arc::ptr_eq(&source, target) {
                return Ok(None);
            }
        }
        self.must_exist(to)?;
        if let Some(target) = target.as_ref().filter(|_| !exchange) {
            match (source.kind == Kind::Dir, target.kind == Kind::Dir) {
                (true, false) => return Err(Errno::NOTDIR),
                (false, true) => return Err(Errno::ISDIR),
                (true, true) if !self.dirs.list_entries(target)?.is_empty() => {
                    return Err(Errno::NOTEMPTY);
                }
                _ => {}
            }
        }
        Ok(Some(RenamedObjects { source, target }))
    }

    /// Renames an object in the backing, and moves the objects in the table.
    pub(crate) fn rename_in_backing(
        &self,
        names: &NameChangeGuard<'_, B>,
        old: NameAt<'_, B>,
        new: NameAt<'_, B>,
        flags: RenameFlags,
    ) -> Result<()> {
        let NameAt { dir: from, name } = old;
        let NameAt {
            dir: to,
            name: new_name,
        } = new;
        // An error is ignored here, because the rename in the backing will return it.
        let known = |dir, name| self.find_name(dir, name).ok().flatten();
        let source = known(from, name);
        let target = known(to, new_name);
        for object in [&source, &target].into_iter().flatten() {
            names.moving(object)?;
        }
        if !self.scopes.is_empty() {
            self.tops.check_rename_beside_tops(old, new)?;
            self.must_not_hold_a_scope(source.as_ref())?;
            self.must_not_hold_a_scope(target.as_ref())?;
        }
        let from_inode = from.inode(&self.lower.base)?;
        let to_inode = to.inode(&self.lower.base)?;
        self.lower
            .base
            .rename(&from_inode, name, &to_inode, new_name, flags)?;
        if let Some(source) = source {
            source.move_to(to, new_name);
        }
        if flags.contains(RenameFlags::EXCHANGE)
            && let Some(target) = target
        {
            target.move_to(from, name);
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
