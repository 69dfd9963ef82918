//! `firn bench restart`: measures how fast new processes read a checkpoint back that is held in memory.

mod held;

use std::path::PathBuf;

use crate::firn::{Firn, Mount};
use crate::options::{Common, WorkDir, parse_size, progress};
use crate::report::{Limit, Point, Report, Sample};
use crate::serve::{Mounted, Server};
use crate::worker::{self, Copy, Region, Task, Way, make_region};
use firn_config::size_text;

/// Bytes of a GiB, the unit in the report.
const GIB: f64 = (1u64 << 30) as f64;
/// The part of each process in the shared region begins at a multiple of this, the size of a huge page.
const SLOT_ALIGN: u64 = 2 << 20;
/// Candidate that copies bytes out of shared memory: the upper limit for any program, and the baseline.
const SHARED: &str = "memcpy, shared";
/// Candidate that reads files of a mount with the preload library.
const PRELOAD: &str = "preload";
/// Candidate that reads files of a mount through the kernel.
const MOUNT: &str = "mount";
/// Candidate that reads files on tmpfs through a FUSE server that only passes requests on.
const PLAIN: &str = "tmpfs through FUSE";

/// Reads files back that are held in memory, by new processes, as after a crash.
///
/// The baseline is a memcpy out of a warm shared region that each process maps anew. Goals: at least 0.9 of
/// its rate through the preload library; through the mount at least the rate of a plain FUSE passthrough
/// over files on tmpfs; for a file in a memory file, at least 0.8 of the rate from a warm page cache by
/// read(2), and 0.9 by a mapping.
#[derive(Clone, Debug, clap::Args)]
pub struct RestartArgs {
    #[command(flatten)]
    common: Common,
    /// Numbers of reading processes to try, one file each.
    #[arg(long, value_name = "COUNT,…", value_delimiter = ',', default_value = "1,2,4,8", value_parser = clap::value_parser!(u32).range(1..=256))]
    processes: Vec<u32>,
    /// Block sizes to try: bytes of one read.
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', value_parser = parse_size, default_value = "1M,64K,64M")]
    block_size: Vec<u64>,
    /// Bytes of one file (default: 128M, as in the CRUISE paper; quick 16M).
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
}

/// A way to read the files, for the comparison.
struct RestartCandidate<'a> {
    name: &'static str,
    source: ReadSource<'a>,
}

/// Where the bytes are read.
enum ReadSource<'a> {
    /// A shared region, in this file.
    Shared(PathBuf),
    /// Files in this directory on tmpfs.
    Files(PathBuf),
    /// A FUSE server that only passes requests on to files on tmpfs.
    Plain(Mounted),
    /// A mount of Firn.
    Firn {
        mount: &'a Mount<'a>,
        preload: Option<PathBuf>,
    },
}

impl RestartArgs {
    fn size(&self) -> u64 {
        self.size.unwrap_or(self.common.choose(128 << 20, 16 << 20))
    }

    /// Returns the largest number of reading processes.
    fn processes_max(&self) -> u32 {
        self.processes().into_iter().max().unwrap_or(1)
    }

    /// Returns the numbers of reading processes to measure.
    fn processes(&self) -> Vec<u32> {
        self.processes
            .iter()
            .copied()
            .filter(|count| !self.common.quick || *count <= 2)
            .collect()
    }

