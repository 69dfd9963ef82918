//! Runs the measured work of a benchmark in worker processes.
//!
//! A worker process runs this program with the hidden verb `worker`. It reads one [`Task`] as a line of JSON, makes its
//! buffers and answers `ready`. It then waits for the start time, does the work, and answers one [`Outcome`]. Therefore
//! the figures include neither the start of the process nor its buffers, and all workers begin together.

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

/// Time in nanoseconds that is enough to send the start time to one process.
const TIME_TO_START_NS: u64 = 200_000;

/// A task that a program sends to its workers, before it is prepared.
pub trait Work: Serialize + DeserializeOwned {
    /// Makes the buffers and opens the files of the task. This time is not measured.
    fn prepare(self) -> anyhow::Result<Box<dyn Job>>;
}

/// A prepared task, whose time is measured.
pub trait Job {
    /// Does the work once.
    fn run(&mut self) -> anyhow::Result<()>;
}

/// The tasks of the workers of `firn bench`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "task")]
pub enum Task {
    /// Opens or creates a file, writes to it sequentially, and closes it.
    Write {
        /// The file.
        path: PathBuf,
        /// The writes, as runs of writes of equal size: the number of writes and the bytes of each.
        runs: Vec<(u64, u64)>,
        /// Open the file with O_SYNC.
        sync: bool,
        /// Overwrite the content of the file. Otherwise the file is truncated first.
        over: bool,
    },
    /// Creates a file with all its blocks allocated, and writes to it past the page cache.
    Direct {
        /// The file.
        path: PathBuf,
        /// Number of writes.
        count: u64,
        /// Bytes of one write.
        bytes: u64,
    },
    /// The first large write of a process, which may have forked.
    ForkedWrite(ForkedWrite),
    /// Copies between the memory of the worker and a region.
    Copy(Copy),
    /// Reads a file from start to end, one or more times.
    Read {
        /// The file.
        path: PathBuf,
        /// Bytes of one read. With `mmap`, bytes of one copy from the mapping.
        bytes: u64,
        /// Read through a shared mapping instead of with pread(2).
        mmap: bool,
        /// How often the file is read.
        passes: u64,
    },
    /// Computes in steps.
    Steps(Steps),
    /// Reads or writes the records of a file.
    Records(Records),
    /// Does one operation for each of `count` names in a directory.
    Names {
        /// The directory.
        dir: PathBuf,
        /// Number of names.
        count: u64,
        /// The operation.
        operation: Operation,
    },
}

/// The operation of [`Task::Names`].
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
    /// opendir, and readdir to the end, once for the directory. Fails if the directory does not have `count` names.
    List,
    /// unlink(2).
    Unlink,
    /// link(2), which makes a second name for each file.
    Link,
    /// open, write 1 KiB in the middle of the file, close.
    Patch,
}

/// The measurement of a worker.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// Time at which the work began ([`cpu::now_ns`]).
    pub begin_ns: u64,
    /// Time at which the work was done. For writers this is the return of close(2).
    pub end_ns: u64,
    /// Processor time that the worker used meanwhile, in seconds.
    pub cpu_s: f64,
}

/// Returns the seconds from the beginning of the first worker to the end of the last.
pub fn elapsed_s(outcomes: &[Outcome]) -> f64 {
    let begin = outcomes.iter().map(|o| o.begin_ns).min().unwrap_or(0);
    let end = outcomes.iter().map(|o| o.end_ns).max().unwrap_or(0);
    (end - begin) as f64 * 1e-9
}

/// Runs each task in a process of its own, all at once. Returns the outcomes in the order of the tasks. Fails if one of
/// the tasks fails.
pub fn run_all<W: Work>(tasks: &[W]) -> anyhow::Result<Vec<Outcome>> {
    run_with(None, tasks)
}

/// Runs tasks as [`run_all`] does, in processes that load the library `preload`.
pub fn run_with<W: Work>(preload: Option<&Path>, tasks: &[W]) -> anyhow::Result<Vec<Outcome>> {
    run_delayed(0, preload, tasks)
}

/// Runs tasks as [`run_with`] does. All processes begin at the same time, as after a barrier of MPI, so that the first
/// does not finish before the last begins.
pub fn run_together<W: Work>(preload: Option<&Path>, tasks: &[W]) -> anyhow::Result<Vec<Outcome>> {
    run_delayed(TIME_TO_START_NS * tasks.len() as u64, preload, tasks)
}

/// Runs tasks as [`run_with`] does. All processes begin `delay_ns` nanoseconds after the last of them is ready.
fn run_delayed<W: Work>(
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
        worker.begin_at(begin_ns)?;
    }
    workers.into_iter().map(Worker::finish).collect()
}

/// A running worker process. Dropping the value kills it.
struct Worker {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Worker {
    /// Starts a worker and sends the task to it.
    fn start(task: &impl Work, preload: Option<&Path>) -> anyhow::Result<Self> {
        let mut command = this_program("worker")?;
        // The preload library does nothing in programs with a name of Firn.
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

    /// Sends a line to the worker.
    fn tell(&mut self, line: &str) -> anyhow::Result<()> {
        let stdin = self.child.stdin.as_mut().expect("stdin is piped");
        writeln!(stdin, "{line}").context("a worker process died early")
    }

    /// Reads a line from the worker. Fails if the worker has ended.
    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        if line.is_empty() {
            bail!("a worker process failed (its message is above)");
        }
        Ok(line.trim_end().to_owned())
    }

