//! Placement on one file system (`placement=lustre` and similar): opens the driver that tells the file system on which
//! server (lane) to put each new file, and checks that it is the file system that the option names.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use firn_backing::{DirBacking, Errno};
use firn_config::{Options, Placement};
use firn_lanes::steering::{
    Driver, Location, Lustre, ProgramOfSite, Staged, SteeredPlacement, find_in_moosefs, open_dirs,
    tell_moosefs,
};
use firn_log::find_object;
use firn_protocol::path::BytePath;
use firn_protocol::{Explanation, LaneState, LaneStatus, PlacedStatus, Reply};
use firn_trust::open_beneath;
use rustix::fs::{Mode, OFlags, fstat, open};

use crate::error::AttachError;
use crate::host_name::host_name;
use crate::lane_rule::{explain_lane_choice, placement_rule};
use crate::store::Store;

/// Checks whether the backing's file system can be steered, as far as that is possible without creating anything.
pub(crate) fn check(backing: &Path, options: &Options) -> Result<(), AttachError> {
    let directory = File::open(backing).map_err(AttachError::io("open the backing directory"))?;
    let to_error = |why| steering_error(options, why);
    match open_driver(options).map_err(to_error)? {
        Some(driver) => driver.check(directory.as_fd()).map_err(to_error),
        // MooseFS has no check: its tool reports an error when it is given the staging directories.
        None => Ok(()),
    }
}

/// A backing directory, with its steering if new files are placed.
pub(crate) struct SteeredBacking {
    pub(crate) directory: DirBacking,
    pub(crate) steered: Option<Arc<SteeredPlacement>>,
}

/// Adds steering to an opened backing, if the options say so: its file system is told on which server to put each new
/// file. A read-only mount steers nothing.
pub(crate) fn add_steering(
    directory: DirBacking,
    options: &Options,
) -> Result<SteeredBacking, AttachError> {
    if !options.placement.is_steered() || options.read_only {
        return Ok(SteeredBacking {
            directory,
            steered: None,
        });
    }
    let host = host_name(options)?;
    let driver = match open_driver(options).map_err(|why| steering_error(options, why))? {
        Some(driver) => driver,
        // MooseFS puts a new file on the server of its directory, so new files are made in a staging directory.
        None => Box::new(open_staging(&directory, options, &host)?),
    };
    let steered = SteeredPlacement::new(
        driver,
        server_names(options),
        placement_rule(options, &host)?,
    );
    let steered = Arc::new(steered);
    Ok(SteeredBacking {
        directory: directory.with_steering(Arc::clone(&steered) as _),
        steered: Some(steered),
    })
}

/// Returns the names of the servers in the options.
fn server_names(options: &Options) -> Vec<OsString> {
    options.servers.iter().map(OsString::from).collect()
}

/// Returns the driver that steers each new file. `None` for MooseFS, which steers by one staging directory for each
/// lane.
fn open_driver(options: &Options) -> Result<Option<Box<dyn Driver>>, String> {
    let servers = server_names(options);
    Ok(match options.placement {
        Placement::Lustre => Some(Box::new(Lustre::new(&servers)?)),
        Placement::Command => {
            let program = options.place_command.as_ref();
            let program = program.ok_or("place-command is not given")?;
            Some(Box::new(ProgramOfSite::new(program.into(), &servers)))
        }
        Placement::Moosefs | Placement::None | Placement::Dirs => None,
    })
}

/// Opens one staging directory for each lane, and sets the server of each in MooseFS.
fn open_staging(
    directory: &DirBacking,
    options: &Options,
    host: &str,
) -> Result<Staged, AttachError> {
    let servers = server_names(options);
    let dirs = open_dirs(directory, host, servers.len())
        .map_err(|error| steering_error(options, error.to_string()))?;
    for (dir, server) in dirs.iter().zip(&servers) {
        tell_moosefs(dir.as_fd(), server)
            .map_err(|error| steering_error(options, error.to_string()))?;
    }
    Staged::new(dirs, find_in_moosefs).map_err(|error| steering_error(options, error.to_string()))
}

fn steering_error(options: &Options, why: String) -> AttachError {
    AttachError::Steering {
        placement: options.placement.name(),
        why,
    }
}

/// Puts servers, and the files and bytes that went to each, into the status.
pub(crate) fn fill_lane_statuses(steered: &SteeredPlacement, lane_statuses: &mut [LaneStatus]) {
    let figures = steered.figures();
    let lanes = steered.servers().iter().zip(figures);
    for (lane_status, (server, figures)) in lane_statuses.iter_mut().zip(lanes) {
        lane_status.path = server.as_bytes().into();
        lane_status.placed = Some(PlacedStatus {
            files: figures.files,
            bytes: figures.bytes,
            takes_files: true,
            state: LaneState::Ok,
        });
    }
}

/// Returns the reply to a request for a file's lane, the I/O server that has its data: where the file lies, and where a
/// new file of this name would be placed.
pub(crate) fn explain_placement(
    steered: &SteeredPlacement,
    store: &Store,
    backing: &Path,
    path: &BytePath,
) -> Reply {
    let relative = Path::new(OsStr::from_bytes(path.as_bytes()));
    let choice = explain_lane_choice(steered.rule(), relative);
    let is_missing = matches!(find_object(store, path.as_bytes()), Err(Errno::NOENT));
    let location = match open_file_below(backing, relative) {
        Ok(file) => Some(steered.find_server(file.as_fd())),
        Err(_) => None,
    };
    let server = match location {
        Some(Location::Server(server)) => Some(server),
        Some(Location::Striped(count)) => Some(format!("striped over {count} servers")),
        Some(Location::Unknown) | None => None,
    };
    Reply::Placed(Explanation {
        file: None,
        server: server.map(|server| server.as_bytes().into()),
        exists: !is_missing,
        lane: choice
            .lane
            .map(|index| steered.servers()[index].as_bytes().into()),
        reason: choice.reason,
    })
}

/// Opens a regular file of the backing without following links out of it, because other users may have made them. Any
/// other kind is refused: opening a device or a pipe could block or have side effects.
fn open_file_below(backing: &Path, relative: &Path) -> Result<OwnedFd, Errno> {
    let top = open(backing, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let unopened_file = open_beneath(&top, relative, flags, Mode::empty())?;
    if fstat(&unopened_file)?.st_mode & libc::S_IFMT != libc::S_IFREG {
        return Err(Errno::NXIO);
    }
    // A path descriptor cannot be read, so the file is opened again through it.
    let path = format!("/proc/self/fd/{}", unopened_file.as_raw_fd());
    open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}
