//! Encodes and decodes the blocks of a table. A *table* is a part of an index, sorted by offset in the file.
//!
//! Terms
//! * An *index* lists the changes of one writer. Each entry is a *frame*.
//! * A *layer* is a part of a change: pieces of the file of one length at equal distances. Their bytes follow each
//!   other in a log.
//! * A *span* is the range of a log with the bytes of one change, and their checksums.
//!
//! A block holds layers, sorted by offset in the file, or spans, in the order of the index.
//!
//! Example: a program writes 4 KiB at the offsets 0, 16 KiB and 32 KiB, one row of a matrix each. This is one layer:
//! its offset is 0, its length 4 KiB, its gap 12 KiB, and the first piece is repeated 2 times.
//!
//! Each number is stored as its distance from the same number of the entry before, with as few bytes as it needs. So 64
//! KiB hold some thousand pieces without a pattern. Each block is decoded on its own. The reader compares the checksum
//! of the block first, but the decoder still checks each number.

use serde::{Deserialize, Serialize};

use crate::frame::{Span, is_valid_span};
use crate::resolve::{ChangeKey, Layer, LogLocation, WriterId};
use crate::run::Run;

/// An encoder ends a block when the block has at least this many bytes.
pub const BLOCK_BYTES: usize = 64 << 10;

/// A layer as a block stores it. `offset` and the signed numbers are distances from the layer before.
#[derive(Serialize, Deserialize)]
struct StoredLayer {
    offset: u64,
    len: i64,
    /// Number of bytes between two pieces.
    gap: u64,
    /// How many further pieces follow the first one.
    repeat_count: u64,
    epoch: i64,
    frame: i64,
    /// Number of the log plus 1, or 0 for zeros, which lie in no log.
    log: u64,
    position: i64,
}

/// The numbers of the layer before, from which distances are measured. All are 0 before the first layer.
#[derive(Clone, Copy, Default)]
pub struct PreviousLayer {
    offset: u64,
    len: u64,
    epoch: u64,
    frame: u64,
    position: u64,
}

impl PreviousLayer {
    fn from_layer(layer: &Layer) -> Self {
        Self {
            offset: layer.run.offset(),
            len: layer.run.len(),
            epoch: layer.key.epoch,
            frame: layer.key.frame,
            position: layer.location.map_or(0, |location| location.position),
        }
    }
}

/// Returns the distance from one number to another. It wraps around, so each pair of numbers has one.
fn distance_between(from: u64, to: u64) -> i64 {
    to.wrapping_sub(from).cast_signed()
}

/// Returns the number at a distance from another one.
fn number_at_distance(from: u64, distance: i64) -> u64 {
    from.wrapping_add(distance.cast_unsigned())
}

/// Encodes the number of a log. 0 stands for no log, so each number is stored plus 1.
fn encode_log(location: Option<LogLocation>) -> u64 {
    location.map_or(0, |location| u64::from(location.log) + 1)
}

/// Decodes the number of a log. Returns `None` if the stored number stands for no log.
fn decode_log(stored: u64) -> Option<u64> {
    stored.checked_sub(1)
}

/// Encodes the entries of a block: layers or spans. `Last` holds the numbers of the entry before.
#[derive(Default)]
pub struct BlockEncoder<Last> {
    bytes: Vec<u8>,
    /// Numbers of the entry that was added last.
    last: Last,
}

impl<Last: Default> BlockEncoder<Last> {
    /// Returns whether the block has enough bytes to be ended.
    pub fn is_full(&self) -> bool {
        self.bytes.len() >= BLOCK_BYTES
    }

    /// Ends the block and begins another. Returns the block's bytes, or `None` if it is empty.
    pub fn finish_block(&mut self) -> Option<Vec<u8>> {
        let block = std::mem::take(self);
        (!block.bytes.is_empty()).then_some(block.bytes)
    }

