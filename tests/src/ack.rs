//! Writers that remember what was acknowledged, and the check that all of it is there.
//!
//! A writer logs each operation outside of the mount twice: before it begins and after it returned.
//! What returned must be in the backing after recovery, exactly. The one operation that had begun and
//! not returned when firnd died may have happened, not happened, or (a write) happened in part.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rand::RngExt;

use crate::fsops::open_in;
use crate::random::{bytes, generator};

/// Bytes of one log record on disk.
const RECORD_LEN: usize = 40;
/// Writers stay below this file size, so that rounds verify in little time.
const FILE_SIZE_MAX: u64 = 6 << 20;
/// Files of one writer.
const FILES: u64 = 4;

/// One logged operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Bytes of `key` at `offset`.
    Write {
        /// File number.
        file: u64,
        /// File offset.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Seed of the bytes.
        key: u64,
    },
    /// ftruncate.
    Truncate {
        /// File number.
        file: u64,
        /// New size.
        len: u64,
    },
    /// The file gets its other name (`a<file>` and `b<file>` take turns).
    Rename {
        /// File number.
        file: u64,
    },
    /// Closed and opened again; changes nothing, and waits for the drain.
    Reopen {
        /// File number.
        file: u64,
    },
}

impl Op {
    fn encode(self, returned: bool) -> [u8; RECORD_LEN] {
        let fields = match self {
            Op::Write {
                file,
                offset,
                len,
                key,
            } => [0, file, offset, len, key],
            Op::Truncate { file, len } => [1, file, len, 0, 0],
            Op::Rename { file } => [2, file, 0, 0, 0],
            Op::Reopen { file } => [3, file, 0, 0, 0],
        };
        let mut record = [0; RECORD_LEN];
        for (slot, field) in record.chunks_exact_mut(8).zip(fields) {
            slot.copy_from_slice(&u64::to_le_bytes(field));
        }
        record[7] = u8::from(returned);
        record
    }

    fn decode(record: &[u8]) -> (Self, bool) {
        let mut fields = [0u64; 5];
        for (field, slot) in fields.iter_mut().zip(record.chunks_exact(8)) {
            *field = u64::from_le_bytes(slot.try_into().expect("eight bytes"));
        }
        let returned = record[7] == 1;
        let [kind, file, a, b, c] = fields;
        let op = match kind & 0xff {
            0 => Op::Write {
                file,
                offset: a,
                len: b,
                key: c,
            },
            1 => Op::Truncate { file, len: a },
            2 => Op::Rename { file },
            3 => Op::Reopen { file },
            other => panic!("log record of kind {other}"),
        };
        (op, returned)
    }
}

/// Writes at random into `dir` until the first error (firnd was killed), logging to `log`.
pub fn write_until_error(dir: &Path, log: &Path, seed: u64) {
    let mut rng = generator(seed);
    let mut log = Log::create(log);
    let Ok(mut writer) = Writer::new(dir) else {
        return;
    };
    loop {
        let op = writer.choose(&mut rng);
        if let Err(error) = log.during(op, || writer.perform(op)) {
            eprintln!("the writer in {} ends at {op:?}: {error}", dir.display());
            return;
        }
    }
}

/// The log of a writer.
pub(crate) struct Log(File);

impl Log {
    pub(crate) fn create(path: &Path) -> Self {
        let mut options = OpenOptions::new();
        options.create(true).append(true);
        Self(options.open(path).expect("open the log"))
    }

    /// Does an operation, which is logged before it begins and after it has returned.
    pub(crate) fn during(
        &mut self,
        op: Op,
        perform: impl FnOnce() -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        self.0.write_all(&op.encode(false)).expect("write the log");
        perform()?;
        self.0.write_all(&op.encode(true)).expect("write the log");
        Ok(())
    }
}

/// The records of a log: operations, and whether they had returned by then.
pub(crate) fn read_log(log: &Path) -> Vec<(Op, bool)> {
    let records = std::fs::read(log).expect("read the log");
    records.chunks_exact(RECORD_LEN).map(Op::decode).collect()
}

