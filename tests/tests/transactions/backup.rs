//! `backup=`: a commit is finished after the host is lost with its backing.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use firn_protocol::TransactionStage;
use firn_tests::command::{Outcome, wait_until};
use firn_tests::fsops::open_rw;
use firn_tests::random::bytes;
use firn_tests::transaction::{behind, firn, firn_id};
use firn_tests::tree::{Tree, assert_same, snapshot};
use firn_tests::{FirnMount, FsKind, LoopImage, Sandbox, run};

const MIB: usize = 1 << 20;

fn options(backup: &Path) -> String {
    format!(
        "arena-size=32M,chunk-size=1M,drain=commit,backup={},backup-every=1s",
        backup.display()
    )
}

fn recover(sandbox: &Sandbox, backup: &Path, backing: &Path, id: Option<&str>) -> Outcome {
    let mut args = vec![
        OsStr::new("recover"),
        OsStr::new("--from-backup"),
        backup.as_os_str(),
    ];
    args.extend(id.iter().flat_map(|id| ["--id", id]).map(OsStr::new));
    args.push(backing.as_os_str());
    sandbox.run(args)
}

/// Directories of transactions in the backup.
fn backups(backup: &Path) -> Vec<PathBuf> {
    let below = |dir: &Path| {
        fs::read_dir(dir)
            .expect("list")
            .flatten()
            .map(|entry| entry.path())
    };
    below(backup)
        .flat_map(|home| below(&home).collect::<Vec<_>>())
        .collect()
}

fn copy(from: &Path, to: &Path) {
    run(Command::new("cp").arg("-a").arg(from).arg(to)).ok();
}

/// A transaction with changes of all kinds, prepared as 17. Returns what programs saw in it; the tree before it is
/// in `before`, a copy.
fn prepared(sandbox: &Sandbox, mount: &FirnMount<'_>, before: &Path, backup: &Path) -> Tree {
    fs::create_dir_all(mount.join("dir/deep")).expect("mkdir");
    for name in ["kept", "dir/moved", "dir/deep/file", "gone", "linked"] {
        fs::write(mount.join(name), bytes(1, 2 * MIB)).expect("write");
    }
    fs::hard_link(mount.join("linked"), mount.join("dir/also")).expect("link");
    firn(sandbox, "begin", mount.path()).ok();
    copy(mount.backing(), before);
    let _ = fs::remove_dir_all(before.join(".firn"));

    let ahead = bytes(2, 5 * MIB + 17);
    fs::write(mount.join("new"), &ahead).expect("write");
    std::os::unix::fs::FileExt::write_all_at(&open_rw(&mount.join("kept")), &bytes(3, MIB), 4711)
        .expect("write");
    let is_ahead = || {
        let copied = |one: &firn_protocol::TransactionStatus| {
            one.backup
                .as_ref()
                .is_some_and(|backup| backup.copied_bytes >= ahead.len() as u64)
        };
        mount.status().transactions.iter().any(copied)
    };
    wait_until(
        "the new file is copied ahead",
        Duration::from_secs(30),
        is_ahead,
    );
    assert!(
        backups(backup)
            .iter()
            .all(|one| !one.join("manifest").exists()),
        "open: not to be used"
    );
    // After it was copied.
    std::os::unix::fs::FileExt::write_all_at(&open_rw(&mount.join("new")), b"again", 9)
        .expect("write");
    fs::rename(mount.join("dir"), mount.join("other")).expect("rename");
    open_rw(&mount.join("other/moved"))
        .set_len(1000)
        .expect("truncate");
    fs::remove_file(mount.join("gone")).expect("unlink");
    fs::write(mount.join("other/also"), b"by its other name").expect("write");
    fs::create_dir(mount.join("other/made")).expect("mkdir");
    fs::write(mount.join("other/made/one"), b"one").expect("write");
    fs::hard_link(mount.join("other/made/one"), mount.join("two")).expect("link");
    symlink("new", mount.join("link")).expect("symlink");
    run(Command::new("setfattr")
        .args(["-n", "user.step", "-v", "17"])
        .arg(mount.join("kept")))
    .ok();
    let seen = snapshot(mount.path());
    firn_id(sandbox, "prepare", mount.path(), 17).ok();
    let status = mount
        .status()
        .transactions
        .remove(0)
        .backup
        .expect("a backup");
    assert!(status.whole && status.error.is_none(), "{status:?}");
    assert!(
        firn(sandbox, "status", mount.path())
            .ok()
            .stdout
            .contains("is complete")
    );
    seen
}

