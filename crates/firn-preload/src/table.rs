//! What the library keeps of each descriptor, in arrays indexed by descriptor.
//!
//! Invariants
//! * What may change lies in [`TABLE`], which children of fork(2) find as zeros ([`Wiped`]): no descriptor is
//!   Firn's, no lock is held.
//! * A child of vfork(2) shares it and must not touch it: [`lock_entry`] finds nothing there.
//! * Which descriptors are stubs lies beside it, in [`STUBS`]: a child has them too, and the kernel has no bytes
//!   of theirs. So a tag of zero means that this process has to look there.
//! * A descriptor's tag says which hooks have to look at its entry; the entry, under its lock, has the last
//!   word. Tags change under the lock.
//! * While [`Held::is_private`], `Entry::offset` is the descriptor's offset and the kernel's is stale.
//!   It does not become so while a call that uses the kernel's offset is under way (`Entry::in_kernel`).

use std::ffi::c_int;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::lease::LeaseSlot;
use crate::list::List;
use crate::lock::{Guard, Locked};
use crate::patience::Patience;
use crate::stub::state::StubState;
use crate::sys::{self, Identity};
use crate::trees;
use crate::vfork::in_vfork_child;
use crate::wiped::Wiped;

/// Descriptors from here on are left to the kernel.
pub(crate) const FDS: usize = 16 << 10;

/// Which hooks have to look at the entry of a descriptor.
pub(crate) mod tag {
    /// Not looked at by this process yet: [`tag_of`](super::tag_of) never gives it.
    pub(crate) const UNKNOWN: u32 = 0;
    /// None: the descriptor is not ours.
    pub(crate) const NONE: u32 = 1;
    /// A descriptor of a mount, open for writing.
    pub(crate) const WRITER: u32 = 2;
    /// A descriptor of a mount, open for reading only.
    pub(crate) const READER: u32 = 3;
    /// The library's own: a socket, or a file of the backing that a list names.
    pub(crate) const INTERNAL: u32 = 4;
    /// A stub: nothing of its bytes is left to the kernel.
    pub(crate) const STUB: u32 = 5;
}

/// All that may change.
struct Table {
    tags: [AtomicU32; FDS],
    entries: [Entry; FDS],
    /// The process that the table belongs to; 0: none yet.
    owner: AtomicU32,
    /// One more than the highest descriptor with a tag so far.
    high: AtomicU32,
}

// SAFETY: words and entries, of which zeros are values: every descriptor unknown, every lock free.
static TABLE: Wiped<Table> = unsafe {
    Wiped::new(Table {
        tags: [const { AtomicU32::new(tag::UNKNOWN) }; FDS],
        entries: [const { Entry::new() }; FDS],
        owner: AtomicU32::new(0),
        high: AtomicU32::new(0),
    })
};

/// Makes children of fork(2) know no descriptor. `false`: the kernel cannot.
pub(crate) fn wipe_on_fork() -> bool {
    TABLE.wipe_on_fork()
}

/// What children of fork(2) inherit: which descriptors are stubs, as [`stub_mark`] says.
static STUBS: [AtomicU8; FDS] = [const { AtomicU8::new(stub_mark::NONE) }; FDS];
/// One more than the highest of them so far.
static STUB_HIGH: AtomicU32 = AtomicU32::new(0);

/// What [`STUBS`] says of a descriptor.
pub(crate) mod stub_mark {
    /// It is none.
    pub(crate) const NONE: u8 = 0;
    /// Only this process has it.
    pub(crate) const OWN: u8 = 1;
    /// Its offset is shared with others, and the kernel's.
    pub(crate) const SHARED: u8 = 2;
}

/// Sets the mark of a descriptor, in a process of its own.
pub(crate) fn mark_stub(fd: c_int, mark: u8) {
    if in_vfork_child() {
        return;
    }
    let (Some(stub), Some(tag)) = (STUBS.get(fd as usize), TABLE.tags.get(fd as usize)) else {
        return;
    };
    stub.store(mark, Ordering::Release);
    if mark == stub_mark::NONE {
        tag.store(tag::NONE, Ordering::Release);
    } else {
        STUB_HIGH.fetch_max(fd as u32 + 1, Ordering::AcqRel);
        tag.store(tag::STUB, Ordering::Release);
    }
}

