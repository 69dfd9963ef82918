//! What close(2) waits for and what it tells.

use std::fs::{self, File};
use std::io::Write;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use firn_tests::faultfs::FaultFs;
use firn_tests::fsops::{assert_same_bytes, close, read};
use firn_tests::mount::{SMALL, patient};
use firn_tests::random::bytes;
use firn_tests::sandbox::kill_alone;
use firn_tests::{FirnMount, Hand, Sandbox, run, wait_until};
use rustix::io::Errno;

const LIMIT: Duration = Duration::from_secs(60);

/// Proves S-close-3, S-close-7.
#[test]
fn every_close_of_a_shared_descriptor_waits_and_tells() {
    let sandbox = Sandbox::new("sharedclose");
    let fault = FaultFs::new(&sandbox);
    let mount = FirnMount::over(&sandbox, fault.path(), &patient("close=drain"));
    let mut file = File::create(mount.join("file")).expect("create");
    let copies = [(); 3].map(|()| file.try_clone().expect("dup"));
    fault.fail_writes("EIO");
    file.write_all(&bytes(1, 50_000)).expect("write");
    for copy in copies {
        assert_eq!(close(copy), Err(Errno::IO));
    }
    fault.fail_writes("");
    assert_eq!(close(file), Ok(()));
    assert_same_bytes(
        "after a close that said 0",
        &read(&fault.source().join("file")),
        &bytes(1, 50_000),
    );
    mount.umount();
}

/// Proves S-close-6, S-error-2, S-error-13.
#[test]
fn close_held_tells_of_an_earlier_try_that_failed() {
    let sandbox = Sandbox::new("heldtells");
    let fault = FaultFs::new(&sandbox);
    let mount = FirnMount::over(
        &sandbox,
        fault.path(),
        &format!("{SMALL},close=held,drain-age=100ms"),
    );
    let mut file = Hand::open(&mount.join("file"));
    fault.fail_writes("EIO");
    file.write(2, 0, 50_000).expect("write");
    wait_until("a try fails by itself", LIMIT, || {
        !mount.status().errors.is_empty()
    });
    assert_eq!(file.close(), Err(Errno::IO));
    fault.fail_writes("");
    wait_until("drained after the backing healed", LIMIT, || {
        mount.status().held_bytes == 0
    });
    assert_same_bytes(
        "in the backing",
        &read(&fault.source().join("file")),
        &bytes(2, 50_000),
    );
    mount.umount();
}

/// Proves S-close-1: with `drain=demand` a close is what demands the drain; the bytes stay in memory for readers.
#[test]
fn a_close_demands_the_drain_of_its_file() {
    let sandbox = Sandbox::new("demandclose");
    let mount = FirnMount::new(&sandbox, &patient("close=drain,drain=demand"));
    let mut closed = Hand::open(&mount.join("closed"));
    let mut kept = Hand::open(&mount.join("kept"));
    for file in [&mut closed, &mut kept] {
        file.write(3, 0, 100_000).expect("write");
    }
    assert_eq!(closed.close(), Ok(()));
    let in_backing = |name: &str| read(&mount.backing().join(name));
    assert_same_bytes("after close", &in_backing("closed"), &bytes(3, 100_000));
    assert_eq!(in_backing("kept"), b"");
    let status = mount.status();
    assert_eq!(status.held_bytes, 100_000, "of the file that is open");
    assert_eq!(kept.close(), Ok(()));
    mount.umount();
}

/// Firnd as it stands still, until this is dropped.
struct Stopped(u32);

impl Stopped {
    fn stop(pid: u32) -> Self {
        kill_alone(pid, libc::SIGSTOP);
        Self(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        kill_alone(self.0, libc::SIGCONT);
    }
}

/// Proves S-close-9: read by the kernel from the backing, or from its own pages.
#[test]
fn the_close_of_a_reader_waits_for_nothing() {
    for options in ["passthrough=auto", "passthrough=off"] {
        let sandbox = Sandbox::new("readerclose");
        let mount = FirnMount::new(&sandbox, &format!("{SMALL},{options}"));
        fs::write(mount.join("file"), bytes(5, 50_000)).expect("write");
        wait_until("drained", LIMIT, || mount.status().held_bytes == 0);
        let reader = File::open(mount.join("file")).expect("open");
        let stopped = Stopped::stop(mount.pid());
        let (closed, is_closed) = mpsc::channel();
        let closes = std::thread::spawn(move || {
            drop(reader);
            closed.send(())
        });
        let closed = is_closed.recv_timeout(LIMIT);
        drop(stopped);
        closes.join().expect("a reader").expect("send");
        assert_eq!(closed, Ok(()), "{options}: a close waits for firnd");
        mount.umount();
    }
}

/// Proves S-close-4.
#[test]
fn closing_a_file_without_a_name_drains_nothing() {
    let sandbox = Sandbox::new("namelessclose");
    let mount = FirnMount::new(&sandbox, &patient("close=drain"));
    // In a process of its own: a child that another test starts closes its copies of our descriptors.
    let mut file = Hand::open(&mount.join("file"));
    file.write(3, 0, 100_000).expect("write");
    fs::remove_file(mount.join("file")).expect("unlink");
    file.write(4, 100_000, 100_000)
        .expect("write without a name");
    assert_eq!(file.close(), Ok(()));
    // RELEASE, which gives the bytes up, comes after close(2) has returned.
    wait_until("nothing is held", LIMIT, || mount.status().held_bytes == 0);
    assert_eq!(mount.status().drain_bytes, 0);
    mount.umount();
}

/// Proves S-close-5.
#[test]
fn an_errno_without_a_waiter_is_in_the_status() {
    for (how, end) in [("exit", "os._exit(0)"), ("kill", "os.kill(os.getpid(), 9)")] {
        let sandbox = Sandbox::new(how);
        let fault = FaultFs::new(&sandbox);
        let mount = FirnMount::over(&sandbox, fault.path(), &patient("close=drain"));
        fault.fail_writes("EIO");
        let script = format!(
            "import os,sys\nfd=os.open(sys.argv[1], os.O_CREAT|os.O_WRONLY)\nos.write(fd, b'text')\n{end}"
        );
        let outcome = run(Command::new("python3")
            .args(["-c", &script])
            .arg(mount.join("file")));
        assert_eq!(
            outcome.code,
            if how == "exit" { 0 } else { 137 },
            "{outcome}"
        );
        wait_until("the status names the file", LIMIT, || {
            mount
                .status()
                .errors
                .iter()
                .any(|e| e.errno == libc::EIO && e.path == "file" && e.pending)
        });
        fault.fail_writes("");
        mount.wait("drained", mount.path()).ok();
        assert_eq!(read(&fault.source().join("file")), b"text");
        mount.umount();
    }
}
