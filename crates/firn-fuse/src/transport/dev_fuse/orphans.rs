//! Ends orphans: requests that an earlier firnd (the process that serves the mount) read but did not answer, on a
//! kernel that does not send them again.
//!
//! firnd records a request in the arena (memory that outlives it) microseconds after the read. If firnd dies in
//! between, the next firnd does not know the number of the request, and the caller would wait for ever.
//!
//! Therefore the next firnd answers EIO to all numbers near that of its first request, before it reads a second one:
//! * This includes all orphans: numbers of requests rise by two, so the unknown numbers are close to the first one.
//! * No other request is affected: the kernel ignores an answer unless its request was read and not answered. At that
//!   time these are exactly the orphans.

use std::io;

use parking_lot::Mutex;

use super::connection::{Connection, Received};
use super::message::number_of;

/// How many numbers to answer below and above the first one: more than the requests that are between read and record,
/// or that wait to be read.
const NUMBERS_AROUND: u64 = 4096;
const NUMBER_STEP: u64 = 2;

/// The end of the orphans that an earlier firnd may have left, by the first read of this one.
pub(super) struct OrphanCleanup {
    /// True until the orphans are ended.
    is_pending: Mutex<bool>,
}

impl OrphanCleanup {
    /// The connection is new, or the kernel sends requests again: there are no orphans.
    pub(super) fn not_needed() -> Self {
        Self {
            is_pending: Mutex::new(false),
        }
    }

    /// An earlier firnd may have left orphans.
    pub(super) fn after_restart() -> Self {
        Self {
            is_pending: Mutex::new(true),
        }
    }

    pub(super) fn is_pending(&self) -> bool {
        *self.is_pending.lock()
    }

    /// Reads the next request. The first read of a resumed connection also ends the orphans: requests that an earlier
    /// firnd (serving process) read and did not answer.
    ///
    /// The first read holds the lock, so that no other thread reads meanwhile. Otherwise a request that another thread
    /// had read would get EIO too.
    pub(super) fn receive_first(
        &self,
        connection: &Connection,
        buffer: &mut [u8],
    ) -> io::Result<Received> {
        let mut is_pending = self.is_pending.lock();
        if !*is_pending {
            // Unlocked, so that several threads can read.
            drop(is_pending);
            return connection.receive(buffer);
        }
        let received = connection.receive(buffer)?;
        if let Received::Request(len) = received
            && let Some(new_number) = number_of(&buffer[..len])
        {
            refuse_orphans_near(connection, new_number);
        }
        *is_pending = false;
        Ok(received)
    }
}

/// Answers EIO to all numbers of requests near that of a new request. All orphans are among them.
fn refuse_orphans_near(connection: &Connection, new_number: u64) {
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
