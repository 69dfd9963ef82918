//! Answers requests about stubs. A *stub* is an empty file on tmpfs; the preload library sends a program's calls on it
//! to firnd, the process that has its bytes. The kernel cannot answer these calls.
//!
//! Promises
//! * An append is stored in one place. If firnd is killed in it, the next firnd completes it or reports EIO; it
//!   never stores bytes twice.
//! * If other hosts append too, the bytes go to the file's end as all hosts see it.
//!
//! How an append survives a kill of firnd: if the client has passed the bytes in a memory file (memfd), firnd notes its
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
pub(super) fn is_stub_op(op: Op) -> bool {
    matches!(
        op,
        Op::Adopt
            | Op::Release
            | Op::Read
            | Op::Write
            | Op::Attr
            | Op::AttrOf
            | Op::Truncate
            | Op::Sync
            | Op::Allocate
            | Op::Append
    )
}

/// The connection and the parts of the mount that answer a request about a stub.
pub(super) struct StubService<'a, B: Backing> {
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
    /// The first `len` bytes of a memory file that the client has just made; an [`AppendProgress`] follows them.
    File {
        file: OwnedFd,
        len: u64,
    },
}

impl<'a> AppendSource<'a> {
    /// Returns the bytes that a request appends: `data`, or the first `len` bytes of the file that came with it. `None`
    /// if that file is no memory file.
    fn from_request(data: &'a [u8], len: u32, descriptor: Option<OwnedFd>) -> Option<Self> {
        match descriptor {
            // A read from a file on a server could block this thread while the stub's file is locked. So only a memory
            // file is accepted, which is the only kind with seals.
            Some(file) if fcntl_get_seals(&file).is_err() => None,
            Some(file) => Some(Self::File {
                file,
                len: u64::from(len),
            }),
            None => Some(Self::Packet(data)),
        }
    }

    fn len(&self) -> u64 {
        match self {
            Self::Packet(bytes) => bytes.len() as u64,
            Self::File { len, .. } => *len,
        }
    }

    /// Returns how many of the bytes fit in the file from `offset` on, up to the file size `size_max`.
    fn storable_bytes(&self, offset: u64, size_max: u64) -> u64 {
        self.len().min(size_max.saturating_sub(offset))
    }

    /// Returns at most `count_max` bytes of the append from position `position` on. They are in the request's packet,
    /// or are read from the client's memory file (memfd) into `buffer`, at most [`APPEND_STEP_BYTES`] at a time.
    fn read_bytes<'p>(
        &'p self,
        position: u64,
        count_max: u64,
        buffer: &'p mut Vec<u8>,
    ) -> Result<&'p [u8], Errno> {
        match self {
            Self::Packet(bytes) => {
                let remaining = bytes.get(position as usize..).unwrap_or_default();
                Ok(remaining.get(..count_max as usize).unwrap_or(remaining))
            }
            Self::File { file, .. } => {
                buffer.resize(count_max.min(APPEND_STEP_BYTES as u64) as usize, 0);
                let count = retry_on_intr(|| pread(file, &mut *buffer, position))?;
                Ok(buffer.get(..count).unwrap_or_default())
            }
        }
    }

    /// Returns how far an earlier serving process came with this append before it was killed; the client then repeats
    /// the request. That process noted it behind the bytes in the client's memory file (memfd). An append in a packet
    /// has no such note.
    fn earlier_progress(&self) -> Result<EarlierProgress, Errno> {
        let Self::File { file, len } = self else {
            return Ok(EarlierProgress::None);
        };
        let mut stored = AppendProgress::default();
        let read_bytes = retry_on_intr(|| pread(file, stored.as_mut_bytes(), *len))?;
        if read_bytes < size_of::<AppendProgress>() {
            return Ok(EarlierProgress::None);
        }
        // In the file, 0 stands for a missing value, so the values are stored with 1 added.
        Ok(
            match (stored.place.checked_sub(1), stored.count.checked_sub(1)) {
                (None, _) => EarlierProgress::None,
                (Some(offset), None) => EarlierProgress::Begun { offset },
                (Some(offset), Some(count)) => EarlierProgress::Complete { offset, count },
            },
        )
    }

    /// Records for the next firnd that the append has begun to store its bytes at `offset`.
    fn record_begun(&self, offset: u64) -> Result<(), Errno> {
        self.record_progress(offset, None)
    }

    /// Records for the next firnd that the append is complete: it has stored `stored_count` bytes at `offset`.
    fn record_complete(&self, offset: u64, stored_count: u64) -> Result<(), Errno> {
        self.record_progress(offset, Some(stored_count))
    }

    /// Writes the record of the append; `stored_count` is `None` while the append is not complete.
    fn record_progress(&self, offset: u64, stored_count: Option<u64>) -> Result<(), Errno> {
        if let Self::File { file, len } = self {
            let progress = AppendProgress {
                place: offset + 1,
                count: stored_count.map_or(0, |count| count + 1),
            };
            retry_on_intr(|| pwrite(file, progress.as_bytes(), *len))?;
        }
        Ok(())
    }
}

