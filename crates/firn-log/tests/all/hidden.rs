//! The directory with containers is moved away: no file is then read as if it had all of its bytes.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::time::Duration;

use firn_backing::{
    Access, Attributes, Backing, Errno, FileUse, Files, Names, RenameFlags, Sharing, Volume,
};
use firn_log::{LogBacking, Setup, WhenClosed};
use firn_sim::{SimBacking, suite};

type Logged = LogBacking<SimBacking>;

const TAG: &str = "user.firn.logged";
const BYTES: &[u8] = b"in a log";

fn mount(disk: &SimBacking, host: &str, chooses: bool) -> Logged {
    let setup = Setup {
        host: host.to_owned(),
        chooses: Box::new(move |_: &OsStr| chooses),
        is_alive: Box::new(|_| Ok(false)),
        view_age_max: Duration::ZERO,
        lag_max: Duration::ZERO,
        unit_bytes: 4 << 10,
        when_closed: WhenClosed::Keep,
        flattens_read: false,
    };
    LogBacking::open(disk.another_process(), setup).expect("open")
}

fn write(host: &Logged, name: &str) {
    let me = suite::own_caller();
    let made = host.create(&me, &host.root(), OsStr::new(name), 0o644);
    let (_, file, _) = made.expect("create");
    host.report_use(&file, FileUse::OpenedToWrite)
        .expect("note_opened");
    let written = host.write_at(&file, &[IoSlice::new(BYTES)], 0);
    assert_eq!(written, Ok(BYTES.len()));
    host.sync(&file, false).expect("sync");
}

fn open(host: &Logged, name: &str, access: Access) -> Result<<Logged as Volume>::File, Errno> {
    let (inode, _) = host.lookup(&host.root(), OsStr::new(name))?;
    host.open(&inode, access)
}

fn read(host: &Logged, name: &str) -> Result<Vec<u8>, Errno> {
    let file = open(host, name, Access::Read)?;
    let mut bytes = vec![0; 100];
    let count = host.read_at(&file, &mut bytes, 0)?;
    bytes.truncate(count);
    Ok(bytes)
}

fn rename(disk: &SimBacking, from: &str, to: &str) {
    let root = disk.root();
    let flags = RenameFlags::empty();
    let renamed = disk.rename(&root, OsStr::new(from), &root, OsStr::new(to), flags);
    renamed.expect("rename");
}

fn has_tag(disk: &SimBacking, name: &str) -> bool {
    let (inode, _) = disk.lookup(&disk.root(), OsStr::new(name)).expect("lookup");
    disk.get_xattr(&inode, OsStr::new(TAG)).is_ok()
}

/// Proves S-log-76.
#[test]
fn a_file_whose_logs_are_hidden_is_refused_until_they_are_back() {
    let disk = SimBacking::new();
    for (name, host) in [("x", "a"), ("y", "b")] {
        write(&mount(&disk, host, true), name);
    }
    rename(&disk, ".firn", "gone");
    for chooses in [true, false] {
        let other = mount(&disk, "c", chooses);
        for access in [Access::Read, Access::Write, Access::ReadWrite] {
            for name in ["x", "y"] {
                let opened = open(&other, name, access).err();
                assert_eq!(opened, Some(Errno::IO), "{name} {access:?} {chooses}");
            }
        }
    }
    // A file without bytes in logs can still be used.
    let other = mount(&disk, "c", true);
    write(&other, "z");
    assert_eq!(read(&other, "z"), Ok(BYTES.to_vec()));
    drop(other);
    rename(&disk, ".firn", "second");
    rename(&disk, "gone", ".firn");
    let host = mount(&disk, "d", true);
    assert_eq!(read(&host, "x"), Ok(BYTES.to_vec()));
    assert_eq!(read(&host, "z"), Err(Errno::IO), "its bytes are hidden now");
    // Programs do not see the tag among the attributes.
    let (inode, _) = host.lookup(&host.root(), OsStr::new("x")).expect("lookup");
    assert_eq!(host.list_xattr(&inode), Ok(Vec::new()));
    assert_eq!(host.get_xattr(&inode, OsStr::new(TAG)), Err(Errno::NODATA));
}

/// Proves S-log-76: a flat file needs no logs, and its tag is removed.
#[test]
fn a_flat_file_has_no_tag() {
    let disk = SimBacking::new();
    let host = mount(&disk, "a", true);
    write(&host, "x");
    assert!(has_tag(&disk, "x"), "synced, and not flat");
    let left = host.flatten_below(&host.root()).expect("flatten");
    assert!(left.is_empty(), "{left:?}");
    assert!(!has_tag(&disk, "x"));
    drop(host);
    rename(&disk, ".firn", "gone");
    assert_eq!(read(&mount(&disk, "b", true), "x"), Ok(BYTES.to_vec()));
}

/// Proves S-log-76: a file that was copied with its tag is a file of its own.
#[test]
fn the_tag_of_another_file_says_nothing() {
    let disk = SimBacking::new();
    let host = mount(&disk, "a", true);
    write(&host, "x");
    write(&host, "copy");
    let left = host.flatten_below(&host.root()).expect("flatten");
    assert!(left.is_empty(), "{left:?}");
    write(&host, "y");
    let root = disk.root();
    let (y, _) = disk.lookup(&root, OsStr::new("y")).expect("lookup");
    let tag = disk.get_xattr(&y, OsStr::new(TAG)).expect("a tag");
    let (copy, _) = disk.lookup(&root, OsStr::new("copy")).expect("lookup");
    disk.set_xattr(&copy, OsStr::new(TAG), &tag, 0)
        .expect("set");
    rename(&disk, ".firn", "gone");
    let other = mount(&disk, "b", true);
    assert_eq!(read(&other, "copy"), Ok(BYTES.to_vec()));
    assert_eq!(read(&other, "y"), Err(Errno::IO));
}
