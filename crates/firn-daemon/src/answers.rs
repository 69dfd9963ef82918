//! Answers requests of the control socket, which the `firn` commands and the agents of a mount use.
//!
//! Each request gets one final reply; replies before it report progress. A *part* is one optional feature of the mount.
//! First, each part may refuse the request. Then the part that the request concerns gives the reply. Without such a
//! part, the reply comes from the engine, which has the files of the mount.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use firn_engine::{Engine, EvictionResult, Pinned};
use firn_format::durability::DurabilityLevel;
use firn_protocol::path::BytePath;
use firn_protocol::{HeldPolicy, PROTOCOL_VERSION, Reply, Request, Status};
use firn_workers::Workers;
use parking_lot::Mutex;

use crate::chunks::data_region;
use crate::control::{Answer, ControlClient, ControlListener, Service};
use crate::error::MountError;
use crate::event::{Event, UnmountClient};
use crate::log;
use crate::part::{ClientRequest, Part, Parts, StopContext};
use crate::partner::{PartnerReporter, no_partner_reply};
use crate::placement;
use crate::process;
use crate::replies::{deadline_after, failure_reply, wait_for_level};
use crate::status::{explain_errors, list_files};
use crate::store::Store;
use crate::transactions;

/// The properties of a mount that do not depend on which parts it has.
#[derive(Clone)]
pub(crate) struct MountIdentity {
    pub(crate) engine: Arc<Engine<Store>>,
    pub(crate) backing: PathBuf,
    pub(crate) mount_point: PathBuf,
    /// Name of this host.
    pub(crate) host: String,
    /// Options in the form `key=value` that change what the guarantees of the mount mean.
    pub(crate) options: Vec<String>,
    /// Largest number of writes that one lane (one I/O server) gets at the same time.
    pub(crate) lane_writers_max: u32,
    /// Sends events to the main loop, which alone unmounts.
    pub(crate) events: Sender<Event>,
}

impl MountIdentity {
    /// Returns the status of the mount: the engine's figures, what only this process knows, and what each part adds. A
    /// part is one feature of the mount, such as its logs.
    pub(crate) fn status(&self, parts: &Parts) -> Status {
        let mut status = Status {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            backing: self.backing.as_path().into(),
            mount_point: self.mount_point.as_path().into(),
            host: self.host.clone(),
            arena: self.engine.arena().path().into(),
            options: self.options.clone(),
            transaction_steps: transactions::steps(),
            log_lines_lost: log::lines_lost(),
            file_size_limit_bytes: process::file_size_limit_bytes(),
            ..self.engine.figures()
        };
        // A lane is one I/O server. The part of the lanes, if there is one, sets other paths later.
        for lane in &mut status.lanes {
            lane.path = self.backing.as_path().into();
            lane.max_writers = self.lane_writers_max;
        }
        explain_errors(&mut status.errors);
        parts.fill_status(&mut status);
        status
    }
}

/// The control socket as a part of a mount: it listens from the start of the mount to its stop.
pub(crate) struct ControlSocket {
    path: PathBuf,
    identity: MountIdentity,
    workers: Workers,
    control: Mutex<Option<ControlListener>>,
}

impl ControlSocket {
    pub(crate) fn new(path: PathBuf, identity: MountIdentity, workers: &Workers) -> Arc<Self> {
        Arc::new(Self {
            path,
            identity,
            workers: workers.clone(),
            control: Mutex::new(None),
        })
    }
}

impl Part for ControlSocket {
    fn start(&self, parts: &Parts) -> Result<(), MountError> {
        let answers = Arc::new(RequestAnswers {
            identity: self.identity.clone(),
            parts: parts.clone(),
        });
        let control = ControlListener::start(&self.path, answers, self.workers.clone())
            .map_err(MountError::io("listen on the control socket"))?;
        *self.control.lock() = Some(control);
        Ok(())
    }

    fn stop(&self, _: &mut StopContext) {
        let listener = self.control.lock().take();
        drop(listener);
    }
}

/// The state from which the requests of all connections are answered.
struct RequestAnswers {
    identity: MountIdentity,
    parts: Parts,
}

impl RequestAnswers {
    /// Returns the reply to a client that asks which firnd it has reached.
    fn hello_reply(&self) -> Reply {
        Reply::Hello {
            protocol: PROTOCOL_VERSION,
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            incarnation: self.identity.engine.incarnation(),
        }
    }

    /// Frees the drained bytes of the files at or below `path`; the reply counts bytes that are freed and still held.
    fn evict(&self, path: &BytePath) -> Reply {
        match self.identity.engine.room.evict_tree(path.as_bytes()) {
            Ok(EvictionResult {
                freed_bytes,
                held_bytes,
            }) => Reply::Evicted {
                freed_bytes,
                held_bytes,
            },
            Err(error) => failure_reply(error, path),
        }
    }

    /// Pins the files at or below `path` in memory, or unpins them; the reply counts the files and their bytes.
    fn pin(&self, path: &BytePath, pinned: bool) -> Reply {
        match self.identity.engine.room.pin_tree(path.as_bytes(), pinned) {
            Ok(Pinned { files, bytes }) => Reply::Pinned { files, bytes },
            Err(error) => failure_reply(error, path),
        }
    }

