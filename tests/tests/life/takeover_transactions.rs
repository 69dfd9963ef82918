//! Transactions that are open or prepared while firnd is killed. In shadow mode they go on, and end as without the kill. In buffer
//! mode, and where a commit rule has begun them, they are aborted, their programs are told, and the mount goes on.
//!
//! `FIRN_TAKEOVER_KILLS` has each call of a commit and an abort killed, and that many kills at random moments (`cargo xtask
//! campaign takeover`), `FIRN_SEED` sets the seed.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use firn_tests::ack::{returned_operations, verify};
use firn_tests::fsops::close;
use firn_tests::image::{FsKind, LoopImage};
use firn_tests::random::{env_count, generator};
use firn_tests::sandbox::{helper_binary, kill_alone};
use firn_tests::trace::{KillAt, Moment};
use firn_tests::transaction::{firn, firn_id, firn_with};
use firn_tests::{FirnMount, Sandbox, seed, wait_until};
use rand::RngExt;

use crate::takeover::{act_with_kill, is, is_answer, taken_over};

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
    let until = Instant::now() + LIMIT;
    while !is_old(dir) {
        assert!(
            Instant::now() < until,
            "not the old tree: {:#?}",
            seen_in(dir)
        );
        thread::sleep(Duration::from_millis(20));
    }
}

