//! The packages of scripts/dist, each installed, used and removed in a clean root.
//!
//! The root is this machine's own under an empty layer of an overlay, in namespaces of its own: the system is there
//! with its package manager, and what the package leaves behind is what the layer holds at the end.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use firn_tests::sandbox::firn_binary;
use firn_tests::{Outcome, Sandbox, run};

/// Enters the root ($1, with the layer $2 and its work directory $3), with the files $4… in /tmp, and runs /tmp/steps.
const ENTER: &str = r#"
set -eu
root=$1 layer=$2 work=$3
shift 3
mount -t overlay clean -o "lowerdir=/,upperdir=$layer,workdir=$work" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
cp "$@" "$root/tmp"
exec chroot "$root" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C \
    bash -euo pipefail /tmp/steps
"#;

/// What the steps of both packages begin with. A machine with an installed Firn is no clean root.
const BEGIN: &str = r#"
refuse() { # COMMAND…: it must fail (`!` does not end a script that runs with -e)
    if "$@"; then
        echo "this should have failed: $*" >&2
        exit 1
    fi
}
refuse command -v firn
"#;

/// What is done with it once it is installed. `mount_it` and `unmount_it` are the package's own ways.
const USE: &str = r#"
[[ $(firn version) == firn\ * ]]
man=$(dirname "$(command -v firn)")/../share/man
compgen -G "$man/man1/firn-mount.1*" && compgen -G "$man/man8/mount.firn.8*"
mkdir /tmp/backing /tmp/ckpt
mount_it
mountpoint /tmp/ckpt
head -c 3000000 /dev/urandom >/tmp/ckpt/file
firn status /tmp/ckpt
cc -Wall -Werror -o /tmp/program /tmp/program.c $(pkg-config --cflags --libs firn)
/tmp/program /tmp/ckpt
cp /tmp/ckpt/file /tmp/copy
unmount_it
refuse mountpoint -q /tmp/ckpt
cmp /tmp/copy /tmp/backing/file
firn run --memory 64M -- bash -c 'echo kept >"$FIRN_PREFIX/x" && [[ $(<"$FIRN_PREFIX/x") == kept ]]' 2>/tmp/messages
refuse grep 'not installed' /tmp/messages
status=0
firn bench ingest 2>/tmp/messages || status=$?
[[ $status == 1 ]] && grep 'firn-bench is not installed' /tmp/messages
# One that has ended and is not waited for yet has a name, and no command line.
for process in /proc/[0-9]*; do
    refuse grep -szx firnd "$process/cmdline"
done
"#;

/// What they end with.
const END: &str = "hash -r\nrefuse command -v firn\n";

/// Uses the C library.
const PROGRAM: &str = r#"
#include <firn.h>

int main(int argc, char **argv)
{
    firn *mount;
    int error = argc == 2 ? firn_open(argv[1], &mount) : -1;
    if (error == 0)
        firn_close(mount);
    return error;
}
"#;

/// Where Debian's tools note what they did.
const NOTES: [&str; 5] = [
    "etc/ld.so.cache",
    "var/cache",
    "var/lib/dpkg",
    "var/log",
    "var/lib/systemd",
];

/// What scripts/dist made of the binaries under test.
fn make_packages(sandbox: &Sandbox) -> Vec<PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/dist");
    let to = sandbox.mkdir("dist");
    let binary = firn_binary();
    let from = binary.parent().expect("a directory");
    let made = run(Command::new(script)
        .arg("--from")
        .arg(from)
        .arg("--to")
        .arg(&to))
    .ok();
    let packages: Vec<_> = made.stdout.lines().map(PathBuf::from).collect();
    assert_eq!(packages.len(), 2, "{made:?}");
    packages
}

