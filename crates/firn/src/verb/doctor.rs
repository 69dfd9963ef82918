//! `firn doctor`: runs the checks of [`crate::doctor`], and prints their findings.

use std::path::PathBuf;
use std::time::Duration;

use crate::doctor::{
    CheckSubject, Examination, ExaminationRequest, Finding, Verdict, examine, run_check,
};
use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint, value_parser};
use firn_config::Options;
use firn_format::quote::printable;

use super::mount::{options_list_arg, resolve_options};
use super::wait::parse_timeout_ms;
use crate::failure::{DONE, FAILED, Failure, PARTLY, USAGE};
use crate::output::{self, Paint};
use crate::text::count;
use crate::verb::Verb;

/// Hidden flag that runs a single check, for the child process of that check.
const ONLY: &str = "only";

pub const VERB: Verb = Verb {
    name: "doctor",
    about: "Check this host and a backing, and show how to solve each problem",
    long: "Checks FUSE, memory, limits, mount helpers, settings, dead mounts, arenas without a firnd, and MPI. With \
           BACKING, also tests the features of its file system, with files in a new directory .firn-doctor-*, which it \
           removes. With options as for `firn mount`, checks whether such a mount would work. A check that hangs is \
           abandoned.",
    examples: &[
        ("firn doctor", "this host"),
        (
            "firn doctor /scratch/run42",
            "and the directory that is to be mounted",
        ),
        (
            "firn doctor -o arena-size=16G,layout=log /scratch/run42",
            "for a mount with these options",
        ),
    ],
    exits: &[
        (0, "no problem was found"),
        (1, "a problem makes a mount, or a promise of Firn, fail"),
        (3, "there are notes, but no problem"),
    ],
    args,
    run,
};

/// Adds the arguments of `firn doctor` to its clap command, and returns the command.
fn args(command: Command) -> Command {
    command
        .arg(
            Arg::new("backing")
                .value_name("BACKING")
                .help("The directory that is to be mounted")
                .value_hint(ValueHint::DirPath)
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(
            Arg::new("json")
                .long("json")
                .action(ArgAction::SetTrue)
                .help("Print the findings as JSON"),
        )
        .arg(
            Arg::new("timeout")
                .long("timeout")
                .value_name("DURATION")
                .default_value("10s")
                .value_parser(parse_timeout_ms)
                .help("How long one check may take"),
        )
        .arg(Arg::new(ONLY).long(ONLY).value_name("CHECK").hide(true))
        .arg(options_list_arg())
        .args(firn_config::args())
}

/// Runs all checks and prints their findings. The exit status shows the most severe verdict.
///
/// With the hidden flag this is the child process of one check: it runs only that check.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    if let Some(name) = matches.get_one::<String>(ONLY) {
        return run_single_check(matches, name);
    }
    let timeout_ms = *matches.get_one::<u64>("timeout").expect("it has a default");
    // The arguments of a child are: the verb, `--only`, the name of the check, and the options of this command line.
    // So its check sees the same options. The name is inserted for each child.
    const CHECK_NAME_INDEX: usize = 2;
    let mut arguments: Vec<_> = std::env::args_os().skip(1).collect();
    arguments.insert(1, format!("--{ONLY}").into());
    let examination = examine(&ExaminationRequest {
        has_backing: matches.contains_id("backing"),
        arguments,
        name_index: CHECK_NAME_INDEX,
        timeout: Duration::from_millis(timeout_ms),
    });
    if matches.get_flag("json") {
        output::print_json(&examination)?;
    } else {
        output::print(&findings_table(&examination, Paint::stdout()))?;
    }
    Ok(match examination.verdict() {
        Verdict::Ok => DONE,
        Verdict::Note => PARTLY,
        Verdict::Wrong => FAILED,
    })
}

/// Runs the check `name` in this process, and prints its findings as one line of JSON for the parent.
fn run_single_check(matches: &ArgMatches, name: &str) -> Result<u8, Failure> {
    let backing = matches.get_one::<PathBuf>("backing");
    // Invalid options are a finding of one check. The other checks then run with the defaults.
    let (options, options_fault) = match resolve_options(matches) {
        Ok(resolved) => (resolved.options, None),
        Err(failure) => (Options::default(), failure.text()),
    };
    let subject = CheckSubject {
        backing: backing.map(PathBuf::as_path),
        options: &options,
        options_fault: options_fault.as_deref(),
    };
    // `None` means that no check has this name.
    let Some(findings) = run_check(name, &subject) else {
        return Err(Failure::new(USAGE, format!("no check is called `{name}`")));
    };
    output::print_json_line(&findings)?;
    Ok(DONE)
}

/// Returns the table of findings: a line for each finding with its advice below, and a last line of counts.
fn findings_table(examination: &Examination, paint: Paint) -> String {
    let findings = &examination.findings;
    let name_width = findings
        .iter()
        .map(|finding| finding.check.len())
        .max()
        .unwrap_or(0);
    let mut table = String::new();
    for Finding {
        check,
        verdict,
        text,
        advice,
    } in findings
    {
        let padded_word = format!("{:<5}", verdict.word());
        let verdict = match verdict {
            Verdict::Ok => paint.healthy(&padded_word),
            Verdict::Note => paint.warning(&padded_word),
            Verdict::Wrong => paint.error(&padded_word),
        };
        table += &format!("{verdict}  {check:<name_width$}  {}\n", printable(text));
        if let Some(advice) = advice {
            // Spaces replace the verdict and the name of the check.
            table += &format!("{:7}{:<name_width$}  → {}\n", "", "", printable(advice));
        }
    }
    let wrong_count = examination.count(Verdict::Wrong);
    let note_count = count(examination.count(Verdict::Note) as u64, "note");
    let ok_count = examination.count(Verdict::Ok);
    table + &format!("{wrong_count} wrong, {note_count}, {ok_count} ok\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_finding_has_its_line_and_its_advice() {
        let named = |check: &str, finding: Finding| Finding {
            check: check.into(),
            ..finding
        };
        let examination = Examination {
            findings: vec![
                named("fuse", Finding::ok("can be opened")),
                named(
                    "memory",
                    Finding::wrong("no room", "mount with less\nor more"),
                ),
                named("mpi", Finding::note("sieves", "export it")),
            ],
        };
        // cargo gives tests no terminal on stdout, so no colours are expected.
        let shown = findings_table(&examination, Paint::stdout());
        let expected = "ok     fuse    can be opened\n\
                        wrong  memory  no room\n               → mount with less\\nor more\n\
                        note   mpi     sieves\n               → export it\n\
                        1 wrong, 1 note, 1 ok\n";
        assert_eq!(shown, expected);
    }
}
