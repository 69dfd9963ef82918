//! Lists of where bytes lie, on a real directory: a program that reads by the descriptors gets the bytes that a read
//! returns.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::IoSlice;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use firn_backing::{
    Access, Backing, Caller, DirBacking, Files, LocateLimits, Located, Names, Placement, Sharing,
    Volume,
};
use firn_log::{LogBacking, Setup, WhenClosed};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// So long that no host makes a new listing on its own.
const VIEW_AGE_MAX: Duration = Duration::from_secs(3600);
const FILE_BYTES: u64 = 3000;
/// Limits that no list of these tests reaches.
const ALL: LocateLimits = LocateLimits {
    parts_max: 100_000,
    files_max: 100,
};

type Logged = LogBacking<DirBacking>;

fn host(dir: &Path, name: &str, view_age_max: Duration) -> Logged {
    let setup = Setup {
        host: name.to_owned(),
        chooses: Box::new(|_: &OsStr| true),
        is_alive: Box::new(|_| Ok(true)),
        view_age_max,
        lag_max: Duration::ZERO,
        unit_bytes: 1024,
        when_closed: WhenClosed::Flatten,
        flattens_read: false,
    };
    let base = DirBacking::open(dir).expect("a directory");
    LogBacking::open(base, setup).expect("a log backing")
}

fn caller() -> Caller {
    Caller {
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
        pid: 0,
    }
}

fn open(host: &Logged, access: Access) -> <Logged as Volume>::File {
    let name = OsStr::new("file");
    match host.lookup(&host.root(), name) {
        Ok((inode, _)) => host.open(&inode, access).expect("open"),
        Err(_) => {
            let (_, file, _) = host
                .create(&caller(), &host.root(), name, 0o644)
                .expect("create");
            file
        }
    }
}

fn write(host: &Logged, offset: u64, bytes: &[u8]) {
    let file = open(host, Access::ReadWrite);
    let parts = [IoSlice::new(bytes)];
    let written = host.write_at(&file, &parts, offset);
    assert_eq!(written, Ok(bytes.len()));
}

fn read(host: &Logged, file: &<Logged as Volume>::File) -> Vec<u8> {
    let mut bytes = vec![0; 3 << 20];
    let count = host.read_at(file, &mut bytes, 0).expect("read");
    bytes.truncate(count);
    bytes
}

/// Reads each part of a list by its descriptor. Returns each offset with its bytes.
fn bytes_of(located: &Located) -> Vec<(u64, Vec<u8>)> {
    let files: Vec<File> = located
        .files
        .iter()
        .map(|fd| File::from(fd.try_clone().expect("dup")))
        .collect();
    let read = |part: &firn_backing::LocatedPart| {
        let file = &files[part.file?];
        let mut bytes = vec![0; part.len as usize];
        let count = file.read_at(&mut bytes, part.position).expect("read");
        assert_eq!(count, bytes.len());
        Some((part.offset, bytes))
    };
    located.parts.iter().filter_map(read).collect()
}

/// Compares the lists of a whole file with its bytes. Returns how many bytes the lists have.
fn compare(
    host: &Logged,
    file: &<Logged as Volume>::File,
    limits: LocateLimits,
) -> (u64, Vec<Located>) {
    let expected = read(host, file);
    let mut lists = Vec::new();
    let mut bytes = 0;
    let mut from = 0;
    while from < expected.len() as u64 {
        let located = host.locate(file, from..u64::MAX, limits).expect("locate");
        let located = located.expect("a list");
        assert!(located.parts.len() <= limits.parts_max);
        assert!(located.files.len() <= limits.files_max);
        assert!(located.until > Instant::now() + VIEW_AGE_MAX / 3);
        assert!(located.end > from);
        let has_to_be_asked = |part: &&firn_backing::LocatedPart| part.file.is_none();
        let asked = located.parts.iter().find(has_to_be_asked);
        // A list that begins with a part to be asked for would never end.
        assert!(asked.is_none_or(|part| part.offset > from));
        let next = asked.map_or(located.end, |part| part.offset);
        let mut at = from;
        for (offset, found) in bytes_of(&located) {
            assert!(offset >= at);
            at = offset + found.len() as u64;
            assert!(at <= located.end);
            assert_eq!(found, &expected[offset as usize..at as usize]);
            if offset < next {
                bytes += found.len() as u64;
            }
        }
        from = next;
        lists.push(located);
    }
    (bytes, lists)
}

