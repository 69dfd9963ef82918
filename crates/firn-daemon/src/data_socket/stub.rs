//! Answers requests about stubs, which firnd alone serves: the kernel cannot answer them instead.
//!
//! Promises
//! * An append is stored in one place. If firnd is killed in it, the next firnd completes it or reports EIO; it
//!   never stores bytes twice.
//! * With other hosts, an append goes to the end that the file has on all hosts.
//!
//! Race: firnd may be killed during an append. If the client has passed the bytes as a memory file, firnd notes its
//! progress behind them. The next firnd reads this note when the client repeats the request.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Instant;

use firn_backing::{Backing, Errno, LockMode, LockRange};
use firn_engine::{
    Appended, ClientId, ClosePolicy, Closing, Done, Engine, FsyncPolicy, HandleId, SharedAppend,
    Written,
};
use firn_format::data_socket::{
    ADOPT_AGAIN, AppendProgress, DATA_BYTES_MAX, Op, Reply, Request, Status,
};
use firn_format::histogram::TimeHistogram;
use firn_hosts::{FileLocks, LockKind, OnConflict, Owner, ReleasedLocks, WantedLock};
use firn_stub::{Changes, StubAttr, StubId, Tree};
use rustix::fs::fcntl_get_seals;
use rustix::io::{pread, pwrite, retry_on_intr};
use zerocopy::IntoBytes;

use super::Answer;

/// Returns whether a request is about a stub.
pub(super) fn is_op(op: Op) -> bool {
    use Op::*;
    matches!(
        op,
        Adopt | Release | Read | Write | Attr | AttrOf | Truncate | Sync | Allocate | Append
    )
}

/// The connection and the parts of the mount that answer a request about a stub.
pub(super) struct StubRequest<'a, B: Backing> {
    pub tree: &'a Arc<Tree<B>>,
    pub engine: &'a Arc<Engine<B>>,
    /// Locks of the ends of files; `None` if this host alone appends.
    pub file_locks: Option<&'a FileLocks>,
    pub client: ClientId,
}

/// Number of bytes that an append reads at a time from a file of the client.
const APPEND_STEP_BYTES: usize = 1 << 20;

/// The bytes of an append.
enum AppendSource<'a> {
    Packet(&'a [u8]),
    /// Bytes at the start of a memory file that the client has just made; an [`AppendProgress`] follows them.
    File(OwnedFd, u64),
}

impl AppendSource<'_> {
    fn len(&self) -> u64 {
        match self {
            Self::Packet(bytes) => bytes.len() as u64,
            Self::File(_, len) => *len,
        }
    }

    /// Returns at most `most` bytes from offset `skip` on. `room` is the buffer for bytes that are read from a file.
    fn part<'p>(&'p self, skip: u64, most: u64, room: &'p mut Vec<u8>) -> Result<&'p [u8], Errno> {
        match self {
            Self::Packet(bytes) => {
                let rest = bytes.get(skip as usize..).unwrap_or_default();
                Ok(rest.get(..most as usize).unwrap_or(rest))
            }
            Self::File(file, _) => {
                room.resize(most.min(APPEND_STEP_BYTES as u64) as usize, 0);
                let got = retry_on_intr(|| pread(file, &mut *room, skip))?;
                Ok(room.get(..got).unwrap_or_default())
            }
        }
    }

    /// Returns the progress that an earlier firnd noted before it was killed; zeros if there is none.
    fn progress(&self) -> Result<AppendProgress, Errno> {
        let mut noted = AppendProgress::default();
        if let Self::File(file, len) = self {
            let got = retry_on_intr(|| pread(file, noted.as_mut_bytes(), *len))?;
            if got < size_of::<AppendProgress>() {
                noted = AppendProgress::default();
            }
        }
        Ok(noted)
    }

    /// Notes how far the append came, for the next firnd if this one is killed.
    fn note_progress(&self, place: u64, count: Option<u64>) -> Result<(), Errno> {
        if let Self::File(file, len) = self {
            let noted = AppendProgress {
                place: place + 1,
                count: count.map_or(0, |count| count + 1),
            };
            retry_on_intr(|| pwrite(file, noted.as_bytes(), *len))?;
        }
        Ok(())
    }
}

/// Where an append begins, if an earlier firnd may have made part of it.
enum AppendStart {
    /// `done` bytes are stored at offset `place`.
    Unfinished { place: u64, done: u64 },
    /// The append is complete: `count` bytes are stored at offset `place`.
    Finished { place: u64, count: u64 },
}

