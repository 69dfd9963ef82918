//! Retries an operation while the backing (the shared file system below Firn) lags behind other hosts.
//!
//! Clients of many file systems cache lengths, names and listings for a moment. A new file of another host may not be
//! visible yet. A removed file may still have a name. A log (bytes of one host) may be shorter than its index, the list
//! of these bytes, says. None of these is an error at first, so the operation is tried again until a time limit passes.
//! If it still fails then, the data is damaged or removed.
//!
//! After a retry has failed to the end, no thread retries for that file for [`RETRY_PAUSE`]. Damage would otherwise
//! delay each read of the file.

use std::time::{Duration, Instant};

use firn_backing::backoff::Backoff;
use firn_backing::lock::Mutex;
use firn_backing::{Backing, Errno, Result};

/// Waits between attempts: from 1 ms, doubled up to 100 ms.
const RETRY_WAITS: Backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(100));
/// After a retry has failed to the end, later errors of the file are returned at once for this long.
const RETRY_PAUSE: Duration = Duration::from_secs(60);

/// Retries operations on one file while the backing may lag.
#[derive(Default)]
pub(crate) struct LagRetry {
    /// When a retry last failed to the end.
    last_failure: Mutex<Option<Instant>>,
    /// The fault that was found last. It is logged if the retry fails to the end.
    fault: Mutex<Option<String>>,
}

impl LagRetry {
    /// Runs `work` until it succeeds, fails with an error that a stale cache of the backing cannot explain, or
    /// `lag_max` has passed. Returns its last result. `refresh` reads the backing again before each further attempt.
    ///
    /// After a retry that failed to the end, retries are suspended for [`RETRY_PAUSE`]: `work` then runs only once.
    pub(crate) fn retry<T>(
        &self,
        lag_max: Duration,
        refresh: &mut dyn FnMut(),
        work: &mut dyn FnMut() -> Result<T>,
    ) -> Result<T> {
        let mut first_error_at = None;
        let mut waits = RETRY_WAITS.start();
        loop {
            let error = match work() {
                Err(error) if may_come_from_lag(error) => error,
                outcome => return outcome,
            };
            let waited = first_error_at.get_or_insert_with(Instant::now).elapsed();
            if waited >= lag_max || self.are_retries_suspended() {
                self.suspend_retries(error, waited);
                return Err(error);
            }
            std::thread::sleep(waits.next_wait().min(lag_max));
            refresh();
        }
    }

    /// Stores a fault, to be logged if the retry fails to the end.
    pub(crate) fn record_fault(&self, fault: String) {
        *self.fault.lock() = Some(fault);
    }

    /// Returns and forgets the stored fault.
    pub(crate) fn take_fault(&self) -> Option<String> {
        self.fault.lock().take()
    }

    /// Returns whether a retry failed to the end within the last [`RETRY_PAUSE`].
    fn are_retries_suspended(&self) -> bool {
        let last_failure = *self.last_failure.lock();
        last_failure.is_some_and(|failed_at| failed_at.elapsed() < RETRY_PAUSE)
    }

    /// Suspends further retries for [`RETRY_PAUSE`], and logs the stored fault.
    fn suspend_retries(&self, error: Errno, waited: Duration) {
        *self.last_failure.lock() = Some(Instant::now());
        let stored_fault = self.take_fault();
        let fault = stored_fault
            .as_deref()
            .unwrap_or("a file of the logs is missing or incomplete");
        let waited_ms = waited.as_millis() as u64;
        tracing::error!(%error, waited_ms, "{fault}");
    }
}

/// Returns whether a lag of the backing may have caused an error. Some servers (MooseFS) return EINVAL for a removed
/// file.
fn may_come_from_lag(error: Errno) -> bool {
    is_gone(error) || matches!(error, Errno::IO | Errno::INVAL)
}

/// Returns whether an error of the backing means that the object is removed: ENOENT for a name, or ESTALE, which NFS
/// returns for an object that another host has removed.
///
/// Only for errors straight from a call of the backing. Errors of Firn itself use these values for other reasons.
pub(crate) fn is_gone(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::STALE)
}

/// Reads from `offset` until `buf` is full or the file ends, and returns the number of bytes read.
///
/// A short read may be due to a cached length, so the server is asked for the length before the rest is read.
pub(crate) fn read_whole<B: Backing>(
    backing: &B,
    file: &B::File,
    buf: &mut [u8],
    offset: u64,
) -> Result<usize> {
    let first_count = backing.read_at(file, buf, offset)?;
    if first_count == buf.len() {
        return Ok(first_count);
    }
    let end = offset + first_count as u64;
    if backing.attr_of_file_now(file)?.size <= end {
        return Ok(first_count);
    }
    let second_count = backing.read_at(file, &mut buf[first_count..], end)?;
    Ok(first_count + second_count)
}
