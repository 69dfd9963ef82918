//! Hosts on one simulated disk. At each call, one host dies or is overtaken by the other.

use std::ffi::OsStr;
use std::time::Duration;

use firn_backing::{Backing, Errno, Names, Volume};
use firn_hosts::host_dir::make_host_dir;
use firn_hosts::own::TOP;
use firn_hosts::{
    Evidence, Holder, HostWatch, Lease, LeaseError, LeaseUse, Life, OwnError, PeerWatch, Peers,
    ReachError, Survey, Terms, VoteDir, check_reach, own, publish_terms, survey,
};
use firn_sim::LockReach;
use firn_sim::SimBacking;
use firn_sim::suite::own_caller;

const DIR: &str = "decision";
const FILE: &str = "outcome";
const LEASE: &str = "lease";
const USE: LeaseUse = LeaseUse::Transactions;
/// Maximum number of calls of a host; no test makes this many.
const STEPS_MAX: u64 = 60;

type Inode = <SimBacking as Volume>::Inode;

fn disk() -> SimBacking {
    let disk = SimBacking::new();
    disk.set_owner(&disk.root(), Some(own_caller().uid), None)
        .expect("set_owner");
    disk.sync_all().expect("sync");
    disk
}

fn holder(host: &str) -> Holder {
    Holder {
        host: host.into(),
        pid: 1,
        boot: format!("boot of {host}"),
    }
}

fn never(_: Duration) {
    panic!("no host is to be waited for");
}

fn put(on: &SimBacking, host: &str) -> Result<bool, OwnError> {
    let vote = VoteDir::make(on, &on.root(), DIR, host)?;
    Ok(vote.put_once(FILE, &content(host))?)
}

fn content(host: &str) -> Vec<u8> {
    host.repeat(3000).into_bytes()
}

fn outcome(on: &SimBacking) -> Option<Vec<u8>> {
    let vote = VoteDir::find(on, &on.root(), DIR, "reader").expect("find")?;
    vote.read(FILE).expect("read")
}

#[test]
fn a_file_that_is_put_once_is_one_hosts_for_every_death_at_every_call() {
    for step in 1..STEPS_MAX {
        let a = disk();
        let b = a.another_process();
        a.crash_at(step);
        let first = put(&a, "a");
        let second = put(&b, "b").expect("no other host's death is in the way");
        let found = outcome(&b).expect("it was put");
        assert!(
            found == content("a") || found == content("b"),
            "step {step}"
        );
        assert_eq!(second, found == content("b"), "step {step}");
        match first {
            Ok(first) => assert!(first && !second, "step {step}"),
            Err(error) => assert_eq!(error, OwnError::Backing(Errno::IO), "step {step}"),
        }
        b.power_loss(step);
        assert_eq!(outcome(&b), Some(found), "step {step}: it was durable");
    }
}

#[test]
fn of_two_hosts_that_put_the_same_file_one_is_first_in_every_order() {
    for step in 1..STEPS_MAX {
        let a = disk();
        let b = a.another_process();
        let hang = a.hang_at(step);
        let (first, second) = std::thread::scope(|scope| {
            let slow = scope.spawn(|| put(&a, "a"));
            while !hang.is_reached() && !slow.is_finished() {
                std::thread::yield_now();
            }
            let second = put(&b, "b").expect("put");
            hang.release();
            (slow.join().expect("a host").expect("put"), second)
        });
        assert_ne!(first, second, "step {step}");
        let winner = if first { "a" } else { "b" };
        assert_eq!(outcome(&b), Some(content(winner)), "step {step}");
    }
}

#[test]
fn a_directory_that_is_retired_is_whole_or_gone_and_nothing_of_it_stays() {
    for step in 1..STEPS_MAX {
        let a = disk();
        let b = a.another_process();
        put(&a, "a").expect("put");
        let before = a.steps();
        a.crash_at(before + step);
        let retired = VoteDir::find(&a, &a.root(), DIR, "a")
            .and_then(|vote| Ok(vote.expect("it is there").retire()?));
        assert_eq!(retired.is_err(), a.is_dead());
        let seen = VoteDir::find(&b, &b.root(), DIR, "b").expect("find");
        assert!(
            seen.is_none() || outcome(&b) == Some(content("a")),
            "step {step}"
        );
        a.revive();
        VoteDir::remove_retired(&b, &b.root()).expect("remove");
        let names = own::list(&a, &a.root()).expect("list");
        assert!(
            names.iter().all(|(name, ..)| name == DIR.as_bytes()),
            "step {step}"
        );
        a.fsck().expect("fsck");
    }
}

