//! Coordination of hosts that share a *backing*, the directory that a mount serves, and have no other connection. This
//! crate lets them take a decision together, lock files against each other, and detect which hosts are alive.
//!
//! * [`own`]: opens and checks the files and directories that Firn keeps in a backing.
//! * [`VoteDir`]: a directory for one decision. A *put-once* file has the content of exactly one host. Files with a
//!   host's name in their name record the progress of that host.
//! * [`Ballot`]: one decision, from the first host that joins to the removal of its directory.
//! * [`Members`]: the hosts that take part, and the name of this host.
//! * [`Lease`]: lets one process at a time act in the name of a host. The lease is a locked file with a heartbeat
//!   counter; the lease ends when the process dies.
//! * [`HostWatch`]: detects which hosts are alive, among the hosts that use the backing for one purpose.
//! * [`tokens`]: let one host at a time write to an I/O server.
//! * [`FileLocks`]: file locks that programs of several hosts hold.
//! * [`PeerWatch`]: reads how the living hosts use the backing.
//! * [`survey()`]: looks at all hosts once, for a process that does not take part.
//! * [`check_reach`]: checks, as far as this host can see, that locks in this backing exclude other hosts.
//!
//! Promises
//! * No host is a coordinator. Any host may do any step, a step may be repeated, and a host may die in the middle of
//!   a step.
//! * No clock of one host is compared with a clock of another host. A heartbeat is a counter, and a waiting host
//!   measures its own time.
//! * No lock of this crate is held during a call of the backing.
//!
//! Relies on
//! * link(2) fails on every host if the name exists, also on file systems where create(O_EXCL) does not.
//! * A host that looks up a name again sees the names and the synced data of other hosts (close-to-open consistency).

pub mod ballot;
mod file_locks;
pub mod host_dir;
mod lease;
mod members;
pub mod own;
mod reach;
mod survey;
mod terms;
pub mod tokens;
mod vote;
mod watch;

pub use ballot::{
    Action, BALLOT_VERSION, Ballot, DecisionStep, ExclusiveWork, JoinStep, Joined, Participation,
    Plan, Progress, Protocol, Unit, View, Waiting,
};
pub use file_locks::{
    ConflictingLock, FILE_LOCKS, FileLocks, HeldLock, KeptLockFile, KeptLocks, LockFileKey,
    LockKeeping, LockKind, LockRequestId, LockSetup, OnConflict, OtherHosts, Owner, ReleasedLocks,
    ResultCallback, TestCallback, WantedLock,
};
pub use lease::{
    Heartbeat, Holder, LEASE_VERSION, Lease, LeaseError, LeaseUse, REPORT_BYTES_MAX, Report,
    STALE_AFTER,
};
pub use members::{Expected, MemberCheck, Members};
pub use own::OwnError;
pub use reach::{ReachError, check_reach, check_two_files};
pub use survey::{Evidence, Life, Survey, SurveyedHost, survey};
pub use terms::{Peer, PeerWatch, Peers, Terms, publish_terms};
pub use vote::VoteDir;
pub use watch::HostWatch;
