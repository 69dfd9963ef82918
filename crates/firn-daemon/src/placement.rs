//! Placement over several directories (`placement=dirs`): checks and opens the lanes of a mount, and reports on them.
//! [`crate::steering`] has the other placements.
//!
//! Terms
//! * A *lane* is one I/O server, here one directory. A *placed* file has its data in a lane; in the backing its name is
//!   a symbolic link to that data.
//! * The *record* is a file below `.firn/` that lists the lanes of the backing ([`Record`]).
//! * The *mark* is a file in a lane that names the backing which the lane belongs to.
//!
//! Promises
//! * A backing with lanes in its record is never opened without them, so each mount shows placed files as plain files
//!   and not as links.
//! * No file is placed in a directory in which other users could have put something.
//!
//! Relies on `firn_lanes` for the layer itself, and on `firn_trust` to judge which users may change a directory.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firn_backing::{DirBacking, Errno};
use firn_config::{Options, Placement};
use firn_format::mountinfo;
use firn_format::quote::quoted_path;
use firn_lanes::{Lane, Lanes, Record, RecordError, Rule, Setup, record};
use firn_log::find_object;
use firn_protocol::path::BytePath;
use firn_protocol::{Explanation, LaneState, LaneStatus, PlacedStatus, Reply};
use firn_transact::OwnError;
use firn_trust::{TrustError, check_place};
use rustix::fs::{Access, AtFlags, CWD, accessat};

use crate::error::{AttachError, LaneFault};
use crate::host_name::host_name;
use crate::lane_rule::{LaneChoice, explain_lane_choice, placement_rule};
use crate::preflight::CheckedPaths;
use crate::steering;
use crate::store::{Layers as _, PlaceableStore, Store};

/// Checks the lanes of the options (directories of I/O servers that get the data of files) and the lane map (a file
/// that assigns names to lanes). This runs before the mount changes anything. A mount without placement has none.
///
/// Fails if a lane cannot be used, or if two of the lanes, the backing and the mount point are the same directory or
/// lie in each other.
pub(crate) fn check_lanes(options: &Options, checked: &CheckedPaths) -> Result<(), AttachError> {
    if options.placement == Placement::None {
        return Ok(());
    }
    // This reads the lane map only to find its errors, for which the name of the host does not matter.
    let no_host = "";
    placement_rule(options, no_host)?;
    if options.placement.is_steered() {
        return steering::check(&checked.backing, options);
    }
    let mut checked_lanes: Vec<CheckedLane> = Vec::new();
    for lane in &options.lanes {
        let location =
            check_lane_apart(lane, checked, &checked_lanes).map_err(|fault| fault.in_lane(lane))?;
        let path = lane.clone();
        checked_lanes.push(CheckedLane { path, location });
    }
    Ok(())
}

/// A lane that has passed the checks.
struct CheckedLane {
    path: PathBuf,
    location: DirLocation,
}

/// Checks that a directory can be a lane, apart from the backing, the mount point and the earlier lanes. Returns its
/// location.
fn check_lane_apart(
    lane: &Path,
    checked: &CheckedPaths,
    earlier_lanes: &[CheckedLane],
) -> Result<DirLocation, LaneFault> {
    let location = check_lane(lane)?;
    for dir in [&checked.backing, &checked.mount_point] {
        let dir_location = DirLocation::find(dir).map_err(LaneFault::Io)?;
        check_apart(&location, &dir_location, dir)?;
    }
    for earlier in earlier_lanes {
        check_apart(&location, &earlier.location, &earlier.path)?;
    }
    Ok(location)
}

