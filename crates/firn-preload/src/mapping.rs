//! mmap(2) of a held file that is open for reading: its memory file is mapped, which needs no root and no trip to firnd.
//!
//! firnd shows each change of the file in its memory file as long as the open file is open. So a copy of the program's
//! descriptor stays open as long as the mapping does, under a number of the library's own.
//!
//! Invariants
//! * Each mapping of a memory file has a slot, with the descriptor that keeps the open file open. A slot that is claimed is
//!   one thread's.
//! * Where a mapping is taken apart in the middle, its descriptor stays open until the process ends.
//!
//! A child of fork(2) has mappings, slots and descriptors as its parent does.

use std::ffi::{c_int, c_void};
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

/// Mappings of a process; a further one is the kernel's.
const SLOTS: usize = 64;
/// Smaller mappings are the kernel's: asking firnd costs more than they gain.
const MAP_BYTES_MIN: usize = 1 << 20;
const PAGE_BYTES: usize = PAGE as usize;
/// A huge page.
const HUGE_BYTES: usize = DATA_ALIGN as usize;
/// In [`Slot::start`]: a thread is about to fill the slot.
const CLAIMED: usize = 1;

/// A mapping. All zeros: none.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    /// Keeps the open file open.
    fd: AtomicI32,
}

static MAPPINGS: [Slot; SLOTS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        fd: AtomicI32::new(-1),
    }
}; SLOTS];
/// Slots in use: most processes have none, and look no further.
static USED: AtomicUsize = AtomicUsize::new(0);

/// What a program asks of mmap(2).
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) at: *mut c_void,
    pub(crate) len: usize,
    pub(crate) prot: c_int,
    pub(crate) flags: c_int,
    pub(crate) offset: i64,
}

impl Wanted {
    /// Whether a descriptor that can only read gives the same mapping.
    fn is_read(&self) -> bool {
        let is_private = self.flags & libc::MAP_TYPE == libc::MAP_PRIVATE;
        is_private || self.prot & libc::PROT_WRITE == 0
    }
}

/// mmap(2) of the memory file of `fd`. `None`: the kernel maps the descriptor.
///
/// # Safety
/// As for mmap(2).
pub(crate) unsafe fn map_memory_file(fd: c_int, wanted: Wanted) -> Option<isize> {
    if wanted.len < MAP_BYTES_MIN || !wanted.is_read() || !is_reader_of_mount(fd) {
        return None;
    }
    let slot = claim_slot()?;
    let kept = keep_open(fd);
    let file = kept.and_then(|_| ask_for_file(fd));
    let mapped = file.map(|file| {
        // SAFETY: what the program asked of mmap(2), whose promises it keeps, of another file with the same bytes.
        unsafe { map_in_huge_pages(wanted, file.as_fd().as_raw_fd()) }
    });
    match (mapped, kept) {
        (Some(start), Some(kept)) if start > 0 => {
            if wanted.flags & libc::MAP_FIXED != 0 {
                note_unmapped(start as *const c_void, wanted.len);
            }
            slot.end
                .store(start as usize + wanted.len, Ordering::Release);
            slot.fd.store(kept, Ordering::Release);
            slot.start.store(start as usize, Ordering::Release);
        }
        _ => {
            if let Some(kept) = kept {
                close_kept(kept);
            }
            release_slot(slot);
            return None;
        }
    }
    mapped
}

/// mmap(2) at an address at which the kernel can map whole huge pages of the file, where the program leaves the address to
/// the kernel: its own choice is aligned to small pages.
///
/// # Safety
/// As for mmap(2).
unsafe fn map_in_huge_pages(wanted: Wanted, number: c_int) -> isize {
    let Wanted {
        at,
        len,
        prot,
        flags,
        offset,
    } = wanted;
    let is_free = at.is_null() && flags & libc::MAP_FIXED == 0 && len >= HUGE_BYTES;
    let room = len.next_multiple_of(PAGE_BYTES).saturating_add(HUGE_BYTES);
    let reserve = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: new memory where the kernel finds room replaces nothing.
    let reserve = || unsafe {
        let (prot, flags) = (libc::PROT_NONE, reserve);
        syscall!(libc::SYS_mmap, 0usize, room, prot, flags, -1isize, 0usize)
    };
    let start = if is_free { reserve() } else { -1 };
    if start < 0 {
        // SAFETY: as the caller promises.
        return unsafe { syscall!(libc::SYS_mmap, at, len, prot, flags, number, offset) };
    }
    let start = start as usize;
    let ahead = (offset as usize).wrapping_sub(start) % HUGE_BYTES;
    let (aligned, fixed) = (start + ahead, flags | libc::MAP_FIXED);
    // SAFETY: within what was just reserved, and known to this function only.
    let mapped = unsafe { syscall!(libc::SYS_mmap, aligned, len, prot, fixed, number, offset) };
    let used = if mapped < 0 {
        start..start
    } else {
        aligned..aligned + len.next_multiple_of(PAGE_BYTES)
    };
    for unused in [start..used.start, used.end..start + room] {
        if !unused.is_empty() {
            // SAFETY: as reserved, and not mapped to the program.
            unsafe { syscall!(libc::SYS_munmap, unused.start, unused.len()) };
        }
    }
    mapped
}

