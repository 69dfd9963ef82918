//! `firn agent` and `firn pull`: checkpoints that leave a host without their writer.
//!
//! `FIRN_AGENT_ROUNDS` sets the rounds of kills, `FIRN_AGENT_REQUESTS` the requests of one puller.

use std::collections::VecDeque;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use firn_agent::message::{Reply, Request};
use firn_agent::{Key, KeyFile, Link, Stream};
use firn_testfs::namespace::Namespace;
use firn_tests::agent::{
    Agent, HOST, ask, assert_nothing_held, connect, enter, greet, list_all, pull, pull_command,
    pull_while_written, staging_of, write_tree,
};
use firn_tests::command::{run, wait_child, wait_until, write_program};
use firn_tests::fsops::{assert_same_bytes, open_rw, read};
use firn_tests::powerfs::PowerFs;
use firn_tests::random::{bytes, env_count, generator};
use firn_tests::sandbox::{firn_binary, kill, unmount_lazily};
use firn_tests::stop::StopAtEnd;
use firn_tests::tree::{assert_same, snapshot};
use firn_tests::{FirnMount, Sandbox, seed};
use rand::RngExt;

const MIB: usize = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);
/// Nothing drains unasked, and nothing passes firnd by.
const DEMAND: &str = "arena-size=96M,chunk-size=1M,drain=demand,passthrough=off";

/// Proves S-agent-1, S-agent-3.
#[test]
fn a_tree_is_pulled_bit_for_bit_wherever_its_bytes_are() {
    let sandbox = Sandbox::new("agent-tree");
    let local = sandbox.mkdir("local");
    let options = format!(
        "arena-size=24M,chunk-size=1M,drain=demand,passthrough=off,spill={},spill-size=96M",
        local.display()
    );
    let mount = FirnMount::new(&sandbox, &options);
    let top = write_tree(&mount, &sandbox);
    let agent = Agent::start(&sandbox, mount.path(), &[]);
    let target = sandbox.join("copy");
    let told = pull(&sandbox, mount.backing(), &top, &target, &["--json"]).ok();
    assert_same("the copy", &snapshot(&target), &snapshot(&top));
    let told = told.json();
    assert_eq!(told["files"], 8, "{told}");
    assert_eq!(told["reconnects"], 0, "{told}");
    assert!(
        told["received_bytes"].as_u64() < told["bytes"].as_u64(),
        "holes are not sent: {told}"
    );
    assert!(!staging_of(&target).exists());
    assert_nothing_held(&mount);
    // A file alone, and into a directory.
    let into = sandbox.mkdir("into");
    let slash = PathBuf::from(format!("{}/", into.display()));
    let one = top.join("a/rank3");
    pull(&sandbox, mount.backing(), &one, &slash, &[]).ok();
    assert_same_bytes("one file", &read(&into.join("rank3")), &read(&one));
    assert_eq!(agent.end(), Some(0));
    assert!(!mount.backing().join(".firn/agent-n1").exists());
}

/// Proves S-agent-1.
#[test]
fn a_stub_tree_is_pulled_as_well() {
    let sandbox = Sandbox::new("agent-stubs");
    let mount = FirnMount::new(&sandbox, &format!("{DEMAND},frontend=preload"));
    let data = bytes(9, 3 * MIB + 1);
    let from = sandbox.join("data");
    fs::write(&from, &data).expect("write");
    let mut copy = Command::new("cp");
    copy.arg(&from).arg(mount.join("rank0"));
    firn_tests::preloaded::Frontend::Tree.preload(&sandbox, &mut copy);
    run(&mut copy).ok();
    let _agent = Agent::start(&sandbox, mount.path(), &[]);
    let target = sandbox.join("copy");
    pull(&sandbox, mount.backing(), mount.path(), &target, &[]).ok();
    assert_same_bytes("of a stub tree", &read(&target.join("rank0")), &data);
}

/// Proves S-agent-1: hosts with networks of their own.
#[test]
fn a_host_pulls_from_another_one() {
    let sandbox = Sandbox::new("agent-hosts");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let data = bytes(3, 20 * MIB);
    fs::write(mount.join("rank0"), &data).expect("write");
    let mut guards = Vec::new();
    let namespace = Namespace::create(&mut guards).expect("a network namespace");
    let link = namespace.connect(&mut guards).expect("a link to it");
    namespace.add_address(&link, 2).expect("an address");
    let listen = format!("{}:0", link.address(1));
    let agent = Agent::start(&sandbox, mount.path(), &["--listen", &listen]);
    let path = mount.join("rank0");
    let target = sandbox.join("copy");
    let puller = pull_command(&sandbox, mount.backing(), &path, &target, &[]);
    run(&mut enter(&namespace, &puller)).ok();
    assert_same_bytes("from another host", &read(&target), &data);
    let log = agent.log();
    assert!(log.contains(&link.address(2)), "not from there: {log}");
    agent.kill();
    let unreachable = pull_command(&sandbox, mount.backing(), &path, &sandbox.join("none"), &[]);
    run(&mut enter(&namespace, &unreachable))
        .code(1)
        .says("cannot be reached");
}

