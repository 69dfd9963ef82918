//! The source of an agent: lists the tree of a mount, and reads its files by their chunk lists.
//!
//! Terms: a file is *held* while the agent has its chunk list. The list says where each byte of the file is: in memory,
//! in the spill file, in the backing, or in a hole.
//!
//! Promises
//! * Bytes in memory are passed to a [`DataPath`] without a copy. Bytes of the spill file and of the backing pass
//!   through one buffer of [`COPY_BYTES`].
//! * No path leads out of the mount. Each component is resolved separately, and no symbolic link is followed.
//!
//! This module relies on S-chunks-1: bytes in memory do not change until their chunk list is released.

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

use crate::data_path::{ArenaFile, DataPath, MemoryPart, send_bytes_or_zeros};
use crate::error::{WireError, describe_mount_error};
use crate::holds::{Hold, Holds};
use crate::link::Link;
use crate::message::{
    ENTRIES_MAX, Entry, EntryKind, ErrorKind, Held, LIST_NAME_BYTES_MAX, PATH_BYTES_MAX, Reply,
};
use crate::transport::Transport;

/// Bytes that are copied at a time if sendfile(2) cannot be used: few enough that they are still in the processor's
/// cache for the checksum.
pub(crate) const COPY_BYTES: usize = 128 << 10;

/// Permission bits of an entry, with the set-id and sticky bits.
const MODE_BITS: u32 = 0o7777;
/// Divisor of the arena's size that yields the default bound of held bytes.
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
        let (kind, message) = describe_mount_error(&error);
        Self { kind, message }
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
    /// Bound of the bytes that the agent holds in memory.
    holds: Arc<Holds>,
}

/// A file that is held by its chunk list. Dropping it releases the list.
pub(crate) struct HeldFile {
    list: ChunkList,
    path: BytePath,
    /// The file opened for reading; `None` until bytes are needed that only the backing has.
    backing: Option<File>,
    /// Buffer for bytes that must be copied; empty until the first copy.
    buffer: Vec<u8>,
    /// The file's share of the held bytes.
    _hold: Hold,
}

impl Source {
    /// Opens the mount of `path`, and maps its memory. If `holds` is `None`, the default bound of held bytes applies.
    pub(crate) fn open(path: &Path, holds: Option<&Arc<Holds>>) -> Result<Self, SourceError> {
        let mount_info = firn_client::find(path)?.mount;
        let mount = Arc::new(OpenMount::open(&mount_info.mount_point)?);
        mount.map_region()?;
        let default = || Holds::new(default_hold_max(mount.region().bytes));
        let holds = holds.map_or_else(default, Arc::clone);
        Ok(Self {
            mount_info,
            mount,
            holds,
        })
    }

    /// Adds the sent files and bytes to the status of the mount. Ignores an error, because the next request to firnd
    /// reports it.
    pub(crate) fn report(&self, files: u64, bytes: u64) {
        let _ = self.mount.report_pull(files, bytes);
    }

    /// Converts a path of this host to one relative to the mount point. Refuses a path on another mount.
    pub(crate) fn relative(&self, path: &Path) -> Result<BytePath, SourceError> {
        let location = firn_client::find(path)?;
        if (&location.mount.backing, location.mount.user_id)
            != (&self.mount_info.backing, self.mount_info.user_id)
        {
            let mount_point = BytePath::from(self.mount_info.mount_point.as_path());
            let shown = BytePath::from(path);
            return Err(SourceError::refused(format!(
                "{shown} is not on the mount at {mount_point}, which this agent serves"
            )));
        }
        Ok(location.relative)
    }

    // ---- the tree ------------------------------------------------------------------------------

    /// Lists everything at and below a path, parents first.
    pub(crate) fn list(&self, top: &BytePath) -> Result<Vec<Entry>, SourceError> {
        check_path(top)?;
        let mut listing = Listing {
            source: self,
            files: self.known_files(top)?,
            entries: Vec::new(),
            name_bytes: 0,
        };
        let metadata = self.locate(top).symlink_metadata();
        let metadata = metadata.map_err(|error| missing(top, &error))?;
        listing.walk(top, Path::new(""), &metadata)?;
        self.check_still_mounted(top, &self.locate(top))?;
        Ok(listing.entries)
    }