/// How far an earlier firnd came with an append before it was killed.
enum EarlierProgress {
    None,
    /// The append began at `offset`, and may have stored some bytes.
    Begun {
        offset: u64,
    },
    /// The append is complete: `count` bytes are stored at `offset`.
    Complete {
        offset: u64,
        count: u64,
    },
}

/// Where an append begins, if an earlier firnd may have made part of it.
enum AppendStart {
    /// `stored_count` bytes are stored at `offset`.
    Unfinished { offset: u64, stored_count: u64 },
    /// The append is complete: `count` bytes are stored at `offset`.
    Finished { offset: u64, count: u64 },
}

impl<B: Backing> StubService<'_, B> {
    /// Returns the answer to a request about a stub (an empty file on tmpfs, of which this process has the bytes);
    /// `None` if the request is invalid, which ends the connection. `data` follows the request, and `descriptor` came
    /// with it.
    pub(super) fn answer(
        &self,
        op: Op,
        request: &Request,
        data: &[u8],
        descriptor: Option<OwnedFd>,
    ) -> Option<Answer> {
        if !has_valid_shape(op, request, data, descriptor.is_some()) {
            return None;
        }
        match op {
            // The attributes of a stub that the client has not opened, by inode and generation.
            Op::AttrOf => {
                let id = StubId {
                    inode: request.token,
                    generation: u32::try_from(request.arg).ok()?,
                };
                Some(match self.tree.attr(id) {
                    Ok(Some(attr)) => attr_answer(attr),
                    Ok(None) => Answer::status(Status::BadToken),
                    Err(errno) => failure_answer(errno),
                })
            }
            Op::Adopt => {
                let open_flags = request.arg as i32;
                let is_repeated = request.len == ADOPT_AGAIN;
                Some(self.adopt(descriptor?, open_flags, is_repeated))
            }
            _ => self.answer_with_handle(op, request, data, descriptor),
        }
    }

    /// Returns the answer to a request about an open stub (an empty file on tmpfs, of which this process has the
    /// bytes); `None` if the request is invalid. The request's token is the handle that this client got when it opened
    /// the stub. What `arg` means depends on the operation: an offset, a size or flags.
    fn answer_with_handle(
        &self,
        op: Op,
        request: &Request,
        data: &[u8],
        descriptor: Option<OwnedFd>,
    ) -> Option<Answer> {
        let &Request { len, arg, .. } = request;
        let handle = HandleId(request.token);
        if !self.tree.is_open(handle, self.client) {
            return Some(Answer::status(Status::BadToken));
        }
        let times = self.engine.request_times();
        let result = match op {
            Op::Release => timed(&times.close, || self.release(handle)).map(|()| ok_answer()),
            Op::Read => return Some(self.read(handle, arg, len as usize)),
            Op::Write => timed(&times.write, || self.write(handle, arg, data)),
            Op::Append => {
                let source = AppendSource::from_request(data, len, descriptor)?;
                timed(&times.write, || self.append(handle, &source, arg))
            }
            Op::Attr => self.tree.attr_of(handle).map(attr_answer),
            Op::Truncate => self
                .with_shared_lock(handle, || self.tree.truncate(handle, arg))
                .map(|()| ok_answer()),
            Op::Sync => {
                let data_only = arg == 1;
                timed(&times.fsync, || self.sync(handle, data_only)).map(|()| ok_answer())
            }
            Op::Allocate => {
                let (offset, range_len) = parse_range(data)?;
                let mode = arg as i32;
                let allocate = || self.engine.allocate(handle, mode, offset, range_len);
                self.with_shared_lock(handle, allocate)
                    .map(|()| ok_answer())
            }
            _ => return None,
        };
        Some(result.unwrap_or_else(failure_answer))
    }

    /// Opens the stub that the client's descriptor refers to. A file of another tree is answered with a bad token.
    /// `is_repeated` says that the client had the stub open with an earlier firnd.
    fn adopt(&self, stub: OwnedFd, flags: i32, is_repeated: bool) -> Answer {
        match self.tree.adopt(self.client, stub, flags, is_repeated) {
            Ok(adopted) => Reply {
                file_id: adopted.handle.0,
                size: adopted.size,
                ..Reply::default()
            }
            .into(),
            Err(Errno::XDEV) => Answer::status(Status::BadToken),
            Err(errno) => failure_answer(errno),
        }
    }

    /// Reads at most `len` bytes at `offset` from the bytes that the engine has of a stub (an empty file on tmpfs).
    fn read(&self, handle: HandleId, offset: u64, len: usize) -> Answer {
        let mut bytes = vec![0; len];
        match self.engine.read(handle, offset, &mut bytes) {
            Ok(count) => {
                bytes.truncate(count);
                let reply = Reply {
                    count: count as u32,
                    ..Reply::default()
                };
                Answer {
                    data: bytes,
                    ..reply.into()
                }
            }
            Err(errno) => failure_answer(errno),
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

    /// Writes some of the bytes at `offset`, at least one unless `data` is empty.
    fn write(&self, handle: HandleId, offset: u64, data: &[u8]) -> Result<Answer, Errno> {
        let count = self.with_shared_lock(handle, || self.write_at(handle, offset, data))?;
        Ok(written_answer(count as u64, offset))
    }

    /// Appends the bytes of `source` to a stub (an empty file on tmpfs, of which this process has the bytes), up to the
    /// file size `size_max`. No other change of the file comes between these bytes.
    ///
    /// The reply counts the bytes that are stored, which are fewer if the arena (shared memory) or the backing becomes
    /// full. An error means that no byte is stored. If an earlier firnd was killed in this append, it is continued
    /// after the bytes that are stored already.
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
        // The lock excludes all other changes of this file until the end of the call.
        let _guard = changes.lock_exclusive();
        let file_size = self.tree.attr_of(handle)?.size;
        let (offset, mut stored_count) = match find_start(source, &changes, file_size, size_max)? {
            AppendStart::Finished { offset, count } => {
                return Ok(written_answer(count, offset));
            }
            AppendStart::Unfinished {
                offset,
                stored_count,
            } => (offset, stored_count),
        };
        let count_to_store = source.storable_bytes(offset, size_max);
        // The file has reached `size_max`.
        if count_to_store == 0 && source.len() > 0 {
            return Err(Errno::FBIG);
        }
        source.record_begun(offset)?;
        let write_result =
            self.write_rest(handle, source, offset, &mut stored_count, count_to_store);
        // This cannot fail for lack of space, because the first record has allocated it. If it fails for another
        // reason, the reply still has the result.
        let _ = source.record_complete(offset, stored_count);
        match write_result {
            Err(errno) if stored_count == 0 => Err(errno),
            _ => Ok(written_answer(stored_count, offset)),
        }
    }

    /// Writes the bytes of an append that are not stored yet, up to `count_to_store`, and counts them in
    /// `stored_count`, which is right also after an error. `offset` is where the append begins in the file.
    fn write_rest(
        &self,
        handle: HandleId,
        source: &AppendSource<'_>,
        offset: u64,
        stored_count: &mut u64,
        count_to_store: u64,
    ) -> Result<(), Errno> {
        let mut buffer = Vec::new();
        while *stored_count < count_to_store {
            let remaining = count_to_store - *stored_count;
            let bytes = source.read_bytes(*stored_count, remaining, &mut buffer)?;
            match self.write_at(handle, offset + *stored_count, bytes)? {
                // The client has truncated the file that holds its bytes.
                0 => break,
                count => *stored_count += count as u64,
            }
        }
        Ok(())
    }

    /// Appends the bytes of `source` at the file's end as all hosts see it: all bytes are stored, or an error is
    /// returned. Until the append is stored, a lock that reaches the other hosts excludes their appends. EIO means that
    /// a killed firnd may have stored the bytes.
    fn append_for_all_hosts(
        &self,
        locks: &FileLocks,
        handle: HandleId,
        source: &AppendSource<'_>,
        size_max: u64,
    ) -> Result<Answer, Errno> {
        match source.earlier_progress()? {
            EarlierProgress::Complete { offset, count } => {
                return Ok(written_answer(count, offset));
            }
            // An earlier firnd was killed in the append. It may have stored the bytes, and other hosts may have
            // appended since.
            EarlierProgress::Begun { .. } => return Err(Errno::IO),
            EarlierProgress::None => {}
        }
        // The bytes are read before the file is locked, so that other hosts do not wait for the client.
        let data = read_all_bytes(source)?;
        // Other processes can find the file only by its name in the backing.
        self.tree.sync_open_name(handle)?;
        let file = self.engine.open_files.backing_inode_number(handle)?;
        let owner = lock_end(locks, file, handle)?;
        // The bytes go to the end of the file, and their offset is recorded below, after the append.
        let shared_append = SharedAppend {
            data: &data,
            size_max,
            by: None,
            repeated_at: None,
            note_offset: &mut |_| {},
        };
        // The offset is known only after the append. The first record has offset 0, which is not used: after a kill,
        // such an append is answered with EIO.
        let appended = source
            .record_begun(0)
            .and_then(|()| self.engine.append_known(handle, shared_append));
        release_end(locks, file, owner);
        let Appended { offset, len } = appended?;
        source.record_complete(offset, len)?;
        Ok(written_answer(len, offset))
    }

    /// Writes some of the bytes, at least one unless `data` is empty. Waits while the arena is full.
    fn write_at(&self, handle: HandleId, offset: u64, data: &[u8]) -> Result<usize, Errno> {
        let mut has_swept = false;
        loop {
            match self.engine.write(handle, offset, data, None)? {
                Written::Bytes(count) => return Ok(count),
                Written::Full if !has_swept => {
                    // Files that were removed from the tree free their space only in a sweep, so one is made before the
                    // wait.
                    has_swept = true;
                    self.tree.sweep()?;
                }
                Written::Full => self.engine.room.wait_for_room()?,
            }
        }
    }

    /// Syncs a file as the fsync policy says; with the policy `durable`, its name too.
    fn sync(&self, handle: HandleId, data_only: bool) -> Result<(), Errno> {
        if self.engine.fsync_policy() == FsyncPolicy::Durable {
            self.tree.sync_open_name(handle)?;
        }
        wait_for_result(|done| self.engine.fsync(handle, done))?;
        self.engine.sync_file(handle, data_only)
    }

    /// Closes a handle and waits for its drain as the close policy says. The handle is closed even if that fails.
    fn release(&self, handle: HandleId) -> Result<(), Errno> {
        let name_result = if self.engine.options().close == ClosePolicy::Drain {
            self.tree.sync_open_name(handle)
        } else {
            Ok(())
        };
        let is_last_close = self.engine.finishes_file(handle, &|_| true);
        let mut drain_result =
            wait_for_result(|done| self.engine.flush(handle, Closing::Called, done));
        if is_last_close && drain_result.is_ok() {
            drain_result = self.engine.finish_file(handle);
        }
        self.tree.release(handle);
        drain_result.and(name_result)
    }
}

