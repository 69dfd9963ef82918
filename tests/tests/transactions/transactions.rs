//! Transactions on a mount: `firn begin`, `prepare`, `commit`, `abort`, `restore`.
//!
//! `FIRN_CRASH_ROUNDS` sets the rounds of kill -9, `FIRN_SEED` the seed.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

use firn_tests::c::{Installed, Link};
use firn_tests::command::wait_child;
use firn_tests::differential::{self, Answer, Op, Rules, Side, draw};
use firn_tests::fsops::{Mapping, assert_same_bytes, open_rw, read};
use firn_tests::random::{bytes, env_count, generator};
use firn_tests::sandbox::{kill, preload_library, wait_for_request};
use firn_tests::suite::{pjdfstest, pjdfstest_beside};
use firn_tests::transaction::{behind, firn, firn_id, firn_with};
use firn_tests::tree::{assert_same, differences, snapshot};
use firn_tests::{FirnMount, FsKind, Layers, LoopImage, Sandbox, on_every_layers, run, seed};
use rand::RngExt;
use rustix::io::Errno;
use rustix::mm::MapFlags;

const COMMIT: &str = "arena-size=32M,chunk-size=1M,drain=commit";
const SHADOW: &str = "arena-size=32M,chunk-size=1M,drain=commit,mode=shadow";
const MIB: usize = 1 << 20;
/// Rounds of kill -9 with each stack of layers.
const KILLS: u64 = 3;
const EXCHANGE: u32 = libc::RENAME_EXCHANGE;

/// Proves S-tx-1, S-tx-2.
#[test]
fn the_backing_shows_nothing_before_the_commit_and_everything_after() {
    let sandbox = Sandbox::new("tx");
    let mount = FirnMount::new(&sandbox, COMMIT);
    fs::write(mount.join("kept"), b"before").expect("write");
    fs::create_dir(mount.join("dir")).expect("mkdir");
    fs::write(mount.join("dir/moved"), bytes(1, 3 * MIB)).expect("write");
    firn(&sandbox, "begin", mount.path()).ok();
    let before = behind(mount.backing());

    fs::write(mount.join("kept"), b"after").expect("write");
    let new = bytes(2, 5 * MIB + 17);
    fs::write(mount.join("new"), &new).expect("write");
    fs::rename(mount.join("dir"), mount.join("other")).expect("rename");
    open_rw(&mount.join("other/moved"))
        .set_len(1000)
        .expect("truncate");
    symlink("new", mount.join("link")).expect("symlink");
    fs::hard_link(mount.join("kept"), mount.join("also")).expect("link");
    assert_same_bytes("what programs see", &read(&mount.join("link")), &new);
    assert!(!mount.join("dir").exists() && mount.join("other/moved").exists());
    assert_same("before the commit", &behind(mount.backing()), &before);

    let seen = snapshot(mount.path());
    firn(&sandbox, "commit", mount.path()).ok();
    assert_same("after the commit", &behind(mount.backing()), &seen);
    assert_same("through the mount", &snapshot(mount.path()), &seen);
    let backing = mount.umount();
    assert_same("after the unmount", &behind(&backing), &seen);
}

/// Proves S-tx-3, S-tx-43.
#[test]
fn an_abort_brings_everything_back_also_in_files_that_are_open() {
    let sandbox = Sandbox::new("txabort");
    let mount = FirnMount::new(&sandbox, COMMIT);
    let old = bytes(1, 2 * MIB);
    fs::write(mount.join("file"), &old).expect("write");
    fs::create_dir(mount.join("dir")).expect("mkdir");
    let reader = fs::File::open(mount.join("file")).expect("open");
    firn(&sandbox, "begin", mount.path()).ok();
    let before = snapshot(mount.path());
    let file = open_rw(&mount.join("file"));
    std::os::unix::fs::FileExt::write_all_at(&file, &bytes(2, MIB), 1000).expect("write");
    fs::rename(mount.join("file"), mount.join("dir/away")).expect("rename");
    let made = fs::File::create(mount.join("made")).expect("create");
    firn(&sandbox, "abort", mount.path()).ok();

    assert_same("after the abort", &snapshot(mount.path()), &before);
    assert_same_bytes(
        "of an open file",
        &firn_tests::fsops::read_at(&reader, 0, old.len()),
        &old,
    );
    let error = std::os::unix::fs::FileExt::write_all_at(&made, b"x", 0).err();
    assert_eq!(
        error.and_then(|error| error.raw_os_error()),
        Some(libc::ESTALE),
        "it never was"
    );
    std::os::unix::fs::FileExt::write_all_at(&file, b"later", 0)
        .expect("the file is still that file");
    drop((file, reader, made));
    let backing = mount.umount();
    let mut expected = old;
    expected[..5].copy_from_slice(b"later");
    assert_same_bytes("in the backing", &read(&backing.join("file")), &expected);
}

