//! A program that reads files by chunk lists: the listed bytes are right, and stay unchanged until the list is
//! released.

use firn_backing::{Backing, Errno};
use firn_engine::{HeldChunks, ListedPart, PartPlace};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::mount::Mount;
use super::{WRITERS, dir_name};
use super::{shared, writer};

/// Returns the number of bytes that were read.
pub fn run<B: Backing>(mount: &Mount<B>, seed: u64, go_on: impl Fn() -> bool) -> u64 {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut bytes = 0;
    while go_on() {
        bytes += if rng.random_bool(0.5) {
            list(mount, shared::NAME, shared::is_byte_of_owner)
        } else {
            let owner = rng.random_range(0..WRITERS);
            let name = writer::NAMES[rng.random_range(0..writer::NAMES.len())];
            let path = format!("{}/{name}", dir_name(owner));
            list(mount, &path, |_, byte| shared::is_byte_of(owner, byte))
        };
    }
    bytes
}

fn list<B: Backing>(mount: &Mount<B>, path: &str, right: impl Fn(usize, u8) -> bool) -> u64 {
    let (held, pieces) = match HeldChunks::list_file(&mount.engine, path.as_bytes()) {
        Ok(made) => made,
        // The file was removed, or its directory has another name at the moment.
        Err(Errno::NOENT | Errno::STALE) => return 0,
        Err(errno) => panic!("{path}: {errno}"),
    };
    let before: Vec<Vec<u8>> = pieces.iter().map(|piece| bytes_of(mount, piece)).collect();
    for (piece, bytes) in pieces.iter().zip(&before) {
        let wrong = (0..bytes.len()).find(|at| !right(piece.offset as usize + at, bytes[*at]));
        assert_eq!(wrong, None, "{path}: {piece:?}");
    }
    // During this pause other threads may change the file.
    std::thread::sleep(std::time::Duration::from_micros(300));
    for (piece, bytes) in pieces.iter().zip(&before) {
        assert!(
            bytes_of(mount, piece) == *bytes,
            "{path}: {piece:?} did not stay"
        );
    }
    held.changed();
    before.iter().map(|bytes| bytes.len() as u64).sum()
}

fn bytes_of<B: Backing>(mount: &Mount<B>, piece: &ListedPart) -> Vec<u8> {
    if piece.place != PartPlace::Memory {
        return Vec::new();
    }
    let arena = mount.engine.arena();
    let at = arena.address(arena.geometry().data_offset() + piece.at);
    let mut bytes = vec![0; piece.bytes as usize];
    // SAFETY: the chunk list ensures that the range lies within the mapping, and that no thread stores there while the
    // list is held. The copy calls a function of libc, which ThreadSanitizer watches.
    unsafe { std::ptr::copy_nonoverlapping(at, bytes.as_mut_ptr(), bytes.len()) };
    bytes
}
