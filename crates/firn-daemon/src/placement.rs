//! Placement over several directories (`placement=dirs`): opens the lanes of a mount, and checks that they can be used.
//! A *lane* is one I/O server. [`crate::steering`] has the other placements.
//!
//! The path of a lane is used as the user gave it, without resolving symbolic links. Links in the backing contain this
//! path, and other hosts may reach the same directory in another way.
//!
//! Invariants
//! * A backing whose record names lanes is never opened without them, so its placed files are plain files in every
//!   mount.
//! * No file is placed in a directory in which other users could have put something (`firn_trust`).

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
use crate::lane_rule::{explain_rule, rule};
use crate::preflight::Checked;
use crate::steering;
use crate::store::{Layers as _, PlaceableStore, Store};

/// Checks the lanes of the options before anything is changed.
pub(crate) fn check(options: &Options, checked: &Checked) -> Result<(), AttachError> {
    if options.placement == Placement::None {
        return Ok(());
    }
    rule(options, "")?;
    if options.placement.is_steered() {
        return steering::check(&checked.backing, options);
    }
    let mut known: Vec<(PathBuf, Place)> = Vec::new();
    for lane in &options.lanes {
        let place = check_lane(lane).map_err(|why| why.at(lane))?;
        for taken in [&checked.backing, &checked.mount_point] {
            let other = Place::of(taken).map_err(|error| LaneFault::Io(error).at(lane))?;
            check_apart(&place, &other, taken).map_err(|why| why.at(lane))?;
        }
        for (path, other) in &known {
            check_apart(&place, other, path).map_err(|why| why.at(lane))?;
        }
        known.push((lane.clone(), place));
    }
    Ok(())
}

/// Checks that a directory can be a lane, and returns its place.
fn check_lane(lane: &Path) -> Result<Place, LaneFault> {
    if !record::is_lane_path(lane_text(lane)) {
        return Err(LaneFault::NotPlain);
    }
    let metadata = lane.metadata().map_err(|error| LaneFault::of_io(&error))?;
    if !metadata.is_dir() {
        return Err(LaneFault::NotDirectory);
    }
    check_place(lane).map_err(|error| match error {
        TrustError::Io { error, .. } => LaneFault::of_io(&error),
        exposed => LaneFault::Exposed(exposed),
    })?;
    let needed = Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK;
    accessat(CWD, lane, needed, AtFlags::EACCESS).map_err(LaneFault::of)?;
    Place::of(lane).map_err(LaneFault::Io)
}

/// The place of a directory. Device and inode of it and of the directories above show that two paths are the same, in
/// spite of bind mounts and symbolic links.
///
/// The position in its file system is needed too: the directories above a bind mount are not those above the mounted
/// directory.
struct Place {
    /// Device and inode of the directory, then of each directory above.
    chain: Vec<(u64, u64)>,
    /// The device of the file system and the path from its top; `None` if the mount table does not have them.
    position: Option<((u32, u32), PathBuf)>,
}

impl Place {
    fn of(path: &Path) -> io::Result<Self> {
        let canonical = path.canonicalize()?;
        let chain = canonical.ancestors().map(|dir| {
            let metadata = dir.metadata()?;
            Ok((metadata.dev(), metadata.ino()))
        });
        Ok(Self {
            chain: chain.collect::<io::Result<_>>()?,
            position: position_of(&canonical),
        })
    }

    /// Returns whether this directory is `other` or lies below it.
    fn is_in(&self, other: &Self) -> bool {
        let is_below = match (&self.position, &other.position) {
            (Some((device, path)), Some((other_device, other_path))) => {
                device == other_device && path.starts_with(other_path)
            }
            _ => false,
        };
        is_below || self.chain.contains(&other.chain[0])
    }
}

/// Returns the position of a canonical path in the file system that is mounted there.
fn position_of(canonical: &Path) -> Option<((u32, u32), PathBuf)> {
    let entries = mountinfo::parse(&std::fs::read("/proc/self/mountinfo").ok()?);
    let mount = mountinfo::holding(&entries, canonical)?;
    let below = canonical.strip_prefix(&mount.mount_point).ok()?;
    Some((mount.device, mount.root.join(below)))
}

/// Fails if one directory is the other, or lies in it.
fn check_apart(lane: &Place, other: &Place, path: &Path) -> Result<(), LaneFault> {
    let path = path.to_owned();
    match (lane.is_in(other), other.is_in(lane)) {
        (true, true) => Err(LaneFault::Same { other: path }),
        (true, false) => Err(LaneFault::Inside { dir: path }),
        (false, true) => Err(LaneFault::Contains { dir: path }),
        (false, false) => Ok(()),
    }
}

/// Returns the path of a lane as it is in links: without slashes at its end.
pub(crate) fn lane_text(lane: &Path) -> &OsStr {
    let bytes = lane.as_os_str().as_bytes();
    let len = bytes.iter().rposition(|byte| *byte != b'/');
    OsStr::from_bytes(&bytes[..len.map_or(0, |last| last + 1)])
}

