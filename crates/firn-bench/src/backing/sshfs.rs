//! An sshfs mount with a server of its own.
//!
//! sshd runs with fresh keys from the work directory, for root in a network namespace of its own,
//! joined by a pair of veth interfaces. `relay` adds the round trip.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::{Prepared, relay, run, text};
use crate::options::WorkDir;
use firn_testfs::cleanup::{Guard, Leftover, expect};
use firn_testfs::namespace::Namespace;

const START_LIMIT: Duration = Duration::from_secs(10);

/// What processors do in hardware: the network shall be the limit, not the encryption.
const CIPHER: &str = "aes128-gcm@openssh.com";

/// Mounts `work`/export on `work`/sshfs with `options`.
pub fn prepare(round_trip_us: u64, options: &str, work: &WorkDir) -> anyhow::Result<Prepared> {
    let keys = work.subdir("keys")?;
    let export = work.subdir("export")?;
    let point = work.subdir("sshfs")?;
    let mut guards = Vec::new();
    let (child, server, place) = if rustix::process::geteuid().is_root() {
        namespaced_server(&keys, &mut guards)?
    } else {
        local_server(&keys)?
    };
    let address = match round_trip_us {
        0 => server,
        us => relay::start(server, Duration::from_micros(us))?,
    };
    let unmount = expect(Leftover::Mount(point.clone()));
    mount(&keys, address, &export, &point, options)?;
    let shown = if options.is_empty() {
        "default options"
    } else {
        options
    };
    let note = format!(
        "backing: sshfs ({shown}) to an sshd in {place}, {round_trip_us} µs added to a round trip"
    );
    Ok(Prepared {
        dir: point,
        note,
        _parts: vec![Box::new(unmount), Box::new(child), Box::new(guards)],
    })
}

fn mount(
    keys: &Path,
    address: SocketAddr,
    export: &Path,
    point: &Path,
    options: &str,
) -> anyhow::Result<()> {
    let user = run("id", &["-un"])?;
    let source = format!("{user}@{}:{}", address.ip(), text(export));
    let ssh = format!(
        "port={},Ciphers={CIPHER},IdentityFile={},StrictHostKeyChecking=no,\
         UserKnownHostsFile=/dev/null,LogLevel=ERROR",
        address.port(),
        text(&keys.join("user"))
    );
    let mut args = vec![source.as_str(), text(point), "-F", "/dev/null", "-o", &ssh];
    if !options.is_empty() {
        args.extend(["-o", options]);
    }
    run("sshfs", &args).map(drop)
}

fn namespaced_server(
    keys: &Path,
    guards: &mut Vec<Guard>,
) -> anyhow::Result<(ServerChild, SocketAddr, &'static str)> {
    let namespace = Namespace::create(guards)?;
    let link = namespace.connect(guards)?;
    let address = namespace.add_address(&link, 2)?;
    let address: SocketAddr = format!("{address}:22").parse()?;
    let child = start_server(namespace.command("/usr/sbin/sshd"), keys, address)?;
    Ok((child, address, "a network namespace"))
}

fn local_server(keys: &Path) -> anyhow::Result<(ServerChild, SocketAddr, &'static str)> {
    // A port that was free a moment ago; if another program takes it, sshd says so.
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let child = start_server(Command::new("/usr/sbin/sshd"), keys, address)?;
    Ok((child, address, "a process of its own on loopback"))
}

fn start_server(
    mut command: Command,
    keys: &Path,
    address: SocketAddr,
) -> anyhow::Result<ServerChild> {
    use std::os::unix::process::CommandExt;
    for name in ["host", "user"] {
        run(
            "ssh-keygen",
            &[
                "-q",
                "-t",
                "ed25519",
                "-N",
                "",
                "-f",
                text(&keys.join(name)),
            ],
        )?;
    }
    let config = format!(
        "ListenAddress {address}\nHostKey {keys}/host\nAuthorizedKeysFile {keys}/user.pub\n\
         PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n\
         PermitRootLogin prohibit-password\nSubsystem sftp internal-sftp\n",
        keys = text(keys)
    );
    let config_path = keys.join("sshd_config");
    std::fs::write(&config_path, config)?;
    if rustix::process::geteuid().is_root() {
        // sshd wants its empty directory; Debian makes it when the service starts.
        let _ = std::fs::create_dir_all("/run/sshd");
    }
    let log = keys.join("sshd.log");
    let child = command
        .args(["-D", "-e", "-f", text(&config_path)])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log)?)
        .process_group(0)
        .spawn()
        .context("cannot start sshd; install openssh-server")?;
    let mut child = ServerChild(child);
    let deadline = Instant::now() + START_LIMIT;
    while TcpStream::connect_timeout(&address, Duration::from_millis(200)).is_err() {
        if child.0.try_wait()?.is_some() || Instant::now() > deadline {
            let message = std::fs::read_to_string(&log).unwrap_or_default();
            bail!("sshd does not answer at {address}: {}", message.trim_end());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(child)
}

/// The listening sshd; its sessions end with their connection, or with the namespace.
struct ServerChild(Child);

impl Drop for ServerChild {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}
