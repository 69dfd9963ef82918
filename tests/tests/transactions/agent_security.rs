//! `firn agent` and `firn pull` on a network with an attacker.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use firn_agent::message::{Hello, PROTOCOL_VERSION, Rejection, Reply, Request};
use firn_agent::{Encryption, Key, KeyFile, Link, Stream};
use firn_testfs::namespace::Namespace;
use firn_tests::agent::{Agent, HOST, enter, pull, pull_command};
use firn_tests::command::{Outcome, run, wait_child, wait_until};
use firn_tests::fsops::{assert_same_bytes, read};
use firn_tests::random::{bytes, env_count, generator};
use firn_tests::sandbox::{firn_binary, kill};
use firn_tests::sshd::Sshd;
use firn_tests::{FirnMount, Sandbox, seed};
use rand::RngExt;

const MIB: usize = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);
const DEMAND: &str = "arena-size=96M,chunk-size=1M,drain=demand,passthrough=off";

/// What is done to the bytes that an agent sends, and where.
#[derive(Clone, Copy, Debug)]
enum Tamper {
    Nothing,
    Flip { at: usize },
    Drop { at: usize, bytes: usize },
    Repeat { at: usize, bytes: usize },
    Swap { at: usize, bytes: usize },
    Cut { at: usize },
}

impl Tamper {
    /// Bytes around [`Tamper::at`] that must be there together.
    fn reach(self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Flip { .. } | Self::Cut { .. } => 1,
            Self::Drop { bytes, .. } | Self::Repeat { bytes, .. } => bytes,
            Self::Swap { bytes, .. } => 2 * bytes,
        }
    }

    fn at(self) -> usize {
        match self {
            Self::Nothing => usize::MAX,
            Self::Flip { at }
            | Self::Drop { at, .. }
            | Self::Repeat { at, .. }
            | Self::Swap { at, .. }
            | Self::Cut { at } => at,
        }
    }

    /// To bytes that begin at [`Tamper::at`]; false: the connection ends after them.
    fn apply(self, part: &mut Vec<u8>) -> bool {
        match self {
            Self::Nothing => {}
            Self::Flip { .. } => part[0] ^= 0x10,
            Self::Drop { bytes, .. } => drop(part.drain(..bytes)),
            Self::Repeat { bytes, .. } => {
                let copy = part[..bytes].to_vec();
                part.splice(..0, copy);
            }
            Self::Swap { bytes, .. } => part[..2 * bytes].rotate_left(bytes),
            Self::Cut { .. } => {
                part.clear();
                return false;
            }
        }
        true
    }
}

/// An attacker between puller and agent, which reads all and changes what it likes.
struct Relay {
    address: SocketAddr,
    tamper: Arc<Mutex<Tamper>>,
    /// From the agents of all connections.
    heard: Arc<Mutex<Vec<u8>>>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    fn start(agent: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let address = listener.local_addr().expect("an address");
        let tamper = Arc::new(Mutex::new(Tamper::Nothing));
        let heard = Arc::<Mutex<Vec<u8>>>::default();
        let over = Arc::<AtomicBool>::default();
        let thread = std::thread::spawn({
            let agent = agent.to_owned();
            let tamper = Arc::clone(&tamper);
            let heard = Arc::clone(&heard);
            let over = Arc::clone(&over);
            move || {
                for puller in listener.incoming() {
                    if over.load(Ordering::Acquire) {
                        return;
                    }
                    let agent = TcpStream::connect(&agent).expect("connect");
                    let tamper = *tamper.lock().expect("lock");
                    carry(puller.expect("a puller"), agent, tamper, &heard);
                }
            }
        });
        Self {
            address,
            tamper,
            heard,
            over,
            thread: Some(thread),
        }
    }

    fn set(&self, tamper: Tamper) {
        *self.tamper.lock().expect("lock") = tamper;
        self.heard.lock().expect("lock").clear();
    }

