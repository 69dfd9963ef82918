//! `firn-lab alternatives`: Firn beside what one would use instead, where a checkpoint ends up on the local file
//! system, over sshfs, and in MooseFS.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use firn_config::size_text;

use firn_bench::backing::{self, Kind, Slowness};
use firn_bench::cpu;
use firn_bench::durable;
use firn_bench::firn::{Firn, Mount};
use firn_bench::machine::{private_bytes, unwritten_bytes};
use firn_bench::options::{Common, WorkDir, parse_size, progress};
use firn_bench::report::{Report, Sample};
use firn_bench::serve::{Mounted, Server};
use firn_bench::sizes;
use firn_bench::worker::{self, Task};

const MIB: f64 = (1 << 20) as f64;
const READ_BYTES: u64 = 1 << 20;

/// Puts Firn beside what you would use instead: a checkpoint and a restart on each.
///
/// Each process writes one image with the write sizes of table I of the CRFS paper, and reads it back in
/// blocks of 1M. The checkpoint ends up on the file system of --dir, over sshfs, and in MooseFS. Each time
/// it is written straight to that file system, to tmpfs with a `cp` after it, through a plain FUSE
/// passthrough (local only), and through Firn: with close=held, with the preload library, and with
/// drain=demand, where the files stay in memory for a restart.
///
/// closed: until the last close returned, when the job computes on. durable: until everything is synced
/// where it ends up. restart: reading everything back after that, from whatever memory still has it;
/// cold restart: after the kernel dropped its caches (root only). memory: what the kernel could not take
/// back when the last close returned, which is files on tmpfs, Firn's arena, unwritten pages and the
/// server's own. CPU: programs, cp, firnd and the passthrough, from the first write until durable.
#[derive(Clone, Debug, clap::Args)]
pub struct AlternativesArgs {
    #[command(flatten)]
    common: Common,
    /// Where the checkpoints end up (default: all of local, sshfs-async and, for root, moosefs).
    #[arg(long, value_enum, value_delimiter = ',')]
    backing: Vec<Kind>,
    /// Processes, one image each.
    #[arg(long, value_name = "COUNT", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    processes: u32,
    /// Bytes of one image (default: 64M; quick 7M).
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    image_size: Option<u64>,
    /// Time added to each network round trip of sshfs, in microseconds.
    #[arg(long, value_name = "US", default_value_t = 500)]
    round_trip_us: u64,
    /// Seed of the sizes and their order.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl AlternativesArgs {
    /// Runs it.
    pub fn run(&self) -> anyhow::Result<Report> {
        let mut report = Report::new("alternatives");
        let processes = self.processes;
        let seed = self.seed;
        report.note(format!(
            "{processes} processes, write sizes of CRFS table I, seed {seed}; read back in blocks of 1M"
        ));
        report.note(
            "CPU: programs, cp, firnd and the passthrough; not sshfs, sshd, MooseFS and the kernel",
        );
        for kind in self.backings() {
            self.measure_on(kind, &mut report)?;
        }
        Ok(report)
    }

    fn backings(&self) -> Vec<Kind> {
        if !self.backing.is_empty() {
            return self.backing.clone();
        }
        let mut all = vec![Kind::Local, Kind::SshfsAsync];
        if is_root() {
            all.push(Kind::Moosefs);
        }
        all
    }

    fn image_bytes(&self) -> u64 {
        self.image_size
            .unwrap_or_else(|| self.common.choose(64 << 20, 7 << 20))
    }

