//! Child processes: runs a program, passes its input, collects its output, and kills the program at a deadline.
//!
//! The crate also answers questions about other processes: how one ended ([`end_of_process`]), and facts from /proc
//! that can be read without waiting for an exec ([`has_memory`]).
//!
//! Promises
//! * [`run`] returns at most [`KILL_WAIT`] after the deadline, whatever the program and its descendants do.
//! * A program that did not end by itself is killed with its process group, and is reaped.
//! * The output never takes more memory than the caller allowed.
//! * Input and output are processed concurrently, so neither can block the other.
//!
//! A descendant that keeps the output open does not delay the return. Once the program has ended, only the bytes that
//! are in the pipe at that moment are read.
//!
//! ```
//! use firn_process::{ExcessOutput, Limits, run};
//! use std::process::Command;
//! use std::time::{Duration, Instant};
//!
//! let limits = Limits {
//!     input: b"three\none\n",
//!     output_bytes_max: 4096,
//!     excess: ExcessOutput::Refuse,
//!     deadline: Instant::now() + Duration::from_secs(10),
//! };
//! let ended = run(Command::new("sort"), limits)?;
//! assert!(ended.status.success());
//! assert_eq!(ended.output, b"one\nthree\n");
//! # Ok::<(), firn_process::RunError>(())
//! ```

mod exit;
mod proc;

pub use exit::{ProcessEnd, end_of_process};
pub use proc::{has_memory, process_of_thread, read_status};

use std::io::{self, PipeReader, PipeWriter};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::{Errno, ioctl_fionbio, ioctl_fionread, retry_on_intr};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

/// Maximum wait for a killed program. A program that hangs in the kernel is left to a thread, which reaps it.
pub const KILL_WAIT: Duration = Duration::from_secs(1);
/// Argument of [`CommandExt::process_group`]: the program becomes the leader of a new process group.
const NEW_GROUP: i32 = 0;
/// Maximum number of bytes of one read: the default capacity of a pipe.
const READ_BYTES: usize = 64 << 10;

/// What happens to output beyond the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExcessOutput {
    /// The excess is read and discarded.
    Discard,
    /// The excess ends the program with [`RunError::TooMuch`].
    Refuse,
}

/// Input and limits of a program.
#[derive(Clone, Copy, Debug)]
pub struct Limits<'a> {
    /// Content of its standard input, after which the input ends.
    pub input: &'a [u8],
    /// Maximum number of bytes of its standard output and error that are kept, in their order of arrival.
    pub output_bytes_max: usize,
    /// What happens to output beyond that limit.
    pub excess: ExcessOutput,
    /// Time at which the program is killed.
    pub deadline: Instant,
}

/// A program that ended by itself.
#[derive(Debug)]
pub struct EndedProgram {
    /// How it ended.
    pub status: ExitStatus,
    /// The beginning of its standard output and error.
    pub output: Vec<u8>,
}

impl EndedProgram {
    /// Returns the output as text for messages.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.output).trim().to_owned()
    }
}

