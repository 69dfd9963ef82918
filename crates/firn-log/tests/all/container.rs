//! Several hosts write one file through its container, compared with a file in memory: in turn, at the same time, cut
//! off at any call, and with power failures.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_backing::{Access, Backing, DataPart, Errno, Files, Names, Volume};
use firn_hosts::own;
use firn_log::{ChangeError, ChangeResult, Container, FlattenProgress, Lifecycle, Memory};
use firn_sim::{SimBacking, suite};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const FILE_BYTES: u64 = 3000;
const SEEDS: u64 = 120;
/// Bound on index memory. It is so small that a few hundred bytes of an index are sorted.
const MEMORY_BYTES: u64 = 64 << 10;
/// Length of a part when flattening. A file has several parts.
const UNIT_BYTES: u64 = 700;

/// The disk that the hosts share, with a plain file and its container.
struct World {
    disk: SimBacking,
    base: Vec<u8>,
}

impl World {
    fn new(plain_bytes: u64) -> Self {
        let disk = SimBacking::new();
        let me = suite::own_caller();
        let root = disk.root();
        let base: Vec<u8> = (0..plain_bytes).map(|at| (at % 251) as u8).collect();
        let (_, file, _) = disk
            .create(&me, &root, OsStr::new("file"), 0o644)
            .expect("create");
        if !base.is_empty() {
            disk.write_at(&file, &[IoSlice::new(&base)], 0)
                .expect("write");
        }
        disk.mkdir(&me, &root, OsStr::new("logs"), 0o700)
            .expect("mkdir");
        disk.sync_all().expect("sync");
        Self { disk, base }
    }

    fn host(&self, name: &str) -> Host {
        Host::open(self.disk.another_process(), name, self.base.len() as u64).expect("a host")
    }
}

struct Host {
    disk: SimBacking,
    container: Container<SimBacking>,
    plain: <SimBacking as Volume>::File,
}

impl Host {
    fn open(disk: SimBacking, name: &str, plain_bytes: u64) -> Result<Self, Errno> {
        Self::with_memory(disk, name, plain_bytes, MEMORY_BYTES)
    }

    fn with_memory(
        disk: SimBacking,
        name: &str,
        plain_bytes: u64,
        memory_bytes: u64,
    ) -> Result<Self, Errno> {
        let root = disk.root();
        let (inode, _) = disk.lookup(&root, OsStr::new("file"))?;
        let plain = disk.open(&inode, Access::Read)?;
        let (dir, _) = disk.lookup(&root, OsStr::new("logs"))?;
        let container = Container::open(
            &disk,
            dir,
            "logs",
            name,
            plain_bytes,
            &Memory::new(memory_bytes),
        )?;
        Ok(Self {
            disk,
            container,
            plain,
        })
    }

    /// Refreshes the container, and reads the whole file.
    fn read(&self) -> Result<Vec<u8>, Errno> {
        self.container.refresh(&self.disk)?;
        self.read_known()
    }

    fn read_known(&self) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0xee; self.container.len() as usize + 10];
        let below = |buf: &mut [u8], offset| self.disk.read_at(&self.plain, buf, offset);
        let count = self.container.read(&self.disk, &below, &mut bytes, 0)?;
        bytes.truncate(count);
        Ok(bytes)
    }

    /// Reads the records at these offsets one by one. Returns how often the backing was read.
    fn count_reads(&self, offsets: &[u64], record: &[u8]) -> u64 {
        let count = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&count);
        self.disk.set_plan(move |call, _| {
            counted.fetch_add(u64::from(call == "read_at"), Ordering::Relaxed);
            None
        });
        let below = |buf: &mut [u8], offset| self.disk.read_at(&self.plain, buf, offset);
        for offset in offsets {
            let mut bytes = vec![0xee; record.len()];
            let found = self
                .container
                .read(&self.disk, &below, &mut bytes, *offset)
                .expect("read");
            assert!(found == record.len() && bytes == record);
        }
        self.disk.clear_plan();
        count.load(Ordering::Relaxed)
    }

    fn ending(&self) -> Result<Option<Lifecycle<'_, SimBacking>>, Errno> {
        Lifecycle::open(&self.disk, &self.container, &self.disk.root(), "logs")
    }

    /// Seals and flattens what it can. Returns whether the container is flat.
    fn flatten(&self) -> Result<bool, Errno> {
        let Some(ending) = self.ending()? else {
            return Ok(true);
        };
        let (inode, _) = self.disk.lookup(&self.disk.root(), OsStr::new("file"))?;
        if !ending.seal(&inode, UNIT_BYTES, &|host| Ok(host != "dead"))? {
            return Ok(false);
        }
        let plain = self.disk.open(&inode, Access::ReadWrite)?;
        Ok(ending.flatten(&inode, &plain)? == FlattenProgress::Done)
    }

    fn apply(&self, change: &Change) -> ChangeResult {
        match change {
            Change::Write(parts) => {
                let data: Vec<_> = parts.iter().map(|(_, data)| [IoSlice::new(data)]).collect();
                let offsets = parts.iter().map(|(at, _)| *at);
                let parts: Vec<_> = offsets
                    .zip(&data)
                    .map(|(offset, data)| DataPart { offset, data })
                    .collect();
                self.container.write(&self.disk, &parts)
            }
            Change::Cut(len) => self.container.set_len(&self.disk, *len),
        }
    }
}

