//! `firn-lab shared`: one file that many hosts write, natively, through Firn, and as logs.

use firn_config::size_text;

use firn_bench::firn::Firn;
use firn_bench::options::{Common, parse_size, progress};
use firn_bench::report::{Case, Limit, Point, Report};

mod index;
mod lanes;
mod measure;
mod one_host;
mod site;

use measure::{Figures, Job, Layout};
use site::{On, Site};

/// Candidates of which only reading is measured.
const FLAT: &str = "Firn, logs, flattened";

/// Writes one file from many hosts at once, and reads it back: the figures of the paper on log-based writing.
///
/// Each client writes 1,024 blocks of a file, strided: every client's first block, then every client's second one. It
/// ends with fsync and close. Natively each client writes to the file system; through Firn each has a firnd of its own,
/// as on a host of its own, and the preload library; with logs the mounts have layout=log. Then
/// the file is read by the clients that wrote it, by their neighbours, and again when it is flat. Two of the
/// file systems are models: a SATA disk of 2010 behind a server that syncs each write, and a server with locks on
/// extents, a mount for each client; times and sizes of the disk are divided by 4 and shown at full scale. Goals of the logs:
/// never slower than native writes; on the models, with 10 clients, at least 3 times as fast from 64 KiB on and 10 times up
/// to 4 KiB; read back by the same clients at least 0.8 of the plain layout, by others 0.6, flat as fast; flattened in 2.2
/// times the time of cp at most. Eight files whose logs lie in two lanes, models of that disk, are flattened by one
/// host and by two, which are to take at most 0.6 of the time. Where one host writes, one file or a file for each
/// client, logs for other files are to cost nothing: at least 0.95 of the rates of a mount without.
#[derive(Clone, Debug, clap::Args)]
pub struct SharedArgs {
    #[command(flatten)]
    common: Common,
    /// What to write to (default: all but cached-disk and moosefs).
    #[arg(long, value_enum, value_name = "WHAT,…", value_delimiter = ',')]
    on: Vec<On>,
    /// Ways to write (default: all).
    #[arg(long, value_enum, value_name = "LAYOUT,…", value_delimiter = ',')]
    layout: Vec<Layout>,
    /// Numbers of clients (default: 1, 2, 5, 10; quick 2).
    #[arg(long, value_name = "COUNT,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=64))]
    clients: Vec<u32>,
    /// Sizes of blocks (default: 1K, 4K, 16K, 64K, 256K; quick 4K, 64K).
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', value_parser = parse_size)]
    block: Vec<u64>,
    /// Blocks of each client (default: 1024, quick 64).
    #[arg(long, value_name = "COUNT")]
    objects: Option<u64>,
}

impl SharedArgs {
    /// Options that every benchmark has.
    pub fn common(&self) -> &Common {
        &self.common
    }

    /// Runs it.
    pub fn run(&self) -> anyhow::Result<Report> {
        let work = self.common.work_dir()?;
        let firn = Firn::find(self.common.firn.as_deref())?;
        let clients = self.clients();
        let most = clients.iter().copied().max().unwrap_or(1);
        let hosts: Vec<Firn> = (0..most)
            .map(|client| firn.on_host(&host_name(client)))
            .collect();
        let mut report = Report::new("shared");
        report.note(format!(
            "one file, {} blocks of each client, strided; written: until fsync and close of every client have returned",
            self.objects()
        ));
        report.note("Firn: a firnd for each client, clients with the preload library; the plain layout is mounted anew before reading");
        for on in self.on() {
            match on {
                On::Lanes => {
                    let divisor = self.divisor(on);
                    let blocks = self.common.choose(128, 4);
                    lanes::measure(&mut report, &self.common, divisor, blocks, &work, &firn)?;
                }
                On::OneHost => {
                    let job = self.job(most, 64 << 10);
                    one_host::measure(&mut report, &self.common, &job, &work, &firn)?;
                }
                On::Index => {
                    let dir = work.subdir("index")?;
                    let pieces = self.common.choose(10_000, 100);
                    index::measure(&mut report, &dir, &hosts[0], pieces)?;
                }
                _ => {
                    let mut site = Site::start(on, most, self.divisor(on), &work, &firn)?;
                    report.note(site.note());
                    let first = report.cases.len();
                    self.measure(&mut report, &mut site, &hosts)?;
                    judge(&mut report, on, first);
                }
            }
        }
        Ok(report)
    }

    fn job(&self, clients: u32, block_bytes: u64) -> Job {
        Job {
            clients,
            block_bytes,
            objects: self.objects(),
        }
    }

    fn measure(&self, report: &mut Report, site: &mut Site, hosts: &[Firn]) -> anyhow::Result<()> {
        let layouts = self.layouts();
        let clients = self.clients();
        let blocks = self.blocks();
        let steps = clients.len() * blocks.len() * layouts.len() * self.common.repeats() as usize;
        let bar = progress(steps as u64, "shared");
        for &block_bytes in &blocks {
            for &count in &clients {
                let job = self.job(count, block_bytes);
                let mut figures = vec![Vec::new(); layouts.len()];
                for _ in 0..self.common.repeats() {
                    for (layout, figures) in layouts.iter().zip(&mut figures) {
                        let block = size_text(block_bytes);
                        bar.set_message(format!("{count} × {block}, {}", layout.name()));
                        figures.push(job.run(*layout, site, &hosts[..count as usize])?);
                        bar.inc(1);
                    }
                }
                self.add(report, site, &job, &layouts, figures);
            }
        }
        bar.finish_and_clear();
        Ok(())
    }

