//! Arenas that are too large, foreign or damaged: named, never interpreted, never lost silently.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use firn_format::superblock::Superblock;
use firn_tests::faultfs::FaultFs;
use firn_tests::fsops::{assert_same_bytes, read};
use firn_tests::mount::{SMALL, mount_args};
use firn_tests::random::bytes;
use firn_tests::{FirnMount, Outcome, Sandbox, run};

/// An arena with held data and no firnd: its path and superblock.
fn orphan(sandbox: &Sandbox) -> (PathBuf, Superblock) {
    let mount = FirnMount::new(sandbox, &format!("{SMALL},close=held,drain-age=10min"));
    for index in 0..20u64 {
        fs::write(mount.join(format!("file{index}")), bytes(index, 40_000)).expect("write");
    }
    mount.kill();
    let arena = sandbox.arena();
    let superblock = Superblock::decode(&read(&arena)[..4096]).expect("a superblock");
    (arena, superblock)
}

fn flip(arena: &std::path::Path, offset: u64) {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(arena)
        .expect("open the arena");
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).expect("read");
    file.write_all_at(&[byte[0] ^ 0x04], offset).expect("flip");
}

fn check(sandbox: &Sandbox) -> Outcome {
    sandbox.run(["check".as_ref(), sandbox.arena().as_os_str()])
}

#[track_caller]
fn check_names(sandbox: &Sandbox, words: &str) {
    let outcome = check(sandbox);
    assert_ne!(outcome.code, 0, "damage was not found: {outcome}");
    let said = format!("{}{}", outcome.stdout, outcome.stderr).to_lowercase();
    assert!(
        said.contains(words),
        "`firn check` does not name the {words}: {outcome}"
    );
}

/// Proves S-crash-2.
#[test]
fn a_whole_arena_checks_clean() {
    let sandbox = Sandbox::new("clean");
    orphan(&sandbox);
    check(&sandbox).ok();
    sandbox
        .run(["recover".as_ref(), sandbox.join("backing").as_os_str()])
        .ok();
    for index in 0..20u64 {
        assert_eq!(
            read(&sandbox.join(format!("backing/file{index}"))),
            bytes(index, 40_000)
        );
    }
}

#[test]
fn an_arena_larger_than_its_file_system_is_refused() {
    let sandbox = Sandbox::new("large");
    let small = sandbox.mkdir("small");
    run(Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=16m", "firn-test"])
        .arg(&small))
    .ok();
    let options = format!("arena-size=64M,arena-dir={}", small.display());
    let outcome = sandbox.run(mount_args(
        &sandbox.join("backing"),
        &sandbox.join("mnt"),
        &options,
    ));
    outcome.code(2).says("arena-size");
    assert_eq!(
        fs::read_dir(&small).expect("readdir").count(),
        0,
        "a part of an arena is left"
    );
    assert!(
        sandbox.processes().is_empty(),
        "refused, and a firnd is left"
    );
}

/// Proves S-crash-9.
#[test]
fn an_arena_of_another_version_is_refused_and_kept() {
    let sandbox = Sandbox::new("version");
    let (arena, _) = orphan(&sandbox);
    let file = OpenOptions::new().write(true).open(&arena).expect("open");
    let advices = [
        (1u32, "left by an older Firn"),
        (77, "made by a newer Firn"),
    ];
    for (version, advice) in advices {
        file.write_all_at(&version.to_le_bytes(), 8)
            .expect("patch the version");
        let before = read(&arena);
        check_names(&sandbox, "version");
        for args in [
            mount_args(&sandbox.join("backing"), &sandbox.join("mnt"), SMALL),
            vec!["recover".into(), sandbox.join("backing").into()],
        ] {
            let outcome = sandbox.run(args);
            assert_ne!(outcome.code, 0, "{outcome}");
            outcome.says("version").says(advice);
        }
        assert!(
            before == read(&arena),
            "an arena of another version was changed"
        );
    }
}

#[test]
fn what_is_no_arena_is_10() {
    let sandbox = Sandbox::new("magic");
    let (arena, _) = orphan(&sandbox);
    flip(&arena, 0);
    check(&sandbox).code(10);
}

/// Proves S-crash-8.
#[test]
fn a_truncated_arena_is_named() {
    let sandbox = Sandbox::new("truncated");
    let (arena, _) = orphan(&sandbox);
    for len in [1 << 20, 5000, 100, 0] {
        OpenOptions::new()
            .write(true)
            .open(&arena)
            .expect("open")
            .set_len(len)
            .expect("truncate");
        let outcome = check(&sandbox);
        assert_ne!(outcome.code, 0, "truncated to {len}: {outcome}");
        let outcome = sandbox.run(mount_args(
            &sandbox.join("backing"),
            &sandbox.join("mnt"),
            SMALL,
        ));
        assert_ne!(
            outcome.code, 0,
            "mounted with an arena cut to {len}: {outcome}"
        );
    }
}

