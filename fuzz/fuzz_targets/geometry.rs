//! Geometry: sizes are refused, or the areas follow each other without overlap and overflow.
#![no_main]

use firn_format::geometry::{DATA_ALIGN, Geometry, PAGE};
use libfuzzer_sys::fuzz_target;

// Arena bytes; chunk bytes as an exponent (most numbers are no power of two) or as they are.
fuzz_target!(|input: (u64, Result<u8, u64>)| {
    let (arena_bytes, chunk) = input;
    let chunk_bytes = chunk.map_or_else(|bytes| bytes, |shift| 1 << (shift % 64));
    let Ok(g) = Geometry::new(arena_bytes, chunk_bytes) else {
        return;
    };
    assert!(g.chunk_count > 0 && g.data_bytes() <= arena_bytes);
    assert!(arena_bytes - g.data_bytes() < chunk_bytes);
    // As a superblock is checked: the sizes kept lead to the same layout.
    assert_eq!(Geometry::new(g.data_bytes(), chunk_bytes), Ok(g));

    assert_eq!(
        g.journal_offset(1) - g.journal_offset(0),
        g.journal_half_bytes
    );
    assert_eq!(g.journal_offset(0) % PAGE, 0);
    assert!(g.journal_offset(2) <= g.table_offset(0));
    let last = g.chunk_count - 1;
    for chunk in [0, last / 2, last] {
        assert!(g.slab_header_offset(chunk, 0) > g.table_offset(chunk));
        assert!(g.slab_header_offset(chunk, g.small_slabs()) <= g.record_offset(chunk, 0));
        assert!(g.record_offset(chunk, g.records_per_chunk()) <= g.table_offset(chunk + 1));
        assert_eq!(g.record_offset(chunk, 0) % 8, 0);
    }
    assert!(g.table_offset(g.chunk_count) <= g.data_offset());
    assert_eq!(g.data_offset() % DATA_ALIGN, 0);
    assert_eq!(g.file_bytes() - g.slot_offset(last), chunk_bytes);
});
