//! One file written by several clients in one way, and read back.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::ensure;
use firn_config::size_text;
use firn_testfs::run;

use super::host_name;
use super::site::Site;
use super::touch_free_memory;
use crate::worker::{self, Blocks, Pattern, Task};
use firn_bench::firn::{Firn, Mount};
use firn_bench::report::Sample;

pub const WRITTEN: &str = "written";
pub const READ: &str = "read";
pub const READ_BY_OTHERS: &str = "read by others";
/// For the logs: flattened.
pub const COPIED: &str = "copied or flattened";
pub const RATE: &str = "MB/s";

/// The file.
const NAME: &str = "shared";
const ARENA: &str = "arena-size=128M";

/// A way to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Layout {
    /// To the file system itself.
    Native,
    /// Through Firn, to the file.
    Plain,
    /// Through Firn, to logs.
    Log,
    /// Through Firn, to logs that are flattened behind the close, as by default.
    LogBehind,
}

impl Layout {
    /// Those of the figures.
    pub const ALL: [Self; 3] = [Self::Native, Self::Plain, Self::Log];

    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Plain => "Firn, plain",
            Self::Log => "Firn, logs",
            Self::LogBehind => "Firn, logs, flattened behind",
        }
    }
}

/// What is written, at full scale.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub clients: u32,
    pub block_bytes: u64,
    /// Blocks of each client.
    pub objects: u64,
}

/// What was measured, at full scale.
#[derive(Clone, Debug)]
pub struct Figures {
    /// Bytes a second.
    written: f64,
    reads: Option<Reads>,
    /// Seeks or changes of owners while it was written.
    delays: u64,
    /// Seconds until a copy of it was durable, or until it was flat.
    copied_s: Option<f64>,
    /// When it is flat.
    flat: Option<Reads>,
}

/// Bytes a second.
#[derive(Clone, Copy, Debug)]
struct Reads {
    /// By the clients that wrote them.
    own: f64,
    by_others: f64,
}

impl Reads {
    fn sample(&self) -> Sample {
        vec![
            (READ, RATE, self.own / 1e6),
            (READ_BY_OTHERS, RATE, self.by_others / 1e6),
        ]
    }
}

impl Figures {
    /// As the report has them.
    pub fn sample(&self) -> Sample {
        let mut sample = vec![(WRITTEN, RATE, self.written / 1e6)];
        sample.extend(self.reads.iter().flat_map(Reads::sample));
        sample.push(("waits while writing", "count", self.delays as f64));
        sample.extend(self.copied_s.map(|seconds| (COPIED, "s", seconds)));
        sample
    }

    /// Of the flat file.
    pub fn flat_sample(&self) -> Option<Sample> {
        self.flat.as_ref().map(Reads::sample)
    }
}

impl Job {
    /// Writes it and reads it, once.
    pub fn run(&self, layout: Layout, site: &mut Site, hosts: &[Firn]) -> anyhow::Result<Figures> {
        site.begin_run()?;
        File::create(site.dir(0).join(NAME))?;
        match layout {
            Layout::Native => self.run_natively(site),
            Layout::Plain | Layout::Log | Layout::LogBehind => {
                self.run_through_firn(layout, site, hosts)
            }
        }
    }

    fn run_natively(&self, site: &mut Site) -> anyhow::Result<Figures> {
        let dirs: Vec<PathBuf> = (0..self.clients)
            .map(|client| site.dir(client).to_owned())
            .collect();
        let (written, delays) = self.write(&dirs, None, site)?;
        let reads = self.read_both(&dirs, None, site)?;
        touch_free_memory(self.memory_on(site));
        let copied_s = site.has_one_mount().then(|| copy(&dirs[0])).transpose()?;
        Ok(Figures {
            written,
            reads,
            delays,
            copied_s,
            flat: None,
        })
    }

    fn run_through_firn(
        &self,
        layout: Layout,
        site: &mut Site,
        hosts: &[Firn],
    ) -> anyhow::Result<Figures> {
        let mut mounts = self.mount(layout, site, hosts)?;
        let library = hosts[0].preload()?;
        let (written, delays) = self.write(&self.points(&mounts), Some(&library), site)?;
        let library = Some(&*library);
        if layout == Layout::Plain {
            // Else a host may not know what others wrote. What lies in logs would be flat.
            drop(mounts);
            mounts = self.mount(layout, site, hosts)?;
        }
        let points = self.points(&mounts);
        let mut figures = Figures {
            written,
            reads: self.read_both(&points, library, site)?,
            delays,
            copied_s: None,
            flat: None,
        };
        if layout == Layout::LogBehind {
            mounts[0].wait_until_level("drained", &points[0].join(NAME))?;
        }
        if layout == Layout::Log {
            touch_free_memory(self.memory_on(site));
            let begin = Instant::now();
            mounts[0].flatten(&points[0].join(NAME))?;
            figures.copied_s = Some(site.at_full_scale(begin.elapsed().as_secs_f64()));
            drop(mounts);
            let plain = std::fs::metadata(site.dir(0).join(NAME))?.len();
            ensure!(
                plain == self.bytes_on(site),
                "the flat file has {plain} of {} bytes",
                self.bytes_on(site)
            );
            let mounts = self.mount(layout, site, hosts)?;
            figures.flat = self.read_both(&self.points(&mounts), library, site)?;
        }
        Ok(figures)
    }

