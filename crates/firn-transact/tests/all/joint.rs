//! Two hosts write one scope of names, with the steps that commit rules take. They commit it together or not at all,
//! whatever order hosts die in.

use crate::common;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io::IoSlice;

use common::{in_firn, seen};
use firn_backing::{Backing, Caller, Errno, Names, Volume};
use firn_rules::joint::{Attempt, HostState, JointStep, JointView, OwnPart, next_step};
use firn_sim::{Fault, SimBacking, Tree};
use firn_transact::{
    BeginError, Expected, Members, NamesEntry, NamesView, TransactionError, TransactionHandle,
    TransactionalBacking, Verdict,
};

const ME: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
const KEY: &[u8] = b"hf\0\0checkpoint-1";
const HOSTS: [&str; 2] = ["a", "b"];

type Host = TransactionalBacking<SimBacking>;
type Content = BTreeMap<String, u64>;

fn open(disk: &SimBacking, name: &str) -> Host {
    let members = Members {
        host: name.into(),
        expected: Expected::Count(2),
    };
    let opened = TransactionalBacking::open_of_members(disk.clone(), members);
    let (host, outcome) = opened.expect("open");
    assert_eq!(outcome.waiting, [], "no host is asked about a checkpoint");
    host
}

/// Returns a disk with an earlier checkpoint and a pointer to it.
fn disk() -> SimBacking {
    let disk = SimBacking::new();
    let root = disk.root();
    let (dir, _) = disk
        .mkdir(&ME, &root, OsStr::new("checkpoint-0"), 0o755)
        .expect("mkdir");
    put(&disk, &dir, "model", b"old");
    put(&disk, &root, "latest", b"0");
    disk.sync_all().expect("sync");
    disk
}

fn put<B: Backing>(on: &B, dir: &B::Inode, name: &str, bytes: &[u8]) {
    let made = on.create(&ME, dir, OsStr::new(name), 0o644);
    let (_, file, _) = made.expect("create");
    assert_eq!(
        on.write_at(&file, &[IoSlice::new(bytes)], 0),
        Ok(bytes.len())
    );
}

/// Makes the changes of a rank on each host: its files in the new directory, which each rank makes. The first rank also
/// changes the pointer.
fn work<B: Backing>(on: &B, index: usize) {
    let root = on.root();
    let dir = match on.mkdir(&ME, &root, OsStr::new("checkpoint-1"), 0o750) {
        Ok((dir, _)) => dir,
        Err(Errno::EXIST) => {
            on.lookup(&root, OsStr::new("checkpoint-1"))
                .expect("lookup")
                .0
        }
        Err(errno) => panic!("{errno}"),
    };
    put(on, &dir, &format!("rank-{index}"), b"rank");
    let below = on.mkdir(&ME, &dir, OsStr::new("shards"), 0o700);
    let below = match below {
        Ok((below, _)) => below,
        Err(_) => on.lookup(&dir, OsStr::new("shards")).expect("lookup").0,
    };
    put(on, &below, &format!("shard-{index}"), b"shard");
    if index == 0 {
        on.unlink(&root, OsStr::new("latest")).expect("unlink");
        put(on, &root, "latest", b"1");
    }
}

fn trees() -> [Tree; 2] {
    let plain = disk();
    let old = shape(seen(&plain));
    work(&plain, 0);
    work(&plain, 1);
    [old, shape(seen(&plain))]
}

/// Returns the tree for a comparison.
fn shape(tree: Tree) -> Tree {
    tree
}

fn names(names: &[&str]) -> Vec<OsString> {
    names.iter().map(OsString::from).collect()
}

/// One host's part of the transaction.
#[derive(Clone, Default)]
struct Part {
    serial: u64,
    own: OwnPart,
    end: Option<bool>,
}

fn begin(host: &Host, index: usize) -> Part {
    let tops: &[&str] = match index {
        0 => &["latest", "checkpoint-1"],
        _ => &["checkpoint-1"],
    };
    let begun = host
        .begin_names(&host.root(), b"", &names(tops), KEY)
        .expect("begin");
    work(host, index);
    Part {
        serial: begun.serial(),
        own: OwnPart {
            state: HostState {
                changes: 1,
                living: 1,
                ..HostState::default()
            },
            has_event: index == 0,
            ..OwnPart::default()
        },
        end: None,
    }
}

