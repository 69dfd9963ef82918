//! The command of a run: its environment, its start, and how it ended.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};

use crate::failure::{FAILED, Failure};

/// Whether libuv, and with it Node, uses io_uring; some versions do unless it is `0`.
const LIBUV_USES_IO_URING: &str = "UV_USE_IO_URING";
/// The variables that Open MPI hands to ranks on other hosts, beside its own.
const OPEN_MPI_LIST: &str = "OMPI_MCA_mca_base_env_list";
/// The file in which ROMIO looks for hints.
pub(super) const ROMIO_HINTS: &str = "ROMIO_HINTS";
/// With data sieving OMPIO reads a range, changes its part and writes all of it back: over what other ranks wrote meanwhile.
const OMPIO_DATA_SIEVING: &str = "OMPI_MCA_fbtl_posix_write_datasieving";

/// What a command needs to know of its mounts.
pub(super) struct Environment {
    /// Where it sees its files.
    pub(super) prefix: PathBuf,
    pub(super) preload: Option<PathBuf>,
    /// Where files may lie in logs: the file with the hints of ROMIO.
    pub(super) romio_hints: Option<PathBuf>,
}

/// Starts `words`.
pub(super) fn start(words: &[OsString], environment: &Environment) -> Result<Child, Failure> {
    let (program, args) = words.split_first().expect("clap demands one");
    let mut command = Command::new(program);
    command.args(args);
    environment.set_environment(&mut command);
    command.spawn().map_err(|error| {
        let code = if error.kind() == std::io::ErrorKind::NotFound {
            127
        } else {
            126
        };
        Failure::new(
            code,
            format!(
                "cannot run {}: {error}",
                firn_format::quote::quoted(program.as_encoded_bytes())
            ),
        )
    })
}

impl Environment {
    fn set_environment(&self, command: &mut Command) {
        let is_set = |name: &str| std::env::var_os(name).is_some();
        command.env("FIRN_PREFIX", &self.prefix);
        let mut forwarded = vec!["FIRN_PREFIX"];
        // I/O by io_uring bypasses the preload library: Node would write into the stub files, or through the kernel's page cache.
        if !is_set(LIBUV_USES_IO_URING) {
            command.env(LIBUV_USES_IO_URING, "0");
        }
        if let Some(library) = &self.preload {
            let other_libraries = std::env::var_os("LD_PRELOAD");
            command.env("LD_PRELOAD", prepend_library(library, other_libraries));
            forwarded.insert(0, "LD_PRELOAD");
        }
        if let Some(hints) = &self.romio_hints {
            command.env(ROMIO_HINTS, hints);
            forwarded.push(ROMIO_HINTS);
            if !is_set(OMPIO_DATA_SIEVING) {
                command.env(OMPIO_DATA_SIEVING, "false");
            }
        }
        if is_set(firn_client::paths::RUNTIME_DIR_ENV) {
            forwarded.push(firn_client::paths::RUNTIME_DIR_ENV);
        }
        // Ranks on other hosts get the environment only if Open MPI is told to pass it.
        if !is_set(OPEN_MPI_LIST) {
            command.env(OPEN_MPI_LIST, forwarded.join(";"));
        }
    }
}

fn prepend_library(library: &Path, other_libraries: Option<OsString>) -> OsString {
    let mut list = library.as_os_str().to_owned();
    if let Some(others) = other_libraries.filter(|others| !others.is_empty()) {
        list.push(OsStr::new(":"));
        list.push(others);
    }
    list
}

/// How the command ended, in words.
pub(super) fn describe_end(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(0), _) => "the command succeeded".into(),
        (Some(code), _) => format!("the command failed with exit status {code}"),
        (None, Some(signal)) => format!("the command was killed by signal {signal}"),
        (None, None) => "the command failed".into(),
    }
}

/// How the command ended, as a shell says it.
pub(super) fn exit_code(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok())
        .unwrap_or(FAILED)
}
