//! Direct access on a real mount: what other processes see, what a kill leaves, and which processes are let in.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use firn_direct::connection::{Outgoing, request_token};
use firn_format::data_socket::{DATA_SOCKET_VERSION, FILES_MAX, Op, Request, Status};
use firn_tests::command::{copy_program, run};
use firn_tests::data_socket::{
    Client, acknowledged, byte_at, hello_and, knock, pester, receive_any, say,
};
use firn_tests::mount::patient;
use firn_tests::random::generator;
use firn_tests::{FirnMount, Sandbox, helper_binary, seed, wait_until};
use zerocopy::IntoBytes;

const NOBODY: u32 = 65534;

fn pattern(from: u64, len: usize) -> Vec<u8> {
    (from..from + len as u64).map(byte_at).collect()
}

/// Proves S-direct-1, S-direct-3.
#[test]
fn what_was_written_by_direct_access_is_seen_by_everyone_at_once() {
    let sandbox = Sandbox::new("direct-seen");
    // A process that is started closes its copies of descriptors, which would drain.
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let path = mount.join("file");
    let file = File::create(&path).unwrap();
    // The kernel believes to know the length.
    assert_eq!(path.metadata().unwrap().len(), 0);
    let client = Client::new(&request_token(&file).unwrap());
    let mut direct = client.open(file);
    let data = pattern(0, 3_000_000);
    let mut at = 0;
    for len in [1, 100, 4096, 100_000, 2_895_803] {
        direct.append_again(at as u64, &data[at..at + len]);
        at += len;
        assert_eq!(path.metadata().unwrap().len(), at as u64);
        assert_eq!(direct.file.metadata().unwrap().len(), at as u64);
    }
    let status = mount.status();
    assert_eq!((status.direct_clients, status.held_bytes), (1, 3_000_000));
    assert_eq!(std::fs::read(&path).unwrap(), data);
    assert_eq!(direct.append(at as u64, b"no"), 0, "another has opened it");
    direct.write(at as u64, b"yes").unwrap();
    assert_eq!(path.metadata().unwrap().len(), at as u64 + 3);
    drop(direct);
    wait_until("the end of the lease", Duration::from_secs(10), || {
        mount.status().direct_leases == 0
    });
    let backing = mount.umount();
    assert_eq!(
        std::fs::read(backing.join("file")).unwrap(),
        [&data[..], b"yes"].concat()
    );
}

/// Proves S-direct-3.
#[test]
fn an_appender_that_comes_later_appends_at_the_end() {
    let sandbox = Sandbox::new("direct-append");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    for (name, len, closed) in [
        ("a", 1, false),
        ("b", 4096, false),
        ("c", 4097, true),
        ("d", 1_000_000, false),
        ("e", 77, true),
    ] {
        let path = mount.join(name);
        let file = File::create(&path).unwrap();
        file.metadata().unwrap();
        let client = Client::new(&request_token(&file).unwrap());
        let mut direct = client.open(file);
        direct.append_again(0, &pattern(0, len));
        let direct = if closed {
            drop(direct);
            None
        } else {
            Some(direct)
        };
        // The length between is not asked for.
        let mut second = OpenOptions::new().append(true).open(&path).unwrap();
        second.write_all(b"behind").unwrap();
        second.write_all(b" it").unwrap();
        assert_eq!(second.metadata().unwrap().len(), len as u64 + 9, "{name}");
        let mut expected = pattern(0, len);
        expected.extend(b"behind it");
        assert!(std::fs::read(&path).unwrap() == expected, "{name}");
        drop(direct);
    }
}

