use std::sync::mpsc;

use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::*;

const LIMIT: Duration = Duration::from_secs(60);

fn topic(id: u64) -> Topic {
    Topic {
        kind: 0,
        id,
        part: 0,
    }
}

fn threads(workers: &Workers, class: Class) -> usize {
    workers.threads_of(class).state.lock().threads
}

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
        workers.run(Class::Memory, hang.task());
    }
    let (done, finished) = mpsc::channel();
    workers.run(Class::Memory, move || done.send(()).unwrap());
    finished.recv_timeout(LIMIT).unwrap();
    hang.release = None;
}

#[test]
fn more_tasks_than_threads_are_all_run_in_the_order_of_their_topic() {
    let workers = Workers::default();
    let (done, finished) = mpsc::channel();
    for task in 0..2000 {
        let done = done.clone();
        let topic = topic(task % 3);
        workers.run_on_topic(Class::Call, topic, move || {
            done.send((topic, task)).unwrap();
        });
    }
    drop(done);
    assert_eq!(finished.iter().count(), 2000);
    workers.wait_until_quiet(&[Class::Call, Class::Memory]);
    assert!(threads(&workers, Class::Call) <= Class::Call.threads_max());
    let state = workers.threads_of(Class::Call).state.lock();
    assert_eq!((state.queue.ready_count(), state.running), (0, 0));
}

#[test]
fn however_many_tasks_of_a_topic_hang_others_run() {
    let workers = Workers::default();
    let mut hang = Hang::new();
    for _ in 0..10 * TOPIC_TASKS_MAX {
        workers.run_on_topic(Class::Call, topic(1), hang.task());
    }
    hang.await_reached(TOPIC_TASKS_MAX);
    let (done, finished) = mpsc::channel();
    for id in 2..10 {
        let done = done.clone();
        workers.run_on_topic(Class::Call, topic(id), move || done.send(()).unwrap());
    }
    for _ in 2..10 {
        finished.recv_timeout(LIMIT).unwrap();
    }
    assert!(threads(&workers, Class::Call) <= TOPIC_TASKS_MAX + 8);
    hang.release = None;
    hang.await_reached(9 * TOPIC_TASKS_MAX);
}

#[test]
fn regression_many_topics_that_hang_with_many_tasks_each_leave_a_thread_for_every_other_topic() {
    /// Twice the number of topics that would occupy all threads of the class if each ran [`TOPIC_TASKS_MAX`] tasks.
    const HUNG: usize = 2 * (TOPICS_MAX + EXTRA_TASKS_MAX) / TOPIC_TASKS_MAX;
    const OTHERS: usize = 100;
    let workers = Workers::default();
    let mut hang = Hang::new();
    for _ in 0..TOPIC_TASKS_MAX {
        for id in 0..HUNG {
            workers.run_on_topic(Class::Call, topic(id as u64), hang.task());
        }
    }
    hang.await_reached(HUNG + EXTRA_TASKS_MAX);
    let (done, finished) = mpsc::channel();
    for id in 0..OTHERS {
        let done = done.clone();
        workers.run_on_topic(Class::Call, topic((HUNG + id) as u64), move || {
            done.send(()).unwrap()
        });
    }
    for _ in 0..OTHERS {
        finished.recv_timeout(LIMIT).unwrap();
    }
    assert!(threads(&workers, Class::Call) <= HUNG + EXTRA_TASKS_MAX + OTHERS);
    hang.release = None;
    hang.await_reached(HUNG * TOPIC_TASKS_MAX - HUNG - EXTRA_TASKS_MAX);
    workers.wait_until_quiet(&[Class::Call]);
    let state = workers.threads_of(Class::Call).state.lock();
    assert!(state.queue.is_empty());
}

