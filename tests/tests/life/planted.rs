//! Another user of the machine plants what a mount or `firn recover` of root then finds: none of it is believed.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use firn_tests::command::{Outcome, wait_until};
use firn_tests::mount::mount_args;
use firn_tests::sandbox::is_mounted;
use firn_tests::transaction::firn;
use firn_tests::{FirnMount, Sandbox, run};
use firn_transact::change_log::{
    BytesSource, ChangeLog, DataChange, Entry, EntryName, EntrySide, Identity, StagedPath,
    WrittenRange,
};

/// Any user but root.
const ATTACKER: u32 = 65534;
const OPTIONS: &str = "arena-size=16M,chunk-size=1M";
const HELD: &str = "arena-size=16M,chunk-size=1M,close=held,drain-age=10min";
/// Exit status: not Firn's own.
const NOT_FIRN: i32 = 10;

/// A sandbox in whose backing every user may make names, as in `/tmp`.
fn shared_sandbox(name: &str) -> Sandbox {
    let sandbox = Sandbox::new(name);
    set_mode(sandbox.path(), 0o755);
    set_mode(&sandbox.join("backing"), 0o1777);
    sandbox
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("chmod");
}

fn as_attacker(program: &str) -> Command {
    let mut command = Command::new(program);
    command.uid(ATTACKER).gid(ATTACKER);
    command
}

fn mount(sandbox: &Sandbox, options: &str) -> Outcome {
    let outcome = sandbox.run(mount_args(
        &sandbox.join("backing"),
        &sandbox.join("mnt"),
        options,
    ));
    if is_mounted(&sandbox.join("mnt")) {
        sandbox
            .run(["umount".as_ref(), sandbox.join("mnt").as_os_str()])
            .ok();
    }
    outcome
}

/// The directory of the only mount in a backup.
fn home_of(backup: &Path) -> PathBuf {
    let mut found = fs::read_dir(backup)
        .expect("list")
        .flatten()
        .map(|entry| entry.path());
    found.next().expect("the directory of a mount")
}

fn identity(path: &Path) -> Identity {
    let meta = path.symlink_metadata().expect("stat");
    Identity {
        ino: meta.ino(),
        elsewhere: false,
    }
}

/// The attacker makes `.firn/tx-1/` with a record that is decided.
fn plant(sandbox: &Sandbox, entry: Entry) {
    let log = ChangeLog {
        id: 1,
        entries: vec![entry],
        ..ChangeLog::default()
    };
    let seed = sandbox.mkdir("seed");
    fs::write(seed.join("commit"), log.encode()).expect("write");
    set_mode(&seed.join("commit"), 0o644);
    let script = r#"umask 077; mkdir -p "$1/.firn/tx-1/new" "$1/.firn/tx-1/away" && cp "$2" "$1/.firn/tx-1/commit""#;
    let mut sh = as_attacker("sh");
    sh.args(["-c", script, "sh"])
        .arg(sandbox.join("backing"))
        .arg(seed.join("commit"));
    run(&mut sh).ok();
}

/// Overwrites `victim`, a file beside the backing.
fn forged_bytes(victim: &Path) -> Entry {
    let name = victim.file_name().expect("a name").to_string_lossy();
    let data = DataChange {
        cut: 6,
        size: 6,
        written: vec![WrittenRange {
            start: 0,
            end: 6,
            source: BytesSource::Inline(b"FORGED".to_vec()),
        }],
        grows: false,
    };
    Entry {
        unchanged_name: Some(EntryName::new(0, format!("../{name}"))),
        redo: EntrySide {
            data: Some(data),
            ..EntrySide::default()
        },
        ..Entry::new(1, identity(victim), false)
    }
}

/// Proves S-priv-7, S-priv-10.
#[test]
fn regression_a_planted_record_of_another_user_is_not_applied_by_a_mount() {
    let sandbox = shared_sandbox("planted");
    let victim = sandbox.join("victim");
    fs::write(&victim, "secret").expect("write");
    set_mode(&victim, 0o600);
    plant(&sandbox, forged_bytes(&victim));
    for options in [OPTIONS.to_owned(), format!("{OPTIONS},drain=commit")] {
        let outcome = mount(&sandbox, &options);
        assert_eq!(fs::read(&victim).expect("read"), b"secret", "{options}");
        let told = outcome
            .code(NOT_FIRN)
            .says(".firn")
            .says("belongs to user 65534")
            .stderr;
        assert!(
            told.contains(&*sandbox.join("backing").to_string_lossy()),
            "{told}"
        );
        assert!(sandbox.arenas().is_empty(), "an arena is left behind");
    }
}

