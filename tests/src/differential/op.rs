//! What an operation is and how it is drawn.

use rand::RngExt;

/// Handles that are open at once.
const HANDLES: usize = 6;
/// Files stay below this size: small enough to compare often, large enough for several pages.
const FILE_SIZE_MAX: u64 = 300_000;

/// One operation; paths are relative, from a small set, so that they meet.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // the fields are the arguments of the system calls named
pub enum Op {
    /// open(2) into a slot of the table of handles.
    Open {
        slot: usize,
        path: String,
        flags: i32,
        mode: u32,
    },
    /// close(2) of a slot.
    Close { slot: usize },
    /// pwrite(2), or write(2) at the end for O_APPEND.
    Write {
        slot: usize,
        offset: u64,
        len: usize,
        key: u64,
    },
    /// pread(2).
    Read {
        slot: usize,
        offset: u64,
        len: usize,
    },
    /// A shared mapping of the first bytes, read.
    ReadMapped { slot: usize, len: usize },
    /// ftruncate(2).
    Resize { slot: usize, len: u64 },
    /// truncate(2).
    Truncate { path: String, len: u64 },
    /// fsync(2) or fdatasync(2).
    Sync { slot: usize, data_only: bool },
    /// fallocate(2) with mode bits.
    Allocate {
        slot: usize,
        mode: u32,
        offset: u64,
        len: u64,
    },
    /// copy_file_range(2).
    Copy {
        from: usize,
        from_offset: u64,
        to: usize,
        to_offset: u64,
        len: usize,
    },
    /// fstat(2).
    StatHandle { slot: usize },
    /// lstat(2).
    Stat { path: String },
    /// All of a file by path.
    ReadPath { path: String },
    /// mkdir(2).
    MakeDir { path: String, mode: u32 },
    /// rmdir(2).
    RemoveDir { path: String },
    /// unlink(2).
    Unlink { path: String },
    /// renameat2(2).
    Rename {
        from: String,
        to: String,
        flags: u32,
    },
    /// link(2).
    Link { from: String, to: String },
    /// symlink(2).
    Symlink { target: String, path: String },
    /// readlink(2).
    ReadLink { path: String },
    /// mknod(2) of a fifo, a socket or a device.
    MakeNode { path: String, kind: u32, mode: u32 },
    /// chmod(2).
    Mode { path: String, mode: u32 },
    /// lchown(2).
    Owner { path: String, uid: u32, gid: u32 },
    /// utimensat(2) with a time of the past.
    Times { path: String, seconds: i64 },
    /// setxattr(2).
    SetXattr {
        path: String,
        name: String,
        value: Vec<u8>,
        flags: u32,
    },
    /// getxattr(2) of all names.
    Xattrs { path: String },
    /// removexattr(2).
    RemoveXattr { path: String, name: String },
    /// Names and types of a directory.
    List { path: String },
}

