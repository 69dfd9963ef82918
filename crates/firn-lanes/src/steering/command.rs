//! Creates each new file on a chosen server of the file system, by a program that the site provides.
//!
//! Other drivers know how one file system (Lustre, MooseFS) is told the server. This one is for all others: the
//! administrator of the site writes the program. A *lane* is one server, by the name that the program understands.
//!
//! The program runs as the owner of the file, in the file's directory. It can therefore do only what the owner may do.
//! If it fails, the file is created without a choice of the server.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use firn_backing::dir::steering::NewFile;
use firn_backing::{Caller, Errno, Result};
use firn_process::{EndedProgram, ExcessOutput, Limits, RunError};
use rustix::fs::{Access, AtFlags, CWD, Mode, accessat, fchmod, statat};

use super::{Created, Driver, Location, Refusal, create_plain, open_foreign_file};

/// Maximum run time of a program.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// Maximum number of bytes of the program's output in a message.
const MESSAGE_BYTES: usize = 400;

/// Error of a program.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// The program could not be started, or had to be killed.
    #[error("cannot run `{program}`: {source}")]
    NotRun {
        /// The program, as it was configured.
        program: String,
        /// The error.
        source: RunError,
    },
    /// The program ended with an error.
    #[error("`{program}`: {message}")]
    Failed {
        /// The program, as it was configured.
        program: String,
        /// The first line of the program's output.
        message: String,
    },
    /// The program did not end in time.
    #[error("`{program}` did not end within {} s", TIME_LIMIT.as_secs())]
    TimeLimit {
        /// The program, as it was configured.
        program: String,
    },
}

/// Creates files by running `PROGRAM LANE . NAME` in the file's directory.
#[derive(Debug)]
pub struct ProgramOfSite {
    program: OsString,
    /// Names of the lanes, as the program receives them.
    servers: Vec<OsString>,
}

impl ProgramOfSite {
    /// Creates the placement. `program` must create an empty regular file, and must fail if the name exists already.
    pub fn new(program: OsString, servers: &[OsString]) -> Self {
        Self {
            program,
            servers: servers.to_vec(),
        }
    }

    /// Runs the configured program as the user `caller`. It must create the file `new` on the server of this lane.
    fn run(
        &self,
        caller: &Caller,
        new: &NewFile<'_>,
        lane: usize,
    ) -> std::result::Result<(), ProgramError> {
        // The directory by its descriptor: its path may have changed since it was opened.
        let directory = format!("/proc/{}/fd/{}", std::process::id(), new.parent.as_raw_fd());
        let name = new.name.to_owned();
        let arguments = [self.servers[lane].clone(), OsString::from("."), name];
        run_program(&self.program, &arguments, |command| {
            command.current_dir(&directory);
            // Only root can change the user. Without root, the program runs as the user of this process.
            if rustix::process::geteuid().is_root() && caller.uid != 0 {
                command.uid(caller.uid).gid(caller.gid);
            }
        })?;
        Ok(())
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

    /// Lets the program create the file on the server of this lane. If the program fails, creates the file without a
    /// choice of the server; `acceptance` in the result is then an error with the reason. Fails with EEXIST if the name
    /// exists.
    fn create(&self, new: &NewFile<'_>, lane: usize) -> Result<Created> {
        // A file of this name must not be taken for one that the program created.
        match statat(new.parent, new.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => return Err(Errno::EXIST),
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
        let refusal = match new.caller {
            Some(caller) => match self.run(caller, new, lane) {
                Ok(()) => {
                    return Ok(Created {
                        file: open_file_of(caller, new)?,
                        acceptance: Ok(()),
                    });
                }
                Err(error) => Refusal(error.to_string()),
            },
            // Without the caller's ids, the program would run as root in another user's directory. It is therefore not
            // run.
            None => Refusal::from(Errno::ACCESS),
        };
        Ok(Created {
            file: create_plain(new)?,
            acceptance: Err(refusal),
        })
    }

    fn find_server(&self, _: BorrowedFd<'_>) -> Location {
        Location::Unknown
    }
}

/// Opens the file that the program created. Fails with EIO if it is not an empty file of the caller with one name.
///
/// The program may give the file any mode, even one that prevents its owner from opening it.
fn open_file_of(caller: &Caller, new: &NewFile<'_>) -> Result<OwnedFd> {
    let (file, stat) = open_foreign_file(new).map_err(|_| Errno::IO)?;
    if stat.st_nlink != 1 || stat.st_uid != caller.uid {
        return Err(Errno::IO);
    }
    fchmod(&file, Mode::from_raw_mode(new.mode))?;
    Ok(file)
}

/// Runs a program to its end, and returns the first line of its output. Fails if the program cannot be started, reports
/// an error by its exit status, or does not end within `TIME_LIMIT`. `prepare` may set its directory and its user.
pub(super) fn run_program(
    program: &OsStr,
    arguments: &[OsString],
    prepare: impl FnOnce(&mut Command),
) -> std::result::Result<String, ProgramError> {
    let name = program.to_string_lossy().into_owned();
    let mut command = Command::new(program);
    command.args(arguments);
    prepare(&mut command);
    let limits = Limits {
        input: b"",
        output_bytes_max: MESSAGE_BYTES,
        excess: ExcessOutput::Discard,
        deadline: Instant::now() + TIME_LIMIT,
    };
    match firn_process::run(command, limits) {
        Ok(EndedProgram { status, output }) if status.success() => Ok(first_line(&output)),
        Ok(EndedProgram { output, .. }) => Err(ProgramError::Failed {
            program: name,
            message: first_line(&output),
        }),
        Err(RunError::Late) => Err(ProgramError::TimeLimit { program: name }),
        Err(error) => Err(ProgramError::NotRun {
            program: name,
            source: error,
        }),
    }
}

/// Returns the first line of a program's output that is not empty. If there is none, returns a sentence for the error.
fn first_line(output: &[u8]) -> String {
    let output = String::from_utf8_lossy(output);
    for line in output.lines() {
        let line = line.trim();
        if !line.is_empty() {
            return line.to_owned();
        }
    }
    "it ended with an error and wrote no message".to_owned()
}
