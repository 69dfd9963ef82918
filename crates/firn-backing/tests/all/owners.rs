//! Tests of the owner and mode of objects that a backing makes for a caller.
//!
//! Only root can make objects for another user. Without root the tests skip themselves.

use std::ffi::OsStr;

use firn_backing::{Access, Attr, Backing, Caller, DirBacking, Files, Names, NewKind, Volume};

const CALLER: Caller = Caller {
    uid: 4321,
    gid: 5432,
    pid: 0,
};

/// Returns a new backing whose root directory has this mode and group; `None` if the test does not run as root.
fn new_backing(mode: u32, gid: u32) -> Option<(tempfile::TempDir, DirBacking)> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return None;
    }
    rustix::process::umask(rustix::fs::Mode::empty());
    let dir = tempfile::Builder::new()
        .prefix("firn-owner-")
        .tempdir_in("/tmp")
        .expect("tempdir");
    let backing = DirBacking::open(dir.path()).expect("open");
    backing
        .set_owner(&backing.root(), None, Some(gid))
        .expect("set_owner");
    backing.set_mode(&backing.root(), mode).expect("set_mode");
    Some((dir, backing))
}

/// Makes a file, a directory, a FIFO, a device and a symbolic link, and returns their attributes.
fn make_each_kind(backing: &DirBacking) -> Vec<Attr> {
    let root = backing.root();
    let name = OsStr::new;
    let node = |mode, rdev| NewKind::Node { mode, rdev };
    vec![
        backing
            .create(&CALLER, &root, name("f"), 0o6755)
            .expect("create")
            .2,
        backing
            .mkdir(&CALLER, &root, name("d"), 0o700)
            .expect("mkdir")
            .1,
        backing
            .make(&CALLER, &root, name("p"), node(libc::S_IFIFO | 0o600, 0))
            .expect("mknod")
            .1,
        backing
            .make(
                &CALLER,
                &root,
                name("c"),
                node(libc::S_IFCHR | 0o600, 0x103),
            )
            .expect("mknod")
            .1,
        backing
            .symlink(&CALLER, &root, name("l"), name("t"))
            .expect("symlink")
            .1,
    ]
}

#[test]
fn new_objects_belong_to_the_caller_and_the_thread_stays_itself() {
    // The caller may write to a root of the first mode. The second mode allows it only through the caller's
    // supplementary group, which is not known here.
    for mode in [0o777, 0o770] {
        let Some((_dir, backing)) = new_backing(mode, 0) else {
            return;
        };
        for attr in make_each_kind(&backing) {
            assert_eq!(
                (attr.uid, attr.gid),
                (CALLER.uid, CALLER.gid),
                "{mode:o}: {:?}",
                attr.kind
            );
        }
        let (inode, attr) = backing
            .lookup(&backing.root(), OsStr::new("f"))
            .expect("lookup");
        assert_eq!(
            attr.mode & 0o7777,
            0o6755,
            "set-id bits survive being given away"
        );
        assert!(backing.open(&inode, Access::ReadWrite).is_ok());
        let root_caller = Caller {
            uid: 0,
            gid: 0,
            pid: 0,
        };
        let own_attr = backing
            .create(&root_caller, &backing.root(), OsStr::new("own"), 0o600)
            .expect("create")
            .2;
        assert_eq!(
            (own_attr.uid, own_attr.gid),
            (0, 0),
            "the thread has its own ids again"
        );
    }
}

#[test]
fn a_setgid_parent_gives_its_group() {
    for mode in [0o2777, 0o2770] {
        let Some((_dir, backing)) = new_backing(mode, 7777) else {
            return;
        };
        for attr in make_each_kind(&backing) {
            assert_eq!(
                (attr.uid, attr.gid),
                (CALLER.uid, 7777),
                "{mode:o}: {:?}",
                attr.kind
            );
        }
        let (_, dir_attr) = backing
            .lookup(&backing.root(), OsStr::new("d"))
            .expect("lookup");
        assert_eq!(dir_attr.mode & 0o7777, 0o2700);
    }
}

#[test]
fn a_default_acl_alone_decides_the_mode() {
    let Some((dir, backing)) = new_backing(0o777, 0) else {
        return;
    };
    assert!(!backing.has_default_acl(&backing.root()));
    // Version 2; user::rwx, group::r-x, other::--- with no id (-1).
    let mut acl = vec![2, 0, 0, 0];
    for (tag, perm) in [(1u16, 7u16), (4, 5), (32, 0)] {
        acl.extend([tag.to_le_bytes(), perm.to_le_bytes()].concat());
        acl.extend([0xff; 4]);
    }
    let name = OsStr::new("system.posix_acl_default");
    backing
        .set_xattr(&backing.root(), name, &acl, 0)
        .unwrap_or_else(|e| panic!("{:?}: {e}", dir.path()));
    assert!(backing.has_default_acl(&backing.root()));
    let attr = backing
        .create(&CALLER, &backing.root(), OsStr::new("f"), 0o666)
        .expect("create")
        .2;
    assert_eq!(attr.mode & 0o777, 0o640);
}
