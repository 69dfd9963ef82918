//! A transaction that is not over: its scope, how far it is, and what it changes.
//!
//! Invariants
//! * Changes are made while the stage is open; in another stage a thread waits until the stage is open again or
//!   ended.
//! * Every object with a change is listed in `changed` by the number of its change.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use crate::conflict::Used;
use firn_backing::lock::Mutex;
use firn_backing::{Backing, Errno};
use parking_lot::Condvar;

use crate::change_log::{ChangeLog, Direction};
use crate::claim::Claim;
use crate::object::{Change, Inner, Object};
use crate::shadow::Shadow;
use crate::staging;

mod application;
mod names;
mod top;

pub(crate) use application::Application;
pub(crate) use names::{NameSet, is_at_names};
pub(crate) use top::Top;

/// What an arena is told from all others by.
pub type ArenaId = [u8; 16];

/// How far a transaction is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Programs change things.
    Open,
    /// Durable; changes wait until it is decided.
    Prepared(u64),
    /// Committed; not all of it is applied.
    Decided(u64),
    /// Over.
    Ended,
}

/// A directory and all below it, or some names in it and all below them, while a transaction is open there.
pub(crate) struct Scope<B: Backing> {
    pub(crate) serial: u64,
    pub(crate) root: Arc<Object<B>>,
    /// When the transaction began. Nothing else comes to be there while it is open. Of a scope of names, the path of the first.
    pub(crate) path: Vec<u8>,
    /// The names in `root` that it is made of; none: it is all of `root`.
    pub(crate) names_in_root: Option<NameSet>,
    /// Key of the transaction for the hosts that write in it, where there are several ([`crate::NamesBallots`]).
    pub(crate) key: Option<Vec<u8>>,
    /// Subdirectories that it makes in `root`, less those that it removes, where `root` is not a part of it.
    pub(crate) subdirectories_in_root: AtomicI64,
    pub(crate) top: Top<B>,
    pub(crate) dir: B::Inode,
    pub(crate) new: B::Inode,
    pub(crate) away: B::Inode,
    /// Directories below `new`, by what objects made in them inherit.
    staging_dirs: Mutex<HashMap<Inherited, (String, B::Inode)>>,
    /// The one for objects that inherit nothing.
    plain_staging_dir: Mutex<Option<(String, B::Inode)>>,
    /// Owned by the thread that makes a staging directory.
    making_staging_dir: Claim,
    last_number: AtomicU64,
    /// Bytes of inline changes.
    pub(crate) inline_bytes: AtomicU64,
    /// Bytes written since it began, overwritten ones too.
    pub(crate) written_bytes: AtomicU64,
    /// Shared by threads that look names up in the scope, owned by a thread that changes one.
    pub(crate) names: Arc<Claim>,
    pub(crate) changed: Mutex<BTreeMap<u64, Arc<Object<B>>>>,
    pub(crate) stage: Mutex<Stage>,
    stage_changed: Condvar,
    /// The transaction is going to be aborted: changes fail with ECANCELED.
    refusing: AtomicBool,
    /// Prepared by an earlier firnd: its changes are in this record only.
    pub(crate) recovered: Option<ChangeLog>,
    /// It undoes an earlier commit.
    pub(crate) is_undo: bool,
    /// Programs changed things in it through an earlier firnd: this one does not know what of that is not durable.
    pub(crate) is_revived: bool,
    /// Prepared to commit with other hosts: what processes here used before.
    pub(crate) used: Mutex<Option<Vec<Used>>>,
    /// How it is applied.
    pub(crate) application: Application<B>,
    /// Where it does not hold changes: what undoes them.
    pub(crate) shadow: Option<Shadow<B>>,
}

/// What a new object takes from its directory: group and default ACL.
type Inherited = (Option<u32>, Option<Vec<u8>>);

impl<B: Backing> Scope<B> {
    /// Of the transaction that is stored in `dir`. `recovered` is the record of one that an earlier firnd prepared,
    /// `shadow` what is saved in shadow mode.
    pub(crate) fn new(
        base: &B,
        serial: u64,
        root: Arc<Object<B>>,
        path: Vec<u8>,
        dir: B::Inode,
        recovered: Option<ChangeLog>,
        shadow: Option<Shadow<B>>,
    ) -> Result<Self, Errno> {
        let stage = recovered
            .as_ref()
            .map_or(Stage::Open, |record| Stage::Prepared(record.id));
        let top = Top::new(&root, &path, recovered.as_ref(), shadow.is_some());
        Ok(Self {
            serial,
            root,
            path,
            names_in_root: None,
            key: None,
            subdirectories_in_root: AtomicI64::new(0),
            top,
            new: staging::dir(base, &dir, staging::NEW)?,
            shadow,
            away: staging::dir(base, &dir, staging::AWAY)?,
            dir,
            staging_dirs: Mutex::default(),
            plain_staging_dir: Mutex::default(),
            making_staging_dir: Claim::default(),
            last_number: AtomicU64::new(0),
            inline_bytes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            names: Arc::default(),
            changed: Mutex::default(),
            stage: Mutex::new(stage),
            stage_changed: Condvar::new(),
            refusing: AtomicBool::new(false),
            recovered,
            is_undo: false,
            is_revived: false,
            used: Mutex::default(),
            application: Application::default(),
        })
    }

    /// In which direction its log is applied.
    pub(crate) fn direction(&self) -> Direction {
        if self.is_undo {
            Direction::Undo
        } else {
            Direction::Redo
        }
    }

