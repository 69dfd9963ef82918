//! What the kernel has cached when firnd changes a tree by itself, at the end of a transaction.
//!
//! Everything here runs with `attr-timeout=1h`: what is not dropped stays wrong for the whole test.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirEntryExt, FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_tests::command::{run, wait_until};
use firn_tests::fsops::{Mapping, open_rw};
use firn_tests::random::bytes;
use firn_tests::transaction::{firn, firn_id};
use firn_tests::{FirnMount, Sandbox};
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};
use rustix::mm::MapFlags;

const OPTIONS: &str = "arena-size=32M,chunk-size=1M,attr-timeout=1h,drain=commit";
/// More than a page, so that a part of it can be changed.
const FILE_BYTES: usize = 3 * 4096 + 17;

/// Names that exist before the transaction, and directories.
const DIRS: [&str; 5] = ["", "dir", "dir/below", "moved", "emptied"];
const FILES: [&str; 12] = [
    "renamed",
    "temporary",
    "replaced",
    "left",
    "right",
    "removed",
    "linked",
    "overwritten",
    "cut",
    "mode",
    "dir/inner",
    "moved/child",
];
/// Names that only the transaction has.
const NEW: [&str; 10] = [
    "new-name",
    "made",
    "made-dir",
    "made-dir/file",
    "moved-away",
    "moved-away/child",
    "dir/below/inner",
    "second-name",
    "symlink",
    "made-then-renamed",
];

fn fill(top: &Path) {
    for dir in DIRS {
        fs::create_dir_all(top.join(dir)).expect("mkdir");
    }
    for (at, name) in FILES.iter().enumerate() {
        fs::write(top.join(name), bytes(at as u64, FILE_BYTES)).expect("write");
    }
    symlink("left", top.join("pointer")).expect("symlink");
}

/// Uses every name of [`FILES`] and [`NEW`], the way programs do.
fn change(top: &Path) {
    let at = |name: &str| top.join(name);
    let rename = |from: &str, to: &str| fs::rename(at(from), at(to)).expect("rename");
    rename("renamed", "new-name");
    rename("temporary", "replaced");
    rustix::fs::renameat_with(
        rustix::fs::CWD,
        at("left"),
        rustix::fs::CWD,
        at("right"),
        RenameFlags::EXCHANGE,
    )
    .expect("exchange");
    fs::remove_file(at("removed")).expect("unlink");
    fs::write(at("made"), b"of the transaction").expect("write");
    fs::create_dir(at("made-dir")).expect("mkdir");
    fs::write(at("made-dir/file"), b"of the transaction").expect("write");
    rename("moved", "moved-away");
    rename("dir/inner", "dir/below/inner");
    fs::hard_link(at("linked"), at("second-name")).expect("link");
    symlink("right", at("symlink")).expect("symlink");
    fs::remove_file(at("pointer")).expect("unlink");
    symlink("right", at("pointer")).expect("symlink");
    fs::write(at("made-then"), b"of the transaction").expect("write");
    rename("made-then", "made-then-renamed");
    fs::remove_dir(at("emptied")).expect("rmdir");
    open_rw(&at("overwritten"))
        .write_all_at(&[7; 5000], 100)
        .expect("write");
    open_rw(&at("cut")).set_len(10).expect("truncate");
    fs::set_permissions(at("mode"), fs::Permissions::from_mode(0o600)).expect("chmod");
}

/// What a program learns from a name.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Found {
    inode: u64,
    mode: u32,
    links: u64,
    size: u64,
    content: Vec<u8>,
}

