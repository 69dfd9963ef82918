//! A mount or `firn recover` ends what an earlier firnd left, and is killed at each store to the arena and each call of
//! the backing, repeatedly. Data of an undone transaction never comes back, and data outside of the transaction is
//! never lost.
//!
//! Only processes die here, not the machine: the backing has every change that was made, and the arena every store.

use crate::common;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use common::Verbs;
use firn_arena::{Arena, Identity};
use firn_backing::{Backing, Caller, Names, RenameFlags, SetTime, Volume};
use firn_engine::{
    DrainPolicy, Engine, EngineError, EngineOptions, InodeId, LaneIndex, LaneLimits, NextStep,
    ROOT, SetAttr, StoredArena,
};
use firn_format::geometry::Geometry;
use firn_sim::SimBacking;
use firn_sim::{Disk, Fault, Tree, tree};
use firn_transact::{
    ArenaId, Expected, Members, Mode, Object, OpenError, Opening, RecoveryOutcome, StoreError,
    TransactionError, TransactionalBacking,
};

const ME: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
const O_RDWR: i32 = 2;
const CHUNK: u64 = 128 << 10;
const CHUNKS: u64 = 8;
const ID: u64 = 5;
const SCOPE: &[u8] = b"job";
const FILE_BYTES: usize = 30_000;
const MODES: [Mode; 2] = [Mode::Buffer, Mode::Shadow];

/// The arena of the mount that began the transaction, and the arena of another mount.
const ARENA: ArenaId = [7; 16];
const OTHER: ArenaId = [8; 16];

type Store = TransactionalBacking<SimBacking>;

/// The stage of the transaction when its firnd died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Open,
    Prepared,
    Decided,
}

const STAGES: [Stage; 3] = [Stage::Open, Stage::Prepared, Stage::Decided];

#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(transparent)]
    Transaction(TransactionError),
    #[error(transparent)]
    Engine(EngineError),
}

impl From<EngineError> for Refused {
    fn from(error: EngineError) -> Self {
        Self::Engine(error)
    }
}

impl From<OpenError> for Refused {
    fn from(error: OpenError) -> Self {
        Self::Transaction(error.into())
    }
}

impl From<StoreError> for Refused {
    fn from(error: StoreError) -> Self {
        Self::Transaction(error.into())
    }
}

/// Counts stores to the arena and calls of the backing. The process dies at one of these steps.
#[derive(Clone)]
struct Fuse {
    steps: Arc<AtomicU64>,
    stop_at: u64,
    is_dead: Arc<AtomicBool>,
    /// Paths of the arena, and of the copy that the next process finds.
    arena: Arc<Mutex<(PathBuf, PathBuf)>>,
}

impl Fuse {
    /// Makes the process die at step `stop_at`, counted from 0.
    fn arm(disk: &SimBacking, arena: PathBuf, left: PathBuf, stop_at: u64) -> Self {
        let arena = Arc::new(Mutex::new((arena, left)));
        let fuse = Self {
            steps: Arc::default(),
            stop_at,
            is_dead: Arc::default(),
            arena,
        };
        let stores = fuse.clone();
        firn_arena::set_probe(Some(Box::new(move || {
            stores.step();
        })));
        let calls = fuse.clone();
        disk.set_plan(move |_, _| calls.step().then_some(Fault::Crash));
        fuse
    }

    fn step(&self) -> bool {
        if self.is_dead() {
            return true;
        }
        if self.steps.fetch_add(1, Ordering::Relaxed) < self.stop_at {
            return false;
        }
        let (arena, left) = &*self.arena.lock().unwrap();
        std::fs::copy(arena, left).expect("the arena is copied");
        self.is_dead.store(true, Ordering::Relaxed);
        true
    }

    fn is_dead(&self) -> bool {
        self.is_dead.load(Ordering::Relaxed)
    }
}

/// The disk and the arena that a dead process left.
#[derive(Clone)]
struct Left {
    disk: Disk,
    arena: PathBuf,
}

