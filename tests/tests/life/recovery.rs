//! Back to the tree before a transaction: by `firn abort`, by `firn restore`, by the next mount after firnd died, and by
//! a `firn recover` that is killed as well, at one call after the other.
//!
//! `FIRN_CALLS` sets how many of these calls are tried in each mode (all: a large number), `FIRN_SEED` which.

use std::ffi::{CString, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, chown};
use std::path::Path;

use firn_tests::fsops::open_rw;
use firn_tests::random::{bytes, env_count};
use firn_tests::trace::{CHANGING, Ended, kill_at_call};
use firn_tests::transaction::{behind, firn, firn_id};
use firn_tests::tree::{Tree, assert_same, snapshot};
use firn_tests::{FirnMount, Sandbox, seed};

/// Nothing drains unless it is asked for.
const OPTIONS: &str = "arena-size=16M,chunk-size=1M,drain=commit,close=held,drain-age=10min";

/// When the files of these tests were last changed, in 2001: what changes them now is seen.
const OLD_SEC: i64 = 1_000_000_000;

fn set_times(path: &Path, sec: i64) {
    let name = CString::new(path.as_os_str().as_bytes()).expect("no zero byte");
    let time = |sec| libc::timespec {
        tv_sec: sec,
        tv_nsec: 5,
    };
    let times = [time(sec - 1), time(sec)];
    let flags = libc::AT_SYMLINK_NOFOLLOW;
    // SAFETY: the name ends with a zero byte, the two times outlive the call.
    let set = unsafe { libc::utimensat(libc::AT_FDCWD, name.as_ptr(), times.as_ptr(), flags) };
    assert_eq!(
        set,
        0,
        "utimensat {path:?}: {}",
        std::io::Error::last_os_error()
    );
}

/// Gives all that is below `top`, and it, the same old times.
fn age(top: &Path) {
    let meta = fs::symlink_metadata(top).expect("stat");
    if meta.is_dir() {
        for entry in fs::read_dir(top).expect("read_dir") {
            age(&entry.expect("an entry").path());
        }
    }
    set_times(top, OLD_SEC);
}

/// A firnd died in a transaction in `job/`: some of its changes are in the backing or staged there, others only in the
/// arena. Returns the tree that every recovery must end in.
fn died_in_a_transaction(sandbox: &Sandbox, options: &str) -> Tree {
    let mount = FirnMount::new(sandbox, options);
    fs::create_dir(mount.join("job")).expect("mkdir");
    for name in ["job/over", "job/cut", "job/moved", "job/gone", "beside"] {
        fs::write(mount.join(name), bytes(1, 50_000)).expect("write");
    }
    age(&mount.join("job"));
    mount.wait("drained", mount.path()).ok();
    let wanted = snapshot(mount.path());
    firn(sandbox, "begin", &mount.join("job")).ok();

    let over = open_rw(&mount.join("job/over"));
    over.write_all_at(&bytes(2, 20_000), 0).expect("write");
    fs::write(mount.join("job/made"), bytes(3, 20_000)).expect("write");
    mount.wait("drained", &mount.join("job")).ok();
    over.write_all_at(&bytes(4, 30_000), 10_000).expect("write");
    over.write_all_at(&bytes(5, 9_000), 50_000).expect("write");
    let cut = open_rw(&mount.join("job/cut"));
    cut.write_all_at(&bytes(6, 3_000), 100).expect("write");
    cut.set_len(2_000).expect("truncate");
    let moved = open_rw(&mount.join("job/moved"));
    moved.write_all_at(&bytes(7, 3_000), 100).expect("write");
    fs::rename(mount.join("job/moved"), mount.join("job/there")).expect("rename");
    fs::remove_file(mount.join("job/gone")).expect("remove");
    fs::write(mount.join("job/new"), bytes(8, 5_000)).expect("write");
    drop((over, cut, moved));
    mount.kill();
    wanted
}

