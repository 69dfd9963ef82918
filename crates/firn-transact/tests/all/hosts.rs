//! Two and three hosts on one backing: their parts are committed together or not at all, whatever order hosts die in.

use crate::common;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::IoSlice;

use common::{Verbs, in_firn, seen};
use firn_backing::{Access, Backing, Caller, Errno, Files, Names, RenameFlags, Volume};
use firn_sim::{Fault, SimBacking, Tree};
use firn_transact::conflict::{AccessedFile, ConflictKind, ConflictSide, ProcessAccesses};
use firn_transact::{
    CommitError, Expected, Members, Stage, TransactionError, TransactionalBacking, Verdict, Vote,
    VoteError,
};

const ME: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
const ID: u64 = 7;

type Host = TransactionalBacking<SimBacking>;

fn members(name: &str, count: usize) -> Members {
    Members {
        host: name.into(),
        expected: Expected::Count(count),
    }
}

fn open(disk: &SimBacking, name: &str, count: usize) -> (Host, firn_transact::RecoveryOutcome) {
    TransactionalBacking::open_of_members(disk.clone(), members(name, count)).expect("open")
}

/// Returns a disk with the file `shared` of 100 bytes, and a directory.
fn disk() -> SimBacking {
    let disk = SimBacking::new();
    let root = disk.root();
    let (_, file, _) = disk
        .create(&ME, &root, OsStr::new("shared"), 0o644)
        .expect("create");
    disk.write_at(&file, &[IoSlice::new(&[b'.'; 100])], 0)
        .expect("write");
    disk.mkdir(&ME, &root, OsStr::new("dir"), 0o755)
        .expect("mkdir");
    disk.sync_all().expect("sync");
    disk
}

fn put(on: &impl Backing, name: &str, at: u64, bytes: &[u8]) {
    let host = on.lookup(&on.root(), OsStr::new(name)).expect("lookup").0;
    let file = on.open(&host, Access::ReadWrite).expect("open");
    assert_eq!(
        on.write_at(&file, &[IoSlice::new(bytes)], at),
        Ok(bytes.len())
    );
}

fn create(on: &impl Backing, name: &str) {
    on.create(&ME, &on.root(), OsStr::new(name), 0o644)
        .expect("create");
}

/// Makes the changes of a host: its stripe of the shared file, a stripe beyond the old end, and its own file.
fn work(on: &impl Backing, index: u64) {
    put(on, "shared", index * 10, &[b'a' + index as u8; 10]);
    put(on, "shared", 200 + index * 10, &[b'A' + index as u8; 10]);
    let name = format!("own{index}");
    create(on, &name);
    put(on, &name, 0, b"own");
}

fn votes(disk: &SimBacking) -> Vec<String> {
    let mut names = in_firn(disk);
    names.retain(|name| name.starts_with("vote-"));
    names
}

/// Takes one step of a host. Returns `Ok(true)` when the host's part is committed.
fn step(host: &Host, stage: &mut u32) -> Result<bool, TransactionError> {
    let root = host.root();
    match *stage {
        0 => host.prepare(&root, ID)?,
        1 => host
            .store_accesses(&root, Vec::new())
            .and_then(|()| host.publish_accesses(&root, ID))?,
        2 => match host.votes.poll_vote(ID, b"")? {
            Vote::Waiting { .. } => return Ok(false),
            Vote::Over(verdict) => verdict.into_result()?,
        },
        3 => host.commit(&root, ID)?,
        _ => return Ok(true),
    }
    *stage += 1;
    Ok(*stage > 3)
}

/// Returns the tree before the transaction and the tree with both parts.
fn trees() -> (Tree, Tree) {
    let plain = disk();
    let old = seen(&plain);
    work(&plain, 0);
    work(&plain, 1);
    (old, seen(&plain))
}

/// Takes the steps of both hosts in turns. Returns the index of the host that a crash hit; `None` if none was hit.
fn both(hosts: &mut [Option<Host>; 2], disk: &SimBacking, stages: &mut [u32; 2]) -> Option<usize> {
    for _ in 0..10 {
        for at in 0..2 {
            let Some(host) = &hosts[at] else { continue };
            if stages[at] > 3 {
                continue;
            }
            match step(host, &mut stages[at]) {
                Ok(_) => {}
                Err(error) => {
                    assert!(disk.is_dead(), "{error}");
                    return Some(at);
                }
            }
        }
    }
    None
}

