//! Commit rules and writers that share a descriptor, a scope or a removal: which of them count, and when.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use firn_tests::command::{wait_child, wait_until};
use firn_tests::{FirnMount, Sandbox};

const LIMIT: Duration = Duration::from_secs(60);

/// Runs each line of its input and says what came of it.
const DRIVER: &str = "
import os, subprocess, sys
for line in sys.stdin:
    try:
        exec(line)
        print('ok', flush=True)
    except OSError as error:
        print(error.errno, flush=True)
";

/// A Python program that runs one line after the other.
struct Python {
    child: Child,
    lines: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Python {
    fn start(dir: &Path) -> Self {
        Self::run(Command::new("python3").arg("-c").arg(DRIVER), dir)
    }

    /// As a job of its own: what started it has ended.
    fn start_alone(dir: &Path) -> Self {
        let mut command = Command::new("setsid");
        Self::run(command.args(["--fork", "python3", "-c", DRIVER]), dir)
    }

    fn run(command: &mut Command, dir: &Path) -> Self {
        let command = command.current_dir(dir);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("start python3");
        Self {
            lines: child.stdin.take().expect("piped"),
            answers: BufReader::new(child.stdout.take().expect("piped")),
            child,
        }
    }

    fn answer(&mut self, line: &str) -> String {
        writeln!(self.lines, "{line}").expect("python lives");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("an answer");
        answer.trim().to_owned()
    }

    #[track_caller]
    fn ok(&mut self, line: &str) {
        assert_eq!(self.answer(line), "ok", "{line}");
    }

    /// It ends with success.
    fn end(mut self) {
        self.lines.flush().expect("flush");
        let Self {
            mut child, lines, ..
        } = self;
        drop(lines);
        child.wait().expect("wait");
    }
}

fn mount<'a>(sandbox: &'a Sandbox, rules: &str) -> FirnMount<'a> {
    FirnMount::new(
        sandbox,
        &format!("arena-size=64M,chunk-size=1M,rules={rules}"),
    )
}

fn commits(mount: &FirnMount<'_>, rule: &str) -> u64 {
    mount.status().rule_commits.get(rule).copied().unwrap_or(0)
}

#[track_caller]
fn assert_waits(mount: &FirnMount<'_>, text: &str) {
    let status = mount.status();
    let waits_for = status.transactions[0].waits_for.clone();
    let waits_for = waits_for.expect("it is of a rule");
    assert!(waits_for.contains(text), "{waits_for}");
}

/// Proves S-rule-11.
#[test]
fn the_event_comes_with_the_last_descriptor_that_may_write() {
    let sandbox = Sandbox::new("rules-dup");
    let mount = mount(&sandbox, "lightning-fsdp:torch");
    let backing = mount.backing().to_owned();
    let mut python = Python::start(mount.path());
    python.ok("os.mkdir('a.ckpt'); f = open('a.ckpt/meta.pt', 'w'); f.write('one'); f.flush()");
    python.ok("g = os.dup(f.fileno()); f.close()");
    assert_eq!(commits(&mount, "lightning-fsdp"), 0);
    assert_waits(&mount, "close:meta.pt");
    assert!(!backing.join("a.ckpt").exists());
    python.ok("os.write(g, b' two'); os.close(g)");
    assert_eq!(
        fs::read(backing.join("a.ckpt/meta.pt")).expect("read"),
        b"one two"
    );
    // What has only a copy of the descriptor, and another name for it.
    python.ok("f = open('b.pt', 'w'); c = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=f); f.close()");
    assert_waits(&mount, "its files to be closed");
    python.ok("c.stdin.write(b'from the child'); c.stdin.close(); c.wait()");
    wait_until("the child's file is committed", LIMIT, || {
        commits(&mount, "torch") == 1
    });
    assert_eq!(
        fs::read(backing.join("b.pt")).expect("read"),
        b"from the child"
    );
    // A child that only has the descriptor because it was forked meanwhile.
    python.ok("f = open('c.pt', 'w'); r, w = os.pipe(); p = os.fork() or (os.read(r, 1), os._exit(0)); f.write('x'); f.close()");
    assert_eq!(commits(&mount, "torch"), 1);
    python.ok("os.write(w, b'x'); os.waitpid(p, 0)");
    wait_until("the last copy is closed", LIMIT, || {
        commits(&mount, "torch") == 2
    });
    assert_eq!(fs::read(backing.join("c.pt")).expect("read"), b"x");
    // A child that is killed with it.
    python.ok("f = open('d.pt', 'w'); c = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=f); f.close(); c.kill(); c.wait()");
    python.end();
    // The kernel hears of it after the scope is gone from the status.
    wait_until("what was not complete is dropped", LIMIT, || {
        let is_listed = !mount.status().transactions.is_empty();
        !is_listed && !backing.join("d.pt").exists() && !mount.join("d.pt").exists()
    });
}

/// A thread that starts another program has copies of all descriptors between fork and exec. This child executes a program,
/// which fails, as soon as the close has begun.
///
/// Proves S-rule-2, S-rule-11.
#[test]
fn regression_a_close_waits_for_the_exec_of_a_child_that_has_a_copy() {
    let sandbox = Sandbox::new("rules-exec");
    let mount = mount(&sandbox, "torch");
    let mut python = Python::start(mount.path());
    python.ok("f = open('a.pt', 'w'); f.write('whole'); copy = f'/proc/{os.getpid()}/fdinfo/{f.fileno()}'");
    python.ok(
        "p = os.fork() or (all(iter(lambda: os.path.exists(copy), False)), os.execv('/bin/false', ['false'])); f.close()",
    );
    let behind = mount.backing().join("a.pt");
    assert_eq!(fs::read(&behind).expect("read"), b"whole");
    python.ok("os.waitpid(p, 0)");
    python.end();
    assert_eq!(commits(&mount, "torch"), 1);
    assert_eq!(fs::read(&behind).expect("read"), b"whole");
}

