//! Two and three nodes over one backing: their parts go together or not at all, whoever dies when.

mod common;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::IoSlice;

use common::{in_firn, seen};
use firn_backing::sim::Tree;
use firn_backing::{Access, Backing, Caller, RenameFlags, SimBacking};
use firn_conflict::{Accesses, Party, Used, What};
use firn_held::{Group, Held, HeldError, Meeting, Participants, Stage, Verdict};

const ME: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
const ID: u64 = 7;

type Node = Held<SimBacking>;

fn group(name: &str, count: usize) -> Group {
    Group {
        node: name.into(),
        participants: Participants::Count(count),
    }
}

fn open(disk: &SimBacking, name: &str, count: usize) -> (Node, firn_held::Outcome) {
    Held::open_of_group(disk.clone(), group(name, count)).expect("open")
}

/// A disk with a file of 100 bytes, `shared`, and a directory.
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
    let node = on.lookup(&on.root(), OsStr::new(name)).expect("lookup").0;
    let file = on.open(&node, Access::ReadWrite).expect("open");
    assert_eq!(
        on.write_at(&file, &[IoSlice::new(bytes)], at),
        Ok(bytes.len())
    );
}

fn create(on: &impl Backing, name: &str) {
    on.create(&ME, &on.root(), OsStr::new(name), 0o644)
        .expect("create");
}

/// What a node does in a transaction: its stripe of the shared file, beyond its end too, and a file of its own.
fn work(on: &impl Backing, index: u64) {
    put(on, "shared", index * 10, &[b'a' + index as u8; 10]);
    put(on, "shared", 200 + index * 10, &[b'A' + index as u8; 10]);
    let name = format!("own{index}");
    create(on, &name);
    put(on, &name, 0, b"own");
}

fn meetings(disk: &SimBacking) -> Vec<String> {
    let mut names = in_firn(disk);
    names.retain(|name| name.starts_with("meet-"));
    names
}

/// One step of a node; `Ok(true)` when its part is committed.
fn step(node: &Node, stage: &mut u32) -> Result<bool, HeldError> {
    let root = node.root();
    match *stage {
        0 => node.prepare(&root, ID)?,
        1 => node
            .note_used(&root, Vec::new())
            .and_then(|()| node.publish(&root, ID))?,
        2 => match node.meet(ID, b"")? {
            Meeting::Waiting { .. } => return Ok(false),
            Meeting::Met(verdict) => verdict.agreed()?,
        },
        3 => node.commit(&root, ID)?,
        _ => return Ok(true),
    }
    *stage += 1;
    Ok(*stage > 3)
}

/// Two trees: before, and with both parts.
fn trees() -> (Tree, Tree) {
    let plain = disk();
    let old = seen(&plain);
    work(&plain, 0);
    work(&plain, 1);
    (old, seen(&plain))
}

