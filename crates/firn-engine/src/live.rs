//! Takeover of a mount by the next firnd (the process that serves it): restores the inodes, handles and requests that
//! the kernel knows, after an earlier firnd died.
//!
//! Each firnd records these in the *live table*, a mapped file from which the next firnd reads them. A *node* is the
//! record of an inode in it.
//!
//! Promises
//! * Nothing here calls the backing, except for open directories and for nodes whose rename was under way. So the time
//!   for which programs wait does not depend on the number of files.
//! * A node is checked at its first use: its name must lead to the object that the table records, else its users get
//!   ESTALE.
//! * A number (of an inode or handle) that an earlier firnd gave to the kernel is never used for another object.
//!
//! Relies on: the kernel looks a path up again after ESTALE. Files that no program has open are not in the table, so
//! the first request for such a file after a takeover gets ESTALE. The new lookup finds the same inode number.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_arena::MemoryFile;
use firn_arena::live::LiveTable;
use firn_backing::lock::Mutex;
use firn_backing::{Attr, Backing, Errno, Kind, Time, is_below, join_path};
use firn_format::live::{
    Contents, FileTime, Handle as HandleRecord, Node, ObjectIdentity, PathSum, Request, ServedBy,
    Stored, UndoneScope,
};

use crate::data::O_ACCMODE;
use crate::engine::Engine;
use crate::nameless::{FileKeeper, HiddenFile};
use crate::names::{Inode, KnownObject, NumberBase, ObjectKey};
use crate::{HandleId, InodeId, OpenMode, ROOT, Result};

/// Number of low bits of an inode or handle number. One firnd counts in these bits; the bits above them contain the
/// number of takeovers, so that no two firnds assign the same number.
const FIRND_NUMBER_BITS: u32 = 40;

/// Number in records of the live table that refer to no node.
const NO_NODE: u64 = 0;

/// State that an earlier firnd left for this one.
pub struct Resumed {
    /// The live table, in which this firnd continues to record.
    pub table: Arc<LiveTable>,
    /// Contents of the table at the takeover.
    pub contents: Contents,
    /// Number of takeovers of the mount, including this one.
    pub takeovers: u64,
    /// Open files without a name.
    pub files: Vec<HiddenFile>,
    /// The process that keeps descriptors of open files without a name for the next firnd.
    pub keeper: Option<Arc<dyn FileKeeper>>,
    /// Time of the earlier firnd's death, in clock ticks since the host started.
    pub died_ticks: u64,
    /// What the mount's programs lose at the takeover.
    pub losses: Mutex<TakeoverLosses>,
}

/// What programs lose at a takeover: their writes in transactions that are aborted, and handles.
#[derive(Debug, Default)]
pub struct TakeoverLosses {
    /// Paths of the scopes of aborted transactions.
    pub scopes: BTreeSet<Vec<u8>>,
    /// Handles that are not open any more. Programs that use them get EIO.
    handles: HashSet<u64>,
}

/// The part of a resumed mount that concerns requests and their answers.
#[derive(Debug, Default)]
pub struct ResumedRequests {
    /// Open handles with their inodes.
    pub handles: Vec<ResumedHandle>,
    /// Requests that the earlier firnd had begun and not answered, by the kernel's number.
    pub requests: HashMap<u64, ResumedRequest>,
    /// Handles that could not be restored.
    pub bad_handles: u64,
}

/// A handle that an earlier firnd gave to the kernel.
#[derive(Clone, Copy, Debug)]
pub struct ResumedHandle {
    /// The handle.
    pub id: HandleId,
    /// Its inode.
    pub inode: InodeId,
    /// Number of the request that opened the handle.
    pub unique: u64,
    /// What serves the handle.
    pub served_by: ServedBy,
    /// Whether the kernel has already released the handle, and will not do so again.
    pub is_released: bool,
}

