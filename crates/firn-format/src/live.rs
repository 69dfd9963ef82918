//! The live table: a file with what the kernel knows of a FUSE mount. If firnd, the process that serves the mount,
//! dies, the next firnd reads the table and continues the mount. This is a *takeover*.
//!
//! ```text
//! 0      header, two pages: arena, connection, mount point, FUSE_INIT and its reply
//! 8128   counters ([`word`]), which change while the mount exists
//! 8192   cells of 128 bytes
//! ```
//!
//! An *entry* is one thing that the kernel knows: a node (a file or directory), an open handle, a request in progress,
//! a transaction, the directory of an aborted transaction, or a file lock. It lies in one *cell*. A node with a long
//! name has further cells for the rest of the name.
//!
//! A cell counts if its first word, the *seal*, is the CRC32C of the bytes after it. A seal of 0 means that the cell is
//! free.
//!
//! Race: firnd may die while it writes a cell. The cell then does not count. Nothing is lost by that, because a cell is
//! complete before the kernel gets the reply that depends on it.

use std::cmp::Reverse;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// First bytes of the file.
pub const MAGIC: [u8; 8] = *b"FIRNLIVE";
/// Version of the table. It is raised when a byte changes its meaning.
pub const VERSION: u32 = 4;
/// Number of bytes before the first cell.
pub const HEADER_BYTES: usize = 8192;
/// Length of a cell in bytes.
pub const CELL_BYTES: usize = 128;
/// Offset of the counters, the words of the table that change ([`word`]).
pub const WORDS_AT: usize = HEADER_BYTES - 64;
/// Bound on the length of an INIT message with its header. The kernel's has 104 bytes, the reply 80.
pub const INIT_BYTES_MAX: usize = 256;
/// Bound on the length of a path (PATH_MAX of Linux).
pub const PATH_BYTES_MAX: usize = 4096;
/// Bound on the length of a name (NAME_MAX of Linux).
pub const NAME_BYTES_MAX: usize = 255;
/// Number of bytes of a name that lie in the node's own cell.
const NAME_HEAD_BYTES: usize = 56;
/// Number of bytes of a name in each further cell.
const NAME_PART_BYTES: usize = 112;
/// Number of further cells of the longest name.
pub const NAME_PARTS_MAX: usize = (NAME_BYTES_MAX - NAME_HEAD_BYTES).div_ceil(NAME_PART_BYTES);

/// Offsets of the counters, from [`WORDS_AT`].
pub mod word {
    /// `u64`: number of times that a firnd took over the mount.
    pub const TAKEOVERS: usize = 0;
    /// `u64`: how long programs waited at the last takeover, in nanoseconds.
    pub const LAST_PAUSE: usize = 8;
    /// `u64`: how long programs waited at all takeovers, in nanoseconds.
    pub const PAUSES: usize = 16;
    /// `u64`: number of entries that could not be recorded, because no cell was free. A takeover does not know them.
    pub const LOST: usize = 24;
}

/// Why a live table cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LiveError {
    /// The file is too short, or has another magic number.
    #[error("the file is not a table of open files")]
    Magic,
    /// Another version of Firn made the table.
    #[error("its version is {found}, and this firn reads version {wanted}", wanted = VERSION)]
    Version {
        /// Version in the file.
        found: u32,
    },
    /// The header was changed, or was not written to its end.
    #[error("its header is damaged or incomplete")]
    Damaged,
}

/// The header: what applies to the whole table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// UUID of the arena to which the table belongs.
    pub arena: [u8; 16],
    /// Device number of the mounted file system.
    pub device: Device,
    /// Canonical path of the mount point.
    pub mount_point: Vec<u8>,
    /// The INIT request and its reply.
    pub exchange: InitExchange,
}

/// A device number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// Major number.
    pub major: u32,
    /// Minor number. For a FUSE mount it is the number of its connection.
    pub minor: u32,
}

/// The first request of a connection and its reply, with the bytes that went over the device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InitExchange {
    /// The kernel's INIT request.
    pub asked: Vec<u8>,
    /// The reply to it.
    pub answered: Vec<u8>,
}

/// The header as it is stored.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 8],
    version: u32,
    /// CRC32C of all bytes from [`SEALED_FROM`] on.
    seal: u32,
    arena: [u8; 16],
    major: u32,
    minor: u32,
    mount_point_len: u32,
    asked_len: u32,
    answered_len: u32,
    unused: u32,
    asked: [u8; INIT_BYTES_MAX],
    answered: [u8; INIT_BYTES_MAX],
    mount_point: [u8; PATH_BYTES_MAX],
}

const _: () = assert!(size_of::<RawHeader>() <= WORDS_AT);
/// Offset of the first byte that the header's seal covers.
const SEALED_FROM: usize = 16;

