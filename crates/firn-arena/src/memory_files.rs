//! Memory files: each has the bytes of one large file in order, in huge pages, and is that file's storage.
//!
//! A memory file is a tmpfs file beside the arena. Its bytes lie in *slots* of the arena's memory: for each slot that a memory
//! file has, the arena's own file has a hole, and the memory file is mapped where the slot was. A reader of the slot's
//! address reads the memory file, and memory counts once. The word of a slot says where its bytes are
//! ([`firn_format::memory_file`]).
//!
//! Promises
//! * A slot changes its place only while no chunk is in it.
//! * A slot is in the arena or in a memory file, whole, at every instant: its word is stored after the new place has memory
//!   and before the old one loses it.
//! * The bytes of a memory file that was given away ([`MemoryFile::reader`], [`Arena::begin_view`]) are not used for another file.
//! * A memory file keeps its name while it is a view, even without a slot: the next firnd finds it by that.
//!
//! Relies on: one thread makes memory files and fills them. Any thread may return idle slots.

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
use crate::map::probe;
use crate::refs::Stored;
use crate::tables::Tables;

/// A memory file that is open.
#[derive(Debug)]
pub struct MemoryFile {
    number: u16,
    file: OwnedFd,
    /// The slots that it has, by index.
    slots: Mutex<Vec<Option<u32>>>,
    /// The kernel or another process may read it: its bytes stay those of one file.
    is_given: AtomicBool,
    /// Slots are put into it, so it stays while it has none. Changes under the lock of the table.
    is_being_filled: AtomicBool,
    /// The kernel reads it by itself, so it stays while it has no slot. Changes under the lock of the table.
    is_view: AtomicBool,
}

/// Slots in memory files, and the rest of what they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryFileFigures {
    /// Memory files.
    pub files: u32,
    /// Bytes of their slots.
    pub bytes: u64,
    /// Bytes of those slots that hold nothing and wait to be used again.
    pub idle_bytes: u64,
}

/// The memory files of an arena.
pub(crate) struct MemoryFiles {
    /// Where the arena lies; none: it cannot be opened, and there are none.
    dir: Option<OwnedFd>,
    arena_name: OsString,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    files: BTreeMap<u16, Arc<MemoryFile>>,
    by_slot: HashMap<u32, SlotOfFile>,
}

/// One slot of a memory file.
#[derive(Clone, Debug)]
struct SlotOfFile {
    file: Arc<MemoryFile>,
    index: u16,
}

impl MemoryFile {
    /// The number in its name.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// The file, to be mapped or read.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Makes the file as long as the file whose bytes it has. What it holds of the arena must not lie beyond.
    pub fn set_len(&self, len: u64) -> Result<(), Errno> {
        if rustix::fs::fstat(&self.file)?.st_size as u64 == len {
            return Ok(());
        }
        rustix::fs::ftruncate(&self.file, len)
    }

