//! What an agent reads: a mount, its tree, and files of it by their chunk lists.
//!
//! Promises
//! * Bytes in memory are handed to a [`DataPath`] where they are; bytes of the spill file and of the backing pass through
//!   one buffer of [`COPY_BYTES`].
//! * No path leads out of the mount: components are looked at one by one, and no link is followed.
//!
//! Relies on chunk lists being held (S-chunks-1): bytes in memory stay what they are until the list is released.

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

/// Bytes that are copied at a time where sendfile(2) is no use: they stay in the processor's cache for the checksum.
pub(crate) const COPY_BYTES: usize = 128 << 10;

/// Why the mount does not give what was asked for.
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

/// What went wrong while a file was sent.
pub(crate) enum SendError {
    /// The connection: it is over.
    Wire(WireError),
    /// The file: the other side has a part of an answer, so the connection is over too.
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

/// A mount as one connection sees it. Dropped, it holds nothing any more.
pub(crate) struct Source {
    found: Mount,
    mount: Arc<OpenMount>,
    holds: Arc<Holds>,
}

/// A file that is held.
pub(crate) struct HeldFile {
    list: ChunkList,
    path: BytePath,
    /// Opened when bytes are needed that only the backing has.
    backing: Option<File>,
    /// For what is copied; empty until something is.
    buffer: Vec<u8>,
    _hold: Hold,
}

impl Source {
    /// Opens the mount that `path` is on, and maps its memory.
    pub(crate) fn open(path: &Path, holds: Option<&Arc<Holds>>) -> Result<Self, SourceError> {
        let found = firn_client::find(path)?.mount;
        let mount = Arc::new(OpenMount::open(&found.mount_point)?);
        mount.map_region()?;
        let default = || Holds::new(default_hold_max(mount.region().bytes));
        let holds = holds.map_or_else(default, Arc::clone);
        Ok(Self {
            found,
            mount,
            holds,
        })
    }

    /// Adds what was sent to the status of the mount. An error is ignored: the next request to firnd reports it.
    pub(crate) fn report(&self, files: u64, bytes: u64) {
        let _ = self.mount.report_pull(files, bytes);
    }

    /// The path below the mount point that one of this host is.
    pub(crate) fn relative(&self, path: &Path) -> Result<BytePath, SourceError> {
        let place = firn_client::find(path)?;
        if (&place.mount.backing, place.mount.user_id) != (&self.found.backing, self.found.user_id)
        {
            let mount_point = BytePath::from(self.found.mount_point.as_path());
            let shown = BytePath::from(path);
            return Err(SourceError::refused(format!(
                "{shown} is not on the mount at {mount_point}, which this agent serves"
            )));
        }
        Ok(place.relative)
    }

    // ---- the tree ------------------------------------------------------------------------------

    /// What is at and below a path, parents first.
    pub(crate) fn list(&self, top: &BytePath) -> Result<Vec<Entry>, SourceError> {
        check_path(top)?;
        let mut listing = Listing {
            source: self,
            known: self.known_files(top)?,
            entries: Vec::new(),
            name_bytes: 0,
        };
        let metadata = self.locate(top).symlink_metadata();
        let metadata = metadata.map_err(|error| missing(top, &error))?;
        listing.walk(top, Path::new(""), &metadata)?;
        // Without its mount, the directory below the mount point was walked: firnd lives still, and it is mounted.
        self.known_files(top)?;
        self.relative(&self.locate(top))
            .map_err(|error| SourceError {
                kind: ErrorKind::Stale,
                ..error
            })?;
        Ok(listing.entries)
    }

