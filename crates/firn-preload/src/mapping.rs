//! mmap(2) of a file on a mount that is open for reading. If firnd (the process that serves the mount) has all bytes of
//! the file in a *memory file* (memfd_create(2)), that file is mapped instead. So no page fault goes to firnd.
//!
//! firnd stores each change of the file in its memory file too, while the open file stays open. So the library keeps a
//! copy of the program's descriptor open as long as the mapping exists.
//!
//! Invariants
//! * Each mapping of a memory file has a *slot* with its range and the kept descriptor. Only the thread that has
//!   claimed a slot changes it.
//! * If the program unmaps the middle of a mapping, the kept descriptor stays open until the process ends.
//!
//! A child of fork(2) inherits mappings, slots and descriptors, and they are valid there.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use firn_direct::connection::{Files, Payload};
use firn_direct::syscall::Descriptor;
use firn_format::data_socket::{Op, Request};
use firn_format::geometry::{DATA_ALIGN, PAGE};

use crate::connect::{self, OWN_FD_MIN};
use crate::devices;
use crate::sys::{self, syscall};
use crate::table::{self, tag};

/// Maximum number of mappings of memory files in a process. The kernel maps further files.
const MAPPINGS_MAX: usize = 64;
/// The kernel maps shorter ranges, because a request to firnd would cost more than it saves.
const MAP_BYTES_MIN: usize = 1 << 20;
/// Size of a page of memory.
const PAGE_BYTES: usize = PAGE as usize;
/// Size of a huge page.
const HUGE_BYTES: usize = DATA_ALIGN as usize;
/// Value of [`Slot::start`] while a thread fills or clears the slot.
const CLAIMED: usize = 1;

/// The range of a mapping and its kept descriptor. A slot with the start 0 is free.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    /// Copy of the program's descriptor, which keeps the open file open.
    fd: AtomicI32,
}

/// The mappings of memory files in this process.
static MAPPINGS: [Slot; MAPPINGS_MAX] = [const {
    Slot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        fd: AtomicI32::new(-1),
    }
}; MAPPINGS_MAX];
/// Number of slots in use. While it is 0, the slots need not be searched.
static USED: AtomicUsize = AtomicUsize::new(0);

/// The arguments of mmap(2), without the descriptor.
#[derive(Clone, Copy)]
pub(crate) struct MapArguments {
    pub(crate) address: *mut c_void,
    pub(crate) len: usize,
    pub(crate) prot: c_int,
    pub(crate) flags: c_int,
    pub(crate) offset: i64,
}

impl MapArguments {
    /// Whether a descriptor that is open for reading only is enough for the mapping.
    fn needs_only_reading(&self) -> bool {
        let is_private = self.flags & libc::MAP_TYPE == libc::MAP_PRIVATE;
        is_private || self.prot & libc::PROT_WRITE == 0
    }
}

/// mmap(2) of a file on a mount by its *memory file*, in which firnd (the serving process) keeps all bytes of the file.
/// Returns the address, or `None` if the kernel is to map the descriptor itself. A copy of the descriptor stays open as
/// long as the mapping exists, so that firnd keeps the memory file up to date.
///
/// # Safety
/// As for mmap(2).
pub(crate) unsafe fn map_memory_file(fd: c_int, arguments: MapArguments) -> Option<isize> {
    if arguments.len < MAP_BYTES_MIN || !arguments.needs_only_reading() || !is_reader_of_mount(fd) {
        return None;
    }
    let slot = claim_slot()?;
    let Some(kept_fd) = copy_descriptor(fd) else {
        release_slot(slot);
        return None;
    };
    let memory_file = request_memory_file(fd);
    let mapped = memory_file.map(|file| {
        // SAFETY: these are the program's arguments of mmap(2), for another file with the same bytes.
        unsafe { map_in_huge_pages(arguments, file.as_fd().as_raw_fd()) }
    });
    let Some(start) = mapped.filter(|start| *start > 0) else {
        close_copy(kept_fd);
        release_slot(slot);
        return None;
    };
    if arguments.flags & libc::MAP_FIXED != 0 {
        // The new mapping has replaced others in its range.
        record_unmapped(start as *const c_void, arguments.len);
    }
    slot.end
        .store(start as usize + arguments.len, Ordering::Release);
    slot.fd.store(kept_fd, Ordering::Release);
    // A slot with a start is in use, so the start is stored last.
    slot.start.store(start as usize, Ordering::Release);
    Some(start)
}