fn is_read_only(located: &Located) -> bool {
    located.files.iter().all(|fd| {
        let flags = rustix::fs::fcntl_getfl(fd).expect("flags");
        !flags.intersects(rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::RDWR)
    })
}

/// A list that a host has, and that is still valid for it.
struct KeptList {
    reader: usize,
    inode: <Logged as Volume>::Inode,
    changes: u64,
    list: Located,
    bytes: Vec<(u64, Vec<u8>)>,
    /// Keeps the file open.
    _file: <Logged as Volume>::File,
}

/// Proves S-direct-8, S-log-6: three hosts write, cut, punch and flatten. A list has all bytes that are not zero, as a
/// read on its host returns them. It remains right while other hosts flatten the file.
#[test]
fn what_is_told_of_bytes_are_those_that_are_read() {
    let mut kept_count = 0;
    for seed in 0..40 {
        let dir = tempfile::tempdir().expect("a directory");
        let mut random = StdRng::seed_from_u64(seed);
        let hosts = ["a", "b", "c"].map(|name| host(dir.path(), name, VIEW_AGE_MAX));
        write(&hosts[0], 0, &[1; 10]);
        let mut kept: Option<KeptList> = None;
        for step in 0..40 {
            let at = random.random_range(0..hosts.len());
            let host = &hosts[at];
            let offset = random.random_range(0..FILE_BYTES);
            let len = random.random_range(1..200);
            match random.random_range(0..12) {
                0..7 => write(host, offset, &vec![random.random_range(1..=u8::MAX); len]),
                7 => {
                    let file = open(host, Access::ReadWrite);
                    host.set_len(&file, offset).expect("cut");
                }
                8 => {
                    let file = open(host, Access::ReadWrite);
                    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                    host.allocate(&file, punch, offset, len as u64)
                        .expect("punch");
                }
                _ => assert_eq!(host.settle().error, None, "seed {seed}, step {step}"),
            }
            if let Some(kept) = &kept
                && kept.reader != at
                && hosts[kept.reader].facts(&kept.inode).changes_by_others == kept.changes
            {
                assert_eq!(bytes_of(&kept.list), kept.bytes, "seed {seed}, step {step}");
                kept_count += 1;
            }
            let reader = random.random_range(0..hosts.len());
            let file = open(&hosts[reader], Access::Read);
            let limits = LocateLimits {
                parts_max: random.random_range(1..20),
                files_max: random.random_range(0..4),
            };
            compare(&hosts[reader], &file, limits);
            let (bytes, mut lists) = compare(&hosts[reader], &file, ALL);
            assert!(lists.iter().all(is_read_only));
            let nonzero = |byte: &&u8| **byte != 0;
            let least = read(&hosts[reader], &file).iter().filter(nonzero).count();
            assert!(bytes >= least as u64, "seed {seed}, step {step}");
            let (inode, _) = hosts[reader]
                .lookup(&hosts[reader].root(), OsStr::new("file"))
                .expect("lookup");
            kept = lists.pop().map(|list| KeptList {
                reader,
                changes: hosts[reader].facts(&inode).changes_by_others,
                inode,
                bytes: bytes_of(&list),
                list,
                _file: file,
            });
        }
    }
    assert!(kept_count > 100, "{kept_count}");
}

/// Opens the log of a host.
fn log_of(dir: &Path, host: &str) -> File {
    let containers = fs::read_dir(dir.join(".firn/log")).expect("list");
    let containers = containers.map(|entry| entry.expect("entry").path());
    let containers = containers.filter_map(|path| fs::read_dir(path).ok());
    let containers = containers
        .flatten()
        .map(|entry| entry.expect("entry").path());
    let logs = containers.filter_map(|path| fs::read_dir(path).ok());
    let logs = logs.flatten().map(|entry| entry.expect("entry").path());
    let is_log = |path: &std::path::PathBuf| {
        let name = path.file_name().expect("a name").as_encoded_bytes();
        name.starts_with(format!("d-{host}-").as_bytes())
    };
    let logs: Vec<_> = logs.filter(is_log).collect();
    assert_eq!(logs.len(), 1);
    let mut options = File::options();
    options.read(true).write(true);
    options.open(&logs[0]).expect("open a log")
}

