//! The drain, which copies held bytes from memory to the backing, as parts of a mount: the I/O threads, and the last
//! drain of a mount that ends.

use std::sync::Arc;
use std::time::Duration;

use firn_drain::Pool;
use firn_engine::Engine;
use firn_hosts::tokens::LaneToken;
use firn_protocol::Status;
use parking_lot::Mutex;

use crate::last_drain::drain_last;
use crate::part::{Part, StopContext};
use crate::status::token_status;
use crate::store::Store;

/// Timeout at the end of a mount for a write that an I/O thread is making.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// The I/O threads, and the tokens (locks against other hosts) of the lanes that they write to.
pub(crate) struct IoThreads {
    pool: Mutex<Pool>,
    /// One token for each lane; empty on a mount without tokens.
    tokens: Vec<LaneToken>,
}

impl IoThreads {
    pub(crate) fn new(pool: Pool) -> Arc<Self> {
        let tokens = pool.lane_tokens().to_vec();
        let pool = Mutex::new(pool);
        Arc::new(Self { pool, tokens })
    }

    /// Starts I/O threads for those that hang, so that the drain of other files continues.
    pub(crate) fn replace_hung(&self) {
        self.pool.lock().replace_hung();
    }
}

impl Part for IoThreads {
    fn run_due(&self) {
        self.replace_hung();
    }

    fn fill_status(&self, status: &mut Status) {
        for (lane, token) in status.lanes.iter_mut().zip(&self.tokens) {
            lane.token = Some(token_status(token.figures()));
        }
    }

    fn stop(&self, context: &mut StopContext) {
        context.has_backing_call_in_progress = !self.pool.lock().stop_within(STOP_TIMEOUT);
        if context.has_backing_call_in_progress {
            tracing::warn!(
                "the backing does not answer: firnd cannot end before the backing answers"
            );
        }
    }
}

/// Drains the data that arrived before the parts after this one had stopped.
pub(crate) struct LastDrain(pub(crate) Arc<Engine<Store>>);

impl Part for LastDrain {
    fn stop(&self, context: &mut StopContext) {
        if context.drains_held_data() {
            drain_last(&self.0, context.is_forced);
        }
    }
}
