//! Writers, readers and renames use the engine and its I/O threads at once. Each read is right while they run, and the
//! backing holds all written bytes at the end.
//!
//! `cargo xtask campaign tsan` runs these tests with ThreadSanitizer. `FIRN_SEED` repeats the operations of each
//! thread, but not their interleaving. `FIRN_OPS` sets the number of operations of each writer.

mod lister;
mod mount;
mod reader;
mod shared;
mod writer;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use self::mount::{Disturbance, Mount};
use firn_backing::{Backing, DirBacking, Errno, LaneIndex, RenameFlags};
use firn_engine::{InodeId, Order, ROOT};
use firn_sim::Fault;
use firn_sim::SimBacking;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Number of writers. Each writer has its own directory and every fourth stripe of the shared file.
const WRITERS: usize = 4;
const READERS: u64 = 2;
/// Operations of each writer. They take one or two seconds, and about ten times as long with the sanitizer.
const OPS_DEFAULT: u64 = 400;

fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name} must be a whole number")),
    )
}

fn seed(test: &str) -> u64 {
    let seed = setting("FIRN_SEED").unwrap_or_else(rand::random);
    println!("{test}: repeat with FIRN_SEED={seed}");
    seed
}

/// Proves S-write-2, S-write-3, S-write-6, S-read-1, S-name-2.
#[test]
fn threads_over_the_simulated_backing_agree_with_their_models() {
    run(SimBacking::new(), seed("simulated"), Disturbance::None);
}

/// Proves S-error-1, S-error-4.
#[test]
fn threads_over_a_failing_backing_agree_with_their_models() {
    let backing = SimBacking::new();
    let seed = seed("failing");
    let mut rng = StdRng::seed_from_u64(seed);
    backing.set_gathers(rng.random());
    backing.set_plan(move |call, _| match (call, rng.random_range(0..40)) {
        ("write_at", 0) => Some(Fault::Error(Errno::IO)),
        ("write_at", 1..8) => Some(Fault::ShortWrite(rng.random_range(1..5000))),
        _ => None,
    });
    run(backing, seed, Disturbance::Faults);
}

/// Proves S-order-5.
#[test]
fn threads_over_several_lanes_agree_with_their_models_in_both_orders() {
    let seed = seed("lanes");
    let mut rng = StdRng::seed_from_u64(seed);
    for order in [Order::Interleaved, Order::Sequential] {
        let backing = SimBacking::new();
        let lanes = rng.random_range(2..5);
        backing.set_lanes(lanes);
        backing.set_gathers(rng.random());
        let faulty = backing.clone();
        let mut choose = StdRng::seed_from_u64(seed ^ 1);
        // Now and then a random lane starts or stops failing.
        backing.set_plan(move |call, _| {
            if call == "write_at" && choose.random_range(0..20) == 0 {
                let lane = LaneIndex::new(choose.random_range(0..lanes));
                faulty.fail_lane(lane, choose.random_bool(0.3));
            }
            None
        });
        let writers = rng.random_range(1..4);
        let healing = backing.clone();
        let heal = move || {
            healing.clear_plan();
            (0..lanes).for_each(|lane| healing.fail_lane(LaneIndex::new(lane), false));
        };
        run_on(
            Mount::in_order(backing, Disturbance::Faults, order, writers),
            seed,
            heal,
        );
    }
}

/// Proves S-write-2, S-write-3, S-write-6, S-read-1, S-name-2.
#[test]
fn threads_over_a_directory_agree_with_their_models() {
    let dir = tempfile::tempdir().expect("a directory");
    run(
        DirBacking::open(dir.path()).expect("it opens"),
        seed("directory"),
        Disturbance::None,
    );
}

/// Proves S-chunks-1.
#[test]
fn what_chunk_lists_name_stays_as_it_is_under_all_threads() {
    run(SimBacking::new(), seed("lists"), Disturbance::Lists);
}

fn run<B: Backing>(backing: B, seed: u64, disturbance: Disturbance) {
    run_on(Mount::new(backing, disturbance), seed, || {});
}

