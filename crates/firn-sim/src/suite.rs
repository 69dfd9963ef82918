//! The conformance suite: the required behaviour of every backing (a file system that Firn can use), as plain functions
//! over the trait.
//!
//! [`run`] panics at the first difference. Link counts of directories, allocated blocks and the order of entries depend
//! on the file system, and are not checked.
//!
//! Each case is a function whose name says what it checks. It gets an empty backing. The cases for locks have functions
//! of their own, [`run_locks`] and [`run_range_locks`], because not every backing has locks.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::ops::Range;

use crate::tree;
use firn_backing::{
    Access, Attr, Backing, Caller, DataPart, Errno, Kind, LockMode, LockRange, LockRequest,
    NewKind, RenameFlags, Seek, SetTime, Time, data_ranges,
};

pub mod differential;

/// Returns the caller that owns all objects of the suite: the user of this process.
pub fn own_caller() -> Caller {
    Caller {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        pid: 0,
    }
}

/// A case of the suite.
struct Case<B> {
    name: &'static str,
    check: fn(&B),
}

/// Makes a list of cases from functions, which give the cases their names.
macro_rules! cases {
    ($($function:ident),* $(,)?) => {
        [$(Case { name: stringify!($function), check: $function::<B> }),*]
    };
}

/// Runs all cases, each over a fresh, empty backing (file system) from `make`. The process must have umask 0.
pub fn run<B: Backing>(make: impl Fn() -> B) {
    let cases = cases![
        create_returns_the_new_file,
        create_fails_if_the_name_exists,
        lookup_fails_in_a_file_and_for_a_long_name,
        unlink_and_rmdir_check_the_kind,
        inodes_outlive_names,
        hard_links_lead_to_one_file,
        rename_to_another_name_of_the_same_file_does_nothing,
        link_refuses_a_directory,
        rmdir_refuses_a_directory_with_entries,
        directories_are_no_files,
        removed_directories_accept_no_names,
        syncs_succeed,
        rename_checks_both_names,
        rename_refuses_a_directory_in_itself,
        rename_exchanges_two_names,
        exchanged_objects_are_renamed_again,
        rename_replaces_a_file,
        rename_refuses_a_directory_with_entries,
        symlinks_keep_their_target,
        symlinks_have_no_mode_and_no_xattrs,
        symlinks_can_have_several_names,
        fifos_are_made_and_not_opened,
        times_are_set_and_kept,
        xattrs_are_created_and_replaced,
        xattrs_are_listed_and_removed,
        the_top_has_no_default_acl,
        writes_gather_slices,
        reads_end_with_the_file,
        set_len_cuts_and_extends_with_zeros,
        files_are_synced,
        descriptors_refuse_what_they_were_not_opened_for,
        copy_range_copies_and_extends,
        a_file_is_cut_synced_and_copied,
        parts_are_written_at_their_offsets,
        parts_are_refused_without_write_access,
        many_slices_are_written_in_several_calls,
        gathering_is_reported_for_directories_too,
        seek_finds_data_and_holes,
        data_ranges_lie_in_the_requested_range,
        holes_read_as_zeros,
        punched_ranges_read_as_zeros,
        allocate_extends_the_file,
        directories_are_read_in_pieces,
        files_stay_in_their_lanes,
    ];
    for case in cases {
        eprintln!("conformance: {}", case.name);
        (case.check)(&make());
    }
}

fn os(name: &str) -> &OsStr {
    OsStr::new(name)
}

/// Creates a file in the top directory, with this content.
fn create_file<B: Backing>(backing: &B, name: &str, content: &[u8]) -> (B::Inode, B::File) {
    let (inode, file, _) = backing
        .create(&own_caller(), &backing.root(), os(name), 0o644)
        .expect("create");
    write(backing, &file, content, 0);
    (inode, file)
}

/// Creates a directory in the top directory.
fn create_dir<B: Backing>(backing: &B, name: &str) -> B::Inode {
    let (inode, _) = backing
        .mkdir(&own_caller(), &backing.root(), os(name), 0o755)
        .expect("mkdir");
    inode
}

/// Writes all of `content` with one call.
fn write<B: Backing>(backing: &B, file: &B::File, content: &[u8], offset: u64) {
    let written = backing.write_at(file, &[IoSlice::new(content)], offset);
    assert_eq!(written, Ok(content.len()));
}

/// Reads with one call, which may return fewer bytes than `len`.
fn read<B: Backing>(backing: &B, file: &B::File, offset: u64, len: usize) -> Vec<u8> {
    let mut buf = vec![0xee; len];
    let count = backing.read_at(file, &mut buf, offset).expect("read");
    buf.truncate(count);
    buf
}

/// Opens a file in the top directory and reads its first bytes.
fn read_by_name<B: Backing>(backing: &B, name: &str) -> Vec<u8> {
    let (inode, _) = backing.lookup(&backing.root(), os(name)).expect("lookup");
    let file = backing.open(&inode, Access::Read).expect("open");
    read(backing, &file, 0, 9)
}

/// Returns the attributes of an object in the top directory.
fn attr_by_name<B: Backing>(backing: &B, name: &str) -> Result<Attr, Errno> {
    let (_, attr) = backing.lookup(&backing.root(), os(name))?;
    Ok(attr)
}

