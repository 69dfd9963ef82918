//! The thread that takes and releases file locks for programs of this host (`firn-locks`).
//!
//! Terms
//! * The *backing* is the directory, perhaps shared by several hosts, that a mount serves.
//! * *firnd* is the process that serves the mount. If it dies, the next firnd continues the mount.
//! * A *lock file* is a file in `.firn/locks/` whose byte locks stand for the locks of another file.
//! * A request is *queued* if it has locked the bytes of the queue for its range, at [`QUEUE_OFFSET`] in the lock file.
//! * Locks *reach* another host if this host sees the lock of that host's `host-NAME` file.
//!
//! A request for a lock is tried at once and then again with growing pauses, until it is granted, fails or is
//! interrupted. So the thread never blocks in a lock call.
//!
//! With a [`LockKeeping`], locks outlive firnd. A lock is recorded after the backing has granted it and before its
//! program gets the answer. A release changes the record before it releases the lock in the backing. The next firnd
//! therefore keeps the recorded locks, and releases everything else in the kept lock files.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::{Backing, DescriptorUse, Errno, LockMode, LockRange, LockRequest};

use super::table::{HeldLock, Table};
use super::{
    ConflictingLock, KeptLockFile, KeptLocks, LockFileKey, LockKeeping, LockKind, LockSetup,
    OnConflict, OtherHosts, Owner, ReleasedLocks, ResultCallback, Shared, TestCallback, WantedLock,
};
use crate::own;

/// Offset of the queue: a program that waits for byte *n* has byte *n* + `QUEUE_OFFSET` of the lock file locked.
const QUEUE_OFFSET: u64 = 1 << 62;
/// How long a host that comes later lets queued hosts go first.
pub(super) const YIELD_TIME_MAX: Duration = Duration::from_millis(250);
/// First pause before a lock of another host is tried again. The pause doubles each time, up to `RETRY_PAUSE_MAX`.
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(1);
const RETRY_PAUSE_MAX: Duration = Duration::from_millis(50);
/// Maximum pause between two attempts of a request that has a place in the queue.
const QUEUED_RETRY_PAUSE_MAX: Duration = Duration::from_millis(8);
/// A lock file that was unused for this long is removed.
const UNUSED_TIME_MAX: Duration = Duration::from_secs(2);
/// How long the result of a check counts that found all other hosts reached.
const REACH_VALID_FOR: Duration = Duration::from_secs(1);
/// How long a host may be unreached before locks are refused. A new host has its lease a moment before it has locked
/// its `host-NAME` file.
const UNREACHED_TIMEOUT: Duration = Duration::from_secs(3);
/// How long an earlier firnd's lock of a file's end is retained for its append. The program may repeat the append
/// meanwhile.
const REPEATED_APPEND_TIMEOUT: Duration = Duration::from_secs(60);
/// How long this firnd retries to restore the locks of a file after an error of the backing.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(30);
/// How many times a request may find that its lock file was removed. After that the request fails.
const REOPEN_TRIES_MAX: usize = 100;

/// A request to the lock thread.
pub(super) enum Job {
    Acquire {
        /// Number of the request's ticket.
        number: u64,
        wanted: WantedLock,
        on_conflict: OnConflict,
    },
    Release {
        key: LockFileKey,
        locks: ReleasedLocks,
        done: ResultCallback,
    },
    Test {
        wanted: WantedLock,
        done: TestCallback,
    },
}

/// A request for a lock, tried until it is granted.
struct WaitingRequest {
    /// Number of the request's ticket.
    number: u64,
    wanted: WantedLock,
    on_conflict: OnConflict,
    /// Time at which the request arrived.
    since: Instant,
    next_try: Instant,
    /// Pause after the next failed try.
    pause: Duration,
}

impl WaitingRequest {
    /// Returns whether the request lets earlier queued requests go first. It does so for [`YIELD_TIME_MAX`].
    fn lets_queued_go_first(&self) -> bool {
        self.on_conflict == OnConflict::Wait && self.since.elapsed() < YIELD_TIME_MAX
    }
}

/// A test for a conflicting lock, repeated until the thread knows whether locks reach all hosts.
struct PendingTest {
    wanted: WantedLock,
    done: TestCallback,
    next_try: Instant,
}

/// Result of one try of a request.
enum LockTry {
    Granted,
    /// Another lock conflicts, or an earlier request must go first.
    Busy,
    /// The thread does not know yet whether locks reach all hosts.
    ReachUnknown,
}

/// Result of a test for a conflicting lock.
enum TestResult {
    Free,
    Conflict(ConflictingLock),
    /// The thread does not know yet whether locks reach all hosts.
    ReachUnknown,
}

/// An open lock file.
struct LockFile<B: Backing> {
    file: B::File,
    /// Inode number of the lock file.
    ino: u64,
    /// Locks that programs of this host hold.
    held: Table,
    /// Queue locks of waiting requests. The number of an owner is the number of its request.
    queue: Table,
    last_used: Instant,
    /// The [`LockKeeping`] has a descriptor of the file.
    is_kept: bool,
}

impl<B: Backing> LockFile<B> {
    fn is_unused(&self) -> bool {
        self.held.is_empty() && self.queue.is_empty()
    }
}

/// Results of the checks whether locks reach other hosts.
struct Reach {
    /// Error of locking this host's `host-NAME` file. `None` if the file is locked.
    host_file_error: Option<Errno>,
    other_hosts: OtherHosts,
    /// Time of the last check that found all other hosts reached.
    confirmed_at: Option<Instant>,
    /// Time since when at least one host is not reached.
    unreached_since: Option<Instant>,
}

