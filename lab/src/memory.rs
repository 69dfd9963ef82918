//! `firn-lab memory`: how fast files in memory are written (CRUISE, figures 6 and 7), and what they take.

use firn_bench::firn::{Firn, Mount};
use firn_bench::options::{Common, WorkDir, parse_size, progress};
use firn_bench::report::{Case, Limit, Point, Report};
use firn_config::size_text;

mod first;
mod small;
mod started;
mod targets;

use targets::{PRELOAD, SHARED, TMPFS, Targets};

/// Writes files that stay in memory, through every frontend, beside memcpy and tmpfs.
///
/// Each figure is that of processes that begin: files are created and regions mapped while the time is
/// taken. The baseline is a memcpy into a warm shared region. Goals for blocks of 1M and more through the
/// preload library, at every number of processes: 0.95 of memcpy, 1.15 of it where the processor has
/// non-temporal stores, 1.5 times a new file on tmpfs. Writes of 64 bytes: 60 ns.
///
/// Then: what the library costs programs that do not use it, what direct access costs small files and the first write
/// of a process, and what 10^5 small files take.
#[derive(Clone, Debug, clap::Args)]
pub struct MemoryArgs {
    #[command(flatten)]
    common: Common,
    /// Numbers of writing processes to try, one file each.
    #[arg(long, value_name = "COUNT,…", value_delimiter = ',', default_value = "1,2,4,8", value_parser = clap::value_parser!(u32).range(1..=256))]
    processes: Vec<u32>,
    /// Block sizes to try: bytes of one write.
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', value_parser = parse_size, default_value = "64,4K,64K,1M,16M,64M")]
    block_size: Vec<u64>,
    /// Chunk sizes to try; all but the first with the most processes and blocks of 1M only.
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', value_parser = parse_size, default_value = "4M,64K,256K,1M,16M,64M")]
    chunk_size: Vec<u64>,
    /// Bytes of one file (blocks below 64K: fewer).
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "64M")]
    size: u64,
    /// Small files of 4K whose memory is counted (default: 100000, quick 5000).
    #[arg(long, value_name = "COUNT")]
    small_files: Option<u64>,
}

/// One line of the tables.
#[derive(Clone, Copy, PartialEq)]
struct Setting {
    processes: u32,
    block_bytes: u64,
    chunk_bytes: u64,
    /// Of one file.
    bytes: u64,
}

impl Setting {
    fn name(&self) -> String {
        let count = self.processes;
        let block = size_text(self.block_bytes);
        let chunk = size_text(self.chunk_bytes);
        let processes = if count == 1 {
            "1 process".into()
        } else {
            format!("{count} processes")
        };
        format!("{processes}, blocks of {block}, chunk {chunk}")
    }
}

/// Chunk sizes are compared with these blocks, in which bookkeeping shows and system calls do not.
const CHUNK_BLOCK_BYTES: u64 = 1 << 20;
/// A file of small blocks takes fewer bytes, or a round would take minutes.
const SMALL_BLOCK_BYTES: u64 = 64 << 10;
const SMALL_BLOCKS_MAX: u64 = 200_000;
/// From here on goals hold.
const LARGE_BLOCK_BYTES: u64 = 1 << 20;
/// From about here on the C library's memcpy, the baseline, uses non-temporal stores itself (three quarters of
/// the last cache: glibc's tunable `x86_non_temporal_threshold`).
const LIBC_STREAM_BYTES: u64 = 24 << 20;

impl MemoryArgs {
    fn setting(&self, processes: u32, block_bytes: u64, chunk_bytes: u64) -> Setting {
        let size = self
            .size
            .min(self.common.choose(u64::MAX, 16 << 20))
            .max(block_bytes);
        let count = size / block_bytes;
        let count = if block_bytes < SMALL_BLOCK_BYTES {
            count.min(SMALL_BLOCKS_MAX)
        } else {
            count
        };
        Setting {
            processes,
            block_bytes,
            chunk_bytes,
            bytes: count * block_bytes,
        }
    }

