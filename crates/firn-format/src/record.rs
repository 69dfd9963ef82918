//! Journal records: the changes to names and files that a recovery must know to write pending data to the right files.
//!
//! Data is *pending* while it is in the arena (shared memory) and not in the *backing*, the directory that a mount
//! serves. A *piece* is one range of a file's pending bytes. After a crash, a *recovery* writes the pieces to the
//! backing.
//!
//! The journal, a log in the arena, has records only of files with pending pieces. For each such file they contain its
//! file id, its identity in the backing, and the names under which it may be found. All other metadata is only in the
//! backing.

use crate::FormatError;

/// A point in time as the backing stores it: seconds since 1970, and nanoseconds within the second.
pub type Timestamp = (i64, u32);

/// The identity of a file in the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Device number. It may change when the backing is mounted again, so recovery does not compare it.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// Birth time, if the file system records it.
    pub btime: Option<Timestamp>,
}

/// A record of the journal. Paths are relative to the backing and have no leading slash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// The file id `file` stands for this object from now on. The object may be found at `paths`.
    FileIdBegin {
        /// File id. An id is never used again.
        file: u64,
        /// Identity of the object.
        identity: Identity,
        /// All known names of the object.
        paths: Vec<Vec<u8>>,
        /// Whether the file is open for writing, closed, or was open when firnd (the process of the mount) died.
        ending: Ending,
    },
    /// The file got another name.
    NameAdded {
        /// File id.
        file: u64,
        /// The name.
        path: Vec<u8>,
    },
    /// The removal of a name begins. From now on the name is doubtful: the file may or may not have it.
    NameRemoved {
        /// File id.
        file: u64,
        /// The name.
        path: Vec<u8>,
    },
    /// A rename is about to happen. What is at or below `from` may be at `to` afterwards. With `exchange`, what is at
    /// or below `to` may be at `from`.
    RenameBegin {
        /// Number of this rename, which its [`Record::RenameEnd`] repeats.
        id: u64,
        /// Old path.
        from: Vec<u8>,
        /// New path.
        to: Vec<u8>,
        /// Whether the two paths are exchanged (`RENAME_EXCHANGE`).
        exchange: bool,
    },
    /// A rename ended: it happened, or it failed.
    RenameEnd {
        /// Number of the rename.
        id: u64,
        /// Whether it happened.
        done: bool,
    },
    /// The file is about to get the length `size`. Pieces with a sequence up to `sequence` count only up to that
    /// length.
    TruncateBegin {
        /// File id.
        file: u64,
        /// Last sequence that the change of the length cuts.
        sequence: u64,
        /// New length.
        size: u64,
    },
    /// A change of the length ended: the backing has the new length, or refused it and nothing was cut.
    TruncateEnd {
        /// File id.
        file: u64,
        /// As in its [`Record::TruncateBegin`].
        sequence: u64,
        /// As in its [`Record::TruncateBegin`].
        size: u64,
        /// Whether the backing has the new length.
        done: bool,
    },
    /// A range was drained: pieces with a sequence up to `sequence` are not pending there any more. The record is
    /// needed while a piece that overlaps the range has pending bytes outside it.
    DrainedRange {
        /// File id.
        file: u64,
        /// Start of the range.
        offset: u64,
        /// Length of the range.
        len: u64,
        /// Last sequence that is drained there.
        sequence: u64,
    },
    /// No piece with a sequence up to `sequence` is pending, so drained ranges up to that sequence are needed no
    /// longer.
    DrainedRangesForgotten {
        /// File id.
        file: u64,
        /// Last sequence with no pending piece.
        sequence: u64,
    },
    /// The file has this modification time, unless a piece was modified after `written`.
    ModifiedAt {
        /// File id.
        file: u64,
        /// The modification time, which a program may have set.
        time: Timestamp,
        /// Time of the last write before the change of `time`, in the form of piece records.
        written: u64,
    },
    /// The file's writers opened it, closed it, or were killed.
    Ended {
        /// File id.
        file: u64,
        /// Whether the file is open for writing, closed, or was open when firnd (the process of the mount) died.
        ending: Ending,
    },
    /// No piece of the file is pending. The file id ends.
    FileIdEnd {
        /// File id.
        file: u64,
    },
}

