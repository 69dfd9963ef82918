//! Tests of stub trees over a real directory.
//!
//! Programs change the tree, firnd is stopped and started in between, and the tree is reconciled. Then the backing must
//! have the same names, attributes and contents as the tree.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use firn_arena::{Arena, Identity};
use firn_backing::{DirBacking, Errno};
use firn_drain::{IoThreads, Pool};
use firn_engine::{ClientId, ClosePolicy, DrainPolicy, Engine, EngineOptions, Written};
use firn_format::durability::DurabilityLevel;
use firn_format::geometry::Geometry;
use firn_stub::{Adopted, Tree, TreeOptions};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const IO_THREADS: IoThreads = IoThreads::new(2);

const CHUNK_BYTES: u64 = 128 << 10;
/// The client that opens all stubs.
const CLIENT: ClientId = ClientId(7);

/// Returns the seed of a random test, from `FIRN_SEED` if it is set, and prints it.
fn seed(test: &str) -> u64 {
    let seed = std::env::var("FIRN_SEED")
        .map_or_else(|_| rand::random(), |text| text.parse().expect("a number"));
    println!("{test}: repeat with FIRN_SEED={seed}");
    seed
}

/// A host: its memory, its disk, and its firnd while one runs.
struct World {
    shm: tempfile::TempDir,
    disk: tempfile::TempDir,
    life: Option<Life>,
}

/// The state that a running firnd has in its own memory.
struct Life {
    tree: Tree<DirBacking>,
    engine: Arc<Engine<DirBacking>>,
    pool: Pool,
}

impl World {
    fn new() -> Self {
        let shm = tempfile::tempdir_in("/dev/shm").unwrap();
        let disk = tempfile::tempdir().unwrap();
        fs::create_dir(shm.path().join("prefix")).unwrap();
        Self {
            shm,
            disk,
            life: None,
        }
    }

    fn prefix(&self) -> PathBuf {
        self.shm.path().join("prefix")
    }

    fn start(&mut self) -> &Life {
        let path = self.shm.path().join("arena");
        let backing = DirBacking::open(self.disk.path()).unwrap();
        let mut options = EngineOptions::new(CHUNK_BYTES);
        options.drain_age = Duration::from_millis(20);
        options.drain = DrainPolicy::Demand;
        options.close = ClosePolicy::Held;
        let engine = if path.exists() {
            let (arena, stored, _) = Arena::attach(&path).unwrap();
            Engine::attach(backing, arena, &stored, options).unwrap().0
        } else {
            let identity = Identity {
                backing: self.disk.path().into(),
                dev: 1,
                ino: 1,
            };
            let geometry = Geometry::new(64 * CHUNK_BYTES, CHUNK_BYTES).unwrap();
            Engine::begin(
                backing,
                Arena::create(&path, geometry, &identity).unwrap(),
                options,
            )
            .unwrap()
        };
        let pool = Pool::start(Arc::clone(&engine), IO_THREADS, None).unwrap();
        let options = TreeOptions {
            root: self.prefix(),
            log: self.shm.path().join("log"),
            backing: self.disk.path().into(),
            places_by_name: false,
        };
        let tree = Tree::begin(Arc::clone(&engine), options).unwrap();
        self.life = Some(Life { tree, engine, pool });
        self.life.as_ref().unwrap()
    }

    fn life(&self) -> &Life {
        self.life.as_ref().unwrap()
    }

    /// Stops firnd. The state in its own memory is lost; the arena, the log and the tree remain.
    fn stop(&mut self) {
        self.life.take().unwrap().pool.stop();
    }

    /// Opens the stub `name`, which is created if it is missing, writes to its file, and closes it.
    fn write(&self, name: &str, offset: u64, bytes: &[u8]) {
        let opened = self.open(name);
        self.write_open(opened, offset, bytes);
        self.life().tree.release(opened.handle);
    }

    /// Opens the stub `name` for reading and writing, and has firnd adopt the descriptor.
    fn open(&self, name: &str) -> Adopted {
        let path = self.prefix().join(name);
        let file = fs::File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(path)
            .unwrap();
        self.life()
            .tree
            .adopt(CLIENT, OwnedFd::from(file), libc::O_RDWR, false)
            .unwrap()
    }