    /// Gives a range memory, without a change of its bytes.
    pub fn reserve(&self, at: u64, len: u64) -> Result<(), Errno> {
        rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, at, len)
    }

    /// Stores bytes that its readers see.
    pub fn store(&self, mut at: u64, mut bytes: &[u8]) -> Result<(), Errno> {
        while !bytes.is_empty() {
            match rustix::io::pwrite(&self.file, bytes, at) {
                Ok(0) => return Err(Errno::IO),
                Ok(n) => {
                    bytes = &bytes[n..];
                    at += n as u64;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Reads bytes; less than asked only at its end.
    pub fn load(&self, at: u64, out: &mut [u8]) -> Result<usize, Errno> {
        let mut done = 0;
        while done < out.len() {
            match rustix::io::pread(&self.file, &mut out[done..], at + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(done)
    }

    /// A descriptor that can only read it, for another process: from here on its bytes stay those of one file.
    pub fn reader(&self) -> Result<OwnedFd, Errno> {
        use std::os::fd::AsRawFd;
        self.is_given.store(true, Ordering::Release);
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
    }

    fn is_being_filled(&self) -> bool {
        self.is_being_filled.load(Ordering::Acquire)
    }

    /// Whether it has a use beside its slots.
    fn is_held(&self) -> bool {
        self.is_being_filled() || self.is_view.load(Ordering::Acquire)
    }

    fn is_empty(&self) -> bool {
        self.slots.lock().iter().all(Option::is_none)
    }

    /// Whether the kernel or another process may read it.
    pub fn is_given(&self) -> bool {
        self.is_given.load(Ordering::Acquire)
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

    /// Opens a memory file that is there, if no other user could have made it.
    pub(crate) fn open(&self, number: u16) -> Result<Arc<MemoryFile>, String> {
        if let Some(known) = self.table.lock().files.get(&number) {
            return Ok(Arc::clone(known));
        }
        let dir = self.dir().map_err(|errno| errno.to_string())?;
        let name = self.name(number);
        let opened = firn_trust::open_private_file(dir, Path::new(&name), OFlags::RDWR);
        let file = opened.map_err(|error| error.to_string())?;
        let file = self.enter(number, file);
        // An earlier firnd may have given it away.
        file.is_given.store(true, Ordering::Release);
        Ok(file)
    }

    fn enter(&self, number: u16, file: OwnedFd) -> Arc<MemoryFile> {
        let file = Arc::new(MemoryFile {
            number,
            file,
            slots: Mutex::default(),
            is_given: AtomicBool::new(false),
            is_being_filled: AtomicBool::new(false),
            is_view: AtomicBool::new(false),
        });
        self.table.lock().files.insert(number, Arc::clone(&file));
        file
    }

    /// Makes a memory file without slots, under the lowest number that is free.
    fn create(&self) -> Result<Arc<MemoryFile>, Errno> {
        let number = {
            let table = self.table.lock();
            (0..u16::MAX).find(|number| !table.files.contains_key(number))
        };
        let number = number.ok_or(Errno::NOSPC)?;
        let name = self.name(number);
        probe();
        let create = || {
            firn_trust::create_private_file(self.dir()?, Path::new(&name), OFlags::RDWR)
                .map_err(|error| error.errno())
        };
        let file = match create() {
            // What an arena left that is gone.
            Err(Errno::EXIST) => {
                rustix::fs::unlinkat(self.dir()?, &name, AtFlags::empty())?;
                create()?
            }
            other => other?,
        };
        Ok(self.enter(number, file))
    }

    /// Enters that a memory file has a slot.
    pub(crate) fn note_slot(&self, file: &Arc<MemoryFile>, index: u16, slot: u32) {
        let mut slots = file.slots.lock();
        if slots.len() <= usize::from(index) {
            slots.resize(usize::from(index) + 1, None);
        }
        slots[usize::from(index)] = Some(slot);
        drop(slots);
        let file = Arc::clone(file);
        self.table
            .lock()
            .by_slot
            .insert(slot, SlotOfFile { file, index });
    }

    fn place(&self, slot: u32) -> Option<SlotOfFile> {
        self.table.lock().by_slot.get(&slot).cloned()
    }

    /// A slot is in the arena again; a memory file without slots is removed.
    fn forget_slot(&self, slot: u32) {
        let mut table = self.table.lock();
        let Some(SlotOfFile { file, index }) = table.by_slot.remove(&slot) else {
            return;
        };
        file.slots.lock()[usize::from(index)] = None;
        self.remove_if_unused(&mut table, &file);
    }

    /// Removes a memory file that has no slot and gets none. Under the lock of the table: its number may be used again at once.
    fn remove_if_unused(&self, table: &mut Table, file: &Arc<MemoryFile>) {
        let known = table.files.get(&file.number);
        let is_known = known.is_some_and(|known| Arc::ptr_eq(known, file));
        if is_known && file.is_empty() && !file.is_held() {
            table.files.remove(&file.number);
            self.unlink(file.number);
        }
    }

    fn begin_filling(&self, file: &MemoryFile) {
        let _table = self.table.lock();
        file.is_being_filled.store(true, Ordering::Release);
    }

    /// The same, unless it was removed meanwhile.
    fn begin_filling_again(&self, file: &Arc<MemoryFile>) -> bool {
        let table = self.table.lock();
        let known = table.files.get(&file.number);
        let is_known = known.is_some_and(|known| Arc::ptr_eq(known, file));
        if is_known {
            file.is_being_filled.store(true, Ordering::Release);
        }
        is_known
    }

    fn end_filling(&self, file: &Arc<MemoryFile>) {
        let mut table = self.table.lock();
        file.is_being_filled.store(false, Ordering::Release);
        self.remove_if_unused(&mut table, file);
    }

    fn begin_view(&self, file: &MemoryFile) {
        let _table = self.table.lock();
        file.is_given.store(true, Ordering::Release);
        file.is_view.store(true, Ordering::Release);
    }

    fn end_view(&self, file: &Arc<MemoryFile>) {
        let mut table = self.table.lock();
        file.is_view.store(false, Ordering::Release);
        self.remove_if_unused(&mut table, file);
    }

    fn unlink(&self, number: u16) {
        let removed = self
            .dir()
            .and_then(|dir| rustix::fs::unlinkat(dir, self.name(number), AtFlags::empty()));
        if let Err(error) = removed {
            tracing::warn!(%error, number, "cannot remove a memory file");
        }
    }

    /// Removes the memory files beside the arena that have no slot of it and are no view.
    pub(crate) fn remove_unused(&self) {
        let Ok(dir) = self.dir() else { return };
        let numbers = firn_trust::names_in(dir).unwrap_or_default();
        let numbers = numbers
            .iter()
            .filter_map(|name| memory_file_number(&self.arena_name, name));
        for number in numbers {
            let is_used = {
                let table = self.table.lock();
                table
                    .files
                    .get(&number)
                    .is_some_and(|file| !file.is_empty() || file.is_held())
            };
            if !is_used {
                self.table.lock().files.remove(&number);
                self.unlink(number);
            }
        }
    }

    fn all(&self) -> Vec<Arc<MemoryFile>> {
        self.table.lock().files.values().map(Arc::clone).collect()
    }
}

/// Removes all memory files of an arena, which is removed already.
pub fn remove_memory_files(arena: &Path) {
    MemoryFiles::new(arena).remove_unused();
}

/// A slot that its word says to be in a memory file, and the place, or what is wrong with it.
pub(crate) struct FoundSlot {
    pub(crate) slot: u32,
    pub(crate) place: Result<FoundPlace, String>,
}

/// A place that was found at attach.
pub(crate) struct FoundPlace {
    pub(crate) file: Arc<MemoryFile>,
    pub(crate) index: u16,
    /// Bytes of the slot that the file has.
    bytes: u64,
}

/// The slots in memory files, as their words say.
pub(crate) fn read_places(tables: &Tables, files: &MemoryFiles, uuid: &[u8; 16]) -> Vec<FoundSlot> {
    let chunk_bytes = tables.geometry().chunk_bytes;
    let find = |slot, word| {
        let place = MemoryPlace::from_word(word, slot, uuid)
            .ok_or_else(|| format!("word {word:#018x} is no place of slot {slot}"))?;
        let name = files.name(place.file);
        let named = |why: String| format!("memory file {}: {why}", quoted_path(Path::new(&name)));
        let file = files.open(place.file).map_err(named)?;
        let stat = rustix::fs::fstat(&file.file).map_err(|errno| named(errno.to_string()))?;
        let start = u64::from(place.index) * chunk_bytes;
        let bytes = (stat.st_size as u64).saturating_sub(start);
        let index = place.index;
        Ok(FoundPlace { file, index, bytes })
    };
    (0..tables.geometry().chunk_count)
        .filter_map(|slot| {
            let word = tables.memory_place(slot).load(Ordering::Acquire);
            let place = (word != 0).then(|| find(slot, word))?;
            Some(FoundSlot { slot, place })
        })
        .collect()
}

/// Takes the homes of chunks away whose bytes their memory file does not have, and names what is in them.
pub(crate) fn report_unreadable_slots(
    found: &mut [FoundSlot],
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
    for FoundSlot { slot, place } in found {
        let Some(&chunk) = chunk_of.get(slot) else {
            continue;
        };
        let of_chunk = || pieces.iter().filter(|stored| stored.at.slab.chunk == chunk);
        let end = |stored: &Stored| u64::from(stored.piece.position) + u64::from(stored.piece.len);
        let needed = of_chunk().map(end).max().unwrap_or(0);
        let why = match place {
            Ok(place) if place.bytes >= needed => continue,
            Ok(place) => format!(
                "the memory file has {} of {needed} bytes of it",
                place.bytes
            ),
            Err(why) => why.clone(),
        };
        homes[chunk as usize] = None;
        *place = Err(why.clone());
        damage.push(Damage::MemoryFile {
            chunk,
            slot: *slot,
            pieces: of_chunk().count() as u64,
            bytes: of_chunk().map(|stored| u64::from(stored.piece.len)).sum(),
            why,
        });
    }
}

impl Arena {
    /// At attach: maps the slots that memory files have, and takes them out of the free ones. Slots whose place is unknown
    /// are lost to this arena while it lives, unless they are without a chunk.
    pub(crate) fn adopt_memory_files(
        &self,
        found: Vec<FoundSlot>,
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
        for FoundSlot { slot, place } in found {
            let at = self.geometry.slot_offset(slot);
            let Ok(place) = place else {
                self.pool.lock().lose_slot(slot);
                continue;
            };
            let start = u64::from(place.index) * bytes;
            // The file keeps its length, which the kernel may show to readers: nothing is put into the slot again.
            let mapped = self.map.map_over(at, bytes, place.file.file(), start);
            if let Err(source) = mapped {
                if used.contains(&slot) {
                    let path = quoted_path(&self.path);
                    let what = "map one of its memory files";
                    return Err(ArenaError::Io { path, what, source });
                }
                self.pool.lock().lose_slot(slot);
                continue;
            }
            // It may have memory there, too, by a crash between the two.
            let _ = punch(self.map.file(), at, bytes);
            self.memory_files.note_slot(&place.file, place.index, slot);
            self.pool.lock().adopt_lent_slot(slot);
        }
        Ok(())
    }

    /// Removes memory files that an earlier firnd left and that nothing uses. To be called once views are reopened.
    pub fn remove_unused_memory_files(&self) {
        self.memory_files.remove_unused();
    }

    /// The kernel is about to read a memory file by itself, as a file of `len` bytes: from here on its bytes stay those of
    /// that file.
    pub fn begin_view(&self, file: &MemoryFile, len: u64) -> Result<(), Errno> {
        self.memory_files.begin_view(file);
        file.set_len(len)
    }

    /// The memory file that the kernel reads since an earlier firnd; `Err`: why it is not believed.
    pub fn reopen_view(&self, number: u16) -> Result<Arc<MemoryFile>, String> {
        let file = self.memory_files.open(number)?;
        self.memory_files.begin_view(&file);
        Ok(file)
    }

    /// No descriptor is left by which the kernel reads a memory file; it is removed if it has no slot.
    pub fn end_view(&self, file: &Arc<MemoryFile>) {
        self.memory_files.end_view(file);
    }

    /// A memory file for the bytes of a file that needs `slots` slots: one that was used before, if an idle one is as long.
    /// `None`: `slots` is more than a memory file can have.
    pub fn begin_memory_file(&self, slots: u32) -> Result<Option<Arc<MemoryFile>>, Errno> {
        if slots == 0 || slots > MEMORY_FILE_SLOTS_MAX {
            return Ok(None);
        }
        let idle = self.memory_files.all().into_iter().find(|file| {
            let is_as_long = file.slots.lock().len() == slots as usize;
            is_as_long && !file.is_given() && self.is_idle_file(file)
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

    /// Whether all slots of a memory file hold nothing.
    fn is_idle_file(&self, file: &MemoryFile) -> bool {
        let slots = file.slots.lock().clone();
        let pool = self.pool.lock();
        slots
            .into_iter()
            .all(|slot| slot.is_some_and(|slot| pool.is_idle_slot(slot)))
    }

    /// Leases slot `index` of a memory file, which gets that slot if it has none, while more than `spare` slots of memory are
    /// free. `None`: there is no such slot. To be called by the thread that makes memory files.
    pub fn lease_memory_slot(
        &self,
        file: &Arc<MemoryFile>,
        index: u16,
        spare: u32,
    ) -> Result<Option<Lease>, Errno> {
        let known = file.slots.lock().get(usize::from(index)).copied().flatten();
        let slot = match known {
            Some(slot) => slot,
            None => match self.add_slot(file, index, spare)? {
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

    /// Takes a slot out of the arena's file and puts it into a memory file.
    fn add_slot(
        &self,
        file: &Arc<MemoryFile>,
        index: u16,
        spare: u32,
    ) -> Result<Option<u32>, Errno> {
        let Some(slot) = self.pool.lock().take_slot_to_lend(spare) else {
            return Ok(None);
        };
        let bytes = self.geometry.chunk_bytes;
        let at = self.geometry.slot_offset(slot);
        let start = u64::from(index) * bytes;
        let placed = self
            .grow_file(file, start + bytes)
            .and_then(|()| self.map.map_over(at, bytes, file.file(), start))
            .and_then(|()| self.map.populate_huge(at, bytes));
        if let Err(errno) = placed {
            // The arena's file still has the slot.
            self.map.map_back(at, bytes)?;
            let _ = punch(file.file(), start, bytes);
            self.pool.lock().keep_slot(slot);
            return Err(errno);
        }
        let place = MemoryPlace {
            file: file.number,
            index,
        };
        let word = place.to_word(slot, &self.superblock.uuid);
        probe();
        self.tables
            .memory_place(slot)
            .store(word, Ordering::Release);
        probe();
        // Until this is done the slot has memory twice; an attach does it again.
        let _ = punch(self.map.file(), at, bytes);
        self.memory_files.note_slot(file, index, slot);
        self.pool.lock().lend_slot(slot);
        Ok(Some(slot))
    }

    fn grow_file(&self, file: &MemoryFile, len: u64) -> Result<(), Errno> {
        let size = rustix::fs::fstat(&file.file)?.st_size as u64;
        if size < len {
            rustix::fs::ftruncate(&file.file, len)?;
        }
        Ok(())
    }

    /// A memory file gets no more slots; it goes if it has none.
    pub fn end_memory_file(&self, file: &Arc<MemoryFile>) {
        self.memory_files.end_filling(file);
    }

    /// The memory file that a chunk is in, and where the chunk begins there.
    pub fn memory_file_of(&self, chunk: u32) -> Option<(Arc<MemoryFile>, u64)> {
        let Some(Home::Memory(slot)) = self.homes.get(chunk) else {
            return None;
        };
        let SlotOfFile { file, index } = self.memory_files.place(slot)?;
        Some((file, u64::from(index) * self.geometry.chunk_bytes))
    }

    /// Bytes of a chunk's slot that there are, in whole pages: a memory file may end in its last slot.
    pub(crate) fn bytes_there(&self, chunk: u32) -> u64 {
        let all = self.geometry.chunk_bytes;
        let Some((file, start)) = self.memory_file_of(chunk) else {
            return all;
        };
        let size = rustix::fs::fstat(&file.file).map_or(0, |stat| stat.st_size as u64);
        all.min(size.saturating_sub(start).next_multiple_of(PAGE))
    }

    /// Gives idle slots back to the arena's file until `count` are, or none is left; returns how many were.
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

    /// Gives back the idle slots of all memory files but whole ones of `keep_bytes` in all, which are used again. To be called
    /// by the thread that makes memory files. Returns how many slots came back.
    pub fn trim_memory_files(&self, keep_bytes: u64) -> usize {
        self.pool.lock().retry_stuck_slots();
        let mut kept = 0;
        let mut returned = 0;
        for file in self.memory_files.all() {
            let slots: Vec<u32> = file.slots.lock().iter().flatten().copied().collect();
            let bytes = slots.len() as u64 * self.geometry.chunk_bytes;
            if file.is_being_filled() {
                continue;
            }
            if !file.is_given() && kept + bytes <= keep_bytes && self.is_idle_file(&file) {
                kept += bytes;
                continue;
            }
            for slot in slots {
                let is_idle = self.pool.lock().take_this_idle_slot(slot);
                returned += usize::from(is_idle && self.return_slot(slot));
            }
        }
        returned
    }

    /// Puts a slot that was taken out of the idle ones back into the arena's file. False: there is no memory for it now.
    pub(crate) fn return_slot(&self, slot: u32) -> bool {
        let bytes = self.geometry.chunk_bytes;
        let at = self.geometry.slot_offset(slot);
        let place = self.memory_files.place(slot);
        let unused = place.filter(|place| !place.file.is_given());
        if let Some(SlotOfFile { file, index }) = &unused {
            // First, so that there is memory for what follows.
            let _ = punch(file.file(), u64::from(*index) * bytes, bytes);
        }
        let placed = self
            .map
            .map_back(at, bytes)
            .and_then(|()| self.map.populate_huge(at, bytes));
        if let Err(errno) = placed {
            tracing::warn!(%errno, slot, "no memory for a slot that a memory file had: it is tried again");
            self.pool.lock().put_stuck_slot(slot);
            return false;
        }
        probe();
        self.tables.memory_place(slot).store(0, Ordering::Release);
        probe();
        self.memory_files.forget_slot(slot);
        self.pool.lock().unlend_slot(slot);
        self.listeners.report_freed();
        true
    }

    /// What memory files have.
    pub fn memory_file_figures(&self) -> MemoryFileFigures {
        let table = self.memory_files.table.lock();
        let (files, slots) = (table.files.len() as u32, table.by_slot.len() as u64);
        drop(table);
        MemoryFileFigures {
            files,
            bytes: slots * self.geometry.chunk_bytes,
            idle_bytes: self.pool.lock().idle_slots() as u64 * self.geometry.chunk_bytes,
        }
    }
}

/// Gives the memory of a range of a file back.
fn punch(file: BorrowedFd<'_>, at: u64, len: u64) -> Result<(), Errno> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, at, len)
}
