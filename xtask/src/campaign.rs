//! Campaigns: long runs of tests that also run in CI, with many more rounds. Each run prints its random seed, with
//! which it can be repeated.
//!
//! Most campaigns run system tests (crate `firn-tests`), which read their length from environment variables. They first
//! build the release binary, so that a round is short, and need root. The other campaigns (fuzzing, ThreadSanitizer,
//! packages, laboratory, frameworks of Python) build or install what they need.

mod fuzz;
mod packages;
mod python;
mod rules;
mod tsan;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use clap::Subcommand;

/// A campaign, with its length.
#[derive(Subcommand)]
pub enum Campaign {
    /// kill -9 of firnd and of writers under load: nothing acknowledged is lost
    Crash {
        /// Kills each: through the mount over each stack of layers, with direct access, without FUSE, in transactions of two hosts, in logs of two
        #[arg(long, default_value_t = 200)]
        rounds: u64,
        /// Repeats a campaign
        #[arg(long)]
        seed: Option<u64>,
    },
    /// kill -9 of firnd under programs that go on: no program sees an error
    Takeover {
        /// Kills
        #[arg(long, default_value_t = 200)]
        kills: u64,
        /// Repeats a campaign
        #[arg(long)]
        seed: Option<u64>,
    },
    /// MPI programs on four hosts with kill -9 of firnd: every write of a rank that returned is there
    Mpi {
        /// Jobs
        #[arg(long, default_value_t = 100)]
        rounds: u64,
        /// Repeats a campaign
        #[arg(long)]
        seed: Option<u64>,
    },
    /// `firn run` on many hosts: how long all take to mount, and to unmount
    Hosts {
        /// Hosts, each in namespaces of its own
        #[arg(long, default_value_t = 64)]
        hosts: u64,
    },
    /// Engine, transactions and the log layout over the simulated backing, stopped at every kind of step, with faults
    Simulation {
        /// Operations in all
        #[arg(long, default_value_t = 1_000_000)]
        ops: u64,
        /// Repeats a campaign: the seed that a failure printed
        #[arg(long)]
        seed: Option<u64>,
    },
    /// fsx with mmap on, on a mount over each kind of file system
    Fsx {
        /// Operations on each
        #[arg(long, default_value_t = 1_000_000)]
        ops: u64,
        /// Repeats a campaign
        #[arg(long)]
        seed: Option<u64>,
    },
    /// The same random operations on the mount and on a plain directory
    Differential {
        /// Operations on each kind of file system
        #[arg(long, default_value_t = 200_000)]
        ops: u64,
        /// Repeats a campaign
        #[arg(long)]
        seed: Option<u64>,
    },
    /// stress-ng --verify, through the mount and with direct access
    Stress {
        /// Seconds for each stressor
        #[arg(long, default_value_t = 20)]
        seconds: u64,
    },
    /// Every parser of stored or received bytes, fuzzed
    Fuzz {
        /// Seconds for each target: five find what a change broke outright, finding more takes hours
        #[arg(long, default_value_t = 5)]
        seconds: u64,
        /// Only this target; may be given more than once
        #[arg(long = "target", value_name = "NAME")]
        targets: Vec<String>,
        /// Repeats a campaign
        #[arg(long)]
        seed: Option<u64>,
    },
    /// The threaded tests of arena, engine and drain under ThreadSanitizer
    Tsan {
        // A race is seen only when both sides come close: with the release store of a piece's seal made
        // relaxed, about one round in ten reports it.
        /// How often each is run
        #[arg(long, default_value_t = 20)]
        rounds: u64,
    },
    /// Unmodified programs under commit rules, killed and resumed: ckpt-chaos with the trainers of Hugging Face and Lightning, LAMMPS, GROMACS, OpenFOAM, Quantum ESPRESSO
    Rules {
        /// Kills of each program at random moments
        #[arg(long, default_value_t = 20)]
        kills: u64,
        /// Repeats a campaign
        #[arg(long)]
        seed: Option<u64>,
    },
    /// The packages of `make dist`, installed, used and removed in a small Debian, and in an image of it
    Packages,
    /// The adapters of the Python package with the oldest and the newest frameworks, and saves by each beside others (5 GB of disk)
    Python {
        /// Kills of a rank that overwrites a checkpoint, in each kind of mount
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..))]
        rounds: u64,
        /// Saves of each kind that are measured; 0: none
        #[arg(long, default_value_t = 9)]
        saves: u32,
    },
    /// The laboratory, which no other test builds: it has no warnings, its models and experiments run
    Lab,
}

