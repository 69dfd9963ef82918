//! An engine with a small arena and I/O threads, and calls that wait as the calls of a program do.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_arena::{Arena, Identity};
use firn_backing::{Backing, Caller, Errno, Kind};
use firn_drain::{IoThreads, Pool};
use firn_engine::{Closing, Done, Engine, EngineOptions, HandleId, InodeId, Order, ROOT, Written};
use firn_format::geometry::Geometry;
use firn_sim::tree;
use parking_lot::{Condvar, Mutex};

pub const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
pub const O_RDWR: i32 = 2;
/// Bytes of a chunk. The arena is so small that the writers fill it many times and wait for room.
const CHUNK_BYTES: u64 = 128 << 10;
const CHUNKS: u64 = 8;
const IO_THREADS: usize = 3;
/// Timeout of each wait. Only a wait that never ends takes this long.
const PATIENCE: Duration = Duration::from_secs(120);

/// A disturbance of the writers besides the other threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disturbance {
    None,
    /// Some calls of the backing fail.
    Faults,
    /// From time to time chunk lists hold memory, in the worst case all of it.
    Lists,
}

pub struct Mount<B: Backing> {
    pub engine: Arc<Engine<B>>,
    /// Whether some calls of the backing fail.
    pub faults: bool,
    /// Whether a thread makes chunk lists.
    pub lists: bool,
    pool: Pool,
    _arena: tempfile::TempDir,
}

impl<B: Backing> Mount<B> {
    pub fn new(backing: B, disturbance: Disturbance) -> Self {
        Self::in_order(backing, disturbance, Order::Interleaved, usize::MAX)
    }

    /// Starts a mount. At most `lane_writers_max` writes of a lane are in progress at once.
    pub fn in_order(
        backing: B,
        disturbance: Disturbance,
        order: Order,
        lane_writers_max: usize,
    ) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs");
        let identity = Identity {
            backing: PathBuf::from("/backing"),
            dev: 1,
            ino: 1,
        };
        let geometry = Geometry::new(CHUNKS * CHUNK_BYTES, CHUNK_BYTES).expect("a valid geometry");
        let arena =
            Arena::create(&dir.path().join("arena"), geometry, &identity).expect("an arena");
        let mut options = EngineOptions::new(CHUNK_BYTES);
        options.order = order;
        options.drain_age = Duration::from_millis(20);
        options.drain_write_bytes_min = 16 << 10;
        options.drain_write_bytes_max = 64 << 10;
        let engine = Engine::begin(backing, arena, options).expect("an engine");
        let threads = IoThreads {
            lane_writers_max,
            ..IoThreads::new(IO_THREADS)
        };
        let pool = Pool::start(Arc::clone(&engine), threads, None).expect("IO threads");
        let faults = disturbance == Disturbance::Faults;
        let lists = disturbance == Disturbance::Lists;
        Self {
            engine,
            faults,
            lists,
            pool,
            _arena: dir,
        }
    }

    /// Drains everything, ends the threads and reads the files of the backing.
    pub fn end(mut self) -> BTreeMap<String, Vec<u8>> {
        let end = Instant::now() + PATIENCE;
        while self.engine.figures().held_bytes > 0 {
            self.engine.durability.drain_tree(b"");
            assert!(
                Instant::now() < end,
                "it does not drain: {:?}",
                self.engine.figures()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        self.pool.stop();
        let status = self.engine.figures();
        assert_eq!(
            (status.held_files, status.waiting_writers, status.open_files),
            (0, 0, 0)
        );
        let files = tree(self.engine.backing()).expect("the backing is readable");
        let files = files
            .into_iter()
            .filter(|(_, entry)| entry.kind == Kind::File);
        files
            .map(|(path, entry)| (String::from_utf8(path).expect("text"), entry.content))
            .collect()
    }

    pub fn mkdir(&self, name: &str) -> InodeId {
        self.engine
            .namespace
            .mkdir(&CALLER, ROOT, OsStr::new(name), 0o755)
            .expect("mkdir")
            .inode
    }

    /// Creates a new file and closes it.
    pub fn create(&self, dir: InodeId, name: &str) {
        let (_, opened) = self
            .engine
            .create(&CALLER, dir, OsStr::new(name), 0o644, O_RDWR)
            .expect("create");
        self.engine.release(opened.handle);
    }

    /// Makes a change of names. Repeats it while it fails because a file that must be drained first could not be
    /// drained.
    pub fn insist<T>(&self, mut change: impl FnMut() -> Result<T, Errno>) -> T {
        loop {
            match change() {
                Err(Errno::IO) if self.faults => {}
                result => return result.expect("a change of names"),
            }
        }
    }

    /// Writes all of `data` and calls `taken` for each part that was accepted. Returns false if the backing failed; the
    /// remaining data is then not written.
    pub fn write(
        &self,
        handle: HandleId,
        offset: u64,
        data: &[u8],
        mut taken: impl FnMut(usize, &[u8]),
    ) -> bool {
        let mut done = 0;
        let end = Instant::now() + PATIENCE;
        while done < data.len() {
            match self
                .engine
                .write(handle, offset + done as u64, &data[done..], None)
            {
                Ok(Written::Bytes(count)) => {
                    taken(offset as usize + done, &data[done..done + count]);
                    done += count;
                }
                Ok(Written::Full) => {
                    match wait(|told| self.engine.room.call_when_space_is_free(told)) {
                        Ok(()) => {}
                        Err(_) if self.faults => return false,
                        // A chunk list holds the memory, and is released soon.
                        Err(Errno::NOSPC) if self.lists && Instant::now() < end => {
                            std::thread::yield_now()
                        }
                        Err(errno) => panic!("no room: {errno}"),
                    }
                }
                Err(Errno::IO) if self.faults => return false,
                Err(errno) => panic!("write: {errno}"),
            }
        }
        true
    }

    /// Calls fsync(2) and returns whether it succeeded.
    pub fn fsync(&self, handle: HandleId) -> bool {
        let drained = wait(|told| self.engine.fsync(handle, told));
        let synced = drained.and_then(|()| self.engine.sync_file(handle, false));
        assert!(self.faults || synced.is_ok(), "fsync: {synced:?}");
        synced.is_ok()
    }

    /// close(2).
    pub fn close(&self, handle: HandleId) {
        let flushed = wait(|told| self.engine.flush(handle, Closing::Called, told));
        assert!(self.faults || flushed.is_ok(), "close: {flushed:?}");
        self.engine.release(handle);
    }
}

/// Calls `begin` and waits for its callback.
fn wait(begin: impl FnOnce(Done)) -> Result<(), Errno> {
    let told = Arc::new((Mutex::new(None), Condvar::new()));
    let tell = Arc::clone(&told);
    begin(Box::new(move |result| {
        *tell.0.lock() = Some(result);
        tell.1.notify_one();
    }));
    let mut result = told.0.lock();
    while result.is_none() {
        let late = told.1.wait_for(&mut result, PATIENCE).timed_out();
        assert!(!late || result.is_some(), "a wait does not end");
    }
    result.take().expect("just seen")
}