/// Proves S-rule-12.
#[test]
fn a_second_job_gets_ebusy_for_a_file_that_another_writes() {
    let sandbox = Sandbox::new("rules-jobs");
    let mount = mount(&sandbox, "lightning-fsdp");
    let backing = mount.backing().to_owned();
    let mut first = Python::start(mount.path());
    let mut rank = Python::start(mount.path());
    let mut second = Python::start_alone(mount.path());
    first.ok("os.mkdir('a.ckpt'); open('a.ckpt/x', 'w').write('first')");
    rank.ok("open('a.ckpt/x', 'a').write(', and its rank')");
    let busy = libc::EBUSY.to_string();
    for line in [
        "open('a.ckpt/x', 'w').write('second')",
        "os.truncate('a.ckpt/x', 1)",
        "os.remove('a.ckpt/x')",
        "os.rename('a.ckpt/x', 'a.ckpt/y')",
        "os.rename('a.ckpt', 'b.ckpt')",
    ] {
        assert_eq!(second.answer(line), busy, "{line}");
    }
    assert_waits(&mount, "another job was refused a.ckpt/x");
    assert!(sandbox.logs().contains("another job writes a.ckpt/x"));
    first.ok("open('a.ckpt/meta.pt', 'w').write('m')");
    let text = fs::read(backing.join("a.ckpt/x")).expect("read");
    assert_eq!(text, b"first, and its rank");
    // The checkpoint is complete, so the next one may be of another job.
    second.ok("open('a.ckpt/x', 'w').write('second'); open('a.ckpt/meta.pt', 'w').write('n')");
    assert_eq!(fs::read(backing.join("a.ckpt/x")).expect("read"), b"second");
    second.end();
    first.end();
    rank.end();
}

/// Proves S-rule-4 and S-rule-13.
#[test]
fn a_removal_is_meant_if_its_program_ended_well_and_nothing_newer_failed() {
    let sandbox = Sandbox::new("rules-rm");
    let run = |backing: &Path, work: &dyn Fn(&FirnMount<'_>)| {
        let options = "arena-size=64M,chunk-size=1M,rules=torch";
        let mount = FirnMount::over(&sandbox, backing, options);
        fs::write(mount.join("a.pt"), [1; 5000]).expect("write");
        let removed = Command::new("rm").arg(mount.join("a.pt")).status();
        assert!(removed.expect("rm").success());
        assert!(!mount.join("a.pt").exists() && backing.join("a.pt").exists());
        work(&mount);
        mount.umount();
    };
    let meant = sandbox.mkdir("meant");
    run(&meant, &|mount| {
        // The end of `rm` is seen.
        wait_until("the remover is gone", LIMIT, || {
            let status = mount.status();
            let waits_for = status.transactions[0].waits_for.clone();
            waits_for.is_some_and(|text| text.contains("the end of the mount"))
        });
    });
    assert!(!meant.join("a.pt").exists());
    let failed = sandbox.mkdir("failed");
    run(&failed, &|mount| {
        let mut python = Python::start(mount.path());
        python.ok("f = open('b.pt', 'w'); f.write('part'); f.flush()");
        python.child.kill().expect("kill");
        python.child.wait().expect("wait");
        wait_until("b.pt is dropped", LIMIT, || {
            mount.status().rule_aborts.contains_key("torch")
        });
    });
    assert!(failed.join("a.pt").exists() && !failed.join("b.pt").exists());
}

/// Proves S-rule-12.
#[test]
fn a_second_mount_of_the_backing_is_refused_while_a_checkpoint_is_open() {
    let sandbox = Sandbox::new("rules-mounts");
    let mount = mount(&sandbox, "lightning-fsdp");
    fs::create_dir(mount.join("a.ckpt")).expect("mkdir");
    let other = Sandbox::on_host("rules-other", "other");
    let point = other.mkdir("other");
    let refused = other.run([
        "mount".as_ref(),
        "-o".as_ref(),
        "rules=lightning-fsdp".as_ref(),
        mount.backing().as_os_str(),
        point.as_os_str(),
    ]);
    assert_ne!(refused.code, 0);
    println!("{}", refused.stderr);
    fs::write(mount.join("a.ckpt/meta.pt"), [1; 500]).expect("write");
    assert_eq!(commits(&mount, "lightning-fsdp"), 1);
}

/// Proves S-rule-2.
#[test]
fn regression_an_exec_that_closes_the_file_completes_the_checkpoint() {
    let sandbox = Sandbox::new("rules-exec");
    let mount = mount(&sandbox, "torch");
    // Python opens each file with O_CLOEXEC.
    let program = "
import os
file = open('a.pt', 'w')
file.write('state')
file.flush()
os.execv('/bin/true', ['true'])
";
    let mut command = Command::new("python3");
    let command = command.args(["-c", program]).current_dir(mount.path());
    let mut child = command.spawn().expect("start python3");
    let status = wait_child(&mut child, LIMIT);
    assert!(status.is_some_and(|status| status.success()), "{status:?}");
    wait_until("a.pt is committed", LIMIT, || commits(&mount, "torch") == 1);
    assert_eq!(
        fs::read(mount.backing().join("a.pt")).expect("read"),
        b"state"
    );
}
