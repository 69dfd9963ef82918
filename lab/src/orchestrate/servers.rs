//! I/O servers of this run: a model of a disk each, with its files in memory.

use std::path::{Path, PathBuf};

use super::candidate::Checkpoint;
use crate::serve::{Mounted, Server, delays};
use firn_bench::options::WorkDir;

/// Threads of a server beside one for each process.
const SPARE_THREADS: usize = 8;

/// Servers that are empty at first; what was written to them goes with them.
pub struct Servers {
    mounts: Vec<Mounted>,
    sources: Vec<PathBuf>,
}

impl Servers {
    /// Starts those of `checkpoint`, with their files in `memory` and their mounts in `work`.
    pub fn start(checkpoint: &Checkpoint, memory: &Path, work: &WorkDir) -> anyhow::Result<Self> {
        let mut servers = Self {
            mounts: Vec::new(),
            sources: Vec::new(),
        };
        for number in 0..checkpoint.servers {
            let source = memory.join(format!("server{number}"));
            std::fs::create_dir_all(&source)?;
            servers.sources.push(source.clone());
            let point = work.subdir(&format!("server{number}"))?;
            let server = Server::SeekingDisk {
                source,
                divisor: checkpoint.divisor,
                threads: checkpoint.processes as usize + SPARE_THREADS,
            };
            servers.mounts.push(Mounted::start(&server, &point)?);
        }
        Ok(servers)
    }

    /// Where they are mounted.
    pub fn paths(&self) -> Vec<PathBuf> {
        let paths = self.mounts.iter().map(|mount| mount.path().to_owned());
        paths.collect()
    }

    /// Seeks of all so far.
    pub fn seeks(&mut self) -> anyhow::Result<u64> {
        self.mounts.iter_mut().map(delays).sum()
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.mounts.clear();
        for source in &self.sources {
            let _ = std::fs::remove_dir_all(source);
        }
    }
}