impl<B: Backing> StubRequest<'_, B> {
    /// Returns the answer to a request; `None` if the request is invalid.
    pub(super) fn answer(
        &self,
        op: Op,
        request: &Request,
        data: &[u8],
        given: Option<OwnedFd>,
    ) -> Option<Answer> {
        let &Request {
            len, token, arg, ..
        } = request;
        let is_file = op == Op::Append && given.is_some();
        let takes_data = matches!(op, Op::Write | Op::Allocate | Op::Append) && !is_file;
        let takes_len = takes_data || is_file || matches!(op, Op::Read | Op::Adopt);
        if given.is_some() != (op == Op::Adopt || is_file)
            || (takes_data && data.len() != len as usize)
            || (!takes_data && !data.is_empty())
            || (!takes_len && len != 0)
            || (!is_file && len as usize > DATA_BYTES_MAX)
        {
            return None;
        }
        if op == Op::AttrOf {
            let id = StubId {
                inode: token,
                generation: u32::try_from(arg).ok()?,
            };
            return Some(match self.tree.attr(id) {
                Ok(Some(attr)) => attr_answer(attr),
                Ok(None) => Answer::status(Status::BadToken),
                Err(errno) => failed(errno),
            });
        }
        if op == Op::Adopt {
            return Some(self.adopt(given?, arg as i32, len == ADOPT_AGAIN));
        }
        let handle = HandleId(token);
        if !self.tree.is_open(handle, self.client) {
            return Some(Answer::status(Status::BadToken));
        }
        let done = match op {
            Op::Release => {
                let close = &self.engine.request_times().close;
                timed(close, || self.release(handle)).map(|()| ok())
            }
            Op::Read => return Some(self.read(handle, arg, len as usize)),
            Op::Write => timed(&self.engine.request_times().write, || {
                self.write(handle, arg, data)
            }),
            Op::Append => {
                let source = match given {
                    // A read from a file on a server could block this thread while the stub's file is locked. So only a
                    // memory file is accepted, which is the only kind with seals.
                    Some(file) if fcntl_get_seals(&file).is_err() => return None,
                    Some(file) => AppendSource::File(file, u64::from(len)),
                    None => AppendSource::Packet(data),
                };
                timed(&self.engine.request_times().write, || {
                    self.append(handle, &source, arg)
                })
            }
            Op::Attr => self.tree.attr_of(handle).map(attr_answer),
            Op::Truncate => self
                .with_shared_lock(handle, || self.tree.truncate(handle, arg))
                .map(|()| ok()),
            Op::Sync => {
                let fsync = &self.engine.request_times().fsync;
                timed(fsync, || self.sync(handle, arg == 1)).map(|()| ok())
            }
            Op::Allocate => {
                let (offset, rest) = data.split_first_chunk::<8>()?;
                let offset = u64::from_ne_bytes(*offset);
                let len = u64::from_ne_bytes(rest.try_into().ok()?);
                let allocate = || self.engine.allocate(handle, arg as i32, offset, len);
                self.with_shared_lock(handle, allocate).map(|()| ok())
            }
            _ => return None,
        };
        Some(done.unwrap_or_else(failed))
    }

    /// Opens a stub whose descriptor the client gives. A file of another tree is answered with a bad token.
    fn adopt(&self, given: OwnedFd, flags: i32, again: bool) -> Answer {
        match self.tree.adopt(self.client, given, flags, again) {
            Ok(adopted) => Reply {
                file_id: adopted.handle.0,
                size: adopted.size,
                ..Reply::default()
            }
            .into(),
            Err(Errno::XDEV) => Answer::status(Status::BadToken),
            Err(errno) => failed(errno),
        }
    }

    /// Reads at most `len` bytes at offset `at`.
    fn read(&self, handle: HandleId, at: u64, len: usize) -> Answer {
        let mut bytes = vec![0; len];
        match self.engine.read(handle, at, &mut bytes) {
            Ok(n) => {
                bytes.truncate(n);
                let reply = Reply {
                    count: n as u32,
                    ..Reply::default()
                };
                Answer {
                    data: bytes,
                    ..reply.into()
                }
            }
            Err(errno) => failed(errno),
        }
    }

    /// Runs a change of a file, which may run beside other changes but not beside an append.
    fn with_shared_lock<T>(
        &self,
        handle: HandleId,
        change: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let changes = self.tree.changes(handle)?;
        let _guard = changes.lock_shared();
        change()
    }

    fn write(&self, handle: HandleId, at: u64, data: &[u8]) -> Result<Answer, Errno> {
        let count = self.with_shared_lock(handle, || self.write_at(handle, at, data))?;
        Ok(written_reply(count as u64, at))
    }

    /// Writes at the end of the file; no other change comes in between.
    ///
    /// The reply counts the bytes that are stored, which are fewer if the arena or the backing becomes full. An error
    /// means that no byte is stored.
    fn append(
        &self,
        handle: HandleId,
        source: &AppendSource<'_>,
        size_max: u64,
    ) -> Result<Answer, Errno> {
        if let Some(locks) = self.file_locks {
            return self.append_for_all_hosts(locks, handle, source, size_max);
        }
        let changes = self.tree.changes(handle)?;
        let _guard = changes.lock_exclusive();
        let end = self.tree.attr_of(handle)?.size;
        let total = |place: u64| source.len().min(size_max.saturating_sub(place));
        let (place, mut done) = match find_start(source, &changes, end, total)? {
            AppendStart::Finished { place, count } => return Ok(written_reply(count, place)),
            AppendStart::Unfinished { place, done } => (place, done),
        };
        let total = total(place);
        if total == 0 && source.len() > 0 {
            return Err(Errno::FBIG);
        }
        source.note_progress(place, None)?;
        let mut room = Vec::new();
        let mut failed = Ok(());
        while done < total {
            let part = source.part(done, total - done, &mut room);
            match part.and_then(|part| self.write_at(handle, place + done, part)) {
                // The client has truncated the file that holds its bytes.
                Ok(0) => break,
                Ok(count) => done += count as u64,
                Err(errno) => {
                    failed = Err(errno);
                    break;
                }
            }
        }
        // The note cannot fail for lack of space, because the first note has allocated it. If the note fails for
        // another reason, the reply still has the result.
        let _ = source.note_progress(place, Some(done));
        match failed {
            Err(errno) if done == 0 => Err(errno),
            _ => Ok(written_reply(done, place)),
        }
    }

    /// Writes at the end that the file has on all hosts: all bytes are stored, or an error is returned.
    fn append_for_all_hosts(
        &self,
        locks: &FileLocks,
        handle: HandleId,
        source: &AppendSource<'_>,
        size_max: u64,
    ) -> Result<Answer, Errno> {
        let noted = source.progress()?;
        match (noted.place.checked_sub(1), noted.count.checked_sub(1)) {
            (Some(place), Some(count)) => return Ok(written_reply(count, place)),
            // An earlier firnd was killed in the append. It may have stored the bytes, and other hosts may have
            // appended since.
            (Some(_), None) => return Err(Errno::IO),
            (None, _) => {}
        }
        let mut data = Vec::new();
        let mut room = Vec::new();
        while (data.len() as u64) < source.len() {
            let done = data.len() as u64;
            match source.part(done, source.len() - done, &mut room)? {
                // The client has truncated the file that holds its bytes.
                [] => break,
                part => data.extend_from_slice(part),
            }
        }
        // Other processes can find the file only by its name in the backing.
        self.tree.sync_open_name(handle)?;
        let file = self.engine.open_files.number_of(handle)?;
        let ticket = locks.next_ticket();
        let owner = Owner {
            number: ticket.number(),
            handle: handle.0,
            pid: 0,
        };
        let wanted = WantedLock {
            file,
            kind: LockKind::End,
            owner,
            range: LockRange::WHOLE,
            mode: LockMode::Exclusive,
        };
        wait_for_result(|done| {
            locks.register(ticket, done);
            locks.acquire(ticket, wanted, OnConflict::Wait);
        })?;
        // The offset is known only after the append, so the first note has offset 0.
        let shared_append = SharedAppend {
            data: &data,
            size_max,
            by: None,
            repeated_at: None,
            note_offset: &mut |_| {},
        };
        let appended = source
            .note_progress(0, None)
            .and_then(|()| self.engine.append_known(handle, shared_append));
        let what = ReleasedLocks::Owner(owner.number);
        let released = wait_for_result(|done| locks.release(file, LockKind::End, what, done));
        if let Err(error) = released {
            tracing::warn!(%error, ino = file, "cannot release the lock of the end of a file");
        }
        let Appended { offset, len } = appended?;
        source.note_progress(offset, Some(len))?;
        Ok(written_reply(len, offset))
    }

    /// Writes some of the bytes, at least one unless `data` is empty. Waits while the arena is full.
    fn write_at(&self, handle: HandleId, at: u64, data: &[u8]) -> Result<usize, Errno> {
        let mut swept = false;
        loop {
            match self.engine.write(handle, at, data, None)? {
                Written::Bytes(n) => return Ok(n),
                Written::Full if !swept => {
                    // Files that were removed from the tree free their space only in a sweep, so one is made before the
                    // wait.
                    swept = true;
                    self.tree.sweep()?;
                }
                Written::Full => self.engine.room.wait_for_room()?,
            }
        }
    }

    fn sync(&self, handle: HandleId, data_only: bool) -> Result<(), Errno> {
        if self.engine.fsync_policy() == FsyncPolicy::Durable {
            self.tree.sync_open_name(handle)?;
        }
        wait_for_result(|done| self.engine.fsync(handle, done))?;
        self.engine.sync_file(handle, data_only)
    }

    /// Closes a handle and waits for its drain as the close policy says. The handle is closed even if that fails.
    fn release(&self, handle: HandleId) -> Result<(), Errno> {
        let named = if self.engine.options().close == ClosePolicy::Drain {
            self.tree.sync_open_name(handle)
        } else {
            Ok(())
        };
        let finishes = self.engine.finishes_file(handle, &|_| true);
        let drained = wait_for_result(|done| self.engine.flush(handle, Closing::Called, done));
        let drained = if finishes {
            drained.and_then(|()| self.engine.finish_file(handle))
        } else {
            drained
        };
        self.tree.release(handle);
        drained.and(named)
    }
}

