//! The traffic of a mount as a part: bytes that came in, went out and were sent to other hosts, and their rates.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use firn_engine::Engine;
use firn_protocol::{Reply, Request, Status, close_hint};
use parking_lot::Mutex;

use crate::part::{ClientRequest, Part};
use crate::pulls::Pulls;
use crate::rates::{Totals, Window};
use crate::store::Store;

/// Counts and rates of the mount's bytes, and of what agents have reported with `ReportPull`.
pub(crate) struct Traffic {
    engine: Arc<Engine<Store>>,
    /// What agents have sent to other hosts.
    pulls: Arc<Pulls>,
    /// Samples of the last seconds.
    window: Mutex<Window>,
    /// The hint about long waits in close(2) was logged.
    hint_given: AtomicBool,
}

impl Traffic {
    pub(crate) fn new(engine: &Arc<Engine<Store>>) -> Arc<Self> {
        Arc::new(Self {
            engine: Arc::clone(engine),
            pulls: Arc::default(),
            window: Mutex::default(),
            hint_given: AtomicBool::new(false),
        })
    }
}

impl Part for Traffic {
    /// Adds a sample of the counters of bytes to the window, from which the status computes rates. Logs one hint for
    /// the user if programs wait long in close(2).
    fn run_due(&self) {
        let transferred = self.engine.transferred();
        let totals = Totals {
            ingest: transferred.ingest_bytes,
            drain: transferred.drain_bytes,
            spill: transferred.moved_bytes,
            pulled: self.pulls.bytes(),
        };
        self.window.lock().add(Instant::now(), totals);
        let close_wait_seconds = self.engine.close_wait().as_secs_f64();
        let uptime_seconds = self.engine.uptime().as_secs_f64();
        if let Some(hint) = close_hint(close_wait_seconds, uptime_seconds)
            && !self.hint_given.swap(true, Ordering::Relaxed)
        {
            tracing::info!("{hint}");
        }
    }

    /// Adds the rates in bytes per second to the status, and the figures of pulls (copies of files for other hosts).
    /// The rates are those from the oldest sample of the window to the totals that the engine has put into the status.
    fn fill_status(&self, status: &mut Status) {
        let totals = Totals {
            ingest: status.ingest_bytes,
            drain: status.drain_bytes,
            spill: status.spill.as_ref().map_or(0, |spill| spill.moved_bytes),
            pulled: self.pulls.bytes(),
        };
        let rates = self.window.lock().rates(Instant::now(), totals);
        status.ingest_bytes_per_second = rates.ingest;
        status.drain_bytes_per_second = rates.drain;
        if let Some(spill) = &mut status.spill {
            spill.moved_bytes_per_second = rates.spill;
        }
        status.pulls = self.pulls.open_connections();
        status.pulled_files = self.pulls.files();
        status.pulled_bytes = self.pulls.bytes();
        status.pulled_bytes_per_second = rates.pulled;
    }

    fn answer(&self, client_request: &mut ClientRequest<'_>) -> Option<Reply> {
        let Request::ReportPull { files, bytes } = client_request.request else {
            return None;
        };
        client_request
            .client
            .pull
            .get_or_insert_with(|| self.pulls.begin())
            .add(*files, *bytes);
        Some(Reply::Done)
    }
}
