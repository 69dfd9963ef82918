//! Commit rules with `participants`: ranks on two hosts write one checkpoint, and it is there whole or not at all.
//!
//! `FIRN_CRASH_ROUNDS` sets how many points of each trace are tried (without it, one of four traces), `FIRN_SEED` the seed, and
//! `FIRN_TRACE` the only trace.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_protocol::TransactionStage;
use firn_rules::trace::TraceStep;
use firn_tests::command::wait_until;
use firn_tests::random::{env_count, generator};
use firn_tests::replay::{Replayer, Trace, traces};
use firn_tests::rule_model::{Files, Model, find_files};
use firn_tests::{FirnMount, Sandbox, seed};
use rand::RngExt;
use rand::seq::SliceRandom;

const LIMIT: Duration = Duration::from_secs(90);

/// Two hosts over one backing.
struct Pair {
    shared: Sandbox,
    hosts: [Sandbox; 2],
}

impl Pair {
    fn new(name: &str) -> Self {
        Self {
            shared: Sandbox::new(name),
            hosts: [0, 1].map(|at| Sandbox::on_host(&format!("{name}{at}"), &format!("n{at}"))),
        }
    }

    fn backing(&self, name: &str) -> PathBuf {
        self.shared.mkdir(name)
    }

    fn mount(&self, at: usize, backing: &Path, rules: &str) -> FirnMount<'_> {
        let options = format!(
            "arena-size=64M,chunk-size=1M,drain=commit,participants=2,participants-wait=20s,rules={rules}"
        );
        FirnMount::over(&self.hosts[at], backing, &options)
    }

    fn mounts(&self, backing: &Path, rules: &str) -> [FirnMount<'_>; 2] {
        [0, 1].map(|at| self.mount(at, backing, rules))
    }
}

/// What the backing has; none: it changes just now.
fn find_kept(backing: &Path) -> Option<Files> {
    let mut files = Files::new();
    find_files(backing, "", &mut files).ok()?;
    Some(files)
}

/// Processes of a trace, each on a host of its own.
struct Ranks<'a> {
    mounts: &'a [FirnMount<'a>; 2],
    processes: BTreeMap<u32, Replayer>,
    model: Model,
}

impl Ranks<'_> {
    fn host_of(process: u32) -> usize {
        (process as usize + 1) % 2
    }

    /// Makes an operation; a rank makes the directory of a file that is not there on its host, as frameworks do.
    fn make(&mut self, trace: &Trace, index: usize) {
        let line = &trace.steps[index];
        let mount = &self.mounts[Self::host_of(line.process)];
        let process = self
            .processes
            .entry(line.process)
            .or_insert_with(|| Replayer::start(mount.path()));
        if let TraceStep::Open(path) | TraceStep::Mkdir(path) = &line.step {
            let above: Vec<&str> = Path::new(path)
                .ancestors()
                .skip(1)
                .filter_map(Path::to_str)
                .filter(|dir| !dir.is_empty())
                .collect();
            for dir in above.into_iter().rev() {
                if !mount.join(dir).exists() {
                    process.make(line.line, &format!("{} mkdir {dir}", line.process));
                }
            }
        }
        process.make(line.line, &trace.lines[index]);
        let commits = self.model.commits;
        self.model.play(line);
        if let TraceStep::Exit(_) = line.step {
            self.processes
                .remove(&line.process)
                .expect("it runs")
                .wait();
        }
        // A program goes on long after a checkpoint; here the next one would come before the other host knows of the last.
        if self.model.commits > commits {
            let told = format!("{}: the commit after line {}", trace.name, line.line);
            wait_until(&told, LIMIT, || {
                find_kept(mount.backing()).as_ref() == Some(&self.model.backing)
            });
        }
    }
}

/// States that the backing may have after `count` operations: that of the model, or of one before.
fn states(trace: &Trace, count: usize) -> Vec<Files> {
    let mut model = Model::new(&trace.rules);
    let mut states = vec![Files::new()];
    for line in &trace.steps[..count] {
        model.play(line);
        if states.last() != Some(&model.backing) {
            states.push(model.backing.clone());
        }
    }
    states
}

fn brief(files: &Files) -> Vec<&String> {
    files.keys().collect()
}

