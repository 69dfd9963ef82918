//! A file server whose power can be cut: a process with the server of [`firn_testfs::power`].

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::sandbox::{Sandbox, helper_binary, unmount_lazily};

/// A running server; ends with the value, and its disk with it.
pub struct PowerFs {
    mount_point: PathBuf,
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl PowerFs {
    /// Serves an empty disk at `<sandbox>/<name>`.
    pub fn new(sandbox: &Sandbox, name: &str) -> Self {
        let mount_point = sandbox.mkdir(name);
        let mut command = Command::new(helper_binary());
        command
            .arg("powerfs")
            .arg(&mount_point)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().expect("start the server");
        let commands = child.stdin.take().expect("a pipe");
        let answers = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut server = Self {
            mount_point,
            child,
            commands,
            answers,
        };
        server.wait_for_answer();
        server
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mount_point
    }

    /// Cuts the power, and comes back with what is left. It must be unused meanwhile.
    pub fn cut(&mut self, seed: u64) {
        writeln!(self.commands, "cut {seed}").expect("tell the server");
        self.wait_for_answer();
    }

    /// fsync and fsyncdir requests that have come so far.
    pub fn syncs(&mut self) -> u64 {
        writeln!(self.commands, "syncs").expect("ask the server");
        self.wait_for_answer().trim().parse().expect("a number")
    }

    fn wait_for_answer(&mut self) -> String {
        let mut line = String::new();
        self.answers
            .read_line(&mut line)
            .expect("the server answers");
        assert!(!line.is_empty(), "the server ended");
        line
    }
}

impl Drop for PowerFs {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        unmount_lazily(&self.mount_point);
    }
}