fn begun(disk: &SimBacking) -> [Option<Host>; 2] {
    [("a", 0), ("b", 1)].map(|(name, index)| {
        let (host, _) = open(disk, name, 2);
        host.begin(&host.root(), b"").expect("begin");
        work(&host, index);
        Some(host)
    })
}

#[test]
fn parts_of_one_file_by_several_hosts_are_committed_together() {
    let (old, new) = trees();
    let disk = disk();
    let mut hosts = begun(&disk);
    assert_eq!(seen(&open(&disk, "c", 2).0), old);
    assert_eq!(both(&mut hosts, &disk, &mut [0; 2]), None);
    assert_eq!(seen(hosts[0].as_ref().unwrap()), new);
    assert_eq!(seen(hosts[1].as_ref().unwrap()), new);
    assert_eq!(votes(&disk), [""; 0]);
    for host in hosts.iter().flatten() {
        assert_eq!(host.lower.present_commit_id(b""), Ok(Some(ID)));
        assert_eq!(host.transactions(), []);
    }
}

/// Each call of a commit that is applied later fails once. The retries of firnd's background thread finish the commit
/// without another request.
#[test]
fn a_commit_that_is_applied_later_is_left_though_any_call_fails() {
    let (_, new) = trees();
    for at in 1.. {
        let disk = disk();
        let mut hosts = begun(&disk);
        let mut stages = [0; 2];
        while stages != [3; 2] {
            for (host, stage) in hosts.iter().flatten().zip(&mut stages) {
                if *stage < 3 {
                    step(host, stage).expect("no fault yet");
                }
            }
        }
        let [Some(first), Some(second)] = &mut hosts else {
            panic!("both hosts live");
        };
        first.decide(&first.root(), ID).expect("decide");
        let begun = disk.steps();
        disk.set_plan(move |_, step| (step == begun + at).then_some(Fault::Error(Errno::IO)));
        let apply_all = || {
            let commits = first.commits_to_apply().into_iter();
            let failed = commits.filter(|commit| commit.apply().is_err()).count();
            first.leave_applied_commits().is_ok() && failed == 0
        };
        let at_once = apply_all();
        let calls = disk.steps() - begun;
        disk.clear_plan();
        assert!(at_once || apply_all(), "call {at}");
        assert!(first.commits_to_apply().is_empty(), "call {at}");
        let waits_for = second.votes.hosts_not_applied(ID, b"").expect("a vote");
        assert_eq!(waits_for, ["b"], "call {at}");
        second.commit(&second.root(), ID).expect("commit");
        assert_eq!(votes(&disk), [] as [String; 0], "call {at}");
        assert_eq!(seen(second), new, "call {at}");
        if calls < at {
            println!("{calls} calls");
            return;
        }
    }
}

