//! IO threads: carry pieces from the arena to the backing.
//!
//! The engine decides what is written next ([`firn_engine::Drainer::pick`]) and what a result means
//! ([`firn_engine::Drainer::complete`]). This crate decides which thread does it and how much at once. A lane is one
//! I/O server. The queue of a lane in the engine gives its files and their order. One set of threads serves all lanes
//! (`crew::Crew`), each lane within its limits (`board::Board`). [`Pool`] is the whole, and is the engine's executor.
//!
//! Drains without waiters leave the CPUs to programs (`pacer::Pacer`), where the option `drain-cpu` asks for it.
//!
//! Several hosts can give each lane one writer among them (`firn_hosts::tokens`): a thread enters a lane's token before it
//! picks, and leaves it after it has completed. A picked range blocks a truncation of its file, so nothing may be waited
//! for between `pick` and `execute`; no thread waits for a service of tokens.

mod board;
mod cpu;
mod crew;
mod pacer;
mod pool;
mod sleepers;
mod worker;

pub use pool::{IoThreads, Pool};