fn view_of_ballot(view: &NamesView<HostState, Content>) -> JointView {
    let attempt = view.attempt.as_ref().map(|attempt| Attempt {
        number: attempt.number,
        changes: attempt.content.clone(),
        published: attempt.published.clone(),
        is_clear: attempt
            .verdict
            .as_ref()
            .map(|verdict| *verdict == Verdict::Clear),
        is_conflict: matches!(attempt.verdict, Some(Verdict::Conflict(_))),
    });
    JointView {
        joined: view.joined.clone(),
        states: view.states.clone(),
        has_event: view.has_event,
        attempt,
        decision: view.decision,
    }
}

/// Takes one step of a host, as firnd does.
fn step(
    host: &Host,
    me: &str,
    part: &mut Part,
    dead: &BTreeSet<String>,
) -> Result<(), TransactionError> {
    let found = || host.transaction_numbered(part.serial);
    let Some(ballot) = host.names_ballots.find(KEY)? else {
        if let Some(found) = found() {
            found.abort()?;
        }
        part.end = Some(false);
        return Ok(());
    };
    let view: NamesView<HostState, Content> = ballot.view()?;
    match next_step(&view_of_ballot(&view), me, &part.own, dead, &|_| None) {
        JointStep::Wait(_) => {}
        JointStep::PutEvent => ballot.put_event(&())?,
        JointStep::PutState => ballot.put_state(&part.own.state)?,
        JointStep::Try(attempt) => ballot.put_attempt(attempt.number, &attempt.changes)?,
        JointStep::Publish(number) => {
            let published = found().map(|found| found.publish_names(number));
            part.own.prepared_for = Some(number);
            if let Some(Err(error)) = published {
                ballot.give_up(number, error.to_string())?;
                return Err(error.into());
            }
        }
        JointStep::GiveUp { number, reason } => ballot.give_up(number, reason)?,
        JointStep::Judge(attempt) => {
            let hosts = attempt.changes.keys().cloned().collect();
            let verdict = ballot.test(attempt.number, &hosts)?;
            ballot.judge(attempt.number, &verdict)?;
        }
        JointStep::Decide { commit, .. } => drop(ballot.settle(commit)?),
        JointStep::Reopen(_) => {
            if let Some(TransactionHandle::Prepared(prepared)) = found() {
                prepared.reopen_names()?;
            }
            part.own.prepared_for = None;
        }
        JointStep::Apply => {
            let applied = match found() {
                Some(TransactionHandle::Prepared(prepared)) => prepared
                    .decide()
                    .map_err(TransactionError::from)
                    .and_then(|decided| Ok(decided.apply()?)),
                Some(TransactionHandle::Decided(decided)) => decided.apply().map_err(Into::into),
                Some(TransactionHandle::Open(_)) => panic!("a commit of what was not prepared"),
                None => Ok(()),
            };
            // If only the other hosts could not be notified, firnd tries that again later.
            if found().is_some() {
                applied?;
            }
            part.end = Some(true);
        }
        JointStep::Undo => {
            if let Some(found) = found() {
                found.abort()?;
            }
            part.end = Some(false);
            ballot.remove_aborted(dead)?;
        }
    }
    Ok(())
}

/// Takes the steps of both hosts in turns. Returns the index of the host that a crash hit; `None` if none was hit.
fn run(
    hosts: &[Option<Host>; 2],
    parts: &mut [Part; 2],
    disk: &SimBacking,
    dead: &BTreeSet<String>,
) -> Option<usize> {
    for _ in 0..40 {
        for index in 0..2 {
            let Some(host) = &hosts[index] else { continue };
            if parts[index].end.is_some() {
                continue;
            }
            if let Err(error) = step(host, HOSTS[index], &mut parts[index], dead) {
                assert!(disk.is_dead(), "{error}");
                return Some(index);
            }
        }
    }
    None
}

