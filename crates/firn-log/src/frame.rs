//! Frames: the entries of an index, one after the other. An *index* lists the changes that one host made to a file, and
//! a frame describes one of them. The written bytes themselves are in a *log*, another file of that host.
//!
//! ```text
//! 0   "FIRNFRME"
//! 8   u32   bytes of the body
//! 12  u32   CRC32C of the body
//! 16  body, as postcard writes a `Body`
//! ```
//!
//! Invariants
//! * A frame is appended after the bytes that it describes. So the bytes of a valid frame exist.
//! * The first invalid frame ends an index: its writer died while it appended that frame.
//! * A writer appends only to its own index, and begins another one in each life (each time it opens the file to write
//!   anew).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::names::Writer;
use crate::run::{FILE_BYTES_MAX, Piece, Run, StoredRuns};

/// Length of a block: the bytes of a log that share one checksum, counted from the beginning of a span.
pub const CHECKED_BYTES: u64 = 1 << 20;
/// Bound on the bytes of a log that one frame describes.
pub const SPAN_BYTES_MAX: u64 = 1 << 30;

/// Bound on the pieces of one frame. This many pieces fit in a body, also if no two of them form a run (pieces at equal
/// distances).
pub const PIECES_MAX: usize = 16 << 10;

pub(crate) const MAGIC: [u8; 8] = *b"FIRNFRME";
const HEADER_BYTES: usize = 16;
/// Position in the header of the length of the body.
const BODY_BYTES_OFFSET: usize = 8;
/// Position in the header of the checksum of the body.
const CHECKSUM_OFFSET: usize = 12;
/// Bound on the body of a frame. A larger length is damage.
const BODY_BYTES_MAX: usize = 1 << 20;
/// Bound on the length of a frame in bytes.
pub(crate) const FRAME_BYTES_MAX: usize = HEADER_BYTES + BODY_BYTES_MAX;

/// One change of a file by a host, as an index stores it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Epoch of the change. It is larger than the epochs of all changes that the host knew to be older
    /// ([`crate::resolve::ChangeKey`]).
    pub epoch: u64,
    /// Number of bytes of this index that were durable when the frame was appended. An invalid frame before this
    /// position is damage, not the end of the index.
    pub synced: u64,
    /// The change.
    pub change: Change,
}

/// A change of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Bytes were written.
    Written(Written),
    /// The file was cut.
    Cut(Cut),
    /// The file was made longer, to this length. A growth hides nothing.
    Grown(u64),
    /// The bytes of this piece became zero.
    Zeroed(Piece),
    /// No change: all earlier frames were synced.
    Synced,
}

/// A cut of the file. It hides bytes of changes that its host had seen: its own earlier changes, and the frames of
/// other indexes in `seen`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cut {
    /// Length of the file after the cut.
    pub len: u64,
    /// How far the host had read each other index, in bytes. The cut applies to frames that begin before that position.
    pub seen: BTreeMap<Writer, u64>,
}

/// Bound on the bytes that `seen` takes in one frame.
const SEEN_BYTES_MAX: usize = BODY_BYTES_MAX / 2;
/// Bound on the bytes of one entry of `seen` beside the name of the host: three numbers of at most ten bytes each.
const SEEN_ENTRY_BYTES_MAX: usize = 30;

impl Cut {
    /// Splits a cut (a change that shortens the file) into several cuts that each fit in a frame, an entry of an index.
    /// All parts shorten the file to the same length.
    ///
    /// A cut lists how far its host had read the index of each other host. With many hosts it is longer than a frame
    /// may be. So each part lists some of the hosts.
    pub(crate) fn split(self) -> Vec<Self> {
        let len = self.len;
        let empty_part = || Self {
            len,
            ..Self::default()
        };
        let mut parts = Vec::new();
        let mut part = empty_part();
        let mut part_bytes = 0;
        for (writer, until) in self.seen {
            let entry_bytes = writer.host().len() + SEEN_ENTRY_BYTES_MAX;
            if part_bytes + entry_bytes > SEEN_BYTES_MAX {
                parts.push(std::mem::replace(&mut part, empty_part()));
                part_bytes = 0;
            }
            part_bytes += entry_bytes;
            let is_new = part.seen.insert(writer, until).is_none();
            debug_assert!(is_new, "a host has seen one part of an index");
        }
        parts.push(part);
        debug_assert!(parts.iter().all(|part| part.len == len));
        parts
    }
}

/// A change that wrote bytes to a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Number of the log among the writer's logs.
    pub log: u32,
    /// Position of the first byte in the log.
    pub position: u64,
    /// CRC32C of each block of [`CHECKED_BYTES`]. The last block may be shorter.
    pub checksums: Vec<u32>,
    /// The pieces of the file that were written, in the order of their bytes in the log.
    pub runs: Vec<Run>,
}

impl Written {
    /// Returns the number of bytes written.
    pub fn bytes(&self) -> u64 {
        self.runs.iter().map(Run::bytes).sum()
    }

    /// Returns whether decoded numbers form a valid span.
    fn has_valid_span(&self) -> bool {
        let mut bytes = 0u64;
        for run in &self.runs {
            match bytes.checked_add(run.bytes()) {
                Some(sum) => bytes = sum,
                None => return false,
            }
        }
        is_valid_range(self.position, bytes, self.checksums.len())
    }
}

/// The bytes of a log that one change wrote, without their places in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Number of the log among the writer's logs.
    pub log: u32,
    /// Position of the first byte in the log.
    pub position: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// CRC32C of each block of [`CHECKED_BYTES`]. The last block may be shorter.
    pub checksums: Vec<u32>,
}

