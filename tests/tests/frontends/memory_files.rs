//! Memory files: large held files that the kernel reads by itself, and what their readers see
//! while they change.
//!
//! `FIRN_CRASH_ROUNDS` sets the rounds of kill -9, `FIRN_SEED` the seed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::unix::fs::{FileExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use firn_tests::command::{run, wait_until};
use firn_tests::fsops::{Mapping, assert_same_bytes, open_rw, read, read_at};
use firn_tests::preloaded::Frontend;
use firn_tests::random::{bytes, env_count, generator, seed};
use firn_tests::{FirnMount, Sandbox};
use rand::RngExt;
use rustix::mm::MapFlags;

const MIB: usize = 1 << 20;
const OPTIONS: &str =
    "arena-size=64M,chunk-size=2M,drain=demand,close=held,fsync=held,memory-files=1M";
/// Beyond what any of these waits takes.
const PATIENCE: Duration = Duration::from_secs(30);

/// Writes a file, and returns once all of it is in a memory file.
fn write_and_settle(mount: &FirnMount, path: &Path, data: &[u8]) {
    let before = mount.status().settled_bytes;
    fs::write(path, data).expect("write");
    wait_until("the file is settled", PATIENCE, || {
        mount.status().settled_bytes >= before + data.len() as u64
    });
}

fn drain(sandbox: &Sandbox, mount: &FirnMount) {
    let at = mount.path().as_os_str();
    sandbox.run(["drain".as_ref(), "--wait".as_ref(), at]).ok();
}

/// Whether the kernel of this machine reads memory files by itself; else firnd reads them for it.
fn is_passed_through(mount: &FirnMount, path: &Path) -> bool {
    let before = mount.status().read_bytes;
    read(path);
    mount.status().read_bytes == before
}

/// Proves S-memory-1.
#[test]
fn a_settled_file_reads_the_same_by_every_way_and_counts_once() {
    let sandbox = Sandbox::new("memread");
    let mount = FirnMount::new(&sandbox, OPTIONS);
    let path = mount.join("held");
    let data = bytes(1, 9 * MIB + 777);
    write_and_settle(&mount, &path, &data);
    assert_same_bytes("read", &read(&path), &data);
    let file = File::open(&path).expect("open");
    let mapping = Mapping::new(&file, data.len(), MapFlags::PRIVATE).expect("mmap");
    assert_same_bytes("by a mapping", &mapping.read(0, data.len()), &data);
    assert_eq!(file.metadata().expect("stat").len(), data.len() as u64);
    assert_eq!(
        read_at(&file, data.len() as u64 - 3, 3),
        data[data.len() - 3..]
    );
    let mut cmp = Command::new("cmp");
    let copy = sandbox.join("copy");
    fs::write(&copy, &data).expect("write");
    cmp.args([&path, &copy]);
    run(Frontend::Mount.preload(&sandbox, &mut cmp)).ok();
    let status = mount.status();
    assert_eq!(status.memory_file_bytes, 10 * MIB as u64, "five chunks");
    assert!(
        status.arena_used_bytes <= 12 * MIB as u64,
        "{} used",
        status.arena_used_bytes
    );
    drain(&sandbox, &mount);
    assert_same_bytes("drained", &read(&path), &data);
    drop((mapping, file));
    let drained = mount.backing().join("held");
    mount.umount();
    assert_same_bytes("in the backing", &read(&drained), &data);
}

