//! Tests of the language, and of what the rules do with the recorded writers in `traces/`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use crate::trace::{TraceLine, TracePlayer, TraceStep, parse_trace};
use crate::{
    Action, BUILT_IN, Ending, Machine, Operation, Refusal, RuleSet, load_rules, parse_rules,
};

struct Trace {
    name: String,
    rules: Arc<RuleSet>,
    commits: Vec<String>,
    lines: Vec<TraceLine>,
}

fn traces() -> Vec<Trace> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces");
    let mut traces = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let header = |key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key));
            line.unwrap_or_else(|| panic!("{key} in {}", path.display()))
                .trim()
                .to_owned()
        };
        let rules = load_rules(&header("# rules:"), |_| unreachable!()).unwrap();
        let commits = header("# commits:");
        traces.push(Trace {
            name: path.file_stem().unwrap().to_string_lossy().into_owned(),
            rules: Arc::new(rules),
            commits: commits
                .split_ascii_whitespace()
                .map(str::to_owned)
                .collect(),
            lines: parse_trace(&text, "/").unwrap(),
        });
    }
    traces.sort_by(|a, b| a.name.cmp(&b.name));
    traces
}

fn commits(player: &TracePlayer) -> Vec<String> {
    let reactions = player.reactions().iter();
    let commits = reactions.filter(|outcome| outcome.what == "commit");
    commits.map(|outcome| outcome.paths[0].clone()).collect()
}

#[test]
fn each_writer_has_its_checkpoints_committed_and_nothing_is_left() {
    let mut used = BTreeSet::new();
    for trace in traces() {
        let mut player = TracePlayer::new(Arc::clone(&trace.rules));
        trace.lines.iter().for_each(|line| player.play(line));
        let reactions = player.reactions();
        assert_eq!(
            commits(&player),
            trace.commits,
            "{}: {reactions:#?}",
            trace.name
        );
        assert_eq!(player.states(), [], "{}", trace.name);
        assert!(
            reactions
                .iter()
                .all(|one| one.what != "abort" && one.what != "refuse"),
            "{}: {reactions:#?}",
            trace.name
        );
        used.extend(trace.rules.rules().iter().map(|rule| rule.name.clone()));
    }
    let all = parse_rules(BUILT_IN, "built-in").unwrap();
    for rule in all {
        assert!(used.contains(&rule.name), "no trace of {}", rule.name);
    }
}

#[test]
fn writers_that_are_killed_after_any_operation_leave_nothing_open() {
    for trace in traces() {
        for count in 0..=trace.lines.len() {
            let mut player = TracePlayer::new(Arc::clone(&trace.rules));
            trace.lines[..count]
                .iter()
                .for_each(|line| player.play(line));
            let before = commits(&player);
            let processes: BTreeSet<u32> = trace.lines[..count]
                .iter()
                .map(|line| line.process)
                .collect();
            for process in processes {
                player.play(&TraceLine {
                    line: count,
                    process,
                    step: TraceStep::Kill,
                });
            }
            player.end_job(count);
            assert_eq!(player.states(), [], "{} after {count}", trace.name);
            assert_eq!(
                commits(&player),
                before,
                "{} after {count}: a kill commits nothing",
                trace.name
            );
        }
    }
}

fn mistake(text: &str) -> String {
    parse_rules(text, "site.rules").unwrap_err().to_string()
}

#[test]
fn a_mistake_is_told_with_its_place_and_the_nearest_word() {
    assert_eq!(
        mistake("# mine\nhf checkpoint-*/ clsoe:x"),
        "site.rules:2:18: expected `close`, `rename` or `unlink`, found `clsoe`; did you mean `close`?"
    );
    assert_eq!(
        mistake("a *.pt idel"),
        "site.rules:1:8: expected `close:FILE`, `rename:FILE`, `unlink:FILE`, `next` or `idle`, found `idel`; did you mean `idle`?"
    );
    assert_eq!(
        mistake("a x.{T} next T=nubmer"),
        "site.rules:1:16: expected `integer`, `number` or `text`, found `nubmer`; did you mean `number`?"
    );
    assert_eq!(
        mistake("a x/|y idle"),
        "site.rules:1:6: expected only directories (`name/`) or only files in one scope"
    );
    assert_eq!(
        mistake("a x/ close:../../y"),
        "site.rules:1:15: expected a path in the scope, or `../NAME` beside it"
    );
    assert_eq!(
        mistake("a x[ idle"),
        "site.rules:1:4: expected `]` after `[`"
    );
    assert_eq!(
        mistake("a x/ close:../{s}"),
        "site.rules:1:12: expected a capture of the scope, found `{s}`"
    );
    assert_eq!(
        mistake("a x idle\na y idle"),
        "site.rules:2:1: expected another name: there is a rule `a` above"
    );
    assert_eq!(
        mistake("a x idle *=sane"),
        "site.rules:1:12: expected `writers`, `same`, `renewed` or a number, found `sane`; did you mean `same`?"
    );
    let unknown = load_rules("hf,lamps", |_| unreachable!())
        .unwrap_err()
        .to_string();
    assert!(unknown.contains("did you mean `lammps`?"), "{unknown}");
}

