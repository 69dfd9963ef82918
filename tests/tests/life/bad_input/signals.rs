//! SIGTERM and Ctrl-C while programs write: what was acknowledged is in the backing, or in an arena
//! that recovers.

use std::process::Command;
use std::time::Duration;

use firn_tests::ack::verify;
use firn_tests::command::{exit_code, wait_child};
use firn_tests::sandbox::{is_mounted, kill};
use firn_tests::{FirnMount, Sandbox, helper_binary, wait_until};

fn start_writer(sandbox: &Sandbox) -> std::process::Child {
    std::fs::create_dir(sandbox.join("mnt/files")).expect("mkdir");
    let mut command = Command::new(helper_binary());
    command
        .arg("writer")
        .args([sandbox.join("mnt/files"), sandbox.join("log")])
        .arg("11");
    command.spawn().expect("start a writer")
}

fn busy(sandbox: &Sandbox) {
    let log = sandbox.join("log");
    wait_until("the writer is busy", Duration::from_secs(20), || {
        std::fs::metadata(&log).is_ok_and(|meta| meta.len() > 8000)
    });
}

fn all_is_there(sandbox: &Sandbox) {
    if !sandbox.arenas().is_empty() {
        sandbox
            .run(["recover".as_ref(), sandbox.join("backing").as_os_str()])
            .ok();
    }
    assert!(verify(&sandbox.join("backing/files"), &sandbox.join("log")).ops > 0);
}

#[test]
fn sigterm_during_a_busy_mount_loses_nothing() {
    let sandbox = Sandbox::new("sigterm");
    let mount = FirnMount::new(
        &sandbox,
        "arena-size=32M,chunk-size=1M,close=held,drain-age=10min",
    );
    let mut writer = start_writer(&sandbox);
    busy(&sandbox);
    kill(mount.pid(), libc::SIGTERM);
    mount.wait_for_end();
    assert!(
        wait_child(&mut writer, Duration::from_secs(30)).is_some(),
        "the writer hangs after SIGTERM"
    );
    drop(mount);
    all_is_there(&sandbox);
}

#[test]
fn ctrl_c_of_a_foreground_mount_loses_nothing() {
    let sandbox = Sandbox::new("sigint");
    let mut firn = sandbox.firn(["mount", "--foreground"]);
    firn.arg(sandbox.join("backing"))
        .arg(sandbox.join("mnt"))
        .args(["-o", "arena-size=32M,chunk-size=1M,close=held"]);
    let mut firnd = firn.spawn().expect("firn mount --foreground");
    wait_until("mounted", Duration::from_secs(20), || {
        is_mounted(&sandbox.join("mnt"))
    });
    let mut writer = start_writer(&sandbox);
    busy(&sandbox);
    kill(firnd.id(), libc::SIGINT);
    let status = wait_child(&mut firnd, Duration::from_secs(60)).expect("firnd ends after Ctrl-C");
    assert!(
        [0, 130].contains(&exit_code(status)),
        "exit code {status:?}"
    );
    assert!(
        wait_child(&mut writer, Duration::from_secs(30)).is_some(),
        "the writer hangs after Ctrl-C"
    );
    all_is_there(&sandbox);
}

/// Proves S-crash-3.
#[test]
fn sigterm_of_an_idle_mount_drains_unmounts_and_leaves_no_arena() {
    let sandbox = Sandbox::new("idle");
    let mount = FirnMount::new(&sandbox, "arena-size=32M,close=held,drain-age=10min");
    std::fs::write(mount.join("file"), "held").expect("write");
    kill(mount.pid(), libc::SIGTERM);
    mount.wait_for_end();
    assert!(!is_mounted(mount.path()));
    assert_eq!(
        std::fs::read(mount.backing().join("file")).expect("read"),
        b"held"
    );
    assert!(sandbox.arenas().is_empty(), "an empty arena is left");
}
