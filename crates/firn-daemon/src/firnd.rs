//! The life of one mount: attach, mount, serve, end.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use firn_backing::Backing as _;
use firn_config::{Drain, Flatten, KernelFlag, Options, TokenService};
use firn_engine::Engine;
use firn_format::quote::quoted_path;
use firn_fuse::{Adapter, AdapterOptions, Failures, Invalidator, Session, SessionOptions, detach};
use firn_hosts::FileLocks;
use firn_log::Left;
use firn_protocol::{HeldPolicy, Reply};
use firn_stub::Tree;
use firn_workers::{Class, Workers, spawn_thread};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::answers::Answers;
use crate::attach::{ArenaEnd, Attached, passthrough};
use crate::backup::{self, Rounds};
use crate::commit_applier::CommitApplier;
use crate::control::Control;
use crate::data_socket::{DataSocket, Served};
use crate::end::{self, Client, Ending, Event, Outcome};
use crate::error::MountError;
use crate::file_locks;
use crate::frontend::{Frontend, Stubs, TreeEnd, waiting_tree};
use crate::lock::{Locks, Sharing};
use crate::log;
use crate::logs::{self, Flattener, Settler};
use crate::mount::MountRequest;
use crate::owners::Owners;
use crate::participants;
use crate::partner::PartnerBoard;
use crate::peers::terms_of;
use crate::periodic::{NameSync, PeerLook, Periodic, SingleJob};
use crate::placement;
use crate::preflight::{self, Checked};
use crate::process;
use crate::rates::SAMPLE_EVERY;
use crate::runtime_files::find_runtime_files;
use crate::spawn::Reporter;
use crate::spill;
use crate::store::{Layers as _, Store};
use crate::transactions;

/// Exit status after a second signal.
const INTERRUPTED: i32 = 130;
/// How long the last answer to a client may take to leave.
const LAST_WORD: Duration = Duration::from_secs(2);
/// How long the end of a mount waits until lock files are removed. What stays harms nobody.
const LOCKS_PATIENCE: Duration = Duration::from_secs(2);

/// Serves a mount from its first check to its end. `Err` before the mount is usable, or when data
/// stays behind in the arena.
pub(crate) fn serve(request: &MountRequest, mut reporter: Reporter<'_>) -> Result<(), MountError> {
    let options = &request.options;
    let backing = &request.backing;
    let mount_point = &request.mount_point;
    let checked = preflight::check(backing, mount_point, options.read_only, &mut |text| {
        reporter.notice(text)
    })?;
    spill::check(options, &checked, &mut |text| reporter.notice(text))?;
    backup::check(options, &checked)?;
    placement::check(options, &checked)?;
    let files = find_runtime_files(&checked.backing, options)?;
    let members = participants::members(options)?;
    let terms = terms_of(options, false);
    let locks = Locks::take(
        &checked.backing,
        &files,
        members.as_ref().map(|members| (members, &terms)),
        Sharing::of(options),
    )?;
    if options.frontend == firn_config::Frontend::Fuse
        && let Some(prefix) = waiting_tree(&files)?
    {
        return Err(MountError::TreeWaits {
            backing: checked.backing,
            prefix,
        });
    }
    if !request.foreground {
        log::detach_stdio(&files.log)
            .map_err(MountError::io("open the log in the runtime directory"))?;
        log::start(options.log_level.as_str());
        let _ = std::env::set_current_dir("/");
    }
    if let Some(limit) = process::file_size_limit_bytes() {
        reporter.notice(format!(
            "files of more than {limit} bytes cannot be drained: that is the limit on file sizes (ulimit -f) here; unmount and mount with a higher one"
        ));
    }
    tracing::info!(backing = %quoted_path(&checked.backing), mount_point = %quoted_path(&checked.mount_point), "attaching");
    let attached = Attached::new(&checked.backing, files, locks, options, &mut |text| {
        reporter.notice(text)
    })?;
    let mount = match Mount::new(request, &checked, &attached) {
        Ok(mount) => mount,
        Err(error) => {
            // Nothing was written yet; what was recovered stays for the next try.
            attached.finish(ArenaEnd::RemoveIfEmpty);
            return Err(error);
        }
    };
    reporter.ready();
    tracing::info!("mounted");
    mount.serve_until_the_end(attached, &checked)
}

