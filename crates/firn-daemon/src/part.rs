//! The parts of a mount: all that a mount has besides the engine, as a list. A part that a mount does not need is not
//! in the list, and no code asks for it.
//!
//! ```text
//!   locks, with the lease · tokens · arena · lanes · IO threads      Attached: also `firn recover` has them
//!   lanes of a steered backing · other hosts                         Attached: a mount alone, before the arena
//!   what beats of the lease say · traffic · record of the run            assembly: a mount alone
//!   locks of files · logs · last drain
//!   kernel's requests or stub names · data socket · control socket
//!   last drain · partner · transactions · other participants · backup · arena's memory
//! ```
//!
//! Promises
//! * Parts start from the first to the last and stop from the last to the first, so a part may rely on those before it.
//! * The part that excludes other processes from the backing is the first one, so it stops last.
//! * A call that may wait for the backing at the end of a mount goes through [`Stop::ask_backing`], so a forced unmount
//!   does not hang.

use std::sync::Arc;

use firn_engine::Engine;
use firn_log::Left;
use firn_protocol::{HeldPolicy, Reply, Request, Status};

use crate::control::ControlClient;
use crate::error::MountError;
use crate::patience::with_patience;
use crate::store::Store;

/// A request that is offered to each part in turn.
pub(crate) struct Question<'a> {
    pub(crate) engine: &'a Arc<Engine<Store>>,
    pub(crate) request: &'a Request,
    /// The client that sent the request.
    pub(crate) client: &'a mut ControlClient,
    /// Sends progress before the reply; returns false once the client is gone.
    pub(crate) say: &'a mut dyn FnMut(Reply) -> bool,
}

/// A part of a mount besides the engine. Each function does nothing unless a part defines it.
pub(crate) trait Part: Send + Sync {
    /// Starts the part; `parts` has all parts of the mount.
    fn start(&self, _parts: &Parts) -> Result<(), MountError> {
        Ok(())
    }

    /// Does or starts the work that is due. The main loop calls this about once a second, so it must not wait for the
    /// backing.
    fn run_due(&self) {}

    /// Fills in the part's figures of the status. It runs after the engine and the parts before it, and may use or
    /// replace their figures.
    ///
    /// It must take no lock that is held during a call of the backing. It may run before [`start`](Self::start),
    /// because the control socket answers while later parts start.
    fn show(&self, _status: &mut Status) {}

    /// Returns an error if the mount cannot serve this request now.
    fn refuse(&self, _request: &Request) -> Option<Reply> {
        None
    }

    /// Answers a request that concerns this part; `None` for all others. The engine answers what no part answers.
    fn answer(&self, _question: &mut Question<'_>) -> Option<Reply> {
        None
    }

    /// Returns whether the end of a connection of the control socket would end something of this part.
    fn is_held_for(&self, _client: &ControlClient) -> bool {
        false
    }

    /// Returns why the mount must not end now, if there is a reason.
    fn find_obstacle(&self) -> Option<String> {
        None
    }

    /// Prepares for the end, before data is drained and programs lose the mount.
    fn prepare_end(&self) {}

    /// Stops the part and releases what it holds. The part may not have been started.
    fn stop(&self, _stop: &mut Stop) {}
}

/// The parts of a mount, in the order in which they start.
#[derive(Clone)]
pub(crate) struct Parts(Arc<[Arc<dyn Part>]>);

impl Parts {
    pub(crate) fn new(list: Vec<Arc<dyn Part>>) -> Self {
        Self(list.into())
    }

    pub(crate) fn start(&self) -> Result<(), MountError> {
        self.0.iter().try_for_each(|part| part.start(self))
    }

    pub(crate) fn run_due(&self) {
        self.0.iter().for_each(|part| part.run_due());
    }

    pub(crate) fn show(&self, status: &mut Status) {
        self.0.iter().for_each(|part| part.show(status));
    }

    pub(crate) fn refuse(&self, request: &Request) -> Option<Reply> {
        self.0.iter().find_map(|part| part.refuse(request))
    }

    pub(crate) fn answer(&self, question: &mut Question<'_>) -> Option<Reply> {
        self.0.iter().find_map(|part| part.answer(question))
    }

    pub(crate) fn is_held_for(&self, client: &ControlClient) -> bool {
        self.0.iter().any(|part| part.is_held_for(client))
    }

    pub(crate) fn find_obstacle(&self) -> Option<String> {
        self.0.iter().find_map(|part| part.find_obstacle())
    }

    pub(crate) fn prepare_end(&self) {
        self.0.iter().for_each(|part| part.prepare_end());
    }

    pub(crate) fn stop(&self, stop: &mut Stop) {
        self.0.iter().rev().for_each(|part| part.stop(stop));
    }
}

