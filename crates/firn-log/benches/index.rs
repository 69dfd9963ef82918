//! Benchmark: the size of an index by pattern, and the memory of a reader of a file without a pattern.
//!
//! ```text
//! cargo bench -p firn-log --bench index                 10^6 pieces
//! cargo bench -p firn-log --bench index -- 100000000    10^8; the directory is in FIRN_BENCH_DIR or TMPDIR
//! ```

#[path = "../tests/irregular/mod.rs"]
mod irregular;

use std::ffi::OsStr;
use std::io::IoSlice;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use firn_backing::{Backing, Caller, DataPart, Files, Volume};

const PIECES_OF_PATTERN: u64 = 10_000;
const PIECE_BYTES: u64 = 64;
/// Number of pieces in one write, as the drain gathers them.
const PARTS_PER_WRITE: usize = 1024;
const READER: &str = "read";
/// Goals: the index of a writer of strided pieces, and the memory of a reader.
const STRIDED_BYTES_MAX: u64 = 1024;
const MEMORY_MAX: u64 = 64 << 20;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args
        .iter()
        .map(String::as_str)
        .filter(|arg| !arg.starts_with("--"))
        .collect();
    match args[..] {
        [READER, dir, pieces] => read(Path::new(dir), pieces.parse().expect("a number")),
        [] => run(1_000_000),
        [pieces, ..] => run(pieces.parse().expect("a number of pieces")),
    }
}

fn temporary() -> tempfile::TempDir {
    let top = std::env::var_os("FIRN_BENCH_DIR").map_or_else(std::env::temp_dir, Into::into);
    tempfile::tempdir_in(top).expect("a directory")
}

fn run(pieces: u64) {
    println!("index of a writer of {PIECES_OF_PATTERN} pieces, {PARTS_PER_WRITE} in a write");
    println!("{:<12} {:>12} {:>14}", "pattern", "bytes", "bytes a piece");
    let side = 100;
    let strided = measure("strided", |piece| piece * 40 * PIECE_BYTES);
    measure("segmented", |piece| piece * PIECE_BYTES);
    measure("3-d block", |piece| {
        let (plane, row) = (piece / side, piece % side);
        (plane * 4 * side + row) * 7 * PIECE_BYTES
    });
    measure("irregular", |piece| {
        irregular::offset_of(piece, PIECES_OF_PATTERN) * 4
    });

    println!(
        "strided, at most {STRIDED_BYTES_MAX} bytes: {}",
        verdict(strided <= STRIDED_BYTES_MAX)
    );

    let dir = temporary();
    let begun = Instant::now();
    irregular::write(dir.path(), pieces, 32 << 20);
    println!(
        "\n{pieces} irregular pieces of two writers, written in {:.1} s",
        begun.elapsed().as_secs_f64()
    );
    let (frames, sorted) = index_bytes(dir.path());
    let each = |bytes: u64| bytes as f64 / pieces as f64;
    println!(
        "index {frames} bytes ({:.1} a piece), sorted {sorted} ({:.1})",
        each(frames),
        each(sorted)
    );
    let program = std::env::current_exe().expect("a program");
    let mut reader = Command::new(program);
    reader.arg(READER).arg(dir.path()).arg(pieces.to_string());
    assert!(reader.status().expect("a reader").success());
}

/// Reads the file in a process of its own, and reports how much memory the process uses.
fn read(dir: &Path, pieces: u64) {
    let begun = Instant::now();
    irregular::forget_peak();
    let reader = irregular::begin_host(dir, "r", &[]);
    irregular::check(&reader, pieces, (pieces / 2000).max(1));
    let peak = irregular::resident("VmHWM");
    tell_memory("read 2000 of them", begun, peak);
    let begun = Instant::now();
    irregular::flatten(&reader);
    let peak = irregular::resident("VmHWM");
    tell_memory("flattened", begun, peak);
}

fn tell_memory(what: &str, begun: Instant, peak: u64) {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!(
        "{what}: {:.1} s, peak of memory {:.1} MiB, at most {} MiB: {}",
        begun.elapsed().as_secs_f64(),
        mib(peak),
        mib(MEMORY_MAX),
        verdict(peak <= MEMORY_MAX)
    );
}

fn verdict(is_reached: bool) -> &'static str {
    if is_reached { "reached" } else { "missed" }
}

/// Returns the size of the index of a host that writes pieces at these offsets and closes the file.
fn measure(pattern: &str, offset_of: impl Fn(u64) -> u64) -> u64 {
    let dir = temporary();
    let alive = &["a", "keeper"];
    let me = Caller {
        uid: 0,
        gid: 0,
        pid: 0,
    };
    let host = irregular::begin_host(dir.path(), "a", alive);
    let made = host.create(&me, &host.root(), OsStr::new("file"), 0o644);
    let (_, file, _) = made.expect("create");
    let data = [7; PIECE_BYTES as usize];
    let slice = [IoSlice::new(&data)];
    let parts = (0..PIECES_OF_PATTERN).map(|piece| DataPart {
        offset: offset_of(piece),
        data: &slice,
    });
    for parts in parts.collect::<Vec<_>>().chunks(PARTS_PER_WRITE) {
        host.write_parts(&file, parts).expect("write");
    }
    let (frames, sorted) = index_bytes(dir.path());
    let bytes = frames + sorted;
    println!(
        "{pattern:<12} {bytes:>12} {:>14.3}",
        bytes as f64 / PIECES_OF_PATTERN as f64
    );
    bytes
}

/// Returns the bytes of indexes and of tables.
fn index_bytes(dir: &Path) -> (u64, u64) {
    let (mut frames, mut sorted) = (0, 0);
    let list = |path| std::fs::read_dir(path).expect("list").flatten();
    let files = list(dir.join(".firn/log"));
    for container in files.flat_map(|file| list(file.path())) {
        let container = container.path();
        for entry in std::fs::read_dir(container).expect("a container") {
            let entry = entry.expect("a file");
            let bytes = entry.metadata().expect("a file").len();
            match entry.file_name().as_encoded_bytes().first() {
                Some(b'i') => frames += bytes,
                Some(b't') => sorted += bytes,
                _ => {}
            }
        }
    }
    (frames, sorted)
}
