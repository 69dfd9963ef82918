//! The bytes of a block of a sorted index: layers by where they begin in the file, or spans as they stand in the index.
//!
//! Each number is stored as its distance from the one before it in the block, with as few bytes as it needs, so that 64
//! KiB have some thousand pieces without a pattern. A block is read on its own. The reader compares its checksum first,
//! and still checks each number.

use serde::{Deserialize, Serialize};

use crate::frame::{Span, is_valid_span};
use crate::resolve::{Key, Layer, Place, WriterId};
use crate::run::Run;

/// A block is closed when it has this many bytes.
pub const BLOCK_BYTES: usize = 64 << 10;

/// A layer as a block has it.
#[derive(Serialize, Deserialize)]
struct StoredLayer {
    offset: u64,
    len: i64,
    /// Bytes between two pieces.
    gap: u64,
    /// Pieces after the first.
    more: u64,
    epoch: i64,
    frame: i64,
    /// 0: zeros, which are nowhere; else the log's number and 1.
    log: u64,
    position: i64,
}

/// The layer before, and none before the first.
#[derive(Clone, Copy, Default)]
pub struct Before {
    offset: u64,
    len: u64,
    epoch: u64,
    frame: u64,
    position: u64,
}

impl Before {
    fn of(layer: &Layer) -> Self {
        Self {
            offset: layer.run.offset(),
            len: layer.run.len(),
            epoch: layer.key.epoch,
            frame: layer.key.frame,
            position: layer.place.map_or(0, |place| place.position),
        }
    }
}

fn distance(from: u64, to: u64) -> i64 {
    to.wrapping_sub(from).cast_signed()
}

fn advance(from: u64, distance: i64) -> u64 {
    from.wrapping_add(distance.cast_unsigned())
}

/// Makes a block of entries, each measured from the one before: layers or spans.
#[derive(Default)]
pub struct BlockEncoder<Last> {
    bytes: Vec<u8>,
    before: Last,
}

impl<Last: Default> BlockEncoder<Last> {
    /// Whether the block is to be closed.
    pub fn is_full(&self) -> bool {
        self.bytes.len() >= BLOCK_BYTES
    }

    /// The block, if it has anything; the next one begins.
    pub fn take(&mut self) -> Option<Vec<u8>> {
        let made = std::mem::take(self);
        (!made.bytes.is_empty()).then_some(made.bytes)
    }

    fn append(&mut self, stored: &impl Serialize) {
        let taken = std::mem::take(&mut self.bytes);
        self.bytes = postcard::to_extend(stored, taken).expect("memory is all that it takes");
    }
}

/// Makes a block of layers, which come in the order of their first bytes.
pub type LayerEncoder = BlockEncoder<Before>;

impl LayerEncoder {
    /// Appends a layer, which begins nowhere before the last one.
    pub fn push(&mut self, layer: &Layer) {
        debug_assert!(layer.run.offset() >= self.before.offset);
        let before = std::mem::replace(&mut self.before, Before::of(layer));
        let stored = StoredLayer {
            offset: self.before.offset - before.offset,
            len: distance(before.len, self.before.len),
            gap: layer.run.gap(),
            more: layer.run.count() - 1,
            epoch: distance(before.epoch, self.before.epoch),
            frame: distance(before.frame, self.before.frame),
            log: layer.place.map_or(0, |place| u64::from(place.log) + 1),
            position: distance(before.position, self.before.position),
        };
        self.append(&stored);
    }
}

/// The layers of a block of one writer; ends with [`Damaged`] where the bytes are none.
pub struct LayerDecoder<T> {
    bytes: T,
    at: usize,
    writer: WriterId,
    before: Before,
}

/// Bytes that no encoder made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damaged;

impl<T: AsRef<[u8]>> LayerDecoder<T> {
    /// Of the block that `bytes` are.
    pub fn new(bytes: T, writer: WriterId) -> Self {
        Self {
            bytes,
            at: 0,
            writer,
            before: Before::default(),
        }
    }

