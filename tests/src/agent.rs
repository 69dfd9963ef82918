//! An agent of the built binary, and pulls from it.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use firn_agent::message::{Reply, Request};
use firn_agent::{
    Encrypt, HandshakeInputs, Key, KeyFile, Link, Stream, WireError, answer_handshake,
    begin_handshake,
};
use firn_testfs::namespace::Namespace;

use crate::FirnMount;
use crate::command::{Outcome, run, wait_child, wait_until};
use crate::fsops::{open_rw, read};
use crate::random::bytes;
use crate::sandbox::{Sandbox, kill};
use crate::stop::StopAtEnd;

/// What pullers call the source host.
pub const HOST: &str = "n1";
const LIMIT: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;
/// What the writer of [`pull_while_written`] writes at once.
const CHANGED_BLOCK_BYTES: usize = 64 << 10;

/// A `firn agent` that ends with the value.
pub struct Agent {
    child: Child,
    log: PathBuf,
}

impl Agent {
    /// For the mount at `mount_point`, reached on this host only.
    #[track_caller]
    pub fn start(sandbox: &Sandbox, mount_point: &Path, extra: &[&str]) -> Self {
        Self::start_in(None, sandbox, mount_point, extra)
    }

    /// The same in a network namespace.
    #[track_caller]
    pub fn start_in(
        namespace: Option<&Namespace>,
        sandbox: &Sandbox,
        mount_point: &Path,
        extra: &[&str],
    ) -> Self {
        let named = [&["--host", HOST], extra].concat();
        Self::launch(namespace, sandbox, mount_point, &named)
    }

    /// With the name that the mount has.
    #[track_caller]
    pub fn start_unnamed(sandbox: &Sandbox, mount_point: &Path, extra: &[&str]) -> Self {
        Self::launch(None, sandbox, mount_point, extra)
    }

    #[track_caller]
    fn launch(
        namespace: Option<&Namespace>,
        sandbox: &Sandbox,
        mount_point: &Path,
        extra: &[&str],
    ) -> Self {
        let mut command = sandbox.firn(["agent"]);
        if !extra.contains(&"--listen") {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        let log = sandbox.join("agent.log");
        let file = File::create(&log).expect("a log");
        command.args(extra).arg(mount_point);
        if let Some(namespace) = namespace {
            command = enter(namespace, &command);
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()
            .expect("start the agent");
        let mut agent = Self { child, log };
        wait_until("the agent listens", LIMIT, || {
            let ended = agent.child.try_wait().expect("wait for the agent");
            assert!(ended.is_none(), "the agent ended: {}", agent.log());
            agent.log().contains("serves the mount")
        });
        agent
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it said.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).expect("the agent's log")
    }

    /// KiB of memory that are its own: not those of the arena.
    pub fn own_memory_kib(&self) -> u64 {
        let path = format!("/proc/{}/status", self.pid());
        let status = fs::read_to_string(path).expect("the agent's status");
        let mut lines = status.lines();
        let line = lines.find_map(|line| line.strip_prefix("RssAnon:"));
        let line = line.expect("RssAnon").trim();
        line.trim_end_matches(" kB").parse().expect("KiB")
    }

    /// Number of its threads.
    pub fn threads(&self) -> usize {
        fs::read_dir(format!("/proc/{}/task", self.pid()))
            .expect("the agent's threads")
            .count()
    }

    /// Its open descriptors.
    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid()))
            .expect("the agent's descriptors")
            .count()
    }

    /// kill -9.
    pub fn kill(mut self) {
        self.child.kill().expect("kill the agent");
        self.child.wait().expect("wait for the agent");
        remove_shared_memory(self.pid());
    }

    /// SIGTERM; its exit code.
    pub fn end(mut self) -> Option<i32> {
        kill(self.pid(), libc::SIGTERM);
        wait_child(&mut self.child, LIMIT)
            .expect("the agent ends")
            .code()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the agent's log\n{}\n---", self.log());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        remove_shared_memory(self.pid());
    }
}

/// Files of libfabric's provider `shm` that a process has, or left when it was killed.
pub fn shared_memory_of(pid: u32) -> Vec<PathBuf> {
    let prefix = format!("{pid}:");
    let entries = fs::read_dir("/dev/shm").expect("list /dev/shm").flatten();
    entries
        .filter(|entry| {
            let name = entry.file_name();
            name.as_encoded_bytes().starts_with(prefix.as_bytes())
        })
        .map(|entry| entry.path())
        .collect()
}

/// Only the user can tell that they are not needed (docs/OPERATIONS.md).
fn remove_shared_memory(pid: u32) {
    for path in shared_memory_of(pid) {
        let _ = fs::remove_file(path);
    }
}

/// The same command in a network namespace.
pub fn enter(namespace: &Namespace, command: &Command) -> Command {
    let program = command.get_program().to_str().expect("utf-8");
    let mut entered = namespace.command(program);
    entered.args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => entered.env(name, value),
            None => entered.env_remove(name),
        };
    }
    entered
}