/// Proves S-agent-8.
#[test]
fn without_a_key_the_agent_is_started_by_ssh() {
    let sandbox = Sandbox::new("agent-ssh");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let data = bytes(4, 9 * MIB + 17);
    fs::write(mount.join("rank0"), &data).expect("write");
    // What ssh does, without a network: `ssh [options] -- HOST COMMAND…`.
    let ssh = sandbox.join("ssh");
    write_program(
        &ssh,
        "#!/bin/sh\n[ \"$2\" = n1 ] || exit 255\nshift 2\nexec \"$@\"\n",
    );
    let by_ssh = |args: &[&str]| {
        let mut command = sandbox.firn(["pull", "--ssh"]);
        command.arg(&ssh).arg("--remote-firn").arg(firn_binary());
        run(command.args(args))
    };
    let source = format!("n1:{}", mount.join("rank0").display());
    let target = sandbox.join("copy");
    by_ssh(&[&source, target.to_str().expect("utf-8")]).ok();
    assert_same_bytes("over pipes", &read(&target), &data);
    let listed = by_ssh(&[
        "--list",
        "--json",
        &format!("n1:{}", mount.path().display()),
    ])
    .ok();
    assert_eq!(listed.json()[0]["name"], "rank0");
    let other = sandbox.join("other");
    by_ssh(&[
        &source.replace("n1:", "n2:"),
        other.to_str().expect("utf-8"),
    ])
    .code(1)
    .says("connection was closed");
    assert_nothing_held(&mount);
    run(sandbox.firn(["agent", "--stdio"]).arg("x")).code(2);
    run(&mut sandbox.firn(["agent", "--stdio"])).code(1);
}

/// Proves S-agent-2: each copy is the file at one moment, though a part of it is in the backing only.
#[test]
fn a_file_that_changes_is_pulled_as_it_was_at_one_moment() {
    let sandbox = Sandbox::new("agent-change");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let _agent = Agent::start(&sandbox, mount.path(), &[]);
    pull_while_written(&sandbox, &mount, 256, 20, |_| Vec::new());
}

/// Proves S-agent-4.
#[test]
fn what_its_writer_did_not_close_is_refused_unless_asked_for() {
    let sandbox = Sandbox::new("agent-cut");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let top = mount.join("step_1");
    fs::create_dir(&top).expect("mkdir");
    fs::write(top.join("whole"), bytes(1, MIB)).expect("write");
    let cut = open_rw(&top.join("cut"));
    cut.write_all_at(&bytes(2, 2 * MIB), 0).expect("write");
    let backing = mount.backing().to_owned();
    let target = sandbox.join("copy");
    let agent = Agent::start(&sandbox, mount.path(), &[]);
    let refused = pull(&sandbox, &backing, &top, &target, &[]).code(1);
    refused.says("cut is still open for writing");
    agent.kill();
    mount.kill();
    drop(cut);
    let mount = FirnMount::new(&sandbox, DEMAND);
    let agent = Agent::start(&sandbox, mount.path(), &[]);
    let refused = pull(&sandbox, &backing, &top, &target, &[]).code(1);
    refused.says("cut was cut off").says("--cut pulls it");
    assert!(!target.exists());
    let listed = sandbox
        .run([
            "pull",
            "--json",
            "--list",
            "--backing",
            backing.to_str().expect("utf-8"),
            HOST,
        ])
        .ok();
    assert_eq!(listed.json()[0]["ending"], "cut", "{listed}");
    assert_eq!(listed.json()[0]["files"], 2, "{listed}");
    pull(&sandbox, &backing, &top, &target, &["--cut"]).ok();
    assert_same_bytes("as it is", &read(&target.join("cut")), &bytes(2, 2 * MIB));
    drop(agent);
}

