//! What the control socket of a mount answers.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use firn_backing::{Errno, is_below};
use firn_engine::{Cached, Engine};
use firn_format::durability::DurabilityLevel;
use firn_fuse::{Failures, Invalidator};
use firn_hosts::tokens::LaneToken;
use firn_lanes::steering::Steered;
use firn_protocol::path::BytePath;
use firn_protocol::{HeldPolicy, LaneStatus, PROTOCOL_VERSION, Reply, Request, Status};
use firn_stub::Tree;
use parking_lot::Mutex;

use crate::chunks::region;
use crate::commit_applier::CommitApplier;
use crate::control::{Answer, ControlClient, Service};
use crate::end::{Client, Event, throttle_progress};
use crate::error::FlattenError;
use crate::gate::TransactionGate;
use crate::host_lease::LeaseState;
use crate::log;
use crate::logs::Flattener;
use crate::owners::{ControlPeer, Owners, Scopes};
use crate::partner::{PartnerBoard, PartnerSpeaker, without_partner};
use crate::peers::PeerBoard;
use crate::placement;
use crate::process;
use crate::pulls::Pulls;
use crate::rates::{Totals, Window};
use crate::status::{explain_errors, file_status, token_status};
use crate::steering;
use crate::store::{Layers as _, Store};
use crate::transactions::RequestContext;

/// What the requests of the control socket are answered from.
pub(crate) struct Answers {
    pub(crate) engine: Arc<Engine<Store>>,
    pub(crate) backing: PathBuf,
    pub(crate) mount_point: PathBuf,
    /// `key=value` of the options that change what promises mean.
    pub(crate) options: Vec<String>,
    /// Writes that one lane gets at once.
    pub(crate) lane_writers_max: u32,
    /// How long other hosts are waited for.
    pub(crate) patience: Duration,
    /// Who owns the transactions.
    pub(crate) owners: Owners,
    /// The lease of this host, one of several.
    pub(crate) host_lease: Option<Arc<LeaseState>>,
    pub(crate) waiting_writers: Arc<AtomicU64>,
    /// Requests of the kernel that failed; none come to a stub tree.
    pub(crate) failures: Arc<Failures>,
    /// Makes the kernel drop what it has cached; none where it caches nothing.
    pub(crate) kernel: Option<Invalidator>,
    /// Processes connected to the data socket.
    pub(crate) direct_clients: Arc<AtomicU64>,
    /// What agents have sent to other hosts.
    pub(crate) pulls: Arc<Pulls>,
    /// The stub tree, where that is what programs see.
    pub(crate) tree: Option<Arc<Tree<Store>>>,
    /// Of each lane; none on a mount without tokens.
    pub(crate) tokens: Vec<LaneToken>,
    /// Samples of the last seconds, for the rates.
    pub(crate) window: Arc<Mutex<Window>>,
    /// What tells the backing's file system where new files go; none unless the placement asks for it.
    pub(crate) steered: Option<Arc<Steered>>,
    pub(crate) peers: Arc<PeerBoard>,
    /// Applies what was committed asynchronously; none without transactions.
    pub(crate) applier: Option<CommitApplier>,
    /// Makes files of logs plain; none where no file is in one, or nothing is written.
    pub(crate) flattener: Option<Flattener>,
    /// What agents say of this host's partner; none where none is wanted.
    pub(crate) partner: Option<Arc<PartnerBoard>>,
    /// To the main loop, which alone unmounts.
    pub(crate) events: Sender<Event>,
}

