//! Names are the backing's, at once and without their data.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::symlink;

use firn_tests::fsops::{assert_same_bytes, read};
use firn_tests::mount::patient;
use firn_tests::random::bytes;
use firn_tests::{FirnMount, Sandbox};

/// Proves S-name-1.
#[test]
fn a_change_of_names_is_in_the_backing_when_its_call_returns() {
    let sandbox = Sandbox::new("namesatonce");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let names = || {
        let entries = fs::read_dir(mount.backing())
            .expect("readdir")
            .map(|e| e.expect("entry").file_name());
        let mut names: Vec<_> = entries
            .map(|name| name.into_string().expect("text"))
            .collect();
        names.sort();
        names.join(" ")
    };
    let mut file = File::create_new(mount.join("a")).expect("create");
    assert_eq!(names(), "a");
    file.write_all(&bytes(1, 10_000)).expect("write");
    fs::hard_link(mount.join("a"), mount.join("b")).expect("link");
    assert_eq!(names(), "a b");
    fs::rename(mount.join("a"), mount.join("c")).expect("rename");
    assert_eq!(names(), "b c");
    fs::remove_file(mount.join("b")).expect("unlink");
    assert_eq!(names(), "c");
    fs::create_dir(mount.join("d")).expect("mkdir");
    symlink("c", mount.join("e")).expect("symlink");
    assert_eq!(names(), "c d e");
    fs::rename(mount.join("c"), mount.join("d/f")).expect("rename into a directory");
    assert_eq!(names(), "d e");
    fs::rename(mount.join("d/f"), mount.join("c")).expect("rename out of it");
    fs::remove_dir(mount.join("d")).expect("rmdir");
    assert_eq!(names(), "c e");
    assert_eq!(mount.status().drain_bytes, 0, "names do not wait for data");
    drop(file);
    mount.umount();
}

/// Proves S-name-5.
#[test]
fn a_rename_does_not_wait_for_data() {
    let sandbox = Sandbox::new("renamenowait");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    fs::write(mount.join("file.tmp"), bytes(1, 200_000)).expect("write");
    fs::rename(mount.join("file.tmp"), mount.join("file")).expect("rename");
    assert_eq!(
        fs::metadata(mount.backing().join("file"))
            .expect("the new name is there")
            .len(),
        0
    );
    assert_eq!(mount.status().held_bytes, 200_000);
    assert_same_bytes(
        "through the mount",
        &read(&mount.join("file")),
        &bytes(1, 200_000),
    );
    let backing = mount.umount();
    assert_same_bytes(
        "in the backing",
        &read(&backing.join("file")),
        &bytes(1, 200_000),
    );
}
