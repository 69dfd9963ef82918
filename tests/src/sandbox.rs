//! A test's own corner of the machine: directories, runtime directory, the firn binary.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use crate::command::{Outcome, run, wait_until};

/// Directories of one test and the environment its firn processes run in.
pub struct Sandbox {
    dir: tempfile::TempDir,
    runtime: tempfile::TempDir,
    host: Option<String>,
}

impl Sandbox {
    /// Makes the directories `backing` and `mnt`; the name shows in paths, so that leftovers can be
    /// traced to the test.
    pub fn new(name: &str) -> Self {
        requires_root_and_fuse();
        let prefix = format!("firn-test-{name}-");
        let dir = tempfile::Builder::new()
            .prefix(&prefix)
            .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .tempdir()
            .expect("a temporary directory");
        let runtime = tempfile::Builder::new()
            .prefix(&prefix)
            .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700))
            .tempdir_in("/dev/shm")
            .expect("a runtime directory in /dev/shm");
        for sub in ["backing", "mnt"] {
            make_dirs(&dir.path().join(sub));
        }
        Self {
            dir,
            runtime,
            host: None,
        }
    }

    /// The same on a host of its own: what firn runs there has its own network and this host name.
    pub fn on_host(name: &str, host: &str) -> Self {
        let mut sandbox = Self::new(name);
        sandbox.host = Some(host.to_owned());
        sandbox
    }

    /// The directory of the sandbox.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A path in it.
    pub fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(name)
    }

    /// An empty directory in it.
    pub fn mkdir(&self, name: &str) -> PathBuf {
        let path = self.join(name);
        make_dirs(&path);
        path
    }

    /// Where arenas, sockets and logs go.
    pub fn runtime(&self) -> &Path {
        self.runtime.path()
    }

    /// The only arena of this sandbox.
    #[track_caller]
    pub fn arena(&self) -> PathBuf {
        let arenas = self.arenas();
        assert_eq!(
            arenas.len(),
            1,
            "expected one arena in {:?}: {arenas:?}",
            self.runtime()
        );
        arenas[0].clone()
    }

    /// Arenas that exist.
    pub fn arenas(&self) -> Vec<PathBuf> {
        with_extension(self.runtime(), "arena")
    }

    /// What firnd logged.
    pub fn logs(&self) -> String {
        let files = with_extension(self.runtime(), "log");
        files
            .iter()
            .filter_map(|file| fs::read_to_string(file).ok())
            .collect()
    }

    /// A `firn` command in this sandbox's environment.
    pub fn firn<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = match &self.host {
            None => Command::new(firn_binary()),
            Some(host) => {
                let mut command = Command::new("unshare");
                let set = r#"hostname "$0" && exec "$@""#;
                command
                    .args(["--net", "--uts", "--", "sh", "-c", set, host])
                    .arg(firn_binary());
                command
            }
        };
        self.environment(&mut command);
        command.args(args);
        command
    }

    /// Gives `command` the environment of the sandbox and takes the user's own settings away.
    pub fn environment(&self, command: &mut Command) {
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("FIRN_") {
                command.env_remove(name);
            }
        }
        command
            .env("FIRN_RUNTIME_DIR", self.runtime())
            // Faults that tests provoke do not belong in the system log of this machine.
            .env("FIRN_SYSTEM_LOG", "off")
            .env("HOME", self.path())
            .env("NO_COLOR", "1");
        command.env("XDG_CONFIG_HOME", self.join("no-config"));
    }

    /// Runs a `firn` command to its end. Its exit code must be one that its help lists.
    #[track_caller]
    pub fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Outcome {
        let args: Vec<S> = args.into_iter().collect();
        let outcome = run(&mut self.firn(&args));
        if let Some(verb) = args.first().and_then(|verb| verb.as_ref().to_str()) {
            assert_listed(verb, &outcome);
        }
        outcome
    }

    /// Process ids of what was started in this sandbox's environment and still lives.
    pub fn processes(&self) -> Vec<u32> {
        processes_with_environment("FIRN_RUNTIME_DIR", self.runtime())
    }

    /// Kills them and waits until they are gone.
    pub fn kill_processes(&self) {
        kill_processes_of(self.runtime());
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- firnd's log\n{}\n---", tail(&self.logs(), 60));
        }
        kill_processes_of(self.runtime());
        for mount_point in mounts_below(self.path()) {
            unmount_lazily(&mount_point);
        }
    }
}

/// Any verb may be given arguments that it does not know.
const USAGE: i32 = 2;