/// Renames an object within the top directory.
fn rename_in_top<B: Backing>(
    backing: &B,
    name: &str,
    new_name: &str,
    flags: RenameFlags,
) -> Result<(), Errno> {
    let top = backing.root();
    backing.rename(&top, os(name), &top, os(new_name), flags)
}

// Names

fn create_returns_the_new_file<B: Backing>(backing: &B) {
    assert_eq!(attr_by_name(backing, "a").err(), Some(Errno::NOENT));
    let (_, _, attr) = backing
        .create(&own_caller(), &backing.root(), os("a"), 0o6751)
        .expect("create");
    assert_eq!(
        (attr.kind, attr.mode & 0o7777, attr.size, attr.nlink),
        (Kind::File, 0o6751, 0, 1)
    );
    assert_eq!(
        attr_by_name(backing, "a").map(|attr| attr.ino),
        Ok(attr.ino)
    );
}

fn create_fails_if_the_name_exists<B: Backing>(backing: &B) {
    let (caller, top) = (own_caller(), backing.root());
    create_file(backing, "a", b"");
    let created = backing.create(&caller, &top, os("a"), 0o644);
    assert_eq!(created.err(), Some(Errno::EXIST));
    let made = backing.mkdir(&caller, &top, os("a"), 0o755);
    assert_eq!(made.err(), Some(Errno::EXIST));
}

fn lookup_fails_in_a_file_and_for_a_long_name<B: Backing>(backing: &B) {
    let (file, _) = create_file(backing, "a", b"");
    assert_eq!(backing.lookup(&file, os("x")).err(), Some(Errno::NOTDIR));
    let long_name = "n".repeat(256);
    assert_eq!(
        attr_by_name(backing, &long_name).err(),
        Some(Errno::NAMETOOLONG)
    );
}

fn unlink_and_rmdir_check_the_kind<B: Backing>(backing: &B) {
    let top = backing.root();
    create_file(backing, "a", b"");
    assert_eq!(backing.unlink(&top, os("b")).err(), Some(Errno::NOENT));
    assert_eq!(backing.rmdir(&top, os("a")).err(), Some(Errno::NOTDIR));
    assert_eq!(backing.unlink(&top, os("a")), Ok(()));
    assert_eq!(attr_by_name(backing, "a").err(), Some(Errno::NOENT));
}

/// A file stays usable through its inode after a rename, and after its last name is removed.
fn inodes_outlive_names<B: Backing>(backing: &B) {
    let top = backing.root();
    let (inode, file) = create_file(backing, "a", b"kept");
    rename_in_top(backing, "a", "b", RenameFlags::empty()).expect("rename");
    assert_eq!(backing.attr(&inode).map(|attr| attr.size), Ok(4));
    backing.unlink(&top, os("b")).expect("unlink");
    drop(file);
    assert_eq!(backing.attr(&inode).map(|attr| attr.nlink), Ok(0));
    let reopened = backing
        .open(&inode, Access::ReadWrite)
        .expect("open without a name");
    assert_eq!(read(backing, &reopened, 0, 9), b"kept");
    assert_eq!(
        backing.link(&inode, &top, os("c")).err(),
        Some(Errno::NOENT)
    );
}

// Hard links

fn hard_links_lead_to_one_file<B: Backing>(backing: &B) {
    let top = backing.root();
    let (inode, file) = create_file(backing, "a", b"one");
    let linked = backing.link(&inode, &top, os("b"));
    assert_eq!(linked.map(|attr| attr.nlink), Ok(2));
    let linked_again = backing.link(&inode, &top, os("b"));
    assert_eq!(linked_again.err(), Some(Errno::EXIST));
    write(backing, &file, b"two", 0);
    let attr = attr_by_name(backing, "b").expect("lookup");
    assert_eq!(attr.ino, backing.attr(&inode).expect("attr").ino);
    assert_eq!(read_by_name(backing, "b"), b"two");
}

fn rename_to_another_name_of_the_same_file_does_nothing<B: Backing>(backing: &B) {
    let (inode, _) = create_file(backing, "a", b"");
    backing
        .link(&inode, &backing.root(), os("b"))
        .expect("link");
    assert_eq!(
        rename_in_top(backing, "a", "b", RenameFlags::empty()),
        Ok(())
    );
    assert_eq!(attr_by_name(backing, "a").map(|attr| attr.nlink), Ok(2));
}

fn link_refuses_a_directory<B: Backing>(backing: &B) {
    let dir = create_dir(backing, "d");
    let linked = backing.link(&dir, &backing.root(), os("e"));
    assert_eq!(linked.err(), Some(Errno::PERM));
}

// Directories

fn rmdir_refuses_a_directory_with_entries<B: Backing>(backing: &B) {
    let top = backing.root();
    let dir = create_dir(backing, "d");
    backing
        .mkdir(&own_caller(), &dir, os("e"), 0o700)
        .expect("mkdir");
    assert_eq!(backing.rmdir(&top, os("d")).err(), Some(Errno::NOTEMPTY));
    assert_eq!(backing.rmdir(&dir, os("e")), Ok(()));
    assert_eq!(backing.rmdir(&top, os("d")), Ok(()));
}

