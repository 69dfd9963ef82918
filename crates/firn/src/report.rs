//! The report of a run: one HTML page that shows what the mounts of a job did.
//!
//! * firnd, the daemon of a mount, keeps a *record* of the mount: sums, histograms, the timeline, checkpoints and
//!   events.
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

use firn_client::checkpoints::{Checkpoint, CheckpointState, Directory};
use firn_client::paths::RuntimeFiles;
use firn_client::{ClientError, Connection, MountLocation};
use firn_format::durability::DurabilityLevel;
use firn_protocol::path::BytePath;
use firn_protocol::record::{Bucket, RECORD_BYTES_MAX, RunRecord};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use crate::failure::{FAILED, Failure, NO_MOUNT, USAGE};
use crate::{output_file, text};

/// Maximum number of directories in which checkpoints are looked for.
const DIRECTORIES_MAX: usize = 32;
/// Maximum size in bytes of the records that are kept in full, which suffices for some hundred hosts. Further records
/// are reduced to what sums and the timeline need.
const FULL_RECORD_BYTES_MAX: usize = 64 << 20;
/// The bits of a file's mode that give access to its group and to other users.
const ACCESS_OF_OTHERS: u32 = 0o077;
/// Estimated memory in bytes of the elements of a record, without their texts.
const CHECKPOINT_FIXED_BYTES: usize = 128;
const EVENT_FIXED_BYTES: usize = 64;
const FIELD_FIXED_BYTES: usize = 48;
const STRING_FIXED_BYTES: usize = 24;
/// Maximum number of time intervals (buckets) in a reduced record.
const REDUCED_BUCKETS_MAX: usize = 64;

/// A checkpoint as it is when the report is made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CurrentCheckpoint {
    /// Path of the checkpoint below the mount point.
    pub path: BytePath,
    /// Size of its files in bytes.
    pub bytes: u64,
    /// Number of its files.
    pub files: u64,
    /// Why the checkpoint cannot be used, as one word. `None` means that no reason is known.
    pub fault: Option<String>,
    /// The lowest durability level of its files. `None` means that it has no file.
    pub level: Option<DurabilityLevel>,
}