/// Whether the writers of a file have closed it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ending {
    /// A program has the file open for writing, or had it open when firnd died.
    #[default]
    Open,
    /// The last writer closed it.
    Closed,
    /// firnd died while the file was open.
    Cut,
}

impl Ending {
    /// Returns the word for this state in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Closed => "closed",
            Self::Cut => "cut",
        }
    }
}

const ENDINGS: [Ending; 3] = [Ending::Open, Ending::Closed, Ending::Cut];

const FILE_ID_BEGIN: u8 = 1;
const NAME_ADDED: u8 = 2;
const NAME_REMOVED: u8 = 3;
const RENAME_BEGIN: u8 = 4;
const RENAME_END: u8 = 5;
const TRUNCATE_BEGIN: u8 = 6;
const TRUNCATE_END: u8 = 7;
const DRAINED_RANGE: u8 = 8;
const MODIFIED_AT: u8 = 9;
const FILE_ID_END: u8 = 10;
const ENDED: u8 = 11;
const DRAINED_RANGES_FORGOTTEN: u8 = 12;
const FILE_ID_BEGIN_ENDED: u8 = 13;

impl Record {
    /// Encodes the record as the payload of a journal frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer(Vec::with_capacity(64));
        match self {
            Self::FileIdBegin {
                file,
                identity,
                paths,
                ending,
            } => {
                match ending {
                    Ending::Open => writer.tag(FILE_ID_BEGIN),
                    // The ending is part of this record. With a record of its own for each ending, a snapshot of closed
                    // files took a third more bytes.
                    ended => writer.tag(FILE_ID_BEGIN_ENDED).u8(*ended as u8),
                };
                writer.u64(*file).identity(identity).paths(paths);
            }
            Self::NameAdded { file, path } => {
                writer.tag(NAME_ADDED).u64(*file).bytes(path);
            }
            Self::NameRemoved { file, path } => {
                writer.tag(NAME_REMOVED).u64(*file).bytes(path);
            }
            Self::RenameBegin {
                id,
                from,
                to,
                exchange,
            } => {
                writer
                    .tag(RENAME_BEGIN)
                    .u64(*id)
                    .bytes(from)
                    .bytes(to)
                    .u8(u8::from(*exchange));
            }
            Self::RenameEnd { id, done } => {
                writer.tag(RENAME_END).u64(*id).u8(u8::from(*done));
            }
            Self::TruncateBegin {
                file,
                sequence,
                size,
            } => {
                writer
                    .tag(TRUNCATE_BEGIN)
                    .u64(*file)
                    .u64(*sequence)
                    .u64(*size);
            }
            Self::TruncateEnd {
                file,
                sequence,
                size,
                done,
            } => {
                writer
                    .tag(TRUNCATE_END)
                    .u64(*file)
                    .u64(*sequence)
                    .u64(*size)
                    .u8(u8::from(*done));
            }
            Self::DrainedRange {
                file,
                offset,
                len,
                sequence,
            } => {
                writer
                    .tag(DRAINED_RANGE)
                    .u64(*file)
                    .u64(*offset)
                    .u64(*len)
                    .u64(*sequence);
            }
            Self::DrainedRangesForgotten { file, sequence } => {
                writer
                    .tag(DRAINED_RANGES_FORGOTTEN)
                    .u64(*file)
                    .u64(*sequence);
            }
            Self::ModifiedAt {
                file,
                time,
                written,
            } => {
                writer
                    .tag(MODIFIED_AT)
                    .u64(*file)
                    .u64(time.0 as u64)
                    .u32(time.1)
                    .u64(*written);
            }
            Self::Ended { file, ending } => {
                writer.tag(ENDED).u64(*file).u8(*ending as u8);
            }
            Self::FileIdEnd { file } => {
                writer.tag(FILE_ID_END).u64(*file);
            }
        }
        writer.0
    }

    /// Decodes a payload. All of its bytes must belong to the record.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let mut reader = Reader(bytes);
        let record = match reader.u8()? {
            FILE_ID_BEGIN => Self::FileIdBegin {
                ending: Ending::Open,
                file: reader.u64()?,
                identity: reader.identity()?,
                paths: reader.paths()?,
            },
            FILE_ID_BEGIN_ENDED => Self::FileIdBegin {
                ending: reader.ending_of_ended_file()?,
                file: reader.u64()?,
                identity: reader.identity()?,
                paths: reader.paths()?,
            },
            NAME_ADDED => Self::NameAdded {
                file: reader.u64()?,
                path: reader.bytes()?,
            },
            NAME_REMOVED => Self::NameRemoved {
                file: reader.u64()?,
                path: reader.bytes()?,
            },
            RENAME_BEGIN => Self::RenameBegin {
                id: reader.u64()?,
                from: reader.bytes()?,
                to: reader.bytes()?,
                exchange: reader.flag()?,
            },
            RENAME_END => Self::RenameEnd {
                id: reader.u64()?,
                done: reader.flag()?,
            },
            TRUNCATE_BEGIN => Self::TruncateBegin {
                file: reader.u64()?,
                sequence: reader.u64()?,
                size: reader.u64()?,
            },
            TRUNCATE_END => Self::TruncateEnd {
                file: reader.u64()?,
                sequence: reader.u64()?,
                size: reader.u64()?,
                done: reader.flag()?,
            },
            DRAINED_RANGE => Self::DrainedRange {
                file: reader.u64()?,
                offset: reader.u64()?,
                len: reader.u64()?,
                sequence: reader.u64()?,
            },
            DRAINED_RANGES_FORGOTTEN => Self::DrainedRangesForgotten {
                file: reader.u64()?,
                sequence: reader.u64()?,
            },
            MODIFIED_AT => Self::ModifiedAt {
                file: reader.u64()?,
                time: (reader.u64()? as i64, reader.u32()?),
                written: reader.u64()?,
            },
            ENDED => Self::Ended {
                file: reader.u64()?,
                ending: reader.ending()?,
            },
            FILE_ID_END => Self::FileIdEnd {
                file: reader.u64()?,
            },
            unknown_tag => return Err(damaged(format!("unknown kind {unknown_tag}"))),
        };
        let remaining_bytes = reader.0.len();
        if remaining_bytes > 0 {
            return Err(damaged(format!("{remaining_bytes} bytes too many")));
        }
        Ok(record)
    }
}

