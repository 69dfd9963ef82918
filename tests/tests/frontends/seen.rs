//! What a mount lets see: failed requests, decisions of the drain and steps of transactions, in the log, the status
//! and the metrics; names with control characters wherever a person reads them.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::time::Duration;

use firn_tests::faultfs::FaultFs;
use firn_tests::mount::{SMALL, patient};
use firn_tests::{FirnMount, FsKind, LoopImage, Sandbox, wait_until};
use rustix::io::Errno;

const LIMIT: Duration = Duration::from_secs(60);
/// A name that would clear the screen, forge a line and turn what follows it.
const HOSTILE: &str = "a\x1b[2J\nfirn: forged \u{202e}txt\\";
/// How it is shown.
const SHOWN: &str = r"a\x1b[2J\nfirn: forged \u{202e}txt\\";

/// Lines of the log that hold all of `words`.
fn lines(sandbox: &Sandbox, words: &[&str]) -> usize {
    let logs = sandbox.logs();
    logs.lines()
        .filter(|line| words.iter().all(|word| line.contains(word)))
        .count()
}

/// Proves S-seen-6.
#[test]
fn the_process_that_serves_a_mount_is_called_firnd() {
    let sandbox = Sandbox::new("seen-name");
    let mount = FirnMount::new(&sandbox, SMALL);
    let name = fs::read_to_string(format!("/proc/{}/comm", mount.pid())).expect("its name");
    assert_eq!(name, "firnd\n");
}

/// Takes a directory away that is not empty, which the kernel leaves to the file system.
fn fail_to_remove(mount: &FirnMount<'_>, times: usize) {
    fs::create_dir(mount.join("full")).expect("mkdir");
    fs::write(mount.join("full/file"), "text").expect("write");
    for _ in 0..times {
        let error = fs::remove_dir(mount.join("full")).expect_err("it is not empty");
        assert_eq!(Errno::from_io_error(&error), Some(Errno::NOTEMPTY));
    }
}

/// Proves S-seen-1: a request that is slow can be followed.
#[test]
fn a_slow_request_is_logged_with_its_path_and_time() {
    let sandbox = Sandbox::new("slow");
    let fault = FaultFs::new(&sandbox);
    let options = patient("close=drain,log-level=debug");
    let mount = FirnMount::over(&sandbox, fault.path(), &options);
    fault.hang("write", "file");
    let file = mount.join("file");
    let closes = std::thread::spawn(move || fs::write(file, "text"));
    wait_until("the drain hangs", LIMIT, || fault.hung_count() > 0);
    // Longer than what counts as slow.
    std::thread::sleep(Duration::from_millis(700));
    fault.let_go();
    closes.join().expect("a writer").expect("write");
    let slow = [
        "DEBUG request{",
        "operation=\"flush\"",
        "a request was slow",
        "path=file",
    ];
    // A process that another test starts at that moment has the descriptor too, until its exec, and flushes it.
    assert!(lines(&sandbox, &slow) >= 1, "{}", sandbox.logs());
    mount.umount();
}

/// Proves S-seen-1, S-seen-3.
#[test]
fn regression_each_failed_request_and_each_decision_of_the_drain_is_logged_once_and_counted() {
    let sandbox = Sandbox::new("seen");
    let mount = FirnMount::new(&sandbox, &format!("{SMALL},close=held,log-level=debug"));
    fail_to_remove(&mount, 3);
    mount.wait("drained", mount.path()).ok();
    let status = mount.status();
    assert_eq!(
        status.failed_requests.get("rmdir"),
        Some(&3),
        "{:?}",
        status.failed_requests
    );
    let failed = [
        "DEBUG",
        "a request failed",
        "operation=\"rmdir\"",
        "path=full ",
        "Directory not empty",
    ];
    assert_eq!(lines(&sandbox, &failed), 3, "{}", sandbox.logs());
    let [picked, written] =
        ["picked", "written"].map(|what| status.drain_decisions.get(what).copied());
    assert_eq!(
        (picked, written),
        (Some(1), Some(1)),
        "{:?}",
        status.drain_decisions
    );
    assert_eq!(
        lines(&sandbox, &["drain: picked", "path=full/file", "bytes=4"]),
        1,
        "{}",
        sandbox.logs()
    );
    assert_eq!(
        lines(&sandbox, &["drain: written", "path=full/file", "bytes=4"]),
        1
    );
    let metrics = sandbox
        .run([
            "status".as_ref(),
            "--metrics".as_ref(),
            mount.path().as_os_str(),
        ])
        .ok()
        .stdout;
    for sample in ["kind=\"rmdir\"} 3", "kind=\"picked\"} 1"] {
        assert!(metrics.contains(sample), "{sample} is not in\n{metrics}");
    }
    let shown = sandbox
        .run([
            "status".as_ref(),
            "--verbose".as_ref(),
            mount.path().as_os_str(),
        ])
        .ok()
        .stdout;
    assert!(
        shown.contains("rmdir 3") && shown.contains("picked 1"),
        "{shown}"
    );
    mount.umount();
}

