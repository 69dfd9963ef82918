//! Tests of every stack of layers: the suite, and transactions that are cut off at each call.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use firn_backing::{Access, Errno, FileUse, RenameFlags, Result, Volume};
use firn_hosts::own;
use firn_lanes::{Lane, Rule, Setup};
use firn_sim::{Fault, SimBacking, Tree, suite, tree};
use firn_transact::{Mode, TransactionHandle};

use super::*;

/// Which optional layers a store has.
#[derive(Clone, Copy, Debug)]
struct Stack {
    transactions: bool,
    logs: bool,
    lanes: bool,
}

fn stacks() -> impl Iterator<Item = Stack> {
    (0..8).map(|layers| Stack {
        transactions: layers & 1 != 0,
        logs: layers & 2 != 0,
        lanes: layers & 4 != 0,
    })
}

/// A directory and two lanes, as one process has them.
struct SimDisks {
    primary: SimBacking,
    lanes: [SimBacking; 2],
}

impl SimDisks {
    fn new() -> Self {
        Self {
            primary: SimBacking::new(),
            lanes: [SimBacking::new(), SimBacking::new()],
        }
    }

    fn all(&self) -> [&SimBacking; 3] {
        [&self.primary, &self.lanes[0], &self.lanes[1]]
    }

    /// Calls `each` at each call on any of the disks. Once it returns false, the process counts as crashed: that call
    /// and all later ones fail.
    fn watch(&self, each: impl Fn() -> bool + Send + Sync + 'static) {
        let each = Arc::new(each);
        for disk in self.all() {
            let each = Arc::clone(&each);
            disk.set_plan(move |_, _| (!each()).then_some(Fault::Crash));
        }
    }

    /// Lets the process crash at this call, counted from 1.
    fn crash_at(&self, call: u64) {
        let calls = AtomicU64::new(0);
        self.watch(move || calls.fetch_add(1, Ordering::Relaxed) + 1 < call);
    }

    /// Returns the disks as a new process finds them. With a seed, a power loss drops some data that was not synced.
    fn after_crash(&self, power_loss: Option<u64>) -> Self {
        let fork = Self {
            primary: self.primary.fork(),
            lanes: self.lanes.each_ref().map(SimBacking::fork),
        };
        for (disk, number) in fork.all().into_iter().zip(0..) {
            disk.begin_new_process();
            if let Some(seed) = power_loss {
                disk.power_loss(seed.wrapping_mul(31) + number);
            }
        }
        fork
    }

    fn open_lanes(&self) -> Lanes<SimBacking> {
        let staging = firn_lanes::record::open_staging(&self.primary, "host").expect("staging");
        let lanes = self.lanes.iter().zip(["/lanes/0", "/lanes/1"]);
        let lanes = lanes.map(|(disk, path)| Lane::new(disk.clone(), path.into()));
        let setup = Setup {
            id: 1,
            staging: Some(staging),
            lanes: lanes.collect(),
            absent: Vec::new(),
            rule: Some(Rule::new(2, "host")),
        };
        Lanes::open(self.primary.clone(), setup).expect("open the lanes")
    }

    /// Opens the layers below transactions (logs and lanes) that `stack` has, over the simulated disks.
    fn open_lower_store(&self, stack: Stack) -> LoggableStore<SimBacking> {
        let placeable = if stack.lanes {
            Either::Upper(self.open_lanes())
        } else {
            Either::Lower(self.primary.clone())
        };
        if !stack.logs {
            return Either::Lower(placeable);
        }
        let setup = firn_log::Setup {
            host: "host".to_owned(),
            chooses: Box::new(|_: &OsStr| true),
            is_alive: Box::new(|_| Ok(false)),
            // There is no other host.
            view_age_max: Duration::from_secs(3600),
            lag_max: Duration::ZERO,
            unit_bytes: 64 << 10,
            when_closed: firn_log::WhenClosed::Flatten,
            flattens_read: false,
        };
        Either::Upper(LogBacking::open(placeable, setup).expect("open the logs"))
    }

    fn open(&self, stack: Stack) -> Store<SimBacking> {
        let lower_store = self.open_lower_store(stack);
        if stack.transactions {
            let opened = TransactionalBacking::open(lower_store);
            Either::Upper(opened.expect("open the transactions").0)
        } else {
            Either::Lower(PlainBacking::new(lower_store))
        }
    }
}

#[test]
fn every_stack_of_layers_conforms() {
    for stack in stacks() {
        println!("{stack:?}");
        suite::run(|| SimDisks::new().open(stack));
    }
}

#[test]
fn a_store_has_the_layers_that_it_was_opened_with() {
    for stack in stacks() {
        let disks = SimDisks::new();
        let store = disks.open(stack);
        assert_eq!(store.transactional().is_some(), stack.transactions);
        assert_eq!(store.log_layer().is_some(), stack.logs);
        assert_eq!(store.lane_layer().is_some(), stack.lanes);
    }
}