/// Proves S-agent-5, S-agent-6.
#[test]
fn strangers_cost_a_line_of_the_log() {
    let sandbox = Sandbox::new("agent-strangers");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let data = bytes(5, 8 * MIB);
    fs::write(mount.join("rank0"), &data).expect("write");
    let agent = Agent::start(&sandbox, mount.path(), &[]);
    let file = KeyFile::load(mount.backing(), HOST).expect("the key file");
    let path = mount.join("rank0");
    let target = sandbox.join("copy");
    pull(&sandbox, mount.backing(), &path, &target, &[]).ok();
    let memory = agent.own_memory_kib();
    let descriptors = agent.descriptors();

    // A wrong key.
    let wrong = sandbox.join("wrong-key");
    let stored = serde_json::json!({
        "address": file.address,
        "key": Key::random().expect("random").digits(),
    });
    fs::write(&wrong, stored.to_string()).expect("write");
    let with_wrong = || {
        let mut command = sandbox.firn(["pull", "--key-file"]);
        command
            .arg(&wrong)
            .arg(format!("{HOST}:{}", path.display()));
        run(command.arg(sandbox.join("none")))
    };
    fs::set_permissions(&wrong, PermissionsExt::from_mode(0o644)).expect("chmod");
    with_wrong().code(1).says("lets others in");
    fs::set_permissions(&wrong, PermissionsExt::from_mode(0o600)).expect("chmod");
    with_wrong().code(1).says("the key is wrong");
    wait_until("a line of the log", LIMIT, || {
        agent.log().contains("the key is wrong")
    });
    assert!(!sandbox.join("none").exists());

    replay_is_refused(&file);

    // A port scanner, garbage, half messages, long ones.
    let mut generator = generator(seed("strangers"));
    for round in 0..200_u32 {
        let mut socket = TcpStream::connect(&file.address).expect("connect");
        let mut garbage = vec![0; generator.random_range(0..300)];
        generator.fill(&mut garbage[..]);
        let message: &[u8] = match round % 5 {
            0 => b"",
            1 => b"GET / HTTP/1.1\r\n\r\n",
            2 => &[0, 0, 0, 40, b'{'],
            3 => &[0xff; 64],
            _ => &garbage,
        };
        // It may have hung up already: that is the point.
        let _ = socket.write_all(message);
        let _ = socket.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer);
        assert_eq!(answer, b"", "an answer to {message:?}");
    }
    // Silent ones, more than there may be: each is let go after its time.
    let silent: Vec<_> = (0..40)
        .map(|_| TcpStream::connect(&file.address).expect("connect"))
        .collect();
    for mut socket in silent {
        socket.set_read_timeout(Some(LIMIT)).expect("a timeout");
        let ended = socket.read(&mut [0; 1]);
        let reset = |e: &std::io::Error| e.kind() == std::io::ErrorKind::ConnectionReset;
        assert!(
            matches!(&ended, Ok(0)) || ended.as_ref().is_err_and(reset),
            "{ended:?}"
        );
    }
    fs::remove_file(&target).expect("remove the copy");
    pull(&sandbox, mount.backing(), &path, &target, &[]).ok();
    assert_same_bytes("after all that", &read(&target), &data);
    wait_until("all connections are closed", LIMIT, || {
        agent.descriptors() <= descriptors
    });
    let grown = agent.own_memory_kib().saturating_sub(memory);
    assert!(grown < 8 << 10, "{grown} KiB more than before");
    // All of them cost a line in ten seconds.
    wait_until("the number of strangers", LIMIT, || {
        agent.log().contains("more since the last line like this")
    });
    let told = agent.log();
    let lines = told.lines().filter(|line| line.contains("127.0.0.1:"));
    assert!(lines.count() < 20, "{told}");
    assert_nothing_held(&mount);
}

/// Connections of strangers that an agent has at once (`firn-agent/src/strangers.rs`).
const STRANGERS_MAX: usize = 32;

/// Whether the other side has not closed a connection on which it sends nothing.
fn is_open(mut socket: &TcpStream) -> bool {
    socket.set_nonblocking(true).expect("set non-blocking");
    matches!(socket.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
}

/// Proves S-agent-16: as many silent connections as there may be, and more than that for as long as the pull lasts.
#[test]
fn regression_strangers_who_say_nothing_keep_no_puller_out() {
    let sandbox = Sandbox::new("agent-silent");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let data = bytes(5, MIB);
    fs::write(mount.join("rank0"), &data).expect("write");
    let agent = Agent::start(&sandbox, mount.path(), &[]);
    let file = KeyFile::load(mount.backing(), HOST).expect("the key file");
    let path = mount.join("rank0");
    let target = sandbox.join("copy");
    let connect = || TcpStream::connect(&file.address).expect("connect");
    let threads = agent.threads();
    let silent: Vec<_> = (0..100).map(|_| connect()).collect();
    // An agent refuses connections while as many that it has closed still have their threads.
    wait_until(
        "as many silent connections are left as an agent keeps",
        LIMIT,
        || {
            let open = silent.iter().filter(|socket| is_open(socket)).count();
            open == STRANGERS_MAX && agent.threads() <= threads + STRANGERS_MAX
        },
    );
    let told = pull(
        &sandbox,
        mount.backing(),
        &path,
        &target,
        &["--patience", "0s"],
    );
    told.ok();
    assert_same_bytes("among silent ones", &read(&target), &data);
    fs::remove_file(&target).expect("remove the copy");
    drop(silent);
    // A flood: the puller may lose its place, and comes again.
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ended = StopAtEnd(&stop);
        scope.spawn(|| {
            let mut silent = VecDeque::new();
            while !stop.load(Ordering::Relaxed) {
                // None where the kernel has no room for one more.
                silent.extend(TcpStream::connect(&file.address).ok());
                if silent.len() > 100 {
                    silent.pop_front();
                }
            }
        });
        pull(&sandbox, mount.backing(), &path, &target, &[]).ok();
        drop(ended);
    });
    assert_same_bytes("in a flood", &read(&target), &data);
    let told = agent.log();
    let lines = told
        .lines()
        .filter(|line| line.contains("connection was closed"));
    assert!(lines.count() < 20, "{told}");
}

