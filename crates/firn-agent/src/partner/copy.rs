//! One complete *partner copy*: files that this host copied from the memory of another host. This file opens them, and
//! compares them with files elsewhere.
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
use crate::partner::record::CopyRecord;
use crate::source::join;

/// Name of the copied files within the directory of a copy.
pub(super) const TREE: &str = "tree";
/// Bytes that are compared at a time.
const COMPARE_BYTES: usize = 256 << 10;

/// Function that is called often during long work. An error of the function ends the work.
pub(crate) type OnProgress<'a> = dyn FnMut() -> Result<(), PullError> + 'a;

/// A complete copy and its record.
pub(crate) struct PartnerCopy {
    pub(crate) record: CopyRecord,
    /// Path of the copied files, relative to `directory`.
    tree: PathBuf,
    directory: Arc<CopyDirectory>,
}

/// An open file of a copy. The file remains readable if the copy is removed.
pub(crate) struct CopyFile {
    file: File,
    bytes: u64,
}

impl PartnerCopy {
    /// Makes the copy called `name` in a directory of copies.
    pub(super) fn new(record: CopyRecord, directory: &Arc<CopyDirectory>, name: &OsStr) -> Self {
        Self {
            record,
            tree: Path::new(name).join(TREE),
            directory: Arc::clone(directory),
        }
    }

    /// Opens a file of the copy for reading. `path` is relative to the copied unit.
    pub(crate) fn open(&self, path: &Path) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let path_in_directory = join(&self.tree.as_path().into(), path);
        let file = open_beneath(
            &self.directory,
            path_in_directory.as_path(),
            flags,
            Mode::empty(),
        )?;
        Ok(file.into())
    }

    /// Whether each file of the copy is also below `mounted_dir`, with the same bytes. The comparison calls
    /// `on_progress` often, because the backing may be slow.
    pub(crate) fn has_all_files_in(
        &self,
        mounted_dir: &Path,
        on_progress: &mut OnProgress<'_>,
    ) -> Result<bool, PullError> {
        let files = self.record.files().map(|entry| entry.path.clone());
        self.has_files_in(&files.collect::<Vec<_>>(), mounted_dir, on_progress)
    }

    /// Whether each of `files` of this copy is also below `mounted_dir`, a directory of a mount, with the same bytes. A
    /// file that cannot be opened there counts as different.
    ///
    /// All lengths are compared before any byte is read. `on_progress` is called often; its error is returned.
    pub(crate) fn has_files_in(
        &self,
        files: &[BytePath],
        mounted_dir: &Path,
        on_progress: &mut OnProgress<'_>,
    ) -> Result<bool, PullError> {
        for file in files {
            on_progress()?;
            let has_same_length = self
                .open_pair(file, mounted_dir)
                .and_then(|pair| pair.has_same_length());
            if !matches!(has_same_length, Ok(true)) {
                return Ok(false);
            }
        }
        for file in files {
            let Ok(pair) = self.open_pair(file, mounted_dir) else {
                return Ok(false);
            };
            if !pair.has_same_bytes(on_progress)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Opens a file of the copy, and the file of the same path below `mounted_dir`.
    fn open_pair(&self, file: &BytePath, mounted_dir: &Path) -> io::Result<FilePair> {
        let mounted_path = join(&mounted_dir.into(), file.as_path());
        Ok(FilePair {
            copy: self.open(file.as_path())?,
            mounted: File::open(mounted_path)?,
        })
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

    /// Fills a buffer with the bytes from `offset` on.
    pub(crate) fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }
}

/// A file of a copy, and the file on the mount with which it is compared.
struct FilePair {
    copy: File,
    mounted: File,
}

impl FilePair {
    /// Compares the lengths. Forces the kernel to request the length of the mounted file from firnd, because the kernel
    /// may have cached a length from before another host's write.
    fn has_same_length(&self) -> io::Result<bool> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
        let mounted_status = rustix::fs::statx(&self.mounted, c"", flags, StatxFlags::SIZE)?;
        Ok(mounted_status.stx_size == self.copy.metadata()?.len())
    }

    /// Compares the bytes of a file of the copy with those of the file in the mount, which has the same length. A file
    /// that cannot be read counts as different. `on_progress` is called often; its error is returned.
    ///
    /// Length and time are not enough. If the write of a file from memory to the backing (the directory that the mount
    /// serves) was killed, the file may have its full length there but only some of its bytes.
    fn has_same_bytes(&self, on_progress: &mut OnProgress<'_>) -> Result<bool, PullError> {
        let Ok(metadata) = self.copy.metadata() else {
            return Ok(false);
        };
        let file_bytes = metadata.len();
        let mut copy_buffer = vec![0; COMPARE_BYTES];
        let mut mounted_buffer = vec![0; COMPARE_BYTES];
        let mut offset = 0;
        while offset < file_bytes {
            on_progress()?;
            let count = COMPARE_BYTES.min((file_bytes - offset) as usize);
            let copy_chunk = &mut copy_buffer[..count];
            let mounted_chunk = &mut mounted_buffer[..count];
            if self.copy.read_exact_at(copy_chunk, offset).is_err()
                || self.mounted.read_exact_at(mounted_chunk, offset).is_err()
                || copy_chunk != mounted_chunk
            {
                return Ok(false);
            }
            offset += count as u64;
        }
        Ok(true)
    }
}