fn name(text: &str) -> &OsStr {
    OsStr::new(text)
}

fn dir_of<B: Backing>(store: &B) -> Result<B::Inode> {
    Ok(store.lookup(&store.root(), name("job"))?.0)
}

fn write<B: Backing>(store: &B, dir: &B::Inode, file: &str, at: u64, bytes: &[u8]) -> Result<()> {
    let me = suite::own_caller();
    let opened = match store.lookup(dir, name(file)) {
        Ok((inode, _)) => store.open(&inode, Access::ReadWrite)?,
        Err(Errno::NOENT) => store.create(&me, dir, name(file), 0o644)?.1,
        Err(error) => return Err(error),
    };
    store.report_use(&opened, FileUse::OpenedToWrite)?;
    let count = store.write_at(&opened, &[IoSlice::new(bytes)], at)?;
    assert_eq!(count, bytes.len());
    store.report_use(&opened, FileUse::Written)?;
    Ok(())
}

/// Makes the files that a job has before its transaction.
fn prepare_job<B: Backing>(store: &B) {
    let me = suite::own_caller();
    let made = store.mkdir(&me, &store.root(), name("job"), 0o755);
    let dir = made.expect("mkdir").0;
    for (file, len) in [("rank_0", 70_000), ("rank_1", 9_000), ("gone", 100)] {
        write(store, &dir, file, 0, &vec![1; len]).expect("write");
    }
    store.sync_all().expect("sync");
}

/// Makes each kind of change that a transaction may have: data, lengths, names and directories.
fn make_all_kinds_of_changes<B: Backing>(store: &B) -> Result<()> {
    let me = suite::own_caller();
    let dir = dir_of(store)?;
    // Data in the middle of a file.
    let offset = 30_000;
    write(store, &dir, "rank_0", offset, &[2; 5_000])?;
    // A file that becomes empty and then longer than before.
    let (inode, _) = store.lookup(&dir, name("rank_1"))?;
    let file = store.open(&inode, Access::ReadWrite)?;
    store.set_len(&file, 0)?;
    drop(file);
    write(store, &dir, "rank_1", 0, &[3; 20_000])?;
    // New files, a removed file and a new name.
    write(store, &dir, "rank_2", 0, &[4; 40_000])?;
    write(store, &dir, "new.tmp", 0, &[5; 300])?;
    store.unlink(&dir, name("gone"))?;
    let flags = RenameFlags::empty();
    store.rename(&dir, name("new.tmp"), &dir, name("rank_0.meta"), flags)?;
    // A new directory, with a new file and one from another directory.
    let (step_dir, _) = store.mkdir(&me, &dir, name("step_1"), 0o755)?;
    write(store, &step_dir, "rank_0", 0, &[6; 10_000])?;
    store.rename(&dir, name("rank_2"), &step_dir, name("rank_2"), flags)?;
    Ok(())
}

/// Returns the tree as programs see it, without times and extended attributes.
fn read_tree_as_programs<B: Backing>(store: &B) -> Tree {
    let mut tree = tree(store).expect("read the tree");
    for entry in tree.values_mut() {
        entry.xattrs.clear();
    }
    tree
}

/// Checks the layers below transactions after a run: no file of the transaction is left there, and without that layer a
/// reader finds the tree `seen`, which programs saw. `context` says in a failure which run it was.
///
/// With `lost_power`, files that were not synced may have left logs and data without a name.
fn check_lower_store(disks: &SimDisks, stack: Stack, lost_power: bool, seen: &Tree, context: &str) {
    let lower_store = disks.open_lower_store(stack);
    if let Some(logs) = lower_store.upper() {
        logs.end_removals().expect("end removals");
        for _ in 0..3 {
            logs.settle();
        }
        let mut remaining = logs.flatten_below(&logs.root()).expect("flatten");
        if lost_power {
            // A power loss takes the name of a file that was not synced, and leaves its logs.
            remaining.lost = 0;
        }
        assert!(remaining.is_empty(), "{context}: {remaining:?}");
    }
    let placeable = match &lower_store {
        Either::Lower(placeable) => placeable,
        Either::Upper(logs) => logs.below(),
    };
    if let Some(lanes) = placeable.upper() {
        lanes.finish_removals().expect("finish removals");
        let orphans = lanes.find_orphans().expect("find orphans");
        // A power loss may leave files of which nothing was synced (firn-lanes).
        assert!(lost_power || orphans.is_empty(), "{context}: {orphans:?}");
    }
    let plain = PlainBacking::new(disks.open_lower_store(Stack {
        logs: false,
        ..stack
    }));
    assert_eq!(
        &read_tree_as_programs(&plain),
        seen,
        "{context}: the backing without logs"
    );
    let firn = own::find_dir(&disks.primary, &disks.primary.root(), own::TOP);
    let firn_entries = match firn.expect("look for .firn") {
        Some((firn, _)) => own::list(&disks.primary, &firn).expect("list"),
        None => Vec::new(),
    };
    let is_transaction = |name: &[u8]| name.starts_with(b"tx-");
    let is_left = firn_entries.iter().any(|(name, ..)| is_transaction(name));
    assert!(!is_left, "{context}: a transaction is left");
}

