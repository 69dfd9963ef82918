//! The live table: what the kernel has of a mount, for a firnd that goes on in the place of one that died.
//!
//! ```text
//! 0      header, two pages: arena, connection, mount point, the exchange of INIT
//! 8128   words that change: how often the mount was taken over, and how long programs waited
//! 8192   cells of 128 bytes: a node, an open handle, a request in work, a transaction, a scope that was undone, the rest of a
//!        long name
//! ```
//!
//! A cell counts if its seal is right, the CRC32C of the bytes behind it. A cell that is being written when firnd dies does
//! not count: it is written before the kernel hears of what it tells.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// First bytes of the file.
pub const MAGIC: [u8; 8] = *b"FIRNLIVE";
/// Raised when a byte changes its meaning.
pub const VERSION: u32 = 3;
/// Bytes before the first cell.
pub const HEADER_BYTES: usize = 8192;
/// Bytes of a cell.
pub const CELL_BYTES: usize = 128;
/// Where the words are that change.
pub const WORDS_AT: usize = HEADER_BYTES - 64;
/// Bytes of an INIT, with its header: the kernel's is 104, the answer 80.
pub const INIT_BYTES_MAX: usize = 256;
/// Bytes of a path, as PATH_MAX of Linux.
pub const PATH_BYTES_MAX: usize = 4096;
/// Bytes of a name, as NAME_MAX of Linux.
pub const NAME_BYTES_MAX: usize = 255;
/// Bytes of a name that lie in the node's cell.
const NAME_HEAD_BYTES: usize = 56;
/// Bytes of a name in each further cell.
const NAME_PART_BYTES: usize = 112;
/// Cells of the longest name, beside the node's.
pub const NAME_PARTS_MAX: usize = (NAME_BYTES_MAX - NAME_HEAD_BYTES).div_ceil(NAME_PART_BYTES);

/// Offsets of words, from [`WORDS_AT`].
pub mod word {
    /// `u64`: how often a firnd went on in the place of another.
    pub const TAKEOVERS: usize = 0;
    /// `u64`: nanoseconds for which programs waited at the last one.
    pub const LAST_PAUSE: usize = 8;
    /// `u64`: the same of all.
    pub const PAUSES: usize = 16;
    /// `u64`: entries that found no room. The next firnd does not know them.
    pub const LOST: usize = 24;
}

/// Why a table is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LiveError {
    /// Too short, or the first bytes are others.
    #[error("it is no live table")]
    Magic,
    /// Made by another version.
    #[error("its version is {found}, and this firn reads version {wanted}", wanted = VERSION)]
    Version {
        /// In the file.
        found: u32,
    },
    /// The header was changed, or not written to its end.
    #[error("its header is damaged or was never finished")]
    Damaged,
}

/// What holds for the whole table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The arena that it belongs to.
    pub arena: [u8; 16],
    /// Device number of the mounted file system.
    pub device: Device,
    /// Canonical mount point.
    pub mount_point: Vec<u8>,
    /// INIT and its answer.
    pub exchange: Exchange,
}

/// The number of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// Major part.
    pub major: u32,
    /// Minor part: that of a FUSE mount is the number of its connection.
    pub minor: u32,
}

/// The first request of a connection and its answer, as they went over the device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exchange {
    /// The kernel's INIT.
    pub asked: Vec<u8>,
    /// The answer.
    pub answered: Vec<u8>,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 8],
    version: u32,
    /// CRC32C of all that follows.
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
const SEALED_FROM: usize = 16;

impl Header {
    /// The stored form; `None` where a part of it is too long.
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
        fill(&mut raw.asked, &self.exchange.asked)?;
        fill(&mut raw.answered, &self.exchange.answered)?;
        fill(&mut raw.mount_point, &self.mount_point)?;
        raw.seal = crc32c::crc32c(&raw.as_bytes()[SEALED_FROM..]);
        Some(raw.as_bytes().to_vec())
    }

    /// From the first bytes of a file.
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
        let part = |bytes: &[u8], len: u32| {
            let part = bytes.get(..len as usize).ok_or(LiveError::Damaged)?;
            Ok(part.to_vec())
        };
        Ok(Self {
            arena: raw.arena,
            device: Device {
                major: raw.major,
                minor: raw.minor,
            },
            mount_point: part(&raw.mount_point, raw.mount_point_len)?,
            exchange: Exchange {
                asked: part(&raw.asked, raw.asked_len)?,
                answered: part(&raw.answered, raw.answered_len)?,
            },
        })
    }
}