/// Looks a name up, from a directory's descriptor, and opens and reads what it leads to.
fn look_up(dir: impl AsFd, name: &str) -> Option<Found> {
    let name = if name.is_empty() { "." } else { name };
    let stat = match rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat,
        Err(rustix::io::Errno::NOENT) => {
            let opened =
                rustix::fs::openat(&dir, name, OFlags::RDONLY | OFlags::NOFOLLOW, Mode::empty());
            assert_eq!(
                opened.err(),
                Some(rustix::io::Errno::NOENT),
                "{name} opens though stat(2) does not find it"
            );
            return None;
        }
        Err(error) => panic!("stat {name}: {error}"),
    };
    let content = match stat.st_mode & libc::S_IFMT {
        libc::S_IFREG => {
            let file = rustix::fs::openat(&dir, name, OFlags::RDONLY, Mode::empty());
            let file = File::from(file.unwrap_or_else(|error| panic!("open {name}: {error}")));
            assert_eq!(
                file.metadata().expect("fstat").ino(),
                stat.st_ino,
                "{name} opens another file than stat tells"
            );
            firn_tests::fsops::read_at(&file, 0, 2 * FILE_BYTES)
        }
        libc::S_IFLNK => rustix::fs::readlinkat(&dir, name, Vec::new())
            .expect("readlink")
            .into_bytes(),
        _ => Vec::new(),
    };
    let is_file = stat.st_mode & libc::S_IFMT == libc::S_IFREG;
    Some(Found {
        inode: stat.st_ino,
        mode: stat.st_mode,
        links: stat.st_nlink,
        size: if is_file { stat.st_size as u64 } else { 0 },
        content,
    })
}

type State = BTreeMap<&'static str, Option<Found>>;

/// All names that the transaction uses.
fn names() -> impl DoubleEndedIterator<Item = &'static str> {
    DIRS.into_iter()
        .chain(FILES)
        .chain(["pointer", "made-then"])
        .chain(NEW)
}

/// What is wrong, by whichever way a program looks.
fn wrong_names(top: &Path, expected: &State, new_first: bool) -> Vec<String> {
    let dir = open_dir(top);
    let mut order: Vec<&str> = names().collect();
    if new_first {
        order.reverse();
    }
    let mut wrong = Vec::new();
    for name in order {
        let found = look_up(&dir, name);
        if found != expected[name] {
            let short = |found: &Option<Found>| {
                found
                    .as_ref()
                    .map(|found| (found.inode, found.mode, found.links, found.size))
            };
            wrong.push(format!(
                "{name}: found {:?}, expected {:?}",
                short(&found),
                short(&expected[name])
            ));
        }
    }
    wrong
}

fn open_dir(path: &Path) -> File {
    File::open(path).unwrap_or_else(|error| panic!("open {path:?}: {error}"))
}

fn state(top: &Path) -> State {
    let dir = open_dir(top);
    names().map(|name| (name, look_up(&dir, name))).collect()
}

fn listing(top: &Path) -> Vec<(OsString, u64)> {
    let entry = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.expect("an entry");
        (entry.file_name(), entry.ino())
    };
    let mut list: Vec<_> = fs::read_dir(top).expect("readdir").map(entry).collect();
    list.retain(|(name, _)| name != ".firn");
    list.sort();
    list
}

/// How a transaction ends without a commit.
#[derive(Clone, Copy, Debug)]
enum Undo {
    Abort,
    AbortPrepared,
    /// To the commit before it.
    Restore,
}

/// Everything that a program can hold across the end of a transaction.
struct Holder {
    top: File,
    dir: File,
    moved: File,
    removed: File,
    overwritten: File,
    mapping: Mapping,
}

impl Holder {
    fn new(top: &Path) -> Self {
        let overwritten = File::open(top.join("overwritten")).expect("open");
        let mapping = Mapping::new(&overwritten, FILE_BYTES, MapFlags::PRIVATE).expect("mmap");
        // Into the page cache.
        mapping.read(0, FILE_BYTES);
        firn_tests::fsops::read_at(&overwritten, 0, FILE_BYTES);
        let dir = open_dir(&top.join("dir"));
        let moved = open_dir(&top.join("moved"));
        let removed = File::open(top.join("removed")).expect("open");
        Self {
            top: open_dir(top),
            dir,
            moved,
            removed,
            overwritten,
            mapping,
        }
    }

