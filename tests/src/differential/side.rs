//! One of the two directories: does operations and tells what came back.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Mode, RenameFlags, Timespec, Timestamps, XattrFlags,
};
use rustix::io::Errno;

use super::Op;
use crate::fsops::{Mapping, close};
use crate::random::bytes;

/// What a program sees of an operation.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// It worked.
    Done,
    /// The slot holds nothing, so nothing was done.
    NoHandle,
    /// A count.
    Count(u64),
    /// Bytes read (shown by length and first bytes).
    Bytes(Vec<u8>),
    /// Attributes: mode, owner, group, links, size.
    Stat([u64; 5]),
    /// Names with something about each.
    Names(BTreeMap<Vec<u8>, Vec<u8>>),
    /// The errno.
    Failed(Errno),
}

/// A directory and its open handles.
pub struct Side {
    root: PathBuf,
    handles: Vec<Option<(File, i32)>>,
}

type Result = std::result::Result<Answer, Errno>;

impl Side {
    /// An empty table of handles over `root`.
    pub fn new(root: &Path) -> Self {
        // What open, mkdir and mknod make must not depend on the user's umask. Tests of other threads keep theirs.
        // SAFETY: the thread gets a umask and a working directory of its own, and no code here relies on sharing them.
        let own = unsafe { libc::unshare(libc::CLONE_FS) };
        assert_eq!(own, 0, "a umask for this thread alone");
        rustix::process::umask(Mode::empty());
        Self {
            root: root.to_owned(),
            handles: (0..6).map(|_| None).collect(),
        }
    }

    /// Does one operation.
    pub fn perform(&mut self, op: &Op) -> Answer {
        match self.try_perform(op) {
            Ok(answer) => answer,
            Err(errno) => Answer::Failed(errno),
        }
    }

    fn try_perform(&mut self, op: &Op) -> Result {
        let at = |path: &str| self.root.join(path);
        match op {
            Op::Open {
                slot,
                path,
                flags,
                mode,
            } => self.open(*slot, path, *flags, *mode),
            Op::Close { slot } => match self.handles[*slot].take() {
                Some((file, _)) => close(file).map(|()| Answer::Done),
                None => Ok(Answer::NoHandle),
            },
            Op::Write {
                slot,
                offset,
                len,
                key,
            } => self.with(*slot, |file, flags| {
                let data = bytes(*key, *len);
                if flags & libc::O_APPEND != 0 {
                    return count(rustix::io::write(file, &data));
                }
                count(rustix::io::pwrite(file, &data, *offset))
            }),
            Op::Read { slot, offset, len } => self.with(*slot, |file, _| read(file, *offset, *len)),
            Op::ReadMapped { slot, len } => self.with(*slot, |file, _| read_mapped(file, *len)),
            Op::Resize { slot, len } => {
                self.with(*slot, |file, _| done(rustix::fs::ftruncate(file, *len)))
            }
            Op::Truncate { path, len } => {
                let file = OpenOptions::new()
                    .write(true)
                    .custom_flags(libc::O_NONBLOCK)
                    .open(at(path));
                done(rustix::fs::ftruncate(&file.map_err(plain)?, *len))
            }
            Op::Sync {
                slot,
                data_only: true,
            } => self.with(*slot, |file, _| done(rustix::fs::fdatasync(file))),
            Op::Sync { slot, .. } => self.with(*slot, |file, _| done(rustix::fs::fsync(file))),
            Op::Allocate {
                slot,
                mode,
                offset,
                len,
            } => self.with(*slot, |file, _| {
                let mode = FallocateFlags::from_bits_retain(*mode);
                done(rustix::fs::fallocate(file, mode, *offset, *len))
            }),
            Op::Copy {
                from,
                from_offset,
                to,
                to_offset,
                len,
            } => {
                let (Some((from, _)), Some((to, _))) = (&self.handles[*from], &self.handles[*to])
                else {
                    return Ok(Answer::NoHandle);
                };
                copy(from, *from_offset, to, *to_offset, *len)
            }
            Op::StatHandle { slot } => {
                self.with(*slot, |file, _| Ok(stat(&file.metadata().map_err(plain)?)))
            }
            Op::Stat { path } => Ok(stat(&fs::symlink_metadata(at(path)).map_err(plain)?)),
            Op::ReadPath { path } => {
                let file = OpenOptions::new()
                    .read(true)
                    .custom_flags(libc::O_NONBLOCK)
                    .open(at(path));
                read(&file.map_err(plain)?, 0, 1 << 20)
            }
            Op::MakeDir { path, mode } => {
                done(rustix::fs::mkdir(at(path), Mode::from_raw_mode(*mode)))
            }
            Op::RemoveDir { path } => done(rustix::fs::rmdir(at(path))),
            Op::Unlink { path } => done(rustix::fs::unlink(at(path))),
            Op::Rename { from, to, flags } => {
                let flags = RenameFlags::from_bits_retain(*flags);
                done(rustix::fs::renameat_with(CWD, at(from), CWD, at(to), flags))
            }
            Op::Link { from, to } => done(rustix::fs::link(at(from), at(to))),
            Op::Symlink { target, path } => done(rustix::fs::symlink(target.as_str(), at(path))),
            Op::ReadLink { path } => {
                let target = rustix::fs::readlink(at(path), Vec::new())?;
                Ok(Answer::Bytes(target.into_bytes()))
            }
            Op::MakeNode { path, kind, mode } => {
                let device = if *kind == libc::S_IFCHR {
                    rustix::fs::makedev(1, 3)
                } else {
                    0
                };
                let kind = FileType::from_raw_mode(*kind);
                done(rustix::fs::mknodat(
                    CWD,
                    at(path),
                    kind,
                    Mode::from_raw_mode(*mode),
                    device,
                ))
            }
            Op::Mode { path, mode } => {
                done(rustix::fs::chmod(at(path), Mode::from_raw_mode(*mode)))
            }
            Op::Owner { path, uid, gid } => {
                let owner = std::os::unix::fs::lchown(at(path), Some(*uid), Some(*gid));
                done(owner.map_err(plain))
            }
            Op::Times { path, seconds } => {
                let time = Timespec {
                    tv_sec: *seconds,
                    tv_nsec: 123_456_000,
                };
                let times = Timestamps {
                    last_access: time,
                    last_modification: time,
                };
                done(rustix::fs::utimensat(
                    CWD,
                    at(path),
                    &times,
                    AtFlags::SYMLINK_NOFOLLOW,
                ))
            }
            Op::SetXattr {
                path,
                name,
                value,
                flags,
            } => {
                let flags = XattrFlags::from_bits_retain(*flags);
                done(rustix::fs::lsetxattr(at(path), name.as_str(), value, flags))
            }
            Op::RemoveXattr { path, name } => {
                done(rustix::fs::lremovexattr(at(path), name.as_str()))
            }
            Op::Xattrs { path } => {
                fs::symlink_metadata(at(path)).map_err(plain)?;
                Ok(Answer::Names(crate::tree::xattrs(&at(path))))
            }
            Op::List { path } => list(&at(path)),
        }
    }

