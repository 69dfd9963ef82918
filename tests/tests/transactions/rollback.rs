//! A program whose memory is taken back to a checkpoint, and its files with it or not: examples/rollback,
//! checkpointed by CRIU with scripts/criu-action, and by itself.
//!
//! The two failures without Firn are those of figures 1 and 2 of the CprFS paper: what was written after the
//! checkpoint is read (an open file), and is appended again (a file that was closed at the checkpoint).

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use firn_tests::command::write_program;
use firn_tests::fsops::read;
use firn_tests::sandbox::{firn_binary, kill};
use firn_tests::suite::{has_criu, tool};
use firn_tests::{FirnMount, Sandbox, run, wait_until};

const COMMIT: &str = "arena-size=32M,chunk-size=1M,drain=commit";
/// 4 s at least: it must not end before a test has seen that it runs.
const STEPS: &str = "400";
const LIMIT: Duration = Duration::from_secs(60);

/// What each part of the program says when its file was not rolled back.
const FAILURES: [(&str, &str); 6] = [
    ("counter", "it was written after the checkpoint"),
    ("mapping", "it was written after the checkpoint"),
    (
        "log",
        "what was appended after the checkpoint is there twice",
    ),
    (
        "journal",
        "what was appended after the checkpoint is there twice",
    ),
    ("state", "it was replaced after the checkpoint"),
    (
        "queue",
        "is missing: it was removed or renamed after the checkpoint",
    ),
];

/// Which program takes the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// CRIU, from outside.
    Criu,
    /// The program, when it is told to.
    Itself,
}

/// How far a checkpoint is when everything is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Cut {
    /// The memory is saved, under a name that does not count.
    Saved,
    /// `firn prepare` is done.
    Prepared,
    /// The saved memory counts.
    Marked,
    /// `firn commit --begin` is done.
    Committed,
}

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("tests/ is in the repository")
}

/// The program and its checkpoints. The sandbox ends it, restored or not: its environment says whose it is.
struct Job<'a> {
    sandbox: &'a Sandbox,
    by: By,
    dir: PathBuf,
    parts: Vec<&'static str>,
    /// The directory whose transaction goes with it.
    in_firn: bool,
    pid: u32,
}

impl<'a> Job<'a> {
    /// Starts the program in `dir` and waits until it is at work.
    fn start(
        sandbox: &'a Sandbox,
        by: By,
        dir: &Path,
        in_firn: bool,
        parts: &[&'static str],
    ) -> Self {
        sandbox.mkdir("images");
        let mut job = Self {
            sandbox,
            by,
            dir: dir.to_owned(),
            parts: parts.to_vec(),
            in_firn,
            pid: 0,
        };
        job.spawn(&[]);
        job.wait_for_step(20);
        job
    }

    fn spawn(&mut self, more: &[&OsStr]) {
        let mut command = self.program("10");
        command
            .arg("--tell")
            .arg(self.step_file())
            .arg("--save")
            .arg(self.sandbox.join("images/memory"));
        command.args(more).arg(&self.dir).args(&self.parts);
        let errors = File::options()
            .create(true)
            .append(true)
            .open(self.sandbox.join("errors"));
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors.expect("open the log"));
        fs::remove_file(self.step_file()).ok();
        // SAFETY: setsid touches no memory. CRIU dumps whole sessions.
        unsafe { command.pre_exec(|| rustix::process::setsid().map(|_| ()).map_err(Into::into)) };
        self.pid = command.spawn().expect("start the program").id();
    }

    fn program(&self, pause_ms: &str) -> Command {
        let mut command = Command::new(self.sandbox.join("rollback"));
        self.sandbox.environment(&mut command);
        command.args(["--steps", STEPS, "--pause", pause_ms]);
        command
    }

    fn step_file(&self) -> PathBuf {
        self.sandbox.join("step")
    }

