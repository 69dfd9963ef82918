//! Messages between a client process and firnd, the process that serves a mount. By them a client gets direct access to
//! the data of files.
//!
//! Terms
//! * The *arena* is shared memory with the bytes that are not in the backing directory yet.
//! * A *slab* is a part of the arena that one writer fills. A *lease* is the client's right to fill it.
//! * An *extent* is a range of a file, and the place of its newest bytes.
//! * A *stub* is an empty file on tmpfs; a library in the program serves its bytes by requests on this socket.
//!
//! The data socket is a `SOCK_SEQPACKET` socket beside the control socket. A client sends one [`Request`] in each
//! packet. firnd answers each with one packet, in order.
//!
//! * A reply begins with a [`Reply`]. For [`Op::Extents`], [`Op::OpenWrite`] and [`Op::Lease`], [`Reply::count`]
//!   [`Extent`]s or [`Slab`]s follow it.
//! * The first request is [`Op::Hello`]. Its reply carries the descriptor of the arena (`SCM_RIGHTS`), and an [`Arena`]
//!   follows the [`Reply`]. The second request may come in the same packet as the first.
//! * All structures are plain words in the byte order of the machine, because both ends are on one host.
//!
//! A *token* names an open file. [`IOCTL_TOKEN`] on a descriptor of the mount returns the token. It is the kernel's
//! file handle: `dup` and `fork` share it, and the last close ends it.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Version of these messages. firnd refuses other versions with [`Status::Version`].
pub const DATA_SOCKET_VERSION: u32 = 8;

/// ioctl(2) on an open file of a mount, `_IOR('F', 0xd0, Token)`. Returns the [`Token`] of the file. Any other file
/// system returns ENOTTY.
///
/// From the highest bits on, the number has the direction (2: the caller reads), the size of the argument, the type and
/// the number of the request.
pub const IOCTL_TOKEN: u32 =
    (2 << 30) | ((size_of::<Token>() as u32) << 16) | ((b'F' as u32) << 8) | 0xd0;

/// Result of [`IOCTL_TOKEN`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Token {
    /// The token of the open file, for [`Request::token`].
    pub token: u64,
    /// [`DATA_SOCKET_VERSION`] of firnd, or 0 if this firnd does not serve the caller.
    pub version: u32,
    /// Process id of firnd, for messages.
    pub pid: u32,
    /// UUID of the arena. One connection serves the files of all mounts of one arena.
    pub arena: [u8; 16],
    /// Path of the data socket, ended by a zero byte.
    pub socket: [u8; 112],
}