    fn decode(&mut self) -> Option<Layer> {
        let rest = &self.bytes.as_ref()[self.at..];
        let (stored, left) = postcard::take_from_bytes::<StoredLayer>(rest).ok()?;
        self.at += rest.len() - left.len();
        let before = self.before;
        let offset = before.offset.checked_add(stored.offset)?;
        let len = advance(before.len, stored.len);
        let run = Run::from_stored(offset, len, stored.gap, stored.more)?;
        let position = advance(before.position, stored.position);
        let place = match stored.log.checked_sub(1) {
            None => None,
            Some(log) => {
                position.checked_add(run.bytes())?;
                let log = u32::try_from(log).ok()?;
                Some(Place { log, position })
            }
        };
        let layer = Layer {
            key: Key {
                epoch: advance(before.epoch, stored.epoch),
                writer: self.writer,
                frame: advance(before.frame, stored.frame),
            },
            run,
            place,
        };
        self.before = Before::of(&layer);
        Some(layer)
    }
}

impl<T: AsRef<[u8]>> Iterator for LayerDecoder<T> {
    type Item = Result<Layer, Damaged>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.bytes.as_ref().len() {
            return None;
        }
        let decoded = self.decode().ok_or(Damaged);
        if decoded.is_err() {
            self.at = self.bytes.as_ref().len();
        }
        Some(decoded)
    }
}

/// A span as a block has it.
#[derive(Serialize, Deserialize)]
struct StoredSpan {
    /// From the frame before.
    frame: u64,
    log: u32,
    position: u64,
    bytes: u64,
    checksums: Vec<[u8; 4]>,
}

/// Makes a block of spans, which come in the order of their frames: what is before is a frame.
pub type SpanEncoder = BlockEncoder<u64>;

impl SpanEncoder {
    /// Appends what the frame at `frame` of the index wrote.
    pub fn push(&mut self, frame: u64, span: &Span) {
        debug_assert!(frame >= self.before, "spans are in order of their frames");
        let stored = StoredSpan {
            frame: frame - self.before,
            log: span.log,
            position: span.position,
            bytes: span.bytes,
            checksums: span.checksums.iter().map(|sum| sum.to_le_bytes()).collect(),
        };
        self.before = frame;
        self.append(&stored);
    }
}

/// The spans of a block, each with its frame.
pub fn decode_spans(bytes: &[u8]) -> impl Iterator<Item = Result<(u64, Span), Damaged>> {
    let mut rest = bytes;
    let mut before = 0u64;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let mut decode = || {
            let (stored, left) = postcard::take_from_bytes::<StoredSpan>(rest).ok()?;
            let frame = before.checked_add(stored.frame)?;
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
            (rest, before) = (left, frame);
            is_valid_span(&span).then_some((frame, span))
        };
        let decoded = decode().ok_or(Damaged);
        if decoded.is_err() {
            rest = &[];
        }
        Some(decoded)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::{Piece, find_runs};
    use proptest::prelude::*;

    const WRITER: WriterId = WriterId { host: 7, life: 2 };

    fn any_layer() -> impl Strategy<Value = Layer> {
        let run = (0u64..1 << 50, 1u64..1 << 20, 0u64..1 << 20, 1u64..100);
        let place = proptest::option::of((any::<u32>(), 0u64..1 << 60));
        (run, any::<u64>(), any::<u64>(), place).prop_map(|(run, epoch, frame, place)| {
            let (offset, len, gap, count) = run;
            let pieces = (0..count).map(|number| Piece {
                offset: offset + (len + gap) * number,
                len,
            });
            Layer {
                key: Key {
                    epoch,
                    writer: WRITER,
                    frame,
                },
                run: find_runs(pieces)[0],
                place: place.map(|(log, position)| Place { log, position }),
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
            let block = encoder.take().expect("a block");
            let decoded: Result<Vec<Layer>, Damaged> = LayerDecoder::new(block, WRITER).collect();
            prop_assert_eq!(decoded, Ok(layers));
            prop_assert_eq!(encoder.take(), None);
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
