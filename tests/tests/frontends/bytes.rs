//! Names that are not UTF-8, each beside one that looks like it: every verb, the C library, transactions, stub trees
//! and mounts themselves mean exactly the one that is named.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use firn_protocol::path::BytePath;
use firn_tests::c::{Installed, Link};
use firn_tests::mount::{SMALL, patient};
use firn_tests::random::bytes;
use firn_tests::sandbox::{is_mounted, kill, kill_and_wait, preload_library};
use firn_tests::{FirnMount, Outcome, Sandbox, run, wait_until};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(60);
/// Not UTF-8, and with bytes that mount tables and terminals escape.
const NAME: &[u8] = b"caf\xe9 \xff\n\\x";
/// What a conversion to UTF-8 would make of it.
const DECOY: &str = "caf\u{fffd} \u{fffd}\n\\x";
/// How people are shown it.
const SHOWN: &str = r"caf\xe9 \xff\n\\x";

/// How JSON has it, behind a directory.
fn in_json(dir: &str) -> Value {
    json!({ "escaped": format!("{dir}{}", "caf\\xe9 \\xff\n\\\\x") })
}

fn name() -> &'static OsStr {
    OsStr::from_bytes(NAME)
}

fn firn(sandbox: &Sandbox, args: &[&str], path: &Path) -> Outcome {
    sandbox.run(args.iter().map(OsStr::new).chain([path.as_os_str()]))
}

/// Bytes of files that are not in the backing, by their paths.
fn held(mount: &FirnMount<'_>, sandbox: &Sandbox) -> Vec<(Vec<u8>, u64)> {
    let listed = firn(sandbox, &["ls", "--json"], mount.path()).ok().json();
    let one = |file: &Value| {
        let path: BytePath = serde_json::from_value(file["path"].clone()).expect("a path");
        (
            path.as_bytes().to_vec(),
            file["held_bytes"].as_u64().expect("a number"),
        )
    };
    listed.as_array().expect("a list").iter().map(one).collect()
}

