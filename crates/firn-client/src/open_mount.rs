//! A mount that a program works with: its connection, its mapping, its chunk lists and its transactions.
//!
//! Promises
//! * An [`OpenMount`] makes no more requests after a request got no valid answer (silence, an invalid message, the
//!   end of firnd). A late answer is therefore never taken for the answer to another request.
//! * A [`ChunkList`] releases its right when it is dropped.
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
pub struct Room {
    /// Bytes of the arena that are free or hold drained data that can be evicted.
    pub memory_bytes: u64,
    /// Free bytes of the spill file. The value is 0 if there is no spill file.
    pub spill_bytes: u64,
    /// Bytes that are available to this user in the backing, less the bytes that held data will need.
    pub backing_bytes: u64,
}

/// A mount and the connection to its firnd.
pub struct OpenMount {
    found: Mount,
    /// The connection. `None` after it was closed or has failed.
    connection: Mutex<Option<Connection>>,
    region: DataRegion,
    mapping: OnceLock<Mapping>,
    /// Lock that lets one thread at a time map the region.
    maps: Mutex<()>,
}

impl OpenMount {
    /// Connects to the mount that `path` is on.
    pub fn open(path: &Path) -> Result<Self, MountError> {
        let found = find(path)?.mount;
        let mut connection = Connection::open(&found)?;
        let region = connection.region()?;
        Ok(Self {
            found,
            connection: Mutex::new(Some(connection)),
            region,
            mapping: OnceLock::new(),
            maps: Mutex::new(()),
        })
    }

    /// Closes the connection, which ends all chunk lists.
    pub fn close(&self) {
        self.lock_connection().take();
    }

