//! The parts that a mount may have, each over what it works with.
//!
//! Which of them a mount has, and in which order, is said where they are put together: `attach.rs` for those that are there
//! before programs come, `assembly.rs` for the others. `firn recover` has those of `attach.rs` but for [`SteeredLanes`]
//! (`ground.rs`) and [`Peers`].

mod arena;
mod backup;
mod data_socket;
mod drain;
mod file_locks;
mod frontends;
mod held;
mod host_report;
mod lanes;
mod logs;
mod participants;
mod partner;
mod peers;
mod record;
mod traffic;
mod transactions;

pub(crate) use arena::{ArenaFile, ArenaMemory, count_left_bytes};
pub(crate) use backup::BackupRounds;
pub(crate) use data_socket::DataClients;
pub(crate) use drain::{IoThreads, LastDrain};
pub(crate) use file_locks::LocksOfFiles;
pub(crate) use frontends::{FuseRequests, StubNames};
pub(crate) use held::{Held, HeldLocks};
pub(crate) use host_report::HostReports;
pub(crate) use lanes::{PlacedLanes, SteeredLanes};
pub(crate) use logs::{ReadLogs, WrittenLogs};
pub(crate) use participants::Participation;
pub(crate) use partner::PartnerCopies;
pub(crate) use peers::Peers;
pub(crate) use record::{Record, WaitingWriters};
pub(crate) use traffic::Traffic;
pub(crate) use transactions::{Forget, Transactions};
