//! Files that live in memory: `drain=demand`.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use firn_tests::fsops::{assert_same_bytes, open_rw, read};
use firn_tests::random::bytes;
use firn_tests::sandbox::{firn_binary, kill};
use firn_tests::{FirnMount, Sandbox, wait_until};

const MIB: usize = 1 << 20;
const DEMAND: &str = "memory=32M,chunk-size=1M,drain=demand";

fn firn(sandbox: &Sandbox, verb: &str, path: &std::path::Path) -> serde_json::Value {
    sandbox
        .run([OsStr::new(verb), OsStr::new("--json"), path.as_os_str()])
        .ok()
        .json()
}

/// Proves S-demand-1.
#[test]
fn files_stay_in_memory_until_they_are_asked_for() {
    let sandbox = Sandbox::new("demand");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let path = mount.join("step/rank0");
    let behind = mount.backing().join("step/rank0");
    fs::create_dir(mount.join("step")).expect("mkdir");
    let data = bytes(1, 5 * MIB + 77);
    fs::write(&path, &data).expect("write");
    assert_eq!(
        fs::metadata(&behind).expect("its name is there").len(),
        0,
        "drained unasked"
    );
    assert_eq!(fs::metadata(&path).expect("stat").len(), data.len() as u64);
    assert_same_bytes("from memory", &read(&path), &data);

    sandbox
        .run([
            OsStr::new("drain"),
            OsStr::new("--wait"),
            mount.join("step").as_os_str(),
        ])
        .ok();
    assert_same_bytes("in the backing", &read(&behind), &data);
    let status = mount.status();
    assert_eq!(
        (status.held_bytes, status.cached_bytes),
        (0, data.len() as u64)
    );
    assert_same_bytes("still from memory", &read(&path), &data);

    let freed = firn(&sandbox, "evict", &mount.join("step"));
    assert_eq!(freed["freed_bytes"], data.len() as u64);
    assert_eq!(mount.status().arena_used_bytes, 0);
    assert_same_bytes("from the backing", &read(&path), &data);
}

/// Proves S-demand-2: what is cached never hides a change, by write, truncate, or beside the mount.
#[test]
fn what_is_kept_in_memory_follows_every_change() {
    let sandbox = Sandbox::new("demandchange");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let path = mount.join("f");
    let behind = mount.backing().join("f");
    let mut expected = bytes(1, 3 * MIB);
    fs::write(&path, &expected).expect("write");
    sandbox
        .run([
            OsStr::new("drain"),
            OsStr::new("--wait"),
            mount.path().as_os_str(),
        ])
        .ok();

    let file = open_rw(&path);
    file.write_all_at(&bytes(2, 5000), 100_000).expect("write");
    expected[100_000..105_000].copy_from_slice(&bytes(2, 5000));
    assert_same_bytes("after a write", &read(&path), &expected);
    file.set_len(1_500_000).expect("truncate");
    file.set_len(2_000_000).expect("truncate");
    expected.truncate(1_500_000);
    expected.resize(2_000_000, 0);
    assert_same_bytes("after two truncations", &read(&path), &expected);
    drop(file);

    sandbox
        .run([
            OsStr::new("drain"),
            OsStr::new("--wait"),
            mount.path().as_os_str(),
        ])
        .ok();
    assert_same_bytes("in the backing", &read(&behind), &expected);
    fs::write(&behind, b"by somebody else").expect("write beside the mount");
    assert_same_bytes(
        "changed beside the mount",
        &read(&path),
        b"by somebody else",
    );
}

/// Proves S-demand-3.
#[test]
fn a_full_memory_is_enospc_and_harms_no_file() {
    let sandbox = Sandbox::new("demandfull");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let data = bytes(3, 20 * MIB);
    fs::write(mount.join("first"), &data).expect("it fits");
    let second = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(mount.join("second"));
    let second = second.expect("create");
    let mut taken = 0;
    let error = loop {
        match second.write_at(&data[taken..][..MIB], taken as u64) {
            Ok(n) => taken += n,
            Err(error) => break error,
        }
    };
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    assert!((4 * MIB..=12 * MIB).contains(&taken), "{taken}");
    assert_same_bytes("first", &read(&mount.join("first")), &data);
    assert_same_bytes("second", &read(&mount.join("second")), &data[..taken]);

    // Once drained, the room is taken from what is only kept to be read again.
    sandbox
        .run([
            OsStr::new("drain"),
            OsStr::new("--wait"),
            mount.path().as_os_str(),
        ])
        .ok();
    second
        .write_all_at(&data[taken..], taken as u64)
        .expect("there is room again");
    assert_same_bytes("second", &read(&mount.join("second")), &data);
    assert_same_bytes("first", &read(&mount.join("first")), &data);
    assert!(mount.status().evicted_bytes > 0);
}

