//! Several hosts in shadow mode: their changes are committed together or undone together, whatever order hosts die in.

use crate::common;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::IoSlice;

use common::{Verbs, in_firn, seen};
use firn_backing::{Access, Backing, Caller, Errno, Names, RenameFlags, Volume};
use firn_sim::SimBacking;
use firn_sim::Tree;
use firn_transact::{
    AbortError, BeginError, CommitError, Expected, Members, Mode, OpenError, Stage, StageError,
    TransactionError, TransactionalBacking, Vote, VoteError,
};

const ME: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
const ID: u64 = 7;
const NAMES: [&str; 2] = ["a", "b"];

type Host = TransactionalBacking<SimBacking>;
type Hosts = [Option<Host>; 2];

fn open(
    disk: &SimBacking,
    name: &str,
) -> Result<(Host, firn_transact::RecoveryOutcome), OpenError> {
    let members = Members {
        host: name.into(),
        expected: Expected::Count(2),
    };
    TransactionalBacking::open_of_members(disk.clone(), members)
        .map(|(host, outcome)| (host.in_mode(Mode::Shadow), outcome))
}

fn put(on: &impl Backing, name: &str, at: u64, bytes: &[u8]) -> Result<(), Errno> {
    let host = on.lookup(&on.root(), OsStr::new(name))?.0;
    let file = on.open(&host, Access::ReadWrite)?;
    on.write_at(&file, &[IoSlice::new(bytes)], at).map(drop)
}

fn disk() -> SimBacking {
    let disk = SimBacking::new();
    let root = disk.root();
    for name in ["shared", "gone", "moved"] {
        disk.create(&ME, &root, OsStr::new(name), 0o644)
            .expect("create");
        put(&disk, name, 0, &[b'.'; 100]).expect("write");
    }
    disk.mkdir(&ME, &root, OsStr::new("dir"), 0o755)
        .expect("mkdir");
    disk.sync_all().expect("sync");
    disk
}

/// Makes the changes of a host: bytes that both hosts write, and names in directories that both change.
fn work(on: &impl Backing, index: usize) -> Result<(), Errno> {
    let root = on.root();
    let mark = b'a' + index as u8;
    put(on, "shared", 20 + index as u64 * 5, &[mark; 10])?;
    put(on, "shared", 100 + index as u64 * 10, &[mark; 10])?;
    let name = format!("own{index}");
    on.create(&ME, &root, OsStr::new(&name), 0o644)?;
    put(on, &name, 0, b"own")?;
    let dir = on.lookup(&root, OsStr::new("dir"))?.0;
    if index == 0 {
        on.unlink(&root, OsStr::new("gone"))?;
    } else {
        on.rename(
            &root,
            OsStr::new("moved"),
            &dir,
            OsStr::new("there"),
            RenameFlags::empty(),
        )?;
    }
    on.mkdir(&ME, &dir, OsStr::new(&name), 0o755).map(drop)
}

/// Returns the names in `.firn/` that several hosts share and that are still in use.
fn left_over(disk: &SimBacking) -> Vec<String> {
    let Ok((firn, _)) = disk.lookup(&disk.root(), OsStr::new(".firn")) else {
        return Vec::new();
    };
    let mut names = in_firn(disk);
    names.retain(|name| !name.starts_with('.') && !name.starts_with("host-"));
    // A shared directory without participants and decision counts as unused.
    names.retain(|name| {
        let dir = disk.lookup(&firn, OsStr::new(name)).expect("lookup").0;
        let mut is_used = !name.starts_with("shadow");
        disk.read_dir(&disk.open_dir(&dir).expect("open"), 0, &mut |entry| {
            is_used |= entry.name.to_string_lossy().starts_with("in-") || entry.name == "decision";
            true
        })
        .expect("list");
        is_used
    });
    names
}

/// Returns the trees before and after.
fn trees() -> (Tree, Tree) {
    let plain = disk();
    let old = seen(&plain);
    for index in 0..2 {
        work(&plain, index).expect("work");
    }
    (old, seen(&plain))
}

fn same(now: &Tree, wanted: &Tree) -> bool {
    let plain = |tree: &Tree| -> Vec<_> {
        tree.iter()
            .map(|(path, entry)| (path.clone(), entry.mode, entry.content.clone(), entry.nlink))
            .collect()
    };
    plain(now) == plain(wanted)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Commit,
    /// The first host aborts while the other host's transaction is open.
    Abort,
    /// The second host aborts when both hosts are prepared.
    AbortPrepared,
}

