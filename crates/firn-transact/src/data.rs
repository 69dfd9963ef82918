//! [`FileData`]: reads and writes of file data, with the changes of an open transaction.
//!
//! Terms
//! * The *lower file* of an object is its file in the backing, the directory below the mount. The *staged copy* is
//!   another file of the backing, in the directory of the transaction, with the bytes that the transaction wrote.
//! * An *inline change* is a small change in memory only ([`crate::inline_changes`]).
//! * The *cut* is the lowest size that the file had in the transaction: old bytes from the cut on are gone.
//!
//! In a transaction in buffer mode (changes are kept back until the commit) a file's bytes have up to three sources:
//! * a range that the transaction wrote comes from the staged copy, or from memory if the change is inline;
//! * other bytes below the cut come from the lower file;
//! * all other bytes are a hole.
//!
//! Outside of transactions, and in shadow mode (changes go to the backing at once), every call goes to the lower file.
//!
//! Lock order: first the admission of the change, then the object's read-write lock (`Object::state`, a claim). The
//! admission prevents transactions from beginning, being prepared or ending during the call.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{
    Access, Backing, DataPart, DescriptorUse, Errno, PageAdvice, Result, Seek, write_parts_singly,
};

use crate::attributes::Objects;
use crate::claim::ClaimedView;
use crate::inline_changes::{InlineChanges, InlinePart};
use crate::lower_backing::LowerBacking;
use crate::object::{LowerFile, Object, ObjectState};
use crate::scope::Scope;
use crate::shadow::NO_BYTES;
use crate::shadow::save::Originals;
use crate::staging;
use crate::waiting::Admission;

/// Size of one read and write when bytes are copied through memory.
const COPY_BLOCK_BYTES: usize = 1 << 20;

/// Contiguous staged bytes of a file after which their write to the device starts, so that the commit waits for less.
/// Data that is overwritten later is then written to the device twice.
const EARLY_WRITEOUT_BYTES: u64 = 16 << 20;

/// An open file. Each read and write checks whether the file is in a transaction.
pub struct TrackedFile<B: Backing> {
    pub(crate) object: Arc<Object<B>>,
    access: Access,
}

impl<B: Backing> TrackedFile<B> {
    pub(crate) fn new(object: &Arc<Object<B>>, access: Access) -> Self {
        object.count_open();
        Self {
            object: Arc::clone(object),
            access,
        }
    }

    /// Fails with EBADF if the file was opened for writing only.
    fn check_readable(&self) -> Result<()> {
        if self.access == Access::Write {
            Err(Errno::BADF)
        } else {
            Ok(())
        }
    }

    /// Fails with `errno` if the file was opened for reading only. The error depends on the system call.
    fn check_writable(&self, errno: Errno) -> Result<()> {
        if self.access == Access::Read {
            Err(errno)
        } else {
            Ok(())
        }
    }
}

impl<B: Backing> Drop for TrackedFile<B> {
    fn drop(&mut self) {
        self.object.count_close();
    }
}

/// A contiguous part of a file whose bytes all come from one source.
struct FilePart {
    /// Offset behind the last byte.
    end: u64,
    source: PartSource,
}

impl FilePart {
    /// The part up to `end` is in the file of the backing.
    fn in_backing(end: u64) -> Self {
        Self {
            end,
            source: PartSource::LowerFile(LowerFile::Reader),
        }
    }

    /// The part up to `end` is in the staged copy.
    fn in_staged_copy(end: u64) -> Self {
        Self {
            end,
            source: PartSource::LowerFile(LowerFile::StagedCopy),
        }
    }
}

/// Where the bytes of a part of a file come from.
enum PartSource {
    /// Nothing was written there; the bytes are zeros.
    Hole,
    /// The bytes are in the lower file or the staged copy, at the same offset.
    LowerFile(LowerFile),
    /// The bytes are in memory, in an inline change.
    Memory,
}

