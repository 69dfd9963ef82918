//! Backings that fail while data is held: kept, told at close, fsync and in status, tried again.

use std::fs::{self, File};
use std::io::Write;
use std::process::Command;
use std::time::Duration;

use firn_tests::faultfs::FaultFs;
use firn_tests::fsops::{assert_same_bytes, close, read};
use firn_tests::random::bytes;
use firn_tests::{FirnMount, FsKind, LoopImage, Sandbox, run, wait_until};
use rustix::io::Errno;

const OPTIONS: &str = "arena-size=16M,chunk-size=1M";
const RETRY_LIMIT: Duration = Duration::from_secs(60);

/// Writes more than the backing takes until an error; returns what was acknowledged and the errno of
/// the write (if one failed) and of the close.
fn write_until_full(path: &std::path::Path) -> (Vec<u8>, Option<Errno>, Result<(), Errno>) {
    let mut file = File::create(path).expect("create");
    let mut acknowledged = Vec::new();
    let mut failed = None;
    for step in 0..120u64 {
        let data = bytes(step, 500_000);
        match file.write(&data) {
            Ok(count) => acknowledged.extend_from_slice(&data[..count]),
            Err(error) => {
                failed = Errno::from_io_error(&error);
                break;
            }
        }
    }
    (acknowledged, failed, close(file))
}

#[track_caller]
fn status_names(mount: &FirnMount<'_>, errno: Errno) {
    let status = mount.status();
    let told = status
        .errors
        .iter()
        .any(|error| error.errno == errno.raw_os_error() && error.pending);
    assert!(told, "{errno:?} is not in the status: {:?}", status.errors);
    assert!(status.held_bytes > 0);
}

#[track_caller]
fn drains_by_itself(mount: &FirnMount<'_>) {
    wait_until("drained after the backing healed", RETRY_LIMIT, || {
        mount.status().held_bytes == 0
    });
}

/// Proves S-error-1, S-error-4, S-error-13, S-write-7.
#[test]
fn a_full_backing_ends_in_enospc_and_drains_when_there_is_room() {
    let sandbox = Sandbox::new("full");
    let image = LoopImage::new(&sandbox, FsKind::Ext4, 40);
    fs::write(image.path().join("ballast"), bytes(1, 24 << 20)).expect("fill");
    let backing = image.mkdir("data");
    let mount = FirnMount::over(&sandbox, &backing, OPTIONS);
    let (acknowledged, failed, closed) = write_until_full(&mount.join("file"));
    assert_eq!(
        failed,
        Some(Errno::NOSPC),
        "a write when arena and backing are full"
    );
    assert_eq!(
        closed,
        Err(Errno::NOSPC),
        "close tells what could not be drained"
    );
    status_names(&mount, Errno::NOSPC);
    assert_same_bytes(
        "acknowledged, before the drain",
        &read(&mount.join("file")),
        &acknowledged,
    );
    fs::remove_file(image.path().join("ballast")).expect("make room");
    drains_by_itself(&mount);
    assert_same_bytes(
        "acknowledged, in the backing",
        &read(&backing.join("file")),
        &acknowledged,
    );
    mount.umount();
}

/// Proves S-write-7, S-error-1.
#[test]
fn a_quota_ends_in_edquot_and_drains_when_it_is_raised() {
    let sandbox = Sandbox::new("quota");
    let image = LoopImage::new(&sandbox, FsKind::Btrfs, 400);
    let btrfs = |args: &[&str], path: &std::path::Path| {
        run(Command::new("btrfs").args(args).arg(path)).ok()
    };
    let backing = image.path().join("limited");
    btrfs(&["quota", "enable"], image.path());
    btrfs(&["subvolume", "create"], &backing);
    btrfs(&["qgroup", "limit", "12M"], &backing);
    let mount = FirnMount::over(&sandbox, &backing, OPTIONS);
    let (acknowledged, failed, closed) = write_until_full(&mount.join("file"));
    assert_eq!(
        failed,
        Some(Errno::DQUOT),
        "a write when the arena is full and the quota used up"
    );
    assert_eq!(closed, Err(Errno::DQUOT));
    status_names(&mount, Errno::DQUOT);
    btrfs(&["qgroup", "limit", "none"], &backing);
    drains_by_itself(&mount);
    assert_same_bytes(
        "acknowledged, in the backing",
        &read(&backing.join("file")),
        &acknowledged,
    );
    mount.umount();
}

/// Proves S-error-1, S-error-2, S-error-4, S-fsync-5.
#[test]
fn eio_is_told_at_fsync_and_close_and_the_data_is_kept() {
    let sandbox = Sandbox::new("eio");
    let fault = FaultFs::new(&sandbox);
    let mount = FirnMount::over(&sandbox, fault.path(), OPTIONS);
    let mut file = File::create(mount.join("file")).expect("create");
    fault.fail_writes("EIO");
    file.write_all(&bytes(1, 200_000))
        .expect("a write is held whatever the backing does");
    let error = file.sync_all().expect_err("fsync cannot keep its promise");
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    assert_eq!(close(file), Err(Errno::IO));
    status_names(&mount, Errno::IO);
    assert_same_bytes(
        "through the mount",
        &read(&mount.join("file")),
        &bytes(1, 200_000),
    );
    mount.wait("drained", mount.path()).code(1);
    fault.fail_writes("");
    drains_by_itself(&mount);
    assert_same_bytes(
        "in the backing",
        &read(&fault.source().join("file")),
        &bytes(1, 200_000),
    );
    assert!(mount.status().errors.iter().all(|error| !error.pending));
    mount.umount();
}

