//! [`Scope`]: one transaction that is not over, with the part of the tree that it covers, its stage and its changes.
//!
//! That part is the *scope* in the narrow sense: a directory and all below it, or some names in a directory and all
//! below them. The *stage* says how far the transaction is: open, prepared, decided or ended.
//!
//! Invariants
//! * Programs change the scope only while the stage is open. In any other stage a change waits until the stage is open
//!   or ended. The change fails if that may never happen.
//! * [`Scope::changed`] has every object with a change, by the number of the change.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use crate::conflict::AccessedFile;
use firn_backing::lock::Mutex;
use firn_backing::{Backing, Errno};
use parking_lot::Condvar;

use crate::change_log::{ChangeLog, Direction, StagedPath};
use crate::claim::Claim;
use crate::object::{Change, Object, ObjectState, StagedCopy};
use crate::shadow::Shadow;
use crate::staging;

mod apply_state;
mod names;
mod top;

pub(crate) use apply_state::ApplyState;
pub(crate) use names::{NameSet, is_at_names};
pub(crate) use top::{ScopeTop, TopNames};

/// Name of the extended attribute with the default ACL of a directory.
const DEFAULT_ACL: &str = "system.posix_acl_default";

/// Random identity of an arena (the memory that has pending data), different from that of every other arena.
pub type ArenaId = [u8; 16];

/// The stage of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Programs may change the scope.
    Open,
    /// Durable under this commit number; changes wait for the decision.
    Prepared(u64),
    /// Committed under this number; the backing does not have all changes yet.
    Decided(u64),
    /// The transaction is over, after a commit or an abort.
    Ended,
}

/// One transaction that is not over.
pub(crate) struct Scope<B: Backing> {
    /// Serial number of the transaction: N in `tx-N`.
    pub(crate) serial: u64,
    /// The directory of the scope.
    pub(crate) root: Arc<Object<B>>,
    /// Path of the scope at the begin; for a scope of names, the path of its first name. No other object can get this
    /// path while the transaction is open.
    pub(crate) path: Vec<u8>,
    /// The names in `root` that a scope of names has; `None` if the scope is all of `root`.
    pub(crate) names_in_root: Option<NameSet>,
    /// Key by which several hosts identify a transaction of names ([`crate::NamesBallots`]).
    pub(crate) key: Option<Vec<u8>>,
    /// Number of subdirectories that a transaction of names adds to `root`, minus those that it removes.
    pub(crate) subdirectories_in_root: AtomicI64,
    /// The names of `root` in its parent.
    pub(crate) top: ScopeTop<B>,
    /// `.firn/tx-N/`, the directory of the transaction.
    pub(crate) dir: B::Inode,
    /// `tx-N/new/`, which has the staged objects.
    pub(crate) new: B::Inode,
    /// `tx-N/away/`, which has objects between two names while a commit is applied.
    pub(crate) away: B::Inode,
    /// Staging directories below `new`, by the group and ACL that objects made in them inherit.
    staging_dirs: Mutex<HashMap<Inherited, StagingDir<B>>>,
    /// The staging directory for objects that inherit nothing.
    plain_staging_dir: Mutex<Option<StagingDir<B>>>,
    /// The thread that makes a staging directory holds this claim exclusively.
    staging_dir_creation: Claim,
    /// The number that the last change got.
    last_number: AtomicU64,
    /// Bytes of inline changes, which are in memory.
    pub(crate) inline_bytes: AtomicU64,
    /// Bytes written since the begin, including overwritten ones.
    pub(crate) written_bytes: AtomicU64,
    /// Threads that look up names in the scope share this claim. A thread that changes a name holds it exclusively.
    pub(crate) names_claim: Arc<Claim>,
    /// The changed objects, by the numbers of their changes.
    pub(crate) changed: Mutex<BTreeMap<u64, Arc<Object<B>>>>,
    /// Present stage of the transaction.
    pub(crate) stage: Mutex<Stage>,
    /// Signals a new stage, or a change of `refuses_changes`.
    stage_changed: Condvar,
    /// Whether changes fail with ECANCELED, because the transaction is about to be aborted.
    refuses_changes: AtomicBool,
    /// The log of a transaction that an earlier firnd prepared. The tables do not have its changes.
    pub(crate) recovered: Option<ChangeLog>,
    /// Whether the transaction undoes an earlier commit.
    pub(crate) is_undo: bool,
    /// Whether this firnd took the open transaction over from an earlier firnd. If so, it does not know which changes
    /// are synced.
    pub(crate) is_revived: bool,
    /// What processes on this host used before the prepare, for the vote of several hosts.
    pub(crate) recorded_accesses: Mutex<Option<Vec<AccessedFile>>>,
    /// Progress of the commit's application, and the transaction that follows.
    pub(crate) apply_state: ApplyState<B>,
    /// In shadow mode, the saved state that undoes the changes.
    pub(crate) shadow: Option<Shadow<B>>,
}

