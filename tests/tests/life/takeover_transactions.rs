//! Transactions that are open or prepared in shadow mode, while firnd is killed: they go on, and end as without the kill.
//!
//! `FIRN_TAKEOVER_KILLS` has each call of a commit and an abort killed (`cargo xtask campaign takeover`), `FIRN_SEED` sets the
//! seed.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use firn_tests::random::env_count;
use firn_tests::sandbox::kill_alone;
use firn_tests::trace::{KillAt, Moment};
use firn_tests::transaction::{firn, firn_id, firn_with};
use firn_tests::{FirnMount, Sandbox, seed, wait_until};

use crate::takeover::{act_with_kill, is, taken_over};

const ID: u64 = 7;
const LIMIT: Duration = Duration::from_secs(60);
/// CI kills firnd at each third call of a commit or abort; the campaign at each call.
const CALLS_OF_CI: usize = 3;

fn options() -> String {
    format!("{},drain=commit,mode=shadow", taken_over())
}

fn make_old(dir: &Path) {
    fs::create_dir_all(dir.join("sub")).expect("mkdir");
    for name in ["changed", "removed", "moved", "sub/below"] {
        fs::write(dir.join(name), format!("old {name}")).expect("write");
    }
}

/// Files that stay open over kills.
struct OpenFiles {
    changed: File,
    removed: File,
    new: File,
}

fn open(path: &Path) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(true).open(path).expect("open")
}

fn change(dir: &Path) -> OpenFiles {
    let changed = open(&dir.join("changed"));
    let removed = open(&dir.join("removed"));
    changed.write_all_at(b"NEW", 0).expect("write");
    fs::remove_file(dir.join("removed")).expect("unlink");
    fs::rename(dir.join("moved"), dir.join("sub/moved")).expect("rename");
    fs::create_dir(dir.join("made")).expect("mkdir");
    fs::write(dir.join("made/new"), "new").expect("write");
    let new = open(&dir.join("made/new"));
    OpenFiles {
        changed,
        removed,
        new,
    }
}

/// What programs go on with after a kill.
fn change_more(dir: &Path, files: &OpenFiles, round: u8) {
    files.changed.write_all_at(&[round], 4).expect("write on");
    files.new.write_all_at(&[round], 0).expect("write on");
    let mut old = [0; 11];
    files.removed.read_exact_at(&mut old, 0).expect("read on");
    assert_eq!(&old, b"old removed");
    fs::write(dir.join(format!("made/{round}")), "round").expect("create");
    if round > b'0' {
        fs::remove_file(dir.join(format!("made/{}", round - 1))).expect("unlink");
    }
}

fn check_changed(dir: &Path, round: u8) {
    let round_text = char::from(round);
    let read = |name: &str| fs::read_to_string(dir.join(name)).expect("read");
    assert_eq!(read("changed"), format!("NEW {round_text}hanged"));
    assert_eq!(read("made/new"), format!("{round_text}ew"));
    assert_eq!(read("sub/moved"), "old moved");
    assert_eq!(read("sub/below"), "old sub/below");
    assert!(!dir.join("removed").exists() && !dir.join("moved").exists());
    let made = fs::read_dir(dir.join("made")).expect("list").count();
    assert_eq!(made, 2);
}

/// Where a name still leads to what the transaction put there, reading it is ESTALE.
fn is_old(dir: &Path) -> bool {
    let gone = ["made", "sub/moved"].map(|name| dir.join(name).exists());
    let is_old =
        |name| fs::read_to_string(dir.join(name)).is_ok_and(|text| text == format!("old {name}"));
    gone == [false; 2]
        && ["changed", "removed", "moved", "sub/below"]
            .into_iter()
            .all(is_old)
}

/// The status forgets a transaction that its owner left before the kernel has heard of the names that changed.
fn check_old(dir: &Path) {
    wait_until("the old tree is seen", LIMIT, || is_old(dir));
}

