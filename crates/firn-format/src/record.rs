//! Journal records: what happened to names and files that have pending data.
//!
//! Only files with pending pieces are known to the journal: a file id, the identity in the
//! backing and the names under which it may be found. All other metadata lives in the backing alone.

use crate::FormatError;

/// A point in time as the backing has it.
pub type Timestamp = (i64, u32);

/// What tells a file in the backing from any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Device; it may differ after the backing was mounted again, so recovery does not compare it.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// Birth time, where the file system records it.
    pub btime: Option<Timestamp>,
}

/// One record. `path`s are relative to the backing, without a leading slash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// `file` is now the id of this object, which can be found at `paths`.
    FileIdBegin {
        /// File id, never used twice.
        file: u64,
        /// Identity of the object.
        identity: Identity,
        /// Every name known.
        paths: Vec<Vec<u8>>,
        /// How it stands: open where a program just began to write.
        ending: Ending,
    },
    /// The file has one more name.
    NameAdded {
        /// File id.
        file: u64,
        /// The name.
        path: Vec<u8>,
    },
    /// A name is about to be removed: it is doubtful from now on.
    NameRemoved {
        /// File id.
        file: u64,
        /// The name.
        path: Vec<u8>,
    },
    /// A rename is about to happen: what is at or below `from` may be at `to`, and where `exchange`
    /// the other way round as well.
    RenameBegin {
        /// Number of this rename, for its end.
        id: u64,
        /// Old path.
        from: Vec<u8>,
        /// New path.
        to: Vec<u8>,
        /// `RENAME_EXCHANGE`.
        exchange: bool,
    },
    /// The rename happened (`done`) or failed.
    RenameEnd {
        /// Of its begin.
        id: u64,
        /// Whether it happened.
        done: bool,
    },
    /// The file is about to get `size`: pieces with a sequence up to `sequence` count only below it.
    TruncateBegin {
        /// File id.
        file: u64,
        /// Last sequence that is cut.
        sequence: u64,
        /// New length.
        size: u64,
    },
    /// The backing has the new size (`done`), or refused it and nothing was cut.
    TruncateEnd {
        /// File id.
        file: u64,
        /// As in its begin.
        sequence: u64,
        /// As in its begin.
        size: u64,
        /// Whether it happened.
        done: bool,
    },
    /// This range of pieces with a sequence up to `sequence` is not pending any more (it was drained,
    /// while some piece that overlaps it is pending elsewhere).
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
    /// Nothing up to `sequence` is pending any more: drained ranges up to there need not be known.
    DrainedRangesForgotten {
        /// File id.
        file: u64,
        /// Last sequence of which nothing is pending.
        sequence: u64,
    },
    /// The modification time is this one, unless a piece was modified after `written`.
    ModifiedAt {
        /// File id.
        file: u64,
        /// The time, which a program may have set.
        time: Timestamp,
        /// Time of the last write until then, as piece records have it.
        written: u64,
    },
    /// The file's writers opened it, closed it, or were killed.
    Ended {
        /// File id.
        file: u64,
        /// How it stands.
        ending: Ending,
    },
    /// Nothing is pending; the file id ends.
    FileIdEnd {
        /// File id.
        file: u64,
    },
}

/// Whether a file was closed by its writers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ending {
    /// Some program has it open for writing, or had when firnd died.
    #[default]
    Open,
    /// The last writer closed it.
    Closed,
    /// firnd died while it was open.
    Cut,
}

impl Ending {
    /// The word for it.
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
const BIND_ENDED: u8 = 13;

impl Record {
    /// The payload of a journal frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer(Vec::with_capacity(64));
        match self {
            Self::FileIdBegin {
                file,
                identity,
                paths,
                ending,
            } => {
                match ending {
                    Ending::Open => w.tag(FILE_ID_BEGIN),
                    // In a record of their own, with its frame, the closed files of a snapshot took a third more.
                    ended => w.tag(BIND_ENDED).u8(*ended as u8),
                };
                w.u64(*file).u64(identity.dev).u64(identity.ino);
                match identity.btime {
                    None => w.u8(0),
                    Some((sec, nsec)) => w.u8(1).u64(sec as u64).u32(nsec),
                };
                w.u32(paths.len() as u32);
                for path in paths {
                    w.bytes(path);
                }
            }
            Self::NameAdded { file, path } => {
                w.tag(NAME_ADDED).u64(*file).bytes(path);
            }
            Self::NameRemoved { file, path } => {
                w.tag(NAME_REMOVED).u64(*file).bytes(path);
            }
            Self::RenameBegin {
                id,
                from,
                to,
                exchange,
            } => {
                w.tag(RENAME_BEGIN)
                    .u64(*id)
                    .bytes(from)
                    .bytes(to)
                    .u8(u8::from(*exchange));
            }
            Self::RenameEnd { id, done } => {
                w.tag(RENAME_END).u64(*id).u8(u8::from(*done));
            }
            Self::TruncateBegin {
                file,
                sequence,
                size,
            } => {
                w.tag(TRUNCATE_BEGIN).u64(*file).u64(*sequence).u64(*size);
            }
            Self::TruncateEnd {
                file,
                sequence,
                size,
                done,
            } => {
                w.tag(TRUNCATE_END)
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
                w.tag(DRAINED_RANGE)
                    .u64(*file)
                    .u64(*offset)
                    .u64(*len)
                    .u64(*sequence);
            }
            Self::DrainedRangesForgotten { file, sequence } => {
                w.tag(DRAINED_RANGES_FORGOTTEN).u64(*file).u64(*sequence);
            }
            Self::ModifiedAt {
                file,
                time,
                written,
            } => {
                w.tag(MODIFIED_AT)
                    .u64(*file)
                    .u64(time.0 as u64)
                    .u32(time.1)
                    .u64(*written);
            }
            Self::Ended { file, ending } => {
                w.tag(ENDED).u64(*file).u8(*ending as u8);
            }
            Self::FileIdEnd { file } => {
                w.tag(FILE_ID_END).u64(*file);
            }
        }
        w.0
    }