/// Proves S-priv-7, S-priv-10.
#[test]
fn regression_a_planted_record_is_not_applied_by_recover_and_held_data_stays() {
    let sandbox = shared_sandbox("plantrecover");
    let victim = sandbox.join("victim");
    fs::write(&victim, "secret").expect("write");
    let held = FirnMount::new(&sandbox, HELD);
    fs::write(held.join("file"), "acknowledged").expect("write");
    let backing = held.kill();
    plant(&sandbox, forged_bytes(&victim));
    let recover = || sandbox.run(["recover".as_ref(), backing.as_os_str()]);
    let outcome = recover();
    assert_eq!(fs::read(&victim).expect("read"), b"secret");
    outcome.code(NOT_FIRN).says("belongs to user 65534");
    fs::remove_dir_all(backing.join(".firn")).expect("take the plant away");
    recover().ok();
    assert_eq!(
        fs::read(backing.join("file")).expect("read"),
        b"acknowledged"
    );
}

/// Proves S-priv-7.
#[test]
fn regression_a_planted_record_makes_no_set_user_id_program() {
    let sandbox = shared_sandbox("plantsuid");
    let backing = sandbox.join("backing");
    fs::write(sandbox.join("tool-of-root"), "x").expect("write");
    set_mode(&sandbox.join("tool-of-root"), 0o4755);
    let own = backing.join("own");
    run(as_attacker("touch").arg(&own)).ok();
    let entry = Entry {
        unchanged_name: Some(EntryName::new(0, b"own")),
        redo: EntrySide {
            copy_at: Some(StagedPath {
                dir: "../../../..".into(),
                name: "tool-of-root".into(),
            }),
            changes_attributes: true,
            ..EntrySide::default()
        },
        ..Entry::new(1, identity(&own), false)
    };
    plant(&sandbox, entry);
    mount(&sandbox, OPTIONS).code(NOT_FIRN);
    let meta = fs::metadata(&own).expect("stat");
    assert_eq!((meta.uid(), meta.mode() & 0o4000), (ATTACKER, 0));
}

/// Proves S-priv-7, S-priv-10.
#[test]
fn regression_what_is_no_directory_of_transactions_makes_a_clear_error() {
    let sandbox = shared_sandbox("plantkind");
    let backing = sandbox.join("backing");
    let firn = backing.join(".firn");
    let make: [(&str, &dyn Fn()); 4] = [
        ("is a regular file instead of a directory", &|| {
            fs::write(&firn, "x").expect("write")
        }),
        ("is a symbolic link instead of a directory", &|| {
            symlink("/etc", &firn).expect("symlink")
        }),
        ("is a named pipe instead of a directory", &|| {
            run(Command::new("mkfifo").arg(&firn)).ok();
        }),
        ("has mode 0777", &|| {
            fs::create_dir(&firn).expect("mkdir");
            set_mode(&firn, 0o777);
        }),
    ];
    for (words, make) in make {
        make();
        for drain in ["eager", "commit"] {
            let outcome = mount(&sandbox, &format!("{OPTIONS},drain={drain}"));
            outcome.code(NOT_FIRN).says(words).says("move it away");
            assert!(
                sandbox.arenas().is_empty(),
                "{words}: an arena is left behind"
            );
        }
        if firn.symlink_metadata().expect("stat").is_dir() {
            fs::remove_dir(&firn).expect("rmdir");
        } else {
            fs::remove_file(&firn).expect("remove");
        }
    }
    mount(&sandbox, OPTIONS).ok();
}

/// Proves S-priv-7.
#[test]
fn regression_a_huge_sparse_file_among_transactions_does_not_abort_firnd() {
    let sandbox = shared_sandbox("planthuge");
    let dir = sandbox.join("backing/.firn/tx-1");
    fs::create_dir_all(&dir).expect("mkdir");
    for dir in [&sandbox.join("backing/.firn"), &dir] {
        set_mode(dir, 0o700);
    }
    let open = File::create(dir.join("open")).expect("create");
    open.set_len(15 << 40).expect("a sparse file of 15 TiB");
    set_mode(&dir.join("open"), 0o600);
    mount(&sandbox, &format!("{OPTIONS},drain=commit"))
        .code(NOT_FIRN)
        .says("16492674416640 bytes");
    assert!(sandbox.arenas().is_empty(), "an arena is left behind");
}

