//! Names, files, extents, recovery: what a write means, without a transport.
//!
//! The engine knows nothing of FUSE, sockets or threads of its own; it is called and answers. A door
//! calls the operations of [`Engine`]; a drain calls [`Engine::pick`], does the I/O and calls
//! [`Engine::complete`]. What has to wait is told by a callback, never by a blocked thread, except
//! for the short wait for one I/O in flight on the same file.

mod api;
pub use api::*;
