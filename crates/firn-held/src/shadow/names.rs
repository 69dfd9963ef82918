//! Changes of names in shadow mode: they go through, and what was there before is kept.

use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Backing, Errno, Kind, RenameFlags, Result};

use super::save::NO_BYTES;
use super::{Known, Shadow};
use crate::object::Object;
use crate::scope::{Held, Names, Scope};

impl<B: Backing> Shadow<B> {
    /// Takes note of an object that was made in the transaction.
    pub(crate) fn made(&self, ino: u64) {
        self.known.lock().insert(ino, Known::New);
    }
}

impl<B: Backing> Held<B> {
    /// An object that is kept seems to be gone.
    fn hide(&self, object: &Arc<Object<B>>) {
        self.anchored.lock().insert(object.key);
        object.hides.store(true, Ordering::Release);
    }

    pub(crate) fn remove_shadowed(
        &self,
        (scope, shadow): (&Scope<B>, &Shadow<B>),
        (parent, name): (&Arc<Object<B>>, &OsStr),
        object: &Arc<Object<B>>,
    ) -> Result<()> {
        self.save(scope, shadow, parent, NO_BYTES)?;
        let dir = parent.inner.read().node(&self.base)?;
        if shadow.is_new(object.key.1) {
            return match object.kind {
                Kind::Dir => self.base.rmdir(&dir, name),
                _ => self.base.unlink(&dir, name),
            };
        }
        self.keep(scope, shadow, object, (&dir, name))?;
        self.hide(object);
        Ok(())
    }

    /// Moves an object that was there to `kept/`.
    fn keep(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
        object: &Arc<Object<B>>,
        (dir, name): (&B::Node, &OsStr),
    ) -> Result<()> {
        match shadow.keep(&self.base, dir, name, object.key.1) {
            // Whoever moves a directory must be allowed to write in it; who removes it need not.
            Err(Errno::ACCESS) if object.kind == Kind::Dir => {
                self.save(scope, shadow, object, NO_BYTES)?;
                let node = object.inner.read().node(&self.base)?;
                self.base.set_mode(&node, 0o700)?;
                shadow.keep(&self.base, dir, name, object.key.1)
            }
            other => other,
        }
    }

    pub(crate) fn move_shadowed(
        &self,
        names: &Names<'_>,
        (scope, shadow): (&Scope<B>, &Shadow<B>),
        (source, target): (&Arc<Object<B>>, Option<&Arc<Object<B>>>),
        (from, name): (&Arc<Object<B>>, &OsStr),
        (to, new_name): (&Arc<Object<B>>, &OsStr),
        flags: RenameFlags,
    ) -> Result<()> {
        for dir in [from, to] {
            self.save(scope, shadow, dir, NO_BYTES)?;
        }
        // XFS gives a directory that an exchange moves a new time.
        let exchanged = [Some(source), target].into_iter().flatten();
        for object in exchanged.filter(|object| !flags.is_empty() && object.kind == Kind::Dir) {
            self.save(scope, shadow, object, NO_BYTES)?;
        }
        let go = || self.move_below(names, (from, name), (to, new_name), flags);
        let replaced = target.filter(|target| {
            let is_replaced = flags.is_empty() && !Arc::ptr_eq(source, target);
            is_replaced && !shadow.is_new(target.key.1)
        });
        let Some(target) = replaced else { return go() };
        let dir = to.inner.read().node(&self.base)?;
        let text = target.key.1.to_string();
        let kept = OsStr::new(&text);
        let node = target.inner.read().node(&self.base)?;
        // With one name more it is replaced as it would be without. A directory has one name.
        let linked = if target.kind == Kind::Dir {
            Err(Errno::PERM)
        } else {
            self.base.link(&node, &shadow.kept, kept).map(drop)
        };
        match linked {
            Ok(()) => {
                if let Err(errno) = go() {
                    let _ = self.base.unlink(&shadow.kept, kept);
                    return Err(errno);
                }
            }
            Err(Errno::EXIST) => go()?,
            Err(_) => {
                self.keep(scope, shadow, target, (&dir, new_name))?;
                if let Err(errno) = go() {
                    let _ = self.base.rename(&shadow.kept, kept, &dir, new_name, RenameFlags::NOREPLACE);
                    return Err(errno);
                }
            }
        }
        self.hide(target);
        Ok(())
    }
}