/// Proves S-seen-4.
#[test]
fn at_the_usual_level_failures_are_counted_and_only_trouble_of_the_backing_is_logged_once() {
    let sandbox = Sandbox::new("usual");
    let image = LoopImage::new(&sandbox, FsKind::Ext4, 40);
    let mount = FirnMount::over(&sandbox, &image.mkdir("data"), SMALL);
    fail_to_remove(&mount, 2);
    mount.wait("durable", mount.path()).ok();
    wait_until(
        "firnd lets go of what it wrote",
        Duration::from_secs(20),
        || {
            std::process::Command::new("mount")
                .args(["-o", "remount,ro"])
                .arg(image.path())
                .output()
                .is_ok_and(|output| output.status.success())
        },
    );
    for name in ["one", "two"] {
        let error = fs::create_dir(mount.join(name)).expect_err("the backing is read-only");
        assert_eq!(Errno::from_io_error(&error), Some(Errno::ROFS));
    }
    let status = mount.status();
    let counts = ["rmdir", "mkdir"].map(|operation| status.failed_requests.get(operation).copied());
    assert_eq!(counts, [Some(2), Some(2)], "{:?}", status.failed_requests);
    assert_eq!(
        lines(
            &sandbox,
            &["WARN", "operation=\"mkdir\"", "Read-only file system"]
        ),
        1,
        "{}",
        sandbox.logs()
    );
    assert_eq!(lines(&sandbox, &["a request failed"]), 1);
    assert_eq!(lines(&sandbox, &["drain: "]), 0);
    image.remount("rw");
    mount.umount();
}

/// Proves S-seen-1, S-seen-3.
#[test]
fn regression_each_step_of_a_transaction_is_logged_once_and_counted() {
    let sandbox = Sandbox::new("steps");
    let mount = FirnMount::new(&sandbox, &patient("drain=commit,log-level=debug"));
    let firn = |args: &[&str]| {
        let args = args
            .iter()
            .map(OsStr::new)
            .chain([mount.path().as_os_str()]);
        sandbox.run(args).ok();
    };
    firn(&["begin"]);
    fs::write(mount.join("kept"), "text").expect("write");
    firn(&["prepare", "--id", "7"]);
    firn(&["commit", "--id", "7"]);
    firn(&["begin"]);
    fs::write(mount.join("dropped"), "text").expect("write");
    firn(&["abort"]);
    let steps = mount.status().transaction_steps;
    let expected = [
        ("begin", 2),
        ("prepared", 1),
        ("decided", 1),
        ("applied", 1),
        ("ended", 2),
        ("undone", 1),
    ];
    for (step, count) in expected {
        assert_eq!(steps.get(step), Some(&count), "{step}: {steps:?}");
        assert_eq!(
            lines(&sandbox, &["DEBUG", &format!("step=\"{step}\"")]),
            count as usize,
            "{}",
            sandbox.logs()
        );
    }
    // Begin twice, prepare, abort; the commit has nothing more to wait for.
    let turns: BTreeMap<_, _> = steps
        .iter()
        .filter(|(step, _)| ["quiesce", "drained"].contains(&step.as_str()))
        .collect();
    assert!(
        turns.len() == 2 && turns.values().all(|count| **count == 4),
        "{steps:?}"
    );
    assert_eq!(
        lines(
            &sandbox,
            &["step=\"decided\"", "scope=the whole mount", "id=Some(7)"]
        ),
        1
    );
    mount.umount();
}

