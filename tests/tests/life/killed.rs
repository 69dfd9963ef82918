//! Programs that wait for firnd while the backing hangs: what ends them, what stops them, and what they keep.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use firn_tests::command::{exit_code, wait_child};
use firn_tests::faultfs::FaultFs;
use firn_tests::preloaded::{Frontend, compile};
use firn_tests::sandbox::{is_stopped, is_zombie, kill, wait_for_request};
use firn_tests::watchdog::test_limit;
use firn_tests::{FirnMount, Sandbox, wait_until};

/// What each step may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
const OPTIONS: &str = "arena-size=16M,chunk-size=1M,fuse-threads=2,attr-timeout=10min";
/// As in `programs/waits.c`.
const BLOCK: usize = 100_000;

/// What a program waits for; the names are those of `programs/waits.c`.
const ROOM: &str = "room";
const FSYNC: &str = "fsync";
const CLOSE: &str = "close";
/// For nothing, with a file open that its end closes.
const SLEEP: &str = "sleep";

/// A mount over a backing that hangs, and programs on it.
struct Hung<'a> {
    sandbox: &'a Sandbox,
    fault: &'a FaultFs,
    mount: FirnMount<'a>,
    program: PathBuf,
    frontend: Option<Frontend>,
}

/// One of the programs.
struct Waiting {
    child: Child,
    name: String,
    log: PathBuf,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

impl<'a> Hung<'a> {
    /// `names`: the files of the programs. Writes of the backing hang from now on.
    fn new(
        sandbox: &'a Sandbox,
        fault: &'a FaultFs,
        names: &[&str],
        frontend: Option<Frontend>,
    ) -> Self {
        let mount = FirnMount::over(sandbox, fault.path(), OPTIONS);
        for name in names {
            fs::write(mount.join(name), "").expect("a file");
        }
        fault.hang("write", "");
        Self {
            sandbox,
            fault,
            mount,
            program: compile("cc", "waits.c", sandbox.path()),
            frontend,
        }
    }

    fn start(&self, how: &str, name: &str) -> Waiting {
        let log = self.sandbox.join(format!("{name}.log"));
        let mut command = Command::new(&self.program);
        command.arg(how).arg(self.mount.join(name)).arg(&log);
        if let Some(frontend) = self.frontend {
            frontend.preload(self.sandbox, &mut command);
        }
        let waiting = Waiting {
            child: command.spawn().expect("a program"),
            name: name.to_owned(),
            log,
        };
        let pid = waiting.child.id();
        if how == ROOM {
            wait_until("a write waits for room", LIMIT, || {
                self.mount.status().waiting_writers > 0
            });
        } else {
            wait_until("a program comes to its wait", LIMIT, || {
                waiting.says("waits")
            });
        }
        if [FSYNC, CLOSE].contains(&how) {
            wait_for_request(&Path::new("/proc").join(pid.to_string()));
        }
        waiting
    }

    /// Ends the mount over a backing that goes on again, and looks for all that was acknowledged.
    fn assert_kept(self, programs: &[Waiting]) {
        self.mount.umount();
        for program in programs {
            let found = fs::read(self.fault.source().join(&program.name)).expect("read");
            let kept = program.written();
            assert!(
                found.len() >= kept,
                "{}: {} of {kept}",
                program.name,
                found.len()
            );
            for (index, block) in found.chunks(BLOCK).enumerate() {
                let byte = b'a' + (index % 26) as u8;
                assert!(
                    block.iter().all(|found| *found == byte),
                    "{}: block {index}",
                    program.name
                );
            }
        }
        let logs = self.sandbox.logs();
        assert!(!logs.contains("ERROR"), "{logs}");
    }
}

impl Waiting {
    fn signal(&self, signal: i32) {
        kill(self.child.id(), signal);
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn says(&self, word: &str) -> bool {
        self.log().lines().any(|line| line.starts_with(word))
    }

    /// Bytes of which it was told that they are written.
    fn written(&self) -> usize {
        let log = self.log();
        let mut lines = log.lines().rev();
        let last = lines.find_map(|line| line.strip_prefix("written "));
        last.map_or(0, |bytes| bytes.parse().expect("a number"))
    }

    /// The exit code; `None` if it did not end in time.
    fn end(&mut self) -> Option<i32> {
        wait_child(&mut self.child, LIMIT).map(exit_code)
    }
}

/// Ends programs in each wait with `signal`.
fn end_each(signal: i32, frontend: Option<Frontend>) {
    let sandbox = Sandbox::new("killed");
    let fault = FaultFs::new(&sandbox);
    let _watchdog = fault.watchdog(test_limit() * 3 / 4);
    // The one that uses up the room comes last.
    let waits = [SLEEP, CLOSE, FSYNC, ROOM];
    let hung = Hung::new(&sandbox, &fault, &waits, frontend);
    let mut programs = Vec::new();
    for how in waits {
        let mut program = hung.start(how, how);
        program.signal(signal);
        let code = program.end();
        assert_eq!(code, Some(128 + signal), "{how}: {}", program.log());
        programs.push(program);
    }
    assert!(fault.hung_count() > 0, "the backing hangs");
    fault.let_go();
    hung.assert_kept(&programs);
}

/// Proves S-kill-1, S-kill-2.
#[test]
fn regression_a_program_that_waits_can_be_killed() {
    end_each(libc::SIGKILL, None);
}

/// Proves S-kill-1.
#[test]
fn regression_a_program_that_waits_ends_at_ctrl_c() {
    end_each(libc::SIGINT, None);
}

/// Proves S-kill-1, S-kill-2.
#[test]
fn regression_a_program_with_the_library_that_waits_can_be_killed() {
    end_each(libc::SIGKILL, Some(Frontend::Mount));
}

/// How a program is stopped and goes on again.
trait Stop {
    /// Returns when the program is stopped.
    fn stop(&self, program: &Waiting);
    fn go_on(&self, program: &Waiting);
}

struct Signals;

impl Stop for Signals {
    fn stop(&self, program: &Waiting) {
        program.signal(libc::SIGSTOP);
        let process = Path::new("/proc").join(program.child.id().to_string());
        wait_until("a program is stopped", LIMIT, || is_stopped(&process));
    }

