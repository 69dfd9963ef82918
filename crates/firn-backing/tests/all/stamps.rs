//! Tests that the times which the kernel gives to objects are not before the times that Firn gave earlier.

use std::ffi::OsStr;

use firn_backing::{Access, Backing, DirBacking, Files, SetTime, Time, Volume};
use firn_sim::suite;

/// Proves S-attr-11.
#[test]
fn what_the_kernel_stamps_later_is_not_older() {
    let dir = tempfile::tempdir().expect("a directory");
    let backing = DirBacking::open(dir.path()).expect("open");
    let caller = suite::own_caller();
    let root = backing.root();
    for number in 0..200 {
        let name = format!("file{number}");
        let before = Time::now();
        let made = backing.create(&caller, &root, OsStr::new(&name), 0o644);
        let (inode, _, attr) = made.expect("create");
        assert!(before <= attr.mtime, "made: {before:?}, {:?}", attr.mtime);
        let file = backing.open(&inode, Access::ReadWrite).expect("open");
        let before = Time::now();
        backing.set_len(&file, 10).expect("set_len");
        let after = backing.attr(&inode).expect("attr").mtime;
        assert!(before <= after, "cut: {before:?}, {after:?}");
        let before = Time::now();
        backing
            .set_times(&inode, SetTime::Keep, SetTime::Now)
            .expect("set_times");
        let after = backing.attr(&inode).expect("attr").mtime;
        assert!(before <= after, "touched: {before:?}, {after:?}");
        let name = format!("dir{number}");
        let before = Time::now();
        let made = backing.mkdir(&caller, &root, OsStr::new(&name), 0o755);
        let after = made.expect("mkdir").1.mtime;
        assert!(before <= after, "made: {before:?}, {after:?}");
    }
}