/// Operations that have returned, by the log of a writer that may still run; 0 without a log.
pub fn returned_operations(log: &Path) -> u64 {
    // Of each operation there is a record when it begins and one when it has returned.
    let bytes = std::fs::metadata(log).map_or(0, |meta| meta.len());
    bytes / (2 * RECORD_LEN as u64)
}

struct Writer<'a> {
    dir: &'a Path,
    /// Where files are made. When firnd was killed and its mount taken away, the path leads to the directory below it,
    /// which would take writes that Firn never sees.
    opened_dir: File,
    files: BTreeMap<u64, (File, bool)>,
    sizes: BTreeMap<u64, u64>,
}

impl<'a> Writer<'a> {
    fn new(dir: &'a Path) -> std::io::Result<Self> {
        Ok(Self {
            dir,
            opened_dir: File::open(dir)?,
            files: BTreeMap::new(),
            sizes: BTreeMap::new(),
        })
    }

    /// Mostly appends of checkpoint-like sizes, some overwrites, now and then the rest.
    fn choose(&mut self, rng: &mut impl RngExt) -> Op {
        let file = rng.random_range(0..FILES);
        let size = *self.sizes.get(&file).unwrap_or(&0);
        let choice = rng.random_range(0..100);
        if !self.sizes.contains_key(&file) {
            return Op::Write {
                file,
                offset: 0,
                len: 1,
                key: rng.random(),
            };
        }
        if size >= FILE_SIZE_MAX {
            return Op::Truncate {
                file,
                len: rng.random_range(0..size),
            };
        }
        let len = match rng.random_range(0..10) {
            0..5 => rng.random_range(1..5000),
            5..9 => rng.random_range(5000..70_000),
            _ => rng.random_range(70_000..1_200_000),
        };
        match choice {
            0..70 => Op::Write {
                file,
                offset: size,
                len,
                key: rng.random(),
            },
            70..90 => Op::Write {
                file,
                offset: rng.random_range(0..=size + 20_000),
                len,
                key: rng.random(),
            },
            90..94 => Op::Truncate {
                file,
                len: rng.random_range(0..=size + 20_000),
            },
            94..97 => Op::Rename { file },
            _ => Op::Reopen { file },
        }
    }

    fn perform(&mut self, op: Op) -> std::io::Result<()> {
        match op {
            Op::Write {
                file,
                offset,
                len,
                key,
            } => {
                let data = bytes(key, len as usize);
                self.open(file)?.write_all_at(&data, offset)?;
                let size = self.sizes.entry(file).or_default();
                *size = (*size).max(offset + len);
            }
            Op::Truncate { file, len } => {
                self.open(file)?.set_len(len)?;
                self.sizes.insert(file, len);
            }
            Op::Rename { file } => {
                self.open(file)?;
                let second = self.files[&file].1;
                std::fs::rename(
                    self.dir.join(name(file, second)),
                    self.dir.join(name(file, !second)),
                )?;
                self.files.get_mut(&file).expect("opened above").1 = !second;
            }
            Op::Reopen { file } => {
                if let Some((open, second)) = self.files.remove(&file) {
                    crate::fsops::close(open)?;
                    let path = self.dir.join(name(file, second));
                    let open = OpenOptions::new().read(true).write(true).open(path)?;
                    self.files.insert(file, (open, second));
                }
            }
        }
        Ok(())
    }

    fn open(&mut self, file: u64) -> std::io::Result<&File> {
        if !self.files.contains_key(&file) {
            let open = open_in(&self.opened_dir, &name(file, false))?;
            self.files.insert(file, (open, false));
        }
        Ok(&self.files[&file].0)
    }
}

fn name(file: u64, second: bool) -> String {
    format!("{}{file}", if second { 'b' } else { 'a' })
}

/// What one writer's files must look like.
#[derive(Default)]
struct Model {
    files: BTreeMap<u64, (Vec<u8>, bool)>,
}

