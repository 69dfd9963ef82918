//! Sets up an sshfs mount with an SSH server of its own.
//!
//! sshd uses new keys in the work directory. If this process runs as root, sshd runs in its own network namespace, which
//! is connected by a pair of veth interfaces. The module `relay` adds the round trip time.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::{Prepared, relay, run, text};
use crate::options::WorkDir;
use firn_testfs::cleanup::{Guard, Leftover, expect};
use firn_testfs::namespace::Namespace;

/// Maximum time for the start of sshd.
const START_LIMIT: Duration = Duration::from_secs(10);

/// A cipher that processors support in hardware, so that the network is the limit and not the encryption.
const CIPHER: &str = "aes128-gcm@openssh.com";

/// Starts a server and mounts its directory `work`/export at `work`/sshfs with the options `options` of sshfs.
pub fn prepare(round_trip_us: u64, options: &str, work: &WorkDir) -> anyhow::Result<Prepared> {
    let keys = work.subdir("keys")?;
    let export = work.subdir("export")?;
    let point = work.subdir("sshfs")?;
    let mut guards = Vec::new();
    let server = if rustix::process::geteuid().is_root() {
        start_in_namespace(&keys, &mut guards)?
    } else {
        start_on_loopback(&keys)?
    };
    let place = server.place;
    let address = match round_trip_us {
        0 => server.address,
        us => relay::start(server.address, Duration::from_micros(us))?,
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
        _parts: vec![Box::new(unmount), Box::new(server.child), Box::new(guards)],
    })
}

/// Mounts the directory `export` of the server at `point`.
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

/// A running SSH server.
struct Server {
    child: ServerChild,
    /// The address on which it listens.
    address: SocketAddr,
    /// Where the server runs, for the report.
    place: &'static str,
}

/// Starts a server in a new network namespace. `guards` removes the namespace.
fn start_in_namespace(keys: &Path, guards: &mut Vec<Guard>) -> anyhow::Result<Server> {
    let namespace = Namespace::create(guards)?;
    let link = namespace.connect(guards)?;
    let address = namespace.add_address(&link, 2)?;
    let address: SocketAddr = format!("{address}:22").parse()?;
    let child = start_server(namespace.command("/usr/sbin/sshd"), keys, address)?;
    Ok(Server {
        child,
        address,
        place: "a network namespace",
    })
}

/// Starts a server on the loopback interface.
fn start_on_loopback(keys: &Path) -> anyhow::Result<Server> {
    // The port was free a moment ago. If another program takes it meanwhile, sshd fails with an error.
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let child = start_server(Command::new("/usr/sbin/sshd"), keys, address)?;
    Ok(Server {
        child,
        address,
        place: "a process of its own on loopback",
    })
}

/// Starts sshd with new keys, and waits until it accepts connections at `address`. `command` runs sshd.
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

/// The listening sshd. Dropping the value ends it. Its sessions end with their connections or with the namespace.
struct ServerChild(Child);

impl Drop for ServerChild {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}