    /// Has the mount unmounted for a client, and returns the final reply: done, or why the mount stays. The main loop
    /// of firnd does the work; its progress messages go to the client through `send_progress` meanwhile.
    ///
    /// `held` says what happens to data that only this host's memory has. After the unmount this process exits, so the
    /// main loop first waits until the caller has sent the reply and says so on the returned channel `sent`. If the
    /// mount is ending already, the reply is ESHUTDOWN.
    fn unmount(
        &self,
        force: bool,
        held: HeldPolicy,
        send_progress: &mut dyn FnMut(Reply) -> bool,
    ) -> Answer {
        let (reply_sender, replies): (_, Receiver<Reply>) = mpsc::channel();
        let (sent, reply_sent) = mpsc::channel();
        let already_ending_reply = || Reply::Error {
            errno: libc::ESHUTDOWN,
            message: "firnd is ending already".into(),
        };
        let client = UnmountClient {
            reply: reply_sender,
            reply_sent,
        };
        let unmount = Event::Unmount {
            force,
            held,
            client,
        };
        if self.identity.events.send(unmount).is_err() {
            return already_ending_reply().into();
        }
        loop {
            match replies.recv() {
                Ok(progress @ Reply::Progress { .. }) => {
                    // A client that has gone does not stop the unmount that it asked for.
                    send_progress(progress);
                }
                Ok(final_reply) => {
                    return Answer {
                        reply: final_reply,
                        sent: Some(sent),
                    };
                }
                // The main loop has ended without an answer.
                Err(_) => return already_ending_reply().into(),
            }
        }
    }

    /// Answers a request that no part of the mount has answered: from the engine, or with an error that names the
    /// missing part.
    fn answer_from_engine(
        &self,
        request: Request,
        client: &mut ControlClient,
        send_progress: &mut dyn FnMut(Reply) -> bool,
    ) -> Answer {
        let engine = &self.identity.engine;
        let reply = match request {
            Request::Hello => self.hello_reply(),
            Request::Status => Reply::Status(Box::new(self.identity.status(&self.parts))),
            Request::Wait {
                until: DurabilityLevel::Partnered,
                ..
            }
            | Request::Partner { .. } => no_partner_reply(),
            Request::Wait {
                path,
                until,
                timeout_ms,
            } => wait_for_level(
                engine,
                &path,
                until,
                deadline_after(timeout_ms),
                send_progress,
            ),
            Request::Drain { path } => {
                engine.durability.drain_tree(path.as_bytes());
                Reply::Done
            }
            Request::Files { path, idle } => Reply::Files {
                files: list_files(engine, path.as_bytes(), idle),
            },
            Request::Region => Reply::Region(data_region(engine.arena())),
            Request::Chunks { path } => client.lists.create_list(engine, &path),
            Request::CheckChunks { list } => client.lists.check(list),
            Request::ReleaseChunks { list } => client.lists.release(list),
            Request::MarkPartnered { path, changes } => {
                PartnerReporter::mark(client.partner.as_ref(), &path, changes)
            }
            Request::Record => unreachable!("each mount has a record"),
            Request::ReportPull { .. } => unreachable!("each mount counts its traffic"),
            Request::ClearErrors => {
                engine.clear_errors();
                Reply::Done
            }
            Request::Place { .. } => placement::refuse_without_placement(),
            // This mount has no logs, so data that is drained is already in plain files.
            Request::Flatten { path } => {
                wait_for_level(engine, &path, DurabilityLevel::Logged, None, send_progress)
            }
            Request::Evict { path } => self.evict(&path),
            Request::Pin { path, pinned } => self.pin(&path, pinned),
            request @ (Request::Begin { .. }
            | Request::Prepare { .. }
            | Request::Commit { .. }
            | Request::Abort { .. }
            | Request::Restore { .. }) => transactions::answer_without_transactions(&request),
            Request::Upgrade { .. } => unreachable!("each mount has a part for it"),
            Request::Unmount { force, held } => return self.unmount(force, held, send_progress),
        };
        reply.into()
    }
}

impl Service for RequestAnswers {
    /// Returns the final reply to a request: from the part of the mount that it concerns (a feature such as the logs),
    /// otherwise from the engine, which has the files. `send_progress` sends replies before the final one.
    fn answer(
        &self,
        request: Request,
        client: &mut ControlClient,
        send_progress: &mut dyn FnMut(Reply) -> bool,
    ) -> Answer {
        // Any part may refuse, also a request that another one answers. So all of them are asked before one answers.
        if let Some(refusal) = self.parts.refuse(&request) {
            return refusal.into();
        }
        let mut client_request = ClientRequest {
            engine: &self.identity.engine,
            request: &request,
            client,
            send_progress,
        };
        match self.parts.answer(&mut client_request) {
            Some(reply) => reply.into(),
            None => self.answer_from_engine(request, client, send_progress),
        }
    }

    fn holds_state_of(&self, client: &ControlClient) -> bool {
        !client.lists.is_empty() || client.partner.is_some() || self.parts.holds_state_of(client)
    }
}