impl Model {
    fn apply(&mut self, op: Op) {
        match op {
            Op::Write {
                file,
                offset,
                len,
                key,
            } => {
                let content = &mut self.files.entry(file).or_default().0;
                let end = (offset + len) as usize;
                if content.len() < end {
                    content.resize(end, 0);
                }
                content[offset as usize..end].copy_from_slice(&bytes(key, len as usize));
            }
            Op::Truncate { file, len } => self
                .files
                .entry(file)
                .or_default()
                .0
                .resize(len as usize, 0),
            Op::Rename { file } => {
                let entry = self.files.entry(file).or_default();
                entry.1 = !entry.1;
            }
            Op::Reopen { .. } => {}
        }
    }
}

/// What [`verify`] looked at.
#[derive(Clone, Copy, Debug, Default)]
pub struct Verified {
    /// Operations that had returned.
    pub ops: u64,
    /// Bytes of the files compared.
    pub bytes: u64,
}

/// Compares the files in `dir` (of the backing) with what the writer's log says, panicking at the
/// first acknowledged byte that is not there.
#[track_caller]
pub fn verify(dir: &Path, log: &Path) -> Verified {
    verify_result(dir, log).unwrap_or_else(|e| panic!("{e}\nlog of the writer: {log:?}"))
}

fn verify_result(dir: &Path, log: &Path) -> Result<Verified, String> {
    // A writer that was killed before it had made its log has done nothing.
    let records = match std::fs::read(log) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        read => read.map_err(|error| format!("{log:?}: {error}"))?,
    };
    let mut model = Model::default();
    let mut begun = None;
    let mut verified = Verified::default();
    for record in records.chunks_exact(RECORD_LEN) {
        let (op, returned) = Op::decode(record);
        if returned {
            model.apply(op);
            begun = None;
            verified.ops += 1;
        } else {
            begun = Some(op);
        }
    }
    let mut after = Model {
        files: model.files.clone(),
    };
    if let Some(op) = begun {
        after.apply(op);
    }
    for (&file, (is_after, second_after)) in &after.files {
        let before = model.files.get(&file);
        let may_be_missing = before.is_none();
        let seconds = [before.map(|b| b.1), Some(*second_after)];
        let read = seconds
            .iter()
            .flatten()
            .map(|second| std::fs::read(dir.join(name(file, *second))));
        let read: Vec<_> = read.collect();
        let Some(found) = read.iter().flatten().next() else {
            if may_be_missing {
                continue;
            }
            let errors: Vec<_> = read.iter().filter_map(|read| read.as_ref().err()).collect();
            let names: Vec<_> = std::fs::read_dir(dir).into_iter().flatten().collect();
            return Err(format!(
                "file {file} in {dir:?} is missing: {errors:?} (last begun: {begun:?}, names: {names:?})"
            ));
        };
        let empty = Vec::new();
        let is_before = before.map_or(&empty, |b| &b.0);
        compare(found, is_before, is_after)
            .map_err(|e| format!("{dir:?}, file {file}: {e} (last begun: {begun:?})"))?;
        verified.bytes += found.len() as u64;
    }
    Ok(verified)
}

/// Every byte must be the one before or after the last operation, where they differ.
fn compare(found: &[u8], before: &[u8], after: &[u8]) -> Result<(), String> {
    let low = before.len().min(after.len());
    let high = before.len().max(after.len());
    if !(low..=high).contains(&found.len()) {
        return Err(format!(
            "its size is {}, acknowledged were {low} to {high}",
            found.len()
        ));
    }
    for (at, &byte) in found.iter().enumerate() {
        let allowed = [before.get(at), after.get(at)];
        // Beyond the older end a growing write may have left a gap of zeros before its bytes.
        let zero_gap = at >= low && byte == 0;
        if !allowed.contains(&Some(&byte)) && !zero_gap {
            return Err(format!(
                "byte {at} is {byte:#x}, acknowledged was {allowed:x?}"
            ));
        }
    }
    Ok(())
}

