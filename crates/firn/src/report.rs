//! The report of a run: one HTML page that shows what the mounts of a job did.
//!
//! * Each firnd keeps a *record* of its mount: sums, histograms, the timeline, checkpoints and events.
//! * [`Run`] collects the records of all hosts, and the checkpoints as they are now.
//! * [`render_page`] makes the page from them.
//!
//! Promises
//! * The page needs no network and no other file. All of it can be read without scripts.
//! * Text from a file system or a record is escaped: no name becomes markup.
//! * A damaged record is named on the page, and the others are shown.

mod chart;
mod checkpoint_table;
mod html;
mod page;
mod timeline;

use std::collections::HashMap;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use firn_client::checkpoints::{Checkpoint, Directory, Wholeness};
use firn_client::paths::RuntimeFiles;
use firn_client::{ClientError, Connection, Place};
use firn_format::durability::DurabilityLevel;
use firn_protocol::path::BytePath;
use firn_protocol::record::{Bucket, RECORD_BYTES_MAX, RunRecord};
use serde::{Deserialize, Serialize};

use crate::failure::{FAILED, Failure, NOT_FIRN, USAGE};
use crate::{output_file, text};

/// Maximum number of directories in which checkpoints are looked for.
const DIRECTORIES_MAX: usize = 32;
/// Maximum size in bytes of the records that are kept complete, which suffices for some hundred hosts. Further records
/// are reduced to what sums and the timeline need.
const COMPLETE_BYTES_MAX: usize = 64 << 20;
/// Maximum number of time intervals (buckets) in a reduced record.
const REDUCED_BUCKETS_MAX: usize = 64;

/// A checkpoint as it is when the report is made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CheckpointNow {
    /// Path of the checkpoint below the mount point.
    pub path: BytePath,
    /// Size of its files in bytes.
    pub bytes: u64,
    /// Number of its files.
    pub files: u64,
    /// One word for why the checkpoint cannot be used. `None` means that no reason is known.
    pub fault: Option<String>,
    /// The lowest durability level of its files. `None` means that it has no file.
    pub level: Option<DurabilityLevel>,
}

impl CheckpointNow {
    /// Returns the state of a checkpoint. A checkpoint whose wholeness is unknown has no fault.
    fn of(path: BytePath, checkpoint: &Checkpoint) -> Self {
        let fault = match checkpoint.wholeness {
            Wholeness::Whole | Wholeness::Unknown => None,
            other => Some(other.as_str().to_owned()),
        };
        Self {
            path,
            bytes: checkpoint.bytes,
            files: checkpoint.files,
            fault,
            level: checkpoint.level,
        }
    }
}

/// The content of a report: what the hosts of one run did.
#[derive(Default)]
pub struct Run {
    /// Records of the hosts, in the order of their names. There is at least one.
    pub records: Vec<RunRecord>,
    /// The checkpoints as they are now, by path below the mount point.
    pub checkpoints: HashMap<BytePath, CheckpointNow>,
    /// Sentences about data that could not be read.
    pub failures: Vec<String>,
    /// Bytes of the complete records.
    complete_bytes: usize,
    /// Number of reduced records.
    reduced_count: u64,
}