/// Proves S-tx-31, S-tx-70, S-tx-71.
#[test]
fn a_host_that_dies_at_any_call_leaves_both_parts_or_none() {
    let (old, new) = trees();
    let whole = disk();
    let mut hosts = begun(&whole);
    let first = whole.steps();
    assert_eq!(both(&mut hosts, &whole, &mut [0; 2]), None);
    let steps = whole.steps() - first;
    println!("{steps} calls");
    let mut outcomes = BTreeMap::new();
    for at in 1..=steps {
        for power in [false, true] {
            let disk = disk();
            let mut hosts = begun(&disk);
            let mut stages = [0; 2];
            disk.crash_at(disk.steps() + at);
            let dead = both(&mut hosts, &disk, &mut stages);
            let told =
                format!("call {at} of {steps}, power {power}, dead {dead:?}, stages {stages:?}");
            disk.revive();
            let committed = stages.iter().any(|stage| *stage > 3);
            if power {
                hosts = [None, None];
                disk.power_loss(at);
                disk.fsck().expect("fsck");
            } else if let Some(dead) = dead {
                hosts[dead] = None;
            }
            // The surviving host continues as its firnd would. When no other host comes, it ends the vote without a
            // commit.
            for index in 0..2 {
                let Some(host) = &hosts[index] else { continue };
                let root = host.root();
                while stages[index] <= 3 {
                    let before = stages[index];
                    match step(host, &mut stages[index]) {
                        Ok(false) if stages[index] == before => {
                            host.votes
                                .give_vote_up(ID, b"", "nobody came".into())
                                .expect("give up");
                        }
                        Ok(_) => {}
                        Err(TransactionError::Vote(VoteError::GivenUp { .. })) => {
                            host.reopen(&root, ID).expect("reopen");
                            host.abort(&root).expect("abort");
                            break;
                        }
                        Err(error) => panic!("{told}: {error}"),
                    }
                }
            }
            // The dead hosts come back, and end the transactions that wait for a decision.
            for (index, name) in ["a", "b"].into_iter().enumerate() {
                if hosts[index].is_some() {
                    continue;
                }
                let (host, outcome) = open(&disk, name, 2);
                let root = host.root();
                if !outcome.waiting.is_empty() {
                    assert_eq!(outcome.waiting, [(ID, Vec::new())], "{told}");
                    match at % 2 {
                        0 => host
                            .abort(&root)
                            .unwrap_or_else(|error| panic!("{told}: {error}")),
                        _ => match host.commit(&root, ID) {
                            Ok(()) => {}
                            Err(CommitError::Vote(
                                VoteError::NotVoted { .. } | VoteError::GivenUp { .. },
                            )) => {
                                host.abort(&root)
                                    .unwrap_or_else(|error| panic!("{told}: {error}"));
                            }
                            Err(error) => panic!("{told}: {error}"),
                        },
                    }
                }
                assert_eq!(host.transactions(), [], "{told}");
                hosts[index] = Some(host);
            }
            // The waiting host was opened first. The other host has seen the outcome by now, or sees it at its next
            // start.
            hosts = [None, None];
            let now = ["a", "b"].map(|name| {
                let (host, outcome) = open(&disk, name, 2);
                assert_eq!(outcome.waiting, [], "{told}");
                seen(&host)
            });
            assert!(
                now[1] == old || now[1] == new,
                "{told}: half of it\n{now:?}"
            );
            assert!(!committed || now[1] == new, "{told}: it was committed");
            assert_eq!(now[0], now[1], "{told}");
            assert_eq!(votes(&disk), [""; 0], "{told}");
            *outcomes.entry(now[1] == new).or_insert(0) += 1;
        }
    }
    println!("whole: {outcomes:?}");
    assert_eq!(outcomes.len(), 2, "some end this way, some that");
}

fn used(host: &Host, path: &str, pid: u32, read: &[std::ops::Range<u64>]) -> AccessedFile {
    let ino = host
        .attr(
            &host
                .lookup(&host.root(), OsStr::new(path))
                .expect("lookup")
                .0,
        )
        .expect("attr")
        .ino;
    let mut accesses = ProcessAccesses::default();
    read.iter()
        .for_each(|range| accesses.read.insert(range.clone()));
    AccessedFile {
        ino,
        path: path.into(),
        processes: BTreeMap::from([(pid, accesses)]),
    }
}

fn begin(disk: &SimBacking, names: &[&str]) -> Vec<Host> {
    let hosts = names
        .iter()
        .map(|name| open(disk, name, names.len()).0)
        .collect::<Vec<_>>();
    hosts
        .iter()
        .for_each(|host| drop(host.begin(&host.root(), b"").expect("begin")));
    hosts
}

fn vote(hosts: &[Host], used: &[Vec<AccessedFile>]) -> Vec<Verdict> {
    for (host, used) in hosts.iter().zip(used) {
        host.prepare(&host.root(), ID).expect("prepare");
        host.store_accesses(&host.root(), used.clone())
            .expect("note");
        host.publish_accesses(&host.root(), ID).expect("publish");
    }
    let verdict = |host: &Host| match host.votes.poll_vote(ID, b"").expect("vote") {
        Vote::Over(verdict) => verdict,
        waiting => panic!("{waiting:?}"),
    };
    hosts.iter().map(verdict).collect()
}

