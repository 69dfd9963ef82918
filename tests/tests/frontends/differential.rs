//! The same random operations on the mount and on a plain directory of the same file system end in
//! the same answers, tree, contents, modes, link counts and attributes.

use firn_tests::mount::SMALL;
use firn_tests::random::env_count;
use firn_tests::tree::{assert_same, snapshot};
use firn_tests::{FirnMount, FsKind, LaneImages, Layers, LoopImage, Sandbox, differential, seed};

/// Several thousand over all file systems take under a minute on two cores.
const OPS_DEFAULT: u64 = 6000;

fn same_as_plain(kind: FsKind, options: &str) {
    let sandbox = Sandbox::new(&format!("diff-{}", kind.name()));
    let image = LoopImage::new(&sandbox, kind, 400);
    let backing = image.mkdir("backing");
    let plain = image.mkdir("plain");
    // As the plain file system is mounted: device files open and set-id bits count.
    let options = format!("{SMALL},allow-other,dev,suid,{options}");
    let mount = FirnMount::over(&sandbox, &backing, &options);
    let ops = env_count("FIRN_DIFFERENTIAL_OPS", OPS_DEFAULT);
    differential::run(
        seed(&format!("differential on {}", kind.name())),
        ops,
        mount.path(),
        &plain,
    );
    mount.umount();
    assert_same(
        "the backing after umount",
        &snapshot(&backing),
        &snapshot(&plain),
    );
}

/// Proves S-write-5, S-op-1.
#[test]
fn same_as_plain_on_ext4() {
    same_as_plain(FsKind::Ext4, "close=drain");
}

/// Proves S-write-5, S-op-1.
#[test]
fn same_as_plain_on_ext4_with_close_held() {
    same_as_plain(FsKind::Ext4, "close=held");
}

/// Proves S-write-5, S-op-1.
#[test]
fn same_as_plain_on_xfs() {
    same_as_plain(FsKind::Xfs, "close=held");
}

/// Proves S-write-5, S-op-1.
#[test]
fn same_as_plain_on_btrfs() {
    same_as_plain(FsKind::Btrfs, "close=drain,passthrough=off");
}

/// Proves S-write-5, S-op-1.
#[test]
fn same_as_plain_on_tmpfs() {
    same_as_plain(FsKind::Tmpfs, "close=held,passthrough=off");
}

/// Proves S-log-1, S-log-9, S-log-13.
#[test]
fn same_as_plain_with_files_in_logs() {
    let sandbox = Sandbox::new("diff-logs");
    let image = LoopImage::new(&sandbox, FsKind::Ext4, 400);
    let backing = image.mkdir("backing");
    let plain = image.mkdir("plain");
    let options = format!("{SMALL},allow-other,dev,suid,layout=log");
    let mount = FirnMount::over(&sandbox, &backing, &options);
    let ops = env_count("FIRN_DIFFERENTIAL_OPS", OPS_DEFAULT);
    let seed = seed("differential in logs");
    let rules = Layers::Logs.rules();
    differential::run_by(seed, ops, mount.path(), &plain, &rules);
    mount.umount();
    let again = FirnMount::over(&sandbox, &backing, "allow-other,dev,suid");
    assert_same("the next mount", &snapshot(again.path()), &snapshot(&plain));
    again.umount();
}

/// Proves S-place-1, S-place-2.
#[test]
fn same_as_plain_with_files_in_lanes() {
    let sandbox = Sandbox::new("diff-lanes");
    let images = LaneImages::new(&sandbox);
    let plain = images.image(0).mkdir("plain");
    let options = images.options(&format!("{SMALL},allow-other,dev,suid"));
    let mount = FirnMount::over(&sandbox, images.backing(), &options);
    let ops = env_count("FIRN_DIFFERENTIAL_OPS", OPS_DEFAULT);
    let seed = seed("differential in lanes");
    let rules = Layers::Lanes.rules();
    differential::run_by(seed, ops, mount.path(), &plain, &rules);
    mount.umount();
    // Whatever the next mount's options say.
    let again = FirnMount::over(&sandbox, images.backing(), "allow-other,dev,suid");
    assert_same("the next mount", &snapshot(again.path()), &snapshot(&plain));
    again.umount();
}
