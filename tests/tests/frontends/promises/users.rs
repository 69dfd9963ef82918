//! Users that reach a mount, its socket and its files; two hosts over one backing.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use firn_tests::faultfs::FaultFs;
use firn_tests::fsops::{assert_same_bytes, read};
use firn_tests::mount::{SMALL, patient};
use firn_tests::random::bytes;
use firn_tests::{FirnMount, Outcome, Sandbox, run};

const NOBODY: u32 = 65534;

/// Runs a shell script as the user `nobody`, which may pass through the sandbox.
pub fn as_nobody(sandbox: &Sandbox, script: &str) -> Outcome {
    chmod(sandbox.path(), 0o755);
    let mut command = Command::new("setpriv");
    sandbox.environment(&mut command);
    run(command.args([
        "--reuid",
        "65534",
        "--regid",
        "65534",
        "--clear-groups",
        "sh",
        "-c",
        script,
    ]))
}

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("chmod");
}

/// Proves S-priv-2.
#[test]
fn the_socket_refuses_another_user_also_where_its_mode_would_let_him() {
    let sandbox = Sandbox::new("socket");
    let mount = FirnMount::new(&sandbox, SMALL);
    let entries = fs::read_dir(sandbox.runtime())
        .expect("readdir")
        .map(|e| e.expect("entry").path());
    let socket = entries
        .into_iter()
        .find(|path| path.extension().is_some_and(|e| e == "sock"))
        .expect("a socket");
    let ask = r#"import socket,sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
try: s.sendall(b'{\"request\":\"status\"}\\n')
except BrokenPipeError: pass
print(s.makefile().readline())"#;
    let ask = format!("python3 -c \"{ask}\" {}", socket.display());
    assert_ne!(as_nobody(&sandbox, &ask).code, 0, "the directory is closed");
    chmod(sandbox.runtime(), 0o711);
    chmod(&socket, 0o666);
    let answer = as_nobody(&sandbox, &ask);
    assert!(
        answer.stdout.contains("another user") && !answer.stdout.contains("held_bytes"),
        "{answer}"
    );
    assert!(
        run(Command::new("sh").args(["-c", &ask]))
            .ok()
            .stdout
            .contains("held_bytes")
    );
    chmod(sandbox.runtime(), 0o700);
    mount.umount();
}

/// Proves S-priv-3.
#[test]
fn without_allow_other_nobody_else_reaches_the_mount() {
    let sandbox = Sandbox::new("alone");
    let mount = FirnMount::new(&sandbox, SMALL);
    let path = mount.join("file");
    fs::write(&path, "text").expect("write");
    chmod(&path, 0o666);
    for call in ["cat", "stat", "touch"] {
        let outcome = as_nobody(&sandbox, &format!("{call} {}", path.display()));
        assert_ne!(outcome.code, 0, "{outcome}");
        outcome.says("permission denied");
    }
    as_nobody(&sandbox, &format!("ls {}", mount.path().display())).says("permission denied");
    mount.umount();
}

/// Proves S-priv-4.
#[test]
fn with_allow_other_the_kernel_checks_and_new_files_belong_to_their_maker() {
    let sandbox = Sandbox::new("others");
    let mount = FirnMount::new(&sandbox, &format!("{SMALL},allow-other"));
    fs::create_dir(mount.join("shared")).expect("mkdir");
    chmod(&mount.join("shared"), 0o777);
    for (name, mode) in [("secret", 0o600), ("public", 0o644)] {
        fs::write(mount.join(name), name).expect("write");
        chmod(&mount.join(name), mode);
    }
    let shell = |script: &str| {
        as_nobody(
            &sandbox,
            &format!("cd {} && {script}", mount.path().display()),
        )
    };
    assert_eq!(shell("cat public").ok().stdout, "public");
    for refused in [
        "cat secret",
        "echo x >> public",
        "mkdir here",
        "mv public shared/",
    ] {
        assert_ne!(shell(refused).code, 0, "{refused}");
    }
    shell("echo text > shared/file && mkdir shared/dir && ln -s file shared/link").ok();
    for name in ["file", "dir", "link"] {
        let made = fs::symlink_metadata(mount.backing().join("shared").join(name)).expect("stat");
        assert_eq!((made.uid(), made.gid()), (NOBODY, NOBODY), "{name}");
    }
    mount.umount();
}

/// Two servers of one directory are two file systems to the kernel, whose locks do not meet: as with a
/// network file system on two hosts.
/// Proves S-share-2.
#[test]
fn two_hosts_over_one_backing_see_each_others_files_when_they_are_drained() {
    let first = Sandbox::new("node1");
    let second = Sandbox::new("node2");
    let source = first.mkdir("source");
    let view = FaultFs::of(&first, source.clone());
    let other_view = FaultFs::of(&second, source);
    let options = patient("close=held,attr-timeout=0");
    let one = FirnMount::over(&first, view.path(), &options);
    let two = FirnMount::over(&second, other_view.path(), &options);
    fs::write(one.join("file"), bytes(1, 100_000)).expect("write on one host");
    fs::write(two.join("other"), bytes(2, 80_000)).expect("write on the other");
    assert_eq!(
        fs::metadata(two.join("file"))
            .expect("its name is there")
            .len(),
        0
    );
    one.wait("drained", &one.join("file")).ok();
    two.wait("drained", &two.join("other")).ok();
    assert_same_bytes("of the first", &read(&two.join("file")), &bytes(1, 100_000));
    assert_same_bytes(
        "of the second",
        &read(&one.join("other")),
        &bytes(2, 80_000),
    );
    one.umount();
    two.umount();
}