impl<B: Backing> ObjectState<B> {
    /// Returns the part of the file that begins at `offset` and has one source. `size` is the size of the file.
    fn resolve_at(&self, offset: u64, size: u64) -> FilePart {
        self.resolve_and_copy(offset, size, &mut [])
    }

    /// Returns where the bytes of a file from `offset` on are, and where this part of the file ends. `size` is the size
    /// that programs see. Bytes that are in memory are copied to `buf`, as far as they fit.
    ///
    /// A transaction that keeps its changes back has its new bytes in memory or in the staged copy, a file in its own
    /// directory. Old bytes are in the file of the backing, up to the *cut*: the lowest size that the file had in the
    /// transaction.
    fn resolve_and_copy(&self, offset: u64, size: u64, buf: &mut [u8]) -> FilePart {
        if let Some(inline) = self.inline() {
            return resolve_inline(inline, offset, size, buf);
        }
        let Some(change) = &self.change else {
            return FilePart::in_backing(size);
        };
        if change.staged_copy.is_none() {
            return FilePart::in_backing(size);
        }
        // A new object is not in the backing, so the staged copy has all of its bytes.
        if self.base.is_none() {
            return FilePart::in_staged_copy(size);
        }
        // The part ends where the next written range begins or the present one ends.
        let written = change.written.part_at(offset);
        let end = written.end.min(size);
        if written.is_inside {
            return FilePart::in_staged_copy(end);
        }
        if offset < change.cut {
            return FilePart::in_backing(end.min(change.cut));
        }
        FilePart {
            end,
            source: PartSource::Hole,
        }
    }

    /// Returns the file that has all bytes of the object: the lower file of an unchanged object, or the staged copy of
    /// a new one. Returns `None` if the bytes come from several sources.
    fn single_source(&self) -> Option<LowerFile> {
        match (&self.base, self.staged_copy()) {
            (Some(_), None) if self.inline().is_none() => Some(LowerFile::Reader),
            (None, Some(_)) => Some(LowerFile::StagedCopy),
            _ => None,
        }
    }
}

/// Reads and writes data of files, with the changes of transactions.
pub struct FileData<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) originals: Arc<Originals<B>>,
    pub(crate) admission: Arc<Admission<B>>,
    pub(crate) objects: Arc<Objects<B>>,
}

impl<B: Backing> FileData<B> {
    pub(crate) fn new(
        lower: &Arc<LowerBacking<B>>,
        originals: &Arc<Originals<B>>,
        admission: &Arc<Admission<B>>,
        objects: &Arc<Objects<B>>,
    ) -> Self {
        Self {
            lower: Arc::clone(lower),
            originals: Arc::clone(originals),
            admission: Arc::clone(admission),
            objects: Arc::clone(objects),
        }
    }

    /// Opens a file for a program. The file in the backing (the directory below the mount) is not kept open: the first
    /// read or write opens it again.
    ///
    /// Fails with ESTALE if the object was made in a transaction that was aborted.
    pub(crate) fn open_tracked(
        &self,
        object: &Arc<Object<B>>,
        access: Access,
    ) -> Result<TrackedFile<B>> {
        let state = object.state.acquire_shared();
        let single_source = state.read().single_source();
        let inode = match single_source {
            // A transaction made the file, so all of it is in the transaction's directory.
            Some(LowerFile::StagedCopy) => state.inode(&self.lower.base)?,
            // The old file is opened even if a transaction has some bytes elsewhere.
            _ => state.base().ok_or(Errno::STALE)?,
        };
        // The file is opened and closed at once, so that the program's open(2) gets the errors of the backing.
        drop(self.lower.base.open(&inode, access)?);
        drop(state);
        Ok(TrackedFile::new(object, access))
    }

    /// Returns the size of a file without its inline changes, which never change it.
    fn file_size(
        &self,
        object: &Object<B>,
        state: &ClaimedView<'_, ObjectState<B>>,
    ) -> Result<u64> {
        let is_staged = state.read().staged_copy().is_some();
        let which = if is_staged {
            LowerFile::StagedCopy
        } else {
            LowerFile::Reader
        };
        let lower_file = object.lower_file(&self.lower.base, state, which)?;
        Ok(self.lower.base.attr_of_file(&lower_file)?.size)
    }

