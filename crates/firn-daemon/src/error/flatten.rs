//! The errors of flattening, which makes plain files from logs (each has one host's writes): why files stay in logs.

use std::io;
use std::path::PathBuf;

use firn_backing::Errno;
use firn_format::quote::quoted_path;
use firn_log::UnflattenedFiles;

use crate::error::{AttachError, FAILED, PARTLY};
use crate::process;

/// Why files stay in logs.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each text says what the variant is")]
pub enum FlattenError {
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error("{path}: no such file or directory in the backing", path = quoted_path(path))]
    NoSuchFile { path: PathBuf },
    #[error("cannot flatten {}: {}; its bytes stay in logs: mend the cause and run `firn flatten` again (`firn check BACKING` says what is damaged)", describe_files(*files), process::describe_errno(*errno))]
    Failed { files: usize, errno: Errno },
    #[error(
        "logged and not drained: {}, still open for writing on this host or others; run `firn flatten` when all \
         programs have closed them", describe_files(*files))]
    Written { files: usize },
    #[error(
        "logged and not drained: {}, because this mount is read-only; run `firn flatten` on a mount that may write, or \
         with --backing", describe_files(*files))]
    ReadOnly { files: usize },
    #[error("cannot write the report {path}: {source}; nothing more was given up", path = quoted_path(path))]
    Report { path: PathBuf, source: io::Error },
    #[error(
        "flattened, but logs of {} were damaged beyond repair: {} are zeros now, and {report} lists all data that was \
         given up", describe_files(*files), firn_format::quantity::bytes(*zero_bytes), report = quoted_path(report))]
    GivenUp {
        files: usize,
        zero_bytes: u64,
        report: PathBuf,
    },
    #[error("the logs of {} are kept, because those files are missing in the backing; `firn check BACKING` lists the logs", describe_files(*files))]
    Lost { files: usize },
}

/// Describes the number of files for a message; 0 stands for an unknown number.
fn describe_files(files: usize) -> String {
    match files {
        0 => "what is in logs".to_owned(),
        1 => "1 file".to_owned(),
        files => format!("{files} files"),
    }
}

impl FlattenError {
    /// Fails with the most important reason why files remain in logs (each has one host's writes) after a flatten. Logs
    /// without their file count only if `fails_on_missing_file` is true.
    pub(crate) fn check_remaining(
        remaining: &UnflattenedFiles,
        fails_on_missing_file: bool,
    ) -> Result<(), Self> {
        if let Some(errno) = remaining.error {
            let files = remaining.failed;
            return Err(Self::Failed { files, errno });
        }
        if remaining.written > 0 {
            let files = remaining.written;
            return Err(Self::Written { files });
        }
        if remaining.lost > 0 && fails_on_missing_file {
            let files = remaining.lost;
            return Err(Self::Lost { files });
        }
        Ok(())
    }

    /// Returns the errno for the reply of the control socket.
    pub(crate) fn errno(&self) -> i32 {
        match self {
            Self::Failed { errno, .. } => errno.raw_os_error(),
            Self::Written { .. } => libc::EBUSY,
            Self::ReadOnly { .. } => libc::EBUSY,
            Self::Lost { .. } => libc::ESTALE,
            Self::NoSuchFile { .. } => libc::ENOENT,
            Self::Attach(_) | Self::Report { .. } | Self::GivenUp { .. } => libc::EIO,
        }
    }

    /// Returns the exit status of firn for this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Attach(error) => error.exit_code(),
            Self::Written { .. } | Self::ReadOnly { .. } | Self::GivenUp { .. } => PARTLY,
            Self::NoSuchFile { .. }
            | Self::Failed { .. }
            | Self::Lost { .. }
            | Self::Report { .. } => FAILED,
        }
    }
}
