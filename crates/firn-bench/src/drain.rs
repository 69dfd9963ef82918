//! `firn bench drain`: measures how much a drain slows down a program that computes, and how fast the drain is while no
//! program computes.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::bail;

use crate::firn::{Firn, Mount};
use crate::machine;
use crate::options::{Common, WorkDir, parse_size, progress};
use crate::report::{Limit, Report, Sample};
use crate::worker::{self, Steps, Task};
use firn_config::size_text;

/// Bytes of a MiB, the unit in the report.
const MIB: f64 = (1u64 << 20) as f64;
/// Candidate: the computing program without a drain, which is the baseline.
const ALONE: &str = "alone";
/// Candidate: a drain that begins immediately, limited to 3 percent of the processor time.
const PACED: &str = "drain=eager, drain-cpu=3";
/// Candidate: a drain that begins immediately, without a limit.
const UNLIMITED: &str = "drain=eager";
/// Candidate: the checkpoint stays in memory.
const DEMAND: &str = "drain=demand";
/// Number of steps of the run that measures how many steps fit into a second.
const STEPS_TO_CALIBRATE: u64 = 100;
/// Maximum time for the drain of the checkpoint.
const WAIT_MAX: Duration = Duration::from_secs(600);

/// Computes in steps on all CPUs while a checkpoint drains, as a training loop does.
///
/// The baseline is the same loop alone, just before and after: the speed of a shared machine changes from one second to
/// the next. With drain=demand the checkpoint stays in memory. A second figure is how fast the checkpoint drains while
/// nothing computes, compared with a drain without a CPU limit (drain-cpu=100, the default).
///
/// Goals: the step rate is at least 0.95 of that alone; the rate of the drain while nothing computes is at least 0.97
/// of that without a limit.
#[derive(Clone, Debug, clap::Args)]
pub struct DrainArgs {
    #[command(flatten)]
    common: Common,
    /// Bytes of the checkpoint (default: 1536M, quick 64M).
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// Seconds of computing in one measurement (default: 4, quick 1).
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: Option<u64>,
}

/// One way to drain, and its mount.
struct DrainCandidate<'a> {
    name: &'static str,
    /// The mount. `None` means that no checkpoint is written.
    mount: Option<Mounted<'a>>,
}

/// A mount to which the checkpoint is written.
struct Mounted<'a> {
    mount: Mount<'a>,
    /// Path of the checkpoint in the backing.
    backing_file: PathBuf,
}

/// A program that computes in steps, as a training loop does.
struct Loop {
    threads: usize,
    steps: u64,
}

impl DrainArgs {
    fn size(&self) -> u64 {
        self.size
            .unwrap_or(self.common.choose(1536 << 20, 64 << 20))
            .next_multiple_of(1 << 20)
    }

    fn seconds(&self) -> u64 {
        self.seconds.unwrap_or(self.common.choose(4, 1))
    }

    /// Runs the benchmark and returns its figures. Fails if a candidate cannot be set up or measured.
    pub fn run(&self) -> anyhow::Result<Report> {
        let work = self.common.work_dir()?;
        let firn = Firn::find(self.common.firn.as_deref())?;
        let threads = std::thread::available_parallelism()?.get();
        let mut report = Report::new("drain");
        report.note(format!(
            "a checkpoint of {} by one process with the preload library, close=held; the backing is on {}",
            size_text(self.size()),
            machine::file_system_of(work.path())
        ));
        report.note(format!(
            "then {} s of steps of {threads} threads, or nothing",
            self.seconds()
        ));
        let mount = |name: &str, options: &str| self.mount(&firn, &work, name, options);
        let mut candidates = vec![DrainCandidate {
            name: ALONE,
            mount: None,
        }];
        if !self.common.baseline_only {
            candidates.push(DrainCandidate {
                name: DEMAND,
                mount: Some(mount("demand", "drain=demand")?),
            });
            candidates.push(DrainCandidate {
                name: UNLIMITED,
                mount: Some(mount("unlimited", "drain=eager")?),
            });
            candidates.push(DrainCandidate {
                name: PACED,
                mount: Some(mount("paced", "drain-cpu=3")?),
            });
        }
        let calibration = Loop {
            threads,
            steps: STEPS_TO_CALIBRATE,
        };
        let calibration = calibration.step_rate()?;
        let steps = (calibration * self.seconds() as f64) as u64;
        let training = Loop { threads, steps };
        let mut computing = vec![Vec::new(); candidates.len()];
        let mut idle = vec![Vec::new(); candidates.len()];
        let bar = progress(
            u64::from(self.common.repeats()) * candidates.len() as u64,
            "drain",
        );
        for _ in 0..self.common.repeats() {
            for (index, candidate) in candidates.iter().enumerate() {
                computing[index].push(self.measure(&firn, candidate, &training)?);
                if [UNLIMITED, PACED].contains(&candidate.name)
                    && let Some(mount) = &candidate.mount
                {
                    idle[index].push(self.drain_rate(&firn, mount)?);
                }
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        let named = |samples: Vec<Vec<Sample>>| -> Vec<(String, Vec<Sample>)> {
            candidates
                .iter()
                .map(|candidate| candidate.name.to_owned())
                .zip(samples)
                .filter(|(_, samples)| !samples.is_empty())
                .collect()
        };
        report.add("a program computes on all CPUs", named(computing));
        let idle = named(idle);
        if idle.is_empty() {
            return Ok(report);
        }
        report.add("nothing computes", idle);
        let [computing, idle] = &report.cases[..] else {
            unreachable!("two were added");
        };
        let step_ratio = computing.median(PACED, "of alone");
        let drain_ratio = idle.ratio(PACED, UNLIMITED, "drained");
        report.judge(
            format!("steps, {PACED} to {ALONE}"),
            Limit::Least(0.95),
            step_ratio.as_slice(),
        );
        report.judge(
            format!("idle CPUs, {PACED} to {UNLIMITED}"),
            Limit::Least(0.97),
            drain_ratio.as_slice(),
        );
        Ok(report)
    }

    /// Mounts Firn with an arena that has room for two checkpoints.
    fn mount<'a>(
        &self,
        firn: &'a Firn,
        work: &WorkDir,
        name: &str,
        options: &str,
    ) -> anyhow::Result<Mounted<'a>> {
        let backing = work.subdir(&format!("backing-{name}"))?;
        let point = work.subdir(&format!("firn-{name}"))?;
        // Room for twice the checkpoint, so that no write waits for room.
        let arena_bytes = (2 * self.size()).max(256 << 20);
        let options = format!("{options},close=held,fsync=held,arena-size={arena_bytes}");
        let mount = firn.mount(&backing, &point, &options)?;
        mount.wait_populated()?;
        Ok(Mounted {
            mount,
            backing_file: backing.join("checkpoint"),
        })
    }