/// Takes one step of a host. Returns `true` when the host's part is over.
fn step(host: &Host, index: usize, stage: &mut u32, end: End) -> Result<bool, TransactionError> {
    let root = host.root();
    let stops = !host.scopes_to_stop().is_empty();
    match *stage {
        0 => drop(host.begin(&root, b"")?),
        1 => work(host, index)?,
        _ if end == End::Abort && (index == 0 || stops) => return abort(host, stage),
        2 if end == End::Abort => return Ok(false),
        2 => host.prepare(&root, ID)?,
        3 => host.publish_accesses(&root, ID)?,
        4 => match host.votes.poll_vote(ID, b"")? {
            Vote::Waiting { .. } => return Ok(false),
            Vote::Over(verdict) => verdict.into_result()?,
        },
        5 if end == End::AbortPrepared && (index == 1 || stops) => return abort(host, stage),
        5 if end == End::AbortPrepared => return Ok(false),
        5 => host.commit(&root, ID)?,
        _ => return Ok(true),
    }
    *stage += 1;
    Ok(*stage > 5)
}

fn abort(host: &Host, stage: &mut u32) -> Result<bool, TransactionError> {
    match host.abort(&host.root()) {
        Ok(()) => *stage = 6,
        Err(AbortError::Stopping { .. }) => return Ok(false),
        Err(error) => return Err(error.into()),
    }
    Ok(true)
}

/// Takes the steps of both hosts in turns until the crash. Returns the index of the host that the crash hit.
fn both(hosts: &Hosts, disk: &SimBacking, stages: &mut [u32; 2], end: End) -> Option<usize> {
    for _ in 0..20 {
        for at in 0..2 {
            let Some(host) = &hosts[at] else { continue };
            if stages[at] > 5 {
                continue;
            }
            if let Err(error) = step(host, at, &mut stages[at], end) {
                assert!(disk.is_dead(), "{error}");
                return Some(at);
            }
        }
    }
    None
}

fn fresh(disk: &SimBacking) -> Hosts {
    NAMES.map(|name| Some(open(disk, name).expect("open").0))
}

/// Proves S-tx-33, S-tx-34, S-tx-80, S-tx-81.
#[test]
fn what_conflicts_otherwise_is_committed_and_undone_together() {
    let (old, new) = trees();
    for end in [End::Commit, End::Abort, End::AbortPrepared] {
        let disk = disk();
        let hosts = fresh(&disk);
        let mut stages = [0; 2];
        assert_eq!(both(&hosts, &disk, &mut stages, end), None);
        assert_eq!(stages, [6, 6], "{end:?}");
        for host in hosts.iter().flatten() {
            let wanted = if end == End::Commit { &new } else { &old };
            assert!(same(&seen(host), wanted), "{end:?}: {:#?}", seen(host));
            assert_eq!(host.transactions(), []);
        }
        assert_eq!(left_over(&disk), [""; 0], "{end:?}");
        // A second transaction is possible afterwards.
        assert_eq!(
            hosts[1]
                .as_ref()
                .unwrap()
                .begin(&hosts[1].as_ref().unwrap().root(), b"")
                .err(),
            None
        );
    }
}

/// Proves S-tx-33.
#[test]
fn other_hosts_see_changes_at_once() {
    let disk = disk();
    let [Some(a), Some(b)] = fresh(&disk) else {
        unreachable!()
    };
    a.begin(&a.root(), b"").expect("begin");
    work(&a, 0).expect("work");
    assert!(same(&seen(&a), &seen(&b)));
    assert_eq!(a.abort(&a.root()), Ok(()), "the other is not in it");
    assert!(same(&seen(&b), &trees().0));
}

