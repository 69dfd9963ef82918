//! What is where after kill -9 of firnd and `firn recover`.

use std::ffi::OsStr;
use std::fs::{self, File, FileTimes};
use std::time::{Duration, SystemTime};

use firn_tests::fsops::{Mapping, assert_same_bytes, open_rw, read};
use firn_tests::mount::patient;
use firn_tests::random::bytes;
use firn_tests::{FirnMount, Sandbox};
use rustix::mm::MapFlags;

/// Proves S-mmap-2.
#[test]
fn a_mapped_store_survives_after_msync_fsync_or_the_last_close() {
    let sandbox = Sandbox::new("mmapkill");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let mapped = |name: &str, key| {
        let file = open_rw(&mount.join(name));
        file.set_len(40_000).expect("size");
        let mapping = Mapping::new(&file, 40_000, MapFlags::SHARED).expect("mmap");
        mapping.write(0, &bytes(key, 40_000));
        (file, mapping)
    };
    let synced = mapped("msync", 1);
    let fsynced = mapped("fsync", 2);
    let closed = mapped("close", 3);
    synced.1.sync().expect("msync");
    fsynced.0.sync_all().expect("fsync");
    drop(closed.0);
    let backing = mount.kill();
    sandbox.run(["recover".as_ref(), backing.as_os_str()]).ok();
    for (name, key) in [("msync", 1), ("fsync", 2), ("close", 3)] {
        assert_same_bytes(name, &read(&backing.join(name)), &bytes(key, 40_000));
    }
}

/// Proves S-name-6.
#[test]
fn data_follows_its_file_through_renames_and_not_its_name() {
    let sandbox = Sandbox::new("renamekill");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    fs::create_dir(mount.join("dir")).expect("mkdir");
    fs::write(mount.join("dir/first"), bytes(1, 50_000)).expect("write");
    fs::rename(mount.join("dir/first"), mount.join("dir/renamed")).expect("rename");
    fs::rename(mount.join("dir"), mount.join("moved")).expect("rename of the directory");
    fs::create_dir(mount.join("dir")).expect("mkdir");
    fs::write(mount.join("dir/first"), bytes(2, 30_000)).expect("another file of the old name");
    let backing = mount.kill();
    sandbox.run(["recover".as_ref(), backing.as_os_str()]).ok();
    assert_same_bytes(
        "the renamed",
        &read(&backing.join("moved/renamed")),
        &bytes(1, 50_000),
    );
    assert_same_bytes(
        "the new",
        &read(&backing.join("dir/first")),
        &bytes(2, 30_000),
    );
    assert!(sandbox.arenas().is_empty(), "nothing is left to drain");
}

/// Proves S-crash-6, S-crash-3.
#[test]
fn data_whose_file_is_not_found_is_kept_named_and_written_to_no_other() {
    let sandbox = Sandbox::new("lost");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    fs::write(mount.join("file"), bytes(1, 50_000)).expect("write");
    let backing = mount.kill();
    fs::rename(backing.join("file"), backing.join("elsewhere")).expect("rename beside the mount");
    fs::write(backing.join("file"), "another").expect("a new file of that name");

    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let status = mount.status();
    assert_eq!(status.lost_file_bytes, 50_000);
    assert!(
        status.errors.iter().any(|e| e.path == "file" && e.pending),
        "{:?}",
        status.errors
    );
    mount.wait("drained", mount.path());
    assert_eq!(read(&backing.join("file")), b"another");
    assert_eq!(read(&backing.join("elsewhere")), b"");
    mount.kill();
    assert_eq!(
        sandbox.arenas().len(),
        1,
        "the arena was removed with data in it"
    );

    fs::rename(backing.join("elsewhere"), backing.join("file")).expect("rename back");
    sandbox.run(["recover".as_ref(), backing.as_os_str()]).ok();
    assert_same_bytes(
        "found again",
        &read(&backing.join("file")),
        &bytes(1, 50_000),
    );
    assert!(sandbox.arenas().is_empty(), "nothing is left to drain");
}

/// Proves S-crash-10.
#[test]
fn data_whose_file_is_gone_is_saved_or_given_up_when_asked() {
    let sandbox = Sandbox::new("rescue");
    for (asked, expected) in [("--save-lost", "saved to"), ("--discard-lost", "discarded")] {
        let mount = FirnMount::new(&sandbox, &patient("close=held"));
        fs::create_dir_all(mount.join("dir")).expect("mkdir");
        for (path, seed) in [("dir/gone", 1), ("stays", 2)] {
            fs::write(mount.join(path), bytes(seed, 3_000_000)).expect("write");
        }
        let backing = mount.kill();
        fs::remove_file(backing.join("dir/gone")).expect("remove beside the mount");

        let without = sandbox
            .run(["recover".as_ref(), backing.as_os_str()])
            .code(3);
        without.says("--save-lost").says("--discard-lost");
        assert_same_bytes("found", &read(&backing.join("stays")), &bytes(2, 3_000_000));
        assert_eq!(
            sandbox.arenas().len(),
            1,
            "the arena was removed with data in it"
        );

        let copies = sandbox.join("copies");
        let inside = backing.join("copies");
        let mut args = vec![OsStr::new("recover"), OsStr::new(asked)];
        if asked == "--save-lost" {
            sandbox
                .run([args[0], args[1], inside.as_os_str(), backing.as_os_str()])
                .code(2)
                .says("inside the backing");
            fs::remove_dir(&inside).expect("the refused directory");
            fs::create_dir_all(copies.join("dir")).expect("mkdir");
            fs::write(copies.join("dir/gone"), "in the way").expect("a file of that name");
            sandbox
                .run([args[0], args[1], copies.as_os_str(), backing.as_os_str()])
                .code(1)
                .says("dir/gone");
            fs::remove_file(copies.join("dir/gone")).expect("out of the way");
            args.push(copies.as_os_str());
        }
        args.push(backing.as_os_str());
        let done = sandbox.run(args).ok();
        assert!(done.stdout.contains(expected), "{}", done.stdout);
        if asked == "--save-lost" {
            assert_same_bytes(
                "saved",
                &read(&copies.join("dir/gone")),
                &bytes(1, 3_000_000),
            );
        }
        assert!(sandbox.arenas().is_empty(), "nothing is left to keep");
    }
}

/// Proves S-attr-2, S-attr-8.
#[test]
fn a_time_that_was_set_survives_a_recovery() {
    let sandbox = Sandbox::new("timekill");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let time = SystemTime::UNIX_EPOCH + Duration::new(981_173_106, 123_456_789);
    fs::write(mount.join("file"), bytes(1, 20_000)).expect("write");
    let file = File::open(mount.join("file")).expect("open");
    file.set_times(FileTimes::new().set_modified(time))
        .expect("utimensat");
    assert_eq!(mount.status().held_bytes, 20_000);
    let backing = mount.kill();
    sandbox.run(["recover".as_ref(), backing.as_os_str()]).ok();
    assert_same_bytes("recovered", &read(&backing.join("file")), &bytes(1, 20_000));
    assert_eq!(
        fs::metadata(backing.join("file"))
            .expect("stat")
            .modified()
            .expect("a time"),
        time
    );
}
