//! Assembles the parts of a mount and starts them in order. The frontend starts last and makes the mount visible.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use firn_config::{Drain, Participants};
use firn_fuse::Gate;
use firn_hosts::FileLocks;

use crate::answers::{ControlSocket, Identity};
use crate::attach::Attached;
use crate::commit_rules::{self, CommitRules};
use crate::data_socket::DataSocket;
use crate::error::MountError;
use crate::file_locks::{self, MountWithLocks};
use crate::frontend::Frontend;
use crate::gate::TransactionGate;
use crate::host_name::shown_host_name;
use crate::part::{ArenaEnd, Part, Parts, Stop};
use crate::partner::PartnerBoard;
use crate::parts::{
    ArenaMemory, BackupRounds, DataClients, HostReports, LastDrain, LocksOfFiles, Participation,
    PartnerCopies, ReadLogs, Record, Traffic, Transactions, WrittenLogs,
};
use crate::prepared::{MountSetup, Prepared};
use crate::store::Layers as _;
use crate::takeover::{TakenOver, Takeover};

/// A mount that programs see.
pub(crate) struct Assembled {
    pub(crate) parts: Parts,
    pub(crate) frontend: Frontend,
}

impl MountSetup<'_> {
    /// Starts all parts and then the frontend, which makes the mount visible. After a failure all parts are stopped,
    /// including those of [`Attached`].
    pub(crate) fn assemble(&self) -> Result<Assembled, MountError> {
        let mut list = self.attached.parts.clone();
        let started = self.start_list(&mut list);
        if started.is_err() {
            // No program has written yet. Recovered data stays in the arena for the next attempt.
            let end = Self::end_of_failed(self.taken_over);
            Parts::new(list).stop(&mut Stop::unseen(end));
        }
        started
    }

    /// Returns what happens to the arena if the mount does not start. The arena of a mount that is taken over is kept,
    /// because programs have that mount and another firnd may resume it.
    pub(crate) fn end_of_failed(taken_over: Option<&TakenOver>) -> ArenaEnd {
        match taken_over {
            None => ArenaEnd::RemoveIfEmpty,
            Some(_) => ArenaEnd::Keep,
        }
    }

    fn start_list(&self, list: &mut Vec<Arc<dyn Part>>) -> Result<Assembled, MountError> {
        let data_path = self.attached.files.socket.with_extension("data");
        let gate = self.make_gate();
        let takeover = self.prepare_takeover();
        list.push(Arc::clone(&takeover) as _);
        let file_locks = file_locks::start(&MountWithLocks {
            backing: &self.checked.backing,
            engine: &self.attached.engine,
            options: self.options,
            link: self.link.as_ref(),
            taken_over: self.taken_over,
        })?;
        let prepared = Prepared::new(self, &data_path, gate.clone(), file_locks.clone())?;
        self.add_parts(list, &data_path, gate, file_locks, &prepared)?;
        let parts = Parts::new(list.clone());
        // The control socket listens before the mount is visible, because `firn status` must work from that moment on.
        parts.start()?;
        let arena = self.attached.engine.arena();
        arena.set_holder(std::process::id(), &self.checked.mount_point);
        let forget = prepared.forget();
        let frontend = prepared.start(self, &data_path, &takeover)?;
        if let Some(taken) = self.taken_over {
            taken.forget_lost(self.attached, &forget);
        }
        Ok(Assembled { parts, frontend })
    }

    fn prepare_takeover(&self) -> Arc<Takeover> {
        let link = self.link.as_ref();
        match self.taken_over {
            Some(taken) => Takeover::go_on(self.request, taken, link),
            None => Takeover::begin(
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
        data_path: &Path,
        gate: Option<Arc<TransactionGate>>,
        file_locks: Option<Arc<FileLocks>>,
        prepared: &Prepared,
    ) -> Result<(), MountError> {
        let Attached {
            engine, workers, ..
        } = self.attached;
        let options = self.options;
        // This part stops after the last drains. So its last report has the data that remains in the arena.
        if let Some(beats) = &self.attached.beats {
            parts.push(HostReports::new(self.identify(), Arc::clone(beats)));
        }
        parts.push(Traffic::new(engine));
        parts.push(Record::new(
            self.identify(),
            prepared.waiting_writers(engine),
            options.record,
            self.attached.files.record.clone(),
            workers,
        ));
        if let Some(locks) = &file_locks {
            parts.push(Arc::new(LocksOfFiles(Arc::clone(locks))));
        }
        if engine.backing().logged().is_some() {
            parts.push(if options.read_only {
                Arc::new(ReadLogs(Arc::clone(engine)))
            } else {
                WrittenLogs::new(engine, options.flatten)
            });
        }
        // This drain runs after the frontend and the sockets have stopped. So it also drains data that arrived until
        // their end.
        parts.push(Arc::new(LastDrain(Arc::clone(engine))));
        parts.push(prepared.part(engine, workers));
        parts.push(self.listen_for_data(data_path, gate.clone(), file_locks, prepared)?);
        parts.push(ControlSocket::new(
            self.attached.files.socket.clone(),
            self.identify(),
            workers,
        ));
        // This drain runs while the sockets still answer. It drains data that was written since the drain before the
        // unmount.
        parts.push(Arc::new(LastDrain(Arc::clone(engine))));
        if let Some(board) = PartnerBoard::new(engine, options)? {
            parts.push(Arc::new(PartnerCopies(board)));
        }
        if let Some(gate) = &gate {
            self.add_transactions(gate, prepared, parts)?;
        }
        if options.populate {
            parts.push(ArenaMemory::new(engine, workers));
        }
        Ok(())
    }

    fn add_transactions(
        &self,
        gate: &Arc<TransactionGate>,
        prepared: &Prepared,
        parts: &mut Vec<Arc<dyn Part>>,
    ) -> Result<(), MountError> {
        let Attached {
            engine, workers, ..
        } = self.attached;
        let options = self.options;
        let forget = prepared.forget();
        let patience = Duration::from_millis(options.participants_wait_ms);
        let rules = match options.rules.as_slice() {
            [] => None,
            words => Some(CommitRules::new(
                gate,
                commit_rules::load(words)?,
                &forget,
                patience,
            )?),
        };
        let transactions = Transactions::new(gate, patience, &forget, rules)?;
        if let Some(taken) = self.taken_over {
            let stored = &taken.resumed.contents.transactions;
            transactions.resume(stored, &self.attached.undone);
        }
        parts.push(transactions);
        if let Some(lease) = &self.attached.host_lease {
            let lease = Arc::clone(lease);
            parts.push(Participation::new(gate, lease, &forget, workers));
        }
        if options.backup.is_some() {
            let every = Duration::from_millis(options.backup_every_ms);
            parts.push(BackupRounds::new(engine, every));
        }
        Ok(())
    }

    /// Returns the gate that changes pass before they reach transactions; `None` if the mount has no transactions.
    fn make_gate(&self) -> Option<Arc<TransactionGate>> {
        let tests_conflicts = self.options.participants != Participants::Off;
        let engine = &self.attached.engine;
        let make = || {
            let backing = &self.checked.backing;
            let gate = TransactionGate::new(Arc::clone(engine), backing, tests_conflicts);
            let names_cached = Duration::from_millis(self.options.attr_timeout_ms);
            match self.taken_over {
                None => gate,
                Some(_) => gate.of_taken_over(names_cached),
            }
        };
        (self.options.drain == Drain::Commit).then(|| Arc::new(make()))
    }

    fn listen_for_data(
        &self,
        path: &Path,
        gate: Option<Arc<TransactionGate>>,
        file_locks: Option<Arc<FileLocks>>,
        prepared: &Prepared,
    ) -> Result<Arc<dyn Part>, MountError> {
        let clients = Arc::new(AtomicU64::new(0));
        let socket = DataSocket::start(
            path,
            Arc::clone(&self.attached.engine),
            gate.map(|gate| gate as Arc<dyn Gate>),
            prepared.served(),
            file_locks,
            Arc::clone(&clients),
            self.attached.workers.clone(),
        );
        let socket = socket.map_err(MountError::io("listen on the data socket"))?;
        Ok(DataClients::new(socket, clients))
    }

    fn identify(&self) -> Identity {
        let options = self.options;
        Identity {
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