/// Proves S-tx-32.
#[test]
fn a_part_that_another_host_read_is_a_conflict_and_can_be_dropped() {
    let disk = disk();
    let old = seen(&disk);
    let hosts = begin(&disk, &["a", "b", "c"]);
    put(&hosts[0], "shared", 30, b"new");
    let reads = used(&hosts[2], "shared", 99, &[0..20, 31..32]);
    let verdicts = vote(&hosts, &[Vec::new(), Vec::new(), vec![reads]]);
    for verdict in &verdicts {
        let Verdict::Conflict(report) = verdict else {
            panic!("{verdict:?}")
        };
        let [conflict] = &report.conflicts[..] else {
            panic!("{report:?}")
        };
        assert_eq!(
            (&conflict.path, &conflict.what),
            (&"shared".into(), &ConflictKind::Bytes(31, 32))
        );
        let sides = [("a", 0, true), ("c", 99, false)];
        assert_eq!(
            conflict.sides,
            sides.map(|(host, pid, writes)| ConflictSide {
                host: host.into(),
                pid,
                writes
            })
        );
    }
    for host in &hosts {
        let root = host.root();
        assert!(matches!(
            host.commit(&root, ID),
            Err(CommitError::Vote(VoteError::Conflict(_)))
        ));
        host.reopen(&root, ID).expect("reopen");
        assert_eq!(host.transactions()[0].stage, Stage::Open);
    }
    assert_eq!(votes(&disk), [""; 0]);
    // The changes are still there. The transaction continues after the conflicting host has dropped its part.
    assert_ne!(seen(&hosts[0]), old);
    assert_eq!(seen(&hosts[1]), old);
    assert!(
        vote(&hosts, &[Vec::new(), Vec::new(), Vec::new()])
            .iter()
            .all(|verdict| *verdict == Verdict::Clear)
    );
    for host in &hosts {
        host.commit(&host.root(), ID).expect("commit");
    }
    assert_ne!(seen(&disk), old);
    assert_eq!(votes(&disk), [""; 0]);
}

/// Name of the case, the changes of each of two hosts, and the text of the conflict.
type Case = (&'static str, fn(&Host), fn(&Host), &'static str);

/// Proves S-tx-32, S-tx-72.
#[test]
fn names_cuts_and_modes_conflict() {
    let cases: [Case; 6] = [
        (
            "one name made twice",
            |a| create(a, "x"),
            |b| create(b, "x"),
            "x: the name was changed on a and on b",
        ),
        (
            "a file cut off that another writes behind the cut",
            |a| {
                let file = a.lookup(&a.root(), OsStr::new("shared")).unwrap().0;
                a.set_len(&a.open(&file, Access::ReadWrite).unwrap(), 50)
                    .unwrap();
            },
            |b| put(b, "shared", 60, b"x"),
            "shared, bytes 60 to 60: written on a, written on b",
        ),
        (
            "a file renamed that another writes",
            |a| {
                a.rename(
                    &a.root(),
                    OsStr::new("shared"),
                    &a.root(),
                    OsStr::new("y"),
                    RenameFlags::empty(),
                )
                .unwrap()
            },
            |b| put(b, "shared", 0, b"x"),
            "shared: the name was changed on a, used on b",
        ),
        (
            "a directory removed that another makes something in",
            |a| a.rmdir(&a.root(), OsStr::new("dir")).unwrap(),
            |b| {
                let dir = b.lookup(&b.root(), OsStr::new("dir")).unwrap().0;
                b.create(&ME, &dir, OsStr::new("z"), 0o644).unwrap();
            },
            "dir: the name was changed on a, used on b",
        ),
        (
            "modes set on both",
            |a| {
                a.set_mode(&a.lookup(&a.root(), OsStr::new("shared")).unwrap().0, 0o600)
                    .unwrap()
            },
            |b| {
                b.set_mode(&b.lookup(&b.root(), OsStr::new("shared")).unwrap().0, 0o640)
                    .unwrap()
            },
            "shared: owner, mode or attributes changed on a and on b",
        ),
        (
            "the same bytes",
            |a| put(a, "shared", 0, b"xyz"),
            |b| put(b, "shared", 2, b"xyz"),
            "shared, bytes 2 to 2: written on a, written on b",
        ),
    ];
    for (what, one, other, expected) in cases {
        let disk = disk();
        let hosts = begin(&disk, &["a", "b"]);
        one(&hosts[0]);
        other(&hosts[1]);
        let verdict = vote(&hosts, &[Vec::new(), Vec::new()]).remove(0);
        let Verdict::Conflict(report) = verdict else {
            panic!("{what}: {verdict:?}")
        };
        let found: Vec<_> = report.conflicts.iter().map(ToString::to_string).collect();
        assert!(found.contains(&expected.to_owned()), "{what}: {found:?}");
    }
}

