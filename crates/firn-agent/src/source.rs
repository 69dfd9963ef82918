//! The mount from which an agent sends files to other hosts: lists its tree, and reads its files by their chunk lists.
//!
//! Terms
//! * *chunk list*: says where each byte of a file is. While the agent has the list, the file is *held*: its bytes in
//!   memory and in the spill file do not change.
//! * *piece*: one range of a chunk list. All of its bytes are in one of these places:
//!   * the arena, the mount's shared memory
//!   * a memory file, which has the bytes of one large file
//!   * the spill file on a local device
//!   * the backing, the directory that the mount serves
//!   * a hole, which has no bytes
//!
//! Promises
//! * Bytes in the arena are passed to a [`DataPath`] without a copy. Bytes of memory files, of the spill file and of
//!   the backing pass through one buffer of [`COPY_BYTES`].
//! * No path leads out of the mount. Each component is resolved separately, and no symbolic link is followed.
//!
//! This module relies on the promise S-chunks-1 of `docs/SEMANTICS.md`: bytes in memory do not change until their chunk
//! list is released.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firn_client::{ChunkList, ClientError, Mount, MountError, OpenMount};
use firn_format::durability::DurabilityLevel;
use firn_format::record::Ending;
use firn_protocol::path::BytePath;
use firn_protocol::{ChunkPiece, FileStatus, Place};
use firn_trust::open_beneath;
use rustix::fs::{Mode, OFlags};
use xxhash_rust::xxh3::Xxh3;

use crate::data_path::{DataPath, MemoryPart, send_bytes_or_zeros};
use crate::error::{WireError, mount_error_kind};
use crate::hold_budget::{HoldBudget, HoldReservation};
use crate::link::Link;
use crate::message::{
    ENTRIES_MAX, Entry, EntryKind, ErrorKind, FirndIdentity, Held, LIST_NAME_BYTES_MAX,
    PATH_BYTES_MAX, Reply,
};
use crate::transport::Transport;

/// Bytes that are copied at a time if sendfile(2) cannot be used: few enough that they are still in the processor's
/// cache for the checksum.
pub(crate) const COPY_BYTES: usize = 128 << 10;

/// Permission bits of an entry, with the set-id and sticky bits.
const MODE_BITS: u32 = 0o7777;
/// Divisor of the arena's size that yields the default budget of held bytes.
const DEFAULT_HOLD_DIVISOR: u64 = 4;

/// The reason why the mount cannot answer a request, as the kind and text of a reply.
pub(crate) struct SourceError {
    pub(crate) kind: ErrorKind,
    pub(crate) message: String,
}

impl SourceError {
    fn refused(message: impl Into<String>) -> Self {
        Self {
            kind: ErrorKind::Refused,
            message: message.into(),
        }
    }

    pub(crate) fn into_reply(self) -> Reply {
        Reply::Error {
            kind: self.kind,
            message: self.message,
        }
    }
}

impl From<MountError> for SourceError {
    fn from(error: MountError) -> Self {
        Self {
            kind: mount_error_kind(&error),
            message: error.to_string(),
        }
    }
}

impl From<ClientError> for SourceError {
    fn from(error: ClientError) -> Self {
        MountError::from(error).into()
    }
}

/// The reason why the bytes of a file could not be sent. The connection ends in both cases.
pub(crate) enum SendError {
    /// The connection failed.
    Wire(WireError),
    /// The file could not be read. The puller may have received a part of the answer, and waits for the rest of the
    /// answer.
    Source(SourceError),
}

impl SendError {
    /// Returns the error with which the connection ends.
    pub(crate) fn into_wire_error(self) -> WireError {
        match self {
            Self::Wire(error) => error,
            // A part of the answer may already be sent, so the puller would take an error reply for the next part.
            Self::Source(error) => WireError::Io(io::Error::other(error.message)),
        }
    }
}