fn options() -> EngineOptions {
    EngineOptions {
        drain: DrainPolicy::Demand,
        drain_write_bytes_min: 8 << 10,
        drain_write_bytes_max: 16 << 10,
        ..EngineOptions::new(CHUNK)
    }
}

fn opening(members: Option<&Members>) -> Opening {
    Opening {
        members: members.cloned(),
        arena: Some(ARENA),
        ..Opening::default()
    }
}

fn inode(engine: &Engine<Store>, path: &str) -> InodeId {
    path.split('/').fold(ROOT, |at, name| {
        engine
            .namespace
            .lookup(at, OsStr::new(name))
            .expect("lookup")
            .inode
    })
}

fn write(engine: &Engine<Store>, path: &str, offset: u64, bytes: &[u8]) {
    let opened = engine.open(inode(engine, path), O_RDWR).expect("open");
    let done = engine
        .write(opened.handle, offset, bytes, None)
        .expect("write");
    assert!(matches!(done, firn_engine::Written::Bytes(count) if count == bytes.len()));
    engine.release(opened.handle);
}

fn create(engine: &Engine<Store>, path: &str, bytes: &[u8]) {
    let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
    let dir = if dir.is_empty() {
        ROOT
    } else {
        inode(engine, dir)
    };
    let opened = engine
        .create(&ME, dir, OsStr::new(name), 0o644, O_RDWR)
        .expect("create")
        .1;
    engine.release(opened.handle);
    write(engine, path, 0, bytes);
}

fn cut(engine: &Engine<Store>, path: &str, size: u64) {
    let set = SetAttr {
        mode: None,
        uid: None,
        gid: None,
        size: Some(size),
        atime: SetTime::Keep,
        mtime: SetTime::Keep,
    };
    engine
        .namespace
        .set_attr(inode(engine, path), set, None)
        .expect("truncate");
}

/// Drains `below`, until nothing is left or the process is dead.
fn drain(engine: &Engine<Store>, below: &[u8], is_dead: &dyn Fn() -> bool) {
    engine.durability.drain_tree(below);
    while let (false, NextStep::Job(job)) = (
        is_dead(),
        engine.drainer.pick(LaneIndex::FIRST, LaneLimits::NONE),
    ) {
        let outcome = job.execute(engine);
        engine.drainer.complete(job, outcome);
        engine.durability.drain_tree(below);
    }
}

fn turn(
    engine: &Engine<Store>,
    work: impl FnOnce(&Arc<Object<SimBacking>>) -> Result<(), TransactionError>,
) {
    let object = engine.tree.object_at(SCOPE).expect("the scope");
    engine.open_files.close_idle_files();
    engine.direct_access.revoke_grants_in_tree(SCOPE);
    work(&object).expect("done");
    engine.privilege_rules.record_privileges_given();
}

/// A transaction with data in the arena whose firnd has died: what the firnd left, and the trees that may result.
struct Scene {
    left: Left,
    mode: Mode,
    stage: Stage,
    members: Option<Members>,
    /// The tree at the begin of the transaction.
    before: Tree,
    /// The tree with all changes of the transaction, and with the writes that count after it.
    after: Tree,
}

