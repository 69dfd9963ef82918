//! fuser's replies as one type.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use firn_backing::{Errno, StatFs};
use firn_engine::HandleId;
use firn_fuser::{errno, file_attr, file_type};
use fuser::{
    BackingId, FileHandle, FileType, FopenFlags, Generation, INodeNo, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek,
    ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
};

use crate::reply::{self, Answer, Attributes, HandleMode, ListedEntry};

/// Inodes have numbers that are not used again while the kernel knows them, so generations are not needed.
const GENERATION: Generation = Generation(0);

macro_rules! replies {
    ($($form:ident($reply:ident)),* $(,)?) => {
        /// One of fuser's replies.
        pub(crate) enum Responder { $($form($reply)),* }

        $(impl From<$reply> for Responder {
            fn from(reply: $reply) -> Self {
                Self::$form(reply)
            }
        })*

        impl Responder {
            fn error(self, errno: fuser::Errno) {
                match self { $(Self::$form(reply) => reply.error(errno)),* }
            }
        }
    };
}

replies! {
    Attr(ReplyAttr), Create(ReplyCreate), Data(ReplyData), Directory(ReplyDirectory),
    DirectoryPlus(ReplyDirectoryPlus), Empty(ReplyEmpty), Entry(ReplyEntry), Ioctl(ReplyIoctl),
    Lseek(ReplyLseek), Open(ReplyOpen), Statfs(ReplyStatfs), Write(ReplyWrite), Xattr(ReplyXattr),
}

impl reply::Responder for Responder {
    type BackingId = BackingId;

    fn send(self, answer: Answer<'_, BackingId>) {
        match (self, answer) {
            (Self::Empty(reply), Answer::Done) => reply.ok(),
            (Self::Attr(reply), Answer::Attributes(of)) => {
                reply.attr(&of.ttl, &file_attr(of.inode.0, &of.attr))
            }
            (Self::Entry(reply), Answer::Entry(of)) => {
                reply.entry(&of.ttl, &file_attr(of.inode.0, &of.attr), GENERATION);
            }
            (Self::Open(reply), Answer::Opened { handle, mode }) => {
                send_opened(reply, handle, &mode);
            }
            (
                Self::Create(reply),
                Answer::Created {
                    entry,
                    handle,
                    mode,
                },
            ) => send_created(reply, &entry, handle, &mode),
            (Self::Data(reply), Answer::Data(data)) => reply.data(data),
            (Self::Xattr(reply), Answer::Data(value)) => reply.data(value),
            (Self::Xattr(reply), Answer::Size(size)) => reply.size(size),
            (Self::Write(reply), Answer::Written(bytes)) => reply.written(bytes),
            (Self::Lseek(reply), Answer::Position(offset)) => reply.offset(offset as i64),
            (Self::Statfs(reply), Answer::FileSystem(figures)) => send_figures(reply, figures),
            (Self::Ioctl(reply), Answer::Ioctl(data)) => reply.ioctl(0, data),
            (Self::Directory(reply), Answer::Listed) => reply.ok(),
            (Self::DirectoryPlus(reply), Answer::Listed) => reply.ok(),
            (responder, _) => {
                debug_assert!(false, "an answer of another operation");
                tracing::error!("an answer does not belong to its request; its caller gets EIO");
                responder.error(fuser::Errno::EIO);
            }
        }
    }

    fn refuse(self, error: Errno) {
        self.error(errno(error));
    }

    fn add_entry(&mut self, entry: &ListedEntry<'_>) -> bool {
        let Self::Directory(reply) = self else {
            return false;
        };
        let kind = entry.kind.map_or(FileType::RegularFile, file_type);
        let is_full = reply.add(INodeNo(entry.ino), entry.cookie as u64, kind, entry.name);
        !is_full
    }

    fn add_entry_plus(&mut self, entry: &ListedEntry<'_>, attributes: &Attributes) -> bool {
        let Self::DirectoryPlus(reply) = self else {
            return false;
        };
        let attr = file_attr(attributes.inode.0, &attributes.attr);
        let cookie = entry.cookie as u64;
        let is_full = reply.add(
            attr.ino,
            cookie,
            entry.name,
            &attributes.ttl,
            &attr,
            GENERATION,
        );
        !is_full
    }

    fn register_backing(&self, file: OwnedFd) -> io::Result<BackingId> {
        match self {
            Self::Open(reply) => reply.open_backing(file),
            Self::Create(reply) => reply.open_backing(file),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

fn open_flags(mode: &HandleMode<BackingId>) -> FopenFlags {
    match mode {
        HandleMode::Direct => {
            FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
        }
        HandleMode::CachedKeep => FopenFlags::FOPEN_KEEP_CACHE,
        HandleMode::Cached | HandleMode::Passthrough(_) => FopenFlags::empty(),
    }
}

fn send_opened(reply: ReplyOpen, handle: HandleId, mode: &HandleMode<BackingId>) {
    let handle = FileHandle(handle.0);
    let flags = open_flags(mode);
    match mode {
        HandleMode::Passthrough(id) => reply.opened_passthrough(handle, flags, id),
        _ => reply.opened(handle, flags),
    }
}

fn send_created(
    reply: ReplyCreate,
    entry: &Attributes,
    handle: HandleId,
    mode: &HandleMode<BackingId>,
) {
    let ttl: &Duration = &entry.ttl;
    let attr = file_attr(entry.inode.0, &entry.attr);
    let handle = FileHandle(handle.0);
    let flags = open_flags(mode);
    match mode {
        HandleMode::Passthrough(id) => {
            reply.created_passthrough(ttl, &attr, GENERATION, handle, flags, id);
        }
        _ => reply.created(ttl, &attr, GENERATION, handle, flags),
    }
}

fn send_figures(reply: ReplyStatfs, figures: &StatFs) {
    let block_size = figures.block_size as u32;
    reply.statfs(
        figures.blocks,
        figures.blocks_free,
        figures.blocks_available,
        figures.files,
        figures.files_free,
        block_size,
        figures.name_max,
        block_size,
    );
}
