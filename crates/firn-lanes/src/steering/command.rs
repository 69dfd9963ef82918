//! Any other file system: a program of the site makes the file.
//!
//! It runs as the file's owner in the file's directory, so that it can do nothing that the owner could not.

use std::ffi::{OsStr, OsString};
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use firn_backing::dir::steering::NewFile;
use firn_backing::{Caller, Errno, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Access, AtFlags, CWD, Mode, accessat, fchmod, statat};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::{Created, Driver, Location, Refusal, create_plain, open_made};

/// How long a program may take.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// Bytes of what it says that are repeated.
const MESSAGE_BYTES: usize = 400;

/// Why a program did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// It could not be started.
    #[error("cannot run `{program}`: {source}")]
    Start {
        /// As it was given.
        program: String,
        /// Why.
        source: std::io::Error,
    },
    /// It ended with an error.
    #[error("`{program}`: {message}")]
    Failed {
        /// As it was given.
        program: String,
        /// What it said, or how it ended.
        message: String,
    },
    /// It did not end.
    #[error("`{program}` did not end within {} s", TIME_LIMIT.as_secs())]
    TimeLimit {
        /// As it was given.
        program: String,
    },
}

/// Makes files by `PROGRAM LANE . NAME`, in the file's directory.
#[derive(Debug)]
pub struct ProgramOfSite {
    program: OsString,
    /// What the program calls the lanes.
    servers: Vec<OsString>,
}

impl ProgramOfSite {
    /// `program` makes an empty regular file, or fails where the name exists.
    pub fn new(program: OsString, servers: &[OsString]) -> Self {
        Self {
            program,
            servers: servers.to_vec(),
        }
    }

    fn run(
        &self,
        caller: &Caller,
        new: &NewFile<'_>,
        lane: usize,
    ) -> std::result::Result<(), ProgramError> {
        let directory = format!("/proc/{}/fd/{}", std::process::id(), new.parent.as_raw_fd());
        let name = new.name.to_owned();
        let arguments = [self.servers[lane].clone(), OsString::from("."), name];
        let ran = run_program(&self.program, &arguments, |command| {
            command.current_dir(&directory);
            if rustix::process::geteuid().is_root() && caller.uid != 0 {
                command.uid(caller.uid).gid(caller.gid);
            }
        });
        ran.map(drop)
    }
}

impl Driver for ProgramOfSite {
    fn check(&self, _: BorrowedFd<'_>) -> std::result::Result<(), String> {
        let access = Access::EXEC_OK;
        accessat(CWD, &self.program, access, AtFlags::EACCESS).map_err(|error| {
            let program = self.program.display();
            format!("`{program}` cannot be run: {error}")
        })
    }

    fn create(&self, new: &NewFile<'_>, lane: usize) -> Result<Created> {
        match statat(new.parent, new.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => return Err(Errno::EXIST),
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
        // Without the caller's ids the program would run as root in a directory of somebody else.
        let made = match new.caller {
            None => Err(Refusal::from(Errno::ACCESS)),
            Some(caller) => match self.run(caller, new, lane) {
                Ok(()) => Ok(open_made_by(caller, new)?),
                Err(error) => Err(Refusal(error.to_string())),
            },
        };
        match made {
            Ok(file) => Ok(Created { file, wish: Ok(()) }),
            Err(refusal) => Ok(Created {
                file: create_plain(new)?,
                wish: Err(refusal),
            }),
        }
    }

    fn find_server(&self, _: BorrowedFd<'_>) -> Location {
        Location::Unknown
    }
}

/// The file that the program made: EIO if that is anything but an empty file of the caller with one name. A program may
/// give it any mode, also one that keeps its owner from opening it.
fn open_made_by(caller: &Caller, new: &NewFile<'_>) -> Result<OwnedFd> {
    let (file, stat) = open_made(new).map_err(|_| Errno::IO)?;
    if stat.st_nlink != 1 || stat.st_uid != caller.uid {
        return Err(Errno::IO);
    }
    fchmod(&file, Mode::from_raw_mode(new.mode))?;
    Ok(file)
}

/// Runs a program to its end, within the time limit; the first line that it printed.
pub(super) fn run_program(
    program: &OsStr,
    arguments: &[OsString],
    prepare: impl FnOnce(&mut Command),
) -> std::result::Result<String, ProgramError> {
    let name = program.to_string_lossy().into_owned();
    let start_error = |source| ProgramError::Start {
        program: name.clone(),
        source,
    };
    let mut command = Command::new(program);
    command.args(arguments);
    let (said, say) = io::pipe().map_err(start_error)?;
    let say_as_well = say.try_clone().map_err(start_error)?;
    command.stdin(Stdio::null());
    command.stdout(say).stderr(say_as_well);
    // What it starts is killed with it.
    command.process_group(0);
    prepare(&mut command);
    let child = command.spawn().map_err(start_error)?;
    // With this process's ends of the pipe.
    drop(command);
    let end = watch(child, said).map_err(start_error)?;
    match end.status {
        Some(status) if status.success() => Ok(first_line(&end.said)),
        Some(_) => Err(ProgramError::Failed {
            program: name,
            message: first_line(&end.said),
        }),
        None => Err(ProgramError::TimeLimit { program: name }),
    }
}

/// How a program ended.
struct End {
    /// None if it had to be killed.
    status: Option<ExitStatus>,
    /// The beginning of what it printed.
    said: Vec<u8>,
}

/// Waits for a program, which may say as much as it likes, and kills it at the time limit.
fn watch(mut child: Child, pipe: PipeReader) -> io::Result<End> {
    let pid = Pid::from_child(&child);
    let deadline = Instant::now() + TIME_LIMIT;
    let ended = pidfd_open(pid, PidfdFlags::empty())?;
    let mut pipe = Some(pipe);
    let mut said = Vec::new();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).expect("some seconds");
        let mut ready = vec![PollFd::new(&ended, PollFlags::IN)];
        ready.extend(pipe.iter().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
        if retry_on_intr(|| poll(&mut ready, Some(&left)))? == 0 {
            let _ = kill_process_group(pid, Signal::KILL);
            child.wait()?;
            return Ok(End { status: None, said });
        }
        let has_ended = !ready[0].revents().is_empty();
        let has_said = ready.get(1).is_some_and(|pipe| !pipe.revents().is_empty());
        drop(ready);
        if has_said && !read_some(&mut pipe, &mut said)? {
            pipe = None;
        }
        if has_ended && !has_said {
            let status = child.wait().map(Some)?;
            return Ok(End { status, said });
        }
    }
}

/// Keeps the beginning of what is read; false at the end.
fn read_some(pipe: &mut Option<PipeReader>, said: &mut Vec<u8>) -> io::Result<bool> {
    let mut buf = [0; MESSAGE_BYTES];
    let len = pipe.as_mut().map_or(Ok(0), |pipe| pipe.read(&mut buf))?;
    let room = MESSAGE_BYTES - said.len();
    said.extend(&buf[..len.min(room)]);
    Ok(len > 0)
}

fn first_line(said: &[u8]) -> String {
    let said = String::from_utf8_lossy(said);
    let first = said.lines().find(|line| !line.trim().is_empty());
    first.map_or_else(
        || "it ended with an error and said nothing".to_owned(),
        |line| line.trim().to_owned(),
    )
}