impl Scene {
    fn set(dir: &Path, mode: Mode, stage: Stage, members: Option<Members>) -> Self {
        let disk = SimBacking::new();
        let arena = dir.join("first");
        let identity = Identity {
            backing: PathBuf::from("/sim"),
            dev: 1,
            ino: 1,
        };
        let geometry = Geometry::new(CHUNKS * CHUNK, CHUNK).expect("a valid geometry");
        let mapped = Arena::create(&arena, geometry, &identity).expect("an arena");
        let open = TransactionalBacking::open_with(disk.clone(), opening(members.as_ref()), |_| {
            Ok::<_, TransactionError>(())
        });
        let store = open.expect("open").0.in_mode(mode);
        let engine = Engine::begin(store, mapped, options()).expect("an engine");
        let alive = &|| false;

        engine
            .namespace
            .mkdir(&ME, ROOT, OsStr::new("job"), 0o755)
            .expect("mkdir");
        for name in ["job/over", "job/cut", "job/moved", "job/gone", "beside"] {
            create(&engine, name, &[b'.'; FILE_BYTES]);
        }
        drain(&engine, b"", alive);
        disk.sync_all().expect("sync_all");
        let mut before = tree(engine.backing()).expect("tree");

        turn(&engine, |at| {
            Ok(engine.backing().begin(at, SCOPE).map(drop)?)
        });
        // Some data is staged or in place, some is only in the arena.
        write(&engine, "job/over", 0, &[b'1'; 10_000]);
        create(&engine, "job/made", &[b'2'; 12_000]);
        drain(&engine, SCOPE, alive);
        write(&engine, "job/over", 5_000, &[b'3'; 20_000]);
        write(&engine, "job/over", FILE_BYTES as u64, &[b'4'; 9_000]);
        write(&engine, "job/made", 6_000, &[b'5'; 12_000]);
        write(&engine, "job/cut", 1_000, &[b'6'; 3_000]);
        cut(&engine, "job/cut", 2_500);
        write(&engine, "job/moved", 700, &[b'7'; 5_000]);
        let job = inode(&engine, "job");
        let name = OsStr::new;
        engine
            .namespace
            .rename(job, name("moved"), job, name("there"), RenameFlags::empty())
            .expect("rename");
        engine.namespace.unlink(job, name("gone")).expect("unlink");
        create(&engine, "job/new", &[b'8'; 4_000]);

        let mut after = before.clone();
        if stage != Stage::Open {
            drain(&engine, SCOPE, alive);
            after = tree(engine.backing()).expect("tree");
            turn(&engine, |at| Ok(engine.backing().prepare(at, ID)?));
            if stage == Stage::Decided {
                turn(&engine, |at| Ok(engine.backing().decide(at, ID)?));
            }
            // Drains of this data wait for the outcome of the transaction.
            write(&engine, "job/over", 2_000, &[b'9'; 4_000]);
            write(&engine, "job/there", 0, &[b'9'; 2_000]);
        }
        if stage == Stage::Decided {
            let mut put = |path: &str, at: usize, len: usize| {
                let entry = after.get_mut(path.as_bytes()).expect("it is there");
                entry.content[at..at + len].fill(b'9');
            };
            put("job/over", 2_000, 4_000);
            put("job/there", 0, 2_000);
        }
        // This write is not in the scope, so it counts in any case.
        write(&engine, "beside", 100, &[b'b'; 25_000]);
        for tree in [&mut before, &mut after] {
            let content = &mut tree.get_mut(&b"beside"[..]).expect("it is there").content;
            content[100..25_100].fill(b'b');
        }
        let left = Left {
            disk: disk.snapshot(),
            arena: dir.join("left"),
        };
        std::fs::copy(&arena, &left.arena).expect("the arena is copied");
        // The process is dead, so all its later calls fail.
        disk.set_plan(|_, _| Some(Fault::Crash));
        Self {
            left,
            mode,
            stage,
            members,
            before,
            after,
        }
    }

    /// Returns the tree that programs must see after the next mount.
    fn expected(&self) -> &Tree {
        match (self.stage, self.mode) {
            (Stage::Open, _) | (Stage::Prepared, Mode::Buffer) => &self.before,
            (Stage::Prepared, Mode::Shadow) | (Stage::Decided, _) => &self.after,
        }
    }
}

/// Result of one life of a process.
enum Life {
    Died(Left),
    /// The process completed its work.
    Done {
        engine: Arc<Engine<Store>>,
        outcome: RecoveryOutcome,
        disk: SimBacking,
        steps: u64,
    },
}