/// A mount that programs see.
struct Mount {
    frontend: Frontend,
    control: Control,
    data_socket: DataSocket,
    answers: Arc<Answers>,
    periodic: Periodic,
    rounds: Rounds,
    /// None where no file may lie in a log.
    settler: Option<Settler>,
    flatten: Flatten,
    /// None where the kernel keeps the locks of programs.
    file_locks: Option<Arc<FileLocks>>,
    events: Receiver<Event>,
    populating: Arc<AtomicBool>,
}

impl Mount {
    /// Puts the parts of a mount together, from what programs never see to what they see.
    fn new(
        request: &MountRequest,
        checked: &Checked,
        attached: &Attached,
    ) -> Result<Self, MountError> {
        let options = &request.options;
        let engine = &attached.engine;
        let workers = Workers::default();
        let (event, events) = mpsc::channel();
        watch_signals(event.clone(), &checked.mount_point)?;
        let data_path = attached.files.socket.with_extension("data");
        let file_locks = file_locks::start(&checked.backing, engine, options)?;
        let prepared = Prepared::new(
            options,
            checked,
            attached,
            &data_path,
            &workers,
            file_locks.clone(),
            event.clone(),
        )?;
        let tree = prepared.tree();
        let kernel = prepared.kernel();
        let direct_clients = Arc::default();
        let data_socket = DataSocket::start(
            &data_path,
            Arc::clone(engine),
            attached.gate.clone().map(|gate| gate as _),
            prepared.served(),
            file_locks.clone(),
            Arc::clone(&direct_clients),
            workers.clone(),
        )
        .map_err(MountError::io("listen on the data socket"))?;
        let window = Arc::default();
        let pulls = Arc::default();
        let (flattener, flatten_requests) = Flattener::new(engine);
        let answers = Arc::new(Answers {
            kernel: kernel.clone(),
            direct_clients,
            pulls: Arc::clone(&pulls),
            engine: Arc::clone(engine),
            backing: checked.backing.clone(),
            mount_point: checked.mount_point.clone(),
            options: options.in_force(),
            lane_writers_max: match options.lane_writers {
                0 => options.io_threads,
                count => options.io_threads.min(count),
            },
            owners: Owners::new().map_err(|errno| {
                MountError::io("watch the owners of transactions")(errno.into())
            })?,
            host_lease: attached.host_lease_state(),
            patience: Duration::from_millis(options.participants_wait_ms),
            waiting_writers: prepared.waiting_writers(),
            failures: prepared.failures(),
            tree: tree.clone(),
            tokens: attached.lane_tokens(),
            window: Arc::clone(&window),
            steered: attached.steered.clone(),
            peers: Arc::clone(&attached.peers),
            applier: attached.gate.clone().map(CommitApplier::new),
            flattener: Settler::is_needed(engine, options).then_some(flattener),
            partner: PartnerBoard::new(engine, options)?,
            events: event.clone(),
        });
        if options.drain == Drain::Commit {
            let watched = Arc::clone(&answers);
            spawn_thread("firn-owners", move || watched.owners.watch(&*watched)).map_err(
                MountError::io("start the thread that watches owners of transactions"),
            )?;
        }
        // Before the mount: `firn status` must find it from the moment the mount is seen.
        let control = Control::start(
            &attached.files.socket,
            Arc::clone(&answers) as _,
            workers.clone(),
        )
        .map_err(MountError::io("listen on the control socket"))?;
        engine
            .arena()
            .set_holder(std::process::id(), &checked.mount_point);
        let frontend = prepared.start(options, checked, attached, &data_path, event)?;
        let rounds = Rounds::start(engine, Duration::from_millis(options.backup_every_ms))
            .map_err(MountError::io("start a thread"))?;
        let settler = Settler::start(engine, options, flatten_requests)
            .map_err(MountError::io("start the thread that settles logs"))?;
        let populating = Arc::new(AtomicBool::new(options.populate));
        if options.populate {
            populate(engine, &populating, &workers);
        }
        Ok(Self {
            frontend,
            control,
            data_socket,
            answers,
            periodic: Periodic {
                engine: Arc::clone(engine),
                gate: attached.gate.clone(),
                workers,
                window,
                pulls,
                kernel,
                name_sync: tree.map(NameSync::new),
                host_watch: SingleJob::default(),
                peers: PeerLook::new(Arc::clone(&attached.peers)),
                lane_removals: SingleJob::default(),
            },
            rounds,
            settler,
            flatten: options.flatten,
            file_locks,
            events,
            populating,
        })
    }

