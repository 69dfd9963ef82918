//! Reads or writes the records of a file, sequentially or in a random order, as iozone does.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use anyhow::Context;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde::{Deserialize, Serialize};

/// Reads or writes each record of a file once.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Records {
    /// The file. A writer creates it if it does not exist, and does not truncate it.
    pub path: PathBuf,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Size of one record in bytes.
    pub record_bytes: u64,
    /// Seed of a random order. `None` means that the records are visited in sequence.
    pub seed: Option<u64>,
    /// Whether the records are written. Otherwise they are read.
    pub write: bool,
}

impl Records {
    /// Returns the offsets of the records in the order in which they are visited. This time is not measured.
    pub(super) fn offsets(&self) -> Vec<u64> {
        let mut offsets: Vec<u64> = (0..self.bytes / self.record_bytes)
            .map(|n| n * self.record_bytes)
            .collect();
        if let Some(seed) = self.seed {
            offsets.shuffle(&mut StdRng::seed_from_u64(seed));
        }
        offsets
    }

    /// Reads or writes the record at each of `offsets`, in their order, and closes the file. The buffer has the size of
    /// a record.
    pub(super) fn run(&self, offsets: &[u64], buffer: &mut [u8]) -> anyhow::Result<()> {
        let path = &self.path;
        let mut options = OpenOptions::new();
        options
            .read(!self.write)
            .write(self.write)
            .create(self.write)
            .truncate(false);
        let file = options
            .open(path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        for &offset in offsets {
            let done = if self.write {
                file.write_all_at(buffer, offset)
            } else {
                file.read_exact_at(buffer, offset)
            };
            done.with_context(|| format!("a record of {} at {offset}", path.display()))?;
        }
        super::close(file).with_context(|| format!("close of {} failed", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_random_order_has_every_record_once() {
        let one = Records {
            path: "x".into(),
            bytes: 64 << 10,
            record_bytes: 4 << 10,
            seed: None,
            write: false,
        };
        let in_order: Vec<u64> = (0..16).map(|n| n << 12).collect();
        assert_eq!(one.offsets(), in_order);
        let mut drawn = Records {
            seed: Some(1),
            ..one
        }
        .offsets();
        assert_ne!(drawn, in_order);
        drawn.sort_unstable();
        assert_eq!(drawn, in_order);
    }
}