fn directories_are_no_files<B: Backing>(backing: &B) {
    let dir = create_dir(backing, "d");
    let unlinked = backing.unlink(&backing.root(), os("d"));
    assert_eq!(unlinked.err(), Some(Errno::ISDIR));
    assert_eq!(backing.open(&dir, Access::Read).err(), Some(Errno::ISDIR));
    let (file, _) = create_file(backing, "f", b"");
    assert_eq!(backing.open_dir(&file).err(), Some(Errno::NOTDIR));
}

fn removed_directories_accept_no_names<B: Backing>(backing: &B) {
    let dir = create_dir(backing, "d");
    backing.rmdir(&backing.root(), os("d")).expect("rmdir");
    let created = backing.create(&own_caller(), &dir, os("x"), 0o644);
    assert_eq!(created.err(), Some(Errno::NOENT));
}

fn syncs_succeed<B: Backing>(backing: &B) {
    let top = backing.root();
    create_dir(backing, "d");
    backing.rmdir(&top, os("d")).expect("rmdir");
    create_file(backing, "f", b"");
    assert_eq!(backing.sync_dir(&top), Ok(()));
    assert_eq!(backing.sync_all(), Ok(()));
}

fn directories_are_read_in_pieces<B: Backing>(backing: &B) {
    const FILES: usize = 1500;
    /// `.` and `..`.
    const DOTS: usize = 2;
    for number in 0..FILES {
        create_file(backing, &format!("name-{number:06}"), b"");
    }
    let mut names = read_dir_in_pieces(backing);
    names.sort();
    names.dedup();
    assert_eq!(names.len(), FILES + DOTS);
    let tree = tree(backing).expect("tree");
    assert_eq!(tree.len(), FILES + 1, "the top and its files");
}

/// Returns the names in the top directory, with `.` and `..`.
///
/// The callback accepts seven entries at a time. It refuses the eighth one, which the next call must return.
fn read_dir_in_pieces<B: Backing>(backing: &B) -> Vec<std::ffi::OsString> {
    const ENTRIES_MAX: usize = 7;
    let stream = backing.open_dir(&backing.root()).expect("open_dir");
    let mut last_cookie = 0;
    let mut names = Vec::new();
    loop {
        let mut count = 0;
        backing
            .read_dir(&stream, last_cookie, &mut |entry| {
                if count == ENTRIES_MAX {
                    return false;
                }
                count += 1;
                last_cookie = entry.cookie;
                names.push(entry.name.to_owned());
                true
            })
            .expect("read_dir");
        if count == 0 {
            return names;
        }
    }
}

// Renames

/// A rename fails if a name is missing, exists or has the wrong kind, and then changes nothing.
fn rename_checks_both_names<B: Backing>(backing: &B) {
    create_file(backing, "a", b"a");
    create_file(backing, "b", b"b");
    create_dir(backing, "d");
    let rename = |name, new_name, flags| rename_in_top(backing, name, new_name, flags).err();
    let no_flags = RenameFlags::empty();
    assert_eq!(rename("x", "y", no_flags), Some(Errno::NOENT));
    assert_eq!(rename("a", "b", RenameFlags::NOREPLACE), Some(Errno::EXIST));
    assert_eq!(rename("a", "x", RenameFlags::EXCHANGE), Some(Errno::NOENT));
    assert_eq!(rename("a", "d", no_flags), Some(Errno::ISDIR));
    assert_eq!(rename("d", "a", no_flags), Some(Errno::NOTDIR));
    // A refused rename changes nothing.
    assert_eq!(read_by_name(backing, "a"), b"a");
    assert_eq!(read_by_name(backing, "b"), b"b");
    assert_eq!(
        attr_by_name(backing, "d").map(|attr| attr.kind),
        Ok(Kind::Dir)
    );
}

fn rename_refuses_a_directory_in_itself<B: Backing>(backing: &B) {
    let top = backing.root();
    let dir = create_dir(backing, "d");
    let renamed = backing.rename(&top, os("d"), &dir, os("in"), RenameFlags::empty());
    assert_eq!(renamed.err(), Some(Errno::INVAL));
}

fn rename_exchanges_two_names<B: Backing>(backing: &B) {
    create_file(backing, "a", b"a");
    create_dir(backing, "d");
    let exchanged = rename_in_top(backing, "a", "d", RenameFlags::EXCHANGE);
    assert_eq!(exchanged, Ok(()));
    assert_eq!(
        attr_by_name(backing, "a").map(|attr| attr.kind),
        Ok(Kind::Dir)
    );
    assert_eq!(read_by_name(backing, "d"), b"a");
}

/// Exchanges a file and a directory, and renames both again. The inode of the directory stays usable.
fn exchanged_objects_are_renamed_again<B: Backing>(backing: &B) {
    let top = backing.root();
    let no_flags = RenameFlags::empty();
    create_file(backing, "a", b"a");
    create_file(backing, "b", b"b");
    let dir = create_dir(backing, "d");
    let exchanged = rename_in_top(backing, "a", "d", RenameFlags::EXCHANGE);
    assert_eq!(exchanged, Ok(()));
    // Now `a` is the directory, and `d` is the file with the byte "a".
    assert_eq!(rename_in_top(backing, "d", "b", no_flags), Ok(()));
    assert_eq!(read_by_name(backing, "b"), b"a");
    backing
        .rename(&top, os("b"), &dir, os("b"), no_flags)
        .expect("move into the directory");
    // The directory `a` has an entry, so no other directory can replace it.
    create_dir(backing, "e");
    let renamed = rename_in_top(backing, "e", "a", no_flags);
    assert_eq!(renamed.err(), Some(Errno::NOTEMPTY));
}

