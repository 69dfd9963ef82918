//! Says which mounts have locks of programs that reach other hosts ([`firn_hosts::FileLocks`]), and starts these locks.
//!
//! A mount with logs has them, because several hosts may write the files of its backing. On all other mounts the kernel
//! keeps the locks of its host, and firnd does nothing for them.

use std::path::Path;
use std::sync::Arc;

use firn_backing::Volume;
use firn_config::Options;
use firn_engine::Engine;
use firn_hosts::own::{self, TOP};
use firn_hosts::{FILE_LOCKS, FileLocks, LeaseUse};

use crate::error::AttachError;
use crate::host_lease::{LivingHosts, open_backing, own_error};
use crate::host_name::host_name;
use crate::store::{Layers as _, Store};

/// Returns the locks of a mount; `None` if the kernel keeps them. A read-only mount refuses all locks.
pub(crate) fn start(
    backing: &Path,
    engine: &Engine<Store>,
    options: &Options,
) -> Result<Option<Arc<FileLocks>>, AttachError> {
    if engine.backing().logged().is_none() {
        return Ok(None);
    }
    if options.read_only {
        return Ok(Some(FileLocks::refused()));
    }
    let host = host_name(options)?;
    let base = open_backing(backing)?;
    let refused = own_error(backing);
    let firn = own::make_dir(&base, &base.root(), TOP).map_err(&refused)?;
    let dir = own::make_dir(&base, &firn, FILE_LOCKS);
    let dir = dir.map_err(|error| refused(error.below(TOP)))?;
    let hosts = LivingHosts::over(backing, LeaseUse::Logs, &host)?;
    let others = Box::new(move || hosts.others_living());
    FileLocks::start(base, dir, &host, others)
        .map(Some)
        .map_err(AttachError::io("start the thread of locks"))
}
