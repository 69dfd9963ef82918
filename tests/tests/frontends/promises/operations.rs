//! Operations that drain first, that see the backing only, or that are not there; locks.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::Command;

use firn_tests::fsops::{assert_same_bytes, open_rw, read};
use firn_tests::mount::{SMALL, patient};
use firn_tests::random::bytes;
use firn_tests::{FirnMount, FsKind, LoopImage, Sandbox, run};
use rustix::fs::{FallocateFlags, FlockOperation, SeekFrom as Whence};
use rustix::io::Errno;

/// Proves S-op-2.
#[test]
fn calls_that_need_the_blocks_drain_first() {
    let sandbox = Sandbox::new("drainfirst");
    let image = LoopImage::new(&sandbox, FsKind::Ext4, 64);
    let mount = FirnMount::over(&sandbox, image.path(), &patient("close=held"));
    let file = open_rw(&mount.join("file"));
    let other = open_rw(&mount.join("other"));
    let drains = |what: &str, call: &dyn Fn()| {
        file.write_all_at(&bytes(1, 100_000), 0).expect("write");
        assert_eq!(mount.status().held_bytes, 100_000, "before {what}");
        call();
        assert_eq!(mount.status().held_bytes, 0, "after {what}");
    };
    drains("SEEK_DATA", &|| {
        assert_eq!(rustix::fs::seek(&file, Whence::Data(0)), Ok(0))
    });
    drains("SEEK_HOLE", &|| {
        assert!(rustix::fs::seek(&file, Whence::Hole(0)).is_ok())
    });
    drains("copy_file_range", &|| {
        let copied =
            rustix::fs::copy_file_range(&file, Some(&mut 0), &other, Some(&mut 0), 100_000);
        assert!(copied.is_ok_and(|count| count > 0));
    });
    let keep = FallocateFlags::KEEP_SIZE;
    for mode in [
        keep | FallocateFlags::PUNCH_HOLE,
        keep | FallocateFlags::ZERO_RANGE,
    ] {
        drains("fallocate", &|| {
            rustix::fs::fallocate(&file, mode, 8192, 8192).expect("fallocate")
        });
    }
    let mut model = bytes(1, 100_000);
    model[8192..16384].fill(0);
    drop((file, other));
    assert_same_bytes("zeroed", &read(&mount.join("file")), &model);
    mount.umount();
}

/// Proves S-op-3.
#[test]
fn statfs_does_not_count_what_is_pending() {
    let sandbox = Sandbox::new("statfsheld");
    let image = LoopImage::new(&sandbox, FsKind::Ext4, 64);
    let mount = FirnMount::over(&sandbox, image.path(), &patient("close=held"));
    File::create(mount.join("file")).expect("create");
    let free = |path| rustix::fs::statvfs(path).expect("statvfs").f_bfree;
    let before = free(image.path());
    fs::write(mount.join("file"), bytes(1, 2 << 20)).expect("write");
    assert_eq!(mount.status().held_bytes, 2 << 20);
    assert_eq!((free(mount.path()), free(image.path())), (before, before));
    mount.umount();
}

/// Proves S-op-5, S-op-6.
#[test]
fn reflinks_and_ioctls_do_not_pass_and_cp_copies_instead() {
    let sandbox = Sandbox::new("reflink");
    let image = LoopImage::new(&sandbox, FsKind::Btrfs, 200);
    let mount = FirnMount::over(&sandbox, image.path(), SMALL);
    fs::write(mount.join("file"), bytes(1, 100_000)).expect("write");
    for (dir, clones) in [
        (image.path(), Ok(())),
        (mount.path(), Err(Errno::OPNOTSUPP)),
    ] {
        let from = File::open(dir.join("file")).expect("open");
        let to = open_rw(&dir.join("clone"));
        assert_eq!(
            rustix::fs::ioctl_ficlone(&to, &from),
            clones,
            "FICLONE in {dir:?}"
        );
        let flags = rustix::fs::ioctl_getflags(&from).map(drop);
        assert_eq!(
            flags,
            clones.map_err(|_| Errno::NOTTY),
            "FS_IOC_GETFLAGS in {dir:?}"
        );
    }
    run(Command::new("cp")
        .arg("--reflink=auto")
        .arg(mount.join("file"))
        .arg(mount.join("copy")))
    .ok();
    assert_same_bytes("copied", &read(&mount.join("copy")), &bytes(1, 100_000));
    mount.umount();
}

/// Proves S-lock-1, S-lock-2.
#[test]
fn locks_hold_on_the_mount_and_are_not_seen_in_the_backing() {
    let sandbox = Sandbox::new("lockbelow");
    let mount = FirnMount::new(&sandbox, SMALL);
    let open = || [(); 2].map(|()| open_rw(&mount.join("file")));
    let below = open_rw(&mount.backing().join("file"));
    let [first, second] = open();
    rustix::fs::flock(&first, FlockOperation::LockExclusive).expect("flock");
    let attempt = rustix::fs::flock(&second, FlockOperation::NonBlockingLockExclusive);
    assert_eq!(attempt, Err(Errno::WOULDBLOCK));
    rustix::fs::flock(&below, FlockOperation::NonBlockingLockExclusive)
        .expect("flock in the backing");
    drop((first, second));

    let [first, second] = open();
    assert_eq!(lock_of_description(&first), Ok(()));
    assert_eq!(lock_of_description(&second), Err(Errno::AGAIN));
    assert_eq!(lock_of_description(&below), Ok(()));
    drop((first, second));
    mount.umount();
}

/// An exclusive lock of the whole file that belongs to the open file description.
fn lock_of_description(file: &File) -> Result<(), Errno> {
    use std::os::fd::AsRawFd;
    // SAFETY: all zeros is a valid flock: a lock of the whole file, from its start.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    // SAFETY: the descriptor is open and the kernel only reads the structure.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) } {
        0 => Ok(()),
        _ => Err(firn_tests::fsops::errno(&std::io::Error::last_os_error())),
    }
}
