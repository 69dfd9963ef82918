//! The thread that takes and releases locks in the backing.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::{Backing, Errno, LockMode, LockRange, LockRequest};

use super::table::{Held, Table};
use super::{Done, InTheWay, OtherHosts, Owner, Released, Shared, Space, TestDone, Wanted};
use crate::own;

/// Offset of the queue: a program that waits for byte *n* has byte *n* + `LINE` of the lock file locked.
const LINE: u64 = 1 << 62;
/// How long a host that comes later lets queued hosts go first.
pub(super) const POLITE_FOR: Duration = Duration::from_millis(250);
/// First pause before a lock of another host is tried again. The pause doubles each time, up to `REST_MAX`.
const REST_MIN: Duration = Duration::from_millis(1);
const REST_MAX: Duration = Duration::from_millis(50);
/// Maximum pause between two attempts of a request that has a place in the queue.
const REST_IN_LINE: Duration = Duration::from_millis(8);
/// How long a lock file is unused before it is removed.
const IDLE: Duration = Duration::from_secs(2);
/// How long a successful check counts that locks reach the other hosts.
const REACH_FOR: Duration = Duration::from_secs(1);
/// How long a failed check is tolerated before locks are refused. A new host has its lease a moment before it has
/// locked its `host-NAME` file.
const REACH_PATIENCE: Duration = Duration::from_secs(3);
/// How often a lock file may have lost its name before the request fails.
const TRIES_MAX: usize = 100;

/// A request to the lock thread.
pub(super) enum Job {
    Acquire {
        number: u64,
        wanted: Wanted,
        waits: bool,
    },
    Release {
        file: u64,
        space: Space,
        what: Released,
        done: Done,
    },
    Test {
        wanted: Wanted,
        done: TestDone,
    },
}

/// A request for a lock, tried until it is granted.
struct Waiting {
    number: u64,
    wanted: Wanted,
    waits: bool,
    since: Instant,
    next_try: Instant,
    rest: Duration,
}

/// A test for a conflicting lock, repeated until the thread knows whether locks reach all hosts.
struct PendingTest {
    wanted: Wanted,
    done: TestDone,
    next_try: Instant,
}

enum Tried {
    Granted,
    /// Another lock conflicts.
    Busy,
    /// The thread does not know yet whether locks reach all hosts.
    InDoubt,
}

/// Result of a test for a conflicting lock.
enum Tested {
    Free,
    Conflict(InTheWay),
    /// The thread does not know yet whether locks reach all hosts.
    InDoubt,
}

/// An open lock file.
struct LockFile<B: Backing> {
    file: B::File,
    ino: u64,
    /// Locks that programs hold.
    held: Table,
    /// Queue locks of waiting requests. The number of an owner is the number of its request.
    line: Table,
    used: Instant,
}

impl<B: Backing> LockFile<B> {
    fn is_unused(&self) -> bool {
        self.held.is_empty() && self.line.is_empty()
    }
}

/// Result of the checks whether locks exclude other hosts.
struct Reach {
    /// Error of locking this host's `host-NAME` file. `None` if the file is locked.
    own: Option<Errno>,
    other_hosts: OtherHosts,
    /// Time of the last check that found all other hosts reached.
    seen: Option<Instant>,
    /// Time since when at least one host is not reached.
    in_doubt: Option<Instant>,
}

pub(super) struct Keeper<B: Backing> {
    base: B,
    dir: B::Inode,
    host: String,
    shared: Arc<Shared>,
    files: HashMap<(u64, Space), LockFile<B>>,
    waiting: Vec<Waiting>,
    pending_tests: Vec<PendingTest>,
    /// This host's `host-NAME` file, locked as long as the host is alive.
    name: Option<B::File>,
    reach: Reach,
}