/// Does what `firn mount` and `firn recover` do with what an earlier firnd left, including the drain. The process dies
/// at step `stop_at`.
fn attach(dir: &Path, left: &Left, opening: Opening, stop_at: u64) -> Life {
    let arena = dir.join("arena");
    let next = Left {
        disk: left.disk.clone(),
        arena: dir.join("next"),
    };
    std::fs::copy(&left.arena, &arena).expect("the arena is copied");
    let disk = SimBacking::from_disk(left.disk.clone());
    let fuse = Fuse::arm(&disk, arena.clone(), next.arena.clone(), stop_at);
    let attached = || -> Result<(Arc<Engine<Store>>, RecoveryOutcome), Refused> {
        let (mapped, stored, damage) = Arena::attach(&arena).expect("the arena attaches");
        assert_eq!(damage, [], "a crash is no damage");
        let mut stored = StoredArena::open(mapped, stored);
        let (store, outcome) = TransactionalBacking::open_with(disk.clone(), opening, |scopes| {
            Ok::<_, Refused>(stored.drop_files_below(scopes)?)
        })?;
        let (engine, recovered) = Engine::attach_stored(store, stored, options(), None)?;
        assert!(
            fuse.is_dead() || recovered.lost.is_empty(),
            "lost: {:?}",
            recovered.lost
        );
        drain(&engine, b"", &|| fuse.is_dead());
        Ok((engine, outcome))
    };
    let result = attached();
    firn_arena::set_probe(None);
    if fuse.is_dead() {
        drop(result);
        return Life::Died(Left {
            disk: disk.snapshot(),
            ..next
        });
    }
    disk.clear_plan();
    let (engine, outcome) = result.unwrap_or_else(|error| panic!("it attaches: {error}"));
    assert_eq!(engine.figures().held_bytes, 0, "all is drained");
    Life::Done {
        engine,
        outcome,
        disk,
        steps: fuse.steps.load(Ordering::Relaxed),
    }
}

fn seen(engine: &Engine<Store>) -> Tree {
    tree(engine.backing()).expect("tree")
}

/// Returns the contents by path, for a readable message.
fn shown(tree: &Tree) -> String {
    let mut text = String::new();
    for (path, entry) in tree {
        let mut runs: Vec<(u8, usize)> = Vec::new();
        for &byte in &entry.content {
            match runs.last_mut() {
                Some((last, count)) if *last == byte => *count += 1,
                _ => runs.push((byte, 1)),
            }
        }
        let runs: Vec<_> = runs
            .iter()
            .map(|(byte, count)| format!("{}*{count}", char::from(*byte)))
            .collect();
        text += &format!("  {}: {}\n", String::from_utf8_lossy(path), runs.join(" "));
    }
    text
}

fn must_be(engine: &Engine<Store>, wanted: &Tree, told: &str) {
    let found = seen(engine);
    assert!(
        found == *wanted,
        "{told}\nwanted\n{}found\n{}",
        shown(wanted),
        shown(&found)
    );
}

/// Runs a last life in which nothing dies. Checks that the tree is the expected one, and that a prepared transaction
/// can still be committed or aborted.
fn check(dir: &Path, scene: &Scene, left: &Left, commit: bool, told: &str) {
    let life = attach(dir, left, opening(scene.members.as_ref()), u64::MAX);
    let Life::Done {
        engine,
        outcome,
        disk,
        ..
    } = life
    else {
        panic!("{told}: nothing stops it")
    };
    must_be(&engine, scene.expected(), told);
    if scene.stage != Stage::Prepared {
        assert_eq!(
            (outcome.waiting.as_slice(), engine.backing().transactions()),
            (&[][..], vec![]),
            "{told}"
        );
        return;
    }
    assert_eq!(outcome.waiting, [(ID, SCOPE.to_vec())], "{told}");
    let (end, wanted) = match commit {
        true => ("committed", &scene.after),
        false => ("aborted", &scene.before),
    };
    let store = engine.backing();
    turn(&engine, |at| {
        if commit {
            Ok(store.commit(at, ID)?)
        } else {
            Ok(store.abort(at)?)
        }
    });
    must_be(&engine, wanted, &format!("{told}, {end}"));
    disk.fsck().expect("fsck");
}

