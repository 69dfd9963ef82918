//! An agent of the built binary, and pulls from it.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use firn_testfs::namespace::Namespace;

use crate::command::{Outcome, run, wait_child, wait_until};
use crate::sandbox::{Sandbox, kill};

/// What pullers call the source host.
pub const HOST: &str = "n1";
const LIMIT: Duration = Duration::from_secs(60);

/// A `firn agent` that ends with the value.
pub struct Agent {
    child: Child,
    log: PathBuf,
}

impl Agent {
    /// For the mount at `mount_point`, reached on this host only.
    #[track_caller]
    pub fn start(sandbox: &Sandbox, mount_point: &Path, extra: &[&str]) -> Self {
        Self::start_in(None, sandbox, mount_point, extra)
    }

    /// The same in a network namespace.
    #[track_caller]
    pub fn start_in(
        namespace: Option<&Namespace>,
        sandbox: &Sandbox,
        mount_point: &Path,
        extra: &[&str],
    ) -> Self {
        let named = [&["--host", HOST], extra].concat();
        Self::launch(namespace, sandbox, mount_point, &named)
    }

    /// With the name that the mount has.
    #[track_caller]
    pub fn start_unnamed(sandbox: &Sandbox, mount_point: &Path, extra: &[&str]) -> Self {
        Self::launch(None, sandbox, mount_point, extra)
    }

    #[track_caller]
    fn launch(
        namespace: Option<&Namespace>,
        sandbox: &Sandbox,
        mount_point: &Path,
        extra: &[&str],
    ) -> Self {
        let mut command = sandbox.firn(["agent"]);
        if !extra.contains(&"--listen") {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        let log = sandbox.join("agent.log");
        let file = File::create(&log).expect("a log");
        command.args(extra).arg(mount_point);
        if let Some(namespace) = namespace {
            command = enter(namespace, &command);
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()
            .expect("start the agent");
        let mut agent = Self { child, log };
        wait_until("the agent listens", LIMIT, || {
            let ended = agent.child.try_wait().expect("wait for the agent");
            assert!(ended.is_none(), "the agent ended: {}", agent.log());
            agent.log().contains("serves the mount")
        });
        agent
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it said.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).expect("the agent's log")
    }

    /// KiB of memory that are its own: not those of the arena.
    pub fn own_memory_kib(&self) -> u64 {
        let path = format!("/proc/{}/status", self.pid());
        let status = fs::read_to_string(path).expect("the agent's status");
        let mut lines = status.lines();
        let line = lines.find_map(|line| line.strip_prefix("RssAnon:"));
        let line = line.expect("RssAnon").trim();
        line.trim_end_matches(" kB").parse().expect("KiB")
    }

    /// Its open descriptors.
    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid()))
            .expect("the agent's descriptors")
            .count()
    }

    /// kill -9.
    pub fn kill(mut self) {
        self.child.kill().expect("kill the agent");
        self.child.wait().expect("wait for the agent");
    }

    /// SIGTERM; its exit code.
    pub fn end(mut self) -> Option<i32> {
        kill(self.pid(), libc::SIGTERM);
        wait_child(&mut self.child, LIMIT)
            .expect("the agent ends")
            .code()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the agent's log\n{}\n---", self.log());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The same command in a network namespace.
pub fn enter(namespace: &Namespace, command: &Command) -> Command {
    let program = command.get_program().to_str().expect("utf-8");
    let mut entered = namespace.command(program);
    entered.args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => entered.env(name, value),
            None => entered.env_remove(name),
        };
    }
    entered
}

/// `firn pull` from the agent of a backing.
pub fn pull_command(
    sandbox: &Sandbox,
    backing: &Path,
    source: &Path,
    target: &Path,
    extra: &[&str],
) -> Command {
    let mut from = OsString::from(format!("{HOST}:"));
    from.push(source);
    let mut command = sandbox.firn([OsStr::new("pull"), OsStr::new("--backing")]);
    command.arg(backing).args(extra).arg(from).arg(target);
    command
}

/// The same, run to its end.
#[track_caller]
pub fn pull(
    sandbox: &Sandbox,
    backing: &Path,
    source: &Path,
    target: &Path,
    extra: &[&str],
) -> Outcome {
    run(&mut pull_command(sandbox, backing, source, target, extra))
}