/// Seconds that a test of a campaign may take. The usual limit of a test is much shorter, because it is for CI.
const TEST_LIMIT_S: u64 = 6 * 3600;

impl Campaign {
    /// Runs the tests of the campaign one after the other. The first failure ends it.
    pub fn run(&self) -> anyhow::Result<()> {
        match *self {
            Self::Crash { rounds, seed } => {
                let length = ("FIRN_CRASH_ROUNDS", rounds);
                system("life", "every_acknowledged_byte", length, seed)?;
                system("frontends", "kill_9_of_writer_or_firnd", length, seed)?;
                system("frontends", "kill_9_while_files_settle", length, seed)?;
                system("transactions", "killed_at_any_moment", length, seed)?;
                system("transactions", "survives_kill_9", length, seed)?;
                system("transactions", "commit_rules", length, seed)?;
                system("transactions", "rules_keep", length, seed)?;
                // Four mounts and two kills each, of 16 traces.
                let of_ranks = ("FIRN_CRASH_ROUNDS", rounds.div_ceil(20));
                system("several_hosts", "rules::", of_ranks, seed)?;
                system(
                    "several_hosts",
                    "a_host_that_is_killed_between",
                    length,
                    seed,
                )?;
                system(
                    "several_hosts",
                    "killed_while_they_write_one_file",
                    length,
                    seed,
                )
            }
            Self::Takeover { kills, seed } => {
                let length = ("FIRN_TAKEOVER_KILLS", kills);
                system("life", "takeover", length, seed)
            }
            Self::Mpi { rounds, seed } => system(
                "mpi",
                "survives_kill_9_of_firnd",
                ("FIRN_CRASH_ROUNDS", rounds),
                seed,
            ),
            Self::Hosts { hosts } => system(
                "several_hosts",
                "many_hosts_mount_at_once",
                ("FIRN_RUN_HOSTS", hosts),
                None,
            ),
            Self::Simulation { ops, seed } => {
                for (package, module) in SIMULATED {
                    simulation(package, module, ops, seed)?;
                }
                Ok(())
            }
            Self::Fsx { ops, seed } => system(
                "frontends",
                "fsx_finds_nothing",
                ("FIRN_FSX_OPS", ops),
                seed,
            ),
            Self::Differential { ops, seed } => {
                let length = ("FIRN_DIFFERENTIAL_OPS", ops);
                system("frontends", "same_as_plain", length, seed)?;
                system("transactions", "same_as_plain", length, seed)
            }
            Self::Stress { seconds } => system(
                "frontends",
                "stress_ng",
                ("FIRN_STRESS_SECONDS", seconds),
                None,
            ),
            Self::Fuzz {
                seconds,
                ref targets,
                seed,
            } => fuzz::run(seconds, targets, seed),
            Self::Tsan { rounds } => tsan::run(rounds),
            Self::Rules { kills, seed } => rules::run(kills, seed),
            Self::Packages => packages::run(),
            Self::Python { rounds, saves } => python::run(&python::Length { rounds, saves }),
            Self::Lab => lab(),
        }
    }
}

/// Runs the system tests of the test program `program` with names that contain `filter`. An environment variable tells
/// them the length of the campaign.
fn system(
    program: &str,
    filter: &str,
    (variable, length): (&str, u64),
    seed: Option<u64>,
) -> anyhow::Result<()> {
    system_with(program, filter, &[(variable, length.to_string())], seed)
}

/// Runs system tests like [`system`], with any environment variables. Builds the programs under test first.
fn system_with(
    program: &str,
    filter: &str,
    variables: &[(&str, String)],
    seed: Option<u64>,
) -> anyhow::Result<()> {
    build_release(&["firn", "firn-preload"])?;
    let target = ["test", "--release", "-p", "firn-tests", "--test", program];
    require_test(&target, filter)?;
    let mut command = cargo_command(&target);
    command.args(["--", "--nocapture", "--test-threads=1", filter]);
    command
        .envs(variables.iter().cloned())
        .env("FIRN_TEST_LIMIT_S", TEST_LIMIT_S.to_string());
    if let Some(seed) = seed {
        command.env("FIRN_SEED", seed.to_string());
    }
    cargo(&mut command)
}

