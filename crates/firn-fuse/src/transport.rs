//! Transports: they carry requests from the kernel, and answers to it. There is one, `/dev/fuse`.
//!
//! A transport
//! * reads requests on threads of its own: one for each call that may run at a time (option `fuse-threads`), and one
//!   that is free to read (see [`crate::call_slots`]);
//! * parses a request into a [`crate::request::Request`]. It hands that to [`crate::dispatcher::Dispatcher::dispatch`],
//!   with a [`crate::reply::Responder`], which takes the answer;
//! * hands a FORGET, which has no answer, to [`crate::dispatcher::Dispatcher::forget`];
//! * answers ENOSYS to access, bmap and poll, which makes the kernel handle these itself from then on;
//! * reports signals of callers to [`crate::dispatcher::Dispatcher::interrupt`];
//! * lets another thread answer a request with an error, while the work on it still hangs, because a signal must end
//!   the call ([`crate::unanswered::EarlyAnswer`]);
//! * negotiates capabilities with the kernel and reports the result ([`crate::dispatcher::Negotiated`]);
//! * makes the kernel drop cached data ([`crate::coherence::Notifier`]).
//!
//! Considered: the crate `fuser` (0.18), which Firn used before. `fuser` answers ENOSYS to FUSE_INTERRUPT, after which
//! the kernel sends no more interrupts. It ignores capabilities and requests that it does not know.

pub(crate) mod dev_fuse;
