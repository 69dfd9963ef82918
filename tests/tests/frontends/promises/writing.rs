//! What write(2) promises to other processes and in a full arena.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown};
use std::process::Command;
use std::thread;
use std::time::Duration;

use firn_tests::faultfs::FaultFs;
use firn_tests::fsops::{assert_same_bytes, open_rw, read};
use firn_tests::mount::{SMALL, patient};
use firn_tests::random::bytes;
use firn_tests::{FirnMount, Sandbox, run, wait_until};

use super::users::as_nobody;

const MIB: usize = 1 << 20;

/// Proves S-write-2.
#[test]
fn another_process_reads_what_write_returned() {
    let sandbox = Sandbox::new("otherprocess");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let file = open_rw(&mount.join("file"));
    let expected = sandbox.join("expected");
    let mut model = Vec::new();
    for step in 0..10u64 {
        file.write_all_at(&bytes(step, 3000), step * 2500)
            .expect("write");
        model.truncate(step as usize * 2500);
        model.extend(bytes(step, 3000));
        fs::write(&expected, &model).expect("write beside the mount");
        run(Command::new("cmp").arg(mount.join("file")).arg(&expected)).ok();
    }
    assert_eq!(
        mount.status().drain_bytes,
        0,
        "the bytes came from the arena"
    );
    drop(file);
    mount.umount();
}

/// Proves S-write-6.
#[test]
fn a_writer_waits_while_the_arena_is_full_and_goes_on_when_it_drains() {
    let sandbox = Sandbox::new("writerwaits");
    let fault = FaultFs::new(&sandbox);
    // The kernel's knowledge of the mount point lasts, so that `firn status` asks a stalled backing nothing.
    let options = "arena-size=16M,chunk-size=1M,close=held,attr-timeout=10min";
    let mount = FirnMount::over(&sandbox, fault.path(), options);
    let mut file = File::create(mount.join("file")).expect("create");
    fault.stall();
    let writer =
        thread::spawn(move || (0..40).try_for_each(|step| file.write_all(&bytes(step, MIB))));
    wait_until("the writer waits for room", Duration::from_secs(30), || {
        mount.status().waiting_writers > 0
    });
    assert!(
        !writer.is_finished(),
        "it was told something before anything could drain"
    );
    fault.go_on();
    writer
        .join()
        .expect("no panic")
        .expect("every write is taken in the end");
    let backing = mount.umount();
    let model: Vec<u8> = (0..40).flat_map(|step| bytes(step, MIB)).collect();
    assert_same_bytes("in the backing", &read(&backing.join("file")), &model);
}

/// Proves S-write-8.
#[test]
fn what_is_cut_off_or_removed_before_the_drain_is_not_drained() {
    let sandbox = Sandbox::new("cancelled");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    fs::write(mount.join("removed"), bytes(1, MIB)).expect("write");
    fs::remove_file(mount.join("removed")).expect("unlink");
    fs::write(mount.join("cut"), bytes(2, MIB)).expect("write");
    fs::write(mount.join("cut"), "").expect("open with O_TRUNC");
    let status = mount.status();
    assert_eq!((status.held_bytes, status.drain_bytes), (0, 0));
    assert_eq!(status.cancelled_bytes, 2 * MIB as u64);
    mount.umount();
}

/// Proves S-write-9.
#[test]
fn a_write_of_another_user_takes_set_id_bits_away() {
    let sandbox = Sandbox::new("setid");
    let mount = FirnMount::new(&sandbox, &format!("{SMALL},allow-other"));
    let path = mount.join("file");
    fs::write(&path, "text").expect("write");
    chown(&path, Some(65534), Some(65534)).expect("chown");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o6755)).expect("chmod");
    fs::OpenOptions::new()
        .append(true)
        .open(&path)
        .expect("open")
        .write_all(b"of root")
        .expect("write");
    assert_eq!(
        fs::metadata(&path).expect("stat").mode() & 0o7777,
        0o6755,
        "root keeps them"
    );
    as_nobody(&sandbox, &format!("echo more >> {}", path.display())).ok();
    assert_eq!(fs::metadata(&path).expect("stat").mode() & 0o7777, 0o755);
    let backing = mount.umount();
    assert_eq!(
        fs::metadata(backing.join("file")).expect("stat").mode() & 0o7777,
        0o755
    );
}