/// Checks that a directory can be a lane, which gets the data of files: no other user may change it, and this user may
/// write to it. Returns its location.
fn check_lane(lane: &Path) -> Result<DirLocation, LaneFault> {
    if !record::is_lane_path(lane_path_in_links(lane)) {
        return Err(LaneFault::NotPlain);
    }
    let metadata = lane
        .metadata()
        .map_err(|error| LaneFault::from_io(&error))?;
    if !metadata.is_dir() {
        return Err(LaneFault::NotDirectory);
    }
    check_place(lane).map_err(|error| match error {
        TrustError::Io { error, .. } => LaneFault::from_io(&error),
        exposed => LaneFault::Exposed(exposed),
    })?;
    let needed_access = Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK;
    accessat(CWD, lane, needed_access, AtFlags::EACCESS).map_err(LaneFault::from_errno)?;
    DirLocation::find(lane).map_err(LaneFault::Io)
}

/// The location of a directory. A comparison of locations is right despite bind mounts and symbolic links.
///
/// Device and inode of a directory and of its ancestors show whether it is another directory or lies below it. A bind
/// mount has other ancestors than the directory that it shows, so the path within the file system is compared too.
struct DirLocation {
    /// Device and inode of the directory, then of each of its ancestors.
    ancestry: Vec<(u64, u64)>,
    /// `None` if the mount table does not have the directory.
    position: Option<PositionInFileSystem>,
}

/// The path of a directory from the top of its file system.
struct PositionInFileSystem {
    /// Device number of the file system: major, minor.
    device: (u32, u32),
    path: PathBuf,
}

impl DirLocation {
    fn find(path: &Path) -> io::Result<Self> {
        let canonical = path.canonicalize()?;
        let ancestry = canonical.ancestors().map(|dir| {
            let metadata = dir.metadata()?;
            Ok((metadata.dev(), metadata.ino()))
        });
        Ok(Self {
            ancestry: ancestry.collect::<io::Result<_>>()?,
            position: PositionInFileSystem::find(&canonical),
        })
    }

    /// Returns whether this directory is `other` or lies below it.
    fn is_at_or_below(&self, other: &Self) -> bool {
        let is_below = match (&self.position, &other.position) {
            (Some(ours), Some(theirs)) => {
                ours.device == theirs.device && ours.path.starts_with(&theirs.path)
            }
            _ => false,
        };
        is_below || self.ancestry.contains(&other.ancestry[0])
    }
}

impl PositionInFileSystem {
    /// Returns the position of a canonical path; `None` if the mount table cannot be read or does not have the path.
    fn find(canonical: &Path) -> Option<Self> {
        let entries = mountinfo::parse(&std::fs::read("/proc/self/mountinfo").ok()?);
        let mount = mountinfo::holding(&entries, canonical)?;
        let path_in_mount = canonical.strip_prefix(&mount.mount_point).ok()?;
        Some(Self {
            device: mount.device,
            path: mount.root.join(path_in_mount),
        })
    }
}

/// Fails if a lane and the other directory (at `path`) are the same, or if one lies in the other.
fn check_apart(lane: &DirLocation, other: &DirLocation, path: &Path) -> Result<(), LaneFault> {
    let path = path.to_owned();
    match (lane.is_at_or_below(other), other.is_at_or_below(lane)) {
        (true, true) => Err(LaneFault::Same { other: path }),
        (true, false) => Err(LaneFault::Inside { dir: path }),
        (false, true) => Err(LaneFault::Contains { dir: path }),
        (false, false) => Ok(()),
    }
}

/// Returns the path of a lane as links and the record contain it: without slashes at its end. Symbolic links in it are
/// not resolved, because other hosts may reach the same directory in another way.
pub(crate) fn lane_path_in_links(lane: &Path) -> &OsStr {
    let bytes = lane.as_os_str().as_bytes();
    match bytes.iter().rposition(|byte| *byte != b'/') {
        Some(last) => OsStr::from_bytes(&bytes[..=last]),
        None => OsStr::new(""),
    }
}

/// Returns the record of a backing; `None` if no file was ever placed.
pub(crate) fn find_record(
    backing: &Path,
    directory: &DirBacking,
) -> Result<Option<Record>, AttachError> {
    Record::find(directory).map_err(lane_record_error(backing))
}

