//! Several hosts, one backing: what the processes of each read and wrote in a transaction, and whether that
//! goes together (CprFS, section 5).
//!
//! A host's firnd keeps a [`Log`] of ranges for each file and process. Before a commit each host publishes its
//! [`Published`] list, and each tests all lists with [`test()`]. A *conflict* is a part of a file that processes of two
//! hosts access, one of them for writing, or a name that one host changed and another changed or used. All hosts have
//! the same lists and come to the same result.
//!
//! Promises
//! * Two processes of one host never conflict: they see each other's changes.
//! * The test takes `O(n log n)` in the number of ranges, and as much more as there is to report.

mod list;
mod log;
mod ranges;
mod test;

pub use list::{File, ListError, Name, Process, Published, SEAL};
pub use log::{Access, Accesses, Log, Used};
pub use ranges::Ranges;
pub use test::{Conflict, Party, Report, What, test};
