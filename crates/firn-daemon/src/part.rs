//! The list of parts that make up one mount beside its engine, and the order in which they start and stop.
//!
//! A *part* is one feature or resource of a mount, such as the locks, the I/O threads, the logs or the control socket.
//! Each part is a [`Part`] in [`crate::parts`]. A mount that does not need a feature has no part for it, so no other
//! code asks whether the feature is on.
//!
//! The order of the list, which `attach` and `assembly` build:
//!
//! ```text
//!   part                                                         is present in
//!   HeldLocks (of the backing, with the host's lease)            mount, `firn recover`
//!   HeldValue (the source of tokens)                             mount, `firn recover`, if the options ask for it
//!   SteeredLanes, Peers (compares this mount with other hosts)   mount, if the options ask for it
//!   ArenaFile, PlacedLanes, IoThreads                            mount, `firn recover`
//!   Takeover, HostReports, Traffic, Record (of the run)          mount
//!   LocksOfFiles, ReadLogs or WrittenLogs                        mount, if the options ask for it
//!   LastDrain, after the sockets                                 mount
//!   FuseRequests or StubNames (of the frontend)                  mount
//!   DataClients (data socket), ControlSocket                     mount
//!   LastDrain, before the sockets                                mount
//!   PartnerCopies, Transactions, Participation, BackupRounds     mount, if the options ask for it
//!   ArenaMemory (allocates it)                                   mount, if the options ask for it
//! ```
//!
//! The *arena* is shared memory with the bytes that are not in the backing yet; a *drain* copies them there. A *lane*
//! is one I/O server, and a *token* is the lock that lets one host at a time write there. A *steered* backing is told
//! on which server to put each new file.
//!
//! At the end, the drain before the sockets runs while they still answer. After the sockets have stopped, the other
//! drain copies what programs with direct access to the arena have written since.
//!
//! Promises
//! * Parts start from the first to the last and stop from the last to the first, so a part may rely on all parts before
//!   it.
//! * The first part excludes other processes from the backing, so other processes get in only after all other parts
//!   have stopped.
//! * A part that stops calls the backing through [`StopContext::run_backing_work`], so a forced unmount does not wait
//!   for a backing that does not answer.

use std::sync::Arc;

use firn_engine::Engine;
use firn_log::UnflattenedFiles;
use firn_protocol::{HeldPolicy, Reply, Request, Status};

use crate::control::ControlClient;
use crate::end_timeout::run_with_end_timeout;
use crate::error::MountError;
use crate::store::Store;

/// A request of a client, as [`Parts::answer`] offers it to each part in turn.
pub(crate) struct ClientRequest<'a> {
    /// The engine of the mount.
    pub(crate) engine: &'a Arc<Engine<Store>>,
    pub(crate) request: &'a Request,
    /// The connection that sent the request, with the state that the mount holds for it.
    pub(crate) client: &'a mut ControlClient,
    /// Sends progress before the reply; returns false once the client is gone.
    pub(crate) send_progress: &'a mut dyn FnMut(Reply) -> bool,
}

/// One feature or resource of a mount beside the engine. Each function does nothing unless the part defines it.
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
    /// The function must not take a lock that is held during a call of the backing, because a status must not hang. It
    /// may run before [`start`](Self::start), because the control socket answers while later parts start.
    fn fill_status(&self, _status: &mut Status) {}

    /// Returns the reply that refuses a request which the mount cannot serve now; `None` if this part does not refuse
    /// it. All parts are asked before one of them answers.
    fn refuse(&self, _request: &Request) -> Option<Reply> {
        None
    }

    /// Returns the final reply to a request that concerns this part; `None` for all others. The engine answers what no
    /// part answers.
    fn answer(&self, _client_request: &mut ClientRequest<'_>) -> Option<Reply> {
        None
    }

    /// Returns whether this part holds something for a connection of the control socket, such as a transaction that
    /// ends with the connection. Such a connection is not closed to make room for another one.
    fn holds_state_of(&self, _client: &ControlClient) -> bool {
        false
    }

    /// Returns why an unmount without `--force` must be refused now; `None` if this part has no reason.
    fn find_obstacle(&self) -> Option<String> {
        None
    }

    /// Prepares for the end of the mount. It runs before data is drained and before programs lose the mount, and the
    /// mount goes on if the drain then fails.
    fn prepare_end(&self) {}

    /// Stops the part and releases its resources. It also runs for a part that was never started, because an earlier
    /// part failed to start.
    fn stop(&self, _context: &mut StopContext) {}
}

/// The parts of a mount, in the order in which they start.
#[derive(Clone)]
pub(crate) struct Parts(Arc<[Arc<dyn Part>]>);

impl Parts {
    pub(crate) fn new(list: Vec<Arc<dyn Part>>) -> Self {
        Self(list.into())
    }

    /// Starts each part. After the first failure no further part is started, and the caller must stop all parts.
    pub(crate) fn start(&self) -> Result<(), MountError> {
        self.0.iter().try_for_each(|part| part.start(self))
    }

    pub(crate) fn run_due(&self) {
        self.0.iter().for_each(|part| part.run_due());
    }

    pub(crate) fn fill_status(&self, status: &mut Status) {
        self.0.iter().for_each(|part| part.fill_status(status));
    }

    /// Returns the refusal of the first part that cannot serve the request now.
    pub(crate) fn refuse(&self, request: &Request) -> Option<Reply> {
        self.0.iter().find_map(|part| part.refuse(request))
    }

    /// Returns the answer of the first part that handles the request; `None` if the engine must answer it.
    pub(crate) fn answer(&self, client_request: &mut ClientRequest<'_>) -> Option<Reply> {
        self.0.iter().find_map(|part| part.answer(client_request))
    }

