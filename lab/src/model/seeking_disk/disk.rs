//! The disk and the cache before it, without a clock: what moves next, and how long that takes.

use std::collections::VecDeque;
use std::time::Duration;

use super::DiskModel;
use super::layout::Layout;

/// Bytes that lie one behind the other on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First byte on the disk.
    pub position: u64,
    /// Bytes.
    pub len: u64,
}

impl Run {
    /// The byte behind it.
    pub fn end(&self) -> u64 {
        self.position + self.len
    }
}

/// See the module. Its caller keeps the time.
#[derive(Debug)]
pub struct Disk {
    model: DiskModel,
    layout: Layout,
    head: u64,
    /// Written and in no sweep yet, in the order of arrival.
    arrived: VecDeque<Run>,
    arrived_bytes: u64,
    /// In a sweep, and not on the disk yet.
    moving_bytes: u64,
    seeks: u64,
}

impl Disk {
    /// An empty disk whose head is at its beginning.
    pub fn new(model: DiskModel) -> Self {
        Self {
            model,
            layout: Layout::new(model.window_bytes),
            head: 0,
            arrived: VecDeque::new(),
            arrived_bytes: 0,
            moving_bytes: 0,
            seeks: 0,
        }
    }

    /// Whether the cache takes `bytes` bytes now.
    pub fn has_room(&self, bytes: u64) -> bool {
        let dirty = self.dirty_bytes();
        dirty == 0 || dirty + bytes <= self.model.cache_bytes
    }

    /// Bytes that were written and are not on the disk.
    pub fn dirty_bytes(&self) -> u64 {
        self.arrived_bytes + self.moving_bytes
    }

    /// Whether write-back begins without being asked for.
    pub fn wants_sweep(&self) -> bool {
        self.dirty_bytes() > self.model.cache_bytes / 2
    }

    /// Seeks so far.
    pub fn seeks(&self) -> u64 {
        self.seeks
    }

    /// Takes a range of a file into the cache, which must have room.
    pub fn write(&mut self, file: u64, offset: u64, len: u64) {
        assert!(self.has_room(len), "the cache is full");
        self.arrived_bytes += len;
        for run in self.layout.place(file, offset, len) {
            match self.arrived.back_mut() {
                Some(last) if last.end() == run.position => last.len += run.len,
                _ => self.arrived.push_back(run),
            }
        }
    }

    /// Where a range of a file lies.
    pub fn find(&mut self, file: u64, offset: u64, len: u64) -> Vec<Run> {
        self.layout.place(file, offset, len)
    }

    /// A descriptor of the file was closed.
    pub fn close(&mut self, file: u64) {
        self.layout.close(file);
    }

    /// What the elevator takes next: what arrived first, up to its queue, from the head on upwards, then from the start.
    /// Each run is to be moved ([`Disk::move_head`]) and then told ([`Disk::complete_write`]).
    pub fn take_sweep(&mut self) -> Vec<Run> {
        let mut taken = self.take_arrived();
        taken.sort_unstable_by_key(|run| (run.position < self.head, run.position));
        let mut runs: Vec<Run> = Vec::new();
        for run in taken {
            match runs.last_mut() {
                Some(last) if last.end() == run.position => last.len += run.len,
                _ => runs.push(run),
            }
        }
        runs
    }

    fn take_arrived(&mut self) -> Vec<Run> {
        let mut room = self.model.queue_bytes;
        let mut taken = Vec::new();
        while room > 0
            && let Some(first) = self.arrived.front_mut()
        {
            let len = first.len.min(room);
            taken.push(Run { len, ..*first });
            first.position += len;
            first.len -= len;
            if first.len == 0 {
                self.arrived.pop_front();
            }
            room -= len;
        }
        let bytes = self.model.queue_bytes - room;
        self.arrived_bytes -= bytes;
        self.moving_bytes += bytes;
        taken
    }

    /// Moves the head over `run`: how long that takes. A gap before it is passed over, or left out by a seek.
    pub fn move_head(&mut self, run: Run) -> Duration {
        let mut time = self.model.transfer_time(run.len);
        let gap = run.position.checked_sub(self.head);
        match gap.map(|bytes| self.model.transfer_time(bytes)) {
            Some(pass) if pass <= self.model.seek => time += pass,
            _ => {
                self.seeks += 1;
                time += self.model.seek;
            }
        }
        self.head = run.end();
        time
    }

    /// How long a sweep that begins with `run` waits for the platter. A disk that was told to sync has nothing to do
    /// between the end of a sweep and the next request, and turns on.
    pub fn turn_to(&self, run: Run) -> Duration {
        let goes_on = run.position == self.head;
        if self.model.is_synced && goes_on {
            self.model.rotation
        } else {
            Duration::ZERO
        }
    }

