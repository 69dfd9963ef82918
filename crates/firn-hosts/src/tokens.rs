//! Tokens: locks that let one host at a time write to an I/O server.
//!
//! Terms
//! * The *backing* is the directory, shared by several hosts, that a mount serves.
//! * A *lane* is one I/O server of the backing, with the threads of this host that write to it.
//! * The *token* of a lane is a lock that all hosts of a backing share.
//!
//! The threads of a lane request the token before they pick work. The host holds the token for one batch, and then
//! gives it back so that the next host has its turn. A [`LockService`] keeps the locks:
//!
//! * [`FlockService`]: lock files in the backing, for file systems whose locks reach all hosts.
//! * `firn-etcd`: etcd over its JSON gateway, for all other file systems.
//!
//! Promises
//! * Tokens affect speed only; the correctness of data never depends on them. Two hosts that write to one server at
//!   the same time are slow, but not wrong.
//! * If the service does not answer or the holder makes no progress, no lane waits longer than [`TokenLimits::wait`].
//!   Then the lane writes without its token, reports that, and requests the token again at growing intervals.
//! * No caller waits for a call of the service. Each lane has its own thread that makes these calls ([`LaneToken`]),
//!   and that thread may hang.
//! * When the tokens are stopped, open requests are withdrawn and held tokens are given back. The stop waits for that
//!   only a short time.
//!
//! docs/internals/tokens.md has a diagram.

mod flock;
mod keeper;
mod place;
mod service;
mod turn;

pub use flock::FlockService;
pub use keeper::{LaneToken, Tokens};
pub use place::{find_or_make_group, make_dir};
pub use service::{LockService, QueuePosition, ServiceError, TokenReply};
pub use turn::{Permit, TokenFigures, TokenLimits, TokenState, TokenUse, WAIT_FACTOR_MAX};