/// A request that an earlier firnd had begun and not answered.
#[derive(Clone, Copy, Debug)]
pub struct ResumedRequest {
    /// The request, as the live table records it.
    pub request: Request,
    cell: u32,
}

impl Resumed {
    /// Ends the programs' use of the files of transactions that are about to be aborted, because their firnd died.
    /// `scopes` are the paths of these files and directories. `checkpoint_keys` name the checkpoints of commit rules
    /// among them; all files of a checkpoint have its key.
    ///
    /// Records each path and key in the live table (the file that outlives firnd), so that programs can be informed.
    /// Removes the handles that may write there or read uncommitted bytes.
    ///
    /// Must be called before the backing forgets the transactions. If firnd is killed in between, the next firnd finds
    /// them there and calls this again.
    pub fn abandon_scopes(&self, scopes: &[Vec<u8>], checkpoint_keys: &[Vec<u8>]) {
        // One record for each aborted path, at first without a process that was informed of the abort.
        for path in scopes.iter().chain(checkpoint_keys) {
            self.table.note_undone_scope(UndoneScope {
                path: PathSum::from_path(path),
                died_ticks: self.died_ticks,
                informed: None,
            });
        }
        let node_paths = NodePaths::from_nodes(&self.contents.nodes);
        let is_path_in_scope = |path: &Vec<u8>| scopes.iter().any(|scope| is_below(path, scope));
        let is_node_in_scope = |node: u64| {
            let paths = node_paths.possible_paths(node, PATH_DEPTH_MAX);
            paths.iter().any(is_path_in_scope)
        };
        self.abandon_handles(|handle| {
            has_uncommitted_bytes(handle) && is_node_in_scope(handle.node)
        });
        self.losses.lock().scopes.extend(scopes.iter().cloned());
    }

    /// Abandons the handles for which `is_lost` is true: their programs get EIO, instead of continuing without the lost
    /// data.
    pub fn abandon_handles(&self, is_lost: impl Fn(&HandleRecord) -> bool) {
        let mut losses = self.losses.lock();
        for stored in &self.contents.handles {
            if is_lost(&stored.entry) && losses.handles.insert(stored.entry.id) {
                self.table.drop_cells(&stored.cells);
            }
        }
    }
}

/// Maximum number of nested directories in a path of 4096 bytes.
const PATH_DEPTH_MAX: usize = 2048;

/// Returns whether the bytes that a handle writes or shows may belong to an aborted transaction: the handle is open for
/// writing, or its file is read from a memory file.
fn has_uncommitted_bytes(handle: &HandleRecord) -> bool {
    let writes = handle.flags & O_ACCMODE != 0;
    handle.served_by != ServedBy::Directory && (writes || handle.view.is_some())
}

/// Paths of nodes, from the records of a live table.
struct NodePaths<'a> {
    /// Records of each node, by its number. A node that was being renamed has two records.
    records: HashMap<u64, Vec<&'a Node>>,
}

impl<'a> NodePaths<'a> {
    fn from_nodes(nodes: &'a [Stored<Node>]) -> Self {
        let mut records: HashMap<u64, Vec<&Node>> = HashMap::new();
        for node in nodes {
            records.entry(node.entry.id).or_default().push(&node.entry);
        }
        Self { records }
    }

    /// Returns all paths that a node (the record of an inode in the live table) may have, with at most `depth_max`
    /// names each. A node that was being renamed has both paths. The limit ends the search if a damaged table has a
    /// cycle of directories.
    fn possible_paths(&self, node: u64, depth_max: usize) -> Vec<Vec<u8>> {
        if node == ROOT.0 {
            return vec![Vec::new()];
        }
        let mut paths = Vec::new();
        if depth_max == 0 {
            return paths;
        }
        for record in self.records.get(&node).into_iter().flatten() {
            let name = OsStr::from_bytes(&record.name);
            for dir in self.possible_paths(record.parent, depth_max - 1) {
                paths.push(join_path(&dir, name));
            }
        }
        paths
    }
}