    fn open(&mut self, slot: usize, path: &str, flags: i32, mode: u32) -> Result {
        let path = self.root.join(path);
        // Opening a fifo would wait for the other end, which is never opened.
        let flags = flags | libc::O_NONBLOCK;
        let mode = Mode::from_raw_mode(mode);
        let flags_typed = rustix::fs::OFlags::from_bits_retain(flags as u32);
        let file = File::from(rustix::fs::open(path, flags_typed, mode)?);
        // Handles of fifos and devices would make later answers depend on the kernel, not on files.
        if file.metadata().map_err(plain)?.file_type().is_file() {
            self.handles[slot] = Some((file, flags));
        }
        Ok(Answer::Done)
    }

    fn with(&self, slot: usize, act: impl FnOnce(&File, i32) -> Result) -> Result {
        match &self.handles[slot] {
            Some((file, flags)) => act(file, *flags),
            None => Ok(Answer::NoHandle),
        }
    }
}

fn plain(error: std::io::Error) -> Errno {
    crate::fsops::errno(&error)
}

fn done(result: std::result::Result<(), Errno>) -> Result {
    result.map(|()| Answer::Done)
}

fn count(result: std::result::Result<usize, Errno>) -> Result {
    result.map(|count| Answer::Count(count as u64))
}

fn stat(meta: &fs::Metadata) -> Answer {
    let size = if meta.is_dir() { 0 } else { meta.size() };
    Answer::Stat([
        meta.mode().into(),
        meta.uid().into(),
        meta.gid().into(),
        meta.nlink(),
        size,
    ])
}

fn read(file: &File, offset: u64, len: usize) -> Result {
    let mut buf = vec![0; len];
    let mut filled = 0;
    while filled < len {
        match file
            .read_at(&mut buf[filled..], offset + filled as u64)
            .map_err(plain)?
        {
            0 => break,
            count => filled += count,
        }
    }
    buf.truncate(filled);
    Ok(Answer::Bytes(buf))
}

/// Reads through a mapping, but never beyond the end of the file, where a page fault is a signal.
fn read_mapped(file: &File, len: usize) -> Result {
    let len = len.min(file.metadata().map_err(plain)?.size() as usize);
    if len == 0 {
        return Ok(Answer::Count(0));
    }
    let mapping = Mapping::new(file, len, rustix::mm::MapFlags::SHARED)?;
    Ok(Answer::Bytes(mapping.read(0, len)))
}

/// copy_file_range(2) may do less than asked; repeated until it is done, as programs do.
fn copy(from: &File, mut from_offset: u64, to: &File, mut to_offset: u64, len: usize) -> Result {
    let mut total = 0;
    while total < len {
        let copied = rustix::fs::copy_file_range(
            from,
            Some(&mut from_offset),
            to,
            Some(&mut to_offset),
            len - total,
        )?;
        if copied == 0 {
            break;
        }
        total += copied;
    }
    Ok(Answer::Count(total as u64))
}

fn list(path: &Path) -> Result {
    let mut names = BTreeMap::new();
    for entry in fs::read_dir(path).map_err(plain)? {
        let entry = entry.map_err(plain)?;
        let kind = entry.file_type().map_err(plain)?;
        names.insert(
            entry.file_name().as_bytes().to_vec(),
            format!("{kind:?}").into_bytes(),
        );
    }
    Ok(Answer::Names(names))
}