#[derive(Clone, Debug)]
enum Change {
    Write(Vec<(u64, Vec<u8>)>),
    Cut(u64),
}

impl Change {
    fn random(random: &mut StdRng) -> Self {
        if random.random_ratio(1, 8) {
            return Self::Cut(random.random_range(0..FILE_BYTES + 500));
        }
        let len = random.random_range(1..300);
        let gap = random.random_range(0..300);
        let first = random.random_range(0..FILE_BYTES);
        let parts = (0..random.random_range(1..5)).map(|number| {
            let mut data = vec![0; len as usize];
            random.fill(&mut data[..]);
            (first + (len + gap) * number, data)
        });
        Self::Write(parts.collect())
    }

    fn apply(&self, file: &mut Vec<u8>) {
        match self {
            Self::Cut(len) => file.resize(*len as usize, 0),
            Self::Write(parts) => {
                for (at, data) in parts {
                    let end = *at as usize + data.len();
                    file.resize(file.len().max(end), 0);
                    file[*at as usize..end].copy_from_slice(data);
                }
            }
        }
    }
}

/// Each MiB of another host's log is read once, when its checksum is compared. Reads of this host's own log grow.
#[test]
fn records_are_read_in_large_parts_of_their_log() {
    const COUNT: u64 = 128;
    let world = World::new(0);
    let host =
        |name| Host::with_memory(world.disk.another_process(), name, 0, 32 << 20).expect("a host");
    let writer = host("writer");
    let reader = host("reader");
    let record: Vec<u8> = (0..16 << 10).map(|at| ((at * 7) >> 3) as u8).collect();
    let offsets: Vec<u64> = (0..COUNT).map(|n| n * 3 * record.len() as u64).collect();
    let parts = offsets.iter().map(|offset| (*offset, record.clone()));
    let change = Change::Write(parts.collect());
    writer.apply(&change).expect("write");
    reader.container.refresh(&reader.disk).expect("refresh");
    assert_eq!(reader.count_reads(&offsets, &record), 2);
    let own = writer.count_reads(&offsets, &record);
    assert!((2..=COUNT / 8).contains(&own), "{own} reads of an own log");
}

/// Each change is published before another host refreshes and makes the next one. All hosts then see the file that a
/// single host would have made.
#[test]
fn hosts_that_take_turns_see_one_file() {
    for seed in 0..SEEDS {
        let mut random = StdRng::seed_from_u64(seed);
        let world = World::new(random.random_range(0..FILE_BYTES));
        let hosts: Vec<Host> = ["a", "b", "c"].map(|name| world.host(name)).into();
        let mut expected = world.base.clone();
        for _ in 0..random.random_range(1..30) {
            let host = &hosts[random.random_range(0..hosts.len())];
            host.container
                .refresh_and_raise_epoch(&host.disk)
                .expect("look");
            for _ in 0..random.random_range(1..4) {
                let change = Change::random(&mut random);
                host.apply(&change).expect("a change");
                change.apply(&mut expected);
                assert_eq!(host.container.len(), expected.len() as u64, "seed {seed}");
            }
            host.container.sync(&host.disk).expect("sync");
            let reader = &hosts[random.random_range(0..hosts.len())];
            assert!(reader.read().expect("read") == expected, "seed {seed}");
        }
        assert!(
            world.host("d").read().expect("read") == expected,
            "seed {seed}"
        );
    }
}

