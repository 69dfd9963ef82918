//! Benchmarks of Firn and of its baselines, and the tools with which they measure.
//!
//! The program `firn-bench` has a subcommand for each benchmark. The modules are a library so that programs with other
//! benchmarks can measure, report and clean up in the same way.

pub mod backing;
pub mod checkpoint;
pub mod commit;
pub mod cpu;
mod discard;
pub mod drain;
pub mod durable;
pub mod firn;
pub mod ingest;
pub mod machine;
pub mod meta;
pub mod network;
pub mod options;
pub mod program;
pub mod pull;
pub mod read;
pub mod report;
pub mod restart;
pub mod serve;
pub mod sizes;
pub mod spill;
pub mod supervisor;
pub mod takeover;
pub mod worker;
