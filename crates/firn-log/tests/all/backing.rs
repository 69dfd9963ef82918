//! The log layout as a backing: the suite of all backings, a comparison with a plain directory, and several hosts.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use firn_backing::{
    Access, Backing, DataPart, Errno, FileUse, Files, Names, Placement, RenameFlags, Resize, Seek,
    Sharing, Volume,
};
use firn_hosts::own;
use firn_log::frame::PIECES_MAX;
use firn_log::{LogBacking, Setup, WhenClosed};
use firn_sim::Fault;
use firn_sim::{SimBacking, suite};
use firn_transact::PlainBacking;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::common;

fn setup(host: &str) -> Setup {
    Setup {
        host: host.to_owned(),
        chooses: Box::new(|_: &OsStr| true),
        is_alive: Box::new(|host| Ok(host != "dead")),
        view_age_max: Duration::ZERO,
        lag_max: Duration::ZERO,
        unit_bytes: 64 << 10,
        when_closed: WhenClosed::Flatten,
        flattens_read: false,
    }
}

fn logged(disk: &SimBacking, host: &str) -> PlainBacking<LogBacking<SimBacking>> {
    PlainBacking::new(LogBacking::open(disk.clone(), setup(host)).expect("open"))
}

#[test]
fn it_does_what_every_backing_does() {
    suite::run(|| logged(&SimBacking::new(), "a"));
}

#[test]
fn it_does_what_a_plain_directory_does() {
    for seed in 0..25 {
        let plain = SimBacking::new();
        suite::differential::run(&logged(&SimBacking::new(), "a"), &plain, seed, 300);
    }
}

/// Three hosts take turns to open, write, cut, rename, remove, close and flatten files. Each host sees what a single
/// directory would have. At the end the files are plain, and no container is left.
#[test]
fn hosts_that_take_turns_have_one_directory() {
    for seed in 0..60 {
        let mut random = StdRng::seed_from_u64(seed);
        let disk = SimBacking::new();
        let mut hosts: Vec<Logged> = Vec::new();
        for name in HOSTS {
            hosts.push(logged_by(&disk.another_process(), name));
        }
        let mut expected: HashMap<&str, Vec<u8>> = HashMap::new();
        for step in 0..60 {
            let host = &hosts[random.random_range(0..hosts.len())];
            let name = NAMES[random.random_range(0..NAMES.len())];
            match random.random_range(0..10) {
                0..5 => write_some(host, name, &mut random, &mut expected),
                5 => {
                    let to = NAMES[random.random_range(0..NAMES.len())];
                    rename(host, name, to, &mut expected);
                }
                6 => remove(host, name, &mut expected),
                7 => assert_eq!(host.settle().error, None),
                _ => {}
            }
            let reader = &hosts[random.random_range(0..hosts.len())];
            for name in NAMES {
                let found = read(reader, name);
                assert!(
                    found.as_ref() == expected.get(name),
                    "seed {seed}, step {step}: {name}"
                );
            }
        }
        // The last host that closes a file may leave work to other hosts, so each host settles several times.
        for _ in 0..3 {
            for host in &hosts {
                assert_eq!(host.settle().error, None, "seed {seed}");
            }
        }
        let plain = PlainBacking::new(disk.clone());
        for name in NAMES {
            assert!(
                read(&plain, name).as_ref() == expected.get(name),
                "seed {seed}: {name}, flat"
            );
        }
        assert_eq!(containers(&disk), 0, "seed {seed}");
    }
}

/// Runs `change` on one host, on the file `x` that two hosts have written, once for each of its calls of the backing.
/// At that call, the other host flattens the file. Then runs `check` with the bytes from before.
///
/// Repeats all of this with a backing that lags for the changing host.
fn change_while_it_becomes_flat(
    change: &(dyn Fn(&Logged) -> firn_backing::Result<()> + Sync),
    check: &dyn Fn(&Logged, Vec<u8>),
) {
    for lag in [None, Some(1), Some(2), Some(3)] {
        change_while_it_becomes_flat_with_lag(lag, change, check);
    }
}

