//! `firn bench checkpoint`: measures how long a parallel job takes to write a checkpoint, with the write sizes of table
//! I of the CRFS paper, natively and through Firn.

use std::path::{Path, PathBuf};

use crate::backing::{self, Kind, Prepared, Slowness};
use crate::cpu;
use crate::durable;
use crate::firn::{Counters, Firn, Mount};
use crate::options::{Common, parse_size, progress};
use crate::report::{Report, Sample};
use crate::serve::{Mounted, Server};
use crate::sizes;
use crate::worker::{self, Task};
use firn_config::size_text;

/// Bytes of one write of the candidate with large writes, which stands for a program that buffers its writes.
const LARGE_BYTES: u64 = 4 << 20;
/// Memory of the FUSE server that discards writes.
const SINK_POOL_BYTES: u64 = 256 << 20;

/// Writes the checkpoint of a parallel job, natively and through Firn.
///
/// Each process writes one image with the write sizes of table I of the CRFS paper: half of the writes
/// have at most 64 bytes, and the largest 0.25 % of the writes have 61 % of the data.
///
/// Goals: The mean write that reaches the backing is at least 2 MiB for images of 15M and more. Where each
/// write costs a round trip or an operation (--backing sshfs, slow-disk), Firn is at least 3 times faster
/// until all closes have returned. On a local ext4, where the page cache gathers writes by itself, Firn
/// takes at most 2.5 times as long with close=drain, and 1.5 times with close=held.
///
/// Candidates: With "+ preload" the processes load libfirn_preload.so and write by direct access. The FUSE
/// sink drops what is written to it; its time is the part that every FUSE mount needs. The large writes, of
/// 4 MiB each, go to the slow backing natively; their time is what the backing needs for the bytes.
#[derive(Clone, Debug, clap::Args)]
pub struct CheckpointArgs {
    #[command(flatten)]
    common: Common,
    /// Where the checkpoints end up. Slow backings are made for the run and removed after it.
    #[arg(long, value_enum, default_value = "local")]
    backing: Kind,
    /// Processes, one image each.
    #[arg(long, value_name = "COUNT", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    processes: u32,
    /// Bytes of one image (default: 7M,15M,107M; quick 7M).
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', value_parser = parse_size)]
    image_size: Vec<u64>,
    /// More options of Firn's mounts, such as arena-size=1G,io-threads=8.
    #[arg(long, value_name = "KEY=VALUE,…")]
    mount_options: Option<String>,
    /// Time added to each network round trip of sshfs, in microseconds.
    #[arg(long, value_name = "US", default_value_t = 500)]
    round_trip_us: u64,
    /// Writes per second of the slow disk.
    #[arg(long, value_name = "COUNT", default_value_t = 1000)]
    writes_per_s: u64,
    /// Seed of the sizes and their order.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl CheckpointArgs {
    /// Runs the benchmark and returns its figures. Fails if a candidate cannot be set up or measured.
    pub fn run(&self) -> anyhow::Result<Report> {
        let work = self.common.work_dir()?;
        let slowness = Slowness {
            round_trip_us: self.round_trip_us,
            writes_per_s: self.writes_per_s,
        };
        let prepared = backing::prepare(self.backing, slowness, &work)?;
        let firn = Firn::find(self.common.firn.as_deref())?;
        let candidates = self.candidates(&prepared, work.path(), &firn)?;
        let mut report = Report::new("checkpoint");
        report.note(prepared.note.clone());
        let processes = self.processes;
        let seed = self.seed;
        report.note(format!(
            "{processes} processes, write sizes of CRFS table I, seed {seed}"
        ));
        report.note("closed: until the last close returned; durable: until everything is synced");
        report.note("CPU: writers and firnd; not counted: kernel writeback, sshfs, sshd");
        let images = self.image_sizes();
        let steps = images.len() * candidates.len() * self.common.repeats() as usize;
        let bar = progress(steps as u64, "checkpoint");
        for image in images {
            let name = format!("{processes} images of {}", size_text(image));
            let mut samples = vec![Vec::new(); candidates.len()];
            for _ in 0..self.common.repeats() {
                for (candidate, samples) in candidates.iter().zip(&mut samples) {
                    bar.set_message(format!("{name}, {}", candidate.name));
                    samples.push(self.measure(candidate, image)?);
                    bar.inc(1);
                }
            }
            let names = candidates.iter().map(|candidate| candidate.name.to_owned());
            report.add(name, names.zip(samples).collect());
        }
        bar.finish_and_clear();
        Ok(report)
    }

