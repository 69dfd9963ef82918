//! The live table of a mount: what the kernel knows of the mount. If firnd, the process that serves the mount, dies,
//! the next firnd reads the table and continues the mount. Messages call it "the table of open files".
//!
//! The table is a mapped file beside the arena (the shared memory with written bytes), so it outlives firnd. It records
//! the nodes that the kernel knows, open handles, requests under way, transactions and file locks.
//!
//! Terms
//! * A *cell* is a record of fixed size. Its first word, the *seal*, is a checksum; a cell without a valid one is
//!   ignored.
//! * A *node* is an object of the file system with its name. It has several cells if its name is long.
//! * A *look-up* is a reference that the kernel has to a node. The kernel counts them, and returns them when it forgets
//!   the node.
//! * An *undone scope* is a directory or checkpoint with a transaction that was aborted, because its firnd died.
//!   Further entries say which processes were informed of the abort.
//!
//! Promises
//! * If firnd dies at any instant, [`LiveTable::open`] finds everything that was recorded. A node is found at each
//!   instant of its move to another name. A half-written cell does not count.
//! * An entry for which there is no room is counted ([`LiveTable::lost`]), and the mount continues without it.
//! * Numbers that are read from the file are checked (`firn_format::live`).
//!
//! Relies on: only the firnd that has the arena has the table open.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use firn_format::live::{
    CELL_BYTES, Cell, CellBytes, Contents, FileLock, HEADER_BYTES, Handle, Header, LOOKUPS_AT,
    LiveError, Node, PathSum, Request, Stored, Transaction, UndoneScope, WORDS_AT, cells_of_name,
    decode_cell, encode_node, read_contents, word,
};
use firn_trust::{TrustError, create_private_file, open_private_file};
use parking_lot::Mutex;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{CWD, FallocateFlags, OFlags};
use rustix::io::Errno;

use crate::ArenaError;
use crate::map::{FileAccess, Map};

/// Maximum number of cells of a table. The mapping has addresses for all of them, 512 MiB. Memory is allocated for few
/// cells at a time, when the table grows (`LiveTable::grow`).
const CELLS_MAX: u32 = 1 << 22;
/// Minimum number of cells by which a table grows: 64 KiB.
const GROW_CELLS_MIN: u32 = 512;
/// Length of the seal at the start of a cell.
const SEAL_BYTES: usize = 4;

