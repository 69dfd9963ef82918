//! `libfirn`: the C interface, as include/firn.h documents it.
//!
//! Promises
//! * Nothing unwinds into C: a panic becomes `ENOTRECOVERABLE`.
//!
//! Pointers of C are checked and translated here, nothing is decided: what a call does is `firn_client`'s.
//!
//! Layout: [`ffi`] is what C sees; [`error`] its errors.

mod error;
mod ffi;
