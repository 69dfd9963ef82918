//! One writer: random operations on its own files and on its stripes of the shared file. A model has the expected
//! contents, which each read of the writer must return exactly.

use std::collections::BTreeMap;
use std::ffi::OsStr;

use firn_backing::{Backing, Errno, RenameFlags, SetTime};
use firn_engine::{HandleId, InodeId, ROOT, SetAttr};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::mount::{CALLER, Mount, O_RDWR};
use super::shared::{self, Stripes};

pub const NAMES: [&str; 4] = ["a", "b", "c", "d"];
const FILE_BYTES_MAX: usize = 60_000;
const OPEN_MAX: usize = 6;

/// The expected contents of the files and stripes of one writer.
#[derive(Default)]
pub struct Model {
    names: BTreeMap<&'static str, usize>,
    contents: Vec<Vec<u8>>,
    pub stripes: Stripes,
}

impl Model {
    /// Returns the writer's own files by path.
    pub fn tree(&self, dir: &str) -> BTreeMap<String, Vec<u8>> {
        self.names
            .iter()
            .map(|(name, object)| (format!("{dir}/{name}"), self.contents[*object].clone()))
            .collect()
    }
}

struct Writer<'a, B: Backing> {
    mount: &'a Mount<B>,
    index: usize,
    dir: InodeId,
    rng: StdRng,
    model: Model,
    open: Vec<(HandleId, usize)>,
    shared: HandleId,
    version: u8,
}

pub fn run<B: Backing>(mount: &Mount<B>, index: usize, dir: InodeId, seed: u64, ops: u64) -> Model {
    let inode = mount
        .engine
        .namespace
        .lookup(ROOT, OsStr::new(shared::NAME))
        .expect("the shared file")
        .inode;
    let shared = mount.engine.open(inode, O_RDWR).expect("open").handle;
    let rng = StdRng::seed_from_u64(seed ^ index as u64);
    let mut writer = Writer {
        mount,
        index,
        dir,
        rng,
        model: Model::default(),
        open: Vec::new(),
        shared,
        version: 0,
    };
    for _ in 0..ops {
        writer.step();
    }
    writer
        .open
        .drain(..)
        .for_each(|(handle, _)| mount.close(handle));
    mount.close(shared);
    mount.engine.namespace.forget(inode, 1);
    writer.model
}