/// Proves S-fsync-5, S-name-7, S-seen-2.
#[test]
fn regression_every_verb_means_exactly_the_file_that_is_named() {
    let sandbox = Sandbox::new("bytes");
    let mount = FirnMount::new(&sandbox, &patient("drain=demand,passthrough=off"));
    let path = mount.join(name());
    let decoy = mount.join(DECOY);
    fs::write(&decoy, bytes(1, 9_000)).expect("write");
    let write = |len| fs::write(&path, bytes(2, len)).expect("write");
    write(5_000);
    let both = |first| vec![(NAME.to_vec(), first), (DECOY.as_bytes().to_vec(), 9_000)];
    assert_eq!(held(&mount, &sandbox), both(5_000));
    let shown = firn(&sandbox, &["ls"], mount.path()).ok().stdout;
    assert!(shown.lines().any(|line| line.ends_with(SHOWN)), "{shown}");

    // One verb after the other, each on new bytes.
    let told = firn(&sandbox, &["wait", "--until", "durable", "--json"], &path)
        .ok()
        .json();
    assert_eq!(
        (&told["path"], &told["reached"]),
        (&in_json(""), &json!(true))
    );
    assert_eq!(held(&mount, &sandbox), both(0));
    assert_eq!(
        fs::read(mount.backing().join(name())).expect("drained"),
        bytes(2, 5_000)
    );
    write(6_000);
    let begun = firn(&sandbox, &["drain", "--json"], &path).ok().json();
    assert_eq!(
        (&begun["path"], &begun["held_files"]),
        (&in_json(""), &json!(1)),
        "{begun}"
    );
    firn(&sandbox, &["drain", "--wait"], &path).ok();
    assert_eq!(held(&mount, &sandbox), both(0));
    let evicted = firn(&sandbox, &["evict", "--json"], &path).ok().json();
    assert_eq!(
        (&evicted["freed_bytes"], &evicted["held_bytes"]),
        (&json!(6_000), &json!(0))
    );
    write(7_000);
    let pinned = firn(&sandbox, &["pin", "--json"], &path).ok().json();
    assert_eq!(
        (&pinned["files"], &pinned["bytes"]),
        (&json!(1), &json!(7_000)),
        "{pinned}"
    );
    let status = firn(&sandbox, &["status", "--json"], &path).ok().json();
    let files = status["files"].as_array().expect("a list");
    assert_eq!(
        (files.len(), &files[0]["path"]),
        (1, &in_json("")),
        "{status}"
    );
    firn(&sandbox, &["status"], &path).ok().says("");
    let chunks = firn(&sandbox, &["chunks", "--json"], &path).ok().json();
    assert_eq!(
        (&chunks["path"], &chunks["bytes"]),
        (&in_json(""), &json!(7_000))
    );
    firn(
        &sandbox,
        &["chunks"],
        &mount.join(OsStr::from_bytes(b"\xfe")),
    )
    .code(1)
    .says(r"\xfe: no such file");
    firn(&sandbox, &["wait"], &mount.join(OsStr::from_bytes(b"\xfe")))
        .code(1)
        .says(r"\xfe: no such file");

    // By the path in the backing, and below a directory.
    fs::create_dir(mount.join("dir")).expect("mkdir");
    fs::create_dir(mount.join("dir").join(name())).expect("mkdir");
    fs::write(mount.join("dir").join(name()).join(name()), "deep").expect("write");
    let deep = Path::new("dir").join(name()).join(name());
    let told = firn(&sandbox, &["wait", "--json"], &mount.backing().join(&deep))
        .ok()
        .json();
    let written: BytePath = serde_json::from_value(told["path"].clone()).expect("a path");
    assert_eq!(written.as_path(), deep);
    assert_eq!(
        fs::read(mount.backing().join(&deep)).expect("drained"),
        b"deep"
    );
    assert_eq!(
        held(&mount, &sandbox)[1],
        (DECOY.as_bytes().to_vec(), 9_000),
        "the decoy waits still"
    );
    let backing = mount.umount();
    assert_eq!(
        fs::read(backing.join(DECOY)).expect("drained"),
        bytes(1, 9_000)
    );
    assert_eq!(
        fs::read(backing.join(name())).expect("drained"),
        bytes(2, 7_000)
    );
}

/// Each name is a checkpoint of its own. Proves S-prune-1.
#[test]
fn checkpoints_with_such_names_are_pruned_by_their_own_files() {
    let sandbox = Sandbox::new("bytes-prune");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let time = |age: u64| std::time::SystemTime::now() - std::time::Duration::from_secs(age);
    for (dir, age) in [
        (OsStr::new("old"), 4000),
        (name(), 3000),
        (OsStr::new(DECOY), 2000),
        (OsStr::new("new"), 1000),
    ] {
        fs::create_dir(mount.join(dir)).expect("mkdir");
        let file = fs::File::create(mount.join(dir).join(name())).expect("create");
        file.set_modified(time(age)).expect("utimensat");
        drop(file);
        fs::File::open(mount.join(dir))
            .and_then(|dir| dir.set_modified(time(age)))
            .expect("utimensat");
    }
    // One that is open stays, and only that one.
    let open = fs::File::options()
        .append(true)
        .open(mount.join(name()).join(name()))
        .expect("open");
    // The kernel reports the end of an open file after close(2) has returned.
    let wait_for_open_files =
        |count| wait_until("files end", LIMIT, || mount.status().open_files == count);
    wait_for_open_files(1);
    let told = firn(&sandbox, &["prune", "--keep", "2", "--json"], mount.path())
        .ok()
        .json();
    assert_eq!(told["removed"], json!(["old"]), "{told}");
    assert!(
        told["kept"]
            .as_array()
            .expect("a list")
            .contains(&json!({ "name": in_json(""), "why": "open" })),
        "{told}"
    );
    drop(open);
    wait_for_open_files(0);
    let told = firn(&sandbox, &["prune", "--keep", "2", "--json"], mount.path())
        .ok()
        .json();
    assert_eq!(told["removed"], json!([in_json("")]), "{told}");
    assert!(mount.join(DECOY).exists() && !mount.join(name()).exists());
    mount.umount();
}

