//! Makes the same random calls on two backings. Both must return the same errnos and end with the same tree.

use std::ffi::OsString;
use std::io::IoSlice;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::own_caller;
use crate::tree;
use firn_backing::{Access, Backing, DataPart, Errno, NewKind, RenameFlags};

/// One call on names in the root or in a directory of the root.
#[derive(Clone, Debug)]
enum Op {
    Create(Place, u32),
    Mkdir(Place, u32),
    Symlink(Place),
    Fifo(Place),
    Link(Place, Place),
    Unlink(Place),
    Rmdir(Place),
    Rename(Place, Place, u32),
    Chmod(Place, u32),
    Chown(Place, u32),
    SetXattr(Place, u8, i32),
    RemoveXattr(Place, u8),
    Write(Place, u64, Vec<u8>),
    /// Writes several parts, in descending order of their offsets: the lowest offset, the distance between the
    /// beginnings of two parts, and the bytes of each part.
    WriteParts(Place, u64, u64, Vec<Vec<u8>>),
    Truncate(Place, u64),
    Punch(Place, u64, u64),
    Copy(Place, u64, Place, u64, u64),
}

/// Only a few names, so that calls meet on the same ones: `a`..`d`, in the root or in one of `a`..`d`.
type Place = (Option<u8>, u8);

/// Runs `count` calls from `seed` on both backings. Panics with the seed at the first difference.
pub fn run<A: Backing, B: Backing>(a: &A, b: &B, seed: u64, count: usize) {
    let mut rng = StdRng::seed_from_u64(seed);
    for step in 0..count {
        let op = random(&mut rng);
        let in_a = apply(a, &op);
        let in_b = apply(b, &op);
        assert_eq!(in_a, in_b, "seed {seed}, step {step}: {op:?}");
        if step % 16 == 0 || step + 1 == count {
            assert_eq!(tree(a), tree(b), "seed {seed}, after step {step}: {op:?}");
        }
    }
}

/// Runs `count` calls from `seed` on one backing.
pub fn run_alone<B: Backing>(b: &B, seed: u64, count: usize) {
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..count {
        // Most calls fail, because their names do not exist or exist already.
        let _ = apply(b, &random(&mut rng));
    }
}

fn random(rng: &mut StdRng) -> Op {
    let place = |rng: &mut StdRng| {
        (
            rng.random_bool(0.5).then(|| rng.random_range(0..4)),
            rng.random_range(0..4),
        )
    };
    let at = |rng: &mut StdRng| rng.random_range(0..20_000u64);
    let mode = |rng: &mut StdRng| rng.random_range(0..0o10000u32);
    let p = place(rng);
    match rng.random_range(0..20) {
        0 | 1 => Op::Create(p, mode(rng)),
        2 | 3 => Op::Mkdir(p, mode(rng)),
        4 => Op::Symlink(p),
        5 => Op::Fifo(p),
        6 => Op::Link(p, place(rng)),
        7 => Op::Unlink(p),
        8 => Op::Rmdir(p),
        9..=11 => Op::Rename(p, place(rng), [0, 0, 1, 2, 3][rng.random_range(0..5)]),
        12 => Op::Chmod(p, mode(rng)),
        13 => Op::Chown(p, rng.random_range(1..5)),
        14 => Op::SetXattr(p, rng.random_range(0..3), rng.random_range(0..3)),
        15 => Op::RemoveXattr(p, rng.random_range(0..3)),
        16 | 17 => {
            let len = rng.random_range(0..9000);
            Op::Write(p, at(rng), (0..len).map(|_| rng.random()).collect())
        }
        18 if rng.random_ratio(1, 3) => {
            let count = rng.random_range(1..6);
            let parts = (0..count).map(|_| vec![rng.random(); rng.random_range(1..900)]);
            let parts = parts.collect();
            Op::WriteParts(p, at(rng), rng.random_range(900..2000), parts)
        }
        18 if rng.random() => Op::Truncate(p, at(rng)),
        18 => Op::Punch(p, at(rng), at(rng)),
        _ => Op::Copy(p, at(rng), place(rng), at(rng), at(rng)),
    }
}

fn name(index: u8) -> OsString {
    char::from(b'a' + index).to_string().into()
}

