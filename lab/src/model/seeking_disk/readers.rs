//! Which reader has the disk: one file at a time, for a slice, as long as its requests keep coming.

use std::collections::VecDeque;
use std::time::Instant;

use super::{DiskModel, Run};

/// A request that waits for the disk.
#[derive(Debug)]
pub(super) struct ReadRequest<R> {
    pub(super) file: u64,
    pub(super) runs: Vec<Run>,
    /// What is told when it was served.
    pub(super) reply: R,
}

/// What the disk does for readers now.
#[derive(Debug)]
pub(super) enum ReadStep<R> {
    Serve(ReadRequest<R>),
    /// Nothing before this time, unless the file that has the disk is read on.
    IdleUntil(Instant),
    /// No reads.
    Nothing,
}

#[derive(Debug)]
pub(super) struct Readers<R> {
    waiting: VecDeque<ReadRequest<R>>,
    slice: Option<Slice>,
}

/// The time of one file.
#[derive(Clone, Copy, Debug)]
struct Slice {
    file: u64,
    ends: Instant,
    /// Its next request must have come by then.
    idles_until: Instant,
}

impl<R> Default for Readers<R> {
    fn default() -> Self {
        Self {
            waiting: VecDeque::new(),
            slice: None,
        }
    }
}

impl<R> Readers<R> {
    pub(super) fn push(&mut self, request: ReadRequest<R>) {
        self.waiting.push_back(request);
    }

    /// The next step at time `now`.
    pub(super) fn next(&mut self, model: &DiskModel, now: Instant) -> ReadStep<R> {
        if self.waiting.is_empty() {
            return ReadStep::Nothing;
        }
        if let Some(slice) = self.slice
            && now < slice.ends
        {
            if let Some(index) = self.waiting.iter().position(|r| r.file == slice.file) {
                return ReadStep::Serve(self.waiting.remove(index).expect("found there"));
            }
            if now < slice.idles_until {
                return ReadStep::IdleUntil(slice.idles_until.min(slice.ends));
            }
        }
        let first = self.waiting.pop_front().expect("it is not empty");
        self.slice = Some(Slice {
            file: first.file,
            ends: now + model.read_slice,
            idles_until: now,
        });
        ReadStep::Serve(first)
    }

    /// The disk has served the file that has the slice.
    pub(super) fn note_served(&mut self, model: &DiskModel, now: Instant) {
        if let Some(slice) = &mut self.slice {
            slice.idles_until = now + model.read_idle;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MODEL: DiskModel = DiskModel::SATA_2010;

    fn request(file: u64) -> ReadRequest<()> {
        ReadRequest {
            file,
            runs: Vec::new(),
            reply: (),
        }
    }

    fn served(step: ReadStep<()>) -> u64 {
        match step {
            ReadStep::Serve(request) => request.file,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_file_that_is_read_on_keeps_the_disk_for_its_slice() {
        let mut readers = Readers::default();
        let begin = Instant::now();
        [1, 2, 1, 1]
            .into_iter()
            .for_each(|file| readers.push(request(file)));
        let at = |ms| begin + Duration::from_millis(ms);
        assert_eq!(served(readers.next(&MODEL, at(0))), 1);
        readers.note_served(&MODEL, at(50));
        assert_eq!(served(readers.next(&MODEL, at(50))), 1);
        readers.note_served(&MODEL, at(100));
        assert_eq!(served(readers.next(&MODEL, at(100))), 2);
    }

    #[test]
    fn the_disk_waits_for_the_next_request_for_a_while() {
        let mut readers = Readers::default();
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        readers.push(request(1));
        assert_eq!(served(readers.next(&MODEL, at(0))), 1);
        readers.note_served(&MODEL, at(10));
        readers.push(request(2));
        match readers.next(&MODEL, at(11)) {
            ReadStep::IdleUntil(until) => assert_eq!(until, at(18)),
            other => panic!("{other:?}"),
        }
        readers.push(request(1));
        assert_eq!(served(readers.next(&MODEL, at(12))), 1);
        readers.note_served(&MODEL, at(20));
        assert_eq!(served(readers.next(&MODEL, at(28))), 2);
        readers.note_served(&MODEL, at(30));
        assert!(matches!(readers.next(&MODEL, at(31)), ReadStep::Nothing));
    }
}