/// Returns the error for a payload that is not valid.
fn damaged(why: String) -> FormatError {
    FormatError::Field {
        what: "journal record",
        why,
    }
}

/// Appends fields to a payload.
struct Writer(Vec<u8>);

impl Writer {
    fn tag(&mut self, tag: u8) -> &mut Self {
        self.u8(tag)
    }

    fn u8(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    /// Appends the length of `value` and then its bytes.
    fn bytes(&mut self, value: &[u8]) -> &mut Self {
        self.u32(value.len() as u32);
        self.0.extend_from_slice(value);
        self
    }

    /// Appends the identity of a file. A flag says whether a birth time follows.
    fn identity(&mut self, identity: &Identity) -> &mut Self {
        self.u64(identity.dev).u64(identity.ino);
        match identity.btime {
            None => self.u8(0),
            Some((sec, nsec)) => self.u8(1).u64(sec as u64).u32(nsec),
        }
    }

    /// Appends the number of paths, and then each path.
    fn paths(&mut self, paths: &[Vec<u8>]) -> &mut Self {
        self.u32(paths.len() as u32);
        for path in paths {
            self.bytes(path);
        }
        self
    }
}

/// Reads fields from a payload. Each function fails if the payload is too short.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    /// Returns the next `count` bytes.
    fn take(&mut self, count: usize) -> Result<&[u8], FormatError> {
        let (head, tail) = self
            .0
            .split_at_checked(count)
            .ok_or_else(|| damaged("too short".into()))?;
        self.0 = tail;
        Ok(head)
    }