fn rename_replaces_a_file<B: Backing>(backing: &B) {
    create_file(backing, "a", b"a");
    create_file(backing, "b", b"b");
    assert_eq!(
        rename_in_top(backing, "a", "b", RenameFlags::empty()),
        Ok(())
    );
    assert_eq!(attr_by_name(backing, "a").err(), Some(Errno::NOENT));
    assert_eq!(read_by_name(backing, "b"), b"a");
}

fn rename_refuses_a_directory_with_entries<B: Backing>(backing: &B) {
    let top = backing.root();
    let no_flags = RenameFlags::empty();
    create_file(backing, "b", b"");
    let full_dir = create_dir(backing, "full");
    create_dir(backing, "empty");
    backing
        .rename(&top, os("b"), &full_dir, os("b"), no_flags)
        .expect("move into the directory");
    let renamed = rename_in_top(backing, "empty", "full", no_flags);
    assert_eq!(renamed.err(), Some(Errno::NOTEMPTY));
}

// Symbolic links and special files

/// Creates the symbolic link `l` in the top directory.
fn create_symlink<B: Backing>(backing: &B) -> (B::Inode, Attr) {
    backing
        .symlink(&own_caller(), &backing.root(), os("l"), os("no/where"))
        .expect("symlink")
}

fn symlinks_keep_their_target<B: Backing>(backing: &B) {
    let (link, attr) = create_symlink(backing);
    assert_eq!((attr.kind, attr.size), (Kind::Symlink, 8));
    assert_eq!(
        backing.readlink(&link).as_deref(),
        Ok(b"no/where".as_slice())
    );
    assert_eq!(backing.open(&link, Access::Read).err(), Some(Errno::LOOP));
}

fn symlinks_have_no_mode_and_no_xattrs<B: Backing>(backing: &B) {
    let (link, _) = create_symlink(backing);
    let name = os("user.x");
    assert_eq!(backing.set_mode(&link, 0o600).err(), Some(Errno::OPNOTSUPP));
    assert_eq!(backing.get_xattr(&link, name).err(), Some(Errno::NODATA));
    assert_eq!(
        backing.set_xattr(&link, name, b"", 0).err(),
        Some(Errno::PERM)
    );
}

fn symlinks_can_have_several_names<B: Backing>(backing: &B) {
    let (link, _) = create_symlink(backing);
    let linked = backing.link(&link, &backing.root(), os("l2"));
    assert_eq!(
        linked.map(|attr| (attr.kind, attr.nlink)),
        Ok((Kind::Symlink, 2))
    );
}

fn fifos_are_made_and_not_opened<B: Backing>(backing: &B) {
    let kind = NewKind::Node {
        mode: libc::S_IFIFO | 0o640,
        rdev: 0,
    };
    let (fifo, attr) = backing
        .make(&own_caller(), &backing.root(), os("p"), kind)
        .expect("mknod");
    assert_eq!((attr.kind, attr.mode & 0o7777), (Kind::Fifo, 0o640));
    assert_eq!(backing.open(&fifo, Access::Read).err(), Some(Errno::NXIO));
    assert_eq!(backing.set_mode(&fifo, 0o600), Ok(()));
    let mode = backing.attr(&fifo).map(|attr| attr.mode & 0o7777);
    assert_eq!(mode, Ok(0o600));
    assert_eq!(backing.readlink(&fifo).err(), Some(Errno::INVAL));
}

// Attributes

/// Times before 1970 are stored too. A change of one time leaves the other one as it is.
fn times_are_set_and_kept<B: Backing>(backing: &B) {
    let (inode, _) = create_file(backing, "a", b"");
    let set_times = |atime, mtime| backing.set_times(&inode, atime, mtime).expect("set_times");
    backing.set_mode(&inode, 0o600).expect("set_mode");
    let atime = Time {
        sec: 1_000_000,
        nsec: 123_456_789,
    };
    let before_epoch = Time { sec: -5, nsec: 7 };
    set_times(SetTime::At(atime), SetTime::At(before_epoch));
    set_times(SetTime::Keep, SetTime::Keep);
    let attr = backing.attr(&inode).expect("attr");
    assert_eq!(
        (attr.mode & 0o7777, attr.atime, attr.mtime),
        (0o600, atime, before_epoch)
    );
    set_times(SetTime::Keep, SetTime::Now);
    let attr = backing.attr(&inode).expect("attr");
    assert!(attr.atime == atime && attr.mtime > before_epoch);
}

/// The flags of setxattr(2) demand that the attribute exists, or that it does not.
fn xattrs_are_created_and_replaced<B: Backing>(backing: &B) {
    let (inode, _) = create_file(backing, "a", b"");
    let name = os("user.x");
    let set = |value: &[u8], flags| backing.set_xattr(&inode, name, value, flags);
    let large_value = vec![7; 1500];
    assert_eq!(backing.get_xattr(&inode, name).err(), Some(Errno::NODATA));
    assert_eq!(set(b"v", libc::XATTR_REPLACE).err(), Some(Errno::NODATA));
    assert_eq!(set(b"", libc::XATTR_CREATE), Ok(()));
    assert_eq!(backing.get_xattr(&inode, name), Ok(Vec::new()));
    assert_eq!(
        set(&large_value, libc::XATTR_CREATE).err(),
        Some(Errno::EXIST)
    );
    assert_eq!(set(&large_value, 0), Ok(()));
    assert_eq!(backing.get_xattr(&inode, name), Ok(large_value));
}

