//! Starts firnd, the process that serves a mount, and receives its messages.
//!
//! `firn mount` runs its own binary again under the name `firnd`, or under that of the keeper, which starts firnd, and
//! the next one when it dies. stdin is the request, a file of JSON, and stdout is a pipe. firnd sends [`StartMessage`]s
//! on the pipe, one JSON object in each line; the last one is `Ready` or `Failed`. Then the pipe is closed, and stdout
//! becomes the log.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use firn_config::Takeover;
use firn_format::quote::quoted_path;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use crate::error::MountError;
use crate::keeper::{ENDS_WITH_PARENT, KEEPER_NAME};
use crate::mount_request::MountRequest;

/// The name under which the binary is firnd.
const NAME: &str = "firnd";
/// Limit of bytes that are read from a report: some notices and one failure.
const REPORT_BYTES_MAX: u64 = 64 << 10;

/// A message of firnd to `firn mount`, before the mount is usable.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StartMessage {
    /// A message for the user.
    Notice(String),
    /// The mount is usable.
    Ready,
    /// The mount has failed.
    Failed {
        /// The error.
        text: String,
        /// The exit status for firn.
        code: u8,
    },
}

/// Starts firnd, the process that serves the mount of `request`, and waits until its mount is usable or has failed.
/// With `takeover=auto` it starts the keeper, which starts firnd and the next one when it dies. `notice` gets messages
/// for the user.
pub(crate) fn spawn(
    request: &MountRequest,
    notice: &mut dyn FnMut(String),
) -> Result<(), MountError> {
    let request = &with_absolute_paths(request);
    let mut command = Command::new("/proc/self/exe");
    match request.options.takeover {
        Takeover::Auto => {
            command.arg0(KEEPER_NAME);
            if request.ends_with_parent {
                command.arg(ENDS_WITH_PARENT);
            }
        }
        Takeover::No => {
            command.arg0(NAME);
        }
    }
    let mut child = command
        .stdin(write_request(request)?)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(MountError::io("start firnd"))?;
    let Some(stdout) = child.stdout.take() else {
        return Err(silent_firnd_error());
    };
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(StartMessage::Notice(text)) => notice(text),
            Ok(StartMessage::Ready) => return Ok(()),
            Ok(StartMessage::Failed { text, code }) => {
                // The process has ended or is ending; this removes its zombie.
                let _ = child.wait();
                return Err(MountError::Reported { text, code });
            }
            Err(_) => {}
        }
    }
    // The pipe has ended without a result; this removes the zombie.
    let _ = child.wait();
    Err(silent_firnd_error())
}

/// Returns the request with absolute paths, because keeper and firnd have another current directory.
fn with_absolute_paths(request: &MountRequest) -> MountRequest {
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    MountRequest {
        backing: absolute(&request.backing),
        mount_point: absolute(&request.mount_point),
        ..request.clone()
    }
}

/// Returns the request in a memory file, which each firnd of the mount reads from its beginning.
pub(crate) fn write_request(request: &MountRequest) -> Result<File, MountError> {
    let json = serde_json::to_vec(request)
        .map_err(|error| MountError::io("encode the request")(error.into()))?;
    let write_to_memory_file = || {
        let mut file = File::from(memfd_create(c"firn-request", MemfdFlags::CLOEXEC)?);
        file.write_all(&json)?;
        file.rewind()?;
        Ok(file)
    };
    write_to_memory_file().map_err(MountError::io("keep the request"))
}

/// Returns the error for a firnd that ended without a message; it names the logs.
fn silent_firnd_error() -> MountError {
    match firn_client::paths::runtime_dir() {
        Ok(dir) => MountError::Silent {
            log: quoted_path(&dir.join("*.log")),
        },
        Err(error) => error.into(),
    }
}

/// The process that waits for notices and for the mount, from firnd's side.
pub(crate) enum Reporter<'a> {
    /// `firn mount` waits at the other end of a pipe.
    Pipe(File),
    /// The mount is in the foreground, so this process waits itself.
    Foreground(&'a mut dyn FnMut(String)),
}

impl Reporter<'_> {
    /// Passes on a message for the user.
    pub(crate) fn notice(&mut self, text: String) {
        tracing::info!("{text}");
        match self {
            Self::Pipe(pipe) => send(pipe, &StartMessage::Notice(text)),
            Self::Foreground(notice) => notice(text),
        }
    }

    /// Reports that the mount is usable.
    pub(crate) fn ready(self) {
        if let Self::Pipe(mut pipe) = self {
            send(&mut pipe, &StartMessage::Ready);
        }
    }
}

/// Reports to `firn mount` that the mount has failed.
pub(crate) fn report_failure(pipe: &mut File, error: &MountError) {
    send(
        pipe,
        &StartMessage::Failed {
            text: error.to_string(),
            code: error.exit_code(),
        },
    );
}

/// Returns the failure in a file of [`StartMessage`]s; `None` if it has none.
pub(crate) fn read_failure(report: OwnedFd) -> Option<String> {
    // The position of the file is where the other firnd has stopped writing.
    let mut report = File::from(report);
    report.rewind().ok()?;
    let lines = BufReader::new(report.take(REPORT_BYTES_MAX)).lines();
    lines.map_while(Result::ok).find_map(|line| {
        let message = serde_json::from_str(&line).ok()?;
        match message {
            StartMessage::Failed { text, .. } => Some(text),
            StartMessage::Notice(_) | StartMessage::Ready => None,
        }
    })
}

/// Sends a message to `firn mount` as one line of JSON.
fn send(pipe: &mut File, message: &StartMessage) {
    let Ok(mut line) = serde_json::to_vec(message) else {
        return;
    };
    line.push(b'\n');
    // If `firn mount` was killed meanwhile, the mount continues without it.
    let _ = pipe.write_all(&line);
}
