//! All integration tests of `firn-drain` except `hangs.rs`, in one program.

mod common {
    pub mod host;
}
mod lanes;
mod paced;
mod threads;
mod tokens;
