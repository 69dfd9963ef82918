//! The drain: the I/O threads, and the last drains of a mount that ends.

use std::sync::Arc;
use std::time::Duration;

use firn_drain::Pool;
use firn_engine::Engine;
use firn_hosts::tokens::LaneToken;
use firn_protocol::Status;
use parking_lot::Mutex;

use crate::last_drain::drain_last;
use crate::part::{Part, Stop};
use crate::status::token_status;
use crate::store::Store;

/// How long an IO thread may take for the write that it is at when the mount ends.
const STOP_PATIENCE: Duration = Duration::from_secs(10);

/// The I/O threads, and the tokens of the lanes that they write to.
pub(crate) struct IoThreads {
    pool: Mutex<Pool>,
    /// One for each lane, on a mount with tokens.
    tokens: Vec<LaneToken>,
}

impl IoThreads {
    pub(crate) fn new(pool: Pool) -> Arc<Self> {
        let tokens = pool.lane_tokens().to_vec();
        let pool = Mutex::new(pool);
        Arc::new(Self { pool, tokens })
    }

    /// Sees to it that drains go on where those of some files hang.
    pub(crate) fn replace_hung(&self) {
        self.pool.lock().replace_hung();
    }
}

impl Part for IoThreads {
    fn run_due(&self) {
        self.replace_hung();
    }

    fn show(&self, status: &mut Status) {
        for (lane, token) in status.lanes.iter_mut().zip(&self.tokens) {
            lane.token = Some(token_status(token.figures()));
        }
    }

    fn stop(&self, stop: &mut Stop) {
        stop.is_call_under_way = !self.pool.lock().stop_within(STOP_PATIENCE);
        if stop.is_call_under_way {
            tracing::warn!("the backing does not answer: firnd cannot end before it does");
        }
    }
}

/// Drains what came in until the parts behind it had stopped.
pub(crate) struct LastDrain(pub(crate) Arc<Engine<Store>>);

impl Part for LastDrain {
    fn stop(&self, stop: &mut Stop) {
        if stop.drains() {
            drain_last(&self.0, stop.force);
        }
    }
}
