//! File systems that the benchmark mounts for comparison, each in a process of its own.
//!
//! A server is this program again (`firn-bench serve`, hidden). It reads one [`Server`] as a line of
//! JSON, mounts, answers `ready`, and serves until its standard input ends: so its mount goes away
//! even when the benchmark is killed.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Stdio};

use anyhow::{Context, bail};
use firn_backing::DirBacking;
use firn_testfs::extent_locks::{LockModel, LockServer};
use firn_testfs::seeking_disk::{DiskModel, SeekingDisk};
use firn_testfs::sink::Sink;
use firn_testfs::{Admit, BackgroundSession, Caching, mount_client};
use fuser::{Filesystem, SessionACL};
use serde::{Deserialize, Serialize};

use crate::worker::this_program;
use crate::{discard, machine};
use firn_testfs::cleanup::{Guard, Leftover, expect};

/// What to mount.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "server")]
pub enum Server {
    /// Copies each write into a warm pool and drops it.
    Sink {
        /// Bytes of the pool.
        pool_bytes: u64,
    },
    /// Passes every call on to a directory.
    Plain {
        /// The directory.
        source: PathBuf,
    },
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
    /// Firn with a drain that drops what it carries.
    Discarding(discard::Geometry),
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

impl Server {
    fn points(&self, mount_point: &Path) -> Vec<PathBuf> {
        match self {
            Self::Clients { clients, .. } => (0..*clients)
                .map(|client| client_point(mount_point, client))
                .collect(),
            _ => vec![mount_point.to_owned()],
        }
    }
}

/// A server process and its mount.
pub struct Mounted {
    child: Child,
    answers: BufReader<ChildStdout>,
    mount_point: PathBuf,
    _unmount: Vec<Guard>,
}

impl Mounted {
    /// Starts `server` at `mount_point`; returns when it is usable.
    pub fn start(server: &Server, mount_point: &Path) -> anyhow::Result<Self> {
        let points = server.points(mount_point).into_iter();
        let _unmount = points.map(Leftover::Mount).map(expect).collect();
        let mut child = this_program("serve")?
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a server process")?;
        let answers = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let mut mounted = Self {
            child,
            answers,
            mount_point: mount_point.to_owned(),
            _unmount,
        };
        let request = serde_json::to_string(&(server, mount_point))?;
        mounted.tell(&request)?;
        match mounted.answer()?.as_str() {
            "ready" => Ok(mounted),
            _ => bail!("a server process could not mount (its message is above)"),
        }
    }

    /// Seeks of a model of a disk, or changes of the owners of locks, so far.
    pub fn delays(&mut self) -> anyhow::Result<u64> {
        self.tell("delays")?;
        let answer = self.answer()?;
        answer.parse().context("a server process told no number")
    }

    fn tell(&mut self, line: &str) -> anyhow::Result<()> {
        let stdin = self.child.stdin.as_mut().expect("stdin is piped");
        writeln!(stdin, "{line}").context("a server process died")
    }

    fn answer(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    /// The server's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mount_point
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // The end of its input tells the server to unmount and to end.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// The server's side: `firn-bench serve`.
pub fn main() -> anyhow::Result<()> {
    let mut input = BufReader::new(std::io::stdin());
    let mut line = String::new();
    input.read_line(&mut line)?;
    let (server, mount_point): (Server, PathBuf) = serde_json::from_str(&line)?;
    let session = match server {
        Server::Sink { pool_bytes } => {
            let sink = Sink::new(pool_bytes)
                .context("cannot map the sink's pool; choose a smaller --arena-size")?;
            mount(sink, &mount_point, "firn-bench-sink", machine::cores())?
        }
        Server::Plain { source } => {
            // Modes of requests are complete.
            rustix::process::umask(rustix::fs::Mode::empty());
            let backing = DirBacking::open(&source)?;
            let plain = firn_testfs::Server::new(backing, Admit, Caching::Usual)?;
            mount(plain, &mount_point, "firn-bench-plain", machine::cores())?
        }
        Server::SeekingDisk {
            source,
            divisor,
            threads,
        } => {
            rustix::process::umask(rustix::fs::Mode::empty());
            let disk = SeekingDisk::start(DiskModel::SATA_2010.scaled(divisor))?;
            let backing = DirBacking::open(&source)?;
            let server = firn_testfs::Server::new(backing, disk.clone(), Caching::Nothing)?;
            let session = mount(server, &mount_point, "firn-bench-disk", threads)?;
            return serve_model(input, || disk.seeks(), session);
        }
        Server::Clients {
            source,
            model,
            divisor,
            clients,
        } => {
            rustix::process::umask(rustix::fs::Mode::empty());
            return serve_clients(input, &source, &mount_point, (model, divisor), clients);
        }
        Server::Discarding(geometry) => {
            let mounted = discard::mount_discarding(&geometry, &mount_point)?;
            return serve_until_eof(input, mounted);
        }
    };
    serve_until_eof(input, session)
}

/// With the session settings that firnd uses: each thread with its own /dev/fuse descriptor.
fn mount(
    server: impl Filesystem,
    mount_point: &Path,
    name: &str,
    threads: usize,
) -> anyhow::Result<BackgroundSession> {
    let settings = firn_testfs::mount_settings(name, SessionACL::Owner, threads);
    fuser::spawn_mount(server, mount_point, &settings)
        .with_context(|| format!("cannot mount {}", mount_point.display()))
}

fn serve_until_eof(mut input: impl Read, mounted: impl Sized) -> anyhow::Result<()> {
    println!("ready");
    std::io::copy(&mut input, &mut std::io::sink())?;
    drop(mounted);
    Ok(())
}

/// Mounts the model of a server for each of its clients.
fn serve_clients(
    input: impl BufRead,
    source: &Path,
    mount_point: &Path,
    (model, divisor): (Model, u32),
    clients: u32,
) -> anyhow::Result<()> {
    let points = (0..clients).map(|client| client_point(mount_point, client));
    let disk = match model {
        Model::CachedDisk => DiskModel::SATA_2010,
        Model::SyncedDisk => DiskModel::SATA_2010.synced(),
        Model::ExtentLocks => {
            let server = LockServer::new(LockModel::EXTENTS.scaled(divisor));
            let mount = |(client, point): (u32, PathBuf)| {
                mount_client(source, &point, server.client(client), CLIENT_THREADS)
            };
            let sessions = (0..clients).zip(points).map(mount);
            let sessions = sessions.collect::<anyhow::Result<Vec<_>>>()?;
            return serve_model(input, || server.changes(), sessions);
        }
    };
    let disk = SeekingDisk::start(disk.scaled(divisor))?;
    let mount = |point: PathBuf| mount_client(source, &point, disk.clone(), CLIENT_THREADS);
    let sessions = points.map(mount).collect::<anyhow::Result<Vec<_>>>()?;
    serve_model(input, || disk.seeks(), sessions)
}

/// Answers each line with how often something took time so far.
fn serve_model(
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
