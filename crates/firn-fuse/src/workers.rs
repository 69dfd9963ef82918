//! Threads for calls that may block: fsync, fallocate, seek and copy on the backing, and whatever comes while the
//! FUSE threads are in calls that do not return ([`crate::serving`]).
//!
//! Promises
//! * [`Workers::run`] and [`Workers::run_about`] never block; the pool grows while all threads are busy, to a
//!   bound, and shrinks when they are idle.
//! * Tasks start in the order given, those of one topic among themselves and the others among themselves.
//! * Of a topic (a file, a directory) at most [`OF_A_TOPIC_MAX`] tasks run at a time: however many programs call for a
//!   file that hangs, they do not use the pool up. Tasks without a topic, which do not ask the backing, find a
//!   thread also where all others hang.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use firn_engine::InodeId;
use parking_lot::{Condvar, Mutex};

/// Threads in calls of the backing. Each of them may hang there, on a file of its own: so many programs of a host may
/// do so before the calls of others wait for one of theirs to end.
const WITH_TOPIC_MAX: usize = 512;
/// Tasks of one topic that run at a time. More of them at once gain nothing on one file.
const OF_A_TOPIC_MAX: usize = 16;
/// Threads beyond those, for tasks without a topic.
const WITHOUT_TOPIC_MAX: usize = 32;
/// A thread that found nothing to do for so long ends.
const IDLE: Duration = Duration::from_secs(10);

pub(crate) type Task = Box<dyn FnOnce() + Send>;

/// What a task may wait for: tasks that hang together have the same. No task waits for one that is begun later and has
/// the same topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Topic {
    /// A file or directory: its data, its attributes, the names in it.
    Inode(InodeId),
    /// The object that has a name in a directory; the name as a hash.
    Name(InodeId, u64),
    /// Pages of a file in the kernel, which a read of the file holds locked.
    Pages(InodeId),
    /// The backing as a whole.
    Backing,
}

impl Topic {
    /// [`Topic::Name`].
    pub(crate) fn name(parent: InodeId, name: &OsStr) -> Self {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        Self::Name(parent, hasher.finish())
    }
}

/// Handle to the pool; clones share it.
#[derive(Clone, Default)]
pub(crate) struct Workers(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
    /// No task runs or waits.
    quiet: Condvar,
}

/// Invariants
/// * A topic is in `topics` as long as a task of it runs or is in `ready`; `started` counts those.
/// * `waiting` of a topic has tasks only where `started` is [`OF_A_TOPIC_MAX`].
#[derive(Default)]
struct State {
    free: VecDeque<Task>,
    ready: VecDeque<(Topic, Task)>,
    topics: HashMap<Topic, OfTopic>,
    /// Threads that run a task, and those of them whose task has a topic.
    running: usize,
    with_topic: usize,
    threads: usize,
    idle: usize,
}

#[derive(Default)]
struct OfTopic {
    started: usize,
    waiting: VecDeque<Task>,
}

impl State {
    /// Whether the task does not wait for one of its topic.
    fn add(&mut self, topic: Option<Topic>, task: Task) -> bool {
        let Some(topic) = topic else {
            self.free.push_back(task);
            return true;
        };
        let of_topic = self.topics.entry(topic).or_default();
        if of_topic.started == OF_A_TOPIC_MAX {
            of_topic.waiting.push_back(task);
            return false;
        }
        of_topic.started += 1;
        self.ready.push_back((topic, task));
        true
    }

    /// How many threads could begin a task now.
    fn startable(&self) -> usize {
        self.free.len() + self.ready.len().min(WITH_TOPIC_MAX - self.with_topic)
    }

    fn next(&mut self) -> Option<(Option<Topic>, Task)> {
        if let Some(task) = self.free.pop_front() {
            self.running += 1;
            return Some((None, task));
        }
        if self.with_topic == WITH_TOPIC_MAX {
            return None;
        }
        let (topic, task) = self.ready.pop_front()?;
        self.running += 1;
        self.with_topic += 1;
        Some((Some(topic), task))
    }

    fn is_quiet(&self) -> bool {
        self.running == 0 && self.free.is_empty() && self.ready.is_empty()
    }

    fn ended(&mut self, topic: Option<Topic>) {
        self.running -= 1;
        let Some(topic) = topic else { return };
        self.with_topic -= 1;
        let of_topic = self
            .topics
            .get_mut(&topic)
            .expect("a topic is known while a task of it runs");
        match of_topic.waiting.pop_front() {
            Some(task) => self.ready.push_back((topic, task)),
            None => {
                of_topic.started -= 1;
                if of_topic.started == 0 {
                    self.topics.remove(&topic);
                }
            }
        }
    }
}

impl Workers {
    /// Runs `task`, which does not ask the backing, on a thread of the pool.
    pub(crate) fn run(&self, task: impl FnOnce() + Send + 'static) {
        self.add(None, Box::new(task));
    }

    /// Runs `task`, which may hang in the backing for what `topic` means, on a thread of the pool.
    pub(crate) fn run_about(&self, topic: Topic, task: impl FnOnce() + Send + 'static) {
        self.add(Some(topic), Box::new(task));
    }