/// Proves S-tx-3, S-tx-4, S-tx-7, S-tx-8, S-tx-46, S-tx-49, S-tx-50: what firnd's end leaves of a transaction.
#[test]
fn what_was_prepared_outlives_firnd_and_what_was_not_is_undone() {
    let sandbox = Sandbox::new("txkill");
    let begin = |mount: &FirnMount<'_>, content: &[u8]| {
        firn(&sandbox, "begin", mount.path()).ok();
        fs::write(mount.join("file"), content).expect("write");
        fs::write(mount.join("more"), content).expect("write");
        fs::File::open(mount.join("more"))
            .and_then(|file| file.sync_all())
            .expect("fsync");
    };
    let mount = FirnMount::new(&sandbox, COMMIT);
    fs::write(mount.join("file"), b"first").expect("write");
    begin(&mount, b"never prepared");
    mount.kill();

    let mount = FirnMount::new(&sandbox, COMMIT);
    assert_eq!(fs::read(mount.join("file")).expect("read"), b"first");
    assert!(!mount.join("more").exists());
    begin(&mount, b"prepared");
    firn_id(&sandbox, "prepare", mount.path(), 17).ok();
    firn(&sandbox, "umount", mount.path())
        .code(11)
        .says("prepared with id 17");
    mount.kill();
    let backing = sandbox.join("backing");
    let point = sandbox.join("mnt");
    sandbox
        .run([OsStr::new("mount"), backing.as_os_str(), point.as_os_str()])
        .code(11)
        .says("drain=commit");

    let mount = FirnMount::new(&sandbox, COMMIT);
    assert_eq!(
        fs::read(mount.join("file")).expect("read"),
        b"first",
        "undecided: as before"
    );
    let refused = fs::File::create(mount.join("else"))
        .err()
        .and_then(|error| error.raw_os_error());
    assert_eq!(
        refused,
        Some(libc::EBUSY),
        "until it is decided nothing changes"
    );
    firn_id(&sandbox, "restore", mount.path(), 16)
        .code(1)
        .says("not kept");
    firn_id(&sandbox, "restore", mount.path(), 17).ok();
    assert_eq!(fs::read(mount.join("file")).expect("read"), b"prepared");
    begin(&mount, b"after 17");
    firn_id(&sandbox, "restore", mount.path(), 17).ok();
    assert_eq!(
        fs::read(mount.join("more")).expect("read"),
        b"prepared",
        "what came after 17 is gone"
    );
    mount.umount();
}

/// Proves S-tx-7, S-tx-48: with `history`, older commits come back, also what was written and removed since.
#[test]
fn older_commits_are_restored_as_far_as_they_are_kept() {
    let sandbox = Sandbox::new("txhistory");
    let options = format!("{COMMIT},history=2");
    let mount = FirnMount::new(&sandbox, &options);
    let mut trees = Vec::new();
    for id in 1..=4u64 {
        firn(&sandbox, "begin", mount.path()).ok();
        fs::write(mount.join("state"), bytes(id, MIB + 10)).expect("write");
        fs::write(mount.join(format!("step{id}")), bytes(id, 5000)).expect("write");
        if id > 1 {
            fs::remove_file(mount.join(format!("step{}", id - 1))).expect("remove");
        }
        firn_id(&sandbox, "commit", mount.path(), id).ok();
        trees.push(snapshot(mount.path()));
    }
    firn_id(&sandbox, "restore", mount.path(), 1)
        .code(1)
        .says("the kept checkpoints are: 4, 3, 2");
    firn_id(&sandbox, "restore", mount.path(), 3).ok();
    assert_same("checkpoint 3", &snapshot(mount.path()), &trees[2]);
    mount.kill();
    let mount = FirnMount::new(&sandbox, &options);
    firn_id(&sandbox, "restore", mount.path(), 2).ok();
    assert_same("checkpoint 2", &snapshot(mount.path()), &trees[1]);
    let backing = mount.umount();
    assert_same("in the backing", &behind(&backing), &trees[1]);
}

/// Proves S-tx-1, S-tx-3, S-tx-40: what was stored to a shared mapping is part of it, or is undone.
#[test]
fn stores_to_shared_mappings_belong_to_the_transaction() {
    let sandbox = Sandbox::new("txmap");
    let mount = FirnMount::new(&sandbox, COMMIT);
    fs::write(mount.join("f"), vec![b'a'; 8192]).expect("write");
    let file = open_rw(&mount.join("f"));
    let map = Mapping::new(&file, 8192, MapFlags::SHARED).expect("map");
    firn(&sandbox, "begin", mount.path()).ok();
    map.write(10, b"undone");
    firn(&sandbox, "abort", mount.path()).ok();
    assert_eq!(
        map.read(8, 10),
        b"aaaaaaaaaa",
        "an abort is seen through the mapping"
    );
    firn(&sandbox, "begin", mount.path()).ok();
    map.write(10, b"stays");
    firn(&sandbox, "commit", mount.path()).ok();
    assert_eq!(
        &fs::read(mount.backing().join("f")).expect("read")[8..16],
        b"aastaysa"
    );
    drop((map, file));
    mount.umount();
}

/// Proves S-tx-5.
#[test]
fn changes_wait_while_the_outcome_is_open() {
    let sandbox = Sandbox::new("txwait");
    let mount = FirnMount::new(&sandbox, COMMIT);
    firn(&sandbox, "begin", mount.path()).ok();
    fs::write(mount.join("a"), b"in it").expect("write");
    firn_id(&sandbox, "prepare", mount.path(), 3).ok();
    firn_id(&sandbox, "prepare", mount.path(), 4)
        .code(1)
        .says("with id 3");
    let path = mount.join("b");
    let (tell, told) = std::sync::mpsc::channel();
    let waiting = std::thread::spawn(move || {
        tell.send(rustix::thread::gettid()).expect("send");
        fs::write(path, b"after it")
    });
    let thread = told.recv().expect("the number of the thread");
    let thread = thread.as_raw_nonzero();
    wait_for_request(Path::new(&format!("/proc/self/task/{thread}")));
    // firnd answers other requests meanwhile: this one is not just on its way.
    for _ in 0..10 {
        mount.status();
    }
    assert!(!waiting.is_finished(), "a new file waits for the outcome");
    firn_id(&sandbox, "commit", mount.path(), 3).ok();
    waiting.join().expect("join").expect("it goes on");
    assert_eq!(fs::read(mount.join("b")).expect("read"), b"after it");
    mount.umount();
}

