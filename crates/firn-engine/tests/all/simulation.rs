//! Random tests: an engine over the simulated backing makes random operations and is compared with a reference model.
//! The world stops at any store to the arena or call of the backing.
//!
//! `FIRN_SEED` repeats one run. `FIRN_OPS` sets the total number of operations.

use crate::common;

use common::model::{Model, Object, Unacknowledged, partly};
use common::world::{self, DiskKind, World};
use firn_backing::{Backing, Caller, Errno, RenameFlags, SetTime, Time};
use firn_engine::{
    Closing, DrainPolicy, HandleId, HeldChunks, ListedPart, Order, PartPlace, ROOT, SetAttr,
    Written,
};
use firn_format::durability::DurabilityLevel;
use firn_sim::SimBacking;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
const DIRS: [&str; 3] = ["d0", "d1", "d2"];
const NAMES: [&str; 4] = ["a", "b", "c", "d"];
const FILE_MAX: u64 = 150_000;
const MEMORY_FILE_MIN: u64 = 4096;
const O_RDWR: i32 = 2;

struct Open {
    handle: HandleId,
    object: Object,
}

/// A list of chunks, and the contents of the file when the list was made.
struct Listed {
    held: HeldChunks<SimBacking>,
    pieces: Vec<ListedPart>,
    object: Object,
    contents: Vec<u8>,
}

/// A copy as a partner makes it: it reads the version (`changes`) first, and then the contents.
struct Copied {
    object: Object,
    changes: u64,
    contents: Vec<u8>,
}

/// Maximum number of copies that a run remembers.
const COPIES_MAX: usize = 6;
/// Maximum number of lists that a run holds at a time.
const LISTS_MAX: usize = 4;

struct Run {
    world: World,
    rng: StdRng,
    model: Model,
    open: Vec<Open>,
    lists: Vec<Listed>,
    copies: Vec<Copied>,
    /// Contents of the copy that was last marked as partnered, by object.
    partnered: BTreeMap<Object, Vec<u8>>,
    /// Inode numbers by object. They tell which object a name leads to where two objects have the same contents.
    inodes: BTreeMap<Object, u64>,
    /// Modification times that programs saw, for objects that no operation under way changes.
    times: BTreeMap<Object, Time>,
    /// Model before the operation under way.
    before: Model,
    partial: Option<Unacknowledged>,
    faults: bool,
    demand: bool,
    ops: u64,
}

/// Error of an operation whose outcome is unknown, because the world stopped.
struct Stopped;

impl Run {
    fn new(seed: u64, faults: bool) -> Self {
        // Half of the seeds drain only on request.
        let demand = seed % 2 == 1;
        // The seed also decides, independently: whether there is a spill file, whether a lane writes one file at a
        // time, the number of lanes (one to four), and whether the backing gathers pieces.
        let mut options = world::options();
        if demand {
            options.drain = DrainPolicy::Demand;
            // Half of the seeds that drain on request move files into memory files.
            options.memory_file_bytes_min = if (seed / 64).is_multiple_of(2) {
                MEMORY_FILE_MIN
            } else {
                0
            };
        }
        if seed / 4 % 2 == 1 {
            options.order = Order::Sequential;
        }
        let disk = DiskKind {
            lanes: 1 + (seed / 8 % 4) as u16,
            gathers: seed / 32 % 2 == 1,
        };
        let world = World::over(disk, options, seed / 2 % 2 == 1);
        for dir in DIRS {
            world
                .engine
                .namespace
                .mkdir(&CALLER, ROOT, OsStr::new(dir), 0o755)
                .expect("a directory");
        }
        if faults {
            world.arm_with_faults(seed);
        }
        let model = Model::default();
        Self {
            world,
            rng: StdRng::seed_from_u64(seed),
            before: model.clone(),
            model,
            open: Vec::new(),
            lists: Vec::new(),
            copies: Vec::new(),
            partnered: BTreeMap::new(),
            inodes: BTreeMap::new(),
            times: BTreeMap::new(),
            partial: None,
            faults,
            demand,
            ops: 0,
        }
    }

    fn any_path(&mut self) -> String {
        let dir = DIRS[self.rng.random_range(0..DIRS.len())];
        format!("{dir}/{}", NAMES[self.rng.random_range(0..NAMES.len())])
    }

    fn existing(&mut self) -> Option<String> {
        let count = self.model.names.len();
        (count > 0).then(|| {
            let at = self.rng.random_range(0..count);
            self.model.names.keys().nth(at).expect("in range").clone()
        })
    }

