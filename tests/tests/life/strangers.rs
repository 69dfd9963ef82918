//! What another local user put where Firn looks is not believed: runtime directories, sockets, mounts.
//!
//! The other user is a number without an account. What it plants lies in the sandbox or bears that number.

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use firn_client::RuntimeFiles;
use firn_client::trees::path_bytes;
use firn_format::data_socket::{STUB_MAGIC, StubTree};
use firn_protocol::PROTOCOL_VERSION;
use firn_tests::command::copy_program;
use firn_tests::mount::patient;
use firn_tests::sandbox::{firn_binary, is_mounted, kill, preload_library, unmount_lazily};
use firn_tests::{FirnMount, Outcome, Sandbox, run, wait_until};
use rustix::mount::{MountFlags, mount};
use zerocopy::IntoBytes;

const LIMIT: Duration = Duration::from_secs(20);

/// A user that no other test is.
fn stranger() -> u32 {
    100_000 + std::process::id() % 1_000_000
}

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("chmod");
}

fn give(path: &Path, uid: u32) {
    std::os::unix::fs::chown(path, Some(uid), Some(uid)).expect("chown");
}

/// A process of another user that listens, writes down what it is sent and answers as a firnd would.
struct Listener {
    child: Child,
    log: PathBuf,
}

impl Listener {
    const SCRIPT: &str = r#"
import os, socket, sys
path, kind, log, hello = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4].encode()
end = socket.socket(socket.AF_UNIX, kind)
end.bind(path)
os.chmod(path, 0o777)
end.listen(64)
log = open(log, "ab", 0)
print("ready", flush=True)
while True:
    client, _ = end.accept()
    while True:
        try: data = client.recv(65536)
        except ConnectionResetError: break
        if not data: break
        log.write(data)
        if kind != socket.SOCK_STREAM: break
        client.sendall(hello if b'"hello"' in data else b'{"reply":"done"}\n')
    client.close()
"#;

    fn start(path: &Path, kind: i32, uid: u32) -> Self {
        let log = path.with_extension("heard");
        let hello = format!(
            "{{\"reply\":\"hello\",\"protocol\":{PROTOCOL_VERSION},\"version\":\"0.1.0\",\"pid\":1,\"incarnation\":\"x\"}}\n"
        );
        let mut python = Command::new("/usr/bin/python3");
        python
            .args(["-c", Self::SCRIPT])
            .arg(path)
            .arg(kind.to_string())
            .arg(&log)
            .arg(hello);
        python.stdout(Stdio::piped()).uid(uid).gid(uid);
        let mut child = python.spawn().expect("python3");
        let mut ready = [0; 5];
        let stdout = child.stdout.as_mut().expect("piped");
        std::io::Read::read_exact(stdout, &mut ready).expect("it listens");
        Self { child, log }
    }

    /// What it was sent so far.
    fn heard(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).expect("its log")).into_owned()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Writes down a tree that makes every file in /dev/shm a stub of the listener at `socket`.
fn forge_tree(file: &Path, socket: &Path, backing: &Path) {
    let device = fs::metadata("/dev/shm").expect("/dev/shm").dev();
    let mut place = [0; 112];
    let bytes = socket.as_os_str().as_bytes();
    place[..bytes.len()].copy_from_slice(bytes);
    let tree = StubTree {
        magic: STUB_MAGIC,
        device_major: rustix::fs::major(device),
        device_minor: rustix::fs::minor(device),
        whole_device: 1,
        pid: 1,
        refuses_locks: 0,
        unused: 0,
        arena: [7; 16],
        socket: place,
        prefix: path_bytes(Path::new("/dev/shm")).expect("short"),
        backing: path_bytes(backing).expect("short"),
    };
    fs::write(file, tree.as_bytes()).expect("write the tree");
    chmod(file, 0o600);
}

/// `head` of a file in /dev/shm, by the preload library with this runtime directory.
fn read_preloaded(sandbox: &Sandbox, runtime: &Path) -> Outcome {
    let secret = sandbox.runtime().join("secret");
    fs::write(&secret, "the secret").expect("write");
    chmod(&secret, 0o600);
    let mut head = Command::new("head");
    sandbox.environment(&mut head);
    head.env("LD_PRELOAD", preload_library())
        .env("FIRN_PRELOAD_REPORT", "1")
        .env("FIRN_PRELOAD_WAIT", "1");
    run(head
        .env("FIRN_RUNTIME_DIR", runtime)
        .args(["-c", "30"])
        .arg(&secret))
}

