//! System tests of the built `firn` binary: fixtures that mount, break and compare.
//!
//! The tests under `tests/` see Firn only as a user does: through the command line, the mount and the
//! backing directory. This library gives them loop images, mounts that clean up after themselves,
//! a random-operation driver, writers that remember what was acknowledged, and a backing that fails
//! on command. Layers, flags and campaigns: docs/TESTING.md.
//!
//! Promises of the fixtures
//! * What a fixture mounts, attaches or starts is gone when it is dropped, also after a panic.
//! * Only processes that a fixture started are killed, by their process id.
//! * A test that hangs is ended by its watchdog, which prints the state first.

pub mod ack;
pub mod agent;
pub mod c;
pub mod change;
pub mod chunks;
pub mod command;
pub mod data_socket;
pub mod differential;
pub mod etcd;
pub mod faultfs;
pub mod fsops;
pub mod hand;
pub mod image;
pub mod lanes;
pub mod layers;
pub mod mount;
pub mod page;
pub mod powerfs;
pub mod preloaded;
pub mod random;
pub mod replay;
pub mod rule_model;
pub mod sandbox;
pub mod scripts;
pub mod sshd;
pub mod stop;
pub mod striped;
pub mod suite;
pub mod terminal;
pub mod trace;
pub mod transaction;
pub mod tree;
pub mod watchdog;

pub use command::{Outcome, run, wait_until};
pub use hand::Hand;
pub use image::{FsKind, LoopImage};
pub use lanes::LaneImages;
pub use layers::Layers;
pub use mount::FirnMount;
pub use random::seed;
pub use sandbox::{Sandbox, helper_binary, requires_root_and_fuse};
