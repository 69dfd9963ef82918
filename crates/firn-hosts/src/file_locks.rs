//! File locks of programs that also exclude programs on other hosts. A host holds them as locks of files in the
//! *backing*, the directory that a mount serves.
//!
//! ```text
//! .firn/locks/
//!   INO         bytes of the file with this inode number that programs of a host have locked by fcntl(2)
//!   INO.flock   the same for flock(2); locks of fcntl(2) and of flock(2) are independent of each other
//!   INO.end     the end of that file: an appending host keeps it locked until other hosts can see the appended bytes
//!   host-NAME   locked by that host as long as it is alive
//! ```
//!
//! A host locks a range of `INO` while any of its programs has that range locked. The host decides itself which of
//! its programs gets a lock ([`Table`]). The host tries locks and never blocks in the file system, so that a waiting
//! program can be interrupted.
//!
//! A lock of byte *n* of the file is a lock of byte *n* of `INO`. A host that waits for a lock also queues: it locks
//! byte *n* with an offset of 2^62 in `INO`. A host that comes later lets the queued host go first, for at most
//! [`YIELD_TIME_MAX`]. The time is limited because a queued host may itself wait for a program that comes later. The
//! queue prevents a host that locks again and again from keeping out the others.
//!
//! Promises
//! * If two programs on any hosts have the same bytes of a file locked, both locks are shared. This holds as far as
//!   locks of the backing reach.
//! * Each request fails with ENOLCK if the backing has no locks, or if its locks are seen not to reach a living host.
//! * The locks of a host end with its firnd, the process that serves the mount, unless a [`LockKeeping`] has kept the
//!   open lock files for the next firnd.
//! * A lock file is removed only under a lock of the whole file. A host that locks a lock file checks afterwards that
//!   the file still has its name.
//!
//! One thread, `firn-locks`, makes all calls of the backing, so no other thread waits for a server that hangs.

mod table;
mod thread;

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::lock::Mutex;
use firn_backing::{Backing, Errno, LockMode, LockRange};
use parking_lot::Condvar;

pub use self::table::{HeldLock, Owner};
use self::thread::{Job, LockThread};

#[cfg(doc)]
use self::table::Table;
#[cfg(doc)]
use self::thread::YIELD_TIME_MAX;

/// Name of the directory with the lock files, in `.firn/`.
pub const FILE_LOCKS: &str = "locks";

/// Callback, called once with the result.
pub type ResultCallback = Box<dyn FnOnce(Result<(), Errno>) + Send>;

/// Callback, called once with a conflicting lock, or with `None` if there is none.
pub type TestCallback = Box<dyn FnOnce(Result<Option<ConflictingLock>, Errno>) + Send>;

/// The kind of a file lock. Locks of different kinds are independent of each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum LockKind {
    /// A byte-range lock of fcntl(2).
    Bytes = 1,
    /// A lock of flock(2).
    Flock = 2,
    /// The lock of the end of the file. There is one such lock, whatever the range is.
    End = 3,
}

impl LockKind {
    /// Returns the kind with a number, or `None` if no kind has that number.
    pub fn from_number(number: u8) -> Option<Self> {
        [Self::Bytes, Self::Flock, Self::End]
            .into_iter()
            .find(|kind| *kind as u8 == number)
    }
}

/// A lock that a program requests.
#[derive(Clone, Copy, Debug)]
pub struct WantedLock {
    /// Inode number of the file.
    pub file: u64,
    /// Kind of the lock.
    pub kind: LockKind,
    /// The program that wants the lock.
    pub owner: Owner,
    /// The bytes to lock.
    pub range: LockRange,
    /// Shared or exclusive.
    pub mode: LockMode,
}

/// Identifies a lock file, and with it all locks of one kind on one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LockFileKey {
    /// Inode number of the locked file.
    pub file: u64,
    /// Kind of the locks.
    pub kind: LockKind,
}

impl WantedLock {
    /// Returns the key of the lock file for this lock.
    fn key(&self) -> LockFileKey {
        LockFileKey {
            file: self.file,
            kind: self.kind,
        }
    }
}

/// What happens to a request for a lock while another lock conflicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnConflict {
    /// The request waits until it is granted, interrupted or failed.
    Wait,
    /// The request fails with EAGAIN.
    Fail,
}

/// The locks of a file that a request releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleasedLocks {
    /// These bytes of the owner with this number.
    Range(u64, LockRange),
    /// All locks of the owner with this number.
    Owner(u64),
    /// All locks that were taken through the open file with this number.
    Handle(u64),
}

/// A lock that conflicts with a wanted lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConflictingLock {
    /// The conflicting bytes.
    pub range: LockRange,
    /// Shared or exclusive.
    pub mode: LockMode,
    /// Process id of the holder. `None` if the holder is on another host.
    pub pid: Option<u32>,
}

