//! Each call of the backing and of the backup that a verb makes fails once, with each errno. The verb must report
//! exactly that error, and the transaction must be in a known stage. A repetition, an abort or a new mount then leads
//! to the tree before or the tree after.
//!
//! Proves S-tx-14.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, Once};

use common::{Verbs, in_firn};
use firn_backing::{Backing, Errno, Volume};
use firn_sim::{Disk, Fault, Tree};
use firn_sim::{SimBacking, suite};
use firn_transact::{
    AbortError, BackupError, Mode, Opening, RecoveryOutcome, Stage, StageError, TransactionError,
    TransactionalBacking,
};

use crate::common;

/// The errors with which a call fails.
const ERRNOS: [Errno; 4] = [Errno::IO, Errno::NOSPC, Errno::NOENT, Errno::OPNOTSUPP];

/// Numbers of the two existing commits, and of the commit that the verbs are about.
const FIRST: u64 = 3;
const OLD: u64 = 4;
const NEW: u64 = 5;

const HISTORY: u32 = 3;

/// Options of a mount that concern its transactions.
#[derive(Clone, Copy, Debug)]
struct Setup {
    mode: Mode,
    history: u32,
    has_backup: bool,
}

/// The operation during which a call of the backing fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Begin,
    Prepare,
    Commit,
    CommitPrepared,
    /// Decides the outcome; a later call applies the commit.
    Conclude,
    ConcludePrepared,
    /// Applies a decided commit while the next transaction is open.
    CarryOut,
    Abort,
    AbortPrepared,
    /// Restores to the number under which the transaction is prepared.
    RestorePrepared,
    /// Restores to the last commit while a transaction is open.
    RestoreLast,
    /// Restores to the commit before the last one while a transaction is open.
    RestoreOlder,
    /// Commits what an earlier process prepared.
    CommitRecovered,
    AbortRecovered,
    RestoreRecovered,
    AttachOpen,
    AttachPrepared,
    AttachDecided,
    /// Opens the backing after a process died while it restored an older commit. The process died at each call in turn.
    AttachRestoring,
}

const VERBS: [Verb; 19] = [
    Verb::Begin,
    Verb::Prepare,
    Verb::Commit,
    Verb::CommitPrepared,
    Verb::Conclude,
    Verb::ConcludePrepared,
    Verb::CarryOut,
    Verb::Abort,
    Verb::AbortPrepared,
    Verb::RestorePrepared,
    Verb::RestoreLast,
    Verb::RestoreOlder,
    Verb::CommitRecovered,
    Verb::AbortRecovered,
    Verb::RestoreRecovered,
    Verb::AttachOpen,
    Verb::AttachPrepared,
    Verb::AttachDecided,
    Verb::AttachRestoring,
];

impl Verb {
    fn is_attach(self) -> bool {
        matches!(
            self,
            Self::AttachOpen | Self::AttachPrepared | Self::AttachDecided | Self::AttachRestoring
        )
    }

    fn needs_history(self) -> bool {
        matches!(self, Self::RestoreOlder | Self::AttachRestoring)
    }

    /// Returns the numbers of the trees that may result if the verb succeeds and a transaction that is left is
    /// committed.
    fn leads_to(self) -> &'static [u64] {
        match self {
            Self::Abort | Self::AbortPrepared | Self::AbortRecovered => &[OLD],
            Self::RestoreLast | Self::AttachOpen => &[OLD],
            Self::RestoreOlder => &[FIRST],
            // The earlier process may have died before it began the restore.
            Self::AttachRestoring => &[OLD, FIRST],
            _ => &[NEW],
        }
    }
}

/// What follows a verb that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    Again,
    Abort,
    /// A new process opens the backing, after the old one has ended.
    Attach,
}

const THENS: [Then; 3] = [Then::Again, Then::Abort, Then::Attach];

/// The tree of each commit, by the number of the commit.
type Trees = BTreeMap<u64, Tree>;

/// A disk and its trees before a transaction.
struct Start {
    setup: Setup,
    seed: u64,
    disk: Disk,
    trees: Trees,
}

struct World {
    setup: Setup,
    /// The opened backing. `None` while no process has it open.
    backing: Option<TransactionalBacking<SimBacking>>,
    disk: SimBacking,
    store: SimBacking,
    trees: Trees,
    outcome: RecoveryOutcome,
}

/// Returns the tree. With a history, without link counts, because links of Firn may be among them.
fn seen(setup: Setup, backing: &TransactionalBacking<SimBacking>) -> Tree {
    let mut tree = common::seen(backing);
    if setup.history > 0 {
        tree.values_mut().for_each(|entry| entry.nlink = 0);
    }
    tree
}