#[test]
fn strace_is_read_as_the_own_form_is() {
    let own = "7 mkdir checkpoint-5\n7 open checkpoint-5/trainer_state.json\n7 write checkpoint-5/trainer_state.json 4\n\
               7 close checkpoint-5/trainer_state.json\n7 rename checkpoint-5 x\n7 exit 0";
    let strace = r#"7 execve("/usr/bin/python3", ["python3"], 0x7ffd /* 20 vars */) = 0
[pid     7] mkdirat(AT_FDCWD, "/m/checkpoint-5", 0777) = 0
7 openat(AT_FDCWD, "/etc/passwd", O_RDONLY|O_CLOEXEC) = 3
7 close(3) = 0
7 openat(AT_FDCWD, "/m/checkpoint-5/trainer_state.json", O_WRONLY|O_CREAT|O_TRUNC|O_CLOEXEC, 0666) = 3
7 write(3, "abcd", 4) = 4
7 openat(AT_FDCWD, "/m/none", O_WRONLY) = -1 ENOENT (No such file or directory)
7 close(3) = 0
7 rename("/m/checkpoint-5", "/m/x") = 0
7 +++ exited with 0 +++"#;
    let steps = |text: &str| -> Vec<(u32, TraceStep)> {
        let lines = parse_trace(text, "/m").unwrap();
        lines
            .into_iter()
            .map(|line| (line.process, line.step))
            .collect()
    };
    assert_eq!(steps(strace), steps(own));
}

/// Proves that a scope commits only while none of its files is open for writing, whatever programs do.
#[test]
fn random_operations_keep_the_invariants() {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let rules = load_rules(
        "hf,torch,lammps,orbax,megatron,nemo,gromacs",
        |_| unreachable!(),
    )
    .unwrap();
    let rules = Arc::new(rules);
    let paths = [
        "checkpoint-1",
        "checkpoint-1/a",
        "checkpoint-1/trainer_state.json",
        "checkpoint-2/trainer_state.json",
        "a.pt",
        "b.pt",
        "restart.1.0",
        "restart.2.0",
        "1.orbax-checkpoint-tmp",
        "1.orbax-checkpoint-tmp/x",
        "1",
        "iter_1/x",
        "iter_1/metadata.json",
        "latest_checkpointed_iteration.txt",
        "s-unfinished",
        "s.ckpt/x",
        "x.cpt",
        "x_prev.cpt",
        "x_step1.cpt",
        "other",
    ];
    for _ in 0..300 {
        let mut player = TracePlayer::new(Arc::clone(&rules));
        let mut open: BTreeSet<(u32, String)> = BTreeSet::new();
        for line in 0..60 {
            let process = random.random_range(1..4);
            let path = paths[random.random_range(0..paths.len())].to_owned();
            let step = match random.random_range(0..8) {
                0 | 1 => TraceStep::Open(path.clone()),
                2..=4 => TraceStep::Close(path.clone()),
                5 => TraceStep::Rename(
                    path.clone(),
                    paths[random.random_range(0..paths.len())].to_owned(),
                ),
                6 => TraceStep::Unlink(path.clone()),
                _ => [
                    TraceStep::Exit(0),
                    TraceStep::Kill,
                    TraceStep::Mkdir(path.clone()),
                ][random.random_range(0..3)]
                .clone(),
            };
            match &step {
                TraceStep::Open(path) => drop(open.insert((process, path.clone()))),
                TraceStep::Exit(_) | TraceStep::Kill => open.retain(|(of, _)| *of != process),
                _ => {}
            }
            let seen = player.reactions().len();
            player.play(&TraceLine {
                line,
                process,
                step,
            });
            for state in player.states() {
                assert!(!state.waits_for.is_empty());
            }
            for outcome in &player.reactions()[seen..] {
                assert!(outcome.what != "commit" || !outcome.paths.is_empty());
            }
        }
        for process in 1..4 {
            player.play(&TraceLine {
                line: 99,
                process,
                step: TraceStep::Kill,
            });
        }
        player.end_job(99);
        // Only scopes that were removed whole are left: each waits for a newer complete checkpoint.
        for state in player.states() {
            assert!(state.waits_for.contains("last complete"), "{state:?}");
        }
    }
}