/// Whether a descriptor is a file of a mount that is open for reading only. Whatever else is known of it: a program may
/// have copied it, or given its offset to another process.
fn is_reader_of_mount(fd: c_int) -> bool {
    let Some((identity, mode)) = sys::identity(fd) else {
        return false;
    };
    mode & libc::S_IFMT == libc::S_IFREG
        && devices::token_on_mount(fd, identity.device).is_some()
        && sys::fcntl(fd, libc::F_GETFL, 0) & libc::O_ACCMODE as isize == libc::O_RDONLY as isize
}

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

/// A copy of a descriptor, which the hooks leave alone.
fn keep_open(fd: c_int) -> Option<c_int> {
    let copy = rustix::io::fcntl_dupfd_cloexec(sys::borrow(fd)?, OWN_FD_MIN);
    let copy = copy.ok()?.into_raw_fd();
    match table::lock_new_entry(copy) {
        Some(mut held) => {
            held.reset();
            held.set_tag(tag::INTERNAL);
            Some(copy)
        }
        None => {
            sys::close(copy);
            None
        }
    }
}

fn close_kept(fd: c_int) {
    if let Some(mut held) = table::lock_new_entry(fd)
        && held.tag == tag::INTERNAL
    {
        held.set_tag(tag::NONE);
    }
    sys::close(fd);
}

/// The memory file that has all of an open file.
fn ask_for_file(fd: c_int) -> Option<Descriptor> {
    let token = devices::token_of(fd)?;
    let link = connect::connect_to_map(&token)?;
    let mut files = Files::new();
    let mut payload = Payload {
        files: Some(&mut files),
        ..Payload::none()
    };
    let request = Request::new(Op::Map, token.token, 0);
    let reply = connect::call_firnd(link, &request, &mut payload).ok()?;
    connect::is_ok(&reply).then(|| files.take(0)).flatten()
}

/// The program is about to unmap a range, or to map something else there.
pub(crate) fn note_unmapped(at: *const c_void, len: usize) {
    if USED.load(Ordering::Acquire) == 0 {
        return;
    }
    let (from, to) = (at as usize, (at as usize).saturating_add(len));
    for slot in &MAPPINGS {
        let (start, end) = slot.range();
        if start <= CLAIMED || to <= start || end <= from {
            continue;
        }
        if from <= start && end <= to {
            slot.end_mapping(start);
        } else if from <= start {
            let _ = slot
                .start
                .compare_exchange(start, to, Ordering::AcqRel, Ordering::Relaxed);
        } else if end <= to {
            slot.end.store(from, Ordering::Release);
        }
    }
}

/// The program moved a range, or gave it another length.
pub(crate) fn note_moved(at: *const c_void, len: usize, to: *const c_void, to_len: usize) {
    if USED.load(Ordering::Acquire) == 0 {
        return;
    }
    let from = at as usize;
    for slot in &MAPPINGS {
        let (start, end) = slot.range();
        if start == from && end <= from.saturating_add(len.next_multiple_of(PAGE_BYTES)) {
            let claimed =
                slot.start
                    .compare_exchange(start, CLAIMED, Ordering::AcqRel, Ordering::Relaxed);
            if claimed.is_ok() {
                slot.end.store(to as usize + to_len, Ordering::Release);
                slot.start.store(to as usize, Ordering::Release);
            }
        }
    }
}

impl Slot {
    /// Where its mapping begins and ends, of whole pages.
    fn range(&self) -> (usize, usize) {
        let start = self.start.load(Ordering::Acquire);
        let end = self.end.load(Ordering::Acquire);
        (start, end.next_multiple_of(PAGE_BYTES))
    }

    /// Closes what its mapping kept open, unless another thread does.
    fn end_mapping(&self, start: usize) {
        let claimed =
            self.start
                .compare_exchange(start, CLAIMED, Ordering::AcqRel, Ordering::Relaxed);
        if claimed.is_ok() {
            close_kept(self.fd.swap(-1, Ordering::AcqRel));
            release_slot(self);
        }
    }
}
