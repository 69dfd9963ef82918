//! Long versions of the tests: the same tests, more rounds, seeds printed.
//!
//! A campaign of system tests sets the environment that the tests of `firn-tests` read and runs one of them. The
//! release binary is built first and used, so that a round is short. Needs root, as the tests do. Fuzzing and ThreadSanitizer build their own.

mod fuzz;
mod tsan;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};

/// A campaign: its name, the option that sets its length, the default, and what it runs.
struct Campaign {
    name: &'static str,
    option: &'static str,
    default: u64,
    what: What,
}

enum What {
    /// A system test: the option's name in the environment, the test and the case.
    System {
        variable: &'static str,
        test: &'static str,
        filter: &'static str,
    },
    Fuzz,
    Tsan,
}

const CAMPAIGNS: [Campaign; 6] = [
    Campaign {
        name: "crash",
        option: "--rounds",
        default: 200,
        what: What::System {
            variable: "FIRN_CRASH_ROUNDS",
            test: "crash",
            filter: "every_acknowledged_byte",
        },
    },
    Campaign {
        name: "fsx",
        option: "--ops",
        default: 1_000_000,
        what: What::System { variable: "FIRN_FSX_OPS", test: "suites", filter: "fsx_finds_nothing" },
    },
    Campaign {
        name: "differential",
        option: "--ops",
        default: 200_000,
        what: What::System {
            variable: "FIRN_DIFFERENTIAL_OPS",
            test: "differential",
            filter: "same_as_plain",
        },
    },
    Campaign {
        name: "stress",
        option: "--seconds",
        default: 20,
        what: What::System { variable: "FIRN_STRESS_SECONDS", test: "suites", filter: "stress_ng" },
    },
    // Five seconds find what a change broke outright; finding more takes hours.
    Campaign { name: "fuzz", option: "--seconds", default: 5, what: What::Fuzz },
    // A race is seen only when both sides come close: with the release store of a piece's seal made
    // relaxed, about one round in ten reports it.
    Campaign { name: "tsan", option: "--rounds", default: 20, what: What::Tsan },
];

/// Longest a test of a campaign may take, in seconds; the ordinary limit is for CI.
const TEST_LIMIT_S: u64 = 6 * 3600;

const USAGE: &str = "usage: cargo xtask campaign crash [--rounds N] [--seed S]\n\
    \x20      cargo xtask campaign fsx [--ops N] [--seed S]\n\
    \x20      cargo xtask campaign differential [--ops N] [--seed S]\n\
    \x20      cargo xtask campaign stress [--seconds N]            (seconds for each stressor)\n\
    \x20      cargo xtask campaign fuzz [--seconds N] [--seed S]   (seconds for each target)\n\
    \x20      cargo xtask campaign tsan [--rounds N]";

/// Runs the campaign that the arguments name.
pub fn run(args: &[String]) -> anyhow::Result<()> {
    let (name, options) = args.split_first().context(USAGE)?;
    let campaign = CAMPAIGNS.iter().find(|campaign| campaign.name == name).context(USAGE)?;
    let (mut length, mut seed) = (campaign.default, None);
    for pair in options.chunks(2) {
        let [option, value] = pair else { bail!("{} needs a number\n{USAGE}", pair[0]) };
        let value: u64 = value.parse().with_context(|| format!("{option} {value}: not a whole number"))?;
        match option.as_str() {
            "--seed" => seed = Some(value),
            option if option == campaign.option => length = value,
            option => bail!("{name} has no option {option}\n{USAGE}"),
        }
    }
    match campaign.what {
        What::System { variable, test, filter } => system(test, filter, (variable, length), seed),
        What::Fuzz => fuzz::run(length, seed),
        What::Tsan => {
            ensure!(seed.is_none(), "tsan has no option --seed\n{USAGE}");
            tsan::run(length)
        }
    }
}

fn system(test: &str, filter: &str, length: (&str, u64), seed: Option<u64>) -> anyhow::Result<()> {
    cargo(&mut cargo_command(&["build", "--release", "-p", "firn", "-p", "firn-preload"]))?;
    let mut command = cargo_command(&["test", "--release", "-p", "firn-tests", "--test", test]);
    command.args(["--", "--nocapture", "--test-threads=1", filter]);
    command.env(length.0, length.1.to_string()).env("FIRN_TEST_LIMIT_S", TEST_LIMIT_S.to_string());
    if let Some(seed) = seed {
        command.env("FIRN_SEED", seed.to_string());
    }
    cargo(&mut command)
}

fn cargo_command(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args);
    command
}

fn cargo(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().context("cannot start cargo")?;
    ensure!(status.success(), "{command:?} failed");
    Ok(())
}

/// The repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the repository")
}

/// Where cargo builds.
fn target_dir() -> PathBuf {
    let dir = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    std::path::absolute(&dir).unwrap_or(dir)
}
