//! What the main loop of firnd waits for.

use std::sync::mpsc::{Receiver, Sender};

use firn_protocol::{HeldPolicy, Reply};

/// What the main loop of firnd waits for.
pub(crate) enum Event {
    /// SIGTERM or SIGINT.
    Signal,
    /// A client asks for the end; it gets progress and one last word.
    Unmount {
        /// Even with open files and data that cannot be drained.
        force: bool,
        /// What becomes of the data that is held.
        held: HeldPolicy,
        /// The client that asks.
        client: Client,
    },
    /// The kernel let go of the mount.
    Ended,
}

/// A client that asked for the end.
pub(crate) struct Client {
    /// Takes replies to it.
    pub(crate) reply: Sender<Reply>,
    /// Signals that the last reply was sent, or that it is lost.
    pub(crate) reply_sent: Receiver<()>,
}
