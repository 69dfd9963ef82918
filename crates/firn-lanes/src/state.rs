//! The health of each lane (a directory for the data of files) as this mount has observed it: whether the lane is full,
//! gone or hanging, and how many files and bytes were written to it.
//!
//! * The health only influences the choice of a lane. No call is refused because of it.
//! * Each state is logged only once for each lane, so that a lane that changes its state often does not fill the log.
//! * A call of a hanging lane does not return, so nothing reports the state. Therefore the calls in progress are
//!   recorded with their start times. A lane hangs if one of its calls takes too long. A status request reads only this
//!   record, and makes no call that could hang.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use firn_backing::lock::Mutex;
use firn_backing::{Backing, Errno, Result, Volume};
use firn_format::quote::quoted;

use crate::Lane;

/// Whether a lane accepts files and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LaneState {
    /// No failure is known.
    #[default]
    Ok,
    /// A write or a creation found no space, and no sufficient space was found since.
    Full,
    /// The last call failed because the directory was missing or its file system did not work.
    Gone,
    /// A call of the lane does not return.
    Hung,
}

/// Counts of the files and bytes that a lane received since the mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneFigures {
    /// Number of files that were placed in the lane.
    pub files: u64,
    /// Number of bytes that were written to the lane.
    pub bytes: u64,
    /// Whether the lane accepts more files and bytes.
    pub state: LaneState,
}

/// Kind of a call to a lane, which determines how long the call may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallKind {
    /// The call creates, removes or looks up a name, or reads attributes.
    Name,
    /// The call transfers bytes.
    Data,
    /// The call syncs data, which may be many gigabytes.
    Sync,
}

impl CallKind {
    /// Returns the time after which a call counts as hanging.
    fn hang_timeout(self) -> Duration {
        match self {
            Self::Name => Duration::from_secs(2),
            Self::Data => Duration::from_secs(10),
            Self::Sync => Duration::from_secs(60),
        }
    }
}

/// The observed health of one lane. Any number of threads may update it.
#[derive(Debug, Default)]
pub(crate) struct LaneHealth {
    files: AtomicU64,
    bytes: AtomicU64,
    /// State according to the calls that have returned, as an index of [`STATES`].
    state: AtomicU8,
    is_over_quota: AtomicBool,
    is_full_logged: AtomicBool,
    is_gone_logged: AtomicBool,
    is_hung_logged: AtomicBool,
    calls: Mutex<Calls>,
    /// When a write to the full lane last checked for free space.
    last_space_check: Mutex<Option<Instant>>,
}

/// A call of a lane that has not returned.
#[derive(Debug)]
struct StartedCall {
    kind: CallKind,
    started: Instant,
}

/// The calls of a lane that are in progress.
#[derive(Debug, Default)]
struct Calls {
    last_number: u64,
    /// The calls by their numbers, in the order of their start.
    in_progress: BTreeMap<u64, StartedCall>,
}

/// The states that the result of a returned call can imply.
const STATES: [LaneState; 3] = [LaneState::Ok, LaneState::Full, LaneState::Gone];
/// Minimum time between two checks whether a full lane has space again. A check follows a successful write.
const SPACE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl LaneHealth {
    pub(crate) fn count_file(&self) {
        self.files.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the state according to the calls that have returned.
    pub(crate) fn state(&self) -> LaneState {
        STATES[usize::from(self.state.load(Ordering::Relaxed))]
    }

    pub(crate) fn set_state(&self, state: LaneState) {
        debug_assert!(STATES.contains(&state));
        self.state.store(state as u8, Ordering::Relaxed);
    }

    /// Returns whether the lane is full because of a quota. The file system may report free space nevertheless.
    pub(crate) fn is_over_quota(&self) -> bool {
        self.is_over_quota.load(Ordering::Relaxed)
    }

    /// Returns whether a call in progress takes too long. Considers the kinds of calls for which `is_relevant` returns
    /// true.
    fn hangs(&self, is_relevant: impl Fn(CallKind) -> bool) -> bool {
        let calls = self.calls.lock();
        calls.in_progress.values().any(|call| {
            is_relevant(call.kind) && call.started.elapsed() >= call.kind.hang_timeout()
        })
    }

    /// Records that a call of the lane begins, so that a hanging one is found. Dropping the returned value records its
    /// end.
    fn begin_call(&self, kind: CallKind) -> CallInProgress<'_> {
        let mut calls = self.calls.lock();
        calls.last_number += 1;
        let number = calls.last_number;
        calls.in_progress.insert(
            number,
            StartedCall {
                kind,
                started: Instant::now(),
            },
        );
        CallInProgress {
            health: self,
            number,
        }
    }

    /// Returns the figures of the lane for the status.
    fn figures(&self) -> LaneFigures {
        let hangs = self.hangs(|_| true);
        LaneFigures {
            files: self.files.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            state: if hangs { LaneState::Hung } else { self.state() },
        }
    }

    /// Returns whether the lane is in this state for the first time, so that the state should be logged.
    fn is_first_time_in(&self, state: LaneState) -> bool {
        let logged = match state {
            LaneState::Ok => return false,
            LaneState::Full => &self.is_full_logged,
            LaneState::Gone => &self.is_gone_logged,
            LaneState::Hung => &self.is_hung_logged,
        };
        !logged.swap(true, Ordering::Relaxed)
    }

    /// Returns whether the caller should check for free space now. If so, the next check is due after
    /// `SPACE_CHECK_INTERVAL`.
    fn is_space_check_due(&self) -> bool {
        let mut last_check = self.last_space_check.lock();
        let is_due = last_check.is_none_or(|checked| checked.elapsed() >= SPACE_CHECK_INTERVAL);
        if is_due {
            *last_check = Some(Instant::now());
        }
        is_due
    }
}

