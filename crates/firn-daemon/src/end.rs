//! Ends a mount after a signal or at the request of a client: its data goes to the backing, programs lose it, and
//! firnd, its process, ends.
//!
//! Promises
//! * Nothing acknowledged is dropped unless the client asks for that (`HeldPolicy::Discard`). Data that cannot be
//!   drained (copied to the backing) stays in the arena, the host's shared memory, and firnd reports that.
//! * The arena is removed only after the kernel has released the mount, and only if it is empty or is to be discarded.
//! * An unmount that is refused (open files, a failing backing) leaves the mount as it was. Open files count in every
//!   mount namespace.
//! * If other mount namespaces have copies of the mount and use nothing in them, these copies end at the same time.
//!
//! Race: a program closes its files before firnd is notified, so open files are checked again for
//! [`CLOSE_REPORT_DELAY_MAX`].

use std::io;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use firn_backing::Errno;
use firn_engine::Engine;
use firn_format::durability::DurabilityLevel;
use firn_format::quantity::{bytes, seconds};
use firn_protocol::{HeldPolicy, Reply};

use crate::attach::AttachedArena;
use crate::end_timeout::{forced_timeout, run_unless_given_up};
use crate::event::Event;
use crate::frontend::Frontend;
use crate::last_drain::ProgressCheck;
use crate::mount_users::{FileSystemMounts, MountUser, describe_users};
use crate::part::Parts;
use crate::process;
use crate::replies::throttle_progress;
use crate::store::Store;

/// Timeout for the kernel to release a mount that was unmounted.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time in which files that programs have closed may still count as open: the kernel reports the last close later.
const CLOSE_REPORT_DELAY_MAX: Duration = Duration::from_secs(2);
/// Pause between two checks whether programs still use the mount.
const USE_CHECK_EVERY: Duration = Duration::from_millis(20);

/// Whether the session with the kernel (the FUSE connection of the mount) is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SessionState {
    /// No more requests will come.
    Ended,
    /// The mount is out of the file tree, but programs may still have files open in it.
    Lingering,
}

/// The result of an unmount.
pub(crate) struct UnmountOutcome {
    pub(crate) session: SessionState,
    /// The backing did not answer, so firnd makes no more calls on it.
    pub(crate) gave_up_backing: bool,
}

/// A mount that is about to end.
pub(crate) struct EndingMount<'a> {
    pub(crate) attached: &'a AttachedArena,
    pub(crate) parts: &'a Parts,
    pub(crate) frontend: &'a Frontend,
    pub(crate) events: &'a Receiver<Event>,
    pub(crate) sender: &'a Sender<Event>,
}

impl EndingMount<'_> {
    /// Returns the function that makes the mount's parts ready for the end, for another thread. It may wait for the
    /// backing.
    fn parts_preparer(&self) -> impl FnOnce() + Send + 'static {
        let parts = self.parts.clone();
        move || parts.prepare_end()
    }
}

/// The events that arrive while a mount drains for its end.
struct PendingEvents<'a> {
    events: &'a Receiver<Event>,
    sender: &'a Sender<Event>,
    /// Events to be handled later; the drop sends them to the main loop again.
    postponed: Vec<Event>,
    /// A client has asked for a forced unmount.
    has_forced_unmount: bool,
}

impl<'a> PendingEvents<'a> {
    fn from_mount(mount: &EndingMount<'a>) -> Self {
        Self {
            events: mount.events,
            sender: mount.sender,
            postponed: Vec::new(),
            has_forced_unmount: false,
        }
    }

    /// Reads the events that have arrived, and returns whether a client has asked for a forced unmount.
    fn read_events(&mut self) -> bool {
        for event in self.events.try_iter() {
            self.has_forced_unmount |= matches!(event, Event::Unmount { force: true, .. });
            self.postponed.push(event);
        }
        self.has_forced_unmount
    }

