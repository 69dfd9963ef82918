//! How long logs that lie in two lanes take to become plain files, by one host and by two.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::ensure;

use super::host_name;
use crate::serve::{Mounted, Server};
use crate::worker::{self, Blocks, Pattern, Task};
use firn_bench::firn::{Firn, Mount};
use firn_bench::options::{Common, WorkDir};
use firn_bench::report::{Limit, Report, Sample};

const LANES: usize = 2;
const HOSTS: usize = 2;
/// A file lies whole in one lane, so one alone is as slow as its lane.
const FILES: u64 = 8;
/// Of one client, at a time.
const BLOCK_BYTES: u64 = 64 << 10;
/// Requests that a lane serves at a time.
const THREADS: usize = 16;

const ONE: &str = "one host";
const TWO: &str = "two hosts";
const FLATTENED: &str = "flattened";
/// The goal, of the time that one host takes.
const TWO_HOSTS_MOST: f64 = 0.6;

/// Flattens files that two hosts wrote, whose logs and plain files lie in two lanes: models of a disk. Each file has
/// `blocks` blocks of each host.
pub fn measure(
    report: &mut Report,
    common: &Common,
    divisor: u32,
    blocks: u64,
    work: &WorkDir,
    firn: &Firn,
) -> anyhow::Result<()> {
    let lanes = Lanes::start(divisor, work, firn)?;
    let hosts: Vec<Firn> = (0..HOSTS)
        .map(|host| firn.on_host(&host_name(host as u32)))
        .collect();
    let mut samples = [ONE, TWO].map(|name| (name.to_owned(), Vec::new()));
    for _ in 0..common.repeats() {
        for (count, (_, samples)) in (1..).zip(&mut samples) {
            let seconds = lanes.flatten(&hosts, count, blocks)?;
            let sample: Sample = vec![(FLATTENED, "s", seconds * f64::from(divisor))];
            samples.push(sample);
        }
    }
    let bytes = FILES * HOSTS as u64 * blocks * BLOCK_BYTES;
    report.note(format!(
        "lanes: two, each a MODEL of a SATA disk of 2010 (8.5 ms a seek, 80 MB/s); {FILES} files, {} MB in all, written strided by two hosts; times and sizes divided by {divisor}, shown at full scale",
        bytes * u64::from(divisor) / 1_000_000
    ));
    report.add("logs in two lanes, flattened", samples.into());
    let case = report.cases.last().expect("it was added");
    let ratio = case.ratio(TWO, ONE, FLATTENED);
    report.judge(
        "logs in two lanes, flattened by two hosts to one",
        Limit::Most(TWO_HOSTS_MOST),
        ratio.as_slice(),
    );
    Ok(())
}

/// Two lanes, and a primary that costs nothing.
struct Lanes {
    mounts: Vec<Mounted>,
    sources: Vec<PathBuf>,
    dir: PathBuf,
}

impl Lanes {
    fn start(divisor: u32, work: &WorkDir, firn: &Firn) -> anyhow::Result<Self> {
        let memory = firn.memory_dir()?;
        let mut lanes = Self {
            mounts: Vec::new(),
            sources: Vec::new(),
            dir: work.subdir("placed")?,
        };
        for number in 0..LANES {
            let source = memory.join(format!("lane{number}"));
            std::fs::create_dir_all(&source)?;
            lanes.sources.push(source.clone());
            let point = work.subdir(&format!("lane{number}"))?;
            let server = Server::SeekingDisk {
                source,
                divisor,
                threads: THREADS,
            };
            lanes.mounts.push(Mounted::start(&server, &point)?);
        }
        Ok(lanes)
    }

    /// Seconds until all files are plain, when the first `count` hosts flatten them.
    fn flatten(&self, hosts: &[Firn], count: usize, blocks: u64) -> anyhow::Result<f64> {
        let backing = self.dir.join("backing");
        let mut mounts = Vec::new();
        for (host, firn) in (0..).zip(hosts) {
            mounts.push(self.mount(firn, &backing, host)?);
        }
        for file in 0..FILES {
            write(&mounts, &format!("shared{file}"), blocks)?;
        }
        let begin = Instant::now();
        let rest = mounts.split_off(count);
        std::thread::scope(|scope| {
            for mount in mounts {
                scope.spawn(move || drop(mount));
            }
        });
        let seconds = begin.elapsed().as_secs_f64();
        drop(rest);
        for file in 0..FILES {
            let plain = std::fs::metadata(backing.join(format!("shared{file}")))?.len();
            let bytes = hosts.len() as u64 * blocks * BLOCK_BYTES;
            ensure!(plain == bytes, "a flat file has {plain} of {bytes} bytes");
        }
        self.clear(&backing)?;
        Ok(seconds)
    }

    fn mount<'a>(&self, firn: &'a Firn, backing: &Path, host: u32) -> anyhow::Result<Mount<'a>> {
        let lanes = self.mounts.iter().map(|lane| lane.path().to_string_lossy());
        let options = format!(
            "arena-size=256M,layout=log,flatten=demand,attr-timeout=0,host={},placement=dirs,lanes={}",
            host_name(host),
            lanes.collect::<Vec<_>>().join(":")
        );
        firn.mount(backing, &self.dir.join(host_name(host)), &options)
    }

    /// The lanes belong to no primary any more.
    fn clear(&self, backing: &Path) -> anyhow::Result<()> {
        std::fs::remove_dir_all(backing)?;
        for lane in &self.mounts {
            for entry in std::fs::read_dir(lane.path())? {
                std::fs::remove_file(entry?.path())?;
            }
        }
        Ok(())
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.mounts.clear();
        for source in &self.sources {
            let _ = std::fs::remove_dir_all(source);
        }
    }
}

/// Writes a file, of which each host has every other block, and syncs it.
fn write(mounts: &[Mount<'_>], name: &str, blocks: u64) -> anyhow::Result<()> {
    drop(File::create(mounts[0].path().join(name))?);
    let clients = mounts.len() as u64;
    let task = |(client, mount): (u64, &Mount<'_>)| {
        Task::Blocks(Blocks {
            path: mount.path().join(name),
            pattern: Pattern::Strided,
            block_bytes: BLOCK_BYTES,
            count: blocks,
            clients,
            client,
            write: true,
        })
    };
    let tasks: Vec<Task> = (0..).zip(mounts).map(task).collect();
    worker::run_together(None, &tasks).map(drop)
}
