//! A mount that is also in other mount namespaces, as containers have them, or bound to another place.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use firn_tests::sandbox::{is_mounted, unmount_lazily};
use firn_tests::{FirnMount, Outcome, Sandbox, run};

const OPTIONS: &str = "arena-size=16M,chunk-size=1M";

/// A shell in a mount namespace that was made for it; ends with the value.
struct Container {
    shell: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Container {
    /// Runs each line that it gets, and answers with its exit status.
    fn new() -> Self {
        let script = "cd /; echo ready; while read -r line; do eval \"$line\" >&2; echo $?; done";
        let mut shell = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "bash", "-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare");
        let input = shell.stdin.take().expect("piped");
        let output = BufReader::new(shell.stdout.take().expect("piped"));
        let mut container = Self {
            shell,
            input,
            output,
        };
        assert_eq!(container.answer(), "ready");
        container
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("an answer");
        line.trim_end().to_owned()
    }

    /// The exit status of a command.
    fn run(&mut self, command: &str) -> i32 {
        writeln!(self.input, "{command}").expect("the shell reads");
        self.answer().parse().expect("a number")
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}

/// What `firn umount` says, at the first try.
fn umount(sandbox: &Sandbox, point: &Path) -> Outcome {
    sandbox.run(["umount".as_ref(), point.as_os_str()])
}

/// Checks that nothing of a mount is left in memory, and that no process was killed.
fn assert_ended(sandbox: &Sandbox, mount_point: &Path) {
    assert!(!is_mounted(mount_point));
    assert_eq!(sandbox.arenas(), [] as [std::path::PathBuf; 0]);
    // It lists the mounts of other tests too.
    let status = sandbox.run(["status"]);
    let place = sandbox.path().to_str().expect("text");
    assert!(!status.stdout.contains(place), "{status}");
}

/// Proves S-error-24.
#[test]
fn regression_an_unmount_ends_the_mount_in_namespaces_that_do_not_use_it() {
    let sandbox = Sandbox::new("namespaces");
    let mount = FirnMount::new(&sandbox, OPTIONS);
    let point = mount.path().to_owned();
    let mut container = Container::new();
    fs::write(mount.join("file"), "bytes").expect("write");
    assert_eq!(container.run(&format!("cat {}/file", point.display())), 0);
    let backing = mount.umount();
    assert_ended(&sandbox, &point);
    assert_eq!(fs::read(backing.join("file")).expect("read"), b"bytes");
    assert_ne!(container.run(&format!("cat {}/file", point.display())), 0);
}

/// Proves S-error-23.
#[test]
fn regression_an_unmount_sees_users_of_the_mount_in_another_namespace() {
    let sandbox = Sandbox::new("namespaceusers");
    let mount = FirnMount::new(&sandbox, OPTIONS);
    let point = mount.path().to_owned();
    let mut container = Container::new();
    let name = format!("bash (process {})", container.shell.id());
    let uses = [("exec 3>>{}/file", "exec 3>&-"), ("cd {}", "cd /")];
    for (begin, end) in uses {
        assert_eq!(
            container.run(&begin.replace("{}", point.to_str().expect("text"))),
            0
        );
        let refused = umount(&sandbox, &point).code(11);
        assert!(refused.stderr.contains(&name), "{refused}");
        assert!(is_mounted(&point), "it stays mounted");
        assert_eq!(
            container.run("echo one >&3 2>/dev/null || echo two > two"),
            0
        );
        assert_eq!(container.run(end), 0);
    }
    let backing = mount.umount();
    assert_ended(&sandbox, &point);
    assert_eq!(fs::read(backing.join("file")).expect("read"), b"one\n");
    assert_eq!(fs::read(backing.join("two")).expect("read"), b"two\n");
}

/// Proves S-error-24.
#[test]
fn a_forced_end_takes_files_from_programs_in_other_namespaces_and_loses_nothing() {
    let sandbox = Sandbox::new("namespaceforce");
    let mount = FirnMount::new(&sandbox, OPTIONS);
    let point = mount.path().to_owned();
    let mut container = Container::new();
    assert_eq!(
        container.run(&format!("exec 3>>{}/file; echo one >&3", point.display())),
        0
    );
    let umount = ["umount".as_ref(), "--force".as_ref(), point.as_os_str()];
    sandbox.run(umount).ok();
    mount.wait_for_end();
    assert_ended(&sandbox, &point);
    assert_ne!(container.run("echo two >&3"), 0);
    let file = mount.backing().join("file");
    assert_eq!(fs::read(file).expect("read"), b"one\n");
    mount.abandon();
}

/// A bind mount that is taken away with the value.
struct Bound<'a>(&'a Path);

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        unmount_lazily(self.0);
    }
}