/// Proves S-tx-3, S-tx-21, S-tx-41, S-tx-76.
#[test]
fn regression_a_recovery_that_is_killed_at_any_call_brings_back_nothing_of_the_transaction() {
    let seed = seed("a_recovery_that_is_killed");
    let tried = env_count("FIRN_CALLS", 12) as usize;
    for mode in ["buffer", "shadow"] {
        let options = format!("{OPTIONS},mode={mode}");
        let recover = |sandbox: &Sandbox, kill_at: usize| {
            let mut command =
                sandbox.firn([OsString::from("recover"), sandbox.join("backing").into()]);
            kill_at_call(&mut command, &CHANGING, kill_at)
        };
        let sandbox = Sandbox::new("killedrecovery");
        let wanted = died_in_a_transaction(&sandbox, &options);
        let Ended::Exited(0, calls) = recover(&sandbox, usize::MAX) else {
            panic!("it ends by itself")
        };
        assert_same(
            "after a recovery",
            &behind(&sandbox.join("backing")),
            &wanted,
        );
        assert!(calls > 0, "it changes something");
        let stride = calls.div_ceil(tried).max(1);
        println!("{mode}: {calls} calls, each {stride}th");
        for kill_at in (seed as usize % stride..calls).step_by(stride) {
            let told = format!("{mode}, killed at call {kill_at} of {calls}, seed {seed}");
            let sandbox = Sandbox::new("killedrecovery");
            let wanted = died_in_a_transaction(&sandbox, &options);
            // What the threads of the drain do is not at the same place each time.
            let ended = recover(&sandbox, kill_at);
            assert!(
                matches!(ended, Ended::Killed | Ended::Exited(0, _)),
                "{told}: {ended:?}"
            );
            if kill_at % 2 == 0 {
                sandbox
                    .run([OsString::from("recover"), sandbox.join("backing").into()])
                    .ok();
            } else {
                let mount = FirnMount::new(&sandbox, &options);
                assert_same(&told, &snapshot(mount.path()), &wanted);
                mount.umount();
            }
            assert_same(&told, &behind(&sandbox.join("backing")), &wanted);
            assert!(sandbox.arenas().is_empty(), "{told}: the arena goes");
        }
    }
}

/// What a transaction may do to a file, each to one of its own, or to a name.
const KINDS: [&str; 15] = [
    "overwritten",
    "overwritten-a-little",
    "cut",
    "cut-to-nothing",
    "appended-to",
    "grown",
    "cut-and-written",
    "chmod",
    "chown",
    "renamed",
    "utimens",
    "xattr",
    "removed",
    "replaced",
    "linked",
];

fn set_xattr(path: &Path, value: &[u8]) {
    let name = CString::new(path.as_os_str().as_bytes()).expect("no zero byte");
    // SAFETY: both names end with a zero byte, the value is as long as is said.
    let set = unsafe {
        libc::setxattr(
            name.as_ptr(),
            c"user.kind".as_ptr(),
            value.as_ptr().cast(),
            value.len(),
            0,
        )
    };
    assert_eq!(
        set,
        0,
        "setxattr {path:?}: {}",
        std::io::Error::last_os_error()
    );
}

/// Makes a file for each of [`KINDS`], in directories, all of them old.
fn make_old_files(top: &Path) {
    for dir in ["dir", "dir/below", "gone"] {
        fs::create_dir(top.join(dir)).expect("mkdir");
    }
    for kind in KINDS {
        for name in [kind.to_owned(), format!("dir/below/{kind}")] {
            fs::write(top.join(&name), bytes(1, 300_000)).expect("write");
            set_xattr(&top.join(&name), b"before");
        }
    }
    std::os::unix::fs::symlink("cut", top.join("link")).expect("symlink");
    age(top);
}

fn change_all(top: &Path) {
    for dir in [top.to_owned(), top.join("dir/below")] {
        let at = |kind: &str| dir.join(kind);
        let write = |kind: &str, offset: u64, len: usize| {
            open_rw(&at(kind))
                .write_all_at(&bytes(2, len), offset)
                .expect("write");
        };
        write("overwritten", 10_000, 200_000);
        write("overwritten-a-little", 77, 5);
        open_rw(&at("cut")).set_len(1_234).expect("truncate");
        open_rw(&at("cut-to-nothing")).set_len(0).expect("truncate");
        write("appended-to", 300_000, 20_000);
        open_rw(&at("grown")).set_len(900_000).expect("truncate");
        open_rw(&at("cut-and-written"))
            .set_len(50_000)
            .expect("truncate");
        write("cut-and-written", 40_000, 30_000);
        fs::set_permissions(at("chmod"), fs::Permissions::from_mode(0o4701)).expect("chmod");
        chown(at("chown"), Some(1), Some(2)).expect("chown");
        fs::rename(at("renamed"), at("other-name")).expect("rename");
        set_times(&at("utimens"), OLD_SEC + 1_000_000);
        set_xattr(&at("xattr"), b"after");
        fs::remove_file(at("removed")).expect("remove");
        fs::write(at("new"), bytes(3, 1_000)).expect("write");
        fs::rename(at("new"), at("replaced")).expect("rename");
        fs::hard_link(at("linked"), at("another-link")).expect("link");
        fs::write(at("made"), bytes(4, 1_000)).expect("write");
    }
    fs::remove_dir(top.join("gone")).expect("rmdir");
    fs::remove_file(top.join("link")).expect("remove");
    fs::create_dir(top.join("dir/made")).expect("mkdir");
}