/// Returns the record of a backing, which names its lanes; `None` if no file was ever placed.
pub(crate) fn find_record(
    backing: &Path,
    directory: &DirBacking,
) -> Result<Option<Record>, AttachError> {
    Record::find(directory).map_err(in_backing(backing))
}

/// Returns a function that adds the path of the backing to an error of its record.
pub(crate) fn in_backing(backing: &Path) -> impl Fn(RecordError) -> AttachError + use<> {
    let backing = backing.to_owned();
    move |source| AttachError::LaneRecord {
        backing: backing.clone(),
        source,
    }
}

/// What a mount uses lanes for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// New files are placed in lanes if the options say so.
    Place,
    /// Only files that are already placed are served; the options do not matter.
    Serve,
}

/// Opens the lanes of a backing if it has some, or if the options ask for lanes. Otherwise it returns the directory
/// alone.
pub(crate) fn open(
    backing: &Path,
    directory: DirBacking,
    options: &Options,
    wanted: Use,
    notice: &mut dyn FnMut(String),
) -> Result<PlaceableStore, AttachError> {
    let places = wanted == Use::Place && options.placement == Placement::Dirs && !options.read_only;
    let record = find_record(backing, &directory)?;
    if !places && record.as_ref().is_none_or(|record| record.lanes.is_empty()) {
        return Ok(PlaceableStore::Lower(directory));
    }
    let host = host_name(options)?;
    let mut record = match record {
        Some(record) => record,
        None => Record::make(&directory, &host).map_err(in_backing(backing))?,
    };
    let mut lanes = Vec::new();
    if places {
        for lane in &options.lanes {
            let opened = open_wanted(lane, backing, &directory, &mut record, &host)?;
            lanes.push(opened);
        }
    }
    let absent = open_known(&record, &mut lanes, notice);
    let staging = match record::open_staging(&directory, &host) {
        Err(OwnError::Backing(Errno::ROFS)) if options.read_only => None,
        opened => Some(opened.map_err(|error| in_backing(backing)(error.into()))?),
    };
    let setup = Setup {
        id: record.id,
        staging,
        rule: places.then(|| rule(options, &host)).transpose()?,
        lanes,
        absent,
    };
    open_lanes(backing, directory, setup).map(PlaceableStore::Upper)
}

