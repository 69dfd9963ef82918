//! Measures the memory for the index of a file with many pieces without a pattern. This test needs a process of its own.

mod irregular;

const PIECES: u64 = 500_000;
const MEMORY_BYTES: u64 = 1 << 20;
/// Bound on the memory beside the cached blocks: buffers, and the pieces of one step. An unsorted index takes twice as much.
const PEAK_BYTES_MAX: u64 = 10 << 20;

/// Proves S-log-30.
#[test]
fn a_file_of_many_pieces_is_read_with_little_memory() {
    let dir = tempfile::tempdir().expect("a directory");
    irregular::write(dir.path(), PIECES, MEMORY_BYTES);
    let before = irregular::resident("VmRSS");
    irregular::forget_peak();
    let reader = irregular::begin_host(dir.path(), "r", &[]).with_memory(MEMORY_BYTES);
    irregular::check(&reader, PIECES, 997);
    let peak = irregular::resident("VmHWM");
    let growth = peak.saturating_sub(before);
    assert!(growth < PEAK_BYTES_MAX, "{} KiB", growth >> 10);
}
