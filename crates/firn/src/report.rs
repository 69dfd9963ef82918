//! The report of a run: one page of HTML, made from records that the firnds of a job kept.
//!
//! A record has what one mount did: sums, histograms, moments of the timeline, checkpoints and events.
//!
//! Promises
//! * The page is complete in itself: it needs no network and no other file. Without scripts all of it can be read.
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
/// Maximum size in bytes of the records that are kept complete: those of some hundred hosts. Further records are
/// reduced to what sums and the timeline need.
const WHOLE_BYTES_MAX: usize = 64 << 20;
/// Maximum number of moments in a reduced record.
const CUT_BUCKETS_MAX: usize = 64;

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

/// The content of a report.
#[derive(Default)]
pub struct Run {
    /// Records of the hosts, in the order of their names. There is at least one.
    pub records: Vec<RunRecord>,
    /// What the directories of the checkpoints have now. The key is the path below the mount point.
    pub checkpoints: HashMap<BytePath, CheckpointNow>,
    /// Sentences about what could not be read.
    pub failures: Vec<String>,
    /// Bytes of the complete records.
    whole_bytes: usize,
    /// Number of reduced records.
    cut: u64,
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

    fn of_mount(place: &Place) -> Result<Self, Failure> {
        let mut run = Self::with(own_record(place)?);
        run.add_other_hosts(&place.mount.backing);
        run.look_at_checkpoints(&place.mount.mount_point);
        Ok(run)
    }

    /// Returns what a mount of this host has done until now, without the records of other hosts.
    pub fn of_own_mount(path: &Path, looks_at_checkpoints: bool) -> Result<Self, Failure> {
        let place = firn_client::find(path)?;
        let mut run = Self::with(own_record(&place)?);
        if looks_at_checkpoints {
            run.look_at_checkpoints(&place.mount.mount_point);
        }
        Ok(run)
    }

    /// Replaces the record of this host's mount by the one that the mount left at its end. `backing` is canonical.
    ///
    /// Where the mount left none, the earlier record stays, and the page says so.
    pub fn update_own(&mut self, backing: &Path) {
        let ended = load_own(backing);
        let is_of_mount = |ended: &RunRecord| {
            let known = self.records.iter();
            known
                .map(|known| known.began_unix_us)
                .any(|began| began == ended.began_unix_us)
        };
        let why = match ended {
            Ok(Some(ended)) if is_of_mount(&ended) => {
                self.records = vec![ended];
                return;
            }
            Ok(_) => "its mount left no record".to_owned(),
            Err(why) => why,
        };
        self.failures
            .push(format!("the end of the run is not shown: {why}"));
    }

    fn of_backing(path: &Path) -> Result<Self, Failure> {
        let backing = path
            .canonicalize()
            .map_err(|error| Failure::new(FAILED, format!("{}: {error}", text::path(path))))?;
        let mut run = Self::of_ended(&backing)?;
        run.look_at_checkpoints(&backing);
        Ok(run)
    }

    /// Returns the last run of a backing that is not mounted any more. `backing` is canonical.
    fn of_ended(backing: &Path) -> Result<Self, Failure> {
        let file = RuntimeFiles::of(backing, None)?.record;
        let mut run = match load_record(&file) {
            Ok(Some(own)) => Self::with(own),
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

    fn with(own: RunRecord) -> Self {
        let mut run = Self::default();
        run.add(own);
        run
    }

    /// Adds the records in the backing of the hosts that mounted it at the same time. Each record is added before the
    /// next one is read, so the memory that records take stays bounded.
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
        self.finish();
    }

    /// Sorts the records by host, and notes where records were reduced.
    pub fn finish(&mut self) {
        self.records
            .sort_by(|a, b| (&a.host, a.began_unix_us).cmp(&(&b.host, b.began_unix_us)));
        if std::mem::take(&mut self.cut) > 0 {
            self.failures.push(format!(
                "the records of the hosts are longer than {} together: of some, checkpoints and events are left out",
                text::bytes(WHOLE_BYTES_MAX as u64)
            ));
        }
    }

    /// Adds a record if it belongs to the same run: it overlaps in time with the first record, and is not known yet.
    pub fn add(&mut self, record: RunRecord) {
        let end = |one: &RunRecord| one.began_unix_us + (one.lasted_seconds * 1e6) as u64;
        // The first record decides which run the report is about. Another run of the same backing does not overlap with
        // it.
        if let Some(first) = self.records.first() {
            let overlaps =
                record.began_unix_us <= end(first) && first.began_unix_us <= end(&record);
            let is_known = self.records.iter().any(|known| {
                known.host == record.host && known.began_unix_us == record.began_unix_us
            });
            if !overlaps || is_known {
                return;
            }
        }
        let text_bytes = text_bytes(&record);
        // Records beyond the bound are reduced, so that any number of hosts takes bounded memory.
        if self.whole_bytes + text_bytes <= WHOLE_BYTES_MAX {
            self.whole_bytes += text_bytes;
            self.records.push(record);
        } else {
            self.cut += 1;
            self.records.push(bounded_record(record));
        }
    }

    /// Reads the checkpoints below a directory as they are now.
    pub fn look_at_checkpoints(&mut self, root: &Path) {
        let records = self.records.iter();
        let checkpoints = records.flat_map(|record| &record.checkpoints);
        let mut parents: Vec<PathBuf> = checkpoints
            .filter_map(|one| one.path.as_path().parent().map(Path::to_owned))
            // The path comes from a record, which another user may have written. So `..` and absolute paths are
            // refused.
            .filter(|parent| {
                parent
                    .components()
                    .all(|one| matches!(one, Component::Normal(_)))
            })
            .collect();
        parents.sort();
        parents.dedup();
        for parent in parents.iter().take(DIRECTORIES_MAX) {
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
                    .push(format!("checkpoints cannot be looked at: {error}")),
            }
        }
    }
}