    /// Chunk sizes, each with the settings that are measured in it.
    fn settings(&self) -> Vec<(u64, Vec<Setting>)> {
        let quick = self.common.quick;
        let first = self.chunk_size[0];
        let most = *self.processes.iter().max().expect("clap demands one");
        let in_first = |count: u32| {
            self.block_size
                .iter()
                .map(move |&block| self.setting(count, block, first))
        };
        let wanted =
            |s: &Setting| !quick || (s.processes <= 2 && [64, 1 << 20].contains(&s.block_bytes));
        let mut all = vec![(
            first,
            self.processes
                .iter()
                .flat_map(|&n| in_first(n))
                .filter(wanted)
                .collect(),
        )];
        let others = self
            .chunk_size
            .iter()
            .skip(1)
            .filter(|_| !quick && !self.common.baseline_only);
        for &chunk in others {
            all.push((chunk, vec![self.setting(most, CHUNK_BLOCK_BYTES, chunk)]));
        }
        all
    }

    /// In which pictures a setting is a point: by processes, by block size, by chunk size.
    fn points(&self, setting: &Setting) -> Vec<Point> {
        let count = setting.processes;
        let block = setting.block_bytes;
        let chunk = setting.chunk_bytes;
        let ends = |list: &[u32]| [list.iter().min().copied(), list.iter().max().copied()];
        let largest = self.block_size.iter().max().copied().unwrap_or(0);
        let point = |plot: String, axis, x: String, order: f64| Point {
            plot,
            axis,
            x,
            order,
        };
        let mut points = Vec::new();
        if chunk == self.chunk_size[0] {
            if block == LARGE_BLOCK_BYTES || block == largest {
                let plot = format!("blocks of {}", size_text(block));
                points.push(point(
                    plot,
                    "processes",
                    count.to_string(),
                    f64::from(count),
                ));
            }
            if ends(&self.processes).contains(&Some(count)) {
                let plot = format!("{count} process{}", if count == 1 { "" } else { "es" });
                points.push(point(plot, "block size", size_text(block), block as f64));
            }
        }
        if ends(&self.processes)[1] == Some(count)
            && block == CHUNK_BLOCK_BYTES
            && self.chunk_size.len() > 1
        {
            let plot = format!("{count} processes, blocks of {}", size_text(block));
            points.push(point(plot, "chunk size", size_text(chunk), chunk as f64));
        }
        points
    }

    /// Runs it.
    pub fn run(&self) -> anyhow::Result<Report> {
        let work = self.common.work_dir()?;
        let firn = Firn::find(self.common.firn.as_deref())?;
        let mut report = Report::new("memory");
        report.note(format!(
            "files of {}, smaller ones in blocks below {}; opening, mapping and closing are part of the time",
            size_text(self.size),
            size_text(SMALL_BLOCK_BYTES)
        ));
        report.note(format!(
            "{SHARED}: a file on /dev/shm that has its memory (2 MiB pages), mapped anew by each process"
        ));
        let largest = self
            .settings()
            .iter()
            .flat_map(|(_, s)| s)
            .map(|s| s.processes as u64 * s.bytes)
            .max();
        let targets = Targets::new(
            &self.common,
            &firn,
            &work,
            largest.unwrap_or(0),
            &mut report,
        )?;
        self.measure(&targets, &firn, &work, &mut report)?;
        self.judge(&mut report);
        if !self.common.baseline_only {
            started::measure(&self.common, &firn, &mut report)?;
            first::measure(&self.common, &firn, &work, &mut report)?;
            let files = self
                .small_files
                .unwrap_or(self.common.choose(100_000, 5000));
            small::measure(files, &firn, &work, &mut report)?;
        }
        Ok(report)
    }

