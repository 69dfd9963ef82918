//! Hosts that share a backing and nothing else: how they agree on something, and how one knows that another lives.
//!
//! * [`own`]: files and directories of Firn's own in a backing, looked at before anything in them is believed.
//! * [`VoteDir`]: a directory for one decision. A *put-once* file has the content of exactly one host; files with a
//!   host's name say how far that host has come.
//! * [`Ballot`]: one decision, from the first host that takes part to the removal of its directory.
//! * [`Members`]: which hosts take part, and which of them this one is.
//! * [`Lease`]: one process at a time acts in the name of a host, and loses that when it dies: a lock on a file and a
//!   counted heartbeat in it.
//! * [`HostWatch`]: which hosts live, of those that use the backing for one thing.
//! * [`tokens`]: one host at a time writes to an I/O server.
//! * [`FileLocks`]: locks that programs of several hosts have of files.
//! * [`PeerWatch`]: how the hosts that live use the backing.
//! * [`survey()`]: one look at all hosts, by a process that takes no part.
//! * [`check_reach`]: whether locks in this backing exclude other hosts, as far as that can be seen from here.
//!
//! Promises
//! * No host is a coordinator: every step may be done by any host, repeated, and cut short by its death.
//! * Nothing depends on clocks of several hosts. A heartbeat is a count; a waiting host measures its own time.
//! * A call of the backing is made with no lock of this crate held.
//!
//! Relies on
//! * link(2) failing where the name exists, for all hosts: also where create(O_EXCL) does not.
//! * Names and synced data being seen by other hosts when they look them up anew (close-to-open).

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
    Action, Alone, BALLOT_VERSION, Ballot, DecisionStep, JoinStep, Joined, Plan, Presence,
    Progress, Protocol, Unit, View, Waiting,
};
pub use file_locks::{
    Done, FILE_LOCKS, FileLocks, InTheWay, OtherHosts, Owner, Released, Space, TestDone, Ticket,
    Wanted,
};
pub use lease::{
    Beat, Holder, LEASE_VERSION, Lease, LeaseError, LeaseUse, REPORT_BYTES_MAX, Report, STALE_AFTER,
};
pub use members::{Attendance, Expected, Members};
pub use own::OwnError;
pub use reach::{ReachError, check_reach, check_two_files};
pub use survey::{Evidence, HostSeen, Life, Survey, survey};
pub use terms::{Peer, PeerWatch, Peers, Terms, publish_terms};
pub use vote::VoteDir;
pub use watch::HostWatch;
