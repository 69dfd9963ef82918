//! The life of one mount: attach, start the parts, serve, stop the parts.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use firn_client::paths::RuntimeFiles;
use firn_format::quantity::bytes;
use firn_format::quote::quoted_path;
use firn_fuse::{SessionError, detach};
use firn_protocol::events::TARGET;
use firn_protocol::{HeldPolicy, Reply};
use firn_workers::spawn_thread;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, getppid, pidfd_open};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::assembly::Assembled;
use crate::attach::Attached;
use crate::backup;
use crate::end::{self, Ending, SessionEnd};
use crate::error::MountError;
use crate::event::{Event, UnmountClient};
use crate::frontend::Frontend;
use crate::host_name::shown_host_name;
use crate::keeper::{KeeperLink, Summons};
use crate::lock::{Locks, Sharing};
use crate::log;
use crate::mount_request::MountRequest;
use crate::part::{ArenaEnd, Parts, Stop};
use crate::participants;
use crate::peers::terms_of;
use crate::placement;
use crate::preflight::{self, Checked};
use crate::prepared::MountSetup;
use crate::process;
use crate::rates::SAMPLE_EVERY;
use crate::runtime_files::{find_runtime_files, waiting_tree};
use crate::spawn::Reporter;
use crate::spill;
use crate::takeover::{Connection, TakenOver, connection_of};

/// Exit status after a second signal.
const INTERRUPTED: i32 = 130;
/// Timeout for the last reply to a client to be sent.
const LAST_WORD: Duration = Duration::from_secs(2);

/// Serves a mount from its first check to its end. Fails if the mount does not become usable, or if data that should
/// have been drained stays in the arena.
///
/// `summons` is what the keeper passes to this firnd; `None` without a keeper.
pub(crate) fn serve(
    request: &MountRequest,
    reporter: Reporter<'_>,
    summons: Option<Summons>,
) -> Result<(), MountError> {
    let Some(summons) = summons else {
        return serve_kept(request, reporter, Kept::default());
    };
    let link = summons.link;
    let is_taken_over = summons.resumed.is_some();
    let kept = Kept {
        link: Some(Arc::clone(&link)),
        caller: summons.caller,
        connection: connection_of(summons.resumed),
    };
    link.watch().map_err(MountError::io("start a thread"))?;
    let served = serve_kept(request, reporter, kept);
    if is_taken_over && served.as_ref().is_err_and(is_final) {
        link.say_ending();
    }
    served
}

/// Returns whether another firnd would fail in the same way. A lack of memory, threads or descriptors may pass, so it
/// is not final.
fn is_final(error: &MountError) -> bool {
    match error {
        MountError::NotTakenOver { .. } => true,
        MountError::Session(SessionError::Start(error)) => {
            error.kind() == std::io::ErrorKind::InvalidData
        }
        _ => false,
    }
}

/// What the keeper passes to this firnd.
#[derive(Default)]
struct Kept {
    link: Option<Arc<KeeperLink>>,
    /// The process that ends the mount in place of firnd, if there is one.
    caller: Option<OwnedFd>,
    connection: Option<Connection>,
}

/// A checked mount, and the state of an earlier firnd that served it, if there was one.
struct Found {
    checked: Checked,
    files: RuntimeFiles,
    taken_over: Option<TakenOver>,
}

/// Checks a new mount before anything is changed.
fn find_new(request: &MountRequest, reporter: &mut Reporter<'_>) -> Result<Found, MountError> {
    let options = &request.options;
    let checked = preflight::check(
        &request.backing,
        &request.mount_point,
        options,
        &mut |text| reporter.notice(text),
    )?;
    spill::check(options, &checked, &mut |text| reporter.notice(text))?;
    backup::check(options, &checked)?;
    placement::check_lanes(options, &checked)?;
    let files = find_runtime_files(&checked.backing, options)?;
    let is_fuse = options.frontend == firn_config::Frontend::Fuse;
    // A stub tree hides no files. A stub tree that an earlier firnd left at the mount point is refused later, in
    // `serve_kept`.
    if is_fuse && !options.nonempty && waiting_tree(&files)?.is_none() {
        preflight::check_empty(&checked)?;
    }
    Ok(Found {
        checked,
        files,
        taken_over: None,
    })
}