/// Proves S-tx-3.
/// Proves S-tx-7.
/// Proves S-tx-21.
#[test]
fn regression_whatever_a_transaction_did_its_end_brings_back_times_contents_and_modes() {
    let options = "arena-size=32M,chunk-size=1M,drain=commit";
    for end in [
        "abort",
        "restore",
        "restore after a mount",
        "kill",
        "abort in shadow mode",
        "kill in shadow mode",
    ] {
        let sandbox = Sandbox::new("goback");
        let options = match end {
            "abort in shadow mode" | "kill in shadow mode" => format!("{options},mode=shadow"),
            "restore" | "restore after a mount" => format!("{options},history=2"),
            _ => options.to_owned(),
        };
        let mut mount = FirnMount::new(&sandbox, &options);
        let top = mount.join("job");
        fs::create_dir(&top).expect("mkdir");
        make_old_files(&top);
        if end.starts_with("restore") {
            // So that there is a checkpoint to go back to.
            firn(&sandbox, "begin", &top).ok();
            firn_id(&sandbox, "commit", &top, 1).ok();
        }
        mount.wait("durable", mount.path()).ok();
        let before = snapshot(&top);
        assert!(
            before.values().all(|object| object.mtime.is_some()),
            "all of them are old"
        );

        firn(&sandbox, "begin", &top).ok();
        change_all(&top);
        if end.starts_with("abort") {
            firn(&sandbox, "abort", &top).ok();
        } else if end.starts_with("kill") {
            mount.kill();
            mount = FirnMount::new(&sandbox, &options);
        } else {
            firn_id(&sandbox, "commit", &top, 2).ok();
            if end == "restore after a mount" {
                mount.umount();
                mount = FirnMount::new(&sandbox, &options);
            }
            firn_id(&sandbox, "restore", &top, 1).ok();
        }
        // What history keeps of a file that has other names counts one link more.
        let without_links = |mut tree: Tree| {
            if end.starts_with("restore") {
                tree.values_mut().for_each(|object| object.links = 0);
            }
            tree
        };
        let before = without_links(before);
        assert_same(
            &format!("{end}: through the mount"),
            &without_links(snapshot(&top)),
            &before,
        );
        let backing = mount.umount();
        assert_same(
            &format!("{end}: in the backing"),
            &without_links(snapshot(&backing.join("job"))),
            &before,
        );
    }
}

/// Proves S-tx-3, S-tx-7, S-tx-44: a transaction is ended by a mount that has another arena, and the first one comes back.
#[test]
fn regression_an_arena_that_comes_back_after_its_transaction_ended_elsewhere_brings_back_nothing() {
    for (mode, prepares) in [("buffer", false), ("shadow", false), ("buffer", true)] {
        let sandbox = Sandbox::new("awayarena");
        let backing = sandbox.mkdir("files");
        fs::write(backing.join("file"), [b'.'; 9000]).expect("write");
        let arenas = ["first", "second"]
            .map(|_| tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs"));
        let over = |at: usize, more: &str| {
            let options = format!("{OPTIONS},arena-dir={}{more}", arenas[at].path().display());
            FirnMount::over(&sandbox, &backing, &options)
        };
        let of_transaction = format!(",mode={mode}");
        let mount = over(0, &of_transaction);
        firn(&sandbox, "begin", mount.path()).ok();
        open_rw(&mount.join("file"))
            .write_all_at(&[b'1'; 5000], 0)
            .expect("write");
        if prepares {
            firn_id(&sandbox, "prepare", mount.path(), 5).ok();
        } else {
            assert!(mount.status().held_bytes >= 5000, "it is in the arena only");
        }
        mount.kill();
        let mount = over(1, &of_transaction);
        if prepares {
            firn_id(&sandbox, "commit", mount.path(), 5).ok();
        }
        let wanted = if prepares {
            [[b'1'; 5000].as_slice(), &[b'.'; 4000]].concat()
        } else {
            vec![b'.'; 9000]
        };
        assert!(
            fs::read(mount.join("file")).expect("read") == wanted,
            "{mode}, prepared {prepares}"
        );
        mount.umount();
        for more in [&*of_transaction, ""] {
            let mount = over(0, more);
            assert!(
                fs::read(mount.join("file")).expect("read") == wanted,
                "{mode}, prepared {prepares}: it is back"
            );
            mount.umount();
            assert!(
                fs::read(backing.join("file")).expect("read") == wanted,
                "{mode}, prepared {prepares}: drained"
            );
        }
    }
}
