//! `firn agent` and `firn pull` by libfabric: Debian's own, with its providers over TCP and shared memory. What hardware
//! does is not tested here.
//!
//! `FIRN_AGENT_ROUNDS` sets the rounds of kills.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use firn_agent::message::{
    BLOCK_BYTES, Entry, EntryKind, Exposed, ExposedRegion, Reply, Request, STAGING_BUFFERS,
};
use firn_agent::ofi::{Buffer, Endpoint, Pool, Region, RemoteRegion};
use firn_agent::{
    BlockMac, Encrypt, HandshakeInputs, Key, KeyFile, Link, Stream, answer_handshake,
};
use firn_format::record::Ending;
use firn_tests::agent::{
    Agent, HOST, ask, assert_nothing_held, connect, list_all, pull, pull_command,
    pull_while_written, shared_memory_of, staging_of, write_tree,
};
use firn_tests::command::{Outcome, run, wait_child, wait_until, write_program};
use firn_tests::fsops::{assert_same_bytes, open_rw, read};
use firn_tests::random::{bytes, env_count, generator};
use firn_tests::sandbox::{firn_binary, kill};
use firn_tests::stop::StopAtEnd;
use firn_tests::tree::{assert_same, snapshot};
use firn_tests::{FirnMount, Sandbox, seed};
use rand::RngExt;

const MIB: usize = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);
const DEMAND: &str = "arena-size=96M,chunk-size=1M,drain=demand,passthrough=off";
const RXM: &str = "tcp;ofi_rxm";
const BY_RXM: [&str; 2] = ["--transport", "ofi:tcp;ofi_rxm"];

/// Bytes in memory, spill file, backing and holes; with checksums and without; by each provider.
#[test]
fn a_tree_is_read_bit_for_bit_wherever_its_bytes_are() {
    let sandbox = Sandbox::new("ofi-tree");
    let local = sandbox.mkdir("local");
    let options = format!(
        "arena-size=24M,chunk-size=1M,drain=demand,passthrough=off,spill={},spill-size=96M",
        local.display()
    );
    let mount = FirnMount::new(&sandbox, &options);
    let top = write_tree(&mount, &sandbox);
    // Pieces that are too small for a read of their own.
    let small = open_rw(&top.join("small"));
    for at in (0..300).rev() {
        small
            .write_all_at(&bytes(at, 5000), at * 9000)
            .expect("write");
    }
    drop(small);
    let agent = Agent::start(&sandbox, mount.path(), &["--verbose"]);
    let expected = snapshot(&top);
    let cases = [
        ("ofi:tcp", "yes", "ofi:tcp;ofi_rxm"),
        ("ofi:tcp;ofi_rxm", "no", "ofi:tcp;ofi_rxm"),
        ("ofi:shm", "yes", "ofi:shm"),
        ("auto", "yes", "tcp"),
    ];
    for (at, (transport, verify, found)) in cases.into_iter().enumerate() {
        let target = sandbox.join(format!("copy{at}"));
        let extra = ["--json", "--transport", transport, "--verify", verify];
        let told = pull(&sandbox, mount.backing(), &top, &target, &extra).ok();
        let told = told.json();
        assert_eq!(told["transport"], found, "{told}");
        assert_eq!(told["reconnects"], 0, "{told}");
        assert!(
            told["received_bytes"].as_u64() < told["bytes"].as_u64(),
            "holes are not sent: {told}"
        );
        assert_same(transport, &snapshot(&target), &expected);
        assert!(!staging_of(&target).exists());
        assert_nothing_held(&mount);
    }
    let log = agent.log();
    for step in [
        "(1)",
        "(2) mapped",
        "(2) registered",
        "(4)",
        "(5) sent the addresses",
        "(6)",
        "(7)",
        "(9)",
    ] {
        assert!(log.contains(step), "no step {step}: {log}");
    }
    let pid = agent.pid();
    agent.kill();
    let left = shared_memory_of(pid);
    assert!(left.is_empty(), "a killed agent leaves {left:?}");
}

