//! Long versions of the system tests: the same tests, more rounds, seeds printed.
//!
//! A campaign sets the environment that the tests of `firn-tests` read and runs one of them. The
//! release binary is built first and used, so that a round is short. Needs root, as the tests do.

use std::process::Command;

use anyhow::{Context, bail, ensure};

/// A campaign: its name, the option that sets its length, what the option is called in the
/// environment, the default, and the test it runs.
struct Campaign {
    name: &'static str,
    option: &'static str,
    variable: &'static str,
    default: u64,
    test: &'static str,
    filter: &'static str,
}

const CAMPAIGNS: [Campaign; 3] = [
    Campaign {
        name: "crash",
        option: "--rounds",
        variable: "FIRN_CRASH_ROUNDS",
        default: 200,
        test: "crash",
        filter: "every_acknowledged_byte",
    },
    Campaign {
        name: "fsx",
        option: "--ops",
        variable: "FIRN_FSX_OPS",
        default: 1_000_000,
        test: "suites",
        filter: "fsx_finds_nothing",
    },
    Campaign {
        name: "differential",
        option: "--ops",
        variable: "FIRN_DIFFERENTIAL_OPS",
        default: 200_000,
        test: "differential",
        filter: "same_as_plain",
    },
];

/// Longest a test of a campaign may take, in seconds; the ordinary limit is for CI.
const TEST_LIMIT_S: u64 = 6 * 3600;

const USAGE: &str = "usage: cargo xtask campaign crash [--rounds N] [--seed S]\n\
    \x20      cargo xtask campaign fsx [--ops N] [--seed S]\n\
    \x20      cargo xtask campaign differential [--ops N] [--seed S]";

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
    start(campaign, length, seed)
}

fn start(campaign: &Campaign, length: u64, seed: Option<u64>) -> anyhow::Result<()> {
    cargo(&mut cargo_command(&["build", "--release", "-p", "firn"]))?;
    let mut test = cargo_command(&["test", "--release", "-p", "firn-tests", "--test", campaign.test]);
    test.args(["--", "--nocapture", "--test-threads=1", campaign.filter]);
    test.env(campaign.variable, length.to_string()).env("FIRN_TEST_LIMIT_S", TEST_LIMIT_S.to_string());
    if let Some(seed) = seed {
        test.env("FIRN_SEED", seed.to_string());
    }
    cargo(&mut test)
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