/// Returns the names of the other living hosts that may lock files in this backing.
pub type OtherHosts = Box<dyn Fn() -> Result<Vec<String>, Errno> + Send>;

/// Keeps the locks of this firnd for the next one, in case this one dies.
///
/// The backing keeps a lock as long as any process has a descriptor of the open lock file. So another process gets a
/// descriptor, and a table outside of firnd says which program has which lock.
pub trait LockKeeping: Send {
    /// Keeps a descriptor of a lock file. Called before the first lock in that file.
    fn keep_lock_file(&self, lock_file: u64, descriptor: BorrowedFd<'_>);
    /// Closes the kept descriptor of a lock file.
    fn drop_lock_file(&self, lock_file: u64);
    /// Records the locks of this kind that programs have on a file, in place of the earlier record. Returns false if
    /// there is no room; the earlier record then remains beside what fits.
    fn record_locks(&self, lock_file: u64, key: LockFileKey, locks: &[HeldLock]) -> bool;
}

/// A lock file that an earlier firnd had open, with the locks in it.
#[derive(Debug)]
pub struct KeptLockFile {
    /// Inode number of the lock file.
    pub ino: u64,
    /// A descriptor of the open file.
    pub descriptor: OwnedFd,
}

/// The locks that an earlier firnd left.
#[derive(Debug, Default)]
pub struct KeptLocks {
    /// The lock files.
    pub files: Vec<KeptLockFile>,
    /// Locks of programs on each file. If the earlier firnd died while it changed an owner's locks, the list may have
    /// both the old and the new locks.
    pub locks: HashMap<LockFileKey, Vec<HeldLock>>,
}

/// What [`FileLocks::start`] needs.
pub struct LockSetup<B: Backing> {
    /// The backing.
    pub base: B,
    /// The directory with the lock files ([`FILE_LOCKS`]).
    pub dir: B::Inode,
    /// Name of this host.
    pub host: String,
    /// Returns the other living hosts. Called at intervals, to check whether locks reach these hosts.
    pub other_hosts: OtherHosts,
    /// Keeps the locks for the next firnd; then only [`FileLocks::stop`] releases them. `None`: they end with this
    /// firnd.
    pub keeping: Option<Box<dyn LockKeeping>>,
    /// Locks of an earlier firnd, which this one takes over.
    pub kept: KeptLocks,
}

/// The locks of one mount.
pub struct FileLocks {
    shared: Arc<Shared>,
    /// Whether a drop of this value releases all locks.
    stops_on_drop: bool,
}

/// State that the requests share with the lock thread.
struct Shared {
    state: Mutex<FileLocksState>,
    changed: Condvar,
}

#[derive(Default)]
struct FileLocksState {
    jobs: Vec<Job>,
    /// Callbacks of requests that are not granted yet, by the number of their ticket.
    waiting: HashMap<u64, ResultCallback>,
    last_number: u64,
    /// Programs that hold granted locks, by the locked file and the kind of lock. [`FileLocks::is_held`] reads them.
    holders: HashMap<LockFileKey, Vec<Owner>>,
    /// Whether the lock thread must end after the queued jobs.
    is_stopping: bool,
    /// Whether new requests are refused.
    is_closed: bool,
    /// Whether the lock thread has ended and has released all locks.
    has_ended: bool,
}

/// Identifies a waiting request, so that it can be interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LockRequestId(u64);

impl LockRequestId {
    /// Returns the unique number of the ticket. On mounts without a [`LockKeeping`] it can also serve as the number of
    /// an owner that locks only once.
    pub fn number(self) -> u64 {
        self.0
    }
}

impl FileLocks {
    /// Starts the service that locks files for programs of this host. One new thread makes all its lock calls of the
    /// backing. Fails if the thread cannot be started.
    ///
    /// The service also continues the locks in `setup.kept`, which firnd, the process that serves the mount, held
    /// before it was restarted. With a [`LockKeeping`], the locks outlive the returned value; otherwise a drop of the
    /// value releases them.
    pub fn start<B: Backing + 'static>(setup: LockSetup<B>) -> io::Result<Arc<Self>> {
        let mut holders = HashMap::new();
        for (key, locks) in &setup.kept.locks {
            holders.insert(*key, locks.iter().map(|lock| lock.owner).collect());
        }
        let state = FileLocksState {
            holders,
            ..FileLocksState::default()
        };
        let stops_on_drop = setup.keeping.is_none();
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let mut thread = LockThread::new(setup, Arc::clone(&shared));
        std::thread::Builder::new()
            .name("firn-locks".into())
            .spawn(move || thread.run())?;
        Ok(Arc::new(Self {
            shared,
            stops_on_drop,
        }))
    }

