//! A FUSE server for tests that passes requests to a directory, and records when the writes of each file begin and end.
//! A test can also delay the writes of one file.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use firn_backing::{Backing, DirBacking};
use fuser::{BackgroundSession, Errno, SessionACL};
use parking_lot::{Condvar, Mutex};

use crate::{Caching, Policy, Server, Transfer, mount_settings};

/// Threads of the server: the maximum number of writes that are in progress, or delayed, at a time.
const THREADS: usize = 32;

/// The recorded writes, and the file with delayed writes. All clones share them.
#[derive(Clone)]
pub struct Trace(Arc<Shared>);

/// The state that all clones of a trace share.
struct Shared {
    /// How long each write takes.
    write_time: Duration,
    state: Mutex<TraceState>,
    changed: Condvar,
}

/// The recorded writes, and those that are delayed.
#[derive(Default)]
struct TraceState {
    events: Vec<Event>,
    /// Inode number of the file with delayed writes.
    held_file: Option<u64>,
    /// Number of writes that are delayed now.
    held_count: usize,
}

/// A write to a file begins or ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Inode number.
    pub file: u64,
    /// Whether the call begins; otherwise it ends.
    pub begins: bool,
}

impl Trace {
    /// Returns an empty trace for a server on which each write takes `write_time`.
    pub fn new(write_time: Duration) -> Self {
        Self(Arc::new(Shared {
            write_time,
            state: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    /// Serves `source` at `mount_point` until the session is dropped.
    pub fn serve(&self, source: &Path, mount_point: &Path) -> io::Result<BackgroundSession> {
        let server = Server::new(DirBacking::open(source)?, self.clone(), Caching::Nothing)?;
        let settings = mount_settings("firn-tracefs", SessionACL::All, THREADS);
        fuser::spawn_mount(server, mount_point, &settings)
    }

    /// Returns the begins and ends of all writes so far, in the order in which they happened.
    pub fn events(&self) -> Vec<Event> {
        self.0.state.lock().events.clone()
    }

    /// Delays all writes to this file until the returned value is dropped.
    #[must_use]
    pub fn hold(&self, file: u64) -> HeldBack {
        self.0.state.lock().held_file = Some(file);
        HeldBack(self.clone())
    }

    /// Returns the number of writes that are delayed now.
    pub fn held_count(&self) -> usize {
        self.0.state.lock().held_count
    }
}

/// The delay of the writes to one file, which ends when this value is dropped.
pub struct HeldBack(Trace);

impl Drop for HeldBack {
    fn drop(&mut self) {
        let Self(trace) = self;
        trace.0.state.lock().held_file = None;
        trace.0.changed.notify_all();
    }
}

impl<B: Backing> Policy<B> for Trace {
    fn admit(&self, _: &'static str, _: &B::Inode, _: Option<&OsStr>) -> Result<(), Errno> {
        Ok(())
    }

    /// Records the beginning of a write to `file`, delays the write if the test wants that, and records its end. Other
    /// transfers are not recorded.
    fn transfer(&self, file: u64, transfer: Transfer) {
        if !matches!(transfer, Transfer::Write(_)) {
            return;
        }
        let mut state = self.0.state.lock();
        state.events.push(Event { file, begins: true });
        state.held_count += 1;
        self.0
            .changed
            .wait_while(&mut state, |state| state.held_file == Some(file));
        state.held_count -= 1;
        drop(state);
        std::thread::sleep(self.0.write_time);
        let end = Event {
            file,
            begins: false,
        };
        self.0.state.lock().events.push(end);
    }
}
