//! Pieces in the arena: room, bytes, record; without the engine.

use criterion::{Criterion, Throughput};
use firn_arena::{Arena, Lease, PieceRef};
use firn_format::slab::Class;

use super::room::{Copies, arena, in_rounds};

/// Fewer than a whole chunk has records.
const PIECES: usize = 600;
const SIZES: [(&str, usize); 2] = [("64 B", 64), ("4 KiB", 4 << 10)];

struct Slab<'a> {
    arena: &'a Arena,
    lease: Option<Lease>,
    pieces: Vec<PieceRef>,
    len: u32,
}

impl Slab<'_> {
    fn publish(&mut self, index: usize, data: &[u8]) {
        let lease = self
            .lease
            .get_or_insert_with(|| self.arena.lease_slab(Class::Whole).expect("a free chunk"));
        // Offsets that never meet, so that no piece continues another.
        let offset = 2 * (index * data.len()) as u64;
        let reserved = lease
            .reserve(1, offset, data.len() as u64)
            .expect("room in the chunk");
        self.arena.fill_slab(lease.slab(), reserved.position, data);
        self.pieces.push(self.arena.publish_piece(
            lease,
            reserved,
            firn_arena::NewPiece {
                file_id: 1,
                offset,
                sequence: index as u64,
                modified: 0,
            },
        ));
    }

    fn empty(&mut self) {
        self.pieces
            .drain(..)
            .for_each(|piece| self.arena.retire_bytes(piece, self.len, true));
        if let Some(lease) = self.lease.take() {
            self.arena.seal_slab(lease);
        }
    }
}

pub fn publish(c: &mut Criterion) {
    for (label, size) in SIZES {
        let mut group = c.benchmark_group(format!("piece publish {label}"));
        group.throughput(Throughput::Bytes(size as u64));
        let data = vec![7; size];
        let mut copies = Copies::over(PIECES * size);
        group.bench_function("memcpy", |b| b.iter(|| copies.copy(&data)));
        let (_dir, arena) = arena();
        group.bench_function("arena", |b| {
            let mut slab = Slab {
                arena: &arena,
                lease: None,
                pieces: Vec::new(),
                len: size as u32,
            };
            b.iter_custom(|count| {
                // Both ends need the slab: taken in turns.
                let slab = std::cell::RefCell::new(&mut slab);
                in_rounds(
                    count,
                    PIECES,
                    |index| slab.borrow_mut().publish(index, &data),
                    || slab.borrow_mut().empty(),
                )
            });
        });
        group.finish();
    }
}