fn machine(rules: &str) -> Machine {
    Machine::new(Arc::new(load_rules(rules, |_| unreachable!()).unwrap()))
}

/// Makes an operation. First begins or joins the scope that it needs.
fn make(machine: &mut Machine, process: u32, operation: &Operation<'_>) -> Vec<Action> {
    let entered = machine.enter_operation(process, operation).unwrap();
    for action in &entered.actions {
        if let Action::Begin { scope, .. } | Action::Join { scope, .. } = action {
            machine.record_begun(*scope, false);
        }
    }
    machine.finish_operation(process, operation, entered.scope, true)
}

#[test]
fn a_file_of_one_job_is_not_changed_by_another_while_the_first_lives() {
    let mut machine = machine("hf");
    [(1, 10), (2, 10), (3, 30)]
        .into_iter()
        .for_each(|(process, job)| machine.record_job(process, job));
    let rules = Arc::clone(machine.rules());
    let [x, y, old, new] = [
        "checkpoint-1/x",
        "checkpoint-1/y",
        "checkpoint-1",
        "checkpoint-2",
    ]
    .map(|path| rules.locate(path.as_bytes()));
    let open = |path, handle| Operation::Open { path, handle };
    make(&mut machine, 1, &open(&x, 1));
    make(&mut machine, 2, &open(&x, 2));
    let refused = machine.enter_operation(3, &open(&x, 3));
    assert!(matches!(refused, Err(Refusal::OtherJob { .. })));
    let rename = Operation::Rename {
        from: &old,
        to: &new,
    };
    assert!(matches!(
        machine.enter_operation(3, &rename),
        Err(Refusal::OtherJob { .. })
    ));
    make(&mut machine, 3, &open(&y, 4));
    assert!(
        machine.states()[0]
            .waits_for
            .contains("refused checkpoint-1/x")
    );
    // Both processes of the first job have ended, but the job itself still lives.
    machine.record_exit(1, Ending::Success);
    machine.record_exit(2, Ending::Success);
    let refused = machine.enter_operation(3, &open(&x, 5));
    assert!(
        matches!(refused, Err(Refusal::OtherJob { .. })),
        "the job goes on"
    );
    machine.record_exit(10, Ending::Success);
    make(&mut machine, 3, &open(&x, 5));
}

#[test]
fn with_several_hosts_the_machine_proposes_and_counts_the_needs_of_all() {
    let mut machine = machine("hf");
    machine.set_hosts(2);
    let path = &machine.rules().locate(b"checkpoint-1/trainer_state.json");
    let open = Operation::Open { path, handle: 1 };
    make(&mut machine, 1, &open);
    let close = Operation::Close {
        handle: 1,
        ending: Ending::Success,
    };
    let actions = machine.finish_operation(1, &close, None, true);
    assert!(
        matches!(actions[..], [Action::Propose { scope: 1 }]),
        "{actions:?}"
    );
    let own = machine.own_part(1).unwrap();
    assert!(own.has_event && own.state.open == 0 && own.state.living == 1);
    let mut rank = own.state.clone();
    rank.needs[0].found = 1;
    let mut states = BTreeMap::from([
        ("a".to_owned(), own.state.clone()),
        ("b".to_owned(), rank.clone()),
    ]);
    let obstacle = machine.obstacle_among_hosts(1, &states);
    assert_eq!(
        obstacle.as_deref(),
        Some("1 files of 2 for `rng_state*.pth=writers`")
    );
    states.insert("a".to_owned(), rank);
    assert_eq!(machine.obstacle_among_hosts(1, &states), None);
    // An attempt begins only if the change count is the one that was published.
    assert!(!machine.begin_attempt(1, own.state.changes + 1));
    assert!(machine.begin_attempt(1, own.state.changes));
    assert!(machine.is_busy(&open));
    machine.record_commit_failed(1);
    assert!(!machine.is_busy(&open));
}

/// Returns the paths that `keep` removed, in order, after operations of one process.
fn removals(rule: &str, operations: &str) -> Vec<String> {
    let rules = RuleSet::new(parse_rules(rule, "test").unwrap()).unwrap();
    let mut player = TracePlayer::new(Arc::new(rules));
    for line in parse_trace(operations, "/").unwrap() {
        player.play(&line);
    }
    let removals = player.reactions().iter().filter(|one| one.what == "remove");
    removals.map(|one| one.paths.join(" ")).collect()
}

