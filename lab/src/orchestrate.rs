//! `firn-lab orchestrate`: a checkpoint on several I/O servers, striped, vertical and in sequence.

use std::time::Duration;

use firn_config::size_text;

use firn_bench::firn::Firn;
use firn_bench::machine;
use firn_bench::options::{Common, progress};
use firn_bench::report::{Limit, Point, Report, Sample};

mod calculation;
mod candidate;
mod local;
mod moosefs;
mod servers;

use calculation::Order;
use candidate::{Candidate, Checkpoint, Site, Way};
use local::LocalCheckpoint;
use moosefs::MooseFsCheckpoint;

const GB: u64 = 1_000_000_000;
const MB: u64 = 1_000_000;
const MIB: u64 = 1 << 20;
const SERVERS: usize = 4;
/// See [`OrchestrateArgs::divisor`].
const SMALL_BYTES: u64 = 1024 * MB;
/// See [`OrchestrateArgs::divisor`].
const TINY_BYTES: u64 = 256 * MB;

/// From one request of 64 KiB to the next, where processes are in step: 128 of them fill a cache at 1 GB/s.
const IN_STEP: Duration = Duration::from_millis(8);
/// What a chunk server of MooseFS gets a second.
const CHUNK_SERVER_BYTES_PER_S: u64 = 25_000_000;

const STRIPED: &str = "striped";
const WHOLE: &str = "vertical, natively";
const VERTICAL: &str = "Firn, vertical";
const BOTH: &str = "Firn, vertical and sequential";
const CHUNKS: &str = "where MooseFS puts it, natively";
const TOKENS: &str = "the same with tokens=flock";
const NATIVE: &str = "interleaved, natively";
const INTERLEAVED: &str = "Firn, interleaved";
const SEQUENTIAL: &str = "Firn, sequential";

const FIRN_INTERLEAVED: Way = Way::Firn("");
const FIRN_SEQUENTIAL: Way = Way::Firn(",order=sequential,lane-writers=1");

const FIRN_TOKENS: Way = Way::Firn(",order=sequential,lane-writers=1,tokens=flock");

