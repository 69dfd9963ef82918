//! Held files that the kernel keeps pages of, where it cannot read their memory files by itself: read by firnd once, and right
//! after every change.

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
const OPTIONS: &str = "arena-size=64M,chunk-size=1M,drain=demand,close=held,fsync=held,passthrough=off,memory-files=1M";

/// `firn drain --wait`, then `firn evict`: the arena has nothing of the files any more.
fn drain_and_evict(sandbox: &Sandbox, path: &Path) {
    sandbox
        .run([OsStr::new("drain"), OsStr::new("--wait"), path.as_os_str()])
        .ok();
    sandbox.run([OsStr::new("evict"), path.as_os_str()]).ok();
}

/// Writes a file, and returns once it is in a memory file.
fn write_and_settle(mount: &FirnMount, path: &Path, data: &[u8]) {
    let before = mount.status().settled_bytes;
    fs::write(path, data).expect("write");
    wait_until("the file is settled", Duration::from_secs(30), || {
        mount.status().settled_bytes >= before + data.len() as u64
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
    write_and_settle(&mount, &path, &data);
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

/// Proves S-read-3: pages that the kernel kept of a held file are not taken for those of the backing.
#[test]
fn a_file_that_left_the_arena_is_read_as_the_backing_has_it() {
    let sandbox = Sandbox::new("copydrained");
    let mount = FirnMount::new(&sandbox, OPTIONS);
    let path = mount.join("held");
    let data = bytes(4, 4 * MIB);
    write_and_settle(&mount, &path, &data);
    let file = File::open(&path).expect("open");
    assert_same_bytes("held", &read_at(&file, 0, data.len()), &data);
    drain_and_evict(&sandbox, mount.path());
    assert_same_bytes("still open", &read_at(&file, 0, data.len()), &data);
    assert_same_bytes("opened beside it", &read(&path), &data);
    drop(file);
    let by_others = bytes(5, 3 * MIB + 5);
    fs::write(mount.backing().join("held"), &by_others).expect("write");
    assert_same_bytes("changed by others", &read(&path), &by_others);
    mount.umount();
}
