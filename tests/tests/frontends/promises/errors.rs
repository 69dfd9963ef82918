//! An errno of the backing: which callers are told of it, and how long firnd remembers it.

use std::fs;
use std::time::Duration;

use firn_tests::faultfs::FaultFs;
use firn_tests::fsops::{assert_same_bytes, read};
use firn_tests::mount::{SMALL, patient};
use firn_tests::random::bytes;
use firn_tests::{FirnMount, Hand, Sandbox, wait_until};
use rustix::io::Errno;

const LIMIT: Duration = Duration::from_secs(60);

/// Proves S-error-2.
#[test]
fn a_write_is_told_once_for_each_try_that_failed() {
    let sandbox = Sandbox::new("toldonce");
    let fault = FaultFs::new(&sandbox);
    let mount = FirnMount::over(
        &sandbox,
        fault.path(),
        &format!("{SMALL},close=held,drain-age=100ms"),
    );
    let mut file = Hand::open(&mount.join("file"));
    fault.fail_writes("EIO");
    file.write(1, 0, 10_000).expect("write");
    let tries = || sandbox.logs().matches("cannot drain a file").count();
    wait_until("a try has failed", LIMIT, || tries() > 0);
    assert_eq!(
        file.write(2, 10_000, 10_000),
        Err(Errno::IO),
        "at the next write"
    );
    // Told again only where another try has failed since.
    let mut known = tries();
    wait_until("a write is taken", LIMIT, || {
        let taken = file.write(2, 10_000, 10_000).is_ok();
        let now = tries();
        assert!(taken || now > known, "told twice of one try");
        known = now;
        taken
    });
    wait_until("a later try has failed", LIMIT, || tries() > known);
    assert_eq!(
        file.write(3, 20_000, 10_000),
        Err(Errno::IO),
        "again for a later try"
    );
    fault.fail_writes("");
    mount.wait("drained", &mount.join("file")).ok();
    let model = [bytes(1, 10_000), bytes(2, 10_000)].concat();
    assert_same_bytes(
        "in the backing",
        &read(&fault.source().join("file")),
        &model,
    );
    assert_eq!(file.close(), Ok(()));
    mount.umount();
}

/// Proves S-error-3.
#[test]
fn errors_stay_until_they_are_cleared_or_pushed_out_and_the_data_stays_anyway() {
    let sandbox = Sandbox::new("remembered");
    let fault = FaultFs::new(&sandbox);
    let mount = FirnMount::over(&sandbox, fault.path(), &patient("close=drain"));
    let name = |index: u64| format!("file{index}");
    fault.fail_writes("EIO");
    for index in 0..70 {
        // The errno of the close; std drops it.
        fs::write(mount.join(name(index)), bytes(index, 500)).ok();
    }
    let status = mount.status();
    assert_eq!(status.errors.len(), 64);
    assert!(
        status.errors.iter().any(|e| e.path == name(69)),
        "the newest is there"
    );
    assert!(
        status
            .errors
            .iter()
            .all(|e| e.errno == libc::EIO && e.repeats > 0 && e.pending)
    );
    let clear = [
        "status".as_ref(),
        "--clear-errors".as_ref(),
        mount.path().as_os_str(),
    ];
    fault.fail_writes("");
    mount.wait("drained", mount.path()).ok();
    let left = mount.status().errors;
    assert!(
        !left.is_empty() && left.iter().all(|e| !e.pending),
        "{left:?}"
    );
    sandbox.run(clear).ok();
    assert_eq!(mount.status().errors, []);

    fault.fail_writes("EIO");
    fs::write(mount.join("last"), bytes(99, 500)).ok();
    assert_eq!(mount.status().errors.len(), 1);
    sandbox.run(clear).ok();
    assert_eq!(
        mount.status().held_bytes,
        500,
        "clearing drops the note, not the data"
    );
    fault.fail_writes("");
    mount.wait("drained", mount.path()).ok();
    for (name, key) in (0..70)
        .map(|index| (name(index), index))
        .chain([("last".into(), 99)])
    {
        assert_same_bytes(&name, &read(&fault.source().join(&name)), &bytes(key, 500));
    }
    mount.umount();
}
