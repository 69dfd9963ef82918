//! [`FileData`]: reads and writes of file data, with the changes of an open transaction.
//!
//! In a transaction a file has up to three sources of bytes:
//! * written ranges come from the staged copy, or from memory if the change is inline ([`crate::inline_changes`]);
//! * other bytes below the cut come from the backing;
//! * the rest of the file is a hole.
//!
//! Outside of transactions every call goes to the backing's file.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{
    Access, Backing, DataPart, DescriptorUse, Errno, PageAdvice, Result, Seek, write_parts_singly,
};

use crate::attributes::Objects;
use crate::claim::View;
use crate::inline_changes::InlinePart;
use crate::lower_backing::LowerBacking;
use crate::object::{Inner, LowerFile, Object};
use crate::scope::Scope;
use crate::shadow::NO_BYTES;
use crate::shadow::save::Originals;
use crate::waiting::Admission;

/// Bytes of one read and write of a copy that the backing cannot do by itself.
const BLOCK: usize = 1 << 20;

/// Contiguous staged bytes of a file after which their write to the device starts, so that the commit waits for less.
/// Data that is overwritten later is then written to the device twice.
const EARLY_BYTES: u64 = 16 << 20;

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

    fn must_read(&self) -> Result<()> {
        if self.access == Access::Write {
            Err(Errno::BADF)
        } else {
            Ok(())
        }
    }

    fn must_write(&self, errno: Errno) -> Result<()> {
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

/// Where the bytes of a part of a file come from.
enum PartSource {
    /// Nothing was written there; the bytes are zeros.
    Hole,
    /// The bytes are in a file of the backing, at the same offset.
    LowerFile(LowerFile),
    /// The bytes are in memory, in an inline change.
    Memory,
}

impl<B: Backing> Inner<B> {
    /// Returns the source of the bytes from `at` on, below `size`.
    fn part_at(&self, at: u64, size: u64) -> FilePart {
        self.copy_from_memory(at, size, &mut [])
    }

    /// Returns the source of the bytes from `at` on, below `size`. Bytes in memory are copied to `buf`, as far as they
    /// fit.
    fn copy_from_memory(&self, at: u64, size: u64, buf: &mut [u8]) -> FilePart {
        if let Some(inline) = self.inline() {
            return match inline.part_at(at) {
                InlinePart::Overwritten(bytes) => {
                    let len = bytes.len().min(buf.len());
                    buf[..len].copy_from_slice(&bytes[..len]);
                    FilePart {
                        end: at + bytes.len() as u64,
                        source: PartSource::Memory,
                    }
                }
                InlinePart::Unchanged { end } => FilePart {
                    end: end.min(size),
                    source: PartSource::LowerFile(LowerFile::Reader),
                },
            };
        }
        let Some(change) = self.change.as_ref().filter(|change| change.copy.is_some()) else {
            return FilePart {
                end: size,
                source: PartSource::LowerFile(LowerFile::Reader),
            };
        };
        if self.base.is_none() {
            return FilePart {
                end: size,
                source: PartSource::LowerFile(LowerFile::StagedCopy),
            };
        }
        let written = change.written.part_at(at);
        let end = written.end.min(size);
        if written.is_inside {
            return FilePart {
                end,
                source: PartSource::LowerFile(LowerFile::StagedCopy),
            };
        }
        if at < change.cut {
            return FilePart {
                end: end.min(change.cut),
                source: PartSource::LowerFile(LowerFile::Reader),
            };
        }
        FilePart {
            end,
            source: PartSource::Hole,
        }
    }

    /// Returns the file of the backing that alone has all bytes of the object; `None` if there is no such file.
    fn whole(&self) -> Option<LowerFile> {
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

    pub(crate) fn open_tracked(
        &self,
        object: &Arc<Object<B>>,
        access: Access,
    ) -> Result<TrackedFile<B>> {
        let inner = object.inner.share();
        let whole = inner.look().whole();
        // The file is opened so that open(2) of the program gets the errors of the backing.
        let inode = match whole {
            Some(LowerFile::StagedCopy) => inner.inode(&self.lower.base)?,
            _ => inner.base().ok_or(Errno::STALE)?,
        };
        drop(self.lower.base.open(&inode, access)?);
        drop(inner);
        Ok(TrackedFile::new(object, access))
    }

    fn size(&self, object: &Object<B>, inner: &View<'_, Inner<B>>) -> Result<u64> {
        let is_staged = inner.look().staged_copy().is_some();
        let below = if is_staged {
            LowerFile::StagedCopy
        } else {
            LowerFile::Reader
        };
        Ok(self
            .lower
            .base
            .attr_of_file(&*object.lower_file(&self.lower.base, inner, below)?)?
            .size)
    }

    pub(crate) fn read_tracked(
        &self,
        file: &TrackedFile<B>,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<usize> {
        file.must_read()?;
        let inner = file.object.inner.share();
        let whole = inner.look().whole();
        if let Some(below) = whole {
            return self.lower.base.read_at(
                &*file.object.lower_file(&self.lower.base, &inner, below)?,
                buf,
                offset,
            );
        }
        self.read_merged(&file.object, &inner, buf, offset)
    }

    fn read_merged(
        &self,
        object: &Object<B>,
        inner: &View<'_, Inner<B>>,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<usize> {
        let size = self.size(object, inner)?;
        let end = size.min(offset.saturating_add(buf.len() as u64));
        let mut at = offset;
        while at < end {
            let wanted = &mut buf[(at - offset) as usize..(end - offset) as usize];
            let part = inner.look().copy_from_memory(at, size, wanted);
            let until = part.end.min(end);
            let bytes = &mut wanted[..(until - at) as usize];
            match part.source {
                PartSource::Memory => {}
                PartSource::Hole => bytes.fill(0),
                PartSource::LowerFile(below) => {
                    let below = object.lower_file(&self.lower.base, inner, below)?;
                    let count = self.lower.base.read_at(&below, bytes, at)?;
                    // The file of the backing is shorter than the object; the rest is a hole.
                    bytes[count..].fill(0);
                }
            }
            at = until;
        }
        Ok(end.saturating_sub(offset) as usize)
    }

    fn write_part(&self, file: &TrackedFile<B>, part: &DataPart<'_>) -> Result<usize> {
        file.must_write(Errno::BADF)?;
        let object = &file.object;
        let (_data, scope) = self.admission.enter_data_change(object)?;
        let count = self.write_object(object, scope.clone(), part.data, part.offset)?;
        if let Some(scope) = scope {
            let written = &scope.written_bytes;
            written.fetch_add(count as u64, Ordering::Relaxed);
        }
        Ok(count)
    }

    /// Writes to an object. The caller ensures that no transaction begins, is prepared or ends during the call.
    fn write_object(
        &self,
        object: &Arc<Object<B>>,
        scope: Option<Arc<Scope<B>>>,
        data: &[IoSlice<'_>],
        offset: u64,
    ) -> Result<usize> {
        let Some(scope) = self.originals.holding(scope, object, offset)? else {
            let inner = object.inner.share();
            return self.lower.base.write_at(
                &*object.lower_file(&self.lower.base, &inner, LowerFile::Writer)?,
                data,
                offset,
            );
        };
        if let Some(count) = self.objects.write_inline(&scope, object, data, offset)? {
            return Ok(count);
        }
        self.ready(&scope, object)?;
        let inner = object.inner.share();
        let target = inner.look().target();
        let below = object.lower_file(&self.lower.base, &inner, target)?;
        let count = self.lower.base.write_at(&below, data, offset)?;
        drop(inner);
        let window = offset / EARLY_BYTES..(offset + count as u64) / EARLY_BYTES;
        if !window.is_empty() {
            let early = window.start * EARLY_BYTES..window.end * EARLY_BYTES;
            self.lower.base.advise(&below, early, PageAdvice::WriteOut);
        }
        self.wrote(object, offset, count as u64);
        scope.check_changed(object);
        Ok(count)
    }

    pub(crate) fn write_tracked(
        &self,
        file: &TrackedFile<B>,
        parts: &[DataPart<'_>],
    ) -> Result<u64> {
        if let [part] = parts {
            return Ok(self.write_part(file, part)? as u64);
        }
        file.must_write(Errno::BADF)?;
        let from = parts
            .iter()
            .map(|part| part.offset)
            .min()
            .unwrap_or(NO_BYTES);
        let write = |below: &B::File| self.lower.base.write_parts(below, parts);
        if let Some(written) = self.outside_transactions(file, from, write)? {
            return Ok(written);
        }
        write_parts_singly(parts, |part| self.write_part(file, part))
    }

    /// Runs a change of a file from the byte `from` on directly on the backing, while no transaction begins or ends.
    ///
    /// Returns `None` without a change if a transaction in buffer mode has the file.
    pub(crate) fn outside_transactions<T>(
        &self,
        file: &TrackedFile<B>,
        from: u64,
        change: impl FnOnce(&B::File) -> Result<T>,
    ) -> Result<Option<T>> {
        let (_data, scope) = self.admission.enter_data_change(&file.object)?;
        if self.originals.holding(scope, &file.object, from)?.is_some() {
            return Ok(None);
        }
        let inner = file.object.inner.share();
        let below = file
            .object
            .lower_file(&self.lower.base, &inner, LowerFile::Writer)?;
        change(&below).map(Some)
    }

    /// Runs a query on the file of the backing that alone has all bytes of the object, if there is one.
    pub(crate) fn ask_below<T>(
        &self,
        file: &TrackedFile<B>,
        ask: impl FnOnce(&B::File) -> T,
    ) -> Option<T> {
        let inner = file.object.inner.share();
        let which = match inner.look().whole()? {
            LowerFile::Reader if file.access != Access::Read => LowerFile::Writer,
            which => which,
        };
        let below = file
            .object
            .lower_file(&self.lower.base, &inner, which)
            .ok()?;
        Some(ask(&below))
    }

    /// Returns a descriptor by which a later firnd can take the file over; `None` if a transaction has changed its
    /// data.
    pub(crate) fn descriptor_to_keep(&self, file: &TrackedFile<B>) -> Option<OwnedFd> {
        self.unchanged(&file.object)?;
        let keep = |below: &B::File| self.lower.base.descriptor(below, DescriptorUse::Keeping);
        self.ask_below(file, keep).flatten()
    }

    /// Does what [`Self::ask_below`] does if several hosts may write the file.
    ///
    /// Otherwise the file of the backing stays closed until it is read or written, because programs may have more files
    /// open than a process may have descriptors.
    pub(crate) fn ask_shared<T>(
        &self,
        file: &TrackedFile<B>,
        ask: impl FnOnce(&B::File) -> T,
    ) -> Option<T> {
        if !self.lower.base.features().finishes_files {
            return None;
        }
        self.ask_below(file, ask)
    }

    /// Returns the object's inode in the backing if no transaction has changed its data. Does not call the backing or
    /// wait.
    pub(crate) fn unchanged(&self, object: &Object<B>) -> Option<B::Inode> {
        let inner = object.inner.peek();
        let is_changed = inner
            .change
            .as_ref()
            .is_some_and(|change| change.copy.is_some() || change.inline.is_some());
        inner.base.clone().filter(|_| !is_changed)
    }

    /// Makes a staged copy if a write in the transaction needs one, so that [`Inner::target`] can be written.
    fn ready(&self, scope: &Scope<B>, object: &Arc<Object<B>>) -> Result<()> {
        let is_staged = object.inner.share().look().staged_copy().is_some();
        if is_staged || object.is_nameless() {
            return Ok(());
        }
        self.objects.stage_copy(scope, object, &object.inner.own())
    }

    fn wrote(&self, object: &Object<B>, offset: u64, len: u64) {
        let owned = object.inner.own();
        let mut inner = owned.edit();
        if inner.base.is_some()
            && let Some(change) = &mut inner.change
        {
            change.written.insert(offset..offset.saturating_add(len));
        }
    }

    pub(crate) fn set_len_tracked(&self, file: &TrackedFile<B>, len: u64) -> Result<()> {
        file.must_write(Errno::INVAL)?;
        let object = &file.object;
        let (_data, scope) = self.admission.enter_data_change(object)?;
        let Some(scope) = self.originals.holding(scope, object, len)? else {
            let inner = object.inner.share();
            return self.lower.base.set_len(
                &*object.lower_file(&self.lower.base, &inner, LowerFile::Writer)?,
                len,
            );
        };
        self.ready(&scope, object)?;
        let inner = object.inner.own();
        let target = inner.look().target();
        let below = object.lower_file(&self.lower.base, &inner, target)?;
        self.lower.base.set_len(&below, len)?;
        if let Some(change) = &mut inner.edit().change {
            change.cut = change.cut.min(len);
            change.written.cut(len);
        }
        drop(inner);
        scope.check_changed(object);
        Ok(())
    }

    pub(crate) fn allocate_tracked(
        &self,
        file: &TrackedFile<B>,
        mode: i32,
        offset: u64,
        len: u64,
    ) -> Result<()> {
        file.must_write(Errno::BADF)?;
        let object = &file.object;
        let (_data, scope) = self.admission.enter_data_change(object)?;
        let keeps_bytes = mode & !libc::FALLOC_FL_KEEP_SIZE == 0;
        let from = if keeps_bytes { NO_BYTES } else { offset };
        let Some(scope) = self.originals.holding(scope, object, from)? else {
            let inner = object.inner.share();
            let below = object.lower_file(&self.lower.base, &inner, LowerFile::Writer)?;
            return self.lower.base.allocate(&below, mode, offset, len);
        };
        // These two modes move bytes within the file, which a list of written ranges cannot express.
        if mode & (libc::FALLOC_FL_COLLAPSE_RANGE | libc::FALLOC_FL_INSERT_RANGE) != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        self.ready(&scope, object)?;
        let owned = object.inner.own();
        let target = owned.look().target();
        let below = object.lower_file(&self.lower.base, &owned, target)?;
        self.lower.base.allocate(&below, mode, offset, len)?;
        let cleared = mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0;
        let size = self.lower.base.attr_of_file(&below)?.size;
        let mut inner = owned.edit();
        if cleared
            && inner.base.is_some()
            && let Some(change) = &mut inner.change
        {
            change
                .written
                .insert(offset..offset.saturating_add(len).min(size));
        }
        drop(inner);
        drop(owned);
        scope.check_changed(object);
        Ok(())
    }

    pub(crate) fn seek_tracked(
        &self,
        file: &TrackedFile<B>,
        offset: u64,
        what: Seek,
    ) -> Result<u64> {
        let object = &file.object;
        let inner = object.inner.share();
        let whole = inner.look().whole();
        if let Some(below) = whole {
            return self.lower.base.seek(
                &*object.lower_file(&self.lower.base, &inner, below)?,
                offset,
                what,
            );
        }
        let size = self.size(object, &inner)?;
        let mut at = offset;
        while at < size {
            let part = inner.look().part_at(at, size);
            let found = match (part.source, what) {
                (PartSource::Hole, Seek::Hole) | (PartSource::Memory, Seek::Data) => return Ok(at),
                (PartSource::Hole, Seek::Data) | (PartSource::Memory, Seek::Hole) => None,
                (PartSource::LowerFile(below), _) => {
                    match self.lower.base.seek(
                        &*object.lower_file(&self.lower.base, &inner, below)?,
                        at,
                        what,
                    ) {
                        Ok(found) => Some(found),
                        // The file of the backing ends here, so a hole begins.
                        Err(Errno::NXIO) => (what == Seek::Hole).then_some(at),
                        Err(errno) => return Err(errno),
                    }
                }
            };
            match found {
                Some(found) if found < part.end => return Ok(found),
                _ => at = part.end,
            }
        }
        if offset < size && what == Seek::Hole {
            Ok(size)
        } else {
            Err(Errno::NXIO)
        }
    }

    pub(crate) fn copy_tracked(
        &self,
        (from, from_offset): (&TrackedFile<B>, u64),
        (to, to_offset): (&TrackedFile<B>, u64),
        len: u64,
    ) -> Result<u64> {
        from.must_read()?;
        to.must_write(Errno::BADF)?;
        let object = &to.object;
        let (_data, scope) = self.admission.enter_data_change(object)?;
        let is_held = match &self.originals.holding(scope, object, to_offset)? {
            Some(scope) => self.ready(scope, object).map(|()| true)?,
            None => false,
        };
        let target = {
            let inner = object.inner.share();
            let below = if is_held {
                inner.look().target()
            } else {
                LowerFile::Writer
            };
            object.lower_file(&self.lower.base, &inner, below)?
        };
        let inner = from.object.inner.share();
        // As in the kernel, bytes past the end are ignored, also in the test for overlap.
        let len = len.min(self.size(&from.object, &inner)?.saturating_sub(from_offset));
        let is_same = Arc::ptr_eq(&from.object, object);
        let ends = (
            from_offset.saturating_add(len),
            to_offset.saturating_add(len),
        );
        if is_same && from_offset < ends.1 && to_offset < ends.0 && len > 0 {
            return Err(Errno::INVAL);
        }
        let whole = inner.look().whole();
        let count = match whole {
            Some(below) => {
                let source = from.object.lower_file(&self.lower.base, &inner, below)?;
                self.lower
                    .base
                    .copy_range(&source, from_offset, &target, to_offset, len)?
            }
            None => {
                let mut block = vec![0; BLOCK.min(usize::try_from(len).unwrap_or(BLOCK))];
                let count = self.read_merged(&from.object, &inner, &mut block, from_offset)?;
                crate::staging::write_all(&self.lower.base, &target, &block[..count], to_offset)?;
                count as u64
            }
        };
        drop(inner);
        if is_held {
            self.wrote(object, to_offset, count);
        }
        Ok(count)
    }

    /// Syncs a file, for fsync(2). In a transaction the staged data becomes durable, and takes effect with the commit.
    pub(crate) fn sync_tracked(&self, file: &TrackedFile<B>, data_only: bool) -> Result<()> {
        let inner = file.object.inner.share();
        let below = {
            let inner = inner.look();
            // Inline changes become durable with the record that takes them.
            if inner.inline().is_some() {
                return Ok(());
            }
            inner.target()
        };
        self.lower.base.sync(
            &*file.object.lower_file(&self.lower.base, &inner, below)?,
            data_only,
        )
    }
}
