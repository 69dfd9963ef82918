//! Lanes and their IO threads: carry pieces from the arena to the backing.
//!
//! The engine decides what is written next ([`firn_engine::Engine::pick`]) and what a result means
//! ([`firn_engine::Engine::complete`]). This crate decides who does it and how much at once. A `lane::Lane` is one I/O
//! server: a set of threads, the limits of what they pick, and the place where they sleep. The order in which files are
//! served is that of the lane's queue in the engine, first in, first out. [`Pool`] has all lanes of a mount, and is the
//! engine's executor.
//!
//! What nobody waits for leaves the CPUs to programs (`pacer::Pacer`), where the option `drain-cpu` asks for it.
//!
//! A token that gives a lane one writer among several hosts belongs into `lane::Lane`, around `pick`: asked for when
//! the lane has work, before anything is picked, and given back when nothing is in work. A picked range blocks a
//! truncation of its file, so nothing may be waited for between `pick` and `execute`.

mod cpu;
mod lane;
mod pacer;
mod pool;
mod sleepers;

pub use pool::{IoThreads, Pool};