/// Proves S-tx-5, S-tx-6.
#[test]
fn regression_a_change_that_waits_holds_up_no_other_transaction() {
    let sandbox = Sandbox::new("txapart");
    let mount = FirnMount::new(&sandbox, COMMIT);
    for name in ["one", "two"] {
        fs::create_dir(mount.join(name)).expect("mkdir");
        fs::write(mount.join(name).join("f"), b"old bytes").expect("write");
        fs::write(mount.join(name).join("g"), b"old bytes").expect("write");
    }
    let file = |path: &str| {
        let opened = fs::OpenOptions::new().write(true).open(mount.join(path));
        opened.expect("open")
    };
    let prepared = mount.join("one");
    firn(&sandbox, "begin", &prepared).ok();
    firn_id(&sandbox, "prepare", &prepared, 3).ok();
    let (tell, told) = std::sync::mpsc::channel();
    let cut = file("one/f");
    let allocated = file("one/g");
    let waiting = [
        std::thread::spawn({
            let tell = tell.clone();
            move || {
                tell.send(rustix::thread::gettid()).expect("send");
                cut.set_len(3)
            }
        }),
        std::thread::spawn(move || {
            tell.send(rustix::thread::gettid()).expect("send");
            let flags = rustix::fs::FallocateFlags::empty();
            Ok(rustix::fs::fallocate(&allocated, flags, 0, 4096)?)
        }),
    ];
    for _ in &waiting {
        let thread = told.recv().expect("the number of the thread");
        let thread = thread.as_raw_nonzero();
        wait_for_request(Path::new(&format!("/proc/self/task/{thread}")));
    }
    // Each of these stops all changes of that directory for a moment.
    let other = mount.join("two");
    firn(&sandbox, "begin", &other).ok();
    fs::write(other.join("f"), b"new").expect("write");
    firn(&sandbox, "commit", &other).ok();
    assert_eq!(
        fs::read(mount.backing().join("two/f")).expect("read"),
        b"new"
    );
    firn_id(&sandbox, "prepare", &prepared, 3).ok();
    let finished = waiting.iter().filter(|thread| thread.is_finished()).count();
    assert_eq!(finished, 0, "they wait for the outcome");
    firn_id(&sandbox, "commit", &prepared, 3).ok();
    for thread in waiting {
        thread.join().expect("join").expect("it goes on");
    }
    mount.umount();
}

/// Proves S-tx-6, S-tx-47.
#[test]
fn directories_have_transactions_of_their_own() {
    let sandbox = Sandbox::new("txscopes");
    let mount = FirnMount::new(&sandbox, COMMIT);
    for name in ["one", "two", "free"] {
        fs::create_dir(mount.join(name)).expect("mkdir");
        fs::write(mount.join(name).join("f"), b"old").expect("write");
    }
    firn(&sandbox, "begin", &mount.join("one")).ok();
    firn(&sandbox, "begin", &mount.join("two")).ok();
    firn(&sandbox, "begin", mount.path())
        .code(11)
        .says("open in");
    for name in ["one", "two", "free"] {
        fs::write(mount.join(name).join("f"), b"new").expect("write");
    }
    let across = |from: &str, to: &str| {
        let error = fs::rename(mount.join(from), mount.join(to)).expect_err("across the edge");
        assert_eq!(error.raw_os_error(), Some(libc::EXDEV), "{from} to {to}");
    };
    across("one/f", "two/g");
    across("one/f", "free/g");
    across("free/f", "one/g");
    let away = fs::rename(mount.join("one"), mount.join("free/one"));
    assert_eq!(
        away.err().and_then(|e| e.raw_os_error()),
        Some(libc::EBUSY),
        "the top stays in its parent"
    );
    firn(&sandbox, "abort", &mount.join("one")).ok();
    firn(&sandbox, "commit", &mount.join("two")).ok();
    let content = |name: &str| fs::read(mount.join(name).join("f")).expect("read");
    assert_eq!(
        [content("one"), content("two"), content("free")],
        [&b"old"[..], b"new", b"new"]
    );
    mount.umount();
}

/// Proves S-tx-100, S-tx-106.
#[test]
fn a_directory_that_begin_makes_comes_with_the_commit_and_goes_with_an_abort() {
    for options in [COMMIT, SHADOW] {
        let sandbox = Sandbox::new("txcreate");
        let mount = FirnMount::new(&sandbox, options);
        fs::create_dir(mount.join("steps")).expect("mkdir");
        fs::create_dir(mount.join("steps/0")).expect("mkdir");
        let links = |dir: &Path| fs::metadata(dir).expect("stat").nlink();
        let counted = links(&mount.join("steps"));
        let step = mount.join("steps/1");
        let make = || {
            firn_with(&sandbox, "begin", &step, &["--create"]).ok();
            fs::write(step.join("file"), b"content").expect("write");
            fs::create_dir(step.join("below")).expect("mkdir");
        };
        make();
        let made = fs::metadata(&step).expect("programs see it");
        assert_eq!(
            (made.uid(), made.mode() & 0o7777),
            (rustix::process::geteuid().as_raw(), 0o755)
        );
        let listed = || {
            let mut names: Vec<_> = fs::read_dir(mount.join("steps"))
                .expect("list")
                .map(|entry| entry.expect("entry").file_name())
                .collect();
            names.sort();
            names
        };
        assert_eq!(listed(), ["0", "1"], "{options}");
        assert_eq!(links(&mount.join("steps")), counted + 1, "{options}");
        let in_backing = mount.backing().join("steps/1");
        assert_eq!(in_backing.exists(), options == SHADOW);
        firn(&sandbox, "abort", &step).ok();
        assert!(!step.exists() && !in_backing.exists(), "{options}: aborted");
        assert_eq!(listed(), ["0"], "{options}");
        assert_eq!(links(&mount.join("steps")), counted, "{options}");

        make();
        firn(&sandbox, "commit", &step).ok().says("committed as 1");
        let seen = snapshot(mount.path());
        assert_same("committed", &behind(mount.backing()), &seen);
        firn_with(&sandbox, "begin", &step, &["--create"])
            .code(1)
            .says("it exists already; `firn begin` without --create");
        firn(&sandbox, "begin", &step).ok();
        firn(&sandbox, "abort", &step).ok();

        // The commit is applied behind the answer, and the next transaction is open.
        let next = mount.join("steps/2");
        firn_with(&sandbox, "begin", &next, &["--create"]).ok();
        fs::write(next.join("file"), b"two").expect("write");
        firn_with(&sandbox, "commit", &next, &["--async", "--begin"]).ok();
        fs::write(next.join("file"), b"three").expect("write");
        firn(&sandbox, "abort", &next).ok();
        assert_eq!(fs::read(next.join("file")).expect("read"), b"two");
        let behind_next = mount.backing().join("steps/2/file");
        assert_eq!(fs::read(behind_next).expect("read"), b"two");
        mount.umount();
    }
}

