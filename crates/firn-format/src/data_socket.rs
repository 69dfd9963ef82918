//! What a client process and firnd say to each other: leases of slabs, lists of extents.
//!
//! The data socket is a `SOCK_SEQPACKET` beside the control socket. A client sends one [`Request`] a packet; firnd
//! answers each with one packet, in order.
//!
//! * A reply begins with a [`Reply`]. [`Reply::count`] [`Extent`]s or [`Slab`]s follow it, for [`Op::Extents`],
//!   [`Op::OpenWrite`] and [`Op::Lease`].
//! * The first request is [`Op::Hello`]. Its reply carries the descriptor of the arena (`SCM_RIGHTS`), and an [`Arena`]
//!   follows the [`Reply`]. The second request may come in the packet of the first.
//! * All structures are plain words in the byte order of the machine: both ends are on one host.
//!
//! A token names an open file: [`IOCTL_TOKEN`] on a descriptor of the mount returns it. The token is the kernel's own
//! handle, so `dup` and `fork` share it and the last close ends it.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Version of these messages; firnd refuses others with [`Status::Version`].
pub const DATA_SOCKET_VERSION: u32 = 8;

/// ioctl(2) on an open file of a mount, `_IOR('F', 0xd0, Token)`: its firnd and its token. ENOTTY from any other file
/// system.
pub const IOCTL_TOKEN: u32 =
    (2 << 30) | ((size_of::<Token>() as u32) << 16) | ((b'F' as u32) << 8) | 0xd0;

/// Answer to [`IOCTL_TOKEN`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Token {
    /// The open file, for [`Request::token`].
    pub token: u64,
    /// [`DATA_SOCKET_VERSION`] of firnd; 0: this firnd does not serve this caller.
    pub version: u32,
    /// Process id of firnd, for messages.
    pub pid: u32,
    /// UUID of the arena: one connection serves all mounts' files of one arena.
    pub arena: [u8; 16],
    /// Path of the data socket, ended by a zero byte.
    pub socket: [u8; 112],
}

/// What is asked, in [`Request::op`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Op {
    /// `arg` is [`DATA_SOCKET_VERSION`]. An [`Op::OpenWrite`] or [`Op::Extents`] may follow in the same packet; each has
    /// a reply of its own.
    Hello = 1,
    /// Asks for the right to write the open file by direct access. The answer is yes while no other process has it
    /// open. [`Reply::file_id`] names it in piece records, [`Reply::size`] is its length. If `arg` is not 0, the reply
    /// has the first leases too; `arg`, `len`, the reply and [`Status::Full`] mean what they mean for [`Op::Lease`].
    OpenWrite = 2,
    /// Ends all leases of this open file but the last one, and gives slabs to fill in this order: [`Reply::lease`], then
    /// the [`Reply::count`] slabs that follow the reply, at most [`LEASE_SLABS_MAX`] in all.
    ///
    /// `arg` is the number of bytes that the writer expects to write. `len` is the number of its CPU plus one, for
    /// memory near it, or 0 if it is not known. [`Status::Full`]: no room now; write through the kernel, which waits.
    Lease = 3,
    /// The writer is done: leases end, their pieces are ingested. `close` on the descriptor does the same.
    EndWrite = 4,
    /// The extents of the file from offset `arg` up to [`Reply::end`], sorted, at most [`EXTENTS_MAX`]. Holes are left
    /// out, and bytes that only firnd can read.
    ///
    /// Listed bytes stay where they are until [`Op::EndRead`], the close of the file or of the connection. They are the
    /// contents of the file while the word [`Reply::slot`] is [`Reply::stamp`], and for [`Reply::valid_ns`] from the
    /// request on.
    ///
    /// If `len` is not 0, extents in files of the backing are listed too. The descriptors of at most `len` files, and
    /// never more than [`FILES_MAX`], come with the reply (`SCM_RIGHTS`). A list from beyond the end of the file is
    /// empty: it only tells whether an earlier list still holds.
    Extents = 5,
    /// The reader is done with the extents of this open file.
    EndRead = 6,

    // What follows is for stubs, which the kernel cannot write or read for their processes.
    /// The packet carries a descriptor of a stub (`SCM_RIGHTS`), opened with the flags `arg`; with
    /// [`ADOPT_AGAIN`] in `len` the client had a token for it before. [`Reply::file_id`] is the token for
    /// everything else, [`Reply::size`] the length. [`Status::BadToken`]: it is no stub.
    Adopt = 7,
    /// The descriptor is being closed; answered when close(2) may return. The token ends.
    Release = 8,
    /// `len` bytes from offset `arg` on; as many as [`Reply::count`] follow the reply.
    Read = 9,
    /// The `len` bytes that follow the request go to offset `arg`. [`Reply::count`] of them were taken.
    Write = 10,
    /// Length ([`Reply::size`]) and 512-byte blocks ([`Reply::slot`]) of an open stub. Where
    /// [`Reply::count`] is not 0, its time of change was just set.
    Attr = 11,
    /// [`Op::Attr`] of a stub that need not be open: `token` is its inode number, `arg` the generation that
    /// name_to_handle_at(2) returns. [`Status::BadToken`]: no process wrote to the stub, so the kernel knows all of it.
    AttrOf = 12,
    /// ftruncate(2) to `arg`.
    Truncate = 13,
    /// fsync(2), or fdatasync(2) if `arg` is 1.
    Sync = 14,
    /// fallocate(2) with the mode `arg`; offset and length, 8 bytes each, follow the request.
    Allocate = 15,
    /// `len` bytes go to the end of the file, and no other write of a client comes between them. [`Reply::count`] of
    /// them were taken, at offset [`Reply::slot`].
    ///
    /// The bytes follow the request, or they begin a file in memory whose descriptor the packet carries (`SCM_RIGHTS`).
    /// In such a file `len` may exceed [`DATA_BYTES_MAX`], and an [`AppendProgress`] follows the bytes: after a kill the
    /// client may repeat the request to the next firnd.
    ///
    /// The file does not become longer than `arg` (RLIMIT_FSIZE): EFBIG if it has that length already.
    Append = 16,

    /// A descriptor of the memory file that has all bytes of a file that is open for reading (`SCM_RIGHTS`), for mmap(2).
    /// It can only read, and shows each change of the file until the open file is closed. [`Status::Busy`]: there is none,
    /// or the kernel maps the file as fast.
    Map = 17,
}

