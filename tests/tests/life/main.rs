//! How a mount begins, ends, fails and comes back.

mod bad_input;
mod cli;
mod connections;
mod crash;
mod demo;
mod descriptors;
mod dist;
mod endings;
mod fixtures;
mod hangs;
mod history;
mod killed;
mod levels;
mod memory;
mod namespaces;
mod neighbours;
mod numa;
mod owners;
mod pages;
mod planted;
mod power;
mod quiet;
mod recovery;
mod run;
mod spill;
mod strangers;
