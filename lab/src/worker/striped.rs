//! A file striped over several servers, as a client of PVFS2 writes and reads it: each request goes to all servers at
//! once, and returns when all have answered.

use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Barrier;

use anyhow::Context;
use serde::{Deserialize, Serialize};

/// Writes or reads such a file from start to end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Striped {
    /// Its data files, one on each server.
    pub paths: Vec<PathBuf>,
    /// Bytes on one server before the next.
    pub stripe_bytes: u64,
    /// Bytes of the file.
    pub bytes: u64,
    /// Bytes of one request.
    pub request_bytes: u64,
    /// Written, or read.
    pub write: bool,
}

impl Striped {
    pub(super) fn run(&self, buffer: &[u8]) -> anyhow::Result<()> {
        let files = self
            .paths
            .iter()
            .map(|path| self.open(path))
            .collect::<anyhow::Result<Vec<File>>>()?;
        let barrier = Barrier::new(files.len());
        let done: Vec<std::io::Result<()>> = std::thread::scope(|scope| {
            let start = |(server, file)| {
                let barrier = &barrier;
                scope.spawn(move || self.serve(server, file, barrier, buffer))
            };
            let threads: Vec<_> = files.iter().enumerate().map(start).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("a request does not panic"))
                .collect()
        });
        for (path, done) in self.paths.iter().zip(done) {
            done.with_context(|| format!("a request to {} failed", path.display()))?;
        }
        files
            .into_iter()
            .try_for_each(firn_bench::worker::close)
            .context("close of a data file failed")
    }

    fn open(&self, path: &PathBuf) -> anyhow::Result<File> {
        let mut options = OpenOptions::new();
        options
            .read(!self.write)
            .write(self.write)
            .create(self.write)
            .truncate(self.write);
        options
            .open(path)
            .with_context(|| format!("cannot open {}", path.display()))
    }

    /// The part of one server in each request.
    fn serve(
        &self,
        server: usize,
        file: &File,
        barrier: &Barrier,
        buffer: &[u8],
    ) -> std::io::Result<()> {
        let mut result = Ok(());
        let mut read = vec![0; buffer.len()];
        let mut from = 0;
        while from < self.bytes {
            let to = (from + self.request_bytes).min(self.bytes);
            let part = self.part(server as u64, from..to);
            let len = (part.end - part.start) as usize;
            // A rank that failed goes on to the barriers: the others must not wait for ever.
            if result.is_ok() && len > 0 {
                result = if self.write {
                    file.write_all_at(&buffer[..len], part.start)
                } else {
                    file.read_exact_at(&mut read[..len], part.start)
                };
            }
            barrier.wait();
            from = to;
        }
        result
    }

    /// The bytes of a range of the file that lie on `server`, in its data file.
    fn part(&self, server: u64, range: Range<u64>) -> Range<u64> {
        self.bytes_before(server, range.start)..self.bytes_before(server, range.end)
    }

    /// How many of the file's first `end` bytes lie on `server`.
    fn bytes_before(&self, server: u64, end: u64) -> u64 {
        let row = self.stripe_bytes * self.paths.len() as u64;
        let rest = (end % row).saturating_sub(server * self.stripe_bytes);
        end / row * self.stripe_bytes + rest.min(self.stripe_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_lies_on_one_server() {
        let striped = Striped {
            paths: vec![PathBuf::new(); 4],
            stripe_bytes: 64,
            bytes: 1000,
            request_bytes: 100,
            write: true,
        };
        let mut lens = [0; 4];
        for from in (0..1000).step_by(100) {
            for (server, len) in lens.iter_mut().enumerate() {
                let part = striped.part(server as u64, from..from + 100);
                assert_eq!(part.start, *len, "parts follow each other");
                *len = part.end;
            }
        }
        // 3 rows of 256 bytes, then 64, 64, 64 and 40.
        assert_eq!(lens, [256, 256, 256, 232]);
    }
}
