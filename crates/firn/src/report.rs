//! The report of a run: one page of HTML from the records that the firnds of a job kept.
//!
//! Promises
//! * The page needs nothing else: no network, no script of another place; without scripts all of it can be read.
//! * What came from a file system or a record is text: no name becomes markup.
//! * A record that is damaged is named on the page, and the others are shown.

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

/// Directories that are looked through for checkpoints.
const DIRECTORIES_MAX: usize = 32;
/// Text of records that are kept whole: of some hundred hosts. The others are cut to what sums and the timeline need.
const WHOLE_BYTES_MAX: usize = 64 << 20;
/// Moments of a record that is cut.
const CUT_BUCKETS_MAX: usize = 64;

/// A checkpoint as it is when the report is made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CheckpointNow {
    /// Below the mount point.
    pub path: BytePath,
    /// Bytes of its files.
    pub bytes: u64,
    /// Its files.
    pub files: u64,
    /// Why it cannot be used, in a word; none: nothing is known against it.
    pub fault: Option<String>,
    /// The lowest level of its files; none where it has none.
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

/// What a report is made of.
#[derive(Default)]
pub struct Run {
    /// Of each host, in the order of their names; at least one.
    pub records: Vec<RunRecord>,
    /// What is in the directories of the checkpoints now, by their paths below the mount point.
    pub checkpoints: HashMap<BytePath, CheckpointNow>,
    /// What could not be read, in sentences.
    pub failures: Vec<String>,
    /// Text of the records that are whole.
    whole_bytes: usize,
    /// Records that were cut.
    cut: u64,
}

impl Run {
    /// The run of a mount, or the last one of a backing that is not mounted.
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

    /// What a mount of this host has done until now, without other hosts.
    pub fn of_own_mount(path: &Path, looks_at_checkpoints: bool) -> Result<Self, Failure> {
        let place = firn_client::find(path)?;
        let mut run = Self::with(own_record(&place)?);
        if looks_at_checkpoints {
            run.look_at_checkpoints(&place.mount.mount_point);
        }
        Ok(run)
    }

    /// Takes the record that the mount of a backing (canonical) left at its end. Where there is none of that mount, the one from
    /// before stays, and the page says so.
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

    /// The last run of a backing (canonical) that is not mounted any more.
    fn of_ended(backing: &Path) -> Result<Self, Failure> {
        let file = RuntimeFiles::of(backing, None)?.record;
        let mut run = match load(&file) {
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

    /// Adds the records in the backing of the hosts that mounted it at the same time. Each is read after the one before
    /// it was judged.
    pub fn add_other_hosts(&mut self, backing: &Path) {
        // That of a run whose files were in memory alone is gone with it.
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

    /// Orders the records, and says what was cut.
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

    /// Adds a record of the same run: the first one that is known decides which run.
    pub fn add(&mut self, record: RunRecord) {
        let end = |one: &RunRecord| one.began_unix_us + (one.lasted_seconds * 1e6) as u64;
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
        if self.whole_bytes + text_bytes <= WHOLE_BYTES_MAX {
            self.whole_bytes += text_bytes;
            self.records.push(record);
        } else {
            self.cut += 1;
            self.records.push(cut(record));
        }
    }

    /// Looks at the checkpoints below a directory as they are now.
    pub fn look_at_checkpoints(&mut self, root: &Path) {
        let records = self.records.iter();
        let checkpoints = records.flat_map(|record| &record.checkpoints);
        let mut parents: Vec<PathBuf> = checkpoints
            .filter_map(|one| one.path.as_path().parent().map(Path::to_owned))
            // From a record, which others may have written.
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

/// The record of a mount until now.
fn own_record(place: &Place) -> Result<RunRecord, Failure> {
    let own = Connection::open(&place.mount)?.record()?;
    own.check().map_err(|error| {
        let mount_point = text::path(&place.mount.mount_point);
        Failure::new(FAILED, format!("the record of {mount_point}: {error}"))
    })
}

/// About how much text a record has.
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

/// A record with its sums and histograms, fewer moments, and without checkpoints and events.
fn cut(mut record: RunRecord) -> RunRecord {
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

/// The record of a mount of this host that has ended, by its canonical backing; none: it left none.
fn load_own(backing: &Path) -> Result<Option<RunRecord>, String> {
    let files = RuntimeFiles::of(backing, None).map_err(|error| error.to_string())?;
    load(&files.record)
}

/// The record that a mount left in the runtime directory; none: it left none.
fn load(path: &Path) -> Result<Option<RunRecord>, String> {
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

/// The page of a run.
pub fn page(run: &Run) -> String {
    page::page(run)
}

/// Writes the page of a run to a file.
pub fn write(run: &Run, file: &Path) -> Result<(), Failure> {
    output_file::write(file, page(run).as_bytes()).map_err(|error| {
        let file = text::path(file);
        Failure::new(
            FAILED,
            format!("cannot write the report to {file}: {error}"),
        )
    })
}

/// Refuses a file that a report cannot be written to, before a run begins.
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

    /// About 1 MiB, as long as a record may be.
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
        let page = page(&run);
        assert!(page.len() < 16 << 20, "{} bytes", page.len());
    }
}