/// The state of the lock thread.
pub(super) struct LockThread<B: Backing> {
    base: B,
    dir: B::Inode,
    host: String,
    shared: Arc<Shared>,
    /// The open lock files.
    files: HashMap<LockFileKey, LockFile<B>>,
    /// Requests that are not granted yet, in the order of their arrival.
    waiting: Vec<WaitingRequest>,
    pending_tests: Vec<PendingTest>,
    /// This host's `host-NAME` file, locked as long as the host is alive.
    host_file: Option<HostFile<B>>,
    reach: Reach,
    /// Keeps the locks for the next firnd. `None`: they end with this firnd.
    keeping: Option<Box<dyn LockKeeping>>,
    /// Locks of an earlier firnd. Empty after they were restored.
    kept: KeptLocks,
    /// Locks of files' ends that an earlier firnd took for appends, until the programs repeat these appends.
    unclaimed_append_locks: Vec<UnclaimedAppendLock>,
}

/// This host's `host-NAME` file.
struct HostFile<B: Backing> {
    file: B::File,
    ino: u64,
}

/// The lock of a file's end for an append that an earlier firnd began.
struct UnclaimedAppendLock {
    key: LockFileKey,
    owner: u64,
    /// When the lock is released.
    release_at: Instant,
}

impl UnclaimedAppendLock {
    /// Returns whether the lock is the one that a request wants.
    fn is_for(&self, wanted: &WantedLock) -> bool {
        self.key == wanted.key() && self.owner == wanted.owner.number
    }
}

impl<B: Backing> LockThread<B> {
    /// Creates the state of the lock thread; nothing is locked yet. [`Self::run`] first restores the locks in
    /// `setup.kept`, which an earlier firnd held.
    pub(super) fn new(setup: LockSetup<B>, shared: Arc<Shared>) -> Self {
        let LockSetup {
            base,
            dir,
            host,
            other_hosts,
            keeping,
            kept,
        } = setup;
        Self {
            base,
            dir,
            host,
            shared,
            files: HashMap::new(),
            waiting: Vec::new(),
            pending_tests: Vec::new(),
            host_file: None,
            reach: Reach {
                host_file_error: None,
                other_hosts,
                confirmed_at: None,
                unreached_since: None,
            },
            keeping,
            kept,
            unclaimed_append_locks: Vec::new(),
        }
    }

    /// Serves requests until the mount ends.
    pub(super) fn run(&mut self) {
        self.restore();
        self.lock_host_file();
        self.remove_lock_files_of_dead_hosts();
        while let Some(jobs) = self.next_jobs() {
            for job in jobs {
                self.begin_job(job);
            }
            self.try_waiting();
            self.repeat_tests();
            self.release_unclaimed_append_locks();
            self.remove_unused(UNUSED_TIME_MAX);
        }
        self.stop();
    }

    /// Waits until there is a request, a retry is due or the thread must end. Returns the new requests, perhaps none.
    /// Returns `None` when the thread must end and all requests were taken.
    fn next_jobs(&self) -> Option<Vec<Job>> {
        let mut state = self.shared.state.lock();
        if state.jobs.is_empty() && !state.is_stopping {
            match self.next_wake_time() {
                None => state.wait(&self.shared.changed),
                Some(wake_time) => {
                    let pause = wake_time.saturating_duration_since(Instant::now());
                    if !pause.is_zero() {
                        state.wait_for(&self.shared.changed, pause);
                    }
                }
            }
        }
        if state.is_stopping && state.jobs.is_empty() {
            return None;
        }
        Some(std::mem::take(&mut state.jobs))
    }

    /// Returns when the thread has something to do without a new request, or `None` if it has nothing to do.
    fn next_wake_time(&self) -> Option<Instant> {
        let request_tries = self.waiting.iter().map(|request| request.next_try);
        let test_tries = self.pending_tests.iter().map(|test| test.next_try);
        let removals = self
            .files
            .values()
            .filter(|lock| lock.is_unused())
            .map(|lock| lock.last_used + UNUSED_TIME_MAX);
        let releases = self
            .unclaimed_append_locks
            .iter()
            .map(|lock| lock.release_at);
        request_tries
            .chain(test_tries)
            .chain(removals)
            .chain(releases)
            .min()
    }

    /// Begins a new request. A release or a test is done at once, if possible; a lock is tried later, with the waiting
    /// requests.
    fn begin_job(&mut self, job: Job) {
        match job {
            Job::Acquire {
                number,
                wanted,
                on_conflict,
            } => {
                let now = Instant::now();
                self.waiting.push(WaitingRequest {
                    number,
                    wanted,
                    on_conflict,
                    since: now,
                    next_try: now,
                    pause: RETRY_PAUSE_MIN,
                });
            }
            Job::Release { key, locks, done } => {
                let result = self.release(key, locks);
                // Requests that wait for this file are tried at once, because the release may have made room for them.
                let now = Instant::now();
                for request in &mut self.waiting {
                    if request.wanted.file == key.file {
                        request.next_try = now;
                    }
                }
                done(result);
            }
            Job::Test { wanted, done } => self.answer_test(wanted, done),
        }
    }

