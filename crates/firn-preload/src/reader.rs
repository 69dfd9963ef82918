//! Descriptors open for reading only: bytes that are in the arena are copied from there.
//!
//! firnd lists where the file's bytes are. What is listed stays where it is, and is what the file holds as
//! long as the file's word in the arena is the list's stamp: the word is looked at after the copy. Holes,
//! and bytes that are only in the backing, are read through the kernel.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use firn_format::data_socket::{EXTENTS_MAX, Extent, IN_MEMORY, Op, Reply, Status};
use libc::iovec;

use crate::connect;
use crate::mapping::Mapping;
use crate::opened::token;
use crate::probe;
use crate::report::{self, Call, Reason};
use crate::stub;
use crate::sys::{self, syscall};
use crate::table::{self, Entered, Held, TABLE, tag};
use crate::writer::{self, Ticket, Went, total_of};

/// Extents of one file; with more of them the kernel reads.
const LIST_MAX: usize = 64 * EXTENTS_MAX;
/// A read of so many bytes, or of a file that has `FILE_BYTES_MIN`, is worth the question.
const READ_BYTES_MIN: usize = 4 << 10;
const FILE_BYTES_MIN: u64 = 64 << 10;
/// From here on what is read does not fit into the caches and is better not put there: stores past them are
/// a third faster then. What fits is used from there by the program next.
const STREAM_BYTES_MIN: usize = 16 << 20;
/// Bytes through the kernel after a refusal.
const PATIENCE_BYTES: u64 = 8 << 20;
const REFUSALS_MAX: u32 = 16;

/// Where a file's bytes are. Zeros: not asked for.
pub(crate) struct List {
    /// Room for [`LIST_MAX`] extents, or null.
    extents: *mut Extent,
    count: usize,
    /// The extent that the last read ended in.
    hint: usize,
    /// Bytes of the file.
    size: u64,
    slot: *const u32,
    stamp: u32,
    mapping: Mapping,
}

impl List {
    pub(crate) const fn new() -> Self {
        Self {
            extents: std::ptr::null_mut(),
            count: 0,
            hint: 0,
            size: 0,
            slot: std::ptr::null(),
            stamp: 0,
            mapping: Mapping::NONE,
        }
    }

    /// Forgets the list.
    pub(crate) fn unmap(&mut self) {
        if !self.extents.is_null() {
            // SAFETY: mapped by `map`, and nobody looks at it any more.
            unsafe {
                syscall!(
                    libc::SYS_munmap,
                    self.extents,
                    LIST_MAX * size_of::<Extent>()
                )
            };
        }
        *self = Self::new();
    }