/// Proves S-seen-2.
#[test]
fn regression_no_name_steers_the_terminal_of_who_reads_it() {
    let sandbox = Sandbox::new("hostile");
    let mount = FirnMount::new(&sandbox, &patient("close=held,log-level=debug"));
    fs::write(mount.join(HOSTILE), "text").expect("write");
    fs::create_dir_all(mount.join("dir").join(HOSTILE)).expect("mkdir");
    fs::remove_dir(mount.join("dir")).expect_err("it is not empty");
    fs::metadata(mount.join(HOSTILE).join("x")).expect_err("that is a file");
    fs::metadata(mount.join("dir").join(HOSTILE).join("missing")).expect_err("there is none");
    let run = |args: &[&str], path: &Path| {
        let outcome = sandbox.run(args.iter().map(OsStr::new).chain([path.as_os_str()]));
        let said = format!("{}{}", outcome.stdout, outcome.stderr);
        (said, outcome)
    };
    let check = |text: &str| {
        assert!(
            !text.contains('\x1b') && !text.contains('\u{202e}'),
            "{text:?}"
        );
        assert!(
            !text.lines().any(|line| line.starts_with("firn: forged")),
            "{text:?}"
        );
    };
    let (said, _) = run(&["ls"], mount.path());
    check(&said);
    assert!(said.contains(SHOWN), "{said}");
    for args in [
        &["status"][..],
        &["wait"],
        &["evict"],
        &["chunks"],
        &["umount"],
        &["mount", "/no/such"],
        &["recover"],
    ] {
        let (said, _) = run(args, &mount.join(HOSTILE).join("missing"));
        check(&said);
    }
    let (_, listed) = run(&["ls", "--json"], mount.path());
    let listed = listed.json();
    let paths: Vec<_> = listed
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|file| file["path"].as_str())
        .collect();
    assert_eq!(paths, [HOSTILE], "JSON has the exact name");
    mount.wait("drained", mount.path()).ok();
    let log = sandbox.logs();
    check(&log);
    assert!(log.contains(&format!("path={SHOWN} ")), "{log}");
    assert!(log.contains(&format!("path=dir/{SHOWN}/missing")), "{log}");
    mount.umount();
}

/// What the system log at `socket` was sent until now.
fn messages(socket: &UnixDatagram) -> Vec<String> {
    socket.set_nonblocking(true).expect("a socket");
    let mut buffer = vec![0; 1 << 16];
    std::iter::from_fn(|| {
        socket
            .recv(&mut buffer)
            .ok()
            .map(|len| buffer[..len].to_vec())
    })
    .map(|message| String::from_utf8(message).expect("text"))
    .collect()
}

/// Proves S-seen-8.
#[test]
fn the_system_log_gets_errors_warnings_and_what_a_mount_does_and_no_requests() {
    let sandbox = Sandbox::new("seen-system");
    let fault = FaultFs::new(&sandbox);
    let path = sandbox.join("system-log");
    let system_log = UnixDatagram::bind(&path).expect("a socket");
    let log = format!("log-level=debug,system-log={}", path.display());
    let options = format!("{SMALL},drain-age=100ms,close=held,{log}");
    let mount = FirnMount::over(&sandbox, fault.path(), &options);
    let (pid, mount_point) = (mount.pid(), mount.path().to_owned());
    fault.fail_writes("EIO");
    fs::write(mount.join("file"), "text").expect("write");
    let mut found = messages(&system_log);
    wait_until("a warning is there", LIMIT, || {
        found.extend(messages(&system_log));
        found.iter().any(|message| message.contains(": WARN "))
    });
    fault.fail_writes("");
    mount.umount();
    found.extend(messages(&system_log));
    // Facility daemon (3), severity info (6).
    let mounted = format!("<30>firnd[{pid}]: {}: INFO mounted", mount_point.display());
    let is_mounted = |message: &String| message.starts_with(&mounted);
    assert!(found.iter().any(is_mounted), "{found:#?}");
    assert!(
        found
            .iter()
            .any(|message| message.starts_with("<28>firnd[")),
        "{found:#?}"
    );
    assert!(
        found
            .last()
            .is_some_and(|last| last.ends_with("INFO ended"))
    );
    assert!(lines(&sandbox, &["DEBUG"]) > 0);
    assert!(!found.iter().any(|message| message.contains("DEBUG")));
}

/// Proves S-seen-8: firnd never waits for it.
#[test]
fn a_system_log_that_takes_nothing_delays_no_mount() {
    let sandbox = Sandbox::new("seen-full");
    let path = sandbox.join("system-log");
    let system_log = UnixDatagram::bind(&path).expect("a socket");
    let filler = UnixDatagram::unbound().expect("a socket");
    filler.set_nonblocking(true).expect("a socket");
    while filler.send_to(b"filler", &path).is_ok() {}
    let options = format!("{SMALL},system-log={}", path.display());
    let mount = FirnMount::new(&sandbox, &options);
    fs::write(mount.join("file"), "text").expect("write");
    mount.umount();
    assert!(lines(&sandbox, &["INFO", "ended"]) > 0);
    assert!(
        messages(&system_log)
            .iter()
            .all(|message| message == "filler")
    );
}
