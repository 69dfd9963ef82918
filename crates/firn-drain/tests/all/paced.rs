//! A drain beside programs that want all CPUs.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use firn_arena::{Arena, Identity};
use firn_backing::Caller;
use firn_drain::{IoThreads, Pool};
use firn_engine::{Engine, EngineOptions, HandleId, ROOT};
use firn_format::geometry::Geometry;
use firn_sim::SimBacking;

const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
const CHUNK_BYTES: u64 = 1 << 20;
const CHUNKS: u64 = 64;
const RDWR: i32 = 2;
/// Timeout of each wait. Only a hang takes this long.
const LIMIT: Duration = Duration::from_secs(120);
const THREADS: IoThreads = IoThreads {
    count: 2,
    lane_writers_max: usize::MAX,
    cpu_percent: 1,
};

/// Threads that compute on all CPUs until this value is dropped.
struct Competitors {
    stop: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Competitors {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let cpus = std::thread::available_parallelism().expect("CPUs").get();
        let compute = |stop: Arc<AtomicBool>| {
            move || {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }
        };
        let threads = (0..2 * cpus)
            .map(|_| std::thread::spawn(compute(Arc::clone(&stop))))
            .collect();
        Self { stop, threads }
    }
}

impl Drop for Competitors {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn engine(dir: &tempfile::TempDir) -> Arc<Engine<SimBacking>> {
    let identity = Identity {
        backing: PathBuf::from("/backing"),
        dev: 1,
        ino: 1,
    };
    let geometry = Geometry::new(CHUNKS * CHUNK_BYTES, CHUNK_BYTES).expect("a valid geometry");
    let arena = Arena::create(&dir.path().join("arena"), geometry, &identity).expect("an arena");
    Engine::begin(SimBacking::new(), arena, EngineOptions::new(CHUNK_BYTES)).expect("an engine")
}

fn put_off(engine: &Engine<SimBacking>) -> u64 {
    let decisions = engine.figures().drain_decisions;
    decisions.get("put off").copied().unwrap_or(0)
}

/// Writes the same half of the arena again and again until a drain is put off, and then the half once more. The arena
/// never becomes three quarters full, because the drain would then not be put off.
fn write_until_put_off(engine: &Engine<SimBacking>, handle: HandleId) {
    let end = Instant::now() + LIMIT;
    let chunk = vec![7; CHUNK_BYTES as usize];
    let mut offsets = (0..CHUNKS / 2).map(|n| n * CHUNK_BYTES).cycle();
    let mut more = CHUNKS / 2;
    while more > 0 {
        assert!(Instant::now() < end, "no drain was put off");
        let offset = offsets.next().expect("it has no end");
        engine.write(handle, offset, &chunk, None).expect("write");
        if put_off(engine) > 0 {
            more -= 1;
        }
    }
}

/// Proves S-close-8.
#[test]
fn a_drain_without_waiters_leaves_the_cpus_to_programs_and_an_awaited_one_does_not() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs");
    let engine = engine(&dir);
    let mut pool = Pool::start(Arc::clone(&engine), THREADS, None).expect("IO threads");
    let (_, opened) = engine
        .create(&CALLER, ROOT, OsStr::new("file"), 0o644, RDWR)
        .expect("create");
    let competitors = Competitors::start();
    write_until_put_off(&engine, opened.handle);
    let before = put_off(&engine);
    let (tell, told) = mpsc::channel();
    let awaited = Arc::clone(&engine);
    engine.drained(
        opened.handle,
        Box::new(move |result| {
            let _ = tell.send((result, put_off(&awaited)));
        }),
    );
    let (result, after) = told.recv_timeout(LIMIT).expect("the drain ends");
    assert_eq!(result, Ok(()));
    // Without the waiting caller, the drain of the remaining data would be put off about fifty times. Each thread may
    // decide once just before the wait begins, and once between the end of the drain and the callback.
    let decisions = after - before;
    assert!(decisions <= 10, "put off {decisions} times");
    drop(competitors);
    pool.stop();
}
