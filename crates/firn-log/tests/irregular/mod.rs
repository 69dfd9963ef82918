//! A file of many small pieces without a pattern, written by two hosts; helpers to read it and to measure memory.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::path::Path;
use std::time::Duration;

use firn_backing::dir::DirBacking;
use firn_backing::{Access, Backing, Caller, DataPart, Files, Names, Volume};
use firn_log::{LogBacking, Setup, WhenClosed};

/// Length of a piece.
pub const PIECE_BYTES: u64 = 16;
/// Length of a slot. Each piece begins in its own slot, at a place that varies.
const SLOT_BYTES: u64 = 32;
/// Number of pieces in one write.
const PARTS_PER_WRITE: u64 = 16_384;
const NAME: &str = "file";

pub type Logged = LogBacking<DirBacking>;

/// Opens a host over a directory. Only the hosts in `alive` count as alive.
pub fn begin_host(dir: &Path, host: &str, alive: &'static [&'static str]) -> Logged {
    let setup = Setup {
        host: host.to_owned(),
        chooses: Box::new(|_: &OsStr| true),
        is_alive: Box::new(move |host| Ok(alive.contains(&host))),
        view_age_max: Duration::ZERO,
        lag_max: Duration::ZERO,
        unit_bytes: 64 << 20,
        when_closed: WhenClosed::Flatten,
        flattens_read: false,
    };
    let below = DirBacking::open(dir).expect("a directory");
    LogBacking::open(below, setup).expect("a host")
}

/// Returns the offset of a piece: a permutation of the slots without a pattern.
pub fn offset_of(piece: u64, pieces: u64) -> u64 {
    let bits = pieces.next_power_of_two().trailing_zeros().max(8);
    let mask = (1u64 << bits) - 1;
    let mut slot = piece;
    for odd in [0x9e37_79b9_7f4a_7c15_u64, 0xc2b2_ae3d_27d4_eb4f] {
        slot ^= slot >> (bits / 2 + 1);
        slot = slot.wrapping_mul(odd) & mask;
    }
    slot ^= slot >> (bits / 2);
    slot * SLOT_BYTES + (slot.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 60)
}

/// Returns the bytes of a piece.
pub fn bytes_of(piece: u64) -> [u8; PIECE_BYTES as usize] {
    let mut bytes = [0xa5; PIECE_BYTES as usize];
    bytes[..8].copy_from_slice(&piece.to_le_bytes());
    bytes
}

fn me() -> Caller {
    Caller {
        uid: 0,
        gid: 0,
        pid: 0,
    }
}

pub fn open(host: &Logged, access: Access) -> <Logged as Volume>::File {
    let (inode, _) = host
        .lookup(&host.root(), OsStr::new(NAME))
        .expect("the file");
    host.open(&inode, access).expect("open")
}

/// Writes each half of the pieces on one of two hosts, and closes the file there. A third host keeps it open, so that
/// it is not flattened.
pub fn write(dir: &Path, pieces: u64, memory: u64) {
    let alive = &["a", "b", "keeper"];
    let keeper = begin_host(dir, "keeper", alive);
    let made = keeper.create(&me(), &keeper.root(), OsStr::new(NAME), 0o644);
    let (_, kept, _) = made.expect("create");
    keeper
        .write_at(&kept, &[IoSlice::new(&bytes_of(0))], offset_of(0, pieces))
        .expect("write");
    for (number, host) in ["a", "b"].into_iter().enumerate() {
        let host = begin_host(dir, host, alive).with_memory(memory);
        let half = pieces / 2 * number as u64..pieces / 2 * (number as u64 + 1);
        write_part(&host, half, pieces);
        assert_eq!(host.settle().error, None);
    }
}

/// Writes the pieces with these numbers.
fn write_part(host: &Logged, part: std::ops::Range<u64>, pieces: u64) {
    let file = open(host, Access::ReadWrite);
    let mut next = part.start;
    while next < part.end {
        let numbers = next..part.end.min(next + PARTS_PER_WRITE);
        next = numbers.end;
        let bytes: Vec<_> = numbers.clone().map(bytes_of).collect();
        let slices: Vec<_> = bytes.iter().map(|bytes| [IoSlice::new(bytes)]).collect();
        let parts = numbers.zip(&slices).map(|(number, data)| DataPart {
            offset: offset_of(number, pieces),
            data,
        });
        let parts: Vec<_> = parts.collect();
        let written = host.write_parts(&file, &parts).expect("write");
        assert_eq!(written, parts.len() as u64 * PIECE_BYTES);
    }
}

/// Reads one in `every` pieces and checks its bytes.
pub fn check(host: &impl Backing, pieces: u64, every: u64) {
    let (inode, _) = host
        .lookup(&host.root(), OsStr::new(NAME))
        .expect("the file");
    let file = host.open(&inode, Access::Read).expect("open");
    for piece in (0..pieces / 2 * 2).step_by(every as usize) {
        let mut found = [0; PIECE_BYTES as usize];
        host.read_at(&file, &mut found, offset_of(piece, pieces))
            .expect("read");
        assert_eq!(found, bytes_of(piece), "piece {piece}");
    }
}

#[allow(dead_code, reason = "only the benchmark flattens")]
/// Flattens the file, which no live host has open for writing.
pub fn flatten(host: &Logged) {
    drop(open(host, Access::ReadWrite));
    assert!(host.settle().is_empty(), "it is flat");
}

/// Returns a memory size of this process from `/proc/self/status`: the present one, or the peak since [`forget_peak`].
pub fn resident(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status
        .lines()
        .find(|line| line.starts_with(field))
        .expect("a line");
    let kib = line
        .split_whitespace()
        .nth(1)
        .and_then(|kib| kib.parse::<u64>().ok());
    kib.expect("a number") << 10
}

pub fn forget_peak() {
    std::fs::write("/proc/self/clear_refs", "5").expect("clear_refs");
}
