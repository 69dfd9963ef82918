//! State of a mount that the kernel has (inodes, handles, requests), for a firnd that resumes the mount after an
//! earlier firnd died.
//!
//! Promises
//! * Nothing here calls the backing, except for open directories and for nodes whose rename was under way. So the time
//!   for which programs wait does not depend on the number of files.
//! * A node is checked at its first use: its name must lead to the object that the table records, else its users get
//!   ESTALE.
//! * A number (of an inode or handle) that an earlier firnd gave to the kernel is never used for another object.
//!
//! Files that no program has open are not in the table. The kernel refers to such a file by the backing's inode number.
//! A request with that number gets ESTALE. Then the kernel looks the name up, and gets the same number.

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
    Contents, Handle, Moment, Node, ObjectIdentity, PathSum, Request, ServedBy, Stored, UndoneScope,
};

use crate::data::O_ACCMODE;
use crate::engine::Engine;
use crate::nameless::{FileKeeper, KeptFile};
use crate::names::{Inode, KnownObject, NumberBase, ObjectKey};
use crate::{HandleId, InodeId, OpenMode, ROOT, Result};

/// Number of low bits of an inode or handle number in which one firnd counts; the higher bits contain the number of
/// takeovers.
const NUMBERS_OF_A_FIRND: u32 = 40;

/// State that an earlier firnd left for this one.
pub struct Resumed {
    /// The live table, in which this firnd continues to record.
    pub table: Arc<LiveTable>,
    /// Contents of the table at the takeover.
    pub contents: Contents,
    /// Number of takeovers of the mount, including this one.
    pub takeovers: u64,
    /// Open files without a name.
    pub files: Vec<KeptFile>,
    /// Keeps open files without a name from now on.
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
    /// Abandons the scopes of transactions that are about to be aborted, because their firnd died.
    ///
    /// * Notes each scope in the live table, so that firnd can inform the programs in it.
    /// * Removes the handles that could write in a scope. Otherwise their programs would continue although earlier
    ///   writes are dropped.
    ///
    /// Must be called before the backing forgets the transactions: after a kill in between, the next firnd finds the
    /// transactions in the backing.
    ///
    /// `checkpoint_keys`: keys of the scopes that are checkpoints of a commit rule. A file with such a key belongs to the
    /// checkpoint even if no program has written it yet.
    pub fn abandon_scopes(&self, scopes: &[Vec<u8>], checkpoint_keys: &[Vec<u8>]) {
        for path in scopes.iter().chain(checkpoint_keys) {
            self.table.note_undone_scope(UndoneScope {
                path: PathSum::of(path),
                died_ticks: self.died_ticks,
                informed: None,
            });
        }
        let paths = NodePaths::of(&self.contents.nodes);
        self.abandon_handles(|handle| {
            let is_below_one = |path: &Vec<u8>| scopes.iter().any(|scope| is_below(path, scope));
            let is_in_scope = || {
                let paths = paths.paths_of(handle.node, PATH_DEPTH_MAX);
                paths.iter().any(is_below_one)
            };
            has_uncommitted_bytes(handle) && is_in_scope()
        });
        self.losses.lock().scopes.extend(scopes.iter().cloned());
    }

    /// Abandons the handles for which `is_lost` is true: their programs get EIO, instead of continuing without the lost
    /// data.
    pub fn abandon_handles(&self, is_lost: impl Fn(&Handle) -> bool) {
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
fn has_uncommitted_bytes(handle: &Handle) -> bool {
    let writes = handle.flags & O_ACCMODE != 0;
    handle.served_by != ServedBy::Directory && (writes || handle.view.is_some())
}

/// Paths of nodes, from the records of a live table.
struct NodePaths<'a>(HashMap<u64, Vec<&'a Node>>);

impl<'a> NodePaths<'a> {
    fn of(nodes: &'a [Stored<Node>]) -> Self {
        let mut by_id: HashMap<u64, Vec<&Node>> = HashMap::new();
        for node in nodes {
            by_id.entry(node.entry.id).or_default().push(&node.entry);
        }
        Self(by_id)
    }

