//! Measures all ways to read one held file: from firnd, from the pages that the kernel keeps of it, and from its memory
//! file. The baseline is a file of the same size on the native file system, with its pages in the page cache.

use std::path::{Path, PathBuf};

use crate::firn::Mount;
use crate::options::WorkDir;
use crate::report::{Limit, Report, Sample};
use crate::worker::{self, Task};
use firn_config::size_text;

const GIB: f64 = (1u64 << 30) as f64;
/// Bytes of one read.
const BLOCK_BYTES: u64 = 1 << 20;
/// Way: a file of the native file system, with its pages in the page cache. It is the baseline.
const NATIVE: &str = "native, warm";
/// Way: firnd answers each read from its memory.
const BY_FIRND: &str = "held, by firnd";
/// Way: the preload library copies the bytes out of the shared memory.
const BY_PRELOAD: &str = "held, preload";
/// Way: the kernel keeps pages of the file, but has none at the start.
const PAGES_FIRST: &str = "kernel's pages, first";
/// Way: the kernel has all pages of the file from an earlier read.
const PAGES_AGAIN: &str = "kernel's pages, again";
/// Way: the kernel reads the memory file for the first time.
const MEMORY_FIRST: &str = "memory file, first";
/// Way: the kernel reads the memory file again.
const MEMORY_AGAIN: &str = "memory file, again";
/// Way: the preload library is used, on a mount whose memory files the kernel can read.
const MEMORY_PRELOAD: &str = "memory file, preload";
/// Way: the preload library is used, on a mount whose memory files the kernel cannot read.
const MEMORY_WITHOUT_ROOT: &str = "without root, preload";
/// Goal for read(2): the lowest rate, as a share of the native rate.
const LEAST_READ: f64 = 0.8;
/// Goal for copies from a mapping: the lowest rate, as a share of the native rate.
const LEAST_MAPPED: f64 = 0.9;
/// Goal for memory: the largest use, as a multiple of the size of the file.
const MOST_MEMORY: f64 = 1.05;

/// The mounts that hold the file.
pub(super) struct Mounts<'a> {
    /// A mount without memory files.
    pub(super) plain: &'a Mount<'a>,
    /// A mount with memory files that the kernel cannot read by itself, as on a mount of a user without root.
    pub(super) pages: &'a Mount<'a>,
    /// A mount with memory files that the kernel reads.
    pub(super) memory: &'a Mount<'a>,
    /// The preload library.
    pub(super) preload: PathBuf,
}

/// The file to read, on the native file system and on each mount.
pub(super) struct Files<'a> {
    mounts: Mounts<'a>,
    native: PathBuf,
    bytes: u64,
}

/// What is done before a file is read, so that the read is the first one.
#[derive(Clone, Copy)]
enum Before {
    /// Nothing.
    Nothing,
    /// Make the kernel drop its pages of the file.
    ForgetPages,
    /// Write the file again.
    WriteAnew,
}

/// One way to read the file.
struct ReadWay<'a> {
    name: &'static str,
    path: PathBuf,
    /// What is done before each read.
    before: Before,
    /// The preload library, if the reader loads it.
    preload: Option<&'a Path>,
}

impl<'a> Files<'a> {
    /// Writes the file to the native file system and to each mount.
    pub(super) fn prepare(work: &WorkDir, mounts: Mounts<'a>, bytes: u64) -> anyhow::Result<Self> {
        let files = Self {
            mounts,
            native: work.subdir("native")?.join("image"),
            bytes,
        };
        let plain = files.mounts.plain.path().join("image");
        let pages = files.mounts.pages.path().join("image");
        for path in [&files.native, &plain, &pages] {
            write_with_worker(path, bytes)?;
        }
        read_with_worker(&files.native, bytes, false, None)?;
        Ok(files)
    }

    fn memory_file(&self) -> PathBuf {
        self.mounts.memory.path().join("image")
    }