    /// Checks, after a walk of `top`, that firnd answers and that `path` is still on this mount.
    ///
    /// If firnd was killed or unmounted during the walk, the walk has listed the directory under the mount point. Such
    /// a list is stale.
    fn check_still_mounted(&self, top: &BytePath, path: &Path) -> Result<(), SourceError> {
        self.known_files(top)?;
        self.relative(path).map_err(|error| SourceError {
            kind: ErrorKind::Stale,
            ..error
        })?;
        Ok(())
    }

    /// Lists files at and below a path, and the directories above them, parents first. The files are those that a
    /// partner must copy and those that are open for writing.
    pub(crate) fn list_held(&self, top: &BytePath) -> Result<Vec<Entry>, SourceError> {
        check_path(top)?;
        let mut listing = Listing {
            source: self,
            files: self.known_files(top)?,
            entries: Vec::new(),
            name_bytes: 0,
        };
        let is_wanted = |file: &&FileStatus| may_be_copied(file) || is_being_written(file);
        let wanted: Vec<_> = listing.files.values().filter(is_wanted).cloned().collect();
        let mut listed = BTreeSet::new();
        for file in wanted {
            let Ok(shown) = file.path.as_path().strip_prefix(top.as_path()) else {
                continue;
            };
            listing.add_held(top, shown, &file, &mut listed)?;
        }
        if listing.entries.is_empty() && top.is_empty() {
            listing.entries.push(Entry::directory());
        }
        if listing.entries.is_empty() {
            return Err(SourceError {
                kind: ErrorKind::Missing,
                message: format!("{top}: no file of it is held in memory"),
            });
        }
        self.check_still_mounted(top, &self.mount_info.mount_point)?;
        Ok(listing.entries)
    }

    /// Returns the incarnation of firnd, which changes with each start, and the identity of its arena.
    pub(crate) fn identity(&self) -> Result<(String, String), SourceError> {
        let incarnation = self.mount.incarnation()?;
        Ok((incarnation, self.mount.region().uuid.clone()))
    }

    /// Sends the name of the partner to firnd, and a note about it for the status.
    pub(crate) fn announce_partner(&self, host: &str, note: &str) -> Result<(), SourceError> {
        Ok(self.mount.speak_of_partner(Some(host), note)?)
    }

    /// Reports to firnd that the partner has a copy of a file with this number of changes.
    pub(crate) fn mark_partnered(&self, path: &BytePath, changes: u64) -> Result<(), SourceError> {
        check_path(path)?;
        Ok(self.mount.mark_partnered(path, changes)?)
    }

    /// Requests the status of the files at and below a path that firnd knows.
    fn known_files(&self, top: &BytePath) -> Result<BTreeMap<BytePath, FileStatus>, SourceError> {
        let files = self.mount.files(top)?.into_iter();
        Ok(files.map(|file| (file.path.clone(), file)).collect())
    }

    /// Returns the path on this host of a path relative to the mount point.
    fn locate(&self, path: &BytePath) -> PathBuf {
        self.mount_info.mount_point.join(path)
    }

    /// Returns the path in the backing of a file of a stub tree, because the stub itself is empty. Returns `None` for a
    /// FUSE mount.
    fn locate_in_backing(&self, path: &BytePath) -> Option<PathBuf> {
        self.mount_info
            .is_tree
            .then(|| self.mount_info.backing.join(path))
    }

    /// Returns the open mount, whose memory is mapped.
    pub(crate) fn mount(&self) -> &Arc<OpenMount> {
        &self.mount
    }

    // ---- files ---------------------------------------------------------------------------------

