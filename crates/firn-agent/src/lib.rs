//! Copies files from the memory of one host to another host, without involving the process that wrote them. The design
//! follows section 4.6 of the paper on CRUISE, a checkpoint file system in memory.
//!
//! ```text
//!   source host                                    target host
//!   firnd ◄─ chunk lists ─ agent ══ Transport ══ puller ─► staging directory ─ rename ─► DIR
//!   arena ───────── sendfile ──┘                    └─ threads that write blocks to the disk
//! ```
//!
//! Terms
//! * *firnd*: the process that serves a mount.
//! * *arena*: its shared memory with the bytes that are not in the backing (the served directory) yet. *Held* files
//!   have such bytes.
//! * *chunk list*: says where each byte of a file is. While a client holds the list, its bytes in memory do not change.
//!
//! The *agent* ([`Agent`]) is an ordinary client of firnd. It maps the arena for reading and holds chunk lists of the
//! requested files. It may be killed at any time. The *puller* ([`pull()`]) requests files, checks them and writes
//! them. A *follower* pulls checkpoints as they become complete: for `firn pull --follow` ([`follow()`]), or as the
//! *partner* of another host, which keeps copies of that host's held files in memory.
//!
//! Promises
//! * A copy is complete when it gets its name. Before that, each byte was authenticated, and each file was checked
//!   against its chunk list after its last byte was read. The name appears by one rename.
//! * Neither side accepts a peer without the key. An agent reads frames of at most [`message::HANDSHAKE_BYTES_MAX`]
//!   bytes from such a peer, for at most [`server::HANDSHAKE_TIMEOUT`].
//! * The memory that a puller uses for an agent is bounded, whatever the agent sends. A pull without progress is
//!   abandoned.
//! * The memory that an agent holds of the arena is bounded ([`hold_budget::HoldBudget`]). It is released when the
//!   connection ends for which it is held. An agent queues no requests: it answers each one before it reads the next
//!   one.
//! * No writer waits for an agent.
//!
//! Protocol, crash behaviour and authentication: docs/internals/agent.md.

mod auth;
mod block_mac;
mod copy_directory;
mod data_cipher;
mod data_path;
mod encryption;
mod error;
mod exposure;
mod follow;

pub mod hold_budget;
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
mod transport;
mod transport_choice;
mod unauthenticated;
mod units;

pub use auth::{HandshakeInputs, Key, answer_handshake, begin_handshake};
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
    Outcome, Progress, PullRequest, PullSource, UnitTotals, check_list, list, list_entries, pull,
};
pub use server::{Agent, AgentOptions, Level, Log};
pub use transport::{Stream, Transport};
pub use transport_choice::{DataTransport, TransportChoice};