/// The arena's superblock has room for 3072 bytes of the path.
#[test]
fn regression_data_over_a_backing_with_a_long_path_is_found_again() {
    let sandbox = Sandbox::new("bytes-long");
    let mut backing = sandbox.join("backing");
    while backing.as_os_str().len() < 3500 {
        backing.push("d".repeat(200));
    }
    fs::create_dir_all(&backing).expect("mkdir");
    let mount = FirnMount::over(&sandbox, &backing, &patient("close=held"));
    fs::write(mount.join("file"), bytes(1, 5_000)).expect("write");
    mount.kill();
    let mount = FirnMount::over(&sandbox, &backing, &patient("close=held"));
    assert_eq!(fs::read(mount.join("file")).expect("read"), bytes(1, 5_000));
    mount.umount();
    assert_eq!(
        fs::read(backing.join("file")).expect("read"),
        bytes(1, 5_000)
    );
}

/// What the backing refuses, and what has no file any more, is told by its name.
#[test]
fn errors_and_lost_files_have_their_exact_names() {
    let sandbox = Sandbox::new("bytes-lost");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    fs::write(mount.join(name()), bytes(1, 5_000)).expect("write");
    fs::write(mount.join(DECOY), bytes(2, 6_000)).expect("write");
    let backing = mount.kill();
    fs::remove_file(backing.join(name())).expect("remove beside the mount");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let status = mount.status();
    assert_eq!(
        (status.lost_file_bytes, status.errors.len()),
        (5_000, 1),
        "{status:?}"
    );
    assert_eq!(status.errors[0].path.as_bytes(), NAME);
    firn(&sandbox, &["status"], mount.path()).ok().says("");
    let shown = firn(&sandbox, &["status"], mount.path()).ok().stdout;
    assert!(shown.contains(SHOWN), "{shown}");
    let backing = mount.kill();
    let copies = sandbox.mkdir("copies");
    let args = ["recover", "--json", "--save-lost"].map(OsStr::new);
    let report = sandbox
        .run(
            args.into_iter()
                .chain([copies.as_os_str(), backing.as_os_str()]),
        )
        .ok()
        .json();
    assert_eq!(report["lost"][0]["path"], in_json(""), "{report}");
    let saved: BytePath =
        serde_json::from_value(report["lost"][0]["saved_to"].clone()).expect("a path");
    assert_eq!(fs::read(saved.as_path()).expect("saved"), bytes(1, 5_000));
    assert_eq!(
        fs::read(copies.join(name())).expect("saved"),
        bytes(1, 5_000)
    );
    assert_eq!(
        fs::read(backing.join(DECOY)).expect("drained"),
        bytes(2, 6_000)
    );
}