    /// Returns the ways to read the file that are compared. The first one is the baseline, which reads a file of the
    /// native file system. A way has a name, the file, the preparation of each read, and the preload library if it is
    /// used.
    fn ways(&self) -> Vec<ReadWay<'_>> {
        let preload = Some(self.mounts.preload.as_path());
        let plain_image = self.mounts.plain.path().join("image");
        let pages_image = self.mounts.pages.path().join("image");
        let way = |name, path: &PathBuf, before, preload| ReadWay {
            name,
            path: path.clone(),
            before,
            preload,
        };
        vec![
            way(NATIVE, &self.native, Before::Nothing, None),
            way(BY_FIRND, &plain_image, Before::Nothing, None),
            way(BY_PRELOAD, &plain_image, Before::Nothing, preload),
            way(PAGES_FIRST, &pages_image, Before::ForgetPages, None),
            way(PAGES_AGAIN, &pages_image, Before::Nothing, None),
            way(MEMORY_FIRST, &self.memory_file(), Before::WriteAnew, None),
            way(MEMORY_AGAIN, &self.memory_file(), Before::Nothing, None),
            way(MEMORY_WITHOUT_ROOT, &pages_image, Before::Nothing, preload),
            way(
                MEMORY_PRELOAD,
                &self.memory_file(),
                Before::Nothing,
                preload,
            ),
        ]
    }

    /// Measures each way to read the file, first with read(2) and then through a mapping. Adds the cases and the goals
    /// to the report, and how long the move of the file into a memory file took.
    pub(super) fn measure(&self, repeats: u32, report: &mut Report) -> anyhow::Result<()> {
        let file_system = crate::machine::file_system_of(&self.native);
        report.note(format!(
            "{NATIVE}: the same bytes on {file_system}, in its page cache; {PAGES_FIRST}: the kernel has nothing of the held \
             file; {MEMORY_FIRST}: written anew and settled just before"
        ));
        let mut settling = Vec::new();
        for (call, mmap, goal) in [("read(2)", false, LEAST_READ), ("mmap", true, LEAST_MAPPED)] {
            let ways = self.ways();
            let mut samples = vec![Vec::new(); ways.len()];
            for _ in 0..repeats {
                for (way, samples) in ways.iter().zip(&mut samples) {
                    match way.before {
                        Before::Nothing => {}
                        Before::ForgetPages => forget_pages(&way.path)?,
                        Before::WriteAnew => settling.push(self.write_memory_file()?),
                    }
                    samples.push(read_with_worker(&way.path, self.bytes, mmap, way.preload)?);
                }
            }
            let names = ways.iter().map(|way| way.name.to_owned());
            let name = format!("{} by {call}, 1 process", size_text(self.bytes));
            report.add(name, names.zip(samples).collect());
            self.judge(report, call, goal);
        }
        let name = format!("{} moved into a memory file", size_text(self.bytes));
        report.add(name, vec![("settling".to_owned(), settling)]);
        self.judge_memory(report)
    }

    /// Adds goals for the last case: the rates of the ways that read a memory file.
    fn judge(&self, report: &mut Report, way: &str, least: f64) {
        for name in [
            MEMORY_FIRST,
            MEMORY_AGAIN,
            MEMORY_PRELOAD,
            MEMORY_WITHOUT_ROOT,
        ] {
            let case = report.cases.last();
            let ratio = case.and_then(|case| case.ratio(name, NATIVE, "throughput"));
            let ratio = ratio.as_slice().to_vec();
            let what = format!("{name} by {way} to {NATIVE}");
            report.judge(what, Limit::Least(least), &ratio);
        }
    }

    /// Adds a goal for the memory that the file uses in the arena.
    fn judge_memory(&self, report: &mut Report) -> anyhow::Result<()> {
        let used = self.mounts.memory.number("arena_used_bytes")?;
        let ratio = used as f64 / self.bytes as f64;
        let what = "memory of the arena to the bytes of the file";
        report.judge(what.to_owned(), Limit::Most(MOST_MEMORY), &[ratio]);
        Ok(())
    }

    /// Writes the file again, and waits until all its bytes are in a memory file.
    fn write_memory_file(&self) -> anyhow::Result<Sample> {
        let path = self.memory_file();
        let mount = self.mounts.memory;
        if path.exists() {
            std::fs::remove_file(&path)?;
        }
        let before = mount.number("settled_bytes")?;
        let cpu_before = mount.cpu_s();
        write_with_worker(&path, self.bytes)?;
        let closed_ns = crate::cpu::now_ns();
        mount.wait_settled(before + self.bytes)?;
        let gib = self.bytes as f64 / GIB;
        let seconds = (crate::cpu::now_ns() - closed_ns) as f64 * 1e-9;
        Ok(vec![
            ("until settled", "s/GiB", seconds / gib),
            (
                "CPU of firnd, writing included",
                "s/GiB",
                (mount.cpu_s() - cpu_before) / gib,
            ),
        ])
    }

    /// Removes the file. Otherwise the mounts would drain it at their end.
    pub(super) fn remove(&self) -> anyhow::Result<()> {
        let Mounts {
            plain,
            pages,
            memory,
            ..
        } = self.mounts;
        for mount in [plain, pages, memory] {
            std::fs::remove_file(mount.path().join("image"))?;
        }
        Ok(())
    }
}

/// Writes the file with a worker.
fn write_with_worker(path: &Path, bytes: u64) -> anyhow::Result<()> {
    let task = Task::Write {
        path: path.to_owned(),
        runs: vec![(bytes / BLOCK_BYTES, BLOCK_BYTES)],
        sync: false,
        over: false,
    };
    worker::run_all(&[task]).map(drop)
}

/// Makes the kernel drop its pages of a file of a mount, which it does when the file is opened for writing.
fn forget_pages(path: &Path) -> anyhow::Result<()> {
    drop(std::fs::File::options().write(true).open(path)?);
    Ok(())
}

/// Reads the file once with a worker.
fn read_with_worker(
    path: &Path,
    bytes: u64,
    mmap: bool,
    preload: Option<&Path>,
) -> anyhow::Result<Sample> {
    let task = Task::Read {
        path: path.to_owned(),
        bytes: BLOCK_BYTES,
        mmap,
        passes: 1,
    };
    let outcomes = worker::run_with(preload, &[task])?;
    let gib = bytes as f64 / GIB;
    let cpu_s: f64 = outcomes.iter().map(|outcome| outcome.cpu_s).sum();
    Ok(vec![
        ("throughput", "GiB/s", gib / worker::elapsed_s(&outcomes)),
        ("CPU of the reader", "s/GiB", cpu_s / gib),
    ])
}