/// What is there is compared and not read again; a block that is damaged is.
#[test]
fn a_pull_that_was_interrupted_goes_on() {
    let sandbox = Sandbox::new("ofi-resume");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let path = mount.join("rank0");
    let data = bytes(1, 30 * MIB + 5);
    fs::write(&path, &data).expect("write");
    let _agent = Agent::start(&sandbox, mount.path(), &[]);
    let target = sandbox.join("copy");
    fs::create_dir(staging_of(&target)).expect("mkdir");
    fs::set_permissions(staging_of(&target), PermissionsExt::from_mode(0o700)).expect("chmod");
    let mut half = data[..12 * MIB].to_vec();
    half[9 * MIB] ^= 1;
    fs::write(staging_of(&target).join("tree"), &half).expect("write");
    let extra = [&["--json"][..], &BY_RXM].concat();
    let told = pull(&sandbox, mount.backing(), &path, &target, &extra).ok();
    assert_same_bytes("the copy", &read(&target), &data);
    let told = told.json();
    assert_eq!(told["reused_bytes"], 11 * MIB, "{told}");
    assert_eq!(told["received_bytes"], 19 * MIB + 5, "{told}");
}

/// Each copy is the file at one moment, though the writer goes on and a part of it is in the backing only.
#[test]
fn a_file_that_changes_is_read_as_it_was_at_one_moment() {
    let sandbox = Sandbox::new("ofi-change");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let _agent = Agent::start(&sandbox, mount.path(), &[]);
    pull_while_written(&sandbox, &mount, 128, 10, |round| {
        let verify = if round % 3 == 0 { "no" } else { "yes" };
        [&["--verify", verify][..], &BY_RXM].concat()
    });
}

/// kill -9 of the agent or the puller at a random moment of the reads.
#[test]
fn whatever_is_killed_while_it_reads_a_copy_is_whole_or_not_there() {
    let rounds = env_count("FIRN_AGENT_ROUNDS", 10);
    let mut generator = generator(seed("ofi-kills"));
    let sandbox = Sandbox::new("ofi-kills");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let top = mount.join("step_1");
    fs::create_dir(&top).expect("mkdir");
    for rank in 0..4 {
        fs::write(top.join(format!("rank{rank}")), bytes(rank, 9 * MIB + 777)).expect("write");
    }
    let expected = snapshot(&top);
    let backing = mount.backing().to_owned();
    let mut agent = Agent::start(&sandbox, mount.path(), &[]);
    let extra = [&["--json"][..], &BY_RXM].concat();
    let mut took = Duration::from_millis(500);
    for round in 0..rounds {
        let target = sandbox.join(format!("copy{round}"));
        let begun = Instant::now();
        let mut puller = pull_command(&sandbox, &backing, &top, &target, &extra)
            .stdout(Stdio::null())
            .stderr(fs::File::create(sandbox.join("puller.log")).expect("a log"))
            .spawn()
            .expect("start the puller");
        std::thread::sleep(took.mul_f64(generator.random_range(0.0..1.1)));
        let is_agent = generator.random();
        if is_agent {
            agent.kill();
            agent = Agent::start(&sandbox, mount.path(), &[]);
        } else {
            kill(puller.id(), libc::SIGKILL);
        }
        let code = wait_child(&mut puller, LIMIT)
            .expect("the puller ends")
            .code();
        println!("round {round}: agent {is_agent}, the puller ended with {code:?}");
        let told = fs::read_to_string(sandbox.join("puller.log")).expect("a log");
        match code {
            Some(0) => took = begun.elapsed().min(Duration::from_secs(1)),
            // It had not connected yet, or was killed.
            Some(1) if is_agent => assert!(told.contains("the agent on n1"), "{told}"),
            None if !is_agent => {}
            _ => panic!("{code:?}: {told}"),
        }
        if code != Some(0) && !target.exists() {
            pull(&sandbox, &backing, &top, &target, &extra).ok();
        }
        assert_same("the copy", &snapshot(&target), &expected);
        assert_nothing_held(&mount);
        fs::remove_dir_all(&target).expect("remove the copy");
        let _ = fs::remove_dir_all(staging_of(&target));
    }
}

/// A `libfabric.so.1` that no loader takes, in a directory of its own.
fn broken_library(sandbox: &Sandbox) -> PathBuf {
    let dir = sandbox.mkdir("lib");
    fs::write(dir.join("libfabric.so.1"), b"no library").expect("write");
    dir
}

