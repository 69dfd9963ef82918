//! Limits that firnd inherits from the mounting process, and a runtime directory without room for a line of the log.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use firn_tests::command::run;
use firn_tests::fsops::{assert_same_bytes, read};
use firn_tests::mount::{mount_args, status_of};
use firn_tests::random::bytes;
use firn_tests::sandbox::{firn_binary, is_mounted, unmount_lazily};
use firn_tests::{FirnMount, FsKind, LoopImage, Sandbox, wait_until};
use rustix::io::Errno;

const MIB: u64 = 1 << 20;
/// The limit on file sizes under which these tests mount and recover.
const LIMIT: u64 = 32 * MIB;
const OPTIONS: &str = "arena-size=16M,chunk-size=1M";

/// A small tmpfs over the runtime directory of a sandbox; it goes on drop.
struct SmallRuntime<'a> {
    sandbox: &'a Sandbox,
}

impl<'a> SmallRuntime<'a> {
    fn new(sandbox: &'a Sandbox) -> Self {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=1m,mode=700", "firn-test"]);
        run(mount.arg(sandbox.runtime())).ok();
        Self { sandbox }
    }

    fn ballast(&self) -> PathBuf {
        self.sandbox.runtime().join("ballast")
    }

    /// Takes every byte that is left.
    fn fill(&self) {
        let mut ballast = File::options()
            .create(true)
            .append(true)
            .open(self.ballast())
            .expect("open");
        for len in [4096, 1] {
            let block = vec![0; len];
            while ballast.write_all(&block).is_ok() {}
        }
    }
}

impl Drop for SmallRuntime<'_> {
    fn drop(&mut self) {
        self.sandbox.kill_processes();
        unmount_lazily(self.sandbox.runtime());
    }
}

/// `firn` under a limit on file sizes, `soft:hard` in bytes or a word of prlimit(1).
fn firn_under(sandbox: &Sandbox, limit: &str, args: &[std::ffi::OsString]) -> Command {
    let mut command = Command::new("prlimit");
    sandbox.environment(&mut command);
    command
        .arg(format!("--fsize={limit}"))
        .arg(firn_binary())
        .args(args);
    command
}

/// Appends until the file is `len` long or a write fails, of which it gives the errno.
fn write_up_to(file: &mut File, acknowledged: &mut Vec<u8>, len: u64) -> Option<Errno> {
    while (acknowledged.len() as u64) < len {
        let data = bytes(acknowledged.len() as u64, MIB as usize);
        match file.write(&data) {
            Ok(count) => acknowledged.extend_from_slice(&data[..count]),
            Err(error) => return Errno::from_io_error(&error),
        }
    }
    None
}

/// Proves S-error-6.
#[test]
fn regression_a_full_runtime_directory_costs_lines_of_the_log_and_nothing_else() {
    let sandbox = Sandbox::new("fulllog");
    let arenas = LoopImage::new(&sandbox, FsKind::Tmpfs, 64);
    let runtime = SmallRuntime::new(&sandbox);
    let options = format!(
        "{OPTIONS},log-level=debug,arena-dir={}",
        arenas.path().display()
    );
    let mount = FirnMount::new(&sandbox, &options);
    assert_eq!(mount.status().log_lines_lost, 0);
    runtime.fill();
    let data = bytes(7, 3 << 20);
    fs::write(mount.join("file"), &data).expect("write with a full runtime directory");
    wait_until("a line of the log is lost", Duration::from_secs(20), || {
        fs::metadata(mount.join("missing")).expect_err("there is no such file");
        mount.status().log_lines_lost > 0
    });
    let shown = sandbox
        .run(["status".as_ref(), mount.path().as_os_str()])
        .ok()
        .stdout;
    assert!(shown.contains("could not be written"), "{shown}");
    assert_same_bytes("file", &read(&mount.join("file")), &data);
    fs::remove_file(runtime.ballast()).expect("make room");
    wait_until(
        "the log tells what it lacks",
        Duration::from_secs(20),
        || {
            fs::metadata(mount.join("missing")).expect_err("there is no such file");
            sandbox
                .logs()
                .contains("before this one could not be written")
        },
    );
    let backing = mount.umount();
    assert_same_bytes("file in the backing", &read(&backing.join("file")), &data);
}

#[test]
fn regression_a_mount_does_not_need_its_log() {
    let sandbox = Sandbox::new("nolog");
    let arenas = LoopImage::new(&sandbox, FsKind::Tmpfs, 64);
    let runtime = SmallRuntime::new(&sandbox);
    runtime.fill();
    let options = format!("{OPTIONS},arena-dir={}", arenas.path().display());
    let mount = FirnMount::new(&sandbox, &options);
    assert!(mount.status().log_lines_lost > 0);
    fs::write(mount.join("file"), "text").expect("write");
    let backing = mount.umount();
    assert_eq!(fs::read(backing.join("file")).expect("read"), b"text");
}

