//! `firn upgrade`: another program goes on with a mount that programs have.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use firn_tests::ack::{returned_operations, verify};
use firn_tests::command::{copy_program, wait_child};
use firn_tests::faultfs::FaultFs;
use firn_tests::mount::SMALL;
use firn_tests::sandbox::{firn_binary, helper_binary};
use firn_tests::transaction::firn;
use firn_tests::{FirnMount, Outcome, Sandbox, run, seed, wait_until};

const WRITERS: u64 = 4;
const READERS: usize = 2;
const READ_BYTES: usize = 16 << 10;

fn options(extra: &str) -> String {
    format!("{SMALL},takeover=auto{extra}")
}

/// Another file with the same program.
fn copy_of_firn(sandbox: &Sandbox) -> PathBuf {
    let copy = sandbox.join("other-firn");
    copy_program(&firn_binary(), &copy);
    copy
}

fn upgrade_by(sandbox: &Sandbox, program: &Path, mount: &Path, options: &str) -> Command {
    let mut command = Command::new(program);
    sandbox.environment(&mut command);
    command.arg("upgrade").arg(mount);
    if !options.is_empty() {
        command.args(["-o", options]);
    }
    command
}

/// Runs `firn upgrade` of `program` and notes the firnd that serves afterwards.
fn upgrade(mount: &mut FirnMount<'_>, sandbox: &Sandbox, program: &Path, more: &str) -> Outcome {
    mount.wait_until_served_well();
    let outcome = run(&mut upgrade_by(sandbox, program, mount.path(), more));
    if outcome.code != 2 {
        mount.note_takeover(mount.pid());
    }
    outcome
}

/// Whether firnd runs the program of this file.
fn runs(mount: &FirnMount<'_>, program: &Path) -> bool {
    let of = |path: &Path| {
        let facts = fs::metadata(path).expect("a program");
        (facts.dev(), facts.ino())
    };
    of(Path::new(&format!("/proc/{}/exe", mount.pid()))) == of(program)
}

struct Writer {
    child: Child,
    dir: PathBuf,
    log: PathBuf,
}

fn start_writers(mount: &FirnMount<'_>, sandbox: &Sandbox, seed: u64) -> Vec<Writer> {
    let start = |index: u64| {
        let dir = mount.join(format!("w{index}"));
        let log = sandbox.join(format!("log{index}"));
        fs::create_dir(&dir).expect("mkdir");
        let mut writer = Command::new(helper_binary());
        writer.arg("writer").arg(&dir).arg(&log);
        writer.arg((seed ^ index).to_string());
        let child = writer.spawn().expect("start a writer");
        Writer { child, dir, log }
    };
    (0..WRITERS).map(start).collect()
}

/// Reads a file again and again, a piece at a time, until told to stop.
fn read_slowly(path: &Path, content: &[u8], stops: &AtomicBool) {
    let file = File::open(path).expect("open");
    let mut piece = vec![0; READ_BYTES];
    for offset in (0..content.len()).step_by(READ_BYTES).cycle() {
        if stops.load(Ordering::Relaxed) {
            return;
        }
        file.read_exact_at(&mut piece, offset as u64).expect("read");
        assert_eq!(piece, content[offset..offset + READ_BYTES]);
        // It is a reader that takes its time.
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Proves S-crash-14.
#[test]
fn another_program_goes_on_under_writers_and_slow_readers() {
    let seed = seed("upgrade");
    let sandbox = Sandbox::new("upgrade");
    let other = copy_of_firn(&sandbox);
    let mut mount = FirnMount::new(
        &sandbox,
        "arena-size=64M,chunk-size=1M,takeover=auto,close=held",
    );
    let content: Vec<u8> = (0..1u32 << 18)
        .flat_map(|word| word.to_le_bytes())
        .collect();
    fs::write(mount.join("read"), &content).expect("write");
    let mut writers = start_writers(&mount, &sandbox, seed);
    let stops = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..READERS {
            scope.spawn(|| read_slowly(&mount.join("read"), &content, &stops));
        }
        let end_readers = StopAtEnd(&stops);
        for program in [&other, &firn_binary(), &other] {
            mount.wait_until_served_well();
            let before = mount.pid();
            let outcome = run(&mut upgrade_by(&sandbox, program, mount.path(), "")).ok();
            print!("{}", outcome.stderr);
            let status = mount.status();
            assert_ne!(status.pid, before);
            assert_eq!(status.upgrade, "done");
            let served_by = fs::metadata(format!("/proc/{}/exe", status.pid)).expect("stat");
            assert_eq!(served_by.ino(), fs::metadata(program).expect("stat").ino());
        }
        drop(end_readers);
    });
    let pid = mount.pid();
    mount.note_takeover(pid);
    for Writer { child, .. } in &mut writers {
        assert!(child.try_wait().expect("wait").is_none(), "a writer ended");
    }
    // A firnd that is killed later is followed by one of the same program.
    mount.kill_and_go_on();
    assert!(runs(&mount, &other));
    let count = |writer: &Writer| returned_operations(&writer.log) as u64;
    let before: Vec<u64> = writers.iter().map(count).collect();
    wait_until("each writer goes on", Duration::from_secs(60), || {
        let mut both = writers.iter().zip(&before);
        both.all(|(writer, before)| count(writer) > *before)
    });
    for Writer { child, .. } in &mut writers {
        child.kill().expect("kill a writer");
        child.wait().expect("wait");
    }
    assert_eq!(mount.status().takeovers, 4);
    assert_eq!(mount.status().lost_open_files, 0);
    let backing = mount.umount();
    for Writer { dir, log, .. } in &writers {
        verify(&backing.join(dir.file_name().expect("a name")), log);
    }
}

