//! A world to test the engine in: a simulated backing, an arena on tmpfs, a reference model.

#![allow(dead_code)]

pub mod model;
pub mod world;
