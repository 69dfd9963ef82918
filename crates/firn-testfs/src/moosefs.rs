//! MooseFS with servers of its own: a master and chunk servers in a network namespace, whose directories lie in a work
//! directory. All run in the foreground of a process each, with nothing in /etc or /var/lib.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use crate::cleanup::{Guard, Leftover, expect};
use crate::namespace::{Link, Namespace};

const START_LIMIT: Duration = Duration::from_secs(20);
const PACKAGES: &str = "install moosefs-master, moosefs-chunkserver and moosefs-client";
/// The number of the master's address; its chunk servers have the next ones.
const MASTER: u8 = 2;
/// Where Debian keeps the metadata of an empty file system.
const EMPTY: &str = "/var/lib/mfs/metadata.mfs.empty";

/// A chunk server.
#[derive(Clone, Copy, Debug, Default)]
pub struct Server<'a> {
    /// Its label, a letter, by which storage classes name it.
    pub label: Option<char>,
    /// An empty directory for its chunks; none: one of the work directory.
    pub disk: Option<&'a Path>,
}

/// A MooseFS that is mounted. It is unmounted, and its servers end, with it.
pub struct MooseFs {
    point: PathBuf,
    master: String,
    master_log: PathBuf,
    addresses: Vec<String>,
    link: Link,
    /// Undone in this order.
    guards: Vec<Guard>,
}

impl MooseFs {
    /// Starts a master and chunk servers, with their data in `work`, and mounts it on `work`/moosefs. Root only.
    pub fn start(work: &Path, servers: &[Server<'_>]) -> anyhow::Result<Self> {
        ensure!(
            rustix::process::geteuid().is_root(),
            "MooseFS needs root, which may make the network namespace for its servers"
        );
        let point = subdir(work, "moosefs")?;
        let mut guards = Vec::new();
        let namespace = Namespace::create(&mut guards)?;
        let link = namespace.connect(&mut guards)?;
        let address = namespace.add_address(&link, MASTER)?;
        let master = subdir(work, "moosefs-master")?;
        start_master(&namespace, &master, &address)?;
        let mut addresses = Vec::new();
        for (number, server) in (MASTER + 1..).zip(servers) {
            let dir = subdir(work, &format!("moosefs-server{number}"))?;
            let own = namespace.add_address(&link, number)?;
            start_chunk_server(&namespace, &dir, &address, &own, server)?;
            addresses.push(own);
        }
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

    /// Where it is mounted.
    pub fn point(&self) -> &Path {
        &self.point
    }

    /// The addresses of its chunk servers.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Limits each chunk server to `bytes_per_s` bytes a second. Call it once.
    pub fn limit_servers(&self, bytes_per_s: u64) -> anyhow::Result<()> {
        self.link.limit_to(&self.addresses, bytes_per_s)
    }

    /// New files in a directory get a storage class.
    pub fn set_class(&self, name: &str, dir: &Path) -> anyhow::Result<()> {
        let mut command = Command::new("mfssetsclass");
        command.arg(name).arg(dir);
        run_once(&mut command)
    }

    /// Mounts it once more, as for another client, on an empty directory.
    pub fn mount_for(&mut self, point: &Path) -> anyhow::Result<PathBuf> {
        let unmount = expect(Leftover::Mount(point.to_owned()));
        self.guards.insert(0, unmount);
        let servers = self.addresses.len();
        mount(&self.master, point, &self.master_log, servers)?;
        Ok(point.to_owned())
    }

    /// Makes a storage class of one copy on the servers with this label, and on no others when those are busy.
    pub fn make_class(&self, name: &str, label: char) -> anyhow::Result<()> {
        let mut command = Command::new("mfsscadmin");
        command.arg(&self.point);
        command.args(["create", "-m", "s", &label.to_string(), name]);
        run_once(&mut command)
    }
}

fn subdir(work: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let path = work.join(name);
    fs::create_dir_all(&path)?;
    Ok(path)
}

fn text(path: &Path) -> &str {
    // Made by this program below a canonical directory; only an odd --dir is not UTF-8.
    path.to_str().unwrap_or_default()
}

fn start_master(namespace: &Namespace, dir: &Path, address: &str) -> anyhow::Result<()> {
    let metadata = dir.join("metadata.mfs");
    fs::copy(EMPTY, &metadata).with_context(|| format!("{EMPTY} is missing: {PACKAGES}"))?;
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

/// Starts `program` with its data in `dir`; it ends with the namespace.
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

/// Mounts it, and waits until all chunk servers have joined.
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

fn run_once(command: &mut Command) -> anyhow::Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr).trim_end()
    );
    Ok(())
}

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