    /// Returns the sizes of the images to measure, in bytes.
    fn image_sizes(&self) -> Vec<u64> {
        if self.image_size.is_empty() {
            self.common
                .choose(vec![7 << 20, 15 << 20, 107 << 20], vec![7 << 20])
        } else {
            self.image_size.clone()
        }
    }

    /// Sets up all candidates in the prepared backing.
    fn candidates<'a>(
        &self,
        prepared: &Prepared,
        work: &Path,
        firn: &'a Firn,
    ) -> anyhow::Result<Vec<CheckpointCandidate<'a>>> {
        let native = prepared.dir.join("native");
        std::fs::create_dir_all(&native)?;
        let mut all = vec![CheckpointCandidate::without_preload(
            "native",
            native.clone(),
            native,
            WriteTarget::Native,
        )];
        if self.common.baseline_only {
            return Ok(all);
        }
        let more = self
            .mount_options
            .as_ref()
            .map_or(String::new(), |more| format!(",{more}"));
        let library = firn.preload()?;
        for (name, close, preload) in [
            ("firn close=drain", "drain", None),
            ("firn close=held", "held", None),
            ("drain + preload", "drain", Some(&library)),
            ("held + preload", "held", Some(&library)),
        ] {
            let own = format!("{close}{}", if preload.is_some() { "-preload" } else { "" });
            let backing_dir = prepared.dir.join(&own);
            let point = work.join(format!("mount-{own}"));
            let mount = firn.mount(&backing_dir, &point, &format!("close={close}{more}"))?;
            let candidate = CheckpointCandidate::without_preload(
                name,
                backing_dir,
                point,
                WriteTarget::Firn(mount),
            );
            all.push(CheckpointCandidate {
                preload: preload.cloned(),
                ..candidate
            });
        }
        if self.backing != Kind::Local {
            let backing_dir = prepared.dir.join("large");
            std::fs::create_dir_all(&backing_dir)?;
            all.push(CheckpointCandidate::without_preload(
                "large writes",
                backing_dir.clone(),
                backing_dir,
                WriteTarget::Large,
            ));
        } else {
            let dir = work.join("mount-sink");
            std::fs::create_dir_all(&dir)?;
            let sink = Mounted::start(
                &Server::Sink {
                    pool_bytes: SINK_POOL_BYTES,
                },
                &dir,
            )?;
            all.push(CheckpointCandidate::without_preload(
                "FUSE sink",
                work.to_owned(),
                dir,
                WriteTarget::Sink(sink),
            ));
        }
        Ok(all)
    }

    /// Writes one checkpoint with images of `image` bytes, and removes it.
    fn measure(&self, candidate: &CheckpointCandidate, image: u64) -> anyhow::Result<Sample> {
        let dir = candidate.new_dir()?;
        let tasks: Vec<Task> = (0..self.processes)
            .map(|rank| Task::Write {
                path: dir.join(format!("rank{rank}")),
                runs: match candidate.target {
                    WriteTarget::Large => {
                        vec![(image / LARGE_BYTES, LARGE_BYTES), (1, image % LARGE_BYTES)]
                    }
                    _ => sizes::of_image(image, self.seed + u64::from(rank))
                        .into_iter()
                        .map(|bytes| (1, bytes))
                        .collect(),
                },
                sync: false,
                over: false,
            })
            .collect();
        // What earlier measurements left dirty must not be written in this one's time.
        durable::sync_all(&candidate.backing_dir)?;
        let before = candidate.usage()?;
        let outcomes = worker::run_with(candidate.preload.as_deref(), &tasks)?;
        candidate.make_durable(&dir, &tasks)?;
        let durable_ns = cpu::now_ns();
        let after = candidate.usage()?;
        candidate.remove(&dir, &tasks)?;

        let begin_ns = outcomes.iter().map(|o| o.begin_ns).min().unwrap_or(0);
        let ends = || outcomes.iter().map(|o| o.end_ns);
        let spread_ns = ends().max().unwrap_or(0) - ends().min().unwrap_or(0);
        let closed = ("closed", "s", worker::elapsed_s(&outcomes));
        let (writes, bytes) = match candidate.target {
            WriteTarget::Native | WriteTarget::Large => (
                tasks.iter().map(writes_of).sum(),
                image * u64::from(self.processes),
            ),
            WriteTarget::Firn(_) => (
                after.0.drain_writes - before.0.drain_writes,
                after.0.drain_bytes - before.0.drain_bytes,
            ),
            WriteTarget::Sink(_) => return Ok(vec![closed]),
        };
        let writers_cpu_s: f64 = outcomes.iter().map(|o| o.cpu_s).sum();
        Ok(vec![
            closed,
            ("durable", "s", (durable_ns - begin_ns) as f64 * 1e-9),
            ("spread", "s", spread_ns as f64 * 1e-9),
            ("writes", "count", writes as f64),
            (
                "mean write",
                "KiB",
                bytes as f64 / 1024.0 / writes.max(1) as f64,
            ),
            ("CPU", "s", writers_cpu_s + after.1 - before.1),
        ])
    }

    /// Returns the options that every benchmark has.
    pub fn common(&self) -> &Common {
        &self.common
    }

    /// Returns the arguments with which `firn bench all` runs this benchmark.
    pub fn with(common: Common) -> Self {
        Self {
            common,
            backing: Kind::Local,
            processes: 8,
            image_size: Vec::new(),
            mount_options: None,
            round_trip_us: 500,
            writes_per_s: 1000,
            seed: 1,
        }
    }
}