/// The kind of a request, in [`Request::op`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Op {
    /// Begins a connection. `arg` is [`DATA_SOCKET_VERSION`]. An [`Op::OpenWrite`] or [`Op::Extents`] may follow in the
    /// same packet; each request gets its own reply.
    Hello = 1,
    /// Asks for the right to write the open file by direct access. firnd grants it while no other process has the file
    /// open. [`Reply::file_id`] names the file in piece records, and [`Reply::size`] is its length.
    ///
    /// If `arg` is not 0, the reply also has the first leases. Then `arg`, `len`, the reply and [`Status::Full`] have
    /// the meaning that they have for [`Op::Lease`].
    OpenWrite = 2,
    /// Ends all leases of this open file except the last one, and leases further slabs. The client fills them in this
    /// order: [`Reply::lease`], then the [`Reply::count`] slabs after the reply. There are at most [`LEASE_SLABS_MAX`].
    ///
    /// `arg` is the number of bytes that the writer expects to write. `len` is the number of its CPU plus one, so that
    /// firnd can choose memory near that CPU, or 0 if the CPU is not known. [`Status::Full`] means that the arena has
    /// no room now: the client writes through the kernel, which waits for room.
    Lease = 3,
    /// Ends writing: all leases end, and firnd takes over their pieces, the published ranges of bytes. A close of the
    /// descriptor does the same.
    EndWrite = 4,
    /// Lists the extents of the file from offset `arg` up to [`Reply::end`], sorted, at most [`EXTENTS_MAX`]. Holes are
    /// left out, and so are bytes that only firnd can read.
    ///
    /// Listed bytes keep their places until [`Op::EndRead`], or until the file or the connection is closed. They are
    /// the contents of the file while the word at [`Reply::slot`] has the value [`Reply::stamp`], and for at most
    /// [`Reply::valid_ns`] after the request.
    ///
    /// If `len` is not 0, extents in files of the backing are listed too. The reply then carries the descriptors of at
    /// most `len` files (`SCM_RIGHTS`), and never more than [`FILES_MAX`]. A list from an offset beyond the end of the
    /// file is empty: a client requests it only to learn whether an earlier list is still valid.
    Extents = 5,
    /// Ends the use of the extents of this open file.
    EndRead = 6,

    // The following requests are for stubs, which the kernel cannot read or write for a process.
    /// Adopts an open stub. The packet carries its descriptor (`SCM_RIGHTS`), and `arg` has the flags of its open(2).
    /// `len` is [`ADOPT_AGAIN`] if the client had a token for it before.
    ///
    /// [`Reply::file_id`] is the token for the following requests, and [`Reply::size`] is the length.
    /// [`Status::BadToken`] means that the descriptor is not of a stub.
    Adopt = 7,
    /// Announces that the descriptor is being closed, and ends the token. The reply comes when close(2) may return.
    Release = 8,
    /// Reads `len` bytes from offset `arg`. [`Reply::count`] bytes follow the reply.
    Read = 9,
    /// Writes the `len` bytes that follow the request at offset `arg`. [`Reply::count`] of them were written.
    Write = 10,
    /// Returns the length ([`Reply::size`]) and the number of 512-byte blocks ([`Reply::slot`]) of an open stub. If
    /// [`Reply::count`] is not 0, firnd has just changed the stub's times. The client must then read
    /// the attributes again.
    Attr = 11,
    /// As [`Op::Attr`], for a stub that is open or not. `token` is its inode number, and `arg` is the generation that
    /// name_to_handle_at(2) returns. [`Status::BadToken`] means that no process wrote to the stub, so the kernel has
    /// all its attributes.
    AttrOf = 12,
    /// Sets the length to `arg`, as ftruncate(2).
    Truncate = 13,
    /// Syncs the file, as fsync(2), or as fdatasync(2) if `arg` is 1.
    Sync = 14,
    /// Allocates, as fallocate(2) with the mode `arg`. The offset and the length, 8 bytes each, follow the request.
    Allocate = 15,
    /// Writes `len` bytes at the end of the file. No other client's write comes between them. [`Reply::count`] of them
    /// were written, at offset [`Reply::slot`].
    ///
    /// The bytes follow the request, or they are the first bytes of a memfd whose descriptor the packet carries
    /// (`SCM_RIGHTS`). In a memfd, `len` may exceed [`DATA_BYTES_MAX`], and an [`AppendProgress`] follows the bytes. If
    /// firnd is killed, the progress lets the client repeat the request to the next firnd.
    ///
    /// The file does not become longer than `arg` (RLIMIT_FSIZE). If it has that length already, the request fails with
    /// EFBIG.
    Append = 16,

    /// Returns a descriptor (`SCM_RIGHTS`) of the memory file that has all bytes of a file open for reading, for
    /// mmap(2). The descriptor can only be read. It shows each change of the file until the open file is closed.
    ///
    /// [`Status::Busy`] means that there is no such memory file, or that an ordinary mapping by the kernel is as fast.
    Map = 17,
}

/// [`Request::len`] of [`Op::Adopt`]: the client had a token for the stub before.
pub const ADOPT_AGAIN: u32 = 1;
/// Bound on the bytes that follow an [`Op::Write`], [`Op::Append`] or [`Op::Allocate`], or the reply to an
/// [`Op::Read`].
pub const DATA_BYTES_MAX: usize = 128 << 10;