/// Draws one operation.
pub fn draw(rng: &mut impl RngExt) -> Op {
    let slot = rng.random_range(0..HANDLES);
    let offset = rng.random_range(0..FILE_SIZE_MAX);
    match rng.random_range(0..100) {
        0..13 => Op::Open {
            slot,
            path: path(rng),
            flags: flags(rng),
            mode: *pick(rng, &[0o644, 0o600, 0o4755, 0]),
        },
        13..18 => Op::Close { slot },
        18..38 => Op::Write {
            slot,
            offset: offset / 2,
            len: length(rng),
            key: rng.random(),
        },
        38..45 => Op::Read {
            slot,
            offset,
            len: length(rng),
        },
        45..47 => Op::ReadMapped {
            slot,
            len: rng.random_range(1..40_000),
        },
        47..51 => Op::Resize { slot, len: offset },
        51..53 => Op::Truncate {
            path: path(rng),
            len: offset,
        },
        53..54 => Op::Sync {
            slot,
            data_only: rng.random(),
        },
        54..57 => Op::Allocate {
            slot,
            mode: *pick(rng, &ALLOCATE_MODES),
            offset: round(rng, offset / 2),
            len: round(rng, 1 + offset / 3),
        },
        57..59 => Op::Copy {
            from: slot,
            from_offset: offset / 2,
            to: rng.random_range(0..HANDLES),
            to_offset: offset / 3,
            len: length(rng),
        },
        59..62 => Op::StatHandle { slot },
        62..66 => Op::Stat { path: path(rng) },
        66..69 => Op::ReadPath { path: path(rng) },
        69..73 => Op::MakeDir {
            path: path(rng),
            mode: *pick(rng, &[0o755, 0o700, 0o2775]),
        },
        73..74 => Op::RemoveDir { path: path(rng) },
        74..77 => Op::Unlink { path: path(rng) },
        77..82 => Op::Rename {
            from: path(rng),
            to: path(rng),
            flags: *pick(rng, &[0, 0, 0, 1, 2, 3]),
        },
        82..85 => Op::Link {
            from: path(rng),
            to: path(rng),
        },
        85..87 => Op::Symlink {
            target: path(rng),
            path: path(rng),
        },
        87..88 => Op::ReadLink { path: path(rng) },
        88..89 => Op::MakeNode {
            path: path(rng),
            kind: *pick(rng, &[libc::S_IFIFO, libc::S_IFSOCK, libc::S_IFCHR]),
            mode: 0o640,
        },
        89..91 => Op::Mode {
            path: path(rng),
            mode: *pick(rng, &[0o644, 0o755, 0o6755, 0o1777, 0o400]),
        },
        91..92 => Op::Owner {
            path: path(rng),
            uid: rng.random_range(0..3),
            gid: rng.random_range(0..3),
        },
        92..94 => Op::Times {
            path: path(rng),
            seconds: rng.random_range(0..1_000_000_000),
        },
        94..96 => Op::SetXattr {
            path: path(rng),
            name: name(rng),
            value: vec![7; rng.random_range(0..60)],
            flags: rng.random_range(0..3),
        },
        96..97 => Op::Xattrs { path: path(rng) },
        97..98 => Op::RemoveXattr {
            path: path(rng),
            name: name(rng),
        },
        _ => Op::List { path: path(rng) },
    }
}

/// fallocate(2): plain, keep size, punch a hole, zero, collapse, insert, and an unknown one. Without collapse (0x08)
/// and insert (0x20) of a range: the kernel answers them with EOPNOTSUPP on any FUSE file system, before it looks at
/// the arguments.
const ALLOCATE_MODES: [u32; 5] = [0, 1, 3, 0x10, 0x11];

fn pick<'a, T>(rng: &mut impl RngExt, choices: &'a [T]) -> &'a T {
    &choices[rng.random_range(0..choices.len())]
}

/// Up to three levels; mostly names that exist often, now and then one that cannot be.
fn path(rng: &mut impl RngExt) -> String {
    let leaf = match rng.random_range(0..60) {
        0 => "x".repeat(256),
        1 => "y".repeat(255),
        // `..` would lead out of the directory, into what both sides share.
        2 => String::from("."),
        _ => format!("f{}", rng.random_range(0..6)),
    };
    match rng.random_range(0..10) {
        0..5 => leaf,
        5..8 => format!("f{}/{leaf}", rng.random_range(0..3)),
        _ => format!(
            "f{}/f{}/{leaf}",
            rng.random_range(0..3),
            rng.random_range(0..3)
        ),
    }
}

fn name(rng: &mut impl RngExt) -> String {
    format!("user.n{}", rng.random_range(0..3))
}

fn length(rng: &mut impl RngExt) -> usize {
    match rng.random_range(0..10) {
        0 => 0,
        1..5 => rng.random_range(1..600),
        5..8 => 4096 * rng.random_range(1..8),
        _ => rng.random_range(600..70_000),
    }
}

/// Some of the ranges begin and end at block borders, as collapse and insert want it.
fn round(rng: &mut impl RngExt, value: u64) -> u64 {
    if rng.random() { value & !4095 } else { value }
}

fn flags(rng: &mut impl RngExt) -> i32 {
    let access = *pick(
        rng,
        &[libc::O_RDWR, libc::O_RDWR, libc::O_RDONLY, libc::O_WRONLY],
    );
    let mut flags = access | libc::O_CLOEXEC;
    for (flag, one_in) in [
        (libc::O_CREAT, 2),
        (libc::O_EXCL, 8),
        (libc::O_TRUNC, 6),
        (libc::O_APPEND, 6),
        (libc::O_NOFOLLOW, 6),
        (libc::O_DIRECTORY, 30),
    ] {
        if rng.random_range(0..one_in) == 0 {
            flags |= flag;
        }
    }
    flags
}
