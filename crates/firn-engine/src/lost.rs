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
    /// discards it. Records an error for the status. Returns the description of the file, with the number of its bytes.
    ///
    /// `layers` has the newest bytes of each file range, with their pieces (recorded appends).
    pub(crate) fn retain(&self, mut file: LostFile, layers: PieceLayers) -> LostFile {
        for (piece, piece_use) in layers.pieces.iter() {
            // The length of a piece, and so the number of its live bytes, fits into 32 bits.
            self.base.arena.keep_piece(*piece, piece_use.live as u32);
            file.bytes += piece_use.live;
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
        let retained_file = file.clone();
        self.retained.lock().push(RetainedFile { file, layers });
        retained_file
    }

    /// Returns all lost files.
    pub fn list(&self) -> Vec<LostFile> {
        let retained = self.retained.lock();
        retained
            .iter()
            .map(|retained| retained.file.clone())
            .collect()
    }

    /// Reads the retained bytes of the lost file with this file id. Calls `on_bytes` with the offset and the bytes of
    /// one range after the other, in ascending order. Bytes that were drained before the loss are left out.
    ///
    /// Does nothing if there is no such lost file. Returns the first error of `on_bytes` or of a read.
    pub fn read<E: From<Errno>>(
        &self,
        file_id: u64,
        mut on_bytes: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let retained = self.retained.lock();
        let Some(lost) = retained.iter().find(|lost| lost.has_id(file_id)) else {
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
                on_bytes(offset + read_bytes, &buffer)?;
                read_bytes += buffer.len() as u64;
            }
        }
        Ok(())
    }

    /// Discards the retained bytes of the lost file with this file id permanently. Does nothing if there is no such
    /// lost file.
    pub fn discard(&self, file_id: u64) {
        let Base {
            arena,
            journal,
            errors,
            ..
        } = &*self.base;
        let mut retained = self.retained.lock();
        let Some(index) = retained.iter().position(|lost| lost.has_id(file_id)) else {
            return;
        };
        let lost = retained.remove(index);
        // The pieces are marked as dead before the file id ends in the journal. A crash in between leaves a file id
        // without pieces, which recovery removes.
        for (piece, used) in lost.layers.pieces.iter() {
            arena.mark_dead(*piece);
            arena.release_bytes(piece.slab, used.live);
        }
        journal.append_note(&Record::FileIdEnd { file: file_id });
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

impl RetainedFile {
    fn has_id(&self, file_id: u64) -> bool {
        self.file.file == file_id
    }
}