    /// Writes to the file of an open stub, as the preload library does.
    fn write_open(&self, opened: Adopted, offset: u64, bytes: &[u8]) {
        let written = self
            .life()
            .engine
            .write(opened.handle, offset, bytes, None)
            .unwrap();
        assert_eq!(written, Written::Bytes(bytes.len()));
    }

    /// Reads the whole file of an open stub.
    fn read(&self, opened: Adopted) -> Vec<u8> {
        let mut bytes = vec![0; 1 << 20];
        let read_bytes = self
            .life()
            .engine
            .read(opened.handle, 0, &mut bytes)
            .unwrap();
        bytes.truncate(read_bytes);
        bytes
    }

    /// Brings all names and data to the backing, as `firn drain --wait` does.
    fn drain(&self) {
        self.life().tree.reconcile().unwrap();
        self.life()
            .engine
            .durability
            .wait_tree(b"", DurabilityLevel::Drained, &mut |_, _| true)
            .unwrap();
    }
}

/// The attributes of an object that a test compares.
#[derive(Debug, PartialEq, Eq)]
struct Object {
    /// `st_mode`: kind and permission bits.
    mode: u32,
    /// Link count; 0 for a directory.
    links: u64,
    uid: u32,
    gid: u32,
    /// Bytes of a file, target of a symbolic link, else empty.
    content: Vec<u8>,
    /// Modification time in seconds, if a program set it.
    set_mtime: Option<i64>,
}

/// The objects below a directory, by path.
type Objects = BTreeMap<String, Object>;

/// Lists all objects below `root`, without Firn's own directory.
fn list_objects(root: &Path) -> Objects {
    /// Tests set only times before this one, in 2017; times that the kernel sets are later.
    const SET_MTIME_END: i64 = 1_500_000_000;
    fn walk(root: &Path, dir: &Path, objects: &mut Objects) {
        for entry in fs::read_dir(root.join(dir)).unwrap() {
            let path = dir.join(entry.unwrap().file_name());
            if path == Path::new(".firn") {
                continue;
            }
            let full_path = root.join(&path);
            let meta = full_path.symlink_metadata().unwrap();
            let content = if meta.is_file() {
                fs::read(&full_path).unwrap()
            } else if meta.is_symlink() {
                fs::read_link(&full_path)
                    .unwrap()
                    .into_os_string()
                    .into_encoded_bytes()
            } else {
                Vec::new()
            };
            let object = Object {
                mode: meta.mode(),
                links: if meta.is_dir() { 0 } else { meta.nlink() },
                uid: meta.uid(),
                gid: meta.gid(),
                content,
                set_mtime: (meta.mtime() < SET_MTIME_END).then(|| meta.mtime()),
            };
            objects.insert(path.display().to_string(), object);
            if meta.is_dir() {
                walk(root, &path, objects);
            }
        }
    }
    let mut objects = Objects::new();
    walk(root, Path::new(""), &mut objects);
    objects
}

#[test]
fn what_the_backing_had_and_what_is_made_end_up_in_it() {
    let mut world = World::new();
    let disk = world.disk.path().to_owned();
    fs::create_dir(disk.join("old")).unwrap();
    fs::write(disk.join("old/file"), b"before").unwrap();
    fs::hard_link(disk.join("old/file"), disk.join("second")).unwrap();
    symlink("old/file", disk.join("link")).unwrap();
    fs::set_permissions(disk.join("old"), fs::Permissions::from_mode(0o555)).unwrap();
    world.start();
    let prefix = world.prefix();
    let stub = prefix.join("old/file").metadata().unwrap();
    assert_eq!((stub.len(), stub.nlink()), (0, 2));
    assert_eq!(
        fs::read_link(prefix.join("link")).unwrap(),
        Path::new("old/file")
    );
    assert_eq!(
        prefix.join("old").metadata().unwrap().mode() & 0o7777,
        0o555
    );
    assert_eq!(world.read(world.open("old/file")), b"before");

    fs::create_dir(prefix.join("new")).unwrap();
    world.write("new/x", 3, b"data");
    world.write("second", 0, b"B");
    world.drain();
    assert_eq!(fs::read(disk.join("new/x")).unwrap(), b"\0\0\0data");
    assert_eq!(fs::read(disk.join("old/file")).unwrap(), b"Before");
    assert_eq!(disk.join("second").metadata().unwrap().nlink(), 2);
    world.stop();
}

