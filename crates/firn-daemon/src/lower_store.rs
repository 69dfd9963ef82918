//! Opens the *lower store*, which lies below transactions: the backing directory, with the layers of lanes and logs if
//! files need them. A *lane* is one I/O server; in the layer of *logs*, each host appends its writes to a log of its
//! own.

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
use crate::placement::{self, NewFiles};
use crate::steering::{self, SteeredBacking};
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

/// The lower store, and the parts of a mount that belong to it.
pub(crate) struct OpenedLowerStore {
    pub(crate) store: LoggableStore,
    /// At most one part: it steers new files to servers of the backing's file system.
    pub(crate) parts: Vec<Arc<dyn Part>>,
}

/// Opens the lower store: the backing directory with the layers that its files need. The layer of lanes spreads data
/// over the directories of several I/O servers. In the layer of logs, each host has a log of its writes.
///
/// A layer is present if files lie in it, or if the options of a mount ask for it. The host's lease is taken if it may
/// write logs.
pub(crate) fn open_lower_store(
    target: &AttachTarget<'_>,
    directory: DirBacking,
    lease: &mut HostLease,
    notice: &mut dyn FnMut(String),
) -> Result<OpenedLowerStore, AttachError> {
    let &AttachTarget {
        backing, options, ..
    } = target;
    // A recovery drains old data only, so the options for new files do not count.
    let new_files = match target.purpose {
        AttachPurpose::Mount => NewFiles::ByOptions,
        AttachPurpose::Recovery => NewFiles::InBacking,
    };
    // Steering tells the file system of the backing on which server to put each new file.
    let SteeredBacking { directory, steered } = match target.purpose {
        AttachPurpose::Mount => steering::add_steering(directory, options)?,
        AttachPurpose::Recovery => SteeredBacking {
            directory,
            steered: None,
        },
    };
    let nameless_files = match target.resumed {
        Some(resumed) => &resumed.files[..],
        None => &[],
    };
    let placeable = placement::open_store(backing, directory, options, new_files, notice)?;
    let store = logs::open_store(
        backing,
        placeable,
        options,
        new_files,
        nameless_files,
        lease,
    )?;
    let mut parts: Vec<Arc<dyn Part>> = Vec::new();
    if let Some(steered) = steered {
        parts.push(SteeredLanes::new(steered, backing));
    }
    Ok(OpenedLowerStore { store, parts })
}

/// Opens the lower store without a mount. Files that lie in lanes or logs are served there; new files go
/// to the backing itself.
pub(crate) fn open_lower_store_unmounted(
    backing: &Path,
    options: &Options,
    lease: &mut HostLease,
) -> Result<LoggableStore, AttachError> {
    let directory = open_backing(backing)?;
    let mut notice = |text| tracing::warn!("{text}");
    let new_files = NewFiles::InBacking;
    let placeable = placement::open_store(backing, directory, options, new_files, &mut notice)?;
    logs::open_store(backing, placeable, options, new_files, &[], lease)
}
