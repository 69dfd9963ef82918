//! The fixtures that need the helper program, without Firn.

use std::fs;

use firn_tests::Sandbox;
use firn_tests::faultfs::FaultFs;

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
