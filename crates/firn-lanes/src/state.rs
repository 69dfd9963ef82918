//! What a mount has seen of a lane: what went to it, and whether it takes more.
//!
//! The state is advice: a lane that is full or gone is asked again by each call that needs it, and by a new file that
//! may not go elsewhere. It is in the log once, so that a lane that comes and goes does not fill it.
//!
//! A lane that hangs says nothing. So the calls that are under way are known, and since when: a status that is asked for
//! looks at that and at nothing that could hang.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use firn_backing::lock::Mutex;
use firn_backing::{Backing, Errno, Result, Volume};
use firn_format::quote::quoted;

use crate::Lane;

/// Whether a lane takes files and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LaneState {
    /// As far as is known.
    #[default]
    Ok,
    /// A write or a creation found no room, and none was found since.
    Full,
    /// The last call did not find a directory that answers as it should.
    Gone,
    /// A call of it does not return.
    Hung,
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

/// Kind of a call to a lane, by the time that it may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// It makes, removes or looks up a name, or asks for attributes.
    Name,
    /// It moves bytes.
    Data,
    /// It makes durable what may be many gigabytes.
    Sync,
}

impl Call {
    /// A call that takes longer counts as hanging.
    fn hangs_after(self) -> Duration {
        match self {
            Self::Name => Duration::from_secs(2),
            Self::Data => Duration::from_secs(10),
            Self::Sync => Duration::from_secs(60),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Progress {
    files: AtomicU64,
    bytes: AtomicU64,
    /// A [`LaneState`] that calls told, as its place in [`STATES`].
    state: AtomicU8,
    is_over_quota: AtomicBool,
    is_full_logged: AtomicBool,
    is_gone_logged: AtomicBool,
    is_hung_logged: AtomicBool,
    calls: Mutex<Calls>,
    /// When a write to a lane without room looked for room last.
    looked_for_room: Mutex<Option<Instant>>,
}

/// The calls of a lane that are under way, by the order of their begin.
#[derive(Debug, Default)]
struct Calls {
    last_number: u64,
    under_way: BTreeMap<u64, (Call, Instant)>,
}

/// The states that a call that returns can tell.
const STATES: [LaneState; 3] = [LaneState::Ok, LaneState::Full, LaneState::Gone];
/// A lane without room that takes bytes again is asked for its room this often.
const LOOK_FOR_ROOM_EVERY: Duration = Duration::from_secs(1);

impl Progress {
    pub(crate) fn count_file(&self) {
        self.files.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// What calls that returned told.
    pub(crate) fn state(&self) -> LaneState {
        STATES[usize::from(self.state.load(Ordering::Relaxed))]
    }

    pub(crate) fn set_state(&self, state: LaneState) {
        debug_assert!(STATES.contains(&state));
        self.state.store(state as u8, Ordering::Relaxed);
    }

    /// Whether the lane is full by a quota, of which its file system may not tell.
    pub(crate) fn is_over_quota(&self) -> bool {
        self.is_over_quota.load(Ordering::Relaxed)
    }

    fn hangs(&self, of_interest: impl Fn(Call) -> bool) -> bool {
        let calls = self.calls.lock();
        let mut under_way = calls.under_way.values();
        under_way.any(|(call, since)| of_interest(*call) && since.elapsed() >= call.hangs_after())
    }

    fn begin_call(&self, call: Call) -> CallUnderWay<'_> {
        let mut calls = self.calls.lock();
        calls.last_number += 1;
        let number = calls.last_number;
        calls.under_way.insert(number, (call, Instant::now()));
        CallUnderWay {
            progress: self,
            number,
        }
    }

    fn figures(&self) -> LaneFigures {
        let hangs = self.hangs(|_| true);
        LaneFigures {
            files: self.files.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            state: if hangs { LaneState::Hung } else { self.state() },
        }
    }

    /// Whether this is the first time that the lane is in this state.
    fn is_news(&self, state: LaneState) -> bool {
        let logged = match state {
            LaneState::Ok => return false,
            LaneState::Full => &self.is_full_logged,
            LaneState::Gone => &self.is_gone_logged,
            LaneState::Hung => &self.is_hung_logged,
        };
        !logged.swap(true, Ordering::Relaxed)
    }

    /// Whether it is time to look for room, which the caller then does.
    fn may_look_for_room(&self) -> bool {
        let mut looked = self.looked_for_room.lock();
        let is_recent = looked.is_some_and(|at| at.elapsed() < LOOK_FOR_ROOM_EVERY);
        if !is_recent {
            *looked = Some(Instant::now());
        }
        !is_recent
    }
}

/// A call that has begun; it has ended when this is dropped.
struct CallUnderWay<'a> {
    progress: &'a Progress,
    number: u64,
}

impl Drop for CallUnderWay<'_> {
    fn drop(&mut self) {
        self.progress.calls.lock().under_way.remove(&self.number);
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
    /// Bytes and files since the mount, and whether the lane takes more.
    pub fn figures(&self) -> LaneFigures {
        self.progress.figures()
    }

    /// Whether a call that makes or removes a name, or asks for one, does not return.
    pub(crate) fn names_hang(&self) -> bool {
        self.progress.hangs(|call| call == Call::Name)
    }

    /// Makes a call of the lane's directory, and notes what it tells of the lane.
    pub(crate) fn call<T>(&self, kind: Call, make: impl FnOnce(&B) -> Result<T>) -> Result<T> {
        let under_way = self.progress.begin_call(kind);
        let done = make(&self.backing);
        drop(under_way);
        self.note(done)
    }

    /// Notes what a call of the lane tells of it.
    fn note<T>(&self, done: Result<T>) -> Result<T> {
        match &done {
            // A full lane still answers: only room that is found shows that it takes more.
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
        if state == LaneState::Full {
            let is_quota = error == Errno::DQUOT;
            self.progress
                .is_over_quota
                .store(is_quota, Ordering::Relaxed);
        }
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

    /// A new file went elsewhere because the lane did not answer.
    pub(crate) fn note_hang(&self) {
        if self.progress.is_news(LaneState::Hung) {
            let lane = quoted(self.path.as_bytes());
            tracing::warn!(%lane, "a lane does not answer: its files wait until it does; new files go elsewhere where no line of the lane map says otherwise");
        }
    }

    /// Bytes that the lane's file system has for files.
    pub(crate) fn find_room(&self) -> Result<u64> {
        let room = self.call(Call::Name, Volume::statfs)?;
        Ok(room.blocks_available.saturating_mul(room.block_size))
    }

    /// A write to the lane succeeded. If the lane had no room, it has now if there are `usual` bytes.
    pub(crate) fn note_written(&self, usual: u64) {
        let progress = &self.progress;
        let is_full = progress.state() == LaneState::Full;
        // What a quota leaves is known only by trying, when there is a new file.
        if is_full && !progress.is_over_quota() && progress.may_look_for_room() {
            let room = self.find_room();
            if room.is_ok_and(|room| room >= usual) && progress.state() == LaneState::Full {
                progress.set_state(LaneState::Ok);
            }
        }
    }
}