#[test]
fn what_does_not_overlap_does_not_conflict() {
    let disk = disk();
    let hosts = begin(&disk, &["a", "b"]);
    // These changes do not conflict: one host's mode and another host's bytes, a cut of a different file by each host,
    // different names in one directory.
    hosts[0]
        .set_mode(
            &hosts[0]
                .lookup(&hosts[0].root(), OsStr::new("shared"))
                .unwrap()
                .0,
            0o600,
        )
        .unwrap();
    put(&hosts[1], "shared", 150, b"x");
    let dir = |host: &Host, name: &str| {
        let dir = host.lookup(&host.root(), OsStr::new("dir")).unwrap().0;
        host.create(&ME, &dir, OsStr::new(name), 0o644).unwrap();
    };
    dir(&hosts[0], "one");
    dir(&hosts[1], "two");
    assert_eq!(
        vote(&hosts, &[Vec::new(), Vec::new()]),
        [Verdict::Clear, Verdict::Clear]
    );
    // The hosts commit in reverse order.
    for host in hosts.iter().rev() {
        host.commit(&host.root(), ID).expect("commit");
    }
    let tree = seen(&disk);
    let shared = &tree[&b"shared"[..]];
    assert_eq!((shared.mode & 0o777, shared.content.len()), (0o600, 151));
    assert!(tree.contains_key(&b"dir/one"[..]) && tree.contains_key(&b"dir/two"[..]));
}

/// Proves S-tx-31, S-tx-69.
#[test]
fn an_abort_by_one_host_aborts_for_all() {
    let disk = disk();
    let old = seen(&disk);
    let hosts = begin(&disk, &["a", "b"]);
    work(&hosts[0], 0);
    work(&hosts[1], 1);
    assert_eq!(
        vote(&hosts, &[Vec::new(), Vec::new()]),
        [Verdict::Clear, Verdict::Clear]
    );
    hosts[1].abort(&hosts[1].root()).expect("abort");
    let root = hosts[0].root();
    assert!(
        matches!(hosts[0].commit(&root, ID), Err(CommitError::Vote(VoteError::GivenUp { by, .. })) if by == "b")
    );
    hosts[0].abort(&root).expect("abort");
    assert_eq!(
        (seen(&hosts[0]), seen(&hosts[1])),
        (old.clone(), old.clone())
    );
    // An abort of an unprepared part counts too: the other host does not wait for it.
    for host in &hosts {
        host.begin(&host.root(), b"").expect("begin");
    }
    hosts[0].prepare(&root, ID).expect("prepare");
    hosts[0].store_accesses(&root, Vec::new()).expect("note");
    hosts[0].publish_accesses(&root, ID).expect("publish");
    let waits = hosts[0].votes.poll_vote(ID, b"").expect("vote");
    assert_eq!(
        waits,
        Vote::Waiting {
            published: vec!["a".into()],
            expected: 2,
            missing: Vec::new()
        }
    );
    hosts[1].abort(&hosts[1].root()).expect("abort");
    assert!(
        matches!(hosts[0].votes.poll_vote(ID, b""), Ok(Vote::Over(Verdict::GivenUp { by, .. })) if by == "b")
    );
    hosts[0].abort(&root).expect("abort");
    assert_eq!(seen(&disk_view(&disk)), old);
    assert_eq!(votes(&disk), [""; 0]);
}

fn disk_view(disk: &SimBacking) -> Host {
    open(disk, "viewer", 2).0
}