/// Proves S-agent-16: a first connection that is closed, as an agent does that has too many, is made again.
#[test]
fn a_puller_that_is_turned_away_comes_again() {
    let sandbox = Sandbox::new("agent-again");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let data = bytes(6, MIB);
    fs::write(mount.join("rank0"), &data).expect("write");
    let _agent = Agent::start(&sandbox, mount.path(), &[]);
    let file = KeyFile::load(mount.backing(), HOST).expect("the key file");
    let door = TcpListener::bind("127.0.0.1:0").expect("listen");
    let address = door.local_addr().expect("an address").to_string();
    let by_door = |patience: &str| {
        let mut command = sandbox.firn(["pull", "--patience", patience, "--key-file"]);
        command.arg(mount.backing().join(".firn").join(format!("agent-{HOST}")));
        command.args(["--address", &address]);
        let source = format!("{HOST}:{}", mount.join("rank0").display());
        run(command.arg(source).arg(sandbox.join("copy")))
    };
    std::thread::scope(|scope| {
        scope.spawn(|| drop(door.accept().expect("accept")));
        by_door("0s").code(1).says("the connection was closed");
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..3 {
                drop(door.accept().expect("accept"));
            }
            let (puller, _) = door.accept().expect("accept");
            let agent = TcpStream::connect(&file.address).expect("connect");
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let _ = std::io::copy(&mut &puller, &mut &agent);
                    let _ = agent.shutdown(Shutdown::Both);
                });
                let _ = std::io::copy(&mut &agent, &mut &puller);
                let _ = puller.shutdown(Shutdown::Both);
            });
        });
        by_door("1min").ok();
    });
    assert_same_bytes("at last", &read(&sandbox.join("copy")), &data);
}

/// A recorded message of a puller is of no use to the recorder.
fn replay_is_refused(file: &KeyFile) {
    let heard = Mutex::new(Vec::new());
    let between = TcpListener::bind("127.0.0.1:0").expect("listen");
    let address = between.local_addr().expect("an address");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut puller, _) = between.accept().expect("accept");
            let mut agent = TcpStream::connect(&file.address).expect("connect");
            let mut back = agent.try_clone().expect("dup");
            let mut to_puller = puller.try_clone().expect("dup");
            scope.spawn(move || std::io::copy(&mut back, &mut to_puller));
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = puller.read(&mut buffer) {
                heard.lock().expect("lock").extend(&buffer[..count]);
                agent.write_all(&buffer[..count]).expect("hand on");
            }
            let _ = agent.shutdown(Shutdown::Both);
        });
        let socket = TcpStream::connect(address).expect("connect");
        list_all(&mut greet(socket, file));
    });
    let heard = heard.into_inner().expect("lock");
    let mut socket = TcpStream::connect(&file.address).expect("connect");
    socket.write_all(&heard).expect("replay");
    // The agent may have ended the connection before; what it answered can be read all the same.
    let _ = socket.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer);
    // The hello is right, so it is answered, for the holder of its ephemeral key. Nothing else is.
    let length = answer.first_chunk().expect("an answer");
    let length = u32::from_be_bytes(*length) as usize;
    let text = String::from_utf8_lossy(&answer);
    assert!(text.contains("welcome"), "{text}");
    assert_eq!(answer.len(), 4 + length, "a replay was believed: {text}");
}

/// Proves S-agent-5: bounded, shown, and over with its connection.
#[test]
fn what_is_held_for_pullers_is_bounded_and_ends_with_them() {
    let sandbox = Sandbox::new("agent-hold");
    let mount = FirnMount::new(&sandbox, DEMAND);
    for rank in 0..4 {
        let data = bytes(rank, 4 * MIB);
        fs::write(mount.join(format!("rank{rank}")), data).expect("write");
    }
    fs::write(mount.join("large"), bytes(9, 20 * MIB)).expect("write");
    let agent = Agent::start(&sandbox, mount.path(), &["--hold-max", "9M"]);
    let open = |link: &mut Link<Stream>, file: u32, path: &str| {
        let path = path.into();
        ask(link, &Request::Open { file, path })
    };
    let bytes_of = |reply| match reply {
        Reply::Opened { bytes, .. } => bytes as usize,
        other => panic!("{other:?}"),
    };
    let mut first = connect(mount.backing());
    let mut second = connect(mount.backing());
    for link in [&mut first, &mut second] {
        list_all(link);
    }
    assert_eq!(bytes_of(open(&mut first, 1, "rank0")), 4 * MIB);
    assert_eq!(bytes_of(open(&mut second, 1, "rank1")), 4 * MIB);
    assert_eq!(open(&mut second, 2, "rank2"), Reply::Full);
    assert_eq!(mount.status().chunk_lists, 2);
    assert_eq!(mount.status().chunk_list_bytes, 8 * MIB as u64);
    // Bytes that are not taken: the agent waits, and holds no more than before.
    for at in 0..64 {
        let request = Request::Read {
            file: 1,
            offset: 0,
            bytes: 1 << 20,
        };
        let until = Instant::now() + LIMIT;
        first
            .send(&request, until)
            .unwrap_or_else(|e| panic!("{at}: {e}"));
    }
    drop(first);
    wait_until("the list of a puller that is gone ends", LIMIT, || {
        mount.status().chunk_lists == 1
    });
    assert_eq!(bytes_of(open(&mut second, 2, "rank2")), 4 * MIB);
    for file in [1, 2] {
        assert_eq!(ask(&mut second, &Request::Release { file }), Reply::Done);
    }
    // Larger than the bound: alone.
    assert_eq!(bytes_of(open(&mut second, 3, "large")), 20 * MIB);
    assert_eq!(open(&mut second, 4, "rank0"), Reply::Full);
    let refused = open(&mut second, 5, "../etc/passwd");
    assert!(matches!(refused, Reply::Error { .. }), "{refused:?}");
    let refused = ask(
        &mut second,
        &Request::Read {
            file: 3,
            offset: 0,
            bytes: u64::MAX,
        },
    );
    assert!(matches!(refused, Reply::Error { .. }), "{refused:?}");
    // kill -9 of the agent: the lists end with its process.
    agent.kill();
    assert_nothing_held(&mount);
    drop(second);
    // Pullers take turns.
    let _agent = Agent::start(&sandbox, mount.path(), &["--hold-max", "5M"]);
    std::thread::scope(|scope| {
        for puller in 0..3 {
            let sandbox = &sandbox;
            let mount = &mount;
            scope.spawn(move || {
                let target = sandbox.join(format!("copy{puller}"));
                pull(sandbox, mount.backing(), mount.path(), &target, &[]).ok();
                let copy = read(&target.join("large"));
                assert_same_bytes("of several pullers", &copy, &bytes(9, 20 * MIB));
            });
        }
    });
    assert_nothing_held(&mount);
}