/// Builds these packages with the release profile, as users have them.
fn build_release(packages: &[&str]) -> anyhow::Result<()> {
    let mut command = cargo_command(&["build", "--release"]);
    for package in packages {
        command.args(["-p", package]);
    }
    cargo(&mut command)
}

/// Fails if `filter` selects no test. Without this check, a campaign would succeed after a rename of its test, because
/// cargo then runs no test.
fn require_test(target: &[&str], filter: &str) -> anyhow::Result<()> {
    let mut command = cargo_command(target);
    let output = command
        .args(["--", "--list", filter])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    ensure!(output.status.success(), "{command:?} failed");
    ensure!(
        String::from_utf8_lossy(&output.stdout).contains(": test"),
        "{command:?} lists no test: has it been renamed?"
    );
    Ok(())
}

/// Crates and modules with tests over the simulated file system. These tests read their length from `FIRN_OPS`.
const SIMULATED: [(&str, &str); 9] = [
    ("firn-engine", "simulation::"),
    ("firn-transact", "crash::"),
    ("firn-transact", "tree::"),
    ("firn-transact", "history::"),
    ("firn-transact", "shadow::"),
    ("firn-transact", "backup::"),
    ("firn-transact", "apply_later::"),
    ("firn-transact", "faults::"),
    ("firn-log", "model::"),
];

/// Runs the tests of one module over the simulated file system, with about `ops` random operations. They run in the
/// test build, which checks invariants by assertions.
fn simulation(package: &str, module: &str, ops: u64, seed: Option<u64>) -> anyhow::Result<()> {
    let mut command = cargo_command(&[
        "test",
        "-p",
        package,
        "--test",
        "all",
        "--",
        "--nocapture",
        module,
    ]);
    command.env("FIRN_OPS", ops.to_string());
    if let Some(seed) = seed {
        command.env("FIRN_SEED", seed.to_string());
    }
    cargo(&mut command)
}

/// Lints and tests the laboratory, a workspace of its own.
fn lab() -> anyhow::Result<()> {
    let manifest = root().join("lab/Cargo.toml");
    let mut clippy = cargo_command(&["clippy", "--all-targets", "--manifest-path"]);
    clippy.arg(&manifest).args(["--", "-D", "warnings"]);
    cargo(&mut clippy)?;
    let mut test = cargo_command(&["test", "--locked", "--manifest-path"]);
    cargo(test.arg(&manifest))
}

/// Returns a command that runs cargo, the same cargo that runs this program.
fn cargo_command(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args);
    command
}

/// Runs a command, usually cargo. Fails if the command fails.
fn cargo(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().context("cannot start cargo")?;
    ensure!(status.success(), "{command:?} failed");
    Ok(())
}

/// Returns the top directory of the repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the repository")
}

/// Where cargo builds.
fn target_dir() -> PathBuf {
    let dir =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    std::path::absolute(&dir).unwrap_or(dir)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use super::*;

    #[test]
    fn the_simulation_runs_every_test_that_takes_its_length_from_the_environment() {
        let mut found = BTreeSet::new();
        for package in ["firn-engine", "firn-transact", "firn-log"] {
            let dir = root().join("crates").join(package).join("tests/all");
            for entry in fs::read_dir(dir).expect("the tests of a crate") {
                let path = entry.expect("an entry").path();
                if path.extension().is_none_or(|extension| extension != "rs") {
                    continue;
                }
                let text = fs::read_to_string(&path).expect("a test");
                if text.contains("FIRN_OPS") || text.contains("common::seeds(") {
                    let name = path.file_stem().expect("a name").to_string_lossy();
                    found.insert((package.to_owned(), format!("{name}::")));
                }
            }
        }
        let listed = SIMULATED.map(|(package, test)| (package.to_owned(), test.to_owned()));
        assert_eq!(found, BTreeSet::from(listed));
    }
}