impl Answers {
    /// The engine's part of the status with what only firnd knows.
    pub(crate) fn status(&self) -> Status {
        let mut engine = self.engine.figures();
        let spill = engine.spill.as_mut();
        let rates = self.window.lock().rates(
            Instant::now(),
            Totals {
                ingest: engine.ingest_bytes,
                drain: engine.drain_bytes,
                spill: spill.as_ref().map_or(0, |spill| spill.moved_bytes),
                pulled: self.pulls.bytes(),
            },
        );
        if let Some(spill) = spill {
            spill.moved_bytes_per_second = rates.spill;
        }
        self.complete_lanes(&mut engine.lanes);
        explain_errors(&mut engine.errors);
        Status {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            backing: self.backing.as_path().into(),
            mount_point: self.mount_point.as_path().into(),
            arena: self.engine.arena().path().into(),
            options: self.options.clone(),
            waiting_writers: self.waiting_writers.load(Ordering::Relaxed),
            direct_clients: self.direct_clients.load(Ordering::Relaxed),
            ingest_bytes_per_second: rates.ingest,
            drain_bytes_per_second: rates.drain,
            pulls: self.pulls.under_way(),
            pulled_files: self.pulls.files(),
            pulled_bytes: self.pulls.bytes(),
            pulled_bytes_per_second: rates.pulled,
            placement_advice: placement::advise(&engine.lanes),
            host_differences: self.peers.differences(),
            transactions: self
                .gate()
                .map(|gate| crate::transactions::status(gate, &self.owners))
                .unwrap_or_default(),
            misplaced_files: self
                .steered
                .as_ref()
                .map_or(0, |steered| steered.refused_files()),
            failed_requests: self.failures.figures(),
            partner: self.partner.as_ref().map(|board| board.status()),
            transaction_steps: crate::transactions::steps(),
            logged_files: self
                .engine
                .backing()
                .logged()
                .map_or(0, |logs| logs.count_logged() as u64),
            log_lines_lost: log::lines_lost(),
            file_size_limit_bytes: process::file_size_limit_bytes(),
            ..engine
        }
    }

    /// What the engine does not know of its lanes: where they are, what was placed in them, and their tokens.
    fn complete_lanes(&self, lanes: &mut Vec<LaneStatus>) {
        for lane in lanes.iter_mut() {
            lane.path = self.backing.as_path().into();
            lane.max_writers = self.lane_writers_max;
        }
        for (lane, token) in lanes.iter_mut().zip(&self.tokens) {
            lane.token = Some(token_status(token.figures()));
        }
        if let Some(placed) = self.engine.backing().placed() {
            placement::show_lanes(placed, lanes);
        } else if let Some(steered) = &self.steered {
            steering::show_lanes(steered, lanes);
        }
    }

    fn gate(&self) -> Option<&Arc<TransactionGate>> {
        self.applier.as_ref().map(CommitApplier::gate)
    }

    /// What programs did to the names of a stub tree, before something is said or done about a path.
    fn sync_names(&self) -> Result<(), Errno> {
        self.tree.as_ref().map_or(Ok(()), |tree| tree.reconcile())
    }

    /// The answer to a request about a transaction, which may have an owner.
    fn answer_transaction(&self, request: &Request, peer: &ControlPeer) -> Reply {
        let Some(applier) = &self.applier else {
            return crate::transactions::answer_without(request);
        };
        let forget = |cached| self.invalidate(cached);
        let context = RequestContext {
            applier,
            patience: self.patience,
            forget: &forget,
        };
        crate::transactions::answer_owned(applier.gate(), &self.owners, request, peer, &context)
    }

    /// The answer to requests about transactions once another process acts in the name of this host.
    fn refuse_without_lease(&self) -> Option<Reply> {
        let lost = self.host_lease.as_ref()?.lost()?;
        Some(Reply::Error {
            errno: libc::ECANCELED,
            message: format!(
                "this host has lost its part in the transactions of several hosts: {lost}; firn umount --force and mount again"
            ),
        })
    }

    /// Once another process acts in the name of this host, what programs change here counts for nothing, and each change fails from then on.
    pub(crate) fn stop_without_lease(&self) {
        if let Some(gate) = self.gate()
            && self.refuse_without_lease().is_some()
        {
            crate::transactions::give_up_all(gate);
        }
    }

    fn invalidate(&self, cached: Cached) {
        if let Some(kernel) = &self.kernel {
            kernel.invalidate(&cached);
        }
    }

    fn hello(&self) -> Reply {
        Reply::Hello {
            protocol: PROTOCOL_VERSION,
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            incarnation: self.engine.incarnation(),
        }
    }

    fn list_files(&self, path: &BytePath) -> Reply {
        let files = self.engine.files_below(path.as_bytes()).into_iter();
        let mut files: Vec<_> = files.map(file_status).collect();
        // After the files: a transaction that begins now takes what it does not change away from nobody.
        if let Some(gate) = self.gate() {
            let scopes = gate.store().scopes_now();
            for file in &mut files {
                let path = file.path.as_bytes();
                file.in_transaction = scopes.iter().any(|scope| is_below(path, scope));
            }
        }
        Reply::Files { files }
    }

    fn evict(&self, path: &BytePath) -> Reply {
        match self.engine.evict_tree(path.as_bytes()) {
            Ok((freed_bytes, held_bytes)) => Reply::Evicted {
                freed_bytes,
                held_bytes,
            },
            Err(error) => failed(error, path),
        }
    }

