//! Unmodified programs on a mount with commit rules, killed and resumed: `ckpt-chaos`, which kills a training at each
//! event of its files, beside the same on a plain directory; LAMMPS; and, where the campaign has installed them, GROMACS, OpenFOAM,
//! Quantum ESPRESSO, and the trainers of Hugging Face and Lightning.
//!
//! `FIRN_RULES_KILLS` sets how often a program is killed, `FIRN_RULES_PYTHON` names a Python with the trainers, `FIRN_SEED` the seed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use firn_tests::command::{run, run_within, wait_until};
use firn_tests::preloaded::source;
use firn_tests::random::{env_count, generator};
use firn_tests::suite::python_packages;
use firn_tests::watchdog::test_limit;
use firn_tests::{FirnMount, Sandbox, seed};
use rand::RngExt;
use rand::rngs::StdRng;

const LIMIT: Duration = Duration::from_secs(60);
/// What `ckpt-chaos` calls a resume that was right.
const PASS: &str = "PASS";

/// How many resumes ended how.
type Verdicts = BTreeMap<String, u64>;

/// Runs `ckpt-chaos`, and reads the counts in its last line.
fn run_chaos(command: &mut Command) -> Verdicts {
    command.env("OMP_NUM_THREADS", "1");
    let outcome = run_within(command, test_limit());
    println!("{}", outcome.stdout);
    let last = outcome.stdout.lines().rev().find(|line| !line.is_empty());
    let words: Vec<&str> = last.unwrap_or_default().split_whitespace().collect();
    let verdicts: Verdicts = words
        .chunks(2)
        .filter_map(|pair| {
            Some((
                pair[0].strip_suffix(':')?.to_owned(),
                pair.get(1)?.parse().ok()?,
            ))
        })
        .collect();
    assert!(!verdicts.is_empty(), "no verdict: {outcome}");
    verdicts
}

fn failures(verdicts: &Verdicts) -> u64 {
    let wrong = verdicts.iter().filter(|(verdict, _)| *verdict != PASS);
    wrong.map(|(_, count)| count).sum()
}

/// The same kills on a plain directory, where some resumes must fail or the scenario shows nothing, and on a mount with rules.
fn compare_with_plain((sandbox, rules): (&Sandbox, &str), run_in: impl Fn(&Path) -> Verdicts) {
    let plain = run_in(&sandbox.mkdir("plain"));
    let mount = FirnMount::new(sandbox, &format!("arena-size=256M,rules={rules}"));
    let ours = run_in(mount.path());
    println!("{rules}: plain {plain:?}, with rules {ours:?}");
    assert!(
        failures(&plain) > 0,
        "the scenario finds nothing: {plain:?}"
    );
    assert_eq!(failures(&ours), 0, "{ours:?}");
    wait_until("no checkpoint is left open", LIMIT, || {
        mount.status().transactions.is_empty()
    });
    mount.umount();
}

/// A value of the option `rules`, from names of rules or from a rule of a site.
fn rules_option(sandbox: &Sandbox, rules: &str) -> String {
    if !rules.contains(' ') {
        return rules.to_owned();
    }
    let path = sandbox.join("site.rules");
    fs::write(&path, rules).expect("write the rules");
    path.display().to_string()
}

fn small_scenario(name: &str, style: &str, rule: &str) {
    let sandbox = Sandbox::new(name);
    let rules = rules_option(&sandbox, rule);
    compare_with_plain((&sandbox, &rules), |dir| {
        let mut chaos = Command::new("/usr/bin/python3");
        chaos.env("PYTHONPATH", python_packages());
        chaos.args(["-m", "ckpt_chaos", "run", "--max-points", "60", "--work"]);
        chaos.arg(dir.join("work"));
        chaos.args(["--step-regex", r"resumed from step (\d+)"]);
        chaos.args(["--result-file", "{out}/final.json"]);
        if style == "dir" {
            chaos.args(["--checkpoint-glob", "{out}/ckpt-*"]);
        }
        chaos
            .args(["--", "/usr/bin/python3"])
            .arg(source("trainer.py"));
        chaos.args(["--style", style, "--out", "{out}"]);
        run_chaos(&mut chaos)
    });
}

/// Proves S-rule-1, S-rule-3, S-rule-7.
#[test]
fn a_training_that_is_killed_at_each_event_resumes_from_a_whole_directory() {
    small_scenario("chaos-dir", "dir", "trainer  ckpt-*/  close:done.json\n");
}

