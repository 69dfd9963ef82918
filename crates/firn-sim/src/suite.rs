//! The conformance suite: the required behaviour of every backing, as plain functions over the trait.
//!
//! [`run`] panics at the first difference. Link counts of directories, allocated blocks and the order of entries depend
//! on the file system, and are not checked.

use std::ffi::OsStr;
use std::io::IoSlice;

use crate::tree;
use firn_backing::{
    Access, Attr, Backing, Caller, DataPart, Errno, Kind, LockMode, LockRange, LockRequest,
    NewKind, RenameFlags, Seek, SetTime, Time, data_ranges,
};

pub mod differential;

/// Returns the caller that owns all objects of the suite: the user of this process.
pub fn own_caller() -> Caller {
    let uid = rustix::process::geteuid().as_raw();
    Caller {
        uid,
        gid: rustix::process::getegid().as_raw(),
        pid: 0,
    }
}

/// The name of a case, and its function.
type Case<B> = (&'static str, fn(&B));

/// Runs all cases, each over a fresh, empty backing from `make`. The process must have umask 0.
pub fn run<B: Backing>(make: impl Fn() -> B) {
    let cases: [Case<B>; 13] = [
        ("names", names),
        ("inodes_outlive_names", inodes_outlive_names),
        ("hard_links", hard_links),
        ("directories", directories),
        ("renames", renames),
        ("symlinks_and_special_files", symlinks_and_special_files),
        ("attributes", attributes),
        ("xattrs", xattrs),
        ("data", data),
        ("parts", parts),
        ("holes", holes),
        ("streams", streams),
        ("lanes", lanes),
    ];
    for (name, case) in cases {
        eprintln!("conformance: {name}");
        case(&make());
    }
}

fn os(name: &str) -> &OsStr {
    OsStr::new(name)
}

fn file<B: Backing>(b: &B, name: &str, content: &[u8]) -> (B::Inode, B::File) {
    let (inode, file, _) = b
        .create(&own_caller(), &b.root(), os(name), 0o644)
        .expect("create");
    write(b, &file, content, 0);
    (inode, file)
}

fn dir<B: Backing>(b: &B, name: &str) -> B::Inode {
    b.mkdir(&own_caller(), &b.root(), os(name), 0o755)
        .expect("mkdir")
        .0
}

fn write<B: Backing>(b: &B, file: &B::File, content: &[u8], offset: u64) {
    assert_eq!(
        b.write_at(file, &[IoSlice::new(content)], offset),
        Ok(content.len())
    );
}

fn read<B: Backing>(b: &B, file: &B::File, offset: u64, len: usize) -> Vec<u8> {
    let mut buf = vec![0xee; len];
    let count = b.read_at(file, &mut buf, offset).expect("read");
    buf.truncate(count);
    buf
}

fn look<B: Backing>(b: &B, name: &str) -> Result<Attr, Errno> {
    b.lookup(&b.root(), os(name)).map(|found| found.1)
}

fn names<B: Backing>(b: &B) {
    let root = b.root();
    let me = own_caller();
    assert_eq!(look(b, "a").err(), Some(Errno::NOENT));
    let (inode, _, attr) = b.create(&me, &root, os("a"), 0o6751).expect("create");
    assert_eq!(
        (attr.kind, attr.mode & 0o7777, attr.size, attr.nlink),
        (Kind::File, 0o6751, 0, 1)
    );
    assert_eq!(look(b, "a").map(|a| a.ino), Ok(attr.ino));
    assert_eq!(
        b.create(&me, &root, os("a"), 0o644).err(),
        Some(Errno::EXIST)
    );
    assert_eq!(
        b.mkdir(&me, &root, os("a"), 0o755).err(),
        Some(Errno::EXIST)
    );
    assert_eq!(b.lookup(&inode, os("x")).err(), Some(Errno::NOTDIR));
    let long = "n".repeat(256);
    assert_eq!(look(b, &long).err(), Some(Errno::NAMETOOLONG));
    assert_eq!(b.unlink(&root, os("b")).err(), Some(Errno::NOENT));
    assert_eq!(b.rmdir(&root, os("a")).err(), Some(Errno::NOTDIR));
    assert_eq!(b.unlink(&root, os("a")), Ok(()));
    assert_eq!(look(b, "a").err(), Some(Errno::NOENT));
}

fn inodes_outlive_names<B: Backing>(b: &B) {
    let root = b.root();
    let (inode, open) = file(b, "a", b"kept");
    b.rename(&root, os("a"), &root, os("b"), RenameFlags::empty())
        .expect("rename");
    assert_eq!(b.attr(&inode).map(|a| a.size), Ok(4));
    b.unlink(&root, os("b")).expect("unlink");
    drop(open);
    assert_eq!(b.attr(&inode).map(|a| a.nlink), Ok(0));
    let again = b
        .open(&inode, Access::ReadWrite)
        .expect("open without a name");
    assert_eq!(read(b, &again, 0, 9), b"kept");
    assert_eq!(b.link(&inode, &root, os("c")).err(), Some(Errno::NOENT));
}

fn hard_links<B: Backing>(b: &B) {
    let root = b.root();
    let (inode, open) = file(b, "a", b"one");
    assert_eq!(b.link(&inode, &root, os("b")).map(|a| a.nlink), Ok(2));
    assert_eq!(b.link(&inode, &root, os("b")).err(), Some(Errno::EXIST));
    write(b, &open, b"two", 0);
    let (other, attr) = b.lookup(&root, os("b")).expect("lookup");
    assert_eq!(attr.ino, b.attr(&inode).expect("attr").ino);
    assert_eq!(
        read(b, &b.open(&other, Access::Read).expect("open"), 0, 9),
        b"two"
    );
    // If both names belong to one file, rename does nothing.
    assert_eq!(
        b.rename(&root, os("a"), &root, os("b"), RenameFlags::empty()),
        Ok(())
    );
    assert_eq!(look(b, "a").map(|a| a.nlink), Ok(2));
    let d = dir(b, "d");
    assert_eq!(b.link(&d, &root, os("e")).err(), Some(Errno::PERM));
}

fn directories<B: Backing>(b: &B) {
    let root = b.root();
    let me = own_caller();
    let d = dir(b, "d");
    b.mkdir(&me, &d, os("e"), 0o700).expect("mkdir");
    assert_eq!(b.rmdir(&root, os("d")).err(), Some(Errno::NOTEMPTY));
    assert_eq!(b.unlink(&root, os("d")).err(), Some(Errno::ISDIR));
    assert_eq!(b.open(&d, Access::Read).err(), Some(Errno::ISDIR));
    assert_eq!(
        (b.rmdir(&d, os("e")), b.rmdir(&root, os("d"))),
        (Ok(()), Ok(()))
    );
    assert_eq!(b.create(&me, &d, os("x"), 0o644).err(), Some(Errno::NOENT));
    let (f, _) = file(b, "f", b"");
    assert_eq!(b.open_dir(&f).err(), Some(Errno::NOTDIR));
    assert_eq!((b.sync_dir(&root), b.sync_all()), (Ok(()), Ok(())));
}

fn renames<B: Backing>(b: &B) {
    let root = b.root();
    file(b, "a", b"a");
    file(b, "b", b"b");
    let d = dir(b, "d");
    let go = |from: &str, to: &str, flags| b.rename(&root, os(from), &root, os(to), flags);
    let none = RenameFlags::empty();
    assert_eq!(go("x", "y", none).err(), Some(Errno::NOENT));
    assert_eq!(
        go("a", "b", RenameFlags::NOREPLACE).err(),
        Some(Errno::EXIST)
    );
    assert_eq!(
        go("a", "x", RenameFlags::EXCHANGE).err(),
        Some(Errno::NOENT)
    );
    assert_eq!(go("a", "d", none).err(), Some(Errno::ISDIR));
    assert_eq!(go("d", "a", none).err(), Some(Errno::NOTDIR));
    assert_eq!(
        b.rename(&root, os("d"), &d, os("in"), none).err(),
        Some(Errno::INVAL)
    );
    assert_eq!(go("a", "d", RenameFlags::EXCHANGE), Ok(()));
    assert_eq!(look(b, "a").map(|a| a.kind), Ok(Kind::Dir));
    assert_eq!(go("d", "b", none), Ok(()));
    let (inode, _) = b.lookup(&root, os("b")).expect("lookup");
    assert_eq!(
        read(b, &b.open(&inode, Access::Read).expect("open"), 0, 9),
        b"a"
    );
    dir(b, "e");
    b.rename(&root, os("b"), &d, os("b"), none)
        .expect("move into the directory");
    assert_eq!(go("e", "a", none).err(), Some(Errno::NOTEMPTY));
}

fn symlinks_and_special_files<B: Backing>(b: &B) {
    let root = b.root();
    let me = own_caller();
    let (link, attr) = b
        .symlink(&me, &root, os("l"), os("no/where"))
        .expect("symlink");
    assert_eq!((attr.kind, attr.size), (Kind::Symlink, 8));
    assert_eq!(b.readlink(&link).as_deref(), Ok(b"no/where".as_slice()));
    assert_eq!(b.set_mode(&link, 0o600).err(), Some(Errno::OPNOTSUPP));
    assert_eq!(b.open(&link, Access::Read).err(), Some(Errno::LOOP));
    assert_eq!(b.get_xattr(&link, os("user.x")).err(), Some(Errno::NODATA));
    assert_eq!(
        b.set_xattr(&link, os("user.x"), b"", 0).err(),
        Some(Errno::PERM)
    );
    assert_eq!(
        b.link(&link, &root, os("l2")).map(|a| (a.kind, a.nlink)),
        Ok((Kind::Symlink, 2))
    );
    let fifo = NewKind::Node {
        mode: libc::S_IFIFO | 0o640,
        rdev: 0,
    };
    let (fifo, attr) = b.make(&me, &root, os("p"), fifo).expect("mknod");
    assert_eq!((attr.kind, attr.mode & 0o7777), (Kind::Fifo, 0o640));
    assert_eq!(b.open(&fifo, Access::Read).err(), Some(Errno::NXIO));
    assert_eq!(b.set_mode(&fifo, 0o600), Ok(()));
    assert_eq!(b.attr(&fifo).map(|a| a.mode & 0o7777), Ok(0o600));
    assert_eq!(b.readlink(&fifo).err(), Some(Errno::INVAL));
}

fn attributes<B: Backing>(b: &B) {
    let (inode, _) = file(b, "a", b"");
    b.set_mode(&inode, 0o600).expect("set_mode");
    let old = Time { sec: -5, nsec: 7 };
    let time = Time {
        sec: 1_000_000,
        nsec: 123_456_789,
    };
    b.set_times(&inode, SetTime::At(time), SetTime::At(old))
        .expect("set_times");
    b.set_times(&inode, SetTime::Keep, SetTime::Keep)
        .expect("set_times");
    let attr = b.attr(&inode).expect("attr");
    assert_eq!(
        (attr.mode & 0o7777, attr.atime, attr.mtime),
        (0o600, time, old)
    );
    b.set_times(&inode, SetTime::Keep, SetTime::Now)
        .expect("set_times");
    let attr = b.attr(&inode).expect("attr");
    assert!(attr.atime == time && attr.mtime > old);
}

fn xattrs<B: Backing>(b: &B) {
    let (inode, _) = file(b, "a", b"");
    let x = os("user.x");
    let big = vec![7; 1500];
    assert_eq!(b.get_xattr(&inode, x).err(), Some(Errno::NODATA));
    assert_eq!(
        b.set_xattr(&inode, x, b"v", libc::XATTR_REPLACE).err(),
        Some(Errno::NODATA)
    );
    assert_eq!(b.set_xattr(&inode, x, b"", libc::XATTR_CREATE), Ok(()));
    assert_eq!(b.get_xattr(&inode, x), Ok(Vec::new()));
    assert_eq!(
        b.set_xattr(&inode, x, &big, libc::XATTR_CREATE).err(),
        Some(Errno::EXIST)
    );
    assert_eq!(b.set_xattr(&inode, x, &big, 0), Ok(()));
    assert_eq!(b.get_xattr(&inode, x), Ok(big));
    assert!(
        b.list_xattr(&inode)
            .expect("list")
            .windows(7)
            .any(|name| name == b"user.x\0")
    );
    assert_eq!(b.remove_xattr(&inode, x), Ok(()));
    assert_eq!(b.remove_xattr(&inode, x).err(), Some(Errno::NODATA));
    assert!(!b.has_default_acl(&b.root()));
}

fn data<B: Backing>(b: &B) {
    let (inode, open) = file(b, "a", b"0123456789");
    let parts = [IoSlice::new(b"ab"), IoSlice::new(b""), IoSlice::new(b"cd")];
    assert_eq!(b.write_at(&open, &parts, 8), Ok(4));
    assert_eq!(read(b, &open, 0, 99), b"01234567abcd");
    assert_eq!(read(b, &open, 12, 9), b"");
    b.set_len(&open, 3).expect("set_len");
    b.set_len(&open, 6).expect("set_len");
    assert_eq!(read(b, &open, 0, 99), b"012\0\0\0");
    assert_eq!(
        (b.sync(&open, true), b.sync(&open, false)),
        (Ok(()), Ok(()))
    );
    let reader = b.open(&inode, Access::Read).expect("open");
    assert_eq!(
        b.write_at(&reader, &[IoSlice::new(b"x")], 0).err(),
        Some(Errno::BADF)
    );
    assert_eq!(b.set_len(&reader, 0).err(), Some(Errno::INVAL));
    let writer = b.open(&inode, Access::Write).expect("open");
    assert_eq!(b.read_at(&writer, &mut [0], 0).err(), Some(Errno::BADF));
    let (_, copy) = file(b, "b", b"");
    assert_eq!(b.copy_range(&open, 1, &copy, 2, 2), Ok(2));
    assert_eq!(read(b, &copy, 0, 99), b"\0\x0012");
    assert_eq!(b.attr_of_file(&copy).map(|a| a.size), Ok(4));
}

fn parts<B: Backing>(b: &B) {
    let (inode, open) = file(b, "a", b"0123456789");
    let (far, near) = (
        [IoSlice::new(b"xy"), IoSlice::new(b"z")],
        [IoSlice::new(b"ab")],
    );
    let parts = [(20, &far[..]), (4, &near[..]), (8, &far[1..])];
    let parts = parts.map(|(offset, data)| DataPart { offset, data });
    assert_eq!(b.write_parts(&open, &parts), Ok(6));
    let expected = b"0123ab67z9\0\0\0\0\0\0\0\0\0\0xyz";
    assert_eq!(read(b, &open, 0, 99), expected);
    let reader = b.open(&inode, Access::Read).expect("open");
    let refused = b.write_parts(&reader, &parts);
    assert_eq!(refused.err(), Some(Errno::BADF));
    // More parts than one system call accepts.
    let bytes: Vec<u8> = (0..5000).map(|at| (at % 251) as u8).collect();
    let slices: Vec<_> = bytes.chunks(1).map(IoSlice::new).collect();
    let mut done = 0;
    while done < bytes.len() {
        let part = DataPart {
            offset: done as u64,
            data: &slices[done..],
        };
        done += b.write_parts(&open, &[part]).expect("write") as usize;
    }
    assert_eq!(read(b, &open, 0, 9999), bytes);
    if b.facts(&inode).gathers {
        assert!(
            b.facts(&b.root()).gathers,
            "of a directory: of some file in it"
        );
    }
}

fn holes<B: Backing>(b: &B) {
    let (_, open) = file(b, "a", b"");
    let mib = 1 << 20;
    write(b, &open, b"end", mib);
    assert_eq!(b.seek(&open, mib, Seek::Data), Ok(mib));
    assert_eq!(b.seek(&open, mib, Seek::Hole), Ok(mib + 3));
    assert_eq!(b.seek(&open, mib + 3, Seek::Data).err(), Some(Errno::NXIO));
    let data = |range| {
        let ranges = data_ranges(b, &open, range);
        ranges
            .map(|data| (data.start, data.end))
            .collect::<Vec<_>>()
    };
    assert_eq!(data(0..mib + 3), [(mib, mib + 3)]);
    assert_eq!(data(mib + 1..mib + 2), [(mib + 1, mib + 2)]);
    assert!(data(0..mib).is_empty());
    assert!(data(mib + 3..mib + 9).is_empty());
    assert_eq!(read(b, &open, mib - 2, 9), b"\0\0end");
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    assert_eq!(b.allocate(&open, punch, mib + 1, 4096), Ok(()));
    assert_eq!(read(b, &open, mib, 9), b"e\0\0");
    assert_eq!(b.allocate(&open, 0, mib, 100), Ok(()));
    assert_eq!(b.attr_of_file(&open).map(|a| a.size), Ok(mib + 100));
    assert_eq!(b.allocate(&open, 0, 0, 0).err(), Some(Errno::INVAL));
}

/// Runs the case of [`LockRequest::File`] over an empty backing that has locks.
pub fn run_locks<B: Backing>(b: &B) {
    let (inode, first) = file(b, "a", b"");
    let open = || b.open(&inode, Access::ReadWrite).expect("open");
    let second = open();
    let exclusive = |file: &B::File| b.try_lock(file, LockMode::Exclusive);
    let shared = |file: &B::File| b.try_lock(file, LockMode::Shared);
    assert_eq!(
        (exclusive(&first), exclusive(&second)),
        (Ok(true), Ok(false))
    );
    assert_eq!((exclusive(&first), shared(&second)), (Ok(true), Ok(false)));
    let (_, other) = file(b, "b", b"");
    assert_eq!(exclusive(&other), Ok(true));
    write(b, &first, b"locked", 0);
    write(b, &second, b"not locked", 0);
    // Another name leads to the same file and its lock. Removing a name does not remove the lock.
    b.link(&inode, &b.root(), os("c")).expect("link");
    b.unlink(&b.root(), os("a")).expect("unlink");
    assert_eq!(exclusive(&second), Ok(false));
    drop(first);
    assert_eq!((shared(&second), shared(&open())), (Ok(true), Ok(true)));
    assert_eq!(exclusive(&open()), Ok(false));
    drop(second);
    assert_eq!(exclusive(&open()), Ok(true));
    assert_eq!(exclusive(&open()), Ok(true));
    // The file stays open, and has no lock any more.
    let unlocked = open();
    assert_eq!(exclusive(&unlocked), Ok(true));
    assert_eq!(b.lock(&unlocked, LockRequest::UnlockFile), Ok(true));
    assert_eq!(exclusive(&open()), Ok(true));
}

/// Runs the cases of [`LockRequest::Range`] over an empty backing that has locks, seen by two processes.
pub fn run_range_locks<B: Backing>(one: &B, two: &B) {
    use LockMode::{Exclusive, Shared};
    let (_, first) = file(one, "a", b"");
    let (inode, _) = two.lookup(&two.root(), os("a")).expect("lookup");
    let second = two.open(&inode, Access::ReadWrite).expect("open");
    let range = |first, last| LockRange { first, last };
    let end = LockRange::LAST;
    let request = |range, mode: Option<LockMode>| match mode {
        Some(mode) => LockRequest::Range(range, mode),
        None => LockRequest::Unlock(range),
    };
    let one_takes = |range, mode| one.lock(&first, request(range, mode)).expect("lock");
    let two_takes = |range, mode| two.lock(&second, request(range, mode)).expect("lock");
    assert!(one_takes(range(10, 19), Some(Exclusive)));
    assert!(!two_takes(range(19, end), Some(Shared)));
    assert_eq!(
        two.lock(&second, LockRequest::Test(range(0, 10), Shared)),
        Ok(false)
    );
    assert_eq!(
        one.lock(&first, LockRequest::Test(LockRange::WHOLE, Exclusive)),
        Ok(true)
    );
    assert!(two_takes(range(0, 9), Some(Exclusive)));
    assert!(two_takes(range(20, end), Some(Exclusive)));
    // A lock whose change is refused remains as it was.
    assert!(one_takes(range(12, 13), Some(Shared)));
    assert!(two_takes(range(12, 13), Some(Shared)));
    assert!(!one_takes(range(10, 19), Some(Exclusive)));
    assert!(!two_takes(range(11, 11), Some(Shared)));
    assert!(!two_takes(range(13, 13), Some(Exclusive)));
    // A part of the range is unlocked.
    assert!(one_takes(range(14, 16), None));
    assert!(two_takes(range(14, 16), Some(Exclusive)));
    assert!(!two_takes(range(16, 17), Some(Exclusive)));
    assert!(one_takes(LockRange::WHOLE, None));
    assert!(two_takes(LockRange::WHOLE, Some(Exclusive)));
    assert!(!one_takes(range(end, end), Some(Shared)));
    // The locks of a process end when the process closes any descriptor of the file.
    drop(two.open(&inode, Access::Read).expect("open"));
    assert!(one_takes(LockRange::WHOLE, Some(Exclusive)));
    let locked = one
        .try_lock(&first, Exclusive)
        .and(two.try_lock(&second, Exclusive));
    assert_eq!(locked, Ok(false), "the other kind of lock");
}

fn lanes<B: Backing>(b: &B) {
    assert!(b.features().lane_count > 0);
    for number in 0..9 {
        let name = format!("rank_{number}");
        let (made, _) = file(b, &name, b"x");
        let lane = b.facts(&made).lane;
        assert!(
            lane.index() < usize::from(b.features().lane_count),
            "{lane:?}"
        );
        let (found, _) = b.lookup(&b.root(), os(&name)).expect("lookup");
        assert_eq!(b.facts(&found).lane, lane, "a file stays in its lane");
    }
}

fn streams<B: Backing>(b: &B) {
    const COUNT: usize = 1500;
    for i in 0..COUNT {
        file(b, &format!("name-{i:06}"), b"");
    }
    let stream = b.open_dir(&b.root()).expect("open_dir");
    let mut cookie = 0;
    let mut seen = Vec::new();
    loop {
        // The callback accepts seven entries at a time. It refuses the eighth one, which the next call must return.
        let mut got = Vec::new();
        b.read_dir(&stream, cookie, &mut |entry| {
            let room = got.len() < 7;
            if room {
                got.push((entry.name.to_owned(), entry.cookie));
            }
            room
        })
        .expect("read_dir");
        let Some(last) = got.last() else { break };
        cookie = last.1;
        seen.extend(got.into_iter().map(|entry| entry.0));
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), COUNT + 2);
    assert_eq!(tree(b).expect("tree").len(), COUNT + 1);
}
