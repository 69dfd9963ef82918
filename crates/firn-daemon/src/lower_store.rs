//! The ground of a store: the backing directory, and the layers of lanes and logs if files need them. Transactions lie
//! above it.

use std::path::Path;
use std::sync::Arc;

use firn_backing::DirBacking;
use firn_client::paths::RuntimeFiles;
use firn_config::Options;
use firn_engine::Resumed;

use crate::error::AttachError;
use crate::host_lease::{HostLease, open_backing};
use crate::logs;
use crate::part::Part;
use crate::parts::SteeredLanes;
use crate::placement;
use crate::steering;
use crate::store::LoggableStore;

/// The purpose for which a backing is opened.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttachPurpose {
    /// A mount; the options say where new files go.
    Mount,
    /// A recovery, which drains the data that is left in the arena. No new files go to lanes or logs.
    Recovery,
}

/// The backing to open, and the arena that belongs to it.
pub(crate) struct AttachTarget<'a> {
    /// Canonical path of the backing.
    pub(crate) backing: &'a Path,
    pub(crate) files: &'a RuntimeFiles,
    pub(crate) options: &'a Options,
    pub(crate) purpose: AttachPurpose,
    /// State of an earlier firnd, if this firnd takes over its mount.
    pub(crate) resumed: Option<&'a Resumed>,
}

/// The ground of a store, and the parts of a mount that belong to it.
pub(crate) struct OpenedLowerStore {
    pub(crate) store: LoggableStore,
    /// The part that steers new files to servers of the backing's file system, if there is one.
    pub(crate) parts: Vec<Arc<dyn Part>>,
}

/// Opens the ground. It has lanes or logs if files lie in them, or if the options ask for them.
pub(crate) fn open_lower_store(
    target: &AttachTarget<'_>,
    directory: DirBacking,
    lease: &mut HostLease,
    notice: &mut dyn FnMut(String),
) -> Result<OpenedLowerStore, AttachError> {
    let &AttachTarget {
        backing, options, ..
    } = target;
    let (directory, steered, wanted) = match target.purpose {
        AttachPurpose::Mount => {
            let opened = steering::open_steered(directory, options)?;
            (
                opened.directory,
                opened.steered,
                placement::NewFiles::ByOptions,
            )
        }
        AttachPurpose::Recovery => (directory, None, placement::NewFiles::InBacking),
    };
    let nameless = target.resumed.map_or(&[][..], |resumed| &resumed.files);
    let placeable = placement::open_store(backing, directory, options, wanted, notice)?;
    let store = logs::open_store(backing, placeable, options, wanted, nameless, lease)?;
    let steered = steered.map(|steered| SteeredLanes::new(steered, backing));
    Ok(OpenedLowerStore {
        store,
        parts: steered.into_iter().map(|part| part as _).collect(),
    })
}

/// Opens the ground without a mount. Files that lie in lanes or logs are served there; new files go to the backing
/// itself.
pub(crate) fn open_lower_store_unmounted(
    backing: &Path,
    options: &Options,
    lease: &mut HostLease,
) -> Result<LoggableStore, AttachError> {
    let directory = open_backing(backing)?;
    let mut notice = |text| tracing::warn!("{text}");
    let wanted = placement::NewFiles::InBacking;
    let placeable = placement::open_store(backing, directory, options, wanted, &mut notice)?;
    logs::open_store(backing, placeable, options, wanted, &[], lease)
}