    /// Holds a file as it is now. Returns `None` if the agent holds the maximum number of bytes.
    pub(crate) fn hold(&self, path: &BytePath) -> Result<Option<HeldFile>, SourceError> {
        check_path(path)?;
        let list = ChunkList::make(&self.mount, &self.locate(path))?;
        let in_memory = list
            .pieces
            .iter()
            .filter(|piece| matches!(piece.place, Place::Memory | Place::MemoryFile));
        let bytes = in_memory.map(|piece| piece.bytes).sum();
        Ok(self.holds.take(bytes).map(|hold| HeldFile {
            list,
            path: path.clone(),
            backing: None,
            buffer: Vec::new(),
            _hold: hold,
        }))
    }

    /// Sends a range of a file: its bytes, zeros for holes, and at the end the MAC.
    pub(crate) fn send<T: Transport>(
        &self,
        file: &mut HeldFile,
        offset: u64,
        bytes: u64,
        link: &mut Link<T>,
        data: &mut dyn DataPath<T>,
    ) -> Result<(), SendError> {
        let mut sender = Sender {
            source: self,
            link,
            data,
        };
        let parts = file.parts(offset, bytes);
        for run in parts.chunk_by(|a, b| a.place == b.place) {
            match run[0].place {
                Place::Memory => sender.send_memory(run, file)?,
                Place::Hole => sender.send_hole(run)?,
                Place::Spill | Place::MemoryFile | Place::Backing => {
                    sender.send_copies(run, file)?
                }
            }
        }
        Ok(data.end(link)?)
    }

    /// Returns the number of bytes in a range of a file, and their checksum. The range ends at the end of the file.
    pub(crate) fn sum(
        &self,
        file: &mut HeldFile,
        offset: u64,
        bytes: u64,
    ) -> Result<(u64, u128), SourceError> {
        let mut sum = Xxh3::new();
        let mut total = 0;
        for part in file.parts(offset, bytes) {
            let copied = self.copy(file, &part, |bytes| {
                sum.update(bytes);
                Ok(())
            });
            match copied {
                Ok(()) => total += part.bytes,
                Err(SendError::Source(error)) => return Err(error),
                Err(SendError::Wire(error)) => return Err(SourceError::refused(error.to_string())),
            }
        }
        Ok((total, sum.digest128()))
    }

    /// Reads the bytes of a part into a buffer and passes them to `take`, at most [`COPY_BYTES`] at a time.
    fn copy(
        &self,
        file: &mut HeldFile,
        part: &ChunkPiece,
        mut take: impl FnMut(&[u8]) -> Result<(), SendError>,
    ) -> Result<(), SendError> {
        let mut buffer = std::mem::take(&mut file.buffer);
        buffer.resize(COPY_BYTES, 0);
        let mut done = 0;
        while done < part.bytes {
            let count = COPY_BYTES.min((part.bytes - done) as usize);
            let buffer = &mut buffer[..count];
            match part.place {
                Place::Backing => self.read_backing(file, part.at + done, buffer)?,
                _ => self.mount.fill_from_piece(part, done, buffer)?,
            }
            take(buffer)?;
            done += count as u64;
        }
        file.buffer = buffer;
        Ok(())
    }

    /// Reads bytes of a file that only the backing has. If the file was cut or removed since it was held, the error is
    /// stale.
    fn read_backing(
        &self,
        file: &mut HeldFile,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), SourceError> {
        let shown = file.path.clone();
        let stale = |error: io::Error| SourceError {
            kind: ErrorKind::Stale,
            message: format!("{shown}: {error}"),
        };
        if file.backing.is_none() {
            file.backing = Some(self.open_for_reading(&file.path).map_err(stale)?);
        }
        let opened = file.backing.as_ref().expect("it was opened above");
        opened.read_exact_at(into, offset).map_err(stale)
    }

