//! The two origins of the files that an *agent* sends to other hosts: the mount that it serves, and *partner copies*,
//! which this host keeps of the files that another host has in memory.
//!
//! The other host first requests a list of files. The listed path determines the origin; files are opened from that
//! origin until the next list. An opened file of the mount is *held*: its bytes in memory do not change.

use std::sync::Arc;

use firn_protocol::path::BytePath;
use xxhash_rust::xxh3::Xxh3;

use crate::data_path::{DataPath, send_bytes_or_zeros};
use crate::link::Link;
use crate::message::ErrorKind;
use crate::partner::{CopyFile, CopyStore};
use crate::source::{COPY_BYTES, Checksum, FileCheck, HeldFile, SendError, Source, SourceError};
use crate::transport::Transport;

/// Origin of the files of a connection.
pub(crate) enum Origin {
    /// The mount that the agent serves.
    Mount(Source),
    /// Partner copies of files that other hosts held.
    Copies(Arc<CopyStore>),
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

    /// Sends a range of an open file to the other host: its bytes, zeros for holes, and at the end the message
    /// authentication code (MAC).
    ///
    /// `Held` is a file of the mount, `Copy` a copy that this host keeps for another host. A `Held` file can be sent
    /// only by the `Mount` that opened it; a copy needs no source.
    pub(crate) fn send<T: Transport>(
        &self,
        file: &mut OriginFile,
        offset: u64,
        bytes: u64,
        link: &mut Link<T>,
        data_path: &mut dyn DataPath<T>,
    ) -> Result<(), SendError> {
        match (self, file) {
            (Self::Mount(source), OriginFile::Held(file)) => {
                source.send(file, offset, bytes, link, data_path)
            }
            (_, OriginFile::Copy(file)) => send_copy(file, offset, bytes, link, data_path),
            (Self::Copies(_), OriginFile::Held(_)) => Err(wrong_origin().into()),
        }
    }

    /// Computes the checksum of a range of a file. The range ends at the end of the file.
    pub(crate) fn checksum(
        &self,
        file: &mut OriginFile,
        offset: u64,
        bytes: u64,
    ) -> Result<Checksum, SourceError> {
        match (self, file) {
            (Self::Mount(source), OriginFile::Held(file)) => source.checksum(file, offset, bytes),
            (_, OriginFile::Copy(file)) => checksum_of_copy(file, offset, bytes),
            (Self::Copies(_), OriginFile::Held(_)) => Err(wrong_origin()),
        }
    }

    /// Checks the bytes that were read of a file so far.
    pub(crate) fn check(&self, file: &OriginFile) -> Result<FileCheck, SourceError> {
        match (self, file) {
            (Self::Mount(source), OriginFile::Held(file)) => source.check(file),
            // A partner copy never changes: a newer copy replaces it.
            (_, OriginFile::Copy(_)) => Ok(FileCheck {
                has_changed: false,
                is_snapshot: true,
            }),
            (Self::Copies(_), OriginFile::Held(_)) => Err(wrong_origin()),
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

/// Sends a range of a partner copy, a file that this host keeps for another host.
fn send_copy<T: Transport>(
    file: &CopyFile,
    offset: u64,
    bytes: u64,
    link: &mut Link<T>,
    data_path: &mut dyn DataPath<T>,
) -> Result<(), SendError> {
    let sent: Result<(), SendError> = read_copy(file, offset, bytes, |chunk| {
        Ok(send_bytes_or_zeros(data_path, link, chunk)?)
    });
    sent?;
    Ok(data_path.end(link)?)
}

/// Computes the checksum of a range of a partner copy, a file that this host keeps for another host. The range is
/// clamped to the end of the file; the result states how many bytes were hashed.
fn checksum_of_copy(file: &CopyFile, offset: u64, bytes: u64) -> Result<Checksum, SourceError> {
    let mut hasher = Xxh3::new();
    let mut hashed_bytes = 0;
    let hashed: Result<(), SourceError> = read_copy(file, offset, bytes, |chunk| {
        hasher.update(chunk);
        hashed_bytes += chunk.len() as u64;
        Ok(())
    });
    hashed?;
    Ok(Checksum {
        bytes: hashed_bytes,
        xxh3: hasher.digest128(),
    })
}

/// Reads a range of a partner copy, a file that this host keeps for another host. Passes the bytes to `consume` in
/// chunks of at most [`COPY_BYTES`]. The range is clamped to the end of the file.
///
/// If the file cannot be read, the error is `Stale`, after which the other host tries again. An error of `consume` ends
/// the read.
fn read_copy<E: From<SourceError>>(
    file: &CopyFile,
    offset: u64,
    bytes: u64,
    mut consume: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let end = offset.saturating_add(bytes).min(file.bytes());
    let mut buffer = vec![0; COPY_BYTES];
    let mut position = offset;
    while position < end {
        let chunk_bytes = COPY_BYTES.min((end - position) as usize);
        let chunk = &mut buffer[..chunk_bytes];
        file.read(position, chunk).map_err(|error| SourceError {
            kind: ErrorKind::Stale,
            message: error.to_string(),
        })?;
        consume(chunk)?;
        position += chunk_bytes as u64;
    }
    Ok(())
}

/// Makes the error for a file that does not belong to the present origin. A session never returns it, because a list
/// closes all files.
fn wrong_origin() -> SourceError {
    SourceError {
        kind: ErrorKind::Refused,
        message: "the file is of an earlier list".into(),
    }
}