/// Proves S-agent-15: `auto` needs no libfabric.
#[test]
fn a_host_without_libfabric_is_told_and_auto_needs_none() {
    let sandbox = Sandbox::new("ofi-none");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let path = mount.join("rank0");
    let data = bytes(4, 3 * MIB + 17);
    fs::write(&path, &data).expect("write");
    let backing = mount.backing();
    let agent = Agent::start(&sandbox, mount.path(), &[]);
    let broken = broken_library(&sandbox);
    let target = sandbox.join("copy");
    // The puller has none.
    let without = |extra: &[&str]| {
        let mut command = pull_command(&sandbox, backing, &path, &target, extra);
        run(command.env("LD_LIBRARY_PATH", &broken))
    };
    without(&BY_RXM)
        .code(1)
        .says("libfabric.so.1 cannot be loaded")
        .says("libfabric1");
    assert!(!target.exists());
    without(&["--transport", "auto"]).ok();
    assert_same_bytes("without libfabric", &read(&target), &data);
    fs::remove_file(&target).expect("remove");
    // No such provider here.
    let unknown = pull(
        &sandbox,
        backing,
        &path,
        &target,
        &["--transport", "ofi:nonesuch"],
    );
    unknown
        .code(1)
        .says("no provider nonesuch")
        .says("tcp;ofi_rxm");
    // The agent has none: over ssh, where its environment is ours to choose.
    let ssh = sandbox.join("ssh");
    let script = format!(
        "#!/bin/sh\nshift 2\nexec env LD_LIBRARY_PATH='{}' \"$@\"\n",
        broken.display()
    );
    write_program(&ssh, &script);
    let by_ssh = |extra: &[&str]| {
        let mut command = sandbox.firn(["pull", "--ssh"]);
        command.arg(&ssh).arg("--remote-firn").arg(firn_binary());
        command.args(extra).arg(format!("n1:{}", path.display()));
        run(command.arg(&target))
    };
    by_ssh(&BY_RXM)
        .code(1)
        .says("n1: libfabric.so.1 cannot be loaded");
    by_ssh(&[]).ok();
    assert_same_bytes("over ssh", &read(&target), &data);
    fs::remove_file(&target).expect("remove");
    assert!(agent.end() == Some(0));
    // An agent that is to serve by its connections only, or by what is not there.
    let agent = Agent::start(&sandbox, mount.path(), &["--transport", "tcp"]);
    pull(&sandbox, backing, &path, &target, &BY_RXM)
        .code(1)
        .says("over its connections only");
    drop(agent);
    let agent = Agent::start(&sandbox, mount.path(), &["--transport", "ofi:shm"]);
    pull(&sandbox, backing, &path, &target, &BY_RXM)
        .code(1)
        .says("no provider of libfabric in common");
    pull(
        &sandbox,
        backing,
        &path,
        &target,
        &["--transport", "ofi:shm"],
    )
    .ok();
    // It is killed while it still has the memory that it shared with the puller.
    let pid = agent.pid();
    drop(agent);
    let left = shared_memory_of(pid);
    assert!(left.is_empty(), "a killed agent leaves {left:?}");
    // What must stay secret is not for libfabric.
    let agent = Agent::start(&sandbox, mount.path(), &["--encrypt", "yes"]);
    pull(&sandbox, backing, &path, &sandbox.join("x"), &BY_RXM)
        .code(1)
        .says("libfabric encrypts nothing");
    drop(agent);
    let never = |both: &[&str]| {
        let told = pull(&sandbox, backing, &path, &sandbox.join("x"), both);
        told.code(2).says("libfabric encrypts nothing");
    };
    never(&["--transport", "ofi", "--encrypt", "yes"]);
    let start = |args: &[&str]| run(sandbox.firn(["agent"]).args(args).arg(mount.path()));
    start(&["--transport", "ofi:nonesuch"])
        .code(1)
        .says("no provider nonesuch");
    start(&["--transport", "ofi:shm", "--encrypt", "yes"])
        .code(2)
        .says("libfabric encrypts nothing");
    start(&["--transport", "verbs"])
        .code(2)
        .says("ofi:PROVIDER");
    assert_nothing_held(&mount);
}

// ---- agents that lie -----------------------------------------------------------------------------

