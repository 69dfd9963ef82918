//! All tests of `firn-engine` but those beside its source, in one program.

mod common;
mod descriptors;
mod direct_access;
mod durability;
mod endings;
mod gathered;
mod hangs;
mod logs;
mod order;
mod privileges;
mod reads;
mod room;
mod simulation;
