//! What logs cost a mount without any: one host whose clients share a file, or have a file each.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::measure::{Job, RATE, READ, WRITTEN};
use super::touch_free_memory;
use crate::worker::{self, Blocks, Pattern, Task};
use firn_bench::firn::{Firn, Mount};
use firn_bench::options::{Common, WorkDir};
use firn_bench::report::{Limit, Report, Sample};

const NATIVE: &str = "native";
const PLAIN: &str = "Firn, layout=plain";
const OTHERS: &str = "Firn, layout=log for other files";
const ARENA: &str = "arena-size=256M";
/// The goal, of the rate of a mount without logs.
const OTHERS_LEAST: f64 = 0.95;

/// Which files there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Files {
    /// One, of all clients.
    Shared,
    /// One of each client.
    Own,
}

impl Files {
    fn title(self) -> &'static str {
        match self {
            Self::Shared => "one file of all clients (N-1)",
            Self::Own => "a file of each client (N-N)",
        }
    }
}

/// Writes and reads both, natively, in a mount without logs, and in one whose logs are for files of other names.
pub fn measure(
    report: &mut Report,
    common: &Common,
    job: &Job,
    work: &WorkDir,
    firn: &Firn,
) -> anyhow::Result<()> {
    let dir = work.subdir("one-host")?;
    for files in [Files::Shared, Files::Own] {
        let mut candidates = vec![(NATIVE.to_owned(), Vec::new())];
        if !common.baseline_only {
            candidates.push((PLAIN.to_owned(), Vec::new()));
            candidates.push((OTHERS.to_owned(), Vec::new()));
        }
        for _ in 0..common.repeats() {
            for (name, samples) in &mut candidates {
                samples.push(measure_once(job, files, name, &dir, firn)?);
            }
        }
        let title = files.title();
        report.add(format!("one host, {}: {title}", job.title()), candidates);
        let case = report.cases.last().expect("it was added");
        let found: Vec<f64> = [WRITTEN, READ]
            .iter()
            .filter_map(|metric| case.ratio(OTHERS, PLAIN, metric))
            .collect();
        let name = format!("{title}: layout=log for other files, to layout=plain");
        report.judge(name, Limit::Least(OTHERS_LEAST), &found);
    }
    Ok(())
}

fn measure_once(
    job: &Job,
    files: Files,
    candidate: &str,
    dir: &Path,
    firn: &Firn,
) -> anyhow::Result<Sample> {
    let backing = dir.join("backing");
    std::fs::create_dir_all(&backing)?;
    let mount: Option<Mount<'_>> = match candidate {
        NATIVE => None,
        PLAIN => Some(firn.mount(&backing, &dir.join("mount"), ARENA)?),
        _ => {
            let options = format!("{ARENA},layout=log,log-files=*.shared");
            Some(firn.mount(&backing, &dir.join("mount"), &options)?)
        }
    };
    if let Some(mount) = &mount {
        mount.wait_populated()?;
    }
    let library = mount.is_some().then(|| firn.preload()).transpose()?;
    let place = mount.as_ref().map_or(&*backing, Mount::path);
    let paths = make_files(job, files, place)?;
    touch_free_memory(4 * job.bytes());
    let written = worker::run_together(library.as_deref(), &tasks(job, files, &paths, true))?;
    let read = worker::run_together(None, &tasks(job, files, &paths, false))?;
    drop(mount);
    std::fs::remove_dir_all(&backing)?;
    let rate = |outcomes: &[_]| job.bytes() as f64 / 1e6 / worker::elapsed_s(outcomes);
    Ok(vec![
        (WRITTEN, RATE, rate(&written)),
        (READ, RATE, rate(&read)),
    ])
}

/// Makes the files of the clients, in their order.
fn make_files(job: &Job, files: Files, dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let name = |client| match files {
        Files::Shared => "rank".to_owned(),
        Files::Own => format!("rank{client}"),
    };
    let paths = (0..job.clients).map(|client| dir.join(name(client)));
    let paths: Vec<PathBuf> = paths.collect();
    for path in &paths {
        File::create(path)?;
    }
    Ok(paths)
}

fn tasks(job: &Job, files: Files, paths: &[PathBuf], write: bool) -> Vec<Task> {
    let task = |(client, path): (u64, &PathBuf)| {
        let (client, clients) = match files {
            Files::Shared => (client, u64::from(job.clients)),
            Files::Own => (0, 1),
        };
        Task::Blocks(Blocks {
            path: path.clone(),
            pattern: Pattern::Strided,
            block_bytes: job.block_bytes,
            count: job.objects,
            clients,
            client,
            write,
        })
    };
    (0..).zip(paths).map(task).collect()
}
