//! `libfirn`: the C interface, which include/firn.h documents.
//!
//! Promises
//! * No panic unwinds into C; a panic becomes `ENOTRECOVERABLE`.
//!
//! This crate only checks and translates the pointers of C. The crate `firn_client` implements the calls.
//!
//! Modules: [`ffi`] has the functions and types that C uses. [`error`] has their errors.

mod error;
mod ffi;
