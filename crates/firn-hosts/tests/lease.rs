//! Leases in a real directory, whose lock outlives a holder because another process has the open file.

use std::time::Duration;

use firn_backing::{DirBacking, Volume};
use firn_hosts::host_dir::{find_host_dir, make_host_dir};
use firn_hosts::{Heartbeat, Holder, Lease, LeaseError, LeaseUse};

type Dir = <DirBacking as Volume>::Inode;

fn no_wait(_: Duration) {
    panic!("the lock settles it");
}

fn host_dir(dir: &std::path::Path) -> (DirBacking, Dir, Holder) {
    let base = DirBacking::open(dir).expect("open");
    let host = make_host_dir(&base, "n0").expect("mkdir");
    let me = Holder::this_process("n0").expect("a boot id");
    (base, host, me)
}

fn heartbeat_of(base: &DirBacking, dir: &Dir) -> Heartbeat {
    Heartbeat::read(base, dir)
        .expect("read")
        .expect("a heartbeat")
}

/// Proves S-crash-11.
#[test]
fn a_lease_that_another_process_keeps_is_resumed_with_its_uses() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (base, host, me) = host_dir(dir.path());
    let first = Lease::acquire(&base, &host, LeaseUse::Logs, &me, &mut no_wait).expect("take");
    let kept = first.descriptor(&base).expect("a descriptor");
    // The holder dies.
    drop(first);
    assert!(Lease::is_held(&base, &host).expect("look"));
    let other = Lease::acquire(&base, &host, LeaseUse::Logs, &me, &mut no_wait);
    assert!(matches!(other, Err(LeaseError::Held { holder: Some(_) })));
    let copy = kept.try_clone().expect("dup");
    let resumed = Lease::resume(&base, &host, LeaseUse::Tokens, &me, copy).expect("resume");
    let mut resumed = resumed.expect("it is the lease");
    let both = [LeaseUse::Tokens, LeaseUse::Logs].into();
    assert_eq!(heartbeat_of(&base, &host).uses(), Some(both));
    resumed.write_heartbeat(&base, None).expect("heartbeat");
    // The release ends the lock, although the open file is kept.
    resumed.release(&base, None).expect("release");
    assert!(!Lease::is_held(&base, &host).expect("look"));
    assert!(heartbeat_of(&base, &host).is_released());
    let next = Lease::acquire(&base, &host, LeaseUse::Lanes, &me, &mut no_wait).expect("take");
    // Another process has the lease now.
    let late = Lease::resume(&base, &host, LeaseUse::Logs, &me, kept).expect("resume");
    assert!(late.is_none());
    assert_eq!(
        heartbeat_of(&base, &host).uses(),
        Some([LeaseUse::Lanes].into())
    );
    drop(next);
}

#[test]
fn a_file_that_is_not_the_lease_any_more_is_not_resumed() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (base, host, me) = host_dir(dir.path());
    let first = Lease::acquire(&base, &host, LeaseUse::Logs, &me, &mut no_wait).expect("take");
    let kept = first.descriptor(&base).expect("a descriptor");
    drop(first);
    std::fs::remove_file(dir.path().join(".firn/host-n0/lease")).expect("unlink");
    let resumed = Lease::resume(&base, &host, LeaseUse::Logs, &me, kept).expect("resume");
    assert!(resumed.is_none());
    let found = find_host_dir(&base, "n0").expect("look").expect("a host");
    assert!(Heartbeat::read(&base, &found).expect("read").is_none());
}
