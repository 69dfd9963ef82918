//! The processes that do the work: writers, readers, makers of files.
//!
//! A worker is this program again (`firn-bench worker`, hidden). It reads one [`Task`] as a line of
//! JSON, makes its buffers, answers `ready`, waits for a time to begin at, works, and answers one [`Outcome`]. So
//! neither its start nor its buffers are in a figure, and all workers begin together.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cpu;

mod copy;
mod direct;
mod forked;
mod records;
mod steps;

pub use copy::{Copy, Region, Way, make_region};
pub use forked::{ForkedWrite, Sharing};
pub use records::Records;
pub use steps::Steps;

/// Long enough to tell one process when to begin.
const TIME_TO_START_NS: u64 = 200_000;

/// What a program tells its workers to do.
pub trait Work: Serialize + DeserializeOwned {
    /// Makes buffers and opens files: none of that is in a figure.
    fn prepare(self) -> anyhow::Result<Box<dyn Job>>;
}

/// What is timed.
pub trait Job {
    /// Does it once.
    fn run(&mut self) -> anyhow::Result<()>;
}

/// What the workers of `firn bench` do.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "task")]
pub enum Task {
    /// Opens or creates `path`, writes sequentially, closes.
    Write {
        /// The file.
        path: PathBuf,
        /// (count, bytes) of writes, one after the other.
        runs: Vec<(u64, u64)>,
        /// Open with O_SYNC.
        sync: bool,
        /// Leave what is in the file and write over it, instead of beginning with an empty one.
        over: bool,
    },
    /// Creates `path` with all its room and writes past the page cache.
    Direct {
        /// The file.
        path: PathBuf,
        /// How many writes.
        count: u64,
        /// Bytes of one.
        bytes: u64,
    },
    /// The first large write of a process, which may have forked.
    ForkedWrite(ForkedWrite),
    /// Copies between this process's memory and a region.
    Copy(Copy),
    /// Reads `path` from start to end, `passes` times.
    Read {
        /// The file.
        path: PathBuf,
        /// Bytes of one read; with `mmap`, of one copy out of the mapping.
        bytes: u64,
        /// Through a shared mapping instead of pread(2).
        mmap: bool,
        /// How often.
        passes: u64,
    },
    /// Computes.
    Steps(Steps),
    /// Reads or writes the records of a file.
    Records(Records),
    /// One operation on each of `count` names in `dir`.
    Names {
        /// The directory.
        dir: PathBuf,
        /// How many names.
        count: u64,
        /// What to do with each.
        operation: Operation,
    },
}

/// What [`Task::Names`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// open(O_CREAT), write 4 KiB, close.
    Create,
    /// open(O_CREAT), write 1 KiB, close.
    CreateSmall,
    /// open(O_CREAT), close.
    CreateEmpty,
    /// stat(2).
    Stat,
    /// opendir and readdir to the end, once; `count` names must be there.
    List,
    /// unlink(2).
    Unlink,
    /// link(2): a second name for each file.
    Link,
    /// open, write 1 KiB in the middle of what is there, close.
    Patch,
}

/// What a worker measured.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// [`cpu::now_ns`] when it began.
    pub begin_ns: u64,
    /// [`cpu::now_ns`] when it was done; for writers: when close returned.
    pub end_ns: u64,
    /// Processor time it used between the two.
    pub cpu_s: f64,
}

/// Seconds from the first begin to the last end.
pub fn elapsed_s(outcomes: &[Outcome]) -> f64 {
    let begin = outcomes.iter().map(|o| o.begin_ns).min().unwrap_or(0);
    let end = outcomes.iter().map(|o| o.end_ns).max().unwrap_or(0);
    (end - begin) as f64 * 1e-9
}

/// Runs `tasks`, one process each, all at once.
pub fn run_all<W: Work>(tasks: &[W]) -> anyhow::Result<Vec<Outcome>> {
    run_with(None, tasks)
}

/// [`run_all`], in processes that load the library `preload`.
pub fn run_with<W: Work>(preload: Option<&Path>, tasks: &[W]) -> anyhow::Result<Vec<Outcome>> {
    run_from(0, preload, tasks)
}

/// [`run_with`], with all processes beginning at the same moment, as after a barrier of MPI: the first is not done
/// before the last begins.
pub fn run_together<W: Work>(preload: Option<&Path>, tasks: &[W]) -> anyhow::Result<Vec<Outcome>> {
    run_from(TIME_TO_START_NS * tasks.len() as u64, preload, tasks)
}

/// Returns the processes begin this long after the last is ready.
fn run_from<W: Work>(
    delay_ns: u64,
    preload: Option<&Path>,
    tasks: &[W],
) -> anyhow::Result<Vec<Outcome>> {
    let mut workers = Vec::new();
    for task in tasks {
        workers.push(Worker::start(task, preload)?);
    }
    for worker in &mut workers {
        worker.expect_ready()?;
    }
    let begin_ns = cpu::now_ns() + delay_ns;
    for worker in &mut workers {
        worker.go(begin_ns)?;
    }
    workers.into_iter().map(Worker::finish).collect()
}

