//! Measures the pause of a writer when firnd is killed, on a mount with open files, directories and pending data.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use firn_config::size_text;
use parking_lot::Mutex;

use crate::firn::{Firn, Mount};
use crate::machine::private_bytes;
use crate::options::{WorkDir, progress};
use crate::report::{Report, Sample};
use crate::worker::make_buffer;

/// Time between two writes. It is the precision of a measured pause.
const WRITE_EVERY: Duration = Duration::from_millis(1);
/// Bytes of one write of the writer.
const WRITE_BYTES: u64 = 4096;
/// Number of blocks that the writer overwrites again and again, so that the number of pending bytes stays constant.
const WRITER_BLOCKS: u64 = 256;
/// Bytes of one write of the pending data.
const FILL_BYTES: u64 = 1 << 20;
/// Number of subdirectories of one directory.
const FAN_OUT: u32 = 1000;

/// The state of a mount when firnd is killed.
#[derive(Clone, Copy)]
pub(super) struct Load {
    pub(super) handles: u32,
    pub(super) directories: u32,
    pub(super) pending_bytes: u64,
}

/// The measured pauses.
pub(super) struct Pauses {
    /// Durations in seconds, sorted.
    seconds: Vec<f64>,
    /// Private memory of the keeper in bytes.
    pub(super) keeper_bytes: u64,
}

impl Pauses {
    /// Returns a percentile of the pauses, by the nearest-rank method.
    pub(super) fn percentile(&self, percent: usize) -> f64 {
        let rank = (self.seconds.len() * percent).div_ceil(100);
        let found = self.seconds.get(rank.saturating_sub(1));
        found.copied().unwrap_or(0.0)
    }
}

impl Load {
    /// Kills firnd `kills` times under a writer, and measures the pause of each. Adds a case to the report.
    pub(super) fn measure(
        &self,
        firn: &Firn,
        work: &WorkDir,
        name: &str,
        kills: u32,
        report: &mut Report,
    ) -> anyhow::Result<Pauses> {
        let backing = work.subdir(&format!("{name}.b"))?;
        let mount_point = work.subdir(name)?;
        let bar = progress(u64::from(kills), "takeover");
        let mut mount = firn.mount(&backing, &mount_point, &self.options("auto"))?;
        let opened = self.prepare(mount.path())?;
        let writer = Writer::start(File::create(mount.path().join("writer"))?)?;
        let mut samples: Vec<Sample> = Vec::new();
        for _ in 0..kills {
            mount.wait_served_well()?;
            writer.begin();
            mount.kill_firnd()?;
            mount.note_takeover()?;
            let told = mount.figure("takeover_last_seconds")?;
            samples.push(vec![
                ("pause", "s", writer.longest()?.as_secs_f64()),
                ("told by the status", "s", told),
            ]);
            bar.inc(1);
        }
        bar.finish_and_clear();
        let keeper_bytes = private_bytes(mount.parent()?)?;
        writer.end()?;
        drop(opened);
        let mut seconds: Vec<f64> = samples.iter().map(|sample| sample[0].2).collect();
        seconds.sort_by(f64::total_cmp);
        let pauses = Pauses {
            seconds,
            keeper_bytes,
        };
        let again = self.mount_again(firn, mount, &backing, &mount_point)?;
        report.note(format!(
            "{} open files, {} directories: median {:.3} s, p99 {:.3} s, longest {:.3} s of {kills} kills; own memory of the keeper {} KiB",
            self.handles,
            self.directories,
            pauses.percentile(50),
            pauses.percentile(99),
            pauses.percentile(100),
            keeper_bytes >> 10,
        ));
        let title = format!(
            "{} open files, {} directories, {} pending",
            self.handles,
            self.directories,
            size_text(self.pending_bytes)
        );
        report.add(
            title,
            vec![
                ("mounted again, files lost".into(), vec![again]),
                ("takeover=auto".into(), samples),
            ],
        );
        Ok(pauses)
    }

    fn options(&self, takeover: &str) -> String {
        let arena_bytes = self.pending_bytes + self.pending_bytes / 2 + (128 << 20);
        format!("drain=demand,close=held,fsync=held,arena-size={arena_bytes},takeover={takeover}")
    }

