//! Bad input and faults: refused with a reason, or survived with nothing acknowledged lost.

mod arena;
mod backing;
mod limits;
mod machine;
mod mounting;
mod options;
mod signals;
