//! Creation, removal and renames in shadow mode, in which the changes of a transaction are made at once.
//!
//! The *backing* is the directory below the mount. The old state of an object is saved there before its first change.
//! An object that existed before the transaction is not removed: it moves to `kept/` in the transaction's directory.

use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use firn_backing::{Backing, Errno, Kind, RenameFlags, Result};

use super::{NO_BYTES, Shadow};
use crate::namespace::{NameAt, Namespace, RenamedObjects, RequestedRename};
use crate::object::{Location, Object, ObjectKey};
use crate::scope::Scope;
use crate::tree::NameChangeGuard;

impl<B: Backing> Namespace<B> {
    /// Returns the location in memory of an object that a transaction removed and keeps for an abort; `None` for any
    /// other object.
    ///
    /// The name is the one in `kept/`. The directory is the transaction's uppermost one and not `kept/`, so that the
    /// object counts as part of the transaction.
    pub(crate) fn location_in_kept(&self, key: ObjectKey) -> Option<Location<B>> {
        let (serial, name) = {
            let links_by_object = self.tree.hidden_links.by_object.lock();
            let link = links_by_object.get(&key)?.first()?;
            (link.serial, OsString::from(&link.name))
        };
        let scope = self.scopes.find(|scope| scope.serial == serial)?;
        Some((Arc::clone(&scope.root), name))
    }

    /// Removes a name of `object` in a transaction in shadow mode, in which changes are made at once. The backing loses
    /// the name at once; an object that existed before the transaction moves to `kept/`, from which an abort restores
    /// it.
    ///
    /// `shadow` is the saved old state. The caller has checked the removal as unlink(2) or rmdir(2) does.
    pub(crate) fn remove_name_in_shadow(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
        removed: NameAt<'_, B>,
        object: &Arc<Object<B>>,
    ) -> Result<()> {
        let NameAt { dir: parent, name } = removed;
        // An abort needs the old names of the directory. They must be durable before the first change.
        self.originals
            .save_object(scope, shadow, parent, NO_BYTES)?;
        let dir = parent.inode(&self.lower.base)?;
        if !shadow.is_new(object.key.ino) {
            self.keep_for_abort(scope, shadow, object, &dir, name)?;
        } else if object.kind == Kind::Dir {
            self.lower.base.rmdir(&dir, name)?;
            self.forget_if_nameless(shadow, object);
        } else {
            self.lower.base.unlink(&dir, name)?;
            self.forget_if_nameless(shadow, object);
        }
        scope.check_names(&[]);
        Ok(())
    }

    /// Forgets an object that the transaction made and that has lost its last name, because an abort need not remove
    /// it.
    fn forget_if_nameless(&self, shadow: &Shadow<B>, object: &Object<B>) {
        let claimed = object.state.acquire_exclusive();
        let Ok(inode) = claimed.inode(&self.lower.base) else {
            return;
        };
        let has_no_links = || {
            let attr = self.lower.base.attr(&inode);
            attr.is_ok_and(|attr| attr.nlink == 0)
        };
        // A directory has one name only.
        if object.kind == Kind::Dir || has_no_links() {
            object.become_nameless(&mut claimed.edit(), inode);
            shadow.save_states.lock().remove(&object.key.ino);
        }
    }

    /// Moves an object of the backing that existed before the transaction from `name` in `dir` to `kept/`, the
    /// directory of removed objects. Programs do not see it there; an abort restores it. `shadow` is the saved old
    /// state.
    ///
    /// The link is recorded before it exists, so that programs never see it in `st_nlink`.
    fn keep_for_abort(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
        object: &Arc<Object<B>>,
        dir: &B::Inode,
        name: &OsStr,
    ) -> Result<()> {
        let kept_name = object.key.ino.to_string();
        // Only links to files are hidden from link counts: a directory in `kept/` counts as removed.
        if object.kind != Kind::Dir {
            self.link_counts
                .record_link_before_creation(scope, object, &shadow.kept, &kept_name);
        }
        match shadow.move_to_kept(&self.lower.base, dir, name, object.key.ino) {
            // Unlike a removal, a move of a directory needs permission to write in that directory. An abort restores
            // its mode, which is saved first.
            Err(Errno::ACCESS) if object.kind == Kind::Dir => {
                self.originals
                    .save_object(scope, shadow, object, NO_BYTES)?;
                let inode = object.inode(&self.lower.base)?;
                self.lower.base.set_mode(&inode, 0o700)?;
                shadow.move_to_kept(&self.lower.base, dir, name, object.key.ino)?;
            }
            moved => moved?,
        }
        self.link_counts
            .record_link_created(scope, object, &shadow.kept, &kept_name);
        Ok(())
    }