/// Proves S-crash-8.
#[test]
fn a_flipped_bit_in_the_superblock_is_named() {
    let sandbox = Sandbox::new("superblock");
    let (arena, _) = orphan(&sandbox);
    flip(&arena, 36);
    check_names(&sandbox, "superblock");
    let outcome = sandbox.run(mount_args(
        &sandbox.join("backing"),
        &sandbox.join("mnt"),
        SMALL,
    ));
    assert_ne!(outcome.code, 0, "{outcome}");
    assert!(arena.exists(), "a damaged arena was thrown away");
}

/// Proves S-crash-8.
#[test]
fn a_flipped_bit_in_the_journal_is_named() {
    let sandbox = Sandbox::new("journal");
    let (arena, superblock) = orphan(&sandbox);
    let content = read(&arena);
    let half = |index: usize| superblock.geometry.journal_offset(index);
    // Some used byte of each half, well behind its header.
    for index in 0..2 {
        let start = half(index) as usize + 512;
        if let Some(at) = content[start..start + 2048]
            .iter()
            .position(|byte| *byte != 0)
        {
            flip(&arena, (start + at) as u64);
        }
    }
    check_names(&sandbox, "journal");
}

/// Proves S-crash-8.
#[test]
fn a_flipped_bit_in_a_piece_table_is_named_and_the_other_pieces_are_kept() {
    let sandbox = Sandbox::new("piece");
    let (arena, superblock) = orphan(&sandbox);
    let content = read(&arena);
    let geometry = superblock.geometry;
    let records = (0..geometry.chunk_count).flat_map(|chunk| {
        (0..geometry.records_per_chunk()).map(move |record| geometry.record_offset(chunk, record))
    });
    let used = |at: &u64| {
        content[*at as usize..*at as usize + 32]
            .iter()
            .any(|byte| *byte != 0)
    };
    let victim = records.into_iter().find(used).expect("a used piece record");
    flip(&arena, victim + 8);
    check_names(&sandbox, "piece");
    let outcome = sandbox.run(["recover".as_ref(), sandbox.join("backing").as_os_str()]);
    assert!([0, 3].contains(&outcome.code), "{outcome}");
    let whole = (0..20u64)
        .filter(|index| {
            fs::read(sandbox.join(format!("backing/file{index}")))
                .is_ok_and(|c| c == bytes(*index, 40_000))
        })
        .count();
    assert!(whole >= 19, "one damaged piece cost {} files", 20 - whole);
}

/// Nothing drains unless it is asked for.
const HELD: &str = "arena-size=32M,chunk-size=1M,drain=demand";

fn recover_discard(sandbox: &Sandbox, options: &[&str], path: &Path) -> Outcome {
    let args = ["recover", "--discard"].iter().chain(options);
    sandbox.run(args.map(std::ffi::OsStr::new).chain([path.as_os_str()]))
}

/// Checks that `firn status` has nothing of a backing. Other tests may have mounts of their own.
#[track_caller]
fn assert_unknown(sandbox: &Sandbox, backing: &Path) {
    let status = sandbox.run(["status"]);
    let name = backing.display().to_string();
    assert!(!status.stdout.contains(&name), "{status}");
}

/// Proves S-discard-2, S-discard-4, S-discard-5.
#[test]
fn what_is_held_for_a_backing_that_is_gone_is_given_up_when_that_is_asked_for() {
    let sandbox = Sandbox::new("discardgone");
    let spill = sandbox.mkdir("local");
    let options = format!("{HELD},spill={},spill-size=64M", spill.display());
    for by_file in [false, true] {
        let backing = sandbox.mkdir("server/run42");
        let mount = FirnMount::over(&sandbox, &backing, &options);
        fs::write(mount.join("held"), bytes(1, 40 << 20)).expect("write");
        mount.kill();
        fs::remove_dir_all(sandbox.join("server")).expect("the backing goes");
        let arena = sandbox.arena();

        let status = sandbox.run(["status"]);
        let file = arena.display().to_string();
        let dir = backing.display().to_string();
        for expected in [&*file, &*dir, "40.0 MiB"] {
            assert!(status.stdout.contains(expected), "{status}");
        }
        sandbox
            .run(["recover".as_ref(), backing.as_os_str()])
            .code(1)
            .says("does not exist");
        let path = if by_file { &arena } else { &backing };
        recover_discard(&sandbox, &[], path)
            .code(2)
            .says("40.0 MiB that")
            .says("--yes");
        assert!(arena.exists(), "dropped without a yes");
        let dropped = recover_discard(&sandbox, &["--yes"], path).ok();
        assert!(dropped.stdout.contains("dropped 40.0 MiB"), "{dropped}");
        assert_eq!(sandbox.arenas(), [] as [PathBuf; 0]);
        let spilled = fs::read_dir(&spill).expect("the spill directory");
        assert_eq!(spilled.count(), 0, "the spill file is left");
        recover_discard(&sandbox, &["--yes"], path).code(10);
        assert_unknown(&sandbox, &backing);
    }
}

