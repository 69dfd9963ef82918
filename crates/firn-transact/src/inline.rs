//! Changes of a few bytes of files that were there: a few overwritten bytes need no staged copy.
//!
//! They are kept in memory until the record of the transaction takes them: one that is not prepared does not
//! outlive firnd anyway. A file gets a staged copy after all, which takes them over, as soon as more of it is written than
//! this is for, or anything changes but bytes below its end and the time of that.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Access, Backing, Kind, Result, SetTime, Time};

use crate::object::{Inner, Object, StagedCopy};
use crate::scope::Scope;
use crate::staging;
use crate::transactional::TransactionalBacking;

/// Bytes that one file may have here.
const FILE_BYTES: u64 = 16 << 10;
/// Bytes of all files of a transaction.
const SCOPE_BYTES: u64 = 16 << 20;

/// What was overwritten of a file, and when.
pub(crate) struct InlineChanges {
    /// By offset; they neither overlap nor touch.
    pieces: BTreeMap<u64, Vec<u8>>,
    /// The file's, which stays.
    size: u64,
    pub(crate) mtime: Time,
    pub(crate) ctime: Time,
}

impl InlineChanges {
    fn new(size: u64) -> Self {
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

    fn len(&self) -> u64 {
        self.pieces.values().map(|piece| piece.len() as u64).sum()
    }

    /// Offsets and bytes, in order.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.pieces.iter().map(|(&at, piece)| (at, &piece[..]))
    }

    fn write(&mut self, at: u64, data: &[IoSlice<'_>]) {
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
    pub(crate) fn stretch(&self, at: u64) -> std::result::Result<&[u8], u64> {
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

impl<B: Backing> Inner<B> {
    pub(crate) fn inline(&self) -> Option<&InlineChanges> {
        self.change.as_ref()?.inline.as_ref()
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Takes a write, if it is a change of a few bytes of a file that was there.
    pub(crate) fn write_inline(
        &self,
        scope: &Scope<B>,
        object: &Arc<Object<B>>,
        data: &[IoSlice<'_>],
        offset: u64,
    ) -> Result<Option<usize>> {
        let len = data.iter().map(|part| part.len()).sum::<usize>();
        let end = offset.saturating_add(len as u64);
        // What other hosts commit at the same time asks more of a record than bytes.
        if self.members.is_some() || len == 0 || len as u64 > FILE_BYTES {
            return Ok(None);
        }
        let mut inner = object.inner.write();
        let may_be_inline =
            object.kind == Kind::File && inner.staged_copy().is_none() && !object.is_nameless();
        let Some(base) = inner.base.clone().filter(|_| may_be_inline) else {
            return Ok(None);
        };
        let (size, before) = match inner.inline() {
            Some(inline) => (inline.size, inline.len()),
            None => (self.base.attr(&base)?.size, 0),
        };
        let of_all = scope.inline_bytes.load(Ordering::Acquire);
        if end > size || before + len as u64 > FILE_BYTES || of_all + len as u64 > SCOPE_BYTES {
            return Ok(None);
        }
        let inline = scope
            .change(object, &mut inner)
            .inline
            .get_or_insert_with(|| InlineChanges::new(size));
        inline.write(offset, data);
        scope
            .inline_bytes
            .fetch_add(inline.len() - before, Ordering::AcqRel);
        drop(inner);
        self.check_changed(scope, object);
        Ok(Some(len))
    }

    /// Sets the time of the last change, of a file that has inline changes and no others.
    pub(crate) fn set_inline_time(&self, object: &Arc<Object<B>>, mtime: SetTime) -> Result<bool> {
        let (_data, scope) = self.writing(object)?;
        let mut inner = object.inner.write();
        let Some(inline) = inner
            .change
            .as_mut()
            .and_then(|change| change.inline.as_mut())
        else {
            return Ok(false);
        };
        debug_assert!(scope.is_some(), "changes are of a transaction");
        match mtime {
            SetTime::Keep => {}
            SetTime::Now => inline.mtime = Time::now(),
            SetTime::At(time) => inline.mtime = time,
        }
        inline.ctime = Time::now();
        Ok(true)
    }

    /// Copies inline changes to the staged copy that the file got.
    pub(crate) fn write_out_inline(
        &self,
        inline: &InlineChanges,
        copy: &StagedCopy<B>,
    ) -> Result<()> {
        let inode = copy.inode(&self.base)?;
        let file = self.base.open(&inode, Access::ReadWrite)?;
        for (at, piece) in inline.pieces() {
            staging::write_all(&self.base, &file, piece, at)?;
        }
        self.base
            .set_times(&inode, SetTime::Keep, SetTime::At(inline.mtime))
    }

    /// They are in the staged copy now, and count there.
    pub(crate) fn forget_inline(scope: &Scope<B>, inline: &InlineChanges) {
        scope.inline_bytes.fetch_sub(inline.len(), Ordering::AcqRel);
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
                let (one, two) = (vec![round as u8; len / 2], vec![round as u8 | 128; len - len / 2]);
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