/// Returns a function that adds the path of the backing to an error of its record.
pub(crate) fn lane_record_error(backing: &Path) -> impl Fn(RecordError) -> AttachError + use<> {
    let backing = backing.to_owned();
    move |source| AttachError::LaneRecord {
        backing: backing.clone(),
        source,
    }
}

/// Where an opened store puts new files. Files that are in lanes or logs already are served in both cases.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum NewFiles {
    /// New files go to lanes and logs as the options say.
    ByOptions,
    /// New files go to the backing itself, whatever the options say.
    InBacking,
}

/// Opens a backing together with its lanes, the directories of I/O servers that have the data of its files. Returns the
/// directory `directory` alone if neither its record (the file that lists the lanes) nor the options name any.
///
/// Fails if a lane of the options cannot be reached. For any other lane that cannot be reached, `notice` is called with
/// a message, and only the files of that lane cannot be used. `new_files` says whether the options decide where new
/// files go.
pub(crate) fn open_store(
    backing: &Path,
    directory: DirBacking,
    options: &Options,
    new_files: NewFiles,
    notice: &mut dyn FnMut(String),
) -> Result<PlaceableStore, AttachError> {
    let places_new_files = new_files == NewFiles::ByOptions
        && options.placement == Placement::Dirs
        && !options.read_only;
    let record = find_record(backing, &directory)?;
    let has_no_lanes = record.as_ref().is_none_or(|record| record.lanes.is_empty());
    if !places_new_files && has_no_lanes {
        return Ok(PlaceableStore::Lower(directory));
    }
    let host = host_name(options)?;
    let mut record = match record {
        Some(record) => record,
        None => Record::make(&directory, &host).map_err(lane_record_error(backing))?,
    };
    // The lanes of the options come first, because only they take new files.
    let mut lanes = Vec::new();
    if places_new_files {
        for lane in &options.lanes {
            let opened = open_lane_of_options(lane, backing, &directory, &mut record, &host)?;
            lanes.push(opened);
        }
    }
    let absent = open_lanes_of_record(&record, &mut lanes, notice);
    // Links to new files are prepared in the staging directory, so a mount that only reads works without it.
    let staging = match record::open_staging(&directory, &host) {
        Ok(staging) => Some(staging),
        Err(OwnError::Backing(Errno::ROFS)) if options.read_only => None,
        Err(error) => return Err(lane_record_error(backing)(error.into())),
    };
    let rule = places_new_files
        .then(|| placement_rule(options, &host))
        .transpose()?;
    let setup = Setup {
        id: record.id,
        staging,
        rule,
        lanes,
        absent,
    };
    open_lanes(backing, directory, setup).map(PlaceableStore::Upper)
}

/// Opens a backing for reading only, with its lanes (directories with the data of files) if its record lists some.
/// Nothing is created, not even the staging directory of this host. `notice` gets a message for each lane that cannot
/// be reached.
pub(crate) fn open_to_read(
    backing: &Path,
    directory: DirBacking,
    notice: &mut dyn FnMut(String),
) -> Result<PlaceableStore, AttachError> {
    let record = match find_record(backing, &directory)? {
        Some(record) if !record.lanes.is_empty() => record,
        _ => return Ok(PlaceableStore::Lower(directory)),
    };
    let mut lanes = Vec::new();
    let absent = open_lanes_of_record(&record, &mut lanes, notice);
    let setup = Setup {
        id: record.id,
        staging: None,
        rule: None,
        lanes,
        absent,
    };
    open_lanes(backing, directory, setup).map(PlaceableStore::Upper)
}

fn open_lanes(
    backing: &Path,
    directory: DirBacking,
    setup: Setup<DirBacking>,
) -> Result<Lanes<DirBacking>, AttachError> {
    let opened = Lanes::open(directory, setup);
    opened.map_err(|errno| AttachError::BackingUnusable {
        path: backing.into(),
        source: errno.into(),
    })
}

