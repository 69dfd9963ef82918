//! Models of machines that are not at hand: policies for the FUSE server of `firn-testfs`, which let requests take
//! their time. No figure that was taken with one is a figure of a machine.

pub mod extent_locks;
pub mod seeking_disk;
