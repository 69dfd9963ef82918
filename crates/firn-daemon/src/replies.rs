//! Replies of the control socket that several parts of a mount send.

use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::Errno;
use firn_engine::Engine;
use firn_format::durability::DurabilityLevel;
use firn_format::quantity::bytes;
use firn_protocol::Reply;
use firn_protocol::path::BytePath;

use crate::process;
use crate::store::Store;

/// Time between two messages of progress.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// Returns a function that takes the bytes and files that are left, and sends them as [`Reply::Progress`] at most every
/// [`PROGRESS_EVERY`]. It returns false once the client is gone. `phase` says what is done, such as "draining".
pub(crate) fn throttle_progress<'a>(
    phase: &'a str,
    send_progress: &'a mut dyn FnMut(Reply) -> bool,
) -> impl FnMut(u64, u64) -> bool + 'a {
    let mut next_message = Instant::now();
    move |bytes_left, files_left| {
        let now = Instant::now();
        if now < next_message {
            return true;
        }
        next_message = now + PROGRESS_EVERY;
        send_progress(Reply::Progress {
            bytes_left,
            files_left,
            phase: phase.into(),
        })
    }
}

/// Returns when the wait of a client with this timeout ends; `None` without a timeout.
pub(crate) fn deadline_after(timeout_ms: Option<u64>) -> Option<Instant> {
    timeout_ms.map(|ms| Instant::now() + Duration::from_millis(ms))
}

/// Waits until the files at or below `path` have the durability level `until`, for example are in the backing (drained)
/// or synced there (durable). Returns the reply: done, a timeout with the bytes that are left, or an error.
pub(crate) fn wait_for_level(
    engine: &Arc<Engine<Store>>,
    path: &BytePath,
    until: DurabilityLevel,
    deadline: Option<Instant>,
    send_progress: &mut dyn FnMut(Reply) -> bool,
) -> Reply {
    let phase = if until == DurabilityLevel::Durable {
        "syncing"
    } else {
        "draining"
    };
    let mut remaining_bytes = 0;
    let mut has_timed_out = false;
    let mut progress = throttle_progress(phase, send_progress);
    let result = engine
        .durability
        .wait_tree(path.as_bytes(), until, &mut |bytes, files| {
            remaining_bytes = bytes;
            has_timed_out = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            !has_timed_out && progress(bytes, files)
        });
    match result {
        Ok(()) => Reply::Done,
        Err(_) if has_timed_out => Reply::Error {
            errno: libc::ETIMEDOUT,
            message: format!(
                "timed out with {} left: they are still being drained",
                bytes(remaining_bytes)
            ),
        },
        Err(error) => failure_reply(error, path),
    }
}

/// Returns the reply to a request that the engine or the backing has refused.
pub(crate) fn failure_reply(error: Errno, path: &BytePath) -> Reply {
    let message = match error {
        Errno::NOENT => format!("{path}: no such file or directory in this mount"),
        Errno::CANCELED => "the wait was given up".into(),
        error => format!(
            "the backing reports: {}; the data is kept and tried again (`firn status` says when)",
            process::describe_errno(error)
        ),
    };
    Reply::Error {
        errno: error.raw_os_error(),
        message,
    }
}