    fn step(&self) -> u64 {
        let line = fs::read_to_string(self.step_file()).unwrap_or_default();
        line.trim()
            .strip_prefix("step ")
            .and_then(|number| number.parse().ok())
            .unwrap_or(0)
    }

    fn wait_for_step(&self, step: u64) {
        wait_until("the program is so far", LIMIT, || {
            assert!(
                state(self.pid) != 'Z',
                "the program ended: {}",
                self.errors()
            );
            self.step() >= step
        });
    }

    fn errors(&self) -> String {
        fs::read_to_string(self.sandbox.join("errors")).unwrap_or_default()
    }

    fn firn(&self, verb: &str, id: Option<u64>, more: &[&str]) {
        let mut command = self.sandbox.firn([OsStr::new(verb), self.dir.as_os_str()]);
        if let Some(id) = id {
            command.args(["--id", &id.to_string()]);
        }
        run(command.args(more)).ok();
    }

    fn images(&self, id: u64) -> PathBuf {
        self.sandbox.join(format!("images/{id}"))
    }

    fn criu(&self, verb: &str, id: u64) -> Command {
        let mut command = Command::new(tool("criu"));
        self.sandbox.environment(&mut command);
        command
            .arg(verb)
            .arg("-D")
            .arg(self.images(id))
            .args(["-o", &format!("{verb}.log")]);
        if self.in_firn {
            command
                .arg("--action-script")
                .arg(repository().join("scripts/criu-action"));
            command
                .env("FIRN_DIR", &self.dir)
                .env("FIRN", firn_binary());
        }
        command
    }

    /// Checkpoint `id`; the program runs on for 20 steps at least, after which its files are others.
    fn checkpoint_and_run_on(&self, id: u64) {
        match self.by {
            By::Criu => {
                fs::create_dir(self.images(id)).expect("mkdir");
                let mut dump = self.criu("dump", id);
                run(dump.args(["--leave-running", "-t", &self.pid.to_string()])).ok();
            }
            By::Itself => {
                self.save(id, Cut::Committed);
                kill(self.pid, libc::SIGCONT);
            }
        }
        self.wait_for_step(self.step() + 20);
    }

    /// An application-level checkpoint up to `cut`; the program is stopped.
    fn save(&self, id: u64, cut: Cut) {
        kill(self.pid, libc::SIGUSR1);
        wait_until("it is saved and stopped", LIMIT, || state(self.pid) == 'T');
        if self.in_firn && cut >= Cut::Prepared {
            self.firn("prepare", Some(id), &[]);
        }
        if cut >= Cut::Marked {
            fs::create_dir(self.images(id)).expect("mkdir");
            fs::rename(
                self.sandbox.join("images/memory"),
                self.images(id).join("memory"),
            )
            .expect("mark");
        }
        if self.in_firn && cut >= Cut::Committed {
            self.firn("commit", Some(id), &["--begin"]);
        }
    }

    fn restore(&mut self, id: u64) {
        assert!(self.is_restored(id), "CRIU cannot restore {id}");
    }

    fn is_restored(&mut self, id: u64) -> bool {
        match self.by {
            By::Criu => {
                fs::remove_file(self.step_file()).ok();
                // A sibling of criu is a child of this process, which waits for it.
                run(self.criu("restore", id).args(["-d", "--restore-sibling"])).code == 0
            }
            By::Itself => {
                if self.in_firn {
                    self.firn("restore", Some(id), &[]);
                    self.firn("begin", None, &[]);
                }
                let memory = self.images(id).join("memory");
                self.spawn(&[OsStr::new("--load"), memory.as_os_str()]);
                true
            }
        }
    }

    fn kill(&self) {
        kill(self.pid, libc::SIGKILL);
        assert_eq!(
            self.wait(),
            None,
            "it ended before it was killed: {}",
            self.errors()
        );
    }

