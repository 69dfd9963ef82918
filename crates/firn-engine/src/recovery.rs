//! Attach: what an earlier firnd left in the arena becomes pending again.
//!
//! 1. The arena gives every whole piece, the journal every binding.
//! 2. A truncation that had begun is done to the end in the backing.
//! 3. Each bound file is looked for under its names and recognised by inode and birth time.
//! 4. Its pieces are laid over each other in the order of their sequences; what the journal calls void
//!    is taken out.
//! 5. What is left is pending and drained without being asked.
//!
//! A file that is not found although no removal had begun is *lost*: its pieces stay in the arena and
//! the status says so.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Instant;

use firn_arena::{Arena, JournalRegion, PieceRef, Stored};
use firn_backing::{Access, Backing, Errno, Time, is_below};
use firn_format::record::{Ending, Record};
use firn_journal::{Bound, Journal, PathState};
use parking_lot::{Condvar, Mutex, RwLock};

use crate::drain::Queue;
use crate::engine::{Counters, DrainPolicy, Engine, EngineError, EngineOptions};
use crate::extents::{Extent, Extents};
use crate::file::PieceUse;
use crate::lost::LostFile;
use crate::names::{Names, Node};
use crate::small_map::SmallMap;

/// What attach found.
#[derive(Clone, Debug, Default)]
pub struct Recovered {
    /// Files with data that is pending again.
    pub files: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Bytes that were dropped because their transaction is no more.
    pub dropped_bytes: u64,
    /// Files that could not be found.
    pub lost: Vec<LostFile>,
    /// What was damaged in the journal.
    pub damage: Vec<String>,
}

enum Search<N> {
    Found(N),
    /// A removal had begun and the file is gone.
    Removed,
    Lost {
        /// The backing answered, and the file is not there.
        gone: bool,
        reason: String,
    },
}

impl<B: Backing> Engine<B> {
    /// Begins with a fresh arena.
    pub fn begin(backing: B, arena: Arena, options: EngineOptions) -> Result<Arc<Self>, EngineError> {
        let journal = Journal::create(arena.journal_region());
        let engine = Self::assemble(backing, arena, journal, options)?;
        Ok(engine.start())
    }

    /// Goes on with the arena of an earlier firnd and the pieces that were found in it.
    pub fn attach(
        backing: B,
        arena: Arena,
        stored: &[Stored],
        options: EngineOptions,
    ) -> Result<(Arc<Self>, Recovered), EngineError> {
        Self::attach_without(backing, arena, stored, options, &[])
    }

    /// The same without what was written to files at or below one of `dropped`: it belonged to a transaction
    /// that is no more.
    pub fn attach_without(
        backing: B,
        arena: Arena,
        stored: &[Stored],
        options: EngineOptions,
        dropped: &[&[u8]],
    ) -> Result<(Arc<Self>, Recovered), EngineError> {
        let (journal, replay) = Journal::open(arena.journal_region());
        let ledger = replay.ledger.clone();
        let mut engine = Self::assemble(backing, arena, journal, options)?;
        let mut recovered = Recovered {
            damage: replay.damage.iter().map(ToString::to_string).collect(),
            ..Recovered::default()
        };
        let mut pieces: BTreeMap<u64, Vec<Stored>> = BTreeMap::new();
        for piece in stored {
            pieces.entry(piece.piece.file).or_default().push(*piece);
        }
        let highest = pieces.keys().copied().max().unwrap_or(0).max(replay.last_file);
        engine.last_binding = AtomicU64::new(highest);
        let mut restored = Vec::new();
        for (file, bound) in ledger.files() {
            let stored = pieces.remove(&file).unwrap_or_default();
            let is_dropped = |path: &[u8]| dropped.iter().any(|top| top.is_empty() || is_below(path, top));
            if bound.paths.iter().any(|(path, _)| is_dropped(path)) {
                recovered.dropped_bytes += engine.drop_pieces(file, &stored);
                continue;
            }
            engine.recover_file(file, bound, stored, &mut restored, &mut recovered);
        }
        for (file, stored) in pieces {
            let reason = "the journal does not know the file".into();
            let lost = LostFile { file, path: Vec::new(), bytes: 0, gone: true, reason };
            engine.keep_lost(lost, layers(&stored, &[]), &mut recovered);
        }
        engine.arena.settle(stored);
        engine.recovered_bytes = recovered.bytes;
        let engine = engine.start();
        for (file, bytes) in restored {
            engine.count_held(0, bytes);
            let mut state = file.lock();
            if engine.options.drain == DrainPolicy::Eager {
                engine.force(&file, &mut state);
            }
        }
        Ok((engine, recovered))
    }

