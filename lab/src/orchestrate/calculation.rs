//! The model of a disk without a clock: how long a checkpoint takes by the assumptions alone.

use std::collections::VecDeque;
use std::time::Duration;

use crate::model::seeking_disk::{Disk, DiskModel};

/// Which file the next request is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Another one after each request.
    Interleaved,
    /// The same until it is written.
    Sequential,
}

/// What one server gets.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Files, of which each comes from a process of its own.
    pub files: u64,
    /// Bytes of each.
    pub bytes: u64,
    /// Bytes of one request.
    pub request_bytes: u64,
    pub order: Order,
}

/// Time until all of it is on the disk. Every process has its next request ready when there is room.
pub fn write_time(model: DiskModel, load: Load) -> Duration {
    let mut disk = Disk::new(model);
    let mut time = Duration::ZERO;
    let mut files: VecDeque<(u64, u64)> = (0..load.files).map(|file| (file, 0)).collect();
    loop {
        while let Some(&(file, offset)) = files.front()
            && disk.has_room(load.request_bytes)
        {
            let len = load.request_bytes.min(load.bytes - offset);
            disk.write(file, offset, len);
            files.pop_front();
            match offset + len {
                end if end == load.bytes => disk.close(file),
                end if load.order == Order::Sequential => files.push_front((file, end)),
                end => files.push_back((file, end)),
            }
        }
        let sweep = disk.take_sweep();
        if sweep.is_empty() {
            return time;
        }
        for run in sweep {
            time += disk.move_head(run);
            disk.complete_write(run);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: DiskModel = DiskModel::SATA_2010;

    /// Seconds for 10 GB on one of four servers.
    fn seconds(files: u64, order: Order) -> f64 {
        let load = Load {
            files,
            bytes: 2_500_000_000 / files,
            request_bytes: 1 << 20,
            order,
        };
        write_time(MODEL, load).as_secs_f64()
    }

    #[test]
    fn files_in_sequence_take_the_time_of_their_bytes() {
        let bytes_time = 2.5e9 / 80e6;
        for files in [16, 64] {
            let found = seconds(files, Order::Sequential);
            assert!((0.999..1.02).contains(&(found / bytes_time)), "{found}");
        }
    }

    #[test]
    fn more_files_at_a_time_take_longer() {
        let few = seconds(16, Order::Interleaved);
        let some = seconds(64, Order::Interleaved);
        let many = seconds(256, Order::Interleaved);
        assert!(few < some && some <= many, "{few} {some} {many}");
        // A seek for each MiB of 64 files, as the queue of 64 MiB holds one of each.
        let wanted = 2.5e9 / 80e6 + 2.5e9 / f64::from(1 << 20) * 0.0085;
        assert!((some / wanted - 1.0).abs() < 0.05, "{some} {wanted}");
    }
}
