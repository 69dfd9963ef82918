//! A mount that a program works with: its connection to firnd, the process that serves the mount, and the mapping of
//! its memory. Requests for chunk lists and transactions use the connection.
//!
//! A [`ChunkList`] says where each byte of a file is: in memory, in a file, or nowhere (a hole). As long as the program
//! holds the list, the listed bytes in memory do not change.
//!
//! Promises
//! * An [`OpenMount`] makes no more requests after a request got no valid answer (silence, an invalid message, the
//!   end of firnd). A late answer is therefore never taken for the answer to another request.
//! * A [`ChunkList`] is released when it is dropped. firnd may then reuse the memory of its bytes.
//!
//! Threads may share an `OpenMount`; their requests are made one after the other.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use firn_format::durability::DurabilityLevel;
use firn_format::quote::quoted_path;
use firn_protocol::path::BytePath;
use firn_protocol::{ChunkPiece, DataRegion, FileStatus, Place, Request, Status};
use rustix::io::Errno;

use crate::checkpoints::{CheckpointError, own_files};
use crate::connect::Connection;
use crate::error::ClientError;
use crate::find::{self, Mount, find};
use crate::levels::Levels;
use crate::region::{Mapping, MemoryFile, View};

/// Why a request about an open mount failed.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// firnd refused the request, or firnd cannot be reached.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A path cannot be examined.
    #[error(transparent)]
    Look(#[from] CheckpointError),
    /// There is no file at or below a path.
    #[error("there is no file in {}", quoted_path(path))]
    NoFile {
        /// The path.
        path: PathBuf,
    },
    /// The connection failed earlier, or is closed.
    #[error("this handle no longer has a connection: close it and open a new one")]
    Closed,
    /// The connection of the chunk list has ended.
    #[error("the chunk list is no longer valid: {0}")]
    ListEnded(String),
    /// The path is on another mount.
    #[error(
        "{} is on the mount at {}, but the handle is for the mount at {}",
        quoted_path(path),
        quoted_path(found),
        quoted_path(expected)
    )]
    OtherMount {
        /// The path as the caller named it.
        path: PathBuf,
        /// The mount point of the path.
        found: PathBuf,
        /// The mount point of the handle.
        expected: PathBuf,
    },
    /// The bytes are only in the backing, so they cannot be copied from the arena.
    #[error("these bytes are in the backing only: read them through the mount")]
    InBacking,
    /// The region was not mapped before its bytes were asked for.
    #[error("the region is not mapped: call firn_map_region() first")]
    NotMapped,
    /// The piece does not have this range, or the mount does not have this piece.
    #[error("{0}")]
    Range(&'static str),
    /// A file of the mount is not the file that firnd described.
    #[error("{path} is not the file of this mount: {why}")]
    Foreign {
        /// The file.
        path: BytePath,
        /// The difference.
        why: String,
    },
    /// A system call failed.
    #[error("cannot {what} {path}: {errno}")]
    System {
        /// The operation.
        what: &'static str,
        /// The file of the operation.
        path: BytePath,
        /// The error of the system call.
        errno: Errno,
    },
}

impl MountError {
    /// Returns the errno value that fits the error best.
    pub fn errno(&self) -> i32 {
        let errno = match self {
            Self::Client(error) => return error.errno(),
            Self::Look(error) => return error.errno(),
            Self::NoFile { .. } => Errno::NODATA,
            Self::Closed => Errno::NOTCONN,
            Self::ListEnded(_) | Self::Foreign { .. } => Errno::STALE,
            Self::NotMapped | Self::Range(_) => Errno::INVAL,
            Self::OtherMount { .. } => Errno::XDEV,
            Self::InBacking => Errno::NODATA,
            Self::System { errno, .. } => *errno,
        };
        errno.raw_os_error()
    }
}

