//! Tokens of lanes: one host at a time writes to an I/O server.
//!
//! A lane's token is a lock that all hosts over a backing know. A drain asks for it before it picks work, holds it for
//! a batch, and gives it back so that the next host has its turn. Where the locks are kept is a [`LockService`]:
//!
//! * [`FlockService`]: files of Firn's own in the backing, for file systems whose locks reach all hosts.
//! * `firn-etcd`: etcd, over its JSON gateway, for the others.
//!
//! Promises
//! * A token is advice about time and never about truth: no byte depends on it. Two writers on a server are slow, not
//!   wrong.
//! * No lane waits longer than [`Limits::wait`] for a service that does not answer or a holder that does not go on.
//!   From then on the lane goes on without its token, says so, and asks again ever more rarely.
//! * No caller waits in a call of the service. Each lane has a thread that makes them ([`LaneToken`]), and which may
//!   hang.
//! * What is asked for is taken back, and what is held is given back, when the tokens are stopped; that is waited for
//!   for a moment only.
//!
//! docs/internals/tokens.md has the picture.

mod flock;
mod keeper;
mod place;
mod service;
mod turn;

pub use flock::FlockService;
pub use keeper::{LaneToken, Tokens};
pub use place::{find_group, make_dir};
pub use service::{Asked, Behind, LockService, ServiceError};
pub use turn::{Limits, Permit, TokenFigures, TokenState, Use, WAITS_MAX};
