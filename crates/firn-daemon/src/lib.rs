//! Composition root: session, control socket, signals.
