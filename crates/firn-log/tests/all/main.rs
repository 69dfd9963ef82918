//! All tests of `firn-log` but those beside its source, in one program.

mod backing;
mod common;
mod container;
mod damage;
mod hidden;
mod lanes;
mod locate;
mod model;
mod removals;
mod resolve;
mod times;