/// Lets living hosts continue and opens the backing again for dead hosts, until no transaction is left. Decides
/// transactions that wait for a decision.
fn recovered(
    disk: &SimBacking,
    hosts: &mut Hosts,
    stages: &mut [u32; 2],
    end: End,
    aborts: bool,
    told: &str,
) {
    for _ in 0..30 {
        for index in 0..2 {
            match &hosts[index] {
                Some(host) => {
                    let root = host.root();
                    if !host.scopes_to_stop().is_empty() {
                        match host.abort(&root) {
                            Ok(()) => stages[index] = 6,
                            Err(AbortError::Stopping { .. }) => {}
                            Err(error) => panic!("{told}: {error}"),
                        }
                        continue;
                    }
                    if stages[index] > 5 {
                        continue;
                    }
                    match step(host, index, &mut stages[index], end) {
                        Ok(_) => {}
                        Err(TransactionError::Begin(BeginError::NotOver { .. })) => {}
                        Err(TransactionError::Vote(VoteError::GivenUp { .. })) => {
                            let _ = host.reopen(&root, ID);
                        }
                        Err(error) => {
                            panic!("{told}: host {index}, stage {}: {error}", stages[index])
                        }
                    }
                }
                None => match open(disk, NAMES[index]) {
                    Ok((host, outcome)) => {
                        stages[index] = 6;
                        if !outcome.waiting.is_empty() {
                            stages[index] = 5;
                            let root = host.root();
                            // Changes fail while the outcome is open.
                            assert_eq!(put(&host, "shared", 0, b"x"), Err(Errno::BUSY), "{told}");
                            let ended = if aborts {
                                host.abort(&root).map_err(TransactionError::from)
                            } else {
                                host.commit(&root, ID).map_err(TransactionError::from)
                            };
                            match ended {
                                Ok(()) => stages[index] = 6,
                                Err(TransactionError::Abort(AbortError::Stopping { .. })) => {}
                                Err(TransactionError::Vote(
                                    VoteError::NotVoted { .. } | VoteError::GivenUp { .. },
                                )) => match host.abort(&root) {
                                    Ok(()) => stages[index] = 6,
                                    Err(AbortError::Stopping { .. }) => {}
                                    Err(error) => panic!("{told}: {error}"),
                                },
                                // The other host has decided.
                                Err(TransactionError::Stage(StageError::Decided { id })) => {
                                    host.commit(&root, id)
                                        .unwrap_or_else(|e| panic!("{told}: {e}"));
                                    stages[index] = 6;
                                }
                                Err(error) => panic!("{told}: {error}"),
                            }
                        }
                        hosts[index] = Some(host);
                    }
                    Err(OpenError::Abort(AbortError::Stopping { .. })) => {}
                    Err(error) => panic!("{told}: {error}"),
                },
            }
        }
        if stages.iter().all(|stage| *stage > 5) && hosts.iter().all(Option::is_some) {
            return;
        }
    }
    // A host that waits for others without result aborts.
    for (index, host) in hosts.iter().enumerate() {
        let Some(host) = host else {
            panic!("{told}: host {index} does not come up")
        };
        for one in host.transactions() {
            if let Err(error) = host.abort(&host.root()) {
                assert!(
                    matches!(error, AbortError::Stopping { .. }),
                    "{told}: {one:?}: {error}"
                );
            }
        }
    }
    for _ in 0..3 {
        for host in hosts.iter().flatten() {
            if !host.scopes_to_stop().is_empty() {
                let _ = host.abort(&host.root());
            }
        }
    }
}

fn crash_at_every_call(end: End) {
    let (old, new) = trees();
    let whole = disk();
    let hosts = fresh(&whole);
    let first = whole.steps();
    assert_eq!(both(&hosts, &whole, &mut [0; 2], end), None);
    let steps = whole.steps() - first;
    println!("{end:?}: {steps} calls");
    let mut outcomes = BTreeMap::new();
    for at in 1..=steps {
        for power in [false, true] {
            let disk = disk();
            let mut hosts = fresh(&disk);
            let mut stages = [0; 2];
            disk.crash_at(disk.steps() + at);
            let dead = both(&hosts, &disk, &mut stages, end);
            let told = format!(
                "{end:?}, call {at} of {steps}, power {power}, dead {dead:?}, stages {stages:?}"
            );
            disk.revive();
            let committed = end == End::Commit && stages.iter().any(|stage| *stage > 5);
            if power {
                hosts = [None, None];
                disk.power_loss(at);
                disk.fsck().expect("fsck");
            } else if let Some(dead) = dead {
                hosts[dead] = None;
            }
            // The order of the hosts is random.
            if power && at % 3 == 0 {
                // The recovery crashes as well.
                disk.crash_at(disk.steps() + 1 + at % 50);
                let _ = open(&disk, NAMES[(at % 2) as usize]);
                disk.revive();
                disk.power_loss(at ^ 0x5a);
            }
            recovered(
                &disk,
                &mut hosts,
                &mut stages,
                end,
                at % 4 == 1 || end != End::Commit,
                &told,
            );
            for host in hosts.iter().flatten() {
                assert_eq!(host.transactions(), [], "{told}");
            }
            let live = hosts
                .each_ref()
                .map(|host| seen(host.as_ref().expect("it is up")));
            drop(hosts);
            let now = NAMES.map(|name| {
                let (host, outcome) =
                    open(&disk, name).unwrap_or_else(|error| panic!("{told}: {error}"));
                assert_eq!(
                    (outcome.waiting, outcome.undone),
                    (Vec::new(), Vec::new()),
                    "{told}"
                );
                seen(&host)
            });
            let is_new = same(&now[1], &new);
            assert!(
                is_new || same(&now[1], &old),
                "{told}: half of it\n{:#?}",
                now[1]
            );
            assert!(!committed || is_new, "{told}: it was committed");
            assert!(
                same(&now[0], &now[1]) && same(&live[0], &now[0]) && same(&live[1], &now[0]),
                "{told}"
            );
            assert_eq!(left_over(&disk), [""; 0], "{told}");
            *outcomes.entry(is_new).or_insert(0) += 1;
        }
    }
    println!("whole: {outcomes:?}");
    assert_eq!(outcomes.len(), if end == End::Commit { 2 } else { 1 });
}

