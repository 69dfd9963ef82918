//! Ways to write a checkpoint to several servers, and to read it back.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::model::seeking_disk::DiskModel;

use super::calculation::{Load, Order, write_time};
use super::servers::Servers;
use crate::worker::{self, Outcome, Paced, Striped, Task};
use firn_bench::firn::{Firn, Mount};
use firn_bench::options::WorkDir;
use firn_bench::report::Sample;
use firn_bench::worker::Task as UsualTask;
use firn_bench::{cpu, durable};

/// Bytes that a process sends to servers at a time, at full scale.
const REQUEST_BYTES: u64 = 1 << 20;
/// Bytes that it writes to a disk of its own host at a time. The mean in CRFS's table I is 24 KiB.
const LOCAL_REQUEST_BYTES: u64 = 64 << 10;
/// The paper's stripe, at full scale.
const STRIPE_BYTES: u64 = 64 << 10;
/// At full scale; an arena is no smaller than [`ARENA_BYTES_MIN`] where much is divided.
const ARENA_BYTES: u64 = 1 << 30;
pub(super) const ARENA_BYTES_MIN: u64 = 256 << 20;
const SECONDS: &str = "s at full scale";

/// A way to write.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    pub name: &'static str,
    pub way: Way,
    /// What the calculation assumes.
    pub order: Order,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Each file on all servers.
    Striped,
    /// Each file on one server.
    Whole,
    /// Through Firn with these options more, each after a comma. Over several servers its files are placed.
    Firn(&'static str),
}

/// A checkpoint on servers of which every time and size is a part of the real one's.
#[derive(Clone, Copy, Debug)]
pub struct Checkpoint {
    pub servers: usize,
    pub processes: u64,
    /// Bytes of all images at full scale.
    pub total_bytes: u64,
    /// The part.
    pub divisor: u32,
    /// Processes are in step: the time from one request to the next, at full scale.
    pub interval: Option<Duration>,
}

/// Where and with what it is measured.
pub struct Site<'a> {
    pub work: &'a WorkDir,
    pub firn: &'a Firn,
    /// A directory in memory.
    pub memory: PathBuf,
}

impl Checkpoint {
    fn image_bytes(&self) -> u64 {
        self.total_bytes / u64::from(self.divisor) / self.processes
    }

    fn request_bytes(&self) -> u64 {
        let bytes = match self.servers {
            1 => LOCAL_REQUEST_BYTES,
            _ => REQUEST_BYTES,
        };
        bytes / u64::from(self.divisor)
    }

    fn model(&self) -> DiskModel {
        DiskModel::SATA_2010.scaled(self.divisor)
    }

    fn at_full_scale(&self, time: Duration) -> f64 {
        time.as_secs_f64() * f64::from(self.divisor)
    }

    /// Time of the bytes at the full rate of all disks, in seconds at full scale.
    pub fn bytes_time_s(&self) -> f64 {
        let bytes = self.image_bytes() * self.processes / self.servers as u64;
        self.at_full_scale(self.model().transfer_time(bytes))
    }

    /// Seconds at full scale that the model alone says.
    fn calculated_s(&self, candidate: &Candidate) -> f64 {
        let servers = self.servers as u64;
        let whole = Load {
            files: self.processes / servers,
            bytes: self.image_bytes(),
            request_bytes: self.request_bytes(),
            order: candidate.order,
        };
        let load = match candidate.way {
            Way::Striped => Load {
                files: self.processes,
                bytes: self.image_bytes() / servers,
                request_bytes: self.request_bytes() / servers,
                ..whole
            },
            Way::Whole | Way::Firn(_) => whole,
        };
        self.at_full_scale(write_time(self.model(), load))
    }

    /// Writes it once, to servers of its own.
    pub fn write(&self, candidate: &Candidate, site: &Site<'_>) -> anyhow::Result<Sample> {
        let mut servers = self.start_servers(site)?;
        let written = match candidate.way {
            Way::Firn(options) => {
                let mount = self.mount(options, &servers, site)?;
                let tasks = self.tasks_in(mount.path(), true);
                let outcomes = worker::run_together(Some(&site.firn.preload()?), &tasks)?;
                mount.wait_durable(mount.path())?;
                Written::now(&outcomes)
            }
            way => self.write_natively(way, &servers)?,
        };
        let durable_s = self.at_full_scale(written.durable);
        let sample = vec![
            ("durable", SECONDS, durable_s),
            ("calculated", SECONDS, self.calculated_s(candidate)),
            ("of the bytes' time", "", durable_s / self.bytes_time_s()),
            ("closed", "s", self.at_full_scale(written.closed)),
            ("seeks", "count", servers.seeks()? as f64),
        ];
        self.remove_primary(site);
        Ok(sample)
    }

