//! One mount: its connection, its mapping, its lists.

use std::ffi::CString;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use firn_client::{ClientError, Connection, Mount as Found};
use firn_protocol::path::BytePath;
use firn_protocol::{ChunkList, DataRegion, Request};

use crate::error::Error;
use crate::region::Mapping;

/// What a `firn *` is.
pub(crate) struct Mount {
    found: Found,
    /// `None`: it is over.
    connection: Mutex<Option<Connection>>,
    pub(crate) region: DataRegion,
    /// The paths of the region, for C.
    pub(crate) path: CString,
    pub(crate) spill_path: Option<CString>,
    mapping: OnceLock<Mapping>,
    /// Held while it is mapped.
    maps: Mutex<()>,
}

impl Mount {
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let found = firn_client::find(path)?.mount;
        let mut connection = Connection::open(&found)?;
        let region = connection.region()?;
        let text = |path: &BytePath| {
            CString::new(path.as_bytes()).map_err(|_| Error::Argument("a path with a zero byte"))
        };
        Ok(Self {
            found,
            connection: Mutex::new(Some(connection)),
            path: text(&region.path)?,
            spill_path: region
                .spill
                .as_ref()
                .map(|spill| text(&spill.path))
                .transpose()?,
            region,
            mapping: OnceLock::new(),
            maps: Mutex::new(()),
        })
    }

    pub(crate) fn close(&self) {
        self.connection().take();
    }

    fn connection(&self) -> MutexGuard<'_, Option<Connection>> {
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
    ) -> Result<T, Error> {
        let mut connection = self.connection();
        let answer = question(connection.as_mut().ok_or(Error::Closed)?);
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

    pub(crate) fn mapping(&self) -> Option<&Mapping> {
        self.mapping.get()
    }

    pub(crate) fn map(&self) -> Result<&Mapping, Error> {
        let _one_at_a_time = self.maps.lock();
        if let Some(mapping) = self.mapping.get() {
            return Ok(mapping);
        }
        let mapping = Mapping::of(&self.region)?;
        // The files may be those of a later mount: an answer now says that they are not.
        self.ask(Connection::region)?;
        Ok(self.mapping.get_or_init(|| mapping))
    }

    /// The path below the mount of one that must be on it.
    fn relative(&self, path: &Path) -> Result<BytePath, Error> {
        let place = firn_client::find(path)?;
        if (&place.mount.backing, place.mount.user_id) != (&self.found.backing, self.found.user_id)
        {
            return Err(Error::OtherMount {
                path: path.to_owned(),
                found: place.mount.mount_point,
                expected: self.found.mount_point.clone(),
            });
        }
        Ok(place.relative)
    }

    pub(crate) fn list(&self, path: &Path) -> Result<ChunkList, Error> {
        let relative = self.relative(path)?;
        self.ask(|connection| connection.chunks(&relative))
    }

    /// A request about the transaction at a path: the number of a commit.
    pub(crate) fn transaction(
        &self,
        path: &Path,
        make: impl FnOnce(BytePath) -> Request,
    ) -> Result<Option<u64>, Error> {
        let request = make(self.relative(path)?);
        self.ask(|connection| Ok(connection.transaction(&request)?.map(|(id, _)| id)))
    }

    /// Whether the file of a list was changed; an error where the list may have ended.
    pub(crate) fn check(&self, list: u64) -> Result<bool, Error> {
        self.ask(|connection| connection.check_chunks(list))
            .map_err(|error| Error::Stale(error.to_string()))
    }

    /// Best effort: without a connection nothing is held.
    pub(crate) fn release(&self, list: u64) {
        let _ = self.ask(|connection| connection.release_chunks(list));
    }
}

/// What a `firn_chunk_list *` is, beside its pieces.
pub(crate) struct List {
    pub(crate) mount: Arc<Mount>,
    pub(crate) number: u64,
    pub(crate) bytes: u64,
}

impl Drop for List {
    fn drop(&mut self) {
        self.mount.release(self.number);
    }
}
