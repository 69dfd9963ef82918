//! Changes of names in shadow mode: they go to the backing at once, and removed old objects are kept in `kept/`.

use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use firn_backing::{Backing, Errno, Kind, RenameFlags, Result};

use super::{NO_BYTES, Shadow};
use crate::names::{Entries, NameAt, RenamedObjects, RequestedRename};
use crate::object::{Key, Location, Object};
use crate::scope::Scope;
use crate::tree::NameChangeGuard;

impl<B: Backing> Entries<B> {
    /// Returns the place that a removed object of a transaction counts as having: in the scope's top, under its name in
    /// `kept/`.
    pub(crate) fn hidden_place(&self, key: Key) -> Option<Location<B>> {
        let (serial, name) = {
            let hidden = self.tree.hidden.0.lock();
            let link = hidden.get(&key)?.first()?;
            (link.serial, OsString::from(&link.name))
        };
        let scope = self.scopes.find(|scope| scope.serial == serial)?;
        Some((Arc::clone(&scope.root), name))
    }

    /// Removes a name of `object`. The backing loses the name at once; an object that existed before the transaction is
    /// kept for an abort.
    pub(crate) fn remove_shadowed(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
        removed: NameAt<'_, B>,
        object: &Arc<Object<B>>,
    ) -> Result<()> {
        let NameAt { dir: parent, name } = removed;
        self.originals
            .save_object(scope, shadow, parent, NO_BYTES)?;
        let dir = parent.inode(&self.lower.base)?;
        if shadow.is_new(object.key.1) {
            match object.kind {
                Kind::Dir => self.lower.base.rmdir(&dir, name)?,
                _ => self.lower.base.unlink(&dir, name)?,
            }
            self.forget_if_nameless(shadow, object);
            scope.check_names(&[]);
            return Ok(());
        }
        self.move_to_kept(scope, shadow, object, &dir, name)?;
        scope.check_names(&[]);
        Ok(())
    }

    /// Forgets an object that the transaction made and that has lost its last name, because an abort need not remove
    /// it.
    fn forget_if_nameless(&self, shadow: &Shadow<B>, object: &Object<B>) {
        let owned = object.inner.own();
        let Ok(inode) = owned.inode(&self.lower.base) else {
            return;
        };
        let is_gone = object.kind == Kind::Dir
            || self
                .lower
                .base
                .attr(&inode)
                .is_ok_and(|attr| attr.nlink == 0);
        if is_gone {
            object.become_nameless(&mut owned.edit(), inode);
            shadow.save_states.lock().remove(&object.key.1);
        }
    }

    /// Moves an object that existed before the transaction from `name` in `dir` to `kept/`, where programs do not see
    /// it.
    fn move_to_kept(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
        object: &Arc<Object<B>>,
        dir: &B::Inode,
        name: &OsStr,
    ) -> Result<()> {
        let kept = object.key.1.to_string();
        // Only links to files are hidden from link counts: a directory in `kept/` counts as removed.
        if object.kind != Kind::Dir {
            self.own_links
                .note_link_before_making(scope, object, &shadow.kept, &kept);
        }
        match shadow.move_to_kept(&self.lower.base, dir, name, object.key.1) {
            // A move of a directory needs permission to write in that directory; a removal does not.
            Err(Errno::ACCESS) if object.kind == Kind::Dir => {
                self.originals
                    .save_object(scope, shadow, object, NO_BYTES)?;
                let inode = object.inode(&self.lower.base)?;
                self.lower.base.set_mode(&inode, 0o700)?;
                shadow.move_to_kept(&self.lower.base, dir, name, object.key.1)
            }
            other => other,
        }?;
        self.own_links
            .note_link_made(scope, object, &shadow.kept, &kept);
        Ok(())
    }

    /// Makes a rename in the backing at once. An object that existed before the transaction and is replaced is
    /// kept for an abort.
    pub(crate) fn rename_shadowed(
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
        // On XFS an exchange sets the time of each directory that it moves, so the old state of these directories is
        // saved.
        let exchanged = [Some(source), target].into_iter().flatten();
        for object in exchanged.filter(|object| !flags.is_empty() && object.kind == Kind::Dir) {
            self.originals
                .save_object(scope, shadow, object, NO_BYTES)?;
        }
        let rename = || self.rename_in_backing(names, old, new, flags);
        let replaced = target.filter(|target| {
            let is_replaced = flags.is_empty() && !Arc::ptr_eq(source, target);
            is_replaced && !shadow.is_new(target.key.1)
        });
        let Some(target) = replaced else {
            rename()?;
            let is_replaced_new = |target: &&Arc<Object<B>>| {
                flags.is_empty() && shadow.is_new(target.key.1) && !Arc::ptr_eq(source, target)
            };
            if let Some(target) = target.filter(is_replaced_new) {
                self.forget_if_nameless(shadow, target);
            }
            return Ok(());
        };
        self.replace_preexisting(scope, shadow, target, new, &rename)?;
        scope.check_names(&[]);
        Ok(())
    }

    /// Makes a rename that replaces `target`, an object that existed before the transaction, and keeps `target` for an
    /// abort. `new` is the name of `target`, which the renamed object gets. If `rename` fails, `target` gets its name
    /// back.
    ///
    /// A further link keeps a file while the rename replaces it. A directory cannot have a second link, so it is moved
    /// to `kept/` first. A file is moved too if the file system has no links.
    fn replace_preexisting(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
        target: &Arc<Object<B>>,
        new: NameAt<'_, B>,
        rename: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let dir = new.dir.inode(&self.lower.base)?;
        let kept_name = target.key.1.to_string();
        let kept = OsStr::new(&kept_name);
        let inode = target.inode(&self.lower.base)?;
        let linked = if target.kind == Kind::Dir {
            Err(Errno::PERM)
        } else {
            self.own_links
                .note_link_before_making(scope, target, &shadow.kept, &kept_name);
            self.lower.base.link(&inode, &shadow.kept, kept).map(drop)
        };
        match linked {
            Ok(()) => {
                if let Err(errno) = rename() {
                    let _ = self.lower.base.unlink(&shadow.kept, kept);
                    return Err(errno);
                }
            }
            // An earlier removal of another name has kept the object already.
            Err(Errno::EXIST) => rename()?,
            Err(_) => {
                self.move_to_kept(scope, shadow, target, &dir, new.name)?;
                if let Err(errno) = rename() {
                    self.own_links.note_links_uncertain(scope, target);
                    let _ = self.lower.base.rename(
                        &shadow.kept,
                        kept,
                        &dir,
                        new.name,
                        RenameFlags::NOREPLACE,
                    );
                    return Err(errno);
                }
            }
        }
        self.own_links
            .note_link_made(scope, target, &shadow.kept, &kept_name);
        Ok(())
    }
}