    /// Checks the result of an operation. An error must be the errno that a plain file system returns or, in a run with
    /// a failing backing, EIO or ENOSPC. Returns the value of a successful operation, and `None` after an error.
    #[track_caller]
    fn outcome<T>(
        &self,
        result: Result<T, Errno>,
        expected: Result<(), Errno>,
    ) -> Result<Option<T>, Stopped> {
        if std::env::var_os("FIRN_TRACE").is_some() {
            let ok = result.as_ref().map(|_| ()).map_err(|e| *e);
            let changes = self.changes();
            eprintln!(
                "{} line {}: {ok:?} {changes}",
                self.ops,
                std::panic::Location::caller().line()
            );
        }
        if self.world.stopped() {
            return Err(Stopped);
        }
        match (result, expected) {
            (Ok(value), Ok(())) => Ok(Some(value)),
            (Err(found), Err(errno)) if found == errno => Ok(None),
            (Err(Errno::IO | Errno::NOSPC), _) if self.faults => Ok(None),
            (found, expected) => panic!("expected {expected:?}, got {:?}", found.map(|_| ())),
        }
    }

    /// Returns a description of the changes by the operation under way, for a trace.
    fn changes(&self) -> String {
        let sizes = |model: &Model| -> BTreeMap<String, (Object, usize)> {
            model
                .names
                .iter()
                .map(|(p, o)| (p.clone(), (*o, model.contents[o].len())))
                .collect()
        };
        let before = sizes(&self.before);
        let after = sizes(&self.model);
        let gone = before.iter().filter(|(p, v)| after.get(*p) != Some(v));
        let came = after.iter().filter(|(p, v)| before.get(*p) != Some(v));
        format!(
            "{:?} -> {:?}",
            gone.collect::<Vec<_>>(),
            came.collect::<Vec<_>>()
        )
    }

    fn step(&mut self) -> Result<(), Stopped> {
        self.before = self.model.clone();
        self.partial = None;
        self.ops += 1;
        match self.rng.random_range(0..100) {
            0..8 => self.create(),
            8..14 => self.open_existing(),
            14..50 => self.write(),
            50..58 => self.truncate(),
            58..64 => self.rename(),
            64..67 => self.rename_directory(),
            67..70 => self.link(),
            70..74 => self.unlink(),
            74..80 => self.close(),
            80..84 => self.fsync(),
            84..86 => self.set_time(),
            86..92 => self.drain(),
            92..95 => self.list(),
            95..96 => self.let_go(),
            96..97 => self.copy(),
            97..98 => self.mark(),
            98..99 => self.wait_until_durable(),
            _ => self.read(),
        }?;
        self.check_lists();
        self.check_partnered();
        self.check_levels()
    }

    /// Returns the modification time of an object as a program sees it; `None` if the object has no name.
    fn time_of(&self, object: Object) -> Result<Option<Time>, Stopped> {
        let Some((path, _)) = self.model.names.iter().find(|(_, named)| **named == object) else {
            return Ok(None);
        };
        let attr = self
            .world
            .find(path)
            .and_then(|inode| self.world.engine.namespace.attr(inode, None));
        if self.world.stopped() {
            return Err(Stopped);
        }
        Ok(Some(attr.expect("attributes").mtime))
    }

    /// Records the time of an object after an operation that changed it: from here on, the time must not change by
    /// itself.
    fn changed(&mut self, object: Object) -> Result<(), Stopped> {
        self.times.remove(&object);
        if let Some(time) = self.time_of(object)? {
            self.times.insert(object, time);
        }
        Ok(())
    }

    fn list(&mut self) -> Result<(), Stopped> {
        let Some(path) = self.existing() else {
            return Ok(());
        };
        let object = self.model.names[&path];
        let result = HeldChunks::list_file(&self.world.engine, path.as_bytes());
        let Some((held, pieces)) = self.outcome(result, Ok(()))? else {
            return Ok(());
        };
        let contents = self.model.contents[&object].clone();
        assert_eq!(held.bytes(), contents.len() as u64, "length of {path}");
        let behind = self.world.backing_tree();
        let mut end = 0;
        for piece in &pieces {
            assert!(piece.bytes > 0 && piece.offset == end, "{pieces:?}");
            end += piece.bytes;
            let expected = &contents[piece.offset as usize..end as usize];
            match piece.place {
                PartPlace::Backing => assert_eq!(
                    &behind[&path][piece.at as usize..][..expected.len()],
                    expected
                ),
                PartPlace::Hole => assert!(expected.iter().all(|byte| *byte == 0)),
                PartPlace::Memory | PartPlace::Spill | PartPlace::MemoryFile => {}
            }
        }
        assert_eq!(end, held.bytes(), "{pieces:?}");
        if self.lists.len() == LISTS_MAX {
            let at = self.rng.random_range(0..LISTS_MAX);
            self.lists.swap_remove(at);
        }
        self.lists.push(Listed {
            held,
            pieces,
            object,
            contents,
        });
        Ok(())
    }

    fn let_go(&mut self) -> Result<(), Stopped> {
        if !self.lists.is_empty() {
            let at = self.rng.random_range(0..self.lists.len());
            self.lists.swap_remove(at);
        }
        if self.world.stopped() {
            Err(Stopped)
        } else {
            Ok(())
        }
    }