/// Reasons why a table cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub enum LiveTableError {
    /// A system call failed.
    #[error("the table of open files: {0}")]
    Io(#[from] Errno),
    /// Another user could have made the file.
    #[error("the table of open files: {0}")]
    Distrusted(#[from] TrustError),
    /// The file cannot be mapped.
    #[error(transparent)]
    Map(#[from] ArenaError),
    /// The file is no table, or one of another version.
    #[error("the table of open files of the earlier firnd is not used: {0}")]
    Format(#[from] LiveError),
}

/// A node that is recorded in the table.
struct NodeCells {
    cells: Vec<u32>,
    /// Cells of the node with its previous name, while it is being moved.
    previous_cells: Vec<u32>,
    node: Node,
    /// Whether the kernel has counted look-ups of the node.
    is_known: bool,
    /// Number of open handles of the node, and of requests under way that are about it.
    uses: u32,
}

/// Which cells are free, and the cells of each entry.
#[derive(Default)]
struct Cells {
    /// Unused cells before `end`.
    free: Vec<u32>,
    /// All cells from this one on are unused.
    end: u32,
    /// Number of cells that have memory.
    allocated: u32,
    nodes: HashMap<u64, NodeCells>,
    handles: HashMap<u64, HandleCell>,
    /// Transactions, by their serial number.
    transactions: HashMap<u64, Recorded<Transaction>>,
    /// Undone scopes and informed processes, with their cells.
    undone_scopes: Vec<Recorded<UndoneScope>>,
    /// File locks, with their cells, by the inode number of their lock file.
    file_locks: HashMap<u64, Vec<Recorded<FileLock>>>,
}

/// An entry of one cell.
struct Recorded<T> {
    entry: T,
    cell: u32,
}

struct HandleCell {
    cell: u32,
    node: u64,
}

/// The live table of a mount.
pub struct LiveTable {
    path: PathBuf,
    map: Map,
    cells: Mutex<Cells>,
}

impl std::fmt::Debug for LiveTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LiveTable")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// The content of a table that an earlier firnd left.
#[derive(Debug)]
pub struct EarlierTable {
    /// Header of the table.
    pub header: Header,
    /// Entries of the table.
    pub contents: Contents,
}

impl LiveTable {
    /// Makes an empty table, in place of an existing one. It counts only after [`LiveTable::seal`].
    pub fn create(path: &Path) -> Result<Self, LiveTableError> {
        match rustix::fs::unlink(path) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
        let file = create_private_file(CWD, path, OFlags::RDWR)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, HEADER_BYTES as u64)?;
        Ok(Self {
            path: path.to_owned(),
            map: Map::new(path, file, mapped_bytes(), FileAccess::ReadWrite)?,
            cells: Mutex::default(),
        })
    }

    /// Opens the live table of a firnd that died, with what the kernel knows of the mount, and returns what it
    /// recorded. From now on this firnd writes to the table.
    ///
    /// An entry belongs to this firnd only after [`LiveTable::adopt_node`] or one of the other `adopt` functions. Cells
    /// without a valid entry become free.
    pub fn open(path: &Path) -> Result<(Self, EarlierTable), LiveTableError> {
        let file = open_private_file(CWD, path, OFlags::RDWR)?;
        let bytes = read_file(file.as_fd())?;
        let header = Header::decode(&bytes)?;
        let cell_bytes = bytes.get(HEADER_BYTES..).unwrap_or_default();
        let contents = read_contents(cell_bytes);
        let allocated = (cell_bytes.len() / CELL_BYTES) as u32;
        let table = Self {
            path: path.to_owned(),
            map: Map::new(path, file, mapped_bytes(), FileAccess::ReadWrite)?,
            cells: Mutex::new(Cells {
                end: allocated,
                allocated,
                undone_scopes: contents
                    .undone_scopes
                    .iter()
                    .map(recorded_in_one_cell)
                    .collect(),
                file_locks: group_by_lock_file(&contents.file_locks),
                ..Cells::default()
            }),
        };
        table.free_unused_cells(&contents);
        Ok((table, EarlierTable { header, contents }))
    }

    /// Frees every cell (a record of fixed size) that belongs to no valid entry of `contents`, damaged cells included.
    fn free_unused_cells(&self, contents: &Contents) {
        let mut cells = self.cells.lock();
        let used_cells = cells_of(&contents.nodes)
            .chain(cells_of(&contents.handles))
            .chain(cells_of(&contents.requests))
            .chain(cells_of(&contents.file_locks))
            .chain(cells_of(&contents.transactions))
            .chain(cells_of(&contents.undone_scopes));
        let mut is_used = vec![false; cells.allocated as usize];
        for cell in used_cells {
            is_used[cell as usize] = true;
        }
        // In descending order: the last cell of the list is taken first.
        cells.free = (0..cells.allocated)
            .rev()
            .filter(|&cell| !is_used[cell as usize])
            .collect();
        for &cell in &cells.free {
            self.clear(cell);
        }
    }

    /// Stores the header. From now on the table is valid, so that the next firnd takes over from it.
    pub fn seal(&self, header: &Header) -> Result<(), LiveTableError> {
        let bytes = header.encode().ok_or(Errno::NAMETOOLONG)?;
        self.map.write(0, &bytes);
        Ok(())
    }

    /// Removes the table, so that no later firnd takes over from it.
    pub fn remove(&self) {
        if let Err(errno) = rustix::fs::unlink(&self.path)
            && errno != Errno::NOENT
        {
            tracing::warn!(%errno, "cannot remove the table of open files");
        }
    }

    fn word(&self, offset: usize) -> u64 {
        self.map
            .u64((WORDS_AT + offset) as u64)
            .load(Ordering::Relaxed)
    }

    fn set_word(&self, offset: usize, value: u64) {
        self.map
            .u64((WORDS_AT + offset) as u64)
            .store(value, Ordering::Relaxed);
    }

    /// Returns how often a firnd has taken over from another one.
    pub fn takeovers(&self) -> u64 {
        self.word(word::TAKEOVERS)
    }

    /// Returns the length of the last takeover's pause.
    pub fn last_pause_ns(&self) -> u64 {
        self.word(word::LAST_PAUSE)
    }

    /// Returns the length of the pauses of all takeovers together.
    pub fn pauses_ns(&self) -> u64 {
        self.word(word::PAUSES)
    }

    /// Returns the number of entries for which there was no room.
    pub fn lost(&self) -> u64 {
        self.word(word::LOST)
    }

    /// Returns how much memory the table uses.
    pub fn bytes(&self) -> u64 {
        HEADER_BYTES as u64 + u64::from(self.cells.lock().allocated) * CELL_BYTES as u64
    }

    /// Counts a takeover that begins, and returns the new count. The count distinguishes numbers that this firnd
    /// assigns from those that an earlier firnd assigned.
    pub fn count_takeover(&self) -> u64 {
        let count = self.takeovers() + 1;
        self.set_word(word::TAKEOVERS, count);
        count
    }

    /// Records for how long programs waited during a takeover.
    pub fn record_pause(&self, nanoseconds: u64) {
        self.set_word(word::LAST_PAUSE, nanoseconds);
        self.set_word(word::PAUSES, self.pauses_ns() + nanoseconds);
    }

    /// Counts an entry for which there was no room.
    fn count_lost(&self) {
        let lost = self.lost() + 1;
        self.set_word(word::LOST, lost);
        if lost == 1 {
            tracing::warn!(
                "the table of open files is full: if firnd dies, programs lose the open files that are not in it"
            );
        }
    }

    /// Returns the offset of a cell in the file.
    fn cell_offset(cell: u32) -> u64 {
        HEADER_BYTES as u64 + u64::from(cell) * CELL_BYTES as u64
    }

    /// Writes a cell. Its seal, the first word, is stored last, so that the cell counts only when it is complete.
    fn store(&self, cell: u32, bytes: &CellBytes) {
        let offset = Self::cell_offset(cell);
        let seal = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        self.map
            .write(offset + SEAL_BYTES as u64, &bytes[SEAL_BYTES..]);
        self.map.u32(offset).store(seal, Ordering::Release);
    }

    /// Reads a cell.
    fn load(&self, cell: u32) -> CellBytes {
        let mut bytes = [0; CELL_BYTES];
        self.map.read(Self::cell_offset(cell), &mut bytes);
        bytes
    }

    /// Makes a cell invalid.
    fn clear(&self, cell: u32) {
        self.map
            .u32(Self::cell_offset(cell))
            .store(0, Ordering::Release);
    }

    /// Makes cells free.
    fn free(&self, cells: &mut Cells, unused: &[u32]) {
        for cell in unused {
            self.clear(*cell);
        }
        cells.free.extend_from_slice(unused);
    }

    /// Allocates a cell. The table grows if necessary. Returns `None`, and counts the lost entry, if there is no room.
    fn allocate_cell(&self, cells: &mut Cells) -> Option<u32> {
        if let Some(cell) = cells.free.pop() {
            return Some(cell);
        }
        if cells.end == cells.allocated && !self.grow(cells) {
            self.count_lost();
            return None;
        }
        let cell = cells.end;
        cells.end += 1;
        Some(cell)
    }

    /// Allocates memory for more cells, the records of fixed size in the table: about a quarter of the present number.
    /// Returns false if there is no room.
    ///
    /// The memory is allocated now, because a store to a page without memory would end firnd with SIGBUS.
    fn grow(&self, cells: &mut Cells) -> bool {
        let new_cells = GROW_CELLS_MIN
            .max(cells.allocated / 4)
            .min(CELLS_MAX - cells.allocated);
        if new_cells == 0 {
            return false;
        }
        let offset = Self::cell_offset(cells.allocated);
        let len = u64::from(new_cells) * CELL_BYTES as u64;
        let flags = FallocateFlags::empty();
        if rustix::fs::fallocate(self.map.file(), flags, offset, len).is_err() {
            return false;
        }
        cells.allocated += new_cells;
        true
    }

    /// Allocates `count` cells, or none of them.
    fn allocate_cells(&self, cells: &mut Cells, count: usize) -> Option<Vec<u32>> {
        let mut allocated = Vec::with_capacity(count);
        for _ in 0..count {
            let Some(cell) = self.allocate_cell(cells) else {
                cells.free.append(&mut allocated);
                return None;
            };
            allocated.push(cell);
        }
        Some(allocated)
    }

    /// Writes a node into new cells, and returns them. Returns `None` if there is no room.
    fn store_node(&self, cells: &mut Cells, node: &Node) -> Option<Vec<u32>> {
        let node_cells = self.allocate_cells(cells, cells_of_name(node.name.len()))?;
        let encoded = encode_node(node, &node_cells);
        // The first cell is stored last: the node counts only once it is complete.
        for (cell, bytes) in node_cells.iter().zip(&encoded).rev() {
            self.store(*cell, bytes);
        }
        Some(node_cells)
    }

    /// Records a node, unless the table has it already, and returns its entry. Returns `None` if there is no room.
    fn add_node<'a>(&self, cells: &'a mut Cells, node: &Node) -> Option<&'a mut NodeCells> {
        if !cells.nodes.contains_key(&node.id) {
            let node_cells = self.store_node(cells, node)?;
            let entry = NodeCells {
                cells: node_cells,
                previous_cells: Vec::new(),
                node: node.clone(),
                is_known: false,
                uses: 0,
            };
            cells.nodes.insert(node.id, entry);
        }
        cells.nodes.get_mut(&node.id)
    }

    /// Records that the kernel is about to get a look-up of a node. `node.lookups` is the new count.
    pub fn record_node(&self, node: &Node) {
        let mut cells = self.cells.lock();
        let Some(entry) = self.add_node(&mut cells, node) else {
            return;
        };
        entry.is_known = true;
        entry.node.lookups = node.lookups;
        let first_cell = entry.cells[0];
        self.map
            .u64(Self::cell_offset(first_cell) + LOOKUPS_AT as u64)
            .store(node.lookups, Ordering::Release);
    }

    /// Records that the kernel has released all look-ups of a node.
    pub fn forget_node(&self, id: u64) {
        let mut cells = self.cells.lock();
        if let Some(entry) = cells.nodes.get_mut(&id) {
            entry.is_known = false;
        }
        self.remove_unused_node(&mut cells, id);
    }

    /// Removes a node that neither the kernel nor a handle nor a request uses.
    fn remove_unused_node(&self, cells: &mut Cells, id: u64) {
        let is_unused = |entry: &NodeCells| !entry.is_known && entry.uses == 0;
        if !cells.nodes.get(&id).is_some_and(is_unused) {
            return;
        }
        if let Some(entry) = cells.nodes.remove(&id) {
            self.free(cells, &entry.cells);
            self.free(cells, &entry.previous_cells);
        }
    }

    /// Returns whether the table has a node.
    pub fn has_node(&self, id: u64) -> bool {
        self.cells.lock().nodes.contains_key(&id)
    }

    /// Begins the rename of a node, a file or directory that the kernel knows. Until [`LiveTable::end_rename`] the node
    /// is recorded under both names, so the next firnd finds it by either. Does nothing if the table
    /// does not have the node, or has no room.
    pub fn begin_rename(&self, id: u64, parent: u64, name: &[u8]) {
        let mut cells = self.cells.lock();
        let Some(entry) = cells.nodes.get(&id) else {
            return;
        };
        let moved = Node {
            parent,
            name: name.to_vec(),
            generation: entry.node.generation.wrapping_add(1),
            ..entry.node.clone()
        };
        let Some(node_cells) = self.store_node(&mut cells, &moved) else {
            return;
        };
        let Some(entry) = cells.nodes.get_mut(&id) else {
            return;
        };
        // If the node was being moved already, the name before the previous one is not needed any more.
        let unused_cells = std::mem::take(&mut entry.previous_cells);
        entry.previous_cells = std::mem::replace(&mut entry.cells, node_cells);
        entry.node = moved;
        self.free(&mut cells, &unused_cells);
    }

    /// Records the name under which a node was looked up. While the node is being moved, nothing changes.
    pub fn record_lookup_name(&self, id: u64, parent: u64, name: &[u8]) {
        let is_moving = |entry: &NodeCells| !entry.previous_cells.is_empty();
        if !self.cells.lock().nodes.get(&id).is_some_and(is_moving) {
            self.end_rename(id, parent, name);
        }
    }

    /// Ends the rename of a node, a file or directory that the kernel knows: from now on it is recorded only under this
    /// name. A `parent` of 0 means that it has no name any more. Other names that were recorded for it are removed.
    pub fn end_rename(&self, id: u64, parent: u64, name: &[u8]) {
        let has_other_name =
            |entry: &NodeCells| !(entry.node.parent == parent && entry.node.name == name);
        let must_record_name = {
            let cells = self.cells.lock();
            cells.nodes.get(&id).is_some_and(has_other_name)
        };
        // A rename that failed ends with the old name, while the new one is recorded. The old one is recorded again
        // first, in the same way as at the begin of a rename.
        if must_record_name {
            self.begin_rename(id, parent, name);
        }
        let mut cells = self.cells.lock();
        let Some(entry) = cells.nodes.get_mut(&id) else {
            return;
        };
        let previous_cells = std::mem::take(&mut entry.previous_cells);
        self.free(&mut cells, &previous_cells);
    }

    /// Records an open handle and its node (the file or directory), before the kernel gets the handle. So a next firnd
    /// knows each handle of the kernel. If there is no room, neither is recorded, and the mount continues.
    pub fn record_handle(&self, handle: &Handle, node: &Node) {
        let mut cells = self.cells.lock();
        if self.add_node(&mut cells, node).is_none() {
            return;
        }
        let Some(cell) = self.allocate_cell(&mut cells) else {
            // The node may have been added for this handle alone.
            self.remove_unused_node(&mut cells, node.id);
            return;
        };
        self.store(cell, &handle.encode());
        let node = node.id;
        cells.handles.insert(handle.id, HandleCell { cell, node });
        if let Some(entry) = cells.nodes.get_mut(&node) {
            entry.uses += 1;
        }
    }

    /// Records the memory file that the process of an open handle is about to map.
    pub fn record_view(&self, id: u64, number: u16) {
        self.change_handle(id, |handle| handle.view = Some(number));
    }

    /// Records that the kernel's release of a handle is about to be answered, before the handle is ended.
    pub fn record_release(&self, id: u64) {
        self.change_handle(id, |handle| handle.is_released = true);
    }

    /// Changes the entry of an open handle. `change` gets what is recorded now. Does nothing if the table does not have
    /// the handle, or has no room.
    fn change_handle(&self, id: u64, change: impl FnOnce(&mut Handle)) {
        let mut cells = self.cells.lock();
        let Some(&HandleCell { cell, node }) = cells.handles.get(&id) else {
            return;
        };
        let Ok(Some(Cell::Handle(mut handle))) = decode_cell(&self.load(cell)) else {
            return;
        };
        change(&mut handle);
        // The new cell is written before the old one is freed, so that the table has the handle at each instant.
        let Some(new_cell) = self.allocate_cell(&mut cells) else {
            return;
        };
        self.store(new_cell, &handle.encode());
        let entry = HandleCell {
            cell: new_cell,
            node,
        };
        cells.handles.insert(id, entry);
        self.free(&mut cells, &[cell]);
    }

    /// Removes the entry of a handle that has ended, and the entry of its node if nothing else uses the node.
    pub fn forget_handle(&self, id: u64) {
        let mut cells = self.cells.lock();
        let Some(HandleCell { cell, node }) = cells.handles.remove(&id) else {
            return;
        };
        self.free(&mut cells, &[cell]);
        self.release_node(&mut cells, node);
    }

    /// Records the begin of a request that must not take effect twice. `node` is the node that the request is about, if
    /// any. Returns the cell for [`LiveTable::end_request`], or `None` if there is no room.
    pub fn begin_request(&self, request: &Request, node: Option<&Node>) -> Option<u32> {
        let mut cells = self.cells.lock();
        if let Some(node) = node {
            self.add_node(&mut cells, node)?.uses += 1;
        }
        let Some(cell) = self.allocate_cell(&mut cells) else {
            self.release_node(&mut cells, request.node);
            return None;
        };
        // The cell is no longer free, so no other thread stores into it.
        drop(cells);
        self.store(cell, &request.encode());
        Some(cell)
    }

    /// Changes the entry of a request that was begun. Returns the entry's new cell.
    ///
    /// The new cell is written before the old one is freed. Without room the old cell is overwritten.
    pub fn change_request(&self, cell: u32, request: &Request) -> u32 {
        let mut cells = self.cells.lock();
        let Some(new_cell) = self.allocate_cell(&mut cells) else {
            self.store(cell, &request.encode());
            return cell;
        };
        self.store(new_cell, &request.encode());
        self.free(&mut cells, &[cell]);
        new_cell
    }

    /// Removes the entry of a request that was answered, and the entry of its node if nothing else uses the node.
    /// `node` is the node that the request was about, or 0.
    pub fn end_request(&self, cell: u32, node: u64) {
        let mut cells = self.cells.lock();
        self.free(&mut cells, &[cell]);
        self.release_node(&mut cells, node);
    }

    /// Subtracts one use from the count of a node, and removes the node if it is unused.
    fn release_node(&self, cells: &mut Cells, node: u64) {
        if let Some(entry) = cells.nodes.get_mut(&node) {
            entry.uses -= 1;
        }
        self.remove_unused_node(cells, node);
    }

    /// Takes over a request of an earlier firnd. Its node must be taken over already.
    pub fn adopt_request(&self, request: &Request) {
        if let Some(entry) = self.cells.lock().nodes.get_mut(&request.node) {
            entry.uses += 1;
        }
    }

    /// Takes over a node of an earlier firnd, under the name in `node`. `named_cells` are its cells with that name. Its
    /// other cells are freed.
    pub fn adopt_node(&self, node: &Node, named_cells: &[u32], other_cells: &[u32]) {
        let mut cells = self.cells.lock();
        let entry = NodeCells {
            cells: named_cells.to_vec(),
            previous_cells: Vec::new(),
            node: node.clone(),
            is_known: node.lookups > 0,
            uses: 0,
        };
        cells.nodes.insert(node.id, entry);
        self.free(&mut cells, other_cells);
    }

    /// Takes over a handle of an earlier firnd. Its node must be taken over already.
    pub fn adopt_handle(&self, handle: &Handle, cell: u32) {
        let mut cells = self.cells.lock();
        let node = handle.node;
        cells.handles.insert(handle.id, HandleCell { cell, node });
        if let Some(entry) = cells.nodes.get_mut(&node) {
            entry.uses += 1;
        }
    }

    /// Records a transaction, before its owner is informed that the transaction has begun. Replaces the entry that the
    /// transaction may have. Does nothing if there is no room.
    pub fn record_transaction(&self, transaction: Transaction) {
        let mut cells = self.cells.lock();
        let Some(cell) = self.allocate_cell(&mut cells) else {
            return;
        };
        self.store(cell, &transaction.encode());
        let recorded = Recorded {
            entry: transaction,
            cell,
        };
        if let Some(previous) = cells.transactions.insert(transaction.serial, recorded) {
            self.free(&mut cells, &[previous.cell]);
        }
    }

    /// Records that the abort of a transaction is about to begin.
    pub fn record_abort(&self, serial: u64) {
        let recorded = self
            .cells
            .lock()
            .transactions
            .get(&serial)
            .map(|recorded| recorded.entry);
        let Some(transaction) = recorded else {
            return;
        };
        self.record_transaction(Transaction {
            is_ending: true,
            ..transaction
        });
    }

    /// Removes the entry of a transaction that has ended.
    pub fn forget_transaction(&self, serial: u64) {
        let mut cells = self.cells.lock();
        if let Some(recorded) = cells.transactions.remove(&serial) {
            self.free(&mut cells, &[recorded.cell]);
        }
    }

    /// Removes the entries of all transactions that do not exist any more.
    pub fn retain_transactions(&self, exists: impl Fn(u64) -> bool) {
        let serials: Vec<u64> = self.cells.lock().transactions.keys().copied().collect();
        for serial in serials {
            if !exists(serial) {
                self.forget_transaction(serial);
            }
        }
    }

    /// Takes over a transaction of an earlier firnd.
    pub fn adopt_transaction(&self, transaction: Transaction, cell: u32) {
        let recorded = Recorded {
            entry: transaction,
            cell,
        };
        self.cells
            .lock()
            .transactions
            .insert(transaction.serial, recorded);
    }

    /// Records an undone scope (the transaction of a directory was aborted), or a process that was informed of the
    /// abort. Does nothing if the entry exists, or if there is no room.
    pub fn note_undone_scope(&self, scope: UndoneScope) {
        let mut cells = self.cells.lock();
        let is_recorded = cells
            .undone_scopes
            .iter()
            .any(|recorded| recorded.entry == scope);
        if is_recorded {
            return;
        }
        let Some(cell) = self.allocate_cell(&mut cells) else {
            return;
        };
        self.store(cell, &scope.encode());
        cells.undone_scopes.push(Recorded { entry: scope, cell });
    }

    /// Removes the entries of the undone scope at this path, and of the processes that were informed of it.
    pub fn forget_undone_scope(&self, path: PathSum) {
        let mut cells = self.cells.lock();
        let freed_cells: Vec<u32> = cells
            .undone_scopes
            .extract_if(.., |recorded| recorded.entry.path == path)
            .map(|recorded| recorded.cell)
            .collect();
        self.free(&mut cells, &freed_cells);
    }

    /// Returns the undone scopes (directories with an aborted transaction), and the processes that were informed.
    pub fn undone_scopes(&self) -> Vec<UndoneScope> {
        let cells = self.cells.lock();
        cells
            .undone_scopes
            .iter()
            .map(|recorded| recorded.entry)
            .collect()
    }

    /// Records the locks of one lock file, which coordinates file locks between hosts. `locks` replaces all locks that
    /// were recorded for it.
    ///
    /// New locks are recorded before the others are removed. So a lock that was recorded before, and is among `locks`,
    /// is in the table at each instant. Returns false if there is no room; the earlier locks then remain recorded too.
    #[must_use]
    pub fn set_file_locks(&self, lock_file: u64, locks: &[FileLock]) -> bool {
        let mut cells = self.cells.lock();
        let earlier = cells.file_locks.remove(&lock_file).unwrap_or_default();
        let (kept, ended): (Vec<_>, Vec<_>) = earlier
            .into_iter()
            .partition(|earlier_lock| locks.contains(&earlier_lock.entry));
        let mut recorded = kept;
        let mut has_room = true;
        for lock in locks {
            let is_recorded = recorded.iter().any(|known_lock| known_lock.entry == *lock);
            if is_recorded {
                continue;
            }
            let Some(cell) = self.allocate_cell(&mut cells) else {
                has_room = false;
                continue;
            };
            self.store(cell, &lock.encode());
            recorded.push(Recorded { entry: *lock, cell });
        }
        if has_room {
            let ended_cells: Vec<u32> = ended.iter().map(|ended_lock| ended_lock.cell).collect();
            self.free(&mut cells, &ended_cells);
        } else {
            recorded.extend(ended);
        }
        if !recorded.is_empty() {
            cells.file_locks.insert(lock_file, recorded);
        }
        has_room
    }

    /// Removes the entries of the file locks that end: those for which `is_kept` is false.
    pub fn retain_file_locks(&self, is_kept: impl Fn(&FileLock) -> bool) {
        let mut cells = self.cells.lock();
        let mut ended_cells = Vec::new();
        cells.file_locks.retain(|_, recorded| {
            let ended = recorded.extract_if(.., |recorded| !is_kept(&recorded.entry));
            ended_cells.extend(ended.map(|ended| ended.cell));
            !recorded.is_empty()
        });
        self.free(&mut cells, &ended_cells);
    }

    /// Frees cells of an earlier firnd that are not taken over.
    pub fn drop_cells(&self, unused: &[u32]) {
        self.free(&mut self.cells.lock(), unused);
    }
}