/// An agent that answers as it likes: one file of these bytes, exposed by libfabric.
struct FakeAgent {
    key: Key,
    data: Vec<u8>,
    lie: Lie,
    listener: TcpListener,
    exposed: Exposed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lie {
    None,
    RegionWithoutEnd,
    LongAddress,
    NoAddress,
    GarbageAddress,
    OtherProvider,
    WrongKey,
    LongRegion,
    PastRegion,
    PastAllAddresses,
    MoreThanAsked,
    EndsTooEarly,
    WrongMac,
    NoMac,
    Crumbs,
}

const LIES: [(Lie, &str); 14] = [
    (Lie::RegionWithoutEnd, "sent an impossible answer"),
    (Lie::LongAddress, "sent an impossible answer"),
    (Lie::NoAddress, "sent an impossible answer"),
    (Lie::GarbageAddress, "by libfabric"),
    (Lie::OtherProvider, "no provider nonesuch"),
    (Lie::WrongKey, "by libfabric"),
    (Lie::LongRegion, "by libfabric"),
    (Lie::PastRegion, "sent an impossible answer"),
    (Lie::PastAllAddresses, "sent an impossible answer"),
    (Lie::MoreThanAsked, "sent an impossible answer"),
    (Lie::EndsTooEarly, "was cut while it was read"),
    (Lie::WrongMac, "arrived damaged 5 times"),
    (Lie::NoMac, "sent an impossible answer"),
    (Lie::Crumbs, "sent an impossible answer"),
];

impl FakeAgent {
    /// Until the value `stop`.
    fn serve(&self, stop: &AtomicBool) {
        self.listener.set_nonblocking(true).expect("non-blocking");
        while !stop.load(Ordering::Relaxed) {
            match self.listener.accept() {
                Ok((socket, _)) => {
                    let until = Instant::now() + LIMIT;
                    let terms = HandshakeInputs::of_tcp(&socket, &self.key, Encrypt::No);
                    let mut link = Link::over(Stream::over_tcp(socket).expect("a stream"));
                    let terms = terms.expect("its addresses");
                    answer_handshake(&mut link, &terms, until).expect("a puller");
                    // Until the puller hangs up.
                    while let Ok(request) = link.receive(1 << 16, until) {
                        let replies = self.answer(&link, request);
                        if replies.iter().any(|reply| link.send(reply, until).is_err()) {
                            break;
                        }
                    }
                }
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    fn answer(&self, link: &Link<Stream>, request: Request) -> Vec<Reply> {
        let bytes = self.data.len() as u64;
        match request {
            Request::List { .. } => {
                let kind = EntryKind::File {
                    bytes,
                    ending: Ending::Closed,
                };
                let entry = Entry {
                    path: "".into(),
                    kind,
                    mode: 0o600,
                    mtime_s: 0,
                    mtime_ns: 0,
                    held: None,
                };
                let entries = vec![entry];
                let path = "file".into();
                vec![Reply::Entries { entries }, Reply::Listed { path }]
            }
            Request::Expose { .. } => vec![Reply::Exposed(self.expose())],
            Request::Open { .. } => vec![Reply::Opened {
                bytes,
                changes: None,
            }],
            Request::Place { offset, bytes, .. } => self.place(link, offset, bytes),
            Request::Check { .. } => vec![Reply::Checked {
                changed: false,
                snapshot: true,
            }],
            Request::Release { .. } => vec![Reply::Done],
            other => panic!("{other:?} of a puller that reads by itself"),
        }
    }

    fn expose(&self) -> Exposed {
        let mut exposed = self.exposed.clone();
        match self.lie {
            Lie::RegionWithoutEnd => exposed.arena.base = u64::MAX - 5,
            Lie::LongAddress => exposed.address = vec![1; 4096],
            Lie::NoAddress => exposed.address.clear(),
            Lie::GarbageAddress => exposed.address = vec![0xff; 16],
            Lie::OtherProvider => exposed.provider = "nonesuch".into(),
            Lie::WrongKey => exposed.arena.key ^= 1,
            Lie::LongRegion => exposed.arena.bytes = 1 << 40,
            _ => {}
        }
        exposed
    }

    fn place(&self, link: &Link<Stream>, offset: u64, bytes: u64) -> Vec<Reply> {
        let range = offset as usize..(offset + bytes) as usize;
        let mut mac = Some(mac_of(link, &self.data[range]));
        let mut at = offset;
        let mut told = bytes;
        match self.lie {
            Lie::LongRegion => at = 1 << 39,
            Lie::PastRegion => at = self.exposed.arena.bytes - bytes + 1,
            Lie::PastAllAddresses => at = u64::MAX - 1,
            Lie::MoreThanAsked => told += 1,
            Lie::EndsTooEarly => told -= 1,
            Lie::WrongMac => mac = Some(mac_of(link, b"other bytes")),
            Lie::NoMac => mac = None,
            _ => {}
        }
        if self.lie == Lie::Crumbs {
            let crumb = |at| Reply::InMemory { at, bytes: 1 };
            return (offset..offset + bytes).map(crumb).collect();
        }
        let bytes = told;
        vec![Reply::InMemory { at, bytes }, Reply::Placed { mac }]
    }
}

/// What authenticates bytes of an agent on this connection.
fn mac_of(link: &Link<Stream>, bytes: &[u8]) -> BlockMac {
    let mut hasher = link.block_hasher().expect("they are not encrypted");
    hasher.update(bytes);
    hasher.finish()
}

fn exposed_region(region: Region) -> ExposedRegion {
    let Region { key, base, bytes } = region;
    ExposedRegion { key, base, bytes }
}

/// Memory of this process with these bytes, and an endpoint that exposes it.
fn expose(data: &[u8]) -> (Endpoint, Exposed, Vec<Buffer>) {
    let mut buffers =
        Pool::create(data.len().div_ceil(MIB), MIB).expect("memory for what is exposed");
    for (buffer, bytes) in buffers.iter_mut().zip(data.chunks(MIB)) {
        buffer[..bytes.len()].copy_from_slice(bytes);
    }
    let mut endpoint = Endpoint::open(RXM, Some([127, 0, 0, 1].into())).expect("an endpoint");
    let pool = Arc::clone(buffers[0].pool());
    let region = endpoint.expose(pool, 0x0123_4567_89ab).expect("a region");
    let region = exposed_region(region);
    let exposed = Exposed {
        provider: RXM.into(),
        address: endpoint.address().expect("an address"),
        arena: region,
        staging: region,
    };
    (endpoint, exposed, buffers)
}

/// Proves S-agent-15. Whatever an agent says of its memory, nothing that is wrong gets a name, and nothing is read past
/// the bounds of a buffer of the puller.
#[test]
fn an_agent_that_lies_about_its_memory_is_not_believed() {
    let sandbox = Sandbox::new("ofi-liar");
    let backing = sandbox.mkdir("backing");
    let data = bytes(7, 3 * MIB + 100);
    let honest = (Lie::None, "3.0 MiB");
    for (lie, says) in LIES.into_iter().chain([honest]) {
        println!("{lie:?}");
        let (mut endpoint, exposed, buffers) = expose(&data);
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let file = KeyFile {
            address: listener.local_addr().expect("an address").to_string(),
            key: Key::random().expect("random"),
            partner: None,
            formers: Vec::new(),
        };
        file.store(&backing, HOST).expect("a key file");
        let agent = FakeAgent {
            key: file.key,
            data: data.clone(),
            lie,
            listener,
            exposed,
        };
        let stop = AtomicBool::new(false);
        let target = sandbox.join("copy");
        std::thread::scope(|scope| {
            scope.spawn(|| agent.serve(&stop));
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    endpoint.progress(Duration::from_millis(10));
                }
            });
            let ended = StopAtEnd(&stop);
            let extra = [&["--patience", "500ms"][..], &BY_RXM].concat();
            let told = pull(&sandbox, &backing, Path::new("/file"), &target, &extra);
            drop(ended);
            let code = if lie == Lie::None { 0 } else { 1 };
            told.code(code).says(says);
        });
        drop(buffers);
        assert_eq!(target.exists(), lie == Lie::None);
        let _ = fs::remove_dir_all(staging_of(&target));
    }
    assert_same_bytes("of an honest one", &read(&sandbox.join("copy")), &data);
}

/// Proves S-agent-15. What a puller may read ends with its connection; keys that are wrong, reads past the region and
/// staging buffers that are none cost the agent nothing; and few are served at once.
#[test]
fn a_puller_reads_what_is_exposed_to_it_and_no_longer_than_its_connection() {
    let sandbox = Sandbox::new("ofi-rights");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let data = bytes(5, 8 * MIB);
    fs::write(mount.join("rank0"), &data).expect("write");
    let agent = Agent::start(&sandbox, mount.path(), &[]);
    let request = Request::Expose {
        providers: vec!["verbs".into(), RXM.into()],
        sums: true,
    };
    let place = |file, buffer| Request::Place {
        file,
        offset: 0,
        bytes: BLOCK_BYTES,
        buffer,
    };
    let mut link = connect(mount.backing());
    let early = ask(&mut link, &request);
    assert!(matches!(early, Reply::Error { .. }), "{early:?}");
    list_all(&mut link);
    let path = "rank0".into();
    let opened = ask(&mut link, &Request::Open { file: 1, path });
    assert!(
        matches!(opened, Reply::Opened { bytes, .. } if bytes == 8 << 20),
        "{opened:?}"
    );
    let unexposed = ask(&mut link, &place(1, 0));
    assert!(matches!(unexposed, Reply::Error { .. }), "{unexposed:?}");
    let descriptors = agent.descriptors();
    let Reply::Exposed(exposed) = ask(&mut link, &request) else {
        panic!("it was not exposed");
    };
    for buffer in [STAGING_BUFFERS as u32, u32::MAX] {
        let refused = ask(&mut link, &place(1, buffer));
        assert!(matches!(refused, Reply::Error { .. }), "{refused:?}");
    }
    let Reply::InMemory { at, bytes } = ask(&mut link, &place(1, 0)) else {
        panic!("it is in memory");
    };
    assert_eq!(bytes, BLOCK_BYTES);
    let end: Reply = link
        .receive(1 << 16, Instant::now() + LIMIT)
        .expect("an end");
    let mac = Some(mac_of(&link, &data[..MIB]));
    assert_eq!(end, Reply::Placed { mac });
    // Wrong keys, and bytes past the end.
    let wrong = |change: &dyn Fn(&mut ExposedRegion)| {
        let mut arena = exposed.arena;
        change(&mut arena);
        read_once(&exposed, arena, at)
    };
    assert_eq!(wrong(&|_| {}).expect("the right key"), data[..MIB]);
    assert!(wrong(&|arena| arena.key ^= 1).is_err());
    assert!(wrong(&|arena| arena.base = arena.base.wrapping_add(arena.bytes - 100)).is_err());
    assert_eq!(
        wrong(&|_| {}).expect("the agent is not impressed"),
        data[..MIB]
    );
    // Few at once.
    let mut others: Vec<_> = (0..3)
        .map(|_| {
            let mut other = connect(mount.backing());
            list_all(&mut other);
            let reply = ask(&mut other, &request);
            assert!(matches!(reply, Reply::Exposed(_)), "{reply:?}");
            other
        })
        .collect();
    let target = sandbox.join("copy");
    let path = mount.join("rank0");
    pull(&sandbox, mount.backing(), &path, &target, &BY_RXM)
        .code(1)
        .says("already serves 4 pullers by libfabric");
    pull(&sandbox, mount.backing(), &path, &target, &[]).ok();
    fs::remove_file(&target).expect("remove");
    others.clear();
    drop(link);
    assert_nothing_held(&mount);
    wait_until("what libfabric opened is closed", LIMIT, || {
        agent.descriptors() <= descriptors
    });
    assert!(wrong(&|_| {}).is_err(), "the right outlived its connection");
    let told: Outcome = pull(&sandbox, mount.backing(), &path, &target, &BY_RXM);
    told.ok();
    assert_same_bytes("after all that", &read(&target), &data);
}

/// A MiB from `at` of a region, by an endpoint of its own.
fn read_once(exposed: &Exposed, region: ExposedRegion, at: u64) -> Result<Vec<u8>, String> {
    let ExposedRegion { key, base, bytes } = region;
    let region = Region { key, base, bytes };
    let read = || {
        let region = RemoteRegion::check(&region)?;
        let mut endpoint = Endpoint::open(&exposed.provider, Some([127, 0, 0, 1].into()))?;
        endpoint.connect(&exposed.address)?;
        let buffer = Pool::create(1, MIB).expect("memory").pop().expect("one");
        endpoint.prepare(buffer.pool())?;
        endpoint.land(1, buffer, vec![region.read(at, 0..MIB)?])?;
        let landed = endpoint.poll(Duration::from_secs(20), Duration::from_secs(5))?;
        Ok(landed.map(|landed| landed.buffer.to_vec()))
    };
    let read: Result<Option<Vec<u8>>, firn_agent::ofi::OfiError> = read();
    let bytes = read.map_err(|error| error.to_string())?;
    bytes.ok_or_else(|| "nothing came".into())
}