/// Returns the number of steps of the next life of `left`.
fn steps_of(dir: &Path, left: &Left, opening: Opening) -> u64 {
    match attach(dir, left, opening, u64::MAX) {
        Life::Done { steps, .. } => steps,
        Life::Died(_) => unreachable!("nothing stops it"),
    }
}

fn room() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs")
}

/// Proves S-tx-2, S-tx-3, S-tx-21, S-tx-41, S-tx-76.
#[test]
fn regression_a_killed_recovery_never_brings_back_what_was_undone() {
    for stage in STAGES {
        for mode in MODES {
            let dir = room();
            let scene = Scene::set(dir.path(), mode, stage, None);
            let steps = steps_of(dir.path(), &scene.left, opening(None));
            println!("{stage:?}, {mode:?}: {steps} steps");
            for at in 0..steps {
                let told = format!("{stage:?}, {mode:?}, killed at step {at} of {steps}");
                let life = attach(dir.path(), &scene.left, opening(None), at);
                let Life::Died(left) = life else {
                    panic!("{told}: it is killed")
                };
                check(dir.path(), &scene, &left, at.is_multiple_of(2), &told);
            }
        }
    }
}

#[test]
fn recoveries_that_are_killed_one_after_the_other_bring_back_nothing() {
    for stage in STAGES {
        for mode in MODES {
            let dir = room();
            let scene = Scene::set(dir.path(), mode, stage, None);
            let steps = steps_of(dir.path(), &scene.left, opening(None));
            // Each life dies a few steps later than the one before. Each stride makes lives die at other steps.
            for stride in [1, 2, 3, 5, 7, 11, 17, 29, 47, 71] {
                let mut left = scene.left.clone();
                let mut told = format!("{stage:?}, {mode:?}, killed at steps");
                for life in 1.. {
                    let at = life * stride;
                    if at > steps || life > 40 {
                        break;
                    }
                    // Two directories are used in turn, because the next life reads what this one left.
                    let here = dir.path().join(format!("life{}", life % 2));
                    std::fs::create_dir_all(&here).expect("mkdir");
                    match attach(&here, &left, opening(None), at) {
                        Life::Died(next) => left = next,
                        Life::Done { .. } => break,
                    }
                    told += &format!(" {at}");
                }
                check(dir.path(), &scene, &left, stride % 2 == 0, &told);
            }
        }
    }
}

#[test]
fn an_arena_that_comes_back_after_its_host_was_given_up_brings_back_nothing() {
    let members = Members {
        host: "n1".into(),
        expected: Expected::Count(1),
    };
    for mode in MODES {
        let dir = room();
        let scene = Scene::set(dir.path(), mode, Stage::Open, Some(members.clone()));
        for at in 0.. {
            // `firn recover --host` runs on another host and has no arena.
            let disk = SimBacking::from_disk(scene.left.disk.clone());
            disk.crash_at(disk.steps() + 1 + at);
            let elsewhere = Opening {
                arena: None,
                ..opening(Some(&members))
            };
            let ended = TransactionalBacking::open_with(disk.clone(), elsewhere.clone(), |_| {
                Ok::<_, TransactionError>(())
            });
            let is_over = ended.is_ok();
            drop(ended);
            disk.revive();
            if at % 2 == 0 {
                // A repeated request completes the work.
                let again = TransactionalBacking::open_with(disk.clone(), elsewhere, |_| {
                    Ok::<_, TransactionError>(())
                });
                again.expect("nothing stops it");
            }
            let left = Left {
                disk: disk.snapshot(),
                arena: scene.left.arena.clone(),
            };
            let told = format!("{mode:?}, given up, stopped at call {at}");
            check(dir.path(), &scene, &left, false, &told);
            if is_over {
                println!("{mode:?}: {at} calls");
                break;
            }
            // The host's own mount may die as well.
            if at % 8 != 0 {
                continue;
            }
            let steps = steps_of(dir.path(), &left, opening(Some(&members)));
            for killed in (at % 23..steps).step_by(23) {
                let life = attach(dir.path(), &left, opening(Some(&members)), killed);
                let Life::Died(left) = life else {
                    panic!("{told}: it is killed")
                };
                check(
                    dir.path(),
                    &scene,
                    &left,
                    false,
                    &format!("{told}, its mount killed at step {killed}"),
                );
            }
        }
    }
}