impl Op {
    /// Decodes [`Request::op`]. Returns `None` if the number is unknown.
    pub fn from_word(word: u32) -> Option<Self> {
        use Op::*;
        let for_direct_access = [Hello, OpenWrite, Lease, EndWrite, Extents, EndRead, Map];
        let for_stubs = [
            Adopt, Release, Read, Write, Attr, AttrOf, Truncate, Sync, Allocate, Append,
        ];
        for_direct_access
            .into_iter()
            .chain(for_stubs)
            .find(|op| *op as u32 == word)
    }
}

/// The result of a request, in [`Reply::status`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// The request succeeded.
    Ok = 0,
    /// firnd has another version of the messages.
    Version = 1,
    /// The token names no open file, or the file is not open in the needed way.
    BadToken = 2,
    /// Direct access is not possible now: other processes have the file open, it has set-id bits, or the policy of the
    /// mount forbids it. Ordinary system calls on the file work.
    Busy = 3,
    /// The arena has no room now.
    Full = 4,
    /// The request is not valid. firnd closes the connection.
    Malformed = 5,
    /// The request failed with [`Reply::errno`].
    Failed = 6,
}

impl Status {
    /// Decodes the word of a reply. An unknown word counts as [`Status::Malformed`].
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
    /// The [`Op`].
    pub op: u32,
    /// Number of bytes that follow the request, or that it requests, unless the [`Op`] defines another meaning;
    /// otherwise 0.
    pub len: u32,
    /// Token of the open file.
    pub token: u64,
    /// Argument, described at each [`Op`].
    pub arg: u64,
}

impl Request {
    /// Makes a request without bytes.
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

/// A reply, or its first part.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Reply {
    /// The [`Status`].
    pub status: u32,
    /// Number of extents, slabs or bytes that follow.
    pub count: u32,
    /// [`Op::OpenWrite`]: file id, for piece records.
    pub file_id: u64,
    /// [`Op::OpenWrite`], [`Op::Extents`]: length of the file in bytes.
    pub size: u64,
    /// [`Op::Extents`]: offset of the file's word from the start of the arena.
    pub slot: u64,
    /// [`Op::Extents`]: value of the file's word while the extents are valid.
    pub stamp: u32,
    /// [`Status::Failed`]: the errno.
    pub errno: u32,
    /// [`Op::Lease`], [`Op::OpenWrite`]: the first leased slab.
    pub lease: Slab,
    /// [`Op::Extents`]: offset in the file up to which all extents are listed.
    pub end: u64,
    /// [`Op::Extents`]: for how many nanoseconds the list is valid; 0 means as long as the word keeps its value.
    pub valid_ns: u64,
}

/// A leased slab: where its data and its records lie.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Slab {
    /// Offset of the chunk's data from the start of the arena.
    pub chunk: u64,
    /// Offset of the first piece record of this lease from the start of the arena.
    pub records: u64,
    /// Offset, from the start of the arena, of the word that a writer holds while it stores bytes
    /// (`slab_word::WRITER`).
    pub writer: u64,
    /// Generation of the lease, which the seals of its records cover.
    pub generation: u64,
    /// Sequence of the first record. Each further record has the next sequence.
    pub sequence: u64,
    /// Start of the slab, relative to the start of the chunk.
    pub start: u32,
    /// End of the slab, relative to the start of the chunk.
    pub end: u32,
    /// Number of piece records.
    pub record_count: u32,
    /// Unused; 0.
    pub reserved: u32,
    /// Time of the file's last write, in nanoseconds since 1970. The writer records only later times.
    pub modified: u64,
}

/// Progress of an [`Op::Append`] whose bytes come in a memfd. It lies after the bytes.
///
/// firnd records its progress here, so that the next firnd does not store the bytes twice. If it is all zeros, or the
/// memfd ends before it, nothing was stored.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct AppendProgress {
    /// Offset of the first byte in the file, plus one. Recorded before the byte is stored, while the file is locked
    /// against other changes.
    pub place: u64,
    /// Number of bytes that were stored, plus one. Recorded after the last byte, before the file is unlocked.
    pub count: u64,
}