/// Returns where an append begins: at the end of the file, or after the bytes that a killed firnd has stored.
///
/// The caller has the file locked for appends. `end` is the size now, and `total` returns the number of bytes that an
/// append at an offset may store.
fn find_start(
    source: &AppendSource<'_>,
    changes: &Changes,
    end: u64,
    total: impl Fn(u64) -> u64,
) -> Result<AppendStart, Errno> {
    let noted = source.progress()?;
    let anew = AppendStart::Unfinished {
        place: end,
        done: 0,
    };
    let Some(place) = noted.place.checked_sub(1) else {
        return Ok(anew);
    };
    if let Some(count) = noted.count.checked_sub(1) {
        return Ok(AppendStart::Finished { place, count });
    }
    let first_size = changes.first_size().ok_or(Errno::IO)?;
    let done = first_size.saturating_sub(place);
    let total = total(place);
    if done >= total {
        return Ok(AppendStart::Finished {
            place,
            count: total,
        });
    }
    match done {
        0 => Ok(anew),
        _ if end == first_size => Ok(AppendStart::Unfinished { place, done }),
        // Another change came after the first part of the append, so the rest cannot be stored in one place with it.
        _ => Err(Errno::IO),
    }
}

/// Runs `call` and adds its duration to a histogram.
fn timed<T>(histogram: &TimeHistogram, call: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = call();
    histogram.observe(began.elapsed());
    result
}

fn ok() -> Answer {
    Answer::status(Status::Ok)
}

/// Returns the reply to a write of `count` bytes at offset `at`.
fn written_reply(count: u64, at: u64) -> Answer {
    Reply {
        count: count as u32,
        slot: at,
        ..Reply::default()
    }
    .into()
}

fn failed(errno: Errno) -> Answer {
    let errno = errno.raw_os_error().unsigned_abs();
    Reply {
        status: Status::Failed as u32,
        errno,
        ..Reply::default()
    }
    .into()
}

fn attr_answer(attr: StubAttr) -> Answer {
    let count = u32::from(attr.is_time_changed);
    Reply {
        count,
        size: attr.size,
        slot: attr.blocks,
        ..Reply::default()
    }
    .into()
}

/// Calls `begin` with a callback, and waits until it is called.
fn wait_for_result(begin: impl FnOnce(Done)) -> Result<(), Errno> {
    let (sender, receiver) = mpsc::channel();
    begin(Box::new(move |result| {
        let _ = sender.send(result);
    }));
    receiver.recv().unwrap_or(Err(Errno::IO))
}