    /// Returns a service that refuses every lock with ENOLCK, for a host that may not write to the backing.
    pub fn refused() -> Arc<Self> {
        let state = FileLocksState {
            is_closed: true,
            has_ended: true,
            ..FileLocksState::default()
        };
        Arc::new(Self {
            shared: Arc::new(Shared {
                state: Mutex::new(state),
                changed: Condvar::new(),
            }),
            stops_on_drop: true,
        })
    }

    /// Returns a new ticket for a request.
    pub fn next_ticket(&self) -> LockRequestId {
        let mut state = self.shared.state.lock();
        state.last_number += 1;
        LockRequestId(state.last_number)
    }

    /// Registers a request before [`FileLocks::acquire`], so that it can be interrupted from now on.
    pub fn register(&self, ticket: LockRequestId, done: ResultCallback) {
        self.shared.state.lock().waiting.insert(ticket.0, done);
    }

    /// Requests the lock `wanted`. The result goes to the callback that was registered for `ticket`.
    pub fn acquire(&self, ticket: LockRequestId, wanted: WantedLock, on_conflict: OnConflict) {
        self.shared.send(Job::Acquire {
            number: ticket.0,
            wanted,
            on_conflict,
        });
    }

    /// Ends a waiting request with EINTR. Returns false if the request has ended already.
    pub fn interrupt(&self, ticket: LockRequestId) -> bool {
        self.fail(ticket, Errno::INTR)
    }

    /// Ends a waiting request with `errno`. Returns false if the request has ended already.
    pub fn fail(&self, ticket: LockRequestId, errno: Errno) -> bool {
        self.shared.answer(ticket.0, Err(errno))
    }

    /// Releases locks of a file. Before this call the caller must make its writes under these locks visible to other
    /// hosts.
    pub fn release(&self, file: u64, kind: LockKind, locks: ReleasedLocks, done: ResultCallback) {
        self.shared.send(Job::Release {
            key: LockFileKey { file, kind },
            locks,
            done,
        });
    }

    /// Returns whether there are locks that [`FileLocks::release`] of `locks` would release. Makes no call of the
    /// backing.
    pub fn is_held(&self, file: u64, kind: LockKind, locks: ReleasedLocks) -> bool {
        let state = self.shared.state.lock();
        let Some(holders) = state.holders.get(&LockFileKey { file, kind }) else {
            return false;
        };
        holders.iter().any(|owner| match locks {
            ReleasedLocks::Range(number, _) | ReleasedLocks::Owner(number) => {
                owner.number == number
            }
            ReleasedLocks::Handle(handle) => owner.handle == handle,
        })
    }

    /// Looks for a lock that conflicts with `wanted`, and passes it to `done`.
    pub fn test(&self, wanted: WantedLock, done: TestCallback) {
        self.shared.send(Job::Test { wanted, done });
    }

    /// Releases all locks, and removes lock files that no other host needs. Waits for at most `timeout`.
    pub fn stop(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let mut state = self.shared.state.lock();
        state.is_stopping = true;
        self.shared.changed.notify_all();
        while !state.has_ended {
            let remaining_time = deadline.saturating_duration_since(Instant::now());
            if remaining_time.is_zero() {
                return;
            }
            state.wait_for(&self.shared.changed, remaining_time);
        }
    }
}

impl Drop for FileLocks {
    fn drop(&mut self) {
        if self.stops_on_drop {
            self.shared.state.lock().is_stopping = true;
            self.shared.changed.notify_all();
        }
    }
}

impl Shared {
    /// Queues a job for the lock thread. Refuses the job if new requests are refused.
    fn send(&self, job: Job) {
        let refused_job = {
            let mut state = self.state.lock();
            if state.is_closed {
                Some(job)
            } else {
                state.jobs.push(job);
                None
            }
        };
        self.changed.notify_all();
        if let Some(job) = refused_job {
            self.refuse(job);
        }
    }

    /// Answers a job of a mount that has no locks. Nothing is left to release, so a release succeeds.
    fn refuse(&self, job: Job) {
        match job {
            Job::Acquire { number, .. } => drop(self.answer(number, Err(Errno::NOLCK))),
            Job::Release { done, .. } => done(Ok(())),
            Job::Test { done, .. } => done(Err(Errno::NOLCK)),
        }
    }

    /// Ends a request with `outcome`. Returns false if the request has ended already.
    fn answer(&self, number: u64, outcome: Result<(), Errno>) -> bool {
        let done = self.state.lock().waiting.remove(&number);
        let Some(done) = done else {
            return false;
        };
        done(outcome);
        true
    }

    /// Returns whether a request is neither answered nor interrupted.
    fn is_waiting(&self, number: u64) -> bool {
        self.state.lock().waiting.contains_key(&number)
    }

    /// Stores the owners of the locks of a file.
    fn set_holders(&self, key: LockFileKey, holders: Vec<Owner>) {
        let mut state = self.state.lock();
        if holders.is_empty() {
            state.holders.remove(&key);
        } else {
            state.holders.insert(key, holders);
        }
    }
}