/// Proves S-tx-101.
#[test]
fn a_directory_that_begin_cannot_make_is_refused_with_what_to_do() {
    let sandbox = Sandbox::new("txnocreate");
    let mount = FirnMount::new(&sandbox, COMMIT);
    fs::create_dir(mount.join("dir")).expect("mkdir");
    fs::write(mount.join("file"), b"x").expect("write");
    let create = |path: &str| firn_with(&sandbox, "begin", &mount.join(path), &["--create"]);
    let before = snapshot(mount.path());
    create("dir").code(1).says("it exists");
    create("file").code(1).says("it exists");
    create("none/dir").code(1).says("no such directory");
    create("file/dir").code(1).says("this is not a directory");
    create(".firn").code(1).says("it exists");
    create("").code(1).says("it exists");
    firn(&sandbox, "begin", &mount.join("dir")).ok();
    create("dir/new")
        .code(11)
        .says("a transaction is open in dir");
    create("new").ok();
    create("new").code(11).says("a transaction is open in new");
    create("new/below")
        .code(11)
        .says("a transaction is open in new");
    firn(&sandbox, "abort", &mount.join("new")).ok();
    firn(&sandbox, "abort", &mount.join("dir")).ok();
    assert_same("nothing is made", &snapshot(mount.path()), &before);
    mount.umount();
}

/// Proves S-tx-100, S-tx-102: what firnd's end leaves of a new top, and of a new name of a top.
#[test]
fn the_name_of_the_top_is_undone_or_waits_with_its_transaction() {
    for options in [COMMIT, SHADOW] {
        let sandbox = Sandbox::new("txtopkill");
        let mount = FirnMount::new(&sandbox, options);
        fs::create_dir(mount.join("old")).expect("mkdir");
        fs::write(mount.join("old/file"), b"old").expect("write");
        let before = snapshot(mount.path());
        let change = |mount: &FirnMount<'_>| {
            firn_with(&sandbox, "begin", &mount.join("made"), &["--create"]).ok();
            fs::write(mount.join("made/file"), b"new").expect("write");
            firn(&sandbox, "begin", &mount.join("old")).ok();
            fs::write(mount.join("old/file"), b"changed").expect("write");
            fs::rename(mount.join("old"), mount.join("renamed")).expect("rename");
            fs::write(mount.join("renamed/more"), b"more").expect("write");
        };
        change(&mount);
        mount.kill();
        let mount = FirnMount::new(&sandbox, options);
        assert_same("killed while open", &snapshot(mount.path()), &before);
        assert_same("in the backing", &behind(mount.backing()), &before);

        change(&mount);
        let after = snapshot(mount.path());
        firn_id(&sandbox, "prepare", &mount.join("made"), 1).ok();
        firn_id(&sandbox, "prepare", &mount.join("renamed"), 2).ok();
        mount.kill();
        let mount = FirnMount::new(&sandbox, options);
        let shown = if options == SHADOW { &after } else { &before };
        assert_same("prepared", &snapshot(mount.path()), shown);
        let taken = fs::create_dir(mount.join(if options == SHADOW { "old" } else { "made" }));
        let errno = taken.err().and_then(|error| error.raw_os_error());
        assert_eq!(errno, Some(libc::EBUSY), "the name is reserved");
        firn(&sandbox, "commit", &mount.join("made")).ok();
        firn(&sandbox, "commit", &mount.join("old"))
            .ok()
            .says("committed as 2");
        assert_same("committed", &snapshot(mount.path()), &after);
        assert_same("in the backing", &behind(mount.backing()), &after);
        mount.umount();
    }
}