    fn serve_until_the_end(self, attached: Attached, checked: &Checked) -> Result<(), MountError> {
        let End {
            outcome,
            mut gave_up,
            force,
            client,
            held,
        } = self.serve(&attached);
        self.populating.store(false, Ordering::Relaxed);
        let mut rounds = self.rounds;
        if gave_up {
            // Its thread may be in a call that never returns.
            std::mem::forget(rounds);
        } else {
            let answers = Arc::clone(&self.answers);
            let stopped = end::with_patience(force, move || {
                rounds.stop();
                answers.owners.stop();
                if let Some(applier) = &answers.applier {
                    transactions::leave(applier.gate());
                    applier.stop();
                    transactions::give_up(applier.gate());
                }
            });
            gave_up = !stopped;
        }
        // What was written between the last look and the end of the session.
        if held == HeldPolicy::Drain && !gave_up {
            end::drain_last(&attached.engine, force);
        }
        let arena = attached.files.arena.clone();
        drop((self.control, self.data_socket));
        if !gave_up {
            let tree = match held {
                _ if outcome != Outcome::Ended => TreeEnd::Keep,
                HeldPolicy::Discard => TreeEnd::Discard,
                HeldPolicy::Keep if attached.left_bytes() > 0 => TreeEnd::Keep,
                HeldPolicy::Keep | HeldPolicy::Drain => TreeEnd::Remove,
            };
            let frontend = self.frontend;
            gave_up = !end::with_patience(force, move || frontend.end(tree));
        }
        // What came through the kernel was taken in only now.
        if held == HeldPolicy::Drain && !gave_up {
            end::drain_last(&attached.engine, force);
        }
        let mut left = Left::default();
        if let Some(settler) = self.settler
            && !gave_up
        {
            let (settled, found) = mpsc::channel();
            let engine = Arc::clone(&attached.engine);
            let flatten = (held != HeldPolicy::Keep).then_some(self.flatten);
            end::with_patience(force, move || {
                settler.stop();
                if let Some(logs) = engine.backing().logged()
                    && let Some(flatten) = flatten
                {
                    let _ = settled.send(logs::settle_last(logs, flatten));
                }
            });
            left = found.try_recv().unwrap_or_default();
        }
        if let Some(locks) = self.file_locks {
            locks.stop(LOCKS_PATIENCE);
        }
        // A session that lingers may still write: then the arena stays, whatever is in it now.
        let bytes = attached.finish(match held {
            _ if outcome != Outcome::Ended => ArenaEnd::Keep,
            HeldPolicy::Discard => ArenaEnd::Discard,
            HeldPolicy::Drain | HeldPolicy::Keep => ArenaEnd::RemoveIfEmpty,
        });
        let result = match bytes {
            0 => left.error.map_or(Ok(()), |source| {
                let backing = checked.backing.clone();
                Err(MountError::LeftInLogs { backing, source })
            }),
            _ if held == HeldPolicy::Keep => Ok(()),
            bytes => Err(MountError::Left {
                bytes,
                arena,
                backing: checked.backing.clone(),
            }),
        };
        if let Some(client) = client {
            let last = match &result {
                Ok(()) => Reply::Unmounted {
                    written_files: left.written as u64,
                },
                Err(error) => Reply::Error {
                    errno: libc::EIO,
                    message: error.to_string(),
                },
            };
            if client.reply.send(last).is_ok() {
                let _ = client.reply_sent.recv_timeout(LAST_WORD);
            }
        }
        tracing::info!("ended");
        result
    }