fn ballots(disk: &SimBacking) -> Vec<String> {
    let mut names = in_firn(disk);
    names.retain(|name| name.starts_with("names-") || name.starts_with("vote-"));
    names
}

fn begun(disk: &SimBacking) -> ([Option<Host>; 2], [Part; 2]) {
    let hosts = HOSTS.map(|name| open(disk, name));
    let parts = [begin(&hosts[0], 0), begin(&hosts[1], 1)];
    (hosts.map(Some), parts)
}

#[test]
fn a_directory_that_both_make_has_the_files_of_both_after_the_commit() {
    let [old, new] = trees();
    let disk = disk();
    let (hosts, mut parts) = begun(&disk);
    assert_eq!(shape(seen(&open(&disk, "c"))), old);
    assert_eq!(run(&hosts, &mut parts, &disk, &BTreeSet::new()), None);
    assert_eq!(parts.clone().map(|part| part.end), [Some(true); 2]);
    for host in hosts.iter().flatten() {
        assert_eq!(shape(seen(host)), new);
        assert_eq!(host.transactions(), []);
    }
    assert_eq!(ballots(&disk), [""; 0]);
    // A scope with the same name can begin afterwards.
    let again = hosts.map(|host| {
        let host = host.expect("it lives");
        let begun = host.begin_names(&host.root(), b"", &names(&["checkpoint-1"]), KEY);
        begun.expect("begin").abort().expect("abort");
        host
    });
    assert_eq!(shape(seen(&again[0])), new);
    drop(again);
    drop(open(&disk, "a"));
    drop(open(&disk, "b"));
    assert_eq!(ballots(&disk), [""; 0]);
}

#[test]
fn the_same_file_by_two_hosts_is_a_conflict_and_both_stay_open() {
    let disk = disk();
    let (hosts, mut parts) = begun(&disk);
    for host in hosts.iter().flatten() {
        let root = host.root();
        let dir = host
            .lookup(&root, OsStr::new("checkpoint-1"))
            .expect("lookup")
            .0;
        put(host, &dir, "config.json", b"x");
    }
    assert_eq!(run(&hosts, &mut parts, &disk, &BTreeSet::new()), None);
    for (host, part) in hosts.iter().flatten().zip(&parts) {
        assert_eq!(part.end, None);
        assert!(matches!(
            host.transaction_numbered(part.serial),
            Some(TransactionHandle::Open(_))
        ));
        let ballot = host
            .names_ballots
            .find(KEY)
            .expect("find")
            .expect("a ballot");
        let view: NamesView<HostState, Content> = ballot.view().expect("view");
        let verdict = view.attempt.and_then(|attempt| attempt.verdict);
        let Some(Verdict::Conflict(report)) = verdict else {
            panic!("{verdict:?}");
        };
        assert_eq!(
            report.conflicts[0].path.as_bytes(),
            b"checkpoint-1/config.json"
        );
    }
    // All writers end without completing the scope, so both hosts drop it.
    for part in &mut parts {
        part.own.state.living = 0;
        part.own.state.changes += 1;
        part.own.has_failed = true;
    }
    assert_eq!(run(&hosts, &mut parts, &disk, &BTreeSet::new()), None);
    assert_eq!(parts.map(|part| part.end), [Some(false); 2]);
    assert_eq!(ballots(&disk), [""; 0]);
    assert_eq!(
        shape(seen(hosts[0].as_ref().expect("it lives"))),
        trees()[0]
    );
}

#[test]
fn no_host_begins_while_others_commit() {
    let disk = disk();
    let hosts = HOSTS.map(|name| open(&disk, name));
    let mut part = begin(&hosts[0], 0);
    while part.own.prepared_for.is_none() {
        step(&hosts[0], "a", &mut part, &BTreeSet::new()).expect("a step");
    }
    let late = hosts[1].begin_names(&hosts[1].root(), b"", &names(&["checkpoint-1"]), KEY);
    let Err(BeginError::NotOver { hosts: others }) = late else {
        panic!("it began");
    };
    assert_eq!(others, ["a"]);
    assert_eq!(
        NamesEntry::NotYet(others.clone()),
        NamesEntry::NotYet(others)
    );
    while part.end.is_none() {
        step(&hosts[0], "a", &mut part, &BTreeSet::new()).expect("a step");
    }
    let begun = hosts[1].begin_names(&hosts[1].root(), b"", &names(&["checkpoint-1"]), KEY);
    begun.expect("begin").abort().expect("abort");
    assert_eq!(ballots(&disk), [""; 0]);
}

