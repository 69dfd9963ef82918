//! Writes this host's logs and index in one container.
//!
//! A *container* is a directory with the logs of all hosts for one file. An *index* says which bytes of the file a log
//! has. Each entry of an index is a *frame*.
//!
//! A write has three steps: it reserves a range of the current log, writes its bytes there, and appends a frame to the
//! index. So several threads can write at the same time, and a frame names only bytes whose write has returned. A sync
//! makes the logs durable first, and then the index.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_backing::lock::Mutex;
use firn_backing::{Backing, DataPart, Errno, PageAdvice, PlacementHint, Result};
use firn_hosts::own::own_caller;
use parking_lot::Condvar;

use crate::append::Appender;
use crate::frame::{CHECKED_BYTES, Change, Frame, Written};
use crate::names::Writer;
use crate::run::{Piece, find_runs};

/// A log that would become longer than this is followed by another one.
const LOG_BYTES_MAX: u64 = 4 << 30;
/// Data of at least this many bytes begins at a multiple of it in the log.
const PAGE_BYTES: u64 = 4096;
/// Bound on the bytes of one write call. Linux keeps the bytes of a call in folios as large as possible. A virtual
/// machine must get memory for large folios from its host. So on ext4 in a virtual machine, each byte of a call of 1
/// MiB or more took three to five times as long.
const WRITE_BYTES_MAX: usize = 512 << 10;

/// An appended frame, and where it lies in the index.
pub(crate) struct Appended {
    pub(crate) frame: Frame,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// This host's logs and index in one container.
pub(crate) struct OwnLog<B: Backing> {
    pub(crate) writer: Writer,
    dir: B::Inode,
    /// Selects the lane of the files, where the backing has lanes ([`crate::turn`]).
    turn: u64,
    logs: Mutex<LogState<B>>,
    log_created: Condvar,
    index: Appender<B>,
    /// Counts new names in the directory that a sync must make durable.
    names: SyncCounter,
}

/// The logs of this host.
struct LogState<B: Backing> {
    /// The log that is appended to.
    current: Option<Arc<Log<B>>>,
    /// End of the reserved ranges of the current log.
    end: u64,
    /// Whether a thread is creating the next log. Other threads wait for it.
    is_creating: bool,
    /// Logs with bytes that may not be durable.
    unsynced: Vec<Arc<Log<B>>>,
}

/// One open log.
struct Log<B: Backing> {
    number: u32,
    file: B::File,
    /// Number of writes that have reserved a range.
    begun_writes: AtomicU64,
    /// Counts the writes that have ended.
    ended_writes: SyncCounter,
}

/// A reserved range of a log. No other write gets bytes of it.
struct ReservedRange<B: Backing> {
    log: Arc<Log<B>>,
    position: u64,
}

/// Counts changes of a file or directory, and how many of them are durable.
///
/// Race: a sync makes durable only changes that ended before it began. A thread that needs a sync while another
/// thread's sync runs therefore syncs too: it cannot know which changes the other sync covers.
#[derive(Default)]
struct SyncCounter {
    /// Number of changes that have ended.
    ended: AtomicU64,
    /// Number of changes that are durable.
    synced: AtomicU64,
}

impl SyncCounter {
    /// Counts a change. Called after the change has ended: a sync must not count a change that it did not cover.
    fn record_change(&self) {
        self.ended.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns the number of durable changes.
    fn synced(&self) -> u64 {
        self.synced.load(Ordering::Acquire)
    }

    /// Calls `sync` if there are changes that are not durable.
    fn sync(&self, sync: impl FnOnce() -> Result<()>) -> Result<()> {
        let ended = self.ended.load(Ordering::Acquire);
        if ended > self.synced() {
            sync()?;
            self.synced.fetch_max(ended, Ordering::AcqRel);
        }
        Ok(())
    }
}

impl<B: Backing> OwnLog<B> {
    /// Creates the index of `writer`, the list of its changes, in the container `dir`. `writer` must have a new life,
    /// so that no index has its name. `turn` selects the lane, the server of the bytes.
    pub(crate) fn create(backing: &B, dir: &B::Inode, writer: Writer, turn: u64) -> Result<Self> {
        let name = writer.index_name();
        let name = OsStr::new(&name);
        let (_, file, _) =
            backing.create_placed(&own_caller(), dir, name, 0o600, PlacementHint::Turn(turn))?;
        let names = SyncCounter::default();
        // The new name is not durable yet.
        names.record_change();
        Ok(Self {
            writer,
            dir: dir.clone(),
            turn,
            logs: Mutex::new(LogState {
                current: None,
                end: 0,
                is_creating: false,
                unsynced: Vec::new(),
            }),
            log_created: Condvar::new(),
            index: Appender::new(file),
            names,
        })
    }