#[test]
fn a_directory_renamed_between_write_and_drain_takes_its_files_along() {
    let mut world = World::new();
    world.start();
    let prefix = world.prefix();
    fs::create_dir_all(prefix.join("a/b")).unwrap();
    world.write("a/b/x", 0, b"first");
    world.drain();
    world.write("a/y", 0, b"second");
    fs::rename(prefix.join("a"), prefix.join("c")).unwrap();
    // The old name is used again, and a directory is moved below its former child.
    fs::create_dir(prefix.join("a")).unwrap();
    world.write("a/x", 0, b"third");
    fs::rename(prefix.join("c/b"), prefix.join("b")).unwrap();
    fs::rename(prefix.join("c"), prefix.join("b/c")).unwrap();
    world.drain();
    let disk = world.disk.path();
    assert_eq!(fs::read(disk.join("b/x")).unwrap(), b"first");
    assert_eq!(fs::read(disk.join("b/c/y")).unwrap(), b"second");
    assert_eq!(fs::read(disk.join("a/x")).unwrap(), b"third");
    assert_eq!(fs::read_dir(disk.join(".firn/stub")).unwrap().count(), 0);
    world.stop();
}

#[test]
fn a_stub_removed_while_open_keeps_its_bytes_until_it_is_closed() {
    let mut world = World::new();
    world.start();
    let opened = world.open("x");
    world.write_open(opened, 0, b"still there");
    world.drain();
    assert!(world.disk.path().join("x").exists());
    fs::remove_file(world.prefix().join("x")).unwrap();
    world.drain();
    assert!(!world.disk.path().join("x").exists());
    assert_eq!(world.read(opened), b"still there");
    world.write_open(opened, 0, b"STILL");
    assert_eq!(world.read(opened), b"STILL there");
    world.life().tree.release(opened.handle);
    assert_eq!(world.life().engine.figures().held_bytes, 0);
    assert_eq!(
        fs::read_dir(world.disk.path().join(".firn/stub"))
            .unwrap()
            .count(),
        0
    );
    world.stop();
}

#[test]
fn the_bytes_of_removed_stubs_are_dropped_when_room_is_wanted() {
    let mut world = World::new();
    world.start();
    for index in 0..8 {
        world.write(&format!("f{index}"), 0, &[1; 4096]);
    }
    assert_eq!(world.life().engine.figures().held_bytes, 8 * 4096);
    for index in 0..6 {
        fs::remove_file(world.prefix().join(format!("f{index}"))).unwrap();
    }
    world.life().tree.sweep().unwrap();
    assert_eq!(world.life().engine.figures().held_bytes, 2 * 4096);
    world.stop();
}

#[test]
fn times_are_those_of_the_last_write_unless_a_program_sets_them_later() {
    let mut world = World::new();
    world.start();
    let path = world.prefix().join("x");
    world.write("x", 0, b"one");
    let set = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
    fs::File::open(&path).unwrap().set_modified(set).unwrap();
    world.drain();
    assert_eq!(
        world.disk.path().join("x").metadata().unwrap().mtime(),
        1_000_000
    );
    world.write("x", 3, b"two");
    assert!(path.metadata().unwrap().mtime() > 1_500_000_000);
    world.drain();
    let disk = world.disk.path().join("x").metadata().unwrap();
    let stub = path.metadata().unwrap();
    assert_eq!(
        (disk.mtime(), disk.mtime_nsec()),
        (stub.mtime(), stub.mtime_nsec())
    );
    world.stop();
}

#[test]
fn bytes_that_came_through_the_kernel_are_taken_in() {
    let mut world = World::new();
    fs::write(world.disk.path().join("old"), b"0123456789").unwrap();
    world.start();
    fs::write(world.prefix().join("new"), b"static").unwrap();
    fs::write(world.prefix().join("old"), b"abc").unwrap();
    assert_eq!(world.read(world.open("new")), b"static");
    world.drain();
    assert_eq!(fs::read(world.disk.path().join("new")).unwrap(), b"static");
    assert_eq!(
        fs::read(world.disk.path().join("old")).unwrap(),
        b"abc3456789"
    );
    world.stop();
}

