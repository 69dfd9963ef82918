//! The state that the library keeps for each descriptor, in arrays indexed by descriptor.
//!
//! Each descriptor has a *tag*, a word that a hook reads without a lock, and an *entry*, which has a lock. The tag says
//! which hooks must look at the entry. The *private offset* of an entry replaces the kernel's offset while this process
//! has direct access to the shared memory.
//!
//! A *stub* is an empty file on tmpfs. Its bytes are in firnd, the process that serves a mount.
//!
//! Invariants
//! * Tags and entries are in [`TABLE`], which children of fork(2) find as zeros ([`Wiped`]). Zeros mean that no
//!   descriptor is known and no lock is held.
//! * A child of vfork(2) shares the table with its parent and must not touch it. [`lock_entry`] finds no entry there.
//! * [`STUBS`] says which descriptors are stubs. It is not wiped, because a child has these stubs too and the kernel
//!   cannot serve them. So a process that finds the tag zero first looks up the descriptor there.
//! * A tag may be out of date. Only the entry, under its lock, is decisive. Tags are changed under the lock.
//! * While [`LockedEntry::is_private`], `Entry::offset` is the descriptor's offset, and the kernel's offset is stale.
//!   The offset does not become private while a call that uses the kernel's offset is under way
//!   (`Entry::kernel_calls`).

use std::ffi::c_int;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::lease::LeaseSlot;
use crate::list::List;
use crate::lock::{Guard, Locked};
use crate::request_policy::RequestPolicy;
use crate::stub::state::StubState;
use crate::sys::{self, Identity};
use crate::trees;
use crate::vfork::is_vfork_child;
use crate::wiped::Wiped;

/// Number of entries. Descriptors with a higher number are left to the kernel.
pub(crate) const FDS_MAX: usize = 16 << 10;

/// Values of tags.
pub(crate) mod tag {
    /// This process has not looked at the descriptor yet. [`descriptor_tag`](super::descriptor_tag) never returns it.
    pub(crate) const UNKNOWN: u32 = 0;
    /// The kernel serves the descriptor, and the library leaves it alone.
    pub(crate) const ORDINARY: u32 = 1;
    /// The descriptor is a file of a mount, open for writing.
    pub(crate) const WRITER: u32 = 2;
    /// The descriptor is a file of a mount, open for reading only.
    pub(crate) const READER: u32 = 3;
    /// The descriptor is the library's own: a socket, or a file of the backing that a list names.
    pub(crate) const INTERNAL: u32 = 4;
    /// The descriptor is a stub. The kernel does not have its bytes.
    pub(crate) const STUB: u32 = 5;
}

/// The state that children of fork(2) do not inherit.
struct Table {
    tags: [AtomicU32; FDS_MAX],
    entries: [Entry; FDS_MAX],
    /// Process that the table belongs to; 0 if none has used it yet.
    owner: AtomicU32,
    /// The highest descriptor that has had a tag, plus one.
    high: AtomicU32,
}

/// The state of all descriptors of this process.
// SAFETY: the table consists of words and entries, for which zero bytes are valid: all descriptors are unknown, and all
// locks are free.
static TABLE: Wiped<Table> = unsafe {
    Wiped::new(Table {
        tags: [const { AtomicU32::new(tag::UNKNOWN) }; FDS_MAX],
        entries: [const { Entry::new() }; FDS_MAX],
        owner: AtomicU32::new(0),
        high: AtomicU32::new(0),
    })
};

/// Makes children of fork(2) find an empty table. Returns false if the kernel does not support that.
pub(crate) fn wipe_on_fork() -> bool {
    TABLE.wipe_on_fork()
}

/// For each descriptor whether it is a stub, as a value of [`stub_mark`]. Children of fork(2) inherit it.
static STUBS: [AtomicU8; FDS_MAX] = [const { AtomicU8::new(stub_mark::NONE) }; FDS_MAX];
/// The highest descriptor that has been a stub, plus one.
static STUB_HIGH: AtomicU32 = AtomicU32::new(0);

/// Values of [`STUBS`].
pub(crate) mod stub_mark {
    /// The descriptor is no stub.
    pub(crate) const NONE: u8 = 0;
    /// The descriptor is a stub that no other process and no other descriptor shares.
    pub(crate) const OWN: u8 = 1;
    /// The descriptor is a stub whose offset may be shared. So the kernel's offset is the valid one.
    pub(crate) const SHARED: u8 = 2;
}

/// Sets the mark of a descriptor. It does nothing in a child of vfork(2), which shares the memory of its parent.
pub(crate) fn mark_stub(fd: c_int, mark: u8) {
    if is_vfork_child() {
        return;
    }
    let (Some(stub), Some(tag)) = (STUBS.get(fd as usize), TABLE.tags.get(fd as usize)) else {
        return;
    };
    stub.store(mark, Ordering::Release);
    if mark == stub_mark::NONE {
        tag.store(tag::ORDINARY, Ordering::Release);
    } else {
        STUB_HIGH.fetch_max(fd as u32 + 1, Ordering::AcqRel);
        tag.store(tag::STUB, Ordering::Release);
    }
}