/// Proves S-rule-1, S-rule-3.
#[test]
fn a_training_that_writes_over_its_only_file_resumes_from_a_whole_one() {
    small_scenario("chaos-file", "file", "trainer  state.json  idle\n");
}

/// The Python that `cargo xtask campaign rules` has filled; says so where there is none.
fn trainers() -> Option<PathBuf> {
    let python = std::env::var_os("FIRN_RULES_PYTHON").map(PathBuf::from);
    if python.is_none() {
        println!("skipped: `cargo xtask campaign rules` installs the trainers");
    }
    python
}

fn bench_scenario(name: &str, (target, ranks): (&str, u32), rules: &str) {
    let Some(python) = trainers() else {
        return;
    };
    let sandbox = Sandbox::new(name);
    let rules = &rules_option(&sandbox, rules);
    compare_with_plain((&sandbox, rules), |dir| {
        let mut chaos = Command::new(&python);
        chaos.args(["-m", "ckpt_chaos", "bench", target, "--jobs", "2"]);
        chaos.args(["--ranks", &ranks.to_string(), "--work"]);
        run_chaos(chaos.arg(dir.join("work")))
    });
}

#[test]
fn chaos_of_the_trainer_of_hugging_face_with_one_rank() {
    bench_scenario("chaos-hf-1", ("hf_trainer", 1), "hf");
}

#[test]
fn chaos_of_the_trainer_of_hugging_face_with_two_ranks() {
    bench_scenario("chaos-hf-2", ("hf_trainer", 2), "hf");
}

#[test]
fn chaos_of_lightning_with_one_rank() {
    bench_scenario("chaos-pl-1", ("lightning_trainer", 1), "lightning");
}

#[test]
fn chaos_of_lightning_with_two_ranks() {
    bench_scenario("chaos-pl-2", ("lightning_trainer", 2), "lightning");
}

#[test]
fn chaos_of_a_loop_of_two_ranks_that_saves_in_place() {
    let rule = "loop  checkpoint-*/  close:state.json  rank_*.pt=2\n";
    bench_scenario("chaos-loop", ("loop_ddp", 2), rule);
}

/// A program that is started again and again, until it ends by itself.
struct Resumed<'a> {
    start: &'a dyn Fn() -> Command,
    /// How long one undisturbed run takes.
    whole: Duration,
}

impl Resumed<'_> {
    fn spawn(&self) -> Child {
        let mut command = (self.start)();
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().expect("start the program")
    }

    /// Kills it `kills` times at random moments, and then lets it end.
    fn kill_and_end(&self, kills: u64, random: &mut StdRng, after_kill: &dyn Fn()) {
        for _ in 0..kills {
            let mut job = self.spawn();
            let micros = self.whole.as_micros() as u64;
            let wait = Duration::from_micros(random.random_range(0..micros));
            let end = Instant::now() + wait;
            // It may be at its end before.
            while Instant::now() < end && job.try_wait().expect("wait").is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            job.kill().expect("kill");
            job.wait().expect("wait");
            after_kill();
        }
        run_within(&mut (self.start)(), test_limit()).ok();
    }
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Age {
    step: u64,
    modified: std::time::SystemTime,
}

/// A way of LAMMPS to write restart files.
struct RestartStyle {
    rules: &'static str,
    /// As the command `restart` has them, in a directory.
    names: &'static [&'static str],
}

const STYLES: [RestartStyle; 3] = [
    RestartStyle {
        rules: "lammps",
        names: &["restart.*"],
    },
    RestartStyle {
        rules: "lammps",
        names: &["restart.*.%"],
    },
    RestartStyle {
        rules: "two  two.a|two.b  idle\n",
        names: &["two.a", "two.b"],
    },
];

impl RestartStyle {
    /// What `read_restart` is given for the newest one.
    fn newest(&self, dir: &Path) -> Option<PathBuf> {
        // By step; of names without one, by time.
        let mut found: Vec<(Age, PathBuf)> = Vec::new();
        for entry in fs::read_dir(dir).expect("read_dir") {
            let entry = entry.expect("an entry");
            let name = entry.file_name().into_string().expect("text");
            let modified = entry.metadata().expect("metadata").modified();
            let modified = modified.expect("a time");
            if let Some(step) = name.strip_prefix("restart.") {
                let step = step.strip_suffix(".base").unwrap_or(step);
                let in_parts = self.names[0].ends_with('%');
                let path = format!("restart.{step}{}", if in_parts { ".%" } else { "" });
                let path = dir.join(path);
                found.extend(step.parse().ok().map(|step| (Age { step, modified }, path)));
            } else if self.names.contains(&name.as_str()) {
                found.push((Age { step: 0, modified }, dir.join(name)));
            }
        }
        found.into_iter().max().map(|(_, path)| path)
    }