    fn check(&self, expected: &State) {
        let content = |name: &str| {
            expected[name]
                .as_ref()
                .expect("it was there")
                .content
                .clone()
        };
        let found = look_up(&self.top, "renamed");
        assert_eq!(
            found, expected["renamed"],
            "through a descriptor of the directory"
        );
        assert_eq!(
            look_up(&self.top, "new-name"),
            None,
            "through a descriptor of the directory"
        );
        assert_eq!(look_up(&self.dir, "inner"), expected["dir/inner"]);
        assert_eq!(look_up(&self.dir, "below/inner"), None);
        assert_eq!(look_up(&self.moved, "child"), expected["moved/child"]);
        assert_eq!(
            look_up(&self.moved, "../moved/child"),
            expected["moved/child"]
        );
        assert_eq!(
            self.removed.metadata().expect("fstat").nlink(),
            1,
            "of a file that was removed and is back"
        );
        let old = content("overwritten");
        let read = firn_tests::fsops::read_at(&self.overwritten, 0, FILE_BYTES);
        firn_tests::fsops::assert_same_bytes("by read(2)", &read, &old);
        self.mapping.look_again().expect("madvise");
        firn_tests::fsops::assert_same_bytes(
            "by a mapping",
            &self.mapping.read(0, FILE_BYTES),
            &old,
        );
    }
}

fn undone(name: &str, options: &str, scope: &str, undo: Undo, new_first: bool) {
    let what = format!("{options}, scope {scope:?}, {undo:?}, new names first: {new_first}");
    let sandbox = Sandbox::new(name);
    let top = sandbox.join("backing").join(scope);
    fill(&top);
    let mount = FirnMount::new(&sandbox, options);
    let top = mount.join(scope);
    if let Undo::Restore = undo {
        firn(&sandbox, "begin", &top).ok();
        fs::write(top.join("of-commit-1"), b"1").expect("write");
        firn_id(&sandbox, "commit", &top, 1).ok();
    }
    let before = state(&top);
    let listed = listing(&top);
    let holder = Holder::new(&top);
    firn(&sandbox, "begin", &top).ok();
    change(&top);
    // The kernel caches all of it.
    let during = state(&top);
    assert!(NEW.iter().all(|name| during[name].is_some()), "{what}");
    match undo {
        Undo::Abort => firn(&sandbox, "abort", &top).ok(),
        Undo::AbortPrepared => {
            firn_id(&sandbox, "prepare", &top, 7).ok();
            firn(&sandbox, "abort", &top).ok()
        }
        Undo::Restore => firn_id(&sandbox, "restore", &top, 1).ok(),
    };
    let wrong = wrong_names(&top, &before, new_first);
    assert!(wrong.is_empty(), "{what}:\n{}", wrong.join("\n"));
    holder.check(&before);
    assert_eq!(listing(&top), listed, "{what}");
    drop(holder);
    mount.umount();
}

/// Proves S-tx-42.
#[test]
fn regression_no_name_of_an_aborted_transaction_is_left_in_the_kernel() {
    for mode in ["buffer", "shadow"] {
        let options = format!("{OPTIONS},mode={mode}");
        for new_first in [false, true] {
            undone("kabort", &options, "", Undo::Abort, new_first);
            undone("kabortdir", &options, "scope", Undo::Abort, new_first);
            undone("kabortprep", &options, "", Undo::AbortPrepared, new_first);
        }
    }
}

/// Proves S-tx-7, S-tx-42.
#[test]
fn regression_no_name_of_what_was_restored_over_is_left_in_the_kernel() {
    for new_first in [false, true] {
        undone("krestore", OPTIONS, "", Undo::Restore, new_first);
        undone("krestoredir", OPTIONS, "scope", Undo::Restore, new_first);
    }
}

/// Proves S-tx-7, S-tx-42, S-tx-48: commits that are undone too.
#[test]
fn regression_no_name_of_an_undone_commit_is_left_in_the_kernel() {
    let sandbox = Sandbox::new("khistory");
    fill(&sandbox.join("backing"));
    let mount = FirnMount::new(&sandbox, &format!("{OPTIONS},history=2"));
    let top = mount.path();
    firn(&sandbox, "begin", top).ok();
    fs::write(top.join("of-commit-1"), b"1").expect("write");
    firn_id(&sandbox, "commit", top, 1).ok();
    let before = state(top);
    firn(&sandbox, "begin", top).ok();
    change(top);
    firn_id(&sandbox, "commit", top, 2).ok();
    let committed = state(top);
    assert!(NEW.iter().all(|name| committed[name].is_some()));
    firn_id(&sandbox, "restore", top, 1).ok();
    // What was changed and is changed back may be another inode, which programs can tell.
    let comparable = |state: State| {
        let found = |found: Found| (found.mode, found.size, found.content);
        state
            .into_iter()
            .map(|(name, one)| (name, one.map(found)))
            .collect::<BTreeMap<_, _>>()
    };
    assert_eq!(comparable(state(top)), comparable(before));
    mount.umount();
}

