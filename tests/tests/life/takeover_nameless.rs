//! Files that are open and have no name any more, while firnd is killed: their programs go on.
//!
//! `FIRN_TAKEOVER_KILLS` sets the kills under random operations (`cargo xtask campaign takeover`), `FIRN_SEED` the seed.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use firn_tests::mount::SMALL;
use firn_tests::random::{bytes, env_count, generator};
use firn_tests::sandbox::{keeper_of, kill_alone};
use firn_tests::{FirnMount, Sandbox, seed, wait_until};
use rand::RngExt;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};

use crate::takeover::child_of;

const KILLS_DEFAULT: u64 = 6;
const FILES: usize = 6;
const LEN_MAX: u64 = 200_000;
/// More packets than the socket of the keeper holds at once.
const MANY: usize = 400;

fn open_new(path: &Path) -> File {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).open(path);
    file.expect("create")
}

fn all_of(file: &File) -> Vec<u8> {
    let len = file.metadata().expect("fstat").len();
    let mut found = vec![0; len as usize];
    file.read_exact_at(&mut found, 0).expect("read");
    found
}

/// Descriptors of the keeper on files in the backing. It also has the locked backing itself.
fn kept_by(keeper: u32, backing: &Path) -> usize {
    let entries = fs::read_dir(format!("/proc/{keeper}/fd")).expect("list");
    let links = entries
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok());
    links
        .filter(|link| link.starts_with(backing) && link != backing)
        .count()
}

/// A file and the bytes that it must have.
struct Model {
    file: File,
    bytes: Vec<u8>,
}

impl Model {
    fn write(&mut self, offset: usize, data: &[u8]) {
        self.file
            .write_all_at(data, offset as u64)
            .expect("a write to a file without a name");
        let end = offset + data.len();
        self.bytes.resize(self.bytes.len().max(end), 0);
        self.bytes[offset..end].copy_from_slice(data);
    }

    fn truncate(&mut self, len: usize) {
        self.file.set_len(len as u64).expect("truncate");
        self.bytes.resize(len, 0);
    }

    /// Stores to a shared mapping.
    fn store(&mut self, at: usize, byte: u8) {
        let len = self.bytes.len();
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping of a file that has `len` bytes and is this test's alone; nothing refers to it afterwards.
        unsafe {
            let map = mmap(
                std::ptr::null_mut(),
                len,
                flags,
                MapFlags::SHARED,
                &self.file,
                0,
            );
            let map = map.expect("mmap");
            *map.cast::<u8>().add(at) = byte;
            msync(map, len, MsyncFlags::SYNC).expect("msync");
            munmap(map, len).expect("munmap");
        }
        self.bytes[at] = byte;
    }

    fn check(&self, context: &str) {
        let found = all_of(&self.file);
        assert_eq!(found.len(), self.bytes.len(), "{context}: length");
        let differs = found.iter().zip(&self.bytes).position(|(a, b)| a != b);
        assert_eq!(differs, None, "{context}: first byte that differs");
        assert_eq!(self.file.metadata().expect("fstat").nlink(), 0);
    }
}

fn change_at_random(model: &mut Model, rng: &mut impl rand::Rng) {
    match rng.random_range(0..10) {
        0 => model.truncate(rng.random_range(0..LEN_MAX) as usize),
        1 if !model.bytes.is_empty() => {
            let at = rng.random_range(0..model.bytes.len());
            model.store(at, rng.random());
        }
        2 => model.file.sync_data().expect("fdatasync"),
        _ => {
            let offset = rng.random_range(0..LEN_MAX) as usize;
            let data = bytes(rng.random(), rng.random_range(1..20_000));
            model.write(offset, &data);
        }
    }
}

fn run_random_operations(name: &str, options: &str) {
    let seed = seed(&format!("files without a name, {name}"));
    let mut rng = generator(seed);
    let sandbox = Sandbox::new("nameless");
    let mut mount = FirnMount::new(&sandbox, &format!("{SMALL},takeover=auto,{options}"));
    let mut models = Vec::new();
    for index in 0..FILES {
        let path = mount.join(format!("file{index}"));
        let mut model = Model {
            file: open_new(&path),
            bytes: Vec::new(),
        };
        for _ in 0..rng.random_range(0..4) {
            change_at_random(&mut model, &mut rng);
        }
        if index % 2 == 0 {
            fs::remove_file(&path).expect("unlink");
        } else {
            let other = mount.join(format!("other{index}"));
            fs::write(&other, "other").expect("write");
            fs::rename(&other, &path).expect("rename over an open file");
        }
        models.push(model);
    }
    let kills = env_count("FIRN_TAKEOVER_KILLS", KILLS_DEFAULT);
    for kill in 0..kills {
        for _ in 0..rng.random_range(0..20) {
            let index = rng.random_range(0..FILES);
            change_at_random(&mut models[index], &mut rng);
        }
        mount.kill_and_go_on();
        for (index, model) in models.iter().enumerate() {
            model.check(&format!("{name}: file {index} after kill {kill}"));
        }
    }
    assert_eq!(mount.status().lost_open_files, 0);
    let keeper = keeper_of(mount.pid()).expect("a keeper");
    assert_eq!(kept_by(keeper, mount.backing()), FILES);
    drop(models);
    wait_until("the keeper lets go", Duration::from_secs(30), || {
        kept_by(keeper, mount.backing()) == 0
    });
    let backing = mount.umount();
    for index in (1..FILES).step_by(2) {
        let path = backing.join(format!("file{index}"));
        assert_eq!(fs::read(path).expect("read"), b"other");
    }
    println!("{name}: {kills} kills, {FILES} files without a name");
}

/// Proves S-crash-11.
#[test]
fn random_changes_of_files_without_a_name_survive_kills_while_they_are_drained() {
    run_random_operations("drain=eager", "drain=eager");
}

/// Proves S-crash-11.
#[test]
fn random_changes_of_files_without_a_name_survive_kills_while_they_are_held() {
    run_random_operations("drain=demand", "drain=demand,close=held,drain-age=10min");
}

/// Outside of a transaction such a mount writes through to the backing.
///
/// Proves S-crash-11.
#[test]
fn random_changes_of_files_without_a_name_survive_kills_where_there_are_transactions() {
    run_random_operations("drain=commit", "drain=commit");
}

/// Proves S-crash-11.
#[test]
fn many_files_without_a_name_outlive_firnd_and_its_keeper() {
    let sandbox = Sandbox::new("many");
    let mut mount = FirnMount::new(&sandbox, &format!("{SMALL},takeover=auto,drain=demand"));
    let open_one = |index: usize| {
        let path = mount.join(format!("file{index}"));
        let file = open_new(&path);
        file.write_all_at(format!("before {index}").as_bytes(), 0)
            .expect("write");
        fs::remove_file(&path).expect("unlink");
        file
    };
    let files: Vec<File> = (0..MANY).map(open_one).collect();
    mount.kill_and_go_on();
    let keeper = keeper_of(mount.pid()).expect("a keeper");
    kill_alone(keeper, libc::SIGKILL);
    wait_until(
        "another keeper has the files",
        Duration::from_secs(60),
        || {
            // It is a child of firnd.
            child_of(mount.pid()).is_some_and(|now| kept_by(now, mount.backing()) == MANY)
        },
    );
    mount.kill_and_go_on();
    for (index, file) in files.iter().enumerate() {
        file.write_all_at(b"AFTER!", 0).expect("write");
        assert_eq!(all_of(file), format!("AFTER! {index}").as_bytes());
    }
    assert_eq!(mount.status().lost_open_files, 0);
    drop(files);
    mount.umount();
}