impl Header {
    /// Encodes the header with its seal, the checksum that makes it count. Returns `None` if one of its parts is too
    /// long for its field.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let mut raw = RawHeader {
            magic: MAGIC,
            version: VERSION,
            seal: 0,
            arena: self.arena,
            major: self.device.major,
            minor: self.device.minor,
            mount_point_len: self.mount_point.len() as u32,
            asked_len: self.exchange.asked.len() as u32,
            answered_len: self.exchange.answered.len() as u32,
            unused: 0,
            asked: [0; INIT_BYTES_MAX],
            answered: [0; INIT_BYTES_MAX],
            mount_point: [0; PATH_BYTES_MAX],
        };
        copy_into(&mut raw.asked, &self.exchange.asked)?;
        copy_into(&mut raw.answered, &self.exchange.answered)?;
        copy_into(&mut raw.mount_point, &self.mount_point)?;
        raw.seal = crc32c::crc32c(&raw.as_bytes()[SEALED_FROM..]);
        Some(raw.as_bytes().to_vec())
    }

    /// Decodes the header from the first bytes of a file. Fails if the file is no live table, is of another version, or
    /// if the seal, the header's checksum, does not match.
    pub fn decode(bytes: &[u8]) -> Result<Self, LiveError> {
        let (raw, _) = RawHeader::read_from_prefix(bytes).map_err(|_| LiveError::Magic)?;
        if raw.magic != MAGIC {
            return Err(LiveError::Magic);
        }
        if raw.version != VERSION {
            return Err(LiveError::Version { found: raw.version });
        }
        if raw.seal != crc32c::crc32c(&raw.as_bytes()[SEALED_FROM..]) {
            return Err(LiveError::Damaged);
        }
        let used_bytes = |field: &[u8], len: u32| match field.get(..len as usize) {
            Some(bytes) => Ok(bytes.to_vec()),
            None => Err(LiveError::Damaged),
        };
        Ok(Self {
            arena: raw.arena,
            device: Device {
                major: raw.major,
                minor: raw.minor,
            },
            mount_point: used_bytes(&raw.mount_point, raw.mount_point_len)?,
            exchange: InitExchange {
                asked: used_bytes(&raw.asked, raw.asked_len)?,
                answered: used_bytes(&raw.answered, raw.answered_len)?,
            },
        })
    }
}

/// Copies `bytes` to the beginning of `field`. Returns `None` if they do not fit.
fn copy_into(field: &mut [u8], bytes: &[u8]) -> Option<()> {
    field.get_mut(..bytes.len())?.copy_from_slice(bytes);
    Some(())
}

/// A point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileTime {
    /// Seconds since 1970.
    pub sec: i64,
    /// Nanoseconds, below 10^9.
    pub nsec: u32,
}

/// Value of the nanoseconds that stands for an unknown time.
const UNKNOWN_TIME_NS: u32 = u32::MAX;

/// The identity of an object in the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectIdentity {
    /// Device number.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// Birth time, if the backing records it.
    pub birth: Option<FileTime>,
}

/// An object that the kernel names by a node id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The node id.
    pub id: u64,
    /// Node id of the directory that has its name; 0 if it has no name any more.
    pub parent: u64,
    /// The object in the backing.
    pub object: ObjectIdentity,
    /// Kind of the object, as the engine numbers it.
    pub kind: u8,
    /// Number of this version of the node. If firnd died during a rename, a node may have two cells; the higher number
    /// is newer.
    pub generation: u32,
    /// Number of look-ups that the kernel counts. The seal does not cover it, because it is stored separately.
    pub lookups: u64,
    /// The name in the parent directory.
    pub name: Vec<u8>,
}

/// What serves the reads and writes of an open handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServedBy {
    /// Firn serves each request.
    Engine,
    /// The kernel serves reads from its page cache.
    Cache,
    /// The kernel reads and writes a file that is registered under this number: a file of the backing, or a memory
    /// file.
    Passthrough(i32),
    /// The handle is of an open directory.
    Directory,
}

/// An open file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    /// Handle id of the kernel.
    pub id: u64,
    /// Id of the handle's [`Node`].
    pub node: u64,
    /// Number of the request that opened it.
    pub unique: u64,
    /// Flags of open(2).
    pub flags: i32,
    /// What serves reads and writes.
    pub served_by: ServedBy,
    /// Number of the memory file that the kernel, or a mapping of the process, reads; `None` if there is none.
    pub view: Option<u16>,
    /// Id of the thread that opened it; 0 if unknown.
    pub opener: u32,
    /// Whether firnd has answered the kernel's release of the handle, and has not ended the handle yet.
    pub is_released: bool,
}

/// A request in progress that must not take effect twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Number of the request.
    pub unique: u64,
    /// When it began, by the clock of file times.
    pub began: FileTime,
    /// The object that the request's name led to when it began, if there was one.
    pub subject: Option<ObjectIdentity>,
    /// The object that the request's second name led to when it began, if there was one.
    pub other: Option<ObjectIdentity>,
    /// Id of the node that the request changes; 0 if its names identify what it changes. The node is in the table as
    /// long as the request.
    pub node: u64,
    /// Offset at which the request may have written, if it appends under a lock of the file's end.
    pub append_offset: Option<u64>,
    /// Whether all bytes of the append are written.
    pub is_append_done: bool,
}

/// A file lock that firnd holds for a program, and that also excludes programs of other hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileLock {
    /// Inode number of the locked file.
    pub file: u64,
    /// Inode number of the lock file, whose descriptor the keeper of the mount has.
    pub lock_file: u64,
    /// Kind of the lock, as a number of `firn-hosts`.
    pub kind: u8,
    /// Whether the lock excludes all other locks.
    pub is_exclusive: bool,
    /// Number of the lock's owner.
    pub owner: u64,
    /// Id of the handle through which the lock was taken.
    pub handle: u64,
    /// Process id of the owner.
    pub pid: u32,
    /// First locked byte.
    pub first: u64,
    /// Last locked byte.
    pub last: u64,
}

/// A transaction in which programs are working, or that is prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transaction {
    /// Number of the transaction in the backing.
    pub serial: u64,
    /// The owner of the transaction. When the owner ends, the transaction is aborted.
    pub owner: TransactionOwner,
    /// Whether an abort has begun, so that the next firnd must not resume the transaction.
    pub is_ending: bool,
}

/// The owner of a transaction. When the owner ends, the transaction is aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransactionOwner {
    /// The transaction has no owner. Only a request ends it.
    Unowned,
    /// A process. Its start distinguishes it from a later process with the same id.
    Process {
        /// Process id.
        pid: u32,
        /// When the process started, in ticks since the host booted.
        start_ticks: u64,
    },
    /// A connection of an unknown process to the firnd that died.
    Connection,
}

/// Length and checksum of a path: enough to recognize the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathSum {
    /// Length in bytes.
    pub len: u32,
    /// CRC32C of the path.
    pub sum: u32,
}

