//! Repeats figure 6 of the CprFS paper: reads and writes the records of one file as iozone does, with a checkpoint
//! after each phase that writes.

use super::{ASYNC, CommitArgs, CommitCandidate, FIRN, IN_PLACE, NATIVE, PRELOAD, add_cases};
use crate::backing::Kind;
use crate::durable;
use crate::report::{Limit, Report};
use crate::worker::{Records, Task};
use firn_config::size_text;

/// Sizes of a record that are measured.
const RECORDS: [u64; 2] = [4 << 10, 8 << 10];
/// Seed of the random order.
const SEED: u64 = 6;

/// One pass over all records of the file.
struct Phase {
    /// Name in the report, that of iozone.
    name: &'static str,
    /// Whether the records are written. Otherwise they are read.
    write: bool,
    /// Whether the order is random.
    random: bool,
    /// Gain of CprFS over NFS according to the paper, in percent.
    paper: f64,
}

/// Makes one line of [`PHASES`].
const fn phase(name: &'static str, write: bool, random: bool, paper: f64) -> Phase {
    Phase {
        name,
        write,
        random,
        paper,
    }
}

/// The phases in the order of iozone.
const PHASES: [Phase; 6] = [
    phase("write", true, false, 11.62),
    phase("re-write", true, false, -12.56),
    phase("read", false, false, -7.30),
    phase("re-read", false, false, 3.60),
    phase("random read", false, true, -15.60),
    phase("random write", true, true, -11.87),
];

/// Measures all phases with each size of records, natively and on mounts of Firn. Adds the cases and the goals to the
/// report.
pub(super) fn run(
    args: &CommitArgs,
    candidates: &[CommitCandidate<'_>],
    report: &mut Report,
) -> anyhow::Result<()> {
    let bytes = args
        .file_size
        .unwrap_or(args.common.choose(256 << 20, 16 << 20));
    let paper: Vec<String> = PHASES
        .iter()
        .map(|one| format!("{} {:+.2} %", one.name, one.paper))
        .collect();
    report.note(format!(
        "records: one file of {}, each phase in a transaction of its own; fsync or commit are part of those that write",
        size_text(bytes)
    ));
    report.note(format!("CprFS against NFS, figure 6: {}", paper.join(", ")));
    let compared: Vec<&CommitCandidate> = candidates
        .iter()
        .filter(|one| ![IN_PLACE, ASYNC].contains(&one.name))
        .collect();
    for record_bytes in RECORDS {
        let title = format!("records of {}", size_text(record_bytes));
        let samples = args.measure(&compared, &title, |candidate| {
            let path = candidate.dir.join("records");
            let mut samples = Vec::new();
            for phase in &PHASES {
                let task = Task::Records(Records {
                    path: path.clone(),
                    bytes,
                    record_bytes,
                    seed: phase.random.then_some(SEED),
                    write: phase.write,
                });
                let sync = || durable::sync_files([path.as_path()].into_iter(), &candidate.dir);
                let rate =
                    |taken_s: f64| ("rate", "MiB/s", bytes as f64 / f64::from(1 << 20) / taken_s);
                samples.push(if phase.write {
                    let taken = candidate.write(&[task], sync)?;
                    [vec![rate(taken.durable_s)], taken.sample()].concat()
                } else {
                    vec![rate(candidate.read(task)?)]
                });
            }
            std::fs::remove_file(&path)?;
            Ok(samples)
        })?;
        add_cases(
            report,
            PHASES
                .iter()
                .map(|phase| format!("{}, {title}", phase.name)),
            samples,
        );
    }
    add_goals(report, args.backing != Kind::Local);
    Ok(())
}

/// Goal of the sequential write on a network file system, as a ratio to the native rate.
const SEQUENTIAL_WRITE_RATE_MIN: Limit = Limit::Least(1.3);
/// Goal of all other phases.
const RATE_MIN: Limit = Limit::Least(0.95);

/// Adds the goals for all phases. `is_remote` says whether the backing is a network file system.
fn add_goals(report: &mut Report, is_remote: bool) {
    for phase in &PHASES {
        let limit = match (phase.write, phase.random) {
            (true, false) if phase.name == "write" && is_remote => SEQUENTIAL_WRITE_RATE_MIN,
            // CprFS, the file system of the paper, is slower than its baseline here, so there is no goal.
            (true, false) => continue,
            _ => RATE_MIN,
        };
        for candidate in [FIRN, PRELOAD] {
            let begins = format!("{}, records", phase.name);
            let cases = report
                .cases
                .iter()
                .filter(|case| case.name.starts_with(&begins));
            let found: Vec<f64> = cases
                .filter_map(|case| case.ratio(candidate, NATIVE, "rate"))
                .collect();
            report.judge(
                format!("{}, {candidate} to {NATIVE}", phase.name),
                limit,
                &found,
            );
        }
    }
}