/// Proves S-memory-2: through read(2), a mapping and a second opener, beside writes and truncations.
#[test]
fn every_reader_of_a_memory_file_sees_the_changes_before_it() {
    let seed = seed("every_reader_of_a_memory_file_sees_the_changes_before_it");
    let mut random = generator(seed);
    let sandbox = Sandbox::new("memcoherent");
    let mount = FirnMount::new(&sandbox, OPTIONS);
    let path = mount.join("held");
    let mut expected = bytes(2, 3 * MIB);
    write_and_settle(&mount, &path, &expected);
    println!("passed through: {}", is_passed_through(&mount, &path));
    let reader = File::open(&path).expect("open");
    let mapping = Mapping::new(&reader, MIB, MapFlags::PRIVATE).expect("mmap");
    let mut writer = None;
    for round in 0..300u64 {
        if round % 10 == 0 {
            assert_same_bytes("all of it", &read_at(&reader, 0, expected.len()), &expected);
        }
        if random.random_bool(0.3) {
            writer = None;
        }
        let writer = writer.get_or_insert_with(|| open_rw(&path));
        if random.random_bool(0.1) {
            let len = random.random_range(MIB..4 * MIB);
            writer.set_len(len as u64).expect("truncate");
            expected.resize(len, 0);
            assert_same_bytes(
                &format!("round {round}, {len} long"),
                &read(&path),
                &expected,
            );
            assert_eq!(reader.metadata().expect("stat").len(), len as u64);
            continue;
        }
        let offset = random.random_range(0..expected.len());
        let len = random.random_range(1..=20_000);
        let data = bytes(round, len);
        writer.write_all_at(&data, offset as u64).expect("write");
        expected.resize(expected.len().max(offset + len), 0);
        expected[offset..offset + len].copy_from_slice(&data);
        let what = format!("round {round}, {len} bytes at {offset}");
        assert_same_bytes(&what, &read_at(&reader, offset as u64, len), &data);
        if offset + len <= MIB {
            assert_same_bytes(&what, &mapping.read(offset, len), &data);
        }
        let second = File::open(&path).expect("open");
        assert_same_bytes(&what, &read_at(&second, offset as u64, len), &data);
    }
    drop((writer, mapping, reader));
    assert_same_bytes("opened anew", &read(&path), &expected);
    let drained = mount.backing().join("held");
    mount.umount();
    assert_same_bytes("in the backing", &read(&drained), &expected);
}

/// Proves S-memory-3.
#[test]
fn stores_to_a_mapping_beside_readers_are_taken_at_close_and_sync() {
    let sandbox = Sandbox::new("memstore");
    let mount = FirnMount::new(&sandbox, OPTIONS);
    let path = mount.join("held");
    let mut expected = bytes(3, 3 * MIB);
    write_and_settle(&mount, &path, &expected);
    let reader = File::open(&path).expect("open");
    for (round, syncs) in [(0u64, false), (1, true)] {
        let writer = open_rw(&path);
        let mapping = Mapping::new(&writer, expected.len(), MapFlags::SHARED).expect("mmap");
        let at = (round as usize + 1) * MIB - 5;
        mapping.write(at, b"stored by hand");
        expected[at..at + 14].copy_from_slice(b"stored by hand");
        if syncs {
            writer.sync_all().expect("fsync");
        } else {
            drop((mapping, writer));
        }
        assert_same_bytes("beside it", &read_at(&reader, 0, expected.len()), &expected);
    }
    drop(reader);
    wait_until("all are closed", PATIENCE, || {
        mount.status().open_files == 0
    });
    assert_same_bytes("opened anew", &read(&path), &expected);
    let drained = mount.backing().join("held");
    mount.umount();
    assert_same_bytes("in the backing", &read(&drained), &expected);
}

