//! The mounts of examples/containers, made by podman: a container that mounts for others, one without any right that
//! writes, one in a user namespace of its own, and the death of the first.
//!
//! The container with firn has this machine's own root under an empty layer. `cargo xtask campaign packages` makes the image of the
//! Containerfile from the packages of `make dist`, over a small Debian, and runs them from that.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use firn_tests::sandbox::{firn_binary, unmount_lazily};
use firn_tests::{Sandbox, run};

const STEPS: &str = r#"
set -euo pipefail
work=$1 firn=$2 packages=${3:-} root=${4:-}

# crun knows cgroups of version 2 alone; where the machine has both, this namespace has those.
umount -R -l /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup
# Mounts of containers reach this directory, and no other of the machine.
mount --bind "$work/shared" "$work/shared" && mount --make-rshared "$work/shared"

podman() { command podman --root "$work/podman" --runroot "$work/run" --tmpdir "$work/tmp" --cgroup-manager cgroupfs "$@"; }
end() {
    podman rm --force --all --time 5 >/dev/null 2>&1 || true
    umount -l "$work/shared/ckpt" 2>/dev/null || true
    podman rmi --force --all >/dev/null 2>&1 || true
}
trap end EXIT

if [[ -n $packages ]]; then
    tar -C "$root" --create --file - . | podman import - localhost/debian >/dev/null
    podman build --isolation chroot --network host \
        --build-arg BASE=localhost/debian --tag firn --file "$work/Containerfile" "$packages"
    image=(localhost/firn) other=(localhost/debian)
    status=firn
else
    # An image with a shell and no more is what the others have.
    mkdir "$work/small" "$work/small/bin" && cp "$(command -v busybox)" "$work/small/bin/sh"
    tar -C "$work/small" --create --file - . | podman import - localhost/small >/dev/null
    image=(--rootfs "/:O" "$firn") other=(localhost/small)
    status=$firn
fi
options=(--network none --cgroups disabled --ulimit nofile=1024:1024 --ulimit nproc=1024:1024)

sidecar() { # NAME: as in compose.yaml
    podman run --detach --name "$1" "${options[@]}" --device /dev/fuse --cap-add SYS_ADMIN --security-opt apparmor=unconfined \
        --volume "$work/backing:/backing" --volume "$work/arenas:/run/firn" --env FIRN_RUNTIME_DIR=/run/firn \
        --volume "$work/shared:/shared:rshared" \
        "${image[@]}" mount --foreground /backing /shared/ckpt -o allow-other,close=held,arena-size=64M,drain=demand >/dev/null
    # The health check of compose.yaml.
    for _ in $(seq 300); do
        podman exec "$1" "$status" status /shared/ckpt >/dev/null 2>&1 && return
        [[ $(podman inspect --format '{{.State.Running}}' "$1") == true ]] || break
        sleep 0.1
    done
    podman logs "$1" >&2
    return 1
}
app() { # COMMAND: without any right
    podman run --rm "${options[@]}" --cap-drop all --volume "$work/shared:/shared:rslave" "${other[@]}" sh -c "$1"
}
sidecar first
app 'head -c 3000000 /dev/zero | tr "\0" x >/shared/ckpt/step_1 && ls /shared/ckpt'
[[ ! -s $work/backing/step_1 ]] # It is held.

echo '--- a container in a user namespace of its own (hostUsers: false)'
podman run --rm "${options[@]}" --uidmap 0:100000:65536 --gidmap 0:100000:65536 \
    --volume "$work/shared/ckpt:/ckpt:idmap" "${other[@]}" \
    sh -c 'grep -q "0 *100000" /proc/self/uid_map && echo mapped >/ckpt/mapped && stat -c "%u %n" /ckpt/mapped'
[[ $(stat -c %u "$work/shared/ckpt/mapped") == 0 ]]

echo '--- the container is killed: the next one has what was held'
podman kill --signal KILL first >/dev/null
podman wait first >/dev/null
umount -l "$work/shared/ckpt"
sidecar second
app '[ "$(wc -c </shared/ckpt/step_1)" = 3000000 ] && cat /shared/ckpt/mapped'

echo '--- stopped, it drains and unmounts'
podman stop --time 60 second >/dev/null
! mountpoint -q "$work/shared/ckpt"
[[ $(wc -c <"$work/backing/step_1") == 3000000 && $(<"$work/backing/mapped") == mapped ]]
[[ $(find "$work/arenas" -name '*.arena') == '' ]]
"#;

/// Ends what the containers left when a step failed.
struct Cleanup<'a>(&'a Sandbox);

impl Drop for Cleanup<'_> {
    fn drop(&mut self) {
        unmount_lazily(&self.0.join("shared/ckpt"));
        unmount_lazily(&self.0.join("shared"));
    }
}

#[test]
fn a_container_mounts_for_others_and_its_death_loses_nothing() {
    let sandbox = Sandbox::new("containers");
    for name in [
        "shared",
        "shared/ckpt",
        "backing",
        "arenas",
        "podman",
        "run",
        "tmp",
    ] {
        sandbox.mkdir(name);
    }
    fs::set_permissions(sandbox.join("arenas"), PermissionsExt::from_mode(0o700)).expect("chmod");
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    fs::copy(
        repository.join("examples/containers/Containerfile"),
        sandbox.join("Containerfile"),
    )
    .expect("copy the Containerfile");
    let _cleanup = Cleanup(&sandbox);
    let mut steps = Command::new("unshare");
    steps.args(["--mount", "bash", "-c", STEPS, "steps"]);
    steps.arg(sandbox.path()).arg(firn_binary());
    if let Some(packages) = std::env::var_os("FIRN_DIST_PACKAGES") {
        steps.arg(packages);
        steps.arg(
            std::env::var_os("FIRN_DIST_ROOT").expect("FIRN_DIST_ROOT, the root of the image"),
        );
    }
    run(&mut steps).ok();
}