fn attach(
    setup: Setup,
    disk: &SimBacking,
    store: &SimBacking,
) -> Result<(TransactionalBacking<SimBacking>, RecoveryOutcome), TransactionError> {
    let known = if setup.has_backup {
        TransactionalBacking::known_backups(disk, Some(store))?
    } else {
        BTreeSet::new()
    };
    let opening = Opening {
        history: setup.history,
        arena: Some([7; 16]),
        ..Opening::default()
    };
    let (backing, outcome) =
        TransactionalBacking::open_with(disk.clone(), opening, |_| Ok::<_, TransactionError>(()))?;
    let backing = backing.in_mode(setup.mode);
    let backing = if setup.has_backup {
        backing.backed_up(store.clone(), &known)?
    } else {
        backing
    };
    Ok((backing, outcome))
}

impl Start {
    fn new(setup: Setup, seed: u64) -> Self {
        let disk = SimBacking::from_seed(seed);
        let store = SimBacking::new();
        let (backing, _) = attach(setup, &disk, &store).expect("open");
        suite::differential::run_alone(&backing, seed, 30);
        let mut trees = Trees::new();
        for id in [FIRST, OLD] {
            backing.begin(&backing.root(), b"").expect("begin");
            suite::differential::run_alone(&backing, seed + id * 1_000_000, 25);
            backing.commit(&backing.root(), id).expect("commit");
            trees.insert(id, seen(setup, &backing));
        }
        disk.sync_all().expect("sync_all");
        drop(backing);
        Self {
            setup,
            seed,
            disk: disk.snapshot(),
            trees,
        }
    }

    /// Returns the state in which `verb` is called next.
    fn world(&self, verb: Verb, at: u64) -> World {
        let disk = SimBacking::from_disk(self.disk.clone());
        let store = SimBacking::new();
        disk.sync_one_by_one(self.seed % 2 == 1);
        let (backing, outcome) = attach(self.setup, &disk, &store).expect("open");
        let setup = self.setup;
        let trees = self.trees.clone();
        let mut world = World {
            setup,
            backing: Some(backing),
            disk,
            store,
            trees,
            outcome,
        };
        if verb != Verb::Begin {
            world
                .backing()
                .begin(&world.backing().root(), b"")
                .expect("begin");
            world.change(self.seed);
        }
        let backing = world.backing();
        let root = backing.root();
        match verb {
            Verb::CommitPrepared
            | Verb::ConcludePrepared
            | Verb::AbortPrepared
            | Verb::RestorePrepared
            | Verb::CommitRecovered
            | Verb::AbortRecovered
            | Verb::RestoreRecovered
            | Verb::AttachPrepared => backing.prepare(&root, NEW).expect("prepare"),
            Verb::CarryOut => {
                backing.decide(&root, NEW).expect("conclude");
                if setup.mode == Mode::Buffer {
                    backing.begin(&root, b"").expect("begin");
                }
            }
            Verb::AttachDecided => backing.decide(&root, NEW).expect("conclude"),
            Verb::AttachRestoring => {
                world.disk.crash_at(world.disk.steps() + 1 + at);
                let _ = backing.restore(&root, FIRST);
            }
            _ => {}
        }
        drop((root, backing));
        match verb {
            Verb::CommitRecovered | Verb::AbortRecovered | Verb::RestoreRecovered => world.attach(),
            verb if verb.is_attach() => world.end(),
            _ => {}
        }
        world
    }
}

impl World {
    fn backing(&self) -> &TransactionalBacking<SimBacking> {
        self.backing.as_ref().expect("it is open")
    }

    /// Makes the changes of the transaction `NEW`.
    fn change(&mut self, seed: u64) {
        suite::differential::run_alone(self.backing(), seed + NEW * 1_000_000, 25);
        let now = self.seen();
        self.trees.insert(NEW, now);
    }

    fn seen(&self) -> Tree {
        seen(self.setup, self.backing())
    }

    /// Ends the process.
    fn end(&mut self) {
        self.backing = None;
        self.disk.revive();
        self.store.revive();
    }

    /// Ends the process, and loses a part of what was not synced.
    fn lose_power(&mut self, seed: u64) {
        self.end();
        self.disk.power_loss(seed);
        self.store.power_loss(seed);
    }

    fn try_attach(&mut self) -> Result<(), TransactionError> {
        let (backing, outcome) = attach(self.setup, &self.disk, &self.store)?;
        (self.backing, self.outcome) = (Some(backing), outcome);
        Ok(())
    }