/// Attributes that a new object inherits from its directory.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Inherited {
    /// The group, if the directory has the set-group-id bit.
    group: Option<u32>,
    /// The default ACL of the directory, if it has one.
    acl: Option<Vec<u8>>,
}

impl Inherited {
    /// Returns what new objects in the directory `parent` inherit.
    fn from_parent<B: Backing>(base: &B, parent: &B::Inode) -> Result<Self, Errno> {
        let attr = base.attr(parent)?;
        let acl = if base.has_default_acl(parent) {
            Some(base.get_xattr(parent, OsStr::new(DEFAULT_ACL))?)
        } else {
            None
        };
        Ok(Self {
            group: (attr.mode & libc::S_ISGID != 0).then_some(attr.gid),
            acl,
        })
    }
}

/// A directory for staged objects, below `tx-N/new/`.
pub(crate) struct StagingDir<B: Backing> {
    /// Name of the directory in `new/`.
    pub(crate) name: String,
    /// Inode of the directory.
    pub(crate) inode: B::Inode,
}

impl<B: Backing> StagingDir<B> {
    /// Returns the staged copy that is the object `name` in this directory.
    pub(crate) fn into_copy(self, name: String) -> StagedCopy<B> {
        StagedCopy {
            staging_dir: self.inode,
            path: StagedPath {
                dir: self.name,
                name,
            },
            // Both are set when the commit is applied.
            kept_inode: None,
            final_name: None,
        }
    }
}

impl<B: Backing> Clone for StagingDir<B> {
    fn clone(&self) -> Self {
        Self {
            name: self.name.clone(),
            inode: self.inode.clone(),
        }
    }
}