/// Proves S-tx-102, S-tx-103, S-tx-104.
#[test]
fn the_top_is_renamed_in_its_parent_with_its_transaction() {
    for options in [COMMIT, SHADOW] {
        let sandbox = Sandbox::new("txtop");
        let mount = FirnMount::new(&sandbox, options);
        for name in ["work", "full/x", "empty"] {
            fs::create_dir_all(mount.join(name)).expect("mkdir");
        }
        fs::write(mount.join("work/file"), bytes(1, MIB)).expect("write");
        fs::File::create(mount.join("plain")).expect("create");
        let before = snapshot(mount.path());
        firn(&sandbox, "begin", &mount.join("work")).ok();
        let file = open_rw(&mount.join("work/file"));
        std::os::unix::fs::FileExt::write_all_at(&file, b"one", 0).expect("write");
        let rename = |from: &str, to: &str| {
            let renamed = fs::rename(mount.join(from), mount.join(to));
            renamed.err().and_then(|error| error.raw_os_error())
        };
        assert_eq!(rename("work", "plain"), Some(libc::ENOTDIR));
        assert_eq!(rename("work", "full"), Some(libc::ENOTEMPTY));
        assert_eq!(rename("work", "empty"), Some(libc::EBUSY));
        assert_eq!(rename("work", "empty/work"), Some(libc::EBUSY));
        assert_eq!(rename("work", "done"), None);
        assert!(!mount.join("work").exists() && mount.join("done/file").exists());
        std::os::unix::fs::FileExt::write_all_at(&file, b"two", 0).expect("write");
        let reserved = fs::create_dir(mount.join("work")).err();
        assert_eq!(
            reserved.and_then(|error| error.raw_os_error()),
            Some(libc::EBUSY)
        );
        let scopes: Vec<_> = mount
            .status()
            .transactions
            .iter()
            .map(|one| one.scope.clone())
            .collect();
        assert_eq!(scopes, ["done"]);
        firn(&sandbox, "umount", mount.path())
            .code(11)
            .says("a transaction is open in done");
        firn(&sandbox, "abort", &mount.join("done")).ok();
        assert_same("aborted", &behind(mount.backing()), &before);
        assert_same("aborted, as it is seen", &snapshot(mount.path()), &before);

        firn(&sandbox, "begin", &mount.join("work")).ok();
        std::os::unix::fs::FileExt::write_all_at(&file, b"four", 0).expect("write");
        assert_eq!(rename("work", "done"), None);
        // The path at the begin will do, too.
        firn(&sandbox, "prepare", &mount.join("work")).code(2);
        firn_id(&sandbox, "prepare", &mount.join("work"), 4).ok();
        assert_eq!(rename("done", "else"), Some(libc::EBUSY), "prepared");
        firn(&sandbox, "umount", mount.path())
            .code(11)
            .says("a transaction in done is prepared with id 4");
        firn_with(&sandbox, "commit", &mount.join("done"), &["--begin"]).ok();
        assert_eq!(rename("done", "else"), None, "the next one is open");
        fs::write(mount.join("else/new"), b"x").expect("write");
        firn(&sandbox, "abort", &mount.join("else")).ok();
        let seen = snapshot(mount.path());
        assert!(mount.join("done/file").exists() && !mount.join("done/new").exists());
        assert_same("committed", &behind(mount.backing()), &seen);
        drop(file);
        mount.umount();
    }
}

/// Proves S-tx-105.
#[test]
fn a_restore_brings_the_name_of_the_top_back() {
    let sandbox = Sandbox::new("txtopback");
    let mount = FirnMount::new(&sandbox, &format!("{COMMIT},history=3"));
    firn_with(&sandbox, "begin", &mount.join("a"), &["--create"]).ok();
    fs::write(mount.join("a/file"), b"1").expect("write");
    firn(&sandbox, "commit", &mount.join("a")).ok().says("as 1");
    let first = snapshot(mount.path());
    firn(&sandbox, "begin", &mount.join("a")).ok();
    fs::write(mount.join("a/file"), b"22").expect("write");
    fs::rename(mount.join("a"), mount.join("b")).expect("rename");
    firn(&sandbox, "commit", &mount.join("b")).ok().says("as 2");
    assert!(mount.backing().join("b").exists() && !mount.backing().join("a").exists());
    firn_id(&sandbox, "restore", &mount.join("b"), 1).ok();
    assert_same("restored", &snapshot(mount.path()), &first);
    assert_same("in the backing", &behind(mount.backing()), &first);
    firn_id(&sandbox, "restore", &mount.join("a"), 0)
        .code(1)
        .says("not kept");
    mount.umount();
}

/// Proves S-tx-9, S-tx-49, S-tx-50.
#[test]
fn what_cannot_be_is_refused_with_what_to_do() {
    let sandbox = Sandbox::new("txbad");
    let plain = FirnMount::new(&sandbox, "arena-size=32M,chunk-size=1M");
    firn(&sandbox, "begin", plain.path())
        .code(1)
        .says("drain=commit");
    plain.umount();
    let mount = FirnMount::new(&sandbox, COMMIT);
    firn(&sandbox, "commit", mount.path())
        .code(1)
        .says("firn begin");
    firn(&sandbox, "abort", mount.path())
        .code(1)
        .says("firn begin");
    firn(&sandbox, "begin", &mount.join("missing"))
        .code(1)
        .says("no such directory");
    fs::write(mount.join("file"), b"x").expect("write");
    firn(&sandbox, "begin", &mount.join("file"))
        .code(1)
        .says("directory");
    firn(&sandbox, "begin", mount.path()).ok();
    firn(&sandbox, "begin", mount.path())
        .code(11)
        .says("the whole mount");
    assert!(
        fs::create_dir(mount.join(".firn")).is_err(),
        "that name is Firn's"
    );
    assert!(
        fs::read_dir(mount.path())
            .expect("list")
            .all(|e| e.expect("entry").file_name() != ".firn")
    );
    firn(&sandbox, "umount", mount.path())
        .code(11)
        .says("transaction is open");
    fs::write(mount.join("file"), b"y").expect("the mount stays");
    sandbox
        .run([
            OsStr::new("umount"),
            OsStr::new("--force"),
            mount.path().as_os_str(),
        ])
        .ok();
    mount.wait_for_end();
    assert_eq!(
        fs::read(mount.backing().join("file")).expect("read"),
        b"x",
        "undone"
    );
}

