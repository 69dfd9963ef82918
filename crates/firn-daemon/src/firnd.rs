//! The life of firnd, the process that serves one mount: attach the arena, start the parts, serve, stop the parts. The
//! *arena* is memory with the bytes that are not in the backing yet; a *part* is one feature of the mount, such as a
//! socket.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use firn_client::paths::RuntimeFiles;
use firn_config::Options;
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

use crate::assembly::StartedMount;
use crate::attach::AttachedArena;
use crate::backup;
use crate::end::{self, SessionState, UnmountOutcome};
use crate::error::MountError;
use crate::event::{Event, UnmountClient};
use crate::frontend::Frontend;
use crate::host_name::shown_host_name;
use crate::keeper::{KeeperHandover, KeeperLink};
use crate::lock::{LockSharing, Locks};
use crate::log;
use crate::mount_request::MountRequest;
use crate::part::{ArenaEnd, Parts, StopContext};
use crate::participants;
use crate::peers::terms_from_options;
use crate::placement;
use crate::preflight::{self, CheckedPaths};
use crate::prepared::MountSetup;
use crate::process;
use crate::rates::SAMPLE_EVERY;
use crate::runtime_files::{find_runtime_files, waiting_tree};
use crate::spawn::Reporter;
use crate::spill;
use crate::takeover::{ResumedConnection, TakenOverMount, connection_of_resumed_mount};

/// Exit status after a second signal.
const INTERRUPTED: i32 = 130;
/// Timeout for the last reply to a client to be sent.
const LAST_REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// Serves a mount from its first check to its end. Fails if the mount does not become usable, or if data that should
/// have gone to the backing directory stays in the host's memory.
///
/// `handover` comes from the keeper, a process that starts the next serving process when one dies; `None` without a
/// keeper.
pub(crate) fn serve(
    request: &MountRequest,
    reporter: Reporter<'_>,
    handover: Option<KeeperHandover>,
) -> Result<(), MountError> {
    let Some(handover) = handover else {
        return serve_mount(request, reporter, KeeperInputs::default());
    };
    let link = handover.link;
    let is_taken_over = handover.resumed.is_some();
    let keeper_inputs = KeeperInputs {
        link: Some(Arc::clone(&link)),
        caller: handover.caller,
        connection: connection_of_resumed_mount(handover.resumed),
    };
    // From now on, pings of the keeper are answered, and a keeper that dies is replaced.
    link.watch().map_err(MountError::io("start a thread"))?;
    let result = serve_mount(request, reporter, keeper_inputs);
    // Otherwise the keeper would start firnds that fail in the same way, and programs would wait meanwhile.
    if is_taken_over && result.as_ref().is_err_and(would_fail_again) {
        link.notify_ending();
    }
    result
}

/// Returns whether another firnd would fail in the same way. A lack of memory, threads or descriptors may pass, so it
/// is not final.
fn would_fail_again(error: &MountError) -> bool {
    match error {
        MountError::NotTakenOver { .. } => true,
        MountError::Session(SessionError::Start(error)) => {
            error.kind() == std::io::ErrorKind::InvalidData
        }
        _ => false,
    }
}

/// What the keeper passes to this firnd; empty without a keeper.
#[derive(Default)]
struct KeeperInputs {
    link: Option<Arc<KeeperLink>>,
    /// The process that ends the mount in place of firnd, if there is one.
    caller: Option<OwnedFd>,
    connection: Option<ResumedConnection>,
}

/// A checked mount, and the state of an earlier firnd that served it, if there was one.
struct MountToServe {
    checked: CheckedPaths,
    files: RuntimeFiles,
    taken_over: Option<TakenOverMount>,
}