    /// Makes the directories, the open files and the pending data of the load. Returns the open files.
    fn prepare(&self, mount: &Path) -> anyhow::Result<Vec<File>> {
        firn_backing::raise_descriptor_limit().context("cannot raise the limit of descriptors")?;
        for index in 0..self.directories {
            let parent = mount.join(format!("above{}", index / FAN_OUT));
            if index % FAN_OUT == 0 {
                fs::create_dir(&parent)?;
            }
            fs::create_dir(parent.join(format!("dir{index}")))?;
        }
        let files = mount.join("files");
        fs::create_dir(&files)?;
        let create_file = |index| File::create(files.join(format!("file{index}")));
        let opened: Vec<File> = (0..self.handles)
            .map(create_file)
            .collect::<Result<_, _>>()?;
        let buffer = make_buffer(FILL_BYTES);
        // The blocks are dealt out to the files in turn, so each file has them at ascending offsets.
        let blocks = self.pending_bytes / FILL_BYTES;
        for (block, file) in (0..blocks).zip(opened.iter().cycle()) {
            let offset = block / u64::from(self.handles) * FILL_BYTES;
            file.write_all_at(&buffer, offset)?;
        }
        Ok(opened)
    }

    /// Measures the alternative to a takeover: kills firnd and mounts the arena again.
    fn mount_again(
        &self,
        firn: &Firn,
        mount: Mount<'_>,
        backing: &Path,
        mount_point: &Path,
    ) -> anyhow::Result<Sample> {
        mount.crash()?;
        let began = Instant::now();
        let again = firn.mount(backing, mount_point, &self.options("no"))?;
        let seconds = began.elapsed().as_secs_f64();
        // Without these files the unmount has nothing to drain, and is quick.
        fs::remove_dir_all(mount_point.join("files"))?;
        fs::remove_file(mount_point.join("writer"))?;
        drop(again);
        Ok(vec![("pause", "s", seconds)])
    }
}

/// A thread that writes blocks and records its longest wait.
struct Writer {
    shared: &'static Shared,
    thread: JoinHandle<std::io::Result<()>>,
}

#[derive(Default)]
struct Shared {
    ends: AtomicBool,
    longest: Mutex<Duration>,
    /// Writes so far.
    count: AtomicU64,
}

impl Writer {
    /// Starts a thread that overwrites the blocks of `file` again and again.
    fn start(file: File) -> anyhow::Result<Self> {
        // A writer without a mount may wait for ever. So the shared values are never freed.
        let shared: &'static Shared = Box::leak(Box::default());
        let write = move || {
            let buffer = make_buffer(WRITE_BYTES);
            for block in (0..WRITER_BLOCKS).cycle() {
                if shared.ends.load(Ordering::Relaxed) {
                    break;
                }
                let began = Instant::now();
                file.write_all_at(&buffer, block * WRITE_BYTES)?;
                let took = began.elapsed();
                let mut longest = shared.longest.lock();
                *longest = took.max(*longest);
                drop(longest);
                shared.count.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(WRITE_EVERY);
            }
            Ok(())
        };
        let thread = std::thread::Builder::new().spawn(write);
        Ok(Self {
            shared,
            thread: thread.context("cannot start a thread")?,
        })
    }

    /// Forgets the longest wait so far.
    fn begin(&self) {
        *self.shared.longest.lock() = Duration::ZERO;
    }

    /// Waits until the writer writes again, and returns its longest wait since [`Writer::begin`].
    fn longest(&self) -> anyhow::Result<Duration> {
        let before = self.shared.count.load(Ordering::Relaxed);
        crate::firn::wait_until("the writer goes on", || {
            ensure!(!self.thread.is_finished(), "the writer saw an error");
            // The second one began after the pause.
            Ok(self.shared.count.load(Ordering::Relaxed) >= before + 2)
        })?;
        Ok(*self.shared.longest.lock())
    }

    /// Ends the thread. Fails if one of its writes failed.
    fn end(self) -> anyhow::Result<()> {
        self.shared.ends.store(true, Ordering::Relaxed);
        let ended = self.thread.join();
        ended
            .map_err(|_| anyhow!("the writer panicked"))?
            .context("the writer saw an error")
    }
}
