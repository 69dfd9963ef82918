//! The ways to put bytes where other processes find them, each as a candidate.

use std::path::PathBuf;

use rustix::mount::{MountFlags, mount};

use super::Setting;
use firn_bench::firn::{Firn, Mount};
use firn_bench::options::{Common, WorkDir};
use firn_bench::report::{Report, Sample};
use firn_bench::worker::{self, Copy, Outcome, Region, Task, Way, make_region};
use firn_testfs::cleanup::{Guard, Leftover, expect};

const GIB: f64 = (1u64 << 30) as f64;
/// The baseline.
pub const SHARED: &str = "memcpy, shared";
/// What programs that know nothing of Firn use otherwise.
pub const TMPFS: &str = "tmpfs, new file";
/// The library.
pub const PRELOAD: &str = "preload";
/// Blocks below are timed one by one, and are fewer where each costs a trip through FUSE.
const COUNTED_BLOCK_BYTES: u64 = 64 << 10;
const FUSE_SHARE: u64 = 16;

/// What is there for all settings: directories, the region, the library.
pub struct Targets {
    region: PathBuf,
    tmpfs: PathBuf,
    /// Where one could be mounted.
    huge: Option<PathBuf>,
    preload: Option<PathBuf>,
    _unmount: Option<Guard>,
}

/// One way.
pub struct Candidate<'a> {
    pub name: &'static str,
    target: WriteTarget<'a>,
}

enum WriteTarget<'a> {
    Private,
    Shared(PathBuf),
    Files {
        dir: PathBuf,
        over: bool,
    },
    Firn {
        mount: &'a Mount<'a>,
        preload: Option<PathBuf>,
    },
}

impl Targets {
    /// Makes them; the region has `region_bytes`.
    pub fn new(
        common: &Common,
        firn: &Firn,
        work: &WorkDir,
        region_bytes: u64,
        report: &mut Report,
    ) -> anyhow::Result<Self> {
        let memory = firn.memory_dir()?;
        let region = memory.join("region");
        make_region(&region, region_bytes)?;
        let tmpfs = memory.join("tmpfs");
        std::fs::create_dir(&tmpfs)?;
        let (huge, _unmount) = match mount_huge(work)? {
            Some((dir, guard)) => (Some(dir), Some(guard)),
            None => {
                report.note("no tmpfs with huge=always: only root may mount one");
                (None, None)
            }
        };
        let preload = if common.baseline_only {
            None
        } else {
            Some(firn.preload()?)
        };
        Ok(Self {
            region,
            tmpfs,
            huge,
            preload,
            _unmount,
        })
    }

    /// The baseline first.
    pub fn candidates<'a>(&self, firn: Option<&'a Mount<'a>>) -> Vec<Candidate<'a>> {
        let files = |dir: &PathBuf, over| WriteTarget::Files {
            dir: dir.clone(),
            over,
        };
        let mut all = vec![
            Candidate {
                name: SHARED,
                target: WriteTarget::Shared(self.region.clone()),
            },
            Candidate {
                name: "memcpy, private",
                target: WriteTarget::Private,
            },
            Candidate {
                name: TMPFS,
                target: files(&self.tmpfs, false),
            },
            Candidate {
                name: "tmpfs, overwrite",
                target: files(&self.tmpfs, true),
            },
        ];
        if let Some(huge) = &self.huge {
            all.push(Candidate {
                name: "tmpfs, huge=always",
                target: files(huge, false),
            });
        }
        if let Some(mount) = firn {
            let preload = self.preload.clone();
            all.push(Candidate {
                name: PRELOAD,
                target: WriteTarget::Firn { mount, preload },
            });
            all.push(Candidate {
                name: "mount",
                target: WriteTarget::Firn {
                    mount,
                    preload: None,
                },
            });
        }
        all
    }
}

fn mount_huge(work: &WorkDir) -> anyhow::Result<Option<(PathBuf, Guard)>> {
    let dir = work.subdir("huge")?;
    let guard = expect(Leftover::Mount(dir.clone()));
    let options = c"huge=always,mode=700";
    match mount(c"firn-bench", &dir, c"tmpfs", MountFlags::empty(), options) {
        Ok(()) => Ok(Some((dir, guard))),
        Err(_) => Ok(None),
    }
}

impl Candidate<'_> {
    /// Writes one round, and removes it again.
    pub fn measure(&self, setting: &Setting) -> anyhow::Result<Sample> {
        let trips = matches!(self.target, WriteTarget::Firn { preload: None, .. });
        let share = if trips && setting.block_bytes < COUNTED_BLOCK_BYTES {
            FUSE_SHARE
        } else {
            1
        };
        let count = (setting.bytes / setting.block_bytes / share).max(1);
        let tasks: Vec<Task> = (0..setting.processes)
            .map(|rank| self.task(rank, count, setting.block_bytes))
            .collect();
        if let WriteTarget::Files { over: true, .. } = self.target {
            worker::run_all(&tasks)?;
        }
        let (preload, server) = match &self.target {
            WriteTarget::Firn { mount, preload } => (preload.as_deref(), Some(*mount)),
            _ => (None, None),
        };
        let cpu_before = server.map_or(0.0, Mount::cpu_s);
        let outcomes = worker::run_with(preload, &tasks)?;
        let server_cpu_s = server.map_or(0.0, Mount::cpu_s) - cpu_before;
        self.remove(&tasks)?;
        Ok(sample(setting, count, &outcomes, server_cpu_s))
    }

    fn task(&self, rank: u32, count: u64, block_bytes: u64) -> Task {
        let bytes = count * block_bytes;
        let copy = |region| {
            Task::Copy(Copy {
                region,
                way: Way::In,
                bytes,
                block_bytes,
            })
        };
        let write = |path, over| Task::Write {
            path,
            runs: vec![(count, block_bytes)],
            sync: false,
            over,
        };
        let name = format!("rank{rank}");
        match &self.target {
            WriteTarget::Private => copy(Region::Private),
            WriteTarget::Shared(path) => {
                let offset = u64::from(rank) * bytes.next_multiple_of(2 << 20);
                copy(Region::Shared {
                    path: path.clone(),
                    offset,
                })
            }
            WriteTarget::Files { dir, over } => write(dir.join(name), *over),
            WriteTarget::Firn { mount, .. } => write(mount.path().join(name), false),
        }
    }

    fn remove(&self, tasks: &[Task]) -> anyhow::Result<()> {
        for task in tasks {
            if let Task::Write { path, .. } = task {
                std::fs::remove_file(path)?;
            }
        }
        match &self.target {
            // The next round finds the same chunks free.
            WriteTarget::Firn { mount, .. } => mount.wait_empty(),
            _ => Ok(()),
        }
    }
}

fn sample(setting: &Setting, count: u64, outcomes: &[Outcome], server_cpu_s: f64) -> Sample {
    let processes = outcomes.len() as f64;
    let gib = processes * (count * setting.block_bytes) as f64 / GIB;
    let cpu_s: f64 = outcomes.iter().map(|o| o.cpu_s).sum();
    let mut sample = vec![
        ("throughput", "GiB/s", gib / worker::elapsed_s(outcomes)),
        ("CPU", "s/GiB", (cpu_s + server_cpu_s) / gib),
    ];
    if setting.block_bytes < COUNTED_BLOCK_BYTES {
        let each = |o: &Outcome| (o.end_ns - o.begin_ns) as f64 / count as f64;
        sample.push((
            "each",
            "ns",
            outcomes.iter().map(each).sum::<f64>() / processes,
        ));
    }
    sample
}