/// Proves S-priv-8.
#[test]
fn regression_nobody_makes_the_directory_of_transactions_through_a_mount() {
    let sandbox = shared_sandbox("plantthrough");
    let backing = sandbox.join("backing");
    let mount = FirnMount::new(&sandbox, &format!("{OPTIONS},allow-other"));
    let at = mount.join(".firn");
    let attempts = [
        ("mkdir", vec![at.as_os_str()]),
        ("touch", vec![at.as_os_str()]),
        ("mkfifo", vec![at.as_os_str()]),
        (
            "ln",
            vec![OsStr::new("-s"), OsStr::new("/etc"), at.as_os_str()],
        ),
    ];
    for (program, args) in attempts {
        for mut command in [as_attacker(program), Command::new(program)] {
            let outcome = run(command.args(&args));
            assert!(
                outcome.stderr.contains("not permitted"),
                "{program}: {}",
                outcome.stderr
            );
        }
    }
    fs::create_dir(mount.join("dir")).expect("mkdir");
    let refused = fs::rename(mount.join("dir"), &at).expect_err("a rename to it");
    assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
    fs::create_dir(mount.join("dir/.firn")).expect("below the top it is a name as any");
    assert!(!backing.join(".firn").exists());
    // One that is there is not shown.
    fs::create_dir(backing.join(".firn")).expect("mkdir");
    let missing = fs::metadata(&at).expect_err("hidden");
    assert_eq!(missing.raw_os_error(), Some(libc::ENOENT));
    let names = fs::read_dir(mount.path())
        .expect("list")
        .flatten()
        .map(|entry| entry.file_name());
    assert!(names.collect::<Vec<_>>() == ["dir"]);
    fs::remove_dir(backing.join(".firn")).expect("rmdir");
    mount.umount();
}

/// A directory for arenas that others share, and the options that use it.
fn arena_dir(sandbox: &Sandbox, mode: u32) -> (PathBuf, String) {
    let dir = sandbox.runtime().join("arenas");
    fs::create_dir_all(&dir).expect("mkdir");
    set_mode(&dir, mode);
    let options = format!("{HELD},arena-dir={}", dir.display());
    (dir, options)
}

fn only_file(dir: &Path) -> PathBuf {
    let files: Vec<_> = fs::read_dir(dir)
        .expect("list")
        .flatten()
        .map(|entry| entry.path())
        .collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files[0].clone()
}

/// Proves S-priv-9.
#[test]
fn regression_an_arena_of_another_owner_is_not_attached() {
    let sandbox = shared_sandbox("plantarena");
    let (dir, options) = arena_dir(&sandbox, 0o1777);
    let held = FirnMount::new(&sandbox, &options);
    fs::write(held.join("file"), "of the attacker").expect("write");
    let backing = held.kill();
    let arena = only_file(&dir);
    let bytes = fs::read(&arena).expect("read");
    let recover = || {
        let dir = format!("--arena-dir={}", dir.display());
        sandbox.run(["recover".as_ref(), OsStr::new(&dir), backing.as_os_str()])
    };
    let check = || sandbox.run(["check".as_ref(), arena.as_os_str()]);
    let must_refuse = |words: &str| {
        mount(&sandbox, &options).code(NOT_FIRN).says(words);
        recover().code(NOT_FIRN).says(words);
        check().code(NOT_FIRN).says(words);
        assert_eq!(
            fs::read(backing.join("file")).unwrap_or_default(),
            b"",
            "{words}: its bytes were drained"
        );
        assert!(
            fs::read(&arena).expect("read") == bytes,
            "{words}: it was written to"
        );
    };
    chown(&arena, Some(ATTACKER), None).expect("chown");
    must_refuse("belongs to user 65534");
    chown(&arena, Some(0), None).expect("chown");
    set_mode(&arena, 0o666);
    must_refuse("has mode 0666");
    set_mode(&arena, 0o600);
    fs::hard_link(&arena, dir.join("other")).expect("link");
    must_refuse("has 2 names");
    fs::remove_file(dir.join("other")).expect("remove");
    fs::rename(&arena, sandbox.runtime().join("moved")).expect("rename");
    symlink(sandbox.runtime().join("moved"), &arena).expect("symlink");
    must_refuse("symbolic link");
    fs::rename(sandbox.runtime().join("moved"), &arena).expect("rename");
    recover().ok();
    assert_eq!(
        fs::read(backing.join("file")).expect("read"),
        b"of the attacker"
    );
}

/// Proves S-priv-12.
#[test]
fn regression_an_arena_dir_in_which_others_may_replace_files_is_refused() {
    let sandbox = shared_sandbox("plantdir");
    for mode in [0o777, 0o775] {
        let (dir, options) = arena_dir(&sandbox, mode);
        mount(&sandbox, &options).code(NOT_FIRN).says("sticky");
        assert_eq!(fs::read_dir(&dir).expect("list").count(), 0);
    }
    let (dir, options) = arena_dir(&sandbox, 0o755);
    chown(&dir, Some(ATTACKER), None).expect("chown");
    mount(&sandbox, &options)
        .code(NOT_FIRN)
        .says("belongs to user 65534");
    chown(&dir, Some(0), None).expect("chown");
    mount(&sandbox, &options).ok();
}

