//! The map of pending extents, beside an ordered map of plain numbers.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::hint::black_box;

use criterion::Criterion;
use firn_arena::{PieceRef, SlabRef};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use super::room::in_rounds;

// They are private to the engine: compiled in here once more.
#[allow(dead_code)]
#[path = "../../../firn-engine/src/extents.rs"]
mod map;
#[allow(dead_code)]
#[path = "../../../firn-engine/src/small_map.rs"]
mod small_map;

use map::{Extent, Extents};

/// Of one file: 10,000 pieces of a page are 40 MiB.
const COUNT: usize = 10_000;
const LEN: u64 = 4096;

/// Offsets in random order, with gaps, so that no extent continues another.
fn offsets() -> Vec<u64> {
    let mut offsets: Vec<u64> = (0..COUNT as u64).map(|index| index * 2 * LEN).collect();
    offsets.shuffle(&mut StdRng::seed_from_u64(1));
    offsets
}

fn extent(index: usize) -> Extent {
    let piece = PieceRef {
        slab: SlabRef { chunk: 0, slab: 0 },
        record: index as u32,
    };
    Extent {
        len: LEN,
        piece,
        position: 0,
        sequence: index as u64,
    }
}

/// Into a map that grows from nothing to all of them.
pub fn insert(c: &mut Criterion) {
    let offsets = offsets();
    let mut group = c.benchmark_group("extents insert");
    group.bench_function("BTreeMap", |b| {
        let map = RefCell::new(BTreeMap::new());
        let step = |index: usize| {
            map.borrow_mut().insert(offsets[index], index);
        };
        b.iter_custom(|count| in_rounds(count, COUNT, step, || map.borrow_mut().clear()));
    });
    group.bench_function("Extents", |b| {
        let map = RefCell::new(Extents::default());
        let step = |index: usize| {
            map.borrow_mut()
                .insert(offsets[index], extent(index), &mut |_, _| {})
        };
        b.iter_custom(|count| {
            in_rounds(count, COUNT, step, || {
                *map.borrow_mut() = Extents::default()
            })
        });
    });
    group.finish();
}

/// In a map that holds all of them.
pub fn lookup(c: &mut Criterion) {
    let offsets = offsets();
    let mut rng = StdRng::seed_from_u64(2);
    let mut group = c.benchmark_group("extents lookup");
    let plain: BTreeMap<u64, usize> = offsets.iter().copied().zip(0..).collect();
    group.bench_function("BTreeMap", |b| {
        b.iter(|| {
            let offset = offsets[rng.random_range(0..COUNT)];
            black_box(plain.range(..=offset).next_back())
        });
    });
    let mut extents = Extents::default();
    for (index, offset) in offsets.iter().enumerate() {
        extents.insert(*offset, extent(index), &mut |_, _| {});
    }
    group.bench_function("Extents", |b| {
        b.iter(|| {
            let offset = offsets[rng.random_range(0..COUNT)];
            black_box(extents.covering(offset + 100..offset + LEN))
        });
    });
    group.finish();
}