/// Proves S-priv-5.
#[test]
fn regression_the_preload_library_does_not_believe_a_runtime_directory_of_another_user() {
    let sandbox = Sandbox::new("squatted");
    chmod(sandbox.path(), 0o755);
    let squatted = sandbox.mkdir("squatted");
    give(&squatted, stranger());
    let listener = Listener::start(&squatted.join("x.data"), libc::SOCK_SEQPACKET, stranger());
    let stub = squatted.join("x.stub");
    forge_tree(&stub, &squatted.join("x.data"), &sandbox.join("backing"));
    give(&stub, stranger());
    for mode in [0o700, 0o755, 0o777] {
        chmod(&squatted, mode);
        let outcome = read_preloaded(&sandbox, &squatted);
        assert_eq!(
            (outcome.code, outcome.stdout.as_str()),
            (0, "the secret"),
            "{outcome}"
        );
        let told = outcome
            .stderr
            .matches("the runtime directory is not")
            .count();
        assert_eq!(told, 1, "{outcome}");
    }
    assert_eq!(listener.heard(), "", "nothing may be sent to another user");
    // The same through a symbolic link, and open to others although it is ours.
    let link = sandbox.join("link");
    std::os::unix::fs::symlink(&squatted, &link).expect("symlink");
    read_preloaded(&sandbox, &link)
        .ok()
        .says("the runtime directory is not");
    let open = sandbox.mkdir("open");
    chmod(&open, 0o777);
    forge_tree(
        &open.join("x.stub"),
        &squatted.join("x.data"),
        &sandbox.join("backing"),
    );
    read_preloaded(&sandbox, &open)
        .ok()
        .says("the runtime directory is not");
    read_preloaded(&sandbox, Path::new("squatted"))
        .ok()
        .says("is not an absolute path");
    assert_eq!(listener.heard(), "");
}

/// A user that mounts FUSE tells the library where its socket is: the kernel tells which user listens there. Proves
/// S-priv-5.
#[test]
fn regression_the_preload_library_says_nothing_to_a_socket_of_another_user() {
    let sandbox = Sandbox::new("fake-data");
    chmod(sandbox.path(), 0o755);
    let place = sandbox.mkdir("place");
    give(&place, stranger());
    let listener = Listener::start(&place.join("x.data"), libc::SOCK_SEQPACKET, stranger());
    let stub = sandbox.runtime().join("x.stub");
    forge_tree(&stub, &place.join("x.data"), &sandbox.join("backing"));
    let outcome = read_preloaded(&sandbox, sandbox.runtime());
    assert!(
        outcome.stderr.contains("another user's process listens"),
        "{outcome}"
    );
    assert_eq!(listener.heard(), "", "nothing may be sent to another user");
    // Files in the directory are looked at, too.
    give(&stub, stranger());
    let outcome = read_preloaded(&sandbox, sandbox.runtime())
        .ok()
        .says("is not one that only you may change");
    assert_eq!(outcome.stdout, "the secret");
}

/// Proves S-priv-5.
#[test]
fn regression_firn_does_not_believe_a_runtime_directory_of_another_user() {
    let sandbox = Sandbox::new("squatted-cli");
    chmod(sandbox.path(), 0o755);
    let squatted = sandbox.mkdir("squatted");
    give(&squatted, stranger());
    let backing = sandbox.join("backing").canonicalize().expect("canonical");
    let files = RuntimeFiles::in_dir(&squatted, &backing, None);
    let listener = Listener::start(&files.socket, libc::SOCK_STREAM, stranger());
    forge_tree(&files.stub, &files.socket, &backing);
    give(&files.stub, stranger());
    chmod(&squatted, 0o755);
    let ask = |args: &[&OsStr]| {
        let mut command = sandbox.firn(args);
        run(command.env("FIRN_RUNTIME_DIR", &squatted))
    };
    let status = OsStr::new("status");
    let wait = OsStr::new("wait");
    let umount = OsStr::new("umount");
    for args in [
        &[status][..],
        &[status, backing.as_os_str()],
        &[wait, backing.as_os_str()],
    ] {
        ask(args)
            .code(1)
            .says(&format!("belongs to user {} instead of user 0", stranger()));
    }
    ask(&[umount, backing.as_os_str()])
        .code(1)
        .says("belongs to user");
    let recover = [OsStr::new("recover"), backing.as_os_str()];
    ask(&recover).code(1).says("belongs to user");
    let mnt = sandbox.join("mnt");
    let mount = [OsStr::new("mount"), backing.as_os_str(), mnt.as_os_str()];
    ask(&mount).code(1).says("belongs to user");
    assert_eq!(listener.heard(), "", "nothing may be sent to another user");
}

