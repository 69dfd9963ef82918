//! The report of what was given up of damaged logs: a file with a line of JSON for each loss.
//!
//! Promises
//! * The file is new, and nothing is given up before its line in it is durable.
//! * A report of nothing is removed.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use firn_backing::Errno;
use firn_log::{Loss, LostPart, Report};
use serde::Serialize;

use crate::error::FlattenError;

/// A report that is being written.
pub(crate) struct LossReport {
    path: PathBuf,
    file: File,
    /// Files of the backing with losses, and the zeros in them.
    files: Vec<PathBuf>,
    zero_bytes: u64,
    /// Why it could not be written.
    failure: Option<io::Error>,
}

/// The same for files below a path of the backing.
pub(crate) struct LossesBelow<'a> {
    report: &'a mut LossReport,
    path: &'a Path,
}

/// A line.
#[derive(Serialize)]
struct Line<'a> {
    /// Relative to the backing.
    #[serde(with = "firn_protocol::path::exact")]
    path: PathBuf,
    container: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<&'a str>,
    /// The log or index in the container that is damaged.
    damaged: &'a str,
    #[serde(flatten)]
    becomes: Becomes,
}

/// What becomes of the file.
#[derive(Serialize)]
#[serde(tag = "becomes", rename_all = "kebab-case")]
enum Becomes {
    /// Bytes of it are zeros.
    Zeros { offset: u64, bytes: u64 },
    /// Changes are not made; what they were is unknown.
    Unchanged { index_offset: u64, index_bytes: u64 },
    /// What counted is not known: all that is there counts.
    Whatever,
    /// As it was: the container's name says what the file had.
    Renewed,
    /// How much of the plain file counts below the logs: all that it has.
    Plain { bytes: u64 },
}

impl LossReport {
    pub(crate) fn create(path: &Path) -> Result<Self, FlattenError> {
        let file = File::create_new(path).map_err(|source| FlattenError::Report {
            path: path.into(),
            source,
        })?;
        Ok(Self {
            path: path.into(),
            file,
            files: Vec::new(),
            zero_bytes: 0,
            failure: None,
        })
    }

    pub(crate) fn below<'a>(&'a mut self, path: &'a Path) -> LossesBelow<'a> {
        LossesBelow { report: self, path }
    }

    /// What was lost, if anything was.
    pub(crate) fn finish(self) -> Result<Option<FlattenError>, FlattenError> {
        let failed = |path: &Path, source| FlattenError::Report {
            path: path.into(),
            source,
        };
        if let Some(source) = self.failure {
            return Err(failed(&self.path, source));
        }
        if self.files.is_empty() {
            let removed = fs::remove_file(&self.path);
            return removed
                .map(|()| None)
                .map_err(|source| failed(&self.path, source));
        }
        Ok(Some(FlattenError::GivenUp {
            files: self.files.len(),
            zero_bytes: self.zero_bytes,
            report: self.path,
        }))
    }

    fn write(&mut self, line: &Line<'_>) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        self.file.write_all(&text)
    }

    /// The file, and the name that leads to it.
    fn sync(&self) -> io::Result<()> {
        self.file.sync_all()?;
        let dir = self.path.parent().filter(|dir| *dir != Path::new(""));
        File::open(dir.unwrap_or(Path::new(".")))?.sync_all()
    }

    fn note(&mut self, outcome: io::Result<()>) -> Result<(), Errno> {
        outcome.map_err(|error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            self.failure.get_or_insert(error);
            errno
        })
    }
}

impl Report for LossesBelow<'_> {
    fn add(&mut self, loss: Loss) -> Result<(), Errno> {
        let path = if loss.path.as_os_str().is_empty() {
            self.path.to_owned()
        } else {
            self.path.join(&loss.path)
        };
        if self.report.files.last() != Some(&path) {
            self.report.files.push(path.clone());
        }
        let (host, damaged, becomes) = match &loss.lost {
            LostPart::Bytes { range, host, log } => {
                let bytes = range.end - range.start;
                self.report.zero_bytes += bytes;
                let offset = range.start;
                (Some(host), log.as_str(), Becomes::Zeros { offset, bytes })
            }
            LostPart::Changes { host, index, range } => (
                Some(host),
                index.as_str(),
                Becomes::Unchanged {
                    index_offset: range.start,
                    index_bytes: range.end - range.start,
                },
            ),
            LostPart::Seal => (None, "seal", Becomes::Whatever),
            LostPart::Head { base: None } => (None, "head", Becomes::Renewed),
            LostPart::Head { base: Some(bytes) } => {
                (None, "head", Becomes::Plain { bytes: *bytes })
            }
        };
        let written = self.report.write(&Line {
            path,
            container: &loss.container,
            host: host.map(String::as_str),
            damaged,
            becomes,
        });
        self.report.note(written)
    }

    fn sync(&mut self) -> Result<(), Errno> {
        let synced = self.report.sync();
        self.report.note(synced)
    }
}