/// Proves S-memory-4.
#[test]
fn an_open_file_keeps_its_bytes_when_it_is_replaced_and_removed() {
    let sandbox = Sandbox::new("memremove");
    let mount = FirnMount::new(&sandbox, OPTIONS);
    let path = mount.join("held");
    let data = bytes(4, 4 * MIB);
    write_and_settle(&mount, &path, &data);
    let reader = File::open(&path).expect("open");
    let mapping = Mapping::new(&reader, data.len(), MapFlags::PRIVATE).expect("mmap");
    fs::hard_link(&path, mount.join("linked")).expect("a link");
    let next = mount.join("next");
    for round in 0..4u64 {
        write_and_settle(&mount, &next, &bytes(100 + round, 4 * MIB));
        fs::rename(&next, &path).expect("replaced");
        assert_same_bytes("replaced", &read(&path), &bytes(100 + round, 4 * MIB));
        assert_same_bytes("by its link", &read(&mount.join("linked")), &data);
    }
    fs::remove_file(mount.join("linked")).expect("removed");
    fs::remove_file(&path).expect("removed");
    for round in 0..4u64 {
        write_and_settle(&mount, &next, &bytes(200 + round, 4 * MIB));
    }
    assert_same_bytes("removed", &read_at(&reader, 0, data.len()), &data);
    assert_same_bytes("mapped", &mapping.read(0, data.len()), &data);
    drop((mapping, reader));
    mount.umount();
}

/// Proves S-memory-3: what the backing has already is written again.
#[test]
fn stores_to_a_mapping_of_a_drained_file_reach_the_backing() {
    let sandbox = Sandbox::new("memdrained");
    let mount = FirnMount::new(&sandbox, OPTIONS);
    let path = mount.join("held");
    let mut expected = bytes(5, 3 * MIB);
    write_and_settle(&mount, &path, &expected);
    let drain = || drain(&sandbox, &mount);
    for round in 0..4usize {
        if round % 2 == 0 {
            drain();
        }
        let reader = File::open(&path).expect("open");
        let writer = open_rw(&path);
        let mapping = Mapping::new(&writer, expected.len(), MapFlags::SHARED).expect("mmap");
        mapping.write(round * MIB / 2, b"before a drain");
        expected[round * MIB / 2..][..14].copy_from_slice(b"before a drain");
        if round > 1 {
            drain();
            mapping.write(round * MIB / 2 + 7, b"and after it");
            expected[round * MIB / 2 + 7..][..12].copy_from_slice(b"and after it");
        }
        drop((mapping, writer));
        assert_same_bytes("beside it", &read_at(&reader, 0, expected.len()), &expected);
        drop(reader);
        wait_until("all are closed", PATIENCE, || {
            mount.status().open_files == 0
        });
        drain();
        sandbox.run(["evict".as_ref(), path.as_os_str()]).ok();
        assert_same_bytes("pruned", &read(&path), &expected);
        assert_same_bytes(
            "in the backing",
            &read(&mount.backing().join("held")),
            &expected,
        );
    }
    mount.umount();
}

/// Proves S-memory-2, S-memory-3, S-crash-11: with firnd killed between the changes.
#[test]
fn readers_writers_and_mappings_of_a_memory_file_go_on_when_firnd_is_killed() {
    let seed = seed("readers_writers_and_mappings_of_a_memory_file_go_on_when_firnd_is_killed");
    let mut random = generator(seed);
    let sandbox = Sandbox::new("memgoon");
    let mut mount = FirnMount::new(&sandbox, &format!("{OPTIONS},takeover=auto"));
    for life in 0..env_count("FIRN_CRASH_ROUNDS", 4) {
        let path = mount.join(format!("held{life}"));
        let mut expected = bytes(life, 4 * MIB + 333);
        write_and_settle(&mount, &path, &expected);
        let reader = File::open(&path).expect("open");
        let seen = Mapping::new(&reader, expected.len(), MapFlags::PRIVATE).expect("mmap");
        let writer = open_rw(&path);
        let stored = Mapping::new(&writer, expected.len(), MapFlags::SHARED).expect("mmap");
        for round in 0..12u64 {
            let what = format!("life {life}, round {round}");
            let at = random.random_range(0..expected.len() - 5000);
            let data = bytes(random.random(), random.random_range(1..5000));
            match random.random_range(0..4) {
                0 => {
                    mount.kill_and_go_on();
                }
                1 => {
                    writer.write_all_at(&data, at as u64).expect("write");
                    expected[at..at + data.len()].copy_from_slice(&data);
                }
                2 => {
                    stored.write(at, &data);
                    expected[at..at + data.len()].copy_from_slice(&data);
                    if random.random_bool(0.3) {
                        writer.sync_all().expect("fsync");
                    }
                }
                _ => drain(&sandbox, &mount),
            }
            assert_same_bytes(&what, &read_at(&reader, 0, expected.len()), &expected);
            assert_same_bytes(&what, &seen.read(0, expected.len()), &expected);
            let end = read_at(&reader, expected.len() as u64 - 1, 1);
            assert_eq!(end, expected[expected.len() - 1..], "{what}");
            let beyond = reader.read_at(&mut [0; 1], expected.len() as u64);
            assert_eq!(beyond.expect("read"), 0, "{what}: it ends where it ended");
        }
        drop((stored, writer, seen, reader));
        assert_eq!(mount.status().lost_open_files, 0);
        wait_until("all are closed", PATIENCE, || {
            mount.status().open_files == 0
        });
        assert_same_bytes("opened anew", &read(&path), &expected);
        drain(&sandbox, &mount);
        let drained = mount.backing().join(format!("held{life}"));
        assert_same_bytes("in the backing", &read(&drained), &expected);
    }
    mount.umount();
    assert_eq!(memory_files(&sandbox), [] as [PathBuf; 0]);
}