    fn pin(&self, path: &BytePath, pinned: bool) -> Reply {
        match self.engine.pin_tree(path.as_bytes(), pinned) {
            Ok((files, bytes)) => Reply::Pinned { files, bytes },
            Err(error) => failed(error, path),
        }
    }

    fn wait(
        &self,
        path: &BytePath,
        until: DurabilityLevel,
        timeout_ms: Option<u64>,
        say: &mut dyn FnMut(Reply) -> bool,
    ) -> Reply {
        let deadline = timeout_ms.map(|ms| Instant::now() + Duration::from_millis(ms));
        if until == DurabilityLevel::Partnered {
            return match &self.partner {
                Some(board) => board.wait(path, deadline, &mut throttle_progress("copying", say)),
                None => without_partner(),
            };
        }
        let phase = if until == DurabilityLevel::Durable {
            "syncing"
        } else {
            "draining"
        };
        let mut left = 0;
        let mut timed_out = false;
        let mut progress = throttle_progress(phase, say);
        let result = self
            .engine
            .wait_tree(path.as_bytes(), until, &mut |bytes, files| {
                left = bytes;
                timed_out = deadline.is_some_and(|deadline| Instant::now() >= deadline);
                !timed_out && progress(bytes, files)
            });
        drop(progress);
        match result {
            Ok(()) if until >= DurabilityLevel::Drained => self.flatten(path, deadline, false, say),
            Ok(()) => Reply::Done,
            Err(_) if timed_out => Reply::Error {
                errno: libc::ETIMEDOUT,
                message: format!("timed out with {left} bytes left: they are still being drained"),
            },
            Err(error) => failed(error, path),
        }
    }

    /// Makes the files at or below `path` plain that have bytes in logs. `tells_lost`: logs whose file is gone are a
    /// failure too.
    fn flatten(
        &self,
        path: &BytePath,
        deadline: Option<Instant>,
        tells_lost: bool,
        say: &mut dyn FnMut(Reply) -> bool,
    ) -> Reply {
        let Some(flattener) = &self.flattener else {
            return self.refuse_logged(path);
        };
        let mut timed_out = false;
        let mut progress = throttle_progress("flattening", say);
        let left = flattener.flatten(path.as_bytes(), &mut || {
            timed_out = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            !timed_out && progress(0, 0)
        });
        match left.map(|left| FlattenError::check(&left, tells_lost)) {
            Ok(Ok(())) => Reply::Done,
            Ok(Err(error)) => refused(&error),
            Err(_) if timed_out => Reply::Error {
                errno: libc::ETIMEDOUT,
                message: "timed out: what is in logs is still being flattened".into(),
            },
            Err(error) => failed(error, path),
        }
    }

    /// What a mount answers that flattens nothing: refused, if files at or below `path` lie in logs.
    fn refuse_logged(&self, path: &BytePath) -> Reply {
        let Some(logs) = self.engine.backing().logged() else {
            return Reply::Done;
        };
        match logs.count_below(path.as_bytes()) {
            Ok(0) => Reply::Done,
            Ok(files) => refused(&FlattenError::ReadOnly { files }),
            Err(error) => failed(error, path),
        }
    }

    /// The same because somebody asks for it: what is pending is drained first.
    fn drain_and_flatten(&self, path: &BytePath, say: &mut dyn FnMut(Reply) -> bool) -> Reply {
        match self.wait(path, DurabilityLevel::Logged, None, say) {
            Reply::Done => self.flatten(path, None, true, say),
            reply => reply,
        }
    }

    fn unmount(&self, force: bool, held: HeldPolicy, say: &mut dyn FnMut(Reply) -> bool) -> Answer {
        let (reply, replies): (_, Receiver<Reply>) = mpsc::channel();
        let (sent, reply_sent) = mpsc::channel();
        let gone = || Reply::Error {
            errno: libc::ESHUTDOWN,
            message: "firnd is ending already".into(),
        };
        let client = Client { reply, reply_sent };
        if self
            .events
            .send(Event::Unmount {
                force,
                held,
                client,
            })
            .is_err()
        {
            return gone().into();
        }
        loop {
            match replies.recv() {
                Ok(progress @ Reply::Progress { .. }) => {
                    say(progress);
                }
                Ok(last) => {
                    return Answer {
                        reply: last,
                        sent: Some(sent),
                    };
                }
                Err(_) => return gone().into(),
            }
        }
    }
}

