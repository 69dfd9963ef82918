//! The bytes of an index: frames, one after the other.
//!
//! ```text
//! 0   "FIRNFRME"
//! 8   u32   bytes of the body
//! 12  u32   CRC32C of the body
//! 16  body, as postcard writes a `Body`
//! ```
//!
//! A frame is appended after the bytes that it speaks of. The first one that is not whole ends an index: the host died
//! there. A writer never appends to the index of another, nor to its own of an earlier life.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::names::Writer;
use crate::run::{FILE_BYTES_MAX, Piece, Run, StoredRuns};

/// Bytes of a log that have one checksum, counted from the position of the frame.
pub const CHECKED_BYTES: u64 = 1 << 20;
/// Bytes of a log that one frame speaks of, at most.
pub const SPAN_BYTES_MAX: u64 = 1 << 30;

/// Pieces that one frame speaks of, at most: whatever they are, they fit into a body.
pub const PIECES_MAX: usize = 16 << 10;

pub(crate) const MAGIC: [u8; 8] = *b"FIRNFRME";
const HEADER_BYTES: usize = 16;
/// No writer makes a larger one.
const BODY_BYTES_MAX: usize = 1 << 20;
/// Bytes of the largest frame.
pub(crate) const FRAME_BYTES_MAX: usize = HEADER_BYTES + BODY_BYTES_MAX;

/// What a host did to a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Larger than that of everything that the host knew to be older ([`crate::resolve::Key`]).
    pub epoch: u64,
    /// Bytes of this index that were durable when it was appended: where one of them is damaged, it is not that a host
    /// died there.
    pub synced: u64,
    /// What it did.
    pub change: Change,
}

/// A change of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Bytes were written.
    Written(Written),
    /// The file was cut.
    Cut(Cut),
    /// The file was made longer, to this many bytes; nothing is hidden by it.
    Grown(u64),
    /// Bytes from an offset on became zero; there are some.
    Zeroed(Piece),
    /// Nothing: what came before was synced.
    Synced,
}

/// A cut of the file, which hides what its host had seen of it: its own changes before it, and the frames of other indexes
/// that it names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cut {
    /// Bytes that are left.
    pub len: u64,
    /// Frames of others that it hides beyond that, by writer: those that begin before this byte of the writer's index.
    pub seen: BTreeMap<Writer, u64>,
}

/// Bytes that the writers of one cut take in a frame, at most.
const SEEN_BYTES_MAX: usize = BODY_BYTES_MAX / 2;

impl Cut {
    /// Splits the cut into as many frames as it takes.
    pub(crate) fn split(self) -> Vec<Self> {
        let len = self.len;
        let mut parts = vec![Self {
            len,
            ..Self::default()
        }];
        let mut bytes = 0;
        for (writer, until) in self.seen {
            // A name, and numbers of at most ten bytes each.
            bytes += writer.host().len() + 30;
            if bytes > SEEN_BYTES_MAX {
                bytes = writer.host().len() + 30;
                parts.push(Self {
                    len,
                    ..Self::default()
                });
            }
            let part = parts.last_mut().expect("there is one");
            let is_new = part.seen.insert(writer, until).is_none();
            debug_assert!(is_new, "a host has seen one part of an index");
        }
        debug_assert!(parts.iter().all(|part| part.len == len));
        parts
    }
}

/// Bytes in a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Number of the host's log.
    pub log: u32,
    /// Where they begin in it.
    pub position: u64,
    /// CRC32C of each [`CHECKED_BYTES`] of them, the last of which may be fewer.
    pub checksums: Vec<u32>,
    /// What they are, in the order in which they lie there.
    pub runs: Vec<Run>,
}

impl Written {
    /// How many they are.
    pub fn bytes(&self) -> u64 {
        self.runs.iter().map(Run::bytes).sum()
    }
}

/// The bytes that a frame says were written, whatever they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Number of the host's log.
    pub log: u32,
    /// Where they begin in it.
    pub position: u64,
    /// How many they are.
    pub bytes: u64,
    /// CRC32C of each [`CHECKED_BYTES`] of them, the last of which may be fewer.
    pub checksums: Vec<u32>,
}

/// Whether its numbers may be believed.
pub(crate) fn is_span(span: &Span) -> bool {
    let has_end = span.position.checked_add(span.bytes).is_some();
    let is_checked = span.checksums.len() as u64 == span.bytes.div_ceil(CHECKED_BYTES);
    (1..=SPAN_BYTES_MAX).contains(&span.bytes) && has_end && is_checked
}