impl PathSum {
    /// Computes the sum of a path relative to the backing.
    pub fn from_path(path: &[u8]) -> Self {
        Self {
            len: path.len() as u32,
            sum: crc32c::crc32c(path),
        }
    }
}

/// The scope of a transaction that was aborted because its firnd died, or a process that was informed of the abort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UndoneScope {
    /// Path of the scope, or key of the checkpoint of a commit rule. All files of a checkpoint have the same key.
    pub path: PathSum,
    /// When firnd died, in clock ticks since the host started. A process that began later was not in the transaction.
    pub died_ticks: u64,
    /// The process that was informed, or [`ALL_PROCESSES`]; `None` in the entry of the scope itself.
    pub informed: Option<u32>,
}

/// Stands for all processes in [`UndoneScope::informed`]: a request about the aborted transaction was refused, and by
/// that the programs were informed.
pub const ALL_PROCESSES: u32 = u32::MAX;

impl UndoneScope {
    /// Returns whether a path is the path of the scope, or lies below it.
    pub fn covers(&self, path: &[u8]) -> bool {
        let scope_len = self.path.len as usize;
        // The scope's path ends at the end of a component. An empty path is the whole backing.
        let ends_at_component =
            scope_len == 0 || path.len() == scope_len || path.get(scope_len) == Some(&b'/');
        ends_at_component && path.get(..scope_len).map(PathSum::from_path) == Some(self.path)
    }
}

/// The decoded contents of a cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cell {
    /// A node. A long name continues in further cells.
    Node {
        /// The node, with the part of its name that lies in this cell.
        node: Node,
        /// Length of the whole name.
        name_len: u16,
        /// CRC32C of the whole name.
        name_sum: u32,
        /// Index of the next cell of the name.
        next_cell: Option<u32>,
    },
    /// A part of a name.
    Name {
        /// The part.
        bytes: Vec<u8>,
        /// Index of the next cell of the name.
        next_cell: Option<u32>,
    },
    /// An open handle.
    Handle(Handle),
    /// A request in progress.
    Request(Request),
    /// A transaction.
    Transaction(Transaction),
    /// The scope of an aborted transaction, or a process that was informed of the abort.
    UndoneScope(UndoneScope),
    /// A file lock.
    FileLock(FileLock),
}

/// A cell in its stored form.
pub type CellBytes = [u8; CELL_BYTES];

const TAG_NODE: u8 = 0x4e;
const TAG_NAME: u8 = 0x61;
const TAG_HANDLE: u8 = 0x48;
const TAG_REQUEST: u8 = 0x52;
const TAG_TRANSACTION: u8 = 0x54;
const TAG_UNDONE_SCOPE: u8 = 0x55;
const TAG_FILE_LOCK: u8 = 0x4c;

/// Values of [`RawHandle::served_by`].
const SERVED_BY_ENGINE: u8 = 1;
const SERVED_BY_CACHE: u8 = 2;
const SERVED_BY_PASSTHROUGH: u8 = 3;
const SERVED_BY_DIRECTORY: u8 = 4;

/// Values of [`RawTransaction::owner`].
const OWNER_NONE: u8 = 1;
const OWNER_PROCESS: u8 = 2;
const OWNER_CONNECTION: u8 = 3;