/// Finds a mount that an earlier firnd served. Its mount point is not accessed, because no firnd answers there yet.
fn find_served(
    request: &MountRequest,
    connection: Connection,
    link: Option<&Arc<KeeperLink>>,
) -> Result<Found, MountError> {
    let options = &request.options;
    let backing = preflight::check_backing(&request.backing, options.read_only)?;
    let files = find_runtime_files(&backing, options)?;
    let taken_over = TakenOver::open(&files, connection, link)?;
    let mount_point = taken_over.mount_point();
    Ok(Found {
        checked: Checked {
            backing,
            mount_point,
        },
        files,
        taken_over: Some(taken_over),
    })
}

fn find_mount(
    request: &MountRequest,
    connection: Option<Connection>,
    link: Option<&Arc<KeeperLink>>,
    reporter: &mut Reporter<'_>,
) -> Result<Found, MountError> {
    let Some(connection) = connection else {
        return find_new(request, reporter);
    };
    if !request.foreground {
        // The keeper has started this firnd with the log as standard error.
        log::start_in_background(&request.options, &request.mount_point);
    }
    find_served(request, connection, link)
}

/// Starts the log and the file of events. A mount in the foreground logs to standard error.
fn begin_log(
    request: &MountRequest,
    checked: &Checked,
    files: &RuntimeFiles,
    link: Option<&KeeperLink>,
) -> Result<(), MountError> {
    let options = &request.options;
    if !request.foreground {
        log::detach_stdio(&files.log)
            .map_err(MountError::io("open the log in the runtime directory"))?;
        if let Some(link) = link {
            link.keep_log();
        }
        log::start_in_background(options, &checked.mount_point);
        let _ = std::env::set_current_dir("/");
    }
    log::events::keep(
        files.events.clone(),
        shown_host_name(options),
        checked.mount_point.as_path().into(),
    );
    Ok(())
}

/// Reports settings of the environment that the user may want to change: the limit on file sizes, and misspelt
/// variables.
fn tell_limits(reporter: &mut Reporter<'_>) {
    if let Some(limit) = process::file_size_limit_bytes() {
        reporter.notice(format!(
            "files larger than {} cannot be drained: the limit on file sizes (ulimit -f) forbids it; unmount, and mount again with a higher limit",
            bytes(limit)
        ));
    }
    for text in firn_config::misspelt_variables() {
        tracing::warn!("{text}");
    }
}

fn serve_kept(
    request: &MountRequest,
    mut reporter: Reporter<'_>,
    kept: Kept,
) -> Result<(), MountError> {
    let options = &request.options;
    let Kept {
        link,
        caller,
        connection,
    } = kept;
    let Found {
        checked,
        files,
        taken_over,
    } = find_mount(request, connection, link.as_ref(), &mut reporter)?;
    let members = participants::members(options)?;
    let terms = terms_of(options, false);
    let locks = Locks::take(
        &checked.backing,
        &files,
        members.as_ref().map(|members| (members, &terms)),
        Sharing::of(options),
        link.as_ref(),
    )?;
    if options.frontend == firn_config::Frontend::Fuse
        && let Some(prefix) = waiting_tree(&files)?
    {
        return Err(MountError::TreeWaits {
            backing: checked.backing,
            prefix,
        });
    }
    begin_log(request, &checked, &files, link.as_deref())?;
    tell_limits(&mut reporter);
    tracing::info!(backing = %quoted_path(&checked.backing), mount_point = %quoted_path(&checked.mount_point), "attaching");
    let mut attached = Attached::new(
        &checked.backing,
        files,
        locks,
        options,
        taken_over.as_ref().map(|taken| &taken.resumed),
        &mut |text| reporter.notice(text),
    )?;
    if let Some(taken) = &taken_over
        && let Err(error) = taken.go_on_with(&mut attached)
    {
        attached.finish(ArenaEnd::Keep);
        return Err(error);
    }
    if let Some(taken) = &taken_over {
        taken.await_lost_names(Duration::from_millis(options.attr_timeout_ms));
    }
    let caller = caller.map_or_else(|| caller_of(request), |caller| Ok(Some(caller)))?;
    let context = MountContext {
        request,
        checked: &checked,
        link,
        caller,
        taken_over: taken_over.as_ref(),
    };
    let mount = Mount::start(context, attached)?;
    mount.tell_keeper(Duration::from_millis(options.watchdog_ms));
    if let Some(taken) = &taken_over {
        taken.note_end_of_pause();
    }
    reporter.ready();
    mount.tell_mounted(&checked);
    mount.serve_until_the_end(&checked)
}

