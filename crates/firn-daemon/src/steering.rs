//! Placement on one file system (`placement=lustre` and its like): what tells it where files go, and whether it is the
//! file system that the option names.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use firn_backing::DirBacking;
use firn_config::{Options, Placement};
use firn_lanes::steering::{
    Beegfs, Ceph, Driver, Lustre, ProgramOfSite, Staged, Steered, check_orangefs, open_dirs,
    tell_moosefs, tell_orangefs,
};

use crate::error::AttachError;
use crate::participants::host_name;
use crate::placement::rule;

/// Looks whether the backing's file system can be told, as far as that is seen without making anything.
pub(crate) fn check(backing: &Path, options: &Options) -> Result<(), AttachError> {
    let directory = File::open(backing).map_err(AttachError::io("open the backing directory"))?;
    let refused = |why| refused(options, why);
    match of_servers(options).map_err(refused)? {
        Some(driver) => driver.check(directory.as_fd()).map_err(refused),
        None if options.placement == Placement::Orangefs => {
            check_orangefs(directory.as_fd()).map_err(refused)
        }
        // MooseFS's tool looks when it is told of the staging directories.
        None => Ok(()),
    }
}

/// A backing whose new files go where the options say.
pub(crate) struct Opened {
    pub(crate) directory: DirBacking,
    pub(crate) steered: Option<Arc<Steered>>,
}

/// Steers the new files of a backing, if the options say so.
pub(crate) fn open(directory: DirBacking, options: &Options) -> Result<Opened, AttachError> {
    if !options.placement.is_steered() || options.read_only {
        return Ok(Opened {
            directory,
            steered: None,
        });
    }
    let host = host_name(options)?;
    let driver = match of_servers(options).map_err(|why| refused(options, why))? {
        Some(driver) => driver,
        None => Box::new(stage(&directory, options, &host)?),
    };
    let steered = Steered::new(driver, servers(options), rule(options, &host)?);
    let steered = Arc::new(steered);
    Ok(Opened {
        directory: directory.with_steering(Arc::clone(&steered) as _),
        steered: Some(steered),
    })
}

fn servers(options: &Options) -> Vec<OsString> {
    options.servers.iter().map(OsString::from).collect()
}

/// What tells the file system of each new file; none where a staging directory for each lane is told.
fn of_servers(options: &Options) -> Result<Option<Box<dyn Driver>>, String> {
    let servers = servers(options);
    Ok(match options.placement {
        Placement::Lustre => Some(Box::new(Lustre::new(&servers)?)),
        Placement::Ceph => Some(Box::new(Ceph::new(&servers))),
        Placement::Beegfs => Some(Box::new(Beegfs::new(&servers)?)),
        Placement::Command => {
            let program = options.place_command.as_ref();
            let program = program.ok_or("place-command is not given")?;
            Some(Box::new(ProgramOfSite::new(program.into(), &servers)))
        }
        Placement::Orangefs | Placement::Moosefs | Placement::None | Placement::Dirs => None,
    })
}

/// Staging directories, whose file system was told what each of them is.
fn stage(directory: &DirBacking, options: &Options, host: &str) -> Result<Staged, AttachError> {
    let servers = servers(options);
    let dirs = open_dirs(directory, host, servers.len())
        .map_err(|error| refused(options, error.to_string()))?;
    for (dir, server) in dirs.iter().zip(&servers) {
        tell(options.placement, dir, server).map_err(|why| refused(options, why))?;
    }
    Staged::new(dirs).map_err(|error| refused(options, error.to_string()))
}

fn tell(placement: Placement, dir: &OwnedFd, server: &OsString) -> Result<(), String> {
    match placement {
        Placement::Orangefs => tell_orangefs(dir.as_fd(), server),
        _ => tell_moosefs(dir.as_fd(), server).map_err(|error| error.to_string()),
    }
}

fn refused(options: &Options, why: String) -> AttachError {
    AttachError::Steering {
        placement: options.placement.name(),
        why,
    }
}