/// Runs `steps` in a clean root, where `files` are in /tmp; gives what is left in the layer.
fn run_in_clean_root(
    sandbox: &Sandbox,
    name: &str,
    files: &[PathBuf],
    steps: &str,
) -> (Outcome, Vec<String>) {
    let root = sandbox.mkdir(&format!("{name}-root"));
    let steps_file = sandbox.join("steps");
    fs::write(&steps_file, steps).expect("write the steps");
    let program = sandbox.join("program.c");
    fs::write(&program, PROGRAM).expect("write the program");
    let layer = sandbox.runtime().join(format!("{name}-layer"));
    let work = sandbox.runtime().join(format!("{name}-work"));
    for dir in [&layer, &work] {
        fs::create_dir(dir).expect("mkdir");
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).expect("chmod");
    }
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private"]);
    command.args(["--pid", "--fork", "--kill-child"]);
    command
        .args(["sh", "-c", ENTER, "enter"])
        .args([&root, &layer, &work]);
    command.args(files).args([&steps_file, &program]);
    sandbox.environment(&mut command);
    let outcome = run(&mut command);
    let mut left = Vec::new();
    find_leftovers(&layer, Path::new(""), &mut left);
    (outcome, left)
}

/// Paths of files that `layer` holds below `dir`, and of directories that the machine has not.
fn find_leftovers(layer: &Path, dir: &Path, left: &mut Vec<String>) {
    for entry in fs::read_dir(layer.join(dir)).expect("the layer") {
        let entry = entry.expect("an entry");
        let path = dir.join(entry.file_name());
        if NOTES.iter().any(|note| path.starts_with(note)) {
            continue;
        }
        let kind = entry.file_type().expect("its kind");
        let machine = Path::new("/").join(&path);
        // Of a file that was there and is removed, or was a mount point, the layer has a mark: a character device.
        let is_mark = kind.is_char_device() && !machine.exists();
        if kind.is_dir() {
            find_leftovers(layer, &path, left);
        }
        let is_shared_dir = kind.is_dir() && machine.is_dir();
        if !is_mark && !is_shared_dir {
            left.push(path.display().to_string());
        }
    }
}

fn file_with_extension(packages: &[PathBuf], extension: &str) -> PathBuf {
    let found = packages
        .iter()
        .find(|path| path.extension().is_some_and(|of| of == extension));
    found.expect("a package").clone()
}

#[test]
fn packages_are_installed_used_and_removed_and_leave_nothing() {
    let sandbox = Sandbox::new("dist");
    let packages = make_packages(&sandbox);

    let deb = file_with_extension(&packages, "deb");
    let install_deb = r#"
dpkg --install /tmp/*.deb
dpkg --verify firn
mount_it() { mount -t firn -o arena-size=64M /tmp/backing /tmp/ckpt; }
unmount_it() { umount /tmp/ckpt; }
"#;
    let remove_deb = "dpkg --purge firn\n";
    let steps = [BEGIN, install_deb, USE, remove_deb, END].concat();
    let (outcome, left) = run_in_clean_root(&sandbox, "deb", &[deb], &steps);
    outcome.ok();
    assert!(left.is_empty(), "the package leaves {left:#?}");

    let tarball = file_with_extension(&packages, "gz");
    let install_tarball = r#"
tar -C / -xzf /tmp/*.tar.gz
ldconfig
mount_it() { firn mount -o arena-size=64M /tmp/backing /tmp/ckpt; }
ln -s /usr/local/sbin/mount.firn /usr/local/sbin/umount.fuse.firn /sbin
mount_it() { mount -t firn -o arena-size=64M /tmp/backing /tmp/ckpt; }
unmount_it() { umount /tmp/ckpt; }
"#;
    let remove_tarball = "/usr/local/libexec/firn/uninstall\n";
    let steps = [BEGIN, install_tarball, USE, remove_tarball, END].concat();
    let (outcome, left) = run_in_clean_root(&sandbox, "tarball", &[tarball], &steps);
    outcome.ok();
    assert!(left.is_empty(), "the tarball leaves {left:#?}");
}

#[test]
fn what_a_package_leaves_is_found() {
    let layer = tempfile::tempdir().expect("a directory");
    for dir in ["usr/bin", "usr/no-such-directory", "var/log"] {
        fs::create_dir_all(layer.path().join(dir)).expect("mkdir");
    }
    for file in ["usr/bin/no-such-program", "var/log/dpkg.log"] {
        fs::write(layer.path().join(file), "").expect("write");
    }
    let mut left = Vec::new();
    find_leftovers(layer.path(), Path::new(""), &mut left);
    left.sort();
    assert_eq!(left, ["usr/bin/no-such-program", "usr/no-such-directory"]);
}