    /// Puts the events that came meanwhile, such as unmount requests, back into the queue of the main loop.
    fn send_again(self) {
        drop(self);
    }
}

impl Drop for PendingEvents<'_> {
    fn drop(&mut self) {
        for event in self.postponed.drain(..) {
            // The main loop gets the events that were postponed meanwhile.
            let _ = self.sender.send(event);
        }
    }
}

/// Ends a mount after a signal: drains all data to the backing, then takes the mount away from programs that still use
/// it. If a client asks for a forced unmount meanwhile, the drain stops, and the data stays in the arena (the host's
/// shared memory).
pub(crate) fn end_after_signal(mount: &EndingMount<'_>) -> UnmountOutcome {
    let &EndingMount {
        attached, frontend, ..
    } = mount;
    tracing::info!("a signal asks firnd to end: draining");
    let mut pending_events = PendingEvents::from_mount(mount);
    // A forced unmount, which `read_events` reports, ends each wait for the backing.
    let prepare_parts = mount.parts_preparer();
    let prepared = run_unless_given_up(|| pending_events.read_events(), prepare_parts);
    if prepared.is_some() {
        // A stub tree, a mount of empty files on tmpfs, may have names that the backing lacks.
        let create_names = frontend.names_creator();
        let created = run_unless_given_up(|| pending_events.read_events(), create_names);
        if let Some(Err(error)) = created {
            tracing::warn!(%error, "cannot create every name of the stub tree in the backing yet");
        }
    }
    let durability = &attached.engine.durability;
    let drained = durability.wait_tree(b"", DurabilityLevel::Drained, &mut |_, _| {
        // Another I/O thread continues if writes that do not return occupy all of them.
        attached.io_threads.replace_hung();
        !pending_events.read_events()
    });
    if let Err(error) = drained {
        tracing::warn!(%error, "cannot drain everything yet");
    }
    let gave_up_backing = pending_events.has_forced_unmount;
    pending_events.send_again();
    take_mount_away(frontend);
    UnmountOutcome {
        session: wait_for_release(frontend, mount.events),
        gave_up_backing,
    }
}

/// Ends a mount because a client asks. `held` says what happens to data that only the arena (the host's memory) has.
/// Returns how the mount ended; the error is the reply to the client when the mount stays.
///
/// The steps are: prepare the parts, drain, refuse if programs use the mount, unmount, wait for the kernel. With
/// `force` the mount ends in any case: after a timeout no more calls are made on a backing that does not answer, and
/// programs lose the mount. Without `force`, obstacles, open files and a failed drain leave the mount as it was.
pub(crate) fn end_by_request(
    mount: &EndingMount<'_>,
    force: bool,
    held: HeldPolicy,
    send_progress: &mut dyn FnMut(Reply) -> bool,
) -> Result<UnmountOutcome, Reply> {
    let &EndingMount {
        attached, frontend, ..
    } = mount;
    let mut pending_events = PendingEvents::from_mount(mount);
    let must_drain = held == HeldPolicy::Drain;
    let mut backing_state = if force {
        prepare_forced_unmount(mount, must_drain)
    } else {
        prepare_unmount(mount, must_drain, &mut pending_events)?;
        BackingState::Answers
    };
    if must_drain && backing_state == BackingState::Answers {
        backing_state = drain_for_client(attached, force, &mut pending_events, send_progress)?;
    }
    let gave_up_backing = backing_state == BackingState::GivenUp;
    pending_events.send_again();
    if gave_up_backing {
        tracing::warn!("the backing does not answer: held data stays in the arena");
    }
    send_progress(Reply::Progress {
        bytes_left: 0,
        files_left: 0,
        phase: "unmounting".into(),
    });
    if !force {
        refuse_users_elsewhere(attached, frontend)?;
    }
    let copies = find_copies(frontend);
    match unmount_unless_used(frontend, force) {
        Ok(()) => detach_copies(frontend, copies),
        Err(_) if force => take_mount_away(frontend),
        Err(error) => return Err(unmount_error_reply(&error, frontend)),
    }
    Ok(UnmountOutcome {
        session: wait_for_release(frontend, mount.events),
        gave_up_backing,
    })
}

