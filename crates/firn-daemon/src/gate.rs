//! The gate of a mount with transactions: each change of a program waits here until it may reach the engine. The gate
//! also logs accesses (reads and writes by range), by which hosts find conflicts.
//!
//! ```text
//!   firn-fuse · data socket ── pass ──► engine ──► transactions (a backing) ──► backing
//!                               ▲
//!            begin, prepare, commit, abort, restore: quiesce a directory
//! ```
//!
//! A mount with `drain=commit` has one gate, which is made when its parts are assembled. Other mounts have none.
//!
//! Terms
//! * A *pass* is the permission for one change. The change returns it when it has ended.
//! * The *scope* of a transaction is the directory, or the names in a directory, that the transaction covers.
//! * To *quiesce* a directory is to let the changes below it end and to let no other begin.
//! * *Direct access* is the right of a process to write bytes of a file into the arena (shared memory) itself.
//!
//! Promises
//! * While a directory is quiesced, no request changes contents below it: changes in progress have ended, direct access
//!   was revoked, and new changes wait. Changes elsewhere neither delay the quiesce nor wait for it.
//! * A change that waits for a commit or abort has no pass while it waits. So it delays neither transactions of other
//!   directories nor the request that commits or aborts.
//! * Accesses are logged only while a transaction is open for which several hosts test each other for conflicts.
//!
//! Which objects lie below a directory is read from the engine's tree of names, not from the backing. It decides which
//! passes a quiesce waits for, which data is drained, and which direct access is revoked. A quiesced directory cannot
//! be renamed. An object without a name counts as below each directory, because it may have been anywhere. Paths are
//! computed anew in each check, so a file that was moved below a directory counts too.
//!
//! A pass is not a lock: the backing may be called while a pass is held. The lock of the table of passes is held only
//! briefly, and is taken before every lock of the engine.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use firn_backing::lock::{Mutex, assert_none_held};
use firn_backing::{Caller, Errno, is_below, join_path};
use firn_engine::{Engine, HandleId, InodeId};
use firn_format::durability::DurabilityLevel;
use firn_fuse::{ChangeWatch, ChangedObject, Gate, Pass, RangeAccess};
use firn_transact::conflict::{Access, AccessLog};
use firn_transact::machine::Pending;
use firn_transact::{QuiesceTarget, ScopeError, TransactionError};
use parking_lot::Condvar;

use crate::process;
use crate::store::{Layers as _, LoggableStore, Store, TransactionalObject, TransactionalStore};
use crate::undone_scopes::{RequestedChange, UndoneScopes};

/// The directory at the top of a scope.
pub(crate) type ScopeRoot = TransactionalObject;

/// Maximum time that an abort waits for names in the kernel's cache to expire (`attr-timeout`), if firnd has just
/// continued the mount of a firnd that died.
pub(crate) const NAMES_AWAITED_MAX: Duration = Duration::from_secs(5);

/// The gate of one mount.
pub(crate) struct TransactionGate {
    engine: Arc<Engine<Store>>,
    /// The backing directory.
    backing: PathBuf,
    table: Mutex<GateTable>,
    /// Signals that a pass was returned, or that a directory is no longer quiesced.
    changed: Condvar,
    /// Number of quiesced directories, which is read without the lock.
    quiesced_count: AtomicUsize,
    accesses: Arc<AccessLog>,
    /// The observer of changes, if the mount has commit rules.
    watch: OnceLock<Weak<dyn ChangeWatch>>,
    /// Held while the log of accesses is emptied and switched. So the end of one transaction cannot switch it off for
    /// another.
    switch_lock: Mutex<()>,
    /// Until this time the kernel may have names from an earlier firnd that this firnd does not know. `None` if this
    /// firnd made the mount.
    foreign_names_until: Option<Instant>,
    /// Scopes of transactions that were aborted when an earlier firnd died. `None` if this firnd made the mount.
    undone_scopes: Option<UndoneScopes>,
}