/// A set attribute is in the list of names, and its second removal fails.
fn xattrs_are_listed_and_removed<B: Backing>(backing: &B) {
    let (inode, _) = create_file(backing, "a", b"");
    let name = os("user.x");
    let large_value = [7; 1500];
    backing
        .set_xattr(&inode, name, &large_value, 0)
        .expect("set_xattr");
    let names = backing.list_xattr(&inode).expect("list");
    let mut names = names.split_inclusive(|&byte| byte == 0);
    assert!(names.any(|listed| listed == b"user.x\0"));
    assert_eq!(backing.remove_xattr(&inode, name), Ok(()));
    assert_eq!(
        backing.remove_xattr(&inode, name).err(),
        Some(Errno::NODATA)
    );
}

fn the_top_has_no_default_acl<B: Backing>(backing: &B) {
    assert!(!backing.has_default_acl(&backing.root()));
}

// Data

fn writes_gather_slices<B: Backing>(backing: &B) {
    let (_, file) = create_file(backing, "a", b"0123456789");
    let slices = [IoSlice::new(b"ab"), IoSlice::new(b""), IoSlice::new(b"cd")];
    assert_eq!(backing.write_at(&file, &slices, 8), Ok(4));
    assert_eq!(read(backing, &file, 0, 99), b"01234567abcd");
}

fn reads_end_with_the_file<B: Backing>(backing: &B) {
    let (_, file) = create_file(backing, "a", b"0123");
    assert_eq!(read(backing, &file, 2, 99), b"23");
    assert_eq!(read(backing, &file, 4, 9), b"");
}

fn set_len_cuts_and_extends_with_zeros<B: Backing>(backing: &B) {
    let (_, file) = create_file(backing, "a", b"0123456789");
    backing.set_len(&file, 3).expect("cut");
    backing.set_len(&file, 6).expect("extend");
    assert_eq!(read(backing, &file, 0, 99), b"012\0\0\0");
}

fn files_are_synced<B: Backing>(backing: &B) {
    let (_, file) = create_file(backing, "a", b"0123456789");
    for data_only in [true, false] {
        assert_eq!(backing.sync(&file, data_only), Ok(()));
    }
}

fn descriptors_refuse_what_they_were_not_opened_for<B: Backing>(backing: &B) {
    let (inode, _) = create_file(backing, "a", b"0123456789");
    let reader = backing.open(&inode, Access::Read).expect("open");
    let written = backing.write_at(&reader, &[IoSlice::new(b"x")], 0);
    assert_eq!(written.err(), Some(Errno::BADF));
    assert_eq!(backing.set_len(&reader, 0).err(), Some(Errno::INVAL));
    let writer = backing.open(&inode, Access::Write).expect("open");
    assert_eq!(
        backing.read_at(&writer, &mut [0], 0).err(),
        Some(Errno::BADF)
    );
}

fn copy_range_copies_and_extends<B: Backing>(backing: &B) {
    let (_, source) = create_file(backing, "a", b"012");
    let (_, copy) = create_file(backing, "b", b"");
    assert_eq!(backing.copy_range(&source, 1, &copy, 2, 2), Ok(2));
    assert_eq!(read(backing, &copy, 0, 99), b"\0\x0012");
    let size = backing.attr_of_file(&copy).map(|attr| attr.size);
    assert_eq!(size, Ok(4));
}

/// Each call finds the file as the calls before it have left it.
fn a_file_is_cut_synced_and_copied<B: Backing>(backing: &B) {
    let (_, file) = create_file(backing, "a", b"0123456789");
    write(backing, &file, b"abcd", 8);
    backing.set_len(&file, 3).expect("cut");
    backing.set_len(&file, 6).expect("extend");
    assert_eq!(read(backing, &file, 0, 99), b"012\0\0\0");
    for data_only in [true, false] {
        assert_eq!(backing.sync(&file, data_only), Ok(()));
    }
    let (_, copy) = create_file(backing, "b", b"");
    assert_eq!(backing.copy_range(&file, 1, &copy, 2, 2), Ok(2));
    assert_eq!(read(backing, &copy, 0, 99), b"\0\x0012");
    let size = backing.attr_of_file(&copy).map(|attr| attr.size);
    assert_eq!(size, Ok(4));
}

// Writes of several parts

/// Writes parts in no order, in and beyond the file, with one call.
fn parts_are_written_at_their_offsets<B: Backing>(backing: &B) {
    let (_, file) = create_file(backing, "a", b"0123456789");
    let beyond_end = [IoSlice::new(b"xy"), IoSlice::new(b"z")];
    let in_middle = [IoSlice::new(b"ab")];
    let at_last_byte = [IoSlice::new(b"z")];
    let parts = [
        DataPart {
            offset: 20,
            data: &beyond_end,
        },
        DataPart {
            offset: 4,
            data: &in_middle,
        },
        DataPart {
            offset: 8,
            data: &at_last_byte,
        },
    ];
    assert_eq!(backing.write_parts(&file, &parts), Ok(6));
    let expected = b"0123ab67z9\0\0\0\0\0\0\0\0\0\0xyz";
    assert_eq!(read(backing, &file, 0, 99), expected);
}