/// Files of a mount, and what each of them has to hold.
type Expected = BTreeMap<String, Vec<u8>>;

/// Changes one of four files, as checkpoints and the programs around them do.
fn change_a_file(mount: &FirnMount, expected: &mut Expected, random: &mut impl RngExt) {
    let name = format!("rank{}", random.random_range(0..4));
    let path = mount.join(&name);
    let Some(data) = expected.get_mut(&name).filter(|_| random.random_bool(0.5)) else {
        let data = bytes(random.random(), random.random_range(MIB / 2..7 * MIB));
        let partial = mount.join("partial");
        fs::write(&partial, &data).expect("write");
        fs::rename(&partial, &path).expect("rename");
        expected.insert(name, data);
        return;
    };
    let file = open_rw(&path);
    if random.random_bool(0.3) {
        let len = random.random_range(1..data.len() + MIB);
        file.set_len(len as u64).expect("truncate");
        data.resize(len, 0);
        return;
    }
    let patch = bytes(random.random(), random.random_range(1..300_000));
    let offset = random.random_range(0..=data.len());
    file.write_all_at(&patch, offset as u64).expect("write");
    data.resize(data.len().max(offset + patch.len()), 0);
    data[offset..offset + patch.len()].copy_from_slice(&patch);
}

fn assert_files(what: &str, dir: &Path, expected: &Expected) {
    for (name, data) in expected {
        assert_same_bytes(&format!("{what}: {name}"), &read(&dir.join(name)), data);
    }
}

/// The memory files of the sandbox's only arena.
fn memory_files(sandbox: &Sandbox) -> Vec<PathBuf> {
    let entries = fs::read_dir(sandbox.runtime()).expect("the runtime directory");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let is_one = |path: &PathBuf| path.to_string_lossy().contains(".arena.m");
    paths.filter(is_one).collect()
}

