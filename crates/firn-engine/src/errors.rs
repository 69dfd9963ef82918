//! Errors that need attention: failed drains, syncs and recoveries, as `firn status` shows them.
//!
//! Invariants
//! * There are at most [`RECORDED_MAX`] errors about files that may still be drained; the oldest is removed first.
//!   Errors about lost data remain until the data is discarded.
//! * Errors with the same path and errno have one entry, which counts them.

use std::time::Instant;

use firn_backing::Errno;
use firn_backing::lock::Mutex;

/// Maximum number of recorded errors, apart from errors about lost data.
const RECORDED_MAX: usize = 64;

/// An error that needs attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedError {
    /// Path of the file from the root of the mount, or path of the spill file.
    pub path: Vec<u8>,
    /// The error of the system call.
    pub errno: Errno,
    /// Text for the user.
    pub message: String,
    /// How often the error happened.
    pub count: u64,
    /// When the error happened last.
    pub last: Instant,
    /// Whether the error is about data whose file was not found.
    pub is_about_lost_data: bool,
}

/// All recorded errors of an engine.
#[derive(Default)]
pub(crate) struct ErrorLog {
    errors: Mutex<Vec<RecordedError>>,
}

impl ErrorLog {
    /// Records an error for the status, about data that is kept and tried again. An error with the same path and errno
    /// is only counted. If there are too many errors, the oldest one about such data is removed.
    pub(crate) fn record(&self, path: Vec<u8>, errno: Errno, message: String) {
        let mut errors = self.errors.lock();
        let is_same_error = |recorded: &&mut RecordedError| {
            !recorded.is_about_lost_data && recorded.path == path && recorded.errno == errno
        };
        if let Some(repeated) = errors.iter_mut().find(is_same_error) {
            repeated.count += 1;
            repeated.last = Instant::now();
            return;
        }
        if errors.len() >= RECORDED_MAX
            && let Some(oldest_index) = errors.iter().position(|error| !error.is_about_lost_data)
        {
            errors.remove(oldest_index);
        }
        let is_about_lost_data = false;
        errors.push(new_error(path, errno, message, is_about_lost_data));
    }

    /// Records that the file of some data was not found.
    pub(crate) fn record_lost(&self, path: Vec<u8>, errno: Errno, message: String) {
        self.errors
            .lock()
            .push(new_error(path, errno, message, true));
    }

    /// Forgets the errors about lost data of `path`, after the data was discarded.
    pub(crate) fn forget_lost(&self, path: &[u8]) {
        self.errors
            .lock()
            .retain(|known| !known.is_about_lost_data || known.path != path);
    }

    /// Forgets all errors except those about lost data.
    pub(crate) fn clear(&self) {
        self.errors.lock().retain(|known| known.is_about_lost_data);
    }

    /// Returns all recorded errors, the oldest first.
    pub(crate) fn list(&self) -> Vec<RecordedError> {
        self.errors.lock().clone()
    }
}

/// Returns an error that has happened once, now.
fn new_error(
    path: Vec<u8>,
    errno: Errno,
    message: String,
    is_about_lost_data: bool,
) -> RecordedError {
    RecordedError {
        path,
        errno,
        message,
        count: 1,
        last: Instant::now(),
        is_about_lost_data,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(log: &ErrorLog, path: &str, errno: Errno) {
        log.record(path.into(), errno, "failed".into());
    }

    #[test]
    fn a_repetition_is_counted() {
        let log = ErrorLog::default();
        record(&log, "a", Errno::IO);
        record(&log, "a", Errno::IO);
        record(&log, "a", Errno::NOSPC);
        record(&log, "b", Errno::IO);
        let counts: Vec<u64> = log.list().iter().map(|error| error.count).collect();
        assert_eq!(counts, [2, 1, 1]);
    }

    #[test]
    fn the_oldest_goes_first_and_errors_about_lost_data_stay() {
        let log = ErrorLog::default();
        log.record_lost(b"lost".to_vec(), Errno::NOENT, "no file".into());
        for n in 0..2 * RECORDED_MAX {
            record(&log, &n.to_string(), Errno::IO);
        }
        let errors = log.list();
        assert_eq!(errors.len(), RECORDED_MAX);
        assert_eq!(errors[0].path, b"lost");
        assert_eq!(errors[1].path, (RECORDED_MAX + 1).to_string().as_bytes());
        log.clear();
        assert_eq!(log.list().len(), 1);
        log.forget_lost(b"lost");
        assert!(log.list().is_empty());
    }
}
