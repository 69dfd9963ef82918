//! Finds all written bytes that are in shared memory, after a crash or for a check: reads their records, and reports
//! the damaged ones.
//!
//! The *arena* is shared memory with the bytes that are not in the backing directory yet. A *slab* is a part of it that
//! one writer fills. A *piece* is a range of a file's bytes in it, and its *record* says which range that is. A record
//! is valid if its seal matches its contents and the generation of its slab. The scan also runs while firnd uses the
//! arena (`firn check`). So it reads a slab again if the slab got a new lease during the read.
//!
//! Promise: a record that fails its check is reported if it was published, and is never interpreted.

use std::collections::BTreeMap;
use std::sync::atomic::{Ordering, fence};

use firn_format::home::Home;
use firn_format::piece::CheckedPiece;
use firn_format::slab::{Class, SlabState};

use crate::damage::Damage;
use crate::refs::{PieceRef, SlabRef, StoredPiece};
use crate::spill_area::SpillArea;
use crate::tables::Tables;

/// Maximum number of reads of a slab. A read is repeated if the arena leased the slab again during the read.
const READS_MAX: usize = 3;

/// The result of reading the records of one slab.
#[derive(Default)]
struct Records {
    live: Vec<StoredPiece>,
    damage: Vec<Damage>,
}

/// A chunk whose data is in the spill file, and its slot there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct SpilledChunk {
    chunk: u32,
    slot: u32,
}

/// The number of pieces in a chunk, and their bytes.
#[derive(Default)]
struct PieceSums {
    pieces: u64,
    bytes: u64,
}

/// Returns the pieces (recorded ranges of files' bytes) of all valid records, and adds each failed check to `damage`.
/// The pieces are in the order of their chunks and slabs, not of their writes.
pub(crate) fn scan_pieces(tables: &Tables, damage: &mut Vec<Damage>) -> Vec<StoredPiece> {
    let mut pieces = Vec::new();
    for chunk in 0..tables.geometry().chunks() {
        match tables.class(chunk) {
            // The chunk is free.
            Ok(None) => {}
            Ok(Some(class)) => {
                for slab in 0..tables.slab_count(class) {
                    scan_slab(tables, SlabRef { chunk, slab }, class, damage, &mut pieces);
                }
            }
            Err(word) => damage.push(Damage::ClassWord { chunk, word }),
        }
    }
    pieces
}

/// Reads the piece records of a slab, which say what ranges of files are in it. Adds the live pieces to `pieces`, and
/// what is damaged to `damage`.
///
/// A slab that is free, or that is leased again during each of [`READS_MAX`] reads, has no pieces.
fn scan_slab(
    tables: &Tables,
    slab: SlabRef,
    class: Class,
    damage: &mut Vec<Damage>,
    pieces: &mut Vec<StoredPiece>,
) {
    match tables.state(slab) {
        Ok(SlabState::Free) => return,
        Ok(_) => {}
        // The state is unknown, but each record has a check of its own, so the records are read.
        Err(word) => damage.push(Damage::SlabState { slab, word }),
    }
    // A live arena may lease the slab again during the read. The records read are then of two leases, so the
    // slab is read again. The arena may also free the chunk and divide it into slabs of another class. The
    // records of that class lie elsewhere, so this slab no longer exists.
    for _ in 0..READS_MAX {
        let generation = tables.generation(slab).load(Ordering::Acquire);
        let records_read = read_records(tables, slab, class, generation);
        fence(Ordering::Acquire);
        if tables.class(slab.chunk) != Ok(Some(class)) || tables.state(slab) == Ok(SlabState::Free)
        {
            return;
        }
        if tables.generation(slab).load(Ordering::Acquire) == generation {
            damage.extend(records_read.damage);
            pieces.extend(records_read.live);
            return;
        }
    }
}

/// Reads the piece records of a slab once. Only records of the lease `generation` are live; a record of an earlier
/// lease fails its check. Returns the live pieces and the damage.
fn read_records(tables: &Tables, slab: SlabRef, class: Class, generation: u64) -> Records {
    let mut records_read = Records::default();
    let published = tables.published(slab).load(Ordering::Acquire);
    let bytes = tables.bytes_of(class, slab.slab);
    let records = tables.records_of(class, slab.slab);
    let max = records.len() as u32;
    if published > max {
        records_read.damage.push(Damage::PublishCounter {
            slab,
            published,
            max,
        });
    }
    for (index, record) in records.enumerate() {
        let piece_ref = PieceRef { slab, record };
        let is_counted = (index as u32) < published;
        let raw = tables.load(piece_ref);
        match raw.check(generation, bytes.start.into(), bytes.end.into()) {
            // A valid record beyond the counter is accepted. Its writer died while publishing the record, and the
            // bytes of the piece are complete.
            Ok(CheckedPiece::Live(piece)) => {
                let modified = tables.modified(piece_ref).load(Ordering::Relaxed);
                records_read.live.push(StoredPiece {
                    record: piece_ref,
                    piece,
                    modified,
                });
            }
            Ok(_) => {}
            Err(error) if is_counted => {
                records_read.damage.push(Damage::Piece {
                    piece: piece_ref,
                    error,
                });
            }
            // The record is not published. Its contents are left over from an earlier lease.
            Err(_) => {}
        }
    }
    records_read
}

/// Reports the pieces with bytes in slots that the spill file does not have: the file is missing, or too short. Adds
/// one damage entry for each chunk with such pieces. `homes` has the slot of each chunk's data.
pub(crate) fn report_missing_spill_slots(
    homes: &[Option<Home>],
    pieces: &[StoredPiece],
    spill: &SpillArea,
    damage: &mut Vec<Damage>,
) {
    let mut unreadable: BTreeMap<SpilledChunk, PieceSums> = BTreeMap::new();
    for stored in pieces {
        let chunk = stored.record.slab.chunk;
        let Some(Home::Spill(slot)) = homes[chunk as usize] else {
            continue;
        };
        if spill.file().is_some_and(|file| file.has_slot(slot)) {
            continue;
        }
        let sums = unreadable.entry(SpilledChunk { chunk, slot }).or_default();
        sums.pieces += 1;
        sums.bytes += u64::from(stored.piece.len);
    }
    let reason = match spill.fault() {
        Some(fault) => fault.to_string(),
        None => "it is not there".into(),
    };
    for (SpilledChunk { chunk, slot }, PieceSums { pieces, bytes }) in unreadable {
        damage.push(Damage::Spill {
            chunk,
            slot,
            pieces,
            bytes,
            reason: reason.clone(),
        });
    }
}
