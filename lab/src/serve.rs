//! Models that the laboratory mounts, each in a process of its own, beside the servers of `firn bench`.

use std::io::BufRead;
use std::path::{Path, PathBuf};

use anyhow::Context;
use firn_backing::DirBacking;
use firn_bench::serve::{Input, Serve, mount};
use firn_testfs::{Caching, mount_client};
use serde::{Deserialize, Serialize};

use crate::model::extent_locks::{LockModel, LockServer};
use crate::model::seeking_disk::{DiskModel, SeekingDisk};

pub use firn_bench::serve::Mounted;

/// What to mount.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "server")]
pub enum Server {
    /// Passes every call on to a directory, and takes as long for its data as the model of a disk.
    SeekingDisk {
        /// The directory.
        source: PathBuf,
        /// [`DiskModel::scaled`] by this.
        divisor: u32,
        /// Requests that it serves at a time. More than wait for the disk: names are not to wait for data.
        threads: usize,
    },
    /// The model of a server with several clients, each with a mount of its own below the mount point: see
    /// [`client_point`].
    Clients {
        /// The directory.
        source: PathBuf,
        /// What takes time.
        model: Model,
        /// Times and sizes are divided by this.
        divisor: u32,
        /// How many.
        clients: u32,
    },
    /// A server of `firn bench`.
    #[serde(untagged)]
    Usual(firn_bench::serve::Server),
}

/// What a server with several clients is a model of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Model {
    /// A disk that seeks, behind a cache.
    CachedDisk,
    /// The same disk, where each write is synced.
    SyncedDisk,
    /// Locks on extents.
    ExtentLocks,
}

/// Threads for each client of a model: names are not to wait for data.
const CLIENT_THREADS: usize = 12;

/// Where a client of [`Server::Clients`] has its mount.
pub fn client_point(mount_point: &Path, client: u32) -> PathBuf {
    mount_point.join(format!("client{client}"))
}

/// Seeks of a model of a disk, or changes of the owners of locks, so far.
pub fn delays(model: &mut Mounted) -> anyhow::Result<u64> {
    let answer = model.ask("delays")?;
    answer.parse().context("a server process told no number")
}

impl Serve for Server {
    fn points(&self, mount_point: &Path) -> Vec<PathBuf> {
        match self {
            Self::Clients { clients, .. } => (0..*clients)
                .map(|client| client_point(mount_point, client))
                .collect(),
            Self::SeekingDisk { .. } => vec![mount_point.to_owned()],
            Self::Usual(server) => server.points(mount_point),
        }
    }

    fn serve(self, mount_point: &Path, input: Input) -> anyhow::Result<()> {
        let points = self.points(mount_point);
        match self {
            Self::SeekingDisk {
                source,
                divisor,
                threads,
            } => {
                rustix::process::umask(rustix::fs::Mode::empty());
                let disk = SeekingDisk::start(DiskModel::SATA_2010.scaled(divisor))?;
                let backing = DirBacking::open(&source)?;
                let server = firn_testfs::Server::new(backing, disk.clone(), Caching::Nothing)?;
                let session = mount(server, mount_point, "firn-lab-disk", threads)?;
                answer_delays(input, || disk.seeks(), session)
            }
            Self::Clients {
                source,
                model,
                divisor,
                ..
            } => {
                rustix::process::umask(rustix::fs::Mode::empty());
                serve_clients(input, &source, points, model, divisor)
            }
            Self::Usual(server) => server.serve(mount_point, input),
        }
    }
}

/// Mounts the model of a server for each of its clients.
fn serve_clients(
    input: Input,
    source: &Path,
    points: Vec<PathBuf>,
    model: Model,
    divisor: u32,
) -> anyhow::Result<()> {
    let disk = match model {
        Model::CachedDisk => DiskModel::SATA_2010,
        Model::SyncedDisk => DiskModel::SATA_2010.synced(),
        Model::ExtentLocks => {
            let server = LockServer::new(LockModel::EXTENTS.scaled(divisor));
            let mount = |(client, point): (u32, PathBuf)| {
                mount_client(source, &point, server.client(client), CLIENT_THREADS)
            };
            let sessions = (0..).zip(points).map(mount);
            let sessions = sessions.collect::<anyhow::Result<Vec<_>>>()?;
            return answer_delays(input, || server.changes(), sessions);
        }
    };
    let disk = SeekingDisk::start(disk.scaled(divisor))?;
    let mount = |point: PathBuf| mount_client(source, &point, disk.clone(), CLIENT_THREADS);
    let sessions = points.into_iter().map(mount);
    let sessions = sessions.collect::<anyhow::Result<Vec<_>>>()?;
    answer_delays(input, || disk.seeks(), sessions)
}

/// Answers each line with how often something took time so far.
fn answer_delays(
    input: impl BufRead,
    delays: impl Fn() -> u64,
    mounted: impl Sized,
) -> anyhow::Result<()> {
    println!("ready");
    for line in input.lines() {
        line?;
        println!("{}", delays());
    }
    drop(mounted);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Needs FUSE.
    #[test]
    fn what_one_client_wrote_costs_another_client_one_change_of_the_owner() {
        let dir = tempfile::tempdir().expect("a directory");
        let subdir = |name: &str| {
            let path = dir.path().join(name);
            fs::create_dir(&path).expect("a directory");
            path
        };
        let source = subdir("source");
        let points = [subdir("one"), subdir("other")];
        let server = LockServer::new(LockModel::EXTENTS.scaled(256));
        let mount = |client: usize| {
            let policy = server.client(client as u32);
            mount_client(&source, &points[client], policy, 4).expect("mount")
        };
        let sessions = [mount(0), mount(1)];
        fs::write(points[0].join("file"), "of one").expect("write");
        let before = server.changes();
        let read = fs::read(points[1].join("file")).expect("read");
        assert_eq!(read, b"of one");
        assert_eq!(server.changes() - before, 1);
        drop(sessions);
    }
}