    /// Locks the connection. Closes it if a thread panicked during a request.
    fn lock_connection(&self) -> MutexGuard<'_, Option<Connection>> {
        let lock = self.connection.lock();
        lock.unwrap_or_else(|poisoned| {
            // A thread panicked during a request. The pending answer must not be taken for the answer to another
            // request.
            let mut connection = PoisonError::into_inner(poisoned);
            *connection = None;
            connection
        })
    }

    /// Makes a request. If the request gets no valid answer, the connection ends with everything that it holds.
    fn ask<T>(
        &self,
        question: impl FnOnce(&mut Connection) -> Result<T, ClientError>,
    ) -> Result<T, MountError> {
        let mut connection = self.lock_connection();
        let answer = question(connection.as_mut().ok_or(MountError::Closed)?);
        if let Err(error) = &answer
            && !matches!(
                error,
                ClientError::Refused { .. } | ClientError::Busy { .. }
            )
        {
            *connection = None;
        }
        Ok(answer?)
    }

    /// Returns the path below the mount point. Fails if `path` is on another mount.
    fn relative(&self, path: &Path) -> Result<BytePath, MountError> {
        let place = find(path)?;
        if (&place.mount.backing, place.mount.user_id) != (&self.found.backing, self.found.user_id)
        {
            return Err(MountError::OtherMount {
                path: path.to_owned(),
                found: place.mount.mount_point,
                expected: self.found.mount_point.clone(),
            });
        }
        Ok(place.relative)
    }

    // ---- state and drain -----------------------------------------------------------------------

    /// Returns the state of the mount.
    pub fn status(&self) -> Result<Status, MountError> {
        self.ask(Connection::status)
    }

    /// Reports to firnd what an agent has sent to a puller since its last report.
    pub fn report_pull(&self, files: u64, bytes: u64) -> Result<(), MountError> {
        self.ask(|connection| connection.report_pull(files, bytes))
    }

    /// Returns the files at or below `path` that are open or have bytes in the arena. The path is relative to the
    /// mount point.
    pub fn files(&self, path: &BytePath) -> Result<Vec<FileStatus>, MountError> {
        self.ask(|connection| connection.files(path))
    }

    /// Returns an identifier that distinguishes this firnd process from all others.
    pub fn incarnation(&self) -> Result<String, MountError> {
        self.ask(|connection| Ok(connection.incarnation().to_owned()))
    }

    /// Tells firnd which host keeps copies of the files that the mount holds, with a note for people.
    ///
    /// The statement is valid as long as this connection lives. Meanwhile no other connection can name a partner.
    pub fn speak_of_partner(&self, host: Option<&str>, note: &str) -> Result<(), MountError> {
        let request = Request::Partner {
            host: host.map(str::to_owned),
            note: note.to_owned(),
        };
        self.ask(|connection| connection.done(&request))
    }

    /// Tells firnd that the partner has the file at `path` as it was at the change count `changes`. The path is
    /// relative to the mount point.
    pub fn mark_partnered(&self, path: &BytePath, changes: u64) -> Result<(), MountError> {
        let path = path.clone();
        self.ask(|connection| connection.done(&Request::MarkPartnered { path, changes }))
    }

    /// Starts to drain the files at or below `path`, and does not wait.
    pub fn drain(&self, path: &Path) -> Result<(), MountError> {
        let path = self.relative(path)?;
        self.ask(|connection| connection.done(&Request::Drain { path }))
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
        self.ask(|connection| connection.wait(&request, &mut |_| {}))
    }

    /// Returns the lowest durability level of the files at or below `path`. The files are those of the caller, and
    /// those of other users that firnd knows.
    pub fn level(&self, path: &Path) -> Result<DurabilityLevel, MountError> {
        let relative = self.relative(path)?;
        let top = self.found.mount_point.join(&relative);
        let files = own_files(&top)?;
        let place = find::Place {
            mount: self.found.clone(),
            relative,
        };
        // Ask firnd after the directory was listed, so that firnd knows each listed file.
        let levels = self.ask(|connection| {
            let status = connection.status()?;
            Levels::ask(connection, &place, &status)
        })?;
        let own = files
            .iter()
            .map(|below| levels.level(&place.relative.as_path().join(below)));
        let known = levels.all_known().map(|file| file.state);
        own.chain(known).min().ok_or_else(|| MountError::NoFile {
            path: path.to_owned(),
        })
    }

    /// Returns how many bytes can be written to the mount, and where they would be kept.
    pub fn room(&self) -> Result<Room, MountError> {
        let status = self.status()?;
        let spill = status.spill.as_ref();
        // A stub tree is on tmpfs, whose free space says nothing about the backing.
        let shown = if self.found.is_tree {
            &self.found.backing
        } else {
            &self.found.mount_point
        };
        let of_backing = rustix::fs::statvfs(shown).map_err(|errno| MountError::System {
            what: "ask for the room of",
            path: shown.as_path().into(),
            errno,
        })?;
        let available_bytes = of_backing.f_bavail.saturating_mul(of_backing.f_frsize);
        Ok(Room {
            memory_bytes: status
                .arena_bytes
                .saturating_sub(status.arena_used_bytes)
                .saturating_add(status.cached_bytes)
                .min(status.arena_bytes),
            spill_bytes: spill.map_or(0, |spill| spill.bytes.saturating_sub(spill.used_bytes)),
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
        let _one_at_a_time = self.maps.lock();
        if let Some(mapping) = self.mapping.get() {
            return Ok(mapping);
        }
        let mapping = Mapping::new(&self.region)?;
        // The mapped files could belong to a later mount. An answer of firnd now proves that they do not.
        self.ask(Connection::region)?;
        Ok(self.mapping.get_or_init(|| mapping))
    }

    /// Returns the address of the bytes of a piece in this process.
    ///
    /// Returns `None` if the bytes are neither in memory nor in the spill file, or if the region is not mapped.
    pub fn address_of(&self, piece: &ChunkPiece) -> Result<Option<*const u8>, MountError> {
        let Some(view) = self.view_of(piece.place) else {
            return Ok(None);
        };
        let address = view.address(piece.at, piece.bytes);
        address.map(Some).ok_or_else(|| MountError::Foreign {
            path: self.region.path.clone(),
            why: format!("{piece:?} is outside of it"),
        })
    }

    /// Returns the mapping that contains pieces at this place. Returns `None` if the place is not mapped.
    fn view_of(&self, place: Place) -> Option<&View> {
        let mapping = self.mapping()?;
        match place {
            Place::Memory => Some(&mapping.region),
            Place::Spill => mapping.spill.as_ref().map(|spill| &spill.view),
            Place::MemoryFile | Place::Backing | Place::Hole => None,
        }
    }

    /// Copies `len` bytes of a piece, starting `from` bytes into the piece.
    ///
    /// # Safety
    /// `to` must be writable for `len` bytes, and no other thread may use that memory during the call. The copied
    /// bytes are the file's bytes only if the chunk list of the piece is held.
    pub unsafe fn read_piece(
        &self,
        piece: &ChunkPiece,
        from: u64,
        to: *mut u8,
        len: usize,
    ) -> Result<(), MountError> {
        let outside = MountError::Range("the piece is not in this mount");
        let at = piece.at.saturating_add(from);
        match piece.place {
            Place::Memory => {
                let mapping = self.mapping().ok_or(MountError::NotMapped)?;
                let address = mapping.region.address(at, len as u64).ok_or(outside)?;
                // SAFETY: `address` is mapped for `len` bytes and `to` writable for as many; the mapping is
                // of shared memory that no allocator gives out, so they do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(address, to, len) };
                Ok(())
            }
            Place::Spill => {
                let mapping = self.mapping().ok_or(MountError::NotMapped)?;
                let spill = mapping.spill.as_ref().ok_or(outside)?;
                // SAFETY: `to` is writable for `len` bytes, as promised to this function.
                unsafe { spill.read(at, to, len) }
            }
            Place::MemoryFile => {
                let number = piece.chunk.and_then(|number| u16::try_from(number).ok());
                let file = MemoryFile::open(&self.region, number.ok_or(outside)?)?;
                // SAFETY: `to` is writable for `len` bytes, as promised to this function.
                unsafe { file.read(at, to, len) }
            }
            Place::Backing => Err(MountError::InBacking),
            Place::Hole => {
                // SAFETY: `to` is writable for `len` bytes, as promised to this function.
                unsafe { to.write_bytes(0, len) };
                Ok(())
            }
        }
    }

    /// Fills `out` with bytes of a piece, starting `from` bytes into the piece. This is [`OpenMount::read_piece`] for
    /// Rust.
    pub fn fill_from_piece(
        &self,
        piece: &ChunkPiece,
        from: u64,
        out: &mut [u8],
    ) -> Result<(), MountError> {
        // SAFETY: `out` is borrowed for writing, so all of it is writable and no other thread uses it.
        unsafe { self.read_piece(piece, from, out.as_mut_ptr(), out.len()) }
    }

    /// Returns the arena file and the offset of the data region in it, for sendfile(2). Returns `None` if the region
    /// is not mapped.
    pub fn arena_file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        let mapping = self.mapping()?;
        Some((mapping.arena.as_fd(), self.region.offset))
    }

    // ---- transactions --------------------------------------------------------------------------

    /// Makes a request about the transaction at a path. Returns the number of the commit if the request committed.
    pub fn request_transaction(
        &self,
        path: &Path,
        make: impl FnOnce(BytePath) -> Request,
    ) -> Result<Option<u64>, MountError> {
        let request = make(self.relative(path)?);
        self.ask(|connection| Ok(connection.transaction(&request)?.map(|(id, _)| id)))
    }
}

