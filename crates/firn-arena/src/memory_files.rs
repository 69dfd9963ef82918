//! Memory files: each stores the bytes of one large file in order and in huge pages, so that they can be mapped and
//! read like an ordinary file.
//!
//! Terms
//! * The *arena* is the file of shared memory that stores written data until it is in the backing directory.
//! * A *chunk* is the unit in which the arena is allocated. A *slot* is a range of the arena's addresses, with the
//!   memory for one chunk.
//! * A *memory file* is a tmpfs file beside the arena's file. It consists of *parts* of the size of a chunk. Each part
//!   can be the memory of one slot.
//! * A slot is *in a memory file* if its memory is a part of that file instead of the arena's file. The part is mapped
//!   at the slot's address, and the arena's file has a hole there. So the bytes take memory only once.
//! * The *location word* of a slot, in the arena, names the memory file that has the slot's bytes
//!   ([`firn_format::memory_file`]).
//!
//! | state | of | meaning |
//! |---|---|---|
//! | idle | a slot in a memory file | it has no chunk |
//! | shared | a memory file | the kernel or another process may read it directly, or may have done so |
//! | view | a shared memory file | the kernel has it open for readers now |
//!
//! Promises
//! * A slot is moved between the arena's file and a memory file only while no chunk is in it.
//! * At every instant, the whole slot has memory in the file that its location word names. A move first allocates
//!   memory in the new file, then stores the location word, and then frees the memory in the old file.
//! * The memory of a shared file ([`MemoryFile::reader`], [`Arena::begin_view`]) is never used for the bytes of another
//!   file.
//! * A view keeps its name, even if it has no slot, so that the next firnd finds it.
//!
//! Relies on: one thread creates memory files and fills them. Any thread may return idle slots.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use firn_format::geometry::PAGE;
use firn_format::home::Home;
use firn_format::memory_file::{
    IN_ARENA_FILE, MEMORY_FILE_SLOTS_MAX, MemoryFileLocation, memory_file_name, memory_file_number,
};
use firn_format::piece::Piece;
use firn_format::quote::quoted_path;
use parking_lot::Mutex;
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::ArenaError;
use crate::arena::Arena;
use crate::damage::Damage;
use crate::lease::Lease;
use crate::map::crash_point;
use crate::refs::StoredPiece;
use crate::tables::Tables;

/// An open memory file: a tmpfs file with the bytes of one large file in order.
#[derive(Debug)]
pub struct MemoryFile {
    /// Number in the file's name.
    number: u16,
    file: OwnedFd,
    /// For each part of the file, the arena's slot whose bytes it has. A part has the size of a chunk.
    slots: Mutex<Vec<Option<u32>>>,
    /// Whether the kernel or another process may read the file directly.
    is_shared: AtomicBool,
    /// Whether the file is being filled. Then it is not removed, even if it has no slot. Changes under the lock of the
    /// table.
    is_being_filled: AtomicBool,
    /// Whether the file is a view. Then it is not removed, even if it has no slot. Changes under the lock of the table.
    is_view: AtomicBool,
}

/// Figures of the memory files of an arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryFileFigures {
    /// Number of memory files.
    pub files: u32,
    /// Size of all slots in them.
    pub bytes: u64,
    /// Size of the slots in them that have no chunk and wait to be used again.
    pub idle_bytes: u64,
}

/// The memory files of an arena.
pub(crate) struct MemoryFiles {
    /// Directory of the arena. `None` means that it cannot be opened, so there are no memory files.
    dir: Option<OwnedFd>,
    /// Name of the arena's file, from which the names of memory files are made.
    arena_name: OsString,
    table: Mutex<Table>,
}

/// The open memory files, and the slots in them.
#[derive(Default)]
struct Table {
    /// The files by number.
    files: BTreeMap<u16, Arc<MemoryFile>>,
    /// The location of each slot that is in a memory file.
    slot_locations: HashMap<u32, SlotLocation>,
}

/// Where the bytes of a slot are: a part of a memory file, of the size of a chunk.
#[derive(Clone, Debug)]
struct SlotLocation {
    file: Arc<MemoryFile>,
    /// Index of the part in the file.
    index: u16,
}