/// Free space of a mount for later writes. Other processes may use it at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeSpace {
    /// Bytes of the arena that are free or hold drained data that can be evicted.
    pub memory_bytes: u64,
    /// Free bytes of the spill file. The value is 0 if there is no spill file.
    pub spill_bytes: u64,
    /// Bytes that are available to this user in the backing, less the bytes that held data will need.
    pub backing_bytes: u64,
}

/// The file of the arena, and the offset of the data region in that file.
#[derive(Clone, Copy, Debug)]
pub struct ArenaFile<'a> {
    /// The open file.
    pub file: BorrowedFd<'a>,
    /// Offset of the first byte of the data region.
    pub region_start: u64,
}

/// A mount and the connection to its firnd.
pub struct OpenMount {
    /// The mount.
    mount: Mount,
    /// The connection. `None` after it was closed or has failed.
    connection: Mutex<Option<Connection>>,
    /// Where the bytes of files are in memory.
    region: DataRegion,
    /// The mapped memory. Empty until the first call that maps it.
    mapping: OnceLock<Mapping>,
    /// Lock that lets one thread at a time map the region.
    map_lock: Mutex<()>,
}

impl OpenMount {
    /// Connects to the mount that `path` is on.
    pub fn open(path: &Path) -> Result<Self, MountError> {
        let mount = find(path)?.mount;
        let mut connection = Connection::open(&mount)?;
        let region = connection.region()?;
        Ok(Self {
            mount,
            connection: Mutex::new(Some(connection)),
            region,
            mapping: OnceLock::new(),
            map_lock: Mutex::new(()),
        })
    }

    /// Closes the connection, which ends all chunk lists.
    pub fn close(&self) {
        self.lock_connection().take();
    }