/// The location of all bytes of a file. The bytes stay in these places until the list is dropped.
pub struct ChunkList {
    mount: Arc<OpenMount>,
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
    pub fn make(mount: &Arc<OpenMount>, path: &Path) -> Result<Self, MountError> {
        let relative = mount.relative(path)?;
        let made = mount.ask(|connection| connection.chunks(&relative))?;
        Ok(Self {
            mount: Arc::clone(mount),
            number: made.list,
            bytes: made.bytes,
            changes: made.changes,
            pieces: made.pieces,
        })
    }

    /// Returns the bytes of a piece. Returns `None` if the piece is not in memory or the region is not mapped.
    ///
    /// The bytes are the file's bytes only if [`ChunkList::was_changed`] returns false after they were read.
    pub fn bytes_in_memory(&self, piece: &ChunkPiece) -> Result<Option<&[u8]>, MountError> {
        if piece.place != Place::Memory {
            return Ok(None);
        }
        let address = self.mount.address_of(piece)?;
        // SAFETY: `address_of` found the piece within a mapping that lives as long as the mount, so longer than this
        // list. No process stores to the pieces of a list that is held (S-chunks-1).
        Ok(address.map(|at| unsafe { std::slice::from_raw_parts(at, piece.bytes as usize) }))
    }

    /// Returns whether the file was changed since the list was made. Fails if the list may have ended.
    pub fn was_changed(&self) -> Result<bool, MountError> {
        self.mount
            .ask(|connection| connection.check_chunks(self.number))
            .map_err(|error| MountError::ListEnded(error.to_string()))
    }
}

impl Drop for ChunkList {
    fn drop(&mut self) {
        // A failure is ignored: without a connection firnd holds nothing for this list.
        let _ = self
            .mount
            .ask(|connection| connection.release_chunks(self.number));
    }
}