impl<B: Backing> Scope<B> {
    /// Returns a transaction that covers the directory `root` and all below it, and makes the directories for its files
    /// in `dir`, its own directory. `path` is the path of `root` at the begin.
    ///
    /// `recovered` is the change log if an earlier firnd (server of this mount) prepared the transaction; it then
    /// starts as prepared and otherwise as open. `shadow` is the saved old state; `None` if changes are kept back until
    /// the commit.
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
        // The names of `root` in its parent, which the transaction does not cover.
        let top = ScopeTop::new(&root, &path, recovered.as_ref(), shadow.is_some());
        Ok(Self {
            serial,
            root,
            path,
            // The caller sets these two if the transaction covers only some names in `root`.
            names_in_root: None,
            key: None,
            subdirectories_in_root: AtomicI64::new(0),
            top,
            new: staging::make_dir(base, &dir, staging::NEW)?,
            shadow,
            away: staging::make_dir(base, &dir, staging::AWAY)?,
            dir,
            staging_dirs: Mutex::default(),
            plain_staging_dir: Mutex::default(),
            staging_dir_creation: Claim::default(),
            last_number: AtomicU64::new(0),
            inline_bytes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            names_claim: Arc::default(),
            changed: Mutex::default(),
            stage: Mutex::new(stage),
            stage_changed: Condvar::new(),
            refuses_changes: AtomicBool::new(false),
            recovered,
            is_undo: false,
            is_revived: false,
            recorded_accesses: Mutex::default(),
            apply_state: ApplyState::default(),
        })
    }

    /// Returns the direction in which the transaction's log is applied.
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

    /// Waits until programs may change what the transaction covers, or until the transaction is over. The caller must
    /// not be registered as a user of the scope ([`crate::uses`]), because the end of the transaction waits for these.
    ///
    /// Fails with ECANCELED if the transaction is about to be aborted. Fails with EBUSY if an earlier firnd prepared
    /// it, because its decision may never come.
    pub(crate) fn wait_until_open(&self) -> Result<(), Errno> {
        let mut stage = self.stage.lock();
        while let Stage::Prepared(_) | Stage::Decided(_) = *stage {
            if self.refuses_changes.load(Ordering::Acquire) {
                return Err(Errno::CANCELED);
            }
            if self.recovered.is_some() {
                return Err(Errno::BUSY);
            }
            stage.wait(&self.stage_changed);
        }
        if self.refuses_changes.load(Ordering::Acquire) {
            Err(Errno::CANCELED)
        } else {
            Ok(())
        }
    }

    /// Returns whether the scope has everything that programs wrote. If not, an abort has begun and failed, so the
    /// transaction can only be aborted.
    pub(crate) fn has_all_changes(&self) -> bool {
        let is_undoing = self.shadow.as_ref().is_some_and(Shadow::is_undoing);
        // A failed abort leaves the stage open. It has dropped pending data, so the scope is not what programs wrote.
        let has_failed_abort =
            self.stage() == Stage::Open && self.refuses_changes.load(Ordering::Acquire);
        !is_undoing && !has_failed_abort
    }

    /// Makes every new change fail with ECANCELED until the transaction ends. Does not wake waiting threads.
    pub(crate) fn refuse_changes_for_good(&self) {
        self.refuses_changes.store(true, Ordering::Release);
    }

    /// Makes changes fail with ECANCELED, including those that wait.
    pub(crate) fn refuse_changes(&self) {
        self.store_refuses_changes(true);
    }

    /// Lets changes succeed again after [`Self::refuse_changes`].
    pub(crate) fn allow_changes(&self) {
        self.store_refuses_changes(false);
    }

    fn store_refuses_changes(&self, refuses: bool) {
        // The flag is stored under the lock that waiting threads use, so that none of them misses it.
        let stage = self.stage.lock();
        self.refuses_changes.store(refuses, Ordering::Release);
        drop(stage);
        self.stage_changed.notify_all();
    }

    pub(crate) fn is_open(&self) -> bool {
        *self.stage.lock() == Stage::Open && !self.refuses_changes.load(Ordering::Acquire)
    }

    pub(crate) fn stage(&self) -> Stage {
        *self.stage.lock()
    }

    pub(crate) fn set_stage(&self, stage: Stage) {
        *self.stage.lock() = stage;
        self.stage_changed.notify_all();
    }

    /// Returns the commit number of a decided transaction; `None` in any other stage.
    pub(crate) fn decided_id(&self) -> Option<u64> {
        match *self.stage.lock() {
            Stage::Decided(id) => Some(id),
            _ => None,
        }
    }

    /// Returns whether a new transaction of the directory `root` can begin before this decided commit is applied.
    ///
    /// A commit of an earlier firnd has no tables, so programs see its tree only after the application. In shadow mode
    /// the application is short, so the next transaction waits for it. At most one transaction follows a commit.
    pub(crate) fn can_be_followed(&self, root: &Arc<Object<B>>) -> bool {
        Arc::ptr_eq(&self.root, root)
            && self.names_in_root.is_none()
            && self.decided_id().is_some()
            && self.recovered.is_none()
            && self.shadow.is_none()
            && self.apply_state.next_scope().is_none()
    }

    /// Sets the transaction that follows this one's commit.
    pub(crate) fn set_next_scope(&self, next: Arc<Self>) {
        self.apply_state.set_next_scope(next);
    }

    /// Returns the change of an object. If there is none, makes one and adds it to the list of the transaction's
    /// changes.
    pub(crate) fn get_or_create_change<'a>(
        &self,
        object: &Arc<Object<B>>,
        state: &'a mut ObjectState<B>,
    ) -> &'a mut Change<B> {
        if self.names_in_root.is_some() && Arc::ptr_eq(object, &self.root) {
            return self.shared_change(state);
        }
        state.change.get_or_insert_with(|| {
            let number = self.next_number();
            self.changed.lock().insert(number, Arc::clone(object));
            let origin = object.location.lock().clone();
            Box::new(Change::new(number, origin))
        })
    }

    /// Returns the staging directory for objects that are made in `parent`, and makes it if there is none. New objects
    /// are in a staging directory of the transaction until the commit moves them.
    ///
    /// It gives the objects the group and the ACL that the kernel would give them in `parent`.
    pub(crate) fn staging_dir_for(
        &self,
        base: &B,
        parent: &B::Inode,
    ) -> Result<StagingDir<B>, Errno> {
        let inherited = Inherited::from_parent(base, parent)?;
        if let Some(existing) = self.existing_staging_dir(&inherited) {
            return Ok(existing);
        }
        let _creation = Claim::acquire_exclusive(&self.staging_dir_creation);
        // Another thread may have made the directory while this one waited.
        if let Some(existing) = self.existing_staging_dir(&inherited) {
            return Ok(existing);
        }
        let staging_dir = self.make_staging_dir(base, &inherited)?;
        self.staging_dirs
            .lock()
            .insert(inherited, staging_dir.clone());
        Ok(staging_dir)
    }

    /// Makes a staging directory whose new objects inherit `inherited`. The caller holds the claim for the creation.
    fn make_staging_dir(&self, base: &B, inherited: &Inherited) -> Result<StagingDir<B>, Errno> {
        let name = format!("d{}", self.staging_dirs.lock().len());
        let inode = staging::make_dir(base, &self.new, &name)?;
        if let Some(acl) = &inherited.acl {
            base.set_xattr(&inode, OsStr::new(DEFAULT_ACL), acl, 0)?;
        }
        if let Some(gid) = inherited.group {
            base.set_owner(&inode, None, Some(gid))?;
            // With the set-group-id bit, new objects in the directory get its group.
            base.set_mode(&inode, 0o2700)?;
        }
        Ok(StagingDir { name, inode })
    }

    /// Returns the staging directory whose new objects inherit this, if it is made already.
    fn existing_staging_dir(&self, inherited: &Inherited) -> Option<StagingDir<B>> {
        self.staging_dirs.lock().get(inherited).cloned()
    }

    /// Returns the staging directory whose new files inherit nothing, and makes it if there is none.
    pub(crate) fn plain_staging_dir(&self, base: &B) -> Result<StagingDir<B>, Errno> {
        let existing = self.plain_staging_dir.lock().clone();
        if let Some(existing) = existing {
            return Ok(existing);
        }
        let staging_dir = self.staging_dir_for(base, &self.dir)?;
        *self.plain_staging_dir.lock() = Some(staging_dir.clone());
        Ok(staging_dir)
    }
}