    /// Adds a case, and says of which pictures it is a point.
    fn add(
        &self,
        report: &mut Report,
        site: &Site,
        job: &Job,
        layouts: &[Layout],
        figures: Vec<Vec<Figures>>,
    ) {
        let block = size_text(job.block_bytes);
        let count = job.clients;
        let mut points = Vec::new();
        if Some(count) == self.clients().into_iter().max() {
            points.push(Point {
                plot: format!("{}, {count} clients", site.title()),
                axis: "bytes of a block",
                x: block.clone(),
                order: job.block_bytes as f64,
            });
        }
        if self.blocks().len() == 1 || job.block_bytes == 64 << 10 {
            points.push(Point {
                plot: format!("{}, blocks of {block}", site.title()),
                axis: "clients",
                x: count.to_string(),
                order: f64::from(count),
            });
        }
        let mut candidates = Vec::new();
        for (layout, figures) in layouts.iter().zip(figures) {
            let flat: Vec<_> = figures.iter().filter_map(Figures::flat_sample).collect();
            let samples = figures.iter().map(Figures::sample).collect();
            candidates.push((layout.name().to_owned(), samples));
            if !flat.is_empty() {
                candidates.push((FLAT.to_owned(), flat));
            }
        }
        let name = format!("{}: {}", site.title(), job.title());
        report.add_points(name, points, candidates);
    }

    fn on(&self) -> Vec<On> {
        let mut on = if self.on.is_empty() {
            On::DEFAULT.to_vec()
        } else {
            self.on.clone()
        };
        if self.common.baseline_only {
            on.retain(|on| on.has_baseline());
        }
        on
    }

    fn clients(&self) -> Vec<u32> {
        if self.clients.is_empty() {
            self.common.choose(vec![1, 2, 5, 10], vec![2])
        } else {
            self.clients.clone()
        }
    }

    fn blocks(&self) -> Vec<u64> {
        let kib = |sizes: &[u64]| sizes.iter().map(|size| size << 10).collect();
        if self.block.is_empty() {
            self.common.choose(kib(&[1, 4, 16, 64, 256]), kib(&[4, 64]))
        } else {
            self.block.clone()
        }
    }

    fn objects(&self) -> u64 {
        self.objects.unwrap_or(self.common.choose(1024, 64))
    }

    fn divisor(&self, on: On) -> u32 {
        if on.is_model() || on == On::Lanes {
            self.common.choose(on.divisor(), 16)
        } else {
            1
        }
    }

    fn layouts(&self) -> Vec<Layout> {
        match (self.common.baseline_only, self.layout.is_empty()) {
            (true, _) => vec![Layout::Native],
            (_, true) => Layout::ALL.to_vec(),
            _ => self.layout.clone(),
        }
    }
}

/// Uses memory that is free now, and gives it back. A virtual machine gives free memory back to its host, and gets it again
/// when it is used: the first writer would be measured with what that takes, and the next one without.
fn touch_free_memory(bytes: u64) {
    std::hint::black_box(vec![1u8; bytes as usize]);
}

/// What Firn calls the host of a client.
fn host_name(client: u32) -> String {
    format!("client{client}")
}

/// The goals beside the cases from `first` on.
fn judge(report: &mut Report, on: On, first: usize) {
    let cases = &report.cases[first..];
    let title = on.title();
    let ratios = |cases: &[&Case], of: &str, to: &str, metric: &str| -> Vec<f64> {
        let ratio = |case: &&Case| case.ratio(of, to, metric);
        cases.iter().filter_map(ratio).collect()
    };
    let all: Vec<&Case> = cases.iter().collect();
    let written = |cases: &[&Case]| {
        ratios(
            cases,
            Layout::Log.name(),
            Layout::Native.name(),
            measure::WRITTEN,
        )
    };
    let plain = |of: &str, metric: &str| ratios(&all, of, Layout::Plain.name(), metric);
    let mut goals = vec![(
        "written, logs to native, all blocks and clients (paper: slower at 1 and 4 KiB)",
        Limit::Least(1.0),
        written(&all),
    )];
    if on.is_model() {
        let with_ten = |keep: &dyn Fn(f64) -> bool| -> Vec<&Case> {
            let is_kept = |case: &&Case| {
                let of_blocks = case
                    .points
                    .iter()
                    .find(|point| point.plot.ends_with(" clients"));
                of_blocks.is_some_and(|point| keep(point.order))
            };
            cases.iter().filter(is_kept).collect()
        };
        let large = with_ten(&|bytes| bytes >= f64::from(64 << 10));
        let small = with_ten(&|bytes| bytes <= f64::from(4 << 10));
        goals.push((
            "written, logs to native, most clients, from 64K on",
            Limit::Least(3.0),
            written(&large),
        ));
        goals.push((
            "written, logs to native, most clients, up to 4K",
            Limit::Least(10.0),
            written(&small),
        ));
    }
    goals.push((
        "read by the clients that wrote it, logs to plain (paper: slower everywhere)",
        Limit::Least(0.8),
        plain(Layout::Log.name(), measure::READ),
    ));
    goals.push((
        "read by other clients, logs to plain",
        Limit::Least(0.6),
        plain(Layout::Log.name(), measure::READ_BY_OTHERS),
    ));
    goals.push((
        "read, flattened to plain",
        Limit::Least(1.0),
        plain(FLAT, measure::READ),
    ));
    if on == On::Local {
        goals.push((
            "flattened, to cp of the file",
            Limit::Most(2.2),
            ratios(
                &all,
                Layout::Log.name(),
                Layout::Native.name(),
                measure::COPIED,
            ),
        ));
    }
    for (name, limit, found) in goals {
        report.judge(format!("{title}: {name}"), limit, &found);
    }
}