fn parts_are_refused_without_write_access<B: Backing>(backing: &B) {
    let (inode, _) = create_file(backing, "a", b"0123456789");
    let reader = backing.open(&inode, Access::Read).expect("open");
    let part = DataPart {
        offset: 4,
        data: &[IoSlice::new(b"ab")],
    };
    let written = backing.write_parts(&reader, &[part]);
    assert_eq!(written.err(), Some(Errno::BADF));
}

/// Writes more slices than one system call accepts.
fn many_slices_are_written_in_several_calls<B: Backing>(backing: &B) {
    let (_, file) = create_file(backing, "a", b"0123456789");
    let bytes: Vec<u8> = (0..5000).map(|number| (number % 251) as u8).collect();
    let slices: Vec<_> = bytes.chunks(1).map(IoSlice::new).collect();
    let mut written_bytes = 0;
    while written_bytes < bytes.len() {
        let unwritten = DataPart {
            offset: written_bytes as u64,
            data: &slices[written_bytes..],
        };
        let count = backing.write_parts(&file, &[unwritten]).expect("write");
        written_bytes += count as usize;
    }
    assert_eq!(read(backing, &file, 0, 9999), bytes);
}

fn gathering_is_reported_for_directories_too<B: Backing>(backing: &B) {
    let (inode, _) = create_file(backing, "a", b"0123456789");
    let file_gathers = backing.facts(&inode).gathers;
    let dir_gathers = backing.facts(&backing.root()).gathers;
    assert!(
        dir_gathers || !file_gathers,
        "a directory gathers if some file in it does"
    );
}

// Holes

const MIB: u64 = 1 << 20;

/// Creates a file with a hole of 1 MiB before the bytes `end`.
fn create_file_with_hole<B: Backing>(backing: &B) -> B::File {
    let (_, file) = create_file(backing, "a", b"");
    write(backing, &file, b"end", MIB);
    file
}

fn seek_finds_data_and_holes<B: Backing>(backing: &B) {
    let file = create_file_with_hole(backing);
    assert_eq!(backing.seek(&file, MIB, Seek::Data), Ok(MIB));
    let end = MIB + 3;
    assert_eq!(backing.seek(&file, MIB, Seek::Hole), Ok(end));
    assert_eq!(
        backing.seek(&file, end, Seek::Data).err(),
        Some(Errno::NXIO)
    );
}

fn data_ranges_lie_in_the_requested_range<B: Backing>(backing: &B) {
    let file = create_file_with_hole(backing);
    let ranges_in =
        |range: Range<u64>| -> Vec<Range<u64>> { data_ranges(backing, &file, range).collect() };
    assert_eq!(ranges_in(0..MIB + 3), vec![MIB..MIB + 3]);
    assert_eq!(ranges_in(MIB + 1..MIB + 2), vec![MIB + 1..MIB + 2]);
    assert_eq!(ranges_in(0..MIB), vec![]);
    assert_eq!(ranges_in(MIB + 3..MIB + 9), vec![]);
}

fn holes_read_as_zeros<B: Backing>(backing: &B) {
    let file = create_file_with_hole(backing);
    assert_eq!(read(backing, &file, MIB - 2, 9), b"\0\0end");
}

fn punched_ranges_read_as_zeros<B: Backing>(backing: &B) {
    let file = create_file_with_hole(backing);
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    assert_eq!(backing.allocate(&file, punch, MIB + 1, 4096), Ok(()));
    assert_eq!(read(backing, &file, MIB, 9), b"e\0\0");
    assert_eq!(backing.allocate(&file, 0, MIB, 100), Ok(()));
    let size = backing.attr_of_file(&file).map(|attr| attr.size);
    assert_eq!(size, Ok(MIB + 100));
}

fn allocate_extends_the_file<B: Backing>(backing: &B) {
    let file = create_file_with_hole(backing);
    assert_eq!(backing.allocate(&file, 0, MIB, 100), Ok(()));
    let size = backing.attr_of_file(&file).map(|attr| attr.size);
    assert_eq!(size, Ok(MIB + 100));
    assert_eq!(backing.allocate(&file, 0, 0, 0).err(), Some(Errno::INVAL));
}

// Lanes

fn files_stay_in_their_lanes<B: Backing>(backing: &B) {
    let lane_count = usize::from(backing.features().lane_count);
    assert!(lane_count > 0);
    for number in 0..9 {
        let name = format!("rank_{number}");
        let (created, _) = create_file(backing, &name, b"x");
        let lane = backing.facts(&created).lane;
        assert!(lane.index() < lane_count, "{lane:?}");
        let (found, _) = backing.lookup(&backing.root(), os(&name)).expect("lookup");
        assert_eq!(backing.facts(&found).lane, lane);
    }
}

// Locks