/// Begins a transaction in `dir`, and has it live through `kills`. Gives the last round.
fn live_through(mount: &mut FirnMount<'_>, dir: &Path, kills: u8) -> (OpenFiles, u8) {
    let files = change(dir);
    let mut round = b'0';
    change_more(dir, &files, round);
    for _ in 0..kills {
        mount.kill_and_go_on();
        round += 1;
        change_more(dir, &files, round);
        check_changed(dir, round);
    }
    (files, round)
}

/// Proves S-crash-11.
#[test]
fn an_open_transaction_goes_on_and_is_committed_or_undone() {
    for verb in ["commit", "abort"] {
        let sandbox = Sandbox::new("goon");
        let mut mount = FirnMount::new(&sandbox, &options());
        assert_eq!(mount.status().takeover, "ready");
        let dir = mount.join("scope");
        make_old(&dir);
        firn(&sandbox, "begin", &dir).ok();
        let (files, round) = live_through(&mut mount, &dir, 3);
        firn(&sandbox, verb, &dir).ok();
        let check = |dir: &Path| match verb {
            "commit" => check_changed(dir, round),
            _ => check_old(dir),
        };
        wait_until("it is over", LIMIT, || {
            mount.status().transactions.is_empty()
        });
        check(&dir);
        files.changed.metadata().expect("an old file stays open");
        assert_eq!(mount.status().lost_open_files, 0);
        drop(files);
        let backing = mount.umount();
        check(&backing.join("scope"));
        println!("{verb}: 3 kills of an open transaction");
    }
}

/// Its top is made by it, and renamed in it.
///
/// Proves S-crash-11.
#[test]
fn a_transaction_whose_top_is_new_or_renamed_goes_on() {
    for verb in ["commit", "abort"] {
        let sandbox = Sandbox::new("top");
        let mut mount = FirnMount::new(&sandbox, &options());
        let dir = mount.join("new");
        firn_with(&sandbox, "begin", &dir, &["--create"]).ok();
        fs::write(dir.join("file"), "text").expect("write");
        mount.kill_and_go_on();
        let renamed = mount.join("renamed");
        fs::rename(&dir, &renamed).expect("rename the top");
        mount.kill_and_go_on();
        let found = fs::read_to_string(renamed.join("file"));
        assert_eq!(found.expect("read"), "text");
        firn(&sandbox, verb, &renamed).ok();
        let backing = mount.umount();
        assert_eq!(backing.join("renamed/file").exists(), verb == "commit");
        assert!(!backing.join("new").exists());
    }
}

/// Proves S-crash-11.
#[test]
fn a_prepared_transaction_goes_on_with_the_changes_that_wait_for_it() {
    for verb in ["commit", "abort"] {
        let sandbox = Sandbox::new("prepared");
        let mut mount = FirnMount::new(&sandbox, &options());
        let dir = mount.join("scope");
        make_old(&dir);
        firn(&sandbox, "begin", &dir).ok();
        let (files, round) = live_through(&mut mount, &dir, 1);
        firn_id(&sandbox, "prepare", &dir, ID).ok();
        mount.wait_until_served_well();
        std::thread::scope(|scope| {
            let late = scope.spawn(|| fs::write(dir.join("late"), "late"));
            mount.kill_and_go_on();
            mount.kill_and_go_on();
            firn(&sandbox, verb, &dir).ok();
            let late = late.join().expect("the writer ends");
            // As without the kill: what waits for a transaction that is aborted gets ECANCELED.
            assert_eq!(late.is_ok(), verb == "commit", "{verb}: {late:?}");
        });
        drop(files);
        let backing = mount.umount().join("scope");
        match verb {
            "commit" => check_changed(&backing, round),
            _ => check_old(&backing),
        }
        assert_eq!(backing.join("late").exists(), verb == "commit");
    }
}

fn is_step(number: libc::c_long, _: &[u64; 6]) -> bool {
    let calls = [
        libc::SYS_renameat2,
        libc::SYS_renameat,
        libc::SYS_unlinkat,
        libc::SYS_linkat,
        libc::SYS_fsync,
        libc::SYS_syncfs,
        libc::SYS_ftruncate,
    ];
    is(number, &calls)
}