/// A request that is recorded in the live table. A drop removes the record.
#[derive(Debug)]
pub struct RecordedRequest {
    table: Arc<LiveTable>,
    cell: u32,
    request: Request,
}

impl RecordedRequest {
    /// Records that the request writes at `offset` from now on. If firnd dies, the repeated request writes there too.
    pub fn record_append(&mut self, offset: u64) {
        self.request.append_offset = Some(offset);
        self.cell = self.table.change_request(self.cell, &self.request);
    }

    /// Records that all bytes of the append are written. If firnd dies, the repeated request writes nothing.
    pub fn record_append_done(&mut self) {
        self.request.is_append_done = true;
        self.cell = self.table.change_request(self.cell, &self.request);
    }
}

/// The objects that a request is about. The request must not take effect twice.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestObjects {
    /// The object to which the request's name leads.
    pub subject: Option<ObjectIdentity>,
    /// The object to which the request's second name leads.
    pub other: Option<ObjectIdentity>,
    /// The node to which the kernel refers by number.
    pub node: Option<InodeId>,
}

impl std::fmt::Debug for Resumed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resumed")
            .field("takeovers", &self.takeovers)
            .finish_non_exhaustive()
    }
}

impl Drop for RecordedRequest {
    fn drop(&mut self) {
        self.table.end_request(self.cell, self.request.node);
    }
}

pub(crate) fn moment(time: Time) -> FileTime {
    FileTime {
        sec: time.sec,
        nsec: time.nsec,
    }
}

/// Returns the identity of the object with these attributes.
pub(crate) fn identity_of(attr: &Attr) -> ObjectIdentity {
    ObjectIdentity {
        dev: attr.dev,
        ino: attr.ino,
        birth: attr.btime.map(moment),
    }
}

/// Returns whether two identities belong to one object. The inode number alone is not enough: a later object may get
/// the same number. Times of birth are compared if both are known.
pub(crate) fn is_same_object(a: &ObjectIdentity, b: &ObjectIdentity) -> bool {
    let births = a.birth.zip(b.birth);
    let have_same_birth = births.is_none_or(|(a_birth, b_birth)| a_birth == b_birth);
    (a.dev, a.ino) == (b.dev, b.ino) && have_same_birth
}

/// Returns the number of a kind in the live table.
fn kind_number(kind: Kind) -> u8 {
    match kind {
        Kind::File => 1,
        Kind::Dir => 2,
        Kind::Symlink => 3,
        Kind::Fifo => 4,
        Kind::Socket => 5,
        Kind::CharDevice => 6,
        Kind::BlockDevice => 7,
    }
}

/// Returns the kind with this number in the live table.
fn kind_from_number(number: u8) -> Option<Kind> {
    let kinds = [
        Kind::File,
        Kind::Dir,
        Kind::Symlink,
        Kind::Fifo,
        Kind::Socket,
        Kind::CharDevice,
        Kind::BlockDevice,
    ];
    kinds.into_iter().find(|kind| kind_number(*kind) == number)
}

impl<B: Backing> Inode<B> {
    /// Returns the identity of the inode's object.
    pub(crate) fn identity(&self) -> ObjectIdentity {
        ObjectIdentity {
            dev: self.key.dev,
            ino: self.key.ino,
            birth: self.btime.map(moment),
        }
    }

    /// Returns the record of this inode for the live table (what a next firnd must know), with the first of its names,
    /// and with `lookups` as the number of references that the kernel has.
    pub(crate) fn live_node_with_lookups(&self, lookups: u64) -> Node {
        let first_name = self.names_with_parents().into_iter().next();
        let (parent_id, name) = match first_name {
            Some((parent, name)) => (parent.id.0, name.as_bytes().to_vec()),
            None => (NO_NODE, Vec::new()),
        };
        Node {
            id: self.id.0,
            parent: parent_id,
            object: self.identity(),
            kind: kind_number(self.kind),
            generation: 0,
            lookups,
            name,
        }
    }

