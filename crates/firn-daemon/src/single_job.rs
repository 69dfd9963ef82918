//! Periodic jobs that may wait for the backing, the served directory. They run on a worker ([`Class::Job`]), one of
//! each kind at a time.
//!
//! The main loop starts them. It must notice signals and unmounts, so it never waits for the backing itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use firn_workers::{Class, Workers};

/// A job that never runs twice at the same time.
#[derive(Default)]
pub(crate) struct SingleJob {
    is_running: Arc<AtomicBool>,
}

impl SingleJob {
    /// Starts the job on a worker, unless it is running.
    pub(crate) fn start(&self, workers: &Workers, job: impl FnOnce() + Send + 'static) {
        if self.is_running.swap(true, Ordering::AcqRel) {
            return;
        }
        let guard = RunningFlagGuard(Arc::clone(&self.is_running));
        let started = workers.try_run(Class::Job, move || {
            let _guard = guard;
            job();
        });
        if let Err(error) = started {
            tracing::warn!(%error, "cannot start a periodic job; firnd tries again");
        }
    }
}

/// A guard of a job; its drop records that the job has ended, has panicked or was not started.
struct RunningFlagGuard(Arc<AtomicBool>);

impl Drop for RunningFlagGuard {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn a_job_runs_once_at_a_time_and_again_after_it_ended_or_panicked() {
        let workers = Workers::default();
        let job = SingleJob::default();
        let (begin, begun) = mpsc::channel();
        let (release, hung) = mpsc::channel::<()>();
        let begin_first = begin.clone();
        job.start(&workers, move || {
            begin_first.send("first").unwrap();
            let _ = hung.recv();
        });
        assert_eq!(begun.recv_timeout(LIMIT), Ok("first"));
        job.start(&workers, || panic!("the first one still runs"));
        drop(release);
        workers.wait_until_quiet(&[Class::Job]);
        job.start(&workers, || panic!("on purpose"));
        workers.wait_until_quiet(&[Class::Job]);
        job.start(&workers, move || begin.send("third").unwrap());
        assert_eq!(begun.recv_timeout(LIMIT), Ok("third"));
    }
}
