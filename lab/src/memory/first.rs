//! What direct access costs before it pays: files that are too small for it, and the first write of a process.

use std::path::Path;

use super::targets::PRELOAD;
use crate::worker::{self, Task};
use firn_bench::firn::{Firn, Mount};
use firn_bench::options::{Common, WorkDir};
use firn_bench::report::{Limit, Report, Sample, median};
use firn_bench::worker::{Operation, Task as UsualTask};

const MOUNT: &str = "mount";
/// Small files of one round.
const FILES: u64 = 10_000;
/// Processes that make a first write in one round.
const STARTS: usize = 20;
/// So long that the library asks for direct access at once, and so short that the copy itself takes 3 µs.
const FIRST_WRITE_BYTES: u64 = 64 << 10;

/// Adds a case for each.
pub fn measure(
    common: &Common,
    firn: &Firn,
    work: &WorkDir,
    report: &mut Report,
) -> anyhow::Result<()> {
    let backing = work.subdir("first.b")?;
    let point = work.subdir("first")?;
    let options = "drain=demand,close=held,fsync=held,arena-size=1G";
    let mount = firn.mount(&backing, &point, options)?;
    mount.wait_populated()?;
    let library = firn.preload()?;
    let both = [(MOUNT, None), (PRELOAD, Some(library.as_path()))];
    let mut case = |name: &str, measure: &dyn Fn(Option<&Path>) -> anyhow::Result<Sample>| {
        let mut samples = [Vec::new(), Vec::new()];
        for _ in 0..common.repeats() {
            for ((_, library), samples) in both.iter().zip(&mut samples) {
                samples.push(measure(*library)?);
            }
        }
        let names = both.iter().map(|(name, _)| (*name).to_owned());
        report.add(name, names.zip(samples).collect());
        anyhow::Ok(())
    };
    let count = common.choose(FILES, FILES / 10);
    let small = format!("{count} files: open, write 1K, close");
    case(&small, &|library| write_small_files(&mount, count, library))?;
    let first = "first write of a process, 64K";
    case(first, &|library| time_first_write(&mount, library))?;
    let ratio = report.cases.iter().find(|case| case.name == small);
    let ratio = ratio.and_then(|case| case.ratio(PRELOAD, MOUNT, "time a file"));
    report.judge(
        "small files, preload to mount",
        Limit::Most(1.1),
        &ratio.into_iter().collect::<Vec<f64>>(),
    );
    let time = report.cases.iter().find(|case| case.name == first);
    let time = time.and_then(|case| case.median(PRELOAD, "time"));
    report.judge(
        "first write of a process, preload [µs]",
        Limit::Most(60.0),
        &time.into_iter().collect::<Vec<f64>>(),
    );
    Ok(())
}

fn write_small_files(
    mount: &Mount<'_>,
    count: u64,
    library: Option<&Path>,
) -> anyhow::Result<Sample> {
    let dir = mount.path().join("small");
    std::fs::create_dir(&dir)?;
    let outcomes = worker::run_with(
        library,
        &[UsualTask::Names {
            dir: dir.clone(),
            count,
            operation: Operation::CreateSmall,
        }],
    )?;
    std::fs::remove_dir_all(&dir)?;
    mount.wait_empty()?;
    let each_us = worker::elapsed_s(&outcomes) * 1e6 / count as f64;
    Ok(vec![("time a file", "µs", each_us)])
}

fn time_first_write(mount: &Mount<'_>, library: Option<&Path>) -> anyhow::Result<Sample> {
    let path = mount.path().join("first");
    let mut times = Vec::new();
    for _ in 0..STARTS {
        let task = Task::FirstWrite {
            path: path.clone(),
            bytes: FIRST_WRITE_BYTES,
        };
        let outcomes = worker::run_with(library, &[task])?;
        times.push(worker::elapsed_s(&outcomes) * 1e6);
        std::fs::remove_file(&path)?;
        mount.wait_empty()?;
    }
    Ok(vec![("time", "µs", median(&times))])
}