    /// Returns the record of this inode for changes that leave the number of lookups in the table as it is.
    pub(crate) fn live_node(&self) -> Node {
        self.live_node_with_lookups(0)
    }
}

impl<B: Backing> Engine<B> {
    /// Records in `table`, from now on, the inodes and handles that the kernel has. Must be called before the first
    /// request.
    pub fn note_live(&self, table: Arc<LiveTable>) {
        self.tree.names.set_live_table(table);
    }

    /// Returns the live table, if there is one.
    pub fn live(&self) -> Option<&Arc<LiveTable>> {
        self.tree.names.live()
    }

    /// Records a handle of a file in the live table, which a next firnd reads, before the kernel gets the handle. Does
    /// nothing if the mount has no table. `request_id` is the kernel's number of the request. `backing_id` is the
    /// number of the file that the kernel reads itself for this handle (passthrough), if there is one.
    pub fn record_open_handle(
        &self,
        id: HandleId,
        request_id: u64,
        flags: i32,
        backing_id: Option<i32>,
    ) {
        let (Some(live), Ok(handle)) = (self.live(), self.open_files.handle(id)) else {
            return;
        };
        let mode = *handle.mode.lock();
        let served_by = match (mode, backing_id) {
            (_, Some(backing_id)) => ServedBy::Passthrough(backing_id),
            (OpenMode::Cached { .. }, None) => ServedBy::Cache,
            (OpenMode::Engine | OpenMode::Passthrough | OpenMode::Memory, None) => ServedBy::Engine,
        };
        // The memory file that the kernel reads for this handle. The next firnd stores each change of the file there
        // too.
        let view_number = if mode == OpenMode::Memory {
            handle.file.lock().view.as_ref().map(|view| view.number())
        } else {
            None
        };
        let inode = &handle.file.inode;
        let record = HandleRecord {
            id: id.0,
            node: inode.id.0,
            unique: request_id,
            flags,
            served_by,
            view: view_number,
            opener: handle.opener.load(Ordering::Relaxed),
            is_released: false,
        };
        live.record_handle(&record, &inode.live_node());
    }

    /// Records a handle of a directory in the live table, which a next firnd reads, before the kernel gets the handle.
    /// Does nothing if the mount has no table. `request_id` is the kernel's number of the request.
    pub fn record_open_directory(&self, id: HandleId, inode_id: InodeId, request_id: u64) {
        let (Some(live), Ok(inode)) = (self.live(), self.tree.inode(inode_id)) else {
            return;
        };
        let record = HandleRecord {
            id: id.0,
            node: inode.id.0,
            unique: request_id,
            flags: 0,
            served_by: ServedBy::Directory,
            view: None,
            opener: 0,
            is_released: false,
        };
        live.record_handle(&record, &inode.live_node());
    }

    /// Records in the live table a request that must not take effect twice: if firnd dies before the answer, the next
    /// firnd compares the record with the backing. The record is removed when the result is dropped. `request_id` is
    /// the kernel's number of the request.
    ///
    /// Returns `None` if the mount has no live table (the file that a next firnd reads), or if the table is full.
    pub fn record_request(
        &self,
        request_id: u64,
        objects: RequestObjects,
    ) -> Option<RecordedRequest> {
        let table = self.live()?;
        let live_node = objects.node.and_then(|id| self.live_node_of(id));
        let request = Request {
            unique: request_id,
            began: file_clock_now(),
            subject: objects.subject,
            other: objects.other,
            node: live_node.as_ref().map_or(NO_NODE, |node| node.id),
            append_offset: None,
            is_append_done: false,
        };
        let cell = table.begin_request(&request, live_node.as_ref())?;
        Some(RecordedRequest {
            table: Arc::clone(table),
            cell,
            request,
        })
    }

    /// Returns the live table's record of an inode. Returns `None` for an unknown inode, and for the root, which the
    /// table does not have.
    fn live_node_of(&self, id: InodeId) -> Option<Node> {
        if id == ROOT {
            return None;
        }
        let inode = self.tree.inode(id).ok()?;
        Some(inode.live_node())
    }