/// Ends readers also where the test fails.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Proves S-crash-14.
#[test]
fn options_change_and_those_that_cannot_are_named_while_the_firnd_before_goes_on() {
    let sandbox = Sandbox::new("options");
    let other = copy_of_firn(&sandbox);
    let mut mount = FirnMount::new(&sandbox, &options(""));
    let file = File::create(mount.join("file")).expect("create");
    let mut writes = 0;
    let mut write = || {
        file.write_all_at(b"x", writes)
            .expect("an open file goes on");
        writes += 1;
    };
    write();
    upgrade(&mut mount, &sandbox, &other, "close=held,io-threads=3").ok();
    let in_force = |mount: &FirnMount<'_>| mount.status().options.contains(&"close=held".into());
    assert!(in_force(&mount) && runs(&mount, &other));
    write();
    mount.kill_and_go_on();
    assert!(in_force(&mount), "the next one has them too");
    // Of these the first is named by firnd's own check, the second by what INIT was told.
    for (refused, named) in [
        ("arena-size=1G,ro", "read-only, arena-size"),
        ("passthrough=off", "passthrough"),
    ] {
        let outcome = upgrade(&mut mount, &sandbox, &firn_binary(), refused).code(1);
        assert!(outcome.stderr.contains(named), "{outcome}");
        assert!(
            outcome.stderr.contains("continues the mount as before"),
            "{outcome}"
        );
        let status = mount.status();
        assert!(
            status.upgrade.starts_with("refused: "),
            "{}",
            status.upgrade
        );
        assert!(in_force(&mount) && runs(&mount, &other));
        write();
    }
    // A refused option is not tried again.
    upgrade(&mut mount, &sandbox, &firn_binary(), "").ok();
    assert!(in_force(&mount) && runs(&mount, &firn_binary()));
    let pid = mount.pid();
    upgrade(&mut mount, &sandbox, &other, "no-such-option=1").code(2);
    assert_eq!(mount.status().pid, pid, "nothing was done");
    write();
    drop(file);
    let backing = mount.umount();
    assert_eq!(fs::read(backing.join("file")).expect("read").len(), 5);
}

/// Asks for the upgrade in Firn's own words. Its program is an interpreter of Python, which is no firnd.
const STRANGER: &str = r#"
import json, socket, sys
control = socket.socket(socket.AF_UNIX)
control.connect(sys.argv[1])
control.sendall(b'{"request":"upgrade","options":""}\n')
answer = json.loads(control.makefile().readline())
assert "keeper" in json.dumps(answer), answer
"#;

/// Proves S-crash-14.
#[test]
fn a_program_that_cannot_serve_is_followed_by_the_one_before() {
    let sandbox = Sandbox::new("stranger");
    let mut mount = FirnMount::new(&sandbox, &options(""));
    let file = OpenOptions::new()
        .create_new(true)
        .append(true)
        .open(mount.join("file"));
    let mut file = file.expect("create");
    let socket = sandbox.arena().with_extension("sock");
    for round in 0..6 {
        mount.wait_until_served_well();
        let before = mount.pid();
        run(Command::new("python3").args(["-c", STRANGER]).arg(&socket)).ok();
        file.write_all(b"x").expect("an open file goes on");
        mount.note_takeover(before);
        assert!(runs(&mount, &firn_binary()), "round {round}");
        let upgrade = mount.status().upgrade;
        assert!(upgrade.starts_with("refused: "), "{upgrade}");
    }
    drop(file);
    assert_eq!(mount.status().lost_open_files, 0);
    let backing = mount.umount();
    assert_eq!(fs::read(backing.join("file")).expect("read"), b"xxxxxx");
}

/// A program that others can change is not started.
#[test]
fn a_program_that_others_can_change_is_refused_and_nothing_is_done() {
    let sandbox = Sandbox::new("trust");
    let other = copy_of_firn(&sandbox);
    let mount = FirnMount::new(&sandbox, &options(""));
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    fs::set_permissions(&other, mode).expect("chmod");
    let outcome = run(&mut upgrade_by(&sandbox, &other, mount.path(), "")).code(1);
    assert!(outcome.stderr.contains("lets others in"), "{outcome}");
    assert_eq!(mount.status().pid, mount.pid());
    mount.umount();
}