/// Proves S-error-7, S-error-15.
#[test]
fn regression_a_limit_on_file_sizes_keeps_data_and_ends_no_process() {
    let sandbox = Sandbox::new("fsize");
    let backing = sandbox.join("backing");
    let point = sandbox.join("mnt");
    let limit = format!("{LIMIT}:{LIMIT}");
    let args = mount_args(&backing, &point, OPTIONS);
    run(&mut firn_under(&sandbox, &limit, &args))
        .ok()
        .says("ulimit -f");
    assert!(is_mounted(&point));
    let mut file = File::create(point.join("file")).expect("create");
    let mut acknowledged = Vec::new();
    // Half of the arena stays for others.
    let mut failed = write_up_to(&mut file, &mut acknowledged, LIMIT + 8 * MIB);
    wait_until("what fits is drained", Duration::from_secs(30), || {
        status_of(&sandbox, &point).held_bytes <= (acknowledged.len() as u64).saturating_sub(LIMIT)
    });
    fs::write(point.join("small"), "text").expect("a file below the limit goes on");
    if failed.is_none() {
        failed = write_up_to(&mut file, &mut acknowledged, 2 * LIMIT);
    }
    assert_eq!(
        failed,
        Some(Errno::FBIG),
        "a write that no drain makes room for"
    );
    assert!(acknowledged.len() as u64 > LIMIT, "{}", acknowledged.len());

    let status = status_of(&sandbox, &point);
    assert_eq!(status.file_size_limit_bytes, Some(LIMIT));
    let told = status
        .errors
        .iter()
        .find(|error| error.errno == Errno::FBIG.raw_os_error());
    let told = told.unwrap_or_else(|| panic!("no EFBIG in {:?}", status.errors));
    assert!(
        told.message.contains("ulimit -f") && told.pending,
        "{told:?}"
    );
    let shown = sandbox
        .run(["status".as_ref(), point.as_os_str()])
        .ok()
        .stdout;
    assert!(
        shown.contains("files larger than 32.0 MiB cannot be drained"),
        "{shown}"
    );
    assert_same_bytes(
        "through the mount",
        &read(&point.join("file")),
        &acknowledged,
    );
    drop(file);

    let umount = |force: &[&str]| {
        let args = ["umount"].iter().chain(force).map(std::ffi::OsString::from);
        sandbox.run(args.chain([point.clone().into()]))
    };
    umount(&[]).code(1).says("ulimit -f");
    umount(&["--force"]).code(3);
    let recover = ["recover".into(), backing.clone().into()];
    // All that fits is in the backing already.
    run(&mut firn_under(&sandbox, &limit, &recover))
        .code(1)
        .says("ulimit -f");
    sandbox.run(&recover).ok();
    assert_same_bytes(
        "recovered without the limit",
        &read(&backing.join("file")),
        &acknowledged,
    );
    assert_eq!(fs::read(backing.join("small")).expect("read"), b"text");
}

#[test]
fn regression_a_limit_below_the_arena_is_named() {
    let sandbox = Sandbox::new("fsizearena");
    let args = mount_args(&sandbox.join("backing"), &sandbox.join("mnt"), OPTIONS);
    run(&mut firn_under(&sandbox, "8388608:8388608", &args))
        .code(2)
        .says("ulimit -f");
    assert!(!is_mounted(&sandbox.join("mnt")));
    FirnMount::new(&sandbox, OPTIONS).umount();
}

#[test]
fn regression_a_soft_limit_on_file_sizes_is_none_for_firnd() {
    let sandbox = Sandbox::new("fsizesoft");
    let args = mount_args(&sandbox.join("backing"), &sandbox.join("mnt"), OPTIONS);
    run(&mut firn_under(
        &sandbox,
        &format!("{LIMIT}:unlimited"),
        &args,
    ))
    .ok();
    assert_eq!(
        status_of(&sandbox, &sandbox.join("mnt")).file_size_limit_bytes,
        None
    );
    let mut file = File::create(sandbox.join("mnt/file")).expect("create");
    let mut acknowledged = Vec::new();
    let failed = write_up_to(&mut file, &mut acknowledged, LIMIT + 4 * MIB);
    drop(file);
    assert_eq!(failed, None);
    sandbox
        .run(["umount".into(), sandbox.join("mnt").into_os_string()])
        .ok();
    assert_same_bytes(
        "in the backing",
        &read(&sandbox.join("backing/file")),
        &acknowledged,
    );
}