/// Proves S-agent-14.
#[test]
fn what_is_pulled_is_in_the_status_and_the_metrics() {
    let sandbox = Sandbox::new("agent-metrics");
    let mount = FirnMount::new(&sandbox, DEMAND);
    for rank in 0..3 {
        fs::write(mount.join(format!("rank{rank}")), bytes(rank, 2 * MIB)).expect("write");
    }
    let agent = Agent::start(&sandbox, mount.path(), &[]);
    assert_eq!(mount.status().pulls, 0);
    let mut link = connect(mount.backing());
    list_all(&mut link);
    assert_eq!(mount.status().pulls, 1);
    let target = sandbox.join("copy");
    pull(&sandbox, mount.backing(), mount.path(), &target, &[]).ok();
    wait_until("the pull is counted and over", LIMIT, || {
        let status = mount.status();
        (status.pulls, status.pulled_files, status.pulled_bytes) == (1, 3, 6 * MIB as u64)
    });
    let shown = sandbox
        .run(["status".as_ref(), mount.path().as_os_str()])
        .ok();
    let line = "6.0 MiB in 3 files, 1 pull under way";
    assert!(shown.stdout.contains(line), "{shown}");
    let metrics = [
        "status".as_ref(),
        "--prometheus".as_ref(),
        mount.path().as_os_str(),
    ];
    let metrics = sandbox.run(metrics).ok();
    let of_this_mount = metrics
        .stdout
        .lines()
        .find(|line| line.starts_with("firn_pulled_bytes_total{"));
    let sample = of_this_mount.expect("a sample");
    assert!(sample.ends_with(" 6291456"), "{sample}");
    // With its process.
    agent.kill();
    wait_until("its pulls are over", LIMIT, || mount.status().pulls == 0);
    assert_eq!(mount.status().pulled_bytes, 6 * MIB as u64);
}

/// A day's worth of requests: neither the agent nor firnd grows.
#[test]
fn requests_cost_no_memory() {
    let requests = env_count("FIRN_AGENT_REQUESTS", 12_000);
    let sandbox = Sandbox::new("agent-requests");
    let mount = FirnMount::new(&sandbox, DEMAND);
    fs::write(mount.join("rank0"), bytes(1, MIB)).expect("write");
    let agent = Agent::start(&sandbox, mount.path(), &[]);
    let mut link = connect(mount.backing());
    list_all(&mut link);
    let mut round = |file: u32| {
        let path = "rank0".into();
        let opened = ask(&mut link, &Request::Open { file, path });
        assert!(
            matches!(opened, Reply::Opened { bytes, .. } if bytes == 1 << 20),
            "{opened:?}"
        );
        let sum = Request::Sum {
            file,
            offset: 0,
            bytes: 100,
        };
        assert!(matches!(ask(&mut link, &sum), Reply::Sum { .. }));
        let checked = ask(&mut link, &Request::Check { file });
        assert!(matches!(checked, Reply::Checked { changed: false, .. }));
        assert_eq!(ask(&mut link, &Request::Release { file }), Reply::Done);
        mount.note_progress();
    };
    (0..100).for_each(&mut round);
    let before = [agent.own_memory_kib(), mount.own_memory_kib()];
    (100..100 + (requests / 4) as u32).for_each(&mut round);
    let after = [agent.own_memory_kib(), mount.own_memory_kib()];
    println!("{before:?} KiB before, {after:?} KiB after {requests} requests");
    for (before, after) in before.into_iter().zip(after) {
        assert!(after < before + 2048, "{before} KiB became {after}");
    }
}