    /// A run of a sweep is on the disk.
    pub fn complete_write(&mut self, run: Run) {
        self.moving_bytes -= run.len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const MODEL: DiskModel = DiskModel::SATA_2010;

    /// Writes all files in turns of `turn` bytes as the cache takes them; the time until all is on the disk.
    fn write_all(disk: &mut Disk, files: u64, bytes: u64, turn: u64) -> Duration {
        let mut time = Duration::ZERO;
        let mut turns = (0..bytes / turn).flat_map(|step| (0..files).map(move |file| (file, step)));
        let mut next = turns.next();
        loop {
            while let Some((file, step)) = next
                && disk.has_room(turn)
            {
                disk.write(file, step * turn, turn);
                assert!(disk.dirty_bytes() <= MODEL.cache_bytes);
                next = turns.next();
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

    #[test]
    fn one_stream_is_written_at_the_full_rate() {
        let mut disk = Disk::new(MODEL);
        let time = write_all(&mut disk, 1, 1000 * MIB, MIB);
        assert_eq!(disk.seeks(), 0);
        let wanted = MODEL.transfer_time(1000 * MIB);
        assert!(time.abs_diff(wanted) < Duration::from_micros(1), "{time:?}");
        assert_eq!(disk.dirty_bytes(), 0);
    }

    #[test]
    fn streams_that_share_the_disk_cost_a_seek_each_in_every_sweep() {
        let mut disk = Disk::new(MODEL);
        // 128 files of 4 MiB: one window each, and half a MiB of each in a sweep of 64 MiB.
        let time = write_all(&mut disk, 128, 4 * MIB, MIB / 2);
        // A sweep begins where the one before ended.
        let seeks = 127 * 8;
        assert_eq!(disk.seeks(), seeks);
        let wanted = MODEL.transfer_time(512 * MIB) + MODEL.seek * seeks as u32;
        assert!(
            time.abs_diff(wanted) < Duration::from_micros(10),
            "{time:?} {wanted:?}"
        );
    }

    #[test]
    fn files_that_are_written_one_after_the_other_lie_one_behind_the_other() {
        let mut disk = Disk::new(MODEL);
        for file in 0..10 {
            disk.write(file, 0, 3 * MIB);
            disk.close(file);
        }
        assert_eq!(
            disk.take_sweep(),
            [Run {
                position: 0,
                len: 30 * MIB
            }]
        );
    }

    #[test]
    fn what_an_open_file_reserved_is_not_given_to_another() {
        let mut disk = Disk::new(MODEL);
        disk.write(1, 0, MIB);
        disk.write(2, 0, MIB);
        disk.close(1);
        disk.write(3, 0, MIB);
        let positions: Vec<u64> = disk.take_sweep().iter().map(|run| run.position).collect();
        assert_eq!(positions, [0, 4 * MIB, 8 * MIB]);
    }

    #[test]
    fn the_cache_takes_no_more_than_it_holds() {
        let mut disk = Disk::new(MODEL);
        disk.write(1, 0, 200 * MIB);
        assert!(disk.has_room(56 * MIB));
        assert!(!disk.has_room(56 * MIB + 1));
        assert!(disk.wants_sweep());
        let sweep = disk.take_sweep();
        assert_eq!(sweep.iter().map(|run| run.len).sum::<u64>(), 64 * MIB);
        // What moves is in the cache until it is on the disk.
        assert!(!disk.has_room(57 * MIB));
        sweep.into_iter().for_each(|run| disk.complete_write(run));
        assert!(disk.has_room(120 * MIB));
        assert!(!disk.has_room(121 * MIB));
        // A request that is larger than the cache waits until it is empty.
        assert!(Disk::new(MODEL).has_room(300 * MIB));
    }

    #[test]
    fn a_disk_for_smaller_files_takes_a_part_of_the_time() {
        let whole = write_all(&mut Disk::new(MODEL), 64, 8 * MIB, MIB);
        let mut small = Disk::new(MODEL.scaled(16));
        let part = write_all(&mut small, 64, MIB / 2, MIB / 16);
        assert!(
            whole.abs_diff(part * 16) < Duration::from_micros(100),
            "{whole:?} {part:?}"
        );
    }

    #[test]
    fn a_small_gap_is_passed_over() {
        let mut disk = Disk::new(MODEL);
        let run = |position| Run { position, len: MIB };
        disk.move_head(run(0));
        let passed = disk.move_head(run(MIB + 4096));
        assert_eq!(disk.seeks(), 0);
        let wanted = MODEL.transfer_time(MIB) + MODEL.transfer_time(4096);
        assert_eq!(passed, wanted);
        // No further than a seek takes, and not backwards.
        assert_eq!(
            disk.move_head(run(4 * MIB)),
            MODEL.transfer_time(MIB) + MODEL.seek
        );
        assert_eq!(
            disk.move_head(run(0)),
            MODEL.transfer_time(MIB) + MODEL.seek
        );
        assert_eq!(disk.seeks(), 2);
    }

    #[test]
    fn a_synced_sweep_that_goes_on_where_the_last_one_ended_waits_for_a_rotation() {
        let mut disk = Disk::new(MODEL.synced());
        let run = |position| Run { position, len: MIB };
        assert_eq!(disk.turn_to(run(0)), MODEL.rotation);
        disk.move_head(run(0));
        assert_eq!(disk.turn_to(run(MIB)), MODEL.rotation);
        assert_eq!(disk.turn_to(run(8 * MIB)), Duration::ZERO);
        let behind_a_cache = Disk::new(MODEL);
        assert_eq!(behind_a_cache.turn_to(run(0)), Duration::ZERO);
    }

    #[test]
    fn an_elevator_goes_upwards_from_the_head() {
        let mut disk = Disk::new(MODEL);
        for file in 0..3 {
            disk.write(file, 0, MIB);
        }
        let middle = disk.find(1, 0, MIB)[0];
        disk.move_head(middle);
        let order: Vec<u64> = disk.take_sweep().iter().map(|run| run.position).collect();
        assert_eq!(order, [8 * MIB, 0, 4 * MIB]);
    }
}