/// Host `a` retires its directory and hangs at each of its calls in turn. Meanwhile host `b`, which opened the
/// directory before, runs `action`. Checks that the retirement succeeds and leaves nothing of the directory.
fn retire_beside(action: impl Fn(&SimBacking, &VoteDir<'_, SimBacking>, u64)) {
    for step in 1..STEPS_MAX {
        let a = disk();
        let b = a.another_process();
        put(&a, "a").expect("put");
        let opened = VoteDir::make(&b, &b.root(), DIR, "b").expect("open");
        let hang = a.hang_at(step);
        std::thread::scope(|scope| {
            let retiring = scope.spawn(|| {
                let vote = VoteDir::find(&a, &a.root(), DIR, "a").expect("find");
                vote.expect("it is there").retire()
            });
            while !hang.is_reached() && !retiring.is_finished() {
                std::thread::yield_now();
            }
            action(&b, &opened, step);
            hang.release();
            let retired = retiring.join().expect("a host");
            assert_eq!(retired, Ok(()), "step {step}");
        });
        let names = own::list(&a, &a.root()).expect("list");
        assert!(names.is_empty(), "step {step}: {names:?}");
    }
}

/// Another host mounts while one host is removing a directory.
#[test]
fn two_hosts_may_remove_a_retired_directory_at_once() {
    retire_beside(|b, _, step| {
        let removed = VoteDir::remove_retired(b, &b.root());
        assert_eq!(removed, Ok(()), "step {step}");
    });
}

/// Another host that opened the directory earlier puts a file into it at any moment.
#[test]
fn regression_a_late_put_does_not_keep_a_directory_from_being_retired() {
    retire_beside(|_, opened, step| match opened.put_once("late", b"b") {
        Ok(_) | Err(Errno::NOENT | Errno::STALE) => {}
        Err(errno) => panic!("step {step}: {errno}"),
    });
}

#[test]
fn a_retired_directory_that_others_could_change_is_left() {
    let disk = disk();
    for (name, mode) in [("over-own.a", 0o700), ("over-open.a", 0o755)] {
        disk.mkdir(&own_caller(), &disk.root(), OsStr::new(name), mode)
            .expect("mkdir");
    }
    VoteDir::remove_retired(&disk, &disk.root()).expect("remove");
    let names = own::list(&disk, &disk.root()).expect("list");
    let names: Vec<_> = names.iter().map(|(name, ..)| &**name).collect();
    assert_eq!(names, [b"over-open.a"]);
}

fn take(on: &SimBacking, host: &str) -> Result<Lease<SimBacking>, LeaseError> {
    Lease::acquire(on, &on.root(), USE, &holder(host), &mut |_| {})
}

fn is_held(on: &SimBacking) -> bool {
    Lease::is_held(on, &on.root()).expect("ask")
}

#[test]
fn a_lease_ends_with_its_holder_whatever_it_was_doing() {
    for step in 1..STEPS_MAX {
        let a = disk();
        let b = a.another_process();
        a.crash_at(step);
        let work = || {
            let mut lease = take(&a, "a")?;
            assert!(is_held(&b), "step {step}");
            assert!(matches!(take(&b, "b"), Err(LeaseError::Held { .. })));
            lease.write_heartbeat(&a, None)?;
            lease.release(&a, None)
        };
        let done = work();
        assert_eq!(done.is_err(), a.is_dead(), "step {step}: {done:?}");
        assert!(!is_held(&b), "step {step}");
        let mut lease = take(&b, "b").expect("the lease is free");
        lease.write_heartbeat(&b, None).expect("heartbeat");
        assert!(is_held(&b), "step {step}");
    }
}

/// Proves S-tx-87.
#[test]
fn of_two_hosts_that_take_a_lease_at_once_one_gets_it() {
    for step in 1..STEPS_MAX {
        let a = disk();
        let b = a.another_process();
        let hang = a.hang_at(step);
        let (first, second) = std::thread::scope(|scope| {
            let slow = scope.spawn(|| take(&a, "a"));
            while !hang.is_reached() && !slow.is_finished() {
                std::thread::yield_now();
            }
            let second = take(&b, "b");
            hang.release();
            (slow.join().expect("a host"), second)
        });
        let are_held = [&first, &second].map(|taken| match taken {
            Ok(_) => true,
            Err(LeaseError::Held { .. }) => false,
            Err(error) => panic!("step {step}: {error}"),
        });
        assert_eq!(
            are_held.iter().filter(|held| **held).count(),
            1,
            "step {step}"
        );
    }
}

#[test]
fn who_released_a_lease_or_held_it_under_this_kernel_is_not_waited_for() {
    let a = disk();
    let b = a.another_process();
    let root = b.root();
    take(&a, "a")
        .expect("take")
        .release(&a, None)
        .expect("release");
    drop(Lease::acquire(&b, &root, USE, &holder("b"), &mut never).expect("it was released"));
    drop(Lease::acquire(&b, &root, USE, &holder("b"), &mut never).expect("the same kernel"));
    let mut waited = Duration::ZERO;
    let taken = Lease::acquire(&a, &a.root(), USE, &holder("a"), &mut |time| waited += time);
    assert!(
        taken.is_ok() && waited == firn_hosts::STALE_AFTER,
        "{waited:?}"
    );
}

#[test]
fn a_host_whose_lock_was_lost_and_taken_learns_it_from_the_heartbeat() {
    let a = disk();
    let b = a.another_process();
    let mut lease = take(&a, "a").expect("take");
    a.lose_locks();
    assert!(
        lease.write_heartbeat(&a, None).is_err(),
        "the server gave its lock up"
    );
    let other = take(&b, "b").expect("it is free");
    let by = match lease.write_heartbeat(&a, None) {
        Err(LeaseError::Lost { by }) => by.expect("its holder"),
        other => panic!("not lost: {other:?}"),
    };
    assert_eq!(by, holder("b"));
    assert!(matches!(
        lease.release(&a, None),
        Err(LeaseError::Lost { .. })
    ));
    drop(other);
}

#[test]
fn a_heartbeat_that_goes_on_betrays_locks_that_stay_on_their_host() {
    let a = disk();
    let b = a.another_process();
    let mut lease = take(&a, "a").expect("take");
    a.set_lock_reach(LockReach::Host);
    let mut heartbeat = |_| lease.write_heartbeat(&a, None).expect("heartbeat");
    match Lease::acquire(&b, &b.root(), USE, &holder("b"), &mut heartbeat) {
        Err(LeaseError::Unreached { holder: found }) => assert_eq!(found, Some(holder("a"))),
        other => panic!("{:?}", other.err()),
    }
    lease
        .write_heartbeat(&a, None)
        .expect("a living host keeps its lease");
}

fn reach(on: &SimBacking, rest: &mut dyn FnMut(Duration)) -> Result<(), ReachError> {
    check_reach(on, &holder("b"), rest)
}

/// Proves S-tx-86.
#[test]
fn locks_that_do_not_keep_other_hosts_out_are_found_out_and_why() {
    let a = disk();
    let b = a.another_process();
    let dir = make_host_dir(&a, "a").expect("make");
    make_host_dir(&a, "gone").expect("make");
    let mut lease = Lease::acquire(&a, &dir, USE, &holder("a"), &mut never).expect("take");
    assert_eq!(reach(&b, &mut never), Ok(()), "a is alive and keeps b out");
    a.set_lock_reach(LockReach::Host);
    let stays = Err(ReachError::StaysOnHost { host: "a".into() });
    assert_eq!(
        reach(&b, &mut |_| lease
            .write_heartbeat(&a, None)
            .expect("heartbeat")),
        stays
    );
    a.set_lock_reach(LockReach::Refused(Errno::NOLCK));
    assert_eq!(
        reach(&b, &mut never),
        Err(ReachError::Refused(Errno::NOLCK))
    );
    a.set_lock_reach(LockReach::Everywhere);
    a.crash_at(0);
    assert!(lease.write_heartbeat(&a, None).is_err());
    assert_eq!(reach(&b, &mut |_| {}), Ok(()), "a is dead");
    let (firn, _) = b.lookup(&b.root(), OsStr::new(TOP)).expect("lookup");
    let names = own::list(&b, &firn).expect("list");
    assert!(
        names.iter().all(|(name, ..)| name.starts_with(b"host-")),
        "no probe is left"
    );
}

#[test]
fn a_host_lives_for_what_its_lease_is_used_for_and_for_nothing_else() {
    let a = disk();
    let b = a.another_process();
    let watch = |purpose| HostWatch::new(purpose, holder("b").boot);
    let lives_for = |purpose| watch(purpose).is_living(&b, "a").expect("look");
    assert!(!lives_for(LeaseUse::Logs), "it was never there");
    let dir = make_host_dir(&a, "a").expect("make");
    let mut lease = Lease::acquire(&a, &dir, LeaseUse::Tokens, &holder("a"), &mut never);
    let lease = lease.as_mut().expect("take");
    assert!(lives_for(LeaseUse::Tokens) && !lives_for(LeaseUse::Logs));
    assert_eq!(lease.heartbeat_interval(), Duration::from_secs(2));
    lease.add_use(&a, LeaseUse::Logs).expect("add");
    lease
        .write_heartbeat(&a, None)
        .expect("its record is still its own");
    assert!(lives_for(LeaseUse::Tokens) && lives_for(LeaseUse::Logs));
    assert!(!lives_for(LeaseUse::Transactions));
    lease.add_use(&a, LeaseUse::Transactions).expect("add");
    // The use with the shortest interval decides.
    assert_eq!(lease.heartbeat_interval(), Duration::from_secs(1));
    let others = watch(LeaseUse::Logs).others_living(&b, "b");
    assert_eq!(others.as_deref(), Ok(&["a".to_owned()][..]));
    let others = watch(LeaseUse::Logs).others_living(&a, "a");
    assert_eq!(others.as_deref(), Ok(&[][..]));
}

/// A host whose lock proves nothing counts as alive until its heartbeat has not changed for too long.
#[test]
fn a_host_whose_lock_does_not_reach_lives_by_its_heartbeat() {
    let a = disk();
    a.set_lock_reach(LockReach::Host);
    let b = a.another_process();
    let dir = make_host_dir(&a, "a").expect("make");
    let lease = Lease::acquire(&a, &dir, LeaseUse::Logs, &holder("a"), &mut never).expect("take");
    let seen_by_b = HostWatch::new(LeaseUse::Logs, holder("b").boot);
    assert_eq!(seen_by_b.is_living(&b, "a"), Ok(true));
    lease.release(&a, None).expect("release");
    assert_eq!(seen_by_b.is_living(&b, "a"), Ok(false), "it said so");
}

#[test]
fn a_lease_in_a_place_that_others_may_change_is_not_believed() {
    let a = disk();
    drop(take(&a, "a").expect("take"));
    let inode = a.lookup(&a.root(), LEASE.as_ref()).expect("lookup").0;
    a.set_mode(&inode, 0o666).expect("set_mode");
    assert!(matches!(
        take(&a, "a"),
        Err(LeaseError::Own(OwnError::Distrusted { .. }))
    ));
}

/// Takes the lease of a host and publishes its terms, with the layout `says`. Returns the host's directory and the
/// lease.
fn join(on: &SimBacking, host: &str, says: &str) -> (Inode, Lease<SimBacking>) {
    let dir = make_host_dir(on, host).expect("dir");
    let me = holder(host);
    let lease = Lease::acquire(on, &dir, USE, &me, &mut |_| ()).expect("take");
    let terms = Terms::from([("layout".to_owned(), says.to_owned())]);
    publish_terms(on, &dir, &lease, &terms).expect("publish");
    (dir, lease)
}

fn watch(host: &str) -> PeerWatch {
    PeerWatch::new(holder(host))
}

/// Returns each other living host with the layout that it published.
fn said(found: &Peers) -> Vec<(&str, &str)> {
    let peers = found.living.iter();
    peers
        .map(|peer| (peer.host.as_str(), peer.terms["layout"].as_str()))
        .collect()
}

/// Proves S-share-6.
#[test]
fn hosts_that_live_are_seen_with_what_they_say_and_others_are_not() {
    for reach in [LockReach::Everywhere, LockReach::Host] {
        let disk_of_a = disk();
        disk_of_a.set_lock_reach(reach);
        let disk_of_b = disk_of_a.another_process();
        let (_, mut lease) = join(&disk_of_a, "a", "log");
        join(&disk_of_b, "b", "plain");
        let mut seen_by_b = watch("b");
        let first = seen_by_b.find_living(&disk_of_b).expect("look");
        if first.has_undecided {
            // The lock of `a` proves nothing here, so its heartbeat decides.
            assert_eq!(said(&first), []);
        }
        lease.write_heartbeat(&disk_of_a, None).expect("heartbeat");
        let second = seen_by_b.find_living(&disk_of_b).expect("look");
        assert_eq!(said(&second), [("a", "log")], "{reach:?}");
        assert!(!second.has_undecided);
        // `a` is killed, and blocks no other host.
        drop(lease);
        let third = seen_by_b.find_living(&disk_of_b).expect("look");
        let fourth = seen_by_b.find_living(&disk_of_b).expect("look");
        assert_eq!(said(&fourth), [], "{reach:?}: {third:?}");
        // `a` comes back. The terms of its earlier holding do not count.
        let dir = make_host_dir(&disk_of_a, "a").expect("dir");
        let again = Lease::acquire(&disk_of_a, &dir, USE, &holder("a"), &mut |_| ());
        let again = again.expect("take");
        let unsaid = seen_by_b.find_living(&disk_of_b).expect("look");
        assert_eq!(said(&unsaid), [], "{reach:?}");
        again.release(&disk_of_a, None).expect("release");
        let released = seen_by_b.find_living(&disk_of_b).expect("look");
        assert!(said(&released).is_empty() && !released.has_undecided);
    }
}

/// Proves S-share-6.
#[test]
fn of_two_hosts_that_come_at_once_at_least_one_sees_the_other() {
    for step in 1..STEPS_MAX {
        let a = disk();
        let b = a.another_process();
        // Host `a` is overtaken at this call.
        let hang = a.hang_at(a.steps() + step);
        let seen_by_a = std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                let (_, lease) = join(&a, "a", "log");
                let peers = watch("a").find_living(&a).expect("look");
                (said(&peers).len(), lease)
            });
            let (_, lease_of_b) = join(&b, "b", "plain");
            let by_b = said(&watch("b").find_living(&b).expect("look")).len();
            drop(hang);
            let (by_a, _lease_of_a) = first.join().expect("no panic");
            drop(lease_of_b);
            (by_a, by_b)
        });
        let (by_a, by_b) = seen_by_a;
        assert!(by_a + by_b >= 1, "call {step}: {by_a}, {by_b}");
    }
}