/// firnd is killed, and backing and arena are gone.
fn lose(sandbox: &Sandbox, mount: FirnMount<'_>) {
    let backing = mount.kill();
    fs::remove_dir_all(backing).expect("remove the backing");
    for arena in sandbox.arenas() {
        fs::remove_file(arena).expect("remove the arena");
    }
}

/// Proves S-tx-11, S-tx-57, S-tx-58.
#[test]
fn a_commit_is_finished_from_the_backup_after_the_host_is_lost() {
    let sandbox = Sandbox::new("backup");
    let backup = sandbox.mkdir("second");
    let before = sandbox.join("before");
    let mount = FirnMount::new(&sandbox, &options(&backup));
    let seen = prepared(&sandbox, &mount, &before, &backup);
    lose(&sandbox, mount);

    let other = sandbox.join("other");
    copy(&before, &other);
    recover(&sandbox, &backup, &other, Some("16"))
        .code(1)
        .says("has one with id 17");
    // Left prepared, the next mount decides.
    recover(&sandbox, &backup, &other, None)
        .ok()
        .says("prepared with id 17");
    recover(&sandbox, &backup, &other, None)
        .code(11)
        .says("mount it");
    let mount = FirnMount::over(
        &sandbox,
        &other,
        "arena-size=32M,chunk-size=1M,drain=commit",
    );
    assert_same("undecided", &snapshot(mount.path()), &behind(&before));
    firn_id(&sandbox, "commit", mount.path(), 17).ok();
    assert_same(
        "after the commit of a mount",
        &snapshot(mount.path()),
        &seen,
    );
    let backing = mount.umount();
    assert_same("in the backing", &behind(&backing), &seen);
    let again = recover(&sandbox, &backup, &other, Some("17")).ok();
    again.says("was applied earlier");
    assert!(backups(&backup).is_empty(), "found to be over");
}

/// Proves S-tx-11, S-tx-57, S-tx-58.
#[test]
fn a_torn_backup_is_refused_and_a_whole_one_committed_at_once() {
    let sandbox = Sandbox::new("backuptorn");
    let backup = sandbox.mkdir("second");
    let before = sandbox.join("before");
    let mount = FirnMount::new(&sandbox, &options(&backup));
    let seen = prepared(&sandbox, &mount, &before, &backup);
    lose(&sandbox, mount);
    let old = snapshot(&before);
    let one = backups(&backup).remove(0);
    let broken = sandbox.join("broken");
    let refused = |name: &str, change: &dyn Fn(&Path), word: &str| {
        copy(&one, &broken);
        change(&broken.join(name));
        recover(&sandbox, &broken, &before, Some("17"))
            .code(1)
            .says(word);
        assert_same("refused", &behind(&before), &old);
        fs::remove_dir_all(&broken).expect("remove");
    };
    let cut = |path: &Path| {
        open_rw(path)
            .set_len(path.metadata().expect("stat").len() / 2)
            .expect("cut")
    };
    let piece = fs::read_dir(&one)
        .expect("list")
        .flatten()
        .find(|entry| {
            entry.file_name() != "manifest"
                && entry.metadata().is_ok_and(|found| found.len() > 4096)
        })
        .expect("a piece")
        .file_name();
    let piece = piece.to_str().expect("a word");
    refused("manifest", &cut, "damaged");
    refused(
        "manifest",
        &|path| fs::remove_file(path).expect("unlink"),
        "no complete backup",
    );
    refused(piece, &cut, "missing or damaged");
    refused(
        piece,
        &|path| fs::remove_file(path).expect("unlink"),
        "missing or damaged",
    );

    let wrong = sandbox.join("wrong");
    copy(&before, &wrong);
    fs::remove_file(wrong.join("gone")).expect("unlink");
    recover(&sandbox, &backup, &wrong, Some("17"))
        .code(1)
        .says("gone: it is not there");
    recover(&sandbox, &backup, &before, Some("17"))
        .ok()
        .says("applied commit 17");
    assert_same("committed", &behind(&before), &seen);
    assert!(backups(&backup).is_empty(), "it is over");
}

