//! Mounts the file systems with which Firn is compared, each in a server process of its own.
//!
//! A server process runs this program with the hidden verb `serve`. It reads one [`Serve`] as a line of JSON, mounts
//! the file system and answers `ready`. It serves until its standard input ends. Therefore its mount disappears even if
//! the benchmark is killed.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Stdio};

use anyhow::{Context, bail};
use firn_backing::DirBacking;
use firn_testfs::sink::Sink;
use firn_testfs::{Admit, BackgroundSession, Caching};
use fuser::{Filesystem, SessionACL};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::worker::this_program;
use crate::{discard, machine};
use firn_testfs::cleanup::{Guard, Leftover, expect};

/// A file system that a server process can mount.
pub trait Serve: Serialize + DeserializeOwned {
    /// Returns all mount points of the file system. `mount_point` is the first of them or the directory above them.
    fn points(&self, mount_point: &Path) -> Vec<PathBuf> {
        vec![mount_point.to_owned()]
    }

    /// Mounts the file system and serves it until `input`, the standard input, ends.
    fn serve(self, mount_point: &Path, input: Input) -> anyhow::Result<()>;
}

/// Standard input of a server process, after the line that says what to mount.
pub type Input = BufReader<std::io::Stdin>;

/// The file systems that `firn bench` mounts.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "server")]
pub enum Server {
    /// Copies each write into a buffer that has its memory, and discards it.
    Sink {
        /// Bytes of the pool.
        pool_bytes: u64,
    },
    /// Passes every request on to a directory, as a plain FUSE file system does.
    Plain {
        /// The directory.
        source: PathBuf,
    },
    /// Firn with a drain that discards the data.
    Discarding(discard::DiscardMountArgs),
}

/// A server process and its mount. Dropping the value unmounts.
pub struct Mounted {
    child: Child,
    answers: BufReader<ChildStdout>,
    mount_point: PathBuf,
    _unmount: Vec<Guard>,
}

impl Mounted {
    /// Starts a process that mounts `server` at `mount_point`, and waits until the mount is usable.
    pub fn start(server: &impl Serve, mount_point: &Path) -> anyhow::Result<Self> {
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
        mounted.send_line(&request)?;
        match mounted.read_answer()?.as_str() {
            "ready" => Ok(mounted),
            _ => bail!("a server process could not mount (its message is above)"),
        }
    }

    /// Sends a line to the server and returns its answer.
    pub fn ask(&mut self, line: &str) -> anyhow::Result<String> {
        self.send_line(line)?;
        self.read_answer()
    }

    /// Sends a line to the server.
    fn send_line(&mut self, line: &str) -> anyhow::Result<()> {
        let stdin = self.child.stdin.as_mut().expect("stdin is piped");
        writeln!(stdin, "{line}").context("a server process died")
    }

    /// Reads a line from the server. Returns an empty text if the server has ended.
    fn read_answer(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    /// Returns the server's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the mount point.
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

impl Serve for Server {
    /// Mounts the file system at `mount_point`, and serves it until the input ends.
    fn serve(self, mount_point: &Path, input: Input) -> anyhow::Result<()> {
        let session = match self {
            Self::Sink { pool_bytes } => {
                let sink = Sink::new(pool_bytes)
                    .context("cannot map the sink's pool; choose a smaller --arena-size")?;
                mount(sink, mount_point, "firn-bench-sink", machine::cores())?
            }
            Self::Plain { source } => {
                // The kernel has applied the umask of the program already, so the server must not apply its own.
                rustix::process::umask(rustix::fs::Mode::empty());
                let backing = DirBacking::open(&source)?;
                let plain = firn_testfs::Server::new(backing, Admit, Caching::Usual)?;
                mount(plain, mount_point, "firn-bench-plain", machine::cores())?
            }
            Self::Discarding(geometry) => {
                let mounted = discard::mount_discarding(&geometry, mount_point)?;
                return serve_until_eof(input, mounted);
            }
        };
        serve_until_eof(input, session)
    }
}

/// Runs the hidden verb `serve`: reads which file system to mount, and serves it until the standard input ends. `S` are
/// the file systems of the program.
pub fn main<S: Serve>() -> anyhow::Result<()> {
    let mut input = BufReader::new(std::io::stdin());
    let mut line = String::new();
    input.read_line(&mut line)?;
    let (server, mount_point): (S, PathBuf) = serde_json::from_str(&line)?;
    server.serve(&mount_point, input)
}

/// Mounts a FUSE file system with the session settings of firnd: each thread has its own /dev/fuse descriptor.
pub fn mount(
    server: impl Filesystem,
    mount_point: &Path,
    name: &str,
    threads: usize,
) -> anyhow::Result<BackgroundSession> {
    let settings = firn_testfs::mount_settings(name, SessionACL::Owner, threads);
    fuser::spawn_mount(server, mount_point, &settings)
        .with_context(|| format!("cannot mount {}", mount_point.display()))
}

/// Reports that the mount is usable, and keeps it until `input` ends.
fn serve_until_eof(mut input: impl Read, mounted: impl Sized) -> anyhow::Result<()> {
    println!("ready");
    std::io::copy(&mut input, &mut std::io::sink())?;
    drop(mounted);
    Ok(())
}
