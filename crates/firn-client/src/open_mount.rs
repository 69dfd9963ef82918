//! A mount that a program works with: its connection, its mapping, its chunk lists, its transactions.
//!
//! Promises
//! * An [`OpenMount`] that met anything but an answer (silence, nonsense, the end of firnd) asks no more: a
//!   late answer is never taken for another question's.
//! * A [`ChunkList`] gives its right up when it is dropped.
//!
//! Threads share an `OpenMount`; their requests take turns.

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
    /// firnd said so, or cannot be asked.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// What lies at a path cannot be looked at.
    #[error(transparent)]
    Look(#[from] CheckpointError),
    /// There is no file at or below a path.
    #[error("there is no file in {}", quoted_path(path))]
    NoFile {
        /// Where.
        path: PathBuf,
    },
    /// The connection met an error before, or is closed.
    #[error("this handle has no connection any more: close it and open another")]
    Closed,
    /// A list whose connection is gone.
    #[error("the list does not hold any more: {0}")]
    ListEnded(String),
    /// A path on another mount.
    #[error(
        "{} is on the mount at {}, the handle is of {}",
        quoted_path(path),
        quoted_path(found),
        quoted_path(expected)
    )]
    OtherMount {
        /// As asked for.
        path: PathBuf,
        /// Its mount point.
        found: PathBuf,
        /// That of the handle.
        expected: PathBuf,
    },
    /// Nothing to copy from.
    #[error("these bytes are in the backing only: read them through the mount")]
    InBacking,
    /// The region was not mapped before its bytes were asked for.
    #[error("the region is not mapped: firn_map_region() comes first")]
    NotMapped,
    /// A range that the piece, or a piece that the mount does not have.
    #[error("{0}")]
    Range(&'static str),
    /// A file of the mount that is not what firnd said.
    #[error("{path} is not the file of this mount: {why}")]
    Foreign {
        /// Which.
        path: BytePath,
        /// What is wrong.
        why: String,
    },
    /// The system refused something.
    #[error("cannot {what} {path}: {errno}")]
    System {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: BytePath,
        /// Why not.
        errno: Errno,
    },
}

impl MountError {
    /// The errno that says it best.
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

/// Room of a mount for what is written next. Others may take it meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Bytes of the arena that are free, or have drained data that makes way.
    pub memory_bytes: u64,
    /// Bytes of the spill file that are free; 0 also where there is none.
    pub spill_bytes: u64,
    /// Bytes that the backing has available to this user, without those that held data will take.
    pub backing_bytes: u64,
}

/// A mount and the connection to its firnd.
pub struct OpenMount {
    found: Mount,
    /// `None`: it is over.
    connection: Mutex<Option<Connection>>,
    region: DataRegion,
    mapping: OnceLock<Mapping>,
    /// Held while it is mapped.
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

    /// Ends the connection, and with it all chunk lists.
    pub fn close(&self) {
        self.lock_connection().take();
    }