fn parent<B: Backing>(b: &B, place: &Place) -> Result<(B::Inode, OsString), Errno> {
    let dir = match place.0 {
        None => b.root(),
        Some(index) => b.lookup(&b.root(), &name(index))?.0,
    };
    Ok((dir, name(place.1)))
}

fn inode<B: Backing>(b: &B, place: &Place) -> Result<B::Inode, Errno> {
    let (dir, name) = parent(b, place)?;
    Ok(b.lookup(&dir, &name)?.0)
}

/// Makes the call. Returns its errno, or a number that must be equal on both backings.
fn apply<B: Backing>(b: &B, op: &Op) -> Result<u64, Errno> {
    let me = own_caller();
    let xattr = |index: &u8| OsString::from(format!("user.{index}"));
    let open = |place, access| inode(b, place).and_then(|n| b.open(&n, access));
    match op {
        Op::Create(p, mode) => {
            let (dir, name) = parent(b, p)?;
            b.create(&me, &dir, &name, *mode)
                .map(|made| u64::from(made.2.mode))
        }
        Op::Mkdir(p, mode) => {
            let (dir, name) = parent(b, p)?;
            b.mkdir(&me, &dir, &name, *mode)
                .map(|made| u64::from(made.1.mode))
        }
        Op::Symlink(p) => {
            let (dir, name) = parent(b, p)?;
            b.symlink(&me, &dir, &name, &xattr(&p.1))
                .map(|made| made.1.size)
        }
        Op::Fifo(p) => {
            let (dir, name) = parent(b, p)?;
            let fifo = NewKind::Node {
                mode: libc::S_IFIFO | 0o600,
                rdev: 0,
            };
            b.make(&me, &dir, &name, fifo).map(|_| 0)
        }
        Op::Link(p, q) => {
            let (dir, name) = parent(b, q)?;
            b.link(&inode(b, p)?, &dir, &name)
                .map(|attr| u64::from(attr.nlink))
        }
        Op::Unlink(p) => parent(b, p)
            .and_then(|(dir, name)| b.unlink(&dir, &name))
            .map(|()| 0),
        Op::Rmdir(p) => parent(b, p)
            .and_then(|(dir, name)| b.rmdir(&dir, &name))
            .map(|()| 0),
        Op::Rename(p, q, flags) => {
            let ((dir, name), (new_dir, new_name)) = (parent(b, p)?, parent(b, q)?);
            let flags = RenameFlags::from_bits_retain(*flags);
            b.rename(&dir, &name, &new_dir, &new_name, flags)
                .map(|()| 0)
        }
        Op::Chmod(p, mode) => b.set_mode(&inode(b, p)?, *mode).map(|()| 0),
        Op::Chown(p, id) => b.set_owner(&inode(b, p)?, Some(*id), Some(*id)).map(|()| 0),
        Op::SetXattr(p, x, flags) => b
            .set_xattr(&inode(b, p)?, &xattr(x), &[*x; 9], *flags)
            .map(|()| 0),
        Op::RemoveXattr(p, x) => b.remove_xattr(&inode(b, p)?, &xattr(x)).map(|()| 0),
        Op::Write(p, at, bytes) => {
            let file = open(p, Access::Write)?;
            b.write_at(&file, &[IoSlice::new(bytes)], *at)
                .map(|count| count as u64)
        }
        Op::WriteParts(p, first, distance, bytes) => {
            let file = open(p, Access::Write)?;
            let data: Vec<_> = bytes.iter().map(|bytes| [IoSlice::new(bytes)]).collect();
            let offsets = (0..).map(|number| first + number * distance);
            let parts = offsets.zip(&data);
            let mut parts: Vec<_> = parts
                .map(|(offset, data)| DataPart { offset, data })
                .collect();
            parts.reverse();
            b.write_parts(&file, &parts)
        }
        Op::Truncate(p, len) => b.set_len(&open(p, Access::ReadWrite)?, *len).map(|()| 0),
        Op::Punch(p, at, len) => {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            b.allocate(&open(p, Access::ReadWrite)?, mode, *at, *len)
                .map(|()| 0)
        }
        Op::Copy(p, at, q, to, len) => {
            let from = open(p, Access::Read)?;
            let into = open(q, Access::Write)?;
            b.copy_range(&from, *at, &into, *to, *len)
        }
    }
}
