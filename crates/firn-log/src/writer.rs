//! The writer of this host for one file: its logs and its index.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_backing::lock::Mutex;
use firn_backing::{Backing, DataPart, Errno, PageAdvice, Placing, Result};
use firn_hosts::own::own_caller;
use parking_lot::Condvar;

use crate::append::Appender;
use crate::frame::{CHECKED_BYTES, Change, Frame, Written};
use crate::names::Writer;
use crate::run::{Piece, find_runs};

/// A log that has this many bytes is followed by another.
const LOG_BYTES_MAX: u64 = 4 << 30;
/// Data of a page or more begins at a page.
const PAGE_BYTES: u64 = 4096;
/// Most bytes of one call. Linux keeps what a call writes in folios as large as it can. On ext4 in a virtual machine, a
/// call of a MiB and more took three to five times as long for each byte, because the machine has to get memory for
/// large folios from its host.
const WRITE_BYTES: usize = 512 << 10;

/// A frame, and where it is in the index.
pub(crate) struct Appended {
    pub(crate) frame: Frame,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// The logs and the index of this host in one container.
pub(crate) struct OwnLog<B: Backing> {
    pub(crate) writer: Writer,
    dir: B::Inode,
    /// Says which lane its files go to, where there are lanes.
    turn: u64,
    logs: Mutex<Logs<B>>,
    log_made: Condvar,
    index: Appender<B>,
    /// Sync state of the names of its files.
    names: Unsynced,
}

struct Logs<B: Backing> {
    /// The one that is appended to.
    current: Option<Arc<Log<B>>>,
    end: u64,
    is_making: bool,
    /// Those that may have bytes which are not durable.
    written: Vec<Arc<Log<B>>>,
}

struct Log<B: Backing> {
    number: u32,
    file: B::File,
    /// Writes that have room in it.
    writes: AtomicU64,
    /// Sync state of the writes that are over.
    bytes: Unsynced,
}

/// Room in a log.
struct Room<B: Backing> {
    log: Arc<Log<B>>,
    position: u64,
}

/// How many changes of a file or directory are durable. A sync makes those durable that were over when it began, and no
/// others. A thread that calls it during another thread's sync syncs too: it cannot know what the other sync covers
/// before that ends.
#[derive(Default)]
struct Unsynced {
    /// Changes that are over.
    made: AtomicU64,
    /// How many of them are durable.
    synced: AtomicU64,
}

impl Unsynced {
    /// Counts a change. Called after the change: a sync that began before it would count it otherwise.
    fn note(&self) {
        self.made.fetch_add(1, Ordering::AcqRel);
    }

    /// Changes that are durable.
    fn synced(&self) -> u64 {
        self.synced.load(Ordering::Acquire)
    }

    /// Calls `sync`, if there is need.
    fn sync(&self, sync: impl FnOnce() -> Result<()>) -> Result<()> {
        let made = self.made.load(Ordering::Acquire);
        if made > self.synced() {
            sync()?;
            self.synced.fetch_max(made, Ordering::AcqRel);
        }
        Ok(())
    }
}

impl<B: Backing> OwnLog<B> {
    /// Makes the index of `writer`, whose life is new.
    pub(crate) fn create(base: &B, dir: &B::Inode, writer: Writer, turn: u64) -> Result<Self> {
        let name = writer.index_name();
        let name = OsStr::new(&name);
        let (_, file, _) =
            base.create_placed(&own_caller(), dir, name, 0o600, Placing::Turn(turn))?;
        let names = Unsynced::default();
        names.note();
        Ok(Self {
            writer,
            dir: dir.clone(),
            turn,
            logs: Mutex::new(Logs {
                current: None,
                end: 0,
                is_making: false,
                written: Vec::new(),
            }),
            log_made: Condvar::new(),
            index: Appender::new(file),
            names,
        })
    }

