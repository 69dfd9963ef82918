//! How many files of the backing are open at a time.
//!
//! A program may have as many files open as its own limit allows, and there may be many programs: a file that is
//! open here does not need a descriptor of its own all the time. Those that nobody reads, writes or drains right
//! now are closed when there are too many, and opened again when they are used.
//!
//! Promises
//! * Only what can be opened again is closed: it was, a moment before, by the same way.
//! * A file without a name keeps what it has open: nothing else leads to its bytes.
//!
//! [`Engine::close_excess_files`] is called with no lock held.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Access, Backing, Errno};

use crate::Result;
use crate::engine::Engine;
use crate::file::{BackingFile, File, FileState};

impl<B: Backing> FileState<B> {
    fn has_open(&self) -> bool {
        self.writer.is_some() || self.reader.is_some()
    }

    /// Whether what it has open can be closed while handles on it are open.
    fn may_be_reopened(&self) -> bool {
        let is_busy = self.drain.is_exclusive() || self.drain.writes_in_flight() > 0;
        self.has_open() && !self.unlinked && !is_busy
    }
}

impl<B: Backing> Engine<B> {
    /// Closes files of the backing, where more are open than [`EngineOptions::open_files_max`].
    ///
    /// [`EngineOptions::open_files_max`]: crate::EngineOptions
    pub(crate) fn close_excess_files(&self) {
        let max = self.options.open_files_max;
        // A look at all of them is paid for by as many opens.
        let batch = (max / 4).max(1);
        if self.counters.files_opened.load(Ordering::Relaxed) < batch {
            return;
        }
        self.counters.files_opened.store(0, Ordering::Relaxed);
        self.close_down_to(max - batch);
    }

    /// Closes files until no more than `max` are open, if so many can be closed.
    fn close_down_to(&self, max: usize) {
        // One that somebody is busy with is left alone.
        let open = self.files.idle(FileState::may_be_reopened);
        let too_many = open.len().saturating_sub(max);
        open.iter()
            .take(too_many)
            .for_each(|file| self.close_idle(file));
    }

    /// The backing file for writing, opened if need be.
    pub(crate) fn writer(&self, file: &File<B>) -> Result<Arc<BackingFile<B>>> {
        let open = file.lock().writer.clone();
        if let Some(writer) = open {
            return Ok(writer);
        }
        self.close_excess_files();
        let opened = self.with_descriptor(|| {
            let object = &self.object(&file.inode)?;
            match self.backing.open(object, Access::ReadWrite) {
                Ok(file) => Ok(BackingFile {
                    file,
                    access: Access::ReadWrite,
                }),
                Err(Errno::ACCESS | Errno::PERM) => {
                    let file = self.backing.open(object, Access::Write)?;
                    Ok(BackingFile {
                        file,
                        access: Access::Write,
                    })
                }
                Err(errno) => Err(errno),
            }
        })?;
        self.counters.count_opened();
        Ok(file.keep_writer(opened))
    }

    /// The backing file for reading, opened if need be.
    pub(crate) fn reader(&self, file: &File<B>) -> Result<Arc<BackingFile<B>>> {
        if let Some(open) = file.lock().open_reader() {
            return Ok(open);
        }
        self.close_excess_files();
        let opened =
            self.with_descriptor(|| self.backing.open(&self.object(&file.inode)?, Access::Read))?;
        self.counters.count_opened();
        Ok(file.keep_reader(BackingFile {
            file: opened,
            access: Access::Read,
        }))
    }

    /// Gives back all descriptors that can be had again.
    pub fn close_idle_files(&self) {
        self.close_down_to(0);
        self.names.drop_objects();
    }

    fn close_idle(&self, file: &File<B>) {
        let access = match file
            .try_lock()
            .and_then(|state| state.writer.as_ref().map(|open| open.access))
        {
            Some(access) => access,
            None => Access::Read,
        };
        let opens = self
            .object(&file.inode)
            .and_then(|object| self.backing.open(&object, access));
        if opens.is_err() {
            return;
        }
        let closed = match file.try_lock() {
            Some(mut state) if state.may_be_reopened() => {
                (state.writer.take(), state.reader.take())
            }
            _ => return,
        };
        // Without the lock: a close may write to a server.
        drop(closed);
    }

    /// Calls the backing, once more after files were closed if there was no descriptor left; ENFILE if there still
    /// is none, which is not the caller's limit.
    pub(crate) fn with_descriptor<T>(&self, mut call: impl FnMut() -> Result<T>) -> Result<T> {
        let none_left = |errno: &Errno| matches!(*errno, Errno::MFILE | Errno::NFILE);
        match call() {
            Err(errno) if none_left(&errno) => {
                self.close_idle_files();
                call().map_err(|errno| {
                    if none_left(&errno) {
                        Errno::NFILE
                    } else {
                        errno
                    }
                })
            }
            result => result,
        }
    }
}