    /// Its exit code; none after a signal.
    fn wait(&self) -> Option<i32> {
        let pid = rustix::process::Pid::from_raw(self.pid as i32);
        let mut status = None;
        wait_until("the program ends", LIMIT, || {
            let options = rustix::process::WaitOptions::NOHANG;
            status = rustix::process::waitpid(pid, options).expect("a child of this process");
            status.is_some()
        });
        status.and_then(|(_, status)| status.exit_status())
    }
}

/// The letter of proc(5); `Z` also for what is no more.
fn state(pid: u32) -> char {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ")
        .next()
        .and_then(|rest| rest.chars().next())
        .unwrap_or('Z')
}

fn build(sandbox: &Sandbox) {
    let source = repository().join("examples/rollback/rollback.c");
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(sandbox.join("rollback"));
    run(cc.arg(source)).ok();
}

fn files_stay_and_it_fails(by: By) {
    let sandbox = Sandbox::new("rollback-plain");
    build(&sandbox);
    for (id, (part, failure)) in (1..).zip(FAILURES) {
        let mut job = Job::start(&sandbox, by, &sandbox.mkdir(part), false, &[part]);
        job.checkpoint_and_run_on(id);
        job.kill();
        if !job.is_restored(id) {
            // A file that was open when the program was dumped is gone: CRIU misses it before the program does.
            let log = fs::read_to_string(job.images(id).join("restore.log")).expect("CRIU's log");
            assert!(log.contains("No such file"), "{part}: {log}");
            continue;
        }
        assert_eq!(job.wait(), Some(1), "{part}: {}", job.errors());
        let errors = job.errors();
        assert!(errors.contains(failure), "{part}: {errors}");
        println!("{part}: {}", errors.trim());
        fs::remove_file(sandbox.join("errors")).expect("remove");
    }
}

/// Files and what is in them.
fn contents(dir: &Path) -> BTreeMap<OsString, Vec<u8>> {
    let entries = fs::read_dir(dir)
        .expect("readdir")
        .map(|entry| entry.expect("entry"));
    let files = entries.filter(|entry| entry.file_name() != ".firn");
    files
        .map(|entry| (entry.file_name(), read(&entry.path())))
        .collect()
}

/// Waits for the end of the job, commits, unmounts; the backing is that of an undisturbed run.
fn ends_as_if_undisturbed(job: &Job<'_>, mount: FirnMount<'_>, what: &str) {
    assert_eq!(job.wait(), Some(0), "{what}: {}", job.errors());
    job.firn("commit", None, &[]);
    let dir = job.dir.strip_prefix(mount.path());
    let dir = dir.expect("the job is in the mount").to_owned();
    let backing = mount.umount().join(dir);
    assert_eq!(job.errors(), "", "{what}");
    let undisturbed = job.sandbox.mkdir("undisturbed");
    run(job.program("0").arg(&undisturbed)).ok();
    assert!(
        contents(&backing) == contents(&undisturbed),
        "{what}: {:?}",
        contents(&backing).keys()
    );
}

fn begun(sandbox: &Sandbox) -> FirnMount<'_> {
    let mount = FirnMount::new(sandbox, COMMIT);
    sandbox
        .run([OsStr::new("begin"), mount.path().as_os_str()])
        .ok();
    mount
}

fn files_go_back_and_it_ends_as_if_undisturbed(by: By) {
    let sandbox = Sandbox::new("rollback-firn");
    build(&sandbox);
    let mut mount = begun(&sandbox);
    let mut job = Job::start(&sandbox, by, mount.path(), true, &[]);
    for (id, with_firnd) in [(1, false), (2, true), (3, true)] {
        job.checkpoint_and_run_on(id);
        job.kill();
        if with_firnd {
            mount.kill();
            mount = FirnMount::new(&sandbox, COMMIT);
        }
        job.restore(id);
        job.wait_for_step(1);
    }
    ends_as_if_undisturbed(&job, mount, "killed three times");
}

#[test]
fn without_firn_a_program_that_is_rolled_back_finds_files_that_are_not() {
    files_stay_and_it_fails(By::Itself);
}