    /// Appends `parts`, which do not overlap, to a log, and a frame (the entry that describes them) to the index. After
    /// an error none of them counts.
    pub(crate) fn write(
        &self,
        backing: &B,
        epoch: u64,
        parts: &[DataPart<'_>],
    ) -> Result<Appended> {
        let bytes = parts.iter().map(DataPart::len).sum();
        let reserved = self.reserve(backing, bytes)?;
        let log = &reserved.log;
        let data = slices(parts).map(IoSlice::new).collect();
        let outcome = write_vectored(backing, &log.file, data, reserved.position);
        // A failed write has ended too, so that the log can be finished.
        log.ended_writes.record_change();
        outcome?;
        // Starts writing the pages to the device now. No page of a log is written twice, so waiting would save nothing.
        let written = reserved.position..reserved.position + bytes;
        backing.advise(&log.file, written, PageAdvice::WriteOut);
        let pieces = parts.iter().map(|part| Piece {
            offset: part.offset,
            len: part.len(),
        });
        let synced = self.index.synced();
        let change = Change::Written(Written {
            log: log.number,
            position: reserved.position,
            checksums: checksums(parts),
            runs: find_runs(pieces),
        });
        let frame = Frame {
            epoch,
            synced,
            change,
        };
        self.append_frame(backing, frame)
    }

    /// Appends a frame for a change that has no bytes in a log.
    pub(crate) fn append_change(
        &self,
        backing: &B,
        epoch: u64,
        change: Change,
    ) -> Result<Appended> {
        let frame = Frame {
            epoch,
            synced: self.index.synced(),
            change,
        };
        self.append_frame(backing, frame)
    }

    /// Appends a frame to the index.
    fn append_frame(&self, backing: &B, frame: Frame) -> Result<Appended> {
        let mut encoded = Vec::new();
        frame.encode(&mut encoded);
        Ok(Appended {
            offset: self.index.append(backing, &encoded)?,
            bytes: encoded.len() as u64,
            frame,
        })
    }

    /// Makes all ended writes durable, the data first, so that a durable frame has its data.
    ///
    /// Then appends a frame that notes how much is durable, and returns it. Returns `None` if all was durable before.
    pub(crate) fn sync(&self, backing: &B, epoch: u64) -> Result<Option<Appended>> {
        let unsynced_logs = self.logs.lock().unsynced.clone();
        // The index goes to the device together with the logs. A file system with a journal then often commits once.
        self.index.begin_sync(backing);
        let is_data_only = true;
        for log in &unsynced_logs {
            log.ended_writes
                .sync(|| backing.sync(&log.file, is_data_only))?;
        }
        let has_synced_frames = self.index.sync(backing)?;
        self.names.sync(|| backing.sync_dir(&self.dir))?;
        let finished_logs = self.logs.lock().remove_finished();
        // The logs are dropped after the lock is released, because that closes files.
        drop((unsynced_logs, finished_logs));
        if !has_synced_frames {
            return Ok(None);
        }
        let sync_note = self.append_change(backing, epoch, Change::Synced)?;
        let note_range = sync_note.offset..sync_note.offset + sync_note.bytes;
        // The note need not be durable: the next sync does nothing if only the note was appended.
        self.index.mark_clean(note_range);
        Ok(Some(sync_note))
    }

    /// Reserves `bytes` bytes of the current log, a file with this host's written bytes. Creates the next log if the
    /// current one is full.
    fn reserve(&self, backing: &B, bytes: u64) -> Result<ReservedRange<B>> {
        let mut logs = self.logs.lock();
        loop {
            if let Some(reserved) = logs.reserve(bytes) {
                return Ok(reserved);
            }
            if logs.is_creating {
                logs.wait(&self.log_created);
                continue;
            }
            logs.is_creating = true;
            let number = logs.current.as_ref().map_or(0, |log| log.number + 1);
            let created = logs.unlocked(|| self.create_log(backing, number));
            // The others continue even if the creation failed: one of them tries again.
            logs.is_creating = false;
            self.log_created.notify_all();
            let log = Arc::new(Log {
                number,
                file: created?,
                begun_writes: AtomicU64::new(0),
                ended_writes: SyncCounter::default(),
            });
            self.names.record_change();
            logs.unsynced.push(Arc::clone(&log));
            logs.current = Some(log);
            logs.end = 0;
        }
    }

    /// Creates the file of a log.
    fn create_log(&self, backing: &B, number: u32) -> Result<B::File> {
        let name = self.writer.log_name(number);
        let name = OsStr::new(&name);
        let created = backing.create_placed(
            &own_caller(),
            &self.dir,
            name,
            0o600,
            PlacementHint::Turn(self.turn),
        );
        created.map(|(_, file, _)| file)
    }
}

impl<B: Backing> LogState<B> {
    /// Reserves `bytes` bytes of the current log. Returns `None` if the log is full or there is none.
    fn reserve(&mut self, bytes: u64) -> Option<ReservedRange<B>> {
        let log = Arc::clone(self.current.as_ref()?);
        let position = if bytes >= PAGE_BYTES {
            self.end.next_multiple_of(PAGE_BYTES)
        } else {
            self.end
        };
        if self.end > 0 && position + bytes > LOG_BYTES_MAX {
            return None;
        }
        debug_assert!(position >= self.end, "a range is reserved once");
        self.end = position + bytes;
        log.begun_writes.fetch_add(1, Ordering::AcqRel);
        Some(ReservedRange { log, position })
    }