    fn attach(&mut self) {
        self.end();
        self.try_attach().expect("without a fault it opens");
    }

    fn act(&mut self, verb: Verb) -> Result<(), TransactionError> {
        if verb.is_attach() {
            return self.try_attach();
        }
        let backing = self.backing();
        let root = backing.root();
        match verb {
            Verb::Begin => drop(backing.begin(&root, b"")?),
            Verb::Prepare => backing.prepare(&root, NEW)?,
            Verb::Commit | Verb::CommitPrepared | Verb::CommitRecovered => {
                backing.commit(&root, NEW)?
            }
            Verb::Conclude | Verb::ConcludePrepared => backing.decide(&root, NEW)?,
            Verb::CarryOut => backing.apply(b"")?,
            Verb::Abort | Verb::AbortPrepared | Verb::AbortRecovered => backing.abort(&root)?,
            Verb::RestorePrepared | Verb::RestoreRecovered => backing.restore(&root, NEW)?,
            Verb::RestoreLast => backing.restore(&root, OLD)?,
            Verb::RestoreOlder => backing.restore(&root, FIRST)?,
            _ => unreachable!("the others attach"),
        }
        Ok(())
    }

    fn stages(&self) -> Vec<Stage> {
        self.backing()
            .transactions()
            .iter()
            .map(|one| one.stage)
            .collect()
    }

    /// Returns the number of the present tree. No transaction may be open.
    fn number(&self) -> u64 {
        let now = self.seen();
        let found: Vec<u64> = self
            .trees
            .iter()
            .filter(|(_, tree)| **tree == now)
            .map(|(id, _)| *id)
            .collect();
        let committed = self
            .backing()
            .lower
            .present_commit_id(b"")
            .expect("it answers")
            .expect("there were commits");
        if !found.contains(&committed) {
            let tree = &self.trees.get(&committed);
            panic!(
                "the last commit is {committed}, the tree that of {found:?}: {}",
                difference(*tree, &now)
            );
        }
        committed
    }

    /// Commits or aborts the present transaction. Returns the number of the tree then.
    fn settle(&mut self, commits: bool, seed: u64) -> u64 {
        let root = self.backing().root();
        let is_recovered = self
            .backing()
            .transactions()
            .iter()
            .any(|one| one.is_recovered);
        let stages = self.stages();
        if let ([Stage::Open], false) = (&stages[..], self.trees.contains_key(&NEW)) {
            self.change(seed);
        }
        match stages[..] {
            [] => {}
            [Stage::Open] if commits => {
                assert_eq!(
                    self.changed_from(NEW),
                    None,
                    "open, with all that was done in it"
                );
                self.backing().commit(&root, NEW).expect("commit");
                assert_eq!(self.changed_from(NEW), None, "committed");
            }
            [Stage::Prepared(NEW)] => {
                // An earlier process prepared it. Programs see the tree before it, or in shadow mode the tree after it.
                let shown = if is_recovered && self.setup.mode == Mode::Buffer {
                    OLD
                } else {
                    NEW
                };
                assert_eq!(self.changed_from(shown), None, "prepared");
                // A prepared transaction can be ended either way.
                if commits {
                    self.backing().commit(&root, NEW).expect("commit");
                } else {
                    self.backing().abort(&root).expect("abort");
                }
            }
            [Stage::Open] => self.backing().abort(&root).expect("abort"),
            [Stage::Decided(NEW)] | [Stage::Decided(NEW), Stage::Open] => {
                // A commit that an earlier process prepared has no tables, so programs do not see its changes before
                // the application.
                assert!(is_recovered || self.changed_from(NEW).is_none(), "decided");
                self.backing().apply(b"").expect("apply");
                if let [Stage::Open] = self.stages()[..] {
                    self.backing().abort(&root).expect("abort");
                }
            }
            // The restore of an older commit is incomplete.
            [Stage::Decided(FIRST)] => self
                .backing()
                .commit(&root, FIRST)
                .expect("it goes on with its number, too"),
            _ => panic!("unknown: {stages:?}"),
        }
        assert_eq!(self.stages(), []);
        self.number()
    }

    fn changed_from(&self, id: u64) -> Option<String> {
        let now = self.seen();
        let wanted = self.trees.get(&id);
        (wanted != Some(&now)).then(|| difference(wanted, &now))
    }