    fn assemble(
        backing: B,
        arena: Arena,
        journal: Journal<JournalRegion>,
        options: EngineOptions,
    ) -> Result<Self, EngineError> {
        let root = backing.root();
        let attr = backing.attr(&root).map_err(EngineError::Backing)?;
        let epoch = arena.begin_epoch();
        Ok(Self {
            names: Names::new(root, &attr, epoch > 1, options.objects_max),
            passthrough: AtomicBool::new(options.passthrough),
            doors: AtomicU64::new(0),
            cached_opens: AtomicU64::new(0),
            backing,
            arena,
            options,
            journal: Mutex::new(journal),
            last_binding: AtomicU64::new(0),
            last_rename: AtomicU64::new(epoch << 32),
            rename_gate: RwLock::new(()),
            writing: RwLock::new(()),
            files: Mutex::new(HashMap::new()),
            handles: RwLock::new(HashMap::new()),
            dirs: RwLock::new(HashMap::new()),
            next_handle: AtomicU64::new(0),
            parked: Mutex::new(Vec::new()),
            queue: Mutex::new(Queue::new()),
            checkpoints: Mutex::default(),
            evictable: Mutex::default(),
            space_waiters: Mutex::new(std::collections::VecDeque::new()),
            space_freed: Arc::new(AtomicBool::new(false)),
            counters: Counters::default(),
            troubles: Mutex::new(Vec::new()),
            waker: RwLock::new(None),
            lists: AtomicBool::new(false),
            accesses: firn_conflict::Log::new(),
            spill: Mutex::default(),
            spill_waker: RwLock::new(None),
            progress: (Mutex::new(0), Condvar::new()),
            recovered_bytes: 0,
            lost: Mutex::default(),
            epoch,
            attached: Instant::now(),
        })
    }

    fn start(self) -> Arc<Self> {
        let freed = Arc::clone(&self.space_freed);
        self.arena.on_free(move || freed.store(true, std::sync::atomic::Ordering::Release));
        Arc::new(self)
    }

    fn recover_file(
        &self,
        binding: u64,
        bound: &Bound,
        stored: Vec<Stored>,
        restored: &mut Vec<(Arc<crate::file::File<B>>, u64)>,
        recovered: &mut Recovered,
    ) {
        let mut voids = bound.voids.clone();
        for &(sequence, size) in &bound.truncating {
            voids.push(firn_journal::Void { offset: size, len: u64::MAX - size, sequence });
        }
        let layers = layers(&stored, &voids);
        for Stored { at, .. } in &stored {
            // Void or overwritten: without its mark it would outlive the binding.
            if layers.pieces.get(at).is_none() {
                self.arena.mark_dead(*at);
            }
        }
        let found = self.search(bound);
        let node = match found {
            Search::Found(node) => node,
            Search::Removed => {
                for (piece, _) in layers.pieces.iter() {
                    self.arena.mark_dead(*piece);
                }
                self.note(&Record::Unbind { file: binding });
                return;
            }
            Search::Lost { .. } if layers.extents.is_empty() && bound.truncating.is_empty() => {
                self.note(&Record::Unbind { file: binding });
                return;
            }
            Search::Lost { gone, reason } => {
                self.keep_lost(lost(binding, bound, gone, reason), layers, recovered);
                return;
            }
        };
        if let Err(errno) = self.finish_truncations(binding, bound, &node) {
            let reason = format!("its truncation could not be finished: {errno}");
            self.keep_lost(lost(binding, bound, false, reason), layers, recovered);
            return;
        }
        let file = self.file_with(&node, |state| {
            for (piece, used) in layers.pieces.iter() {
                self.arena.keep(*piece, used.live as u32);
            }
            state.partial = layers.pieces.iter().filter(|(_, used)| used.live < used.len).count();
            state.pending = layers.pieces.iter().map(|(_, used)| used.live).sum();
            state.pieces = layers.pieces;
            state.extents = layers.extents;
            state.voids = bound.voids.len();
            state.bound = Some(binding);
            // Whoever had it open is cut off from it.
            state.ending = if bound.ending == Ending::Open { Ending::Cut } else { bound.ending };
            state.cut = state.ending == Ending::Cut;
            state.oldest = (state.pending > 0).then(Instant::now);
            state.mtime = bound.modified_at.map(|(sec, nsec)| Time { sec, nsec });
        });
        let bytes = {
            let mut state = file.lock();
            if state.pending == 0 {
                self.unbind(&mut state);
            }
            state.pending
        };
        if bytes > 0 {
            recovered.files += 1;
            recovered.bytes += bytes;
            restored.push((file, bytes));
        } else {
            self.drop_if_unused(&file);
        }
    }

