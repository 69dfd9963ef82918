//! More data than memory: chunks go to a spill file, are read there, survive, and drain from there.

use std::ffi::OsStr;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use firn_protocol::SpillStatus;
use firn_tests::command::run;
use firn_tests::fsops::{assert_same_bytes, read};
use firn_tests::image::{FsKind, LoopImage};
use firn_tests::mount::mount_args;
use firn_tests::random::bytes;
use firn_tests::{FirnMount, Sandbox, wait_until};

const MIB: usize = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);
const FILES: u64 = 6;

/// Nothing drains unasked: memory for 16 MiB, and `size` in the spill file.
fn options(spill: &Path, size: &str) -> String {
    format!(
        "arena-size=16M,chunk-size=1M,drain=demand,spill={},spill-size={size}",
        spill.display()
    )
}

fn files(mount: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    (0..FILES)
        .map(|n| {
            (
                mount.join(format!("rank{n}")),
                bytes(n + 1, 6 * MIB + 1000 * n as usize),
            )
        })
        .collect()
}

/// 36 MiB.
fn write_all(mount: &Path) {
    for (path, data) in files(mount) {
        fs::write(path, data).expect("write");
    }
}

fn verify(what: &str, mount: &Path) {
    for (path, data) in files(mount) {
        assert_same_bytes(what, &read(&path), &data);
    }
}

fn spill_of(mount: &FirnMount<'_>) -> SpillStatus {
    mount.status().spill.expect("there is a spill file")
}

fn spill_files(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir)
        .expect("list")
        .map(|entry| entry.expect("entry").path())
        .collect()
}

fn drain(sandbox: &Sandbox, path: &Path) {
    sandbox
        .run([OsStr::new("drain"), OsStr::new("--wait"), path.as_os_str()])
        .ok();
}

/// Proves S-spill-1, S-spill-2.
#[test]
fn more_data_than_memory_is_held_read_and_drained() {
    let sandbox = Sandbox::new("spill");
    let dir = sandbox.mkdir("local");
    let mount = FirnMount::new(&sandbox, &options(&dir, "64M"));
    write_all(mount.path());
    let spill = spill_of(&mount);
    assert_eq!(spill.bytes, 64 << 20);
    assert!(spill.used_bytes >= 20 << 20, "{spill:?}");
    assert!(spill.moved_bytes > 0 && !spill.failing, "{spill:?}");
    verify("held and spilled", mount.path());
    let behind = fs::metadata(mount.backing().join("rank0")).expect("its name is there");
    assert_eq!(behind.len(), 0, "drained unasked");
    wait_until("memory is below the lower threshold", LIMIT, || {
        mount.status().arena_used_bytes <= 13 << 20
    });
    let level = |name: &str| {
        let args = [
            OsStr::new("-n"),
            OsStr::new("user.firn.state"),
            OsStr::new("--only-values"),
        ];
        run(Command::new("getfattr").args(args).arg(mount.join(name)))
            .ok()
            .stdout
    };
    assert_eq!(
        (level("rank0").as_str(), level("rank5").as_str()),
        ("spilled", "held")
    );
    drain(&sandbox, mount.path());
    verify("in the backing", mount.backing());
    let backing = mount.umount();
    verify("after the unmount", &backing);
    assert_eq!(
        spill_files(&dir),
        Vec::<PathBuf>::new(),
        "removed with the arena"
    );
}

/// Proves S-spill-1.
#[test]
fn memory_may_be_full_before_chunks_move() {
    let sandbox = Sandbox::new("spill100");
    let dir = sandbox.mkdir("local");
    let thresholds = "spill-upper=100,spill-lower=100";
    let mount = FirnMount::new(&sandbox, &format!("{},{thresholds}", options(&dir, "64M")));
    write_all(mount.path());
    verify("held and spilled", mount.path());
    let memory = mount.status().arena_used_bytes;
    assert!(memory >= 12 << 20, "{memory} bytes of 16 MiB are used");
    drain(&sandbox, mount.path());
    verify("in the backing", mount.backing());
    mount.umount();
}