/// Appends `count` records of 64 bytes with O_APPEND, each holding its writer and number.
pub fn append_records(file: &Path, id: u64, count: u64) {
    let mut file = OpenOptions::new()
        .append(true)
        .create(true)
        .open(file)
        .expect("open for append");
    for number in 0..count {
        let record = format!("{id:>15} {number:>15} {:>31}\n", id * 1_000_003 + number);
        assert_eq!(record.len(), 64);
        assert_eq!(
            file.write(record.as_bytes()).expect("append"),
            64,
            "a short append"
        );
    }
}

#[cfg(test)]
mod tests {
    use rustix::mount::{MountFlags, mount};

    use super::*;
    use crate::sandbox::{Sandbox, unmount_lazily};

    /// A directory and a log as a writer leaves them after `count` operations.
    fn written(count: usize, seed: u64) -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let log = dir.path().join("log");
        let files = dir.path().join("files");
        std::fs::create_dir(&files).expect("mkdir");
        let mut out = File::create(&log).expect("log");
        let mut rng = generator(seed);
        let mut writer = Writer::new(&files).expect("open the directory");
        for _ in 0..count {
            let op = writer.choose(&mut rng);
            out.write_all(&op.encode(false)).expect("log");
            writer.perform(op).expect("a plain directory");
            out.write_all(&op.encode(true)).expect("log");
        }
        (dir, log)
    }

    #[test]
    fn what_a_plain_directory_keeps_verifies() {
        for seed in 0..4 {
            let (dir, log) = written(300, seed);
            let verified = verify(&dir.path().join("files"), &log);
            assert_eq!(verified.ops, 300);
            assert!(verified.bytes > 0);
        }
    }

    #[test]
    fn regression_nothing_is_made_below_a_mount_that_was_taken_away() {
        let sandbox = Sandbox::new("ack");
        let point = sandbox.join("mnt");
        mount("tmpfs", &point, "tmpfs", MountFlags::empty(), None).expect("mount");
        let mut writer = Writer::new(&point).expect("open the directory");
        let first_byte = |file| Op::Write {
            file,
            offset: 0,
            len: 1,
            key: 1,
        };
        writer.perform(first_byte(0)).expect("to the mount");
        unmount_lazily(&point);
        // firnd would refuse it. What counts is that no other user takes it.
        let _ = writer.perform(first_byte(1));
        let made: Vec<_> = std::fs::read_dir(&point).expect("list").collect();
        assert!(made.is_empty(), "{made:?}");
    }

    #[test]
    fn one_lost_byte_is_found() {
        let (dir, log) = written(200, 7);
        let files = dir.path().join("files");
        let victim = std::fs::read_dir(&files)
            .expect("files")
            .next()
            .expect("one")
            .expect("entry")
            .path();
        let mut content = std::fs::read(&victim).expect("read");
        let middle = content.len() / 2;
        content[middle] ^= 0x10;
        std::fs::write(&victim, content).expect("write");
        assert!(verify_result(&files, &log).is_err());
    }

    #[test]
    fn a_missing_or_short_file_is_found() {
        let (dir, log) = written(200, 8);
        let files = dir.path().join("files");
        let victim = std::fs::read_dir(&files)
            .expect("files")
            .next()
            .expect("one")
            .expect("entry")
            .path();
        let len = std::fs::metadata(&victim).expect("stat").len();
        OpenOptions::new()
            .write(true)
            .open(&victim)
            .expect("open")
            .set_len(len - 1)
            .expect("truncate");
        assert!(verify_result(&files, &log).is_err());
        std::fs::remove_file(&victim).expect("unlink");
        assert!(verify_result(&files, &log).is_err());
    }

    #[test]
    fn the_operation_in_flight_may_have_happened_in_part() {
        assert!(compare(b"aabb", b"aaaa", b"bbbb").is_ok());
        assert!(compare(b"aacb", b"aaaa", b"bbbb").is_err());
        assert!(compare(b"aaaa", b"aa", b"aaaaaa").is_ok());
        assert!(compare(b"aa\0\0bb", b"aa", b"aa\0\0bb").is_ok());
        assert!(compare(b"a", b"aa", b"aaaa").is_err());
    }
}
