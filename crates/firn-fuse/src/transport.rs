//! What carries requests from the kernel and answers to it.
//!
//! A transport
//! * makes a [`crate::request::Request`] of what it read and hands it to [`crate::dispatcher::Dispatcher::dispatch`]
//!   with a [`crate::reply::Responder`], on `threads + 1` threads of its own (see [`crate::call_slots`]);
//! * tells [`crate::dispatcher::Dispatcher::forget`] of FORGETs, and answers ENOSYS to what Firn leaves to the kernel;
//! * negotiates with the kernel and says what both agreed on ([`crate::dispatcher::Negotiated`]);
//! * drops what the kernel has cached ([`crate::coherence::Notifier`]).
//!
//! There is one so far. Nothing outside of it names the crate that it is made of.

pub(crate) mod fuser;