/// Proves S-demand-4.
#[test]
fn pinned_files_are_not_evicted_to_make_room() {
    let sandbox = Sandbox::new("demandpin");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let data = bytes(4, 10 * MIB);
    for name in ["a", "b"] {
        fs::write(mount.join(name), &data).expect("write");
    }
    assert_eq!(firn(&sandbox, "pin", &mount.join("a"))["files"], 1);
    sandbox
        .run([
            OsStr::new("drain"),
            OsStr::new("--wait"),
            mount.path().as_os_str(),
        ])
        .ok();
    fs::write(mount.join("c"), bytes(5, 18 * MIB)).expect("b makes room");
    let status = mount.status();
    assert_eq!(
        (status.cached_bytes, status.evicted_bytes),
        (10 * MIB as u64, 10 * MIB as u64)
    );
    sandbox
        .run([
            OsStr::new("pin"),
            OsStr::new("--off"),
            mount.join("a").as_os_str(),
        ])
        .ok();
    sandbox
        .run([
            OsStr::new("drain"),
            OsStr::new("--wait"),
            mount.path().as_os_str(),
        ])
        .ok();
    fs::write(mount.join("d"), bytes(6, 10 * MIB)).expect("a makes room");
}

/// Proves S-demand-5. The restart: every process is gone, firnd too, and the files are there, in memory.
#[test]
fn a_later_mount_has_what_was_in_memory() {
    let sandbox = Sandbox::new("demandlater");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let data = bytes(7, 8 * MIB);
    fs::write(mount.join("f"), &data).expect("write");
    let backing = mount.kill();

    let mount = FirnMount::over(&sandbox, &backing, DEMAND);
    assert_eq!(
        mount.status().held_bytes,
        data.len() as u64,
        "drained unasked"
    );
    assert_same_bytes("after a kill", &read(&mount.join("f")), &data);
    let point = mount.path().to_owned();
    sandbox
        .run([
            OsStr::new("umount"),
            OsStr::new("--keep-held"),
            point.as_os_str(),
        ])
        .ok();
    mount.abandon();
    assert_eq!(
        fs::metadata(backing.join("f")).expect("stat").len(),
        0,
        "drained unasked"
    );

    let mount = FirnMount::over(&sandbox, &backing, DEMAND);
    assert_same_bytes("after umount --keep-held", &read(&mount.join("f")), &data);
    let backing = mount.umount();
    assert_same_bytes("in the backing", &read(&backing.join("f")), &data);
}