#[derive(Serialize, Deserialize)]
struct Body {
    epoch: u64,
    synced: u64,
    change: StoredChange,
}

#[derive(Serialize, Deserialize)]
enum StoredChange {
    Written {
        log: u32,
        position: u64,
        checksums: Vec<[u8; 4]>,
        runs: StoredRuns,
    },
    Cut {
        len: u64,
        seen: Vec<(Writer, u64)>,
    },
    Zeroed {
        offset: u64,
        len: u64,
    },
    Synced,
    Grown(u64),
}

/// What the next bytes of an index are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// A frame, and its length in bytes.
    Frame(Frame, usize),
    /// The beginning of one, or none: the index ends here as long as its file has no more bytes.
    Incomplete,
    /// Bytes that no writer wrote: the index ends here for good.
    Damaged,
}

impl Frame {
    /// Appends its bytes.
    pub fn encode(&self, index: &mut Vec<u8>) {
        let body = Body {
            epoch: self.epoch,
            synced: self.synced,
            change: self.change.pack(),
        };
        let body = postcard::to_allocvec(&body).expect("memory is all that it takes");
        debug_assert!(body.len() <= BODY_BYTES_MAX);
        index.extend_from_slice(&MAGIC);
        index.extend_from_slice(&(body.len() as u32).to_le_bytes());
        index.extend_from_slice(&crc32c::crc32c(&body).to_le_bytes());
        index.extend_from_slice(&body);
    }

    /// Reads the frame that `index` begins with.
    pub fn decode(index: &[u8]) -> Next {
        let known = index.len().min(MAGIC.len());
        if index[..known] != MAGIC[..known] {
            return Next::Damaged;
        }
        let Some((header, rest)) = index.split_at_checked(HEADER_BYTES) else {
            return Next::Incomplete;
        };
        let word =
            |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let len = word(8) as usize;
        if len > BODY_BYTES_MAX {
            return Next::Damaged;
        }
        let Some(body) = rest.get(..len) else {
            return Next::Incomplete;
        };
        if crc32c::crc32c(body) != word(12) {
            return Next::Damaged;
        }
        match Self::parse(body) {
            Some(frame) => Next::Frame(frame, HEADER_BYTES + len),
            None => Next::Damaged,
        }
    }

    fn parse(body: &[u8]) -> Option<Self> {
        let (body, rest) = postcard::take_from_bytes::<Body>(body).ok()?;
        if !rest.is_empty() {
            return None;
        }
        let change = body.change.unpack()?;
        Some(Self {
            epoch: body.epoch,
            synced: body.synced,
            change,
        })
    }
}

impl Change {
    /// Where its bytes are, if it wrote any, and what they are. Of zeros, only what they are.
    pub(crate) fn split(self) -> (Option<Span>, Vec<Run>) {
        match self {
            Self::Cut(_) | Self::Grown(_) | Self::Synced => (None, Vec::new()),
            Self::Zeroed(piece) => (None, vec![Run::of_piece(piece)]),
            Self::Written(written) => {
                let span = Span {
                    log: written.log,
                    position: written.position,
                    bytes: written.bytes(),
                    checksums: written.checksums,
                };
                (Some(span), written.runs)
            }
        }
    }

    fn pack(&self) -> StoredChange {
        match self {
            Self::Cut(cut) => StoredChange::Cut {
                len: cut.len,
                seen: cut.seen.clone().into_iter().collect(),
            },
            Self::Grown(len) => StoredChange::Grown(*len),
            Self::Synced => StoredChange::Synced,
            Self::Zeroed(Piece { offset, len }) => StoredChange::Zeroed {
                offset: *offset,
                len: *len,
            },
            Self::Written(written) => StoredChange::Written {
                log: written.log,
                position: written.position,
                checksums: written
                    .checksums
                    .iter()
                    .map(|sum| sum.to_le_bytes())
                    .collect(),
                runs: StoredRuns::pack(&written.runs),
            },
        }
    }
}