/// Whether an unmount may still call the backing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BackingState {
    Answers,
    /// The backing did not answer in time, or takes no more data. Only a forced unmount continues then.
    GivenUp,
}

/// Prepares the parts of the mount (its features) for a forced unmount. With `must_drain` it also creates the names of
/// a stub tree, a mount of empty files on tmpfs, in the backing. Errors are ignored, and the backing is given up if it
/// does not answer in time.
fn prepare_forced_unmount(mount: &EndingMount<'_>, must_drain: bool) -> BackingState {
    let mut has_timed_out = forced_timeout();
    if run_unless_given_up(&mut has_timed_out, mount.parts_preparer()).is_none() {
        return BackingState::GivenUp;
    }
    if !must_drain {
        return BackingState::Answers;
    }
    match run_unless_given_up(&mut has_timed_out, mount.frontend.names_creator()) {
        None => BackingState::GivenUp,
        Some(_) => BackingState::Answers,
    }
}

/// Prepares the parts of the mount for an unmount that a client asks for without `force`. With `must_drain` it also
/// creates the names of a stub tree in the backing.
///
/// Fails if a part has an obstacle, if names cannot be created, or if another client's forced unmount comes meanwhile.
/// The error is the reply to the client.
fn prepare_unmount(
    mount: &EndingMount<'_>,
    must_drain: bool,
    pending_events: &mut PendingEvents<'_>,
) -> Result<(), Reply> {
    let parts = mount.parts.clone();
    let find_obstacle = move || parts.find_obstacle();
    let obstacle = run_unless_given_up(|| pending_events.read_events(), find_obstacle);
    if let Some(message) = obstacle.ok_or_else(overtaken_reply)? {
        let errno = libc::EBUSY;
        return Err(Reply::Error { errno, message });
    }
    let prepare_parts = mount.parts_preparer();
    let prepared = run_unless_given_up(|| pending_events.read_events(), prepare_parts);
    prepared.ok_or_else(overtaken_reply)?;
    if !must_drain {
        return Ok(());
    }
    let create_names = mount.frontend.names_creator();
    let created = run_unless_given_up(|| pending_events.read_events(), create_names);
    created
        .ok_or_else(overtaken_reply)?
        .map_err(names_error_reply)
}

/// Returns the reply to an unmount that failed because names of the stub tree cannot be created in the backing.
fn names_error_reply(error: Errno) -> Reply {
    Reply::Error {
        errno: error.raw_os_error(),
        message: format!(
            "cannot create the names of the stub tree in the backing: {error}; mend the backing and try again, or use --force to unmount and keep them for the next mount"
        ),
    }
}

/// Drains all data to the backing for a client that asks for an unmount. Only a forced unmount gives the backing up, if
/// it takes no more data, and then leaves the data in the arena (the host's memory).
///
/// The error is the reply to the client when the mount stays.
fn drain_for_client(
    attached: &AttachedArena,
    force: bool,
    pending_events: &mut PendingEvents<'_>,
    send_progress: &mut dyn FnMut(Reply) -> bool,
) -> Result<BackingState, Reply> {
    let mut report_progress = throttle_progress("draining", send_progress);
    let mut progress_check = ProgressCheck::new();
    let mut backing_state = BackingState::Answers;
    let engine = &attached.engine;
    let drained =
        engine
            .durability
            .wait_tree(b"", DurabilityLevel::Drained, &mut |bytes, files| {
                // A client that disconnects does not stop the unmount that it asked for.
                report_progress(bytes, files);
                attached.io_threads.replace_hung();
                if force {
                    let backing_takes_data = progress_check.has_progress(bytes);
                    backing_state = if backing_takes_data {
                        BackingState::Answers
                    } else {
                        BackingState::GivenUp
                    };
                    return backing_takes_data;
                }
                !pending_events.read_events()
            });
    match drained {
        Err(_) if pending_events.has_forced_unmount => Err(overtaken_reply()),
        Err(error) if !force => Err(drain_error_reply(error, engine)),
        _ => Ok(backing_state),
    }
}

