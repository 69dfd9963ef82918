//! What carries requests from the kernel and answers to it.
//!
//! A transport
//! * makes a [`crate::request::Request`] of what it read and hands it to [`crate::dispatcher::Dispatcher::dispatch`]
//!   with a [`crate::reply::Responder`], on `threads + 1` threads of its own (see [`crate::call_slots`]);
//! * tells [`crate::dispatcher::Dispatcher::forget`] of FORGETs, and answers ENOSYS to what Firn leaves to the kernel;
//! * tells [`crate::dispatcher::Dispatcher::interrupt`] of signals that callers get, and answers a request early where
//!   it is told to ([`crate::unanswered::EarlyAnswer`]);
//! * negotiates with the kernel and says what both agreed on ([`crate::dispatcher::Negotiated`]);
//! * drops what the kernel has cached ([`crate::coherence::Notifier`]).
//!
//! There is one so far.
//!
//! Considered: the crate `fuser` (0.18), which carried the requests before. It answers FUSE_INTERRUPT with ENOSYS, after
//! which the kernel sends no other one, and takes no capability and no request that it does not know.

pub(crate) mod dev_fuse;