/// At each call of a cut in turn, a second host writes, and a third host reads that and writes over it. If the cut
/// hides the bytes of the third host, it also hides the bytes below them.
#[test]
fn a_cut_takes_what_came_before_what_it_takes() {
    let mut cut_with_both = 0;
    for calls in 1.. {
        let world = World::new(0);
        let hosts = ["a", "b", "c"].map(|name| world.host(name));
        let [cutting, first, second] = &hosts;
        for host in [first, second] {
            let change = Change::Write(vec![(0, vec![1; 100])]);
            host.apply(&change).expect("write");
        }
        cutting
            .container
            .refresh_and_raise_epoch(&cutting.disk)
            .expect("look");
        let hang = cutting.disk.hang_at(cutting.disk.steps() + calls);
        let is_reached = std::thread::scope(|scope| {
            let cut = scope.spawn(|| cutting.apply(&Change::Cut(0)));
            while !hang.is_reached() && !cut.is_finished() {
                std::thread::yield_now();
            }
            let is_reached = hang.is_reached();
            if is_reached {
                for (host, mark) in [(first, 2), (second, 3)] {
                    host.container
                        .refresh_and_raise_epoch(&host.disk)
                        .expect("look");
                    let change = Change::Write(vec![(0, vec![mark; 100])]);
                    host.apply(&change).expect("write");
                }
            }
            drop(hang);
            cut.join().expect("a thread").expect("a cut");
            is_reached
        });
        if !is_reached {
            break;
        }
        let bytes = world.host("d").read().expect("read");
        assert!(
            bytes.is_empty() || bytes == [3; 100],
            "at call {calls}: {bytes:?}"
        );
        cut_with_both += usize::from(bytes.is_empty());
    }
    assert!(cut_with_both > 0);
}

/// Changes that do not know of each other have an order, which is the same for all hosts.
#[test]
fn hosts_that_write_at_once_agree_in_the_end() {
    for seed in 0..SEEDS {
        let mut random = StdRng::seed_from_u64(seed);
        let world = World::new(random.random_range(0..FILE_BYTES));
        let hosts: Vec<Host> = ["a", "b", "c"].map(|name| world.host(name)).into();
        for _ in 0..40 {
            let host = &hosts[random.random_range(0..hosts.len())];
            match random.random_range(0..10) {
                0 => host.container.sync(&host.disk).expect("sync"),
                1 => drop(host.read().expect("read")),
                _ => host.apply(&Change::random(&mut random)).expect("a change"),
            }
        }
        let expected = world.host("d").read().expect("read");
        for host in &hosts {
            assert!(host.read().expect("read") == expected, "seed {seed}");
        }
    }
}

/// A host that dies at any call leaves each change complete or not made, and changes whose call returned are made. Its
/// next life continues from there.
#[test]
fn a_host_that_dies_leaves_whole_changes() {
    for seed in 0..20 {
        let mut random = StdRng::seed_from_u64(seed);
        let changes: Vec<Change> = (0..4).map(|_| Change::random(&mut random)).collect();
        for step in 1.. {
            let world = World::new(500);
            let other = world.host("b");
            let host = world.host("a");
            host.disk.crash_at(host.disk.steps() + step);
            let mut before = world.base.clone();
            let mut done = 0;
            for change in &changes {
                if host.apply(change).is_err() {
                    break;
                }
                change.apply(&mut before);
                done += 1;
                if host.container.sync(&host.disk).is_err() {
                    break;
                }
            }
            let is_over = !host.disk.is_dead();
            let mut after = before.clone();
            if let Some(next) = changes.get(done) {
                next.apply(&mut after);
            }
            let found = other.read().expect("read");
            assert!(
                found == before || found == after,
                "seed {seed}, step {step}"
            );

            let again = world.host("a");
            let mut expected = found;
            let change = Change::Write(vec![(7, vec![0xaa; 600])]);
            again.apply(&change).expect("a change of its next life");
            change.apply(&mut expected);
            again.container.sync(&again.disk).expect("sync");
            assert!(
                other.read().expect("read") == expected,
                "seed {seed}, step {step}"
            );
            if is_over {
                break;
            }
        }
    }
}

