//! How a mount ends.
//!
//! Promises
//! * Nothing acknowledged is dropped: what cannot be drained stays in the arena, and that is said.
//! * The arena is removed only when the kernel has let go of the mount and nothing is left in it.
//! * An unmount that is refused (open files, a backing that fails) leaves the mount as it was.

use std::io;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use firn_backing::{Backing, Errno};
use firn_engine::Engine;
use firn_format::protocol::{Reply, Rung};

use crate::attach::Attached;
use crate::front::Front;
use crate::service::throttled;
use crate::transactions;

/// How long the kernel may take to let go of a mount that is taken away.
const LET_GO: Duration = Duration::from_secs(10);

/// What the main loop of firnd waits for.
pub(crate) enum Event {
    /// SIGTERM or SIGINT.
    Signal,
    /// A client asks for the end; it gets progress and one last word.
    Unmount {
        /// Even with open files and data that cannot be drained.
        force: bool,
        /// Without draining.
        keep_held: bool,
        /// To the client.
        reply: Sender<Reply>,
    },
    /// The kernel let go of the mount.
    Ended,
}

/// Whether the session is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// No request will come any more.
    Ended,
    /// Out of the tree, but programs may still have files open in it.
    Lingering,
}

/// Ends a mount because of a signal: drains, then takes it away from programs that still use it.
pub(crate) fn by_signal(attached: &Attached, front: &Front, events: &Receiver<Event>) -> Outcome {
    tracing::info!("asked to end: draining");
    transactions::leave(&attached.engine);
    transactions::give_up(&attached.engine);
    if let Err(error) = front.carry_names() {
        tracing::warn!(%error, "not every name can be carried over now");
    }
    if let Err(error) = attached.engine.wait_tree(b"", Rung::Drained, &mut |_, _| true) {
        tracing::warn!(%error, "not everything can be drained now");
    }
    take_away(front);
    let_go(events)
}

/// Ends a mount because a client asks; `Err` is what to answer where it stays.
pub(crate) fn by_request(
    attached: &Attached,
    front: &Front,
    events: &Receiver<Event>,
    force: bool,
    keep_held: bool,
    say: &mut dyn FnMut(Reply) -> bool,
) -> Result<Outcome, Reply> {
    if let Some(message) = transactions::in_the_way(&attached.engine).filter(|_| !force) {
        return Err(Reply::Error { errno: libc::EBUSY, message });
    }
    transactions::leave(&attached.engine);
    transactions::give_up(&attached.engine);
    if !keep_held {
        if let Err(error) = front.carry_names()
            && !force
        {
            let message = format!(
                "names of the stub tree cannot be carried over to the backing: {error}; mend the backing and try again, or use --force to unmount and keep them for the next mount"
            );
            return Err(Reply::Error { errno: error.raw_os_error(), message });
        }
        let mut progress = throttled("draining", say);
        let drained = attached.engine.wait_tree(b"", Rung::Drained, &mut |bytes, files| {
            // A client that went away does not end what it asked for.
            progress(bytes, files);
            true
        });
        if let Err(error) = drained
            && !force
        {
            let held = attached.engine.status().held_bytes;
            let message = format!(
                "{held} bytes cannot be drained: {error}; mend the backing and try again, or use --force to unmount and keep them in the arena"
            );
            return Err(Reply::Error { errno: error.raw_os_error(), message });
        }
    }
    say(Reply::Progress { bytes_left: 0, files_left: 0, phase: "unmounting".into() });
    match front.unmount(false) {
        Ok(()) => {}
        Err(_) if force => take_away(front),
        Err(error) => return Err(refused(&error)),
    }
    Ok(let_go(events))
}

fn refused(error: &io::Error) -> Reply {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    let message = if errno == libc::EBUSY {
        "files below the mount point are in use (`fuser -vm MOUNT_POINT` lists the programs): end them, or use --force".into()
    } else {
        format!("cannot unmount: {error}")
    };
    Reply::Error { errno, message }
}

fn take_away(front: &Front) {
    match front.unmount(false) {
        Ok(()) => return,
        Err(error) => {
            tracing::warn!(%error, "the mount is in use and is taken away from the programs that use it")
        }
    }
    if let Err(error) = front.abort() {
        tracing::warn!(%error, "cannot abort the connection; programs keep their open files until they close them");
    }
    if let Err(error) = front.unmount(true) {
        tracing::warn!(%error, "cannot detach the mount");
    }
}

/// Waits for [`Event::Ended`].
fn let_go(events: &Receiver<Event>) -> Outcome {
    let deadline = Instant::now() + LET_GO;
    while let Some(left) = deadline.checked_duration_since(Instant::now()) {
        match events.recv_timeout(left) {
            Ok(Event::Ended) => return Outcome::Ended,
            Ok(Event::Unmount { reply, .. }) => {
                let message = "firnd is ending already".into();
                let _ = reply.send(Reply::Error { errno: libc::ESHUTDOWN, message });
            }
            Ok(Event::Signal) => {}
            Err(_) => break,
        }
    }
    Outcome::Lingering
}

/// Drains until nothing is held or nothing more can be drained. A file that fails does not keep the
/// others from being drained. `progress` ends it with false.
pub(crate) fn drain_rest<B: Backing>(
    engine: &Engine<B>,
    until: Rung,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<(), Errno> {
    loop {
        let before = engine.status().held_bytes;
        let result = engine.wait_tree(b"", until, progress);
        let after = engine.status().held_bytes;
        match result {
            Ok(()) if after == 0 || after >= before => return Ok(()),
            Err(Errno::CANCELED) => return Err(Errno::CANCELED),
            Err(error) if after >= before => return Err(error),
            _ => {}
        }
    }
}
