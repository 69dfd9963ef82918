//! More files than firnd may have descriptors, more temporary files in a transaction than the backing has room, and
//! ends of transactions where it has none left.
//!
//! `FIRN_TEMPORARY` sets the number of temporary files of each kind.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use firn_tests::fsops::{errno, open_rw, read};
use firn_tests::mount::SMALL;
use firn_tests::random::{bytes, env_count};
use firn_tests::transaction::firn;
use firn_tests::{FirnMount, FsKind, LoopImage, Sandbox, wait_until};
use rustix::fs::statvfs;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const FILES: usize = 2000;

/// Lets this process have more files open than firnd.
fn raise_own_limit() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, wanted).expect("raise the limit of open files");
    assert!(
        wanted.current.is_none_or(|count| count > 2 * FILES as u64),
        "the hard limit is too low"
    );
}

fn name(index: usize) -> String {
    format!("rank{index}")
}

/// What a file has after round `round` of writes.
fn content(index: usize, round: u64) -> Vec<u8> {
    bytes(index as u64 * 8 + round, 3000)
}

/// Proves S-error-10.
#[test]
fn regression_a_program_has_more_files_open_than_firnd_may_have_descriptors() {
    raise_own_limit();
    for options in [SMALL.to_owned(), format!("{SMALL},drain=commit")] {
        let sandbox = Sandbox::new("manyopen");
        let backing = sandbox.join("backing");
        for index in 0..FILES / 2 {
            fs::write(backing.join(name(index)), content(index, 0)).expect("write in the backing");
        }
        let mount = FirnMount::with_descriptors(&sandbox, &backing, &options, 256);
        let open = |index: usize| {
            if index < FILES / 2 {
                open_rw(&mount.join(name(index)))
            } else {
                File::options()
                    .read(true)
                    .write(true)
                    .create_new(true)
                    .open(mount.join(name(index)))
                    .expect("create")
            }
        };
        let files: Vec<File> = (0..FILES).map(open).collect();
        for round in 1..3 {
            for (index, file) in files.iter().enumerate() {
                file.write_all_at(&content(index, round), 0).expect("write");
            }
            for file in &files {
                file.sync_all().expect("fsync");
            }
            let mut found = vec![0; 3000];
            for (index, file) in files.iter().enumerate() {
                file.read_exact_at(&mut found, 0).expect("read");
                assert!(
                    found == content(index, round),
                    "{} in round {round}",
                    name(index)
                );
            }
        }
        // A file without a name lives on, however many others are used.
        fs::remove_file(mount.join(name(0))).expect("unlink");
        for file in &files[1..] {
            file.set_len(2000).expect("truncate");
        }
        let mut found = vec![0; 3000];
        files[0]
            .read_exact_at(&mut found, 0)
            .expect("read a file without a name");
        assert!(found == content(0, 2));
        drop(files);
        let backing = mount.umount();
        for index in 1..FILES {
            assert!(
                read(&backing.join(name(index))) == content(index, 2)[..2000],
                "{}",
                name(index)
            );
        }
        assert!(!backing.join(name(0)).exists());
    }
}

/// Proves S-error-10, S-error-20.
#[test]
fn regression_an_open_that_fails_leaves_no_file_behind() {
    raise_own_limit();
    let sandbox = Sandbox::new("fewdescriptors");
    let mount = FirnMount::with_descriptors(&sandbox, &sandbox.join("backing"), SMALL, 64);
    let mut files = Vec::new();
    for index in 0..500 {
        files.push(File::create_new(mount.join(name(index))).expect("create with 64 descriptors"));
    }
    for (index, file) in files.iter().enumerate() {
        file.write_all_at(&content(index, 1), 0).expect("write");
    }
    // Each open directory takes one, until there is none.
    let mut dirs = Vec::new();
    let failed = loop {
        match fs::read_dir(mount.path()) {
            Ok(dir) => dirs.push(dir),
            Err(error) => break errno(&error),
        }
        assert!(dirs.len() < 64, "64 descriptors are not that many");
    };
    assert_eq!(failed, Errno::NFILE, "it is not the program's own limit");
    let mut made = 0;
    for index in 500..600 {
        match File::create_new(mount.join(name(index))) {
            Ok(_) => made += 1,
            Err(error) => {
                assert_eq!(errno(&error), Errno::NFILE);
                assert!(
                    !mount.backing().join(name(index)).exists(),
                    "{} is left behind",
                    name(index)
                );
            }
        }
        let dir = format!("dir{index}");
        if let Err(error) = fs::create_dir(mount.join(&dir)) {
            assert_eq!(errno(&error), Errno::NFILE);
            assert!(!mount.backing().join(&dir).exists(), "{dir} is left behind");
        }
    }
    println!(
        "{} directories open; {made} of 100 more files were made",
        dirs.len()
    );
    drop((dirs, files));
    // The kernel tells firnd of closed directories later.
    wait_until(
        "there are descriptors again",
        Duration::from_secs(30),
        || fs::write(mount.join("last"), "text").is_ok(),
    );
    let backing = mount.umount();
    for index in 0..500 {
        assert!(
            read(&backing.join(name(index))) == content(index, 1),
            "{}",
            name(index)
        );
    }
}

/// 64 KiB in a file of that name.
fn write_temporary(path: &Path) {
    fs::write(path, [7; 64 << 10]).expect("write a temporary file");
}

