//! The events that the main loop of firnd, the process that serves a mount, waits for.

use std::sync::mpsc::{Receiver, Sender};

use firn_protocol::{HeldPolicy, Reply};

/// An event for the main loop.
pub(crate) enum Event {
    /// SIGTERM or SIGINT has arrived.
    Signal,
    /// A client asks for an unmount; it gets progress messages and one final reply.
    Unmount {
        /// Unmount even if files are open or data cannot be drained.
        force: bool,
        /// What happens to the data that the arena holds.
        held: HeldPolicy,
        /// The client that asks.
        client: UnmountClient,
    },
    /// The kernel has released the mount.
    Ended,
}

/// A client that waits for the unmount which it has asked for.
pub(crate) struct UnmountClient {
    /// Sends replies to the client.
    pub(crate) reply: Sender<Reply>,
    /// Gets a message after the final reply was sent or lost.
    pub(crate) reply_sent: Receiver<()>,
}
