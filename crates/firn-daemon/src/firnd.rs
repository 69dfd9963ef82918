//! The life of one mount: attach, mount, serve, end.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use firn_config::{Frontend, KernelFlag, Options};
use firn_engine::Engine;
use firn_format::quote::quoted_path;
use firn_fuse::{Adapter, AdapterOptions, Session, SessionOptions, detach};
use firn_protocol::{HeldPolicy, Reply};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::attach::{ArenaEnd, Attached, Store, passthrough, runtime_files};
use crate::backup::{self, Rounds};
use crate::carrier::Carrier;
use crate::control::Control;
use crate::data_socket::{DataSocket, Served};
use crate::end::{self, Client, Ending, Event, Outcome};
use crate::error::DaemonError;
use crate::front::{Front, Stubs, TreeEnd, waiting_tree};
use crate::lock::Locks;
use crate::log;
use crate::metrics::SAMPLE_EVERY;
use crate::mount::MountRequest;
use crate::participants;
use crate::preflight::{self, Checked};
use crate::process;
use crate::service::Mounted;
use crate::spawn::Reporter;
use crate::spill;
use crate::transactions;

/// Exit status after a second signal.
const INTERRUPTED: i32 = 130;
/// How long the last answer to a client may take to leave.
const LAST_WORD: Duration = Duration::from_secs(2);