/// Runs the cases of [`LockRequest::File`] over an empty backing that has locks.
pub fn run_locks<B: Backing>(backing: &B) {
    exclusive_locks_exclude_all_others(backing);
    locks_belong_to_the_file_and_not_to_its_name(backing);
    shared_locks_exclude_only_exclusive_ones(backing);
    files_are_unlocked_while_they_are_open(backing);
}

/// Opens a file, to lock it.
fn open_to_lock<B: Backing>(backing: &B, inode: &B::Inode) -> B::File {
    backing.open(inode, Access::ReadWrite).expect("open")
}

fn exclusive_locks_exclude_all_others<B: Backing>(backing: &B) {
    let (inode, first) = create_file(backing, "a", b"");
    let second = open_to_lock(backing, &inode);
    assert_eq!(backing.try_lock(&first, LockMode::Exclusive), Ok(true));
    assert_eq!(backing.try_lock(&second, LockMode::Exclusive), Ok(false));
    assert_eq!(backing.try_lock(&first, LockMode::Exclusive), Ok(true));
    assert_eq!(backing.try_lock(&second, LockMode::Shared), Ok(false));
    let (_, other_file) = create_file(backing, "b", b"");
    assert_eq!(backing.try_lock(&other_file, LockMode::Exclusive), Ok(true));
    // Locks are advisory.
    write(backing, &first, b"locked", 0);
    write(backing, &second, b"not locked", 0);
}

/// Another name leads to the same file and its lock. Removing a name does not remove the lock.
fn locks_belong_to_the_file_and_not_to_its_name<B: Backing>(backing: &B) {
    let top = backing.root();
    let (inode, holder) = create_file(backing, "c", b"");
    let by_inode = open_to_lock(backing, &inode);
    assert_eq!(backing.try_lock(&holder, LockMode::Exclusive), Ok(true));
    backing.link(&inode, &top, os("d")).expect("link");
    backing.unlink(&top, os("c")).expect("unlink");
    assert_eq!(backing.try_lock(&by_inode, LockMode::Exclusive), Ok(false));
    // Without the holder, others get the lock.
    drop(holder);
    let sharer = open_to_lock(backing, &inode);
    assert_eq!(backing.try_lock(&by_inode, LockMode::Shared), Ok(true));
    assert_eq!(backing.try_lock(&sharer, LockMode::Shared), Ok(true));
    drop(sharer);
    let late = open_to_lock(backing, &inode);
    assert_eq!(backing.try_lock(&late, LockMode::Exclusive), Ok(false));
    drop((by_inode, late));
    // A lock ends when its file is closed.
    for _ in 0..2 {
        let file = open_to_lock(backing, &inode);
        assert_eq!(backing.try_lock(&file, LockMode::Exclusive), Ok(true));
    }
}

fn shared_locks_exclude_only_exclusive_ones<B: Backing>(backing: &B) {
    let (inode, first) = create_file(backing, "f", b"");
    let second = open_to_lock(backing, &inode);
    assert_eq!(backing.try_lock(&first, LockMode::Shared), Ok(true));
    assert_eq!(backing.try_lock(&second, LockMode::Shared), Ok(true));
    drop(second);
    let third = open_to_lock(backing, &inode);
    assert_eq!(backing.try_lock(&third, LockMode::Exclusive), Ok(false));
    drop(first);
    assert_eq!(backing.try_lock(&third, LockMode::Exclusive), Ok(true));
    // A lock ends when its file is closed.
    drop(third);
    let fourth = open_to_lock(backing, &inode);
    assert_eq!(backing.try_lock(&fourth, LockMode::Exclusive), Ok(true));
}

fn files_are_unlocked_while_they_are_open<B: Backing>(backing: &B) {
    let (inode, first) = create_file(backing, "e", b"");
    let second = open_to_lock(backing, &inode);
    assert_eq!(backing.try_lock(&first, LockMode::Exclusive), Ok(true));
    assert_eq!(backing.lock(&first, LockRequest::UnlockFile), Ok(true));
    assert_eq!(backing.try_lock(&second, LockMode::Exclusive), Ok(true));
    drop(second);
    // A file that is opened after the unlock gets the lock too.
    let third = open_to_lock(backing, &inode);
    assert_eq!(backing.try_lock(&third, LockMode::Exclusive), Ok(true));
}

/// Runs the cases of [`LockRequest::Range`] over an empty backing that has locks, seen by two processes.
pub fn run_range_locks<B: Backing>(first_process: &B, second_process: &B) {
    let pair = ProcessPair::new(first_process, second_process);
    range_locks_exclude_overlapping_ranges(&pair);
    refused_changes_leave_a_range_lock_as_it_was(&pair);
    parts_of_a_locked_range_are_unlocked(&pair);
    locks_of_several_ranges_are_joined(&pair);
    range_locks_end_with_any_close_of_the_file(&pair);
    whole_file_locks_exclude_beside_range_locks(&pair);
}

/// A file that two processes have open.
struct ProcessPair<'a, B: Backing> {
    first: &'a B,
    first_file: B::File,
    second: &'a B,
    second_file: B::File,
    second_inode: B::Inode,
}

impl<'a, B: Backing> ProcessPair<'a, B> {
    fn new(first: &'a B, second: &'a B) -> Self {
        let (_, first_file) = create_file(first, "a", b"");
        let (second_inode, _) = second.lookup(&second.root(), os("a")).expect("lookup");
        let second_file = open_to_lock(second, &second_inode);
        Self {
            first,
            first_file,
            second,
            second_file,
            second_inode,
        }
    }