    /// Begins a new list; its room.
    fn map(&mut self) -> Option<&mut [MaybeUninit<Extent>]> {
        self.unmap();
        let (prot, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        let bytes = LIST_MAX * size_of::<Extent>();
        let flags = flags | libc::MAP_NORESERVE;
        // SAFETY: new memory.
        let at = unsafe { syscall!(libc::SYS_mmap, 0usize, bytes, prot, flags, -1isize, 0usize) };
        if at > 0 {
            self.extents = at as *mut Extent;
        }
        self.room()
    }

    /// Room for the extents of one more answer.
    fn room(&mut self) -> Option<&mut [MaybeUninit<Extent>]> {
        if self.extents.is_null() || self.count + EXTENTS_MAX > LIST_MAX {
            return None;
        }
        let room = self
            .extents
            .wrapping_add(self.count)
            .cast::<MaybeUninit<Extent>>();
        // SAFETY: the map has room for so many more, and nobody else has the list.
        Some(unsafe { std::slice::from_raw_parts_mut(room, EXTENTS_MAX) })
    }

    pub(crate) fn extents(&self) -> &[Extent] {
        if self.extents.is_null() {
            return &[];
        }
        // SAFETY: firnd's answers filled so many.
        unsafe { std::slice::from_raw_parts(self.extents, self.count) }
    }

    /// Whether the list still is what the file holds. Whoever copied asks afterwards.
    fn is_current(&self) -> bool {
        fence(Ordering::Acquire);
        // SAFETY: a word of the mapping, checked when the list was made.
        let word = unsafe { AtomicU32::from_ptr(self.slot.cast_mut()) };
        word.load(Ordering::Relaxed) == self.stamp
    }

    /// The extent that holds `offset`, or the first one behind it.
    fn find(&mut self, offset: u64) -> Option<Extent> {
        let ends_before = |extent: &Extent| extent.offset.saturating_add(extent.len) <= offset;
        let list = self.extents();
        let mut index = self.hint;
        let right = list.get(index).is_some_and(|extent| !ends_before(extent))
            && (index == 0 || list.get(index - 1).is_some_and(ends_before));
        if !right {
            index = list.partition_point(ends_before);
        }
        let found = list.get(index).copied();
        self.hint = index;
        found
    }
}

/// Reads at the descriptor's offset, or at `at`.
///
/// # Safety
/// The parts are the program's, to be written.
pub(crate) unsafe fn read(fd: c_int, parts: &[iovec], at: Option<u64>, call: Call) -> Went {
    let mut held = match table::enter(fd) {
        Entered::Held(held) if held.tag == tag::READER => held,
        _ if at.is_some() => return Went::Kernel(Ticket::NONE),
        Entered::Not => return Went::Kernel(Ticket::NONE),
        entered => {
            drop(entered);
            return Went::Kernel(writer::before_kernel(fd, call));
        }
    };
    let total = total_of(parts).filter(|total| *total > 0 && at.unwrap_or(0) <= i64::MAX as u64);
    let ready = total.is_some_and(|total| held.private || ask(&mut held, total));
    let Some(total) = total.filter(|_| ready) else {
        return through_kernel(held, at, call);
    };
    let offset = at.unwrap_or_else(|| held.entry.offset.load(Ordering::Relaxed));
    if !are_writable(&held, parts, offset, total) {
        return through_kernel(held, at, call);
    }
    // SAFETY: the caller's promise.
    let taken = unsafe { take(&mut held, parts, offset, total) };
    match taken {
        Some(taken) => {
            if at.is_none() {
                held.entry
                    .offset
                    .store(offset.wrapping_add(taken as u64), Ordering::Relaxed);
            }
            report::fast(call, taken);
            Went::Past(taken as isize)
        }
        None => {
            drop_list(&mut held);
            through_kernel(held, at, call)
        }
    }
}

/// Whether the parts can be written where bytes of the file go.
pub(crate) fn are_writable(held: &Held, parts: &[iovec], offset: u64, total: usize) -> bool {
    let mut left = held.list.size.saturating_sub(offset).min(total as u64) as usize;
    parts.iter().all(|part| {
        let len = part.iov_len.min(left);
        left -= len;
        probe::is_writable(part.iov_base, len)
    })
}

/// A way to copy.
type Copy = unsafe fn(*mut u8, *const u8, usize);

/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
unsafe fn copy_to_cache(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
}

/// Copies from the arena; `None`: the list does not hold any more, or a gap could not be read.
///
/// # Safety
/// As for [`read`].
pub(crate) unsafe fn take(
    held: &mut Held,
    parts: &[iovec],
    offset: u64,
    total: usize,
) -> Option<usize> {
    let left = held.list.size.saturating_sub(offset);
    let total = total.min(usize::try_from(left).unwrap_or(usize::MAX));
    let copy = if total >= STREAM_BYTES_MIN {
        firn_direct::copy
    } else {
        copy_to_cache
    };
    let mut done = 0;
    for part in parts {
        let len = part.iov_len.min(total - done);
        let mut filled = 0;
        while filled < len {
            let to = part.iov_base.cast::<u8>().wrapping_add(filled);
            let at = offset.wrapping_add((done + filled) as u64);
            // SAFETY: a part of the buffer.
            filled += unsafe { take_some(held, to, len - filled, at, copy)? };
        }
        done += len;
    }
    held.list.is_current().then_some(done)
}

/// Fills some of `len` bytes, which lie in the file, from the arena or from the kernel.
///
/// # Safety
/// `to` is writable for `len` bytes.
unsafe fn take_some(
    held: &mut Held,
    to: *mut u8,
    len: usize,
    at: u64,
    copy: Copy,
) -> Option<usize> {
    let next = held.list.find(at);
    let gap = next.map_or(u64::MAX, |extent| extent.offset.saturating_sub(at));
    if let Some(extent) = next.filter(|extent| gap == 0 && extent.place == IN_MEMORY) {
        let skip = at - extent.offset;
        let len = (len as u64).min(extent.len - skip);
        let from = extent.at.checked_add(skip)?;
        if !held.list.mapping.has_shared(from, len) {
            return None;
        }
        // SAFETY: mapped, as just asked; the buffer is the caller's promise.
        unsafe {
            copy(
                to,
                held.list.mapping.shared.wrapping_add(from as usize),
                len as usize,
            )
        };
        return Some(len as usize);
    }
    let gap = if gap == 0 {
        next.map_or(0, |extent| extent.len - (at - extent.offset))
    } else {
        gap
    };
    let len = len.min(usize::try_from(gap).unwrap_or(usize::MAX));
    let result = if held.tag == tag::STUB {
        // SAFETY: the caller's promise.
        unsafe { stub::read_at(held, to, len, at) }
    } else {
        // SAFETY: the caller's promise.
        unsafe { sys::pread(held.fd, to.cast::<c_void>(), len, at) }
    };
    usize::try_from(result).ok().filter(|got| *got > 0)
}

/// Asks firnd where the bytes are. Whether it said so.
#[cold]
fn ask(held: &mut Held, total: usize) -> bool {
    if held.patience_bytes > 0 {
        held.patience_bytes = held.patience_bytes.saturating_sub(total as u64);
        return false;
    }
    if held.entry.in_kernel.load(Ordering::Acquire) != 0
        || (total < READ_BYTES_MIN && sys::size(held.fd).is_none_or(|size| size < FILE_BYTES_MIN))
    {
        return false;
    }
    let same = sys::identity(held.fd).is_some_and(|(identity, _)| identity == held.identity);
    match load(held).filter(|_| same) {
        Some(Status::Ok) if held.list.count > 0 => begin(held),
        Some(Status::Busy) if held.refusals < REFUSALS_MAX => {
            held.list.unmap();
            held.refusals += 1;
            held.patience_bytes = PATIENCE_BYTES;
            report::left(Reason::Refused);
            false
        }
        answer => {
            held.list.unmap();
            held.set_tag(tag::NONE);
            report::left(if answer == Some(Status::Ok) {
                Reason::Nothing
            } else {
                Reason::NoConnection
            });
            false
        }
    }
}

/// The offset becomes private.
fn begin(held: &mut Held) -> bool {
    sys::without_signals(|| {
        let offset = sys::lseek(held.fd, 0, libc::SEEK_CUR);
        held.entry.offset.store(offset as u64, Ordering::Relaxed);
        held.private = offset >= 0;
    });
    held.private
}

/// Fetches the whole list; how firnd answered.
fn load(held: &mut Held) -> Option<Status> {
    let token = TABLE
        .devices
        .first_token(held.token)
        .or_else(|| token(held.fd))?;
    let room = held.list.map()?;
    let (link, first) = TABLE.links.to_read(&token, room)?;
    (held.link, held.token) = (link, token.token);
    load_from(held, first)
}

/// The same where the token is known.
pub(crate) fn load_known(held: &mut Held) -> Option<Status> {
    held.list.map()?;
    load_from(held, None)
}

/// Fetches the list, whose first part may be there already.
fn load_from(held: &mut Held, mut first: Option<Reply>) -> Option<Status> {
    held.list.mapping = connect::mapping(held.link)?;
    let mut from = 0;
    loop {
        let reply = first.take().or_else(|| load_some(held, from))?;
        let status = Status::from_word(reply.status);
        if status != Status::Ok {
            return Some(status);
        }
        held.list.count += reply.count as usize;
        let changed = from > 0 && reply.stamp != held.list.stamp;
        if changed || !held.list.mapping.has_word(reply.slot) {
            return Some(Status::Busy);
        }
        held.list.slot = held
            .list
            .mapping
            .words
            .wrapping_add(reply.slot as usize)
            .cast();
        (held.list.stamp, held.list.size) = (reply.stamp, reply.size);
        let ends = held
            .list
            .extents()
            .last()
            .map_or(0, |extent| extent.offset.saturating_add(extent.len));
        if (reply.count as usize) < EXTENTS_MAX || ends <= from {
            return Some(Status::Ok);
        }
        from = ends;
    }
}

/// Fetches the extents from an offset on, behind those that are there.
fn load_some(held: &mut Held, from: u64) -> Option<Reply> {
    let link = held.link;
    let token = held.token;
    connect::ask_extents(link, token, (Op::Extents, from), held.list.room()?)
}

/// The list does not hold any more.
fn drop_list(held: &mut Held) {
    let link = held.link;
    let token = held.token;
    writer::give_back(held);
    held.list.unmap();
    held.refusals = held.refusals.saturating_add(1);
    held.patience_bytes = if held.refusals < REFUSALS_MAX {
        0
    } else {
        u64::MAX
    };
    connect::ask(link, Op::EndRead, token, 0);
    report::left(Reason::Changed);
}

/// Leaves this call to the kernel, with the kernel's offset right.
fn through_kernel(mut held: Held, at: Option<u64>, call: Call) -> Went {
    report::kernel(call);
    if at.is_some() {
        return Went::Kernel(Ticket::NONE);
    }
    writer::give_back(&mut held);
    if !held.list.extents().is_empty() {
        drop_list(&mut held);
    }
    Went::Kernel(Ticket::of(held.entry))
}