fn change_while_it_becomes_flat_with_lag(
    lag: Option<u64>,
    change: &(dyn Fn(&Logged) -> firn_backing::Result<()> + Sync),
    check: &dyn Fn(&Logged, Vec<u8>),
) {
    let begin = || {
        let disk = SimBacking::new();
        let setup = Setup {
            lag_max: Duration::from_secs(lag.map_or(0, |_| 5)),
            ..setup("a")
        };
        let host = LogBacking::open(disk.clone(), setup).expect("open");
        disk.set_attribute_lag(lag);
        let other = logged_by(&disk.another_process(), "b");
        let mut random = StdRng::seed_from_u64(1);
        let mut expected = HashMap::new();
        for writer in [&host, &other] {
            write_some(writer, "x", &mut random, &mut expected);
        }
        // The first host finishes its writing, so that the other host can flatten the file.
        assert_eq!(host.settle().error, None);
        let bytes = expected.remove("x").expect("it was written");
        (disk, host, other, bytes)
    };
    let (disk, host, ..) = begin();
    let before = disk.steps();
    assert_eq!(change(&host), Ok(()));
    let calls = disk.steps() - before;
    let mut flat = 0;
    for at in 1..=calls {
        let (disk, host, other, bytes) = begin();
        let hang = disk.hang_at(disk.steps() + at);
        std::thread::scope(|scope| {
            let changed = scope.spawn(|| change(&host));
            hang.await_call();
            other.settle();
            flat += usize::from(containers(&disk) == 0);
            hang.release();
            assert_eq!(changed.join().expect("no panic"), Ok(()), "call {at}");
        });
        for host in [&host, &other, &host] {
            assert_eq!(host.settle().error, None, "call {at}");
        }
        check(&host, bytes);
        assert_eq!(containers(&disk), 0, "call {at}");
    }
    assert!(flat > 0, "it never became flat meanwhile");
}

#[test]
fn regression_a_file_that_becomes_flat_meanwhile_is_removed() {
    change_while_it_becomes_flat(
        &|host| host.unlink(&host.root(), OsStr::new("x")),
        &|host, _| assert_eq!(read(host, "x"), None),
    );
}

/// Proves S-log-72.
#[test]
fn regression_a_file_that_becomes_flat_meanwhile_is_opened_and_written() {
    const NEW: &[u8] = b"written later";
    let write = |host: &Logged| {
        let (inode, _) = host.lookup(&host.root(), OsStr::new("x"))?;
        let file = host.open(&inode, Access::ReadWrite)?;
        host.report_use(&file, FileUse::OpenedToWrite)?;
        host.sync(&file, false)?;
        host.write_at(&file, &[IoSlice::new(NEW)], 7)?;
        host.sync(&file, false)
    };
    change_while_it_becomes_flat(&write, &|host, mut bytes| {
        bytes[7..7 + NEW.len()].copy_from_slice(NEW);
        assert!(read(host, "x") == Some(bytes));
    });
}

/// A file that was still queued was forgotten once another host had flattened it. It was opened and written again, and
/// was then flattened under its writer, whose write failed with ENOENT.
#[test]
fn regression_a_file_that_is_written_again_is_not_flattened_by_its_former_self() {
    let disk = SimBacking::new();
    let a = logged_by(&disk.another_process(), "a");
    let b = logged_by(&disk.another_process(), "b");
    drop(written_by(&a, "file", b"so"));
    let file_of_b = opened_by(&b, "file");
    let written = b.write_at(&file_of_b, &[IoSlice::new(b"me")], 2);
    assert_eq!(written, Ok(2));
    // The file stays queued, because another host writes to it.
    assert_eq!(a.settle().error, None);
    drop(file_of_b);
    assert_eq!(b.settle().error, None);
    let (inode, attr) = a.lookup(&a.root(), OsStr::new("file")).expect("lookup");
    assert_eq!((attr.size, containers(&disk)), (4, 0));
    let file = a.open(&inode, Access::ReadWrite).expect("open");
    for byte in b"more" {
        a.write_at(&file, &[IoSlice::new(&[*byte])], 0)
            .expect("write");
        assert_eq!(a.settle().error, None);
    }
    assert_eq!(read(&b, "file"), Some(b"eome".to_vec()));
}

