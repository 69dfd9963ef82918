//! The parts that a mount may have. A part starts and stops one feature or resource of the mount, such as a socket.
//!
//! `attach.rs` decides which parts exist before programs use the mount, `assembly.rs` decides the rest. `firn recover`
//! has the parts of `attach.rs`, except [`SteeredLanes`] (`lower_store.rs`) and [`Peers`].

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

pub(crate) use arena::{ArenaFile, ArenaMemory, count_remaining_bytes};
pub(crate) use backup::BackupRounds;
pub(crate) use data_socket::DataClients;
pub(crate) use drain::{IoThreads, LastDrain};
pub(crate) use file_locks::LocksOfFiles;
pub(crate) use frontends::{FuseRequests, StubNames};
pub(crate) use held::{HeldLocks, HeldValue};
pub(crate) use host_report::HostReports;
pub(crate) use lanes::{PlacedLanes, SteeredLanes};
pub(crate) use logs::{ReadLogs, WrittenLogs};
pub(crate) use participants::Participation;
pub(crate) use partner::PartnerCopies;
pub(crate) use peers::Peers;
pub(crate) use record::{Record, WaitingWriters};
pub(crate) use traffic::Traffic;
pub(crate) use transactions::{InvalidateCache, Transactions};