    /// What firnd holds at and below a path, what is open for writing there, and the directories that lead to both,
    /// parents first.
    pub(crate) fn list_held(&self, top: &BytePath) -> Result<Vec<Entry>, SourceError> {
        check_path(top)?;
        let mut listing = Listing {
            source: self,
            known: self.known_files(top)?,
            entries: Vec::new(),
            name_bytes: 0,
        };
        let wanted = |file: &&FileStatus| may_be_copied(file) || is_begun(file);
        let held: Vec<_> = listing.known.values().filter(wanted).cloned().collect();
        let mut listed = BTreeSet::new();
        for file in held {
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
                message: format!("{top}: nothing of it is held"),
            });
        }
        // As in a list of all.
        self.known_files(top)?;
        self.relative(&self.found.mount_point)
            .map_err(|error| SourceError {
                kind: ErrorKind::Stale,
                ..error
            })?;
        Ok(listing.entries)
    }

    /// Which firnd it is, and its arena.
    pub(crate) fn identity(&self) -> Result<(String, String), SourceError> {
        let incarnation = self.mount.incarnation()?;
        Ok((incarnation, self.mount.region().uuid.clone()))
    }

    /// Tells firnd of the partner.
    pub(crate) fn speak_of_partner(&self, host: &str, note: &str) -> Result<(), SourceError> {
        Ok(self.mount.speak_of_partner(Some(host), note)?)
    }

    /// Tells firnd that the partner has a file as it was at `changes`.
    pub(crate) fn mark_partnered(&self, path: &BytePath, changes: u64) -> Result<(), SourceError> {
        check_path(path)?;
        Ok(self.mount.mark_partnered(path, changes)?)
    }

    fn known_files(&self, top: &BytePath) -> Result<BTreeMap<BytePath, FileStatus>, SourceError> {
        let known = self.mount.files(top)?.into_iter();
        Ok(known.map(|file| (file.path.clone(), file)).collect())
    }

    fn locate(&self, path: &BytePath) -> PathBuf {
        self.found.mount_point.join(path)
    }

    /// What the file is in the backing of a stub tree, whose own files are empty.
    fn locate_in_backing(&self, path: &BytePath) -> Option<PathBuf> {
        self.found.is_tree.then(|| self.found.backing.join(path))
    }

    /// The mount, whose memory is mapped.
    pub(crate) fn mount(&self) -> &Arc<OpenMount> {
        &self.mount
    }

    // ---- files ---------------------------------------------------------------------------------

    /// Holds a file; `None` where too much is held already.
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

    /// Answers a read: bytes, zeros where there is a hole, and the checksum of the bytes.
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

    /// A checksum of bytes, and how many there are.
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

    /// Hands the bytes of a part out, a buffer at a time.
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

    fn read_backing(
        &self,
        file: &mut HeldFile,
        at: u64,
        into: &mut [u8],
    ) -> Result<(), SourceError> {
        let shown = file.path.clone();
        // It was cut or removed since it was listed: the list does not say any more what it is.
        let failed = |error: io::Error| SourceError {
            kind: ErrorKind::Stale,
            message: format!("{shown}: {error}"),
        };
        if file.backing.is_none() {
            file.backing = Some(self.open_for_reading(&file.path).map_err(failed)?);
        }
        let opened = file.backing.as_ref().expect("it was opened above");
        opened.read_exact_at(into, at).map_err(failed)
    }

    /// Through the mount, which knows where the backing has it; a stub tree has no other way than the backing.
    fn open_for_reading(&self, path: &BytePath) -> io::Result<File> {
        // The opening of a pipe in the place of the file would block this session.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let top = match self.found.is_tree {
            true => &self.found.backing,
            false => &self.found.mount_point,
        };
        let dir = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let top = rustix::fs::open(top, dir, Mode::empty())?;
        let file = File::from(open_beneath(&top, path.as_path(), flags, Mode::empty())?);
        match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(io::Error::other("it is no regular file any more")),
        }
    }

    /// Whether a file changed since it was held, and whether what was read of it is a snapshot all the same.
    pub(crate) fn check(&self, file: &HeldFile) -> Result<(bool, bool), SourceError> {
        let changed = file.list.was_changed()?;
        let in_backing = |piece: &ChunkPiece| piece.place == Place::Backing;
        let snapshot = !changed || !file.list.pieces.iter().any(in_backing);
        Ok((changed, snapshot))
    }
}

/// The answer to a read.
struct Sender<'a, T> {
    source: &'a Source,
    link: &'a mut Link<T>,
    data: &'a mut dyn DataPath<T>,
}