    /// Drops the pieces of a binding, and it; returns their bytes.
    fn drop_pieces(&self, binding: u64, stored: &[Stored]) -> u64 {
        for Stored { at, .. } in stored {
            self.arena.mark_dead(*at);
        }
        self.note(&Record::Unbind { file: binding });
        stored.iter().map(|stored| u64::from(stored.piece.len)).sum()
    }

    fn finish_truncations(&self, binding: u64, bound: &Bound, node: &Arc<Node<B>>) -> crate::Result<()> {
        for &(sequence, size) in &bound.truncating {
            let file = self.backing.open(&self.object(node)?, Access::Write)?;
            self.backing.set_len(&file, size)?;
            self.note(&Record::TruncateEnd { file: binding, sequence, size, done: true });
        }
        Ok(())
    }

    /// Looks for a bound file under its names.
    fn search(&self, bound: &Bound) -> Search<Arc<Node<B>>> {
        let mut found = None;
        let mut reason = String::from("it has no name");
        let (mut replaced, mut gone) = (false, true);
        for (path, _) in &bound.paths {
            match self.find(path) {
                // All of its names, so that the loss of one is not taken for the loss of the last.
                Ok(node) if is_same(bound, &node) => found = Some(node),
                Ok(_) => {
                    replaced = true;
                    reason = "another file has its name".into();
                }
                Err(Errno::NOENT | Errno::NOTDIR) => {
                    if !replaced {
                        reason = "no file has its name any more".into();
                    }
                }
                Err(errno) => {
                    gone = false;
                    reason = format!("its name cannot be looked up: {errno}");
                }
            }
        }
        if let Some(node) = found {
            return Search::Found(node);
        }
        if bound.paths.iter().all(|(_, state)| *state == PathState::Doubtful) {
            Search::Removed
        } else {
            Search::Lost { gone, reason }
        }
    }
}

fn is_same<B: Backing>(bound: &Bound, node: &Node<B>) -> bool {
    let birth = node.btime.map(|t| (t.sec, t.nsec));
    // The device may have another number after the backing was mounted again.
    bound.identity.ino == node.key.1 && bound.identity.btime == birth
}

/// A bound file that was not given back its data; its bytes are counted when it is kept.
fn lost(binding: u64, bound: &Bound, gone: bool, reason: String) -> LostFile {
    let path = bound.paths.first().map(|(path, _)| path.to_vec()).unwrap_or_default();
    LostFile { file: binding, path, bytes: 0, gone, reason }
}

pub(crate) struct Layers {
    pub extents: Extents,
    pub pieces: SmallMap<PieceRef, PieceUse>,
}

/// Lays pieces over each other, oldest first, and takes out what is void.
fn layers(stored: &[Stored], voids: &[firn_journal::Void]) -> Layers {
    let mut ordered: Vec<&Stored> = stored.iter().collect();
    ordered.sort_by_key(|s| s.piece.sequence);
    let mut extents = Extents::default();
    for Stored { at, piece } in ordered {
        let extent = Extent {
            len: u64::from(piece.len),
            piece: *at,
            position: piece.position,
            sequence: piece.sequence,
        };
        extents.insert(piece.offset, extent, &mut |_, _| {});
    }
    for void in voids {
        let range = void.offset..void.offset.saturating_add(void.len);
        extents.remove(range, &mut |_, e| e.sequence <= void.sequence);
    }
    let mut pieces: SmallMap<PieceRef, PieceUse> = SmallMap::default();
    for (_, extent) in extents.iter() {
        let live = pieces.get(&extent.piece).map_or(0, |used| used.live) + extent.len;
        pieces.insert(extent.piece, PieceUse { len: 0, live });
    }
    for stored in stored {
        if let Some(used) = pieces.get_mut(&stored.at) {
            used.len = u64::from(stored.piece.len);
        }
    }
    Layers { extents, pieces }
}
