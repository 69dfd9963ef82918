//! How writers of held files ended: closed, cut off by a signal, or still open.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use firn_tests::preloaded::DIRECT_AFTER;
use firn_tests::sandbox::preload_library;
use firn_tests::{FirnMount, Sandbox, wait_until};

const DEMAND: &str = "memory=32M,chunk-size=1M,drain=demand";

/// What each writer does with its file `f` once it is open and has a byte.
const BODIES: &[(&str, &str, &str)] = &[
    ("killed", "say(); sleep()", "cut"),
    ("segfault", "os.kill(os.getpid(), signal.SIGSEGV)", "cut"),
    ("terminated", "os.kill(os.getpid(), signal.SIGTERM)", "cut"),
    ("aborted", "os.abort()", "cut"),
    (
        "amid-writes",
        "say()\nwhile True: os.pwrite(f, bytes(100_000), 0)",
        "cut",
    ),
    (
        "threads",
        "threading.Thread(target=sleep).start(); say(); sleep()",
        "cut",
    ),
    (
        "child-of-fork",
        "parent = os.getpid()\nif os.fork(): os._exit(0)\nwhile os.getppid() == parent: time.sleep(0.01)\nos.abort()",
        "cut",
    ),
    // Every process that has the descriptor dies with it, the last one too.
    (
        "parent-and-child",
        "os.fork() or os.abort(); os.wait(); os.abort()",
        "cut",
    ),
    ("exit", "os._exit(0)", "closed"),
    ("exit-in-error", "os._exit(3)", "closed"),
    ("close", "os.close(f)", "closed"),
    (
        "killed-after-close",
        "os.close(f); say(); sleep()",
        "closed",
    ),
    (
        "killed-at-once-after-close",
        "os.close(f); os.kill(os.getpid(), 9)",
        "closed",
    ),
    ("exec", "os.execv('/bin/true', ['true'])", "closed"),
    (
        "killed-after-exec",
        "os.execv('/bin/sh', ['sh', '-c', 'kill -9 $$'])",
        "closed",
    ),
    (
        "parent-closes",
        "os.fork() or os.abort(); os.wait(); os.close(f)",
        "closed",
    ),
    (
        "dup",
        "g = os.dup(f); os.close(f); os.kill(os.getpid(), 9)",
        "cut",
    ),
    (
        "inherited-by-exec",
        "os.set_inheritable(f, True); os.execv('/bin/sh', ['sh', '-c', 'kill -9 $$'])",
        "cut",
    ),
];

const HEAD: &str = "\
import os, signal, sys, threading, time
f = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o644)
os.write(f, b'x' * 3000)
def say(): print('here', flush=True)
def sleep():
    while True: time.sleep(1000)
";

fn writer(path: &Path, body: &str, preload: bool) -> Child {
    let mut command = Command::new("python3");
    command
        .arg("-c")
        .arg(format!("{HEAD}{body}\n"))
        .arg(path)
        .stdout(Stdio::piped());
    command.stderr(Stdio::null());
    if preload {
        command.env("LD_PRELOAD", preload_library());
        command.env(DIRECT_AFTER, "0");
    }
    command.spawn().expect("start python3")
}

fn endings(sandbox: &Sandbox, mount: &FirnMount) -> BTreeMap<String, String> {
    let list = sandbox
        .run([
            OsStr::new("ls"),
            OsStr::new("--json"),
            mount.path().as_os_str(),
        ])
        .ok()
        .json();
    let word = |file: &serde_json::Value, key: &str| file[key].as_str().expect("a word").to_owned();
    list.as_array()
        .expect("a list")
        .iter()
        .map(|file| (word(file, "path"), word(file, "ending")))
        .collect()
}

/// Runs every writer; the files are what their last processes left.
fn run(name: &str, options: &str, preload: bool) {
    let sandbox = Sandbox::new(name);
    let mount = FirnMount::new(&sandbox, options);
    for (name, body, _) in BODIES {
        let mut child = writer(&mount.join(name), body, preload);
        if body.contains("say()") {
            let mut line = String::new();
            BufReader::new(child.stdout.as_mut().expect("piped"))
                .read_line(&mut line)
                .expect("read");
            assert_eq!(line, "here\n", "{name}");
            child.kill().expect("kill");
            // Not waited for yet: what a zombie left is known too.
            wait_until("its end", Duration::from_secs(30), || {
                endings(&sandbox, &mount)[*name] != "open"
            });
        }
        child.wait().expect("wait");
    }
    let expected: BTreeMap<_, _> = BODIES
        .iter()
        .map(|(n, _, e)| ((*n).to_owned(), (*e).to_owned()))
        .collect();
    wait_until(
        "the kernel releases all of them",
        Duration::from_secs(30),
        || {
            endings(&sandbox, &mount)
                .values()
                .all(|ending| ending != "open")
        },
    );
    assert_eq!(endings(&sandbox, &mount), expected);

    // It is kept when firnd dies, and as long as the file is not made anew.
    let backing = mount.kill();
    let mount = FirnMount::over(&sandbox, &backing, options);
    assert_eq!(endings(&sandbox, &mount), expected);
    std::fs::write(mount.join("killed"), "again").expect("write");
    wait_until("the file made anew", Duration::from_secs(30), || {
        endings(&sandbox, &mount)["killed"] == "closed"
    });
}

/// Proves S-demand-7, S-demand-8.
#[test]
fn a_writer_that_dies_of_a_signal_is_told_from_one_that_closes() {
    run("endings", DEMAND, false);
}

/// Proves S-demand-7.
#[test]
fn so_is_a_writer_with_direct_access() {
    run("endingsdirect", DEMAND, true);
}

/// One FUSE thread serves the exec that closes descriptors, and must not wait for it: most of /proc/PID
/// would.
#[test]
fn regression_programs_are_replaced_while_their_descriptors_close_with_one_thread() {
    run("endingsone", &format!("{DEMAND},fuse-threads=1"), false);
}
