//! `firn bench read`: measures how fast a restart reads a drained file back, with its pages in the page cache.

use std::path::{Path, PathBuf};

use crate::firn::{Firn, Mount};
use crate::options::{Common, WorkDir, parse_size, progress};
use crate::report::{Report, Sample};
use crate::worker::{self, Task};
use firn_config::size_text;

const GIB: f64 = (1u64 << 30) as f64;
/// One way to read a file.
struct ReadWay {
    /// Bytes of one read.
    bytes: u64,
    /// Read through a mapping instead of with read(2).
    mmap: bool,
}

/// The ways that are measured.
const WAYS: [ReadWay; 3] = [
    ReadWay {
        bytes: 1 << 20,
        mmap: false,
    },
    ReadWay {
        bytes: 128 << 10,
        mmap: false,
    },
    ReadWay {
        bytes: 1 << 20,
        mmap: true,
    },
];

/// Reads a drained file back, natively and through Firn, with its pages in the page cache.
///
/// Goal: at least 0.9 of the native rate where firnd may use kernel passthrough (it needs
/// CAP_SYS_ADMIN, so run as root to see it), 0.5 otherwise.
#[derive(Clone, Debug, clap::Args)]
pub struct ReadArgs {
    #[command(flatten)]
    common: Common,
    /// Size of the file (default: 512M, quick 64M).
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
}

impl ReadArgs {
    /// Runs the benchmark and returns its figures. Fails if a candidate cannot be set up or measured.
    pub fn run(&self) -> anyhow::Result<Report> {
        let work = self.common.work_dir()?;
        let firn = Firn::find(self.common.firn.as_deref())?;
        let candidates = self.candidates(&work, &firn)?;
        let size = self.size.unwrap_or(self.common.choose(512 << 20, 64 << 20));
        let mut report = Report::new("read");
        report.note(format!(
            "one reader, a file of {} on {}, page cache warm",
            size_text(size),
            crate::machine::file_system_of(work.path())
        ));
        for candidate in &candidates {
            candidate.prepare(size)?;
        }
        let steps = WAYS.len() as u64 * u64::from(self.common.repeats());
        let bar = progress(steps * candidates.len() as u64, "read");
        for ReadWay { bytes, mmap } in WAYS {
            let mut samples = vec![Vec::new(); candidates.len()];
            for _ in 0..self.common.repeats() {
                for (candidate, samples) in candidates.iter().zip(&mut samples) {
                    samples.push(candidate.measure(size, bytes, mmap)?);
                    bar.inc(1);
                }
            }
            let name = if mmap {
                "mmap".to_owned()
            } else {
                format!("read of {}", size_text(bytes))
            };
            let names = candidates.iter().map(|candidate| candidate.name.to_owned());
            report.add(name, names.zip(samples).collect());
        }
        bar.finish_and_clear();
        Ok(report)
    }

    /// Sets up the candidates, the places from which the file is read: the native file system, and mounts of Firn with
    /// and without kernel passthrough (the kernel reads the file in the backing without firnd).
    fn candidates<'a>(
        &self,
        work: &WorkDir,
        firn: &'a Firn,
    ) -> anyhow::Result<Vec<ReadCandidate<'a>>> {
        let mut all = vec![ReadCandidate {
            name: "native",
            dir: work.subdir("native")?,
            mount: None,
        }];
        if self.common.baseline_only {
            return Ok(all);
        }
        let ways = [
            ("firn", "passthrough=auto"),
            ("firn, no passthrough", "passthrough=off"),
        ];
        for (name, options) in ways {
            let backing = work.subdir(&format!("{options}.b"))?;
            let point = work.subdir(options)?;
            let mount = firn.mount(&backing, &point, options)?;
            all.push(ReadCandidate {
                name,
                dir: point,
                mount: Some(mount),
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
        Self { common, size: None }
    }
}

/// One file system from which the file is read.
struct ReadCandidate<'a> {
    name: &'static str,
    /// The directory of the file: the mount point, or a native directory.
    dir: PathBuf,
    mount: Option<Mount<'a>>,
}

impl ReadCandidate<'_> {
    fn file(&self) -> PathBuf {
        self.dir.join("image.ckpt")
    }

    /// Writes the file, waits until it is durable, and reads it once, so that its pages are in the page cache.
    fn prepare(&self, size: u64) -> anyhow::Result<()> {
        let runs = vec![(size >> 20, 1 << 20)];
        worker::run_all(&[Task::Write {
            path: self.file(),
            runs,
            sync: false,
            over: false,
        }])?;
        if let Some(mount) = &self.mount {
            mount.wait_durable(&self.file())?;
        }
        read_into_page_cache(&self.file())
    }

    /// Reads the whole file in a new process, with `block_bytes` bytes in each read, or through a mapping. Returns
    /// throughput and processor time as a sample.
    fn measure(&self, size: u64, block_bytes: u64, mmap: bool) -> anyhow::Result<Sample> {
        // A file of at most 512 MiB is read several times: at most four times, and at most 1 GiB in total.
        let passes = ((1 << 30) / size).clamp(1, 4);
        let cpu_before = self.mount.as_ref().map_or(0.0, Mount::cpu_s);
        let task = Task::Read {
            path: self.file(),
            bytes: block_bytes,
            mmap,
            passes,
        };
        let outcomes = worker::run_all(&[task])?;
        let server_cpu_s = self.mount.as_ref().map_or(0.0, Mount::cpu_s) - cpu_before;
        // The file was written in whole MiB.
        let gib = (size >> 20 << 20) as f64 * passes as f64 / GIB;
        Ok(vec![
            ("throughput", "GiB/s", gib / worker::elapsed_s(&outcomes)),
            ("CPU", "s/GiB", (server_cpu_s + outcomes[0].cpu_s) / gib),
        ])
    }
}

/// Reads a file once, so that its pages are in the page cache.
fn read_into_page_cache(file: &Path) -> anyhow::Result<()> {
    let path = file.to_owned();
    worker::run_all(&[Task::Read {
        path,
        bytes: 1 << 20,
        mmap: false,
        passes: 1,
    }])
    .map(drop)
}