/// Runs `end` with firnd killed at calls of its steps, and asks again where the first request failed.
fn end_with_kills(name: &str, end: &dyn Fn(&Sandbox, &Path) -> bool, check: &dyn Fn(&Path)) {
    let seed = seed(&format!("takeover during {name}"));
    let sandbox = Sandbox::new("ending");
    let mut mount = FirnMount::new(&sandbox, &options());
    let is_campaign = env_count("FIRN_TAKEOVER_KILLS", 0) > 0;
    let step = if is_campaign { 1 } else { CALLS_OF_CI };
    let (mut kills, mut repeated) = (0, 0);
    for skip in (seed as usize % step..).step_by(step) {
        let dir = mount.join(format!("scope{skip}"));
        make_old(&dir);
        firn(&sandbox, "begin", &dir).ok();
        let (files, _) = live_through(&mut mount, &dir, 0);
        let at = KillAt {
            call: is_step,
            skip,
            when: Moment::Before,
        };
        let mut is_done = false;
        let reached = act_with_kill(&mut mount, at, || {
            is_done = end(&sandbox, &dir);
            Ok(())
        });
        if !is_done {
            repeated += 1;
            end(&sandbox, &dir);
        }
        check(&dir);
        files.changed.write_all_at(b"NEW", 0).expect("write on");
        fs::write(dir.join("after"), "after").expect("a change after the end");
        // A request that failed is told of the death before its parent.
        if !reached.expect("the request was made") && is_done {
            break;
        }
        kills += 1;
    }
    mount.umount();
    println!("{name}: {kills} kills, every {step}. call, {repeated} requests were repeated");
    assert!(kills > 1);
}

/// Proves S-crash-11.
#[test]
fn a_commit_that_firnd_died_in_is_completed_when_it_is_asked_for_again() {
    let commit = |sandbox: &Sandbox, dir: &Path| firn_id(sandbox, "commit", dir, ID).code == 0;
    end_with_kills("a commit", &commit, &|dir| check_changed(dir, b'0'));
}

/// Proves S-crash-11.
#[test]
fn an_abort_that_firnd_died_in_is_completed() {
    let abort = |sandbox: &Sandbox, dir: &Path| firn(sandbox, "abort", dir).code == 0;
    end_with_kills("an abort", &abort, &check_old);
}

/// Proves S-crash-11.
#[test]
fn a_transaction_whose_owner_ended_during_the_pause_is_aborted_and_another_goes_on() {
    let sandbox = Sandbox::new("owner");
    let mut mount = FirnMount::new(&sandbox, &options());
    let mut owners = Vec::new();
    for name in ["dies", "lives"] {
        let dir = mount.join(name);
        make_old(&dir);
        let mut cat = Command::new("cat");
        let owner = cat.stdin(Stdio::piped()).spawn().expect("start cat");
        let pid = owner.id().to_string();
        firn_with(&sandbox, "begin", &dir, &["--owner", &pid]).ok();
        change(&dir);
        owners.push(owner);
    }
    mount.wait_until_served_well();
    let before = mount.pid();
    kill_alone(before, libc::SIGKILL);
    owners[0].kill().expect("kill an owner");
    owners[0].wait().expect("wait");
    mount.note_takeover(before);
    let count = |mount: &FirnMount<'_>| mount.status().transactions.len();
    wait_until("one is aborted", LIMIT, || count(&mount) == 1);
    check_old(&mount.join("dies"));
    assert!(mount.join("lives/made/new").exists());
    mount.kill_and_go_on();
    assert_eq!(count(&mount), 1);
    owners[1].kill().expect("kill an owner");
    owners[1].wait().expect("wait");
    wait_until("the other is aborted", LIMIT, || count(&mount) == 0);
    check_old(&mount.join("lives"));
    mount.umount();
}