/// Maps a memory file, in which firnd keeps all bytes of a file. Returns the address or `-errno`. If the program leaves
/// the address to the kernel, an address is chosen at which huge pages of the file can be mapped as such. The kernel's
/// own choice would be aligned to small pages only.
///
/// It reserves a larger range, maps the file at the aligned address within it, and unmaps the rest.
///
/// # Safety
/// The same as for mmap(2).
unsafe fn map_in_huge_pages(arguments: MapArguments, file_fd: c_int) -> isize {
    let MapArguments {
        address,
        len,
        prot,
        flags,
        offset,
    } = arguments;
    let may_choose_address = address.is_null() && flags & libc::MAP_FIXED == 0 && len >= HUGE_BYTES;
    let reserved_bytes = len.next_multiple_of(PAGE_BYTES).saturating_add(HUGE_BYTES);
    let reserved = if may_choose_address {
        reserve_addresses(reserved_bytes)
    } else {
        None
    };
    let Some(reserved_start) = reserved else {
        // SAFETY: the caller keeps the promises of mmap(2).
        return unsafe { syscall!(libc::SYS_mmap, address, len, prot, flags, file_fd, offset) };
    };
    let reserved_end = reserved_start + reserved_bytes;
    let padding = (offset as usize).wrapping_sub(reserved_start) % HUGE_BYTES;
    let start = reserved_start + padding;
    let fixed_flags = flags | libc::MAP_FIXED;
    // SAFETY: the range is within the reserved one, which only this function knows.
    let mapped = unsafe {
        syscall!(
            libc::SYS_mmap,
            start,
            len,
            prot,
            fixed_flags,
            file_fd,
            offset
        )
    };
    if mapped < 0 {
        unmap_reserved(reserved_start..reserved_end);
    } else {
        unmap_reserved(reserved_start..start);
        unmap_reserved(start + len.next_multiple_of(PAGE_BYTES)..reserved_end);
    }
    mapped
}

/// Reserves a range of addresses, at which nothing can be read or written. Returns its start.
fn reserve_addresses(len: usize) -> Option<usize> {
    let prot = libc::PROT_NONE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: the kernel chooses the address of a new mapping, so no other memory is affected.
    let start = unsafe { syscall!(libc::SYS_mmap, 0usize, len, prot, flags, -1isize, 0usize) };
    usize::try_from(start).ok()
}

/// Unmaps a part of a range that [`reserve_addresses`] has reserved and that no other code knows.
fn unmap_reserved(range: Range<usize>) {
    if !range.is_empty() {
        // SAFETY: the range is reserved, and nothing uses it.
        unsafe { syscall!(libc::SYS_munmap, range.start, range.len()) };
    }
}

/// Whether a descriptor is a file of a mount that is open for reading only. The table is not used, because it does not
/// know descriptors that are copied or shared.
fn is_reader_of_mount(fd: c_int) -> bool {
    let Some((identity, mode)) = sys::identity(fd) else {
        return false;
    };
    mode & libc::S_IFMT == libc::S_IFREG
        && devices::token_on_mount(fd, identity.device).is_some()
        && sys::fcntl(fd, libc::F_GETFL, 0) & libc::O_ACCMODE as isize == libc::O_RDONLY as isize
}

/// Claims a free slot; `None` if all are in use.
fn claim_slot() -> Option<&'static Slot> {
    let slot = MAPPINGS.iter().find(|slot| {
        let claimed = slot
            .start
            .compare_exchange(0, CLAIMED, Ordering::AcqRel, Ordering::Relaxed);
        claimed.is_ok()
    })?;
    USED.fetch_add(1, Ordering::AcqRel);
    Some(slot)
}

fn release_slot(slot: &Slot) {
    slot.start.store(0, Ordering::Release);
    USED.fetch_sub(1, Ordering::AcqRel);
}