    /// Until the mount is gone. Gives the client that asked for the end and waits for its last word.
    fn serve(&self, attached: &Attached) -> End {
        loop {
            match self.events.recv_timeout(SAMPLE_EVERY) {
                Err(RecvTimeoutError::Timeout) => {
                    self.periodic.run_due();
                    self.answers.stop_without_lease();
                    attached.replace_hung_threads();
                }
                // The answers hold a sender: this cannot be. If it is, nobody will ask again.
                Err(RecvTimeoutError::Disconnected) | Ok(Event::Ended) => {
                    tracing::info!("somebody else unmounted it");
                    return End::unasked(Ending {
                        outcome: Outcome::Ended,
                        gave_up: false,
                    });
                }
                Ok(Event::Signal) => {
                    let ending = end::by_signal(
                        attached,
                        &self.frontend,
                        &self.events,
                        &self.answers.events,
                    );
                    return End::unasked(ending);
                }
                Ok(Event::Unmount {
                    force,
                    held,
                    client,
                }) => {
                    let say = &mut |progress| client.reply.send(progress).is_ok();
                    let events = (&self.events, &self.answers.events);
                    match end::by_request(attached, &self.frontend, events, force, held, say) {
                        Ok(Ending { outcome, gave_up }) => {
                            return End {
                                outcome,
                                gave_up,
                                force,
                                client: Some(client),
                                held,
                            };
                        }
                        Err(refusal) => drop(client.reply.send(refusal)),
                    }
                }
            }
        }
    }
}

/// A frontend before programs see it.
enum Prepared {
    Mount {
        adapter: Box<Adapter<Store>>,
        kernel: Invalidator,
    },
    Tree(Stubs),
}

impl Prepared {
    fn new(
        options: &Options,
        checked: &Checked,
        attached: &Attached,
        data_path: &Path,
        workers: &Workers,
        file_locks: Option<Arc<FileLocks>>,
        events: Sender<Event>,
    ) -> Result<Self, MountError> {
        let engine = Arc::clone(&attached.engine);
        match options.frontend {
            firn_config::Frontend::Fuse => {
                let attr_timeout = Duration::from_millis(options.attr_timeout_ms);
                let adapter_options = AdapterOptions {
                    // Where other hosts write to files, what the kernel is told may be as old as it may get there.
                    attr_timeout: match engine.backing().finishes_files() {
                        true => attr_timeout / 2,
                        false => attr_timeout,
                    },
                    name_timeout: match shares_names(&engine, options) {
                        true => Duration::ZERO,
                        false => attr_timeout,
                    },
                    passthrough: passthrough(options),
                };
                let uuid = engine.arena().superblock().uuid;
                let gate = attached.gate.clone().map(|gate| gate as _);
                let mut adapter = Adapter::new(engine, gate, adapter_options, workers.clone());
                let kernel = adapter.offer_direct_access(uuid, data_path);
                if let Some(locks) = file_locks {
                    adapter.share_locks(locks);
                }
                let adapter = Box::new(adapter);
                Ok(Self::Mount { adapter, kernel })
            }
            firn_config::Frontend::Preload => {
                let prefix = &checked.mount_point;
                let backing = &checked.backing;
                let by_name = options.places_by_name();
                let files = &attached.files;
                let stubs = Stubs::begin(engine, backing, prefix, by_name, files, events)?;
                Ok(Self::Tree(stubs))
            }
        }
    }

    /// What a data socket serves.
    fn served(&self) -> Served<Store> {
        match self {
            Self::Mount { kernel, .. } => Served::Mount(kernel.clone()),
            Self::Tree(stubs) => Served::Tree(Arc::clone(&stubs.tree)),
        }
    }

    fn tree(&self) -> Option<Arc<Tree<Store>>> {
        match self {
            Self::Mount { .. } => None,
            Self::Tree(stubs) => Some(Arc::clone(&stubs.tree)),
        }
    }

    fn kernel(&self) -> Option<Invalidator> {
        match self {
            Self::Mount { kernel, .. } => Some(kernel.clone()),
            Self::Tree(_) => None,
        }
    }

    fn waiting_writers(&self) -> Arc<AtomicU64> {
        match self {
            Self::Mount { adapter, .. } => adapter.waiting_writers(),
            Self::Tree(_) => Arc::default(),
        }
    }

    fn failures(&self) -> Arc<Failures> {
        match self {
            Self::Mount { adapter, .. } => adapter.failures(),
            Self::Tree(_) => Arc::default(),
        }
    }

