//! One host: an engine with its own arena, and its I/O threads.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use firn_arena::{Arena, Identity};
use firn_backing::{Backing, Caller, LaneIndex};
use firn_drain::{IoThreads, Pool};
use firn_engine::{Engine, EngineOptions, HandleId, ROOT};
use firn_format::geometry::Geometry;
use firn_hosts::tokens::Tokens;

pub const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
pub const CHUNK_BYTES: u64 = 1 << 20;
const CHUNKS: u64 = 8;
const RDWR: i32 = 2;
/// Timeout of each wait. Only a hang takes this long.
pub const LIMIT: Duration = Duration::from_secs(60);

pub struct Host<B: Backing> {
    pub engine: Arc<Engine<B>>,
    pub pool: Pool,
    _arena: tempfile::TempDir,
}

/// Receives true when a file is drained, or false if the drain failed.
pub type Drained = mpsc::Receiver<bool>;

impl<B: Backing> Host<B> {
    pub fn start(backing: B, threads: IoThreads, tokens: Option<Tokens>) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs");
        let identity = Identity {
            backing: PathBuf::from("/backing"),
            dev: 1,
            ino: 1,
        };
        let geometry = Geometry::new(CHUNKS * CHUNK_BYTES, CHUNK_BYTES).expect("a valid geometry");
        let arena =
            Arena::create(&dir.path().join("arena"), geometry, &identity).expect("an arena");
        let options = EngineOptions::new(CHUNK_BYTES);
        let engine = Engine::begin(backing, arena, options).expect("an engine");
        let pool = Pool::start(Arc::clone(&engine), threads, tokens).expect("IO threads");
        Self {
            engine,
            pool,
            _arena: dir,
        }
    }

    /// Writes a new file with its name as contents. No test waits for its drain.
    pub fn write(&self, name: &str) -> HandleId {
        self.write_bytes(name, name.as_bytes())
    }

    pub fn write_bytes(&self, name: &str, bytes: &[u8]) -> HandleId {
        let (_, opened) = self
            .engine
            .create(&CALLER, ROOT, OsStr::new(name), 0o644, RDWR)
            .expect("create");
        self.engine
            .write(opened.handle, 0, bytes, None)
            .expect("write");
        opened.handle
    }

    /// Returns a receiver that reports when the file is drained.
    pub fn await_drained(&self, handle: HandleId) -> Drained {
        let (tell, told) = mpsc::channel();
        let done = Box::new(move |result: Result<(), _>| {
            let _ = tell.send(result.is_ok());
        });
        self.engine.drained(handle, done);
        told
    }

    /// Writes a new file with its name as contents, and waits for its drain with the returned receiver.
    pub fn write_awaited(&self, name: &str) -> (HandleId, Drained) {
        let handle = self.write(name);
        (handle, self.await_drained(handle))
    }

    /// Writes a new file in `lane` and waits for its drain. Creates empty files until one is placed in `lane`.
    pub fn write_awaited_in(&self, name: &str, lane: LaneIndex) -> (HandleId, Drained) {
        for number in 0.. {
            let name = OsString::from(format!("{name}_{number}"));
            let (entry, opened) = self
                .engine
                .create(&CALLER, ROOT, &name, 0o644, RDWR)
                .expect("create");
            let object = self
                .engine
                .tree
                .object_of(entry.inode)
                .expect("it is there");
            if self.engine.backing().facts(&object).lane == lane {
                self.engine
                    .write(opened.handle, 0, name.as_encoded_bytes(), None)
                    .expect("write");
                return (opened.handle, self.await_drained(opened.handle));
            }
            self.engine.release(opened.handle);
        }
        unreachable!("files lie in all lanes")
    }

    pub fn end(mut self) {
        self.pool.stop();
        assert_eq!(self.engine.figures().held_bytes, 0);
    }
}

/// Waits until `is_so` returns true.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = std::time::Instant::now() + LIMIT;
    while !is_so() {
        assert!(std::time::Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
