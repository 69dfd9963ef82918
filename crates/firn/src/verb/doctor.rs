//! `firn doctor`: runs the checks of [`crate::doctor`], and prints their findings.

use std::path::PathBuf;
use std::time::Duration;

use crate::doctor::{
    CheckSubject, Examination, ExaminationRequest, Finding, Verdict, examine, run_check,
};
use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint, value_parser};
use firn_config::Options;

use super::mount::{minus_o, resolve};
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

/// Adds the arguments of the verb to its command.
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
        .arg(minus_o())
        .args(firn_config::args())
}

/// Runs all checks and prints their findings. The exit status shows the most severe verdict.
///
/// With the hidden flag this is the child process of one check: it runs only that check.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let backing = matches.get_one::<PathBuf>("backing");
    if let Some(name) = matches.get_one::<String>(ONLY) {
        return run_single_check(matches, name);
    }
    let timeout_ms = *matches.get_one::<u64>("timeout").expect("it has a default");
    // Each child gets the same command line, so that its check sees the same options.
    let mut arguments: Vec<_> = std::env::args_os().skip(1).collect();
    arguments.insert(1, format!("--{ONLY}").into());
    let examination = examine(&ExaminationRequest {
        has_backing: backing.is_some(),
        arguments,
        name_index: 2,
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
    let resolved = resolve(matches).map(|resolved| resolved.options);
    let fault = resolved.as_ref().err().and_then(Failure::text);
    let subject = CheckSubject {
        backing: backing.map(PathBuf::as_path),
        options: &resolved.unwrap_or_else(|_| Options::default()),
        options_fault: fault.as_deref(),
    };
    let findings = run_check(name, &subject)
        .ok_or_else(|| Failure::new(USAGE, format!("no check is called `{name}`")))?;
    output::print_json_line(&findings)?;
    Ok(DONE)
}

/// Returns the table of findings: a line for each finding with its advice below, and a last line of counts.
fn findings_table(examination: &Examination, paint: Paint) -> String {
    let findings = &examination.findings;
    let width = findings.iter().map(|found| found.check.len()).max();
    let width = width.unwrap_or(0);
    let mut table = String::new();
    for finding in findings {
        let Finding { check, verdict, .. } = finding;
        let word = format!("{:<5}", verdict.word());
        let word = match verdict {
            Verdict::Ok => paint.healthy(&word),
            Verdict::Note => paint.warning(&word),
            Verdict::Wrong => paint.error(&word),
        };
        let what = firn_format::quote::printable(&finding.text);
        table += &format!("{word}  {check:<width$}  {what}\n");
        if let Some(advice) = &finding.advice {
            let advice = firn_format::quote::printable(advice);
            table += &format!("{:7}{:<width$}  → {advice}\n", "", "");
        }
    }
    let [wrong, notes, ok] = [Verdict::Wrong, Verdict::Note, Verdict::Ok]
        .map(|verdict| examination.count(verdict) as u64);
    table + &format!("{wrong} wrong, {}, {ok} ok\n", count(notes, "note"))
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
