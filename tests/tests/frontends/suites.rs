//! Public suites through the mount on four file systems: no failure that the backing has not.
//!
//! `FIRN_STRESS_SECONDS` sets how long each stressor of stress-ng runs (`cargo xtask campaign stress`), and
//! `FIRN_FSX_OPS` sets the operations of each fsx run (`cargo xtask campaign fsx --ops 1000000`).

use std::path::{Path, PathBuf};

use firn_tests::random::env_count;
use firn_tests::sandbox::preload_library;
use firn_tests::suite::{exclusions, fio_verify, fsx, pjdfstest, pjdfstest_beside, stress};
use firn_tests::{
    FirnMount, FsKind, LaneImages, Layers, LoopImage, Sandbox, on_every_layers, seed,
};

const OPTIONS: &str = "arena-size=64M,chunk-size=1M,allow-other,dev,suid";
/// Two seeds on four file systems: 48,000 operations in CI.
const FSX_OPS_DEFAULT: u64 = 6000;

fn with_mount(
    kind: FsKind,
    options: &str,
    test: impl FnOnce(&Sandbox, &LoopImage, &FirnMount<'_>),
) {
    let sandbox = Sandbox::new(&format!("suite-{}", kind.name()));
    let image = LoopImage::new(&sandbox, kind, 400);
    let backing = image.mkdir("backing");
    let mount = FirnMount::over(&sandbox, &backing, options);
    test(&sandbox, &image, &mount);
    mount.umount();
}

fn pjdfstest_on(kind: FsKind) {
    pjdfstest_with(kind, OPTIONS);
}

fn pjdfstest_with(kind: FsKind, options: &str) {
    with_mount(kind, options, |sandbox, image, mount| {
        compare_pjdfstest(sandbox, &image.mkdir("native"), mount, kind.name());
    });
}

/// Proves S-place-1.
#[test]
fn pjdfstest_fails_nothing_with_files_in_lanes() {
    let sandbox = Sandbox::new("suite-lanes");
    let images = LaneImages::new(&sandbox);
    let native = images.image(0).mkdir("native");
    let mount = FirnMount::over(&sandbox, images.backing(), &images.options(OPTIONS));
    compare_pjdfstest(&sandbox, &native, &mount, "ext4");
    mount.umount();
}

/// Proves S-log-9, S-log-13.
#[test]
fn pjdfstest_fails_nothing_with_files_in_logs() {
    pjdfstest_with(FsKind::Ext4, &format!("{OPTIONS},layout=log"));
}

/// Runs pjdfstest over several layers, outside of transactions.
fn pjdfstest_in_layers(layers: Layers, options: &str) {
    let sandbox = Sandbox::new("suite-layers");
    let images = LaneImages::new(&sandbox);
    let native = images.image(0).mkdir("native");
    let options = layers.options(images.lanes(), &format!("{OPTIONS},{options}"));
    let mount = FirnMount::over(&sandbox, images.backing(), &options);
    compare_pjdfstest(&sandbox, &native, &mount, "ext4");
    mount.umount();
}

/// Proves S-log-9, S-place-1.
#[test]
fn pjdfstest_fails_nothing_with_logs_over_lanes() {
    pjdfstest_in_layers(Layers::LogsInLanes, "drain=eager");
}

on_every_layers! {
    /// Proves S-tx-123.
    pjdfstest_fails_nothing_with_transactions: pjdfstest_with_transactions(None);
    /// Proves S-tx-123.
    pjdfstest_fails_nothing_with_transactions_over_logs: pjdfstest_with_transactions(Logs);
    /// Proves S-tx-123.
    pjdfstest_fails_nothing_with_transactions_over_lanes: pjdfstest_with_transactions(Lanes);
    /// Proves S-tx-123.
    pjdfstest_fails_nothing_with_all_layers: pjdfstest_with_transactions(LogsInLanes);
}

fn pjdfstest_with_transactions(layers: Layers) {
    pjdfstest_in_layers(layers, "drain=commit");
}

/// Proves S-log-4, S-log-9.
#[test]
fn fsx_finds_nothing_in_logs() {
    fsx_with(FsKind::Ext4, "layout=log");
}

/// Runs pjdfstest in `native`, a directory of the file system `name`, and through the mount.
fn compare_pjdfstest(sandbox: &Sandbox, native: &Path, mount: &FirnMount<'_>, name: &str) {
    // Both directories must let the suite's unprivileged users pass.
    let native = pjdfstest(native, sandbox.path());
    let work = mount.join("work");
    std::fs::create_dir(&work).expect("mkdir");
    let (through, failures) = pjdfstest_beside(&native, &work, sandbox.path());
    let failed =
        |results: &std::collections::BTreeMap<_, bool>| results.values().filter(|f| **f).count();
    println!(
        "{}: {} ran natively, {} failed; {} through the mount, {} failed",
        name,
        native.len(),
        failed(&native),
        through.len(),
        failed(&through)
    );
    assert!(
        failures.is_empty(),
        "fail through the mount and not on {name}: {failures:#?}"
    );
    let allowed = exclusions("pjdfstest");
    let skipped: Vec<&String> = native
        .keys()
        .filter(|name| !through.contains_key(*name) && !allowed.contains_key(*name))
        .collect();
    assert!(
        skipped.is_empty(),
        "run on {name} and skip through the mount: {skipped:#?}"
    );
}

/// Operations of one run of fsx.
const FSX_OPS_MAX: u64 = 100_000;

fn fsx_on(kind: FsKind) {
    fsx_with(kind, "layout=plain");
}

fn fsx_with(kind: FsKind, options: &str) {
    with_mount(
        kind,
        &format!("arena-size=16M,chunk-size=256K,allow-other,{options}"),
        |sandbox, _, mount| {
            let seed = seed(&format!("fsx on {}", kind.name()));
            let ops = env_count("FIRN_FSX_OPS", FSX_OPS_DEFAULT);
            // fsx leaks a mapping now and then, on any file system, and ends when it has no more.
            let rounds = 2.max(ops.div_ceil(FSX_OPS_MAX));
            for round in 0..rounds {
                // msync after each mapped write reaches the disk; one of the runs has it.
                let sync = round == 0 && kind == FsKind::Tmpfs;
                let ops = ops.min(FSX_OPS_MAX);
                fsx(
                    &mount.join(format!("fsx{round}")),
                    sandbox.path(),
                    seed + round,
                    ops,
                    sync,
                )
                .ok();
            }
        },
    );
}

fn fio_on(kind: FsKind) {
    with_mount(kind, OPTIONS, |sandbox, _, mount| {
        let seed = seed(&format!("fio on {}", kind.name()));
        for (engine, direct) in [("psync", false), ("mmap", false), ("psync", true)] {
            // A mapping of 32 MiB on an image is as much as two cores want to see in CI.
            fio_verify(mount.path(), sandbox.path(), engine, direct, seed).ok();
        }
    });
}

/// Stressors of stress-ng that work on files and verify what they read.
const STRESSORS: [&str; 22] = [
    "aio",
    "copy-file",
    "dentry",
    "dir",
    "dup",
    "fallocate",
    "fork",
    "fpunch",
    "fstat",
    "hdd",
    "io",
    "iomix",
    "link",
    "locka",
    "mmap",
    "rename",
    "revio",
    "seek",
    "sendfile",
    "sync-file",
    "symlink",
    "xattr",
];

fn stress_with(preload: Option<PathBuf>) {
    let sandbox = Sandbox::new("suite-stress");
    let mount = FirnMount::new(&sandbox, "arena-size=64M,chunk-size=1M");
    let native = sandbox.join("native");
    std::fs::create_dir(&native).expect("mkdir");
    let seconds = env_count("FIRN_STRESS_SECONDS", 1);
    let mut failed = Vec::new();
    for stressor in STRESSORS {
        let through = stress(stressor, mount.path(), seconds, preload.as_deref());
        // What this machine cannot do is no failure of the mount.
        if through.code != 0 && stress(stressor, &native, seconds, None).code == 0 {
            failed.push(through.to_string());
        }
    }
    assert!(
        failed.is_empty(),
        "fail here and not on the directory below:\n{}",
        failed.join("\n")
    );
    mount.umount();
}

/// Proves S-op-1, S-read-1.
#[test]
fn stress_ng_finds_nothing_through_the_mount() {
    stress_with(None);
}

/// Proves S-direct-1.
#[test]
fn stress_ng_finds_nothing_with_direct_access() {
    stress_with(Some(preload_library()));
}

macro_rules! on_every_file_system {
    ($($(#[$attribute:meta])* $name:ident: $suite:ident($kind:ident);)*) => {$(
        $(#[$attribute])*
        #[test]
        fn $name() {
            $suite(FsKind::$kind);
        }
    )*};
}

on_every_file_system! {
    /// Proves S-op-1, S-attr-5.
    pjdfstest_fails_nothing_that_ext4_passes: pjdfstest_on(Ext4);
    /// Proves S-op-1, S-attr-5.
    pjdfstest_fails_nothing_that_xfs_passes: pjdfstest_on(Xfs);
    /// Proves S-op-1, S-attr-5.
    pjdfstest_fails_nothing_that_btrfs_passes: pjdfstest_on(Btrfs);
    /// Proves S-op-1, S-attr-5.
    pjdfstest_fails_nothing_that_tmpfs_passes: pjdfstest_on(Tmpfs);
    /// Proves S-write-5, S-read-1, S-mmap-1.
    fsx_finds_nothing_on_ext4: fsx_on(Ext4);
    /// Proves S-write-5, S-read-1, S-mmap-1.
    fsx_finds_nothing_on_xfs: fsx_on(Xfs);
    /// Proves S-write-5, S-read-1, S-mmap-1.
    fsx_finds_nothing_on_btrfs: fsx_on(Btrfs);
    /// Proves S-write-5, S-read-1, S-mmap-1.
    fsx_finds_nothing_on_tmpfs: fsx_on(Tmpfs);
    /// Proves S-write-5.
    fio_verifies_on_ext4: fio_on(Ext4);
    /// Proves S-write-5.
    fio_verifies_on_xfs: fio_on(Xfs);
    /// Proves S-write-5.
    fio_verifies_on_btrfs: fio_on(Btrfs);
    /// Proves S-write-5.
    fio_verifies_on_tmpfs: fio_on(Tmpfs);
}
