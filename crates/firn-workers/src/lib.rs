//! The thread pool of firnd, the process that serves a mount. Threads start and end on demand, with a limit for each
//! class of work. A *topic* is the object on which tasks may hang together, such as one file.
//!
//! Promises
//! * No function of the pool blocks its caller, except [`Workers::wait_until_quiet`], and [`Workers::run`] if the
//!   system gives no thread at all. A class has threads as long as it has work, up to its limit, and keeps idle
//!   threads for `IDLE`.
//! * Classes take no threads from each other. If the tasks of one class hang, the tasks of all other classes run.
//! * Tasks of one [`Topic`] start in the order in which they were given, and so do tasks without a topic.
//! * As long as tasks of fewer than [`TOPICS_MAX`] topics hang, tasks of other topics run, whatever the number of
//!   hanging tasks. In addition to the first task of each topic, at most [`EXTRA_TASKS_MAX`] tasks run at a time, and
//!   at most [`TOPIC_TASKS_MAX`] of one topic. All other tasks wait for an earlier task to end.
//! * A task that panics does not end its thread.
//!
//! The pool does not include threads that live as long as the mount ([`spawn_thread`]). It also does not include the
//! I/O threads that write to the backing, which are a fixed set with an order of their own (`firn-drain`).

mod class;
mod topic;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

pub use class::{Class, EXTRA_TASKS_MAX, TOPIC_TASKS_MAX, TOPICS_MAX};
pub use topic::Topic;
use topic::{Queue, QueuedTask};

/// Time without work after which a thread ends.
const IDLE: Duration = Duration::from_secs(10);

/// A task for a worker thread.
pub type Task = Box<dyn FnOnce() + Send>;

/// The reason why no thread can begin a task now.
#[derive(Debug)]
pub enum Refused {
    /// All threads of the class are in use.
    Full {
        /// Maximum number of threads.
        threads_max: usize,
    },
    /// The system cannot start a thread.
    NoThread(io::Error),
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Full { threads_max } => write!(f, "all {threads_max} threads are in use"),
            Self::NoThread(error) => write!(f, "cannot start a thread: {error}"),
        }
    }
}

impl std::error::Error for Refused {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Full { .. } => None,
            Self::NoThread(error) => Some(error),
        }
    }
}

/// Handle to the pool. Clones share the pool.
#[derive(Clone)]
pub struct Workers([Arc<ClassThreads>; Class::ALL.len()]);

/// The threads of a class, and their tasks.
struct ClassThreads {
    class: Class,
    state: Mutex<ClassState>,
    /// Signals that a task is ready.
    task_ready: Condvar,
    /// Signals that no task runs or waits.
    quiet: Condvar,
}

/// State of the threads of a class.
///
/// Invariants
/// * `running + idle <= threads <= threads_max` of the class.
/// * A task waits in `queue` only if a thread was woken or started for it, or all allowed threads are running.
#[derive(Default)]
struct ClassState {
    queue: Queue,
    /// Number of threads that run a task.
    running: usize,
    /// Number of threads.
    threads: usize,
    /// Number of threads that wait for a task.
    idle: usize,
    /// Number of tasks that were added so far.
    added_tasks: u64,
}

impl Default for Workers {
    fn default() -> Self {
        Self(Class::ALL.map(|class| {
            Arc::new(ClassThreads {
                class,
                state: Mutex::default(),
                task_ready: Condvar::new(),
                quiet: Condvar::new(),
            })
        }))
    }
}

impl Workers {
    fn threads_of(&self, class: Class) -> &Arc<ClassThreads> {
        &self.0[class as usize]
    }

    /// Runs `task` as soon as a thread of the class is free.
    pub fn run(&self, class: Class, task: impl FnOnce() + Send + 'static) {
        self.threads_of(class).add_task(None, Box::new(task));
    }

    /// Runs `task`, which may hang on the object of `topic`, as soon as the limits of the topic allow it and a thread
    /// of the class is free.
    pub fn run_on_topic(
        &self,
        class: Class,
        topic: impl Into<Topic>,
        task: impl FnOnce() + Send + 'static,
    ) {
        self.add_on_topic(class, topic, Box::new(task));
    }

    /// Does the same as [`Workers::run_on_topic`] for a boxed task.
    pub fn add_on_topic(&self, class: Class, topic: impl Into<Topic>, task: Task) {
        self.threads_of(class).add_task(Some(topic.into()), task);
    }

    /// Runs `task` at once. If no thread is available, drops the task and returns the reason.
    pub fn try_run(
        &self,
        class: Class,
        task: impl FnOnce() + Send + 'static,
    ) -> Result<(), Refused> {
        self.threads_of(class).try_run(Box::new(task))
    }

    /// Waits until no task of the classes runs or waits. The call never returns if a task hangs.
    pub fn wait_until_quiet(&self, classes: &[Class]) {
        loop {
            let tasks_before = self.added_tasks(classes);
            for class in classes {
                self.threads_of(*class).wait_until_quiet();
            }
            // A task of one class may have added a task to a class that was quiet already.
            if self.added_tasks(classes) == tasks_before {
                return;
            }
        }
    }

    /// Returns the number of tasks that were added to these classes so far.
    fn added_tasks(&self, classes: &[Class]) -> u64 {
        let added_tasks = |class: &Class| self.threads_of(*class).state.lock().added_tasks;
        classes.iter().map(added_tasks).sum()
    }
}

