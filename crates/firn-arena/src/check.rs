//! `firn check`: what is damaged in an arena, without changing it.

use std::path::Path;

use firn_format::FormatError;
use firn_format::superblock::{Superblock, state_word};

use crate::attach::open;
use crate::moves::{missing, read_homes};
use crate::scan::scan;
use crate::spill::{SpillFault, SpillFile};
use crate::{ArenaError, JournalRegion, PieceRef, SlabRef, Stored};

/// A word or record that is not what it can be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// A chunk whose class is none.
    #[error("chunk {chunk}: class word {word:#010x} is none; its pieces cannot be found")]
    Chunk {
        /// Index.
        chunk: u32,
        /// Stored.
        word: u32,
    },
    /// A chunk whose data cannot be found.
    #[error(
        "chunk {chunk}: home word {word:#018x} is none of its own; the data of its pieces cannot be found"
    )]
    Home {
        /// Index.
        chunk: u32,
        /// Stored.
        word: u64,
    },
    /// Pieces whose data the spill file should have.
    #[error(
        "chunk {chunk}: {pieces} pieces, {bytes} bytes, are in slot {slot} of the spill file and cannot be read: {why}"
    )]
    Spill {
        /// Index.
        chunk: u32,
        /// In the spill file.
        slot: u32,
        /// How many.
        pieces: u64,
        /// Of them all.
        bytes: u64,
        /// What is wrong with the file.
        why: String,
    },
    /// A slab whose state is none.
    #[error("chunk {} slab {}: state word {word:#010x} is none; its records were read all the same", slab.chunk, slab.slab)]
    Slab {
        /// Which.
        slab: SlabRef,
        /// Stored.
        word: u32,
    },
    /// A publish counter beyond the table.
    #[error("chunk {} slab {}: publish counter {published} exceeds {max}", slab.chunk, slab.slab)]
    Count {
        /// Which.
        slab: SlabRef,
        /// Stored.
        published: u32,
        /// Records that the slab has.
        max: u32,
    },
    /// A published record that fails its check: its bytes are lost.
    #[error("piece record {} of chunk {}: {error}; its data cannot be used", piece.record, piece.slab.chunk)]
    Piece {
        /// Which.
        piece: PieceRef,
        /// Why.
        error: FormatError,
    },
}

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
    let (map, superblock) = open(path, false)?;
    let mut damage = Vec::new();
    let mut pieces = Vec::new();
    scan(&map, &superblock.geometry, &mut damage, &mut |stored| {
        pieces.push(stored)
    });
    let homes = read_homes(&map, &superblock.geometry, &mut damage);
    let mut spill_fault = None;
    if superblock.geometry.spill_count > 0 {
        let file = match SpillFile::open(&superblock, false) {
            Ok((file, fault)) => {
                spill_fault = fault;
                Some(file)
            }
            Err(fault) => {
                spill_fault = Some(fault);
                None
            }
        };
        missing(
            &homes,
            &pieces,
            file.as_ref(),
            spill_fault.as_ref(),
            &mut damage,
        );
    }
    let word = std::sync::atomic::Ordering::Acquire;
    let epoch = map.u64(state_word::EPOCH).load(word);
    let holder_pid = map.u32(state_word::HOLDER_PID).load(word);
    let len =
        (map.u32(state_word::HOLDER_PATH).load(word) as usize).min(state_word::HOLDER_PATH_MAX);
    let mut holder_path = vec![0u8; len];
    map.read(state_word::HOLDER_PATH + 4, &mut holder_path);
    let offset = superblock.geometry.journal_offset(0);
    let len = 2 * superblock.geometry.journal_half_bytes;
    Ok(Report {
        superblock,
        epoch,
        holder_pid,
        holder_path,
        pieces,
        damage,
        spill_fault,
        journal: JournalRegion { map, offset, len },
    })
}
