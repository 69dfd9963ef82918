//! A machine that lacks something: no /dev/fuse, no fusermount3, no memory.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use firn_tests::ack::verify;
use firn_tests::command::{copy_program, wait_child};
use firn_tests::fsops::{open_rw, read_at};
use firn_tests::mount::status_of;
use firn_tests::sandbox::{firn_binary, is_mounted};
use firn_tests::{FirnMount, Sandbox, helper_binary, run, wait_until};

#[test]
fn without_dev_fuse_the_reason_is_said() {
    let sandbox = Sandbox::new("nofuse");
    let script = r#"mount -t tmpfs none /dev && mknod /dev/null c 1 3 && mkdir -m 1777 /dev/shm &&
        exec "$FIRN" mount "$BACKING" "$POINT""#;
    let mut command = Command::new("unshare");
    sandbox.environment(&mut command);
    command
        .env("FIRN_RUNTIME_DIR", "/dev/shm/firn")
        .env("FIRN", firn_binary());
    command
        .env("BACKING", sandbox.join("backing"))
        .env("POINT", sandbox.join("mnt"));
    run(command.args(["-m", "sh", "-c", script]))
        .code(1)
        .says("/dev/fuse")
        .says("firn: ");
}

#[test]
fn without_fusermount3_an_ordinary_user_is_told_what_to_install() {
    let sandbox = Sandbox::new("nofusermount");
    let mut command = Command::new("unshare");
    open_to_all(&sandbox);
    sandbox.environment(&mut command);
    let firn = copy_for_all(&sandbox);
    // The whole directory of programs is hidden, since a mounter may look beside PATH.
    let script = r#"EMPTY=$(mktemp -d) && cp "$(command -v setpriv)" "$EMPTY/setpriv" && chmod 755 "$EMPTY" &&
        mount --bind "$EMPTY" /usr/bin && PATH=/usr/bin exec /usr/bin/setpriv --reuid 65534 --regid 65534 --clear-groups \
        "$FIRN" mount "$BACKING" "$POINT""#;
    command
        .env("FIRN", firn)
        .env("BACKING", sandbox.join("backing"))
        .env("POINT", sandbox.join("mnt"));
    run(command.args(["-m", "/bin/sh", "-c", script]))
        .code(1)
        .says("fusermount3")
        .says("firn: ");
}

/// The administrator kept /dev/fuse from users.
#[test]
fn a_user_that_may_not_open_dev_fuse_is_told_the_way_without_it() {
    let sandbox = Sandbox::new("closedfuse");
    let mut command = Command::new("unshare");
    open_to_all(&sandbox);
    sandbox.environment(&mut command);
    let script = r#"mknod -m 600 "$DEVICE" c 10 229 && mount --bind "$DEVICE" /dev/fuse &&
        exec setpriv --reuid 65534 --regid 65534 --clear-groups "$FIRN" mount "$BACKING" "$POINT""#;
    command
        .env("FIRN", copy_for_all(&sandbox))
        .env("DEVICE", sandbox.join("fuse"))
        .env("BACKING", sandbox.join("backing"))
        .env("POINT", sandbox.join("mnt"));
    run(command.args(["-m", "sh", "-c", script]))
        .code(1)
        .says("fusermount3 refused")
        .says("run without FUSE: `firn run`");
}

/// /dev/fuse as udev makes it on Debian: open to all. Bare machines without udev have it closed; what
/// was there comes back on drop.
struct OpenDevice(fs::Permissions);

impl OpenDevice {
    fn new() -> Self {
        use std::os::unix::fs::PermissionsExt;
        let before = fs::metadata("/dev/fuse").expect("/dev/fuse").permissions();
        fs::set_permissions("/dev/fuse", fs::Permissions::from_mode(0o666))
            .expect("chmod /dev/fuse");
        Self(before)
    }
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        let _ = fs::set_permissions("/dev/fuse", self.0.clone());
    }
}

#[test]
fn an_ordinary_user_mounts_writes_and_unmounts() {
    let sandbox = Sandbox::new("user");
    open_to_all(&sandbox);
    let _device = OpenDevice::new();
    let firn = copy_for_all(&sandbox);
    let as_nobody = |program: &Path, args: &[&std::ffi::OsStr]| {
        let mut command = Command::new("setpriv");
        sandbox.environment(&mut command);
        command
            .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
            .arg(program)
            .args(args);
        run(&mut command)
    };
    let backing = sandbox.join("backing");
    let point = sandbox.join("mnt");
    as_nobody(
        &firn,
        &["mount".as_ref(), backing.as_os_str(), point.as_os_str()],
    )
    .ok();
    assert!(is_mounted(&point));
    let script = format!("echo text > {0}/file && cat {0}/file", point.display());
    assert_eq!(
        as_nobody(Path::new("sh"), &["-c".as_ref(), script.as_ref()])
            .ok()
            .stdout,
        "text\n"
    );
    as_nobody(&firn, &["umount".as_ref(), point.as_os_str()]).ok();
    assert_eq!(fs::read(backing.join("file")).expect("read"), b"text\n");
}

