//! What one step of a write costs, beside a copy of the same bytes in the same run.
//!
//! `cargo bench -p firn-bench --bench micro [-- FILTER]`. In a group the first entry is the baseline.
//! No kernel, no FUSE and no drain are in these figures: those are in `firn bench`.

use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};

mod micro {
    pub mod extents;
    pub mod journal;
    pub mod pieces;
    pub mod room;
    pub mod write;
}

criterion_group! {
    name = micro;
    config = Criterion::default().warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(3));
    targets =
        micro::write::append,
        micro::write::scattered,
        micro::pieces::publish,
        micro::extents::insert,
        micro::extents::lookup,
        micro::journal::append
}
criterion_main!(micro);