/// Returns the process that ends the mount in place of firnd, if that process has started firnd itself.
fn caller_of(request: &MountRequest) -> Result<Option<OwnedFd>, MountError> {
    let parent = request.ends_with_parent.then(getppid).flatten();
    let open = |parent| pidfd_open(parent, PidfdFlags::empty());
    let opened = parent.map(open).transpose();
    opened.map_err(|errno| MountError::io("watch the process that mounts")(errno.into()))
}

/// The inputs of [`Mount::start`].
struct MountContext<'a> {
    request: &'a MountRequest,
    checked: &'a Checked,
    link: Option<Arc<KeeperLink>>,
    caller: Option<OwnedFd>,
    taken_over: Option<&'a TakenOver>,
}

/// A mount that programs see.
struct Mount {
    link: Option<Arc<KeeperLink>>,
    attached: Attached,
    parts: Parts,
    frontend: Frontend,
    sender: Sender<Event>,
    events: Receiver<Event>,
}

impl Mount {
    fn start(context: MountContext<'_>, attached: Attached) -> Result<Self, MountError> {
        let MountContext {
            request,
            checked,
            link,
            caller,
            taken_over,
        } = context;
        let options = &request.options;
        let (sender, events) = mpsc::channel();
        let watched = watch_signals(sender.clone(), &checked.mount_point, caller, link.clone());
        if let Err(error) = watched {
            attached.finish(MountSetup::end_of_failed(taken_over));
            return Err(error);
        }
        let setup = MountSetup {
            request,
            options,
            checked,
            attached: &attached,
            events: sender.clone(),
            link: link.clone(),
            taken_over,
        };
        let Assembled { parts, frontend } = setup.assemble()?;
        Ok(Self {
            link,
            attached,
            parts,
            frontend,
            sender,
            events,
        })
    }

    /// Informs the keeper, if there is one, that programs see the mount, and makes the keeper watch for hangs of firnd.
    fn tell_keeper(&self, watchdog: Duration) {
        if let Some(link) = &self.link {
            link.say_serving();
            let engine = Arc::downgrade(&self.attached.engine);
            let probe = move || {
                if let Some(engine) = engine.upgrade() {
                    let _ = engine.figures();
                }
            };
            link.watch_hangs(watchdog, Arc::new(probe));
        }
    }

    /// Logs that programs see the mount, and what an earlier firnd has left.
    fn tell_mounted(&self, checked: &Checked) {
        let figures = self.attached.engine.figures();
        let epoch = figures.epoch;
        if epoch > 1 {
            tracing::info!(target: TARGET, kind = "taken_over", epoch, "the arena of an earlier firnd is used again");
        }
        let (recovered_bytes, lost_file_bytes) = (figures.recovered_bytes, figures.lost_file_bytes);
        if recovered_bytes > 0 || lost_file_bytes > 0 {
            tracing::info!(target: TARGET, kind = "recovered", recovered_bytes, lost_file_bytes, "data of an earlier firnd was recovered");
        }
        let backing = quoted_path(&checked.backing);
        let arena_bytes = figures.arena_bytes;
        tracing::info!(target: TARGET, kind = "mounted", backing, arena_bytes, "mounted");
    }