    /// Returns all paths that a node may have. A node that was being renamed has both paths. `depth` ends the search: a
    /// damaged table could have a cycle of directories.
    fn paths_of(&self, id: u64, depth: usize) -> Vec<Vec<u8>> {
        if id == ROOT.0 {
            return vec![Vec::new()];
        }
        let nodes = self.0.get(&id).filter(|_| depth > 0);
        let paths_of_node = |node: &'a Node| {
            let dirs = self.paths_of(node.parent, depth - 1);
            let name = OsStr::from_bytes(&node.name);
            dirs.into_iter().map(move |dir| join_path(&dir, name))
        };
        nodes
            .into_iter()
            .flatten()
            .flat_map(|node| paths_of_node(node))
            .collect()
    }
}

/// The note of a request in the live table. A drop removes the note.
#[derive(Debug)]
pub struct NotedRequest {
    table: Arc<LiveTable>,
    cell: u32,
    request: Request,
}

impl NotedRequest {
    /// Notes that the request writes at `offset` from now on. If firnd dies, the repeated request writes there too.
    pub fn note_append(&mut self, offset: u64) {
        self.request.append_offset = Some(offset);
        self.cell = self.table.change_request(self.cell, &self.request);
    }

    /// Notes that all bytes of the append are written. If firnd dies, the repeated request writes nothing.
    pub fn note_append_done(&mut self) {
        self.request.is_append_done = true;
        self.cell = self.table.change_request(self.cell, &self.request);
    }
}