/// `drop_pending` of an arena that has no data in the scopes: it must not be called.
fn nothing(scopes: &[Vec<u8>]) -> Result<(), TransactionError> {
    panic!("{scopes:?} are dropped in an arena that has nothing of them");
}

/// Another mount with its own arena ends the transaction, and is killed at its call `at`. If `again`, a second attempt
/// then runs to the end. Returns what is left, and whether the transaction has ended.
fn end_elsewhere(scene: &Scene, commit: bool, at: u64, again: bool) -> (Left, bool) {
    let disk = SimBacking::from_disk(scene.left.disk.clone());
    disk.crash_at(disk.steps() + 1 + at);
    let run = || -> Result<(), TransactionError> {
        let with = Opening {
            arena: Some(OTHER),
            ..opening(scene.members.as_ref())
        };
        let (backing, outcome) = TransactionalBacking::open_with(disk.clone(), with, nothing)?;
        if !outcome.waiting.is_empty() {
            let (job, _) = backing.lookup(&backing.root(), OsStr::new("job"))?;
            if commit {
                backing.commit(&job, ID)?;
            } else {
                backing.abort(&job)?;
            }
        }
        Ok(())
    };
    let mut is_over = run().is_ok() && !disk.is_dead();
    disk.revive();
    if !is_over && again {
        run().expect("nothing stops it");
        is_over = true;
    }
    (
        Left {
            disk: disk.snapshot(),
            arena: scene.left.arena.clone(),
        },
        is_over,
    )
}

/// Proves S-tx-3, S-tx-7, S-tx-44.
#[test]
fn regression_an_arena_that_was_away_when_its_transaction_ended_brings_back_nothing() {
    for (mode, stage) in MODES
        .into_iter()
        .flat_map(|mode| [(mode, Stage::Open), (mode, Stage::Prepared)])
    {
        for commit in [false, true] {
            if commit && stage == Stage::Open {
                continue;
            }
            let dir = room();
            let scene = Scene::set(dir.path(), mode, stage, None);
            let wanted = if commit { &scene.after } else { &scene.before };
            for at in 0.. {
                let told =
                    format!("{mode:?}, {stage:?}, commit {commit}, elsewhere killed at call {at}");
                let (left, is_over) = end_elsewhere(&scene, commit, at, at % 3 != 0);
                let life = attach(dir.path(), &left, opening(None), u64::MAX);
                let Life::Done {
                    engine, outcome, ..
                } = life
                else {
                    panic!("{told}: nothing stops it")
                };
                match &outcome.waiting[..] {
                    [] if is_over => must_be(&engine, wanted, &told),
                    // The other mount was killed before or after it decided.
                    [] => {
                        let now = seen(&engine);
                        assert!(now == *wanted || now == *scene.expected(), "{told}");
                    }
                    _ => {
                        assert!(!is_over, "{told}");
                        must_be(&engine, scene.expected(), &told);
                    }
                }
                if is_over && at % 3 == 0 {
                    println!("{mode:?}, {stage:?}, commit {commit}: {at} calls");
                    break;
                }
            }
        }
    }
}

