//! The I/O threads, which write pending bytes from the arena (shared memory) to the backing (the directory that the
//! mount serves).
//!
//! The engine decides what is written next ([`firn_engine::Drainer::pick`]) and what a result means
//! ([`firn_engine::Drainer::complete`]). This crate decides which thread does it and how much it writes at once. A lane
//! is one I/O server. The engine has a queue for each lane, which gives the files and their order. One set of threads
//! serves all lanes (`io_thread_set::IoThreadSet`), each lane within its limits (`lane_scheduler::LaneScheduler`).
//! [`Pool`] combines all of this and is the engine's executor.
//!
//! If the option `drain-cpu` asks for it, drains that no caller waits for leave the CPUs to programs
//! (`pacer::Pacer`).
//!
//! Several hosts can ensure that only one of them writes to a lane at a time (`firn_hosts::tokens`): each lane has a
//! *token*, which one host holds. A thread enters the token of a lane before it picks, and leaves it after it has
//! completed the job. A picked range blocks a truncation of its file. A thread therefore never waits between `pick` and
//! `execute`. No thread waits for the service of the tokens.

mod cpu;
mod idle_threads;
mod io_thread_set;
mod lane_scheduler;
mod pacer;
mod pool;
mod worker;

pub use pool::{IoThreads, Pool};