    fn go_on(&self, program: &Waiting) {
        program.signal(libc::SIGCONT);
    }
}

/// A control group that can be frozen; removed with the value.
struct Freezer {
    group: PathBuf,
    /// File and text that freeze it, and those that thaw it.
    freeze: (&'static str, &'static str),
    thaw: (&'static str, &'static str),
    /// File and text that say that it is frozen.
    frozen: (&'static str, &'static str),
}

impl Freezer {
    /// Those of the machine: version 1, version 2, or both.
    fn all(name: &str) -> Vec<Self> {
        let root = Path::new("/sys/fs/cgroup");
        let second = |root: &Path| Self {
            group: root.join(name),
            freeze: ("cgroup.freeze", "1"),
            thaw: ("cgroup.freeze", "0"),
            frozen: ("cgroup.events", "frozen 1"),
        };
        let first = Self {
            group: root.join("freezer").join(name),
            freeze: ("freezer.state", "FROZEN"),
            thaw: ("freezer.state", "THAWED"),
            frozen: ("freezer.state", "FROZEN"),
        };
        let all = [first, second(&root.join("unified")), second(root)];
        let found: Vec<_> = all
            .into_iter()
            .filter(|freezer| {
                let root = freezer.group.parent().expect("a directory");
                root.join("cgroup.procs").exists()
                    && fs::create_dir(&freezer.group).is_ok()
                    && freezer.group.join(freezer.freeze.0).exists()
            })
            .collect();
        assert!(
            !found.is_empty(),
            "no control groups that can be frozen below {root:?}"
        );
        found
    }

    fn set(&self, (file, text): (&str, &str)) {
        fs::write(self.group.join(file), text).expect("write to a control group");
    }
}

impl Stop for Freezer {
    fn stop(&self, program: &Waiting) {
        self.set(("cgroup.procs", &program.child.id().to_string()));
        self.set(self.freeze);
        wait_until("a program is frozen", LIMIT, || {
            let state = fs::read_to_string(self.group.join(self.frozen.0)).expect("its state");
            state.contains(self.frozen.1)
        });
    }

