//! Requests that a firnd read and did not note before it died, on a kernel that does not send requests again.
//!
//! A request is noted in the live table before it is worked on, microseconds after it was read. The next firnd cannot know
//! the ones between. Numbers of requests rise by two, so they lie close to the first one that it reads itself. It answers all
//! numbers around that one with EIO, before any other request is read: the kernel takes an answer only for what
//! was read and not answered, which is then exactly what the firnd that died had read.

use std::io;

use parking_lot::Mutex;

use super::connection::{Connection, Received};
use super::message::number_of;

/// Requests that are made between the reading of one and its note, at most, and requests that wait to be read.
const NUMBERS_AROUND: u64 = 4096;
const NUMBER_STEP: u64 = 2;

/// Requests of an earlier firnd that wait for an answer.
pub(super) struct Orphans {
    /// True until the first request was read.
    are_left: Mutex<bool>,
}

impl Orphans {
    /// There are none.
    pub(super) fn none() -> Self {
        Self {
            are_left: Mutex::new(false),
        }
    }

    /// There may be some.
    pub(super) fn of_earlier_firnd() -> Self {
        Self {
            are_left: Mutex::new(true),
        }
    }

    pub(super) fn are_left(&self) -> bool {
        *self.are_left.lock()
    }

    /// Reads a request; the first one of the mount alone, and ends what an earlier firnd left.
    pub(super) fn receive_first(
        &self,
        connection: &Connection,
        buffer: &mut [u8],
    ) -> io::Result<Received> {
        let mut are_left = self.are_left.lock();
        if !*are_left {
            drop(are_left);
            return connection.receive(buffer);
        }
        let received = connection.receive(buffer)?;
        if let Received::Request(len) = received
            && let Some(first) = number_of(&buffer[..len])
        {
            let begin = first.saturating_sub(NUMBERS_AROUND * NUMBER_STEP);
            let end = first.saturating_add(NUMBERS_AROUND * NUMBER_STEP);
            (begin..end)
                .step_by(NUMBER_STEP as usize)
                .filter(|number| *number != first && *number != 0)
                .for_each(|number| connection.refuse_orphan(number));
        }
        *are_left = false;
        Ok(received)
    }
}
