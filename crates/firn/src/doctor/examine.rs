//! Runs checks, each in a child process that can be left behind ([`ask_child`]).

use std::ffi::OsString;
use std::time::Duration;

use serde::Serialize;

use crate::ask::{Unanswered, ask_child, ask_each};
use crate::doctor::{CHECKS, Check, Finding, Group, Subject, Verdict};

/// How to examine.
#[derive(Clone, Debug)]
pub struct Request {
    /// Whether there is a backing to be examined.
    pub has_backing: bool,
    /// Arguments with which this program runs one check, whose name is put at the index, and prints its findings.
    pub arguments: Vec<OsString>,
    /// Where the name goes.
    pub name_index: usize,
    /// How long one check may take.
    pub patience: Duration,
}

/// What all checks found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Examination {
    /// In the order of the table.
    pub findings: Vec<Finding>,
}

impl Examination {
    /// The worst of all.
    pub fn verdict(&self) -> Verdict {
        let verdicts = self.findings.iter().map(|finding| finding.verdict);
        verdicts.max().unwrap_or(Verdict::Ok)
    }

    /// How many there are of one.
    pub fn count(&self, verdict: Verdict) -> usize {
        let same = self
            .findings
            .iter()
            .filter(|found| found.verdict == verdict);
        same.count()
    }
}

/// Runs the check of that name in this process; `None`: there is none.
pub fn run_check(name: &str, subject: &Subject<'_>) -> Option<Vec<Finding>> {
    let check = CHECKS.iter().find(|check| check.name == name)?;
    Some((check.look)(subject))
}

/// Runs all checks. What is tried with files is left out where the backing was found wrong: it would be told once more
/// for each of them.
pub fn examine(request: &Request) -> Examination {
    let looks = |group: Group| match group {
        Group::Host => true,
        Group::Backing => request.has_backing,
        Group::Storage => false,
    };
    let mut findings = run_all(request, looks);
    if !request.has_backing {
        return Examination { findings };
    }
    let is_usable = !findings.iter().any(|found| {
        let is_of_backing = |check: &&Check| check.group == Group::Backing;
        let mut of_backing = CHECKS.iter().filter(is_of_backing);
        found.verdict == Verdict::Wrong && of_backing.any(|check| check.name == found.check)
    });
    if is_usable {
        findings.extend(run_all(request, |group| group == Group::Storage));
    } else {
        let text = "what its file system can do was not tried";
        let advice = "mend what is wrong with the backing, and run `firn doctor` again";
        findings.push(Finding {
            check: "storage".into(),
            ..Finding::note(text, advice)
        });
    }
    Examination { findings }
}

/// The findings of the checks of some groups, in the order of the table.
fn run_all(request: &Request, is_wanted: impl Fn(Group) -> bool) -> Vec<Finding> {
    let checks: Vec<&Check> = CHECKS
        .iter()
        .filter(|check| is_wanted(check.group))
        .collect();
    let found = ask_each(&checks, |check| run_in_child(request, check));
    found.into_iter().flatten().collect()
}

fn run_in_child(request: &Request, check: &Check) -> Vec<Finding> {
    let mut findings = ask(request, check);
    for finding in &mut findings {
        finding.check = check.name.into();
    }
    findings
}

fn ask(request: &Request, check: &Check) -> Vec<Finding> {
    let mut arguments = request.arguments.clone();
    arguments.insert(request.name_index.min(arguments.len()), check.name.into());
    let seconds = request.patience.as_secs_f64();
    match ask_child(arguments, request.patience) {
        Ok(findings) => findings,
        Err(Unanswered::Refused { text, .. }) => vec![Finding::note(
            format!("the check ended without a finding: {text}"),
            "please report this as a fault of Firn",
        )],
        Err(Unanswered::Late) if check.group == Group::Host => vec![Finding::note(
            format!("no answer within {seconds} s"),
            "run it again with a longer --timeout; look at `dmesg` and the load of this host",
        )],
        Err(Unanswered::Late) => vec![Finding::wrong(
            format!("the file system did not answer within {seconds} s"),
            "look whether its server is reached (`dmesg`, `mount`); if it is only slow, run it again with a longer --timeout",
        )],
        Err(Unanswered::NotRun(error)) => vec![Finding::note(
            format!("the check could not be run: {error}"),
            "look at the limits on processes and memory (`ulimit -a`)",
        )],
    }
}