    /// Locks the connection. Closes it if a thread panicked during a request.
    fn lock_connection(&self) -> MutexGuard<'_, Option<Connection>> {
        match self.connection.lock() {
            Ok(connection) => connection,
            Err(poisoned) => {
                // A thread panicked during a request. The pending answer must not be taken for the answer to another
                // request.
                let mut connection = PoisonError::into_inner(poisoned);
                *connection = None;
                connection
            }
        }
    }

    /// Makes a request with the connection to firnd, the process that serves the mount. Fails with `Closed` if the
    /// connection has ended.
    ///
    /// If the request gets no valid answer, the connection is closed with everything that it holds, because its answer
    /// could still arrive and be taken for the next one. A refusal is a valid answer. Other requests wait meanwhile.
    fn request<T>(
        &self,
        make_request: impl FnOnce(&mut Connection) -> Result<T, ClientError>,
    ) -> Result<T, MountError> {
        let mut connection_slot = self.lock_connection();
        let Some(connection) = connection_slot.as_mut() else {
            return Err(MountError::Closed);
        };
        let answer = make_request(connection);
        let is_valid_answer = matches!(
            answer,
            Ok(_) | Err(ClientError::Refused { .. } | ClientError::Busy { .. })
        );
        if !is_valid_answer {
            *connection_slot = None;
        }
        Ok(answer?)
    }

    /// Returns the path below the mount point. Fails if `path` is on another mount.
    fn relative(&self, path: &Path) -> Result<BytePath, MountError> {
        let location = find(path)?;
        let is_this_mount = location.mount.backing == self.mount.backing
            && location.mount.user_id == self.mount.user_id;
        if !is_this_mount {
            return Err(MountError::OtherMount {
                path: path.to_owned(),
                found: location.mount.mount_point,
                expected: self.mount.mount_point.clone(),
            });
        }
        Ok(location.relative)
    }

    // ---- state and drain -----------------------------------------------------------------------

    /// Returns the state of the mount.
    pub fn status(&self) -> Result<Status, MountError> {
        self.request(Connection::status)
    }

    /// Reports to firnd what an agent has sent to a puller since its last report.
    pub fn report_pull(&self, files: u64, bytes: u64) -> Result<(), MountError> {
        self.request(|connection| connection.report_pull(files, bytes))
    }

    /// Returns the files at or below `path` that are open or have bytes in the arena. The path is relative to the
    /// mount point.
    pub fn files(&self, path: &BytePath) -> Result<Vec<FileStatus>, MountError> {
        self.request(|connection| connection.files(path))
    }

    /// Returns an identifier that distinguishes this firnd process from all others.
    pub fn incarnation(&self) -> Result<String, MountError> {
        self.request(|connection| Ok(connection.incarnation().to_owned()))
    }

    /// Tells firnd which host keeps copies of the files that the mount holds, with a note for people.
    ///
    /// The statement is valid as long as this connection lives. Meanwhile no other connection can name a partner.
    pub fn announce_partner(&self, host: Option<&str>, note: &str) -> Result<(), MountError> {
        let request = Request::Partner {
            host: host.map(str::to_owned),
            note: note.to_owned(),
        };
        self.request(|connection| connection.request_done(&request))
    }

    /// Tells firnd that the partner has the file at `path` as it was at the change count `changes`. The path is
    /// relative to the mount point.
    pub fn mark_partnered(&self, path: &BytePath, changes: u64) -> Result<(), MountError> {
        let path = path.clone();
        self.request(|connection| {
            connection.request_done(&Request::MarkPartnered { path, changes })
        })
    }

    /// Starts to drain the files at or below `path`, and does not wait.
    pub fn drain(&self, path: &Path) -> Result<(), MountError> {
        let path = self.relative(path)?;
        self.request(|connection| connection.request_done(&Request::Drain { path }))
    }

    /// Drains the files at or below `path` and waits until all of them have the durability level `until`.
    ///
    /// Fails with ETIMEDOUT after `timeout_ms` milliseconds.
    pub fn wait(
        &self,
        path: &Path,
        until: DurabilityLevel,
        timeout_ms: Option<u64>,
    ) -> Result<(), MountError> {
        let request = Request::Wait {
            path: self.relative(path)?,
            until,
            timeout_ms,
        };
        self.request(|connection| connection.wait(&request, &mut |_| {}))
    }

    /// Returns the lowest durability level of the files at or below `path`. Fails if there is no file.
    ///
    /// All files of the caller count. A file of another user counts only if firnd, the process that serves the mount,
    /// lists it.
    pub fn level(&self, path: &Path) -> Result<DurabilityLevel, MountError> {
        let place = find::MountLocation {
            mount: self.mount.clone(),
            relative: self.relative(path)?,
        };
        let top = self.mount.mount_point.join(&place.relative);
        let own_files = own_files(&top)?;
        // Ask firnd after the directory was listed, so that firnd knows each listed file.
        let levels = self.request(|connection| {
            let status = connection.status()?;
            Levels::request(connection, &place, &status)
        })?;
        let own_levels = own_files
            .iter()
            .map(|file| levels.level(&place.relative.as_path().join(file)));
        let known_levels = levels.all_known().map(|file| file.state);
        let lowest_level = own_levels.chain(known_levels).min();
        lowest_level.ok_or_else(|| MountError::NoFile {
            path: path.to_owned(),
        })
    }

    /// Returns how many bytes can be written to the mount, and where they would be kept: in memory (the arena), in the
    /// spill file on a local device, or in the backing, the directory that the mount serves.
    pub fn free_space(&self) -> Result<FreeSpace, MountError> {
        let status = self.status()?;
        // A stub tree is on tmpfs, whose free space says nothing about the backing.
        let path = if self.mount.is_tree {
            &self.mount.backing
        } else {
            &self.mount.mount_point
        };
        let backing = rustix::fs::statvfs(path).map_err(|errno| MountError::System {
            what: "ask for the room of",
            path: path.as_path().into(),
            errno,
        })?;
        let available_bytes = backing.f_bavail.saturating_mul(backing.f_frsize);
        let unused_bytes = status.arena_bytes.saturating_sub(status.arena_used_bytes);
        // Cached data is also in the backing, so its memory can be used again.
        let memory_bytes = unused_bytes.saturating_add(status.cached_bytes);
        let spill_bytes = match &status.spill {
            Some(spill) => spill.bytes.saturating_sub(spill.used_bytes),
            None => 0,
        };
        Ok(FreeSpace {
            memory_bytes: memory_bytes.min(status.arena_bytes),
            spill_bytes,
            // Bytes that are in memory now will be written to the backing, and need room there.
            backing_bytes: available_bytes.saturating_sub(status.held_bytes),
        })
    }

    // ---- the data region -----------------------------------------------------------------------

    /// Returns the location of the data region of the mount.
    pub fn region(&self) -> &DataRegion {
        &self.region
    }

    /// Returns the mapping of the region, if the region was mapped.
    pub fn mapping(&self) -> Option<&Mapping> {
        self.mapping.get()
    }

    /// Maps the region, and the spill file if there is one, for reading.
    pub fn map_region(&self) -> Result<&Mapping, MountError> {
        let _map_lock = self.map_lock.lock();
        if let Some(mapping) = self.mapping.get() {
            return Ok(mapping);
        }
        let new_mapping = Mapping::new(&self.region)?;
        // The mapped files could belong to a later mount. An answer of firnd now proves that they do not.
        self.request(Connection::region)?;
        Ok(self.mapping.get_or_init(|| new_mapping))
    }

    /// Returns the address of the bytes of a piece in this process.
    ///
    /// Returns `None` if the bytes are neither in memory nor in the spill file, or if the region is not mapped.
    pub fn address_of(&self, piece: &ChunkPiece) -> Result<Option<*const u8>, MountError> {
        let Some(view) = self.mapped_view(piece.place) else {
            return Ok(None);
        };
        match view.address(piece.at, piece.bytes) {
            Some(address) => Ok(Some(address)),
            None => Err(MountError::Foreign {
                path: self.region.path.clone(),
                why: format!("{piece:?} is outside of it"),
            }),
        }
    }

    /// Returns the mapping that contains pieces at this place. Returns `None` if the place is not mapped.
    fn mapped_view(&self, place: Place) -> Option<&View> {
        let mapping = self.mapping()?;
        match place {
            Place::Memory => Some(&mapping.region),
            Place::Spill => mapping.spill.as_ref().map(|spill| &spill.view),
            Place::MemoryFile | Place::Backing | Place::Hole => None,
        }
    }

    /// Copies `len` bytes of a piece to `target`, starting `skipped_bytes` into the piece. A piece is a range of a file
    /// in one place, such as memory. Fails for bytes that are only in the backing, the directory that the mount serves:
    /// they are to be read through the mount.
    ///
    /// # Safety
    /// `target` must be writable for `len` bytes, and no other thread may use that memory during the call. The copied
    /// bytes are the file's bytes only if the chunk list of the piece is held.
    pub unsafe fn read_piece(
        &self,
        piece: &ChunkPiece,
        skipped_bytes: u64,
        target: *mut u8,
        len: usize,
    ) -> Result<(), MountError> {
        let outside = MountError::Range("the piece is not in this mount");
        let offset_in_place = piece.at.saturating_add(skipped_bytes);
        match piece.place {
            Place::Memory => {
                let mapping = self.mapping().ok_or(MountError::NotMapped)?;
                let source = mapping
                    .region
                    .address(offset_in_place, len as u64)
                    .ok_or(outside)?;
                // SAFETY: `source` is mapped for `len` bytes and `target` writable for as many; the mapping is of
                // shared memory that no allocator gives out, so they do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(source, target, len) };
                Ok(())
            }
            Place::Spill => {
                let mapping = self.mapping().ok_or(MountError::NotMapped)?;
                let spill = mapping.spill.as_ref().ok_or(outside)?;
                // SAFETY: `target` is writable for `len` bytes, as promised to this function.
                unsafe { spill.read(offset_in_place, target, len) }
            }
            Place::MemoryFile => {
                // For such a piece, `chunk` is the number of the memory file.
                let number = piece.chunk.and_then(|number| u16::try_from(number).ok());
                let file = MemoryFile::open(&self.region, number.ok_or(outside)?)?;
                // SAFETY: `target` is writable for `len` bytes, as promised to this function.
                unsafe { file.read(offset_in_place, target, len) }
            }
            Place::Backing => Err(MountError::InBacking),
            Place::Hole => {
                // SAFETY: `target` is writable for `len` bytes, as promised to this function.
                unsafe { target.write_bytes(0, len) };
                Ok(())
            }
        }
    }

    /// Fills a buffer with bytes of a piece, starting `skipped_bytes` into the piece. This is
    /// [`OpenMount::read_piece`] for Rust.
    pub fn fill_from_piece(
        &self,
        piece: &ChunkPiece,
        skipped_bytes: u64,
        buffer: &mut [u8],
    ) -> Result<(), MountError> {
        // SAFETY: `buffer` is borrowed for writing, so all of it is writable and no other thread uses it.
        unsafe { self.read_piece(piece, skipped_bytes, buffer.as_mut_ptr(), buffer.len()) }
    }

    /// Returns the arena file, for sendfile(2). Returns `None` if the region is not mapped.
    pub fn arena_file(&self) -> Option<ArenaFile<'_>> {
        let mapping = self.mapping()?;
        Some(ArenaFile {
            file: mapping.arena.as_fd(),
            region_start: self.region.offset,
        })
    }

    // ---- transactions --------------------------------------------------------------------------

    /// Makes a request about the transaction at a path. Returns the number of the commit if the request committed.
    pub fn request_transaction(
        &self,
        path: &Path,
        make_request: impl FnOnce(BytePath) -> Request,
    ) -> Result<Option<u64>, MountError> {
        let request = make_request(self.relative(path)?);
        let committed = self.request(|connection| connection.transaction(&request))?;
        Ok(committed.map(|(commit_number, _not_applied_on)| commit_number))
    }
}

