//! A reader of the files of all writers: at any moment, each byte is one that the writer of that range wrote.

use std::ffi::OsStr;

use firn_backing::{Backing, Errno};
use firn_engine::{InodeId, ROOT};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::mount::Mount;
use super::{shared, writer};

pub fn run<B: Backing>(mount: &Mount<B>, dirs: &[InodeId], seed: u64, go_on: impl Fn() -> bool) {
    let mut rng = StdRng::seed_from_u64(seed);
    while go_on() {
        if rng.random_bool(0.5) {
            read(
                mount,
                ROOT,
                shared::NAME,
                &mut rng,
                shared::is_byte_of_owner,
            );
        } else {
            let owner = rng.random_range(0..dirs.len());
            let name = writer::NAMES[rng.random_range(0..writer::NAMES.len())];
            read(mount, dirs[owner], name, &mut rng, |_, byte| {
                shared::is_byte_of(owner, byte)
            });
        }
    }
}

fn read<B: Backing>(
    mount: &Mount<B>,
    dir: InodeId,
    name: &str,
    rng: &mut StdRng,
    right: impl Fn(usize, u8) -> bool,
) {
    let engine = &mount.engine;
    let entry = match engine.namespace.lookup(dir, OsStr::new(name)) {
        Ok(entry) => entry,
        Err(Errno::NOENT) => return,
        Err(errno) => panic!("lookup: {errno}"),
    };
    // The file may lose its last name between the lookup and the open.
    if let Ok(opened) = engine.open(entry.inode, 0) {
        for _ in 0..rng.random_range(1..6) {
            let offset = rng.random_range(0..=entry.attr.size);
            let mut buf = vec![0xff; rng.random_range(1..9000)];
            let count = engine.read(opened.handle, offset, &mut buf).expect("read");
            let wrong = (0..count).find(|index| !right(offset as usize + index, buf[*index]));
            assert_eq!(
                wrong,
                None,
                "{name} at {offset}: {:?}",
                wrong.map(|index| buf[index])
            );
        }
        engine
            .namespace
            .attr(entry.inode, Some(opened.handle))
            .expect("fstat");
        mount.close(opened.handle);
    }
    engine.namespace.forget(entry.inode, 1);
}