#[test]
fn descriptors_of_other_files_are_refused() {
    let mut world = World::new();
    world.start();
    let tree = &world.life().tree;
    let beside = fs::File::create(world.shm.path().join("beside")).unwrap();
    let elsewhere = fs::File::open("/proc/self/maps").unwrap();
    let directory = fs::File::open(world.prefix()).unwrap();
    for file in [beside, elsewhere, directory] {
        let refused = tree.adopt(CLIENT, OwnedFd::from(file), libc::O_RDONLY, false);
        assert_eq!(refused.unwrap_err(), Errno::XDEV);
    }
    // The client had this stub adopted by an earlier firnd, and it was removed while no firnd ran: its bytes are lost.
    let file = fs::File::create(world.prefix().join("x")).unwrap();
    fs::remove_file(world.prefix().join("x")).unwrap();
    let refused = tree.adopt(CLIENT, OwnedFd::from(file), libc::O_RDWR, true);
    assert_eq!(refused.unwrap_err(), Errno::STALE);
    world.stop();
}

#[test]
fn a_directory_in_use_and_a_tree_at_another_place_are_refused() {
    let mut world = World::new();
    fs::write(world.prefix().join("x"), b"").unwrap();
    let begin = |world: &mut World| {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            world.start();
        }));
        outcome
            .err()
            .map(|panic| panic.downcast_ref::<String>().cloned().unwrap_or_default())
    };
    assert!(begin(&mut world).unwrap().contains("NotEmpty"));
    fs::remove_file(world.prefix().join("x")).unwrap();
    fs::remove_file(world.shm.path().join("arena")).unwrap();
    world.start();
    world.write("unnamed", 0, b"bytes");
    world.stop();
    fs::rename(world.prefix(), world.shm.path().join("moved")).unwrap();
    fs::create_dir(world.prefix()).unwrap();
    assert!(begin(&mut world).unwrap().contains("Elsewhere"));
    fs::remove_dir(world.prefix()).unwrap();
    fs::rename(world.shm.path().join("moved"), world.prefix()).unwrap();
    world.start();
    assert_eq!(world.read(world.open("unnamed")), b"bytes");
    world.stop();
}

/// The log of the first firnd had no path in it, so the next firnd took the tree for half filled and cleared it.
#[test]
fn regression_a_tree_that_was_empty_at_one_start_is_kept_by_the_next() {
    let mut world = World::new();
    world.start();
    world.stop();
    world.start();
    fs::create_dir(world.prefix().join("dir")).unwrap();
    world.stop();
    world.start();
    assert!(world.prefix().join("dir").exists());
    world.stop();
}

/// A file replaced the directory, so the directory was moved to a private path first, and the map forgot the link in
/// it.
#[test]
fn regression_a_link_goes_with_its_directory_also_where_that_was_in_the_way() {
    let mut world = World::new();
    world.start();
    let prefix = world.prefix();
    fs::create_dir(prefix.join("dir")).unwrap();
    fs::write(prefix.join("file"), b"").unwrap();
    fs::hard_link(prefix.join("file"), prefix.join("dir/link")).unwrap();
    world.life().tree.reconcile().unwrap();
    fs::remove_dir_all(prefix.join("dir")).unwrap();
    fs::write(prefix.join("dir"), b"").unwrap();
    world.life().tree.reconcile().unwrap();
    assert_eq!(
        world.disk.path().join("file").metadata().unwrap().nlink(),
        1
    );
    world.stop();
}

/// Only the owner differed at the sync, so the mode was not set again after chown(2) had cleared the bit in the
/// backing.
#[test]
fn regression_a_set_user_id_bit_survives_a_change_of_owner() {
    let mut world = World::new();
    world.start();
    let stub = world.prefix().join("tool");
    let copy = world.disk.path().join("tool");
    fs::write(&stub, b"").unwrap();
    let set_mode = || fs::set_permissions(&stub, fs::Permissions::from_mode(0o4755)).unwrap();
    set_mode();
    world.life().tree.reconcile().unwrap();
    assert_eq!(copy.metadata().unwrap().mode() & 0o7777, 0o4755);
    if chown(&stub, Some(65_534), None).is_ok() {
        // chown(2) has cleared the bit of the stub too.
        set_mode();
        world.life().tree.reconcile().unwrap();
        let metadata = copy.metadata().unwrap();
        assert_eq!((metadata.uid(), metadata.mode() & 0o7777), (65_534, 0o4755));
    } else {
        eprintln!("skipped: only root can give files away");
    }
    world.stop();
}

