//! What an agent gives: files of a mount, or partner copies.

use std::sync::Arc;

use firn_protocol::path::BytePath;
use xxhash_rust::xxh3::Xxh3;

use crate::data_path::{DataPath, send_bytes_or_zeros};
use crate::link::Link;
use crate::message::ErrorKind;
use crate::partner::{Copies, CopyFile};
use crate::source::{COPY_BYTES, HeldFile, SendError, Source, SourceError};
use crate::transport::Transport;

/// What a connection lists and opens files of.
pub(crate) enum Given {
    /// A mount.
    Mount(Source),
    /// What other hosts held.
    Copies(Arc<Copies>),
}

/// A file that is open for a puller.
pub(crate) enum GivenFile {
    Held(HeldFile),
    Copy(CopyFile),
}

impl Given {
    /// Holds a file; `None` where too much is held already.
    pub(crate) fn open(&self, path: &BytePath) -> Result<Option<GivenFile>, SourceError> {
        match self {
            Self::Mount(source) => Ok(source.hold(path)?.map(GivenFile::Held)),
            Self::Copies(copies) => copies.open(path).map(GivenFile::Copy).map(Some),
        }
    }

    /// Answers a read.
    pub(crate) fn send<T: Transport>(
        &self,
        file: &mut GivenFile,
        offset: u64,
        bytes: u64,
        link: &mut Link<T>,
        data: &mut dyn DataPath<T>,
    ) -> Result<(), SendError> {
        match (self, file) {
            (Self::Mount(source), GivenFile::Held(file)) => {
                source.send(file, offset, bytes, link, data)
            }
            (_, GivenFile::Copy(file)) => send_copy(file, offset, bytes, link, data),
            (Self::Copies(_), GivenFile::Held(_)) => Err(not_of_this().into()),
        }
    }

    /// A checksum of bytes, and how many there are.
    pub(crate) fn sum(
        &self,
        file: &mut GivenFile,
        offset: u64,
        bytes: u64,
    ) -> Result<(u64, u128), SourceError> {
        match (self, file) {
            (Self::Mount(source), GivenFile::Held(file)) => source.sum(file, offset, bytes),
            (_, GivenFile::Copy(file)) => sum_copy(file, offset, bytes),
            (Self::Copies(_), GivenFile::Held(_)) => Err(not_of_this()),
        }
    }

    /// Whether a file changed since it was opened, and whether what was read of it is a snapshot all the same. A copy
    /// is exchanged and never changed.
    pub(crate) fn check(&self, file: &GivenFile) -> Result<(bool, bool), SourceError> {
        match (self, file) {
            (Self::Mount(source), GivenFile::Held(file)) => source.check(file),
            (_, GivenFile::Copy(_)) => Ok((false, true)),
            (Self::Copies(_), GivenFile::Held(_)) => Err(not_of_this()),
        }
    }
}

impl GivenFile {
    /// Bytes of the file.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Held(file) => file.bytes(),
            Self::Copy(file) => file.bytes(),
        }
    }

    /// Count of changes of the file that the copy has.
    pub(crate) fn changes(&self) -> Option<u64> {
        match self {
            Self::Held(file) => Some(file.changes()),
            Self::Copy(_) => None,
        }
    }
}

fn send_copy<T: Transport>(
    file: &CopyFile,
    offset: u64,
    bytes: u64,
    link: &mut Link<T>,
    data: &mut dyn DataPath<T>,
) -> Result<(), SendError> {
    read_copy(file, offset, bytes, |part| {
        Ok(send_bytes_or_zeros(data, link, part)?)
    })?;
    Ok(data.end(link)?)
}

fn sum_copy(file: &CopyFile, offset: u64, bytes: u64) -> Result<(u64, u128), SourceError> {
    let mut sum = Xxh3::new();
    let mut total = 0;
    let summed = read_copy(file, offset, bytes, |part| {
        sum.update(part);
        total += part.len() as u64;
        Ok(())
    });
    match summed {
        Ok(()) => Ok((total, sum.digest128())),
        Err(SendError::Source(error)) => Err(error),
        Err(SendError::Wire(error)) => Err(SourceError {
            kind: ErrorKind::Stale,
            message: error.to_string(),
        }),
    }
}

fn read_copy(
    file: &CopyFile,
    offset: u64,
    bytes: u64,
    mut take: impl FnMut(&[u8]) -> Result<(), SendError>,
) -> Result<(), SendError> {
    let end = offset.saturating_add(bytes).min(file.bytes());
    let mut buffer = vec![0; COPY_BYTES];
    let mut at = offset;
    while at < end {
        let part = &mut buffer[..COPY_BYTES.min((end - at) as usize)];
        file.read(at, part).map_err(|error| SourceError {
            kind: ErrorKind::Stale,
            message: error.to_string(),
        })?;
        take(part)?;
        at += part.len() as u64;
    }
    Ok(())
}

/// A list ends what was open before it, so this cannot be.
fn not_of_this() -> SourceError {
    SourceError {
        kind: ErrorKind::Refused,
        message: "the file is of an earlier list".into(),
    }
}
