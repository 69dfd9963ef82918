//! Maintains the lanes of a backing without a mount: [`find_orphans`] finds, and with `repair` removes, what a power
//! loss may have left of placed files. [`forget_lane`] removes a lane that is given up from the list of lanes. A *lane*
//! is the directory of one I/O server; a *placed* file has its data in a lane, and a link in the backing.

use std::ffi::OsString;
use std::path::Path;

use firn_backing::{DirBacking, Errno};
use firn_config::Options;
use firn_lanes::{Lanes, Orphan, OrphanError, Record, record};

use crate::error::{AttachError, LaneFault};
use crate::logs;
use crate::placement::{self, NewFiles};
use crate::process;
use crate::store::PlaceableStore;
use crate::unmounted::{FoundOrphan, UnmountedBacking, open_unmounted};

/// Walks a backing and its lanes (directories of I/O servers that have the data of files), and returns all that nothing
/// refers to: files without a name, unfinished links, and logs without a file. The backing must not be mounted.
///
/// With `repair` these are removed, and also logs that a dead host has begun to remove. A dangling link stays, because
/// its lane may only be mounted elsewhere.
pub fn find_orphans(
    backing: &Path,
    options: &Options,
    repair: bool,
    notice: &mut dyn FnMut(String),
) -> Result<Vec<FoundOrphan>, AttachError> {
    process::prepare();
    if repair {
        logs::finish_removals_of_logged_files(backing, options)?;
    }
    let UnmountedBacking {
        path: backing,
        directory,
        locks: _locks,
    } = open_unmounted(backing, options)?;
    let store = placement::open_store(&backing, directory, options, NewFiles::InBacking, notice)?;
    let lanes = match store {
        PlaceableStore::Upper(lanes) => lanes,
        // Without lanes, only logs can be orphans.
        PlaceableStore::Lower(directory) => {
            return logs::find_logs_without_file(&backing, &directory);
        }
    };
    let logs_without_file = logs::find_logs_without_file(&backing, &lanes)?;
    let orphans = lanes
        .find_orphans()
        .map_err(|error| walk_error(&backing, error))?;
    let mut reports: Vec<FoundOrphan> = orphans
        .iter()
        .map(|orphan| describe_orphan(&backing, &lanes, orphan))
        .collect();
    if repair {
        remove_orphans(&lanes, &orphans, &mut reports)?;
    }
    reports.extend(logs_without_file);
    Ok(reports)
}

/// Removes all orphans but dangling links, and records that in their reports, which are in the same order.
fn remove_orphans(
    lanes: &Lanes<DirBacking>,
    orphans: &[Orphan],
    reports: &mut [FoundOrphan],
) -> Result<(), AttachError> {
    for (orphan, report) in orphans.iter().zip(reports) {
        if matches!(orphan, Orphan::Dangling { .. }) {
            continue;
        }
        lanes
            .remove_orphan(orphan)
            .map_err(|errno| AttachError::io("remove the files without a name")(errno.into()))?;
        report.is_removed = true;
    }
    Ok(())
}

/// Returns the error of a search that could not read the backing or a lane.
fn walk_error(backing: &Path, error: OrphanError) -> AttachError {
    AttachError::BackingUnusable {
        path: backing.into(),
        source: std::io::Error::other(error.to_string()),
    }
}

/// Describes an orphan for the report: a file in a lane without a name, an unfinished link, or a link without its file.
/// It is not removed yet.
fn describe_orphan(backing: &Path, lanes: &Lanes<DirBacking>, orphan: &Orphan) -> FoundOrphan {
    let (kind, path, bytes) = match orphan {
        Orphan::File { lane, entry, bytes } => {
            let lane = Path::new(lanes.lanes()[*lane].path());
            ("file", lane.join(entry), *bytes)
        }
        Orphan::Link { entry } => ("link", Path::new(".firn/placing").join(entry), 0),
        Orphan::Dangling { path } => ("dangling", backing.join(path), 0),
    };
    FoundOrphan {
        kind,
        path,
        bytes,
        is_removed: false,
    }
}

/// Removes a lane (the directory of an I/O server) from the backing's list of lanes, because it is given up. Fails if
/// the backing is mounted, or if the lane can be reached and has files of that backing.
pub fn forget_lane(backing: &Path, lane: &Path, options: &Options) -> Result<(), AttachError> {
    process::prepare();
    let UnmountedBacking {
        path: backing,
        directory,
        locks: _locks,
    } = open_unmounted(backing, options)?;
    let path_in_links: OsString = placement::lane_path_in_links(lane).to_owned();
    let to_error = placement::lane_record_error(&backing);
    let mut record = match Record::find(&directory).map_err(&to_error)? {
        Some(record) if record.lanes.contains(&path_in_links) => record,
        _ => {
            let lane = lane.to_owned();
            return Err(AttachError::NoSuchLane { lane, backing });
        }
    };
    if let Ok(opened) = placement::open_marked_lane(lane, record.id) {
        let to_lane_error = |errno: Errno| LaneFault::from_errno(errno).in_lane(lane);
        let files = firn_lanes::count_files(&opened, record.id).map_err(to_lane_error)?;
        if files > 0 {
            let lane = lane.to_owned();
            return Err(AttachError::LaneInUse {
                lane,
                backing,
                files,
            });
        }
        record::remove_mark(&opened, record.id).map_err(to_lane_error)?;
    }
    record.forget(&directory, &path_in_links).map_err(&to_error)
}