/// Description of a stub tree for the preload library: the file `KEY.stub` in the runtime directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct StubTree {
    /// [`STUB_MAGIC`].
    pub magic: u64,
    /// Major device number of the stubs.
    pub device_major: u32,
    /// Minor device number of the stubs.
    pub device_minor: u32,
    /// Not 0 if every regular file of that device is a stub. Otherwise only files below `prefix` are.
    pub whole_device: u32,
    /// Process id of firnd, for messages.
    pub pid: u32,
    /// Not 0 if other hosts use the files too. A lock of a stub would exclude only programs of this host, so it is
    /// refused.
    pub refuses_locks: u32,
    /// Unused; 0.
    pub unused: u32,
    /// UUID of the arena.
    pub arena: [u8; 16],
    /// Path of the data socket, ended by a zero byte.
    pub socket: [u8; 112],
    /// Canonical path of the stub tree, ended by a zero byte.
    pub prefix: [u8; PATH_BYTES],
    /// Canonical path of the backing, ended by a zero byte.
    pub backing: [u8; PATH_BYTES],
}

/// Bound on the length of a path (`PATH_MAX`).
pub const PATH_BYTES: usize = 4096;
/// "FIRNSTB" and the version of [`StubTree`].
pub const STUB_MAGIC: u64 = u64::from_le_bytes(*b"FIRNSTB\x02");

/// Description of the arena. It follows the [`Reply`] to [`Op::Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Arena {
    /// UUID of the arena.
    pub uuid: [u8; 16],
    /// Length of the arena's file in bytes.
    pub file_bytes: u64,
    /// Offset of the part that a client maps read-only. It contains the files' words ([`Reply::slot`]).
    pub words_offset: u64,
    /// Length of that part in bytes.
    pub words_bytes: u64,
    /// Offset of the part that a client maps for reading and writing: piece tables and chunks, up to the end of the
    /// file.
    pub shared_offset: u64,
    /// Size of the pages that back the data, as far as firnd knows.
    pub page_bytes: u64,
    /// Length of a chunk in bytes.
    pub chunk_bytes: u64,
}

/// Writes that end beyond this offset are made by system calls. firnd then asks the backing whether it can hold such a
/// file, so that write(2) returns EFBIG.
pub const OFFSET_MAX: u64 = 1 << 40;

/// Bound on the slabs that one reply leases. A writer that fills chunks of 4 MiB sends one request for each 16 MiB.
pub const LEASE_SLABS_MAX: usize = 4;

/// Bound on the extents in one reply.
pub const EXTENTS_MAX: usize = 1024;

/// Bound on the descriptors of files of the backing in one reply.
pub const FILES_MAX: usize = 32;

/// A part of a file, and where its bytes lie: in the arena, in the spill file, in a memory file or in a file of the
/// backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Extent {
    /// Offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset from the start of the arena, or of the file named by `place`.
    pub at: u64,
    /// Index of the chunk, or of the descriptor among those that came with the reply.
    pub chunk: u32,
    /// Where the bytes lie: [`IN_MEMORY`], [`IN_SPILL`], [`IN_BACKING`], [`TO_BE_ASKED`] or [`IN_MEMORY_FILE`].
    pub place: u32,
}

/// [`Extent::place`]: in the arena.
pub const IN_MEMORY: u32 = 0;
/// [`Extent::place`]: in the spill file.
pub const IN_SPILL: u32 = 1;
/// [`Extent::place`]: in a file of the backing.
pub const IN_BACKING: u32 = 2;
/// [`Extent::place`]: not listed. A request from an offset in this extent lists it. [`Extent::at`] is unused.
pub const TO_BE_ASKED: u32 = 3;
/// [`Extent::place`]: in a memory file.
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