/// Returns each host's state and the evidence for it, by name.
fn lives(survey: &Survey) -> Vec<(&str, Life, Evidence)> {
    let hosts = survey.hosts.iter();
    hosts
        .map(|seen| (seen.host.as_str(), seen.life, seen.evidence))
        .collect()
}

#[test]
fn a_survey_tells_hosts_that_live_are_stopped_have_died_or_left() {
    let disk_of_a = disk();
    disk_of_a.set_tick(Duration::from_millis(1));
    let reader = disk_of_a.another_process();
    let (_, mut a) = join(&disk_of_a, "a", "log");
    let disk_of_b = disk_of_a.another_process();
    let (_, b) = join(&disk_of_b, "b", "plain");
    let (_, c) = join(&disk_of_a.another_process(), "c", "log");
    let report = serde_json::json!({"held_bytes": 7});
    a.write_heartbeat(&disk_of_a, Some(report.clone()))
        .expect("heartbeat");
    c.release(&disk_of_a, Some(report.clone()))
        .expect("release");
    let look =
        |boot: &str, rest: &mut dyn FnMut(Duration)| survey(&reader, boot, rest).expect("survey");
    let young = look("boot of the reader", &mut never);
    let server = Evidence::ServerClock;
    assert_eq!(
        lives(&young),
        [
            ("a", Life::Alive, server),
            ("b", Life::Alive, server),
            ("c", Life::Left, Evidence::Lock)
        ]
    );
    assert_eq!(young.hosts[0].report, Some(report.clone()));
    assert_eq!(young.hosts[0].terms["layout"], "log");
    // The report of a host that left is still shown.
    assert_eq!(young.hosts[2].report, Some(report));
    // The survey leaves nothing in the directory.
    let names = own::list(
        &reader,
        &own::must_find_dir(&reader, &reader.root(), TOP).unwrap(),
    );
    assert_eq!(names.expect("list").len(), 3);
    // `b` is killed. Its own kernel detects that at once. Another kernel detects it when the heartbeat is old, because the
    // lock of `a` shows that locks reach.
    drop(b);
    let own_kernel = look("boot of b", &mut never);
    assert_eq!(lives(&own_kernel)[1], ("b", Life::Dead, Evidence::Lock));
    reader.pass(Duration::from_secs(10));
    let old = look("boot of the reader", &mut |_| ());
    assert_eq!(
        lives(&old)[..2],
        [
            ("a", Life::Silent, server),
            ("b", Life::Dead, Evidence::Lock)
        ]
    );
    let age = old.hosts[0].heartbeat_age.expect("age");
    assert!(age >= Duration::from_secs(10), "{age:?}");
    // A heartbeat that grows during the survey proves that the host is alive, whatever its time stamp is.
    let mut is_first = true;
    let beaten = look("boot of the reader", &mut |_| {
        if std::mem::take(&mut is_first) {
            a.write_heartbeat(&disk_of_a, None).expect("heartbeat");
        }
    });
    assert_eq!(lives(&beaten)[0], ("a", Life::Alive, Evidence::Beat));
}

