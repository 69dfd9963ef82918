//! A mount of the built binary that goes away with its daemon.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use firn_protocol::Status;

use crate::command::{Outcome, run, wait_until};
use crate::sandbox::{
    Sandbox, firn_binary, is_mounted, kill, kill_processes_of, tail, unmount_lazily,
};
use crate::watchdog::{Watchdog, test_limit};

/// A small arena: filled and wrapped within a test, and cheap to create a few hundred times.
pub const SMALL: &str = "arena-size=32M,chunk-size=1M";

/// Options with an arena that no test fills and from which nothing drains by age, and `extra`.
pub fn patient(extra: &str) -> String {
    let comma = if extra.is_empty() { "" } else { "," };
    format!("arena-size=64M,chunk-size=4M,drain-age=10min{comma}{extra}")
}

/// Exit code of `firn umount` while programs use the mount.
const IN_USE: i32 = 11;
/// Longer than a firnd must have served for its keeper to start another one at once.
const SERVED_WELL_SECONDS: f64 = 0.5;
/// Longer than any child takes between fork(2) and exec(2).
const IN_USE_LIMIT: Duration = Duration::from_secs(10);

/// One `firn mount`.
pub struct FirnMount<'a> {
    sandbox: &'a Sandbox,
    backing: PathBuf,
    mount_point: PathBuf,
    pid: u32,
    abandoned: bool,
    watchdog: Watchdog,
}

impl<'a> FirnMount<'a> {
    /// Mounts the sandbox's `backing` at its `mnt`.
    #[track_caller]
    pub fn new(sandbox: &'a Sandbox, options: &str) -> Self {
        Self::over(sandbox, &sandbox.join("backing"), options)
    }

    /// Mounts `backing` at the sandbox's `mnt`.
    #[track_caller]
    pub fn over(sandbox: &'a Sandbox, backing: &Path, options: &str) -> Self {
        Self::at(sandbox, backing, &sandbox.join("mnt"), options)
    }

    /// Mounts `backing` at `mount_point` and asks the daemon for its process id.
    #[track_caller]
    pub fn at(sandbox: &'a Sandbox, backing: &Path, mount_point: &Path, options: &str) -> Self {
        let mut firn = sandbox.firn(mount_args(backing, mount_point, options));
        Self::started_by(sandbox, backing, mount_point, &mut firn)
    }

    /// Mounts `backing` at the sandbox's `mnt`, with a limit on the descriptors of firnd.
    #[track_caller]
    pub fn with_descriptors(
        sandbox: &'a Sandbox,
        backing: &Path,
        options: &str,
        count: u64,
    ) -> Self {
        let mount_point = sandbox.join("mnt");
        // Root's firnd would raise its limit.
        let mut firn = Command::new("setpriv");
        sandbox.environment(&mut firn);
        firn.args(["--bounding-set=-sys_resource", "prlimit"])
            .arg(format!("--nofile={count}:{count}"));
        firn.arg(firn_binary())
            .args(mount_args(backing, &mount_point, options));
        Self::started_by(sandbox, backing, &mount_point, &mut firn)
    }

    #[track_caller]
    fn started_by(
        sandbox: &'a Sandbox,
        backing: &Path,
        mount_point: &Path,
        firn: &mut Command,
    ) -> Self {
        let watchdog = Self::watchdog(sandbox, mount_point);
        run(firn).ok();
        assert!(
            is_mounted(mount_point),
            "`firn mount` said 0 and nothing is mounted"
        );
        let mut mount = Self {
            sandbox,
            backing: backing.to_owned(),
            mount_point: mount_point.to_owned(),
            pid: 0,
            abandoned: false,
            watchdog,
        };
        mount.pid = mount.status().pid;
        mount
    }

    /// A test that takes long by what it does goes on: its watchdog waits anew.
    pub fn note_progress(&self) {
        self.watchdog.note_progress();
    }

