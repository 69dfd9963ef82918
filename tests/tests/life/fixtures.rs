//! The file systems that tests and benchmarks work in, without Firn.

use std::fs::{self, File};
use std::io::Write;
use std::time::{Duration, Instant};

use firn_testfs::slow::{Network, Speed};
use firn_testfs::{Admit, mount_client};
use firn_tests::Sandbox;
use firn_tests::faultfs::FaultFs;
use rustix::fs::{FlockOperation, flock};

#[test]
fn a_healthy_backing_keeps_files_and_a_sick_one_says_eio() {
    let sandbox = Sandbox::new("faultfs");
    let mut fault = FaultFs::new(&sandbox);
    let path = fault.path().join("file");
    fs::write(&path, "text").expect("write while healthy");
    assert_eq!(
        fs::read(fault.source().join("file")).expect("read"),
        b"text"
    );
    fault.fail_writes("EIO");
    let error = fs::write(&path, "more").expect_err("a sick backing");
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    fault.fail_writes("");
    fs::write(&path, "more").expect("write after healing");
    fault.vanish();
    let error = fs::read(&path).expect_err("a vanished backing");
    assert_eq!(error.raw_os_error(), Some(libc::ENOTCONN));
    fault.start();
    assert_eq!(fs::read(&path).expect("read"), b"more");
}

#[test]
fn clients_of_one_server_see_each_others_bytes_and_locks() {
    let sandbox = Sandbox::new("clients");
    let source = sandbox.mkdir("source");
    let points = [sandbox.mkdir("one"), sandbox.mkdir("other")];
    let mount = |client: usize| mount_client(&source, &points[client], Admit, 4).expect("mount");
    let sessions = [mount(0), mount(1)];
    let open = |client: usize| {
        let mut options = File::options();
        let path = points[client].join("file");
        options.read(true).write(true).create(true).truncate(false);
        options.open(path).expect("open")
    };
    let one = open(0);
    let other = open(1);
    fs::write(points[0].join("file"), "of one").expect("write");
    let read = fs::read(points[1].join("file")).expect("read");
    assert_eq!(read, b"of one");

    let exclusive = FlockOperation::NonBlockingLockExclusive;
    flock(&one, exclusive).expect("lock");
    assert_eq!(flock(&other, exclusive), Err(rustix::io::Errno::AGAIN));
    drop(one);
    firn_tests::wait_until(
        "the lock ends with its file",
        std::time::Duration::from_secs(20),
        || flock(&other, exclusive).is_ok(),
    );
    drop(other);
    drop(sessions);
}

#[test]
fn a_slow_backing_takes_a_round_trip_for_each_write_and_its_time_for_the_bytes() {
    let sandbox = Sandbox::new("slowfs");
    let (source, point) = (sandbox.mkdir("source"), sandbox.mkdir("point"));
    let speed = Speed {
        round_trip: Duration::from_millis(10),
        bytes_per_s: 8 << 20,
    };
    let session = mount_client(&source, &point, Network::new(speed), 4).expect("mount");
    let mut file = File::create(point.join("file")).expect("create");
    let begin = Instant::now();
    for _ in 0..20 {
        file.write_all(b"small").expect("write");
    }
    assert!(begin.elapsed() >= 20 * speed.round_trip);
    let begin = Instant::now();
    file.write_all(&[1; 2 << 20]).expect("write");
    assert!(begin.elapsed() >= Duration::from_millis(250));
    drop(file);
    assert_eq!(
        fs::metadata(source.join("file")).expect("stat").len(),
        (2 << 20) + 100
    );
    drop(session);
}