    /// Copies a file as a partner does: reads the version before the bytes.
    fn copy(&mut self) -> Result<(), Stopped> {
        let files = self.world.engine.files_in_use_below(b"");
        if files.is_empty() {
            return Ok(());
        }
        let file = &files[self.rng.random_range(0..files.len())];
        let path = String::from_utf8(file.path.clone()).expect("a name of this test");
        let Some(object) = self.model.names.get(&path).copied() else {
            return Ok(());
        };
        if self.copies.len() == COPIES_MAX {
            self.copies
                .swap_remove(self.rng.random_range(0..COPIES_MAX));
        }
        self.copies.push(Copied {
            object,
            changes: file.changes,
            contents: self.model.contents[&object].clone(),
        });
        Ok(())
    }

    /// Marks a file as partnered for one of the remembered copies, under any name that the file has now.
    fn mark(&mut self) -> Result<(), Stopped> {
        if self.rng.random_range(0..8) == 0 {
            self.world.engine.durability.forget_partner();
            let files = self.world.engine.files_below(b"");
            assert!(
                files
                    .iter()
                    .all(|file| file.level != DurabilityLevel::Partnered)
            );
            return Ok(());
        }
        if self.copies.is_empty() {
            return Ok(());
        }
        let copied = &self.copies[self.rng.random_range(0..self.copies.len())];
        let mut names = self.model.names.iter();
        let Some((path, object)) = names.find(|(_, object)| **object == copied.object) else {
            return Ok(());
        };
        let marked =
            self.world
                .engine
                .durability
                .mark_partnered(path.as_bytes(), copied.changes, || true);
        if self.world.stopped() {
            return Err(Stopped);
        }
        // While a program has the file open for writing, the result is false. If the file does not change until it is
        // closed, it is partnered from then on.
        let is_as_copied = self.model.contents[object] == copied.contents;
        if marked == Ok(true) || (marked == Ok(false) && is_as_copied) {
            self.partnered.insert(*object, copied.contents.clone());
        }
        Ok(())
    }

    /// S-partner-1, S-partner-3: a file with the level *partnered* has the same bytes as the partner's copy.
    fn check_partnered(&self) {
        for file in self.world.engine.files_below(b"") {
            let path = std::str::from_utf8(&file.path).expect("a name of this test");
            if file.level == DurabilityLevel::Partnered
                && let Some(object) = self.model.names.get(path)
            {
                assert_eq!(
                    self.partnered.get(object),
                    self.model.contents.get(object),
                    "operation {}: {path} is partnered with other bytes",
                    self.ops
                );
            }
        }
    }

    /// S-chunks-1, S-chunks-2: after any operation, the parts of a list still have their bytes, and the list reports a
    /// change of the file.
    fn check_lists(&self) {
        for Listed {
            held,
            pieces,
            object,
            contents,
        } in &self.lists
        {
            for piece in pieces {
                let expected = &contents[piece.offset as usize..][..piece.bytes as usize];
                if let Some(found) = self.bytes_of(piece) {
                    assert!(
                        found == expected,
                        "operation {}: {piece:?} has other bytes",
                        self.ops
                    );
                }
            }
            let now = self.model.contents.get(object);
            assert!(
                held.changed() || now == Some(contents),
                "operation {}: an untold change",
                self.ops
            );
        }
    }

    fn bytes_of(&self, piece: &ListedPart) -> Option<Vec<u8>> {
        let arena = self.world.engine.arena();
        let mut found = vec![0; piece.bytes as usize];
        match piece.place {
            PartPlace::Memory => {
                let at = arena.address(arena.geometry().data_offset() + piece.at);
                // SAFETY: the bytes lie in the mapping, and no thread writes there while the list is held.
                let bytes = unsafe { std::slice::from_raw_parts(at, piece.bytes as usize) };
                found.copy_from_slice(bytes);
            }
            PartPlace::Spill => arena
                .spill_file()
                .expect("it is there")
                .read(piece.at, &mut found)
                .expect("read"),
            PartPlace::MemoryFile => {
                let mut path = arena.path().as_os_str().to_owned();
                path.push(format!(".m{}", piece.chunk.expect("a number")));
                let file = std::fs::File::open(path).expect("it is there");
                file.read_exact_at(&mut found, piece.at).expect("read");
            }
            PartPlace::Backing | PartPlace::Hole => return None,
        }
        Some(found)
    }

    fn create(&mut self) -> Result<(), Stopped> {
        let path = self.any_path();
        let expected = if self.model.names.contains_key(&path) {
            Err(Errno::EXIST)
        } else {
            Ok(())
        };
        let object = expected.is_ok().then(|| self.model.create(&path));
        let result = self.world.parent(&path).and_then(|(dir, name)| {
            self.world
                .engine
                .create(&CALLER, dir, name, 0o644, O_RDWR | 0o200)
        });
        if let Some((entry, opened)) = self.outcome(result, expected)? {
            let object = object.expect("it was to be made");
            self.inodes.insert(object, entry.attr.ino);
            self.changed(object)?;
            self.open.push(Open {
                handle: opened.handle,
                object,
            });
        } else {
            self.model = self.before.clone();
        }
        Ok(())
    }