fn opened_by(host: &Logged, name: &str) -> <Logged as Volume>::File {
    let (inode, _) = host.lookup(&host.root(), OsStr::new(name)).expect("lookup");
    host.open(&inode, Access::ReadWrite).expect("open")
}

/// A host's writes after its own cut were ordered before a cut that another host had made since, so that cut hid them.
///
/// Proves S-log-64.
#[test]
fn regression_a_cut_does_not_hide_what_another_host_writes_after_it() {
    let disk = SimBacking::new();
    let hosts = ["a", "b", "c"].map(|host| logged_by(&disk.another_process(), host));
    drop(written_by(&hosts[0], "file", &[1; 50]));
    let files = hosts.each_ref().map(|host| opened_by(host, "file"));
    for (number, (host, file)) in hosts.iter().zip(&files).enumerate() {
        host.set_len(file, 9 - number as u64).expect("set_len");
    }
    let mut expected = vec![0; 40];
    expected[..7].fill(1);
    for (number, (host, file)) in hosts.iter().zip(&files).enumerate() {
        let at = 10 * (number + 1);
        let data = [10 + number as u8; 10];
        let written = host.write_at(file, &[IoSlice::new(&data)], at as u64);
        assert_eq!(written, Ok(10));
        expected[at..at + 10].copy_from_slice(&data);
    }
    drop(files);
    for host in &hosts {
        assert_eq!(read(host, "file").as_ref(), Some(&expected));
        assert_eq!(host.settle().error, None);
    }
    assert_eq!(
        (read(&disk, "file"), containers(&disk)),
        (Some(expected), 0)
    );
}

/// Proves S-log-64.
#[test]
fn a_cut_to_the_length_that_the_file_has_is_none() {
    let disk = SimBacking::new();
    let a = logged_by(&disk.another_process(), "a");
    let b = logged_by(&disk.another_process(), "b");
    let file = written_by(&a, "empty", b"");
    a.set_len(&file, 0).expect("set_len");
    assert_eq!(containers(&disk), 0);

    let file = written_by(&a, "file", b"some");
    let file_of_b = opened_by(&b, "file");
    let writes = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&writes);
    b.below().set_plan(move |call, _| {
        count.fetch_add(usize::from(call == "write_at"), Ordering::Relaxed);
        None
    });
    b.set_len(&file_of_b, 4).expect("set_len");
    assert_eq!(writes.load(Ordering::Relaxed), 0);
    b.set_len(&file_of_b, 3).expect("set_len");
    assert_eq!(writes.load(Ordering::Relaxed), 1);
    assert_eq!(read(&a, "file"), Some(b"som".to_vec()));
    drop(file);
}

/// Proves S-log-64.
#[test]
fn who_makes_a_file_longer_does_not_cut_what_it_has_not_seen() {
    let disk = SimBacking::new();
    let rarely_refreshed = Setup {
        view_age_max: Duration::from_hours(1),
        ..setup("a")
    };
    let a = LogBacking::open(disk.another_process(), rarely_refreshed).expect("open");
    let b = logged_by(&disk.another_process(), "b");
    let file = written_by(&a, "file", b"some");
    // The first use after a sync refreshes the file.
    assert_eq!(a.attr_of_file(&file).expect("attr").size, 4);
    let file_of_b = opened_by(&b, "file");
    let written = b.write_at(&file_of_b, &[IoSlice::new(&[7; 100])], 0);
    assert_eq!(written, Ok(100));
    b.sync(&file_of_b, false).expect("sync");
    assert_eq!(a.attr_of_file(&file).expect("attr").size, 4);
    a.allocate(&file, 0, 0, 50).expect("allocate");
    a.resize(&file, Resize::AtLeast(60)).expect("grow");
    a.resize(&file, Resize::Unchanged).expect("nothing");
    assert_eq!(read(&b, "file"), Some(vec![7; 100]));
    a.allocate(&file, 0, 0, 110).expect("allocate");
    let longer = [vec![7; 100], vec![0; 10]].concat();
    assert_eq!(read(&b, "file"), Some(longer));
}