    /// Waits until the worker is ready to begin.
    fn expect_ready(&mut self) -> anyhow::Result<()> {
        match self.line()?.as_str() {
            "ready" => Ok(()),
            other => bail!("a worker process answered {other:?} instead of `ready`"),
        }
    }

    /// Tells the worker at which time to begin.
    fn begin_at(&mut self, begin_ns: u64) -> anyhow::Result<()> {
        self.tell(&begin_ns.to_string())
    }

    /// Waits until the worker has ended, and returns its outcome.
    fn finish(mut self) -> anyhow::Result<Outcome> {
        let line = self.line()?;
        self.child.wait()?;
        serde_json::from_str(&line).with_context(|| format!("a worker process answered {line:?}"))
    }
}

/// Returns a command that runs this program with the hidden verb `role`. It has a process group of its own, so that
/// Ctrl-C does not reach it.
pub fn this_program(role: &str) -> anyhow::Result<Command> {
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let mut command = Command::new(program);
    command.arg(role).process_group(0);
    Ok(command)
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Both calls do nothing if the worker has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the hidden verb `worker`: reads a task, does it at the start time, and prints the outcome. `W` are the tasks of
/// the program.
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

/// Returns a buffer of bytes to write, with all its pages in memory. No byte is zero, so that nothing on the way can
/// treat the data as a hole.
pub fn make_buffer(bytes: u64) -> Vec<u8> {
    (0..bytes)
        .map(|i| (i.wrapping_mul(0x9e37_79b9) >> 7) as u8 | 1)
        .collect()
}

/// A [`Task`] whose memory is allocated and whose files are open.
struct Prepared {
    task: Task,
    buffer: Vec<u8>,
    /// The region of a [`Task::Copy`] that has no shared region. Otherwise empty.
    private: Vec<u8>,
    /// The file of [`Task::Direct`].
    opened: Option<File>,
    /// The offsets of the records of [`Task::Records`], in the order in which they are visited.
    offsets: Vec<u64>,
    /// The memory of [`Task::ForkedWrite`].
    forked_write: Option<forked::Prepared>,
}

impl Prepared {
    /// Allocates the memory and opens the files that the task needs, so that its measured time does not include that.
    fn new(task: Task) -> anyhow::Result<Self> {
        let bytes = match &task {
            Task::Write { runs, .. } => runs.iter().map(|run| run.1).max().unwrap_or(0),
            Task::Read { bytes, .. } => *bytes,
            Task::Copy(copy) => copy.block_bytes,
            Task::Direct { bytes, .. } => direct::buffer_bytes(*bytes),
            Task::Records(records) => records.record_bytes,
            // The longest write to one of the files.
            Task::Names { .. } => 4096,
            // This task has memory of its own.
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
    /// Does the work of the task. The caller measures how long this takes.
    fn run(&mut self) -> anyhow::Result<()> {
        // `new` has made what each kind of task needs.
        match &self.task {
            Task::Write {
                path,
                runs,
                sync,
                over,
            } => write_file(path, runs, *sync, *over, &self.buffer),
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
                read_file(&path, *passes, &mut self.buffer)
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
            } => for_each_name(dir, *count, *operation, &self.buffer),
        }
    }
}

/// Executes [`Task::Write`]: writes a file from start to end, and closes it. Each of `runs` is a number of writes and
/// the bytes of one write. `sync` opens the file with O_SYNC, and `keeps_bytes` keeps its old bytes until they are
/// overwritten.
fn write_file(
    path: &Path,
    runs: &[(u64, u64)],
    sync: bool,
    keeps_bytes: bool,
    buffer: &[u8],
) -> anyhow::Result<()> {
    let flags = if sync { libc::O_SYNC } else { 0 };
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(!keeps_bytes)
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

/// Closes a file and returns the result of close(2), which dropping a [`File`] ignores.
pub fn close(file: File) -> std::io::Result<()> {
    use std::os::fd::IntoRawFd;
    // SAFETY: the descriptor was owned by `file` and is given up here, exactly once.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Executes [`Task::Read`] with pread(2): reads the whole file in blocks of the buffer's size, `passes` times.
fn read_file(path: &PathBuf, passes: u64, buffer: &mut [u8]) -> anyhow::Result<()> {
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

/// Executes [`Task::Read`] through a shared mapping, which is made anew for each pass: copies all bytes into the
/// buffer, block by block.
fn read_mapped(path: &PathBuf, passes: u64, buffer: &mut [u8]) -> anyhow::Result<()> {
    use std::os::fd::AsRawFd;
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let len = file.metadata()?.len() as usize;
    for _ in 0..passes {
        // The call goes through the C library, as in most programs, so that the preload library sees it.
        // SAFETY: this is a new mapping at an address that the kernel chooses. The file is not truncated while it is
        // read, because only the benchmark uses it.
        let start = unsafe {
            let any_address = std::ptr::null_mut();
            let fd = file.as_raw_fd();
            libc::mmap(any_address, len, libc::PROT_READ, libc::MAP_SHARED, fd, 0)
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

/// Returns the name number `index` of [`Task::Names`].
pub fn name_of(index: u64) -> String {
    format!("rank_{index:06}")
}

/// Executes [`Task::Names`]: does one operation for each of `count` names in a directory. `List` reads the directory
/// once, and fails if the number of names is not `count`.
fn for_each_name(
    dir: &PathBuf,
    count: u64,
    operation: Operation,
    buffer: &[u8],
) -> anyhow::Result<()> {
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