/// `firn pull` from the agent of a backing.
pub fn pull_command(
    sandbox: &Sandbox,
    backing: &Path,
    source: &Path,
    target: &Path,
    extra: &[&str],
) -> Command {
    let mut from = OsString::from(format!("{HOST}:"));
    from.push(source);
    let mut command = sandbox.firn([OsStr::new("pull"), OsStr::new("--backing")]);
    command.arg(backing).args(extra).arg(from).arg(target);
    command
}

/// The same, run to its end.
#[track_caller]
pub fn pull(
    sandbox: &Sandbox,
    backing: &Path,
    source: &Path,
    target: &Path,
    extra: &[&str],
) -> Outcome {
    run(&mut pull_command(sandbox, backing, source, target, extra))
}

/// Every kind of place that bytes can be in: memory, spill file, backing, holes.
pub fn write_tree(mount: &FirnMount<'_>, sandbox: &Sandbox) -> PathBuf {
    let top = mount.join("step_100");
    fs::create_dir_all(top.join("a/b")).expect("mkdir");
    fs::write(top.join("drained"), bytes(1, 5 * MIB + 3)).expect("write");
    sandbox
        .run(["drain".as_ref(), "--wait".as_ref(), top.as_os_str()])
        .ok();
    sandbox.run(["evict".as_ref(), top.as_os_str()]).ok();
    for rank in 0..4 {
        let path = top.join(format!("a/rank{rank}"));
        fs::write(path, bytes(rank + 2, 6 * MIB + 1000 * rank as usize)).expect("write");
    }
    let sparse = open_rw(&top.join("a/b/sparse"));
    for (at, key) in [(0, 20), (3 * MIB + 77, 21), (17 * MIB, 22)] {
        sparse
            .write_all_at(&bytes(key, 70_000), at as u64)
            .expect("write");
    }
    sparse.set_len(33 * MIB as u64 + 5).expect("truncate");
    // A part in the backing, newer bytes over it in memory.
    let half = open_rw(&top.join("drained"));
    half.write_all_at(&bytes(30, 12_345), 2 * MIB as u64 - 99)
        .expect("write");
    fs::write(top.join("empty"), b"").expect("write");
    fs::write(top.join("script"), b"#!/bin/sh\n").expect("write");
    fs::set_permissions(top.join("script"), PermissionsExt::from_mode(0o750)).expect("chmod");
    fs::set_permissions(top.join("a/b"), PermissionsExt::from_mode(0o555)).expect("chmod");
    symlink("a/rank0", top.join("latest")).expect("symlink");
    symlink("/no/where", top.join("dangling")).expect("symlink");
    top
}

/// Where a pull to a target keeps what it has.
pub fn staging_of(target: &Path) -> PathBuf {
    let name = target.file_name().expect("a name").to_string_lossy();
    target.with_file_name(format!(".firn-pull-{name}"))
}

/// Nothing that was held for pullers stays.
#[track_caller]
pub fn assert_nothing_held(mount: &FirnMount<'_>) {
    wait_until("nothing is held for pullers", LIMIT, || {
        let status = mount.status();
        (status.chunk_lists, status.chunk_list_bytes) == (0, 0)
    });
}

/// Pulls a file again and again while a writer goes through it: each copy is the file at one moment, though before every
/// second pull a part of it went to the backing and is nowhere else. `extra` are the options of a round. The agent runs.
#[track_caller]
pub fn pull_while_written<'a>(
    sandbox: &Sandbox,
    mount: &FirnMount<'_>,
    blocks: usize,
    rounds: usize,
    extra: impl Fn(usize) -> Vec<&'a str>,
) {
    let path = mount.join("rank0");
    let file = open_rw(&path);
    let write = |version: u8| {
        for block in 0..blocks {
            let at = (block * CHANGED_BLOCK_BYTES) as u64;
            file.write_all_at(&[version; CHANGED_BLOCK_BYTES], at)
                .expect("write");
        }
    };
    write(1);
    let stop = AtomicBool::new(false);
    let target = sandbox.join("copy");
    let mut changed = 0;
    let mut gave_up = 0;
    std::thread::scope(|scope| {
        let ended = StopAtEnd(&stop);
        let writer = scope.spawn(|| {
            let mut version = 1_u8;
            while !stop.load(Ordering::Acquire) {
                version = version.wrapping_add(1);
                write(version);
            }
        });
        for round in 0..rounds {
            if round % 2 == 1 {
                sandbox.run(["drain".as_ref(), path.as_os_str()]).ok();
            }
            let extra = [vec!["--cut"], extra(round)].concat();
            let told = pull(sandbox, mount.backing(), &path, &target, &extra);
            match told.code {
                0 => {}
                3 => changed += 1,
                1 => {
                    told.says("changed during each of 5 reads");
                    gave_up += 1;
                    assert!(!target.exists());
                    continue;
                }
                _ => panic!("{told}"),
            }
            assert_one_moment(&read(&target));
            fs::remove_file(&target).expect("remove the copy");
        }
        drop(ended);
        writer.join().expect("the writer");
    });
    println!("changed in {changed}, given up {gave_up} of {rounds}");
    assert!(changed + gave_up > 0, "the writer met no pull");
    assert_nothing_held(mount);
}