/// All steps of both nodes in turns. `died`: which of them the crash hit.
fn both(nodes: &mut [Option<Node>; 2], disk: &SimBacking, stages: &mut [u32; 2]) -> Option<usize> {
    for _ in 0..10 {
        for at in 0..2 {
            let Some(node) = &nodes[at] else { continue };
            if stages[at] > 3 {
                continue;
            }
            match step(node, &mut stages[at]) {
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

fn begun(disk: &SimBacking) -> [Option<Node>; 2] {
    [("a", 0), ("b", 1)].map(|(name, index)| {
        let (node, _) = open(disk, name, 2);
        node.begin(&node.root(), b"").expect("begin");
        work(&node, index);
        Some(node)
    })
}

#[test]
fn parts_of_one_file_come_together() {
    let (old, new) = trees();
    let disk = disk();
    let mut nodes = begun(&disk);
    assert_eq!(seen(&open(&disk, "c", 2).0), old);
    assert_eq!(both(&mut nodes, &disk, &mut [0; 2]), None);
    assert_eq!(seen(nodes[0].as_ref().unwrap()), new);
    assert_eq!(seen(nodes[1].as_ref().unwrap()), new);
    assert_eq!(meetings(&disk), [""; 0]);
    for node in nodes.iter().flatten() {
        assert_eq!(node.committed(b""), Ok(Some(ID)));
        assert_eq!(node.transactions(), []);
    }
}

/// Proves S-tx-31.
#[test]
fn a_node_that_dies_at_any_call_leaves_both_parts_or_none() {
    let (old, new) = trees();
    let whole = disk();
    let mut nodes = begun(&whole);
    let first = whole.steps();
    assert_eq!(both(&mut nodes, &whole, &mut [0; 2]), None);
    let steps = whole.steps() - first;
    println!("{steps} calls");
    let mut outcomes = BTreeMap::new();
    for at in 1..=steps {
        for power in [false, true] {
            let disk = disk();
            let mut nodes = begun(&disk);
            let mut stages = [0; 2];
            disk.crash_at(disk.steps() + at);
            let dead = both(&mut nodes, &disk, &mut stages);
            let told =
                format!("call {at} of {steps}, power {power}, dead {dead:?}, stages {stages:?}");
            disk.revive();
            let committed = stages.iter().any(|stage| *stage > 3);
            if power {
                nodes = [None, None];
                disk.power_loss(at);
                disk.fsck().expect("fsck");
            } else if let Some(dead) = dead {
                nodes[dead] = None;
            }
            // The survivor goes on as its firnd would, and gives up when nobody comes.
            for index in 0..2 {
                let Some(node) = &nodes[index] else { continue };
                let root = node.root();
                while stages[index] <= 3 {
                    let before = stages[index];
                    match step(node, &mut stages[index]) {
                        Ok(false) if stages[index] == before => {
                            node.give_up(ID, b"", "nobody came".into())
                                .expect("give up");
                        }
                        Ok(_) => {}
                        Err(HeldError::GivenUp { .. }) => {
                            node.reopen(&root, ID).expect("reopen");
                            node.abort(&root).expect("abort");
                            break;
                        }
                        Err(error) => panic!("{told}: {error}"),
                    }
                }
            }
            // The dead come back, and end what waits.
            for (index, name) in ["a", "b"].into_iter().enumerate() {
                if nodes[index].is_some() {
                    continue;
                }
                let (node, outcome) = open(&disk, name, 2);
                let root = node.root();
                if !outcome.waiting.is_empty() {
                    assert_eq!(outcome.waiting, [(ID, Vec::new())], "{told}");
                    match at % 2 {
                        0 => node
                            .abort(&root)
                            .unwrap_or_else(|error| panic!("{told}: {error}")),
                        _ => match node.commit(&root, ID) {
                            Ok(()) => {}
                            Err(HeldError::NotMet { .. } | HeldError::GivenUp { .. }) => {
                                node.abort(&root)
                                    .unwrap_or_else(|error| panic!("{told}: {error}"));
                            }
                            Err(error) => panic!("{told}: {error}"),
                        },
                    }
                }
                assert_eq!(node.transactions(), [], "{told}");
                nodes[index] = Some(node);
            }
            // Who waits was asked first; the other has heard of it by now, or hears at its next start.
            nodes = [None, None];
            let now = ["a", "b"].map(|name| {
                let (node, outcome) = open(&disk, name, 2);
                assert_eq!(outcome.waiting, [], "{told}");
                seen(&node)
            });
            assert!(
                now[1] == old || now[1] == new,
                "{told}: half of it\n{now:?}"
            );
            assert!(!committed || now[1] == new, "{told}: it was committed");
            assert_eq!(now[0], now[1], "{told}");
            assert_eq!(meetings(&disk), [""; 0], "{told}");
            *outcomes.entry(now[1] == new).or_insert(0) += 1;
        }
    }
    println!("whole: {outcomes:?}");
    assert_eq!(outcomes.len(), 2, "some end this way, some that");
}

fn used(node: &Node, path: &str, pid: u32, read: &[std::ops::Range<u64>]) -> Used {
    let ino = node
        .attr(
            &node
                .lookup(&node.root(), OsStr::new(path))
                .expect("lookup")
                .0,
        )
        .expect("attr")
        .ino;
    let mut accesses = Accesses::default();
    read.iter()
        .for_each(|range| accesses.read.insert(range.clone()));
    Used {
        ino,
        path: path.into(),
        processes: BTreeMap::from([(pid, accesses)]),
    }
}

fn begin(disk: &SimBacking, names: &[&str]) -> Vec<Node> {
    let nodes = names
        .iter()
        .map(|name| open(disk, name, names.len()).0)
        .collect::<Vec<_>>();
    nodes
        .iter()
        .for_each(|node| node.begin(&node.root(), b"").expect("begin"));
    nodes
}

fn meet(nodes: &[Node], used: &[Vec<Used>]) -> Vec<Verdict> {
    for (node, used) in nodes.iter().zip(used) {
        node.prepare(&node.root(), ID).expect("prepare");
        node.note_used(&node.root(), used.clone()).expect("note");
        node.publish(&node.root(), ID).expect("publish");
    }
    let verdict = |node: &Node| match node.meet(ID, b"").expect("meet") {
        Meeting::Met(verdict) => verdict,
        waiting => panic!("{waiting:?}"),
    };
    nodes.iter().map(verdict).collect()
}

/// Proves S-tx-32.
#[test]
fn a_part_that_another_node_read_is_a_conflict_and_can_be_dropped() {
    let disk = disk();
    let old = seen(&disk);
    let nodes = begin(&disk, &["a", "b", "c"]);
    put(&nodes[0], "shared", 30, b"new");
    let reads = used(&nodes[2], "shared", 99, &[0..20, 31..32]);
    let verdicts = meet(&nodes, &[Vec::new(), Vec::new(), vec![reads]]);
    for verdict in &verdicts {
        let Verdict::Conflict(report) = verdict else {
            panic!("{verdict:?}")
        };
        let [conflict] = &report.conflicts[..] else {
            panic!("{report:?}")
        };
        assert_eq!(
            (&conflict.path, &conflict.what),
            (&"shared".into(), &What::Bytes(31, 32))
        );
        let parties = [("a", 0, true), ("c", 99, false)];
        assert_eq!(
            conflict.parties,
            parties.map(|(node, pid, writes)| Party {
                node: node.into(),
                pid,
                writes
            })
        );
    }
    for node in &nodes {
        let root = node.root();
        assert!(matches!(
            node.commit(&root, ID),
            Err(HeldError::Conflict(_))
        ));
        node.reopen(&root, ID).expect("reopen");
        assert_eq!(node.transactions()[0].stage, Stage::Open);
    }
    assert_eq!(meetings(&disk), [""; 0]);
    // The changes are still there, and the transaction goes on without what was in the way.
    assert_ne!(seen(&nodes[0]), old);
    assert_eq!(seen(&nodes[1]), old);
    assert!(
        meet(&nodes, &[Vec::new(), Vec::new(), Vec::new()])
            .iter()
            .all(|verdict| *verdict == Verdict::Clear)
    );
    for node in &nodes {
        node.commit(&node.root(), ID).expect("commit");
    }
    assert_ne!(seen(&disk), old);
    assert_eq!(meetings(&disk), [""; 0]);
}

/// What it is, what each of two nodes does, and what is told of it.
type Case = (&'static str, fn(&Node), fn(&Node), &'static str);

/// Proves S-tx-32.
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
        let nodes = begin(&disk, &["a", "b"]);
        one(&nodes[0]);
        other(&nodes[1]);
        let verdict = meet(&nodes, &[Vec::new(), Vec::new()]).remove(0);
        let Verdict::Conflict(report) = verdict else {
            panic!("{what}: {verdict:?}")
        };
        let found: Vec<_> = report.conflicts.iter().map(ToString::to_string).collect();
        assert!(found.contains(&expected.to_owned()), "{what}: {found:?}");
    }
}

#[test]
fn what_does_not_meet_does_not_conflict() {
    let disk = disk();
    let nodes = begin(&disk, &["a", "b"]);
    // A mode of one, bytes of the other; each a cut of its own file; names in one directory.
    nodes[0]
        .set_mode(
            &nodes[0]
                .lookup(&nodes[0].root(), OsStr::new("shared"))
                .unwrap()
                .0,
            0o600,
        )
        .unwrap();
    put(&nodes[1], "shared", 150, b"x");
    let dir = |node: &Node, name: &str| {
        let dir = node.lookup(&node.root(), OsStr::new("dir")).unwrap().0;
        node.create(&ME, &dir, OsStr::new(name), 0o644).unwrap();
    };
    dir(&nodes[0], "one");
    dir(&nodes[1], "two");
    assert_eq!(
        meet(&nodes, &[Vec::new(), Vec::new()]),
        [Verdict::Clear, Verdict::Clear]
    );
    // In the other order.
    for node in nodes.iter().rev() {
        node.commit(&node.root(), ID).expect("commit");
    }
    let tree = seen(&disk);
    let shared = &tree[&b"shared"[..]];
    assert_eq!((shared.mode & 0o777, shared.content.len()), (0o600, 151));
    assert!(tree.contains_key(&b"dir/one"[..]) && tree.contains_key(&b"dir/two"[..]));
}

/// Proves S-tx-31.
#[test]
fn one_abort_is_everybodys() {
    let disk = disk();
    let old = seen(&disk);
    let nodes = begin(&disk, &["a", "b"]);
    work(&nodes[0], 0);
    work(&nodes[1], 1);
    assert_eq!(
        meet(&nodes, &[Vec::new(), Vec::new()]),
        [Verdict::Clear, Verdict::Clear]
    );
    nodes[1].abort(&nodes[1].root()).expect("abort");
    let root = nodes[0].root();
    assert!(matches!(nodes[0].commit(&root, ID), Err(HeldError::GivenUp { by, .. }) if by == "b"));
    nodes[0].abort(&root).expect("abort");
    assert_eq!(
        (seen(&nodes[0]), seen(&nodes[1])),
        (old.clone(), old.clone())
    );
    // One that was not prepared counts too: the other does not wait for it.
    for node in &nodes {
        node.begin(&node.root(), b"").expect("begin");
    }
    nodes[0].prepare(&root, ID).expect("prepare");
    nodes[0].note_used(&root, Vec::new()).expect("note");
    nodes[0].publish(&root, ID).expect("publish");
    let waits = nodes[0].meet(ID, b"").expect("meet");
    assert_eq!(
        waits,
        Meeting::Waiting {
            here: vec!["a".into()],
            of: 2,
            missing: Vec::new()
        }
    );
    nodes[1].abort(&nodes[1].root()).expect("abort");
    assert!(
        matches!(nodes[0].meet(ID, b""), Ok(Meeting::Met(Verdict::GivenUp { by, .. })) if by == "b")
    );
    nodes[0].abort(&root).expect("abort");
    assert_eq!(seen(&disk_view(&disk)), old);
    assert_eq!(meetings(&disk), [""; 0]);
}

fn disk_view(disk: &SimBacking) -> Node {
    open(disk, "viewer", 2).0
}

#[test]
fn a_number_is_used_again_only_when_all_have_left() {
    let disk = disk();
    let nodes = begin(&disk, &["a", "b"]);
    meet(&nodes, &[Vec::new(), Vec::new()]);
    nodes[0].abort(&nodes[0].root()).expect("abort");
    let root = nodes[0].root();
    nodes[0].begin(&root, b"").expect("begin");
    nodes[0].prepare(&root, ID).expect("prepare");
    nodes[0].note_used(&root, Vec::new()).expect("note");
    assert_eq!(
        nodes[0].publish(&root, ID),
        Err(HeldError::Leaving { id: ID })
    );
    nodes[1].abort(&nodes[1].root()).expect("abort");
    nodes[0].publish(&root, ID).expect("now it can");
}

#[test]
fn regression_two_threads_of_a_node_that_put_the_same_file_do_not_disturb_each_other() {
    let disk = disk();
    let (node, _) = open(&disk, "a", 1);
    for id in 1..300 {
        node.begin(&node.root(), b"").expect("begin");
        put(&node, "shared", 0, b"more");
        node.prepare(&node.root(), id).expect("prepare");
        node.note_used(&node.root(), Vec::new())
            .and_then(|()| node.publish(&node.root(), id))
            .expect("publish");
        let barrier = std::sync::Barrier::new(2);
        let meet = || {
            barrier.wait();
            node.meet(id, b"").expect("meet")
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(meet);
            let one = meet();
            let other = other.join().expect("no panic");
            assert_eq!(
                (one, other),
                (Meeting::Met(Verdict::Clear), Meeting::Met(Verdict::Clear)),
                "meeting {id}"
            );
        });
        node.commit(&node.root(), id).expect("commit");
        assert_eq!(meetings(&disk), [""; 0]);
    }
}

/// `firn abort` that comes just after the thread that follows other nodes has ended the transaction.
#[test]
fn regression_calling_off_what_is_ended_makes_no_meeting() {
    let disk = disk();
    let nodes = begun(&disk);
    for node in nodes.iter().flatten() {
        node.prepare(&node.root(), ID).expect("prepare");
        node.note_used(&node.root(), Vec::new())
            .and_then(|()| node.publish(&node.root(), ID))
            .expect("publish");
    }
    for node in nodes.iter().flatten() {
        node.call_off(ID, b"").expect("called off");
        node.abort(&node.root()).expect("abort");
    }
    assert_eq!(meetings(&disk), [""; 0]);
    nodes[0]
        .as_ref()
        .unwrap()
        .call_off(ID, b"")
        .expect("nothing is to be called off");
    assert_eq!(meetings(&disk), [""; 0]);
}