    /// Opens a file for reading through the mount, because a layer may keep the file elsewhere in the backing. Files of
    /// a stub tree are opened in the backing, because their stubs are empty.
    fn open_for_reading(&self, path: &BytePath) -> io::Result<File> {
        // If a pipe has replaced the file, open(2) without O_NONBLOCK would block this session.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let top = if self.mount_info.is_tree {
            &self.mount_info.backing
        } else {
            &self.mount_info.mount_point
        };
        let dir = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let top = rustix::fs::open(top, dir, Mode::empty())?;
        let file = File::from(open_beneath(&top, path.as_path(), flags, Mode::empty())?);
        if file.metadata()?.is_file() {
            Ok(file)
        } else {
            Err(io::Error::other("it is not a regular file any more"))
        }
    }

    /// Returns two results: whether a file was changed since it was held, and whether the bytes that were read are
    /// those of the file as it was held.
    ///
    /// The held bytes in memory and in the spill file do not change. After a change of the file, only bytes of the
    /// backing can differ.
    pub(crate) fn check(&self, file: &HeldFile) -> Result<(bool, bool), SourceError> {
        let changed = file.list.was_changed()?;
        let in_backing = |piece: &ChunkPiece| piece.place == Place::Backing;
        let snapshot = !changed || !file.list.pieces.iter().any(in_backing);
        Ok((changed, snapshot))
    }
}

/// Sends the parts of one read.
struct Sender<'a, T> {
    source: &'a Source,
    link: &'a mut Link<T>,
    data: &'a mut dyn DataPath<T>,
}

impl<T: Transport> Sender<'_, T> {
    /// Sends parts in memory without a copy.
    fn send_memory(&mut self, run: &[ChunkPiece], file: &HeldFile) -> Result<(), SendError> {
        let mount = &self.source.mount;
        let (arena, start) = mount.arena_file().ok_or(MountError::NotMapped)?;
        let arena = ArenaFile { file: arena, start };
        let part = |part: &ChunkPiece| -> Result<_, MountError> {
            // If a part is outside the mapped region, the call fails here, before any byte of the answer is sent.
            let bytes = file.list.bytes_in_memory(part)?;
            let bytes = bytes.ok_or(MountError::NotMapped)?;
            Ok(MemoryPart { at: part.at, bytes })
        };
        let parts = run.iter().map(part).collect::<Result<Vec<_>, _>>()?;
        Ok(self.data.send_memory(self.link, arena, &parts)?)
    }

    fn send_hole(&mut self, run: &[ChunkPiece]) -> Result<(), SendError> {
        let bytes = run.iter().map(|part| part.bytes).sum();
        Ok(self.data.send_zeros(self.link, bytes)?)
    }

    /// Sends parts that must be read first. Runs of zeros are sent as zeros, because the backing may have holes that no
    /// chunk list shows.
    fn send_copies(&mut self, run: &[ChunkPiece], file: &mut HeldFile) -> Result<(), SendError> {
        for part in run {
            self.source.copy(file, part, |copy| {
                Ok(send_bytes_or_zeros(self.data, self.link, copy)?)
            })?;
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

    /// Returns the pieces of a range of the file, in order. The first and the last piece are cut to the range.
    fn parts(&self, offset: u64, bytes: u64) -> Vec<ChunkPiece> {
        let end = offset.saturating_add(bytes);
        let pieces = &self.list.pieces;
        let first = pieces.partition_point(|piece| piece.offset + piece.bytes <= offset);
        let within = pieces[first..]
            .iter()
            .take_while(|piece| piece.offset < end);
        within
            .map(|piece| {
                let part_start = piece.offset.max(offset);
                let part_end = (piece.offset + piece.bytes).min(end);
                ChunkPiece {
                    offset: part_start,
                    bytes: part_end - part_start,
                    at: piece.at + (part_start - piece.offset),
                    ..*piece
                }
            })
            .collect()
    }
}

/// A list that is being made.
struct Listing<'a> {
    source: &'a Source,
    /// Files that firnd knows at and below the listed path, by their path relative to the mount point.
    files: BTreeMap<BytePath, FileStatus>,
    entries: Vec<Entry>,
    /// Bytes of all paths and link targets in `entries`.
    name_bytes: usize,
}

