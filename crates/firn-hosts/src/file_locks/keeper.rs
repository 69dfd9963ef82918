//! The thread that takes and releases locks in the backing.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::{Backing, Errno, LockMode, LockRange, LockRequest};

use super::table::{Held, Table};
use super::{Done, InTheWay, OtherHosts, Owner, Released, Shared, Space, TestDone, Wanted};
use crate::own;

/// A program's lock of byte *n* that is waited for has byte *n* + this locked.
const LINE: u64 = 1 << 62;
/// For this long a host that comes later lets those in line go first.
pub(super) const POLITE_FOR: Duration = Duration::from_millis(250);
/// A lock that another host has is tried again after this, and then after twice as long each time.
const REST_MIN: Duration = Duration::from_millis(1);
const REST_MAX: Duration = Duration::from_millis(50);
/// Time between two tries of the next host in line.
const REST_IN_LINE: Duration = Duration::from_millis(8);
/// A lock file that was unused for this long is removed.
const IDLE: Duration = Duration::from_secs(2);
/// How long it is believed that locks reach the other hosts.
const REACH_FOR: Duration = Duration::from_secs(1);
/// A host has its lease a moment before it has locked its name: for this long no lock is refused for that.
const REACH_PATIENCE: Duration = Duration::from_secs(3);
/// How often a lock file may be found to have lost its name before the request fails.
const TRIES_MAX: usize = 100;

/// Something to do.
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

/// A request that is tried until it is granted.
struct Waiting {
    number: u64,
    wanted: Wanted,
    waits: bool,
    since: Instant,
    next_try: Instant,
    rest: Duration,
}

/// A test that is repeated until it is known whether locks reach all hosts.
struct PendingTest {
    wanted: Wanted,
    done: TestDone,
    next_try: Instant,
}

enum Tried {
    Granted,
    /// Another lock conflicts.
    Busy,
    /// It is not known yet whether locks reach all hosts.
    InDoubt,
}

/// Result of a test for a conflicting lock.
enum Tested {
    Free,
    Conflict(InTheWay),
    /// It is not known yet whether locks reach all hosts.
    InDoubt,
}

/// An open lock file.
struct LockFile<B: Backing> {
    file: B::File,
    ino: u64,
    /// What programs have.
    held: Table,
    /// What requests wait for; their owners are the numbers of the requests.
    line: Table,
    used: Instant,
}

impl<B: Backing> LockFile<B> {
    fn is_unused(&self) -> bool {
        self.held.is_empty() && self.line.is_empty()
    }
}

/// Whether locks keep other hosts out.
struct Reach {
    /// The file with the name of this host.
    own: Option<Errno>,
    other_hosts: OtherHosts,
    /// When all others were found to be reached.
    seen: Option<Instant>,
    /// Since when one is not.
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
    /// Locked as long as this host lives.
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

    /// Waits until there is something to do; none at the end.
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

    /// Answers a test, or keeps it until it is known whether locks reach all hosts.
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

    /// Tries what is due, first come, first served.
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

    /// Whether one of this host has waited longer for some of the same bytes, and is to go first.
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

    /// Answers the program that asked, or gives the lock back if the program waits no more.
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
                // With the file go the locks. Another host may have removed it since it was opened.
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

    /// Tries to lock a range for this host. A program that has to wait stands in line from then on.
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
            // Of two of this host that exclude each other the first one stands for both.
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

    /// Looks for a lock that conflicts with the wanted one: of this host's programs, then of other hosts.
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
        // A file that has lost its name has no locks.
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

    /// Tells requests that do not wait which owners have locks of a file.
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

    /// Whether the name of a lock file still leads to it.
    fn is_current(&self, key: (u64, Space)) -> Result<bool, Errno> {
        let Some(lock) = self.files.get(&key) else {
            return Ok(false);
        };
        let found = own::find(&self.base, &self.dir, OsStr::new(&name_of(key)))?;
        Ok(found.is_some_and(|(_, attr)| attr.ino == lock.ino))
    }

    /// Closes files that were unused for `idle`, and removes those that no other host uses.
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

    /// The lock ends when the file is closed.
    fn remove_if_free(&self, file: B::File, name: &str, is_current: bool) {
        let whole = LockRequest::Range(LockRange::WHOLE, LockMode::Exclusive);
        let locked = self.base.lock(&file, whole);
        if is_current && locked == Ok(true) {
            // What stays is removed by a later one.
            let _ = self.base.unlink(&self.dir, OsStr::new(name));
        }
    }

    /// Removes unused lock files, which hosts that died left.
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

    /// Locks the name of this host, by which others see that locks reach it.
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

    /// Whether the locks of all other hosts that live are seen here; ENOLCK if they are not, false while that is
    /// unknown.
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

/// Requests are numbered, and nothing else is known of them.
fn owner_in_line(number: u64) -> Owner {
    Owner {
        number,
        handle: 0,
        pid: 0,
    }
}

/// Bytes of a lock file that stand for these of the file. Those beyond [`LINE`] are one.
fn of_bytes(range: LockRange) -> LockRange {
    LockRange {
        first: range.first.min(LINE - 1),
        last: range.last.min(LINE - 1),
    }
}

/// Bytes of a lock file that stand for the line of these of the file.
fn of_line(range: LockRange) -> LockRange {
    let LockRange { first, last } = of_bytes(range);
    LockRange {
        first: first + LINE,
        last: last + LINE,
    }
}

/// What a program is told where the backing has no locks.
fn refused(error: &Errno) -> Errno {
    match *error {
        Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL | Errno::PERM => Errno::NOLCK,
        error => error,
    }
}

fn no_lock<T>(outcome: Result<T, Errno>) -> Result<T, Errno> {
    outcome.map_err(|error| refused(&error))
}
