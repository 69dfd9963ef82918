//! Partner copies: files that a host holds in its memory are copied to the memory of a second host, its *partner*.
//!
//! *firnd* is the process that serves the mount on each host. The *agent* is a process beside it that serves the
//! mount's files to other hosts.
//!
//! The source host chooses a partner and asks its agent (`Adopt`). The partner connects back (`Follow`). It then lists
//! the files that the source has only in memory (`ListHeld`), copies them, and reports each copy (`Mark`), again and
//! again. The reports count until this connection closes.
//!
//! ```text
//!   source host                                          partner host
//!   chooses by the ring ─── Adopt ─────────────────────► agent begins to follow the source
//!   Follow ◄──────────────────────────────────────────── opens a connection
//!   firnd: held files ──── ListHeld ───────────────────► copies closed files that are unchanged since the last list
//!   firnd: file is safe ◄─ Mark path, changes ────────── has a complete copy
//! ```
//!
//! Modules: `ring` orders the hosts, and `choice` chooses the partner among them. `service` is the state that all
//! connections of an agent share. `held` follows a source. `copies` stores all copies; `copy` is one of them, and
//! `record` describes its files.
//!
//! Promises
//! * A file is marked only after a complete copy of its directory, with the same number of changes, was renamed into
//!   the partner's directory of copies.
//! * A copy is removed in three cases only. The source has the same arena and no longer holds the files; or the source
//!   has another partner with copies of all held files; or the backing has every byte of the copy.
//! * No writer waits for a partner. A failed step is tried again, and the status of the source shows the problem.

mod choice;
mod copies;
mod copy;
mod held;
mod record;
mod ring;
mod service;

pub(crate) use choice::run_partner_search;
pub(crate) use copies::CopyStore;
pub(crate) use copy::CopyFile;
pub use ring::{Domains, DomainsError};
pub(crate) use service::{PartnerService, RegisteredFollower, Registration, Role};