/// Proves S-direct-3.
#[test]
fn the_kernels_calls_on_the_same_descriptor_see_and_cut_what_was_written() {
    let sandbox = Sandbox::new("direct-same");
    let mount = FirnMount::new(&sandbox, &patient(""));
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(mount.join("file"))
        .unwrap();
    let client = Client::new(&request_token(&file).unwrap());
    let mut direct = client.open(file);
    direct.append_again(0, &pattern(0, 10_000));
    let mut bytes = vec![0; 20_000];
    assert_eq!(direct.file.read_at(&mut bytes, 0).unwrap(), 10_000);
    assert_eq!(bytes[..10_000], pattern(0, 10_000));
    assert_eq!(direct.ask(), Some(Status::Ok));
    direct.append_again(10_000, &pattern(10_000, 500));
    direct.file.set_len(9_000).unwrap();
    assert_eq!(direct.append(10_500, b"x"), 0);
    assert_eq!(direct.file.metadata().unwrap().len(), 9_000);
    assert_eq!(direct.ask(), Some(Status::Ok));
    direct.append_again(9_000, &pattern(9_000, 500));
    direct.file.sync_all().unwrap();
    assert_eq!(
        std::fs::read(mount.backing().join("file")).unwrap(),
        pattern(0, 9_500)
    );
}

/// Proves S-direct-1.
#[test]
fn a_killed_client_loses_nothing_that_was_acknowledged() {
    let sandbox = Sandbox::new("direct-client");
    let mount = FirnMount::new(&sandbox, "arena-size=64M,chunk-size=1M");
    for round in 0..5 {
        let path = mount.join(format!("f{round}"));
        let log = sandbox.join(format!("log{round}"));
        let mut writer = Command::new(helper_binary())
            .args(["direct-writer".as_ref(), path.as_os_str(), log.as_os_str()])
            .spawn()
            .unwrap();
        wait_until("some writes", Duration::from_secs(30), || {
            acknowledged(&log) > 3_000_000 * (round + 1)
        });
        writer.kill().unwrap();
        writer.wait().unwrap();
        check(&std::fs::read(&path).unwrap(), acknowledged(&log));
    }
    wait_until("the end of the clients", Duration::from_secs(10), || {
        mount.status().direct_clients == 0
    });
    assert_eq!(mount.status().direct_errors, 0);
    mount.umount();
}

fn check(found: &[u8], acknowledged: u64) {
    assert!(
        found.len() as u64 >= acknowledged,
        "{} bytes of {acknowledged}",
        found.len()
    );
    let wrong = found
        .iter()
        .zip(0..)
        .find(|(byte, at)| **byte != byte_at(*at));
    assert_eq!(wrong, None);
}

/// Proves S-direct-1.
#[test]
fn a_killed_firnd_loses_nothing_and_its_clients_write_no_more() {
    let sandbox = Sandbox::new("direct-firnd");
    for round in 0..5u64 {
        let mount = FirnMount::new(&sandbox, "arena-size=64M,chunk-size=1M");
        let path = mount.join(format!("f{round}"));
        let log = sandbox.join(format!("log{round}"));
        let writers = Command::new(helper_binary())
            .args(["direct-writer".as_ref(), path.as_os_str(), log.as_os_str()])
            .spawn();
        let mut writer = writers.unwrap();
        // A quiet client, whose leases still last.
        let file = File::create(mount.join(format!("quiet{round}"))).unwrap();
        let client = Client::new(&request_token(&file).unwrap());
        let mut quiet = client.open(file);
        quiet.append_again(0, &pattern(0, 30_000));
        wait_until("some writes", Duration::from_secs(30), || {
            acknowledged(&log) > 1_000_000 * (round + 1)
        });
        let backing = mount.kill();
        // In the arena, whether its client lives or not; nothing where a process that was started closed
        // the grant before.
        let more = quiet.append(30_000, &pattern(30_000, 1_000));
        let mount = FirnMount::new(&sandbox, "arena-size=64M,chunk-size=1M");
        assert_eq!(quiet.append(30_000 + more as u64, b"never"), 0);
        writer.wait().unwrap();
        let acknowledged = acknowledged(&log);
        mount.umount();
        check(
            &std::fs::read(backing.join(format!("f{round}"))).unwrap(),
            acknowledged,
        );
        assert_eq!(
            std::fs::read(backing.join(format!("quiet{round}"))).unwrap(),
            pattern(0, 30_000 + more)
        );
    }
}

