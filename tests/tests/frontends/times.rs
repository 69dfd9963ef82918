//! Times of modification of held files: what programs saw before every process was killed, or before
//! `firn umount --keep-held`, is what they see afterwards and what the backing gets.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File, FileTimes, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use firn_format::piece::word;
use firn_format::superblock::Superblock;
use firn_tests::fsops::{open_rw, read};
use firn_tests::preloaded::DIRECT_AFTER;
use firn_tests::random::bytes;
use firn_tests::sandbox::{kill, preload_library};
use firn_tests::{FirnMount, Sandbox, run, wait_until};

const DEMAND: &str = "memory=32M,chunk-size=1M,drain=demand";
/// Times of the files at or below a directory, by name: seconds and nanoseconds.
type Times = BTreeMap<String, (i64, i64)>;

fn times(top: &Path) -> Times {
    let time = |entry: fs::DirEntry| {
        let meta = entry.metadata().expect("stat");
        (
            entry.file_name().into_string().expect("a name"),
            (meta.mtime(), meta.mtime_nsec()),
        )
    };
    fs::read_dir(top)
        .expect("a directory")
        .map(|entry| time(entry.expect("an entry")))
        .collect()
}

/// Long enough for another time, and for what a recovery or a drain does to have one that is clearly later.
fn later() {
    std::thread::sleep(Duration::from_millis(50));
}

fn long_ago() -> FileTimes {
    FileTimes::new().set_modified(SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 123))
}

fn next_month() -> FileTimes {
    FileTimes::new().set_modified(SystemTime::now() + Duration::from_secs(30 * 86_400))
}

/// Files whose last change was made in every way that there is. All but the first write of each is later than the
/// backing's time of it.
fn change(top: &Path) {
    let file = |name: &str| {
        let file = File::create_new(top.join(name)).expect("create");
        file.write_all_at(&bytes(1, 100_000), 0).expect("write");
        later();
        file
    };
    file("overwritten")
        .write_all_at(b"in place", 5000)
        .expect("write");
    file("appended")
        .write_all_at(b"more", 100_000)
        .expect("write");
    file("scattered")
        .write_all_at(b"elsewhere", 300_000)
        .expect("write");
    file("cut").set_len(50_000).expect("truncate");
    file("grown").set_len(500_000).expect("truncate");
    file("set").set_times(long_ago()).expect("utimens");
    file("set-ahead").set_times(next_month()).expect("utimens");
    let both = file("set-and-written");
    both.set_times(long_ago()).expect("utimens");
    both.write_all_at(b"in place", 5000).expect("write");
    let both = file("ahead-and-appended");
    both.set_times(next_month()).expect("utimens");
    both.write_all_at(b"more", 100_000).expect("write");
    let both = file("written-and-set");
    both.write_all_at(b"in place", 5000).expect("write");
    both.set_times(long_ago()).expect("utimens");
    // The piece with the latest time goes, and another one stays.
    let both = file("latest-is-gone");
    both.write_all_at(&bytes(2, 1000), 200_000).expect("write");
    both.set_len(150_000).expect("truncate");
}

/// Proves S-attr-1, S-attr-2, S-attr-8.
#[test]
fn regression_held_files_keep_their_times_through_kills_and_umount_keep_held() {
    let sandbox = Sandbox::new("times");
    let mount = FirnMount::new(&sandbox, DEMAND);
    change(mount.path());
    let expected = times(mount.path());
    assert_eq!(expected["set"], (1_000_000_000, 123));
    later();
    let backing = mount.kill();
    assert_ne!(
        times(&backing)["appended"],
        expected["appended"],
        "the test shows nothing"
    );

    let mount = FirnMount::over(&sandbox, &backing, DEMAND);
    assert_eq!(times(mount.path()), expected, "after a kill");
    let point = mount.path().to_owned();
    sandbox
        .run([
            OsStr::new("umount"),
            OsStr::new("--keep-held"),
            point.as_os_str(),
        ])
        .ok();
    mount.abandon();

    let mount = FirnMount::over(&sandbox, &backing, DEMAND);
    assert_eq!(times(mount.path()), expected, "after umount --keep-held");
    let backing = mount.umount();
    assert_eq!(times(&backing), expected, "in the backing");
}

