//! `firn run`: set up, run, taken down.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use firn_tests::command::{exit_code, wait_child};
use firn_tests::sandbox::{firn_binary, is_mounted, kill};
use firn_tests::{Sandbox, run, wait_until};

/// `firn run` on the sandbox's mount point, in its environment.
fn firn_run(sandbox: &Sandbox, options: &[&str], script: &str) -> Command {
    let mut command = sandbox.firn(["run", "--memory", "64M", "--prefix"]);
    command
        .arg(sandbox.join("mnt"))
        .args(options)
        .args(["--", "sh", "-c", script]);
    command
}

fn left(sandbox: &Sandbox) -> Vec<PathBuf> {
    let all = fs::read_dir(sandbox.runtime()).expect("the runtime directory");
    let mut left: Vec<PathBuf> = all.map(|entry| entry.expect("entry").path()).collect();
    // Records of what happened stay; data does not.
    let told = ["log", "events", "record"];
    let is_data = |path: &PathBuf| {
        let extension = path.extension().and_then(|one| one.to_str());
        extension.is_none_or(|one| !told.contains(&one))
    };
    left.retain(is_data);
    left
}

#[test]
fn a_job_that_succeeds_leaves_its_files_in_the_backing_and_nothing_in_memory() {
    let sandbox = Sandbox::new("run");
    let backing = sandbox.join("new/backing");
    let options = ["--backing", backing.to_str().expect("utf-8")];
    let script = "echo data > $FIRN_PREFIX/f && test ! -s \"$0\"/f && cat $FIRN_PREFIX/f";
    let mut command = firn_run(&sandbox, &options, script);
    let outcome = run(command.arg(&backing)).ok();
    assert_eq!(outcome.stdout, "data\n");
    let summary = format!(
        "firn: the command succeeded; everything is durable in {}: 5 B in 1 file were left to write, ",
        backing.display()
    );
    assert!(outcome.stderr.contains(&summary), "{outcome}");
    assert_eq!(
        fs::read_to_string(backing.join("f")).expect("drained"),
        "data\n"
    );
    assert!(!is_mounted(&sandbox.join("mnt")));
    assert_eq!(left(&sandbox), Vec::<PathBuf>::new());
}

/// Proves S-run-5: the page is for people, the status for scripts.
#[test]
fn a_report_that_cannot_be_written_hides_no_exit_status() {
    let sandbox = Sandbox::new("runreport");
    for (script, code) in [("exit 7", 7), ("exit 0", 1)] {
        let dir = sandbox.mkdir("pages");
        let page = dir.join("run.html");
        let options = ["--report", page.to_str().expect("utf-8")];
        let script = format!("rmdir {}; {script}", dir.display());
        let outcome = run(&mut firn_run(&sandbox, &options, &script)).code(code);
        outcome.says("cannot write the report to");
    }
}

#[test]
fn without_a_backing_nothing_outlives_success() {
    let sandbox = Sandbox::new("runmemory");
    let script = "echo data > $FIRN_PREFIX/f";
    run(&mut firn_run(&sandbox, &[], script))
        .ok()
        .says("the command succeeded; its files were in memory only and are removed");
    let quiet = run(&mut firn_run(&sandbox, &["--quiet"], script)).ok();
    assert_eq!(quiet.stderr, "");
    assert!(!is_mounted(&sandbox.join("mnt")));
    assert_eq!(left(&sandbox), Vec::<PathBuf>::new());
}

/// Proves S-write-14.
#[test]
fn libuv_does_not_use_io_uring_unless_the_user_says_so() {
    let sandbox = Sandbox::new("runuv");
    let script = "echo $UV_USE_IO_URING";
    for (set, expected) in [(None, "0\n"), (Some("1"), "1\n")] {
        let mut command = firn_run(&sandbox, &[], script);
        command.env_remove("UV_USE_IO_URING");
        if let Some(set) = set {
            command.env("UV_USE_IO_URING", set);
        }
        assert_eq!(run(&mut command).ok().stdout, expected);
    }
}

/// Proves S-prune-1.
#[test]
fn old_checkpoints_of_a_job_go_while_it_runs() {
    for frontend in [&[][..], &["-o", "frontend=preload"]] {
        let sandbox = Sandbox::new("runkeep");
        let script = "for step in 1 2 3 4 5; do
                mkdir $FIRN_PREFIX/step$step && echo data > $FIRN_PREFIX/step$step/rank0
            done
            while test -e $FIRN_PREFIX/step1 || test -e $FIRN_PREFIX/step2; do sleep 0.1; done
            cat $FIRN_PREFIX/step3/rank0
            ls $FIRN_PREFIX";
        let options = [&["--keep", "3"][..], frontend].concat();
        let outcome = run(&mut firn_run(&sandbox, &options, script)).ok();
        assert_eq!(outcome.stdout, "data\nstep3\nstep4\nstep5\n");
        assert_eq!(left(&sandbox), Vec::<PathBuf>::new());
    }
}

