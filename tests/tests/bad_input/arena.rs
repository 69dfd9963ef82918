//! Arenas that are too large, foreign or damaged: named, never interpreted, never lost silently.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;

use firn_format::superblock::Superblock;
use firn_tests::fsops::read;
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
    file.write_all_at(&77u32.to_le_bytes(), 8)
        .expect("patch the version");
    let before = read(&arena);
    check_names(&sandbox, "version");
    for args in [
        mount_args(&sandbox.join("backing"), &sandbox.join("mnt"), SMALL),
        vec!["recover".into(), sandbox.join("backing").into()],
    ] {
        let outcome = sandbox.run(args);
        assert_ne!(outcome.code, 0, "{outcome}");
        outcome.says("version");
    }
    assert!(
        before == read(&arena),
        "an arena of another version was changed"
    );
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
