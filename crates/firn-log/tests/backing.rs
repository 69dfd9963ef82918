//! The log layout as a backing: what every backing promises, and beside a plain directory.

use std::ffi::OsStr;
use std::time::Duration;

use firn_backing::{SimBacking, suite};
use firn_log::{LogBacking, Setup};
use firn_transact::PlainBacking;

fn setup(host: &str) -> Setup {
    Setup {
        host: host.to_owned(),
        chooses: Box::new(|_: &OsStr| true),
        is_alive: Box::new(|host| Ok(host != "dead")),
        patience: Duration::ZERO,
        unit_bytes: 64 << 10,
    }
}

fn logged(disk: &SimBacking, host: &str) -> PlainBacking<LogBacking<SimBacking>> {
    PlainBacking::new(LogBacking::open(disk.clone(), setup(host)).expect("open"))
}

#[test]
fn it_does_what_every_backing_does() {
    suite::run(|| logged(&SimBacking::new(), "a"));
}

#[test]
fn it_does_what_a_plain_directory_does() {
    for seed in 0..25 {
        let plain = SimBacking::new();
        suite::differential::run(&logged(&SimBacking::new(), "a"), &plain, seed, 300);
    }
}