/// Proves S-spill-4, S-spill-2.
#[test]
fn regression_a_writer_that_fills_memory_waits_for_each_move() {
    let sandbox = Sandbox::new("spillfew");
    let dir = sandbox.mkdir("local");
    let few = "arena-size=4M,chunk-size=1M,drain=demand,spill-upper=0,spill-lower=0";
    let mount = FirnMount::new(
        &sandbox,
        &format!("{few},spill={},spill-size=256M", dir.display()),
    );
    let data = bytes(7, 64 * MIB);
    for n in 0..3 {
        fs::write(mount.join(format!("rank{n}")), &data).expect("there is room on the device");
    }
    assert_same_bytes("spilled", &read(&mount.join("rank2")), &data);
    for n in 0..3 {
        fs::remove_file(mount.join(format!("rank{n}"))).expect("unlink");
    }
    mount.umount();
}

#[test]
fn spilled_data_survives_the_death_of_firnd() {
    let sandbox = Sandbox::new("spillkill");
    let dir = sandbox.mkdir("local");
    let options = options(&dir, "64M");
    let mount = FirnMount::new(&sandbox, &options);
    write_all(mount.path());
    assert!(spill_of(&mount).used_bytes > 0);
    mount.kill();
    let mount = FirnMount::new(&sandbox, &options);
    verify("after the kill", mount.path());
    fs::remove_file(mount.join("rank0")).expect("unlink");
    fs::write(mount.join("rank0"), &files(mount.path())[0].1).expect("its slots are used again");
    verify("rewritten", mount.path());
    drain(&sandbox, mount.path());
    verify("drained", mount.backing());
    mount.umount();
}

/// Proves S-spill-3.
#[test]
fn memory_and_spill_file_full_is_enospc_and_harms_nothing() {
    let sandbox = Sandbox::new("spillfull");
    let dir = sandbox.mkdir("local");
    let mount = FirnMount::new(&sandbox, &options(&dir, "16M"));
    let whole = bytes(1, 20 * MIB);
    fs::write(mount.join("whole"), &whole).expect("it fits into both");
    let error = fs::write(mount.join("more"), bytes(2, 40 * MIB)).expect_err("it does not fit");
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    assert_same_bytes("the file before", &read(&mount.join("whole")), &whole);
    fs::remove_file(mount.join("more")).expect("unlink");
    fs::write(mount.join("less"), bytes(3, 5 * MIB)).expect("there is room again");
    drain(&sandbox, mount.path());
    assert_same_bytes("drained", &read(&mount.backing().join("whole")), &whole);
    mount.umount();
}

/// Proves S-spill-6, S-spill-7.
#[test]
fn a_missing_spill_file_refuses_the_mount_and_recover_keeps_the_rest() {
    let sandbox = Sandbox::new("spillgone");
    let dir = sandbox.mkdir("local");
    let options = options(&dir, "64M");
    let mount = FirnMount::new(&sandbox, &options);
    write_all(mount.path());
    wait_until("chunks moved", LIMIT, || {
        mount.status().arena_used_bytes <= 13 << 20
    });
    let backing = mount.backing().to_owned();
    let mount_point = mount.path().to_owned();
    mount.kill();
    let [file] = &spill_files(&dir)[..] else {
        panic!("one spill file")
    };
    let aside = sandbox.join("aside");
    fs::rename(file, &aside).expect("take the device away");

    let refused = sandbox
        .run(mount_args(&backing, &mount_point, &options))
        .code(1);
    refused.says("spill file").says("firn recover");
    let checked = sandbox
        .run([OsStr::new("check"), backing.as_os_str()])
        .code(1)
        .stdout;
    assert!(checked.contains("spill file, chunk"), "{checked}");
    let kept = sandbox.run([
        OsStr::new("recover"),
        OsStr::new("--json"),
        backing.as_os_str(),
    ]);
    let kept = kept.code(3).json();
    assert!(
        kept["left_bytes"].as_u64().is_some_and(|left| left > 0),
        "{kept}"
    );
    assert!(
        kept["recovered_bytes"]
            .as_u64()
            .is_some_and(|bytes| bytes > 0),
        "{kept}"
    );

    fs::rename(&aside, file).expect("the device is back");
    let mount = FirnMount::new(&sandbox, &options);
    verify("all of it", mount.path());
    drain(&sandbox, mount.path());
    verify("drained", mount.backing());
    mount.umount();
}