/// [`Request::len`] of [`Op::Adopt`]: the client had a token for the stub before.
pub const ADOPT_AGAIN: u32 = 1;
/// Most bytes that follow a [`Op::Write`] or its kin, or the reply to [`Op::Read`].
pub const DATA_BYTES_MAX: usize = 128 << 10;

impl Op {
    /// From the word of a request.
    pub fn from_word(word: u32) -> Option<Self> {
        use Op::*;
        let stubs = [
            Adopt, Release, Read, Write, Attr, AttrOf, Truncate, Sync, Allocate, Append,
        ];
        let both = [Hello, OpenWrite, Lease, EndWrite, Extents, EndRead, Map];
        both.into_iter().chain(stubs).find(|op| *op as u32 == word)
    }
}

/// How it went, in [`Reply::status`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// Another version of the messages.
    Version = 1,
    /// No such open file, or it is not open that way.
    BadToken = 2,
    /// Not now: others have the file open, it has set-id bits, or the mount's policy forbids it. The
    /// kernel's calls work as ever.
    Busy = 3,
    /// No room in the arena now.
    Full = 4,
    /// The request makes no sense; firnd closes the connection.
    Malformed = 5,
    /// It failed with [`Reply::errno`].
    Failed = 6,
}

impl Status {
    /// From the word of a reply; what is unknown counts as [`Status::Malformed`].
    pub fn from_word(word: u32) -> Self {
        [
            Self::Ok,
            Self::Version,
            Self::BadToken,
            Self::Busy,
            Self::Full,
            Self::Failed,
        ]
        .into_iter()
        .find(|status| *status as u32 == word)
        .unwrap_or(Self::Malformed)
    }
}

/// A request: one packet.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Request {
    /// [`Op`].
    pub op: u32,
    /// Bytes that follow or are wanted; 0 where the [`Op`] says nothing of it.
    pub len: u32,
    /// The open file.
    pub token: u64,
    /// See [`Op`].
    pub arg: u64,
}

impl Request {
    /// A request without bytes.
    pub fn new(op: Op, token: u64, arg: u64) -> Self {
        Self {
            op: op as u32,
            len: 0,
            token,
            arg,
        }
    }

    /// Sets [`Request::len`].
    pub fn with_len(self, len: u32) -> Self {
        Self { len, ..self }
    }
}

/// An answer, or its head.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Reply {
    /// [`Status`].
    pub status: u32,
    /// Extents, slabs or bytes that follow.
    pub count: u32,
    /// [`Op::OpenWrite`]: the file id, for piece records.
    pub file_id: u64,
    /// [`Op::OpenWrite`], [`Op::Extents`]: bytes of the file.
    pub size: u64,
    /// [`Op::Extents`]: the file's word, in bytes from the start of the arena.
    pub slot: u64,
    /// [`Op::Extents`]: what stands in it while the extents hold.
    pub stamp: u32,
    /// Of [`Status::Failed`].
    pub errno: u32,
    /// [`Op::Lease`], [`Op::OpenWrite`].
    pub lease: Slab,
    /// [`Op::Extents`]: up to here of the file all extents are listed.
    pub end: u64,
    /// [`Op::Extents`]: nanoseconds for which the list is valid; 0: as long as the word keeps its value.
    pub valid_ns: u64,
}