#[test]
fn regression_a_relative_runtime_directory_is_refused_by_all_verbs() {
    let sandbox = Sandbox::new("relative");
    let backing = sandbox.join("backing");
    let mnt = sandbox.join("mnt");
    let all: [&[&OsStr]; 4] = [
        &[OsStr::new("mount"), backing.as_os_str(), mnt.as_os_str()],
        &[OsStr::new("status")],
        &[OsStr::new("recover"), backing.as_os_str()],
        &[OsStr::new("wait"), backing.as_os_str()],
    ];
    for args in all {
        let mut command = sandbox.firn(args);
        command
            .env("FIRN_RUNTIME_DIR", "run")
            .current_dir(sandbox.path());
        run(&mut command).code(1).says("not an absolute path");
        assert!(
            !sandbox.join("run").exists() && !is_mounted(&mnt),
            "{args:?}"
        );
    }
}

/// A FUSE mount as another user's: it is never answered, and nothing of Firn may ask it.
struct FakeMount {
    point: PathBuf,
    _device: File,
}

impl FakeMount {
    fn new(point: &Path, source: &Path, uid: u32) -> Self {
        let device = File::options()
            .read(true)
            .write(true)
            .open("/dev/fuse")
            .expect("/dev/fuse");
        let fd = std::os::fd::AsRawFd::as_raw_fd(&device);
        let data = format!("fd={fd},rootmode=40000,user_id={uid},group_id={uid}\0");
        let data = std::ffi::CStr::from_bytes_with_nul(data.as_bytes()).expect("one zero byte");
        mount(
            source,
            point,
            "fuse.firn",
            MountFlags::NOSUID | MountFlags::NODEV,
            data,
        )
        .expect("mount");
        Self {
            point: point.to_owned(),
            _device: device,
        }
    }
}

impl Drop for FakeMount {
    fn drop(&mut self) {
        unmount_lazily(&self.point);
    }
}

/// A directory that goes away.
struct Made(PathBuf);