/// Each of two concurrent syncs makes durable what was written before it began. A write that did not end before a sync
/// began is made durable by the next sync.
#[test]
fn regression_a_sync_beside_a_sync_or_a_write_counts_only_what_was_written() {
    let piece = |offset, byte| Change::Write(vec![(offset, vec![byte; 600])]);
    let survives = |host: &Host, expected: &[u8]| {
        for seed in 0..20 {
            let disk = host.disk.fork();
            disk.power_loss(seed);
            let other = Host::open(disk, "b", 0).expect("a host");
            assert!(other.read().expect("read") == expected, "seed {seed}");
        }
    };
    let sync = |host: &Host| host.container.sync(&host.disk);

    let host = World::new(0).host("a");
    host.apply(&piece(0, 1)).expect("a change");
    let hang = host.disk.hang("sync");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| sync(&host));
        hang.await_call();
        sync(&host).expect("sync");
        survives(&host, &[1; 600]);
        hang.release();
        first.join().expect("no panic").expect("sync");
    });

    let host = World::new(0).host("a");
    host.apply(&piece(0, 1)).expect("a change");
    let hang = host.disk.hang("write_at");
    std::thread::scope(|scope| {
        let write = scope.spawn(|| host.apply(&piece(600, 2)));
        hang.await_call();
        sync(&host).expect("sync");
        hang.release();
        write.join().expect("no panic").expect("a change");
    });
    sync(&host).expect("sync");
    survives(&host, &[[1; 600], [2; 600]].concat());
}

/// A sync makes calls only if bytes were written since the last one.
#[test]
fn a_sync_of_nothing_syncs_nothing() {
    let host = World::new(0).host("a");
    let write = Change::Write(vec![(0, vec![1; 600])]);
    let count_syncs = || {
        let count = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&count);
        host.disk.set_plan(move |call, _| {
            counted.fetch_add(u64::from(call.starts_with("sync")), Ordering::Relaxed);
            None
        });
        host.container.sync(&host.disk).expect("sync");
        host.disk.clear_plan();
        count.load(Ordering::Relaxed)
    };
    assert_eq!(count_syncs(), 0);
    for (written, syncs) in [(true, 3), (false, 0), (true, 2), (false, 0), (false, 0)] {
        if written {
            host.apply(&write).expect("a change");
        }
        assert_eq!(count_syncs(), syncs);
    }
}

/// After a power loss all synced bytes are there. Bytes that were not synced are as written, missing or an error, and
/// never other bytes.
#[test]
fn without_power_no_byte_is_wrong() {
    let mut lost = 0;
    let mut unreadable = 0;
    for seed in 0..SEEDS {
        let mut random = StdRng::seed_from_u64(seed);
        let world = World::new(0);
        let host = world.host("a");
        let mut synced = Vec::new();
        for _ in 0..random.random_range(0..4) {
            let change = Change::random(&mut random);
            host.apply(&change).expect("a change");
            change.apply(&mut synced);
        }
        host.container.sync(&host.disk).expect("sync");
        let mut states = vec![synced];
        for _ in 0..random.random_range(1..4) {
            let change = Change::random(&mut random);
            host.apply(&change).expect("a change");
            let mut next = states.last().expect("one").clone();
            change.apply(&mut next);
            states.push(next);
        }
        world.disk.power_loss(seed);
        match world.host("b").read() {
            Ok(found) => {
                assert!(states.contains(&found), "seed {seed}");
                lost += u32::from(found != *states.last().expect("one"));
            }
            Err(error) => {
                assert_eq!(error, Errno::IO, "seed {seed}");
                unreadable += 1;
            }
        }
    }
    assert!(
        lost > 0 && unreadable > 0,
        "{lost} {unreadable}: this test must lose something"
    );
}