/// One way to write a checkpoint.
struct CheckpointCandidate<'a> {
    name: &'static str,
    /// The directory of the candidate in the backing.
    backing_dir: PathBuf,
    /// The directory to which the processes write: the mount point, or `backing_dir` itself.
    dir: PathBuf,
    target: WriteTarget<'a>,
    /// The preload library, if the processes load it.
    preload: Option<PathBuf>,
}

enum WriteTarget<'a> {
    /// The backing, with the writes of the job.
    Native,
    /// The backing, with large writes.
    Large,
    /// A mount of Firn.
    Firn(Mount<'a>),
    /// A FUSE file system that discards all data.
    Sink(Mounted),
}

impl<'a> CheckpointCandidate<'a> {
    /// Returns a candidate whose processes do not load the preload library.
    fn without_preload(
        name: &'static str,
        backing_dir: PathBuf,
        dir: PathBuf,
        target: WriteTarget<'a>,
    ) -> Self {
        Self {
            name,
            backing_dir,
            dir,
            target,
            preload: None,
        }
    }

    /// Returns what the mount has written to the backing, and its processor time in seconds. Both are 0 without a mount
    /// of Firn.
    fn usage(&self) -> anyhow::Result<(Counters, f64)> {
        match &self.target {
            WriteTarget::Firn(mount) => Ok((mount.counters()?, mount.cpu_s())),
            WriteTarget::Native | WriteTarget::Large | WriteTarget::Sink(_) => {
                Ok(Default::default())
            }
        }
    }

    /// Creates the directory of one checkpoint. The sink has no directories, so its mount point is used.
    fn new_dir(&self) -> anyhow::Result<PathBuf> {
        if let WriteTarget::Sink(sink) = &self.target {
            return Ok(sink.path().to_owned());
        }
        let dir = self.dir.join("step");
        std::fs::create_dir(&dir)?;
        Ok(dir)
    }

    /// Removes the checkpoint in `dir`.
    fn remove(&self, dir: &Path, tasks: &[Task]) -> anyhow::Result<()> {
        for task in tasks {
            std::fs::remove_file(path_of(task))?;
        }
        match self.target {
            WriteTarget::Sink(_) => Ok(()),
            WriteTarget::Native | WriteTarget::Large | WriteTarget::Firn(_) => {
                Ok(std::fs::remove_dir(dir)?)
            }
        }
    }

    /// Makes the checkpoint durable. Natively, all files are synced in parallel, and then the directory.
    fn make_durable(&self, dir: &Path, tasks: &[Task]) -> anyhow::Result<()> {
        match &self.target {
            WriteTarget::Firn(mount) => return mount.wait_durable(dir),
            WriteTarget::Sink(_) => return Ok(()),
            WriteTarget::Native | WriteTarget::Large => {}
        }
        durable::sync_files(tasks.iter().map(path_of), dir)
    }
}

/// Returns the file that a task writes.
fn path_of(task: &Task) -> &Path {
    match task {
        Task::Write { path, .. } | Task::Read { path, .. } => path,
        Task::Names { dir, .. } => dir,
        _ => unreachable!("a checkpoint is of files"),
    }
}

/// Returns the number of writes of a task.
fn writes_of(task: &Task) -> u64 {
    match task {
        Task::Write { runs, .. } => runs.iter().map(|run| run.0).sum(),
        _ => 0,
    }
}