    /// Measures the steps per second while the checkpoint drains, and how much was drained meanwhile.
    fn measure(
        &self,
        firn: &Firn,
        candidate: &DrainCandidate<'_>,
        training: &Loop,
    ) -> anyhow::Result<Sample> {
        let before = training.step_rate()?;
        let mut drained = 0;
        let rate = match &candidate.mount {
            None => training.step_rate()?,
            Some(mounted) => {
                let drained_before = mounted.mount.counters()?.drain_bytes;
                self.write_checkpoint(firn, &mounted.mount)?;
                let rate = training.step_rate()?;
                drained = mounted.mount.counters()?.drain_bytes - drained_before;
                remove(&mounted.mount)?;
                rate
            }
        };
        let alone = (before + training.step_rate()?) / 2.0;
        Ok(vec![
            ("steps", "/s", rate),
            ("of alone", "", rate / alone),
            ("drained", "MiB", drained as f64 / MIB),
        ])
    }

    /// Measures how fast the checkpoint drains after its close, while no program computes.
    fn drain_rate(&self, firn: &Firn, mounted: &Mounted<'_>) -> anyhow::Result<Sample> {
        self.write_checkpoint(firn, &mounted.mount)?;
        let begin = Instant::now();
        let left = self.size() - mounted.drained_bytes().min(self.size());
        // Not by `firn status`, a process each time: it would compete for the CPUs.
        while mounted.drained_bytes() < self.size() {
            if begin.elapsed() > WAIT_MAX {
                bail!("gave up waiting for the drain");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let rate = left as f64 / MIB / begin.elapsed().as_secs_f64();
        remove(&mounted.mount)?;
        Ok(vec![("drained", "MiB/s", rate)])
    }

    /// Writes the checkpoint in a process that loads the preload library.
    fn write_checkpoint(&self, firn: &Firn, mount: &Mount<'_>) -> anyhow::Result<()> {
        let task = Task::Write {
            path: mount.path().join("checkpoint"),
            runs: vec![(self.size() >> 20, 1 << 20)],
            sync: false,
            over: false,
        };
        worker::run_with(Some(&firn.preload()?), &[task]).map(drop)
    }

    /// Returns the options that every benchmark has.
    pub fn common(&self) -> &Common {
        &self.common
    }

    /// Returns the arguments with which `firn bench all` runs this benchmark.
    pub fn with(common: Common) -> Self {
        Self {
            common,
            size: None,
            seconds: None,
        }
    }
}

impl Loop {
    /// Runs all steps, and returns how many were done per second.
    fn step_rate(&self) -> anyhow::Result<f64> {
        let steps = Steps {
            threads: self.threads,
            count: self.steps,
        };
        let outcomes = worker::run_all(&[Task::Steps(steps)])?;
        Ok(self.steps as f64 / worker::elapsed_s(&outcomes))
    }
}

impl Mounted<'_> {
    /// Returns the bytes of the checkpoint that are in the backing.
    fn drained_bytes(&self) -> u64 {
        const BLOCK_BYTES: u64 = 512;
        std::fs::metadata(&self.backing_file).map_or(0, |file| file.blocks() * BLOCK_BYTES)
    }
}

/// Removes the checkpoint, and waits until the device has written what was drained, so that it does not slow down the
/// next measurement.
fn remove(mount: &Mount<'_>) -> anyhow::Result<()> {
    std::fs::remove_file(mount.path().join("checkpoint"))?;
    mount.wait_empty()?;
    rustix::fs::sync();
    Ok(())
}