    /// Appends an encoded entry.
    fn append(&mut self, stored: &impl Serialize) {
        let bytes_so_far = std::mem::take(&mut self.bytes);
        self.bytes =
            postcard::to_extend(stored, bytes_so_far).expect("memory is all that it takes");
    }
}

/// Encodes a block of layers. Layers must be added in the order of their offsets.
pub type LayerEncoder = BlockEncoder<PreviousLayer>;

impl LayerEncoder {
    /// Adds a layer (pieces of one change at equal distances). Its offset must not be lower than that of the previous
    /// one. Numbers are stored as distances from the previous layer, because small numbers take few bytes.
    pub fn push(&mut self, layer: &Layer) {
        debug_assert!(layer.run.offset() >= self.last.offset);
        let last = self.last;
        let current = PreviousLayer::from_layer(layer);
        let stored = StoredLayer {
            offset: current.offset - last.offset,
            len: distance_between(last.len, current.len),
            gap: layer.run.gap(),
            repeat_count: layer.run.count() - 1,
            epoch: distance_between(last.epoch, current.epoch),
            frame: distance_between(last.frame, current.frame),
            log: encode_log(layer.location),
            position: distance_between(last.position, current.position),
        };
        self.last = current;
        self.append(&stored);
    }
}

/// Decodes a block of layers, all of one writer. Ends with [`DamagedBlock`] at bytes that are no layer.
pub struct LayerDecoder<T> {
    bytes: T,
    /// Position of the next entry in the block.
    position: usize,
    writer: WriterId,
    last: PreviousLayer,
}

/// Error for bytes that no encoder made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DamagedBlock;

impl<T: AsRef<[u8]>> LayerDecoder<T> {
    /// Makes a decoder of a block.
    pub fn new(bytes: T, writer: WriterId) -> Self {
        Self {
            bytes,
            position: 0,
            writer,
            last: PreviousLayer::default(),
        }
    }

    /// Decodes the next layer (pieces of one change at equal distances). Returns `None` if the bytes are no valid
    /// layer. Stored numbers are distances from the previous layer.
    fn decode(&mut self) -> Option<Layer> {
        let undecoded = &self.bytes.as_ref()[self.position..];
        let (stored, remaining) = postcard::take_from_bytes::<StoredLayer>(undecoded).ok()?;
        self.position += undecoded.len() - remaining.len();
        let last = self.last;
        let offset = last.offset.checked_add(stored.offset)?;
        let len = number_at_distance(last.len, stored.len);
        let run = Run::from_stored(offset, len, stored.gap, stored.repeat_count)?;
        let position = number_at_distance(last.position, stored.position);
        let location = match decode_log(stored.log) {
            // Zeros lie in no log.
            None => None,
            Some(log) => {
                // A layer that would end after the largest position is not valid.
                position.checked_add(run.bytes())?;
                let log = u32::try_from(log).ok()?;
                Some(LogLocation { log, position })
            }
        };
        let layer = Layer {
            key: ChangeKey {
                epoch: number_at_distance(last.epoch, stored.epoch),
                writer: self.writer,
                frame: number_at_distance(last.frame, stored.frame),
            },
            run,
            location,
        };
        self.last = PreviousLayer::from_layer(&layer);
        Some(layer)
    }
}

impl<T: AsRef<[u8]>> Iterator for LayerDecoder<T> {
    type Item = Result<Layer, DamagedBlock>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.position >= self.bytes.as_ref().len() {
            return None;
        }
        let decoded = self.decode().ok_or(DamagedBlock);
        if decoded.is_err() {
            self.position = self.bytes.as_ref().len();
        }
        Some(decoded)
    }
}

/// A span as a block stores it.
#[derive(Serialize, Deserialize)]
struct StoredSpan {
    /// Distance from the frame before.
    frame: u64,
    log: u32,
    position: u64,
    bytes: u64,
    checksums: Vec<[u8; 4]>,
}

/// Encodes a block of spans. Spans must be added in the order of their frames; `Last` is the position of the frame
/// before.
pub type SpanEncoder = BlockEncoder<u64>;