/// Runs all threads over a mount and compares the backing with the models. `heal` ends the faults once the writers have
/// ended.
fn run_on<B: Backing>(mount: Mount<B>, seed: u64, heal: impl FnOnce()) {
    let ops = setting("FIRN_OPS").unwrap_or(OPS_DEFAULT);
    let dirs: Vec<InodeId> = (0..WRITERS)
        .map(|writer| mount.mkdir(&dir_name(writer)))
        .collect();
    mount.create(ROOT, shared::NAME);
    let writing = AtomicUsize::new(WRITERS);
    let models = std::thread::scope(|scope| {
        let mount = &mount;
        let dirs = &dirs;
        let writing = &writing;
        let writers: Vec<_> = (0..WRITERS)
            .map(|index| {
                scope.spawn(move || {
                    let _ends = Ends(writing);
                    writer::run(mount, index, dirs[index], seed, ops)
                })
            })
            .collect();
        let go_on = move || writing.load(Ordering::Acquire) > 0;
        let mut others: Vec<_> = (0..READERS)
            .map(|index| scope.spawn(move || reader::run(mount, dirs, seed ^ (100 + index), go_on)))
            .collect();
        others.push(scope.spawn(move || rename_directories(mount, seed, go_on)));
        others.push(scope.spawn(move || ask(mount, go_on)));
        let lister = mount
            .lists
            .then(|| scope.spawn(move || lister::run(mount, seed ^ 300, go_on)));
        // The scope also joins its threads, but ThreadSanitizer does not see that synchronization.
        let models: Vec<_> = writers
            .into_iter()
            .map(|thread| thread.join().expect("a writer"))
            .collect();
        others
            .into_iter()
            .for_each(|thread| thread.join().expect("another thread"));
        if let Some(lister) = lister {
            assert!(lister.join().expect("a lister") > 0, "it read nothing");
        }
        models
    });
    heal();
    let found = mount.end();
    let mut expected = shared::merge(models.iter().map(|model| &model.stripes));
    for (writer, model) in models.iter().enumerate() {
        expected.extend(model.tree(&dir_name(writer)));
    }
    compare(&found, &expected);
}

type Contents = BTreeMap<String, Vec<u8>>;

fn compare(found: &Contents, expected: &Contents) {
    assert_eq!(
        found.keys().collect::<Vec<_>>(),
        expected.keys().collect::<Vec<_>>()
    );
    for (path, contents) in expected {
        let found = &found[path];
        let first = found.iter().zip(contents).position(|(a, b)| a != b);
        let len = found.len();
        let wanted = contents.len();
        assert!(
            found == contents,
            "{path}: {len} bytes, not {wanted}; differs from {first:?} on"
        );
    }
}

/// Subtracts a writer from the count of running writers when it ends or panics, so that the other threads end.
struct Ends<'a>(&'a AtomicUsize);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

fn dir_name(writer: usize) -> String {
    format!("w{writer}")
}

/// Renames the directories of the writers to another name and back.
fn rename_directories<B: Backing>(mount: &Mount<B>, seed: u64, go_on: impl Fn() -> bool) {
    let mut rng = StdRng::seed_from_u64(seed ^ 200);
    while go_on() {
        let home = dir_name(rng.random_range(0..WRITERS));
        for (from, to) in [(home.as_str(), "away"), ("away", home.as_str())] {
            let from = OsStr::new(from);
            let to = OsStr::new(to);
            mount.insist(|| {
                mount
                    .engine
                    .namespace
                    .rename(ROOT, from, ROOT, to, RenameFlags::empty())
            });
        }
    }
}

/// Makes the calls of `firn status` and `firn check`, and drains everything in each 32nd round.
fn ask<B: Backing>(mount: &Mount<B>, go_on: impl Fn() -> bool) {
    let mut rounds = 0u32;
    while go_on() {
        let status = mount.engine.figures();
        assert!(status.held_bytes <= status.arena_bytes, "{status:?}");
        mount.engine.files_below(b"w0");
        let (_, damage) = mount.engine.arena().read_pieces();
        assert_eq!(damage, []);
        // The pause leaves the CPUs to the writers.
        std::thread::sleep(Duration::from_micros(200));
        rounds += 1;
        if rounds.is_multiple_of(32) {
            mount.engine.durability.drain_tree(b"");
        }
    }
}