/// Proves S-tx-2, S-tx-3, S-tx-7.
#[test]
fn with_firn_the_files_of_a_program_are_rolled_back_with_it() {
    files_go_back_and_it_ends_as_if_undisturbed(By::Itself);
}

#[test]
fn without_firn_a_program_that_criu_restores_finds_files_that_are_not() {
    if has_criu() {
        files_stay_and_it_fails(By::Criu);
    }
}

#[test]
fn with_firn_and_its_action_script_criu_restores_a_program_with_its_files() {
    if has_criu() {
        files_go_back_and_it_ends_as_if_undisturbed(By::Criu);
    }
}

/// Proves S-tx-4, S-tx-7.
#[test]
fn a_checkpoint_that_is_cut_anywhere_leaves_files_for_the_newest_that_counts() {
    for cut in [Cut::Saved, Cut::Prepared, Cut::Marked, Cut::Committed] {
        let sandbox = Sandbox::new("rollback-cut");
        build(&sandbox);
        let mount = begun(&sandbox);
        let mut job = Job::start(&sandbox, By::Itself, mount.path(), true, &[]);
        job.checkpoint_and_run_on(1);
        job.save(2, cut);
        job.kill();
        mount.kill();
        let mount = FirnMount::new(&sandbox, COMMIT);
        job.restore(if job.images(2).exists() { 2 } else { 1 });
        ends_as_if_undisturbed(&job, mount, &format!("cut when {cut:?}"));
    }
}

/// Proves S-tx-100, S-tx-102: the directory of the program, made by its transaction and renamed while the program is in
/// it, is rolled back with the files.
#[test]
fn with_firn_the_name_of_the_directory_of_a_program_is_rolled_back_with_it() {
    for options in [COMMIT, &format!("{COMMIT},mode=shadow")] {
        let sandbox = Sandbox::new("rollback-name");
        build(&sandbox);
        let mut mount = FirnMount::new(&sandbox, options);
        let [run_dir, renamed] = ["run", "renamed"].map(|name| mount.join(name));
        let create = || {
            let begin = [OsStr::new("begin"), run_dir.as_os_str()];
            let create = [OsStr::new("--create")];
            sandbox.run(begin.into_iter().chain(create)).ok();
        };

        // Without a checkpoint nothing stays, whatever the directory is called by then.
        create();
        let job = Job::start(&sandbox, By::Itself, &run_dir, true, &[]);
        fs::rename(&run_dir, &renamed).expect("rename");
        job.wait_for_step(job.step() + 5);
        job.kill();
        mount.kill();
        mount = FirnMount::new(&sandbox, options);
        assert_eq!(fs::read_dir(mount.path()).expect("list").count(), 0);

        create();
        let mut job = Job::start(&sandbox, By::Itself, &run_dir, true, &[]);
        for (id, with_firnd) in [(1, false), (2, true)] {
            job.checkpoint_and_run_on(id);
            fs::rename(&run_dir, &renamed).expect("rename");
            job.wait_for_step(job.step() + 5);
            job.kill();
            if with_firnd {
                mount.kill();
                mount = FirnMount::new(&sandbox, options);
            }
            job.restore(id);
            assert!(run_dir.exists() && !renamed.exists(), "{options}: {id}");
            job.wait_for_step(1);
        }
        // The name of the last checkpoint is the one that counts.
        fs::rename(&run_dir, &renamed).expect("rename");
        job.dir.clone_from(&renamed);
        ends_as_if_undisturbed(&job, mount, options);
    }
}

/// A stand-in for firn that kills the job, firnd and CRIU beside the command `verb`.
fn killing_firn(sandbox: &Sandbox, verb: &str, before: bool, job: u32, firnd: u32) -> PathBuf {
    let path = sandbox.join("killing-firn");
    let firn = firn_binary();
    let script = format!(
        "#!/bin/bash\nend() {{ read -r _ _ _ criu _ </proc/$PPID/stat; kill -9 {job} {firnd} $criu $PPID; exit 1; }}\n\
         [[ $1 != {verb} ]] || ! {before} || end\n{} \"$@\" || exit\n[[ $1 != {verb} ]] || end\n",
        firn.display()
    );
    write_program(&path, &script);
    path
}

