//! Finds what a power loss may have left of placed files, and forgets lanes that are given up. Both work without a
//! mount.

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
use crate::unmounted::{FoundOrphan, open_unmounted};

/// Walks a backing and its lanes, and returns all that nothing refers to: files without a name, unfinished links, and
/// logs without a file.
///
/// With `repair` these are removed, and also logs whose removal a dead host has begun. A dangling link stays, because
/// its lane may only be mounted elsewhere.
pub fn find_orphans(
    backing: &Path,
    options: &Options,
    repair: bool,
    notice: &mut dyn FnMut(String),
) -> Result<Vec<FoundOrphan>, AttachError> {
    process::prepare();
    if repair {
        logs::end_removals(backing, options)?;
    }
    let (backing, directory, _locks) = open_unmounted(backing, options)?;
    let lanes =
        match placement::open_store(&backing, directory, options, NewFiles::InBacking, notice)? {
            PlaceableStore::Upper(lanes) => lanes,
            PlaceableStore::Lower(directory) => {
                return logs::find_logs_without_file(&backing, &directory);
            }
        };
    let lost = logs::find_logs_without_file(&backing, &lanes)?;
    let found = lanes
        .find_orphans()
        .map_err(|error| walk_error(&backing, error))?;
    let removed = AttachError::io("remove the files without a name");
    let mut reports = Vec::new();
    for orphan in &found {
        let removes = repair && !matches!(orphan, Orphan::Dangling { .. });
        reports.push(FoundOrphan {
            is_removed: removes,
            ..describe_orphan(&backing, &lanes, orphan)
        });
    }
    let mut to_remove = found
        .iter()
        .zip(&reports)
        .filter(|(_, report)| report.is_removed);
    to_remove
        .try_for_each(|(orphan, _)| lanes.remove_orphan(orphan))
        .map_err(|errno| removed(errno.into()))?;
    reports.extend(lost);
    Ok(reports)
}

fn walk_error(backing: &Path, error: OrphanError) -> AttachError {
    AttachError::BackingUnusable {
        path: backing.into(),
        source: std::io::Error::other(error.to_string()),
    }
}

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

/// Removes a lane from the record of a backing. Fails if the lane can be reached and has files of that backing.
pub fn forget_lane(backing: &Path, lane: &Path, options: &Options) -> Result<(), AttachError> {
    process::prepare();
    let (backing, directory, _locks) = open_unmounted(backing, options)?;
    let lane_text: OsString = placement::lane_path_in_links(lane).to_owned();
    let in_backing = placement::lane_record_error(&backing);
    let mut record = match Record::find(&directory).map_err(&in_backing)? {
        Some(record) if record.lanes.contains(&lane_text) => record,
        _ => {
            let lane = lane.to_owned();
            return Err(AttachError::NoSuchLane { lane, backing });
        }
    };
    if let Ok(opened) = placement::open_marked_lane(lane, record.id) {
        let failed = |errno: Errno| LaneFault::from_errno(errno).in_lane(lane);
        let files = firn_lanes::count_files(&opened, record.id).map_err(failed)?;
        if files > 0 {
            let lane = lane.to_owned();
            return Err(AttachError::LaneInUse {
                lane,
                backing,
                files,
            });
        }
        record::remove_mark(&opened, record.id).map_err(failed)?;
    }
    record.forget(&directory, &lane_text).map_err(&in_backing)
}