    pub(crate) fn next_number(&self) -> u64 {
        self.last_number.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Waits until changes are allowed again; EBUSY where that may never be.
    pub(crate) fn wait_until_open(&self) -> Result<(), Errno> {
        let mut stage = self.stage.lock();
        while let Stage::Prepared(_) | Stage::Decided(_) = *stage {
            if self.refusing.load(Ordering::Acquire) {
                return Err(Errno::CANCELED);
            }
            if self.recovered.is_some() {
                return Err(Errno::BUSY);
            }
            stage.wait(&self.stage_changed);
        }
        if self.refusing.load(Ordering::Acquire) {
            Err(Errno::CANCELED)
        } else {
            Ok(())
        }
    }

    /// What programs wrote is all there: no abort has begun and failed.
    pub(crate) fn is_whole(&self) -> bool {
        let is_undoing = self.shadow.as_ref().is_some_and(Shadow::is_undoing);
        // An abort that failed had dropped what was pending: what is left is not what programs wrote.
        let is_given_up = self.stage() == Stage::Open && self.refusing.load(Ordering::Acquire);
        !is_undoing && !is_given_up
    }

    /// Every change fails with ECANCELED from now on.
    pub(crate) fn stop_for_good(&self) {
        self.refusing.store(true, Ordering::Release);
    }

    /// Changes fail with ECANCELED from now on, also those that wait; or they are allowed again.
    pub(crate) fn refuse_changes(&self, refuse: bool) {
        // Under the lock of the waiting threads, so that none of them misses the change.
        let stage = self.stage.lock();
        self.refusing.store(refuse, Ordering::Release);
        drop(stage);
        self.stage_changed.notify_all();
    }

    pub(crate) fn is_open(&self) -> bool {
        *self.stage.lock() == Stage::Open && !self.refusing.load(Ordering::Acquire)
    }

    pub(crate) fn stage(&self) -> Stage {
        *self.stage.lock()
    }

    pub(crate) fn set_stage(&self, stage: Stage) {
        *self.stage.lock() = stage;
        self.stage_changed.notify_all();
    }

    pub(crate) fn decided(&self) -> Option<u64> {
        match *self.stage.lock() {
            Stage::Decided(id) => Some(id),
            _ => None,
        }
    }

    /// Whether a transaction of the same directory can begin while this one is applied. One of an earlier
    /// firnd has no tables, so programs see its tree only when that is over; in shadow mode there is nothing to do
    /// that takes long.
    pub(crate) fn can_be_followed(&self, root: &Arc<Object<B>>) -> bool {
        Arc::ptr_eq(&self.root, root)
            && self.names_in_root.is_none()
            && self.decided().is_some()
            && self.recovered.is_none()
            && self.shadow.is_none()
            && self.application.next().is_none()
    }

    pub(crate) fn set_next(&self, next: Arc<Self>) {
        self.application.set_next(next);
    }

    /// The change of an object, made if there is none.
    pub(crate) fn change<'a>(
        &self,
        object: &Arc<Object<B>>,
        inner: &'a mut Inner<B>,
    ) -> &'a mut Change<B> {
        if self.names_in_root.is_some() && Arc::ptr_eq(object, &self.root) {
            return self.shared_change(inner);
        }
        inner.change.get_or_insert_with(|| {
            let number = self.next_number();
            self.changed.lock().insert(number, Arc::clone(object));
            let origin = object.location.lock().clone();
            Box::new(Change::new(number, origin))
        })
    }

    /// Where to stage an object that is made in `parent`: with the group and the ACL that the kernel would
    /// give it there.
    pub(crate) fn staging_dir_for(
        &self,
        base: &B,
        parent: &B::Inode,
    ) -> Result<(String, B::Inode), Errno> {
        let attr = base.attr(parent)?;
        let group = (attr.mode & libc::S_ISGID != 0).then_some(attr.gid);
        let acl_name = OsStr::new("system.posix_acl_default");
        let acl = if base.has_default_acl(parent) {
            Some(base.get_xattr(parent, acl_name)?)
        } else {
            None
        };
        let inherited = (group, acl.clone());
        if let Some(known) = self.known_staging_dir(&inherited) {
            return Ok(known);
        }
        let _making = Claim::own(&self.making_staging_dir);
        if let Some(known) = self.known_staging_dir(&inherited) {
            return Ok(known);
        }
        let name = format!("d{}", self.staging_dirs.lock().len());
        let inode = staging::dir(base, &self.new, &name)?;
        if let Some(acl) = &acl {
            base.set_xattr(&inode, acl_name, acl, 0)?;
        }
        if let Some(gid) = group {
            base.set_owner(&inode, None, Some(gid))?;
            base.set_mode(&inode, 0o2700)?;
        }
        let made = (name, inode);
        self.staging_dirs.lock().insert(inherited, made.clone());
        Ok(made)
    }

    fn known_staging_dir(&self, inherited: &Inherited) -> Option<(String, B::Inode)> {
        self.staging_dirs.lock().get(inherited).cloned()
    }

    /// Staging directory whose new files inherit nothing.
    pub(crate) fn plain_staging_dir(&self, base: &B) -> Result<(String, B::Inode), Errno> {
        let known = self.plain_staging_dir.lock().clone();
        if let Some(known) = known {
            return Ok(known);
        }
        let found = self.staging_dir_for(base, &self.dir)?;
        *self.plain_staging_dir.lock() = Some(found.clone());
        Ok(found)
    }
}