/// Returns whether decoded numbers form a valid span.
pub(crate) fn is_valid_span(span: &Span) -> bool {
    is_valid_range(span.position, span.bytes, span.checksums.len())
}

/// Returns whether a range of a log is valid as a span, and has one checksum for each block.
fn is_valid_range(position: u64, bytes: u64, checksums: usize) -> bool {
    let has_end = position.checked_add(bytes).is_some();
    let is_checked = checksums as u64 == bytes.div_ceil(CHECKED_BYTES);
    (1..=SPAN_BYTES_MAX).contains(&bytes) && has_end && is_checked
}

/// A frame's body as postcard stores it.
#[derive(Serialize, Deserialize)]
struct Body {
    epoch: u64,
    synced: u64,
    change: StoredChange,
}

/// A [`Change`] as postcard stores it.
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

/// Result of decoding the next bytes of an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecodedFrame {
    /// A valid frame, and its length in bytes.
    Complete(Frame, usize),
    /// The beginning of a frame, or no bytes. The rest of the frame may be appended later.
    Incomplete,
    /// Bytes that are no frame, and never become one.
    Damaged,
}

impl Frame {
    /// Appends the encoded frame to `index`.
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

    /// Decodes the frame (an entry, which is one change) at the beginning of `index`.
    pub fn decode(index: &[u8]) -> DecodedFrame {
        let magic_bytes = index.len().min(MAGIC.len());
        if index[..magic_bytes] != MAGIC[..magic_bytes] {
            return DecodedFrame::Damaged;
        }
        let Some((header, after_header)) = index.split_at_checked(HEADER_BYTES) else {
            return DecodedFrame::Incomplete;
        };
        let body_bytes = read_u32(header, BODY_BYTES_OFFSET) as usize;
        if body_bytes > BODY_BYTES_MAX {
            return DecodedFrame::Damaged;
        }
        let Some(body) = after_header.get(..body_bytes) else {
            return DecodedFrame::Incomplete;
        };
        if crc32c::crc32c(body) != read_u32(header, CHECKSUM_OFFSET) {
            return DecodedFrame::Damaged;
        }
        match Self::parse(body) {
            Some(frame) => DecodedFrame::Complete(frame, HEADER_BYTES + body_bytes),
            None => DecodedFrame::Damaged,
        }
    }

    /// Decodes a body whose checksum is right. Returns `None` if the body is not a valid change nevertheless.
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

/// Returns the number at `offset` of a header.
fn read_u32(header: &[u8], offset: usize) -> u32 {
    let bytes = header[offset..offset + 4].try_into();
    u32::from_le_bytes(bytes.expect("four bytes"))
}

impl Change {
    /// Returns where the written bytes lie in a log, and the pieces of the file that changed. A change without bytes in
    /// a log has no span.
    pub(crate) fn split(self) -> (Option<Span>, Vec<Run>) {
        match self {
            Self::Cut(_) | Self::Grown(_) | Self::Synced => (None, Vec::new()),
            Self::Zeroed(piece) => (None, vec![Run::from_piece(piece)]),
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

    /// Converts the change to the form in which an index, the list of changes, stores it.
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
    /// Converts a change back from the form in which an index stores it. Returns `None` if its numbers are not valid.
    fn unpack(self) -> Option<Change> {
        match self {
            Self::Synced => Some(Change::Synced),
            Self::Cut { len, seen } => {
                let is_valid =
                    len <= FILE_BYTES_MAX && seen.iter().all(|(writer, _)| writer.is_valid());
                let seen = seen.into_iter().collect();
                is_valid.then_some(Change::Cut(Cut { len, seen }))
            }
            Self::Grown(len) => (len <= FILE_BYTES_MAX).then_some(Change::Grown(len)),
            Self::Zeroed { offset, len } => {
                let end = offset.checked_add(len)?;
                let is_valid = len > 0 && end <= FILE_BYTES_MAX;
                is_valid.then_some(Change::Zeroed(Piece { offset, len }))
            }
            Self::Written {
                log,
                position,
                checksums,
                runs,
            } => {
                let written = Written {
                    log,
                    position,
                    checksums: checksums.into_iter().map(u32::from_le_bytes).collect(),
                    runs: runs.unpack()?,
                };
                written.has_valid_span().then_some(Change::Written(written))
            }
        }
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
            assert_eq!(
                Frame::decode(&bytes),
                DecodedFrame::Complete(frame, bytes.len())
            );
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
            assert_eq!(
                Frame::decode(&bytes),
                DecodedFrame::Complete(frame, bytes.len())
            );
        }
        let seen: BTreeMap<Writer, u64> = parts.into_iter().flat_map(|part| part.seen).collect();
        assert_eq!(seen, cut.seen);
        assert_eq!(Cut::default().split(), [Cut::default()]);
    }

    #[test]
    fn a_frame_that_is_cut_off_may_still_come() {
        let bytes = encoded(&strided(3, 100));
        for len in 0..bytes.len() {
            assert_eq!(
                Frame::decode(&bytes[..len]),
                DecodedFrame::Incomplete,
                "{len}"
            );
        }
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let bytes = encoded(&strided(3, 100));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let next = Frame::decode(&bad);
            assert!(
                !matches!(next, DecodedFrame::Complete(..)),
                "bit {bit}: {next:?}"
            );
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
            assert_eq!(
                Frame::decode(&encoded(&frame)),
                DecodedFrame::Damaged,
                "{frame:?}"
            );
        }
    }
}