    /// Answers a test. If the thread does not know yet whether locks reach all hosts, the test is kept and repeated.
    fn answer_test(&mut self, wanted: WantedLock, done: TestCallback) {
        match self.test(wanted) {
            Ok(TestResult::Free) => done(Ok(None)),
            Ok(TestResult::Conflict(conflicting_lock)) => done(Ok(Some(conflicting_lock))),
            Ok(TestResult::ReachUnknown) => self.pending_tests.push(PendingTest {
                wanted,
                done,
                next_try: Instant::now() + RETRY_PAUSE_MAX,
            }),
            Err(errno) => done(Err(errno)),
        }
    }

    /// Repeats the pending tests that are due.
    fn repeat_tests(&mut self) {
        let now = Instant::now();
        let is_due = |test: &mut PendingTest| test.next_try <= now;
        let due: Vec<_> = self.pending_tests.extract_if(.., is_due).collect();
        for test in due {
            self.answer_test(test.wanted, test.done);
        }
    }

    /// Tries the waiting requests that are due, in the order of their arrival, and answers those that are granted or
    /// fail. A request that its program has interrupted is dropped without an answer.
    fn try_waiting(&mut self) {
        let mut index = 0;
        while index < self.waiting.len() {
            if !self.shared.is_waiting(self.waiting[index].number) {
                let interrupted = self.waiting.remove(index);
                self.drop_request(&interrupted);
                continue;
            }
            if self.waiting[index].next_try > Instant::now() {
                index += 1;
                continue;
            }
            let request = self.waiting.remove(index);
            let result = if self.is_behind_earlier_request(&request, index) {
                Ok(LockTry::Busy)
            } else {
                self.try_request(&request)
            };
            match result {
                Ok(LockTry::Granted) => {
                    // A repeated append has claimed the lock that an earlier firnd took for it. The lock is no longer
                    // released after a time.
                    self.unclaimed_append_locks
                        .retain(|lock| !lock.is_for(&request.wanted));
                    self.leave_queue(&request);
                    self.grant(&request);
                }
                Ok(LockTry::Busy) if request.on_conflict == OnConflict::Fail => {
                    self.shared.answer(request.number, Err(Errno::AGAIN));
                }
                Ok(LockTry::Busy | LockTry::ReachUnknown) => {
                    let request = self.postpone(request);
                    self.waiting.insert(index, request);
                    index += 1;
                }
                Err(errno) => {
                    self.drop_request(&request);
                    self.shared.answer(request.number, Err(errno));
                }
            }
        }
    }

    /// Returns a request with the time of its next try. The pause is twice as long each time, up to a maximum.
    fn postpone(&self, request: WaitingRequest) -> WaitingRequest {
        let pause_max = if self.is_queued(&request) {
            QUEUED_RETRY_PAUSE_MAX
        } else {
            RETRY_PAUSE_MAX
        };
        WaitingRequest {
            next_try: Instant::now() + request.pause,
            pause: (request.pause * 2).min(pause_max),
            ..request
        }
    }

    /// Drops a request that is interrupted or has failed. If it is for an append for which an earlier firnd had locked
    /// the file's end, that lock is released.
    fn drop_request(&mut self, request: &WaitingRequest) {
        self.leave_queue(request);
        let wanted = &request.wanted;
        if wanted.kind == LockKind::End {
            self.release_or_warn(wanted.key(), ReleasedLocks::Owner(wanted.owner.number));
        }
    }

    /// Returns whether an earlier request of this host waits for some of the same bytes and must go first. `index` is
    /// the place of the request in the order of arrival.
    fn is_behind_earlier_request(&self, request: &WaitingRequest, index: usize) -> bool {
        if !request.lets_queued_go_first() {
            return false;
        }
        let wanted = &request.wanted;
        self.waiting[..index].iter().any(|earlier_request| {
            let earlier = &earlier_request.wanted;
            let is_one_exclusive =
                earlier.mode == LockMode::Exclusive || wanted.mode == LockMode::Exclusive;
            earlier.key() == wanted.key()
                && is_one_exclusive
                && earlier.range.overlaps(&wanted.range)
        })
    }

    /// Returns whether a request has a place in the queue of its lock file.
    fn is_queued(&self, request: &WaitingRequest) -> bool {
        let Some(lock) = self.files.get(&request.wanted.key()) else {
            return false;
        };
        let owner = owner_in_queue(request.number);
        lock.queue
            .owners()
            .any(|queued_owner| queued_owner == owner)
    }

    /// Answers a request whose lock is granted. If the request was interrupted meanwhile, the lock is released.
    fn grant(&mut self, request: &WaitingRequest) {
        let wanted = &request.wanted;
        let key = wanted.key();
        self.publish_owners(key);
        if !self.shared.answer(request.number, Ok(())) {
            self.release_or_warn(key, ReleasedLocks::Range(wanted.owner.number, wanted.range));
        }
    }