    /// Checks that only documented files are left in the backing and the backup, after at most one more mount.
    fn must_be_clean(&mut self, seed: u64) {
        let number = self.number();
        if seed.is_multiple_of(2) {
            self.backing().backups.back_up_ahead();
            self.end();
        } else {
            self.lose_power(seed);
        }
        self.try_attach().expect("open");
        assert_eq!(
            (&self.outcome, self.number()),
            (&RecoveryOutcome::default(), number),
            "nothing is left to be ended"
        );
        let mut undos = 0;
        for name in in_firn(&self.disk) {
            match name.as_str() {
                "." | ".." | "committed" => {}
                name if name
                    .strip_prefix("undo-")
                    .is_some_and(|serial| serial.parse::<u64>().is_ok()) =>
                {
                    undos += 1;
                }
                name => panic!("{name} is left in .firn/"),
            }
        }
        assert!(undos <= self.setup.history, "{undos} commits are kept");
        self.backing().backups.back_up_ahead();
        let backups: Vec<_> = self.store.tree().into_keys().collect();
        assert!(backups.len() <= 1, "left in the backup: {backups:?}");
        self.disk.fsck().expect("fsck");
        // The backing can be used again.
        let root = self.backing().root();
        self.backing().begin(&root, b"").expect("begin");
        self.backing().commit(&root, 9).expect("commit");
    }
}

fn difference(wanted: Option<&Tree>, now: &Tree) -> String {
    let Some(wanted) = wanted else {
        return "there is no such tree".into();
    };
    let names: BTreeSet<_> = wanted.keys().chain(now.keys()).collect();
    let differ = names
        .into_iter()
        .filter(|name| wanted.get(*name) != now.get(*name));
    differ
        .map(|name| {
            format!(
                "\n  {name:?}: {:?}\n  is {:?}",
                wanted.get(name),
                now.get(name)
            )
        })
        .collect()
}

/// Where the call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Backing,
    Backup,
}

/// One call that fails once.
#[derive(Clone, Copy, Debug)]
struct Case {
    verb: Verb,
    place: Place,
    at: u64,
    errno: Errno,
    then: Then,
}

/// Name of the call that failed; `None` if there was no such call.
type Hit = Arc<Mutex<Option<&'static str>>>;

fn fail_once(on: &SimBacking, at: u64, errno: Errno, hit: &Hit) {
    let wanted = on.steps() + at;
    let hit = Arc::clone(hit);
    on.set_plan(move |op, step| {
        let now = step == wanted && !is_an_answer(op, errno);
        if step == wanted {
            *hit.lock().expect("no panic") = Some(op);
        }
        now.then_some(Fault::Error(errno))
    });
}

/// Returns whether the error is a valid answer of a working backing: a name does not exist.
fn is_an_answer(op: &str, errno: Errno) -> bool {
    op == "lookup" && errno == Errno::NOENT
}

/// Runs one case. If the verb makes fewer calls, `hit` stays empty.
fn run(start: &Start, case: Case, hit: &Hit) {
    let Case {
        verb,
        place,
        at,
        errno,
        then,
    } = case;
    let mut world = start.world(verb, at / 3);
    let on = match place {
        Place::Backing => world.disk.clone(),
        Place::Backup => world.store.clone(),
    };
    fail_once(&on, at, errno, hit);
    let result = world.act(verb);
    on.clear_plan();
    if hit.lock().expect("no panic").is_none() {
        result.as_ref().expect("nothing failed");
    }
    let commits = verb.leads_to() == [NEW];
    match &result {
        Ok(()) => {
            let number = world.settle(commits, start.seed);
            assert!(
                verb.leads_to().contains(&number),
                "it said that it was done: {number}"
            );
        }
        Err(error) => {
            let is_told = match place {
                Place::Backing => error.backing_errno() == Some(errno),
                Place::Backup => matches!(
                    error,
                    TransactionError::Backup(
                        BackupError::Refused { source } | BackupError::NotRemoved { source }
                    ) if *source == errno
                ),
            };
            assert!(is_told, "told as something else: {error:?}");
            match then {
                Then::Again => {
                    if verb.is_attach() {
                        world.end();
                    }
                    world.act(verb).expect("it can be done again");
                    let number = world.settle(commits, start.seed);
                    assert!(verb.leads_to().contains(&number), "done again: {number}");
                }
                Then::Abort if !verb.is_attach() => {
                    let stages = world.stages();
                    let root = world.backing().root();
                    match (world.backing().abort(&root), &stages[..]) {
                        (
                            Ok(()),
                            [Stage::Open] | [Stage::Prepared(_)] | [Stage::Decided(_), Stage::Open],
                        ) => {}
                        (Err(AbortError::Stage(StageError::NoTransaction)), []) => {}
                        (
                            Err(AbortError::Stage(StageError::Decided { id })),
                            [Stage::Decided(decided)],
                        ) if id == *decided => {}
                        (ended, stages) => panic!("abort of {stages:?}: {ended:?}"),
                    }
                    let number = world.settle(true, start.seed);
                    let wanted = match stages[..] {
                        [Stage::Decided(id), ..] => id,
                        _ => OLD,
                    };
                    assert_eq!(number, wanted, "aborted");
                }
                Then::Abort | Then::Attach => {
                    if (at / 2) % 2 == 0 {
                        world.lose_power(start.seed + at);
                    }
                    world.attach();
                    let number = world.settle(at % 2 == 0, start.seed);
                    let possible: &[u64] = match verb {
                        Verb::Begin => &[OLD],
                        verb if verb.needs_history() => &[OLD, FIRST],
                        _ => &[OLD, NEW],
                    };
                    assert!(possible.contains(&number), "mounted: {number}");
                }
            }
        }
    }
    world.must_be_clean(start.seed + at);
}