/// A leased slab: where its data and records are.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Slab {
    /// Start of the chunk's data, in bytes from the start of the arena.
    pub chunk: u64,
    /// First piece record of this lease, in bytes from the start of the arena.
    pub records: u64,
    /// The word that a writer holds while it stores bytes (`slab_word::WRITER`), in bytes from the start
    /// of the arena.
    pub writer: u64,
    /// Of the lease: seeds the seals.
    pub generation: u64,
    /// Sequence of the first record; each next one has one more.
    pub sequence: u64,
    /// First byte of the slab, from the start of the chunk.
    pub start: u32,
    /// End of the slab, from the start of the chunk.
    pub end: u32,
    /// Number of piece records.
    pub record_count: u32,
    /// Zero.
    pub reserved: u32,
    /// Time of the file's last write, nanoseconds since 1970: what the writer notes is later.
    pub modified: u64,
}

/// Progress of an [`Op::Append`] whose bytes come as a file; it lies behind them. firnd notes it, so that the next firnd
/// does not store the bytes twice. All zeros, or the end of the file: nothing was stored.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct AppendProgress {
    /// Where the first byte goes, plus one. Noted before it is stored, with the file locked against other changes.
    pub place: u64,
    /// Bytes that were stored, plus one. Noted after the last one, before the file is unlocked.
    pub count: u64,
}

/// What the preload library reads to know a stub tree: the file `KEY.stub` of the runtime directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct StubTree {
    /// [`STUB_MAGIC`].
    pub magic: u64,
    /// Major number of the stubs' device.
    pub device_major: u32,
    /// Minor number.
    pub device_minor: u32,
    /// Not 0: every regular file of that device is a stub. Else those below `prefix` are.
    pub whole_device: u32,
    /// Process id of firnd, for messages.
    pub pid: u32,
    /// Not 0: other hosts use the files too, so a lock of a stub, which is this host's alone, is refused.
    pub refuses_locks: u32,
    /// 0.
    pub unused: u32,
    /// UUID of the arena.
    pub arena: [u8; 16],
    /// Path of the data socket, ended by a zero byte.
    pub socket: [u8; 112],
    /// Path of the tree, canonical, ended by a zero byte.
    pub prefix: [u8; PATH_BYTES],
    /// Path of the backing, canonical, ended by a zero byte.
    pub backing: [u8; PATH_BYTES],
}

/// Room for a path (`PATH_MAX`).
pub const PATH_BYTES: usize = 4096;
/// "FIRNSTB" and the version of [`StubTree`].
pub const STUB_MAGIC: u64 = u64::from_le_bytes(*b"FIRNSTB\x02");

/// Follows the [`Reply`] to [`Op::Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Arena {
    /// Its UUID.
    pub uuid: [u8; 16],
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Start of the part that a client maps read-only, with the words of [`Reply::slot`].
    pub words_offset: u64,
    /// Bytes of that part.
    pub words_bytes: u64,
    /// What a client maps for reading and writing: piece tables and chunks, from here to the end.
    pub shared_offset: u64,
    /// Size of the pages that back the data, as far as known.
    pub page_bytes: u64,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
}

/// Ends of writes beyond this go through the kernel: there firnd asks the backing whether it can hold such
/// a file, so that EFBIG comes from write(2).
pub const OFFSET_MAX: u64 = 1 << 40;

/// Most slabs that one reply leases: a writer of 4 MiB chunks asks every 16 MiB then.
pub const LEASE_SLABS_MAX: usize = 4;

/// Most extents in one reply.
pub const EXTENTS_MAX: usize = 1024;

/// Most descriptors of files of the backing in one reply.
pub const FILES_MAX: usize = 32;

/// A part of a file that is in the arena, in the spill file or in a file of the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Extent {
    /// Bytes from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Bytes from the start of the arena, or of that file.
    pub at: u64,
    /// Index of the chunk, or of the descriptor among those that came with the reply.
    pub chunk: u32,
    /// [`IN_MEMORY`], [`IN_SPILL`], [`IN_BACKING`] or [`TO_BE_ASKED`].
    pub place: u32,
}

/// [`Extent::place`]: the arena.
pub const IN_MEMORY: u32 = 0;
/// [`Extent::place`]: the spill file.
pub const IN_SPILL: u32 = 1;
/// [`Extent::place`]: a file of the backing.
pub const IN_BACKING: u32 = 2;
/// [`Extent::place`]: not listed yet; a request from an offset in this extent on returns it. [`Extent::at`] is unused.
pub const TO_BE_ASKED: u32 = 3;
/// [`Extent::place`]: a memory file.
pub const IN_MEMORY_FILE: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_wire_come_back() {
        for word in 0..20 {
            if let Some(op) = Op::from_word(word) {
                assert_eq!(op as u32, word);
            }
        }
        assert_eq!(Status::from_word(Status::Busy as u32), Status::Busy);
        assert_eq!(Status::from_word(99), Status::Malformed);
    }

    #[test]
    fn the_token_fits_an_ioctl() {
        assert!(size_of::<Token>() < 1 << 14);
        assert_eq!(IOCTL_TOKEN >> 16 & 0x3fff, size_of::<Token>() as u32);
    }
}