    /// Tries once to get the file lock that a program requests. `Busy` means that another program has a conflicting
    /// lock, and `ReachUnknown` that locks may not be visible to all hosts yet; the caller then tries again later.
    ///
    /// First checks the locks of other programs of this host, then locks the same bytes in a lock file against other
    /// hosts, and then records the lock. Fails with ENOLCK if locks are not possible in this backing, or the lock
    /// cannot be recorded.
    fn try_request(&mut self, request: &WaitingRequest) -> Result<LockTry, Errno> {
        let key = request.wanted.key();
        let WantedLock {
            owner, range, mode, ..
        } = request.wanted;
        for _ in 0..REOPEN_TRIES_MAX {
            self.open(key)?;
            let is_reach_confirmed = self.are_remote_locks_visible()?;
            // Step 1: check the locks of other programs of this host.
            let lock = self.files.get(&key).ok_or(Errno::NOLCK)?;
            if lock.held.conflict(owner.number, range, mode).is_some() {
                return Ok(LockTry::Busy);
            }
            if !is_reach_confirmed {
                return Ok(LockTry::ReachUnknown);
            }
            // Step 2: lock the bytes in the lock file. Another host may have removed that file while this host held no
            // lock in it; locks in a removed file exclude no host.
            let must_check_name = lock.held.is_empty();
            if !self.lock_or_queue(request, key)? {
                return Ok(LockTry::Busy);
            }
            if must_check_name && !self.close_if_unlinked(key)? {
                // The next pass opens the file that has the name now.
                continue;
            }
            // Step 3: record the lock.
            let lock = self.files.get_mut(&key).ok_or(Errno::NOLCK)?;
            lock.held.add(HeldLock { owner, range, mode });
            lock.last_used = Instant::now();
            if !self.record_locks(key) {
                self.release(key, ReleasedLocks::Range(owner.number, range))?;
                return Err(Errno::NOLCK);
            }
            return Ok(LockTry::Granted);
        }
        Err(Errno::NOLCK)
    }

    /// Returns whether a lock file still has its name: another host may have removed it since it was opened. Closes the
    /// file, and so releases its locks, if it has lost its name or the check fails.
    fn close_if_unlinked(&mut self, key: LockFileKey) -> Result<bool, Errno> {
        let is_current = self.is_current(key);
        if is_current != Ok(true) {
            self.close(key);
        }
        is_current
    }

    /// Tries to lock the wanted bytes in the lock file, against other hosts. Returns whether they are locked. The lock
    /// file must be open.
    ///
    /// If they are not locked, a request that waits also takes a place in the queue of hosts: it locks the same bytes
    /// at [`QUEUE_OFFSET`], where other hosts see that it waits.
    fn lock_or_queue(&mut self, request: &WaitingRequest, key: LockFileKey) -> Result<bool, Errno> {
        let WantedLock { range, mode, .. } = request.wanted;
        self.share_descriptor(key);
        let lock = self.files.get_mut(&key).ok_or(Errno::NOLCK)?;
        let lock_call = |lock_request| map_lock_error(self.base.lock(&lock.file, lock_request));
        let bytes = bytes_in_lock_file(range);
        let queue_bytes = queue_bytes_in_lock_file(range);
        // A host that is in the queue for these bytes goes first, for a limited time.
        let may_lock =
            !request.lets_queued_go_first() || lock_call(LockRequest::Test(queue_bytes, mode))?;
        if may_lock && lock_call(LockRequest::Range(bytes, mode))? {
            return Ok(true);
        }
        if request.on_conflict == OnConflict::Wait
            && lock_call(LockRequest::Range(queue_bytes, mode))?
        {
            let queue_lock = HeldLock {
                owner: owner_in_queue(request.number),
                range: queue_bytes,
                mode,
            };
            let conflict = lock
                .queue
                .conflict(queue_lock.owner.number, queue_bytes, mode);
            // The queue lock shows other hosts that any request of this host waits for these bytes. If an earlier
            // request that excludes this one has it already, this request needs no entry of its own.
            if conflict.is_none() {
                lock.queue.add(queue_lock);
            }
        }
        Ok(false)
    }

    /// Gives up the place of a request in the queue, if it has one. A place is a lock of bytes at [`QUEUE_OFFSET`] in
    /// the lock file.
    fn leave_queue(&mut self, request: &WaitingRequest) {
        let key = request.wanted.key();
        let Some(lock) = self.files.get_mut(&key) else {
            return;
        };
        let owner = owner_in_queue(request.number);
        lock.last_used = Instant::now();
        let freed_ranges = lock
            .queue
            .remove(|queued| (queued.owner == owner).then_some(LockRange::WHOLE));
        for range in freed_ranges {
            if let Err(error) = self.base.lock(&lock.file, LockRequest::Unlock(range)) {
                tracing::warn!(%error, ino = key.file, "cannot leave the queue for a file lock");
            }
        }
    }

    /// Releases locks of programs, here and in the backing. Bytes that another lock of this host covers remain locked
    /// in the backing. All locks are released even after an error of the backing; the first error is returned.
    fn release(&mut self, key: LockFileKey, to_release: ReleasedLocks) -> Result<(), Errno> {
        let Some(lock) = self.files.get_mut(&key) else {
            return Ok(());
        };
        let freed_ranges = lock.held.remove(|held| match to_release {
            ReleasedLocks::Range(number, range) => (held.owner.number == number).then_some(range),
            ReleasedLocks::Owner(number) => {
                (held.owner.number == number).then_some(LockRange::WHOLE)
            }
            ReleasedLocks::Handle(handle) => {
                (held.owner.handle == handle).then_some(LockRange::WHOLE)
            }
        });
        lock.last_used = Instant::now();
        // If there is no room for the new record, the old one remains, which still has the released locks. If firnd
        // dies then, the next firnd restores them, and they last until the programs close the file.
        self.record_locks(key);
        let mut result = Ok(());
        if let Some(lock) = self.files.get(&key) {
            for range in freed_ranges {
                let unlock = LockRequest::Unlock(bytes_in_lock_file(range));
                let unlocked = self.base.lock(&lock.file, unlock);
                // All ranges are released, even after an error.
                result = result.and(unlocked.map(drop));
            }
        }
        self.publish_owners(key);
        result
    }