/// What programs see of the names that a transaction of these tests changes.
fn seen_in(dir: &Path) -> Vec<(&'static str, io::Result<String>)> {
    [
        "made",
        "sub/moved",
        "changed",
        "removed",
        "moved",
        "sub/below",
    ]
    .map(|name| (name, fs::read_to_string(dir.join(name))))
    .into()
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

// ---- buffer mode ---------------------------------------------------------------------------------

fn buffered() -> String {
    format!("{},drain=commit,mode=buffer", taken_over())
}

#[track_caller]
fn assert_errno<T>(result: io::Result<T>, errno: i32) {
    let found = result.map(drop).map_err(|error| error.raw_os_error());
    assert_eq!(found, Err(Some(errno)));
}

/// A transaction ended with the firnd that was killed: every open file of it says so.
#[track_caller]
fn assert_told(files: OpenFiles) {
    let OpenFiles {
        changed,
        removed,
        new,
    } = files;
    for file in [&changed, &new] {
        for _ in 0..2 {
            assert_errno(file.write_all_at(b"x", 0), libc::ECANCELED);
        }
        assert_errno(file.sync_all(), libc::ECANCELED);
    }
    for file in [changed, new] {
        assert_eq!(close(file), Err(rustix::io::Errno::CANCELED));
    }
    drop(removed);
}

/// Proves S-crash-17, S-crash-18.
#[test]
fn an_open_transaction_in_buffer_mode_is_aborted_and_the_mount_goes_on() {
    let sandbox = Sandbox::new("aborted");
    let mut mount = FirnMount::new(&sandbox, &buffered());
    assert_eq!(mount.status().takeover, "ready");
    let dir = mount.join("scope");
    make_old(&dir);
    fs::write(mount.join("outside"), "").expect("write");
    let outside = open(&mount.join("outside"));
    firn(&sandbox, "begin", &dir).ok();
    let files = change(&dir);
    change_more(&dir, &files, b'0');
    outside.write_all_at(b"one", 0).expect("write");
    mount.kill_and_go_on();
    outside.write_all_at(b"two", 3).expect("others only wait");
    assert_told(files);
    assert!(is_old(&dir), "what the kernel had of it is gone");
    assert_eq!(mount.status().transactions.len(), 0);
    for verb in ["commit", "prepare"] {
        let refused = firn_id(&sandbox, verb, &dir, ID);
        assert_ne!(refused.code, 0);
        assert!(refused.stderr.contains("firnd died"), "{refused}");
    }
    assert!(
        sandbox
            .logs()
            .contains("firnd died while a transaction was open")
    );
    assert_eq!(mount.status().transaction_steps.get("undone"), Some(&1));
    // The next one is as any other, for this process too.
    firn(&sandbox, "begin", &dir).ok();
    let files = change(&dir);
    change_more(&dir, &files, b'0');
    drop(files);
    firn(&sandbox, "commit", &dir).ok();
    check_changed(&dir, b'0');
    drop(outside);
    let backing = mount.umount();
    check_changed(&backing.join("scope"), b'0');
    assert_eq!(fs::read(backing.join("outside")).expect("read"), b"onetwo");
}

/// Proves S-crash-18.
#[test]
fn each_process_that_ran_is_told_once_that_its_transaction_was_aborted() {
    let sandbox = Sandbox::new("told");
    let mut mount = FirnMount::new(&sandbox, &buffered());
    let dir = mount.join("scope");
    make_old(&dir);
    firn(&sandbox, "begin", &dir).ok();
    fs::write(dir.join("part"), "one").expect("write");
    mount.kill_and_go_on();
    // A kill right after the abort does not make firnd forget which programs it has to tell.
    mount.kill_and_go_on();
    assert_errno(
        fs::rename(dir.join("moved"), dir.join("x")),
        libc::ECANCELED,
    );
    fs::rename(dir.join("moved"), dir.join("x")).expect("it was told");
    mount.kill_and_go_on();
    fs::write(dir.join("y"), "y").expect("it was told before the kill");
    let mut touch = Command::new("touch");
    assert!(touch.arg(dir.join("z")).status().expect("touch").success());
    assert!(!dir.join("part").exists());
    mount.umount();
}

/// A change that firnd had read when it died belongs to the transaction: it is not made outside of it.
///
/// Proves S-crash-17, S-crash-18.
#[test]
fn a_change_that_was_not_answered_in_an_aborted_transaction_is_not_made() {
    let sandbox = Sandbox::new("underway");
    let mut mount = FirnMount::new(&sandbox, &buffered());
    let acts: [fn(&Path) -> io::Result<()>; 4] = [
        |dir| fs::remove_file(dir.join("removed")),
        |dir| fs::rename(dir.join("moved"), dir.join("changed")),
        |dir| fs::create_dir(dir.join("made")),
        |dir| Ok(close(File::create(dir.join("made"))?)?),
    ];
    let mut kills = 0;
    for (number, act) in acts.into_iter().enumerate() {
        for skip in 0.. {
            let dir = mount.join(format!("scope{number}.{skip}"));
            make_old(&dir);
            firn(&sandbox, "begin", &dir).ok();
            let at = KillAt {
                call: is_answer,
                skip,
                when: Moment::Before,
            };
            let acted = act_with_kill(&mut mount, at, || act(&dir));
            check_old(&dir);
            check_old(&mount.backing().join(format!("scope{number}.{skip}")));
            firn(&sandbox, "abort", &dir);
            match acted {
                // The change was answered before the kill.
                Ok(_) => break,
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ECANCELED), "{number}"),
            }
            kills += 1;
        }
    }
    mount.umount();
    println!("{kills} kills before answers");
    assert!(kills >= 4);
}

/// Proves S-crash-17.
#[test]
fn a_prepared_transaction_in_buffer_mode_keeps_its_outcome() {
    for verb in ["commit", "abort"] {
        let sandbox = Sandbox::new("outcome");
        let mut mount = FirnMount::new(&sandbox, &buffered());
        let dir = mount.join("scope");
        make_old(&dir);
        firn(&sandbox, "begin", &dir).ok();
        let files = change(&dir);
        change_more(&dir, &files, b'0');
        firn_id(&sandbox, "prepare", &dir, ID).ok();
        files.changed.write_all_at(b"late", 0).expect("it is held");
        for _ in 0..2 {
            mount.kill_and_go_on();
        }
        assert_told(files);
        assert!(is_old(&dir), "it is shown as at the begin");
        assert_errno(fs::write(dir.join("late"), "late"), libc::EBUSY);
        let id = format!("--id={ID}");
        let more: &[&str] = if verb == "commit" { &[&id] } else { &[] };
        firn_with(&sandbox, verb, &dir, more).ok();
        let check = |dir: &Path| match verb {
            "commit" => check_changed(dir, b'0'),
            _ => check_old(dir),
        };
        check(&dir);
        fs::write(dir.join("after"), "after").expect("a change after the end");
        check(&mount.umount().join("scope"));
    }
}

