//! [`InlineChanges`]: the bytes of a file that a transaction overwrote, if they are few enough to be kept in memory.
//!
//! An *overwrite* is a contiguous run of new bytes with its offset in the file.
//!
//! Invariants
//! * Overwrites neither overlap nor touch.
//! * An overwrite ends at or before the size of the file, so the size never changes.

use std::collections::BTreeMap;
use std::io::IoSlice;

use firn_backing::Time;

/// The overwrites of a file, and the times of the last one.
#[derive(Clone)]
pub(crate) struct InlineChanges {
    /// New bytes by their offset in the file.
    overwrites: BTreeMap<u64, Vec<u8>>,
    /// Size of the file, in bytes.
    size: u64,
    pub(crate) mtime: Time,
    pub(crate) ctime: Time,
}

/// A contiguous part of a file with inline changes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum InlinePart<'a> {
    /// The new bytes of the part.
    Overwritten(&'a [u8]),
    /// The bytes of the part are those of the backing.
    Unchanged {
        /// Offset behind the last byte; `u64::MAX` behind the last overwrite.
        end: u64,
    },
}

impl InlineChanges {
    /// Makes the changes of a file of `size` bytes that is not overwritten yet.
    pub(crate) fn new(size: u64) -> Self {
        let now = Time::now();
        Self {
            overwrites: BTreeMap::new(),
            size,
            mtime: now,
            ctime: now,
        }
    }

    /// Returns the size of the file in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Returns the number of overwritten bytes.
    pub(crate) fn len(&self) -> u64 {
        self.overwrites
            .values()
            .map(|bytes| bytes.len() as u64)
            .sum()
    }

    /// Returns offset and bytes of each overwrite, in order.
    pub(crate) fn overwrites(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.overwrites
            .iter()
            .map(|(&offset, bytes)| (offset, &bytes[..]))
    }

    /// Stores new bytes of the file from `offset` on, merged with those that are stored already. The caller makes sure
    /// that the file does not grow.
    pub(crate) fn write(&mut self, offset: u64, data: &[IoSlice<'_>]) {
        let mut merged_bytes: Vec<u8> = data
            .iter()
            .flat_map(|slice| slice.iter().copied())
            .collect();
        let mut merged_start = offset;
        let end = offset + merged_bytes.len() as u64;
        // Earlier overwrites that overlap or touch the new one are merged with it. Where they overlap, the new bytes
        // count.
        while let Some((&old_start, old_bytes)) = self.overwrites.range(..=end).next_back()
            && old_start + old_bytes.len() as u64 >= merged_start
        {
            let old_bytes = self
                .overwrites
                .remove(&old_start)
                .expect("the overwrite was just found");
            let merged_end = merged_start + merged_bytes.len() as u64;
            let old_end = old_start + old_bytes.len() as u64;
            if old_end > merged_end {
                let old_tail = &old_bytes[(merged_end - old_start) as usize..];
                merged_bytes.extend_from_slice(old_tail);
            }
            if old_start < merged_start {
                let old_head = &old_bytes[..(merged_start - old_start) as usize];
                merged_bytes.splice(..0, old_head.iter().copied());
                merged_start = old_start;
            }
        }
        self.overwrites.insert(merged_start, merged_bytes);
        self.mtime = Time::now();
        self.ctime = self.mtime;
    }

    /// Returns the contiguous part of the file that begins at `offset`: new bytes, or bytes that were not overwritten.
    pub(crate) fn part_at(&self, offset: u64) -> InlinePart<'_> {
        if let Some((start, bytes)) = self.overwrites.range(..=offset).next_back()
            && offset < start + bytes.len() as u64
        {
            return InlinePart::Overwritten(&bytes[(offset - start) as usize..]);
        }
        let next_overwrite = self.overwrites.range(offset..).next();
        InlinePart::Unchanged {
            end: next_overwrite.map_or(u64::MAX, |(&start, _)| start),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Overwrites have the bytes that a plain file would have, and never touch.
        #[test]
        fn overwrites_have_the_last_bytes_written(writes in prop::collection::vec((0_u64..40, 1_usize..9), 1..20)) {
            let mut inline = InlineChanges::new(64);
            let mut plain = vec![None; 64];
            for (round, &(at, len)) in writes.iter().enumerate() {
                let one = vec![round as u8; len / 2];
                let two = vec![round as u8 | 128; len - len / 2];
                inline.write(at, &[IoSlice::new(&one), IoSlice::new(&two)]);
                for (byte, place) in one.iter().chain(&two).zip(&mut plain[at as usize..]) {
                    *place = Some(*byte);
                }
            }
            let mut shown = vec![None; 64];
            let mut last = None;
            for (at, piece) in inline.overwrites() {
                prop_assert!(last.is_none_or(|end| end < at), "overwrites touch at {at}");
                last = Some(at + piece.len() as u64);
                for (place, byte) in shown[at as usize..].iter_mut().zip(piece) {
                    *place = Some(*byte);
                }
            }
            prop_assert_eq!(&shown, &plain);
            for at in 0..64 {
                let expected = plain[at..].iter().take_while(|byte| byte.is_some()).count();
                match inline.part_at(at as u64) {
                    InlinePart::Overwritten(bytes) => prop_assert_eq!(bytes.len(), expected),
                    InlinePart::Unchanged { end } => {
                        prop_assert_eq!(expected, 0);
                        let next = plain[at..].iter().position(Option::is_some).map_or(u64::MAX, |n| (at + n) as u64);
                        prop_assert_eq!(end, next);
                    }
                }
            }
        }
    }
}
