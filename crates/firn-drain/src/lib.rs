//! Lanes and their threads: carry pieces from the arena to the backing.
//!
//! The engine decides what is written next ([`firn_engine::Engine::pick`]) and what a result means
//! ([`firn_engine::Engine::complete`]); this crate owns the threads in between. A `Lane` is one
//! I/O server and the place where its threads sleep; [`pool::Pool`] starts and joins them. Order
//! within a lane, placement over lanes and tokens across hosts come between `pick` and `execute`.

mod lane;
mod pool;

pub use pool::Pool;
