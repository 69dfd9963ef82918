//! The same order of writing on the file system of --dir, where no head seeks: nothing to gain, and nothing to lose.

use super::candidate::{Candidate, Site, Way, Written, name_of};
use firn_bench::durable;
use firn_bench::report::Sample;
use firn_bench::worker::{self, Task};

/// Bytes of one write.
const WRITE_BYTES: u64 = 1 << 20;
const MIB: u64 = 1 << 20;

/// A checkpoint of `processes` processes.
#[derive(Clone, Copy, Debug)]
pub struct LocalCheckpoint {
    pub processes: u64,
    pub image_bytes: u64,
}

impl LocalCheckpoint {
    /// Writes it once through Firn.
    pub fn write(&self, candidate: &Candidate, site: &Site<'_>) -> anyhow::Result<Sample> {
        let Way::Firn(options) = candidate.way else {
            unreachable!("only Firn has an order");
        };
        let backing = site.work.subdir("local")?;
        let point = site.work.subdir("firn")?;
        // What is removed is not to be written in this one's time.
        durable::sync_all(&backing)?;
        let arena_bytes = (2 * self.processes * self.image_bytes).max(64 * MIB);
        let options = format!("close=held,fsync=held,arena-size={arena_bytes}{options}");
        let mount = site.firn.mount(&backing, &point, &options)?;
        mount.wait_populated()?;
        let write = |rank| Task::Write {
            path: mount.path().join(name_of(rank)),
            runs: vec![(self.image_bytes / WRITE_BYTES, WRITE_BYTES)],
            sync: false,
            over: false,
        };
        let tasks: Vec<Task> = (0..self.processes).map(write).collect();
        let outcomes = worker::run_with(Some(&site.firn.preload()?), &tasks)?;
        mount.wait_durable(mount.path())?;
        let written = Written::now(&outcomes);
        drop(mount);
        std::fs::remove_dir_all(&backing)?;
        Ok(vec![
            ("durable", "s", written.durable.as_secs_f64()),
            ("closed", "s", written.closed.as_secs_f64()),
        ])
    }
}