impl From<WireError> for SendError {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

impl From<io::Error> for SendError {
    fn from(error: io::Error) -> Self {
        Self::Wire(error.into())
    }
}

impl From<SourceError> for SendError {
    fn from(error: SourceError) -> Self {
        Self::Source(error)
    }
}

impl From<MountError> for SendError {
    fn from(error: MountError) -> Self {
        Self::Source(error.into())
    }
}

/// A mount, as opened for one connection of the agent.
pub(crate) struct Source {
    /// Paths and options of the mount.
    mount_info: Mount,
    /// Connection to firnd, and the mapped memory.
    mount: Arc<OpenMount>,
    /// Budget of the bytes that the agent holds in memory.
    hold_budget: Arc<HoldBudget>,
}

/// Checksum of a range of a file.
pub(crate) struct Checksum {
    /// Number of bytes in the checksum. It is less than requested if the file ends in the range.
    pub(crate) bytes: u64,
    pub(crate) xxh3: u128,
}

/// Result of a check of the bytes that were read of a file.
pub(crate) struct FileCheck {
    /// Whether the file was changed since it was opened.
    pub(crate) has_changed: bool,
    /// Whether the bytes that were read are those of the file as it was opened.
    pub(crate) is_snapshot: bool,
}

/// A file that is held by its chunk list. Dropping it releases the list.
pub(crate) struct HeldFile {
    list: ChunkList,
    path: BytePath,
    /// The file opened for reading; `None` until bytes are needed that only the backing has.
    backing: Option<File>,
    /// Buffer for bytes that must be copied; empty until the first copy.
    copy_buffer: Vec<u8>,
    /// The file's share of the held bytes.
    _reservation: HoldReservation,
}

impl Source {
    /// Opens the mount of `path`, and maps its memory, to send its files to other hosts. `hold_budget` bounds the bytes
    /// in memory that are held for them; without it, makes one of the default size.
    pub(crate) fn open(
        path: &Path,
        hold_budget: Option<&Arc<HoldBudget>>,
    ) -> Result<Self, SourceError> {
        let mount_info = firn_client::find(path)?.mount;
        let mount = Arc::new(OpenMount::open(&mount_info.mount_point)?);
        mount.map_region()?;
        let hold_budget = match hold_budget {
            Some(hold_budget) => Arc::clone(hold_budget),
            None => HoldBudget::new(default_hold_max(mount.region().bytes)),
        };
        Ok(Self {
            mount_info,
            mount,
            hold_budget,
        })
    }

    /// Adds the sent files and bytes to the status of the mount. Ignores an error, because the next request to firnd
    /// reports it.
    pub(crate) fn report_sent(&self, files: u64, bytes: u64) {
        let _ = self.mount.report_pull(files, bytes);
    }

    /// Converts a path of this host to one relative to the mount point. Refuses a path on another mount.
    pub(crate) fn relative(&self, path: &Path) -> Result<BytePath, SourceError> {
        let location = firn_client::find(path)?;
        let is_this_mount = location.mount.backing == self.mount_info.backing
            && location.mount.user_id == self.mount_info.user_id;
        if is_this_mount {
            return Ok(location.relative);
        }
        let path = BytePath::from(path);
        let mount_point = BytePath::from(self.mount_info.mount_point.as_path());
        Err(SourceError::refused(format!(
            "{path} is not on the mount at {mount_point}, which this agent serves"
        )))
    }

    // ---- the tree ------------------------------------------------------------------------------

    /// Lists everything at and below a path, parents first.
    pub(crate) fn list(&self, top: &BytePath) -> Result<Vec<Entry>, SourceError> {
        check_path(top)?;
        let mut list = ListBuilder::new(self, top)?;
        let host_path = self.locate(top);
        let metadata = host_path
            .symlink_metadata()
            .map_err(|error| list_error(top, &error))?;
        list.walk(top, Path::new(""), &metadata)?;
        self.check_still_mounted(top, &host_path)?;
        Ok(list.entries)
    }

    /// Checks, after a walk of `top`, that firnd answers and that `path` is still on this mount.
    ///
    /// If firnd was killed or unmounted during the walk, the walk has listed the directory under the mount point. Such
    /// a list is stale.
    fn check_still_mounted(&self, top: &BytePath, path: &Path) -> Result<(), SourceError> {
        self.known_files(top)?;
        match self.relative(path) {
            Ok(_) => Ok(()),
            Err(error) => Err(SourceError {
                kind: ErrorKind::Stale,
                ..error
            }),
        }
    }