/// Proves S-spill-5.
#[test]
fn a_device_that_fails_loses_nothing_and_is_told() {
    let sandbox = Sandbox::new("spilleio");
    let image = LoopImage::new(&sandbox, FsKind::Ext4, 128);
    let dir = image.mkdir("local");
    let mount = FirnMount::new(&sandbox, &options(&dir, "64M"));
    // The disk has no blocks any more where its file system believes them.
    let disk = image.image().expect("an image");
    fs::File::options()
        .write(true)
        .open(disk)
        .expect("open")
        .set_len(4 << 20)
        .expect("shrink it");
    let device = run(Command::new("losetup")
        .arg("-nO")
        .arg("NAME")
        .arg("-j")
        .arg(disk))
    .ok()
    .stdout;
    run(Command::new("losetup").arg("-c").arg(device.trim())).ok();
    let error = files(mount.path())
        .into_iter()
        .find_map(|(path, data)| fs::write(path, data).err());
    assert_eq!(
        error.and_then(|error| error.raw_os_error()),
        Some(libc::ENOSPC)
    );
    let spill = spill_of(&mount);
    assert!(spill.failing, "{spill:?}");
    let status = mount.status();
    assert!(
        status
            .errors
            .iter()
            .any(|error| error.path == spill.path && error.pending),
        "{status:?}"
    );
    let (path, data) = &files(mount.path())[0];
    assert_same_bytes("what was acknowledged", &read(path), data);
    drain(&sandbox, path);
    assert_same_bytes("drained", &read(&mount.backing().join("rank0")), data);
    mount.umount();
}

/// As a file system does that finds itself damaged (`errors=remount-ro`).
///
/// Proves S-spill-5.
#[test]
fn a_device_that_becomes_read_only_loses_nothing_and_gives_what_it_has() {
    let sandbox = Sandbox::new("spillro");
    let image = LoopImage::new(&sandbox, FsKind::Ext4, 128);
    image.remount("errors=remount-ro");
    let dir = image.mkdir("local");
    let mount = FirnMount::new(&sandbox, &options(&dir, "64M"));
    let data = bytes(9, 20 * MIB);
    fs::write(mount.join("before"), &data).expect("write");
    wait_until("chunks moved", LIMIT, || spill_of(&mount).used_bytes > 0);
    let disk = image.image().expect("an image");
    let device = run(Command::new("losetup")
        .arg("-nO")
        .arg("NAME")
        .arg("-j")
        .arg(disk))
    .ok()
    .stdout;
    let name = device.trim().trim_start_matches("/dev/");
    fs::write(format!("/sys/fs/ext4/{name}/trigger_fs_error"), "by a test").expect("make it fail");
    let refused = fs::write(image.path().join("probe"), "x").expect_err("it is read-only");
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));

    let error = fs::write(mount.join("behind"), bytes(10, 40 * MIB)).expect_err("memory is full");
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    let spill = spill_of(&mount);
    assert!(spill.failing && spill.used_bytes > 0, "{spill:?}");
    let status = mount.status();
    assert!(
        status
            .errors
            .iter()
            .any(|error| error.path == spill.path && error.pending),
        "{status:?}"
    );
    assert_same_bytes(
        "from memory and from the device",
        &read(&mount.join("before")),
        &data,
    );
    fs::remove_file(mount.join("behind")).expect("unlink");
    fs::write(mount.join("small"), bytes(11, MIB)).expect("as without a spill file");
    drain(&sandbox, mount.path());
    assert_same_bytes("drained", &read(&mount.backing().join("before")), &data);
    assert_same_bytes(
        "drained",
        &read(&mount.backing().join("small")),
        &bytes(11, MIB),
    );
    mount.umount();
}