/// Proves S-tx-1, S-tx-2, S-tx-3, S-tx-4, S-tx-7.
#[test]
fn a_c_program_begins_prepares_commits_aborts_and_restores() {
    let sandbox = Sandbox::new("txc");
    let installed = Installed::new(&sandbox);
    let mount = FirnMount::new(&sandbox, COMMIT);
    for link in [Link::Shared, Link::Static] {
        let program = installed.compile("tests/c/transaction.c", link);
        let dir = mount.join(format!("{link:?}"));
        fs::create_dir(&dir).expect("mkdir");
        run(installed.command(&program).arg("steps").arg(&dir)).ok();
        assert_eq!(fs::read(dir.join("file")).expect("read"), b"fifth");
        let behind = mount.backing().join(format!("{link:?}/file"));
        assert_eq!(
            fs::read(behind).expect("read"),
            b"fifth",
            "the backing has what was committed"
        );
    }
    let program = installed.compile("tests/c/transaction.c", Link::Shared);
    run(installed
        .command(&program)
        .arg("errors")
        .arg(mount.path())
        .arg(sandbox.path()))
    .ok();
    mount.umount();
    let plain = FirnMount::new(&sandbox, "arena-size=32M,chunk-size=1M");
    run(installed.command(&program).arg("refused").arg(plain.path())).ok();
    plain.umount();
}

/// A transaction answers as most file systems do.
fn rules(kind: FsKind) -> Rules {
    match kind {
        FsKind::Xfs => Rules {
            // A directory that an exchange moves to another parent gets a new time there.
            is_wanted: |op| {
                !matches!(
                    op,
                    Op::Rename {
                        flags: EXCHANGE,
                        ..
                    }
                )
            },
            // Of a rename over a directory that is not empty, POSIX allows both.
            canonical: |answer| match answer {
                Answer::Failed(Errno::NOTEMPTY) => Answer::Failed(Errno::EXIST),
                other => other,
            },
        },
        _ => Rules {
            is_wanted: |_| true,
            canonical: |answer| answer,
        },
    }
}

fn same_as_plain(kind: FsKind, options: &str) {
    let is_shadow = options == SHADOW;
    let sandbox = Sandbox::new(&format!(
        "tx{}-{}",
        if is_shadow { "shadow" } else { "diff" },
        kind.name()
    ));
    let image = LoopImage::new(&sandbox, kind, 400);
    let backing = image.mkdir("backing");
    let plain = image.mkdir("plain");
    let mount = FirnMount::over(
        &sandbox,
        &backing,
        &format!("{options},allow-other,dev,suid"),
    );
    let ops = env_count("FIRN_DIFFERENTIAL_OPS", 1000);
    let seed = seed(&format!("differential in transactions on {}", kind.name()));
    let both = |seed| differential::run_by(seed, ops, mount.path(), &plain, &rules(kind));
    both(seed);
    for round in 1..=3 {
        firn(&sandbox, "begin", mount.path()).ok();
        let before = behind(&backing);
        both(seed + round);
        if !is_shadow {
            assert_same("the backing in a transaction", &behind(&backing), &before);
        }
        firn(&sandbox, "commit", mount.path()).ok();
        assert_same(
            "the backing after a commit",
            &behind(&backing),
            &snapshot(&plain),
        );
    }
    firn(&sandbox, "begin", mount.path()).ok();
    let scratch = image.mkdir("scratch");
    run(std::process::Command::new("cp")
        .arg("-a")
        .arg(plain.join("."))
        .arg(&scratch))
    .ok();
    let mut rng = generator(seed + 9);
    let mut side = Side::new(mount.path());
    (0..ops).for_each(|_| drop(side.perform(&draw(&mut rng))));
    drop(side);
    firn(&sandbox, "abort", mount.path()).ok();
    assert_same("after an abort", &snapshot(mount.path()), &snapshot(&plain));
    mount.umount();
    assert_same(
        "the backing in the end",
        &behind(&backing),
        &snapshot(&plain),
    );
}

/// Proves S-tx-1, S-tx-2, S-tx-3.
#[test]
fn same_as_plain_on_ext4() {
    same_as_plain(FsKind::Ext4, COMMIT);
}

/// Proves S-tx-1, S-tx-2, S-tx-3.
#[test]
fn same_as_plain_on_xfs() {
    same_as_plain(FsKind::Xfs, COMMIT);
}

/// Proves S-tx-1, S-tx-2, S-tx-3.
#[test]
fn same_as_plain_on_btrfs() {
    same_as_plain(FsKind::Btrfs, COMMIT);
}

/// Proves S-tx-1, S-tx-2, S-tx-3.
#[test]
fn same_as_plain_on_tmpfs() {
    same_as_plain(FsKind::Tmpfs, COMMIT);
}

/// Proves S-tx-20, S-tx-21, S-tx-22.
#[test]
fn same_as_plain_in_shadow_mode_on_ext4() {
    same_as_plain(FsKind::Ext4, SHADOW);
}

/// Proves S-tx-20, S-tx-21, S-tx-22.
#[test]
fn same_as_plain_in_shadow_mode_on_xfs() {
    same_as_plain(FsKind::Xfs, SHADOW);
}

/// Proves S-tx-20, S-tx-21, S-tx-22.
#[test]
fn same_as_plain_in_shadow_mode_on_btrfs() {
    same_as_plain(FsKind::Btrfs, SHADOW);
}

/// Proves S-tx-20, S-tx-21, S-tx-22.
#[test]
fn same_as_plain_in_shadow_mode_on_tmpfs() {
    same_as_plain(FsKind::Tmpfs, SHADOW);
}