/// Opens a lane of the options, a directory that takes the data of new files. The lane gets the mark of this backing (a
/// file that names it), and the backing's list of lanes gets the path of the lane.
///
/// Fails if the record has the lane but the mark is missing: another directory may be mounted there now.
fn open_lane_of_options(
    lane: &Path,
    backing: &Path,
    primary: &DirBacking,
    record: &mut Record,
    host: &str,
) -> Result<Arc<Lane<DirBacking>>, AttachError> {
    check_lane(lane).map_err(|fault| fault.in_lane(lane))?;
    let opened =
        DirBacking::open(lane).map_err(|error| LaneFault::from_io(&error).in_lane(lane))?;
    let to_error = |error| LaneFault::from_own(error).in_lane(lane);
    let path_in_links = lane_path_in_links(lane);
    if !record::is_marked(&opened, record.id).map_err(to_error)? {
        if record.lanes.iter().any(|known| known == path_in_links) {
            let fault = LaneFault::Unmarked {
                lane: lane.to_owned(),
                backing: backing.to_owned(),
            };
            return Err(fault.in_lane(lane));
        }
        record::put_mark(&opened, record.id).map_err(to_error)?;
    }
    record
        .add(primary, host, path_in_links)
        .map_err(lane_record_error(backing))?;
    Ok(Lane::new(opened, path_in_links.to_owned()))
}

/// Opens the lanes (directories with the data of files) that the backing's record lists, and adds those that are not in
/// `lanes` yet. Returns the paths of lanes that cannot be reached, after a call of `notice` for each.
fn open_lanes_of_record(
    record: &Record,
    lanes: &mut Vec<Arc<Lane<DirBacking>>>,
    notice: &mut dyn FnMut(String),
) -> Vec<OsString> {
    let mut absent = Vec::new();
    for path in &record.lanes {
        if lanes.iter().any(|lane| lane.path() == path) {
            continue;
        }
        match open_marked_lane(Path::new(path), record.id) {
            Ok(backing) => lanes.push(Lane::new(backing, path.clone())),
            Err(fault) => {
                let lane = quoted_path(Path::new(path));
                notice(format!(
                    "lane {lane} {fault}; its files cannot be used until this lane can be reached"
                ));
                absent.push(path.clone());
            }
        }
    }
    absent
}

/// Opens a lane and checks that it has the mark of the backing `id`. The error is the end of a sentence that begins
/// with the lane.
pub(crate) fn open_marked_lane(lane: &Path, id: u128) -> Result<DirBacking, String> {
    let opened = DirBacking::open(lane).map_err(|error| LaneFault::from_io(&error).to_string())?;
    match record::is_marked(&opened, id) {
        Ok(true) => Ok(opened),
        Ok(false) => Err("is not the directory that files were placed in".into()),
        Err(error) => Err(LaneFault::from_own(error).to_string()),
    }
}

/// Frees the space of placed files that were removed. A failure is logged, and the next call tries again.
pub(crate) fn finish_removals(store: &Store) {
    if let Some(lanes) = store.lane_layer()
        && let Err(error) = lanes.finish_removals()
    {
        tracing::warn!(%error, "cannot free the space of removed files in their lanes yet; firnd tries again");
    }
}

/// Adds paths, counts and states to the lanes of the status. A lane is a directory with the data of files.
/// `lane_statuses` already has an entry for each open lane, in their order; lanes that cannot be reached are appended.
pub(crate) fn fill_lane_statuses(lanes: &Lanes<DirBacking>, lane_statuses: &mut Vec<LaneStatus>) {
    // The lanes of the options come first, and only they take new files.
    let target_count = lanes.rule().map_or(0, Rule::lane_count);
    for (index, (lane_status, lane)) in lane_statuses.iter_mut().zip(lanes.lanes()).enumerate() {
        let figures = lane.figures();
        lane_status.path = lane.path().as_bytes().into();
        lane_status.placed = Some(PlacedStatus {
            files: figures.files,
            bytes: figures.bytes,
            takes_files: index < target_count,
            state: protocol_lane_state(figures.state),
        });
    }
    for path in lanes.absent() {
        lane_statuses.push(LaneStatus {
            path: path.as_bytes().into(),
            placed: Some(PlacedStatus {
                state: LaneState::Gone,
                ..PlacedStatus::default()
            }),
            ..LaneStatus::default()
        });
    }
}