#[test]
fn a_host_that_may_write_to_logs_is_silent_for_longer_where_locks_do_not_reach() {
    let disk_of_a = disk();
    disk_of_a.set_tick(Duration::from_millis(1));
    disk_of_a.set_lock_reach(LockReach::Host);
    let reader = disk_of_a.another_process();
    let dir = make_host_dir(&disk_of_a, "a").expect("dir");
    let lease = Lease::acquire(&disk_of_a, &dir, LeaseUse::Logs, &holder("a"), &mut never);
    let _lease = lease.expect("take");
    let look = || survey(&reader, "another", &mut |_| ()).expect("survey");
    reader.pass(Duration::from_secs(10));
    let silent = &look().hosts[0];
    assert_eq!((silent.life, silent.is_locked), (Life::Silent, false));
    reader.pass(Duration::from_secs(30));
    assert_eq!(look().hosts[0].life, Life::Dead);
}

#[test]
fn a_lock_of_another_kernel_shows_that_a_free_one_is_that_of_a_dead_host() {
    let disk_of_a = disk();
    disk_of_a.set_tick(Duration::from_millis(1));
    let disk_of_b = disk_of_a.another_process();
    let reader = disk_of_a.another_process();
    let take = |disk: &SimBacking, host: &str| {
        let dir = make_host_dir(disk, host).expect("dir");
        Lease::acquire(disk, &dir, LeaseUse::Logs, &holder(host), &mut never).expect("take")
    };
    let mut living = take(&disk_of_a, "a");
    drop(take(&disk_of_b, "b"));
    let look = || {
        let seen = survey(&reader, "another", &mut |_| ()).expect("survey");
        seen.hosts.into_iter().map(|host| (host.host, host.life))
    };
    reader.pass(Duration::from_secs(4));
    living.write_heartbeat(&disk_of_a, None).expect("heartbeat");
    assert!(look().eq([("a".into(), Life::Alive), ("b".into(), Life::Alive)]));
    reader.pass(Duration::from_secs(2));
    assert!(look().eq([("a".into(), Life::Alive), ("b".into(), Life::Dead)]));
    drop(living);
    // No lock is left that shows that locks reach.
    reader.pass(Duration::from_secs(10));
    assert!(look().eq([("a".into(), Life::Silent), ("b".into(), Life::Silent)]));
}

#[test]
fn a_report_that_is_too_long_costs_no_heartbeat() {
    let a = disk();
    let (dir, mut lease) = join(&a, "a", "log");
    let long = serde_json::json!({ "note": "x".repeat(10_000) });
    lease.write_heartbeat(&a, Some(long)).expect("heartbeat");
    lease
        .write_heartbeat(&a, None)
        .expect("it is still its own");
    let heartbeat = firn_hosts::Heartbeat::read(&a, &dir)
        .expect("read")
        .expect("heartbeat");
    assert_eq!(heartbeat.report(), None);
}
