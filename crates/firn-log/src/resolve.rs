//! Which bytes a file has: the order of the changes of all hosts.
//!
//! Changes are ordered by [`Key`]: by epoch, then by writer, then as the writer made them. A host that opens the file or
//! syncs it takes an epoch that is larger than all that it can see, so what it writes from then on is newer than what
//! others had published before: MPI-IO's sync, barrier, sync. Changes that did not know of each other have an order too,
//! and it is the same for every reader and for the flat file.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::frame::{Change, Frame, Written};
use crate::run::{Piece, Run};

/// When a change was made, among those of all hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// As in the frame.
    pub epoch: u64,
    /// Who made it.
    pub writer: WriterId,
    /// Where the frame begins in the writer's index.
    pub frame: u64,
}

/// A host in one of its lives: from one attachment to the backing to its end. All hosts know it by the same number, and
/// a later life of a host comes after its earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WriterId {
    /// From the host's name.
    pub host: u64,
    /// Number of the life, from 1.
    pub life: u64,
}

/// Where bytes of a file are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// In a log.
    Log {
        /// Which of the writer's logs.
        log: u32,
        /// Where in it.
        position: u64,
        /// The change that wrote them, and so the writer.
        key: Key,
    },
    /// Nowhere: a host made them zero.
    Zeros,
    /// In the plain file, at the same offset.
    Plain,
    /// Nowhere: they are zero.
    Hole,
}

/// A range of a file, and where its bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where in the file.
    pub file: Range<u64>,
    /// Where its first byte is; the others follow.
    pub source: Source,
}

/// Everything that hosts said of one file.
#[derive(Clone, Debug, Default)]
pub struct Resolver {
    /// Bytes of the plain file that count where no host wrote.
    base_bytes: u64,
    /// Sorted by key.
    cuts: Vec<(Key, u64)>,
    changes: BTreeMap<Key, Painting>,
    /// Length of the file.
    len: u64,
}

/// A change of bytes.
#[derive(Clone, Debug)]
struct Painting {
    /// From its first byte to its last, in the file.
    span: Range<u64>,
    /// None if it is zeros.
    written: Option<Arc<Written>>,
}

impl Resolver {
    /// For a file whose plain file has so many bytes that count.
    pub fn new(base_bytes: u64) -> Self {
        Self {
            base_bytes,
            len: base_bytes,
            ..Self::default()
        }
    }

    /// The plain file has so many bytes now that count.
    pub fn set_base(&mut self, bytes: u64) {
        self.base_bytes = bytes;
        self.len = self.find_len();
    }

    /// The last that it was told of the plain file's length.
    pub fn base_bytes(&self) -> u64 {
        self.base_bytes
    }

    /// Takes a change, whose frame begins at `offset` in the writer's index; in whatever order they come.
    pub fn add(&mut self, writer: WriterId, offset: u64, frame: Frame) {
        let key = Key {
            epoch: frame.epoch,
            writer,
            frame: offset,
        };
        let painting = match frame.change {
            Change::Cut(len) => {
                let at = self.cuts.partition_point(|(other, _)| *other < key);
                self.cuts.insert(at, (key, len));
                self.len = self.find_len();
                return;
            }
            Change::Zeroed(Piece { offset, len }) => Painting {
                span: offset..offset + len,
                written: None,
            },
            Change::Written(written) => {
                let spans = || written.runs.iter().map(Run::span);
                let start = spans().map(|span| span.start).min();
                let end = spans().map(|span| span.end).max();
                Painting {
                    span: start.unwrap_or(0)..end.unwrap_or(0),
                    written: Some(Arc::new(written)),
                }
            }
        };
        if self.makes_longer(key, &painting) {
            self.len = self.len.max(painting.span.end);
        }
        self.changes.insert(key, painting);
    }

    /// What a change wrote, if it wrote anything.
    pub fn written(&self, key: Key) -> Option<Arc<Written>> {
        self.changes.get(&key)?.written.clone()
    }

    /// Bytes of the file.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The largest epoch of a change.
    pub fn last_epoch(&self) -> Option<u64> {
        let cuts = self.cuts.iter().map(|(key, _)| key.epoch);
        let changes = self.changes.keys().map(|key| key.epoch);
        cuts.chain(changes).max()
    }