    fn measure(
        &self,
        targets: &Targets,
        firn: &Firn,
        work: &WorkDir,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let all = self.settings();
        let steps: usize = all.iter().map(|(_, settings)| settings.len()).sum();
        let bar = progress(steps as u64 * u64::from(self.common.repeats()), "memory");
        for (chunk_bytes, settings) in all {
            let mount = if self.common.baseline_only {
                None
            } else {
                Some(self.mount(firn, work, chunk_bytes, &settings)?)
            };
            for setting in settings {
                bar.set_message(setting.name());
                let candidates = targets.candidates(mount.as_ref());
                let mut samples = vec![Vec::new(); candidates.len()];
                for _ in 0..self.common.repeats() {
                    for (candidate, samples) in candidates.iter().zip(&mut samples) {
                        samples.push(candidate.measure(&setting)?);
                    }
                    bar.inc(1);
                }
                let names = candidates.iter().map(|candidate| candidate.name.to_owned());
                report.add_points(
                    setting.name(),
                    self.points(&setting),
                    names.zip(samples).collect(),
                );
            }
        }
        bar.finish_and_clear();
        Ok(())
    }

    /// A mount whose arena holds what the largest setting writes.
    fn mount<'a>(
        &self,
        firn: &'a Firn,
        work: &WorkDir,
        chunk_bytes: u64,
        settings: &[Setting],
    ) -> anyhow::Result<Mount<'a>> {
        // Beside its bytes a file has two leases, and small slabs at first.
        let room = |s: &Setting| {
            u64::from(s.processes) * (s.bytes.next_multiple_of(chunk_bytes) + 3 * chunk_bytes)
        };
        let arena_bytes = settings.iter().map(room).max().unwrap_or(chunk_bytes);
        let options = format!(
            "drain=demand,close=held,fsync=held,chunk-size={chunk_bytes},arena-size={arena_bytes}"
        );
        let backing = work.subdir("backing")?;
        let point = work.subdir("firn")?;
        let mount = firn.mount(&backing, &point, &options)?;
        mount.wait_populated()?;
        Ok(mount)
    }

    fn judge(&self, report: &mut Report) {
        let settings = self.settings().swap_remove(0).1;
        let of_setting = |case: &Case| settings.iter().find(|s| s.name() == case.name);
        let ratios = |to: &str, most: u64| -> Vec<f64> {
            let blocks = LARGE_BLOCK_BYTES..most;
            let is_large =
                |case: &&Case| of_setting(case).is_some_and(|s| blocks.contains(&s.block_bytes));
            let cases = report.cases.iter().filter(is_large);
            cases
                .filter_map(|case| case.ratio(PRELOAD, to, "throughput"))
                .collect()
        };
        let shared = ratios(SHARED, u64::MAX);
        let plain = ratios(SHARED, LIBC_STREAM_BYTES);
        let fresh = ratios(TMPFS, u64::MAX);
        let is_each = |case: &&Case| {
            of_setting(case).is_some_and(|s| s.processes == 1 && s.block_bytes == 64)
        };
        let each = report
            .cases
            .iter()
            .filter(is_each)
            .filter_map(|case| case.median(PRELOAD, "each"));
        let each: Vec<f64> = each.collect();
        let to = |what: &str| format!("{PRELOAD} to {what}, blocks of 1M and more");
        report.judge(to(SHARED), Limit::Least(0.95), &shared);
        if cfg!(target_arch = "x86_64") {
            let name = format!(
                "{PRELOAD} to {SHARED}, blocks of 1M to 16M: non-temporal stores to others"
            );
            report.judge(name, Limit::Least(1.15), &plain);
        }
        report.judge(to(TMPFS), Limit::Least(1.5), &fresh);
        report.judge(
            "one write of 64 bytes, 1 process [ns]",
            Limit::Most(60.0),
            &each,
        );
    }

    /// Options that every benchmark has.
    pub fn common(&self) -> &Common {
        &self.common
    }
}
