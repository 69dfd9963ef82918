//! Ends orphans: requests that an earlier firnd (the process that serves the mount) read but did not answer, on a
//! kernel that does not send them again.
//!
//! firnd notes a request in the arena (memory that outlives it) before the work on it, but microseconds after the read.
//! If firnd dies between read and note, the next firnd does not know the number of the request, and the caller would
//! wait for ever.
//!
//! The numbers of requests rise by two, so the unknown numbers lie close to the first number that the next firnd reads.
//! That firnd answers EIO to all numbers near the first one, before it reads a second request. The kernel accepts an
//! answer only for a request that was read and not answered. At that time these are exactly the orphans, so no other
//! request is affected.

use std::io;

use parking_lot::Mutex;

use super::connection::{Connection, Received};
use super::message::number_of;

/// How many numbers to answer below and above the first one: more than the requests that are between read and note, or
/// that wait to be read.
const NUMBERS_AROUND: u64 = 4096;
const NUMBER_STEP: u64 = 2;

/// Whether an earlier firnd may have left orphans.
pub(super) struct Orphans {
    /// True until the orphans are ended.
    exist: Mutex<bool>,
}

impl Orphans {
    /// The connection is new, or the kernel sends requests again: there are no orphans.
    pub(super) fn none() -> Self {
        Self {
            exist: Mutex::new(false),
        }
    }

    /// An earlier firnd may have left orphans.
    pub(super) fn of_earlier_firnd() -> Self {
        Self {
            exist: Mutex::new(true),
        }
    }

    pub(super) fn exist(&self) -> bool {
        *self.exist.lock()
    }

    /// Reads the next request. The first read of a resumed connection also ends the orphans: requests that an earlier
    /// firnd (serving process) read and did not answer. It holds the lock, so that no other thread reads meanwhile: a
    /// request that it had read would end like an orphan.
    pub(super) fn receive_first(
        &self,
        connection: &Connection,
        buffer: &mut [u8],
    ) -> io::Result<Received> {
        let mut exist = self.exist.lock();
        if !*exist {
            // Unlocked, so that several threads can read.
            drop(exist);
            return connection.receive(buffer);
        }
        let received = connection.receive(buffer)?;
        if let Received::Request(len) = received
            && let Some(new_number) = number_of(&buffer[..len])
        {
            refuse_numbers_around(connection, new_number);
        }
        *exist = false;
        Ok(received)
    }
}

/// Answers EIO to all requests whose numbers are near that of a new request. Orphans are among them.
fn refuse_numbers_around(connection: &Connection, new_number: u64) {
    let distance = NUMBERS_AROUND * NUMBER_STEP;
    let first = new_number.saturating_sub(distance);
    let end = new_number.saturating_add(distance);
    for number in (first..end).step_by(NUMBER_STEP as usize) {
        // The kernel gives no request the number 0.
        if number != new_number && number != 0 {
            connection.refuse_orphan(number);
        }
    }
}
