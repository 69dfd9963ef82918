//! Commit rules on a mount: the operations of each known writer, cut off after any of them.
//!
//! Whatever is killed, the backing has what a model says: each checkpoint as it was when it was committed last, and all else as it is.
//!
//! `FIRN_CRASH_ROUNDS` sets how many points of each trace are tried, `FIRN_SEED` the seed, `FIRN_TRACE` the only trace.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use firn_rules::trace::{TraceLine, TraceStep};
use firn_tests::command::{run, wait_until};
use firn_tests::fsops::read;
use firn_tests::mount::SMALL;
use firn_tests::random::{env_count, generator};
use firn_tests::replay::{Replayer, Trace, traces};
use firn_tests::rule_model::{Files, Model, assert_files, read_files};
use firn_tests::sandbox::kill;
use firn_tests::{FirnMount, Sandbox, seed};
use rand::RngExt;
use rand::rngs::StdRng;

/// An exit is known within a second of it, on a machine that is not loaded.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);

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
        if let TraceStep::Exit(_) = step.step {
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
                let step = TraceStep::Kill;
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

/// Proves S-rule-3.
#[test]
fn the_commands_of_a_script_write_one_checkpoint_which_goes_with_the_script() {
    let sandbox = Sandbox::new("rules-script");
    let mount = FirnMount::new(&sandbox, "arena-size=64M,chunk-size=1M,rules=hf");
    let save = "set -e; mkdir checkpoint-1; head -c 9999 /dev/zero > checkpoint-1/model; cd checkpoint-1
        cp model optimizer; mv optimizer optimizer.pt; cp model rng_state.pth; [ ! -d ../../backing/checkpoint-1 ]; date > trainer_state.json
        [ -f ../../backing/checkpoint-1/optimizer.pt ]";
    // In the background, its own parent being gone: so it is a job of its own.
    let in_background = |script: &str| {
        let script = format!("( {{ {script}; }} & ) </dev/null");
        let mut shell = Command::new("bash");
        run(shell.args(["-c", &script]).current_dir(mount.path()))
    };
    run(Command::new("bash")
        .args(["-c", save])
        .current_dir(mount.path()))
    .ok();
    let cut = "mkdir checkpoint-2; date > checkpoint-2/model; ls checkpoint-2 > ../seen; read -r _ < ../go";
    let go = sandbox.join("go");
    run(Command::new("mkfifo").arg(&go)).ok();
    in_background(cut).ok();
    // The script waits for the pipe: until then its checkpoint is there.
    let end = File::options().write(true).open(&go).expect("open");
    assert_eq!(read(&sandbox.join("seen")), b"model\n");
    assert!(mount.join("checkpoint-2/model").exists());
    drop(end);
    wait_until("what was not complete is dropped", SETTLE_LIMIT, || {
        !mount.join("checkpoint-2").exists()
    });
    assert!(!mount.umount().join("checkpoint-2").exists());
}

/// Proves S-rule-1.
/// A process may take long to give back its memory and its files; meanwhile its parent does not hear of its end.
#[test]
fn regression_a_writer_that_is_still_exiting_has_failed() {
    const CUT_RANK: &str = r"
import os, sys
held = open(sys.argv[1])
with open('checkpoint-1/rng_state_1.pth', 'wb') as file:
    file.write(b'r' * 1000)
print('written', flush=True)
sys.stdin.readline()
os.truncate('checkpoint-1/rng_state_1.pth', 500)
os._exit(137)
";
    let sandbox = Sandbox::new("rules-exiting");
    let other_sandbox = Sandbox::new("rules-stopped");
    let other = FirnMount::new(&other_sandbox, SMALL);
    fs::write(other.join("held"), "held").expect("write");
    let mount = FirnMount::new(&sandbox, "arena-size=64M,chunk-size=1M,rules=hf");
    let dir = mount.join("checkpoint-1");
    fs::create_dir(&dir).expect("mkdir");
    fs::write(dir.join("model.safetensors"), [b'm'; 5000]).expect("write");
    fs::write(dir.join("rng_state_0.pth"), "random").expect("write");
    let mut rank = Command::new("/usr/bin/python3");
    rank.args(["-c", CUT_RANK]).arg(other.join("held"));
    rank.current_dir(mount.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut rank = rank.spawn().expect("start a rank");
    let mut said = [0; 8];
    rank.stdout
        .take()
        .expect("piped")
        .read_exact(&mut said)
        .expect("read");
    // The exit of the rank waits for this firnd, which answers nothing.
    kill(other.pid(), libc::SIGSTOP);
    rank.stdin
        .take()
        .expect("piped")
        .write_all(b"\n")
        .expect("write");
    wait_until("the rank exits", SETTLE_LIMIT, || is_exiting(rank.id()));
    let event = fs::write(dir.join("trainer_state.json"), "{}");
    let commits = mount.status().rule_commits;
    kill(other.pid(), libc::SIGCONT);
    rank.wait().expect("wait");
    event.expect("write");
    assert_eq!(commits.get("hf"), None);
    mount.umount();
    assert!(!sandbox.join("backing/checkpoint-1").exists());
    other.umount();
}

/// Whether a process has begun to exit: its flags are the seventh field after its name.
fn is_exiting(process: u32) -> bool {
    const EXITING: u64 = 4;
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).expect("its state");
    let (_, fields) = stat.rsplit_once(')').expect("a name");
    let flags = fields.split_ascii_whitespace().nth(6).expect("flags");
    flags.parse::<u64>().expect("a number") & EXITING != 0
}

#[test]
fn a_file_is_not_the_checkpoint_of_a_rule_for_directories() {
    let sandbox = Sandbox::new("rules-kinds");
    let rules = "arena-size=64M,chunk-size=1M,rules=lightning-fsdp:torch";
    let mount = FirnMount::new(&sandbox, rules);
    fs::write(mount.join("a.ckpt"), [1; 5000]).expect("write");
    fs::write(mount.join("b.tmp"), [2; 5000]).expect("write");
    fs::rename(mount.join("b.tmp"), mount.join("b.ckpt")).expect("rename");
    fs::create_dir(mount.join("c.ckpt")).expect("mkdir");
    fs::write(mount.join("c.ckpt/part"), [3; 5000]).expect("write");
    let commits = mount.status().rule_commits;
    assert!(
        commits.get("torch").is_some_and(|count| *count >= 1),
        "{commits:?}"
    );
    let backing = mount.umount();
    let there = ["a.ckpt", "b.ckpt", "c.ckpt"].map(|name| backing.join(name).exists());
    assert_eq!(there, [true, true, false]);
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
