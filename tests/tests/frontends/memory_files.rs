//! Memory files: large held files that the kernel reads by itself, and what those see who have one open while it changes.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use firn_tests::command::{run, wait_until};
use firn_tests::fsops::{Mapping, assert_same_bytes, open_rw, read, read_at};
use firn_tests::preloaded::Frontend;
use firn_tests::random::{bytes, generator, seed};
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
    sandbox
        .run([
            "drain".as_ref(),
            "--wait".as_ref(),
            mount.path().as_os_str(),
        ])
        .ok();
    assert_same_bytes("drained", &read(&path), &data);
    drop((mapping, file));
    let drained = mount.backing().join("held");
    mount.umount();
    assert_same_bytes("in the backing", &read(&drained), &data);
}

/// Proves S-memory-2: through read(2), a mapping and a second opener, whoever writes and cuts.
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
    let drain = || {
        let at = mount.path().as_os_str();
        sandbox.run(["drain".as_ref(), "--wait".as_ref(), at]).ok();
    };
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
        assert_same_bytes("in the backing", &read(&mount.backing().join("held")), &expected);
    }
    mount.umount();
}