    fn find_len(&self) -> u64 {
        let changes = self.changes.iter();
        let longer = changes.filter(|(key, painting)| self.makes_longer(**key, painting));
        let end = longer.map(|(_, painting)| painting.span.end).max();
        let len = self.cuts.last().map_or(self.base_bytes, |(_, len)| *len);
        len.max(end.unwrap_or(0))
    }

    /// Whether the file is at least as long as the change reaches: zeros make no file longer, and later cuts count.
    fn makes_longer(&self, key: Key, painting: &Painting) -> bool {
        painting.written.is_some() && self.cuts.last().is_none_or(|(cut, _)| key > *cut)
    }

    /// Where what was there when `key` was made ends by now: later cuts took the rest.
    fn limit_after(&self, key: Option<Key>) -> u64 {
        let first = key.map_or(0, |key| {
            self.cuts.partition_point(|(other, _)| *other < key)
        });
        let later = self.cuts[first..].iter().map(|(_, len)| *len);
        later.min().unwrap_or(u64::MAX)
    }

    /// Bytes of the plain file that count: those that no host has cut.
    pub fn base_end(&self) -> u64 {
        self.base_bytes.min(self.limit_after(None))
    }

    /// Where the bytes of `range` are, in order and without gaps, up to the end of the file.
    pub fn find(&self, range: Range<u64>) -> Vec<Segment> {
        let range = range.start..range.end.min(self.len);
        if range.is_empty() {
            return Vec::new();
        }
        let mut painted = Painted::default();
        // The newest first: what is taken stays taken.
        for (key, painting) in self.changes.iter().rev() {
            self.paint(*key, painting, &range, &mut painted);
        }
        let base_end = self.base_end();
        let plain = range.start..range.end.min(base_end);
        if !plain.is_empty() {
            painted.paint(Segment {
                file: plain,
                source: Source::Plain,
            });
        }
        painted.paint(Segment {
            file: range,
            source: Source::Hole,
        });
        painted.into_segments()
    }

    /// Paints what a change wrote in `range` and was not cut since.
    fn paint(&self, key: Key, painting: &Painting, range: &Range<u64>, painted: &mut Painted) {
        let Painting { span, written } = painting;
        let end = range.end.min(self.limit_after(Some(key)));
        if end <= range.start || span.start >= end || span.end <= range.start {
            return;
        }
        let Some(written) = written else {
            let file = span.start.max(range.start)..span.end.min(end);
            let source = Source::Zeros;
            return painted.paint(Segment { file, source });
        };
        let mut position = written.position;
        for run in &written.runs {
            for part in run.parts_in(range.start..end) {
                let source = Source::Log {
                    log: written.log,
                    position: position + part.at,
                    key,
                };
                let file = part.file;
                painted.paint(Segment { file, source });
            }
            position += run.bytes();
        }
    }
}

/// Segments that do not overlap.
#[derive(Default)]
struct Painted(BTreeMap<u64, Segment>);

impl Painted {
    /// Takes of `segment` what is not taken yet.
    fn paint(&mut self, segment: Segment) {
        let Range { start, end } = segment.file;
        let before = self.0.range(..start).next_back();
        let mut from = before.map_or(start, |(_, taken)| taken.file.end.max(start));
        let mut free = Vec::new();
        for (&taken_start, taken) in self.0.range(start..end) {
            if from < taken_start {
                free.push(from..taken_start);
            }
            from = from.max(taken.file.end);
        }
        if from < end {
            free.push(from..end);
        }
        for file in free {
            let source = segment.source.advance(file.start - start);
            self.0.insert(file.start, Segment { file, source });
        }
    }

    /// In order; neighbours that go on in the same place are one.
    fn into_segments(self) -> Vec<Segment> {
        let mut segments: Vec<Segment> = Vec::new();
        for segment in self.0.into_values() {
            match segments.last_mut() {
                Some(last) if last.goes_on_with(&segment) => last.file.end = segment.file.end,
                _ => segments.push(segment),
            }
        }
        segments
    }
}

impl Segment {
    fn goes_on_with(&self, next: &Self) -> bool {
        self.file.end == next.file.start
            && self.source.advance(self.file.end - self.file.start) == next.source
    }
}

impl Source {
    /// Where the byte is that comes so many bytes later.
    fn advance(self, bytes: u64) -> Self {
        match self {
            Self::Log { log, position, key } => Self::Log {
                log,
                position: position + bytes,
                key,
            },
            other => other,
        }
    }
}
