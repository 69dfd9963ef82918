//! `firn history` and `firn latest`.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use firn_tests::mount::patient;
use firn_tests::preloaded::Frontend;
use firn_tests::transaction::{firn, firn_with};
use firn_tests::{FirnMount, Sandbox, run};
use serde_json::{Value, json};

fn history(sandbox: &Sandbox, dir: &Path) -> Vec<Value> {
    let told = firn_with(sandbox, "history", dir, &["--json"]).ok().json();
    told.as_array().expect("a list").clone()
}

/// One word of each checkpoint, the newest first.
fn column(list: &[Value], key: &str) -> Vec<Value> {
    list.iter().map(|one| one[key].clone()).collect()
}

/// A checkpoint of two files that was written at second `time`.
fn write_step(dir: &Path, time: u64) {
    fs::create_dir_all(dir).expect("mkdir");
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(time);
    for rank in 0..2 {
        let mut file = fs::File::create(dir.join(format!("rank{rank}"))).expect("create");
        file.write_all(&[7; 1000]).expect("write");
        file.set_modified(time).expect("utimensat");
    }
    let dir = fs::File::open(dir).expect("open");
    dir.set_modified(time).expect("utimensat");
}

fn latest(sandbox: &Sandbox, dir: &Path) -> String {
    let told = firn(sandbox, "latest", dir).ok();
    told.stdout.trim_end().to_owned()
}

/// Proves S-history-1, S-history-2, S-history-3.
#[test]
fn the_checkpoints_of_a_mount_are_told_with_step_state_and_level() {
    let sandbox = Sandbox::new("history");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let top = mount.join("run");
    firn(&sandbox, "latest", mount.path())
        .code(1)
        .says("has no checkpoint");
    for step in [100, 200, 300] {
        write_step(&top.join(format!("step_{step}")), 1_000_000 + step);
    }
    // What is no checkpoint.
    write_step(&top.join("logs"), 2_000_000);
    write_step(&top.join("step_400.tmp"), 2_000_000);
    write_step(&top.join(".step_500"), 2_000_000);
    fs::write(top.join("notes"), b"x").expect("write");
    symlink("step_100", top.join("step_900")).expect("symlink");
    // One that is a file.
    fs::write(top.join("ckpt.0000250.h5"), [7; 500]).expect("write");
    let list = history(&sandbox, &top);
    assert_eq!(
        column(&list, "step"),
        [250, 300, 200, 100].map(|step| json!(step))
    );
    assert_eq!(
        column(&list, "bytes"),
        [500, 2000, 2000, 2000].map(|bytes| json!(bytes))
    );
    assert_eq!(
        column(&list, "files"),
        [1, 2, 2, 2].map(|files| json!(files))
    );
    assert_eq!(column(&list, "level"), vec![json!("held"); 4]);
    assert_eq!(column(&list, "whole"), vec![json!(true); 4]);
    assert!(list[0]["host"].is_string(), "{list:?}");
    assert_eq!(
        latest(&sandbox, &top),
        top.join("ckpt.0000250.h5").to_str().expect("UTF-8")
    );

    // The lowest level of its files counts.
    mount.wait("drained", &top.join("step_300")).ok();
    mount.wait("durable", &top.join("step_200")).ok();
    mount.wait("durable", &top.join("step_100/rank0")).ok();
    let list = history(&sandbox, &top);
    let levels = ["held", "drained", "durable", "held"].map(|level| json!(level));
    assert_eq!(column(&list, "level"), levels);
    assert!(list[2]["host"].is_null(), "{list:?}");

    // The default is the current directory.
    let mut command = sandbox.firn(["latest"]);
    let told = run(command.current_dir(&top)).ok();
    assert_eq!(told.stdout.trim_end(), latest(&sandbox, &top));
    mount.umount();
}

/// Proves S-history-6.
///
/// Another host's write is one to the backing. A directory of many names is listed in several requests, of which only the
/// first brings attributes along.
#[test]
fn a_list_has_what_another_host_wrote_and_not_what_the_kernel_has_cached() {
    let sandbox = Sandbox::new("history-cached");
    let mount = FirnMount::new(&sandbox, "attr-timeout=1h");
    let step = mount.backing().join("step_1");
    fs::create_dir(&step).expect("mkdir");
    let names: Vec<_> = (0..1000).map(|number| format!("rank{number}")).collect();
    for name in &names {
        fs::write(step.join(name), [7; 10]).expect("write");
    }
    for name in &names {
        let seen = fs::metadata(mount.join("step_1").join(name)).expect("stat");
        assert_eq!(seen.len(), 10);
    }
    for name in &names {
        fs::write(step.join(name), [7; 100]).expect("write");
    }
    let list = history(&sandbox, mount.path());
    assert_eq!(column(&list, "bytes"), [json!(100_000)]);
    assert_eq!(column(&list, "files"), [json!(1000)]);
    mount.umount();
}

