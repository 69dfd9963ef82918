//! Inline changes: a few overwritten bytes of a file of the backing, kept in memory without a staged copy.
//!
//! A prepare or commit copies the inline changes to the transaction's record. Memory is enough until then, because an
//! unprepared transaction in buffer mode ends with firnd anyway. Inline changes move to a staged copy when a write
//! exceeds the limits below. They also move when anything changes other than bytes below the file's end or the
//! modification time.

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Access, Backing, Kind, Result, SetTime, Time};

use crate::attributes::Objects;
use crate::inline_changes::InlineChanges;
use crate::object::{Object, StagedCopy};
use crate::scope::Scope;
use crate::staging;

/// Maximum bytes of inline changes of one file.
const FILE_BYTES: u64 = 16 << 10;
/// Maximum bytes of inline changes of all files of a transaction.
const SCOPE_BYTES: u64 = 16 << 20;

impl<B: Backing> Objects<B> {
    /// Stores a write as an inline change, and returns the number of bytes. Returns `None`, without a change, if the
    /// write needs a staged copy: the file is new, staged or nameless, or the write is too large or extends the file.
    pub(crate) fn write_inline(
        &self,
        scope: &Scope<B>,
        object: &Arc<Object<B>>,
        data: &[IoSlice<'_>],
        offset: u64,
    ) -> Result<Option<usize>> {
        let len = data.iter().map(|part| part.len()).sum::<usize>();
        let end = offset.saturating_add(len as u64);
        // With several hosts, the record needs the file's size and time before the change, which only a staged copy
        // has.
        if self.lower.members.is_some() || len == 0 || len as u64 > FILE_BYTES {
            return Ok(None);
        }
        let owned = object.inner.own();
        let may_be_inline =
            object.kind == Kind::File && owned.staged_copy().is_none() && !object.is_nameless();
        let Some(base) = owned.base().filter(|_| may_be_inline) else {
            return Ok(None);
        };
        let size_and_bytes = |inline: &InlineChanges| (inline.size(), inline.len());
        let known = owned.read().inline().map(size_and_bytes);
        let (size, before) = match known {
            Some(known) => known,
            None => (self.lower.base.attr(&base)?.size, 0),
        };
        let of_all = scope.inline_bytes.load(Ordering::Acquire);
        if end > size || before + len as u64 > FILE_BYTES || of_all + len as u64 > SCOPE_BYTES {
            return Ok(None);
        }
        {
            let mut inner = owned.edit();
            let change = scope.change(object, &mut inner);
            let inline = change
                .inline
                .get_or_insert_with(|| InlineChanges::new(size));
            inline.write(offset, data);
            let more = inline.len() - before;
            scope.inline_bytes.fetch_add(more, Ordering::AcqRel);
        }
        drop(owned);
        scope.check_changed(object);
        Ok(Some(len))
    }

    /// Sets the modification time of a file with inline changes. Returns false, without a change, if the file has none.
    pub(crate) fn set_inline_time(&self, object: &Arc<Object<B>>, mtime: SetTime) -> Result<bool> {
        let (_data, scope) = self.admission.enter_data_change(object)?;
        let owned = object.inner.own();
        let mut inner = owned.edit();
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

    /// Copies the inline changes of a file to its new staged copy.
    pub(crate) fn write_out_inline(
        &self,
        inline: &InlineChanges,
        copy: &StagedCopy<B>,
    ) -> Result<()> {
        let inode = copy.inode(&self.lower.base)?;
        let file = self.lower.base.open(&inode, Access::ReadWrite)?;
        for (at, piece) in inline.overwrites() {
            staging::write_all(&self.lower.base, &file, piece, at)?;
        }
        self.lower
            .base
            .set_times(&inode, SetTime::Keep, SetTime::At(inline.mtime))
    }

    /// Subtracts the bytes of inline changes from the transaction's total, after they were copied to a staged copy.
    pub(crate) fn forget_inline(scope: &Scope<B>, inline: &InlineChanges) {
        scope.inline_bytes.fetch_sub(inline.len(), Ordering::AcqRel);
    }
}
