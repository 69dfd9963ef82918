//! The packages of scripts/dist, each installed, used and removed in a clean root.
//!
//! The root is this machine's own under an empty layer of an overlay, in namespaces of its own: the system is there
//! with its package manager, and what the package leaves behind is what the layer holds at the end. `cargo xtask
//! campaign packages` does the same with what `make dist` made, in a root with next to nothing in it.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use firn_tests::sandbox::firn_binary;
use firn_tests::{Outcome, Sandbox, run};

/// Directory with packages to test, instead of those of the binaries under test.
const PACKAGES_VARIABLE: &str = "FIRN_DIST_PACKAGES";
/// Root to install them in, instead of this machine's.
const ROOT_VARIABLE: &str = "FIRN_DIST_ROOT";

/// Enters the root ($1, with the layer $2 and its work directory $3 over $4), with the files $5… in /tmp, and runs
/// /tmp/steps.
const ENTER: &str = r#"
set -eu
root=$1 layer=$2 work=$3 lower=$4
shift 4
mount -t overlay clean -o "lowerdir=$lower,upperdir=$layer,workdir=$work" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
cp "$@" "$root/tmp"
exec chroot "$root" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C \
    bash -euo pipefail /tmp/steps
"#;

/// What the steps of all packages begin with. A machine with an installed Firn is no clean root.
const BEGIN: &str = "refuse command -v firn\n";

/// What all steps use.
const FUNCTIONS: &str = r#"
refuse() { # COMMAND…: it must fail (`!` does not end a script that runs with -e)
    if "$@"; then
        echo "this should have failed: $*" >&2
        exit 1
    fi
}
"#;

/// What is done with it once it is installed, as the user that installed it. `mount_it` and `unmount_it` are the
/// package's own ways.
const USE: &str = r#"
[[ $(firn version) == firn\ * ]]
man=$(dirname "$(command -v firn)")/../share/man
compgen -G "$man/man1/firn-mount.1*" && compgen -G "$man/man8/mount.firn.8*"
cd "$(mktemp -d)"
mkdir backing ckpt
mount_it
mountpoint ckpt
head -c 3000000 /dev/urandom >ckpt/file
firn status ckpt
cc -Wall -Werror -o program /tmp/program.c $(pkg-config --cflags --libs firn)
./program ckpt
cp ckpt/file copy
unmount_it
refuse mountpoint -q ckpt
cmp copy backing/file
firn run --memory 64M -- bash -c 'echo kept >"$FIRN_PREFIX/x" && [[ $(<"$FIRN_PREFIX/x") == kept ]]' 2>messages
refuse grep 'not installed' messages
firn bench --help | grep checkpoint
[[ -e ${man%/man}/systemd/user/firn@.service ]]
[[ -x ${man%/man}/doc/firn/examples/placement/beegfs ]]
cd /
# One that has ended and is not waited for yet has a name, and no command line.
for process in /proc/[0-9]*; do
    refuse grep -szx firnd "$process/cmdline"
done
"#;

/// What they end with.
const END: &str = "hash -r\nrefuse command -v firn\n";

/// Root installs with the package manager, or where ldconfig and mount(8) look.
const AS_ROOT: &str = r#"
mount_it() { mount -t firn -o arena-size=64M "$PWD/backing" "$PWD/ckpt"; }
unmount_it() { umount "$PWD/ckpt"; }
"#;

