//! Memory files: each stores the bytes of one large file in order and in huge pages, so that they can be mapped and read
//! like an ordinary file.
//!
//! Terms
//! * A *memory file* is a tmpfs file beside the arena's file.
//! * A *slot* is memory for one chunk. Its bytes are in the arena's file, or it is *lent* to a memory file.
//! * For a lent slot, the arena's file has a hole, and the memory file is mapped at the slot's address. So a reader of
//!   that address reads the memory file, and the bytes take memory only once.
//! * A lent slot without a chunk is *idle*.
//! * The *place word* of a slot, in the arena, names the memory file to which the slot is lent
//!   ([`firn_format::memory_file`]).
//! * A memory file is *shared* once the kernel or another process may read it directly. It is a *view* while the kernel
//!   has it open for readers.
//!
//! Promises
//! * A slot is moved between the arena's file and a memory file only while no chunk is in it.
//! * At every instant, the whole slot has memory in the file that its place word names. A move first allocates memory in
//!   the new file, then stores the place word, and then frees the memory in the old file.
//! * The memory of a shared file ([`MemoryFile::reader`], [`Arena::begin_view`]) is never used for the bytes of another
//!   file.
//! * A view keeps its name, even if it has no slot, so that the next firnd finds it.
//!
//! Relies on: one thread creates memory files and fills them. Any thread may return idle slots.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use firn_format::geometry::PAGE;
use firn_format::home::Home;
use firn_format::memory_file::{
    MEMORY_FILE_SLOTS_MAX, MemoryPlace, memory_file_name, memory_file_number,
};
use firn_format::quote::quoted_path;
use firn_format::slab::Class;
use parking_lot::Mutex;
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::ArenaError;
use crate::arena::Arena;
use crate::damage::Damage;
use crate::lease::Lease;
use crate::map::crash_point;
use crate::refs::Stored;
use crate::tables::Tables;

