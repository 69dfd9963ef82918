//! Makes the same random calls on two backings (implementations of a file system). Both must return the same errnos and
//! end with the same tree.

use std::ffi::OsString;
use std::io::IoSlice;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::own_caller;
use crate::tree;
use firn_backing::{Access, Attr, Backing, DataPart, Errno, NewKind, RenameFlags};

/// Number of calls after which the trees of both backings are compared.
const CALLS_BETWEEN_COMPARISONS: usize = 16;

/// One random call.
#[derive(Clone, Debug)]
enum Call {
    Create {
        path: Path,
        mode: u32,
    },
    Mkdir {
        path: Path,
        mode: u32,
    },
    Symlink(Path),
    Fifo(Path),
    Link {
        path: Path,
        new_path: Path,
    },
    Unlink(Path),
    Rmdir(Path),
    Rename {
        path: Path,
        new_path: Path,
        flags: u32,
    },
    Chmod {
        path: Path,
        mode: u32,
    },
    /// Sets the owner and the group to the same id.
    Chown {
        path: Path,
        id: u32,
    },
    SetXattr {
        path: Path,
        xattr: u8,
        flags: i32,
    },
    RemoveXattr {
        path: Path,
        xattr: u8,
    },
    Write {
        path: Path,
        offset: u64,
        bytes: Vec<u8>,
    },
    /// Writes several parts, in descending order of their offsets.
    WriteParts {
        path: Path,
        lowest_offset: u64,
        /// Distance between the beginnings of two parts.
        distance: u64,
        parts: Vec<Vec<u8>>,
    },
    Truncate {
        path: Path,
        len: u64,
    },
    Punch {
        path: Path,
        offset: u64,
        len: u64,
    },
    Copy {
        from: Path,
        from_offset: u64,
        to: Path,
        to_offset: u64,
        len: u64,
    },
}

/// The path of an object in the top directory, or in a directory of the top directory. There are only four names, `a`
/// to `d`, so that calls meet on the same ones.
#[derive(Clone, Copy, Debug)]
struct Path {
    /// Number of the directory's name, or `None` for the top directory.
    dir: Option<u8>,
    /// Number of the object's name.
    name: u8,
}

/// Runs `count` random calls from `seed` on both backings (file systems). Panics with the seed at the first difference.
pub fn run<A: Backing, B: Backing>(first: &A, second: &B, seed: u64, count: usize) {
    let mut rng = StdRng::seed_from_u64(seed);
    for step in 0..count {
        let call = random_call(&mut rng);
        let first_result = make_call(first, &call);
        let second_result = make_call(second, &call);
        assert_eq!(
            first_result, second_result,
            "seed {seed}, step {step}: {call:?}"
        );
        let is_last = step + 1 == count;
        if step % CALLS_BETWEEN_COMPARISONS == 0 || is_last {
            assert_eq!(
                tree(first),
                tree(second),
                "seed {seed}, after step {step}: {call:?}"
            );
        }
    }
}

/// Runs `count` calls from `seed` on one backing.
pub fn run_alone<B: Backing>(backing: &B, seed: u64, count: usize) {
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..count {
        // Most calls fail, because their names do not exist or exist already.
        let _ = make_call(backing, &random_call(&mut rng));
    }
}

fn random_path(rng: &mut StdRng) -> Path {
    Path {
        dir: rng.random_bool(0.5).then(|| rng.random_range(0..4)),
        name: rng.random_range(0..4),
    }
}

/// Returns an offset in a file, or a length.
fn random_offset(rng: &mut StdRng) -> u64 {
    rng.random_range(0..20_000)
}

fn random_mode(rng: &mut StdRng) -> u32 {
    rng.random_range(0..0o10000)
}

/// Flags of renameat2(2) from which a rename chooses: often none, RENAME_NOREPLACE, RENAME_EXCHANGE, and both, which is
/// an error.
const RENAME_FLAGS: [u32; 5] = [0, 0, 1, 2, 3];

