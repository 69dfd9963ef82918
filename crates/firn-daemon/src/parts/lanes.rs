//! The lanes (I/O servers) of a mount: directories in which firnd places files, or servers that a file system is told
//! to use.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use firn_engine::Engine;
use firn_lanes::steering::SteeredPlacement;
use firn_protocol::{Reply, Request, Status};
use firn_workers::Workers;

use crate::part::{ClientRequest, Part, StopContext};
use crate::placement;
use crate::single_job::SingleJob;
use crate::steering;
use crate::store::{Layers as _, Store};

/// Lanes in which firnd places files.
pub(crate) struct PlacedLanes {
    engine: Arc<Engine<Store>>,
    workers: Workers,
    removals: SingleJob,
}

impl PlacedLanes {
    pub(crate) fn new(engine: &Arc<Engine<Store>>, workers: &Workers) -> Arc<Self> {
        Arc::new(Self {
            engine: Arc::clone(engine),
            workers: workers.clone(),
            removals: SingleJob::default(),
        })
    }
}

impl Part for PlacedLanes {
    /// Frees the space of removed files, which stay in their lanes until the removal of their names is durable.
    fn run_due(&self) {
        let placed = self.engine.backing().lane_layer();
        if placed.is_some_and(|lanes| lanes.has_removals()) {
            let engine = Arc::clone(&self.engine);
            let remove = move || placement::finish_removals(engine.backing());
            self.removals.start(&self.workers, remove);
        }
    }

    fn fill_status(&self, status: &mut Status) {
        if let Some(placed) = self.engine.backing().lane_layer() {
            placement::fill_lane_statuses(placed, &mut status.lanes);
            status.placement_advice = placement::advise_on_lanes(&status.lanes);
        }
    }

    fn answer(&self, client_request: &mut ClientRequest<'_>) -> Option<Reply> {
        let Request::Place { path } = client_request.request else {
            return None;
        };
        Some(placement::explain_lane(self.engine.backing(), path))
    }

    fn stop(&self, context: &mut StopContext) {
        if !context.has_backing_call_in_progress {
            placement::finish_removals(self.engine.backing());
        }
    }
}

/// Lanes that the backing's file system is told to use for new files.
pub(crate) struct SteeredLanes {
    steered: Arc<SteeredPlacement>,
    backing: PathBuf,
}

impl SteeredLanes {
    pub(crate) fn new(steered: Arc<SteeredPlacement>, backing: &Path) -> Arc<Self> {
        let backing = backing.to_owned();
        Arc::new(Self { steered, backing })
    }
}

impl Part for SteeredLanes {
    /// Shows the lanes. If an earlier mount has placed files too, [`PlacedLanes`] replaces these figures afterwards.
    fn fill_status(&self, status: &mut Status) {
        steering::fill_lane_statuses(&self.steered, &mut status.lanes);
        status.placement_advice = placement::advise_on_lanes(&status.lanes);
        status.misplaced_files = self.steered.refused_files();
    }

    fn answer(&self, client_request: &mut ClientRequest<'_>) -> Option<Reply> {
        let Request::Place { path } = client_request.request else {
            return None;
        };
        let store = client_request.engine.backing();
        Some(steering::explain_placement(
            &self.steered,
            store,
            &self.backing,
            path,
        ))
    }
}
