//! A backing that fails on command: a process with the server of [`firn_testfs::faults`].

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use firn_testfs::faults::Control;

use crate::command::wait_until;
use crate::sandbox::{Sandbox, helper_binary, is_mounted, is_stopped, kill, unmount_lazily};
use crate::watchdog::Watchdog;

/// Calls that may hang at a time, and one more, where a test does not say how many.
const THREADS: usize = 160;

/// A running failing file system; ends with the value.
pub struct FaultFs {
    source: PathBuf,
    mount_point: PathBuf,
    control: Control,
    threads: usize,
    child: Option<Child>,
}

impl FaultFs {
    /// Serves `<sandbox>/source` at `<sandbox>/faulty`.
    pub fn new(sandbox: &Sandbox) -> Self {
        Self::of(sandbox, sandbox.mkdir("source"))
    }

    /// Like [`FaultFs::new`], where up to `hung_max` calls may hang at a time.
    pub fn with_hung_max(sandbox: &Sandbox, hung_max: usize) -> Self {
        Self::start_new(sandbox, sandbox.mkdir("source"), hung_max + 1)
    }

    /// Serves `source`, which other servers may serve too, at `<sandbox>/faulty`.
    pub fn of(sandbox: &Sandbox, source: PathBuf) -> Self {
        Self::start_new(sandbox, source, THREADS)
    }

    fn start_new(sandbox: &Sandbox, source: PathBuf, threads: usize) -> Self {
        let control = Control::new(sandbox.join("control"));
        control.fail_writes("").expect("write the control file");
        let mut fault = Self {
            source,
            mount_point: sandbox.mkdir("faulty"),
            control,
            threads,
            child: None,
        };
        fault.start();
        fault
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mount_point
    }

    /// The directory behind it.
    pub fn source(&self) -> &Path {
        &self.source
    }

    /// From now on every write fails with this errno's name; empty heals.
    pub fn fail_writes(&self, errno: &str) {
        self.control
            .fail_writes(errno)
            .expect("write the control file");
    }

    /// From now on every access waits, until [`FaultFs::go_on`].
    pub fn stall(&self) {
        self.signal(libc::SIGSTOP);
        // A thread that is in the middle of an answer stops only when it is scheduled.
        let tasks = format!("/proc/{}/task", self.child.as_ref().expect("it runs").id());
        wait_until(
            "every thread of the failing file system stops",
            Duration::from_secs(20),
            || {
                let mut threads = fs::read_dir(&tasks).expect("its threads");
                threads.all(|thread| is_stopped(&thread.expect("a thread").path()))
            },
        );
    }

    /// Ends a [`FaultFs::stall`].
    pub fn go_on(&self) {
        self.signal(libc::SIGCONT);
    }

    /// From now on this operation of the server (`lookup`, `open`, …) hangs for all paths that begin with `path`,
    /// relative to the source, until [`FaultFs::let_go`].
    pub fn hang(&self, operation: &str, path: &str) {
        self.control.hang(operation, path).expect("let it hang");
    }

    /// Ends a [`FaultFs::hang`].
    pub fn let_go(&self) {
        self.control.let_go().expect("let it go");
    }

    /// Calls that came to hang since [`FaultFs::hang`].
    pub fn hung_count(&self) -> u64 {
        self.control.hung_count()
    }

    /// Kills the server, and with it all that hangs in it, after `limit`: for tests of what hangs, in which nothing
    /// else may end.
    pub fn watchdog(&self, limit: Duration) -> Watchdog {
        let pid = self.child.as_ref().expect("it runs").id();
        Watchdog::arm(limit, move || kill(pid, libc::SIGKILL))
    }

    fn signal(&self, signal: i32) {
        kill(self.child.as_ref().expect("it runs").id(), signal);
    }

    /// Kills the server: every access to the backing now gives ENOTCONN.
    pub fn vanish(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("kill the failing file system");
            child.wait().expect("wait for it");
        }
    }

    /// Brings it back after [`FaultFs::vanish`], with the files it had.
    pub fn start(&mut self) {
        unmount_lazily(&self.mount_point);
        let mut command = Command::new(helper_binary());
        command
            .arg("faultfs")
            .args([&self.source, &self.mount_point])
            .arg(self.control.path())
            .arg(self.threads.to_string());
        self.child = Some(command.spawn().expect("start the failing file system"));
        let ready = || is_mounted(&self.mount_point) && fs::metadata(&self.mount_point).is_ok();
        wait_until(
            "the failing file system is mounted",
            Duration::from_secs(10),
            ready,
        );
    }
}

impl Drop for FaultFs {
    fn drop(&mut self) {
        self.vanish();
        unmount_lazily(&self.mount_point);
    }
}