    /// Releases locks for which no caller waits.
    fn release_or_warn(&mut self, key: LockFileKey, to_release: ReleasedLocks) {
        if let Err(error) = self.release(key, to_release) {
            tracing::warn!(%error, ino = key.file, "cannot release a file lock in the backing");
        }
    }

    /// Looks for a lock that conflicts with the wanted one, first among the programs of this host, then on other hosts.
    /// Nothing is locked. The result is in doubt while it is unknown whether locks of other hosts are visible here.
    fn test(&mut self, wanted: WantedLock) -> Result<TestResult, Errno> {
        let key = wanted.key();
        let WantedLock {
            owner, range, mode, ..
        } = wanted;
        self.open(key)?;
        let lock = self.files.get(&key).ok_or(Errno::NOLCK)?;
        if let Some(held) = lock.held.conflict(owner.number, range, mode) {
            return Ok(TestResult::Conflict(ConflictingLock {
                range: held.range,
                mode: held.mode,
                pid: Some(held.owner.pid),
            }));
        }
        if !self.are_remote_locks_visible()? {
            return Ok(TestResult::ReachUnknown);
        }
        // A lock file that has lost its name carries no valid locks.
        if !self.is_current(key)? {
            self.close(key);
            self.open(key)?;
        }
        let lock = self.files.get(&key).ok_or(Errno::NOLCK)?;
        let is_free = |mode| {
            let test = LockRequest::Test(bytes_in_lock_file(range), mode);
            map_lock_error(self.base.lock(&lock.file, test))
        };
        if is_free(mode)? {
            return Ok(TestResult::Free);
        }
        // A shared lock of another host permits a shared lock of this one.
        let conflicting_mode = if is_free(LockMode::Shared)? {
            LockMode::Shared
        } else {
            LockMode::Exclusive
        };
        Ok(TestResult::Conflict(ConflictingLock {
            range,
            mode: conflicting_mode,
            pid: None,
        }))
    }

    /// Publishes the owners of the locks of a file, for [`FileLocks::is_held`](super::FileLocks::is_held), which does
    /// not wait for the thread.
    fn publish_owners(&self, key: LockFileKey) {
        let owners = match self.files.get(&key) {
            Some(lock) => lock.held.owners().collect(),
            None => Vec::new(),
        };
        self.shared.set_holders(key, owners);
    }

    // ---- locks that outlive firnd ------------------------------------------------------------

    /// Gives the [`LockKeeping`] a descriptor of the lock file for a key, unless it has one.
    fn share_descriptor(&mut self, key: LockFileKey) {
        let Some(lock) = self.files.get(&key) else {
            return;
        };
        if lock.is_kept {
            return;
        }
        self.give_to_keeping(&lock.file, lock.ino);
        if let Some(lock) = self.files.get_mut(&key) {
            lock.is_kept = true;
        }
    }

    /// Gives the [`LockKeeping`] a descriptor of a file in the directory of the lock files.
    fn give_to_keeping(&self, file: &B::File, ino: u64) {
        if let Some(keeping) = &self.keeping
            && let Some(descriptor) = self.base.descriptor(file, DescriptorUse::Keeping)
        {
            keeping.keep_lock_file(ino, descriptor.as_fd());
        }
    }

    /// Records the present locks of a file. Returns false if there is no room.
    fn record_locks(&self, key: LockFileKey) -> bool {
        match (&self.keeping, self.files.get(&key)) {
            (Some(keeping), Some(lock)) => keeping.record_locks(lock.ino, key, lock.held.locks()),
            _ => true,
        }
    }

    /// Closes a lock file, which releases its locks.
    fn close(&mut self, key: LockFileKey) {
        if let Some(lock) = self.files.remove(&key) {
            self.close_file(&lock.file, lock.ino);
        }
    }

    /// Releases all locks in a lock file that is about to be closed, and drops its kept descriptor. As long as that is
    /// open, the close alone would not release them.
    fn close_file(&self, file: &B::File, ino: u64) {
        if let Some(keeping) = &self.keeping {
            if let Err(error) = self.base.lock(file, LockRequest::Unlock(LockRange::WHOLE)) {
                tracing::warn!(%error, "cannot release the locks in a lock file");
            }
            keeping.drop_lock_file(ino);
        }
    }

    /// Restores the locks that an earlier firnd, the process that served this mount, held when it died. Retries each
    /// file for [`RESTORE_TIMEOUT`]; locks that cannot be restored by then are lost, and an error is logged.
    fn restore(&mut self) {
        let KeptLocks { files, locks } = std::mem::take(&mut self.kept);
        let mut files_by_ino = self.open_kept_lock_files(files);
        self.host_file = self.take_kept_host_file(&mut files_by_ino);
        for (key, locks) in locks {
            let deadline = Instant::now() + RESTORE_TIMEOUT;
            let mut restored = self.restore_file(key, &locks, &mut files_by_ino);
            // STALE is final: the lock file or one of its locks is gone.
            while restored.is_err_and(|errno| errno != Errno::STALE) && Instant::now() < deadline {
                std::thread::sleep(RETRY_PAUSE_MAX);
                restored = self.restore_file(key, &locks, &mut files_by_ino);
            }
            if let Err(error) = restored {
                tracing::error!(%error, ino = key.file, "cannot take over the locks on a file: they are lost");
            }
            self.publish_owners(key);
        }
        // Close the remaining kept files, which releases what is locked in them. The locks there could not be restored,
        // or no program has a recorded lock there, for example because the earlier firnd died after it had locked bytes
        // and before it had recorded the lock.
        for (ino, file) in &files_by_ino {
            self.close_file(file, *ino);
        }
    }

