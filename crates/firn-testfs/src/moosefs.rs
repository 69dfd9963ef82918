//! Starts a MooseFS for a test: a master server and chunk servers in a network namespace, and a mount of their files.
//!
//! Each server is a process in the foreground. Its files are in a work directory, and none is written to /etc or
//! /var/lib.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use crate::cleanup::{Guard, Leftover, expect};
use crate::namespace::{Link, Namespace};

/// Longest wait until the file system is mounted and its servers have joined.
const START_LIMIT: Duration = Duration::from_secs(20);
/// Advice if a program is missing.
const PACKAGES: &str = "install moosefs-master, moosefs-chunkserver and moosefs-client";
/// Last part of the master's address; the chunk servers have the next numbers.
const MASTER_HOST_NUMBER: u8 = 2;
/// Where Debian keeps the metadata of an empty file system.
const EMPTY_METADATA: &str = "/var/lib/mfs/metadata.mfs.empty";

/// A chunk server, which stores the bytes of files.
#[derive(Clone, Copy, Debug, Default)]
pub struct Server<'a> {
    /// Letter by which storage classes select the server.
    pub label: Option<char>,
    /// Empty directory for its chunks; `None` for a new directory in the work directory.
    pub disk: Option<&'a Path>,
}

/// A mounted MooseFS. When this value is dropped, the file system is unmounted and its servers are ended.
pub struct MooseFs {
    point: PathBuf,
    master: String,
    master_log: PathBuf,
    addresses: Vec<String>,
    link: Link,
    /// Remove the mounts, the network and the servers, in this order.
    guards: Vec<Guard>,
}