/// Does the same random operations in the tree and in a plain directory, with restarts of firnd in between. At the end
/// the backing has the same objects as the plain directory.
#[test]
fn random_operations_end_in_the_backing_as_in_a_plain_directory() {
    let seed = seed("random");
    let mut rng = StdRng::seed_from_u64(seed);
    let mut world = World::new();
    let plain = tempfile::tempdir().unwrap();
    world.start();
    let paths: Vec<String> = {
        // Paths of one, two and three names.
        let top_names = ["a", "b", "c", "d"];
        let paths_below = |dir: &str| top_names.map(|name| format!("{dir}/{name}"));
        let depth_two: Vec<String> = top_names.iter().flat_map(|dir| paths_below(dir)).collect();
        let depth_three: Vec<String> = depth_two
            .iter()
            .flat_map(|dir| paths_below(dir))
            .take(24)
            .collect();
        top_names
            .iter()
            .map(ToString::to_string)
            .chain(depth_two)
            .chain(depth_three)
            .collect()
    };
    for step in 0..600u64 {
        let path = paths[rng.random_range(0..paths.len())].clone();
        let other = paths[rng.random_range(0..paths.len())].clone();
        let roots = [world.prefix(), plain.path().to_owned()];
        // Does an operation in both directories, asserts the same outcome, and returns whether it succeeded.
        let in_both = |act: &dyn Fn(&Path) -> std::io::Result<()>| {
            let results = roots
                .each_ref()
                .map(|root| act(root).map_err(|error| error.raw_os_error()));
            assert_eq!(
                results[0], results[1],
                "step {step} of seed {seed}: {path} {other}"
            );
            results[0].is_ok()
        };
        match rng.random_range(0..100) {
            0..22 => {
                let make = fs::File::options()
                    .create(true)
                    .truncate(false)
                    .write(true)
                    .clone();
                let file = |root: &Path| make.open(root.join(&path)).map(drop);
                if in_both(&file) && roots[0].join(&path).is_file() {
                    let offset = rng.random_range(0..5000);
                    let bytes = vec![rng.random::<u8>(); rng.random_range(1..3000)];
                    world.write(&path, offset, &bytes);
                    let plain_file = fs::File::options()
                        .write(true)
                        .open(roots[1].join(&path))
                        .unwrap();
                    std::os::unix::fs::FileExt::write_all_at(&plain_file, &bytes, offset).unwrap();
                }
            }
            22..40 => drop(in_both(&|root| fs::create_dir(root.join(&path)))),
            40..62 => drop(in_both(&|root| {
                fs::rename(root.join(&path), root.join(&other))
            })),
            62..70 => drop(in_both(&|root| fs::remove_file(root.join(&path)))),
            70..73 => drop(in_both(&|root| fs::remove_dir(root.join(&path)))),
            73..76 => drop(in_both(&|root| {
                if root.join(&path).is_dir() {
                    fs::remove_dir_all(root.join(&path))
                } else {
                    Ok(())
                }
            })),
            76..82 => drop(in_both(&|root| {
                fs::hard_link(root.join(&path), root.join(&other))
            })),
            82..85 => drop(in_both(&|root| symlink("/no/where", root.join(&path)))),
            85..90 => {
                let mode = [0o600, 0o644, 0o755, 0o2750][rng.random_range(0..4)];
                in_both(&|root| {
                    if root.join(&path).symlink_metadata()?.is_symlink() {
                        Ok(())
                    } else {
                        fs::set_permissions(root.join(&path), fs::Permissions::from_mode(mode))
                    }
                });
            }
            90..96 => world.life().tree.reconcile().unwrap(),
            96..98 => world.drain(),
            _ => {
                world.stop();
                world.start();
            }
        }
        if step % 100 == 99 {
            world.drain();
            assert_eq!(
                list_objects(world.disk.path()),
                list_objects(plain.path()),
                "step {step} of seed {seed}"
            );
        }
    }
    world.drain();
    assert_eq!(
        list_objects(world.disk.path()),
        list_objects(plain.path()),
        "seed {seed}"
    );
    world.life().tree.remove().unwrap();
    assert_eq!(fs::read_dir(world.prefix()).unwrap().count(), 0);
    world.stop();
}
