//! One whole copy: its files, and whether they are elsewhere, too.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firn_protocol::path::BytePath;
use firn_trust::open_beneath;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};

use crate::copy_directory::CopyDirectory;
use crate::error::PullError;
use crate::partner::record::Record;
use crate::source::join;

pub(super) const TREE: &str = "tree";
/// Bytes that are compared at a time.
const COMPARE_BYTES: usize = 256 << 10;

/// What is called while something takes long; an error ends it.
pub(crate) type Tick<'a> = dyn FnMut() -> Result<(), PullError> + 'a;

/// A whole copy.
pub(crate) struct Copy {
    pub(crate) record: Record,
    /// Below the directory.
    tree: PathBuf,
    directory: Arc<CopyDirectory>,
}

/// A file of a copy, open for reading. A copy that is removed meanwhile stays readable by this handle.
pub(crate) struct CopyFile {
    file: File,
    bytes: u64,
}

impl Copy {
    /// The copy of this name, with its record.
    pub(super) fn new(record: Record, directory: &Arc<CopyDirectory>, name: &OsStr) -> Self {
        Self {
            record,
            tree: Path::new(name).join(TREE),
            directory: Arc::clone(directory),
        }
    }

    /// Opens a file of it.
    pub(crate) fn open(&self, below: &Path) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let path = join(&self.tree.as_path().into(), below);
        Ok(open_beneath(&self.directory, path.as_path(), flags, Mode::empty())?.into())
    }

    /// Whether every file of it is below `path`, with the same bytes. `tick` is called all the time: the backing may be
    /// slow.
    pub(crate) fn is_in(&self, path: &Path, tick: &mut Tick<'_>) -> Result<bool, PullError> {
        let files: Vec<_> = self
            .record
            .files()
            .map(|entry| entry.path.clone())
            .collect();
        self.has_files_in(&files, path, tick)
    }

    /// Whether some of its files are below `path`, with the same bytes. Reads bytes only if all lengths agree.
    pub(crate) fn has_files_in(
        &self,
        files: &[BytePath],
        path: &Path,
        tick: &mut Tick<'_>,
    ) -> Result<bool, PullError> {
        let open = |file: &BytePath| -> io::Result<(File, File)> {
            let other = join(&path.into(), file.as_path());
            Ok((self.open(file.as_path())?, File::open(other)?))
        };
        for file in files {
            tick()?;
            if !open(file)
                .and_then(|(own, other)| has_same_length(&own, &other))
                .unwrap_or(false)
            {
                return Ok(false);
            }
        }
        for file in files {
            let Ok((own, other)) = open(file) else {
                return Ok(false);
            };
            if !has_same_bytes(&own, &other, tick)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl CopyFile {
    pub(super) fn new(file: File) -> io::Result<Self> {
        let bytes = file.metadata()?.len();
        Ok(Self { file, bytes })
    }

    /// Bytes of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Fills `into` with its bytes from `at` on.
    pub(crate) fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, at)
    }
}

/// `b` is on a mount, whose kernel may know a length of it from before another host wrote to it.
fn has_same_length(a: &File, b: &File) -> io::Result<bool> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    let of_b = rustix::fs::statx(b, c"", flags, StatxFlags::SIZE)?.stx_size;
    Ok(of_b == a.metadata()?.len())
}

/// Of files that have the same length. Length and time in the backing do not tell that all bytes are there: a drain that
/// was killed may have written any of them.
fn has_same_bytes(a: &File, b: &File, tick: &mut Tick<'_>) -> Result<bool, PullError> {
    let Ok(bytes) = a.metadata().map(|found| found.len()) else {
        return Ok(false);
    };
    let mut at = 0;
    let mut of_a = vec![0; COMPARE_BYTES];
    let mut of_b = vec![0; COMPARE_BYTES];
    while at < bytes {
        tick()?;
        let count = COMPARE_BYTES.min((bytes - at) as usize);
        let read = a.read_exact_at(&mut of_a[..count], at);
        let read = read.and_then(|()| b.read_exact_at(&mut of_b[..count], at));
        if read.is_err() || of_a[..count] != of_b[..count] {
            return Ok(false);
        }
        at += count as u64;
    }
    Ok(true)
}