/// Proves S-error-23, S-error-24.
#[test]
fn regression_a_bind_mount_is_seen_and_ends_with_the_mount() {
    let sandbox = Sandbox::new("bound");
    let mount = FirnMount::new(&sandbox, OPTIONS);
    let point = mount.path().to_owned();
    let place = sandbox.mkdir("bound");
    run(Command::new("mount").arg("--bind").arg(&point).arg(&place)).ok();
    let _bound = Bound(&place);
    let file = fs::File::create(place.join("file")).expect("create");
    umount(&sandbox, &point).code(11);
    drop(file);
    fs::write(place.join("file"), "bytes").expect("write");
    let backing = mount.umount();
    assert_ended(&sandbox, &point);
    assert_eq!(fs::read(backing.join("file")).expect("read"), b"bytes");
    assert!(!is_mounted(&place), "the copy went with it");
}

/// Binds the mount at the first argument to the second one, where its id 0 is 1000 (mount_setattr(2)).
const ID_MAPPED_BIND: &str = r#"
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    result = libc.syscall(*arguments)
    if result < 0:
        sys.exit(f"system call {arguments[0]}: {os.strerror(ctypes.get_errno())}")
    return result
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
AT_EMPTY_PATH, CLONE, MOVE_FROM_EMPTY, IDMAP, NEWUSER = 0x1000, 1, 4, 0x100000, 0x10000000
ready, go = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    if libc.unshare(NEWUSER):
        os._exit(1)
    os.write(ready[1], b"x")
    os.read(go[0], 1)
    os._exit(0)
os.read(ready[0], 1)
for kind in ["uid", "gid"]:
    open(f"/proc/{child}/{kind}_map", "w").write("0 1000 1")
namespace = os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
os.write(go[1], b"x")
os.waitpid(child, 0)
tree = call(OPEN_TREE, -100, sys.argv[1].encode(), CLONE | os.O_CLOEXEC)
attributes = struct.pack("QQQQ", IDMAP, 0, 0, namespace)
call(MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, attributes, len(attributes))
call(MOVE_MOUNT, tree, b"", -100, sys.argv[2].encode(), MOVE_FROM_EMPTY)
"#;

/// Proves S-attr-20.
#[test]
fn regression_a_mount_can_be_id_mapped() {
    let sandbox = Sandbox::new("idmapped");
    let mount = FirnMount::new(&sandbox, &format!("{OPTIONS},allow-other"));
    fs::write(mount.join("file"), "bytes").expect("write");
    let place = sandbox.mkdir("mapped");
    // Root of the mount is user 1000 where it is mapped.
    run(Command::new("/usr/bin/python3")
        .args(["-c", ID_MAPPED_BIND])
        .args([mount.path(), &place]))
    .ok();
    {
        let _bound = Bound(&place);
        let owners = |path: &Path| {
            let shown = run(Command::new("stat").args(["-c", "%u:%g"]).arg(path)).ok();
            shown.stdout.trim().to_owned()
        };
        assert_eq!(owners(&place.join("file")), "1000:1000");
        let script = "echo new > new && mkdir dir && echo more >> file && ln -s file link && mv new moved && chmod 600 moved";
        run(Command::new("setpriv")
            .args([
                "--reuid=1000",
                "--regid=1000",
                "--clear-groups",
                "sh",
                "-c",
                script,
            ])
            .current_dir(&place))
        .ok();
        for name in ["moved", "dir", "file"] {
            assert_eq!(owners(&mount.join(name)), "0:0", "{name}");
            assert_eq!(owners(&place.join(name)), "1000:1000", "{name}");
        }
        // A user that is not mapped makes nothing there.
        let refused = run(Command::new("touch").arg(place.join("no")));
        assert_ne!(refused.code, 0, "{refused}");
    }
    let backing = mount.umount();
    assert_eq!(
        fs::read(backing.join("file")).expect("read"),
        b"bytesmore\n"
    );
    assert_eq!(fs::read(backing.join("moved")).expect("read"), b"new\n");
}

/// Proves S-error-24: the kernel gives the device number of a file system that is gone to the next one, which may be
/// another firnd's.
#[test]
fn regression_an_unmount_ends_no_mount_that_begins_meanwhile() {
    const MOUNTS: usize = 25;
    let mount_again_and_again = |name: &str| {
        let sandbox = Sandbox::new(name);
        for round in 0..MOUNTS {
            let mount = FirnMount::new(&sandbox, OPTIONS);
            let content = format!("{name} {round}");
            fs::write(mount.join("file"), &content).expect("write");
            let backing = mount.umount();
            assert_eq!(
                fs::read_to_string(backing.join("file")).expect("read"),
                content
            );
        }
    };
    std::thread::scope(|scope| {
        for name in ["meanwhile-a", "meanwhile-b", "meanwhile-c"] {
            scope.spawn(move || mount_again_and_again(name));
        }
    });
}
