//! Files whose data recovery could not give back to them.
//!
//! Their pieces are not drained. They stay in the arena until the user puts the files back under their names, or takes
//! the data elsewhere, or gives it up.

use std::sync::Arc;

use firn_backing::lock::Mutex;
use firn_backing::{Backing, Errno};
use firn_format::record::Record;
use firn_protocol::path::BytePath;

use crate::base::Base;
use crate::file::Layers;

/// Copied at a time.
const STEP_BYTES: u64 = 1 << 20;

/// A file whose data could not be given back to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostFile {
    /// The file id: unique in the arena.
    pub file: u64,
    /// Path before it was lost, from the root of the backing; empty where the journal does not know it.
    pub path: Vec<u8>,
    /// Bytes that are kept in the arena.
    pub bytes: u64,
    /// The backing answered, and the file is not there. Otherwise another try may find it.
    pub gone: bool,
    /// Why.
    pub reason: String,
}

impl LostFile {
    /// Its path, or what it is called where that is not known.
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
    base: Arc<Base<B>>,
    kept: Mutex<Vec<Kept>>,
}

impl<B: Backing> LostFiles<B> {
    pub(crate) fn new(base: &Arc<Base<B>>) -> Self {
        Self {
            base: Arc::clone(base),
            kept: Mutex::default(),
        }
    }

    /// Keeps the pieces of a file that was not found, and records that. Returns the file with its bytes counted.
    pub(crate) fn keep(&self, mut file: LostFile, layers: Layers) -> LostFile {
        for (piece, used) in layers.pieces.iter() {
            self.base.arena.keep_piece(*piece, used.live as u32);
            file.bytes += used.live;
        }
        let path = file.known_path();
        let bytes = file.bytes;
        let reason = &file.reason;
        tracing::error!(%path, bytes, reason, "held data has no file to go to; it stays in the arena");
        self.base.errors.record_lost(
            path.as_bytes().to_vec(),
            Errno::NOENT,
            format!("{bytes} held bytes have no file to go to ({reason}); they stay in the arena"),
        );
        let known = file.clone();
        self.kept.lock().push(Kept { file, layers });
        known
    }

    /// Files whose data has nowhere to go.
    pub fn list(&self) -> Vec<LostFile> {
        self.kept
            .lock()
            .iter()
            .map(|kept| kept.file.clone())
            .collect()
    }

    /// Gives the held bytes of a lost file to `sink`, with their offsets, in ascending order. What had been drained
    /// before is not among them. A file that is not lost has none.
    pub fn read<E: From<Errno>>(
        &self,
        file: u64,
        mut sink: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let lost = self.kept.lock();
        let Some(kept) = lost.iter().find(|kept| kept.file.file == file) else {
            return Ok(());
        };
        let mut buf = Vec::new();
        for (offset, extent) in kept.layers.extents.iter() {
            let mut done = 0;
            while done < extent.len {
                buf.resize((extent.len - done).min(STEP_BYTES) as usize, 0);
                self.base.arena.copy_out(
                    extent.piece.slab,
                    extent.position + done as u32,
                    &mut buf,
                )?;
                sink(offset + done, &buf)?;
                done += buf.len() as u64;
            }
        }
        Ok(())
    }

    /// Gives up the held bytes of a lost file. They cannot be had again.
    pub fn discard(&self, file: u64) {
        let Base {
            arena,
            journal,
            errors,
            ..
        } = &*self.base;
        let mut lost = self.kept.lock();
        let Some(at) = lost.iter().position(|kept| kept.file.file == file) else {
            return;
        };
        let kept = lost.remove(at);
        // Marks first: a crash between leaves a file id without pieces, which recovery takes away.
        for (piece, used) in kept.layers.pieces.iter() {
            arena.mark_dead(*piece);
            arena.release_bytes(piece.slab, used.live);
        }
        journal.append_note(&Record::FileIdEnd { file });
        drop(lost);
        errors.forget_lost(kept.file.known_path().as_bytes());
    }

    /// Bytes that have no file to go to.
    pub(crate) fn bytes(&self) -> u64 {
        self.kept.lock().iter().map(|kept| kept.file.bytes).sum()
    }
}

/// What the engine keeps of one.
struct Kept {
    file: LostFile,
    layers: Layers,
}
