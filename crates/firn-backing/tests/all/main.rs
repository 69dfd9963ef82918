//! All tests of `firn-backing` but those beside its source, in one program.

mod conformance;
mod faults;
mod owners;
mod stamps;