#[test]
fn a_job_that_is_killed_finds_its_files_again() {
    let sandbox = Sandbox::new("runagain");
    let script = "echo data > $FIRN_PREFIX/f; kill -9 $$";
    run(&mut firn_run(&sandbox, &[], script))
        .code(137)
        .says("the command was killed by signal 9; 5 B of its files stay in memory")
        .says("firn mount");
    assert!(!is_mounted(&sandbox.join("mnt")));
    let listed = sandbox.run(["status"]).stdout;
    assert!(
        listed.contains("holds 5 B of a run that failed: the same `firn run`"),
        "{listed}"
    );
    let again = run(&mut firn_run(&sandbox, &[], "cat $FIRN_PREFIX/f; exit 7")).code(7);
    assert_eq!(again.stdout, "data\n");
    assert_eq!(
        run(&mut firn_run(&sandbox, &[], "cat $FIRN_PREFIX/f"))
            .ok()
            .stdout,
        "data\n"
    );
    assert_eq!(left(&sandbox), Vec::<PathBuf>::new());
}

/// Proves S-run-2: the host goes to others when the job is over.
#[test]
fn in_a_batch_job_a_command_that_fails_leaves_nothing_in_memory() {
    let sandbox = Sandbox::new("runbatch");
    let backing = sandbox.join("backing");
    let options = ["--backing", backing.to_str().expect("utf-8")];
    let mut command = firn_run(&sandbox, &options, "echo data > $FIRN_PREFIX/f; exit 7");
    // As in a job of this one host.
    for (name, value) in [
        ("SLURM_JOB_ID", "17"),
        ("SLURM_JOB_NUM_NODES", "1"),
        ("SLURMD_NODENAME", "here"),
    ] {
        command.env(name, value);
    }
    run(&mut command)
        .code(7)
        .says("the command failed with exit status 7; everything is durable in");
    let written = fs::read_to_string(backing.join("f")).expect("drained");
    assert_eq!(written, "data\n");
    assert_eq!(left(&sandbox), Vec::<PathBuf>::new());
}

/// As in a container whose /dev/shm has 16 MiB, as large as memory for files or not.
#[test]
fn a_dev_shm_that_is_too_small_is_told_and_the_job_not_started() {
    for frontend in [&[][..], &["-o", "frontend=preload"]] {
        let sandbox = Sandbox::new("runsmall");
        let run_in_little = |memory: &str| {
            let mut command = Command::new("unshare");
            sandbox.environment(&mut command);
            let little = "mount -t tmpfs -o size=16m,mode=700 firn-test \"$FIRN_RUNTIME_DIR\" && exec \"$@\"";
            command
                .args(["-m", "sh", "-c", little, "sh"])
                .arg(firn_binary());
            command
                .args(["run", "--memory", memory, "--prefix"])
                .arg(sandbox.join("mnt"))
                .args(frontend);
            command.args([
                "--",
                "sh",
                "-c",
                "echo started; echo data > $FIRN_PREFIX/f && cat $FIRN_PREFIX/f",
            ]);
            run(&mut command)
        };
        let outcome = run_in_little("64M")
            .says("arena-size=64M needs ")
            .says("which has 16.0 MiB free: mount with -o arena-size=");
        assert!(outcome.code != 0 && outcome.stdout.is_empty(), "{outcome}");
        assert!(sandbox.processes().is_empty(), "a firnd is left");
        assert!(!is_mounted(&sandbox.join("mnt")));
        // What the message says fits.
        let (_, size) = outcome
            .stderr
            .split_once("mount with -o arena-size=")
            .expect("a size");
        let (size, _) = size.split_once(',').expect("a size");
        assert_eq!(run_in_little(size).ok().stdout, "started\ndata\n");
    }
}

#[test]
fn signals_reach_the_job_and_its_exit_status_comes_back() {
    let sandbox = Sandbox::new("runsignal");
    let ready = sandbox.join("mnt/ready");
    let script = "trap 'exit 42' TERM; echo > $FIRN_PREFIX/ready; while :; do sleep 0.05; done";
    let mut child = firn_run(&sandbox, &[], script)
        .stderr(Stdio::null())
        .spawn()
        .expect("firn run");
    wait_until("the job runs", Duration::from_secs(30), || ready.exists());
    kill(child.id(), libc::SIGTERM);
    let status = wait_child(&mut child, Duration::from_secs(30)).expect("it ends");
    assert_eq!(exit_code(status), 42);
}

#[test]
fn a_command_that_is_not_there_is_127_and_leaves_nothing() {
    let sandbox = Sandbox::new("runmissing");
    let mut command = sandbox.firn(["run", "--memory", "64M", "--prefix"]);
    command
        .arg(sandbox.join("mnt"))
        .args(["--", "no-such-command"]);
    run(&mut command).code(127).says("no-such-command");
    assert!(!is_mounted(&sandbox.join("mnt")));
    assert_eq!(left(&sandbox), Vec::<PathBuf>::new());
}

#[test]
fn every_rank_of_an_mpi_job_has_the_prefix() {
    let sandbox = Sandbox::new("runmpi");
    let script = "mpirun --allow-run-as-root --oversubscribe -n 4 \
        sh -c 'echo $OMPI_COMM_WORLD_RANK > $FIRN_PREFIX/rank$OMPI_COMM_WORLD_RANK' && cat $FIRN_PREFIX/rank* | xargs";
    assert_eq!(
        run(&mut firn_run(&sandbox, &[], script)).ok().stdout,
        "0 1 2 3\n"
    );
}