/// Proves S-tx-34, S-tx-35, S-tx-84.
#[test]
fn a_crash_at_any_call_of_a_commit_leaves_all_or_nothing() {
    crash_at_every_call(End::Commit);
}

/// Proves S-tx-34, S-tx-35, S-tx-81.
#[test]
fn a_crash_at_any_call_of_an_abort_leaves_the_tree_before() {
    crash_at_every_call(End::Abort);
    crash_at_every_call(End::AbortPrepared);
}

/// Proves S-tx-34, S-tx-81, S-tx-82.
#[test]
fn no_host_undoes_before_all_have_stopped_or_begins_before_all_have_left() {
    let disk = disk();
    let [Some(a), Some(b)] = fresh(&disk) else {
        unreachable!()
    };
    for (index, host) in [&a, &b].into_iter().enumerate() {
        host.begin(&host.root(), b"").expect("begin");
        work(host, index).expect("work");
    }
    let changed = seen(&disk);
    assert_eq!(
        a.abort(&a.root()),
        Err(AbortError::Stopping {
            hosts: vec!["b".into()]
        })
    );
    assert_eq!(put(&a, "shared", 0, b"x"), Err(Errno::CANCELED));
    assert_eq!(put(&b, "shared", 0, b"x"), Ok(()), "it has not heard of it");
    assert!(!same(&seen(&disk), &trees().0) && !same(&seen(&disk), &changed));
    assert!(matches!(
        a.commit(&a.root(), ID),
        Err(CommitError::Stage(StageError::Undoing))
    ));
    assert_eq!(b.scopes_to_stop(), [Vec::<u8>::new()]);
    assert_eq!(b.prepare(&b.root(), ID), Ok(()));
    b.publish_accesses(&b.root(), ID).expect("publish");
    assert!(
        matches!(b.votes.poll_vote(ID, b""), Ok(Vote::Over(verdict)) if verdict.clone().into_result().is_err())
    );
    assert!(matches!(
        b.commit(&b.root(), ID),
        Err(CommitError::Vote(
            VoteError::NotVoted { .. } | VoteError::GivenUp { .. }
        ))
    ));
    assert_eq!(b.abort(&b.root()), Ok(()), "it is the last one");
    assert_eq!(b.stopped_by(b""), Some("a".into()));
    assert!(same(&seen(&b), &trees().0));
    assert_eq!(
        b.begin(&b.root(), b"").err(),
        Some(BeginError::NotOver {
            hosts: vec!["a".into()]
        })
    );
    assert_eq!(a.transactions()[0].stage, Stage::Open);
    assert_eq!(a.abort(&a.root()), Ok(()));
    assert_eq!(b.begin(&b.root(), b"").err(), None);
    assert_eq!(a.begin(&a.root(), b"").err(), None);
    let dir = |host: &Host| {
        host.lookup(&host.root(), OsStr::new("dir"))
            .expect("lookup")
            .0
    };
    let (c, _) = open(&disk, "c").expect("open");
    assert!(
        matches!(
            c.begin(&c.root(), b""),
            Err(BeginError::TooManyHosts { .. })
        ),
        "more than take part"
    );
    assert!(
        matches!(c.begin(&dir(&c), b"dir"), Err(BeginError::Overlaps { .. })),
        "a scope in a scope"
    );
}

/// Proves S-tx-35.
#[test]
fn a_host_that_died_waits_until_the_others_have_stopped() {
    let disk = disk();
    let [Some(a), Some(b)] = fresh(&disk) else {
        unreachable!()
    };
    for (index, host) in [&a, &b].into_iter().enumerate() {
        host.begin(&host.root(), b"").expect("begin");
        work(host, index).expect("work");
    }
    drop(b);
    let refused = open(&disk, "b").err();
    assert_eq!(
        refused,
        Some(OpenError::Abort(AbortError::Stopping {
            hosts: vec!["a".into()]
        }))
    );
    assert_eq!(
        a.scopes_to_stop(),
        [Vec::<u8>::new()],
        "its end is everybody's"
    );
    assert_eq!(a.abort(&a.root()), Ok(()));
    let (b, outcome) = open(&disk, "b").expect("now it can");
    assert_eq!(outcome.undone, [Vec::<u8>::new()]);
    assert!(same(&seen(&b), &trees().0));
    assert_eq!(left_over(&disk), [""; 0]);
}