#[test]
fn criu_killed_with_everything_anywhere_leaves_files_for_the_newest_images_that_count() {
    if !has_criu() {
        return;
    }
    for (verb, before, counts) in [
        ("prepare", false, 1),
        ("commit", true, 2),
        ("commit", false, 2),
    ] {
        let sandbox = Sandbox::new("rollback-criucut");
        build(&sandbox);
        let mount = begun(&sandbox);
        let mut job = Job::start(&sandbox, By::Criu, mount.path(), true, &[]);
        job.checkpoint_and_run_on(1);
        fs::create_dir(job.images(2)).expect("mkdir");
        let mut dump = job.criu("dump", 2);
        dump.env(
            "FIRN",
            killing_firn(&sandbox, verb, before, job.pid, mount.pid()),
        );
        run(dump.args(["--leave-running", "-t", &job.pid.to_string()])).code(137);
        job.kill();
        mount.kill();
        let mount = FirnMount::new(&sandbox, COMMIT);
        assert_eq!(job.images(2).join("firn.checkpoint").exists(), counts == 2);
        job.restore(counts);
        ends_as_if_undisturbed(
            &job,
            mount,
            &format!("killed at {verb}, before it: {before}"),
        );
    }
}

/// Fails, and CRIU's log, where the action script's messages go, has this one.
fn fails(criu: &mut Command, log: &Path, message: &str) {
    let outcome = run(criu);
    assert_ne!(outcome.code, 0, "{outcome}");
    let log = fs::read_to_string(log).expect("read CRIU's log");
    assert!(log.contains(message), "no {message:?} in {log}");
}

#[test]
fn a_dump_that_fails_leaves_the_program_running_and_the_checkpoint_before() {
    if !has_criu() {
        return;
    }
    let sandbox = Sandbox::new("rollback-failed");
    build(&sandbox);
    let mount = begun(&sandbox);
    let mut job = Job::start(&sandbox, By::Criu, mount.path(), true, &[]);
    job.checkpoint_and_run_on(1);
    let elsewhere = sandbox.path().as_os_str();
    let failures = [
        ("FIRN_CHECKPOINT", OsStr::new("none"), "is no number"),
        ("FIRN_DIR", elsewhere, "the job runs on"),
    ];
    for (id, (variable, value, message)) in (2..).zip(failures) {
        fs::create_dir(job.images(id)).expect("mkdir");
        let mut dump = job.criu("dump", id);
        dump.args(["--leave-running", "-t", &job.pid.to_string()])
            .env(variable, value);
        fails(&mut dump, &job.images(id).join("dump.log"), message);
        assert!(!job.images(id).join("firn.checkpoint").exists());
        job.wait_for_step(job.step() + 5);
        let log = job.images(id).join("restore.log");
        fails(
            &mut job.criu("restore", id),
            &log,
            "not a complete checkpoint",
        );
    }
    job.kill();
    job.restore(1);
    ends_as_if_undisturbed(&job, mount, "after a dump that failed");
}

#[test]
fn the_demo_shows_the_failures_and_the_cure() {
    let sandbox = Sandbox::new("rollback-demo");
    let mut demo = Command::new(repository().join("scripts/rollback-demo"));
    sandbox.environment(&mut demo);
    demo.env("FIRN", firn_binary())
        .env("FIRN_DEMO_DIR", sandbox.path());
    let outcome = run(&mut demo).ok();
    for (part, failure) in FAILURES {
        // Where a file was open when the program was dumped, CRIU misses it before the program does.
        let is_failure =
            |line: &str| line.contains(failure) || line.contains("on restore: No such file");
        let shown = |line: &str| line.trim().starts_with(part) && is_failure(line);
        assert!(outcome.stdout.lines().any(shown), "{part}: {outcome}");
    }
}
