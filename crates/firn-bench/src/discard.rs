//! Mounts Firn with a backing that discards the data of files. The benchmark `ingest` measures this mount.
//!
//! Figure 5 of the CRFS paper shows how fast a file system accepts writes if it need not store them. Therefore all of
//! Firn runs here (session, engine, arena, drain threads), and only the last step, the write to the backing, is
//! replaced. The benchmark assembles the parts itself, because no option of `firn mount` may lose data.

use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use firn_arena::{Arena, Identity};
use firn_backing::DirBacking;
use firn_drain::{IoThreads, Pool};
use firn_engine::{Engine, EngineOptions};
use firn_format::live::InitExchange;
use firn_fuse::{Adapter, AdapterOptions, KeepConnection, Session, SessionOptions};
use firn_workers::Workers;
use serde::{Deserialize, Serialize};

mod backing;

/// Lifetime of attributes in the kernel: the default of `firn mount`.
const ATTR_TIMEOUT: Duration = Duration::from_secs(1);

/// The size and the paths of the mount.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DiscardMountArgs {
    /// Directory in which the files are created. They remain empty.
    pub backing: PathBuf,
    /// Path of the arena, on tmpfs. The file must not exist.
    pub arena: PathBuf,
    /// Size of the arena in bytes.
    pub arena_bytes: u64,
    /// Size of one chunk in bytes.
    pub chunk_bytes: u64,
    /// Number of drain threads.
    pub io_threads: usize,
}

/// A mounted Firn that discards data. Dropping the value unmounts and removes the arena.
pub struct DiscardMount {
    session: Session,
    pool: Pool,
    arena: PathBuf,
}

/// Mounts Firn at `mount_point` with a backing that discards data.
pub fn mount_discarding(
    args: &DiscardMountArgs,
    mount_point: &Path,
) -> anyhow::Result<DiscardMount> {
    let backing = args.backing.canonicalize()?;
    let metadata = std::fs::metadata(&backing)?;
    let identity = Identity {
        backing: backing.clone(),
        dev: metadata.dev(),
        ino: metadata.ino(),
    };
    let arena_geometry = firn_format::geometry::Geometry::new(args.arena_bytes, args.chunk_bytes)?;
    let arena = Arena::create(&args.arena, arena_geometry, &identity)?;
    let discard_backing = backing::DiscardBacking(DirBacking::open(&backing)?);
    let options = EngineOptions::new(args.chunk_bytes);
    let engine = Engine::begin(discard_backing, arena, options)?;
    // firnd touches its memory after mounting, and the baseline touches its buffer. So this mount does the same.
    engine.arena().populate(&|| true)?;
    let threads = IoThreads {
        count: args.io_threads,
        lane_writers_max: usize::MAX,
        cpu_percent: firn_config::Options::default().drain_cpu_percent,
    };
    // `None`: other hosts do not share the backing.
    let pool = Pool::start(Arc::clone(&engine), threads, None)?;
    // `None`: the mount has no transactions.
    let adapter = Adapter::new(
        engine,
        None,
        AdapterOptions {
            attr_timeout: ATTR_TIMEOUT,
            name_timeout: ATTR_TIMEOUT,
            passthrough: false,
        },
        Workers::default(),
    );
    let options = SessionOptions {
        source: backing,
        threads: 0,
        allow_other: false,
        read_only: false,
        kernel_flags: vec![],
    };
    let session = Session::mount(adapter, mount_point, &options, &NotKept)?;
    Ok(DiscardMount {
        session,
        pool,
        arena: args.arena.clone(),
    })
}

/// A keeper that keeps no connection, because the mount ends with the benchmark.
struct NotKept;

impl KeepConnection for NotKept {
    fn keep(&self, _: BorrowedFd<'_>, _: &InitExchange, _: bool) {}
}

impl Drop for DiscardMount {
    fn drop(&mut self) {
        let _ = self.session.unmount(true);
        let _ = self.session.wait();
        self.pool.stop();
        let _ = std::fs::remove_file(&self.arena);
    }
}