    fn heard(&self) -> Vec<u8> {
        self.heard.lock().expect("lock").clone()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// One connection, to its end.
fn carry(puller: TcpStream, agent: TcpStream, tamper: Tamper, heard: &Mutex<Vec<u8>>) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = std::io::copy(&mut &puller, &mut &agent);
            let _ = agent.shutdown(Shutdown::Write);
        });
        let mut passed = 0;
        // What is kept back until all that is to be changed has come.
        let mut kept = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        let mut is_changed = false;
        while let Ok(count @ 1..) = (&agent).read(&mut buffer) {
            heard.lock().expect("lock").extend(&buffer[..count]);
            kept.extend(&buffer[..count]);
            let end = passed + kept.len();
            if !is_changed && tamper.at() < end {
                if end - tamper.at() < tamper.reach() {
                    continue;
                }
                is_changed = true;
                let mut part = kept.split_off(tamper.at() - passed);
                let goes_on = tamper.apply(&mut part);
                kept.extend(part);
                if !goes_on {
                    let _ = (&puller).write_all(&kept);
                    break;
                }
            }
            passed = end;
            if (&puller).write_all(&kept).is_err() {
                break;
            }
            kept.clear();
        }
        for end in [&puller, &agent] {
            let _ = end.shutdown(Shutdown::Both);
        }
    });
}

fn is_within(part: &[u8], whole: &[u8]) -> bool {
    let first = part[0];
    let mut starts = whole.iter().enumerate().filter(|(_, byte)| **byte == first);
    starts.any(|(at, _)| whole[at..].starts_with(part))
}

fn key_file(mount: &FirnMount<'_>) -> PathBuf {
    mount.backing().join(".firn").join(format!("agent-{HOST}"))
}

fn pull_by(sandbox: &Sandbox, mount: &FirnMount<'_>, relay: &Relay, extra: &[&str]) -> Outcome {
    let mut command = sandbox.firn(["pull", "--patience", "0s", "--key-file"]);
    command.arg(key_file(mount));
    command.args(["--address", &relay.address.to_string()]);
    let source = format!("{HOST}:{}", mount.join("rank0").display());
    run(command.args(extra).arg(source).arg(sandbox.join("copy")))
}

/// A mount with a file, its agent, and an attacker between it and its pullers.
struct Watched<'a> {
    mount: FirnMount<'a>,
    data: Vec<u8>,
    agent: Agent,
    relay: Relay,
}

impl<'a> Watched<'a> {
    fn start(sandbox: &'a Sandbox, encrypt: &str) -> Self {
        let mount = FirnMount::new(sandbox, DEMAND);
        let data = bytes(5, 6 * MIB + 123);
        fs::write(mount.join("rank0"), &data).expect("write");
        let options = ["--verbose", "--encrypt", encrypt];
        let agent = Agent::start(sandbox, mount.path(), &options);
        let address = KeyFile::load(mount.backing(), HOST)
            .expect("the key file")
            .address;
        let relay = Relay::start(&address);
        Self {
            mount,
            data,
            agent,
            relay,
        }
    }

    /// Bytes that are in the file and nowhere else.
    fn probe(&self) -> &[u8] {
        &self.data[3 * MIB..3 * MIB + 64]
    }
}

/// What is done to a connection in a round, somewhere after the list: what is changed before is waited for.
fn choose_tamper(generator: &mut impl RngExt, round: u64, heard: usize) -> Tamper {
    let at = generator.random_range(heard / 4..heard / 2);
    let bytes = generator.random_range(1..200_000);
    match round % 5 {
        0 => Tamper::Flip { at },
        1 => Tamper::Drop { at, bytes },
        2 => Tamper::Repeat { at, bytes },
        3 => Tamper::Swap { at, bytes },
        _ => Tamper::Cut { at },
    }
}