impl<T: Transport> Sender<'_, T> {
    fn send_memory(&mut self, run: &[ChunkPiece], file: &HeldFile) -> Result<(), SendError> {
        let mount = &self.source.mount;
        let (arena, start) = mount.arena_file().ok_or(MountError::NotMapped)?;
        let arena = ArenaFile { file: arena, start };
        let part = |part: &ChunkPiece| -> Result<_, MountError> {
            // Within the region, or it is an error before a byte of it leaves.
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

    /// What must be read anyhow is looked at: the backing has holes that no list tells.
    fn send_copies(&mut self, run: &[ChunkPiece], file: &mut HeldFile) -> Result<(), SendError> {
        for part in run {
            self.source.copy(file, part, |copy| {
                Ok(send_bytes_or_zeros(self.data, self.link, copy)?)
            })?;
        }
        Ok(())
    }
}

/// Bytes of an arena that an agent may hold by default: a quarter.
pub(crate) fn default_hold_max(arena_bytes: u64) -> u64 {
    arena_bytes / 4
}

impl HeldFile {
    /// Bytes of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.list.bytes
    }

    /// Which changes of the file it has.
    pub(crate) fn changes(&self) -> u64 {
        self.list.changes
    }

    /// The parts of pieces that a range of the file is.
    fn parts(&self, offset: u64, bytes: u64) -> Vec<ChunkPiece> {
        let end = offset.saturating_add(bytes);
        let pieces = &self.list.pieces;
        let first = pieces.partition_point(|piece| piece.offset + piece.bytes <= offset);
        let within = pieces[first..]
            .iter()
            .take_while(|piece| piece.offset < end);
        within
            .map(|piece| {
                let from = piece.offset.max(offset);
                let to = (piece.offset + piece.bytes).min(end);
                ChunkPiece {
                    offset: from,
                    bytes: to - from,
                    at: piece.at + (from - piece.offset),
                    ..*piece
                }
            })
            .collect()
    }
}

/// A walk over a tree.
struct Listing<'a> {
    source: &'a Source,
    known: BTreeMap<BytePath, FileStatus>,
    entries: Vec<Entry>,
    /// Of all paths and link targets.
    name_bytes: usize,
}

impl Listing<'_> {
    /// `path` is below the mount point, `shown` below what is listed. What vanishes meanwhile is left out.
    fn walk(
        &mut self,
        path: &BytePath,
        shown: &Path,
        metadata: &Metadata,
    ) -> Result<(), SourceError> {
        let full = self.source.locate(path);
        let kind = match metadata.file_type() {
            kind if kind.is_dir() => EntryKind::Directory,
            kind if kind.is_file() => self.file(path, metadata),
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
            mode: metadata.mode() & 0o7777,
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
                "{path}: a pull takes at most {ENTRIES_MAX} files and directories, with paths of {PATH_BYTES_MAX} bytes, and {LIST_NAME_BYTES_MAX} bytes in all"
            )));
        }
        self.entries.push(entry);
        Ok(())
    }

    /// A held file, with the directories above it that were not listed yet. One that is gone is left out.
    fn add_held(
        &mut self,
        top: &BytePath,
        shown: &Path,
        file: &FileStatus,
        listed: &mut BTreeSet<PathBuf>,
    ) -> Result<(), SourceError> {
        let above = shown
            .ancestors()
            .skip(1)
            .collect::<Vec<_>>()
            .into_iter()
            .rev();
        for dir in above {
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
        let kind = self.file(&file.path, &metadata);
        self.push(&file.path, shown, kind, &metadata, held)
    }

    fn file(&self, path: &BytePath, metadata: &Metadata) -> EntryKind {
        let known = self.known.get(path);
        let in_backing = self.source.locate_in_backing(path);
        let in_backing = in_backing
            .and_then(|path| path.metadata().ok())
            .map_or(0, |found| found.len());
        let held_end = known.map_or(0, |file| file.held_end);
        EntryKind::File {
            bytes: metadata.len().max(in_backing).max(held_end),
            ending: known.map_or(Ending::Closed, |file| file.ending),
        }
    }
}

/// Whether a partner gets it: it is not in the backing, and no abort can undo it.
fn may_be_copied(file: &FileStatus) -> bool {
    file.held_bytes > 0 && file.state < DurabilityLevel::Logged && !file.in_transaction
}

/// Whether a writer has the file open outside a transaction: the checkpoint beside it is not complete.
fn is_begun(file: &FileStatus) -> bool {
    file.ending == Ending::Open && !file.in_transaction
}

/// A path below another one; an empty one adds nothing.
pub(crate) fn join(top: &BytePath, below: &Path) -> BytePath {
    match below.as_os_str().is_empty() {
        true => top.clone(),
        false => top.as_path().join(below).into(),
    }
}

/// Whether a path stays below where it begins.
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
        "{path} is no path below a mount point"
    )))
}

fn missing(path: &BytePath, error: &io::Error) -> SourceError {
    let shown = match path.is_empty() {
        true => "the mount point".to_owned(),
        false => path.to_string(),
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