/// Changes in progress, and quiesced directories.
#[derive(Default)]
struct GateTable {
    last_number: u64,
    /// The changed objects, by the number of the pass.
    passes: BTreeMap<u64, InodeId>,
    /// Paths of quiesced directories, by the number of the quiesce.
    quiesced: BTreeMap<u64, Vec<u8>>,
}

impl GateTable {
    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }
}

/// A quiesced directory. Dropping the value ends the quiesce.
struct QuiesceGuard<'a> {
    gate: &'a TransactionGate,
    /// Number of the quiesce in [`GateTable::quiesced`].
    number: u64,
}

impl Drop for QuiesceGuard<'_> {
    fn drop(&mut self) {
        let mut table = self.gate.table.lock();
        table.quiesced.remove(&self.number);
        self.gate.store_quiesced_count(&table);
        drop(table);
        self.gate.changed.notify_all();
    }
}

impl TransactionGate {
    /// Creates the gate, which admits changes of programs before they reach the engine. The mount must be able to have
    /// transactions, and no program may use it yet.
    ///
    /// `tests_conflicts` means that other hosts take part in transactions. Then the log of accesses also gets the
    /// ranges that processes write into the arena (the shared memory) themselves.
    pub(crate) fn new(engine: Arc<Engine<Store>>, backing: &Path, tests_conflicts: bool) -> Self {
        assert!(
            engine.backing().transactional().is_some(),
            "a gate stands before transactions"
        );
        let accesses = Arc::new(AccessLog::new());
        if tests_conflicts {
            let log = Arc::clone(&accesses);
            engine
                .direct_access
                .observe_direct_writes(Box::new(move |file, pid, range| {
                    log.add(file.number(), || file.path(), pid, Access::Write, range);
                }));
        }
        Self {
            engine,
            backing: backing.to_owned(),
            table: Mutex::default(),
            changed: Condvar::new(),
            quiesced_count: AtomicUsize::new(0),
            accesses,
            watch: OnceLock::new(),
            switch_lock: Mutex::default(),
            foreign_names_until: None,
            undone_scopes: None,
        }
    }

    /// Returns the gate of a mount that was taken over. For the time `name_cache_timeout`, the kernel may use names
    /// from before the takeover.
    pub(crate) fn for_taken_over_mount(self, name_cache_timeout: Duration) -> Self {
        let undone_scopes = self.engine.live().map(UndoneScopes::from_table);
        Self {
            foreign_names_until: Some(Instant::now() + name_cache_timeout.min(NAMES_AWAITED_MAX)),
            undone_scopes,
            ..self
        }
    }

    /// Returns whether the live table has an aborted scope.
    pub(crate) fn has_undone_scopes(&self) -> bool {
        match &self.undone_scopes {
            Some(scopes) => !scopes.is_empty(),
            None => false,
        }
    }

    /// Returns whether the last transaction of a scope was aborted because its firnd died.
    pub(crate) fn is_undone_scope(&self, path: &[u8]) -> bool {
        match &self.undone_scopes {
            Some(scopes) => scopes.is_aborted(path),
            None => false,
        }
    }

    /// Stops the refusal of changes in an aborted scope, because a request about its transaction is refused.
    pub(crate) fn record_refused_request(&self, path: &[u8]) {
        if let Some(scopes) = &self.undone_scopes {
            scopes.record_refused_request(path);
        }
    }

    /// Forgets an aborted scope, because its program knows of the abort.
    pub(crate) fn forget_undone_scope(&self, path: &[u8]) {
        if let Some(scopes) = &self.undone_scopes {
            scopes.remove(path);
        }
    }

    /// Returns the path of a changed object. `None` if the object has no name; then it belongs to no transaction.
    fn path_of_change(&self, object: ChangedObject<'_>) -> Option<Vec<u8>> {
        let tree = &self.engine.tree;
        match object {
            ChangedObject::Inode(inode)
            | ChangedObject::Handle(inode, _)
            | ChangedObject::Closed(inode, _) => tree.path_of(inode),
            ChangedObject::Name(dir, name) => Some(join_path(&tree.path_of(dir)?, name)),
        }
    }