/// Converts the state of a lane to the type of the control protocol.
fn protocol_lane_state(state: firn_lanes::LaneState) -> LaneState {
    match state {
        firn_lanes::LaneState::Ok => LaneState::Ok,
        firn_lanes::LaneState::Full => LaneState::Full,
        firn_lanes::LaneState::Gone => LaneState::Gone,
        firn_lanes::LaneState::Hung => LaneState::Hung,
    }
}

/// Average number of files in a lane from which placement is faster than striping.
const FILES_PER_LANE_MIN: u64 = 4;

/// Returns advice for the user if placement on lanes (I/O servers) is slower than it could be: there are too few files,
/// or one lane has more than twice its share. A checkpoint is complete only when its slowest lane is done.
pub(crate) fn advise_on_lanes(lanes: &[LaneStatus]) -> Vec<String> {
    let mut lane_count = 0;
    let mut file_count = 0;
    let mut fullest: Option<(&LaneStatus, u64)> = None;
    for lane in lanes {
        let Some(placed) = &lane.placed else {
            continue;
        };
        if !placed.takes_files {
            continue;
        }
        lane_count += 1;
        file_count += placed.files;
        if fullest.is_none_or(|(_, most_files)| placed.files >= most_files) {
            fullest = Some((lane, placed.files));
        }
    }
    let Some((fullest_lane, most_files)) = fullest else {
        return Vec::new();
    };
    if file_count == 0 || lane_count < 2 {
        return Vec::new();
    }
    if file_count < FILES_PER_LANE_MIN * lane_count {
        return vec![format!(
            "{lane_count} lanes got only {file_count} file(s): with fewer than {FILES_PER_LANE_MIN} for each lane, \
             files striped over all servers are written faster"
        )];
    }
    // The fair share of a lane is `file_count / lane_count`.
    let is_over_twice_its_share = most_files * lane_count > 2 * file_count;
    if !is_over_twice_its_share {
        return Vec::new();
    }
    vec![format!(
        "{} got {most_files} of {file_count} files: number the files of a checkpoint consecutively, or use a lane-map",
        fullest_lane.path
    )]
}

/// Returns the reply to a request for a file's lane on a mount without placement.
pub(crate) fn refuse_without_placement() -> Reply {
    Reply::Error {
        errno: libc::EOPNOTSUPP,
        message: "this mount has no placement, so only the file system knows where a file is: ask it, or mount with placement".into(),
    }
}

/// Returns the reply to a request for a file's lane (the directory that has its data): where the data of an existing
/// file is, and where a new file of this name would be placed.
pub(crate) fn explain_lane(store: &Store, path: &BytePath) -> Reply {
    let Some(lanes) = store.lane_layer() else {
        return refuse_without_placement();
    };
    let relative = Path::new(OsStr::from_bytes(path.as_bytes()));
    let choice = match lanes.rule() {
        None => LaneChoice {
            lane: None,
            reason: "no lane of this mount takes new files".into(),
        },
        Some(rule) => explain_lane_choice(rule, relative),
    };
    let existing_file = match find_object(lanes, path.as_bytes()) {
        Ok(inode) => Some(inode),
        Err(Errno::NOENT) => None,
        Err(error) => {
            return Reply::Error {
                errno: error.raw_os_error(),
                message: format!("{path}: {}", crate::process::describe_errno(error)),
            };
        }
    };
    let path_in_lane = existing_file
        .as_ref()
        .and_then(|inode| lanes.path_in_lane(inode));
    Reply::Placed(Explanation {
        exists: existing_file.is_some(),
        file: path_in_lane.map(|file| file.as_bytes().into()),
        server: None,
        lane: choice
            .lane
            .map(|index| lanes.lanes()[index].path().as_bytes().into()),
        reason: choice.reason,
    })
}