/// Checks the paths and options of a new mount before anything is changed, and finds its runtime files (arena, sockets,
/// log).
fn check_new_mount(
    request: &MountRequest,
    reporter: &mut Reporter<'_>,
) -> Result<MountToServe, MountError> {
    let options = &request.options;
    let checked = preflight::check_paths(
        &request.backing,
        &request.mount_point,
        options,
        &mut |text| reporter.notice(text),
    )?;
    spill::check_spill_place(options, &checked, &mut |text| reporter.notice(text))?;
    backup::check_backup_dir(options, &checked)?;
    placement::check_lanes(options, &checked)?;
    let files = find_runtime_files(&checked.backing, options)?;
    let is_fuse = options.frontend == firn_config::Frontend::Fuse;
    // A stub tree hides no files. A stub tree that an earlier firnd left at the mount point is refused later, in
    // `lock_mount`.
    if is_fuse && !options.nonempty && waiting_tree(&files)?.is_none() {
        preflight::check_mount_point_empty(&checked)?;
    }
    Ok(MountToServe {
        checked,
        files,
        taken_over: None,
    })
}

/// Finds the mount of a serving process (firnd) that died; this process serves it from now on. `connection` is its FUSE
/// connection, which the keeper, the process that started this one, has kept open.
///
/// The mount point is not accessed, because no process answers there yet.
fn open_taken_over_mount(
    request: &MountRequest,
    connection: ResumedConnection,
    link: Option<&Arc<KeeperLink>>,
) -> Result<MountToServe, MountError> {
    let options = &request.options;
    let backing = preflight::check_backing(&request.backing, options.read_only)?;
    let files = find_runtime_files(&backing, options)?;
    let taken_over = TakenOverMount::open(&files, connection, link)?;
    let mount_point = taken_over.mount_point();
    Ok(MountToServe {
        checked: CheckedPaths {
            backing,
            mount_point,
        },
        files,
        taken_over: Some(taken_over),
    })
}

/// Finds the mount to serve: that of the `connection` which an earlier firnd had, or a new one.
fn find_mount_to_serve(
    request: &MountRequest,
    connection: Option<ResumedConnection>,
    link: Option<&Arc<KeeperLink>>,
    reporter: &mut Reporter<'_>,
) -> Result<MountToServe, MountError> {
    let Some(connection) = connection else {
        return check_new_mount(request, reporter);
    };
    if !request.foreground {
        // The keeper has started this firnd with the log as standard error.
        log::start_in_background(&request.options, &request.mount_point);
    }
    open_taken_over_mount(request, connection, link)
}

/// Starts the log and the file of events. A mount in the foreground logs to standard error. The keeper, which starts
/// the next firnd, gets the log file too.
fn start_log(
    request: &MountRequest,
    checked: &CheckedPaths,
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
        // Otherwise this process would keep the file system of its directory from being unmounted.
        let _ = std::env::set_current_dir("/");
    }
    log::events::start(
        files.events.clone(),
        shown_host_name(options),
        checked.mount_point.as_path().into(),
    );
    Ok(())
}

