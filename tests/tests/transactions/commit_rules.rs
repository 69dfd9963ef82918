//! Commit rules on a mount: the operations of each known writer, cut off after any of them.
//!
//! Whatever is killed, the backing has what a model says: each checkpoint as it was when it was committed last, and all else as it is.
//!
//! `FIRN_CRASH_ROUNDS` sets how many points of each trace are tried, `FIRN_SEED` the seed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use firn_rules::load_rules;
use firn_rules::trace::{Outcome, Player, Step, TraceLine};
use firn_tests::command::wait_until;
use firn_tests::random::{env_count, generator};
use firn_tests::replay::{Replayer, Trace, content, traces};
use firn_tests::{FirnMount, Sandbox, seed};
use rand::RngExt;
use rand::rngs::StdRng;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    Dir,
    Link(String),
    File(Vec<u8>),
}

/// An exit is known within a second of it, on a machine that is not loaded.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);

type Files = BTreeMap<String, Node>;

fn is_at(path: &str, top: &str) -> bool {
    path == top
        || path
            .strip_prefix(top)
            .is_some_and(|rest| rest.starts_with('/'))
}

/// Makes `to` have at a top what `from` has there.
fn copy(from: &Files, to: &mut Files, top: &str) {
    to.retain(|path, _| !is_at(path, top));
    let there = from.iter().filter(|(path, _)| is_at(path, top));
    to.extend(there.map(|(path, node)| (path.clone(), node.clone())));
}

/// What programs and the backing have after operations of a trace.
struct Model {
    player: Player,
    seen: usize,
    view: Files,
    backing: Files,
    /// Tops of scopes that are open.
    open: BTreeSet<String>,
    commits: usize,
}

impl Model {
    fn new(rules: &str) -> Self {
        let rules = load_rules(rules, |_| unreachable!("no file")).expect("rules");
        Self {
            player: Player::new(Arc::new(rules)),
            seen: 0,
            view: Files::new(),
            backing: Files::new(),
            open: BTreeSet::new(),
            commits: 0,
        }
    }

    fn play(&mut self, line: &TraceLine) {
        self.player.play(line);
        let new: Vec<Outcome> = self.player.outcomes()[self.seen..].to_vec();
        self.seen = self.player.outcomes().len();
        // What a begin comes after, and the begin, are before the operation.
        let begins = |one: &Outcome| one.what == "begin" || one.what == "join";
        let before = new.iter().rposition(begins).map_or(0, |index| index + 1);
        new[..before].iter().for_each(|one| self.take(one));
        self.change(line);
        new[before..].iter().for_each(|one| self.take(one));
    }

    fn take(&mut self, outcome: &Outcome) {
        for top in &outcome.paths {
            match outcome.what {
                "begin" | "join" => drop(self.open.insert(top.clone())),
                "commit" => copy(&self.view, &mut self.backing, top),
                "abort" => copy(&self.backing, &mut self.view, top),
                other => panic!("{other}"),
            }
            if matches!(outcome.what, "commit" | "abort") {
                self.open.remove(top);
            }
        }
        self.commits += usize::from(outcome.what == "commit");
    }

    fn set(&mut self, path: &str, node: Node) {
        self.view.insert(path.to_owned(), node.clone());
        if !self.open.iter().any(|top| is_at(path, top)) {
            self.backing.insert(path.to_owned(), node);
        }
    }

    fn remove(&mut self, path: &str) {
        self.view.retain(|found, _| !is_at(found, path));
        if !self.open.iter().any(|top| is_at(path, top)) {
            self.backing.retain(|found, _| !is_at(found, path));
        }
    }

