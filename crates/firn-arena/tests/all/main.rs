//! All tests of `firn-arena` but those beside its source, in one program.

mod arena;
mod client;
mod create;
mod journal;
mod journal_growth;
mod memory_files;
mod numa;
mod spill;
