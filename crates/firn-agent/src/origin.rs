//! The two origins of the files that an agent sends: the mount that it serves, and partner copies of other hosts'
//! files.
//!
//! A list determines the origin; files are opened from that origin until the next list.

use std::sync::Arc;

use firn_protocol::path::BytePath;
use xxhash_rust::xxh3::Xxh3;

use crate::data_path::{DataPath, send_bytes_or_zeros};
use crate::link::Link;
use crate::message::ErrorKind;
use crate::partner::{Copies, CopyFile};
use crate::source::{COPY_BYTES, HeldFile, SendError, Source, SourceError};
use crate::transport::Transport;

/// Origin of the files of a connection.
pub(crate) enum Origin {
    /// The mount that the agent serves.
    Mount(Source),
    /// Partner copies of files that other hosts held.
    Copies(Arc<Copies>),
}

/// A file that is open for a puller.
pub(crate) enum OriginFile {
    Held(HeldFile),
    Copy(CopyFile),
}

impl Origin {
    /// Opens a file. Returns `None` if the agent holds the maximum number of bytes.
    pub(crate) fn open(&self, path: &BytePath) -> Result<Option<OriginFile>, SourceError> {
        match self {
            Self::Mount(source) => Ok(source.hold(path)?.map(OriginFile::Held)),
            Self::Copies(copies) => copies.open(path).map(OriginFile::Copy).map(Some),
        }
    }

    /// Sends a range of a file: its bytes, zeros for holes, and at the end the MAC.
    pub(crate) fn send<T: Transport>(
        &self,
        file: &mut OriginFile,
        offset: u64,
        bytes: u64,
        link: &mut Link<T>,
        data: &mut dyn DataPath<T>,
    ) -> Result<(), SendError> {
        match (self, file) {
            (Self::Mount(source), OriginFile::Held(file)) => {
                source.send(file, offset, bytes, link, data)
            }
            (_, OriginFile::Copy(file)) => send_copy(file, offset, bytes, link, data),
            (Self::Copies(_), OriginFile::Held(_)) => Err(other_origin().into()),
        }
    }

    /// Returns the number of bytes in a range of a file, and their checksum.
    pub(crate) fn sum(
        &self,
        file: &mut OriginFile,
        offset: u64,
        bytes: u64,
    ) -> Result<(u64, u128), SourceError> {
        match (self, file) {
            (Self::Mount(source), OriginFile::Held(file)) => source.sum(file, offset, bytes),
            (_, OriginFile::Copy(file)) => sum_copy(file, offset, bytes),
            (Self::Copies(_), OriginFile::Held(_)) => Err(other_origin()),
        }
    }

    /// Returns two results: whether a file was changed since it was opened, and whether the bytes that were read are
    /// those of the file as it was opened. A partner copy never changes: a newer copy replaces it.
    pub(crate) fn check(&self, file: &OriginFile) -> Result<(bool, bool), SourceError> {
        match (self, file) {
            (Self::Mount(source), OriginFile::Held(file)) => source.check(file),
            (_, OriginFile::Copy(_)) => Ok((false, true)),
            (Self::Copies(_), OriginFile::Held(_)) => Err(other_origin()),
        }
    }
}

impl OriginFile {
    /// Size of the file.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Held(file) => file.bytes(),
            Self::Copy(file) => file.bytes(),
        }
    }

    /// Number of changes of the file when it was opened; `None` for a partner copy.
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

/// Reads a range of a partner copy and passes the bytes to `take`, at most [`COPY_BYTES`] at a time.
fn read_copy(
    file: &CopyFile,
    offset: u64,
    bytes: u64,
    mut take: impl FnMut(&[u8]) -> Result<(), SendError>,
) -> Result<(), SendError> {
    let end = offset.saturating_add(bytes).min(file.bytes());
    let mut buffer = vec![0; COPY_BYTES];
    let mut position = offset;
    while position < end {
        let part = &mut buffer[..COPY_BYTES.min((end - position) as usize)];
        file.read(position, part).map_err(|error| SourceError {
            kind: ErrorKind::Stale,
            message: error.to_string(),
        })?;
        take(part)?;
        position += part.len() as u64;
    }
    Ok(())
}

/// Makes the error for a file that does not belong to the present origin. A session never returns it, because a list
/// closes all files.
fn other_origin() -> SourceError {
    SourceError {
        kind: ErrorKind::Refused,
        message: "the file is of an earlier list".into(),
    }
}