    /// Continues the record of a request that an earlier firnd had begun.
    pub fn continue_request_record(&self, resumed: &ResumedRequest) -> Option<RecordedRequest> {
        Some(RecordedRequest {
            table: Arc::clone(self.live()?),
            cell: resumed.cell,
            request: resumed.request,
        })
    }

    /// Restores nodes (records of inodes) and handles of an earlier firnd from the live table. Returns the handles, and
    /// the requests that the earlier firnd had not answered.
    ///
    /// Must be called before data is recovered: a file with an open handle does not count as closed by its writers.
    pub(crate) fn resume(&self, resumed: &Resumed) -> ResumedRequests {
        // Numbers of this firnd are above those of all earlier ones.
        let number_base = NumberBase(resumed.takeovers << FIRND_NUMBER_BITS);
        let names = &self.tree.names;
        names.set_live_table(Arc::clone(&resumed.table));
        names.start_numbers_at(number_base);
        self.open_files.handles.start_numbers_at(number_base.0);
        NodeRestorer::new(self, &resumed.table, &resumed.contents.nodes).restore_all();
        let mut result = ResumedRequests::default();
        self.resume_handles(resumed, &mut result);
        if let Some(keeper) = &resumed.keeper {
            self.set_file_keeper(Arc::clone(keeper));
        }
        self.resume_nameless(&resumed.files);
        for stored in &resumed.contents.requests {
            let request = stored.entry;
            let cell = only_cell(stored);
            resumed.table.adopt_request(&request);
            result
                .requests
                .insert(request.unique, ResumedRequest { request, cell });
        }
        result
    }

    /// Restores the handles of an earlier firnd, except those that programs lose with an aborted transaction. A handle
    /// that cannot be restored is removed from the live table and counted.
    fn resume_handles(&self, resumed: &Resumed, result: &mut ResumedRequests) {
        let lost_handles = resumed.losses.lock().handles.clone();
        result.bad_handles += lost_handles.len() as u64;
        for stored in &resumed.contents.handles {
            let handle = &stored.entry;
            let cell = only_cell(stored);
            if lost_handles.contains(&handle.id) {
                continue;
            }
            match self.resume_handle(handle) {
                Ok(()) => {
                    resumed.table.adopt_handle(handle, cell);
                    result.handles.push(ResumedHandle::from_record(handle));
                }
                Err(errno) => {
                    let path = self.tree.shown_path(InodeId(handle.node), None);
                    tracing::warn!(%errno, path, "an open file cannot be restored: its program gets EIO");
                    resumed.table.drop_cells(&[cell]);
                    result.bad_handles += 1;
                }
            }
        }
    }

    /// Restores a handle of a file or a directory under the number that the kernel knows. Fails if its inode or memory
    /// file was not restored.
    fn resume_handle(&self, record: &HandleRecord) -> Result<()> {
        let inode = self.tree.inode(InodeId(record.node))?;
        let mode = match record.served_by {
            ServedBy::Engine => OpenMode::Engine,
            ServedBy::Cache => OpenMode::Cached { keep: false },
            // The file that the kernel reads is the memory file of the record, or else the backing's file.
            ServedBy::Passthrough(_) if record.view.is_some() => OpenMode::Memory,
            ServedBy::Passthrough(_) => OpenMode::Passthrough,
            // A directory has no mode, and is restored here.
            ServedBy::Directory => {
                let object = self.tree.object(&inode)?;
                let dir = self.base.backing.open_dir(&object)?;
                let id = HandleId(record.id);
                self.open_files.handles.insert_dir_as(id, dir);
                return Ok(());
            }
        };
        // The table is damaged if a handle of a file belongs to another kind of object.
        if inode.kind != Kind::File {
            return Err(Errno::IO);
        }
        self.resume_file_handle(record, &inode, mode)
    }

