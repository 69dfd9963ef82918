//! Prepares the backing of a benchmark: a directory of the local file system, or a slow file system that is set up for
//! the run. All candidates of a benchmark use the same backing.

use std::any::Any;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::options::WorkDir;
use firn_testfs::moosefs::{MooseFs, Server};
pub(crate) use firn_testfs::run;

mod limit;
mod relay;
mod slow_disk;
mod sshfs;

/// Kinds of backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// The file system of --dir as it is.
    Local,
    /// sshfs with `-o sshfs_sync,direct_io`: each write waits for the server, as on NFS with `sync`.
    /// A server of its own, in a network namespace where root may make one.
    Sshfs,
    /// sshfs with its default options: writes are sent without waiting, errors are reported at close.
    SshfsAsync,
    /// MooseFS with its default goal of one copy: a master and two chunk servers on this machine, in a
    /// network namespace (root only; Debian's moosefs-master, moosefs-chunkserver and moosefs-client).
    Moosefs,
    /// ext4 with `-o sync` on a loop device that the kernel limits in writes per second (root only).
    SlowDisk,
}

impl Kind {
    /// Returns the name of the kind on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Sshfs => "sshfs",
            Self::SshfsAsync => "sshfs-async",
            Self::Moosefs => "moosefs",
            Self::SlowDisk => "slow-disk",
        }
    }
}

/// A backing that is ready to use. Dropping the value removes it.
pub struct Prepared {
    /// The directory of the backing.
    pub dir: PathBuf,
    /// A sentence about the backing for the report.
    pub note: String,
    /// The servers, mounts and devices of the backing, in the order in which they are removed.
    _parts: Vec<Box<dyn Any>>,
}

/// The limits of slow backings.
#[derive(Clone, Copy, Debug)]
pub struct Slowness {
    /// Time that is added to each network round trip, in microseconds.
    pub round_trip_us: u64,
    /// Maximum number of writes per second of the slow disk.
    pub writes_per_s: u64,
}

/// Sets up a backing of this kind below `work`. Fails if the programs or the rights that it needs are missing.
pub fn prepare(kind: Kind, slowness: Slowness, work: &WorkDir) -> anyhow::Result<Prepared> {
    let prepared = match kind {
        Kind::Local => Ok(Prepared {
            dir: work.subdir("backing")?,
            note: format!("backing: {}", crate::machine::file_system_of(work.path())),
            _parts: Vec::new(),
        }),
        Kind::Sshfs => sshfs::prepare(slowness.round_trip_us, "sshfs_sync,direct_io", work),
        Kind::SshfsAsync => sshfs::prepare(slowness.round_trip_us, "", work),
        Kind::Moosefs => moosefs(work),
        Kind::SlowDisk => slow_disk::prepare(slowness.writes_per_s, work),
    };
    prepared.with_context(|| format!("cannot set up the backing {kind:?}"))
}

/// Starts a MooseFS of one master and two chunk servers, and mounts it.
fn moosefs(work: &WorkDir) -> anyhow::Result<Prepared> {
    let servers = [Server::default(); 2];
    let moosefs = MooseFs::start(work.path(), &servers)?;
    let dir = moosefs.point().to_owned();
    Ok(Prepared {
        dir,
        note: format!(
            "backing: MooseFS, a master and {} chunk servers on this machine, one copy, default options",
            servers.len()
        ),
        _parts: vec![Box::new(moosefs)],
    })
}

/// Returns a path as text for the arguments of programs. Returns an empty text if it is not UTF-8.
fn text(path: &Path) -> &str {
    // This program makes these paths below --dir, so they are UTF-8 unless --dir is not.
    path.to_str().unwrap_or_default()
}
