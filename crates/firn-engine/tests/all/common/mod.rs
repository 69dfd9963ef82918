//! A simulated world for tests of the engine: a simulated backing, an arena on tmpfs, and a reference model.

#![allow(dead_code)]

pub mod model;
pub mod world;
