//! Makes the parts of a mount (its features and resources, such as the sockets) and starts them in order. The frontend,
//! a FUSE session or a tree of stub files, starts last and makes the mount visible.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use firn_config::{Drain, Participants};
use firn_fuse::Gate;
use firn_hosts::FileLocks;

use crate::answers::{ControlSocket, MountIdentity};
use crate::attach::AttachedArena;
use crate::commit_rules::{self, CommitRules};
use crate::data_socket::DataSocket;
use crate::error::MountError;
use crate::file_locks::{self, FileLockParams};
use crate::frontend::Frontend;
use crate::gate::TransactionGate;
use crate::host_name::shown_host_name;
use crate::part::{ArenaEnd, Part, Parts, StopContext};
use crate::partner::PartnerState;
use crate::parts::{
    ArenaMemory, BackupRounds, DataClients, HostReports, LastDrain, LocksOfFiles, Participation,
    PartnerCopies, ReadLogs, Record, Traffic, Transactions, WrittenLogs,
};
use crate::prepared::{MountSetup, PreparedFrontend};
use crate::store::Layers as _;
use crate::takeover::{TakenOverMount, Takeover};

/// A mount with its started parts and frontend; programs see it.
pub(crate) struct StartedMount {
    pub(crate) parts: Parts,
    pub(crate) frontend: Frontend,
}

