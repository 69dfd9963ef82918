//! `firn bench ingest`: measures how fast Firn accepts writes if it need not store them, as in figure 5 of the CRFS
//! paper.

use std::path::{Path, PathBuf};

use crate::cpu;
use crate::discard::DiscardMountArgs;
use crate::options::{Common, WorkDir, parse_size, progress};
use crate::report::{Report, Sample};
use crate::serve::{Mounted, Server};
use crate::worker::{self, ForkedWrite, Sharing, Task};
use firn_config::size_text;
use firn_testfs::cleanup::{Guard, Leftover, expect};

/// Bytes of a GiB, the unit in the report.
const GIB: f64 = (1u64 << 30) as f64;

/// Measures the write path alone: takes in the writes of many processes, and drops them instead of draining.
///
/// The baseline is a bare FUSE server, written with the same crate and mounted with the same settings,
/// that copies each write into a warm buffer and drops it. Goal: with 1M writes at least 0.9 of its
/// GiB/s, and at most 1.1 of its CPU seconds per GiB (writers and server together).
#[derive(Clone, Debug, clap::Args)]
pub struct IngestArgs {
    #[command(flatten)]
    common: Common,
    /// Writing processes, one file each.
    #[arg(long, value_name = "COUNT", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    writers: u32,
    /// Data of one measurement, all writers together (default: 2G, quick 256M).
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    total: Option<u64>,
    /// Write sizes to try, at the first chunk and arena size.
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', value_parser = parse_size, default_value = "1M,64K,4K")]
    write_size: Vec<u64>,
    /// Chunk sizes to try, with the first write and arena size.
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', value_parser = parse_size, default_value = "4M,128K,512K,1M,2M,16M")]
    chunk_size: Vec<u64>,
    /// Arena sizes to try, with the first write and chunk size.
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', value_parser = parse_size, default_value = "256M,64M,16M")]
    arena_size: Vec<u64>,
    /// Threads of the drain.
    #[arg(long, value_name = "COUNT", default_value_t = 4)]
    io_threads: usize,
}

/// The sizes of one case.
#[derive(Clone, Copy, PartialEq)]
struct Setting {
    write_bytes: u64,
    chunk_bytes: u64,
    arena_bytes: u64,
}

impl Setting {
    /// Returns the name of the case in the report.
    fn name(&self) -> String {
        let Self {
            write_bytes,
            chunk_bytes,
            arena_bytes,
        } = self;
        let write = size_text(*write_bytes);
        let chunk = size_text(*chunk_bytes);
        format!(
            "{write} writes, chunk {chunk}, arena {}",
            size_text(*arena_bytes)
        )
    }
}

impl IngestArgs {
    /// Returns the cases. Each case varies one of the three sizes; the other two have their first value.
    fn settings(&self) -> Vec<Setting> {
        let first = Setting {
            write_bytes: self.write_size[0],
            chunk_bytes: self.chunk_size[0],
            arena_bytes: self.arena_size[0],
        };
        if self.common.quick {
            return vec![first];
        }
        let writes = self.write_size.iter().map(|&write_bytes| Setting {
            write_bytes,
            ..first
        });
        let chunks = self.chunk_size.iter().map(|&chunk_bytes| Setting {
            chunk_bytes,
            ..first
        });
        let arenas = self.arena_size.iter().map(|&arena_bytes| Setting {
            arena_bytes,
            ..first
        });
        let mut settings: Vec<Setting> = Vec::new();
        for setting in writes.chain(chunks).chain(arenas) {
            // The baseline has no chunks and no arena. Without Firn, cases that differ only in these are the same.
            let new = if self.common.baseline_only {
                !settings
                    .iter()
                    .any(|s| s.write_bytes == setting.write_bytes)
            } else {
                !settings.contains(&setting)
            };
            if new {
                settings.push(setting);
            }
        }
        settings
    }

    fn total_bytes(&self) -> u64 {
        self.total.unwrap_or(self.common.choose(2 << 30, 256 << 20))
    }

    /// Runs the benchmark and returns its figures. Fails if a candidate cannot be set up or measured.
    pub fn run(&self) -> anyhow::Result<Report> {
        let work = self.common.work_dir()?;
        let with_firn = !self.common.baseline_only;
        let mut report = Report::new("ingest");
        let writers = self.writers;
        let total = size_text(self.total_bytes());
        report.note(format!(
            "{writers} writers, {total} in all; drained data is dropped"
        ));
        report.note("sink: bare fuser server, direct_io, parallel direct writes, 1 MiB requests");
        if !with_firn {
            report.note("Firn was not measured: baseline only");
        }
        let settings = self.settings();
        let steps = settings.len() as u64 * u64::from(self.common.repeats());
        let bar = progress(steps * (1 + u64::from(with_firn)), "ingest");
        for setting in settings {
            bar.set_message(setting.name());
            let server = Server::Sink {
                pool_bytes: setting.arena_bytes,
            };
            let sink = Mounted::start(&server, &work.subdir("sink")?)?;
            let firn = if with_firn {
                Some(self.mount_firn(&setting, work.path())?)
            } else {
                None
            };
            let mut sink_samples = Vec::new();
            let mut firn_samples = Vec::new();
            for _ in 0..self.common.repeats() {
                sink_samples.push(self.measure(&sink, &setting)?);
                bar.inc(1);
                if let Some((firn, _)) = &firn {
                    firn_samples.push(self.measure(firn, &setting)?);
                    bar.inc(1);
                }
            }
            let mut candidates = vec![("sink".to_owned(), sink_samples)];
            if firn.is_some() {
                candidates.push(("firn".to_owned(), firn_samples));
            }
            report.add(setting.name(), candidates);
        }
        bar.finish_and_clear();
        if with_firn {
            self.add_first_writes(&work, &mut report)?;
        }
        Ok(report)
    }

