//! Bytes to checked structs and back: everything Firn stores or sends. No I/O.
//!
//! Each stored structure has its own module, a `Raw…` type that is just bytes, and a check that
//! turns it into one that can be trusted. docs/FORMAT.md describes the bytes.

pub mod protocol;
