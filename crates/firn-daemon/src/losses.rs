//! The report of data that is given up in damaged logs: a file with one line of JSON for each loss. A log has one
//! host's writes to a file; a container is a directory with all logs of the file.
//!
//! Promises
//! * The report is a new file. Data is given up only after its line in the report is durable.
//! * A report without a loss is removed.

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
    /// The files with losses.
    files: Vec<PathBuf>,
    /// Number of the bytes of these files that become zeros.
    zero_bytes: u64,
    /// The first error in writing the report.
    failure: Option<io::Error>,
}

/// The report for files below a path of the backing.
pub(crate) struct LossesBelow<'a> {
    report: &'a mut LossReport,
    path: &'a Path,
}

/// One line of the report.
#[derive(Serialize)]
struct ReportLine<'a> {
    /// Path of the file, relative to the backing.
    #[serde(with = "firn_protocol::path::exact")]
    path: PathBuf,
    /// The directory with all logs of the file.
    container: &'a str,
    /// The host that wrote the damaged log or index; `None` if the damaged part is about all logs.
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<&'a str>,
    /// The damaged log or index in the container.
    damaged: &'a str,
    #[serde(flatten)]
    effect: LossEffect,
}

/// The effect of a loss on the file, as the report names it.
#[derive(Serialize)]
#[serde(tag = "becomes", rename_all = "kebab-case")]
enum LossEffect {
    /// These bytes become zeros.
    Zeros { offset: u64, bytes: u64 },
    /// The changes in this part of an index are not made; it is unknown what they were.
    Unchanged { index_offset: u64, index_bytes: u64 },
    /// It is unknown which logs counted, so all of them are used.
    #[serde(rename = "whatever")]
    AllLogsUsed,
    /// The file does not change: the name of the container has all that the damaged head had.
    #[serde(rename = "renewed")]
    HeadRestored,
    /// It is unknown how much of the plain file lies below the logs, so all of it is used.
    #[serde(rename = "plain")]
    PlainFileUsed { bytes: u64 },
}

/// The losses of a report that is complete.
pub(crate) struct GivenUpData {
    /// Number of files with losses.
    files: usize,
    zero_bytes: u64,
    report: PathBuf,
}

impl From<GivenUpData> for FlattenError {
    fn from(given_up: GivenUpData) -> Self {
        let GivenUpData {
            files,
            zero_bytes,
            report,
        } = given_up;
        Self::GivenUp {
            files,
            zero_bytes,
            report,
        }
    }
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

    /// Returns the report for losses of files below `path`.
    pub(crate) fn below<'a>(&'a mut self, path: &'a Path) -> LossesBelow<'a> {
        LossesBelow { report: self, path }
    }

    /// Ends the report of data that was given up, and returns the losses. If there was none, removes the report and
    /// returns `None`. Fails if a line could not be written.
    pub(crate) fn finish(self) -> Result<Option<GivenUpData>, FlattenError> {
        let path = self.path;
        if let Some(source) = self.failure {
            return Err(FlattenError::Report { path, source });
        }
        if self.files.is_empty() {
            return match fs::remove_file(&path) {
                Ok(()) => Ok(None),
                Err(source) => Err(FlattenError::Report { path, source }),
            };
        }
        Ok(Some(GivenUpData {
            files: self.files.len(),
            zero_bytes: self.zero_bytes,
            report: path,
        }))
    }

    fn write(&mut self, line: &ReportLine<'_>) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        self.file.write_all(&text)
    }

    /// Syncs the report, and the directory that has its name.
    fn sync(&self) -> io::Result<()> {
        self.file.sync_all()?;
        let dir = self.path.parent().filter(|dir| *dir != Path::new(""));
        File::open(dir.unwrap_or(Path::new(".")))?.sync_all()
    }

    /// Records the first error in writing the report, and returns its errno.
    fn record_error(&mut self, result: io::Result<()>) -> Result<(), Errno> {
        let Err(error) = result else {
            return Ok(());
        };
        let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
        self.failure.get_or_insert(error);
        Err(errno)
    }
}

impl Report for LossesBelow<'_> {
    /// Writes a line about one loss of data to the report and counts it, before the data is given up. After an error
    /// the caller must not give the data up.
    fn add(&mut self, loss: Loss) -> Result<(), Errno> {
        let path = if loss.path.as_os_str().is_empty() {
            self.path.to_owned()
        } else {
            self.path.join(&loss.path)
        };
        if self.report.files.last() != Some(&path) {
            self.report.files.push(path.clone());
        }
        let line = describe_loss(path, &loss);
        if let LossEffect::Zeros { bytes, .. } = line.effect {
            self.report.zero_bytes += bytes;
        }
        let written = self.report.write(&line);
        self.report.record_error(written)
    }

    fn sync(&mut self) -> Result<(), Errno> {
        let synced = self.report.sync();
        self.report.record_error(synced)
    }
}

/// Returns the line of the report for one loss of data in the file at `path`: what is damaged among its logs, and what
/// that does to the file.
///
/// What is damaged may be:
/// * the log of one host, which has its bytes, or the index of that log, which says where the bytes belong;
/// * the seal, which says which logs count;
/// * the head, which says how much of the plain file lies below the logs.
fn describe_loss(path: PathBuf, loss: &Loss) -> ReportLine<'_> {
    let (host, damaged, effect) = match &loss.lost {
        LostPart::Bytes { range, host, log } => {
            let effect = LossEffect::Zeros {
                offset: range.start,
                bytes: range.end - range.start,
            };
            (Some(host), log.as_str(), effect)
        }
        LostPart::Changes { host, index, range } => {
            let effect = LossEffect::Unchanged {
                index_offset: range.start,
                index_bytes: range.end - range.start,
            };
            (Some(host), index.as_str(), effect)
        }
        LostPart::Seal => (None, "seal", LossEffect::AllLogsUsed),
        LostPart::Head { base: None } => (None, "head", LossEffect::HeadRestored),
        LostPart::Head { base: Some(bytes) } => {
            (None, "head", LossEffect::PlainFileUsed { bytes: *bytes })
        }
    };
    ReportLine {
        path,
        container: &loss.container,
        host: host.map(String::as_str),
        damaged,
        effect,
    }
}