/// Proves S-priv-12.
#[test]
fn regression_a_spill_directory_in_which_others_may_replace_files_is_refused() {
    let sandbox = shared_sandbox("plantspilldir");
    let dir = sandbox.mkdir("disk");
    for place in [dir.clone(), dir.join("file")] {
        let options = format!("{HELD},spill={}", place.display());
        for mode in [0o777, 0o775] {
            set_mode(&dir, mode);
            mount(&sandbox, &options).code(NOT_FIRN).says("sticky");
            assert_eq!(fs::read_dir(&dir).expect("list").count(), 0);
        }
        set_mode(&dir, 0o1777);
        mount(&sandbox, &options).ok();
    }
}

/// Proves S-priv-9.
#[test]
fn regression_a_spill_file_of_another_owner_is_neither_read_nor_replaced() {
    let sandbox = shared_sandbox("plantspill");
    let spill = sandbox.join("spill");
    let options = format!("{HELD},spill={}", spill.display());
    let backing = FirnMount::new(&sandbox, &options).kill();
    chown(&spill, Some(ATTACKER), None).expect("chown");
    let bytes = fs::read(&spill).expect("read");
    for _ in 0..2 {
        mount(&sandbox, &options)
            .code(NOT_FIRN)
            .says("spill")
            .says("belongs to user 65534");
        assert!(fs::read(&spill).expect("read") == bytes);
    }
    fs::remove_file(&spill).expect("remove");
    mount(&sandbox, &options).ok();
    assert!(backing.exists() && !spill.exists());
}

/// Proves S-priv-9.
#[test]
fn regression_a_planted_backup_directory_is_refused_and_nothing_in_it_removed() {
    let sandbox = shared_sandbox("plantbackup");
    let backup = sandbox.mkdir("backup");
    set_mode(&backup, 0o1777);
    let options = format!(
        "{OPTIONS},drain=commit,backup={},backup-every=1s",
        backup.display()
    );
    mount(&sandbox, &options).ok();
    let home = home_of(&backup);
    fs::remove_dir(&home).expect("empty");
    let victim = sandbox.mkdir("victim");
    fs::write(victim.join("thesis"), "ten years").expect("write");
    let plants: [(&str, &dyn Fn()); 2] = [
        ("symbolic link", &|| {
            symlink(&victim, &home).expect("symlink")
        }),
        ("belongs to user 65534", &|| {
            run(as_attacker("mkdir").arg("-m").arg("700").arg(&home)).ok();
        }),
    ];
    for (words, plant) in plants {
        plant();
        mount(&sandbox, &options).code(NOT_FIRN).says(words);
        assert_eq!(fs::read(victim.join("thesis")).expect("read"), b"ten years");
        if home.symlink_metadata().expect("stat").is_dir() {
            fs::remove_dir(&home).expect("rmdir");
        } else {
            fs::remove_file(&home).expect("remove");
        }
    }
    set_mode(&backup, 0o777);
    mount(&sandbox, &options).code(NOT_FIRN).says("sticky");
}

/// Proves S-priv-13.
#[test]
fn regression_a_backup_loses_only_what_firn_put_there() {
    let sandbox = shared_sandbox("backupnames");
    let backup = sandbox.mkdir("backup");
    let options = format!(
        "{OPTIONS},drain=commit,backup={},backup-every=1s",
        backup.display()
    );
    mount(&sandbox, &options).ok();
    let home = home_of(&backup);
    let over = home.join("tx-1-0123456789abcdef");
    for dir in [home.join("notes"), home.join("tx-1-mine"), over.clone()] {
        fs::create_dir(&dir).expect("mkdir");
        set_mode(&dir, 0o700);
        fs::write(dir.join("file"), "x").expect("write");
    }
    fs::write(over.join("d0-7"), "a piece").expect("write");
    fs::write(home.join("letter"), "x").expect("write");
    let mount = FirnMount::new(&sandbox, &options);
    wait_until(
        "a round removes what is over",
        Duration::from_secs(30),
        || !over.join("d0-7").exists(),
    );
    for kept in [
        "notes/file",
        "tx-1-mine/file",
        "letter",
        "tx-1-0123456789abcdef/file",
    ] {
        assert_eq!(fs::read(home.join(kept)).expect(kept), b"x");
    }
    firn(&sandbox, "begin", mount.path()).ok();
    fs::write(mount.join("file"), "in a transaction").expect("write");
    firn(&sandbox, "commit", mount.path()).ok();
    let backing = mount.umount();
    assert_eq!(
        fs::read(backing.join("file")).expect("read"),
        b"in a transaction"
    );
    let left = fs::read_dir(&home).expect("list").count();
    assert_eq!(left, 4, "the commit left something in its backup");
}
