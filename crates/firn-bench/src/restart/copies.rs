//! A held file read by the kernel's page cache, beside a file of the same size on the file system below with a warm
//! cache: the first time, when its bytes come from firnd, and again, when the kernel has them.

use std::path::{Path, PathBuf};

use crate::firn::Mount;
use crate::options::WorkDir;
use crate::report::{Limit, Report, Sample};
use crate::worker::{self, Task};
use firn_config::size_text;

const GIB: f64 = (1u64 << 30) as f64;
const BLOCK_BYTES: u64 = 1 << 20;
const NATIVE: &str = "native, warm";
const FIRST: &str = "held, first";
const AGAIN: &str = "held, again";
const LEAST_FIRST: f64 = 0.6;
const LEAST_AGAIN: f64 = 0.9;

/// The two files.
pub(super) struct Files {
    native: PathBuf,
    held: PathBuf,
    bytes: u64,
}

impl Files {
    /// Writes both.
    pub(super) fn prepare(work: &WorkDir, mount: &Mount<'_>, bytes: u64) -> anyhow::Result<Self> {
        let files = Self {
            native: work.subdir("native")?.join("image"),
            held: mount.path().join("image"),
            bytes,
        };
        for path in [&files.native, &files.held] {
            let task = Task::Write {
                path: path.clone(),
                runs: vec![(bytes / BLOCK_BYTES, BLOCK_BYTES)],
                sync: false,
                over: false,
            };
            worker::run_all(&[task])?;
        }
        read(&files.native, bytes, false)?;
        Ok(files)
    }

    /// Reads them by read(2) and by a mapping, and judges the ratios.
    pub(super) fn measure(&self, repeats: u32, report: &mut Report) -> anyhow::Result<()> {
        let file_system = crate::machine::file_system_of(&self.native);
        report.note(format!(
            "{NATIVE}: the same bytes on {file_system}, in its page cache; {FIRST}: the kernel has nothing of the held \
             file; {AGAIN}: opened once more"
        ));
        let mut first = Vec::new();
        let mut again = Vec::new();
        for (way, mmap) in [("read(2)", false), ("mmap", true)] {
            let mut samples = [Vec::new(), Vec::new(), Vec::new()];
            for _ in 0..repeats {
                samples[0].push(read(&self.native, self.bytes, mmap)?);
                forget_pages(&self.held)?;
                samples[1].push(read(&self.held, self.bytes, mmap)?);
                samples[2].push(read(&self.held, self.bytes, mmap)?);
            }
            let names = [NATIVE, FIRST, AGAIN].map(str::to_owned);
            let name = format!("{} by {way}, 1 process", size_text(self.bytes));
            report.add(name, names.into_iter().zip(samples).collect());
            let case = report.cases.last();
            first.extend(case.and_then(|case| case.ratio(FIRST, NATIVE, "throughput")));
            again.extend(case.and_then(|case| case.ratio(AGAIN, NATIVE, "throughput")));
        }
        report.judge(
            format!("{FIRST} to {NATIVE}"),
            Limit::Least(LEAST_FIRST),
            &first,
        );
        report.judge(
            format!("{AGAIN} to {NATIVE}"),
            Limit::Least(LEAST_AGAIN),
            &again,
        );
        Ok(())
    }

    /// Or the mount would drain it at its end.
    pub(super) fn remove(&self) -> anyhow::Result<()> {
        Ok(std::fs::remove_file(&self.held)?)
    }
}

/// Makes the kernel drop its pages of a file of the mount: an open for writing does that.
fn forget_pages(path: &Path) -> anyhow::Result<()> {
    drop(std::fs::File::options().write(true).open(path)?);
    Ok(())
}

fn read(path: &Path, bytes: u64, mmap: bool) -> anyhow::Result<Sample> {
    let task = Task::Read {
        path: path.to_owned(),
        bytes: BLOCK_BYTES,
        mmap,
        passes: 1,
    };
    let outcomes = worker::run_all(&[task])?;
    let gib = bytes as f64 / GIB;
    let cpu_s: f64 = outcomes.iter().map(|outcome| outcome.cpu_s).sum();
    Ok(vec![
        ("throughput", "GiB/s", gib / worker::elapsed_s(&outcomes)),
        ("CPU of the reader", "s/GiB", cpu_s / gib),
    ])
}
