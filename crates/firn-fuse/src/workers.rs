//! Threads for calls that may block: fsync, fallocate, seek and copy on the backing.
//!
//! Promises
//! * [`Workers::run`] never blocks; the pool grows while all threads are busy, to a bound, and
//!   shrinks when they are idle.
//! * Tasks start in the order given.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Each thread waits for one sync on the backing; more at once than this gains nothing there.
const THREADS_MAX: usize = 64;
/// A thread that found nothing to do for so long ends.
const IDLE: Duration = Duration::from_secs(10);

type Task = Box<dyn FnOnce() + Send>;

/// Handle to the pool; clones share it.
#[derive(Clone, Default)]
pub(crate) struct Workers(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Task>,
    threads: usize,
    idle: usize,
}

impl Workers {
    /// Runs `task` on a thread of the pool.
    pub(crate) fn run(&self, task: impl FnOnce() + Send + 'static) {
        let mut state = self.0.state.lock();
        state.queue.push_back(Box::new(task));
        if state.idle >= state.queue.len() {
            self.0.work.notify_one();
        } else if state.threads < THREADS_MAX {
            state.threads += 1;
            drop(state);
            self.grow();
        }
    }

    fn grow(&self) {
        let shared = Arc::clone(&self.0);
        let thread = std::thread::Builder::new().name("firn-work".into());
        let Err(error) = thread.spawn(move || shared.serve()) else { return };
        tracing::warn!(%error, "cannot start a worker thread");
        let mut state = self.0.state.lock();
        state.threads -= 1;
        // With no thread at all nobody would ever answer these requests; slow is better.
        while state.threads == 0
            && let Some(task) = state.queue.pop_front()
        {
            parking_lot::MutexGuard::unlocked(&mut state, task);
        }
    }
}

impl Shared {
    fn serve(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(task) = state.queue.pop_front() {
                parking_lot::MutexGuard::unlocked(&mut state, || run(task));
                continue;
            }
            state.idle += 1;
            let timed_out = self.work.wait_for(&mut state, IDLE).timed_out();
            state.idle -= 1;
            if timed_out && state.queue.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

/// The reply that a panicking task drops answers EIO; the thread goes on.
fn run(task: Task) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(task)).is_err() {
        tracing::error!("a worker's task panicked");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn tasks_that_block_do_not_hold_up_others() {
        let workers = Workers::default();
        let (release, blocked) = mpsc::channel::<()>();
        let blocked = Arc::new(Mutex::new(blocked));
        for _ in 0..8 {
            let blocked = Arc::clone(&blocked);
            workers.run(move || {
                let _ = blocked.lock().recv();
            });
        }
        let (done, finished) = mpsc::channel();
        workers.run(move || done.send(()).unwrap());
        finished.recv_timeout(Duration::from_secs(30)).unwrap();
        drop(release);
    }

    #[test]
    fn more_tasks_than_threads_are_all_run() {
        let workers = Workers::default();
        let (done, finished) = mpsc::channel();
        for task in 0..4 * THREADS_MAX {
            let done = done.clone();
            workers.run(move || done.send(task).unwrap());
        }
        drop(done);
        assert_eq!(finished.iter().count(), 4 * THREADS_MAX);
        assert!(workers.0.state.lock().threads <= THREADS_MAX);
    }

    #[test]
    fn a_panic_leaves_the_pool_usable() {
        let workers = Workers::default();
        workers.run(|| panic!("on purpose"));
        let (done, finished) = mpsc::channel();
        workers.run(move || done.send(()).unwrap());
        finished.recv_timeout(Duration::from_secs(30)).unwrap();
    }
}
