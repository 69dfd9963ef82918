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
use firn_backing::{Errno, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags, accessat, fchmod, fstat, openat, statat};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::{Created, Driver, Location, Refusal, create_plain};

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

    fn run(&self, new: &NewFile<'_>, lane: usize) -> std::result::Result<(), ProgramError> {
        let directory = format!("/proc/{}/fd/{}", std::process::id(), new.parent.as_raw_fd());
        let name = new.name.to_owned();
        let arguments = [self.servers[lane].clone(), OsString::from("."), name];
        let owner = file_system_ids();
        let ran = run_program(&self.program, &arguments, |command| {
            command.current_dir(&directory);
            if rustix::process::geteuid().is_root() && owner.uid != 0 {
                command.uid(owner.uid).gid(owner.gid);
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
        // The program would run as root in a directory of somebody else.
        let told = if new.as_caller {
            self.run(new, lane)
                .map_err(|error| Refusal(error.to_string()))
        } else {
            Err(Refusal::from(Errno::ACCESS))
        };
        match told {
            Ok(()) => {
                let file = open_made(new)?;
                Ok(Created { file, wish: Ok(()) })
            }
            Err(refusal) => {
                let file = create_plain(new)?;
                let wish = Err(refusal);
                Ok(Created { file, wish })
            }
        }
    }

    fn find_server(&self, _: BorrowedFd<'_>) -> Location {
        Location::Unknown
    }
}

/// The file that the program made: EIO if that is anything but an empty file of its owner.
fn open_made(new: &NewFile<'_>) -> Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    // A program may give a file any mode, also one that keeps its owner from opening it.
    let file = openat(new.parent, new.name, flags, Mode::empty()).map_err(|_| Errno::IO)?;
    let stat = fstat(&file)?;
    let is_plain = stat.st_mode & libc::S_IFMT == libc::S_IFREG && stat.st_nlink == 1;
    if !is_plain || stat.st_size != 0 || stat.st_uid != file_system_ids().uid {
        return Err(Errno::IO);
    }
    fchmod(&file, Mode::from_raw_mode(new.mode))?;
    Ok(file)
}

struct Ids {
    uid: u32,
    gid: u32,
}

/// Whose files this thread makes.
fn file_system_ids() -> Ids {
    // SAFETY: an invalid id changes nothing; the call returns the one in force and touches no memory.
    let uid = unsafe { libc::syscall(libc::SYS_setfsuid, u32::MAX) } as u32;
    // SAFETY: the same.
    let gid = unsafe { libc::syscall(libc::SYS_setfsgid, u32::MAX) } as u32;
    Ids { uid, gid }
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
