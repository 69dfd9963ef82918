use std::sync::mpsc;

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
    workers.crew(class).state.lock().threads
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
        workers.run_about(Class::Call, topic, move || {
            done.send((topic, task)).unwrap();
        });
    }
    drop(done);
    assert_eq!(finished.iter().count(), 2000);
    workers.wait_until_quiet(&[Class::Call, Class::Memory]);
    assert!(threads(&workers, Class::Call) <= Class::Call.threads_max());
    let state = workers.crew(Class::Call).state.lock();
    assert_eq!((state.queue.ready(), state.running), (0, 0));
}

#[test]
fn however_many_tasks_of_a_topic_hang_others_run() {
    let workers = Workers::default();
    let mut hang = Hang::new();
    for _ in 0..10 * OF_A_TOPIC_MAX {
        workers.run_about(Class::Call, topic(1), hang.task());
    }
    hang.await_reached(OF_A_TOPIC_MAX);
    let (done, finished) = mpsc::channel();
    for id in 2..10 {
        let done = done.clone();
        workers.run_about(Class::Call, topic(id), move || done.send(()).unwrap());
    }
    for _ in 2..10 {
        finished.recv_timeout(LIMIT).unwrap();
    }
    assert!(threads(&workers, Class::Call) <= OF_A_TOPIC_MAX + 8);
    hang.release = None;
    hang.await_reached(9 * OF_A_TOPIC_MAX);
}

#[test]
fn where_all_threads_of_a_class_hang_the_others_run() {
    let workers = Workers::default();
    let mut hang = Hang::new();
    let threads_max = Class::Call.threads_max();
    for id in 0..2 * threads_max as u64 {
        workers.run_about(Class::Call, topic(id), hang.task());
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
    // A thread that ended its task is idle a moment later.
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