/// A user has a directory of its own, beside the installation of root.
const AS_USER: &str = r#"
mount_it() { firn mount -o arena-size=64M backing ckpt; }
unmount_it() { firn umount ckpt; }
export PKG_CONFIG_PATH=$HOME/.local/lib/pkgconfig PATH=$HOME/.local/bin:$PATH
mkdir -p ~/.local/bin
echo 'not of Firn' >~/.local/bin/other
find ~ | sort >/tmp/before
tar -C ~/.local --strip-components=1 -xzf /tmp/*.tar.gz
hash -r
[[ $(command -v firn) == ~/.local/bin/firn ]]
"#;

/// The same user is rid of it.
const USER_REMOVES: &str = r#"
~/.local/libexec/firn/uninstall
find ~ | sort | diff /tmp/before -
"#;

/// A user without root has a virtual environment of its own, and is rid of the package in the end. There is no FUSE for
/// the preload library.
const WHEEL: &str = r#"
cd "$HOME"
python3 -m venv venv
venv/bin/pip install --quiet --no-index /tmp/*.whl
venv/bin/pip check
export PATH=$PWD/venv/bin:$PATH
[[ $(firn version) == firn\ * && $(python -m firnfs version) == "$(firn version)" ]]
[[ $(python -c 'import firnfs; print(firnfs.preload_path())') == */site-packages/* ]]
cat >job.py <<'JOB'
import os
import sys
import firnfs

here = sys.argv[1] if len(sys.argv) > 1 else os.environ["FIRN_PREFIX"]
last = firnfs.latest(here)
step = last.step + 1 if last else 1
assert last is None or (last / "model").read_bytes() == b"%d" % last.step * 100000
with firnfs.checkpoint(here, step=step) as new:
    (new / "model").write_bytes(b"%d" % step * 100000)
    assert firnfs.steps(here) == ([] if last is None else firnfs.steps(here)[: step - 1])
assert firnfs.latest(here).step == step
JOB
mkdir backing ckpt
firn mount -o arena-size=64M,close=held backing ckpt
python job.py ckpt
python job.py ckpt
firn umount ckpt
mount.firn "$PWD/backing" "$PWD/ckpt" -o arena-size=64M,drain=commit
python job.py ckpt
firn umount ckpt
for frontend in fuse preload; do
    firn run "--frontend=$frontend" --memory 64M --backing backing -- python job.py 2>messages
    refuse grep 'not installed' messages
    python -c "import firnfs; firnfs.run(['python', 'job.py'], backing='backing', memory='64M', frontend='$frontend')"
done
[[ $(ls backing | wc -l) == 7 && $(<backing/step_7/model) == 7777* ]]
# The five lines of the page as they stand, killed in the middle of a save and resumed.
python - >five.py <<'EXTRACT'
import re

page = open("/tmp/PYTHON.md").read()
(block,) = [one for one in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "restore(last" in one]
print(
    """
import os, sys

kills, ends = map(int, sys.argv[1:])

def train(step):
    if step == ends:
        raise SystemExit(0)

def restore(path):
    text = path.read_text()
    assert len(text) == 100_000 and text == text[:5] * 20_000
    return int(text[:5])

def save(path):
    half = f"{step:05}" * 10_000
    with open(path, "w") as file:
        file.write(half)
        file.flush()
        if step == kills:
            os.kill(os.getpid(), 9)
        file.write(half)
"""
    + block
)
EXTRACT
mkdir five five-preload
firn mount -o arena-size=64M,close=held five /ckpt
refuse python five.py 3 100
[[ $(firn latest /ckpt) == /ckpt/step_2 ]]
python five.py 100 6
[[ $(ls /ckpt | wc -l) == 6 && $(firn latest /ckpt) == /ckpt/step_5 ]]
firn umount /ckpt
without_fuse=(firn run --frontend=preload --prefix /ckpt --memory 64M --backing five-preload --)
refuse "${without_fuse[@]}" python five.py 3 100
"${without_fuse[@]}" python five.py 100 6
for made in five five-preload; do
    [[ $(ls "$made" | wc -l) == 6 && $(head -c 10 "$made/step_5/model.pt") == 0000500005 ]]
done
venv/bin/pip uninstall --quiet --yes firnfs
hash -r
refuse command -v firn
cd /
rm -r "$HOME"/*
"#;

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
const NOTES: [&str; 7] = [
    "etc/ld.so.cache",
    "var/cache",
    "var/lib/dpkg",
    "var/lib/rpm",
    // Where Debian's rpm has its own.
    "root/.rpmdb",
    "var/log",
    "var/lib/systemd",
];

/// What scripts/dist made of the binaries under test.
fn make_packages(sandbox: &Sandbox, only: Option<&str>) -> Vec<PathBuf> {
    if let Some(dir) = std::env::var_os(PACKAGES_VARIABLE) {
        let entries = fs::read_dir(dir).expect("the packages");
        return entries
            .map(|entry| entry.expect("an entry").path())
            .collect();
    }
    let to = sandbox.mkdir("dist");
    let mut command = dist();
    command.arg("--to").arg(&to);
    if let Some(kind) = only {
        command.args(["--only", kind]);
    }
    let made = run(&mut command).ok();
    let packages: Vec<_> = made.stdout.lines().map(PathBuf::from).collect();
    assert_eq!(packages.len(), only.map_or(4, |_| 1), "{made:?}");
    packages
}

/// scripts/dist, which packs the binaries under test.
fn dist() -> Command {
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/dist"));
    let binary = firn_binary();
    command
        .arg("--from")
        .arg(binary.parent().expect("a directory"));
    command
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
        .args([&root, &layer, &work])
        .arg(machine_root());
    command.args(files).args([&steps_file, &program]);
    sandbox.environment(&mut command);
    let outcome = run(&mut command);
    let mut left = Vec::new();
    find_leftovers(&layer, Path::new(""), &mut left);
    (outcome, left)
}

/// The root below the layers.
fn machine_root() -> PathBuf {
    std::env::var_os(ROOT_VARIABLE).map_or_else(|| PathBuf::from("/"), PathBuf::from)
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
        let machine = machine_root().join(&path);
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
    let packages = make_packages(&sandbox, None);

    let deb = file_with_extension(&packages, "deb");
    let install_deb = "dpkg --install /tmp/*.deb\ndpkg --verify firn\n";
    let remove_deb = "dpkg --purge firn\n";
    let steps = [FUNCTIONS, BEGIN, install_deb, AS_ROOT, USE, remove_deb, END].concat();
    let (outcome, left) = run_in_clean_root(&sandbox, "deb", &[deb], &steps);
    outcome.ok();
    assert!(left.is_empty(), "the Debian package leaves {left:#?}");

    let rpm = file_with_extension(&packages, "rpm");
    // Debian's rpm does not know what dpkg installed, and Debian has no libraries where Fedora has them.
    let install_rpm = r#"
rpm --install --nodeps /tmp/*.rpm
rpm --verify --nodeps firn
export PKG_CONFIG_PATH=/usr/lib64/pkgconfig LD_LIBRARY_PATH=/usr/lib64
"#;
    let remove_rpm = "rpm --erase firn\n";
    let steps = [FUNCTIONS, BEGIN, install_rpm, AS_ROOT, USE, remove_rpm, END].concat();
    let (outcome, left) = run_in_clean_root(&sandbox, "rpm", &[rpm], &steps);
    outcome.ok();
    assert!(left.is_empty(), "the RPM package leaves {left:#?}");
}

#[test]
fn tarballs_of_root_and_of_a_user_are_installed_used_and_removed_apart() {
    let sandbox = Sandbox::new("dist-tar");
    let packages = make_packages(&sandbox, Some("tarball"));
    let tarball = file_with_extension(&packages, "gz");
    let install = r#"
tar -C /usr/local --strip-components=1 -xzf /tmp/*.tar.gz
ldconfig
ln -s /usr/local/sbin/mount.firn /usr/local/sbin/umount.fuse.firn /sbin
"#;
    let user_steps = [FUNCTIONS, AS_USER, USE, USER_REMOVES].concat();
    // The user whom fusermount3 finds on every system.
    let as_user = format!(
        r#"
cat >/tmp/user-steps <<'STEPS'
{user_steps}
STEPS
install -d -o nobody -g nogroup /home/stranger
setpriv --reuid nobody --regid nogroup --clear-groups env HOME=/home/stranger bash -euo pipefail /tmp/user-steps
rm /home/stranger/.local/bin/other
rmdir /home/stranger/.local/bin /home/stranger/.local /home/stranger
firn version
"#
    );
    let remove = "/usr/local/libexec/firn/uninstall\n";
    let steps = [
        FUNCTIONS, BEGIN, install, &as_user, AS_ROOT, USE, remove, END,
    ]
    .concat();
    let (outcome, left) = run_in_clean_root(&sandbox, "tarball", &[tarball], &steps);
    outcome.ok();
    assert!(left.is_empty(), "the tarballs leave {left:#?}");
}

#[test]
fn the_wheel_is_used_by_a_user_without_root_and_removed() {
    let sandbox = Sandbox::new("dist-wheel");
    let wheel = file_with_extension(&make_packages(&sandbox, Some("wheel")), "whl");
    assert_tag_is_that_of_the_binaries(&sandbox, &wheel);
    let as_user = format!(
        r#"
cat >/tmp/user-steps <<'STEPS'
{FUNCTIONS}{WHEEL}
STEPS
install -d -o nobody -g nogroup /home/stranger /ckpt
# Without FUSE a mount point is on a tmpfs.
mount -t tmpfs -o uid=65534,gid=65534,mode=755 ckpt /ckpt
setpriv --reuid nobody --regid nogroup --clear-groups env HOME=/home/stranger bash -euo pipefail /tmp/user-steps
umount /ckpt
rm -r /home/stranger /ckpt
"#
    );
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/PYTHON.md");
    let steps = [FUNCTIONS, BEGIN, &as_user, END].concat();
    let (outcome, left) = run_in_clean_root(&sandbox, "wheel", &[wheel, page], &steps);
    outcome.ok();
    assert!(left.is_empty(), "the wheel leaves {left:#?}");
}

/// What auditwheel finds that the binaries need is what the name of the wheel says.
fn assert_tag_is_that_of_the_binaries(sandbox: &Sandbox, wheel: &Path) {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools/wheel");
    assert!(
        tools.exists(),
        "auditwheel is missing: run `scripts/setup`, which installs it in {tools:?}"
    );
    let mut command = Command::new("/usr/bin/python3");
    command
        .args(["-m", "auditwheel", "show"])
        .arg(wheel)
        .env("PYTHONPATH", &tools)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(sandbox.path());
    let said = run(&mut command).ok().stdout.replace('\n', " ");
    let name = wheel.file_stem().expect("a name").to_string_lossy();
    let tag = name.rsplit('-').next().expect("a tag");
    let says = format!("following platform tag: \"{tag}\"");
    assert!(said.contains(&says), "{tag}: {said}");
}

/// What every package has, as scripts/install puts it below a prefix.
fn install(sandbox: &Sandbox) -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/install");
    let binary = firn_binary();
    let mut command = Command::new(script);
    command.args(["--prefix", "/firn", "--relocatable", "--destdir"]);
    command.arg(sandbox.path()).arg("--from");
    run(command.arg(binary.parent().expect("a directory"))).ok();
    sandbox.join("firn")
}

/// Files below `dir` whose names end with `end`.
fn files_below(dir: &Path, end: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("a directory") {
        let entry = entry.expect("an entry");
        if entry.file_type().expect("its kind").is_dir() {
            files_below(&entry.path(), end, found);
        } else if entry.file_name().to_string_lossy().ends_with(end) {
            found.push(entry.path());
        }
    }
}

#[test]
fn documents_in_the_packages_have_no_dead_links_and_no_placeholders() {
    let sandbox = Sandbox::new("dist-links");
    let installed = install(&sandbox);
    let mut pages = Vec::new();
    files_below(&installed.join("share/doc/firn"), ".md", &mut pages);
    assert!(pages.len() > 20, "{pages:?}");
    let mut dead = Vec::new();
    for page in &pages {
        let text = fs::read_to_string(page).expect("a page");
        assert!(!text.contains("example.org"), "{page:?}");
        let targets = text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next());
        for target in targets.filter(|target| !target.starts_with("http")) {
            let file = target.split('#').next().unwrap_or_default();
            if !file.is_empty() && !page.with_file_name(file).exists() {
                dead.push((page.clone(), target.to_owned()));
            }
        }
    }
    assert!(dead.is_empty(), "{dead:#?}");
}

#[test]
fn a_package_of_binaries_that_need_a_newer_glibc_is_not_made() {
    let sandbox = Sandbox::new("dist-glibc");
    let to = sandbox.mkdir("dist");
    let refused = run(dist().args(["--glibc", "2.2", "--to"]).arg(&to));
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(
        refused.stderr.contains("firn needs glibc 2."),
        "{refused:?}"
    );
    assert_eq!(fs::read_dir(&to).expect("a directory").count(), 0);
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