impl Service for Answers {
    fn answer(
        &self,
        request: Request,
        client: &mut ControlClient,
        say: &mut dyn FnMut(Reply) -> bool,
    ) -> Answer {
        if let Some(path) = path_of_current_names(&request)
            && let Err(error) = self.sync_names()
        {
            return failed(error, path).into();
        }
        let reply = match request {
            Request::Hello => self.hello(),
            Request::Status => Reply::Status(Box::new(self.status())),
            Request::Wait {
                path,
                until,
                timeout_ms,
            } => self.wait(&path, until, timeout_ms, say),
            Request::Drain { path } => {
                self.engine.drain_tree(path.as_bytes());
                Reply::Done
            }
            Request::Files { path } => self.list_files(&path),
            Request::Region => Reply::Region(region(self.engine.arena())),
            Request::Chunks { path } => client.lists.make(&self.engine, &path),
            Request::CheckChunks { list } => client.lists.check(list),
            Request::ReleaseChunks { list } => client.lists.release(list),
            Request::Partner { host, note } => {
                PartnerSpeaker::say(&mut client.partner, self.partner.as_ref(), host, note)
            }
            Request::MarkPartnered { path, changes } => {
                PartnerSpeaker::mark(client.partner.as_ref(), &path, changes)
            }
            Request::ReportPull { files, bytes } => {
                let pull = client.pull.get_or_insert_with(|| self.pulls.begin());
                pull.add(files, bytes);
                Reply::Done
            }
            Request::ClearErrors => {
                self.engine.clear_errors();
                Reply::Done
            }
            Request::Place { path } => match &self.steered {
                Some(steered) => {
                    steering::explain(steered, self.engine.backing(), &self.backing, &path)
                }
                None => placement::explain(self.engine.backing(), &path),
            },
            Request::Flatten { path } => self.drain_and_flatten(&path, say),
            Request::Evict { path } => self.evict(&path),
            Request::Pin { path, pinned } => self.pin(&path, pinned),
            request @ (Request::Begin { .. }
            | Request::Prepare { .. }
            | Request::Commit { .. }
            | Request::Abort { .. }
            | Request::Restore { .. }) => self
                .refuse_without_lease()
                .unwrap_or_else(|| self.answer_transaction(&request, &client.peer)),
            Request::Unmount { force, held } => return self.unmount(force, held, say),
        };
        reply.into()
    }

    fn is_held_for(&self, client: &ControlClient) -> bool {
        !client.lists.is_empty()
            || client.partner.is_some()
            || self.owners.has_owned(&client.peer.stream)
    }
}

/// The path of a request whose answer depends on the names that are in the backing now.
fn path_of_current_names(request: &Request) -> Option<&BytePath> {
    match request {
        Request::Wait { path, .. }
        | Request::Drain { path }
        | Request::Flatten { path }
        | Request::Files { path }
        | Request::Begin { path, .. }
        | Request::Prepare { path, .. }
        | Request::Commit { path, .. }
        | Request::Evict { path }
        | Request::Pin { path, .. }
        | Request::Place { path }
        | Request::MarkPartnered { path, .. }
        | Request::Chunks { path, .. } => Some(path),
        Request::Hello
        | Request::Status
        | Request::Region
        | Request::Partner { .. }
        | Request::CheckChunks { .. }
        | Request::ReleaseChunks { .. }
        | Request::ReportPull { .. }
        | Request::ClearErrors
        | Request::Abort { .. }
        | Request::Restore { .. }
        | Request::Unmount { .. } => None,
    }
}

impl Scopes for Answers {
    fn is_open(&self, scope: &[u8]) -> Option<bool> {
        crate::transactions::is_open(self.gate()?, scope)
    }

    fn abort(&self, scope: &[u8]) -> Result<(), String> {
        let forget = |cached| self.invalidate(cached);
        self.gate().map_or(Ok(()), |gate| {
            crate::transactions::abort_orphan(gate, scope, &forget)
        })
    }
}

fn refused(error: &FlattenError) -> Reply {
    Reply::Error {
        errno: error.errno(),
        message: error.to_string(),
    }
}

fn failed(error: Errno, path: &BytePath) -> Reply {
    let message = match error {
        Errno::NOENT => format!("{path}: no such file or directory in this mount"),
        Errno::CANCELED => "the wait was given up".into(),
        error => format!(
            "the backing reports: {}; the data is kept and tried again (`firn status` has the details)",
            process::explain(error)
        ),
    };
    Reply::Error {
        errno: error.raw_os_error(),
        message,
    }
}