/// Proves S-tx-59.
#[test]
fn a_backup_that_is_full_or_gone_fails_the_prepare_and_keeps_the_transaction() {
    let sandbox = Sandbox::new("backupfull");
    let small = LoopImage::new(&sandbox, FsKind::Tmpfs, 8);
    let mount = FirnMount::new(&sandbox, &options(small.path()));
    firn(&sandbox, "begin", mount.path()).ok();
    let content = bytes(1, 12 * MIB);
    fs::write(mount.join("file"), &content).expect("write");
    for verb in ["prepare", "commit"] {
        firn_id(&sandbox, verb, mount.path(), 3)
            .code(1)
            .says("the backup reports");
        let one = mount.status().transactions.remove(0);
        assert_eq!(one.stage, TransactionStage::Open);
        let backup = one.backup.expect("a backup");
        assert!(!backup.whole && backup.error.is_some_and(|error| error.contains("No space")));
        assert!(
            firn(&sandbox, "status", mount.path())
                .ok()
                .stdout
                .contains("not in the backup")
        );
    }
    assert!(!mount.backing().join("file").exists());
    small.remount("ro");
    firn_id(&sandbox, "prepare", mount.path(), 3)
        .code(1)
        .says("Read-only");
    fs::write(mount.join("more"), b"it goes on").expect("write");
    small.remount("rw,size=64m");
    firn_id(&sandbox, "prepare", mount.path(), 3).ok();
    // Decided now: the backup is not needed for that, and what is left there goes when it can.
    small.remount("ro");
    firn_id(&sandbox, "commit", mount.path(), 3).ok();
    assert_eq!(
        fs::read(mount.backing().join("file")).expect("read"),
        content
    );
    small.remount("rw");
    wait_until("what is over is removed", Duration::from_secs(30), || {
        backups(small.path()).is_empty()
    });
    mount.umount();
}

/// Proves S-tx-12, S-tx-61.
#[test]
fn a_mount_goes_on_with_the_backup_of_a_killed_firnd_and_keeps_one_that_it_does_not_know() {
    let sandbox = Sandbox::new("backupkill");
    let backup = sandbox.mkdir("second");
    let before = sandbox.join("before");
    let mount = FirnMount::new(&sandbox, &options(&backup));
    let seen = prepared(&sandbox, &mount, &before, &backup);
    let backing = mount.kill();
    let mount = FirnMount::new(&sandbox, &options(&backup));
    assert_eq!(backups(&backup).len(), 1, "it is prepared");
    assert!(mount.status().transactions[0].backup.is_some());
    firn(&sandbox, "umount", mount.path()).ok();
    mount.wait_for_end();
    mount.abandon();

    // The backing is lost, and a copy mounted in its place.
    let lost = sandbox.join("lost");
    fs::rename(&backing, &lost).expect("rename");
    copy(&before, &backing);
    let args = firn_tests::mount::mount_args(&backing, &sandbox.join("mnt"), &options(&backup));
    sandbox.run(&args).code(11).says("--from-backup");
    // That mount made an arena.
    firn(&sandbox, "recover", &backing).ok();
    recover(&sandbox, &backup, &backing, None).ok();
    let mount = FirnMount::new(&sandbox, &options(&backup));
    firn_id(&sandbox, "commit", mount.path(), 17).ok();
    assert_same("after the commit", &snapshot(mount.path()), &seen);
    assert!(backups(&backup).is_empty(), "applied");
    mount.umount();
}

#[test]
fn directories_that_cannot_be_a_backup_are_refused_at_mount() {
    let sandbox = Sandbox::new("backupdir");
    let backing = sandbox.join("backing");
    let point = sandbox.join("mnt");
    let refused = |backup: &Path, word: &str| {
        sandbox
            .run(firn_tests::mount::mount_args(
                &backing,
                &point,
                &options(backup),
            ))
            .code(2)
            .says(word);
    };
    refused(&sandbox.join("missing"), "create it");
    fs::write(sandbox.join("file"), b"").expect("write");
    refused(&sandbox.join("file"), "Not a directory");
    refused(&backing, "is inside");
    refused(&point, "is inside");
    for (more, word) in [
        ("mode=shadow", "mode=buffer"),
        ("participants=2", "participants"),
        ("history=1", "history"),
    ] {
        let options = format!("{},{more}", options(&sandbox.mkdir("second")));
        sandbox
            .run(firn_tests::mount::mount_args(&backing, &point, &options))
            .code(2)
            .says(word);
    }
}