    /// Lists unsaved files at and below a path, and the directories above them, parents first. A file is unsaved if it
    /// has bytes only in memory, so that a partner (a host that keeps copies) must copy it, or if it is open for
    /// writing.
    ///
    /// Fails with `Missing` if there are none, except for the whole mount. Fails with `Stale` if the mount has gone
    /// during the listing.
    pub(crate) fn list_held(&self, top: &BytePath) -> Result<Vec<Entry>, SourceError> {
        check_path(top)?;
        let mut list = ListBuilder::new(self, top)?;
        let is_wanted = |file: &&FileStatus| must_be_copied(file) || is_being_written(file);
        let wanted_files: Vec<_> = list.files.values().filter(is_wanted).cloned().collect();
        let mut listed_dirs = BTreeSet::new();
        for file in wanted_files {
            let Ok(relative_path) = file.path.as_path().strip_prefix(top.as_path()) else {
                continue;
            };
            list.add_file_with_parents(top, relative_path, &file, &mut listed_dirs)?;
        }
        if list.entries.is_empty() {
            let is_whole_mount = top.is_empty();
            if !is_whole_mount {
                return Err(SourceError {
                    kind: ErrorKind::Missing,
                    message: format!("no file of {top} is held in memory"),
                });
            }
            list.entries.push(Entry::directory());
        }
        self.check_still_mounted(top, &self.mount_info.mount_point)?;
        Ok(list.entries)
    }

    /// Returns the identity of the firnd of this mount.
    pub(crate) fn identity(&self) -> Result<FirndIdentity, SourceError> {
        Ok(FirndIdentity {
            incarnation: self.mount.incarnation()?,
            arena: self.mount.region().uuid.clone(),
        })
    }

    /// Sends the name of the partner to firnd, and a note about it for the status.
    pub(crate) fn announce_partner(&self, host: &str, note: &str) -> Result<(), SourceError> {
        Ok(self.mount.announce_partner(Some(host), note)?)
    }

    /// Reports to firnd that the partner has a copy of a file with this number of changes.
    pub(crate) fn mark_partnered(&self, path: &BytePath, changes: u64) -> Result<(), SourceError> {
        check_path(path)?;
        Ok(self.mount.mark_partnered(path, changes)?)
    }

    /// Requests the status of the files at and below a path that firnd knows.
    fn known_files(&self, top: &BytePath) -> Result<BTreeMap<BytePath, FileStatus>, SourceError> {
        let files = self.mount.files(top)?;
        let by_path = files.into_iter().map(|file| (file.path.clone(), file));
        Ok(by_path.collect())
    }

    /// Returns the path on this host of a path relative to the mount point.
    fn locate(&self, path: &BytePath) -> PathBuf {
        self.mount_info.mount_point.join(path)
    }

    /// Returns the path in the backing of a file of a stub tree, because the stub itself is empty. Returns `None` for a
    /// FUSE mount.
    fn locate_in_backing(&self, path: &BytePath) -> Option<PathBuf> {
        if self.mount_info.is_tree {
            Some(self.mount_info.backing.join(path))
        } else {
            None
        }
    }

    /// Returns the open mount, whose memory is mapped.
    pub(crate) fn mount(&self) -> &Arc<OpenMount> {
        &self.mount
    }

    // ---- files ---------------------------------------------------------------------------------

    /// Holds a file as it is now: until the result is dropped, its bytes in memory do not change. Requests the chunk
    /// list of the file, which says where each byte is.
    ///
    /// Returns `None` if this agent, which serves files to other hosts, already holds the maximum number of bytes.
    pub(crate) fn hold(&self, path: &BytePath) -> Result<Option<HeldFile>, SourceError> {
        check_path(path)?;
        let list = ChunkList::request(&self.mount, &self.locate(path))?;
        let bytes_in_memory = list
            .pieces
            .iter()
            .filter(|piece| matches!(piece.place, Place::Memory | Place::MemoryFile))
            .map(|piece| piece.bytes)
            .sum();
        let Some(reservation) = self.hold_budget.reserve(bytes_in_memory) else {
            return Ok(None);
        };
        Ok(Some(HeldFile {
            list,
            path: path.clone(),
            backing: None,
            copy_buffer: Vec::new(),
            _reservation: reservation,
        }))
    }