/// Returns the reply to an unmount that failed because data cannot be drained to the backing.
fn drain_error_reply(error: Errno, engine: &Engine<Store>) -> Reply {
    let message = format!(
        "{} cannot be drained: {}; they stay in memory{}: mend the backing and run `firn umount` again, or use --force to unmount and keep them in the arena",
        bytes(engine.held_bytes()),
        process::describe_errno(error),
        describe_next_try(engine)
    );
    Reply::Error {
        errno: error.raw_os_error(),
        message,
    }
}

/// Returns the time of the next attempt to drain, as part of a sentence.
fn describe_next_try(engine: &Engine<Store>) -> String {
    let lanes = engine.figures().lanes;
    let waits = lanes.iter().filter_map(|lane| lane.retry_seconds);
    match waits.reduce(f64::min) {
        Some(shortest_wait) => format!(", and the next try is in {}", seconds(shortest_wait)),
        None => String::new(),
    }
}

/// Unmounts, or fails with EBUSY if programs use the mount.
///
/// A process that has just ended, or is about to run another program, may have a file open for a moment longer. Without
/// `force` this function waits for that.
fn unmount_unless_used(frontend: &Frontend, force: bool) -> io::Result<()> {
    let deadline = Instant::now() + CLOSE_REPORT_DELAY_MAX;
    loop {
        let result = frontend.unmount();
        let is_busy = matches!(&result, Err(error) if error.raw_os_error() == Some(libc::EBUSY));
        let is_used = || {
            let mounts = frontend.mounts();
            mounts.is_none_or(|mounts| !mounts.users().is_empty())
        };
        if !is_busy || force || Instant::now() >= deadline || is_used() {
            return result;
        }
        std::thread::sleep(USE_CHECK_EVERY);
    }
}

/// Returns the reply for a client if a forced unmount of another client has overtaken its own.
fn overtaken_reply() -> Reply {
    let message = "another `firn umount --force` ends the mount without waiting".into();
    Reply::Error {
        errno: libc::ECANCELED,
        message,
    }
}

/// Waits a moment until no program uses a copy of the mount in another mount namespace, such as that of a container. If
/// one still does, returns the reply that refuses the unmount. This check is needed because unmount(2) removes one
/// mount only, so it would not fail.
fn refuse_users_elsewhere(attached: &AttachedArena, frontend: &Frontend) -> Result<(), Reply> {
    let deadline = Instant::now() + CLOSE_REPORT_DELAY_MAX;
    loop {
        let Some(mounts) = find_copies(frontend) else {
            return Ok(());
        };
        let users = mounts.users();
        let open_files = attached.engine.figures().open_files;
        if users.is_empty() && open_files == 0 {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(copies_in_use_reply(&mounts, &users, open_files));
        }
        std::thread::sleep(USE_CHECK_EVERY);
    }
}

/// Returns the reply to an unmount while programs use a copy of the mount; it names these programs if firnd sees them.
fn copies_in_use_reply(mounts: &FileSystemMounts, users: &[MountUser], open_files: u64) -> Reply {
    let users = if users.is_empty() {
        format!("programs that cannot be seen from here ({open_files} open files)")
    } else {
        describe_users(users)
    };
    let copies = mounts.describe_copies();
    let message = format!(
        "the mount is in use: {users}; it is also mounted at {copies}: end these programs, or use --force"
    );
    Reply::Error {
        errno: libc::EBUSY,
        message,
    }
}

/// Returns the mounts of this firnd if there are copies in addition to its own.
///
/// Call this while the mount exists: the kernel gives the device number of a removed file system to the next one.
fn find_copies(frontend: &Frontend) -> Option<FileSystemMounts> {
    frontend.mounts().filter(FileSystemMounts::has_copies)
}