/// The writer goes through the file from its start: at one moment a version is in front of the one before, and where
/// they meet at most one block has both.
#[track_caller]
fn assert_one_moment(copy: &[u8]) {
    let block = CHANGED_BLOCK_BYTES;
    let versions: Vec<u8> = copy.chunks(block).map(|block| block[0]).collect();
    let newest = versions[0];
    let end = versions
        .iter()
        .position(|version| *version != newest)
        .unwrap_or(versions.len());
    let before = newest.wrapping_sub(1);
    assert!(
        versions[end..].iter().all(|version| *version == before),
        "several moments: {versions:?}"
    );
    let mixed = copy
        .chunks(block)
        .filter(|block| block.iter().any(|byte| *byte != block[0]));
    assert!(mixed.count() <= 1, "blocks of several moments");
}

/// An authenticated connection by hand.
pub fn connect(backing: &Path) -> Link<Stream> {
    let file = KeyFile::load(backing, HOST).expect("the key file");
    let socket = TcpStream::connect(&file.address).expect("connect");
    greet(socket, &file)
}

/// Shows the key of an agent on a connection to it.
pub fn greet(socket: TcpStream, file: &KeyFile) -> Link<Stream> {
    let terms = HandshakeInputs::of_tcp(&socket, &file.key, Encrypt::Auto).expect("its addresses");
    let mut link = Link::over(Stream::over_tcp(socket).expect("a stream"));
    begin_handshake(&mut link, &terms, Instant::now() + LIMIT).expect("the key");
    link
}

/// The answer to a request.
pub fn ask(link: &mut Link<Stream>, request: &Request) -> Reply {
    let until = Instant::now() + LIMIT;
    link.send(request, until).expect("ask");
    link.receive(1 << 20, until).expect("an answer")
}

/// Lists the mount, which comes before all else.
pub fn list_all(link: &mut Link<Stream>) {
    let mut reply = ask(link, &Request::List { path: "".into() });
    while matches!(reply, Reply::Entries { .. }) {
        let until = Instant::now() + LIMIT;
        reply = link.receive(1 << 20, until).expect("an answer");
    }
    assert!(matches!(reply, Reply::Listed { .. }), "{reply:?}");
}

/// A process with the key of an agent, which answers as a test wants, until the value ends.
pub struct FakeAgent {
    address: SocketAddr,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Answers a request on a connection; an error ends it.
pub type Answer = dyn Fn(&mut Link<Stream>, Request) -> Result<(), WireError> + Send + Sync;

impl FakeAgent {
    /// Leaves its address and a key in the backing, as the agent of `host`.
    #[track_caller]
    pub fn start(
        backing: &Path,
        host: &str,
        answer: impl Fn(&mut Link<Stream>, Request) -> Result<(), WireError> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let address = listener.local_addr().expect("an address");
        let file = KeyFile {
            address: address.to_string(),
            key: Key::random().expect("random"),
            partner: None,
            formers: Vec::new(),
        };
        file.store(backing, host).expect("a key file");
        let over = Arc::<AtomicBool>::default();
        let answer: Arc<Answer> = Arc::new(answer);
        let thread = std::thread::spawn({
            let over = Arc::clone(&over);
            move || {
                for socket in listener.incoming() {
                    if over.load(Ordering::Acquire) {
                        return;
                    }
                    let socket = socket.expect("a puller");
                    let key = file.key.clone();
                    let answer = Arc::clone(&answer);
                    std::thread::spawn(move || serve_fake(socket, &key, &*answer));
                }
            }
        });
        Self {
            address,
            over,
            thread: Some(thread),
        }
    }
}

/// Until the puller hangs up.
fn serve_fake(socket: TcpStream, key: &Key, answer: &Answer) {
    let until = Instant::now() + LIMIT;
    let terms = HandshakeInputs::of_tcp(&socket, key, Encrypt::Auto).expect("its addresses");
    let mut link = Link::over(Stream::over_tcp(socket).expect("a stream"));
    if answer_handshake(&mut link, &terms, until).is_err() {
        return;
    }
    while let Ok(request) = link.receive(1 << 16, Instant::now() + LIMIT) {
        if answer(&mut link, request).is_err() {
            return;
        }
    }
}

impl Drop for FakeAgent {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sends replies.
pub fn say(link: &mut Link<Stream>, replies: &[Reply]) -> Result<(), WireError> {
    let until = Instant::now() + LIMIT;
    replies.iter().try_for_each(|reply| link.send(reply, until))
}