#[test]
fn a_mount_that_cannot_be_taken_over_refuses_an_upgrade_and_says_why() {
    let sandbox = Sandbox::new("refused");
    let mount = FirnMount::new(&sandbox, &format!("{SMALL},takeover=no"));
    let outcome = run(&mut upgrade_by(&sandbox, &firn_binary(), mount.path(), "")).code(1);
    assert!(outcome.stderr.contains("takeover=no"), "{outcome}");
    assert_eq!(mount.status().pid, mount.pid());
    mount.umount();
}

#[test]
fn an_open_transaction_refuses_an_upgrade_and_goes_on() {
    let sandbox = Sandbox::new("transaction");
    let mut mount = FirnMount::new(&sandbox, &options(",drain=commit"));
    let scope = mount.join("scope");
    fs::create_dir(&scope).expect("mkdir");
    firn(&sandbox, "begin", &scope).ok();
    fs::write(scope.join("file"), "in it").expect("write");
    let refused = run(&mut upgrade_by(&sandbox, &firn_binary(), mount.path(), "")).code(11);
    assert!(refused.stderr.contains("transaction"), "{refused}");
    assert_eq!(mount.status().pid, mount.pid());
    firn(&sandbox, "commit", &scope).ok();
    let other = copy_of_firn(&sandbox);
    upgrade(&mut mount, &sandbox, &other, "").ok();
    assert_eq!(fs::read(scope.join("file")).expect("read"), b"in it");
    upgrade(&mut mount, &sandbox, &firn_binary(), "mode=shadow").code(1);
    assert_eq!(fs::read(scope.join("file")).expect("read"), b"in it");
    mount.umount();
}

/// Proves S-crash-11, S-crash-14.
#[test]
fn a_kill_and_an_upgrade_wait_for_a_backing_that_hangs_and_go_on_with_it() {
    let sandbox = Sandbox::new("hangs");
    let fault = FaultFs::new(&sandbox);
    let mut mount = FirnMount::over(
        &sandbox,
        fault.path(),
        &options(",close=held,drain-age=10min"),
    );
    let file = File::create(mount.join("file")).expect("create");
    file.write_all_at(b"1", 0).expect("write");
    mount.wait_until_served_well();
    let before = mount.pid();
    fault.stall();
    firn_tests::sandbox::kill_alone(before, libc::SIGKILL);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| file.write_all_at(b"2", 1));
        // It cannot end yet: its files of the backing are not closed before the backing answers.
        wait_until("firnd dies", Duration::from_secs(60), || {
            has_no_memory(before)
        });
        fault.go_on();
        let written = waits.join().expect("the writer ends");
        written.expect("the write goes on");
    });
    mount.note_takeover(before);
    mount.wait_until_served_well();
    let before = mount.pid();
    fault.stall();
    let other = copy_of_firn(&sandbox);
    let mut upgrading = upgrade_by(&sandbox, &other, mount.path(), "")
        .spawn()
        .expect("start firn upgrade");
    wait_until("firnd dies", Duration::from_secs(60), || {
        has_no_memory(before)
    });
    assert!(upgrading.try_wait().expect("wait").is_none(), "it waits");
    fault.go_on();
    let ended = wait_child(&mut upgrading, Duration::from_secs(60)).expect("it ends");
    assert!(ended.success());
    mount.note_takeover(before);
    assert!(runs(&mount, &other));
    file.write_all_at(b"3", 2).expect("write");
    drop(file);
    let backing = mount.umount();
    assert_eq!(fs::read(backing.join("file")).expect("read"), b"123");
}

/// Whether a process is on the way to its end.
fn has_no_memory(pid: u32) -> bool {
    fs::read(format!("/proc/{pid}/cmdline")).map_or(true, |words| words.is_empty())
}

/// The kernel names a program by its file; one without a name runs on.
#[test]
fn a_program_that_was_removed_since_goes_on_and_is_followed_by_itself() {
    let sandbox = Sandbox::new("removed");
    let other = copy_of_firn(&sandbox);
    let inode = fs::metadata(&other).expect("stat").ino();
    let mut mount = FirnMount::new(&sandbox, &options(""));
    upgrade(&mut mount, &sandbox, &other, "").ok();
    fs::remove_file(&other).expect("remove");
    mount.kill_and_go_on();
    let program = format!("/proc/{}/exe", mount.pid());
    assert_eq!(fs::metadata(&program).expect("stat").ino(), inode);
    let link = fs::read_link(&program).expect("a link");
    assert_ne!(link.as_os_str(), OsStr::new(""));
    mount.umount();
}