/// The disk is full at each page in turn that flattening needs. Readers get the same bytes, and a later attempt
/// succeeds.
///
/// Proves S-log-5.
#[test]
fn a_disk_that_is_full_while_a_file_is_flattened_costs_nothing() {
    const ROOM: u64 = 1 << 30;
    let mut failed = 0;
    for pages in 0..70 {
        let disk = SimBacking::new();
        let hosts = ["a", "b"].map(|host| logged_by(&disk.another_process(), host));
        let mut random = StdRng::seed_from_u64(pages / 10);
        let mut expected = HashMap::new();
        for host in [0, 1, 0] {
            write_some(&hosts[host], "x", &mut random, &mut expected);
        }
        disk.set_capacity(Some(ROOM));
        let free = disk.statfs().expect("statfs");
        let used = ROOM - free.blocks_free * free.block_size;
        disk.set_capacity(Some(used + pages % 10 * 8 * free.block_size));
        for _ in 0..2 {
            for host in &hosts {
                let error = host.settle().error;
                assert!(
                    matches!(error, None | Some(Errno::NOSPC)),
                    "{pages} pages: {error:?}"
                );
                failed += usize::from(error.is_some());
                for reader in &hosts {
                    assert!(
                        read(reader, "x").as_ref() == expected.get("x"),
                        "{pages} pages"
                    );
                }
            }
        }
        disk.set_capacity(None);
        for host in [0, 1, 0] {
            assert_eq!(hosts[host].settle().error, None, "{pages} pages");
        }
        let plain = PlainBacking::new(disk.clone());
        assert!(
            read(&plain, "x").as_ref() == expected.get("x"),
            "{pages} pages"
        );
        assert_eq!(containers(&disk), 0, "{pages} pages");
    }
    assert!(failed > 20, "{failed}: the disk was not full");
}

const HOSTS: [&str; 3] = ["a", "b", "c"];
const NAMES: [&str; 3] = ["x", "y", "z"];

type Logged = LogBacking<SimBacking>;

fn logged_by(disk: &SimBacking, host: &str) -> Logged {
    LogBacking::open(disk.clone(), setup(host)).expect("open")
}

fn write_some<'n>(
    host: &Logged,
    name: &'n str,
    random: &mut StdRng,
    expected: &mut HashMap<&'n str, Vec<u8>>,
) {
    let root = host.root();
    let found = host.lookup(&root, OsStr::new(name));
    let file = match found {
        Ok((inode, _)) => host.open(&inode, Access::ReadWrite).expect("open"),
        Err(_) => {
            let me = suite::own_caller();
            host.create(&me, &root, OsStr::new(name), 0o644)
                .expect("create")
                .1
        }
    };
    let bytes = expected.entry(name).or_default();
    for _ in 0..random.random_range(1..4) {
        if random.random_ratio(1, 6) {
            let len = random.random_range(0..200_000);
            host.set_len(&file, len).expect("set_len");
            bytes.resize(len as usize, 0);
            continue;
        }
        let mut data = vec![0; random.random_range(1..50_000)];
        random.fill(&mut data[..]);
        let at = random.random_range(0..150_000usize);
        let parts = if random.random() {
            random.random_range(1..20)
        } else {
            1
        };
        let written = spread(&data, parts, at);
        write_parts(host, &file, &written);
        for (at, part) in written {
            bytes.resize(bytes.len().max(at + part.len()), 0);
            bytes[at..at + part.len()].copy_from_slice(part);
        }
    }
    if random.random_ratio(1, 3) {
        host.sync(&file, false).expect("sync");
    }
}

/// Splits `data` into `parts` parts with gaps between them, from offset `at` on.
fn spread(data: &[u8], parts: usize, at: usize) -> Vec<(usize, &[u8])> {
    let len = data.len().div_ceil(parts);
    let parts = data.chunks(len).enumerate();
    parts
        .map(|(number, part)| (at + number * (len + 100), part))
        .collect()
}

/// Writes all parts, with further calls for those that did not fit in one frame.
fn write_parts(host: &Logged, file: &<Logged as Volume>::File, parts: &[(usize, &[u8])]) {
    let data: Vec<_> = parts.iter().map(|(_, part)| [IoSlice::new(part)]).collect();
    let offsets = parts.iter().map(|(at, _)| *at as u64);
    let parts: Vec<_> = offsets
        .zip(&data)
        .map(|(offset, data)| DataPart { offset, data })
        .collect();
    let mut remaining = &parts[..];
    while !remaining.is_empty() {
        let mut written = host.write_parts(file, remaining).expect("write");
        assert!(written > 0);
        while let Some((first, rest)) = remaining.split_first()
            && written > 0
        {
            assert!(written >= first.len(), "parts are written whole");
            written -= first.len();
            remaining = rest;
        }
    }
}