    /// From here on programs see it.
    fn start(
        self,
        options: &Options,
        checked: &Checked,
        attached: &Attached,
        data_path: &Path,
        events: Sender<Event>,
    ) -> Result<Frontend, MountError> {
        match self {
            Self::Mount { adapter, .. } => {
                let session = session_options(options, checked);
                let session = Session::mount(*adapter, &checked.mount_point, &session)?;
                let session = Arc::new(session);
                watch_session(&session, events)?;
                Ok(Frontend::Mount(session))
            }
            Self::Tree(stubs) => {
                let uuid = attached.engine.arena().superblock().uuid;
                let shares_files = attached.engine.backing().logged().is_some();
                stubs.publish(shares_files, uuid, data_path, &checked.backing)?;
                Ok(Frontend::Tree(stubs))
            }
        }
    }
}

/// Whether other hosts are known to make, rename and remove files. Hosts that commit together see each other's names at a
/// commit, when the kernel is told what to drop.
fn shares_names(engine: &Engine<Store>, options: &Options) -> bool {
    engine.backing().finishes_files() || options.tokens != TokenService::None
}

fn session_options(options: &Options, checked: &Checked) -> SessionOptions {
    SessionOptions {
        source: checked.backing.clone(),
        threads: options.fuse_threads as usize,
        allow_other: options.allow_other,
        read_only: options.read_only,
        kernel_flags: options.kernel_flags.iter().copied().map(word).collect(),
    }
}

/// How a mount came to its end.
struct End {
    outcome: Outcome,
    /// The backing did not answer: nothing more is asked of it.
    gave_up: bool,
    /// It does not wait for a backing that does not answer.
    force: bool,
    /// Who asked for it.
    client: Option<Client>,
    /// What becomes of the data that is held.
    held: HeldPolicy,
}

impl End {
    fn unasked(Ending { outcome, gave_up }: Ending) -> Self {
        Self {
            outcome,
            gave_up,
            force: false,
            client: None,
            held: HeldPolicy::Drain,
        }
    }
}

/// The mount(8) word of a flag.
fn word(flag: KernelFlag) -> &'static str {
    match flag {
        KernelFlag::Dev => "dev",
        KernelFlag::NoDev => "nodev",
        KernelFlag::Suid => "suid",
        KernelFlag::NoSuid => "nosuid",
        KernelFlag::Exec => "exec",
        KernelFlag::NoExec => "noexec",
        KernelFlag::Atime => "atime",
        KernelFlag::NoAtime => "noatime",
        KernelFlag::Sync => "sync",
        KernelFlag::Async => "async",
        KernelFlag::DirSync => "dirsync",
    }
}

/// The first signal asks for the end, the second takes it: the arena keeps what is not drained.
fn watch_signals(events: Sender<Event>, mount_point: &Path) -> Result<(), MountError> {
    let mut signals =
        Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(MountError::io("watch for signals"))?;
    let mount_point = mount_point.to_owned();
    let watch = move || {
        let mut asked = false;
        for signal in signals.forever().filter(|signal| *signal != SIGHUP) {
            if asked {
                tracing::warn!(
                    signal,
                    "a second signal: firnd ends at once; what is not drained stays in the arena"
                );
                let _ = detach(&mount_point, true);
                std::process::exit(INTERRUPTED);
            }
            asked = true;
            let _ = events.send(Event::Signal);
        }
    };
    spawn_thread("firn-signal", watch).map_err(MountError::io("start a thread"))
}

fn watch_session(session: &Arc<Session>, events: Sender<Event>) -> Result<(), MountError> {
    let session = Arc::clone(session);
    let watch = move || {
        if let Err(error) = session.wait() {
            tracing::error!(%error, "the FUSE session failed");
        }
        let _ = events.send(Event::Ended);
    };
    spawn_thread("firn-session", watch).map_err(MountError::io("start a thread"))
}

/// Touches the arena's memory in the background, so that writers do not pay for it, as long as `go_on`. Best effort.
fn populate(engine: &Arc<Engine<Store>>, go_on: &Arc<AtomicBool>, workers: &Workers) {
    let engine = Arc::clone(engine);
    let go_on = Arc::clone(go_on);
    let started = workers.try_run(Class::Job, move || {
        if let Err(error) = engine.arena().populate(&|| go_on.load(Ordering::Relaxed)) {
            tracing::info!(%error, "cannot allocate the arena's memory in advance: it is allocated at first use");
        }
    });
    if let Err(error) = started {
        tracing::info!(%error, "cannot allocate the arena's memory in advance: it is allocated at first use");
    }
}