    /// Makes a lock request as the first process. Returns false if a lock of the second one prevents it.
    fn first(&self, request: LockRequest) -> bool {
        self.first.lock(&self.first_file, request).expect("lock")
    }

    /// Makes a lock request as the second process. Returns false if a lock of the first one prevents it.
    fn second(&self, request: LockRequest) -> bool {
        self.second.lock(&self.second_file, request).expect("lock")
    }

    /// Removes all range locks of both processes.
    fn unlock_all(&self) {
        assert!(self.first(LockRequest::Unlock(LockRange::WHOLE)));
        assert!(self.second(LockRequest::Unlock(LockRange::WHOLE)));
    }
}

/// Returns the request of an exclusive lock on the bytes from `first` to `last`.
fn exclusive(first: u64, last: u64) -> LockRequest {
    LockRequest::Range(LockRange { first, last }, LockMode::Exclusive)
}

/// Returns the request of a shared lock on the bytes from `first` to `last`.
fn shared(first: u64, last: u64) -> LockRequest {
    LockRequest::Range(LockRange { first, last }, LockMode::Shared)
}

fn range_locks_exclude_overlapping_ranges<B: Backing>(pair: &ProcessPair<'_, B>) {
    assert!(pair.first(exclusive(10, 19)));
    assert!(!pair.second(shared(19, LockRange::LAST)));
    let overlapping = LockRange { first: 0, last: 10 };
    assert!(!pair.second(LockRequest::Test(overlapping, LockMode::Shared)));
    let is_free_for_its_owner = LockRequest::Test(LockRange::WHOLE, LockMode::Exclusive);
    assert!(pair.first(is_free_for_its_owner));
    assert!(pair.second(exclusive(0, 9)));
    assert!(pair.second(exclusive(20, LockRange::LAST)));
    pair.unlock_all();
}

fn refused_changes_leave_a_range_lock_as_it_was<B: Backing>(pair: &ProcessPair<'_, B>) {
    assert!(pair.first(exclusive(10, 19)));
    assert!(pair.first(shared(12, 13)));
    assert!(pair.second(shared(12, 13)));
    assert!(!pair.first(exclusive(10, 19)), "12 and 13 are shared");
    assert!(!pair.second(shared(11, 11)), "11 is still exclusive");
    assert!(!pair.second(exclusive(13, 13)), "13 is still shared");
    pair.unlock_all();
}

fn parts_of_a_locked_range_are_unlocked<B: Backing>(pair: &ProcessPair<'_, B>) {
    let middle = LockRange {
        first: 14,
        last: 16,
    };
    assert!(pair.first(exclusive(10, 19)));
    assert!(pair.first(LockRequest::Unlock(middle)));
    assert!(pair.second(exclusive(14, 16)));
    assert!(!pair.second(exclusive(16, 17)), "17 is still locked");
    pair.unlock_all();
}

/// A process holds locks of several ranges and modes. A lock of the whole file then takes their place.
fn locks_of_several_ranges_are_joined<B: Backing>(pair: &ProcessPair<'_, B>) {
    let middle = LockRange {
        first: 14,
        last: 16,
    };
    assert!(pair.first(exclusive(10, 19)));
    assert!(pair.second(exclusive(0, 9)));
    assert!(pair.second(exclusive(20, LockRange::LAST)));
    assert!(pair.first(shared(12, 13)));
    assert!(pair.second(shared(12, 13)));
    assert!(!pair.first(exclusive(10, 19)), "12 and 13 are shared");
    assert!(!pair.second(shared(11, 11)), "11 is still exclusive");
    assert!(!pair.second(exclusive(13, 13)), "13 is still shared");
    assert!(pair.first(LockRequest::Unlock(middle)));
    assert!(pair.second(exclusive(14, 16)));
    assert!(!pair.second(exclusive(16, 17)), "17 is still locked");
    assert!(pair.first(LockRequest::Unlock(LockRange::WHOLE)));
    assert!(pair.second(exclusive(0, LockRange::LAST)));
    assert!(!pair.first(shared(LockRange::LAST, LockRange::LAST)));
    pair.unlock_all();
}

fn range_locks_end_with_any_close_of_the_file<B: Backing>(pair: &ProcessPair<'_, B>) {
    assert!(pair.second(exclusive(0, LockRange::LAST)));
    assert!(!pair.first(shared(LockRange::LAST, LockRange::LAST)));
    // The locks of a process end when the process closes any descriptor of the file.
    let other_descriptor = pair.second.open(&pair.second_inode, Access::Read);
    drop(other_descriptor.expect("open"));
    assert!(pair.first(exclusive(0, LockRange::LAST)));
    pair.unlock_all();
}

fn whole_file_locks_exclude_beside_range_locks<B: Backing>(pair: &ProcessPair<'_, B>) {
    assert!(pair.first(exclusive(0, LockRange::LAST)));
    let first_file = pair.first.try_lock(&pair.first_file, LockMode::Exclusive);
    let second_file = pair.second.try_lock(&pair.second_file, LockMode::Exclusive);
    assert_eq!(first_file.and(second_file), Ok(false));
}