/// Proves S-tx-44.
#[test]
fn regression_what_an_arena_has_from_before_a_transaction_of_another_one_counts() {
    for mode in MODES {
        let disk = SimBacking::new();
        disk.mkdir(&ME, &disk.root(), OsStr::new("job"), 0o755)
            .expect("mkdir");
        let with = |arena| Opening {
            arena: Some(arena),
            ..Opening::default()
        };
        let (backing, _) =
            TransactionalBacking::open_with(disk.clone(), with(OTHER), nothing).expect("open");
        let backing = backing.in_mode(mode);
        let (job, _) = backing
            .lookup(&backing.root(), OsStr::new("job"))
            .expect("lookup");
        backing.begin(&job, SCOPE).expect("begin");
        backing
            .create(&ME, &job, OsStr::new("made"), 0o644)
            .map(drop)
            .expect("create");
        drop((backing, job));
        // This arena had data in the scope before the other mount began the transaction, so that data must not be
        // dropped.
        let (backing, outcome) =
            TransactionalBacking::open_with(disk.clone(), with(ARENA), nothing).expect("open");
        assert_eq!(outcome.undone, [SCOPE.to_vec()], "{mode:?}");
        drop(backing);
        // The arena that began the transaction must drop its data at its next open, once.
        let mut dropped = Vec::new();
        let (backing, _) = TransactionalBacking::open_with(disk.clone(), with(OTHER), |scopes| {
            dropped = scopes.to_vec();
            Ok::<_, TransactionError>(())
        })
        .expect("open");
        assert_eq!(dropped, [SCOPE.to_vec()], "{mode:?}");
        drop(backing);
        TransactionalBacking::open_with(disk.clone(), with(OTHER), nothing).expect("open");
    }
}

/// Proves S-tx-85: a mount without `participants` drops, once, what its arena has of the transactions of its own host.
#[test]
fn regression_a_mount_without_the_others_drops_its_part_once() {
    let members = Members {
        host: "n1".into(),
        expected: Expected::Count(1),
    };
    for (mode, stage) in MODES
        .into_iter()
        .flat_map(|mode| [(mode, Stage::Open), (mode, Stage::Prepared)])
    {
        let dir = room();
        let scene = Scene::set(dir.path(), mode, stage, Some(members.clone()));
        for at in 0.. {
            let told = format!("{mode:?}, {stage:?}, killed at call {at}");
            let disk = SimBacking::from_disk(scene.left.disk.clone());
            let homes = TransactionalBacking::other_staging_owners(&disk, None).expect("list");
            assert_eq!(
                homes
                    .iter()
                    .flatten()
                    .map(|home| home.host.as_str())
                    .collect::<Vec<_>>(),
                ["n1"],
                "{told}"
            );
            let home = homes.into_iter().flatten().next();
            let dropped = std::cell::Cell::new(0);
            let drop_all = |scopes: &[Vec<u8>]| {
                assert_eq!(scopes, [SCOPE.to_vec()], "{told}");
                dropped.set(dropped.get() + 1);
                Ok::<_, TransactionError>(())
            };
            TransactionalBacking::drop_of(disk.clone(), home.clone(), OTHER, nothing)
                .expect("another arena has nothing of it");
            disk.crash_at(disk.steps() + 1 + at);
            let result = TransactionalBacking::drop_of(disk.clone(), home.clone(), ARENA, drop_all);
            disk.revive();
            if result.is_err() {
                TransactionalBacking::drop_of(disk.clone(), home.clone(), ARENA, drop_all)
                    .expect("nothing stops it");
            }
            assert!(
                (1..3).contains(&dropped.get()),
                "{told}: dropped {} times",
                dropped.get()
            );
            // Data that is written from now on counts, here and at the next mount with `participants`.
            TransactionalBacking::drop_of(disk.clone(), home, ARENA, nothing).expect("once more");
            let (_, outcome) =
                TransactionalBacking::open_with(disk.clone(), opening(Some(&members)), nothing)
                    .expect("open");
            assert_eq!(
                outcome.undone.len(),
                usize::from(stage == Stage::Open),
                "{told}"
            );
            assert_eq!(
                outcome.waiting.len(),
                usize::from(stage == Stage::Prepared),
                "{told}"
            );
            if result.is_ok() {
                println!("{mode:?}, {stage:?}: {at} calls");
                break;
            }
        }
    }
}
