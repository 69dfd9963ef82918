//! `firn bench`: starts the separate program `firn-bench`.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command as Process;

use clap::{Arg, ArgMatches, Command, value_parser};

use crate::failure::{FAILED, Failure};
use crate::text;
use crate::verb::Verb;

/// File name of the benchmark program.
const PROGRAM: &str = "firn-bench";
/// Variable that tells the benchmark program which firn to measure.
const FIRN_VARIABLE: &str = "FIRN_BENCH_PROGRAM";

pub const VERB: Verb = Verb {
    name: "bench",
    about: "Compare Firn with writing directly (needs the program firn-bench)",
    long: "The benchmarks are a separate program, firn-bench, which must be beside firn or in ../libexec/firn. `firn \
           bench --help` lists them, `firn bench BENCHMARK --help` their options.\n\n\
           Figures depend on the machine, the file system of --dir and whatever else runs. Compare ratios, and quote them \
           with the two lines at the head of the report.",
    examples: &[
        (
            "firn bench checkpoint --dir /scratch",
            "checkpoints through Firn and natively, on that file system",
        ),
        (
            "firn bench restart --quick",
            "how fast files in memory are read, through both frontends, compared with memcpy and tmpfs",
        ),
        (
            "firn bench ingest --json -",
            "how fast writes are received, as JSON",
        ),
    ],
    exits: &[
        (0, "measured"),
        (1, "failed, or firn-bench is not installed"),
        (2, "an argument that firn-bench does not know"),
        (
            130,
            "interrupted; the mounts and files of the benchmark are removed",
        ),
    ],
    args: add_args,
    run,
};

/// Adds the arguments of `firn bench` to its clap command, and returns the command.
fn add_args(command: Command) -> Command {
    command.disable_help_flag(true).arg(
        Arg::new("args")
            .value_name("BENCHMARK [OPTIONS]")
            .help("Arguments for firn-bench, passed on unchanged")
            .num_args(0..)
            .trailing_var_arg(true)
            .allow_hyphen_values(true)
            .value_parser(value_parser!(OsString)),
    )
}

/// Replaces this process by the benchmark program. Returns only if the program cannot be run.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let firn = std::env::current_exe().map_err(|error| {
        Failure::new(
            FAILED,
            format!("cannot find the program file of firn: {error}"),
        )
    })?;
    let Some(program) = find_program(&firn) else {
        let advice = "build it with `cargo build --release -p firn-bench`, or install it with \
                      `scripts/install --bench`";
        return Err(Failure::new(
            FAILED,
            format!("{PROGRAM} is not installed: {advice}"),
        ));
    };
    let mut process = Process::new(&program);
    process.args(matches.get_many::<OsString>("args").unwrap_or_default());
    if std::env::var_os(FIRN_VARIABLE).is_none() {
        process.env(FIRN_VARIABLE, &firn);
    }
    // A successful exec(2) does not return.
    let error = process.exec();
    let program = text::path(&program);
    Err(Failure::new(
        FAILED,
        format!("cannot run {program}: {error}"),
    ))
}

/// Returns the benchmark program that belongs to `firn`: the program beside it, or else the program in the directory
/// where packages install it.
fn find_program(firn: &Path) -> Option<PathBuf> {
    let dir = firn.parent()?;
    let candidates = [dir.join(PROGRAM), dir.join("../libexec/firn").join(PROGRAM)];
    candidates
        .into_iter()
        .find_map(|candidate| candidate.canonicalize().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_found_beside_firn_and_where_it_is_installed() {
        let root = std::env::temp_dir().join(format!("firn-verb-bench-{}", std::process::id()));
        let installed = root.join("libexec/firn");
        std::fs::create_dir_all(root.join("bin")).unwrap();
        std::fs::create_dir_all(&installed).unwrap();
        let firn = root.join("bin/firn");
        let nowhere = find_program(&firn);
        std::fs::write(installed.join(PROGRAM), "").unwrap();
        let in_libexec = find_program(&firn);
        std::fs::write(root.join("bin").join(PROGRAM), "").unwrap();
        let beside = find_program(&firn);
        let root_path = root.canonicalize().unwrap();
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(nowhere, None);
        assert_eq!(
            in_libexec,
            Some(root_path.join("libexec/firn").join(PROGRAM))
        );
        assert_eq!(beside, Some(root_path.join("bin").join(PROGRAM)));
    }

    #[test]
    fn its_arguments_are_handed_on_help_too() {
        let line = ["firn", "bench", "ingest", "--quick", "--help"];
        let matches = crate::verb::command().get_matches_from(line);
        let (_, matches) = matches.subcommand().unwrap();
        let args: Vec<_> = matches.get_many::<OsString>("args").unwrap().collect();
        assert_eq!(args, ["ingest", "--quick", "--help"]);
    }
}
