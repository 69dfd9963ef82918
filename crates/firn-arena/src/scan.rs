//! Reading every piece record that counts.

use std::sync::atomic::{Ordering, fence};

use firn_format::geometry::Geometry;
use firn_format::piece::{Checked, RawPiece, word};
use firn_format::slab::{Class, SlabState, chunk_word, slab_word};

use crate::Damage;
use crate::arena::{Arena, PieceRef, SlabRef, Stored};
use crate::lease::records_of;
use crate::map::Map;

impl Arena {
    /// What the tables hold now: live pieces and damage.
    pub fn stored(&self) -> (Vec<Stored>, Vec<Damage>) {
        let mut stored = Vec::new();
        let mut damage = Vec::new();
        scan(&self.map, &self.geometry, &mut damage, &mut |found| {
            stored.push(found)
        });
        (stored, damage)
    }
}

/// Reads every piece record that counts; what fails its check goes to `damage`.
pub(crate) fn scan(
    map: &Map,
    geometry: &Geometry,
    damage: &mut Vec<Damage>,
    live: &mut dyn FnMut(Stored),
) {
    for chunk in 0..geometry.chunks() {
        let class = match Class::from_word(
            map.u32(geometry.table_offset(chunk) + chunk_word::CLASS)
                .load(Ordering::Acquire),
        ) {
            Ok(None) => continue,
            Ok(Some(class)) => class,
            Err(word) => {
                damage.push(Damage::Chunk { chunk, word });
                continue;
            }
        };
        let bytes = class.slab_bytes(geometry.chunk_bytes);
        for slab in 0..(geometry.chunk_bytes / bytes) as u32 {
            scan_slab(map, geometry, SlabRef { chunk, slab }, class, damage, live);
        }
    }
}

fn scan_slab(
    map: &Map,
    geometry: &Geometry,
    at: SlabRef,
    class: Class,
    damage: &mut Vec<Damage>,
    live: &mut dyn FnMut(Stored),
) {
    let header = geometry.slab_header_offset(at.chunk, at.slab);
    let state = SlabState::from_word(map.u32(header + slab_word::STATE).load(Ordering::Acquire));
    match state {
        Ok(SlabState::Free) => return,
        Ok(_) => {}
        // Which it was is unknown: what its records say is checked one by one all the same.
        Err(word) => damage.push(Damage::Slab { slab: at, word }),
    }
    // A live arena may lease the slab anew while it is read: then what was read is of two leases. It may
    // also free the chunk and cut it into slabs of another class, whose records lie elsewhere: then
    // nothing of this slab is there any more.
    let class_now = map.u32(geometry.table_offset(at.chunk) + chunk_word::CLASS);
    let state_now = map.u32(header + slab_word::STATE);
    const TRIES: usize = 3;
    for _ in 0..TRIES {
        let generation = map
            .u64(header + slab_word::GENERATION)
            .load(Ordering::Acquire);
        let mut found = Vec::new();
        let mut wrong = Vec::new();
        scan_records(
            map,
            geometry,
            at,
            class,
            generation,
            &mut wrong,
            &mut |stored| found.push(stored),
        );
        fence(Ordering::Acquire);
        if class_now.load(Ordering::Acquire) != Class::to_word(Some(class))
            || state_now.load(Ordering::Acquire) == SlabState::Free.to_word()
        {
            return;
        }
        if map
            .u64(header + slab_word::GENERATION)
            .load(Ordering::Acquire)
            == generation
        {
            damage.extend(wrong);
            found.into_iter().for_each(live);
            return;
        }
    }
}

fn scan_records(
    map: &Map,
    geometry: &Geometry,
    at: SlabRef,
    class: Class,
    generation: u64,
    damage: &mut Vec<Damage>,
    live: &mut dyn FnMut(Stored),
) {
    let header = geometry.slab_header_offset(at.chunk, at.slab);
    let published = map
        .u32(header + slab_word::PUBLISHED)
        .load(Ordering::Acquire);
    let bytes = class.slab_bytes(geometry.chunk_bytes);
    let start = u64::from(at.slab) * bytes;
    let end = (u64::from(at.slab) + 1) * bytes;
    let records = records_of(geometry, class, at.slab);
    if published > records.len() as u32 {
        damage.push(Damage::Count {
            slab: at,
            published,
            max: records.len() as u32,
        });
    }
    for (index, record) in records.enumerate() {
        let base = geometry.record_offset(at.chunk, record);
        let raw = load(map, base);
        let piece_ref = PieceRef { slab: at, record };
        match raw.check(generation, start, end) {
            Ok(checked) => {
                // A whole record beyond the counter was being published when its writer died: its
                // bytes are there, so it counts.
                if let Checked::Live(piece) = checked {
                    let modified = map.u64(base + word::MODIFIED).load(Ordering::Relaxed);
                    live(Stored {
                        at: piece_ref,
                        piece,
                        modified,
                    });
                }
            }
            Err(error) if (index as u32) < published => {
                damage.push(Damage::Piece {
                    piece: piece_ref,
                    error,
                });
            }
            // Not published: whatever lies here is left over from before.
            Err(_) => {}
        }
    }
}

pub(crate) fn load(map: &Map, base: u64) -> RawPiece {
    let seal = map.u64(base + word::SEAL).load(Ordering::Acquire);
    RawPiece {
        who: map.u64(base + word::WHO).load(Ordering::Relaxed),
        offset: map.u64(base + word::OFFSET).load(Ordering::Relaxed),
        place: map.u64(base + word::PLACE).load(Ordering::Relaxed),
        seal,
    }
}
