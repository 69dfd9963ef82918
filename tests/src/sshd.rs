//! A real sshd for tests. Needs Debian's openssh-server (`scripts/setup`).

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::Sandbox;
use crate::command::{run, wait_child, wait_until};
use crate::sandbox::kill;

/// How long it may take to listen, and to end.
const LIMIT: Duration = Duration::from_secs(60);

/// An sshd on a port of its own, which ends with the value.
pub struct Sshd {
    child: Child,
    dir: PathBuf,
    port: u16,
}

impl Sshd {
    /// Starts it. A login has the runtime directory of the sandbox.
    pub fn start(sandbox: &Sandbox) -> Self {
        let dir = sandbox.mkdir("sshd");
        for key in ["host-key", "known", "stranger"] {
            let mut keygen = Command::new("ssh-keygen");
            keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]);
            run(keygen.arg(dir.join(key))).ok();
        }
        fs::copy(dir.join("known.pub"), dir.join("authorized")).expect("copy");
        // Free now, and most likely still when sshd takes it.
        let free = TcpListener::bind("127.0.0.1:0").expect("listen");
        let port = free.local_addr().expect("an address").port();
        drop(free);
        let public = fs::read_to_string(dir.join("host-key.pub")).expect("read");
        let hosts = format!("[127.0.0.1]:{port} {public}");
        fs::write(dir.join("known-hosts"), hosts).expect("write");
        let at = dir.display();
        // Where firnd has its sockets, in the sandbox: a login has the usual place.
        let runtime = sandbox.runtime().display();
        let config = format!(
            "ListenAddress 127.0.0.1:{port}\nHostKey {at}/host-key\nAuthorizedKeysFile {at}/authorized\n\
             PidFile none\nStrictModes no\nUsePAM no\nPermitRootLogin prohibit-password\n\
             PasswordAuthentication no\nKbdInteractiveAuthentication no\n\
             SetEnv FIRN_RUNTIME_DIR={runtime}\n"
        );
        fs::write(dir.join("config"), config).expect("write");
        // Its package makes this at each start of the host.
        fs::create_dir_all("/run/sshd").expect("the directory of sshd");
        let log = fs::File::create(dir.join("log")).expect("a log");
        let child = Command::new("/usr/sbin/sshd")
            .args(["-D", "-e", "-f"])
            .arg(dir.join("config"))
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("start sshd: install openssh-server");
        let mut sshd = Self { child, dir, port };
        wait_until("sshd listens", LIMIT, || {
            let ended = sshd.child.try_wait().expect("wait for sshd");
            assert!(ended.is_none(), "sshd ended: {}", sshd.log());
            sshd.log().contains("Server listening")
        });
        sshd
    }

    /// What it logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).expect("its log")
    }

    /// The ssh that reaches it with a key: `known`, or `stranger`.
    pub fn command(&self, key: &str) -> String {
        let port = self.port;
        let at = self.dir.display();
        format!(
            "ssh -F none -p {port} -i {at}/{key} -o IdentitiesOnly=yes -o BatchMode=yes \
             -o StrictHostKeyChecking=yes -o UserKnownHostsFile={at}/known-hosts"
        )
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the log of sshd\n{}\n---", self.log());
        }
        kill(self.child.id(), libc::SIGTERM);
        let _ = wait_child(&mut self.child, LIMIT);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