/// Groups file locks, with their cells, by the inode number of their lock file.
fn group_by_lock_file(stored: &[Stored<FileLock>]) -> HashMap<u64, Vec<Recorded<FileLock>>> {
    let mut groups: HashMap<u64, Vec<Recorded<FileLock>>> = HashMap::new();
    for stored_lock in stored {
        let recorded = recorded_in_one_cell(stored_lock);
        groups
            .entry(recorded.entry.lock_file)
            .or_default()
            .push(recorded);
    }
    groups
}

/// Reads a table, up to the largest size that a table can have.
fn read_file(file: BorrowedFd<'_>) -> Result<Vec<u8>, Errno> {
    let file_len = rustix::fs::fstat(file)?.st_size as u64;
    let mut bytes = vec![0; file_len.min(mapped_bytes()) as usize];
    let mut read_bytes = 0;
    while read_bytes < bytes.len() {
        match rustix::io::pread(file, &mut bytes[read_bytes..], read_bytes as u64)? {
            0 => break,
            count => read_bytes += count,
        }
    }
    Ok(bytes)
}

/// Returns the cells of stored entries.
fn cells_of<T>(stored: &[Stored<T>]) -> impl Iterator<Item = u32> {
    stored.iter().flat_map(|entry| entry.cells.iter().copied())
}