    pub(crate) fn add(&self, topic: Option<Topic>, task: Task) {
        let mut state = self.0.state.lock();
        if !state.add(topic, task) {
            return;
        }
        if state.idle >= state.startable() {
            // Also where nothing can begin: it is cheap, and then rare.
            self.0.work.notify_one();
        } else if state.threads < WITH_TOPIC_MAX + WITHOUT_TOPIC_MAX {
            state.threads += 1;
            drop(state);
            self.grow();
        }
    }

    /// Returns when no task runs or waits; never, if one hangs.
    pub(crate) fn wait_until_quiet(&self) {
        let mut state = self.0.state.lock();
        while !state.is_quiet() {
            self.0.quiet.wait(&mut state);
        }
    }

    fn grow(&self) {
        let shared = Arc::clone(&self.0);
        let thread = std::thread::Builder::new().name("firn-work".into());
        let Err(error) = thread.spawn(move || shared.serve()) else {
            return;
        };
        tracing::warn!(%error, "cannot start a worker thread");
        let mut state = self.0.state.lock();
        state.threads -= 1;
        // With no thread at all nobody would ever answer these requests; slow is better.
        while state.threads == 0
            && let Some((topic, task)) = state.next()
        {
            parking_lot::MutexGuard::unlocked(&mut state, task);
            state.ended(topic);
        }
    }
}

impl Shared {
    fn serve(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some((topic, task)) = state.next() {
                parking_lot::MutexGuard::unlocked(&mut state, || run(task));
                state.ended(topic);
                if state.is_quiet() {
                    self.quiet.notify_all();
                }
                continue;
            }
            state.idle += 1;
            let timed_out = self.work.wait_for(&mut state, IDLE).timed_out();
            state.idle -= 1;
            if timed_out && state.startable() == 0 {
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

    const LIMIT: Duration = Duration::from_secs(60);

    /// Tasks that hang until the sender is dropped.
    struct Hang {
        release: Option<mpsc::Sender<()>>,
        hung: Arc<Mutex<mpsc::Receiver<()>>>,
        reached: (mpsc::Sender<()>, mpsc::Receiver<()>),
    }

    impl Hang {
        fn new() -> Self {
            let (release, hung) = mpsc::channel();
            Self {
                release: Some(release),
                hung: Arc::new(Mutex::new(hung)),
                reached: mpsc::channel(),
            }
        }

        fn task(&self) -> impl FnOnce() + Send + 'static {
            let hung = Arc::clone(&self.hung);
            let reached = self.reached.0.clone();
            move || {
                let _ = reached.send(());
                let _ = hung.lock().recv();
            }
        }

        fn await_reached(&self, count: usize) {
            for _ in 0..count {
                self.reached.1.recv_timeout(LIMIT).expect("a task begins");
            }
        }
    }

    #[test]
    fn tasks_that_block_do_not_hold_up_others() {
        let workers = Workers::default();
        let mut hang = Hang::new();
        for _ in 0..8 {
            workers.run(hang.task());
        }
        let (done, finished) = mpsc::channel();
        workers.run(move || done.send(()).unwrap());
        finished.recv_timeout(LIMIT).unwrap();
        hang.release = None;
    }

    #[test]
    fn more_tasks_than_threads_are_all_run_in_the_order_of_their_topic() {
        let workers = Workers::default();
        let (done, finished) = mpsc::channel();
        for task in 0..2000 {
            let done = done.clone();
            let topic = Topic::Inode(InodeId(task % 3));
            workers.run_about(topic, move || done.send((topic, task)).unwrap());
        }
        drop(done);
        assert_eq!(finished.iter().count(), 2000);
        workers.wait_until_quiet();
        let state = workers.0.state.lock();
        assert!(state.threads <= WITH_TOPIC_MAX + WITHOUT_TOPIC_MAX);
        assert_eq!((state.ready.len(), state.free.len()), (0, 0));
    }

    #[test]
    fn however_many_tasks_of_a_topic_hang_others_run() {
        let workers = Workers::default();
        let mut hang = Hang::new();
        for _ in 0..10 * OF_A_TOPIC_MAX {
            workers.run_about(Topic::Inode(InodeId(1)), hang.task());
        }
        hang.await_reached(OF_A_TOPIC_MAX);
        let (done, finished) = mpsc::channel();
        for topic in 2..10 {
            let done = done.clone();
            workers.run_about(Topic::Inode(InodeId(topic)), move || done.send(()).unwrap());
        }
        for _ in 2..10 {
            finished.recv_timeout(LIMIT).unwrap();
        }
        assert!(workers.0.state.lock().threads <= OF_A_TOPIC_MAX + 8);
        hang.release = None;
        hang.await_reached(9 * OF_A_TOPIC_MAX);
    }

    #[test]
    fn where_all_threads_for_the_backing_hang_tasks_without_a_topic_run() {
        let workers = Workers::default();
        let mut hang = Hang::new();
        for topic in 0..2 * WITH_TOPIC_MAX as u64 {
            workers.run_about(Topic::Inode(InodeId(topic)), hang.task());
        }
        hang.await_reached(WITH_TOPIC_MAX);
        let (done, finished) = mpsc::channel();
        workers.run(move || done.send(()).unwrap());
        finished.recv_timeout(LIMIT).unwrap();
        assert!(workers.0.state.lock().threads <= WITH_TOPIC_MAX + WITHOUT_TOPIC_MAX);
        hang.release = None;
        hang.await_reached(WITH_TOPIC_MAX);
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