/// Panics unless `firn VERB --help` lists the exit code of a run. `firn run` and `firn bench` end with the code of the program
/// that they run.
#[track_caller]
fn assert_listed(verb: &str, outcome: &Outcome) {
    static LISTED: Mutex<BTreeMap<String, BTreeSet<i32>>> = Mutex::new(BTreeMap::new());
    if matches!(outcome.code, 0 | USAGE) || matches!(verb, "run" | "bench") {
        return;
    }
    let mut listed = LISTED.lock().unwrap_or_else(PoisonError::into_inner);
    let codes = listed.entry(verb.to_owned()).or_insert_with(|| {
        let help = run(Command::new(firn_binary()).args([verb, "--help"])).ok();
        read_exits(&help.stdout)
    });
    assert!(
        codes.contains(&outcome.code),
        "`firn {verb} --help` lists only the exit codes {codes:?}: {outcome}"
    );
}

/// The codes below `Exit status:` of a help.
fn read_exits(help: &str) -> BTreeSet<i32> {
    let lines = help.lines().skip_while(|line| *line != "Exit status:");
    lines
        .filter_map(|line| line.split_whitespace().next()?.parse().ok())
        .collect()
}

/// A directory, and those above it that are missing, that only the owner writes to, whatever the umask is: another test of
/// the process may have set it to 0.
pub(crate) fn make_dirs(path: &Path) {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(path)
        .unwrap_or_else(|error| panic!("mkdir {}: {error}", path.display()));
}

/// Kills the processes whose environment names this runtime directory, and waits until they have ended.
pub fn kill_processes_of(runtime: &Path) {
    // More than once: one of them may just be starting another.
    loop {
        let pids = processes_with_environment("FIRN_RUNTIME_DIR", runtime);
        if pids.is_empty() {
            return;
        }
        kill_and_wait(&pids);
    }
}

/// Kills processes that a test started, and waits until they have let go of all they had open.
///
/// A process has no environment any more, and still sockets that take connections, while it ends. All are killed
/// before one is waited for: it may hang in a file system that another one serves.
pub fn kill_and_wait(pids: &[u32]) {
    for pid in pids {
        kill(*pid, libc::SIGKILL);
    }
    wait_until(
        "killed processes end",
        std::time::Duration::from_secs(20),
        || pids.iter().copied().all(is_zombie),
    );
}

/// Sends a signal to a process that a test started. SIGKILL of a firnd takes its keeper along, at the same moment:
/// [`kill_alone`] leaves that.
pub fn kill(pid: u32, signal: i32) {
    let keeper = (signal == libc::SIGKILL).then(|| keeper_of(pid)).flatten();
    let Some(keeper) = keeper else {
        return kill_alone(pid, signal);
    };
    // While it stands still it starts no other firnd.
    kill_alone(keeper, libc::SIGSTOP);
    kill_alone(pid, libc::SIGKILL);
    kill_alone(keeper, libc::SIGKILL);
}

/// The keeper that started a firnd.
pub fn keeper_of(firnd: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{firnd}/stat")).ok()?;
    let parent = stat.rsplit(')').next()?.split_whitespace().nth(1)?;
    let name = fs::read_to_string(format!("/proc/{parent}/comm")).ok()?;
    (name.trim_end() == "firn-keeper").then(|| parent.parse().ok())?
}

/// Sends a signal to one process that a test started.
pub fn kill_alone(pid: u32, signal: i32) {
    // SAFETY: kill takes two integers and touches no memory of ours.
    unsafe { libc::kill(pid as i32, signal) };
}

/// Mount points at or below `dir`, deepest first.
pub fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let table = fs::read("/proc/self/mountinfo").expect("/proc/self/mountinfo");
    let points = firn_format::mountinfo::parse(&table)
        .into_iter()
        .map(|entry| entry.mount_point);
    let mut below: Vec<_> = points.filter(|point| point.starts_with(dir)).collect();
    below.reverse();
    below
}

/// Whether something is mounted exactly at `dir`.
pub fn is_mounted(dir: &Path) -> bool {
    mounts_below(dir).iter().any(|point| point == dir)
}

/// Takes a mount away, even while programs use it.
pub fn unmount_lazily(mount_point: &Path) {
    rustix::mount::unmount(mount_point, rustix::mount::UnmountFlags::DETACH).ok();
}