impl MountSetup<'_> {
    /// Starts all parts and then the frontend, which makes the mount visible. After a failure all parts are stopped,
    /// including those of [`AttachedArena`].
    pub(crate) fn assemble(&self) -> Result<StartedMount, MountError> {
        let mut parts = self.attached.parts.clone();
        let assembled = self.add_and_start_parts(&mut parts);
        if assembled.is_err() {
            // No program has written yet. Recovered data stays in the arena for the next attempt.
            let arena_end = Self::arena_end_after_failure(self.taken_over);
            Parts::new(parts).stop(&mut StopContext::unseen(arena_end));
        }
        assembled
    }

    /// Returns what happens to the arena if the mount does not start. The arena (memory with the data that the backing
    /// lacks) stays if this firnd continues the mount of one that died: programs still have that mount, and another
    /// firnd may resume it.
    pub(crate) fn arena_end_after_failure(taken_over: Option<&TakenOverMount>) -> ArenaEnd {
        match taken_over {
            None => ArenaEnd::RemoveIfEmpty,
            Some(_) => ArenaEnd::Keep,
        }
    }

    /// Starts the parts of the mount (its features, such as the sockets), and then the frontend, by which programs see
    /// the mount. Each part is added to `parts` before it starts. After a failure, the caller stops all of `parts`.
    fn add_and_start_parts(
        &self,
        parts: &mut Vec<Arc<dyn Part>>,
    ) -> Result<StartedMount, MountError> {
        let data_socket_path = self.attached.files.socket.with_extension("data");
        let gate = self.make_gate();
        let takeover = self.prepare_takeover();
        parts.push(Arc::clone(&takeover) as Arc<dyn Part>);
        let file_locks = file_locks::start(&FileLockParams {
            backing: &self.checked.backing,
            engine: &self.attached.engine,
            options: self.options,
            link: self.link.as_ref(),
            taken_over: self.taken_over,
        })?;
        let prepared_frontend =
            PreparedFrontend::new(self, &data_socket_path, gate.clone(), file_locks.clone())?;
        self.add_parts(
            parts,
            &data_socket_path,
            gate,
            file_locks,
            &prepared_frontend,
        )?;
        // The caller keeps the list too, so that it can stop the parts after a failure.
        let all_parts = Parts::new(parts.clone());
        // The control socket listens before the mount is visible, because `firn status` must work from that moment on.
        all_parts.start()?;
        let arena = self.attached.engine.arena();
        // Messages of other processes name this process and its mount point.
        arena.set_holder(std::process::id(), &self.checked.mount_point);
        let invalidate_cache = prepared_frontend.cache_invalidator();
        let frontend = prepared_frontend.start(self, &data_socket_path, &takeover)?;
        if let Some(taken_over) = self.taken_over {
            taken_over.invalidate_lost_names(self.attached, &invalidate_cache);
        }
        Ok(StartedMount {
            parts: all_parts,
            frontend,
        })
    }

    /// Prepares the mount for a takeover by another firnd, which happens if this firnd dies.
    fn prepare_takeover(&self) -> Arc<Takeover> {
        let link = self.link.as_ref();
        match self.taken_over {
            Some(taken_over) => Takeover::for_taken_over_mount(self.request, taken_over, link),
            None => Takeover::for_new_mount(
                self.request,
                &self.attached.engine,
                &self.attached.files,
                &self.checked.mount_point,
                link,
            ),
        }
    }

    /// Adds the parts in the order in which they start.
    fn add_parts(
        &self,
        parts: &mut Vec<Arc<dyn Part>>,
        data_socket_path: &Path,
        gate: Option<Arc<TransactionGate>>,
        file_locks: Option<Arc<FileLocks>>,
        prepared: &PreparedFrontend,
    ) -> Result<(), MountError> {
        let AttachedArena {
            engine, workers, ..
        } = self.attached;
        let options = self.options;
        // This part stops after the last drains. So its last report has the data that remains in the arena.
        if let Some(lease_state) = &self.attached.report_lease {
            parts.push(HostReports::new(
                self.mount_identity(),
                Arc::clone(lease_state),
            ));
        }
        parts.push(Traffic::new(engine));
        parts.push(Record::new(
            self.mount_identity(),
            prepared.waiting_writers(engine),
            options.record,
            self.attached.files.record.clone(),
            workers,
        ));
        if let Some(locks) = &file_locks {
            parts.push(Arc::new(LocksOfFiles(Arc::clone(locks))));
        }
        if engine.backing().log_layer().is_some() {
            parts.push(if options.read_only {
                Arc::new(ReadLogs(Arc::clone(engine)))
            } else {
                WrittenLogs::new(engine, options.flatten)
            });
        }
        // This drain runs after the frontend and the sockets have stopped. So it also drains data that arrived until
        // their end.
        parts.push(Arc::new(LastDrain(Arc::clone(engine))));
        parts.push(prepared.frontend_part(engine, workers));
        parts.push(self.start_data_socket(data_socket_path, gate.clone(), file_locks, prepared)?);
        parts.push(ControlSocket::new(
            self.attached.files.socket.clone(),
            self.mount_identity(),
            workers,
        ));
        // This drain runs while the sockets still answer. It drains data that was written since the drain before the
        // unmount.
        parts.push(Arc::new(LastDrain(Arc::clone(engine))));
        if let Some(partner) = PartnerState::new(engine, options)? {
            parts.push(Arc::new(PartnerCopies(partner)));
        }
        if let Some(gate) = &gate {
            self.add_transactions(gate, prepared, parts)?;
        }
        if options.populate {
            parts.push(ArenaMemory::new(engine, workers));
        }
        Ok(())
    }

    /// Adds what the mount needs for transactions of programs: the commit rules (which changes make a checkpoint), the
    /// participation in transactions of several hosts, and the copies to a backup directory. `gate` makes changes of
    /// programs wait for transactions.
    fn add_transactions(
        &self,
        gate: &Arc<TransactionGate>,
        prepared: &PreparedFrontend,
        parts: &mut Vec<Arc<dyn Part>>,
    ) -> Result<(), MountError> {
        let AttachedArena {
            engine, workers, ..
        } = self.attached;
        let options = self.options;
        let invalidate_cache = prepared.cache_invalidator();
        // The longest wait for other hosts that take part in the same transaction.
        let hosts_timeout = Duration::from_millis(options.participants_wait_ms);
        let rules = match options.rules.as_slice() {
            [] => None,
            rule_texts => Some(CommitRules::new(
                gate,
                commit_rules::load(rule_texts)?,
                &invalidate_cache,
                hosts_timeout,
            )?),
        };
        let transactions = Transactions::new(gate, hosts_timeout, &invalidate_cache, rules)?;
        // An undone scope is the directory of a transaction that was aborted because its firnd died.
        if let Some(taken_over) = self.taken_over {
            let stored = &taken_over.resumed.contents.transactions;
            transactions.resume(stored, &self.attached.undone_scopes);
        }
        parts.push(transactions);
        if let Some(lease) = &self.attached.commit_lease {
            let lease = Arc::clone(lease);
            parts.push(Participation::new(gate, lease, &invalidate_cache, workers));
        }
        if options.backup.is_some() {
            let pause = Duration::from_millis(options.backup_every_ms);
            parts.push(BackupRounds::new(engine, pause));
        }
        Ok(())
    }

    /// Returns the gate that changes pass before they reach transactions; `None` if the mount has no transactions.
    fn make_gate(&self) -> Option<Arc<TransactionGate>> {
        if self.options.drain != Drain::Commit {
            return None;
        }
        let engine = Arc::clone(&self.attached.engine);
        let tests_conflicts = self.options.participants != Participants::Off;
        let gate = TransactionGate::new(engine, &self.checked.backing, tests_conflicts);
        if self.taken_over.is_none() {
            return Some(Arc::new(gate));
        }
        let name_cache_timeout = Duration::from_millis(self.options.attr_timeout_ms);
        Some(Arc::new(gate.for_taken_over_mount(name_cache_timeout)))
    }

    /// Starts to listen on the data socket, by which processes get direct access to the arena and stubs (empty files on
    /// tmpfs) get their bytes. Returns the part that holds the socket.
    fn start_data_socket(
        &self,
        path: &Path,
        gate: Option<Arc<TransactionGate>>,
        file_locks: Option<Arc<FileLocks>>,
        prepared: &PreparedFrontend,
    ) -> Result<Arc<dyn Part>, MountError> {
        let connection_count = Arc::new(AtomicU64::new(0));
        let socket = DataSocket::start(
            path,
            Arc::clone(&self.attached.engine),
            gate.map(|gate| gate as Arc<dyn Gate>),
            prepared.served_frontend(),
            file_locks,
            Arc::clone(&connection_count),
            self.attached.workers.clone(),
        )
        .map_err(MountError::io("listen on the data socket"))?;
        Ok(DataClients::new(socket, connection_count))
    }

    fn mount_identity(&self) -> MountIdentity {
        let options = self.options;
        MountIdentity {
            engine: Arc::clone(&self.attached.engine),
            backing: self.checked.backing.clone(),
            mount_point: self.checked.mount_point.clone(),
            host: shown_host_name(options),
            options: options.in_force(),
            lane_writers_max: match options.lane_writers {
                0 => options.io_threads,
                count => options.io_threads.min(count),
            },
            events: self.events.clone(),
        }
    }
}