    /// Waits until names from an earlier firnd have expired in the kernel. Call this before changed names are
    /// invalidated: this firnd cannot invalidate names that it does not know.
    pub(crate) fn await_foreign_names(&self) {
        if let Some(until) = self.foreign_names_until {
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
        }
    }

    /// Sets the observer of all later changes. Call this once, before the first request.
    pub(crate) fn set_watch(&self, watch: Weak<dyn ChangeWatch>) {
        assert!(self.watch.set(watch).is_ok(), "a gate has one watch");
    }

    /// Runs `work` while no program changes contents at or below `paths`, which are names in the directory `dir`.
    /// `work` gets that directory.
    ///
    /// Before that, data there that only the arena (the shared memory) has is drained to the backing or discarded, as
    /// `pending` says. If it cannot be drained, `work` does not run.
    pub(crate) fn quiesce_names<T>(
        &self,
        dir: &[u8],
        paths: &BTreeSet<Vec<u8>>,
        pending: Pending,
        work: impl FnOnce(&ScopeRoot) -> Result<T, TransactionError>,
    ) -> Result<T, TransactionError> {
        // Until the guard is dropped, `dir` cannot be renamed, so its path stays valid.
        let _path_stays = self.engine.tree.prevent_renames_of(dir);
        let root = self.directory_at(dir)?;
        // The changes below each path end, and no other begins. The order is sorted, so two calls with common paths
        // cannot deadlock.
        let _quiesced: Vec<QuiesceGuard<'_>> =
            paths.iter().map(|path| self.start_quiesce(path)).collect();
        // `work` needs descriptors, however many files programs have open. Idle files are open only for speed.
        if !process::has_spare_descriptors() {
            self.engine.open_files.close_idle_files();
        }
        for path in paths {
            self.engine.direct_access.revoke_grants_in_tree(path);
            match pending {
                Pending::Drain => self.drain_tree(path)?,
                Pending::Discard => self.engine.exclusive.discard_tree(path),
            }
        }
        let result = work(&root);
        // `work` may have restored set-id bits or capabilities of files in the backing.
        self.engine.privilege_rules.record_privileges_given();
        result
    }