#[test]
fn nonsense_on_the_socket_ends_that_connection_and_nothing_else() {
    let sandbox = Sandbox::new("direct-nonsense");
    let mount = FirnMount::new(&sandbox, &patient(""));
    let file = File::create(mount.join("file")).unwrap();
    let token = request_token(&file).unwrap();
    let client = Client::new(&token);
    let mut direct = client.open(file);
    let request = |op, arg| Request {
        op,
        arg,
        ..Request::default()
    };
    let hello = request(Op::Hello as u32, DATA_SOCKET_VERSION.into());
    let version = request(Op::Hello as u32, 99);
    let early = request(Op::Lease as u32, 1);
    let of_many_files = Request {
        len: FILES_MAX as u32 + 1,
        ..request(Op::Extents as u32, 0)
    };
    let packets: [(&[u8], Status); 10] = [
        (b"x", Status::Malformed),
        (&[0xff; 24], Status::Malformed),
        (&[7; 5000], Status::Malformed),
        (&hello_and(&hello), Status::Malformed),
        (&hello_and(&early), Status::Malformed),
        (&hello_and(&request(77, 0)), Status::Malformed),
        (&hello_and(&of_many_files), Status::Malformed),
        (&[hello.as_bytes(), b"x"].concat(), Status::Malformed),
        (version.as_bytes(), Status::Version),
        (early.as_bytes(), Status::Malformed),
    ];
    for (packet, expected) in packets {
        let socket = knock(&token).unwrap();
        assert_eq!(say(&socket, packet), Some(expected), "{packet:?}");
        assert_eq!(say(&socket, hello.as_bytes()), None, "closed");
    }
    let socket = knock(&token).unwrap();
    assert_eq!(say(&socket, hello.as_bytes()), Some(Status::Ok));
    let wrong = Request {
        op: Op::OpenWrite as u32,
        token: u64::MAX,
        ..Request::default()
    };
    assert_eq!(say(&socket, wrong.as_bytes()), Some(Status::BadToken));
    assert_eq!(
        say(&socket, request(77, 0).as_bytes()),
        Some(Status::Malformed)
    );
    // Connections that are opened and left.
    let idle: Vec<_> = (0..50).map(|_| knock(&token).unwrap()).collect();
    direct.append_again(0, b"still here");
    drop(idle);
    assert_eq!(std::fs::read(mount.join("file")).unwrap(), b"still here");
}

#[test]
fn a_grant_and_its_first_lease_come_with_the_connection() {
    let sandbox = Sandbox::new("direct-together");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let file = File::create(mount.join("file")).unwrap();
    let token = request_token(&file).unwrap();
    let open = Request::new(Op::OpenWrite, token.token, 100_000);
    let socket = knock(&token).unwrap();
    assert_eq!(say(&socket, &hello_and(&open)), Some(Status::Ok));
    let reply = receive_any(&socket).unwrap();
    assert_eq!(Status::from_word(reply.status), Status::Ok);
    assert!(reply.file_id > 0 && reply.lease.end >= reply.lease.start + 100_000);
    // No grant, and so no lease.
    let unknown = Request::new(Op::OpenWrite, u64::MAX, 100_000);
    let other = knock(&token).unwrap();
    assert_eq!(say(&other, &hello_and(&unknown)), Some(Status::Ok));
    let refused = receive_any(&other).unwrap();
    assert_eq!(Status::from_word(refused.status), Status::BadToken);
    assert_eq!((refused.lease.end, refused.count), (0, 0));
    // A grant alone.
    let alone = Request::new(Op::OpenWrite, token.token, 0);
    socket
        .send_packet(alone.as_bytes().into(), Outgoing::none(), None)
        .unwrap();
    let reply = receive_any(&socket).unwrap();
    assert_eq!(Status::from_word(reply.status), Status::Ok);
    assert_eq!((reply.lease.end, reply.count), (0, 0));
    let extents = Request::new(Op::Extents, u64::MAX, 0);
    let reader = knock(&token).unwrap();
    assert_eq!(say(&reader, &hello_and(&extents)), Some(Status::Ok));
    let reply = receive_any(&reader).unwrap();
    assert_eq!(Status::from_word(reply.status), Status::BadToken);
}