/// The device is pulled out under a living firnd: its file system answers everything with EIO.
///
/// Proves S-spill-6.
#[test]
fn a_device_that_is_gone_gives_errors_and_never_other_bytes() {
    let sandbox = Sandbox::new("spillout");
    let image = LoopImage::new(&sandbox, FsKind::Ext4, 128);
    let dir = image.mkdir("local");
    let options = options(&dir, "64M");
    let mount = FirnMount::new(&sandbox, &options);
    write_all(mount.path());
    wait_until("chunks moved", LIMIT, || {
        mount.status().arena_used_bytes <= 13 << 20
    });
    let mount_point = image.path().as_os_str();
    run(Command::new("sync").arg("-f").arg(mount_point)).ok();
    shut_down(image.path());

    let mut whole = 0;
    let mut failed = 0;
    for (path, data) in files(mount.path()) {
        match fs::read(&path) {
            Ok(found) => {
                assert_same_bytes("what is read", &found, &data);
                whole += 1;
            }
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::EIO));
                failed += 1;
            }
        }
    }
    assert!(failed > 0 && whole > 0, "{whole} whole, {failed} failed");
    let drained = sandbox.run([
        OsStr::new("drain"),
        OsStr::new("--wait"),
        mount.path().as_os_str(),
    ]);
    assert_ne!(drained.code, 0, "{drained}");
    for (path, data) in files(mount.backing()) {
        // Whole, or a part and not counted as drained.
        let found = read(&path);
        let bad = found
            .iter()
            .zip(&data)
            .position(|(found, data)| found != data && *found != 0);
        assert_eq!(bad, None, "{path:?} has bytes that nobody wrote");
    }
    mount.kill();
    // Pushed in again.
    // A program that another test starts holds copies of descriptors until its exec has closed them.
    wait_until("nobody uses the device", Duration::from_secs(10), || {
        run(Command::new("umount").arg(mount_point)).code == 0
    });
    run(Command::new("mount")
        .args(["-o", "loop"])
        .arg(image.image().expect("an image"))
        .arg(mount_point))
    .ok();
    let mount = FirnMount::new(&sandbox, &options);
    verify("all of it", mount.path());
    drain(&sandbox, mount.path());
    verify("drained", mount.backing());
    mount.umount();
}

/// EXT4_IOC_SHUTDOWN without writing the journal: what a device does that is gone.
fn shut_down(mount_point: &Path) {
    const EXT4_IOC_SHUTDOWN: libc::Ioctl = 0x8004_587d_u32 as libc::Ioctl;
    let no_log_flush = 2u32;
    let dir = fs::File::open(mount_point).expect("open");
    // SAFETY: the kernel reads one word.
    let result =
        unsafe { libc::ioctl(dir.as_raw_fd(), EXT4_IOC_SHUTDOWN, &raw const no_log_flush) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn a_spill_file_holds_a_chunk_at_least() {
    let sandbox = Sandbox::new("spillchunk");
    let spill = sandbox.mkdir("local");
    let mount = FirnMount::new(&sandbox, &options(&spill, "64K"));
    assert_eq!(spill_of(&mount).bytes, MIB as u64);
    mount.umount();
}

#[test]
fn a_place_that_cannot_hold_it_is_refused_with_the_reason() {
    let sandbox = Sandbox::new("spillplace");
    let backing = sandbox.join("backing");
    let mount_point = sandbox.join("mnt");
    let refused = |spill: &Path, size: &str, code: i32| {
        sandbox
            .run(mount_args(&backing, &mount_point, &options(spill, size)))
            .code(code)
    };
    refused(&backing, "64M", 2).says("is inside");
    refused(&mount_point, "64M", 2).says("is inside");
    refused(&sandbox.join("no/such/place"), "64M", 2).says("spill");
    let image = LoopImage::new(&sandbox, FsKind::Ext4, 32);
    refused(&image.mkdir("small"), "64M", 2)
        .says("no room")
        .says("spill-size");
    let taken = sandbox.join("file");
    fs::write(&taken, "somebody's").expect("write");
    // Others could have written to it: that comes before what is in it.
    refused(&taken, "64M", 10).says("lets others in");
    fs::set_permissions(&taken, PermissionsExt::from_mode(0o600)).expect("chmod");
    refused(&taken, "64M", 2).says("no spill file");
    assert_eq!(fs::read(&taken).expect("read"), b"somebody's");
    assert_eq!(sandbox.arenas(), Vec::<PathBuf>::new());
}
