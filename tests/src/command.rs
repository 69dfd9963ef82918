//! Running other programs with a time limit, and waiting for conditions.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How often a condition is looked at: short beside every limit, long beside one look.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// No single program of these tests needs longer; only a hang does.
pub const PROGRAM_LIMIT: Duration = Duration::from_secs(180);

/// What became of a program.
#[derive(Debug)]
pub struct Outcome {
    /// Exit code; 128 + signal where a signal ended it.
    pub code: i32,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
    /// The command line, for messages.
    pub line: String,
}

impl Outcome {
    /// Panics with everything known unless the exit code is 0.
    #[track_caller]
    pub fn ok(self) -> Self {
        self.code(0)
    }

    /// Panics with everything known unless the exit code is `expected`.
    #[track_caller]
    pub fn code(self, expected: i32) -> Self {
        assert!(
            self.code == expected,
            "expected exit code {expected}: {self}"
        );
        self
    }

    /// Panics unless standard error holds `word`, in any case of letters.
    #[track_caller]
    pub fn says(self, word: &str) -> Self {
        let found = self.stderr.to_lowercase().contains(&word.to_lowercase());
        assert!(found, "standard error does not say {word:?}: {self}");
        self
    }

    /// Standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("not JSON ({e}): {self}"))
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            code,
            stdout,
            stderr,
            line,
        } = self;
        write!(
            f,
            "`{line}` ended with {code}\n--- stdout\n{stdout}\n--- stderr\n{stderr}\n---"
        )
    }
}

/// Runs `command` to its end. Output goes to files, not pipes: a daemon left behind that still holds
/// them cannot make the test wait.
#[track_caller]
pub fn run(command: &mut Command) -> Outcome {
    run_within(command, PROGRAM_LIMIT)
}

/// [`run`] with a limit; a program that takes longer is killed and the test fails.
#[track_caller]
pub fn run_within(command: &mut Command, limit: Duration) -> Outcome {
    let line = describe(command);
    let mut stdout = tempfile::tempfile().expect("a temporary file for the output");
    let mut stderr = tempfile::tempfile().expect("a temporary file for the messages");
    command
        .stdin(Stdio::null())
        .stdout(stdout.try_clone().expect("dup"))
        .stderr(stderr.try_clone().expect("dup"));
    let deadline = Instant::now() + limit;
    let mut child = loop {
        match command.spawn() {
            // Another test of this process is between fork and exec, with a descriptor that wrote the program.
            Err(e) if e.kind() == ErrorKind::ExecutableFileBusy && Instant::now() < deadline => {
                std::thread::yield_now();
            }
            started => {
                break started.unwrap_or_else(|e| {
                    panic!("cannot start `{line}`: {e} (scripts/setup installs it)")
                });
            }
        }
    };
    let status = wait_child(&mut child, limit);
    let out = text(&mut stdout);
    let err = text(&mut stderr);
    let Some(status) = status else {
        panic!("`{line}` took longer than {limit:?}\n--- stdout\n{out}\n--- stderr\n{err}");
    };
    Outcome {
        code: exit_code(status),
        stdout: out,
        stderr: err,
        line,
    }
}

/// Copies a program so that it can be started: by another process, as a child that another test starts
/// meanwhile would hold our descriptor for writing, and execve(2) gave ETXTBSY.
#[track_caller]
pub fn copy_program(from: &Path, to: &Path) {
    run(Command::new("cp").arg(from).arg(to)).ok();
}

/// Writes a script that can be started, by another process for the reason that [`copy_program`] has.
#[track_caller]
pub fn write_program(path: &Path, text: &str) {
    let mut writer = Command::new("tee");
    writer.arg(path).stdin(Stdio::piped()).stdout(Stdio::null());
    let mut writer = writer.spawn().expect("start tee");
    let mut input = writer.stdin.take().expect("its input");
    input.write_all(text.as_bytes()).expect("write a program");
    drop(input);
    assert!(writer.wait().expect("waitpid").success(), "tee {path:?}");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("chmod");
}

/// Waits for a child; kills it and gives `None` when `limit` has passed.
pub fn wait_child(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().expect("waitpid") {
            return Some(status);
        }
        if Instant::now() > end {
            child.kill().ok();
            // A process stuck in the kernel may not be reaped at once; the watchdog frees it.
            return None;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Exit code as a shell says it.
pub fn exit_code(status: ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Waits until `condition` holds; panics with `what` when `limit` has passed.
#[track_caller]
pub fn wait_until(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + limit;
    while !condition() {
        assert!(Instant::now() < end, "still not so after {limit:?}: {what}");
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn describe(command: &Command) -> String {
    let mut line = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        line.push(' ');
        line.push_str(&arg.to_string_lossy());
    }
    line
}

fn text(file: &mut File) -> String {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).expect("rewind");
    file.read_to_end(&mut bytes).expect("read back the output");
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_hangs_is_ended_and_reported() {
        let caught = std::panic::catch_unwind(|| {
            run_within(Command::new("sleep").arg("60"), Duration::from_millis(100));
        });
        assert!(caught.is_err());
    }

    #[test]
    fn a_daemon_that_keeps_the_output_open_does_not_block_the_run() {
        let begin = Instant::now();
        run(Command::new("sh").args(["-c", "sleep 3 & echo started"])).ok();
        assert!(begin.elapsed() < Duration::from_secs(2));
    }

    #[test]
    fn a_signal_becomes_128_plus_its_number() {
        assert_eq!(run(Command::new("sh").args(["-c", "kill -9 $$"])).code, 137);
    }
}