/// Length of the seal at the start of a cell.
const SEAL_BYTES: usize = 4;
/// Offset of the tag, which says what the cell contains.
const TAG_AT: usize = SEAL_BYTES;
/// Offset of the count of look-ups in a node's cell.
pub const LOOKUPS_AT: usize = 56;
/// Length of that count.
const LOOKUPS_BYTES: usize = 8;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawIdentity {
    dev: u64,
    ino: u64,
    birth_s: i64,
    birth_ns: u32,
    is_known: u32,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawNode {
    seal: u32,
    tag: u8,
    kind: u8,
    name_len: u16,
    id: u64,
    parent: u64,
    dev: u64,
    ino: u64,
    birth_s: i64,
    birth_ns: u32,
    generation: u32,
    /// [`LOOKUPS_AT`].
    lookups: u64,
    /// Index of the next cell of the name, as [`encode_next_cell`] encodes it.
    next_cell: u32,
    name_sum: u32,
    name: [u8; NAME_HEAD_BYTES],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawName {
    seal: u32,
    tag: u8,
    len: u8,
    unused: u16,
    /// Index of the next cell of the name, as [`encode_next_cell`] encodes it.
    next_cell: u32,
    unused_2: u32,
    bytes: [u8; NAME_PART_BYTES],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawHandle {
    seal: u32,
    tag: u8,
    served_by: u8,
    /// Number of the memory file, as [`encode_view`] encodes it.
    view: u16,
    id: u64,
    node: u64,
    unique: u64,
    flags: i32,
    backing_id: i32,
    opener: u32,
    is_released: u32,
    padding: [u8; 80],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawRequest {
    seal: u32,
    tag: u8,
    /// 1: `append_offset` is valid.
    appends: u8,
    is_append_done: u16,
    unique: u64,
    began_s: i64,
    began_ns: u32,
    unused: u32,
    subject: RawIdentity,
    other: RawIdentity,
    node: u64,
    append_offset: u64,
    padding: [u8; 16],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawTransaction {
    seal: u32,
    tag: u8,
    /// 1: unowned, 2: a process, 3: a connection.
    owner: u8,
    is_ending: u8,
    unused: u8,
    serial: u64,
    start_ticks: u64,
    pid: u32,
    unused_2: u32,
    padding: [u8; 96],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawUndoneScope {
    seal: u32,
    tag: u8,
    /// 1: a process that was informed, 0: the scope itself.
    is_informed: u8,
    unused: u16,
    died_ticks: u64,
    path_len: u32,
    path_sum: u32,
    informed: u32,
    unused_2: u32,
    padding: [u8; 96],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawFileLock {
    seal: u32,
    tag: u8,
    kind: u8,
    is_exclusive: u8,
    unused: u8,
    file: u64,
    lock_file: u64,
    owner: u64,
    handle: u64,
    first: u64,
    last: u64,
    pid: u32,
    unused_2: u32,
    padding: [u8; 64],
}

const _: () = assert!(size_of::<RawFileLock>() == CELL_BYTES);
const _: () = assert!(size_of::<RawUndoneScope>() == CELL_BYTES);
const _: () = assert!(size_of::<RawTransaction>() == CELL_BYTES);
const _: () = assert!(size_of::<RawNode>() == CELL_BYTES);
const _: () = assert!(std::mem::offset_of!(RawNode, lookups) == LOOKUPS_AT);
const _: () = assert!(size_of::<RawName>() == CELL_BYTES);
const _: () = assert!(size_of::<RawHandle>() == CELL_BYTES);
const _: () = assert!(size_of::<RawRequest>() == CELL_BYTES);

impl RawIdentity {
    /// Encodes the identity of an object of the file system, or that no object is known.
    fn encode(identity: Option<ObjectIdentity>) -> Self {
        let Some(identity) = identity else {
            return Self {
                dev: 0,
                ino: 0,
                birth_s: 0,
                birth_ns: UNKNOWN_TIME_NS,
                is_known: 0,
            };
        };
        let birth = encode_birth(identity.birth);
        Self {
            dev: identity.dev,
            ino: identity.ino,
            birth_s: birth.sec,
            birth_ns: birth.nsec,
            is_known: 1,
        }
    }

    /// Decodes the identity. Returns `None` if no object is known.
    fn decode(&self) -> Option<ObjectIdentity> {
        if self.is_known != 1 {
            return None;
        }
        Some(ObjectIdentity {
            dev: self.dev,
            ino: self.ino,
            birth: decode_time(self.birth_s, self.birth_ns),
        })
    }
}

/// A time as it is stored.
struct StoredTime {
    sec: i64,
    /// [`UNKNOWN_TIME_NS`] if the time is unknown.
    nsec: u32,
}

/// Encodes a birth time, which may be unknown.
fn encode_birth(birth: Option<FileTime>) -> StoredTime {
    match birth {
        Some(FileTime { sec, nsec }) => StoredTime { sec, nsec },
        None => StoredTime {
            sec: 0,
            nsec: UNKNOWN_TIME_NS,
        },
    }
}

/// Decodes a time. Returns `None` if it is unknown or not valid.
fn decode_time(sec: i64, nsec: u32) -> Option<FileTime> {
    (nsec < 1_000_000_000).then_some(FileTime { sec, nsec })
}

/// Encodes the index of a name's next cell: the index plus one, or 0 if there is none.
fn encode_next_cell(next_cell: Option<u32>) -> u32 {
    next_cell.map_or(0, |index| index + 1)
}

/// Decodes what [`encode_next_cell`] returns.
fn decode_next_cell(word: u32) -> Option<u32> {
    word.checked_sub(1)
}

/// Encodes the number of a memory file: the number plus one, or 0 if there is none.
fn encode_view(view: Option<u16>) -> u16 {
    view.map_or(0, |number| number.saturating_add(1))
}

/// Decodes what [`encode_view`] returns.
fn decode_view(word: u16) -> Option<u16> {
    word.checked_sub(1)
}

/// Computes the checksum of a cell: of all bytes after the seal, except the count of look-ups.
fn cell_checksum(cell: &CellBytes) -> u32 {
    let checksum = if cell[TAG_AT] == TAG_NODE {
        let checksum_of_head = crc32c::crc32c(&cell[SEAL_BYTES..LOOKUPS_AT]);
        crc32c::crc32c_append(checksum_of_head, &cell[LOOKUPS_AT + LOOKUPS_BYTES..])
    } else {
        crc32c::crc32c(&cell[SEAL_BYTES..])
    };
    // A seal of 0 means that the cell is free.
    checksum.max(1)
}

/// Returns the cell with its seal set.
fn seal_cell(bytes: &[u8]) -> CellBytes {
    let mut cell = [0; CELL_BYTES];
    cell.copy_from_slice(bytes);
    let seal = cell_checksum(&cell);
    cell[..SEAL_BYTES].copy_from_slice(&seal.to_ne_bytes());
    cell
}

/// Returns the number of cells of a node whose name has `len` bytes, including its first cell.
pub fn cells_of_name(len: usize) -> usize {
    1 + len
        .saturating_sub(NAME_HEAD_BYTES)
        .div_ceil(NAME_PART_BYTES)
}

/// Encodes a node, a file or directory that the kernel knows, into its cells. `indexes` are the places of the cells in
/// the table, as many as [`cells_of_name`] returns. Each cell has a link to the next one.
///
/// The first cell is the node's own. The others hold parts of its name. The caller stores the first cell last, because
/// the node counts from then on.
pub fn encode_node(node: &Node, indexes: &[u32]) -> Vec<CellBytes> {
    debug_assert_eq!(indexes.len(), cells_of_name(node.name.len()));
    let link_after = |cell: usize| encode_next_cell(indexes.get(cell + 1).copied());
    let (name_head, name_tail) = node.name.split_at(node.name.len().min(NAME_HEAD_BYTES));
    let mut name = [0; NAME_HEAD_BYTES];
    name[..name_head.len()].copy_from_slice(name_head);
    let birth = encode_birth(node.object.birth);
    let node_cell = RawNode {
        seal: 0,
        tag: TAG_NODE,
        kind: node.kind,
        name_len: node.name.len() as u16,
        id: node.id,
        parent: node.parent,
        dev: node.object.dev,
        ino: node.object.ino,
        birth_s: birth.sec,
        birth_ns: birth.nsec,
        generation: node.generation,
        lookups: node.lookups,
        next_cell: link_after(0),
        name_sum: crc32c::crc32c(&node.name),
        name,
    };
    let mut cells = vec![seal_cell(node_cell.as_bytes())];
    for part in name_tail.chunks(NAME_PART_BYTES) {
        let mut bytes = [0; NAME_PART_BYTES];
        bytes[..part.len()].copy_from_slice(part);
        let cell = cells.len();
        let name_cell = RawName {
            seal: 0,
            tag: TAG_NAME,
            len: part.len() as u8,
            unused: 0,
            next_cell: link_after(cell),
            unused_2: 0,
            bytes,
        };
        cells.push(seal_cell(name_cell.as_bytes()));
    }
    cells
}

impl Handle {
    /// Encodes the open handle into a cell, a record of 128 bytes. Its first word is the seal, the checksum of the
    /// rest.
    pub fn encode(&self) -> CellBytes {
        let (served_by, backing_id) = match self.served_by {
            ServedBy::Engine => (SERVED_BY_ENGINE, 0),
            ServedBy::Cache => (SERVED_BY_CACHE, 0),
            ServedBy::Passthrough(backing_id) => (SERVED_BY_PASSTHROUGH, backing_id),
            ServedBy::Directory => (SERVED_BY_DIRECTORY, 0),
        };
        let raw = RawHandle {
            // `seal_cell` computes it.
            seal: 0,
            tag: TAG_HANDLE,
            served_by,
            view: encode_view(self.view),
            id: self.id,
            node: self.node,
            unique: self.unique,
            flags: self.flags,
            backing_id,
            opener: self.opener,
            is_released: self.is_released.into(),
            padding: [0; 80],
        };
        seal_cell(raw.as_bytes())
    }
}

impl Request {
    /// Encodes the request in progress into a cell, a record of 128 bytes. Its first word is the seal, the checksum of
    /// the rest. A request that is no append has the offset 0.
    pub fn encode(&self) -> CellBytes {
        let raw = RawRequest {
            // `seal_cell` computes it.
            seal: 0,
            tag: TAG_REQUEST,
            appends: self.append_offset.is_some().into(),
            is_append_done: self.is_append_done.into(),
            unique: self.unique,
            began_s: self.began.sec,
            began_ns: self.began.nsec,
            unused: 0,
            subject: RawIdentity::encode(self.subject),
            other: RawIdentity::encode(self.other),
            node: self.node,
            append_offset: self.append_offset.unwrap_or_default(),
            padding: [0; 16],
        };
        seal_cell(raw.as_bytes())
    }
}

impl Transaction {
    /// Encodes the transaction into a cell, a record of 128 bytes. Its first word is the seal, the checksum of the
    /// rest.
    pub fn encode(&self) -> CellBytes {
        let (owner, pid, start_ticks) = match self.owner {
            TransactionOwner::Unowned => (OWNER_NONE, 0, 0),
            TransactionOwner::Process { pid, start_ticks } => (OWNER_PROCESS, pid, start_ticks),
            TransactionOwner::Connection => (OWNER_CONNECTION, 0, 0),
        };
        let raw = RawTransaction {
            // `seal_cell` computes it.
            seal: 0,
            tag: TAG_TRANSACTION,
            owner,
            is_ending: self.is_ending.into(),
            unused: 0,
            serial: self.serial,
            start_ticks,
            pid,
            unused_2: 0,
            padding: [0; 96],
        };
        seal_cell(raw.as_bytes())
    }
}

impl UndoneScope {
    /// Encodes the scope, or a process that was informed, into a cell.
    pub fn encode(&self) -> CellBytes {
        let raw = RawUndoneScope {
            seal: 0,
            tag: TAG_UNDONE_SCOPE,
            is_informed: self.informed.is_some().into(),
            unused: 0,
            died_ticks: self.died_ticks,
            path_len: self.path.len,
            path_sum: self.path.sum,
            informed: self.informed.unwrap_or_default(),
            unused_2: 0,
            padding: [0; 96],
        };
        seal_cell(raw.as_bytes())
    }
}

impl FileLock {
    /// Encodes the file lock into a cell, a record of 128 bytes. Its first word is the seal, the checksum of the rest.
    pub fn encode(&self) -> CellBytes {
        let raw = RawFileLock {
            // `seal_cell` computes it.
            seal: 0,
            tag: TAG_FILE_LOCK,
            kind: self.kind,
            is_exclusive: self.is_exclusive.into(),
            unused: 0,
            file: self.file,
            lock_file: self.lock_file,
            owner: self.owner,
            handle: self.handle,
            first: self.first,
            last: self.last,
            pid: self.pid,
            unused_2: 0,
            padding: [0; 64],
        };
        seal_cell(raw.as_bytes())
    }
}

/// Error for a cell that is neither free nor valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DamagedCell;

/// Decodes a cell, a record of fixed size that begins with a seal, the checksum of the rest. Returns `None` if the cell
/// is free. Fails if the seal does not match, or the cell holds no valid entry.
pub fn decode_cell(cell: &CellBytes) -> Result<Option<Cell>, DamagedCell> {
    let seal = u32::from_ne_bytes([cell[0], cell[1], cell[2], cell[3]]);
    if seal == 0 {
        return Ok(None);
    }
    if seal != cell_checksum(cell) {
        return Err(DamagedCell);
    }
    let decoded = match cell[TAG_AT] {
        TAG_NODE => decode_node(cell),
        TAG_NAME => decode_name(cell),
        TAG_HANDLE => decode_handle(cell),
        TAG_REQUEST => decode_request(cell),
        TAG_TRANSACTION => decode_transaction(cell),
        TAG_UNDONE_SCOPE => decode_undone_scope(cell),
        TAG_FILE_LOCK => decode_file_lock(cell),
        _ => None,
    };
    decoded.map(Some).ok_or(DamagedCell)
}

/// Decodes the first cell of a node, a file or directory that the kernel knows. It has only the first part of a long
/// name. Returns `None` if the cell is not valid: if its length of the name contradicts its link to further cells, for
/// example.
fn decode_node(cell: &CellBytes) -> Option<Cell> {
    let raw = RawNode::read_from_bytes(cell).ok()?;
    let name_len = usize::from(raw.name_len);
    let next_cell = decode_next_cell(raw.next_cell);
    let is_name_long = name_len > NAME_HEAD_BYTES;
    if name_len > NAME_BYTES_MAX || next_cell.is_some() != is_name_long || raw.id == 0 {
        return None;
    }
    let head_len = name_len.min(NAME_HEAD_BYTES);
    let node = Node {
        id: raw.id,
        parent: raw.parent,
        object: ObjectIdentity {
            dev: raw.dev,
            ino: raw.ino,
            birth: decode_time(raw.birth_s, raw.birth_ns),
        },
        kind: raw.kind,
        generation: raw.generation,
        lookups: raw.lookups,
        name: raw.name[..head_len].to_vec(),
    };
    Some(Cell::Node {
        node,
        name_len: raw.name_len,
        name_sum: raw.name_sum,
        next_cell,
    })
}

/// Decodes a cell with a part of a name. Returns `None` if it is not valid.
fn decode_name(cell: &CellBytes) -> Option<Cell> {
    let raw = RawName::read_from_bytes(cell).ok()?;
    Some(Cell::Name {
        bytes: raw.bytes.get(..usize::from(raw.len))?.to_vec(),
        next_cell: decode_next_cell(raw.next_cell),
    })
}

/// Decodes the cell of an open handle. Returns `None` if it is not valid. The caller has checked the seal.
fn decode_handle(cell: &CellBytes) -> Option<Cell> {
    let raw = RawHandle::read_from_bytes(cell).ok()?;
    let served_by = match raw.served_by {
        SERVED_BY_ENGINE => ServedBy::Engine,
        SERVED_BY_CACHE => ServedBy::Cache,
        SERVED_BY_PASSTHROUGH => ServedBy::Passthrough(raw.backing_id),
        SERVED_BY_DIRECTORY => ServedBy::Directory,
        _ => return None,
    };
    Some(Cell::Handle(Handle {
        id: raw.id,
        node: raw.node,
        unique: raw.unique,
        flags: raw.flags,
        served_by,
        view: decode_view(raw.view),
        opener: raw.opener,
        is_released: raw.is_released != 0,
    }))
}

/// Decodes the cell of a request. Returns `None` if it is not valid.
fn decode_request(cell: &CellBytes) -> Option<Cell> {
    let raw = RawRequest::read_from_bytes(cell).ok()?;
    Some(Cell::Request(Request {
        unique: raw.unique,
        began: decode_time(raw.began_s, raw.began_ns)?,
        subject: raw.subject.decode(),
        other: raw.other.decode(),
        node: raw.node,
        append_offset: (raw.appends == 1).then_some(raw.append_offset),
        is_append_done: raw.is_append_done != 0,
    }))
}

/// Decodes the cell of a transaction. Returns `None` if it is not valid. The caller has checked the seal.
fn decode_transaction(cell: &CellBytes) -> Option<Cell> {
    let raw = RawTransaction::read_from_bytes(cell).ok()?;
    let owner = match raw.owner {
        OWNER_NONE => TransactionOwner::Unowned,
        OWNER_PROCESS => TransactionOwner::Process {
            pid: raw.pid,
            start_ticks: raw.start_ticks,
        },
        OWNER_CONNECTION => TransactionOwner::Connection,
        _ => return None,
    };
    Some(Cell::Transaction(Transaction {
        serial: raw.serial,
        owner,
        is_ending: raw.is_ending != 0,
    }))
}

/// Decodes the cell of an aborted scope, or of a process that was informed of the abort.
fn decode_undone_scope(cell: &CellBytes) -> Option<Cell> {
    let raw = RawUndoneScope::read_from_bytes(cell).ok()?;
    Some(Cell::UndoneScope(UndoneScope {
        path: PathSum {
            len: raw.path_len,
            sum: raw.path_sum,
        },
        died_ticks: raw.died_ticks,
        informed: (raw.is_informed != 0).then_some(raw.informed),
    }))
}

/// Decodes the cell of a file lock. Returns `None` if it is not valid. The caller has checked the seal.
fn decode_file_lock(cell: &CellBytes) -> Option<Cell> {
    let raw = RawFileLock::read_from_bytes(cell).ok()?;
    if raw.first > raw.last {
        return None;
    }
    Some(Cell::FileLock(FileLock {
        file: raw.file,
        lock_file: raw.lock_file,
        kind: raw.kind,
        is_exclusive: raw.is_exclusive != 0,
        owner: raw.owner,
        handle: raw.handle,
        pid: raw.pid,
        first: raw.first,
        last: raw.last,
    }))
}

/// The contents of a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// The nodes. A node may occur twice, with two generations.
    pub nodes: Vec<Stored<Node>>,
    /// The open handles.
    pub handles: Vec<Stored<Handle>>,
    /// The requests in progress.
    pub requests: Vec<Stored<Request>>,
    /// The transactions. A transaction may occur twice. It is ending if one of its two entries is.
    pub transactions: Vec<Stored<Transaction>>,
    /// Aborted scopes, and the processes that were informed.
    pub undone_scopes: Vec<Stored<UndoneScope>>,
    /// File locks. If firnd died while it changed an owner's locks, those from before and those from after may both be
    /// here.
    pub file_locks: Vec<Stored<FileLock>>,
    /// Number of damaged cells and of nodes whose name is incomplete.
    pub damaged: u64,
}

/// An entry, and the cells in which it lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored<T> {
    /// The entry.
    pub entry: T,
    /// Indexes of the cells. The first is the entry's own.
    pub cells: Vec<u32>,
}

/// Decodes all cells of a live table, in which firnd records what the kernel knows of the mount. `bytes` begins at the
/// first cell; an incomplete cell at the end is ignored. Damaged cells are counted and left out.
pub fn read_contents(bytes: &[u8]) -> Contents {
    let (cells, _) = bytes.as_chunks::<CELL_BYTES>();
    let mut contents = Contents::default();
    for (index, cell_bytes) in cells.iter().enumerate() {
        let index = index as u32;
        match decode_cell(cell_bytes) {
            Ok(Some(cell)) => contents.add(cells, index, cell),
            // The cell is free.
            Ok(None) => {}
            Err(DamagedCell) => contents.damaged += 1,
        }
    }
    // An entry is changed by a new cell, and then the old one is freed. If firnd died between the two, both cells are
    // there, and the one that is further on counts. A handle gets a memory file first and is released last. A request
    // gets the offset of its append first and is done last.
    let handle_progress = |handle: &Handle| (handle.is_released, handle.view);
    keep_latest(&mut contents.handles, |handle| handle.id, handle_progress);
    let request_progress = |request: &Request| (request.is_append_done, request.append_offset);
    keep_latest(
        &mut contents.requests,
        |request| request.unique,
        request_progress,
    );
    contents
}

impl Contents {
    /// Adds the entry whose first cell is `cell`, the cell at `index` of `cells`. A node gets its full name from
    /// further cells; if they are not complete, the node counts as damaged.
    fn add(&mut self, cells: &[CellBytes], index: u32, cell: Cell) {
        match cell {
            // The name is read with its node.
            Cell::Name { .. } => {}
            Cell::Handle(handle) => self.handles.push(Stored::in_one_cell(handle, index)),
            Cell::Request(request) => self.requests.push(Stored::in_one_cell(request, index)),
            Cell::Transaction(transaction) => {
                self.transactions
                    .push(Stored::in_one_cell(transaction, index));
            }
            Cell::UndoneScope(scope) => self.undone_scopes.push(Stored::in_one_cell(scope, index)),
            Cell::FileLock(lock) => self.file_locks.push(Stored::in_one_cell(lock, index)),
            Cell::Node {
                node,
                name_len,
                name_sum,
                next_cell,
            } => match read_full_name(cells, index, node, next_cell) {
                Some(stored) if is_complete_name(&stored.entry.name, name_len, name_sum) => {
                    self.nodes.push(stored);
                }
                _ => self.damaged += 1,
            },
        }
    }
}

impl<T> Stored<T> {
    /// Returns an entry that lies in one cell.
    fn in_one_cell(entry: T, index: u32) -> Self {
        Self {
            entry,
            cells: vec![index],
        }
    }
}

/// Retains one entry for each id. An id has two entries if firnd died while it changed the entry. The one with the
/// larger `progress` is the later one.
fn keep_latest<T, P: Ord>(
    entries: &mut Vec<Stored<T>>,
    id: impl Fn(&T) -> u64,
    progress: impl Fn(&T) -> P,
) {
    entries.sort_by_key(|stored| (id(&stored.entry), Reverse(progress(&stored.entry))));
    entries.dedup_by_key(|stored| id(&stored.entry));
}

/// Returns whether a name has this length and checksum, and no slash.
fn is_complete_name(name: &[u8], len: u16, sum: u32) -> bool {
    name.len() == usize::from(len) && crc32c::crc32c(name) == sum && !name.contains(&b'/')
}

/// Completes a node, which has the first part of its name, by the rest from its chain of cells. `next_cell` is the
/// index of the first cell after the node's own. Returns `None` if a cell of the chain holds no part of a name, or the
/// chain is too long.
fn read_full_name(
    cells: &[CellBytes],
    node_cell: u32,
    mut node: Node,
    mut next_cell: Option<u32>,
) -> Option<Stored<Node>> {
    let mut read_cells = vec![node_cell];
    while let Some(index) = next_cell {
        // A damaged chain may be a ring, so its length is bounded.
        if read_cells.len() > NAME_PARTS_MAX {
            return None;
        }
        let cell_bytes = cells.get(index as usize)?;
        let Ok(Some(Cell::Name {
            bytes,
            next_cell: following_cell,
        })) = decode_cell(cell_bytes)
        else {
            return None;
        };
        node.name.extend_from_slice(&bytes);
        read_cells.push(index);
        next_cell = following_cell;
    }
    Some(Stored {
        entry: node,
        cells: read_cells,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &[u8]) -> Node {
        Node {
            id: 77,
            parent: 1,
            object: ObjectIdentity {
                dev: 5,
                ino: 77,
                birth: Some(FileTime { sec: 9, nsec: 8 }),
            },
            kind: 2,
            generation: 3,
            lookups: 4,
            name: name.to_vec(),
        }
    }

    fn header() -> Header {
        Header {
            arena: [7; 16],
            device: Device { major: 0, minor: 9 },
            mount_point: b"/mnt".to_vec(),
            exchange: InitExchange {
                asked: vec![1; 104],
                answered: vec![2; 80],
            },
        }
    }

    #[test]
    fn a_header_comes_back_and_a_flipped_bit_is_found() {
        let bytes = header().encode().unwrap();
        assert_eq!(Header::decode(&bytes), Ok(header()));
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&flipped).is_err(), "bit {bit}");
        }
        let long = Header {
            mount_point: vec![b'x'; PATH_BYTES_MAX + 1],
            ..header()
        };
        assert_eq!(long.encode(), None);
    }

    #[test]
    fn names_of_every_length_come_back() {
        for len in 0..=NAME_BYTES_MAX {
            let name: Vec<u8> = (0..len).map(|at| b'a' + (at % 26) as u8).collect();
            let at: Vec<u32> = (0..cells_of_name(len) as u32).rev().collect();
            let mut table = vec![[0; CELL_BYTES]; at.len()];
            for (cell, index) in encode_node(&node(&name), &at).into_iter().zip(&at) {
                table[*index as usize] = cell;
            }
            let contents = read_contents(table.as_flattened());
            assert_eq!(contents.damaged, 0);
            assert_eq!(contents.nodes.len(), 1);
            assert_eq!(contents.nodes[0].entry, node(&name));
            assert_eq!(contents.nodes[0].cells, at);
        }
    }

    #[test]
    fn handles_and_requests_come_back() {
        for (served_by, view) in [
            (ServedBy::Engine, None),
            (ServedBy::Engine, Some(0)),
            (ServedBy::Cache, Some(65_533)),
            (ServedBy::Passthrough(3), None),
            (ServedBy::Passthrough(4), Some(7)),
            (ServedBy::Directory, None),
        ] {
            let handle = Handle {
                id: 1,
                node: 2,
                unique: 3,
                flags: 4,
                served_by,
                view,
                opener: 5,
                is_released: view.is_some(),
            };
            let decoded = decode_cell(&handle.encode()).unwrap();
            assert_eq!(decoded, Some(Cell::Handle(handle)));
        }
        for append_offset in [None, Some(0), Some(u64::MAX)] {
            let request = Request {
                unique: 8,
                began: FileTime { sec: 1, nsec: 2 },
                subject: Some(node(b"").object),
                other: None,
                node: 9,
                append_offset,
                is_append_done: append_offset.is_some(),
            };
            let decoded = decode_cell(&request.encode()).unwrap();
            assert_eq!(decoded, Some(Cell::Request(request)));
        }
    }

    #[test]
    fn of_two_entries_of_a_handle_or_request_the_one_with_more_progress_counts() {
        let handle = |is_released, view| Handle {
            id: 1,
            node: 2,
            unique: 3,
            flags: 4,
            served_by: ServedBy::Engine,
            view,
            opener: 5,
            is_released,
        };
        let request = |append_offset, is_append_done| Request {
            unique: 8,
            began: FileTime { sec: 1, nsec: 2 },
            subject: None,
            other: None,
            node: 9,
            append_offset,
            is_append_done,
        };
        let other = Handle {
            id: 7,
            ..handle(false, None)
        };
        let cells = [
            handle(false, None).encode(),
            handle(true, None).encode(),
            request(Some(0), true).encode(),
            request(Some(0), false).encode(),
            request(None, false).encode(),
            other.encode(),
        ];
        let contents = read_contents(cells.as_flattened());
        let handles: Vec<_> = contents.handles.iter().map(|one| one.entry).collect();
        assert_eq!(handles, [handle(true, None), other]);
        let requests: Vec<_> = contents.requests.iter().map(|one| one.entry).collect();
        assert_eq!(requests, [request(Some(0), true)]);
        let views = [
            handle(false, Some(3)).encode(),
            handle(false, None).encode(),
        ];
        let contents = read_contents(views.as_flattened());
        assert_eq!(contents.handles[0].entry, handle(false, Some(3)));
        assert_eq!(contents.handles.len(), 1);
    }

    #[test]
    fn file_locks_come_back_and_one_that_ends_before_it_begins_is_damage() {
        for (first, last) in [(0, u64::MAX), (7, 7), (8, 7)] {
            let lock = FileLock {
                file: 1,
                lock_file: 2,
                kind: 3,
                is_exclusive: first == 7,
                owner: u64::MAX,
                handle: 5,
                pid: 6,
                first,
                last,
            };
            let expected = if first > last {
                Err(DamagedCell)
            } else {
                Ok(Some(Cell::FileLock(lock)))
            };
            assert_eq!(decode_cell(&lock.encode()), expected);
        }
    }

    #[test]
    fn transactions_come_back() {
        let process = TransactionOwner::Process {
            pid: 7,
            start_ticks: 8,
        };
        for owner in [
            TransactionOwner::Unowned,
            process,
            TransactionOwner::Connection,
        ] {
            for is_ending in [false, true] {
                let transaction = Transaction {
                    serial: 3,
                    owner,
                    is_ending,
                };
                let decoded = decode_cell(&transaction.encode()).unwrap();
                assert_eq!(decoded, Some(Cell::Transaction(transaction)));
            }
        }
    }

    #[test]
    fn scopes_that_were_undone_come_back_and_cover_what_is_below() {
        for informed in [None, Some(0), Some(7)] {
            let scope = UndoneScope {
                path: PathSum::from_path(b"a/b"),
                died_ticks: 9,
                informed,
            };
            let decoded = decode_cell(&scope.encode()).unwrap();
            assert_eq!(decoded, Some(Cell::UndoneScope(scope)));
        }
        let scope = |path: &[u8]| UndoneScope {
            path: PathSum::from_path(path),
            died_ticks: 0,
            informed: None,
        };
        for below in [&b"a/b"[..], b"a/b/c"] {
            assert!(scope(b"a/b").covers(below) && scope(b"").covers(below));
        }
        for beside in [&b"a"[..], b"a/bc", b"a/c", b"b"] {
            assert!(!scope(b"a/b").covers(beside));
        }
    }

    #[test]
    fn a_flipped_bit_of_a_cell_is_found_and_the_count_of_look_ups_is_free() {
        let cell = encode_node(&node(b"name"), &[0])[0];
        for bit in 0..CELL_BYTES * 8 {
            let mut flipped = cell;
            flipped[bit / 8] ^= 1 << (bit % 8);
            let is_free = (LOOKUPS_AT..LOOKUPS_AT + 8).contains(&(bit / 8));
            assert_eq!(decode_cell(&flipped).is_ok(), is_free, "bit {bit}");
        }
    }

    #[test]
    fn a_name_that_goes_in_circles_is_damage() {
        let name = vec![b'x'; NAME_BYTES_MAX];
        let mut cells = encode_node(&node(&name), &[0, 1, 2]);
        cells[2] = cells[1];
        assert_eq!(read_contents(cells.as_flattened()).damaged, 1);
    }
}