/// The location of all bytes of a file. The bytes stay in these places until the list is dropped.
pub struct ChunkList {
    /// The mount of the file.
    mount: Arc<OpenMount>,
    /// Number by which firnd knows the list.
    number: u64,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Change count of the listed content ([`firn_protocol::FileStatus::changes`]).
    pub changes: u64,
    /// Sorted by offset, without gap or overlap.
    pub pieces: Vec<ChunkPiece>,
}

impl ChunkList {
    /// Requests the chunk list of the file at `path`.
    pub fn request(mount: &Arc<OpenMount>, path: &Path) -> Result<Self, MountError> {
        let relative = mount.relative(path)?;
        let list = mount.request(|connection| connection.chunks(&relative))?;
        Ok(Self {
            mount: Arc::clone(mount),
            number: list.list,
            bytes: list.bytes,
            changes: list.changes,
            pieces: list.pieces,
        })
    }

    /// Returns the bytes of a piece. Returns `None` if the piece is not in memory or the region is not mapped.
    ///
    /// The bytes are the file's bytes only if [`ChunkList::was_changed`] returns false after they were read.
    pub fn bytes_in_memory(&self, piece: &ChunkPiece) -> Result<Option<&[u8]>, MountError> {
        if piece.place != Place::Memory {
            return Ok(None);
        }
        let Some(address) = self.mount.address_of(piece)? else {
            return Ok(None);
        };
        // SAFETY: `address_of` found the piece within a mapping that lives as long as the mount, so longer than this
        // list. No process stores to the pieces of a list that is held (S-chunks-1).
        Ok(Some(unsafe {
            std::slice::from_raw_parts(address, piece.bytes as usize)
        }))
    }

    /// Returns whether the file was changed since the list was made. Fails if the list may have ended.
    pub fn was_changed(&self) -> Result<bool, MountError> {
        self.mount
            .request(|connection| connection.check_chunks(self.number))
            .map_err(|error| MountError::ListEnded(error.to_string()))
    }
}

impl Drop for ChunkList {
    fn drop(&mut self) {
        // A failure is ignored: without a connection firnd holds nothing for this list.
        let _ = self
            .mount
            .request(|connection| connection.release_chunks(self.number));
    }
}