/// The number is free: what gets it next is looked at anew, where there may be stubs.
#[inline(always)]
pub(crate) fn forget_tag(fd: c_int) {
    if trees::has_trees()
        && !in_vfork_child()
        && let Some(tag) = TABLE.tags.get(fd as usize)
    {
        let _ = tag.compare_exchange(tag::NONE, tag::UNKNOWN, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// The mark of a descriptor.
pub(crate) fn stub_mark_of(fd: c_int) -> u8 {
    STUBS
        .get(fd as usize)
        .map_or(stub_mark::NONE, |mark| mark.load(Ordering::Acquire))
}

/// The entry of a descriptor, without its lock.
pub(crate) fn entry_of(fd: c_int) -> Option<&'static Entry> {
    TABLE.entries.get(fd as usize)
}

/// Whether the library acts at all: 0 until [`start`](crate::start) found that it can.
pub(crate) static ACTIVE: AtomicU32 = AtomicU32::new(0);

/// What is known of a descriptor.
pub(crate) struct Entry {
    /// The offset, while it is private. A signal handler may raise it at any instant.
    pub(crate) offset: AtomicU64,
    /// Whether the offset is private to this process; writes go by direct access then. Set under the lock, with
    /// signals blocked: a handler that interrupts the holder of the lock may read it.
    private: AtomicBool,
    /// Calls under way that use the kernel's offset.
    pub(crate) in_kernel: AtomicU32,
    inner: Locked<Inner>,
}

/// The part of an entry that its lock guards. All zeros: nothing.
pub(crate) struct Inner {
    /// [`tag`].
    pub(crate) tag: u32,
    /// Index of the connection, plus one; 0: not asked for yet.
    pub(crate) link: u32,
    /// Of the library's own descriptors: that of the program in whose list it is, plus one; 0: none.
    pub(crate) owner: c_int,
    /// Identity of the file.
    pub(crate) identity: Identity,
    /// Token of the open file.
    pub(crate) token: u64,
    /// How firnd calls the file in piece records.
    pub(crate) file_id: u64,
    /// When firnd is asked for a grant or a list.
    pub(crate) patience: Patience,
    /// State that only a stub has.
    pub(crate) stub: StubState,
    /// What may be filled.
    pub(crate) lease: LeaseSlot,
    /// Where the file's bytes are.
    pub(crate) list: List,
}

impl Entry {
    const fn new() -> Self {
        Self {
            offset: AtomicU64::new(0),
            private: AtomicBool::new(false),
            in_kernel: AtomicU32::new(0),
            inner: Locked::new(Inner::new()),
        }
    }

    /// Whether the offset is private. Asked without the lock by a signal handler whose thread holds it.
    #[inline(always)]
    pub(crate) fn is_private(&self) -> bool {
        self.private.load(Ordering::Relaxed)
    }

    /// Gives the kernel the private offset, which stays private. For a signal handler whose thread holds the lock.
    pub(crate) fn copy_offset_to_kernel(&self, fd: c_int) {
        let offset = self.offset.load(Ordering::Relaxed) as i64;
        sys::lseek(fd, offset, libc::SEEK_SET);
    }
}

impl Inner {
    pub(crate) const fn new() -> Self {
        Self {
            // Zero, as all of it: what is not zeros lies in no memory that the kernel would wipe.
            tag: tag::UNKNOWN,
            link: 0,
            owner: 0,
            identity: Identity {
                device: 0,
                inode: 0,
            },
            token: 0,
            file_id: 0,
            patience: Patience::new(),
            stub: StubState::new(),
            lease: LeaseSlot::new(),
            list: List::new(),
        }
    }
}

/// An entry, locked.
pub(crate) struct Held {
    pub(crate) fd: c_int,
    pub(crate) entry: &'static Entry,
    inner: Guard<'static, Inner>,
}

impl Deref for Held {
    type Target = Inner;
    #[inline(always)]
    fn deref(&self) -> &Inner {
        &self.inner
    }
}

impl DerefMut for Held {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Inner {
        &mut self.inner
    }
}

impl Held {
    /// Whether the offset is private to this process.
    #[inline(always)]
    pub(crate) fn is_private(&self) -> bool {
        self.entry.is_private()
    }

    /// Makes the offset private, or the kernel's; with signals blocked where a handler may use the descriptor.
    pub(crate) fn set_private(&mut self, private: bool) {
        self.entry.private.store(private, Ordering::Relaxed);
    }

    /// Nothing is known of the descriptor any more.
    pub(crate) fn reset(&mut self) {
        self.set_private(false);
        **self = Inner::new();
    }

    /// Changes which hooks look at this entry.
    pub(crate) fn set_tag(&mut self, tag: u32) {
        self.tag = tag;
        if let Some(word) = TABLE.tags.get(self.fd as usize) {
            word.store(tag, Ordering::Release);
        }
        if tag != tag::NONE {
            TABLE.high.fetch_max(self.fd as u32 + 1, Ordering::AcqRel);
        }
    }
}

/// How a hook finds a descriptor.
pub(crate) enum Entered {
    /// It is ours.
    Held(Held),
    /// It is ours, and this thread was interrupted by a signal while it held the entry.
    Again(&'static Entry),
    /// It is not ours.
    Not,
}

/// The tag of a descriptor: one load.
#[inline(always)]
pub(crate) fn tag_of(fd: c_int) -> u32 {
    match TABLE
        .tags
        .get(fd as usize)
        .map_or(tag::NONE, |tag| tag.load(Ordering::Acquire))
    {
        tag::UNKNOWN => look_up(fd),
        tag => tag,
    }
}

/// Whether something is kept of a descriptor. Unlike [`tag_of`], makes no system call for an unknown descriptor.
pub(crate) fn is_kept(fd: c_int) -> bool {
    let tag = TABLE.tags.get(fd as usize);
    tag.is_some_and(|tag| !matches!(tag.load(Ordering::Acquire), tag::UNKNOWN | tag::NONE))
}

/// The first look of this process at a descriptor.
#[cold]
fn look_up(fd: c_int) -> u32 {
    // One that came by a raw call or in a message may be shared with an unknown process.
    if stub_mark_of(fd) == stub_mark::NONE && trees::has_trees() && trees::is_stub(fd) {
        mark_stub(fd, stub_mark::SHARED);
    }
    let found = if stub_mark_of(fd) == stub_mark::NONE {
        tag::NONE
    } else {
        tag::STUB
    };
    let Some(tag) = TABLE.tags.get(fd as usize) else {
        return tag::NONE;
    };
    match tag.compare_exchange(tag::UNKNOWN, found, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => found,
        Err(other) => other,
    }
}

/// Locks the entry of a descriptor.
#[inline(always)]
pub(crate) fn lock_entry(fd: c_int) -> Entered {
    if in_vfork_child() {
        return Entered::Not;
    }
    let Some(entry) = TABLE.entries.get(fd as usize) else {
        return Entered::Not;
    };
    let Some(inner) = entry.inner.take_lock() else {
        return Entered::Again(entry);
    };
    let held = Held { fd, entry, inner };
    if matches!(held.tag, tag::UNKNOWN | tag::NONE) {
        Entered::Not
    } else {
        Entered::Held(held)
    }
}

/// Locks the entry of a descriptor that was just opened, so has none; `None` where there can be none.
pub(crate) fn lock_new_entry(fd: c_int) -> Option<Held> {
    if in_vfork_child() || !is_owner() {
        return None;
    }
    let entry = TABLE.entries.get(fd as usize)?;
    let inner = entry.inner.take_lock()?;
    Some(Held { fd, entry, inner })
}

/// Whether this is the process whose descriptors the table describes. A child of fork(2) finds the table
/// empty and makes it its own.
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

/// Descriptors with a tag, from `first` to `last`.
pub(crate) fn tagged_fds(first: u32, last: u32) -> impl Iterator<Item = c_int> {
    let high = TABLE
        .high
        .load(Ordering::Acquire)
        .max(STUB_HIGH.load(Ordering::Acquire));
    let end = high.min(last.saturating_add(1));
    (first..end)
        .map(|fd| fd as c_int)
        .filter(|fd| tag_of(*fd) != tag::NONE)
}
