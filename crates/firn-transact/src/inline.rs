//! Inline changes: the few bytes that a transaction overwrote in a file, kept in memory until the commit.
//!
//! Larger changes are in a *staged copy*, a file in the transaction's own directory with the new bytes.
//! * A prepare or commit copies the inline changes to the transaction's durable log. Memory is enough until then: a
//!   transaction that keeps its changes back and is not prepared ends with firnd (the process that serves the mount).
//! * Inline changes move to a staged copy when a write exceeds the limits below. They also move when anything changes
//!   other than bytes below the file's end or the modification time.

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
const FILE_BYTES_MAX: u64 = 16 << 10;
/// Maximum bytes of inline changes of all files of a transaction.
const SCOPE_BYTES_MAX: u64 = 16 << 20;

impl<B: Backing> Objects<B> {
    /// Stores a write of a transaction as an inline change, which is in memory until the commit. Returns the number of
    /// bytes.
    ///
    /// Returns `None`, without a change, if the write needs a staged copy, a file in the transaction's directory: the
    /// file is new, staged or nameless, or the write is too large or extends the file.
    pub(crate) fn write_inline(
        &self,
        scope: &Scope<B>,
        object: &Arc<Object<B>>,
        data: &[IoSlice<'_>],
        offset: u64,
    ) -> Result<Option<usize>> {
        let count: usize = data.iter().map(|slice| slice.len()).sum();
        let new_bytes = count as u64;
        let end = offset.saturating_add(new_bytes);
        // With several hosts, the record needs the file's size and time before the change, which only a staged copy
        // has.
        if self.lower.members.is_some() || count == 0 || new_bytes > FILE_BYTES_MAX {
            return Ok(None);
        }
        let claimed = object.state.acquire_exclusive();
        if object.kind != Kind::File || claimed.staged_copy().is_some() || object.is_nameless() {
            return Ok(None);
        }
        let Some(inode) = claimed.base() else {
            return Ok(None);
        };
        // The size of the file, and the number of its bytes that are inline already.
        let known = claimed
            .read()
            .inline()
            .map(|inline| (inline.size(), inline.len()));
        let (size, inline_in_file) = match known {
            Some(size_and_inline) => size_and_inline,
            None => (self.lower.base.attr(&inode)?.size, 0),
        };
        let inline_in_scope = scope.inline_bytes.load(Ordering::Acquire);
        let exceeds_limits = inline_in_file + new_bytes > FILE_BYTES_MAX
            || inline_in_scope + new_bytes > SCOPE_BYTES_MAX;
        if end > size || exceeds_limits {
            return Ok(None);
        }
        {
            let mut state = claimed.edit();
            let change = scope.get_or_create_change(object, &mut state);
            let inline = change
                .inline
                .get_or_insert_with(|| InlineChanges::new(size));
            inline.write(offset, data);
            // Bytes that were overwritten before do not count again.
            let added_bytes = inline.len() - inline_in_file;
            scope.inline_bytes.fetch_add(added_bytes, Ordering::AcqRel);
        }
        // The check acquires the object's state itself.
        drop(claimed);
        scope.check_changed(object);
        Ok(Some(count))
    }

    /// Sets the modification time of a file with inline changes, which are a transaction's few new bytes in memory.
    /// Returns false, without a change, if the file has none; the caller then sets the time of the file in the backing
    /// or of its staged copy.
    pub(crate) fn set_inline_time(&self, object: &Arc<Object<B>>, mtime: SetTime) -> Result<bool> {
        let (_data, scope) = self.admission.enter_data_change(object)?;
        let claimed = object.state.acquire_exclusive();
        let mut state = claimed.edit();
        let change = state.change.as_mut();
        let Some(inline) = change.and_then(|change| change.inline.as_mut()) else {
            return Ok(false);
        };
        // Only a transaction in buffer mode makes inline changes.
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
        staged_copy: &StagedCopy<B>,
    ) -> Result<()> {
        let inode = staged_copy.inode(&self.lower.base)?;
        let file = self.lower.base.open(&inode, Access::ReadWrite)?;
        for (offset, bytes) in inline.overwrites() {
            staging::write_all(&self.lower.base, &file, bytes, offset)?;
        }
        self.lower
            .base
            .set_times(&inode, SetTime::Keep, SetTime::At(inline.mtime))
    }

    /// Subtracts the bytes of inline changes from the transaction's total, after they were copied to a staged copy.
    pub(crate) fn subtract_inline_bytes(scope: &Scope<B>, inline: &InlineChanges) {
        scope.inline_bytes.fetch_sub(inline.len(), Ordering::AcqRel);
    }
}