/// Reports settings of the environment that the user may want to change: the limit on file sizes, and misspelt
/// variables.
fn warn_of_environment(reporter: &mut Reporter<'_>) {
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

/// Serves a mount from its checks to its end, with what the keeper has passed to this process; `KeeperInputs` is empty
/// without a keeper. The keeper starts the next firnd if this one dies, which then continues the mount (`taken_over`).
fn serve_mount(
    request: &MountRequest,
    mut reporter: Reporter<'_>,
    keeper_inputs: KeeperInputs,
) -> Result<(), MountError> {
    let options = &request.options;
    let KeeperInputs {
        link,
        caller,
        connection,
    } = keeper_inputs;
    let MountToServe {
        checked,
        files,
        taken_over,
    } = find_mount_to_serve(request, connection, link.as_ref(), &mut reporter)?;
    let locks = lock_mount(&checked, &files, options, link.as_ref())?;
    start_log(request, &checked, &files, link.as_deref())?;
    warn_of_environment(&mut reporter);
    tracing::info!(backing = %quoted_path(&checked.backing), mount_point = %quoted_path(&checked.mount_point), "attaching to the backing");
    let mut attached = AttachedArena::attach_for_mount(
        &checked.backing,
        files,
        locks,
        options,
        taken_over.as_ref().map(|taken_over| &taken_over.resumed),
        &mut |text| reporter.notice(text),
    )?;
    if let Some(taken_over) = &taken_over {
        if let Err(error) = taken_over.take_resumed_requests(&mut attached) {
            // Programs still have this mount, so the arena with its data stays for another firnd.
            attached.stop_before_visible(ArenaEnd::Keep);
            return Err(error);
        }
        // The kernel may have names of aborted transactions in its cache.
        taken_over.await_expiry_of_lost_names(Duration::from_millis(options.attr_timeout_ms));
    }
    let caller = match caller {
        Some(caller) => Some(caller),
        None => find_caller(request)?,
    };
    let context = MountContext {
        request,
        checked: &checked,
        link,
        caller,
        taken_over: taken_over.as_ref(),
    };
    let mount = Mount::start(context, attached)?;
    mount.notify_keeper(Duration::from_millis(options.watchdog_ms));
    if let Some(taken_over) = &taken_over {
        taken_over.record_end_of_pause();
    }
    reporter.ready();
    mount.log_mounted(&checked);
    mount.serve_until_unmounted(&checked)
}

/// Locks the backing against other processes of this host, and takes this host's lease (a lock against other hosts) if
/// several hosts commit together. Fails if the backing is in use.
///
/// Also fails if a FUSE mount is asked for, and a stub tree (empty files on tmpfs) of an earlier mount has names that
/// are not in the backing yet.
fn lock_mount(
    checked: &CheckedPaths,
    files: &RuntimeFiles,
    options: &Options,
    link: Option<&Arc<KeeperLink>>,
) -> Result<Locks, MountError> {
    let members = participants::members(options)?;
    // The terms tell other hosts how this host mounts the backing. The log layer is opened later; it then publishes
    // them again, with the logs.
    let serves_logs = false;
    let terms = terms_from_options(options, serves_logs);
    let locks = Locks::acquire(
        &checked.backing,
        files,
        members.as_ref().map(|members| (members, &terms)),
        LockSharing::from_options(options),
        link,
    )?;
    if options.frontend == firn_config::Frontend::Fuse {
        refuse_waiting_tree(checked, files)?;
    }
    Ok(locks)
}

/// Fails if a stub tree (empty files on tmpfs) of an earlier mount has names that are not in the backing yet.
fn refuse_waiting_tree(checked: &CheckedPaths, files: &RuntimeFiles) -> Result<(), MountError> {
    match waiting_tree(files)? {
        None => Ok(()),
        Some(prefix) => Err(MountError::TreeWaits {
            backing: checked.backing.clone(),
            prefix,
        }),
    }
}

/// Returns a pidfd of the process that ends the mount in place of firnd, if that process has started firnd itself.
fn find_caller(request: &MountRequest) -> Result<Option<OwnedFd>, MountError> {
    if !request.ends_with_parent {
        return Ok(None);
    }
    let Some(parent) = getppid() else {
        return Ok(None);
    };
    match pidfd_open(parent, PidfdFlags::empty()) {
        Ok(pidfd) => Ok(Some(pidfd)),
        Err(errno) => Err(MountError::io("watch the process that mounts")(
            errno.into(),
        )),
    }
}

/// The inputs of [`Mount::start`].
struct MountContext<'a> {
    request: &'a MountRequest,
    checked: &'a CheckedPaths,
    link: Option<Arc<KeeperLink>>,
    /// A pidfd of the process with which the mount ends.
    caller: Option<OwnedFd>,
    /// The mount of a dead firnd that this firnd continues.
    taken_over: Option<&'a TakenOverMount>,
}

