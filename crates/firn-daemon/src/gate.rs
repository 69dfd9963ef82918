//! The gate of a mount with transactions: what changes pass, what stops them, and what they used.
//!
//! ```text
//!   firn-fuse · data socket ── pass ──► engine ──► transactions (a backing) ──► backing
//!                               ▲
//!            begin, prepare, commit, abort, restore: quiesce
//! ```
//!
//! There is one for each mount with `drain=commit`, made by [`Attached`](crate::attach::Attached), and none otherwise.
//!
//! Promises
//! * While a directory is quiesced nobody changes contents below it: changes under way have ended, direct access was
//!   revoked, and new ones wait.
//! * A change that waits for the outcome of a transaction has no pass, so it holds up no other directory's transactions,
//!   nor what is to decide that outcome.
//! * Accesses are noted only while a transaction is open whose hosts test each other for conflicts.
//!
//! Why a pass is enough: a transaction is prepared, and decided while it is open, only with the mount quiesced. So a change
//! that was allowed when it got its pass is allowed until it gives it back.
//!
//! The lock is held while the backing works: that is what it is for. It comes before every lock of the engine.

use std::ops::Range;
use std::sync::Arc;

use firn_backing::{DirBacking, Errno};
use firn_conflict::{Access, Log};
use firn_engine::{Engine, HandleId, InodeId};
use firn_format::durability::DurabilityLevel;
use firn_fuse::{Gate, Pass};
use firn_transact::{Object, ScopeError, TransactionError};
use parking_lot::RwLock;

use crate::process;
use crate::store::{Store, TransactionalStore};

/// What becomes of the data that is pending in a directory that is quiesced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pending {
    /// It goes to the backing.
    Drain,
    /// It is dropped.
    Discard,
    /// It stays, and counts as written afterwards.
    Keep,
}

/// The directory at the top of a scope.
pub(crate) type ScopeRoot = Arc<Object<DirBacking>>;

/// The gate of one mount.
pub(crate) struct TransactionGate {
    engine: Arc<Engine<Store>>,
    /// Held for reading by each change, for writing by who quiesces.
    changes: RwLock<()>,
    accesses: Arc<Log>,
}

impl TransactionGate {
    /// The gate of a mount that can have transactions and that no program has used yet. `tests_conflicts`: other hosts
    /// take part, so which bytes each process uses is logged, also those written by direct access.
    pub(crate) fn new(engine: Arc<Engine<Store>>, tests_conflicts: bool) -> Self {
        assert!(
            engine.backing().transactional().is_some(),
            "a gate stands before transactions"
        );
        let accesses = Arc::new(Log::new());
        if tests_conflicts {
            let log = Arc::clone(&accesses);
            engine.observe_direct_writes(Box::new(move |file, pid, range| {
                log.add(file.number(), || file.path(), pid, Access::Write, range);
            }));
        }
        Self {
            engine,
            changes: RwLock::new(()),
            accesses,
        }
    }

    /// What the gate stands before.
    pub(crate) fn engine(&self) -> &Arc<Engine<Store>> {
        &self.engine
    }

    /// The transactions.
    pub(crate) fn store(&self) -> &TransactionalStore {
        let store = self.engine.backing().transactional();
        store.expect("looked at when the gate was made")
    }

    /// What processes used; switched on while it matters.
    pub(crate) fn accesses(&self) -> &Log {
        &self.accesses
    }

    /// The directory that a transaction covers.
    pub(crate) fn scope_at(&self, path: &[u8]) -> Result<ScopeRoot, TransactionError> {
        if let Some(top) = self.store().top_known_as(path) {
            return Ok(top);
        }
        let inode = self.engine.object_at(path).map_err(not_a_scope)?;
        let root = inode.transactional();
        Ok(Arc::clone(root.ok_or(ScopeError::NotTransactional)?))
    }

    /// The object of an inode.
    fn object_of(&self, inode: InodeId) -> Result<Arc<Object<DirBacking>>, Errno> {
        let inode = self.engine.object_of(inode)?;
        inode.transactional().cloned().ok_or(Errno::OPNOTSUPP)
    }

    /// Runs `work` while nobody changes contents at or below `path`, all of whose pending data is treated as `pending`
    /// says before. Where it cannot be drained, `work` does not run.
    pub(crate) fn quiesce<T>(
        &self,
        path: &[u8],
        pending: Pending,
        work: impl FnOnce(&ScopeRoot) -> Result<T, TransactionError>,
    ) -> Result<T, TransactionError> {
        // A transaction is known by its path at the begin, and its top may have been renamed since.
        let (place, _path_stays) = loop {
            let place = self.store().path_now(path);
            let path_stays = self.engine.hold_path(&place);
            if self.store().path_now(path) == place {
                break (place, path_stays);
            }
        };
        let root = self.scope_at(path)?;
        let _quiet = self.changes.write();
        // Whatever programs have open: the work gets the descriptors that are kept only to be faster, if it may need them.
        if !process::has_spare_descriptors() {
            self.engine.close_idle_files();
        }
        self.engine.revoke_grants_in_tree(&place);
        match pending {
            Pending::Drain => {
                self.engine
                    .wait_tree(&place, DurabilityLevel::Drained, &mut |_, _| true)?
            }
            Pending::Discard => self.engine.discard_tree(&place),
            Pending::Keep => {}
        }
        let done = work(&root);
        // It may have brought privileges back.
        self.engine.note_privileges_given();
        done
    }
}

fn not_a_scope(errno: Errno) -> TransactionError {
    match errno {
        Errno::NOENT => ScopeError::Missing.into(),
        Errno::NOTDIR => ScopeError::NotDirectory.into(),
        errno => errno.into(),
    }
}

impl Gate for TransactionGate {
    fn is_quiescing(&self) -> bool {
        self.changes.is_locked_exclusive()
    }

    fn holds_up_changes(&self) -> bool {
        self.is_quiescing() || self.store().changes_wait()
    }

    fn enter(&self) -> Pass<'_> {
        self.changes.read()
    }

    fn enter_change(&self, inode: InodeId) -> Result<Pass<'_>, Errno> {
        loop {
            if self.store().changes_wait() {
                self.store().await_change(&self.object_of(inode)?)?;
            }
            let pass = self.changes.read();
            if !self.store().changes_wait() || self.store().may_change(&self.object_of(inode)?) {
                return Ok(pass);
            }
        }
    }

    fn note_access(&self, handle: HandleId, pid: u32, access: Access, range: Range<u64>) {
        if self.accesses.is_on()
            && let Ok(file) = self.engine.identify_file(handle)
        {
            self.accesses
                .add(file.number(), || file.path(), pid, access, range);
        }
    }
}