    fn open_existing(&mut self) -> Result<(), Stopped> {
        let Some(path) = self.existing() else {
            return Ok(());
        };
        let truncates = self.rng.random_bool(0.3);
        let object = self.model.names[&path];
        if truncates {
            self.model.truncate(object, 0);
        }
        let flags = O_RDWR | if truncates { 0o1000 } else { 0 };
        if truncates {
            self.times.remove(&object);
        }
        let result = self
            .world
            .find(&path)
            .and_then(|inode| self.world.engine.open(inode, flags));
        match self.outcome(result, Ok(()))? {
            Some(opened) => {
                self.open.push(Open {
                    handle: opened.handle,
                    object,
                });
                self.changed(object)?;
            }
            None => self.model = self.before.clone(),
        }
        Ok(())
    }

    fn any_open(&mut self) -> Option<(HandleId, Object)> {
        let count = self.open.len();
        (count > 0).then(|| {
            let open = &self.open[self.rng.random_range(0..count)];
            (open.handle, open.object)
        })
    }

    fn write(&mut self) -> Result<(), Stopped> {
        let Some((handle, object)) = self.any_open() else {
            return Ok(());
        };
        let len = self.model.contents[&object].len() as u64;
        let n = match self.rng.random_range(0..4) {
            0 => self.rng.random_range(1..100),
            1 => self.rng.random_range(1..5000),
            2 => 4096,
            _ => self.rng.random_range(1..40_000),
        };
        let offset = match self.rng.random_range(0..3) {
            0 => len.min(FILE_MAX),
            1 => self.rng.random_range(0..=len.min(FILE_MAX)),
            _ => self.rng.random_range(0..FILE_MAX),
        };
        let tag: u8 = self.rng.random_range(1..=255);
        let data: Vec<u8> = (0..n).map(|i| tag ^ (i as u8).wrapping_mul(17)).collect();
        self.partial = Some(Unacknowledged {
            object,
            offset,
            data: data.clone(),
        });
        self.times.remove(&object);
        let mut done = 0;
        while done < data.len() {
            match self
                .world
                .engine
                .write(handle, offset + done as u64, &data[done..], None)
            {
                _ if self.world.stopped() => return Err(Stopped),
                Ok(Written::Bytes(n)) => {
                    self.model
                        .write(object, offset + done as u64, &data[done..done + n]);
                    done += n;
                }
                // In firnd, the writer would wait for the drain. In this test, it drains itself.
                Ok(Written::Full) => self.make_room()?,
                Err(Errno::IO | Errno::NOSPC) if self.faults => return Ok(()),
                Err(errno) => panic!("write: {errno}"),
            }
        }
        self.changed(object)
    }

    fn make_room(&mut self) -> Result<(), Stopped> {
        let told = Arc::new(Mutex::new(None));
        let tell = Arc::clone(&told);
        self.world
            .engine
            .room
            .call_when_space_is_free(Box::new(move |result| *tell.lock().unwrap() = Some(result)));
        for _ in 0..10_000 {
            if self.world.stopped() {
                return Err(Stopped);
            }
            let outcome = *told.lock().unwrap();
            if let Some(outcome) = outcome {
                if outcome.is_err() {
                    // The lists may hold all of the memory.
                    self.lists.clear();
                }
                if self.demand && outcome == Err(Errno::NOSPC) {
                    self.world.engine.durability.drain_tree(b"");
                    while self.world.drain_step() {}
                    // Evicts all files, including pinned ones.
                    self.world
                        .engine
                        .room
                        .evict_tree(b"")
                        .expect("the root is there");
                }
                return Ok(());
            }
            self.world.spill();
            if !self.world.drain_step() && !self.demand {
                // An I/O thread would sleep now, so no writer may be waiting, except for one that waits for the retry
                // of a failed drain.
                let waits = told.lock().unwrap().is_none() && !self.world.stopped();
                assert!(
                    self.faults || !waits,
                    "nobody is awake: {:?}",
                    self.world.engine.figures()
                );
                self.world.engine.durability.drain_tree(b"");
            }
        }
        panic!("a writer waits for ever: {:?}", self.world.engine.figures());
    }

    fn truncate(&mut self) -> Result<(), Stopped> {
        let Some(path) = self.existing() else {
            return Ok(());
        };
        let object = self.model.names[&path];
        let size = match self.rng.random_range(0..3) {
            0 => 0,
            1 => self
                .rng
                .random_range(0..=self.model.contents[&object].len() as u64),
            _ => self.rng.random_range(0..FILE_MAX),
        };
        self.model.truncate(object, size);
        self.times.remove(&object);
        let set = SetAttr {
            size: Some(size),
            ..NOTHING
        };
        let result = self
            .world
            .find(&path)
            .and_then(|inode| self.world.engine.namespace.set_attr(inode, set, None));
        match self.outcome(result, Ok(()))? {
            Some(attr) => {
                assert_eq!(attr.size, size);
                self.times.insert(object, attr.mtime);
            }
            None => self.model = self.before.clone(),
        }
        Ok(())
    }