/// Chooses the next call. Tests name calls by their seeds, so a seed must always lead to the same calls.
fn random_call(rng: &mut StdRng) -> Call {
    let path = random_path(rng);
    match rng.random_range(0..20) {
        0 | 1 => Call::Create {
            path,
            mode: random_mode(rng),
        },
        2 | 3 => Call::Mkdir {
            path,
            mode: random_mode(rng),
        },
        4 => Call::Symlink(path),
        5 => Call::Fifo(path),
        6 => Call::Link {
            path,
            new_path: random_path(rng),
        },
        7 => Call::Unlink(path),
        8 => Call::Rmdir(path),
        9..=11 => Call::Rename {
            path,
            new_path: random_path(rng),
            flags: RENAME_FLAGS[rng.random_range(0..RENAME_FLAGS.len())],
        },
        12 => Call::Chmod {
            path,
            mode: random_mode(rng),
        },
        13 => Call::Chown {
            path,
            id: rng.random_range(1..5),
        },
        14 => Call::SetXattr {
            path,
            xattr: rng.random_range(0..3),
            flags: rng.random_range(0..3),
        },
        15 => Call::RemoveXattr {
            path,
            xattr: rng.random_range(0..3),
        },
        number => random_data_call(number, path, rng),
    }
}

/// Chooses a call that changes the bytes of a file. `number` is what [`random_call`] has drawn, from 16 to 19.
fn random_data_call(number: i32, path: Path, rng: &mut StdRng) -> Call {
    match number {
        16 | 17 => {
            let len = rng.random_range(0..9000);
            Call::Write {
                path,
                offset: random_offset(rng),
                bytes: (0..len).map(|_| rng.random()).collect(),
            }
        }
        18 if rng.random_ratio(1, 3) => {
            let count = rng.random_range(1..6);
            let parts = (0..count)
                .map(|_| vec![rng.random(); rng.random_range(1..900)])
                .collect();
            Call::WriteParts {
                path,
                lowest_offset: random_offset(rng),
                distance: rng.random_range(900..2000),
                parts,
            }
        }
        18 if rng.random() => Call::Truncate {
            path,
            len: random_offset(rng),
        },
        18 => Call::Punch {
            path,
            offset: random_offset(rng),
            len: random_offset(rng),
        },
        _ => Call::Copy {
            from: path,
            from_offset: random_offset(rng),
            to: random_path(rng),
            to_offset: random_offset(rng),
            len: random_offset(rng),
        },
    }
}

fn name_of(number: u8) -> OsString {
    char::from(b'a' + number).to_string().into()
}

fn xattr_name(number: u8) -> OsString {
    format!("user.{number}").into()
}

/// Looks up the directory of a path. Returns it with the last name of the path.
fn find_parent<B: Backing>(backing: &B, path: Path) -> Result<(B::Inode, OsString), Errno> {
    let top = backing.root();
    let dir = match path.dir {
        None => top,
        Some(number) => backing.lookup(&top, &name_of(number))?.0,
    };
    Ok((dir, name_of(path.name)))
}

fn find<B: Backing>(backing: &B, path: Path) -> Result<B::Inode, Errno> {
    let (dir, name) = find_parent(backing, path)?;
    let (inode, _) = backing.lookup(&dir, &name)?;
    Ok(inode)
}

fn open<B: Backing>(backing: &B, path: Path, access: Access) -> Result<B::File, Errno> {
    backing.open(&find(backing, path)?, access)
}

/// Makes the call on a backing (a file system). Returns its errno, or a number that must be equal on both backings.
fn make_call<B: Backing>(backing: &B, call: &Call) -> Result<u64, Errno> {
    match *call {
        Call::Create { .. } | Call::Mkdir { .. } | Call::Symlink(_) | Call::Fifo(_) => {
            make_object(backing, call)
        }
        Call::Link { path, new_path } => {
            let (dir, name) = find_parent(backing, new_path)?;
            let attr = backing.link(&find(backing, path)?, &dir, &name)?;
            Ok(u64::from(attr.nlink))
        }
        Call::Unlink(path) => {
            let (dir, name) = find_parent(backing, path)?;
            backing.unlink(&dir, &name).map(|()| 0)
        }
        Call::Rmdir(path) => {
            let (dir, name) = find_parent(backing, path)?;
            backing.rmdir(&dir, &name).map(|()| 0)
        }
        Call::Rename {
            path,
            new_path,
            flags,
        } => {
            let (dir, name) = find_parent(backing, path)?;
            let (new_dir, new_name) = find_parent(backing, new_path)?;
            let flags = RenameFlags::from_bits_retain(flags);
            backing
                .rename(&dir, &name, &new_dir, &new_name, flags)
                .map(|()| 0)
        }
        Call::Chmod { .. }
        | Call::Chown { .. }
        | Call::SetXattr { .. }
        | Call::RemoveXattr { .. } => change_attributes(backing, call).map(|()| 0),
        Call::Write { .. }
        | Call::WriteParts { .. }
        | Call::Truncate { .. }
        | Call::Punch { .. }
        | Call::Copy { .. } => change_data(backing, call),
    }
}