/// Writes a checkpoint of many processes to I/O servers: the figures of the orchestration paper.
///
/// The servers are a model: FUSE servers that real writes pass through, each as slow as a SATA disk of 2010 (8.5 ms a
/// seek, 80 MB/s, 256 MiB of write-back cache for all streams). Striped is what clients of PVFS2 do, with stripes of
/// 64 KiB; vertical has each file on one server; sequential has one file at a time on each server. Sizes and times are
/// divided by 8, by 4 up to 1 GB, by nothing up to 256 MB, and shown at full scale. Beside each figure stands what the model gives by
/// calculation alone. A checkpoint is over when all is on the disks. Goals: vertical at most 0.75 of striped in every
/// case, growing from 64 to 256 processes by a third of what striped grows at most; sequential at most half of
/// interleaved up to 256 MB; both together at most 1.1 times the time of the bytes at the disks' full rate; restart from
/// whole files at least 1.25 times faster than from striped ones; tokens cost at most 2 %; on the file system of --dir, without a model,
/// sequential at most 1.05 times interleaved.
#[derive(Clone, Debug, clap::Args)]
pub struct OrchestrateArgs {
    #[command(flatten)]
    common: Common,
    /// Figures of the paper to measure, and more (default: all).
    #[arg(long, value_enum, value_name = "FIGURE,…", value_delimiter = ',')]
    figure: Vec<Figure>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Figure {
    /// Striped and vertical, 256 processes, images of 1 to 10 GB in all.
    #[value(name = "2a")]
    VerticalBySize,
    /// Striped and vertical, 10 GB in all, 64 to 256 processes.
    #[value(name = "2b")]
    VerticalByProcesses,
    /// Interleaved and sequential, 128 processes on one disk, images of 64 to 5120 MB in all.
    #[value(name = "3a")]
    SequentialBySize,
    /// 3a up to 256 MB with processes in step, as on a host with a CPU for each: a request of each every 8 ms.
    #[value(name = "3a-in-step")]
    SequentialInStep,
    /// Interleaved and sequential, 1 GB in all on one disk, 8 to 128 processes.
    #[value(name = "3b")]
    SequentialByProcesses,
    /// Vertical and sequential with a token for each lane and without, 64 processes, 10 GB in all.
    Tokens,
    /// Reading 10 GB of 64 processes back.
    Restart,
    /// Interleaved and sequential on the file system of --dir.
    Local,
    /// A real MooseFS with four chunk servers that get 25 MB/s each (root): where it puts files itself, and vertical.
    Moosefs,
}

impl Figure {
    /// All that need nothing to be installed.
    const ALL: [Self; 8] = [
        Self::VerticalBySize,
        Self::VerticalByProcesses,
        Self::SequentialBySize,
        Self::SequentialInStep,
        Self::SequentialByProcesses,
        Self::Tokens,
        Self::Restart,
        Self::Local,
    ];
}

/// One point of a figure.
struct Setting {
    title: &'static str,
    axis: &'static str,
    x: String,
    checkpoint: Checkpoint,
}

impl OrchestrateArgs {
    /// Runs it.
    pub fn run(&self) -> anyhow::Result<Report> {
        let work = self.common.work_dir()?;
        let firn = Firn::find(self.common.firn.as_deref())?;
        let site = Site {
            work: &work,
            firn: &firn,
            memory: firn.memory_dir()?,
        };
        let mut report = Report::new("orchestrate");
        report.note(format!(
            "I/O servers are a MODEL of a SATA disk of 2010: 8.5 ms a seek, 80 MB/s, a write-back cache of 256 MiB; \
             times and sizes divided by {} (up to 1 GB by {}, up to 256 MB by {}), shown at full scale",
            self.divisor(u64::MAX),
            self.divisor(SMALL_BYTES),
            self.divisor(0)
        ));
        report.note("durable: until all is on the disks; calculated: by the model without a clock");
        report.note(
            "one firnd with an arena of 256 MiB (1 GiB up to 256 MB) in place of one on each host",
        );
        for figure in self.figures() {
            match figure {
                Figure::Restart => self.measure_restart(&mut report, &site)?,
                Figure::Local => self.measure_local(&mut report, &site)?,
                Figure::Moosefs => self.measure_moosefs(&mut report, &site)?,
                _ => self.measure_writes(figure, &mut report, &site)?,
            }
        }
        Ok(report)
    }

    fn figures(&self) -> Vec<Figure> {
        if self.figure.is_empty() {
            Figure::ALL.to_vec()
        } else {
            self.figure.clone()
        }
    }

    /// What times and sizes are divided by: small checkpoints by less, as starting and ending takes its time. In a quick
    /// run everything is so small that the figures say nothing.
    fn divisor(&self, total_bytes: u64) -> u32 {
        let full = match total_bytes {
            bytes if bytes <= TINY_BYTES => 1,
            bytes if bytes <= SMALL_BYTES => 4,
            _ => 8,
        };
        self.common.choose(full, 256)
    }

    fn measure_writes(
        &self,
        figure: Figure,
        report: &mut Report,
        site: &Site<'_>,
    ) -> anyhow::Result<()> {
        let candidates = self.candidates(figure);
        let settings = self.settings(figure);
        let steps = settings.len() * candidates.len() * self.common.repeats() as usize;
        let bar = progress(steps as u64, "orchestrate");
        let first = report.cases.len();
        for setting in &settings {
            let mut samples = vec![Vec::new(); candidates.len()];
            for _ in 0..self.common.repeats() {
                for (candidate, samples) in candidates.iter().zip(&mut samples) {
                    bar.set_message(format!("{}, {}", setting.x, candidate.name));
                    samples.push(setting.checkpoint.write(candidate, site)?);
                    bar.inc(1);
                }
            }
            setting.add_to(report, &candidates, samples);
        }
        bar.finish_and_clear();
        judge(report, figure, first, &settings);
        Ok(())
    }