#[test]
fn parts_are_one_append_and_one_frame_or_nothing() {
    let disk = SimBacking::new();
    let host = logged_by(&disk, "a");
    let me = suite::own_caller();
    let (inode, file, _) = host
        .create(&me, &host.root(), OsStr::new("x"), 0o644)
        .expect("create");
    assert!(host.facts(&inode).gathers && host.facts(&host.root()).gathers);
    let data = vec![7; 30_000];
    write_parts(&host, &file, &spread(&data, 1, 0));
    let writes = Arc::new(AtomicUsize::new(0));
    let count_writes = |fails_at: usize| {
        let count = Arc::clone(&writes);
        count.store(0, Ordering::Relaxed);
        disk.set_plan(move |call, _| {
            let number = count.fetch_add(usize::from(call == "write_at"), Ordering::Relaxed);
            let fails = call == "write_at" && number == fails_at;
            fails.then_some(Fault::Error(Errno::NOSPC))
        });
    };
    count_writes(usize::MAX);
    write_parts(&host, &file, &spread(&data, 100, 100_000));
    assert_eq!(writes.load(Ordering::Relaxed), 2, "the bytes and the frame");
    let before = read(&host, "x");
    for fails_at in 0..2 {
        count_writes(fails_at);
        let slices: Vec<_> = data.chunks(300).map(|part| [IoSlice::new(part)]).collect();
        let parts = slices.iter().zip(0..).map(|(data, number)| DataPart {
            offset: 1000 * number,
            data,
        });
        let parts: Vec<_> = parts.collect();
        assert_eq!(host.write_parts(&file, &parts), Err(Errno::NOSPC));
        disk.clear_plan();
        assert!(read(&host, "x") == before, "nothing of it counts");
    }
}

/// A network file system may return these errors. They do not mean that a container is sealed or removed.
#[test]
fn an_error_of_the_server_ends_a_write_and_no_container() {
    let disk = SimBacking::new();
    let host = logged_by(&disk, "a");
    let me = suite::own_caller();
    let (_, file, _) = host
        .create(&me, &host.root(), OsStr::new("x"), 0o644)
        .expect("create");
    write_parts(&host, &file, &[(0, &b"before"[..])]);
    for errno in [Errno::STALE, Errno::NOENT] {
        disk.set_plan(move |call, _| (call == "write_at").then_some(Fault::Error(errno)));
        let data = [IoSlice::new(b"never")];
        let part = DataPart {
            offset: 0,
            data: &data,
        };
        assert_eq!(host.write_parts(&file, &[part]), Err(errno));
        disk.clear_plan();
        assert_eq!(containers(&disk), 1, "{errno}: no next generation");
    }
    write_parts(&host, &file, &[(0, &b"after "[..])]);
    assert_eq!(read(&host, "x").as_deref(), Some(&b"after "[..]));
}

#[test]
fn a_frame_has_a_bounded_number_of_parts_and_the_next_one_the_rest() {
    let disk = SimBacking::new();
    let host = logged_by(&disk, "a");
    let me = suite::own_caller();
    let (_, file, _) = host
        .create(&me, &host.root(), OsStr::new("x"), 0o644)
        .expect("create");
    let count = PIECES_MAX + 10;
    let data: Vec<u8> = (0..count).map(|at| (at % 251) as u8).collect();
    // No two parts have the same distance, so each is a run of its own.
    let at = |number: usize| number * 10 + number * number % 7;
    let parts: Vec<_> = (0..count)
        .map(|number| (at(number), &data[number..number + 1]))
        .collect();
    write_parts(&host, &file, &parts);
    let mut expected = vec![0; at(count - 1) + 1];
    for (at, byte) in parts {
        expected[at] = byte[0];
    }
    let reader = logged_by(&disk.another_process(), "b");
    assert!(read(&reader, "x") == Some(expected));
}