/// Ends the copies of an unmounted mount in other mount namespaces. Otherwise the kernel would keep their connection,
/// and no process would serve it.
fn detach_copies(frontend: &Frontend, copies: Option<FileSystemMounts>) {
    let Some(mounts) = copies else {
        return;
    };
    tracing::info!(
        "the copies of the mount end too: {}",
        mounts.describe_copies()
    );
    if let Err(error) = frontend.abort() {
        tracing::warn!(%error, "cannot abort the FUSE connection, so copies of the mount remain");
        return;
    }
    let lazy = true;
    for path in mounts.bound_copy_paths() {
        if let Err(error) = firn_fuse::detach(path, lazy) {
            let path = firn_format::quote::quoted_path(path);
            tracing::warn!(%error, "cannot unmount the dead mount at {path}");
        }
    }
}

/// Returns the reply to an unmount that failed; it names the programs that use the mount if this process sees them.
fn unmount_error_reply(error: &io::Error, frontend: &Frontend) -> Reply {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    let message = if errno == libc::EBUSY {
        let users = frontend.mounts().map(|mounts| mounts.users());
        match users.filter(|users| !users.is_empty()) {
            Some(users) => format!(
                "the mount is in use: {}: end these programs, or use --force",
                describe_users(&users)
            ),
            None => "the mount is in use by programs that cannot be seen from here (as root, `fuser -vm MOUNT_POINT` \
                     lists them): end them, or use --force"
                .to_owned(),
        }
    } else {
        format!("cannot unmount: {error}")
    };
    Reply::Error { errno, message }
}

/// Takes the mount away, from programs that use it too: the connection is aborted and the mount is detached.
fn take_mount_away(frontend: &Frontend) {
    let copies = find_copies(frontend);
    match frontend.unmount() {
        Ok(()) => return detach_copies(frontend, copies),
        Err(error) => {
            tracing::warn!(%error, "the mount is in use: the programs that use it lose it now")
        }
    }
    if let Err(error) = frontend.abort() {
        tracing::warn!(%error, "cannot abort the connection; programs can use their open files until they close them");
    }
    if let Err(error) = frontend.unmount_lazily() {
        tracing::warn!(%error, "cannot detach the mount");
    }
}

/// Waits until the kernel releases the mount. After [`RELEASE_TIMEOUT`] the connection is aborted, because a program
/// that firnd cannot see still uses it.
fn wait_for_release(frontend: &Frontend, events: &Receiver<Event>) -> SessionState {
    if wait_for_end(events) == SessionState::Ended {
        return SessionState::Ended;
    }
    tracing::warn!("a program that firnd cannot see still uses the mount, and loses it now");
    match frontend.abort() {
        Ok(()) => wait_for_end(events),
        Err(error) => {
            tracing::warn!(%error, "cannot abort the connection: the arena is kept");
            SessionState::Lingering
        }
    }
}

/// Waits at most [`RELEASE_TIMEOUT`] for [`Event::Ended`], which says that the kernel has released the mount. Returns
/// `Lingering` if it has not come by then. Clients that ask for an unmount meanwhile get ESHUTDOWN.
fn wait_for_end(events: &Receiver<Event>) -> SessionState {
    let deadline = Instant::now() + RELEASE_TIMEOUT;
    while let Some(time_left) = deadline.checked_duration_since(Instant::now()) {
        match events.recv_timeout(time_left) {
            Ok(Event::Ended) => return SessionState::Ended,
            Ok(Event::Unmount { client, .. }) => {
                let message = "firnd is ending already".into();
                // The client may be gone.
                let _ = client.reply.send(Reply::Error {
                    errno: libc::ESHUTDOWN,
                    message,
                });
            }
            Ok(Event::Signal) => {}
            Err(_) => break,
        }
    }
    SessionState::Lingering
}
