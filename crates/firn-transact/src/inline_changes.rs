//! The bytes of a file that a transaction overwrote, where they are few enough to be kept in memory.
//!
//! Invariant: pieces neither overlap nor touch, and none ends behind the size of the file.

use std::collections::BTreeMap;
use std::io::IoSlice;

use firn_backing::Time;

/// What was overwritten of a file, and when.
#[derive(Clone)]
pub(crate) struct InlineChanges {
    /// Pieces by offset; they neither overlap nor touch.
    pieces: BTreeMap<u64, Vec<u8>>,
    /// The file's, which stays.
    size: u64,
    pub(crate) mtime: Time,
    pub(crate) ctime: Time,
}

impl InlineChanges {
    pub(crate) fn new(size: u64) -> Self {
        let now = Time::now();
        Self {
            pieces: BTreeMap::new(),
            size,
            mtime: now,
            ctime: now,
        }
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    pub(crate) fn len(&self) -> u64 {
        self.pieces.values().map(|piece| piece.len() as u64).sum()
    }

    /// Offsets and bytes, in order.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.pieces.iter().map(|(&at, piece)| (at, &piece[..]))
    }

    pub(crate) fn write(&mut self, at: u64, data: &[IoSlice<'_>]) {
        let mut bytes: Vec<u8> = data.iter().flat_map(|part| part.iter().copied()).collect();
        let mut start = at;
        let end = at + bytes.len() as u64;
        // Those that overlap or touch become one with it.
        while let Some((&from, piece)) = self.pieces.range(..=end).next_back()
            && from + piece.len() as u64 >= start
        {
            let piece = self.pieces.remove(&from).expect("just found");
            let until = from + piece.len() as u64;
            if until > start + bytes.len() as u64 {
                bytes.extend_from_slice(&piece[(start + bytes.len() as u64 - from) as usize..]);
            }
            if from < start {
                bytes.splice(..0, piece[..(start - from) as usize].iter().copied());
                start = from;
            }
        }
        self.pieces.insert(start, bytes);
        self.mtime = Time::now();
        self.ctime = self.mtime;
    }

    /// The bytes that were overwritten from `at` on, or the offset up to which none were.
    pub(crate) fn stretch(&self, at: u64) -> Result<&[u8], u64> {
        if let Some((from, piece)) = self.pieces.range(..=at).next_back()
            && at < from + piece.len() as u64
        {
            return Ok(&piece[(at - from) as usize..]);
        }
        Err(self
            .pieces
            .range(at..)
            .next()
            .map_or(u64::MAX, |(&from, _)| from))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Pieces are what a file of bytes would be, and never touch.
        #[test]
        fn pieces_are_the_last_bytes_written(writes in prop::collection::vec((0_u64..40, 1_usize..9), 1..20)) {
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
            for (at, piece) in inline.pieces() {
                prop_assert!(last.is_none_or(|end| end < at), "pieces touch at {at}");
                last = Some(at + piece.len() as u64);
                for (place, byte) in shown[at as usize..].iter_mut().zip(piece) {
                    *place = Some(*byte);
                }
            }
            prop_assert_eq!(&shown, &plain);
            for at in 0..64 {
                let expected = plain[at..].iter().take_while(|byte| byte.is_some()).count();
                match inline.stretch(at as u64) {
                    Ok(bytes) => prop_assert_eq!(bytes.len(), expected),
                    Err(until) => {
                        prop_assert_eq!(expected, 0);
                        let next = plain[at..].iter().position(Option::is_some).map_or(u64::MAX, |n| (at + n) as u64);
                        prop_assert_eq!(until, next);
                    }
                }
            }
        }
    }
}
