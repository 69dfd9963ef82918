//! Runs checks, each in a child process that can be left behind.
//!
//! A call of a dead file server may hang in the kernel so that not even SIGKILL ends it. Such a child stays until the server
//! answers; this process, whose threads made no such call, ends as ever.

use std::ffi::OsString;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use firn_process::{Excess, Limits, RunError};
use serde::Serialize;

use crate::doctor::{CHECKS, Check, Finding, Group, Subject, Verdict};

/// Checks that run at the same time: most of them wait for something else than a processor.
const AT_ONCE: usize = 8;
const OUTPUT_BYTES_MAX: usize = 1 << 20;

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
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(check) = checks.get(index) else {
                return done;
            };
            done.push((index, run_in_child(request, check)));
        }
    };
    let mut found: Vec<(usize, Vec<Finding>)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(work)).collect();
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        joined.flatten().collect()
    });
    found.sort_by_key(|(index, _)| *index);
    found
        .into_iter()
        .flat_map(|(_, findings)| findings)
        .collect()
}

fn run_in_child(request: &Request, check: &Check) -> Vec<Finding> {
    let mut findings = ask_child(request, check);
    for finding in &mut findings {
        finding.check = check.name.into();
    }
    findings
}

fn ask_child(request: &Request, check: &Check) -> Vec<Finding> {
    let mut arguments = request.arguments.clone();
    arguments.insert(request.name_index.min(arguments.len()), check.name.into());
    let mut child = Command::new("/proc/self/exe");
    child.args(arguments);
    let limits = Limits {
        input: b"",
        output_bytes_max: OUTPUT_BYTES_MAX,
        excess: Excess::Discard,
        deadline: Instant::now() + request.patience,
    };
    let seconds = request.patience.as_secs_f64();
    match firn_process::run(child, limits) {
        // Messages may come before the findings, which are the last line.
        Ok(ended) => match ended.text().lines().last().map(serde_json::from_str) {
            Some(Ok(findings)) => findings,
            _ => vec![Finding::note(
                format!("the check ended without a finding: {}", ended.text()),
                "please report this as a fault of Firn",
            )],
        },
        Err(RunError::Late) if check.group == Group::Host => vec![Finding::note(
            format!("no answer within {seconds} s"),
            "run it again with a longer --timeout; look at `dmesg` and the load of this host",
        )],
        Err(RunError::Late) => vec![Finding::wrong(
            format!("the file system did not answer within {seconds} s"),
            "look whether its server is reached (`dmesg`, `mount`); if it is only slow, run it again with a longer --timeout",
        )],
        Err(error) => vec![Finding::note(
            format!("the check could not be run: {error}"),
            "look at the limits on processes and memory (`ulimit -a`)",
        )],
    }
}