    fn watchdog(sandbox: &Sandbox, mount_point: &Path) -> Watchdog {
        let runtime = sandbox.runtime().to_owned();
        let mount_point = mount_point.to_owned();
        Watchdog::arm(test_limit(), move || {
            dump(&runtime);
            kill_processes_of(&runtime);
            unmount_lazily(&mount_point);
        })
    }

    /// Where programs see the files.
    pub fn path(&self) -> &Path {
        &self.mount_point
    }

    /// A path below the mount point.
    pub fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.mount_point.join(name)
    }

    /// The backing directory.
    pub fn backing(&self) -> &Path {
        &self.backing
    }

    /// Descriptors that firnd has now.
    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid))
            .expect("firnd's descriptors")
            .count()
    }

    /// KiB of memory that are firnd's own: not those of the arena.
    pub fn own_memory_kib(&self) -> u64 {
        let status =
            fs::read_to_string(format!("/proc/{}/status", self.pid)).expect("firnd's status");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"))
            .expect("RssAnon");
        line.trim()
            .trim_end_matches(" kB")
            .parse()
            .expect("a number of KiB")
    }

    /// The names of firnd's threads.
    pub fn threads(&self) -> Vec<String> {
        let threads = fs::read_dir(format!("/proc/{}/task", self.pid)).expect("firnd's threads");
        let name = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("comm")).ok();
        threads
            .flatten()
            .filter_map(name)
            .map(|name| name.trim_end().to_owned())
            .collect()
    }

    /// firnd's process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits until firnd has served for so long that its keeper starts another one at once: its death is no fault of the
    /// takeover before.
    #[track_caller]
    pub fn wait_until_served_well(&self) {
        wait_until("firnd served for a while", Duration::from_secs(60), || {
            self.status().uptime_seconds >= SERVED_WELL_SECONDS
        });
    }

    /// kill -9 of firnd alone, over which another one goes on with the mount. Returns the number of the new one, once it
    /// answers.
    #[track_caller]
    pub fn kill_and_go_on(&mut self) -> u32 {
        self.wait_until_served_well();
        let before = self.pid;
        crate::sandbox::kill_alone(before, libc::SIGKILL);
        self.note_takeover(before)
    }

    /// kill -9 of firnd while its keeper is stopped: no firnd serves the mount until
    /// [`FirnMount::continue_keeper`]. Returns the process number of the keeper.
    #[track_caller]
    pub fn kill_under_stopped_keeper(&self) -> u32 {
        self.wait_until_served_well();
        let keeper = crate::sandbox::keeper_of(self.pid).expect("a keeper");
        crate::sandbox::kill_alone(keeper, libc::SIGSTOP);
        crate::sandbox::kill_alone(self.pid, libc::SIGKILL);
        wait_until("firnd is dead", Duration::from_secs(60), || {
            crate::sandbox::is_zombie(self.pid)
        });
        keeper
    }

    /// Lets a stopped keeper start the next firnd, and waits for that.
    #[track_caller]
    pub fn continue_keeper(&mut self, keeper: u32) {
        crate::sandbox::kill_alone(keeper, libc::SIGCONT);
        self.note_takeover(self.pid);
    }

    /// Waits until another firnd than `before` has the mount.
    #[track_caller]
    pub fn note_takeover(&mut self, before: u32) -> u32 {
        let args: [OsString; 3] = ["status".into(), "--json".into(), self.path().into()];
        wait_until("another firnd goes on", Duration::from_secs(60), || {
            let outcome = self.sandbox.run(args.clone());
            if outcome.code != 0 {
                return false;
            }
            let mut status = outcome.json();
            if let Some(list) = status.as_array_mut() {
                status = list.pop().unwrap_or_default();
            }
            let pid = status["pid"].as_u64().unwrap_or(0) as u32;
            self.pid = pid;
            pid != 0 && pid != before
        });
        self.pid
    }

    /// `firn status --json`.
    #[track_caller]
    pub fn status(&self) -> Status {
        status_of(self.sandbox, &self.mount_point)
    }

    /// `firn wait --until <level>` of a path below the mount.
    #[track_caller]
    pub fn wait(&self, level: &str, path: &Path) -> Outcome {
        let args: [OsString; 4] = ["wait".into(), "--until".into(), level.into(), path.into()];
        self.sandbox.run(args)
    }

    /// Unmounts as a user does, which drains first, and waits for the end of firnd.
    #[track_caller]
    pub fn umount(self) -> PathBuf {
        self.try_umount().ok();
        assert!(
            !is_mounted(&self.mount_point),
            "`firn umount` said 0 and it is still mounted"
        );
        self.wait_for_end();
        self.backing.clone()
    }

    /// What `firn umount` says when nothing uses the mount any more.
    pub fn try_umount(&self) -> Outcome {
        // Another test of this process may fork at any time: until its child calls exec(2) it has copies of the
        // descriptors of all tests.
        let unmount = || {
            self.sandbox
                .run([OsString::from("umount"), self.mount_point.clone().into()])
        };
        let mut last = unmount();
        wait_until("nothing uses the mount", IN_USE_LIMIT, || {
            let in_use = last.code == IN_USE && last.stderr.contains("the mount is in use");
            if in_use {
                last = unmount();
            }
            !in_use
        });
        last
    }

    /// kill -9 of firnd; the dead mount is detached, so that nothing waits for it.
    pub fn kill(self) -> PathBuf {
        kill(self.pid, libc::SIGKILL);
        self.wait_for_end();
        self.backing.clone()
    }

    /// Forgets a mount whose firnd is dead without taking it away: the next `firn mount` has to cope
    /// with it as it is. The sandbox still cleans up.
    pub fn abandon(mut self) {
        self.abandoned = true;
    }

    /// Waits until firnd has ended.
    pub fn wait_for_end(&self) {
        let pid = self.pid;
        wait_until("firnd ends", Duration::from_secs(60), || {
            crate::sandbox::is_zombie(pid)
        });
    }
}