impl<B: Backing> Writer<'_, B> {
    fn step(&mut self) {
        match self.rng.random_range(0..100) {
            0..25 => self.write_shared(),
            25..30 => self.read_shared(),
            30..40 => self.open(),
            40..65 => self.write(),
            65..73 => self.read(),
            73..80 => self.truncate(),
            80..85 => self.rename(),
            85..88 => self.link(),
            88..92 => self.unlink(),
            92..97 => self.close(),
            _ => self.fsync(),
        }
    }

    fn any_name(&mut self) -> &'static str {
        NAMES[self.rng.random_range(0..NAMES.len())]
    }

    fn any_open(&mut self) -> Option<(HandleId, usize)> {
        let count = self.open.len();
        (count > 0).then(|| self.open[self.rng.random_range(0..count)])
    }

    fn next_data(&mut self, len: usize) -> Vec<u8> {
        self.version = self.version.wrapping_add(1);
        shared::data(self.index, self.version, len)
    }

    fn write_shared(&mut self) {
        let (offset, len) = Stripes::choose(self.index, &mut self.rng);
        let data = self.next_data(len);
        let stripes = &mut self.model.stripes;
        self.mount
            .write(self.shared, offset as u64, &data, |at, part| {
                stripes.write(at, part)
            });
    }

    fn read_shared(&mut self) {
        let (offset, len) = Stripes::choose(self.index, &mut self.rng);
        let mut found = vec![0xff; len];
        let count = self
            .mount
            .engine
            .read(self.shared, offset as u64, &mut found)
            .expect("read");
        let mut expected = self.model.stripes.read(offset, len);
        // Beyond the end of the file there are no bytes. Holes before the end are zeros.
        assert!(
            expected[count..].iter().all(|byte| *byte == 0),
            "a stripe ends early"
        );
        expected.truncate(count);
        assert!(
            found[..count] == expected,
            "the shared file at {offset}, {count} bytes"
        );
    }

    fn open(&mut self) {
        if self.open.len() == OPEN_MAX {
            return self.close();
        }
        let name = self.any_name();
        let engine = &self.mount.engine;
        let known = self.model.names.get(name).copied();
        let (entry, opened) = engine
            .create(&CALLER, self.dir, OsStr::new(name), 0o644, O_RDWR)
            .expect("open");
        engine.namespace.forget(entry.inode, 1);
        let object = known.unwrap_or_else(|| {
            self.model.contents.push(Vec::new());
            self.model.contents.len() - 1
        });
        assert_eq!(
            entry.attr.size,
            self.model.contents[object].len() as u64,
            "{name}"
        );
        self.model.names.insert(name, object);
        self.open.push((opened.handle, object));
    }

    fn write(&mut self) {
        let Some((handle, object)) = self.any_open() else {
            return self.open();
        };
        let size = self.model.contents[object].len();
        let offset = match self.rng.random_range(0..3) {
            0 => size.min(FILE_BYTES_MAX),
            1 => self.rng.random_range(0..=size.min(FILE_BYTES_MAX)),
            _ => self.rng.random_range(0..FILE_BYTES_MAX),
        };
        let len_max = [64, 5000, 30_000][self.rng.random_range(0..3)];
        let len = self.rng.random_range(1..len_max);
        let data = self.next_data(len);
        let contents = &mut self.model.contents[object];
        self.mount.write(handle, offset as u64, &data, |at, part| {
            contents.resize(contents.len().max(at + part.len()), 0);
            contents[at..at + part.len()].copy_from_slice(part);
        });
    }

    fn read(&mut self) {
        let Some((handle, object)) = self.any_open() else {
            return self.open();
        };
        let contents = &self.model.contents[object];
        let offset = self.rng.random_range(0..=contents.len());
        let mut found = vec![0xff; self.rng.random_range(1..40_000)];
        let count = self
            .mount
            .engine
            .read(handle, offset as u64, &mut found)
            .expect("read");
        let expected = &contents[offset..contents.len().min(offset + found.len())];
        assert_eq!(count, expected.len(), "length of a read at {offset}");
        assert!(found[..count] == *expected, "bytes of a read at {offset}");
    }

    fn truncate(&mut self) {
        let name = self.any_name();
        let Some(&object) = self.model.names.get(name) else {
            return self.open();
        };
        let size = self.rng.random_range(0..FILE_BYTES_MAX);
        let engine = &self.mount.engine;
        let inode = engine
            .namespace
            .lookup(self.dir, OsStr::new(name))
            .expect("it is there")
            .inode;
        let attr = engine
            .namespace
            .set_attr(
                inode,
                SetAttr {
                    size: Some(size as u64),
                    ..NOTHING
                },
                None,
            )
            .expect("truncate");
        assert_eq!(attr.size, size as u64);
        engine.namespace.forget(inode, 1);
        self.model.contents[object].resize(size, 0);
    }

    fn rename(&mut self) {
        let from = self.any_name();
        let to = self.any_name();
        let Some(&object) = self.model.names.get(from) else {
            return self.open();
        };
        let engine = &self.mount.engine;
        let dir = self.dir;
        let exchange = self
            .model
            .names
            .get(to)
            .copied()
            .filter(|_| self.rng.random_bool(0.3));
        let flags = if exchange.is_some() {
            RenameFlags::EXCHANGE
        } else {
            RenameFlags::empty()
        };
        self.mount.insist(|| {
            engine
                .namespace
                .rename(dir, OsStr::new(from), dir, OsStr::new(to), flags)
        });
        // Both names belong to one file: a rename changes nothing.
        if self.model.names.get(to) == Some(&object) {
            return;
        }
        self.model.names.remove(from);
        self.model.names.insert(to, object);
        self.model.names.extend(exchange.map(|other| (from, other)));
    }

    fn link(&mut self) {
        let from = self.any_name();
        let to = self.any_name();
        let Some(&object) = self.model.names.get(from) else {
            return self.open();
        };
        let engine = &self.mount.engine;
        let inode = engine
            .namespace
            .lookup(self.dir, OsStr::new(from))
            .expect("it is there")
            .inode;
        match engine.namespace.link(inode, self.dir, OsStr::new(to)) {
            Ok(entry) => {
                engine.namespace.forget(entry.inode, 1);
                assert!(self.model.names.insert(to, object).is_none());
            }
            Err(Errno::EXIST) => assert!(self.model.names.contains_key(to)),
            Err(errno) => panic!("link: {errno}"),
        }
        engine.namespace.forget(inode, 1);
    }

    fn unlink(&mut self) {
        let name = self.any_name();
        if self.model.names.remove(name).is_some() {
            let engine = &self.mount.engine;
            let dir = self.dir;
            self.mount
                .insist(|| engine.namespace.unlink(dir, OsStr::new(name)));
        }
    }

    fn close(&mut self) {
        if !self.open.is_empty() {
            let at = self.rng.random_range(0..self.open.len());
            self.mount.close(self.open.swap_remove(at).0);
        }
    }

    fn fsync(&mut self) {
        let handle = self.any_open().map_or(self.shared, |(handle, _)| handle);
        self.mount.fsync(handle);
    }
}

const NOTHING: SetAttr = SetAttr {
    mode: None,
    uid: None,
    gid: None,
    size: None,
    atime: SetTime::Keep,
    mtime: SetTime::Keep,
};