/// Proves S-agent-1: on a firn mount the copy is held, and not synced.
#[test]
fn a_pull_into_a_mount_stays_in_its_arena() {
    let sandbox = Sandbox::new("agent-into");
    let other = Sandbox::new("agent-into-target");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let target_mount = FirnMount::new(&other, DEMAND);
    let top = write_tree(&mount, &sandbox);
    let _agent = Agent::start(&sandbox, mount.path(), &[]);
    let target = target_mount.join("step_100");
    pull(&other, mount.backing(), &top, &target, &[]).ok();
    assert_same("on a mount", &snapshot(&target), &snapshot(&top));
    let held = target_mount.status().held_bytes;
    assert!(held > 24 * MIB as u64, "{held} bytes are held");
}

/// Proves S-agent-1.
#[test]
fn a_copy_takes_the_place_of_nothing_and_bad_input_is_told() {
    let sandbox = Sandbox::new("agent-bad");
    let mount = FirnMount::new(&sandbox, DEMAND);
    fs::write(mount.join("rank0"), b"new").expect("write");
    let backing = mount.backing().to_owned();
    let path = mount.join("rank0");
    let target = sandbox.join("copy");
    let none = pull(&sandbox, &backing, &path, &target, &[]).code(1);
    none.says("start `firn agent` there");
    let _agent = Agent::start(&sandbox, mount.path(), &[]);
    fs::write(&target, b"old").expect("write");
    pull(&sandbox, &backing, &path, &target, &[])
        .code(11)
        .says("exists");
    assert_eq!(read(&target), b"old");
    fs::remove_file(&target).expect("remove");
    // Another pull has the place.
    let staging = staging_of(&target);
    fs::create_dir(&staging).expect("mkdir");
    pull(&sandbox, &backing, &path, &target, &[])
        .code(1)
        .says("lets others in");
    fs::set_permissions(&staging, PermissionsExt::from_mode(0o700)).expect("chmod");
    let lock = open_rw(&staging.join("lock"));
    lock.set_permissions(PermissionsExt::from_mode(0o600))
        .expect("chmod");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).expect("lock");
    pull(&sandbox, &backing, &path, &target, &[])
        .code(11)
        .says("under way");
    // A process that another test begins meanwhile has a copy of the descriptor, so that closing it may not unlock.
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::Unlock).expect("unlock");
    drop(lock);
    // Whatever is there already is compared or removed, not believed.
    fs::write(staging.join("tree"), b"old").expect("write");
    pull(&sandbox, &backing, &path, &target, &[]).ok();
    assert_eq!(read(&target), b"new");
    let missing = pull(
        &sandbox,
        &backing,
        &mount.join("no"),
        &sandbox.join("x"),
        &[],
    )
    .code(1);
    missing.says("No such file");
    let elsewhere = pull(
        &sandbox,
        &backing,
        Path::new("/etc"),
        &sandbox.join("x"),
        &[],
    );
    elsewhere.code(1).says("not on");
    for args in [
        &["pull", "n1:/x"][..],
        &["pull", "n1", "x"],
        &["pull", "n1:x", "x"],
        &["pull", "--address", "x", "n1:/x", "x"],
        &["pull", "--list", "n1:/x", "x"],
        &["agent"],
        &["agent", "--hold-max", "much", "/x"],
    ] {
        run(&mut sandbox.firn(args)).code(2);
    }
    run(&mut sandbox.firn(["agent", "/"])).code(10);
    let host = ["agent", "--host", "a/b"];
    run(sandbox.firn(host).arg(mount.path()))
        .code(1)
        .says("not a valid name of a host");
    let listen = ["agent", "--listen", "192.0.2.1:1"];
    run(sandbox.firn(listen).arg(mount.path()))
        .code(1)
        .says("--listen");
}

/// The process that is killed.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Agent,
    Puller,
    Firnd,
    Writer,
}

