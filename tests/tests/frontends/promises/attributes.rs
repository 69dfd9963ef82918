//! Length, times, numbers, blocks.

use std::fs::{self, File, FileTimes};
use std::os::unix::fs::{DirEntryExt, FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use firn_tests::fsops::open_rw;
use firn_tests::mount::patient;
use firn_tests::random::bytes;
use firn_tests::{FirnMount, Sandbox, run, wait_until};
use rustix::fs::{AtFlags, CWD, StatxFlags};

fn modified(path: &Path) -> SystemTime {
    fs::metadata(path)
        .expect("stat")
        .modified()
        .expect("a time")
}

/// Proves S-attr-1, S-attr-2.
#[test]
fn length_and_time_are_those_of_the_last_write_drained_or_not() {
    let sandbox = Sandbox::new("mtime");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let here = mount.join("file");
    let below = mount.backing().join("file");
    let file = open_rw(&here);
    file.write_all_at(&bytes(1, 1000), 0).expect("write");
    let first = modified(&here);
    let later = |than: SystemTime| {
        wait_until("the clock moves", Duration::from_secs(5), || {
            SystemTime::now() > than + Duration::from_millis(20)
        });
    };
    later(first);
    file.write_all_at(&bytes(2, 1000), 5000).expect("write");
    let second = modified(&here);
    assert!(
        second > first && second <= SystemTime::now(),
        "{first:?}, then {second:?}"
    );
    assert_eq!(fs::metadata(&here).expect("stat").len(), 6000);
    later(second);
    mount.wait("drained", &here).ok();
    assert_eq!(fs::metadata(&below).expect("stat").len(), 6000);
    assert_eq!((modified(&here), modified(&below)), (second, second));

    file.write_all_at(&bytes(3, 1000), 6000).expect("write");
    let past = SystemTime::UNIX_EPOCH + Duration::new(981_173_106, 123_456_789);
    file.set_times(FileTimes::new().set_modified(past))
        .expect("utimensat");
    assert_eq!(modified(&here), past);
    mount.wait("drained", &here).ok();
    assert_eq!((modified(&here), modified(&below)), (past, past));
    drop(file);
    mount.umount();
}

/// Proves S-attr-3, S-attr-10.
#[test]
fn inode_numbers_are_those_of_the_backing_but_of_the_root_and_of_other_file_systems() {
    let sandbox = Sandbox::new("inodes");
    let other = sandbox.mkdir("backing/other");
    run(Command::new("mount")
        .args(["-t", "tmpfs", "firn-test"])
        .arg(&other))
    .ok();
    fs::write(other.join("file"), "text").expect("write on the other file system");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    fs::create_dir(mount.join("dir")).expect("mkdir");
    fs::write(mount.join("dir/file"), "text").expect("write");
    let number = |path: &Path| fs::metadata(path).expect("stat").ino();
    for name in ["dir", "dir/file"] {
        assert_eq!(
            number(&mount.join(name)),
            number(&mount.backing().join(name)),
            "{name}"
        );
    }
    let entry = fs::read_dir(mount.join("dir"))
        .expect("readdir")
        .next()
        .expect("one")
        .expect("entry");
    assert_eq!(entry.ino(), number(&mount.join("dir/file")));
    drop(entry);
    assert_eq!(number(mount.path()), 1);

    let open = File::open(mount.join("other/file")).expect("open");
    let own = open.metadata().expect("fstat").ino();
    assert_ne!(
        own,
        number(&other.join("file")),
        "numbers of two file systems may be the same"
    );
    assert_eq!(number(&mount.join("other/file")), own);
    drop(open);
    mount.umount();
}

/// Proves S-attr-4.
#[test]
fn the_device_is_the_mounts_and_pending_bytes_count_as_blocks() {
    let sandbox = Sandbox::new("blocks");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    fs::write(mount.join("file"), bytes(1, 1 << 20)).expect("write");
    let root = fs::metadata(mount.path()).expect("stat");
    let file = fs::metadata(mount.join("file")).expect("stat");
    assert_eq!(root.dev(), file.dev());
    assert_ne!(
        root.dev(),
        fs::metadata(mount.backing()).expect("stat").dev()
    );
    assert_eq!(
        fs::metadata(mount.backing().join("file"))
            .expect("stat")
            .blocks(),
        0
    );
    assert_eq!(file.blocks(), (1 << 20) / 512);
    mount.umount();
}

/// Proves S-attr-7.
#[test]
fn statx_answers_without_the_time_of_birth() {
    let sandbox = Sandbox::new("statx");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    fs::write(mount.join("file"), bytes(1, 3000)).expect("write");
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let found =
        rustix::fs::statx(CWD, mount.join("file"), AtFlags::empty(), wanted).expect("statx");
    let mask = StatxFlags::from_bits_retain(found.stx_mask);
    assert!(
        mask.contains(StatxFlags::BASIC_STATS) && !mask.contains(StatxFlags::BTIME),
        "{mask:?}"
    );
    assert_eq!(found.stx_size, 3000);
    mount.umount();
}
