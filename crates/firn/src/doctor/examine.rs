//! Runs the checks, each in a child process. A child that hangs is abandoned at its timeout ([`ask_child`]).

use std::ffi::OsString;
use std::time::Duration;

use serde::Serialize;

use crate::ask::{ChildFailure, ask_child, ask_each};
use crate::doctor::{CHECKS, Check, CheckGroup, CheckSubject, Finding, Verdict};

/// What to examine, and how a child process is called for one check.
#[derive(Clone, Debug)]
pub struct ExaminationRequest {
    /// Whether there is a backing to examine. Without one, only the checks of the host run.
    pub has_backing: bool,
    /// Arguments with which this program runs one check and prints its findings as JSON. The name of the check is
    /// inserted at `name_index`.
    pub arguments: Vec<OsString>,
    /// Index in `arguments` at which the name of the check is inserted.
    pub name_index: usize,
    /// Timeout for one check.
    pub timeout: Duration,
}

/// The findings of all checks.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Examination {
    /// Findings in the order of [`CHECKS`].
    pub findings: Vec<Finding>,
}

impl Examination {
    /// Returns the most severe verdict of all findings.
    pub fn verdict(&self) -> Verdict {
        let verdicts = self.findings.iter().map(|finding| finding.verdict);
        verdicts.max().unwrap_or(Verdict::Ok)
    }

    /// Returns the number of findings with this verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        let same = self
            .findings
            .iter()
            .filter(|found| found.verdict == verdict);
        same.count()
    }
}

/// Runs the check of that name in this process. Returns `None` where no check has that name.
pub fn run_check(name: &str, subject: &CheckSubject<'_>) -> Option<Vec<Finding>> {
    let check = CHECKS.iter().find(|check| check.name == name)?;
    Some((check.look)(subject))
}

/// Runs all checks, and returns their findings.
///
/// The checks that try the backing with files run only where its other checks found no error. Each of them would
/// otherwise report the same error again.
pub fn examine(request: &ExaminationRequest) -> Examination {
    let looks = |group: CheckGroup| match group {
        CheckGroup::Host => true,
        CheckGroup::Backing => request.has_backing,
        CheckGroup::Storage => false,
    };
    let mut findings = run_all(request, looks);
    if !request.has_backing {
        return Examination { findings };
    }
    let is_usable = !findings.iter().any(|found| {
        let is_of_backing = |check: &&Check| check.group == CheckGroup::Backing;
        let mut of_backing = CHECKS.iter().filter(is_of_backing);
        found.verdict == Verdict::Wrong && of_backing.any(|check| check.name == found.check)
    });
    if is_usable {
        findings.extend(run_all(request, |group| group == CheckGroup::Storage));
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

/// Returns the findings of the checks of the wanted groups, in the order of [`CHECKS`].
fn run_all(request: &ExaminationRequest, is_wanted: impl Fn(CheckGroup) -> bool) -> Vec<Finding> {
    let checks: Vec<&Check> = CHECKS
        .iter()
        .filter(|check| is_wanted(check.group))
        .collect();
    let found = ask_each(&checks, |check| run_in_child(request, check));
    found.into_iter().flatten().collect()
}

/// Runs one check in a child process, and names the check in each of its findings.
fn run_in_child(request: &ExaminationRequest, check: &Check) -> Vec<Finding> {
    let mut findings = ask(request, check);
    for finding in &mut findings {
        finding.check = check.name.into();
    }
    findings
}

/// Asks the child for its findings. A child that fails or exceeds its timeout yields a finding that says so.
fn ask(request: &ExaminationRequest, check: &Check) -> Vec<Finding> {
    let mut arguments = request.arguments.clone();
    arguments.insert(request.name_index.min(arguments.len()), check.name.into());
    let seconds = request.timeout.as_secs_f64();
    match ask_child(arguments, request.timeout) {
        Ok(findings) => findings,
        Err(ChildFailure::Refused { text, .. }) => vec![Finding::note(
            format!("the check ended without a finding: {text}"),
            "please report this as a fault of Firn",
        )],
        Err(ChildFailure::Late) if check.group == CheckGroup::Host => vec![Finding::note(
            format!("no answer within {seconds} s"),
            "run it again with a longer --timeout; look at `dmesg` and the load of this host",
        )],
        Err(ChildFailure::Late) => vec![Finding::wrong(
            format!("the file system did not answer within {seconds} s"),
            "look whether its server is reached (`dmesg`, `mount`); if it is only slow, run it again with a longer --timeout",
        )],
        Err(ChildFailure::NotRun(error)) => vec![Finding::note(
            format!("the check could not be run: {error}"),
            "look at the limits on processes and memory (`ulimit -a`)",
        )],
    }
}
