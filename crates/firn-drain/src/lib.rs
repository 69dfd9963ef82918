//! The I/O threads, which write pending bytes from the arena (shared memory) to the backing (the directory that the
//! mount serves).
//!
//! The engine decides what is written next ([`firn_engine::Drainer::pick`]) and what a result means
//! ([`firn_engine::Drainer::complete`]). This crate decides which thread does it and how much it writes at once. A lane
//! is one I/O server. The engine has a queue for each lane, which contains the files to write and decides their order.
//! One set of threads serves all lanes (`io_thread_set::IoThreadSet`). `lane_scheduler::LaneScheduler` limits the
//! number of threads that write to one lane. [`Pool`] starts and stops all threads, and gives the engine the executor
//! that wakes them.
//!
//! The option `drain-cpu` limits the CPU time of drains that no caller waits for (`pacer::Pacer`).
//!
//! Several hosts can ensure that only one of them writes to a lane at a time (`firn_hosts::tokens`): each lane has a
//! *token*, which one host holds. A thread begins its use of the token before it picks a job (a range of a file). It
//! ends the use after the job is completed.
//!
//! Rule: a thread never waits between `pick` and `execute`, because a picked range blocks a truncation of its file.

mod cpu;
mod idle_threads;
mod io_thread_set;
mod lane_scheduler;
mod pacer;
mod pool;
mod worker;

pub use pool::{IoThreads, Pool};
