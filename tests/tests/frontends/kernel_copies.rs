//! Held files that the kernel caches: read by firnd once, right after every change, bounded, and dropped when drained.

use std::ffi::OsStr;
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
const HELD: &str = "arena-size=64M,chunk-size=1M,drain=demand,close=held,fsync=held";
const OPTIONS: &str =
    "arena-size=64M,chunk-size=1M,drain=demand,close=held,fsync=held,kernel-copies=100";

/// `firn drain --wait`, then `firn evict`: the arena has nothing of the files any more.
fn drain_and_evict(sandbox: &Sandbox, path: &Path) {
    sandbox
        .run([OsStr::new("drain"), OsStr::new("--wait"), path.as_os_str()])
        .ok();
    sandbox.run([OsStr::new("evict"), path.as_os_str()]).ok();
}

/// Writes a file, and returns once firnd knows that it is closed: the kernel's RELEASE may come after close(2)
/// returned, and the kernel caches no held file that is open for writing.
fn write_and_close(mount: &FirnMount, path: &Path, data: &[u8]) {
    fs::write(path, data).expect("write");
    wait_until("the writer is gone", Duration::from_secs(10), || {
        mount.status().open_files == 0
    });
}

/// Proves S-read-3. The kernel may reclaim pages at any time (and does where DAMON looks for cold ones), so what is read
/// of firnd again is bounded by half of the file, of the six times that it is read here.
#[test]
fn a_held_file_is_read_by_firnd_once_and_then_by_the_kernel() {
    let sandbox = Sandbox::new("copyonce");
    let mount = FirnMount::new(&sandbox, OPTIONS);
    let path = mount.join("held");
    let data = bytes(1, 8 * MIB);
    write_and_close(&mount, &path, &data);
    assert_same_bytes("the first time", &read(&path), &data);
    let served = mount.status().read_bytes;
    assert!(served >= data.len() as u64, "firnd gave {served} bytes");
    for round in 0..3 {
        assert_same_bytes("again", &read(&path), &data);
        let file = File::open(&path).expect("open");
        let mapping = Mapping::new(&file, data.len(), MapFlags::PRIVATE).expect("mmap");
        assert_same_bytes("by a mapping", &mapping.read(0, data.len()), &data);
        let again = mount.status().read_bytes - served;
        assert!(
            again < data.len() as u64 / 2,
            "round {round}: {again} bytes"
        );
    }
    assert_eq!(mount.status().kernel_copies_bytes, data.len() as u64);
    mount.umount();
}

/// Proves S-write-2, S-read-3: through read(2), a mapping and a second opener, for writes by any of them.
#[test]
fn every_read_of_a_cached_held_file_sees_the_writes_before_it() {
    let seed = seed("every_read_of_a_cached_held_file_sees_the_writes_before_it");
    let mut random = generator(seed);
    let sandbox = Sandbox::new("copycoherent");
    let mount = FirnMount::new(&sandbox, OPTIONS);
    let path = mount.join("held");
    let mut expected = bytes(2, 2 * MIB);
    fs::write(&path, &expected).expect("write");
    let reader = File::open(&path).expect("open");
    let mapping = Mapping::new(&reader, 2 * MIB, MapFlags::PRIVATE).expect("mmap");
    let mut writer = None;
    for round in 0..300u64 {
        // All of it is in the kernel's cache.
        if round % 10 == 0 {
            assert_same_bytes("all of it", &read(&path), &expected);
        }
        if random.random_bool(0.3) {
            writer = None;
        }
        let writer = writer.get_or_insert_with(|| open_rw(&path));
        let offset = random.random_range(0..expected.len() - 1);
        let len = random.random_range(1..=(expected.len() - offset).min(20_000));
        let data = bytes(round, len);
        writer.write_all_at(&data, offset as u64).expect("write");
        expected[offset..offset + len].copy_from_slice(&data);
        let what = format!("round {round}, {len} bytes at {offset}");
        assert_same_bytes(&what, &read_at(&reader, offset as u64, len), &data);
        assert_same_bytes(&what, &mapping.read(offset, len), &data);
        let second = File::open(&path).expect("open");
        assert_same_bytes(&what, &read_at(&second, offset as u64, len), &data);
    }
    drop(writer);
    // Lengths too.
    fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|file| file.set_len(MIB as u64 + 5))
        .expect("truncate");
    expected.truncate(MIB + 5);
    assert_same_bytes("cut", &read(&path), &expected);
    open_rw(&path)
        .write_all_at(b"appended", expected.len() as u64)
        .expect("write");
    expected.extend_from_slice(b"appended");
    assert_same_bytes("longer", &read(&path), &expected);
    drop((mapping, reader));
    mount.umount();
}