    /// Runs the benchmark and returns its figures. Fails if a candidate cannot be set up or measured.
    pub fn run(&self) -> anyhow::Result<Report> {
        let work = self.common.work_dir()?;
        let firn = Firn::find(self.common.firn.as_deref())?;
        let mut report = Report::new("restart");
        report.note(format!(
            "files of {}, each read once, in order, by a process of its own; opening and mapping are part of the time",
            size_text(self.size())
        ));
        report.note(format!(
            "{PLAIN}: a bare fuser server that passes on to tmpfs, page cache as it comes"
        ));
        let mount = if self.common.baseline_only {
            None
        } else {
            Some(self.mount(&firn, &work, "firn", "memory-files=0")?)
        };
        let candidates = self.candidates(&work, &firn, mount.as_ref())?;
        for candidate in &candidates {
            candidate.prepare(self.processes_max(), self.size())?;
        }
        let settings: Vec<(u32, u64)> = self
            .block_size
            .iter()
            .flat_map(|&block| self.processes().into_iter().map(move |n| (n, block)))
            .collect();
        let bar = progress(
            (settings.len() * self.common.repeats() as usize) as u64,
            "restart",
        );
        for (count, block) in settings {
            let mut samples = vec![Vec::new(); candidates.len()];
            for _ in 0..self.common.repeats() {
                for (candidate, samples) in candidates.iter().zip(&mut samples) {
                    samples.push(candidate.measure(count, self.size(), block)?);
                }
                bar.inc(1);
            }
            let plot = format!("blocks of {}", size_text(block));
            let point = Point {
                plot,
                axis: "processes",
                x: count.to_string(),
                order: f64::from(count),
            };
            let name = format!(
                "{count} process{}, blocks of {}",
                if count == 1 { "" } else { "es" },
                size_text(block)
            );
            let names = candidates.iter().map(|candidate| candidate.name.to_owned());
            report.add_points(name, vec![point], names.zip(samples).collect());
        }
        bar.finish_and_clear();
        add_goals(&mut report);
        for candidate in &candidates {
            candidate.remove(self.processes_max())?;
        }
        if !self.common.baseline_only {
            self.measure_held_file(&firn, &work, &mut report)?;
        }
        Ok(report)
    }

    /// Measures the ways to read one file that a mount holds in memory: through firnd, from pages that the kernel
    /// keeps, and from its memory file. Each way needs a mount with other options.
    fn measure_held_file(
        &self,
        firn: &Firn,
        work: &WorkDir,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let plain = self.mount(firn, work, "held", "memory-files=0")?;
        let pages = self.mount(firn, work, "pages", "memory-files=1M,passthrough=off")?;
        let memory = self.mount(firn, work, "memory", "memory-files=1M")?;
        let mounts = held::Mounts {
            plain: &plain,
            pages: &pages,
            memory: &memory,
            preload: firn.preload()?,
        };
        let files = held::Files::prepare(work, mounts, self.size())?;
        files.measure(self.common.repeats(), report)?;
        files.remove()
    }

    /// Mounts Firn with room for all files in memory, and with the additional options `more`.
    fn mount<'a>(
        &self,
        firn: &'a Firn,
        work: &WorkDir,
        name: &str,
        more: &str,
    ) -> anyhow::Result<Mount<'a>> {
        let chunk_bytes = 4 << 20;
        // Room for the files, and for three chunks of each writer that it may fill next. A sixteenth more, because
        // settling, the move of closed files into memory files, leaves a part of the arena free for writers.
        let file_bytes = u64::from(self.processes_max())
            * (self.size().next_multiple_of(chunk_bytes) + 3 * chunk_bytes);
        let arena_bytes = (file_bytes + file_bytes / 16).next_multiple_of(chunk_bytes);
        let options = format!("drain=demand,close=held,fsync=held,arena-size={arena_bytes},{more}");
        let mount = firn.mount(
            &work.subdir(&format!("backing-{name}"))?,
            &work.subdir(name)?,
            &options,
        )?;
        mount.wait_populated()?;
        Ok(mount)
    }

    /// Sets up the candidates, the ways to read that are compared. The first one is the baseline, a copy out of shared
    /// memory. Without `mount`, the candidates on a mount of Firn are left out.
    fn candidates<'a>(
        &self,
        work: &WorkDir,
        firn: &Firn,
        mount: Option<&'a Mount<'a>>,
    ) -> anyhow::Result<Vec<RestartCandidate<'a>>> {
        let memory = firn.memory_dir()?;
        let region = memory.join("region");
        let tmpfs = memory.join("tmpfs");
        let backing = memory.join("plain");
        make_region(
            &region,
            u64::from(self.processes_max()) * self.size().next_multiple_of(SLOT_ALIGN),
        )?;
        std::fs::create_dir(&tmpfs)?;
        std::fs::create_dir(&backing)?;
        let plain = Mounted::start(&Server::Plain { source: backing }, &work.subdir("plain")?)?;
        let mut all = vec![
            RestartCandidate {
                name: SHARED,
                source: ReadSource::Shared(region),
            },
            RestartCandidate {
                name: "tmpfs",
                source: ReadSource::Files(tmpfs),
            },
            RestartCandidate {
                name: PLAIN,
                source: ReadSource::Plain(plain),
            },
        ];
        if let Some(mount) = mount {
            all.push(RestartCandidate {
                name: PRELOAD,
                source: ReadSource::Firn {
                    mount,
                    preload: Some(firn.preload()?),
                },
            });
            all.push(RestartCandidate {
                name: MOUNT,
                source: ReadSource::Firn {
                    mount,
                    preload: None,
                },
            });
        }
        Ok(all)
    }

    /// Returns the options that every benchmark has.
    pub fn common(&self) -> &Common {
        &self.common
    }

    /// Returns the arguments with which `firn bench all` runs this benchmark.
    pub fn with(common: Common) -> Self {
        Self {
            common,
            processes: vec![1, 2, 4, 8],
            block_size: vec![1 << 20, 64 << 10, 64 << 20],
            size: None,
        }
    }
}

