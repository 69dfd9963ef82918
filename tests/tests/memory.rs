//! Files that live in memory: `drain=demand`.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use firn_tests::fsops::{assert_same_bytes, open_rw, read};
use firn_tests::random::bytes;
use firn_tests::{FirnMount, Sandbox, wait_until};

const MIB: usize = 1 << 20;
const DEMAND: &str = "memory=32M,chunk-size=1M,drain=demand";

fn firn(sandbox: &Sandbox, verb: &str, path: &std::path::Path) -> serde_json::Value {
    sandbox.run([OsStr::new(verb), OsStr::new("--json"), path.as_os_str()]).ok().json()
}

/// Proves S-demand-1.
#[test]
fn files_stay_in_memory_until_somebody_asks_for_them() {
    let sandbox = Sandbox::new("demand");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let (path, behind) = (mount.join("step/rank0"), mount.backing().join("step/rank0"));
    fs::create_dir(mount.join("step")).expect("mkdir");
    let data = bytes(1, 5 * MIB + 77);
    fs::write(&path, &data).expect("write");
    assert_eq!(fs::metadata(&behind).expect("its name is there").len(), 0, "drained unasked");
    assert_eq!(fs::metadata(&path).expect("stat").len(), data.len() as u64);
    assert_same_bytes("from memory", &read(&path), &data);

    sandbox.run([OsStr::new("drain"), OsStr::new("--wait"), mount.join("step").as_os_str()]).ok();
    assert_same_bytes("in the backing", &read(&behind), &data);
    let status = mount.status();
    assert_eq!((status.held_bytes, status.cached_bytes), (0, data.len() as u64));
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
    let (path, behind) = (mount.join("f"), mount.backing().join("f"));
    let mut expected = bytes(1, 3 * MIB);
    fs::write(&path, &expected).expect("write");
    sandbox.run([OsStr::new("drain"), OsStr::new("--wait"), mount.path().as_os_str()]).ok();

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

    sandbox.run([OsStr::new("drain"), OsStr::new("--wait"), mount.path().as_os_str()]).ok();
    assert_same_bytes("in the backing", &read(&behind), &expected);
    fs::write(&behind, b"by somebody else").expect("write beside the mount");
    assert_same_bytes("changed beside the mount", &read(&path), b"by somebody else");
}

/// Proves S-demand-3.
#[test]
fn a_full_memory_is_enospc_and_harms_no_file() {
    let sandbox = Sandbox::new("demandfull");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let data = bytes(3, 20 * MIB);
    fs::write(mount.join("first"), &data).expect("it fits");
    let second = OpenOptions::new().write(true).create(true).truncate(true).open(mount.join("second"));
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
    sandbox.run([OsStr::new("drain"), OsStr::new("--wait"), mount.path().as_os_str()]).ok();
    second.write_all_at(&data[taken..], taken as u64).expect("there is room again");
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
    sandbox.run([OsStr::new("drain"), OsStr::new("--wait"), mount.path().as_os_str()]).ok();
    fs::write(mount.join("c"), bytes(5, 18 * MIB)).expect("b makes room");
    let status = mount.status();
    assert_eq!((status.cached_bytes, status.evicted_bytes), (10 * MIB as u64, 10 * MIB as u64));
    sandbox.run([OsStr::new("pin"), OsStr::new("--off"), mount.join("a").as_os_str()]).ok();
    sandbox.run([OsStr::new("drain"), OsStr::new("--wait"), mount.path().as_os_str()]).ok();
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
    assert_eq!(mount.status().held_bytes, data.len() as u64, "drained unasked");
    assert_same_bytes("after a kill", &read(&mount.join("f")), &data);
    let point = mount.path().to_owned();
    sandbox.run([OsStr::new("umount"), OsStr::new("--keep-held"), point.as_os_str()]).ok();
    mount.abandon();
    assert_eq!(fs::metadata(backing.join("f")).expect("stat").len(), 0, "drained unasked");

    let mount = FirnMount::over(&sandbox, &backing, DEMAND);
    assert_same_bytes("after umount --keep-held", &read(&mount.join("f")), &data);
    let backing = mount.umount();
    assert_same_bytes("in the backing", &read(&backing.join("f")), &data);
}

/// Proves S-demand-6. Multilevel checkpointing: each second checkpoint drains by itself, the oldest ones go.
#[test]
fn checkpoints_drain_in_turn_and_old_ones_go() {
    let sandbox = Sandbox::new("demandkeep");
    fs::create_dir_all(sandbox.join("backing/before")).expect("mkdir");
    let mount = FirnMount::new(&sandbox, &format!("{DEMAND},keep=2,drain-every=2"));
    let data = bytes(8, MIB);
    let names = || {
        let mut names: Vec<_> = fs::read_dir(mount.backing())
            .expect("list")
            .map(|entry| entry.expect("entry").file_name().into_string().expect("utf-8"))
            .collect();
        names.sort();
        names
    };
    for step in 0..5 {
        // Under another name until it is whole, as careful programs do.
        let (unfinished, dir) = (mount.join(format!("step{step}.tmp")), mount.join(format!("step{step}")));
        fs::create_dir(&unfinished).expect("mkdir");
        for rank in 0..2 {
            fs::write(unfinished.join(format!("rank{rank}")), &data).expect("write");
        }
        fs::rename(&unfinished, &dir).expect("rename");
        let behind = mount.backing().join(format!("step{step}/rank1"));
        if step % 2 == 0 {
            wait_until("the checkpoint drains", Duration::from_secs(30), || {
                fs::metadata(&behind).is_ok_and(|found| found.len() == data.len() as u64)
            });
        }
    }
    assert_eq!(mount.status().held_bytes % (2 * MIB as u64), 0);
    wait_until("the old ones are removed", Duration::from_secs(30), || names().len() <= 4);
    assert_eq!(names(), ["before", "step2", "step3", "step4"]);
    assert_eq!(fs::metadata(mount.backing().join("step3/rank0")).expect("stat").len(), 0, "not its turn");
    for step in 2..5 {
        assert_same_bytes("kept", &read(&mount.join(format!("step{step}/rank0"))), &data);
    }
}

/// Proves S-demand-7: what was open when firnd died is told from what was closed.
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
        let word = |file: &serde_json::Value, key: &str| file[key].as_str().expect("a word").to_owned();
        list.iter().map(|file| format!("{} {}", word(file, "path"), word(file, "ending"))).collect::<Vec<_>>()
    };
    wait_until("the kernel releases what was closed", Duration::from_secs(30), || {
        endings(&sandbox, &mount) == ["open open", "whole closed"]
    });
    let backing = mount.kill();
    drop(open);
    let mount = FirnMount::over(&sandbox, &backing, DEMAND);
    assert_eq!(endings(&sandbox, &mount), ["open cut", "whole closed"]);
    let cut = sandbox.run([OsStr::new("ls"), OsStr::new("--state=cut"), mount.path().as_os_str()]).ok();
    assert_eq!(cut.stdout.lines().count(), 1);
}