/// Proves S-agent-18: an attacker in between reads the bytes, and no message; its changes are noticed.
#[test]
fn nobody_between_forges_a_byte_that_is_not_encrypted() {
    let rounds = env_count("FIRN_AGENT_TAMPER_ROUNDS", 15);
    let sandbox = Sandbox::new("agent-plain");
    let watched = Watched::start(&sandbox, "no");
    let Watched { mount, relay, .. } = &watched;
    let target = sandbox.join("copy");
    let plain = ["--encrypt", "no", "--json"];
    pull_by(&sandbox, mount, relay, &plain).ok();
    fs::remove_file(&target).expect("remove the copy");
    let heard = relay.heard();
    assert!(is_within(watched.probe(), &heard), "the witness is blind");
    assert!(!is_within(b"rank0", &heard), "names were heard");
    let mut generator = generator(seed("agent-plain"));
    let mut mended = 0;
    for round in 0..rounds {
        let tamper = choose_tamper(&mut generator, round, heard.len());
        relay.set(tamper);
        let told = pull_by(&sandbox, mount, relay, &plain);
        println!("{tamper:?}: {}", told.code);
        if told.code == 0 {
            assert_same_bytes("what came", &read(&target), &watched.data);
            let damaged = &told.json()["damaged_blocks"];
            assert_eq!(*damaged, 1, "{told}");
            mended += 1;
            fs::remove_file(&target).expect("remove the copy");
        } else {
            told.code(1);
            assert!(!target.exists(), "{tamper:?}");
            fs::remove_dir_all(sandbox.join(".firn-pull-copy")).expect("what came until then");
        }
    }
    assert!(mended > 0, "no block was asked for again");
    relay.set(Tamper::Nothing);
    pull_by(&sandbox, mount, relay, &plain).ok();
    assert_same_bytes("after all that", &read(&target), &watched.data);
}

/// Proves S-agent-12, S-agent-18: also where encryption was not asked for, since the network is not private.
#[test]
fn an_encrypted_pull_cannot_be_read_or_changed_on_its_way() {
    let rounds = env_count("FIRN_AGENT_TAMPER_ROUNDS", 15);
    let sandbox = Sandbox::new("agent-sealed");
    let watched = Watched::start(&sandbox, "auto");
    let Watched {
        mount,
        data,
        agent,
        relay,
    } = &watched;
    let probe = watched.probe();
    let target = sandbox.join("copy");
    // Without an attacker: a private network is plain.
    pull(
        &sandbox,
        mount.backing(),
        &mount.join("rank0"),
        &target,
        &[],
    )
    .ok();
    fs::remove_file(&target).expect("remove the copy");
    assert!(!agent.log().contains("encrypted"), "{}", agent.log());

    for extra in [&[][..], &["--encrypt", "yes"]] {
        relay.set(Tamper::Nothing);
        pull_by(&sandbox, mount, relay, extra).ok();
        assert_same_bytes("encrypted", &read(&target), data);
        fs::remove_file(&target).expect("remove the copy");
        let heard = relay.heard();
        assert!(heard.len() > data.len());
        assert!(!is_within(probe, &heard), "bytes of the file were heard");
        assert!(!is_within(b"rank0", &heard), "names were heard");
    }
    let heard = relay.heard();
    assert!(
        agent.log().contains("is connected, encrypted"),
        "{}",
        agent.log()
    );

    let mut generator = generator(seed("agent-sealed"));
    for round in 0..rounds {
        let tamper = choose_tamper(&mut generator, round, heard.len());
        relay.set(tamper);
        let told = pull_by(&sandbox, mount, relay, &["--encrypt", "yes"]).code(1);
        told.says(match tamper {
            Tamper::Cut { .. } => "the connection to the agent on n1 failed",
            _ => "is not what was sent",
        });
        assert!(!target.exists(), "{tamper:?}");
        fs::remove_dir_all(sandbox.join(".firn-pull-copy")).expect("what came until then");
    }
    relay.set(Tamper::Nothing);
    pull_by(&sandbox, mount, relay, &["--encrypt", "yes"]).ok();
    assert_same_bytes("after all that", &read(&target), data);
}