    fn serve_until_the_end(self, checked: &Checked) -> Result<(), MountError> {
        let End {
            outcome,
            gave_up,
            force,
            client,
            held,
        } = self.serve();
        if let Some(link) = &self.link {
            link.say_ending();
        }
        // A session that has not ended may still write, so its arena is kept even if it is empty now.
        let arena = match held {
            _ if outcome != SessionEnd::Ended => ArenaEnd::Keep,
            HeldPolicy::Discard => ArenaEnd::Discard,
            HeldPolicy::Drain | HeldPolicy::Keep => ArenaEnd::RemoveIfEmpty,
        };
        let mut stop = Stop::new(held, arena, force, gave_up);
        self.parts.stop(&mut stop);
        let result = self.result_of(&stop, checked);
        if let Some(client) = client {
            let last = match &result {
                Ok(()) => Reply::Unmounted {
                    written_files: stop.left_in_logs.written as u64,
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

    /// Returns an error if data stays behind although it was to be drained.
    fn result_of(&self, stop: &Stop, checked: &Checked) -> Result<(), MountError> {
        let backing = checked.backing.clone();
        match (stop.left_bytes, stop.left_in_logs.error) {
            (0, None) => Ok(()),
            (0, Some(source)) => Err(MountError::LeftInLogs { backing, source }),
            _ if stop.held_policy == HeldPolicy::Keep => Ok(()),
            (bytes, _) => Err(MountError::Left {
                bytes,
                arena: self.attached.files.arena.clone(),
                backing,
            }),
        }
    }

    /// Handles events until the mount is gone. Returns how it ended, and the client that asked for this and waits for
    /// the last reply.
    fn serve(&self) -> End {
        let ending = end::EndingMount {
            attached: &self.attached,
            parts: &self.parts,
            frontend: &self.frontend,
            events: &self.events,
            sender: &self.sender,
        };
        loop {
            match self.events.recv_timeout(SAMPLE_EVERY) {
                Err(RecvTimeoutError::Timeout) => self.parts.run_due(),
                // `Disconnected` cannot happen, because the mount itself holds a sender. It is treated like the end of
                // the session.
                Err(RecvTimeoutError::Disconnected) | Ok(Event::Ended) => {
                    tracing::info!("unmounted by umount(8)");
                    return End::unasked(Ending {
                        outcome: SessionEnd::Ended,
                        gave_up: false,
                    });
                }
                Ok(Event::Signal) => return End::unasked(end::by_signal(&ending)),
                Ok(Event::Unmount {
                    force,
                    held,
                    client,
                }) => {
                    let say = &mut |progress| client.reply.send(progress).is_ok();
                    match end::by_request(&ending, force, held, say) {
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

/// How a mount ended.
struct End {
    outcome: SessionEnd,
    /// The backing did not answer, so no more calls are made on it.
    gave_up: bool,
    /// The end does not wait for a backing that does not answer.
    force: bool,
    /// The client that asked for the end; `None` after a signal or umount(8).
    client: Option<UnmountClient>,
    /// What happens to the data that only the arena has.
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

/// Returns whether a process is still running.
fn is_running(process: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    let at_once = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut fds, Some(&at_once)) == Ok(0)
}

/// Starts the thread that handles signals. The first SIGTERM or SIGINT begins the end of the mount. The second one ends
/// firnd at once: data that is not drained stays in the arena. While the process `caller` runs, firnd ignores these
/// signals, because `caller` gets them too and ends the mount.
fn watch_signals(
    events: Sender<Event>,
    mount_point: &Path,
    caller: Option<OwnedFd>,
    link: Option<Arc<KeeperLink>>,
) -> Result<(), MountError> {
    let mut signals =
        Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(MountError::io("watch for signals"))?;
    let mount_point = mount_point.to_owned();
    let watch = move || {
        let mut asked = false;
        for signal in signals.forever().filter(|signal| *signal != SIGHUP) {
            if caller.as_ref().is_some_and(is_running) {
                tracing::info!(
                    signal,
                    "this signal is ignored: the process that started the mount ends it"
                );
                continue;
            }
            if asked {
                tracing::warn!(
                    signal,
                    "a second signal: firnd ends at once; data that is not drained stays in the arena"
                );
                let _ = detach(&mount_point, true);
                if let Some(link) = &link {
                    link.say_ending();
                }
                std::process::exit(INTERRUPTED);
            }
            asked = true;
            let _ = events.send(Event::Signal);
        }
    };
    spawn_thread("firn-signal", watch).map_err(MountError::io("start a thread"))
}