fn rename<'n>(host: &Logged, from: &'n str, to: &'n str, expected: &mut HashMap<&'n str, Vec<u8>>) {
    let root = host.root();
    let from_name = OsStr::new(from);
    let to_name = OsStr::new(to);
    let renamed = host.rename(&root, from_name, &root, to_name, RenameFlags::empty());
    match expected.remove(from) {
        Some(bytes) => {
            assert_eq!(renamed, Ok(()));
            expected.insert(to, bytes);
        }
        None => assert_eq!(renamed, Err(Errno::NOENT)),
    }
}

fn remove(host: &Logged, name: &str, expected: &mut HashMap<&str, Vec<u8>>) {
    let removed = host.unlink(&host.root(), OsStr::new(name));
    let was_there = expected.remove(name).is_some();
    assert_eq!(removed.is_ok(), was_there);
}

/// Opens a file and reads all of its bytes.
fn read<B: Backing>(host: &B, name: &str) -> Option<Vec<u8>> {
    let (inode, attr) = match host.lookup(&host.root(), OsStr::new(name)) {
        Err(Errno::NOENT) => return None,
        found => found.expect("lookup"),
    };
    let file = host.open(&inode, Access::Read).expect("open");
    let mut bytes = vec![0xee; attr.size as usize + 10];
    let count = host.read_at(&file, &mut bytes, 0).expect("read");
    bytes.truncate(count);
    assert_eq!(count as u64, attr.size, "{name}: the length is told right");
    Some(bytes)
}

fn containers(disk: &SimBacking) -> usize {
    common::containers(disk).len()
}

/// Another host removes or replaces a file that is in logs. A program that has the file open reads its bytes or an
/// error.
///
/// Proves S-log-15.
#[test]
fn a_file_that_another_host_removes_is_whole_or_stale() {
    for replaces in [false, true] {
        for wakes in [false, true] {
            let disk = SimBacking::new();
            let a = logged_by(&disk.another_process(), "a");
            let b = logged_by(&disk.another_process(), "b");
            let mut expected = HashMap::from([("x", b"bytes in a log".to_vec())]);
            let mut random = StdRng::seed_from_u64(1);
            let writer = written_by(&a, "x", b"bytes in a log");
            let (inode, _) = b.lookup(&b.root(), OsStr::new("x")).expect("lookup");
            let reader = b.open(&inode, Access::Read).expect("open");
            let read_open = |file: &_| {
                let mut bytes = [0; 50];
                let count = b.read_at(file, &mut bytes, 0)?;
                Ok::<_, Errno>(bytes[..count].to_vec())
            };
            assert_eq!(read_open(&reader), Ok(b"bytes in a log".to_vec()));
            if replaces {
                write_some(&a, "y", &mut random, &mut expected);
                rename(&a, "y", "x", &mut expected);
            } else {
                remove(&a, "x", &mut expected);
            }
            // The removing host still has the file open.
            assert_eq!(read_open(&reader), Ok(b"bytes in a log".to_vec()));
            drop(writer);
            if wakes {
                assert_eq!(a.settle().error, None);
                assert_eq!(read_open(&reader), Err(Errno::STALE));
            } else {
                assert_eq!(read_open(&reader), Ok(b"bytes in a log".to_vec()));
                assert_eq!(a.settle().error, None);
            }
            assert_eq!(read_open(&reader), Err(Errno::STALE));
            assert_eq!(
                b.attr_of_file(&reader).map(|attr| attr.size),
                Err(Errno::STALE)
            );
            // An open by an inode that was looked up before the removal.
            assert_eq!(b.open(&inode, Access::Read).err(), Some(Errno::STALE));
            drop(reader);
            for host in [&a, &b] {
                assert_eq!(host.settle().error, None);
                let found = read(host, "x");
                assert_eq!(found.as_ref(), expected.get("x"));
            }
            assert_eq!(containers(&disk), 0);
        }
    }
}