    /// Makes a rename in the backing at once, in a transaction in shadow mode (an abort undoes it). If it replaces an
    /// object that existed before the transaction, that object is kept for an abort.
    ///
    /// `shadow` is the saved old state, and `names` the guard that keeps other threads from these names. The caller has
    /// checked the rename as rename(2) does.
    pub(crate) fn rename_in_shadow(
        &self,
        names: &NameChangeGuard<'_, B>,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
        objects: &RenamedObjects<B>,
        rename: RequestedRename<'_, B>,
    ) -> Result<()> {
        let RequestedRename { old, new, flags } = rename;
        let source = &objects.source;
        let target = objects.target.as_ref();
        for dir in [old.dir, new.dir] {
            self.originals.save_object(scope, shadow, dir, NO_BYTES)?;
        }
        // With RENAME_EXCHANGE or RENAME_NOREPLACE, the only supported flags, the target is not lost.
        let may_replace = flags.is_empty();
        // On XFS an exchange sets the time of each directory that it moves, so the old state of these directories is
        // saved.
        if !may_replace {
            let moved_objects = [Some(source), target].into_iter().flatten();
            for dir in moved_objects.filter(|object| object.kind == Kind::Dir) {
                self.originals.save_object(scope, shadow, dir, NO_BYTES)?;
            }
        }
        let do_rename = || self.rename_in_backing(names, old, new, flags);
        let replaced = target.filter(|target| may_replace && !Arc::ptr_eq(source, target));
        match replaced {
            None => do_rename(),
            // An abort does not need an object that the transaction made.
            Some(target) if shadow.is_new(target.key.ino) => {
                do_rename()?;
                // Race: another thread may have removed the last other name meanwhile, and has forgotten the object.
                if shadow.is_new(target.key.ino) {
                    self.forget_if_nameless(shadow, target);
                }
                Ok(())
            }
            Some(target) => {
                self.replace_preexisting(scope, shadow, target, new, &do_rename)?;
                scope.check_names(&[]);
                Ok(())
            }
        }
    }

    /// Makes a rename that replaces `target`, an object that existed before the transaction, and keeps `target` in
    /// `kept/` (the directory of removed objects) for an abort.
    /// * A file gets a further link there, and the rename then replaces its old name.
    /// * A directory cannot have a second link, so it is moved there first. A file is moved too if it cannot be linked.
    ///
    /// `new` is the name of `target`, which it has again if `rename_in_backing` fails.
    fn replace_preexisting(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
        target: &Arc<Object<B>>,
        new: NameAt<'_, B>,
        rename_in_backing: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let dir = new.dir.inode(&self.lower.base)?;
        let kept_name = target.key.ino.to_string();
        let kept_os_name = OsStr::new(&kept_name);
        let inode = target.inode(&self.lower.base)?;
        let linked = if target.kind == Kind::Dir {
            None
        } else {
            self.link_counts
                .record_link_before_creation(scope, target, &shadow.kept, &kept_name);
            Some(
                self.lower
                    .base
                    .link(&inode, &shadow.kept, kept_os_name)
                    .map(drop),
            )
        };
        match linked {
            Some(Ok(())) => {
                if let Err(errno) = rename_in_backing() {
                    // If the link remains, the end of the transaction removes it.
                    let _ = self.lower.base.unlink(&shadow.kept, kept_os_name);
                    return Err(errno);
                }
            }
            // An earlier removal of another name has kept the object already.
            Some(Err(Errno::EXIST)) => rename_in_backing()?,
            None | Some(Err(_)) => {
                self.keep_for_abort(scope, shadow, target, &dir, new.name)?;
                if let Err(errno) = rename_in_backing() {
                    self.link_counts.record_links_uncertain(scope, target);
                    // If this fails too, the object stays in `kept/`, and an abort restores it.
                    let _ = self.lower.base.rename(
                        &shadow.kept,
                        kept_os_name,
                        &dir,
                        new.name,
                        RenameFlags::NOREPLACE,
                    );
                    return Err(errno);
                }
            }
        }
        self.link_counts
            .record_link_created(scope, target, &shadow.kept, &kept_name);
        Ok(())
    }
}