    /// Restores a handle of a file that is served in this mode. Fails if the kernel or a program reads a memory file
    /// through the handle, and this memory file is gone.
    fn resume_file_handle(
        &self,
        record: &HandleRecord,
        inode: &Arc<Inode<B>>,
        mode: OpenMode,
    ) -> Result<()> {
        let id = HandleId(record.id);
        // The view is the memory file that is read. It also gets each change of the file.
        let view = match record.view {
            Some(number) => Some(self.reopen_view(number)?),
            None => None,
        };
        // If the kernel does not read the view itself, the process of the handle maps it.
        let is_mapped = view.is_some() && mode != OpenMode::Memory;
        self.insert_handle(id, inode, record.flags, |state| {
            // If this handle has no view, the file keeps the one of another handle.
            if view.is_some() {
                state.view = view;
            }
            mode
        });
        if is_mapped {
            let inserted = self.open_files.handle(id)?;
            inserted.record_mapping(&mut inserted.file.lock());
        }
        self.record_opener(id, record.opener);
        if matches!(mode, OpenMode::Cached { .. }) {
            self.kernel_cache.expect_stale_pages(inode);
        }
        // If a process wrote the file directly, the kernel may have recorded a length that is too small.
        if self.open_files.is_writer(id) {
            inode.is_size_stale_in_kernel.store(true, Ordering::Release);
        }
        Ok(())
    }
}

impl<B: Backing> Engine<B> {
    /// Reopens the memory file that the reader of a handle continues to read.
    fn reopen_view(&self, number: u16) -> Result<Arc<MemoryFile>> {
        self.base.arena.reopen_view(number).map_err(|why| {
            tracing::warn!(
                number,
                why,
                "memory that programs read directly cannot be restored"
            );
            Errno::IO
        })
    }
}

impl ResumedHandle {
    fn from_record(record: &HandleRecord) -> Self {
        Self {
            id: HandleId(record.id),
            inode: InodeId(record.node),
            unique: record.unique,
            served_by: record.served_by,
            is_released: record.is_released,
        }
    }
}

/// Returns the only cell (place in the table) of a handle or a request. Only nodes have several cells.
fn only_cell<T>(stored: &Stored<T>) -> u32 {
    stored.cells[0]
}

/// Returns the time of the clock with which the kernel stamps files. It advances only at each tick of the kernel.
fn file_clock_now() -> FileTime {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    FileTime {
        sec: now.tv_sec,
        nsec: now.tv_nsec as u32,
    }
}

/// Restores the nodes of an earlier firnd as inodes.
struct NodeRestorer<'a, B: Backing> {
    engine: &'a Engine<B>,
    table: &'a LiveTable,
    /// Records of each node, by its number. A node has two records if a rename was under way: the later record comes
    /// first.
    records: HashMap<u64, Vec<&'a Stored<Node>>>,
    /// Numbers of the nodes that are being restored now: a node, its directory, and so on. They end the search if a
    /// damaged table has a cycle.
    under_way: HashSet<u64>,
}

impl<'a, B: Backing> NodeRestorer<'a, B> {
    fn new(engine: &'a Engine<B>, table: &'a LiveTable, stored: &'a [Stored<Node>]) -> Self {
        let mut records: HashMap<u64, Vec<&Stored<Node>>> = HashMap::new();
        for node in stored {
            records.entry(node.entry.id).or_default().push(node);
        }
        for records_of_node in records.values_mut() {
            records_of_node.sort_by_key(|record| std::cmp::Reverse(record.entry.generation));
        }
        Self {
            engine,
            table,
            records,
            under_way: HashSet::new(),
        }
    }

    fn restore_all(&mut self) {
        let ids: Vec<u64> = self.records.keys().copied().collect();
        for id in ids {
            self.restore(id);
        }
    }