/// Proves S-agent-12: the choice of each side.
#[test]
fn where_one_side_wants_encryption_the_other_one_encrypts_or_is_refused() {
    let sandbox = Sandbox::new("agent-encrypt");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let data = bytes(6, MIB);
    fs::write(mount.join("rank0"), &data).expect("write");
    let path = mount.join("rank0");
    let target = sandbox.join("copy");
    let tried = |agent: &str, puller: &str| {
        let agent = Agent::start(&sandbox, mount.path(), &["--verbose", "--encrypt", agent]);
        let extra = ["--patience", "0s", "--encrypt", puller];
        let told = pull(&sandbox, mount.backing(), &path, &target, &extra);
        let log = agent.log();
        if told.code == 0 {
            assert_same_bytes("the copy", &read(&target), &data);
            fs::remove_file(&target).expect("remove the copy");
        }
        assert!(!target.exists());
        (told, log.contains("is connected, encrypted"))
    };
    for (agent, puller, expected) in [
        ("auto", "auto", false),
        ("auto", "no", false),
        ("no", "auto", false),
        ("auto", "yes", true),
        ("yes", "auto", true),
    ] {
        let (told, is_encrypted) = tried(agent, puller);
        told.ok();
        assert_eq!(is_encrypted, expected, "agent {agent}, puller {puller}");
    }
    let (told, _) = tried("no", "yes");
    told.code(1).says("the agent was started with --encrypt no");
    let (told, _) = tried("yes", "no");
    told.code(1).says("pull with --encrypt auto or yes");
    for args in [
        &["pull", "--encrypt", "yes", "n1:/x", "x"][..],
        &[
            "pull",
            "--encrypt",
            "perhaps",
            "--backing",
            "/",
            "n1:/x",
            "x",
        ],
        &["agent", "--stdio", "--encrypt", "yes"],
    ] {
        run(&mut sandbox.firn(args)).code(2);
    }
}

/// Proves S-agent-12: between addresses that are not private, unless both sides say otherwise.
#[test]
fn a_network_that_is_not_private_is_not_trusted() {
    let sandbox = Sandbox::new("agent-public");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let data = bytes(7, MIB);
    fs::write(mount.join("rank0"), &data).expect("write");
    let mut guards = Vec::new();
    let namespace = Namespace::create(&mut guards).expect("a network namespace");
    // Of a documentation network: without an owner, and not private.
    namespace
        .ip("addr add 198.51.100.7/32 dev lo")
        .expect("an address");
    let path = mount.join("rank0");
    let target = sandbox.join("copy");
    let tried = |agent: &str, puller: &[&str]| {
        let options = [
            "--verbose",
            "--listen",
            "198.51.100.7:0",
            "--encrypt",
            agent,
        ];
        let agent = Agent::start_in(Some(&namespace), &sandbox, mount.path(), &options);
        let extra = [&["--patience", "0s"], puller].concat();
        let command = pull_command(&sandbox, mount.backing(), &path, &target, &extra);
        let told = run(&mut enter(&namespace, &command));
        let log = agent.log();
        (told, log.contains("is connected, encrypted"))
    };
    let pulled = |what: &str| {
        assert_same_bytes(what, &read(&target), &data);
        fs::remove_file(Path::new(&target)).expect("remove the copy");
    };
    let (told, is_encrypted) = tried("auto", &[]);
    told.ok();
    assert!(is_encrypted);
    pulled("encrypted by itself");
    let (told, _) = tried("no", &[]);
    told.code(1).says("the agent was started with --encrypt no");
    assert!(!target.exists());
    let (told, is_encrypted) = tried("no", &["--encrypt", "no"]);
    told.ok();
    assert!(!is_encrypted);
    pulled("as both sides said");
}

/// A munged with a key and a socket of its own, which ends with the value.
struct Munged {
    child: Child,
    socket: PathBuf,
}

