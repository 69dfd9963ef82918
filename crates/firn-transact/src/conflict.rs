//! Conflicts between hosts that change one tree in a common transaction (section 5 of the paper on CprFS).
//!
//! Terms
//! * An *access* is a read or a write of a range of a file by a process of this host.
//! * An *access list* is what a host publishes before a commit: the ranges and names that its programs used, and the
//!   names and attributes that they changed ([`AccessList`]).
//! * A *conflict* is a range of a file that processes of two hosts access, one of them for writing, or a name or an
//!   attribute that one host changed and another host changed or used.
//!
//! firnd, the process that serves the mount, records accesses in an [`AccessLog`] while a transaction is open. At the
//! commit each host publishes its list and searches the lists of all hosts with [`find_conflicts`].
//!
//! Promises
//! * All hosts have the same lists and come to the same result.
//! * Two processes of one host never conflict, because they see each other's changes.
//! * The search takes `O(n log n)` for `n` ranges, and additional time for each conflict.

mod find;
mod list;
mod log;
mod ranges;

pub use find::{Conflict, ConflictKind, ConflictReport, ConflictSide, find_conflicts};
pub use list::{AccessList, AccessListError, ListedFile, ListedProcess, NameInDir, SEAL};
pub use log::{Access, AccessLog, AccessedFile, ProcessAccesses};
pub use ranges::{RangeSet, SetPart};