/// Indexes are sorted in parts, and parts are merged, with cuts and zeros between. All hosts read the same bytes: also
/// a host that finds the whole index sorted, and one that finds a table damaged or cut off.
#[test]
fn sorted_indexes_say_what_unsorted_ones_do() {
    for seed in 0..8 {
        let mut random = StdRng::seed_from_u64(seed);
        let world = World::new(random.random_range(0..FILE_BYTES));
        let hosts: Vec<Host> = ["a", "b", "c"].map(|name| world.host(name)).into();
        let mut expected = world.base.clone();
        for step in 0..400 {
            let host = &hosts[random.random_range(0..hosts.len())];
            host.container
                .refresh_and_raise_epoch(&host.disk)
                .expect("look");
            let change = Change::random(&mut random);
            host.apply(&change).expect("a change");
            change.apply(&mut expected);
            if random.random_ratio(1, 40) {
                host.container.finish_own_index(&host.disk);
            }
            if step % 20 == 0 {
                let reader = &hosts[random.random_range(0..hosts.len())];
                assert!(reader.read().expect("read") == expected, "seed {seed}");
            }
        }
        for host in &hosts {
            host.container.finish_own_index(&host.disk);
        }
        assert!(
            world.host("d").read().expect("read") == expected,
            "seed {seed}"
        );
        let tables = names_in_container(&world.disk, "t-");
        assert!(tables.len() > 25, "seed {seed}: {} are few", tables.len());
        for name in tables {
            if random.random_ratio(1, 2) {
                damage(&world.disk, &name, &mut random);
            }
        }
        assert!(
            world.host("d").read().expect("read") == expected,
            "seed {seed}: damaged"
        );
        assert!(hosts[0].read().expect("read") == expected, "seed {seed}");
        assert_eq!(world.host("e").flatten(), Ok(true), "seed {seed}");
        assert!(plain_bytes(&world.disk) == expected, "seed {seed}: flat");
    }
}

fn names_in_container(disk: &SimBacking, prefix: &str) -> Vec<String> {
    let (dir, _) = disk
        .lookup(&disk.root(), OsStr::new("logs"))
        .expect("lookup");
    let listed = own::list(disk, &dir).expect("list");
    let names = listed.into_iter();
    names
        .map(|(name, ..)| String::from_utf8(name).expect("a name"))
        .filter(|name| name.starts_with(prefix))
        .collect()
}

/// Changes a byte of a file in the container, or cuts the file off.
fn damage(disk: &SimBacking, name: &str, random: &mut StdRng) {
    let (dir, _) = disk
        .lookup(&disk.root(), OsStr::new("logs"))
        .expect("lookup");
    let (inode, attr) = disk.lookup(&dir, OsStr::new(name)).expect("lookup");
    let file = disk.open(&inode, Access::ReadWrite).expect("open");
    let at = random.random_range(0..attr.size);
    if random.random_ratio(1, 4) {
        return disk.set_len(&file, at).expect("cut");
    }
    let mut byte = [0];
    disk.read_at(&file, &mut byte, at).expect("read");
    byte[0] ^= 1 << random.random_range(0..8);
    disk.write_at(&file, &[IoSlice::new(&byte)], at)
        .expect("write");
}

/// A host that dies at any call of sorting does not change what other hosts read, and may continue in its next life.
#[test]
fn an_index_is_sorted_whichever_host_dies() {
    let mut random = StdRng::seed_from_u64(1);
    let changes: Vec<Change> = (0..40).map(|_| Change::random(&mut random)).collect();
    for step in 1.. {
        let world = World::new(100);
        let host = world.host("a");
        let mut expected = world.base.clone();
        for change in &changes {
            host.apply(change).expect("a change");
            change.apply(&mut expected);
        }
        host.container.sync(&host.disk).expect("sync");
        host.disk.crash_at(host.disk.steps() + step);
        host.container.finish_own_index(&host.disk);
        let is_over = !host.disk.is_dead();
        if step % 2 == 0 {
            host.disk.begin_new_process();
            world.disk.power_loss(step);
        }
        let found = world.host("b").read().expect("read");
        assert!(found == expected, "step {step}");
        if is_over {
            break;
        }
    }
}

/// While one thread applies the seal, another thread reads the same bytes.
#[test]
fn bytes_are_the_same_while_the_container_is_sealed() {
    let (first, expected) = written_world(&mut StdRng::seed_from_u64(3));
    drop(first);
    for step in 1.. {
        let (world, _) = written_world(&mut StdRng::seed_from_u64(3));
        let host = world.host("a");
        host.apply(&Change::Write(vec![(0, expected[..10].to_vec())]))
            .expect("write");
        let hang = host.disk.hang_at(host.disk.steps() + step);
        let is_over = std::thread::scope(|scope| {
            let sealing = scope.spawn(|| host.flatten());
            while !hang.is_reached() && !sealing.is_finished() {
                std::thread::yield_now();
            }
            let is_over = sealing.is_finished();
            let hang = (!is_over).then_some(hang);
            let found = host.read_known().expect("read");
            assert!(found == expected, "step {step}");
            drop(hang);
            assert_eq!(sealing.join().expect("no panic"), Ok(true));
            is_over
        });
        if is_over {
            break;
        }
    }
}