/// Returns the record of a mount until now, from its firnd.
fn own_record(place: &Place) -> Result<RunRecord, Failure> {
    let own = Connection::open(&place.mount)?.record()?;
    own.check().map_err(|error| {
        let mount_point = text::path(&place.mount.mount_point);
        Failure::new(FAILED, format!("the record of {mount_point}: {error}"))
    })
}

/// Returns an estimate of a record's size in bytes.
fn text_bytes(record: &RunRecord) -> usize {
    let paths = record
        .checkpoints
        .iter()
        .map(|one| one.path.as_bytes().len() + 128);
    let events = record.events.iter().map(|event| {
        let fields = event.fields.iter();
        let fields = fields.map(|(name, value)| name.len() + value.len() + 48);
        event.kind.len() + 64 + fields.sum::<usize>()
    });
    let options = record.options.iter().map(|option| option.len() + 24);
    record.buckets.len() * size_of::<Bucket>() + paths.chain(events).chain(options).sum::<usize>()
}

/// Returns a reduced record: it has the sums and histograms, fewer moments, and neither checkpoints nor events.
fn bounded_record(mut record: RunRecord) -> RunRecord {
    let left_out = record.checkpoints.len() + record.events.len();
    record.forgotten = record.forgotten.saturating_add(left_out as u64);
    record.checkpoints = Vec::new();
    record.events = Vec::new();
    while record.buckets.len() > CUT_BUCKETS_MAX {
        let pairs = record.buckets.chunks(2).map(|pair| {
            let mut both = Bucket::default();
            pair.iter().for_each(|one| both.add(*one));
            both
        });
        record.buckets = pairs.collect();
        record.bucket_ms = record.bucket_ms.saturating_mul(2);
    }
    record
}

/// Returns the record of an ended mount of this host, by its canonical backing. Returns `None` where the mount left
/// none.
fn load_own(backing: &Path) -> Result<Option<RunRecord>, String> {
    let files = RuntimeFiles::of(backing, None).map_err(|error| error.to_string())?;
    load_record(&files.record)
}

/// Returns the record in a file of the runtime directory, or `None` where there is no such file. Fails where the file
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

/// Returns the page of a run as HTML.
pub fn render_page(run: &Run) -> String {
    page::render_page(run)
}

/// Writes the page of a run to a file.
pub fn write(run: &Run, file: &Path) -> Result<(), Failure> {
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
        "cannot write a report to {}: name a file in a directory that is there",
        text::path(file)
    );
    Err(Failure::new(USAGE, why))
}

#[cfg(test)]
mod tests {
    use firn_protocol::record::CheckpointRecord;

    use super::*;

    /// A record of about 1 MiB, which is the maximum.
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
        run.finish();
        let held: usize = run.records.iter().map(text_bytes).sum();
        let cut_bytes = 300 * CUT_BUCKETS_MAX * size_of::<Bucket>();
        assert!(held <= WHOLE_BYTES_MAX + cut_bytes, "{held}");
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
