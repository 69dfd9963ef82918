//! Backings and mount points that cannot be used.

use std::fs;
use std::path::Path;

use firn_tests::mount::{SMALL, mount_args};
use firn_tests::sandbox::is_mounted;
use firn_tests::{FirnMount, FsKind, LoopImage, Outcome, Sandbox};
use rustix::io::Errno;

fn refused(sandbox: &Sandbox, backing: &Path, mount_point: &Path) -> Outcome {
    let outcome = sandbox.run(mount_args(backing, mount_point, SMALL));
    assert_ne!(outcome.code, 0, "it was mounted: {outcome}");
    assert!(
        outcome.stderr.starts_with("firn: "),
        "no `firn: ` before the message: {outcome}"
    );
    assert!(
        !is_mounted(mount_point),
        "refused and still mounted: {outcome}"
    );
    assert!(
        sandbox.processes().is_empty(),
        "refused, and a firnd is left"
    );
    outcome
}

#[test]
fn a_missing_backing_is_named() {
    let sandbox = Sandbox::new("nobacking");
    let missing = sandbox.join("no/such/place");
    let outcome = refused(&sandbox, &missing, &sandbox.join("mnt"));
    outcome.code(1).says("no/such/place").says("does not exist");
}

#[test]
fn a_file_as_backing_is_refused() {
    let sandbox = Sandbox::new("filebacking");
    fs::write(sandbox.join("file"), "").expect("write");
    refused(&sandbox, &sandbox.join("file"), &sandbox.join("mnt"))
        .code(1)
        .says("not a directory");
}

#[test]
fn a_missing_mount_point_is_named() {
    let sandbox = Sandbox::new("nopoint");
    refused(&sandbox, &sandbox.join("backing"), &sandbox.join("nowhere"))
        .code(1)
        .says("nowhere");
}

#[test]
fn a_file_as_mount_point_is_refused() {
    let sandbox = Sandbox::new("filepoint");
    fs::write(sandbox.join("file"), "").expect("write");
    refused(&sandbox, &sandbox.join("backing"), &sandbox.join("file"))
        .code(1)
        .says("not a directory");
}

#[test]
fn a_mount_point_inside_the_backing_is_refused() {
    let sandbox = Sandbox::new("inside");
    let inside = sandbox.mkdir("backing/mnt");
    let outcome = refused(&sandbox, &sandbox.join("backing"), &inside);
    outcome.code(2).says("inside");
}

#[test]
fn a_backing_inside_the_mount_point_is_refused() {
    let sandbox = Sandbox::new("outside");
    let backing = sandbox.mkdir("mnt/backing");
    let outcome = refused(&sandbox, &backing, &sandbox.join("mnt"));
    outcome.code(2).says("inside");
}

#[test]
fn a_mount_point_in_use_by_another_firn_mount_is_busy() {
    let sandbox = Sandbox::new("busy");
    let mount = FirnMount::new(&sandbox, SMALL);
    let before = sandbox.processes();
    assert!(before.contains(&mount.pid()));
    let other = sandbox.mkdir("other");
    sandbox
        .run(mount_args(&other, mount.path(), SMALL))
        .code(11)
        .says("firn: ");
    assert_eq!(
        sandbox.processes(),
        before,
        "the refused mount left a process"
    );
    mount.umount();
}

/// Proves S-share-1.
#[test]
fn the_same_backing_twice_is_refused_naming_its_holder() {
    let sandbox = Sandbox::new("twice");
    let mount = FirnMount::new(&sandbox, SMALL);
    let second = sandbox.mkdir("second");
    let outcome = sandbox
        .run(mount_args(mount.backing(), &second, SMALL))
        .code(11);
    outcome
        .says(&mount.pid().to_string())
        .says(&mount.path().to_string_lossy());
    // The same directory by another name is the same backing.
    std::os::unix::fs::symlink(mount.backing(), sandbox.join("alias")).expect("symlink");
    sandbox
        .run(mount_args(&sandbox.join("alias"), &second, SMALL))
        .code(11)
        .says(&mount.pid().to_string());
    fs::write(mount.join("file"), "the first mount lives on").expect("write");
    mount.umount();
}

#[test]
fn a_read_only_backing_is_refused_naming_the_option_and_mounts_with_it() {
    let sandbox = Sandbox::new("readonly");
    let image = LoopImage::new(&sandbox, FsKind::Ext4, 32);
    fs::write(image.path().join("file"), "text").expect("write");
    image.remount("ro");
    refused(&sandbox, image.path(), &sandbox.join("mnt"))
        .code(1)
        .says("read-only")
        .says("-o ro");
    let mount = FirnMount::over(&sandbox, image.path(), "ro");
    assert_eq!(fs::read(mount.join("file")).expect("read"), b"text");
    for name in ["new", "file"] {
        let error = fs::write(mount.join(name), "x").expect_err("a read-only backing");
        assert_eq!(Errno::from_io_error(&error), Some(Errno::ROFS));
    }
    mount.umount();
}

#[test]
fn a_read_only_mount_refuses_changes_with_erofs() {
    let sandbox = Sandbox::new("romount");
    fs::write(sandbox.join("backing/file"), "text").expect("write");
    let mount = FirnMount::new(&sandbox, "ro");
    let error = fs::write(mount.join("file"), "x").expect_err("a read-only mount");
    assert_eq!(Errno::from_io_error(&error), Some(Errno::ROFS));
    assert_eq!(fs::read(mount.join("file")).expect("read"), b"text");
    mount.umount();
}

#[test]
fn umount_of_what_is_no_firn_mount_is_10() {
    let sandbox = Sandbox::new("nomount");
    for verb in ["umount", "status"] {
        sandbox
            .run([verb.as_ref(), sandbox.join("mnt").as_os_str()])
            .code(10)
            .says("firn: ");
    }
}

#[test]
fn umount_with_a_file_open_is_busy_and_works_after_its_close() {
    let sandbox = Sandbox::new("umountbusy");
    let mount = FirnMount::new(&sandbox, SMALL);
    let file = fs::File::create(mount.join("file")).expect("create");
    sandbox
        .run(["umount".as_ref(), mount.path().as_os_str()])
        .code(11);
    fs::write(mount.join("other"), "still mounted").expect("write");
    drop(file);
    mount.umount();
}
