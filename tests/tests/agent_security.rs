//! `firn agent` and `firn pull` on a network that somebody else is on.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use firn_agent::KeyFile;
use firn_testfs::namespace::Namespace;
use firn_tests::agent::{Agent, HOST, enter, pull, pull_command};
use firn_tests::command::{Outcome, run};
use firn_tests::fsops::{assert_same_bytes, read};
use firn_tests::random::{bytes, env_count, generator};
use firn_tests::{FirnMount, Sandbox, seed};
use rand::RngExt;

const MIB: usize = 1 << 20;
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

/// Somebody between puller and agent, who reads all and changes what he likes.
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
            let (agent, tamper) = (agent.to_owned(), Arc::clone(&tamper));
            let (heard, over) = (Arc::clone(&heard), Arc::clone(&over));
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

/// Proves S-agent-12: with a witness for what could be read and changed without.
#[test]
fn an_encrypted_pull_cannot_be_read_or_changed_on_its_way() {
    let rounds = env_count("FIRN_AGENT_TAMPER_ROUNDS", 15);
    let sandbox = Sandbox::new("agent-sealed");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let data = bytes(5, 6 * MIB + 123);
    fs::write(mount.join("rank0"), &data).expect("write");
    let agent = Agent::start(&sandbox, mount.path(), &["--verbose"]);
    let address = KeyFile::load(mount.backing(), HOST)
        .expect("the key file")
        .address;
    let relay = Relay::start(&address);
    let target = sandbox.join("copy");
    let probe = &data[3 * MIB..3 * MIB + 64];

    pull_by(&sandbox, &mount, &relay, &[]).ok();
    fs::remove_file(&target).expect("remove the copy");
    assert!(
        is_within(probe, &relay.heard()),
        "a private network is plain"
    );
    assert!(!agent.log().contains("encrypted"), "{}", agent.log());

    relay.set(Tamper::Nothing);
    pull_by(&sandbox, &mount, &relay, &["--encrypt", "yes"]).ok();
    assert_same_bytes("encrypted", &read(&target), &data);
    fs::remove_file(&target).expect("remove the copy");
    let heard = relay.heard();
    assert!(heard.len() > data.len());
    assert!(!is_within(probe, &heard), "bytes of the file were heard");
    assert!(!is_within(b"rank0", &heard), "names were heard");
    assert!(
        agent.log().contains("is connected, encrypted"),
        "{}",
        agent.log()
    );

    let mut generator = generator(seed("agent-sealed"));
    for round in 0..rounds {
        // After the list: what is changed before is waited for.
        let at = generator.random_range(heard.len() / 4..heard.len() / 2);
        let bytes = generator.random_range(1..200_000);
        let tamper = match round % 5 {
            0 => Tamper::Flip { at },
            1 => Tamper::Drop { at, bytes },
            2 => Tamper::Repeat { at, bytes },
            3 => Tamper::Swap { at, bytes },
            _ => Tamper::Cut { at },
        };
        relay.set(tamper);
        let told = pull_by(&sandbox, &mount, &relay, &["--encrypt", "yes"]).code(1);
        told.says(match tamper {
            Tamper::Cut { .. } => "the connection to the agent on n1 failed",
            _ => "is not what was sent",
        });
        assert!(!target.exists(), "{tamper:?}");
        fs::remove_dir_all(sandbox.join(".firn-pull-copy")).expect("what came until then");
    }
    relay.set(Tamper::Nothing);
    pull_by(&sandbox, &mount, &relay, &["--encrypt", "yes"]).ok();
    assert_same_bytes("after all that", &read(&target), &data);
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
    // Of a documentation network: nobody's, and not private.
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