/// Executes a call that creates an object. Returns a number by which the new objects are compared: the mode, or the
/// length of a symbolic link.
fn make_object<B: Backing>(backing: &B, call: &Call) -> Result<u64, Errno> {
    let caller = own_caller();
    let mode_of = |attr: Attr| u64::from(attr.mode);
    match *call {
        Call::Create { path, mode } => {
            let (dir, name) = find_parent(backing, path)?;
            let (_, _, attr) = backing.create(&caller, &dir, &name, mode)?;
            Ok(mode_of(attr))
        }
        Call::Mkdir { path, mode } => {
            let (dir, name) = find_parent(backing, path)?;
            let (_, attr) = backing.mkdir(&caller, &dir, &name, mode)?;
            Ok(mode_of(attr))
        }
        Call::Symlink(path) => {
            let (dir, name) = find_parent(backing, path)?;
            let target = xattr_name(path.name);
            let (_, attr) = backing.symlink(&caller, &dir, &name, &target)?;
            Ok(attr.size)
        }
        Call::Fifo(path) => {
            let (dir, name) = find_parent(backing, path)?;
            let kind = NewKind::Node {
                mode: libc::S_IFIFO | 0o600,
                rdev: 0,
            };
            backing.make(&caller, &dir, &name, kind).map(|_| 0)
        }
        _ => unreachable!("the call makes no object: {call:?}"),
    }
}

/// Makes a call that changes the attributes of an object.
fn change_attributes<B: Backing>(backing: &B, call: &Call) -> Result<(), Errno> {
    match *call {
        Call::Chmod { path, mode } => backing.set_mode(&find(backing, path)?, mode),
        Call::Chown { path, id } => backing.set_owner(&find(backing, path)?, Some(id), Some(id)),
        Call::SetXattr { path, xattr, flags } => {
            let value = [xattr; 9];
            backing.set_xattr(&find(backing, path)?, &xattr_name(xattr), &value, flags)
        }
        Call::RemoveXattr { path, xattr } => {
            backing.remove_xattr(&find(backing, path)?, &xattr_name(xattr))
        }
        _ => unreachable!("the call changes no attributes: {call:?}"),
    }
}

/// Makes a call that changes the bytes of a file. Returns the number of bytes that were written or copied.
fn change_data<B: Backing>(backing: &B, call: &Call) -> Result<u64, Errno> {
    match *call {
        Call::Write {
            path,
            offset,
            ref bytes,
        } => {
            let file = open(backing, path, Access::Write)?;
            let count = backing.write_at(&file, &[IoSlice::new(bytes)], offset)?;
            Ok(count as u64)
        }
        Call::WriteParts {
            path,
            lowest_offset,
            distance,
            ref parts,
        } => {
            let file = open(backing, path, Access::Write)?;
            write_parts_backwards(backing, &file, lowest_offset, distance, parts)
        }
        Call::Truncate { path, len } => {
            let file = open(backing, path, Access::ReadWrite)?;
            backing.set_len(&file, len).map(|()| 0)
        }
        Call::Punch { path, offset, len } => {
            let file = open(backing, path, Access::ReadWrite)?;
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            backing.allocate(&file, mode, offset, len).map(|()| 0)
        }
        Call::Copy {
            from,
            from_offset,
            to,
            to_offset,
            len,
        } => {
            let source = open(backing, from, Access::Read)?;
            let target = open(backing, to, Access::Write)?;
            backing.copy_range(&source, from_offset, &target, to_offset, len)
        }
        _ => unreachable!("the call changes no bytes: {call:?}"),
    }
}

/// Writes several parts with one call, the one with the highest offset first. Returns the number of bytes written.
fn write_parts_backwards<B: Backing>(
    backing: &B,
    file: &B::File,
    lowest_offset: u64,
    distance: u64,
    parts: &[Vec<u8>],
) -> Result<u64, Errno> {
    let slices: Vec<_> = parts.iter().map(|bytes| [IoSlice::new(bytes)]).collect();
    let mut offset = lowest_offset;
    let mut data_parts = Vec::new();
    for data in &slices {
        data_parts.push(DataPart { offset, data });
        offset += distance;
    }
    data_parts.reverse();
    backing.write_parts(file, &data_parts)
}