/// A call in progress. Dropping the value marks the call as ended.
struct CallInProgress<'a> {
    health: &'a LaneHealth,
    number: u64,
}

impl Drop for CallInProgress<'_> {
    fn drop(&mut self) {
        self.health.calls.lock().in_progress.remove(&self.number);
    }
}

/// Returns the state of the lane (a directory on a server) that explains the error of a call. Returns `None` if the
/// error concerns only the file or the caller.
pub(crate) fn state_of_error(error: Errno) -> Option<LaneState> {
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
    /// Returns the lane's counts since the mount, and its state.
    pub fn figures(&self) -> LaneFigures {
        self.health.figures()
    }

    /// Returns whether a call of the kind [`CallKind::Name`] hangs.
    pub(crate) fn names_hang(&self) -> bool {
        self.health.hangs(|kind| kind == CallKind::Name)
    }

    /// Makes a call of the lane's backing, updates the lane's health from the result, and returns the result.
    pub(crate) fn call<T>(&self, kind: CallKind, make: impl FnOnce(&B) -> Result<T>) -> Result<T> {
        let started_call = self.health.begin_call(kind);
        let result = make(&self.backing);
        // Records the end of the call.
        drop(started_call);
        self.record_result(result)
    }

    /// Updates the lane's health from the result of a call, and returns the result.
    fn record_result<T>(&self, result: Result<T>) -> Result<T> {
        match result {
            // A full lane answers too, so a successful call does not prove that the lane has space again.
            Ok(_) if self.health.state() == LaneState::Gone => {
                self.health.set_state(LaneState::Ok);
            }
            Ok(_) => {}
            Err(error) => {
                if let Some(state) = state_of_error(error) {
                    self.record_state(state, error);
                }
            }
        }
        result
    }

    /// Records that the lane (a directory on a server) is full or gone, and logs the first time of each.
    pub(crate) fn record_state(&self, state: LaneState, error: Errno) {
        if state == LaneState::Full {
            let is_quota = error == Errno::DQUOT;
            self.health.is_over_quota.store(is_quota, Ordering::Relaxed);
        }
        self.health.set_state(state);
        if self.health.is_first_time_in(state) {
            let lane = quoted(self.path.as_bytes());
            let advice = match state {
                LaneState::Full => "its files wait until there is room",
                _ => "its files wait until it is back",
            };
            tracing::warn!(
                %lane, %error,
                "a lane fails: {advice}; new files go to other lanes, except those that the lane map assigns to it"
            );
        }
    }

    /// Records that a new file was placed in another lane because this lane did not answer.
    pub(crate) fn record_hang(&self) {
        if self.health.is_first_time_in(LaneState::Hung) {
            let lane = quoted(self.path.as_bytes());
            tracing::warn!(
                %lane,
                "a lane does not answer: its files wait until it does; new files go to other lanes, except those that \
                 the lane map assigns to it"
            );
        }
    }

    /// Returns the number of free bytes in the lane's file system.
    pub(crate) fn free_bytes(&self) -> Result<u64> {
        let statfs = self.call(CallKind::Name, Volume::statfs)?;
        Ok(statfs.blocks_available.saturating_mul(statfs.block_size))
    }

    /// Checks after a successful write whether a lane that was full accepts new files again: it must have
    /// `min_free_bytes` free bytes.
    pub(crate) fn check_space_after_write(&self, min_free_bytes: u64) {
        let health = &self.health;
        if health.state() != LaneState::Full {
            return;
        }
        // Under a quota, only a trial shows whether there is space. The creation of the next file makes this trial.
        if health.is_over_quota() || !health.is_space_check_due() {
            return;
        }
        let has_space = self
            .free_bytes()
            .is_ok_and(|free_bytes| free_bytes >= min_free_bytes);
        // The check may have found that the lane is gone.
        if has_space && health.state() == LaneState::Full {
            health.set_state(LaneState::Ok);
        }
    }
}