    fn change(&mut self, line: &TraceLine) {
        match &line.step {
            Step::Mkdir(path) => self.set(path, Node::Dir),
            Step::Open(path) | Step::Truncate(path) => self.set(path, Node::File(Vec::new())),
            Step::Write(path, len) => self.set(path, Node::File(content(line.line, *len))),
            Step::Symlink(target, path) => self.set(path, Node::Link(target.clone())),
            Step::Unlink(path) | Step::Rmdir(path) => self.remove(path),
            Step::Rename(from, to) => {
                let moved: Files = self
                    .view
                    .iter()
                    .filter(|(path, _)| is_at(path, from))
                    .map(|(path, node)| (format!("{to}{}", &path[from.len()..]), node.clone()))
                    .collect();
                self.remove(to);
                moved
                    .into_iter()
                    .for_each(|(path, node)| self.set(&path, node));
                self.remove(from);
            }
            Step::Link(..) => unreachable!("no trace has one"),
            Step::Close(_) | Step::Exit(_) | Step::Kill => {}
        }
    }
}

fn read_files(dir: &Path, below: &str, files: &mut Files) {
    for entry in fs::read_dir(dir).expect("read_dir") {
        let entry = entry.expect("an entry");
        let name = entry.file_name().into_string().expect("text");
        let path = if below.is_empty() {
            name
        } else {
            format!("{below}/{name}")
        };
        let kind = entry.file_type().expect("file_type");
        let node = if kind.is_dir() {
            read_files(&entry.path(), &path, files);
            Node::Dir
        } else if kind.is_symlink() {
            let target = fs::read_link(entry.path()).expect("read_link");
            Node::Link(target.to_string_lossy().into_owned())
        } else {
            Node::File(fs::read(entry.path()).expect("read"))
        };
        files.insert(path, node);
    }
}

#[track_caller]
fn assert_files(told: &str, dir: &Path, expected: &Files) {
    let mut found = Files::new();
    read_files(dir, "", &mut found);
    let brief = |files: &Files| -> Vec<String> {
        let node = |node: &Node| match node {
            Node::File(bytes) => format!("{} bytes, {:?}", bytes.len(), bytes.first()),
            other => format!("{other:?}"),
        };
        files
            .iter()
            .map(|(path, one)| format!("{path}: {}", node(one)))
            .collect()
    };
    assert!(
        found == *expected,
        "{told}\nfound {:#?}\nexpected {:#?}",
        brief(&found),
        brief(expected)
    );
}