/// Proves S-memory-1, S-write-1: at any moment of settling, with readers of memory files beside.
#[test]
fn what_returned_survives_kill_9_while_files_settle() {
    let seed = seed("what_returned_survives_kill_9_while_files_settle");
    let mut settled_bytes = 0;
    for round in 0..env_count("FIRN_CRASH_ROUNDS", 5) {
        let mut random = generator(seed.wrapping_add(round));
        let sandbox = Sandbox::new("memkill");
        let mut expected = Expected::new();
        // Twice: what an attach settles is killed as well.
        for life in 0..2 {
            let mount = FirnMount::new(&sandbox, OPTIONS);
            let mut readers = Vec::new();
            for _ in 0..random.random_range(2..8) {
                change_a_file(&mount, &mut expected, &mut random);
                if random.random_bool(0.4) {
                    let (name, data) = expected.iter().next().expect("one");
                    let file = File::open(mount.join(name)).expect("open");
                    let mapping = Mapping::new(&file, data.len(), MapFlags::PRIVATE);
                    readers.push((mapping.expect("mmap"), file));
                }
            }
            let moment = Duration::from_micros(random.random_range(0..60_000));
            // The random moment is the point of the test, not a wait for a condition.
            std::thread::sleep(moment);
            settled_bytes += mount.status().settled_bytes;
            println!("round {round}, life {life}: killed after {moment:?}");
            mount.kill();
        }
        let mount = FirnMount::new(&sandbox, OPTIONS);
        assert_files("attached", mount.path(), &expected);
        change_a_file(&mount, &mut expected, &mut random);
        assert_files("changed", mount.path(), &expected);
        let backing = mount.umount();
        assert_files("in the backing", &backing, &expected);
        assert_eq!(memory_files(&sandbox), [] as [PathBuf; 0], "round {round}");
    }
    println!("{settled_bytes} bytes were settled by firnd that were killed");
    assert!(settled_bytes > 0, "no round killed a firnd that settled");
}

/// Proves S-memory-1: the record of what was cut off does not make the memory file a damaged one.
#[test]
fn regression_a_file_that_is_cut_and_read_survives_kill_9() {
    let sandbox = Sandbox::new("memcut");
    let mount = FirnMount::new(&sandbox, OPTIONS);
    let (path, viewed) = (mount.join("held"), mount.join("viewed"));
    let mut data = bytes(9, 4 * MIB - 1000);
    write_and_settle(&mount, &path, &data);
    write_and_settle(&mount, &viewed, &data);
    let reader = File::open(&viewed).expect("open");
    data.truncate(2 * MIB + MIB / 3);
    for path in [&path, &viewed] {
        open_rw(path).set_len(data.len() as u64).expect("cut");
        assert_same_bytes("cut", &read(path), &data);
    }
    mount.kill();
    drop(reader);
    let mount = FirnMount::new(&sandbox, OPTIONS);
    assert_same_bytes("attached", &read(&path), &data);
    assert_same_bytes("attached", &read(&viewed), &data);
    let backing = mount.umount();
    assert_same_bytes("in the backing", &read(&backing.join("held")), &data);
}

/// How a memory file is spoiled between two mounts.
#[derive(Clone, Copy, Debug)]
enum Spoiled {
    Removed,
    Cut,
    OfAnotherUser,
    OpenToAll,
    AnotherFile,
}

impl Spoiled {
    fn spoil(self, path: &Path) {
        match self {
            Self::Removed => fs::remove_file(path).expect("removed"),
            Self::Cut => open_rw(path).set_len(MIB as u64).expect("cut"),
            Self::OfAnotherUser => chown(path, Some(65534), None).expect("chown"),
            Self::OpenToAll => {
                fs::set_permissions(path, fs::Permissions::from_mode(0o666)).expect("chmod");
            }
            Self::AnotherFile => {
                fs::remove_file(path).expect("removed");
                std::os::unix::fs::symlink("/etc/passwd", path).expect("a link");
            }
        }
    }
}