/// Returns a stored entry that has one cell.
fn recorded_in_one_cell<T: Copy>(stored: &Stored<T>) -> Recorded<T> {
    Recorded {
        entry: stored.entry,
        cell: stored.cells[0],
    }
}

/// Returns the size of the mapping, which has room for the largest table.
fn mapped_bytes() -> u64 {
    LiveTable::cell_offset(CELLS_MAX)
}

#[cfg(test)]
mod tests {
    use firn_format::live::{
        Device, FileTime, InitExchange, ObjectIdentity, ServedBy, TransactionOwner,
    };

    use super::*;

    fn node(id: u64, parent: u64, name: &str) -> Node {
        Node {
            id,
            parent,
            object: ObjectIdentity {
                dev: 1,
                ino: id,
                birth: None,
            },
            kind: 1,
            generation: 0,
            lookups: 1,
            name: name.as_bytes().to_vec(),
        }
    }

    fn handle(id: u64, node: u64) -> Handle {
        Handle {
            id,
            node,
            unique: id,
            flags: 2,
            served_by: ServedBy::Engine,
            view: None,
            opener: 0,
            is_released: false,
        }
    }

    fn header() -> Header {
        Header {
            arena: [1; 16],
            device: Device::default(),
            mount_point: b"/mnt".to_vec(),
            exchange: InitExchange::default(),
        }
    }