impl StoredChange {
    /// None if it says what cannot be.
    fn unpack(self) -> Option<Change> {
        let (log, position, checksums, runs) = match self {
            Self::Synced => return Some(Change::Synced),
            Self::Cut { len, seen } => {
                let is_right = len <= FILE_BYTES_MAX && seen.iter().all(|(of, _)| of.is_right());
                let seen = seen.into_iter().collect();
                return is_right.then_some(Change::Cut(Cut { len, seen }));
            }
            Self::Grown(len) => return (len <= FILE_BYTES_MAX).then_some(Change::Grown(len)),
            Self::Zeroed { offset, len } => {
                let end = offset.checked_add(len)?;
                let is_right = len > 0 && end <= FILE_BYTES_MAX;
                return is_right.then_some(Change::Zeroed(Piece { offset, len }));
            }
            Self::Written {
                log,
                position,
                checksums,
                runs,
            } => (log, position, checksums, runs.unpack()?),
        };
        let mut bytes = 0u64;
        for run in &runs {
            bytes = bytes.checked_add(run.bytes())?;
        }
        let checksums: Vec<u32> = checksums.into_iter().map(u32::from_le_bytes).collect();
        let span = Span {
            log,
            position,
            bytes,
            checksums,
        };
        let written = Written {
            log,
            position,
            runs,
            checksums: span.checksums.clone(),
        };
        is_span(&span).then_some(Change::Written(written))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::find_runs;

    fn strided(count: u64, len: u64) -> Frame {
        let pieces = (0..count).map(|number| Piece {
            offset: number * 640 * 1024,
            len,
        });
        let bytes = count * len;
        Frame {
            epoch: 3,
            synced: 5,
            change: Change::Written(Written {
                log: 1,
                position: 8192,
                checksums: vec![0xdead_beef; bytes.div_ceil(CHECKED_BYTES) as usize],
                runs: find_runs(pieces),
            }),
        }
    }

    fn encoded(frame: &Frame) -> Vec<u8> {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        bytes
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        for frame in [
            strided(10_000, 4096),
            Frame {
                epoch: 0,
                synced: 0,
                change: Change::Cut(Cut {
                    len: 0,
                    seen: BTreeMap::from([(Writer::new("node-17", 3), 4711)]),
                }),
            },
            Frame {
                epoch: 7,
                synced: 0,
                change: Change::Grown(1 << 40),
            },
            Frame {
                epoch: 1,
                synced: 1 << 40,
                change: Change::Synced,
            },
        ] {
            let bytes = encoded(&frame);
            assert_eq!(Frame::decode(&bytes), Next::Frame(frame, bytes.len()));
        }
    }

    #[test]
    fn an_index_of_many_strided_pieces_is_small() {
        assert!(encoded(&strided(10_000, 4096)).len() < 256);
    }

    #[test]
    fn a_cut_that_has_seen_many_hosts_has_several_frames() {
        let hosts = (0..3000).map(|number| (Writer::new(&format!("{number:0250}"), 1), number + 1));
        let cut = Cut {
            len: 7,
            seen: hosts.collect(),
        };
        let parts = cut.clone().split();
        assert!(parts.len() > 1);
        let frames = parts.iter().map(|part| Frame {
            epoch: 1,
            synced: 0,
            change: Change::Cut(part.clone()),
        });
        for frame in frames {
            let bytes = encoded(&frame);
            assert_eq!(Frame::decode(&bytes), Next::Frame(frame, bytes.len()));
        }
        let seen: BTreeMap<Writer, u64> = parts.into_iter().flat_map(|part| part.seen).collect();
        assert_eq!(seen, cut.seen);
        assert_eq!(Cut::default().split(), [Cut::default()]);
    }

    #[test]
    fn a_frame_that_is_cut_off_may_still_come() {
        let bytes = encoded(&strided(3, 100));
        for len in 0..bytes.len() {
            assert_eq!(Frame::decode(&bytes[..len]), Next::Incomplete, "{len}");
        }
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let bytes = encoded(&strided(3, 100));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let next = Frame::decode(&bad);
            assert!(!matches!(next, Next::Frame(..)), "bit {bit}: {next:?}");
        }
    }

    #[test]
    fn a_frame_whose_checksums_are_not_those_of_its_bytes_is_none() {
        let Change::Written(written) = strided(3, 100).change else {
            unreachable!("it is");
        };
        let wrong = [
            Written {
                checksums: vec![],
                ..written.clone()
            },
            Written {
                checksums: vec![1, 2],
                ..written.clone()
            },
            Written {
                runs: vec![],
                checksums: vec![],
                ..written.clone()
            },
            Written {
                position: u64::MAX - 10,
                ..written
            },
        ];
        for written in wrong {
            let frame = Frame {
                epoch: 1,
                synced: 0,
                change: Change::Written(written),
            };
            assert_eq!(Frame::decode(&encoded(&frame)), Next::Damaged, "{frame:?}");
        }
    }
}