/// Containers of a removed file do not belong to a new file with the same inode number.
///
/// Proves S-log-41.
#[test]
fn logs_of_a_removed_file_are_not_those_of_a_new_one() {
    let disk = SimBacking::new();
    let a = logged_by(&disk.another_process(), "a");
    drop(written_by(&a, "x", b"bytes in a log"));
    // Without Firn: the file is removed, and the container gets the name of a new file with its inode number.
    let root = disk.root();
    disk.unlink(&root, OsStr::new("x")).expect("unlink");
    let me = suite::own_caller();
    let made = disk.create(&me, &root, OsStr::new("y"), 0o644);
    let (_, file, attr) = made.expect("create");
    disk.write_at(&file, &[IoSlice::new(b"plain")], 0)
        .expect("write");
    let rename = |dir: &_| {
        let listed = own::list(&disk, dir).expect("list");
        let old = String::from_utf8(listed[0].0.clone()).expect("a name");
        let (_, rest) = old.split_once('-').expect("number and birth");
        let new = format!("{:016x}-{rest}", attr.ino);
        let flags = RenameFlags::empty();
        disk.rename(dir, OsStr::new(&old), dir, OsStr::new(&new), flags)
            .expect("rename");
        new
    };
    rename(&common::log_dir(&disk));
    let new = rename(&common::file_dirs(&disk)[0].0);

    let hosts = ["b", "c"].map(|host| logged_by(&disk.another_process(), host));
    for host in &hosts {
        assert_eq!(read(host, "y"), Some(b"plain".to_vec()));
    }
    let (inode, _) = hosts[0]
        .lookup(&hosts[0].root(), OsStr::new("y"))
        .expect("lookup");
    let file = hosts[0].open(&inode, Access::ReadWrite).expect("open");
    hosts[0]
        .write_at(&file, &[IoSlice::new(b"new")], 3)
        .expect("write");
    drop(file);
    for host in [&hosts[1], &hosts[0]] {
        assert_eq!(read(host, "y"), Some(b"planew".to_vec()));
        assert_eq!(host.settle().error, None);
    }
    assert_eq!(
        read(&PlainBacking::new(disk), "y"),
        Some(b"planew".to_vec())
    );
    let orphans = hosts[1].find_orphans().expect("find");
    assert_eq!(orphans.lost, [new], "it is kept, and named");
}

/// Another host removes a file that is flat. A program that has it open still reads its bytes.
#[test]
fn a_file_that_is_flat_is_whole_while_it_is_open() {
    let disk = SimBacking::new();
    let a = logged_by(&disk.another_process(), "a");
    let b = logged_by(&disk.another_process(), "b");
    let writer = written_by(&a, "x", b"bytes in a log");
    let (inode, _) = b.lookup(&b.root(), OsStr::new("x")).expect("lookup");
    let reader = b.open(&inode, Access::Read).expect("open");
    drop(writer);
    assert_eq!(a.settle().error, None);
    let mut bytes = [0; 50];
    assert_eq!(b.read_at(&reader, &mut bytes, 0), Ok(14));
    a.unlink(&a.root(), OsStr::new("x")).expect("unlink");
    assert_eq!(a.settle().error, None);
    assert_eq!(b.read_at(&reader, &mut bytes, 0), Ok(14));
    assert_eq!(bytes[..14], *b"bytes in a log");
}

/// A host that uses one file reads only the containers of that file, however many files are in logs.
#[test]
fn the_calls_for_one_file_do_not_grow_with_the_number_of_files() {
    let calls_of_a_lookup = |files: usize| {
        let disk = SimBacking::new();
        let a = logged_by(&disk.another_process(), "a");
        let names: Vec<String> = (0..files).map(|number| number.to_string()).collect();
        let open: Vec<_> = names
            .iter()
            .map(|name| written_by(&a, name, b"bytes"))
            .collect();
        let disk_of_b = disk.another_process();
        let b = logged_by(&disk_of_b, "b");
        let before = disk_of_b.steps();
        let (_, attr) = b.lookup(&b.root(), OsStr::new("0")).expect("lookup");
        assert_eq!(attr.size, 5);
        let calls = disk_of_b.steps() - before;
        assert!(calls > 0);
        drop(open);
        calls
    };
    assert_eq!(calls_of_a_lookup(4), calls_of_a_lookup(40));
}