/// Proves S-discard-4.
#[test]
fn a_backing_that_never_answers_is_not_asked_when_what_is_held_is_given_up() {
    let sandbox = Sandbox::new("discardhangs");
    let fault = FaultFs::new(&sandbox);
    let _watchdog = fault.watchdog(Duration::from_secs(100));
    let mount = FirnMount::over(&sandbox, fault.path(), HELD);
    fs::write(mount.join("held"), bytes(2, 1 << 20)).expect("write");
    mount.kill();
    fault.stall();
    recover_discard(&sandbox, &["--yes"], fault.path()).ok();
    fault.go_on();
    assert_eq!(sandbox.arenas(), [] as [PathBuf; 0]);
    let mount = FirnMount::over(&sandbox, fault.path(), HELD);
    assert_eq!(read(&mount.join("held")), b"", "it was given up");
    mount.umount();
}

/// Proves S-discard-4.
#[test]
fn what_a_firnd_serves_is_not_given_up_under_it() {
    let sandbox = Sandbox::new("discardserved");
    let mount = FirnMount::new(&sandbox, HELD);
    fs::write(mount.join("held"), bytes(3, 1 << 20)).expect("write");
    let arena = sandbox.arena();
    for path in [mount.backing(), mount.path(), &arena] {
        recover_discard(&sandbox, &["--yes"], path)
            .code(11)
            .says("already mounted");
    }
    assert_same_bytes("held", &read(&mount.join("held")), &bytes(3, 1 << 20));
    mount.umount();
}

/// Proves S-discard-4, S-priv-9.
#[test]
fn an_arena_that_others_could_have_made_is_not_given_up() {
    let sandbox = Sandbox::new("discardtrust");
    let (arena, _) = orphan(&sandbox);
    let before = read(&arena);
    let refused = |what: &str| {
        recover_discard(&sandbox, &["--yes"], &arena)
            .code(10)
            .says(what);
        assert!(before == read(&arena), "it was changed");
    };
    let mode = |mode| fs::set_permissions(&arena, PermissionsExt::from_mode(mode)).expect("chmod");
    mode(0o644);
    refused("has mode 0644");
    mode(0o600);
    chown(&arena, Some(1), None).expect("chown");
    refused("belongs to user 1");
    chown(&arena, Some(0), None).expect("chown");
    let other = sandbox.runtime().join("other");
    fs::hard_link(&arena, &other).expect("link");
    refused("has 2 names (hard links)");
    fs::remove_file(other).expect("remove");
    recover_discard(&sandbox, &["--yes"], &arena).ok();
    assert_eq!(sandbox.arenas(), [] as [PathBuf; 0]);
}

/// Proves S-discard-4.
#[test]
fn a_spill_file_of_another_arena_stays_when_an_arena_is_given_up() {
    let sandbox = Sandbox::new("discardspill");
    let spill = sandbox.mkdir("local");
    let options = format!("{HELD},spill={},spill-size=64M", spill.display());
    let mount = FirnMount::new(&sandbox, &options);
    fs::write(mount.join("held"), bytes(4, 1 << 20)).expect("write");
    mount.kill();
    let file = fs::read_dir(&spill).expect("list").next().expect("a file");
    let file = file.expect("an entry").path();
    // Byte 16 is in the identity of the arena that it belongs to.
    flip(&file, 16);
    recover_discard(&sandbox, &["--yes"], &sandbox.join("backing"))
        .code(3)
        .says("not removed");
    assert_eq!(sandbox.arenas(), [] as [PathBuf; 0]);
    assert!(file.exists());
}

/// Proves S-discard-4.
#[test]
fn a_stub_tree_goes_with_the_arena_that_is_given_up() {
    let sandbox = Sandbox::new("discardtree");
    let options = format!("{HELD},frontend=preload");
    let backing = sandbox.mkdir("server/run42");
    let mount = FirnMount::over(&sandbox, &backing, &options);
    fs::create_dir(mount.join("dir")).expect("mkdir");
    fs::write(mount.join("dir/stub"), b"").expect("a name");
    let prefix = mount.path().to_owned();
    firn_tests::sandbox::kill(mount.pid(), libc::SIGKILL);
    mount.wait_for_end();
    fs::remove_dir_all(sandbox.join("server")).expect("the backing goes");
    recover_discard(&sandbox, &["--yes"], &backing).ok();
    assert_eq!(sandbox.arenas(), [] as [PathBuf; 0]);
    assert_eq!(fs::read_dir(&prefix).expect("the prefix").count(), 0);
    assert_unknown(&sandbox, &backing);
    mount.abandon();
}
