//! Transactions in shadow mode: changes go to the backing, and what undoes them is saved.
//!
//! What programs see is compared with a plain directory in `transactions.rs`, in both modes.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;

use firn_tests::fsops::{assert_same_bytes, open_rw, read};
use firn_tests::random::bytes;
use firn_tests::transaction::{behind, firn, firn_id, firn_with};
use firn_tests::tree::{assert_same, snapshot};
use firn_tests::{FirnMount, FsKind, LoopImage, Sandbox};

const SHADOW: &str = "arena-size=32M,chunk-size=1M,drain=commit,mode=shadow";
const MIB: usize = 1 << 20;

/// Files and directories to be changed.
fn fill(dir: &Path) {
    fs::write(dir.join("big"), bytes(1, 3 * MIB + 5)).expect("write");
    fs::write(dir.join("log"), bytes(2, 10_000)).expect("write");
    fs::create_dir(dir.join("dir")).expect("mkdir");
    fs::write(dir.join("dir/in"), b"in").expect("write");
    fs::hard_link(dir.join("log"), dir.join("dir/link")).expect("link");
    fs::create_dir(dir.join("empty")).expect("mkdir");
}

/// One change of each kind.
fn change(dir: &Path) {
    open_rw(&dir.join("big"))
        .write_all_at(&bytes(3, MIB), 700_000)
        .expect("write");
    let mut log = fs::OpenOptions::new()
        .append(true)
        .open(dir.join("log"))
        .expect("open");
    log.write_all(b"a line more").expect("append");
    drop(log);
    fs::set_permissions(dir.join("log"), PermissionsExt::from_mode(0o600)).expect("chmod");
    fs::create_dir(dir.join("made")).expect("mkdir");
    fs::rename(dir.join("dir/in"), dir.join("made/moved")).expect("rename");
    fs::remove_file(dir.join("dir/link")).expect("unlink");
    fs::rename(dir.join("dir"), dir.join("made/dir")).expect("rename");
    fs::remove_dir(dir.join("empty")).expect("rmdir");
    fs::write(dir.join("tmp"), bytes(4, 5000)).expect("write");
    fs::rename(dir.join("tmp"), dir.join("log")).expect("rename over");
}

/// Proves S-tx-20, S-tx-21.
#[test]
fn the_backing_shows_each_change_and_an_abort_takes_it_back() {
    let sandbox = Sandbox::new("shadow");
    let mount = FirnMount::new(&sandbox, SHADOW);
    fill(mount.path());
    firn(&sandbox, "begin", mount.path()).ok();
    let before = snapshot(mount.path());
    let reader = fs::File::open(mount.join("log")).expect("open");
    change(mount.path());
    // What is closed is there for other hosts.
    let big = read(&mount.backing().join("big"));
    assert_same_bytes("in the backing", &big, &read(&mount.join("big")));
    assert_eq!(
        fs::read(mount.backing().join("made/moved")).expect("read"),
        b"in"
    );
    assert!(!mount.backing().join("empty").exists());
    assert_eq!(
        reader.metadata().expect("stat").nlink(),
        0,
        "for programs it has no name"
    );
    let error = fs::read_dir(mount.path())
        .expect("list")
        .find(|e| e.as_ref().expect("entry").file_name() == ".firn");
    assert!(error.is_none(), "what is saved is not shown");
    assert!(
        firn(&sandbox, "status", mount.path())
            .ok()
            .stdout
            .contains("mode=shadow")
    );

    firn(&sandbox, "abort", mount.path()).ok();
    assert_same("through the mount", &snapshot(mount.path()), &before);
    assert_same("in the backing", &behind(mount.backing()), &before);
    assert_same_bytes(
        "an open file",
        &firn_tests::fsops::read_at(&reader, 0, 20_000),
        &bytes(2, 10_000),
    );
    drop(reader);

    firn(&sandbox, "begin", mount.path()).ok();
    change(mount.path());
    let seen = snapshot(mount.path());
    firn_id(&sandbox, "commit", mount.path(), 3).ok();
    assert_same("committed", &behind(mount.backing()), &seen);
    let left: Vec<_> = fs::read_dir(mount.backing().join(".firn"))
        .expect("list")
        .flatten()
        .collect();
    assert_eq!(left.len(), 1, "only the number: {left:?}");
    firn(&sandbox, "begin", mount.path()).ok();
    fs::remove_dir_all(mount.join("made")).expect("remove");
    firn_id(&sandbox, "restore", mount.path(), 3).ok();
    assert_same("restored", &snapshot(mount.path()), &seen);
    mount.umount();
}

/// Proves S-tx-21, S-tx-23.
#[test]
fn what_firnd_leaves_open_is_undone_and_what_is_prepared_waits() {
    let sandbox = Sandbox::new("shadowkill");
    let mount = FirnMount::new(&sandbox, SHADOW);
    fill(mount.path());
    firn(&sandbox, "begin", mount.path()).ok();
    let before = snapshot(mount.path());
    change(mount.path());
    mount.kill();
    let mount = FirnMount::new(&sandbox, SHADOW);
    assert_same("undone", &snapshot(mount.path()), &before);
    mount.umount();
    for outcome in ["abort", "commit"] {
        let mount = FirnMount::new(&sandbox, SHADOW);
        firn(&sandbox, "begin", mount.path()).ok();
        change(mount.path());
        let seen = snapshot(mount.path());
        firn_id(&sandbox, "prepare", mount.path(), 17).ok();
        mount.kill();
        let mount = FirnMount::new(&sandbox, SHADOW);
        assert_same("prepared", &snapshot(mount.path()), &seen);
        let refused = fs::File::create(mount.join("else"))
            .err()
            .and_then(|error| error.raw_os_error());
        assert_eq!(
            refused,
            Some(libc::EBUSY),
            "until it is decided nothing changes"
        );
        firn(&sandbox, outcome, mount.path()).ok();
        let expected = if outcome == "abort" { &before } else { &seen };
        assert_same(outcome, &snapshot(mount.path()), expected);
        assert_same(outcome, &behind(mount.backing()), expected);
        mount.umount();
    }
}