/// Proves S-prune-1, S-prune-2, S-prune-3.
#[test]
fn old_checkpoints_go_and_what_may_be_needed_stays() {
    let sandbox = Sandbox::new("prune");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let names = || {
        let entries = fs::read_dir(mount.path()).expect("list");
        let mut names: Vec<_> = entries
            .map(|entry| {
                entry
                    .expect("entry")
                    .file_name()
                    .into_string()
                    .expect("UTF-8")
            })
            .collect();
        names.sort();
        names
    };
    let prune = |more: &[&str]| {
        let words = ["prune", "--keep", "2"].iter().chain(more).map(OsStr::new);
        sandbox.run(words.chain([mount.path().as_os_str()])).ok()
    };
    let data = bytes(8, 100_000);
    for step in ["step1", "step2", "step3", "step4", "step5"] {
        fs::create_dir(mount.join(step)).expect("mkdir");
        for rank in 0..2 {
            fs::write(mount.join(format!("{step}/rank{rank}")), &data).expect("write");
        }
    }
    fs::create_dir(mount.join(".hidden")).expect("mkdir");
    fs::write(mount.join("log"), b"a file is no checkpoint").expect("write");
    std::os::unix::fs::symlink("step1", mount.join("good")).expect("symlink");
    let reader = fs::File::open(mount.join("step2/rank0")).expect("open");
    let before = names();

    let plan: serde_json::Value = prune(&["--dry-run", "--json"]).json();
    assert_eq!(plan["removed"], serde_json::json!(["step3"]), "{plan}");
    assert_eq!(names(), before, "a dry run removes nothing");

    prune(&[]).says("1 checkpoint removed, 4 kept");
    assert_eq!(
        names(),
        [".hidden", "good", "log", "step1", "step2", "step4", "step5"]
    );
    assert_same_bytes("linked", &read(&mount.join("good/rank1")), &data);
    drop(reader);
    // What an interrupted removal left.
    fs::rename(mount.join("step2"), mount.join(".step2.pruned")).expect("rename");
    fs::remove_file(mount.join("good")).expect("unlink");
    wait_until(
        "the reader's close has come to firnd",
        Duration::from_secs(30),
        || {
            prune(&[]);
            names() == [".hidden", "log", "step4", "step5"]
        },
    );
    assert_same_bytes("kept", &read(&mount.join("step4/rank0")), &data);

    let elsewhere = sandbox.mkdir("plain");
    sandbox
        .run([
            OsStr::new("prune"),
            OsStr::new("--keep"),
            OsStr::new("1"),
            elsewhere.as_os_str(),
        ])
        .code(10);
    sandbox
        .run([
            OsStr::new("prune"),
            OsStr::new("--keep"),
            OsStr::new("0"),
            mount.path().as_os_str(),
        ])
        .code(2);
}

/// Proves S-demand-7, S-demand-8: what was open when firnd died is told from what was closed.
#[test]
fn files_that_were_cut_off_are_told_apart() {
    let sandbox = Sandbox::new("demandcut");
    let mount = FirnMount::new(&sandbox, DEMAND);
    fs::write(mount.join("whole"), bytes(9, 5000)).expect("write");
    let open = fs::File::create(mount.join("open")).expect("create");
    open.write_all_at(&bytes(10, 100), 0).expect("write");
    let endings = |sandbox: &Sandbox, mount: &FirnMount| {
        let list = firn(sandbox, "ls", mount.path());
        let list = list.as_array().expect("a list").clone();
        let word =
            |file: &serde_json::Value, key: &str| file[key].as_str().expect("a word").to_owned();
        list.iter()
            .map(|file| format!("{} {}", word(file, "path"), word(file, "ending")))
            .collect::<Vec<_>>()
    };
    wait_until(
        "the kernel releases what was closed",
        Duration::from_secs(30),
        || endings(&sandbox, &mount) == ["open open", "whole closed"],
    );
    let backing = mount.kill();
    drop(open);
    let mount = FirnMount::over(&sandbox, &backing, DEMAND);
    assert_eq!(endings(&sandbox, &mount), ["open cut", "whole closed"]);
    let cut = sandbox
        .run([
            OsStr::new("ls"),
            OsStr::new("--state=cut"),
            mount.path().as_os_str(),
        ])
        .ok();
    assert_eq!(cut.stdout.lines().count(), 1);
}

/// What a mount with a spill file leaves in memory and on the disk.
fn left_behind(sandbox: &Sandbox, spill: &Path) -> Vec<PathBuf> {
    let spilled = fs::read_dir(spill).expect("list the spill directory");
    let spilled = spilled.map(|entry| entry.expect("entry").path());
    sandbox.arenas().into_iter().chain(spilled).collect()
}