/// Proves S-write-1, S-error-1.
#[test]
fn what_a_sick_backing_refused_survives_kill_9_and_drains_after_healing() {
    let sandbox = Sandbox::new("sickkill");
    let fault = FaultFs::new(&sandbox);
    let mount = FirnMount::over(&sandbox, fault.path(), OPTIONS);
    let mut file = File::create(mount.join("file")).expect("create");
    fault.fail_writes("EIO");
    file.write_all(&bytes(2, 300_000)).expect("write");
    let backing = mount.kill();
    drop(file);
    sandbox
        .run(["recover".as_ref(), backing.as_os_str()])
        .code(1)
        .says("firn: ");
    fault.fail_writes("");
    sandbox.run(["recover".as_ref(), backing.as_os_str()]).ok();
    assert_same_bytes(
        "in the backing",
        &read(&fault.source().join("file")),
        &bytes(2, 300_000),
    );
}

/// Proves S-crash-3, S-error-5, S-error-14.
#[test]
fn umount_refuses_to_drop_what_cannot_be_drained_and_force_keeps_it_in_the_arena() {
    let sandbox = Sandbox::new("sickumount");
    let fault = FaultFs::new(&sandbox);
    let mount = FirnMount::over(&sandbox, fault.path(), OPTIONS);
    let mut file = File::create(mount.join("file")).expect("create");
    fault.fail_writes("EIO");
    file.write_all(&bytes(3, 100_000)).expect("write");
    drop(file);
    let refused = sandbox.run(["umount".as_ref(), mount.path().as_os_str()]);
    assert!(
        [1, 3].contains(&refused.code),
        "data that cannot be drained: {refused}"
    );
    refused.says("firn: ").says("97.7 KiB cannot be drained");
    let point = mount.path().as_os_str();
    let shown = sandbox.run(["status".as_ref(), point]).ok().stdout;
    let mut lines = shown.lines().skip(1);
    let first = lines.next().unwrap_or_default();
    assert!(
        first.trim_start().starts_with("error ")
            && first.contains("the data is kept and tried again"),
        "{shown}"
    );
    assert!(shown.contains("`firn drain "), "{shown}");
    let forced = sandbox.run(["umount".as_ref(), "--force".as_ref(), point]);
    assert!([0, 3].contains(&forced.code), "{forced}");
    mount.wait_for_end();
    assert_eq!(
        sandbox.arenas().len(),
        1,
        "the arena holds what was not drained"
    );
    fault.fail_writes("");
    let again = FirnMount::over(&sandbox, fault.path(), OPTIONS);
    again.wait("drained", again.path()).ok();
    assert_same_bytes(
        "in the backing",
        &read(&fault.source().join("file")),
        &bytes(3, 100_000),
    );
    again.umount();
}

/// Proves S-error-1.
#[test]
fn a_backing_that_vanishes_while_mounted_loses_nothing_when_it_returns() {
    let sandbox = Sandbox::new("vanish");
    let mut fault = FaultFs::new(&sandbox);
    let options = format!("{OPTIONS},close=held,drain-age=10min");
    let mount = FirnMount::over(&sandbox, fault.path(), &options);
    fs::write(mount.join("file"), bytes(4, 150_000)).expect("write");
    fault.vanish();
    let error = fs::write(mount.join("new"), "x").expect_err("the backing is gone");
    assert_eq!(error.raw_os_error(), Some(libc::ENOTCONN));
    mount.wait("drained", mount.path()).code(1);
    status_names(&mount, Errno::NOTCONN);
    let backing = mount.kill();
    fault.start();
    sandbox.run(["recover".as_ref(), backing.as_os_str()]).ok();
    assert_same_bytes(
        "in the backing",
        &read(&fault.source().join("file")),
        &bytes(4, 150_000),
    );
}

/// Proves S-discard-1.
#[test]
fn what_is_held_is_dropped_while_the_backing_is_gone() {
    let sandbox = Sandbox::new("discardvanished");
    let mut fault = FaultFs::new(&sandbox);
    let options = format!("{OPTIONS},drain=demand");
    let mount = FirnMount::over(&sandbox, fault.path(), &options);
    fs::write(mount.join("held"), bytes(5, 1 << 20)).expect("write");
    fault.vanish();
    let args = ["umount", "--discard", "--yes"].map(std::ffi::OsStr::new);
    sandbox
        .run(args.into_iter().chain([mount.path().as_os_str()]))
        .ok()
        .says("dropped 1.0 MiB");
    assert!(sandbox.arenas().is_empty());
    mount.wait_for_end();
    mount.abandon();
}

/// Proves S-discard-1.
#[test]
fn what_is_held_is_dropped_while_writes_to_the_backing_hang() {
    let sandbox = Sandbox::new("discardhung");
    let fault = FaultFs::new(&sandbox);
    let _watchdog = fault.watchdog(Duration::from_secs(100));
    let mount = FirnMount::over(&sandbox, fault.path(), &format!("{OPTIONS},close=held"));
    fault.hang("write", "");
    fs::write(mount.join("held"), bytes(6, 8 << 20)).expect("write");
    wait_until("an I/O thread hangs", RETRY_LIMIT, || {
        fault.hung_count() > 0
    });
    let args = ["umount", "--discard", "--force", "--yes"].map(std::ffi::OsStr::new);
    sandbox
        .run(args.into_iter().chain([mount.path().as_os_str()]))
        .ok()
        .says("dropped 8.0 MiB");
    assert!(sandbox.arenas().is_empty());
    fault.let_go();
    mount.wait_for_end();
    mount.abandon();
}