/// Proves S-crash-17, S-crash-18.
#[test]
fn a_commit_in_buffer_mode_that_firnd_died_in_is_whole_or_undone() {
    let seed = seed("takeover during a commit in buffer mode");
    let sandbox = Sandbox::new("whole");
    let mut mount = FirnMount::new(&sandbox, &buffered());
    let is_campaign = env_count("FIRN_TAKEOVER_KILLS", 0) > 0;
    let step = if is_campaign { 1 } else { CALLS_OF_CI };
    let (mut committed, mut aborted) = (0, 0);
    for skip in (seed as usize % step..).step_by(step) {
        let dir = mount.join(format!("scope{skip}"));
        make_old(&dir);
        firn(&sandbox, "begin", &dir).ok();
        let files = change(&dir);
        change_more(&dir, &files, b'0');
        let at = KillAt {
            call: is_step,
            skip,
            when: Moment::Before,
        };
        let mut outcome = None;
        let reached = act_with_kill(&mut mount, at, || {
            outcome = Some(firn_id(&sandbox, "commit", &dir, ID));
            Ok(())
        });
        let was_answered = outcome.expect("the request was made").code == 0;
        let again = firn_id(&sandbox, "commit", &dir, ID);
        if again.stderr.contains("it is aborted") {
            // firnd may die before this answer is sent.
            let third = firn_id(&sandbox, "commit", &dir, ID);
            assert!(third.stderr.contains("it is aborted"), "{third}");
            check_old(&dir);
            assert_told(files);
            aborted += 1;
        } else {
            // A commit that was applied when firnd died is over, and no transaction is there any more.
            assert!(
                again.code == 0 || again.stderr.contains("no transaction"),
                "{again}"
            );
            check_changed(&dir, b'0');
            files.changed.write_all_at(b"NEW", 0).expect("write on");
            committed += 1;
        }
        if !reached.expect("the request was made") && was_answered {
            break;
        }
    }
    mount.umount();
    println!("every {step}. call: {committed} commits, {aborted} aborts");
    assert!(committed > 0 && aborted > 0);
}

// ---- commit rules --------------------------------------------------------------------------------

/// `step-N/` is complete once `done` is closed, and `now.bin` and `now.idx` are, once the second is.
fn with_rules(sandbox: &Sandbox) -> String {
    let rules = sandbox.path().join("site.rules");
    let text = "a  step-*/  close:done\nb  {X}.bin|{X}.idx  close:{X}.idx\n";
    fs::write(&rules, text).expect("write the rules");
    format!("{},rules={}", taken_over(), rules.display())
}

/// Writes `now.bin` and `now.idx` of one checkpoint over those of the last one.
fn write_now(dir: &Path, text: &str) -> io::Result<()> {
    fs::write(dir.join("now.bin"), text)?;
    fs::write(dir.join("now.idx"), text)
}

#[track_caller]
fn assert_now(dir: &Path, text: &str) {
    for name in ["now.bin", "now.idx"] {
        assert_eq!(fs::read_to_string(dir.join(name)).expect("read"), text);
    }
}