/// Proves S-tx-1, S-tx-2, S-tx-3, S-tx-4, S-tx-7, S-tx-18.
#[test]
fn regression_a_transaction_covers_exactly_the_directory_that_is_named() {
    for mode in ["buffer", "shadow"] {
        let sandbox = Sandbox::new("bytes-tx");
        let options = patient(&format!("drain=commit,mode={mode}"));
        let mut mount = FirnMount::new(&sandbox, &options);
        let top = mount.join(name());
        let decoy = mount.join(DECOY);
        let behind = mount.backing().join(name());
        for dir in [&top, &decoy] {
            fs::create_dir(dir).expect("mkdir");
            fs::write(dir.join(name()), "before").expect("write");
        }
        mount.wait("durable", mount.path()).ok();
        let read = |dir: &Path| fs::read_to_string(dir.join(name())).expect("read");
        let put = |text: &str| {
            fs::write(top.join(name()), text).expect("write");
            fs::write(decoy.join(name()), text).expect("write");
            fs::write(top.join("new"), text).expect("write");
        };
        let begun = firn(&sandbox, &["begin", "--json"], &top).ok().json();
        assert_eq!(begun["scope"], in_json(""), "{begun}");
        put("one");
        let status = mount.status();
        assert_eq!(status.transactions.len(), 1);
        assert_eq!(status.transactions[0].scope.as_bytes(), NAME);
        firn(&sandbox, &["begin"], &top.join("below")).code(1);
        firn(&sandbox, &["begin"], mount.path())
            .code(11)
            .says(SHOWN);
        firn(&sandbox, &["abort"], &decoy)
            .code(1)
            .says("no transaction is open");
        firn(&sandbox, &["abort"], &top).ok().says(SHOWN);
        assert_eq!(
            (read(&top), read(&decoy), top.join("new").exists()),
            ("before".into(), "one".into(), false)
        );
        // A commit, then one that is prepared over the death of firnd.
        firn(&sandbox, &["begin"], &top).ok();
        put("two");
        firn(&sandbox, &["commit", "--id", "1"], &top).ok();
        assert_eq!(
            (read(&behind), behind.join("new").exists()),
            ("two".into(), true)
        );
        firn(&sandbox, &["begin"], &top).ok();
        put("three");
        firn(&sandbox, &["prepare", "--id", "2"], &top).ok();
        kill(mount.pid(), libc::SIGKILL);
        mount.wait_for_end();
        mount.abandon();
        mount = FirnMount::new(&sandbox, &options);
        let status = mount.status();
        assert_eq!(
            (
                status.transactions[0].scope.as_bytes(),
                status.transactions[0].id
            ),
            (NAME, Some(2))
        );
        firn(&sandbox, &["restore", "--id", "2"], &top).ok();
        assert_eq!(
            (read(&top), read(&behind)),
            ("three".into(), "three".into())
        );
        // What is open when firnd dies is undone, by a recovery too.
        firn(&sandbox, &["begin"], &top).ok();
        put("four");
        let backing = mount.kill();
        firn(&sandbox, &["recover", "--json"], &backing).ok();
        mount = FirnMount::new(&sandbox, &options);
        assert_eq!(
            (read(&top), read(&behind)),
            ("three".into(), "three".into()),
            "{mode}"
        );
        mount.umount();
        assert_eq!(read(&behind), "three");
        assert_eq!(
            fs::read_to_string(behind.join("new")).expect("read"),
            "three"
        );
    }
}

/// A directory beside the sandbox's own, with a name of bytes.
fn made(sandbox: &Sandbox, what: &str) -> PathBuf {
    let dir = sandbox.join(OsString::from_iter([
        OsStr::new(what),
        name(),
        OsStr::new(","),
    ]));
    fs::create_dir(&dir).expect("mkdir");
    dir
}

