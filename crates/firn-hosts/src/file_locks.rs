//! Locks that programs have of files, and that keep out programs on other hosts.
//!
//! ```text
//! .firn/locks/
//!   INO         bytes that programs of a host have locked by fcntl(2), of the file with this inode number
//!   INO.flock   the same for flock(2): these locks and the ones before do not know of each other
//!   INO.end     the end of that file: an appending host has it locked until others can see what it appended
//!   host-NAME   locked by that host as long as it lives
//! ```
//!
//! A host locks a range of `INO` while any of its programs has it, and decides itself which of them has it ([`Table`]).
//! It never waits in the file system: locks are tried, so that a waiting program can be interrupted.
//!
//! A lock of byte *n* is one of byte *n* of `INO`. A host that waits for a lock stands *in line*: it has byte *n* +
//! 2^62 locked. A host that comes later lets it go first, though not for longer than [`POLITE_FOR`]: a host in line may
//! itself wait for a program that comes later. So a host that locks again and again does not keep out the others.
//!
//! Promises
//! * Of two programs on any hosts that have bytes of a file locked, both share them, as far as locks of the backing reach.
//! * Where it is seen that they do not reach a host that lives, or where there are none, each request fails with ENOLCK.
//! * Locks of a host end with its firnd, however that ends.
//! * A lock file is removed only under a lock of all of it, and a host that locks one checks afterwards whether it
//!   still has its name.
//!
//! All calls of the backing are made by one thread, `firn-locks`, so nothing else waits for a server that hangs.

mod keeper;
mod table;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::lock::Mutex;
use firn_backing::{Backing, Errno, LockMode, LockRange};
use parking_lot::Condvar;

use self::keeper::{Job, Keeper};
pub use self::table::Owner;

#[cfg(doc)]
use self::keeper::POLITE_FOR;
#[cfg(doc)]
use self::table::Table;

/// In `.firn/`.
pub const FILE_LOCKS: &str = "locks";

/// Called once with the outcome.
pub type Done = Box<dyn FnOnce(Result<(), Errno>) + Send>;

/// Called once with a lock that conflicts, if there is one.
pub type TestDone = Box<dyn FnOnce(Result<Option<InTheWay>, Errno>) + Send>;

/// Kind of a file's locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// Locks of fcntl(2).
    Bytes,
    /// The lock of flock(2).
    Flock,
    /// That of the end, which is one whatever the range is.
    End,
}

/// A lock that a program wants.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Inode number of the file.
    pub file: u64,
    /// Kind of the lock.
    pub space: Space,
    /// The program.
    pub owner: Owner,
    /// The locked bytes.
    pub range: LockRange,
    /// Shared or exclusive.
    pub mode: LockMode,
}

/// What is to be let go of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    /// These bytes of one owner.
    Range(u64, LockRange),
    /// All of one owner.
    Owner(u64),
    /// All that was taken through one open file.
    Handle(u64),
}

/// A lock that is in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InTheWay {
    /// Bytes of it.
    pub range: LockRange,
    /// How it is held.
    pub mode: LockMode,
    /// The process, if it is one of this host.
    pub pid: Option<u32>,
}

/// Names the other hosts that live and may lock files in this backing.
pub type OtherHosts = Box<dyn Fn() -> Result<Vec<String>, Errno> + Send>;

/// The locks of one mount.
pub struct FileLocks {
    shared: Arc<Shared>,
}

/// What requests and the thread have in common.
struct Shared {
    state: Mutex<FileLocksState>,
    changed: Condvar,
}

#[derive(Default)]
struct FileLocksState {
    jobs: Vec<Job>,
    /// Requests that are not granted yet, by the number that they can be interrupted by.
    waiting: HashMap<u64, Done>,
    last_number: u64,
    /// Owners of locks, by file.
    holders: HashMap<(u64, Space), Vec<Owner>>,
    is_stopping: bool,
    /// Nothing is taken any more.
    is_closed: bool,
    has_ended: bool,
}

/// A request that waits, to be interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

impl Ticket {
    /// Tells it from every other one: a number for an owner that locks once.
    pub fn number(self) -> u64 {
        self.0
    }
}