    /// Reads from `offset` on, with the changes of the transaction. Returns the number of bytes, which is smaller at
    /// the end of the file. Fails with EBADF if the file is not open for reading.
    pub(crate) fn read_tracked(
        &self,
        file: &TrackedFile<B>,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<usize> {
        file.check_readable()?;
        let state = file.object.state.acquire_shared();
        let single_source = state.read().single_source();
        if let Some(which) = single_source {
            let lower_file = file.object.lower_file(&self.lower.base, &state, which)?;
            return self.lower.base.read_at(&lower_file, buf, offset);
        }
        self.read_from_all_sources(&file.object, &state, buf, offset)
    }

    /// Reads bytes of a file that a transaction has changed, part by part: from memory, from the staged copy (the
    /// written bytes, until the commit), from the file in the backing, or as zeros. Returns how many of the requested
    /// bytes lie below the end of the file.
    fn read_from_all_sources(
        &self,
        object: &Object<B>,
        state: &ClaimedView<'_, ObjectState<B>>,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<usize> {
        let size = self.file_size(object, state)?;
        let end = size.min(offset.saturating_add(buf.len() as u64));
        let mut position = offset;
        while position < end {
            let unread = &mut buf[(position - offset) as usize..(end - offset) as usize];
            let part = state.read().resolve_and_copy(position, size, unread);
            let part_end = part.end.min(end);
            let part_bytes = &mut unread[..(part_end - position) as usize];
            match part.source {
                PartSource::Memory => {}
                PartSource::Hole => part_bytes.fill(0),
                PartSource::LowerFile(which) => {
                    let lower_file = object.lower_file(&self.lower.base, state, which)?;
                    let count = self.lower.base.read_at(&lower_file, part_bytes, position)?;
                    // The lower file is shorter than the object. The bytes after its end are a hole.
                    part_bytes[count..].fill(0);
                }
            }
            position = part_end;
        }
        Ok(end.saturating_sub(offset) as usize)
    }

    /// Writes contiguous bytes, and counts them for the transaction.
    fn write_part(&self, file: &TrackedFile<B>, part: &DataPart<'_>) -> Result<usize> {
        file.check_writable(Errno::BADF)?;
        let object = &file.object;
        let (_data, scope) = self.admission.enter_data_change(object)?;
        let count = self.write_object(object, scope.clone(), part.data, part.offset)?;
        if let Some(scope) = scope {
            scope
                .written_bytes
                .fetch_add(count as u64, Ordering::Relaxed);
        }
        Ok(count)
    }

    /// Writes to a file, and returns the number of bytes written. `scope` is the transaction that covers the file.
    /// * Without a transaction, the bytes go to the file in the backing.
    /// * In shadow mode they do so too, after the old bytes were saved.
    /// * In buffer mode they go to memory or to the staged copy, a file in the transaction's directory.
    ///
    /// The caller ensures that no transaction begins, is prepared or ends during the call.
    fn write_object(
        &self,
        object: &Arc<Object<B>>,
        scope: Option<Arc<Scope<B>>>,
        data: &[IoSlice<'_>],
        offset: u64,
    ) -> Result<usize> {
        // In shadow mode this saves the old bytes from `offset` on, and returns `None`.
        let Some(scope) = self
            .originals
            .save_unless_buffering(scope, object, offset)?
        else {
            // Without a transaction, or in shadow mode.
            let state = object.state.acquire_shared();
            let lower_file = object.lower_file(&self.lower.base, &state, LowerFile::Writer)?;
            return self.lower.base.write_at(&lower_file, data, offset);
        };
        // In buffer mode.
        if let Some(count) = self.objects.write_inline(&scope, object, data, offset)? {
            return Ok(count);
        }
        self.ensure_staged_copy(&scope, object)?;
        let state = object.state.acquire_shared();
        let target = state.read().write_target();
        let staged_file = object.lower_file(&self.lower.base, &state, target)?;
        let count = self.lower.base.write_at(&staged_file, data, offset)?;
        // The call that adds the written range acquires the object's state exclusively.
        drop(state);
        self.start_early_writeout(&staged_file, offset, count as u64);
        self.add_written_range(object, offset, count as u64);
        scope.check_changed(object);
        Ok(count)
    }

    /// Starts the write to the device of each window of [`EARLY_WRITEOUT_BYTES`] whose end this write has passed.
    fn start_early_writeout(&self, staged_file: &B::File, offset: u64, count: u64) {
        let first_window = offset / EARLY_WRITEOUT_BYTES;
        let unfinished_window = (offset + count) / EARLY_WRITEOUT_BYTES;
        if first_window == unfinished_window {
            return;
        }
        let finished_windows =
            first_window * EARLY_WRITEOUT_BYTES..unfinished_window * EARLY_WRITEOUT_BYTES;
        self.lower
            .base
            .advise(staged_file, finished_windows, PageAdvice::WriteOut);
    }

    /// Writes several parts of a file. Uses one call of the backing unless a transaction keeps the file's changes back
    /// until its commit. Returns the number of bytes written.
    pub(crate) fn write_tracked(
        &self,
        file: &TrackedFile<B>,
        parts: &[DataPart<'_>],
    ) -> Result<u64> {
        if let [part] = parts {
            return Ok(self.write_part(file, part)? as u64);
        }
        file.check_writable(Errno::BADF)?;
        let lowest_offset = parts
            .iter()
            .map(|part| part.offset)
            .min()
            .unwrap_or(NO_BYTES);
        let write = |lower_file: &B::File| self.lower.base.write_parts(lower_file, parts);
        if let Some(written) = self.change_lower_file(file, lowest_offset, write)? {
            return Ok(written);
        }
        write_parts_singly(parts, |part| self.write_part(file, part))
    }

    /// Runs `change` on the file in the backing, while no transaction begins or ends. `lowest_offset` is that of the
    /// changed bytes; in shadow mode the old bytes from there on are saved first.
    ///
    /// Returns `None` without a call of `change` if a transaction in buffer mode has the file: it keeps changes back
    /// until the commit.
    pub(crate) fn change_lower_file<T>(
        &self,
        file: &TrackedFile<B>,
        lowest_offset: u64,
        change: impl FnOnce(&B::File) -> Result<T>,
    ) -> Result<Option<T>> {
        let (_data, scope) = self.admission.enter_data_change(&file.object)?;
        let buffering_scope =
            self.originals
                .save_unless_buffering(scope, &file.object, lowest_offset)?;
        if buffering_scope.is_some() {
            return Ok(None);
        }
        let state = file.object.state.acquire_shared();
        let lower_file = file
            .object
            .lower_file(&self.lower.base, &state, LowerFile::Writer)?;
        change(&lower_file).map(Some)
    }

    /// Runs `query` on the file of the backing that has all bytes of the object: the file itself, or the staged copy of
    /// a file that a transaction made. Returns `None` if the bytes are in several places, or if the file cannot be
    /// opened.
    pub(crate) fn query_lower_file<T>(
        &self,
        file: &TrackedFile<B>,
        query: impl FnOnce(&B::File) -> T,
    ) -> Option<T> {
        let state = file.object.state.acquire_shared();
        let which = match state.read().single_source()? {
            LowerFile::Reader if file.access != Access::Read => LowerFile::Writer,
            single_source => single_source,
        };
        let lower_file = file
            .object
            .lower_file(&self.lower.base, &state, which)
            .ok()?;
        Some(query(&lower_file))
    }

    /// Returns a descriptor with which a later firnd can take the open file over. Returns `None` if a transaction has
    /// changed the data of the file.
    pub(crate) fn descriptor_to_keep(&self, file: &TrackedFile<B>) -> Option<OwnedFd> {
        self.unchanged_inode(&file.object)?;
        self.query_lower_file(file, |lower_file| {
            self.lower
                .base
                .descriptor(lower_file, DescriptorUse::Keeping)
        })
        .flatten()
    }

    /// Does what [`Self::query_lower_file`] does, but only on a backing whose files several hosts may write. Returns
    /// `None` otherwise.
    ///
    /// A query opens the lower file. Without such a backing the file must stay closed until its first read or write,
    /// because programs may have more files open than a process may have descriptors.
    pub(crate) fn query_shared_lower_file<T>(
        &self,
        file: &TrackedFile<B>,
        query: impl FnOnce(&B::File) -> T,
    ) -> Option<T> {
        if !self.lower.base.features().finishes_files {
            return None;
        }
        self.query_lower_file(file, query)
    }

    /// Returns the object's inode in the backing if no transaction has changed its data. Does not call the backing or
    /// wait.
    pub(crate) fn unchanged_inode(&self, object: &Object<B>) -> Option<B::Inode> {
        let state = object.state.read_unclaimed();
        if state.staged_copy().is_some() || state.inline().is_some() {
            return None;
        }
        state.base.clone()
    }

    /// Makes the staged copy that a write in the transaction needs, so that [`ObjectState::write_target`] can be
    /// written. Does nothing if there is one already, or if the object has no name.
    fn ensure_staged_copy(&self, scope: &Scope<B>, object: &Arc<Object<B>>) -> Result<()> {
        let is_staged = object.state.acquire_shared().read().staged_copy().is_some();
        if is_staged || object.is_nameless() {
            return Ok(());
        }
        self.objects
            .stage_copy(scope, object, &object.state.acquire_exclusive())
    }

    /// Adds a range to the written ranges of the change. A new object has none, because its staged copy has all bytes.
    fn add_written_range(&self, object: &Object<B>, offset: u64, len: u64) {
        let claimed = object.state.acquire_exclusive();
        let mut state = claimed.edit();
        if state.base.is_some()
            && let Some(change) = &mut state.change
        {
            change.written.insert(offset..offset.saturating_add(len));
        }
    }

    /// Sets the size of a file. In a transaction that keeps its changes back until the commit (buffer mode), the bytes
    /// from the new size on are cut off in the staged copy, a file in the transaction's directory. Otherwise the file
    /// in the backing changes.
    pub(crate) fn set_len_tracked(&self, file: &TrackedFile<B>, len: u64) -> Result<()> {
        file.check_writable(Errno::INVAL)?;
        let object = &file.object;
        // Waits while a transaction of the file is prepared or being committed.
        let (_data, scope) = self.admission.enter_data_change(object)?;
        // In shadow mode (changes are made at once) this saves the bytes from `len` on, and returns `None`.
        let Some(scope) = self.originals.save_unless_buffering(scope, object, len)? else {
            let state = object.state.acquire_shared();
            let lower_file = object.lower_file(&self.lower.base, &state, LowerFile::Writer)?;
            return self.lower.base.set_len(&lower_file, len);
        };
        self.ensure_staged_copy(&scope, object)?;
        let state = object.state.acquire_exclusive();
        let target = state.read().write_target();
        let staged_file = object.lower_file(&self.lower.base, &state, target)?;
        self.lower.base.set_len(&staged_file, len)?;
        if let Some(change) = &mut state.edit().change {
            // Old bytes from the lowest size on do not come back if the file grows again.
            change.cut = change.cut.min(len);
            change.written.cut(len);
        }
        // The check acquires the object's state itself.
        drop(state);
        scope.check_changed(object);
        Ok(())
    }

    /// Allocates, clears or moves a part of a file, as fallocate(2) does. A transaction that keeps its changes back
    /// until the commit (buffer mode) changes the staged copy, a file in its own directory. In any other case the file
    /// in the backing changes.
    ///
    /// In buffer mode, modes that move bytes within the file fail with EOPNOTSUPP.
    pub(crate) fn allocate_tracked(
        &self,
        file: &TrackedFile<B>,
        mode: i32,
        offset: u64,
        len: u64,
    ) -> Result<()> {
        file.check_writable(Errno::BADF)?;
        let object = &file.object;
        let (_data, scope) = self.admission.enter_data_change(object)?;
        // Without any other flag no byte changes.
        let only_allocates = mode & !libc::FALLOC_FL_KEEP_SIZE == 0;
        // In shadow mode the old bytes from here on are saved before they change.
        let changed_from = if only_allocates { NO_BYTES } else { offset };
        let Some(scope) = self
            .originals
            .save_unless_buffering(scope, object, changed_from)?
        else {
            let state = object.state.acquire_shared();
            let lower_file = object.lower_file(&self.lower.base, &state, LowerFile::Writer)?;
            return self.lower.base.allocate(&lower_file, mode, offset, len);
        };
        // These two modes move bytes within the file, which a list of written ranges cannot express.
        if mode & (libc::FALLOC_FL_COLLAPSE_RANGE | libc::FALLOC_FL_INSERT_RANGE) != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        self.ensure_staged_copy(&scope, object)?;
        let claimed = object.state.acquire_exclusive();
        let target = claimed.read().write_target();
        let staged_file = object.lower_file(&self.lower.base, &claimed, target)?;
        self.lower.base.allocate(&staged_file, mode, offset, len)?;
        let writes_zeros = mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0;
        let size = self.lower.base.attr_of_file(&staged_file)?.size;
        let mut state = claimed.edit();
        if writes_zeros
            && state.base.is_some()
            && let Some(change) = &mut state.change
        {
            // The zeros count as written, so that the commit copies them to the file in the backing.
            let end = offset.saturating_add(len).min(size);
            change.written.insert(offset..end);
        }
        // `check_changed` acquires the object's state itself, so both guards end here.
        drop(state);
        drop(claimed);
        scope.check_changed(object);
        Ok(())
    }

    /// Finds the next data or hole from `offset` on, as lseek(2) does, also if a transaction has parts of the file in
    /// memory or in a staged copy. ENXIO means that there is none.
    pub(crate) fn seek_tracked(
        &self,
        file: &TrackedFile<B>,
        offset: u64,
        what: Seek,
    ) -> Result<u64> {
        let object = &file.object;
        let state = object.state.acquire_shared();
        let single_source = state.read().single_source();
        if let Some(which) = single_source {
            let lower_file = object.lower_file(&self.lower.base, &state, which)?;
            return self.lower.base.seek(&lower_file, offset, what);
        }
        let size = self.file_size(object, &state)?;
        let mut position = offset;
        while position < size {
            let part = state.read().resolve_at(position, size);
            match self.seek_in_part(object, &state, &part, position, what)? {
                Some(found_offset) if found_offset < part.end => return Ok(found_offset),
                _ => position = part.end,
            }
        }
        // The end of the file counts as a hole.
        if offset < size && what == Seek::Hole {
            Ok(size)
        } else {
            Err(Errno::NXIO)
        }
    }

    /// Returns the first offset from `position` on that has data or is a hole, as `what` says. `part` is the part of
    /// the file that begins at `position`; all its bytes are in one place: in memory, in one file of the backing, or
    /// nowhere (a hole). Returns `None` if there is no such offset; the offset may also lie after the part.
    fn seek_in_part(
        &self,
        object: &Object<B>,
        state: &ClaimedView<'_, ObjectState<B>>,
        part: &FilePart,
        position: u64,
        what: Seek,
    ) -> Result<Option<u64>> {
        let which = match part.source {
            PartSource::Hole => return Ok((what == Seek::Hole).then_some(position)),
            PartSource::Memory => return Ok((what == Seek::Data).then_some(position)),
            PartSource::LowerFile(which) => which,
        };
        let lower_file = object.lower_file(&self.lower.base, state, which)?;
        match self.lower.base.seek(&lower_file, position, what) {
            Ok(found_offset) => Ok(Some(found_offset)),
            // The lower file, which is in the backing, ends here, so a hole begins.
            Err(Errno::NXIO) => Ok((what == Seek::Hole).then_some(position)),
            Err(errno) => Err(errno),
        }
    }

    /// Copies a range between two files, as copy_file_range(2) does. EINVAL means that the ranges overlap.
    pub(crate) fn copy_tracked(
        &self,
        (source, source_offset): (&TrackedFile<B>, u64),
        (target, target_offset): (&TrackedFile<B>, u64),
        len: u64,
    ) -> Result<u64> {
        source.check_readable()?;
        target.check_writable(Errno::BADF)?;
        let object = &target.object;
        let (_data, scope) = self.admission.enter_data_change(object)?;
        let buffering_scope = self
            .originals
            .save_unless_buffering(scope, object, target_offset)?;
        if let Some(scope) = &buffering_scope {
            self.ensure_staged_copy(scope, object)?;
        }
        let target_file = {
            let state = object.state.acquire_shared();
            let which = if buffering_scope.is_some() {
                state.read().write_target()
            } else {
                LowerFile::Writer
            };
            object.lower_file(&self.lower.base, &state, which)?
        };
        let source_state = source.object.state.acquire_shared();
        // As in the kernel, bytes past the end are ignored, also in the test for overlap.
        let source_size = self.file_size(&source.object, &source_state)?;
        let len = len.min(source_size.saturating_sub(source_offset));
        if Arc::ptr_eq(&source.object, object) && do_overlap(source_offset, target_offset, len) {
            return Err(Errno::INVAL);
        }
        let single_source = source_state.read().single_source();
        let count = match single_source {
            Some(which) => {
                let source_file =
                    source
                        .object
                        .lower_file(&self.lower.base, &source_state, which)?;
                self.lower.base.copy_range(
                    &source_file,
                    source_offset,
                    &target_file,
                    target_offset,
                    len,
                )?
            }
            None => {
                let block_len = COPY_BLOCK_BYTES.min(usize::try_from(len).unwrap_or(usize::MAX));
                let mut block = vec![0; block_len];
                let count = self.read_from_all_sources(
                    &source.object,
                    &source_state,
                    &mut block,
                    source_offset,
                )?;
                let bytes = &block[..count];
                staging::write_all(&self.lower.base, &target_file, bytes, target_offset)?;
                count as u64
            }
        };
        // The next call acquires the state of the target, which may be the same object.
        drop(source_state);
        if buffering_scope.is_some() {
            self.add_written_range(object, target_offset, count);
        }
        Ok(count)
    }

    /// Syncs a file, for fsync(2). In a transaction the staged data becomes durable, and takes effect with the commit.
    pub(crate) fn sync_tracked(&self, file: &TrackedFile<B>, data_only: bool) -> Result<()> {
        let claimed = file.object.state.acquire_shared();
        let which = {
            let state = claimed.read();
            // An inline change becomes durable with the transaction's record, which includes its bytes.
            if state.inline().is_some() {
                return Ok(());
            }
            state.write_target()
        };
        let lower_file = file.object.lower_file(&self.lower.base, &claimed, which)?;
        self.lower.base.sync(&lower_file, data_only)
    }
}

/// Returns the part that begins at `offset` of a file with inline changes, which are a few new bytes in memory. Copies
/// those of the part that fit into `buf`. `size` is the size of the file.
fn resolve_inline(inline: &InlineChanges, offset: u64, size: u64, buf: &mut [u8]) -> FilePart {
    match inline.part_at(offset) {
        InlinePart::Overwritten(bytes) => {
            let len = bytes.len().min(buf.len());
            buf[..len].copy_from_slice(&bytes[..len]);
            FilePart {
                end: offset + bytes.len() as u64,
                source: PartSource::Memory,
            }
        }
        InlinePart::Unchanged { end } => FilePart {
            end: end.min(size),
            source: PartSource::LowerFile(LowerFile::Reader),
        },
    }
}

/// Returns whether two ranges of `len` bytes in one file overlap.
fn do_overlap(first_offset: u64, second_offset: u64, len: u64) -> bool {
    let first_end = first_offset.saturating_add(len);
    let second_end = second_offset.saturating_add(len);
    len > 0 && first_offset < second_end && second_offset < first_end
}