    fn measure_on(&self, kind: Kind, report: &mut Report) -> anyhow::Result<()> {
        let work = self.common.work_dir()?;
        let slowness = Slowness {
            round_trip_us: self.round_trip_us,
            writes_per_s: 0,
        };
        let prepared = backing::prepare(kind, slowness, &work)?;
        report.note(prepared.note.clone());
        let firn = Firn::find(self.common.firn.as_deref())?;
        let candidates = self.candidates(kind, &prepared.dir, &work, &firn)?;
        let name = format!(
            "{} images of {}, {}",
            self.processes,
            size_text(self.image_bytes()),
            kind.name()
        );
        let steps = candidates.len() * self.common.repeats() as usize;
        let bar = progress(steps as u64, "alternatives");
        let mut samples = vec![Vec::new(); candidates.len()];
        for _ in 0..self.common.repeats() {
            for (candidate, samples) in candidates.iter().zip(&mut samples) {
                bar.set_message(format!("{name}, {}", candidate.name));
                samples.push(self.measure(candidate)?);
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        let names = candidates.iter().map(|candidate| candidate.name.to_owned());
        report.add(name, names.zip(samples).collect());
        Ok(())
    }

    fn candidates<'a>(
        &self,
        kind: Kind,
        end: &Path,
        work: &WorkDir,
        firn: &'a Firn,
    ) -> anyhow::Result<Vec<Candidate<'a>>> {
        let subdir = |name: &str| -> anyhow::Result<PathBuf> {
            let dir = end.join(name);
            std::fs::create_dir(&dir)?;
            Ok(dir)
        };
        let mut all = vec![Candidate::new(
            "directly",
            subdir("direct")?,
            Through::Nothing,
        )];
        let staging = firn.memory_dir()?.join(format!("tmpfs-{}", kind.name()));
        std::fs::create_dir(&staging)?;
        all.push(Candidate::new(
            "tmpfs, then cp",
            subdir("copied")?,
            Through::Copy(staging),
        ));
        if kind == Kind::Local {
            let source = subdir("plain")?;
            let server = Server::Plain {
                source: source.clone(),
            };
            let mounted = Mounted::start(&server, &work.subdir("plain-mount")?)?;
            all.push(Candidate::new(
                "plain FUSE passthrough",
                source,
                Through::Passthrough(mounted),
            ));
        }
        if self.common.baseline_only {
            return Ok(all);
        }
        // Room for all images, and a chunk that each writer fills.
        let arena_bytes = u64::from(self.processes) * (self.image_bytes() + (12 << 20));
        for (name, dir, options, preload) in [
            ("firn", "held", "close=held", None),
            (
                "firn + preload",
                "held-preload",
                "close=held",
                Some(firn.preload()?),
            ),
            (
                "firn + preload, drain=demand",
                "demand",
                "close=held,drain=demand",
                Some(firn.preload()?),
            ),
        ] {
            let behind = subdir(dir)?;
            let point = work.path().join(format!("mount-{dir}"));
            let options = format!("{options},arena-size={arena_bytes}");
            let mount = firn.mount(&behind, &point, &options)?;
            mount.wait_populated()?;
            let through = Through::Firn { mount, preload };
            all.push(Candidate::new(name, behind, through));
        }
        Ok(all)
    }

    fn measure(&self, candidate: &Candidate) -> anyhow::Result<Sample> {
        let dir = candidate.dir().join("step");
        std::fs::create_dir(&dir)?;
        let paths: Vec<PathBuf> = (0..self.processes)
            .map(|rank| dir.join(format!("rank{rank}")))
            .collect();
        // What earlier measurements left dirty must not be written in this one's time.
        durable::sync_all(&candidate.end)?;
        let unwritten_before = unwritten_bytes()?;
        let server_before_s = candidate.server_cpu_s();
        let writers = worker::run_with(candidate.preload(), &self.writes(&paths))?;
        let unwritten = unwritten_bytes()?.saturating_sub(unwritten_before);
        let memory = candidate.held_bytes(&dir)? + unwritten;
        let copy_cpu_s = candidate.make_durable(&dir)?;
        let durable_ns = cpu::now_ns();
        let server_cpu_s = candidate.server_cpu_s() - server_before_s;
        let warm = worker::run_with(candidate.preload(), &reads(&paths))?;
        let begin_ns = writers.iter().map(|o| o.begin_ns).min().unwrap_or(0);
        let cpu_s: f64 = writers.iter().map(|o| o.cpu_s).sum();
        let mut sample = vec![
            ("closed", "s", worker::elapsed_s(&writers)),
            ("durable", "s", (durable_ns - begin_ns) as f64 * 1e-9),
            ("restart", "s", worker::elapsed_s(&warm)),
        ];
        if is_root() {
            std::fs::write("/proc/sys/vm/drop_caches", "3")?;
            let cold = worker::run_with(candidate.preload(), &reads(&paths))?;
            sample.push(("cold restart", "s", worker::elapsed_s(&cold)));
        }
        sample.push(("memory", "MiB", memory as f64 / MIB));
        sample.push(("CPU", "s", cpu_s + copy_cpu_s + server_cpu_s));
        candidate.remove(&dir)?;
        Ok(sample)
    }

    fn writes(&self, paths: &[PathBuf]) -> Vec<Task> {
        let image = self.image_bytes();
        let runs = |rank| {
            let sizes = sizes::of_image(image, self.seed + rank);
            sizes.into_iter().map(|bytes| (1, bytes)).collect()
        };
        let write = |(rank, path): (u64, &PathBuf)| Task::Write {
            path: path.clone(),
            runs: runs(rank),
            sync: false,
            over: false,
        };
        (0..).zip(paths).map(write).collect()
    }