    /// Restores a node (the record of an inode in the live table) and the directories above it. Returns `None` if one
    /// of them is not in the table.
    fn restore(&mut self, id: u64) -> Option<Arc<Inode<B>>> {
        let names = &self.engine.tree.names;
        if id == ROOT.0 {
            return Some(Arc::clone(names.root()));
        }
        if let Some(known) = names.get(InodeId(id)) {
            return Some(known);
        }
        // A damaged table may have a directory below itself. The search then comes back to a node that is under way.
        if !self.under_way.insert(id) {
            return None;
        }
        let records = self.records.get(&id)?.clone();
        let restored = self.restore_from(&records);
        self.under_way.remove(&id);
        restored
    }

    /// Restores a node (an inode of an earlier firnd) from its one or two records in the live table. There are two if a
    /// rename was under way. Then the name that leads to the node in the backing counts, and the other record is
    /// removed.
    ///
    /// Returns `None` if no directory of the node can be restored; then all its records are removed. Also returns
    /// `None` if the table is damaged: the record has an unknown kind of object.
    fn restore_from(&mut self, records: &[&Stored<Node>]) -> Option<Arc<Inode<B>>> {
        let mut candidates = Vec::new();
        for record in records {
            let parent = match record.entry.parent {
                // The node has no name.
                NO_NODE => None,
                parent_id => match self.restore(parent_id) {
                    Some(parent) => Some(parent),
                    None => continue,
                },
            };
            candidates.push(NodeCandidate { record, parent });
        }
        if candidates.is_empty() {
            for record in records {
                self.table.drop_cells(&record.cells);
            }
            return None;
        }
        let chosen_index = self.choose_candidate(&candidates);
        let NodeCandidate { record, parent } = candidates.swap_remove(chosen_index);
        let node = &record.entry;
        let object = known_object(node)?;
        let name = parent
            .as_ref()
            .map(|parent| (parent, OsStr::from_bytes(&node.name)));
        let restored = self
            .engine
            .tree
            .names
            .restore(InodeId(node.id), object, name, node.lookups);
        let unused_cells: Vec<u32> = records
            .iter()
            .filter(|candidate| !std::ptr::eq(**candidate, record))
            .flat_map(|unused| unused.cells.clone())
            .collect();
        self.table.adopt_node(node, &record.cells, &unused_cells);
        Some(restored)
    }

    /// Returns the index of the candidate whose name leads to the node in the backing. If there is only one candidate,
    /// the backing is not asked. If no name leads to the node, the first candidate is chosen.
    fn choose_candidate(&self, candidates: &[NodeCandidate<'_, B>]) -> usize {
        if candidates.len() == 1 {
            return 0;
        }
        for (i, candidate) in candidates.iter().enumerate() {
            if let Some(parent) = &candidate.parent
                && self.leads_to(&candidate.record.entry, parent)
            {
                return i;
            }
        }
        0
    }

    /// Returns whether the name of a node in `parent` leads to the object of the node.
    fn leads_to(&self, node: &Node, parent: &Arc<Inode<B>>) -> bool {
        let Ok(dir) = self.engine.tree.object(parent) else {
            return false;
        };
        let name = OsStr::from_bytes(&node.name);
        match self.engine.base.backing.lookup(&dir, name) {
            Ok((_, attr)) => is_same_object(&identity_of(&attr), &node.object),
            Err(_) => false,
        }
    }
}

/// A record of a node that may be the valid one, and the restored directory of its name.
struct NodeCandidate<'a, B: Backing> {
    record: &'a Stored<Node>,
    /// `None` if the record has no name.
    parent: Option<Arc<Inode<B>>>,
}