#[test]
fn random_packets_do_no_harm() {
    let mut rng = generator(seed("direct-pester"));
    let sandbox = Sandbox::new("direct-pester");
    let mount = FirnMount::new(&sandbox, &patient(""));
    let pid = mount.pid();
    std::fs::write(mount.join("other"), pattern(0, 100_000)).unwrap();
    let open = |name: &str| {
        OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(mount.join(name))
            .unwrap()
    };
    let files = [
        open("mine"),
        File::open(mount.join("other")).unwrap(),
        File::open("/dev/null").unwrap(),
    ];
    pester(&request_token(&files[0]).unwrap(), &files, 3_000, &mut rng);
    drop(files);
    assert_eq!(mount.pid(), pid);
    assert_eq!(
        std::fs::read(mount.join("other")).unwrap(),
        pattern(0, 100_000)
    );
    assert_eq!(
        std::fs::read(mount.join("mine")).unwrap(),
        b"",
        "nobody published anything"
    );
    wait_until("the end of the clients", Duration::from_secs(30), || {
        mount.status().direct_clients == 0
    });
    let backing = mount.umount();
    assert_eq!(
        std::fs::read(backing.join("other")).unwrap(),
        pattern(0, 100_000)
    );
}

/// While firnd lives, and for the one that attaches after it was killed.
#[test]
fn a_client_that_spoils_its_slab_and_records_harms_its_own_file_only() {
    const OPTIONS: &str = "arena-size=16M,chunk-size=1M,close=held,drain-age=10min";
    let seed = seed("direct-spoiler");
    let mut errors = 0;
    for round in 0..24 {
        // Forged records are told from true ones as long as firnd knows whose lease it is.
        let killed = round % 3 == 0;
        let forged = round % 3 == 1;
        let sandbox = Sandbox::new("direct-spoiler");
        let mount = FirnMount::new(&sandbox, OPTIONS);
        let create = |name: &str| File::create(mount.join(name)).unwrap();
        let before = create("before");
        before.write_all_at(&pattern(0, 50_000), 0).unwrap();
        let mut command = Command::new(helper_binary());
        command
            .arg("direct-spoiler")
            .arg(mount.join("mine"))
            .arg(if forged { "forged" } else { "garbage" });
        command
            .arg((seed ^ round).to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut spoiler = command.spawn().unwrap();
        let mut said = BufReader::new(spoiler.stdout.take().unwrap()).lines();
        let mut next = || said.next().unwrap().unwrap();
        assert_eq!([next(), next()], ["10", "100000"]);
        let after = create("after");
        after.write_all_at(&pattern(7, 60_000), 0).unwrap();
        assert_eq!(next(), "spoiled");
        let mut say = spoiler.stdin.take().unwrap();
        say.write_all(b"go on\n").unwrap();
        next();
        let mount = if killed {
            mount.kill();
            let again = FirnMount::new(&sandbox, OPTIONS);
            say.write_all(b"go on\n").unwrap();
            assert_eq!(next(), "0", "its lease is over");
            again
        } else {
            // What asks for it makes firnd look.
            let _ = std::fs::read(mount.join("mine"));
            errors += mount.status().direct_errors;
            mount
        };
        let check = |dir: &std::path::Path| {
            assert!(
                std::fs::read(dir.join("before")).unwrap() == pattern(0, 50_000),
                "round {round}"
            );
            assert!(
                std::fs::read(dir.join("after")).unwrap() == pattern(7, 60_000),
                "round {round}"
            );
        };
        check(mount.path());
        drop((say, before, after));
        spoiler.wait().unwrap();
        std::fs::remove_file(mount.join("mine")).unwrap();
        // Its slab is used again.
        let more = pattern(3, 4_000_000);
        std::fs::write(mount.join("more"), &more).unwrap();
        check(mount.path());
        let backing = mount.umount();
        check(&backing);
        assert!(
            std::fs::read(backing.join("more")).unwrap() == more,
            "round {round}"
        );
    }
    assert!(errors >= 8, "{errors} of 8 forgers were found out");
}

/// Proves S-direct-4.
#[test]
fn other_users_and_other_file_systems_grant_no_direct_access() {
    let sandbox = Sandbox::new("direct-others");
    let mount = FirnMount::new(&sandbox, &patient("allow-other"));
    let path = mount.join("file");
    std::fs::write(&path, b"x").unwrap();
    // The way there, and the helper where every user may run it.
    for (dir, mode) in [(sandbox.path(), 0o755), (mount.path(), 0o755)] {
        std::fs::set_permissions(dir, PermissionsExt::from_mode(mode)).unwrap();
    }
    let helper = sandbox.join("helper");
    copy_program(&helper_binary(), &helper);
    let version = |uid: Option<u32>, path: &std::path::Path| {
        let mut command = Command::new(&helper);
        command.arg("direct-version").arg(path);
        if let Some(uid) = uid {
            command.uid(uid).gid(uid);
        }
        run(&mut command).ok().stdout.trim().to_owned()
    };
    assert_eq!(version(None, &path), DATA_SOCKET_VERSION.to_string());
    assert_eq!(version(Some(NOBODY), &path), "0");
    assert_eq!(version(None, &helper), "none");
    // Knowing the path of the socket does not help.
    let token = request_token(File::open(&path).unwrap()).unwrap();
    let len = token.socket.iter().position(|byte| *byte == 0).unwrap();
    let socket = std::path::PathBuf::from(String::from_utf8(token.socket[..len].to_vec()).unwrap());
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(
        (
            mode(&socket),
            mode(&sandbox.arena()),
            mode(sandbox.runtime())
        ),
        (0o600, 0o600, 0o700)
    );
    // Nor does it where all of that was opened to every user.
    let control = socket.with_extension("sock");
    for (path, mode) in [
        (sandbox.runtime(), 0o755),
        (&socket, 0o666),
        (&control, 0o666),
    ] {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }
    let script = "import os, socket, sys
for path, kind, hello in (sys.argv[1], socket.SOCK_SEQPACKET, bytes.fromhex(sys.argv[3])), (sys.argv[2], socket.SOCK_STREAM, b''):
    end = socket.socket(socket.AF_UNIX, kind); end.connect(path)
    try:
        if hello: end.send(hello)
        print(len(end.recv(10000)) if hello else end.recv(10000).decode())
    except (BrokenPipeError, ConnectionResetError): print(0)";
    let hello = Request {
        op: Op::Hello as u32,
        arg: DATA_SOCKET_VERSION.into(),
        ..Request::default()
    };
    let hello: String = hello
        .as_bytes()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let knock = |uid: u32| {
        let mut python = Command::new("/usr/bin/python3");
        python
            .args(["-c", script])
            .args([&socket, &control])
            .arg(&hello)
            .uid(uid)
            .gid(uid);
        run(&mut python).ok().stdout
    };
    let refused = knock(NOBODY);
    assert!(
        refused.starts_with("0\n") && refused.contains("belongs to another user"),
        "{refused}"
    );
    // Where others may enter, firn itself would refuse it.
    std::fs::set_permissions(sandbox.runtime(), PermissionsExt::from_mode(0o700)).unwrap();
    mount.umount();
}