    /// Appends bytes of the file that do not overlap, and says what they are. After an error none of them counts.
    pub(crate) fn write(&self, base: &B, epoch: u64, parts: &[DataPart<'_>]) -> Result<Appended> {
        let bytes = parts.iter().map(DataPart::len).sum();
        let room = self.take_room(base, bytes)?;
        let data = slices(parts).map(IoSlice::new).collect();
        let written = write_vectored(base, &room.log.file, data, room.position);
        room.log.bytes.note();
        written?;
        // No page of a log is written twice, so waiting with the sync saves nothing.
        let written = room.position..room.position + bytes;
        base.advise(&room.log.file, written, PageAdvice::WriteOut);
        let pieces = parts.iter().map(|part| Piece {
            offset: part.offset,
            len: part.len(),
        });
        let frame = Frame {
            epoch,
            synced: self.index.synced(),
            change: Change::Written(Written {
                log: room.log.number,
                position: room.position,
                checksums: checksums(parts),
                runs: find_runs(pieces),
            }),
        };
        self.append(base, frame)
    }

    /// Says what else became of the file.
    pub(crate) fn note(&self, base: &B, epoch: u64, change: Change) -> Result<Appended> {
        let synced = self.index.synced();
        let frame = Frame {
            epoch,
            synced,
            change,
        };
        self.append(base, frame)
    }

    fn append(&self, base: &B, frame: Frame) -> Result<Appended> {
        let mut encoded = Vec::new();
        frame.encode(&mut encoded);
        Ok(Appended {
            offset: self.index.append(base, &encoded)?,
            bytes: encoded.len() as u64,
            frame,
        })
    }

    /// Makes what was written durable: data first, so that a durable frame has its data. A frame then says that it is;
    /// where that one was appended is returned.
    pub(crate) fn sync(&self, base: &B, epoch: u64) -> Result<Option<Appended>> {
        let written = self.logs.lock().written.clone();
        // Both go to the device together; a file system with a journal then often commits once.
        self.index.begin_sync(base);
        for log in &written {
            log.bytes.sync(|| base.sync(&log.file, true))?;
        }
        let is_more = self.index.sync(base)?;
        self.names.sync(|| base.sync_dir(&self.dir))?;
        let done = self.logs.lock().take_done();
        // Files are closed after the lock is free.
        drop((written, done));
        if !is_more {
            return Ok(None);
        }
        let told = self.note(base, epoch, Change::Synced)?;
        self.index.note_told(told.offset..told.offset + told.bytes);
        Ok(Some(told))
    }

    /// Reserves `bytes` bytes of a log for one writer.
    fn take_room(&self, base: &B, bytes: u64) -> Result<Room<B>> {
        let mut logs = self.logs.lock();
        loop {
            if let Some(room) = logs.take(bytes) {
                return Ok(room);
            }
            if logs.is_making {
                logs.wait(&self.log_made);
                continue;
            }
            logs.is_making = true;
            let number = logs.current.as_ref().map_or(0, |log| log.number + 1);
            let made = logs.unlocked(|| self.make_log(base, number));
            logs.is_making = false;
            self.log_made.notify_all();
            let log = Arc::new(Log {
                number,
                file: made?,
                writes: AtomicU64::new(0),
                bytes: Unsynced::default(),
            });
            self.names.note();
            logs.written.push(Arc::clone(&log));
            logs.current = Some(log);
            logs.end = 0;
        }
    }

    fn make_log(&self, base: &B, number: u32) -> Result<B::File> {
        let name = self.writer.log_name(number);
        let name = OsStr::new(&name);
        let made = base.create_placed(
            &own_caller(),
            &self.dir,
            name,
            0o600,
            Placing::Turn(self.turn),
        );
        made.map(|(_, file, _)| file)
    }
}

impl<B: Backing> Logs<B> {
    /// None if no log has that much room.
    fn take(&mut self, bytes: u64) -> Option<Room<B>> {
        let log = Arc::clone(self.current.as_ref()?);
        let position = if bytes >= PAGE_BYTES {
            self.end.next_multiple_of(PAGE_BYTES)
        } else {
            self.end
        };
        if self.end > 0 && position + bytes > LOG_BYTES_MAX {
            return None;
        }
        debug_assert!(position >= self.end, "room is given once");
        self.end = position + bytes;
        log.writes.fetch_add(1, Ordering::AcqRel);
        Some(Room { log, position })
    }

    /// Takes out the logs that are full and durable.
    fn take_done(&mut self) -> Vec<Arc<Log<B>>> {
        let current = self.current.as_ref();
        let is_done = |log: &mut Arc<Log<B>>| {
            let is_current = current.is_some_and(|current| Arc::ptr_eq(current, log));
            // Room is given with the lock held.
            !is_current && log.bytes.synced() == log.writes.load(Ordering::Acquire)
        };
        self.written.extract_if(.., is_done).collect()
    }
}

/// pwritev(2), until all is written.
pub(crate) fn write_vectored<B: Backing>(
    base: &B,
    file: &B::File,
    mut data: Vec<IoSlice<'_>>,
    mut position: u64,
) -> Result<()> {
    let mut left = &mut data[..];
    IoSlice::advance_slices(&mut left, 0);
    while !left.is_empty() {
        let count = match write_some(base, file, left, position)? {
            0 => return Err(Errno::IO),
            count => count,
        };
        position += count as u64;
        IoSlice::advance_slices(&mut left, count);
    }
    Ok(())
}

/// One pwritev(2) of the first bytes, of which there are some.
fn write_some<B: Backing>(
    base: &B,
    file: &B::File,
    data: &[IoSlice<'_>],
    position: u64,
) -> Result<usize> {
    let mut bytes = 0;
    let fits = |slice: &&IoSlice<'_>| {
        bytes += slice.len();
        bytes <= WRITE_BYTES
    };
    let count = data.iter().take_while(fits).count();
    if count > 0 {
        return base.write_at(file, &data[..count], position);
    }
    base.write_at(file, &[IoSlice::new(&data[0][..WRITE_BYTES])], position)
}

/// The bytes of all parts, one after the other.
fn slices<'a>(parts: &'a [DataPart<'a>]) -> impl Iterator<Item = &'a [u8]> {
    parts
        .iter()
        .flat_map(|part| part.data)
        .map(|slice| &**slice)
}

/// CRC32C of each [`CHECKED_BYTES`] of the parts one after the other.
fn checksums(parts: &[DataPart<'_>]) -> Vec<u32> {
    let mut sums = Vec::new();
    let (mut sum, mut len) = (0, 0);
    for mut rest in slices(parts) {
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min((CHECKED_BYTES - len) as usize));
            sum = crc32c::crc32c_append(sum, now);
            len += now.len() as u64;
            if len == CHECKED_BYTES {
                sums.push(std::mem::take(&mut sum));
                len = 0;
            }
            rest = later;
        }
    }
    if len > 0 {
        sums.push(sum);
    }
    sums
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