    pub(crate) fn holds_state_of(&self, client: &ControlClient) -> bool {
        self.0.iter().any(|part| part.holds_state_of(client))
    }

    pub(crate) fn find_obstacle(&self) -> Option<String> {
        self.0.iter().find_map(|part| part.find_obstacle())
    }

    pub(crate) fn prepare_end(&self) {
        self.0.iter().for_each(|part| part.prepare_end());
    }

    /// Stops the parts from the last to the first.
    pub(crate) fn stop(&self, context: &mut StopContext) {
        self.0.iter().rev().for_each(|part| part.stop(context));
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

/// How a mount ends, and what the parts have reported while they stopped. It passes from part to part.
pub(crate) struct StopContext {
    /// What happens to the data that only the arena has.
    pub(crate) held_policy: HeldPolicy,
    /// What happens to the arena's file.
    pub(crate) arena_end: ArenaEnd,
    /// The unmount is forced: it does not wait for a backing that does not answer.
    pub(crate) is_forced: bool,
    /// The mount failed before a program could see it, so the data of an earlier firnd stays for the next mount.
    pub(crate) was_never_visible: bool,
    /// The backing did not answer in time, so no more calls are made on it.
    has_given_up_backing: bool,
    /// Reported by the I/O threads: one of them may still be in a call of the backing. The locks are then kept until
    /// the process ends, because a late call could change files of the next mount.
    pub(crate) has_backing_call_in_progress: bool,
    /// Reported by the arena's file: bytes that only the arena has and that remain in it.
    pub(crate) remaining_bytes: u64,
    /// Reported by the logs: the files that stay in logs.
    pub(crate) remaining_in_logs: UnflattenedFiles,
}

impl StopContext {
    /// Returns the context that each part gets when the mount stops, for a mount that programs have seen. The parts
    /// report in it: backing calls in progress, remaining bytes, and files that remain in logs.
    pub(crate) fn new(
        held_policy: HeldPolicy,
        arena_end: ArenaEnd,
        is_forced: bool,
        has_given_up_backing: bool,
    ) -> Self {
        Self {
            held_policy,
            arena_end,
            is_forced,
            was_never_visible: false,
            has_given_up_backing,
            has_backing_call_in_progress: false,
            remaining_bytes: 0,
            remaining_in_logs: UnflattenedFiles::default(),
        }
    }

    /// Returns the end of a mount that no program has seen; nothing is drained.
    pub(crate) fn unseen(arena_end: ArenaEnd) -> Self {
        Self {
            was_never_visible: true,
            ..Self::new(HeldPolicy::Keep, arena_end, false, false)
        }
    }

    /// Runs `work`, which may wait for the backing. After a call that was not answered in time, later work is not run.
    ///
    /// Work that is not run is leaked: its drop could wait for threads that are in a call which never returns.
    pub(crate) fn run_backing_work(&mut self, work: impl FnOnce() + Send + 'static) {
        if self.has_given_up_backing {
            std::mem::forget(work);
            return;
        }
        self.has_given_up_backing = !run_with_end_timeout(self.is_forced, work);
    }

    /// Returns whether the end drains the data that only the arena has.
    pub(crate) fn drains_held_data(&self) -> bool {
        self.held_policy == HeldPolicy::Drain && !self.has_given_up_backing
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    type Log = Arc<Mutex<Vec<String>>>;

    /// A part that logs its start and stop.
    struct LoggingPart {
        name: &'static str,
        log: Log,
        /// The start returns an error.
        fails: bool,
    }

    impl LoggingPart {
        fn log_step(&self, step: &str) {
            self.log.lock().push(format!("{step} {}", self.name));
        }
    }

    impl Part for LoggingPart {
        fn start(&self, _: &Parts) -> Result<(), MountError> {
            self.log_step("start");
            if self.fails {
                let error = std::io::Error::other("on purpose");
                return Err(MountError::io("start a part")(error));
            }
            Ok(())
        }

        fn stop(&self, _: &mut StopContext) {
            self.log_step("stop");
        }
    }

    /// Returns three parts, of which the one named `failing` does not start.
    fn parts(log: &Log, failing: Option<&str>) -> Parts {
        let part = |name| -> Arc<dyn Part> {
            Arc::new(LoggingPart {
                name,
                log: Arc::clone(log),
                fails: failing == Some(name),
            })
        };
        Parts::new(["locks", "drain", "socket"].map(part).into())
    }

    #[test]
    fn parts_stop_in_the_reverse_of_the_order_in_which_they_start() {
        let log = Log::default();
        let parts = parts(&log, None);
        parts.start().expect("start");
        parts.stop(&mut StopContext::unseen(ArenaEnd::Keep));
        let noted = "start locks, start drain, start socket, stop socket, stop drain, stop locks";
        assert_eq!(log.lock().join(", "), noted);
    }

    #[test]
    fn a_part_that_does_not_start_keeps_later_parts_from_starting() {
        let log = Log::default();
        assert!(parts(&log, Some("drain")).start().is_err());
        assert_eq!(log.lock().join(", "), "start locks, start drain");
    }

    #[test]
    fn a_backing_that_did_not_answer_is_asked_nothing_more_and_drops_nothing() {
        let witness = Arc::new(());
        let used_by_work = Arc::clone(&witness);
        let mut stop = StopContext::new(HeldPolicy::Drain, ArenaEnd::RemoveIfEmpty, true, true);
        stop.run_backing_work(move || {
            let _used_by_work = used_by_work;
            panic!("asked");
        });
        assert!(!stop.drains_held_data());
        // A thread that hangs in a call may still use it.
        assert_eq!(Arc::strong_count(&witness), 2);
    }
}