    fn sealed(dir: &Path) -> (PathBuf, LiveTable) {
        let path = dir.join("table");
        let table = LiveTable::create(&path).unwrap();
        table.seal(&header()).unwrap();
        (path, table)
    }

    #[test]
    fn what_is_noted_is_found_and_what_is_forgotten_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let (path, table) = sealed(dir.path());
        table.record_node(&node(2, 1, "dir"));
        table.record_node(&node(3, 1, &"long".repeat(60)));
        table.record_handle(&handle(9, 4), &node(4, 2, "file"));
        table.record_handle(&handle(10, 4), &node(4, 2, "file"));
        table.forget_node(3);
        table.forget_handle(9);
        let (_, left) = LiveTable::open(&path).unwrap();
        assert_eq!(left.header, header());
        assert_eq!(left.contents.damaged, 0);
        let mut ids: Vec<u64> = left.contents.nodes.iter().map(|n| n.entry.id).collect();
        ids.sort_unstable();
        assert_eq!(ids, [2, 4]);
        assert_eq!(left.contents.handles.len(), 1);
        // With the last handle its node is removed too.
        table.forget_handle(10);
        let (_, left) = LiveTable::open(&path).unwrap();
        assert_eq!(left.contents.nodes.len(), 1);
    }

    #[test]
    fn the_view_of_a_handle_is_found_and_its_cells_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let (path, table) = sealed(dir.path());
        table.record_handle(&handle(7, 2), &node(2, 1, "file"));
        for number in 0..1000 {
            table.record_view(7, number);
        }
        let cells = table.cells.lock().end;
        assert!(cells < 10, "{cells} cells");
        drop(table);
        let (_, left) = LiveTable::open(&path).unwrap();
        let [stored] = &left.contents.handles[..] else {
            panic!("{:?}", left.contents.handles);
        };
        let expected = Handle {
            view: Some(999),
            ..handle(7, 2)
        };
        assert_eq!(stored.entry, expected);
    }

    #[test]
    fn a_node_is_found_at_each_store_of_its_move() {
        let dir = tempfile::tempdir().unwrap();
        for stores in 0.. {
            let (path, table) = sealed(dir.path());
            table.record_node(&node(2, 1, "old"));
            let count = std::rc::Rc::new(std::cell::Cell::new(0));
            let seen = std::rc::Rc::clone(&count);
            let copy = dir.path().join("copy");
            let (from, to) = (path.clone(), copy.clone());
            crate::set_probe(Some(Box::new(move || {
                if seen.replace(seen.get() + 1) == stores {
                    std::fs::copy(&from, &to).unwrap();
                }
            })));
            table.begin_rename(2, 1, b"new");
            table.end_rename(2, 1, b"new");
            crate::set_probe(None);
            if count.get() <= stores {
                assert!(stores > 0);
                return;
            }
            let (_, left) = LiveTable::open(&copy).unwrap();
            assert!(!left.contents.nodes.is_empty(), "store {stores}");
            std::fs::remove_file(copy).unwrap();
        }
    }

    #[test]
    fn a_table_that_grows_keeps_what_it_has() {
        let dir = tempfile::tempdir().unwrap();
        let (path, table) = sealed(dir.path());
        for id in 2..5000 {
            table.record_node(&node(id, 1, &format!("name-{id}")));
        }
        for id in (2..5000).filter(|id| id % 3 == 0) {
            table.forget_node(id);
        }
        let (again, left) = LiveTable::open(&path).unwrap();
        assert_eq!(
            left.contents.nodes.len(),
            (2..5000).filter(|id| id % 3 != 0).count()
        );
        let bytes = again.bytes();
        again.record_node(&node(9000, 1, "another"));
        assert_eq!(again.bytes(), bytes, "a free cell is used again");
    }

    #[test]
    fn a_request_in_work_is_there_until_its_answer() {
        let dir = tempfile::tempdir().unwrap();
        let (path, table) = sealed(dir.path());
        let request = Request {
            unique: 6,
            began: FileTime { sec: 1, nsec: 0 },
            subject: None,
            other: None,
            node: 3,
            append_offset: None,
            is_append_done: false,
        };
        let about = node(3, 1, "about");
        let cell = table.begin_request(&request, Some(&about)).unwrap();
        let (_, left) = LiveTable::open(&path).unwrap();
        assert_eq!(left.contents.requests[0].entry, request);
        let appending = Request {
            append_offset: Some(7),
            ..request
        };
        let cell = table.change_request(cell, &appending);
        let (_, left) = LiveTable::open(&path).unwrap();
        assert_eq!(left.contents.requests[0].entry, appending);
        assert_eq!(left.contents.nodes[0].entry.id, 3);
        table.end_request(cell, request.node);
        let (_, left) = LiveTable::open(&path).unwrap();
        assert!(left.contents.requests.is_empty());
        assert!(left.contents.nodes.is_empty());
    }

    #[test]
    fn file_locks_are_there_at_each_store_of_their_change() {
        let dir = tempfile::tempdir().unwrap();
        let (path, table) = sealed(dir.path());
        let lock = |first, last| FileLock {
            file: 3,
            lock_file: 4,
            kind: 1,
            is_exclusive: true,
            owner: 5,
            handle: 6,
            pid: 7,
            first,
            last,
        };
        let noted_in = |path: &Path| {
            let (_, left) = LiveTable::open(path).unwrap();
            let stored = left.contents.file_locks.into_iter();
            stored.map(|stored| stored.entry).collect::<Vec<_>>()
        };
        assert!(table.set_file_locks(4, &[lock(0, 9), lock(20, 29)]));
        // The probe copies the table at each store. No copy may lack a byte that is locked before and after the call.
        let copy = dir.path().join("copy");
        let (from, to) = (path.clone(), copy.clone());
        let stores = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
        let copies = std::rc::Rc::clone(&stores);
        crate::set_probe(Some(Box::new(move || {
            std::fs::copy(&from, &to).unwrap();
            copies.borrow_mut().push(std::fs::read(&to).unwrap());
        })));
        assert!(table.set_file_locks(4, &[lock(0, 3), lock(6, 9), lock(20, 29)]));
        crate::set_probe(None);
        assert!(!stores.borrow().is_empty());
        for bytes in stores.borrow().iter() {
            std::fs::write(&copy, bytes).unwrap();
            let noted = noted_in(&copy);
            let covers = |byte| {
                let mut all = noted.iter();
                all.any(|lock: &FileLock| (lock.first..=lock.last).contains(&byte))
            };
            assert!([0, 3, 6, 9, 20].into_iter().all(covers), "{noted:?}");
        }
        drop(table);
        let (table, _) = LiveTable::open(&path).unwrap();
        assert_eq!(noted_in(&path).len(), 3);
        table.retain_file_locks(|lock| lock.first > 0);
        let mut firsts: Vec<u64> = noted_in(&path).iter().map(|lock| lock.first).collect();
        firsts.sort_unstable();
        assert_eq!(firsts, [6, 20]);
        assert!(table.set_file_locks(4, &[]));
        assert_eq!(noted_in(&path), []);
    }

    #[test]
    fn a_transaction_is_there_until_its_end_and_its_abort_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let (path, table) = sealed(dir.path());
        let transaction = Transaction {
            serial: 5,
            owner: TransactionOwner::Unowned,
            is_ending: false,
        };
        let found = || {
            let (_, left) = LiveTable::open(&path).unwrap();
            let stored = left.contents.transactions.into_iter();
            stored.map(|stored| stored.entry).collect::<Vec<_>>()
        };
        table.record_transaction(transaction);
        assert_eq!(found(), [transaction]);
        table.record_abort(5);
        let ending = Transaction {
            is_ending: true,
            ..transaction
        };
        assert_eq!(found(), [ending]);
        table.record_abort(6);
        table.retain_transactions(|serial| serial == 6);
        assert!(found().is_empty());
    }

    #[test]
    fn an_undone_scope_and_what_was_told_of_it_outlive_firnd_until_they_are_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let (path, table) = sealed(dir.path());
        let scope = |path: &[u8], informed| UndoneScope {
            path: PathSum::from_path(path),
            died_ticks: 3,
            informed,
        };
        let all = [scope(b"a", None), scope(b"a", Some(7)), scope(b"b", None)];
        for _ in 0..2 {
            all.into_iter().for_each(|one| table.note_undone_scope(one));
        }
        drop(table);
        let (table, _) = LiveTable::open(&path).unwrap();
        assert_eq!(table.undone_scopes(), all);
        table.record_handle(&handle(9, 4), &node(4, 2, "file"));
        table.forget_undone_scope(PathSum::from_path(b"a"));
        let (again, left) = LiveTable::open(&path).unwrap();
        assert_eq!(again.undone_scopes(), [scope(b"b", None)]);
        assert_eq!((left.contents.handles.len(), left.contents.damaged), (1, 0));
    }

    #[test]
    fn a_table_without_its_header_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        LiveTable::create(&path).unwrap();
        assert!(matches!(
            LiveTable::open(&path),
            Err(LiveTableError::Format(LiveError::Magic))
        ));
    }
}