/// Transactions over files in logs, in lanes, and in both.
fn same_as_plain_in_layers(name: &str, options: &str, layers: Layers) {
    let sandbox = Sandbox::new(name);
    let image = LoopImage::new(&sandbox, FsKind::Ext4, 400);
    let backing = image.mkdir("backing");
    let plain = image.mkdir("plain");
    let lanes = ["lane0", "lane1"].map(|name| image.mkdir(name));
    let options = layers.options(&lanes, &format!("{options},allow-other,dev,suid"));
    let rules = layers.rules();
    let mount = FirnMount::over(&sandbox, &backing, &options);
    let ops = env_count("FIRN_DIFFERENTIAL_OPS", 1000);
    let seed = seed(&format!("differential in transactions with {options}"));
    let both = |seed| differential::run_by(seed, ops, mount.path(), &plain, &rules);
    both(seed);
    for round in 1..=3 {
        firn(&sandbox, "begin", mount.path()).ok();
        both(seed + round);
        firn(&sandbox, "commit", mount.path()).ok();
        let seen = snapshot(mount.path());
        assert_same("after a commit", &seen, &snapshot(&plain));
    }
    firn(&sandbox, "begin", mount.path()).ok();
    let mut rng = generator(seed + 9);
    let mut side = Side::new(mount.path());
    for op in (0..ops).map(|_| draw(&mut rng)) {
        if (rules.is_wanted)(&op) {
            side.perform(&op);
        }
    }
    drop(side);
    firn(&sandbox, "abort", mount.path()).ok();
    assert_same("after an abort", &snapshot(mount.path()), &snapshot(&plain));
    mount.umount();
    let again = FirnMount::over(&sandbox, &backing, "allow-other,dev,suid");
    assert_same("the next mount", &snapshot(again.path()), &snapshot(&plain));
    again.umount();
    sandbox
        .run([
            OsStr::new("check"),
            OsStr::new("--orphans"),
            backing.as_os_str(),
        ])
        .ok();
}

/// Proves S-tx-1, S-tx-2, S-tx-3, S-tx-123.
#[test]
fn same_as_plain_with_files_in_logs() {
    same_as_plain_in_layers("txdifflog", COMMIT, Layers::Logs);
}

/// Proves S-tx-1, S-tx-2, S-tx-3, S-tx-123.
#[test]
fn same_as_plain_with_files_in_lanes() {
    same_as_plain_in_layers("txdifflanes", COMMIT, Layers::Lanes);
}

/// Proves S-tx-1, S-tx-2, S-tx-3, S-tx-123.
#[test]
fn same_as_plain_with_files_in_logs_in_lanes() {
    same_as_plain_in_layers("txdiffall", COMMIT, Layers::LogsInLanes);
}

/// Proves S-tx-20, S-tx-21, S-tx-22, S-tx-123.
#[test]
fn same_as_plain_in_shadow_mode_with_files_in_logs_in_lanes() {
    same_as_plain_in_layers("txshadowall", SHADOW, Layers::LogsInLanes);
}

/// Proves S-tx-1.
#[test]
fn pjdfstest_passes_in_a_transaction_as_it_does_natively() {
    pjdfstest_passes("txpjd", COMMIT);
}

/// Proves S-tx-20.
#[test]
fn pjdfstest_passes_in_shadow_mode_as_it_does_natively() {
    pjdfstest_passes("txpjdshadow", SHADOW);
}

fn pjdfstest_passes(name: &str, options: &str) {
    let sandbox = Sandbox::new(name);
    let image = LoopImage::new(&sandbox, FsKind::Ext4, 400);
    let backing = image.mkdir("backing");
    let mount = FirnMount::over(
        &sandbox,
        &backing,
        &format!("{options},allow-other,dev,suid"),
    );
    let native = pjdfstest(&image.mkdir("native"), sandbox.path());
    let work = mount.join("work");
    fs::create_dir(&work).expect("mkdir");
    firn(&sandbox, "begin", mount.path()).ok();
    let (through, failures) = pjdfstest_beside(&native, &work, sandbox.path());
    println!(
        "{} ran natively, {} in a transaction",
        native.len(),
        through.len()
    );
    assert!(
        failures.is_empty(),
        "fail in a transaction and not on ext4: {failures:#?}"
    );
    let seen = snapshot(mount.path());
    firn(&sandbox, "commit", mount.path()).ok();
    assert_same("after the commit", &behind(&backing), &seen);
    mount.umount();
}

/// How a round ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// firnd is killed while programs change things.
    Open,
    /// firnd is killed while `firn commit` runs, or just after.
    Committing,
    /// firnd is killed after `firn prepare`; then the files are restored, or given up.
    Prepared,
}

on_every_layers! {
    /// Proves S-tx-2, S-tx-3, S-tx-4, S-tx-41, S-tx-46.
    killed_at_any_moment_the_tree_is_the_old_one_or_the_new_one: killed_in_buffer_mode(None);
    /// Proves S-tx-123.
    killed_at_any_moment_with_files_in_logs_the_tree_is_the_old_one_or_the_new_one: killed_in_buffer_mode(Logs);
    /// Proves S-tx-123.
    killed_at_any_moment_with_files_in_lanes_the_tree_is_the_old_one_or_the_new_one: killed_in_buffer_mode(Lanes);
    /// Proves S-tx-123.
    killed_at_any_moment_with_files_in_logs_in_lanes_the_tree_is_the_old_one_or_the_new_one: killed_in_buffer_mode(LogsInLanes);
}

on_every_layers! {
    /// Proves S-tx-21, S-tx-22, S-tx-23, S-tx-74, S-tx-76.
    killed_at_any_moment_in_shadow_mode_the_tree_is_the_old_one_or_the_new_one: killed_in_shadow_mode(None);
    /// Proves S-tx-123.
    killed_at_any_moment_in_shadow_mode_with_files_in_logs_the_tree_is_the_old_one_or_the_new_one: killed_in_shadow_mode(Logs);
    /// Proves S-tx-123.
    killed_at_any_moment_in_shadow_mode_with_files_in_lanes_the_tree_is_the_old_one_or_the_new_one: killed_in_shadow_mode(Lanes);
    /// Proves S-tx-123.
    killed_at_any_moment_in_shadow_mode_with_files_in_logs_in_lanes_the_tree_is_the_old_one_or_the_new_one: killed_in_shadow_mode(LogsInLanes);
}