/// Opens the lanes of a backing for reading only. Returns the directory as the inner error if there are no lanes.
pub(crate) fn open_to_read(
    backing: &Path,
    directory: DirBacking,
    notice: &mut dyn FnMut(String),
) -> Result<Result<Lanes<DirBacking>, DirBacking>, AttachError> {
    let record = find_record(backing, &directory)?;
    let Some(record) = record.filter(|record| !record.lanes.is_empty()) else {
        return Ok(Err(directory));
    };
    let mut lanes = Vec::new();
    let absent = open_known(&record, &mut lanes, notice);
    let setup = Setup {
        id: record.id,
        staging: None,
        rule: None,
        lanes,
        absent,
    };
    open_lanes(backing, directory, setup).map(Ok)
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

/// Opens a lane for new files. The lane gets the mark of this backing, and the backing's record gets the path of the
/// lane.
///
/// Fails if the record has the lane but the mark is missing, because another directory may be mounted there.
fn open_wanted(
    lane: &Path,
    backing: &Path,
    primary: &DirBacking,
    record: &mut Record,
    host: &str,
) -> Result<Arc<Lane<DirBacking>>, AttachError> {
    check_lane(lane).map_err(|why| why.at(lane))?;
    let opened = DirBacking::open(lane).map_err(|error| LaneFault::of_io(&error).at(lane))?;
    let failed = |error| LaneFault::of_own(error).at(lane);
    if !record::is_marked(&opened, record.id).map_err(failed)? {
        let text = lane_text(lane);
        if record.lanes.iter().any(|known| known == text) {
            let (lane, backing) = (lane.to_owned(), backing.to_owned());
            return Err(LaneFault::Unmarked {
                lane: lane.clone(),
                backing,
            }
            .at(&lane));
        }
        record::put_mark(&opened, record.id).map_err(failed)?;
    }
    let added = record.add(primary, host, lane_text(lane));
    added.map_err(in_backing(backing))?;
    Ok(Lane::new(opened, lane_text(lane).to_owned()))
}

/// Opens the other lanes in the record, and returns the paths of those that cannot be reached.
fn open_known(
    record: &Record,
    lanes: &mut Vec<Arc<Lane<DirBacking>>>,
    notice: &mut dyn FnMut(String),
) -> Vec<OsString> {
    let mut absent = Vec::new();
    for path in &record.lanes {
        if lanes.iter().any(|lane| lane.path() == path) {
            continue;
        }
        match open_marked(Path::new(path), record.id) {
            Ok(backing) => lanes.push(Lane::new(backing, path.clone())),
            Err(why) => {
                let lane = quoted_path(Path::new(path));
                notice(format!(
                    "lane {lane} {why}; until it is back its files cannot be used"
                ));
                absent.push(path.clone());
            }
        }
    }
    absent
}

/// Opens a lane and checks its mark; the error completes a sentence that begins with the lane.
pub(crate) fn open_marked(lane: &Path, id: u128) -> Result<DirBacking, String> {
    let opened = DirBacking::open(lane).map_err(|error| LaneFault::of_io(&error).to_string())?;
    match record::is_marked(&opened, id) {
        Ok(true) => Ok(opened),
        Ok(false) => Err("is not the directory that files were placed in".into()),
        Err(error) => Err(LaneFault::of_own(error).to_string()),
    }
}

/// Frees the space of files that were removed.
pub(crate) fn finish_removals(store: &Store) {
    if let Some(lanes) = store.placed()
        && let Err(error) = lanes.finish_removals()
    {
        tracing::warn!(%error, "removed files stay in their lanes for now");
    }
}

/// Puts paths, counts and states of lanes into the status. Lanes that cannot be reached come last.
pub(crate) fn show_lanes(placed: &Lanes<DirBacking>, shown: &mut Vec<LaneStatus>) {
    let targets = placed.rule().map_or(0, Rule::lane_count);
    for (number, (shown, lane)) in shown.iter_mut().zip(placed.lanes()).enumerate() {
        let figures = lane.figures();
        shown.path = lane.path().as_bytes().into();
        shown.placed = Some(PlacedStatus {
            files: figures.files,
            bytes: figures.bytes,
            takes_files: number < targets,
            state: match figures.state {
                firn_lanes::LaneState::Ok => LaneState::Ok,
                firn_lanes::LaneState::Full => LaneState::Full,
                firn_lanes::LaneState::Gone => LaneState::Gone,
                firn_lanes::LaneState::Hung => LaneState::Hung,
            },
        });
    }
    shown.extend(placed.absent().iter().map(|path| LaneStatus {
        path: path.as_bytes().into(),
        placed: Some(PlacedStatus {
            state: LaneState::Gone,
            ..PlacedStatus::default()
        }),
        ..LaneStatus::default()
    }));
}

/// Number of files for each lane from which placement is faster than striping (docs/internals/lanes.md).
const FILES_PER_LANE_MIN: u64 = 4;

/// Returns advice if placement is slower than possible. A checkpoint is complete only when its slowest lane is done.
pub(crate) fn advise(lanes: &[LaneStatus]) -> Vec<String> {
    let targets = lanes.iter().filter_map(|lane| {
        let placed = lane.placed.as_ref().filter(|placed| placed.takes_files)?;
        Some((lane, placed))
    });
    let targets: Vec<_> = targets.collect();
    let files: u64 = targets.iter().map(|(_, placed)| placed.files).sum();
    let count = targets.len() as u64;
    if files == 0 || count < 2 {
        return Vec::new();
    }
    if files < FILES_PER_LANE_MIN * count {
        return vec![format!(
            "{files} file(s) for {count} lanes are few: with fewer than {FILES_PER_LANE_MIN} for each lane, files that are striped over all servers are written faster"
        )];
    }
    let fullest = targets.iter().max_by_key(|(_, placed)| placed.files);
    let (lane, placed) = fullest.expect("there are lanes");
    if placed.files * count <= 2 * files {
        return Vec::new();
    }
    vec![format!(
        "{} got {} of {files} files: give the files of a checkpoint numbers one after the other, or a lane-map",
        lane.path, placed.files
    )]
}

/// Returns the reply to a request for a file's lane on a mount without placement.
pub(crate) fn explain_without() -> Reply {
    Reply::Error {
        errno: libc::EOPNOTSUPP,
        message: "without placement the file system alone knows where a file is: ask it, or mount with placement".into(),
    }
}

/// Returns the reply to a request for a file's lane: where the file lies, or would be placed.
pub(crate) fn explain(store: &Store, path: &BytePath) -> Reply {
    let Some(lanes) = store.placed() else {
        return explain_without();
    };
    let relative = Path::new(OsStr::from_bytes(path.as_bytes()));
    let (lane, reason) = match lanes.rule() {
        None => (None, "no lane of this mount takes new files".into()),
        Some(rule) => explain_rule(rule, relative),
    };
    let found = find_object(lanes, path.as_bytes());
    match found {
        Err(error) if error != Errno::NOENT => Reply::Error {
            errno: error.raw_os_error(),
            message: format!("{path}: {}", crate::process::explain(error)),
        },
        found => Reply::Placed(Explanation {
            exists: found.is_ok(),
            file: found
                .ok()
                .and_then(|inode| lanes.path_in_lane(&inode))
                .map(|file| file.as_bytes().into()),
            server: None,
            lane: lane.map(|number: usize| lanes.lanes()[number].path().as_bytes().into()),
            reason,
        }),
    }
}