    fn rename(&mut self) -> Result<(), Stopped> {
        let Some(from) = self.existing() else {
            return Ok(());
        };
        let to = self.any_path();
        let there = self.model.names.contains_key(&to);
        let (flags, expected) = match self.rng.random_range(0..4) {
            0 if from != to => (
                RenameFlags::EXCHANGE,
                if there { Ok(()) } else { Err(Errno::NOENT) },
            ),
            1 => (
                RenameFlags::NOREPLACE,
                if there { Err(Errno::EXIST) } else { Ok(()) },
            ),
            _ => (RenameFlags::empty(), Ok(())),
        };
        match (flags, expected) {
            (RenameFlags::EXCHANGE, Ok(())) => self.model.exchange(&from, &to),
            (_, Ok(())) => self.model.rename(&from, &to),
            _ => {}
        }
        let result = self.do_rename(&from, &to, flags);
        if self.outcome(result, expected)?.is_none() {
            self.model = self.before.clone();
        }
        Ok(())
    }

    /// Looks a name up, as the kernel does before each change of a name. Returns the directory and the last name of the
    /// path.
    fn looked_up<'a>(&self, path: &'a str) -> Result<(firn_engine::InodeId, &'a OsStr), Errno> {
        let (dir, name) = self.world.parent(path)?;
        match self.world.engine.namespace.lookup(dir, name) {
            Ok(_) | Err(Errno::NOENT) => Ok((dir, name)),
            Err(errno) => Err(errno),
        }
    }

    fn do_rename(&self, from: &str, to: &str, flags: RenameFlags) -> Result<(), Errno> {
        let (dir, name) = self.looked_up(from)?;
        let (new_dir, new_name) = self.looked_up(to)?;
        self.world
            .engine
            .namespace
            .rename(dir, name, new_dir, new_name, flags)
    }

    /// Moves a directory away and back: two renames, with a crash possible between them.
    fn rename_directory(&mut self) -> Result<(), Stopped> {
        let dir = DIRS[self.rng.random_range(0..DIRS.len())];
        for (from, to) in [(dir, "moved"), ("moved", dir)] {
            self.before = self.model.clone();
            self.model.rename(from, to);
            loop {
                let result = self.do_rename(from, to, RenameFlags::empty());
                if self.outcome(result, Ok(()))?.is_some() {
                    break;
                }
            }
        }
        Ok(())
    }

    fn link(&mut self) -> Result<(), Stopped> {
        let Some(from) = self.existing() else {
            return Ok(());
        };
        let to = self.any_path();
        let expected = if self.model.names.contains_key(&to) {
            Err(Errno::EXIST)
        } else {
            Ok(())
        };
        if expected.is_ok() {
            let object = self.model.names[&from];
            self.model.names.insert(to.clone(), object);
        }
        let result = self.world.find(&from).and_then(|inode| {
            let (dir, name) = self.world.parent(&to)?;
            self.world.engine.namespace.link(inode, dir, name)
        });
        if self.outcome(result, expected)?.is_none() {
            self.model = self.before.clone();
        }
        Ok(())
    }

    fn unlink(&mut self) -> Result<(), Stopped> {
        let Some(path) = self.existing() else {
            return Ok(());
        };
        self.model.names.remove(&path);
        let result = self
            .looked_up(&path)
            .and_then(|(dir, name)| self.world.engine.namespace.unlink(dir, name));
        if self.outcome(result, Ok(()))?.is_none() {
            self.model = self.before.clone();
        }
        Ok(())
    }

    /// Waits as a program would: drains until the callback is called.
    fn wait(&self, begin: impl FnOnce(firn_engine::Done)) -> Result<Result<(), Errno>, Stopped> {
        let told = Arc::new(Mutex::new(None));
        let tell = Arc::clone(&told);
        begin(Box::new(move |result| *tell.lock().unwrap() = Some(result)));
        for _ in 0..10_000 {
            if let Some(result) = *told.lock().unwrap() {
                return Ok(result);
            }
            if self.world.stopped() {
                return Err(Stopped);
            }
            assert!(
                self.world.drain_step(),
                "someone waits and there is nothing to drain"
            );
        }
        panic!("a wait does not end");
    }

    fn close(&mut self) -> Result<(), Stopped> {
        if self.open.is_empty() {
            return Ok(());
        }
        let at = self.rng.random_range(0..self.open.len());
        let Open { handle, object } = self.open.swap_remove(at);
        let flushed = self.wait(|done| self.world.engine.flush(handle, Closing::Called, done))?;
        if self.outcome(flushed, Ok(()))?.is_some() {
            self.expect_in_backing(object);
        }
        self.world.engine.release(handle);
        Ok(())
    }

    /// S-close-1: after a close, the backing has the same file as after a close without Firn.
    fn expect_in_backing(&self, object: Object) {
        let tree = self.world.backing_tree();
        for (path, found) in self.model.names.iter().filter(|(_, o)| **o == object) {
            assert_eq!(
                tree.get(path),
                self.model.contents.get(found),
                "{path} after close"
            );
        }
    }

    fn fsync(&mut self) -> Result<(), Stopped> {
        let Some((handle, object)) = self.any_open() else {
            return Ok(());
        };
        let drained = self.wait(|done| self.world.engine.fsync(handle, done))?;
        if self.outcome(drained, Ok(()))?.is_none() {
            return Ok(());
        }
        let synced = self.world.engine.sync_file(handle, false);
        if self.outcome(synced, Ok(()))?.is_none() {
            return Ok(());
        }
        let paths: Vec<&String> = self
            .model
            .names
            .iter()
            .filter(|(_, o)| **o == object)
            .map(|(p, _)| p)
            .collect();
        let loss = self.rng.random();
        // This firnd does not know of hard links that an earlier firnd made, so it cannot sync them.
        if paths.is_empty() || self.world.lives() > 0 {
            return Ok(());
        }
        let after = self.world.backing.fork();
        after.power_loss(loss);
        let whole =
            |path: &&String| lookup(&after, path).as_ref() == self.model.contents.get(&object);
        let lens: Vec<_> = paths
            .iter()
            .map(|p| lookup(&after, p).map(|c| c.len()))
            .collect();
        let expected = self.model.contents[&object].len();
        assert!(
            paths.iter().all(whole),
            "{paths:?} after fsync and a loss of power: {lens:?}, not {expected}"
        );
        Ok(())
    }

    /// Waits until a file, a directory or the whole tree is durable.
    fn wait_until_durable(&mut self) -> Result<(), Stopped> {
        let path = match self.rng.random_range(0..3) {
            0 => String::new(),
            1 => DIRS[self.rng.random_range(0..DIRS.len())].to_owned(),
            _ => self.existing().unwrap_or_default(),
        };
        let world = &self.world;
        let waited = world.engine.durability.wait_tree(
            path.as_bytes(),
            DurabilityLevel::Durable,
            &mut |_, _| {
                while world.drain_step() && !world.stopped() {}
                !world.stopped()
            },
        );
        if self.outcome(waited, Ok(()))?.is_none() {
            return Ok(());
        }
        let listed = self.world.engine.files_below(path.as_bytes());
        if self.world.stopped() {
            return Err(Stopped);
        }
        for file in listed {
            let level = file.level;
            assert_eq!(level, DurabilityLevel::Durable, "{file:?} after a wait");
        }
        Ok(())
    }

    /// Checks that all answers about a file's level agree, and that a file with the level *durable* has all its names
    /// and bytes after a power loss.
    fn check_levels(&mut self) -> Result<(), Stopped> {
        if self.rng.random_range(0..8) != 0 {
            return Ok(());
        }
        let mut levels = BTreeMap::new();
        // All names are looked up first: a name that was made before a stop may be unsynced, and affects the level as
        // soon as it is known.
        let found = self
            .model
            .names
            .keys()
            .map(|path| (path, self.world.find(path)));
        for (path, inode) in found.collect::<Vec<_>>() {
            let level = inode.and_then(|inode| self.world.engine.durability.level_of_file(inode));
            if let Ok(level) = level {
                levels.insert(path.clone(), level);
            }
        }
        let listed = self.world.engine.files_below(b"");
        if self.world.stopped() {
            return Err(Stopped);
        }
        let listed: BTreeMap<_, _> = listed
            .into_iter()
            .map(|file| {
                (
                    String::from_utf8(file.path).expect("a name of this test"),
                    file.level,
                )
            })
            .collect();
        let after = self.world.backing.fork();
        after.power_loss(self.rng.random());
        for (path, level) in levels {
            let in_list = listed.get(&path).copied();
            // While the backing fails, two calls for one file may return different levels.
            let same = in_list.unwrap_or(DurabilityLevel::Drained) == level;
            assert!(
                same || self.faults,
                "{path}: {level:?}, and {in_list:?} in the list"
            );
            if level == DurabilityLevel::Durable {
                let contents = &self.model.contents[&self.model.names[&path]];
                let found = lookup(&after, &path);
                assert!(
                    found.as_ref() == Some(contents),
                    "{path} was said to be durable, and has {:?} bytes instead of {} after a loss of power",
                    found.map(|found| found.len()),
                    contents.len()
                );
            }
        }
        Ok(())
    }

    fn set_time(&mut self) -> Result<(), Stopped> {
        let Some(path) = self.existing() else {
            return Ok(());
        };
        let object = self.model.names[&path];
        self.times.remove(&object);
        let time = Time {
            sec: self.rng.random_range(0..1 << 30),
            nsec: 5,
        };
        let set = SetAttr {
            mtime: SetTime::At(time),
            ..NOTHING
        };
        let result = self
            .world
            .find(&path)
            .and_then(|inode| self.world.engine.namespace.set_attr(inode, set, None));
        if let Some(attr) = self.outcome(result, Ok(()))? {
            assert_eq!(attr.mtime, time);
            self.times.insert(object, time);
        }
        Ok(())
    }

    fn drain(&mut self) -> Result<(), Stopped> {
        if self.faults {
            let lanes: Vec<_> = self.world.engine.drainer.lanes().collect();
            let lane = lanes[self.rng.random_range(0..lanes.len())];
            self.world
                .backing
                .fail_lane(lane, self.rng.random_bool(0.3));
        }
        match self.rng.random_range(0..6) {
            0..3 => self.world.engine.durability.drain_tree(b""),
            3 if self.demand => {
                let path = self.existing().unwrap_or_default();
                // The call may fail with ENOENT while the backing fails.
                let _ = self.world.engine.room.evict_tree(path.as_bytes());
            }
            4 if self.demand => {
                let path = self.existing().unwrap_or_default();
                self.world.engine.durability.drain_tree(path.as_bytes());
                let _ = self
                    .world
                    .engine
                    .room
                    .pin_tree(path.as_bytes(), self.rng.random_bool(0.5));
            }
            _ => {}
        }
        if self.rng.random_bool(0.5) {
            self.world.spill();
        }
        if self.rng.random_bool(0.5) {
            self.world.settle(self.rng.random_range(1..12));
        }
        for _ in 0..self.rng.random_range(1..4) {
            self.world.drain_step();
        }
        if self.world.stopped() {
            Err(Stopped)
        } else {
            Ok(())
        }
    }

    fn read(&mut self) -> Result<(), Stopped> {
        let Some((handle, object)) = self.any_open() else {
            return Ok(());
        };
        if let (Some(found), Some(time)) = (self.time_of(object)?, self.times.get(&object)) {
            assert_eq!(
                found, *time,
                "operation {}: nobody changed the file",
                self.ops
            );
        }
        let contents = &self.model.contents[&object];
        let offset = self.rng.random_range(0..=contents.len() as u64 + 10);
        let mut buf = vec![0xEE; self.rng.random_range(1..60_000)];
        let n = self.world.engine.read(handle, offset, &mut buf);
        if self.world.stopped() {
            return Err(Stopped);
        }
        let n = n.expect("a read");
        let expected = contents.get(offset as usize..).unwrap_or(&[]);
        let expected = &expected[..expected.len().min(buf.len())];
        assert_eq!(n, expected.len(), "length of a read at {offset}");
        assert!(buf[..n] == *expected, "bytes of a read at {offset}");
        Ok(())
    }

    /// Checks the backing after a recovery: it must have the tree from before or after the operation under way, with
    /// the same hard links. Of a write, any part may be there.
    fn verify(&mut self) {
        self.world.drain_all();
        assert!(!self.world.stopped());
        self.world
            .backing
            .fsck()
            .expect("the simulated disk is whole");
        let files = self.world.backing_files();
        let found: BTreeMap<_, _> = (files.iter())
            .map(|(path, (_, contents))| (path.clone(), contents.clone()))
            .collect();
        let names_lead_to_their_objects = |model: &Model| {
            let mut inodes = self.inodes.clone();
            (files.iter()).all(|(path, (inode, _))| {
                let object = model.names.get(path);
                object.is_some_and(|object| inodes.entry(*object).or_insert(*inode) == inode)
            })
        };
        let matches = |model: &Model| {
            if !names_lead_to_their_objects(model) {
                return false;
            }
            let mut expected = model.tree();
            if let Some(write) = &self.partial {
                for (path, object) in &model.names {
                    let contents = &model.contents[object];
                    if *object == write.object
                        && found
                            .get(path)
                            .is_some_and(|f| partly(contents, f, write.offset, &write.data))
                    {
                        expected.insert(path.clone(), found[path].clone());
                    }
                }
            }
            expected == found
        };
        if !matches(&self.before) && !matches(&self.model) {
            let under_way = self.partial.as_ref().map(|w| (w.offset, w.data.len()));
            panic!(
                "the backing is neither the tree before: {}\nnor after: {}\nwrite under way: {under_way:?}\n\
                 names before: {:?}\nnames after: {:?}\ninodes of objects: {:?}\ninodes found: {:?}",
                difference(&found, &self.before.tree()),
                difference(&found, &self.model.tree()),
                self.before.names,
                self.model.names,
                self.inodes,
                (files.iter())
                    .map(|(path, (inode, _))| (path, inode))
                    .collect::<Vec<_>>()
            );
        }
        self.verify_times();
        // The model of the next life begins with the files that are in the backing.
        let mut model = if matches(&self.before) {
            self.before.clone()
        } else {
            self.model.clone()
        };
        for (path, (inode, contents)) in files {
            let object = model.names[&path];
            self.inodes.insert(object, inode);
            model.contents.insert(object, contents);
        }
        // If the world stopped while a directory was moved away, the directory is moved back.
        for dir in DIRS {
            if self.world.find(dir) == Err(Errno::NOENT) {
                self.do_rename("moved", dir, RenameFlags::empty())
                    .expect("it was moved");
                model.rename("moved", dir);
            }
        }
        self.model = model.clone();
        self.before = model;
        self.partial = None;
    }
}