    /// Removes and returns the logs that are full and durable.
    fn remove_finished(&mut self) -> Vec<Arc<Log<B>>> {
        let current = self.current.as_ref();
        let is_finished = |log: &mut Arc<Log<B>>| {
            let is_current = current.is_some_and(|current| Arc::ptr_eq(current, log));
            // Ranges are reserved under the lock, so no write can begin in a log that is not current.
            !is_current && log.ended_writes.synced() == log.begun_writes.load(Ordering::Acquire)
        };
        self.unsynced.extract_if(.., is_finished).collect()
    }
}

/// Writes all of `data` at `position`, in calls of at most [`WRITE_BYTES_MAX`].
pub(crate) fn write_vectored<B: Backing>(
    backing: &B,
    file: &B::File,
    mut data: Vec<IoSlice<'_>>,
    mut position: u64,
) -> Result<()> {
    let mut remaining = &mut data[..];
    // Removes empty slices at the front, so that `remaining` is empty once all bytes are written.
    IoSlice::advance_slices(&mut remaining, 0);
    while !remaining.is_empty() {
        let count = write_some(backing, file, remaining, position)?;
        if count == 0 {
            return Err(Errno::IO);
        }
        position += count as u64;
        IoSlice::advance_slices(&mut remaining, count);
    }
    Ok(())
}

/// Writes the first bytes of `data`, which is not empty, with one call. Returns how many bytes were written.
fn write_some<B: Backing>(
    backing: &B,
    file: &B::File,
    data: &[IoSlice<'_>],
    position: u64,
) -> Result<usize> {
    let mut bytes = 0;
    let fits = |slice: &&IoSlice<'_>| {
        bytes += slice.len();
        bytes <= WRITE_BYTES_MAX
    };
    let whole_slices = data.iter().take_while(fits).count();
    if whole_slices > 0 {
        return backing.write_at(file, &data[..whole_slices], position);
    }
    let first_bytes = &data[0][..WRITE_BYTES_MAX];
    backing.write_at(file, &[IoSlice::new(first_bytes)], position)
}

/// Returns the slices of all parts, one after the other.
fn slices<'a>(parts: &'a [DataPart<'a>]) -> impl Iterator<Item = &'a [u8]> {
    parts
        .iter()
        .flat_map(|part| part.data)
        .map(|slice| &**slice)
}

/// Returns the CRC32C of each block of [`CHECKED_BYTES`] of the parts' bytes, taken one after the other.
fn checksums(parts: &[DataPart<'_>]) -> Vec<u32> {
    let mut checksums = Vec::new();
    let mut block_checksum = 0;
    let mut block_bytes = 0;
    for mut slice in slices(parts) {
        while !slice.is_empty() {
            let missing_bytes = (CHECKED_BYTES - block_bytes) as usize;
            let (in_block, after_block) = slice.split_at(slice.len().min(missing_bytes));
            block_checksum = crc32c::crc32c_append(block_checksum, in_block);
            block_bytes += in_block.len() as u64;
            if block_bytes == CHECKED_BYTES {
                checksums.push(block_checksum);
                block_checksum = 0;
                block_bytes = 0;
            }
            slice = after_block;
        }
    }
    if block_bytes > 0 {
        checksums.push(block_checksum);
    }
    checksums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_of_the_bytes_as_they_lie_in_the_log() {
        let bytes: Vec<u8> = (0..3 * CHECKED_BYTES + 77)
            .map(|at| (at % 251) as u8)
            .collect();
        let expected: Vec<u32> = bytes
            .chunks(CHECKED_BYTES as usize)
            .map(crc32c::crc32c)
            .collect();
        for cut in [
            1,
            4096,
            CHECKED_BYTES as usize,
            2 * CHECKED_BYTES as usize + 5,
        ] {
            let (a, b) = bytes.split_at(cut);
            let (a, b) = ([IoSlice::new(a)], [IoSlice::new(b)]);
            let parts = [(0, &a), (1 << 40, &b)].map(|(offset, data)| DataPart { offset, data });
            assert_eq!(checksums(&parts), expected, "cut at {cut}");
        }
    }
}