/// Proves S-agent-1, S-agent-5, S-agent-9: kill -9 of a random process at a random moment.
#[test]
fn whatever_is_killed_a_copy_is_whole_or_not_there() {
    let rounds = env_count("FIRN_AGENT_ROUNDS", 16);
    let mut generator = generator(seed("agent-kills"));
    let sandbox = Sandbox::new("agent-kills");
    let mut mount = FirnMount::new(&sandbox, DEMAND);
    let top = mount.join("step_1");
    fs::create_dir(&top).expect("mkdir");
    for rank in 0..4 {
        let data = bytes(rank, 9 * MIB + 777);
        fs::write(top.join(format!("rank{rank}")), data).expect("write");
    }
    let expected = snapshot(&top);
    let backing = mount.backing().to_owned();
    let mut agent = Agent::start(&sandbox, mount.path(), &[]);
    let mut took = Duration::from_millis(300);
    let mut resumed = 0;
    for round in 0..rounds {
        let victims = [Victim::Agent, Victim::Puller, Victim::Firnd, Victim::Writer];
        let victim = victims[generator.random_range(0..victims.len())];
        let target = sandbox.join(format!("copy{round}"));
        let mut writer = start_writer(&mount);
        let begun = Instant::now();
        let mut puller = pull_command(&sandbox, &backing, &top, &target, &["--json"])
            .stdout(Stdio::null())
            .stderr(fs::File::create(sandbox.join("puller.log")).expect("a log"))
            .spawn()
            .expect("start the puller");
        // A random moment of the pull.
        std::thread::sleep(took.mul_f64(generator.random_range(0.0..1.1)));
        match victim {
            Victim::Agent => {
                agent.kill();
                agent = Agent::start(&sandbox, mount.path(), &[]);
            }
            Victim::Puller => kill(puller.id(), libc::SIGKILL),
            Victim::Firnd => {
                kill(mount.pid(), libc::SIGKILL);
                mount.wait_for_end();
                drop(mount);
                unmount_lazily(&sandbox.join("mnt"));
                mount = FirnMount::new(&sandbox, DEMAND);
            }
            Victim::Writer => writer.kill().expect("kill the writer"),
        }
        let code = wait_child(&mut puller, LIMIT)
            .expect("the puller ends")
            .code();
        let _ = writer.kill();
        writer.wait().expect("wait for the writer");
        println!("round {round}: {victim:?}, the puller ended with {code:?}");
        let told = fs::read_to_string(sandbox.join("puller.log")).expect("a log");
        // It had not connected yet: that fails at once.
        let was_refused = matches!(victim, Victim::Agent) && code == Some(1) && {
            assert!(told.contains("the agent on n1"), "{told}");
            !target.exists()
        };
        if code.is_none() || was_refused {
            // Killed: the name is there with all of it, or not at all, and the next pull makes it whole.
            if !target.exists() {
                let told = pull(&sandbox, &backing, &top, &target, &["--json"]).ok();
                resumed += u32::from(told.json()["reused_bytes"].as_u64() > Some(0));
            }
        } else {
            assert_eq!(code, Some(0), "round {round}, {victim:?}: {told}");
            took = begun.elapsed().min(Duration::from_secs(1));
        }
        assert_same("the copy", &snapshot(&target), &expected);
        assert_nothing_held(&mount);
        fs::remove_dir_all(&target).expect("remove the copy");
        let _ = fs::remove_dir_all(staging_of(&target));
    }
    println!("{resumed} pulls went on with what was there");
    drop(agent);
}

/// `firn pull --follow` that ends with the value.
struct Follower(std::process::Child);

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn follow(partner: &Sandbox, backing: &Path, source: &Path, target: &Path) -> Follower {
    let extra = ["--follow", "--keep", "2", "--every", "100ms"];
    let mut command = pull_command(partner, backing, source, target, &extra);
    let log = fs::File::create(partner.join("follow.log")).expect("a log");
    Follower(command.stderr(log).spawn().expect("start the follower"))
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).expect("list the copies");
    let name = |entry: std::io::Result<fs::DirEntry>| {
        let name = entry.expect("an entry").file_name();
        name.to_string_lossy().into_owned()
    };
    let mut names: Vec<_> = entries
        .map(name)
        .filter(|name| !name.starts_with('.'))
        .collect();
    names.sort();
    names
}

/// A checkpoint that is newer than those before: their order is that of their times, which have seconds here.
fn write_step(mount: &FirnMount<'_>, step: u64) -> PathBuf {
    let top = mount.join(format!("step_{step}"));
    fs::create_dir(&top).expect("mkdir");
    for rank in 0..3 {
        let path = top.join(format!("rank{rank}"));
        fs::write(&path, bytes(10 * step + rank, 2 * MIB + 99)).expect("write");
        set_time(&path, step);
    }
    set_time(&top, step);
    top
}

fn set_time(path: &Path, step: u64) {
    let time = std::time::UNIX_EPOCH + Duration::from_secs(1_000_000_000 + step);
    let file = fs::File::open(path).expect("open");
    file.set_modified(time).expect("set the time");
}