    /// Opens the lock files that were kept for this firnd by their descriptors, so that their locks never ended.
    /// Returns them by their inode number. A file that cannot be used is left out, and its locks are lost.
    fn open_kept_lock_files(&self, kept_files: Vec<KeptLockFile>) -> HashMap<u64, B::File> {
        let mut files_by_ino = HashMap::new();
        for KeptLockFile { ino, descriptor } in kept_files {
            let error = match self.base.adopt(descriptor) {
                Ok(adopted) if adopted.attr.ino == ino => {
                    files_by_ino.insert(ino, adopted.file);
                    continue;
                }
                // The descriptor is that of another file.
                Ok(_) => Errno::STALE,
                Err(error) => error,
            };
            tracing::error!(%error, "cannot use a lock file that the earlier firnd kept: its locks are lost");
            if let Some(keeping) = &self.keeping {
                // The close of the last descriptor releases the locks.
                keeping.drop_lock_file(ino);
            }
        }
        files_by_ino
    }

    /// Takes this host's `host-NAME` file out of the kept files, if it is there and still has its name.
    fn take_kept_host_file(&self, kept: &mut HashMap<u64, B::File>) -> Option<HostFile<B>> {
        let name = host_file_name(&self.host);
        let Ok(Some((_, attr))) = own::find(&self.base, &self.dir, OsStr::new(&name)) else {
            return None;
        };
        let file = kept.remove(&attr.ino)?;
        Some(HostFile {
            file,
            ino: attr.ino,
        })
    }

    /// Restores the locks of one kind on one file, which an earlier firnd held. Takes the lock file out of `kept`, the
    /// lock files that were kept open, by their inode number.
    ///
    /// Fails with STALE if the lock file was not kept or has lost its name, or if another host has one of the locks.
    /// After any other error the caller may try again.
    fn restore_file(
        &mut self,
        key: LockFileKey,
        locks: &[HeldLock],
        kept: &mut HashMap<u64, B::File>,
    ) -> Result<(), Errno> {
        let name = lock_file_name(key);
        let Some((_, attr)) = own::find(&self.base, &self.dir, OsStr::new(&name))? else {
            return Err(Errno::STALE);
        };
        let ino = attr.ino;
        let file = kept.get(&ino).ok_or(Errno::STALE)?;
        let mut held = recorded_table(locks);
        self.restore_locks(file, &mut held)?;
        let file = kept.remove(&ino).ok_or(Errno::STALE)?;
        // A lock of the file's end was taken for an append. If the program does not repeat the append in time, the lock
        // is released.
        if key.kind == LockKind::End {
            let release_at = Instant::now() + REPEATED_APPEND_TIMEOUT;
            for owner in held.owners() {
                self.unclaimed_append_locks.push(UnclaimedAppendLock {
                    key,
                    owner: owner.number,
                    release_at,
                });
            }
        }
        let lock = LockFile {
            file,
            ino,
            held,
            queue: Table::default(),
            last_used: Instant::now(),
            is_kept: true,
        };
        self.files.insert(key, lock);
        self.record_locks(key);
        Ok(())
    }

    /// Makes this host's locks in a kept lock file match `held`, the recorded locks: unlocks all other bytes, and locks
    /// the recorded ones. Fails with STALE if another host has an exclusive lock of recorded bytes.
    ///
    /// If firnd died while it made an exclusive lock shared, another host may share the bytes already. Then the lock in
    /// `held` becomes a shared one too.
    fn restore_locks(&self, file: &B::File, held: &mut Table) -> Result<(), Errno> {
        for range in free_bytes_in_lock_file(held) {
            self.base.lock(file, LockRequest::Unlock(range))?;
        }
        for lock in held.locks().to_vec() {
            let range = bytes_in_lock_file(lock.range);
            let try_lock = |mode| self.base.lock(file, LockRequest::Range(range, mode));
            if try_lock(lock.mode)? {
                continue;
            }
            if !try_lock(LockMode::Shared)? {
                return Err(Errno::STALE);
            }
            held.add(HeldLock {
                mode: LockMode::Shared,
                ..lock
            });
        }
        Ok(())
    }

    /// Releases locks of files' ends whose appends were not repeated in time: their programs had their answers before
    /// the earlier firnd died.
    fn release_unclaimed_append_locks(&mut self) {
        let now = Instant::now();
        let requests = &self.waiting;
        let is_repeated = |lock: &UnclaimedAppendLock| {
            requests.iter().any(|request| lock.is_for(&request.wanted))
        };
        let expired: Vec<_> = self
            .unclaimed_append_locks
            .extract_if(.., |lock| lock.release_at <= now && !is_repeated(lock))
            .collect();
        for lock in expired {
            self.release_or_warn(lock.key, ReleasedLocks::Owner(lock.owner));
        }
    }

    // ---- files -------------------------------------------------------------------------------

