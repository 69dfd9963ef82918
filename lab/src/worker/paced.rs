//! A process that has the bytes of its next request at a certain time and no earlier, as where each process has a CPU to
//! itself. Processes with the same times are in step, however few CPUs there are to run them.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};

/// Writes a new file so, and closes it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Paced {
    /// The file.
    pub path: PathBuf,
    /// Bytes of it.
    pub bytes: u64,
    /// Bytes of one write.
    pub request_bytes: u64,
    /// From one request to the next.
    pub interval: Duration,
}

impl Paced {
    pub(super) fn run(&self, buffer: &[u8]) -> anyhow::Result<()> {
        self.write(buffer)
            .with_context(|| format!("cannot write {}", self.path.display()))
    }

    fn write(&self, buffer: &[u8]) -> std::io::Result<()> {
        let mut file = File::create(&self.path)?;
        let begin = Instant::now();
        let mut due = Duration::ZERO;
        let mut left = self.bytes;
        while left > 0 {
            std::thread::sleep(due.saturating_sub(begin.elapsed()));
            let len = left.min(self.request_bytes);
            file.write_all(&buffer[..len as usize])?;
            left -= len;
            due += self.interval;
        }
        firn_bench::worker::close(file)
    }
}