    /// Drains all data at or below a path. A path that does not exist has no pending data.
    fn drain_tree(&self, path: &[u8]) -> Result<(), Errno> {
        let durability = &self.engine.durability;
        match durability.wait_tree(path, DurabilityLevel::Drained, &mut |_, _| true) {
            Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Returns the engine behind the gate.
    pub(crate) fn engine(&self) -> &Arc<Engine<Store>> {
        &self.engine
    }

    /// Returns the layer of transactions.
    pub(crate) fn store(&self) -> &TransactionalStore {
        let store = self.engine.backing().transactional();
        store.expect("looked at when the gate was made")
    }

    /// Returns the path of the backing directory.
    pub(crate) fn backing(&self) -> &Path {
        &self.backing
    }

    /// Returns the log of accesses, which is on only while it is needed.
    pub(crate) fn accesses(&self) -> &AccessLog {
        &self.accesses
    }

    /// Lets `switch` empty the log of accesses and switch it on or off, one thread at a time.
    pub(crate) fn switch_accesses(&self, switch: impl FnOnce(&AccessLog)) {
        let _switch_guard = self.switch_lock.lock();
        switch(&self.accesses);
    }

    fn store_quiesced_count(&self, table: &GateTable) {
        self.quiesced_count
            .store(table.quiesced.len(), Ordering::Release);
    }

    /// Returns whether a change of an object must wait for the end of a quiesce: the object may lie in a quiesced
    /// directory.
    fn must_wait(&self, table: &GateTable, inode: InodeId) -> bool {
        let mut paths = table.quiesced.values();
        paths.any(|path| self.engine.tree.may_be_at(inode, path))
    }

    /// Quiesces `path`: stops new changes at and below it until the returned guard is dropped, and waits for changes in
    /// progress. Each of these has a pass, an entry in `table.passes`.
    ///
    /// Before that, waits until nothing above or below `path` is quiesced. The caller must hold no lock.
    fn start_quiesce(&self, path: &[u8]) -> QuiesceGuard<'_> {
        assert_none_held("a quiesce, which waits for calls");
        let overlaps = |quiesced: &Vec<u8>| is_below(quiesced, path) || is_below(path, quiesced);
        let mut table = self.table.lock();
        while table.quiesced.values().any(overlaps) {
            table.wait(&self.changed);
        }
        let number = table.next_number();
        // From here on, no change below `path` gets a pass.
        table.quiesced.insert(number, path.to_vec());
        self.store_quiesced_count(&table);
        let is_below_path = |inode: &InodeId| self.engine.tree.may_be_at(*inode, path);
        while table.passes.values().any(is_below_path) {
            table.wait(&self.changed);
        }
        QuiesceGuard { gate: self, number }
    }

    /// Returns the directory that programs see at `path`. Fails if it does not exist, or cannot have transactions.
    pub(crate) fn directory_at(&self, path: &[u8]) -> Result<ScopeRoot, TransactionError> {
        let object = self.engine.tree.object_at(path).map_err(scope_error)?;
        match object.upper() {
            Some(root) => Ok(Arc::clone(root)),
            None => Err(ScopeError::NotTransactional.into()),
        }
    }

    /// Returns the object of an inode in the layer of transactions.
    fn transactional_object(&self, inode: InodeId) -> Result<TransactionalObject, Errno> {
        let object = self.engine.tree.object_of(inode)?;
        object.upper().cloned().ok_or(Errno::OPNOTSUPP)
    }

    /// Runs `work` while no program changes contents at or below `target`, the uppermost directory of a transaction.
    /// Before that, data there that only the arena (the shared memory) has is drained to the backing or discarded, as
    /// `pending` says. If the data cannot be drained, `work` does not run.
    pub(crate) fn quiesce<T>(
        &self,
        target: &QuiesceTarget<'_, LoggableStore>,
        pending: Pending,
        work: impl FnOnce(&ScopeRoot) -> Result<T, TransactionError>,
    ) -> Result<T, TransactionError> {
        // A program may rename the directory until `path_stays` forbids it, so the path is read again after that.
        let (path, _path_stays) = loop {
            let path = target.path_now();
            let path_stays = self.engine.tree.prevent_renames_of(&path);
            if target.path_now() == path {
                break (path, path_stays);
            }
        };
        let root = match target.root() {
            Some(root) => Arc::clone(root),
            None => self.directory_at(&path)?,
        };
        let _quiesced = self.start_quiesce(&path);
        // The work needs descriptors, however many files programs have open. If few are free, descriptors of idle files
        // are closed, which are kept only for speed.
        if !process::has_spare_descriptors() {
            self.engine.open_files.close_idle_files();
        }
        // Processes that write into the arena themselves must stop: the gate does not see their writes.
        self.engine.direct_access.revoke_grants_in_tree(&path);
        match pending {
            Pending::Drain => {
                self.engine
                    .durability
                    .wait_tree(&path, DurabilityLevel::Drained, &mut |_, _| true)?
            }
            Pending::Discard => self.engine.exclusive.discard_tree(&path),
        }
        let result = work(&root);
        // `work` may have restored set-id bits or capabilities of files in the backing.
        self.engine.privilege_rules.record_privileges_given();
        result
    }
}

/// Returns why a path cannot be the scope of a transaction.
fn scope_error(errno: Errno) -> TransactionError {
    match errno {
        Errno::NOENT => ScopeError::Missing.into(),
        Errno::NOTDIR => ScopeError::NotDirectory.into(),
        errno => errno.into(),
    }
}

impl Gate for TransactionGate {
    fn is_quiescing(&self, inode: InodeId) -> bool {
        self.quiesced_count.load(Ordering::Acquire) > 0 && self.must_wait(&self.table.lock(), inode)
    }

    fn holds_up_changes(&self) -> bool {
        self.quiesced_count.load(Ordering::Acquire) > 0 || self.store().admission.changes_wait()
    }

    fn enter(&self, inode: InodeId) -> Pass<'_> {
        assert_none_held("a pass, which waits for calls");
        let mut table = self.table.lock();
        while self.must_wait(&table, inode) {
            table.wait(&self.changed);
        }
        let number = table.next_number();
        table.passes.insert(number, inode);
        drop(table);
        Pass::new(self, number)
    }