    /// Opens the lock file of a key (a file with locks of one kind), unless it is open already. Creates it if it does
    /// not exist. Fails with the error of this host's `host-NAME` file if that file could not be locked.
    fn open(&mut self, key: LockFileKey) -> Result<(), Errno> {
        if self.files.contains_key(&key) {
            return Ok(());
        }
        if let Some(errno) = self.reach.host_file_error {
            return Err(errno);
        }
        let file = own::open_or_create(&self.base, &self.dir, &lock_file_name(key))
            .map_err(|error| lock_error(&error.into()))?;
        let ino = self.base.attr_of_file(&file)?.ino;
        let lock = LockFile {
            file,
            ino,
            held: Table::default(),
            queue: Table::default(),
            last_used: Instant::now(),
            is_kept: false,
        };
        self.files.insert(key, lock);
        Ok(())
    }

    /// Returns whether the name of a lock file still leads to the opened file.
    fn is_current(&self, key: LockFileKey) -> Result<bool, Errno> {
        let Some(lock) = self.files.get(&key) else {
            return Ok(false);
        };
        own::name_refers_to(&self.base, &self.dir, &lock_file_name(key), lock.ino)
    }

    /// Closes lock files that were unused for `unused_time_min`. Removes those that no other host has locked, unless
    /// they have lost their names.
    fn remove_unused(&mut self, unused_time_min: Duration) {
        let is_unused =
            |lock: &LockFile<B>| lock.is_unused() && lock.last_used.elapsed() >= unused_time_min;
        let unused_keys: Vec<_> = self
            .files
            .iter()
            .filter(|(_, lock)| is_unused(lock))
            .map(|(key, _)| *key)
            .collect();
        for key in unused_keys {
            // A lock file that has lost its name is only closed. An unknown answer counts as lost, which leaves a file
            // behind.
            let is_current = self.is_current(key).unwrap_or(false);
            if let Some(lock) = self.files.get(&key) {
                self.remove_if_free(&lock.file, &lock_file_name(key), is_current);
                self.close(key);
            }
        }
    }

    /// Removes a lock file if no other host has a lock in it. The lock for the removal ends when the file is closed.
    fn remove_if_free(&self, file: &B::File, name: &str, is_current: bool) {
        let lock_whole = LockRequest::Range(LockRange::WHOLE, LockMode::Exclusive);
        let locked = self.base.lock(file, lock_whole);
        if is_current && locked == Ok(true) {
            // A file that cannot be removed now is removed later.
            let _ = self.base.unlink(&self.dir, OsStr::new(name));
        }
    }

    /// Removes unused lock files that dead hosts left. A lock file without a lock of any host is unused. One that
    /// cannot be listed or opened is left, because it does no harm.
    fn remove_lock_files_of_dead_hosts(&self) {
        let Ok(names) = own::list(&self.base, &self.dir) else {
            return;
        };
        for (name, ino, _) in names {
            let Ok(name) = String::from_utf8(name) else {
                continue;
            };
            // This host has its own file locked for as long as it lives.
            if name == host_file_name(&self.host) {
                continue;
            }
            let Ok(Some(inode)) = own::find_file(&self.base, &self.dir, &name) else {
                continue;
            };
            let Ok(file) = self.base.open(&inode, firn_backing::Access::ReadWrite) else {
                continue;
            };
            // The name may lead to a new file meanwhile. Only the file that was listed may be removed.
            let is_listed_file = self
                .base
                .attr_of_file(&file)
                .is_ok_and(|attr| attr.ino == ino);
            self.remove_if_free(&file, &name, is_listed_file);
        }
    }

    /// Ends the service: fails all waiting requests, releases all locks, and removes the lock files that no other host
    /// uses. New requests are refused first, so none is forgotten.
    fn stop(&mut self) {
        let waiting_numbers: Vec<_> = {
            let mut state = self.shared.state.lock();
            state.is_closed = true;
            state.waiting.keys().copied().collect()
        };
        for number in waiting_numbers {
            self.shared.answer(number, Err(Errno::NOLCK));
        }
        for test in self.pending_tests.drain(..) {
            (test.done)(Err(Errno::NOLCK));
        }
        // A lock file without locks in its tables is unused, so the next call closes it. The close releases its locks.
        for lock in self.files.values_mut() {
            lock.held = Table::default();
            lock.queue = Table::default();
        }
        self.remove_unused(Duration::ZERO);
        if let Some(host_file) = self.host_file.take() {
            let is_current = true;
            self.remove_if_free(&host_file.file, &host_file_name(&self.host), is_current);
            self.close_file(&host_file.file, host_file.ino);
        }
        self.shared.state.lock().has_ended = true;
        self.shared.changed.notify_all();
    }

    // ---- reach -------------------------------------------------------------------------------

    /// Locks this host's `host-NAME` file, by which other hosts see that locks reach it.
    fn lock_host_file(&mut self) {
        match self.try_lock_host_file() {
            Ok(host_file) => {
                self.give_to_keeping(&host_file.file, host_file.ino);
                self.host_file = Some(host_file);
            }
            Err(error) => {
                tracing::warn!(%error, "files in the backing cannot be locked: file locks and appends of programs fail");
                self.reach.host_file_error = Some(lock_error(&error));
            }
        }
    }