/// Proves S-log-31: bytes of a damaged block are not listed, and those of its neighbours are.
#[test]
fn damaged_blocks_are_left_out() {
    let dir = tempfile::tempdir().expect("a directory");
    let [writer, reader] = ["a", "b"].map(|name| host(dir.path(), name, VIEW_AGE_MAX));
    // Three blocks, each with its own checksum.
    let block = 1 << 20;
    let bytes: Vec<u8> = (0..5 * block / 2).map(|n| (n % 251) as u8 + 1).collect();
    write(&writer, 0, &bytes);
    let log = log_of(dir.path(), "a");
    log.write_all_at(&[0], block as u64 + 77).expect("damage");
    let file = open(&reader, Access::Read);
    let located = reader.locate(&file, 0..u64::MAX, ALL).expect("locate");
    let parts = bytes_of(&located.expect("a list"));
    let ranges: Vec<_> = parts
        .iter()
        .map(|(at, part)| (*at as usize, part.len()))
        .collect();
    assert_eq!(ranges, [(0, block), (2 * block, block / 2)]);
    for (at, part) in parts {
        assert_eq!(part, &bytes[at as usize..][..part.len()]);
    }
    let mut buf = [0; 10];
    assert!(reader.read_at(&file, &mut buf, block as u64 + 5).is_err());
}

/// A flat file is one part. A file that was never logged is left to the kernel. A list that would be valid for a short
/// time only is not made. A reader of one host's bytes does not wait for the checksums of another host's.
#[test]
fn only_the_host_is_checked_whose_bytes_are_asked_for() {
    let dir = tempfile::tempdir().expect("a directory");
    let hosts = ["a", "b", "c"].map(|name| host(dir.path(), name, VIEW_AGE_MAX));
    for (offset, host) in (0..).step_by(100).zip([0, 1, 2, 0, 1, 2]) {
        write(&hosts[host], offset, &[host as u8 + 1; 100]);
    }
    let file = open(&hosts[0], Access::Read);
    let told = |from: u64| {
        let located = hosts[0].locate(&file, from..u64::MAX, ALL);
        let located = located.expect("locate").expect("a list");
        assert_eq!(located.end, u64::MAX);
        let told = located
            .parts
            .iter()
            .map(|part| (part.offset, part.file.is_some()));
        told.collect::<Vec<_>>()
    };
    let own = |offset| (offset, true);
    let later = |offset| (offset, false);
    assert_eq!(told(0), [own(0), later(100), own(300), later(400)]);
    assert_eq!(
        told(150),
        [own(150), later(200), own(300), own(400), later(500)]
    );
    assert_eq!(told(500), [own(500)]);
    // Each change has its own checksum. The one at 200 is not compared yet, because another host wrote it.
    let known = [own(0), own(100), later(200), own(300), own(400), own(500)];
    assert_eq!(told(0), known);
}

#[test]
fn what_is_told_depends_on_where_the_file_is_and_for_how_long() {
    let dir = tempfile::tempdir().expect("a directory");
    let one = host(dir.path(), "a", VIEW_AGE_MAX);
    write(&one, 0, &[1; 1000]);
    write(&one, 3000, &[2; 1000]);
    let file = open(&one, Access::Read);
    assert_eq!(compare(&one, &file, ALL).0, 2000, "the hole is left out");
    drop(file);
    assert_eq!(one.settle().error, None);
    assert_eq!(
        fs::metadata(dir.path().join("file")).expect("stat").len(),
        4000
    );
    let file = open(&one, Access::Read);
    let (bytes, lists) = compare(&one, &file, ALL);
    assert_eq!((bytes, lists.len(), lists[0].parts.len()), (4000, 1, 1));
    let beyond = one.locate(&file, 4000..u64::MAX, ALL).expect("locate");
    let beyond = beyond.expect("a list");
    assert_eq!((beyond.parts.len(), beyond.end), (0, u64::MAX));
    // The process that writes reads its own bytes in another way.
    let writer = open(&one, Access::Write);
    assert!(one.locate(&writer, 0..10, ALL).expect("locate").is_none());
    let hasty = host(dir.path(), "b", Duration::from_millis(10));
    let file = open(&hasty, Access::Read);
    assert!(hasty.locate(&file, 0..10, ALL).expect("locate").is_none());
}