impl SpanEncoder {
    /// Adds the span of the frame at position `frame` of the index.
    pub fn push(&mut self, frame: u64, span: &Span) {
        debug_assert!(frame >= self.last, "spans are in order of their frames");
        let stored = StoredSpan {
            frame: frame - self.last,
            log: span.log,
            position: span.position,
            bytes: span.bytes,
            checksums: span.checksums.iter().map(|sum| sum.to_le_bytes()).collect(),
        };
        self.last = frame;
        self.append(&stored);
    }
}

/// Decodes the spans of a block (the ranges of logs with the bytes of changes). Returns each with the position of its
/// frame in the index: the entry that describes the change. Ends with [`DamagedBlock`] at bytes that are no span.
pub fn decode_spans(bytes: &[u8]) -> impl Iterator<Item = Result<(u64, Span), DamagedBlock>> {
    let mut undecoded = bytes;
    let mut last_frame = 0;
    std::iter::from_fn(move || {
        if undecoded.is_empty() {
            return None;
        }
        let Some((frame, span, remaining)) = decode_span(undecoded, last_frame) else {
            // The rest of the block cannot be decoded either.
            undecoded = &[];
            return Some(Err(DamagedBlock));
        };
        undecoded = remaining;
        last_frame = frame;
        Some(Ok((frame, span)))
    })
}

/// Decodes the first span of `bytes`, which follows the one of the frame `last_frame`. Returns the position of its
/// frame, the span and the remaining bytes. Returns `None` if the bytes are no valid span.
fn decode_span(bytes: &[u8], last_frame: u64) -> Option<(u64, Span, &[u8])> {
    let (stored, remaining) = postcard::take_from_bytes::<StoredSpan>(bytes).ok()?;
    let frame = last_frame.checked_add(stored.frame)?;
    let span = Span {
        log: stored.log,
        position: stored.position,
        bytes: stored.bytes,
        checksums: stored
            .checksums
            .into_iter()
            .map(u32::from_le_bytes)
            .collect(),
    };
    is_valid_span(&span).then_some((frame, span, remaining))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::{Piece, find_runs};
    use proptest::prelude::*;

    const WRITER: WriterId = WriterId { host: 7, life: 2 };

    fn any_layer() -> impl Strategy<Value = Layer> {
        let run = (0u64..1 << 50, 1u64..1 << 20, 0u64..1 << 20, 1u64..100);
        let location = proptest::option::of((any::<u32>(), 0u64..1 << 60));
        (run, any::<u64>(), any::<u64>(), location).prop_map(|(run, epoch, frame, location)| {
            let (offset, len, gap, count) = run;
            let pieces = (0..count).map(|number| Piece {
                offset: offset + (len + gap) * number,
                len,
            });
            Layer {
                key: ChangeKey {
                    epoch,
                    writer: WRITER,
                    frame,
                },
                run: find_runs(pieces)[0],
                location: location.map(|(log, position)| LogLocation { log, position }),
            }
        })
    }

    proptest! {
        #[test]
        fn layers_are_decoded_as_they_were_encoded(mut layers in proptest::collection::vec(any_layer(), 1..40)) {
            layers.sort_by_key(|layer| layer.run.offset());
            let mut encoder = LayerEncoder::default();
            for layer in &layers {
                encoder.push(layer);
            }
            let block = encoder.finish_block().expect("a block");
            let decoded: Result<Vec<Layer>, DamagedBlock> = LayerDecoder::new(block, WRITER).collect();
            prop_assert_eq!(decoded, Ok(layers));
            prop_assert_eq!(encoder.finish_block(), None);
        }

        #[test]
        fn whatever_bytes_there_are_layers_and_spans_are_valid(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            for layer in LayerDecoder::new(&bytes, WRITER).flatten() {
                prop_assert!(layer.run.span().end <= crate::run::FILE_BYTES_MAX);
            }
            for (_, span) in decode_spans(&bytes).flatten() {
                prop_assert!(is_valid_span(&span));
            }
        }
    }
}