/// Proves S-agent-11: the source loses its processes, its memory and its backing; a third host restarts from the
/// partner's memory.
#[test]
fn a_partner_keeps_copies_from_which_a_job_restarts() {
    let [source, partner, replacement] =
        ["source", "partner", "replacement"].map(|name| Sandbox::new(&format!("agent-{name}")));
    let mount = FirnMount::new(&source, DEMAND);
    let partner_mount = FirnMount::new(&partner, DEMAND);
    let copies = partner_mount.join("of-n1");
    fs::create_dir(&copies).expect("mkdir");
    let agent = Agent::start(&source, mount.path(), &[]);
    let mut follower = follow(&partner, mount.backing(), mount.path(), &copies);
    let expected: Vec<_> = (1..=4)
        .map(|step| {
            let top = write_step(&mount, step);
            let name = format!("step_{step}");
            wait_until("a copy of a checkpoint", LIMIT, || {
                names(&copies).contains(&name)
            });
            assert_same("a copy", &snapshot(&copies.join(&name)), &snapshot(&top));
            snapshot(&top)
        })
        .collect();
    wait_until("older copies are gone", LIMIT, || {
        names(&copies) == ["step_3", "step_4"]
    });
    // One that is not closed is passed over; one that changes is exchanged.
    let open = {
        let top = mount.join("step_5");
        fs::create_dir(&top).expect("mkdir");
        let file = open_rw(&top.join("rank0"));
        file.write_all_at(&bytes(50, MIB), 0).expect("write");
        file
    };
    let last = write_step(&mount, 6);
    wait_until("the next copy", LIMIT, || {
        names(&copies) == ["step_4", "step_6"]
    });
    fs::write(last.join("late"), bytes(77, MIB)).expect("write");
    set_time(&last.join("late"), 6);
    set_time(&last, 6);
    let expected_last = snapshot(&last);
    wait_until("the copy is exchanged", LIMIT, || {
        snapshot(&copies.join("step_6")) == expected_last
    });
    // A follower that is killed begins anew, and what is there is not copied again.
    drop(follower);
    follower = follow(&partner, mount.backing(), mount.path(), &copies);
    // The host is lost.
    drop(open);
    agent.kill();
    let backing = mount.kill();
    for arena in source.arenas() {
        fs::remove_file(arena).expect("remove the arena, which is memory");
    }
    wait_until("the follower tells that the source is gone", LIMIT, || {
        let log = fs::read_to_string(partner.join("follow.log")).expect("a log");
        log.contains("cannot be reached")
    });
    fs::remove_dir_all(&backing).expect("remove the backing");
    drop(follower);
    let held = partner_mount.status().held_bytes;
    assert!(
        held >= 12 * MIB as u64,
        "{held} bytes are held by the partner"
    );
    let _agent = Agent::start(&partner, partner_mount.path(), &[]);
    let restart = FirnMount::new(&replacement, DEMAND);
    for (name, expected) in [("step_4", &expected[3]), ("step_6", &expected_last)] {
        let target = restart.join(name);
        let from = partner_mount.backing();
        pull(&replacement, from, &copies.join(name), &target, &[]).ok();
        assert_same("what the job restarts from", &snapshot(&target), expected);
    }
}

/// Proves S-agent-10: right after the answer the power is cut; and a puller is killed at a random moment before.
#[test]
fn a_copy_survives_the_power_of_its_file_system() {
    let sandbox = Sandbox::new("agent-power");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let top = mount.join("step_1");
    fs::create_dir_all(top.join("a")).expect("mkdir");
    for rank in 0..6 {
        let data = bytes(rank, MIB + 4321);
        fs::write(top.join(format!("a/rank{rank}")), data).expect("write");
    }
    let expected = snapshot(&top);
    let _agent = Agent::start(&sandbox, mount.path(), &[]);
    let mut disk = PowerFs::new(&sandbox, "disk");
    let seed = seed("agent-power");
    let mut generator = generator(seed);
    let mut took = Duration::from_millis(100);
    for round in 0..6 {
        let target = disk.path().join(format!("copy{round}"));
        let mut puller = pull_command(&sandbox, mount.backing(), &top, &target, &[])
            .stderr(Stdio::null())
            .spawn()
            .expect("start the puller");
        let is_killed = round % 2 == 0;
        if is_killed {
            std::thread::sleep(took.mul_f64(generator.random_range(0.0..1.2)));
            kill(puller.id(), libc::SIGKILL);
        }
        let begun = Instant::now();
        let status = wait_child(&mut puller, LIMIT).expect("the puller ends");
        disk.cut(seed.wrapping_add(round));
        if !is_killed {
            assert!(status.success(), "{status}");
            assert!(target.exists(), "round {round}: it was said to be there");
            took = begun.elapsed();
        }
        if target.exists() {
            assert_same("after a loss of power", &snapshot(&target), &expected);
        }
        let told = pull(&sandbox, mount.backing(), &top, &target, &[]);
        assert!(matches!(told.code, 0 | 11), "{told}");
        assert_same("at last", &snapshot(&target), &expected);
    }
}

/// A program that writes and removes files beside those that are pulled.
fn start_writer(mount: &FirnMount<'_>) -> std::process::Child {
    let script =
        "while :; do head -c 3000000 /dev/zero >\"$0/other\" && rm \"$0/other\" || exit; done";
    Command::new("sh")
        .args(["-c", script])
        .arg(mount.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("start a writer")
}

/// Proves S-agent-9: what a killed puller has brought is compared and not sent again.
#[test]
fn a_pull_goes_on_where_it_was_interrupted() {
    let sandbox = Sandbox::new("agent-resume");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let path = mount.join("rank0");
    let data = bytes(1, 48 * MIB + 5);
    fs::write(&path, &data).expect("write");
    let _agent = Agent::start(&sandbox, mount.path(), &[]);
    let target = sandbox.join("copy");
    let staged = staging_of(&target).join("tree");
    // As a killed puller leaves it: some blocks, one of them damaged.
    fs::create_dir(staging_of(&target)).expect("mkdir");
    fs::set_permissions(staging_of(&target), PermissionsExt::from_mode(0o700)).expect("chmod");
    let mut half = data[..24 * MIB].to_vec();
    half[9 * MIB] ^= 1;
    fs::write(&staged, &half).expect("write");
    let told = pull(&sandbox, mount.backing(), &path, &target, &["--json"]).ok();
    assert_same_bytes("the copy", &read(&target), &data);
    let told = told.json();
    assert_eq!(told["reused_bytes"], 23 * MIB, "{told}");
    assert_eq!(told["received_bytes"], 25 * MIB + 5, "{told}");
}