impl Drop for FirnMount<'_> {
    fn drop(&mut self) {
        if self.pid != 0 {
            if std::thread::panicking() && !crate::sandbox::is_zombie(self.pid) {
                dump(self.sandbox.runtime());
            }
            kill(self.pid, libc::SIGKILL);
        }
        if !self.abandoned {
            unmount_lazily(&self.mount_point);
        }
    }
}

/// `firn status --json` of a mount point.
#[track_caller]
pub fn status_of(sandbox: &Sandbox, mount_point: &Path) -> Status {
    let args: [OsString; 3] = ["status".into(), "--json".into(), mount_point.into()];
    let outcome = sandbox.run(args).ok();
    let mut value = outcome.json();
    // One mount is asked for: a list of one is as good as the object.
    if let Some(list) = value.as_array_mut() {
        value = list
            .pop()
            .unwrap_or_else(|| panic!("an empty list of mounts: {outcome}"));
    }
    serde_json::from_value(value).unwrap_or_else(|e| panic!("not a status ({e}): {outcome}"))
}

/// The arguments of `firn mount`.
pub fn mount_args(backing: &Path, mount_point: &Path, options: &str) -> Vec<OsString> {
    let mut args: Vec<OsString> = vec!["mount".into(), backing.into(), mount_point.into()];
    if !options.is_empty() {
        args.extend(["-o".into(), options.into()]);
    }
    args
}

/// Prints what the processes of a runtime directory do and what they logged.
fn dump(runtime: &Path) {
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        if !String::from_utf8_lossy(&environment).contains(&*runtime.to_string_lossy()) {
            continue;
        }
        eprintln!("--- threads of process {:?}", entry.file_name());
        for thread in fs::read_dir(entry.path().join("task"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let read =
                |name: &str| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
            let place = read("stack").lines().next().unwrap_or_default().to_owned();
            eprintln!("{} {} {place}", read("comm").trim(), read("wchan"));
        }
    }
    for entry in fs::read_dir(runtime).into_iter().flatten().flatten() {
        if entry
            .path()
            .extension()
            .is_some_and(|extension| extension == "log")
        {
            let log = fs::read_to_string(entry.path()).unwrap_or_default();
            eprintln!("--- {:?}\n{}", entry.path(), tail(&log, 60));
        }
    }
}
