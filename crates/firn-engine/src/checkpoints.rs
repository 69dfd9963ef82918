//! Checkpoints as directories: which drain by themselves, which are removed.
//!
//! A checkpoint is a directory that was made directly below the top while the mount stood. It is complete
//! when a newer one was begun and none of its files is open or held cut off. A directory that was there
//! before is no checkpoint: what this module removes it has seen being made.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use firn_backing::{Backing, Errno, Kind, is_below};

use crate::engine::Engine;
use crate::file::File;
use crate::names::Node;
use crate::{NodeId, ROOT, Result};

/// Those of one mount, the oldest first.
pub(crate) struct Checkpoints<B: Backing> {
    known: Vec<Checkpoint<B>>,
    begun: u64,
}

struct Checkpoint<B: Backing> {
    dir: Arc<Node<B>>,
    /// The how manieth since the mount, from 0.
    index: u64,
}

impl<B: Backing> Default for Checkpoints<B> {
    fn default() -> Self {
        Self { known: Vec::new(), begun: 0 }
    }
}

impl<B: Backing> Engine<B> {
    /// A directory was made.
    pub(crate) fn note_checkpoint(&self, parent: NodeId, dir: NodeId) {
        if parent != ROOT || (self.options.keep == 0 && self.options.drain_every == 0) {
            return;
        }
        let Ok(dir) = self.node(dir) else { return };
        let mut checkpoints = self.checkpoints.lock();
        let index = checkpoints.begun;
        checkpoints.begun += 1;
        checkpoints.known.push(Checkpoint { dir, index });
    }

    /// A handle that may have written was closed: drains the file where it is its checkpoint's turn.
    pub(crate) fn note_closed(&self, file: &Arc<File<B>>) {
        let every = u64::from(self.options.drain_every);
        if every == 0 {
            return;
        }
        let paths = file.node.paths();
        let turn = self
            .checkpoints
            .lock()
            .known
            .iter()
            .any(|checkpoint| checkpoint.index.is_multiple_of(every) && checkpoint.holds(&paths));
        if turn {
            self.force(file, &mut file.lock());
        }
    }

    /// The checkpoints with as many newer complete ones as are kept, and nobody inside: their names below
    /// the top. One that was cut off goes with them, but makes no other go.
    pub fn expired_checkpoints(&self) -> Vec<OsString> {
        let keep = self.options.keep as usize;
        if keep == 0 {
            return Vec::new();
        }
        let mut checkpoints = self.checkpoints.lock();
        // Without a name it was removed by somebody else.
        checkpoints.known.retain(|checkpoint| !checkpoint.dir.paths().is_empty());
        let Some((_, older)) = checkpoints.known.split_last() else { return Vec::new() };
        let handles: Vec<_> = self.handles.read().values().cloned().collect();
        let open: Vec<Vec<u8>> = handles.iter().flat_map(|handle| handle.file.node.paths()).collect();
        let files: Vec<_> = self.files.lock().values().cloned().collect();
        let cut = files.iter().filter(|file| file.lock().cut);
        let cut: Vec<Vec<u8>> = cut.flat_map(|file| file.node.paths()).collect();
        let (mut complete, mut expired) = (0, Vec::new());
        for checkpoint in older.iter().rev().filter(|checkpoint| !checkpoint.holds(&open)) {
            if complete >= keep {
                expired.extend(checkpoint.dir.paths().into_iter().next());
            }
            complete += usize::from(!checkpoint.holds(&cut));
        }
        expired.iter().rev().map(|path| OsStr::from_bytes(path).to_owned()).collect()
    }

    /// Removes a directory directly below the top with all that is in it.
    pub fn remove_checkpoint(&self, name: &OsStr) -> Result<()> {
        self.remove_tree(ROOT, name)
    }

    fn remove_tree(&self, parent: NodeId, name: &OsStr) -> Result<()> {
        let entry = self.lookup(parent, name)?;
        let removed = self.empty(entry.node).and_then(|()| self.rmdir(parent, name));
        self.forget(entry.node, 1);
        removed
    }

    fn empty(&self, dir: NodeId) -> Result<()> {
        let handle = self.open_dir(dir)?;
        let mut names: Vec<(OsString, Option<Kind>)> = Vec::new();
        let listed = self.read_dir(handle, 0, &mut |entry| {
            if entry.name != "." && entry.name != ".." {
                names.push((entry.name.to_owned(), entry.kind));
            }
            true
        });
        self.release_dir(handle);
        listed?;
        for (name, kind) in names {
            let removed = match kind {
                Some(Kind::Dir) => self.remove_tree(dir, &name),
                _ => match self.unlink(dir, &name) {
                    Err(Errno::ISDIR) => self.remove_tree(dir, &name),
                    result => result,
                },
            };
            match removed {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }
}

impl<B: Backing> Checkpoint<B> {
    /// Whether one of `paths` is below this directory.
    fn holds(&self, paths: &[Vec<u8>]) -> bool {
        let tops = self.dir.paths();
        paths.iter().any(|path| tops.iter().any(|top| is_below(path, top)))
    }
}