    fn mount<'a>(
        &self,
        layout: Layout,
        site: &Site,
        hosts: &'a [Firn],
    ) -> anyhow::Result<Vec<Mount<'a>>> {
        // Two firnd with the plain layout do not share a directory of one kernel.
        let count = if layout == Layout::Plain && site.has_one_mount() {
            1
        } else {
            hosts.len()
        };
        let mount = |(client, host): (u32, &'a Firn)| {
            let options = match layout {
                Layout::Log => format!(
                    "{ARENA},layout=log,flatten=demand,host={}",
                    host_name(client)
                ),
                Layout::LogBehind => format!("{ARENA},layout=log,host={}", host_name(client)),
                _ => ARENA.to_owned(),
            };
            let backing = site.dir(client);
            let name = format!("firn-{}", host_name(client));
            let point = backing.parent().unwrap_or(backing).join("..").join(name);
            std::fs::create_dir_all(&point)?;
            let mount = host.mount(backing, &point.canonicalize()?, &options)?;
            mount.wait_populated()?;
            Ok(mount)
        };
        (0..).zip(&hosts[..count]).map(mount).collect()
    }

    /// Where each client has the file.
    fn points(&self, mounts: &[Mount<'_>]) -> Vec<PathBuf> {
        let points = mounts.iter().map(|mount| mount.path().to_owned()).cycle();
        points.take(self.clients as usize).collect()
    }

    /// Bytes a second, and how often the model made a client wait.
    fn write(
        &self,
        dirs: &[PathBuf],
        library: Option<&Path>,
        site: &mut Site,
    ) -> anyhow::Result<(f64, u64)> {
        let delays = site.delays()?;
        touch_free_memory(self.memory_on(site));
        let tasks = self.tasks(dirs, 0, true, site);
        let outcomes = worker::run_together(library, &tasks)?;
        let rate = self.rate(worker::elapsed_s(&outcomes), site);
        Ok((rate, site.delays()? - delays))
    }

    fn read_both(
        &self,
        dirs: &[PathBuf],
        library: Option<&Path>,
        site: &Site,
    ) -> anyhow::Result<Option<Reads>> {
        if !site.has_reads() {
            return Ok(None);
        }
        Ok(Some(Reads {
            own: self.read(dirs, 0, library, site)?,
            by_others: self.read(dirs, 1, library, site)?,
        }))
    }

    /// Bytes a second when each client reads the blocks of the client `shift` further on.
    fn read(
        &self,
        dirs: &[PathBuf],
        shift: u64,
        library: Option<&Path>,
        site: &Site,
    ) -> anyhow::Result<f64> {
        let tasks = self.tasks(dirs, shift, false, site);
        let outcomes = worker::run_together(library, &tasks)?;
        Ok(self.rate(worker::elapsed_s(&outcomes), site))
    }

    fn tasks(&self, dirs: &[PathBuf], shift: u64, write: bool, site: &Site) -> Vec<Task> {
        let clients = u64::from(self.clients);
        let task = |(client, dir): (u64, &PathBuf)| {
            Task::Blocks(Blocks {
                path: dir.join(NAME),
                pattern: Pattern::Strided,
                block_bytes: site.scaled(self.block_bytes),
                count: self.objects,
                clients,
                client: (client + shift) % clients,
                write,
            })
        };
        (0..).zip(dirs).map(task).collect()
    }

    fn rate(&self, seconds: f64, site: &Site) -> f64 {
        self.bytes() as f64 / site.at_full_scale(seconds)
    }

    /// Of the file, at full scale.
    pub fn bytes(&self) -> u64 {
        self.block_bytes * self.objects * u64::from(self.clients)
    }

    /// Of the file, here.
    fn bytes_on(&self, site: &Site) -> u64 {
        site.scaled(self.block_bytes) * self.objects * u64::from(self.clients)
    }

    /// Memory that may be used while it is written or copied.
    fn memory_on(&self, site: &Site) -> u64 {
        4 * self.bytes_on(site) + (64 << 20)
    }

    /// As cases call it.
    pub fn title(&self) -> String {
        let Self { clients, .. } = self;
        format!(
            "{clients} clients, blocks of {}",
            size_text(self.block_bytes)
        )
    }
}

/// Seconds until a copy of the file in `dir` is durable.
fn copy(dir: &Path) -> anyhow::Result<f64> {
    let copy = dir.join("copy");
    let from = dir.join(NAME);
    let to = copy.to_string_lossy().into_owned();
    let begin = Instant::now();
    run("cp", &["--reflink=never", &from.to_string_lossy(), &to])?;
    File::open(&copy)?.sync_all()?;
    let seconds = begin.elapsed().as_secs_f64();
    std::fs::remove_file(&copy)?;
    Ok(seconds)
}
