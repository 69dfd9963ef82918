//! Does for the steps of a transaction what only the mount can do: stops changes of programs, drains data to the
//! backing directory, clears the kernel's cache, and finds out which hosts are alive.

use std::cell::OnceCell;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use firn_backing::{Errno, is_below};
use firn_engine::Cached;
use firn_format::durability::DurabilityLevel;
use firn_hosts::LeaseUse;
use firn_transact::conflict::AccessedFile;
use firn_transact::machine::{Event, Mount, Pending};
use firn_transact::{QuiesceTarget, TransactionError, parent_of};
use rustix::fs::{Access, AtFlags, CWD, accessat};

use super::steps::record_step;
use crate::gate::{ScopeRoot, TransactionGate};
use crate::host_lease::LivingHosts;
use crate::participants::{self, READ_RETRY};
use crate::store::LoggableStore;

/// A mount, as one request or one background job may use it.
pub(super) struct MountActions<'a> {
    pub(super) gate: &'a TransactionGate,
    /// Timeout of waits for other hosts.
    pub(super) hosts_timeout: Duration,
    /// Callback that makes the kernel drop what it has cached.
    pub(super) invalidate_cache: &'a dyn Fn(Cached),
    /// Callback that starts to apply a commit after the answer.
    pub(super) apply_later: &'a dyn Fn(),
    /// Reports which hosts are alive; opened when this is first needed.
    pub(super) living_hosts: OnceCell<LivingHosts>,
}

impl<'a> MountActions<'a> {
    /// Returns the mount for a job that waits for no other host and after which the kernel's cache stays valid.
    pub(super) fn from_gate(gate: &'a TransactionGate) -> Self {
        Self {
            gate,
            hosts_timeout: Duration::ZERO,
            invalidate_cache: &|_| {},
            apply_later: &|| {},
            living_hosts: OnceCell::new(),
        }
    }

    /// Returns the object that reads from the hosts' leases which of them are alive; `None` if this host commits alone.
    /// It is opened once and kept.
    fn living_hosts(&self) -> Result<Option<&LivingHosts>, Errno> {
        let Some(members) = self.gate.store().lower.members() else {
            return Ok(None);
        };
        if let Some(living_hosts) = self.living_hosts.get() {
            return Ok(Some(living_hosts));
        }
        let purpose = LeaseUse::Transactions;
        match LivingHosts::open(self.gate.backing(), purpose, &members.host) {
            Ok(living_hosts) => Ok(Some(self.living_hosts.get_or_init(|| living_hosts))),
            Err(error) => {
                tracing::warn!(%error, "cannot find out which hosts are alive");
                Err(Errno::IO)
            }
        }
    }
}

impl Mount<LoggableStore> for MountActions<'_> {
    fn directory_at(&self, path: &[u8]) -> Result<ScopeRoot, TransactionError> {
        self.gate.directory_at(path)
    }

    /// Checks the rights of this process. The control socket serves only the user of this process and root, and root
    /// may do at least as much.
    fn must_be_writable(&self, path: &[u8]) -> Result<(), Errno> {
        let dir = self.gate.backing().join(OsStr::from_bytes(path));
        let wanted = Access::WRITE_OK | Access::EXEC_OK;
        accessat(CWD, &dir, wanted, AtFlags::EACCESS)
    }

    fn quiesce<T>(
        &self,
        target: &QuiesceTarget<'_, LoggableStore>,
        pending: Pending,
        work: impl FnOnce(&ScopeRoot) -> Result<T, TransactionError>,
    ) -> Result<T, TransactionError> {
        let path = target.path_now();
        self.note(Event::Quiesce, &path, None);
        self.gate.quiesce(target, pending, |root| {
            self.note(Event::Drained, &path, None);
            work(root)
        })
    }

    fn is_drained(&self, path: &[u8]) -> bool {
        // The first report ends the wait if files are left.
        let mut may_go_on = |_, files_left| files_left == 0;
        let durability = &self.gate.engine().durability;
        durability
            .wait_tree(path, DurabilityLevel::Drained, &mut may_go_on)
            .is_ok()
    }

    fn write_back(&self, path: &[u8]) {
        let written = self
            .gate
            .engine()
            .open_files
            .files_open_for_writing_below(path);
        written
            .into_iter()
            .map(Cached::Inode)
            .for_each(self.invalidate_cache);
    }

    fn forget_names(&self, paths: &[&[u8]]) {
        for (index, path) in paths.iter().enumerate() {
            let is_repeated = paths[..index].contains(path);
            if !is_repeated {
                let names = self.gate.engine().namespace.revalidate_names(path);
                names.into_iter().for_each(self.invalidate_cache);
                self.forget_directory(parent_of(path));
            }
        }
        self.gate.await_foreign_names();
    }

    fn forget_directory(&self, path: &[u8]) {
        let cached = self.gate.engine().tree.cached_at(path);
        cached.into_iter().for_each(self.invalidate_cache);
    }

    fn begin_accesses(&self, path: &[u8]) {
        self.gate.switch_accesses(|accesses| {
            accesses.take(|found| is_below(found, path));
            accesses.switch(true);
        });
    }

    fn take_accesses(&self, path: &[u8]) -> Vec<AccessedFile> {
        let used = self.gate.accesses().take(|found| is_below(found, path));
        participants::merge_threads_of_process(used)
    }

    fn put_accesses_back(&self, used: Vec<AccessedFile>) {
        self.gate.accesses().put_back(used);
    }

    fn end_accesses(&self, path: &[u8]) {
        self.gate.switch_accesses(|accesses| {
            accesses.take(|found| is_below(found, path));
            accesses.switch(self.gate.store().scopes.has_undecided());
        });
    }

    fn begin_wait(&self) -> impl FnMut() -> bool {
        let deadline = Instant::now() + self.hosts_timeout;
        let mut backoff = READ_RETRY.start();
        move || {
            let is_in_time = Instant::now() < deadline;
            if is_in_time {
                backoff.sleep();
            }
            is_in_time
        }
    }

    /// Returns whether one of `hosts` is alive, by its lease in the backing. Fails if the backing cannot be opened for
    /// that.
    fn is_any_living(&self, hosts: &[String]) -> Result<bool, Errno> {
        // A host that commits alone knows no others.
        let Some(living_hosts) = self.living_hosts()? else {
            return Ok(false);
        };
        for host in hosts {
            match living_hosts.is_living(host) {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                // A host counts as dead if its state cannot be read.
                Err(error) => {
                    tracing::warn!(%error, host, "cannot find out whether this host is alive; it counts as dead");
                }
            }
        }
        Ok(false)
    }

    fn apply_later(&self) {
        (self.apply_later)();
    }

    fn note_abort(&self, serial: u64) {
        if let Some(live) = self.gate.engine().live() {
            live.record_abort(serial);
        }
    }

    fn note(&self, event: Event, scope: &[u8], id: Option<u64>) {
        record_step(self.gate, event, scope, id);
    }
}