    /// Measures the first large write of a process that has forked, and of one that has not. Training programs fork
    /// their data loaders before they write the first checkpoint.
    fn add_first_writes(&self, work: &WorkDir, report: &mut Report) -> anyhow::Result<()> {
        const CASES: [(&str, Sharing); 3] = [
            ("not forked", Sharing::None),
            ("forked", Sharing::Child),
            ("forked, MADV_DONTFORK", Sharing::KeptApart),
        ];
        let setting = self.settings()[0];
        let bytes = self.common.choose(512 << 20, 64 << 20);
        let (firn, _remove) = self.mount_firn(&setting, work.path())?;
        let path = firn.path().join("first");
        let mut samples = vec![Vec::new(); CASES.len()];
        for _ in 0..self.common.repeats() {
            for ((_, sharing), samples) in CASES.iter().zip(&mut samples) {
                let task = Task::ForkedWrite(ForkedWrite {
                    path: path.clone(),
                    bytes,
                    sharing: *sharing,
                });
                let outcomes = worker::run_all(&[task])?;
                std::fs::remove_file(&path)?;
                let gib = bytes as f64 / GIB;
                let cpu_s: f64 = outcomes.iter().map(|outcome| outcome.cpu_s).sum();
                samples.push(vec![
                    ("throughput", "GiB/s", gib / worker::elapsed_s(&outcomes)),
                    ("CPU of the writer", "s/GiB", cpu_s / gib),
                ]);
            }
        }
        let names = CASES.iter().map(|(name, _)| (*name).to_owned());
        let name = format!("first write of a process, {}", size_text(bytes));
        report.add(name, names.zip(samples).collect());
        Ok(())
    }

    /// Mounts Firn with a backing that discards data. The guard removes the arena.
    fn mount_firn(&self, setting: &Setting, work: &Path) -> anyhow::Result<(Mounted, Guard)> {
        let backing = work.join("backing");
        let mount_point = work.join("firn");
        std::fs::create_dir_all(&backing)?;
        std::fs::create_dir_all(&mount_point)?;
        let arena = PathBuf::from(format!("/dev/shm/firn-bench-{}.arena", std::process::id()));
        let remove = expect(Leftover::File(arena.clone()));
        let geometry = DiscardMountArgs {
            backing,
            arena,
            arena_bytes: setting.arena_bytes,
            chunk_bytes: setting.chunk_bytes,
            io_threads: self.io_threads,
        };
        Ok((
            Mounted::start(&Server::Discarding(geometry), &mount_point)?,
            remove,
        ))
    }

    /// Lets all writers write one file each at the same time, and removes the files.
    fn measure(&self, server: &Mounted, setting: &Setting) -> anyhow::Result<Sample> {
        let count = (self.total_bytes() / u64::from(self.writers) / setting.write_bytes).max(1);
        let path = |writer| server.path().join(format!("rank{writer}"));
        let task = |writer| Task::Write {
            path: path(writer),
            runs: vec![(count, setting.write_bytes)],
            sync: false,
            over: false,
        };
        let tasks: Vec<Task> = (0..self.writers).map(task).collect();
        let cpu_before = cpu::seconds_of(server.pid());
        let outcomes = worker::run_all(&tasks)?;
        let server_cpu_s = cpu::seconds_of(server.pid()) - cpu_before;
        let gib = (count * setting.write_bytes * u64::from(self.writers)) as f64 / GIB;
        let writers_cpu_s: f64 = outcomes.iter().map(|o| o.cpu_s).sum();
        for writer in 0..self.writers {
            std::fs::remove_file(path(writer))?;
        }
        Ok(vec![
            ("throughput", "GiB/s", gib / worker::elapsed_s(&outcomes)),
            ("CPU", "s/GiB", (server_cpu_s + writers_cpu_s) / gib),
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
            writers: 8,
            total: None,
            write_size: vec![1 << 20, 64 << 10, 4 << 10],
            chunk_size: vec![4 << 20, 128 << 10, 512 << 10, 1 << 20, 2 << 20, 16 << 20],
            arena_size: vec![256 << 20, 64 << 20, 16 << 20],
            io_threads: 4,
        }
    }
}