thread_local! {
    /// Whether a case is running. If so, the text of a panic is stored in `PANIC` and not printed.
    static COLLECTS: Cell<bool> = const { Cell::new(false) };
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs all cases, and reports each kind of failure once.
fn each_call_fails(setup: Setup) {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if COLLECTS.get() {
                PANIC.set(info.to_string())
            } else {
                others(info)
            }
        }));
    });
    let places: &[Place] = if setup.has_backup {
        &[Place::Backing, Place::Backup]
    } else {
        &[Place::Backing]
    };
    let mut failed: BTreeMap<String, (u64, String)> = BTreeMap::new();
    for seed in common::seeds(2, 20_000) {
        let start = Start::new(setup, seed);
        for verb in VERBS
            .into_iter()
            .filter(|verb| setup.history > 0 || !verb.needs_history())
        {
            for &place in places {
                let calls = each_call_of(&start, verb, place, &mut failed);
                println!("seed {seed}, {setup:?}, {verb:?}: {calls} calls of the {place:?}");
            }
        }
    }
    for (what, (count, text)) in &failed {
        println!("{count} times: {what}\n    {text}");
    }
    assert!(failed.is_empty(), "{} kinds of failures", failed.len());
}

/// Runs the cases of one verb. Returns the number of calls that the verb makes.
fn each_call_of(
    start: &Start,
    verb: Verb,
    place: Place,
    failed: &mut BTreeMap<String, (u64, String)>,
) -> u64 {
    let seed = start.seed;
    for at in 1.. {
        for (which, errno) in ERRNOS.into_iter().enumerate() {
            let then = THENS[(at as usize + which + seed as usize) % THENS.len()];
            let case = Case {
                verb,
                place,
                at,
                errno,
                then,
            };
            let hit = Hit::default();
            COLLECTS.set(true);
            let ended = catch_unwind(AssertUnwindSafe(|| run(start, case, &hit)));
            COLLECTS.set(false);
            let op = *hit.lock().expect("no panic");
            if ended.is_err() {
                let text = PANIC.take();
                let kind = format!("{verb:?}, {op:?} of the {place:?}, {then:?}");
                failed
                    .entry(kind)
                    .or_insert_with(|| (0, format!("seed {seed}, {case:?}: {text}")))
                    .0 += 1;
            }
            if op.is_none() {
                return at - 1;
            }
        }
    }
    unreachable!("it ends")
}

/// Proves S-tx-14, S-tx-45, S-tx-62, S-tx-63, S-tx-64.
#[test]
fn each_failed_call_is_reported_and_can_be_repeated_where_changes_are_held() {
    each_call_fails(Setup {
        mode: Mode::Buffer,
        history: 0,
        has_backup: false,
    });
}

/// Proves S-tx-14, S-tx-62, S-tx-63.
#[test]
fn each_failed_call_is_reported_and_can_be_repeated_with_history() {
    each_call_fails(Setup {
        mode: Mode::Buffer,
        history: HISTORY,
        has_backup: false,
    });
}

/// Proves S-tx-14, S-tx-60, S-tx-62.
#[test]
fn each_failed_call_is_reported_and_can_be_repeated_with_a_backup() {
    each_call_fails(Setup {
        mode: Mode::Buffer,
        history: HISTORY,
        has_backup: true,
    });
}

/// Proves S-tx-14, S-tx-16, S-tx-62.
#[test]
fn each_failed_call_is_reported_and_can_be_repeated_in_shadow_mode() {
    each_call_fails(Setup {
        mode: Mode::Shadow,
        history: 0,
        has_backup: false,
    });
}