/// Proves S-tx-100, S-tx-102, S-tx-106.
#[test]
fn the_backing_shows_a_new_top_and_a_new_name_at_once_until_they_are_undone() {
    let sandbox = Sandbox::new("shadowtop");
    let mut mount = FirnMount::new(&sandbox, SHADOW);
    let steps = mount.join("steps");
    fs::create_dir_all(steps.join("old")).expect("mkdir");
    fill(&steps.join("old"));
    fs::write(steps.join("beside"), b"of nobody").expect("write");
    let before = snapshot(mount.path());
    let in_backing = mount.backing().join("steps");
    let names = |dir: &Path| {
        let entries = fs::read_dir(dir).expect("list");
        let mut names: Vec<_> = entries
            .map(|entry| entry.expect("entry").file_name())
            .collect();
        names.sort();
        names
    };
    for end in ["abort", "kill", "killed while prepared", "commit"] {
        firn_with(&sandbox, "begin", &steps.join("new"), &["--create"]).ok();
        assert_eq!(names(&in_backing), ["beside", "new", "old"], "{end}");
        fill(&steps.join("new"));
        firn(&sandbox, "begin", &steps.join("old")).ok();
        change(&steps.join("old"));
        for (from, to) in [("old", "other"), ("other", "old"), ("old", "done")] {
            fs::rename(steps.join(from), steps.join(to)).expect("rename");
            let mut expected = ["beside", "new", to];
            expected.sort_unstable();
            assert_eq!(names(&in_backing), expected, "{end}");
        }
        fs::rename(steps.join("new"), steps.join("newer")).expect("rename");
        change(&steps.join("newer"));
        fs::write(steps.join("done/last"), bytes(5, 9000)).expect("write");
        let seen = snapshot(mount.path());
        assert_same(end, &behind(mount.backing()), &seen);

        match end {
            "abort" => {
                firn(&sandbox, "abort", &steps.join("newer")).ok();
                firn(&sandbox, "abort", &steps.join("done")).ok();
            }
            "kill" => {
                mount.kill();
                mount = FirnMount::new(&sandbox, SHADOW);
            }
            "killed while prepared" => {
                firn_id(&sandbox, "prepare", &steps.join("newer"), 3).ok();
                firn_id(&sandbox, "prepare", &steps.join("done"), 4).ok();
                mount.kill();
                mount = FirnMount::new(&sandbox, SHADOW);
                assert_same(end, &snapshot(mount.path()), &seen);
                // Known by the present path, and by the one at the begin.
                firn(&sandbox, "abort", &steps.join("newer")).ok();
                firn(&sandbox, "abort", &steps.join("old")).ok();
            }
            _ => {
                let commit = |name: &str| firn(&sandbox, "commit", &steps.join(name)).ok();
                commit("newer").says("committed as 1");
                commit("done").says("committed as 1");
            }
        }
        let expected = if end == "commit" { &seen } else { &before };
        assert_same(end, &snapshot(mount.path()), expected);
        assert_same(end, &behind(mount.backing()), expected);
    }
    mount.umount();
}

/// Proves S-tx-24.
#[test]
fn a_change_that_cannot_be_saved_fails_and_harms_nothing() {
    let sandbox = Sandbox::new("shadowfull");
    let image = LoopImage::new(&sandbox, FsKind::Tmpfs, 24);
    let backing = image.mkdir("backing");
    let mount = FirnMount::over(&sandbox, &backing, SHADOW);
    fs::write(mount.join("file"), bytes(1, 14 * MIB)).expect("write");
    firn(&sandbox, "begin", mount.path()).ok();
    let before = snapshot(mount.path());
    let file = open_rw(&mount.join("file"));
    file.write_all_at(b"no room to save what this changes", 0)
        .expect("it is taken");
    let error = file.sync_all().err().and_then(|error| error.raw_os_error());
    assert_eq!(error, Some(libc::ENOSPC));
    assert_same_bytes(
        "in the backing",
        &read(&backing.join("file")),
        &bytes(1, 14 * MIB),
    );
    drop(file);
    firn(&sandbox, "abort", mount.path()).ok();
    assert_same("aborted", &snapshot(mount.path()), &before);
    mount.umount();
}

/// Proves S-tx-78.
#[test]
fn history_is_refused_with_what_to_do() {
    let sandbox = Sandbox::new("shadowhistory");
    let backing = sandbox.mkdir("backing");
    let point = sandbox.mkdir("mnt");
    let mount = |options: &str| {
        sandbox.run([
            OsStr::new("mount"),
            backing.as_os_str(),
            point.as_os_str(),
            OsStr::new("-o"),
            OsStr::new(options),
        ])
    };
    mount("drain=commit,mode=shadow,history=2")
        .code(2)
        .says("mode=buffer");
    mount("mode=shadow,drain=eager")
        .code(2)
        .says("drain=commit");
}