#[test]
fn keep_removes_the_oldest_once_a_newer_one_is_complete() {
    let rule = "a step-*/ close:done keep=2";
    let mut operations = String::new();
    for step in [9, 10, 3, 11] {
        operations +=
            &format!("1 mkdir step-{step}\n1 open step-{step}/done\n1 close step-{step}/done\n");
    }
    // `keep` removes in the order of the commits, not of the steps.
    assert_eq!(removals(rule, &operations), ["step-9", "step-10"]);
    assert_eq!(removals("a step-*/ close:done", &operations), [""; 0]);
    let open = operations
        + "1 mkdir step-12\n1 open step-12/x\n1 mkdir step-13\n1 open step-13/done\n1 close step-13/done\n";
    assert_eq!(removals(rule, &open), ["step-9", "step-10", "step-3"]);
}

#[test]
fn keep_removes_a_group_with_all_its_files() {
    let mut operations = String::new();
    for step in 1..4 {
        operations += &format!(
            "1 open f.{step}.a\n1 close f.{step}.a\n1 open f.{step}.b\n1 close f.{step}.b\n"
        );
    }
    operations += "1 exit 0";
    assert_eq!(
        removals("a f.{T}.* next T=integer keep=1", &operations),
        ["f.1.a f.1.b", "f.2.a f.2.b"]
    );
    assert_eq!(
        mistake("a x idle keep=0"),
        "site.rules:1:15: expected the number of checkpoints to keep, 1 or more, found `0`"
    );
}

#[test]
fn regression_a_writer_killed_in_the_call_that_begins_a_scope_leaves_none_open() {
    let rules = Arc::new(load_rules("lammps", |_| unreachable!()).unwrap());
    let mut machine = Machine::new(Arc::clone(&rules));
    let path = &rules.locate(b"restart.50.base");
    let open = Operation::Open { path, handle: 1 };
    let entered = machine.enter_operation(7, &open).unwrap();
    assert!(matches!(entered.actions[..], [Action::Begin { .. }]));
    // The process ends while the caller still begins the scope.
    assert_eq!(machine.record_exit(7, Ending::Failure), []);
    machine.record_begun(entered.scope.unwrap(), false);
    let actions = machine.finish_operation(7, &open, entered.scope, true);
    assert!(matches!(actions[..], [Action::Abort { .. }]), "{actions:?}");
}

#[test]
fn a_checkpoint_waits_until_the_pointer_that_was_there_is_written_again() {
    let rules = Arc::new(load_rules("lightning", |_| unreachable!()).unwrap());
    let mut player = TracePlayer::new(rules);
    let mut play = |operations: &str| {
        for line in parse_trace(operations, "/").unwrap() {
            player.play(&line);
        }
        commits(&player).len()
    };
    let save = |name: &str| format!("1 open checkpoints/{name}\n1 close checkpoints/{name}\n");
    assert_eq!(play(&(save("a-1.ckpt") + &save("last.ckpt"))), 2);
    assert_eq!(play(&save("a-2.ckpt")), 2, "last.ckpt leads to a-1");
    assert_eq!(play(&save("last.ckpt")), 3);
    assert_eq!(play(&save("final.ckpt")), 3);
    assert_eq!(
        play("1 exit 0"),
        4,
        "a program that ends well has saved what it meant to"
    );
}

/// Returns the machine of one of two hosts. It has an open scope of several directories, step 1, whose only file is
/// closed.
fn wide_machine() -> Machine {
    let mut machine = machine("openfoam");
    machine.set_hosts(2);
    let path = &machine.rules().locate(b"processor0/1/U");
    make(&mut machine, 1, &Operation::Open { path, handle: 1 });
    let close = Operation::Close {
        handle: 1,
        ending: Ending::Success,
    };
    assert_eq!(machine.finish_operation(1, &close, None, true), []);
    machine
}

#[test]
fn with_several_hosts_the_next_step_of_a_wide_scope_waits_for_their_commit() {
    let mut machine = wide_machine();
    let next = &machine.rules().locate(b"processor0/2/U");
    let open = Operation::Open {
        path: next,
        handle: 2,
    };
    let actions = machine.end_wide_scope(&open);
    assert_eq!(actions, [Action::Propose { scope: 1 }]);
    assert!(machine.own_part(1).unwrap().has_event);
    // The hosts commit the scope.
    machine.record_committed(1);
    assert_eq!(machine.end_wide_scope(&open), []);
    let entered = machine.enter_operation(1, &open).unwrap();
    assert!(matches!(
        entered.actions[..],
        [Action::Begin { scope: 2, .. }]
    ));
}

