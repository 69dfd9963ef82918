//! Transports: they carry requests from the kernel, and answers to it.
//!
//! A transport
//! * parses what it reads into a [`crate::request::Request`]. It hands the request with a [`crate::reply::Responder`]
//!   to [`crate::dispatcher::Dispatcher::dispatch`], on `threads + 1` threads of its own (see [`crate::call_slots`]);
//! * hands a FORGET to [`crate::dispatcher::Dispatcher::forget`], and answers ENOSYS to requests that Firn leaves to
//!   the kernel;
//! * reports signals of callers to [`crate::dispatcher::Dispatcher::interrupt`], and answers a request early on demand
//!   ([`crate::unanswered::EarlyAnswer`]);
//! * negotiates capabilities with the kernel and reports the result ([`crate::dispatcher::Negotiated`]);
//! * makes the kernel drop cached data ([`crate::coherence::Notifier`]).
//!
//! There is one transport, `/dev/fuse`.
//!
//! Considered: the crate `fuser` (0.18), which Firn used before. `fuser` answers ENOSYS to FUSE_INTERRUPT, after which
//! the kernel sends no more interrupts. It ignores capabilities and requests that it does not know.

pub(crate) mod dev_fuse;