    /// Sends a range of a held file to another host: its bytes, zeros for holes, and at the end the message
    /// authentication code (MAC). `data_path` carries the bytes: over the connection, or by RDMA.
    ///
    /// A piece is a range of the file in one place. Adjacent pieces in the same place are sent together. Only pieces in
    /// the arena (`Memory`) are sent without a copy. Those in a spill file, a memory file or the backing are first read
    /// into a buffer.
    pub(crate) fn send<T: Transport>(
        &self,
        file: &mut HeldFile,
        offset: u64,
        bytes: u64,
        link: &mut Link<T>,
        data_path: &mut dyn DataPath<T>,
    ) -> Result<(), SendError> {
        let mut sender = Sender {
            source: self,
            link,
            data_path,
        };
        let pieces = file.pieces_of_range(offset, bytes);
        for run in pieces.chunk_by(|piece, next_piece| piece.place == next_piece.place) {
            match run[0].place {
                Place::Memory => sender.send_arena_parts(run, file)?,
                Place::Hole => sender.send_hole(run)?,
                Place::Spill | Place::MemoryFile | Place::Backing => {
                    sender.send_buffered(run, file)?
                }
            }
        }
        Ok(data_path.end(link)?)
    }

    /// Computes the checksum of a range of a held file. The range is clamped to the end of the file; the result states
    /// how many bytes were hashed.
    pub(crate) fn checksum(
        &self,
        file: &mut HeldFile,
        offset: u64,
        bytes: u64,
    ) -> Result<Checksum, SourceError> {
        let mut hasher = Xxh3::new();
        let mut hashed_bytes = 0;
        for piece in file.pieces_of_range(offset, bytes) {
            let hashed: Result<(), SourceError> = self.read_piece(file, &piece, |chunk| {
                hasher.update(chunk);
                Ok(())
            });
            hashed?;
            hashed_bytes += piece.bytes;
        }
        Ok(Checksum {
            bytes: hashed_bytes,
            xxh3: hasher.digest128(),
        })
    }

    /// Reads the bytes of a piece, a range of a held file in one place, such as a memory file or the backing. Passes
    /// them to `consume`, at most [`COPY_BYTES`] at a time. Zeros are passed for a hole. An error of `consume` ends the
    /// read.
    fn read_piece<E: From<SourceError>>(
        &self,
        file: &mut HeldFile,
        piece: &ChunkPiece,
        mut consume: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        // The buffer is taken out of the file, because `read_backing` needs the file.
        let mut buffer = std::mem::take(&mut file.copy_buffer);
        buffer.resize(COPY_BYTES, 0);
        let mut bytes_read = 0;
        while bytes_read < piece.bytes {
            let count = COPY_BYTES.min((piece.bytes - bytes_read) as usize);
            let chunk = &mut buffer[..count];
            match piece.place {
                Place::Backing => self.read_backing(file, piece.at + bytes_read, chunk)?,
                _ => self
                    .mount
                    .fill_from_piece(piece, bytes_read, chunk)
                    .map_err(SourceError::from)?,
            }
            consume(chunk)?;
            bytes_read += count as u64;
        }
        file.copy_buffer = buffer;
        Ok(())
    }