    fn go_on(&self, _: &Waiting) {
        self.set(self.thaw);
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        let _ = fs::write(self.group.join(self.thaw.0), self.thaw.1);
        let members = fs::read_to_string(self.group.join("cgroup.procs")).unwrap_or_default();
        for member in members.lines().filter_map(|line| line.parse().ok()) {
            kill(member, libc::SIGKILL);
            wait_until("a member of the group ends", LIMIT, || is_zombie(member));
        }
        let _ = fs::remove_dir(&self.group);
    }
}

/// Stops programs in each wait and lets them go on; then the backing goes on too.
fn stop_each(stops: &[&dyn Stop], frontend: Option<Frontend>) {
    for (round, stop) in stops.iter().enumerate() {
        let sandbox = Sandbox::new(&format!("stopped{round}"));
        let fault = FaultFs::new(&sandbox);
        let _watchdog = fault.watchdog(test_limit() * 3 / 4);
        let waits = [CLOSE, FSYNC, ROOM];
        let hung = Hung::new(&sandbox, &fault, &waits, frontend);
        let mut programs: Vec<Waiting> = Vec::new();
        for how in waits {
            let program = hung.start(how, how);
            stop.stop(&program);
            stop.go_on(&program);
            programs.push(program);
        }
        fault.let_go();
        for program in &mut programs {
            assert_eq!(
                program.end(),
                Some(0),
                "{}: {}",
                program.name,
                program.log()
            );
            if program.name == CLOSE {
                assert!(program.says("EINTR"), "{}", program.log());
            } else if program.name == FSYNC {
                assert!(program.says("done"), "{}", program.log());
            }
        }
        hung.assert_kept(&programs);
    }
}

/// Proves S-kill-3, S-kill-4.
#[test]
fn regression_a_program_that_waits_can_be_stopped() {
    stop_each(&[&Signals], None);
}

/// Proves S-kill-3, S-kill-4.
#[test]
fn regression_a_program_that_waits_can_be_frozen() {
    let freezers = Freezer::all(&format!("firn-killed-{}", std::process::id()));
    let stops: Vec<_> = freezers
        .iter()
        .map(|freezer| freezer as &dyn Stop)
        .collect();
    stop_each(&stops, None);
}

/// Proves S-kill-3.
#[test]
fn regression_a_program_with_the_library_that_waits_can_be_stopped() {
    stop_each(&[&Signals], Some(Frontend::Mount));
}

/// Proves S-kill-5.
#[test]
fn a_handler_of_a_signal_that_ends_nothing_ends_no_wait() {
    let sandbox = Sandbox::new("handled");
    let fault = FaultFs::new(&sandbox);
    let _watchdog = fault.watchdog(test_limit() * 3 / 4);
    let waits = [CLOSE, FSYNC, ROOM];
    let hung = Hung::new(&sandbox, &fault, &waits, None);
    let mut programs: Vec<_> = waits.map(|how| hung.start(how, how)).into();
    for program in &programs {
        program.signal(libc::SIGUSR1);
    }
    // The thread that looks at those that got a signal runs, and a program that is stopped then is seen by it.
    wait_until("firnd looks at them", LIMIT, || {
        hung.mount
            .threads()
            .iter()
            .any(|name| name == "firn-interrupt")
    });
    Signals.stop(&programs[2]);
    Signals.go_on(&programs[2]);
    fault.let_go();
    for program in &mut programs {
        assert_eq!(
            program.end(),
            Some(0),
            "{}: {}",
            program.name,
            program.log()
        );
    }
    for program in &programs[..2] {
        assert!(
            program.says("done") && !program.says("EINTR"),
            "{}",
            program.log()
        );
    }
    hung.assert_kept(&programs);
}

/// Proves S-kill-6.
#[test]
fn regression_a_process_that_exits_waits_for_no_drain_that_stands_still() {
    let sandbox = Sandbox::new("exits");
    let fault = FaultFs::new(&sandbox);
    let _watchdog = fault.watchdog(test_limit() * 3 / 4);
    let hung = Hung::new(&sandbox, &fault, &["exit"], None);
    let mut program = hung.start("exit", "exit");
    assert_eq!(program.end(), Some(0), "{}", program.log());
    assert!(hung.mount.status().held_bytes >= program.written() as u64);
    fault.let_go();
    hung.assert_kept(&[program]);
}

/// Proves S-kill-1, S-kill-7.
#[test]
fn regression_a_program_in_a_call_of_the_backing_that_hangs_can_be_killed() {
    let sandbox = Sandbox::new("killedcalls");
    let fault = FaultFs::new(&sandbox);
    let _watchdog = fault.watchdog(test_limit() * 3 / 4);
    let options = "arena-size=16M,chunk-size=1M,fuse-threads=2,attr-timeout=0";
    let mount = FirnMount::over(&sandbox, fault.path(), options);
    let calls = [
        ("lookup", "stat file"),
        ("open", "cat file"),
        ("create", ": > new"),
        ("mkdir", "mkdir dir"),
        ("rename", "mv file moved"),
        ("unlink", "rm -f file"),
        ("readdir", "ls -l"),
        ("setattr", "chmod 600 file"),
    ];
    for (operation, script) in calls {
        let name = format!("in-{operation}");
        fs::create_dir(mount.join(&name)).expect("mkdir");
        fs::write(mount.join(&name).join("file"), "bytes").expect("a file");
        mount.wait("drained", &mount.join(&name)).ok();
        // The program itself comes there first.
        let place = if operation == "readdir" {
            name.clone()
        } else {
            format!("{name}/")
        };
        fault.hang(operation, &place);
        let mut command = Command::new("bash");
        // The shell becomes the program, or makes the call itself.
        let script = if script.starts_with(':') {
            script.into()
        } else {
            format!("exec {script}")
        };
        command.args(["-c", &script]).current_dir(mount.join(&name));
        let mut child = command.spawn().expect("a program");
        wait_until(&format!("{operation} hangs"), LIMIT, || {
            fault.hung_count() > 0
        });
        kill(child.id(), libc::SIGKILL);
        let ended = wait_child(&mut child, LIMIT);
        fault.let_go();
        assert_eq!(
            ended.map(exit_code),
            Some(128 + libc::SIGKILL),
            "{operation}"
        );
        // What it asked for happened or not, and both are whole.
        let mut names: Vec<_> = fs::read_dir(mount.join(&name))
            .expect("readdir")
            .map(|entry| entry.expect("an entry").file_name())
            .collect();
        names.retain(|name| {
            !["file", "moved", "new", "dir"].contains(&name.to_str().expect("text"))
        });
        assert!(names.is_empty(), "{operation}: {names:?}");
        fs::remove_dir_all(mount.join(&name)).expect("nothing is kept open");
    }
    assert!(!sandbox.logs().contains("ERROR"), "{}", sandbox.logs());
    let status = mount.status();
    assert_eq!(
        status.open_files, 0,
        "open files of programs that were killed are closed"
    );
    mount.umount();
}
