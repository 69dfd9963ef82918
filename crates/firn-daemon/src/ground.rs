//! What is below transactions: the directory of a backing, with lanes and logs where there are any.

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

/// What an arena is attached, or a backing opened, for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A mount, as the options say.
    Mount,
    /// Files in it are drained, of which parts may be gone.
    Salvage,
}

/// What is attached.
pub(crate) struct Target<'a> {
    /// Canonical.
    pub(crate) backing: &'a Path,
    pub(crate) files: &'a RuntimeFiles,
    pub(crate) options: &'a Options,
    pub(crate) purpose: Purpose,
    /// What an earlier firnd left whose programs did not see its end.
    pub(crate) resumed: Option<&'a Resumed>,
}

/// The ground of a store, and the parts of a mount that it comes with.
pub(crate) struct OpenedGround {
    pub(crate) store: LoggableStore,
    /// What tells the backing's file system where new files go.
    pub(crate) parts: Vec<Arc<dyn Part>>,
}

/// The directory, with its files in lanes or logs where they are, or are to be.
pub(crate) fn open_ground(
    target: &Target<'_>,
    directory: DirBacking,
    lease: &mut HostLease,
    notice: &mut dyn FnMut(String),
) -> Result<OpenedGround, AttachError> {
    let &Target {
        backing, options, ..
    } = target;
    let (directory, steered, wanted) = match target.purpose {
        Purpose::Mount => {
            let opened = steering::open_steered(directory, options)?;
            (
                opened.directory,
                opened.steered,
                placement::NewFiles::ByOptions,
            )
        }
        Purpose::Salvage => (directory, None, placement::NewFiles::InBacking),
    };
    let nameless = target.resumed.map_or(&[][..], |resumed| &resumed.files);
    let placeable = placement::open(backing, directory, options, wanted, notice)?;
    let store = logs::open(backing, placeable, options, wanted, nameless, lease)?;
    let steered = steered.map(|steered| SteeredLanes::new(steered, backing));
    Ok(OpenedGround {
        store,
        parts: steered.into_iter().map(|part| part as _).collect(),
    })
}

/// The same without a mount: files that lie in lanes or logs are served there.
pub(crate) fn serve_ground(
    backing: &Path,
    options: &Options,
    lease: &mut HostLease,
) -> Result<LoggableStore, AttachError> {
    let directory = open_backing(backing)?;
    let mut notice = |text| tracing::warn!("{text}");
    let wanted = placement::NewFiles::InBacking;
    let placeable = placement::open(backing, directory, options, wanted, &mut notice)?;
    logs::open(backing, placeable, options, wanted, &[], lease)
}