/// The reason why a program did not end by itself.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The program does not exist, or may not be executed.
    #[error("{0}")]
    Start(#[source] io::Error),
    /// It was killed at the deadline.
    #[error("it did not end in time")]
    Late,
    /// It was killed because of its output.
    #[error("its output has more than {bytes_max} bytes")]
    TooMuch {
        /// The limit.
        bytes_max: usize,
    },
    /// It was killed because the kernel refused a call.
    #[error("its input, output or end cannot be watched: {0}")]
    Watch(#[source] io::Error),
}

/// Runs `command` to its end within `limits`, and returns its exit status and output.
///
/// The function sets the command's standard input, output and error, and its process group. Fails if the program cannot
/// be started, exceeds a limit, or cannot be watched. In the last two cases the program has been killed.
pub fn run(mut command: Command, limits: Limits<'_>) -> Result<EndedProgram, RunError> {
    let (output_reader, stdout) = io::pipe().map_err(RunError::Start)?;
    command.stderr(stdout.try_clone().map_err(RunError::Start)?);
    command.stdout(stdout);
    let input_writer = set_up_input(&mut command, limits.input).map_err(RunError::Start)?;
    command.process_group(NEW_GROUP);
    let child = command.spawn().map_err(RunError::Start)?;
    // Dropping the command closes this process's copies of the pipe ends that belong to the program.
    drop(command);
    let mut program = Program(Some(child));
    let mut streams = Streams {
        output_reader: Some(output_reader),
        collected_output: Vec::new(),
        input_writer,
        unwritten_input: limits.input,
        limits,
    };
    let status = program.pass_streams_until_end(&mut streams)?;
    Ok(EndedProgram {
        status,
        output: streams.collected_output,
    })
}

/// Sets the standard input of a command that is to read `bytes`. Returns the end of the pipe to which this process
/// writes them, or `None` if there are none.
fn set_up_input(command: &mut Command, bytes: &[u8]) -> io::Result<Option<PipeWriter>> {
    if bytes.is_empty() {
        command.stdin(Stdio::null());
        return Ok(None);
    }
    let (stdin, input_writer) = io::pipe()?;
    // A write must not wait for the program, because its output must be read meanwhile.
    ioctl_fionbio(&input_writer, true)?;
    command.stdin(stdin);
    Ok(Some(input_writer))
}

/// A child process. Dropping the value kills and reaps the child, unless it has ended before.
struct Program(Option<Child>);

impl Program {
    /// Passes input to the program and collects its output until it ends, and returns its exit status. Fails at the
    /// deadline; the caller then drops the program, which kills it.
    fn pass_streams_until_end(
        &mut self,
        streams: &mut Streams<'_>,
    ) -> Result<ExitStatus, RunError> {
        let Some(child) = &mut self.0 else {
            return Err(RunError::Watch(Errno::CHILD.into()));
        };
        let pidfd = open_pidfd(child).map_err(RunError::Watch)?;
        loop {
            let has_ended = streams.wait_and_pass(&pidfd)?;
            if has_ended {
                break;
            }
        }
        streams.read_remaining_output()?;
        let status = child.wait().map_err(RunError::Watch)?;
        // The program is reaped, so the drop must not kill it.
        self.0 = None;
        Ok(status)
    }
}

impl Drop for Program {
    /// Kills the program with its process group, and reaps it. Does nothing if it was reaped already. If it does not
    /// end within [`KILL_WAIT`], a thread reaps it later.
    fn drop(&mut self) {
        let Some(mut child) = self.0.take() else {
            return;
        };
        // The child is not reaped yet, so its process id cannot belong to another process.
        let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
        // The program may have left its group. Errors are ignored: the wait below shows whether the program has ended.
        let _ = child.kill();
        if !wait_for_end(&child, KILL_WAIT) {
            // If no thread can be started, the child remains a zombie until this process ends.
            let _ = std::thread::Builder::new()
                .name("firn-reaper".into())
                .spawn(move || child.wait());
            return;
        }
        // The child has ended, so this only reaps it.
        let _ = child.wait();
    }
}

/// Opens a descriptor of the child that becomes readable when the child ends.
fn open_pidfd(child: &Child) -> io::Result<OwnedFd> {
    Ok(pidfd_open(Pid::from_child(child), PidfdFlags::empty())?)
}

/// Waits until the child ends, at most for `wait`. Returns whether it has ended.
fn wait_for_end(child: &Child, wait: Duration) -> bool {
    let Ok(pidfd) = open_pidfd(child) else {
        return false;
    };
    let timeout = Timespec::try_from(wait).ok();
    let mut poll_fds = [PollFd::new(&pidfd, PollFlags::IN)];
    let ready_count = retry_on_intr(|| poll(&mut poll_fds, timeout.as_ref()));
    ready_count.is_ok_and(|count| count > 0)
}

/// This process's ends of a program's pipes.
struct Streams<'a> {
    /// Pipe with the program's output. `None` once the program and its descendants have closed it.
    output_reader: Option<PipeReader>,
    /// The output that is returned to the caller.
    collected_output: Vec<u8>,
    /// Pipe to the program's standard input. `None` once all input is written, or the program has closed it.
    input_writer: Option<PipeWriter>,
    /// Input that is not written yet.
    unwritten_input: &'a [u8],
    limits: Limits<'a>,
}

