//! Runs the program `firn` as a user does: mounts, reads the status, waits and unmounts.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::cpu;
use crate::machine;
use firn_testfs::cleanup::{Guard, Leftover, expect};

/// Maximum time for a condition that firnd brings about ([`wait_until`]).
const WAIT_MAX: Duration = Duration::from_secs(120);
/// The name of the process that keeps a mount for the next firnd.
const KEEPER_NAME: &str = "firn-keeper";
/// Uptime of firnd in seconds, longer than the keeper requires of it. If firnd dies later, the keeper restarts it at
/// once.
const MIN_UPTIME_S: f64 = 0.5;

/// The program to measure, with a runtime directory of its own. The arenas and sockets of the run are thus separate
/// from those of the user's mounts.
pub struct Firn {
    program: PathBuf,
    runtime_dir: PathBuf,
    _remove: Guard,
}

/// Counters of one mount: how the drain has written to the backing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Number of write calls to the backing since the mount began.
    pub drain_writes: u64,
    /// Bytes of these writes.
    pub drain_bytes: u64,
}

impl Firn {
    /// Returns the program at a path that the user or `firn bench` gave. Without a path, returns the program that is
    /// installed with this one; fails if there is none.
    pub fn find(program: Option<&Path>) -> anyhow::Result<Self> {
        let program = match program {
            Some(program) => program.to_owned(),
            None => find_firn(&std::env::current_exe()?)?,
        };
        let runtime_dir = PathBuf::from(format!("/dev/shm/firn-bench-{}", std::process::id()));
        let _remove = expect(Leftover::Dir(runtime_dir.clone()));
        Ok(Self {
            program,
            runtime_dir,
            _remove,
        })
    }

    /// Returns the same program with another runtime directory, as if it ran on the host `name`.
    pub fn on_host(&self, name: &str) -> Self {
        let program = self.program.clone();
        let runtime_dir = PathBuf::from(format!("{}-{name}", self.runtime_dir.display()));
        let _remove = expect(Leftover::Dir(runtime_dir.clone()));
        Self {
            program,
            runtime_dir,
            _remove,
        }
    }

    /// Returns the path of the preload library, which processes load for direct access. Fails if it is not installed.
    pub fn preload(&self) -> anyhow::Result<PathBuf> {
        let found = firn_client::library::find_beside(&self.program);
        found.with_context(|| {
            let name = firn_client::library::NAME;
            let program = self.program.display();
            format!(
                "{name} is not installed beside {program}: build it (`cargo build --release -p firn-preload`)"
            )
        })
    }

    /// Returns a directory on tmpfs for other files that the benchmark keeps in memory.
    pub fn memory_dir(&self) -> anyhow::Result<PathBuf> {
        use std::os::unix::fs::DirBuilderExt;
        // firn requires that its runtime directory is private to the user.
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.runtime_dir)?;
        let dir = self.runtime_dir.join("bench");
        std::fs::create_dir_all(&dir)?;
        Ok(dir)
    }

    /// Runs `firn mount -o OPTIONS BACKING MOUNT_POINT`, and returns the mount when it is usable.
    pub fn mount(
        &self,
        backing: &Path,
        mount_point: &Path,
        options: &str,
    ) -> anyhow::Result<Mount<'_>> {
        std::fs::create_dir_all(backing)?;
        std::fs::create_dir_all(mount_point)?;
        let _unmount = expect(Leftover::Mount(mount_point.to_owned()));
        let backing = backing.as_os_str();
        let args = [
            "mount".as_ref(),
            "-o".as_ref(),
            options.as_ref(),
            backing,
            mount_point.as_ref(),
        ];
        self.run(&args)?;
        let mut mount = Mount {
            firn: self,
            path: mount_point.to_owned(),
            // Read below from the status of this mount.
            pid: 0,
            _unmount,
        };
        mount.pid = number(&mount.status()?, "pid").context("`firn status` told no pid")? as u32;
        Ok(mount)
    }

    /// Returns a command that runs the program in the environment of this run. It is for verbs that run for long.
    pub fn command(&self) -> Command {
        command(&self.program, &self.runtime_dir)
    }

    /// Returns a command as [`Firn::command`] does, for a start by another program such as nsenter(1). `start` makes
    /// the command of that program from the path of `firn`.
    pub fn command_by(&self, start: impl FnOnce(&str) -> Command) -> Command {
        let mut command = start(&self.program.to_string_lossy());
        command.env("FIRN_RUNTIME_DIR", &self.runtime_dir);
        command
    }

    /// Runs a verb of the program and returns its standard output. Fails with its error message if the verb fails.
    pub(crate) fn run(&self, args: &[&std::ffi::OsStr]) -> anyhow::Result<Vec<u8>> {
        let output = command(&self.program, &self.runtime_dir)
            .args(args)
            .output()
            .with_context(|| format!("cannot run {}", self.program.display()))?;
        if !output.status.success() {
            let message = String::from_utf8_lossy(&output.stderr);
            bail!(
                "`firn {}` failed: {}",
                args[0].to_string_lossy(),
                message.trim_end()
            );
        }
        Ok(output.stdout)
    }
}