/// Proves S-rule-14.
#[test]
fn a_host_that_dies_at_any_call_leaves_the_parts_of_both_or_of_none() {
    let [old, new] = trees();
    let whole = disk();
    let (hosts, mut parts) = begun(&whole);
    let first = whole.steps();
    assert_eq!(run(&hosts, &mut parts, &whole, &BTreeSet::new()), None);
    let steps = whole.steps() - first;
    println!("{steps} calls");
    let mut outcomes = BTreeMap::new();
    for at in 1..=steps {
        for power in [false, true] {
            let disk = disk();
            let (mut hosts, mut parts) = begun(&disk);
            disk.crash_at(disk.steps() + at);
            let dead = run(&hosts, &mut parts, &disk, &BTreeSet::new());
            let committed = parts.iter().any(|part| part.end == Some(true));
            let told = format!("call {at} of {steps}, power {power}, dead {dead:?}, {committed}");
            disk.revive();
            if power {
                hosts = [None, None];
                disk.power_loss(at);
                disk.fsck().expect("fsck");
            } else if let Some(dead) = dead {
                hosts[dead] = None;
            }
            let gone: BTreeSet<String> = (0..2)
                .filter(|host| hosts[*host].is_none())
                .map(|host| HOSTS[host].to_owned())
                .collect();
            assert_eq!(run(&hosts, &mut parts, &disk, &gone), None, "{told}");
            for (part, host) in parts.iter().zip(&hosts) {
                assert!(host.is_none() || part.end.is_some(), "{told}");
            }
            // The dead hosts come back. The scope that the others wait for is over then.
            let now = HOSTS.map(|name| {
                let host = open(&disk, name);
                assert_eq!(host.transactions(), [], "{told}");
                shape(seen(&host))
            });
            drop(open(&disk, "a"));
            assert!(
                now[1] == old || now[1] == new,
                "{told}: a part of it\n{now:?}"
            );
            assert!(!committed || now[1] == new, "{told}: it was committed");
            assert_eq!(ballots(&disk), [""; 0], "{told}");
            *outcomes.entry(now[1] == new).or_insert(0) += 1;
        }
    }
    println!("whole: {outcomes:?}");
    assert_eq!(outcomes.len(), 2, "some end this way, some that");
}

/// An error of the backing at any call ends nothing: the next attempt continues.
#[test]
fn a_call_that_fails_once_is_made_up_for() {
    let [_, new] = trees();
    for at in 1.. {
        let disk = disk();
        let (hosts, mut parts) = begun(&disk);
        let first = disk.steps();
        disk.set_plan(move |_, step| (step == first + at).then_some(Fault::Error(Errno::IO)));
        for _ in 0..60 {
            for index in 0..2 {
                let Some(host) = &hosts[index] else { continue };
                if parts[index].end.is_none() {
                    // A failed step is tried again.
                    let _ = step(host, HOSTS[index], &mut parts[index], &BTreeSet::new());
                }
            }
        }
        let calls = disk.steps() - first;
        disk.clear_plan();
        for host in hosts.iter().flatten() {
            host.leave_applied_commits().expect("leave");
        }
        assert_eq!(
            parts.clone().map(|part| part.end),
            [Some(true); 2],
            "call {at}"
        );
        assert_eq!(
            shape(seen(hosts[0].as_ref().expect("it lives"))),
            new,
            "call {at}"
        );
        assert_eq!(ballots(&disk), [""; 0], "call {at}");
        if calls < at {
            println!("{at} calls");
            return;
        }
    }
}
