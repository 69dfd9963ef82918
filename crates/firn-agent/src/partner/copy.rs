//! One complete partner copy: opens its files, and compares them with files elsewhere.
//!
//! Files are opened below the descriptor of the directory of copies, through no symbolic link.

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

/// Name of the copied files within the directory of a copy.
pub(super) const TREE: &str = "tree";
/// Bytes that are compared at a time.
const COMPARE_BYTES: usize = 256 << 10;

/// Function that is called often during long work. An error of the function ends the work.
pub(crate) type Tick<'a> = dyn FnMut() -> Result<(), PullError> + 'a;

/// A complete copy and its record.
pub(crate) struct Copy {
    pub(crate) record: Record,
    /// Path of the copied files, relative to `directory`.
    tree: PathBuf,
    directory: Arc<CopyDirectory>,
}

/// An open file of a copy. The file remains readable if the copy is removed.
pub(crate) struct CopyFile {
    file: File,
    bytes: u64,
}

impl Copy {
    /// Makes the copy called `name` in a directory of copies.
    pub(super) fn new(record: Record, directory: &Arc<CopyDirectory>, name: &OsStr) -> Self {
        Self {
            record,
            tree: Path::new(name).join(TREE),
            directory: Arc::clone(directory),
        }
    }

    /// Opens a file of the copy for reading.
    pub(crate) fn open(&self, below: &Path) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let path = join(&self.tree.as_path().into(), below);
        Ok(open_beneath(&self.directory, path.as_path(), flags, Mode::empty())?.into())
    }

    /// Whether each file of the copy is also below `path`, with the same bytes. The comparison calls `tick` often,
    /// because the backing may be slow.
    pub(crate) fn is_in(&self, path: &Path, tick: &mut Tick<'_>) -> Result<bool, PullError> {
        let files: Vec<_> = self
            .record
            .files()
            .map(|entry| entry.path.clone())
            .collect();
        self.has_files_in(&files, path, tick)
    }

    /// Whether each of `files` is also below `path`, with the same bytes. All lengths are compared before any byte is
    /// read.
    pub(crate) fn has_files_in(
        &self,
        files: &[BytePath],
        path: &Path,
        tick: &mut Tick<'_>,
    ) -> Result<bool, PullError> {
        let open_both = |file: &BytePath| -> io::Result<(File, File)> {
            let other = join(&path.into(), file.as_path());
            Ok((self.open(file.as_path())?, File::open(other)?))
        };
        for file in files {
            tick()?;
            if !open_both(file)
                .and_then(|(copy, other)| has_same_length(&copy, &other))
                .unwrap_or(false)
            {
                return Ok(false);
            }
        }
        for file in files {
            let Ok((copy, other)) = open_both(file) else {
                return Ok(false);
            };
            if !has_same_bytes(&copy, &other, tick)? {
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

    /// Size of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Fills `into` with the bytes from `offset` on.
    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, offset)
    }
}

/// Compares the length of a local file with that of a file on the mount. Forces the kernel to request the latter from
/// firnd, because it may have cached a length from before another host's write.
fn has_same_length(copy: &File, mounted: &File) -> io::Result<bool> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    let mounted_bytes = rustix::fs::statx(mounted, c"", flags, StatxFlags::SIZE)?.stx_size;
    Ok(mounted_bytes == copy.metadata()?.len())
}

/// Compares the bytes of two files of equal length. A file that cannot be read counts as different.
///
/// Length and time are not enough: after a killed drain a file of the backing may have its full length but only some of
/// its bytes.
fn has_same_bytes(copy: &File, mounted: &File, tick: &mut Tick<'_>) -> Result<bool, PullError> {
    let Ok(bytes) = copy.metadata().map(|metadata| metadata.len()) else {
        return Ok(false);
    };
    let mut offset = 0;
    let mut copy_bytes = vec![0; COMPARE_BYTES];
    let mut mounted_bytes = vec![0; COMPARE_BYTES];
    while offset < bytes {
        tick()?;
        let count = COMPARE_BYTES.min((bytes - offset) as usize);
        let read = copy.read_exact_at(&mut copy_bytes[..count], offset);
        let read = read.and_then(|()| mounted.read_exact_at(&mut mounted_bytes[..count], offset));
        if read.is_err() || copy_bytes[..count] != mounted_bytes[..count] {
            return Ok(false);
        }
        offset += count as u64;
    }
    Ok(true)
}