    /// Fills the buffer with bytes of a held file from the backing, the directory that the mount serves. The file is
    /// opened there on first use.
    ///
    /// If the file was shortened or removed since it was held, the error is `Stale`: another try may succeed.
    fn read_backing(
        &self,
        file: &mut HeldFile,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<(), SourceError> {
        let path = file.path.clone();
        let stale_error = |error: io::Error| SourceError {
            kind: ErrorKind::Stale,
            message: format!("{path}: {error}"),
        };
        let backing_file = match &mut file.backing {
            Some(backing_file) => backing_file,
            unopened => unopened.insert(self.open_for_reading(&path).map_err(stale_error)?),
        };
        backing_file
            .read_exact_at(buffer, offset)
            .map_err(stale_error)
    }

    /// Opens a file for reading. No symbolic link is followed. Fails if it is not a regular file.
    ///
    /// On a FUSE mount the file is opened below the mount point, because only firnd knows where the bytes are in the
    /// served directory (the backing). A stub tree, a mount without FUSE, has only empty files, so there the file is
    /// opened in the backing.
    fn open_for_reading(&self, path: &BytePath) -> io::Result<File> {
        let is_stub_tree = self.mount_info.is_tree;
        let root_path = if is_stub_tree {
            &self.mount_info.backing
        } else {
            &self.mount_info.mount_point
        };
        let root_flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(root_path, root_flags, Mode::empty())?;
        // If a pipe has replaced the file, open(2) without O_NONBLOCK would block this session.
        let file_flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = open_beneath(&root, path.as_path(), file_flags, Mode::empty())?;
        let file = File::from(file);
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is not a regular file any more"));
        }
        Ok(file)
    }

    /// Checks the bytes that were read of a held file so far.
    ///
    /// The held bytes in memory and in the spill file do not change. After a change of the file, only bytes of the
    /// backing can differ.
    pub(crate) fn check(&self, file: &HeldFile) -> Result<FileCheck, SourceError> {
        let has_changed = file.list.was_changed()?;
        let is_in_backing = |piece: &ChunkPiece| piece.place == Place::Backing;
        let has_bytes_in_backing = file.list.pieces.iter().any(is_in_backing);
        Ok(FileCheck {
            has_changed,
            is_snapshot: !has_changed || !has_bytes_in_backing,
        })
    }
}

/// Sends the pieces of one range.
struct Sender<'a, T> {
    source: &'a Source,
    link: &'a mut Link<T>,
    data_path: &'a mut dyn DataPath<T>,
}

impl<T: Transport> Sender<'_, T> {
    /// Sends pieces (ranges of a file) that are in the arena, the mapped memory of the mount, without a copy.
    /// The caller holds `file`, so the bytes do not change. Fails if the arena is not mapped.
    fn send_arena_parts(
        &mut self,
        pieces: &[ChunkPiece],
        file: &HeldFile,
    ) -> Result<(), SendError> {
        let Some(arena) = self.source.mount.arena_file() else {
            return Err(MountError::NotMapped.into());
        };
        let mut parts = Vec::with_capacity(pieces.len());
        for piece in pieces {
            // A piece outside the mapped region is an error here, before any byte of the answer is sent.
            let Some(bytes) = file.list.bytes_in_memory(piece)? else {
                return Err(MountError::NotMapped.into());
            };
            parts.push(MemoryPart {
                region_offset: piece.at,
                bytes,
            });
        }
        Ok(self.data_path.send_arena_parts(self.link, arena, &parts)?)
    }

    fn send_hole(&mut self, pieces: &[ChunkPiece]) -> Result<(), SendError> {
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        Ok(self.data_path.send_zeros(self.link, bytes)?)
    }

    /// Sends pieces that must be read first. Runs of zeros are sent as zeros, because the backing may have holes that
    /// no chunk list shows.
    fn send_buffered(
        &mut self,
        pieces: &[ChunkPiece],
        file: &mut HeldFile,
    ) -> Result<(), SendError> {
        for piece in pieces {
            let sent: Result<(), SendError> = self.source.read_piece(file, piece, |chunk| {
                Ok(send_bytes_or_zeros(self.data_path, self.link, chunk)?)
            });
            sent?;
        }
        Ok(())
    }
}

/// Returns the default maximum number of bytes of an arena that an agent may hold.
pub(crate) fn default_hold_max(arena_bytes: u64) -> u64 {
    arena_bytes / DEFAULT_HOLD_DIVISOR
}