/// Opening, writing, closing and flattening a file reads nothing of other files. Only the listing of all files does,
/// and it is made rarely.
#[test]
fn what_is_listed_for_one_file_does_not_grow_with_the_number_of_files() {
    let entries_of_one_file = |files: usize| {
        let disk = SimBacking::new();
        let a = logged_by(&disk.another_process(), "a");
        let names: Vec<String> = (0..files).map(|number| number.to_string()).collect();
        let open: Vec<_> = names
            .iter()
            .map(|name| written_by(&a, name, b"bytes"))
            .collect();
        let disk_of_b = disk.another_process();
        let view_age_max = Duration::from_secs(3600);
        let setup = Setup {
            view_age_max,
            ..setup("b")
        };
        let b = LogBacking::open(disk_of_b.clone(), setup).expect("open");
        b.lookup(&b.root(), OsStr::new("0")).expect("lookup");
        let before = disk_of_b.entries_read();
        let file = written_by(&b, "mine", b"bytes");
        b.report_use(&file, FileUse::Finished).expect("finish");
        drop(file);
        assert_eq!(b.settle().error, None);
        assert_eq!(read(&b, "mine"), Some(b"bytes".to_vec()));
        drop(open);
        disk_of_b.entries_read() - before
    };
    assert_eq!(entries_of_one_file(4), entries_of_one_file(40));
}

/// Proves S-log-3, S-log-4: a sync reads nothing of other hosts. The next use of the file sees what they had synced by
/// then, whatever use it is.
#[test]
fn what_others_synced_before_a_sync_is_seen_by_the_next_use() {
    type Use = fn(&Logged, &<Logged as Volume>::File);
    let uses: [(&str, Use); 4] = [
        ("read", |a, file| {
            let mut bytes = [0; 20];
            assert_eq!(a.read_at(file, &mut bytes, 0), Ok(10));
            assert_eq!(bytes[..10], *b"overbehind");
        }),
        ("stat", |a, file| {
            assert_eq!(a.attr_of_file(file).expect("stat").size, 10);
        }),
        ("seek", |a, file| {
            assert_eq!(a.seek(file, 9, Seek::Data), Ok(9));
        }),
        ("write", |a, file| {
            let written = a.write_at(file, &[IoSlice::new(b"new")], 0);
            assert_eq!(written, Ok(3));
            let mut bytes = [0; 20];
            assert_eq!(a.read_at(file, &mut bytes, 0), Ok(10));
            assert_eq!(bytes[..10], *b"newrbehind");
        }),
    ];
    for (what, use_file) in uses {
        let disk = SimBacking::new();
        let disk_of_a = disk.another_process();
        let view_age_max = Duration::from_hours(1);
        let setup = Setup {
            view_age_max,
            ..setup("a")
        };
        let a = LogBacking::open(disk_of_a.clone(), setup).expect("open");
        let b = logged_by(&disk.another_process(), "b");
        let file = written_by(&a, "file", b"before");
        let file_of_b = opened_by(&b, "file");
        let written = b.write_at(&file_of_b, &[IoSlice::new(b"overbehind")], 0);
        assert_eq!(written, Ok(10));
        b.sync(&file_of_b, false).expect("sync");
        let written = a.write_at(&file, &[IoSlice::new(b"x")], 0);
        assert_eq!(written, Ok(1));
        let b_syncs = b.write_at(&file_of_b, &[IoSlice::new(b"overbehind")], 0);
        assert_eq!(b_syncs, Ok(10));
        b.sync(&file_of_b, false).expect("sync");
        let before = disk_of_a.entries_read();
        a.sync(&file, false).expect("sync");
        assert_eq!(disk_of_a.entries_read(), before, "{what}: a sync looks");
        use_file(&a, &file);
        let inode = a.lookup(&a.root(), OsStr::new("file")).expect("lookup").0;
        assert_eq!(a.attr(&inode).expect("stat").size, 10, "{what}");
    }
}

/// Creates a file with these bytes, and returns it open for writing.
fn written_by(host: &Logged, name: &str, bytes: &[u8]) -> <Logged as Volume>::File {
    let me = suite::own_caller();
    let made = host.create(&me, &host.root(), OsStr::new(name), 0o644);
    let (_, file, _) = made.expect("create");
    host.write_at(&file, &[IoSlice::new(bytes)], 0)
        .expect("write");
    host.sync(&file, false).expect("sync");
    file
}