/// An open memory file.
#[derive(Debug)]
pub struct MemoryFile {
    /// Number in the file's name.
    number: u16,
    file: OwnedFd,
    /// The arena's slot that is lent to each part of the file. A part has the size of a chunk.
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
    /// Size of all slots that are lent to them.
    pub bytes: u64,
    /// Size of the lent slots without a chunk, which wait to be used again.
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

/// The open memory files, and the slots that are lent to them.
#[derive(Default)]
struct Table {
    /// The files by number.
    files: BTreeMap<u16, Arc<MemoryFile>>,
    /// The place of each lent slot.
    places: HashMap<u32, SlotPlace>,
}

/// The place of a lent slot: a part of a memory file, of the size of a chunk.
#[derive(Clone, Debug)]
struct SlotPlace {
    file: Arc<MemoryFile>,
    /// Index of the part in the file.
    index: u16,
}

impl MemoryFile {
    /// Returns the number in the file's name.
    pub fn number(&self) -> u16 {
        self.number
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
        let mut done = 0;
        while done < out.len() {
            match rustix::io::pread(&self.file, &mut out[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(done)
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
        let opened = firn_trust::open_private_file(dir, Path::new(&name), OFlags::RDWR);
        let file = opened.map_err(|error| error.to_string())?;
        let file = self.add_to_table(number, file);
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

    /// Creates a memory file without slots, with the lowest free number. Fails with ENOSPC if no number is free.
    fn create(&self) -> Result<Arc<MemoryFile>, Errno> {
        let number = {
            let table = self.table.lock();
            (0..u16::MAX).find(|number| !table.files.contains_key(number))
        };
        let number = number.ok_or(Errno::NOSPC)?;
        let name = self.name(number);
        crash_point();
        let create = || {
            firn_trust::create_private_file(self.dir()?, Path::new(&name), OFlags::RDWR)
                .map_err(|error| error.errno())
        };
        let file = match create() {
            // An earlier arena of this name was removed, and left this file.
            Err(Errno::EXIST) => {
                rustix::fs::unlinkat(self.dir()?, &name, AtFlags::empty())?;
                create()?
            }
            result => result?,
        };
        Ok(self.add_to_table(number, file))
    }

    /// Records that `slot` is lent to a memory file, as its part `index`.
    pub(crate) fn add_slot(&self, file: &Arc<MemoryFile>, index: u16, slot: u32) {
        let mut slots = file.slots.lock();
        if slots.len() <= usize::from(index) {
            slots.resize(usize::from(index) + 1, None);
        }
        slots[usize::from(index)] = Some(slot);
        drop(slots);
        let file = Arc::clone(file);
        self.table
            .lock()
            .places
            .insert(slot, SlotPlace { file, index });
    }

    /// Returns the place of a slot in a memory file, or `None` if the slot is in the arena's file.
    fn place_of(&self, slot: u32) -> Option<SlotPlace> {
        self.table.lock().places.get(&slot).cloned()
    }

    /// Records that a slot is in the arena's file again. Removes the memory file if it is unused.
    fn remove_slot(&self, slot: u32) {
        let mut table = self.table.lock();
        let Some(SlotPlace { file, index }) = table.places.remove(&slot) else {
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
        let names = firn_trust::names_in(dir).unwrap_or_default();
        let numbers = names
            .iter()
            .filter_map(|name| memory_file_number(&self.arena_name, name));
        for number in numbers {
            let is_used = {
                let table = self.table.lock();
                table
                    .files
                    .get(&number)
                    .is_some_and(|file| !file.has_no_slot() || file.must_stay())
            };
            if !is_used {
                self.table.lock().files.remove(&number);
                self.unlink(number);
            }
        }
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

/// A lent slot, as an attach or a check reads it from the arena.
pub(crate) struct LentSlot {
    pub(crate) slot: u32,
    /// The place of the slot. The error says why its place word is not valid, or why the memory file cannot be used.
    pub(crate) place: Result<LentSlotPlace, String>,
    /// Whether a chunk has its data in the slot.
    has_chunk: bool,
}

/// The place of a lent slot, as an attach or a check finds it.
pub(crate) struct LentSlotPlace {
    pub(crate) file: Arc<MemoryFile>,
    pub(crate) index: u16,
    /// Number of bytes of the slot that the file has. The file may end inside the slot.
    bytes: u64,
}

/// Returns the lent slots according to their place words. Opens their memory files.
pub(crate) fn read_lent_slots(
    tables: &Tables,
    files: &MemoryFiles,
    uuid: &[u8; 16],
) -> Vec<LentSlot> {
    let chunk_bytes = tables.geometry().chunk_bytes;
    let open_place = |slot, word| {
        let place = MemoryPlace::from_word(word, slot, uuid)
            .ok_or_else(|| format!("place word {word:#018x} is invalid for slot {slot}"))?;
        let name = files.name(place.file);
        let error =
            |reason: String| format!("memory file {}: {reason}", quoted_path(Path::new(&name)));
        let file = files.open(place.file).map_err(error)?;
        let stat = rustix::fs::fstat(&file.file).map_err(|errno| error(errno.to_string()))?;
        let start = u64::from(place.index) * chunk_bytes;
        let bytes = (stat.st_size as u64).saturating_sub(start);
        let index = place.index;
        Ok(LentSlotPlace { file, index, bytes })
    };
    (0..tables.geometry().chunk_count)
        .filter_map(|slot| {
            let word = tables.memory_place(slot).load(Ordering::Acquire);
            let place = (word != 0).then(|| open_place(slot, word))?;
            Some(LentSlot {
                slot,
                place,
                has_chunk: false,
            })
        })
        .collect()
}

/// Finds the chunks whose memory file is missing or too short for their pieces. Removes their homes from `homes`, and adds
/// the pieces in them to `damage`.
pub(crate) fn report_unreadable_slots(
    found: &mut [LentSlot],
    pieces: &[Stored],
    homes: &mut [Option<Home>],
    damage: &mut Vec<Damage>,
) {
    let mut chunk_of: HashMap<u32, u32> = HashMap::new();
    for (chunk, home) in homes.iter().enumerate() {
        if let Some(Home::Memory(slot)) = home {
            chunk_of.insert(*slot, chunk as u32);
        }
    }
    for found_slot in found {
        let LentSlot { slot, place, .. } = found_slot;
        let Some(&chunk) = chunk_of.get(slot) else {
            continue;
        };
        found_slot.has_chunk = true;
        let pieces_of_chunk = || {
            pieces
                .iter()
                .filter(|stored| stored.record.slab.chunk == chunk)
        };
        let end = |stored: &Stored| u64::from(stored.piece.position) + u64::from(stored.piece.len);
        let needed_bytes = pieces_of_chunk().map(end).max().unwrap_or(0);
        let reason = match place {
            Ok(place) if place.bytes >= needed_bytes => continue,
            Ok(place) => format!(
                "the memory file has only {} of the {needed_bytes} bytes needed",
                place.bytes
            ),
            Err(reason) => reason.clone(),
        };
        homes[chunk as usize] = None;
        *place = Err(reason.clone());
        damage.push(Damage::MemoryFile {
            chunk,
            slot: *slot,
            pieces: pieces_of_chunk().count() as u64,
            bytes: pieces_of_chunk()
                .map(|stored| u64::from(stored.piece.len))
                .sum(),
            reason,
        });
    }
}

impl Arena {
    /// At attach: maps the memory files at the addresses of the lent slots.
    ///
    /// | lent slot | without a chunk | with a chunk |
    /// |---|---|---|
    /// | its place is not valid | counts as a slot of the arena's file | is not used by this firnd |
    /// | its memory file cannot be mapped | is not used by this firnd | is an error |
    pub(crate) fn map_lent_slots(
        &self,
        found: Vec<LentSlot>,
        homes: &[Option<Home>],
    ) -> Result<(), ArenaError> {
        let bytes = self.geometry.chunk_bytes;
        let used: HashSet<u32> = homes
            .iter()
            .filter_map(|home| match home {
                Some(Home::Memory(slot)) => Some(*slot),
                _ => None,
            })
            .collect();
        for LentSlot {
            slot,
            place,
            has_chunk,
        } in found
        {
            let offset = self.geometry.slot_offset(slot);
            let Ok(place) = place else {
                if has_chunk {
                    self.pool.lock().lose_slot(slot);
                } else {
                    self.tables.memory_place(slot).store(0, Ordering::Release);
                }
                continue;
            };
            let start = u64::from(place.index) * bytes;
            // The memory file may end inside the slot, and keeps its length: the kernel may show it to readers.
            let mapped = self.map.map_over(offset, bytes, place.file.file(), start);
            if let Err(source) = mapped {
                if used.contains(&slot) {
                    let path = quoted_path(&self.path);
                    let what = "map one of its memory files";
                    return Err(ArenaError::Io { path, what, source });
                }
                self.pool.lock().lose_slot(slot);
                continue;
            }
            // After a crash during a move, the arena's file may have memory for the slot too.
            let _ = free_memory(self.map.file(), offset, bytes);
            self.memory_files.add_slot(&place.file, place.index, slot);
            self.pool.lock().adopt_lent_slot(slot);
        }
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

    /// Reopens the memory file of a view that an earlier firnd began. The error says why it cannot be opened, or why it is
    /// not trusted.
    pub fn reopen_view(&self, number: u16) -> Result<Arc<MemoryFile>, String> {
        let file = self.memory_files.open(number)?;
        self.memory_files.begin_view(&file);
        Ok(file)
    }

    /// Ends a view: the kernel has no descriptor of the memory file any more. Removes the file if it is unused.
    pub fn end_view(&self, file: &Arc<MemoryFile>) {
        self.memory_files.end_view(file);
    }

    /// Returns a memory file to fill with a file that needs `slots` slots: an idle one of that length, or a new one.
    ///
    /// Returns `None` if `slots` is 0, or more than a memory file can have. [`Arena::end_memory_file`] ends the filling.
    pub fn begin_memory_file(&self, slots: u32) -> Result<Option<Arc<MemoryFile>>, Errno> {
        if slots == 0 || slots > MEMORY_FILE_SLOTS_MAX {
            return Ok(None);
        }
        let idle = self.memory_files.list().into_iter().find(|file| {
            let has_that_length = file.slots.lock().len() == slots as usize;
            has_that_length && !file.is_shared() && self.is_idle_file(file)
        });
        if let Some(file) = idle.filter(|file| self.memory_files.begin_filling_again(file)) {
            let len = u64::from(slots) * self.geometry.chunk_bytes;
            if let Err(errno) = rustix::fs::ftruncate(&file.file, len) {
                self.memory_files.end_filling(&file);
                return Err(errno);
            }
            return Ok(Some(file));
        }
        let file = self.memory_files.create()?;
        self.memory_files.begin_filling(&file);
        Ok(Some(file))
    }

    /// Returns whether no slot of a memory file holds a chunk.
    fn is_idle_file(&self, file: &MemoryFile) -> bool {
        let slots = file.slots.lock().clone();
        let pool = self.pool.lock();
        slots
            .into_iter()
            .all(|slot| slot.is_some_and(|slot| pool.is_idle_slot(slot)))
    }

    /// Leases part `index` of a memory file, as one slab. Called by the thread that fills memory files.
    ///
    /// If the part has no slot yet, a free slot is lent to it, unless at most `spare` slots are free. Returns `None` if no
    /// slot is available.
    pub fn lease_memory_slot(
        &self,
        file: &Arc<MemoryFile>,
        index: u16,
        spare: u32,
    ) -> Result<Option<Lease>, Errno> {
        let existing = file.slots.lock().get(usize::from(index)).copied().flatten();
        let slot = match existing {
            Some(slot) => slot,
            None => match self.lend_slot(file, index, spare)? {
                Some(slot) => slot,
                None => return Ok(None),
            },
        };
        let mut pool = self.pool.lock();
        let Some(taken) = pool.take_idle_chunk(slot) else {
            return Ok(None);
        };
        let lease = self.begin_lease(Class::Whole, &taken);
        drop(pool);
        Ok(Some(lease))
    }

    /// Moves a free slot from the arena's file to part `index` of a memory file. Returns the slot. Returns `None` if at
    /// most `spare` slots are free. After an error the slot is in the arena's file, and free.
    fn lend_slot(
        &self,
        file: &Arc<MemoryFile>,
        index: u16,
        spare: u32,
    ) -> Result<Option<u32>, Errno> {
        let Some(slot) = self.pool.lock().take_slot_to_lend(spare) else {
            return Ok(None);
        };
        let bytes = self.geometry.chunk_bytes;
        let offset = self.geometry.slot_offset(slot);
        let start = u64::from(index) * bytes;
        let moved = self
            .grow_file(file, start + bytes)
            .and_then(|()| self.map.map_over(offset, bytes, file.file(), start))
            .and_then(|()| self.map.populate_huge(offset, bytes));
        if let Err(errno) = moved {
            // The place word still says that the slot is in the arena's file.
            self.map.map_back(offset, bytes)?;
            let _ = free_memory(file.file(), start, bytes);
            self.pool.lock().put_free_slot(slot);
            return Err(errno);
        }
        let place = MemoryPlace {
            file: file.number,
            index,
        };
        let word = place.to_word(slot, &self.superblock.uuid);
        crash_point();
        self.tables
            .memory_place(slot)
            .store(word, Ordering::Release);
        crash_point();
        // A crash before this leaves memory in both files; the next attach frees it.
        let _ = free_memory(self.map.file(), offset, bytes);
        self.memory_files.add_slot(file, index, slot);
        self.pool.lock().put_lent_slot(slot);
        Ok(Some(slot))
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
        let SlotPlace { file, index } = self.memory_files.place_of(slot)?;
        Some((file, u64::from(index) * self.geometry.chunk_bytes))
    }

    /// Returns how many bytes of a chunk's slot exist, in whole pages. A memory file may end inside its last slot.
    pub(crate) fn existing_bytes(&self, chunk: u32) -> u64 {
        let chunk_bytes = self.geometry.chunk_bytes;
        let Some((file, start)) = self.memory_file_of(chunk) else {
            return chunk_bytes;
        };
        let size = rustix::fs::fstat(&file.file).map_or(0, |stat| stat.st_size as u64);
        chunk_bytes.min(size.saturating_sub(start).next_multiple_of(PAGE))
    }

    /// Moves idle slots back to the arena's file, up to `count`. Returns how many were moved.
    pub fn return_idle_slots(&self, count: usize) -> usize {
        let mut returned = 0;
        while returned < count {
            let Some(slot) = self.pool.lock().take_idle_slot() else {
                break;
            };
            if self.return_slot(slot) {
                returned += 1;
            }
        }
        returned
    }

    /// Moves idle slots of all memory files back to the arena's file. Returns how many were moved. Called by the thread
    /// that fills memory files.
    ///
    /// Memory files whose slots are all idle are kept for the next large file, up to `keep_bytes` in all.
    pub fn trim_memory_files(&self, keep_bytes: u64) -> usize {
        self.pool.lock().retry_stuck_slots();
        let mut kept_bytes = 0;
        let mut returned = 0;
        for file in self.memory_files.list() {
            let slots: Vec<u32> = file.slots.lock().iter().flatten().copied().collect();
            let bytes = slots.len() as u64 * self.geometry.chunk_bytes;
            if file.is_being_filled() {
                continue;
            }
            let fits = kept_bytes + bytes <= keep_bytes;
            if !file.is_shared() && fits && self.is_idle_file(&file) {
                kept_bytes += bytes;
                continue;
            }
            for slot in slots {
                let is_taken = self.pool.lock().take_this_idle_slot(slot);
                returned += usize::from(is_taken && self.return_slot(slot));
            }
        }
        returned
    }

    /// Moves an idle slot, which the caller has taken from the pool, back to the arena's file. Returns false if there is no
    /// memory for it now; the slot is tried again later.
    pub(crate) fn return_slot(&self, slot: u32) -> bool {
        let bytes = self.geometry.chunk_bytes;
        let offset = self.geometry.slot_offset(slot);
        let place = self.memory_files.place_of(slot);
        let unshared_place = place.filter(|place| !place.file.is_shared());
        if let Some(SlotPlace { file, index }) = &unshared_place {
            // The old memory is freed first, because the new memory may need it. No reader has a file that is not shared.
            let _ = free_memory(file.file(), u64::from(*index) * bytes, bytes);
        }
        let moved = self
            .map
            .map_back(offset, bytes)
            .and_then(|()| self.map.populate_huge(offset, bytes));
        if let Err(errno) = moved {
            tracing::warn!(%errno, slot, "no memory to move a slot back from a memory file; the move is tried again later");
            self.pool.lock().put_stuck_slot(slot);
            return false;
        }
        crash_point();
        self.tables.memory_place(slot).store(0, Ordering::Release);
        crash_point();
        self.memory_files.remove_slot(slot);
        self.pool.lock().put_returned_slot(slot);
        self.listeners.report_freed();
        true
    }

    /// Returns the figures of the memory files.
    pub fn memory_file_figures(&self) -> MemoryFileFigures {
        let table = self.memory_files.table.lock();
        let (files, slots) = (table.files.len() as u32, table.places.len() as u64);
        drop(table);
        MemoryFileFigures {
            files,
            bytes: slots * self.geometry.chunk_bytes,
            idle_bytes: self.pool.lock().idle_slot_count() as u64 * self.geometry.chunk_bytes,
        }
    }
}

/// Frees the memory of a range of a file.
fn free_memory(file: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(), Errno> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, offset, len)
}