impl Listing<'_> {
    /// Adds the file or directory at `path` and everything below it. Files that vanish during the walk are left out.
    ///
    /// `path` is relative to the mount point, and `shown` is the same path relative to the listed one.
    fn walk(
        &mut self,
        path: &BytePath,
        shown: &Path,
        metadata: &Metadata,
    ) -> Result<(), SourceError> {
        let full = self.source.locate(path);
        let kind = match metadata.file_type() {
            kind if kind.is_dir() => EntryKind::Directory,
            kind if kind.is_file() => self.file_kind(path, metadata),
            kind if kind.is_symlink() => match std::fs::read_link(&full) {
                Ok(target) => EntryKind::Link {
                    target: target.into(),
                },
                Err(_) => return Ok(()),
            },
            _ => EntryKind::Other,
        };
        let is_dir = kind == EntryKind::Directory;
        self.push(path, shown, kind, metadata, None)?;
        if !is_dir {
            return Ok(());
        }
        let failed = |error: io::Error| missing(path, &error);
        for entry in std::fs::read_dir(&full).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let below = BytePath::from(path.as_path().join(&name));
            if let Ok(metadata) = self.source.locate(&below).symlink_metadata() {
                self.walk(&below, &shown.join(&name), &metadata)?;
            }
        }
        Ok(())
    }

    /// Adds an entry. Fails if the list exceeds the bounds of the protocol.
    fn push(
        &mut self,
        path: &BytePath,
        shown: &Path,
        kind: EntryKind,
        metadata: &Metadata,
        held: Option<Held>,
    ) -> Result<(), SourceError> {
        let entry = Entry {
            path: shown.into(),
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

    /// Adds a file, and before it the directories above that are not in the list yet. `listed` has the directories that
    /// are. Files and directories that no longer exist are skipped.
    fn add_held(
        &mut self,
        top: &BytePath,
        shown: &Path,
        file: &FileStatus,
        listed: &mut BTreeSet<PathBuf>,
    ) -> Result<(), SourceError> {
        let directories = shown
            .ancestors()
            .skip(1)
            .collect::<Vec<_>>()
            .into_iter()
            .rev();
        for dir in directories {
            if listed.contains(dir) {
                continue;
            }
            let path = join(top, dir);
            let Ok(metadata) = self.source.locate(&path).symlink_metadata() else {
                return Ok(());
            };
            listed.insert(dir.to_owned());
            self.push(&path, dir, EntryKind::Directory, &metadata, None)?;
        }
        let Ok(metadata) = self.source.locate(&file.path).symlink_metadata() else {
            return Ok(());
        };
        let held = may_be_copied(file).then(|| Held {
            changes: file.changes,
            partnered: file.state == DurabilityLevel::Partnered,
        });
        let kind = self.file_kind(&file.path, &metadata);
        self.push(&file.path, shown, kind, &metadata, held)
    }

    /// Makes the kind of a regular file. Its size is the largest size that mount, backing and firnd report: a stub
    /// itself is empty, and firnd knows held bytes beyond the end of the file in the backing.
    fn file_kind(&self, path: &BytePath, metadata: &Metadata) -> EntryKind {
        let status = self.files.get(path);
        let backing_path = self.source.locate_in_backing(path);
        let backing_bytes = backing_path
            .and_then(|path| path.metadata().ok())
            .map_or(0, |metadata| metadata.len());
        let held_end = status.map_or(0, |file| file.held_end);
        EntryKind::File {
            bytes: metadata.len().max(backing_bytes).max(held_end),
            ending: status.map_or(Ending::Closed, |file| file.ending),
        }
    }
}

/// Whether a partner must copy a file: some of its bytes are held only in memory, and no abort can undo them.
fn may_be_copied(file: &FileStatus) -> bool {
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
    let is_inside = bytes.len() <= PATH_BYTES_MAX
        && (bytes.is_empty()
            || bytes
                .split(|byte| *byte == b'/')
                .all(firn_trust::is_component));
    if is_inside {
        return Ok(());
    }
    Err(SourceError::refused(format!(
        "{path} is not a valid path below a mount point"
    )))
}

/// Makes the error of a path that cannot be listed: missing if the path does not exist, otherwise stale.
fn missing(path: &BytePath, error: &io::Error) -> SourceError {
    let shown = if path.is_empty() {
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
        message: format!("{shown}: {error}"),
    }
}