/// Proves S-write-2, S-direct-3: what a process writes by direct access.
#[test]
fn a_read_sees_what_was_written_by_direct_access_after_the_kernel_cached_the_file() {
    let sandbox = Sandbox::new("copydirect");
    let mount = FirnMount::new(&sandbox, OPTIONS);
    let path = mount.join("held");
    let source = sandbox.join("source");
    let mut expected = bytes(3, 4 * MIB);
    fs::write(&path, &expected).expect("write");
    for round in 0..6u64 {
        assert_same_bytes("cached", &read(&path), &expected);
        assert_same_bytes("from the cache", &read(&path), &expected);
        let data = bytes(100 + round, MIB);
        fs::write(&source, &data).expect("write");
        let mut copy = Command::new("dd");
        copy.arg(format!("if={}", source.display()))
            .arg(format!("of={}", path.display()))
            .args(["bs=256K", "conv=notrunc"])
            .arg(format!("seek={}", round % 4 * 4));
        run(Frontend::Mount.preload(&sandbox, &mut copy)).ok();
        let at = (round % 4) as usize * MIB;
        expected[at..at + MIB].copy_from_slice(&data);
        assert_same_bytes("after direct access", &read(&path), &expected);
    }
    mount.umount();
}

/// Proves S-read-4.
#[test]
fn kernel_copies_are_bounded() {
    let sandbox = Sandbox::new("copybound");
    let mount = FirnMount::new(&sandbox, &format!("{HELD},kernel-copies=25"));
    let bound = mount.status().kernel_copies_max_bytes;
    assert_eq!(bound / MIB as u64, 15, "a quarter of the arena, about");
    let names: Vec<_> = (0..4).map(|at| mount.join(format!("held{at}"))).collect();
    for (at, name) in names.iter().enumerate() {
        write_and_close(&mount, name, &bytes(at as u64, 6 * MIB));
    }
    for (at, name) in names.iter().enumerate() {
        assert_same_bytes("held", &read(name), &bytes(at as u64, 6 * MIB));
        assert!(mount.status().kernel_copies_bytes <= bound);
    }
    // What is open stays, and there is no room for a third.
    let open: Vec<_> = names[..3]
        .iter()
        .map(|name| File::open(name).expect("open"))
        .collect();
    assert_eq!(mount.status().kernel_copies_bytes, 12 * MIB as u64);
    for (at, file) in open.iter().enumerate() {
        let data = bytes(at as u64, 6 * MIB);
        assert_same_bytes("open", &read_at(file, 0, data.len()), &data);
    }
    let served = mount.status().read_bytes;
    read_at(&open[2], 0, 6 * MIB);
    assert_eq!(mount.status().read_bytes, served + 6 * MIB as u64);
    drop(open);
    let large = mount.join("large");
    fs::write(&large, bytes(9, 20 * MIB)).expect("write");
    for _ in 0..2 {
        let served = mount.status().read_bytes;
        read(&large);
        assert_eq!(mount.status().read_bytes, served + 20 * MIB as u64);
    }
    mount.umount();
}

/// Proves S-read-4: and the kernel reads the file from the backing then.
#[test]
fn the_kernels_copy_of_a_file_that_is_in_the_backing_only_is_dropped() {
    let sandbox = Sandbox::new("copydrained");
    let mount = FirnMount::new(&sandbox, OPTIONS);
    let path = mount.join("held");
    let data = bytes(4, 4 * MIB);
    write_and_close(&mount, &path, &data);
    let file = File::open(&path).expect("open");
    assert_same_bytes("held", &read_at(&file, 0, data.len()), &data);
    assert_eq!(mount.status().kernel_copies_bytes, data.len() as u64);
    drain_and_evict(&sandbox, mount.path());
    assert_same_bytes("still open", &read_at(&file, 0, data.len()), &data);
    assert_same_bytes("opened beside it", &read(&path), &data);
    drop(file);
    wait_until("the copy is dropped", Duration::from_secs(10), || {
        mount.status().kernel_copies_bytes == 0
    });
    assert_same_bytes("drained", &read(&path), &data);
    let served = mount.status().read_bytes;
    assert_same_bytes("drained", &read(&path), &data);
    assert_eq!(mount.status().read_bytes, served, "firnd reads it no more");
    mount.umount();
}