impl Munged {
    fn start(sandbox: &Sandbox, name: &str) -> Self {
        // munged wants its directories closed to others, up to the root, or sticky.
        let dir = sandbox.mkdir(name);
        fs::set_permissions(&dir, PermissionsExt::from_mode(0o711)).expect("chmod");
        let key = dir.join("key");
        fs::write(&key, bytes(seed(name), 128)).expect("write");
        fs::set_permissions(&key, PermissionsExt::from_mode(0o400)).expect("chmod");
        let socket = dir.join("socket");
        let log = fs::File::create(dir.join("told")).expect("a log");
        let child = Command::new("munged")
            .args(["--foreground", "--force"])
            .arg(format!("--socket={}", socket.display()))
            .arg(format!("--key-file={}", key.display()))
            .arg(format!("--pid-file={}", dir.join("pid").display()))
            .arg(format!("--seed-file={}", dir.join("seed").display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("start munged: install MUNGE");
        let mut munged = Self { child, socket };
        wait_until("munged answers", LIMIT, || {
            let ended = munged.child.try_wait().expect("wait for munged");
            let told = || fs::read_to_string(dir.join("told")).expect("its log");
            assert!(ended.is_none(), "munged ended: {}", told());
            munged
                .command("munge")
                .arg("--no-input")
                .output()
                .expect("munge")
                .status
                .success()
        });
        munged
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .arg("--socket")
            .arg(&self.socket)
            .stdin(Stdio::null());
        command
    }

    fn options(&self) -> [&str; 3] {
        [
            "--munge",
            "--munge-socket",
            self.socket.to_str().expect("utf-8"),
        ]
    }
}

impl Drop for Munged {
    fn drop(&mut self) {
        kill(self.child.id(), libc::SIGTERM);
        let _ = wait_child(&mut self.child, LIMIT);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Proves S-agent-13.
#[test]
fn munge_says_on_both_sides_who_is_there() {
    let sandbox = Sandbox::new("agent-munge");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let data = bytes(8, 2 * MIB + 5);
    fs::write(mount.join("rank0"), &data).expect("write");
    let site = Munged::start(&sandbox, "site");
    let other_site = Munged::start(&sandbox, "other-site");
    let target = sandbox.join("copy");
    let from = |address: &str, options: &[&str]| {
        let mut command = sandbox.firn(["pull", "--patience", "0s", "--address", address]);
        let source = format!("{HOST}:{}", mount.join("rank0").display());
        run(command.args(options).arg(source).arg(&target))
    };
    let address = || {
        KeyFile::load(mount.backing(), HOST)
            .expect("the key file")
            .address
    };
    // An agent that was not told to ask MUNGE.
    let agent = Agent::start(&sandbox, mount.path(), &[]);
    from(&address(), &site.options())
        .code(1)
        .says("it was started without --munge");
    agent.kill();

    let options = [&site.options()[..], &["--verbose"]].concat();
    let agent = Agent::start(&sandbox, mount.path(), &options);
    for more in [&[][..], &["--encrypt", "yes"]] {
        from(&address(), &[&site.options(), more].concat()).ok();
        assert_same_bytes("by MUNGE", &read(&target), &data);
        fs::remove_file(&target).expect("remove the copy");
    }
    assert!(agent.log().contains("is connected, encrypted"));
    // The key goes on to work.
    pull(
        &sandbox,
        mount.backing(),
        &mount.join("rank0"),
        &target,
        &[],
    )
    .ok();
    fs::remove_file(&target).expect("remove the copy");

    // No munged, and one of another site.
    let nowhere = ["--munge", "--munge-socket", "/no/munged"];
    from(&address(), &nowhere)
        .code(1)
        .says("Did you start munged?");
    let told = from(&address(), &other_site.options()).code(1);
    told.says("the agent refused the credential");
    wait_until("the reason", LIMIT, || agent.log().contains("unmunge: "));

    credentials_of_others_are_refused(&site, &agent, &address());
    replayed_credentials_are_refused(&site, &agent, &address());
    assert!(!target.exists());
    for args in [
        &["pull", "--munge", "n1:/x", "x"][..],
        &[
            "pull",
            "--munge-socket",
            "/x",
            "--address",
            "n1:1",
            "n1:/x",
            "x",
        ],
        &[
            "pull",
            "--munge",
            "--backing",
            "/",
            "--address",
            "n1:1",
            "n1:/x",
            "x",
        ],
        &["agent", "--stdio", "--munge"],
    ] {
        run(&mut sandbox.firn(args)).code(2);
    }
}

/// Its hello with this credential, and what the agent says until it hangs up.
fn show(address: &str, credential: &str) -> Vec<Reply> {
    let socket = TcpStream::connect(address).expect("connect");
    let mut link = Link::over(Stream::over_tcp(socket).expect("a stream"));
    let until = Instant::now() + LIMIT;
    // A peer that cannot open the credential guesses what is in it.
    let hello = Request::Hello(Hello {
        protocol: PROTOCOL_VERSION,
        nonce: [1; 32],
        tag: [2; 16],
        encryption: Encryption::Possible,
        here: None,
        there: None,
        credential: Some(credential.into()),
    });
    link.send(&hello, until).expect("send");
    let mut told = Vec::new();
    while let Ok(reply) = link.receive(1 << 16, until) {
        told.push(reply);
    }
    told
}

#[track_caller]
fn assert_only_rejected(told: &[Reply]) {
    assert!(
        matches!(
            told,
            [Reply::Rejected {
                reason: Rejection::Key,
                ..
            }]
        ),
        "{told:?}"
    );
}

/// A credential of another user, and one that is for another user.
fn credentials_of_others_are_refused(site: &Munged, agent: &Agent, address: &str) {
    let digits = Key::random().expect("random").digits();
    let made = |options: &[&str]| {
        let mut command = site.command("munge");
        let output = command.args(options).args(["--string", &digits]).output();
        let output = output.expect("munge");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("utf-8")
    };
    // Root may make credentials of others.
    assert_only_rejected(&show(address, made(&["--uid=65534"]).trim()));
    wait_until("the user in the log", LIMIT, || {
        agent
            .log()
            .contains("the credential was made by user 65534")
    });
    assert_only_rejected(&show(address, made(&["--restrict-uid=65534"]).trim()));
    wait_until("the restriction in the log", LIMIT, || {
        agent.log().contains("Unauthorized credential")
    });
    assert_only_rejected(&show(address, "MUNGE:nonsense:"));
    // The right user with the wrong key in it.
    assert_only_rejected(&show(address, made(&[]).trim()));
    wait_until("the wrong key in the log", LIMIT, || {
        agent.log().contains("the key is wrong")
    });
}

/// Of a recorded pull.
fn replayed_credentials_are_refused(site: &Munged, agent: &Agent, address: &str) {
    let made = site
        .command("munge")
        .args(["--string", &"0".repeat(64)])
        .output()
        .expect("munge");
    let credential = String::from_utf8(made.stdout).expect("utf-8");
    let opened = || {
        let mut command = site.command("unmunge");
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("unmunge");
        let mut input = child.stdin.take().expect("a pipe");
        input.write_all(credential.as_bytes()).expect("write");
        drop(input);
        child.wait().expect("unmunge").success()
    };
    assert!(opened(), "its first use");
    // The recorder shows it again, with a proof by the key that is in it.
    let told = show(address, credential.trim());
    assert_only_rejected(&told);
    wait_until("the replay in the log", LIMIT, || {
        agent.log().contains("Replayed credential")
    });
}

/// Proves S-agent-8: a real sshd and a real ssh.
#[test]
fn over_ssh_a_user_that_sshd_lets_in_pulls() {
    let sandbox = Sandbox::new("agent-sshd");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let data = bytes(9, 12 * MIB + 77);
    fs::write(mount.join("rank0"), &data).expect("write");
    let sshd = Sshd::start(&sandbox);
    let source = format!("root@127.0.0.1:{}", mount.join("rank0").display());
    let target = sandbox.join("copy");
    let by = |key: &str| {
        let mut command = sandbox.firn(["pull", "--json", "--ssh", &sshd.command(key)]);
        command.arg("--remote-firn").arg(firn_binary());
        run(command.arg(&source).arg(&target))
    };
    let told = by("known").ok();
    assert_same_bytes("over ssh", &read(&target), &data);
    assert_eq!(told.json()["received_bytes"], data.len(), "{told}");
    fs::remove_file(&target).expect("remove the copy");
    // The agent has ended with its connection.
    wait_until("nothing is held for the puller", LIMIT, || {
        mount.status().chunk_lists == 0
    });
    by("stranger").code(1).says("the connection was closed");
    assert!(!target.exists());
    by("known").ok();
}