/// The objects that a request concerns which must not take effect twice.
#[derive(Clone, Copy, Debug, Default)]
pub struct Subjects {
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

impl Drop for NotedRequest {
    fn drop(&mut self) {
        self.table.end_request(self.cell, self.request.node);
    }
}

pub(crate) fn moment(time: Time) -> Moment {
    Moment {
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

/// Whether two identities belong to one object. The inode number alone is not enough: a later object may get the same
/// number.
pub(crate) fn is_same_object(one: &ObjectIdentity, other: &ObjectIdentity) -> bool {
    let births = one.birth.zip(other.birth);
    (one.dev, one.ino) == (other.dev, other.ino) && births.is_none_or(|(a, b)| a == b)
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

fn kind_of(number: u8) -> Option<Kind> {
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

    /// Returns the record of this inode for the live table, with the first of its names.
    pub(crate) fn as_node(&self, lookups: u64) -> Node {
        let name = self.names_with_parents().into_iter().next();
        let (parent, name) = name.map_or((0, Vec::new()), |(parent, name)| {
            (parent.id.0, name.as_bytes().to_vec())
        });
        Node {
            id: self.id.0,
            parent,
            object: self.identity(),
            kind: kind_number(self.kind),
            generation: 0,
            lookups,
            name,
        }
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

    /// Records a handle of a file before the kernel gets the handle. `passed_through`: the kernel's number of the file
    /// that it reads itself.
    pub fn note_open_handle(
        &self,
        id: HandleId,
        unique: u64,
        flags: i32,
        passed_through: Option<i32>,
    ) {
        let (Some(live), Ok(handle)) = (self.live(), self.open_files.handle(id)) else {
            return;
        };
        let mode = *handle.mode.lock();
        let served_by = match (mode, passed_through) {
            (_, Some(number)) => ServedBy::Passthrough(number),
            (OpenMode::Cached { .. }, None) => ServedBy::Cache,
            (OpenMode::Engine | OpenMode::Passthrough | OpenMode::Memory, None) => ServedBy::Engine,
        };
        let inode = &handle.file.inode;
        let view = if mode == OpenMode::Memory {
            handle.file.lock().view.as_ref().map(|view| view.number())
        } else {
            None
        };
        let noted = Handle {
            id: id.0,
            node: inode.id.0,
            unique,
            flags,
            served_by,
            view,
            opener: handle.opener.load(Ordering::Relaxed),
            is_released: false,
        };
        live.note_handle(&noted, &inode.as_node(0));
    }

    /// Records a handle of a directory before the kernel gets the handle.
    pub fn note_open_directory(&self, id: HandleId, inode: InodeId, unique: u64) {
        let (Some(live), Ok(inode)) = (self.live(), self.tree.inode(inode)) else {
            return;
        };
        let noted = Handle {
            id: id.0,
            node: inode.id.0,
            unique,
            flags: 0,
            served_by: ServedBy::Directory,
            view: None,
            opener: 0,
            is_released: false,
        };
        live.note_handle(&noted, &inode.as_node(0));
    }

    /// Notes a request that must not take effect twice, until the result is dropped.
    pub fn note_request(&self, unique: u64, subjects: Subjects) -> Option<NotedRequest> {
        let table = self.live()?;
        let Subjects {
            subject,
            other,
            node,
        } = subjects;
        let node = node.filter(|node| *node != ROOT);
        let node = node.and_then(|node| self.tree.inode(node).ok());
        let node = node.map(|inode| inode.as_node(0));
        let request = Request {
            unique,
            began: now_of_files(),
            subject,
            other,
            node: node.as_ref().map_or(0, |node| node.id),
            append_offset: None,
            is_append_done: false,
        };
        Some(NotedRequest {
            cell: table.begin_request(&request, node.as_ref())?,
            table: Arc::clone(table),
            request,
        })
    }

    /// Notes a request that an earlier firnd had begun.
    pub fn note_resumed_request(&self, resumed: &ResumedRequest) -> Option<NotedRequest> {
        Some(NotedRequest {
            table: Arc::clone(self.live()?),
            cell: resumed.cell,
            request: resumed.request,
        })
    }

    /// Restores nodes and handles of an earlier firnd. Must be called before data is recovered, because the open
    /// handles decide how a file's writers left it.
    pub(crate) fn resume(&self, resumed: &Resumed) -> ResumedRequests {
        let numbers = NumberBase(resumed.takeovers << NUMBERS_OF_A_FIRND);
        let names = &self.tree.names;
        names.set_live_table(Arc::clone(&resumed.table));
        names.begin_numbers(numbers);
        self.open_files.handles.begin_numbers(numbers.0);
        Nodes::new(self, &resumed.table, &resumed.contents.nodes).restore_all();
        let mut requests = ResumedRequests::default();
        let lost = resumed.losses.lock().handles.clone();
        requests.bad_handles += lost.len() as u64;
        for stored in &resumed.contents.handles {
            let (handle, cell) = (&stored.entry, stored.cells[0]);
            if lost.contains(&handle.id) {
                continue;
            }
            match self.resume_handle(handle) {
                Ok(restored) => {
                    resumed.table.adopt_handle(handle, cell);
                    requests.handles.push(restored);
                }
                Err(errno) => {
                    let path = self.tree.shown_path(InodeId(handle.node), None);
                    tracing::warn!(%errno, path, "an open file cannot be restored: its program gets EIO");
                    resumed.table.drop_cells(&[cell]);
                    requests.bad_handles += 1;
                }
            }
        }
        if let Some(keeper) = &resumed.keeper {
            self.keep_files_by(Arc::clone(keeper));
        }
        self.resume_nameless(&resumed.files);
        for stored in &resumed.contents.requests {
            let request = stored.entry;
            let cell = stored.cells[0];
            resumed.table.adopt_request(&request);
            requests
                .requests
                .insert(request.unique, ResumedRequest { request, cell });
        }
        requests
    }

    fn resume_handle(&self, handle: &Handle) -> Result<ResumedHandle> {
        let inode = InodeId(handle.node);
        let known = self.tree.inode(inode)?;
        let id = HandleId(handle.id);
        let mode = match handle.served_by {
            ServedBy::Engine => OpenMode::Engine,
            ServedBy::Cache => OpenMode::Cached { keep: false },
            ServedBy::Passthrough(_) if handle.view.is_some() => OpenMode::Memory,
            ServedBy::Passthrough(_) => OpenMode::Passthrough,
            ServedBy::Directory => {
                let object = self.tree.object(&known)?;
                let dir = self.base.backing.open_dir(&object)?;
                self.open_files.handles.insert_dir_as(id, dir);
                return Ok(resumed_handle(handle));
            }
        };
        if known.kind != Kind::File {
            return Err(Errno::IO);
        }
        let view = handle.view.map(|number| self.reopen_view(number));
        let view = view.transpose()?;
        let is_mapped = view.is_some() && mode != OpenMode::Memory;
        self.insert_handle(id, &known, handle.flags, |state| {
            state.view = view.or(state.view.take());
            mode
        });
        if is_mapped {
            let inserted = self.open_files.handle(id)?;
            inserted.note_mapped(&mut inserted.file.lock());
        }
        self.note_opener(id, handle.opener);
        if matches!(mode, OpenMode::Cached { .. }) {
            self.kernel_cache.expect_stale_pages(&known);
        }
        // If a process wrote the file directly, the kernel may have recorded a length that is too small.
        if self.open_files.is_writer(id) {
            known.is_size_stale_in_kernel.store(true, Ordering::Release);
        }
        Ok(resumed_handle(handle))
    }
}

impl<B: Backing> Engine<B> {
    /// Reopens the memory file that the reader of a handle continues to read.
    fn reopen_view(&self, number: u16) -> Result<Arc<MemoryFile>> {
        self.base.arena.reopen_view(number).map_err(|why| {
            tracing::warn!(
                number,
                why,
                "a memory file that a program reads cannot be restored"
            );
            Errno::IO
        })
    }
}

fn resumed_handle(handle: &Handle) -> ResumedHandle {
    ResumedHandle {
        id: HandleId(handle.id),
        inode: InodeId(handle.node),
        unique: handle.unique,
        served_by: handle.served_by,
        is_released: handle.is_released,
    }
}

/// Returns the time of the clock with which the kernel stamps files. It advances only at each tick of the kernel.
fn now_of_files() -> Moment {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    Moment {
        sec: now.tv_sec,
        nsec: now.tv_nsec as u32,
    }
}

/// Nodes of an earlier firnd that are being restored.
struct Nodes<'a, B: Backing> {
    engine: &'a Engine<B>,
    table: &'a LiveTable,
    /// Nodes by number. A number has two records if a rename was under way: the later record comes first.
    by_id: HashMap<u64, Vec<&'a Stored<Node>>>,
    /// Numbers of the nodes that are being restored now: a node, its directory, and so on. They end the search if a
    /// damaged table has a cycle.
    under_way: HashSet<u64>,
}

impl<'a, B: Backing> Nodes<'a, B> {
    fn new(engine: &'a Engine<B>, table: &'a LiveTable, stored: &'a [Stored<Node>]) -> Self {
        let mut by_id: HashMap<u64, Vec<&Stored<Node>>> = HashMap::new();
        for node in stored {
            by_id.entry(node.entry.id).or_default().push(node);
        }
        for same in by_id.values_mut() {
            same.sort_by_key(|node| std::cmp::Reverse(node.entry.generation));
        }
        Self {
            engine,
            table,
            by_id,
            under_way: HashSet::new(),
        }
    }

    fn restore_all(&mut self) {
        let ids: Vec<u64> = self.by_id.keys().copied().collect();
        for id in ids {
            self.restore(id);
        }
    }

    /// Restores a node and the directories above it. Returns `None` if one of them is not in the table.
    fn restore(&mut self, id: u64) -> Option<Arc<Inode<B>>> {
        let names = &self.engine.tree.names;
        if id == ROOT.0 {
            return Some(Arc::clone(names.root()));
        }
        if let Some(known) = names.get(InodeId(id)) {
            return Some(known);
        }
        if !self.under_way.insert(id) {
            return None;
        }
        let candidates = self.by_id.get(&id)?.clone();
        let restored = self.restore_one_of(&candidates);
        self.under_way.remove(&id);
        restored
    }

    fn restore_one_of(&mut self, candidates: &[&Stored<Node>]) -> Option<Arc<Inode<B>>> {
        let mut named = Vec::new();
        for stored in candidates {
            let node = &stored.entry;
            let parent = match node.parent {
                0 => None,
                parent => match self.restore(parent) {
                    Some(parent) => Some(parent),
                    None => continue,
                },
            };
            named.push((*stored, parent));
        }
        let is_certain = named.len() < 2;
        let at = named
            .iter()
            .position(|(stored, parent)| is_certain || self.leads_to(&stored.entry, parent))
            .unwrap_or(0);
        if named.is_empty() {
            for stored in candidates {
                self.table.drop_cells(&stored.cells);
            }
            return None;
        }
        let (chosen, parent) = named.swap_remove(at);
        let node = &chosen.entry;
        let restored = self.engine.tree.names.restore(
            InodeId(node.id),
            KnownObject {
                key: ObjectKey {
                    dev: node.object.dev,
                    ino: node.object.ino,
                },
                kind: kind_of(node.kind)?,
                btime: node.object.birth.map(|birth| Time {
                    sec: birth.sec,
                    nsec: birth.nsec,
                }),
            },
            parent
                .as_ref()
                .map(|parent| (parent, OsStr::from_bytes(&node.name))),
            node.lookups,
        );
        let others: Vec<u32> = candidates
            .iter()
            .filter(|stored| !std::ptr::eq(**stored, chosen))
            .flat_map(|stored| stored.cells.clone())
            .collect();
        self.table.adopt_node(node, &chosen.cells, &others);
        Some(restored)
    }

    /// Whether the name of a node that was being renamed leads to it.
    fn leads_to(&self, node: &Node, parent: &Option<Arc<Inode<B>>>) -> bool {
        let Some(parent) = parent else {
            return false;
        };
        let found = self.engine.tree.object(parent).and_then(|dir| {
            let name = OsStr::from_bytes(&node.name);
            self.engine.base.backing.lookup(&dir, name)
        });
        found.is_ok_and(|(_, attr)| is_same_object(&identity_of(&attr), &node.object))
    }
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

    fn handle(id: u64, node: u64, flags: i32) -> Handle {
        Handle {
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
        table.note_node(&node(2, ROOT.0, "scope"));
        for (id, of, flags) in [
            (7, node(3, 2, "file"), O_WRONLY),
            (8, node(3, 2, "file"), 0),
            (9, node(4, ROOT.0, "scope2"), O_RDWR),
            (10, node(5, 0, ""), O_RDWR),
            (11, node(6, ROOT.0, "moves"), O_RDWR),
        ] {
            table.note_handle(&handle(id, of.id, flags), &of);
        }
        // The rename of this node into the scope was under way.
        table.begin_move(6, 2, b"moved");
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
        table.note_handle(&handle(7, 2, O_WRONLY), &file);
        drop(table);
        let resumed = resume(&path);
        resumed.abandon_handles(|handle| handle.id == 7);
        resumed.abandon_scopes(&[Vec::new()], &[]);
        for id in [8, 9, 10] {
            resumed.table.note_handle(&handle(id, 2, O_WRONLY), &file);
        }
        let (_, contents) = open(&path);
        let left: Vec<u64> = contents.handles.iter().map(|one| one.entry.id).collect();
        assert_eq!(left, [8, 9, 10]);
    }
}
