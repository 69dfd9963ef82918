//! Partner copies: what a host holds is also in the memory of another one.
//!
//! ```text
//!   source host                                          partner host
//!   ring: which is next? ── Adopt ─────────────────────► agent follows it
//!   Follow ◄──────────────────────────────────────────── its connection; what it marks ends with it
//!   firnd: held files ──── ListHeld ───────────────────► complete, and the same as at the last look? pull
//!   firnd: `partnered` ◄── Mark path, changes ────────── the copy is whole
//! ```
//!
//! Promises
//! * A file is marked only after a whole copy of its directory, made when it had the same number of changes, has its
//!   name on the shelf of the partner.
//! * A copy is removed in three cases only: its source, with the same arena, holds nothing of it any more; the source
//!   has another partner that has copies of all that it holds; or every byte of the copy was found in the backing.
//! * No writer waits for any of it; whatever fails is tried again, and the status of the source says what is wrong.

mod choice;
mod copies;
mod copy;
mod desk;
mod held;
mod record;
mod ring;

pub(crate) use choice::choose_partners;
pub(crate) use copies::Copies;
pub(crate) use copy::CopyFile;
pub(crate) use desk::{Desk, Role, Seat};
pub use ring::{Domains, DomainsError};