impl MooseFs {
    /// Starts a master and the chunk servers `servers`, with their data in `work`. Mounts their file system on
    /// `work`/moosefs. Fails if this process is not root.
    pub fn start(work: &Path, servers: &[Server<'_>]) -> anyhow::Result<Self> {
        ensure!(
            rustix::process::geteuid().is_root(),
            "MooseFS needs root, which may make the network namespace for its servers"
        );
        let point = subdir(work, "moosefs")?;
        let mut guards = Vec::new();
        let namespace = Namespace::create(&mut guards)?;
        let link = namespace.connect(&mut guards)?;
        let address = namespace.add_address(&link, MASTER_HOST_NUMBER)?;
        let master = subdir(work, "moosefs-master")?;
        start_master(&namespace, &master, &address)?;
        let mut addresses = Vec::new();
        for (number, server) in (MASTER_HOST_NUMBER + 1..).zip(servers) {
            let dir = subdir(work, &format!("moosefs-server{number}"))?;
            let server_address = namespace.add_address(&link, number)?;
            start_chunk_server(&namespace, &dir, &address, &server_address, server)?;
            addresses.push(server_address);
        }
        // The first guard is dropped first, so the file system is unmounted before its servers end.
        guards.insert(0, expect(Leftover::Mount(point.clone())));
        let master_log = master.join("log");
        mount(&address, &point, &master_log, servers.len())?;
        Ok(Self {
            point,
            master: address,
            master_log,
            addresses,
            link,
            guards,
        })
    }

    /// Returns the mount point.
    pub fn point(&self) -> &Path {
        &self.point
    }

    /// Returns the addresses of the chunk servers.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Limits each chunk server to `bytes_per_s` bytes a second. Call it once.
    pub fn limit_servers(&self, bytes_per_s: u64) -> anyhow::Result<()> {
        self.link.limit_to(&self.addresses, bytes_per_s)
    }

    /// Sets the storage class of new files in a directory.
    pub fn set_class(&self, name: &str, dir: &Path) -> anyhow::Result<()> {
        let mut command = Command::new("mfssetsclass");
        command.arg(name).arg(dir);
        run_once(&mut command)
    }

    /// Mounts the file system once more, on the empty directory `point`, as for another client.
    pub fn mount_for(&mut self, point: &Path) -> anyhow::Result<PathBuf> {
        let unmount = expect(Leftover::Mount(point.to_owned()));
        self.guards.insert(0, unmount);
        let servers = self.addresses.len();
        mount(&self.master, point, &self.master_log, servers)?;
        Ok(point.to_owned())
    }

    /// Makes a storage class: one copy of each file, only on servers with this label, even if these are busy.
    pub fn make_class(&self, name: &str, label: char) -> anyhow::Result<()> {
        let mut command = Command::new("mfsscadmin");
        command.arg(&self.point);
        command.args(["create", "-m", "s", &label.to_string(), name]);
        run_once(&mut command)
    }
}

/// Creates a directory in the work directory, and returns its path.
fn subdir(work: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let path = work.join(name);
    fs::create_dir_all(&path)?;
    Ok(path)
}

fn text(path: &Path) -> &str {
    // Made by this program below a canonical directory; only an odd --dir is not UTF-8.
    path.to_str().unwrap_or_default()
}

/// Starts the master server, which has the names and attributes of an empty file system, and listens at `address`.
fn start_master(namespace: &Namespace, dir: &Path, address: &str) -> anyhow::Result<()> {
    let metadata = dir.join("metadata.mfs");
    fs::copy(EMPTY_METADATA, &metadata)
        .with_context(|| format!("{EMPTY_METADATA} is missing: {PACKAGES}"))?;
    let exports = dir.join("exports.cfg");
    let topology = dir.join("topology.cfg");
    fs::write(&exports, "* / rw,alldirs,admin,maproot=0:0\n")?;
    fs::write(&topology, "")?;
    let config = format!(
        "EXPORTS_FILENAME = {}\nTOPOLOGY_FILENAME = {}\nMATOML_LISTEN_HOST = {address}\n\
         MATOCS_LISTEN_HOST = {address}\nMATOCL_LISTEN_HOST = {address}\n",
        text(&exports),
        text(&topology)
    );
    start(namespace, "mfsmaster", dir, &config)
}

/// Starts a chunk server, which stores bytes of files, at `address`. It connects to the master server at `master`, and
/// has its configuration in `dir`.
fn start_chunk_server(
    namespace: &Namespace,
    dir: &Path,
    master: &str,
    address: &str,
    server: &Server<'_>,
) -> anyhow::Result<()> {
    let disk = match server.disk {
        Some(disk) => disk.to_owned(),
        None => subdir(dir, "disk")?,
    };
    let labels = server.label.map(String::from).unwrap_or_default();
    let disks = dir.join("disks.cfg");
    fs::write(&disks, format!("{}\n", text(&disk)))?;
    let config = format!(
        "HDD_CONF_FILENAME = {}\nMASTER_HOST = {master}\nBIND_HOST = {address}\n\
         CSSERV_LISTEN_HOST = {address}\nHDD_LEAVE_SPACE_DEFAULT = 64MiB\nLABELS = {labels}\n",
        text(&disks)
    );
    start(namespace, "mfschunkserver", dir, &config)
}

/// Starts the server `program` in the namespace, with its data, configuration and log in `dir`. The server ends with
/// the namespace.
fn start(namespace: &Namespace, program: &str, dir: &Path, config: &str) -> anyhow::Result<()> {
    let path = dir.join("server.cfg");
    let own = "WORKING_USER = root\nWORKING_GROUP = root\nLOCK_MEMORY = 0\n";
    fs::write(&path, format!("DATA_PATH = {}\n{own}{config}", text(dir)))?;
    let log = fs::File::create(dir.join("log"))?;
    namespace
        .command(program)
        .args(["-f", "-c", text(&path), "start"])
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("cannot start {program}; {PACKAGES}"))?;
    Ok(())
}

/// Mounts the file system of a master server on `point`. Waits until `servers` chunk servers have joined and offer
/// space, at most [`START_LIMIT`].
fn mount(master: &str, point: &Path, master_log: &Path, servers: usize) -> anyhow::Result<()> {
    let deadline = Instant::now() + START_LIMIT;
    let mut command = Command::new("mfsmount");
    command
        .arg(point)
        .args(["-H", master, "-o", "default_permissions"]);
    retry_until(deadline, "mfsmount", || run_once(&mut command))?;
    retry_until(deadline, "the chunk servers", || {
        let log = fs::read_to_string(master_log)?;
        let joined = log.matches("chunkserver register end").count();
        ensure!(joined >= servers, "{joined} of {servers} have joined");
        let room = rustix::fs::statvfs(point)?;
        ensure!(room.f_bavail > 0, "they have no room");
        Ok(())
    })
}

/// Runs a command. If it fails, the error is what the command printed to standard error.
fn run_once(command: &mut Command) -> anyhow::Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr).trim_end()
    );
    Ok(())
}

/// Repeats `attempt` until it succeeds. Fails with its last error after the deadline; `subject` is for the message.
fn retry_until(
    deadline: Instant,
    subject: &str,
    mut attempt: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    loop {
        match attempt() {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() > deadline => {
                bail!("{subject} did not get ready: {error:#}; {PACKAGES}")
            }
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}