    /// Locks this host's `host-NAME` file. Other hosts test that lock: if they find the file locked, they see the locks
    /// of this host.
    ///
    /// A file that an earlier firnd kept open is locked again; fails with ENOLCK if another process has it locked.
    /// Otherwise opens or creates the file, and repeats that for [`UNREACHED_TIMEOUT`] before it fails with ENOLCK:
    /// another host that starts at the same time may lock and remove the file, which looks like that of a dead host.
    fn try_lock_host_file(&mut self) -> Result<HostFile<B>, Errno> {
        let lock_whole = LockRequest::Range(LockRange::WHOLE, LockMode::Exclusive);
        if let Some(kept) = self.host_file.take() {
            if self.base.lock(&kept.file, lock_whole)? {
                return Ok(kept);
            }
            return Err(Errno::NOLCK);
        }
        let name = host_file_name(&self.host);
        let deadline = Instant::now() + UNREACHED_TIMEOUT;
        loop {
            let file = own::open_or_create(&self.base, &self.dir, &name)?;
            let ino = self.base.attr_of_file(&file)?.ino;
            if self.base.lock(&file, lock_whole)?
                && own::name_refers_to(&self.base, &self.dir, &name, ino)?
            {
                return Ok(HostFile { file, ino });
            }
            if Instant::now() >= deadline {
                return Err(Errno::NOLCK);
            }
            // Another host has removed the file or has it locked. The close releases this host's lock, if it has one.
            drop(file);
            std::thread::sleep(RETRY_PAUSE_MIN);
        }
    }

    /// Returns whether this host sees the locks of all other living hosts, by their `host-NAME` files. The result true
    /// is reused for [`REACH_VALID_FOR`].
    ///
    /// Returns false while the answer is unknown, because a host may be about to lock its file. Fails with ENOLCK if a
    /// host's lock stays invisible for [`UNREACHED_TIMEOUT`].
    fn are_remote_locks_visible(&mut self) -> Result<bool, Errno> {
        if let Some(confirmed_at) = self.reach.confirmed_at
            && confirmed_at.elapsed() < REACH_VALID_FOR
        {
            return Ok(true);
        }
        let Some(host) = self.find_unreached_host()? else {
            self.reach.confirmed_at = Some(Instant::now());
            self.reach.unreached_since = None;
            return Ok(true);
        };
        let unreached_since = *self.reach.unreached_since.get_or_insert_with(Instant::now);
        if unreached_since.elapsed() < UNREACHED_TIMEOUT {
            return Ok(false);
        }
        tracing::warn!(
            host,
            "file locks of another host are not visible here: file locks of programs fail"
        );
        Err(Errno::NOLCK)
    }

    /// Returns a living host whose `host-NAME` file is missing or not locked, as far as this host sees.
    fn find_unreached_host(&self) -> Result<Option<String>, Errno> {
        for host in (self.reach.other_hosts)()? {
            let Some(inode) = own::find_file(&self.base, &self.dir, &host_file_name(&host))? else {
                return Ok(Some(host));
            };
            let file = self.base.open(&inode, firn_backing::Access::ReadWrite)?;
            let test_whole = LockRequest::Test(LockRange::WHOLE, LockMode::Exclusive);
            let is_free = map_lock_error(self.base.lock(&file, test_whole))?;
            if is_free {
                return Ok(Some(host));
            }
        }
        Ok(None)
    }
}

fn lock_file_name(LockFileKey { file, kind }: LockFileKey) -> String {
    match kind {
        LockKind::Bytes => file.to_string(),
        LockKind::Flock => format!("{file}.flock"),
        LockKind::End => format!("{file}.end"),
    }
}

fn host_file_name(host: &str) -> String {
    format!("host-{host}")
}

/// Returns the owner by which the table of the queue knows a request. Only its number counts.
fn owner_in_queue(number: u64) -> Owner {
    Owner {
        number,
        handle: 0,
        pid: 0,
    }
}

/// Returns the bytes of the lock file that stand for these bytes of the file. All bytes from [`QUEUE_OFFSET`] - 1 on
/// share one byte.
fn bytes_in_lock_file(range: LockRange) -> LockRange {
    LockRange {
        first: range.first.min(QUEUE_OFFSET - 1),
        last: range.last.min(QUEUE_OFFSET - 1),
    }
}

/// Returns the bytes of the lock file that stand for the queue for these bytes of the file.
fn queue_bytes_in_lock_file(range: LockRange) -> LockRange {
    let LockRange { first, last } = bytes_in_lock_file(range);
    LockRange {
        first: first + QUEUE_OFFSET,
        last: last + QUEUE_OFFSET,
    }
}

/// Returns the bytes of a lock file that stand for no held lock, the bytes of the queue among them.
fn free_bytes_in_lock_file(held: &Table) -> Vec<LockRange> {
    let mut free_ranges = vec![LockRange::WHOLE];
    for lock in held.locks() {
        let locked = bytes_in_lock_file(lock.range);
        free_ranges = free_ranges
            .iter()
            .flat_map(|range| range.without(&locked))
            .collect();
    }
    free_ranges
}

/// Returns the recorded locks as a table without conflicts.
///
/// An owner may have the same bytes twice if firnd died while it made the lock shared or exclusive. That request will
/// be repeated, so the shared lock is the right one now: it is added last, and replaces the exclusive one.
fn recorded_table(locks: &[HeldLock]) -> Table {
    let mut held = Table::default();
    for mode in [LockMode::Exclusive, LockMode::Shared] {
        for lock in locks.iter().filter(|lock| lock.mode == mode) {
            if held.conflict(lock.owner.number, lock.range, mode).is_none() {
                held.add(*lock);
            }
        }
    }
    held
}

/// Returns the error that a program gets if the backing has no locks.
fn lock_error(error: &Errno) -> Errno {
    match *error {
        Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL | Errno::PERM => Errno::NOLCK,
        error => error,
    }
}

fn map_lock_error<T>(outcome: Result<T, Errno>) -> Result<T, Errno> {
    outcome.map_err(|error| lock_error(&error))
}