    /// Writes it, and reads it back `repeats` times.
    pub fn read(
        &self,
        candidate: &Candidate,
        repeats: u32,
        site: &Site<'_>,
    ) -> anyhow::Result<Vec<Sample>> {
        let mut servers = self.start_servers(site)?;
        match candidate.way {
            Way::Firn(options) => {
                let mount = self.mount(options, &servers, site)?;
                worker::run_together(None, &self.tasks_in(mount.path(), true))?;
                mount.wait_durable(mount.path())?;
            }
            way => {
                self.write_natively(way, &servers)?;
            }
        }
        let mut samples = Vec::new();
        for _ in 0..repeats {
            let seeks = servers.seeks()?;
            let outcomes = match candidate.way {
                // As after a crash: nothing is in memory.
                Way::Firn(options) => {
                    let mount = self.mount(options, &servers, site)?;
                    worker::run_together(None, &self.tasks_in(mount.path(), false))?
                }
                way => worker::run_together(None, &self.native_tasks(way, &servers, false))?,
            };
            let read_s = worker::elapsed_s(&outcomes) * f64::from(self.divisor);
            samples.push(vec![
                ("read", SECONDS, read_s),
                ("of the bytes' time", "", read_s / self.bytes_time_s()),
                ("seeks", "count", (servers.seeks()? - seeks) as f64),
            ]);
        }
        self.remove_primary(site);
        Ok(samples)
    }

    fn write_natively(&self, way: Way, servers: &Servers) -> anyhow::Result<Written> {
        let tasks = self.native_tasks(way, servers, true);
        let outcomes = worker::run_together(None, &tasks)?;
        durable::sync_files(tasks.iter().flat_map(paths_of), &servers.paths()[0])?;
        Ok(Written::now(&outcomes))
    }

    fn start_servers(&self, site: &Site<'_>) -> anyhow::Result<Servers> {
        Servers::start(self, &site.memory, site.work)
    }

    fn mount<'a>(
        &self,
        options: &str,
        servers: &Servers,
        site: &Site<'a>,
    ) -> anyhow::Result<Mount<'a>> {
        let point = site.work.subdir("firn")?;
        let paths = servers.paths();
        let arena_bytes = (ARENA_BYTES / u64::from(self.divisor)).max(ARENA_BYTES_MIN);
        let mut options = format!("close=held,fsync=held,arena-size={arena_bytes}{options}");
        let backing = match &paths[..] {
            [only] => only.clone(),
            _ => {
                let lanes = paths.iter().map(|path| path.display().to_string());
                let lanes: Vec<String> = lanes.collect();
                options += &format!(",placement=dirs,lanes={}", lanes.join(":"));
                primary(site)
            }
        };
        let mount = site.firn.mount(&backing, &point, &options)?;
        mount.wait_populated()?;
        Ok(mount)
    }

    fn remove_primary(&self, site: &Site<'_>) {
        let _ = std::fs::remove_dir_all(primary(site));
    }

    /// A process for each image, in one directory.
    fn tasks_in(&self, dir: &Path, write: bool) -> Vec<Task> {
        (0..self.processes)
            .map(|rank| self.task(dir.join(name_of(rank)), write))
            .collect()
    }

    fn native_tasks(&self, way: Way, servers: &Servers, write: bool) -> Vec<Task> {
        let dirs = servers.paths();
        let striped = |rank| {
            Task::Striped(Striped {
                paths: dirs.iter().map(|dir| dir.join(name_of(rank))).collect(),
                stripe_bytes: STRIPE_BYTES / u64::from(self.divisor),
                bytes: self.image_bytes(),
                request_bytes: self.request_bytes(),
                write,
            })
        };
        let whole = |rank| {
            let dir = &dirs[rank as usize % dirs.len()];
            self.task(dir.join(name_of(rank)), write)
        };
        match way {
            Way::Striped => (0..self.processes).map(striped).collect(),
            _ => (0..self.processes).map(whole).collect(),
        }
    }

    fn task(&self, path: PathBuf, write: bool) -> Task {
        let bytes = self.request_bytes();
        let image = self.image_bytes();
        match (write, self.interval) {
            (true, Some(interval)) => Task::Paced(Paced {
                path,
                bytes: image,
                request_bytes: bytes,
                interval: interval / self.divisor,
            }),
            (true, None) => Task::Usual(UsualTask::Write {
                path,
                runs: vec![(image / bytes, bytes), (1, image % bytes)],
                sync: false,
                over: false,
            }),
            (false, _) => Task::Usual(UsualTask::Read {
                path,
                bytes,
                mmap: false,
                passes: 1,
            }),
        }
    }
}

/// How long a checkpoint took.
pub(super) struct Written {
    pub(super) closed: Duration,
    pub(super) durable: Duration,
}

impl Written {
    /// It is durable now.
    pub(super) fn now(outcomes: &[Outcome]) -> Self {
        let begin_ns = outcomes.iter().map(|o| o.begin_ns).min().unwrap_or(0);
        Self {
            closed: Duration::from_secs_f64(worker::elapsed_s(outcomes)),
            durable: Duration::from_nanos(cpu::now_ns() - begin_ns),
        }
    }
}

fn primary(site: &Site<'_>) -> PathBuf {
    site.memory.join("primary")
}

pub(super) fn name_of(rank: u64) -> String {
    format!("rank_{rank}")
}

fn paths_of(task: &Task) -> Vec<&Path> {
    match task {
        Task::Striped(striped) => striped.paths.iter().map(PathBuf::as_path).collect(),
        Task::Usual(UsualTask::Write { path, .. }) | Task::Paced(Paced { path, .. }) => vec![path],
        _ => unreachable!("a checkpoint is written"),
    }
}