impl Streams<'_> {
    /// Waits until a pipe is ready or the program ends, and reads or writes once. `pidfd` is the descriptor of the
    /// program. Returns whether the program has ended. Fails at the deadline.
    fn wait_and_pass(&mut self, pidfd: &OwnedFd) -> Result<bool, RunError> {
        let deadline = self.limits.deadline;
        let time_left = deadline.saturating_duration_since(Instant::now());
        if time_left.is_zero() {
            return Err(RunError::Late);
        }
        let ready = self.poll_once(pidfd, time_left)?;
        // The output of an ended program is read by `read_remaining_output`.
        if ready.can_read && !ready.has_ended {
            self.read_output(READ_BYTES)?;
        }
        if ready.can_write {
            self.write_input()?;
        }
        Ok(ready.has_ended)
    }

    /// Waits until a pipe is ready or the program ends, at most for `time_max`. Returns what is ready.
    fn poll_once(&self, pidfd: &OwnedFd, time_max: Duration) -> Result<Readiness, RunError> {
        let timeout = Timespec::try_from(time_max).ok();
        let output = self.output_reader.iter();
        let input = self.input_writer.iter();
        // The program is the first entry, then the output and the input follow, if they are open.
        let mut poll_fds = vec![PollFd::new(pidfd, PollFlags::IN)];
        let output_index = poll_fds.len();
        poll_fds.extend(output.map(|fd| PollFd::new(fd, PollFlags::IN)));
        let input_index = poll_fds.len();
        poll_fds.extend(input.map(|fd| PollFd::new(fd, PollFlags::OUT)));
        retry_on_intr(|| poll(&mut poll_fds, timeout.as_ref()))
            .map_err(|errno| RunError::Watch(errno.into()))?;
        let is_ready = |index: usize| {
            let poll_fd: Option<&PollFd<'_>> = poll_fds.get(index);
            poll_fd.is_some_and(|poll_fd| !poll_fd.revents().is_empty())
        };
        Ok(Readiness {
            has_ended: is_ready(0),
            // Without an output pipe, the entry at `output_index` is that of the input pipe. At `input_index` there is
            // the input pipe or nothing.
            can_read: self.output_reader.is_some() && is_ready(output_index),
            can_write: is_ready(input_index),
        })
    }

    /// Reads the bytes that are in the pipe now. It does not wait for the pipe's end, because a descendant could keep
    /// the pipe open and write to it for ever.
    fn read_remaining_output(&mut self) -> Result<(), RunError> {
        let Some(output_reader) = &self.output_reader else {
            return Ok(());
        };
        let mut remaining_bytes =
            ioctl_fionread(output_reader).map_err(|errno| RunError::Watch(errno.into()))?;
        while remaining_bytes > 0 && self.output_reader.is_some() {
            let bytes_max = READ_BYTES.min(usize::try_from(remaining_bytes).unwrap_or(READ_BYTES));
            let read_bytes = self.read_output(bytes_max)? as u64;
            remaining_bytes = remaining_bytes.saturating_sub(read_bytes);
        }
        Ok(())
    }

    /// Reads at most `bytes_max` bytes of output, once, and returns their number; 0 at the end of the output. The pipe
    /// must have data or be at its end, so that the read does not wait. Fails if the output exceeds its limit and the
    /// excess is not discarded.
    fn read_output(&mut self, bytes_max: usize) -> Result<usize, RunError> {
        let Some(output_reader) = &self.output_reader else {
            return Ok(0);
        };
        let mut buffer = vec![0; bytes_max];
        let read_bytes = retry_on_intr(|| rustix::io::read(output_reader, &mut buffer[..]))
            .map_err(|errno| RunError::Watch(errno.into()))?;
        if read_bytes == 0 {
            self.output_reader = None;
        }
        let output_bytes_max = self.limits.output_bytes_max;
        let room = output_bytes_max - self.collected_output.len();
        if read_bytes > room && self.limits.excess == ExcessOutput::Refuse {
            return Err(RunError::TooMuch {
                bytes_max: output_bytes_max,
            });
        }
        self.collected_output
            .extend_from_slice(&buffer[..read_bytes.min(room)]);
        Ok(read_bytes)
    }

    /// Writes as much of the input as the pipe takes now, and closes the pipe after the last byte.
    fn write_input(&mut self) -> Result<(), RunError> {
        let Some(input_writer) = &self.input_writer else {
            return Ok(());
        };
        match rustix::io::write(input_writer, self.unwritten_input) {
            Ok(count) => self.unwritten_input = &self.unwritten_input[count..],
            Err(Errno::AGAIN | Errno::INTR) => {}
            // The program has closed its standard input.
            Err(Errno::PIPE) => self.unwritten_input = &[],
            Err(errno) => return Err(RunError::Watch(errno.into())),
        }
        if self.unwritten_input.is_empty() {
            self.input_writer = None;
        }
        Ok(())
    }
}

/// Result of [`Streams::poll_once`].
struct Readiness {
    /// Whether the program has ended.
    has_ended: bool,
    /// Whether the pipe of the output has bytes, or is at its end.
    can_read: bool,
    /// Whether the pipe of the input takes bytes, or is closed.
    can_write: bool,
}

#[cfg(test)]
mod tests;