    /// Reads a payload back; it must be used up.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let mut r = Reader(bytes);
        let record = match r.u8()? {
            kind @ (FILE_ID_BEGIN | BIND_ENDED) => {
                let ending = if kind == FILE_ID_BEGIN {
                    Ending::Open
                } else {
                    r.ending()?
                };
                if kind == BIND_ENDED && ending == Ending::Open {
                    return Err(damaged(
                        "an open file in a record of one that is not".into(),
                    ));
                }
                let file = r.u64()?;
                let dev = r.u64()?;
                let ino = r.u64()?;
                let btime = if r.flag()? {
                    Some((r.u64()? as i64, r.u32()?))
                } else {
                    None
                };
                let count = r.u32()?;
                let paths = (0..count).map(|_| r.bytes()).collect::<Result<_, _>>()?;
                Self::FileIdBegin {
                    file,
                    identity: Identity { dev, ino, btime },
                    paths,
                    ending,
                }
            }
            NAME_ADDED => Self::NameAdded {
                file: r.u64()?,
                path: r.bytes()?,
            },
            NAME_REMOVED => Self::NameRemoved {
                file: r.u64()?,
                path: r.bytes()?,
            },
            RENAME_BEGIN => Self::RenameBegin {
                id: r.u64()?,
                from: r.bytes()?,
                to: r.bytes()?,
                exchange: r.flag()?,
            },
            RENAME_END => Self::RenameEnd {
                id: r.u64()?,
                done: r.flag()?,
            },
            TRUNCATE_BEGIN => Self::TruncateBegin {
                file: r.u64()?,
                sequence: r.u64()?,
                size: r.u64()?,
            },
            TRUNCATE_END => Self::TruncateEnd {
                file: r.u64()?,
                sequence: r.u64()?,
                size: r.u64()?,
                done: r.flag()?,
            },
            DRAINED_RANGE => Self::DrainedRange {
                file: r.u64()?,
                offset: r.u64()?,
                len: r.u64()?,
                sequence: r.u64()?,
            },
            DRAINED_RANGES_FORGOTTEN => Self::DrainedRangesForgotten {
                file: r.u64()?,
                sequence: r.u64()?,
            },
            MODIFIED_AT => Self::ModifiedAt {
                file: r.u64()?,
                time: (r.u64()? as i64, r.u32()?),
                written: r.u64()?,
            },
            ENDED => {
                let file = r.u64()?;
                Self::Ended {
                    file,
                    ending: r.ending()?,
                }
            }
            FILE_ID_END => Self::FileIdEnd { file: r.u64()? },
            other => return Err(damaged(format!("unknown kind {other}"))),
        };
        if r.0.is_empty() {
            Ok(record)
        } else {
            Err(damaged(format!("{} bytes too many", r.0.len())))
        }
    }
}

fn damaged(why: String) -> FormatError {
    FormatError::Field {
        what: "journal record",
        why,
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn tag(&mut self, tag: u8) -> &mut Self {
        self.u8(tag)
    }
    fn u8(&mut self, v: u8) -> &mut Self {
        self.0.push(v);
        self
    }
    fn u32(&mut self, v: u32) -> &mut Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }
    fn u64(&mut self, v: u64) -> &mut Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }
    fn bytes(&mut self, v: &[u8]) -> &mut Self {
        self.u32(v.len() as u32);
        self.0.extend_from_slice(v);
        self
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take(&mut self, n: usize) -> Result<&[u8], FormatError> {
        let (head, tail) = self
            .0
            .split_at_checked(n)
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
            other => Err(damaged(format!("flag {other}"))),
        }
    }
    fn ending(&mut self) -> Result<Ending, FormatError> {
        let word = self.u8()?;
        ENDINGS
            .get(usize::from(word))
            .copied()
            .ok_or_else(|| damaged(format!("ending {word}")))
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
