//! All tests of `firn-log` outside its source, in one program.

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
