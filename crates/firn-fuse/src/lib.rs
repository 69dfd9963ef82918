//! Kernel request to engine call, error to errno, over the fuser crate.