/// Forgets that a closed descriptor was of no interest, if there are stub trees. The next file with its number may be a
/// stub.
#[inline(always)]
pub(crate) fn forget_tag(fd: c_int) {
    if trees::has_trees()
        && !is_vfork_child()
        && let Some(tag) = TABLE.tags.get(fd as usize)
    {
        // Any other tag stays: only an ordinary descriptor is forgotten.
        let _ = tag.compare_exchange(
            tag::ORDINARY,
            tag::UNKNOWN,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
    }
}

/// Returns the mark of a descriptor.
pub(crate) fn descriptor_stub_mark(fd: c_int) -> u8 {
    STUBS
        .get(fd as usize)
        .map_or(stub_mark::NONE, |mark| mark.load(Ordering::Acquire))
}

/// Returns the entry of a descriptor without locking it.
pub(crate) fn unlocked_entry(fd: c_int) -> Option<&'static Entry> {
    TABLE.entries.get(fd as usize)
}

/// Whether the library acts on descriptors. The value is 0 until [`start`](crate::start) has checked that it can act.
pub(crate) static ACTIVE: AtomicU32 = AtomicU32::new(0);

/// The state of one descriptor.
pub(crate) struct Entry {
    /// The offset while it is private. A signal handler may raise it at any time.
    pub(crate) offset: AtomicU64,
    /// Whether the offset is private to this process. It is set under the lock and with signals blocked, because a
    /// handler that interrupts the holder of the lock may read it.
    private: AtomicBool,
    /// Number of calls under way that use the kernel's offset.
    pub(crate) kernel_calls: AtomicU32,
    state: Locked<EntryState>,
}

/// The part of an entry that its lock guards. All zeros mean that nothing is known.
pub(crate) struct EntryState {
    /// A value of [`tag`].
    pub(crate) tag: u32,
    /// Link number of the connection (`connect`); 0 if none was made yet.
    pub(crate) link: u32,
    /// For a file that a list names: the program's descriptor whose list it is, plus one. Otherwise 0.
    pub(crate) owner: c_int,
    /// Identity of the file.
    pub(crate) identity: Identity,
    /// Token of the open file.
    pub(crate) token: u64,
    /// File id in piece records.
    pub(crate) file_id: u64,
    /// Decides when firnd is asked for a grant or a list.
    pub(crate) request_policy: RequestPolicy,
    /// State that only a stub has.
    pub(crate) stub: StubState,
    /// The lease that writes fill.
    pub(crate) lease: LeaseSlot,
    /// The list by which reads find the file's bytes.
    pub(crate) list: List,
}

impl Entry {
    const fn new() -> Self {
        Self {
            offset: AtomicU64::new(0),
            private: AtomicBool::new(false),
            kernel_calls: AtomicU32::new(0),
            state: Locked::new(EntryState::new()),
        }
    }

    /// Whether the offset is private. A signal handler calls this without the lock if its own thread holds the lock.
    #[inline(always)]
    pub(crate) fn is_private(&self) -> bool {
        self.private.load(Ordering::Relaxed)
    }

    /// Sets the kernel's offset to the private one, which stays private. A signal handler calls it if its thread holds
    /// the lock.
    pub(crate) fn copy_offset_to_kernel(&self, fd: c_int) {
        let offset = self.offset.load(Ordering::Relaxed) as i64;
        sys::lseek(fd, offset, libc::SEEK_SET);
    }
}

impl EntryState {
    pub(crate) const fn new() -> Self {
        Self {
            // Zero like all other fields. A static with other bytes would be in file-backed memory, which the kernel
            // does not wipe on fork(2).
            tag: tag::UNKNOWN,
            link: 0,
            owner: 0,
            identity: Identity {
                device: 0,
                inode: 0,
            },
            token: 0,
            file_id: 0,
            request_policy: RequestPolicy::new(),
            stub: StubState::new(),
            lease: LeaseSlot::new(),
            list: List::new(),
        }
    }
}

/// A locked entry. Dropping it unlocks the entry.
pub(crate) struct LockedEntry {
    pub(crate) fd: c_int,
    pub(crate) entry: &'static Entry,
    state: Guard<'static, EntryState>,
}

impl Deref for LockedEntry {
    type Target = EntryState;
    #[inline(always)]
    fn deref(&self) -> &EntryState {
        &self.state
    }
}

impl DerefMut for LockedEntry {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut EntryState {
        &mut self.state
    }
}

impl LockedEntry {
    /// Whether the offset is private to this process.
    #[inline(always)]
    pub(crate) fn is_private(&self) -> bool {
        self.entry.is_private()
    }

    /// Sets whether the offset is private. Signals must be blocked if a handler may use the descriptor.
    pub(crate) fn set_private(&mut self, private: bool) {
        self.entry.private.store(private, Ordering::Relaxed);
    }