    fn lock_connection(&self) -> MutexGuard<'_, Option<Connection>> {
        let lock = self.connection.lock();
        lock.unwrap_or_else(|poisoned| {
            // A panic in the middle of a question: its answer must not be taken for another's.
            let mut connection = PoisonError::into_inner(poisoned);
            *connection = None;
            connection
        })
    }

    /// Asks; whatever is no answer to the question ends the connection, and so what it holds.
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

    /// The path below the mount of one that must be on it.
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

    /// The state of the mount.
    pub fn status(&self) -> Result<Status, MountError> {
        self.ask(Connection::status)
    }

    /// What an agent has sent to a puller since it said so last.
    pub fn report_pull(&self, files: u64, bytes: u64) -> Result<(), MountError> {
        self.ask(|connection| connection.report_pull(files, bytes))
    }

    /// The files at or below `path`, a path below the mount point, that firnd has something to do with.
    pub fn files(&self, path: &BytePath) -> Result<Vec<FileStatus>, MountError> {
        self.ask(|connection| connection.files(path))
    }

    /// Tells its firnd from every other.
    pub fn incarnation(&self) -> Result<String, MountError> {
        self.ask(|connection| Ok(connection.incarnation().to_owned()))
    }

    /// Says which host has copies of what the mount holds, and what a person should know of it. It counts as long as
    /// the connection lives, and no other one names a partner.
    pub fn speak_of_partner(&self, host: Option<&str>, note: &str) -> Result<(), MountError> {
        let request = Request::Partner {
            host: host.map(str::to_owned),
            note: note.to_owned(),
        };
        self.ask(|connection| connection.done(&request))
    }

    /// Says that the partner has the file at `path`, a path below the mount point, as it was at `changes`.
    pub fn mark_partnered(&self, path: &BytePath, changes: u64) -> Result<(), MountError> {
        let path = path.clone();
        self.ask(|connection| connection.done(&Request::MarkPartnered { path, changes }))
    }

    /// Begins to drain the files at or below `path`.
    pub fn drain(&self, path: &Path) -> Result<(), MountError> {
        let path = self.relative(path)?;
        self.ask(|connection| connection.done(&Request::Drain { path }))
    }

    /// Drains the files at or below `path` and waits until all of them have a durability level; refused with
    /// ETIMEDOUT after `timeout_ms`.
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

    /// The lowest durability level of the files at or below `path`: the caller's, and others' of which firnd knows.
    pub fn level(&self, path: &Path) -> Result<DurabilityLevel, MountError> {
        let relative = self.relative(path)?;
        let top = self.found.mount_point.join(&relative);
        let files = own_files(&top)?;
        let place = find::Place {
            mount: self.found.clone(),
            relative,
        };
        // After the look: firnd knows each file by now that was found.
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

    /// How many bytes can be written to the mount, and where they would stay.
    pub fn room(&self) -> Result<Room, MountError> {
        let status = self.status()?;
        let spill = status.spill.as_ref();
        // A stub tree is on tmpfs, whose room says nothing of the backing.
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

    /// Where the mount keeps what it holds.
    pub fn region(&self) -> &DataRegion {
        &self.region
    }

    /// The region in this process, once it was mapped.
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
        // The files may be those of a later mount: an answer now says that they are not.
        self.ask(Connection::region)?;
        Ok(self.mapping.get_or_init(|| mapping))
    }

    /// Where the bytes of a piece are in this process; `None`: they are not in memory or the spill file, or the
    /// region is not mapped.
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

    fn view_of(&self, place: Place) -> Option<&View> {
        let mapping = self.mapping()?;
        match place {
            Place::Memory => Some(&mapping.region),
            Place::Spill => mapping.spill.as_ref().map(|spill| &spill.view),
            Place::MemoryFile | Place::Backing | Place::Hole => None,
        }
    }

    /// Copies `len` bytes of a piece, from `from` bytes into it on.
    ///
    /// # Safety
    /// `to` is writable for `len` bytes, which no other thread uses during the call. The bytes are those of the file
    /// only if the piece's list is held.
    pub unsafe fn read_piece(
        &self,
        piece: &ChunkPiece,
        from: u64,
        to: *mut u8,
        len: usize,
    ) -> Result<(), MountError> {
        let outside = MountError::Range("the piece is none of this mount");
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

    /// Fills `out` with bytes of a piece, from `from` bytes into it on: [`OpenMount::read_piece`] for Rust.
    pub fn fill_from_piece(
        &self,
        piece: &ChunkPiece,
        from: u64,
        out: &mut [u8],
    ) -> Result<(), MountError> {
        // SAFETY: `out` is borrowed for writing, so all of it is writable and no other thread uses it.
        unsafe { self.read_piece(piece, from, out.as_mut_ptr(), out.len()) }
    }

    /// The file of the arena, once the region was mapped, and where the region begins in it: for sendfile(2).
    pub fn arena_file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        let mapping = self.mapping()?;
        Some((mapping.arena.as_fd(), self.region.offset))
    }

    // ---- transactions --------------------------------------------------------------------------

    /// A request about the transaction at a path; the number of a commit.
    pub fn request_transaction(
        &self,
        path: &Path,
        make: impl FnOnce(BytePath) -> Request,
    ) -> Result<Option<u64>, MountError> {
        let request = make(self.relative(path)?);
        self.ask(|connection| Ok(connection.transaction(&request)?.map(|(id, _)| id)))
    }
}

/// Where all bytes of a file are, and the right to find them there until it is dropped.
pub struct ChunkList {
    mount: Arc<OpenMount>,
    number: u64,
    /// Of the file.
    pub bytes: u64,
    /// [`firn_protocol::FileStatus::changes`] of what is listed.
    pub changes: u64,
    /// Sorted by offset, without gap or overlap.
    pub pieces: Vec<ChunkPiece>,
}

impl ChunkList {
    /// Lists the file at `path`.
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

    /// The bytes of a piece, or `None` if it is not in memory or the region is not mapped.
    ///
    /// The bytes are those of the file only if [`ChunkList::was_changed`] is false after they were read.
    pub fn bytes_in_memory(&self, piece: &ChunkPiece) -> Result<Option<&[u8]>, MountError> {
        if piece.place != Place::Memory {
            return Ok(None);
        }
        let address = self.mount.address_of(piece)?;
        // SAFETY: `address_of` found the piece within a mapping that lives as long as the mount, so longer than this
        // list. No process stores to the pieces of a list that is held (S-chunks-1).
        Ok(address.map(|at| unsafe { std::slice::from_raw_parts(at, piece.bytes as usize) }))
    }

    /// Whether the file was changed since the list was made; an error where the list may have ended.
    pub fn was_changed(&self) -> Result<bool, MountError> {
        self.mount
            .ask(|connection| connection.check_chunks(self.number))
            .map_err(|error| MountError::ListEnded(error.to_string()))
    }
}

impl Drop for ChunkList {
    fn drop(&mut self) {
        // Best effort: without a connection nothing is held.
        let _ = self
            .mount
            .ask(|connection| connection.release_chunks(self.number));
    }
}
