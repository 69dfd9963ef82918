//! What is below transactions: the directory of a backing, with lanes and logs where there are any.

use std::path::Path;
use std::sync::Arc;

use firn_backing::DirBacking;
use firn_client::paths::RuntimeFiles;
use firn_config::Options;

use crate::error::AttachError;
use crate::host_lease::open_backing;
use crate::logs;
use crate::part::Part;
use crate::parts::{Held, SteeredLanes};
use crate::placement;
use crate::steering;
use crate::store::LoggableStore;

/// What an arena is attached, or a backing opened, for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A mount, as the options say.
    Mount,
    /// What is in it is drained, of which parts may be gone.
    Salvage,
}

/// What is attached.
pub(crate) struct Target<'a> {
    /// Canonical.
    pub(crate) backing: &'a Path,
    pub(crate) files: &'a RuntimeFiles,
    pub(crate) options: &'a Options,
    pub(crate) purpose: Purpose,
}

/// The ground of a store, and the parts of a mount that it comes with.
pub(crate) struct OpenedGround {
    pub(crate) store: LoggableStore,
    /// What tells the backing's file system where new files go; the lease that shows that this host may write to logs.
    pub(crate) parts: Vec<Arc<dyn Part>>,
}

/// The directory, with its files in lanes or logs where they are, or are to be.
pub(crate) fn open_ground(
    target: &Target<'_>,
    directory: DirBacking,
    notice: &mut dyn FnMut(String),
) -> Result<OpenedGround, AttachError> {
    let &Target {
        backing, options, ..
    } = target;
    if target.purpose == Purpose::Salvage {
        return open_layers(backing, directory, options, placement::Use::Serve, notice);
    }
    let steering::Opened { directory, steered } = steering::open_steered(directory, options)?;
    let mut opened = open_layers(backing, directory, options, placement::Use::Place, notice)?;
    if let Some(steered) = steered {
        opened.parts.push(SteeredLanes::new(steered, backing));
    }
    Ok(opened)
}

/// The same without a mount: files that lie in lanes or logs are served there.
pub(crate) fn serve_ground(backing: &Path, options: &Options) -> Result<OpenedGround, AttachError> {
    let directory = open_backing(backing)?;
    let mut notice = |text| tracing::warn!("{text}");
    open_layers(
        backing,
        directory,
        options,
        placement::Use::Serve,
        &mut notice,
    )
}

fn open_layers(
    backing: &Path,
    directory: DirBacking,
    options: &Options,
    wanted: placement::Use,
    notice: &mut dyn FnMut(String),
) -> Result<OpenedGround, AttachError> {
    let placeable = placement::open(backing, directory, options, wanted, notice)?;
    let opened = logs::open(backing, placeable, options, wanted)?;
    Ok(OpenedGround {
        store: opened.store,
        parts: opened.lease.into_iter().map(Held::part).collect(),
    })
}