impl Drop for Made {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// Proves S-priv-6.
#[test]
fn regression_a_fuse_mount_of_another_user_does_not_answer_for_a_backing() {
    let sandbox = Sandbox::new("fake-mount");
    chmod(sandbox.path(), 0o755);
    let backing = sandbox.join("backing").canonicalize().expect("canonical");
    fs::write(backing.join("x"), "x").expect("write");
    let point = sandbox.mkdir("fake");
    let runtime = Made(PathBuf::from(format!("/dev/shm/firn-{}", stranger())));
    fs::create_dir(&runtime.0).expect("mkdir");
    give(&runtime.0, stranger());
    chmod(&runtime.0, 0o755);
    let socket = RuntimeFiles::in_dir(&runtime.0, &backing, None).socket;
    let listener = Listener::start(&socket, libc::SOCK_STREAM, stranger());
    let _fake = FakeMount::new(&point, &backing, stranger());
    let program = sandbox.join("firn");
    copy_program(&firn_binary(), &program);
    chmod(&program, 0o755);
    let ask = |uid: u32, verb: &str, path: &Path| {
        let mut command = Command::new(&program);
        sandbox.environment(&mut command);
        command.env_remove("FIRN_RUNTIME_DIR").uid(uid).gid(uid);
        run(command.arg(verb).arg(path))
    };
    let victim = stranger() + 1_000_000;
    let file = backing.join("x");
    let whose = format!("belongs to user {}", stranger());
    for verb in ["wait", "status", "drain", "umount", "ls"] {
        let path = if verb == "umount" { &backing } else { &file };
        ask(victim, verb, path).code(1).says(&whose);
        ask(victim, verb, &point).code(1).says(&whose);
    }
    let listed = ask(victim, "status", &file);
    assert!(!listed.stdout.contains("fake"), "{listed}");
    assert_eq!(listener.heard(), "", "nothing may be sent to another user");
    // Root may ask, and is told which user; not where any user may put something into that user's directory.
    ask(0, "wait", &file).code(1).says("lets others in");
    chmod(&runtime.0, 0o700);
    ask(0, "wait", &file).code(0).says(&whose);
    let heard = listener.heard();
    // Of its own mount, root hears no other.
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    fs::write(mount.join("y"), "y").expect("write");
    let told = mount.wait("durable", &backing.join("y")).ok().stderr;
    assert!(!told.contains("belongs to user"), "{told}");
    assert_eq!(fs::read(backing.join("y")).expect("it is there"), b"y");
    assert_eq!(listener.heard(), heard);
    mount.umount();
    // Where a user other than that one listens, nothing is sent.
    drop(listener);
    for left in [socket.clone(), socket.with_extension("heard")] {
        fs::remove_file(left).expect("what the first one left");
    }
    chmod(&runtime.0, 0o777);
    let other = Listener::start(&socket, libc::SOCK_STREAM, victim);
    chmod(&runtime.0, 0o700);
    ask(0, "wait", &file)
        .code(1)
        .says(&format!("runs as user {victim}"));
    assert_eq!(other.heard(), "");
}

/// Proves S-error-9, S-error-18.
#[test]
fn regression_umount_leaves_a_living_mount_alone_whose_socket_it_does_not_find() {
    let sandbox = Sandbox::new("no-socket");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    fs::write(mount.join("held"), vec![7; 5000]).expect("write");
    let other = sandbox.mkdir("other-runtime");
    chmod(&other, 0o700);
    for force in [&[][..], &[OsStr::new("--force")]] {
        let mut args = vec![OsStr::new("umount")];
        args.extend(force);
        args.push(mount.path().as_os_str());
        let mut command = sandbox.firn(args);
        run(command.env("FIRN_RUNTIME_DIR", &other))
            .code(1)
            .says("lives, but its socket is not in");
        assert!(is_mounted(mount.path()));
    }
    let mut status = sandbox.firn([OsStr::new("status"), mount.path().as_os_str()]);
    run(status.env("FIRN_RUNTIME_DIR", &other))
        .code(1)
        .says("lives, but its socket is not in");
    assert_eq!(mount.status().held_bytes, 5000);
    // A cleaner took it.
    let socket = RuntimeFiles::in_dir(
        sandbox.runtime(),
        &mount.backing().canonicalize().expect("canonical"),
        None,
    );
    fs::remove_file(socket.socket).expect("remove the socket");
    sandbox
        .run([OsStr::new("umount"), mount.path().as_os_str()])
        .code(1)
        .says("SIGTERM");
    assert!(is_mounted(mount.path()));
    assert_eq!(fs::read(mount.join("held")).expect("read").len(), 5000);
    // What the message says helps.
    kill(mount.pid(), libc::SIGTERM);
    mount.wait_for_end();
    wait_until("it is unmounted", LIMIT, || !is_mounted(mount.path()));
    assert_eq!(
        fs::read(mount.backing().join("held")).expect("drained"),
        vec![7; 5000]
    );
}

/// Proves S-error-9, S-error-19.
#[test]
fn regression_umount_of_a_dead_mount_does_not_say_that_all_is_drained_where_it_finds_no_arena() {
    let sandbox = Sandbox::new("dead-elsewhere");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    fs::write(mount.join("held"), vec![7; 5000]).expect("write");
    let other = sandbox.mkdir("other-runtime");
    chmod(&other, 0o700);
    kill(mount.pid(), libc::SIGKILL);
    mount.wait_for_end();
    let mut command = sandbox.firn([OsStr::new("umount"), mount.path().as_os_str()]);
    run(command.env("FIRN_RUNTIME_DIR", &other))
        .code(3)
        .says("its arena is not in");
    assert!(!is_mounted(mount.path()));
    sandbox
        .run([OsStr::new("recover"), mount.backing().as_os_str()])
        .ok();
    assert_eq!(
        fs::read(mount.backing().join("held")).expect("drained"),
        vec![7; 5000]
    );
    mount.abandon();
}

/// Proves S-fsync-5.
#[test]
fn regression_a_path_that_is_not_utf_8_is_never_taken_for_another() {
    let sandbox = Sandbox::new("bytes");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let name = OsStr::from_bytes(b"\xff\xfe");
    fs::write(mount.join(name), "held").expect("write");
    fs::write(mount.join("\u{fffd}\u{fffd}"), "decoy").expect("write");
    mount.wait("durable", &mount.join(name)).ok();
    assert_eq!(
        fs::read(mount.backing().join(name)).expect("drained"),
        b"held"
    );
    assert_eq!(mount.status().held_bytes, 5, "the other one is not drained");
    assert_eq!(
        fs::read(mount.backing().join("\u{fffd}\u{fffd}")).expect("a name"),
        b""
    );
    mount.umount();
}

/// Proves S-priv-5.
#[test]
fn regression_firn_run_does_not_take_a_link_of_another_user_for_its_prefix() {
    let sandbox = Sandbox::new("run-link");
    let shared = sandbox.mkdir("shared");
    let target = sandbox.mkdir("target");
    let link = shared.join("firn-run-0");
    std::os::unix::fs::symlink(&target, &link).expect("symlink");
    std::os::unix::fs::lchown(&link, Some(stranger()), Some(stranger())).expect("lchown");
    let mut command = sandbox.firn([
        "run",
        "--memory",
        "16M",
        "--",
        "sh",
        "-c",
        "echo $FIRN_PREFIX",
    ]);
    let outcome = run(command.env("TMPDIR", &shared)).ok();
    let expected = sandbox.runtime().join("run");
    assert_eq!(outcome.stdout.trim(), expected.to_str().expect("UTF-8"));
}