    /// Options that every benchmark has.
    pub fn common(&self) -> &Common {
        &self.common
    }
}

fn reads(paths: &[PathBuf]) -> Vec<Task> {
    let read = |path: &PathBuf| Task::Read {
        path: path.clone(),
        bytes: READ_BYTES,
        mmap: false,
        passes: 1,
    };
    paths.iter().map(read).collect()
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

struct Candidate<'a> {
    name: &'static str,
    /// Where its checkpoints end up.
    end: PathBuf,
    through: Through<'a>,
}

/// What programs write to.
enum Through<'a> {
    /// Where the checkpoint ends up.
    Nothing,
    /// A directory on tmpfs, from which it is copied.
    Copy(PathBuf),
    Passthrough(Mounted),
    Firn {
        mount: Mount<'a>,
        /// A library that the processes load.
        preload: Option<PathBuf>,
    },
}

impl<'a> Candidate<'a> {
    fn new(name: &'static str, end: PathBuf, through: Through<'a>) -> Self {
        Self { name, end, through }
    }

    fn dir(&self) -> &Path {
        match &self.through {
            Through::Nothing => &self.end,
            Through::Copy(staging) => staging,
            Through::Passthrough(mounted) => mounted.path(),
            Through::Firn { mount, .. } => mount.path(),
        }
    }

    fn preload(&self) -> Option<&Path> {
        match &self.through {
            Through::Firn { preload, .. } => preload.as_deref(),
            _ => None,
        }
    }

    fn server_cpu_s(&self) -> f64 {
        match &self.through {
            Through::Nothing | Through::Copy(_) => 0.0,
            Through::Passthrough(mounted) => cpu::seconds_of(mounted.pid()),
            Through::Firn { mount, .. } => mount.cpu_s(),
        }
    }

    /// Memory that its files and its server take and the kernel cannot take back; unwritten pages apart.
    fn held_bytes(&self, dir: &Path) -> anyhow::Result<u64> {
        match &self.through {
            Through::Nothing => Ok(0),
            Through::Copy(_) => allocated_bytes_below(dir),
            Through::Passthrough(mounted) => private_bytes(mounted.pid()),
            Through::Firn { mount, .. } => {
                Ok(allocated_bytes(&mount.arena()?)? + mount.private_bytes()?)
            }
        }
    }

    /// Returns the processor time of the programs that it takes, in seconds.
    fn make_durable(&self, dir: &Path) -> anyhow::Result<f64> {
        match &self.through {
            Through::Firn { mount, .. } => {
                mount.wait_durable(dir)?;
                return Ok(0.0);
            }
            Through::Nothing | Through::Passthrough(_) => {
                sync_tree(dir)?;
                return Ok(0.0);
            }
            Through::Copy(_) => {}
        }
        let before = cpu::seconds_of_children();
        let status = Command::new("cp")
            .arg("-r")
            .args([dir, &self.end])
            .status()
            .context("cannot run cp")?;
        ensure!(status.success(), "cp failed (its message is above)");
        let copied = cpu::seconds_of_children() - before;
        sync_tree(&self.end.join("step"))?;
        Ok(copied)
    }

    fn remove(&self, dir: &Path) -> anyhow::Result<()> {
        std::fs::remove_dir_all(dir)?;
        match &self.through {
            Through::Copy(_) => std::fs::remove_dir_all(self.end.join("step"))?,
            Through::Firn { mount, .. } => mount.wait_empty()?,
            Through::Nothing | Through::Passthrough(_) => {}
        }
        Ok(())
    }
}

/// fsync of all files of a directory at once, then of the directory.
fn sync_tree(dir: &Path) -> anyhow::Result<()> {
    let files = files_of(dir)?;
    durable::sync_files(files.iter().map(PathBuf::as_path), dir)
}

fn files_of(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir)?;
    let paths: Result<_, _> = entries
        .map(|entry| entry.map(|entry| entry.path()))
        .collect();
    Ok(paths?)
}

fn allocated_bytes_below(dir: &Path) -> anyhow::Result<u64> {
    files_of(dir)?
        .iter()
        .map(|path| allocated_bytes(path))
        .sum()
}

fn allocated_bytes(path: &Path) -> anyhow::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(std::fs::metadata(path)?.blocks() * 512)
}