/// What happens to an arena at the end of its firnd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArenaEnd {
    /// The arena stays, even if it is empty.
    Keep,
    /// The arena is removed if it is empty.
    RemoveIfEmpty,
    /// The arena is removed with all that it holds.
    Discard,
}

/// How a mount ends, and what its parts report while they stop.
pub(crate) struct Stop {
    /// What happens to the data that the arena holds.
    pub(crate) held: HeldPolicy,
    pub(crate) arena: ArenaEnd,
    /// The end does not wait for a backing that does not answer.
    pub(crate) force: bool,
    /// No program has seen the mount, so all data that was found stays for the next mount.
    pub(crate) is_unseen: bool,
    /// The backing did not answer, so no more calls are made on it.
    gave_up: bool,
    /// An I/O thread may still be in a call of the backing. Then the locks are kept until the process ends: a late call
    /// could change what the next mount has made.
    pub(crate) is_call_under_way: bool,
    /// Bytes that only the arena has, and that stay in it.
    pub(crate) left_bytes: u64,
    /// The files that stay in logs.
    pub(crate) left_in_logs: Left,
}

impl Stop {
    /// Returns the end of a mount that programs have seen.
    pub(crate) fn new(held: HeldPolicy, arena: ArenaEnd, force: bool, gave_up: bool) -> Self {
        Self {
            held,
            arena,
            force,
            is_unseen: false,
            gave_up,
            is_call_under_way: false,
            left_bytes: 0,
            left_in_logs: Left::default(),
        }
    }

    /// Returns the end of a mount that no program has seen; nothing is drained.
    pub(crate) fn unseen(arena: ArenaEnd) -> Self {
        Self {
            is_unseen: true,
            ..Self::new(HeldPolicy::Keep, arena, false, false)
        }
    }

    /// Runs `work`, which may wait for the backing, unless the backing did not answer before. In that case `work` is
    /// leaked, because the threads that its drop would wait for may be in a call that does not return.
    pub(crate) fn ask_backing(&mut self, work: impl FnOnce() + Send + 'static) {
        if self.gave_up {
            std::mem::forget(work);
            return;
        }
        self.gave_up = !with_patience(self.force, work);
    }

    /// Returns whether the end drains the data that the arena holds.
    pub(crate) fn drains(&self) -> bool {
        self.held == HeldPolicy::Drain && !self.gave_up
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    type Log = Arc<Mutex<Vec<String>>>;

    struct Noting {
        name: &'static str,
        log: Log,
        /// How it refuses to start.
        fails: bool,
    }

    impl Noting {
        fn note(&self, what: &str) {
            self.log.lock().push(format!("{what} {}", self.name));
        }
    }

    impl Part for Noting {
        fn start(&self, _: &Parts) -> Result<(), MountError> {
            self.note("start");
            if self.fails {
                let error = std::io::Error::other("on purpose");
                return Err(MountError::io("start a part")(error));
            }
            Ok(())
        }

        fn stop(&self, _: &mut Stop) {
            self.note("stop");
        }
    }

    fn parts(log: &Log, fails: bool) -> Parts {
        let names = [("locks", false), ("drain", fails), ("socket", false)];
        let part = |(name, fails)| -> Arc<dyn Part> {
            let log = Arc::clone(log);
            Arc::new(Noting { name, log, fails })
        };
        Parts::new(names.into_iter().map(part).collect())
    }

    #[test]
    fn parts_stop_in_the_reverse_of_the_order_in_which_they_start() {
        let log = Log::default();
        let parts = parts(&log, false);
        parts.start().expect("start");
        parts.stop(&mut Stop::unseen(ArenaEnd::Keep));
        let noted = "start locks, start drain, start socket, stop socket, stop drain, stop locks";
        assert_eq!(log.lock().join(", "), noted);
    }

    #[test]
    fn a_part_that_does_not_start_keeps_those_behind_it_from_starting() {
        let log = Log::default();
        assert!(parts(&log, true).start().is_err());
        assert_eq!(log.lock().join(", "), "start locks, start drain");
    }

    #[test]
    fn a_backing_that_did_not_answer_is_asked_nothing_more_and_drops_nothing() {
        let witness = Arc::new(());
        let taken = Arc::clone(&witness);
        let mut stop = Stop::new(HeldPolicy::Drain, ArenaEnd::RemoveIfEmpty, true, true);
        stop.ask_backing(move || {
            let _taken = taken;
            panic!("asked");
        });
        assert!(!stop.drains());
        // A thread that hangs in a call may still use it.
        assert_eq!(Arc::strong_count(&witness), 2);
    }
}