/// The mount table has such paths in a form of its own. Proves S-name-8.
#[test]
fn regression_backing_mount_point_arena_and_spill_file_may_have_such_names() {
    let sandbox = Sandbox::new("bytes-mount");
    let backing = made(&sandbox, "backing");
    let point = made(&sandbox, "point");
    let disk = made(&sandbox, "disk");
    let arena_dir = sandbox.runtime().join(name());
    fs::create_dir(&arena_dir).expect("mkdir");
    let mount = |options: &str| {
        let mut firn = sandbox.firn(["mount", "-o", options]);
        // In a list of options the path could have no comma.
        firn.env("FIRN_SPILL", &disk)
            .arg("--arena-dir")
            .arg(&arena_dir)
            .arg(&backing)
            .arg(&point);
        run(&mut firn).ok();
        assert!(is_mounted(&point));
    };
    let options = "arena-size=16M,chunk-size=1M,drain=demand,spill-size=64M";
    mount(options);
    let data = bytes(1, 24 << 20);
    fs::write(point.join(name()), &data).expect("write");
    let status = firn(&sandbox, &["status", "--json"], &point).ok().json();
    let path = |value: &Value| {
        PathBuf::from(serde_json::from_value::<BytePath>(value.clone()).expect("a path"))
    };
    assert_eq!(
        (path(&status["backing"]), path(&status["mount_point"])),
        (backing.clone(), point.clone())
    );
    assert!(
        path(&status["arena"]).starts_with(&arena_dir)
            && path(&status["spill"]["path"]).starts_with(&disk)
    );
    // Mounts of other tests are in the list too, and their firnd cannot be asked from here.
    let all = sandbox.run(["status"]).stdout;
    assert!(
        all.lines().any(|line| line.matches(SHOWN).count() == 2),
        "{all}"
    );
    let metrics = firn(&sandbox, &["status", "--prometheus"], &point)
        .ok()
        .stdout;
    assert!(
        metrics
            .lines()
            .all(|line| line.starts_with("# ") || line.starts_with("firn_")),
        "{metrics}"
    );
    let told = firn(&sandbox, &["check", "--json"], &point).json();
    assert_eq!(path(&told["backing"]), backing);
    let chunks = firn(&sandbox, &["chunks", "--json"], &point.join(name()))
        .ok()
        .json();
    assert_eq!(
        path(&chunks["region"]["spill"]["path"]),
        path(&status["spill"]["path"])
    );

    // firnd dies; the same pair again, which finds the spill file by what the arena says of it.
    let pid = status["pid"].as_u64().expect("a number") as u32;
    kill_and_wait(&[pid]);
    firn(&sandbox, &["status"], &point).code(1).says("is dead");
    mount(options);
    assert_eq!(fs::read(point.join(name())).expect("read"), data);
    firn(
        &sandbox,
        &["wait", "--until", "durable"],
        &backing.join(name()),
    )
    .ok();
    assert_eq!(fs::read(backing.join(name())).expect("drained"), data);
    fs::write(point.join("more"), "more").expect("write");
    firn(&sandbox, &["umount", "--keep-held"], &point).ok();
    assert!(!is_mounted(&point));
    let mut recover = sandbox.firn(["recover", "--json", "--arena-dir"]);
    let report = run(recover.arg(&arena_dir).arg(&backing)).ok().json();
    assert_eq!(
        (&report["recovered_bytes"], path(&report["arena"]).parent()),
        (&json!(4), Some(&*arena_dir))
    );
    assert_eq!(fs::read(backing.join("more")).expect("drained"), b"more");
    fs::remove_dir_all(&arena_dir).expect("remove");
}

/// As mount(8) calls for a line of fstab, and with the path in the list.
#[test]
fn the_helper_of_mount_takes_paths_as_bytes() {
    let sandbox = Sandbox::new("bytes-fstab");
    let backing = sandbox.join(name());
    let point = sandbox.join("mnt");
    let disk = sandbox.mkdir("disk");
    let disk = disk.join(OsStr::from_bytes(b"\xff"));
    fs::create_dir(&backing).expect("mkdir");
    fs::create_dir(&disk).expect("mkdir");
    let helper = sandbox.join("mount.firn");
    std::os::unix::fs::symlink(firn_tests::sandbox::firn_binary(), &helper).expect("symlink");
    let mut mount = Command::new(&helper);
    sandbox.environment(&mut mount);
    let list = [
        b"arena-size=16M,chunk-size=1M,spill=",
        disk.as_os_str().as_bytes(),
        b",rw",
    ]
    .concat();
    mount
        .arg(&backing)
        .arg(&point)
        .arg("-o")
        .arg(OsStr::from_bytes(&list));
    run(&mut mount).ok();
    let status = firn(&sandbox, &["status", "--json"], &point).ok().json();
    let spill: BytePath = serde_json::from_value(status["spill"]["path"].clone()).expect("a path");
    assert!(spill.as_path().starts_with(&disk), "{spill}");
    firn(&sandbox, &["umount"], &backing).ok();
    // Anything else that is no text is refused.
    let mut wrong = Command::new(&helper);
    sandbox.environment(&mut wrong);
    wrong
        .arg(&backing)
        .arg(&point)
        .arg("-o")
        .arg(OsStr::from_bytes(b"close=\xff"));
    run(&mut wrong).code(1).says(r"`\xff` is not");
}