/// Serves a mount from its first check to its end. `Err` before the mount is usable, or when data
/// stays behind in the arena.
pub(crate) fn serve(request: &MountRequest, mut reporter: Reporter<'_>) -> Result<(), DaemonError> {
    let options = &request.options;
    let backing = &request.backing;
    let mount_point = &request.mount_point;
    let checked = preflight::check(backing, mount_point, options.read_only, &mut |text| {
        reporter.notice(text)
    })?;
    spill::check(options, &checked, &mut |text| reporter.notice(text))?;
    backup::check(options, &checked)?;
    let files = runtime_files(&checked.backing, options)?;
    let members = participants::members(options)?;
    let locks = Locks::take(&checked.backing, &files, members.as_ref())?;
    if options.frontend == Frontend::Fuse
        && let Some(prefix) = waiting_tree(&files)?
    {
        return Err(DaemonError::TreeWaits {
            backing: checked.backing,
            prefix,
        });
    }
    if !request.foreground {
        log::detach_stdio(&files.log)
            .map_err(DaemonError::io("open the log in the runtime directory"))?;
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

struct Mount {
    front: Front,
    control: Control,
    data_socket: DataSocket,
    service: Arc<Mounted>,
    rounds: Rounds,
    events: Receiver<Event>,
    populating: Arc<AtomicBool>,
}

impl Mount {
    fn new(
        request: &MountRequest,
        checked: &Checked,
        attached: &Attached,
    ) -> Result<Self, DaemonError> {
        let options = &request.options;
        let (event, events) = mpsc::channel();
        watch_signals(event.clone(), &checked.mount_point)?;
        let place = attached.files.socket.with_extension("data");
        let direct_clients = Arc::default();
        let uuid = attached.engine.arena().superblock().uuid;
        let (made, served, waiting_writers, failures) = match options.frontend {
            Frontend::Fuse => {
                let mut adapter = Adapter::new(
                    Arc::clone(&attached.engine),
                    AdapterOptions {
                        attr_timeout: Duration::from_millis(options.attr_timeout_ms),
                        passthrough: passthrough(options),
                    },
                );
                let kernel = adapter.offer_direct_access(uuid, &place);
                let waiting = adapter.waiting_writers();
                let failures = adapter.failures();
                (
                    Made::Adapter(adapter),
                    Served::Mount(kernel),
                    waiting,
                    failures,
                )
            }
            Frontend::Preload => {
                let engine = Arc::clone(&attached.engine);
                let files = &attached.files;
                let backing = &checked.backing;
                let prefix = &checked.mount_point;
                let stubs = Stubs::begin(engine, backing, prefix, files, event.clone())?;
                let tree = Arc::clone(&stubs.tree);
                (
                    Made::Stubs(stubs),
                    Served::Tree(tree),
                    Arc::default(),
                    Arc::default(),
                )
            }
        };
        let (tree, kernel) = match &served {
            Served::Tree(tree) => (Some(Arc::clone(tree)), None),
            Served::Mount(kernel) => (None, Some(kernel.clone())),
        };
        let data_socket = DataSocket::start(
            &place,
            Arc::clone(&attached.engine),
            served,
            Arc::clone(&direct_clients),
        )
        .map_err(DaemonError::io("listen on the data socket"))?;
        let service = Arc::new(Mounted {
            kernel,
            direct_clients,
            engine: Arc::clone(&attached.engine),
            backing: checked.backing.clone(),
            mount_point: checked.mount_point.clone(),
            options: options.in_force(),
            io_threads: options.io_threads,
            host_lease: attached.host_lease(),
            patience: Duration::from_millis(options.participants_wait_ms),
            waiting_writers,
            failures,
            tree,
            carrying: AtomicBool::new(false),
            following: AtomicBool::new(false),
            carry_next: parking_lot::Mutex::new(std::time::Instant::now()),
            window: Default::default(),
            carrier: Carrier::new(Arc::clone(&attached.engine)),
            events: event.clone(),
        });
        // Before the mount: `firn status` must find it from the moment the mount is seen.
        let control = Control::start(&attached.files.socket, Arc::clone(&service) as _)
            .map_err(DaemonError::io("listen on the control socket"))?;
        attached
            .engine
            .arena()
            .set_holder(std::process::id(), &checked.mount_point);
        let front = match made {
            Made::Adapter(adapter) => {
                let session = session_options(options, checked);
                let session = Arc::new(Session::mount(adapter, &checked.mount_point, &session)?);
                watch_session(&session, event)?;
                Front::Mount(session)
            }
            Made::Stubs(stubs) => {
                stubs.publish(uuid, &place, &checked.backing)?;
                Front::Tree(stubs)
            }
        };
        let rounds = Rounds::start(
            &attached.engine,
            Duration::from_millis(options.backup_every_ms),
        )
        .map_err(DaemonError::io("start a thread"))?;
        let populating = Arc::new(AtomicBool::new(options.populate));
        if options.populate {
            populate(&attached.engine, &populating);
        }
        Ok(Self {
            front,
            control,
            data_socket,
            service,
            rounds,
            events,
            populating,
        })
    }

    fn serve_until_the_end(self, attached: Attached, checked: &Checked) -> Result<(), DaemonError> {
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
            let engine = Arc::clone(&attached.engine);
            let service = Arc::clone(&self.service);
            let stopped = end::with_patience(force, move || {
                rounds.stop();
                transactions::leave(&engine);
                service.carrier.stop();
                transactions::give_up(&engine);
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
            let front = self.front;
            gave_up = !end::with_patience(force, move || front.end(tree));
        }
        // What came through the kernel was taken in only now.
        if held == HeldPolicy::Drain && !gave_up {
            end::drain_last(&attached.engine, force);
        }
        // A session that lingers may still write: then the arena stays, whatever is in it now.
        let bytes = attached.finish(match held {
            _ if outcome != Outcome::Ended => ArenaEnd::Keep,
            HeldPolicy::Discard => ArenaEnd::Discard,
            HeldPolicy::Drain | HeldPolicy::Keep => ArenaEnd::RemoveIfEmpty,
        });
        let result = match bytes {
            0 => Ok(()),
            _ if held == HeldPolicy::Keep => Ok(()),
            bytes => Err(DaemonError::Left {
                bytes,
                arena,
                backing: checked.backing.clone(),
            }),
        };
        if let Some(client) = client {
            let last = match &result {
                Ok(()) => Reply::Done,
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
                    self.service.sample();
                    self.service.carry_names();
                    self.service.follow_hosts();
                    self.service.stop_without_lease();
                    attached.replace_hung_threads();
                }
                // The service holds a sender: this cannot be. If it is, nobody will ask again.
                Err(RecvTimeoutError::Disconnected) | Ok(Event::Ended) => {
                    tracing::info!("unmounted from outside");
                    return End::unasked(Ending {
                        outcome: Outcome::Ended,
                        gave_up: false,
                    });
                }
                Ok(Event::Signal) => {
                    let ending =
                        end::by_signal(attached, &self.front, &self.events, &self.service.events);
                    return End::unasked(ending);
                }
                Ok(Event::Unmount {
                    force,
                    held,
                    client,
                }) => {
                    let say = &mut |progress| client.reply.send(progress).is_ok();
                    let events = (&self.events, &self.service.events);
                    match end::by_request(attached, &self.front, events, force, held, say) {
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

/// What programs will see, before they do.
enum Made {
    Adapter(Adapter<Store>),
    Stubs(Stubs),
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
fn watch_signals(events: Sender<Event>, mount_point: &Path) -> Result<(), DaemonError> {
    let mut signals =
        Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(DaemonError::io("watch for signals"))?;
    let mount_point = mount_point.to_owned();
    let watch = move || {
        let mut asked = false;
        for signal in signals.forever().filter(|signal| *signal != SIGHUP) {
            if asked {
                tracing::warn!(
                    signal,
                    "asked again: ending at once; what is not drained stays in the arena"
                );
                let _ = detach(&mount_point, true);
                std::process::exit(INTERRUPTED);
            }
            asked = true;
            let _ = events.send(Event::Signal);
        }
    };
    std::thread::Builder::new()
        .name("firn-signal".into())
        .spawn(watch)
        .map(drop)
        .map_err(DaemonError::io("start a thread"))
}

fn watch_session(session: &Arc<Session>, events: Sender<Event>) -> Result<(), DaemonError> {
    let session = Arc::clone(session);
    let watch = move || {
        if let Err(error) = session.wait() {
            tracing::error!(%error, "the FUSE session failed");
        }
        let _ = events.send(Event::Ended);
    };
    std::thread::Builder::new()
        .name("firn-session".into())
        .spawn(watch)
        .map(drop)
        .map_err(DaemonError::io("start a thread"))
}

/// Touches the arena's memory in the background, so that writers do not pay for it. Best effort.
fn populate(engine: &Arc<Engine<Store>>, go_on: &Arc<AtomicBool>) {
    let engine = Arc::clone(engine);
    let go_on = Arc::clone(go_on);
    let _ = std::thread::Builder::new()
        .name("firn-populate".into())
        .spawn(move || {
            if let Err(error) = engine.arena().populate(&|| go_on.load(Ordering::Relaxed)) {
                tracing::info!(%error, "the arena's memory comes with the first writes");
            }
        });
}
