//! A passthrough that notes which files are written when, and can hold the writes of one back.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use firn_backing::{Backing, DirBacking};
use fuser::{BackgroundSession, Errno, SessionACL};
use parking_lot::{Condvar, Mutex};

use crate::{Caching, Policy, Server, Transfer, mount_settings};

/// Writes that may be under way, or held back, at a time.
const THREADS: usize = 32;

/// What was written, and what is held back. Its clones are the same.
#[derive(Clone)]
pub struct Trace(Arc<Shared>);

struct Shared {
    /// How long each write takes.
    write_time: Duration,
    state: Mutex<TraceState>,
    changed: Condvar,
}

#[derive(Default)]
struct TraceState {
    events: Vec<Event>,
    /// Inode number of the file whose writes wait.
    held_file: Option<u64>,
    /// How many do.
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
    /// Of a server whose writes take `write_time` each.
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

    /// Begins and ends of writes so far, in their order.
    pub fn events(&self) -> Vec<Event> {
        self.0.state.lock().events.clone()
    }

    /// From now on writes to this file wait, until what this gives is dropped.
    #[must_use]
    pub fn hold(&self, file: u64) -> HeldBack {
        self.0.state.lock().held_file = Some(file);
        HeldBack(self.clone())
    }

    /// Writes that wait.
    pub fn held_count(&self) -> usize {
        self.0.state.lock().held_count
    }
}

/// Writes that wait.
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