    fn command(&self, out: &Path, dir: &Path) -> Command {
        let from = self.newest(dir);
        let names: Vec<String> = self
            .names
            .iter()
            .map(|name| dir.join(name).display().to_string())
            .collect();
        let mut command = Command::new("lmp");
        command.env("OMP_NUM_THREADS", "1");
        command.args(["-log", "none", "-screen", "none", "-in"]);
        command.arg(source("melt.in"));
        command.args(["-var", "ck", "unused", "-var", "restarts", &names.join(" ")]);
        command.arg("-var").arg("out").arg(out);
        let fresh = if from.is_none() { "1" } else { "0" };
        command.args(["-var", "fresh", fresh, "-var", "from"]);
        command.arg(from.unwrap_or_else(|| PathBuf::from("none")));
        command
    }
}

/// Proves S-rule-1, S-rule-3.
#[test]
fn lammps_killed_at_random_resumes_to_the_same_result() {
    let seed = seed("rules_lammps");
    let mut random = generator(seed);
    for (index, style) in STYLES.iter().enumerate() {
        let sandbox = Sandbox::new(&format!("rules-lammps-{index}"));
        let plain = sandbox.mkdir("plain");
        let begun = Instant::now();
        run(&mut style.command(&sandbox.join("undisturbed"), &plain)).ok();
        let whole = begun.elapsed();
        let rules = rules_option(&sandbox, style.rules);
        let mount = FirnMount::new(&sandbox, &format!("arena-size=64M,rules={rules}"));
        let out = sandbox.join("resumed");
        let program = Resumed {
            start: &|| style.command(&out, mount.path()),
            whole,
        };
        program.kill_and_end(env_count("FIRN_RULES_KILLS", 3), &mut random, &|| {
            wait_until("what was not complete is dropped", LIMIT, || {
                mount.status().transactions.is_empty()
            });
        });
        let told = format!("{:?}, seed {seed}", style.names);
        let read = |path: &Path| fs::read(path).expect("read");
        assert!(
            read(&out) == read(&sandbox.join("undisturbed")),
            "another result: {told}"
        );
        mount.umount();
    }
}

/// A simulation that the campaign installs.
struct Simulation<'a> {
    rules: &'a str,
    /// Makes its input in a directory.
    prepare: &'a dyn Fn(&Path),
    /// Starts it there, from the newest checkpoint.
    command: &'a dyn Fn(&Path) -> Command,
    /// What it came to.
    result: &'a dyn Fn(&Path) -> Vec<u8>,
}

fn kill_simulation(name: &str, simulation: &Simulation<'_>) {
    if trainers().is_none() {
        return;
    }
    let seed = seed(&format!("rules_{name}"));
    let mut random = generator(seed);
    let sandbox = Sandbox::new(&format!("rules-{name}"));
    let plain = sandbox.mkdir("plain");
    (simulation.prepare)(&plain);
    let begun = Instant::now();
    run_within(&mut (simulation.command)(&plain), test_limit()).ok();
    let whole = begun.elapsed();
    let options = format!("arena-size=256M,rules={}", simulation.rules);
    let mount = FirnMount::new(&sandbox, &options);
    (simulation.prepare)(mount.path());
    let program = Resumed {
        start: &|| (simulation.command)(mount.path()),
        whole,
    };
    program.kill_and_end(env_count("FIRN_RULES_KILLS", 3), &mut random, &|| {
        wait_until("what was not complete is dropped", LIMIT, || {
            mount.status().transactions.is_empty()
        });
    });
    assert!(
        (simulation.result)(mount.path()) == (simulation.result)(&plain),
        "another result, seed {seed}"
    );
    mount.umount();
}

/// A command in a directory, by one thread.
fn in_dir(dir: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).current_dir(dir);
    command.env("OMP_NUM_THREADS", "1");
    // Debian's OpenFOAM finds its settings there.
    command.env("WM_PROJECT_DIR", "/usr/share/openfoam");
    command
}

fn copy_into(dir: &Path, files: &[&str]) {
    for file in files {
        let mut copy = Command::new("cp");
        run(copy.arg("-r").arg(source(file)).arg(dir)).ok();
    }
}