/// Proves S-crash-17, S-crash-18.
#[test]
fn a_checkpoint_of_a_rule_that_is_open_is_aborted_and_the_next_one_works() {
    let sandbox = Sandbox::new("rules");
    let options = with_rules(&sandbox);
    let mut mount = FirnMount::new(&sandbox, &options);
    let top = mount.path().to_owned();
    write_now(&top, "first").expect("write");
    assert_now(mount.backing(), "first");
    // The first file of the next one is complete, and firnd dies before the second.
    fs::write(top.join("now.bin"), "second").expect("write");
    assert_eq!(mount.status().transactions.len(), 1);
    mount.kill_and_go_on();
    assert_now(&top, "first");
    let half = OpenOptions::new().write(true).open(top.join("now.idx"));
    assert_errno(half, libc::ECANCELED);
    assert_now(mount.backing(), "first");
    assert_eq!(mount.status().rule_aborts.get("b"), Some(&1));
    write_now(&top, "third").expect("the next one works");
    assert_now(mount.backing(), "third");
    // Now while a file is being written over.
    let old = open(&top.join("now.bin"));
    old.write_all_at(b"fourt", 0).expect("write");
    mount.kill_and_go_on();
    assert_errno(old.write_all_at(b"h", 5), libc::ECANCELED);
    assert_eq!(close(old), Err(rustix::io::Errno::CANCELED));
    assert_now(&top, "third");
    assert_now(mount.backing(), "third");
    write_now(&top, "fifth").expect("the next one works");
    mount.kill_and_go_on();
    write_now(&top, "sixth").expect("no checkpoint was open");
    mount.umount();
    assert_now(&sandbox.join("backing"), "sixth");
}

/// Proves S-crash-12, S-crash-17.
#[test]
fn the_close_that_completes_a_checkpoint_says_whether_it_is_committed() {
    let seed = seed("the close of a checkpoint");
    let sandbox = Sandbox::new("event");
    let options = with_rules(&sandbox);
    let mut mount = FirnMount::new(&sandbox, &options);
    let is_campaign = env_count("FIRN_TAKEOVER_KILLS", 0) > 0;
    let step = if is_campaign { 1 } else { CALLS_OF_CI };
    let (mut committed, mut aborted) = (0, 0);
    for skip in (seed as usize % step..).step_by(step) {
        let dir = mount.join(format!("step-{skip}"));
        fs::create_dir(&dir).expect("mkdir");
        fs::write(dir.join("data"), "data").expect("write");
        let done = File::create(dir.join("done")).expect("create");
        done.write_all_at(b"done", 0).expect("write");
        let at = KillAt {
            call: is_step,
            skip,
            when: Moment::Before,
        };
        let closed = act_with_kill(&mut mount, at, || Ok(close(done)?));
        let behind = mount.backing().join(format!("step-{skip}"));
        match &closed {
            Ok(_) => {
                for name in ["data", "done"] {
                    assert_eq!(fs::read_to_string(behind.join(name)).expect("read"), name);
                    assert_eq!(fs::read_to_string(dir.join(name)).expect("read"), name);
                }
                committed += 1;
            }
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::ECANCELED));
                assert!(!behind.exists() && !dir.exists());
                aborted += 1;
            }
        }
        if matches!(closed, Ok(false)) {
            break;
        }
    }
    mount.umount();
    println!("every {step}. call: {committed} commits, {aborted} aborts");
    assert!(committed > 0 && aborted > 0);
}

// ---- kills at random moments ---------------------------------------------------------------------

/// Writers outside of every transaction.
const WRITERS: u64 = 2;
const KILLS_OF_CI: u64 = 6;
const FILES: u64 = 4;

/// Files of one generation, over those of the one before, as a job writes them.
fn write_generation(dir: &Path, generation: u64) -> io::Result<()> {
    for file in 0..FILES {
        fs::write(dir.join(format!("file{file}")), format!("{generation:8}"))?;
    }
    Ok(())
}

/// The generation that all files have.
#[track_caller]
fn find_generation(dir: &Path) -> u64 {
    let read = |file: u64| {
        let text = fs::read_to_string(dir.join(format!("file{file}"))).expect("read");
        text.trim().parse::<u64>().expect("a generation")
    };
    let first = read(0);
    for file in 1..FILES {
        assert_eq!(read(file), first, "files of two generations in {dir:?}");
    }
    first
}

/// Asks for a commit until a firnd says what became of it. Where the first answer was lost and no transaction is there any
/// more, it was committed: one that was aborted is said to be.
fn commit_surely(sandbox: &Sandbox, dir: &Path, id: &str) -> bool {
    let mut is_committed = false;
    wait_until("a firnd answers", LIMIT, || {
        let outcome = firn_with(sandbox, "commit", dir, &["--id", id]);
        is_committed = outcome.code == 0 || outcome.stderr.contains("no transaction");
        is_committed || outcome.stderr.contains("it is aborted")
    });
    is_committed
}

