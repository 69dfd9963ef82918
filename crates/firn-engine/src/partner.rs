//! Which files a partner host has copies of: the durability level `partnered`.
//!
//! Invariant: a file has the level only as long as its bytes and its length are those that the partner was said to
//! have, and it is not open for writing. [`Durability::forget_partner`] takes it from all files.

use std::time::Duration;

use firn_backing::Backing;
use firn_format::durability::DurabilityLevel;

use crate::Result;
use crate::durability::Durability;

/// What is held, and whether a partner has it too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartnerFigures {
    /// Held files that the partner has.
    pub copied_files: u64,
    /// Their held bytes.
    pub copied_bytes: u64,
    /// Held files that it does not have.
    pub left_files: u64,
    /// Their held bytes.
    pub left_bytes: u64,
    /// Age of the oldest of those bytes.
    pub oldest_left: Option<Duration>,
}

impl<B: Backing> Durability<B> {
    /// Marks that a partner has the file at `path` as it was at `changes` ([`crate::FileFigures::changes`]). False: the
    /// file has changed since, nothing of it is held, or `counts` says that the partner was replaced. `counts` is asked
    /// under the file's lock: a thread that replaces the partner and then calls [`Durability::forget_partner`] leaves
    /// no mark.
    pub fn mark_partnered(
        &self,
        path: &[u8],
        changes: u64,
        counts: impl FnOnce() -> bool,
    ) -> Result<bool> {
        let inode = self.tree.find(path)?;
        let Some(file) = self.open_files.known_file(&inode) else {
            return Ok(false);
        };
        let mut state = file.lock();
        self.intake.ingest_published(&file, &mut state);
        let is_that = state.changes == changes && !state.pending.is_empty() && counts();
        if is_that {
            state.partnered_changes = changes;
        }
        Ok(is_that && state.is_partnered())
    }

    /// There is no partner any more, or another one.
    pub fn forget_partner(&self) {
        for file in self.open_files.files.all() {
            file.lock().partnered_changes = 0;
        }
    }

    /// What is held at or below `path`, which must be there.
    pub fn partner_figures(&self, path: &[u8]) -> Result<PartnerFigures> {
        if !path.is_empty() {
            self.tree.find(path)?;
        }
        let mut figures = PartnerFigures::default();
        for file in self.pending_below(path) {
            let mut state = file.lock();
            self.intake.ingest_published(&file, &mut state);
            let bytes = state.pending.bytes();
            if state.level_of_pending(&self.base.arena) >= DurabilityLevel::Partnered {
                figures.copied_files += 1;
                figures.copied_bytes += bytes;
                continue;
            }
            figures.left_files += 1;
            figures.left_bytes += bytes;
            let age = state.drain.oldest().map(|at| at.elapsed());
            figures.oldest_left = figures.oldest_left.max(age);
        }
        Ok(figures)
    }
}