/// Copies a descriptor to a high number that hooks do not touch. Returns the number.
fn copy_descriptor(fd: c_int) -> Option<c_int> {
    let copy = rustix::io::fcntl_dupfd_cloexec(sys::borrow(fd)?, OWN_FD_MIN);
    let copy = copy.ok()?.into_raw_fd();
    match table::lock_new_entry(copy) {
        Some(mut locked) => {
            locked.reset();
            locked.set_tag(tag::INTERNAL);
            Some(copy)
        }
        None => {
            sys::close(copy);
            None
        }
    }
}

/// Closes a copy that [`copy_descriptor`] has made.
fn close_copy(fd: c_int) {
    if let Some(mut locked) = table::lock_new_entry(fd)
        && locked.tag == tag::INTERNAL
    {
        locked.set_tag(tag::ORDINARY);
    }
    sys::close(fd);
}

/// Asks firnd for the memory file with all bytes of an open file.
fn request_memory_file(fd: c_int) -> Option<Descriptor> {
    let token = devices::fetch_token(fd)?;
    let link = connect::connect_to_map(&token)?;
    let mut files = Files::new();
    let mut payload = Payload {
        files: Some(&mut files),
        ..Payload::none()
    };
    let request = Request::new(Op::Map, token.token, 0);
    let reply = connect::call_firnd(link, &request, &mut payload).ok()?;
    connect::is_granted(&reply).then(|| files.take(0)).flatten()
}

/// Updates the records of mappings of memory files (in which firnd keeps all bytes of a file), before the program
/// unmaps a range or maps something else there. A mapping that loses all of its range ends, and its kept descriptor is
/// closed.
pub(crate) fn record_unmapped(address: *const c_void, len: usize) {
    if USED.load(Ordering::Acquire) == 0 {
        return;
    }
    // A mapping that only loses its middle keeps its record, because the record also covers both remaining parts.
    let unmapped = address as usize..(address as usize).saturating_add(len);
    for slot in &MAPPINGS {
        let (start, end) = slot.range();
        let is_in_use = start > CLAIMED;
        if !is_in_use || unmapped.end <= start || end <= unmapped.start {
            continue;
        }
        let loses_start = unmapped.start <= start;
        let loses_end = end <= unmapped.end;
        if loses_start && loses_end {
            slot.end_mapping(start);
        } else if loses_start {
            // If another thread has changed the slot since `range`, that change stays.
            let _ = slot.start.compare_exchange(
                start,
                unmapped.end,
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
        } else if loses_end {
            slot.end.store(unmapped.start, Ordering::Release);
        }
    }
}

/// Updates the records of mappings of memory files (in which firnd keeps all bytes of a file), after the program has
/// moved a range or changed its length. Only a range that begins where a mapping begins, and covers it, is recorded.
pub(crate) fn record_moved(
    old_start: *const c_void,
    old_len: usize,
    new_start: *const c_void,
    new_len: usize,
) {
    if USED.load(Ordering::Acquire) == 0 {
        return;
    }
    let old_start = old_start as usize;
    let old_end = old_start.saturating_add(old_len.next_multiple_of(PAGE_BYTES));
    let new_start = new_start as usize;
    for slot in &MAPPINGS {
        let (start, end) = slot.range();
        if start != old_start || end > old_end {
            continue;
        }
        // Claimed, so that no other thread uses the range while its two ends change.
        let claimed =
            slot.start
                .compare_exchange(start, CLAIMED, Ordering::AcqRel, Ordering::Relaxed);
        if claimed.is_ok() {
            slot.end.store(new_start + new_len, Ordering::Release);
            slot.start.store(new_start, Ordering::Release);
        }
    }
}

impl Slot {
    /// Returns the beginning and the end of the mapping, in whole pages.
    fn range(&self) -> (usize, usize) {
        let start = self.start.load(Ordering::Acquire);
        let end = self.end.load(Ordering::Acquire);
        (start, end.next_multiple_of(PAGE_BYTES))
    }

    /// Frees the slot and closes its descriptor, unless another thread does.
    fn end_mapping(&self, start: usize) {
        let claimed =
            self.start
                .compare_exchange(start, CLAIMED, Ordering::AcqRel, Ordering::Relaxed);
        if claimed.is_ok() {
            close_copy(self.fd.swap(-1, Ordering::AcqRel));
            release_slot(self);
        }
    }
}
