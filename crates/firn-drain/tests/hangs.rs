//! Writes to the backing that do not return.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use firn_arena::{Arena, Identity};
use firn_backing::{Caller, SimBacking};
use firn_drain::{IoThreads, Pool};
use firn_engine::{Engine, EngineOptions, HandleId, ROOT};
use firn_format::geometry::Geometry;

const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
/// Only what hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);
const CHUNK_BYTES: u64 = 1 << 20;
const RDWR: i32 = 2;
const IO_THREADS: IoThreads = IoThreads {
    per_lane: 2,
    cpu_percent: 100,
};

fn written(engine: &Engine<SimBacking>, name: &str) -> (HandleId, mpsc::Receiver<bool>) {
    let (_, opened) = engine
        .create(&CALLER, ROOT, OsStr::new(name), 0o644, RDWR)
        .expect("create");
    engine
        .write(opened.handle, 0, name.as_bytes(), None)
        .expect("write");
    let (tell, told) = mpsc::channel();
    let done = Box::new(move |result: Result<(), _>| {
        let _ = tell.send(result.is_ok());
    });
    engine.drained(opened.handle, done);
    (opened.handle, told)
}

/// Proves S-error-21.
#[test]
fn regression_where_all_io_threads_hang_others_drain_the_rest() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs");
    let identity = Identity {
        backing: PathBuf::from("/backing"),
        dev: 1,
        ino: 1,
    };
    let geometry = Geometry::new(8 * CHUNK_BYTES, CHUNK_BYTES).expect("a valid geometry");
    let arena = Arena::create(&dir.path().join("arena"), geometry, &identity).expect("an arena");
    let options = EngineOptions::new(CHUNK_BYTES);
    let backing = SimBacking::new();
    let engine = Engine::begin(backing.clone(), arena, options).expect("an engine");
    let mut pool = Pool::start(Arc::clone(&engine), IO_THREADS).expect("IO threads");
    let hung: Vec<_> = ["one", "two"]
        .map(|name| {
            let hang = backing.hang("write_at");
            let (handle, told) = written(&engine, name);
            hang.await_call();
            (hang, handle, told)
        })
        .into();
    let (other, told) = written(&engine, "other");
    let began = Instant::now();
    loop {
        // As firnd does each second.
        pool.replace_hung();
        match told.recv_timeout(Duration::from_millis(100)) {
            Ok(drained) => break assert!(drained),
            Err(_) => assert!(began.elapsed() < LIMIT, "nobody stands in"),
        }
    }
    println!("drained after {:?}", began.elapsed());
    engine.release(other);
    for (hang, handle, told) in hung {
        assert!(told.try_recv().is_err(), "it still hangs");
        hang.release();
        assert!(told.recv_timeout(LIMIT).expect("drained"));
        engine.release(handle);
    }
    pool.stop();
    assert_eq!(engine.figures().held_bytes, 0);
}
