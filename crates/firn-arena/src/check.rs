//! Finds the damage in an arena for `firn check`, without changing the arena.
//!
//! The *arena* is a file of shared memory, allocated in *chunks*, with the bytes that are not in the backing directory
//! yet. It is mapped read-only. firnd, the process that serves a mount, may use it at the same time. All parts are read
//! as an attach reads them:
//! * the piece tables: which bytes of which file are where;
//! * the homes: the slot that has the data of each chunk;
//! * the memory files and the spill file, which have the data of chunks outside the arena's file.

use std::path::Path;
use std::sync::atomic::Ordering;

use firn_format::superblock::{Superblock, state_word};

use crate::ArenaError;
use crate::damage::Damage;
use crate::homes::read_homes;
use crate::map::{FileAccess, JournalRegion, Map};
use crate::memory_files::{MemoryFiles, exclude_unreadable_slots, read_memory_file_slots};
use crate::open::open_arena;
use crate::refs::StoredPiece;
use crate::scan::{report_missing_spill_slots, scan_pieces};
use crate::spill::{SpillFault, SpillFile};
use crate::spill_area::SpillArea;
use crate::tables::Tables;

/// The result of a check of an arena.
pub struct Report {
    /// The superblock of the arena, which is valid.
    pub superblock: Superblock,
    /// The stored epoch: the number of firnd processes that have attached the arena.
    pub epoch: u64,
    /// Id of the process that last had the arena attached.
    pub holder_pid: u32,
    /// Mount point of that process.
    pub holder_path: Vec<u8>,
    /// The pieces that are pending according to the piece tables.
    pub pieces: Vec<StoredPiece>,
    /// All damage that the check found.
    pub damage: Vec<Damage>,
    /// The fault of the spill file, if any. It is reported even if the file holds no piece.
    pub spill_fault: Option<SpillFault>,
    /// Both halves of the journal, for the check of the journal.
    pub journal: JournalRegion,
}

/// Checks the arena at `path`, the shared memory with bytes that are not in the backing yet, without changing it. The
/// arena may be in use. Returns what it contains, with all damage. Fails only if the arena cannot be opened or mapped.
pub fn check(path: &Path) -> Result<Report, ArenaError> {
    let (map, superblock) = open_arena(path, FileAccess::ReadOnly)?;
    let geometry = superblock.geometry;
    let tables = Tables::new(&map, geometry);
    let mut damage = Vec::new();
    let pieces = scan_pieces(&tables, &mut damage);
    let mut homes = read_homes(&tables, &mut damage);
    let memory_files = MemoryFiles::new(path);
    let mut slots = read_memory_file_slots(&tables, &memory_files, &superblock.uuid);
    exclude_unreadable_slots(&mut slots, &pieces, &mut homes, &mut damage);
    let spill = match geometry.spill_count {
        0 => SpillArea::default(),
        _ => SpillArea::from_opened(SpillFile::open(&superblock, FileAccess::ReadOnly)),
    };
    report_missing_spill_slots(&homes, &pieces, &spill, &mut damage);
    Ok(Report {
        superblock,
        epoch: map.u64(state_word::EPOCH).load(Ordering::Acquire),
        holder_pid: map.u32(state_word::HOLDER_PID).load(Ordering::Acquire),
        holder_path: read_holder_path(&map),
        pieces,
        damage,
        spill_fault: spill.fault().cloned(),
        journal: JournalRegion {
            map,
            offset: geometry.journal_offset(0),
            len: 2 * geometry.journal_half_bytes,
        },
    })
}

/// Reads the mount point of the firnd that last had the arena attached.
fn read_holder_path(map: &Map) -> Vec<u8> {
    let len = map.u32(state_word::HOLDER_PATH).load(Ordering::Acquire) as usize;
    let mut path = vec![0u8; len.min(state_word::HOLDER_PATH_MAX)];
    // The path follows its length, a word of 4 bytes.
    map.read(state_word::HOLDER_PATH + 4, &mut path);
    path
}
