//! What a mount has seen of a lane: what went to it, and whether it takes more.
//!
//! The state is advice: a lane that is full or gone is asked again by each call that needs it, and by a new file that
//! may not go elsewhere. It is in the log once, so that a lane that comes and goes does not fill it.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use firn_backing::{Backing, Errno, Result};
use firn_format::quote::quoted;

use crate::Lane;
use std::os::unix::ffi::OsStrExt;

/// Whether a lane takes files and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LaneState {
    /// As far as is known.
    #[default]
    Ok,
    /// The last write or creation found no room.
    Full,
    /// It did not answer as a directory should the last time.
    Gone,
}

/// What went to a lane since the mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneFigures {
    /// Files that were placed there.
    pub files: u64,
    /// Bytes that were written there.
    pub bytes: u64,
    /// Whether it takes more.
    pub state: LaneState,
}

#[derive(Debug, Default)]
pub(crate) struct Progress {
    files: AtomicU64,
    bytes: AtomicU64,
    /// A [`LaneState`], as its place in [`STATES`].
    state: AtomicU8,
    is_full_logged: AtomicBool,
    is_gone_logged: AtomicBool,
}

const STATES: [LaneState; 3] = [LaneState::Ok, LaneState::Full, LaneState::Gone];

impl Progress {
    pub(crate) fn count_file(&self) {
        self.files.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn state(&self) -> LaneState {
        STATES[usize::from(self.state.load(Ordering::Relaxed))]
    }

    pub(crate) fn set_state(&self, state: LaneState) {
        self.state.store(state as u8, Ordering::Relaxed);
    }

    fn figures(&self) -> LaneFigures {
        LaneFigures {
            files: self.files.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            state: self.state(),
        }
    }

    /// Whether this is the first time that the lane is in this state.
    fn is_news(&self, state: LaneState) -> bool {
        let logged = match state {
            LaneState::Ok => return false,
            LaneState::Full => &self.is_full_logged,
            LaneState::Gone => &self.is_gone_logged,
        };
        !logged.swap(true, Ordering::Relaxed)
    }
}

/// The state that a failed call tells of; none where it is about the file or the caller.
pub(crate) fn state_behind(error: Errno) -> Option<LaneState> {
    match error {
        Errno::NOSPC | Errno::DQUOT => Some(LaneState::Full),
        Errno::IO
        | Errno::STALE
        | Errno::ROFS
        | Errno::NODEV
        | Errno::NXIO
        | Errno::NOTCONN
        | Errno::TIMEDOUT
        | Errno::HOSTDOWN
        | Errno::HOSTUNREACH
        | Errno::SHUTDOWN => Some(LaneState::Gone),
        _ => None,
    }
}

impl<B: Backing> Lane<B> {
    /// What went to it since the mount, and whether it takes more.
    pub fn figures(&self) -> LaneFigures {
        self.progress.figures()
    }

    /// Notes what a call of the lane tells of it.
    pub(crate) fn note<T>(&self, done: Result<T>) -> Result<T> {
        match &done {
            // A full lane still answers: only a new file shows that it takes more.
            Ok(_) if self.progress.state() == LaneState::Gone => {
                self.progress.set_state(LaneState::Ok);
            }
            Ok(_) => {}
            Err(error) => {
                if let Some(state) = state_behind(*error) {
                    self.note_state(state, *error);
                }
            }
        }
        done
    }

    /// The lane is found full or gone.
    pub(crate) fn note_state(&self, state: LaneState, error: Errno) {
        self.progress.set_state(state);
        if self.progress.is_news(state) {
            let lane = quoted(self.path.as_bytes());
            let advice = match state {
                LaneState::Full => "its files wait until there is room",
                _ => "its files wait until it is back",
            };
            tracing::warn!(%lane, %error, "a lane fails: {advice}; new files go elsewhere where no line of the lane map says otherwise");
        }
    }
}