/// Makes a file that two hosts wrote. Returns it with its bytes.
fn written_world(random: &mut StdRng) -> (World, Vec<u8>) {
    let world = World::new(random.random_range(0..FILE_BYTES));
    let mut expected = world.base.clone();
    let hosts: Vec<Host> = ["a", "b"].map(|name| world.host(name)).into();
    for _ in 0..random.random_range(1..8) {
        let host = &hosts[random.random_range(0..hosts.len())];
        host.container
            .refresh_and_raise_epoch(&host.disk)
            .expect("look");
        let change = Change::random(random);
        host.apply(&change).expect("a change");
        change.apply(&mut expected);
        host.container.sync(&host.disk).expect("sync");
    }
    (world, expected)
}

fn plain_bytes(disk: &SimBacking) -> Vec<u8> {
    let (inode, attr) = disk
        .lookup(&disk.root(), OsStr::new("file"))
        .expect("lookup");
    let file = disk.open(&inode, Access::Read).expect("open");
    let mut bytes = vec![0; attr.size as usize];
    let count = disk.read_at(&file, &mut bytes, 0).expect("read");
    bytes.truncate(count);
    bytes
}

/// A flat file has the bytes of all logs. A host that dies at any call, or a power loss, leaves a state from which
/// other hosts continue. Readers see the same bytes at each moment.
#[test]
fn a_file_is_flattened_whichever_host_dies() {
    for seed in 0..12 {
        let (first, expected) = written_world(&mut StdRng::seed_from_u64(seed));
        drop(first);
        for step in 1.. {
            let (world, _) = written_world(&mut StdRng::seed_from_u64(seed));
            let host = world.host("a");
            host.disk.crash_at(host.disk.steps() + step);
            let outcome = host.flatten();
            let is_over = !host.disk.is_dead();
            if is_over {
                assert_eq!(outcome, Ok(true), "seed {seed}");
            } else {
                host.disk.begin_new_process();
                if step % 3 == 0 {
                    world.disk.power_loss(step);
                }
            }
            let reader = world.host("c");
            let is_flat = reader.ending().expect("look").expect("there").is_flat();
            let found = if is_flat.expect("look") {
                plain_bytes(&world.disk)
            } else {
                reader.read().expect("read")
            };
            assert!(found == expected, "seed {seed}, step {step}: read");

            let other = world.host("b");
            assert_eq!(other.flatten(), Ok(true), "seed {seed}, step {step}");
            let found = plain_bytes(&world.disk);
            assert!(found == expected, "seed {seed}, step {step}: flat");
            let ending = other.ending().expect("look").expect("there");
            ending.remove().expect("remove");
            assert!(other.ending().expect("look").is_none());
            if is_over {
                break;
            }
        }
    }
}

/// Proves S-log-34.
///
/// A container with a live writer is not sealed, and one whose writer died is. A container that is ending accepts no
/// new writers.
#[test]
fn a_container_ends_with_its_last_writer() {
    let world = World::new(0);
    let a = world.host("a");
    let b = world.host("b");
    let ending = |host: &Host| host.flatten().expect("flatten");
    assert!(
        a.ending()
            .expect("look")
            .expect("there")
            .begin_writing()
            .expect("begin")
    );
    a.apply(&Change::Write(vec![(0, b"from a".to_vec())]))
        .expect("write");
    assert!(!ending(&b), "a writes");
    a.ending()
        .expect("look")
        .expect("there")
        .end_writing()
        .expect("end");
    let dead = world.host("dead");
    assert!(
        dead.ending()
            .expect("look")
            .expect("there")
            .begin_writing()
            .expect("begin")
    );
    assert!(ending(&b), "no living host writes");
    assert!(
        !a.ending()
            .expect("look")
            .expect("there")
            .begin_writing()
            .expect("begin")
    );
    assert_eq!(plain_bytes(&world.disk), b"from a");
    // A host that was wrongly taken for dead notices the seal at its next write.
    let late = dead.apply(&Change::Write(vec![(0, b"late".to_vec())]));
    assert_eq!(late, Err(ChangeError::Sealed));
}