/// Proves S-memory-1: what cannot be believed is told and not read, and everything else is there.
#[test]
fn a_spoiled_memory_file_is_told_and_the_other_files_are_whole() {
    use Spoiled::{AnotherFile, Cut, OfAnotherUser, OpenToAll, Removed};
    for how in [Removed, Cut, OfAnotherUser, OpenToAll, AnotherFile] {
        let sandbox = Sandbox::new("memspoil");
        let mount = FirnMount::new(&sandbox, OPTIONS);
        let (lost, whole) = (bytes(6, 4 * MIB), bytes(7, 4 * MIB));
        write_and_settle(&mount, &mount.join("lost"), &lost);
        let of_lost = memory_files(&sandbox);
        assert_eq!(of_lost.len(), 1, "{how:?}");
        write_and_settle(&mount, &mount.join("whole"), &whole);
        mount.kill();
        how.spoil(&of_lost[0]);
        let mount = FirnMount::new(&sandbox, OPTIONS);
        let error = fs::read(mount.join("lost")).expect_err("bytes that nobody has");
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "{how:?}");
        assert_same_bytes(&format!("{how:?}"), &read(&mount.join("whole")), &whole);
        assert!(
            sandbox.logs().contains("memory file"),
            "{how:?}: the log names what is lost"
        );
        // New bytes take the place of the lost ones.
        fs::write(mount.join("lost"), &lost).expect("write");
        assert_same_bytes("written anew", &read(&mount.join("lost")), &lost);
        let backing = mount.umount();
        assert_same_bytes("in the backing", &read(&backing.join("whole")), &whole);
        assert_same_bytes("in the backing", &read(&backing.join("lost")), &lost);
    }
}

/// Proves S-memory-1: without memory beside the arena files stay where they are, and settle once there is some.
#[test]
fn a_full_tmpfs_keeps_files_where_they_are() {
    let sandbox = Sandbox::new("memfull");
    let tmpfs = sandbox.mkdir("tmpfs");
    let mut mount_tmpfs = Command::new("mount");
    mount_tmpfs.args(["-t", "tmpfs", "-o", "size=48M,mode=0700", "firn-test"]);
    run(mount_tmpfs.arg(&tmpfs)).ok();
    let options = format!(
        "arena-size=32M,chunk-size=1M,drain=demand,close=held,fsync=held,memory-files=1M,arena-dir={}",
        tmpfs.display()
    );
    let mount = FirnMount::new(&sandbox, &options);
    let filler = tmpfs.join("filler");
    let room = rustix::fs::statvfs(&tmpfs).expect("statvfs");
    let filled = fs::write(&filler, vec![1; (room.f_bavail * room.f_frsize) as usize]);
    println!("filled: {filled:?}");
    let path = mount.join("held");
    let mut expected = bytes(8, 6 * MIB);
    for round in 0..3u64 {
        fs::write(&path, &expected).expect("write");
        assert_same_bytes("full", &read(&path), &expected);
        let file = open_rw(&path);
        file.write_all_at(&bytes(round, 5000), 3 * MIB as u64)
            .expect("write");
        expected[3 * MIB..][..5000].copy_from_slice(&bytes(round, 5000));
        assert_same_bytes("changed", &read(&path), &expected);
    }
    fs::remove_file(&filler).expect("room again");
    wait_until("it is settled", PATIENCE, || {
        assert_same_bytes("in between", &read(&path), &expected);
        mount.status().settled_bytes >= expected.len() as u64
    });
    assert_same_bytes("settled", &read(&path), &expected);
    let backing = mount.umount();
    assert_same_bytes("in the backing", &read(&backing.join("held")), &expected);
}

/// A program under the preload library that maps a file for reading, and says what it sees.
struct Mapper {
    child: Child,
    answers: Lines<BufReader<ChildStdout>>,
}

const MAPPER: &str = "
import mmap, os, sys, zlib
file = os.open(sys.argv[1], os.O_RDONLY)
if sys.argv[2] == 'child' and os.fork(): os.wait(); os._exit(0)
mapped = mmap.mmap(file, 0, int(sys.argv[3]), mmap.PROT_READ)
os.close(file)
def memory_file(): return any('.arena.m' in line for line in open('/proc/self/maps'))
print(memory_file(), flush=True)
for line in sys.stdin:
    if line == 'sum\\n': print(zlib.crc32(mapped), flush=True)
    elif line == 'unmap\\n': mapped.close(); print(memory_file(), flush=True)
";