impl Run {
    /// Returns the run of the mount at `path`, or the last run of a backing that is not mounted.
    pub fn find(path: &Path) -> Result<Self, Failure> {
        match firn_client::find(path) {
            Ok(place) => Self::of_mount(&place),
            Err(ClientError::NoMount { .. }) => Self::of_backing(path),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the run of a mount until now, with the records of other hosts.
    fn of_mount(place: &Place) -> Result<Self, Failure> {
        let mut run = Self::with_record(query_record(place)?);
        run.add_other_hosts(&place.mount.backing);
        run.read_checkpoints(&place.mount.mount_point);
        Ok(run)
    }

    /// Returns what a mount of this host has done until now, without the records of other hosts.
    pub fn of_own_mount(path: &Path, reads_checkpoints: bool) -> Result<Self, Failure> {
        let place = firn_client::find(path)?;
        let mut run = Self::with_record(query_record(&place)?);
        if reads_checkpoints {
            run.read_checkpoints(&place.mount.mount_point);
        }
        Ok(run)
    }

    /// Replaces the record of this host's mount by the final record, which the mount wrote when it ended. `backing` is
    /// canonical.
    ///
    /// If there is no final record of that mount, the earlier one stays, and a note says that the end is missing.
    pub fn update_own(&mut self, backing: &Path) {
        let final_record = load_own_record(backing);
        let is_of_same_mount = |final_record: &RunRecord| {
            self.records
                .iter()
                .any(|record| record.began_unix_us == final_record.began_unix_us)
        };
        let why = match final_record {
            Ok(Some(final_record)) if is_of_same_mount(&final_record) => {
                self.records = vec![final_record];
                return;
            }
            Ok(_) => "its mount left no record".to_owned(),
            Err(why) => why,
        };
        self.failures
            .push(format!("the end of the run is not shown: {why}"));
    }

    /// Returns the last run of a backing that is not mounted, with its checkpoints as they are now.
    fn of_backing(path: &Path) -> Result<Self, Failure> {
        let backing = path
            .canonicalize()
            .map_err(|error| Failure::new(FAILED, format!("{}: {error}", text::path(path))))?;
        let mut run = Self::of_ended(&backing)?;
        run.read_checkpoints(&backing);
        Ok(run)
    }

    /// Returns the records of the last run of a backing that is not mounted. `backing` is canonical. Fails if there is
    /// no record that can be read.
    fn of_ended(backing: &Path) -> Result<Self, Failure> {
        let file = RuntimeFiles::of(backing, None)?.record;
        let mut run = match load_record(&file) {
            Ok(Some(own)) => Self::with_record(own),
            Ok(None) => Self::default(),
            Err(why) => Self {
                failures: vec![format!("{} cannot be read: {why}", text::path(&file))],
                ..Self::default()
            },
        };
        run.add_other_hosts(backing);
        if run.records.is_empty() {
            let why = run.failures.first().cloned().unwrap_or_else(|| {
                format!(
                    "{} is not mounted, and no mount of it on this host has left a record: name a mount point, or mount \
                     it with -o record-in=backing, which keeps records in the backing",
                    text::path(backing)
                )
            });
            return Err(Failure::new(NOT_FIRN, why));
        }
        Ok(run)
    }

    /// Returns a run with this host's record as the first one.
    fn with_record(own: RunRecord) -> Self {
        let mut run = Self::default();
        run.add(own);
        run
    }

    /// Adds the records that other hosts of the same run left in the backing. Records that cannot be read are noted.
    ///
    /// Each record is added before the next one is read, so the memory for records stays bounded.
    pub fn add_other_hosts(&mut self, backing: &Path) {
        // The backing of a run whose files were in memory only is removed with the run.
        if !backing.exists() {
            return;
        }
        let read = firn_daemon::read_records(backing, &mut |name, record| match record {
            Ok(record) => self.add(record),
            Err(why) => {
                let name = text::name(name);
                let text = format!("the record .firn/records/{name} cannot be read: {why}");
                self.failures.push(text);
            }
        });
        if let Err(error) = read {
            let text = format!("records of other hosts cannot be read: {error}");
            self.failures.push(text);
        }
        self.finish_records();
    }

    /// Sorts the records by host, and notes where records were reduced.
    pub fn finish_records(&mut self) {
        self.records
            .sort_by(|a, b| (&a.host, a.began_unix_us).cmp(&(&b.host, b.began_unix_us)));
        if std::mem::take(&mut self.reduced_count) > 0 {
            self.failures.push(format!(
                "the records of all hosts together are longer than {}: checkpoints and events of some hosts are left out",
                text::bytes(COMPLETE_BYTES_MAX as u64)
            ));
        }
    }

    /// Adds a record if it belongs to the same run: it overlaps in time with the first record, and is not known yet.
    pub fn add(&mut self, record: RunRecord) {
        let end_unix_us =
            |record: &RunRecord| record.began_unix_us + (record.lasted_seconds * 1e6) as u64;
        // The first record decides which run the report is about. Another run of the same backing does not overlap with
        // it.
        if let Some(first) = self.records.first() {
            let overlaps = record.began_unix_us <= end_unix_us(first)
                && first.began_unix_us <= end_unix_us(&record);
            let is_known = self.records.iter().any(|known| {
                known.host == record.host && known.began_unix_us == record.began_unix_us
            });
            if !overlaps || is_known {
                return;
            }
        }
        let estimated_bytes = estimated_bytes(&record);
        // Records beyond the bound are reduced, so that any number of hosts takes bounded memory.
        if self.complete_bytes + estimated_bytes <= COMPLETE_BYTES_MAX {
            self.complete_bytes += estimated_bytes;
            self.records.push(record);
        } else {
            self.reduced_count += 1;
            self.records.push(reduce_record(record));
        }
    }

    /// Reads the present state of the checkpoints in the records. `root` is the mount point or the backing. Directories
    /// that cannot be read are noted.
    pub fn read_checkpoints(&mut self, root: &Path) {
        for parent in self.checkpoint_directories().iter().take(DIRECTORIES_MAX) {
            let listed = Directory::find(&root.join(parent)).and_then(|dir| dir.look());
            match listed {
                Ok(listing) => {
                    self.checkpoints
                        .extend(listing.checkpoints.iter().map(|checkpoint| {
                            let path: BytePath = parent.join(&checkpoint.name).as_path().into();
                            (path.clone(), CheckpointNow::of(path, checkpoint))
                        }))
                }
                Err(error) => self
                    .failures
                    .push(format!("checkpoints cannot be examined: {error}")),
            }
        }
    }

    /// Returns the directories that contain checkpoints of the records, as paths below the mount point, each of them once.
    fn checkpoint_directories(&self) -> Vec<PathBuf> {
        // The path comes from a record, which another user may have written. So `..` and absolute paths are refused.
        let is_below_root = |path: &PathBuf| {
            path.components()
                .all(|component| matches!(component, Component::Normal(_)))
        };
        let mut directories: Vec<PathBuf> = self
            .records
            .iter()
            .flat_map(|record| &record.checkpoints)
            .filter_map(|checkpoint| checkpoint.path.as_path().parent().map(Path::to_owned))
            .filter(is_below_root)
            .collect();
        directories.sort();
        directories.dedup();
        directories
    }
}

/// Asks the firnd of a mount for its record until now. Fails if firnd does not answer, or the record is not valid.
fn query_record(place: &Place) -> Result<RunRecord, Failure> {
    let own = Connection::open(&place.mount)?.record()?;
    own.check().map_err(|error| {
        let mount_point = text::path(&place.mount.mount_point);
        Failure::new(FAILED, format!("the record of {mount_point}: {error}"))
    })
}

/// Returns an estimate of the memory in bytes that a record takes. Constants stand for the fixed parts of its elements.
fn estimated_bytes(record: &RunRecord) -> usize {
    let paths = record
        .checkpoints
        .iter()
        .map(|checkpoint| checkpoint.path.as_bytes().len() + 128);
    let events = record.events.iter().map(|event| {
        let fields = event.fields.iter();
        let fields = fields.map(|(name, value)| name.len() + value.len() + 48);
        event.kind.len() + 64 + fields.sum::<usize>()
    });
    let options = record.options.iter().map(|option| option.len() + 24);
    let bucket_bytes = record.buckets.len() * size_of::<Bucket>();
    bucket_bytes + paths.chain(events).chain(options).sum::<usize>()
}

/// Returns a record reduced in size: with the sums and histograms and a coarser timeline, but without checkpoints and
/// events.
fn reduce_record(mut record: RunRecord) -> RunRecord {
    let left_out = record.checkpoints.len() + record.events.len();
    record.forgotten = record.forgotten.saturating_add(left_out as u64);
    record.checkpoints = Vec::new();
    record.events = Vec::new();
    while record.buckets.len() > REDUCED_BUCKETS_MAX {
        let pairs = record.buckets.chunks(2).map(|pair| {
            let mut both = Bucket::default();
            pair.iter().for_each(|bucket| both.add(*bucket));
            both
        });
        record.buckets = pairs.collect();
        record.bucket_ms = record.bucket_ms.saturating_mul(2);
    }
    record
}

/// Returns the record of an ended mount of this host, by its canonical backing. Returns `None` if the mount left
/// none.
fn load_own_record(backing: &Path) -> Result<Option<RunRecord>, String> {
    let files = RuntimeFiles::of(backing, None).map_err(|error| error.to_string())?;
    load_record(&files.record)
}

/// Returns the record in a file of the runtime directory, or `None` if there is no such file. Fails if the file
/// is not a private file of this user.
fn load_record(path: &Path) -> Result<Option<RunRecord>, String> {
    let opened = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags((rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits() as i32)
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    let metadata = file.metadata().map_err(|error| error.to_string())?;
    let is_ours = metadata.uid() == rustix::process::geteuid().as_raw();
    if !metadata.is_file() || !is_ours || metadata.mode() & 0o077 != 0 {
        return Err("it is no private file of yours".to_owned());
    }
    let mut bytes = Vec::new();
    let mut bounded = file.take(RECORD_BYTES_MAX + 1);
    bounded
        .read_to_end(&mut bytes)
        .map_err(|error| error.to_string())?;
    let record = RunRecord::parse(&bytes).map_err(|error| error.to_string())?;
    Ok(Some(record))
}

/// Renders a run as one HTML page.
pub fn render_page(run: &Run) -> String {
    page::render_page(run)
}

/// Writes the HTML page of a run to a file.
pub fn write_page(run: &Run, file: &Path) -> Result<(), Failure> {
    output_file::write(file, render_page(run).as_bytes()).map_err(|error| {
        let file = text::path(file);
        Failure::new(
            FAILED,
            format!("cannot write the report to {file}: {error}"),
        )
    })
}

/// Refuses a file to which no report can be written. The caller checks this before the run begins.
pub fn check_target(file: &Path) -> Result<(), Failure> {
    if output_file::directory_of(file).is_dir() && !file.is_dir() {
        return Ok(());
    }
    let why = format!(
        "cannot write a report to {}: name a file in a directory that exists",
        text::path(file)
    );
    Err(Failure::new(USAGE, why))
}

#[cfg(test)]
mod tests {
    use firn_protocol::record::CheckpointRecord;

    use super::*;

    /// Returns a record of about 1 MiB, which is the maximum.
    fn long_record(host: usize) -> RunRecord {
        let checkpoint = |step| CheckpointRecord {
            path: format!("{}/step_{step}", "d".repeat(1700)).as_str().into(),
            step,
            ..CheckpointRecord::default()
        };
        let moment = Bucket {
            ingest_bytes: 7,
            held_bytes: 9,
            ..Bucket::default()
        };
        RunRecord {
            host: format!("n{host}"),
            began_unix_us: 1_000_000,
            lasted_seconds: 60.0,
            bucket_ms: 100,
            buckets: vec![moment; 600],
            checkpoints: (0..512).map(checkpoint).collect(),
            ..RunRecord::default()
        }
    }

    #[test]
    fn records_of_any_number_of_hosts_take_a_bounded_memory_and_keep_their_sums() {
        let mut run = Run::default();
        for host in 0..300 {
            run.add(long_record(host));
        }
        run.finish_records();
        let held: usize = run.records.iter().map(estimated_bytes).sum();
        let cut_bytes = 300 * REDUCED_BUCKETS_MAX * size_of::<Bucket>();
        assert!(held <= COMPLETE_BYTES_MAX + cut_bytes, "{held}");
        assert_eq!(run.records.len(), 300);
        for record in &run.records {
            let total = record.total();
            assert_eq!((total.ingest_bytes, total.held_bytes), (600 * 7, 9));
            assert_eq!(record.checkpoints.len() + record.forgotten as usize, 512);
            let seconds = record.buckets.len() as f64 * record.bucket_seconds();
            assert!((60.0..66.0).contains(&seconds), "{seconds}");
        }
        assert!(
            run.records
                .iter()
                .any(|record| record.checkpoints.len() == 512)
        );
        let [told] = run.failures.as_slice() else {
            panic!("{:?}", run.failures);
        };
        assert!(told.contains("64.0 MiB"), "{told}");
        let page = render_page(&run);
        assert!(page.len() < 16 << 20, "{} bytes", page.len());
    }
}