/// Proves S-rule-1, S-rule-3.
#[test]
fn gromacs_killed_at_random_resumes_to_the_same_result() {
    let simulation = Simulation {
        rules: "gromacs",
        prepare: &|dir| {
            copy_into(dir, &["water.mdp", "water.top"]);
            let solvate =
                "gmx -quiet solvate -cs spc216.gro -box 1.9 1.9 1.9 -o box.gro -p water.top";
            let grompp =
                "gmx -quiet grompp -f water.mdp -c box.gro -p water.top -o water.tpr -maxwarn 5";
            for command in [solvate, grompp] {
                let words: Vec<&str> = command.split(' ').collect();
                run(&mut in_dir(dir, &words)).ok();
            }
        },
        command: &|dir| {
            let run = "gmx -quiet mdrun -s water.tpr -deffnm out -cpi out.cpt -cpt 0.002 -ntmpi 1 -ntomp 1 -reprod";
            in_dir(dir, &run.split(' ').collect::<Vec<&str>>())
        },
        result: &|dir| fs::read(dir.join("out.gro")).expect("read"),
    };
    kill_simulation("gromacs", &simulation);
}

/// Proves S-rule-1, S-rule-3.
#[test]
fn openfoam_killed_at_random_resumes_to_the_same_result() {
    let simulation = Simulation {
        rules: "openfoam",
        prepare: &|dir| {
            let parts = ["cavity/system", "cavity/constant", "cavity/initial"];
            copy_into(dir, &parts);
            run(&mut in_dir(dir, &["mv", "initial", "0"])).ok();
            run(&mut in_dir(dir, &["blockMesh"])).ok();
        },
        command: &|dir| in_dir(dir, &["icoFoam"]),
        result: &|dir| {
            ["5/U", "5/p"]
                .map(|file| fs::read(dir.join(file)).expect("read"))
                .concat()
        },
    };
    kill_simulation("openfoam", &simulation);
}

/// Its checkpoint is complete at the end of a run: one that is killed is begun anew. Proves S-rule-1, S-rule-3.
#[test]
fn quantum_espresso_killed_at_random_ends_with_the_same_result() {
    let simulation = Simulation {
        rules: "quantum-espresso",
        prepare: &|_| {},
        command: &|dir| {
            if dir.join("out/si.save/data-file-schema.xml").exists() {
                return in_dir(dir, &["true"]);
            }
            let input = source("silicon.in");
            in_dir(dir, &["pw.x", "-in", input.to_str().expect("utf-8")])
        },
        result: &|dir| {
            let told = fs::read_to_string(dir.join("out/si.xml")).expect("read");
            let is_time = |line: &str| {
                ["DATE=", "<cpu>", "<wall>"]
                    .iter()
                    .any(|mark| line.contains(mark))
            };
            told.lines()
                .filter(|line| !is_time(line))
                .collect::<String>()
                .into_bytes()
        },
    };
    kill_simulation("espresso", &simulation);
}

fn kill_trainer((kind, rules): (&str, &str)) {
    let Some(python) = trainers() else {
        return;
    };
    let seed = seed(&format!("rules_{kind}"));
    let mut random = generator(seed);
    let sandbox = Sandbox::new(&format!("rules-{kind}"));
    let command = |out: &Path, digest: &str| {
        let mut command = Command::new(&python);
        command.env("OMP_NUM_THREADS", "1");
        // Isolated: beside it is another `datasets`.
        command.arg("-I").arg(source("trainers.py")).arg(kind);
        command.arg(out).arg(sandbox.join(digest));
        command
    };
    let plain = sandbox.mkdir("plain");
    let begun = Instant::now();
    run_within(&mut command(&plain, "undisturbed"), test_limit()).ok();
    let whole = begun.elapsed();
    let mount = FirnMount::new(&sandbox, &format!("arena-size=256M,rules={rules}"));
    let out = mount.join("run");
    let program = Resumed {
        start: &|| command(&out, "resumed"),
        whole,
    };
    program.kill_and_end(env_count("FIRN_RULES_KILLS", 3), &mut random, &|| {});
    let digest = |name: &str| fs::read_to_string(sandbox.join(name)).expect("a digest");
    assert_eq!(digest("resumed"), digest("undisturbed"), "seed {seed}");
    mount.umount();
}

#[test]
fn a_trainer_of_hugging_face_killed_at_random_ends_with_the_same_weights() {
    kill_trainer(("hf", "hf"));
}

#[test]
fn a_trainer_of_lightning_killed_at_random_ends_with_the_same_weights() {
    kill_trainer(("lightning", "lightning"));
}