/// Proves S-discard-1, S-discard-2, S-discard-3.
#[test]
fn held_data_is_dropped_only_when_that_is_asked_for_explicitly() {
    let sandbox = Sandbox::new("discard");
    let spill = sandbox.mkdir("local");
    let options = format!("{DEMAND},spill={},spill-size=64M", spill.display());
    let mount = FirnMount::new(&sandbox, &options);
    let drained = bytes(8, MIB);
    let held = bytes(9, 40 * MIB);
    fs::write(mount.join("drained"), &drained).expect("write");
    firn(&sandbox, "drain", &mount.join("drained"));
    mount.wait("drained", &mount.join("drained")).ok();
    fs::write(mount.join("held"), &held).expect("write");
    let point = mount.path().to_owned();
    let umount = |options: &[&str]| {
        let args = ["umount"].iter().chain(options).map(OsStr::new);
        sandbox.run(args.chain([point.as_os_str()]))
    };

    umount(&["--discard"])
        .code(2)
        .says("40.0 MiB in 1 file")
        .says("--yes");
    umount(&["--discard", "--keep-held", "--yes"]).code(2);
    umount(&["--yes"]).code(2);
    let open = fs::File::open(mount.join("held")).expect("open");
    umount(&["--discard", "--yes"]).code(11).says("in use");
    drop(open);
    assert_eq!(
        mount.status().held_bytes,
        held.len() as u64,
        "nothing is dropped"
    );
    assert_same_bytes("still there", &read(&mount.join("held")), &held);

    umount(&["--discard", "--yes"])
        .ok()
        .says("dropped 40.0 MiB in 1 file");
    let backing = mount.backing().to_owned();
    mount.abandon();
    assert_eq!(left_behind(&sandbox, &spill), Vec::<PathBuf>::new());
    assert_same_bytes(
        "what was drained",
        &read(&backing.join("drained")),
        &drained,
    );
    let mount = FirnMount::over(&sandbox, &backing, &options);
    assert_eq!(
        fs::metadata(mount.join("held")).expect("its name").len(),
        0,
        "a mount that comes later has nothing of it"
    );

    // A dead firnd cannot be asked: its data stays for the mount that comes next.
    fs::write(mount.join("held"), &drained).expect("write");
    kill(mount.pid(), libc::SIGKILL);
    mount.wait_for_end();
    umount(&["--discard", "--yes"])
        .code(1)
        .says("firn recover --discard");
    mount.kill();
    let mount = FirnMount::over(&sandbox, &backing, &options);
    assert_same_bytes("kept", &read(&mount.join("held")), &drained);
    mount.umount();
}

/// Proves S-discard-2.
#[test]
fn on_a_terminal_firn_asks_before_it_drops_held_data() {
    let sandbox = Sandbox::new("discardask");
    let mount = FirnMount::new(&sandbox, DEMAND);
    fs::write(mount.join("held"), bytes(10, MIB)).expect("write");
    let command = format!(
        "{} umount --discard {}",
        firn_binary().display(),
        mount.path().display()
    );
    let asked = |answer: &str| {
        let mut script = Command::new("script");
        script.args(["-qec", &command, "/dev/null"]);
        sandbox.environment(&mut script);
        let mut child = script
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("script(1)");
        let stdin = child.stdin.as_mut().expect("stdin");
        writeln!(stdin, "{answer}").expect("answer");
        let output = child.wait_with_output().expect("wait");
        let shown = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(shown.contains("drops 1.0 MiB in 1 file"), "{shown}");
        (output.status.code(), shown)
    };
    let (code, shown) = asked("y");
    assert_eq!(code, Some(1), "{shown}");
    assert!(shown.contains("nothing was dropped"), "{shown}");
    assert_eq!(mount.status().held_bytes, MIB as u64);
    let (code, shown) = asked("yes");
    assert_eq!(code, Some(0), "{shown}");
    mount.wait_for_end();
    assert_eq!(
        fs::metadata(mount.backing().join("held"))
            .expect("stat")
            .len(),
        0
    );
}

/// Proves S-discard-1.
#[test]
fn a_stub_tree_is_dropped_with_its_names() {
    let sandbox = Sandbox::new("discardtree");
    let mount = FirnMount::new(&sandbox, &format!("{DEMAND},frontend=preload"));
    fs::create_dir(mount.join("dir")).expect("mkdir");
    fs::write(mount.join("dir/stub"), b"").expect("a name");
    let args = ["umount", "--discard", "--yes"].map(OsStr::new);
    sandbox
        .run(args.into_iter().chain([mount.path().as_os_str()]))
        .ok();
    assert!(!mount.backing().join("dir").exists());
    assert_eq!(sandbox.arenas(), Vec::<PathBuf>::new());
    mount.abandon();
}