struct Worker {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Worker {
    fn start(task: &impl Work, preload: Option<&Path>) -> anyhow::Result<Self> {
        let mut command = this_program("worker")?;
        // The library leaves programs alone that are called as Firn's own.
        command.arg0("firn-bench-worker");
        if let Some(library) = preload {
            command.env("LD_PRELOAD", library);
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a worker process")?;
        let answers = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let mut worker = Self { child, answers };
        let line = serde_json::to_string(task)?;
        worker.tell(&line)?;
        Ok(worker)
    }

    fn tell(&mut self, line: &str) -> anyhow::Result<()> {
        let stdin = self.child.stdin.as_mut().expect("stdin is piped");
        writeln!(stdin, "{line}").context("a worker process died early")
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        if line.is_empty() {
            bail!("a worker process failed (its message is above)");
        }
        Ok(line.trim_end().to_owned())
    }

    fn expect_ready(&mut self) -> anyhow::Result<()> {
        match self.line()?.as_str() {
            "ready" => Ok(()),
            other => bail!("a worker process answered {other:?} instead of `ready`"),
        }
    }

    /// Lets it begin at this time.
    fn go(&mut self, begin_ns: u64) -> anyhow::Result<()> {
        self.tell(&begin_ns.to_string())
    }

    fn finish(mut self) -> anyhow::Result<Outcome> {
        let line = self.line()?;
        self.child.wait()?;
        serde_json::from_str(&line).with_context(|| format!("a worker process answered {line:?}"))
    }
}

/// Returns a command that is this program with the hidden verb `role`, in a process group of its own: Ctrl-C does not
/// reach it.
pub fn this_program(role: &str) -> anyhow::Result<Command> {
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let mut command = Command::new(program);
    command.arg(role).process_group(0);
    Ok(command)
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Nothing is left to do where it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the worker's side: the hidden verb `worker` of a program whose tasks are `W`.
pub fn main<W: Work>() -> anyhow::Result<()> {
    // A worker must not outlive a benchmark that is killed.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let mut lines = std::io::stdin().lines();
    let mut next = || {
        lines
            .next()
            .context("the benchmark went away")?
            .map_err(anyhow::Error::from)
    };
    let task: W = serde_json::from_str(&next()?)?;
    let mut job = task.prepare()?;
    println!("ready");
    let begin_ns: u64 = next()?.parse().context("a time to begin at")?;
    std::thread::sleep(Duration::from_nanos(begin_ns.saturating_sub(cpu::now_ns())));
    let begin_ns = cpu::now_ns();
    let cpu_before = cpu::seconds_of_self();
    job.run()?;
    let end_ns = cpu::now_ns();
    let cpu_s = cpu::seconds_of_self() - cpu_before;
    println!(
        "{}",
        serde_json::to_string(&Outcome {
            begin_ns,
            end_ns,
            cpu_s
        })?
    );
    Ok(())
}

impl Work for Task {
    fn prepare(self) -> anyhow::Result<Box<dyn Job>> {
        Ok(Box::new(Prepared::new(self)?))
    }
}

/// Bytes to write. They are not zeros: nothing on the way may find the data cheap. It also touches every page.
pub fn make_buffer(bytes: u64) -> Vec<u8> {
    (0..bytes)
        .map(|i| (i.wrapping_mul(0x9e37_79b9) >> 7) as u8 | 1)
        .collect()
}

/// A [`Task`] with its memory and its open files.
struct Prepared {
    task: Task,
    buffer: Vec<u8>,
    /// Where [`Task::Copy`] has no shared region.
    private: Vec<u8>,
    /// The file of [`Task::Direct`].
    opened: Option<File>,
    /// Where the blocks of [`Task::Records`] are.
    offsets: Vec<u64>,
    /// The memory of [`Task::ForkedWrite`].
    forked_write: Option<forked::Prepared>,
}

impl Prepared {
    fn new(task: Task) -> anyhow::Result<Self> {
        let bytes = match &task {
            Task::Write { runs, .. } => runs.iter().map(|run| run.1).max().unwrap_or(0),
            Task::Read { bytes, .. } => *bytes,
            Task::Copy(copy) => copy.block_bytes,
            Task::Direct { bytes, .. } => direct::room(*bytes),
            Task::Records(records) => records.record_bytes,
            Task::Names { .. } => 4096,
            Task::ForkedWrite(_) => 1,
            Task::Steps(_) => 0,
        };
        let buffer = make_buffer(bytes);
        let private = match &task {
            Task::Copy(copy) => copy.private(),
            _ => Vec::new(),
        };
        let opened = match &task {
            Task::Direct { path, count, bytes } => Some(direct::make(path, count * bytes)?),
            _ => None,
        };
        let offsets = match &task {
            Task::Records(records) => records.offsets(),
            _ => Vec::new(),
        };
        let forked_write = match &task {
            Task::ForkedWrite(write) => Some(write.prepare()?),
            _ => None,
        };
        Ok(Self {
            task,
            buffer,
            private,
            opened,
            offsets,
            forked_write,
        })
    }
}

impl Job for Prepared {
    fn run(&mut self) -> anyhow::Result<()> {
        match &self.task {
            Task::Write {
                path,
                runs,
                sync,
                over,
            } => write(path, runs, *sync, *over, &self.buffer),
            Task::Direct { count, bytes, .. } => direct::write(
                self.opened.as_ref().expect("opened before"),
                *count,
                *bytes,
                &self.buffer,
            ),
            Task::ForkedWrite(write) => write.run(self.forked_write.as_mut().expect("made before")),
            Task::Copy(copy) => copy.run(&mut self.buffer, &mut self.private),
            Task::Records(records) => records.run(&self.offsets, &mut self.buffer),
            Task::Steps(steps) => {
                steps.run();
                Ok(())
            }
            Task::Read {
                path,
                mmap: false,
                passes,
                ..
            } => {
                let path = path.clone();
                read(&path, *passes, &mut self.buffer)
            }
            Task::Read {
                path,
                mmap: true,
                passes,
                ..
            } => {
                let path = path.clone();
                read_mapped(&path, *passes, &mut self.buffer)
            }
            Task::Names {
                dir,
                count,
                operation,
            } => names(dir, *count, *operation, &self.buffer),
        }
    }
}

fn write(
    path: &Path,
    runs: &[(u64, u64)],
    sync: bool,
    over: bool,
    buffer: &[u8],
) -> anyhow::Result<()> {
    let flags = if sync { libc::O_SYNC } else { 0 };
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(!over)
        .custom_flags(flags)
        .open(path)
        .with_context(|| format!("cannot create {}", path.display()))?;
    for (count, bytes) in runs {
        for _ in 0..*count {
            file.write_all(&buffer[..*bytes as usize])
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    close(file).with_context(|| format!("close of {} failed", path.display()))
}

/// close(2) with its result, which dropping a [`File`] hides.
pub fn close(file: File) -> std::io::Result<()> {
    use std::os::fd::IntoRawFd;
    // SAFETY: the descriptor was owned by `file` and is given up here, exactly once.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

fn read(path: &PathBuf, passes: u64, buffer: &mut [u8]) -> anyhow::Result<()> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    for _ in 0..passes {
        let mut offset = 0;
        loop {
            match file.read_at(buffer, offset)? {
                0 => break,
                n => offset += n as u64,
            }
        }
    }
    Ok(())
}

fn read_mapped(path: &PathBuf, passes: u64, buffer: &mut [u8]) -> anyhow::Result<()> {
    use std::os::fd::AsRawFd;
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let len = file.metadata()?.len() as usize;
    for _ in 0..passes {
        // SAFETY: a new mapping at an address the kernel chooses; the file is not cut while it is
        // read, as only the benchmark knows it. By the C library, as programs do and the preload library sees.
        let start = unsafe {
            let (anywhere, number) = (std::ptr::null_mut(), file.as_raw_fd());
            libc::mmap(anywhere, len, libc::PROT_READ, libc::MAP_SHARED, number, 0)
        };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error()).context("cannot map it");
        }
        // SAFETY: the mapping has `len` bytes and lives until munmap below.
        let mapped = unsafe { std::slice::from_raw_parts(start.cast::<u8>(), len) };
        for part in mapped.chunks(buffer.len()) {
            buffer[..part.len()].copy_from_slice(part);
            std::hint::black_box(&buffer);
        }
        // SAFETY: exactly what mmap returned; `mapped` is not used again.
        unsafe { libc::munmap(start, len) };
    }
    Ok(())
}

/// Creates a file with these bytes and closes it.
fn create(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    close(file)
}

/// Name number `index` in a directory of the metadata benchmark.
pub fn name_of(index: u64) -> String {
    format!("rank_{index:06}")
}

fn names(dir: &PathBuf, count: u64, operation: Operation, buffer: &[u8]) -> anyhow::Result<()> {
    if operation == Operation::List {
        let found = std::fs::read_dir(dir)?.count() as u64;
        anyhow::ensure!(
            found == count,
            "{} has {found} names, not {count}",
            dir.display()
        );
        return Ok(());
    }
    for index in 0..count {
        let path = dir.join(name_of(index));
        let done = match operation {
            Operation::Create => create(&path, buffer),
            Operation::CreateSmall => create(&path, &buffer[..1024]),
            Operation::CreateEmpty => create(&path, &[]),
            Operation::Patch => OpenOptions::new().write(true).open(&path).and_then(|file| {
                file.write_all_at(&buffer[..1024], 1024)?;
                close(file)
            }),
            Operation::Stat => std::fs::symlink_metadata(&path).map(drop),
            Operation::Unlink => std::fs::remove_file(&path),
            Operation::Link => std::fs::hard_link(&path, path.with_extension("link")),
            Operation::List => unreachable!("handled above"),
        };
        done.with_context(|| format!("{operation:?} of {} failed", path.display()))?;
    }
    Ok(())
}