    fn leave(&self, number: u64) {
        let mut table = self.table.lock();
        table.passes.remove(&number);
        let is_quiesce_waiting = !table.quiesced.is_empty();
        drop(table);
        if is_quiesce_waiting {
            self.changed.notify_all();
        }
    }

    /// Returns the permission (a pass) to change `inode` in the backing itself. Waits while changes below a directory
    /// above it are stopped (quiesced), and while its transaction waits for a commit or abort or is being committed.
    ///
    /// Fails with ECANCELED or EBUSY if the change may never become possible.
    ///
    /// A pass is sufficient, because a transaction is prepared or decided from its open state only while its scope is
    /// quiesced, which is only when no change in it has a pass.
    fn enter_change(&self, inode: InodeId) -> Result<Pass<'_>, Errno> {
        let admission = &self.store().admission;
        loop {
            // Changes wait only while a transaction is prepared or decided. That is rare, so it is tested before the
            // object is found.
            if admission.changes_wait() {
                admission.await_change(&self.transactional_object(inode)?)?;
            }
            let pass = self.enter(inode);
            // A transaction may have been prepared before this change got its pass. The change then waits again,
            // without a pass.
            let may_change_now = !admission.changes_wait()
                || admission.may_change(&self.transactional_object(inode)?);
            if may_change_now {
                return Ok(pass);
            }
        }
    }

    fn checks_changes(&self) -> bool {
        self.undone_scopes.is_some()
    }

    /// Refuses a change with ECANCELED if it would continue work that was lost when an earlier firnd, the serving
    /// process, died. Either its transaction was aborted and the program does not know that yet, or its open file was
    /// lost.
    ///
    /// `is_repeated`: the earlier firnd had the request already. Changes by a handle that this firnd has are always
    /// admitted.
    fn admit(
        &self,
        caller: Caller,
        is_repeated: bool,
        object: ChangedObject<'_>,
    ) -> Result<(), Errno> {
        // Without these scopes, this firnd made the mount, so no transaction of an earlier firnd was aborted.
        let Some(scopes) = &self.undone_scopes else {
            return Ok(());
        };
        // A handle is lost if an earlier firnd had opened it and this firnd could not resume it.
        let is_lost = |handle| self.engine.open_files.inode_of_handle(handle).is_none();
        let has_lost_handle = match object {
            // A close needs only its handle.
            ChangedObject::Closed(_, handle) => {
                return if is_lost(handle) {
                    Err(Errno::CANCELED)
                } else {
                    Ok(())
                };
            }
            ChangedObject::Handle(_, handle) => is_lost(handle),
            ChangedObject::Inode(_) | ChangedObject::Name(..) => false,
        };
        if matches!(object, ChangedObject::Handle(..)) && !has_lost_handle {
            return Ok(());
        }
        // Most changes need no check of scopes, because the programs of all aborted transactions were told.
        if scopes.has_uninformed_scope() {
            let path = self.path_of_change(object);
            if has_lost_handle || path.is_some() {
                let checkpoint_key = match (&path, self.watch()) {
                    (Some(path), Some(rules)) => rules.checkpoint_key(path),
                    _ => None,
                };
                scopes.check_change(&RequestedChange {
                    caller,
                    path: path.as_deref(),
                    checkpoint_key: checkpoint_key.as_deref(),
                    is_repeated,
                })?;
            }
        }
        if has_lost_handle {
            return Err(Errno::CANCELED);
        }
        Ok(())
    }

    fn watch(&self) -> Option<Arc<dyn ChangeWatch>> {
        self.watch.get()?.upgrade()
    }

    fn record_access(&self, handle: HandleId, pid: u32, access: RangeAccess, range: Range<u64>) {
        let access = match access {
            RangeAccess::Read => Access::Read,
            RangeAccess::Write => Access::Write,
        };
        if self.accesses.is_on()
            && let Ok(file) = self.engine.open_files.identify_file(handle)
        {
            self.accesses
                .add(file.number(), || file.path(), pid, access, range);
        }
    }
}