/// Proves S-tx-13.
#[test]
fn regression_temporary_files_of_a_transaction_take_neither_room_nor_descriptors() {
    let count = env_count("FIRN_TEMPORARY", 9000);
    for mode in ["buffer", "shadow"] {
        let sandbox = Sandbox::new("temporary");
        let image = LoopImage::new(&sandbox, FsKind::Tmpfs, 512);
        let backing = image.mkdir("backing");
        let options = format!("{SMALL},drain=commit,mode={mode}");
        let mount = FirnMount::with_descriptors(&sandbox, &backing, &options, 256);
        fs::write(mount.join("old"), "old").expect("write");
        firn(&sandbox, "begin", mount.path()).ok();
        let mut first = (0, 0);
        for index in 0..count {
            let path = mount.join(format!("temporary{index}"));
            write_temporary(&path);
            fs::remove_file(&path).expect("unlink");
            write_temporary(&path);
            fs::rename(&path, mount.join("state")).expect("rename");
            let dir = mount.join(format!("dir{index}"));
            fs::create_dir(&dir).expect("mkdir");
            write_temporary(&dir.join("file"));
            fs::remove_file(dir.join("file")).expect("unlink");
            fs::remove_dir(&dir).expect("rmdir");
            if index == count / 10 {
                first = (mount.descriptors(), mount.own_memory_kib());
            }
        }
        let last = (mount.descriptors(), mount.own_memory_kib());
        println!(
            "{mode}, 3 x {count} files: descriptors and KiB after a tenth {first:?}, at the end {last:?}"
        );
        assert!(last.0 < first.0 + 32, "descriptors: {first:?}, {last:?}");
        // What its threads keep for their next requests comes with time, to some 10 MiB, however many files there are.
        assert!(
            last.1 < first.1 + 16_384,
            "KiB of memory: {first:?}, {last:?}"
        );
        fs::remove_file(mount.join("old")).expect("unlink");
        firn(&sandbox, "commit", mount.path()).ok();
        let backing = mount.umount();
        let mut names: Vec<_> = fs::read_dir(&backing)
            .expect("list")
            .map(|entry| entry.expect("list").file_name())
            .collect();
        names.retain(|name| name != ".firn");
        assert_eq!(names, ["state"]);
        assert_eq!(read(&backing.join("state")), [7; 64 << 10]);
    }
}

/// Fills the backing through a new file until a write is refused.
fn fill(path: &Path) {
    let file = File::create(path).expect("create");
    for round in 0.. {
        let offset = round << 20;
        match file
            .write_all_at(&bytes(round, 1 << 20), offset)
            .and_then(|()| file.sync_all())
        {
            Ok(()) => assert!(offset < 1 << 30, "the backing does not become full"),
            Err(error) => {
                assert_eq!(errno(&error), Errno::NOSPC);
                return;
            }
        }
    }
}

/// Proves S-tx-16.
#[test]
fn a_transaction_on_a_full_backing_is_aborted_and_committed() {
    for (kind, mode) in [FsKind::Tmpfs, FsKind::Ext4]
        .into_iter()
        .flat_map(|kind| [(kind, "buffer"), (kind, "shadow")])
    {
        let sandbox = Sandbox::new("full");
        let image = LoopImage::new(&sandbox, kind, 64);
        let backing = image.mkdir("backing");
        let old = bytes(7000, 4 << 20);
        let new = bytes(7001, 1 << 20);
        fs::write(backing.join("old"), &old).expect("write in the backing");
        let mount = FirnMount::over(
            &sandbox,
            &backing,
            &format!("{SMALL},drain=commit,mode={mode}"),
        );
        let change = || {
            open_rw(&mount.join("old"))
                .write_all_at(&new, 1 << 20)
                .expect("overwrite");
            fs::write(mount.join("made"), "made").expect("write");
            fill(&mount.join("filler"));
        };

        firn(&sandbox, "begin", mount.path()).ok();
        change();
        firn(&sandbox, "abort", mount.path()).ok();
        assert!(
            read(&mount.join("old")) == old,
            "{kind:?}, {mode}: the old content"
        );
        assert!(!mount.join("made").exists() && !mount.join("filler").exists());

        firn(&sandbox, "begin", mount.path()).ok();
        change();
        let full = firn(&sandbox, "commit", mount.path());
        println!(
            "{kind:?}, {mode}: a commit on a full backing ended with {}: {}",
            full.code,
            full.stderr.trim()
        );
        if full.code != 0 {
            assert!(full.stderr.contains("No space left"), "{full}");
            fs::remove_file(mount.join("filler")).expect("unlink");
            // The kernel tells of the last close after close(2) has returned.
            wait_until(
                "the room of the file is free",
                Duration::from_secs(20),
                || {
                    let free = statvfs(image.path()).expect("statvfs");
                    free.f_bavail * free.f_frsize > 8 << 20
                },
            );
            firn(&sandbox, "commit", mount.path()).ok();
        }
        let backing = mount.umount();
        let mut expected = old;
        expected[1 << 20..2 << 20].copy_from_slice(&new);
        assert!(
            read(&backing.join("old")) == expected,
            "{kind:?}, {mode}: the new content"
        );
        assert_eq!(read(&backing.join("made")), b"made");
    }
}