/// Fails, saying what is missing, where these tests cannot run: they mount file systems.
#[track_caller]
pub fn requires_root_and_fuse() {
    let root = rustix::process::geteuid().is_root();
    assert!(
        root,
        "system tests mount loop images: run them as root (`sudo make test`)"
    );
    let fuse = Path::new("/dev/fuse").exists();
    assert!(
        fuse,
        "/dev/fuse is missing: load the fuse module or give the container the device"
    );
}

/// The binary under test: `FIRN_BIN`, else the one that cargo built beside this test.
pub fn firn_binary() -> PathBuf {
    if let Some(path) = std::env::var_os("FIRN_BIN") {
        return PathBuf::from(path);
    }
    let binary = profile_dir().join("firn");
    assert!(
        binary.exists(),
        "{binary:?} is missing: run `cargo build -p firn` or set FIRN_BIN"
    );
    binary
}

/// The preload library under test, beside the binary.
pub fn preload_library() -> PathBuf {
    let library = firn_binary().with_file_name("libfirn_preload.so");
    assert!(
        library.exists(),
        "{library:?} is missing: run `cargo build -p firn-preload`"
    );
    library
}

/// The helper program of these tests (writers, appenders, the failing file system).
pub fn helper_binary() -> PathBuf {
    profile_dir().join("firn-test-helper")
}

fn profile_dir() -> PathBuf {
    let test = std::env::current_exe().expect("the path of the test");
    let dir = test.parent().expect("a directory");
    if dir.ends_with("deps") {
        dir.parent().expect("a directory").to_owned()
    } else {
        dir.to_owned()
    }
}

fn with_extension(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut found: Vec<_> = paths
        .filter(|p| p.extension() == Some(OsStr::new(extension)))
        .collect();
    found.sort();
    found
}

fn processes_with_environment(name: &str, value: &Path) -> Vec<u32> {
    let wanted = format!("{name}={}", value.display()).into_bytes();
    let mut pids = Vec::new();
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let Ok(environment) = fs::read(entry.path().join("environ")) else {
            continue;
        };
        if environment
            .split(|byte| *byte == 0)
            .any(|entry| entry == wanted)
            && !is_zombie(pid)
        {
            pids.push(pid);
        }
    }
    pids
}

/// Whether a process has ended and only waits to be reaped.
///
/// Not before its last thread: the first one may be a zombie while others still have files and sockets open.
pub fn is_zombie(pid: u32) -> bool {
    let process = Path::new("/proc").join(pid.to_string());
    let (Ok(stat), Ok(threads)) = (
        fs::read_to_string(process.join("stat")),
        fs::read_dir(process.join("task")),
    ) else {
        return true;
    };
    stat.rsplit(')')
        .next()
        .is_some_and(|rest| rest.starts_with(" Z"))
        && threads.count() <= 1
}

/// Whether a thread, a directory of /proc/PID/task, was stopped by a signal.
pub fn is_stopped(thread: &Path) -> bool {
    let stat = fs::read_to_string(thread.join("stat")).expect("the state of a thread");
    stat.rsplit(')')
        .next()
        .is_some_and(|rest| rest.starts_with(" T"))
}

/// Waits until a thread, a directory of /proc/PID/task, waits for the answer of a FUSE server.
#[track_caller]
pub fn wait_for_request(thread: &Path) {
    let place = thread.join("wchan");
    wait_until(
        "a program waits for the answer to a request",
        std::time::Duration::from_secs(60),
        || {
            fs::read_to_string(&place)
                .is_ok_and(|function| function.contains("request_wait_answer"))
        },
    );
}

/// The last `count` lines.
pub fn tail(text: &str, count: usize) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_codes_of_a_help_are_read() {
        let help = "Usage: firn ls\n\n  9 lives\n\nExit status:\n  0    done\n  12   all in use\n";
        assert_eq!(read_exits(help), BTreeSet::from([0, 12]));
    }

    #[test]
    fn only_processes_of_the_sandbox_are_found_and_killed() {
        let sandbox = Sandbox::new("kill");
        let mut mine = Command::new("sleep");
        sandbox.environment(&mut mine);
        let mut mine = mine.arg("60").spawn().expect("sleep");
        let mut other = Command::new("sleep").arg("60").spawn().expect("sleep");
        wait_until("found", std::time::Duration::from_secs(5), || {
            sandbox.processes() == [mine.id()]
        });
        sandbox.kill_processes();
        assert!(!mine.wait().expect("wait").success());
        assert!(other.try_wait().expect("wait").is_none());
        other.kill().expect("kill");
        other.wait().expect("wait");
    }
}