#[track_caller]
fn assert_one_of(told: &str, backing: &Path, states: &[Files]) -> usize {
    let found = find_kept(backing).expect("nothing changes");
    let place = states.iter().rposition(|state| *state == found);
    let expected: Vec<_> = states.iter().map(brief).collect();
    place.unwrap_or_else(|| {
        panic!(
            "{told}\nfound {:?}\nexpected one of {expected:#?}",
            brief(&found)
        )
    })
}

/// Traces of several ranks whose ranks share no file, so that each may run on a host of its own.
fn traces_of_ranks() -> Vec<Trace> {
    let of_ranks = |trace: &Trace| {
        let processes: BTreeSet<u32> = trace.steps.iter().map(|line| line.process).collect();
        processes.len() > 1
    };
    let mut traces = traces();
    traces.retain(of_ranks);
    traces
}

/// Proves S-rule-14.
#[test]
fn ranks_on_two_hosts_have_their_checkpoints_committed_together() {
    let pair = Pair::new("rules-two");
    for trace in traces_of_ranks() {
        let backing = pair.backing(&trace.name);
        let mounts = pair.mounts(&backing, &trace.rules);
        let mut ranks = Ranks {
            mounts: &mounts,
            processes: BTreeMap::new(),
            model: Model::new(&trace.rules),
        };
        let end = trace.steps.len();
        (0..end).for_each(|index| ranks.make(&trace, index));
        let states = states(&trace, end);
        let last = states.last().expect("a state");
        wait_until(&format!("{}: the last commit", trace.name), LIMIT, || {
            find_kept(&backing).as_ref() == Some(last)
        });
        let place = assert_one_of(&trace.name, &backing, &states);
        println!("{}: state {place} of {}", trace.name, states.len() - 1);
        drop(ranks);
        wait_until("what was not complete is dropped", LIMIT, || {
            let open = mounts.iter().flat_map(|mount| mount.status().transactions);
            open.filter(|one| {
                one.waits_for
                    .as_ref()
                    .is_none_or(|what| !what.contains("the last complete"))
            })
            .count()
                == 0
        });
        assert_one_of(&trace.name, &backing, &states);
        for mount in mounts {
            mount.umount();
        }
    }
}

/// A part that is prepared holds an unmount up until the other host is known to be dead.
fn umount(mount: FirnMount<'_>) {
    wait_until("no part is prepared", LIMIT, || {
        let mut parts = mount.status().transactions.into_iter();
        parts.all(|part| part.stage == TransactionStage::Open)
    });
    mount.umount();
}

/// Proves S-rule-14.
#[test]
fn a_rank_or_a_firnd_that_is_killed_leaves_the_checkpoints_of_both_hosts_whole() {
    let seed = seed("rules_of_hosts");
    let mut random = generator(seed);
    let pair = Pair::new("rules-kill");
    let mut traces = traces_of_ranks();
    let rounds = env_count("FIRN_CRASH_ROUNDS", 0);
    if rounds == 0 {
        traces.shuffle(&mut random);
        traces.truncate(4);
    }
    for trace in traces {
        for round in 0..rounds.max(1) {
            let count = random.random_range(1..=trace.steps.len());
            let kind = random.random_range(0..4);
            let told = format!(
                "{} after {count} operations, kind {kind}, seed {seed}",
                trace.name
            );
            let backing = pair.backing(&format!("{}-{round}", trace.name));
            let mounts = pair.mounts(&backing, &trace.rules);
            let mut ranks = Ranks {
                mounts: &mounts,
                processes: BTreeMap::new(),
                model: Model::new(&trace.rules),
            };
            (0..count).for_each(|index| ranks.make(&trace, index));
            let Ranks { mut processes, .. } = ranks;
            let [first, second] = mounts;
            // A rank, one of the firnd, or both.
            match kind {
                0 => {
                    drop(processes.pop_first());
                    drop(processes);
                    umount(first);
                    umount(second);
                }
                1 => {
                    drop(first.kill());
                    drop(processes);
                    umount(second);
                }
                2 => {
                    drop(second.kill());
                    drop(processes);
                    umount(first);
                }
                _ => {
                    drop(first.kill());
                    drop(second.kill());
                    drop(processes);
                }
            }
            for mount in pair.mounts(&backing, &trace.rules) {
                mount.umount();
            }
            let states = states(&trace, count);
            let place = assert_one_of(&told, &backing, &states);
            println!("{told}: state {place} of {}", states.len() - 1);
            let _ = fs::remove_dir_all(&backing);
        }
    }
}