/// Proves S-attr-2, S-attr-8: what a recovery drains, in a mount and without one.
#[test]
fn regression_a_recovery_drains_with_the_times_of_the_writes() {
    for recovers in [true, false] {
        let sandbox = Sandbox::new("timesdrained");
        let mount = FirnMount::new(&sandbox, DEMAND);
        change(mount.path());
        let expected = times(mount.path());
        later();
        let backing = mount.kill();
        if recovers {
            sandbox
                .run([OsStr::new("recover"), backing.as_os_str()])
                .ok();
        } else {
            let mount = FirnMount::over(&sandbox, &backing, "memory=32M,chunk-size=1M,close=held");
            wait_until("all is drained", Duration::from_secs(30), || {
                mount.status().held_bytes == 0
            });
            mount.umount();
        }
        assert_eq!(times(&backing), expected, "with `firn recover`: {recovers}");
    }
}

/// Proves S-attr-2, S-attr-8: chunks that moved to the spill file.
#[test]
fn regression_spilled_files_keep_their_times() {
    let sandbox = Sandbox::new("timesspilled");
    let spill = sandbox.join("spill");
    let options = format!(
        "memory=8M,chunk-size=1M,drain=demand,spill={},spill-size=64M",
        spill.display()
    );
    let mount = FirnMount::new(&sandbox, &options);
    for n in 0..20 {
        fs::write(mount.join(format!("f{n}")), bytes(n, 1 << 20)).expect("write");
    }
    wait_until("chunks move", Duration::from_secs(30), || {
        mount.status().spill.is_some_and(|s| s.used_bytes > 0)
    });
    later();
    for n in [0, 19] {
        open_rw(&mount.join(format!("f{n}")))
            .write_all_at(b"later", 77)
            .expect("write");
    }
    let expected = times(mount.path());
    later();
    let backing = mount.kill();
    let mount = FirnMount::over(&sandbox, &backing, &options);
    assert_eq!(times(mount.path()), expected, "after a kill");
    assert_eq!(times(&mount.umount()), expected, "in the backing");
}

/// A program under the preload library that changes files in the directory that is its argument, tells the times
/// that it sees and waits, with the files open.
fn writer(sandbox: &Sandbox, top: &Path) -> std::process::Child {
    let script = r"
import os, sys, time
os.chdir(sys.argv[1]); kept = []
def made(name):
    f = os.open(name, os.O_CREAT | os.O_RDWR); os.write(f, b'1' * 100000); time.sleep(0.05); kept.append(f); return f
os.write(made('appended'), b'2' * 100)
os.pwrite(made('scattered'), b'2' * 100, 300000)
f = made('set'); os.utime('set', ns=(5, 1000000000000000123))
f = made('set-and-written'); os.utime('set-and-written', ns=(5, 1000000000000000123)); os.write(f, b'2' * 100)
f = made('many')
for i in range(1000): os.write(f, b'3' * 64)
print(' '.join('%s=%d' % (n, os.stat(n).st_mtime_ns) for n in sorted(os.listdir('.'))), flush=True)
time.sleep(0.05); os.write(kept[0], b'4')
print('ready %d' % time.time_ns(), flush=True); time.sleep(1000)";
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-c", script]).arg(top);
    sandbox.environment(&mut command);
    command
        .env("LD_PRELOAD", preload_library())
        .env(DIRECT_AFTER, "0")
        .stdout(std::process::Stdio::piped());
    command.spawn().expect("python")
}

/// What [`writer`] saw, and when it was ready.
fn told(child: &mut std::process::Child) -> (Times, i64) {
    use std::io::{BufRead, BufReader};
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut line = || lines.next().expect("a line").expect("text");
    let time = |pair: &str| {
        let (name, ns) = pair.split_once('=').expect("name=time");
        let ns: i64 = ns.parse().expect("a number");
        (name.to_owned(), (ns / 1_000_000_000, ns % 1_000_000_000))
    };
    let seen = line().split(' ').map(time).collect();
    let ready = line()
        .strip_prefix("ready ")
        .expect("ready")
        .parse()
        .expect("a number");
    (seen, ready)
}

/// What was written by direct access, and firnd had not looked at: `appended` was written once more after its time was
/// asked for.
fn assert_kept(found: &Times, (seen, ready): &(Times, i64), when: &str) {
    for (name, time) in seen.iter().filter(|(name, _)| *name != "appended") {
        assert_eq!(found[name], *time, "{name} {when}");
    }
    let ns = |(s, ns): (i64, i64)| s * 1_000_000_000 + ns;
    let last = ns(found["appended"]);
    let before = ns(seen["appended"]);
    assert!(
        before + 40_000_000 < last && last <= *ready,
        "{when}: {before}, then {last}, ready at {ready}"
    );
}

/// Proves S-attr-2, S-direct-1.
#[test]
fn regression_times_of_writes_by_direct_access_outlive_firnd_and_the_writer() {
    let sandbox = Sandbox::new("timesdirect");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let mut child = writer(&sandbox, mount.path());
    let told = told(&mut child);
    let backing = mount.kill();
    child.kill().expect("kill");
    child.wait().expect("wait");
    later();
    let mount = FirnMount::over(&sandbox, &backing, DEMAND);
    assert_kept(&times(mount.path()), &told, "after a kill");
    assert_kept(&times(&mount.umount()), &told, "in the backing");
}