#[test]
fn a_step_that_joins_the_one_before_is_open_for_other_hosts_until_its_own_event() {
    let mut machine = wide_machine();
    let rules = Arc::clone(machine.rules());
    let [two, three] =
        ["processor0/2/U", "processor0/3/U"].map(|path| rules.locate(path.as_bytes()));
    let open = |path, handle| Operation::Open { path, handle };
    let close = |handle| Operation::Close {
        handle,
        ending: Ending::Success,
    };
    machine.end_wide_scope(&open(&two, 2));
    // The hosts have not committed the scope in time, so step 2 joins it.
    make(&mut machine, 1, &open(&two, 2));
    machine.finish_operation(1, &close(2), None, true);
    let part = machine.own_part(1).unwrap();
    assert!(!part.has_event && part.state.open == 1, "{part:?}");
    assert_eq!(
        machine.end_wide_scope(&open(&three, 3)),
        [Action::Propose { scope: 1 }]
    );
    let part = machine.own_part(1).unwrap();
    assert!(part.has_event && part.state.open == 0, "{part:?}");
}

#[test]
fn a_checkpoint_stays_open_between_two_commands_of_a_job() {
    const STARTING_PROCESS: u32 = 100;
    let mut machine = machine("hf");
    let exits = |machine: &mut Machine, process| machine.record_exit(process, Ending::Success);
    let path = &machine.rules().locate(b"checkpoint-5/a");
    for process in [1, 2] {
        machine.record_job(process, STARTING_PROCESS);
        make(&mut machine, process, &Operation::Change { path });
        assert_eq!(exits(&mut machine, process), []);
    }
    let actions = exits(&mut machine, STARTING_PROCESS);
    assert!(matches!(actions[..], [Action::Abort { .. }]), "{actions:?}");

    // The job ends first, or a writer fails.
    machine.record_aborted(1);
    for (ending, ends_first) in [(Ending::Success, true), (Ending::Failure, false)] {
        machine.record_job(4, STARTING_PROCESS);
        make(&mut machine, 4, &Operation::Change { path });
        if ends_first {
            assert_eq!(machine.record_exit(STARTING_PROCESS, Ending::Success), []);
        }
        let actions = machine.record_exit(4, ending);
        let [Action::Abort { scope, .. }] = actions[..] else {
            panic!("{actions:?}");
        };
        machine.record_aborted(scope);
    }
}

#[test]
fn a_closed_file_that_is_renamed_to_its_name_is_complete() {
    let rules = Arc::new(load_rules("torch", |_| unreachable!()).unwrap());
    let mut player = TracePlayer::new(rules);
    let save = "1 open a.tmp\n1 close a.tmp\n1 rename a.tmp a.ckpt\n";
    // The complete file is renamed away. The rename is undone, because no new file follows.
    let cut = "1 rename a.ckpt a.old\n1 kill\n";
    for line in parse_trace(&[save, cut].concat(), "/").unwrap() {
        player.play(&line);
    }
    let what: Vec<&str> = player
        .reactions()
        .iter()
        .map(|outcome| outcome.what)
        .collect();
    assert_eq!(what, ["begin", "join", "commit", "begin", "join", "abort"]);
}

#[test]
fn a_failure_that_is_noted_before_a_commit_drops_a_scope_whose_writers_are_gone() {
    let mut machine = machine("hf");
    let rules = Arc::clone(machine.rules());
    let [state, event] = ["rng_state_0.pth", "trainer_state.json"]
        .map(|name| rules.locate(format!("checkpoint-1/{name}").as_bytes()));
    let mut actions = Vec::new();
    for (handle, path) in [(1, &state), (2, &event)] {
        make(&mut machine, 7, &Operation::Open { path, handle });
        let ending = Ending::Success;
        actions = make(&mut machine, 7, &Operation::Close { handle, ending });
    }
    let [Action::Commit { scope }] = actions[..] else {
        panic!("{actions:?}");
    };
    // The end of the process is reported while the caller commits the scope.
    assert_eq!(machine.record_exit(7, Ending::Failure), []);
    let actions = machine.record_writer_failure(scope);
    assert!(matches!(actions[..], [Action::Abort { .. }]), "{actions:?}");
}
