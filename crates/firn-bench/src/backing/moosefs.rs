//! MooseFS with servers of its own: a master and two chunk servers in a network namespace, whose directories lie in
//! the work directory. All run in the foreground of a process each, with nothing in /etc or /var/lib.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use super::namespace::Namespace;
use super::{Prepared, text};
use crate::cleanup::defer;
use crate::options::WorkDir;
use crate::serve::unmount_lazily;

const START_LIMIT: Duration = Duration::from_secs(20);
const PACKAGES: &str = "install moosefs-master, moosefs-chunkserver and moosefs-client";
/// The master does not take servers with addresses of the loopback network.
const MASTER: &str = "10.77.0.1";
const SERVERS: [&str; 2] = ["10.77.0.2", "10.77.0.3"];
/// Where Debian keeps the metadata of an empty file system.
const EMPTY: &str = "/var/lib/mfs/metadata.mfs.empty";

/// Mounts a new MooseFS on `work`/moosefs.
pub fn prepare(work: &WorkDir) -> anyhow::Result<Prepared> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "only root may make the network namespace for its servers"
    );
    let point = work.subdir("moosefs")?;
    let mut guards = Vec::new();
    let namespace = Namespace::create(&mut guards)?;
    for address in SERVERS.iter().chain([&MASTER]) {
        namespace.ip(&format!("addr add {address}/24 dev lo"))?;
    }
    start_master(&namespace, &work.subdir("moosefs-master")?)?;
    for (number, address) in SERVERS.iter().enumerate() {
        let dir = work.subdir(&format!("moosefs-server{number}"))?;
        start_chunk_server(&namespace, &dir, address)?;
    }
    let unmount = point.clone();
    guards.insert(0, defer(move || unmount_lazily(&unmount)));
    mount(&namespace, &point)?;
    Ok(Prepared {
        dir: point,
        note: format!(
            "backing: MooseFS, a master and {} chunk servers on this machine, one copy, default options",
            SERVERS.len()
        ),
        _guards: guards,
    })
}

fn start_master(namespace: &Namespace, dir: &Path) -> anyhow::Result<()> {
    let metadata = dir.join("metadata.mfs");
    fs::copy(EMPTY, &metadata).with_context(|| format!("{EMPTY} is missing: {PACKAGES}"))?;
    let exports = dir.join("exports.cfg");
    let topology = dir.join("topology.cfg");
    fs::write(&exports, "* / rw,alldirs,admin,maproot=0:0\n")?;
    fs::write(&topology, "")?;
    let config = format!(
        "EXPORTS_FILENAME = {}\nTOPOLOGY_FILENAME = {}\nMATOML_LISTEN_HOST = {MASTER}\n\
         MATOCS_LISTEN_HOST = {MASTER}\nMATOCL_LISTEN_HOST = {MASTER}\n",
        text(&exports),
        text(&topology)
    );
    start(namespace, "mfsmaster", dir, &config)
}

fn start_chunk_server(namespace: &Namespace, dir: &Path, address: &str) -> anyhow::Result<()> {
    let disk = dir.join("disk");
    fs::create_dir(&disk)?;
    let disks = dir.join("disks.cfg");
    fs::write(&disks, format!("{}\n", text(&disk)))?;
    let config = format!(
        "HDD_CONF_FILENAME = {}\nMASTER_HOST = {MASTER}\nBIND_HOST = {address}\n\
         CSSERV_LISTEN_HOST = {address}\nHDD_LEAVE_SPACE_DEFAULT = 64MiB\n",
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

/// Mounts it, and waits until the chunk servers offer room.
fn mount(namespace: &Namespace, point: &Path) -> anyhow::Result<()> {
    let deadline = Instant::now() + START_LIMIT;
    let mut command = namespace.command("mfsmount");
    command
        .arg(point)
        .args(["-H", MASTER, "-o", "default_permissions"]);
    retry_until(deadline, "mfsmount", || run_once(&mut command))?;
    retry_until(deadline, "the chunk servers", || {
        let room = rustix::fs::statvfs(point)?;
        ensure!(room.f_bavail > 0, "no chunk server has joined");
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
