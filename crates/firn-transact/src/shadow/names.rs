//! Changes of names in shadow mode: they go to the backing at once, and removed old objects are kept in `kept/`.

use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use firn_backing::{Backing, Errno, Kind, RenameFlags, Result};

use super::{NO_BYTES, Shadow};
use crate::names::Entries;
use crate::object::{Key, Location, Object};
use crate::scope::Scope;
use crate::tree::Names;

impl<B: Backing> Entries<B> {
    /// Where an object counts as being that a transaction has removed: in the scope, under the name that it is kept by.
    pub(crate) fn hidden_place(&self, key: Key) -> Option<Location<B>> {
        let (serial, name) = {
            let hidden = self.tree.hidden.0.lock();
            let link = hidden.get(&key)?.first()?;
            (link.serial, OsString::from(&link.name))
        };
        let scope = self.scopes.find(|scope| scope.serial == serial)?;
        Some((Arc::clone(&scope.root), name))
    }

    pub(crate) fn remove_shadowed(
        &self,
        (scope, shadow): (&Scope<B>, &Shadow<B>),
        (parent, name): (&Arc<Object<B>>, &OsStr),
        object: &Arc<Object<B>>,
    ) -> Result<()> {
        self.originals
            .save_object(scope, shadow, parent, NO_BYTES)?;
        let dir = parent.inode(&self.lower.base)?;
        if shadow.is_new(object.key.1) {
            match object.kind {
                Kind::Dir => self.lower.base.rmdir(&dir, name)?,
                _ => self.lower.base.unlink(&dir, name)?,
            }
            self.new_one_lost_name(shadow, object);
            scope.check_names(&[]);
            return Ok(());
        }
        self.keep(scope, shadow, object, (&dir, name))?;
        scope.check_names(&[]);
        Ok(())
    }

    /// An object that was made in the transaction and has no name any more does not concern an abort.
    fn new_one_lost_name(&self, shadow: &Shadow<B>, object: &Object<B>) {
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
            shadow.known.lock().remove(&object.key.1);
        }
    }

    /// Moves an object that was there to `kept/`: it seems to be gone.
    fn keep(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
        object: &Arc<Object<B>>,
        (dir, name): (&B::Inode, &OsStr),
    ) -> Result<()> {
        let kept = object.key.1.to_string();
        // A directory is gone when it is there.
        if object.kind != Kind::Dir {
            self.own_links.hide_link(scope, object, &shadow.kept, &kept);
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
            .link_is_hidden(scope, object, &shadow.kept, &kept);
        Ok(())
    }

    pub(crate) fn move_shadowed(
        &self,
        names: &Names<'_, B>,
        (scope, shadow): (&Scope<B>, &Shadow<B>),
        (source, target): (&Arc<Object<B>>, Option<&Arc<Object<B>>>),
        (from, name): (&Arc<Object<B>>, &OsStr),
        (to, new_name): (&Arc<Object<B>>, &OsStr),
        flags: RenameFlags,
    ) -> Result<()> {
        for dir in [from, to] {
            self.originals.save_object(scope, shadow, dir, NO_BYTES)?;
        }
        // XFS gives a directory that an exchange moves a new time.
        let exchanged = [Some(source), target].into_iter().flatten();
        for object in exchanged.filter(|object| !flags.is_empty() && object.kind == Kind::Dir) {
            self.originals
                .save_object(scope, shadow, object, NO_BYTES)?;
        }
        let go = || self.move_below(names, (from, name), (to, new_name), flags);
        let replaced = target.filter(|target| {
            let is_replaced = flags.is_empty() && !Arc::ptr_eq(source, target);
            is_replaced && !shadow.is_new(target.key.1)
        });
        let Some(target) = replaced else {
            go()?;
            let new_one = target.filter(|target| flags.is_empty() && shadow.is_new(target.key.1));
            if let Some(target) = new_one.filter(|target| !Arc::ptr_eq(source, target)) {
                self.new_one_lost_name(shadow, target);
            }
            return Ok(());
        };
        let dir = to.inode(&self.lower.base)?;
        let text = target.key.1.to_string();
        let kept = OsStr::new(&text);
        let inode = target.inode(&self.lower.base)?;
        // With one name more it is replaced as it would be without. A directory has one name.
        let linked = if target.kind == Kind::Dir {
            Err(Errno::PERM)
        } else {
            self.own_links.hide_link(scope, target, &shadow.kept, &text);
            self.lower.base.link(&inode, &shadow.kept, kept).map(drop)
        };
        match linked {
            Ok(()) => {
                if let Err(errno) = go() {
                    let _ = self.lower.base.unlink(&shadow.kept, kept);
                    return Err(errno);
                }
            }
            Err(Errno::EXIST) => go()?,
            Err(_) => {
                self.keep(scope, shadow, target, (&dir, new_name))?;
                if let Err(errno) = go() {
                    self.own_links.link_may_go(scope, target);
                    let _ = self.lower.base.rename(
                        &shadow.kept,
                        kept,
                        &dir,
                        new_name,
                        RenameFlags::NOREPLACE,
                    );
                    return Err(errno);
                }
            }
        }
        self.own_links
            .link_is_hidden(scope, target, &shadow.kept, &text);
        scope.check_names(&[]);
        Ok(())
    }
}