/// Makes the first operations of a trace, and returns the processes that run then.
fn replay(
    trace: &Trace,
    count: usize,
    (mount, dir): (&FirnMount<'_>, &Path),
    model: &mut Model,
) -> BTreeMap<u32, Replayer> {
    let mut processes: BTreeMap<u32, Replayer> = BTreeMap::new();
    for (step, text) in trace.steps[..count].iter().zip(&trace.lines) {
        let process = processes
            .entry(step.process)
            .or_insert_with(|| Replayer::start(dir));
        process.make(step.line, text);
        model.play(step);
        if let Step::Exit(_) = step.step {
            processes.remove(&step.process).expect("it runs").wait();
            // What an exit makes complete is committed after it.
            wait_until_settled(mount, model);
        }
    }
    processes
}

/// Points of a trace at which something is killed.
fn points(trace: &Trace, rounds: u64, random: &mut StdRng) -> Vec<usize> {
    let end = trace.steps.len();
    if rounds > end as u64 {
        return (0..=end).collect();
    }
    let mut points = vec![end];
    points.extend((1..rounds).map(|_| random.random_range(0..end)));
    let mut seen = BTreeSet::new();
    points.retain(|point| seen.insert(*point));
    points
}

fn options(trace: &Trace) -> String {
    format!("arena-size=64M,chunk-size=1M,rules={}", trace.rules)
}

fn wait_until_settled(mount: &FirnMount<'_>, model: &Model) {
    let open = model.player.states().len();
    wait_until("what was not complete is dropped", SETTLE_LIMIT, || {
        mount.status().transactions.len() == open
    });
}

/// Proves S-rule-1, S-rule-2, S-rule-3, S-rule-4 and S-rule-5.
#[test]
fn writers_that_are_killed_leave_each_checkpoint_whole_or_as_it_was() {
    let seed = seed("writers_that_are_killed");
    let mut random = generator(seed);
    let sandbox = Sandbox::new("rules-writers");
    for trace in traces() {
        let mount = FirnMount::new(&sandbox, &options(&trace));
        for count in points(&trace, env_count("FIRN_CRASH_ROUNDS", 3), &mut random) {
            let told = format!("{} after {count} operations, seed {seed}", trace.name);
            let case = format!("case-{count}");
            // One point may come twice.
            let _ = fs::create_dir(mount.join(&case));
            if fs::read_dir(mount.join(&case))
                .expect("read_dir")
                .next()
                .is_some()
            {
                continue;
            }
            let mut model = Model::new(&trace.rules);
            let processes = replay(&trace, count, (&mount, &mount.join(&case)), &mut model);
            assert_files(&format!("{told}: seen"), &mount.join(&case), &model.view);
            let ended: Vec<u32> = processes.keys().copied().collect();
            drop(processes);
            for process in ended {
                let step = Step::Kill;
                model.play(&TraceLine {
                    line: count + 1,
                    process,
                    step,
                });
            }
            wait_until_settled(&mount, &model);
            assert!(
                model.commits == 0 || !model.backing.is_empty(),
                "{told}: none is left"
            );
            assert_files(
                &format!("{told}: seen after the kill"),
                &mount.join(&case),
                &model.view,
            );
            assert_files(&told, &mount.backing().join(&case), &model.backing);
        }
        mount.umount();
    }
}

/// Proves S-rule-3.
#[test]
fn a_firnd_that_is_killed_leaves_each_checkpoint_whole_or_as_it_was() {
    let seed = seed("a_firnd_that_is_killed");
    let mut random = generator(seed);
    let sandbox = Sandbox::new("rules-firnd");
    for trace in traces() {
        for count in points(&trace, env_count("FIRN_CRASH_ROUNDS", 2), &mut random)
            .into_iter()
            .skip(1)
        {
            let told = format!("{} after {count} operations, seed {seed}", trace.name);
            let backing = sandbox.mkdir(&format!("{}-{count}", trace.name));
            let mount = FirnMount::over(&sandbox, &backing, &options(&trace));
            let mut model = Model::new(&trace.rules);
            let processes = replay(&trace, count, (&mount, mount.path()), &mut model);
            mount.kill();
            drop(processes);
            FirnMount::over(&sandbox, &backing, &options(&trace)).umount();
            let mut found = Files::new();
            read_files(&backing, "", &mut found);
            assert!(
                model.commits == 0 || !model.backing.is_empty(),
                "{told}: none is left"
            );
            let firn = backing.join(".firn");
            if firn.exists() {
                fs::remove_dir_all(firn).expect("remove");
            }
            assert_files(&told, &backing, &model.backing);
        }
    }
}

#[test]
fn the_status_says_what_a_checkpoint_waits_for_and_an_unmount_drops_it() {
    let sandbox = Sandbox::new("rules-status");
    let mount = FirnMount::new(&sandbox, "arena-size=64M,chunk-size=1M,rules=hf:torch");
    fs::create_dir(mount.join("checkpoint-1")).expect("mkdir");
    fs::write(mount.join("checkpoint-1/model.bin"), [1; 5000]).expect("write");
    let open = &mount.status().transactions[0];
    assert_eq!(open.rule.as_deref(), Some("hf"));
    assert_eq!(
        open.waits_for.as_deref(),
        Some("`close:trainer_state.json`")
    );
    let explained = sandbox.run([
        "rules".as_ref(),
        "explain".as_ref(),
        mount.join("checkpoint-1/x").as_os_str(),
    ]);
    assert!(
        explained
            .stdout
            .contains("waits for `close:trainer_state.json`"),
        "{}",
        explained.stdout
    );
    fs::write(mount.join("a.pt"), [2; 5000]).expect("write");
    assert_eq!(mount.status().rule_commits.get("torch"), Some(&1));
    let backing = mount.umount();
    assert!(backing.join("a.pt").exists() && !backing.join("checkpoint-1").exists());
}