    fn u8(&mut self) -> Result<u8, FormatError> {
        Ok(self.take(1)?[0])
    }

    fn flag(&mut self) -> Result<bool, FormatError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(damaged(format!("flag {other} is neither 0 nor 1"))),
        }
    }

    fn ending(&mut self) -> Result<Ending, FormatError> {
        let word = self.u8()?;
        ENDINGS
            .get(usize::from(word))
            .copied()
            .ok_or_else(|| damaged(format!("unknown ending {word}")))
    }

    /// Reads the ending of a file that is not open. Fails if it says that the file is open.
    fn ending_of_ended_file(&mut self) -> Result<Ending, FormatError> {
        let ending = self.ending()?;
        if ending == Ending::Open {
            return Err(damaged(
                "an open file in a record of one that is not".into(),
            ));
        }
        Ok(ending)
    }

    /// Reads the identity of a file.
    fn identity(&mut self) -> Result<Identity, FormatError> {
        let dev = self.u64()?;
        let ino = self.u64()?;
        let btime = if self.flag()? {
            Some((self.u64()? as i64, self.u32()?))
        } else {
            None
        };
        Ok(Identity { dev, ino, btime })
    }

    /// Reads paths after their number.
    fn paths(&mut self) -> Result<Vec<Vec<u8>>, FormatError> {
        let count = self.u32()?;
        (0..count).map(|_| self.bytes()).collect()
    }

    fn u32(&mut self) -> Result<u32, FormatError> {
        Ok(u32::from_le_bytes(
            self.take(4)?.try_into().expect("four bytes"),
        ))
    }

    fn u64(&mut self) -> Result<u64, FormatError> {
        Ok(u64::from_le_bytes(
            self.take(8)?.try_into().expect("eight bytes"),
        ))
    }

    fn bytes(&mut self) -> Result<Vec<u8>, FormatError> {
        let len = self.u32()? as usize;
        Ok(self.take(len)?.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Record> {
        let identity = Identity {
            dev: 1,
            ino: 2,
            btime: Some((-3, 4)),
        };
        vec![
            Record::FileIdBegin {
                file: 1,
                identity,
                paths: vec![b"a/b".to_vec(), vec![0xff; 300]],
                ending: Ending::Open,
            },
            Record::FileIdBegin {
                file: 2,
                identity: Identity {
                    btime: None,
                    ..identity
                },
                paths: vec![],
                ending: Ending::Closed,
            },
            Record::NameAdded {
                file: 1,
                path: b"x".to_vec(),
            },
            Record::NameRemoved {
                file: 1,
                path: b"x".to_vec(),
            },
            Record::RenameBegin {
                id: 9,
                from: b"a".to_vec(),
                to: b"b".to_vec(),
                exchange: true,
            },
            Record::RenameEnd { id: 9, done: false },
            Record::TruncateBegin {
                file: 1,
                sequence: 2,
                size: 3,
            },
            Record::TruncateEnd {
                file: 1,
                sequence: 2,
                size: 3,
                done: true,
            },
            Record::DrainedRange {
                file: 1,
                offset: 2,
                len: 3,
                sequence: 4,
            },
            Record::DrainedRangesForgotten {
                file: 1,
                sequence: 4,
            },
            Record::ModifiedAt {
                file: 1,
                time: (5, 6),
                written: 7,
            },
            Record::Ended {
                file: 1,
                ending: Ending::Cut,
            },
            Record::FileIdEnd { file: 1 },
        ]
    }

    #[test]
    fn every_record_survives_the_round_trip() {
        for record in samples() {
            assert_eq!(Record::decode(&record.encode()), Ok(record));
        }
    }

    #[test]
    fn a_cut_or_longer_record_is_refused() {
        for record in samples() {
            let mut bytes = record.encode();
            for cut in 0..bytes.len() {
                assert!(
                    Record::decode(&bytes[..cut]).is_err(),
                    "{record:?} cut at {cut}"
                );
            }
            bytes.push(0);
            assert!(Record::decode(&bytes).is_err());
        }
    }
}
