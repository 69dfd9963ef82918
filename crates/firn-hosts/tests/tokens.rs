//! Tokens as lock files, for hosts on one directory and on a simulated disk.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{HANGS_AFTER, Host, limits, wait_for_state, wait_until, write_together};
use firn_backing::{Backing, DirBacking, Errno, Volume};
use firn_hosts::own;
use firn_hosts::tokens::{FlockService, LockService, TokenReply, TokenState};
use firn_sim::LockReach;
use firn_sim::SimBacking;
use firn_sim::suite::own_caller;

fn service<B: Backing>(base: Arc<B>, host: &str) -> FlockService<B> {
    let dir = own::make_dir(&*base, &base.root(), "tokens").expect("a directory of our own");
    FlockService::new(base, dir, 0, host)
}

fn host_over(dir: &std::path::Path, name: &str, wait_ms: u64) -> Host {
    let base = Arc::new(DirBacking::open(dir).expect("open"));
    Host::start(Box::new(service(base, name)), limits(20, wait_ms))
}

fn sim() -> SimBacking {
    let disk = SimBacking::new();
    disk.set_owner(&disk.root(), Some(own_caller().uid), None)
        .expect("set_owner");
    disk
}

#[test]
fn hosts_write_one_at_a_time_and_each_has_its_turns() {
    let dir = tempfile::tempdir().expect("tempdir");
    let hosts: Vec<_> = (0..6)
        .map(|at| {
            host_over(
                dir.path(),
                &format!("n{at}"),
                HANGS_AFTER.as_millis() as u64,
            )
        })
        .collect();
    let (writers_max, all_with_token) = write_together(&hosts, 40, Duration::from_millis(2));
    assert_eq!((writers_max, all_with_token), (1, true));
    for host in &hosts {
        let figures = host.figures();
        assert!(
            figures.granted >= 1 && figures.went_without == 0,
            "{figures:?}"
        );
    }
}

#[test]
fn who_gave_the_token_back_comes_behind_the_one_that_is_next() {
    let base = Arc::new(sim());
    let mut services: Vec<_> = ["a", "b"]
        .map(|name| service(Arc::clone(&base), name))
        .into();
    let [a, b] = &mut services[..] else {
        unreachable!("there are two");
    };
    assert_eq!(a.ask().expect("ask"), TokenReply::Granted);
    assert!(!a.others_wait().expect("look"));
    let TokenReply::Queued(behind) = b.ask().expect("ask") else {
        panic!("two have it");
    };
    assert_eq!(behind.holder.as_deref(), Some("a"));
    assert!(a.others_wait().expect("look"));
    a.give_back().expect("give back");
    assert!(
        matches!(a.ask().expect("ask"), TokenReply::Queued(_)),
        "b is next"
    );
    assert_eq!(b.ask().expect("ask"), TokenReply::Granted);
    b.give_back().expect("give back");
    assert_eq!(a.ask().expect("ask"), TokenReply::Granted);
    a.give_back().expect("give back");
    let b_again = b.ask().expect("ask");
    assert_eq!(b_again, TokenReply::Granted);
}

#[test]
fn a_holder_that_dies_leaves_its_token_to_the_next() {
    let disk = sim();
    let dying = disk.another_process();
    let mut a = service(Arc::new(dying), "a");
    assert_eq!(a.ask().expect("ask"), TokenReply::Granted);
    let b = Host::start(
        Box::new(service(Arc::new(disk.another_process()), "b")),
        limits(20, HANGS_AFTER.as_millis() as u64),
    );
    let waiting = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| b.enter().has_token());
        wait_for_state(&b, TokenState::Waiting);
        wait_until("it knows the holder", || b.figures().holder.is_some());
        drop(a);
        waiting.join().expect("a thread")
    });
    assert!(waiting);
}

#[test]
fn a_holder_that_does_not_go_on_is_not_waited_for_for_ever() {
    let dir = tempfile::tempdir().expect("tempdir");
    let stuck = Arc::new(DirBacking::open(dir.path()).expect("open"));
    let mut stuck = service(stuck, "stuck");
    assert_eq!(stuck.ask().expect("ask"), TokenReply::Granted);
    let host = host_over(dir.path(), "n1", 200);
    assert!(!host.enter().has_token());
    let figures = host.figures();
    assert_eq!(
        (figures.state, figures.went_without),
        (TokenState::Without, 1)
    );
    assert_eq!(figures.holder.as_deref(), Some("stuck"));
    // A host that writes without the token does not keep other hosts from getting it.
    wait_until("it is next no more", || !stuck.others_wait().expect("look"));
    drop(stuck);
    wait_until("it has the token", || {
        let used = host.enter();
        let has_token = used.has_token();
        host.token().leave(used);
        has_token
    });
}

#[test]
fn a_backing_without_locks_and_one_that_hangs_hold_up_no_drain() {
    let refusing = sim();
    refusing.set_lock_reach(LockReach::Refused(Errno::NOLCK));
    let host = Host::start(Box::new(service(Arc::new(refusing), "n1")), limits(20, 200));
    assert!(!host.enter().has_token());
    let figures = host.figures();
    assert!(figures.errors > 0, "{figures:?}");
    assert!(
        figures
            .last_error
            .is_some_and(|error| error.contains("lock")),
        "it says why"
    );

    let disk = sim();
    let hanging = disk.another_process();
    let service = service(Arc::new(hanging.clone()), "n2");
    let hang = hanging.hang("try_lock");
    let host = Host::start(Box::new(service), limits(20, 200));
    assert!(!host.enter().has_token());
    assert_eq!(host.figures().state, TokenState::Without);
    host.stop_within(Duration::ZERO);
    assert!(!host.enter().has_token(), "a stopped token blocks no host");
    hang.release();
}

#[test]
fn a_file_that_is_not_ours_is_not_locked() {
    let base = Arc::new(sim());
    let mut planted = service(Arc::clone(&base), "a");
    let dir = own::make_dir(&*base, &base.root(), "tokens").expect("dir");
    base.symlink(
        &own_caller(),
        &dir,
        "lane-0.next".as_ref(),
        "/etc/passwd".as_ref(),
    )
    .expect("symlink");
    let error = planted.ask().expect_err("a link is no file of ours");
    assert!(error.to_string().contains("symbolic link"), "{error}");
}