fn fill(room: &mut [u8], bytes: &[u8]) -> Option<()> {
    room.get_mut(..bytes.len())?.copy_from_slice(bytes);
    Some(())
}

/// When an object was made: seconds and nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    /// Seconds since 1970.
    pub sec: i64,
    /// Nanoseconds, below 10^9.
    pub nsec: u32,
}

/// Nanoseconds that stand for no moment.
const NO_MOMENT: u32 = u32::MAX;

/// Which object of the backing something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectIdentity {
    /// Device.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// Time of birth, where the backing has it.
    pub birth: Option<Moment>,
}

/// An object that the kernel knows by a number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The kernel's number.
    pub id: u64,
    /// Number of the directory that has its name; 0: it has no name any more.
    pub parent: u64,
    /// The object.
    pub object: ObjectIdentity,
    /// Its kind, a number of the engine's.
    pub kind: u8,
    /// Of two cells of one node the higher one was written later: a rename was under way.
    pub generation: u32,
    /// Look-ups that the kernel counts. Not sealed: it is stored by itself.
    pub lookups: u64,
    /// Its name.
    pub name: Vec<u8>,
}

/// How the kernel treats an open handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServedBy {
    /// Firn, each request.
    Engine,
    /// The kernel's page cache.
    Cache,
    /// The kernel, from a file that it has under this number: the backing's, or a memory file.
    Passthrough(i32),
    /// An open directory.
    Directory,
}

/// An open file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    /// The kernel's number.
    pub id: u64,
    /// Of which [`Node`].
    pub node: u64,
    /// The request that opened it.
    pub unique: u64,
    /// Flags of open(2).
    pub flags: i32,
    /// What serves it.
    pub served_by: ServedBy,
    /// Number of the memory file that the kernel or a mapping of its process reads.
    pub view: Option<u16>,
    /// The thread that opened it; 0: unknown.
    pub opener: u32,
}

/// A request that must not take effect twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The kernel's number.
    pub unique: u64,
    /// When it began, by the clock that stamps files.
    pub began: Moment,
    /// What its name led to, if to anything.
    pub subject: Option<ObjectIdentity>,
    /// What its other name led to.
    pub other: Option<ObjectIdentity>,
    /// Number of the node that it is about, which is in the table as long as the request is; 0: its names say it.
    pub node: u64,
}

/// A transaction that programs change things in, or that is prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transaction {
    /// Its number in the backing.
    pub serial: u64,
    /// With what it is aborted.
    pub owner: TransactionOwner,
    /// Its abort has begun: it is not gone on with.
    pub is_ending: bool,
}

/// What a transaction ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransactionOwner {
    /// Nothing but a request.
    Unowned,
    /// A process, told from later ones of its number by its start.
    Process {
        /// Its number.
        pid: u32,
        /// When it began, in ticks since the host did.
        start_ticks: u64,
    },
    /// A connection to the firnd that died, of a process that is not known.
    Connection,
}

/// A path, by what is enough to know it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathSum {
    /// Its bytes.
    pub len: u32,
    /// CRC32C of them.
    pub sum: u32,
}

impl PathSum {
    /// Of a path relative to the backing.
    pub fn of(path: &[u8]) -> Self {
        Self {
            len: path.len() as u32,
            sum: crc32c::crc32c(path),
        }
    }
}

/// The scope of a transaction that could not go on when its firnd died. Programs that were in it are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UndoneScope {
    /// Its path.
    pub path: PathSum,
    /// When firnd died, in clock ticks since the host started. A process that began later was not in the transaction.
    pub died_ticks: u64,
    /// A process that was told; none: the entry is the scope's own.
    pub told: Option<u32>,
}

impl UndoneScope {
    /// Whether a path is that of the scope or below it.
    pub fn covers(&self, path: &[u8]) -> bool {
        let len = self.path.len as usize;
        let is_whole = len == 0 || path.len() == len || path.get(len) == Some(&b'/');
        is_whole && path.get(..len).map(PathSum::of) == Some(self.path)
    }
}

