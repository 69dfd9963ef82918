//! One client's blocks of a file that many clients write at once, as a parallel program writes its checkpoint.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde::{Deserialize, Serialize};

/// Which block of the file the next one of a client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Every client's first block, then every client's second one.
    Strided,
    /// All blocks of the first client, then all of the second one.
    Segmented,
    /// Part of a cube that is cut in all three directions, where a block is a row of a part.
    Cube,
    /// Blocks are dealt out to the clients at random.
    Irregular,
}

/// Blocks of one client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Blocks {
    /// The file, which is there.
    pub path: PathBuf,
    pub pattern: Pattern,
    /// Bytes of one block.
    pub block_bytes: u64,
    /// Blocks of each client.
    pub count: u64,
    /// Clients that share the file; of [`Pattern::Cube`] the number of parts, a cube.
    pub clients: u64,
    /// This one.
    pub client: u64,
    /// Written and synced, or read and looked at.
    pub write: bool,
}

impl Blocks {
    /// Where the blocks are, in the order in which they are visited.
    pub(super) fn offsets(&self) -> Vec<u64> {
        let number = |block: u64| match self.pattern {
            Pattern::Strided => block * self.clients + self.client,
            Pattern::Segmented => self.client * self.count + block,
            Pattern::Cube => self.row(block),
            Pattern::Irregular => block,
        };
        let numbers: Vec<u64> = match self.pattern {
            Pattern::Irregular => self.dealt(),
            _ => (0..self.count).map(number).collect(),
        };
        numbers
            .into_iter()
            .map(|number| number * self.block_bytes)
            .collect()
    }

    /// The number in the file of a row of this client's part. A part has as many rows in a layer as it has layers.
    fn row(&self, block: u64) -> u64 {
        let side = integer_root(self.count, 2);
        let parts = integer_root(self.clients, 3);
        let y = block % side;
        let z = block / side;
        let part_x = self.client % parts;
        let rest = self.client / parts;
        let part_y = rest % parts;
        let part_z = rest / parts;
        let rows_in_layer = parts * side;
        let row = (part_z * side + z) * rows_in_layer + part_y * side + y;
        row * parts + part_x
    }

    fn dealt(&self) -> Vec<u64> {
        let mut all: Vec<u64> = (0..self.count * self.clients).collect();
        all.shuffle(&mut StdRng::seed_from_u64(self.count));
        let own = self.client * self.count;
        all[own as usize..(own + self.count) as usize].to_vec()
    }

    pub(super) fn run(&self, offsets: &[u64], buffer: &mut [u8]) -> anyhow::Result<()> {
        let path = &self.path;
        let mut options = OpenOptions::new();
        options.read(!self.write).write(self.write);
        let file = options
            .open(path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        for (block, &offset) in offsets.iter().enumerate() {
            self.visit(&file, block as u64, offset, buffer)
                .with_context(|| format!("block {block} of {} at {offset}", path.display()))?;
        }
        if self.write {
            file.sync_all()
                .with_context(|| format!("fsync of {} failed", path.display()))?;
        }
        firn_bench::worker::close(file)
            .with_context(|| format!("close of {} failed", path.display()))
    }

    fn visit(&self, file: &File, block: u64, offset: u64, buffer: &mut [u8]) -> anyhow::Result<()> {
        let stamp = (self.client << 40 | block).to_le_bytes();
        if self.write {
            buffer[..stamp.len()].copy_from_slice(&stamp);
            return Ok(file.write_all_at(buffer, offset)?);
        }
        file.read_exact_at(buffer, offset)?;
        ensure!(
            buffer[..stamp.len()] == stamp,
            "these bytes are not those of client {}",
            self.client
        );
        Ok(())
    }
}

/// The number whose `power`-th power is `number`, or the next one below.
fn integer_root(number: u64, power: u32) -> u64 {
    (1..)
        .take_while(|root: &u64| root.pow(power) <= number)
        .last()
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_belongs_to_one_client() {
        for pattern in [
            Pattern::Strided,
            Pattern::Segmented,
            Pattern::Cube,
            Pattern::Irregular,
        ] {
            let blocks = |client| Blocks {
                path: "x".into(),
                pattern,
                block_bytes: 512,
                count: 9,
                clients: 8,
                client,
                write: true,
            };
            let mut all: Vec<u64> = (0..8).flat_map(|client| blocks(client).offsets()).collect();
            all.sort_unstable();
            let wanted: Vec<u64> = (0..72).map(|number| number * 512).collect();
            assert_eq!(all, wanted, "{pattern:?}");
        }
    }

    #[test]
    fn a_row_of_a_cube_is_followed_by_the_row_of_the_part_beside_it() {
        let blocks = Blocks {
            path: "x".into(),
            pattern: Pattern::Cube,
            block_bytes: 1,
            count: 4,
            clients: 8,
            client: 1,
            write: true,
        };
        // Rows of 2 parts, 4 rows in a layer: layer 0 has the numbers 0 to 7.
        assert_eq!(blocks.offsets(), [1, 3, 9, 11]);
    }
}
