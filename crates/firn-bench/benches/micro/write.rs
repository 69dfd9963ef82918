//! `Engine::write` over a simulated backing, without a drain.

use std::ffi::OsStr;
use std::sync::Arc;

use criterion::{Criterion, Throughput};
use firn_backing::{Caller, SetTime};
use firn_engine::{Engine, EngineOptions, HandleId, InodeId, ROOT, SetAttr, Written};
use firn_sim::SimBacking;

use super::room::{Copies, FILL_BYTES, arena, in_rounds};

const SIZES: [(&str, usize); 3] = [("64 B", 64), ("4 KiB", 4 << 10), ("1 MiB", 1 << 20)];
/// Pieces before they are dropped: the tables of the arena hold some 6,600.
const PIECES: usize = 2000;
const O_RDWR: i32 = 2;

/// One file of an engine.
struct Target {
    engine: Arc<Engine<SimBacking>>,
    inode: InodeId,
    handle: HandleId,
    _dir: tempfile::TempDir,
}

impl Target {
    fn new() -> Self {
        let (dir, arena) = arena();
        let options = EngineOptions::new(arena.geometry().chunk_bytes);
        let engine = Engine::begin(SimBacking::new(), arena, options).expect("an engine");
        let caller = Caller {
            uid: 0,
            gid: 0,
            pid: 1,
        };
        let (entry, opened) = engine
            .create(&caller, ROOT, OsStr::new("file"), 0o644, O_RDWR)
            .expect("a file");
        Self {
            engine,
            inode: entry.inode,
            handle: opened.handle,
            _dir: dir,
        }
    }

    fn write(&self, offset: usize, data: &[u8]) {
        let written = self.engine.write(self.handle, offset as u64, data, None);
        assert_eq!(written, Ok(Written::Bytes(data.len())));
    }

    /// Drops all that is pending.
    fn empty(&self) {
        let keep = SetTime::Keep;
        let set = SetAttr {
            mode: None,
            uid: None,
            gid: None,
            size: Some(0),
            atime: keep,
            mtime: keep,
        };
        self.engine
            .namespace
            .set_attr(self.inode, set, None)
            .expect("truncate");
    }
}

/// Each write continues the last: no new piece.
pub fn append(c: &mut Criterion) {
    compare(c, "append", FILL_BYTES, |index, size| index * size);
}

/// No write continues another: each is a piece and an extent of its own.
pub fn scattered(c: &mut Criterion) {
    compare(c, "scattered", PIECES, |index, size| 2 * index * size);
}

fn compare(
    c: &mut Criterion,
    name: &str,
    steps_max: usize,
    offset: impl Fn(usize, usize) -> usize,
) {
    for (label, size) in SIZES {
        let mut group = c.benchmark_group(format!("write {name} {label}"));
        group.throughput(Throughput::Bytes(size as u64));
        let data = vec![7; size];
        let round = (FILL_BYTES / size).min(steps_max);
        let mut copies = Copies::over(round * size);
        group.bench_function("memcpy", |b| b.iter(|| copies.copy(&data)));
        let target = Target::new();
        group.bench_function("engine", |b| {
            b.iter_custom(|count| {
                in_rounds(
                    count,
                    round,
                    |index| target.write(offset(index, size), &data),
                    || target.empty(),
                )
            });
        });
        group.finish();
    }
}