    fn measure_restart(&self, report: &mut Report, site: &Site<'_>) -> anyhow::Result<()> {
        let setting = Setting {
            title: "restart of 64 processes from 10 GB on four servers",
            axis: "",
            x: String::new(),
            checkpoint: self.on_servers(self.common.choose(64, 16), 10 * GB),
        };
        let candidates = self.candidates(Figure::Restart);
        let bar = progress(candidates.len() as u64, "restart");
        let mut samples = Vec::new();
        for candidate in &candidates {
            bar.set_message(candidate.name);
            let repeats = self.common.repeats();
            samples.push(setting.checkpoint.read(candidate, repeats, site)?);
            bar.inc(1);
        }
        bar.finish_and_clear();
        let names = candidates.iter().map(|candidate| candidate.name.to_owned());
        report.add(setting.title, names.zip(samples).collect());
        let case = report.cases.last().expect("it was added");
        let faster = case.ratio(STRIPED, BOTH, "read");
        let name = "restart, striped to Firn's lanes";
        report.judge(name, Limit::Least(1.25), faster.as_slice());
        Ok(())
    }

    fn measure_local(&self, report: &mut Report, site: &Site<'_>) -> anyhow::Result<()> {
        let checkpoint = LocalCheckpoint {
            processes: 16,
            image_bytes: self.common.choose(32 << 20, 1 << 20),
        };
        let candidates = self.candidates(Figure::Local);
        if candidates.is_empty() {
            return Ok(());
        }
        let steps = candidates.len() * self.common.repeats() as usize;
        let bar = progress(steps as u64, "local");
        let mut samples = vec![Vec::new(); candidates.len()];
        for _ in 0..self.common.repeats() {
            for (candidate, samples) in candidates.iter().zip(&mut samples) {
                samples.push(checkpoint.write(candidate, site)?);
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        let title = format!(
            "no model: {}, 16 processes with {} each",
            machine::file_system_of(site.work.path()),
            size_text(checkpoint.image_bytes)
        );
        let names = candidates.iter().map(|candidate| candidate.name.to_owned());
        report.add(title, names.zip(samples).collect());
        let case = report.cases.last().expect("it was added");
        let ratio = case.ratio(SEQUENTIAL, INTERLEAVED, "durable");
        let name = format!("{SEQUENTIAL}, to {INTERLEAVED}, without a model");
        report.judge(name, Limit::Most(1.05), ratio.as_slice());
        Ok(())
    }

    fn measure_moosefs(&self, report: &mut Report, site: &Site<'_>) -> anyhow::Result<()> {
        let candidates = self.candidates(Figure::Moosefs);
        let cases = self
            .common
            .choose(vec![(32, 8 * MIB), (8, 96 * MIB)], vec![(8, MIB)]);
        let steps = cases.len() * candidates.len() * self.common.repeats() as usize;
        let bar = progress(steps as u64, "moosefs");
        let first = report.cases.len();
        for (processes, image_bytes) in cases {
            let checkpoint = MooseFsCheckpoint {
                processes,
                image_bytes,
                server_bytes_per_s: CHUNK_SERVER_BYTES_PER_S,
            };
            let mut samples = vec![Vec::new(); candidates.len()];
            for _ in 0..self.common.repeats() {
                for (candidate, samples) in candidates.iter().zip(&mut samples) {
                    bar.set_message(candidate.name);
                    samples.push(checkpoint.write(candidate, site)?);
                    bar.inc(1);
                }
            }
            let title = format!(
                "no model: MooseFS, four chunk servers with 25 MB/s each; {processes} processes with {} each",
                size_text(image_bytes)
            );
            let names = candidates.iter().map(|candidate| candidate.name.to_owned());
            report.add(title, names.zip(samples).collect());
        }
        bar.finish_and_clear();
        let cases = report.cases[first..].iter();
        let ratios: Vec<f64> = cases
            .filter_map(|case| case.ratio(BOTH, CHUNKS, "durable"))
            .collect();
        let name = format!("{BOTH}, to {CHUNKS}, without a model");
        report.judge(name, Limit::Most(1.05), &ratios);
        Ok(())
    }

    fn candidates(&self, figure: Figure) -> Vec<Candidate> {
        let candidate = |name, way, order| Candidate { name, way, order };
        let mut all = match figure {
            Figure::VerticalBySize | Figure::VerticalByProcesses => vec![
                candidate(STRIPED, Way::Striped, Order::Interleaved),
                candidate(WHOLE, Way::Whole, Order::Interleaved),
                candidate(VERTICAL, FIRN_INTERLEAVED, Order::Interleaved),
                candidate(BOTH, FIRN_SEQUENTIAL, Order::Sequential),
            ],
            Figure::Tokens => vec![
                candidate(BOTH, FIRN_SEQUENTIAL, Order::Sequential),
                candidate(TOKENS, FIRN_TOKENS, Order::Sequential),
            ],
            Figure::Restart => vec![
                candidate(STRIPED, Way::Striped, Order::Interleaved),
                candidate(WHOLE, Way::Whole, Order::Interleaved),
                candidate(BOTH, FIRN_SEQUENTIAL, Order::Sequential),
            ],
            Figure::Moosefs => vec![
                candidate(CHUNKS, Way::Striped, Order::Interleaved),
                candidate(WHOLE, Way::Whole, Order::Interleaved),
                candidate(VERTICAL, FIRN_INTERLEAVED, Order::Interleaved),
                candidate(BOTH, FIRN_SEQUENTIAL, Order::Sequential),
            ],
            Figure::SequentialBySize | Figure::SequentialInStep | Figure::SequentialByProcesses => {
                vec![
                    candidate(NATIVE, Way::Whole, Order::Interleaved),
                    candidate(INTERLEAVED, FIRN_INTERLEAVED, Order::Interleaved),
                    candidate(SEQUENTIAL, FIRN_SEQUENTIAL, Order::Sequential),
                ]
            }
            Figure::Local => vec![
                candidate(INTERLEAVED, FIRN_INTERLEAVED, Order::Interleaved),
                candidate(SEQUENTIAL, FIRN_SEQUENTIAL, Order::Sequential),
            ],
        };
        if self.common.baseline_only {
            all.retain(|candidate| !matches!(candidate.way, Way::Firn(_)));
        }
        all
    }

    fn settings(&self, figure: Figure) -> Vec<Setting> {
        let by_size = |title, sizes: Vec<u64>, checkpoint: &dyn Fn(u64) -> Checkpoint| {
            let setting = |megabytes: u64| Setting {
                title,
                axis: "MB in all",
                x: megabytes.to_string(),
                checkpoint: checkpoint(megabytes * MB),
            };
            sizes.into_iter().map(setting).collect()
        };
        let by_processes = |title, counts: Vec<u64>, checkpoint: &dyn Fn(u64) -> Checkpoint| {
            let setting = |processes: u64| Setting {
                title,
                axis: "processes",
                x: processes.to_string(),
                checkpoint: checkpoint(processes),
            };
            counts.into_iter().map(setting).collect()
        };
        let choose = |full: &[u64], quick: &[u64]| self.common.choose(full, quick).to_vec();
        match figure {
            Figure::VerticalBySize => by_size(
                "2a: four servers, 256 processes",
                choose(&[1000, 2500, 5000, 10_000], &[1000]),
                &|bytes| self.on_servers(self.common.choose(256, 16), bytes),
            ),
            Figure::VerticalByProcesses => by_processes(
                "2b: four servers, 10 GB",
                choose(&[64, 128, 256], &[8, 16]),
                &|processes| self.on_servers(processes, 10 * GB),
            ),
            Figure::SequentialBySize => by_size(
                "3a: one disk, 128 processes",
                choose(&[64, 128, 256, 512, 1024, 5120], &[256]),
                &|bytes| self.on_one_disk(self.common.choose(128, 16), bytes),
            ),
            Figure::SequentialInStep => by_size(
                "3a in step: one disk, 128 processes",
                choose(&[64, 128, 256], &[256]),
                &|bytes| Checkpoint {
                    interval: Some(IN_STEP),
                    ..self.on_one_disk(self.common.choose(128, 16), bytes)
                },
            ),
            Figure::SequentialByProcesses => by_processes(
                "3b: one disk, 1 GB",
                choose(&[8, 16, 32, 64, 128], &[8, 16]),
                &|processes| self.on_one_disk(processes, GB),
            ),
            Figure::Tokens => by_processes("tokens: four servers, 10 GB", vec![64], &|processes| {
                self.on_servers(self.common.choose(processes, 16), 10 * GB)
            }),
            Figure::Restart | Figure::Local | Figure::Moosefs => Vec::new(),
        }
    }

    fn on_servers(&self, processes: u64, total_bytes: u64) -> Checkpoint {
        Checkpoint {
            servers: SERVERS,
            processes,
            total_bytes,
            divisor: self.divisor(total_bytes),
            interval: None,
        }
    }

    fn on_one_disk(&self, processes: u64, total_bytes: u64) -> Checkpoint {
        Checkpoint {
            servers: 1,
            ..self.on_servers(processes, total_bytes)
        }
    }

    /// Options that every benchmark has.
    pub fn common(&self) -> &Common {
        &self.common
    }
}

impl Setting {
    fn add_to(&self, report: &mut Report, candidates: &[Candidate], samples: Vec<Vec<Sample>>) {
        let point = Point {
            plot: self.title.into(),
            axis: self.axis,
            x: self.x.clone(),
            order: self.x.parse().unwrap_or(0.0),
        };
        let names = candidates.iter().map(|candidate| candidate.name.to_owned());
        report.add_points(
            format!("{}; {} {}", self.title, self.x, self.axis),
            vec![point],
            names.zip(samples).collect(),
        );
    }
}

/// The paper's figures beside those of the cases from `first` on.
fn judge(report: &mut Report, figure: Figure, first: usize, settings: &[Setting]) {
    let cases = &report.cases[first..];
    let ratios = |of: &str, to: &str| -> Vec<f64> {
        cases
            .iter()
            .filter_map(|case| case.ratio(of, to, "durable"))
            .collect()
    };
    let growth = |name: &str| -> Option<f64> {
        let time = |case: &firn_bench::report::Case| case.median(name, "durable");
        Some(time(cases.last()?)? - time(cases.first()?)?)
    };
    let of_bytes = |name: &str| -> Vec<f64> {
        let of = cases.iter().zip(settings);
        of.filter_map(|(case, setting)| {
            Some(case.median(name, "durable")? / setting.checkpoint.bytes_time_s())
        })
        .collect()
    };
    let mut goals: Vec<(String, Limit, Vec<f64>)> = Vec::new();
    match figure {
        Figure::VerticalBySize | Figure::VerticalByProcesses => {
            for name in [WHOLE, VERTICAL] {
                goals.push((
                    format!("{name}, to {STRIPED} (paper: 0.75 at most)"),
                    Limit::Most(0.75),
                    ratios(name, STRIPED),
                ));
            }
            goals.push((
                format!("{BOTH}, to the bytes at the disks' rate (paper: not built)"),
                Limit::Most(1.1),
                of_bytes(BOTH),
            ));
            if figure == Figure::VerticalByProcesses
                && let Some(striped) = growth(STRIPED)
            {
                for name in [WHOLE, VERTICAL, BOTH] {
                    let grown = growth(name).map(|grown| grown / striped);
                    goals.push((
                        format!("{name}, growth by processes to that of {STRIPED} (paper: 10 s of 41 s, 0.24)"),
                        Limit::Most(0.333),
                        grown.into_iter().collect(),
                    ));
                }
            }
        }
        Figure::SequentialBySize | Figure::SequentialInStep => {
            let in_step = match figure {
                Figure::SequentialInStep => ", in step",
                _ => "",
            };
            let small = settings
                .iter()
                .take_while(|setting| setting.checkpoint.total_bytes <= 256 * MB)
                .count();
            let mut found = ratios(SEQUENTIAL, NATIVE);
            found.truncate(small);
            goals.push((
                format!("{SEQUENTIAL}, to {NATIVE}, up to 256 MB{in_step} (paper: below 0.5)"),
                Limit::Most(0.5),
                found,
            ));
        }
        Figure::Tokens => goals.push((
            format!("{BOTH}, with tokens to without"),
            Limit::Most(1.02),
            ratios(TOKENS, BOTH),
        )),
        Figure::SequentialByProcesses | Figure::Restart | Figure::Local | Figure::Moosefs => {}
    }
    for (name, limit, found) in goals {
        report.judge(name, limit, &found);
    }
}