/// Begins a transaction, makes all changes of [`make_all_kinds_of_changes`] in it, and commits it.
fn commit_changes<B: Backing>(store: &TransactionalBacking<B>) -> std::result::Result<(), String> {
    let text_of = |error: &dyn std::fmt::Display| error.to_string();
    let dir = dir_of(store).map_err(|error| text_of(&error))?;
    store.begin(&dir, b"job").map_err(|error| text_of(&error))?;
    make_all_kinds_of_changes(store).map_err(|error| text_of(&error))?;
    let open = store.transaction_at(&dir).ok_or("no transaction is open")?;
    open.decide(7).map_err(|error| text_of(&error))?;
    let decided = store
        .first_transaction(b"job")
        .and_then(TransactionHandle::decided);
    match decided {
        Some(commit) => commit.apply().map_err(|error| text_of(&error)),
        None => Ok(()),
    }
}

fn open_transactional(
    disks: &SimDisks,
    stack: Stack,
    mode: Mode,
    context: &str,
) -> TransactionalStore<SimBacking> {
    match TransactionalBacking::open(disks.open_lower_store(stack)) {
        Ok((opened, _)) => opened.in_mode(mode),
        Err(error) => panic!("{context}: {error}"),
    }
}

/// Returns new disks with the files of the job, not changed yet, and a store on them.
fn prepare_world(stack: Stack, mode: Mode) -> (SimDisks, TransactionalStore<SimBacking>) {
    let disks = SimDisks::new();
    prepare_job(&disks.open(Stack {
        transactions: false,
        ..stack
    }));
    let store = open_transactional(&disks, stack, mode, "a new world");
    (disks, store)
}

/// Distance between the calls that are cut off in one run: a commit makes thousands.
const CALL_STEP: u64 = 5;

/// The first call that is cut off: `FIRN_SEED`, or another one in each run.
fn first_call() -> u64 {
    let given = std::env::var("FIRN_SEED").ok();
    let given = given.map(|seed| seed.parse().expect("FIRN_SEED is a number"));
    let seed: u64 = given.unwrap_or_else(|| std::process::id().into());
    1 + seed % CALL_STEP
}

/// Runs `work`, and returns the number of calls that it makes on the disks.
fn count_calls(disks: &SimDisks, work: impl FnOnce()) -> u64 {
    let count = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&count);
    disks.watch(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        true
    });
    work();
    count.load(Ordering::Relaxed)
}

/// Cuts a commit off at one call, and checks that programs see one of two trees afterwards: that before the commit or
/// that after it. With a seed in `power_loss`, the disks then lose some data that was not synced.
fn check_crash_at(
    call: u64,
    power_loss: Option<u64>,
    stack: Stack,
    mode: Mode,
    [before, after]: [&Tree; 2],
) {
    let context = format!("{mode:?} {stack:?}, call {call}, power {power_loss:?}");
    let (disks, store) = prepare_world(stack, mode);
    disks.crash_at(call);
    let committed = commit_changes(&store).is_ok();
    let found = disks.after_crash(power_loss);
    // The drop of the crashed store would clean up, which a killed process does not.
    std::mem::forget(store);
    let store = open_transactional(&found, stack, mode, &context);
    let seen = read_tree_as_programs(&store);
    assert!(
        seen == *before || seen == *after,
        "{context}: neither\n{seen:?}"
    );
    assert!(!committed || seen == *after, "{context}: it was committed");
    drop(store);
    check_lower_store(&found, stack, power_loss.is_some(), &seen, &context);
}

/// Cuts a commit off at one call after another, with and without a power loss. After each crash, programs must see the
/// tree before the commit or the tree after it, and the latter if the commit had succeeded. Proves S-tx-123.
#[test]
fn a_transaction_that_is_cut_off_at_any_call_is_there_whole_or_not_at_all() {
    for mode in [Mode::Buffer, Mode::Shadow] {
        for stack in stacks().filter(|stack| stack.transactions) {
            let (disks, store) = prepare_world(stack, mode);
            let before = read_tree_as_programs(&store);
            let calls = count_calls(&disks, || commit_changes(&store).expect("commit"));
            let after = read_tree_as_programs(&store);
            assert_ne!(before, after);
            drop(store);
            check_lower_store(&disks, stack, false, &after, "without a crash");
            let first = first_call();
            println!("{mode:?} {stack:?}: {calls} calls, each {CALL_STEP}th from {first} on");
            for call in (first..=calls).step_by(CALL_STEP as usize) {
                for power_loss in [None, Some(call)] {
                    check_crash_at(call, power_loss, stack, mode, [&before, &after]);
                }
            }
        }
    }
}