/// Proves S-stub-2, S-stub-4.
#[test]
fn regression_times_of_a_stub_tree_outlive_firnd_and_the_writer() {
    let sandbox = Sandbox::new("timesstub");
    let options = format!("{DEMAND},frontend=preload");
    let mount = FirnMount::new(&sandbox, &options);
    let mut child = writer(&sandbox, mount.path());
    let told = told(&mut child);
    kill(mount.pid(), libc::SIGKILL);
    mount.wait_for_end();
    let backing = mount.backing().to_owned();
    mount.abandon();
    child.kill().expect("kill");
    child.wait().expect("wait");
    later();
    let mount = FirnMount::over(&sandbox, &backing, &options);
    let script = "import os, sys; os.chdir(sys.argv[1])
print(' '.join('%s=%d' % (n, os.stat(n).st_mtime_ns) for n in sorted(os.listdir('.'))))";
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-c", script]).arg(mount.path());
    sandbox.environment(&mut command);
    run(command.env("LD_PRELOAD", preload_library())).ok();
    sandbox
        .run([
            OsStr::new("drain"),
            OsStr::new("--wait"),
            mount.path().as_os_str(),
        ])
        .ok();
    assert_kept(&times(&backing), &told, "in the backing");
    assert_kept(&times(mount.path()), &told, "on the stubs");
    mount.umount();
}

/// Proves S-attr-2, S-attr-9: a time that no write can have had is taken as that of the mount.
#[test]
fn a_time_in_the_future_becomes_the_present() {
    let sandbox = Sandbox::new("timesfuture");
    let mount = FirnMount::new(&sandbox, DEMAND);
    fs::write(mount.join("f"), bytes(1, 1000)).expect("write");
    let backing = mount.kill();
    let arena: PathBuf = sandbox.arena();
    let geometry = Superblock::decode(&read(&arena)[..4096])
        .expect("a superblock")
        .geometry;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&arena)
        .expect("open");
    let record = |chunk, record| geometry.record_offset(chunk, record) + word::MODIFIED;
    for at in (0..geometry.records_per_chunk()).map(|index| record(0, index)) {
        file.write_all_at(&u64::MAX.to_le_bytes(), at)
            .expect("damage");
    }
    let before = SystemTime::now() - Duration::from_millis(50);
    let mount = FirnMount::over(&sandbox, &backing, DEMAND);
    let found = fs::metadata(mount.join("f"))
        .expect("stat")
        .modified()
        .expect("a time");
    assert!(before <= found && found <= SystemTime::now(), "{found:?}");
    later();
    fs::write(mount.join("f"), b"again").expect("write");
    let again = fs::metadata(mount.join("f"))
        .expect("stat")
        .modified()
        .expect("a time");
    assert!(
        found < again && again <= SystemTime::now(),
        "{found:?}, then {again:?}"
    );
    mount.umount();
}

/// Touches a file and looks at it, writes a second one, and makes a third one, all within a tick of the clock; as make(1) does
/// again and again.
const IN_ORDER: &str = r#"
import os, sys
top = sys.argv[1]
for number in range(200):
    a, b, c = (f"{top}/{name}{number}" for name in "abc")
    open(a, "a").close(); os.utime(a); os.stat(a)
    with open(b, "wb", buffering=0) as file:
        file.write(b"x" * 70_000); file.write(b"y")
    os.mkdir(c)
"#;

fn assert_in_order(top: &Path, what: &str) {
    let times = times(top);
    for number in 0..200 {
        let [a, b, c] = ["a", "b", "c"].map(|name| times[&format!("{name}{number}")]);
        assert!(a <= b && b <= c, "{what}, {number}: {a:?}, {b:?}, {c:?}");
    }
}

/// Proves S-attr-11.
#[test]
fn what_is_changed_later_is_not_older() {
    for direct in [false, true] {
        let sandbox = Sandbox::new("in-order");
        let mount = FirnMount::new(&sandbox, "memory=64M,chunk-size=1M");
        let mut script = Command::new("python3");
        script.args(["-c", IN_ORDER]).arg(mount.path());
        if direct {
            script.env("LD_PRELOAD", preload_library());
            script.env(DIRECT_AFTER, "0");
        }
        run(&mut script).ok();
        assert_in_order(mount.path(), "mounted");
        let backing = mount.backing().to_owned();
        mount.umount();
        assert_in_order(&backing, "in the backing");
    }
}