/// A job in transactions: it begins anew where one was aborted. Gives the last generation that was committed.
fn run_transactions(sandbox: &Sandbox, dir: &Path, ends: &AtomicBool) -> u64 {
    let mut generation = 0;
    let mut aborts = 0;
    while !ends.load(Ordering::Relaxed) {
        if firn(sandbox, "begin", dir).code != 0 {
            // firnd died under the request, after the begin or before.
            firn(sandbox, "abort", dir);
            continue;
        }
        let written = write_generation(dir, generation + 1);
        if let Err(error) = &written {
            assert_eq!(error.raw_os_error(), Some(libc::ECANCELED));
        }
        let id = (generation + 1).to_string();
        let is_committed = written.is_ok() && commit_surely(sandbox, dir, &id);
        if is_committed {
            generation += 1;
        } else {
            firn(sandbox, "abort", dir);
            aborts += 1;
        }
        assert_eq!(find_generation(dir), generation);
    }
    println!("{generation} transactions were committed, {aborts} aborted");
    generation
}

/// A job that knows of no transaction: a commit rule has each step whole.
fn run_checkpoints(dir: &Path, ends: &AtomicBool) -> Vec<u64> {
    let (mut step, mut whole) = (0, Vec::new());
    while !ends.load(Ordering::Relaxed) {
        step += 1;
        let at = dir.join(format!("step-{step}"));
        let write = || {
            fs::create_dir(&at)?;
            write_generation(&at, step)?;
            let done = File::create(at.join("done"))?;
            Ok(close(done)?)
        };
        let written: io::Result<()> = write();
        match written {
            Ok(()) => whole.push(step),
            Err(error) => {
                let told = [libc::ECANCELED, libc::ESTALE, libc::ENOENT];
                assert!(
                    error
                        .raw_os_error()
                        .is_some_and(|errno| told.contains(&errno)),
                    "{error}"
                );
            }
        }
        // A checkpoint an instant: most of the time none is open.
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("{} of {step} checkpoints are whole", whole.len());
    whole
}

/// Proves S-crash-11, S-crash-17, S-crash-18.
#[test]
fn kills_at_random_moments_abort_what_is_open_and_nothing_else() {
    let seed = seed("kills over open transactions");
    let mut rng = generator(seed);
    let sandbox = Sandbox::new("random");
    let options = with_rules(&sandbox);
    let mut mount = FirnMount::new(&sandbox, &options);
    let scope = mount.join("scope");
    fs::create_dir(&scope).expect("mkdir");
    write_generation(&scope, 0).expect("write");
    let start = |number: u64| {
        let dir = mount.join(format!("writer{number}"));
        fs::create_dir(&dir).expect("mkdir");
        let log = sandbox.path().join(format!("log{number}"));
        let mut writer = Command::new(helper_binary());
        writer.arg("writer").arg(&dir).arg(&log);
        writer.arg((seed ^ number).to_string());
        (writer.spawn().expect("start a writer"), dir, log)
    };
    let mut writers: Vec<_> = (0..WRITERS).map(start).collect();
    let kills = env_count("FIRN_TAKEOVER_KILLS", KILLS_OF_CI);
    let ends = AtomicBool::new(false);
    let top = mount.path().to_owned();
    let (generation, whole) = std::thread::scope(|threads| {
        let transactions = threads.spawn(|| run_transactions(&sandbox, &scope, &ends));
        let checkpoints = threads.spawn(|| run_checkpoints(&top, &ends));
        for number in 0..kills {
            mount.note_progress();
            // The random moment is the point of the test, not a wait for a condition.
            std::thread::sleep(Duration::from_millis(rng.random_range(300..900)));
            mount.kill_and_go_on();
            for (writer, ..) in &mut writers {
                let ended = writer.try_wait().expect("wait");
                assert!(
                    ended.is_none(),
                    "a writer saw an error after kill {number}, seed {seed}"
                );
            }
        }
        ends.store(true, Ordering::Relaxed);
        (
            transactions.join().expect("transactions"),
            checkpoints.join().expect("checkpoints"),
        )
    });
    for (writer, dir, log) in &mut writers {
        assert!(returned_operations(log) > 0);
        writer.kill().expect("kill a writer");
        writer.wait().expect("wait");
        mount.note_progress();
        verify(dir, log);
    }
    assert_eq!(find_generation(&scope), generation);
    let log = sandbox.logs();
    let backing = mount.umount();
    assert_eq!(find_generation(&backing.join("scope")), generation);
    for step in whole {
        let name = format!("step-{step}");
        let names: Vec<_> = fs::read_dir(backing.join(&name))
            .into_iter()
            .flatten()
            .collect();
        let lines: Vec<&str> = log.lines().filter(|line| line.contains(&name)).collect();
        assert_eq!(
            names.len() as u64,
            FILES + 1,
            "{name}: {names:?}\n{}",
            lines.join("\n")
        );
        assert_eq!(find_generation(&backing.join(name)), step);
    }
    for (_, dir, log) in &writers {
        verify(&backing.join(dir.file_name().expect("a name")), log);
    }
    println!("{kills} kills, seed {seed}");
}

/// Creates directories with files until a file has one of these inode numbers in the backing. Returns the paths of its
/// directory and of the file.
fn make_file_with_number(mount: &FirnMount<'_>, numbers: &[u64]) -> (PathBuf, PathBuf) {
    for index in 0..1000 {
        let dir = format!("scope{}", index / 20);
        let name = format!("{dir}/file{index}");
        fs::create_dir_all(mount.join(&dir)).expect("mkdir");
        fs::write(mount.join(&name), "old").expect("write");
        let found = fs::metadata(mount.backing().join(&name)).expect("metadata");
        if numbers.contains(&found.ino()) {
            return (mount.join(&dir), mount.join(&name));
        }
    }
    panic!("no file has one of the numbers {numbers:?}");
}

/// Makes directories that the kernel knows, and removes them in the backing. Returns the descriptors for which the
/// kernel keeps its inodes, and the numbers that the backing may assign again.
fn make_known_dirs_without_object(mount: &mut FirnMount<'_>) -> (Vec<File>, Vec<u64>) {
    let mut known_dirs = Vec::new();
    let mut numbers = Vec::new();
    for index in 0..100 {
        let name = format!("known{index}");
        fs::create_dir(mount.join(&name)).expect("mkdir");
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_PATH);
        known_dirs.push(options.open(mount.join(&name)).expect("open"));
        let behind = mount.backing().join(&name);
        numbers.push(fs::metadata(&behind).expect("metadata").ino());
        fs::remove_dir(&behind).expect("rmdir in the backing");
    }
    // The backing cannot assign the numbers again while firnd has the directories open.
    mount.kill_and_go_on();
    (known_dirs, numbers)
}

/// The next firnd found the removed directory by the number, not the file.
///
/// Proves S-crash-11.
#[test]
fn regression_a_file_may_have_the_number_of_a_removed_dir_that_the_kernel_knows() {
    let sandbox = Sandbox::new("number");
    // xfs assigns the number of a removed inode again at once.
    let image = LoopImage::new(&sandbox, FsKind::Xfs, 320);
    let mut mount = FirnMount::over(&sandbox, image.path(), &options());
    let (known_dirs, numbers) = make_known_dirs_without_object(&mut mount);
    let (scope, path) = make_file_with_number(&mount, &numbers);
    let file = open(&path);
    // A lookup of the removed directory or of the file was first, at random.
    for _ in 0..6 {
        firn(&sandbox, "begin", &scope).ok();
        fs::remove_file(&path).expect("unlink");
        mount.kill_and_go_on();
        firn(&sandbox, "abort", &scope).ok();
        assert_eq!(fs::read_to_string(&path).expect("read"), "old");
        mount.kill_and_go_on();
        assert_eq!(fs::read_to_string(&path).expect("read"), "old");
    }
    drop(known_dirs);
    drop(file);
    mount.umount();
}