impl HeldFile {
    /// Size of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.list.bytes
    }

    /// Number of changes of the file when it was held.
    pub(crate) fn changes(&self) -> u64 {
        self.list.changes
    }

    /// Returns the pieces of a range of the file, in order. A piece is a range in one place, such as memory, at the
    /// offset `at` there. The first and the last piece are cut to the requested range, which may end after the file.
    fn pieces_of_range(&self, offset: u64, bytes: u64) -> Vec<ChunkPiece> {
        let end = offset.saturating_add(bytes);
        let pieces = &self.list.pieces;
        let first_index = pieces.partition_point(|piece| piece.offset + piece.bytes <= offset);
        pieces[first_index..]
            .iter()
            .take_while(|piece| piece.offset < end)
            .map(|piece| {
                let cut_start = piece.offset.max(offset);
                let cut_end = (piece.offset + piece.bytes).min(end);
                ChunkPiece {
                    offset: cut_start,
                    bytes: cut_end - cut_start,
                    at: piece.at + (cut_start - piece.offset),
                    ..*piece
                }
            })
            .collect()
    }
}

/// A list that is being made.
struct ListBuilder<'a> {
    source: &'a Source,
    /// Files that firnd knows at and below the listed path, by their path relative to the mount point.
    files: BTreeMap<BytePath, FileStatus>,
    entries: Vec<Entry>,
    /// Bytes of all paths and link targets in `entries`.
    name_bytes: usize,
}

impl<'a> ListBuilder<'a> {
    /// Makes an empty list of the path `top`. Requests the status of its files from firnd.
    fn new(source: &'a Source, top: &BytePath) -> Result<Self, SourceError> {
        Ok(Self {
            source,
            files: source.known_files(top)?,
            entries: Vec::new(),
            name_bytes: 0,
        })
    }

    /// Adds the file or directory at `path` and everything below it to the list, parents first. Files that vanish
    /// during the walk are left out. `metadata` is that of `path`.
    ///
    /// `path` is relative to the mount point, and `relative_path` is the same path relative to the listed one.
    fn walk(
        &mut self,
        path: &BytePath,
        relative_path: &Path,
        metadata: &Metadata,
    ) -> Result<(), SourceError> {
        let host_path = self.source.locate(path);
        let file_type = metadata.file_type();
        let kind = if file_type.is_dir() {
            EntryKind::Directory
        } else if file_type.is_file() {
            self.file_kind(path, metadata)
        } else if file_type.is_symlink() {
            let Ok(target) = std::fs::read_link(&host_path) else {
                return Ok(());
            };
            EntryKind::Link {
                target: target.into(),
            }
        } else {
            EntryKind::Other
        };
        self.push(path, relative_path, kind, metadata, None)?;
        if !file_type.is_dir() {
            return Ok(());
        }
        let read_error = |error: io::Error| list_error(path, &error);
        for child in std::fs::read_dir(&host_path).map_err(read_error)? {
            let name = child.map_err(read_error)?.file_name();
            let child_path = BytePath::from(path.as_path().join(&name));
            if let Ok(metadata) = self.source.locate(&child_path).symlink_metadata() {
                self.walk(&child_path, &relative_path.join(&name), &metadata)?;
            }
        }
        Ok(())
    }

    /// Adds an entry to the list. `path` is relative to the mount point, and `relative_path` to the listed path. `held`
    /// is set for a file in memory that a partner must copy. Fails if the list exceeds the bounds of the protocol.
    fn push(
        &mut self,
        path: &BytePath,
        relative_path: &Path,
        kind: EntryKind,
        metadata: &Metadata,
        held: Option<Held>,
    ) -> Result<(), SourceError> {
        let entry = Entry {
            path: relative_path.into(),
            kind,
            mode: metadata.mode() & MODE_BITS,
            mtime_s: metadata.mtime(),
            mtime_ns: metadata.mtime_nsec() as u32,
            held,
        };
        self.name_bytes += entry.name_bytes();
        if self.entries.len() >= ENTRIES_MAX
            || path.as_bytes().len() > PATH_BYTES_MAX
            || self.name_bytes > LIST_NAME_BYTES_MAX
        {
            return Err(SourceError::refused(format!(
                "{path}: a pull may have at most {ENTRIES_MAX} files and directories, with paths of {PATH_BYTES_MAX} bytes, and {LIST_NAME_BYTES_MAX} bytes in all"
            )));
        }
        self.entries.push(entry);
        Ok(())
    }