impl MemoryFile {
    /// Returns the number in the file's name.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Returns the slot that has part `index` of the file as its memory. Returns `None` if the part has no slot.
    fn slot_of_part(&self, index: u16) -> Option<u32> {
        self.slots.lock().get(usize::from(index)).copied().flatten()
    }

    /// Returns the file, to map or read it.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Sets the length to that of the file whose bytes the memory file stores. No chunk may lie beyond that length.
    pub fn set_len(&self, len: u64) -> Result<(), Errno> {
        if rustix::fs::fstat(&self.file)?.st_size as u64 == len {
            return Ok(());
        }
        rustix::fs::ftruncate(&self.file, len)
    }

    /// Allocates memory for a range, without changing its bytes. Fails if there is too little memory.
    pub fn reserve(&self, offset: u64, len: u64) -> Result<(), Errno> {
        rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, offset, len)
    }

    /// Writes bytes at `offset`. All readers of the memory file see them.
    pub fn store(&self, mut offset: u64, mut bytes: &[u8]) -> Result<(), Errno> {
        while !bytes.is_empty() {
            match rustix::io::pwrite(&self.file, bytes, offset) {
                Ok(0) => return Err(Errno::IO),
                Ok(written) => {
                    bytes = &bytes[written..];
                    offset += written as u64;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Reads bytes from `offset`. Returns their number, which is smaller than asked for only at the end of the file.
    pub fn load(&self, offset: u64, out: &mut [u8]) -> Result<usize, Errno> {
        let mut read_bytes = 0;
        while read_bytes < out.len() {
            let remaining = &mut out[read_bytes..];
            match rustix::io::pread(&self.file, remaining, offset + read_bytes as u64) {
                Ok(0) => break,
                Ok(count) => read_bytes += count,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(read_bytes)
    }

    /// Returns a read-only descriptor for another process. The memory file is shared from now on.
    pub fn reader(&self) -> Result<OwnedFd, Errno> {
        use std::os::fd::AsRawFd;
        self.is_shared.store(true, Ordering::Release);
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
    }

    fn is_being_filled(&self) -> bool {
        self.is_being_filled.load(Ordering::Acquire)
    }

    /// Returns whether the file must not be removed, even if it has no slot.
    fn must_stay(&self) -> bool {
        self.is_being_filled() || self.is_view.load(Ordering::Acquire)
    }

    fn has_no_slot(&self) -> bool {
        self.slots.lock().iter().all(Option::is_none)
    }

    /// Returns whether the kernel or another process may read the file directly.
    pub fn is_shared(&self) -> bool {
        self.is_shared.load(Ordering::Acquire)
    }
}

impl MemoryFiles {
    pub(crate) fn new(arena: &Path) -> Self {
        let parent = arena.parent().filter(|dir| !dir.as_os_str().is_empty());
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(parent.unwrap_or(Path::new(".")), flags, Mode::empty());
        Self {
            dir: dir.ok(),
            arena_name: arena.file_name().unwrap_or_default().to_owned(),
            table: Mutex::default(),
        }
    }

    fn dir(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.dir.as_ref().map(AsFd::as_fd).ok_or(Errno::NOENT)
    }

    fn name(&self, number: u16) -> OsString {
        memory_file_name(&self.arena_name, number)
    }

    /// Opens an existing memory file. The error says why it cannot be opened, or that another user could have made it.
    pub(crate) fn open(&self, number: u16) -> Result<Arc<MemoryFile>, String> {
        if let Some(file) = self.table.lock().files.get(&number) {
            return Ok(Arc::clone(file));
        }
        let dir = self.dir().map_err(|errno| errno.to_string())?;
        let name = self.name(number);
        let fd = firn_trust::open_private_file(dir, Path::new(&name), OFlags::RDWR)
            .map_err(|error| error.to_string())?;
        let file = self.add_to_table(number, fd);
        // An earlier firnd may have shared it.
        file.is_shared.store(true, Ordering::Release);
        Ok(file)
    }

    /// Adds an open memory file to the table, and returns it.
    fn add_to_table(&self, number: u16, file: OwnedFd) -> Arc<MemoryFile> {
        let file = Arc::new(MemoryFile {
            number,
            file,
            slots: Mutex::default(),
            is_shared: AtomicBool::new(false),
            is_being_filled: AtomicBool::new(false),
            is_view: AtomicBool::new(false),
        });
        self.table.lock().files.insert(number, Arc::clone(&file));
        file
    }

    /// Creates a memory file, a tmpfs file for the bytes of one large file, without slots and with the lowest free
    /// number. Fails with ENOSPC if no number is free.
    fn create(&self) -> Result<Arc<MemoryFile>, Errno> {
        let number = self.lowest_free_number().ok_or(Errno::NOSPC)?;
        let name = self.name(number);
        crash_point();
        let create_file = || {
            firn_trust::create_private_file(self.dir()?, Path::new(&name), OFlags::RDWR)
                .map_err(|error| error.errno())
        };
        let fd = match create_file() {
            // An earlier arena of this name was removed, and left this file.
            Err(Errno::EXIST) => {
                rustix::fs::unlinkat(self.dir()?, &name, AtFlags::empty())?;
                create_file()?
            }
            result => result?,
        };
        Ok(self.add_to_table(number, fd))
    }

    /// Returns the lowest number that no open memory file has.
    fn lowest_free_number(&self) -> Option<u16> {
        let table = self.table.lock();
        (0..u16::MAX).find(|number| !table.files.contains_key(number))
    }

    /// Records that the bytes of `slot` are in a memory file, as its part `index`.
    pub(crate) fn add_slot(&self, file: &Arc<MemoryFile>, index: u16, slot: u32) {
        let mut slots = file.slots.lock();
        let part = usize::from(index);
        if slots.len() <= part {
            slots.resize(part + 1, None);
        }
        slots[part] = Some(slot);
        drop(slots);
        let location = SlotLocation {
            file: Arc::clone(file),
            index,
        };
        self.table.lock().slot_locations.insert(slot, location);
    }

    /// Returns the memory file that has the bytes of a slot, or `None` if the arena's file has them.
    fn slot_location(&self, slot: u32) -> Option<SlotLocation> {
        self.table.lock().slot_locations.get(&slot).cloned()
    }

    /// Records that a slot is in the arena's file again. Removes the memory file if it is unused.
    fn remove_slot(&self, slot: u32) {
        let mut table = self.table.lock();
        let Some(SlotLocation { file, index }) = table.slot_locations.remove(&slot) else {
            return;
        };
        file.slots.lock()[usize::from(index)] = None;
        self.remove_if_unused(&mut table, &file);
    }

    /// Removes a memory file if it has no slot, is not being filled and is not a view.
    ///
    /// The caller has locked the table. Otherwise a new memory file could get the same number between the check and the
    /// removal.
    fn remove_if_unused(&self, table: &mut Table, file: &Arc<MemoryFile>) {
        if table.contains(file) && file.has_no_slot() && !file.must_stay() {
            table.files.remove(&file.number);
            self.unlink(file.number);
        }
    }

    /// Records that a new memory file is being filled.
    fn begin_filling(&self, file: &MemoryFile) {
        let _table = self.table.lock();
        file.is_being_filled.store(true, Ordering::Release);
    }

    /// Records that an existing memory file is being filled again. Returns false if another thread has removed it.
    fn begin_filling_again(&self, file: &Arc<MemoryFile>) -> bool {
        let table = self.table.lock();
        let is_in_table = table.contains(file);
        if is_in_table {
            file.is_being_filled.store(true, Ordering::Release);
        }
        is_in_table
    }

    /// Records that no more slots are added to a memory file. Removes the file if it is unused.
    fn end_filling(&self, file: &Arc<MemoryFile>) {
        let mut table = self.table.lock();
        file.is_being_filled.store(false, Ordering::Release);
        self.remove_if_unused(&mut table, file);
    }

    /// Records that a memory file is a view, and so shared.
    fn begin_view(&self, file: &MemoryFile) {
        let _table = self.table.lock();
        file.is_shared.store(true, Ordering::Release);
        file.is_view.store(true, Ordering::Release);
    }

    /// Records that a memory file is no longer a view. Removes the file if it is unused.
    fn end_view(&self, file: &Arc<MemoryFile>) {
        let mut table = self.table.lock();
        file.is_view.store(false, Ordering::Release);
        self.remove_if_unused(&mut table, file);
    }

    /// Removes the name of a memory file. A failure is logged.
    fn unlink(&self, number: u16) {
        let removed = self
            .dir()
            .and_then(|dir| rustix::fs::unlinkat(dir, self.name(number), AtFlags::empty()));
        if let Err(error) = removed {
            tracing::warn!(%error, number, "cannot remove a memory file");
        }
    }

    /// Removes all memory files of this arena that have no slot, are not being filled and are not views.
    pub(crate) fn remove_unused(&self) {
        let Ok(dir) = self.dir() else { return };
        for name in firn_trust::list_names(dir).unwrap_or_default() {
            let Some(number) = memory_file_number(&self.arena_name, &name) else {
                continue;
            };
            if self.is_used(number) {
                continue;
            }
            self.table.lock().files.remove(&number);
            self.unlink(number);
        }
    }

    /// Returns whether memory file `number` is open, and has a slot or must stay without one.
    fn is_used(&self, number: u16) -> bool {
        let table = self.table.lock();
        let Some(file) = table.files.get(&number) else {
            return false;
        };
        !file.has_no_slot() || file.must_stay()
    }

    fn list(&self) -> Vec<Arc<MemoryFile>> {
        self.table.lock().files.values().map(Arc::clone).collect()
    }
}

impl Table {
    /// Returns whether this memory file is in the table. After its removal another one may have its number.
    fn contains(&self, file: &Arc<MemoryFile>) -> bool {
        let entry = self.files.get(&file.number);
        entry.is_some_and(|entry| Arc::ptr_eq(entry, file))
    }
}

/// Removes all memory files of an arena whose own file was removed.
pub fn remove_memory_files(arena: &Path) {
    MemoryFiles::new(arena).remove_unused();
}

/// A slot whose bytes are in a memory file, as an attach or a check reads it from the arena.
pub(crate) struct MemoryFileSlot {
    slot: u32,
    /// Where its bytes are. The error says why its location word is not valid, or why the memory file cannot be used.
    found: Result<FoundLocation, String>,
    /// Whether a chunk has its data in the slot. Set by [`exclude_unreadable_slots`].
    has_chunk: bool,
}

/// The part of a memory file that has the bytes of a slot, as an attach or a check finds it.
struct FoundLocation {
    file: Arc<MemoryFile>,
    /// Index of the part of the file.
    index: u16,
    /// Number of bytes of the slot that the file has. The file may end inside the slot.
    bytes: u64,
}

/// Returns the slots (memory for one chunk each) that are in a memory file instead of the arena's file, as their
/// location words say. Opens these files. A slot with a damaged word, or with a file that cannot be opened, is returned
/// with the reason.
pub(crate) fn read_memory_file_slots(
    tables: &Tables,
    files: &MemoryFiles,
    uuid: &[u8; 16],
) -> Vec<MemoryFileSlot> {
    let mut slots = Vec::new();
    for slot in 0..tables.geometry().chunk_count {
        let word = tables.location_word(slot).load(Ordering::Acquire);
        if word == IN_ARENA_FILE {
            continue;
        }
        let found = match MemoryFileLocation::from_word(word, slot, uuid) {
            Some(location) => open_location(files, location, tables.geometry().chunk_bytes),
            None => Err(format!(
                "place word {word:#018x} is invalid for slot {slot}"
            )),
        };
        slots.push(MemoryFileSlot {
            slot,
            found,
            has_chunk: false,
        });
    }
    slots
}

/// Opens the memory file that has the bytes of a slot, and measures how many bytes of the slot it has. The error is a
/// sentence for people that names the file.
fn open_location(
    files: &MemoryFiles,
    location: MemoryFileLocation,
    chunk_bytes: u64,
) -> Result<FoundLocation, String> {
    let describe = |reason: String| {
        let name = files.name(location.file);
        format!("memory file {}: {reason}", quoted_path(Path::new(&name)))
    };
    let file = files.open(location.file).map_err(describe)?;
    let stat = rustix::fs::fstat(&file.file).map_err(|errno| describe(errno.to_string()))?;
    let slot_offset = u64::from(location.index) * chunk_bytes;
    Ok(FoundLocation {
        file,
        index: location.index,
        bytes: (stat.st_size as u64).saturating_sub(slot_offset),
    })
}

/// Excludes the slots of which the data cannot be read: the memory file is missing, or too short for the pieces
/// (recorded ranges of bytes) in the slot.
///
/// For each such slot with a chunk, `slots` gets the reason, `homes` loses the home of the chunk, and `damage` gets one
/// entry. Also sets `has_chunk` of each slot.
pub(crate) fn exclude_unreadable_slots(
    slots: &mut [MemoryFileSlot],
    pieces: &[StoredPiece],
    homes: &mut [Option<Home>],
    damage: &mut Vec<Damage>,
) {
    let mut chunk_by_slot: HashMap<u32, u32> = HashMap::new();
    for (chunk, home) in homes.iter().enumerate() {
        if let Some(Home::Memory(slot)) = home {
            chunk_by_slot.insert(*slot, chunk as u32);
        }
    }
    for memory_file_slot in slots {
        let slot = memory_file_slot.slot;
        let Some(&chunk) = chunk_by_slot.get(&slot) else {
            continue;
        };
        memory_file_slot.has_chunk = true;
        let chunk_pieces: Vec<Piece> = pieces
            .iter()
            .filter(|stored| stored.record.slab.chunk == chunk)
            .map(|stored| stored.piece)
            .collect();
        let Err(reason) = check_length(&memory_file_slot.found, &chunk_pieces) else {
            continue;
        };
        homes[chunk as usize] = None;
        memory_file_slot.found = Err(reason.clone());
        damage.push(Damage::MemoryFile {
            chunk,
            slot,
            pieces: chunk_pieces.len() as u64,
            bytes: chunk_pieces.iter().map(|piece| u64::from(piece.len)).sum(),
            reason,
        });
    }
}

/// Checks that the memory file of a slot has all bytes of the pieces in the slot. The error says why it does not.
fn check_length(found: &Result<FoundLocation, String>, pieces: &[Piece]) -> Result<(), String> {
    let location = found.as_ref().map_err(String::clone)?;
    let needed_bytes = pieces
        .iter()
        .map(|piece| u64::from(piece.position) + u64::from(piece.len))
        .max()
        .unwrap_or(0);
    if location.bytes < needed_bytes {
        return Err(format!(
            "the memory file has only {} of the {needed_bytes} bytes needed",
            location.bytes
        ));
    }
    Ok(())
}

impl Arena {
    /// At attach: maps the memory files at the addresses of the slots whose bytes they have. A slot is memory for one
    /// chunk, and its location word names its memory file.
    ///
    /// | slot | with a chunk | without a chunk |
    /// |---|---|---|
    /// | its memory file cannot be mapped | is an error | is unusable until the next attach |
    /// | its location is not valid | is unusable until the next attach | counts as a slot of the arena's file |
    pub(crate) fn map_memory_file_slots(
        &self,
        slots: Vec<MemoryFileSlot>,
    ) -> Result<(), ArenaError> {
        for memory_file_slot in slots {
            let MemoryFileSlot {
                slot,
                found,
                has_chunk,
            } = memory_file_slot;
            match found {
                Ok(location) => {
                    let Err(source) = self.map_memory_file_slot(slot, &location) else {
                        continue;
                    };
                    if has_chunk {
                        let path = quoted_path(&self.path);
                        let what = "map one of its memory files";
                        return Err(ArenaError::Io { path, what, source });
                    }
                    self.pool.lock().exclude_slot(slot);
                }
                Err(_) if has_chunk => self.pool.lock().exclude_slot(slot),
                Err(_) => {
                    self.tables
                        .location_word(slot)
                        .store(IN_ARENA_FILE, Ordering::Release);
                }
            }
        }
        Ok(())
    }

    /// Maps the memory file of one slot at the slot's address, and records the slot as one in a memory file.
    fn map_memory_file_slot(&self, slot: u32, location: &FoundLocation) -> Result<(), Errno> {
        let bytes = self.geometry.chunk_bytes;
        let offset = self.geometry.slot_offset(slot);
        let file_offset = u64::from(location.index) * bytes;
        // The memory file may end inside the slot, and keeps its length: the kernel may show it to readers.
        self.map
            .map_file_at(offset, bytes, location.file.file(), file_offset)?;
        // After a crash during a move, the arena's file may have memory for the slot too.
        let _ = free_memory(self.map.file(), offset, bytes);
        self.memory_files
            .add_slot(&location.file, location.index, slot);
        self.pool.lock().adopt_memory_file_slot(slot);
        Ok(())
    }

    /// Removes memory files of an earlier firnd that nothing uses. The caller reopens views before.
    pub fn remove_unused_memory_files(&self) {
        self.memory_files.remove_unused();
    }

    /// Begins a view: the caller is about to let the kernel read a memory file as a file of `len` bytes.
    pub fn begin_view(&self, file: &MemoryFile, len: u64) -> Result<(), Errno> {
        self.memory_files.begin_view(file);
        file.set_len(len)
    }

    /// Reopens the memory file of a view that an earlier firnd began. The error says why it cannot be opened, or why it
    /// is not trusted.
    pub fn reopen_view(&self, number: u16) -> Result<Arc<MemoryFile>, String> {
        let file = self.memory_files.open(number)?;
        self.memory_files.begin_view(&file);
        Ok(file)
    }

    /// Ends a view: the kernel has no descriptor of the memory file any more. Removes the file if it is unused.
    pub fn end_view(&self, file: &Arc<MemoryFile>) {
        self.memory_files.end_view(file);
    }

    /// Returns a memory file to fill with the bytes of one large file that needs `slots` slots: an idle one of that
    /// length, or a new one.
    ///
    /// Returns `None` if `slots` is 0, or more than a memory file can have. [`Arena::end_memory_file`] ends the
    /// filling.
    pub fn begin_memory_file(&self, slots: u32) -> Result<Option<Arc<MemoryFile>>, Errno> {
        if slots == 0 || slots > MEMORY_FILE_SLOTS_MAX {
            return Ok(None);
        }
        if let Some(idle_file) = self.find_idle_file(slots)
            && self.memory_files.begin_filling_again(&idle_file)
        {
            // The memory file still has the length of the file that it stored last, which may be shorter.
            let len = u64::from(slots) * self.geometry.chunk_bytes;
            if let Err(errno) = rustix::fs::ftruncate(&idle_file.file, len) {
                self.memory_files.end_filling(&idle_file);
                return Err(errno);
            }
            return Ok(Some(idle_file));
        }
        let new_file = self.memory_files.create()?;
        self.memory_files.begin_filling(&new_file);
        Ok(Some(new_file))
    }

    /// Finds a memory file with `slots` slots that are all idle, and that no other process may read.
    fn find_idle_file(&self, slots: u32) -> Option<Arc<MemoryFile>> {
        self.memory_files.list().into_iter().find(|file| {
            let slot_count = file.slots.lock().len();
            slot_count == slots as usize && !file.is_shared() && self.is_idle_file(file)
        })
    }

    /// Returns whether each part of a memory file has a slot, and no slot has a chunk.
    fn is_idle_file(&self, file: &MemoryFile) -> bool {
        let slots = file.slots.lock().clone();
        let pool = self.pool.lock();
        slots
            .into_iter()
            .all(|slot| slot.is_some_and(|slot| pool.is_idle_slot(slot)))
    }

    /// Leases part `index` of a memory file (the bytes of one large file) to its writer. The whole part is one slab.
    /// Called by the thread that fills memory files.
    ///
    /// If the part has no slot of the arena yet, a free slot is moved to it; `reserved_slots` slots stay free for other
    /// writers. Returns `None` if no slot or no chunk is available.
    pub fn lease_memory_slot(
        &self,
        file: &Arc<MemoryFile>,
        index: u16,
        reserved_slots: u32,
    ) -> Result<Option<Lease>, Errno> {
        let slot = match file.slot_of_part(index) {
            Some(slot) => slot,
            None => match self.move_slot_to_memory_file(file, index, reserved_slots)? {
                Some(slot) => slot,
                None => return Ok(None),
            },
        };
        let mut pool = self.pool.lock();
        let Some(taken) = pool.lease_idle_slot(slot) else {
            return Ok(None);
        };
        let lease = self.begin_lease(&taken);
        drop(pool);
        Ok(Some(lease))
    }

    /// Moves a free slot, the memory for one chunk, from the arena's file to part `index` of a memory file, and returns
    /// it. Afterwards the memory file is mapped at the slot's address.
    ///
    /// Returns `None` if at most `reserved_slots` slots are free. After an error the slot is free again, in the arena's
    /// file. If that file cannot be mapped there again, the slot is unusable until the next attach.
    fn move_slot_to_memory_file(
        &self,
        file: &Arc<MemoryFile>,
        index: u16,
        reserved_slots: u32,
    ) -> Result<Option<u32>, Errno> {
        let Some(slot) = self.pool.lock().take_free_slot(reserved_slots) else {
            return Ok(None);
        };
        let bytes = self.geometry.chunk_bytes;
        let offset = self.geometry.slot_offset(slot);
        let file_offset = u64::from(index) * bytes;
        let mapped = self
            .grow_file(file, file_offset + bytes)
            .and_then(|()| {
                self.map
                    .map_file_at(offset, bytes, file.file(), file_offset)
            })
            .and_then(|()| self.map.populate_huge(offset, bytes));
        if let Err(errno) = mapped {
            self.undo_slot_move(slot, file, file_offset)?;
            return Err(errno);
        }
        let location = MemoryFileLocation {
            file: file.number,
            index,
        };
        let word = location.to_word(slot, &self.superblock.uuid);
        crash_point();
        self.tables
            .location_word(slot)
            .store(word, Ordering::Release);
        crash_point();
        // After a crash before this, or a failure, both files have memory for the slot; the next attach frees it here.
        let _ = free_memory(self.map.file(), offset, bytes);
        self.memory_files.add_slot(file, index, slot);
        self.pool.lock().record_in_memory_file(slot);
        Ok(Some(slot))
    }

    /// Undoes a move of a slot to `file_offset` of a memory file that failed before the location word was stored: the
    /// slot is in the arena's file again, and free. Fails if the arena's file cannot be mapped there.
    fn undo_slot_move(&self, slot: u32, file: &MemoryFile, file_offset: u64) -> Result<(), Errno> {
        let bytes = self.geometry.chunk_bytes;
        let offset = self.geometry.slot_offset(slot);
        self.map.map_arena_file_at(offset, bytes)?;
        // If this fails, the part keeps its memory, which is used when the part gets a slot.
        let _ = free_memory(file.file(), file_offset, bytes);
        self.pool.lock().restore_free_slot(slot);
        Ok(())
    }

    /// Makes a memory file at least `len` bytes long.
    fn grow_file(&self, file: &MemoryFile, len: u64) -> Result<(), Errno> {
        let size = rustix::fs::fstat(&file.file)?.st_size as u64;
        if size < len {
            rustix::fs::ftruncate(&file.file, len)?;
        }
        Ok(())
    }

    /// Ends the filling of a memory file. Removes it if it is unused.
    pub fn end_memory_file(&self, file: &Arc<MemoryFile>) {
        self.memory_files.end_filling(file);
    }

    /// Returns the memory file of a chunk, and the offset of the chunk in it. Returns `None` if the chunk is in no
    /// memory file.
    pub fn memory_file_of(&self, chunk: u32) -> Option<(Arc<MemoryFile>, u64)> {
        let Some(Home::Memory(slot)) = self.homes.get(chunk) else {
            return None;
        };
        let SlotLocation { file, index } = self.memory_files.slot_location(slot)?;
        Some((file, u64::from(index) * self.geometry.chunk_bytes))
    }

    /// Returns how many bytes of a chunk's slot exist, in whole pages. A memory file may end inside its last slot.
    pub(crate) fn existing_bytes(&self, chunk: u32) -> u64 {
        let chunk_bytes = self.geometry.chunk_bytes;
        let Some((file, chunk_offset)) = self.memory_file_of(chunk) else {
            return chunk_bytes;
        };
        let file_len = rustix::fs::fstat(&file.file).map_or(0, |stat| stat.st_size as u64);
        chunk_bytes.min(file_len.saturating_sub(chunk_offset).next_multiple_of(PAGE))
    }

    /// Moves idle slots back to the arena's file, up to `count`. Returns how many were moved.
    pub fn return_idle_slots(&self, count: usize) -> usize {
        let mut moved_count = 0;
        while moved_count < count {
            let Some(slot) = self.pool.lock().take_any_idle_slot() else {
                break;
            };
            if self.move_slot_to_arena_file(slot) {
                moved_count += 1;
            }
        }
        moved_count
    }

    /// Moves idle slots, which have memory but no chunk, from all memory files back to the arena's file, where any
    /// writer can use them. Returns how many were moved. Called by the thread that fills memory files.
    ///
    /// Memory files with only idle slots are kept for the next large file, up to `keep_bytes` in all. A shared file is
    /// not kept, because its memory must not be used for another file.
    pub fn trim_memory_files(&self, keep_bytes: u64) -> usize {
        self.pool.lock().retry_stuck_slots();
        let mut kept_bytes = 0;
        let mut moved_count = 0;
        for file in self.memory_files.list() {
            let slots: Vec<u32> = file.slots.lock().iter().flatten().copied().collect();
            let file_bytes = slots.len() as u64 * self.geometry.chunk_bytes;
            if file.is_being_filled() {
                continue;
            }
            let fits = kept_bytes + file_bytes <= keep_bytes;
            if !file.is_shared() && fits && self.is_idle_file(&file) {
                kept_bytes += file_bytes;
                continue;
            }
            for slot in slots {
                let is_idle = self.pool.lock().take_idle_slot(slot);
                if is_idle && self.move_slot_to_arena_file(slot) {
                    moved_count += 1;
                }
            }
        }
        moved_count
    }

    /// Moves an idle slot (memory of a memory file without a chunk) back to the arena's file. The caller has taken it
    /// from the pool. Returns false if there is no memory for it now; the slot is tried again later.
    pub(crate) fn move_slot_to_arena_file(&self, slot: u32) -> bool {
        let bytes = self.geometry.chunk_bytes;
        let offset = self.geometry.slot_offset(slot);
        let unshared_location = self
            .memory_files
            .slot_location(slot)
            .filter(|location| !location.file.is_shared());
        if let Some(SlotLocation { file, index }) = &unshared_location {
            // The old memory is freed first, because the new memory may need it. Only in a file that no reader has open
            // may this come first. After a crash here, the location word still names the file. The slot has no chunk,
            // so its bytes do not matter.
            let _ = free_memory(file.file(), u64::from(*index) * bytes, bytes);
        }
        let mapped = self
            .map
            .map_arena_file_at(offset, bytes)
            .and_then(|()| self.map.populate_huge(offset, bytes));
        if let Err(errno) = mapped {
            tracing::warn!(%errno, slot, "no memory to move a part of the arena back into its file; firnd tries again \
                later");
            self.pool.lock().record_stuck_slot(slot);
            return false;
        }
        crash_point();
        self.tables
            .location_word(slot)
            .store(IN_ARENA_FILE, Ordering::Release);
        crash_point();
        self.memory_files.remove_slot(slot);
        self.pool.lock().record_in_arena_file(slot);
        self.callbacks.report_freed();
        true
    }

    /// Returns the figures of the memory files.
    pub fn memory_file_figures(&self) -> MemoryFileFigures {
        let table = self.memory_files.table.lock();
        let file_count = table.files.len() as u32;
        let slot_count = table.slot_locations.len() as u64;
        drop(table);
        MemoryFileFigures {
            files: file_count,
            bytes: slot_count * self.geometry.chunk_bytes,
            idle_bytes: self.pool.lock().idle_slot_count() as u64 * self.geometry.chunk_bytes,
        }
    }
}

/// Frees the memory of a range of a file.
fn free_memory(file: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(), Errno> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, offset, len)
}