/// A transaction that is aborted does not wait for another one's outcome because of names that the kernel cached.
#[test]
fn an_abort_waits_for_no_rename_from_another_scope_that_is_prepared() {
    let sandbox = Sandbox::new("kscopes");
    let mount = FirnMount::new(&sandbox, OPTIONS);
    for scope in ["a", "b"] {
        fs::create_dir(mount.join(scope)).expect("mkdir");
        fs::write(mount.join(scope).join("file"), scope).expect("write");
    }
    firn(&sandbox, "begin", &mount.join("a")).ok();
    firn(&sandbox, "begin", &mount.join("b")).ok();
    fs::rename(mount.join("a/file"), mount.join("a/other")).expect("rename");
    firn_id(&sandbox, "prepare", &mount.join("b"), 3).ok();
    let (from, to) = (mount.join("b/file"), mount.join("a/from-b"));
    let renamed = std::thread::spawn(move || {
        fs::rename(from, to)
            .err()
            .and_then(|error| error.raw_os_error())
    });
    firn(&sandbox, "abort", &mount.join("a")).ok();
    assert_eq!(renamed.join().expect("the thread"), Some(libc::EXDEV));
    assert!(mount.join("a/file").exists() && !mount.join("a/other").exists());
    firn_id(&sandbox, "commit", &mount.join("b"), 3).ok();
    mount.umount();
}

/// Hosts that share a backing.
struct Hosts {
    shared: Sandbox,
    hosts: Vec<Sandbox>,
}

impl Hosts {
    fn new(name: &str) -> Self {
        let hosts = (0..2)
            .map(|at| Sandbox::on_host(&format!("{name}{at}"), &format!("k{at}")))
            .collect();
        Self {
            shared: Sandbox::new(name),
            hosts,
        }
    }

    fn mounts(&self, options: &str) -> Vec<FirnMount<'_>> {
        let options = format!("{options},participants=2");
        let mount = |host| FirnMount::over(host, &self.shared.join("backing"), &options);
        self.hosts.iter().map(mount).collect()
    }

    /// `firn VERB MOUNT ...` on both at once; their exit codes.
    fn all(&self, mounts: &[FirnMount<'_>], args: &[&str]) -> Vec<i32> {
        let one = |(host, mount): (&Sandbox, &FirnMount<'_>)| {
            let mut command = host.firn([args[0].as_ref(), mount.path().as_os_str()]);
            run(command.args(&args[1..])).code
        };
        std::thread::scope(|scope| {
            let pairs = self.hosts.iter().zip(mounts);
            let threads: Vec<_> = pairs.map(|pair| scope.spawn(move || one(pair))).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("a host"))
                .collect()
        })
    }
}