impl Run {
    /// S-attr-2: after the drain, also by a recovery, a file has the modification time that programs saw.
    fn verify_times(&self) {
        for (path, object) in &self.model.names {
            let Some(expected) = self.times.get(object) else {
                continue;
            };
            // A name that the operation under way changes may lead to another object.
            if self.before.names.get(path) == Some(object) {
                let inode = self.world.find(path).expect("it is there");
                let found = self
                    .world
                    .engine
                    .namespace
                    .attr(inode, None)
                    .expect("attributes")
                    .mtime;
                assert_eq!(found, *expected, "operation {}: time of {path}", self.ops);
            }
        }
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

fn difference(found: &BTreeMap<String, Vec<u8>>, expected: &BTreeMap<String, Vec<u8>>) -> String {
    let mut out = String::new();
    for path in found.keys().chain(expected.keys()) {
        let a = found.get(path);
        let b = expected.get(path);
        if a != b {
            let at = a
                .zip(b)
                .and_then(|(a, b)| a.iter().zip(b).position(|(x, y)| x != y));
            let lens = (a.map(Vec::len), b.map(Vec::len));
            out +=
                &format!("{path}: lengths (found, expected) {lens:?}, first difference {at:?}; ");
        }
    }
    out
}

fn lookup<B: Backing>(backing: &B, path: &str) -> Option<Vec<u8>> {
    let mut inode = backing.root();
    for name in path.split('/') {
        inode = backing.lookup(&inode, OsStr::new(name)).ok()?.0;
    }
    let size = backing.attr(&inode).ok()?.size;
    let file = backing.open(&inode, firn_backing::Access::Read).ok()?;
    let mut contents = vec![0; size as usize];
    backing.read_at(&file, &mut contents, 0).ok()?;
    Some(contents)
}

/// Makes one run of several lives, each of which ends by a stop at a random step. Returns the numbers of operations and
/// of steps.
fn live(
    seed: u64,
    lives: u32,
    ops: u64,
    faults: bool,
    mut stop_in: impl FnMut(&mut StdRng) -> u64,
) -> (u64, u64) {
    let mut run = Run::new(seed, faults);
    let first = stop_in(&mut run.rng);
    run.world.stop_in(first);
    for _ in 0..lives {
        for _ in 0..ops {
            if run.step().is_err() {
                break;
            }
        }
        if !run.world.stopped() {
            // The world stops between two operations, so no operation is under way.
            run.before = run.model.clone();
            run.partial = None;
            run.world.stop_now();
        }
        run.open.clear();
        run.lists.clear();
        let next = stop_in(&mut run.rng);
        let recovered = run.world.recover(next);
        assert_eq!(recovered.lost, [], "no file is lost");
        assert_eq!(recovered.damage, Vec::<String>::new());
        run.world.stop_in(u64::MAX);
        run.verify();
        let next = stop_in(&mut run.rng);
        run.world.stop_in(next);
        if faults {
            run.world.arm_with_faults(run.rng.random());
        }
    }
    (run.ops, run.world.steps())
}

fn campaign(name: &str, share: u64, body: impl Fn(u64) -> u64 + std::panic::RefUnwindSafe) {
    let seed = std::env::var("FIRN_SEED")
        .ok()
        .map(|s| s.parse::<u64>().expect("FIRN_SEED is a number"));
    let total: u64 =
        std::env::var("FIRN_OPS").map_or(120_000, |s| s.parse().expect("FIRN_OPS is a number"));
    let start = seed.unwrap_or_else(rand::random);
    let mut done = 0;
    for n in 0.. {
        let this = start.wrapping_add(n);
        match std::panic::catch_unwind(|| body(this)) {
            Ok(ops) => done += ops,
            Err(panic) => {
                eprintln!("{name}: failed; repeat with FIRN_SEED={this}");
                std::panic::resume_unwind(panic);
            }
        }
        if seed.is_some() || done >= total / share {
            println!(
                "{name}: {done} operations in {} runs from FIRN_SEED={start}",
                n + 1
            );
            return;
        }
    }
}

/// Proves S-write-1, S-crash-2, S-crash-4, S-crash-5, S-name-6.
#[test]
fn acknowledged_bytes_survive_a_stop_at_any_step() {
    campaign("stops", 2, |seed| {
        live(seed, 3, 60, false, |rng| rng.random_range(1..2500)).0
    });
}

/// Proves S-error-1.
#[test]
fn acknowledged_bytes_survive_a_failing_backing() {
    campaign("faults", 4, |seed| {
        live(seed, 2, 60, true, |rng| rng.random_range(500..6000)).0
    });
}

/// Proves S-write-3, S-write-5, S-read-1, S-close-1, S-fsync-1, S-fsync-2, S-crash-7, S-chunks-1, S-chunks-2,
/// S-chunks-3, S-fsync-8, S-fsync-9.
#[test]
fn without_a_stop_the_tree_is_that_of_a_plain_file_system() {
    campaign("plain", 4, |seed| live(seed, 1, 300, false, |_| u64::MAX).0);
}

/// One short run is repeated with a stop at each of its steps. Proves S-write-1, S-crash-4, S-crash-5.
#[test]
fn a_stop_at_every_single_step_of_one_run() {
    campaign("every step", 40, |seed| {
        let (mut ops, steps) = live(seed, 1, 25, false, |_| u64::MAX);
        for stop in 0..steps {
            ops += live(seed, 1, 25, false, |_| stop).0;
        }
        ops
    });
}
