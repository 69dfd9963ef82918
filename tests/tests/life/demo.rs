//! `scripts/demo`, in small: what it says at the end, and that it leaves nothing behind.

use std::fs;
use std::os::unix::fs::chown;
use std::path::Path;
use std::process::Command;

use firn_tests::command::copy_program;
use firn_tests::sandbox::{firn_binary, mounts_below};
use firn_tests::{Outcome, Sandbox, run};

/// Nobody, as on Debian.
const NOBODY: u32 = 65534;

/// Runs it as the user `uid`, in a directory of the sandbox.
fn demo(sandbox: &Sandbox, uid: u32) -> Outcome {
    let work = sandbox.mkdir("work");
    chown(&work, Some(uid), Some(uid)).expect("chown");
    let mut command = Command::new("setpriv");
    sandbox.environment(&mut command);
    // The demo has a runtime directory of its own, in which this test finds its processes no more than others do.
    command.env_remove("FIRN_RUNTIME_DIR").env("TMPDIR", &work);
    let ids = [format!("--reuid={uid}"), format!("--regid={uid}")];
    command.args(ids).arg("--clear-groups");
    // Whoever runs it may not reach the directory of the repository.
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
    let outcome = run(&mut command);
    assert_eq!(
        mounts_below(sandbox.path()),
        Vec::<std::path::PathBuf>::new()
    );
    assert_eq!(fs::read_dir(&work).expect("read").count(), 0, "{outcome}");
    outcome
}

#[test]
fn the_demo_ends_with_what_the_job_gained() {
    for uid in [0, NOBODY] {
        let sandbox = Sandbox::new("demo");
        let outcome = demo(&sandbox, uid).ok();
        let last = outcome.stdout.lines().last().expect("a line");
        let words = "Killed, restarted, the same result; the job waited ";
        assert!(last.starts_with(words), "{outcome}");
        assert!(!outcome.stdout.contains('✗'), "{outcome}");
    }
}
