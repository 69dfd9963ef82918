//! The owner of what is made for a caller; needs root, and does nothing without.

use std::ffi::OsStr;

use firn_backing::{Access, Attr, Backing, Caller, DirBacking, Files, Names, NewKind, Volume};

const CALLER: Caller = Caller {
    uid: 4321,
    gid: 5432,
    pid: 0,
};

/// A backing whose root has this mode and group, or nothing where we are not root.
fn fresh(mode: u32, gid: u32) -> Option<(tempfile::TempDir, DirBacking)> {
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

/// Makes one of each kind; all attributes.
fn one_of_each(b: &DirBacking) -> Vec<Attr> {
    let root = b.root();
    let name = OsStr::new;
    let node = |mode, rdev| NewKind::Node { mode, rdev };
    vec![
        b.create(&CALLER, &root, name("f"), 0o6755)
            .expect("create")
            .2,
        b.mkdir(&CALLER, &root, name("d"), 0o700).expect("mkdir").1,
        b.make(&CALLER, &root, name("p"), node(libc::S_IFIFO | 0o600, 0))
            .expect("mknod")
            .1,
        b.make(
            &CALLER,
            &root,
            name("c"),
            node(libc::S_IFCHR | 0o600, 0x103),
        )
        .expect("mknod")
        .1,
        b.symlink(&CALLER, &root, name("l"), name("t"))
            .expect("symlink")
            .1,
    ]
}

#[test]
fn new_objects_belong_to_the_caller_and_the_thread_stays_itself() {
    // The caller may write to the first; to the second only through a group that we cannot know of.
    for mode in [0o777, 0o770] {
        let Some((_dir, b)) = fresh(mode, 0) else {
            return;
        };
        for attr in one_of_each(&b) {
            assert_eq!(
                (attr.uid, attr.gid),
                (CALLER.uid, CALLER.gid),
                "{mode:o}: {:?}",
                attr.kind
            );
        }
        let (f, attr) = b.lookup(&b.root(), OsStr::new("f")).expect("lookup");
        assert_eq!(
            attr.mode & 0o7777,
            0o6755,
            "set-id bits survive being given away"
        );
        assert!(b.open(&f, Access::ReadWrite).is_ok());
        let me = Caller {
            uid: 0,
            gid: 0,
            pid: 0,
        };
        let own = b
            .create(&me, &b.root(), OsStr::new("own"), 0o600)
            .expect("create")
            .2;
        assert_eq!(
            (own.uid, own.gid),
            (0, 0),
            "the thread has its own ids again"
        );
    }
}

#[test]
fn a_setgid_parent_gives_its_group() {
    for mode in [0o2777, 0o2770] {
        let Some((_dir, b)) = fresh(mode, 7777) else {
            return;
        };
        for attr in one_of_each(&b) {
            assert_eq!(
                (attr.uid, attr.gid),
                (CALLER.uid, 7777),
                "{mode:o}: {:?}",
                attr.kind
            );
        }
        let (_, d) = b.lookup(&b.root(), OsStr::new("d")).expect("lookup");
        assert_eq!(d.mode & 0o7777, 0o2700);
    }
}

#[test]
fn a_default_acl_alone_decides_the_mode() {
    let Some((dir, b)) = fresh(0o777, 0) else {
        return;
    };
    assert!(!b.has_default_acl(&b.root()));
    // Version 2; user::rwx, group::r-x, other::--- with no id (-1).
    let mut acl = vec![2, 0, 0, 0];
    for (tag, perm) in [(1u16, 7u16), (4, 5), (32, 0)] {
        acl.extend([tag.to_le_bytes(), perm.to_le_bytes()].concat());
        acl.extend([0xff; 4]);
    }
    let name = OsStr::new("system.posix_acl_default");
    b.set_xattr(&b.root(), name, &acl, 0)
        .unwrap_or_else(|e| panic!("{:?}: {e}", dir.path()));
    assert!(b.has_default_acl(&b.root()));
    let attr = b
        .create(&CALLER, &b.root(), OsStr::new("f"), 0o666)
        .expect("create")
        .2;
    assert_eq!(attr.mode & 0o777, 0o640);
}