/// Returns the object of a node, as the table records it. Returns `None` if the record has an unknown kind.
fn known_object(node: &Node) -> Option<KnownObject> {
    Some(KnownObject {
        key: ObjectKey {
            dev: node.object.dev,
            ino: node.object.ino,
        },
        kind: kind_from_number(node.kind)?,
        btime: node.object.birth.map(|birth| Time {
            sec: birth.sec,
            nsec: birth.nsec,
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{O_RDWR, O_WRONLY};

    fn node(id: u64, parent: u64, name: &str) -> Node {
        Node {
            id,
            parent,
            object: ObjectIdentity {
                dev: 1,
                ino: id,
                birth: None,
            },
            kind: kind_number(Kind::File),
            generation: 0,
            lookups: 1,
            name: name.as_bytes().to_vec(),
        }
    }

    fn handle(id: u64, node: u64, flags: i32) -> HandleRecord {
        HandleRecord {
            id,
            node,
            unique: id,
            flags,
            served_by: ServedBy::Engine,
            view: None,
            opener: 0,
            is_released: false,
        }
    }

    /// Creates a live table with a header.
    fn create(path: &std::path::Path) -> LiveTable {
        let table = LiveTable::create(path).unwrap();
        let header = firn_format::live::Header {
            arena: [1; 16],
            device: Default::default(),
            mount_point: Vec::new(),
            exchange: Default::default(),
        };
        table.seal(&header).unwrap();
        table
    }

    /// Resumes the mount of a live table, as the next firnd does.
    fn resume(path: &std::path::Path) -> Resumed {
        let (table, contents) = open(path);
        Resumed {
            table: Arc::new(table),
            contents,
            takeovers: 1,
            files: Vec::new(),
            keeper: None,
            died_ticks: 5,
            losses: Mutex::default(),
        }
    }

    fn open(path: &std::path::Path) -> (LiveTable, Contents) {
        let (table, left) = LiveTable::open(path).unwrap();
        (table, left.contents)
    }

    #[test]
    fn handles_that_write_in_a_lost_scope_go_and_all_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        let table = create(&path);
        table.record_node(&node(2, ROOT.0, "scope"));
        for (id, of, flags) in [
            (7, node(3, 2, "file"), O_WRONLY),
            (8, node(3, 2, "file"), 0),
            (9, node(4, ROOT.0, "scope2"), O_RDWR),
            (10, node(5, 0, ""), O_RDWR),
            (11, node(6, ROOT.0, "moves"), O_RDWR),
        ] {
            table.record_handle(&handle(id, of.id, flags), &of);
        }
        // The rename of this node into the scope was under way.
        table.begin_rename(6, 2, b"moved");
        drop(table);
        let resumed = resume(&path);
        for _ in 0..2 {
            resumed.abandon_scopes(&[b"scope".to_vec()], &[b"key".to_vec()]);
        }
        let (table, contents) = open(&path);
        let mut left: Vec<u64> = contents.handles.iter().map(|one| one.entry.id).collect();
        left.sort_unstable();
        assert_eq!(left, [8, 9, 10]);
        let scopes = table.undone_scopes();
        assert_eq!(scopes.len(), 2);
        assert!(scopes[0].covers(b"scope/file") && scopes[1].covers(b"key"));
        resumed.abandon_scopes(&[Vec::new()], &[]);
        let (_, contents) = open(&path);
        let left: Vec<u64> = contents.handles.iter().map(|one| one.entry.id).collect();
        assert_eq!(left, [8, 10]);
    }

    /// The cell of a handle that was lost for both reasons was freed twice, and then used for two entries.
    #[test]
    fn regression_a_handle_that_loses_its_locks_and_its_transaction_is_abandoned_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        let table = create(&path);
        let file = node(2, ROOT.0, "file");
        table.record_handle(&handle(7, 2, O_WRONLY), &file);
        drop(table);
        let resumed = resume(&path);
        resumed.abandon_handles(|handle| handle.id == 7);
        resumed.abandon_scopes(&[Vec::new()], &[]);
        for id in [8, 9, 10] {
            resumed.table.record_handle(&handle(id, 2, O_WRONLY), &file);
        }
        let (_, contents) = open(&path);
        let left: Vec<u64> = contents.handles.iter().map(|one| one.entry.id).collect();
        assert_eq!(left, [8, 9, 10]);
    }
}
