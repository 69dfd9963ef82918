//! A backing that is a moment behind.
//!
//! Clients of many file systems keep lengths, names and listings for a moment. What another host has just made may not be
//! there yet, what it has removed may still have a name, and a log may be shorter than its index says. So where something
//! is not as it must be, the backing is asked again, and waited for before an error is returned. That is bounded:
//! what is still so then is damaged, or gone.
//!
//! A file of which that was waited for in vain is not waited for again for a while.

use std::time::{Duration, Instant};

use firn_backing::backoff::Backoff;
use firn_backing::lock::Mutex;
use firn_backing::{Backing, Errno, Result};

/// Before the backing is asked again.
const LOOK_AGAIN: Backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(100));
/// After a wait in vain, no thread waits again for this long.
const VAIN_FOR: Duration = Duration::from_secs(60);

/// How long a file is waited for whose backing may be behind.
#[derive(Default)]
pub(crate) struct Behind {
    /// When a thread last waited in vain.
    in_vain: Mutex<Option<Instant>>,
    /// Fault that the last look found.
    fault: Mutex<Option<String>>,
}

impl Behind {
    /// Does something until it is done, or fails otherwise than where the backing is behind, or that was so for `lag_max`.
    /// `look` looks at the backing anew before each further try.
    pub(crate) fn wait_for<T>(
        &self,
        lag_max: Duration,
        look: &mut dyn FnMut(),
        work: &mut dyn FnMut() -> Result<T>,
    ) -> Result<T> {
        let mut began = None;
        let mut waits = LOOK_AGAIN.start();
        loop {
            let error = match work() {
                Err(error) if may_be_behind(error) => error,
                done => return done,
            };
            let waited = began.get_or_insert_with(Instant::now).elapsed();
            if waited >= lag_max || self.was_in_vain() {
                self.give_up(error, waited);
                return Err(error);
            }
            std::thread::sleep(waits.next_wait().min(lag_max));
            look();
        }
    }

    /// Something is not as it must be: named if that is waited for in vain.
    pub(crate) fn note_fault(&self, fault: String) {
        *self.fault.lock() = Some(fault);
    }

    pub(crate) fn take_fault(&self) -> Option<String> {
        self.fault.lock().take()
    }

    fn was_in_vain(&self) -> bool {
        let since = *self.in_vain.lock();
        since.is_some_and(|since| since.elapsed() < VAIN_FOR)
    }

    fn give_up(&self, error: Errno, waited: Duration) {
        *self.in_vain.lock() = Some(Instant::now());
        let fault = self.take_fault();
        let fault = fault
            .as_deref()
            .unwrap_or("what is in a container is not there");
        let waited_ms = waited.as_millis() as u64;
        tracing::error!(%error, waited_ms, "{fault}");
    }
}

/// Whether an error may be one of a backing that is behind. Some servers (MooseFS) say EINVAL of a file that is gone.
fn may_be_behind(error: Errno) -> bool {
    is_gone(error) || matches!(error, Errno::IO | Errno::INVAL)
}

/// Whether the backing answers that what was asked of it is not there any more: ENOENT of a name, or ESTALE, as NFS says, of
/// an object that another host has removed. Asked where a call of the backing returns: in Firn no errno stands for that.
pub(crate) fn is_gone(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::STALE)
}

/// Reads a file until `buf` is full or the file ends, by the length that the server says.
pub(crate) fn read_whole<B: Backing>(
    base: &B,
    file: &B::File,
    buf: &mut [u8],
    offset: u64,
) -> Result<usize> {
    let count = base.read_at(file, buf, offset)?;
    if count == buf.len() || base.attr_of_file_now(file)?.size <= offset + count as u64 {
        return Ok(count);
    }
    Ok(count + base.read_at(file, &mut buf[count..], offset + count as u64)?)
}