    /// Forgets all state of the descriptor except its tag word.
    pub(crate) fn reset(&mut self) {
        self.set_private(false);
        **self = EntryState::new();
    }

    /// Sets the tag, which decides which hooks look at this entry.
    pub(crate) fn set_tag(&mut self, tag: u32) {
        self.tag = tag;
        if let Some(word) = TABLE.tags.get(self.fd as usize) {
            word.store(tag, Ordering::Release);
        }
        if tag != tag::ORDINARY {
            TABLE.high.fetch_max(self.fd as u32 + 1, Ordering::AcqRel);
        }
    }
}

/// Result of locking the entry of a descriptor.
pub(crate) enum Entered {
    /// The entry is locked.
    Locked(LockedEntry),
    /// This thread holds the lock already: the caller is a signal handler that has interrupted a hook.
    Interrupted(&'static Entry),
    /// The descriptor is of no interest to the library.
    NotServed,
}

/// Returns the tag of a descriptor. It takes one load, except at the first use of a descriptor.
#[inline(always)]
pub(crate) fn descriptor_tag(fd: c_int) -> u32 {
    let Some(word) = TABLE.tags.get(fd as usize) else {
        return tag::ORDINARY;
    };
    match word.load(Ordering::Acquire) {
        tag::UNKNOWN => find_tag(fd),
        known_tag => known_tag,
    }
}

/// Whether the library knows a descriptor. Unlike [`descriptor_tag`] it makes no system call for an unknown descriptor.
pub(crate) fn has_state(fd: c_int) -> bool {
    let tag = TABLE.tags.get(fd as usize);
    tag.is_some_and(|tag| !matches!(tag.load(Ordering::Acquire), tag::UNKNOWN | tag::ORDINARY))
}

/// Finds out at the first use of a descriptor whether it is a stub (an empty file; firnd has its bytes), and records
/// the answer. Returns its *tag*, the word that tells the hooks whether the library serves the descriptor.
#[cold]
fn find_tag(fd: c_int) -> u32 {
    // A stub that came by a raw call or in a message may be shared with an unknown process.
    if descriptor_stub_mark(fd) == stub_mark::NONE && trees::has_trees() && trees::is_stub(fd) {
        mark_stub(fd, stub_mark::SHARED);
    }
    let found_tag = if descriptor_stub_mark(fd) == stub_mark::NONE {
        tag::ORDINARY
    } else {
        tag::STUB
    };
    let Some(word) = TABLE.tags.get(fd as usize) else {
        return tag::ORDINARY;
    };
    match word.compare_exchange(tag::UNKNOWN, found_tag, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => found_tag,
        // Another thread was faster.
        Err(tag_of_other_thread) => tag_of_other_thread,
    }
}

/// Locks the *entry* of a descriptor that the library knows: its state in the table. A child of vfork(2) shares the
/// table with its parent, and finds no entry. In a signal handler whose thread holds the lock, the entry is returned
/// unlocked ([`Entered::Interrupted`]).
#[inline(always)]
pub(crate) fn lock_entry(fd: c_int) -> Entered {
    if is_vfork_child() {
        return Entered::NotServed;
    }
    let Some(entry) = TABLE.entries.get(fd as usize) else {
        return Entered::NotServed;
    };
    let Some(state) = entry.state.lock_unless_held_by_thread() else {
        return Entered::Interrupted(entry);
    };
    let locked = LockedEntry { fd, entry, state };
    if matches!(locked.tag, tag::UNKNOWN | tag::ORDINARY) {
        Entered::NotServed
    } else {
        Entered::Locked(locked)
    }
}

/// Locks the entry of a descriptor even if the library does not know it yet. Returns `None` if this process may not use
/// the table, if the descriptor is too high, or if this thread holds the lock.
pub(crate) fn lock_new_entry(fd: c_int) -> Option<LockedEntry> {
    if is_vfork_child() || !is_owner() {
        return None;
    }
    let entry = TABLE.entries.get(fd as usize)?;
    let state = entry.state.lock_unless_held_by_thread()?;
    Some(LockedEntry { fd, entry, state })
}

/// Whether the table belongs to this process. A child of fork(2) finds an empty table and takes it over.
pub(crate) fn is_owner() -> bool {
    let pid = sys::pid();
    match TABLE
        .owner
        .compare_exchange(0, pid, Ordering::AcqRel, Ordering::Acquire)
    {
        Ok(_) => true,
        Err(owner) => owner == pid,
    }
}

/// Returns the descriptors from `first` to `last` that the library knows.
pub(crate) fn tagged_fds(first: u32, last: u32) -> impl Iterator<Item = c_int> {
    let high = TABLE
        .high
        .load(Ordering::Acquire)
        .max(STUB_HIGH.load(Ordering::Acquire));
    let end = high.min(last.saturating_add(1));
    (first..end)
        .map(|fd| fd as c_int)
        .filter(|fd| descriptor_tag(*fd) != tag::ORDINARY)
}