/// Returns whether a request about a stub has the data, the length and the descriptor that its kind takes, and nothing
/// else. An append has its bytes as data, or a descriptor of a file with `len` bytes.
fn has_valid_shape(op: Op, request: &Request, data: &[u8], has_descriptor: bool) -> bool {
    let len = request.len as usize;
    let fits_in_packet = len <= DATA_BYTES_MAX;
    match op {
        // The bytes are in the file; `len` counts them.
        Op::Append if has_descriptor => data.is_empty(),
        Op::Append | Op::Write | Op::Allocate => {
            !has_descriptor && fits_in_packet && data.len() == len
        }
        // `len` says whether the stub was open with an earlier firnd.
        Op::Adopt => has_descriptor && fits_in_packet && data.is_empty(),
        Op::Read => !has_descriptor && fits_in_packet && data.is_empty(),
        _ => !has_descriptor && len == 0 && data.is_empty(),
    }
}

/// Reads all bytes of an append; fewer if the client has truncated the file that holds them.
fn read_all_bytes(source: &AppendSource<'_>) -> Result<Vec<u8>, Errno> {
    let mut data = Vec::new();
    let mut buffer = Vec::new();
    while (data.len() as u64) < source.len() {
        let position = data.len() as u64;
        let bytes = source.read_bytes(position, source.len() - position, &mut buffer)?;
        if bytes.is_empty() {
            break;
        }
        data.extend_from_slice(bytes);
    }
    Ok(data)
}