    /// Adds a file, and before it the directories above that are not in `listed_dirs` yet. `top` is the listed path,
    /// and `relative_path` the file's path below it. Skips the file if it or one of these directories no longer exists.
    fn add_file_with_parents(
        &mut self,
        top: &BytePath,
        relative_path: &Path,
        file: &FileStatus,
        listed_dirs: &mut BTreeSet<PathBuf>,
    ) -> Result<(), SourceError> {
        let mut parent_dirs: Vec<_> = relative_path.ancestors().skip(1).collect();
        parent_dirs.reverse();
        for dir in parent_dirs {
            if listed_dirs.contains(dir) {
                continue;
            }
            let dir_path = join(top, dir);
            let Ok(metadata) = self.source.locate(&dir_path).symlink_metadata() else {
                return Ok(());
            };
            listed_dirs.insert(dir.to_owned());
            self.push(&dir_path, dir, EntryKind::Directory, &metadata, None)?;
        }
        let Ok(metadata) = self.source.locate(&file.path).symlink_metadata() else {
            return Ok(());
        };
        // Only a file that a partner must copy has this part. A file that is open for writing may lack it.
        let held = must_be_copied(file).then(|| Held {
            changes: file.changes,
            partnered: file.state == DurabilityLevel::Partnered,
        });
        let kind = self.file_kind(&file.path, &metadata);
        self.push(&file.path, relative_path, kind, &metadata, held)
    }

    /// Makes the kind of a regular file. Its size is the largest size that mount, backing and firnd report: a stub
    /// itself is empty, and firnd knows held bytes beyond the end of the file in the backing.
    fn file_kind(&self, path: &BytePath, metadata: &Metadata) -> EntryKind {
        let backing_bytes = match self.source.locate_in_backing(path) {
            Some(backing_path) => backing_path.metadata().map_or(0, |metadata| metadata.len()),
            None => 0,
        };
        let status = self.files.get(path);
        let held_end = status.map_or(0, |status| status.held_end);
        EntryKind::File {
            bytes: metadata.len().max(backing_bytes).max(held_end),
            ending: status.map_or(Ending::Closed, |status| status.ending),
        }
    }
}

/// Whether a partner must copy a file: some of its bytes are held only in memory, and no abort can undo them.
fn must_be_copied(file: &FileStatus) -> bool {
    file.held_bytes > 0 && file.state < DurabilityLevel::Logged && !file.in_transaction
}

/// Whether a file is open for writing outside a transaction, so that its checkpoint is not complete.
fn is_being_written(file: &FileStatus) -> bool {
    file.ending == Ending::Open && !file.in_transaction
}

/// Appends a relative path to another path. If the relative path is empty, returns the other path unchanged.
pub(crate) fn join(top: &BytePath, below: &Path) -> BytePath {
    if below.as_os_str().is_empty() {
        top.clone()
    } else {
        top.as_path().join(below).into()
    }
}

/// Refuses a path that is too long, or that could lead out of the directory to which it is relative.
pub(crate) fn check_path(path: &BytePath) -> Result<(), SourceError> {
    let bytes = path.as_path().as_os_str().as_bytes();
    let mut components = bytes.split(|byte| *byte == b'/');
    let has_valid_form = bytes.is_empty() || components.all(firn_trust::is_component);
    if bytes.len() > PATH_BYTES_MAX || !has_valid_form {
        return Err(SourceError::refused(format!(
            "{path} is not a valid path below a mount point"
        )));
    }
    Ok(())
}

/// Makes the error of a path that cannot be listed: missing if the path does not exist, otherwise stale.
fn list_error(path: &BytePath, error: &io::Error) -> SourceError {
    let shown_path = if path.is_empty() {
        "the mount point".to_owned()
    } else {
        path.to_string()
    };
    let kind = match error.kind() {
        io::ErrorKind::NotFound => ErrorKind::Missing,
        _ => ErrorKind::Stale,
    };
    SourceError {
        kind,
        message: format!("{shown_path}: {error}"),
    }
}