/// A rule that keeps `keep` checkpoints, in a file of its own.
fn keep_rule(pair: &Pair, keep: usize) -> String {
    let path = pair.shared.path().join("site.rules");
    fs::write(&path, format!("a step-*/ close:done keep={keep}\n")).expect("write the rules");
    path.display().to_string()
}

/// Both hosts write their files of a step; the close of `done` waits for the commit.
fn write_step(mounts: &[FirnMount<'_>; 2], step: u64) {
    for (at, mount) in mounts.iter().enumerate() {
        let dir = mount.join(format!("step-{step}"));
        fs::create_dir(&dir).expect("mkdir");
        fs::write(dir.join(format!("model-{at}")), step.to_string()).expect("write");
    }
    let done = mounts[0].join(format!("step-{step}/done"));
    fs::write(done, "yes").expect("write");
}

fn steps_in(dir: &Path) -> Vec<u64> {
    let names = fs::read_dir(dir).expect("read_dir");
    let names = names.filter_map(|entry| {
        let name = entry.expect("an entry").file_name().into_string().ok()?;
        name.strip_prefix("step-")?.parse().ok()
    });
    let mut steps: Vec<u64> = names.collect();
    steps.sort_unstable();
    steps
}

fn wait_for_steps(dir: &Path, steps: &[u64]) {
    wait_until(&format!("{} has {steps:?}", dir.display()), LIMIT, || {
        steps_in(dir) == steps
    });
}

#[track_caller]
fn assert_whole(backing: &Path, step: u64, told: &str) {
    let dir = backing.join(format!("step-{step}"));
    for at in 0..2 {
        let found = fs::read_to_string(dir.join(format!("model-{at}"))).unwrap_or_default();
        assert_eq!(found, step.to_string(), "{told}: model-{at} of step {step}");
    }
    assert!(dir.join("done").exists(), "{told}: the end of step {step}");
}

/// Proves S-rule-6 and S-rule-14.
#[test]
fn of_two_hosts_one_removes_what_the_rule_does_not_keep() {
    let pair = Pair::new("rules-keep-two");
    let backing = pair.backing("kept");
    let mounts = pair.mounts(&backing, &keep_rule(&pair, 2));
    for step in 1..=4 {
        write_step(&mounts, step);
    }
    wait_for_steps(&backing, &[3, 4]);
    for mount in &mounts {
        wait_for_steps(mount.path(), &[3, 4]);
    }
    [3, 4]
        .iter()
        .for_each(|step| assert_whole(&backing, *step, "kept"));
    let removals = || {
        let counts = mounts.iter().map(|mount| mount.status().rule_removals);
        counts
            .filter_map(|counts| counts.get("a").copied())
            .sum::<u64>()
    };
    wait_until("each removal is counted once", LIMIT, || removals() == 2);
    for mount in mounts {
        mount.umount();
    }
    assert_eq!(steps_in(&backing), [3, 4]);
}

/// Proves S-rule-6.
#[test]
fn a_host_killed_while_it_removes_leaves_each_checkpoint_of_both_whole_or_gone() {
    let seed = seed("rules_keep_of_hosts");
    let mut random = generator(seed);
    let pair = Pair::new("rules-keep-kill");
    let backing = pair.backing("kept");
    let rule = keep_rule(&pair, 1);
    let mut newest = 0;
    for round in 0..env_count("FIRN_CRASH_ROUNDS", 3) {
        let mounts = pair.mounts(&backing, &rule);
        for _ in 0..2 {
            newest += 1;
            write_step(&mounts, newest);
        }
        // Within what one removal takes: the moment decides how far it is.
        std::thread::sleep(Duration::from_micros(random.random_range(0..40_000)));
        let told = format!("round {round}, seed {seed}");
        let [first, second] = mounts;
        drop(first.kill());
        umount(second);
        for mount in pair.mounts(&backing, &rule) {
            mount.umount();
        }
        let steps = steps_in(&backing);
        println!("{told}: {steps:?}");
        assert_eq!(steps.last(), Some(&newest), "{told}: the newest is there");
        for step in steps {
            assert_whole(&backing, step, &told);
        }
    }
    let mounts = pair.mounts(&backing, &rule);
    write_step(&mounts, newest + 1);
    wait_for_steps(&backing, &[newest + 1]);
    for mount in mounts {
        mount.umount();
    }
}

/// Proves S-rule-15 and S-rule-16.
#[test]
fn until_the_commit_each_host_sees_its_own_part_and_all_parts_count() {
    let pair = Pair::new("rules-views");
    let backing = pair.backing("shared");
    let rules = pair.shared.path().join("site.rules");
    let rule = "a step-*/ close:done model-*=writers\n";
    fs::write(&rules, rule).expect("write the rules");
    let mounts = pair.mounts(&backing, &rules.display().to_string());
    let seen = |at: usize| -> BTreeSet<String> {
        let names = fs::read_dir(mounts[at].join("step-1")).expect("read_dir");
        let names = names.map(|entry| entry.expect("an entry").file_name());
        names
            .map(|name| name.to_string_lossy().into_owned())
            .collect()
    };
    let names = |names: &[&str]| names.iter().map(ToString::to_string).collect();
    fs::create_dir(mounts[0].join("step-1")).expect("mkdir");
    fs::write(mounts[0].join("step-1/model-0"), "0").expect("write");
    // The event comes, and one host of two has written.
    fs::write(mounts[0].join("step-1/done"), "yes").expect("write");
    assert!(!mounts[1].join("step-1").exists());
    fs::create_dir(mounts[1].join("step-1")).expect("mkdir");
    let writer = File::create(mounts[1].join("step-1/model-1")).expect("create");
    assert_eq!(seen(0), names(&["done", "model-0"]));
    assert_eq!(seen(1), names(&["model-1"]));
    wait_until("it waits for the file that is open", LIMIT, || {
        let mut parts = mounts[0].status().transactions.into_iter();
        let on = |what: &String| what.contains("1 files to be closed on");
        parts.any(|part| part.waits_for.as_ref().is_some_and(on))
    });
    assert_eq!(steps_in(&backing), [0_u64; 0]);
    drop(writer);
    wait_for_steps(&backing, &[1]);
    for at in 0..2 {
        wait_until("each host sees the whole", LIMIT, || {
            seen(at) == names(&["done", "model-0", "model-1"])
        });
    }
    for mount in mounts {
        mount.umount();
    }
}

/// Proves S-rule-14.
#[test]
fn the_next_step_in_several_directories_waits_until_the_hosts_have_committed_the_last() {
    let pair = Pair::new("rules-wide");
    let backing = pair.backing("case");
    for at in 0..2 {
        fs::create_dir(backing.join(format!("processor{at}"))).expect("mkdir");
    }
    let mounts = pair.mounts(&backing, "openfoam");
    let [first, second] = [0, 1].map(|at| mounts[at].join(format!("processor{at}")));
    for dir in [&first, &second] {
        fs::create_dir(dir.join("1")).expect("mkdir");
    }
    fs::write(first.join("1/U"), "0").expect("write");
    let writer = File::create(second.join("1/U")).expect("create");
    std::thread::scope(|scope| {
        let next = scope.spawn(|| fs::create_dir(first.join("2")));
        wait_until("it waits for the file that is open", LIMIT, || {
            let mut parts = mounts[0].status().transactions.into_iter();
            let on = |what: &String| what.contains("1 files to be closed on");
            parts.any(|part| part.waits_for.as_ref().is_some_and(on))
        });
        assert!(!next.is_finished());
        drop(writer);
        next.join().expect("a thread").expect("mkdir");
    });
    for at in 0..2 {
        let kept = backing.join(format!("processor{at}"));
        wait_until("the step of both hosts is there", LIMIT, || {
            kept.join("1/U").exists()
        });
        assert!(!kept.join("2").exists(), "the next one is not complete");
    }
    for mount in mounts {
        mount.umount();
    }
    assert!(!backing.join("processor0/2").exists());
}