impl Mapper {
    /// Whether it maps the memory file is its first answer.
    fn start(sandbox: &Sandbox, path: &Path, who: &str, flags: i32) -> Self {
        let mut python = Command::new("/usr/bin/python3");
        python.args(["-c", MAPPER]).arg(path);
        python.args([who, &flags.to_string()]);
        let mut child = Frontend::Mount
            .preload(sandbox, &mut python)
            .env_remove("FIRN_PRELOAD_REPORT")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python");
        let out = child.stdout.take().expect("its output");
        let answers = BufReader::new(out).lines();
        Self { child, answers }
    }

    fn answer(&mut self) -> String {
        let answer = self.answers.next().expect("it lives");
        answer.expect("an answer")
    }

    fn ask(&mut self, question: &str) -> String {
        let stdin = self.child.stdin.as_mut().expect("its input");
        writeln!(stdin, "{question}").expect("it lives");
        self.answer()
    }

    fn end(mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().expect("it ends").success());
    }
}

/// Proves S-memory-5, S-memory-2, S-crash-11: without passthrough, as for a user without root.
#[test]
fn a_mapping_of_the_preload_library_is_the_memory_file_and_shows_each_change() {
    let seed = seed("a_mapping_of_the_preload_library_is_the_memory_file_and_shows_each_change");
    let mut random = generator(seed);
    let sandbox = Sandbox::new("memmap");
    let options = format!("{OPTIONS},passthrough=off,takeover=auto");
    let mut mount = FirnMount::new(&sandbox, &options);
    let path = mount.join("held");
    let mut expected = bytes(11, 4 * MIB + 77);
    write_and_settle(&mount, &path, &expected);
    let mut mappers = [
        Mapper::start(&sandbox, &path, "parent", libc::MAP_SHARED),
        Mapper::start(&sandbox, &path, "child", libc::MAP_SHARED),
        Mapper::start(&sandbox, &path, "parent", libc::MAP_PRIVATE),
    ];
    for mapper in &mut mappers {
        assert_eq!(mapper.answer(), "True", "it maps the memory file");
    }
    for round in 0..30u64 {
        match random.random_range(0..4) {
            0 => {
                mount.kill_and_go_on();
            }
            1 => drain(&sandbox, &mount),
            _ => {
                let at = random.random_range(0..expected.len() - 9000);
                let data = bytes(round, random.random_range(1..9000));
                let writer = open_rw(&path);
                writer.write_all_at(&data, at as u64).expect("write");
                expected[at..at + data.len()].copy_from_slice(&data);
            }
        }
        for (which, mapper) in mappers.iter_mut().enumerate() {
            let sum = crc32(&expected);
            assert_eq!(mapper.ask("sum"), sum, "round {round}, mapper {which}");
        }
        assert_same_bytes("by read", &read(&path), &expected);
    }
    assert_eq!(
        mount.status().open_files,
        3,
        "they are open while they are mapped"
    );
    for mut mapper in mappers {
        assert_eq!(mapper.ask("unmap"), "False");
        mapper.end();
    }
    wait_until("all are closed", PATIENCE, || {
        mount.status().open_files == 0
    });
    assert_eq!(mount.status().lost_open_files, 0);
    let backing = mount.umount();
    assert_same_bytes("in the backing", &read(&backing.join("held")), &expected);
    assert_eq!(memory_files(&sandbox), [] as [PathBuf; 0]);
}

/// zlib's checksum, in decimal digits.
fn crc32(bytes: &[u8]) -> String {
    let mut command = Command::new("/usr/bin/python3");
    command.args([
        "-c",
        "import sys, zlib; print(zlib.crc32(sys.stdin.buffer.read()))",
    ]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python");
    let mut stdin = child.stdin.take().expect("its input");
    stdin.write_all(bytes).expect("written");
    drop(stdin);
    let out = child.wait_with_output().expect("it ends").stdout;
    String::from_utf8(out).expect("digits").trim().to_owned()
}