impl<B: Backing> Keeper<B> {
    pub(super) fn new(
        base: B,
        dir: B::Inode,
        host: &str,
        other_hosts: OtherHosts,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            base,
            dir,
            host: host.to_owned(),
            shared,
            files: HashMap::new(),
            waiting: Vec::new(),
            pending_tests: Vec::new(),
            name: None,
            reach: Reach {
                own: None,
                other_hosts,
                seen: None,
                in_doubt: None,
            },
        }
    }

    /// Serves requests until the mount ends.
    pub(super) fn run(&mut self) {
        self.take_name();
        self.remove_left();
        while let Some(jobs) = self.next_jobs() {
            for job in jobs {
                self.carry_out(job);
            }
            self.try_waiting();
            self.repeat_tests();
            self.remove_idle(IDLE);
        }
        self.end();
    }

    /// Waits until there is work, and returns the new requests. Returns `None` when the thread must end.
    fn next_jobs(&self) -> Option<Vec<Job>> {
        let mut state = self.shared.state.lock();
        if state.jobs.is_empty() && !state.is_stopping {
            let waiting = self.waiting.iter().map(|waiting| waiting.next_try);
            let tests = self.pending_tests.iter().map(|test| test.next_try);
            let unused = self.files.values().filter(|lock| lock.is_unused());
            let idle = unused.map(|lock| lock.used + IDLE);
            match waiting.chain(tests).chain(idle).min() {
                None => state.wait(&self.shared.changed),
                Some(wake) => {
                    let rest = wake.saturating_duration_since(Instant::now());
                    if !rest.is_zero() {
                        state.wait_for(&self.shared.changed, rest);
                    }
                }
            }
        }
        if state.is_stopping && state.jobs.is_empty() {
            None
        } else {
            Some(std::mem::take(&mut state.jobs))
        }
    }

    fn carry_out(&mut self, job: Job) {
        match job {
            Job::Acquire {
                number,
                wanted,
                waits,
            } => {
                let now = Instant::now();
                self.waiting.push(Waiting {
                    number,
                    wanted,
                    waits,
                    since: now,
                    next_try: now,
                    rest: REST_MIN,
                });
            }
            Job::Release {
                file,
                space,
                what,
                done,
            } => {
                let released = self.release((file, space), what);
                let now = Instant::now();
                let is_next = |waiting: &&mut Waiting| waiting.wanted.file == file;
                let next = self.waiting.iter_mut().filter(is_next);
                next.for_each(|waiting| waiting.next_try = now);
                done(released);
            }
            Job::Test { wanted, done } => self.answer_test(wanted, done),
        }
    }

    /// Answers a test. If the thread does not know yet whether locks reach all hosts, the test is kept and repeated.
    fn answer_test(&mut self, wanted: Wanted, done: TestDone) {
        match self.test(wanted) {
            Ok(Tested::Free) => done(Ok(None)),
            Ok(Tested::Conflict(found)) => done(Ok(Some(found))),
            Ok(Tested::InDoubt) => self.pending_tests.push(PendingTest {
                wanted,
                done,
                next_try: Instant::now() + REST_MAX,
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

    /// Tries the waiting requests that are due, in the order of their arrival.
    fn try_waiting(&mut self) {
        let mut index = 0;
        while index < self.waiting.len() {
            if !self.shared.is_waiting(self.waiting[index].number) {
                let interrupted = self.waiting.remove(index);
                self.leave_line(&interrupted);
                continue;
            }
            if self.waiting[index].next_try > Instant::now() {
                index += 1;
                continue;
            }
            let waiting = self.waiting.remove(index);
            let tried = if self.is_behind(&waiting, index) {
                Ok(Tried::Busy)
            } else {
                self.try_one(&waiting)
            };
            match tried {
                Ok(Tried::Granted) => {
                    self.leave_line(&waiting);
                    self.grant(&waiting);
                }
                Ok(Tried::Busy) if !waiting.waits => {
                    self.shared.answer(waiting.number, Err(Errno::AGAIN));
                }
                Ok(Tried::Busy | Tried::InDoubt) => {
                    let rest_max = if self.is_in_line(&waiting) {
                        REST_IN_LINE
                    } else {
                        REST_MAX
                    };
                    let waiting = Waiting {
                        next_try: Instant::now() + waiting.rest,
                        rest: (waiting.rest * 2).min(rest_max),
                        ..waiting
                    };
                    self.waiting.insert(index, waiting);
                    index += 1;
                }
                Err(errno) => {
                    self.leave_line(&waiting);
                    self.shared.answer(waiting.number, Err(errno));
                }
            }
        }
    }

    /// Returns whether an earlier request of this host waits for some of the same bytes and must go first.
    fn is_behind(&self, waiting: &Waiting, index: usize) -> bool {
        let wanted = &waiting.wanted;
        let is_before = |earlier: &Waiting| {
            let other = &earlier.wanted;
            let is_alone = [other.mode, wanted.mode].contains(&LockMode::Exclusive);
            let is_same = (other.file, other.space) == (wanted.file, wanted.space);
            is_same && is_alone && other.range.overlaps(&wanted.range)
        };
        waiting.waits
            && waiting.since.elapsed() < POLITE_FOR
            && self.waiting[..index].iter().any(is_before)
    }

    fn is_in_line(&self, waiting: &Waiting) -> bool {
        let lock = self.files.get(&(waiting.wanted.file, waiting.wanted.space));
        let is_it = |owner: Owner| owner == owner_in_line(waiting.number);
        lock.is_some_and(|lock| lock.line.owners().any(is_it))
    }

    /// Tells the program that its lock is granted. If the program waits no more, the lock is released.
    fn grant(&mut self, waiting: &Waiting) {
        let Wanted {
            file,
            space,
            owner,
            range,
            ..
        } = waiting.wanted;
        self.tell_holders((file, space));
        if !self.shared.answer(waiting.number, Ok(())) {
            let what = Released::Range(owner.number, range);
            if let Err(error) = self.release((file, space), what) {
                tracing::warn!(%error, ino = file, "cannot release the lock of a file");
            }
        }
    }

    fn try_one(&mut self, waiting: &Waiting) -> Result<Tried, Errno> {
        let Wanted {
            file,
            space,
            owner,
            range,
            mode,
        } = waiting.wanted;
        let key = (file, space);
        for _ in 0..TRIES_MAX {
            self.open(key)?;
            let is_reached = self.reaches_others()?;
            let lock = self.files.get(&key).ok_or(Errno::NOLCK)?;
            if lock.held.conflict(owner.number, range, mode).is_some() {
                return Ok(Tried::Busy);
            }
            if !is_reached {
                return Ok(Tried::InDoubt);
            }
            let is_new = lock.is_unused();
            if !self.try_in_backing(waiting, key)? {
                return Ok(Tried::Busy);
            }
            let is_current = if is_new {
                self.is_current(key)
            } else {
                Ok(true)
            };
            if is_current != Ok(true) {
                // Dropping the file releases its locks. Another host may have removed the file since it was opened.
                self.files.remove(&key);
                is_current?;
                continue;
            }
            let lock = self.files.get_mut(&key).ok_or(Errno::NOLCK)?;
            lock.held.add(Held { owner, range, mode });
            lock.used = Instant::now();
            return Ok(Tried::Granted);
        }
        Err(Errno::NOLCK)
    }

    /// Tries to lock a range for this host. On failure, a request that waits takes a place in the queue.
    fn try_in_backing(&mut self, waiting: &Waiting, key: (u64, Space)) -> Result<bool, Errno> {
        let Wanted { range, mode, .. } = waiting.wanted;
        let lock = self.files.get_mut(&key).ok_or(Errno::NOLCK)?;
        let bytes = of_bytes(range);
        let line = of_line(range);
        let is_polite = waiting.waits && waiting.since.elapsed() < POLITE_FOR;
        let may_go =
            !is_polite || no_lock(self.base.lock(&lock.file, LockRequest::Test(line, mode)))?;
        if may_go && no_lock(self.base.lock(&lock.file, LockRequest::Range(bytes, mode)))? {
            return Ok(true);
        }
        if waiting.waits && no_lock(self.base.lock(&lock.file, LockRequest::Range(line, mode)))? {
            let owner = owner_in_line(waiting.number);
            let (range, conflict) = (line, lock.line.conflict(owner.number, line, mode));
            // If two requests of this host exclude each other, the queue lock of the first one stands for both.
            if conflict.is_none() {
                lock.line.add(Held { owner, range, mode });
            }
        }
        Ok(false)
    }

    fn leave_line(&mut self, waiting: &Waiting) {
        let key = (waiting.wanted.file, waiting.wanted.space);
        let Some(lock) = self.files.get_mut(&key) else {
            return;
        };
        let is_its = |held: &Held| {
            let is_its = held.owner == owner_in_line(waiting.number);
            is_its.then_some(LockRange::WHOLE)
        };
        lock.used = Instant::now();
        for range in lock.line.remove(is_its) {
            if let Err(error) = self.base.lock(&lock.file, LockRequest::Unlock(range)) {
                tracing::warn!(%error, ino = key.0, "cannot leave the line for a lock");
            }
        }
    }

    fn release(&mut self, key: (u64, Space), what: Released) -> Result<(), Errno> {
        let Some(lock) = self.files.get_mut(&key) else {
            return Ok(());
        };
        let removed = |held: &Held| match what {
            Released::Range(owner, range) => (held.owner.number == owner).then_some(range),
            Released::Owner(owner) => (held.owner.number == owner).then_some(LockRange::WHOLE),
            Released::Handle(handle) => (held.owner.handle == handle).then_some(LockRange::WHOLE),
        };
        let mut released = Ok(());
        for range in lock.held.remove(removed) {
            let unlock = LockRequest::Unlock(of_bytes(range));
            let unlocked = self.base.lock(&lock.file, unlock);
            released = released.and(unlocked.map(drop));
        }
        lock.used = Instant::now();
        self.tell_holders(key);
        released
    }

    /// Looks for a lock that conflicts with the wanted one, first among the programs of this host, then on other
    /// hosts.
    fn test(&mut self, wanted: Wanted) -> Result<Tested, Errno> {
        let Wanted {
            file,
            space,
            owner,
            range,
            mode,
        } = wanted;
        let key = (file, space);
        self.open(key)?;
        let lock = self.files.get(&key).ok_or(Errno::NOLCK)?;
        if let Some(held) = lock.held.conflict(owner.number, range, mode) {
            return Ok(Tested::Conflict(InTheWay {
                range: held.range,
                mode: held.mode,
                pid: Some(held.owner.pid),
            }));
        }
        if !self.reaches_others()? {
            return Ok(Tested::InDoubt);
        }
        // A lock file that has lost its name carries no valid locks.
        if !self.is_current(key)? {
            self.files.remove(&key);
            self.open(key)?;
        }
        let lock = self.files.get(&key).ok_or(Errno::NOLCK)?;
        let is_free = |mode| {
            let test = LockRequest::Test(of_bytes(range), mode);
            no_lock(self.base.lock(&lock.file, test))
        };
        if is_free(mode)? {
            return Ok(Tested::Free);
        }
        let mode = if is_free(LockMode::Shared)? {
            LockMode::Shared
        } else {
            LockMode::Exclusive
        };
        let pid = None;
        Ok(Tested::Conflict(InTheWay { range, mode, pid }))
    }

    /// Publishes which owners have locks of a file, for calls that do not wait for the thread.
    fn tell_holders(&self, key: (u64, Space)) {
        let lock = self.files.get(&key);
        let owners = lock.map(|lock| lock.held.owners().collect());
        self.shared.set_holders(key, owners.unwrap_or_default());
    }

    // ---- files -------------------------------------------------------------------------------

    fn open(&mut self, key: (u64, Space)) -> Result<(), Errno> {
        if self.files.contains_key(&key) {
            return Ok(());
        }
        if let Some(errno) = self.reach.own {
            return Err(errno);
        }
        let opened = own::open_or_create(&self.base, &self.dir, &name_of(key));
        let file = opened.map_err(|error| refused(&error.into()))?;
        let ino = self.base.attr_of_file(&file)?.ino;
        let lock = LockFile {
            file,
            ino,
            held: Table::default(),
            line: Table::default(),
            used: Instant::now(),
        };
        self.files.insert(key, lock);
        Ok(())
    }

    /// Returns whether the name of a lock file still leads to the opened file.
    fn is_current(&self, key: (u64, Space)) -> Result<bool, Errno> {
        let Some(lock) = self.files.get(&key) else {
            return Ok(false);
        };
        let found = own::find(&self.base, &self.dir, OsStr::new(&name_of(key)))?;
        Ok(found.is_some_and(|(_, attr)| attr.ino == lock.ino))
    }

    /// Closes lock files that were unused for `idle`, and removes those that no other host uses.
    fn remove_idle(&mut self, idle: Duration) {
        let is_idle = |lock: &LockFile<B>| lock.is_unused() && lock.used.elapsed() >= idle;
        let all = self.files.iter();
        let keys: Vec<_> = all
            .filter(|(_, lock)| is_idle(lock))
            .map(|(key, _)| *key)
            .collect();
        for key in keys {
            let is_current = self.is_current(key).unwrap_or(false);
            if let Some(lock) = self.files.remove(&key) {
                self.remove_if_free(lock.file, &name_of(key), is_current);
            }
        }
    }

    /// Removes a lock file if no other host has a lock in it. The lock for the removal ends when the file is closed.
    fn remove_if_free(&self, file: B::File, name: &str, is_current: bool) {
        let whole = LockRequest::Range(LockRange::WHOLE, LockMode::Exclusive);
        let locked = self.base.lock(&file, whole);
        if is_current && locked == Ok(true) {
            // A file that cannot be removed now is removed later.
            let _ = self.base.unlink(&self.dir, OsStr::new(name));
        }
    }

    /// Removes unused lock files that dead hosts left.
    fn remove_left(&self) {
        let Ok(names) = own::list(&self.base, &self.dir) else {
            return;
        };
        for (name, ino, _) in names {
            let Ok(name) = String::from_utf8(name) else {
                continue;
            };
            if name == host_name(&self.host) {
                continue;
            }
            let Ok(Some(inode)) = own::find_file(&self.base, &self.dir, &name) else {
                continue;
            };
            let access = firn_backing::Access::ReadWrite;
            if let Ok(file) = self.base.open(&inode, access) {
                let is_it = self
                    .base
                    .attr_of_file(&file)
                    .is_ok_and(|attr| attr.ino == ino);
                self.remove_if_free(file, &name, is_it);
            }
        }
    }

    fn end(&mut self) {
        let numbers: Vec<_> = {
            let mut state = self.shared.state.lock();
            state.is_closed = true;
            state.waiting.keys().copied().collect()
        };
        for number in numbers {
            self.shared.answer(number, Err(Errno::NOLCK));
        }
        for test in self.pending_tests.drain(..) {
            (test.done)(Err(Errno::NOLCK));
        }
        for lock in self.files.values_mut() {
            (lock.held, lock.line) = (Table::default(), Table::default());
        }
        self.remove_idle(Duration::ZERO);
        if let Some(file) = self.name.take() {
            self.remove_if_free(file, &host_name(&self.host), true);
        }
        self.shared.state.lock().has_ended = true;
        self.shared.changed.notify_all();
    }

    // ---- reach -------------------------------------------------------------------------------

    /// Locks this host's `host-NAME` file, by which other hosts see that locks reach it.
    fn take_name(&mut self) {
        let taken = || -> Result<B::File, Errno> {
            let name = host_name(&self.host);
            let file = own::open_or_create(&self.base, &self.dir, &name)?;
            let whole = LockRequest::Range(LockRange::WHOLE, LockMode::Exclusive);
            match self.base.lock(&file, whole)? {
                true => Ok(file),
                false => Err(Errno::NOLCK),
            }
        };
        match taken() {
            Ok(file) => self.name = Some(file),
            Err(error) => {
                tracing::warn!(%error, "files in the backing cannot be locked: programs are refused locks, and appends");
                self.reach.own = Some(refused(&error));
            }
        }
    }

    /// Returns whether this host sees the locks of all other living hosts.
    ///
    /// Returns false while that is unknown, and fails with ENOLCK if a host stays unreached.
    fn reaches_others(&mut self) -> Result<bool, Errno> {
        let is_fresh = |seen: Instant| seen.elapsed() < REACH_FOR;
        if self.reach.seen.is_some_and(is_fresh) {
            return Ok(true);
        }
        match self.find_unreached()? {
            None => {
                self.reach.seen = Some(Instant::now());
                self.reach.in_doubt = None;
                Ok(true)
            }
            Some(host) => {
                let since = *self.reach.in_doubt.get_or_insert_with(Instant::now);
                if since.elapsed() < REACH_PATIENCE {
                    return Ok(false);
                }
                tracing::warn!(
                    host,
                    "locks of files do not reach this host: programs are refused them"
                );
                Err(Errno::NOLCK)
            }
        }
    }

    fn find_unreached(&self) -> Result<Option<String>, Errno> {
        for host in (self.reach.other_hosts)()? {
            let Some(inode) = own::find_file(&self.base, &self.dir, &host_name(&host))? else {
                return Ok(Some(host));
            };
            let file = self.base.open(&inode, firn_backing::Access::ReadWrite)?;
            let whole = LockRequest::Test(LockRange::WHOLE, LockMode::Exclusive);
            if no_lock(self.base.lock(&file, whole))? {
                return Ok(Some(host));
            }
        }
        Ok(None)
    }
}

fn name_of((file, space): (u64, Space)) -> String {
    match space {
        Space::Bytes => file.to_string(),
        Space::Flock => format!("{file}.flock"),
        Space::End => format!("{file}.end"),
    }
}

fn host_name(host: &str) -> String {
    format!("host-{host}")
}

/// Returns the owner that stands for a request in the queue. Only the number of the request is known.
fn owner_in_line(number: u64) -> Owner {
    Owner {
        number,
        handle: 0,
        pid: 0,
    }
}

/// Returns the bytes of the lock file that stand for these bytes of the file. All bytes from [`LINE`] - 1 on share
/// one byte.
fn of_bytes(range: LockRange) -> LockRange {
    LockRange {
        first: range.first.min(LINE - 1),
        last: range.last.min(LINE - 1),
    }
}

/// Returns the bytes of the lock file that stand for the queue for these bytes of the file.
fn of_line(range: LockRange) -> LockRange {
    let LockRange { first, last } = of_bytes(range);
    LockRange {
        first: first + LINE,
        last: last + LINE,
    }
}

/// Returns the error that a program gets if the backing has no locks.
fn refused(error: &Errno) -> Errno {
    match *error {
        Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL | Errno::PERM => Errno::NOLCK,
        error => error,
    }
}

fn no_lock<T>(outcome: Result<T, Errno>) -> Result<T, Errno> {
    outcome.map_err(|error| refused(&error))
}