/// Returns where an append to a stub begins: at the end of the file, or after the bytes that a killed firnd has stored.
/// A stub is an empty file on tmpfs, of which firnd has the bytes.
///
/// The caller has the file locked for appends. `file_size` is the size now, and `size_max` the largest size that the
/// append may give the file. Fails with EIO if the bytes of the killed firnd cannot be told from those of other
/// changes.
fn find_start(
    source: &AppendSource<'_>,
    changes: &Changes,
    file_size: u64,
    size_max: u64,
) -> Result<AppendStart, Errno> {
    let at_end_of_file = AppendStart::Unfinished {
        offset: file_size,
        stored_count: 0,
    };
    let offset = match source.earlier_progress()? {
        EarlierProgress::None => return Ok(at_end_of_file),
        EarlierProgress::Complete { offset, count } => {
            return Ok(AppendStart::Finished { offset, count });
        }
        EarlierProgress::Begun { offset } => offset,
    };
    // The size at the first open of the file by a client of this firnd shows what the killed firnd had stored.
    let first_size = changes.first_size().ok_or(Errno::IO)?;
    let stored_count = first_size.saturating_sub(offset);
    let count_to_store = source.storable_bytes(offset, size_max);
    if stored_count >= count_to_store {
        return Ok(AppendStart::Finished {
            offset,
            count: count_to_store,
        });
    }
    if stored_count == 0 {
        return Ok(at_end_of_file);
    }
    if file_size != first_size {
        // Another change came after the first bytes of the append, so the others cannot be stored in one place with
        // them.
        return Err(Errno::IO);
    }
    Ok(AppendStart::Unfinished {
        offset,
        stored_count,
    })
}

