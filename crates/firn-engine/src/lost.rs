//! Lost files: the arena (the shared memory for written data) has data of these files, but recovery after a crash did
//! not find them in the backing.
//!
//! Their pieces (recorded appends of bytes) are not written to the backing. The pieces remain in the arena until the
//! user puts the files back under their names, copies the data elsewhere, or discards it.

use std::sync::Arc;

use firn_backing::lock::Mutex;
use firn_backing::{Backing, Errno};
use firn_format::record::Record;
use firn_protocol::path::BytePath;

use crate::base::Base;
use crate::file::PieceLayers;

/// Number of bytes that are copied at a time.
const STEP_BYTES: u64 = 1 << 20;

/// A file whose data recovery could not make pending again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostFile {
    /// The file id, which is unique in the arena.
    pub file: u64,
    /// Path before the loss, from the root of the backing; empty if the journal has no path.
    pub path: Vec<u8>,
    /// Bytes that are kept in the arena.
    pub bytes: u64,
    /// Whether the backing answered that it does not have the file. Otherwise another try may find the file.
    pub is_certain: bool,
    /// Why the file was not found, for the user.
    pub reason: String,
}

impl LostFile {
    /// Returns the path, or a text with the number if the path is not known.
    pub fn known_path(&self) -> BytePath {
        if self.path.is_empty() {
            format!("(file {})", self.file).into()
        } else {
            self.path.as_slice().into()
        }
    }
}

/// All lost files of a mount.
pub struct LostFiles<B: Backing> {
    /// Data that all parts share: the backing, the arena, options and counters.
    base: Arc<Base<B>>,
    /// The lost files, with their pieces.
    retained: Mutex<Vec<RetainedFile>>,
}

impl<B: Backing> LostFiles<B> {
    pub(crate) fn new(base: &Arc<Base<B>>) -> Self {
        Self {
            base: Arc::clone(base),
            retained: Mutex::default(),
        }
    }

    /// Keeps the data of a lost file, which was not found in the backing, in the arena until the user restores or
    /// discards it. Records an error for the status.
    ///
    /// `layers` has the newest bytes of each file range, with their pieces (recorded appends). Returns the file with
    /// the number of these bytes.
    pub(crate) fn retain(&self, mut file: LostFile, layers: PieceLayers) -> LostFile {
        for (piece, used) in layers.pieces.iter() {
            self.base.arena.keep_piece(*piece, used.live as u32);
            file.bytes += used.live;
        }
        let path = file.known_path();
        let bytes = file.bytes;
        let reason = &file.reason;
        tracing::error!(%path, bytes, reason, "the file of held data was not found; the data stays in the arena");
        self.base.errors.record_lost(
            path.as_bytes().to_vec(),
            Errno::NOENT,
            format!(
                "the file of {bytes} held bytes was not found ({reason}); they stay in the arena"
            ),
        );
        let description = file.clone();
        self.retained.lock().push(RetainedFile { file, layers });
        description
    }

    /// Returns all lost files.
    pub fn list(&self) -> Vec<LostFile> {
        let retained = self.retained.lock();
        retained
            .iter()
            .map(|retained| retained.file.clone())
            .collect()
    }

    /// Calls `sink` with the held bytes (which are only in the arena) of a lost file and their offsets, in ascending
    /// order. `file` is the file id. Bytes that were drained earlier are left out. A file that is not lost has no held
    /// bytes here. Returns the first error of `sink` or of a read.
    pub fn read<E: From<Errno>>(
        &self,
        file: u64,
        mut sink: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let retained = self.retained.lock();
        let Some(lost) = retained.iter().find(|lost| lost.file.file == file) else {
            return Ok(());
        };
        let mut buffer = Vec::new();
        for (offset, extent) in lost.layers.extents.iter() {
            let mut read_bytes = 0;
            while read_bytes < extent.len {
                buffer.resize((extent.len - read_bytes).min(STEP_BYTES) as usize, 0);
                self.base.arena.copy_out(
                    extent.piece.slab,
                    extent.position + read_bytes as u32,
                    &mut buffer,
                )?;
                sink(offset + read_bytes, &buffer)?;
                read_bytes += buffer.len() as u64;
            }
        }
        Ok(())
    }

    /// Discards the held bytes of a lost file permanently; these are only in the arena. `file` is the file id. Does
    /// nothing if the file is not lost.
    pub fn discard(&self, file: u64) {
        let Base {
            arena,
            journal,
            errors,
            ..
        } = &*self.base;
        let mut retained = self.retained.lock();
        let Some(index) = retained.iter().position(|lost| lost.file.file == file) else {
            return;
        };
        let lost = retained.remove(index);
        // Pieces die before the file id ends. A crash in between leaves a file id without pieces, which recovery
        // removes.
        for (piece, used) in lost.layers.pieces.iter() {
            arena.mark_dead(*piece);
            arena.release_bytes(piece.slab, used.live);
        }
        journal.append_note(&Record::FileIdEnd { file });
        // The lock of the list is not needed for the error log, which has its own.
        drop(retained);
        errors.forget_lost(lost.file.known_path().as_bytes());
    }

    /// Returns the bytes of all lost files.
    pub(crate) fn bytes(&self) -> u64 {
        let retained = self.retained.lock();
        retained.iter().map(|lost| lost.file.bytes).sum()
    }
}

/// A lost file, and the pieces that are retained of it.
struct RetainedFile {
    file: LostFile,
    layers: PieceLayers,
}