/// Proves S-tx-32, S-tx-42.
#[test]
fn regression_after_a_refused_commit_and_an_abort_no_name_is_left_in_the_kernel() {
    let hosts = Hosts::new("kconflict");
    fill(&hosts.shared.join("backing"));
    let mounts = hosts.mounts(&format!("{OPTIONS},participants-wait=20s"));
    let before: Vec<State> = mounts.iter().map(|mount| state(mount.path())).collect();
    assert_eq!(hosts.all(&mounts, &["begin"]), [0, 0]);
    change(mounts[0].path());
    // The same byte on the other host.
    open_rw(&mounts[1].join("overwritten"))
        .write_all_at(b"x", 200)
        .expect("write");
    fs::rename(mounts[1].join("mode"), mounts[1].join("new-name")).expect("rename");
    let during: Vec<State> = mounts.iter().map(|mount| state(mount.path())).collect();
    assert!(
        hosts
            .all(&mounts, &["commit", "--id", "5"])
            .iter()
            .all(|code| *code != 0)
    );
    for (mount, during) in mounts.iter().zip(&during) {
        let wrong = wrong_names(mount.path(), during, true);
        assert!(
            wrong.is_empty(),
            "the transaction is as it was:\n{}",
            wrong.join("\n")
        );
    }
    assert_eq!(hosts.all(&mounts, &["abort"]), [0, 0]);
    for (mount, before) in mounts.iter().zip(&before) {
        let wrong = wrong_names(mount.path(), before, true);
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
}

/// Proves S-tx-34.
#[test]
fn regression_after_an_abort_by_another_host_no_name_is_left_in_the_kernel() {
    for prepared in [false, true] {
        let hosts = Hosts::new("kother");
        fill(&hosts.shared.join("backing"));
        let mounts = hosts.mounts(&format!("{OPTIONS},mode=shadow,participants-wait=20s"));
        let before = state(mounts[0].path());
        let top = mounts[0].path().to_owned();
        let holder = Holder::new(&top);
        assert_eq!(hosts.all(&mounts, &["begin"]), [0, 0]);
        change(&top);
        state(&top);
        if prepared {
            assert_eq!(hosts.all(&mounts, &["prepare", "--id", "9"]), [0, 0]);
        }
        firn(&hosts.hosts[1], "abort", mounts[1].path()).ok();
        let status = || mounts[0].status().transactions;
        wait_until(
            "the host has ended its part",
            Duration::from_secs(20),
            || status().is_empty(),
        );
        // The list of transactions is shorter an instant before the kernel is told.
        let mut wrong = Vec::new();
        wait_until("the kernel was told", Duration::from_secs(20), || {
            wrong = wrong_names(&top, &before, prepared);
            wrong.is_empty()
        });
        holder.check(&before);
        drop(holder);
        mounts.into_iter().for_each(|mount| drop(mount.umount()));
    }
}

/// Proves S-tx-30, S-tx-68: what another host renamed and removed.
#[test]
fn regression_after_a_commit_of_two_hosts_no_old_name_is_left_in_the_kernel() {
    let hosts = Hosts::new("kcommit");
    fill(&hosts.shared.join("backing"));
    let mounts = hosts.mounts(&format!("{OPTIONS},participants-wait=20s"));
    // The other host's kernel caches the names before: reads in the transaction would conflict.
    state(mounts[1].path());
    assert_eq!(hosts.all(&mounts, &["begin"]), [0, 0]);
    change(mounts[0].path());
    assert_eq!(hosts.all(&mounts, &["commit", "--id", "5"]), [0, 0]);
    let after = state(&hosts.shared.join("backing"));
    for mount in &mounts {
        let seen = state(mount.path());
        for name in names().filter(|name| !name.is_empty()) {
            assert_eq!(seen[name], after[name], "{name} on {:?}", mount.path());
        }
    }
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
}

/// Names that were right all the time stay in the kernel.
#[test]
fn an_abort_takes_no_working_directory_away() {
    let sandbox = Sandbox::new("kcwd");
    fill(&sandbox.join("backing"));
    let mount = FirnMount::new(&sandbox, OPTIONS);
    firn(&sandbox, "begin", mount.path()).ok();
    let script = r#"cd "$1"/dir/below && read -r _"#;
    let mut child = std::process::Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(mount.path())
        .stdin(std::process::Stdio::piped())
        .spawn()
        .expect("sh");
    let cwd = PathBuf::from(format!("/proc/{}/cwd", child.id()));
    let expected = mount.join("dir/below");
    wait_until("it is there", Duration::from_secs(10), || {
        fs::read_link(&cwd).is_ok_and(|at| at == expected)
    });
    change(mount.path());
    firn(&sandbox, "abort", mount.path()).ok();
    assert_eq!(fs::read_link(&cwd).expect("readlink"), expected);
    drop(child.stdin.take());
    child.wait().expect("its end");
    mount.umount();
}