/// Proves S-history-2, S-history-4.
#[test]
fn what_is_written_cut_empty_or_in_a_transaction_is_not_whole() {
    let sandbox = Sandbox::new("history-whole");
    let mount = FirnMount::new(&sandbox, &patient("drain=commit"));
    let step = |number: u64| mount.join(format!("step_{number}"));
    let state = |number: u64| {
        let list = history(&sandbox, mount.path());
        let found = list.iter().find(|one| one["step"] == number);
        found.map(|one| (one["state"].clone(), one["whole"].clone()))
    };
    let not_whole = |why: &str| Some((json!(why), json!(false)));
    let whole = Some((json!("whole"), json!(true)));
    fs::create_dir(step(1)).expect("mkdir");
    assert_eq!(state(1), not_whole("empty"));
    firn(&sandbox, "latest", mount.path())
        .code(1)
        .says("is whole");
    let mut writer = fs::File::create(step(1).join("rank0")).expect("create");
    writer.write_all(b"bytes").expect("write");
    assert_eq!(state(1), not_whole("written"));
    drop(writer);
    firn_tests::wait_until("the close came to firnd", Duration::from_secs(30), || {
        state(1) == whole
    });
    // A reader blocks nothing.
    let reader = fs::File::open(step(1).join("rank0")).expect("open");
    assert_eq!(state(1), whole);
    drop(reader);

    let script = "exec 3> \"$0\"; echo part >&3; kill -9 $$";
    fs::create_dir(step(2)).expect("mkdir");
    let mut killed = Command::new("sh");
    run(killed.args(["-c", script]).arg(step(2).join("rank0"))).code(137);
    firn_tests::wait_until("the kill came to firnd", Duration::from_secs(30), || {
        state(2) == not_whole("cut")
    });
    // Also when nothing of it is in memory any more.
    mount.wait("durable", mount.path()).ok();
    assert_eq!(state(2), not_whole("cut"));
    assert_eq!(
        latest(&sandbox, mount.path()),
        step(1).to_str().expect("UTF-8")
    );

    fs::create_dir(step(3)).expect("mkdir");
    firn(&sandbox, "begin", &step(3)).ok();
    fs::write(step(3).join("rank0"), b"bytes").expect("write");
    assert_eq!(state(3), not_whole("in-transaction"));
    assert_eq!(
        latest(&sandbox, mount.path()),
        step(1).to_str().expect("UTF-8")
    );
    firn(&sandbox, "commit", &step(3)).ok();
    assert_eq!(state(3), whole);
    assert_eq!(
        latest(&sandbox, mount.path()),
        step(3).to_str().expect("UTF-8")
    );
    mount.umount();
}

/// Proves S-history-5.
#[test]
fn a_backing_that_is_not_mounted_says_what_it_knows() {
    let sandbox = Sandbox::new("history-backing");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    write_step(&mount.join("run/step_1"), 1_000_000);
    let backing = mount.umount();
    let top = backing.join("run");
    let list = history(&sandbox, &top);
    assert_eq!(column(&list, "level"), [json!("drained")]);
    assert_eq!(column(&list, "whole"), [json!(null)]);
    assert_eq!(column(&list, "state"), [json!("unknown")]);
    let told = firn(&sandbox, "latest", &top).ok().says("not mounted");
    assert_eq!(
        told.stdout.trim_end(),
        top.join("step_1").to_str().expect("UTF-8")
    );
    // Of a backing that lacks what is in memory, none is the newest.
    let mount = FirnMount::over(&sandbox, &backing, &patient("close=held"));
    write_step(&mount.join("run/step_2"), 2_000_000);
    // A path of the backing is one of the mount, while there is one.
    assert_eq!(
        latest(&sandbox, &top),
        mount.join("run/step_2").to_str().expect("UTF-8")
    );
    let backing = mount.kill();
    firn_tests::sandbox::unmount_lazily(&sandbox.join("mnt"));
    firn(&sandbox, "latest", &top)
        .code(1)
        .says("left in memory");
    sandbox
        .run([OsStr::new("recover"), backing.as_os_str()])
        .ok();
    let told = firn(&sandbox, "latest", &top).ok();
    assert_eq!(
        told.stdout.trim_end(),
        top.join("step_2").to_str().expect("UTF-8")
    );
}

#[test]
fn names_cannot_steer_what_reads_the_list() {
    let sandbox = Sandbox::new("history-names");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    write_step(&mount.join("step_7\n\x1b[31mstep_8"), 1_000_000);
    let told = firn(&sandbox, "history", mount.path()).ok();
    assert_eq!(told.stdout.lines().count(), 2, "{told}");
    assert!(told.stdout.contains(r"step_7\n\x1b[31mstep_8"), "{told}");
    mount.umount();
}

/// Sizes are those of the files that stubs stand for. Proves S-history-1.
#[test]
fn the_checkpoints_of_a_stub_tree_have_their_sizes_and_levels() {
    let sandbox = Sandbox::new("history-tree");
    let mount = Frontend::Tree.mount(&sandbox, &patient("close=held"));
    for step in [1, 2] {
        let script = "mkdir \"$0\" && head -c 3000 /dev/zero > \"$0/rank0\"";
        let mut command = Command::new("sh");
        command
            .args(["-c", script])
            .arg(mount.join(format!("step_{step}")));
        run(Frontend::Tree.preload(&sandbox, &mut command)).ok();
    }
    mount.wait("durable", &mount.join("step_1")).ok();
    let list = history(&sandbox, mount.path());
    assert_eq!(column(&list, "step"), [json!(2), json!(1)]);
    assert_eq!(column(&list, "bytes"), [json!(3000), json!(3000)]);
    assert_eq!(column(&list, "level"), [json!("held"), json!("durable")]);
    mount.umount();
}
