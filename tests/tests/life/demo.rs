//! `scripts/demo`, in small: what it says at the end, and that it leaves nothing behind.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use firn_tests::command::{PROGRAM_LIMIT, copy_program, exit_code, wait_child};
use firn_tests::sandbox::{firn_binary, kill, mounts_below};
use firn_tests::{Sandbox, run, wait_until};

/// The user `nobody`, as on Debian.
const NOBODY: u32 = 65534;

/// The demo as the user `uid`, in the directory `work` of the sandbox.
fn demo(sandbox: &Sandbox, uid: u32) -> Command {
    let work = sandbox.mkdir("work");
    chown(&work, Some(uid), Some(uid)).expect("chown");
    let mut command = Command::new("setpriv");
    sandbox.environment(&mut command);
    // The demo has a runtime directory of its own, in which this test finds its processes no more than others do.
    command.env_remove("FIRN_RUNTIME_DIR").env("TMPDIR", &work);
    let ids = [format!("--reuid={uid}"), format!("--regid={uid}")];
    command.args(ids).arg("--clear-groups");
    // The user of the demo may not reach the directory of the repository.
    let programs = sandbox.mkdir("programs");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/demo");
    copy_program(&script, &programs.join("demo"));
    for (variable, program) in [
        ("FIRN", "firn"),
        ("HEAT", "firn-example-heat"),
        ("SLOWFS", "firn-slowfs"),
    ] {
        let built = firn_binary().with_file_name(program);
        assert!(
            built.exists(),
            "{built:?} is missing: run `cargo build -p firn -p firn-example-heat -p firn-testfs`"
        );
        copy_program(&built, &programs.join(program));
        command.env(variable, programs.join(program));
    }
    command.arg(programs.join("demo"));
    command.args([
        "--steps", "16", "--every", "4", "--ranks", "2", "--size", "32",
    ]);
    command
}

#[track_caller]
fn expect_nothing_left(sandbox: &Sandbox) {
    assert_eq!(mounts_below(sandbox.path()), Vec::<PathBuf>::new());
    let left = fs::read_dir(sandbox.join("work")).expect("read");
    assert_eq!(left.count(), 0);
}

#[test]
fn the_demo_ends_with_what_the_job_gained() {
    for uid in [0, NOBODY] {
        let sandbox = Sandbox::new("demo");
        let outcome = run(&mut demo(&sandbox, uid)).ok();
        expect_nothing_left(&sandbox);
        let last = outcome.stdout.lines().last().expect("a line");
        let words = "Killed, restarted, the same result; the job waited ";
        assert!(last.starts_with(words), "{outcome}");
        assert!(!outcome.stdout.contains('✗'), "{outcome}");
    }
}

#[test]
fn a_demo_that_is_interrupted_leaves_nothing() {
    // The file system below, and the mount of Firn over it.
    for mounts in [1, 2] {
        let sandbox = Sandbox::new("demostop");
        let mut command = demo(&sandbox, NOBODY);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().expect("start the demo");
        wait_until("it has mounted", PROGRAM_LIMIT, || {
            mounts_below(sandbox.path()).len() == mounts
        });
        kill(child.id(), libc::SIGTERM);
        let status = wait_child(&mut child, PROGRAM_LIMIT).expect("it ends");
        assert_eq!(exit_code(status), 143);
        expect_nothing_left(&sandbox);
    }
}