/// Proves S-write-1.
#[test]
fn firnd_killed_for_want_of_memory_loses_nothing() {
    let Some(cgroup) = MemoryCgroup::new(96 << 20) else {
        println!("skipped: no memory controller is mounted writable under /sys/fs/cgroup");
        return;
    };
    let sandbox = Sandbox::new("oom");
    let mut firn = sandbox.firn(["mount", "--foreground"]);
    firn.arg(sandbox.join("backing")).arg(sandbox.join("mnt"));
    firn.args(["-o", "arena-size=256M,close=held,drain-age=10min"]);
    let mut child = cgroup.spawn(&firn);
    let mut ended = None;
    wait_until(
        "mounted, or refused for want of memory",
        Duration::from_secs(60),
        || {
            ended = child.try_wait().expect("wait");
            ended.is_some() || is_mounted(&sandbox.join("mnt"))
        },
    );
    if ended.is_none() {
        let dir = sandbox.join("mnt/files");
        let log = sandbox.join("log");
        if fs::create_dir(&dir).is_ok() {
            let mut writer = Command::new(helper_binary());
            let mut writer = writer
                .arg("writer")
                .args([&dir, &log])
                .arg("5")
                .spawn()
                .expect("start a writer");
            // The writer stays below the limit's worth of files, so kill firnd here if it still lives.
            wait_child(&mut writer, Duration::from_secs(5));
            child.kill().ok();
            child.wait().expect("wait");
            wait_child(&mut writer, Duration::from_secs(30)).or_else(|| writer.wait().ok());
            FirnMount::new(&sandbox, "arena-size=256M").umount();
            verify(&sandbox.join("backing/files"), &log);
            return;
        }
    }
    // The arena did not fit: firnd died or refused before anything was acknowledged, and a mount
    // outside of the limit works.
    child.kill().ok();
    child.wait().expect("wait");
    FirnMount::new(&sandbox, "arena-size=64M").umount();
}

fn open_to_all(sandbox: &Sandbox) {
    use std::os::unix::fs::{PermissionsExt, chown};
    for dir in [
        sandbox.path(),
        sandbox.runtime(),
        &sandbox.join("backing"),
        &sandbox.join("mnt"),
    ] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).expect("chmod");
    }
    for dir in [
        sandbox.runtime(),
        &sandbox.join("backing"),
        &sandbox.join("mnt"),
    ] {
        chown(dir, Some(65534), Some(65534)).expect("chown");
    }
    fs::set_permissions(sandbox.runtime(), fs::Permissions::from_mode(0o700)).expect("chmod");
}

/// The binary where an ordinary user may run it, for any owner of the build directory.
fn copy_for_all(sandbox: &Sandbox) -> PathBuf {
    let copy = sandbox.join("firn");
    copy_program(&firn_binary(), &copy);
    copy
}

/// A memory cgroup of version 1 or 2.
struct MemoryCgroup {
    dir: PathBuf,
}

impl MemoryCgroup {
    fn new(limit_bytes: u64) -> Option<Self> {
        let name = format!("firn-test-{}", std::process::id());
        for (root, file) in [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            ("/sys/fs/cgroup", "memory.max"),
        ] {
            let dir = Path::new(root).join(&name);
            if fs::create_dir(&dir).is_err() {
                continue;
            }
            let group = Self { dir };
            if fs::write(group.dir.join(file), limit_bytes.to_string()).is_ok() {
                fs::write(group.dir.join("memory.swap.max"), "0").ok();
                return Some(group);
            }
        }
        None
    }

    fn spawn(&self, command: &Command) -> std::process::Child {
        let mut inside = Command::new("sh");
        inside
            .args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""])
            .arg(&self.dir);
        inside.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside.spawn().expect("start in the cgroup")
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        let limit = std::time::Instant::now() + Duration::from_secs(5);
        while fs::remove_dir(&self.dir).is_err() && std::time::Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The kernel may know more files than firnd may hold descriptors.
#[test]
fn with_few_descriptors_firnd_serves_many_files() {
    const FILES: usize = 2000;
    let sandbox = Sandbox::new("descriptors");
    // Without CAP_SYS_RESOURCE root's firnd cannot raise its limit.
    let script = r#"ulimit -n 400 && exec setpriv --bounding-set=-sys_resource \
        "$FIRN" mount "$BACKING" "$POINT""#;
    let backing = sandbox.join("backing");
    let point = sandbox.join("mnt");
    let mut command = Command::new("sh");
    sandbox.environment(&mut command);
    command
        .env("FIRN", firn_binary())
        .env("BACKING", &backing)
        .env("POINT", &point);
    run(command.args(["-c", script])).ok();

    let name = |i: usize| format!("d{}/f{i}", i % 10);
    for dir in 0..10 {
        fs::create_dir(point.join(format!("d{dir}"))).expect("mkdir");
    }
    // Open and unlinked, then let go of by what follows: it must stay readable.
    let mut unlinked = open_rw(&point.join("unlinked"));
    unlinked.write_all(b"still here").expect("write");
    fs::remove_file(point.join("unlinked")).expect("unlink");
    for i in 0..FILES {
        fs::write(point.join(name(i)), name(i)).expect("write a file");
    }
    // A directory moves away under files that were let go of.
    fs::rename(point.join("d3"), point.join("moved")).expect("rename");
    for i in 0..FILES {
        let path = point.join(name(i).replace("d3/", "moved/"));
        assert_eq!(fs::read_to_string(&path).expect("read a file"), name(i));
        assert_eq!(
            fs::metadata(&path).expect("stat").len(),
            name(i).len() as u64
        );
    }
    assert_eq!(read_at(&unlinked, 0, 10), b"still here");
    drop(unlinked);
    for i in (0..FILES).step_by(2) {
        fs::remove_file(point.join(name(i).replace("d3/", "moved/"))).expect("unlink");
    }
    let descriptors =
        fs::read_dir(format!("/proc/{}/fd", status_of(&sandbox, &point).pid)).expect("/proc");
    assert!(descriptors.count() < 400);
    sandbox.run([OsStr::new("umount"), point.as_os_str()]).ok();
    let left: usize = fs::read_dir(&backing)
        .expect("backing")
        .map(|dir| {
            fs::read_dir(dir.expect("entry").path())
                .expect("dir")
                .count()
        })
        .sum();
    assert_eq!(left, FILES / 2);
}