impl CurrentCheckpoint {
    /// Returns the state of a checkpoint. A checkpoint whose wholeness is unknown has no fault.
    fn from_checkpoint(path: BytePath, checkpoint: &Checkpoint) -> Self {
        let fault = match checkpoint.wholeness {
            CheckpointState::Whole | CheckpointState::Unknown => None,
            faulty => Some(faulty.as_str().to_owned()),
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
    pub checkpoints: HashMap<BytePath, CurrentCheckpoint>,
    /// Sentences about data that could not be read.
    pub failures: Vec<String>,
    /// Estimated size in bytes of the records that are not reduced.
    full_record_bytes: usize,
    /// Number of records that were reduced (stored without checkpoints and events) to save memory.
    reduced_count: u64,
}

impl Run {
    /// Returns the run of the mount at `path`, or the last run of a backing that is not mounted.
    pub fn find(path: &Path) -> Result<Self, Failure> {
        match firn_client::find(path) {
            Ok(location) => Self::from_mount(&location),
            Err(ClientError::NoMount { .. }) => Self::from_unmounted_backing(path),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the run of a mount until now, with the records of other hosts.
    fn from_mount(location: &MountLocation) -> Result<Self, Failure> {
        let mut run = Self::with_record(query_record(location)?);
        run.add_other_hosts(&location.mount.backing);
        run.read_checkpoints(&location.mount.mount_point);
        Ok(run)
    }

    /// Returns what a mount of this host has done until now, without the records of other hosts.
    pub fn from_own_mount(path: &Path, reads_checkpoints: bool) -> Result<Self, Failure> {
        let location = firn_client::find(path)?;
        let mut run = Self::with_record(query_record(&location)?);
        if reads_checkpoints {
            run.read_checkpoints(&location.mount.mount_point);
        }
        Ok(run)
    }

    /// Replaces the record of this host's mount (its sums, timeline and events) by the final record, which the mount
    /// wrote when it ended. If there is none of that mount, the earlier record stays, and a failure says that the end
    /// is missing.
    ///
    /// Must be called before records of other hosts are added. `backing` is canonical.
    pub fn replace_own_record(&mut self, backing: &Path) {
        let is_of_same_mount = |final_record: &RunRecord| {
            self.records
                .iter()
                .any(|record| record.began_unix_us == final_record.began_unix_us)
        };
        let reason = match load_own_record(backing) {
            Ok(Some(final_record)) if is_of_same_mount(&final_record) => {
                // The only record until now is the earlier one of this mount.
                self.records = vec![final_record];
                return;
            }
            Ok(_) => "its mount left no record".to_owned(),
            Err(reason) => reason,
        };
        self.failures
            .push(format!("the end of the run is not shown: {reason}"));
    }

    /// Returns the last run of a backing that is not mounted, with its checkpoints as they are now.
    fn from_unmounted_backing(path: &Path) -> Result<Self, Failure> {
        let backing = path
            .canonicalize()
            .map_err(|error| Failure::new(FAILED, format!("{}: {error}", text::path(path))))?;
        let mut run = Self::from_last_records(&backing)?;
        run.read_checkpoints(&backing);
        Ok(run)
    }

    /// Returns the run of the last mounts of a backing (the directory of a mount) that is not mounted now. The run
    /// consists of the records that these mounts left on the hosts. Fails if there is no record that can be read.
    /// `backing` is canonical.
    fn from_last_records(backing: &Path) -> Result<Self, Failure> {
        let own_file = RuntimeFiles::for_backing(backing, None)?.record;
        let mut run = Self::default();
        match load_record(&own_file) {
            Ok(Some(own_record)) => run.add_record(own_record),
            Ok(None) => {}
            Err(error) => run
                .failures
                .push(format!("{} cannot be read: {error}", text::path(&own_file))),
        }
        run.add_other_hosts(backing);
        if !run.records.is_empty() {
            return Ok(run);
        }
        let message = match run.failures.into_iter().next() {
            Some(first_failure) => first_failure,
            None => format!(
                "{} is not mounted, and no mount of it on this host has left a record: name a mount point, or mount \
                 it with -o record-in=backing, which keeps records in the backing",
                text::path(backing)
            ),
        };
        Err(Failure::new(NO_MOUNT, message))
    }

    /// Returns a run with this host's record as the first one.
    fn with_record(own_record: RunRecord) -> Self {
        let mut run = Self::default();
        run.add_record(own_record);
        run
    }

    /// Adds the records that mounts of other hosts in the same run left in the backing. A record that cannot be read
    /// becomes a failure, which the page shows.
    ///
    /// Each record is added before the next one is read, so the memory for records stays bounded.
    pub fn add_other_hosts(&mut self, backing: &Path) {
        // The backing of a run whose files were in memory only is removed with the run.
        if !backing.exists() {
            return;
        }
        let result = firn_daemon::read_records(backing, &mut |name, record| match record {
            Ok(record) => self.add_record(record),
            Err(error) => {
                let name = text::escaped(name);
                let text = format!("the record .firn/records/{name} cannot be read: {error}");
                self.failures.push(text);
            }
        });
        if let Err(error) = result {
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
                text::bytes(FULL_RECORD_BYTES_MAX as u64)
            ));
        }
    }

    /// Adds a record (what one mount did), unless it belongs to another run or is known already. If the full records
    /// take too much memory, it is added without its checkpoints and events.
    pub fn add_record(&mut self, record: RunRecord) {
        let is_known = self
            .records
            .iter()
            .any(|known| known.host == record.host && known.began_unix_us == record.began_unix_us);
        if is_known {
            return;
        }
        // The first record decides which run the report is about. Another run of the same backing does not overlap with
        // it in time.
        if let Some(first) = self.records.first()
            && !overlaps_in_time(first, &record)
        {
            return;
        }
        let record_bytes = estimate_memory_bytes(&record);
        // Reduced records are small, so a job with many hosts does not fill the memory.
        if self.full_record_bytes + record_bytes <= FULL_RECORD_BYTES_MAX {
            self.full_record_bytes += record_bytes;
            self.records.push(record);
        } else {
            self.reduced_count += 1;
            self.records.push(reduce_record(record));
        }
    }

    /// Reads the current state of the checkpoints that the records name. `root` is the mount point or the backing.
    ///
    /// Directories beyond the first [`DIRECTORIES_MAX`] are left out. A directory that cannot be read becomes a
    /// failure, which the page shows.
    pub fn read_checkpoints(&mut self, root: &Path) {
        for parent in self.checkpoint_directories().iter().take(DIRECTORIES_MAX) {
            let listing =
                match Directory::find(&root.join(parent)).and_then(|dir| dir.list_checkpoints()) {
                    Ok(listing) => listing,
                    Err(error) => {
                        self.failures
                            .push(format!("checkpoints cannot be examined: {error}"));
                        continue;
                    }
                };
            for checkpoint in &listing.checkpoints {
                let path: BytePath = parent.join(&checkpoint.name).as_path().into();
                let state = CurrentCheckpoint::from_checkpoint(path.clone(), checkpoint);
                self.checkpoints.insert(path, state);
            }
        }
    }

    /// Returns the directories that contain the checkpoints in the records, each of them once. They are paths below the
    /// mount point.
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

/// Returns whether two records have a moment in common.
fn overlaps_in_time(a: &RunRecord, b: &RunRecord) -> bool {
    let end_unix_us =
        |record: &RunRecord| record.began_unix_us + (record.lasted_seconds * 1e6) as u64;
    b.began_unix_us <= end_unix_us(a) && a.began_unix_us <= end_unix_us(b)
}

/// Asks the firnd of a mount for its record until now. Fails if firnd does not answer, or the record is not valid.
fn query_record(location: &MountLocation) -> Result<RunRecord, Failure> {
    let record = Connection::open(&location.mount)?.record()?;
    record.check().map_err(|error| {
        let mount_point = text::path(&location.mount.mount_point);
        Failure::new(FAILED, format!("the record of {mount_point}: {error}"))
    })
}

/// Returns an estimate of the memory in bytes that a record (what one mount did) takes.
fn estimate_memory_bytes(record: &RunRecord) -> usize {
    let mut total = record.buckets.len() * size_of::<Bucket>();
    for checkpoint in &record.checkpoints {
        total += CHECKPOINT_FIXED_BYTES + checkpoint.path.as_bytes().len();
    }
    for event in &record.events {
        total += EVENT_FIXED_BYTES + event.kind.len();
        for (name, value) in &event.fields {
            total += FIELD_FIXED_BYTES + name.len() + value.len();
        }
    }
    for option in &record.options {
        total += STRING_FIXED_BYTES + option.len();
    }
    total
}

/// Returns a record reduced in size: with the sums and histograms and a coarser timeline, but without checkpoints and
/// events.
fn reduce_record(mut record: RunRecord) -> RunRecord {
    let left_out_count = record.checkpoints.len() + record.events.len();
    record.forgotten = record.forgotten.saturating_add(left_out_count as u64);
    record.checkpoints = Vec::new();
    record.events = Vec::new();
    // Neighbouring buckets are added up in pairs, which halves their number and doubles their length.
    while record.buckets.len() > REDUCED_BUCKETS_MAX {
        let pairs = record.buckets.chunks(2);
        record.buckets = pairs.map(sum_buckets).collect();
        record.bucket_ms = record.bucket_ms.saturating_mul(2);
    }
    record
}

/// Returns one bucket with the sums of several buckets.
fn sum_buckets(buckets: &[Bucket]) -> Bucket {
    let mut sum = Bucket::default();
    for bucket in buckets {
        sum.add(*bucket);
    }
    sum
}

/// Returns the record of an ended mount of this host, by its canonical backing. Returns `None` if the mount left
/// none.
fn load_own_record(backing: &Path) -> Result<Option<RunRecord>, String> {
    let files = RuntimeFiles::for_backing(backing, None).map_err(|error| error.to_string())?;
    load_record(&files.record)
}

/// Returns the record (what a mount did) in a file of the runtime directory, or `None` if there is no such file. Fails
/// if the file is not a private file of this user, or has no valid record.
fn load_record(path: &Path) -> Result<Option<RunRecord>, String> {
    // Another user may have put a symbolic link or a FIFO there: neither is followed or waited for.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let opened = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits() as i32)
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    let metadata = file.metadata().map_err(|error| error.to_string())?;
    let is_ours = metadata.uid() == rustix::process::geteuid().as_raw();
    let is_open_to_others = metadata.mode() & ACCESS_OF_OTHERS != 0;
    if !metadata.is_file() || !is_ours || is_open_to_others {
        return Err("it is not a private file of yours".to_owned());
    }
    let mut bytes = Vec::new();
    // One byte more than the maximum suffices for the parser to refuse the record.
    file.take(RECORD_BYTES_MAX + 1)
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
    let text = format!(
        "cannot write a report to {}: name a file in a directory that exists",
        text::path(file)
    );
    Err(Failure::new(USAGE, text))
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
            run.add_record(long_record(host));
        }
        run.finish_records();
        let held: usize = run.records.iter().map(estimate_memory_bytes).sum();
        let cut_bytes = 300 * REDUCED_BUCKETS_MAX * size_of::<Bucket>();
        assert!(held <= FULL_RECORD_BYTES_MAX + cut_bytes, "{held}");
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
