//! How a mount begins, ends, fails and comes back.

mod bad_input;
mod cli;
mod connections;
mod crash;
mod descriptors;
mod dist;
mod doctor;
mod endings;
mod fixtures;
mod hangs;
mod killed;
mod memory;
mod mistakes;
mod namespaces;
mod neighbours;
mod numa;
mod owners;
mod planted;
mod power;
mod quiet;
mod recovery;
mod run;
mod spill;
mod strangers;