#[test]
fn a_number_is_used_again_only_when_all_have_left() {
    let disk = disk();
    let hosts = begin(&disk, &["a", "b"]);
    vote(&hosts, &[Vec::new(), Vec::new()]);
    hosts[0].abort(&hosts[0].root()).expect("abort");
    let root = hosts[0].root();
    hosts[0].begin(&root, b"").expect("begin");
    hosts[0].prepare(&root, ID).expect("prepare");
    hosts[0].store_accesses(&root, Vec::new()).expect("note");
    assert_eq!(
        hosts[0].publish_accesses(&root, ID),
        Err(VoteError::LastVoteNotOver { id: ID })
    );
    hosts[1].abort(&hosts[1].root()).expect("abort");
    hosts[0].publish_accesses(&root, ID).expect("now it can");
}

/// A host publishes its list. At each of its calls, another host removes an earlier vote with the same number.
#[test]
fn regression_a_host_that_publishes_while_an_earlier_vote_is_removed_does_so_later() {
    let begin_again = || {
        let disk = disk();
        let hosts = begin(&disk, &["a", "b"]);
        vote(&hosts, &[Vec::new(), Vec::new()]);
        let root = hosts[0].root();
        hosts[0].abort(&root).expect("abort");
        hosts[0].begin(&root, b"").expect("begin");
        hosts[0].prepare(&root, ID).expect("prepare");
        hosts[0].store_accesses(&root, Vec::new()).expect("note");
        (disk, hosts)
    };
    let publish = |hosts: &[Host]| hosts[0].publish_accesses(&hosts[0].root(), ID);
    let later = Err(VoteError::LastVoteNotOver { id: ID });
    let (disk, hosts) = begin_again();
    let before = disk.steps();
    assert_eq!(publish(&hosts), later);
    for at in 1..=disk.steps() - before {
        let (disk, hosts) = begin_again();
        let hang = disk.hang_at(disk.steps() + at);
        let published = std::thread::scope(|scope| {
            let published = scope.spawn(|| publish(&hosts));
            hang.await_call();
            hosts[1].abort(&hosts[1].root()).expect("abort");
            hang.release();
            published.join().expect("no panic")
        });
        assert!(
            published.is_ok() || published == later,
            "call {at}: {published:?}"
        );
        publish(&hosts).expect("now it can");
    }
}

#[test]
fn regression_two_threads_of_a_host_that_put_the_same_file_do_not_disturb_each_other() {
    let disk = disk();
    let (host, _) = open(&disk, "a", 1);
    for id in 1..300 {
        host.begin(&host.root(), b"").expect("begin");
        put(&host, "shared", 0, b"more");
        host.prepare(&host.root(), id).expect("prepare");
        host.store_accesses(&host.root(), Vec::new())
            .and_then(|()| host.publish_accesses(&host.root(), id))
            .expect("publish");
        let barrier = std::sync::Barrier::new(2);
        let poll = || {
            barrier.wait();
            host.votes.poll_vote(id, b"").expect("vote")
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(poll);
            let one = poll();
            let other = other.join().expect("no panic");
            assert_eq!(
                (one, other),
                (Vote::Over(Verdict::Clear), Vote::Over(Verdict::Clear)),
                "vote {id}"
            );
        });
        host.commit(&host.root(), id).expect("commit");
        assert_eq!(votes(&disk), [""; 0]);
    }
}

/// `firn abort` is called just after the thread that watches other hosts has ended the transaction.
#[test]
fn regression_calling_off_what_is_ended_makes_no_vote() {
    let disk = disk();
    let hosts = begun(&disk);
    for host in hosts.iter().flatten() {
        host.prepare(&host.root(), ID).expect("prepare");
        host.store_accesses(&host.root(), Vec::new())
            .and_then(|()| host.publish_accesses(&host.root(), ID))
            .expect("publish");
    }
    for host in hosts.iter().flatten() {
        host.votes.call_commit_off(ID, b"").expect("called off");
        host.abort(&host.root()).expect("abort");
    }
    assert_eq!(votes(&disk), [""; 0]);
    hosts[0]
        .as_ref()
        .unwrap()
        .votes
        .call_commit_off(ID, b"")
        .expect("nothing is to be called off");
    assert_eq!(votes(&disk), [""; 0]);
}
