//! `firn check`: what is damaged in an arena, without changing it.

use std::path::Path;

use firn_format::superblock::{Superblock, state_word};

use crate::ArenaError;
use crate::damage::Damage;
use crate::homes::read_homes;
use crate::map::JournalRegion;
use crate::memory_files::{MemoryFiles, read_places, report_unreadable_slots};
use crate::open::open_arena;
use crate::refs::Stored;
use crate::scan::{report_unreadable, scan};
use crate::spill::{SpillFault, SpillFile};
use crate::spill_area::SpillArea;
use crate::tables::Tables;

/// What a check found.
pub struct Report {
    /// What the arena is.
    pub superblock: Superblock,
    /// firnd's lifetimes.
    pub epoch: u64,
    /// Process id that last had it attached.
    pub holder_pid: u32,
    /// Where it was mounted.
    pub holder_path: Vec<u8>,
    /// Pending pieces, as far as the tables know.
    pub pieces: Vec<Stored>,
    /// What is wrong.
    pub damage: Vec<Damage>,
    /// What is wrong with the spill file, also where no piece is in it.
    pub spill_fault: Option<SpillFault>,
    /// For the check of the journal.
    pub journal: JournalRegion,
}

/// Reads an arena without changing it; it may be in use.
pub fn check(path: &Path) -> Result<Report, ArenaError> {
    let (map, superblock) = open_arena(path, false)?;
    let geometry = superblock.geometry;
    let tables = Tables::new(&map, geometry);
    let mut damage = Vec::new();
    let mut pieces = Vec::new();
    scan(&tables, &mut damage, &mut |stored| pieces.push(stored));
    let mut homes = read_homes(&tables, &mut damage);
    let memory_files = MemoryFiles::new(path);
    let mut found = read_places(&tables, &memory_files, &superblock.uuid);
    report_unreadable_slots(&mut found, &pieces, &mut homes, &mut damage);
    let spill = match geometry.spill_count {
        0 => SpillArea::default(),
        _ => SpillArea::from_opened(SpillFile::open(&superblock, false)),
    };
    report_unreadable(&homes, &pieces, &spill, &mut damage);
    let order = std::sync::atomic::Ordering::Acquire;
    let epoch = map.u64(state_word::EPOCH).load(order);
    let holder_pid = map.u32(state_word::HOLDER_PID).load(order);
    let path_bytes = map.u32(state_word::HOLDER_PATH).load(order) as usize;
    let mut holder_path = vec![0u8; path_bytes.min(state_word::HOLDER_PATH_MAX)];
    map.read(state_word::HOLDER_PATH + 4, &mut holder_path);
    Ok(Report {
        superblock,
        epoch,
        holder_pid,
        holder_path,
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