/// Reads the range of an allocation: two numbers of 8 bytes, offset and length. `None` if `data` has another size.
fn parse_range(data: &[u8]) -> Option<(u64, u64)> {
    let (offset, len) = data.split_first_chunk::<8>()?;
    let len = u64::from_ne_bytes(len.try_into().ok()?);
    Some((u64::from_ne_bytes(*offset), len))
}

/// Runs `call` and adds its duration to a histogram.
fn timed<T>(histogram: &TimeHistogram, call: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = call();
    histogram.observe(start.elapsed());
    result
}

fn ok_answer() -> Answer {
    Answer::status(Status::Ok)
}

/// Returns the answer to a write of `count` bytes at `offset`.
fn written_answer(count: u64, offset: u64) -> Answer {
    Reply {
        count: count as u32,
        slot: offset,
        ..Reply::default()
    }
    .into()
}

/// Returns the answer to a request that failed.
fn failure_answer(errno: Errno) -> Answer {
    let errno = errno.raw_os_error().unsigned_abs();
    Reply {
        status: Status::Failed as u32,
        errno,
        ..Reply::default()
    }
    .into()
}

/// Returns the answer with the attributes of a stub. `count` is 1 if the time was changed, and `slot` has the blocks.
fn attr_answer(attr: StubAttr) -> Answer {
    Reply {
        count: u32::from(attr.is_time_changed),
        size: attr.size,
        slot: attr.blocks,
        ..Reply::default()
    }
    .into()
}

/// Locks the end of a file on all hosts for one append, and waits until no other append has it. `file` is the inode
/// number in the backing. Returns the owner of the lock, with which `release_end` releases it.
fn lock_end(locks: &FileLocks, file: u64, handle: HandleId) -> Result<Owner, Errno> {
    let ticket = locks.next_ticket();
    // The lock belongs to this one append and not to a process, so the ticket is its owner.
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
    Ok(owner)
}

/// Releases the lock of the end of a file; a failure is only logged.
fn release_end(locks: &FileLocks, file: u64, owner: Owner) {
    let owned_locks = ReleasedLocks::Owner(owner.number);
    let released = wait_for_result(|done| locks.release(file, LockKind::End, owned_locks, done));
    if let Err(error) = released {
        tracing::warn!(%error, ino = file, "cannot release the lock on the end of a file: appends of other hosts may \
            have to wait");
    }
}

/// Calls `start` with a callback, waits until the callback is called, and returns the result that it got.
fn wait_for_result(start: impl FnOnce(Done)) -> Result<(), Errno> {
    let (sender, receiver) = mpsc::channel();
    start(Box::new(move |result| {
        let _ = sender.send(result);
    }));
    receiver.recv().unwrap_or(Err(Errno::IO))
}
