//! Measures the cost of the live table: the rates of creates and of small writes with `takeover=auto`, compared with
//! `takeover=no`.

use std::path::PathBuf;

use crate::firn::{Firn, Mount};
use crate::options::{Common, WorkDir, progress};
use crate::report::{Limit, Report, Sample};
use crate::worker::{self, Operation, Task};

/// Candidate without a live table, the file by which a next firnd can continue the mount.
const WITHOUT: &str = "takeover=no";
/// Candidate with a live table, which firnd keeps up to date.
const WITH: &str = "takeover=auto";
/// Number of rounds in each repeat. A round is short, and several rounds reduce the influence of other work on the
/// machine.
const ROUNDS: u32 = 4;
/// Bytes of one write.
const WRITE_BYTES: u64 = 4096;

/// A mount with one of the two settings.
struct Candidate<'a> {
    name: &'static str,
    mount: Mount<'a>,
}

/// Measures the rates of a mount with and without the live table, which tells the next firnd what the kernel knows. The
/// two are measured in turns. Adds the cases and the goals to the report.
pub(super) fn measure(
    common: &Common,
    firn: &Firn,
    work: &WorkDir,
    report: &mut Report,
) -> anyhow::Result<()> {
    let names: &[&str] = if common.baseline_only {
        &[WITHOUT]
    } else {
        &[WITHOUT, WITH]
    };
    let candidates = names
        .iter()
        .map(|name| mount(firn, work, name))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let creates = common.choose(4_000, 200);
    let writes = common.choose(32_000, 500);
    let rounds = common.repeats() * common.choose(ROUNDS, 1);
    let bar = progress(u64::from(rounds), "rates");
    let mut created = vec![Vec::new(); candidates.len()];
    let mut written = vec![Vec::new(); candidates.len()];
    for round in 0..rounds {
        for step in 0..candidates.len() {
            // The order rotates, because the first candidate of a round finds other caches than the second.
            let index = (step + round as usize) % candidates.len();
            let candidate = &candidates[index];
            created[index].push(candidate.create(creates)?);
            written[index].push(candidate.write(writes)?);
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    for (title, samples) in [
        ("create and close, no bytes", created),
        ("writes of 4 KiB", written),
    ] {
        let names = candidates.iter().map(|candidate| candidate.name.to_owned());
        report.add(title, names.zip(samples).collect());
        let ratio = report
            .cases
            .last()
            .and_then(|case| case.ratio(WITH, WITHOUT, "rate"));
        let name = format!("{title}, with the live table to without");
        report.judge(name, Limit::Least(0.97), ratio.as_slice());
    }
    Ok(())
}

/// Mounts Firn with the option `name`.
fn mount<'a>(firn: &'a Firn, work: &WorkDir, name: &'static str) -> anyhow::Result<Candidate<'a>> {
    let options = format!("drain=demand,close=held,fsync=held,arena-size=512M,{name}");
    let backing = work.subdir(&format!("{name}.b"))?;
    let mount = firn.mount(&backing, &work.subdir(name)?, &options)?;
    mount.wait_populated()?;
    Ok(Candidate { name, mount })
}

impl Candidate<'_> {
    /// Measures the creation of `count` empty files.
    fn create(&self, count: u64) -> anyhow::Result<Sample> {
        let dir = self.mount.path().join("names");
        std::fs::create_dir(&dir)?;
        let task = Task::Names {
            dir: dir.clone(),
            count,
            operation: Operation::CreateEmpty,
        };
        let outcomes = worker::run_all(&[task])?;
        std::fs::remove_dir_all(&dir)?;
        Ok(rate(count, worker::elapsed_s(&outcomes)))
    }

    /// Measures `count` writes to one file.
    fn write(&self, count: u64) -> anyhow::Result<Sample> {
        let path: PathBuf = self.mount.path().join("file");
        let task = Task::Write {
            path: path.clone(),
            runs: vec![(count, WRITE_BYTES)],
            sync: false,
            over: false,
        };
        let outcomes = worker::run_all(&[task])?;
        std::fs::remove_file(&path)?;
        self.mount.wait_empty()?;
        Ok(rate(count, worker::elapsed_s(&outcomes)))
    }
}

fn rate(count: u64, seconds: f64) -> Sample {
    vec![("rate", "1/s", count as f64 / seconds)]
}