impl FileLocks {
    /// Locks in `dir` ([`FILE_LOCKS`]) for programs of the host of this name. `other_hosts` is asked once in a while whether
    /// locks reach them.
    pub fn start<B: Backing + 'static>(
        base: B,
        dir: B::Inode,
        host: &str,
        other_hosts: OtherHosts,
    ) -> io::Result<Arc<Self>> {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let mut keeper = Keeper::new(base, dir, host, other_hosts, Arc::clone(&shared));
        std::thread::Builder::new()
            .name("firn-locks".into())
            .spawn(move || keeper.run())?;
        Ok(Arc::new(Self { shared }))
    }

    /// Refuses every lock with ENOLCK: for a host that may not write to the backing.
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
        })
    }

    /// For a request that is to come.
    pub fn next_ticket(&self) -> Ticket {
        let mut state = self.shared.state.lock();
        state.last_number += 1;
        Ticket(state.last_number)
    }

    /// Takes note of a request that is to come ([`FileLocks::acquire`]), so that it can be interrupted from now on.
    pub fn register(&self, ticket: Ticket, done: Done) {
        self.shared.state.lock().waiting.insert(ticket.0, done);
    }

    /// Takes `wanted` for the request. Without `waits` it fails with EAGAIN where another lock is in the way.
    pub fn acquire(&self, ticket: Ticket, wanted: Wanted, waits: bool) {
        self.shared.send(Job::Acquire {
            number: ticket.0,
            wanted,
            waits,
        });
    }

    /// Ends a request that is not granted yet with EINTR; false where it is.
    pub fn interrupt(&self, ticket: Ticket) -> bool {
        self.fail(ticket, Errno::INTR)
    }

    /// Ends a request that is not granted yet with `errno`; false if it is granted.
    pub fn fail(&self, ticket: Ticket, errno: Errno) -> bool {
        self.shared.answer(ticket.0, Err(errno))
    }

    /// Lets go of locks of a file. What was written under them is to be seen by other hosts before.
    pub fn release(&self, file: u64, space: Space, what: Released, done: Done) {
        self.shared.send(Job::Release {
            file,
            space,
            what,
            done,
        });
    }

    /// Whether there is something to release. Makes no call of the backing.
    pub fn is_held(&self, file: u64, space: Space, what: Released) -> bool {
        let state = self.shared.state.lock();
        let holders = state.holders.get(&(file, space));
        holders.is_some_and(|holders| {
            holders.iter().any(|owner| match what {
                Released::Range(of, _) | Released::Owner(of) => owner.number == of,
                Released::Handle(handle) => owner.handle == handle,
            })
        })
    }

    /// Looks what is in the way of a lock.
    pub fn test(&self, wanted: Wanted, done: TestDone) {
        self.shared.send(Job::Test { wanted, done });
    }

    /// Releases everything, and removes lock files that no other host needs. Waits for that at most `patience`.
    pub fn stop(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let mut state = self.shared.state.lock();
        state.is_stopping = true;
        self.shared.changed.notify_all();
        while !state.has_ended {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state.wait_for(&self.shared.changed, left);
        }
    }
}

impl Drop for FileLocks {
    fn drop(&mut self) {
        self.shared.state.lock().is_stopping = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn send(&self, job: Job) {
        let refused = {
            let mut state = self.state.lock();
            if state.is_closed {
                Some(job)
            } else {
                state.jobs.push(job);
                None
            }
        };
        self.changed.notify_all();
        match refused {
            None => {}
            Some(Job::Acquire { number, .. }) => drop(self.answer(number, Err(Errno::NOLCK))),
            Some(Job::Release { done, .. }) => done(Ok(())),
            Some(Job::Test { done, .. }) => done(Err(Errno::NOLCK)),
        }
    }

    /// Ends a request; false if it was ended before.
    fn answer(&self, number: u64, outcome: Result<(), Errno>) -> bool {
        let done = self.state.lock().waiting.remove(&number);
        match done {
            Some(done) => {
                done(outcome);
                true
            }
            None => false,
        }
    }

    fn is_waiting(&self, number: u64) -> bool {
        self.state.lock().waiting.contains_key(&number)
    }

    fn set_holders(&self, key: (u64, Space), holders: Vec<Owner>) {
        let mut state = self.state.lock();
        match state.holders.entry(key) {
            Entry::Occupied(entry) if holders.is_empty() => drop(entry.remove()),
            Entry::Occupied(mut entry) => *entry.get_mut() = holders,
            Entry::Vacant(_) if holders.is_empty() => {}
            Entry::Vacant(entry) => drop(entry.insert(holders)),
        }
    }
}