impl ClassThreads {
    /// Adds a task to the queue. If the task is ready, wakes an idle thread or starts a new one for it.
    fn add_task(self: &Arc<Self>, topic: Option<Topic>, task: Task) {
        let mut state = self.state.lock();
        state.added_tasks += 1;
        let is_ready = state.queue.add(topic, task);
        if !is_ready {
            return;
        }
        if state.idle >= state.queue.ready_count() {
            self.task_ready.notify_one();
        } else if state.threads < self.class.threads_max() {
            state.threads += 1;
            // The thread is counted, so the lock can be released during its start.
            drop(state);
            self.start_counted_thread();
        }
    }

    /// Runs a task at once in an idle thread or a new one. If no thread is available, drops the task and returns the
    /// reason.
    fn try_run(self: &Arc<Self>, task: Task) -> Result<(), Refused> {
        let mut state = self.state.lock();
        state.added_tasks += 1;
        // Each ready task will take one idle thread. If more are idle, one of them takes this task.
        if state.idle > state.queue.ready_count() {
            state.queue.add(None, task);
            self.task_ready.notify_one();
            return Ok(());
        }
        let threads_max = self.class.threads_max();
        if state.threads >= threads_max {
            return Err(Refused::Full { threads_max });
        }
        state.threads += 1;
        state.running += 1;
        // The thread is counted, so the lock can be released during its start.
        drop(state);
        self.start_thread(Some(task)).map_err(|error| {
            let mut state = self.state.lock();
            state.threads -= 1;
            state.running -= 1;
            Refused::NoThread(error)
        })
    }

    /// Starts one more thread of the class, which the caller has already counted. If the class has no thread and none
    /// can be started, runs the tasks here.
    fn start_counted_thread(self: &Arc<Self>) {
        let Err(error) = self.start_thread(None) else {
            return;
        };
        tracing::warn!(%error, class = self.class.thread_name(), "cannot start a worker thread");
        let mut state = self.state.lock();
        state.threads -= 1;
        // Without any thread the tasks would never run, so this thread runs them, although that blocks the caller.
        while state.threads == 0
            && let Some(QueuedTask { topic, task }) = state.take_task()
        {
            MutexGuard::unlocked(&mut state, || run_task(task));
            self.end_task(&mut state, topic);
        }
    }

    /// Starts a thread that runs `first_task`, which is already counted as running, and then the tasks of the queue.
    fn start_thread(self: &Arc<Self>, first_task: Option<Task>) -> io::Result<()> {
        let class_threads = Arc::clone(self);
        let mut thread = std::thread::Builder::new().name(self.class.thread_name().into());
        if let Some(bytes) = self.class.stack_bytes() {
            thread = thread.stack_size(bytes);
        }
        thread.spawn(move || class_threads.run_tasks(first_task))?;
        Ok(())
    }

    /// Body of a worker thread: runs `first_task`, which is already counted as running, and then the tasks of the
    /// queue. Ends after [`IDLE`] without a task. The lock is released while a task runs.
    fn run_tasks(&self, first_task: Option<Task>) {
        let has_first_task = first_task.is_some();
        if let Some(task) = first_task {
            run_task(task);
        }
        let mut state = self.state.lock();
        if has_first_task {
            self.end_task(&mut state, None);
        }
        loop {
            if let Some(QueuedTask { topic, task }) = state.take_task() {
                MutexGuard::unlocked(&mut state, || run_task(task));
                self.end_task(&mut state, topic);
                continue;
            }
            state.idle += 1;
            let has_timed_out = self.task_ready.wait_for(&mut state, IDLE).timed_out();
            state.idle -= 1;
            if has_timed_out && state.queue.ready_count() == 0 {
                state.threads -= 1;
                return;
            }
        }
    }

    /// Records that a task ended, and starts tasks that waited for it.
    fn end_task(&self, state: &mut ClassState, topic: Option<Topic>) {
        state.running -= 1;
        state.queue.end_task(topic);
        state.assert_invariants(self.class);
        if state.is_quiet() {
            self.quiet.notify_all();
        }
    }

    fn wait_until_quiet(&self) {
        let mut state = self.state.lock();
        while !state.is_quiet() {
            self.quiet.wait(&mut state);
        }
    }
}

impl ClassState {
    /// Takes the next ready task, which then counts as running.
    fn take_task(&mut self) -> Option<QueuedTask> {
        let queued_task = self.queue.take_task()?;
        self.running += 1;
        Some(queued_task)
    }

    fn is_quiet(&self) -> bool {
        self.running == 0 && self.queue.ready_count() == 0
    }

    fn assert_invariants(&self, class: Class) {
        debug_assert!(self.running + self.idle <= self.threads || self.threads == 0);
        debug_assert!(self.threads <= class.threads_max());
    }
}

/// Runs a task and catches a panic, so that the thread can run other tasks. The panic drops the values of the task; a
/// dropped reply answers EIO.
fn run_task(task: Task) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(task)).is_err() {
        tracing::error!("a task of a worker thread panicked");
    }
}

/// Starts a thread outside the pool, which lives as long as the object that it serves.
pub fn spawn_thread(name: &str, serve: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(serve)
        .map(drop)
}

#[cfg(test)]
mod tests;
