//! Map of one file: which ranges of the file lie where in the arena (the shared memory that holds written data).
//!
//! A *piece* is one recorded append of bytes to the arena; later appends have higher *sequences*. An *extent* is a
//! range of the file and the piece with its newest bytes.
//!
//! Invariants
//! * Extents never overlap; a newer write cuts the older one.
//! * Every extent lies within one piece.
//! * Lookup is O(log n).

use std::ops::Range;

use firn_arena::PieceRef;

use super::small_map::SmallMap;

/// A run of bytes of a file that lies in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Length in bytes.
    pub len: u64,
    /// The piece that has the bytes.
    pub piece: PieceRef,
    /// Position in the chunk, in bytes from its start.
    pub position: u32,
    /// Sequence of the piece.
    pub sequence: u64,
}

/// Extents of a file, by file offset.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extents {
    by_offset: SmallMap<u64, Extent>,
}

impl Extents {
    pub(crate) const NONE: Self = Self {
        by_offset: SmallMap::Few(None),
    };

    pub(crate) fn is_empty(&self) -> bool {
        self.by_offset.is_empty()
    }

    /// Asserts that no extent is empty and none overlaps the one before.
    pub(crate) fn assert_invariants(&self) {
        let mut end = 0;
        for (offset, extent) in self.iter() {
            assert!(extent.len > 0, "an empty extent at {offset}");
            assert!(
                offset >= end,
                "an extent at {offset} overlaps one that ends at {end}"
            );
            end = offset + extent.len;
        }
    }

    /// Returns the offset after the last extent, or 0 if there is none.
    pub(crate) fn end(&self) -> u64 {
        self.by_offset
            .last()
            .map_or(0, |(offset, extent)| offset + extent.len)
    }

    /// Returns extents in order, from the one that contains or follows `offset`.
    pub(crate) fn from(&self, offset: u64) -> impl Iterator<Item = (u64, Extent)> + '_ {
        let start = match self.by_offset.at_or_before(&offset) {
            Some((start, extent)) if *start + extent.len > offset => *start,
            _ => offset,
        };
        self.by_offset
            .from(start)
            .map(|(offset, extent)| (*offset, *extent))
    }

    /// Returns extents that overlap `range`, cut to it.
    pub(crate) fn within(&self, range: Range<u64>) -> impl Iterator<Item = (u64, Extent)> + '_ {
        self.from(range.start)
            .take_while(move |(offset, _)| *offset < range.end)
            .map(move |(offset, extent)| clip(offset, extent, &range))
    }

    /// Returns the extent that contains all of `range`, cut to it.
    pub(crate) fn covering(&self, range: Range<u64>) -> Option<Extent> {
        let (offset, extent) = self.within(range.clone()).next()?;
        (offset == range.start && extent.len == range.end - range.start).then_some(extent)
    }

    /// Inserts an extent (a file range, and the place of its newest bytes) over existing ones. Calls `on_replaced` with
    /// the piece (the recorded append) and the number of bytes of each part that the new extent replaces.
    pub(crate) fn insert(
        &mut self,
        offset: u64,
        extent: Extent,
        on_replaced: &mut dyn FnMut(PieceRef, u64),
    ) {
        self.remove(offset..offset + extent.len, &mut |_, replaced| {
            on_replaced(replaced.piece, replaced.len);
            true
        });
        // An extent that continues the previous one, in the file and in the piece, is joined with it.
        if let Some((previous_offset, previous)) = self.by_offset.before_mut(&offset)
            && *previous_offset + previous.len == offset
            && previous.piece == extent.piece
            && u64::from(previous.position) + previous.len == u64::from(extent.position)
        {
            previous.len += extent.len;
            return;
        }
        self.by_offset.insert(offset, extent);
    }

    /// Removes those parts of the extents in `range` that `should_remove` accepts. It is called with each extent, cut
    /// to `range`, and with the offset of this part. A part of an extent outside of `range` remains.
    pub(crate) fn remove(
        &mut self,
        range: Range<u64>,
        should_remove: &mut dyn FnMut(u64, &Extent) -> bool,
    ) {
        let overlapping: Vec<(u64, Extent)> = self
            .from(range.start)
            .take_while(|(offset, _)| *offset < range.end)
            .collect();
        for (offset, extent) in overlapping {
            let (removed_offset, removed) = clip(offset, extent, &range);
            if !should_remove(removed_offset, &removed) {
                continue;
            }
            self.by_offset.remove(&offset);
            if offset < removed_offset {
                let head = Extent {
                    len: removed_offset - offset,
                    ..extent
                };
                self.by_offset.insert(offset, head);
            }
            let end = offset + extent.len;
            let removed_end = removed_offset + removed.len;
            if removed_end < end {
                let tail = Extent {
                    len: end - removed_end,
                    position: extent.position + (removed_end - offset) as u32,
                    ..extent
                };
                self.by_offset.insert(removed_end, tail);
            }
        }
    }

    /// Returns all extents in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, Extent)> + '_ {
        self.by_offset
            .iter()
            .map(|(offset, extent)| (*offset, *extent))
    }
}

/// Cuts the extent at `offset` to a range of the file. Returns the new offset of the extent, and the shortened extent.
fn clip(offset: u64, extent: Extent, range: &Range<u64>) -> (u64, Extent) {
    let clipped_start = offset.max(range.start);
    let clipped_end = (offset + extent.len).min(range.end);
    let clipped = Extent {
        len: clipped_end - clipped_start,
        position: extent.position + (clipped_start - offset) as u32,
        ..extent
    };
    (clipped_start, clipped)
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_arena::SlabRef;
    use proptest::prelude::*;

    fn piece(n: u32) -> PieceRef {
        PieceRef {
            slab: SlabRef { chunk: 0, slab: 0 },
            record: n,
        }
    }

    proptest! {
        /// A plain array of "which piece, which byte of it" is the reference.
        #[test]
        fn the_map_agrees_with_an_array_of_bytes(
            ops in proptest::collection::vec((0u64..200, 1u64..60, any::<bool>()), 1..60)
        ) {
            let mut extents = Extents::default();
            let mut model: Vec<Option<(u32, u64)>> = vec![None; 300];
            for (n, (offset, len, remove)) in ops.into_iter().enumerate() {
                let range = offset as usize..(offset + len) as usize;
                let expected = model[range.clone()].iter().flatten().count() as u64;
                let mut cut = 0;
                if remove {
                    extents.remove(offset..offset + len, &mut |_, e| { cut += e.len; true });
                    model[range].fill(None);
                } else {
                    let position = n as u32 * 1000;
                    let e = Extent { len, piece: piece(n as u32), position, sequence: n as u64 };
                    extents.insert(offset, e, &mut |_, bytes| cut += bytes);
                    for (i, byte) in model[range].iter_mut().enumerate() {
                        *byte = Some((n as u32, u64::from(position) + i as u64));
                    }
                }
                prop_assert_eq!(cut, expected);
                let mut seen: Vec<Option<(u32, u64)>> = vec![None; 300];
                for (offset, e) in extents.iter() {
                    for i in 0..e.len {
                        let at = &mut seen[(offset + i) as usize];
                        prop_assert!(at.is_none(), "overlap at {}", offset + i);
                        *at = Some((e.piece.record, u64::from(e.position) + i));
                    }
                }
                prop_assert_eq!(&seen, &model);
                let end = model.iter().rposition(Option::is_some).map_or(0, |at| at as u64 + 1);
                prop_assert_eq!(extents.end(), end);
            }
        }
    }
}