/// A mount that programs see.
struct Mount {
    link: Option<Arc<KeeperLink>>,
    attached: AttachedArena,
    parts: Parts,
    frontend: Frontend,
    sender: Sender<Event>,
    events: Receiver<Event>,
}

impl Mount {
    /// Starts to watch for signals, then all parts of the mount (its features), and the frontend, by which programs see
    /// the mount when this returns. After a failure all parts are stopped again.
    fn start(context: MountContext<'_>, attached: AttachedArena) -> Result<Self, MountError> {
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
            // Programs may still have the mount of a dead firnd; its arena then stays for the next firnd.
            attached.stop_before_visible(MountSetup::arena_end_after_failure(taken_over));
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
        let StartedMount { parts, frontend } = setup.assemble()?;
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
    fn notify_keeper(&self, watchdog: Duration) {
        if let Some(link) = &self.link {
            link.notify_serving();
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
    fn log_mounted(&self, checked: &CheckedPaths) {
        let figures = self.attached.engine.figures();
        let epoch = figures.epoch;
        if epoch > 1 {
            tracing::info!(target: TARGET, kind = "taken_over", epoch, "the arena of an earlier firnd is used again");
        }
        let recovered_bytes = figures.recovered_bytes;
        let lost_file_bytes = figures.lost_file_bytes;
        if recovered_bytes > 0 || lost_file_bytes > 0 {
            tracing::info!(target: TARGET, kind = "recovered", recovered_bytes, lost_file_bytes, "data of an earlier firnd was recovered");
        }
        let backing = quoted_path(&checked.backing);
        let arena_bytes = figures.arena_bytes;
        tracing::info!(target: TARGET, kind = "mounted", backing, arena_bytes, "mounted");
    }

    /// Serves the mount until it is unmounted, stops its parts (its features), and sends the last reply to the client
    /// that asked for the unmount. Fails if data that was to be drained to the backing stays in the arena, the host's
    /// memory.
    fn serve_until_unmounted(self, checked: &CheckedPaths) -> Result<(), MountError> {
        let MountEnd {
            outcome,
            is_forced,
            client,
            held,
        } = self.serve_events();
        if let Some(link) = &self.link {
            link.notify_ending();
        }
        // A session that has not ended may still write, so its arena is kept even if it is empty now.
        let arena_end = if outcome.session != SessionState::Ended {
            ArenaEnd::Keep
        } else {
            match held {
                HeldPolicy::Discard => ArenaEnd::Discard,
                // Data that is to be kept makes the arena not empty, so it stays.
                HeldPolicy::Drain | HeldPolicy::Keep => ArenaEnd::RemoveIfEmpty,
            }
        };
        let mut stop_context =
            StopContext::new(held, arena_end, is_forced, outcome.gave_up_backing);
        self.parts.stop(&mut stop_context);
        let result = self.check_remaining_data(&stop_context, checked);
        if let Some(client) = client {
            let files_in_logs = stop_context.remaining_in_logs.written as u64;
            send_last_reply(&client, &result, files_in_logs);
        }
        tracing::info!("ended");
        result
    }

    /// Returns an error if data stays in the arena (the host's memory), or files stay in logs, although both were to go
    /// to the backing. The parts of the mount have stopped and have filled `context`.
    fn check_remaining_data(
        &self,
        context: &StopContext,
        checked: &CheckedPaths,
    ) -> Result<(), MountError> {
        let backing = checked.backing.clone();
        if context.remaining_bytes == 0 {
            return match context.remaining_in_logs.error {
                None => Ok(()),
                Some(source) => Err(MountError::FilesRemainInLogs { backing, source }),
            };
        }
        if context.held_policy == HeldPolicy::Keep {
            return Ok(());
        }
        // Data in the arena is the worse failure, so an error of the logs is not returned beside it.
        Err(MountError::DataRemains {
            bytes: context.remaining_bytes,
            arena: self.attached.files.arena.clone(),
            backing,
        })
    }

    /// Handles events (signals, unmounts, the end of the FUSE session) until the mount is gone. Between them it runs
    /// the periodic work of the parts. Returns how the mount ended, and the client that asked for this and waits for
    /// the last reply.
    fn serve_events(&self) -> MountEnd {
        let ending_mount = end::EndingMount {
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
                    return MountEnd::without_client(UnmountOutcome {
                        session: SessionState::Ended,
                        gave_up_backing: false,
                    });
                }
                Ok(Event::Signal) => {
                    return MountEnd::without_client(end::end_after_signal(&ending_mount));
                }
                Ok(Event::Unmount {
                    force,
                    held,
                    client,
                }) => {
                    let send_progress = &mut |progress| client.reply.send(progress).is_ok();
                    match end::end_by_request(&ending_mount, force, held, send_progress) {
                        Ok(outcome) => {
                            return MountEnd {
                                outcome,
                                is_forced: force,
                                client: Some(client),
                                held,
                            };
                        }
                        // The mount stays as it was.
                        Err(refusal) => drop(client.reply.send(refusal)),
                    }
                }
            }
        }
    }
}

/// Sends the last reply to a client that asked for an unmount, and waits until the reply has left.
fn send_last_reply(client: &UnmountClient, result: &Result<(), MountError>, written_files: u64) {
    let reply = match result {
        Ok(()) => Reply::Unmounted { written_files },
        Err(error) => Reply::Error {
            errno: libc::EIO,
            message: error.to_string(),
        },
    };
    if client.reply.send(reply).is_ok() {
        // A client that does not read must not hold up the end.
        let _ = client.reply_sent.recv_timeout(LAST_REPLY_TIMEOUT);
    }
}

/// How a mount ended.
struct MountEnd {
    outcome: UnmountOutcome,
    /// The end does not wait for a backing that does not answer.
    is_forced: bool,
    /// The client that asked for the end; `None` after a signal or umount(8).
    client: Option<UnmountClient>,
    /// What happens to the data that only the arena has.
    held: HeldPolicy,
}

impl MountEnd {
    /// Returns an end that no client has asked for: after a signal or umount(8).
    fn without_client(outcome: UnmountOutcome) -> Self {
        Self {
            outcome,
            is_forced: false,
            client: None,
            held: HeldPolicy::Drain,
        }
    }
}

/// Returns whether a process is still running.
fn is_running(process: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    let no_wait = Timespec::default();
    poll(&mut fds, Some(&no_wait)) == Ok(0)
}

/// Starts the thread that handles signals. The first SIGTERM or SIGINT begins the end of the mount. The second one ends
/// this process at once: data that is not drained to the backing stays in the arena, the host's shared memory. SIGHUP
/// is ignored.
///
/// While the process `caller` runs, these signals are ignored, because `caller` gets them too and ends the mount.
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
        let mut has_begun_end = false;
        for signal in signals.forever().filter(|signal| *signal != SIGHUP) {
            if caller.as_ref().is_some_and(is_running) {
                tracing::info!(
                    signal,
                    "this signal is ignored: the process that started the mount ends it"
                );
                continue;
            }
            if has_begun_end {
                tracing::warn!(
                    signal,
                    "a second signal: firnd ends at once; data that is not drained stays in the arena"
                );
                // If this fails, the process ends nevertheless, and then the kernel ends the mount.
                let lazy = true;
                let _ = detach(&mount_point, lazy);
                if let Some(link) = &link {
                    // Without this message the keeper would start another firnd.
                    link.notify_ending();
                }
                std::process::exit(INTERRUPTED);
            }
            has_begun_end = true;
            // The main loop has ended if this fails.
            let _ = events.send(Event::Signal);
        }
    };
    spawn_thread("firn-signal", watch).map_err(MountError::io("start a thread"))
}
