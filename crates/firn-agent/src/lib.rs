//! Checkpoints leave a host without their writer (CRUISE, section 4.6).
//!
//! ```text
//!   source host                                    target host
//!   firnd ◄─ chunk lists ─ agent ══ Transport ══ puller ─► staging directory ─ rename ─► DIR
//!   arena ───────── sendfile ──┘                    └─ writes behind, on threads
//! ```
//!
//! The *agent* ([`Agent`]) is an ordinary client of firnd: it maps the arena for reading, holds chunk lists of what it
//! is asked for and may be killed at any time. The *puller* ([`pull()`]) asks, checks and writes. A *follower* pulls what
//! becomes complete, again and again: for `firn pull --follow` ([`follow()`]), and as the partner of another host.
//!
//! Promises
//! * What a pull leaves under its name is whole: every byte was authenticated, every file was checked against its
//!   list after its last byte was read, and the name appears by one rename.
//! * Neither side believes a peer without the key. Until the peer has shown it, an agent takes at most
//!   [`message::HANDSHAKE_BYTES_MAX`] bytes and [`server::HANDSHAKE_LIMIT`] from any peer.
//! * Whatever an agent says, a puller takes bounded memory for it, and gives up what does not go on.
//! * What an agent holds of the arena ends with the connection for which it holds it, and is bounded
//!   ([`holds::Holds`]). Nothing is queued: a request is answered before the next one is read.
//! * No writer waits for an agent.
//!
//! Protocol, crash behaviour, authentication: docs/internals/agent.md.

mod auth;
mod block_mac;
mod copy_directory;
mod data_cipher;
mod data_path;
mod encryption;
mod error;
mod exposure;
mod follow;

pub mod holds;
mod key_file;
mod link;
pub mod message;
mod munge;
pub mod ofi;
mod origin;
mod partner;
mod peer;
mod pull;
mod sealed;
pub mod server;
mod session;
mod source;
mod strangers;
mod transport;
mod transport_choice;
mod units;

pub use auth::{Key, Terms, answer_handshake, begin_handshake};
pub use block_mac::{BlockHasher, BlockMac};
pub use encryption::{Encrypt, Encryption, Side};
pub use error::{AgentError, PullError, WireError};
pub use follow::newest::{FollowEvent, FollowRequest, follow};
pub use key_file::{KeyFile, KeyFileError, check_host};
pub use link::Link;
pub use munge::Munge;
pub use partner::{Domains, DomainsError};
pub use peer::{Peer, Route};
pub use pull::{
    Listed, Outcome, Progress, PullRequest, PullSource, check_list, list, list_entries, pull,
};
pub use server::{Agent, AgentOptions, Level, Log};
pub use transport::{Stream, Transport};
pub use transport_choice::{Carriage, TransportChoice};