/// Proves S-name-8, S-tx-11, S-tx-57.
#[test]
fn a_backup_may_be_in_a_directory_with_such_a_name() {
    let sandbox = Sandbox::new("bytes-backup");
    let backing = sandbox.join("backing");
    let point = sandbox.join("mnt");
    let backup = made(&sandbox, "backup");
    fs::create_dir(backing.join(name())).expect("mkdir");
    let mut mount = sandbox.firn(["mount", "-o", SMALL, "--drain=commit", "--backup"]);
    run(mount.arg(&backup).arg(&backing).arg(&point)).ok();
    let scope = point.join(name());
    firn(&sandbox, &["begin"], &scope).ok();
    fs::write(scope.join(name()), "one").expect("write");
    firn(&sandbox, &["prepare", "--id", "7"], &scope).ok();
    let status = firn(&sandbox, &["status", "--json"], &point).ok().json();
    assert_eq!(
        status["transactions"][0]["backup"]["whole"],
        json!(true),
        "{status}"
    );
    kill_and_wait(&[status["pid"].as_u64().expect("a number") as u32]);
    firn_tests::sandbox::unmount_lazily(&point);
    // The host is lost with its backing; this is a copy of it as it was.
    let copy = made(&sandbox, "copy");
    fs::create_dir(copy.join(name())).expect("mkdir");
    let mut recover = sandbox.firn(["recover", "--json", "--id", "7", "--from-backup"]);
    let report = run(recover.arg(&backup).arg(&copy)).ok().json();
    assert_eq!(
        (&report["scope"], &report["committed"]),
        (&in_json(""), &json!(true)),
        "{report}"
    );
    assert_eq!(
        fs::read(copy.join(name()).join(name())).expect("there"),
        b"one"
    );
}

