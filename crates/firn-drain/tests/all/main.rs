//! All tests of `firn-drain` but those beside its source, in one program.

mod common {
    pub mod host;
}
mod lanes;
mod paced;
mod threads;
mod tokens;