/// What a cell tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cell {
    /// The node; its name goes on in the cell `next`, if that is not 0.
    Node {
        /// All but the part of its name that is elsewhere.
        node: Node,
        /// Length of the whole name.
        name_len: u16,
        /// CRC32C of the whole name.
        name_sum: u32,
        /// Index of the next cell of the name, plus one.
        next: u32,
    },
    /// A part of a name.
    Name {
        /// The part.
        bytes: Vec<u8>,
        /// Index of the next cell of the name, plus one.
        next: u32,
    },
    /// An open handle.
    Handle(Handle),
    /// A request in work.
    Request(Request),
    /// A transaction.
    Transaction(Transaction),
    /// A scope that was undone, or a process that was told of it.
    UndoneScope(UndoneScope),
}

/// A cell in its stored form.
pub type CellBytes = [u8; CELL_BYTES];

const TAG_NODE: u8 = 0x4e;
const TAG_NAME: u8 = 0x61;
const TAG_HANDLE: u8 = 0x48;
const TAG_REQUEST: u8 = 0x52;
const TAG_TRANSACTION: u8 = 0x54;
const TAG_UNDONE_SCOPE: u8 = 0x55;

/// Where the count of look-ups is in a node's cell.
pub const LOOKUPS_AT: usize = 56;

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
    next: u32,
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
    next: u32,
    unused_too: u32,
    bytes: [u8; NAME_PART_BYTES],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawHandle {
    seal: u32,
    tag: u8,
    served_by: u8,
    /// The number of the memory file plus one; 0: none.
    view: u16,
    id: u64,
    node: u64,
    unique: u64,
    flags: i32,
    backing_id: i32,
    opener: u32,
    unused_too: u32,
    rest: [u8; 80],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawRequest {
    seal: u32,
    tag: u8,
    unused: u8,
    unused_too: u16,
    unique: u64,
    began_s: i64,
    began_ns: u32,
    rest: u32,
    subject: RawIdentity,
    other: RawIdentity,
    node: u64,
    rest_too: [u8; 24],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawTransaction {
    seal: u32,
    tag: u8,
    /// 1: none, 2: a process, 3: a connection.
    owner: u8,
    is_ending: u8,
    unused: u8,
    serial: u64,
    start_ticks: u64,
    pid: u32,
    unused_too: u32,
    rest: [u8; 96],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawUndoneScope {
    seal: u32,
    tag: u8,
    /// 1: a process was told, 0: the scope itself.
    is_told: u8,
    unused: u16,
    died_ticks: u64,
    path_len: u32,
    path_sum: u32,
    told: u32,
    unused_too: u32,
    rest: [u8; 96],
}

const _: () = assert!(size_of::<RawUndoneScope>() == CELL_BYTES);
const _: () = assert!(size_of::<RawTransaction>() == CELL_BYTES);
const _: () = assert!(size_of::<RawNode>() == CELL_BYTES);
const _: () = assert!(std::mem::offset_of!(RawNode, lookups) == LOOKUPS_AT);
const _: () = assert!(size_of::<RawName>() == CELL_BYTES);
const _: () = assert!(size_of::<RawHandle>() == CELL_BYTES);
const _: () = assert!(size_of::<RawRequest>() == CELL_BYTES);

impl RawIdentity {
    fn of(identity: Option<ObjectIdentity>) -> Self {
        let Some(identity) = identity else {
            return Self {
                dev: 0,
                ino: 0,
                birth_s: 0,
                birth_ns: NO_MOMENT,
                is_known: 0,
            };
        };
        let (birth_s, birth_ns) = birth_words(identity.birth);
        Self {
            dev: identity.dev,
            ino: identity.ino,
            birth_s,
            birth_ns,
            is_known: 1,
        }
    }

    fn check(&self) -> Option<ObjectIdentity> {
        (self.is_known == 1).then(|| ObjectIdentity {
            dev: self.dev,
            ino: self.ino,
            birth: moment(self.birth_s, self.birth_ns),
        })
    }
}

fn birth_words(birth: Option<Moment>) -> (i64, u32) {
    birth.map_or((0, NO_MOMENT), |birth| (birth.sec, birth.nsec))
}

fn moment(sec: i64, nsec: u32) -> Option<Moment> {
    (nsec < 1_000_000_000).then_some(Moment { sec, nsec })
}

/// The checksum of a cell: of all behind the seal, but for the count of look-ups.
fn sum(cell: &CellBytes) -> u32 {
    let sum = if cell[4] == TAG_NODE {
        let before = crc32c::crc32c(&cell[4..LOOKUPS_AT]);
        crc32c::crc32c_append(before, &cell[LOOKUPS_AT + 8..])
    } else {
        crc32c::crc32c(&cell[4..])
    };
    // 0 stands in a free cell.
    sum.max(1)
}

fn sealed(bytes: &[u8]) -> CellBytes {
    let mut cell = [0; CELL_BYTES];
    cell.copy_from_slice(bytes);
    let seal = sum(&cell);
    cell[..4].copy_from_slice(&seal.to_ne_bytes());
    cell
}

/// Cells of a node whose name has `len` bytes, the first included.
pub fn cells_of_name(len: usize) -> usize {
    1 + len
        .saturating_sub(NAME_HEAD_BYTES)
        .div_ceil(NAME_PART_BYTES)
}

/// The cells of a node: the first is the node's, the others are parts of its name and to be written before it. `at`: the
/// indexes of all of them, [`cells_of_name`] many.
pub fn encode_node(node: &Node, at: &[u32]) -> Vec<CellBytes> {
    debug_assert_eq!(at.len(), cells_of_name(node.name.len()));
    let next_of = |part: usize| at.get(part + 1).map_or(0, |next| next + 1);
    let head = &node.name[..node.name.len().min(NAME_HEAD_BYTES)];
    let mut name = [0; NAME_HEAD_BYTES];
    name[..head.len()].copy_from_slice(head);
    let (birth_s, birth_ns) = birth_words(node.object.birth);
    let first = RawNode {
        seal: 0,
        tag: TAG_NODE,
        kind: node.kind,
        name_len: node.name.len() as u16,
        id: node.id,
        parent: node.parent,
        dev: node.object.dev,
        ino: node.object.ino,
        birth_s,
        birth_ns,
        generation: node.generation,
        lookups: node.lookups,
        next: next_of(0),
        name_sum: crc32c::crc32c(&node.name),
        name,
    };
    let mut cells = vec![sealed(first.as_bytes())];
    for (part, rest) in node.name[head.len()..].chunks(NAME_PART_BYTES).enumerate() {
        let mut bytes = [0; NAME_PART_BYTES];
        bytes[..rest.len()].copy_from_slice(rest);
        let raw = RawName {
            seal: 0,
            tag: TAG_NAME,
            len: rest.len() as u8,
            unused: 0,
            next: next_of(part + 1),
            unused_too: 0,
            bytes,
        };
        cells.push(sealed(raw.as_bytes()));
    }
    cells
}

impl Handle {
    /// The stored form.
    pub fn encode(&self) -> CellBytes {
        let (served_by, backing_id) = match self.served_by {
            ServedBy::Engine => (1, 0),
            ServedBy::Cache => (2, 0),
            ServedBy::Passthrough(id) => (3, id),
            ServedBy::Directory => (4, 0),
        };
        let raw = RawHandle {
            seal: 0,
            tag: TAG_HANDLE,
            served_by,
            view: self.view.map_or(0, |file| file.saturating_add(1)),
            id: self.id,
            node: self.node,
            unique: self.unique,
            flags: self.flags,
            backing_id,
            opener: self.opener,
            unused_too: 0,
            rest: [0; 80],
        };
        sealed(raw.as_bytes())
    }
}

impl Request {
    /// The stored form.
    pub fn encode(&self) -> CellBytes {
        let raw = RawRequest {
            seal: 0,
            tag: TAG_REQUEST,
            unused: 0,
            unused_too: 0,
            unique: self.unique,
            began_s: self.began.sec,
            began_ns: self.began.nsec,
            rest: 0,
            subject: RawIdentity::of(self.subject),
            other: RawIdentity::of(self.other),
            node: self.node,
            rest_too: [0; 24],
        };
        sealed(raw.as_bytes())
    }
}

impl Transaction {
    /// The stored form.
    pub fn encode(&self) -> CellBytes {
        let (owner, pid, start_ticks) = match self.owner {
            TransactionOwner::Unowned => (1, 0, 0),
            TransactionOwner::Process { pid, start_ticks } => (2, pid, start_ticks),
            TransactionOwner::Connection => (3, 0, 0),
        };
        let raw = RawTransaction {
            seal: 0,
            tag: TAG_TRANSACTION,
            owner,
            is_ending: self.is_ending.into(),
            unused: 0,
            serial: self.serial,
            start_ticks,
            pid,
            unused_too: 0,
            rest: [0; 96],
        };
        sealed(raw.as_bytes())
    }
}

impl UndoneScope {
    /// The stored form.
    pub fn encode(&self) -> CellBytes {
        let raw = RawUndoneScope {
            seal: 0,
            tag: TAG_UNDONE_SCOPE,
            is_told: self.told.is_some().into(),
            unused: 0,
            died_ticks: self.died_ticks,
            path_len: self.path.len,
            path_sum: self.path.sum,
            told: self.told.unwrap_or_default(),
            unused_too: 0,
            rest: [0; 96],
        };
        sealed(raw.as_bytes())
    }
}

/// A cell that is neither free nor whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DamagedCell;

/// What a cell tells; `None`: it is free.
pub fn decode_cell(cell: &CellBytes) -> Result<Option<Cell>, DamagedCell> {
    let seal = u32::from_ne_bytes([cell[0], cell[1], cell[2], cell[3]]);
    if seal == 0 {
        return Ok(None);
    }
    if seal != sum(cell) {
        return Err(DamagedCell);
    }
    let decoded = match cell[4] {
        TAG_NODE => decode_node(cell),
        TAG_NAME => decode_name(cell),
        TAG_HANDLE => decode_handle(cell),
        TAG_REQUEST => decode_request(cell),
        TAG_TRANSACTION => decode_transaction(cell),
        TAG_UNDONE_SCOPE => decode_undone_scope(cell),
        _ => None,
    };
    decoded.map(Some).ok_or(DamagedCell)
}

fn decode_node(cell: &CellBytes) -> Option<Cell> {
    let raw = RawNode::read_from_bytes(cell).ok()?;
    let name_len = usize::from(raw.name_len);
    if name_len > NAME_BYTES_MAX || (raw.next != 0) != (name_len > NAME_HEAD_BYTES) || raw.id == 0 {
        return None;
    }
    let head = name_len.min(NAME_HEAD_BYTES);
    let node = Node {
        id: raw.id,
        parent: raw.parent,
        object: ObjectIdentity {
            dev: raw.dev,
            ino: raw.ino,
            birth: moment(raw.birth_s, raw.birth_ns),
        },
        kind: raw.kind,
        generation: raw.generation,
        lookups: raw.lookups,
        name: raw.name[..head].to_vec(),
    };
    Some(Cell::Node {
        node,
        name_len: raw.name_len,
        name_sum: raw.name_sum,
        next: raw.next,
    })
}

fn decode_name(cell: &CellBytes) -> Option<Cell> {
    let raw = RawName::read_from_bytes(cell).ok()?;
    Some(Cell::Name {
        bytes: raw.bytes.get(..usize::from(raw.len))?.to_vec(),
        next: raw.next,
    })
}

fn decode_handle(cell: &CellBytes) -> Option<Cell> {
    let raw = RawHandle::read_from_bytes(cell).ok()?;
    let served_by = match raw.served_by {
        1 => ServedBy::Engine,
        2 => ServedBy::Cache,
        3 => ServedBy::Passthrough(raw.backing_id),
        4 => ServedBy::Directory,
        _ => return None,
    };
    Some(Cell::Handle(Handle {
        id: raw.id,
        node: raw.node,
        unique: raw.unique,
        flags: raw.flags,
        served_by,
        view: raw.view.checked_sub(1),
        opener: raw.opener,
    }))
}

fn decode_request(cell: &CellBytes) -> Option<Cell> {
    let raw = RawRequest::read_from_bytes(cell).ok()?;
    Some(Cell::Request(Request {
        unique: raw.unique,
        began: moment(raw.began_s, raw.began_ns)?,
        subject: raw.subject.check(),
        other: raw.other.check(),
        node: raw.node,
    }))
}

fn decode_transaction(cell: &CellBytes) -> Option<Cell> {
    let raw = RawTransaction::read_from_bytes(cell).ok()?;
    let owner = match raw.owner {
        1 => TransactionOwner::Unowned,
        2 => TransactionOwner::Process {
            pid: raw.pid,
            start_ticks: raw.start_ticks,
        },
        3 => TransactionOwner::Connection,
        _ => return None,
    };
    Some(Cell::Transaction(Transaction {
        serial: raw.serial,
        owner,
        is_ending: raw.is_ending != 0,
    }))
}

fn decode_undone_scope(cell: &CellBytes) -> Option<Cell> {
    let raw = RawUndoneScope::read_from_bytes(cell).ok()?;
    Some(Cell::UndoneScope(UndoneScope {
        path: PathSum {
            len: raw.path_len,
            sum: raw.path_sum,
        },
        died_ticks: raw.died_ticks,
        told: (raw.is_told != 0).then_some(raw.told),
    }))
}

/// What a table holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// With the indexes of their cells. One node may be there twice.
    pub nodes: Vec<Stored<Node>>,
    /// Open handles.
    pub handles: Vec<Stored<Handle>>,
    /// Requests in work.
    pub requests: Vec<Stored<Request>>,
    /// Transactions. One may be there twice: it is ending if one of them says so.
    pub transactions: Vec<Stored<Transaction>>,
    /// Scopes that were undone, and processes that were told of them.
    pub undone_scopes: Vec<Stored<UndoneScope>>,
    /// Cells that are neither free nor whole, and nodes whose name is not whole.
    pub damaged: u64,
}

/// An entry and where it lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored<T> {
    /// The entry.
    pub entry: T,
    /// Indexes of its cells.
    pub cells: Vec<u32>,
}

/// Reads all cells. `bytes`: from the first cell on; a cell that is cut off does not count.
pub fn read_contents(bytes: &[u8]) -> Contents {
    let (cells, _) = bytes.as_chunks::<CELL_BYTES>();
    let mut contents = Contents::default();
    for (index, cell) in cells.iter().enumerate() {
        let at = index as u32;
        match decode_cell(cell) {
            Ok(None | Some(Cell::Name { .. })) => {}
            Ok(Some(Cell::Handle(entry))) => contents.handles.push(Stored {
                entry,
                cells: vec![at],
            }),
            Ok(Some(Cell::Request(entry))) => contents.requests.push(Stored {
                entry,
                cells: vec![at],
            }),
            Ok(Some(Cell::Transaction(entry))) => contents.transactions.push(Stored {
                entry,
                cells: vec![at],
            }),
            Ok(Some(Cell::UndoneScope(entry))) => contents.undone_scopes.push(Stored {
                entry,
                cells: vec![at],
            }),
            Ok(Some(Cell::Node {
                node,
                name_len,
                name_sum,
                next,
            })) => match read_full_name(cells, at, node, next) {
                Some(stored) if is_name(&stored.entry.name, name_len, name_sum) => {
                    contents.nodes.push(stored);
                }
                _ => contents.damaged += 1,
            },
            Err(DamagedCell) => contents.damaged += 1,
        }
    }
    contents
}

fn is_name(name: &[u8], len: u16, sum: u32) -> bool {
    name.len() == usize::from(len) && crc32c::crc32c(name) == sum && !name.contains(&b'/')
}

/// Reads the rest of a node's name from its chain of cells. `next` is the index of a cell plus one; 0 ends the chain. `None`: a cell of
/// the chain has no part of a name, or the chain is too long.
fn read_full_name(
    cells: &[CellBytes],
    first_cell: u32,
    mut node: Node,
    mut next: u32,
) -> Option<Stored<Node>> {
    let mut read_cells = vec![first_cell];
    while next != 0 {
        if read_cells.len() > NAME_PARTS_MAX {
            return None;
        }
        let index = next - 1;
        let cell = cells.get(index as usize)?;
        let Ok(Some(Cell::Name {
            bytes,
            next: following,
        })) = decode_cell(cell)
        else {
            return None;
        };
        node.name.extend_from_slice(&bytes);
        read_cells.push(index);
        next = following;
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
                birth: Some(Moment { sec: 9, nsec: 8 }),
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
            exchange: Exchange {
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
            };
            let decoded = decode_cell(&handle.encode()).unwrap();
            assert_eq!(decoded, Some(Cell::Handle(handle)));
        }
        let request = Request {
            unique: 8,
            began: Moment { sec: 1, nsec: 2 },
            subject: Some(node(b"").object),
            other: None,
            node: 9,
        };
        let decoded = decode_cell(&request.encode()).unwrap();
        assert_eq!(decoded, Some(Cell::Request(request)));
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
        for told in [None, Some(0), Some(7)] {
            let scope = UndoneScope {
                path: PathSum::of(b"a/b"),
                died_ticks: 9,
                told,
            };
            let decoded = decode_cell(&scope.encode()).unwrap();
            assert_eq!(decoded, Some(Cell::UndoneScope(scope)));
        }
        let scope = |path: &[u8]| UndoneScope {
            path: PathSum::of(path),
            died_ticks: 0,
            told: None,
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
