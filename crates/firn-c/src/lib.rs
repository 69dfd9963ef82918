//! `libfirn`: the C interface, as include/firn.h documents it.
//!
//! Promises
//! * Nothing unwinds into C: a panic becomes `ENOTRECOVERABLE`.
//! * A handle that met anything but an answer (silence, nonsense, the end of firnd) asks no more: a late
//!   answer is never taken for another question's.
//!
//! Layout: [`ffi`] is what C sees and translates; [`mount`] the connection; [`region`] the mapping.

mod error;
mod ffi;
mod mount;
mod region;
