//! Partner copies: files that a host holds in its memory are copied to the memory of a second host, its *partner*.
//!
//! ```text
//!   source host                                          partner host
//!   ring: which is next? ── Adopt ─────────────────────► agent begins to follow the source
//!   Follow ◄──────────────────────────────────────────── a connection; marks end when it closes
//!   firnd: held files ──── ListHeld ───────────────────► a file that is complete and unchanged since the last poll: pull
//!   firnd: `partnered` ◄── Mark path, changes ────────── the copy is whole
//! ```
//!
//! Promises
//! * A file is marked only after a copy of its directory is complete: made at the same count of changes, and renamed into the
//!   partner's directory of copies.
//! * A copy is removed in three cases only: its source, with the same arena, holds nothing of it any more; the source
//!   has another partner that has copies of all that it holds; or every byte of the copy was found in the backing.
//! * No writer waits for a partner. A step that fails is tried again, and the status of the source says what is wrong.

mod choice;
mod copies;
mod copy;
mod held;
mod record;
mod ring;
mod service;

pub(crate) use choice::choose_partners;
pub(crate) use copies::Copies;
pub(crate) use copy::CopyFile;
pub use ring::{Domains, DomainsError};
pub(crate) use service::{PartnerService, Registration, Role};