/// Adds the goals for the ratios of all cases.
fn add_goals(report: &mut Report) {
    let ratios = |of: &str, to: &str| -> Vec<f64> {
        report
            .cases
            .iter()
            .filter_map(|case| case.ratio(of, to, "throughput"))
            .collect()
    };
    let preload = ratios(PRELOAD, SHARED);
    let mount = ratios(MOUNT, PLAIN);
    report.judge(
        format!("{PRELOAD} to {SHARED}"),
        Limit::Least(0.9),
        &preload,
    );
    report.judge(format!("{MOUNT} to {PLAIN}"), Limit::Least(1.0), &mount);
}

impl RestartCandidate<'_> {
    /// Returns the file that the process `rank` reads. Returns `None` for the shared region.
    fn file(&self, rank: u32) -> Option<PathBuf> {
        let dir = match &self.source {
            ReadSource::Shared(_) => return None,
            ReadSource::Files(dir) => dir.as_path(),
            ReadSource::Plain(mounted) => mounted.path(),
            ReadSource::Firn { mount, .. } => mount.path(),
        };
        Some(dir.join(format!("rank{rank}")))
    }

    fn preload(&self) -> Option<&std::path::Path> {
        match &self.source {
            ReadSource::Firn { preload, .. } => preload.as_deref(),
            _ => None,
        }
    }

    /// Writes the files that are read. The two candidates of a mount share them.
    fn prepare(&self, count: u32, size: u64) -> anyhow::Result<()> {
        let files: Vec<PathBuf> = (0..count).filter_map(|rank| self.file(rank)).collect();
        let runs = vec![(size >> 20, 1 << 20)];
        let task = |path: &PathBuf| Task::Write {
            path: path.clone(),
            runs: runs.clone(),
            sync: false,
            over: false,
        };
        let missing: Vec<Task> = files
            .iter()
            .filter(|path| !path.exists())
            .map(task)
            .collect();
        worker::run_with(self.preload(), &missing).map(drop)
    }

    /// Lets `count` processes read one file each, with `block` bytes in each read.
    fn measure(&self, count: u32, size: u64, block: u64) -> anyhow::Result<Sample> {
        let task = |rank| match (&self.source, self.file(rank)) {
            (ReadSource::Shared(path), _) => {
                let offset = u64::from(rank) * size.next_multiple_of(SLOT_ALIGN);
                let region = Region::Shared {
                    path: path.clone(),
                    offset,
                };
                Task::Copy(Copy {
                    region,
                    way: Way::Out,
                    bytes: size,
                    block_bytes: block,
                })
            }
            (_, path) => {
                let path = path.expect("everything else is a file");
                Task::Read {
                    path,
                    bytes: block,
                    mmap: false,
                    passes: 1,
                }
            }
        };
        let tasks: Vec<Task> = (0..count).map(task).collect();
        let server_cpu_s = || match &self.source {
            ReadSource::Plain(mounted) => crate::cpu::seconds_of(mounted.pid()),
            ReadSource::Firn { mount, .. } => mount.cpu_s(),
            _ => 0.0,
        };
        let before = server_cpu_s();
        let outcomes = worker::run_with(self.preload(), &tasks)?;
        let cpu_s = server_cpu_s() - before + outcomes.iter().map(|o| o.cpu_s).sum::<f64>();
        let gib = f64::from(count) * size as f64 / GIB;
        Ok(vec![
            ("throughput", "GiB/s", gib / worker::elapsed_s(&outcomes)),
            ("CPU", "s/GiB", cpu_s / gib),
        ])
    }

    /// Removes the files. Otherwise the mount would drain them at its end.
    fn remove(&self, count: u32) -> anyhow::Result<()> {
        for path in (0..count).filter_map(|rank| self.file(rank)) {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error.into());
                }
                _ => {}
            }
        }
        Ok(())
    }
}