/// Proves S-fsync-5.
#[test]
fn regression_the_c_library_takes_paths_as_bytes() {
    let sandbox = Sandbox::new("bytes-c");
    let installed = Installed::new(&sandbox);
    let program = installed.compile("tests/c/list.c", Link::Shared);
    let mount = FirnMount::new(&sandbox, &patient("drain=demand,passthrough=off"));
    let dir = mount.join(name());
    fs::create_dir(&dir).expect("mkdir");
    let path = dir.join(name());
    fs::write(&path, bytes(1, 70_000)).expect("write");
    fs::write(dir.join(DECOY), bytes(2, 50_000)).expect("write");
    run(installed
        .command(&program)
        .arg("errors")
        .args([&path, &dir])
        .arg(sandbox.path()))
    .ok();
    let mut command = installed.command(&program);
    let mut child = command
        .arg("hold")
        .arg(&path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it");
    let mut answers = BufReader::new(child.stdout.take().expect("piped"))
        .lines()
        .map_while(Result::ok);
    assert_eq!(answers.next().as_deref(), Some("held"));
    fs::write(dir.join(DECOY), "changed").expect("write");
    let mut order = |word: &str| {
        writeln!(child.stdin.as_ref().expect("piped"), "{word}").expect("it takes orders");
        answers.next().expect("an answer")
    };
    assert_eq!(order("check"), "0 0", "it is the other one that changed");
    fs::write(&path, "changed").expect("write");
    assert_eq!(order("check"), "0 1");
    drop(child.stdin.take());
    assert!(child.wait().expect("wait").success());
    mount.umount();
    let mount = FirnMount::new(&sandbox, &patient("drain=commit"));
    let program = installed.compile("tests/c/transaction.c", Link::Static);
    fs::create_dir(mount.join(DECOY)).expect("mkdir");
    run(installed
        .command(&program)
        .arg("steps")
        .arg(mount.join(name())))
    .ok();
    mount.umount();
}

/// Proves S-stub-1, S-stub-2, S-stub-4.
#[test]
fn regression_a_stub_tree_and_its_files_may_have_such_names() {
    let sandbox = Sandbox::new("bytes-stub");
    let backing = made(&sandbox, "backing");
    let prefix = made(&sandbox, "prefix");
    let mount = || {
        let mut firn = sandbox.firn([
            "mount",
            "-o",
            "arena-size=64M,close=held,drain=demand,frontend=preload",
        ]);
        run(firn.arg(&backing).arg(&prefix)).ok();
    };
    let shell = |script: &str| {
        let mut command = Command::new("bash");
        sandbox.environment(&mut command);
        command
            .env("LD_PRELOAD", preload_library())
            .args(["-euc", script, "bash"])
            .arg(&prefix)
            .arg(name());
        run(&mut command).ok().stdout
    };
    mount();
    shell(
        r#"mkdir "$1/$2"; printf text > "$1/$2/$2"; printf other > "$1/other"; mv "$1/other" "$1/$2/moved""#,
    );
    let path = prefix.join(name()).join(name());
    let told = firn(&sandbox, &["wait", "--json"], &path).ok().json();
    let found: BytePath = serde_json::from_value(told["path"].clone()).expect("a path");
    assert_eq!(found.as_path(), Path::new(name()).join(name()));
    assert_eq!(
        fs::read(backing.join(name()).join(name())).expect("drained"),
        b"text"
    );
    assert_eq!(
        fs::read(backing.join(name()).join("moved")).expect("a name"),
        b"",
        "held"
    );
    assert_eq!(shell(r#"cat "$1/$2/$2" "$1/$2/moved""#), "textother");
    let status = firn(&sandbox, &["status", "--json"], &backing).ok().json();
    let point: BytePath = serde_json::from_value(status["mount_point"].clone()).expect("a path");
    assert_eq!(point.as_path(), prefix);
    // firnd dies; the next one at the same prefix has all of it.
    let pid = status["pid"].as_u64().expect("a number") as u32;
    kill_and_wait(&[pid]);
    firn(&sandbox, &["status"], &prefix).code(1).says(SHOWN);
    mount();
    assert_eq!(shell(r#"cat "$1/$2/$2" "$1/$2/moved""#), "textother");
    firn(&sandbox, &["umount"], &prefix).ok();
    assert_eq!(
        fs::read(backing.join(name()).join("moved")).expect("drained"),
        b"other"
    );
}

/// The preload library, on a mount, and the prefix of a job.
#[test]
fn regression_a_job_may_have_such_a_prefix() {
    let sandbox = Sandbox::new("bytes-run");
    let backing = made(&sandbox, "backing");
    let prefix = made(&sandbox, "prefix");
    let script = r#"head -c 100000 /dev/zero > "$FIRN_PREFIX/$0"; cp "$FIRN_PREFIX/$0" "$FIRN_PREFIX/copy"; printf %s "$FIRN_PREFIX" > "$1""#;
    let told = sandbox.join("told");
    for frontend in ["fuse", "preload"] {
        let mut firn = sandbox.firn(["run", "--memory", "32M", "--frontend", frontend, "--prefix"]);
        firn.arg(&prefix)
            .arg("--backing")
            .arg(&backing)
            .args(["--", "sh", "-euc", script])
            .arg(name())
            .arg(&told);
        run(&mut firn).ok();
        assert_eq!(
            fs::read(&told).expect("read"),
            prefix.as_os_str().as_bytes(),
            "{frontend}"
        );
        for file in [name(), OsStr::new("copy")] {
            assert_eq!(
                fs::read(backing.join(file)).expect("drained"),
                vec![0; 100_000],
                "{frontend} {file:?}"
            );
            fs::remove_file(backing.join(file)).expect("remove");
        }
    }
}