fn killed_in_buffer_mode(layers: Layers) {
    killed_at_any_moment(COMMIT, layers);
}

fn killed_in_shadow_mode(layers: Layers) {
    killed_at_any_moment(SHADOW, layers);
}

fn killed_at_any_moment(mode: &str, layers: Layers) {
    let is_shadow = mode == SHADOW;
    let rounds = env_count("FIRN_CRASH_ROUNDS", KILLS);
    let seed = seed(&format!("kill -9 in transactions with {mode}, {layers:?}"));
    let start = Instant::now();
    let mut rng = generator(seed);
    let sandbox = Sandbox::new("txcrash");
    let plain = sandbox.mkdir("plain");
    let lanes = ["lane0", "lane1"].map(|name| sandbox.mkdir(name));
    let mut counts = [0; 3];
    // As the plain directory is mounted.
    let options = layers.options(&lanes, &format!("{mode},allow-other,dev,suid"));
    let rules = layers.rules();
    for round in 0..rounds {
        let told = format!("seed {seed}, round {round}");
        let direct = round % 2 == 1;
        let mount = FirnMount::new(&sandbox, &options);
        let old = snapshot(&plain);
        assert_same(
            &format!("{told}: at the begin"),
            &snapshot(mount.path()),
            &old,
        );
        firn(&sandbox, "begin", mount.path()).ok();
        differential::run_by(seed + round, 300, mount.path(), &plain, &rules);
        if direct {
            // Past the kernel, as a job would.
            let data = sandbox.join("data");
            fs::write(&data, bytes(round, MIB + 4097)).expect("write");
            for to in [mount.path(), plain.as_path()] {
                let mut copy = std::process::Command::new("cp");
                copy.arg(&data)
                    .arg(to.join("big"))
                    .env("LD_PRELOAD", preload_library());
                run(&mut copy).ok();
            }
        }
        let new = snapshot(&plain);
        let end = [End::Open, End::Committing, End::Prepared][rng.random_range(0..3)];
        counts[end as usize] += 1;
        let mut committed = false;
        match end {
            End::Open => {
                let killer = kill_later(mount.pid(), rng.random_range(0..20_000));
                let mut side = Side::new(mount.path());
                let mut ops = generator(seed ^ round);
                for op in (0..200).map(|_| draw(&mut ops)) {
                    // These end the test where they fail, a mapping by SIGBUS.
                    if !matches!(op, Op::Xattrs { .. } | Op::ReadMapped { .. }) {
                        side.perform(&op);
                    }
                }
                killer.join().expect("join");
            }
            End::Committing => {
                let mut commit = sandbox.firn([OsStr::new("commit"), mount.path().as_os_str()]);
                let mut commit = commit.spawn().expect("firn commit");
                kill_later(mount.pid(), rng.random_range(0..60_000))
                    .join()
                    .expect("join");
                committed = wait_child(&mut commit, Duration::from_secs(60))
                    .expect("it ends")
                    .success();
            }
            End::Prepared => {
                firn_id(&sandbox, "prepare", mount.path(), round).ok();
                kill(mount.pid(), libc::SIGKILL);
            }
        }
        mount.kill();
        let mount = FirnMount::new(&sandbox, &options);
        let restored = end == End::Prepared && rng.random();
        if end == End::Prepared {
            let shown = if is_shadow { &new } else { &old };
            assert_same(
                &format!("{told}: undecided"),
                &snapshot(mount.path()),
                shown,
            );
            if restored {
                firn_id(&sandbox, "restore", mount.path(), round).ok();
            } else {
                firn(&sandbox, "abort", mount.path()).ok();
            }
        }
        let now = snapshot(mount.path());
        let is_new = now == new;
        let is_old = now == old;
        let what = format!("{told}: {end:?}, committed {committed}, restored {restored}");
        let close = differences(&now, if committed || restored { &new } else { &old });
        assert!(
            is_new || is_old,
            "{what}: neither old nor new: {}",
            close.join("\n")
        );
        assert!(
            is_new || !(committed || restored),
            "{what}: the commit is lost: {}",
            close.join("\n")
        );
        assert!(
            is_old || end == End::Committing || restored,
            "{what}: it was never committed"
        );
        let backing = mount.umount();
        // In lanes the backing has links.
        let again = layers
            .has_lanes()
            .then(|| FirnMount::new(&sandbox, "allow-other,dev,suid,attr-timeout=0"));
        let backing = again
            .as_ref()
            .map_or(backing, |mount| mount.path().to_owned());
        assert_same(&format!("{what}: in the backing"), &behind(&backing), &now);
        if !is_new {
            // The plain directory goes back, too.
            fs::remove_dir_all(&plain).expect("remove");
            fs::create_dir(&plain).expect("mkdir");
            let from = backing.join(".");
            run(std::process::Command::new("cp")
                .arg("-a")
                .arg(from)
                .arg(&plain))
            .ok();
            if again.is_none() {
                fs::remove_dir_all(plain.join(".firn")).expect("remove");
            }
        }
        if let Some(again) = again {
            again.umount();
        }
        if layers != Layers::None {
            // Nothing is left of what was undone.
            firn_with(&sandbox, "check", &sandbox.join("backing"), &["--orphans"]).ok();
        }
    }
    println!(
        "{mode}, {layers:?}: {rounds} rounds in {:?}: killed {} while open, {} while committing, {} prepared",
        start.elapsed(),
        counts[0],
        counts[1],
        counts[2]
    );
}

fn kill_later(pid: u32, us: u64) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_micros(us));
        kill(pid, libc::SIGKILL);
    })
}