/// A mount of Firn. Dropping the value drains and unmounts.
pub struct Mount<'a> {
    firn: &'a Firn,
    path: PathBuf,
    pid: u32,
    /// Unmounts if the mount could not be drained.
    _unmount: Guard,
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        let mut umount = self.firn.command();
        let umount = umount.arg("umount").arg(&self.path);
        // The result is ignored, because `_unmount` removes a mount that is still there.
        let _ = umount.stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}

impl Mount<'_> {
    /// Returns the mount point.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Simulates the failure of the host: kills firnd and its keeper, and removes the arena.
    pub fn lose(self) -> anyhow::Result<()> {
        let arena = self.arena()?;
        self.crash()?;
        Ok(std::fs::remove_file(arena)?)
    }

    /// Kills firnd, and its keeper if it has one. The arena remains.
    pub fn crash(self) -> anyhow::Result<()> {
        let parent = self.parent()?;
        let is_keeper = name_of_process(parent) == KEEPER_NAME;
        if is_keeper {
            signal(parent, Signal::STOP)?;
        }
        signal(self.pid, Signal::KILL)?;
        if is_keeper {
            signal(parent, Signal::KILL)?;
        }
        firn_testfs::unmount_lazily(&self.path);
        Ok(())
    }

    /// Kills firnd with SIGKILL. Its keeper, if it has one, starts another firnd.
    pub fn kill_firnd(&self) -> anyhow::Result<()> {
        signal(self.pid, Signal::KILL)
    }

    /// Waits until another firnd serves the mount, after [`Mount::kill_firnd`].
    pub fn note_takeover(&mut self) -> anyhow::Result<()> {
        let before = u64::from(self.pid);
        let find = || {
            let status = self.status().ok();
            status.and_then(|status| number(&status, "pid"))
        };
        wait_until("another firnd goes on with the mount", || {
            Ok(find().is_some_and(|pid| pid != before))
        })?;
        self.pid = self.number("pid")? as u32;
        Ok(())
    }

    /// Waits until firnd has run for so long that its keeper restarts it at once, and does not regard its death as a
    /// failed start.
    pub fn wait_served_well(&self) -> anyhow::Result<()> {
        wait_until("firnd has served for a while", || {
            Ok(self.figure("uptime_seconds")? >= MIN_UPTIME_S)
        })
    }

    /// Returns the id of the parent process of firnd: the keeper, if there is one.
    pub fn parent(&self) -> anyhow::Result<u32> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.pid))?;
        let line = text.lines().find_map(|line| line.strip_prefix("PPid:"));
        let parent = line.context("firnd has no parent")?;
        Ok(parent.trim().parse()?)
    }

    /// Runs `firn flatten PATH`.
    pub fn flatten(&self, path: &Path) -> anyhow::Result<()> {
        self.firn.run(&["flatten".as_ref(), path.as_ref()])?;
        Ok(())
    }

    /// Runs `firn wait --until LEVEL PATH`.
    pub fn wait_until_level(&self, level: &str, path: &Path) -> anyhow::Result<()> {
        let args = [
            "wait".as_ref(),
            "--until".as_ref(),
            level.as_ref(),
            path.as_ref(),
        ];
        self.firn.run(&args).map(drop)
    }

    /// Returns the processor time of firnd so far, in seconds.
    pub fn cpu_s(&self) -> f64 {
        cpu::seconds_of(self.pid)
    }

    /// Returns how much firnd has written to the backing so far.
    pub fn counters(&self) -> anyhow::Result<Counters> {
        let status = self.status()?;
        let get =
            |name| number(&status, name).with_context(|| format!("`firn status` told no {name}"));
        Ok(Counters {
            drain_writes: get("drain_writes")?,
            drain_bytes: get("drain_bytes")?,
        })
    }

    /// Runs `firn wait --until durable PATH`.
    pub fn wait_durable(&self, path: &Path) -> anyhow::Result<()> {
        self.wait_until_level("durable", path)
    }

    /// Returns `firn VERB MOUNT REST` as a command line for a shell.
    pub fn shell(&self, verb: &str, rest: &str) -> String {
        let firn = self.firn;
        let point = self.path.display();
        let dir = firn.runtime_dir.display();
        let program = firn.program.display();
        format!("FIRN_RUNTIME_DIR={dir} {program} {verb} {point} {rest}")
    }

    /// Begins a transaction of the whole mount (`firn begin`).
    pub fn begin(&self) -> anyhow::Result<()> {
        self.firn
            .run(&["begin".as_ref(), self.path.as_ref()])
            .map(drop)
    }

    /// Commits the transaction of the whole mount (`firn commit`).
    pub fn commit(&self) -> anyhow::Result<()> {
        self.firn
            .run(&["commit".as_ref(), self.path.as_ref()])
            .map(drop)
    }

    /// Commits the transaction of the whole mount in the background (`firn commit --async`).
    pub fn commit_behind(&self) -> anyhow::Result<()> {
        self.firn
            .run(&["commit".as_ref(), "--async".as_ref(), self.path.as_ref()])
            .map(drop)
    }

    /// Waits until the last commit is applied. Before that, a change of names in the mount blocks.
    pub fn wait_applied(&self) -> anyhow::Result<()> {
        let name = self.path.join(".carried-out");
        std::fs::create_dir(&name)?;
        Ok(std::fs::remove_dir(name)?)
    }

    /// Waits until all memory of the arena is allocated (`populate=yes`).
    pub fn wait_populated(&self) -> anyhow::Result<()> {
        let dir = format!("/proc/{}/task", self.pid);
        let populates = || -> anyhow::Result<bool> {
            for task in std::fs::read_dir(&dir).context("firnd is gone")? {
                // A thread may end while the list is read.
                let name = std::fs::read_to_string(task?.path().join("comm")).unwrap_or_default();
                if name.trim_end() == "firn-populate" {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        wait_until("the arena gets its memory", || Ok(!populates()?))
    }

    /// Waits until `bytes` were moved into memory files since the mount began.
    pub fn wait_settled(&self, bytes: u64) -> anyhow::Result<()> {
        let is_settled = || Ok(self.number("settled_bytes")? >= bytes);
        wait_until("the file is in a memory file", is_settled)
    }

    /// Waits until the arena holds no data, after all files were removed.
    pub fn wait_empty(&self) -> anyhow::Result<()> {
        wait_until("the arena is empty", || Ok(self.number("held_bytes")? == 0))
    }

    /// Returns a whole number of the status of the mount.
    pub fn number(&self, name: &str) -> anyhow::Result<u64> {
        number(&self.status()?, name).with_context(|| format!("`firn status` told no {name}"))
    }

    /// Returns a number of the status of the mount that may have a fraction.
    pub fn figure(&self, name: &str) -> anyhow::Result<f64> {
        let status = self.status()?;
        let found = value_of(&status, name).and_then(Value::as_f64);
        found.with_context(|| format!("`firn status` told no {name}"))
    }

    /// Returns the path of the arena.
    pub fn arena(&self) -> anyhow::Result<PathBuf> {
        let status = self.status()?;
        text(&status, "arena")
            .map(PathBuf::from)
            .context("`firn status` told no arena")
    }

    /// Returns the bytes of firnd's own memory, without the mapped arena.
    pub fn private_bytes(&self) -> anyhow::Result<u64> {
        machine::private_bytes(self.pid)
    }

    /// Returns the output of `firn status --json` for the mount.
    fn status(&self) -> anyhow::Result<Value> {
        let text = self
            .firn
            .run(&["status".as_ref(), "--json".as_ref(), self.path.as_ref()])?;
        serde_json::from_slice(&text).context("`firn status --json` printed no JSON")
    }
}

/// Returns the program `firn` that belongs to the program `bench`. It is in the same directory after a build, and in
/// `bin` of the same prefix after an installation.
fn find_firn(bench: &Path) -> anyhow::Result<PathBuf> {
    let dir = bench
        .parent()
        .context("this program lies in no directory")?;
    let places = [dir.join("firn"), dir.join("../../bin/firn")];
    places
        .into_iter()
        .find_map(|place| place.canonicalize().ok())
        .with_context(|| {
            let dir = dir.display();
            format!("no firn program belongs to {dir}: name one with --firn")
        })
}

/// Returns a command that runs `firn` with this runtime directory, without a standard input, and in a process group of
/// its own.
fn command(program: &Path, runtime_dir: &Path) -> Command {
    use std::os::unix::process::CommandExt;
    let mut command = Command::new(program);
    // The process group keeps Ctrl-C of the terminal away from firnd, because the benchmark unmounts in that case.
    command
        .env("FIRN_RUNTIME_DIR", runtime_dir)
        .stdin(Stdio::null())
        .process_group(0);
    command
}

/// Waits until `holds` returns true. Fails after [`WAIT_MAX`]; `what` describes the condition for the error message.
pub(crate) fn wait_until(
    what: &str,
    holds: impl Fn() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let begin = Instant::now();
    while !holds()? {
        if begin.elapsed() > WAIT_MAX {
            bail!("gave up waiting until {what}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Returns the text with the key `name` in `value`, at any depth.
fn text<'a>(value: &'a Value, name: &str) -> Option<&'a str> {
    value_of(value, name).and_then(Value::as_str)
}

/// Returns the whole number with the key `name` in `value`, at any depth.
fn number(value: &Value, name: &str) -> Option<u64> {
    value_of(value, name).and_then(Value::as_u64)
}

/// Returns the first value with the key `name` in `value`, at any depth.
fn value_of<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    match value {
        Value::Object(map) => map
            .get(name)
            .or_else(|| map.values().find_map(|inner| value_of(inner, name))),
        Value::Array(list) => list.iter().find_map(|inner| value_of(inner, name)),
        _ => None,
    }
}

/// Sends a signal to a process.
fn signal(pid: u32, signal: Signal) -> anyhow::Result<()> {
    let pid = Pid::from_raw(pid as i32).context("a process without a number")?;
    Ok(kill_process(pid, signal)?)
}

/// Returns the name of a process. Returns an empty name if there is no such process.
fn name_of_process(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
}
