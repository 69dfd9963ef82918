//! How much memory the index of a file takes that has many pieces without a pattern. The only test of its process.

mod irregular;

const PIECES: u64 = 500_000;
const MEMORY_BYTES: u64 = 1 << 20;
/// What is beside the sorted parts: buffers, and the pieces that are found at once. Unsorted, all pieces have twice that.
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
    let taken = peak.saturating_sub(before);
    assert!(taken < PEAK_BYTES_MAX, "{} KiB", taken >> 10);
}