/// No task is lost, and none starts before an earlier task of its topic. The queue asserts its invariants after each
/// step.
#[test]
fn tasks_of_a_topic_start_in_order_whatever_ends_first() {
    let seed = std::env::var("FIRN_SEED")
        .map_or_else(|_| rand::random(), |seed| seed.parse().expect("a number"));
    println!("FIRN_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut queue = Queue::default();
    let (started, starts) = mpsc::channel();
    let mut next_of_topic = [0; 30];
    let mut due_of_topic = [0; 30];
    let mut running = Vec::new();
    let mut added = 0;
    while added < 20_000 || !running.is_empty() || queue.ready_count() > 0 {
        if added < 20_000 && random.random_ratio(55, 100) {
            // A few topics have most of the tasks.
            let id = random
                .random_range(0..30usize)
                .min(random.random_range(0..30));
            let order = next_of_topic[id];
            next_of_topic[id] += 1;
            let started = started.clone();
            let task = move || started.send((id, order)).unwrap();
            queue.add(Some(topic(id as u64)), Box::new(task));
            added += 1;
        } else if !running.is_empty() {
            let ended = running.swap_remove(random.random_range(0..running.len()));
            queue.end_task(ended);
        }
        while let Some(QueuedTask { topic, task }) = queue.take_task() {
            task();
            running.push(topic);
        }
        for (id, order) in starts.try_iter() {
            assert_eq!(order, due_of_topic[id], "topic {id}");
            due_of_topic[id] += 1;
        }
    }
    assert_eq!(next_of_topic, due_of_topic);
    assert!(queue.is_empty());
}

#[test]
fn where_all_threads_of_a_class_hang_the_others_run() {
    let workers = Workers::default();
    let mut hang = Hang::new();
    let threads_max = Class::Call.threads_max();
    for id in 0..2 * threads_max as u64 {
        workers.run_on_topic(Class::Call, topic(id), hang.task());
    }
    hang.await_reached(threads_max);
    let (done, finished) = mpsc::channel();
    let also_done = done.clone();
    workers.run(Class::Memory, move || done.send(()).unwrap());
    finished.recv_timeout(LIMIT).unwrap();
    workers
        .try_run(Class::ControlClient, move || also_done.send(()).unwrap())
        .unwrap();
    finished.recv_timeout(LIMIT).unwrap();
    assert_eq!(threads(&workers, Class::Call), threads_max);
    hang.release = None;
    hang.await_reached(threads_max);
}

#[test]
fn what_cannot_begin_at_once_is_refused_and_a_thread_that_comes_back_is_used_again() {
    let workers = Workers::default();
    let mut hang = Hang::new();
    let threads_max = Class::Job.threads_max();
    for _ in 0..threads_max {
        workers.try_run(Class::Job, hang.task()).unwrap();
    }
    hang.await_reached(threads_max);
    let refused = workers.try_run(Class::Job, || panic!("it does not run"));
    assert!(matches!(refused, Err(Refused::Full { threads_max: max }) if max == threads_max));
    hang.release = None;
    workers.wait_until_quiet(&[Class::Job]);
    let (done, finished) = mpsc::channel();
    // The pool counts a thread as running for a moment after its task has ended.
    let deadline = std::time::Instant::now() + LIMIT;
    loop {
        let done = done.clone();
        match workers.try_run(Class::Job, move || done.send(()).unwrap()) {
            Ok(()) => break,
            Err(error) => assert!(std::time::Instant::now() < deadline, "{error}"),
        }
        std::thread::yield_now();
    }
    finished.recv_timeout(LIMIT).unwrap();
    assert!(threads(&workers, Class::Job) <= threads_max);
}

#[test]
fn a_panic_leaves_the_pool_usable() {
    let workers = Workers::default();
    workers.run(Class::Memory, || panic!("on purpose"));
    workers
        .try_run(Class::Job, || panic!("on purpose"))
        .unwrap();
    let (done, finished) = mpsc::channel();
    workers.run(Class::Memory, move || done.send(()).unwrap());
    finished.recv_timeout(LIMIT).unwrap();
    workers.wait_until_quiet(&[Class::Memory, Class::Job]);
}
