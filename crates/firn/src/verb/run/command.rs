//! The user's command, which `firn run` executes: its environment, its start, and its exit status.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};

use super::SIGNAL_STATUS_BASE;
use crate::failure::{FAILED, Failure};

/// Exit statuses of a shell for a command that is not found, and for one that cannot be run.
const NOT_FOUND_STATUS: u8 = 127;
const NOT_EXECUTABLE_STATUS: u8 = 126;
/// Variable that tells libuv, and so Node, whether to use io_uring. Some versions use it unless the value is `0`.
const LIBUV_USES_IO_URING: &str = "UV_USE_IO_URING";
/// Variable that lists the variables which Open MPI passes to ranks on other hosts, besides its own.
const OPEN_MPI_LIST: &str = "OMPI_MCA_mca_base_env_list";
/// Variable that names the file in which ROMIO looks for hints.
pub(super) const ROMIO_HINTS: &str = "ROMIO_HINTS";
/// Variable for data sieving in OMPIO, the I/O layer of Open MPI. See [`super::hints`] for the harm of data sieving.
const OMPIO_DATA_SIEVING: &str = "OMPI_MCA_fbtl_posix_write_datasieving";

/// The mount as the command sees it, from which its environment variables are made.
pub(super) struct Environment {
    /// Mount point under which the command sees its files.
    pub(super) prefix: PathBuf,
    /// The preload library. `None` means that the command runs without it.
    pub(super) preload: Option<PathBuf>,
    /// File with hints for ROMIO. Only mounts with layout=log need one.
    pub(super) romio_hints: Option<PathBuf>,
}

/// Starts the command `words`. Fails with exit status 127 if the program is not found, and with 126 if it cannot
/// be run, as shells do.
pub(super) fn start_command(
    words: &[OsString],
    environment: &Environment,
) -> Result<Child, Failure> {
    let (program, args) = words.split_first().expect("clap demands a command");
    let mut command = Command::new(program);
    command.args(args);
    environment.set_variables(&mut command);
    command.spawn().map_err(|error| {
        let exit_status = if error.kind() == std::io::ErrorKind::NotFound {
            NOT_FOUND_STATUS
        } else {
            NOT_EXECUTABLE_STATUS
        };
        Failure::new(
            exit_status,
            format!(
                "cannot run {}: {error}",
                firn_format::quote::quoted(program.as_encoded_bytes())
            ),
        )
    })
}

impl Environment {
    /// Sets the environment variables that make the command use the mount: those of Firn, of its preload library (which
    /// passes file calls to Firn), of Node, of ROMIO and of Open MPI.
    ///
    /// Variables of other software that the user has set remain unchanged; lists and hints are extended.
    fn set_variables(&self, command: &mut Command) {
        let is_set = |name: &str| std::env::var_os(name).is_some();
        command.env("FIRN_PREFIX", &self.prefix);
        // Variables that ranks on other hosts need, too.
        let mut forwarded_names = vec!["FIRN_PREFIX"];
        // Node uses io_uring, whose calls the preload library cannot see. They would reach the empty stub files, or go
        // through the kernel's page cache.
        if !is_set(LIBUV_USES_IO_URING) {
            command.env(LIBUV_USES_IO_URING, "0");
        }
        if let Some(library) = &self.preload {
            let other_libraries = std::env::var_os("LD_PRELOAD");
            command.env("LD_PRELOAD", prepend_library(library, other_libraries));
            forwarded_names.insert(0, "LD_PRELOAD");
        }
        if let Some(hints) = &self.romio_hints {
            command.env(ROMIO_HINTS, hints);
            forwarded_names.push(ROMIO_HINTS);
            if !is_set(OMPIO_DATA_SIEVING) {
                command.env(OMPIO_DATA_SIEVING, "false");
            }
        }
        if is_set(firn_client::paths::RUNTIME_DIR_ENV) {
            forwarded_names.push(firn_client::paths::RUNTIME_DIR_ENV);
        }
        // Open MPI passes a variable to ranks on other hosts only if this list names it.
        if !is_set(OPEN_MPI_LIST) {
            command.env(OPEN_MPI_LIST, forwarded_names.join(";"));
        }
    }
}

/// Returns a value of LD_PRELOAD with `library` before the libraries that the user has set.
fn prepend_library(library: &Path, other_libraries: Option<OsString>) -> OsString {
    let mut list = library.as_os_str().to_owned();
    if let Some(others) = other_libraries.filter(|others| !others.is_empty()) {
        list.push(OsStr::new(":"));
        list.push(others);
    }
    list
}

/// Returns in words how the command ended.
pub(super) fn describe_end(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(0), _) => "the command succeeded".into(),
        (Some(code), _) => format!("the command failed with exit status {code}"),
        (None, Some(signal)) => format!("the command was killed by signal {signal}"),
        (None, None) => "the command failed".into(),
    }
}

/// Returns the exit status of the command as a shell does: 128 plus the number of a signal that ended it.
pub(super) fn exit_status_of(status: ExitStatus) -> u8 {
    let shell_status = match (status.code(), status.signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => SIGNAL_STATUS_BASE + signal,
        (None, None) => return FAILED,
    };
    u8::try_from(shell_status).unwrap_or(FAILED)
}
