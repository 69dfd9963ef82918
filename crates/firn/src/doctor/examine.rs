//! Runs the checks of `firn doctor`, each in a child process, and collects their findings.
//!
//! A check may hang, for example in a system call to a file server that does not answer. So the parent waits for each
//! child only until a timeout ([`ask_child`]), and reports a child that exceeds it as a finding.

use std::ffi::OsString;
use std::time::Duration;

use serde::Serialize;

use crate::ask::{ChildFailure, ask_child, parallel_map};
use crate::doctor::{CHECKS, Check, CheckGroup, CheckSubject, Finding, Verdict};

/// What to examine, and how a child process is called for one check.
#[derive(Clone, Debug)]
pub struct ExaminationRequest {
    /// Whether there is a backing to examine. Without one, only the checks of the host run.
    pub has_backing: bool,
    /// Command line, without the program, with which a child process runs one check and prints its findings as JSON.
    /// Only the name of the check is missing.
    pub arguments: Vec<OsString>,
    /// Where the name of the check is inserted in `arguments`: after the flag `--only`.
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
        self.findings
            .iter()
            .filter(|finding| finding.verdict == verdict)
            .count()
    }
}

/// Runs the check of that name in this process. Returns `None` if no check has that name.
pub fn run_check(name: &str, subject: &CheckSubject<'_>) -> Option<Vec<Finding>> {
    let check = CHECKS.iter().find(|check| check.name == name)?;
    Some((check.find_problems)(subject))
}

/// Runs all checks, and returns their findings.
///
/// The checks of [`CheckGroup::Storage`] run only if the checks of the backing found no error. Otherwise each of them
/// would report the same error again.
pub fn examine(request: &ExaminationRequest) -> Examination {
    if !request.has_backing {
        let findings = run_groups(request, &[CheckGroup::Host]);
        return Examination { findings };
    }
    let mut findings = run_groups(request, &[CheckGroup::Host, CheckGroup::Backing]);
    if has_backing_error(&findings) {
        let text = "the features of its file system were not tested";
        let advice = "mend the errors of the backing, and run `firn doctor` again";
        findings.push(Finding {
            check: "storage".into(),
            ..Finding::note(text, advice)
        });
    } else {
        findings.extend(run_groups(request, &[CheckGroup::Storage]));
    }
    Examination { findings }
}

/// Returns whether a check of the group [`CheckGroup::Backing`] found an error.
fn has_backing_error(findings: &[Finding]) -> bool {
    let is_backing_check = |name: &str| {
        CHECKS
            .iter()
            .any(|check| check.group == CheckGroup::Backing && check.name == name)
    };
    findings
        .iter()
        .any(|finding| finding.verdict == Verdict::Wrong && is_backing_check(&finding.check))
}

/// Runs the checks of some groups at the same time. Returns their findings in the order of [`CHECKS`].
fn run_groups(request: &ExaminationRequest, groups: &[CheckGroup]) -> Vec<Finding> {
    let checks: Vec<&Check> = CHECKS
        .iter()
        .filter(|check| groups.contains(&check.group))
        .collect();
    let findings_by_check = parallel_map(&checks, |check| run_check_in_child(request, check));
    findings_by_check.into_iter().flatten().collect()
}

/// Runs one check in a child process, and names the check in each of its findings.
fn run_check_in_child(request: &ExaminationRequest, check: &Check) -> Vec<Finding> {
    let mut findings = ask_child_for_findings(request, check);
    for finding in &mut findings {
        finding.check = check.name.into();
    }
    findings
}

/// Runs one check in a child process, and returns the findings that it prints. If the child fails or exceeds its
/// timeout, returns a single finding that says so.
fn ask_child_for_findings(request: &ExaminationRequest, check: &Check) -> Vec<Finding> {
    let mut arguments = request.arguments.clone();
    arguments.insert(request.name_index.min(arguments.len()), check.name.into());
    let seconds = request.timeout.as_secs_f64();
    match ask_child(arguments, request.timeout) {
        Ok(findings) => findings,
        Err(ChildFailure::Refused { text, .. }) => vec![Finding::note(
            format!("the check ended without a result: {text}"),
            "please report this as a fault of Firn",
        )],
        Err(ChildFailure::TimedOut) if check.group == CheckGroup::Host => vec![Finding::note(
            format!("no answer within {seconds} s"),
            "run it again with a longer --timeout; check `dmesg` and the load of this host",
        )],
        Err(ChildFailure::TimedOut) => vec![Finding::wrong(
            format!("the file system did not answer within {seconds} s"),
            "check whether its server can be reached (`dmesg`, `mount`). If it is only slow, run it again with a longer --timeout",
        )],
        Err(ChildFailure::NotRun(error)) => vec![Finding::note(
            format!("the check could not be run: {error}"),
            "check the limits on processes and memory (`ulimit -a`)",
        )],
    }
}
